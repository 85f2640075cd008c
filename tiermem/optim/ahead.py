"""Steps ahead: provisional steps inside backward that ``step()`` confirms (``overlap="auto"``).

As soon as the gradients of a block are final, its step is performed provisionally
(:mod:`tiermem.optim.provisional`): the weights are in HBM then, and the copies of state and masters
are hidden behind backward. ``step()`` confirms it. It is dropped, and performed later instead, if
the program reads or writes a gradient, a weight or the state before ``step()``, scales or clips by
a factor other than one, changes settings, runs another forward or backward, or calls no ``step()``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from tiermem.core.block import Block
from tiermem.errors import CapacityError, StorageError
from tiermem.nn.compat.outside import OUTSIDE
from tiermem.nn.compat.quiet import quiet, uncompiled
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.group import Group
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.optim.auto import AutoOverlap
from tiermem.optim.balance import Load, Speed, best_choice, host_helps, least_seconds
from tiermem.optim.host.spread import Rates
from tiermem.optim.host.steps import HostSteps
from tiermem.optim.leaving import IgnoresWeights, LateStates
from tiermem.optim.looptrial import LoopTrial
from tiermem.optim.provisional import Made, Provisional
from tiermem.optim.rules.groups import frozen_settings
from tiermem.optim.rules.scaling import Scaling
from tiermem.optim.stepping import SteppedBackward
from tiermem.optim.units.finality import accumulates, is_nested
from tiermem.optim.units.late import Ahead
from tiermem.optim.units.parted import PartedUnit
from tiermem.optim.units.unit import State, StepUnit
from tiermem.runtime.services.home_packing import SHARE as PACKED_SHARE

_FIRST_PAUSE, _MOST_PAUSE = 8, 64  # rounds: a wasted one copies half as much again
_DROPPED, _IN_VAIN = 4, 8
"""A round with dropped steps adds the first number, a confirmed one subtracts one; from the second
number on, no steps ahead are tried: after two such rounds in a row, or if more than a fifth of the
rounds are such, as in a loop that clips now and then."""
_PACKING_PAYS = 0.6
"""Packing may make a loop faster if its copies take at least this share of the compute time, as
copies are never hidden completely."""
_FIRST_PACKED = 8  # rounds until all homes are packed, and plans are made for that
_FIRST_LOOK = 4  # rounds with steps ahead until passes are measured; then after 8, 16, ...


class Habit:
    """Tracks what the loop does between two calls of ``step()``, to predict the next round.

    Attributes:
        backwards: How many backwards there were since the last step.
    """

    def __init__(self) -> None:
        """Starts without a habit: no step is performed ahead."""
        self.backwards = 0
        self._usual = 0
        self._scales = False
        self._in_vain = 0  # rounds in which steps were dropped, less those confirmed since
        self._pause = self._last_pause = 0

    @property
    def in_vain(self) -> bool:
        """Whether steps ahead are mostly dropped, so that steps are deferred to the forward."""
        return self._in_vain == _IN_VAIN

    @property
    def expects(self) -> bool:
        """Whether the next round is likely to have a backward with steps."""
        return self._usual > 0 and self.is_last(self._usual)

    def is_last(self, number: int) -> bool:
        """Whether the backward of this number (from 1) is likely to be the last before a step."""
        return number == self._usual and not self._scales and not self._pause

    def ends_round(self, *, scales: bool = False, dropped: bool, confirms: bool) -> None:
        """Notes that ``step()`` is called, or that gradients are discarded.

        Args:
            scales: Whether the step has to scale the gradients.
            dropped: Whether steps were dropped since the last time.
            confirms: Whether some are confirmed now.
        """
        self._usual, self.backwards, self._scales = self.backwards, 0, scales
        if dropped:
            self._in_vain = min(self._in_vain + _DROPPED, _IN_VAIN)
            if self._in_vain == _IN_VAIN:
                self._last_pause = min(_MOST_PAUSE, 2 * self._last_pause or _FIRST_PAUSE)
                self._pause = self._last_pause
        elif confirms:
            self._in_vain = max(0, self._in_vain - 1)
            self._last_pause = self._last_pause if self._in_vain else 0
        elif self._pause:
            self._pause -= 1


class Others(Protocol):
    """The units of an optimizer that are stepped on the host."""

    @property
    def rates(self) -> Rates | None:
        """The measured rates; None before."""
        ...

    @property
    def is_settled(self) -> bool:
        """Whether no trial is in progress of where units are stepped faster."""
        ...

    def has(self, unit: StepUnit) -> bool:
        """Whether a unit is normally stepped there."""
        ...

    def may_have(self, unit: StepUnit) -> bool:
        """Whether a unit is stepped there, or would be if the host had its share."""
        ...

    def expect(self, *, helps: bool, waits: bool) -> None:
        """Notes whether the host's share is expected to make a loop faster.

        Args:
            helps: Whether it is.
            waits: Whether steps are normally deferred to the next forward.
        """
        ...

    def place_ahead(self, units: Sequence[StepUnit], groups: Sequence[dict[str, Any]]) -> str:
        """Moves a block's units to ``"host"`` or ``"device"``, if they can be stepped ahead."""
        ...


