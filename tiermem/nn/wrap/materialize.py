"""``with tier.materialize(...)``: managed parameters as ordinary tensors, temporarily."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tiermem.errors import REFUSALS, ConfigError, ParameterError, StorageError
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.group import Group
from tiermem.nn.groups.replaced import laid_alike
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.nn.tensors.lazy import LazyTensor, is_gone, ordinary
from tiermem.nn.tensors.shells import insides

_NOT_READ = object()

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
        try:
            wanted = list(target)
        except TypeError as error:
            raise ConfigError(
                f"materialize takes a module, a parameter or several, not {target!r}"
            ) from error
    ids = {id(tensor) for param in wanted for _, tensor in insides(param)}
    found = [e for g in runtime.groups for e in g.entries if id(e.param) in ids]
    if wanted and not found:
        raise ParameterError("none of these parameters is managed here; wrap their module first")
    return found


class Opened:
    """One parameter that a user has as an ordinary tensor.

    Attributes:
        entry: The parameter.
        before: Its ``grad`` before.
        gradient: Its ``grad`` at the end, once that has been read.
    """

    __slots__ = ("before", "entry", "gradient")

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.before: Any = entry.param.grad
        self.gradient: Any = _NOT_READ


class Lending:
    """The parameters that one ``with`` block has; registered with the runtime, so none is lost.

    Attributes:
        opened: Parameters still to be taken back.
        over: Whether the block has been left.
    """

    __slots__ = ("_block", "opened", "over")

    def __init__(self, block: _Block) -> None:
        self._block = weakref.ref(block)
        self.opened: list[Opened] = []
        self.over = False

    @property
    def left(self) -> bool:
        """Whether the block has been left, maybe by an exception in the very first line after."""
        return self.over or self._block() is None


class _Block:
    """Exists as long as a ``with`` block is not left."""

    __slots__ = ("__weakref__",)


@contextmanager
def materialize(
    runtime: ModuleRuntime, target: Target, device: torch.device | None = None
) -> Iterator[None]:
    """Provides parameters and gradients as ordinary tensors, and writes changes back.

    Args:
        runtime: The modules' runtime.
        target: A module, a parameter, or several.
        device: Where the tensors are; None for host memory.

    Raises:
        ParameterError: At the end, if a parameter has another shape, dtype or other strides by
            then; its old value is kept, the others' changes are written.
    """
    if runtime.manager.gate.unsure:
        runtime.repair()
    runtime.manager.gate.guard()
    block = _Block()
    lending = Lending(block)
    try:
        take_back_left(runtime)
        entries = [e for e in entries_for(runtime, target) if not e.materialized]
        runtime.models.lendings.append(lending)
        _open(runtime, entries, device or torch.device("cpu"), lending.opened)
    except BaseException as error:
        if not isinstance(error, REFUSALS):
            runtime.manager.cut_short()
        _put_back(lending.opened)
        if lending in runtime.models.lendings:
            runtime.models.lendings.remove(lending)
        raise
    try:
        yield
    finally:
        lending.over = True
        try:
            _close(runtime, lending)
        except REFUSALS:
            raise
        except BaseException:
            runtime.manager.gate.torn = runtime.manager.gate.unsure = True
            raise


def take_back_left(runtime: ModuleRuntime) -> None:
    """Writes back what a failed disk, or an exception, prevented from being written back.

    Raises:
        StorageError: If the disk still fails.
        ParameterError: If a parameter has another shape, dtype or other strides by now.
    """
    for lending in list(runtime.models.lendings):
        if lending.left:
            _close(runtime, lending)


def _by_block(entries: list[Entry]) -> dict[int, list[Entry]]:
    found: dict[int, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.group.block.id, []).append(entry)
    return found


def _open(
    runtime: ModuleRuntime, entries: list[Entry], place: torch.device, opened: list[Opened]
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
            opened.append(Opened(entry))
            entry.param.grad = None
            group.pointing.free(entry, shared[entry.index])
            if own is not None:
                entry.param.grad = own if is_gone(own) else ordinary(own, entry.param, place)
        group.follow()


def _put_back(opened: list[Opened]) -> None:
    """Takes back what was opened, before user code has seen any of it."""
    while opened:
        use = opened[-1]
        with torch._C.DisableTorchFunctionSubclass():
            if use.entry.materialized:
                use.entry.param.grad = None
                use.entry.group.recapture(use.entry)
                use.entry.group.follow()
            use.entry.param.grad = use.before
        opened.pop()


def _close(runtime: ModuleRuntime, lending: Lending) -> None:
    """Takes back everything that is possible; the rest stays ordinary, to be retried later."""
    wrong: list[str] = []
    failed: StorageError | None = None
    opened = lending.opened
    for use in [use for use in opened if use.entry.group.freed]:
        opened.remove(use)
    for members in _by_block([use.entry for use in opened]).values():
        try:
            _close_block(runtime, lending, members[0].group, wrong)
        except StorageError as error:
            failed = failed or error
    if failed is not None:
        raise failed
    if lending in runtime.models.lendings:
        runtime.models.lendings.remove(lending)
    if wrong:
        raise ParameterError(wrong[0])


def _close_block(runtime: ModuleRuntime, lending: Lending, group: Group, wrong: list[str]) -> None:
    """Takes back the tensors of one block; if interrupted, it can be called again."""
    mine = [use for use in lending.opened if use.entry.group is group]
    slot = None if group.in_place else runtime.manager.acquire(group.block)
    views = group.lender.lend_in_place(group) if slot is None else slot.views
    dirty = False
    try:
        for use in mine:
            entry = use.entry
            if not entry.materialized:
                continue
            view = views[entry.index]
            value = entry.param.data
            if value.shape != view.shape or value.dtype is not view.dtype:
                wrong.append(
                    f"parameter {entry.name!r} became {tuple(value.shape)} {value.dtype} inside "
                    f"materialize, it was {tuple(view.shape)} {view.dtype}; its old value is kept, "
                    "and what else was changed with it (a config, other modules) is as it is now: "
                    "call tier.unwrap(model), change it again, and wrap it anew"
                )
            elif not laid_alike(value, view.stride()):
                wrong.append(
                    f"parameter {entry.name!r} has strides {value.stride()} since materialize, its "
                    f"memory has {view.stride()}; its old value is kept: where only the values are "
                    "meant, use `.data.copy_(value)`, with which plain torch keeps its strides as "
                    "well, else call tier.unwrap(model), change it again, and wrap it anew"
                )
            elif _differ(view, value):
                dirty = True
                with torch.no_grad():
                    view.copy_(value)
            if use.gradient is _NOT_READ:
                use.gradient = entry.param.grad
            entry.param.grad = None
            group.recapture(entry)
            runtime.backward.incoming.track(entry)  # it may have been unfrozen meanwhile
        group.follow()
        if slot is not None:
            group.point_softly(dirty=False)  # a graph recorded inside may have saved the parameters
            with runtime.manager.lock:
                if runtime.manager.parts.table.all_fit:  # otherwise others could not be fetched
                    slot.saved = group.pointing.tensors
                group.rest()
    finally:
        if slot is None:
            group.lender.lent_in_place(group)
        else:
            runtime.manager.release(group.block, dirty=dirty)
    for use in mine:
        try:
            _take_gradient(runtime, use.entry, use.gradient)
        except StorageError:
            for left in mine:
                if left in lending.opened:
                    _show_gradient(left)
            raise
        lending.opened.remove(use)


def _show_gradient(use: Opened) -> None:
    """Makes a gradient an ordinary tensor, since it could not be stored in the tiers."""
    param = use.entry.param
    if use.gradient is not None and param.grad is None:
        param.grad = ordinary(use.gradient, param, param.device)


def _take_gradient(runtime: ModuleRuntime, entry: Entry, gradient: torch.Tensor | None) -> None:
    if gradient is None:
        if entry.has_grad:
            runtime.grads.clear(entry)
    elif is_gone(gradient):
        entry.param.grad = gradient
    elif (
        (entry.unit is not None or entry.param.requires_grad)  # otherwise it has no home for one
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
