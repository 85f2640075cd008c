"""Moves extents between the swap file and memory, on its own threads."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tiermem.core.block import Extent
from tiermem.errors import ClosedError
from tiermem.io.engine import IoEngine
from tiermem.storage.files import FileStore
from tiermem.transfer.driver import Signal
from tiermem.transfer.file.copiers import ChunkCopier, Fence, HostCopier, check_tensor
from tiermem.transfer.file.helpers import HelperFactory
from tiermem.transfer.file.jobs import FileTransfer, Job
from tiermem.transfer.file.pump import Pump, failure
from tiermem.transfer.file.staging import check_staging
from tiermem.transfer.file.switching import switch_interval

__all__ = [
    "ChunkCopier",
    "Fence",
    "FileMover",
    "FileTransfer",
    "HostCopier",
    "MoverStats",
]


@dataclass(frozen=True, slots=True)
class MoverStats:
    """Statistics of a file mover since its creation.

    Attributes:
        engine: Name of the I/O engine.
        engine_detail: How it runs (flags, registrations, threads).
        bytes_read: Bytes read from the files.
        bytes_written: Bytes written to the files.
        bytes_direct: Those of them that were transferred directly between file and host memory.
        failed: Transfers that ended with an error.
        checksum_seconds: Time of the helper threads in checksums, summed.
        copy_seconds: Time of the helper threads in copies, and of the pump in starting
            asynchronous ones.
        wait_seconds: Time that the pump waited for I/O, fences or work.
    """

    engine: str
    engine_detail: str
    bytes_read: int
    bytes_written: int
    bytes_direct: int
    failed: int
    checksum_seconds: float
    copy_seconds: float
    wait_seconds: float


_LOOK = 0.01


class FileMover:
    """Moves extents between a swap file and memory. Close it before its store.

    One thread creates and owns the I/O engine; helper threads compute checksums and copy
    host memory. Pieces of several transfers are in flight at once; each is copied
    to its target as soon as it has been read. A read has succeeded only if every checksum was
    right; if not, bytes on a GPU may be wrong, while host memory never gets wrong ones. Transfers
    of the same bytes run in the order of submission.

    Args:
        store: The swap file, or several stores in one.
        engine_factory: Creates the engine (see :func:`tiermem.io.choose_engine`).
        staging: Host memory, uint8, 1-D, page-aligned, a whole number of chunks.
        chunk_nbytes: Bytes of a staging chunk, at least the store's chunk.
        copier: Copies chunks to targets; host memory by default.
        verify: Whether every piece is checked against the checksum of its write.
        helpers: Creates the threads for checksums and host copies; one to four by default,
            by the number of cores.

    Raises:
        ConfigError: If the staging memory does not fit.
        OSError: If the engine cannot be created.
    """

    def __init__(
        self,
        store: FileStore,
        engine_factory: Callable[[], IoEngine],
        staging: torch.Tensor,
        chunk_nbytes: int,
        copier: ChunkCopier | None = None,
        verify: bool = True,
        helpers: HelperFactory | None = None,
    ) -> None:
        check_staging(staging, chunk_nbytes, store.chunk_nbytes)
        self._pid = os.getpid()
        self._closed = False
        self._store = store
        copier = HostCopier() if copier is None else copier
        self._parks = not isinstance(copier, HostCopier)
        self._pump = Pump(store, engine_factory, staging, chunk_nbytes, copier, verify, helpers)
        # The thread refers to the pump, not to this object: freeing a forgotten mover ends it, also
        # one whose creation a Ctrl-C interrupted.
        self._finalizer = weakref.finalize(self, self._pump.ask_to_close)
        self._finalizer.atexit = False
        self._pump.start()

    def __enter__(self) -> FileMover:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(
        self,
        extent: Extent,
        target: torch.Tensor,
        *,
        label: str,
        urgent: bool = False,
        in_place: bool = False,
        after: Sequence[Signal] = (),
    ) -> FileTransfer:
        """Starts reading an extent.

        Args:
            extent: Where the bytes are, as allocated and written.
            target: 1-D contiguous uint8, ``extent.nbytes`` long; must not be used until
                the transfer has finished.
            label: Name of the block, for messages.
            urgent: Whether it has priority over those that are not urgent.
            in_place: Whether the disk may read directly into the target, which must be host
                memory, and has wrong bytes if the transfer ends with an error.
            after: Events of other users of the target, for the copier to wait for.

        Returns:
            The transfer in progress.

        Raises:
            ValueError: If the target does not fit, or is not host memory for a read in place.
            ClosedError: If the mover is closed or belongs to another process.
        """
        if in_place and target.device.type != "cpu":
            raise ValueError(f"a read in place needs host memory, not {target.device}")
        transfer = FileTransfer(extent, is_read=True, label=label, urgent=urgent, in_place=in_place)
        return self._start(transfer, target, after)

    @property
    def parks(self) -> bool:
        """Whether reads may begin without a target: if the copier supports it."""
        return self._parks

    def park(self, extent: Extent, *, label: str) -> FileTransfer:
        """Starts reading an extent that has no target yet.

        The disk reads it when it has no other work. At most half of the staging chunks hold
        such reads; the rest is read once there is a target. A later write of the same bytes
        cancels it.

        Args:
            extent: Where the bytes are.
            label: Name of the block, for messages.

        Returns:
            The transfer in progress, for :meth:`land` or :meth:`cancel`.

        Raises:
            ValueError: If the mover copies between host tensors only.
            ClosedError: If the mover is closed or belongs to another process.
        """
        if not self._parks:
            raise ValueError("host memory is read into where it lies: there is nothing to park")
        transfer = FileTransfer(extent, is_read=True, label=label, urgent=False)
        return self._start(transfer, None)

    def land(
        self,
        transfer: FileTransfer,
        target: torch.Tensor,
        *,
        urgent: bool = False,
        after: Sequence[Signal] = (),
    ) -> FileTransfer:
        """Gives a parked read its target; then it is like any other.

        Args:
            transfer: The result of :meth:`park`.
            target: See :meth:`read`.
            urgent: Whether the rest of it has priority over those that are not urgent.
            after: Events of other users of the target, for the copier to wait for.

        Returns:
            The same transfer; one that has ended with an error is not changed.

        Raises:
            ValueError: If the target does not fit.
            ClosedError: If the mover is closed or belongs to another process.
        """
        self._check_usable()
        check_tensor(target, transfer.nbytes)
        transfer.urgent = urgent
        self._pump.land(Job(transfer, target, [], after))
        return transfer

    def write(self, extent: Extent, source: torch.Tensor, *, label: str) -> FileTransfer:
        """Starts writing an extent; see :meth:`read`.

        The source must not change until the transfer has finished: host memory aligned to
        4,096 bytes is written in place. A change would be detected when it is read.
        """
        transfer = FileTransfer(extent, is_read=False, label=label, urgent=False)
        return self._start(transfer, source)

    def _start(
        self, transfer: FileTransfer, tensor: torch.Tensor | None, after: Sequence[Signal] = ()
    ) -> FileTransfer:
        self._check_usable()
        if tensor is not None:
            check_tensor(tensor, transfer.nbytes)
        job = Job(transfer, tensor, self._store.pieces(transfer.extent), after)
        if not self._pump.start_job(job):
            self._pump.ended.mark_finished(transfer, failure(transfer, self._pump.dead))
        return transfer

    def poll(self) -> list[FileTransfer]:
        """Returns the transfers that finished since the last call; never blocks.

        Raises:
            ClosedError: If the mover belongs to another process.
        """
        self._check_process()
        finished = self._pump.ended.finished
        return [finished.popleft() for _ in range(len(finished))]

    def wait(self, transfer: FileTransfer, *, hurry: bool = True) -> None:
        """Blocks, without the GIL, until a transfer has finished; Ctrl-C interrupts it.

        Its error is not raised: see ``transfer.error``.

        Args:
            transfer: The transfer.
            hurry: Whether it has priority over others from now on.

        Raises:
            ClosedError: If the mover belongs to another process.
        """
        self._check_process()
        if hurry and not (transfer.finished or transfer.urgent or self._closed):
            with contextlib.suppress(ClosedError):  # closing finishes it, too
                self._pump.hurry(transfer)
        with self._pump.ended.lock:  # always taken: after it, poll() returns the transfer, too
            while not transfer.finished:
                self._pump.ended.changed.wait()

    def rest(self, transfer: FileTransfer) -> None:
        """Blocks, without the GIL, until a parked read waits for its target only, or has ended.

        Raises:
            ClosedError: If the mover belongs to another process.
        """
        self._check_process()
        with self._pump.ended.lock:
            while not (transfer.rests or transfer.finished):
                self._pump.ended.changed.wait()

    def wait_all(self) -> None:
        """Blocks, without the GIL, until only reads that wait for a target are in progress.

        This includes transfers to which the caller has no reference because of an exception.

        Raises:
            ClosedError: If the mover belongs to another process.
        """
        self._check_process()
        with self._pump.ended.lock:
            while self._pump.at_work():
                self._pump.ended.changed.wait(_LOOK)

    def wait_any(self, transfers: Sequence[FileTransfer]) -> None:
        """Blocks, without the GIL, until one of several has finished; changes no priorities.

        Raises:
            ClosedError: If the mover belongs to another process.
        """
        self._check_process()
        with self._pump.ended.lock:
            while not any(transfer.finished for transfer in transfers):
                self._pump.ended.changed.wait()

    def cancel(self, transfer: FileTransfer) -> None:
        """Skips the pieces not begun; the transfer then finishes with ECANCELED, or completely.

        Raises:
            ClosedError: If the mover is closed or belongs to another process.
        """
        self._check_usable()
        if not transfer.finished:
            self._pump.cancel(transfer)

    @property
    def engine(self) -> tuple[str, str]:
        """Name of the I/O engine in use, and why another one than chosen is used, or ""."""
        return self._pump.engine_now()

    def stats(self) -> MoverStats:
        """Returns the statistics so far."""
        self._check_process()
        counters = self._pump.pieces.counters
        return MoverStats(
            engine=self.engine[0],
            engine_detail=self._pump.workers.detail,
            bytes_read=counters.bytes_read,
            bytes_written=counters.bytes_written,
            bytes_direct=counters.bytes_direct,
            failed=self._pump.ended.failed,
            checksum_seconds=counters.checksum_ns / 1e9,
            copy_seconds=counters.copy_ns / 1e9,
            wait_seconds=counters.wait_ns / 1e9,
        )

    def close(self) -> None:
        """Cancels all transfers, ends the thread and its engine.

        Works in any state and any number of times; in a forked child it does nothing.
        """
        self._closed = True
        self._pump.close()

    def forked(self) -> None:
        """Closes the engine's descriptors in a forked child."""
        self._closed = True
        self._pump.forked()
        switch_interval.forked()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                "this file mover belongs to the parent process: after fork the child must "
                "make its own TierManager"
            )

    def _check_usable(self) -> None:
        self._check_process()
        if self._closed:
            raise ClosedError("the file mover is closed")
