"""Blocks that optimizer steps have written, which are written home in the next forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiermem.core.block import Block
from tiermem.nn.passes.scopes import PassScope
from tiermem.runtime.services.sweep import BlockSweep

if TYPE_CHECKING:
    from tiermem.nn.passes.runtime import ModuleRuntime

_PAST = 3  # blocks that forward has to use after the first one to count as "further"


class Unwritten(list[Block]):
    """Blocks that are written home once forward has progressed further.

    Models copy values to the host at their begin (is a mask needed?), and on CUDA such a copy waits
    for all copies home that are ready to run.

    Attributes:
        staying: Ids of those that are written home although they stay in HBM.
    """

    def __init__(self, runtime: ModuleRuntime) -> None:
        """Starts without blocks."""
        super().__init__()
        self._runtime = runtime
        self._past = -1
        self.staying: set[int] = set()

    def forget(self) -> None:
        """Forgets all blocks: they are written home when their room is needed."""
        self.clear()
        self.staying.clear()

    def got_further(self, scope: PassScope) -> None:
        """Notes that forward uses a block; writes these blocks home once it is past the first.

        Outer modules with blocks of their own may be called before. And not before some kernels of
        the following modules are launched, as the device is idle until then.
        """
        groups = self._runtime.groups
        if groups and groups[0] in scope.groups:
            self._past = 0
        elif self._past >= 0:
            self._past += 1
            if self._past >= _PAST:
                self._home()

    def _home(self) -> None:
        """Writes the blocks home, except those in use."""
        manager, blocks = self._runtime.manager, list(self)
        get = manager.parts.table.get
        self[:] = [b for b in blocks if (record := get(b.id)) is not None and record.leases]
        if not self:
            self._past = -1
        if len(self) < len(blocks):
            used, staying = {block.id for block in self}, self.staying
            free = [block for block in blocks if block.id not in used]
            sweep = BlockSweep(manager)
            sweep.write([block for block in free if block.id not in staying])
            sweep.write([block for block in free if block.id in staying], staying=True)
            self.staying = staying & used
