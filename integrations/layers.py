"""The layers of a model: finds them, and makes them recompute in backward."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tiermem import ConfigError


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Returns the repeated layers of a model, in the order of its modules.

    They are the children of the module lists and sequentials that hold more than one module of
    the same class, outermost first; what is inside a layer is a part of it. Modules without
    modules in them (a linear layer) count only where the model has no others that repeat.
    """
    return _repeated(model, composite=True) or _repeated(model, composite=False)


def _repeated(model: nn.Module, *, composite: bool) -> list[nn.Module]:
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = [child for child in module if any(True for _ in child.parameters())]
        kinds = Counter(type(child) for child in children)
        for child in children:
            if kinds[type(child)] > 1 and (not composite or any(True for _ in child.children())):
                found.append(child)
                inside.update(map(id, child.modules()))
    return found


def recompute_layers(model: nn.Module) -> int:
    """Turns on activation checkpointing layer by layer.

    On a model with ``gradient_checkpointing_enable``, as those of transformers, that is called;
    in others the calls of each layer go through :func:`torch.utils.checkpoint.checkpoint`
    (non-reentrant). Names of parameters and modules stay.

    Args:
        model: Any module that is not wrapped by tiermem yet.

    Returns:
        How many layers recompute.

    Raises:
        ConfigError: If it has no repeated layers.
    """
    layers = layers_of(model)
    if not layers:
        raise ConfigError(
            f"recomputation works layer by layer, and {type(model).__name__} has no list of "
            "layers of one class; turn it off, or put torch.utils.checkpoint into the model"
        )
    enable = _checkpointing(model, "enable")
    if enable is not None:
        enable({"use_reentrant": False})
    else:
        for layer in layers:
            if not hasattr(type(layer), "_not_recomputing"):
                layer.__class__ = _recomputing(type(layer))  # type: ignore[arg-type, unused-ignore]
    return len(layers)


def restore_layers(model: nn.Module) -> None:
    """Undoes :func:`recompute_layers`."""
    disable = _checkpointing(model, "disable")
    if disable is not None:
        disable()
        return
    for module in model.modules():
        plain = getattr(type(module), "_not_recomputing", None)
        if plain is not None:
            module.__class__ = plain


def _checkpointing(model: nn.Module, what: str) -> Callable[..., Any] | None:
    """Returns the method by which a model of transformers enables or disables it, if it is one."""
    names = (
        f"{kind}_checkpointing_{what}" for kind in ("activation", "gradient")
    )  # the later first
    found = (getattr(model, name, None) for name in names)
    return next((method for method in found if callable(method)), None)


@functools.cache
def _recomputing(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns a class whose calls are recomputed in backward, and which is ``cls`` otherwise."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(cls.__call__, self)
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {**names, "__call__": call, "_not_recomputing": cls})
