"""Zero copy: kernels read a few rows of a block in place, from its home in DRAM.

A device can read page-locked host memory over the bus. If a kernel reads only a few rows of a
block (such as an embedding's rows for some tokens), only these rows are transferred, and the
block needs no room in HBM. The planner does not know about this: it plans with room for the block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from tiermem.core.block import Block, Extent, Tier
from tiermem.core.residency import Record, State
from tiermem.runtime.base.functorch import outside_inference
from tiermem.runtime.base.gate import CallGate
from tiermem.runtime.parts import Parts
from tiermem.runtime.transfers.block_io import view_of

Found = TypeVar("Found")


class ZeroCopy:
    """Lends kernels the home copies of blocks; under the manager's lock."""

    def __init__(self, parts: Parts, gate: CallGate) -> None:
        """Works on ``parts``; ``gate`` is checked before every loan."""
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
        """Runs kernels on a block's home copy in DRAM, in place.

        Args:
            block: The block.
            look: Called with the block's tensors as the device sees them in DRAM; submits kernels
                to the current stream. It neither writes nor keeps the tensors.
            nbytes: Bytes that the kernels read, for the statistics.
            again: Whether such calls repeat without a write in between: then a dirty copy in
                HBM is copied home first.

        Returns:
            What ``look`` returned. None, without calling it, if the block has to be acquired
            as usual: its copy in DRAM is stale, or the device cannot address it; all blocks fit in
            HBM; or a CUDA graph is being captured.

        Raises:
            ClosedError: After ``close()``, or in a forked child.
        """
        if self._parts.table.all_fit:
            return None
        tensors = self.lend(block, again=again)
        if not tensors:
            return None
        marked = False
        try:
            found = look(tensors)
            self.lent(block, nbytes)
            marked = True
        finally:
            if not marked:  # an error or Ctrl-C: kernels may run without an event to wait for
                self._parts.copy.synchronize()
        return found

    def lend(self, block: Block, *, again: bool) -> Sequence[torch.Tensor]:
        """Lends kernels of the current stream a block's home copy in DRAM, until :meth:`lent`.

        Args:
            block: The block.
            again: As for :meth:`read`.

        Returns:
            Its tensors as the device sees them; none if they cannot be read in place now.

        Raises:
            ClosedError: After ``close()``, or in a forked child.
        """
        self._gate.guard()
        parts = self._parts
        record = parts.table[block.id]
        if (
            record.home is not Tier.DRAM
            or block.id in parts.deferred
            or parts.copy.capturing()
            or not self._at_home(record, again=again)
        ):
            return ()
        tensors = self._tensors(record)
        if tensors:
            parts.copy.use(parts.transfers.home_ready.get(block.id))
        return tensors

    def lent(self, block: Block, nbytes: int) -> None:
        """Makes the next write to that home wait for the kernels, as it would for a copy.

        Args:
            block: The block.
            nbytes: Bytes that the kernels read, for the statistics.
        """
        event = self._parts.copy.mark()
        if event is not None:
            self._parts.transfers.home_ready[block.id] = event
        counters = self._parts.counters
        counters.reads_in_place += 1
        counters.read_in_place += nbytes

    def sees(self, block: Block) -> bool:
        """Whether the device sees a block's home; creates its views outside of transforms."""
        return bool(self._tensors(self._parts.table[block.id]))

    def forget(self, block_id: int) -> None:
        """Drops the tensors of a block."""
        self._seen.pop(block_id, None)

    def clear(self) -> None:
        """Drops the tensors of all blocks."""
        self._seen.clear()

    def _at_home(self, record: Record, *, again: bool) -> bool:
        """Whether the home copy is current, or will be in stream order, and stays so."""
        if self._parts.evictor.rules.is_held(record):
            return False  # a lease holder may be writing there
        if again and record.in_hbm is State.DIRTY:
            self._parts.transfers.drain(record)
        return record.at_home is State.VALID

    def _tensors(self, record: Record) -> Sequence[torch.Tensor]:
        """Returns a block's tensors in DRAM as the device sees them; none if it cannot see them."""
        block, extent = record.block, record.home_extent
        if extent is not None:
            self._parts.homes.open(extent)
        home, found = self._seen.get(block.id, (None, ()))
        if extent is not None and home != extent:
            with outside_inference():
                whole = self._parts.copy.seen(self._parts.homes.arena.bytes_of(extent))
                found = () if whole is None else [view_of(whole, spec) for spec in block.tensors]
            self._seen[block.id] = extent, found
        return found
