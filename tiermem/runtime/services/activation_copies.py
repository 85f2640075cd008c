"""Copies of saved tensors: the copy, their order, and which have bytes in HBM."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any, cast
from weakref import ref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tiermem.runtime.memory.extent_pool import Place
from tiermem.transfer.copy import Event
from tiermem.transfer.file.mover import FileTransfer


class Copy:
    """A run of bytes of one storage, below HBM, and in HBM as long as necessary.

    Attributes:
        ident: Never reused.
        low: First byte within the storage.
        nbytes: Bytes.
        name: For messages and tables.
        weak: A weak reference to the storage.
        place: Where the copy is; None if it could not be written.
        source: The storage, held.
        fetched: The bytes that were fetched to HBM.
        up: Event of the copy that fetched them; for a file, after it has been read.
        reading: The file transfer that fetches them.
        tail: The last bytes, less than a page, which are not in the file.
        root: The saved tensor, or the base if it is a view; a dead reference if that was freed.
        version: The version of its contents that was copied.
    """

    __slots__ = (
        "__weakref__",
        "dropped",
        "fetched",
        "ident",
        "low",
        "name",
        "nbytes",
        "place",
        "reading",
        "root",
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
        self.ident = -1  # until it has a position in the order
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
        # returns None if it is gone, in spite of its annotation
        found = torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)
        return cast("torch.UntypedStorage | None", found)

    def covers(self, low: int, high: int) -> bool:
        """Whether bytes ``low`` to ``high`` of the storage are part of it."""
        return self.low <= low and high <= self.low + self.nbytes

    def __del__(self) -> None:
        self.dropped.append(
            (self.ident, self.place, self.source, self.fetched, self.up, self.reading)
        )


class SavingOrder:
    """The order in which tensors were saved: backward uses them in reverse order.

    A tensor that is saved again gets a later position.
    """

    __slots__ = ("_bytes", "_copies", "_next", "_seqs")

    def __init__(self) -> None:
        """Starts empty."""
        self._copies: dict[int, tuple[ref[Copy], int]] = {}  # and the bytes saved before
        self._seqs: dict[int, int] = {}
        self._next = 0
        self._bytes = 0

    def __len__(self) -> int:
        return max(len(self._copies), len(self._seqs))

    def add(self, copy: Copy) -> None:
        """Gives a copy the next position, by which a new copy is identified from now on."""
        seq = self._next
        self._next += 1
        if copy.ident < 0:
            copy.ident = seq
        begin = self._bytes
        self._bytes += copy.nbytes
        self._copies[seq] = (ref(copy), begin)
        self._seqs[copy.ident] = seq

    def add_again(self, copy: Copy) -> None:
        """Gives a copy that has a position the next one instead."""
        before = self._seqs[copy.ident]
        self.add(copy)  # first: if interrupted after it, the copy still has a position
        self._copies.pop(before, None)

    def remove(self, ident: int) -> None:
        """Removes a copy, if it is there."""
        seq = self._seqs.pop(ident, None)
        if seq is not None:
            self._copies.pop(seq, None)

    def position(self, copy: Copy) -> int:
        """Returns the position of a copy."""
        return self._seqs[copy.ident]

    def back(self, seq: int, most: int) -> tuple[int, Copy | None, int]:
        """Looks for a copy at a position and before it.

        Args:
            seq: The position.
            most: How many positions without a copy may be skipped.

        Returns:
            The position of the first one, the copy, and how many more may be skipped; if there is
            none so near, the last position that was not checked, and None for the copy.
        """
        copies = self._copies
        while seq >= 0 and most > 0:
            found = copies.get(seq)
            copy = None if found is None else found[0]()
            if copy is not None:
                return seq, copy, most
            seq, most = seq - 1, most - 1
        return seq, None, most

    def between(self, seq: int, later: int) -> int:
        """Returns the bytes that were saved from one position up to another one."""
        return self._copies[later][1] - self._copies[seq][1]

    def copies(self) -> list[Copy]:
        """Returns the existing copies, in order."""
        found = (weak() for _, (weak, _) in sorted(self._copies.items()))
        return [copy for copy in found if copy is not None]


class CopiesInHbm:
    """Copies that have bytes in HBM for one reason, in the order in which they were added.

    Attributes:
        nbytes: Bytes of all of them.
    """

    __slots__ = ("_copies", "nbytes")

    def __init__(self) -> None:
        """Starts empty."""
        self.nbytes = 0
        self._copies: OrderedDict[int, tuple[ref[Copy], int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._copies)

    def add(self, copy: Copy) -> None:
        """Adds a copy as the last."""
        self._copies[copy.ident] = (ref(copy), copy.nbytes)
        self.nbytes += copy.nbytes

    def remove(self, ident: int) -> None:
        """Removes a copy, if it is there."""
        found = self._copies.pop(ident, None)
        if found is not None:
            self.nbytes -= found[1]

    def take_first(self) -> Copy | None:
        """Removes the first one and returns it; None if it no longer exists."""
        _, (weak, nbytes) = self._copies.popitem(last=False)
        self.nbytes -= nbytes
        return weak()

    def first_but(self, copy: Copy) -> tuple[int, Copy | None]:
        """Returns the first one that is not ``copy``, which becomes the last if it is the first.

        Returns:
            Its id, and the copy; None if that no longer exists.
        """
        ident = next(iter(self._copies))
        if ident == copy.ident:
            self._copies.move_to_end(ident)
            ident = next(iter(self._copies))
        return ident, self._copies[ident][0]()

    def repair(self) -> None:
        """Counts the bytes again."""
        self.nbytes = sum(nbytes for _, nbytes in self._copies.values())
