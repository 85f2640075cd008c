"""How an optimizer takes over parameters: units are planned, homes reserved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tiermem.core.block import Block, Extent, Tier
from tiermem.errors import CapacityError, StepError
from tiermem.nn.compat.shapes import shape_of
from tiermem.nn.groups.group import Group
from tiermem.nn.groups.need import Kept
from tiermem.nn.passes.keepers import Keeper
from tiermem.nn.passes.runtime import entries_of
from tiermem.optim.classes import in_order
from tiermem.optim.host.room import HostRoom
from tiermem.optim.hostpart import HostPart
from tiermem.optim.parts import OptimizerParts
from tiermem.optim.timing import StepTiming
from tiermem.optim.units.parted import ELEMENTWISE
from tiermem.optim.units.plan import Member, check_steps, kept_of, let_apart, plan_units
from tiermem.optim.units.unit import StepUnit


@contextmanager
def _finer_units(groups: Sequence[Group], kept: Kept) -> Iterator[None]:
    """Divides gradients into finer units if a step of a whole block takes too much HBM.

    Args:
        groups: The groups of all parameters.
        kept: What the optimizer will keep for its parameters.
    """
    finer = [group for group in groups if group.few and any(_large(group, kept))]
    for group in finer:
        group.few = False
    try:
        yield
    except BaseException:
        for group in finer:
            group.few = True
        raise


def _large(group: Group, kept: Kept) -> Iterator[bool]:
    """Yields for each parameter of a group whether its state and master are large."""
    for entry in group.entries:
        if id(entry.param) in kept.params:
            stride = group.block.tensors[entry.index].stride
            shape = shape_of(entry.name, entry.param, stride)
            yield kept.is_large(entry.param, shape)


@dataclass(frozen=True, slots=True, eq=False)
class _Taking:
    """Units that are being added to an optimizer.

    Attributes:
        planned: The new units.
        units: All units of the optimizer, with the new ones, in order.
        members: The parameters of the planned ones.
        kept: What the optimizer keeps for them.
        groups: The parameter groups.
    """

    planned: list[StepUnit]
    units: list[StepUnit]
    members: Sequence[Member]
    kept: Kept
    groups: Sequence[dict[str, Any]]


class Intake:
    """Plans the units of newly trained parameters, and reserves their homes."""

    def __init__(self, parts: OptimizerParts, host: HostPart, timing: StepTiming) -> None:
        """Starts without parameters.

        Args:
            parts: The parts of the optimizer, to whose units the new ones are added.
            host: The host's part.
            timing: The timing of steps.
        """
        self._runtime, self._tried, self._units = parts.runtime, parts.tried, parts.units
        self._host = host
        self._timing = timing
        self._kept: list[Kept] = []
        self._taking: _Taking | None = None
        self._keeper: Keeper | None = None

    def take_wanted(self, groups: Sequence[dict[str, Any]]) -> None:
        """Calls :meth:`take_on` for parameters that are trained and have no unit yet."""
        self.take_on(self._units.members.wanted(frozen=self._tried.eager), groups)

    def take_on(self, members: Sequence[Member], groups: Sequence[dict[str, Any]]) -> None:
        """Plans the units of parameters, and reserves their homes.

        Args:
            members: The parameters, and the numbers of their groups.
            groups: All parameter groups.

        Raises:
            CapacityError: If they do not fit in a budget; nothing is changed then.
        """
        self.complete()
        if not members:
            return
        tried, program = self._tried, self._runtime.program
        tried.learn(groups, sorted({number for _, number in members}))
        homed = {id(e.unit) for e in entries_of(self._runtime.groups)}
        overlap = self._timing.waits
        elementwise = tried.cls in ELEMENTWISE and not self._host.whole_only
        kept = kept_of(
            groups,
            members,
            tried.probe,
            tried.master_dtype,
            overlap=overlap,
            elementwise=elementwise,
        )
        planned: list[StepUnit] = []
        try:
            with _finer_units(self._runtime.groups, kept):
                planned = plan_units(
                    self._runtime,
                    groups,
                    members,
                    tried.probe,
                    tried.make,
                    tried.master_dtype,
                    overlap=overlap,
                    on_host=self._host.is_chosen,
                    elementwise=elementwise,
                )
            units = [*self._units, *planned]
            if tried.draws:
                units = in_order(tried.cls.__name__, units, groups)
            inside, ahead = self._timing.inside is not None, self._timing.ahead is not None
            self._host.choose(planned, groups, inside=inside, ahead=ahead)
        except (CapacityError, StepError) as error:
            blocks = [b for unit in planned for b in unit.kept_blocks()]
            self._runtime.manager.remove_blocks(blocks)
            fresh = {id(g): g for u in planned for g in u.grad_units() if id(g) not in homed}
            self._runtime.grads.homes.unreserve(list(fresh.values()))
            let_apart(e for unit in planned for e in unit.entries)
            if isinstance(error, StepError):
                raise
            raise program.refuse_optimizer(error, kept) from None
        self._taking = _Taking(planned, units, members, kept, groups)  # completed from here on
        self.complete()

    def complete(self) -> None:
        """Adds the planned units to the optimizer; continues after an interrupt."""
        taking = self._taking
        if taking is None:
            return
        if taking.kept not in self._kept:
            self._kept.append(taking.kept)
        if taking.kept not in self._runtime.program.optimizers:
            self._runtime.program.optimizers.append(taking.kept)
        if self._tried.eager:
            self._units.order.note_step()
            for unit in taking.planned:
                unit.store_first_state(self._runtime, taking.groups, self._units.state)
        self._units.replace(taking.units)
        self._units.members.taken(taking.members)
        for unit in taking.planned:
            for entry in unit.entries:
                self._runtime.backward.incoming.track(entry)
        self._tried.counts.prepare(taking.planned)
        self._timing.extend(taking.planned, taking.groups)
        self._taking = None

    def has_any_of(self, number: int) -> bool:
        """Whether a parameter of a group has a unit, or gets one."""
        return any(n == number for unit in self._all_units() for _, n in unit.members)

    def register(self, optimizer: object, before_forward: Callable[[bool], None]) -> None:
        """Registers in the runtime what the optimizer keeps in the tiers.

        Args:
            optimizer: The optimizer.
            before_forward: Called before each top-level pass, with whether gradients are computed.
        """
        self._keeper = Keeper(
            self._blocks, self._owned, optimizer, before_forward, self._check_steps
        )
        self._runtime.keepers.append(self._keeper)

    def unregister(self) -> None:
        """Removes from the runtime what :meth:`take_on` and :meth:`register` added."""
        for kept in self._kept:
            self._runtime.program.optimizers.remove(kept)
        if self._keeper is not None:
            self._runtime.keepers.remove(self._keeper)

    def rooms(self) -> list[HostRoom]:
        """Returns the DRAM reserved for steps on the host."""
        return self._host.rooms(self._all_units())

    def _check_steps(self) -> None:
        check_steps(self._runtime, self._units, overlap=self._timing.waits)

    def _all_units(self) -> Sequence[StepUnit]:
        """Returns the units, including those that are being added."""
        return self._units if self._taking is None else self._taking.units

    def _owned(self) -> list[tuple[Tier, Extent]]:
        """Returns the space below HBM that the optimizer has beside blocks."""
        return [place for room in self.rooms() for place in room.owned()]

    def _blocks(self) -> list[Block]:
        """Returns the blocks of state and masters, and those that keep gradients for late state."""
        ahead = self._timing.ahead
        spares = [] if ahead is None else ahead.late.blocks()
        return spares + [block for unit in self._all_units() for block in unit.kept_blocks()]
