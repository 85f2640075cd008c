"""The pump: the one thread that owns the I/O engine and moves pieces through staging chunks."""

from __future__ import annotations

import atexit
import contextlib
import enum
import errno
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from tiermem.errors import ClosedError, IntegrityError, StorageError
from tiermem.io.engine import IoCompletion, IoEngine, IoOp, IoRequest
from tiermem.storage.checksum import checksum
from tiermem.storage.swapfile import Piece, SwapFile
from tiermem.transfer.filejobs import FileTransfer, Job, JobQueue
from tiermem.transfer.switching import switch_interval

_FEW_CHUNKS = 8
_FIRST_LOOK = 50e-6
_LAST_LOOK = 2e-4


class Fence(Protocol):
    """The end of a copy that may complete later."""

    def done(self) -> bool:
        """Returns whether the copy has completed; never blocks."""

    def wait(self) -> None:
        """Blocks until the copy has completed."""


class ChunkCopier(Protocol):
    """Copies between a staging chunk (host memory) and where a tensor lives."""

    def to_target(self, target: torch.Tensor, staging: torch.Tensor) -> Fence:
        """Starts a copy out of staging; the chunk is reused once the fence is done."""

    def from_source(self, staging: torch.Tensor, source: torch.Tensor) -> Fence:
        """Starts a copy into staging; the chunk is read once the fence is done."""


class Message(enum.Enum):
    """What another thread asks of the pump."""

    START = "start"
    CANCEL = "cancel"
    HURRY = "hurry"


@dataclass(slots=True)
class Counters:
    """What the pump has done; written by its thread alone."""

    bytes_read: int = 0
    bytes_written: int = 0
    failed: int = 0
    checksum_ns: int = 0
    copy_ns: int = 0
    wait_ns: int = 0


@dataclass(slots=True)
class _Chunk:
    """One staging chunk, and the piece that is in it."""

    index: int
    memory: torch.Tensor
    address: int
    job: Job
    piece: Piece
    fence: Fence | None = None
    checksum: int | None = None


