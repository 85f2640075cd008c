"""Train and run torch models larger than their GPU, bit for bit.

Every tensor lives in HBM, page-locked DRAM or a file on a fast disk, and
moves up before it is needed.
"""

from __future__ import annotations

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
