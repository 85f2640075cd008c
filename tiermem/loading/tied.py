"""Weights that a model ties, and that its checkpoint stores twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tiermem.errors import CheckpointError
from tiermem.loading.sources import Source, wanted_by
from tiermem.loading.traced import StoredView
from tiermem.storage.checkpoint.folder import CheckpointFiles

_PART = 8 << 20


def untie(model: nn.Module, sources: Mapping[str, Source], files: CheckpointFiles) -> list[str]:
    """Unties weights whose values in the files differ.

    ``from_pretrained`` does so with a model that it has created, and reports that its configuration
    is wrong. A module of the user's own is not changed.

    Returns:
        The names that were untied.

    Raises:
        CheckpointError: If it is not a transformers model: it is unclear which value is meant.
        StorageError: If the files cannot be read.
    """
    wanted = wanted_by(model)
    first: dict[int, str] = {}
    parted = []
    for name in [name for name in wanted if name in sources]:
        other = first.setdefault(id(wanted[name]), name)
        if other == name or _same(sources[name], sources[other], files):
            continue
        tied = getattr(model, "all_tied_weights_keys", {})
        apart = next((each for each in (name, other) if each in tied), None)
        if apart is None:
            raise CheckpointError(
                f"{files.paths[0].parent}: {name!r} and {other!r} are one tensor in the model and "
                "have different values in the files; make them two in the model, or give names= "
                "that has one of the two for both"
            )
        tied.pop(apart)
        first[id(wanted[name])] = name if apart == other else other
        _part(model, apart)
        parted.append(apart)
    return parted


def _same(first: Source, second: Source, files: CheckpointFiles) -> bool:
    """Whether two sources have the same bytes; which are read for this."""
    if not isinstance(first, StoredView) or not isinstance(second, StoredView):
        return first is second
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    if first.runs == second.runs:
        return True
    for begin in range(0, first.nbytes, _PART):
        end = min(begin + _PART, first.nbytes)
        one, other = (
            files.read_view((end - begin,), torch.uint8, view.part(begin, end))
            for view in (first, second)
        )
        if not torch.equal(one, other):
            return False
    return True


def _part(model: Any, name: str) -> None:
    """Unties a name: gives it a separate parameter, without a value."""
    parent, _, own = name.rpartition(".")
    module = model.get_submodule(parent)
    param = module._parameters[own]
    empty = torch.empty_like(param, device="meta")
    module._parameters[own] = nn.Parameter(empty, requires_grad=param.requires_grad)
