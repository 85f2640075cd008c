"""Whether the experts of a kind of call are copied one by one, as whole tensors or whole layers.

If tokens choose all of them, there is no choice to wait for. Whole tensors and layers are copied
during the compute of others, whatever their routers choose. Then a whole layer is an ordinary
block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import torch

from tiermem.core.block import Tier, align_up
from tiermem.core.experts import Trial, Way, is_worth_whole, moves_little_more
from tiermem.core.pace import FASTEST_UP
from tiermem.core.packing import PACKED_TILE, TILE
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.memory.expert_seats import Stack
from tiermem.runtime.metrics.pass_timer import LINK_UP
from tiermem.runtime.services.expert_room import ExpertRoom, beside
from tiermem.runtime.services.expert_tensors import moved
from tiermem.transfer.stamps import Stamp

_ALL = 0.8
"""Share of the experts that counts as all of them: copying all costs less than waiting."""
_LATER = 0.45
"""The least time of an expert-by-expert call, as a fraction of the first one: 0.53 to 0.7
for five mixtures with 16,384 tokens on H200 machines."""
_COMPUTES = 1.5
"""A pass is bound by compute if it takes so many times the copies of whole tensors."""
_MANY = 16
"""Tokens per expert with which all experts are expected to be chosen, before that is known."""
_PIECE = 80e-6
"""Host seconds for one tensor of one expert that is copied and read by itself, including the
model's own code: on the slower H100 and H200 machines; 50 us on others."""
_UNPACKED = 0.93
"""If a pass by whole tensors with packed copies is bound by compute, kernels that unpack only
disturb it: copies without packing are then estimated to take this fraction of its time."""
_PACKED = 2
"""Number of passes by whole tensors that are timed to find that out."""
_MOST_KINDS = 64
_MOST_TIMED = 4


