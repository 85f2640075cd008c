"""Tests whether steps on the host have the device's bits, on values of all sizes.

The kernels' operations were read in some versions of torch for some GPUs. Here it is tested:
the device performs steps of a class with the user's settings, the host performs the same, and if
a single bit differs, nothing of that kind is stepped on the host. It takes some milliseconds, once
per kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import nn

from tiermem.optim.host.exact import Beside, ExactCalls, Kind, Proven
from tiermem.optim.host.loop import library
from tiermem.optim.rules.bits import SPECIAL, bits
from tiermem.optim.rules.plainstep import run_unseen
from tiermem.optim.rules.separable import Make
from tiermem.runtime.base.functorch import outside_inference

_STEPS = (0, 1, 2, 9, 99, 999, 9999, 123455)
_SIZES = (16384, 16381)  # whole vectors of the kernels, and not
_ROUNDS = 3
_FACTOR = 0.37
"""Factor for gradients in one more round, as in a clipping."""
_COUNTS = (*range(1, 193), *(round(200 * 1.15**n) for n in range(64)))
_FEW = 4  # this many elements for each of these
_MOST_BETAS = 16
"""Maximal number of pairs of betas tried on a device; a schedule that changes them in each step
is left to the device, as each trial waits for it."""

_kinds: dict[tuple[Kind, str], bool | str] = {}
_nans: dict[str, int] = {}
_offsets: dict[tuple[str, tuple[float, ...]], dict[float, int] | None] = {}


def forget() -> None:
    """Clears the results, so that every kind is tried again."""
    _kinds.clear()
    _offsets.clear()


def prove(
    kind: Kind, settings: Mapping[str, Any], make: Make, device: torch.device
) -> Proven | str:
    """Returns what the host's steps of a kind need, or why their bits differ from the device's.

    Args:
        kind: The operations of the steps.
        settings: Settings of the parameter group.
        make: Creates the plain optimizer.
        device: The device.
    """
    loop = library()
    if isinstance(loop, str):
        return loop
    name = _name(device)
    if (kind, name) not in _kinds and _captures(device):
        return "a CUDA graph is being captured"
    with outside_inference(), torch.no_grad():
        proven = Proven(kind.flavour, _nan16(device, name))
        if kind.flavour == "fused" and "betas" in settings:
            offsets = _offsets_of(tuple(settings["betas"]), device, name)
            if offsets is None:
                return f"the powers of betas={settings['betas']} on {name} are others"
            proven.offsets.update(offsets)
        if (kind, name) not in _kinds:
            _kinds[kind, name] = _try(kind, settings, make, device, proven)
    found = _kinds[kind, name]
    return found if isinstance(found, str) else proven


def _name(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    return f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"


def _nan16(device: torch.device, name: str) -> int:
    """Returns the bits of a device's NaN in bfloat16."""
    if name not in _nans:
        found = torch.full((1,), float("nan"), dtype=torch.float32, device=device)
        found = found.to(torch.bfloat16)
        _nans[name] = int(found.view(torch.int16).item()) & 0xFFFF
    return _nans[name]


def _captures(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _try(
    kind: Kind, settings: Mapping[str, Any], make: Make, device: torch.device, proven: Proven
) -> bool | str:
    """Performs steps on both sides; returns what differs, or True."""
    source = torch.Generator().manual_seed(1)
    sizes = [_SIZES[number % 2] for number in range(len(_STEPS))]
    mine = [nn.Parameter(_values(size, kind.stepped, source)) for size in sizes]
    theirs = [nn.Parameter(p.detach().to(device, copy=True)) for p in mine]
    casts = [torch.empty(size, dtype=kind.weight, device="cpu") for size in sizes]
    try:
        here = make([{**settings, "foreach": None, "fused": True, "params": mine}])
        there = make([{**settings, "params": theirs}])
        is_adam = kind.cls is not torch.optim.SGD
        if is_adam:
            _give_state(here, there, mine, theirs, source)
        for step in range(_ROUNDS + is_adam):  # the host clips for no other class
            gradients = [_values(size, kind.weight, source) for size in sizes]
            given = [gradient.to(device, copy=True) for gradient in gradients]
            by = torch.ones((), dtype=kind.weight, device="cpu")
            if step == _ROUNDS:
                torch._foreach_mul_(given, by.mul_(_FACTOR).to(device))
            for param, gradient in zip(theirs, given, strict=True):
                param.grad = gradient.to(kind.stepped)
            run_unseen(there)
            _step_here(here, mine, gradients, casts, proven, float(by))
            found = _differing(here, there, mine, theirs, casts)
            if found:
                return (
                    f"step {step + 1} of {kind.cls.__name__} ({kind.flavour}) on "
                    f"{_name(device)} with torch {torch.__version__} gives other bits: {found}"
                )
    except Exception as error:  # whatever a torch version raises for settings of another one
        return f"steps to compare cannot be made: {type(error).__name__}: {error}"
    return True


def _step_here(
    optimizer: torch.optim.Optimizer,
    params: Sequence[nn.Parameter],
    gradients: Sequence[torch.Tensor],
    casts: Sequence[torch.Tensor],
    proven: Proven,
    factor: float = 1.0,
) -> None:
    beside = {}
    for param, gradient, cast in zip(params, gradients, casts, strict=True):
        param.grad = stand_in(param)
        target = None if cast.dtype is param.dtype else cast
        beside[param.data_ptr()] = Beside(gradient, target, factor)
    ExactCalls(proven, beside).step(optimizer, run_unseen)


def step_exactly(
    optimizer: torch.optim.Optimizer,
    param: nn.Parameter,
    gradient: torch.Tensor,
    target: torch.Tensor,
    proven: Proven,
) -> None:
    """Performs a step of one parameter on the host with the loop.

    Args:
        optimizer: Steps it.
        param: The parameter, in host memory.
        gradient: Its gradient, in its own dtype.
        target: Receives the cast of the result, if its dtype differs.
        proven: What is known about the device.
    """
    _step_here(optimizer, [param], [gradient], [target], proven)


def stand_in(param: torch.Tensor) -> torch.Tensor:
    """Returns a gradient that takes no memory, for use when the loop gets the real one."""
    return torch.zeros((), dtype=param.dtype, device="cpu").expand(param.shape)


def _give_state(
    here: torch.optim.Optimizer,
    there: torch.optim.Optimizer,
    mine: Sequence[nn.Parameter],
    theirs: Sequence[nn.Parameter],
    source: torch.Generator,
) -> None:
    """Gives Adam's parameters states as after many different numbers of steps."""
    amsgrad, fused = there.param_groups[0]["amsgrad"], there.param_groups[0].get("fused")
    for own, other, step in zip(mine, theirs, _STEPS, strict=True):
        keys = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])]
        for key in keys:
            value = _values(own.numel(), own.dtype, source)
            value = value.abs_() if key.endswith("sq") else value
            here.state[own][key] = value
            there.state[other][key] = value.to(other.device, copy=True)
        here.state[own]["step"] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
        where = other.device if fused else "cpu"
        there.state[other]["step"] = torch.tensor(float(step), dtype=torch.float32, device=where)


