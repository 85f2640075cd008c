"""What happens to each piece of a file transfer, from its staging chunk to its end.

A piece that is read: disk, then checksum and copy. Asynchronous copies (to a GPU)
begin immediately and are checked while in progress; host copies wait for the checksum. If streams
can wait for such copies, a read ends when the last one has been submitted, and its chunks are
reused when the copies have ended. A read may begin before it has a target: its first pieces wait
in their chunks until it has one. A piece that is written: copy into staging, then disk and
checksum in parallel. Host memory with suitable alignment is written directly,
without a copy, and read into directly if that is requested.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tiermem.core.block import ALIGNMENT
from tiermem.errors import IntegrityError, StorageError
from tiermem.io.engine import IoCompletion, IoEngine, IoOp, IoRequest
from tiermem.storage.files import FileStore, Piece
from tiermem.transfer.driver import Signal
from tiermem.transfer.file.copiers import ChunkCopier, Fence
from tiermem.transfer.file.fenced import FencedCopies
from tiermem.transfer.file.helpers import Helpers
from tiermem.transfer.file.jobs import Chunk, FileTransfer, Job, JobQueue, Task
from tiermem.transfer.file.staging import Shares, Staging


@dataclass(slots=True)
class Counters:
    """Counters, written only by the pump's thread."""

    bytes_read: int = 0
    bytes_written: int = 0
    bytes_direct: int = 0
    checksum_ns: int = 0
    copy_ns: int = 0
    wait_ns: int = 0


