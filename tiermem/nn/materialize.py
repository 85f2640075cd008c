"""``with tier.materialize(...)``: managed parameters as ordinary tensors, for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tiermem.errors import ParameterError, StorageError
from tiermem.nn.group import Entry
from tiermem.nn.lazy import LazyTensor, is_gone, ordinary
from tiermem.nn.runtime import ModuleRuntime

Target = nn.Module | nn.Parameter | Iterable[nn.Parameter]


def entries_for(runtime: ModuleRuntime, target: Target) -> list[Entry]:
    """Returns the managed parameters that ``target`` names.

    Raises:
        ParameterError: If there is none among them.
    """
    if isinstance(target, nn.Module):
        wanted = list(target.parameters())
    elif isinstance(target, torch.Tensor):
        wanted = [target]  # type: ignore[list-item]
    else:
        wanted = list(target)
    ids = {id(param) for param in wanted}
    found = [e for g in runtime.groups for e in g.entries if id(e.param) in ids]
    if wanted and not found:
        raise ParameterError("none of these parameters is managed here; wrap their module first")
    return found


@contextmanager
def materialize(
    runtime: ModuleRuntime, target: Target, device: torch.device | None = None
) -> Iterator[None]:
    """Gives parameters and gradients as ordinary tensors, and takes changes back.

    Args:
        runtime: The modules' runtime.
        target: A module, a parameter, or several.
        device: Where the tensors are; None for host memory.

    Raises:
        ParameterError: At the end, if a parameter has another shape or dtype by then; its old
            value is kept, the others' changes are taken.
    """
    runtime.manager.guard()
    stranded, runtime.stranded = runtime.stranded, []
    _close(runtime, stranded)
    entries = [e for e in entries_for(runtime, target) if not e.materialized]
    place = device or torch.device("cpu")
    opened: list[Entry] = []
    try:
        _open(runtime, entries, place, opened)
        yield
    finally:
        _close(runtime, opened)


def _by_block(entries: list[Entry]) -> dict[int, list[Entry]]:
    found: dict[int, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.group.block.id, []).append(entry)
    return found


def _open(
    runtime: ModuleRuntime, entries: list[Entry], place: torch.device, opened: list[Entry]
) -> None:
    for members in _by_block(entries).values():
        group = members[0].group
        tensors = runtime.manager.read(group.block)
        shared: dict[int, torch.Tensor] = {}
        for entry in members:
            runtime.grads.sync(entry)
            gradient = runtime.grads.load(entry) if entry.has_grad else None
            own = entry.param.grad if gradient is None else gradient
            if entry.index not in shared:
                shared[entry.index] = tensors[entry.index].clone().to(place)
            entry.param.grad = None
            group.free(entry, shared[entry.index])
            opened.append(entry)
            if own is not None:
                entry.param.grad = own if is_gone(own) else ordinary(own, entry.param, place)


def _close(runtime: ModuleRuntime, opened: list[Entry]) -> None:
    """Takes everything back that can be; the rest stays ordinary, to be tried again later."""
    wrong: list[str] = []
    failed: StorageError | None = None
    for members in _by_block([e for e in opened if not e.group.freed]).values():
        try:
            _close_block(runtime, members, wrong)
        except StorageError as error:
            failed = failed or error
            runtime.stranded += [e for e in members if e.materialized]
    if failed is not None:
        raise failed
    if wrong:
        raise ParameterError(wrong[0])


def _close_block(runtime: ModuleRuntime, members: list[Entry], wrong: list[str]) -> None:
    group = members[0].group
    slot = runtime.manager.acquire(group.block)
    dirty = False
    gradients = []
    try:
        for entry in members:
            view = slot.views[entry.index]
            value = entry.param.data
            if value.shape != view.shape or value.dtype is not view.dtype:
                wrong.append(
                    f"parameter {entry.name!r} became {tuple(value.shape)} {value.dtype} inside "
                    f"materialize, it was {tuple(view.shape)} {view.dtype}; its old value is kept"
                )
            elif _differ(view, value):
                dirty = True
                with torch.no_grad():
                    view.copy_(value)
            gradients.append((entry, entry.param.grad))
            entry.param.grad = None
            group.recapture(entry)
        group.point_softly(dirty=False)  # a graph made inside may have saved the parameters
        group.rest()
    finally:
        runtime.manager.release(group.block, dirty=dirty)
    while gradients:
        entry, gradient = gradients[0]
        try:
            _take_gradient(runtime, entry, gradient)
        except BaseException:
            for entry, gradient in gradients:
                if gradient is not None and entry.param.grad is None:
                    entry.param.grad = ordinary(gradient, entry.param, entry.param.device)
            raise
        del gradients[0]


def _take_gradient(runtime: ModuleRuntime, entry: Entry, gradient: torch.Tensor | None) -> None:
    if gradient is None:
        if entry.has_grad:
            runtime.grads.clear(entry)
    elif is_gone(gradient):
        entry.param.grad = gradient
    elif (
        (entry.unit is not None or entry.param.requires_grad)  # else it has no place for one
        and gradient.layout is torch.strided
        and gradient.shape == entry.param.shape
        and gradient.dtype is entry.param.dtype
        and not isinstance(gradient, LazyTensor)
    ):
        runtime.grads.store(entry, gradient.detach())
    else:
        entry.param.grad = ordinary(gradient, entry.param, entry.param.device)


def _differ(view: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype differ in any bit."""
    mine = view.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    theirs = value.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return not torch.equal(mine, theirs)
