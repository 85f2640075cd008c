"""A GPU, its bus and a disk in virtual time: how long a streamed pass takes, on any machine.

No bytes move and no thread runs. The planner, the prefetcher and the read-ahead are the real
ones; what they ask for takes as long as the speeds given here say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

from tiermem.config import Policy, Settings
from tiermem.core.block import Block, Extent, Role
from tiermem.core.layout import TensorShape
from tiermem.core.pace import Estimates
from tiermem.core.residency import State
from tiermem.runtime.manager import BlockManager
from tiermem.testing.io import ScriptedEngine
from tiermem.transfer.file.jobs import FileTransfer

PAGE = 4096
STAGING = 16 * (32 << 10)
_WARM = 3


@dataclass(frozen=True)
class Machine:
    """Bytes and seconds; by default a GPU of which one page here stands for 6 MiB there.

    Attributes:
        straight: Bytes per second of the disk into staging chunks.
        in_place: The same into ever other host memory.
        bus: Bytes per second of a copy up.
        chunk: Bytes of a staging chunk.
        chunks: How many there are.
        host: Seconds of the host per use.
        pause: The same between two passes.
        ramp: Seconds that an idle disk takes longer for the first piece.
        jitter: By how much of itself a block's reading time may differ, either way.
    """

    straight: float = 4.8e9 / 1536
    in_place: float = 4.4e9 / 1536
    bus: float = 55e9 / 1536
    chunk: int = (4 << 20) // 1536
    chunks: int = 16
    host: float = 60e-6
    pause: float = 1e-3
    ramp: float = 3e-3
    jitter: float = 0.0


class Event:
    """A point in virtual time."""

    waiter = -1

    def __init__(self, world: World, at: float) -> None:
        self.world, self.at = world, at

    def done(self) -> bool:
        return self.at <= self.world.now

    def synchronize(self) -> None:
        self.world.advance(self.at)


@dataclass(eq=False)
class _Job:
    transfer: FileTransfer
    left: int
    urgent: bool
    slower: float
    after: float
    ends: float = 0.0
    parked: bool = False
    held: list[int] = field(default_factory=list)


class World:
    """The host's clock, the streams of a device, and a disk that does one piece at a time.

    Attributes:
        now: Of the host, seconds.
        compute: When all compute submitted so far is over.
        rising: The same of the copies up.
        read: Bytes read from the disk.
        busy: Seconds that it was busy.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.now = self.compute = self.rising = 0.0
        self.read = 0
        self.busy = 0.0
        self._disk = self._landed = 0.0
        self._random = Random(0)
        self._jobs: list[_Job] = []
        self._parked: list[_Job] = []
        self._taken: deque[float] = deque()
        self.finished: list[FileTransfer] = []
        self._landing: list[_Job] = []

    # -- the device ------------------------------------------------------

    def kernel(self, seconds: float) -> None:
        """Submits compute."""
        self.compute = max(self.compute, self.now) + seconds

    def copy(self, nbytes: int, *, submitted: float) -> float:
        """Submits a copy up; returns when it is over."""
        self.rising = max(self.rising, submitted) + nbytes / self.machine.bus
        return self.rising

    # -- time ------------------------------------------------------------

    def advance(self, until: float) -> None:
        """Moves the host's clock, and the disk along."""
        self._work(until)
        self.now = max(self.now, until)
        self._land()

    def wait(self, transfers: Sequence[FileTransfer]) -> None:
        """Moves the clock to where one of some transfers has finished."""
        while not any(transfer.finished for transfer in transfers):
            times = [job.ends for job in self._landing if job.transfer in transfers]
            following = self._next()
            if times and (following is None or min(times) <= following):
                self.advance(min(times))
            else:
                assert following is not None, "it waits for what never comes"
                self.advance(following)

    # -- the disk --------------------------------------------------------

    def ask(self, transfer: FileTransfer, after: Sequence[Event], parked: bool = False) -> _Job:
        """Starts a read of the disk."""
        transfer.submitted_ns = int(self.now * 1e9)
        if not self._jobs and self.now > self._disk:
            self._disk = self.now + self.machine.ramp
        slower = 1.0 + self.machine.jitter * self._random.uniform(-1.0, 1.0)
        guarded = max((event.at for event in after), default=0.0)
        job = _Job(transfer, transfer.nbytes, transfer.urgent, slower, guarded, parked=parked)
        self._jobs.append(job)
        return job

    def land(self, transfer: FileTransfer, urgent: bool, after: Sequence[Event]) -> None:
        """Says where a read goes that has no place yet."""
        job = next(job for job in [*self._jobs, *self._parked] if job.transfer is transfer)
        job.parked, job.urgent = False, urgent
        job.after = max((event.at for event in after), default=0.0)
        for nbytes in job.held:
            self._copy_on(job, nbytes, self.now)
        job.held.clear()
        if job in self._parked:
            self._parked.remove(job)
            job.ends = self.now
            self._landing.append(job)

    def rest(self, transfer: FileTransfer) -> None:
        """Moves the clock to where a read can go no further without a place."""
        while any(j.transfer is transfer and len(j.held) < self._most_held for j in self._jobs):
            following = self._next()
            assert following is not None
            self.advance(following)

    @property
    def _most_held(self) -> int:
        return self.machine.chunks // 2

    def _copy_on(self, job: _Job, nbytes: int, now: float) -> None:
        self._landed = max(self._landed, now, job.after) + nbytes / self.machine.bus
        job.transfer.event = Event(self, self._landed)
        self._taken.append(self._landed)

    def hurry(self, transfer: FileTransfer) -> None:
        """Makes the rest of a read urgent."""
        for job in self._jobs:
            job.urgent |= job.transfer is transfer

    def cancel(self, transfer: FileTransfer) -> None:
        """Cancels the parts of a read that have not begun."""
        for job in [j for j in [*self._jobs, *self._parked] if j.transfer is transfer]:
            (self._jobs if job in self._jobs else self._parked).remove(job)
            job.ends = max(self.now, self._disk)
            self._landing.append(job)

    def _front(self) -> _Job | None:
        parts = [job for job in self._jobs if not job.parked or len(job.held) < self._most_held]
        return min(parts, key=lambda job: (not job.urgent, job.parked), default=None)

    def _piece(self, job: _Job) -> tuple[int, float, float]:
        """Returns the bytes of the next piece, when it begins and when it is there."""
        machine = self.machine
        nbytes = min(machine.chunk, job.left)
        begin = self._disk
        held = sum(len(job.held) for job in [*self._jobs, *self._parked])
        if len(self._taken) + held >= machine.chunks:
            begin = max(begin, self._taken[0])
        rate = machine.in_place if job.transfer.in_place else machine.straight
        return nbytes, begin, begin + nbytes / rate * job.slower

    def _next(self) -> float | None:
        front = self._front()
        return None if front is None else self._piece(front)[2]

    def _work(self, until: float) -> None:
        while (job := self._front()) is not None:
            nbytes, begin, end = self._piece(job)
            if end > until:
                return
            while self._taken and self._taken[0] <= begin:
                self._taken.popleft()
            if not job.transfer.started_ns:
                job.transfer.started_ns = int(begin * 1e9)
            self._disk = job.ends = end
            self.busy += end - begin
            self.read += nbytes
            if job.parked:
                job.held.append(nbytes)
            elif not job.transfer.in_place:
                self._copy_on(job, nbytes, end)
            job.left -= nbytes
            if not job.left:
                self._jobs.remove(job)
                (self._parked if job.parked else self._landing).append(job)

    def _land(self) -> None:
        for job in [job for job in self._landing if job.ends <= self.now]:
            self._landing.remove(job)
            job.transfer.finished_ns = int(job.ends * 1e9)
            job.transfer.finished = True
            self.finished.append(job.transfer)