class Pieces:
    """The pieces in progress. Used only by the pump's thread.

    Args:
        store: The files.
        staging: The chunks.
        copier: Copies chunks to targets.
        verify: Whether checksums are computed and compared.
        ended: Called with every transfer that has ended.
        rests: Called with every read that waits only for a target.

    Attributes:
        busy: Chunks in use, by number.
        counters: Counts of what was done so far.
        copies: The asynchronous copies.
        queue: Jobs with pieces to begin.
        verify: As given.
    """

    engine: IoEngine
    helpers: Helpers

    def __init__(
        self,
        store: FileStore,
        staging: Staging,
        copier: ChunkCopier,
        verify: bool,
        ended: Callable[[FileTransfer, StorageError | None], None],
        rests: Callable[[FileTransfer], None],
    ) -> None:
        self.busy: dict[int, Chunk] = {}
        self.counters = Counters()
        self.copies = FencedCopies(copier)
        self.queue = JobQueue()
        self.verify = verify
        self._store = store
        self._staging = staging
        self._ended = ended
        self._rests = rests
        self._writing = 0
        self._most = Shares.of(staging.count)

    # Whole transfers -----------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Adds a job; a read without a target of bytes that it writes is cancelled."""
        for earlier in self.queue.without_target():
            if job.conflicts(earlier):
                self.cancel(earlier)
        self.queue.add(job)
        if job.over and not job.blockers:  # it has no bytes
            self._finish(job)

    def cancel(self, job: Job) -> None:
        """Skips the pieces of a job that were not begun."""
        if job.exhausted and job.tensor is not None:
            return
        piece = job.pieces[min(job.next_piece, len(job.pieces) - 1)]
        self._stop(job, self._error(job, piece, "cancelled", errno.ECANCELED))
        self._finish_if_over(job)

    def land(self, job: Job, tensor: torch.Tensor, after: Sequence[Signal], urgent: bool) -> None:
        """Gives a read its target; pieces that were read already are copied there."""
        job.tensor, job.after, job.urgent = tensor, after, urgent
        job.transfer.rests = False
        if job.rests_ns:
            job.transfer.rested_ns = time.perf_counter_ns() - job.rests_ns
        self.queue.land(job)
        for chunk in self._unpark(job):
            self._copy(chunk)
            self._end(chunk)

    @staticmethod
    def _unpark(job: Job) -> list[Chunk]:
        """Removes and returns the chunks that waited for a target."""
        chunks, job.parked = job.parked, []
        for chunk in chunks:
            chunk.parked = False
        return chunks

    def _stop(self, job: Job, error: StorageError) -> None:
        """Records a failure; no chunk waits for a target any more."""
        job.stop(error)
        for chunk in self._unpark(job):
            self._end(chunk)

    def _finish_if_over(self, job: Job) -> None:
        if job.over and not job.transfer.finished:
            self._finish(job)

    def _finish(self, job: Job) -> None:
        job.tensor = None  # chunks may stay for longer, and must not keep it alive
        self._ended(job.transfer, job.error)
        self.queue.remove(job)  # last: until then other threads see that it is at work

    def _error(self, job: Job, piece: Piece, what: str, code: int | None) -> StorageError:
        return StorageError(
            what,
            block=job.transfer.label,
            path=self._store.folder(piece.file),
            offset=piece.file_offset,
            nbytes=piece.nbytes,
            errno=code,
        )

    # What the pump waits for ---------------------------------------------------------

    @property
    def needs_helpers(self) -> bool:
        """Whether a transfer cannot continue until a helper is done.

        Not while the disk has its maximum of requests: its next completion comes soon enough.
        """
        if self.engine.in_flight < self._most.on_disk:
            return True
        return any(c.task is not None and c.job.exhausted for c in self.busy.values())

    @property
    def needs_fence(self) -> bool:
        """Whether a transfer, or the disk, waits for asynchronous copies only."""
        if self._starved and self.copies.chunks:
            return True
        held = {c.job for c in self.busy.values() if c.on_disk or c.task is not None}
        left = (c.job for c in self.copies.chunks if not c.job.transfer.finished)
        return any(not held or (job.exhausted and job not in held) for job in left)

    def last_fence(self) -> Fence | None:
        """Returns a fence, if nothing else can happen before it is done, except a cancellation."""
        if self._staging.spare or not self.needs_fence:
            return None
        if any(c.on_disk or c.task is not None for c in self.busy.values()):
            return None
        if len({c.job.transfer.is_read for c in self.copies.chunks}) > 1:
            return None  # copies up and down do not wait for each other
        return next((c.fence for c in self.copies.chunks), None)

    @property
    def _starved(self) -> bool:
        """Whether the disk has less than its maximum of requests as no chunk is free."""
        if self._staging.spare or self.engine.in_flight >= self._most.on_disk:
            return False
        return self.queue.pending(may_park=self._may_park(self.queue.without_target()))

    # Beginning -----------------------------------------------------------------------

    def begin(self) -> None:
        """Submits as much I/O to the disk as may be in flight."""
        requests: list[IoRequest] = []
        waiting = self.queue.without_target()
        all_begun = False
        while self._staging.spare and self.engine.in_flight + len(requests) < self._most.on_disk:
            taken = self.queue.next_piece(
                may_write=self._writing < self._most.writing,
                may_park=self._may_park(waiting),
            )
            if taken is None:
                all_begun = True
                break
            job, piece = taken
            transfer = job.transfer
            transfer.started_ns = transfer.started_ns or time.perf_counter_ns()
            begin = self._begin_read if transfer.is_read else self._begin_write
            request = begin(job, piece)
            if request is not None:
                requests.append(request)
        if requests:
            self.engine.submit(requests)
        if waiting:
            self._note_rests(waiting, all_begun)

    def _may_park(self, waiting: Sequence[Job]) -> bool:
        """Whether a read without a target may have one more chunk."""
        return sum(job.active for job in waiting) < self._most.parked

    def _note_rests(self, waiting: Sequence[Job], all_begun: bool) -> None:
        """Reports reads without a target that have no work in progress and can begin none.

        Args:
            waiting: The reads without a target.
            all_begun: Whether a chunk is left after all work was begun. If there is none,
                such a read may still continue later, unless it has its maximum.
        """
        most = not self._may_park(waiting)
        for job in waiting:
            still = job.active == len(job.parked) and not (job.rests_ns or job.blockers)
            if still and (all_begun or most or job.exhausted):
                job.rests_ns = time.perf_counter_ns()
                self._rests(job.transfer)

    @property
    def at_work(self) -> bool:
        """Whether there is more work than waiting for targets."""
        return any(not job.rests_ns or job.tensor is not None for job in self.queue.jobs.values())

    def _begin_read(self, job: Job, piece: Piece) -> IoRequest | None:
        what = self._store.refusal(job.transfer.extent, piece)
        if what:
            self._stop(job, self._error(job, piece, what, None))
            self._finish_if_over(job)
            return None
        chunk = self._take(job, piece)
        job.rests_ns, job.transfer.rests = 0, False
        if job.transfer.in_place and job.tensor is not None and piece.parts is None:
            target = job.tensor.data_ptr() + piece.extent_offset
            if target % ALIGNMENT == 0 and piece.nbytes % ALIGNMENT == 0:
                chunk.address = target
                self.counters.bytes_direct += piece.nbytes
        return self._request(IoOp.READ, chunk)

    def _begin_write(self, job: Job, piece: Piece) -> IoRequest | None:
        if not job.generation:
            job.generation = self._store.begin_write(job.transfer.extent, job.pieces)
        chunk = self._take(job, piece)
        chunk.check.wanted = self.verify
        self._writing += 1
        if job.tensor is None or not self.copies.in_host(job):
            self._copy(chunk)
            return None if chunk.fence is not None else self._send(chunk)
        source = job.tensor.data_ptr() + piece.extent_offset
        if source % ALIGNMENT or piece.nbytes % ALIGNMENT:
            self._give(chunk, Task.FILL)
            return None
        # The kernel only reads the source. If it is changed meanwhile, the checksum detects
        # that when it is read back.
        chunk.address = source
        self.counters.bytes_direct += piece.nbytes
        return self._send(chunk)

    def _take(self, job: Job, piece: Piece) -> Chunk:
        chunk = self._staging.take(job, piece)
        self.busy[chunk.index] = chunk
        job.active += 1
        return chunk

    def _give(self, chunk: Chunk, task: Task) -> None:
        chunk.task = task
        self.helpers.give(chunk)

    def _copy(self, chunk: Chunk) -> None:
        """Starts an asynchronous copy; leaves a fence unless it has already ended."""
        before = time.perf_counter_ns()
        fence = self.copies.start(chunk)
        self.counters.copy_ns += time.perf_counter_ns() - before
        self.copies.note(chunk, fence)

    def _send(self, chunk: Chunk) -> IoRequest:
        """Returns the request that writes a chunk; begins its checksum."""
        if chunk.check.wanted and chunk.check.found is None:
            self._give(chunk, Task.CHECK)
        return self._request(IoOp.WRITE, chunk)

    @staticmethod
    def _request(op: IoOp, chunk: Chunk) -> IoRequest:
        chunk.on_disk = True
        piece = chunk.piece
        return IoRequest(
            op, piece.file, piece.file_offset, chunk.address, piece.nbytes, chunk.index
        )

    # Going on ------------------------------------------------------------------------

    def complete(self, completions: Sequence[IoCompletion]) -> None:
        """Continues with the chunks whose disk operations have completed."""
        for completion in completions:
            chunk = self.busy[completion.token]
            chunk.on_disk = False
            job = chunk.job
            if completion.errno:
                what = "write failed"
                if job.transfer.is_read:
                    cause = self._store.cause(chunk.piece)
                    what = f"read failed: {cause}" if cause else "read failed"
                self._stop(job, self._error(job, chunk.piece, what, completion.errno))
            elif job.transfer.is_read:
                self.counters.bytes_read += chunk.piece.nbytes
                if job.error is None:
                    self._arrived(chunk)
            else:
                self.counters.bytes_written += chunk.piece.nbytes
                chunk.written = True
            self._end(chunk)

    def _arrived(self, chunk: Chunk) -> None:
        """Checks a piece that was read and copies it to the target, or leaves both to a helper."""
        entry = self._store.written(chunk.job.transfer.extent, chunk.piece)
        chunk.check.expected = entry.checksum if entry is not None else None
        known = entry is not None and (entry.checksum is not None or entry.learns)
        chunk.check.wanted = self.verify and known
        in_place = chunk.address != chunk.memory.data_ptr()
        if self.copies.in_host(chunk.job) and not in_place:
            self._give(chunk, Task.LAND)
            return
        if chunk.check.wanted:
            self._give(chunk, Task.CHECK)
        if chunk.job.tensor is None:
            chunk.parked = True
            chunk.job.parked.append(chunk)
        elif not in_place:
            self._copy(chunk)

    def helped(self, chunks: Sequence[Chunk]) -> None:
        """Continues with the chunks that helpers have processed."""
        requests: list[IoRequest] = []
        for chunk in chunks:
            task, chunk.task = chunk.task, None
            job, check = chunk.job, chunk.check
            self.counters.checksum_ns += check.ns
            self.counters.copy_ns += chunk.copy_ns
            if check.wrong:
                self._stop(job, self._damage(chunk))
            elif check.expected is None and check.found is not None and job.transfer.is_read:
                self._store.keep_sum(job.transfer.extent, chunk.piece, check.found)
            if task is Task.FILL and job.error is None:
                requests.append(self._send(chunk))
            else:
                self._end(chunk)
        if requests:
            self.engine.submit(requests)

    def _damage(self, chunk: Chunk) -> IntegrityError:
        entry = self._store.written(chunk.job.transfer.extent, chunk.piece)
        what = "the bytes read are not the bytes written (checksum)"
        if entry is not None and entry.learns:
            what = "the bytes read are not those of the first read: the file was changed (checksum)"
        return IntegrityError(
            what,
            block=chunk.job.transfer.label,
            path=self._store.folder(chunk.piece.file),
            offset=chunk.piece.file_offset,
            nbytes=chunk.piece.nbytes,
        )

    def look_at_fences(self) -> bool:
        """Continues with the chunks whose copies have completed; returns whether there were any."""
        done = self.copies.take_done()
        if not done:
            return False
        requests: list[IoRequest] = []
        for chunk in done:
            chunk.fence = None
            if chunk.job.transfer.is_read or chunk.job.error is not None:
                self._end(chunk)
            else:
                requests.append(self._send(chunk))
        if requests:
            self.engine.submit(requests)
        return True

    # Ending --------------------------------------------------------------------------

    def _end(self, chunk: Chunk) -> None:
        """Ends a piece that needs no more work; frees its chunk once it is unused."""
        if chunk.on_disk or chunk.task is not None or chunk.parked:
            return
        job, rising = chunk.job, chunk.rising
        if chunk.fence is not None and not rising:
            return
        if not chunk.ended:
            chunk.ended = True
            job.active -= 1
            job.rising += rising
            self._end_write(chunk)
        elif not rising:
            job.rising -= 1
        if not rising:
            del self.busy[chunk.index]
            self._staging.spare.append(chunk.index)
        self._finish_if_over(job)

    def _end_write(self, chunk: Chunk) -> None:
        transfer = chunk.job.transfer
        if transfer.is_read:
            return
        self._writing -= 1
        if chunk.written:
            self._store.end_write(
                transfer.extent, chunk.piece, chunk.job.generation, chunk.check.found
            )

    def clear(self) -> list[Job]:
        """Clears everything, once no memory is accessed any more; returns the remaining jobs."""
        left = list(self.queue.jobs.values())
        self.queue = JobQueue()
        self.busy.clear()
        self.copies.chunks.clear()
        return left
