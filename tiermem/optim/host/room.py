"""DRAM that the steps of one optimizer on the host need besides the homes of its blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiermem.core.block import Extent, Tier
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.memory.homes import HomeRequest
from tiermem.runtime.services.host_staging import HostStage, Load


class HostRoom:
    """Staging for blocks in files, and scratch memory for undoing a step.

    It belongs to the optimizer whose units use it: a repair frees one that no unit uses.

    Attributes:
        stage: The staging of blocks in files; None if there are none.
        scratch: Memory for undoing a step that fails, 1-D uint8; None if no step can fail half way.
    """

    def __init__(self, manager: BlockManager, loads: Sequence[Load], undone: int) -> None:
        """Reserves the memory.

        Args:
            manager: The manager of the blocks.
            loads: The blocks in files of each unit, in the order of the steps.
            undone: Maximal bytes that one step may have to undo.

        Raises:
            CapacityError: If the DRAM budget has no room for it; nothing is reserved then.
        """
        self._homes = manager.parts.homes
        self._places: list[tuple[Tier, Extent]] = []
        self.stage: HostStage | None = None
        self.scratch: torch.Tensor | None = None
        try:
            if undone:
                request = HomeRequest("undo of steps on the host", undone, "dram")
                for tier, extent in self._homes.reserve([request]):
                    if extent is not None:
                        self._places.append((tier, extent))
                        self.scratch = self._homes.arena.bytes_of(extent)
            if any(load.blocks for load in loads):
                self.stage = HostStage(manager, loads)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Frees the DRAM; no step is in progress, and none will use it."""
        if self.stage is not None:
            self.stage.close()
        while self._places:
            self._homes.release(*self._places.pop())

    def owned(self) -> list[tuple[Tier, Extent]]:
        """Returns the memory that it occupies."""
        return [*self._places, *(self.stage.owned() if self.stage is not None else ())]
