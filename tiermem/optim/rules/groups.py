"""Parameter groups as users give them, and as an optimizer class completes them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tiermem.errors import ConfigError
from tiermem.optim.rules.probe import Make, settings_of
from tiermem.optim.rules.separable import copied

Params = nn.Module | Iterable[Any]


def with_defaults(
    make: Make, groups: list[dict[str, Any]], stepped_dtype: Callable[[torch.Tensor], torch.dtype]
) -> tuple[list[dict[str, Any]], torch.optim.Optimizer]:
    """Returns groups with every default filled in, as the class itself does.

    Args:
        make: Makes an optimizer of the class.
        groups: The groups.
        stepped_dtype: Returns the dtype of the stepped tensor of a parameter.

    Returns:
        The groups, and the optimizer over stand-ins that completed them.
    """
    stand_ins: dict[int, nn.Parameter] = {}
    for group in groups:
        for param in group["params"]:
            meta = torch.empty(param.shape, dtype=stepped_dtype(param), device="meta")
            stand_ins.setdefault(id(param), nn.Parameter(meta, param.requires_grad))
    shadow = [{**group, "params": [stand_ins[id(p)] for p in group["params"]]} for group in groups]
    with told_of_duplicates():
        try:
            optimizer = make(shadow)
        except (TypeError, ValueError):
            raise  # bad settings: torch's own message is best
        except Exception:  # a class that checks the device of its parameters
            optimizer = make([dict(group) for group in groups])
    filled = []
    for group, original in zip(optimizer.param_groups, groups, strict=True):
        filled.append({**group, "params": list(original["params"])})
    return filled, optimizer


def groups_of(params: Params) -> list[dict[str, Any]]:
    """Returns parameter groups as torch's own optimizers create them, without added settings.

    torch itself parses the argument (lists, generators, single tensors, pairs of name and
    parameter, groups of these), so it has the same meaning as in torch.

    Args:
        params: A module, parameters, or groups. Groups become the same dictionaries, as in
            torch; their ``"params"`` become lists.

    Raises:
        TypeError: If torch raises it, with its message.
        ValueError: Likewise.
    """
    given: Any = params.parameters() if isinstance(params, nn.Module) else params
    with torch._C.DisableTorchFunctionSubclass():  # it asks every parameter what it is
        return torch.optim.Optimizer(given, {}).param_groups


@contextmanager
def told_of_duplicates() -> Iterator[None]:
    """Suppresses torch's warning about duplicates, which :func:`groups_of` has already issued."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="optimizer contains a parameter group with dup")
        yield


def floating(name: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """Returns a dtype given as a setting.

    Raises:
        ConfigError: If it is not a dtype, or not a floating-point one.
    """
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    raise ConfigError(f"{name} must be a floating dtype such as torch.float32, not {dtype!r}")


def frozen_settings(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a copy of the groups' present settings; a scheduler may write the groups.

    A tensor learning rate may be written in place.
    """
    return [copied(settings_of(group)) for group in groups]
