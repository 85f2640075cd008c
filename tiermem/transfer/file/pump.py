"""The pump: the one thread that owns the I/O engine and keeps the disk busy."""

from __future__ import annotations

import atexit
import contextlib
import enum
import errno
import os
import threading
import time
from collections.abc import Callable

import torch

from tiermem.errors import ClosedError, StorageError
from tiermem.io.engine import IoCompletion, IoEngine, start_threads
from tiermem.storage.files import FileStore
from tiermem.transfer.file.copiers import ChunkCopier
from tiermem.transfer.file.ended import Ended
from tiermem.transfer.file.helpers import HelperFactory
from tiermem.transfer.file.jobs import FileTransfer, Job
from tiermem.transfer.file.pieces import Pieces
from tiermem.transfer.file.staging import Staging
from tiermem.transfer.file.switching import switch_interval
from tiermem.transfer.file.workers import Workers

_FIRST_LOOK = 50e-6
_LAST_LOOK = 2e-4


class Message(enum.Enum):
    """Requests of other threads to the pump."""

    START = "start"
    CANCEL = "cancel"
    HURRY = "hurry"
    LAND = "land"


class Pump:
    """Thread of a :class:`~tiermem.transfer.file.mover.FileMover`, and requests to it.

    Attributes that begin with ``_`` and are not guarded by the lock of ``ended`` belong to the
    thread.

    Attributes:
        ended: The transfers that have ended.
        workers: The engine and the helpers.
        pieces: The transfers in progress.
        dead: Why the thread has ended, unless it was asked to.
    """

    def __init__(
        self,
        store: FileStore,
        engine_factory: Callable[[], IoEngine],
        staging: torch.Tensor,
        chunk_nbytes: int,
        copier: ChunkCopier,
        verify: bool,
        helpers: HelperFactory | None,
    ) -> None:
        self.ended = ended = Ended()
        self.dead: BaseException | None = None
        self.workers = Workers(engine_factory, helpers, copier)
        chunks = Staging(staging, chunk_nbytes)
        self.pieces = Pieces(store, chunks, copier, verify, ended.mark_finished, ended.rest)
        self._pid = os.getpid()
        self._inbox: list[tuple[Message, FileTransfer, Job | None]] = []
        self._taking = False
        self._closing = False
        self._started = threading.Event()
        self._brisk = False
        self._thread = threading.Thread(
            target=self._run, args=(store, staging), name="tiermem-file-pump", daemon=True
        )

    # Called by other threads ---------------------------------------------------------

    def start(self) -> None:
        """Starts the thread and waits for its engine.

        Raises:
            BaseException: The error that prevented the creation of the engine.
        """
        # The kernel must have finished with staging before the interpreter frees it.
        atexit.register(self.close)
        try:
            start_threads([self._thread])
            self._started.wait()
        except BaseException:  # Ctrl-C: only this call can end the thread
            self.ask_to_close()
            if self._thread.ident is None:
                atexit.unregister(self.close)
            raise
        if self.dead is not None:
            self._thread.join()
            raise self.dead

    def start_job(self, job: Job) -> bool:
        """Passes a job to the pump; returns whether the pump still runs."""
        return self._post(Message.START, job.transfer, job)

    def cancel(self, transfer: FileTransfer) -> None:
        """Requests that a transfer be stopped."""
        self._post(Message.CANCEL, transfer, None)

    def land(self, job: Job) -> None:
        """Gives a read without a target that of ``job``."""
        self._post(Message.LAND, job.transfer, job)

    def hurry(self, transfer: FileTransfer) -> None:
        """Requests priority for a transfer, because a caller waits for it."""
        self._post(Message.HURRY, transfer, None)

    def _post(self, message: Message, transfer: FileTransfer, job: Job | None) -> bool:
        with self.ended.lock:
            if self._closing:
                raise ClosedError("the file mover is closed")
            if self.dead is not None:
                return False
            if not self._inbox:
                # First: a Ctrl-C after it costs one check. In the other order it would leave
                # a message that is never read.
                self.workers.engine.wake()
            self._inbox.append((message, transfer, job))
            return True

    def at_work(self) -> bool:
        """Whether a transfer that has a target has not ended; called under the lock."""
        if self.dead is not None or not self._thread.is_alive():
            return False
        if self._inbox or self._taking:
            return True
        # one that has ended has no target any more, and is about to be marked as ended
        jobs = list(self.pieces.queue.jobs.values())
        return any(job.tensor is not None or job.over for job in jobs)

    def ask_to_close(self) -> None:
        """Asks the thread to end; never blocks, so that a garbage collection may call it."""
        if os.getpid() != self._pid:
            return
        with self.ended.lock:
            self._closing = True
            if self.dead is None and self.workers.name and self._thread.is_alive():
                self.workers.engine.wake()

    def close(self) -> None:
        """Cancels everything, ends the threads and the engine; in a forked child does nothing."""
        if os.getpid() != self._pid:
            return
        self.ask_to_close()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def engine_now(self) -> tuple[str, str]:
        """Returns the engine's name, and why another one than chosen is used, or ""."""
        engine = self.workers.engine
        return engine.name, engine.note

    def forked(self) -> None:
        """Closes the engine's descriptors in a forked child, which has no such thread."""
        self.workers.forked()

    # The thread ----------------------------------------------------------------------

    def _run(self, store: FileStore, staging: torch.Tensor) -> None:
        workers = self.workers
        try:
            workers.make()
        except BaseException as error:
            self.dead = error
            self._started.set()
            atexit.unregister(self.close)
            return
        self.pieces.engine, self.pieces.helpers = workers.engine, workers.helpers
        cause: BaseException | None = None
        try:
            workers.open(store.fds, (staging.data_ptr(), staging.numel()))
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
        moved = False
        while self._begin_turn():
            moved |= self.pieces.look_at_fences()
            look = _FIRST_LOOK if moved else min(2 * look, _LAST_LOOK)
            moved = self._end_turn(look)

    def _begin_turn(self) -> bool:
        """Processes the requests of others; returns whether to continue."""
        self._read_inbox()
        return not self._closing

    def _end_turn(self, look: float) -> bool:
        """Begins what can be begun and waits for the next end; returns whether anything has ended.

        Args:
            look: Seconds until the next check of copies, if something waits for one.
        """
        pieces, helpers = self.pieces, self.workers.helpers
        pieces.begin()
        self._set_brisk(pieces.at_work)
        helpers.eager = pieces.needs_helpers
        helped = helpers.collect()  # what is done after this line wakes the engine
        completions = self.workers.engine.wait(0) if helped else self._wait(look)
        if completions:
            pieces.begin()  # the disk is given its next work before anything else
            pieces.complete(completions)
        pieces.helped(helped)
        return bool(completions or helped)

    def _wait(self, look: float) -> list[IoCompletion]:
        """Waits for the next end: of an operation, a helper's work, or an asynchronous copy.

        The latter cannot wake the engine. So such copies are checked whenever something else
        ends, from time to time if something waits for them, and waited for if nothing else can
        happen.
        """
        before = time.perf_counter_ns()
        fence = self.pieces.last_fence()
        completions: list[IoCompletion] = []
        if fence is not None:
            fence.wait()
        else:
            completions = self.workers.engine.wait(look if self.pieces.needs_fence else None)
        self.pieces.counters.wait_ns += time.perf_counter_ns() - before
        return completions

    def _set_brisk(self, brisk: bool) -> None:
        if brisk != self._brisk:
            self._brisk = brisk
            (switch_interval.shorten if brisk else switch_interval.restore)()

    def _read_inbox(self) -> None:
        with self.ended.lock:
            messages, self._inbox = self._inbox, []
            self._taking = bool(messages)
        for message, transfer, job in messages:
            if message is Message.START and job is not None:
                self.pieces.add(job)
                continue
            known = self.pieces.queue.jobs.get(transfer)
            if known is None:
                continue
            if message is Message.CANCEL:
                self.pieces.cancel(known)
            elif message is Message.HURRY:
                self.pieces.queue.hurry(known)
            elif job is not None and job.tensor is not None:
                self.pieces.land(known, job.tensor, job.after, job.urgent)
        self._taking = False

    # The end -------------------------------------------------------------------------

    def _end(self, cause: BaseException | None) -> None:
        """Ends the helpers and the engine, then fails the remaining transfers.

        After that no memory is accessed.
        """
        failed = self.workers.close()
        cause = cause or failed
        for chunk in self.pieces.copies.chunks:
            if chunk.fence is not None:
                with contextlib.suppress(Exception):  # a broken device fails every copy
                    chunk.fence.wait()
        with self.ended.lock:
            if cause is not None:
                self.dead = cause
            self._closing = self._closing or cause is None
            left = [job for what, _, job in self._inbox if job and what is Message.START]
            self._inbox.clear()
        for job in [*self.pieces.clear(), *left]:
            self.ended.mark_finished(job.transfer, job.error or failure(job.transfer, cause))
        self._set_brisk(False)


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
