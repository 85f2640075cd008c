"""Checkpoint files as a store of the NVMe tier: read, never written.

An extent stands for a block whose tensors are somewhere in the files, at any byte offset. It
has an address of its own, far above the swap file's, and no bytes there: its pieces are whole
pages of the files, each with the parts of it that belong to the block. Pages are read past the
page cache (O_DIRECT) if the file system supports it; a partial last page of a file is read
through it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiermem.core.block import ALIGNMENT, Extent, align_up
from tiermem.errors import CheckpointError, ClosedError, ConfigError, StorageError
from tiermem.storage.files import Part, Piece, PieceSum

FIRST_OFFSET = 1 << 60
"""Where the addresses of extents in checkpoints begin; no swap file is that large."""


@dataclass(frozen=True, slots=True)
class SourceRange:
    """A run of bytes in a checkpoint file, and its target in a block.

    Attributes:
        file: Number of the file, as :meth:`CheckpointStore.add` gave it.
        offset: First byte in the file.
        nbytes: Length in bytes.
        target: First byte within the block.
    """

    file: int
    offset: int
    nbytes: int
    target: int


@dataclass(frozen=True, slots=True)
class _Identity:
    """Properties of a file that do not change unless it is written."""

    size: int
    changed_ns: int

    @classmethod
    def of(cls, fd: int) -> _Identity:
        facts = os.fstat(fd)
        return cls(facts.st_size, facts.st_mtime_ns)


class CheckpointStore:
    """Tensors that are stored in checkpoint files.

    Each file has two descriptors, with the numbers ``2 * file`` (past the page cache) and
    ``2 * file + 1`` (through it) in this store.

    Args:
        chunk_nbytes: Maximal bytes of a piece; a multiple of 4,096.
        others: How many descriptors the file mover has before those of this store: the swap file's.
            Pieces and messages refer to a file by its number among all.

    Attributes:
        chunk_nbytes: As given.
        direct: Whether every file bypasses the page cache (O_DIRECT).
    """

    def __init__(self, chunk_nbytes: int, others: int = 0) -> None:
        if chunk_nbytes <= 0 or chunk_nbytes % ALIGNMENT:
            raise ConfigError(f"chunk_nbytes must be a multiple of {ALIGNMENT}: {chunk_nbytes}")
        self.chunk_nbytes = chunk_nbytes
        self._others = others
        self.direct = True
        self._pid = os.getpid()
        self._closed = False
        self._paths: list[str] = []
        self._identities: list[_Identity] = []
        self._fds: list[int] = []
        self._direct: list[bool] = []
        self._ranges: dict[Extent, tuple[SourceRange, ...]] = {}
        self._pieces: dict[Extent, list[Piece]] = {}
        self._next = FIRST_OFFSET
        self._lock = threading.Lock()
        self._sums: dict[tuple[int, int, int], PieceSum] = {}

    @property
    def fds(self) -> tuple[int, ...]:
        """The open files: two descriptors for each."""
        self._check_usable()
        return tuple(self._fds)

    def folder(self, file: int) -> str:
        """Returns the path of a file, by the number of its descriptor among all."""
        return self._paths[self._own(file) // 2]

    def _own(self, file: int) -> int:
        """Returns the number of a descriptor in this store, given that among all."""
        return file - self._others

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                "these checkpoint files belong to the parent process: after fork the child must "
                "make its own TierManager"
            )
        if self._closed:
            raise ClosedError("the checkpoint files are closed")

    # Files and extents ---------------------------------------------------------------

    def add(self, paths: Sequence[Path], check: Callable[[int, int], None] | None = None) -> int:
        """Opens files.

        Args:
            paths: Regular files.
            check: Called with each descriptor and the file's index in ``paths``; raises if that
                is not the expected file.

        Returns:
            The number of the first; the others follow.

        Raises:
            StorageError: If one cannot be opened; none is kept then.
        """
        self._check_usable()
        first, opened = len(self._paths), list[int]()
        direct: list[bool] = []
        try:
            for index, path in enumerate(paths):
                for past_cache in (True, False):
                    fd, is_direct = _open(path, past_cache)
                    opened.append(fd)
                    if past_cache:
                        direct.append(is_direct)
                    if check is not None:
                        check(fd, index)
            identities = [_Identity.of(fd) for fd in opened[::2]]
        except BaseException:
            while opened:
                os.close(opened.pop())
            raise
        self._paths.extend(str(path) for path in paths)
        self._identities.extend(identities)
        self._direct.extend(direct)
        self._fds.extend(opened)
        self.direct = all(self._direct)
        return first

    def place(self, ranges: Sequence[SourceRange], nbytes: int) -> Extent:
        """Gives a block an address here.

        Args:
            ranges: Where its bytes are; bytes that no range covers are padding.
            nbytes: Length of the block, a multiple of 4,096.

        Raises:
            CheckpointError: If a range passes the end of its file.
        """
        for source in ranges:
            size = self._identities[source.file].size
            if source.offset < 0 or source.nbytes < 0 or source.offset + source.nbytes > size:
                raise CheckpointError(
                    f"{self._paths[source.file]}: bytes {source.offset} to "
                    f"{source.offset + source.nbytes} are asked for, and the file has {size}"
                )
        extent = Extent(self._next, nbytes)
        self._next += align_up(max(nbytes, 1))
        self._ranges[extent] = tuple(source for source in ranges if source.nbytes)
        return extent

    def forget(self, extent: Extent) -> None:
        """Frees an address.

        Raises:
            ValueError: If it is not an address of this store.
        """
        if extent not in self._ranges:
            raise ValueError(f"{extent} is not handed out")
        del self._ranges[extent]
        self._pieces.pop(extent, None)

    def holds(self, extent: Extent) -> bool:
        """Whether exactly this extent is in use."""
        return extent in self._ranges

    def ranges_of(self, extent: Extent) -> tuple[SourceRange, ...]:
        """Returns where the bytes of a block with an address here are.

        Raises:
            ValueError: If it is not an address of this store.
        """
        found = self._ranges.get(extent)
        if found is None:
            raise ValueError(f"{extent} is not handed out")
        return found

    def keep_only(self, extents: Iterable[Extent]) -> None:
        """Sets which extents are in use: others were lost when a call was interrupted."""
        kept = set(extents)
        for extent in [extent for extent in self._ranges if extent not in kept]:
            self.forget(extent)

    # Interface of the file mover -----------------------------------------------------

    def pieces(self, extent: Extent) -> list[Piece]:
        """Returns the pages to read for a block, by file and offset, each page once."""
        found = self._pieces.get(extent)
        if found is None:
            ranges = self._ranges.get(extent)
            if ranges is None:
                raise ValueError(f"{extent} is not handed out")
            found = self._pieces[extent] = list(self._gather(ranges))
        return found

    def _gather(self, ranges: tuple[SourceRange, ...]) -> Iterator[Piece]:
        by_file: dict[int, list[SourceRange]] = {}
        for source in ranges:
            by_file.setdefault(source.file, []).append(source)
        for file, members in sorted(by_file.items()):
            members.sort(key=lambda source: source.offset)
            size = self._identities[file].size
            whole = size // ALIGNMENT * ALIGNMENT  # the rest is not a whole page
            for begin, end in _clusters(members):
                for start in range(begin, min(end, whole), self.chunk_nbytes):
                    stop = min(start + self.chunk_nbytes, end, whole)
                    yield _piece(self._others + 2 * file, start, stop, members)
                if end > whole:
                    own = 2 * file + 1
                    yield _piece(self._others + own, max(begin, whole), size, members)

    def refusal(self, extent: Extent, piece: Piece) -> str:
        """Returns why a piece that was not read before cannot be trusted; empty if it can."""
        entry = self.written(extent, piece)
        if entry.checksum is not None:
            return ""  # the bytes themselves are compared
        return self.cause(piece)

    def cause(self, piece: Piece) -> str:
        """Returns that the file of a piece was changed or is not accessible; empty if neither."""
        try:
            now = _Identity.of(self._fds[self._own(piece.file)])
        except OSError as error:
            return f"the checkpoint file cannot be looked at ({error.strerror})"
        if now == self._identities[self._own(piece.file) // 2]:
            return ""
        return (
            "the checkpoint file was changed since it was opened; load the checkpoint anew, and "
            "leave its files alone while they are in use"
        )

    def written(self, extent: Extent, piece: Piece) -> PieceSum:
        """Returns the index entry of a piece; its checksum is that of its first read."""
        key = (piece.file, piece.file_offset, piece.nbytes)
        with self._lock:
            entry = self._sums.get(key)
            if entry is None:
                entry = self._sums[key] = PieceSum(1, piece.nbytes, True, None, learns=True)
            return entry

    def keep_sum(self, extent: Extent, piece: Piece, checksum: int) -> None:
        """Keeps the checksum of a piece's first read."""
        entry = self.written(extent, piece)
        if entry.checksum is None:
            entry.checksum = checksum

    def begin_write(self, extent: Extent, pieces: Sequence[Piece]) -> int:
        """Refuses.

        Raises:
            StorageError: Always.
        """
        raise StorageError(
            "a checkpoint is never written", kind="checkpoint", path=self.folder(pieces[0].file)
        )

    def end_write(
        self, extent: Extent, piece: Piece, generation: int, checksum: int | None
    ) -> None:
        """Refuses; see :meth:`begin_write`."""
        raise StorageError(
            "a checkpoint is never written", kind="checkpoint", path=self.folder(piece.file)
        )

    def version(self, extent: Extent) -> int:
        """Returns 1: nothing is ever written."""
        return 1

    # End -----------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the files; in a forked child does nothing."""
        self._closed = True
        if os.getpid() == self._pid:
            self._close_files()

    def forked(self) -> None:
        """Closes the parent's descriptors in a forked child."""
        self._closed = True
        self._lock = threading.Lock()  # a thread of the parent may have held it
        self._close_files()

    def _close_files(self) -> None:
        while self._fds:  # if interrupted, it can be called again for the rest
            os.close(self._fds.pop())