def _differing(
    here: torch.optim.Optimizer,
    there: torch.optim.Optimizer,
    mine: Sequence[nn.Parameter],
    theirs: Sequence[nn.Parameter],
    casts: Sequence[torch.Tensor],
) -> str:
    """Returns a text with the number of differing elements, or ""."""
    counts: dict[str, int] = {}
    for own, other, cast in zip(mine, theirs, casts, strict=True):
        pairs: list[tuple[str, torch.Tensor, torch.Tensor]] = [("weights", own, other)]
        if cast.dtype is not own.dtype:
            pairs.append(("casts", cast, other.detach().to(cast.dtype)))
        state = there.state[other]
        for key, value in here.state[own].items():
            if isinstance(value, torch.Tensor):
                pairs.append((key, value, state[key]))
        for key, first, second in pairs:
            ours, other_bits = bits(first), bits(second.detach().cpu())
            if not torch.equal(ours, other_bits):
                apart = (ours != other_bits).view(-1, first.itemsize).any(1)
                counts[key] = counts.get(key, 0) + int(apart.sum())
    total = sum(param.numel() for param in mine)
    return ", ".join(f"{count} of {total} {key}" for key, count in counts.items())


def _values(count: int, dtype: torch.dtype, source: torch.Generator) -> torch.Tensor:
    """Returns values of every exponent, subnormal ones, zeros and infinities among them."""
    wild = torch.randint(
        -(1 << 31), 1 << 31, (count,), dtype=torch.int64, generator=source, device="cpu"
    )
    on: dict[str, Any] = {"generator": source, "dtype": torch.float32, "device": "cpu"}
    calm = torch.randn(count, **on) * 0.02
    plain = torch.randn(count, **on) * torch.pow(10.0, torch.rand(count, **on) * 16 - 12)
    which = torch.randint(0, 4, (count,), generator=source, device="cpu")
    found = torch.where(which == 0, wild.to(torch.int32).view(torch.float32), plain)
    found = torch.where(which == 1, calm, found)
    places = torch.randint(0, count, (count // 64,), generator=source, device="cpu")
    chosen = torch.randint(0, len(SPECIAL), (len(places),), generator=source, device="cpu")
    found[places] = torch.tensor(SPECIAL, dtype=torch.float32, device="cpu")[chosen]
    return found.to(dtype)


def _offsets_of(
    betas: tuple[float, ...], device: torch.device, name: str
) -> dict[float, int] | None:
    """Finds the reciprocals on which the device's powers of betas are based.

    Returns:
        By beta, as float32; None if no candidate gives the bits of fused Adam's steps.
    """
    if (name, betas) not in _offsets:
        if sum(key[0] == name for key in _offsets) >= _MOST_BETAS or _captures(device):
            return None
        _offsets[name, betas] = _find_offsets(betas, device)
    return _offsets[name, betas]


def _find_offsets(betas: tuple[float, ...], device: torch.device) -> dict[float, int] | None:
    source = torch.Generator().manual_seed(2)
    size = len(_COUNTS) * _FEW
    on: dict[str, Any] = {"generator": source, "dtype": torch.float32, "device": "cpu"}
    start = [torch.rand(size, **on) + 0.5 for _ in range(4)]
    theirs = _by_kernel([t.to(device, copy=True) for t in start], betas)
    first, second = (float(np.float32(beta)) for beta in betas)
    for one, two in product((0, -1, 1), repeat=2):
        offsets = {first: one, second: two}
        if len(offsets) == 2 or one == two:
            with ExactCalls(Proven("fused", 0, offsets)):
                mine = _by_kernel([t.clone() for t in start], betas)
            if all(torch.equal(a, b.cpu()) for a, b in zip(mine, theirs, strict=True)):
                return offsets
    return None


def _by_kernel(tensors: Sequence[torch.Tensor], betas: tuple[float, ...]) -> list[torch.Tensor]:
    """Performs fused Adam's step at many step numbers with one call."""
    device = tensors[0].device
    steps = list(torch.tensor(_COUNTS, dtype=torch.float32, device="cpu").to(device).unbind())
    param, grad, first, second = (list(t.split(_FEW)) for t in tensors)
    torch._fused_adam_(
        param,
        grad,
        first,
        second,
        [],
        steps,
        lr=1e-3,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=0.0,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )
    return list(tensors)
