"""Which steps may be deferred to the next forward unnoticed by the program (``overlap="auto"``).

Deferred work of a block is done before any access to it, so a program can notice a deferred step
only in few ways: if its update raises, if it needs room that the forward has taken, by numbers in
the state that have no home in the tiers, and in a CUDA graph. There is a rule for each of these;
a step to which one applies is performed in ``step()``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tiermem.nn.groups.group import Group
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.nn.tensors.lazy import LazyTensor, is_held
from tiermem.optim.rules.probe import settings_of
from tiermem.optim.rules.torchsteps import is_own_class
from tiermem.optim.units.parted import PartedUnit
from tiermem.optim.units.unit import State, StepUnit
from tiermem.runtime.memory.slots import use_count

_SCHEDULED = {"lr", "weight_decay", "momentum", "betas"}
"""Settings that schedulers write, and for which torch's classes accept every value in range."""
_SWITCHES = {"weight_decay", "momentum"}
"""Settings among these for which classes use other code if they are zero."""
_MOST_PAUSE = 64
_REFERENCES = 2  # to a storage: the tensor's, and that of the counting code
_LOOKS = 8  # blocks accessed last: programs mostly hold no views of earlier ones


class AutoOverlap:
    """Chooses which steps of one optimizer are deferred.

    Attributes:
        waiting: Ids of the units whose step is deferred, in the current ``step()``.
    """

    def __init__(self, runtime: ModuleRuntime, cls: type[torch.optim.Optimizer]) -> None:
        """Starts without deferred steps: at first every group is stepped in ``step()``.

        Args:
            runtime: The modules' runtime.
            cls: The optimizer's class. One that is not torch's own may raise in any step, which
                has to happen in ``step()``: none of its steps is deferred.
        """
        self.waiting: set[int] = set()
        self._runtime = runtime
        self._table = runtime.manager.parts.table
        self._known = is_own_class(cls)
        self._tried: dict[int, Any] = {}  # settings with which the class has stepped, by group
        self._asked: object = None  # settings that were checked last, and those tried among them
        self._steady: set[int] = set()
        self._failed = False
        self._holders = 0
        self._seen_nbytes = 0  # of HBM that others used in an earlier backward or access
        self._needed = 0  # bytes of HBM for the largest deferred step
        self._finish: Callable[[], None] | None = None
        self._looked_at: dict[int, None] = {}  # ids of blocks, the last one accessed last
        # steps that were performed for an access instead of a forward
        self._owed = self._early = 0
        self._pause = self._last_pause = 0

    def begin(self, state: State, finish: Callable[[], None]) -> None:
        """Begins to watch backwards and accesses; no user has seen the optimizer's state yet.

        Args:
            state: The tiered optimizer's state.
            finish: Performs all deferred steps.
        """
        self._holders, self._finish = sys.getrefcount(state), finish
        self._runtime.backward.on_begin.append(self.backward_begins)
        self._runtime.away.on_look.append(self.look_begins)

    def close(self) -> None:
        """Stops watching backwards and accesses."""
        self._runtime.backward.on_begin.remove(self.backward_begins)
        self._runtime.away.on_look.remove(self.look_begins)

    def choose(
        self,
        units: Sequence[StepUnit],
        groups: Sequence[dict[str, Any]],
        state: State,
        *,
        looked_into: bool,
        draws: bool,
    ) -> None:
        """Sets ``waiting`` for a step.

        Args:
            units: The units to be stepped; none of them has deferred work.
            groups: Settings of the parameter groups.
            state: The tiered optimizer's state.
            looked_into: Whether users got the state.
            draws: Whether the class draws random numbers.
        """
        self.waiting, self._needed = set(), 0
        if not self._known or self._failed or draws or self._is_early():
            return
        if any(unit.group is not None and unit.group.freed for unit in units):
            return  # it will raise in `step()`
        if self._table.all_fit or self._runtime.manager.parts.copy.capturing():
            return  # no copies to hide, except those of a first step
        if self._all_there(units):
            return
        count = sys.getrefcount(state)
        if not looked_into:  # an error's traceback may hold it for a while
            self._holders = min(self._holders, count)
        elif count > self._holders:
            return
        kinds = {number: kind_of(group) for number, group in enumerate(groups)}
        steady = {number for number, kind in kinds.items() if self._tried.get(number) == kind}
        room = self._room()
        for unit in units:
            if (
                unit.made is not None
                and all(number in steady for _, number in unit.members)
                and (needed := self._needed_by(unit, room)) is not None
                and not (looked_into and _is_seen(unit, state))
            ):
                self.waiting.add(id(unit))
                self._needed = max(self._needed, needed)

    def may_begin(self, *, looked_into: bool, draws: bool) -> bool:
        """Whether the class permits steps before ``step()`` is called.

        Args:
            looked_into: Whether users got the state, of which they may have kept numbers.
            draws: Whether the class draws random numbers.
        """
        capturing = self._runtime.manager.parts.copy.capturing()
        return self._known and not (self._failed or looked_into or draws or capturing)

    def has_room_behind(self) -> bool:
        """Whether blocks move in backward, and no alias holds any of HBM."""
        # an alias that existed once may be gone, so only present ones count
        return not (self._table.all_fit or self._seen_now())

    def is_steady(self, unit: StepUnit, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether a unit was stepped before with settings of the same kind.

        Args:
            unit: The unit.
            groups: The settings; the same object always has the same values.
        """
        if self._asked is not groups:  # once for all units
            self._asked = groups
            kinds = enumerate(map(kind_of, groups))
            self._steady = {number for number, kind in kinds if self._tried.get(number) == kind}
        return {number for _, number in unit.members} <= self._steady

    def made(self, units: Iterable[StepUnit], groups: Sequence[dict[str, Any]]) -> None:
        """Notes that a step was performed, or deferred as chosen.

        Args:
            units: All of its units.
            groups: Settings of the parameter groups with which it was performed.
        """
        now = [unit for unit in units if id(unit) not in self.waiting]
        self._asked = None
        for number in {number for unit in now for _, number in unit.members}:
            self._tried[number] = kind_of(groups[number])
        self._owed, self._early = len(self.waiting), 0

    def paid(self) -> None:
        """Notes that a deferred step was performed."""
        self._early += not self._runtime.here.inside

    def note_failure(self, error: BaseException) -> None:
        """Notes that a deferred step failed, unless from outside; no other is deferred then."""
        self._failed = self._failed or isinstance(error, Exception)

    @property
    def has_failed(self) -> bool:
        """Whether a deferred step has failed."""
        return self._failed

    def backward_begins(self) -> None:
        """Measures how much HBM users and autograd hold; the next forward will be similar."""
        if self._known and not self._table.all_fit:  # else a graph may have all blocks
            self._seen_nbytes = max(self._seen_nbytes, self._seen_now())

    def look_begins(self, group: Group) -> None:
        """Performs deferred steps before an access to a weight that would leave them no room.

        A program may hold two weights at once (``target.data.add_(param.data)``), one of which has
        a deferred step, which would then find HBM fragmented. The next round will be similar.

        Args:
            group: The group of the weight.
        """
        if not self._known or self._table.all_fit:
            return
        looked_at = self._looked_at
        held = sum(map(self._held_nbytes, looked_at))
        looked_at.pop(group.block.id, None)
        looked_at[group.block.id] = None
        if len(looked_at) > _LOOKS:
            del looked_at[next(iter(looked_at))]
        self._seen_nbytes = max(self._seen_nbytes, held)
        owed = self._runtime.manager.parts.deferred
        if self._finish is None or held or not owed or group.block.id in owed:
            return  # the step of the weight itself is performed before it is held
        free = self._table.hbm.capacity - self._table.fixed_nbytes(now=True) - group.block.nbytes
        if self._needed > free // 2:  # the larger of two pieces has at least that
            self._finish()

    def _is_early(self) -> bool:
        """Whether the program accesses weights after each step, so that deferring is useless."""
        if self._owed:
            if self._early > self._owed // 2:
                self._last_pause = min(_MOST_PAUSE, 2 * self._last_pause or 1)
                self._pause = self._last_pause
            else:
                self._last_pause = 0
            self._owed = 0
        if not self._pause:
            return False
        self._pause -= 1
        return True

    def _all_there(self, units: Sequence[StepUnit]) -> bool:
        """Whether everything is in HBM, so that there are no copies to hide."""
        get = self._table
        return all(get[block.id].usable for unit in units for block in unit.blocks())

    def _room(self) -> int:
        """Returns the bytes of HBM for a step beside the blocks that a forward may hold.

        Blocks that others hold cannot be moved, so the rest of HBM may be fragmented in any way; in
        that case no room is guaranteed.
        """
        seen = max(self._seen_nbytes, self._seen_now())
        held = self._runtime.program.worst_chain + seen
        room = self._table.hbm.capacity - self._table.fixed_nbytes(now=True) - held
        return 0 if seen else room

    def _needed_by(self, unit: StepUnit, room: int) -> int | None:
        """Returns the bytes of HBM that a step in a forward needs, beside blocks at home there.

        None if it must not be performed there, as a CUDA graph may be captured.
        """
        group, table = unit.group, self._table
        if group is None or table[group.block.id].fixed:
            return None
        needed = sum(block.nbytes for block in unit.at_once() if not table[block.id].fixed)
        return needed if needed - group.block.nbytes <= room else None

    def _held_nbytes(self, block_id: int) -> int:
        """Returns the bytes of a block that a program holds by a view or in an operation."""
        record = self._table.get(block_id)
        slot = self._runtime.manager.parts.slots.current.get(block_id)
        if record is None or slot is None or record.fixed:
            return 0
        return slot.extent.nbytes if record.leases or slot.aliased else 0

    def _seen_now(self) -> int:
        current, table = self._runtime.manager.parts.slots.current, self._table
        seen = sum(  # without blocks at home in HBM, which are counted separately
            slot.extent.nbytes
            for block_id, slot in current.items()
            if slot.aliased and not table[block_id].fixed
        )
        return seen + sum(extent.nbytes for extent in self._table.orphans())


def kind_of(group: dict[str, Any]) -> Any:
    """Returns a key that is equal for settings with which a class steps in the same way.

    Settings that schedulers write count as equal as long as they are in range.
    """
    return {
        key: _in_range(key, value) if key in _SCHEDULED else _as_is(value)
        for key, value in settings_of(group).items()
    }


def _in_range(key: str, value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value), [_in_range(key, inner) for inner in value]
    if type(value) not in (int, float):
        return _as_is(value)
    good = math.isfinite(value) and value >= 0 and (value < 1 or key != "betas")
    return (float, value == 0 and key in _SWITCHES) if good else _as_is(value)


def _as_is(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.device, value.shape
    if isinstance(value, tuple | list):
        return type(value), [_as_is(inner) for inner in value]
    return type(value), value


def _is_seen(unit: StepUnit, state: State) -> bool:
    """Whether users may hold a tensor of a unit's state, which would bypass the tiers."""
    parted = isinstance(unit, PartedUnit)
    for param, _ in unit.members:
        kept = state.get(param)
        if kept is None:
            continue
        # referenced by the tiered optimizer's state and the plain one's; parts are concatenated
        if is_held(kept, besides=2 - parted):
            return True
        for value in kept.values():
            if not isinstance(value, torch.Tensor) or isinstance(value, LazyTensor):
                continue
            if is_held(value, besides=1) or _is_viewed(value):
                return True
    return False


def _is_viewed(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:  # it has no storage whose references can be counted
        return True
    storage = tensor.untyped_storage()
    return use_count(storage._cdata) > _REFERENCES
