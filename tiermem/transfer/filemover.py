"""Moves extents between the swap file and memory, on a thread of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tiermem.core.block import ALIGNMENT, Extent
from tiermem.errors import ClosedError, ConfigError
from tiermem.io.engine import IoEngine
from tiermem.storage.swapfile import SwapFile
from tiermem.transfer.filejobs import FileTransfer, Job
from tiermem.transfer.filepump import ChunkCopier, Fence, Pump, failure

__all__ = [
    "ChunkCopier",
    "Fence",
    "FileMover",
    "FileTransfer",
    "HostCopier",
    "MoverStats",
]


class _Done:
    """A fence that is done from the start."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


_DONE = _Done()


class HostCopier:
    """Copies between host tensors, at once.

    A plain ``memmove``: torch's own copy would start a team of threads for the
    pump, and would raise the version counter of tensors that autograd has saved.
    """

    def to_target(self, target: torch.Tensor, staging: torch.Tensor) -> Fence:
        """Copies out of staging."""
        ctypes.memmove(target.data_ptr(), staging.data_ptr(), target.numel())
        return _DONE

    def from_source(self, staging: torch.Tensor, source: torch.Tensor) -> Fence:
        """Copies into staging."""
        ctypes.memmove(staging.data_ptr(), source.data_ptr(), source.numel())
        return _DONE


@dataclass(frozen=True, slots=True)
class MoverStats:
    """What a file mover has done since it was made.

    Attributes:
        engine: Name of the I/O engine.
        engine_detail: How it runs (flags, registrations, threads).
        bytes_read: Bytes read from the files.
        bytes_written: Bytes written to the files.
        failed: Transfers that ended with an error.
        checksum_seconds: Time of the pump in checksums.
        copy_seconds: Time of the pump in copies (or in starting them).
        wait_seconds: Time of the pump waiting for I/O, fences or work.
    """

    engine: str
    engine_detail: str
    bytes_read: int
    bytes_written: int
    failed: int
    checksum_seconds: float
    copy_seconds: float
    wait_seconds: float


