"""Blocks that are read where they lie in DRAM, by a kernel that needs little of them.

A device reaches page-locked host memory over the bus. Where a kernel looks at a few rows of a
block (an embedding's, of some tokens), those rows come over the bus and nothing else, and the
block needs no room in HBM. The planner is told of none of it: it plans with that room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from tiermem.core.block import Block, Extent, Tier
from tiermem.core.residency import Record, State
from tiermem.runtime.base.gate import CallGate
from tiermem.runtime.parts import Parts
from tiermem.runtime.transfers.block_io import view_of

Found = TypeVar("Found")


class ZeroCopy:
    """Lends kernels the home copies of blocks; under the manager's lock."""

    def __init__(self, parts: Parts, gate: CallGate) -> None:
        """Works on ``parts``; ``gate`` stands before every loan."""
        self._parts = parts
        self._gate = gate
        self._seen: dict[int, tuple[Extent | None, Sequence[torch.Tensor]]] = {}

    def read(
        self,
        block: Block,
        look: Callable[[Sequence[torch.Tensor]], Found],
        nbytes: int,
        *,
        again: bool,
    ) -> Found | None:
        """Lets kernels look at a block where it lies in DRAM.

        Args:
            block: The block.
            look: Is given a tensor for each of the block's, on the device, and submits kernels to
                the current stream. It neither writes nor keeps them.
            nbytes: How much of it they look at, to be counted.
            again: Whether that will be so time and again, and nobody writes it meanwhile: then
                what was written is copied home first.

        Returns:
            What ``look`` did; None, and it was not called, where the block is to be brought up as
            ever: its bytes in DRAM are not those of now, or not within the device's reach; all
            blocks fit in HBM; or a CUDA graph is being captured.

        Raises:
            ClosedError: After ``close()``, or in a forked child.
        """
        self._gate.guard()
        parts, transfers = self._parts, self._parts.transfers
        record = parts.table[block.id]
        if (
            record.home is not Tier.DRAM
            or block.id in parts.deferred
            or parts.table.nbytes <= parts.table.hbm.capacity
            or parts.copy.capturing()
            or not self._at_home(record, again=again)
        ):
            return None
        tensors = self._tensors(record)
        if not tensors:
            return None
        parts.copy.use(transfers.home_ready.get(block.id))
        marked = False
        try:
            found = look(tensors)
            # whoever writes there next waits for these kernels, as for a copy that wrote there
            event = parts.copy.mark()
            if event is not None:
                transfers.home_ready[block.id] = event
            marked = True
        finally:
            if not marked:  # an error, or Ctrl-C: there may be kernels that nobody can wait for
                parts.copy.synchronize()
        parts.counters.reads_in_place += 1
        parts.counters.read_in_place += nbytes
        return found

    def forget(self, block_id: int) -> None:
        """Lets the tensors of a block go."""
        self._seen.pop(block_id, None)

    def clear(self) -> None:
        """Lets all of them go."""
        self._seen.clear()

    def _at_home(self, record: Record, *, again: bool) -> bool:
        """Whether the home copy is what the block holds, however late, and stays so."""
        if self._parts.evictor.rules.is_held(record):
            return False  # somebody may be writing there
        if again and record.in_hbm is State.DIRTY:
            self._parts.transfers.drain(record)
        return record.at_home is State.VALID

    def _tensors(self, record: Record) -> Sequence[torch.Tensor]:
        """Returns a block's tensors where it lies, as the device sees them; none if it does not."""
        block, extent = record.block, record.home_extent
        home, found = self._seen.get(block.id, (None, ()))
        if extent is not None and home != extent:
            with torch.inference_mode(False):
                whole = self._parts.copy.seen(self._parts.homes.arena.bytes_of(extent))
                found = () if whole is None else [view_of(whole, spec) for spec in block.tensors]
            self._seen[block.id] = extent, found
        return found
