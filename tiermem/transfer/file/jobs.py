"""File transfers, their pieces in staging chunks, and their order: bookkeeping of the pump."""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from tiermem.core.block import Extent
from tiermem.errors import InvariantError, StorageError
from tiermem.storage.files import Piece
from tiermem.transfer.driver import Signal
from tiermem.transfer.file.copiers import Fence

READS_PER_WRITE = 1
"""Read pieces that may start while a write waits, before one write piece goes first.

One: nobody waits for either, both have to be made, and a disk moves most with both.
"""
URGENT_PER_WRITE = 16
"""The same for urgent pieces, which a caller waits for."""


class FileTransfer:
    """A copy between the files and memory, in progress or done.

    Attributes:
        label: Name of the block, for messages.
        is_read: Whether bytes go from the file to memory.
        in_place: Whether the disk may read directly into the target.
        nbytes: Bytes to move.
        extent: The extent in the store.
        urgent: Whether it has priority over others.
        error: The error, or ``None``; valid once ``finished``.
        event: Event of the last copy into a target that streams wait for; ``None`` if all bytes are
            there when it has ``finished`` without an error. After an error no copy is in progress.
        submitted_ns: When it was requested (``time.perf_counter_ns``).
        started_ns: When its first piece was begun; 0 before.
        rests: Whether it waits for a target only, as the disk has done what is possible without.
        rested_ns: For how long it waited so, once it has a target.
        finished_ns: When it ended; 0 before.
        finished: Whether it has ended, with or without an error.
    """

    __slots__ = (
        "error",
        "event",
        "extent",
        "finished",
        "finished_ns",
        "in_place",
        "is_read",
        "label",
        "nbytes",
        "rested_ns",
        "rests",
        "started_ns",
        "submitted_ns",
        "urgent",
    )

    def __init__(
        self,
        extent: Extent,
        *,
        is_read: bool,
        label: str,
        urgent: bool,
        in_place: bool = False,
    ) -> None:
        self.extent = extent
        self.nbytes = extent.nbytes
        self.is_read = is_read
        self.in_place = in_place
        self.label = label
        self.urgent = urgent
        self.error: StorageError | None = None
        self.event: Signal | None = None
        self.submitted_ns = time.perf_counter_ns()
        self.started_ns = 0
        self.rests = False
        self.rested_ns = 0
        self.finished_ns = 0
        self.finished = False

    def __repr__(self) -> str:
        kind = "read" if self.is_read else "write"
        state = "finished" if self.finished else "under way" if self.started_ns else "waiting"
        return f"<FileTransfer {kind} of {self.label!r}, {self.nbytes} bytes, {state}>"


class Job:
    """A transfer with the state that the pump needs.

    Attributes:
        transfer: The object that the caller holds.
        tensor: Target or source, 1-D uint8; None for a read without a target yet.
        parked: Chunks that wait for the target.
        rests_ns: Since when nothing else can be done for it; 0 before.
        pieces: Parts in the files.
        next_piece: Index of the first piece not begun.
        active: Pieces begun and not ended.
        rising: Pieces that have ended except for a copy that streams wait for.
        error: First failure; pieces not begun are then skipped.
        generation: Generation of the write, for the checksum index; 0 before it begins.
        blockers: Earlier transfers of the same bytes that must end first.
        after: Events that copies into the target wait for.
    """

    __slots__ = (
        "active",
        "after",
        "blockers",
        "dependents",
        "error",
        "generation",
        "next_piece",
        "parked",
        "pieces",
        "rests_ns",
        "rising",
        "tensor",
        "transfer",
        "urgent",
    )

    def __init__(
        self,
        transfer: FileTransfer,
        tensor: torch.Tensor | None,
        pieces: list[Piece],
        after: Sequence[Signal] = (),
    ) -> None:
        self.transfer = transfer
        self.parked: list[Chunk] = []
        self.rests_ns = 0
        self.after = after
        self.tensor = tensor
        self.pieces = pieces
        self.next_piece = 0
        self.active = 0
        self.rising = 0
        self.error: StorageError | None = None
        self.generation = 0
        self.blockers: set[Job] = set()
        self.dependents: list[Job] = []
        self.urgent = transfer.urgent

    @property
    def exhausted(self) -> bool:
        """Whether no piece is left to begin."""
        return self.next_piece >= len(self.pieces)

    @property
    def over(self) -> bool:
        """Whether nothing is left to begin or to end; after an error, including copies."""
        return self.exhausted and self.active == 0 and (self.error is None or not self.rising)

    def stop(self, error: StorageError) -> None:
        """Records a failure (the first one counts) and skips pieces that were not begun."""
        if self.error is None:
            self.error = error
        self.next_piece = len(self.pieces)

    def conflicts(self, other: Job) -> bool:
        """Returns whether the order of the two jobs matters: same bytes, and one of them writes."""
        mine, theirs = self.transfer, other.transfer
        if mine.is_read and theirs.is_read:
            return False
        a, b = mine.extent, theirs.extent
        if a.nbytes == 0 or b.nbytes == 0:
            return False
        return a.offset < b.end and b.offset < a.end


