"""Gradients in the tiers: packed into blocks, accumulated, read lazily through stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress, repeat
from operator import attrgetter, eq, gt, itemgetter
from sys import getrefcount
from typing import Any
from weakref import getweakrefcount

import torch

from tiermem.core.alike import (
    all_are,
    all_none,
    all_same,
    any_none,
    set_all,
    set_each,
    without_none,
)
from tiermem.errors import CapacityError
from tiermem.nn.compat.entrances import inside
from tiermem.nn.compat.quiet import unrecorded
from tiermem.nn.compat.shapes import follow
from tiermem.nn.compat.weakly import Weak
from tiermem.nn.groups.above import Passes, Watcher
from tiermem.nn.groups.clipping import Clippable
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.gradhomes import GradHomes
from tiermem.nn.groups.gradnorms import GradNorms
from tiermem.nn.groups.gradunit import Change, GradRun, GradUnit, make_first
from tiermem.nn.groups.need import beside_optimizer, check_gradients
from tiermem.nn.tensors.lazy import (
    ALONE,
    ALONE_IN_LIST,
    LazyTensor,
    Ways,
    flush,
    is_elsewhere,
    is_gone,
    is_held,
    is_viewed,
    orphan,
    refresh,
    stand_ins_of,
)
from tiermem.runtime.memory.slots import Slot

_param, _grad = attrgetter("param"), attrgetter("param.grad")
_lazy, _ways, _marks = attrgetter("lazy"), attrgetter("ways"), attrgetter("marks")
_unit, _unit_index = attrgetter("unit"), attrgetter("unit_index")
_has_grad, _displaced = attrgetter("has_grad"), attrgetter("displaced")
_dtype, _own_dtype = attrgetter("dtype"), attrgetter("placeholder.dtype")
_attributes, _kept = attrgetter("__dict__"), attrgetter("_kept")
_first, _second = itemgetter(0), itemgetter(1)
_references: Callable[[Any], int] = torch._C.TensorBase._use_count  # type: ignore[attr-defined]


class GradStore:
    """Keeps gradients in the tiers and gives them back.

    Attributes:
        manager: The manager of the blocks.
        homes: Homes and dtypes of gradients.
        norms: Norms of gradients.
        watchers: Notified of every gradient that arrives.
        host_shares: Functions that return whether the host performs steps of an optimizer by now.
        displaced: Parameters whose stand-ins were removed for gradients that have not arrived yet.
        kept_for: By block of gradients, the function that takes them over before they are cleared.
    """

    def __init__(self, runtime: Passes) -> None:
        """Serves ``runtime``."""
        self._runtime = runtime
        self.manager = runtime.manager
        self.norms = GradNorms(runtime.manager.parts.device)
        self._deferred = runtime.manager.parts.deferred
        self.displaced: list[Entry] = []
        self.homes = GradHomes(runtime, self.sync)
        self._dtypes = self.homes.dtypes
        self.watchers: list[Watcher] = []
        self.host_shares: list[Callable[[], bool]] = []
        self.kept_for: dict[int, Callable[[], None]] = {}
        self._stored: dict[int, GradUnit] = {}  # units that may have gradients, by id

    def forget(self, entries: Iterable[Entry]) -> None:
        """Forgets the gradients of parameters, which leave the tiers."""
        entries = list(entries)
        gone = {id(entry) for entry in entries}
        for key, unit in list(self._stored.items()):
            if any(id(entry) in gone for entry in unit.entries):
                del self._stored[key]
        for entry in entries:
            self._dtypes.pop(id(entry.param), None)
            self.norms.forget(entry)

    def lay_out(self, entry: Entry, *, whole: bool) -> None:
        """Keeps the gradient of a parameter in one block, or in runs, from now on.

        Args:
            entry: The parameter.
            whole: Whether in one block; otherwise in runs, if that takes less HBM.

        Raises:
            CapacityError: If there is no home for it.
        """
        entry.whole, unit = whole, entry.unit
        if unit is None or whole == (not unit.runs) or len(unit.entries) > 1:
            return
        self.sync(entry)
        self.pay(unit)
        value = self.load(entry, self.homes.dtype_of(entry)) if entry.has_grad else None
        if value is not None:
            self.clear(entry)
        self.homes.unreserve([unit])
        try:
            self.homes.reserve([entry.group])
        finally:
            if value is not None:
                entry.param.grad = value.to(entry.param.dtype)
                if entry.unit is not None:
                    self.store(entry, value)

    @property
    def has_any(self) -> bool:
        """Whether any gradient may be in the tiers."""
        return bool(self._stored)

    @property
    def in_own_dtypes(self) -> bool:
        """Whether every gradient is kept in the dtype of its parameter."""
        return not self._dtypes

    def is_used(self, entry: Entry) -> bool:
        """Whether a step has used a gradient already, and has to be repeated if that changes."""
        return any(watcher.has_used(entry) for watcher in self.watchers)

    def await_change(self, unit: GradUnit, entries: Sequence[Entry], change: Change) -> None:
        """Adds a change that is applied to stored gradients when they are next in HBM."""
        unit.await_change(entries, change)
        for entry in entries:
            for watcher in self.watchers:
                watcher.edited(entry)

    def change_now(self, unit: GradUnit, entries: Sequence[Entry], change: Change) -> None:
        """Applies a change to stored gradients of a unit, in one call, and measures them again.

        Raises:
            CapacityError: If HBM has no room for them.
        """
        self.await_change(unit, entries, change)
        try:
            for part in unit.parts:
                slot = self._open_beside(part)
                try:
                    if part is unit:
                        with unrecorded():
                            self.norms.take_changed(entries, slot)
                finally:
                    self.manager.release(part.block)
            if unit.runs:
                self.show(entries[0])
        except BaseException:
            unit.forget_change(change)  # made again it would be made twice
            raise

    def clear(self, *entries: Entry) -> None:
        """Clears gradients of parameters; references to them keep their values."""
        units = without_none([*dict.fromkeys(map(_unit, entries))])
        for unit in units:
            self.pay(unit)
        self.norms.invalidate(entries)
        try:
            with torch._C.DisableTorchFunctionSubclass():  # once, not for every access
                for entry in () if self._clear_unheld(entries) else entries:
                    stand_in: Any = entry.lazy
                    if isinstance(stand_in, LazyTensor):
                        if entry.param.grad is stand_in:
                            entry.param.grad = None
                        # is_held and is_elsewhere, in line
                        held = getrefcount(stand_in) > ALONE + 1 or stand_in._use_count() > 1
                        if held and entry.has_grad:
                            orphan(stand_in)
                    entry.lazy = None  # after other references to it have got the value
                    entry.has_grad = False
        finally:
            for unit in units:
                self._clear_if_empty(unit)

    @staticmethod
    def _clear_unheld(entries: Sequence[Entry]) -> bool:
        """Clears gradients if there are no references to their stand-ins; returns if it did."""
        stand_ins = [*map(_lazy, entries)]
        if not all_are(map(type, stand_ins), LazyTensor):
            return False
        if not all_none(map(_grad, entries)):
            if not all_same(map(_grad, entries), stand_ins):
                return False
            set_all(map(_param, entries), "grad", None)
        counts, uses = map(getrefcount, stand_ins), map(_references, stand_ins)
        if any(map(gt, counts, repeat(ALONE_IN_LIST + 1))) or any(map(gt, uses, repeat(1))):
            return False
        ways = [*map(_ways, entries)]
        set_all(entries, "has_grad", False)  # first: after an interrupt here, this is repeated
        set_all(entries, "lazy", None)
        if any_none(ways) or any(map(getweakrefcount, stand_ins)):
            return True
        marks = map(len, map(_attributes, stand_ins))
        if all(map(eq, marks, map(_marks, ways))):
            set_each(ways, "spare", stand_ins)
        return True

    def _clear_if_empty(self, unit: GradUnit) -> None:
        """Drops the blocks of a unit that has no gradient any more."""
        if any(map(_has_grad, unit.entries)):
            return
        unit.forget_changes()
        for block in unit.blocks:
            take_over = self.kept_for.get(block.id)
            if take_over is not None:
                take_over()
            self.manager.discard(block)

    def drop_forgotten(self) -> None:
        """Clears gradients that users have set to None (``model.zero_grad()``).

        Otherwise they would be written home to make room, and fetched again with the first new one.
        Gradients that a deferred step still needs are cleared after that step.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for key, unit in list(self._stored.items()):
                found = [*compress(unit.entries, map(_has_grad, unit.entries))]
                if not found:
                    del self._stored[key]
                elif found[0].param.grad is None and not self.owed(unit):
                    gone = [e for e in found if e.param.grad is None and not e.materialized]
                    self.clear(*gone)

    def hand_over(self, entry: Entry, gradient: torch.Tensor) -> None:
        """Clears the gradient of a parameter that leaves the tiers; may be called again.

        Args:
            entry: The parameter.
            gradient: Its value in the dtype in which it was kept; references to the stand-in get
                it.
        """
        stand_in = entry.lazy
        held = is_held(stand_in, besides=1) or (stand_in is not None and is_elsewhere(stand_in))
        if isinstance(stand_in, LazyTensor) and held:
            orphan(stand_in, gradient.to(self.manager.parts.device, copy=True))
        entry.lazy = None
        entry.has_grad = False

    def owed(self, unit: GradUnit | None) -> bool:
        """Whether a step that uses the gradients of a unit is deferred."""
        return unit is not None and unit.block.id in self._deferred.owed

    def pay(self, unit: GradUnit | None) -> None:
        """Performs the deferred step that uses the gradients of a unit, if there is one."""
        if unit is not None and unit.block.id in self._deferred.owed:
            with self.manager.lock:
                self._deferred.pay(unit.block.id)

    def sync(self, entry: Entry) -> None:
        """Follows a user's change of ``param.grad``: another tensor or None ends the stored one."""
        if self.displaced:
            self.restore(unheard=torch._C._current_graph_task_id() == -1)
        if entry.displaced:
            return
        self.follow(entry)
        if entry.has_grad:
            flush(entry.lazy)

    def sync_all(self, entries: Sequence[Entry]) -> None:
        """Calls :meth:`sync` for each parameter, but faster."""
        as_left = not self.displaced
        with torch._C.DisableTorchFunctionSubclass():  # once, not at every look
            calm = as_left and not any(map(_displaced, entries))
            if calm and (is_stored_alone(entries) or _has_nothing(entries)):
                return
            for entry in entries if as_left else ():
                stand_in: Any = entry.lazy
                viewed = entry.has_grad and stand_in._kept is not None
                if viewed or entry.displaced:
                    as_left = False
                gradient = entry.param.grad
                if gradient is not stand_in:
                    as_left = as_left and not (entry.has_grad or isinstance(gradient, LazyTensor))
        for entry in entries if not as_left else ():
            self.sync(entry)

    def follow(self, entry: Entry) -> None:
        """Ends the stored gradient if ``param.grad`` is another tensor, or None.

        If that is a former stand-in, or another parameter's, it becomes an ordinary gradient.
        """
        current = entry.param.grad
        if current is entry.lazy:
            return
        if entry.has_grad:
            self.clear(entry)
        if isinstance(current, LazyTensor) and not is_gone(current):
            flush(current)
            entry.param.grad = current._load().to(entry.param.device, entry.param.dtype)

    def restore(self, *, unheard: bool = True) -> None:
        """Restores stand-ins that were removed for a gradient that was then not accumulated.

        ``torch.autograd.grad`` computes gradients of parameters and does not change ``param.grad``.

        Args:
            unheard: Whether also for gradients that arrive unannounced, which may still come.
        """
        waiting: list[Entry] = []
        for entry in self.displaced:
            if entry.displaced and not unheard and entry.unheard:
                waiting.append(entry)
                continue
            if entry.displaced and entry.has_grad and entry.param.grad is None:
                self.expose(entry)
            entry.displaced = False
        self.displaced = waiting

    @inside
    def load(self, entry: Entry, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns a copy of a stored gradient in ordinary memory on the device.

        Args:
            entry: Its parameter.
            dtype: The dtype of the copy; None for the parameter's, which torch requires.
        """
        if entry.unit is None or not entry.has_grad:
            raise RuntimeError(f"parameter {entry.name!r} has no gradient any more")
        dtype, device = dtype or entry.param.dtype, self.manager.parts.device
        if not entry.unit.runs:
            return self._copy(entry.unit, entry, dtype)
        whole = torch.empty(entry.param.shape, dtype=dtype, device=device)
        for run in entry.unit.runs:
            with torch.no_grad():
                run.of(whole).copy_(self._copy(run, entry, dtype))
        return whole

    def _copy(self, part: GradUnit, entry: Entry, dtype: torch.dtype) -> torch.Tensor:
        """Returns a copy of a gradient, or of a run of it."""
        slot = self._open_beside(part)
        try:
            with torch.no_grad():
                return slot.views[entry.unit_index].to(dtype, copy=True)
        finally:
            self.manager.release(part.block)

    def _open_beside(self, part: GradUnit) -> Slot:
        """As :meth:`open`; an error message includes what optimizers need."""
        try:
            return self.open(part)
        except CapacityError as error:
            raise beside_optimizer(error) from None

    def settle_now(self, unit: GradUnit) -> None:
        """Applies the pending changes of a unit, wherever it is."""
        for part in unit.parts:
            if part.pending:
                self.open(part)
                self.manager.release(part.block)
        if unit.runs:
            self.show(unit.entries[0])

    def show(self, entry: Entry) -> None:
        """Updates the views that users have of a gradient in runs after it was written."""
        if is_viewed(entry.lazy) and entry.has_grad:
            refresh(entry.lazy, self.load(entry, self.homes.dtype_of(entry)))

    def open(self, unit: GradUnit) -> Slot:
        """Acquires a unit's block and applies the pending changes; release it after use.

        Args:
            unit: A unit in one block, or a run.
        """
        slot = self.manager.acquire(unit.block)
        try:
            self.settle(unit, slot)
        except BaseException:
            self.manager.release(unit.block)
            raise
        return slot

    def settle(self, unit: GradUnit, slot: Slot) -> None:
        """Applies the pending changes of a unit whose block has been acquired."""
        if unit.pending:
            with self.manager.lock:  # another thread that looks at a gradient would make them, too
                self._settle(unit, slot)

    def _settle(self, unit: GradUnit, slot: Slot) -> None:
        found = {id(e): slot.views[e.unit_index] for e in unit.entries if e.has_grad}
        changed = {id(entry) for pending in unit.pending for entry in pending.entries}
        if found and changed:
            self.manager.mark_dirty(unit.block)
        self.norms.invalidate(unit.entries)
        try:
            with torch.no_grad():
                while unit.pending:
                    make_first(unit.pending, found)
        finally:
            for entry in () if isinstance(unit, GradRun) else unit.entries:
                if id(entry) in changed:  # a program may have written a view of the others
                    refresh(entry.lazy, slot.views[entry.unit_index])

    def store(self, entry: Entry, gradient: torch.Tensor) -> None:
        """Puts a dense gradient into the tiers, and its lazy stand-in into ``param.grad``."""
        unit = self._unit_of(entry)
        for part in unit.parts:
            self._write(part, entry, part.of(gradient))
        entry.has_grad = True
        self._stored[id(unit)] = unit
        if unit.runs:
            self.show(entry)
        self.expose(entry)
        for watcher in self.watchers:
            watcher.edited(entry)

    def _write(self, part: GradUnit, entry: Entry, gradient: torch.Tensor) -> None:
        """Writes a gradient, or a run of it, to its block."""
        slot = self.open(part)
        written = False
        try:
            with unrecorded():
                view = slot.views[entry.unit_index]
                written = True
                if entry.has_grad and view.dtype is not gradient.dtype:
                    follow(view, gradient.to(view.device))  # the view has fewer bits
                else:
                    view.copy_(gradient)
                if not isinstance(part, GradRun):
                    refresh(entry.lazy, view)
                self.norms.invalidate((entry,))
        finally:
            self.manager.release(part.block, dirty=written)

    def add(self, found: Sequence[tuple[Entry, torch.Tensor]], *, in_a_row: bool) -> None:
        """Adds dense gradients of parameters of one unit to those in the tiers, and shows them.

        Args:
            found: Parameters and their gradients.
            in_a_row: Whether the gradients before these were of the same unit.
        """
        unit = self._unit_of(found[0][0])
        if unit.runs:
            self._store_runs(unit, *found[0])
            return
        stored = [*map(_first, found)]
        again = in_a_row and not unit.pending  # then it belongs to the last use of its block
        slot = self.manager.again(unit.block) if again else self.open(unit)
        written = False
        try:
            with unrecorded():
                views = slot.views
                written = True
                added = [pair for pair in found if pair[0].has_grad]
                first = [pair for pair in found if not pair[0].has_grad] if added else found
                if len(first) > 1:
                    new = [*map(_second, first)]
                    there = map(views.__getitem__, map(_unit_index, map(_first, first)))
                    torch._foreach_copy_([*there], new)
                elif first:
                    views[first[0][0].unit_index].copy_(first[0][1])
                for entry, gradient in added:
                    views[entry.unit_index].add_(gradient)
                    refresh(entry.lazy, views[entry.unit_index])
                self.norms.take(stored, slot)
            set_all(stored, "has_grad", True)
            self._stored[id(unit)] = unit
        finally:
            self.manager.release(unit.block, dirty=written)
        self.expose(*stored)

    def _store_runs(self, unit: GradUnit, entry: Entry, gradient: torch.Tensor) -> None:
        """Adds a gradient to the one that is kept in runs, and shows it.

        Its norm is computed only if it is the first: a sum is never in HBM as a whole.
        """
        self.norms.invalidate((entry,))
        for run in unit.runs:
            slot = self.open(run)
            try:
                with unrecorded():
                    view, new = slot.views[0], run.of(gradient)
                    view.add_(new) if entry.has_grad else view.copy_(new)
            finally:
                self.manager.release(run.block, dirty=True)
        if not entry.has_grad:
            self.norms.take_whole(entry, gradient, self.homes.dtype_of(entry))
        entry.has_grad = True
        self._stored[id(unit)] = unit
        self.show(entry)
        self.expose(entry)

    def _unit_of(self, entry: Entry) -> GradUnit:
        """Returns the unit of a parameter's gradient.

        Raises:
            CapacityError: If there was no home for it.
        """
        if entry.unit is None:
            check_gradients(self._runtime)
        if entry.unit is None:
            raise RuntimeError(f"parameter {entry.name!r} is not tracked")
        return entry.unit

    def expose(self, *entries: Entry) -> None:
        """Makes each ``param.grad`` the lazy stand-in of the stored gradient."""
        if not self._dtypes and self._expose_new(entries):
            return
        for entry in entries:
            stand_in, ways = entry.lazy, entry.ways
            if stand_in is None:
                dtype = self.homes.dtype_of(entry) if self._dtypes else entry.placeholder.dtype
                if ways is None or ways.dtype is not dtype:
                    ways = entry.ways = self._ways_of(entry, dtype)
                stand_in = entry.lazy = ways.stand_in()
            if entry.param.grad is not stand_in:
                entry.param.grad = stand_in

    @staticmethod
    def _expose_new(entries: Sequence[Entry]) -> bool:
        """As :meth:`expose`, for first stand-ins in the parameters' dtypes; returns if it did."""
        ways = [*map(_ways, entries)]
        if any_none(ways) or not all_none(map(_lazy, entries)):
            return False
        if not all_same(map(_dtype, ways), map(_own_dtype, entries)):
            return False
        stand_ins = stand_ins_of(ways)
        set_each(entries, "lazy", stand_ins)
        set_each(map(_param, entries), "grad", stand_ins)
        return True

    def _ways_of(self, entry: Entry, dtype: torch.dtype) -> Ways:
        """Returns how the stand-ins of a parameter's gradient access it, without references."""
        device, formal = self.manager.parts.device, entry.param.dtype
        load, store = Weak(self._looked_at, entry, dtype), Weak(self._written, entry)
        return Ways(entry.param.shape, dtype, device, load, store, formal, Clippable(self, entry))

    @inside
    def _looked_at(self, entry: Entry, dtype: torch.dtype) -> torch.Tensor:
        """Loads a gradient for its stand-in; a deferred step clears it afterwards."""
        stand_in: Any = entry.lazy
        self.pay(entry.unit)
        return self.load(entry, dtype) if entry.lazy is stand_in else stand_in._load()

    @inside
    def _written(self, entry: Entry, gradient: torch.Tensor) -> None:
        """Stores a user's write to a stand-in, which need not be in ``param.grad`` any more."""
        stand_in = entry.lazy
        aside = entry.param.grad is not stand_in and not entry.displaced
        if aside and isinstance(stand_in, LazyTensor):
            self.clear(entry)
            stand_in._store(gradient)
        else:
            self.store(entry, gradient)


def is_stored_alone(entries: Sequence[Entry]) -> bool:
    """Whether each gradient is in the tiers, has its stand-in, and nobody has a view of it.

    Args:
        entries: The parameters; torch functions of subclasses are off.
    """
    if not all(map(_has_grad, entries)):
        return False
    stand_ins = [*map(_lazy, entries)]
    if any_none(stand_ins) or not all_same(map(_grad, entries), stand_ins):
        return False
    return all_none(map(_kept, stand_ins))


def _has_nothing(entries: Sequence[Entry]) -> bool:
    """Whether no parameter has a gradient anywhere; torch functions of subclasses are off."""
    return all_none(map(_grad, entries)) and not any(map(_has_grad, entries))
