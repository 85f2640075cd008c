"""What every part of one optimizer is given."""

from __future__ import annotations

from dataclasses import dataclass

from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.optim.tried import TriedClass
from tiermem.optim.units.collection import Units


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerParts:
    """What the parts of an optimizer work on, as :class:`~tiermem.runtime.parts.Parts` is below.

    Attributes:
        runtime: The modules' runtime.
        tried: The class that makes the steps.
        units: All units of the optimizer.
        number: Tells the optimizers of one manager apart.
    """

    runtime: ModuleRuntime
    tried: TriedClass
    units: Units
    number: int
