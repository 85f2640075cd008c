"""Replay: repeats at each use what the last passes did there, without deciding again.

If two passes in a row, with one plan, fetched the same blocks to the places of the same other
blocks, the next one will, too: the decisions depend only on the schedule, the plan and the places
of the blocks. So they are looked up. The places are still checked, since a wrong guess must only
cost time: if a block is dirty, leased, aliased or no longer there, it is left as it is, and the
rest of the pass is decided use by use, like the first one. (In rounds that are laid out, which only
read, a dirty block is written home first.)

Most passes follow the replay. For these, :meth:`Replay.use` performs a whole use without testing
anything that cannot have changed since the pass began.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

from tiermem.core.block import Extent, Tier
from tiermem.core.residency import Record, State
from tiermem.core.schedule import Schedule
from tiermem.runtime.lookahead.arranged import Arranger, write_home
from tiermem.runtime.lookahead.prefetcher import Prefetcher
from tiermem.runtime.lookahead.recordings import Recordings
from tiermem.runtime.lookahead.stream_plan import StreamPlan
from tiermem.runtime.lookahead.swaps import Fit, Step, Swap
from tiermem.runtime.memory.slots import Slot, use_count
from tiermem.runtime.parts import Parts
from tiermem.runtime.placement.leaving import Why

_ABSENT, _FILLING, _VALID, _DIRTY = State.ABSENT, State.FILLING, State.VALID, State.DIRTY
_AHEAD, _DRAM = Why.AHEAD, Tier.DRAM
_END = Step(None, -1)
_NO_SLOTS: Mapping[int, Slot] = {}


@dataclass(slots=True, eq=False)
class _Run:
    """The current pass, if it repeats others.

    Attributes:
        steps: The steps at each position of the schedule; after the last, a step without a block.
        schedule: Its schedule.
        number: Number of the pass.
        departures: How many departures from HBM it has seen, including its own; -1 if the replay
            must not continue.
        arranged: Whether HBM was laid out for it, so that nothing was recorded.
        cursor: The step performed last.
        counted: How many of the steps are in the counters.
    """

    steps: list[Step]
    schedule: Schedule
    number: int
    departures: int
    arranged: bool
    cursor: int = -1
    counted: int = -1


class _Swapped:
    """The objects that a swap reads and changes, looked up once, as swaps happen at every use.

    Attributes:
        table: The rows of the blocks.
        at: Blocks in HBM, by offset.
        slots: Places in HBM.
        current: The place of each block in HBM.
        kept: Former places of blocks, by block and offset.
        by_address: Places with blocks in them, by address.
        sources: Bytes of homes in DRAM, by offset.
        ready: Events of copies to HBM, by block.
        home_ready: Events of copies to homes, by block.
        packed: Packed copies that the current pass uses, by block.
        packed_homes: Packed homes, by offset.
        transfers: Begins the copies that are not begun in line.
        count: Counts a row of the timeline.
        enter: Adds a row to the timeline.
    """

    __slots__ = (
        "at", "by_address", "count", "current", "enter", "home_ready", "kept", "packed",
        "packed_homes", "ready", "slots", "sources", "table", "transfers",
    )  # fmt: skip

    def __init__(self, parts: Parts) -> None:
        """Looks them up in ``parts``."""
        self.transfers = parts.transfers
        self.table, self.at = parts.table, parts.table.by_offset
        self.slots, self.current = parts.slots, parts.slots.current
        self.kept, self.by_address = parts.slots.kept, parts.slots.by_address
        self.sources, self.packed = parts.homes.bytes, parts.transfers.packed.used
        self.packed_homes = parts.homes.packed
        self.ready, self.home_ready = parts.transfers.ready, parts.transfers.home_ready
        self.count, self.enter = parts.counters.count_swap, parts.timeline.enter


class Replay:
    """Replays recorded or laid-out passes; under the manager's lock.

    Attributes:
        arranger: Lays HBM out for loops that only read.
        recordings: Recordings of passes.
        run: The current pass, if it repeats others.
    """

    def __init__(self, parts: Parts, prefetcher: Prefetcher) -> None:
        """Works on ``parts``; ``prefetcher`` decides if nothing is repeated."""
        self._parts = parts
        self._prefetcher = prefetcher
        self._planner = parts.planner
        self._evictor = parts.evictor
        self._departures = parts.transfers.departures
        self._deferred = parts.deferred
        self._copy = parts.copy
        self._pass_timer = parts.pass_timer
        self._counters = parts.counters
        self._pending = parts.transfers.waste.pending
        self._swapped = _Swapped(parts)
        self._stream = -1  # of the last use that waited for its block
        self.arranger = Arranger(parts, prefetcher.fetcher, prefetcher.lates)
        self.recordings = Recordings(parts)
        self.run: _Run | None = None

    @property
    def repeating(self) -> bool:
        """Whether the current pass is a replay."""
        return self.run is not None

    def begin(self, outlook: StreamPlan, number: int) -> bool:
        """Notes that a pass begins, for which planner and plan are ready.

        Args:
            outlook: The plan.
            number: Number of the pass.

        Returns:
            Whether it is a replay, and the swaps at its begin have been performed.
        """
        schedule, arranged = self._planner.schedule, None
        if not self.recordings.disk_at_work():
            arranged = self.arranger.begin(outlook)
        if arranged is not None:
            self.recordings.pause()
            self._pass_timer.leave_first_out()
        steps = arranged or self.recordings.begin(outlook)
        if steps is None:
            return False
        both = [*steps, _END], schedule
        self.run = _Run(*both, number, self._departures.count, arranged is not None)
        self._evictor.order.lose_track()
        self._swapped.transfers.ahead.lose_track()
        return self.advance()

    def end(self) -> None:
        """Notes that the current pass has ended: whatever follows belongs to the next."""
        self.add_up()
        run = self.run
        disturbed = run is not None and run.departures != self._departures.count
        if run is not None and run.arranged:
            if disturbed or run.cursor + 2 < len(run.steps):
                self.arranger.broke_off()
            else:
                self.arranger.ended()
        self.run = None
        self.recordings.end(disturbed=disturbed)

    def add_up(self) -> None:
        """Brings the counters up to date: at the end of a pass, and before they are read."""
        run, counters = self.run, self._counters
        if run is not None:
            counters.hits += run.cursor - run.counted
            run.counted = run.cursor
        counters.add_up()

    def interrupt(self) -> None:
        """Ends the replay of the current pass at its next use; any thread may call this."""
        run = self.run
        if run is not None:
            run.departures = -1

    def use(self, block_id: int) -> Slot | None:
        """Performs the use of a block that is in HBM and was foreseen, or is used again in a row.

        It does the same as :meth:`Acquirer.acquire`, without testing anything that cannot have
        changed since the pass began. Most uses of most passes take this path, with cold CPU caches:
        so all of it is in this file, and in as few calls as possible.

        Args:
            block_id: The block.

        Returns:
            Its slot, with the block leased; None, with nothing changed, in any unusual case.
        """
        run, planner, copy = self.run, self._planner, self._copy
        if (
            run is None
            or run.departures != self._departures.count
            or planner.cursor != run.cursor
            or self._deferred.owed
            or block_id in self._deferred.standing
            or copy.capturing()
        ):
            return None
        cursor = run.cursor + 1
        step = run.steps[cursor]
        record = step.used
        if step.block != block_id:
            return self._use_again(run, block_id)
        if (
            record is None
            or (record.in_hbm is not _VALID and record.in_hbm is not _DIRTY)
            or (
                (later := max(self._evictor.largest_later, record.later))
                and not record.leases
                and ((extent := record.extent) is None or extent.offset < later)
            )
        ):
            return None
        sampling = self._pass_timer.sampling
        if sampling:
            self._prefetcher.look_back(block_id)
            self._pass_timer.arrived()
        if planner.exact:  # Planner.follow, in line
            planner.last = block_id
            planner.cursor = cursor
        else:
            planner.follow(block_id)
        run.cursor = cursor
        fetch = self._pending.pop(block_id, None)  # Waste.used, in line
        if fetch is not None and (fetch[1], block_id) in self._swapped.transfers.waste.outcomes:
            self._swapped.transfers.waste.judge(fetch[1], block_id, wasted=False)
        leases = record.leases
        try:
            record.leases = leases + 1  # that it can be has just been looked at
            record.copied = False
            ready, stream = self._swapped.ready.get(block_id), copy.stream()
            if stream != self._stream:
                copy.use(ready)
                self._stream = stream  # from now on this stream has waited
            elif ready is not None and ready.waiter != stream:
                copy.hold_up(stream, ready)
            for swap in step.swaps:
                if not self._swap(run, swap):
                    self.go_on(block_id)
                    break
            if sampling:
                self._pass_timer.started(record, ready)
            return self._swapped.current[block_id]
        except BaseException:
            if record.leases > leases:
                self._swapped.table.release(block_id)
            raise

    def go_on(self, block_id: int) -> None:
        """Begins the next fetches, after a use that is not replayed."""
        self._evictor.order.note_change(block_id)
        self._prefetcher.run()

    def advance(self) -> bool:
        """Repeats what earlier passes did at this use, which :meth:`use` has not performed.

        Returns:
            False if it has to be decided, and so has the rest of the pass.
        """
        run = self.run
        if run is None:
            return False
        step = self._step_now(run)
        if step is None:
            return self._stop()
        run.cursor += 1
        run.counted += 1  # by who has asked
        if step.block in self._swapped.transfers.waste.pending:
            self._swapped.transfers.waste.used(step.block)
        return all(self._swap(run, swap) for swap in step.swaps)

    def repair(self) -> None:
        """Forgets what passes did, after an exception anywhere."""
        self.recordings.repair()
        self.arranger.repair()
        self.run = None

    # -- inside ----------------------------------------------------------

    def _use_again(self, run: _Run, block_id: int) -> Slot | None:
        """Performs another use of the block that was used last; None if it is not that one."""
        step = run.steps[run.cursor]
        record = step.used
        again = block_id == self._planner.last and step.block == block_id
        if not again or record is None or not self._is_in_place(record):
            return None
        self._counters.hits += 1
        ready, stream = self._swapped.ready.get(block_id), self._copy.stream()
        if stream != self._stream or (ready is not None and ready.waiter != stream):
            self._copy.use(ready)
            self._stream = stream
        record.leases += 1
        record.copied = False
        return self._swapped.current[block_id]

    def _is_in_place(self, record: Record) -> bool:
        """Whether a block is in HBM and need not be moved before it is held."""
        state, extent = record.in_hbm, record.extent
        if (state is not _VALID and state is not _DIRTY) or extent is None:
            return False
        later = max(self._evictor.largest_later, record.later)
        return extent.offset >= later or record.leases > 0

    def _swap(self, run: _Run, swap: Swap) -> bool:
        """Performs one of the swaps recorded at a position of the schedule.

        A block is copied from DRAM to the place of another one, which leaves for it, in one
        operation: the place is not given back in between. As this happens at every use of a
        streaming block, it does in line what :class:`LeaveRules`, :class:`ResidencyTable`,
        :class:`Transfers` and the counters do for an eviction and a fill.

        Returns:
            False if that is no longer possible: this and the rest of the pass have to be decided.
        """
        swapped, leaves, comes, nbytes = self._swapped, swap.leaves, swap.comes, swap.nbytes
        went, came, before = swap.went, swap.came, leaves.extent
        slot = swapped.current.get(went)
        if (
            before is None
            or slot is None
            or (before.nbytes != nbytes and swap.fit is None)
            or leaves.in_hbm is not _VALID
            or (leaves.at_home is not _VALID and leaves.defined)
            or leaves.leases
            or leaves.fixed
            or (slot.pointed and not slot.idle)
            or use_count(slot.storage) > slot.baseline + slot.pointed  # Slot.aliased, in line
            or use_count(slot.reading) > slot.sight.reading_baseline + len(slot.sight.read)
            or (slot.saved and slot.is_saved())
            or comes.in_hbm is not _ABSENT
            or comes.at_home is not _VALID
        ):
            return self._swap_otherwise(run, swap)
        block, home = comes.block, comes.home_extent
        source = None
        plain = comes.home is _DRAM and not self._pass_timer.sampling and came not in swapped.packed
        if plain and home is not None:
            source = swapped.sources.get(home.offset)
            plain = home.offset not in swapped.packed_homes
        if source is None and (source := swapped.transfers.in_dram(comes)) is None:
            return self._stop()
        if slot.pointed:
            pointer = slot.pointer
            pointer.away() if pointer is not None else self._evictor.rules.unpoint(leaves)
        offset, at, again = before.offset, swapped.at, swapped.ready.get(went)
        place = swapped.kept.get(came, _NO_SLOTS).get(offset)
        if place is None:
            place = swapped.slots.slot(block, Extent(offset, nbytes))
        extent = place.extent
        if extent.nbytes != nbytes:
            extent = Extent(offset, nbytes)
        try:
            if before.nbytes != nbytes:
                if nbytes > before.nbytes:
                    again = None  # it also covers copies to the bytes behind the other block
                if not swapped.table.hbm.retake(before, extent):
                    return self._stop()
            # one line without Python calls, so that it cannot be interrupted half way
            leaves.in_hbm, leaves.extent, comes.in_hbm, comes.extent, at[offset] = (
                _ABSENT, None, _FILLING, extent, comes
            )  # fmt: skip
            leaves.copied = comes.copied = False
            run.departures = self._departures.count = run.departures + 1  # they were equal
            if swapped.transfers.poisons or went in self._pending:
                swapped.transfers.left_unused(went, slot, before)
            swapped.ready.pop(went, None)  # nothing waits for this event any more
            swapped.current[came] = swapped.by_address[place.address] = place
            del swapped.current[went]  # last: repair removes a slot that is in both from both
            if plain:  # Transfers.copy_up, in line
                started = perf_counter_ns()
                after = swapped.home_ready.get(came)
                event = self._copy.up(place.bytes, source, place.extent, after, again)
                if event is not None:
                    swapped.ready[came] = event
                row = "dram->hbm", block.name, started, perf_counter_ns(), block.nbytes
                swapped.enter(row)
                swapped.count(row)
                comes.in_hbm = _VALID
            else:
                staged = comes.home is not _DRAM
                swapped.transfers.copy_up(comes, place, source, again, staged=staged)
                self._counters.evictions += 1
                self._counters.prefetches += 1
            self._pending[came] = (run.number + swap.passes, swap.key)
            return True
        except BaseException:
            if leaves.extent is None and comes.in_hbm is _FILLING:
                swapped.slots.leave(went)
                swapped.transfers.unfill(came)
            elif leaves.extent is before and not swapped.table.hbm.holds(before):
                swapped.table.hbm.retake(extent, before)
            raise

    def _swap_otherwise(self, run: _Run, swap: Swap) -> bool:
        """Performs a swap for which no block leaves, or several, or one that was written.

        If one must not leave, the replay ends.
        """
        leaves, fit, extent = swap.leaves, swap.fit, swap.leaves.extent
        if leaves is swap.comes and fit is not None:
            return self._fill(run, swap, fit) or self._stop(fit.leaves)
        as_was = extent is not None and (extent.nbytes == swap.nbytes or fit is not None)
        if as_was and leaves.in_hbm is _DIRTY and self._written_home(run, leaves):
            return self._swap(run, swap)
        return self._stop([leaves] if as_was else ())

    def _written_home(self, run: _Run, record: Record) -> bool:
        """Writes home a block that was written since and may leave; returns whether it could.

        This happens in rounds that are laid out, which only read, for example if a program accessed
        an output layer's weight outside of every call and may have written it. Loops that write
        begin to write blocks home earlier, and have no layout.
        """
        rules = self._evictor.rules
        return run.arranged and rules.may_leave(record, _AHEAD) and write_home(self._parts, record)

    def _fill(self, run: _Run, swap: Swap, fit: Fit) -> bool:
        """Fetches a block to a place that is not that of one other; returns whether it could."""
        comes, offset = swap.comes, fit.offset()
        moves = comes.in_hbm is _DIRTY and comes in fit.leaves  # to another place, by way of home
        if moves and not self._written_home(run, comes):
            return False
        there = comes.at_home is _VALID and comes.defined
        if offset < 0 or not there or self._swapped.transfers.in_dram(comes) is None:
            return False
        for record in fit.leaves:
            if not self._send_away(run, record):
                return False
            run.departures += 1
        if comes.in_hbm is not State.ABSENT:
            return False
        extent = self._parts.table.hbm.take_at(offset, swap.nbytes)
        if extent is None:
            return False
        self._swapped.transfers.fill(comes, extent)
        self._parts.counters.prefetches += 1
        self._swapped.transfers.waste.fetched(comes.block.id, run.number + swap.passes, swap.key)
        return True

    def _send_away(self, run: _Run, record: Record) -> bool:
        """As :meth:`Evictor.evict`, without the queue, which is rebuilt later."""
        if record.in_hbm is _DIRTY and not self._written_home(run, record):
            return False
        if record.in_hbm is not _VALID or not self._evictor.rules.may_leave(record, _AHEAD):
            return False
        block_id = record.block.id
        slot = self._swapped.current[block_id]
        if slot.pointed:
            self._evictor.rules.unpoint(record)
            if slot.aliased:  # what hid behind a parameter's reference
                return False
        self._parts.table.drop(block_id)
        self._swapped.transfers.leave(block_id)
        self._parts.counters.evictions += 1
        return True

    def _step_now(self, run: _Run) -> Step | None:
        """Returns the step at the planner's present use; None if that was not foreseen.

        For uses that :meth:`use` does not perform: the begin of a pass, and unusual cases.
        """
        planner = self._planner
        cursor = run.cursor + 1
        if (
            planner.cursor != cursor
            or cursor + 1 >= len(run.steps)
            or planner.schedule is not run.schedule
            or run.departures != self._departures.count
        ):
            return None
        if self._pass_timer.sampling:
            self._prefetcher.look_back(planner.last)
        return run.steps[cursor]

    def _stop(self, leaving: Sequence[Record] = ()) -> bool:
        """Ends the replay: the rest of the pass is decided, and passes are recorded again.

        Args:
            leaving: Blocks that should leave, some of which may not be released yet.
        """
        run = self.run
        self.add_up()
        if run is not None:
            if run.arranged:
                may_leave = self._evictor.rules.may_leave
                inside = [record for record in leaving if record.extent is not None]
                late = [r.block.id for r in inside if not may_leave(r, _AHEAD)]
                self.arranger.broke_off(late)
            self.recordings.drop(run.schedule)
            self._prefetcher.start_over()
        self.run = None
        return False
