"""How a schedule is walked ahead of the compute: use by use, or round a ring."""

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
        beside: Whether copies from DRAM run beside the compute, as on a GPU. On the CPU such a
            copy is made by the thread that computes: begun early it hides behind nothing, so only
            files are worth fetching ahead.
        number: Of the pass under way.
        fill: Begins one, if that evicts nothing needed sooner: see :meth:`BlockManager.try_fill`.
        lent: The blocks whose home is lent to code on the host, by id: nothing fetches them
            before they are back.
        laid_out: Whether the next pass is expected to go as HBM is laid out.
    """

    def __init__(
        self, parts: Parts, host_loans: HostLoans, fill: Callable[[Record, int], bool]
    ) -> None:
        """Works on ``parts``.

        Args:
            parts: Of the manager.
            host_loans: Knows which blocks are on loan, which nothing fetches.
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
        # of the passes foreseen the one that was asked about last: begin, end, number and name
        self._pass: tuple[int, int, tuple[int, Hashable]] = (0, 0, (0, None))

    def begin_schedule(self) -> None:
        """Notes that positions refer to another schedule from now on."""
        self._pass = (0, 0, (0, None))

    def is_due(self, record: Record, schedule: Schedule, position: int) -> bool:
        """Whether a block is to be fetched for its use at a position, as far as it goes."""
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
            record: The block; :meth:`is_due` said so, or it holds no data, and gets its place.
            schedule: What comes.
            position: Where in it the use is.
            cursor: Where in it the compute is.
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

        A step on the host that was asked for is waited for while the link has something to do: a
        copy up comes after all compute that was submitted before it, so the host would only submit
        more that it comes after (virtual time, Llama, clipped in each step: 610 to 557 ms).
        """
        if block_id in self._deferred.owed and self._transfers.mover is None:
            risen = self._copy.risen()
            if risen is not None and not risen.done():
                self._deferred.finish(block_id)
        return block_id not in self.lent

    def _pass_at(self, schedule: Schedule, position: int) -> tuple[int, Hashable]:
        """Returns which of the passes foreseen a position is in, and that pass's name."""
        passes = schedule.passes
        if not passes:
            return 1, self._planner.key
        begin, end, found = self._pass
        if not begin <= position < end:  # as a rule it is the one asked about before
            number = bisect_right(passes, position, key=lambda entry: entry[0]) - 1
            end = passes[number + 1][0] if number + 1 < len(passes) else len(schedule)
            found = (number, passes[number][1])
            self._pass = (passes[number][0], end, found)
        return found


_AUTO_BLOCKS = 2
_MOST_BLOCKS = 64
_BURST = 4  # fetches at one use: what comes first is also wanted by compute, which waits meanwhile
_FIRST = 4
"""Uses of a pass at which a ring fetches nothing: as a model begins the device often has nothing to
do (values were read back), and what the host does before it launches kernels is lost."""
_MANY = 64  # uses of a schedule of which that is a small part


@dataclass(frozen=True, slots=True)
class Reach:
    """How far ahead a user wants fetches to be.

    Attributes:
        blocks: Blocks ahead of the one in use; None for as far as the measured times ask.
        least: Bytes ahead where nothing has been measured.
    """

    blocks: int | None
    least: int


