"""The residency table: the state of every block in every tier, and its transitions.

Transitions that happen at every use (leases, and the swaps of replayed passes,
:mod:`tiermem.runtime.lookahead.replay`) are written in line there for speed.

Rules that every transition keeps (:meth:`ResidencyTable.check` checks them):
a block that holds data has a valid copy somewhere at all times; at most one
copy is dirty; a leased copy is not drained, dropped or overwritten; a failed
transfer restores the state before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from tiermem.core.allocator import Allocator, Backing
from tiermem.core.block import ANNEX, Block, Extent, Tier
from tiermem.core.record import Move, Record, State
from tiermem.errors import InvariantError

__all__ = ["Move", "Record", "ResidencyTable", "State"]

_ABSENT, _VALID, _DIRTY = State.ABSENT, State.VALID, State.DIRTY


class ResidencyTable:
    """Every block's residency, and the allocator of HBM. Single writer, no I/O.

    Attributes:
        hbm: The allocator.
        nbytes: Bytes of all blocks, wherever they are.
        give_way: Blocks, by id, that have HBM as their home and are removed if another block has no
            room.
        get: Returns a block's record by id, or None if there is no such block (any more).
        of: Returns a block's record by id, which must exist.
        at: Returns the record of the block in HBM at an offset; None for an orphan.
        by_offset: The same records by offset.
    """

    def __init__(self, hbm_nbytes: int, backing: Backing | None = None) -> None:
        """Starts empty.

        Args:
            hbm_nbytes: Capacity of HBM.
            backing: Maps the memory behind it; None if all of it is there already.
        """
        self.hbm = Allocator(hbm_nbytes, backing=backing)
        self.nbytes = 0
        self.give_way: set[int] = set()
        self._records: dict[int, Record] = {}
        self.by_offset: dict[int, Record] = {}
        self._orphans: dict[int, Extent] = {}
        self.get: Callable[[int], Record | None] = self._records.get
        self.of: Callable[[int], Record] = self._records.__getitem__
        self.at: Callable[[int], Record | None] = self.by_offset.get

    def __getitem__(self, block_id: int) -> Record:
        return self._records[block_id]

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def fixed_nbytes(self, *, now: bool = False) -> int:
        """Returns the bytes of HBM that blocks take permanently.

        Args:
            now: Whether to include blocks that give way.
        """
        return sum(
            record.block.nbytes
            for record in self
            if record.fixed
            and record.annexed is None
            and (now or record.block.id not in self.give_way)
        )

    def add(
        self, block: Block, home: Tier, home_extent: Extent | None, *, defined: bool = False
    ) -> Record:
        """Adds a block.

        Args:
            block: The block.
            home: Its home tier.
            home_extent: Where the home copy is (None if and only if the home is HBM).
            defined: Whether its home copy holds data already.
        """
        if block.id in self._records:
            raise InvariantError(f"block {block.name!r} is in the table already")
        if (home is Tier.HBM) != (home_extent is None):
            raise InvariantError(f"block {block.name!r}: a home in {home} needs an extent there")
        state = State.VALID if defined and home_extent is not None else State.ABSENT
        record = Record(block, home, home_extent, state, defined)
        self._records[block.id] = record
        self.nbytes += block.nbytes
        return record

    def remove(self, block_id: int, *, keep: bool = False) -> Record:
        """Removes a block and frees its HBM space; the caller has to free its home extent.

        Args:
            block_id: The block.
            keep: Leave its HBM space taken, as an orphan; see :meth:`reclaim`.

        Raises:
            InvariantError: If it is leased or being transferred.
        """
        record = self._records[block_id]
        if record.leases or record.in_hbm in (State.FILLING, State.DRAINING):
            raise self._wrong(record, "removed")
        del self._records[block_id]  # first: after an interrupt, the rest follows from it
        self.give_way.discard(block_id)
        if record.annexed is None:
            self.nbytes -= record.block.nbytes
        self._leave(record, keep=keep)
        return record

    def annex(self, block_id: int) -> Extent:
        """Makes kernels use a block at its home in DRAM, as if that were a place in HBM.

        Args:
            block_id: The block; it holds no data yet. The caller has to free its place once the
                block is removed.

        Returns:
            Its address from now on, which is not one of a byte in HBM.
        """
        record = self._records[block_id]
        home = record.home_extent
        if record.defined or record.in_hbm is not _ABSENT or record.home is not Tier.DRAM:
            raise self._wrong(record, "annexed")
        if home is None:
            raise self._wrong(record, "annexed without a home")
        place = Extent(ANNEX + home.offset, home.nbytes)
        new = place, Tier.HBM, None, _VALID, True, self.nbytes - record.block.nbytes
        r = record  # one line without Python calls: it cannot be interrupted half way
        r.extent, r.home, r.home_extent, r.in_hbm, r.fixed, self.nbytes = new
        return place

    # -- HBM: in ---------------------------------------------------------

    @property
    def all_fit(self) -> bool:
        """Whether HBM has room for all blocks at once."""
        return self.nbytes <= self.hbm.capacity

    def begin_fill(self, block_id: int, extent: Extent) -> Move:
        """Begins to copy a block to HBM into ``extent``, which the caller has allocated."""
        record = self._records[block_id]
        if record.in_hbm is not State.ABSENT or record.at_home is not State.VALID:
            raise self._wrong(record, "filled")
        if record.home_extent is None:
            raise self._wrong(record, "filled from a home in HBM")
        self._enter(record, extent, State.FILLING)  # raises if the extent was not allocated
        return Move(record.block, record.home, Tier.HBM, record.home_extent, extent)

    def end_fill(self, block_id: int, *, ok: bool, keep: bool = False) -> None:
        """Ends a fill; if it failed, the HBM space is freed or becomes an orphan."""
        record = self._records[block_id]
        if record.in_hbm is not State.FILLING:
            raise self._wrong(record, "said to be filled")
        if ok:
            record.in_hbm = _VALID
        else:
            self._leave(record, keep=keep)

    def place_blank(self, block_id: int, extent: Extent) -> None:
        """Gives a block that holds no data yet a place in HBM, to be written there."""
        record = self._records[block_id]
        if record.defined or record.in_hbm is not State.ABSENT:
            raise self._wrong(record, "placed blank")
        self._enter(record, extent, State.VALID)

    # -- HBM: use --------------------------------------------------------

    def lease(self, block_id: int) -> Record:
        """Holds the HBM copy against eviction."""
        record = self._records[block_id]
        state = record.in_hbm
        if state is not _VALID and state is not _DIRTY:
            raise self._wrong(record, "leased")
        record.leases += 1
        record.copied = False
        return record

    def release(self, block_id: int, *, dirty: bool = False) -> None:
        """Gives a lease back; ``dirty`` says that the copy was written."""
        record = self._records[block_id]
        if record.leases <= 0:
            raise self._wrong(record, "released")
        if dirty:
            self.mark_dirty(block_id)
        record.leases -= 1

    def mark_dirty(self, block_id: int) -> None:
        """Marks the leased HBM copy as written: the home copy is stale from now on."""
        record = self._records[block_id]
        state = record.in_hbm
        if (state is not _DIRTY and state is not _VALID) or not record.leases:
            raise self._wrong(record, "written")
        record.defined = True
        record.copied = False
        record.writes += 1
        record.in_hbm = _DIRTY
        record.at_home = _ABSENT

    # -- HBM: out --------------------------------------------------------

    def begin_drain(self, block_id: int) -> Move:
        """Begins to write a dirty block back to its home."""
        record = self._records[block_id]
        if record.in_hbm is not State.DIRTY or record.leases:
            raise self._wrong(record, "drained")
        if record.home_extent is None or record.extent is None:
            raise self._wrong(record, "drained without a home below HBM")
        record.in_hbm = State.DRAINING
        record.at_home = State.FILLING
        return Move(record.block, Tier.HBM, record.home, record.extent, record.home_extent)

    def end_drain(self, block_id: int, *, ok: bool) -> None:
        """Ends a drain; if it failed, the HBM copy is still the only one."""
        record = self._records[block_id]
        if record.in_hbm is not State.DRAINING:
            raise self._wrong(record, "said to be drained")
        record.at_home = State.VALID if ok else State.ABSENT
        record.in_hbm = State.VALID if ok else State.DIRTY  # last: until then this can be repeated

    def drop(self, block_id: int, *, free: bool = True) -> Extent:
        """Takes a clean copy out of HBM and returns the extent it had.

        Args:
            block_id: The block.
            free: Whether to free the extent; otherwise the caller may put another block there.
        """
        record = self._records[block_id]
        clean = record.in_hbm is _VALID and (record.at_home is _VALID or not record.defined)
        if not clean or record.leases or record.extent is None or record.fixed:
            raise self._wrong(record, "dropped")
        extent = record.extent
        del self.by_offset[extent.offset]
        if free:
            self.hbm.free(extent, copied=record.copied)
        record.extent = None
        record.in_hbm = _ABSENT
        return extent

    def relocate(self, block_id: int, offset: int) -> Extent:
        """Gives the HBM copy another address; the caller has to move its bytes.

        The new extent may overlap the old one and nothing else.

        Returns:
            The new extent.

        Raises:
            InvariantError: If there is no copy, it is in use or being transferred, or the place is
                not free.
        """
        record = self._records[block_id]
        old = record.extent
        if not record.usable or old is None:
            raise self._wrong(record, "moved within HBM")
        self.hbm.free(old)
        try:
            new = self.hbm.take(Extent(offset, old.nbytes))
        except InvariantError:
            self.hbm.take(old)
            raise
        del self.by_offset[old.offset]
        record.copied = False
        self.hbm.copied.give_back(new.offset)
        record.extent = new
        self.by_offset[offset] = record
        return new

    def discard(self, block_id: int, *, keep: bool = False) -> None:
        """Forgets a block's data (a gradient set to zero); the block itself stays.

        Args:
            block_id: The block.
            keep: Leave its HBM space taken, as an orphan; see :meth:`reclaim`.
        """
        record = self._records[block_id]
        if record.leases or record.in_hbm in (State.FILLING, State.DRAINING):
            raise self._wrong(record, "discarded")
        record.defined = False  # first: after an interrupt, the rest follows from it
        record.at_home = State.ABSENT
        if not record.fixed:
            self._leave(record, keep=keep)
        elif record.usable:
            record.in_hbm = State.VALID

    def orphans(self) -> list[Extent]:
        """Returns the HBM extents that are taken although they belong to no block."""
        return list(self._orphans.values())

    @property
    def present(self) -> int:
        """How many blocks are in HBM, or being copied to it or from it."""
        return len(self.by_offset)

    def strays(self) -> list[Extent]:
        """Returns extents that were allocated for a block but not given to it (after Ctrl-C)."""
        if self.hbm.count == len(self.by_offset) + len(self._orphans):
            return []
        return [
            extent
            for extent in self.hbm.extents()
            if extent.offset not in self.by_offset
            and extent.offset not in self._orphans
            and not self.hbm.is_wall(extent.offset)
        ]

    def reclaim(self, extent: Extent) -> None:
        """Frees an orphan: an extent that was kept for its aliases after its block had left.

        Raises:
            InvariantError: If it is not an orphan.
        """
        if self._orphans.get(extent.offset) != extent:
            raise InvariantError(f"{extent} is not an orphan")
        del self._orphans[extent.offset]
        self.hbm.free(extent)

    def adopt(self, extent: Extent) -> None:
        """Takes free HBM that belongs to no block; see :meth:`reclaim`."""
        self._orphans[extent.offset] = self.hbm.take(extent)

    def home_written(self, block_id: int) -> None:
        """Marks the home copy as written directly; there is none in HBM."""
        record = self._records[block_id]
        if record.in_hbm is not State.ABSENT or record.home_extent is None:
            raise self._wrong(record, "written at home")
        record.home_writes += 1  # first: invalidates what is known about its former bytes
        record.at_home = State.VALID
        record.defined = True

    def rehome(self, block_id: int, home: Tier, extent: Extent) -> None:
        """Gives a block that is in HBM another home, to which it still has to be written.

        Args:
            block_id: The block; its HBM copy is not leased or being transferred.
            home: Tier below HBM.
            extent: Its address there, which the caller has reserved; the address of its former home
                belongs to the caller from now on.
        """
        record = self._records[block_id]
        if not record.usable or not record.defined or home is Tier.HBM:
            raise self._wrong(record, f"given a home in {home.value}")
        record.in_hbm = State.DIRTY  # first: after an interrupt, nothing is lost
        record.at_home = State.ABSENT
        record.home, record.home_extent = home, extent

    def exchange_home(
        self, block_id: int, places: dict[int, Extent], changed: dict[int, None]
    ) -> None:
        """Exchanges the home of a block that is in HBM for another, as :meth:`rehome` does.

        It cannot be interrupted half way: it is one line without Python calls.

        Args:
            block_id: The block; its HBM copy is not leased or being transferred.
            places: Addresses in the same tier by block; the block's address is exchanged with its
                entry.
            changed: The block is added to it.
        """
        record = self._records[block_id]
        state = record.in_hbm
        usable = state is _VALID or state is _DIRTY
        if not usable or not record.defined or record.home_extent is None:
            raise self._wrong(record, "given another home")
        former, later, i = record.home_extent, places[block_id], block_id
        record.in_hbm = State.DIRTY  # first: after an interrupt, nothing is lost
        changed[i], record.at_home, record.home_extent, places[i] = None, _ABSENT, later, former

    def exchange_lent(
        self, block_id: int, places: dict[int, Extent], changed: dict[int, None]
    ) -> None:
        """Exchanges the home of a block that is lent for another, which the borrower writes.

        Args:
            block_id: The block; according to the table it holds no data.
            places: As for :meth:`exchange_home`.
            changed: As for :meth:`exchange_home`.
        """
        record = self._records[block_id]
        if record.in_hbm is not State.ABSENT or record.defined or record.home_extent is None:
            raise self._wrong(record, "given another home while it is lent")
        former, later, i = record.home_extent, places[block_id], block_id
        changed[i], record.home_extent, places[i] = None, later, former

    def put_back(self, block_id: int, extent: Extent) -> None:
        """Restores a block's former home, and with it the contents from before :meth:`rehome`.

        Args:
            block_id: The block; it is not in HBM, and :meth:`rehome` gave it its present home.
            extent: Its former address, in the tier of its home; the present one belongs to the
                caller from now on.
        """
        record = self._records[block_id]
        if record.in_hbm is not State.ABSENT or record.home_extent is None:
            raise self._wrong(record, "put back")
        record.home_extent = extent
        record.at_home = State.VALID
        record.defined = True

    def hand_home_over(self, giver_id: int, taker_id: int, taken: dict[int, None]) -> None:
        """Gives the data of one block at home to another, by exchanging their addresses.

        It cannot be interrupted half way: it is one line without Python calls.

        Args:
            giver_id: The block; it is not in use, and holds no data from then on.
            taker_id: A block of the same size that holds no data.
            taken: The latter is added to it.
        """
        giver, taker = self._records[giver_id], self._records[taker_id]
        if giver.leases or giver.in_hbm in (State.FILLING, State.DRAINING) or not giver.defined:
            raise self._wrong(giver, "handed over")
        alike = giver.home is taker.home and giver.block.nbytes == taker.block.nbytes
        if taker.in_hbm is not _ABSENT or taker.defined or not alike:
            raise self._wrong(taker, f"given what {giver.block.name!r} has at home")
        g, t, i = giver, taker, taker_id
        new = False, _ABSENT, taker.home_extent, None, _VALID, True, giver.home_extent
        g.defined, g.at_home, g.home_extent, taken[i], t.at_home, t.defined, t.home_extent = new

    def exchange_empty(self, one_id: int, other_id: int) -> None:
        """Exchanges the homes of two blocks as large as each other that hold no data."""
        one, other = self._records[one_id], self._records[other_id]
        if one.home is not other.home or one.block.nbytes != other.block.nbytes:
            raise self._wrong(one, f"given the home of {other.block.name!r}")
        for record in (one, other):
            if record.defined or record.in_hbm is not _ABSENT:
                raise self._wrong(record, "given another's home")
        one.home_extent, other.home_extent = other.home_extent, one.home_extent

    # -- after an exception ----------------------------------------------

    def repair(self, orphans: Iterable[Extent] = ()) -> None:
        """Makes everything consistent again after an exception anywhere.

        The records say whether a block has an extent in HBM, and whether that copy is the only one.
        The rest is rebuilt from this. A block that was being dropped or discarded is then either
        still there or not.

        Args:
            orphans: Extents that still have aliases, although their block has left.
        """
        self.by_offset.clear()
        for record in self._records.values():
            self._repair(record)
            if record.extent is not None and record.annexed is None:
                self.by_offset[record.extent.offset] = record
        self._orphans.update((extent.offset, extent) for extent in orphans)
        for offset in [offset for offset in self._orphans if offset in self.by_offset]:
            del self._orphans[offset]  # was about to become one
        held = [record.extent for record in self.by_offset.values() if record.extent is not None]
        self.hbm.rebuild([*held, *self._orphans.values()])
        self.nbytes = sum(r.block.nbytes for r in self._records.values() if r.annexed is None)

    def _repair(self, record: Record) -> None:
        record.copied = False
        if record.extent is None or record.in_hbm is State.ABSENT:
            record.extent = None
            record.in_hbm = State.ABSENT
        if not record.defined:
            record.at_home = State.ABSENT
            if record.in_hbm is State.DIRTY or record.in_hbm is State.DRAINING:
                record.in_hbm = State.VALID
        elif record.in_hbm is State.VALID and record.at_home is not State.VALID:
            record.in_hbm = State.DIRTY  # a drain that was about to be entered
        if record.in_hbm is State.DIRTY or (
            record.at_home is State.FILLING and record.in_hbm is not State.DRAINING
        ):
            record.at_home = State.ABSENT

    # -- rules -----------------------------------------------------------

    def check(self) -> None:
        """Checks every rule of the table.

        Raises:
            InvariantError: Naming the first block that breaks one.
        """
        held: list[Extent] = []
        for record in self._records.values():
            states = (record.at_home, record.in_hbm)
            present = record.in_hbm is not State.ABSENT
            valid = (State.VALID, State.DIRTY, State.DRAINING)
            if record.defined and not any(state in valid for state in states):
                raise self._wrong(record, "left without a valid copy")
            if states.count(State.DIRTY) > 1 or record.at_home in (State.DIRTY, State.DRAINING):
                raise self._wrong(record, "dirty in two tiers")
            if record.in_hbm is State.DIRTY and record.at_home is not State.ABSENT:
                raise self._wrong(record, "dirty in HBM and not stale at home")
            if record.leases and not record.usable:
                raise self._wrong(record, "leased and not usable")
            if present != (record.extent is not None):
                raise self._wrong(record, "in HBM without an extent, or the other way round")
            if record.extent is None or record.annexed is not None:
                continue
            if self.by_offset.get(record.extent.offset) is not record:
                raise self._wrong(record, "at an address that is another's")
            held.append(record.extent)
        used = sum(extent.nbytes for extent in [*held, *self._orphans.values()])
        if used != self.hbm.used or used > self.hbm.capacity:
            raise InvariantError(f"HBM: {used} bytes in the table, {self.hbm.used} allocated")

    def _enter(self, record: Record, extent: Extent, state: State) -> None:
        taken = extent.offset in self.by_offset or extent.offset in self._orphans
        if taken or not self.hbm.holds(extent) or extent.nbytes < record.block.nbytes:
            raise self._wrong(record, f"placed at {extent}")
        record.in_hbm = state
        record.copied = False
        self.hbm.copied.give_back(extent.offset)
        record.extent = extent
        self.by_offset[extent.offset] = record

    def _leave(self, record: Record, *, keep: bool = False) -> None:
        if record.extent is not None and record.annexed is None:
            # otherwise entering it was interrupted
            if self.by_offset.get(record.extent.offset) is record:
                del self.by_offset[record.extent.offset]
            if keep:
                self._orphans[record.extent.offset] = record.extent
            else:
                self.hbm.free(record.extent, copied=record.copied)
        record.extent = None
        record.in_hbm = State.ABSENT

    def _wrong(self, record: Record, what: str) -> InvariantError:
        return InvariantError(
            f"block {record.block.name!r} cannot be {what}: home {record.home.value} "
            f"{record.at_home.value}, hbm {record.in_hbm.value}, {record.leases} leases"
        )