class Copies:
    """The copy engine of a :class:`World`."""

    def __init__(self, world: World) -> None:
        self.world = world

    def up(
        self,
        target: Any,
        source: Any,
        extent: Extent,
        after: Any,
        again: Any = None,
        *,
        copied: bool = False,
    ) -> Event:
        self.world.rising = max(self.world.rising, self.world.compute)
        return Event(self.world, self.world.copy(extent.nbytes, submitted=self.world.now))

    def risen(self) -> Event:
        return Event(self.world, self.world.rising)

    def guards(self, extent: Extent) -> tuple[Event, ...]:
        return (Event(self.world, self.world.compute),)

    def landed(self, extent: Extent, event: Event) -> None:
        pass

    def use(self, event: Event | None) -> None:
        if event is not None:
            self.world.compute = max(self.world.compute, event.at)

    def hold_up(self, stream: int, event: Event) -> None:
        self.use(event)

    def wait(self, event: Event | None) -> None:
        if event is not None:
            event.synchronize()

    def synchronize(self) -> None:
        self.world.advance(max(self.world.compute, self.world.rising))

    def capturing(self) -> bool:
        return False

    def stream(self) -> int:
        return 0


class HostBus(Copies):
    """Copies whose submission takes the host so many seconds; bytes are counted."""

    def __init__(self, world: World, seconds: float) -> None:
        super().__init__(world)
        self.seconds, self.nbytes = seconds, 0

    def up(self, target: Any, source: Any, extent: Extent, *rest: Any, **options: Any) -> Event:
        self.world.advance(self.world.now + self.seconds)
        self.nbytes += extent.nbytes
        self.world.rising = max(self.world.rising, self.world.now)
        return super().up(target, source, extent, *rest, **options)

    def claim(self, extent: Extent) -> None:
        pass


