"""What has been read, or is being read, from a file before HBM has room for it."""

from __future__ import annotations

from dataclasses import dataclass

from tiermem.core.block import Extent
from tiermem.transfer.copy import Event
from tiermem.transfer.file.mover import FileMover, FileTransfer


@dataclass(slots=True, eq=False)
class Staged:
    """A block's bytes in DRAM, or being read to it.

    Attributes:
        extent: Where in DRAM.
        home: Where in the files.
        version: The version of the bytes there when the read was requested.
        transfer: The read; None if a Ctrl-C occurred while it was requested, so that its bytes
            may still be written to and are not used again.
        copied: Event of the last copy to HBM.
        risen: Whether it has been copied to HBM since it was read.
        leaves: Whether the plan has no place for it: it is dropped after its copy to HBM.
        passes: How many passes have begun since.
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
        """Whether no transfer writes or reads these bytes."""
        there = self.transfer is not None and self.transfer.finished
        return there and (self.copied is None or self.copied.done())


@dataclass(slots=True, eq=False)
class Parked:
    """A read directly into HBM that has begun, and has no place there yet.

    Attributes:
        transfer: The read.
        mover: Makes it.
        home: Where in the files.
        version: The version of the bytes there when it was requested.
        taken: Whether it was about to get a place; if it did not (Ctrl-C), it is not used again.
    """

    transfer: FileTransfer
    mover: FileMover
    home: Extent
    version: int | None
    taken: bool = False
