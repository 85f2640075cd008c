"""torch's fused CPU kernels, if an optimizer class has one and its user set nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tiermem.nn.compat.outside import OUTSIDE
from tiermem.optim.rules.plainstep import run_unseen
from tiermem.optim.rules.separable import Make, ready


def with_fused(make: Make) -> Make:
    """Returns a maker of the same optimizer with torch's fused CPU kernel, if there is one.

    A user's own setting of ``foreach`` or ``fused`` is kept. These kernels take no complex tensors.
    """

    def fused(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        for group in groups:
            chosen = group.get("fused") is not None or group.get("foreach")
            if not chosen and all(p.is_floating_point() for p in group["params"]):
                group["fused"] = True
        return make(groups)

    probe = nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
    probe.grad = torch.zeros(1, dtype=torch.float32, device="cpu")
    try:
        plain = make([{"params": [probe]}])
        settings = plain.param_groups[0]
        chosen = settings.get("foreach") is not None or settings.get("fused") is not None
        if chosen or "fused" not in settings:
            return make
        run_unseen(ready(fused([{"params": [probe]}])))
    except Exception as error:  # no such kernel for these settings: the class chooses
        if OUTSIDE not in error.__dict__:
            raise  # raised by a signal handler in tiermem's code
        return make
    return fused