class Clock:
    """Stamps of a :class:`World`: points in virtual time."""

    def __init__(self, world: World) -> None:
        self.world = world

    def stamp(self) -> float:
        return max(self.world.now, self.world.compute)

    def stamp_copies(self, extent: Extent | None, after: Any) -> float:
        if extent is not None:
            self.world.rising = max(self.world.rising, self.world.compute)
        return max(self.world.now, self.world.rising)

    def passed(self, stamp: float) -> bool:
        return stamp <= self.world.now

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def free(self, stamp: float) -> None:
        pass

    def usable(self) -> bool:
        return True

    def host(self) -> float:
        return self.world.now

    def prepare(self, stamps: int) -> None:
        pass


class Mover:
    """The file mover of a :class:`World`; writes take no time."""

    parks = True

    def __init__(self, world: World) -> None:
        self.world = world

    def read(self, extent: Extent, target: Any, **settings: Any) -> FileTransfer:
        after = settings.pop("after", ())
        transfer = FileTransfer(
            extent, is_read=True, **({"urgent": False, "in_place": False} | settings)
        )
        self.world.ask(transfer, after)
        return transfer

    def park(self, extent: Extent, *, label: str) -> FileTransfer:
        transfer = FileTransfer(extent, is_read=True, urgent=False, in_place=False, label=label)
        self.world.ask(transfer, (), parked=True)
        return transfer

    def land(
        self, transfer: FileTransfer, target: Any, *, urgent: bool, after: Sequence[Event]
    ) -> FileTransfer:
        self.world.advance(self.world.now)
        self.world.land(transfer, urgent, after)
        return transfer

    def rest(self, transfer: FileTransfer) -> None:
        self.world.rest(transfer)

    def write(self, extent: Extent, source: Any, *, label: str) -> FileTransfer:
        transfer = FileTransfer(extent, is_read=False, label=label, urgent=False)
        transfer.finished = True
        return transfer

    def poll(self) -> list[FileTransfer]:
        self.world.advance(self.world.now)
        found, self.world.finished = self.world.finished, []
        return found

    def wait(self, transfer: FileTransfer, *, hurry: bool = True) -> None:
        if hurry:
            self.world.hurry(transfer)
        self.world.wait([transfer])

    def wait_any(self, transfers: Sequence[FileTransfer]) -> None:
        self.world.wait(transfers)

    def cancel(self, transfer: FileTransfer) -> None:
        self.world.cancel(transfer)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Took:
    """What a few passes in a row took, each.

    Attributes:
        seconds: Of one.
        compute: Its compute alone.
        nbytes: Bytes read from the disk.
        raw: Seconds that the disk needs for them.
    """

    seconds: float
    compute: float
    nbytes: float
    raw: float

    @property
    def of_bound(self) -> float:
        return max(self.compute, self.raw) / self.seconds


