"""Space below HBM: allocates homes in the DRAM arena, the swap files and checkpoint files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from tiermem.config import Home, budget_size, exact_size, format_size
from tiermem.core.allocator import Allocator
from tiermem.core.block import Extent, TensorSpec, Tier, align_up
from tiermem.core.residency import Record
from tiermem.errors import REFUSALS, CapacityError, InvariantError
from tiermem.storage.arena import HostArena
from tiermem.storage.checkpointstore import FIRST_OFFSET, CheckpointStore, SourceRange
from tiermem.storage.files import FileStore, JoinedFiles
from tiermem.storage.pagelock import PageLocks
from tiermem.storage.swapfile import SwapFile

UNUSED = (
    ", or free what is not used any more, dropped or not (tier.unwrap(model), optimizer.close())"
)
"""What to do if something else takes the room; it may be a model that the program has dropped."""

Owned = tuple[Tier, Extent]
StoredBlock = Sequence[Sequence[SourceRange]]
"""Ranges of checkpoint files that have a block's tensors: for each, with targets in the tensor."""

_CHUNKS = 16
_LEAST_CHUNK = 32 << 10
_MOST_CHUNK = 4 << 20


@dataclass(frozen=True, slots=True)
class HomeRequest:
    """A request for space.

    Attributes:
        name: The block's name.
        nbytes: Its size.
        home: The tier the policy asks for.
        stored: The ranges of checkpoint files with its bytes, if these are to be its home.
    """

    name: str
    nbytes: int
    home: Home
    stored: tuple[SourceRange, ...] | None = None


def ranges_of(specs: Sequence[TensorSpec], stored: StoredBlock) -> tuple[SourceRange, ...]:
    """Returns the ranges of checkpoint files with a block's bytes, with targets in the block."""
    return tuple(
        replace(source, target=spec.offset + source.target)
        for spec, sources in zip(specs, stored, strict=True)
        for source in sources
    )


def chunk_size(dram: int) -> int:
    """Returns the bytes of one staging chunk for a DRAM budget: a power of two, 32 KiB to 4 MiB."""
    chunk = _MOST_CHUNK
    while chunk > _LEAST_CHUNK and chunk * _CHUNKS * 8 > dram:
        chunk //= 2
    return chunk


def staging_size(dram: int) -> int:
    """Returns how much of a DRAM budget the NVMe tier takes for its staging chunks."""
    return chunk_size(dram) * _CHUNKS


class HomeKeeper(Protocol):
    """Still needs the bytes that homes have now; see :mod:`tiermem.saving.later`."""

    def before_write(self, record: Record) -> None:
        """Called before a block's home is written or given up; the manager's lock is held."""
        ...

    def before_reuse(self, block_id: int, extent: Extent) -> None:
        """Called before a place that may have been a block's home is given to another block."""
        ...