class FileMover:
    """The pump between a swap file and memory. Close it before its store.

    One thread makes and owns the I/O engine. Pieces of several transfers are in
    flight at once; each goes on to its target as soon as it is in and its checksum
    is right. Transfers that touch the same bytes run in the order of submission.

    Args:
        store: The swap file.
        engine_factory: Makes the engine (see :func:`tiermem.io.choose_engine`).
        staging: Host memory, uint8, 1-D, page-aligned, a whole number of chunks.
        chunk_nbytes: Bytes of a staging chunk, at least the store's chunk.
        copier: How chunks are copied on; host memory by default.
        verify: Whether every piece is checked against the checksum of its write.

    Raises:
        ConfigError: If the staging memory does not fit.
        OSError: If the engine cannot be made.
    """

    def __init__(
        self,
        store: SwapFile,
        engine_factory: Callable[[], IoEngine],
        staging: torch.Tensor,
        chunk_nbytes: int,
        copier: ChunkCopier | None = None,
        verify: bool = True,
    ) -> None:
        _check_staging(staging, chunk_nbytes, store.chunk_nbytes)
        self._pid = os.getpid()
        self._closed = False
        self._store = store
        copier = HostCopier() if copier is None else copier
        self._pump = Pump(store, engine_factory, staging, chunk_nbytes, copier, verify)
        self._pump.start()
        # The thread holds the pump, not this object: a forgotten mover still ends it.
        self._finalizer = weakref.finalize(self, self._pump.ask_to_close)
        self._finalizer.atexit = False

    def __enter__(self) -> FileMover:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(
        self, extent: Extent, target: torch.Tensor, *, label: str, urgent: bool = False
    ) -> FileTransfer:
        """Starts reading an extent.

        Args:
            extent: Where the bytes are, as allocated and written.
            target: 1-D contiguous uint8, ``extent.nbytes`` long; not to be touched until
                the transfer has finished.
            label: Name of the block, for messages.
            urgent: Whether it goes before everything that is not.

        Returns:
            The transfer under way.

        Raises:
            ValueError: If the target does not fit.
            ClosedError: If the mover is closed or belongs to another process.
        """
        transfer = FileTransfer(extent, is_read=True, label=label, urgent=urgent)
        return self._start(transfer, target)

    def write(self, extent: Extent, source: torch.Tensor, *, label: str) -> FileTransfer:
        """Starts writing an extent; see :meth:`read`. The source must not change meanwhile."""
        transfer = FileTransfer(extent, is_read=False, label=label, urgent=False)
        return self._start(transfer, source)

    def _start(self, transfer: FileTransfer, tensor: torch.Tensor) -> FileTransfer:
        self._check_usable()
        _check_tensor(tensor, transfer.nbytes)
        job = Job(transfer, tensor, self._store.pieces(transfer.extent))
        if not self._pump.start_job(job):
            self._pump.settle(transfer, failure(transfer, self._pump.dead))
        return transfer

    def poll(self) -> list[FileTransfer]:
        """Returns the transfers that finished since the last call; never blocks.

        Raises:
            ClosedError: If the mover belongs to another process.
        """
        self._check_process()
        finished = self._pump.finished
        return [finished.popleft() for _ in range(len(finished))]

    def wait(self, transfer: FileTransfer) -> None:
        """Blocks, without the GIL, until a transfer has finished; Ctrl-C gets through.

        From now on it goes before others. Its error is not raised: see ``transfer.error``.

        Raises:
            ClosedError: If the mover belongs to another process.
        """
        self._check_process()
        if transfer.finished:
            return
        if not (transfer.urgent or self._closed):
            with contextlib.suppress(ClosedError):  # closing finishes it as well
                self._pump.hurry(transfer)
        changed = self._pump.changed
        with changed:
            while not transfer.finished:
                changed.wait()

    def cancel(self, transfer: FileTransfer) -> None:
        """Leaves out the pieces not begun; it then finishes with ECANCELED, or in whole.

        Raises:
            ClosedError: If the mover is closed or belongs to another process.
        """
        self._check_usable()
        if not transfer.finished:
            self._pump.cancel(transfer)

    def stats(self) -> MoverStats:
        """Returns what was done so far."""
        self._check_process()
        counters = self._pump.counters
        return MoverStats(
            engine=self._pump.engine_name,
            engine_detail=self._pump.engine_detail,
            bytes_read=counters.bytes_read,
            bytes_written=counters.bytes_written,
            failed=counters.failed,
            checksum_seconds=counters.checksum_ns / 1e9,
            copy_seconds=counters.copy_ns / 1e9,
            wait_seconds=counters.wait_ns / 1e9,
        )

    def close(self) -> None:
        """Cancels what is under way, ends the thread and its engine.

        Works in any state and any number of times; in a forked child it does nothing.
        """
        self._closed = True
        self._pump.close()

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


def _check_staging(staging: torch.Tensor, chunk_nbytes: int, store_chunk: int) -> None:
    if chunk_nbytes < store_chunk or chunk_nbytes % ALIGNMENT:
        raise ConfigError(
            f"staging chunks of {chunk_nbytes} bytes do not fit: at least {store_chunk}, "
            f"and a multiple of {ALIGNMENT}, is needed"
        )
    _check_tensor(staging, staging.numel())
    if staging.device.type != "cpu" or staging.data_ptr() % ALIGNMENT:
        raise ConfigError(f"staging must be host memory aligned to {ALIGNMENT} bytes")
    if staging.numel() < chunk_nbytes or staging.numel() % chunk_nbytes:
        raise ConfigError(
            f"staging of {staging.numel()} bytes is no whole number of chunks of {chunk_nbytes}"
        )


def _check_tensor(tensor: torch.Tensor, nbytes: int) -> None:
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError("a file transfer takes a contiguous 1-D uint8 tensor")
    if tensor.numel() != nbytes:
        raise ValueError(f"the tensor has {tensor.numel()} bytes, the extent {nbytes}")
