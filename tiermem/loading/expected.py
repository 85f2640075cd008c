"""Tensors of a model of transformers that its checkpoints do not have, and others that they do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tiermem.loading.untouched import Untouched

HAS_VALUES = "_is_hf_initialized"
"""The attribute by which ``transformers.initialization`` (release 5) knows what has values."""


def saved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the buffers of a model that its checkpoints have, tied ones by each name."""
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def complained_of(
    model: Any, missing: Iterable[str] = (), unexpected: Iterable[str] = ()
) -> set[str]:
    """Returns those of the names of which transformers would warn as well."""
    info = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected))
    model._adjust_missing_and_unexpected_keys(info)
    return set(info.missing_keys) | set(info.unexpected_keys)


def make_expected(model: Any, missing: Sequence[str], others: Sequence[str] = ()) -> list[str]:
    """Gives tensors that no checkpoint of this class has their values, as ``from_pretrained`` does.

    Such are tables of positions that the model computes. The random generator is left as that
    leaves it, too: some classes draw numbers for tensors that have values, and drop them.

    Args:
        model: A model of transformers.
        missing: Names of what the files do not have.
        others: Names of buffers that are in no checkpoint and are to be made anew.

    Returns:
        The names that are left: those of which transformers would warn.
    """
    left = complained_of(model, missing=missing)
    made = [name for name in missing if name not in left]
    blank: dict[int, torch.Tensor] = {}
    for name in made:
        parent, _, own = name.rpartition(".")
        module = model.get_submodule(parent)
        tensors = module._parameters if own in module._parameters else module._buffers
        tensor = tensors[own]
        if tensor.is_meta:
            tensors[own] = blank.setdefault(id(tensor), _blank(tensor))
    untouched = Untouched(model, {})  # on the meta device nothing would be drawn
    try:
        with _all_have_values_but(model, {*made, *others}):
            model.initialize_weights()
    finally:
        untouched.undo()
    return [name for name in missing if name in left]


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    """Returns memory for a tensor on the meta device."""
    data = torch.empty_like(tensor, device="cpu")
    return nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


@contextmanager
def _all_have_values_but(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Lets transformers give values to some tensors alone."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    tensors |= dict(model.named_buffers())
    for module in model.modules():
        module.__dict__.pop(HAS_VALUES, None)
    for name, tensor in tensors.items():
        if name not in names:
            setattr(tensor, HAS_VALUES, True)
    try:
        yield
    finally:
        for tensor in tensors.values():
            tensor.__dict__.pop(HAS_VALUES, None)
