"""Whether the experts of a kind of call come up one by one, by whole tensors or by whole layers.

Where tokens choose all of them there is nothing to choose. Whole tensors and layers come up beside
the compute of others, whatever their routers will say. A whole layer is a block as any other then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from tiermem.core.block import Tier, align_up
from tiermem.core.experts import Trial, Way, is_worth_whole, moves_little_more
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.memory.expert_seats import Stack
from tiermem.runtime.metrics.pass_timer import LINK_UP
from tiermem.runtime.services.expert_room import ExpertRoom, beside
from tiermem.runtime.services.expert_tensors import moved
from tiermem.transfer.stamps import Stamp

_ALL = 0.8
"""Share of the experts that counts as all of them: the rest costs less than waits for routers."""
_LATER = 0.45
"""What a call that goes expert by expert takes at the least, of the first one that did: 0.53 to 0.7
for five mixtures with 16,384 tokens on H200 machines."""
_COMPUTES = 1.5
"""Times the copies of whole tensors that a pass takes of which compute binds."""
_MOST_KINDS = 64
_MOST_TIMED = 4


@dataclass(slots=True, eq=False)
class _Kind:
    """Calls of a module with so many tokens.

    Attributes:
        chosen: Share of the experts that the last one chose which went expert by expert.
        first: Seconds of the first one that went expert by expert.
        trial: Which way is faster; None before one is begun.
        moved: Bytes of stacks that a pass moves that goes the way which is tried.
        grouped: Whether all stacks were used in grouped products as it was begun.
    """

    chosen: float = 0.0
    first: float | None = None
    grouped: bool = False
    trial: Trial | None = None
    moved: int = 0


@dataclass(slots=True, eq=False)
class _Timed:
    """A pass between two stamps, and the name under which it is measured."""

    kind: _Kind
    trial: Trial | None
    way: Way
    begin: Stamp
    end: Stamp | None = None
    key: Hashable = None


class ExpertWay:
    """Decides for calls without gradients; under the manager's lock."""

    def __init__(
        self, manager: BlockManager, stacks: Mapping[int, Stack], room: ExpertRoom
    ) -> None:
        """Starts with nothing known.

        Args:
            manager: Of the blocks.
            stacks: Of experts, by the id of their blocks.
            room: For pieces of them.
        """
        self._room = room
        self._parts = manager.parts
        self._fetcher = manager.prefetcher.fetcher
        self._stacks = stacks
        self._kinds: dict[Hashable, _Kind] = {}
        self._last: Hashable = None
        self._now: _Kind | None = None
        self._open: _Timed | None = None
        self._timed: deque[_Timed] = deque()

    @property
    def all_chosen(self) -> bool:
        """Whether all experts are expected to be chosen in the call under way, or nearly so."""
        return self._now is not None and self._now.chosen >= _ALL

    def choose(self, name: Hashable) -> Way:
        """Returns which way a call goes.

        Args:
            name: Of calls that do the same, with as many tokens.
        """
        self._drop()
        clock = self._parts.pass_timer.clock
        if not self._stacks or not self._fetcher.beside or not clock.usable():
            return Way.EACH
        self._read()
        name = name, self._parts.table.hbm.capacity, len(self._stacks), self._room.share
        kind = self._now = self._kinds.pop(name, None) or _Kind()
        self._kinds[name] = kind
        if len(self._kinds) > _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        again, self._last = name == self._last, name
        # for one call among others it does not pay: what has settled would be brought up again
        trial = self._trial_of(kind) if again and self.all_chosen else None
        way = Way.EACH if trial is None else trial.way
        if kind.first is None if trial is None else not trial.settled:
            begin = clock.stamp() if len(self._timed) < _MOST_TIMED else None
            self._open = None if begin is None else _Timed(kind, trial, way, begin)
        return way

    def refuse(self, way: Way) -> None:
        """Notes that a call that begins cannot go the way that was chosen, even if it once could.

        Args:
            way: That way; the call goes expert by expert.
        """
        kind, timed, self._open = self._now, self._open, None
        if kind is not None and kind.trial is not None:
            kind.trial.refuse(way)
        if timed is not None:
            self._parts.pass_timer.clock.free(timed.begin)

    def ended(self, way: Way, key: Hashable) -> None:
        """Notes that a call has ended.

        Args:
            way: Which way it went.
            key: Under which it is measured.
        """
        kind, timed = self._now, self._open
        self._now = self._open = None
        if kind is not None and way is Way.EACH:
            stacks = self._stacks.values()
            chosen = sum(len(stack.popularity.last) for stack in stacks)
            kind.chosen = chosen / sum(stack.experts for stack in stacks)
        if timed is not None:
            if way is not timed.way and timed.trial is not None:
                timed.trial.refuse(timed.way)
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
                if timed.trial is not None:
                    timed.trial.note(timed.way, seconds, self._least(timed, seconds))
                elif timed.kind.first is None:
                    timed.kind.first = seconds
                clock.free(timed.end)
            clock.free(timed.begin)
            self._timed.popleft()

    def _trial_of(self, kind: _Kind) -> Trial | None:
        """Returns the trial of a kind of calls in which all experts are chosen, if it is worth one.

        It begins anew where the module reads its weights otherwise than before.
        """
        grouped = all(stack.grouped for stack in self._stacks.values())
        if kind.trial is None or kind.grouped is not grouped:
            way, kind.moved = self._worth_a_trial(grouped=grouped)
            kind.trial, kind.grouped = None if way is Way.EACH else Trial(way), grouped
        return kind.trial

    def _worth_a_trial(self, *, grouped: bool) -> tuple[Way, int]:
        """Returns the way that may be faster than one by one, and how many bytes of stacks move.

        None is where a disk is read.
        """
        stacks, table = self._stacks.values(), self._parts.table
        if any(table[stack.block.id].home is not Tier.DRAM for stack in stacks):
            return Way.EACH, 0
        total = sum(stack.block.nbytes for stack in stacks)
        counts = self._room.counts(stacks, tensors=True) if grouped else None
        if counts is not None:
            nbytes = moved(stacks, counts)
            seats = sum(size * count for size, count in counts.items())
            if nbytes is not None and moves_little_more(nbytes, total - seats):
                return Way.TENSORS, nbytes
        whole = is_worth_whole(self._beside(), [align_up(s.block.nbytes) for s in stacks])
        return (Way.LAYERS, total) if whole else (Way.EACH, 0)

    def _beside(self) -> int:
        """Bytes of HBM beside all blocks but the stacks."""
        table = self._parts.table
        others = beside(table, self._stacks.keys())
        return table.hbm.capacity - table.fixed_nbytes() - sum(others)

    def _least(self, timed: _Timed, seconds: float) -> float:
        """Returns the seconds that a pass takes at the least, whichever way it goes.

        Those of the copies of the experts that HBM has no room for, or of compute, as far as it is
        known: what is measured of passes that go expert by expert has waits for copies in it. And
        a share of the first of them, of which the later ones are not known to take less. Where a
        pass by whole tensors takes far longer than its copies, the rest is compute.
        """
        estimates, link = self._parts.pass_timer.estimates, LINK_UP[Tier.DRAM]
        nbytes = timed.kind.chosen * sum(s.block.nbytes for s in self._stacks.values())
        rate = estimates.fastest(link)
        computes = estimates.computes(timed.key) if timed.way is Way.LAYERS else None
        if timed.way is Way.TENSORS and seconds > _COMPUTES * timed.kind.moved / rate:
            computes = seconds
        copies = max(0, nbytes - self._beside()) / rate
        return max(copies, computes or 0.0, _LATER * (timed.kind.first or 0.0))