class Streamed:
    """A manager in virtual time whose blocks are used in a loop.

    Args:
        manager: The manager.
        world: The time.
        pages: Of each block.
    """

    def __init__(self, manager: BlockManager, world: World, pages: Sequence[int]) -> None:
        self.manager, self.world = manager, world
        wanted = [(f"b{i}", *self.shape(n)) for i, n in enumerate(pages)]
        self.blocks: list[Block] = manager.add_blocks(wanted, home="nvme")
        for block in self.blocks:
            record = manager.record(block)
            record.defined, record.at_home = True, State.VALID

    def shape(self, pages: int) -> tuple[Role, list[TensorShape]]:
        """Returns the role and the tensors of a block of so many pages."""
        return Role.PARAM, [TensorShape("t", (pages * PAGE,), (1,), torch.uint8, 1)]

    def sweep(self, key: str, uses: Sequence[tuple[int, float]]) -> None:
        """Runs one pass.

        Args:
            key: Its name.
            uses: Number of the block and seconds of compute.
        """
        manager, world, machine = self.manager, self.world, self.world.machine
        world.advance(world.now + machine.pause)
        manager.begin_pass(key)
        for number, seconds in uses:
            world.advance(world.now + machine.host)
            block = self.blocks[number]
            manager.acquire(block)
            world.kernel(seconds)
            manager.release(block)
        manager.end_pass()

    def rounds(self, passes: Sequence[tuple[str, Sequence[tuple[int, float]]]], n: int) -> Took:
        """Runs a loop of passes, and waits for its end."""
        world = self.world
        self.settle()
        began, read = world.now, world.read
        for _ in range(n):
            for key, uses in passes:
                self.sweep(key, uses)
        self.settle()
        nbytes = (world.read - read) / n
        compute = sum(seconds for _, uses in passes for _, seconds in uses)
        return Took((world.now - began) / n, compute, nbytes, nbytes / world.machine.straight)

    def warm(self, passes: Sequence[tuple[str, Sequence[tuple[int, float]]]]) -> None:
        """Runs a loop until it is known; now and then the host looks at its results."""
        for _ in range(_WARM):
            self.rounds(passes, 4)

    def settle(self) -> None:
        """Waits for everything under way."""
        self.manager.parts.copy.synchronize()
        self.manager.flush()


@contextmanager
def streamed(
    folder: Path, pages: Sequence[int], *, hbm: int, dram: int, machine: Machine | None = None
) -> Iterator[Streamed]:
    """Opens a manager in virtual time.

    Args:
        folder: For the swap file.
        pages: Of each block.
        hbm: Pages of HBM.
        dram: Pages of DRAM, staging not counted.
        machine: How fast things are.
    """
    machine = machine or Machine()
    world = World(machine)
    settings = Settings(
        "cpu", hbm * PAGE, dram * PAGE + STAGING, (str(folder),), None, Policy(), "auto"
    )
    manager = BlockManager(settings, ScriptedEngine)
    try:
        assert manager.parts.mover is not None
        manager.parts.mover.close()
        transfers = manager.parts.transfers
        transfers.mover = Mover(world)  # type: ignore[assignment]
        transfers.copy = manager.acquirer._copy = manager.replay._copy = Copies(world)  # type: ignore[assignment]
        object.__setattr__(manager.parts, "copy", transfers.copy)  # a frozen bundle
        transfers.poisons = False
        manager.prefetcher.fetcher.beside = True
        rates = {"dram->hbm": machine.bus, "nvme->hbm": machine.in_place}
        manager.parts.pass_timer.estimates = Estimates(lambda link, _: rates.get(link))
        manager.parts.pass_timer._clock = Clock(world)
        manager.parts.homes.chunk = machine.chunk
        manager.parts.homes.staging = torch.empty(machine.chunk * machine.chunks, dtype=torch.uint8)
        yield Streamed(manager, world, pages)
    finally:
        manager.close()


LAYERS = 8
_LAYER = (3, 3, 3, 3, 8, 8, 8)
LLAMA = (*(_LAYER * LAYERS), 31)
"""Pages of the linear layers of a Llama of 1.0 B, and of its embedding."""

_FORWARD = [(n, float(pages)) for n, pages in enumerate(LLAMA[:-1])]
_SEVEN = len(_LAYER)


def forward(seconds: float) -> list[tuple[str, list[tuple[int, float]]]]:
    """Returns a loop of forward passes whose compute takes so long."""
    uses = [(len(LLAMA) - 1, 0.5), *_FORWARD]
    return [("forward", _scaled(uses, seconds))]


def both(seconds: float) -> list[tuple[str, list[tuple[int, float]]]]:
    """Returns a loop of forward and backward with recomputation, frozen; no embedding."""
    back: list[tuple[int, float]] = []
    for layer in reversed(range(LAYERS)):
        part = _FORWARD[layer * _SEVEN : (layer + 1) * _SEVEN]
        back += [*part[:-1], (part[-1][0], 2 * part[-1][1]), *part[-2::-1]]
    share = seconds / (3.0 * sum(LLAMA[:-1]))
    total = share * sum(LLAMA[:-1])
    return [
        ("forward", _scaled(_FORWARD, total)),
        ("backward", _scaled(back, seconds - total)),
    ]


def _scaled(uses: Sequence[tuple[int, float]], seconds: float) -> list[tuple[int, float]]:
    total = sum(weight for _, weight in uses)
    return [(number, seconds * weight / total) for number, weight in uses]