class _Ahead:
    """The uses ahead of the compute of blocks that take room.

    Attributes:
        uses: Position and block of each, in order.
        often: How many uses of each block there are, by id.
        nbytes: Of the blocks, each counted once.
    """

    def __init__(self) -> None:
        """Starts with none."""
        self.uses: deque[tuple[int, Block]] = deque()
        self.often: dict[int, int] = {}
        self.nbytes = 0

    def clear(self) -> None:
        """Counts none any more."""
        self.uses.clear()
        self.often.clear()
        self.nbytes = 0

    def append(self, position: int, block: Block) -> None:
        """Counts a use; a block that is used again takes no more room."""
        often = self.often.get(block.id, 0)
        self.often[block.id] = often + 1
        if not often:
            self.nbytes += block.nbytes
        self.uses.append((position, block))

    def leave_before(self, cursor: int) -> None:
        """Counts no use before a cursor any more."""
        uses, often = self.uses, self.often
        while uses and uses[0][0] < cursor:
            block = uses.popleft()[1]  # _leave_out, in line
            left = often.pop(block.id) - 1
            if left:
                often[block.id] = left
            else:
                self.nbytes -= block.nbytes

    def leave_from(self, position: int) -> None:
        """Counts no use at or behind a position any more."""
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
    """Returns the walk that a plan asks for.

    Args:
        parts: Of the manager.
        fetcher: Begins the fetches.
        schedule: What is walked.
        outlook: What was decided for it.
        reach: How far ahead the user wants fetches to be.
    """
    kind = RingWalk if outlook.turn else SequenceWalk
    return kind(parts, fetcher, schedule, outlook, reach)


class SequenceWalk:
    """Looks at one use after the other, as far ahead as transfers need.

    Each place of the schedule is looked at once as long as nothing leaves HBM, so that a use
    costs the same however much is resident.

    Attributes:
        position: The first use that has not been looked at.
        complete: Departures from HBM by the time at which every block was there to stay; -1 where
            they never were. Until another one leaves there is nothing to look at.
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
        """Begins at the begin; see :func:`make_walk`."""
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
        """Looks at every use again from a cursor on."""
        self._seen = self._departures.count
        self._departures.unread.clear()
        self.position = cursor
        self._ahead.clear()
        self._lacking = cursor > 0
        if self.complete == self._seen:
            self.position = len(self._schedule.order)

    def follow(self, cursor: int, end: int) -> bool:
        """Moves the cursor to where the compute is, and begins the fetches that are due.

        Args:
            cursor: Where the compute is; what has left HBM since is looked at again.
            end: As for :meth:`go_on`.

        Returns:
            Whether everything from the cursor on was looked at again, or a fetch has begun.
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
                        return begun  # once back, its copy would wait for those of what follows
                    if record.defined and fetcher.is_due(record, self._schedule, self.position):
                        if begun == _BURST or not self._fetch(record):
                            return begun
                        begun += 1
                    elif self._gets_place(record):
                        self._fetch(record)  # where the ring has no place it gets one later
                if not (record.block.id in residents and record.usable):
                    ahead.append(self.position, record.block)
                    self._lacking = True
            self.position += 1
        if not self._lacking and self.position == len(order):
            # every block is in HBM and stays: no need to look again until one leaves
            self.complete = self._seen
        return begun

    def _gets_place(self, _record: Record) -> bool:
        """Whether a block that is not in HBM gets its place ahead, as there is nothing to fetch."""
        return False

    def _fetch(self, record: Record) -> bool:
        if not self._fetcher.begin(record, self._schedule, self.position, self._cursor):
            return False
        self._seen = self._departures.count
        self._departures.unread.clear()  # what left for it comes after it
        return True

    def _is_behind(self, cursor: int) -> bool:
        """Whether something has left HBM, so that all has to be looked at again."""
        return self._seen != self._departures.count

    def _enough(self) -> int | None:
        """Returns the bytes ahead that are enough; None where each use is asked about."""
        return None

    def _wants_more(self) -> bool:
        """Whether more is to be ahead of the compute than is."""
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
    """Fetches as far ahead as there is room, where HBM is handed out in a ring.

    Nothing comes to stay there, so when a block leaves all but its own next use is as it was.
    Gradients get their places among what is fetched, in order of use. A place that is taken only
    as a gradient is there is one that was written home just now, if fetches ahead have taken all
    others: compute would wait for that copy.
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
        """Goes back to the first use of what has left HBM, or is at home again, since."""
        first = self.position
        for block_id in self._departures.read():
            first = min(first, self._schedule.next_use(block_id, cursor))
        if first < self.position:
            self.position = first
            self._ahead.leave_from(first)

    def _enough(self) -> int | None:
        return self._outlook.ahead if self._reach.blocks is None else None
