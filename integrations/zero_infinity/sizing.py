"""Budgets that a file leaves open: how much of each tier this model and optimizer take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import tiermem
from tiermem.config import parse_size

from .mapping import DTYPES, Plan
from .reading import SHORT
from .zerooptions import PARAM, STATE, ZERO

_MARGIN = 32
"""One part in this many is added to the host memory that is needed."""
_STAGING = 256 << 20
"""Bytes that are added if there are files: staging chunks, which grow with the budget."""
_STATE = 12
"""Bytes of masters and state of a parameter: float32 and two moments."""


def size(
    plan: Plan, model: nn.Module, made: tuple[Any, dict[str, Any]] | None, groups: Sequence[Any]
) -> tiermem.Budgets:
    """Sets ``hbm``, ``dram`` and the home of gradients of a plan, if the file does not.

    Gradients of offloaded state stay in HBM where its budget is not set and it has room for
    weights, gradients, masters and state together; else they are in DRAM. Host memory is what is
    at home there, the buffers that the file asks for, and a margin, no more than is available.
    Where steps may be made inside backward it is as much again, which keeps what they change until
    they are confirmed, as long as all of it is no more than half of what is available.
    What is missing goes to ``plan.refused``.

    Args:
        plan: What the configuration became.
        model: Not wrapped; it may still be of another dtype.
        made: Class and settings of the optimizer; None for none.
        groups: What the optimizer gets.

    Returns:
        What is needed of each budget.
    """
    manager, policy = plan.manager, plan.manager["policy"]
    found = _budgets(plan, model, made, groups)
    free = "hbm" not in manager and _has_device_bits(plan)
    if policy["grads"] == "dram" and free and found.all_in_hbm <= found.hbm:
        policy["grads"] = "hbm"
        found = _budgets(plan, model, made, groups)
    manager["hbm"] = found.hbm
    if "dram" in manager:
        return found
    if found.dram > found.available:
        plan.refused = plan.refused or (
            f"{plan.config.name}: {found.dram:,} bytes of host memory are needed for what is "
            f"offloaded to it, and {found.available:,} are available; put more of it on NVMe "
            f"({PARAM}.device, {STATE}.device), or give tiermem: {{dram: ...}} to try"
        )
    wanted = _wanted(plan, model, found)
    ahead = _may_step_ahead(plan) and found.all_in_hbm > found.hbm
    twice = min(wanted + found.dram, found.available // 2) if ahead else 0
    manager["dram"] = max(found.dram, min(wanted, found.available * 9 // 10), twice)
    return found


def missing(plan: Plan, needed: tiermem.Budgets, tier: tiermem.TierManager) -> str:
    """Returns which budget is too small, before a model is cast and moved; "" if none is.

    Args:
        plan: What the configuration became.
        needed: What :func:`size` found.
        tier: Has the budgets.
    """
    limits = tier.stats().budget
    least = {"hbm": needed.least_hbm, "dram": needed.dram}
    if "nvme_bytes" in plan.manager:
        least["nvme_bytes"] = needed.nvme_bytes
        limits = {**limits, "nvme_bytes": parse_size(plan.manager["nvme_bytes"], "nvme_bytes")}
    for key, nbytes in least.items():
        if nbytes > limits[key]:
            return (
                f"{plan.config.name}: tiermem.{key}: this run takes {nbytes:,} bytes of it at "
                f"least, and the budget is {limits[key]:,}"
            )
    return ""


def _budgets(
    plan: Plan, model: nn.Module, made: tuple[Any, dict[str, Any]] | None, groups: Sequence[Any]
) -> tiermem.Budgets:
    manager = plan.manager
    cls, settings = made or (None, {})
    buffers = plan.config["data_types.buffer_dtype"]
    asked = {key: value for key, value in plan.optimizer.items() if key != "host_share"}
    return tiermem.budgets_for(
        model,
        cls,
        groups or None,
        device=manager["device"],
        hbm=manager.get("hbm"),
        nvme="nvme" in manager,
        policy=manager["policy"],
        dtype=plan.dtype,
        buffer_dtype=None if buffers is None else DTYPES[SHORT[buffers]],
        **asked,
        **settings,
    )


def _may_step_ahead(plan: Plan) -> bool:
    """Whether steps may be made inside backward: what they change is in DRAM, and can be undone."""
    policy = plan.manager["policy"]
    at_home = policy["params"] == policy["optimizer"] == "dram"
    return at_home and plan.optimizer["overlap"] == "auto" and _has_device_bits(plan)


def _has_device_bits(plan: Plan) -> bool:
    """Whether no step is performed on the host that would round differently."""
    return plan.optimizer["where"] in ("auto", "device")


def _wanted(plan: Plan, model: nn.Module, found: tiermem.Budgets) -> int:
    """Returns bytes of DRAM: those that are needed, and those that make the run faster."""
    wanted = found.dram + _ahead(plan, model)
    wanted += wanted // _MARGIN + (_STAGING if "nvme" in plan.manager else 0)
    if plan.manager["policy"]["activations"] == "dram":
        return found.available  # the batch is not known; DRAM is only taken as it is used
    return wanted


def _ahead(plan: Plan, model: nn.Module) -> int:
    """Returns the bytes of DRAM for reading ahead that a file asks for, at most the model's."""
    config, policy, ahead = plan.config, plan.manager["policy"], 0
    params = list(model.parameters())
    if policy["params"] == "nvme":
        elements = sum(p.numel() for p in params)
        asked = config[f"{PARAM}.buffer_count"] * config[f"{PARAM}.buffer_size"]
        asked = min(elements, asked + config[f"{PARAM}.max_in_cpu"])
        ahead += asked * (torch.float32 if plan.dtype is None else plan.dtype).itemsize
    if policy["optimizer"] == "nvme":
        trained = sum(p.numel() for p in params if p.requires_grad)
        group = min(trained, config[f"{ZERO}.sub_group_size"])
        ahead += min(trained * _STATE, config[f"{STATE}.buffer_count"] * group * 4)
    return ahead
