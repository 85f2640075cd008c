"""What all parts of one optimizer share."""

from __future__ import annotations

from dataclasses import dataclass

from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.optim.tried import TriedClass
from tiermem.optim.units.collection import Units


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerParts:
    """What the parts of an optimizer share, like :class:`~tiermem.runtime.parts.Parts` below.

    Attributes:
        runtime: The modules' runtime.
        tried: The class that performs the steps.
        units: All units of the optimizer.
        number: Distinguishes the optimizers of one manager.
    """

    runtime: ModuleRuntime
    tried: TriedClass
    units: Units
    number: int
