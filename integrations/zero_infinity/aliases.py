"""``install``: scripts that import from inside DeepSpeed find this package instead."""

from __future__ import annotations

import sys
from types import ModuleType

from tiermem import ConfigError

from . import accelerator, checkpointing, comm, onecycle, ops, schedules, zero
from .ops import adam, lamb, lion


def install(package: ModuleType) -> None:
    """Has ``import deepspeed``, and imports from inside it, find a package, in this process.

    Args:
        package: What is found.

    Raises:
        ConfigError: If DeepSpeed itself was imported before.
    """
    there = sys.modules.get("deepspeed")
    if there is not None and there is not package:
        raise ConfigError("install(): deepspeed was imported already; install first")
    schedule_names = ModuleType("deepspeed.runtime.lr_schedules")
    for module in (schedules, onecycle):
        schedule_names.__dict__.update({k: v for k, v in vars(module).items() if k[0].isupper()})
    runtime = ModuleType("deepspeed.runtime")
    utils = ModuleType("deepspeed.utils")
    utils.__dict__.update({k: getattr(package, k) for k in ("logger", "set_z3_leaf_modules")})
    activations = ModuleType("deepspeed.runtime.activation_checkpointing")
    sys.modules.update({
        "deepspeed": package,
        "deepspeed.accelerator": accelerator,
        "deepspeed.checkpointing": checkpointing,
        "deepspeed.comm": comm,
        "deepspeed.ops": ops,
        "deepspeed.ops.adam": adam,
        "deepspeed.ops.lamb": lamb,
        "deepspeed.ops.lion": lion,
        "deepspeed.runtime": runtime,
        "deepspeed.runtime.activation_checkpointing": activations,
        "deepspeed.runtime.activation_checkpointing.checkpointing": checkpointing,
        "deepspeed.runtime.lr_schedules": schedule_names,
        "deepspeed.runtime.zero": zero,
        "deepspeed.utils": utils,
        "deepspeed.zero": zero,
    })  # fmt: skip
    runtime.__dict__.update({"lr_schedules": schedule_names, "zero": zero})
    activations.__dict__["checkpointing"] = checkpointing
