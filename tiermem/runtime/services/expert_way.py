"""Whether the experts of a kind of call come up one by one, or with their whole layer.

Where tokens choose all of them there is nothing to choose. A whole layer is a block as any other
then: it comes up beside the compute of others, whatever its router will say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field

from tiermem.core.block import Tier, align_up
from tiermem.core.experts import Trial, is_worth_whole
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.memory.expert_seats import Stack
from tiermem.runtime.metrics.pass_timer import LINK_UP
from tiermem.runtime.services.expert_room import beside
from tiermem.transfer.stamps import Stamp

_ALL = 0.9
"""Share of a layer's experts that counts as all of them."""
_MOST_KINDS = 64
_MOST_TIMED = 4


@dataclass(slots=True, eq=False)
class _Kind:
    """Calls of a module with so many tokens.

    Attributes:
        all_chosen: Whether the last one that went expert by expert chose all of each layer.
        trial: Which way is faster.
    """

    all_chosen: bool = False
    trial: Trial = field(default_factory=Trial)


@dataclass(slots=True, eq=False)
class _Timed:
    """A pass between two stamps, and the name under which it is measured."""

    kind: _Kind
    whole: bool
    begin: Stamp
    end: Stamp | None = None
    key: Hashable = None


class ExpertWay:
    """Decides for calls without gradients; under the manager's lock."""

    def __init__(self, manager: BlockManager, stacks: Mapping[int, Stack]) -> None:
        """Starts with nothing known.

        Args:
            manager: Of the blocks.
            stacks: Of experts, by the id of their blocks.
        """
        self._parts = manager.parts
        self._fetcher = manager.prefetcher.fetcher
        self._stacks = stacks
        self._kinds: dict[Hashable, _Kind] = {}
        self._last: Hashable = None
        self._now: _Kind | None = None
        self._open: _Timed | None = None
        self._timed: deque[_Timed] = deque()

    def choose(self, name: Hashable) -> Collection[int]:
        """Returns the stacks, by the id of their blocks, that come up whole in a call.

        Args:
            name: Of calls that do the same, with as many tokens.
        """
        self._drop()
        clock = self._parts.pass_timer.clock
        if not self._stacks or not self._fetcher.beside or not clock.usable():
            return ()
        self._read()
        name = name, self._parts.table.hbm.capacity, len(self._stacks)
        kind = self._now = self._kinds.pop(name, None) or _Kind()
        self._kinds[name] = kind
        if len(self._kinds) > _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        again, self._last = name == self._last, name
        # for one call among others it does not pay: what has settled would be brought up again
        if not again or not kind.all_chosen or not self._is_worth_it():
            return ()
        whole = kind.trial.whole
        if not kind.trial.settled and len(self._timed) < _MOST_TIMED:
            begin = clock.stamp()
            self._open = None if begin is None else _Timed(kind, whole, begin)
        return self._stacks if whole else ()

    def ended(self, whole: bool, key: Hashable) -> None:
        """Notes that a call has ended.

        Args:
            whole: Whether its experts came up whole.
            key: Under which it is measured.
        """
        kind, timed = self._now, self._open
        self._now = self._open = None
        if kind is not None and not whole:
            stacks = self._stacks.values()
            kind.all_chosen = all(len(s.popularity.last) >= _ALL * s.experts for s in stacks)
        if timed is not None:
            timed.end, timed.key = self._parts.pass_timer.clock.stamp(), key
            self._timed.append(timed)

    def reset(self) -> None:
        """Forgets what is being timed, after an exception anywhere."""
        # stamps are not given back: where it was cut short, they may have been already
        self._open = self._now = self._last = None
        self._timed.clear()

    # -- inside ----------------------------------------------------------

    def _drop(self) -> None:
        """Drops a call that has not come to its end."""
        timed, self._open, self._now = self._open, None, None
        if timed is not None:
            self._parts.pass_timer.clock.free(timed.begin)

    def _read(self) -> None:
        """Enters the calls that the device is done with."""
        clock = self._parts.pass_timer.clock
        while self._timed:
            timed = self._timed[0]
            if timed.end is not None:
                if not clock.passed(timed.end):
                    return
                seconds = clock.seconds(timed.begin, timed.end)
                timed.kind.trial.note(timed.whole, seconds, self._least(timed))
                clock.free(timed.end)
            clock.free(timed.begin)
            self._timed.popleft()

    def _is_worth_it(self) -> bool:
        """Whether whole layers are worth a trial; they are not where a disk is read."""
        stacks, table = self._stacks.values(), self._parts.table
        if any(table[stack.block.id].home is not Tier.DRAM for stack in stacks):
            return False
        return is_worth_whole(self._room(), [align_up(stack.block.nbytes) for stack in stacks])

    def _room(self) -> int:
        """Bytes of HBM beside all blocks but the stacks."""
        table = self._parts.table
        others = beside(table, self._stacks.keys())
        return table.hbm.capacity - table.fixed_nbytes() - sum(others)

    def _least(self, timed: _Timed) -> float:
        """Returns the seconds that a pass takes at the least, whichever way it goes.

        Those of the copies of the experts that HBM has no room for, or of compute, as far as it is
        known: what is measured of passes that go expert by expert has waits for copies in it.
        """
        estimates, link = self._parts.pass_timer.estimates, LINK_UP[Tier.DRAM]
        nbytes = sum(align_up(stack.block.nbytes) for stack in self._stacks.values())
        computes = estimates.computes(timed.key) if timed.whole else None
        return max(max(0, nbytes - self._room()) / estimates.fastest(link), computes or 0.0)