class Task(enum.Enum):
    """What a helper thread does with a chunk."""

    CHECK = "check"
    """Compute the checksum."""
    FILL = "fill"
    """Copy the source into staging, then compute the checksum."""
    LAND = "land"
    """Compute the checksum and, if it is right, copy to the target."""


@dataclass(slots=True, eq=False)
class Check:
    """Whether the checksum of a piece is computed, and its result.

    Attributes:
        wanted: Whether it is computed.
        expected: The expected value, or ``None`` for a write.
        found: The value, once computed.
        ns: Time spent on it.
    """

    wanted: bool = False
    expected: int | None = None
    found: int | None = None
    ns: int = 0

    @property
    def wrong(self) -> bool:
        """Whether the bytes that were read are known to differ from those written."""
        return self.expected is not None and self.wanted and self.found != self.expected


@dataclass(slots=True, eq=False)
class Chunk:
    """One staging chunk, and the piece that is in it.

    Attributes:
        index: Number of the chunk; the token of its requests.
        memory: Staging memory, as long as the piece.
        address: Where the disk reads or writes: staging, or the source itself.
        job: The job of the piece.
        piece: Its place in the file and in the extent.
        check: Its checksum.
        on_disk: Whether the I/O engine is reading or writing it.
        task: What a helper is doing with it.
        fence: The fence of the current copy.
        written: Whether the disk has written all of it.
        parked: Whether it waits for a target.
        ended: Whether its piece has ended; a copy from it that streams wait for may continue.
        copy_ns: Time spent in the copy.
    """

    index: int
    memory: torch.Tensor
    address: int
    job: Job
    piece: Piece
    check: Check = field(default_factory=Check)
    on_disk: bool = False
    task: Task | None = None
    fence: Fence | None = None
    written: bool = False
    parked: bool = False
    ended: bool = False
    copy_ns: int = 0

    @property
    def rising(self) -> bool:
        """Whether only a copy that streams wait for is left of its piece."""
        fence = self.fence
        return fence is not None and fence.event is not None

    def part(self) -> torch.Tensor:
        """Returns the part of the target or source that belongs to a contiguous piece."""
        return self._whole().narrow(0, self.piece.extent_offset, self.piece.nbytes)

    def parts(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields the parts of the target, at least one, with the bytes in staging for each."""
        if self.piece.parts is None:
            yield self.part(), self.memory
            return
        whole = self._whole()
        for part in self.piece.parts:
            target = whole.narrow(0, part.extent_offset, part.nbytes)
            yield target, self.memory.narrow(0, part.at, part.nbytes)

    def _whole(self) -> torch.Tensor:
        tensor = self.job.tensor
        if tensor is None:
            raise InvariantError(f"the read of {self.job.transfer.label!r} has no target yet")
        return tensor


class JobQueue:
    """Jobs by class: urgent, reads, writes; conflicting ones in the order of submission.

    Reads without a target come last.
    """

    def __init__(self) -> None:
        self._parked: deque[Job] = deque()
        self.jobs: dict[FileTransfer, Job] = {}
        self._urgent: deque[Job] = deque()
        self._reads: deque[Job] = deque()
        self._writes: deque[Job] = deque()
        self._since_write = 0

    def add(self, job: Job) -> None:
        """Adds a job, after the earlier ones with which it conflicts."""
        for earlier in self.jobs.values():
            if job.conflicts(earlier):
                job.blockers.add(earlier)
                earlier.dependents.append(job)
        self.jobs[job.transfer] = job
        if job.blockers:
            if job.urgent:
                self._hurry(job)
        else:
            self._enqueue(job)

    def pending(self, *, may_park: bool) -> bool:
        """Whether a piece could be begun if there was a chunk for it.

        Args:
            may_park: See :meth:`next_piece`.
        """
        left = (job for job in self.jobs.values() if not (job.exhausted or job.blockers))
        return any(may_park or job.tensor is not None for job in left)

    def without_target(self) -> list[Job]:
        """Returns the reads that have no target yet."""
        return [job for job in self.jobs.values() if job.tensor is None]

    def _enqueue(self, job: Job) -> None:
        if job.tensor is None:
            self._parked.append(job)
        elif job.urgent:
            self._urgent.append(job)
        elif job.transfer.is_read:
            self._reads.append(job)
        else:
            self._writes.append(job)

    def land(self, job: Job) -> None:
        """Enqueues a job that had no target before and has one now."""
        if job in self._parked:
            self._parked.remove(job)
            self._enqueue(job)

    def hurry(self, job: Job) -> None:
        """Makes a job urgent, and the jobs for which it waits."""
        if job.urgent:
            return
        job.urgent = True
        if job.blockers:
            self._hurry(job)
        elif job.tensor is not None:
            self._urgent.append(job)  # its old entry is skipped once it is exhausted

    def _hurry(self, job: Job) -> None:
        for blocker in job.blockers:
            self.hurry(blocker)

    def remove(self, job: Job) -> None:
        """Removes a job that has ended, and enqueues jobs that waited for it."""
        del self.jobs[job.transfer]
        for later in job.dependents:
            later.blockers.discard(job)
            if not later.blockers and later.transfer in self.jobs:
                self._enqueue(later)
        for earlier in job.blockers:  # it was stopped before its turn
            earlier.dependents.remove(job)
        job.dependents.clear()
        job.blockers.clear()

    def next_piece(self, *, may_write: bool, may_park: bool = False) -> tuple[Job, Piece] | None:
        """Returns the next piece to begin, or ``None``.

        Args:
            may_write: Whether a write may have a staging chunk now.
            may_park: Whether a read without a target may have one.
        """
        urgent, read, write = (self._front(q) for q in (self._urgent, self._reads, self._writes))
        if not may_write:
            write = None
            urgent = self._first_read(self._urgent)
        limit = URGENT_PER_WRITE if urgent else READS_PER_WRITE
        chosen = urgent or read or write or (self._front(self._parked) if may_park else None)
        if write is not None and self._since_write >= limit:
            chosen = write
        if chosen is None:
            return None
        self._since_write = 0 if write is None or chosen is write else self._since_write + 1
        piece = chosen.pieces[chosen.next_piece]
        chosen.next_piece += 1
        return chosen, piece

    @staticmethod
    def _front(queue: deque[Job]) -> Job | None:
        while queue and queue[0].exhausted:
            queue.popleft()
        return queue[0] if queue else None

    @staticmethod
    def _first_read(queue: deque[Job]) -> Job | None:
        return next((j for j in queue if j.transfer.is_read and not j.exhausted), None)
