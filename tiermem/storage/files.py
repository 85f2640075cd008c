"""The interface of a store in files, as the file mover uses it, and two such stores joined.

A store hands out extents; each consists of *pieces*, which are read or written as a whole and
have a checksum each. The swap file's extents are contiguous in the store; those of a
checkpoint are gathered from wherever its tensors are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tiermem.core.block import Extent


@dataclass(frozen=True, slots=True)
class Part:
    """A run of bytes of a piece that belongs to the extent.

    Attributes:
        at: First byte within the piece.
        extent_offset: First byte within the extent.
        nbytes: Length in bytes.
    """

    at: int
    extent_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes of one file that is read or written at once.

    Attributes:
        file: Index of the file.
        file_offset: First byte in that file.
        extent_offset: First byte within the extent.
        nbytes: Length in bytes, at most one chunk.
        parts: The parts of it that belong to the extent; None if all of it does, as one run.
    """

    file: int
    file_offset: int
    extent_offset: int
    nbytes: int
    parts: tuple[Part, ...] | None = None


@dataclass(slots=True)
class PieceSum:
    """The index entry of one piece.

    Attributes:
        generation: Number of the write that is valid; a later one replaces it.
        nbytes: Length of the piece.
        written: Whether that write was completed; if not, the bytes are undefined.
        checksum: Of the bytes written, or ``None`` if checking is switched off.
        learns: Whether the checksum of the first read is kept, since there was no write.
    """

    generation: int
    nbytes: int
    written: bool = False
    checksum: int | None = None
    learns: bool = False


class FileStore(Protocol):
    """A store in files, as the file mover uses it.

    Attributes:
        chunk_nbytes: Maximal bytes of a piece; a multiple of 4,096.
    """

    chunk_nbytes: int

    @property
    def fds(self) -> tuple[int, ...]:
        """The open files, by index."""

    def folder(self, file: int) -> str:
        """Returns the path of a file, or of its folder if it has no name; for messages."""

    def pieces(self, extent: Extent) -> list[Piece]:
        """Returns the pieces of an extent.

        Raises:
            ValueError: If it is not an extent of this store.
        """

    def refusal(self, extent: Extent, piece: Piece) -> str:
        """Returns why a piece cannot be read; empty if it can."""

    def cause(self, piece: Piece) -> str:
        """Returns what is known about a failed read besides its errno; "" for nothing."""

    def written(self, extent: Extent, piece: Piece) -> PieceSum | None:
        """Returns the index entry of a piece; None if it was not written completely."""

    def keep_sum(self, extent: Extent, piece: Piece, checksum: int) -> None:
        """Keeps the checksum of a piece's first readif the index ``learns``."""

    def begin_write(self, extent: Extent, pieces: Sequence[Piece]) -> int:
        """Marks every piece as not written; returns the generation for :meth:`end_write`."""

    def end_write(
        self, extent: Extent, piece: Piece, generation: int, checksum: int | None
    ) -> None:
        """Enters the checksum of a piece that was written."""

    def version(self, extent: Extent) -> int:
        """Returns a number that changes with every write of an extent."""


class JoinedFiles:
    """Joins a store that is written and one that is read-only, for one file mover.

    Args:
        swap: Its files come first; its extents are below ``boundary``.
        sources: The read-only store, which numbers its files after those of ``swap``.
        boundary: First offset of the extents of ``sources``.
    """

    def __init__(self, swap: FileStore | None, sources: FileStore, boundary: int) -> None:
        self._swap = swap
        self._sources = sources
        self._boundary = boundary
        self.chunk_nbytes = sources.chunk_nbytes

    @property
    def fds(self) -> tuple[int, ...]:
        """See :class:`FileStore`."""
        return (*(() if self._swap is None else self._swap.fds), *self._sources.fds)

    def folder(self, file: int) -> str:
        """See :class:`FileStore`."""
        if self._swap is not None and file < len(self._swap.fds):
            return self._swap.folder(file)
        return self._sources.folder(file)

    def pieces(self, extent: Extent) -> list[Piece]:
        """See :class:`FileStore`."""
        return self._of(extent).pieces(extent)

    def refusal(self, extent: Extent, piece: Piece) -> str:
        """See :class:`FileStore`."""
        return self._of(extent).refusal(extent, piece)

    def cause(self, piece: Piece) -> str:
        """See :class:`FileStore`."""
        if self._swap is not None and piece.file < len(self._swap.fds):
            return self._swap.cause(piece)
        return self._sources.cause(piece)

    def written(self, extent: Extent, piece: Piece) -> PieceSum | None:
        """See :class:`FileStore`."""
        return self._of(extent).written(extent, piece)

    def keep_sum(self, extent: Extent, piece: Piece, checksum: int) -> None:
        """See :class:`FileStore`."""
        self._of(extent).keep_sum(extent, piece, checksum)

    def begin_write(self, extent: Extent, pieces: Sequence[Piece]) -> int:
        """See :class:`FileStore`."""
        return self._of(extent).begin_write(extent, pieces)

    def end_write(
        self, extent: Extent, piece: Piece, generation: int, checksum: int | None
    ) -> None:
        """See :class:`FileStore`."""
        self._of(extent).end_write(extent, piece, generation, checksum)

    def version(self, extent: Extent) -> int:
        """See :class:`FileStore`."""
        return self._of(extent).version(extent)

    def _of(self, extent: Extent) -> FileStore:
        if extent.offset >= self._boundary:
            return self._sources
        if self._swap is None:
            raise ValueError(f"{extent} lies in a swap file, and there is none")
        return self._swap
