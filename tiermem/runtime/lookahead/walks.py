"""How a schedule is walked ahead of the compute: use by use, or around a ring."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from tiermem.core.block import Block, Role, Tier
from tiermem.core.residency import Record, State
from tiermem.core.schedule import Schedule
from tiermem.runtime.loans.host_loans import HostLoans
from tiermem.runtime.lookahead.stream_plan import StreamPlan
from tiermem.runtime.parts import Parts


class Fetcher:
    """Begins fetches of blocks that are used later.

    Attributes:
        beside: Whether copies from DRAM run beside the compute, as on a GPU. On the CPU, the
            thread that computes makes such a copy, so it gains nothing by beginning early, and only
            files are worth prefetching.
        number: Number of the current pass.
        fill: Begins a fetch, if that evicts nothing needed sooner: see
            :meth:`BlockManager.try_fill`.
        lent: Blocks whose home is lent to code on the host, by id: they are not fetched before they
            are back.
        laid_out: Whether the next pass is expected to follow a layout.
    """

    def __init__(
        self, parts: Parts, host_loans: HostLoans, fill: Callable[[Record, int], bool]
    ) -> None:
        """Works on ``parts``.

        Args:
            parts: The parts of the manager.
            host_loans: Knows which blocks are on loan, which are not fetched.
            fill: :meth:`BlockManager.try_fill`.
        """
        self.beside = parts.device.type == "cuda"
        self.number = 0
        self.fill = fill
        self.lent = host_loans.out
        self.laid_out = False
        self._planner = parts.planner
        self._deferred = parts.deferred
        self._copy = parts.copy
        self._transfers = parts.transfers
        self._waste = parts.transfers.waste
        # the foreseen pass that was looked up last: begin, end, number and name
        self._pass: tuple[int, int, tuple[int, Hashable]] = (0, 0, (0, None))

    def begin_schedule(self) -> None:
        """Notes that positions refer to a new schedule from now on."""
        self._pass = (0, 0, (0, None))

    def is_due(self, record: Record, schedule: Schedule, position: int) -> bool:
        """Whether the state of a block permits and requires a fetch for its use at a position."""
        if not record.defined or record.in_hbm is not State.ABSENT:
            return False
        if self._waste.stopped:
            key = self._pass_at(schedule, position)[1]
            if self._waste.stops(key, record.block.id):
                return False
        return self.beside or record.home is not Tier.DRAM

    def begin(self, record: Record, schedule: Schedule, position: int, cursor: int) -> bool:
        """Begins to fetch a block for its use at a position; returns whether there was room.

        Args:
            record: The block; :meth:`is_due` was true, or it holds no data and only gets a place.
            schedule: The schedule.
            position: Position of the use.
            cursor: Position of the compute.
        """
        if not self.fill(record, position - cursor):
            return False
        if not record.defined:
            return True
        number, key = self._pass_at(schedule, position)
        self._waste.pending[record.block.id] = (self.number + number, key)  # Waste.fetched
        return True

    def is_back(self, block_id: int) -> bool:
        """Whether a block that was lent is at home again, so that it can be fetched.

        This waits for a confirmed step on the host while the link is busy: a copy to HBM runs after
        all compute submitted before it, so otherwise the host would only submit more compute before
        the copy (simulated, for a Llama clipped in each step: 557 instead of 610 ms).
        """
        if block_id in self._deferred.owed and self._transfers.mover is None:
            risen = self._copy.risen()
            if risen is not None and not risen.done():
                self._deferred.finish(block_id)
        return block_id not in self.lent

    def _pass_at(self, schedule: Schedule, position: int) -> tuple[int, Hashable]:
        """Returns the number and name of the foreseen pass at a position."""
        passes = schedule.passes
        if not passes:
            return 1, self._planner.key
        begin, end, found = self._pass
        if not begin <= position < end:  # mostly it is the one looked up before
            number = bisect_right(passes, position, key=lambda entry: entry[0]) - 1
            end = passes[number + 1][0] if number + 1 < len(passes) else len(schedule)
            found = (number, passes[number][1])
            self._pass = (passes[number][0], end, found)
        return found


_AUTO_BLOCKS = 2
_MOST_BLOCKS = 64
_BURST = 4  # fetches at one use: the first block is also needed by compute, which waits meanwhile
_FIRST = 4
"""Uses at the begin of a pass at which a ring fetches nothing: the device is often idle then, as
models copy values to the host, and host time before kernels are launched is lost."""
_MANY = 64  # uses of a schedule of which that is a small part


@dataclass(frozen=True, slots=True)
class Reach:
    """How far ahead of the compute fetches may begin, by the user's settings.

    Attributes:
        blocks: Blocks ahead of the one in use; None if measured times decide.
        least: Bytes ahead if nothing has been measured.
    """

    blocks: int | None
    least: int


class _Ahead:
    """The uses ahead of the compute, of blocks that take room.

    Attributes:
        uses: Position and block of each, in order.
        often: How many uses of each block there are, by id.
        nbytes: Bytes of the blocks, each counted once.
    """

    def __init__(self) -> None:
        """Starts with none."""
        self.uses: deque[tuple[int, Block]] = deque()
        self.often: dict[int, int] = {}
        self.nbytes = 0

    def clear(self) -> None:
        """Removes all uses."""
        self.uses.clear()
        self.often.clear()
        self.nbytes = 0

    def append(self, position: int, block: Block) -> None:
        """Adds a use; a block that is used again takes no more room."""
        often = self.often.get(block.id, 0)
        self.often[block.id] = often + 1
        if not often:
            self.nbytes += block.nbytes
        self.uses.append((position, block))

    def leave_before(self, cursor: int) -> None:
        """Removes all uses before a cursor."""
        uses, often = self.uses, self.often
        while uses and uses[0][0] < cursor:
            block = uses.popleft()[1]  # _leave_out, in line
            left = often.pop(block.id) - 1
            if left:
                often[block.id] = left
            else:
                self.nbytes -= block.nbytes

    def leave_from(self, position: int) -> None:
        """Removes all uses at or after a position."""
        while self.uses and self.uses[-1][0] >= position:
            self._leave_out(self.uses.pop()[1])

    def _leave_out(self, block: Block) -> None:
        left = self.often.pop(block.id) - 1
        if left:
            self.often[block.id] = left
        else:
            self.nbytes -= block.nbytes


def make_walk(
    parts: Parts, fetcher: Fetcher, schedule: Schedule, outlook: StreamPlan, reach: Reach
) -> SequenceWalk:
    """Returns the walk for a plan.

    Args:
        parts: The parts of the manager.
        fetcher: Begins the fetches.
        schedule: The schedule to be walked.
        outlook: Its plan.
        reach: How far ahead fetches may begin, by the user's settings.
    """
    kind = RingWalk if outlook.turn else SequenceWalk
    return kind(parts, fetcher, schedule, outlook, reach)


class SequenceWalk:
    """Visits one use after the other, as far ahead as transfers need.

    Each position of the schedule is visited once as long as nothing leaves HBM, so that the cost
    of a use does not depend on how much is resident.

    Attributes:
        position: The first use that has not been visited.
        complete: Number of departures from HBM when every block was there to stay; -1 if they never
            were. Until another block leaves, there is nothing to do.
    """

    _idle_of_many = -1

    def __init__(
        self,
        parts: Parts,
        fetcher: Fetcher,
        schedule: Schedule,
        outlook: StreamPlan,
        reach: Reach,
    ) -> None:
        """Starts at the begin; see :func:`make_walk`."""
        self.position = 0
        self.complete = -1
        self._get = parts.table.get
        self._regions = parts.evictor.regions
        self._transfers = parts.transfers
        self._fetcher = fetcher
        self._schedule = schedule
        self._outlook = outlook
        self._reach = reach
        self._departures = parts.transfers.departures
        # the uses at the begin at which nothing is fetched
        self._idle = self._idle_of_many if len(schedule.order) >= _MANY else -1
        self._seen = -1  # departures that this walk knows of
        self._cursor = 0
        self._ahead = _Ahead()
        self._lacking = True

    def restart(self, cursor: int) -> None:
        """Visits every use again from a cursor on."""
        self._seen = self._departures.count
        self._departures.unread.clear()
        self.position = cursor
        self._ahead.clear()
        self._lacking = cursor > 0
        if self.complete == self._seen:
            self.position = len(self._schedule.order)

    def follow(self, cursor: int, end: int) -> bool:
        """Moves the cursor to the position of the compute, and begins the fetches that are due.

        Args:
            cursor: Position of the compute; blocks that have left HBM since are visited again.
            end: As for :meth:`go_on`.

        Returns:
            Whether everything from the cursor on was visited again, or a fetch has begun.
        """
        again = cursor < self._cursor or self._is_behind(cursor)
        if again:
            self.restart(cursor)
        self._cursor = cursor
        self._ahead.leave_before(cursor)
        if self.position < cursor:
            self.position = cursor
        return self.go_on(end) > 0 or again

    def go_on(self, end: int) -> int:
        """Begins fetches, the soonest first, up to the use at ``end``; returns how many."""
        if self._cursor <= self._idle:
            return 0
        get, residents = self._get, self._regions.residents
        order, fetcher, ahead = self._schedule.order, self._fetcher, self._ahead
        begun, enough = 0, self._enough()
        while self.position < end and (
            self._wants_more() if enough is None else not ahead.often or ahead.nbytes < enough
        ):
            record = get(order[self.position])
            if record is not None:
                if record.in_hbm is State.ABSENT:
                    if record.block.id in fetcher.lent and not fetcher.is_back(record.block.id):
                        return begun  # else its copy would wait for those of later blocks
                    if record.defined and fetcher.is_due(record, self._schedule, self.position):
                        if begun == _BURST or not self._fetch(record):
                            return begun
                        begun += 1
                    elif self._gets_place(record):
                        self._fetch(record)  # if the ring has no place, it gets one later
                if not (record.block.id in residents and record.usable):
                    ahead.append(self.position, record.block)
                    self._lacking = True
            self.position += 1
        if not self._lacking and self.position == len(order):
            # every block is in HBM and stays: nothing to do until one leaves
            self.complete = self._seen
        return begun

    def _gets_place(self, _record: Record) -> bool:
        """Whether a block without data to fetch gets its place ahead."""
        return False

    def _fetch(self, record: Record) -> bool:
        if not self._fetcher.begin(record, self._schedule, self.position, self._cursor):
            return False
        self._seen = self._departures.count
        self._departures.unread.clear()  # blocks that left for it are used after it
        return True

    def _is_behind(self, cursor: int) -> bool:
        """Whether a block has left HBM, so that all uses have to be visited again."""
        return self._seen != self._departures.count

    def _enough(self) -> int | None:
        """Returns the bytes ahead that are enough; None if each use has to be tested."""
        return None

    def _wants_more(self) -> bool:
        """Whether there should be more blocks ahead of the compute."""
        blocks, nbytes, reach = len(self._ahead.often), self._ahead.nbytes, self._reach
        if reach.blocks is not None:
            return blocks < reach.blocks
        timetable = self._outlook.timetable
        if timetable.knows(self.position):
            if blocks and nbytes >= self._outlook.ahead:
                return False
            return blocks < _AUTO_BLOCKS or timetable.due(self.position, self._cursor)
        return blocks < _AUTO_BLOCKS or (nbytes < reach.least and blocks < _MOST_BLOCKS)


class RingWalk(SequenceWalk):
    """Fetches as far ahead as there is room, if HBM is used as a ring.

    No block stays in a ring, so when a block leaves, only its own next use has to be visited again.
    Gradients get their places among the fetched blocks, in order of use (places ahead). If a
    gradient's place was taken only when the gradient arrives, prefetches would have taken all other
    places, and compute would wait for a block that is just being written home.
    """

    _idle_of_many = _FIRST

    def _gets_place(self, record: Record) -> bool:
        return record.block.role is Role.GRAD and not record.defined

    def _is_behind(self, cursor: int) -> bool:
        if self._transfers.mover is not None:
            return super()._is_behind(cursor)
        if self._departures.unread:
            self._step_back(cursor)
        return False

    def _step_back(self, cursor: int) -> None:
        """Goes back to the first use of blocks that have left HBM, or are at home again, since."""
        first = self.position
        for block_id in self._departures.read():
            first = min(first, self._schedule.next_use(block_id, cursor))
        if first < self.position:
            self.position = first
            self._ahead.leave_from(first)

    def _enough(self) -> int | None:
        return self._outlook.ahead if self._reach.blocks is None else None
