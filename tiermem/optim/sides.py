"""Which units the host steps, and which the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiermem.nn.runtime import ModuleRuntime
from tiermem.optim.host import HostSide, lives_in_dram, with_fused
from tiermem.optim.probe import Make
from tiermem.optim.share import Speeds, choose_host, measure
from tiermem.optim.unit import StepUnit


def choose_sides(
    runtime: ModuleRuntime,
    units: Sequence[StepUnit],
    make: Make,
    stepped: torch.dtype,
    *,
    share: bool,
) -> tuple[bool, Speeds | None]:
    """Has the host step what it can: whole blocks of weights, all of it at home in DRAM.

    Args:
        runtime: The modules' runtime.
        units: In the order of the modules.
        make: Makes a plain optimizer.
        stepped: Dtype of what is stepped.
        share: Whether the device has a part of it, so that both finish together.

    Returns:
        Whether the host has anything to do, and the speeds, where they were measured.
    """
    groups: dict[int, list[StepUnit]] = {}
    for unit in units:
        if lives_in_dram(runtime, unit):
            groups.setdefault(id(unit.group), []).append(unit)
    if not groups:
        return False, None
    on_host = with_fused(make)
    chosen, speeds = [True] * len(groups), None
    if share:
        sizes = [
            sum(p.numel() for u in sharers for p, _ in u.members) for sharers in groups.values()
        ]
        kept = sum(b.nbytes for s in groups.values() for u in s for b in u.kept_blocks())
        weight = next(p.dtype for s in groups.values() for u in s for p, _ in u.members)
        speeds = measure(
            on_host, make, runtime.manager.device, weight, stepped, kept // max(1, sum(sizes))
        )
        chosen = choose_host(sizes, speeds)
    for mine, sharers in zip(chosen, groups.values(), strict=True):
        for unit in sharers if mine else ():
            unit.step_on(HostSide(unit), on_host)
    return any(chosen), speeds
