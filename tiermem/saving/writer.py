"""Writes the files of a checkpoint: any tensor at any time, in large direct writes, by threads.

The calling thread copies a tensor's bytes into a chunk, which is a run of a file; full chunks are
hashed and written by threads meanwhile. Whole pages bypass the page cache (O_DIRECT), if the
file system can; the rest at the edges of a run goes through it. No page is written both ways.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from tiermem.errors import InvariantError
from tiermem.saving.copies import copy_bytes
from tiermem.saving.files import FileOperations, write_all
from tiermem.saving.layout import PAGE, FilePlan, bytes_of
from tiermem.storage.checksum import checksum

CHUNK = 8 << 20
_CHUNKS = 10
_OPEN = 4
_THREADS = 6
"""With four, each of which hashes before it writes, only three wrote for a fifth of the time."""

Checks = dict[str, list[tuple[int, str]]]
"""For each tensor: the lengths of runs of its bytes, in order, and their checksums."""


@dataclass(slots=True, eq=False)
class _File:
    """An open file: through the page cache, and bypassing it if possible."""

    fd: int
    direct: int | None = None


@dataclass(slots=True, eq=False)
class _Chunk:
    """A run of a file that is being filled.

    Attributes:
        file: The file.
        start: File offset of the memory's first byte, at a page.
        begin: The first byte of the run.
        end: The end, exclusive.
        memory: ``CHUNK`` bytes.
        pieces: Tensor, first byte in it, first byte in the memory, and bytes.
    """

    file: _File
    start: int
    begin: int
    end: int
    memory: mmap.mmap
    pieces: list[tuple[str, int, int, int]] = field(default_factory=list)


class TensorWriter:
    """Writes tensors to their places in a plan; for one thread at a time."""

    def __init__(self, files: FileOperations, folder: str, plans: Sequence[FilePlan]) -> None:
        """Creates the files, with their space reserved and their headers written.

        Args:
            files: The file system.
            folder: Folder of the checkpoint that is written.
            plans: The files; their folders exist.

        Raises:
            OSError: If they cannot be created.
        """
        self._files = files
        self._place: dict[str, tuple[_File, int]] = {}
        self._all: list[_File] = []
        self._open: list[_Chunk] = []
        self._found: dict[str, list[tuple[int, int, str]]] = {}
        self._left = {spec.key: spec.nbytes for plan in plans for spec in plan.specs}
        self._pending: list[Future[None]] = []
        self._free: SimpleQueue[mmap.mmap] = SimpleQueue()
        self._made = 0
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tiermem-save")
        try:
            for plan in plans:
                self._begin(os.path.join(folder, plan.path), plan)
        except BaseException:
            self.close()
            raise

    def _begin(self, path: str, plan: FilePlan) -> None:
        fd = self._files.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        file = _File(fd)
        self._all.append(file)
        self._files.reserve(fd, plan.nbytes)
        with suppress(OSError):  # the file system does not support direct writes
            file.direct = self._files.open(path, os.O_WRONLY | os.O_DIRECT)
        write_all(self._files, fd, memoryview(plan.header), 0)
        for spec in plan.specs:
            self._place[spec.key] = file, plan.offsets[spec.name]

    def put(self, name: str, begin: int, tensor: torch.Tensor) -> None:
        """Copies bytes of a tensor; they are not read any more when this returns.

        Args:
            name: Name of the tensor in the checkpoint.
            begin: The first byte, in the tensor as it is in the file.
            tensor: The run's elements, on any device.

        Raises:
            OSError: If earlier bytes could not be written.
        """
        self._take_up()
        file, offset = self._place[name]
        flat = bytes_of(tensor)
        offset += begin
        done, nbytes = 0, flat.numel()
        while done < nbytes:
            chunk = self._chunk_at(file, offset + done)
            take = min(nbytes - done, chunk.start + CHUNK - chunk.end)
            at = chunk.end - chunk.start
            target = torch.frombuffer(chunk.memory, dtype=torch.uint8, count=take, offset=at)
            copy_bytes(target, flat[done : done + take])
            chunk.pieces.append((name, begin + done, at, take))
            chunk.end += take
            done += take
            if chunk.end == chunk.start + CHUNK:
                self._open.remove(chunk)
                self._submit(chunk)

    def _chunk_at(self, file: _File, offset: int) -> _Chunk:
        """Returns the chunk whose run continues at an offset, or a new one."""
        for chunk in self._open:
            if chunk.file is file and chunk.end == offset:
                return chunk
        if len(self._open) == _OPEN:
            self._submit(self._open.pop(0))
        if self._made < _CHUNKS and self._free.empty():
            self._made += 1
            memory = mmap.mmap(-1, CHUNK)
        else:
            memory = self._free.get()
        start = offset // PAGE * PAGE
        chunk = _Chunk(file, start, offset, offset, memory)
        self._open.append(chunk)
        return chunk

    def _submit(self, chunk: _Chunk) -> None:
        self._pending.append(self._pool.submit(self._write, chunk))

    def _write(self, chunk: _Chunk) -> None:
        """Hashes and writes a chunk; in a thread."""
        try:
            view = memoryview(chunk.memory)
            for name, begin, at, nbytes in chunk.pieces:
                digest = f"{checksum(view[at : at + nbytes], nbytes):016x}"
                self._found.setdefault(name, []).append((begin, nbytes, digest))
            file, start = chunk.file, chunk.start
            first, last = -(-chunk.begin // PAGE) * PAGE, chunk.end // PAGE * PAGE
            if file.direct is None or first >= last:
                first = last = chunk.end
            else:
                part = view[first - start : last - start]
                self._write_direct(file, file.direct, part, first)
            for begin, end in ((chunk.begin, first), (last, chunk.end)):
                write_all(self._files, file.fd, view[begin - start : end - start], begin)
        finally:
            self._free.put(chunk.memory)

    def _write_direct(self, file: _File, fd: int, data: memoryview, offset: int) -> None:
        """Writes whole pages past the page cache, or through it if direct writes fail."""
        while data.nbytes:
            try:
                done = self._files.write(fd, data, offset) // PAGE * PAGE
            except OSError as error:
                if error.errno != errno.EINVAL:  # it requires other addresses than pages
                    raise
                done = 0
            if not done:
                write_all(self._files, file.fd, data, offset)
                return
            data, offset = data[done:], offset + done

    def _take_up(self) -> None:
        """Raises the error of a thread, if there was one."""
        while self._pending and self._pending[0].done():
            self._pending.pop(0).result()

    def finish(self) -> Checks:
        """Writes the rest, and syncs everything to the disk.

        Returns:
            The checksums.

        Raises:
            OSError: If that fails.
            InvariantError: If not all tensors were passed.
        """
        while self._open:
            self._submit(self._open.pop(0))
        while self._pending:
            self._pending.pop(0).result()
        checks: Checks = {}
        for name, nbytes in self._left.items():
            runs = sorted(self._found.get(name, ()))
            if sum(n for _, n, _ in runs) != nbytes or not _follow(runs):
                raise InvariantError(f"tensor {name!r} was not written as a whole")
            checks[name] = [(n, digest) for _, n, digest in runs]
        for file in self._all:
            self._files.sync(file.fd)
            with suppress(OSError):
                os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self.close()
        return checks

    def close(self) -> None:
        """Ends the threads and closes the files, written or not; a second call does nothing."""
        with ExitStack() as stack:
            while self._all:
                file = self._all.pop()
                stack.callback(self._files.close, file.fd)
                if file.direct is not None:
                    stack.callback(self._files.close, file.direct)
            stack.callback(self._pool.shutdown, cancel_futures=True)


def _follow(runs: Sequence[tuple[int, int, str]]) -> bool:
    """Whether runs of bytes follow one another beginning at the first byte."""
    end = 0
    for begin, nbytes, _ in runs:
        if begin != end:
            return False
        end += nbytes
    return True
