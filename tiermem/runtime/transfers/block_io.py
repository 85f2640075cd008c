"""A block's bytes as ordinary tensors: read from wherever they are, written to an empty home."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiermem.core.block import Block, TensorSpec, Tier
from tiermem.core.residency import State
from tiermem.errors import InvariantError
from tiermem.runtime.memory.slots import typed_view
from tiermem.runtime.transfers.transfers import Transfers


class BlockIo:
    """Reads and writes blocks without fetching them into HBM."""

    def __init__(self, transfers: Transfers) -> None:
        """Uses the same table and stores as ``transfers``, under the same lock."""
        self._transfers = transfers

    def read(self, block: Block) -> list[torch.Tensor]:
        """Returns copies of a block's tensors in ordinary host memory, which they share.

        Raises:
            StorageError: If its bytes cannot be read.
        """
        host, own = self._bytes_of(block)
        if not own:
            host = torch.empty(block.nbytes, dtype=torch.uint8, device="cpu").copy_(host)
        return [view_of(host, spec) for spec in block.tensors]

    def views(self, block: Block) -> list[torch.Tensor]:
        """Returns a block's tensors in place, or copies of what is in a file.

        The block must not move while they are read: the caller holds the manager's lock, and has
        done the block's deferred work.

        Raises:
            StorageError: If its bytes cannot be read.
        """
        found, _ = self._bytes_of(block)
        return [view_of(found, spec) for spec in block.tensors]

    def whole(self, block: Block) -> torch.Tensor:
        """Returns a block's bytes in place, 1-D uint8; see :meth:`views`."""
        return self._bytes_of(block)[0]

    def clone(self, block: Block, device: torch.device) -> list[torch.Tensor]:
        """Returns copies of a block's tensors, each in its own memory.

        Bytes in HBM or in a DRAM home are copied once only.

        Args:
            block: The block; it holds data.
            device: Where the copies are.

        Raises:
            StorageError: If its bytes cannot be read.
        """
        found, _ = self._bytes_of(block)
        return [view_of(found, spec).to(device, copy=True) for spec in block.tensors]

    def _bytes_of(self, block: Block) -> tuple[torch.Tensor, bool]:
        """Returns a block's current bytes, and whether only the caller has them."""
        transfers = self._transfers
        record = transfers.table[block.id]
        if record.in_hbm is State.FILLING:
            transfers.settle(block.id)
        if record.in_hbm is not State.ABSENT:
            transfers.copy.use(transfers.ready.get(block.id))
            record.copied = False  # compute reads it
            return transfers.slots.current[block.id].bytes, False
        if record.home is Tier.DRAM and record.home_extent is not None:
            transfers.copy.wait(transfers.home_ready.get(block.id))
            return transfers.homes.opened(record.home_extent), False
        if record.home_extent is not None:
            return self.read_home(block), True
        return torch.empty(block.nbytes, dtype=torch.uint8, device="cpu"), True

    def read_home(self, block: Block) -> torch.Tensor:
        """Returns the bytes of a block's file, in ordinary host memory.

        Raises:
            StorageError: If they cannot be read.
            InvariantError: If the block's home is not a file.
        """
        transfers = self._transfers
        record = transfers.table[block.id]
        if record.home is not Tier.NVME or record.home_extent is None:
            raise InvariantError(f"block {block.name!r} has its home in no file")
        host = torch.empty(block.nbytes, dtype=torch.uint8, device="cpu")
        mover = transfers.need_mover()
        transfers.wait_or_raise(mover.read(record.home_extent, host, label=block.name, urgent=True))
        return host

    def restore(self, block: Block, begin: int, end: int) -> None:
        """Copies bytes of the home copy over a leased HBM copy that was changed wrongly.

        Args:
            block: The block; its home is below HBM, and has the former bytes.
            begin: The first byte.
            end: The end, exclusive.

        Raises:
            StorageError: If they cannot be read; it may be called again.
        """
        transfers = self._transfers
        record = transfers.table[block.id]
        if record.home is Tier.DRAM and record.home_extent is not None:
            transfers.copy.wait(transfers.home_ready.get(block.id))
            home = transfers.homes.opened(record.home_extent)
        else:
            home = self.read_home(block)
        slot = transfers.slots.current[block.id]
        slot.bytes[begin:end].copy_(home[begin:end])

    def write_home(self, block: Block, tensors: Sequence[torch.Tensor | None]) -> None:
        """Writes a block that holds no data yet directly to its home.

        Args:
            block: The block; its home is not HBM.
            tensors: One per spec; None leaves that part undefined.

        Raises:
            StorageError: If the home is a file and cannot be written; it holds no data then.
            InvariantError: If it holds data: a write that failed would lose it.
        """
        transfers = self._transfers
        record = transfers.table[block.id]
        extent = record.home_extent
        if extent is None or record.in_hbm is not State.ABSENT or record.defined:
            raise InvariantError(f"block {block.name!r} is not without data below HBM")
        in_dram = record.home is Tier.DRAM
        if transfers.homes.keeper is not None:
            transfers.homes.keeper.before_write(record)
        if in_dram:
            transfers.copy.wait(transfers.home_ready.get(block.id))
            transfers.homes.packed.pop(extent.offset, None)
            target = transfers.homes.arena.bytes_of(extent)
        else:
            target = torch.zeros(block.nbytes, dtype=torch.uint8, device="cpu")
        for spec, tensor in zip(block.tensors, tensors, strict=True):
            if tensor is not None:
                view_of(target, spec).copy_(tensor)
        if not in_dram:
            transfers.wait_or_raise(transfers.need_mover().write(extent, target, label=block.name))
        transfers.table.home_written(block.id)
        transfers.departures.add_home(block.id)


def view_of(whole: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Returns the tensor of ``spec`` inside a block's bytes."""
    dtype = spec.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{spec.name}: {dtype!r} is not a torch dtype")
    first = (whole.storage_offset() + spec.offset) // dtype.itemsize
    return typed_view(whole.untyped_storage(), dtype, first, spec.shape, spec.stride)
