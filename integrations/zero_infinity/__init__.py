"""DeepSpeed's ZeRO-Infinity and ZeRO-Offload configurations, on one GPU.

A script that begins with ``import tiermem.integrations.zero_infinity as deepspeed`` runs with its
configuration as it is. :func:`explain` says what each setting became.
"""

from __future__ import annotations

import sys
from typing import Any

from tiermem import ConfigError as DeepSpeedConfigError

from . import checkpointing, comm, namespaces, refused, schedules, zero
from .accelerator import get_accelerator
from .comm import init_distributed
from .engine import DeepSpeedEngine
from .explaining import Explanation, Row, explain
from .mapping import DeepSpeedConfig
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
from .utils import OnDevice, log_dist, logger

__version__ = "0.19.6"
"""The release of DeepSpeed whose behaviour is followed."""
version = __version__

_modules = namespaces.build()
runtime, utils, ops = _modules["runtime"], _modules["utils"], _modules["ops"]
globals().update(refused.stand_ins(""))
globals().update({k: v for k, v in _modules.items() if "." not in k and k not in globals()})

__all__ = [
    "DeepSpeedCPUAdam",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "Explanation",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
    "LRRangeTest",
    "OnDevice",
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
    "log_dist",
    "logger",
    "ops",
    "runtime",
    "schedules",
    "set_z3_leaf_modules",
    "utils",
    "version",
    "zero",
]


def install() -> None:
    """Makes ``import deepspeed``, and imports from inside it, find this package in this process.

    For scripts with lines such as ``from deepspeed.ops.adam import DeepSpeedCPUAdam``; call it
    before them.

    Raises:
        ConfigError: If DeepSpeed itself was imported before.
    """
    namespaces.install(sys.modules[__name__], _modules)


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"tiermem.integrations.zero_infinity has no {name!r}: it has what training loops call of "
        f"DeepSpeed ({', '.join(__all__)}); inference engines, pipelines and MoE layers are not "
        "there"
    )
