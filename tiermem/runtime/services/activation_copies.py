"""Copies of saved tensors: one of them, their order, and which have bytes in HBM."""

from __future__ import annotations

from collections import deque
from typing import Any, cast
from weakref import ref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tiermem.runtime.memory.extent_pool import Place
from tiermem.transfer.copy import Event
from tiermem.transfer.file.mover import FileTransfer


class Copy:
    """A run of bytes of one storage, below HBM, and in HBM as long as need be.

    Attributes:
        ident: Never reused.
        seq: Position in the order of saving; a tensor saved again moves up.
        begin: Bytes saved before it, in that order.
        low: First byte within the storage.
        nbytes: Bytes.
        name: For messages and tables.
        weak: The storage, without holding it.
        place: Where the copy is; None where it could not be written.
        source: The storage, held.
        fetched: The bytes in HBM again.
        up: Event of the copy that brought them; from a file once that has been read.
        reading: The file transfer that brings them.
        tail: Last bytes, which are no whole page and so not in the file.
        root: The tensor that was saved, or the one it is a view of; dead where that is gone.
        version: The version of its contents that was copied.
    """

    __slots__ = (
        "__weakref__",
        "begin",
        "dropped",
        "fetched",
        "ident",
        "low",
        "name",
        "nbytes",
        "place",
        "reading",
        "root",
        "seq",
        "source",
        "tail",
        "up",
        "version",
        "weak",
    )

    def __init__(
        self, dropped: deque[Any], storage: torch.UntypedStorage, low: int, nbytes: int, name: str
    ) -> None:
        self.dropped = dropped
        self.ident = self.seq = self.begin = -1
        self.low = low
        self.nbytes = nbytes
        self.name = name
        self.weak = StorageWeakRef(storage)
        self.place: Place | None = None
        self.source: torch.UntypedStorage | None = storage
        self.fetched: torch.UntypedStorage | None = None
        self.up: Event | None = None
        self.reading: FileTransfer | None = None
        self.tail: torch.Tensor | None = None
        self.root: ref[torch.Tensor] | None = None
        self.version = 0

    def alive(self) -> torch.UntypedStorage | None:
        """Returns the storage that was saved, if it is still alive."""
        if self.source is not None:
            return self.source
        # returns None where it is gone, whatever its annotation says
        found = torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)
        return cast("torch.UntypedStorage | None", found)

    def covers(self, low: int, high: int) -> bool:
        """Whether bytes ``low`` to ``high`` of the storage are part of it."""
        return self.low <= low and high <= self.low + self.nbytes

    def __del__(self) -> None:
        self.dropped.append(
            (self.ident, self.place, self.source, self.fetched, self.up, self.reading)
        )
