"""How a piece of an expert is copied into its seat: from DRAM, a swap file or checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch

from tiermem.core.block import Extent, Tier, align_up
from tiermem.core.packing import Packed
from tiermem.core.residency import Record
from tiermem.errors import StorageError
from tiermem.runtime.memory.expert_seats import Piece, Seat, Stack
from tiermem.runtime.parts import Parts
from tiermem.storage.checkpointstore import SourceRange
from tiermem.transfer.copy import Event


def copy_up(
    parts: Parts,
    target: torch.Tensor,
    source: torch.Tensor | Packed,
    stack: Stack,
    released: Sequence[Event],
) -> Event | None:
    """Submits a copy of a part of a stack's home in DRAM, ordered after earlier copies to it.

    Args:
        parts: The parts of the manager.
        target: Bytes in HBM.
        source: Bytes of the home, or its packed form.
        stack: The stack of the home.
        released: Events after the last readers of ``target``.

    Returns:
        Its event.
    """
    started = time.perf_counter_ns()
    if isinstance(source, Packed):
        nbytes = source.moved
        event = parts.copy.up_packed_behind(target, source, released)
    else:
        nbytes = source.numel()
        written = parts.transfers.home_ready.get(stack.block.id)
        behind = released if written is None else (*released, written)
        event = parts.copy.up_behind(target, source, behind)
    ended = time.perf_counter_ns()
    row = ("dram->hbm", stack.block.name, started, ended, nbytes)
    parts.counters.count_copy(row)
    parts.timeline.enter(row)
    return event


def packed_part(parts: Parts, stack: Stack, begin: int, nbytes: int) -> Packed | None:
    """Returns the packed form of a part of a stack; None if the current pass uses none.

    Args:
        parts: The parts of the manager.
        stack: The stack.
        begin: First byte of the part.
        nbytes: How many.
    """
    if not parts.transfers.packed.used:
        return None
    whole = parts.transfers.packed.of(parts.table[stack.block.id])
    return None if whole is None else whole.within(begin, nbytes)


class PieceCopies:
    """Begins copies of pieces, completes them, and knows the addresses of pieces in files."""

    def __init__(self, parts: Parts, stacks: Callable[[], Iterable[Stack]]) -> None:
        """Begins nothing yet.

        Args:
            parts: Of the manager.
            stacks: Returns the stacks there are.
        """
        self._parts = parts
        self._stacks = stacks
        parts.homes.owners.append(self._owned)

    def begin(self, seat: Seat, stack: Stack, piece: Piece, *, urgent: bool) -> None:
        """Begins to copy a piece into a seat to which no copy is in progress.

        Args:
            seat: The target.
            stack: The stack of the piece.
            piece: The piece.
            urgent: Whether a caller waits for it.
        """
        parts, source = self._parts, None
        record = parts.table.of(stack.block.id)
        begin, nbytes = stack.begin_of(piece), stack.sizes[piece.tensor]
        # a piece that was never read may still be unpacked there, on another stream
        before = seat.event
        released = seat.released if before is None else (*seat.released, before)
        if record.home is Tier.DRAM and record.home_extent is not None:
            source = packed_part(parts, stack, begin, nbytes) or parts.homes.part_of(
                record.home_extent, begin, nbytes
            )
        elif parts.homes.read_only(record.home_extent):
            place = self._place(stack, piece, record, begin, nbytes)
            seat.transfer = parts.transfers.need_mover().read(
                place, seat.bytes, label=stack.block.name, urgent=urgent, after=released
            )
            seat.event = None
        elif record.home_extent is not None:
            source = self._from_swap(stack.block.name, record.home_extent, begin, nbytes)
        if source is not None:
            target = seat.bytes if seat.extent.nbytes == nbytes else seat.bytes[:nbytes]
            seat.event = copy_up(parts, target, source, stack, released)

    def settle(self, seat: Seat) -> StorageError | None:
        """Waits for a read from a file into a seat; returns its error."""
        transfer = seat.transfer
        if transfer is None:
            return None
        transfers, counters = self._parts.transfers, self._parts.counters
        transfers.wait(transfer)
        transfers.poll()
        seat.transfer = None
        if transfer.event is not None:
            self._parts.copy.landed(seat.extent, transfer.event)
            seat.event = transfer.event
        if transfer.error is not None:
            counters.errors += 1
            return transfer.error
        begun = (transfer.started_ns or transfer.submitted_ns) + transfer.rested_ns
        counters.moved("nvme->hbm", seat.bytes.numel(), transfer.finished_ns - begun)
        return None

    def forget_places(self, stack: Stack) -> None:
        """Gives back the addresses in files of a stack's pieces."""
        for extent in stack.places.values():
            if self._parts.homes.holds(Tier.NVME, extent):
                self._parts.homes.release(Tier.NVME, extent)
        stack.places.clear()

    def _place(self, stack: Stack, piece: Piece, record: Record, begin: int, nbytes: int) -> Extent:
        """Returns an address in checkpoint files of this piece only."""
        found = stack.places.get(piece)
        if found is None:
            sources = self._parts.homes.open_sources()
            ranges = sources.ranges_of(record.home_extent)  # type: ignore[arg-type]
            cut = [part for source in ranges if (part := _cut(source, begin, begin + nbytes))]
            found = stack.places[piece] = sources.place(cut, align_up(nbytes))
        return found

    def _from_swap(self, name: str, home: Extent, begin: int, nbytes: int) -> torch.Tensor:
        """Reads bytes of a block's swap file into host memory, in whole chunks (for checksums).

        Raises:
            StorageError: If they cannot be read.
        """
        parts = self._parts
        swap, last = parts.homes.swap, begin + nbytes
        chunks = [] if swap is None else swap.pieces(home)
        inside = [
            c for c in chunks if c.extent_offset < last and begin < c.extent_offset + c.nbytes
        ]
        first, end = inside[0].extent_offset, inside[-1].extent_offset + inside[-1].nbytes
        host = torch.empty(end - first, dtype=torch.uint8, device="cpu")
        mover = parts.transfers.need_mover()
        extent = Extent(home.offset + first, end - first)
        parts.transfers.wait_or_raise(mover.read(extent, host, label=name, urgent=True))
        return host[begin - first : last - first]

    def _owned(self) -> list[tuple[Tier, Extent]]:
        """Returns the addresses in files that pieces have."""
        return [(Tier.NVME, e) for stack in self._stacks() for e in stack.places.values()]


def _cut(source: SourceRange, begin: int, end: int) -> SourceRange | None:
    """Returns the part of a range between two bytes of a block, as a separate target."""
    first, last = max(begin, source.target), min(end, source.target + source.nbytes)
    if first >= last:
        return None
    return SourceRange(
        source.file, source.offset + first - source.target, last - first, first - begin
    )