class Homes:
    """Hands out home extents, all or none."""

    def __init__(
        self,
        dram: int,
        nvme: Sequence[str],
        nvme_bytes: int | None,
        device: torch.device,
        locks: PageLocks | None = None,
    ) -> None:
        """Opens the stores.

        Args:
            dram: Bytes of host memory, staging chunks included.
            nvme: Folders for swap files; none for no NVMe tier.
            nvme_bytes: Most bytes on disk, or None.
            device: The device for copies from and to DRAM. For a CUDA device, DRAM is page-locked
                as homes are reserved.
            locks: Locks pages; by default the one that fits ``device``.

        Raises:
            ConfigError: If a folder cannot be used.
            CapacityError: If DRAM cannot hold the staging chunks.
        """
        self.chunk = chunk_size(dram)
        staging = staging_size(dram) if nvme else 0
        if staging > dram:
            raise CapacityError(
                f"tier dram: with nvme= all that moves to and from files passes through "
                f"{format_size(staging)} of staging in DRAM, and the budget is {format_size(dram)}",
                f"give dram= at least {exact_size(staging)}; that is for the staging alone, and "
                "what policy= puts into DRAM comes on top (tier.wrap(model) says how much)",
            )
        self.bytes: dict[int, torch.Tensor] = {}
        self.packed: dict[int, int] = {}
        """Bytes of blocks whose homes in DRAM are stored packed, by the offset of the home
        (:mod:`tiermem.core.packedhome`). Code that reads such a home in host memory opens it first;
        code that overwrites all of it removes it from here."""
        self.unpack: Callable[[Extent], None] | None = None
        """Unpacks a home in place."""
        self._parts: dict[int, dict[tuple[int, int], torch.Tensor]] = {}
        # called before the home of a block is written; None if no component needs that
        self.keeper: HomeKeeper | None = None
        self.swap = SwapFile([Path(p) for p in nvme], nvme_bytes, self.chunk) if nvme else None
        self.sources: CheckpointStore | None = None
        """Checkpoint files in which blocks have their homes."""
        self.staging: torch.Tensor | None = None
        self._staging: list[Owned] = []
        try:
            self.arena = HostArena(
                Tier.DRAM, dram // 4096 * 4096, device=device, locks=locks, as_needed=True
            )
            self.dram = Allocator(self.arena.capacity)
            if staging:
                self._stage(self._allocated(staging))
        except BaseException:
            self.close()
            raise
        self.nvme_used = 0
        self.nvme_peak = 0
        self.reclaimers: list[Callable[[], bool]] = []
        """Each function frees space that is kept for later, and returns whether there was any."""
        self._reclaimed = 0  # how often that freed any space
        self.sparing: Callable[[], bool] = bool
        """Frees DRAM that only makes copies faster, for users of DRAM other than homes."""
        self.owners: list[Callable[[], Iterable[Owned]]] = []
        """Each function returns the space that its owner has from here. All owners except blocks
        and the reads ahead register one, as :meth:`repair` frees unowned space."""

    @property
    def files(self) -> FileStore | None:
        """All files that blocks are read from: the swap file's, then those of checkpoints."""
        if self.sources is None:
            return self.swap
        return JoinedFiles(self.swap, self.sources, FIRST_OFFSET)

    def open_sources(self) -> CheckpointStore:
        """Returns the store of checkpoint files; the first call creates it with its staging chunks.

        Raises:
            CapacityError: If DRAM has no room for the staging chunks.
        """
        if self.staging is None:
            nbytes = self.chunk * _CHUNKS
            extent = self._in_dram(nbytes)
            while extent is None and self._reclaim():
                extent = self._in_dram(nbytes)
            if extent is None:
                free = self.dram.capacity - self.dram.used
                raise CapacityError(
                    "tier dram: what is read from a checkpoint passes through "
                    f"{format_size(nbytes)} of staging in DRAM, and {format_size(free)} of "
                    f"{budget_size(self.dram.capacity)} are free",
                    f"give dram= at least {exact_size(self.dram.used + nbytes)}",
                )
            self._stage(extent)
        if self.sources is None:
            others = 0 if self.swap is None else len(self.swap.fds)
            self.sources = CheckpointStore(self.chunk, others)
        return self.sources

    def _allocated(self, nbytes: int) -> Extent:
        extent = self.dram.allocate(nbytes)
        if extent is None:
            raise InvariantError(f"an empty DRAM tier has no room for {nbytes} bytes of staging")
        return extent

    def _stage(self, extent: Extent) -> None:
        """Uses an extent of DRAM for the staging chunks."""
        try:
            self.arena.need([extent])
        except CapacityError:
            self.dram.free(extent)
            raise
        self.staging = self.arena.bytes_of(extent)
        self._staging = [(Tier.DRAM, extent)]

    @staticmethod
    def read_only(extent: Extent | None) -> bool:
        """Whether a home is in a checkpoint, which is never written."""
        return extent is not None and extent.offset >= FIRST_OFFSET

    def version(self, extent: Extent) -> int | None:
        """Returns a number that changes with every write of a home in a file.

        None if there are no such files.
        """
        files: FileStore | None = self.sources if self.read_only(extent) else self.swap
        return None if files is None else files.version(extent)

    def reserve(self, requests: Sequence[HomeRequest]) -> list[tuple[Tier, Extent | None]]:
        """Reserves a home for every request, or for none.

        If there is no room, space that other components only cache is freed first. If the free
        space is fragmented after that, the requests are placed again.

        Returns:
            Tier and extent per request; no extent if the home is HBM.

        Raises:
            CapacityError: If they do not all fit, naming the first block that does not, and
                the smallest budget that would be enough.
        """
        while True:
            before = self._reclaimed
            try:
                return self._reserve(requests)
            except CapacityError:
                self._reclaim()
                if self._reclaimed == before:
                    raise

    def _reclaim(self) -> bool:
        """Asks other components to free cached DRAM; returns whether any was freed."""
        given = [give_up() for give_up in self.reclaimers]  # call all of them
        self._reclaimed += any(given)
        return any(given)

    def _reserve(self, requests: Sequence[HomeRequest]) -> list[tuple[Tier, Extent | None]]:
        given: list[tuple[Tier, Extent | None]] = []
        try:
            tiers = self._choose(requests, given)
            in_swap = [
                request.stored is None and tier is Tier.NVME
                for request, tier in zip(requests, tiers, strict=True)
            ]
            below = sum(
                align_up(r.nbytes) for r, swap in zip(requests, in_swap, strict=True) if swap
            )
            if below and self.swap is not None:
                self.swap.grow(max(0, below - (self.swap.capacity - self.nvme_used)))
            for index, request in enumerate(requests):
                if in_swap[index]:
                    given[index] = (Tier.NVME, self._on_disk(request.nbytes))
            self.arena.need(extent for tier, extent in given if extent and tier is Tier.DRAM)
        except REFUSALS:  # after any other exception, repair() frees what is left
            for tier, extent in given:
                if extent is not None:
                    self.release(tier, extent)
            raise
        return given

    def bytes_of(self, extent: Extent) -> torch.Tensor:
        """Returns the bytes of a home in DRAM, 1-D uint8; cached, since every copy uses them."""
        found = self.bytes.get(extent.offset)
        if found is None:
            found = self.bytes[extent.offset] = self.arena.bytes_of(extent)
        return found

    def open(self, extent: Extent) -> None:
        """Unpacks a home in DRAM that is stored packed, so that the host can read its bytes.

        Copies to it are waited for first.
        """
        if extent.offset in self.packed and self.unpack is not None:
            self.unpack(extent)

    def opened(self, extent: Extent) -> torch.Tensor:
        """Returns the bytes of a home in DRAM for the host to read, 1-D uint8."""
        self.open(extent)
        return self.arena.bytes_of(extent)

    def part_of(self, extent: Extent, begin: int, nbytes: int) -> torch.Tensor:
        """Returns some bytes of a home in DRAM, 1-D uint8; cached as long as those of the home.

        Args:
            extent: The home.
            begin: Offset of the first byte in the home.
            nbytes: How many.
        """
        if self.packed:
            self.open(extent)
        parts = self._parts.setdefault(extent.offset, {})
        found = parts.get((begin, nbytes))
        if found is None:
            found = parts[begin, nbytes] = self.bytes_of(extent)[begin : begin + nbytes]
        return found

    def holds(self, tier: Tier, extent: Extent) -> bool:
        """Whether a home extent is handed out."""
        if tier is Tier.DRAM:
            return self.dram.holds(extent)
        if self.read_only(extent):
            return self.sources is not None and self.sources.holds(extent)
        return self.swap is not None and self.swap.holds(extent)

    def lend(self, nbytes: int, *, spare: bool = False) -> Extent | None:
        """Returns free DRAM for data other than homes; None if there is none.

        The caller gives it back with :meth:`release`.

        Args:
            nbytes: The size.
            spare: Whether nothing may be freed for it.
        """
        extent = self._in_dram(nbytes)
        if extent is None and not spare and self.sparing():
            extent = self._in_dram(nbytes)
        if extent is None:
            return None
        try:
            self.arena.need([extent])
        except CapacityError:
            self.dram.free(extent)
            return None
        return extent

    def lend_spare(self, nbytes: int) -> tuple[Extent, bool] | None:
        """Returns free DRAM that no device will access; None if there is none.

        Its pages are not locked, as locking delays users of the device. DRAM that is already locked
        is left to homes as far as possible.

        Returns:
            The extent, to be given back with :meth:`release`, and whether some of its pages may not
            be backed by memory yet.
        """
        unlocked = [(self.arena.locked, self.dram.capacity)]
        extent = self.dram.allocate_in(nbytes, unlocked) or self.dram.allocate(nbytes)
        return None if extent is None else (extent, self.arena.spare(extent))

    def release(self, tier: Tier, extent: Extent) -> None:
        """Gives a home extent back."""
        if tier is Tier.DRAM:
            self.bytes.pop(extent.offset, None)
            self._parts.pop(extent.offset, None)
            self.packed.pop(extent.offset, None)
            self.dram.free(extent)
        elif self.read_only(extent):
            if self.sources is not None:
                self.sources.forget(extent)
        elif tier is Tier.NVME and self.swap is not None:
            self.swap.free(extent)
            self.nvme_used -= extent.nbytes

    def repair(self, blocks: Iterable[Owned]) -> None:
        """Frees unowned space, which an exception left between taking and registering it.

        Args:
            blocks: The homes of all blocks.
        """
        found = {*self._staging, *blocks, *self.owned()}
        self.bytes.clear()
        self._parts.clear()
        in_dram = [extent for tier, extent in found if tier is Tier.DRAM]
        for offset in self.packed.keys() - {extent.offset for extent in in_dram}:
            del self.packed[offset]
        self.dram.rebuild(in_dram)
        in_files = [extent for tier, extent in found if tier is Tier.NVME]
        if self.sources is not None:
            self.sources.keep_only(extent for extent in in_files if self.read_only(extent))
        if self.swap is not None:
            on_disk = [extent for extent in in_files if not self.read_only(extent)]
            self.swap.keep_only(on_disk)
            self.nvme_used = sum(extent.nbytes for extent in on_disk)
        self.arena.need(())  # locks what an exception has left unlocked

    def owned(self) -> list[Owned]:
        """Returns the extents in use by all registered owners."""
        return [place for owner in self.owners for place in owner()]

    def close(self) -> None:
        """Closes the stores; the swap files are deleted."""
        for store in (self.swap, self.sources):
            if store is not None:
                store.close()
        if hasattr(self, "arena"):
            self.staging = None
            self.bytes.clear()
            self._parts.clear()
            self.arena.close()

    def forked(self) -> None:
        """Closes the parent's files in a forked child."""
        for store in (self.swap, self.sources):
            if store is not None:
                store.forked()

    def _choose(
        self, requests: Sequence[HomeRequest], given: list[tuple[Tier, Extent | None]]
    ) -> list[Tier]:
        """Decides the tier of each request and takes the DRAM ones."""
        tiers = []
        for request in requests:
            tier, extent = Tier.HBM, None
            if request.stored is not None:
                tier, extent = Tier.NVME, self._in_files(request, request.stored)
            elif request.home in ("dram", "auto"):
                tier, extent = Tier.DRAM, self._in_dram(request.nbytes)
                while extent is None and self._reclaim():
                    extent = self._in_dram(request.nbytes)
                if extent is None and request.home == "auto" and self.swap is not None:
                    tier = Tier.NVME
                elif extent is None:
                    raise self._no_dram(request, requests, given)
            elif request.home == "nvme":
                tier = Tier.NVME
                if self.swap is None:
                    raise CapacityError(
                        f"block {request.name!r} should live in tier nvme, and there is none; "
                        "give TierManager(nvme=folder)"
                    )
            tiers.append(tier)
            given.append((tier, extent))
        return tiers

    def _in_files(self, request: HomeRequest, ranges: tuple[SourceRange, ...]) -> Extent:
        if self.sources is None:
            raise InvariantError(f"block {request.name!r} lies in files that are not open")
        return self.sources.place(ranges, align_up(request.nbytes))

    def _in_dram(self, nbytes: int) -> Extent | None:
        return self.dram.allocate_in(nbytes, self.arena.parts) or self.dram.allocate(nbytes)

    def _no_dram(
        self,
        request: HomeRequest,
        requests: Sequence[HomeRequest],
        given: Sequence[tuple[Tier, Extent | None]],
    ) -> CapacityError:
        """Returns the error that names the DRAM needed for ``requests``; ``given`` have a place."""
        mine = sum(extent.nbytes for tier, extent in given if tier is Tier.DRAM and extent)
        asked = sum(align_up(r.nbytes) for r in requests if r.home in ("dram", "auto"))
        least = self.dram.used - mine + asked
        pieces = ""
        if least <= self.dram.capacity:
            pieces = " in pieces that are each too small"
            least = self.dram.capacity + align_up(request.nbytes)
        hint = "" if self.swap is not None else ", or give nvme=folder for what does not fit"
        if self.dram.used > mine:
            hint += UNUSED
        return CapacityError(
            f"block {request.name!r} ({format_size(request.nbytes)}) does not fit in tier dram: "
            f"{format_size(self.dram.capacity - self.dram.used)} of "
            f"{format_size(self.dram.capacity)} are free{pieces}",
            f"give dram= at least {exact_size(least)}",
            hint,
        )

    def _on_disk(self, nbytes: int) -> Extent:
        if self.swap is None:
            raise CapacityError("there is no NVMe tier")
        try:
            extent = self.swap.allocate(nbytes)
        except CapacityError:
            self.swap.grow(nbytes)  # free space was fragmented
            extent = self.swap.allocate(nbytes)
        self.nvme_used += extent.nbytes
        self.nvme_peak = max(self.nvme_peak, self.nvme_used)
        return extent
