"""What a step of one unit works on, in HBM for the time of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tiermem.nn.grads import GradUnit
from tiermem.runtime.slots import Slot

if TYPE_CHECKING:
    from tiermem.nn.runtime import ModuleRuntime
    from tiermem.optim.unit import StepUnit


class Held:
    """Holds weights, gradients, state and masters of a unit; a context.

    Entered, it gives the slots by the id of their block; the changes that gradients await are
    made, and the masters point at their bytes.
    """

    def __init__(self, unit: StepUnit, runtime: ModuleRuntime, *, kept: bool = True) -> None:
        """Holds nothing yet.

        Args:
            unit: Whose step it is.
            runtime: The modules' runtime.
            kept: Whether state and masters are held as well.
        """
        self._unit = unit
        self._runtime = runtime
        self._kept = unit.kept_blocks() if kept else []
        self._masters = unit.masters if kept else None
        self._gradients: list[GradUnit] = []
        self._slots: list[Slot] = []
        self._versions: list[int] = []
        self._stepped = False

    def __enter__(self) -> dict[int, Slot]:
        """Brings up everything, or nothing.

        Raises:
            CapacityError: If HBM cannot hold it.
            StorageError: If its bytes cannot be read.
        """
        unit = self._unit
        unit.foreign.hold()
        try:
            return self._open()
        except BaseException:
            self._close()
            raise

    def __exit__(self, *failure: Any) -> None:
        self._close()

    def _open(self) -> dict[int, Slot]:
        unit, runtime = self._unit, self._runtime
        self._gradients = [u for u in unit.grad_units() if any(e.has_grad for e in u.entries)]
        blocks = [u.block for u in self._gradients] + self._kept
        self._slots = runtime.manager.acquire_all(blocks)
        for u, slot in zip(self._gradients, self._slots, strict=False):
            runtime.grads.settle(u, slot)
        self._versions = [versions(slot.views) for slot in self._slots[: len(self._gradients)]]
        unit.scaled = False
        self._stepped = True
        slots = {id(slot.block): slot for slot in self._slots}
        if self._masters is not None:
            follows = unit.foreign.look()
            self._masters.open(slots.get(id(self._masters.block)), follows=follows)
        return slots

    def _close(self) -> None:
        """Lets go of all of it, and says what was written."""
        unit, manager = self._unit, self._runtime.manager
        try:
            if self._stepped and self._masters is not None:
                self._masters.close()
        finally:
            try:
                for index, slot in enumerate(self._slots):
                    # a class may write weights through `param.data`: nobody counts
                    written = self._stepped
                    if written and index < len(self._gradients):
                        written = unit.sees(self._gradients[index]) and (
                            unit.spoils
                            or unit.scaled
                            or self._versions[index] != versions(slot.views)
                        )
                    manager.release(slot.block, dirty=written)
            finally:
                unit.foreign.let_go(dirty=self._stepped)


def versions(tensors: Sequence[torch.Tensor]) -> int:
    """Returns how often the tensors of a block were written, as far as torch counts it."""
    return sum([tensor._version for tensor in tensors])
