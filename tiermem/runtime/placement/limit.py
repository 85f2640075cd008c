"""How many bytes of HBM there are: what was asked for, or what the device has to spare.

A budget is a limit. Memory comes behind its addresses as blocks come there, and where the device
has no more, blocks make do with what there is. Where the limit is to be found out (``hbm="auto"``)
it begins at half of what is free. Once a loop has come round, torch keeps whatever memory its
activations take at their peak, so all that is still free then, but for a margin, is added. Where
torch runs out of memory, HBM goes back to the least with which the program runs: the error has
been raised, the step can be made again, and it has the rest of the device. From then on it is
found out anew, with twice the margin. Where torch's allocator does not tell, a quarter of the
device is left alone from the start.

The limit changes as a pass begins, when hardly anything is in use; it may grow at any time.
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
_MARGIN = 32  # of the device's memory: one part is left alone
_MOST_MARGIN = 4  # likewise, however often torch has run out
_WORTH = 32  # of the limit: a change by less than one part is not worth other plans
_MOST_KEYS = 64


class HbmLimit:
    """Sets the capacity of HBM.

    Attributes:
        most: What it never passes, in bytes.
        least: What is known to be needed at one time, in bytes.
        open: Whether the limit is to be found out.
        give_way: Callbacks that free permanent places that can be spared.
    """

    def __init__(
        self, evictor: Evictor, arena: Arena, room: DeviceRoom | None, *, most: int, open: bool
    ) -> None:
        """Leaves the capacity as it is.

        Args:
            evictor: Whose HBM it is; this works under its lock.
            arena: The memory behind it.
            room: What the device has besides; None where that cannot be known.
            most: Bytes that it never passes.
            open: Whether the limit is to be found out.
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
        """Makes HBM larger by a block for which there is no room; returns whether it could."""
        hbm = self._table.hbm
        size = align_up(nbytes)
        if hbm.walled or hbm.capacity + size > self.most:
            return False  # the device has no more, or may not be asked for it
        self._resize(min(self.most, hbm.capacity + align_up(size, self._unit)))
        return True

    def follow(self, key: Hashable) -> bool:
        """Adjusts the limit as a pass begins, where there is reason to.

        Args:
            key: Name of the pass.

        Returns:
            Whether HBM has another size now, or less in it.
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
        """Adds what models have left on the device as they were wrapped, if it is to be found out.

        What is little beside the limit is not worth another division of HBM.
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
        """Whether a loop has come round so often that it is time to look: 1, 2, 4, 8 times."""
        if key not in self._seen and len(self._seen) < _MOST_KEYS:
            self._seen.add(key)
            return False
        self._seen = {key}
        self._rounds += 1
        return not self._rounds & (self._rounds - 1)

    def _adjust(self, *, short: bool) -> bool:
        """Sets the limit to what the device can spare, if it differs by enough.

        Args:
            short: Whether the device had no memory for what the limit allows.

        Returns:
                Whether the limit was set anew.
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
            return False  # all blocks fit in any case
        if wanted - hbm.capacity > hbm.capacity // _WORTH:
            self._resize(wanted)
            return True
        if hbm.capacity - wanted > self._margin // 2:
            self._shrink(wanted)
            return True
        return False

    def _floor(self) -> int:
        """Returns the bytes with which the program runs, however slowly."""
        fixed = self._table.fixed_nbytes()
        largest = max((align_up(record.block.nbytes) for record in self._table), default=0)
        return min(self.most, align_up(max(self.least, fixed + 2 * largest), self._unit))

    def _resize(self, capacity: int) -> None:
        self._table.hbm.resize(capacity)

    def _shrink(self, end: int) -> None:
        """Sets the end of HBM to ``end``, or behind what is in use; unmaps the rest."""
        evictor, hbm = self._evictor, self._table.hbm
        self.make_way()
        evictor.transfers.settle_all()
        evictor.reap()
        hbm.open_walls()
        behind = [extent.offset for extent in hbm.extents() if extent.end > end]
        with suppress(StorageError):  # a block that cannot be written stays where it is
            evictor.clear(behind, wait=True)
        end = max([end, *(extent.end for extent in hbm.extents())])
        self._resize(end)
        evictor.regions.reset()
        self._arena.trim(end, max(end, self._arena.capacity))
        self.trim()

    def trim(self) -> None:
        """Gives back the memory of places where no block is."""
        self._evictor.transfers.settle_all()
        self._evictor.reap()
        for gap in self._table.hbm.gaps():
            self._arena.trim(gap.offset, gap.end)
