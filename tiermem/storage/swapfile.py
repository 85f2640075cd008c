"""The NVMe store: preallocated files without a name, striped over one or several folders.

Byte ``i`` of the store is in stripe ``i // chunk``; stripes alternate between the files,
so one extent is read from all disks at once. The files have no name, so nothing is left behind
however the process ends.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from tiermem.config import exact_size, format_size
from tiermem.core.block import ALIGNMENT, Extent, align_up
from tiermem.errors import CapacityError, ClosedError, ConfigError, StorageError
from tiermem.storage import nameless
from tiermem.storage.files import Piece, PieceSum
from tiermem.storage.freelist import FreeList

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SwapFile:
    """Space in nameless files on fast disks.

    Args:
        paths: Folders, one file in each.
        capacity_limit: Maximal bytes it may reserve; ``None`` for no limit but the disks.
        chunk_nbytes: Stripe length and maximal bytes of a piece; a multiple of 4,096.

    Attributes:
        chunk_nbytes: As given.
        capacity_limit: As given.
        direct: Whether every file bypasses the page cache (O_DIRECT).
        direct_reason: One sentence on why, or why not.
        sums: The checksum index, by the offset of each piece in the store.

    Raises:
        ConfigError: If a path or a size cannot be used; nothing was created then.
    """

    def __init__(
        self, paths: Sequence[Path], capacity_limit: int | None, chunk_nbytes: int
    ) -> None:
        if chunk_nbytes <= 0 or chunk_nbytes % ALIGNMENT:
            raise ConfigError(f"chunk_nbytes must be a multiple of {ALIGNMENT}: {chunk_nbytes}")
        if not paths:
            raise ConfigError("a swap file needs at least one folder (nvme=...)")
        self._pid = os.getpid()
        self._closed = False
        self._folders = [nameless.check_folder(Path(path)) for path in paths]
        self._fds: list[int] = []
        self._free = FreeList()
        self._lock = threading.Lock()
        self._generations = itertools.count(1)
        self.chunk_nbytes = chunk_nbytes
        self.capacity_limit = capacity_limit
        self.direct = True
        self.direct_reason = "O_DIRECT works on every path"
        self.sums: dict[int, PieceSum] = {}
        try:
            for folder in self._folders:
                self._open_in(folder)
        except BaseException:
            self.close()
            raise

    def _open_in(self, folder: Path) -> None:
        opened = nameless.open_nameless(folder)
        self._fds.append(opened.fd)
        if not opened.direct and self.direct:
            self.direct = False
            self.direct_reason = f"buffered I/O on {folder}: {opened.reason}"

    def __enter__(self) -> SwapFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Facts ---------------------------------------------------------------------------

    @property
    def fds(self) -> tuple[int, ...]:
        """The open files, in the order of the paths."""
        self._check_usable()
        return tuple(self._fds)

    @property
    def capacity(self) -> int:
        """Bytes reserved so far."""
        return self._free.capacity

    @property
    def used(self) -> int:
        """Bytes of allocated extents."""
        return self._free.used

    def folder(self, file: int) -> str:
        """Returns the folder that holds a file, for messages."""
        return str(self._folders[file])

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                "this swap file belongs to the parent process: after fork the child must "
                "make its own TierManager"
            )
        if self._closed:
            raise ClosedError("the swap file is closed")

    # Space ---------------------------------------------------------------------------

    def grow(self, nbytes: int) -> None:
        """Reserves that many more bytes on the disks, evenly over the paths.

        Args:
            nbytes: Bytes to add; rounded up to 4,096.

        Raises:
            CapacityError: If a disk or the limit has no room; nothing has changed then.
            StorageError: If reserving fails otherwise; nothing has changed then.
            ClosedError: If it is closed or belongs to another process.
        """
        self._check_usable()
        if nbytes < 0:
            raise ValueError(f"cannot grow by {nbytes} bytes")
        nbytes = align_up(nbytes)
        before = self.capacity
        if self.capacity_limit is not None and before + nbytes > self.capacity_limit:
            paths = ", ".join(map(str, self._folders))
            raise CapacityError(
                f"tier nvme at {paths}: {format_size(nbytes)} more asked, but the limit of "
                f"{format_size(self.capacity_limit)} leaves "
                f"{format_size(self.capacity_limit - before)} ({self.capacity_limit - before} "
                "bytes)",
                f"give nvme_bytes= at least {exact_size(before + nbytes)}",
            )
        old = [self._file_length(file, before) for file in range(len(self._fds))]
        new = [self._file_length(file, before + nbytes) for file in range(len(self._fds))]
        self._check_room(old, new)
        self._reserve(old, new)
        self._free.grow(nbytes)

    def _file_length(self, file: int, capacity: int) -> int:
        """Returns the bytes of a file when the store has ``capacity`` bytes."""
        rows, last = divmod(capacity, self.chunk_nbytes * len(self._fds))
        return rows * self.chunk_nbytes + min(
            max(0, last - file * self.chunk_nbytes), self.chunk_nbytes
        )

    def _check_room(self, old: list[int], new: list[int]) -> None:
        asked: dict[int, int] = {}
        for file, fd in enumerate(self._fds):
            try:
                disk, facts = os.fstat(fd).st_dev, os.fstatvfs(fd)
            except OSError as error:
                raise self._failed("the disk does not answer", file, old, new, error) from error
            asked[disk] = asked.get(disk, 0) + new[file] - old[file]
            free = nameless.free_nbytes(facts)
            if free is not None and asked[disk] > free:
                raise self._no_room(file, asked[disk])

    def _reserve(self, old: list[int], new: list[int]) -> None:
        for file, fd in enumerate(self._fds):
            try:
                nameless.reserve(fd, old[file], new[file] - old[file])
            except OSError as error:
                for other, length in zip(self._fds, old, strict=True):
                    with contextlib.suppress(OSError):  # the disk may not respond any more
                        os.ftruncate(other, length)
                if error.errno in _NO_SPACE:
                    raise self._no_room(file, new[file] - old[file], error) from error
                raise self._failed("space could not be reserved", file, old, new, error) from error

    def _failed(
        self, what: str, file: int, old: list[int], new: list[int], error: OSError
    ) -> StorageError:
        """Returns the error for a file that could not be enlarged."""
        return StorageError(
            f"{what}; see what the kernel says of that disk (dmesg), or name a folder on another",
            path=self.folder(file),
            offset=old[file],
            nbytes=new[file] - old[file],
            errno=error.errno,
        )

    def _no_room(self, file: int, asked: int, error: OSError | None = None) -> CapacityError:
        try:
            free = nameless.free_nbytes(os.fstatvfs(self._fds[file]))
        except OSError:
            free = None
        there = "less" if free is None else f"{format_size(free)} ({free} bytes)"
        why = f" ({error.strerror})" if error else ""
        if error and error.errno == errno.EFBIG:
            return CapacityError(
                f"tier nvme at {self.folder(file)}: {format_size(asked)} ({asked} bytes) asked, "
                f"and its file may not get that long{why}; raise the limit of this process "
                "(ulimit -f) where there is one, or give folders of file systems with longer files"
            )
        return CapacityError(
            f"tier nvme at {self.folder(file)}: {format_size(asked)} ({asked} bytes) asked, "
            f"but {there} are free there{why}; free some space, name another folder, or have less "
            "there: more dram=, and policy= for what may be in it"
        )

    def allocate(self, nbytes: int) -> Extent:
        """Allocates a run of at least ``nbytes`` bytes (rounded up to 4,096).

        Raises:
            CapacityError: If no free run is long enough; ``grow`` adds room.
            ClosedError: If it is closed or belongs to another process.
        """
        self._check_usable()
        if nbytes <= 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        extent = self._free.take(align_up(nbytes))
        if extent is None:
            paths = ", ".join(map(str, self._folders))
            raise CapacityError(
                f"tier nvme at {paths}: no free run of {align_up(nbytes)} bytes; "
                f"{self.capacity - self.used} bytes are free, {self._free.largest} in one run"
            )
        return extent

    def free(self, extent: Extent) -> None:
        """Takes an extent back, and forgets its checksums.

        Raises:
            ValueError: If it is not allocated.
            ClosedError: If it is closed or belongs to another process.
        """
        self._check_usable()
        if not self._free.holds(extent):
            raise ValueError(f"{extent} is not handed out")
        self.forget(extent)
        self._free.give_back(extent)

    def holds(self, extent: Extent) -> bool:
        """Whether exactly this extent is allocated."""
        return self._free.holds(extent)

    def keep_only(self, extents: Iterable[Extent]) -> None:
        """Sets which extents are allocated: others were lost when a call was interrupted."""
        kept = list(extents)
        self._free.rebuild(kept)
        with self._lock:
            pieces = {e.offset + piece.extent_offset for e in kept for piece in self.pieces(e)}
            for key in self.sums.keys() - pieces:
                del self.sums[key]

    def pieces(self, extent: Extent) -> list[Piece]:
        """Returns the parts of an extent by ascending offset, cut at stripe boundaries.

        Raises:
            ValueError: If the extent is not aligned or reaches past the capacity.
        """
        if extent.offset % ALIGNMENT or extent.nbytes % ALIGNMENT:
            raise ValueError(f"{extent} is not aligned to {ALIGNMENT} bytes")
        if extent.offset < 0 or extent.nbytes < 0 or extent.end > self.capacity:
            raise ValueError(f"{extent} is not within the {self.capacity} bytes of the store")
        chunk, files = self.chunk_nbytes, len(self._fds)
        found: list[Piece] = []
        offset = extent.offset
        while offset < extent.end:
            stripe, inside = divmod(offset, chunk)
            nbytes = min(chunk - inside, extent.end - offset)
            row, file = divmod(stripe, files)
            found.append(Piece(file, row * chunk + inside, offset - extent.offset, nbytes))
            offset += nbytes
        return found

    # Checksums -----------------------------------------------------------------------

    def begin_write(self, extent: Extent, pieces: Sequence[Piece]) -> int:
        """Marks every piece as not written, until its write is complete.

        Returns:
            The generation to pass to :meth:`end_write`.
        """
        with self._lock:
            generation = next(self._generations)
            for piece in pieces:
                key = extent.offset + piece.extent_offset
                self.sums[key] = PieceSum(generation, piece.nbytes)
            return generation

    def end_write(
        self, extent: Extent, piece: Piece, generation: int, checksum: int | None
    ) -> None:
        """Enters the checksum of a piece, unless it was freed or another write has begun."""
        with self._lock:
            entry = self.sums.get(extent.offset + piece.extent_offset)
            if entry is not None and entry.generation == generation:
                entry.checksum = checksum
                entry.written = True

    def written(self, extent: Extent, piece: Piece) -> PieceSum | None:
        """Returns the index entry of a piece, or ``None`` if it was not written completely."""
        entry = self.sums.get(extent.offset + piece.extent_offset)
        if entry is None or not entry.written or entry.nbytes != piece.nbytes:
            return None
        return entry

    def refusal(self, extent: Extent, piece: Piece) -> str:
        """Returns why a piece cannot be read; empty if it can."""
        if self.written(extent, piece) is not None:
            return ""
        return "the file holds no whole data there: never written, or its last write failed"

    def cause(self, piece: Piece) -> str:
        """Returns "": no other program has access to a file without a name."""
        return ""

    def keep_sum(self, extent: Extent, piece: Piece, checksum: int) -> None:
        """Does nothing: checksums are known from writes."""

    def version(self, extent: Extent) -> int:
        """Returns a number that changes with every write of an extent; 0 before any."""
        entry = self.sums.get(extent.offset)
        return 0 if entry is None else entry.generation

    def forget(self, extent: Extent) -> None:
        """Drops the checksums of an extent: its bytes count as never written."""
        with self._lock:
            for piece in self.pieces(extent):
                self.sums.pop(extent.offset + piece.extent_offset, None)

    # End -----------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the files, which frees their space; in a forked child does nothing."""
        self._closed = True
        if os.getpid() != self._pid:
            return  # in the child these numbers may already belong to other files
        self._close_files()

    def forked(self) -> None:
        """Closes the parent's files; called in a forked child, before it opens files of its own.

        A child that outlives its parent would keep their space taken.
        """
        self._closed = True
        self._lock = threading.Lock()  # a thread of the parent may have held it
        self._close_files()

    def _close_files(self) -> None:
        while self._fds:  # if interrupted, it can be called again for the rest
            os.close(self._fds.pop())

    def __del__(self) -> None:
        if getattr(self, "_fds", None):  # an exception occurred before a caller could close it
            self.close()
