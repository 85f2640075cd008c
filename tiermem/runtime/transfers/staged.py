"""What has been read, or is being read, of a file before HBM has room for it."""

from __future__ import annotations

from dataclasses import dataclass

from tiermem.core.block import Extent
from tiermem.transfer.copy import Event
from tiermem.transfer.file.mover import FileMover, FileTransfer


@dataclass(slots=True, eq=False)
class Staged:
    """A block's bytes in DRAM, or on their way there.

    Attributes:
        extent: Where in DRAM.
        home: Where in the files.
        version: Of the bytes there when the read was asked for.
        transfer: The read; None where a Ctrl-C came while it was asked for, so that its bytes
            may still be written to and are not used again.
        copied: Event of the last copy up.
        risen: Whether it has gone up since it was read.
        leaves: Whether the plan has no place for it: it goes once it has gone up.
        passes: How many have begun since.
    """

    extent: Extent
    home: Extent
    version: int | None
    transfer: FileTransfer | None = None
    copied: Event | None = None
    risen: bool = False
    leaves: bool = False
    passes: int = 0

    @property
    def idle(self) -> bool:
        """Whether nothing writes or reads these bytes any more."""
        there = self.transfer is not None and self.transfer.finished
        return there and (self.copied is None or self.copied.done())


@dataclass(slots=True, eq=False)
class Parked:
    """A read straight into HBM that has begun, and has no place there yet.

    Attributes:
        transfer: The read.
        mover: Makes it.
        home: Where in the files.
        version: Of the bytes there when it was asked for.
        taken: Whether it was about to get a place; if it did not (Ctrl-C), it is not used again.
    """

    transfer: FileTransfer
    mover: FileMover
    home: Extent
    version: int | None
    taken: bool = False
