"""The set of blocks: adds them with homes, gives them writable homes, removes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiermem.core.block import Block, Extent, Role, Tier
from tiermem.core.layout import TensorShape, pack
from tiermem.core.residency import Record, State
from tiermem.errors import REFUSALS, InvariantError
from tiermem.runtime.acquire import Acquirer
from tiermem.runtime.loans.zero_copy import ZeroCopy
from tiermem.runtime.memory.homes import HomeRequest, StoredBlock, ranges_of
from tiermem.runtime.parts import Parts
from tiermem.runtime.placement.no_room import too_much_for_good

_IN_BACKWARD = (Role.GRAD, Role.ACTIVATION)


class BlockRegistry:
    """Implements ``add_blocks``, ``make_writable`` and ``remove_blocks`` of the block manager.

    Everything is done under the manager's lock.
    """

    def __init__(
        self, parts: Parts, acquirer: Acquirer, zero_copy: ZeroCopy, repair: Callable[[], None]
    ) -> None:
        """Works on ``parts``.

        Args:
            parts: The parts of the manager.
            acquirer: Fetches blocks.
            zero_copy: Forgets loans of blocks that are removed.
            repair: Makes table, slots and transfers consistent after an exception anywhere.
        """
        self._parts = parts
        self._acquirer = acquirer
        self._zero_copy = zero_copy
        self._repair = repair
        self._next_id = 0
        self._seen: list[Extent] = []  # places in DRAM of removed annexed blocks with aliases
        parts.homes.owners.append(self._annexed)

    def add(
        self,
        wanted: Sequence[tuple[str, Role, Sequence[TensorShape]]],
        home: str | Sequence[str | None] | None,
        stored: Sequence[StoredBlock | None],
    ) -> list[Block]:
        """Creates blocks; see :meth:`BlockManager.add_blocks`."""
        blocks, requests = [], []
        homes = [home] * len(wanted) if home is None or isinstance(home, str) else home
        files = stored or [None] * len(wanted)
        for (name, role, shapes), own, in_files in zip(wanted, homes, files, strict=True):
            specs, nbytes = pack(shapes)
            blocks.append(Block(self._next_id, name, role, nbytes, specs))
            self._next_id += 1
            where = own or self._parts.settings.policy.home(role)
            ranges = None if in_files is None else ranges_of(specs, in_files)
            requests.append(HomeRequest(name, nbytes, where, ranges))  # type: ignore[arg-type]
        places = self._parts.homes.reserve(requests)
        try:
            for block, request, (tier, extent) in zip(blocks, requests, places, strict=True):
                self._parts.table.add(block, tier, extent, defined=request.stored is not None)
            self._fix([b for b in blocks if self._parts.table[b.id].home is Tier.HBM])
            later = (block.nbytes for block in blocks if block.role in _IN_BACKWARD)
            self._parts.evictor.expect(max(later, default=0))
        except BaseException as error:
            if not isinstance(error, REFUSALS):
                self._repair()  # the exception may have been raised anywhere
            self.remove(blocks)
            for tier, extent in places:
                if extent is not None and self._parts.homes.holds(tier, extent):
                    self._parts.homes.release(tier, extent)  # no block of the table has it yet
            raise
        return blocks

    def annex(self, block: Block) -> bool:
        """Makes a block permanently used in DRAM; see :meth:`BlockManager.annex`."""
        record = self._parts.table[block.id]
        if record.home is not Tier.DRAM or record.defined or record.in_hbm is not State.ABSENT:
            return False
        if not self._zero_copy.sees(block):
            return False
        self._zero_copy.forget(block.id)
        self._parts.slots.enter(block, self._parts.table.annex(block.id))
        return True

    def _annexed(self) -> list[tuple[Tier, Extent]]:
        """Returns the places in DRAM of annexed blocks."""
        places = [record.annexed for record in self._parts.table]
        return [(Tier.DRAM, place) for place in (*places, *self._seen) if place is not None]

    def make_writable(self, blocks: Sequence[Block]) -> None:
        """Gives blocks writable homes; see :meth:`BlockManager.make_writable`."""
        records = [self._parts.table[block.id] for block in blocks]
        records = [r for r in records if self._parts.homes.read_only(r.home_extent)]
        requests = [self._writable(record) for record in records]
        places = self._parts.homes.reserve(requests)
        try:
            for record, (tier, extent) in zip(records, places, strict=True):
                self._acquirer.acquire(record.block)
                try:
                    self._parts.transfers.rehome(record, tier, extent)
                finally:
                    self._parts.table.release(record.block.id)
        except REFUSALS:  # after any other exception, a repair frees unowned space
            for record, (tier, extent) in zip(records, places, strict=True):
                if extent is not None and record.home_extent != extent:
                    self._parts.homes.release(tier, extent)
            raise

    def _writable(self, record: Record) -> HomeRequest:
        home = self._parts.settings.policy.home(record.block.role)
        if home == "nvme" and self._parts.homes.swap is None:
            home = "auto"
        return HomeRequest(record.block.name, record.block.nbytes, home)

    def remove(self, blocks: Sequence[Block]) -> None:
        """Removes blocks; see :meth:`BlockManager.remove_blocks`."""
        present = [block for block in blocks if self._parts.table.get(block.id) is not None]
        for block in present:
            self._parts.transfers.settle(block.id)
            if self._parts.table[block.id].leases:
                raise InvariantError(f"block {block.name!r} is in use and cannot be removed")
        if any(self._parts.table[block.id].home is Tier.DRAM for block in present):
            # the host may write the home next
            self._parts.copy.wait(self._parts.copy.risen())
        if any(self._parts.table[block.id].annexed for block in present):
            self._parts.copy.synchronize()  # kernels may use it
        for block in present:
            record = self._parts.table[block.id]
            annexed, slot = record.annexed, self._parts.slots.current.get(block.id)
            if self._parts.homes.keeper is not None:
                self._parts.homes.keeper.before_write(record)
            self._parts.transfers.ahead.drop(block.id)
            self._parts.transfers.packed.drop(block)
            self._parts.copy.wait(self._parts.transfers.home_ready.pop(block.id, None))
            self._parts.evictor.forget(record, gone=True)
            if record.home_extent is not None:
                self._parts.homes.release(record.home, record.home_extent)
            if annexed is not None and slot is not None and slot.aliased:
                self._seen.append(annexed)
            elif annexed is not None:
                self._parts.homes.release(Tier.DRAM, annexed)
            self._parts.slots.forget(block.id)
            self._zero_copy.forget(block.id)
            self._parts.transfers.failing.discard(block.id)
        self._parts.planner.forget({block.id for block in present})
        gone = [block.id for block in present]
        self._parts.transfers.waste.forget(gone)
        self._parts.transfers.departures.forget(gone)

    def _fix(self, blocks: Sequence[Block]) -> None:
        """Allocates the permanent places of blocks whose home is HBM.

        Raises:
            CapacityError: If HBM has no room for all of them.
        """
        if not blocks:
            return
        table, limit = self._parts.table, self._parts.limit
        there, nbytes = table.fixed_nbytes(), sum(block.nbytes for block in blocks)
        if not limit.require(there + nbytes):
            raise too_much_for_good(blocks, there, table.hbm.capacity)
        if table.fixed_nbytes(now=True) + nbytes > table.hbm.capacity:
            limit.make_way()
        for block in blocks:
            self._acquirer.place_for_good(self._parts.table[block.id])
        self._parts.evictor.regions.divide_anew()