def _open(path: Path, past_cache: bool) -> tuple[int, bool]:
    """Opens a file to read; returns its descriptor, and whether it bypasses the page cache."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        if past_cache:
            try:
                return os.open(path, flags | os.O_DIRECT), True
            except OSError:  # EINVAL on file systems without O_DIRECT
                return os.open(path, flags), False
        return os.open(path, flags), False
    except OSError as error:
        raise StorageError(
            "the file cannot be opened", kind="checkpoint", path=str(path), errno=error.errno
        ) from error


def _clusters(ranges: Sequence[SourceRange]) -> list[tuple[int, int]]:
    """Returns runs of whole pages that cover ranges sorted by offset, and no other page."""
    runs: list[tuple[int, int]] = []
    for source in ranges:
        begin = source.offset // ALIGNMENT * ALIGNMENT
        end = align_up(source.offset + source.nbytes)
        if runs and begin <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], end))
        else:
            runs.append((begin, end))
    return runs


def _piece(file: int, start: int, stop: int, ranges: Sequence[SourceRange]) -> Piece:
    """Returns the piece for the bytes from ``start`` to ``stop`` of a file."""
    parts = []
    for source in ranges:
        begin, end = max(start, source.offset), min(stop, source.offset + source.nbytes)
        if begin < end:
            parts.append(Part(begin - start, source.target + begin - source.offset, end - begin))
    whole = len(parts) == 1 and parts[0].nbytes == stop - start
    return Piece(file, start, parts[0].extent_offset, stop - start, None if whole else tuple(parts))
