"""Writes blocks home packed, in loops that write the blocks they fetch and wait for copies.

It needs kernels on the device, a little DRAM, and a little HBM as long as it is on. It
gives both back if a block has no place otherwise.
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
"""Share of a block's bytes that is copied."""
_NAME = "room to pack homes"
_LEAST = 4 << 20
"""Below this size of a block, launching a kernel costs about as much as is saved."""
_OF_HBM, _LEAST_PLACE, _MOST_PLACE = 128, 4 << 20, 32 << 20
"""A place for packing a piece of a home takes such a part of HBM, with a minimum and maximum in
bytes."""


class HomePacking:
    """Begins and ends the packing of homes; under the manager's lock.

    Attributes:
        stays: Whether its room is kept even if a block has no place, since what needs the place may
            be done later.
    """

    def __init__(self, manager: BlockManager) -> None:
        """Starts with packing off."""
        self._manager = manager
        self._parts = parts = manager.parts
        self._block: Block | None = None
        self._places = 0  # its bytes in which homes are packed
        self._refused = False
        self.stays = False
        more = parts.evictor.more
        parts.evictor.more = lambda nbytes: more(nbytes) or (not self.stays and self.give_way())
        parts.limit.give_way.append(self.give_way)
        parts.homes.reclaimers.append(self._give_dram_back)

    @property
    def is_on(self) -> bool:
        """Whether homes that may be packed are written packed."""
        return self._parts.transfers.packed_homes.packs

    @property
    def has_room(self) -> bool:
        """Whether it has the memory that packing takes."""
        return self._block is not None

    def turn(self, *, on: bool) -> None:
        """Switches packing of homes on or off; its room has been reserved."""
        self._parts.transfers.packed_homes.packs = on

    def can_be_packed(self, block: Block) -> bool:
        """Whether enough of a block, with its home in DRAM, can be packed."""
        record = self._parts.table[block.id]
        halves = sum(s.nbytes for s in block.tensors if s.dtype is torch.bfloat16)
        return (
            record.home is Tier.DRAM
            and not record.fixed
            and _LEAST <= block.nbytes <= MOST
            and 2 * halves > block.nbytes
        )

    def begin(self) -> bool:
        """Begins to write blocks home packed, unless HBM is small or was needed for other things.

        Returns:
            Whether it has begun.
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
        self._block = block  # last: if interrupted before, repair() takes the room back
        if not begun:
            self.give_way()
        return self.has_room

    def mark(self, blocks: Iterable[Block], *, packed: bool) -> None:
        """Notes whether blocks are written home packed.

        Args:
            blocks: The blocks.
            packed: Whether those that can be packed are.
        """
        for block in blocks:
            self._parts.table[block.id].packs = packed and self.can_be_packed(block)

    def end(self) -> None:
        """Unpacks all homes, and gives its memory back."""
        self._parts.transfers.packed_homes.end()
        self.give_way()
        self._refused = False

    def repair(self) -> None:
        """Begins again with its room, after an exception anywhere; no operation is in progress."""
        parts, block = self._parts, self._block
        has_dram = parts.transfers.packed_homes.has_dram  # otherwise it was being given back
        if has_dram and block is not None and parts.table.get(block.id) is not None:
            slot = parts.slots.current[block.id]
            parts.copy.use_room(slot.bytes[: self._places], slot.extent)
            return
        self._block = None
        parts.transfers.packed_homes.stop()
        parts.copy.use_room(None, Extent(0, 0))
        self._manager.remove_blocks([r.block for r in parts.table if r.block.name == _NAME])

    def give_way(self) -> bool:
        """Gives its HBM back; homes are no longer packed, and packed homes stay packed.

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
        """Gives its DRAM back for a home that needs it: all homes are unpacked, none is packed.

        Returns:
            Whether it had any.
        """
        packed_homes = self._parts.transfers.packed_homes
        if not packed_homes.has_dram:
            return False
        packed_homes.end()
        self.give_way()
        return True
