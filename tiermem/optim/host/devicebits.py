"""Which units the host may step with the device's bits, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tiermem.nn.groups.clipping import factor_of
from tiermem.nn.groups.gradunit import Change, GradUnit
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.optim.host.exact import Proven, kind_of_step
from tiermem.optim.host.factor import Factor
from tiermem.optim.host.proof import prove
from tiermem.optim.host.room import HostRoom
from tiermem.optim.host.side import HostSide, side_of
from tiermem.optim.host.spread import Rates
from tiermem.optim.looptrial import LoopTrial
from tiermem.optim.rules.scaling import Scaling
from tiermem.optim.rules.separable import Make, copied, settings_of
from tiermem.optim.units.unit import StepUnit

_READS = {torch.float32, torch.bfloat16}  # the loop can read gradients of these dtypes
_Plain = tuple[int, torch.dtype, torch.dtype]


class DeviceBits:
    """Whether the host's steps of one optimizer give the same bits as the device's.

    Attributes:
        reason: Why the last unit that was checked has no such step; empty if it has one.
    """

    def __init__(self, cls: type[torch.optim.Optimizer], make: Make, device: torch.device) -> None:
        """Starts without results.

        Args:
            cls: The optimizer's class.
            make: Creates the device's plain optimizer.
            device: The device whose bits are compared.
        """
        self._cls = cls
        self._make = make
        self._device = device
        self.reason = ""
        self._last: tuple[Any, Proven | str] | None = None
        self._seen: tuple[Change, Factor | None] | None = None
        self._plain: dict[int, tuple[list[GradUnit], _Plain | str]] = {}

    def for_step(self, unit: StepUnit, groups: Sequence[dict[str, Any]]) -> Proven | None:
        """Returns what a step of a unit on the host needs, for the present settings.

        Args:
            unit: A unit of the optimizer.
            groups: Settings of the parameter groups.
        """
        found = self._of(unit, groups)
        self.reason = found if isinstance(found, str) else ""
        return None if isinstance(found, str) else found

    def factor(self, change: Change) -> Factor | None:
        """Returns the factor by which a clipping multiplies; None for any other change."""
        if self._cls is torch.optim.SGD:
            return None  # it keeps first gradients, NaN's bits too, which a product changes
        if self._seen is None or self._seen[0] is not change:
            by = factor_of(change)
            self._seen = change, Factor(by) if by is not None and by.numel() == 1 else None
        return self._seen[1]

    def _of(self, unit: StepUnit, groups: Sequence[dict[str, Any]]) -> Proven | str:
        gradients = unit.grad_units()
        known = self._plain.get(id(unit))
        if known is None or known[0] != gradients:  # another optimizer may keep them differently
            known = self._plain[id(unit)] = gradients, _plainly(unit, gradients)
        plain = known[1]
        if isinstance(plain, str):
            return plain
        number, stepped, weight = plain
        settings = settings_of(groups[number])
        asked = settings, stepped, weight
        if self._last is None or self._last[0] != asked:
            kind = kind_of_step(self._cls, settings, stepped, weight, self._device)
            found = (
                kind if isinstance(kind, str) else prove(kind, settings, self._make, self._device)
            )
            self._last = (copied(settings), stepped, weight), found
        return self._last[1]


def _plainly(unit: StepUnit, held: Sequence[GradUnit]) -> _Plain | str:
    """Returns group number and the dtypes of the stepped tensors and weights, or a problem."""
    numbers = {number for _, number in unit.members}
    if len(numbers) != 1 or len(unit.members) != len(unit.entries):
        return f"{unit.name!r} has parameters of several groups, or one twice"
    kinds = {
        (unit.masters.dtype if unit.masters and unit.has_master(p) else p.dtype, p.dtype)
        for p, _ in unit.members
    }
    if len(kinds) != 1:
        return f"{unit.name!r} has several dtypes"
    specs = [e.group.block.tensors[e.index] for e in unit.entries]
    gradients = [spec for u in held for spec in u.block.tensors]
    odd = next((spec.dtype for spec in gradients if spec.dtype not in _READS), None)
    if odd is not None:
        return f"{unit.name!r} has gradients in {odd}"
    specs += gradients
    if any(torch.empty(s.shape, device="meta").stride() != s.stride for s in specs):
        return f"{unit.name!r} has elements in another order than their numbers"
    ((stepped, weight),) = kinds
    return numbers.pop(), stepped, weight


class ShareTrial(LoopTrial):
    """Finds out whether a share of the host makes a loop faster.

    The limit is often the host's memory bandwidth, which copies and steps share, and its capacity
    is not known before. The bits are the same both ways, so it is tried in the loop itself.
    """

    def host_has_share(self, ticket: object) -> bool:
        """Returns whether the host has a share of a step, and of the forward after it.

        Args:
            ticket: Identifies the step; the same ticket counts once.
        """
        return self.for_step(ticket)


class Movable:
    """Moves units between host and device: the host steps where its bits are the device's.

    That is decided for each step: the settings must have proven bits, gradients must not await a
    change or have a scale, and no weight that would have to leave HBM may have a view.

    Attributes:
        trial: Finds out whether it is faster; None if that is assumed.
        rates: The measured rates; None before.
    """

    def __init__(self, runtime: ModuleRuntime, make: Make) -> None:
        """Starts without units.

        Args:
            runtime: The modules' runtime.
            make: Creates the device's plain optimizer.
        """
        self.trial: ShareTrial | None = None
        self._runtime = runtime
        self._make = make
        self._sides: dict[int, tuple[HostSide, Make]] = {}
        self._waits = False
        self.rates: Rates | None = None

    def take_on(self, units: Sequence[StepUnit], *, tried: bool) -> None:
        """Takes over those units that the host steps.

        Args:
            units: New ones, some of them the host's.
            tried: Whether a trial decides that this is faster; otherwise it is assumed.
        """
        if tried and self.trial is None:
            self.trial = ShareTrial(load=lambda: (self._runtime.names.load, self._waits))
        new = [(unit, host) for unit in units if (host := side_of(unit)) is not None]
        for unit, host in new:
            host.only_exact = True
            self._sides[id(unit)] = host, unit.plain.make
        old = self.rooms()
        for host, _ in self._sides.values():  # all units of an optimizer have one
            host.room = new[-1][1].room
        for room in old:
            if room is not new[-1][1].room:
                room.close()

    def rooms(self) -> list[HostRoom]:
        """Returns the DRAM reserved for its units' host steps, wherever they are stepped now."""
        found = [host.room for host, _ in self._sides.values() if host.room is not None]
        return list({id(room): room for room in found}.values())

    def has(self, unit: StepUnit) -> bool:
        """Whether a unit is assigned to the host, wherever its last step was performed."""
        if id(unit) not in self._sides:
            return unit.host is not None  # by the user's choice
        return self._wants_host() and self.has_share

    def may_have(self, unit: StepUnit) -> bool:
        """Whether a unit is assigned to the host, or would be if the host had its share."""
        return unit.host is not None or (id(unit) in self._sides and self._wants_host())

    def expect(self, *, helps: bool, waits: bool) -> None:
        """Notes whether the host's share is expected to make the loop faster.

        Args:
            helps: Whether it is.
            waits: Whether steps usually wait for the next forward; that is tried separately.
        """
        self._waits = waits
        if self.trial is not None:
            self.trial.expect(helps=helps)

    @property
    def is_settled(self) -> bool:
        """Whether no trial is running on where units are stepped faster."""
        return self.trial is None or self.trial.decided

    @property
    def has_share(self) -> bool:
        """Whether the host has its share now, if there are copies that this would save."""
        return self.trial is None or self.trial.is_on

    def _wants_host(self) -> bool:
        """Whether copies are made that the host's share would save."""
        return not self._runtime.manager.parts.table.all_fit

    def place_ahead(self, units: Sequence[StepUnit], groups: Sequence[dict[str, Any]]) -> str:
        """Moves the units of a block to where their steps can be performed before ``step()``.

        Args:
            units: All units to be stepped; none of them has deferred work.
            groups: Settings of the parameter groups.

        Returns:
            ``"host"`` or ``"device"``; "" if they are left to ``step()``.
        """
        mine = [self.has(unit) for unit in units]
        if not any(mine):
            for unit in units:
                if unit.host is not None:
                    unit.move(None, self._make)
            return "device"
        if not all(mine):
            return ""
        for unit in units:
            found = self._sides.get(id(unit))
            if found is not None and unit.host is None:
                unit.move(*found)
        hosts = map(side_of, units)
        able = all(host is not None and host.may_be_ahead(self._runtime, groups) for host in hosts)
        return "host" if able else ""

    def move(
        self,
        units: Sequence[StepUnit],
        groups: Sequence[dict[str, Any]],
        scaling: Scaling | None,
        ticket: object,
    ) -> None:
        """Moves each unit to the side, host or device, where its step can be performed now.

        Args:
            units: The units to be stepped; none of them has deferred work.
            groups: Settings of the parameter groups.
            scaling: What a GradScaler left to the step.
            ticket: Identifies the step.
        """
        wanted = scaling is None and self._wants_host()
        wanted = wanted and (self.trial is None or self.trial.host_has_share(ticket))
        for unit in units:
            found = self._sides.get(id(unit))
            if found is None:
                continue
            host, make = found
            # the device performs first steps: state is created in the order of the parameters
            may = wanted and (self.trial is None or unit.made is not None)
            able = may and host.is_exact(self._runtime, groups)
            if able and unit.host is None:
                unit.move(host, make)
            elif not able and unit.host is not None:
                unit.move(None, self._make)