class Pump:
    """State and thread of a :class:`~tiermem.transfer.filemover.FileMover`.

    Everything whose name begins with ``_`` and that is not guarded by
    ``changed`` belongs to the thread.
    """

    def __init__(
        self,
        store: SwapFile,
        engine_factory: Callable[[], IoEngine],
        staging: torch.Tensor,
        chunk_nbytes: int,
        copier: ChunkCopier,
        verify: bool,
    ) -> None:
        self.changed = threading.Condition()
        self.counters = Counters()
        self.finished: deque[FileTransfer] = deque()
        self.dead: BaseException | None = None
        self.engine_name = ""
        self.engine_detail = ""
        self._store = store
        self._staging = staging
        self._chunk_nbytes = chunk_nbytes
        self._copier = copier
        self._verify = verify
        self._pid = os.getpid()
        self._inbox: list[tuple[Message, FileTransfer, Job | None]] = []
        self._closing = False
        self._started = threading.Event()
        self._queue = JobQueue()
        self._chunks = [staging.narrow(0, i, chunk_nbytes) for i in self._chunk_starts()]
        self._spare = list(range(len(self._chunks)))[::-1]
        self._busy: dict[int, _Chunk] = {}
        self._fenced: list[_Chunk] = []
        self._writing = 0
        self._brisk = False
        n_chunks = len(self._chunks)
        # Some chunks are kept for reads: an urgent one shall not wait behind writes alone.
        # what a disk ends all at once is followed by the other half straight away
        self._most_in_flight = n_chunks if n_chunks < _FEW_CHUNKS else n_chunks // 2
        self._most_writing = max(1, n_chunks - max(1, n_chunks // 4))
        self._thread = threading.Thread(
            target=self._run, args=(engine_factory,), name="tiermem-file-pump", daemon=True
        )

    def _chunk_starts(self) -> range:
        return range(0, self._staging.numel() - self._chunk_nbytes + 1, self._chunk_nbytes)

    # Called by other threads ---------------------------------------------------------

    def start(self) -> None:
        """Starts the thread and waits for its engine.

        Raises:
            BaseException: Whatever kept the engine from being made.
        """
        # The kernel must be done with staging before the interpreter takes it apart.
        atexit.register(self.close)
        self._thread.start()
        try:
            self._started.wait()
        except BaseException:  # Ctrl-C: nobody else will end the thread
            self.ask_to_close()
            raise
        if self.dead is not None:
            self._thread.join()
            raise self.dead

    def start_job(self, job: Job) -> bool:
        """Hands over a job; returns whether the pump still runs."""
        return self._post(Message.START, job.transfer, job)

    def cancel(self, transfer: FileTransfer) -> None:
        """Asks for a transfer to be stopped."""
        self._post(Message.CANCEL, transfer, None)

    def hurry(self, transfer: FileTransfer) -> None:
        """Asks for a transfer to go before the others, because somebody waits for it."""
        self._post(Message.HURRY, transfer, None)

    def _post(self, message: Message, transfer: FileTransfer, job: Job | None) -> bool:
        with self.changed:
            if self._closing:
                raise ClosedError("the file mover is closed")
            if self.dead is not None:
                return False
            self._inbox.append((message, transfer, job))
            if len(self._inbox) == 1:
                self._engine.wake()
            return True

    def ask_to_close(self) -> None:
        """Lets the thread end soon; never blocks, so that a garbage collection may call it."""
        if os.getpid() != self._pid:
            return
        with self.changed:
            self._closing = True
            if self.dead is None and self.engine_name and self._thread.is_alive():
                self._engine.wake()

    def close(self) -> None:
        """Cancels everything, ends the thread and its engine; in a forked child does nothing."""
        if os.getpid() != self._pid:
            return
        self.ask_to_close()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # The thread ----------------------------------------------------------------------

    def _run(self, engine_factory: Callable[[], IoEngine]) -> None:
        try:
            self._engine = engine_factory()
        except BaseException as error:
            self.dead = error
            self._started.set()
            atexit.unregister(self.close)
            return
        cause: BaseException | None = None
        try:
            area = (self._staging.data_ptr(), self._staging.numel())
            self._engine.open(self._store.fds, [area])
            self.engine_name, self.engine_detail = self._engine.name, self._engine.describe()
            self._started.set()
            if not self._closing:
                self._loop()
        except BaseException as error:
            cause = error
        finally:
            self._end(cause)
            self._started.set()
            atexit.unregister(self.close)

    def _loop(self) -> None:
        look = _FIRST_LOOK
        while True:
            self._read_inbox()
            if self._closing:
                return
            self._begin_pieces()
            self._set_brisk(bool(self._queue.jobs))
            before = time.perf_counter_ns()
            completions = self._wait(look)
            self.counters.wait_ns += time.perf_counter_ns() - before
            self._take_all(completions)
            moved = self._look_at_fences() or bool(completions)
            look = _FIRST_LOOK if moved else min(2 * look, _LAST_LOOK)

    def _take_all(self, completions: list[IoCompletion]) -> None:
        """Takes on what has ended; the disk is given its next work before anything is checked."""
        if completions and self._engine.in_flight and len(self._chunks) >= _FEW_CHUNKS:
            completions += self._engine.wait(_FIRST_LOOK)  # they often end together
        arrived = deque(completions)
        while arrived:
            self._look_at_fences()
            self._begin_pieces()
            self._complete(arrived.popleft())
            if not arrived and self._engine.in_flight:
                arrived.extend(self._engine.wait(0))

    def _wait(self, look: float) -> list[IoCompletion]:
        """Waits for what ends next, an operation or a copy; a copy cannot wake the engine.

        So copies are looked at whenever an operation ends, waited for where none is under way.
        """
        if not self._fenced:
            return self._engine.wait(None)
        if not self._engine.in_flight:
            first = self._fenced[0].fence
            if first is not None:
                first.wait()
            return []
        fenced = Counter(chunk.job.transfer for chunk in self._fenced)
        ending = any(
            chunk.job.exhausted and fenced[chunk.job.transfer] == chunk.job.active
            for chunk in self._fenced
        )
        return self._engine.wait(look if ending else None)

    def _set_brisk(self, brisk: bool) -> None:
        if brisk != self._brisk:
            self._brisk = brisk
            (switch_interval.shorten if brisk else switch_interval.restore)()

    def _read_inbox(self) -> None:
        with self.changed:
            messages, self._inbox = self._inbox, []
        for message, transfer, job in messages:
            if message is Message.START and job is not None:
                self._queue.add(job)
                if job.over and not job.blockers:  # it has no bytes
                    self._finish(job)
                continue
            known = self._queue.jobs.get(transfer)
            if known is not None and message is Message.CANCEL:
                self._cancel(known)
            elif known is not None:
                self._queue.hurry(known)

    def _cancel(self, job: Job) -> None:
        if job.exhausted:
            return
        job.stop(self._error(job, job.pieces[job.next_piece], "cancelled", errno.ECANCELED))
        if job.over:
            self._finish(job)

    # Beginning pieces ----------------------------------------------------------------

    def _begin_pieces(self) -> None:
        requests: list[IoRequest] = []
        while self._spare and self._engine.in_flight + len(requests) < self._most_in_flight:
            taken = self._queue.take(may_write=self._writing < self._most_writing)
            if taken is None:
                break
            request = self._begin(*taken)
            if request is not None:
                requests.append(request)
        if requests:
            self._engine.submit(requests)

    def _begin(self, job: Job, piece: Piece) -> IoRequest | None:
        transfer = job.transfer
        transfer.started_ns = transfer.started_ns or time.perf_counter_ns()
        if transfer.is_read:
            return self._begin_read(job, piece)
        if not job.generation:
            job.generation = self._store.begin_write(transfer.extent, job.pieces)
        chunk = self._fill_chunk(job, piece)
        self._writing += 1
        before = time.perf_counter_ns()
        chunk.fence = self._copier.from_source(chunk.memory, self._part(job, piece))
        self.counters.copy_ns += time.perf_counter_ns() - before
        if chunk.fence.done():
            return self._write_request(chunk)
        self._fenced.append(chunk)
        return None

    def _begin_read(self, job: Job, piece: Piece) -> IoRequest | None:
        if self._store.written(job.transfer.extent, piece) is None:
            what = "the file holds no whole data there: never written, or its last write failed"
            job.stop(self._error(job, piece, what, None))
            if job.over:
                self._finish(job)
            return None
        return self._request(IoOp.READ, self._fill_chunk(job, piece))

    def _fill_chunk(self, job: Job, piece: Piece) -> _Chunk:
        index = self._spare.pop()
        memory = self._chunks[index]
        if piece.nbytes != self._chunk_nbytes:
            memory = memory.narrow(0, 0, piece.nbytes)
        chunk = _Chunk(index, memory, memory.data_ptr(), job, piece)
        self._busy[index] = chunk
        job.active += 1
        return chunk

    @staticmethod
    def _part(job: Job, piece: Piece) -> torch.Tensor:
        return job.tensor.narrow(0, piece.extent_offset, piece.nbytes)

    @staticmethod
    def _request(op: IoOp, chunk: _Chunk) -> IoRequest:
        piece = chunk.piece
        return IoRequest(
            op, piece.file, piece.file_offset, chunk.address, piece.nbytes, chunk.index
        )

    def _write_request(self, chunk: _Chunk) -> IoRequest:
        chunk.fence = None
        chunk.checksum = self._checksum(chunk) if self._verify else None
        return self._request(IoOp.WRITE, chunk)

    def _checksum(self, chunk: _Chunk) -> int:
        before = time.perf_counter_ns()
        value = checksum(chunk.address, chunk.piece.nbytes)
        self.counters.checksum_ns += time.perf_counter_ns() - before
        return value

    # Ending pieces -------------------------------------------------------------------

    def _complete(self, completion: IoCompletion) -> None:
        chunk = self._busy[completion.token]
        job, piece = chunk.job, chunk.piece
        if completion.errno:
            what = "read failed" if job.transfer.is_read else "write failed"
            job.stop(self._error(job, piece, what, completion.errno))
        elif not job.transfer.is_read:
            self.counters.bytes_written += piece.nbytes
            self._store.end_write(job.transfer.extent, piece, job.generation, chunk.checksum)
        elif self._arrived(chunk):
            return
        self._release(chunk)

    def _arrived(self, chunk: _Chunk) -> bool:
        """Checks a piece that was read and copies it on; returns whether that copy goes on."""
        job, piece = chunk.job, chunk.piece
        self.counters.bytes_read += piece.nbytes
        if job.error is not None:
            return False
        entry = self._store.written(job.transfer.extent, piece)
        expected = entry.checksum if entry is not None else None
        if self._verify and expected is not None and self._checksum(chunk) != expected:
            job.stop(
                IntegrityError(
                    "the bytes read are not the bytes written (checksum)",
                    block=job.transfer.label,
                    path=self._store.folder(piece.file),
                    offset=piece.file_offset,
                    nbytes=piece.nbytes,
                )
            )
            return False
        before = time.perf_counter_ns()
        chunk.fence = self._copier.to_target(self._part(job, piece), chunk.memory)
        self.counters.copy_ns += time.perf_counter_ns() - before
        if chunk.fence.done():
            return False
        self._fenced.append(chunk)
        return True

    def _look_at_fences(self) -> bool:
        """Takes on every piece whose copy has completed; returns whether there was one."""
        if not self._fenced:
            return False
        pending = [(chunk, chunk.fence) for chunk in self._fenced]
        done = [chunk for chunk, fence in pending if fence is None or fence.done()]
        if not done:
            return False
        gone = {chunk.index for chunk in done}
        self._fenced = [chunk for chunk in self._fenced if chunk.index not in gone]
        requests: list[IoRequest] = []
        for chunk in done:
            if chunk.job.transfer.is_read or chunk.job.error is not None:
                self._release(chunk)
            else:
                requests.append(self._write_request(chunk))
        if requests:
            self._engine.submit(requests)
        return True

    def _release(self, chunk: _Chunk) -> None:
        job = chunk.job
        del self._busy[chunk.index]
        self._spare.append(chunk.index)
        if not job.transfer.is_read:
            self._writing -= 1
        job.active -= 1
        if job.over:
            self._finish(job)

    def _finish(self, job: Job) -> None:
        self._queue.remove(job)
        self.settle(job.transfer, job.error)

    def settle(self, transfer: FileTransfer, error: StorageError | None) -> None:
        """Marks a transfer as finished and tells whoever waits."""
        transfer.error = error
        transfer.finished_ns = time.perf_counter_ns()
        if error is not None:
            self.counters.failed += 1
        with self.changed:
            transfer.finished = True
            self.finished.append(transfer)
            self.changed.notify_all()

    def _error(self, job: Job, piece: Piece, what: str, code: int | None) -> StorageError:
        return StorageError(
            what,
            block=job.transfer.label,
            path=self._store.folder(piece.file),
            offset=piece.file_offset,
            nbytes=piece.nbytes,
            errno=code,
        )

    # The end -------------------------------------------------------------------------

    def _end(self, cause: BaseException | None) -> None:
        """Gives the engine back, then fails what was under way: no memory is touched after."""
        try:
            self._engine.close()
        except Exception as error:
            cause = cause or error
        for chunk in self._fenced:
            if chunk.fence is not None:
                with contextlib.suppress(Exception):  # a broken device fails every copy
                    chunk.fence.wait()
        with self.changed:
            if cause is not None:
                self.dead = cause
            self._closing = self._closing or cause is None
            left = [job for _, _, job in self._inbox if job is not None]
            self._inbox.clear()
        for job in [*self._queue.jobs.values(), *left]:
            self.settle(job.transfer, job.error or failure(job.transfer, cause))
        self._set_brisk(False)
        self._queue = JobQueue()
        self._busy.clear()
        self._fenced.clear()


def failure(transfer: FileTransfer, cause: BaseException | None) -> StorageError:
    """Returns the error of a transfer that ended because the pump did."""
    if cause is None:
        what = "cancelled: the file mover was closed"
    else:
        what = f"the file pump has stopped ({type(cause).__name__}: {cause})"
    error = StorageError(
        what,
        block=transfer.label,
        nbytes=transfer.nbytes,
        errno=errno.ECANCELED if cause is None else None,
    )
    error.__cause__ = cause
    return error
