"""Which steps inside backward are left to the next forward: both shall keep the link as busy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from tiermem.core.block import Tier

if TYPE_CHECKING:
    from tiermem.nn.runtime import ModuleRuntime
    from tiermem.optim.unit import StepUnit
    from tiermem.runtime.pacing import PassTimes

_GAPS = 1.1
"""Copies up take so many times their own time, where each waits for the place of another."""
_FREE = 0.9
"""Of forward's compute: how much of it copies may take."""
_MOST = 0.4
_FIRST = 1 / 6
"""Of the model: what forward comes to too soon for its state to be there."""
_LITTLE = 64
_CHANGED = 0.25


class _Postpones(Protocol):
    """Steps blocks inside backward, save for those that it is told to leave."""

    def postpone(self, units: Sequence[StepUnit]) -> None:
        """Leaves these units, and no others, to ``step()``."""
        ...


def share_for_forward(forward: PassTimes, backward: PassTimes, weights: int) -> float:
    """Returns which share of what backward steps on the device is better stepped in forward.

    Where copies take longer than compute in backward and less long in forward, so much that
    backward's copies take as long as its compute, or forward's do.

    Args:
        forward: Of a forward without steps.
        backward: Of the backward with steps.
        weights: Bytes of weights that come up in each.
    """
    if not forward.nbytes or not backward.nbytes:
        return 0.0
    up = min(forward.up, weights * forward.up / forward.nbytes)
    steps = backward.up - weights * backward.up / backward.nbytes
    if steps <= 0.0:
        return 0.0
    wanted = (backward.up * _GAPS - backward.compute) / steps
    able = (forward.compute * _FREE - up) / steps
    return max(0.0, min(wanted, able, _MOST))


def choose(sizes: Sequence[int], share: float) -> list[bool]:
    """Chooses blocks of that share of all their elements, spread evenly over forward.

    Not those that forward begins with, nor those that are next to nothing.

    Args:
        sizes: Elements of each block, in forward's order.
        share: Of them all.
    """
    total, seen, able = sum(sizes), 0, []
    little = max(sizes, default=0) // _LITTLE
    for count in sizes:
        able.append(count > little and seen >= total * _FIRST)
        seen += count
    room = sum(n for n, is_able in zip(sizes, able, strict=True) if is_able)
    density = min(1.0, share * total / room) if room else 0.0
    credit, chosen = 0.0, []
    for count, is_able in zip(sizes, able, strict=True):
        credit += count * density if is_able else 0.0
        chosen.append(is_able and density > 0.0 and credit >= count / 2)
        if chosen[-1]:
            credit -= count
    return chosen


class Balance:
    """Decides that once passes have been measured, and anew where they change much.

    Attributes:
        beside: Whether copies run beside compute; on the CPU nothing is gained.
        share: Of what the device steps inside backward: what is left to forward.
    """

    def __init__(self, runtime: ModuleRuntime, inside: _Postpones) -> None:
        """Nothing is put off at first.

        Args:
            runtime: Knows the passes.
            inside: What steps inside backward.
        """
        self._runtime = runtime
        self._inside = inside
        self.beside = runtime.manager.device.type == "cuda"
        self._decided: PassTimes | None = None
        self.share = 0.0

    def look(self, units: Sequence[StepUnit]) -> None:
        """A step is made, or asked for: decides if enough is known.

        Args:
            units: All of the optimizer's, in the order of the modules.
        """
        if not self.beside:
            return
        manager = self._runtime.manager
        forward = manager.pacing.times.get(self._runtime.last_forward)
        backward = manager.pacing.times.get(self._runtime.last_stepping)
        if forward is None or backward is None:
            return
        before = self._decided
        if before is not None and _alike(before.compute, forward.compute):
            return
        self._decided = forward
        groups: dict[int, list[StepUnit]] = {}
        for unit in units:
            if unit.group is not None:
                groups.setdefault(id(unit.group), []).append(unit)
        mine = [of for of in groups.values() if all(u.host is None for u in of)]
        records = [manager.record(of[0].group.block) for of in groups.values() if of[0].group]
        weights = sum(r.block.nbytes for r in records if r.home is not Tier.HBM)
        self.share = share_for_forward(forward, backward, weights)
        sizes = [sum(p.numel() for u in of for p, _ in u.members) for of in mine]
        chosen = choose(sizes, self.share)
        self._inside.postpone([u for on, of in zip(chosen, mine, strict=True) if on for u in of])


def _alike(before: float, now: float) -> bool:
    return abs(now - before) <= _CHANGED * before
