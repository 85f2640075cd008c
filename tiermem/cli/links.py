"""Measuring copies in memory: within the host, over the bus, within the device.

The host's end is the page-locked arena that tiermem streams from, the device's end
an arena of HBM (host memory where there is no GPU), and copies go on the streams of
the copy engine. ``tiermem bench`` and benchmarks/bench_links.py both use it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType

import torch

from tiermem.cli.measured import Measurement, rounds
from tiermem.core.block import Extent, Tier
from tiermem.storage.arena import Arena, DeviceArena, HostArena
from tiermem.transfer.copy import host_copy
from tiermem.transfer.streams import CudaCopyEngine

SIZES = tuple(1 << bits for bits in (16, 18, 20, 22, 24, 26, 28, 30))
"""Sizes of one copy, 64 KiB to 1 GiB."""

_MOST_COPIES = 64
_BATCH_NBYTES = 256 << 20
_SLEEP_CYCLES = 60_000

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
Lane = tuple[torch.cuda.Stream | None, Pairs]


class MemoryLinks:
    """Memory at both ends of the bus. A context manager, which gives it back.

    Args:
        device: ``"cpu"`` or a CUDA device.
        nbytes: Bytes of the largest copy; twice that is taken at each end.
        pageable: Whether the host's end is ordinary memory instead of the arena.
    """

    def __init__(self, device: str, nbytes: int, *, pageable: bool = False) -> None:
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        self.nbytes = nbytes
        self.pageable = pageable
        engine = CudaCopyEngine(self.device) if self.cuda else None
        self._up = None if engine is None else engine.up_stream
        self._down = None if engine is None else engine.down_stream
        self._cursor = 0
        self._arenas: list[Arena] = []
        try:
            self.low = self._host(pageable)
            self.high = self._high()
        except BaseException:
            self.close()
            raise
        self.low.fill_(1)  # untouched pages would all be one page of zeros
        self.high.fill_(1)

    def _host(self, pageable: bool) -> torch.Tensor:
        if pageable:
            return torch.empty(2 * self.nbytes, dtype=torch.uint8)
        return self._keep(HostArena(Tier.DRAM, 2 * self.nbytes, device=self.device))

    def _high(self) -> torch.Tensor:
        if self.cuda:
            return self._keep(DeviceArena(2 * self.nbytes, self.device))
        return self._keep(HostArena(Tier.HBM, 2 * self.nbytes))

    def _keep(self, arena: Arena) -> torch.Tensor:
        self._arenas.append(arena)
        return arena.bytes_of(Extent(0, 2 * self.nbytes))

    def __enter__(self) -> MemoryLinks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives the memory back."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
        self.low = self.high = torch.empty(0, dtype=torch.uint8)
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()

    def up(self, nbytes: int) -> float:
        """Returns the seconds of one copy of that size to the device."""
        pairs = self._pairs(self.high, self.low, nbytes)
        return self._seconds((self._up, pairs)) / len(pairs)

    def down(self, nbytes: int) -> float:
        """Returns the seconds of one copy of that size from the device."""
        pairs = self._pairs(self.low, self.high, nbytes)
        return self._seconds((self._down, pairs)) / len(pairs)

    def both(self, nbytes: int) -> float:
        """Returns the seconds of a copy up and a copy down at once, of that size each.

        Up goes from the first half of host memory, down to the second.
        """
        half = self.nbytes
        ups = self._pairs(self.high[:half], self.low[:half], nbytes)
        downs = self._pairs(self.low[half:], self.high[half:], nbytes)
        return self._seconds((self._up, ups), (self._down, downs)) / len(ups)

    def within_device(self, nbytes: int) -> float:
        """Returns the seconds of one copy of that size within the device."""
        half = self.nbytes
        pairs = self._pairs(self.high[:half], self.high[half:], nbytes)
        stream = torch.cuda.current_stream(self.device) if self.cuda else None
        return self._seconds((stream, pairs)) / len(pairs)

    def within_host(self, nbytes: int) -> float:
        """Returns the seconds of one copy of that size within host memory."""
        half = self.nbytes
        pairs = self._pairs(self.low[:half], self.low[half:], nbytes)
        return _in_line(pairs) / len(pairs)

    def measure(
        self, sizes: Sequence[int], repeats: int, until: float | None = None
    ) -> list[Measurement]:
        """Measures every link at every size.

        Args:
            sizes: Bytes of one copy; those above ``nbytes`` are left out.
            repeats: Rounds per size; the median counts.
            until: See :func:`tiermem.cli.measured.rounds`.
        """
        how = "pageable" if self.pageable else "page-locked" if self.cuda else "host memory"
        found = []
        for size in sizes:
            if size > self.nbytes:
                continue
            links = self._links(size)
            for link, seconds in rounds(links, repeats, until).items():
                nbytes = 2 * size if "<->" in link else size
                kind = how if "dram" in link else "in place"
                measured = Measurement.of(link, kind, nbytes, seconds)
                found.append(measured)
        return found

    def _links(self, size: int) -> dict[str, Callable[[], float]]:
        links = {"dram->hbm": partial(self.up, size), "hbm->dram": partial(self.down, size)}
        if self.cuda and not self.pageable:
            links["dram<->hbm"] = partial(self.both, size)
            links["hbm->hbm"] = partial(self.within_device, size)
        if not self.pageable:
            links["dram->dram"] = partial(self.within_host, size)
        return dict(links)

    def _pairs(self, target: torch.Tensor, source: torch.Tensor, nbytes: int) -> Pairs:
        """Returns places for a batch of copies, other ones each time, past the caches."""
        room = min(target.numel(), source.numel()) // nbytes
        count = max(1, min(_MOST_COPIES, room, _BATCH_NBYTES // nbytes))
        starts = [(self._cursor + index) % room * nbytes for index in range(count)]
        self._cursor += count
        return [(target[s : s + nbytes], source[s : s + nbytes]) for s in starts]

    def _seconds(self, *lanes: Lane) -> float:
        if not self.cuda:
            return sum(_in_line(pairs) for _, pairs in lanes)
        return self._on_streams(lanes)

    def _on_streams(self, lanes: Sequence[Lane]) -> float:
        """Times copies by events.

        The first stream is held back until everything is submitted, so that small
        copies are timed by the link and not by how fast Python submits them.
        """
        torch.cuda.synchronize(self.device)
        begin = torch.cuda.Event(enable_timing=True)
        ends = [torch.cuda.Event(enable_timing=True) for _ in lanes]
        first = lanes[0][0]
        with torch.cuda.stream(first):
            hold = getattr(torch.cuda, "_sleep", None)
            if hold is not None and not self.pageable:
                hold(_SLEEP_CYCLES * sum(len(pairs) for _, pairs in lanes))
            begin.record()
        for (stream, pairs), end in zip(lanes, ends, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda.current_stream(self.device).wait_event(begin)
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
                end.record()
        torch.cuda.synchronize(self.device)
        return float(max(begin.elapsed_time(end) for end in ends)) / 1e3


def _in_line(pairs: Pairs) -> float:
    """Times plain copies of host memory."""
    begin = time.perf_counter()
    for target, source in pairs:
        host_copy(target, source)
    return time.perf_counter() - begin
