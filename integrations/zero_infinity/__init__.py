"""DeepSpeed's ZeRO-Infinity and ZeRO-Offload configurations, on one GPU.

A script that begins with ``import tiermem.integrations.zero_infinity as deepspeed`` runs with its
configuration as it is. :func:`explain` says what each setting became.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from tiermem import ConfigError as DeepSpeedConfigError

from . import aliases, checkpointing, comm, ops, schedules, zero
from .accelerator import get_accelerator
from .comm import init_distributed
from .engine import DeepSpeedEngine
from .explaining import Explanation, Row, explain
from .onecycle import OneCycle
from .optimizers import (
    DeepSpeedCPUAdam,
    FusedAdam,
    FusedLamb,
    FusedLion,
)
from .schedules import (
    LRRangeTest,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from .setup import (
    add_config_arguments,
    initialize,
    set_z3_leaf_modules,
)

__version__ = "0.19.6"
"""The release of DeepSpeed whose behaviour is followed."""

logger = logging.getLogger("tiermem.integrations.zero_infinity")

__all__ = [
    "DeepSpeedCPUAdam",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "Explanation",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
    "LRRangeTest",
    "OneCycle",
    "Row",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "explain",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "install",
    "logger",
    "ops",
    "schedules",
    "set_z3_leaf_modules",
    "zero",
]


def install() -> None:
    """Has ``import deepspeed``, and imports from inside it, find this package in this process.

    For scripts with lines such as ``from deepspeed.ops.adam import DeepSpeedCPUAdam``; call it
    before them.

    Raises:
        ConfigError: If DeepSpeed itself was imported before.
    """
    aliases.install(sys.modules[__name__])


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"tiermem.integrations.zero_infinity has no {name!r}: it has what training loops call of "
        f"DeepSpeed ({', '.join(__all__)}); inference engines, pipelines and MoE layers are not "
        "there"
    )
