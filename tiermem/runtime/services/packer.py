"""Creates packed copies of homes in DRAM, for passes that wait for copies from there to HBM.

It needs kernels on the device, spare DRAM, and a little HBM while it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from tiermem.core.block import Block, Extent, Role, Tier
from tiermem.core.layout import TensorShape
from tiermem.core.packing import Packed, Part, packed_nbytes, parts_of
from tiermem.core.residency import Record, State
from tiermem.errors import CapacityError, InvariantError
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.transfers.packed_copies import PackedCopy
from tiermem.transfer.copy import Packer as CopyPacker
from tiermem.transfer.packing import PIECE, home_nbytes, is_spoiled, room_nbytes

_NAME = "packing room"
_OF_SPARE = 2
"""Packed copies may take one such part of the DRAM that is not taken by homes."""
_LEAST = 4 << 20
"""Below this size of a block, launching a kernel costs about as much as a packed copy saves."""
_LEAST_SHARE = 0.9
"""Least share of a block's bytes that has the dtype that can be packed."""
_AT_ONCE = 1 << 30
"""Bytes that are packed before the host checks the results."""


class Wanted(NamedTuple):
    """A block that may be packed.

    Attributes:
        block: The block.
        rows: First byte and bytes of each tensor whose rows are copied one by one, in order.
    """

    block: Block
    rows: Sequence[tuple[int, int]] = ()


class _Begun(NamedTuple):
    """A block that is being packed."""

    record: Record
    extent: Extent
    parts: tuple[Part, ...]


class Packer:
    """Makes packed copies; under the manager's lock."""

    def __init__(self, manager: BlockManager, piece: int = PIECE) -> None:
        """Starts without packed copies.

        Args:
            manager: The manager of the blocks.
            piece: How many tiles are packed at once.
        """
        self._piece = piece
        self._manager = manager
        self._parts = manager.parts

    def pack(self, wanted: Iterable[Wanted]) -> int:
        """Creates packed copies of blocks, as far as there is DRAM and it makes them smaller.

        The host waits for the device. Nothing is done if all blocks fit in HBM, or if there
        are no kernels.

        Args:
            wanted: The blocks, the most important ones first.

        Returns:
            How many blocks got a packed copy.
        """
        parts = self._parts
        if parts.copy.capturing() or parts.table.all_fit:
            return 0
        parts.transfers.packed.drop_stale()
        parts.transfers.packed.free_stale()
        todo = [want for want in wanted if self._can_be(parts.table.get(want.block.id))]
        if not todo or not parts.copy.packs:
            return 0
        dram = parts.homes.dram
        spare, made, pending = (dram.capacity - dram.used) // _OF_SPARE, 0, 0
        begun: list[_Begun] = []
        with self._room() as room:
            if room is None:
                return 0
            packing = parts.copy.packing(*room, self._piece)
            try:
                for want in todo:
                    record, pieces = (
                        parts.table[want.block.id],
                        parts_of(want.block.nbytes, want.rows),
                    )
                    needed = home_nbytes(pieces)
                    extent = parts.homes.lend(needed, spare=True) if needed <= spare else None
                    if extent is None:
                        break
                    spare -= needed
                    begun.append(_Begun(record, extent, pieces))
                    self._begin(packing, begun[-1])
                    pending += want.block.nbytes
                    if pending >= _AT_ONCE:
                        made, pending = made + self._enter(begun), 0
                made += self._enter(begun)
            finally:
                if begun:  # an exception was raised in between
                    parts.copy.synchronize()
                while begun:
                    parts.homes.release(Tier.DRAM, begun.pop().extent)
        return made

    def repair(self) -> None:
        """Gives back the room of a run that an exception interrupted; none is in progress."""
        table = self._parts.table
        self._manager.remove_blocks([r.block for r in table if r.block.name == _NAME])

    # -- inside ----------------------------------------------------------

    @contextmanager
    def _room(self) -> Iterator[tuple[torch.Tensor, Extent] | None]:
        """Yields device memory to work with, inside ``with``; None without space."""
        parts, least = self._parts, self._parts.limit.least
        shape = TensorShape(_NAME, (room_nbytes(self._piece),), (1,), torch.uint8, 1)
        try:
            [block] = self._manager.add_blocks([(_NAME, Role.BUFFER, [shape])], home="hbm")
        except CapacityError:
            yield None
            return
        finally:
            parts.limit.least = least  # it is given back at once
        try:
            parts.table[block.id].still = True  # kernels know its address
            slot = parts.slots.current[block.id]
            yield slot.bytes, slot.extent
        finally:
            parts.copy.synchronize()
            self._manager.remove_blocks([block])

    def _can_be(self, record: Record | None) -> bool:
        """Whether a block, with its home in DRAM, has data that can be packed."""
        if record is None or record.block in self._parts.transfers.packed:
            return False
        block = record.block
        halves = sum(s.nbytes for s in block.tensors if s.dtype is torch.bfloat16)
        return (
            record.home is Tier.DRAM
            and record.at_home is State.VALID
            and record.defined
            and not record.fixed
            and block.nbytes >= _LEAST
            and halves >= _LEAST_SHARE * block.nbytes
        )

    def _begin(self, packing: CopyPacker, begun: _Begun) -> None:
        """Begins to pack a block, once its home is up to date."""
        parts, record = self._parts, begun.record
        parts.copy.wait(parts.transfers.home_ready.get(record.block.id))
        if record.home_extent is not None:
            parts.homes.open(record.home_extent)
        home = parts.transfers.in_dram(record)
        if home is None:
            raise InvariantError(f"block {record.block.name!r} is not at home in DRAM")
        packing.pack(home, parts.homes.arena.bytes_of(begun.extent), begun.parts)

    def _enter(self, begun: list[_Begun]) -> int:
        """Enters packed copies, and frees those that were of no use; empties ``begun``."""
        parts, made = self._parts, 0
        parts.copy.synchronize()
        while begun:
            record, extent, pieces = begun.pop()
            target = parts.homes.arena.bytes_of(extent)
            if is_spoiled(target):
                parts.homes.release(Tier.DRAM, extent)
            else:
                packed = Packed(target.data_ptr(), pieces, packed_nbytes(pieces))
                copy = PackedCopy(packed, extent, record.stamp)
                parts.transfers.packed.add(record.block, copy)
                made += 1
        return made
