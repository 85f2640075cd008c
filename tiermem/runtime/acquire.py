"""Acquires a block: fetches it if necessary, leases it, and begins the next prefetches."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tiermem.core.block import Block, Extent, Tier
from tiermem.core.residency import Record, State
from tiermem.errors import ConfigError, InvariantError
from tiermem.runtime.base.functorch import modes, without_modes
from tiermem.runtime.base.gate import CallGate
from tiermem.runtime.lookahead.prefetcher import Prefetcher
from tiermem.runtime.lookahead.replay import Replay
from tiermem.runtime.memory.slots import Slot
from tiermem.runtime.parts import Parts

_VALID, _DIRTY = State.VALID, State.DIRTY


class Acquirer:
    """Implements :meth:`BlockManager.acquire`, under the manager's lock."""

    def __init__(
        self, parts: Parts, gate: CallGate, prefetcher: Prefetcher, replay: Replay
    ) -> None:
        """Works on ``parts``.

        Args:
            parts: The parts of the manager.
            gate: Checked before every use.
            prefetcher: Begins the next prefetches.
            replay: Repeats what earlier passes of the same kind did.
        """
        self._gate = gate
        self._table = parts.table
        self._get = parts.table.get
        self._planner = parts.planner
        self._deferred = parts.deferred
        self._pass_timer = parts.pass_timer
        self._counters = parts.counters
        self._copy = parts.copy
        self._evictor = parts.evictor
        self._transfers = parts.transfers
        self._ready = parts.transfers.ready
        self._current = parts.slots.current
        self._prefetcher = prefetcher
        self._replay = replay
        self._stream = -1  # of the last check of a block (at_hand)
        self._captured_views: dict[int, Tensor] = {}  # by block id

    def acquire(self, block: Block) -> Slot:
        """Fetches a block into HBM and leases it; see :meth:`BlockManager.acquire`.

        Every use goes through here, or performs the same steps in line: the block is made usable
        and leased, and the look-ahead advances. In a pass that repeats earlier ones, what was
        checked then is not checked again, and the look-ahead repeats what it did then.
        """
        slot = self._replay.use(block.id) if self._replay.run is not None else None
        return slot or self.decide(block)

    def acquire_all(self, blocks: Sequence[Block]) -> list[Slot]:
        """Acquires several blocks, or none; see :meth:`BlockManager.acquire_all`."""
        unseen = self._evictor.rules.unseen
        taken: list[int] = []
        try:
            for block in blocks:
                self.acquire(block)
                taken.append(block.id)
                unseen[block.id] = unseen.get(block.id, 0) + 1
            return [self._current[block.id] for block in blocks]
        except BaseException:
            for block_id in taken:
                self._table.release(block_id)
            raise
        finally:
            for block_id in taken:
                unseen.pop(block_id, None)

    def again(self, block: Block) -> Slot | None:
        """Leases a block that was used a moment ago, as a part of that use.

        Returns:
            Its slot; None if its state has changed, so that it has to be acquired.
        """
        record = self.at_hand(block.id)
        if record is None:
            return None
        record.leases += 1
        return self._current[block.id]

    def enter_stream(self) -> int:
        """Returns the current compute streamand notes that it uses blocks."""
        stream = self._copy.stream()
        if stream != self._stream:
            self._copy.use(None)
            self._stream = stream
        return stream

    def at_hand(self, block_id: int) -> Record | None:
        """Checks again a block that was used a moment ago, as a part of that use.

        Neither schedule nor look-ahead advance: nothing is fetched or evicted for it. The block
        stays until the caller releases the lock, or as long as an alias of it exists.

        Returns:
            Its record; None if its state has changed, so that it has to be acquired.
        """
        gate = self._gate
        record = self._get(block_id)
        deferred = self._deferred
        if record is None or gate.closed or gate.torn or modes():
            return None
        if block_id in deferred.owed or block_id in deferred.standing:
            return None
        state = record.in_hbm
        if (state is not _VALID and state is not _DIRTY) or self._copy.capturing():
            return None
        if not record.defined and block_id in self._transfers.unclaimed:
            return None
        ready, stream = self._ready.get(block_id), self._copy.stream()
        if stream != self._stream or (ready is not None and ready.waiter != stream):
            self._copy.use(ready)
            self._stream = stream  # noted as a stream that uses blocks
        record.copied = False
        return record

    def decide(self, block: Block) -> Slot:
        """Does what :meth:`acquire` does in a pass that is measured, or that is not a replay."""
        if modes():
            with without_modes():
                return self.decide(block)
        block_id, gate, deferred = block.id, self._gate, self._deferred
        if gate.closed or gate.torn or deferred.owed or deferred.standing:
            self._let_in(block_id)
        record = self._get(block_id) or self._table[block_id]
        if self._copy.capturing():
            return self._captured(record)
        leases = record.leases
        try:
            self._use(record)
            return self._current[block_id]
        except BaseException:
            if record.leases > leases:
                self._table.release(block_id)
            raise

    def _use(self, record: Record) -> None:
        """Makes a block usable, leases it, and advances the look-ahead.

        A block that is in HBM permanently is not part of the order of use: nothing is fetched or
        evicted for it, and a pass that uses it in addition needs no new plan.
        """
        block_id, evictor = record.block.id, self._evictor
        moved_on = False
        if record.fixed:
            self._counters.hits += 1
        else:
            moved_on = self._planner.touch(block_id)
            if moved_on and self._pass_timer.sampling:
                self._pass_timer.arrived()
            state = record.in_hbm
            if state is _VALID or state is _DIRTY:
                self._counters.hits += 1
                if not record.defined:
                    self._transfers.claim(record)
            else:
                self._bring(record)
            extent, later = record.extent, max(evictor.largest_later, record.later)
            if extent is not None and extent.offset < later and not record.leases:
                evictor.tidy(record, later)
        record.leases += 1  # that it can be has just been looked at
        record.copied = False
        ready, stream = self._ready.get(block_id), self._copy.stream()
        if stream != self._stream or (ready is not None and ready.waiter != stream):
            self._copy.use(ready)
            self._stream = stream  # noted as a stream that uses blocks
        if moved_on:
            if self._replay.run is None or not self._replay.advance():
                evictor.order.note_change(block_id)
                self._prefetcher.run()
            if self._pass_timer.sampling:
                self._pass_timer.started(record, self._ready.get(block_id))

    def place_blank(self, record: Record) -> None:
        """Allocates HBM for a block without data, which the caller will write."""
        self._transfers.blank(record, self._place(record.block))

    def place_for_good(self, record: Record) -> None:
        """Allocates HBM permanently for a block without data."""
        extent = self._evictor.place_for_good(record.block) or self._place(record.block)
        self._transfers.blank(record, extent)
        record.fixed = True

    def _let_in(self, block_id: int) -> None:
        """Does the deferred work of a block that is about to be used.

        Raises:
            ClosedError: If blocks can no longer be used.
        """
        gate, deferred = self._gate, self._deferred
        if gate.closed or gate.torn:
            gate.guard()
        if block_id in deferred.owed or block_id in deferred.standing:
            deferred.pay(block_id)
        if deferred.elsewhere:
            deferred.collect()

    def _bring(self, record: Record) -> None:
        """Makes the HBM copy usable, waiting where necessary.

        A prefetch that failed raises nothing: the fetch is repeated, and the error of that one is
        raised.
        """
        self._counters.misses += 1
        block, transfers = record.block, self._transfers
        asked = False
        while (state := record.in_hbm) is not _VALID and state is not _DIRTY:
            if state is not State.ABSENT:
                if block.id in transfers.flights:
                    self._prefetcher.look_ahead()  # begin the next fetches before waiting
                error = transfers.settle(block.id)
                if error is not None and asked:
                    raise error
            elif record.defined:
                extent = self._place(block)
                asked = record.home is Tier.NVME and self._prefetcher.disk.stage_now(record)
                transfers.fill(record, extent, self._prefetcher.look_ahead)
            else:
                self.place_blank(record)

    def _place(self, block: Block) -> Extent:
        """Returns a place for a block that is needed now."""
        room = self._evictor.place(block, None)
        if room is None:
            raise InvariantError(f"no place for block {block.name!r}")
        return room.extent

    def _captured(self, record: Record) -> Slot:
        """Leases a block for kernels that a CUDA graph captures: its address must never change."""
        block = record.block
        if not record.fixed and not self._stays_from_now_on(record):
            raise ConfigError(
                f"block {block.name!r} (home tier {record.home.value}) cannot be used while a CUDA "
                "graph is captured: it may be at another address when the graph is replayed. Call "
                "the model once before, with hbm= for all of its blocks; or give them the home "
                'tier hbm (policy={"params": "hbm"}), or capture and replay inside '
                "tier.materialize(module)"
            )
        if not record.still:
            # the graph has its address from now on, and the addresses of buffers that nobody
            # acquires
            for each in self._table:
                each.still = each.still or each.fixed
        self._table.lease(block.id)
        return self._current[block.id]

    def _stays_from_now_on(self, record: Record) -> bool:
        """Keeps a block at its place in HBM if HBM has room for all; returns whether it is kept.

        To a graph it is like a view that a program keeps: a block with such a view is not moved or
        evicted.
        """
        block_id = record.block.id
        ready = self._ready.get(block_id)
        # if a stream waits for its copy, that copy was waited for when the capture began
        there = record.usable and (ready is None or ready.waiter != -1)
        if not (there and self._table.all_fit):
            return False
        if block_id not in self._captured_views:
            self._captured_views[block_id] = self._current[block_id].views[0].detach()
        return True
