"""Measuring the disks: from a swap file to the device and back, through the file mover.

That is the way a block takes: in chunks, through page-locked staging, checksums on.
``tiermem bench`` and benchmarks/bench_links.py both use it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType

import torch

from tiermem.cli.measured import Measurement, rounds
from tiermem.core.block import Extent, Tier, align_up
from tiermem.io.probe import choose_engine
from tiermem.storage.arena import Arena, DeviceArena, HostArena
from tiermem.storage.swapfile import SwapFile
from tiermem.transfer.file.mover import FileMover, FileTransfer, HostCopier
from tiermem.transfer.streams import CudaChunkCopier, CudaCopyEngine

CHUNKS = (1 << 20, 4 << 20, 8 << 20)
"""Bytes of a request that are worth trying."""
DEPTHS = (1, 4, 8, 16)
"""Requests in flight that are worth trying."""

_RUNS = 16
_PATTERN_NBYTES = 4 << 20
_AS_GOOD = 0.97


class DiskLinks:
    """A swap file that has been written once, and memory for what it holds.

    Args:
        folders: One file in each, striped.
        device: ``"cpu"`` or a CUDA device.
        nbytes: Bytes of the file, and of the memory.
        chunk: Bytes of a request.
        most_depth: Most requests in flight there will be.
    """

    def __init__(
        self, folders: Sequence[str], device: str, nbytes: int, chunk: int, most_depth: int
    ) -> None:
        self.nbytes = align_up(nbytes)
        self.chunk = min(chunk, self.nbytes)
        self._device = torch.device(device)
        self._cuda = self._device.type == "cuda"
        self._engine = CudaCopyEngine(self._device) if self._cuda else None
        self._arenas: list[Arena] = []
        self.store = SwapFile([Path(folder) for folder in folders], None, self.chunk)
        try:
            self._fill(most_depth)
        except BaseException:
            self.close()
            raise

    def _fill(self, most_depth: int) -> None:
        self.store.grow(self.nbytes)
        run = align_up(max(self.chunk, self.nbytes // _RUNS))
        self._extents = [
            self.store.allocate(min(run, self.nbytes - offset))
            for offset in range(0, self.nbytes, run)
        ]
        staging = HostArena(Tier.DRAM, most_depth * self.chunk, device=self._device)
        self._staging = self._keep(staging)
        if self._cuda:
            self._memory = self._keep(DeviceArena(self.nbytes, self._device))
        else:
            self._memory = self._keep(HostArena(Tier.HBM, self.nbytes))
        # Disks and what is below them may treat bytes that repeat better than a model's.
        pattern = torch.randint(256, (min(_PATTERN_NBYTES, self.nbytes),), dtype=torch.uint8)
        for offset in range(0, self.nbytes, pattern.numel()):
            part = self._memory[offset : offset + pattern.numel()]
            part.copy_(pattern[: part.numel()])
        if self._cuda:
            torch.cuda.synchronize(self._device)
        self.warm = False

    def _keep(self, arena: Arena) -> torch.Tensor:
        self._arenas.append(arena)
        return arena.bytes_of(Extent(0, arena.capacity))

    def __enter__(self) -> DiskLinks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def synchronize(self) -> None:
        """Waits for the copies to the device."""
        if self._engine is not None:
            self._engine.synchronize()

    def close(self) -> None:
        """Gives the file and the memory back."""
        self._memory = self._staging = torch.empty(0, dtype=torch.uint8)
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()
        self.store.close()

    @contextmanager
    def mover(self, depth: int, engine: str | None = None) -> Iterator[DiskWork]:
        """Runs a file mover that has so many requests in flight.

        Args:
            depth: At most ``most_depth``.
            engine: ``"uring"``, ``"threads"``, or the machine's best by default.
        """
        factory, name, _ = choose_engine(engine)
        staging = self._staging[: depth * self.chunk]
        copier = HostCopier() if self._engine is None else CudaChunkCopier(self._engine)
        with FileMover(self.store, factory, staging, self.chunk, copier) as mover:
            work = DiskWork(mover, self._extents, self._memory, name, depth, self)
            if not self.warm:
                work.write()  # the first write, to fresh blocks, is slower
                self.warm = True
            yield work


class DiskWork:
    """What a file mover can be timed at; each call returns seconds."""

    def __init__(
        self,
        mover: FileMover,
        extents: Sequence[Extent],
        memory: torch.Tensor,
        engine: str,
        depth: int,
        links: DiskLinks,
    ) -> None:
        """Pairs every extent with its place in memory."""
        self._mover = mover
        self._pairs = [(e, memory[e.offset : e.end]) for e in extents]
        self._engine, self._depth, self._links = engine, depth, links

    def read(self) -> float:
        """Reads the whole file."""
        return self._timed(self._pairs, [])

    def write(self) -> float:
        """Writes the whole file."""
        return self._timed([], self._pairs)

    def both(self) -> float:
        """Reads one half of the file while it writes the other."""
        return self._timed(self._pairs[::2], self._pairs[1::2])

    def measure(
        self, repeats: int, until: float | None = None, *, mixed: bool = False
    ) -> list[Measurement]:
        """Measures reading, writing and, on demand, both at once.

        Args:
            repeats: Rounds; the median counts.
            until: See :func:`tiermem.cli.measured.rounds`.
            mixed: Whether to measure both at once as well.
        """
        calls: dict[str, Callable[[], float]] = {"nvme->hbm": self.read, "hbm->nvme": self.write}
        if mixed:
            calls["nvme<->hbm"] = self.both
        store = self._links.store
        note = f"{'O_DIRECT' if store.direct else 'page cache'}, checksums"
        make = partial(Measurement.of, chunk=self._links.chunk, depth=self._depth, note=note)
        return [
            make(link, f"mover, {self._engine}", self._links.nbytes, seconds)
            for link, seconds in rounds(calls, repeats, until).items()
        ]

    def _timed(
        self,
        reads: Sequence[tuple[Extent, torch.Tensor]],
        writes: Sequence[tuple[Extent, torch.Tensor]],
    ) -> float:
        begin = time.perf_counter()
        transfers: list[FileTransfer] = []
        for extent, memory in writes:
            transfers.append(self._mover.write(extent, memory, label="bench"))
        for extent, memory in reads:
            transfers.append(self._mover.read(extent, memory, label="bench"))
        for transfer in transfers:
            self._mover.wait(transfer)
        self._links.synchronize()  # a read has ended when its last copy has been submitted
        seconds = time.perf_counter() - begin
        self._mover.poll()
        for transfer in transfers:
            if transfer.error is not None:
                raise transfer.error
        return seconds


def sweep(
    folders: Sequence[str],
    device: str,
    nbytes: int,
    repeats: int,
    *,
    chunks: Sequence[int] = CHUNKS,
    depths: Sequence[int] = DEPTHS,
    engine: str | None = None,
    until: float | None = None,
) -> list[Measurement]:
    """Measures reading and writing for every chunk and depth.

    Args:
        folders: One file in each, striped.
        device: ``"cpu"`` or a CUDA device.
        nbytes: Bytes of the file.
        repeats: Rounds; the median counts.
        chunks: Bytes of a request.
        depths: Requests in flight.
        engine: ``"uring"``, ``"threads"``, or the machine's best by default.
        until: ``time.perf_counter()`` after which nothing further is tried; the first
            chunk and depth always are.
    """
    found: list[Measurement] = []
    for chunk in dict.fromkeys(min(chunk, align_up(nbytes)) for chunk in chunks):
        if found and until is not None and time.perf_counter() > until:
            break
        with DiskLinks(folders, device, nbytes, chunk, max(depths)) as links:
            for depth in depths:
                if found and until is not None and time.perf_counter() > until:
                    break
                with links.mover(depth, engine) as work:
                    found += work.measure(repeats, until)
    return found


def best(measured: Sequence[Measurement]) -> Measurement:
    """Returns the read with the least staging among those as fast as the fastest (3%)."""
    reads = [m for m in measured if m.link == "nvme->hbm"]
    fastest = max(m.bytes_per_s for m in reads)
    good = [m for m in reads if m.bytes_per_s >= _AS_GOOD * fastest]
    return min(good, key=lambda m: (m.chunk * m.depth, m.chunk))


def measure_best(
    tried: Sequence[Measurement],
    folders: Sequence[str],
    device: str,
    nbytes: int,
    repeats: int,
    until: float | None = None,
) -> list[Measurement]:
    """Measures reading, writing and both at once with the best chunk and depth of a sweep.

    Args:
        tried: What :func:`sweep` found.
        folders: One file in each, striped.
        device: ``"cpu"`` or a CUDA device.
        nbytes: Bytes of the file.
        repeats: Rounds; the median counts.
        until: See :func:`tiermem.cli.measured.rounds`.
    """
    chosen = best(tried)
    with DiskLinks(folders, device, nbytes, chosen.chunk, chosen.depth) as links:
        with links.mover(chosen.depth) as work:
            return work.measure(repeats, until, mixed=True)
