"""Reads tensors of a checkpoint in a known order: ahead, past the page cache, and with checks."""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from tiermem.errors import IntegrityError, InvariantError, StorageError
from tiermem.saving.copies import copy_bytes
from tiermem.saving.layout import PAGE, Spec, bytes_of
from tiermem.saving.writer import CHUNK, Checks
from tiermem.storage.checksum import checksum

_THREADS = 6
_AHEAD = 12


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file.

    Attributes:
        spec: Name, dtype and shape.
        path: The file.
        offset: Its first byte there.
        fd: The file's descriptor, which bypasses the page cache if the file system can.
    """

    spec: Spec
    path: str
    offset: int
    fd: int


@dataclass(frozen=True, slots=True)
class Need:
    """A run of a tensor's bytes that will be requested."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _Read:
    """A run that has a checksum.

    Attributes:
        name: Name of the tensor.
        begin: Its first byte in the tensor.
        nbytes: Its bytes.
        digest: The expected checksum.
    """

    name: str
    begin: int
    nbytes: int
    digest: str


class TensorReader:
    """Reads the bytes of tensors in the order in which they were announced."""

    def __init__(self, stored: Mapping[str, Stored], checks: Checks, needs: Sequence[Need]) -> None:
        """Begins to read.

        Args:
            stored: Where the tensors are.
            checks: Their checksums; the runs of a tensor cover all of it.
            needs: What will be requested, in order.
        """
        self._stored = stored
        self._needs = deque(needs)
        self._reads = self._divide(checks, needs)
        self._under_way: deque[tuple[_Read, Future[tuple[mmap.mmap, int]]]] = deque()
        self._free: SimpleQueue[mmap.mmap] = SimpleQueue()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tiermem-load")

    @staticmethod
    def _divide(checks: Checks, needs: Sequence[Need]) -> Iterator[_Read]:
        """Yields the runs that are read for what is needed, in order."""
        for need in needs:
            begin = 0
            for nbytes, digest in checks[need.name]:
                if begin < need.end and begin + nbytes > need.begin:
                    yield _Read(need.name, begin, nbytes, digest)
                begin += nbytes

    def into(self, name: str, target: torch.Tensor, begin: int = 0) -> None:
        """Fills a tensor with the next run.

        Args:
            name: Name of the tensor in the checkpoint.
            target: The tensor to fill, on any device.
            begin: The first byte of the checkpoint's tensor that belongs there.

        Raises:
            StorageError: If it cannot be read.
            IntegrityError: If it differs from what was written.
        """
        flat = bytes_of(target)
        need = Need(name, begin, begin + flat.numel())
        if not self._needs or self._needs.popleft() != need:
            raise InvariantError(f"{need} was not announced as what is read next")
        while begin < need.end:
            read, memory, at = self._next()
            if read.name != name or not read.begin <= begin < read.begin + read.nbytes:
                raise InvariantError(f"{read} came where {need} was to come")
            take = min(need.end, read.begin + read.nbytes) - begin
            first = at + begin - read.begin
            source = torch.frombuffer(memory, dtype=torch.uint8, count=take, offset=first)
            copy_bytes(flat[begin - need.begin :][:take], source)
            del source
            self._free.put(memory)
            begin += take
        if flat.data_ptr() != target.data_ptr():  # it has other strides
            target.copy_(flat.view(target.dtype).view(target.shape))

    def tensor(self, name: str) -> torch.Tensor:
        """Returns the next tensor, in host memory."""
        spec = self._stored[name].spec
        found = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
        self.into(name, found)
        return found

    def _next(self) -> tuple[_Read, mmap.mmap, int]:
        """Returns the next run: its description, its memory, and its first byte there."""
        while len(self._under_way) < _AHEAD and (read := next(self._reads, None)) is not None:
            self._under_way.append((read, self._pool.submit(self._read, read)))
        read, future = self._under_way.popleft()
        return read, *future.result()

    def _read(self, read: _Read) -> tuple[mmap.mmap, int]:
        """Reads and checks a run; in a thread."""
        stored = self._stored[read.name]
        offset = stored.offset + read.begin
        start = offset // PAGE * PAGE
        memory = self._memory()
        try:
            self._fill(stored.fd, memory, start, offset + read.nbytes)
            at = offset - start
            with memoryview(memory) as view, view[at : at + read.nbytes] as part:
                found = f"{checksum(part, read.nbytes):016x}"
        except OSError as error:
            raise StorageError(
                f"tensor {read.name!r} of a checkpoint cannot be read",
                kind="checkpoint", path=stored.path, offset=offset, nbytes=read.nbytes,
                errno=error.errno,
            ) from error  # fmt: skip
        if found != read.digest:
            raise IntegrityError(
                f"tensor {read.name!r} of a checkpoint is not what was written: its checksum is "
                f"{found}, not {read.digest}",
                kind="checkpoint", path=stored.path, offset=offset, nbytes=read.nbytes,
            )  # fmt: skip
        return memory, at

    def _fill(self, fd: int, memory: mmap.mmap, start: int, end: int) -> None:
        whole = -(-(end - start) // PAGE) * PAGE
        done = 0
        while start + done < end:
            with memoryview(memory) as view, view[done:whole] as part:
                got = os.preadv(fd, [part], start + done)
            if got <= 0:
                raise OSError(None, "the file has ended")
            done += got
            if start + done < end and done % PAGE:
                done = done // PAGE * PAGE  # direct reads begin at pages

    def _memory(self) -> mmap.mmap:
        if not self._free.empty():
            with suppress(Exception):
                return self._free.get_nowait()
        return mmap.mmap(-1, CHUNK + 2 * PAGE)

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(cancel_futures=True)
