"""Which blocks the host steps during backward, so that host, link and memory all stay busy."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn

from tiermem.core.block import Extent, Tier
from tiermem.optim.host.exact import Proven
from tiermem.optim.host.proof import step_exactly
from tiermem.optim.host.share import Speeds
from tiermem.optim.rules.casts import cast
from tiermem.optim.rules.plainstep import run_unseen
from tiermem.optim.rules.separable import Make, ready
from tiermem.storage.arena import HostArena

_CHUNK = 32 << 20
_CHUNKS = 4  # copies of host memory each way, more than caches hold
_COPIES = 96
_ROUNDS = 3
_PIECES = 4
_LATE = 1.1
"""A step may take its measured time times this factor before it is waited for."""
_BUSY = 1.15
"""A step's time while a model is trained, relative to that beside copies only: 1.11 to 1.2
on H100's hosts, with 8 threads on 16 cores (1.3 with 12)."""
_FORWARD = 0.25
"""Time of forward relative to backward for a block, with recomputation."""
_SLACK = 0.15
"""Fraction of backward by which a block shall be stepped before its next use. Gradients are copied
after earlier writes, and kernels are submitted ahead: a forward that waits for the host begins
with no kernels to run."""
_LITTLE = 64


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes per element in one backward and its step.

    Attributes:
        device: Over the link, both directions, if the device steps it: weights for
            recomputation, state and masters up; weights, state and masters down.
        passing: The same if the host steps it: weights up, gradients down.
        host: Host memory read and written by the host's step.
    """

    device: int
    passing: int
    host: int


@dataclass(frozen=True, slots=True)
class Rates(Speeds):
    """Seconds per element of everything that steps inside backward may have to wait for.

    Attributes:
        passing: Time of the link, for an element that the host steps.
        memory_device: Time of the host's memory, for one that the device steps.
        memory_host: Time of the host's memory, for one that the host steps.
        both_ways: Bytes per second of simultaneous copies up and down; None if not measured.
    """

    passing: float = 0.0
    memory_device: float = 0.0
    memory_host: float = 0.0
    both_ways: tuple[float, float] | None = None

    def seconds(self, share: float) -> float:
        """Returns the longest of these times, per element, if the host has that share."""
        rest = 1 - share
        return max(
            share * self.host,
            rest * self.device + share * self.passing,
            rest * self.memory_device + share * self.memory_host,
        )

    def best_share(self) -> float:
        """Returns the least share of the host with which steps take the least time.

        All three times are linear in the share, so their maximum is least at an end, or where two
        of them are equal.
        """
        lines = (
            (0.0, self.host),
            (self.device, self.passing),
            (self.memory_device, self.memory_host),
        )
        shares = [0.0, 1.0]
        for number, (begin, end) in enumerate(lines):
            for other_begin, other_end in lines[:number]:
                slope = (end - begin) - (other_end - other_begin)
                if slope:
                    shares.append((other_begin - begin) / slope)
        return min((s for s in shares if 0 <= s <= 1), key=lambda s: (self.seconds(s), s))


def spread(elements: Sequence[int], rates: Rates) -> list[bool]:
    """Divides blocks between host and device for steps inside backward.

    The host's are spread evenly over backward, so that neither side is ever idle, except
    for its end: blocks that the host, which steps one after another, would not finish before the
    next forward uses them are stepped on the device. That forward begins with just these blocks.

    Args:
        elements: Sizes of the blocks, in the order in which backward uses them.
        rates: Rates of the link, the host and its memory.

    Returns:
        For each block whether the host has it.
    """
    share = rates.best_share()
    # tiny blocks are not worth a place in the host's queue
    little = max(elements, default=0) // _LITTLE
    pace = rates.seconds(share)  # of backward, per element, if nothing else is slower
    total = sum(elements) * pace
    slack = total * _SLACK

    def end(count: int, begin: float) -> float:
        return begin + count * rates.host * _LATE

    def in_time(over: float, now: float) -> bool:
        return over + slack <= total + (total - now) * _FORWARD

    arrived = list(accumulate(count * pace for count in elements))
    early = [
        count > little and in_time(end(count, now), now)
        for count, now in zip(elements, arrived, strict=True)
    ]
    able = sum(n for n, is_early in zip(elements, early, strict=True) if is_early)
    density = min(1.0, share * sum(elements) / able) if able else 0.0
    credit = free = 0.0
    chosen = []
    for count, now, is_early in zip(elements, arrived, early, strict=True):
        credit += count * density if is_early else 0.0
        over = end(count, max(now, free))
        wanted = is_early and density > 0 and credit >= count / 2
        chosen.append(wanted and in_time(over, now))
        if chosen[-1]:
            credit, free = credit - count, over
    return chosen


def measure_both(
    host: Make,
    make: Make,
    device: torch.device,
    weight: torch.dtype,
    stepped: torch.dtype,
    traffic: Traffic,
    streams: Sequence[torch.cuda.Stream] = (),
    proven: Proven | None = None,
) -> Rates:
    """Measures host steps and copies both ways, separately and at the same time.

    The host's memory serves both. From its traffic while both run, its bandwidth is known, and
    the speed of steps under these conditions, which are those of training. On a GPU this takes
    about a second, and 256 MiB of page-locked and 1 GiB of other memory during that time.

    Args:
        host: Creates the host's optimizer.
        make: Creates the device's.
        device: The device of the latter.
        weight: Dtype of weights and gradients.
        stepped: Dtype of the stepped tensors.
        traffic: Bytes per element.
        streams: Two streams of a GPU, for the copies; nothing else is submitted to them meanwhile.
        proven: What host steps with the device's bits need; None for torch's CPU kernels.
    """
    cuda = device.type == "cuda"
    count = 1 << (24 if cuda else 18)
    few = count >> 2 if cuda else count
    # one after another, beyond the caches where it matters: some hold a whole piece with its state
    pieces = _PIECES if cuda else 1
    own = _Work(host, torch.device("cpu"), weight, stepped, count, pieces, proven)
    alone = min(_timed(own.step, None) for _ in range(_PIECES)) / count
    theirs = _Work(make, device, weight, stepped, few)
    compute = min(_timed(theirs.step, device) for _ in range(_ROUNDS)) / few
    if not cuda:
        return Rates(alone, compute)
    del theirs
    with _both_ways(device, streams) as copy:
        copy(1)
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        nbytes = copy(_COPIES)
        torch.cuda.synchronize(device)
        link = (time.perf_counter() - began) / nbytes
        both_ways = copy.rates()
        steps = 0
        began = time.perf_counter()
        nbytes = copy(2 * _COPIES)
        done = [torch.cuda.Event() for _ in copy.streams]
        for event, stream in zip(done, copy.streams, strict=True):
            event.record(stream)
        while not all(event.query() for event in done):
            own.step()
            steps += 1
        torch.cuda.synchronize(device)
        both = time.perf_counter() - began
        memory = both / (nbytes + steps * count * traffic.host)
    return Rates(
        host=_BUSY * (max(alone, both / (steps * count)) if steps else alone),
        device=max(compute, link * traffic.device),
        passing=link * traffic.passing,
        memory_device=memory * traffic.device,
        memory_host=memory * (traffic.passing + traffic.host),
        both_ways=both_ways,
    )


class _Work:
    """Steps of tensors in turn, with their casts."""

    def __init__(
        self,
        make: Make,
        device: torch.device,
        weight: torch.dtype,
        stepped: torch.dtype,
        count: int,
        pieces: int = 1,
        proven: Proven | None = None,
    ) -> None:
        self._proven = proven
        self._gradient = torch.zeros(count, dtype=weight, device=device)
        self._target = torch.empty_like(self._gradient)
        params = [
            nn.Parameter(torch.zeros(count, dtype=stepped, device=device)) for _ in range(pieces)
        ]
        self._pieces = deque((param, ready(make([{"params": [param]}]))) for param in params)
        for _ in params:
            self.step()  # this creates its state

    def step(self) -> None:
        """Performs one step."""
        param, optimizer = self._pieces[0]
        self._pieces.rotate()
        with torch.no_grad():
            if self._proven is not None:
                step_exactly(optimizer, param, self._gradient, self._target, self._proven)
                return
            if param.device.type == "cpu":
                param.grad = cast([self._gradient], [param.dtype])[0]
            else:
                param.grad = self._gradient.to(param.dtype)
            run_unseen(optimizer)
            self._target.copy_(param)


def _timed(work: Callable[[], None], device: torch.device | None) -> float:
    cuda = device is not None and device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if cuda:
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


class _BothWays:
    """Copies between page-locked memory and a GPU, up and down at once."""

    def __init__(
        self, device: torch.device, streams: Sequence[torch.cuda.Stream], arena: HostArena
    ) -> None:
        self.streams = streams
        parts = [arena.bytes_of(Extent(n * _CHUNK, _CHUNK)) for n in range(2 * _CHUNKS)]
        self._sources, self._targets = parts[:_CHUNKS], parts[_CHUNKS:]
        self._above = [torch.zeros(_CHUNK, dtype=torch.uint8, device=device) for _ in range(2)]
        self._stamps: list[list[torch.cuda.Event]] = []

    def __call__(self, copies: int) -> int:
        """Submits a number of copies each way; returns their bytes, both ways together."""
        self._stamps = [[self._stamp(stream)] for stream in self.streams]
        for number in range(copies):
            with torch.cuda.stream(self.streams[0]):
                self._above[0].copy_(self._sources[number % _CHUNKS], non_blocking=True)
            with torch.cuda.stream(self.streams[1]):
                self._targets[number % _CHUNKS].copy_(self._above[1], non_blocking=True)
            for stamps, stream in zip(self._stamps, self.streams, strict=True):
                stamps.append(self._stamp(stream))
        return 2 * copies * _CHUNK

    def rates(self) -> tuple[float, float]:
        """Returns the bytes per second up and down of the last copies, which have ended.

        Measured until one direction has ended: after that the other one is faster.
        """
        ends = [[began.elapsed_time(end) / 1e3 for end in ends] for began, *ends in self._stamps]
        both = min(max(own) for own in ends)
        up, down = (max(1, sum(end <= both for end in own)) * _CHUNK / both for own in ends)
        return up, down

    @staticmethod
    def _stamp(stream: torch.cuda.Stream) -> torch.cuda.Event:
        stamp = torch.cuda.Event(enable_timing=True)
        stamp.record(stream)
        return stamp


@contextmanager
def _both_ways(device: torch.device, streams: Sequence[torch.cuda.Stream]) -> Iterator[_BothWays]:
    arena = HostArena(Tier.DRAM, 2 * _CHUNKS * _CHUNK, device=device)
    try:
        yield _BothWays(device, streams, arena)
    finally:
        torch.cuda.synchronize(device)
        arena.close()
