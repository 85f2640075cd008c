"""Which units the host may step with the device's bits, and when."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
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
from tiermem.optim.rules.scaling import Scaling
from tiermem.optim.rules.separable import Make, copied, settings_of
from tiermem.optim.units.unit import StepUnit

_AT_FIRST = 12
"""Steps until all others are where they will be made, inside backward or in the next forward, and
some more: what is measured of a few steps is that of the side that is mostly the faster one."""
_ANOTHER_LOAD = 6
_SETTLING = 2
_TIMED = 4
_FASTER = 0.97
_FEW, _FAR_SLOWER = 2, 1.1
"""Without the share so few steps do, if they take so many times as long as with it."""
_WATCHED = 8
_PAUSE, _LONGEST_PAUSE = 16, 1024  # steps
_MOST_LOADS = 32
_READS = {torch.float32, torch.bfloat16}  # in which the loop reads gradients
_Plain = tuple[int, torch.dtype, torch.dtype]


class DeviceBits:
    """Whether steps of one optimizer on the host have the bits of the device's.

    Attributes:
        reason: Why the last unit that was asked for has none; empty where it has.
    """

    def __init__(self, cls: type[torch.optim.Optimizer], make: Make, device: torch.device) -> None:
        """Starts with nothing tried.

        Args:
            cls: The optimizer's class.
            make: Makes the device's plain optimizer.
            device: Whose bits are meant.
        """
        self._cls = cls
        self._make = make
        self._device = device
        self.reason = ""
        self._last: tuple[Any, Proven | str] | None = None
        self._seen: tuple[Change, Factor | None] | None = None
        self._plain: dict[int, tuple[list[GradUnit], _Plain | str]] = {}

    def for_step(self, unit: StepUnit, groups: Sequence[dict[str, Any]]) -> Proven | None:
        """Returns what a step of a unit on the host needs, with settings as they are.

        Args:
            unit: One of the optimizer's.
            groups: Settings of the parameter groups.
        """
        found = self._of(unit, groups)
        self.reason = found if isinstance(found, str) else ""
        return None if isinstance(found, str) else found

    def factor(self, change: Change) -> Factor | None:
        """Returns what a clipping multiplies gradients by; None for any other change."""
        if self._cls is torch.optim.SGD:
            return None  # it keeps first gradients, NaN's bits too, which a product changes
        if self._seen is None or self._seen[0] is not change:
            by = factor_of(change)
            self._seen = change, Factor(by) if by is not None and by.numel() == 1 else None
        return self._seen[1]

    def _of(self, unit: StepUnit, groups: Sequence[dict[str, Any]]) -> Proven | str:
        gradients = unit.grad_units()
        known = self._plain.get(id(unit))
        if known is None or known[0] != gradients:  # another optimizer may keep them otherwise
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
    """Returns group number and dtypes of what is stepped and of weights, or what is odd."""
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


@dataclass(slots=True)
class _Tried:
    """What was tried with passes of one load.

    Attributes:
        on_host: Whether the host has its share by now.
        settling: So many steps more do not count.
        decided: Whether the side stays so for now.
        other_is_next: Whether the other side is still to be tried.
        times: Seconds of the last steps that count: while it is tried, or since it is decided.
        shared: Seconds of a step with the share, when that was tried last.
        without: The same without it.
        helps: Whether the share is expected to help, as far as bytes and compute tell.
        pause: Steps before it is tried again, at least.
        since: Steps since it was decided.
    """

    on_host: bool
    settling: int
    decided: bool = False
    other_is_next: bool = True
    times: deque[float] = field(default_factory=lambda: deque(maxlen=_WATCHED))
    shared: float = math.inf
    without: float = math.inf
    helps: bool = True
    pause: int = _PAUSE
    since: int = 0

    def takes(self, seconds: float) -> None:
        """Notes how long a step took; the next one may be made on the other side."""
        if self.settling:
            self.settling -= 1
            return
        self.times.append(seconds)
        if self.decided:
            self.since += 1
            if self.since >= self.pause and self._is_doubtful():
                self.decided, self.other_is_next = False, True
                self._go_to(on_host=False)
        elif len(self.times) == _TIMED or self._is_clear():
            self._has_tried(statistics.median(self.times))

    def expect(self, *, helps: bool) -> None:
        """Notes whether the share is expected to help: if not, it is not tried.

        What has been tried is known better.
        """
        if helps is self.helps:
            return
        self.helps = helps
        if self.is_measured:
            return
        self.decided, self.other_is_next = not helps, True
        self._go_to(on_host=helps)
        self.since = 0
        if helps:
            self.settling = _ANOTHER_LOAD

    @property
    def is_measured(self) -> bool:
        """Whether both sides have been tried."""
        return math.isfinite(self.shared) and math.isfinite(self.without)

    def _is_clear(self) -> bool:
        """Whether steps without the share, tried last, are seen to be far slower already."""
        few = len(self.times) == _FEW and not (self.on_host or self.other_is_next)
        return few and statistics.mean(self.times) > _FAR_SLOWER * self.shared

    def _has_tried(self, usual: float) -> None:
        """Notes how long steps take on the present side; goes to the other, or decides."""
        if self.on_host:
            self.shared = usual
        else:
            self.without = usual
        if self.other_is_next:
            self.other_is_next = False
            self._go_to(on_host=not self.on_host)
            return
        self.decided = True
        self._go_to(on_host=self.shared < _FASTER * self.without)
        self.since, self.pause = 0, min(2 * self.pause, _LONGEST_PAUSE)

    def _go_to(self, *, on_host: bool) -> None:
        self.on_host, self.settling = on_host, _SETTLING
        self.times.clear()

    def _is_doubtful(self) -> bool:
        """Whether it may be otherwise by now: other programs need the host's cores as well."""
        if not self.on_host:
            return self.helps
        return statistics.median(self.times) > self.without