class LeftToForward:
    """Chooses the steps that are deferred to the next forward, and how much state is late."""

    def __init__(
        self,
        runtime: ModuleRuntime,
        units: Mapping[int, Sequence[StepUnit]],
        others: Others,
        late: LateStates,
    ) -> None:
        """Starts without deferred steps.

        Args:
            runtime: The modules' runtime.
            units: The optimizer's units, by the id of their group; kept up to date.
            others: The units that the host steps.
            late: Notified how much state is late.
        """
        self._runtime = runtime
        self._units = units
        self._others = others
        self._late = late
        self._ids: set[int] = set()  # ids of the groups
        self._rounds, self._next_look = 0, _FIRST_LOOK
        self._hosted: frozenset[int] = frozenset()  # ids of the groups that were the host's then
        self._waits = False
        self._packing = runtime.home_packing
        self._to_pack = False
        self._has_begun = False  # here, and not for another optimizer
        self._trial = LoopTrial(load=lambda: runtime.names.load, first=_FIRST_PACKED)

    def has(self, group: Group) -> bool:
        """Whether the step of a group is deferred to the next forward."""
        return id(group) in self._ids

    def choose_anew(self, made_any: bool, settings: Sequence[dict[str, Any]]) -> None:
        """Chooses again, once it is known how long passes compute.

        Args:
            made_any: Whether steps were performed in the previous backward.
            settings: The settings of the steps.
        """
        self._rounds += made_any
        if self._rounds < self._next_look and self._on_host() == self._hosted:
            return
        speed = self._speed()
        if speed is None:
            return
        if self._rounds >= self._next_look:
            self._next_look = 2 * self._rounds
        self._choose(speed, settings)

    def note_waits(self, waits: bool, groups: Sequence[dict[str, Any]]) -> None:
        """Notes whether steps are normally deferred to the next forward.

        Then the host's share saves other copies.

        Args:
            waits: Whether they are.
            groups: The parameter groups; if steps are deferred, no backward notes their settings.
        """
        speed = None if waits is self._waits else self._speed()
        if speed is not None:
            self._waits = waits
            self._expect(self._loads(frozen_settings(groups)), speed)

    def _speed(self) -> Speed | None:
        """Returns how fast the loop computes and copies; None until that is known.

        If homes are packed, the same bytes of blocks take less time to copy.
        """
        speed = self._measured()
        if speed is None or not self._packing.is_on:
            return speed
        return speed.times(1 / PACKED_SHARE)

    def _measured(self) -> Speed | None:
        """Returns how fast the loop computes and copies bytes; None until that is known.

        On the CPU, on which copies from DRAM never overlap with compute, it never is.
        """
        manager = self._runtime.manager
        if not manager.prefetcher.fetcher.beside:
            return None
        pace = manager.parts.pass_timer.estimates
        forward, backward = map(pace.computes, self._runtime.names.last)
        if forward is None or backward is None:
            return None
        rates = self._others.rates
        if rates is not None and rates.both_ways is not None:
            both, alone = rates.both_ways, pace.fastest("dram->hbm")
        else:
            up, alone = pace.rate("dram->hbm"), 0.0
            both = up, pace.best_rate("hbm->dram") or up
        return Speed(forward, backward, *both, alone=alone)

    def _loads(self, settings: Sequence[dict[str, Any]]) -> list[tuple[Group, Load, Load]]:
        """Returns each block with its load, without and with the host's share."""
        groups = [group for group in self._runtime.groups if id(group) in self._units]
        alone = [self._load_of(group, settings) for group in groups]
        shared = [self._hosted_load(*pair) for pair in zip(groups, alone, strict=True)]
        return list(zip(groups, alone, shared, strict=True))

    def _expect(self, loads: Sequence[tuple[Group, Load, Load]], speed: Speed) -> None:
        """Notes whether the host's share is expected to help."""
        alone, shared = [load for _, load, _ in loads], [load for *_, load in loads]
        if any(load.host is not None for load in shared):
            helps = host_helps(shared, alone, speed, waits=self._waits)
            self._others.expect(helps=helps, waits=self._waits)

    def _choose(self, speed: Speed, settings: Sequence[dict[str, Any]]) -> None:
        """Defers as many steps to the next forward as it has time for."""
        each = self._loads(settings)
        self._expect(each, speed)
        hosted = self._on_host()
        groups = [group for group, *_ in each]
        loads = [shared if id(group) in hosted else load for group, load, shared in each]
        now = frozenset(number for number, group in enumerate(groups) if id(group) in self._ids)
        found = best_choice(loads, speed, now)
        self._ids = {id(groups[number]) for number in found.left}
        self._late.share = found.turns
        self._hosted = hosted
        self._choose_packing(groups, loads, speed)
        self._runtime.manager.prefetcher.note_copies_bind(found.copies_bind)

    def _choose_packing(self, groups: Sequence[Group], loads: Sequence[Load], speed: Speed) -> None:
        """Chooses packed homes for blocks that the device steps, if compute waits for copies."""
        if not self._packing.has_room:
            copies = least_seconds(loads, replace(speed, forward=0.0, backward=0.0))
            self._to_pack = copies > _PACKING_PAYS * (speed.forward + speed.backward)
            return
        for group, load in zip(groups, loads, strict=True):
            units = self._units[id(group)]
            whole = not any(isinstance(unit, PartedUnit) for unit in units)
            blocks = [group.block, *(block for unit in units for block in unit.kept_blocks())]
            blocks += [b for unit in units for of in unit.grad_units() for b in of.blocks]
            self._packing.mark(blocks, packed=whole and load.host is None)

    def between_steps(self) -> None:
        """Packs homes from now on or stops packing, if the loop may be faster then."""
        packing = self._packing
        if packing.has_room:
            if self._has_begun and self._others.is_settled:
                on = self._trial.for_step(object())
                if on is not packing.is_on:
                    packing.turn(on=on)
                    self._next_look = 0
            else:
                self._trial.pause()
        elif self._to_pack:
            self._to_pack, self._has_begun = False, packing.begin()
            if self._has_begun:
                self._next_look = 0

    def _load_of(self, group: Group, settings: Sequence[dict[str, Any]]) -> Load:
        """Returns the bytes that move for a block and its step on the device."""
        units, stay = self._units[id(group)], group.manager.parts.evictor.residents
        kept = [block for unit in units for block in unit.kept_blocks() if block.id not in stay]
        states = [unit.block for unit in units if self._late.may_leave(unit, settings)]
        gradients = [block for unit in units for of in unit.grad_units() for block in of.blocks]
        return Load(
            weights=group.block.nbytes,
            gradients=sum(block.nbytes for block in gradients),
            kept=sum(block.nbytes for block in kept),
            state=sum(block.nbytes for block in states if block is not None),
            stays=group.block.id in stay,
        )

    def _hosted_load(self, group: Group, load: Load) -> Load:
        """Returns the load of a block with the host's share: with the host's time, if in it."""
        units = self._units[id(group)]
        rates = self._others.rates
        if not any(map(self._others.may_have, units)):
            return load
        elements = sum(param.numel() for unit in units for param, _ in unit.members)
        return replace(load, host=0.0 if rates is None else rates.host * elements)

    def _on_host(self) -> frozenset[int]:
        """Returns the ids of the groups that are normally stepped on the host."""
        return frozenset(
            number for number, units in self._units.items() if any(map(self._others.has, units))
        )


