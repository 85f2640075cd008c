"""How many bytes of HBM may be used: the budget, or what the device has to spare.

A budget is a limit. Memory is mapped at addresses as blocks are placed there, and if the device
has no more, blocks use what there is. If the limit is to be determined (``hbm="auto"``),
it begins at half of the free memory. After a round of the loop, torch holds all the memory that its
activations take at their peak. So all memory that is then free, except for a margin, is added. If
torch runs out of memory, HBM shrinks to the minimum with which the program runs: the error has
been raised, the step can be repeated, and it has the rest of the device. From then on the limit is
determined again, with twice the margin. If torch's allocator does not report out-of-memory errors,
a quarter of the device is left free from the start.

The limit changes when a pass begins, when hardly anything is in use; it may grow at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress

from tiermem.core.block import align_up
from tiermem.errors import StorageError
from tiermem.runtime.memory.device_room import DeviceRoom
from tiermem.runtime.placement.evictor import Evictor
from tiermem.storage.arena import Arena

_LEAST_MARGIN = 256 << 20
_MARGIN = 32  # one part of the device's memory is left free
_MOST_MARGIN = 4  # likewise, however often torch has run out
_WORTH = 32  # a change by less than one part of the limit is not worth new plans
_MOST_KEYS = 64


class HbmLimit:
    """Sets the capacity of HBM.

    Attributes:
        most: Upper bound of the limit, in bytes.
        least: Bytes that are known to be needed at one time.
        open: Whether the limit is to be determined.
        give_way: Callbacks that free permanent places that can be spared.
    """

    def __init__(
        self, evictor: Evictor, arena: Arena, room: DeviceRoom | None, *, most: int, open: bool
    ) -> None:
        """Stores its arguments; does not change the capacity.

        Args:
            evictor: The evictor of this HBM; everything here works under its lock.
            arena: The memory of HBM.
            room: The device's memory, which others use, too; None if that is unknown.
            most: Upper bound of the limit, in bytes.
            open: Whether the limit is to be determined.
        """
        self.most = most // 4096 * 4096
        self.least = 0
        self.open = open and room is not None
        self.give_way: list[Callable[[], object]] = []
        self._evictor = evictor
        self._table = evictor.table
        self._arena = arena
        self._unit = arena.chunk
        self._room = room
        total = room.total if room is not None else 0
        share = _MARGIN if room is None or room.watched else _MOST_MARGIN
        self._margin = max(min(_LEAST_MARGIN, total // _MOST_MARGIN), total // share)
        self._seen: set[Hashable] = set()
        self._rounds = 0
        self._begun = False
        if self.open:
            evictor.more = self.more

    def require(self, nbytes: int) -> bool:
        """Raises the limit so that ``nbytes`` can be in use at once; returns whether they can."""
        if nbytes > max(self.most, self._table.hbm.capacity):
            return False
        self.least = max(self.least, nbytes)
        if nbytes > self._table.hbm.capacity:
            self._resize(min(self.most, align_up(nbytes, self._unit)))
        return True

    def make_way(self) -> None:
        """Frees the permanent places that can be spared."""
        for give in self.give_way:
            give()

    def more(self, nbytes: int) -> bool:
        """Enlarges HBM for a block for which there is no room; returns whether it could."""
        hbm = self._table.hbm
        size = align_up(nbytes)
        if hbm.walled or hbm.capacity + size > self.most:
            return False  # the device has no more, or must not be asked
        self._resize(min(self.most, hbm.capacity + align_up(size, self._unit)))
        return True

    def follow(self, key: Hashable) -> bool:
        """Adjusts the limit when a pass begins, if there is a reason.

        Args:
            key: Name of the pass.

        Returns:
            Whether the size of HBM has changed, or blocks have left it.
        """
        hbm, room = self._table.hbm, self._room
        if not self._begun:
            self.begin()
            self._begun = True
        if room is not None and room.ran_out() and self.open:
            self._margin = min(2 * self._margin, max(self._margin, room.total // _MOST_MARGIN))
            self._begin_anew()
            self._shrink(min(hbm.capacity, self._floor()))
            return True
        if hbm.walled:
            self._begin_anew()
            return self._adjust(short=True)
        if room is None or (hbm.capacity >= self.most and not self.open):
            return False
        return self._comes_round(key) and self._adjust(short=False)

    def begin(self) -> None:
        """Adds what wrapping the models has freed on the device, if the limit is to be determined.

        An amount that is small compared with the limit is not worth dividing HBM again.
        """
        hbm = self._table.hbm
        if self._room is not None and self.open:
            half = (self._arena.mapped + self._room.free()) // 2
            wanted = min(self.most, half // self._unit * self._unit)
            if wanted - hbm.capacity > hbm.capacity // _WORTH:
                self._resize(wanted)

    def _begin_anew(self) -> None:
        self._seen.clear()
        self._rounds = 0

    def _comes_round(self, key: Hashable) -> bool:
        """Whether the loop has had 1, 2, 4, 8, ... rounds, so that the limit is checked."""
        if key not in self._seen and len(self._seen) < _MOST_KEYS:
            self._seen.add(key)
            return False
        self._seen = {key}
        self._rounds += 1
        return not self._rounds & (self._rounds - 1)

    def _adjust(self, *, short: bool) -> bool:
        """Sets the limit to what the device can spare, if it differs by enough.

        Args:
            short: Whether the device had less memory than the limit allows.

        Returns:
            Whether the limit was changed.
        """
        hbm, room = self._table.hbm, self._room
        spare = self._arena.mapped
        if room is not None:
            spare += room.free() - self._margin
        wanted = min(self.most, max(self._floor(), spare // self._unit * self._unit))
        if short:
            self._shrink(min(wanted, hbm.capacity))
            return True
        if self._table.nbytes <= min(wanted, hbm.capacity):
            return False  # all blocks fit anyway
        if wanted - hbm.capacity > hbm.capacity // _WORTH:
            self._resize(wanted)
            return True
        if hbm.capacity - wanted > self._margin // 2:
            self._shrink(wanted)
            return True
        return False

    def _floor(self) -> int:
        """Returns the bytes with which the program runs at all."""
        fixed = self._table.fixed_nbytes()
        largest = max((align_up(record.block.nbytes) for record in self._table), default=0)
        return min(self.most, align_up(max(self.least, fixed + 2 * largest), self._unit))

    def _resize(self, capacity: int) -> None:
        self._table.hbm.resize(capacity)

    def _shrink(self, end: int) -> None:
        """Sets the end of HBM to ``end``, or after what is in use; unmaps the rest."""
        evictor, hbm = self._evictor, self._table.hbm
        self.make_way()
        evictor.transfers.settle_all()
        evictor.reap()
        hbm.open_walls()
        behind = [extent.offset for extent in hbm.extents() if extent.end > end]
        with suppress(StorageError):  # a block that cannot be written stays
            evictor.clear(behind, wait=True)
        end = max([end, *(extent.end for extent in hbm.extents())])
        self._resize(end)
        evictor.regions.reset()
        self._arena.trim(end, max(end, self._arena.capacity))
        self.trim()

    def trim(self) -> None:
        """Unmaps the memory of places without a block."""
        self._evictor.transfers.settle_all()
        self._evictor.reap()
        for gap in self._table.hbm.gaps():
            self._arena.trim(gap.offset, gap.end)
