"""Which part of an optimizer step the host performs, so that both sides end together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tiermem.optim.host.exact import Proven
from tiermem.optim.host.proof import step_exactly
from tiermem.optim.rules.plainstep import run_unseen
from tiermem.optim.rules.separable import Make, ready

_ELEMENTS = 1 << 20
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Speeds:
    """Measured cost of a step.

    Attributes:
        host: Seconds per element on the host.
        device: Seconds per element on the device, copies both ways included.
    """

    host: float
    device: float


def choose_host(elements: Sequence[int], speeds: Speeds) -> list[bool]:
    """Divides pieces of work between host and device.

    Each piece in turn is assigned to the side that would finish it sooner. Both sides then work
    in the order of use, and the later one ends at most one piece after the earlier.

    Args:
        elements: Sizes of the pieces, in the order in which they are needed.
        speeds: Speeds of the two sides.

    Returns:
        For each piece whether the host has it.
    """
    host = device = 0.0
    chosen = []
    for count in elements:
        on_host, on_device = host + count * speeds.host, device + count * speeds.device
        chosen.append(on_host < on_device)
        if chosen[-1]:
            host = on_host
        else:
            device = on_device
    return chosen


def choose_share(elements: Sequence[int], share: float) -> list[bool]:
    """Assigns the host a share of the elements, in pieces spread evenly over the order of use.

    Args:
        elements: Sizes of the pieces, in the order in which they are needed.
        share: Share of the elements, 0 to 1; reached within half of the largest piece.

    Returns:
        For each piece whether the host has it.
    """
    owed = 0.0
    chosen = []
    for count in elements:
        owed += count * share
        chosen.append(owed > count / 2)
        if chosen[-1]:
            owed -= count
    return chosen


def measure(
    host: Make,
    make: Make,
    device: torch.device,
    weight: torch.dtype,
    stepped: torch.dtype,
    kept: int,
    proven: Proven | None = None,
) -> Speeds:
    """Measures both sides on a tensor of a million elements; takes some ten milliseconds.

    Args:
        host: Creates the host's optimizer.
        make: Creates the device's.
        device: The device of the latter.
        weight: Dtype of weights and gradients.
        stepped: Dtype of the stepped tensors.
        kept: Bytes of state and masters per element, which are copied both ways.
        proven: What host steps with the device's bits need; None for torch's CPU kernels.
    """
    on_host = _seconds(host, torch.device("cpu"), weight, stepped, proven)
    on_device = _seconds(make, device, weight, stepped)
    if device.type == "cuda":
        # copies in both directions and compute overlap: the slowest of the three counts
        on_device = max(on_device, _copy_seconds(device, _ELEMENTS * (kept + weight.itemsize)))
    return Speeds(on_host / _ELEMENTS, on_device / _ELEMENTS)


def _seconds(
    make: Make,
    device: torch.device,
    weight: torch.dtype,
    stepped: torch.dtype,
    proven: Proven | None = None,
) -> float:
    """Returns the shortest time of a step with its casts."""
    param = nn.Parameter(torch.zeros(_ELEMENTS, dtype=stepped, device=device))
    gradient = torch.zeros(_ELEMENTS, dtype=weight, device=device)
    target = torch.empty_like(gradient)
    optimizer = ready(make([{"params": [param]}]))
    best = float("inf")
    with torch.no_grad():
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            if proven is not None:
                step_exactly(optimizer, param, gradient, target, proven)
            else:
                param.grad = gradient.to(stepped)
                run_unseen(optimizer)
                target.copy_(param)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - began)
    return best


def _copy_seconds(device: torch.device, nbytes: int) -> float:
    """Returns the shortest time of a copy from page-locked memory."""
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(_ROUNDS):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best
