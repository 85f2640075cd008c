"""DRAM that the steps of one optimizer on the host need besides the homes of its blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiermem.core.block import Extent, Tier
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.memory.homes import HomeRequest
from tiermem.runtime.services.host_staging import HostStage, Load


class HostRoom:
    """Staging for blocks at home in files, and scratch for what may have to be taken back.

    The optimizer whose units use it owns it: a repair frees one that no unit uses.

    Attributes:
        stage: Brings what is at home in files; None where nothing is.
        scratch: Memory for what a step that fails takes back, 1-D uint8; None where none can.
    """

    def __init__(self, manager: BlockManager, loads: Sequence[Load], undone: int) -> None:
        """Reserves it.

        Args:
            manager: Whose blocks are stepped.
            loads: What each unit has at home in files, in the order of the steps.
            undone: Most bytes that one step may have to take back.

        Raises:
            CapacityError: If the DRAM budget does not hold it; nothing is reserved then.
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
        """Frees the DRAM; no step is under way, and none begins in it any more."""
        if self.stage is not None:
            self.stage.close()
        while self._places:
            self._homes.release(*self._places.pop())

    def owned(self) -> list[tuple[Tier, Extent]]:
        """Returns the memory that it has."""
        return [*self._places, *(self.stage.owned() if self.stage is not None else ())]