@dataclass(slots=True, eq=False)
class _Kind:
    """Calls of a module with a certain number of tokens.

    Attributes:
        chosen: Share of the experts that the last checked call chose; None before.
        marks: For each layer, which experts the first call chose, ``[experts]``, until they are
            read.
        first: Seconds of the first call that went expert by expert.
        trial: Finds out which way is faster; None before it begins.
        moved: Bytes of stacks that a pass moves on the way that is tried.
        grouped: Whether all stacks were used in grouped products when the trial began.
        packed: Seconds of each timed pass by whole tensors with packed copies.
        unpacks: Whether packed copies are used, which take less time to copy.
    """

    chosen: float | None = None
    marks: list[torch.Tensor] = field(default_factory=list)
    first: float | None = None
    grouped: bool = False
    trial: Trial | None = None
    moved: int = 0
    packed: list[float] = field(default_factory=list)
    unpacks: bool = True


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
    """Decides the way for calls without gradients; under the manager's lock.

    Attributes:
        looks: Whether the choices of a call by whole tensors are to be noted.
    """

    def __init__(
        self, manager: BlockManager, stacks: Mapping[int, Stack], room: ExpertRoom
    ) -> None:
        """Starts without measurements.

        Args:
            manager: The manager of the blocks.
            stacks: Stacks of experts, by the id of their blocks.
            room: The expert room.
        """
        self._room = room
        self._parts = manager.parts
        self._fetcher = manager.prefetcher.fetcher
        self._stacks = stacks
        self._kinds: dict[Hashable, _Kind] = {}
        self._last: Hashable = None
        self._now: _Kind | None = None
        self._open: _Timed | None = None
        self.looks = False
        self._timed: deque[_Timed] = deque()

    @property
    def all_chosen(self) -> bool:
        """Whether all or nearly all experts are expected to be chosen in the current call."""
        return self._now is not None and (self._now.chosen or 0.0) >= _ALL

    @property
    def unpacks(self) -> bool:
        """Whether the current call uses packed copies of experts, if there are any."""
        return self._now is None or self._now.unpacks

    def choose(self, name: Hashable, tokens: int) -> Way:
        """Returns the way of a call.

        Args:
            name: Name of calls that do the same, with as many tokens.
            tokens: Their number; 0 if unknown.
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
        if kind.marks:
            marks, kind.marks = torch.cat(kind.marks), []
            kind.chosen = float(marks.float().mean())  # waits for that call, once
        many = tokens >= _MANY * max(stack.experts for stack in self._stacks.values())
        trial = None
        if self.all_chosen or (many and (kind.chosen is None or self._host_binds(kind))):
            trial = self._trial_of(kind, many=many)
        # for a single call among others a switch is not worth it: seated pieces would be copied
        # again
        if trial is not None and not again and not (many and trial.way is Way.TENSORS):
            trial = None
        way = Way.EACH if trial is None else trial.way
        self.looks = way is Way.TENSORS and kind.chosen is None
        timed = kind.first is None if trial is None else not trial.settled
        if timed or (way is Way.TENSORS and self._may_unpack(kind)):
            begin = clock.stamp() if len(self._timed) < _MOST_TIMED else None
            self._open = None if begin is None else _Timed(kind, trial, way, begin)
        return way

    def look(self, experts: int, choices: torch.Tensor) -> None:
        """Notes the choices of a layer's call; the host does not wait.

        Args:
            experts: The number of experts of the layer.
            choices: Indices of experts, of any shape.
        """
        if self._now is not None:
            mark = torch.zeros(experts, dtype=torch.bool, device=choices.device)
            mark.index_fill_(0, choices.reshape(-1).long().clamp(0, experts - 1), True)
            self._now.marks.append(mark)

    def refuse(self, way: Way) -> None:
        """Notes that the current call cannot go the chosen way, even if that was possible before.

        Args:
            way: The chosen way; the call goes expert by expert.
        """
        if self._now is not None and self._now.trial is not None:
            self._now.trial.refuse(way)
        self._stop_timing()

    def ended(self, way: Way, key: Hashable) -> None:
        """Notes that a call has ended.

        Args:
            way: The way that it went.
            key: The name under which it is measured.
        """
        kind, timed, self._now = self._now, self._open, None
        self.looks = False
        if kind is not None and way is Way.EACH:
            stacks = self._stacks.values()
            chosen = sum(len(stack.popularity.last) for stack in stacks)
            kind.chosen = chosen / sum(stack.experts for stack in stacks)
        if timed is None or way is not timed.way:  # the room was given back meanwhile
            self._stop_timing()
            return
        self._open = None
        timed.end, timed.key = self._parts.pass_timer.clock.stamp(), key
        self._timed.append(timed)

    def reset(self) -> None:
        """Forgets what is being timed, after an exception anywhere."""
        self._drop()
        self._last = None
        for timed in self._timed:
            for stamp in (timed.begin, timed.end):
                if stamp is not None:
                    self._parts.pass_timer.clock.free(stamp)
        self._timed.clear()

    # -- inside ----------------------------------------------------------

    def _drop(self) -> None:
        """Drops a call that has not ended."""
        self._now, self.looks = None, False
        self._stop_timing()

    def _stop_timing(self) -> None:
        """Stops timing the current call."""
        timed, self._open = self._open, None
        if timed is not None:
            self._parts.pass_timer.clock.free(timed.begin)

    def _read(self) -> None:
        """Enters the calls that the device has completed."""
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
                if timed.way is Way.TENSORS and self._may_unpack(timed.kind):
                    self._note_packed(timed.kind, seconds)
                clock.free(timed.end)
            clock.free(timed.begin)
            self._timed.popleft()

    def _may_unpack(self, kind: _Kind) -> bool:
        """Whether it is still to be tested if packed copies make a pass by tensors faster."""
        return len(kind.packed) < _PACKED and len(self._parts.transfers.packed) > 0

    def _note_packed(self, kind: _Kind, seconds: float) -> None:
        """Enters a pass by whole tensors with packed copies, if there were packed copies then."""
        kind.packed.append(seconds)
        if len(kind.packed) == _PACKED:
            rate = self._parts.pass_timer.estimates.fastest(LINK_UP[Tier.DRAM])
            kind.unpacks = kind.moved / rate > _UNPACKED * min(kind.packed)

    def _trial_of(self, kind: _Kind, *, many: bool) -> Trial | None:
        """Returns the trial for calls in which all experts are chosen, if it is worth one.

        It begins again if the module reads its weights in another way than before. With many tokens
        per expert, whole tensors have been the faster way in every measurement.
        """
        grouped = all(stack.grouped for stack in self._stacks.values())
        if kind.trial is None or kind.grouped is not grouped:
            way, kind.moved = self._worth_a_trial(grouped=grouped)
            kind.trial, kind.grouped = None if way is Way.EACH else Trial(way), grouped
            kind.packed, kind.unpacks = [], True
            if kind.trial is not None and many and way is Way.TENSORS:
                kind.trial.settled = True
        return kind.trial

    def _host_binds(self, kind: _Kind) -> bool:
        """Whether the host takes longer for each expert that is chosen than the link for all."""
        stacks, packed = self._stacks.values(), len(self._parts.transfers.packed) > 0
        pieces = (kind.chosen or 0.0) * sum(stack.experts * len(stack.rows) for stack in stacks)
        nbytes = kind.moved * (PACKED_TILE / TILE if packed and kind.unpacks else 1.0)
        rate = self._parts.pass_timer.estimates.best_rate(LINK_UP[Tier.DRAM]) or FASTEST_UP
        return 0.0 < nbytes < pieces * _PIECE * rate

    def _worth_a_trial(self, *, grouped: bool) -> tuple[Way, int]:
        """Returns the way that may be faster than one by one, and how many bytes of stacks move.

        There is none if a disk is read.
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
        """Bytes of HBM beside all blocks except the stacks."""
        table = self._parts.table
        others = beside(table, self._stacks.keys())
        return table.hbm.capacity - table.fixed_nbytes() - sum(others)

    def _least(self, timed: _Timed, seconds: float) -> float:
        """Returns the least seconds that a pass takes, whichever way it goes.

        The maximum of three: the copies of the experts for which HBM has no room; compute, as far
        as it is known, since passes that go expert by expert include waits for copies; and a share
        of the first such pass, as later ones are not known to take less. If a pass by whole tensors
        takes far longer than its copies, the rest is compute.
        """
        estimates, link = self._parts.pass_timer.estimates, LINK_UP[Tier.DRAM]
        nbytes = (timed.kind.chosen or 1.0) * sum(s.block.nbytes for s in self._stacks.values())
        rate = estimates.fastest(link)
        computes = estimates.computes(timed.key) if timed.way is Way.LAYERS else None
        if timed.way is Way.TENSORS and seconds > _COMPUTES * timed.kind.moved / rate:
            computes = seconds
        copies = max(0, nbytes - self._beside()) / rate
        return max(copies, computes or 0.0, _LATER * (timed.kind.first or 0.0))
