"""Train and run torch models that are larger than device memory, with bitwise identical results.

Every tensor lives in HBM (device memory), in page-locked DRAM or in a file
on NVMe, and is copied to HBM before it is used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiermem.budgets import Budgets, budgets_for
    from tiermem.config import Policy
    from tiermem.core.block import Role, Tier
    from tiermem.errors import (
        CapacityError,
        CheckpointError,
        ClosedError,
        ConfigError,
        IntegrityError,
        InvariantError,
        ParameterError,
        StepError,
        StorageError,
        TierError,
        WrapError,
    )
    from tiermem.loading.load import load_checkpoint
    from tiermem.lora.adapters import add_adapters
    from tiermem.lora.config import Lora
    from tiermem.lora.files import load_adapters, save_adapters
    from tiermem.nn.loss import chunked_cross_entropy
    from tiermem.optim.tiered import TieredOptimizer
    from tiermem.runtime.metrics.counters import (
        ActivationStats,
        LinkStats,
        PaceRow,
        ResidencyRow,
        Stats,
    )
    from tiermem.saving.later import SaveHandle
    from tiermem.tier import TierManager

__version__ = "0.1.0"

__all__ = [
    "ActivationStats",
    "Budgets",
    "CapacityError",
    "CheckpointError",
    "ClosedError",
    "ConfigError",
    "IntegrityError",
    "InvariantError",
    "LinkStats",
    "Lora",
    "PaceRow",
    "ParameterError",
    "Policy",
    "ResidencyRow",
    "Role",
    "SaveHandle",
    "Stats",
    "StepError",
    "StorageError",
    "Tier",
    "TierError",
    "TierManager",
    "TieredOptimizer",
    "WrapError",
    "add_adapters",
    "budgets_for",
    "chunked_cross_entropy",
    "load_adapters",
    "load_checkpoint",
    "save_adapters",
]

_MODULES = {
    "tiermem.budgets": (
        "Budgets",
        "budgets_for",
    ),
    "tiermem.config": ("Policy",),
    "tiermem.core.block": (
        "Role",
        "Tier",
    ),
    "tiermem.errors": (
        "CapacityError",
        "CheckpointError",
        "ClosedError",
        "ConfigError",
        "IntegrityError",
        "InvariantError",
        "ParameterError",
        "StepError",
        "StorageError",
        "TierError",
        "WrapError",
    ),
    "tiermem.loading.load": ("load_checkpoint",),
    "tiermem.lora.adapters": ("add_adapters",),
    "tiermem.lora.config": ("Lora",),
    "tiermem.lora.files": (
        "load_adapters",
        "save_adapters",
    ),
    "tiermem.nn.loss": ("chunked_cross_entropy",),
    "tiermem.optim.tiered": ("TieredOptimizer",),
    "tiermem.runtime.metrics.counters": (
        "ActivationStats",
        "LinkStats",
        "PaceRow",
        "ResidencyRow",
        "Stats",
    ),
    "tiermem.saving.later": ("SaveHandle",),
    "tiermem.tier": ("TierManager",),
}
"""The public names of each module. Modules, and torch, are imported when a name is first used.

So the command prints its usage at once, and it handles Ctrl-C while torch is being imported.
"""


def __getattr__(name: str) -> Any:
    """Imports a public name, or a module with all public names, when it is first used."""
    for module, names in _MODULES.items():
        if name in names:
            found = globals()[name] = getattr(import_module(module), name)
            return found
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        for module in _MODULES:  # the name may be a package: this imports its public modules
            import_module(module)
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