class StepsAhead:
    """Performs the steps of one optimizer inside backward, provisionally.

    Attributes:
        revocable: Whether its steps can be undone.
        listens: Whether the first gradient of the current backward has not arrived yet.
        provisional: Steps that are performed and not confirmed.
        late: Chooses the units whose state becomes late.
    """

    revocable = True

    def __init__(
        self,
        runtime: ModuleRuntime,
        auto: AutoOverlap,
        owed: set[int],
        is_begun: Callable[[object], bool],
        may_begin: Callable[[], bool],
        others: Others,
        ignores: IgnoresWeights,
    ) -> None:
        """Watches the backwards of ``runtime``.

        Args:
            runtime: The modules' runtime.
            auto: Knows which steps must not be deferred.
            owed: Ids of the units with a deferred step.
            is_begun: Returns whether a ``step()`` with some ticket has begun.
            may_begin: Returns whether any steps of the optimizer may be performed ahead now.
            others: The units that the host steps.
            ignores: Returns whether the state of a parameter is updated without its weights.
        """
        self.provisional = Provisional(runtime, is_begun)
        self.late = LateStates(runtime, ignores, lambda: bool(self.provisional))
        self._runtime = runtime
        self._auto = auto
        self._owed = owed
        self._may_begin = may_begin
        self._others = others
        self._backward = SteppedBackward(runtime)
        self._left = LeftToForward(runtime, self._backward.units, others, self.late)
        self._habit = Habit()
        self._state: State = {}
        self._host: HostSteps | None = None
        self._drops = 0
        self.listens = True
        self._made_any = False  # in the last backward that was likely to have steps
        self._prepared = False
        self._ready = False  # for the first backward with steps
        runtime.backward.watchers.append(self)
        runtime.grads.watchers.append(self)

    def extend(
        self,
        units: Iterable[StepUnit],
        groups: Sequence[dict[str, Any]],
        state: State,
        host: HostSteps | None = None,
    ) -> None:
        """Adds units.

        Args:
            units: The new units.
            groups: All parameter groups, with the settings that a step uses.
            state: The tiered optimizer's state, to be kept up to date.
            host: Performs the steps on the host, if there are any.
        """
        self._state, self._host = state, host
        units = list(units)
        self._backward.extend(units, groups)
        self.late.extend(units)

    def prepare(self, *, may_begin: bool) -> None:
        """Called after the first step: reserves the memory that steps in the next backward need.

        Otherwise the second round would wait for page-locking, which takes seconds.

        Args:
            may_begin: Whether any steps may be performed ahead now.
        """
        with self._runtime.manager.lock:
            self._left.between_steps()
        if self._prepared:
            return
        self._prepared = True
        with self._runtime.manager.lock:
            if may_begin and self._habit.expects and self._is_worth_it():
                blocks = [found for found in self._blocks() if self.provisional.can_have(*found)]
                reserved = [self.provisional.reserve(*block) for block in blocks]
                self._ready, self.late.roomy = any(reserved), all(reserved)
                for _, units in blocks if self._ready else ():
                    self.late.reserve(units)

    def close(self) -> None:
        """Stops watching backwards; steps ahead are dropped."""
        self.provisional.close()
        self.late.close()
        with self._runtime.manager.lock:
            self._runtime.home_packing.end()
        self._runtime.backward.watchers.remove(self)
        self._runtime.grads.watchers.remove(self)

    # -- what the user calls ---------------------------------------------

    def before_step(self, scaling: Scaling | None) -> Scaling | None:
        """Prepares for ``step()``: drops steps made ahead that differ from what it would make.

        A factor is looked at only where all else is equal, since the host waits for it.

        Returns:
            What gradients are still to be scaled by; None where steps made ahead are confirmed.
        """
        made = bool(self.provisional)
        equal = made and (
            self.provisional.whole
            and not self.provisional.failed
            and not self._backward.has_changed()
            and all(map(_is_untouched, self.provisional.units))
        )
        if equal and scaling is not None and scaling.changes_nothing:
            scaling = None
        if made and (scaling is not None or not equal):
            self.provisional.drop()
        self._ends_round(scales=scaling is not None and not scaling.is_factor)
        return scaling

    def thrown_away(self) -> None:
        """Called when gradients are cleared or set to zero."""
        self.provisional.drop()
        if self._habit.backwards:
            self._ends_round()

    def leave_to_others(self, units: Iterable[StepUnit]) -> None:
        """Drops steps of blocks that another optimizer will step, too."""
        blocks = [unit.group.block for unit in units if unit.group is not None]
        if self.provisional and any(map(self.provisional.touches, blocks)):
            self.provisional.drop()

    def settle(self) -> None:
        """Drops the steps ahead, so that blocks and gradients are as before."""
        self.provisional.drop()

    def repair(self) -> None:
        """Drops all steps, after an exception in tiermem's code; none is in progress."""
        self._backward.steps = False
        self.provisional.repair()
        self.late.repair()

    def _ends_round(self, *, scales: bool = False) -> None:
        if self.provisional:
            self.late.take_turns()
        drops, self._drops = self._drops, self.provisional.drops
        self._habit.ends_round(
            scales=scales, dropped=self._drops != drops, confirms=bool(self.provisional)
        )

    # -- what backward calls ---------------------------------------------

    def begins(self) -> int:
        """Called when a backward begins; returns which steps are likely in it, if any."""
        self.listens = True
        self._backward.begins()
        if (self._made_any or self._ready) and self._is_last(self._habit.backwards + 1):
            return 1 + self.late.turn  # each turn uses other blocks
        return 0

    def foresees(self, order: Sequence[int]) -> Sequence[int]:
        """Returns the order of use of a backward with its steps, from that of one without."""
        return self._backward.with_steps(order, self._others.has, self.late.uses_of)

    def ends(self) -> None:
        """Called when a backward ends."""
        self._backward.ends()

    def arriving(self, entry: Entry) -> bool:
        """Called before a gradient is accumulated, or caught by ``autograd.grad``."""
        now = self._backward
        known = now.counted or id(entry.param) not in now.entries
        if not known and now.is_here() and accumulates(entry) and not is_nested():
            self._first()
        return False

    def arrived(self, entries: Sequence[Entry]) -> None:
        """Called when gradients are in the tiers; steps their block if all have arrived."""
        now = self._backward
        if not now.steps or not now.is_here():
            return
        if now.has_all(entries):
            self._step(entries[0].group)

    def edited(self, entry: Entry) -> None:
        """Called when other code has written a gradient, which has dropped the steps already."""

    def has_used(self, entry: Entry) -> bool:
        """Whether a step has used this gradient, so that a change of it drops the step."""
        return self.provisional.has_used(entry)

    # -- inside ----------------------------------------------------------

    def _blocks(self) -> Iterator[tuple[Group, Sequence[StepUnit]]]:
        """Yields the blocks whose steps can probably be performed ahead, with their units."""
        for units in self._backward.units.values():
            group = units[0].group
            if group is not None and _may_be_ahead(group) and not any(map(_is_in_runs, units)):
                yield group, units

    def _is_last(self, number: int) -> bool:
        """Whether steps are performed in the backward with this number since the last step."""
        return self._habit.is_last(number) and self._may_begin() and self._is_worth_it()

    def _is_worth_it(self) -> bool:
        """Whether steps would move blocks, and gradients are not unscaled before them."""
        return self._auto.has_room_behind() and not self._runtime.grads.norms.scale.changes

    def _first(self) -> None:
        """Decides, at the first gradient of a backward, whether steps are performed in it."""
        habit, now = self._habit, self._backward
        now.counted = True
        self.listens = False
        habit.backwards += 1
        if self.provisional and now.has_changed():
            self.provisional.drop()
        now.note_settings()
        now.steps = self._is_last(habit.backwards)
        self._left.note_waits(habit.in_vain, now.groups)
        if now.steps:
            now.prepare()
            self.late.begin_backward()
            self._left.choose_anew(self._made_any, now.settings)
            self._made_any = self._ready = False

    def _step(self, group: Group) -> None:
        """Steps the units of a block whose gradients are final, if all of them can be."""
        units = self._backward.final_units(group)
        if not units or self._left.has(group):
            return
        if not (_may_be_ahead(group) and self._may_begin()):  # users may have the state by now
            return
        for unit in units:
            if not self._can_be_made(unit):
                return
        manager = self._runtime.manager
        with manager.lock, quiet(manager.parts.device), torch.no_grad():
            uncompiled(StepsAhead._make)(self, group, units)

    def _can_be_made(self, unit: StepUnit) -> bool:
        """Whether the step of a unit can be performed ahead, and undone."""
        return (
            unit.made is not None
            and id(unit) not in self._owed
            and len(unit.entries) == len(unit.members)
            and not _is_in_runs(unit)
            and unit.can_be_taken_back()
            and self._auto.is_steady(unit, self._backward.settings)
            and unit.can_wait(self._runtime)
            and (unit.late is None or not _awaits(unit))
        )

    def _make(self, group: Group, units: Sequence[StepUnit]) -> None:
        """Performs the steps of a block; those that fail here are left to ``step()``."""
        if not self.provisional.has_room(group, units):
            return
        settings = self._backward.settings
        where = self._others.place_ahead(units, settings)
        for unit in units if where else ():
            unit.prepare_ahead(settings)
        if where == "host" and self._host is not None:
            self._begin_there(self._host, group, units)
        elif where == "device":
            self._make_here(group, units)

    def _begin_there(self, host: HostSteps, group: Group, units: Sequence[StepUnit]) -> None:
        """Begins the host's steps of a block, which run while backward continues."""
        begin = partial(host.begin_ahead, units, self._backward.settings, self.provisional.ticket)
        try:
            self.provisional.begin(group, units, self._state, begin)
        except (StorageError, CapacityError):
            return
        self._made_any = True

    def _make_here(self, group: Group, units: Sequence[StepUnit]) -> None:
        began, packing = time.perf_counter_ns(), self._runtime.home_packing
        packing.stays = True
        try:
            # they are written home in any case: before what the steps write, while state is fetched
            gradients = [found.block for unit in units for found in unit.grad_units()]
            self._backward.pipeline.write(gradients, gradients=True)
            leave = partial(self.late.leave, self._backward.settings)
            made = self.provisional.make(group, units, self._state, self._make_one, leave)
        except (StorageError, CapacityError):
            return
        except torch.OutOfMemoryError:
            self._backward.steps = False
            return
        except Exception as error:
            if OUTSIDE not in error.__dict__:
                raise  # from a signal handler, or out of memory, in tiermem's code
            self._backward.steps = False  # step() will raise it, too
            return
        finally:
            packing.stays = False
        timeline = self._runtime.manager.parts.timeline
        timeline.add("optimizer", group.block.name, began, time.perf_counter_ns())
        if not made:
            return
        self._made_any = True
        blocks = [group.block]
        for unit in units:
            blocks += unit.kept_blocks()
        self._backward.write(group, blocks, ahead=True)

    def _make_one(
        self, unit: StepUnit, made: Made, keep: Callable[[Sequence[Block]], None]
    ) -> None:
        now = self._backward
        unit.step(
            self._runtime,
            now.settings,
            self._state,
            ticket=self.provisional.ticket,
            write=None if id(unit.group) in now.held_back else now.pipeline.write,
            ahead=Ahead(keep, made.late, leaves=made.leaves is not None),
        )


def _may_be_ahead(group: Group) -> bool:
    """Whether steps of a block can be performed ahead, regardless of its units."""
    return not (group.writes.uncounted or group.writes.merging or group.resident)


def _is_in_runs(unit: StepUnit) -> bool:
    """Whether a unit has gradients in runs, which are written home when they arrive."""
    return any(found.runs for found in unit.grad_units())


def _is_untouched(unit: StepUnit) -> bool:
    """Whether the gradients of a unit are those that backward has left."""
    return unit.has_own_gradients() and not _awaits(unit)


def _awaits(unit: StepUnit) -> bool:
    """Whether changes of a unit's gradients are pending, which its late update must not see."""
    return any(found.awaits for found in unit.grad_units())