class ShareTrial:
    """Whether a share of the host makes a loop faster: some steps are made with and without.

    What limits is often the host's memory, which serves copies and steps, and how much that
    bears is not known before. Bits are the same both ways, so it is tried in the loop itself: with
    each number of tokens, since what takes longest differs, and remembered. The first steps have
    the share, those with another number of tokens what the last ones had. Where steps with the
    share come to take longer than those without did, and where there is none, it is tried anew
    after a while: 32 steps, then 64, ..., 1024. Where it is not expected to make it faster, it is
    not tried.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        load: Callable[[], Hashable] = lambda: None,
    ) -> None:
        """Begins with the share.

        Args:
            now: Returns seconds.
            load: Returns what the present passes have to do; whatever is equal is tried together.
        """
        self._now = now
        self._load = load
        self._ticket: object = None
        self._began = 0.0
        self._by_load: dict[Hashable, _Tried] = {}
        self._last: _Tried | None = None

    @property
    def on_host(self) -> bool:
        """Whether the host has its share by now."""
        return self._tried.on_host

    @on_host.setter
    def on_host(self, on_host: bool) -> None:
        self._tried.on_host = on_host

    @property
    def decided(self) -> bool:
        """Whether that stays so for now, with as many tokens."""
        return self._tried.decided

    @property
    def is_measured(self) -> bool:
        """Whether both sides have been tried with as many tokens."""
        return self._tried.is_measured

    def expect(self, *, helps: bool) -> None:
        """Notes whether the share is expected to make passes with as many tokens faster."""
        self._tried.expect(helps=helps)

    @property
    def _tried(self) -> _Tried:
        load = self._load()
        found = self._by_load.get(load)
        if found is None:
            last = self._last
            # what is before the first is no step
            found = (
                _Tried(True, _AT_FIRST + 1) if last is None else _Tried(last.on_host, _ANOTHER_LOAD)
            )
            self._by_load[load] = found
            if len(self._by_load) > _MOST_LOADS:
                del self._by_load[next(iter(self._by_load))]
        self._last = found
        return found

    def host_has_share(self, ticket: object) -> bool:
        """Returns whether the host has its share in a step, and in the forward after it.

        Args:
            ticket: Stands for the step; with the same one it counts once.
        """
        tried = self._tried
        if ticket is self._ticket:
            return tried.on_host
        ended, self._ticket = self._now(), ticket
        took, self._began = ended - self._began, ended
        tried.takes(took)
        return tried.on_host


class Movable:
    """Moves units between host and device: the host steps where its bits are the device's.

    That is decided for each step: settings whose bits are proved, gradients that await no change
    and have no scale, no view of a weight that would have to leave HBM.

    Attributes:
        trial: Finds out whether it is faster; None where that is taken for granted.
        rates: As measured; None before.
    """

    def __init__(self, runtime: ModuleRuntime, bits: DeviceBits, make: Make) -> None:
        """Starts without units.

        Args:
            runtime: The modules' runtime.
            bits: Decides which steps have the device's bits.
            make: Makes the device's plain optimizer.
        """
        self.trial: ShareTrial | None = None
        self._runtime = runtime
        self._bits = bits
        self._make = make
        self._sides: dict[int, tuple[HostSide, Make]] = {}
        self._waits = False
        self.rates: Rates | None = None

    def take_on(self, units: Sequence[StepUnit], *, tried: bool) -> None:
        """Takes over those units that the host steps.

        Args:
            units: New ones, some of them the host's.
            tried: Whether it is tried that this is faster; else it is so.
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
        """Whether a unit is the host's, wherever its last step was made."""
        if id(unit) not in self._sides:
            return unit.host is not None  # by the user's choice
        return self._wants_host() and self.has_share

    def may_have(self, unit: StepUnit) -> bool:
        """Whether a unit is the host's, or would be if that had its share."""
        return unit.host is not None or (id(unit) in self._sides and self._wants_host())

    def expect(self, *, helps: bool, waits: bool) -> None:
        """Notes whether the host's share is expected to make the loop faster.

        Args:
            helps: Whether it is.
            waits: Whether steps wait for the next forward, as a rule; that is tried by itself.
        """
        self._waits = waits
        if self.trial is not None:
            self.trial.expect(helps=helps)

    @property
    def has_share(self) -> bool:
        """Whether the host has its share by now, where there are copies that it would spare."""
        return self.trial is None or self.trial.on_host

    def _wants_host(self) -> bool:
        """Whether copies are made that the host's share would spare."""
        return not self._runtime.manager.parts.table.all_fit

    def place_ahead(self, units: Sequence[StepUnit], groups: Sequence[dict[str, Any]]) -> str:
        """Moves the units of a block to where their steps can be made before ``step()``.

        Args:
            units: All that are to be stepped; none of them has deferred work.
            groups: Settings of the parameter groups.

        Returns:
            ``"host"`` or ``"device"``; nothing where they are left to ``step()``.
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
        """Moves each unit to the side, host or device, where its step can be made now.

        Args:
            units: What is to be stepped; none of them has deferred work.
            groups: Settings of the parameter groups.
            scaling: What a GradScaler left to the step.
            ticket: Stands for the step.
        """
        wanted = scaling is None and self._wants_host()
        wanted = wanted and (self.trial is None or self.trial.host_has_share(ticket))
        for unit in units:
            found = self._sides.get(id(unit))
            if found is None:
                continue
            host, make = found
            # first steps are the device's: state comes about in the order of the parameters
            may = wanted and (self.trial is None or unit.made is not None)
            able = may and host.is_exact(self._runtime, groups)
            if able and unit.host is None:
                unit.move(host, make)
            elif not able and unit.host is not None:
                unit.move(None, self._make)
