"""What is known of one block: its state and address in each tier."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tiermem.core.block import ANNEX, Block, Extent, Tier


class State(enum.Enum):
    """State of a block in one tier."""

    ABSENT = "absent"
    FILLING = "filling"
    VALID = "valid"
    DIRTY = "dirty"
    DRAINING = "draining"


class Move(NamedTuple):
    """A requested copy of one whole block from one tier to another.

    Attributes:
        block: The block.
        source: Tier it is read from.
        target: Tier it is written to.
        source_extent: Address there.
        target_extent: Address there.
    """

    block: Block
    source: Tier
    target: Tier
    source_extent: Extent
    target_extent: Extent


@dataclass(slots=True, eq=False)
class Record:
    """One row of the table.

    Attributes:
        block: The block.
        home: Tier that always has space for it.
        home_extent: Its address there (None if the home is HBM).
        at_home: State of the home copy.
        in_hbm: State of the HBM copy.
        extent: Address in HBM, or None.
        leases: How many leases hold the HBM copy against eviction.
        defined: Whether the block holds data at all (a gradient may not yet).
        writes: How often the HBM copy was marked as written.
        home_writes: How often the home copy was written directly.
        fixed: Whether it always stays in HBM, or in its annex.
        still: Whether something other than parameters knows its address in HBM, so that it must
            not be moved there.
        later: Bytes of blocks that may be needed while it is held, if HBM has room for them only
            when this block is at an end; else 0.
        copied: Whether only a copy home has used the HBM copy since compute last did, so that the
            next user of the place need not wait for compute.
        packs: Whether it is written home packed, if possible (:mod:`tiermem.core.packedhome`).
    """

    block: Block
    home: Tier
    home_extent: Extent | None
    at_home: State
    defined: bool
    in_hbm: State = State.ABSENT
    extent: Extent | None = None
    leases: int = 0
    writes: int = 0
    home_writes: int = 0
    fixed: bool = field(default=False)
    still: bool = field(default=False)
    later: int = field(default=0)
    copied: bool = field(default=False)
    packs: bool = field(default=False)

    @property
    def stamp(self) -> tuple[Any, ...]:
        """Identifies the bytes of its home: it differs once these may have changed."""
        return self.writes, self.home_writes, self.home, self.home_extent

    @property
    def annexed(self) -> Extent | None:
        """The address in DRAM of a block that kernels always use there, as if it were in HBM."""
        place = self.extent
        if place is None or place.offset < ANNEX:
            return None
        return Extent(place.offset - ANNEX, place.nbytes)

    @property
    def usable(self) -> bool:
        """Whether the HBM copy can be leased as it is."""
        return self.in_hbm is State.VALID or self.in_hbm is State.DIRTY
