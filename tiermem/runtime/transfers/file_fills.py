"""Blocks that are filled from checkpoint files: read to their homes, several at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from tiermem.core.block import Block, Extent, Tier, align_up
from tiermem.errors import InvariantError
from tiermem.runtime.memory.homes import StoredBlock, ranges_of
from tiermem.runtime.transfers.transfers import Transfers
from tiermem.storage.checkpointstore import CheckpointStore, SourceRange
from tiermem.transfer.driver import Signal
from tiermem.transfer.file.mover import FileTransfer


class FileFills:
    """Reads checkpoint files past the page cache, into homes or into memory of the caller's.

    The reads are like those of blocks that stay in the files: in batches, through the staging
    chunks, with the same checks. Its addresses in the checkpoint store exist during a call only.
    """

    def __init__(self, transfers: Transfers) -> None:
        """Uses the same table and stores as ``transfers``, under the same lock."""
        self._transfers = transfers

    def fill(self, wanted: Sequence[tuple[Block, StoredBlock]]) -> None:
        """Reads blocks that hold no data yet directly to their homes in DRAM or HBM.

        All of them are requested at once, so the disk is never idle in between.

        Args:
            wanted: Each block, and where the files have its tensors. Those whose home is HBM are
                leased.

        Raises:
            StorageError: If one cannot be read; none of them holds data then.
            IntegrityError: Likewise, if a file was changed.
            InvariantError: If a block holds data, or has its home in a file.
        """
        transfers = self._transfers
        under_way: list[tuple[Block, Extent, FileTransfer]] = []
        try:
            for block, stored in wanted:
                target, after = self._target(block)
                extent = self._place(ranges_of(block.tensors, stored), target.numel())
                in_place = transfers.table[block.id].home is Tier.DRAM
                with self._until_asked(extent):
                    reading = transfers.need_mover().read(
                        extent, target, label=block.name, in_place=in_place, after=after
                    )
                under_way.append((block, extent, reading))
            for _, _, reading in under_way:
                transfers.wait_or_raise(reading)
        except Exception:  # after a BaseException a repair waits for reads in progress
            self._stop([reading for _, _, reading in under_way])
            raise
        for block, extent, reading in under_way:
            self._store().forget(extent)
            self._filled(block, reading)

    def _target(self, block: Block) -> tuple[torch.Tensor, Sequence[Signal]]:
        """Returns the bytes to read a block into, and the events of what still uses them."""
        transfers = self._transfers
        record = transfers.table[block.id]
        if record.home is Tier.HBM and record.leases:
            slot = transfers.slots.current[block.id]
            return slot.bytes, transfers.copy.guards(slot.extent)
        if record.home is not Tier.DRAM or record.home_extent is None or record.defined:
            raise InvariantError(f"block {block.name!r} is not without data in DRAM or HBM")
        transfers.copy.wait(transfers.home_ready.get(block.id))
        transfers.homes.packed.pop(record.home_extent.offset, None)
        return transfers.homes.bytes_of(record.home_extent), ()

    def _filled(self, block: Block, reading: FileTransfer) -> None:
        """Enters a block that has been read."""
        transfers = self._transfers
        record = transfers.table[block.id]
        if record.home is Tier.DRAM:
            transfers.table.home_written(block.id)
            transfers.departures.add_home(block.id)
        elif reading.event is not None:
            transfers.copy.landed(transfers.slots.current[block.id].extent, reading.event)
            transfers.ready[block.id] = reading.event

    def read(self, ranges: Sequence[SourceRange], nbytes: int) -> torch.Tensor:
        """Reads runs of bytes of the files into fresh memory of the host.

        Args:
            ranges: Their ranges in the files, and their targets.
            nbytes: The total number of bytes.

        Returns:
            A 1-D uint8 tensor of ``nbytes``.

        Raises:
            StorageError: If they cannot be read.
            IntegrityError: If a file was changed.
        """
        whole = torch.empty(align_up(max(1, nbytes)), dtype=torch.uint8, device="cpu")
        if nbytes:
            extent = self._place(ranges, whole.numel())
            with self._until_asked(extent):
                mover = self._transfers.need_mover()
                reading = mover.read(extent, whole, label="a tensor", urgent=True)
            try:
                self._transfers.wait_or_raise(reading)
            finally:
                if reading.finished:  # otherwise a repair waits for it, and forgets its address
                    self._store().forget(extent)
        return whole[:nbytes]

    def _place(self, ranges: Sequence[SourceRange], nbytes: int) -> Extent:
        return self._store().place(ranges, nbytes)

    @contextmanager
    def _until_asked(self, extent: Extent) -> Iterator[None]:
        """Gives an address up if an error prevents the read."""
        try:
            yield
        except Exception:
            self._store().forget(extent)
            raise

    def _store(self) -> CheckpointStore:
        sources = self._transfers.homes.sources
        if sources is None:
            raise InvariantError("there are no checkpoint files")
        return sources

    def _stop(self, reading: Sequence[FileTransfer]) -> None:
        """Ends reads in progress, and gives up their addresses."""
        transfers = self._transfers
        for transfer in reading:
            with suppress(Exception):
                transfers.need_mover().cancel(transfer)
        for transfer in reading:
            transfers.wait(transfer)
            self._store().forget(transfer.extent)
        transfers.poll()
