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
    """Returns groups with every default filled in, as the class itself does it.

    Args:
        make: Makes an optimizer of the class.
        groups: The groups.
        stepped_dtype: Of what is stepped for a parameter.

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
            raise  # bad settings: torch's own message says it best
        except Exception:  # a class that looks at the device of its parameters
            optimizer = make([dict(group) for group in groups])
    filled = []
    for group, original in zip(optimizer.param_groups, groups, strict=True):
        filled.append({**group, "params": list(original["params"])})
    return filled, optimizer


def groups_of(params: Params) -> list[dict[str, Any]]:
    """Returns parameter groups as torch's own optimizers make them, without any settings added.

    torch itself reads what it is given (lists, generators, single tensors, pairs of name and
    parameter, groups of these), so all of that means here what it means there.

    Args:
        params: A module, parameters, or groups. Groups become these very dictionaries, as in
            torch; their ``"params"`` become lists.

    Raises:
        TypeError: Where torch raises it, in its words.
        ValueError: Likewise.
    """
    given: Any = params.parameters() if isinstance(params, nn.Module) else params
    with torch._C.DisableTorchFunctionSubclass():  # it asks every parameter what it is
        return torch.optim.Optimizer(given, {}).param_groups


@contextmanager
def told_of_duplicates() -> Iterator[None]:
    """Suppresses torch's warning of duplicates, which :func:`groups_of` has caused already."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="optimizer contains a parameter group with dup")
        yield


def floating(name: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """Returns a dtype that was given as a setting.

    Raises:
        ConfigError: If it is none, or not of floating numbers.
    """
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    raise ConfigError(f"{name} must be a floating dtype such as torch.float32, not {dtype!r}")


def frozen_settings(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the settings of groups as they are now; a scheduler may write the groups.

    A tensor learning rate is written in place.
    """
    return [copied(settings_of(group)) for group in groups]
