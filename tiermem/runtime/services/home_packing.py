"""Has blocks written home packed, for loops that write what they bring up, and wait for copies.

It needs the device's kernels, a little DRAM, and for as long as it goes on a little of HBM. It
gives both back where a block has no place otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tiermem.core.block import Block, Extent, Role, Tier
from tiermem.core.layout import TensorShape
from tiermem.core.packedhome import PACKED_TILE, TILE, flags_nbytes
from tiermem.core.packing import MOST
from tiermem.errors import CapacityError
from tiermem.runtime.manager import BlockManager
from tiermem.transfer.streams import PLACES

SHARE = PACKED_TILE / TILE
"""Of a block's bytes: what is copied."""
_NAME = "room to pack homes"
_LEAST = 4 << 20
"""Bytes of a block below which the launch of a kernel costs about what is saved."""
_OF_HBM, _LEAST_PLACE, _MOST_PLACE = 128, 4 << 20, 32 << 20
"""Of HBM: what a place takes in which a piece of a home is packed, and its bytes."""


class HomePacking:
    """Begins and ends the packing of homes; under the manager's lock.

    Attributes:
        stays: Whether a block that has no place has to do without the room: what needs it may be
            done later.
    """

    def __init__(self, manager: BlockManager) -> None:
        """Packs nothing yet."""
        self._manager = manager
        self._parts = parts = manager.parts
        self._block: Block | None = None
        self._places = 0  # bytes of it in which homes are packed
        self._refused = False
        self.stays = False
        more = parts.evictor.more
        parts.evictor.more = lambda nbytes: more(nbytes) or (not self.stays and self.give_way())
        parts.limit.give_way.append(self.give_way)
        parts.homes.reclaimers.append(self._give_dram_back)

    @property
    def is_on(self) -> bool:
        """Whether what may be is written home packed."""
        return self._parts.transfers.packed_homes.packs

    @property
    def has_room(self) -> bool:
        """Whether it has what packing takes."""
        return self._block is not None

    def turn(self, *, on: bool) -> None:
        """Has what may be written home packed from now on, or as it is; it has its room."""
        self._parts.transfers.packed_homes.packs = on

    def can_be_packed(self, block: Block) -> bool:
        """Whether a block has what can be packed, at home in DRAM, and enough of it."""
        record = self._parts.table[block.id]
        halves = sum(s.nbytes for s in block.tensors if s.dtype is torch.bfloat16)
        return (
            record.home is Tier.DRAM
            and not record.fixed
            and _LEAST <= block.nbytes <= MOST
            and 2 * halves > block.nbytes
        )

    def begin(self) -> bool:
        """Has blocks written home packed from now on, unless HBM is small or was needed otherwise.

        Returns:
            Whether it is so.
        """
        parts = self._parts
        if self.has_room or self._refused:
            return self.has_room
        self._refused = True  # it is not tried again
        place = min(parts.table.hbm.capacity // _OF_HBM, _MOST_PLACE)
        if place < _LEAST_PLACE or not parts.copy.packs_homes:
            return False
        self._places, least = PLACES * place, parts.limit.least
        nbytes = self._places + flags_nbytes(parts.homes.dram.capacity)
        shape = TensorShape(_NAME, (nbytes,), (1,), torch.uint8, 1)
        try:
            [block] = self._manager.add_blocks([(_NAME, Role.BUFFER, [shape])], home="hbm")
        except CapacityError:
            return False
        finally:
            parts.limit.least = least  # it gives way
        parts.table[block.id].still = True  # kernels know its address
        parts.table.give_way.add(block.id)
        slot = parts.slots.current[block.id]
        parts.copy.use_room(slot.bytes[: self._places], slot.extent)
        begun = parts.transfers.packed_homes.begin(slot.bytes[self._places :].data_ptr())
        self._block = block  # last: cut short before it, repair() takes the room back
        if not begun:
            self.give_way()
        return self.has_room

    def mark(self, blocks: Iterable[Block], *, packed: bool) -> None:
        """Notes whether blocks are written home packed.

        Args:
            blocks: The blocks.
            packed: Whether those are that can be.
        """
        for block in blocks:
            self._parts.table[block.id].packs = packed and self.can_be_packed(block)

    def end(self) -> None:
        """Unpacks all homes, and gives back what it has."""
        self._parts.transfers.packed_homes.end()
        self.give_way()
        self._refused = False

    def repair(self) -> None:
        """Begins anew with its room, after an exception anywhere; nothing is under way."""
        parts, block = self._parts, self._block
        has_dram = parts.transfers.packed_homes.has_dram  # else it was being given back
        if has_dram and block is not None and parts.table.get(block.id) is not None:
            slot = parts.slots.current[block.id]
            parts.copy.use_room(slot.bytes[: self._places], slot.extent)
            return
        self._block = None
        parts.transfers.packed_homes.stop()
        parts.copy.use_room(None, Extent(0, 0))
        self._manager.remove_blocks([r.block for r in parts.table if r.block.name == _NAME])

    def give_way(self) -> bool:
        """Gives its HBM back; homes are packed no more, and those that are stay so.

        Returns:
            Whether it had any.
        """
        block, self._block = self._block, None
        self._parts.transfers.packed_homes.stop()
        if block is None or self._parts.table.get(block.id) is None:
            return False
        self._parts.copy.synchronize()
        self._parts.copy.use_room(None, Extent(0, 0))
        self._manager.remove_blocks([block])
        return True

    def _give_dram_back(self) -> bool:
        """Gives its DRAM back, which a home needs: all homes are unpacked, and none is packed.

        Returns:
            Whether it had any.
        """
        packed_homes = self._parts.transfers.packed_homes
        if not packed_homes.has_dram:
            return False
        packed_homes.end()
        self.give_way()
        return True
