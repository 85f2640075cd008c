"""Steps of plain Adam and AdamW optimizers by one kernel, with the bits of torch's ``foreach``.

It is not assumed to have them: before use, each kind of step is compared with torch's own, on
values of all sizes. The trial also shows how often torch counts a write of
each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from itertools import chain
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from tiermem.nn.compat.counters import increment_versions
from tiermem.nn.wrap.lookup import has_modes
from tiermem.optim.rules.adamkernel import AdamKernel, Numbers, Rows, kernel_for
from tiermem.optim.rules.bits import SPECIAL, bits
from tiermem.optim.rules.torchsteps import (
    flavour_of,
    foreach_numbers,
    is_decoupled,
    is_torchs,
    states_of,
)
from tiermem.runtime.base.functorch import outside_inference

_CLASSES = (torch.optim.Adam, torch.optim.AdamW)
_LEAST = 1 << 20
"""Minimal number of elements for using the kernel: compiling and trying takes half a second."""
_DTYPES = (torch.float32, torch.bfloat16)
_PLAIN = {torch.Tensor, nn.Parameter}
_NUMBERS = ("lr", "eps", "weight_decay")
_OFF = ("amsgrad", "capturable", "differentiable")
_TRIED = (0, 1, 9, 99, 999, 123455)
"""Numbers of steps that precede those that are tried."""
_SIZES = (16384, 16381, 8192 * 3 + 5)
_ROUNDS = 3

_DEVICE = "cuda"
_Base: Any = torch._C.TensorBase
_numel, _is_contiguous, _is_inference = _Base.numel, _Base.is_contiguous, _Base.is_inference
_get_device, _dtype = _Base.get_device, _Base.dtype.__get__
_data_ptr, _is_neg = _Base.data_ptr, _Base.is_neg
_f32 = np.float32


class _Kind(NamedTuple):
    """The operations of a step, on a device; tried once for all steps of the kind.

    Attributes:
        cls: The class of the optimizer.
        dtype: Dtype of parameters, gradients and moments.
        decay: Whether there is a weight decay.
        decays: Whether the factor of the decay of weights is not 0 as float32.
        decoupled: Whether the decay is decoupled from the gradients.
        maximize: Whether gradients are negated.
        near: Which of its two formulas ``lerp`` uses: that for weights below one half.
        device: Where the tensors are.
    """

    cls: type[torch.optim.Optimizer]
    dtype: torch.dtype
    decay: bool
    decays: bool
    decoupled: bool
    maximize: bool
    near: bool
    device: torch.device


class _Ready(NamedTuple):
    """The step of one parameter group.

    Attributes:
        kind: Its operations.
        numbers: Its numbers.
        group: The settings.
        rows: The tensors.
        steps: The counters.
    """

    kind: _Kind
    numbers: Numbers
    group: dict[str, Any]
    rows: Rows
    steps: list[torch.Tensor]


Writes = tuple[int, int, int]
"""How often torch counts a write of a parameter, and of its first and second moments, in a step."""

_tried: dict[_Kind, Writes | None] = {}


def forget() -> None:
    """Forgets what was tried, so that every kind is tried again."""
    _tried.clear()


def step_at_once(
    optimizer: torch.optim.Optimizer, own: Callable[[torch.optim.Optimizer], Any]
) -> bool:
    """Performs the step of a plain optimizer with one kernel, if that is known to be the same.

    Args:
        optimizer: A plain one, whose ``step`` is not observed.
        own: The ``step`` of its class.

    Returns:
        Whether the step was performed; otherwise nothing is done.
    """
    if not _is_torchs_own(optimizer, own):
        return False
    groups = optimizer.param_groups
    if sum(map(_numel, chain.from_iterable(group["params"] for group in groups))) < _LEAST:
        return False
    ready: list[_Ready] = []
    for group in groups:
        found = _ready(optimizer, group)
        if found is None:
            return False
        if found.rows.params:
            ready.append(found)
    if not ready or not _is_plain_time(optimizer):
        return False
    device = ready[0].kind.device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False  # torch raises or warns about that
    kernel = kernel_for(device)
    if kernel is None or any(one.kind.device != device for one in ready):
        return False
    with _current(device):
        writes = [_writes_of(kernel, one.kind, one.group) for one in ready]
        if None in writes:
            return False
        for one, counts in zip(ready, writes, strict=True):
            Recipe(kernel, one.kind, one.numbers, counts or (0, 0, 0)).step(one.rows, one.steps)
    return True


class Recipe:
    """How the kernel performs a step of a parameter group, on tensors known to be suitable."""

    __slots__ = ("_counts", "_kernel", "_kind", "_numbers")

    def __init__(self, kernel: AdamKernel, kind: _Kind, numbers: Numbers, counts: Writes) -> None:
        """Stores operations and numbers of the step, and how often torch counts its writes."""
        self._kernel, self._kind, self._numbers, self._counts = kernel, kind, numbers, counts

    def step(self, rows: Rows, steps: Sequence[torch.Tensor]) -> None:
        """Performs it, and counts writes as torch does.

        Args:
            rows: Ordinary tensors of one dtype and device; see :func:`are_alike`.
            steps: The counters, which are on the host.
        """
        with _current(self._kind.device):
            if steps:
                torch._foreach_add_([*steps], _one(), alpha=1.0)
            self._kernel.step(self._kind.dtype, self._numbers, rows)
            _count(rows, self._counts)


def recipe_of(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], first: torch.Tensor, made: float
) -> Recipe | None:
    """Returns how the kernel performs a step of a group; None if torch has to perform it.

    Args:
        optimizer: A plain one, whose ``step`` is not observed.
        group: The settings.
        first: A tensor with the dtype and the device of all tensors.
        made: The number of earlier steps.
    """
    if not _is_torchs_own(optimizer, type(optimizer).step.__wrapped__):  # type: ignore[attr-defined]
        return None
    if not (_has_plain_settings(group) and _is_by_foreach(group, first)):
        return None
    found = _kind_of(optimizer, group, first, made + 1) if _is_plain_time(optimizer) else None
    if found is None or _tried.get(found[0]) is None:
        return None
    if first.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    kernel, counts = kernel_for(first.device), _tried[found[0]]
    return None if kernel is None or counts is None else Recipe(kernel, *found, counts)


def are_ordinary(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether no class or mode intercepts operations on the tensors."""
    return set(map(type, tensors)) <= _PLAIN


@cache
def _one() -> torch.Tensor:
    """Returns 1 as a tensor, as torch does: a number would be converted for each counter."""
    with outside_inference():
        return torch.tensor(1.0, dtype=torch.float32, device="cpu")


# -- inside ----------------------------------------------------------------


def _is_torchs_own(optimizer: torch.optim.Optimizer, own: Callable[..., Any]) -> bool:
    """Whether an optimizer is of a class that the kernel supports, with torch's own methods.

    Args:
        optimizer: A plain one.
        own: The ``step`` of its class.
    """
    cls: Any = type(optimizer)
    return cls in _CLASSES and is_torchs(own) and is_torchs(cls._init_group)


def _is_plain_time(optimizer: torch.optim.Optimizer) -> bool:
    """Whether nobody observes torch's operations, and gradients have no scale."""
    return (
        not has_modes()
        and not torch._C._len_torch_dispatch_stack()
        and getattr(optimizer, "grad_scale", None) is None
        and getattr(optimizer, "found_inf", None) is None
    )


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a device the current one."""
    here = device.type != "cuda" or torch._C._cuda_getDevice() == device.index
    return nullcontext() if here else torch.cuda.device(device)


def _ready(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> _Ready | None:
    """Returns the step of a group; None if the kernel cannot perform it."""
    if not _has_plain_settings(group):
        return None
    params = [param for param in group["params"] if param.grad is not None]
    if not params:
        return _Ready(_NONE, _NO_NUMBERS, group, _NO_ROWS, [])
    first = params[0]
    if not _is_by_foreach(group, first):
        return None
    states = states_of(optimizer.state, params)
    if not all(states):
        if not any(states):
            _try_early(optimizer, group, first)
        return None  # torch creates it
    grads: list[Any] = [param.grad for param in params]
    firsts, seconds = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
    rows, steps = Rows(params, grads, firsts, seconds), [state["step"] for state in states]
    if not are_alike(rows) or len(set(map(_data_ptr, steps))) != len(steps):
        return None  # a counter that parameters share is counted once for each of them
    made = {step.item() if step.device.type == "cpu" else -1.0 for step in steps}
    if len(made) != 1 or min(made) < 0:
        return None
    found = _kind_of(optimizer, group, first, made.pop() + 1)
    return None if found is None else _Ready(*found, group, rows, steps)


def _has_plain_settings(group: dict[str, Any]) -> bool:
    """Whether all settings of a step are numbers, as the kernel requires."""
    betas = group["betas"]
    if any(group.get(name) for name in _OFF):
        return False
    if not all(type(v) in (int, float) for v in (*betas, *(group[name] for name in _NUMBERS))):
        return False
    return all(0 <= beta < 1 for beta in betas)  # torch has its own errors for others, set later


def _is_by_foreach(group: dict[str, Any], first: torch.Tensor) -> bool:
    """Whether torch would step a group by ``foreach``, with a device and dtype of the kernel's."""
    known = first.device.type == _DEVICE and first.dtype in _DTYPES
    return known and flavour_of(group, first.device) == "foreach"


def _kind_of(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], first: torch.Tensor, step: float
) -> tuple[_Kind, Numbers] | None:
    """Returns operations and numbers of a group's step; None if torch has to perform it.

    Args:
        optimizer: The plain one.
        group: The settings.
        first: The first parameter.
        step: The number of the step, from 1.
    """
    decoupled, maximize = is_decoupled(optimizer, group), bool(group["maximize"])
    settings = *map(group.__getitem__, _NUMBERS), *group["betas"]
    numbers = _numbers(*settings, step, decoupled, maximize)
    if not all(map(isfinite, numbers.values)):
        return None  # torch refuses some that float32 does not have
    kind = _Kind(
        type(optimizer),
        first.dtype,
        numbers.decay,
        numbers.values[5] != 0,
        decoupled,
        maximize,
        bool(abs(_f32(numbers.values[6])) < _f32(0.5)),
        first.device,
    )
    return kind, numbers


def _try_early(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], first: torch.Tensor
) -> None:
    """Tries the operations of later steps in the first one, which takes long anyway."""
    found = _kind_of(optimizer, group, first, 1.0)
    if found is None or found[0] in _tried or not _is_plain_time(optimizer):
        return
    if first.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    kernel = kernel_for(first.device)
    if kernel is not None:
        with _current(first.device):
            _writes_of(kernel, found[0], group)


def are_alike(rows: Rows) -> bool:
    """Whether all tensors are ordinary ones of one dtype and device, each with all its elements.

    Also, a gradient must not be a written tensor (``p.grad = p.data``), and no tensor may be
    written twice, as ``foreach`` reads them again in between. Uses C functions only: there are four
    calls per parameter, in every step.
    """
    every = [*rows.params, *rows.grads, *rows.firsts, *rows.seconds]
    if not are_ordinary(every):  # first: subclasses may answer the other questions themselves
        return False
    written = [*map(_data_ptr, chain(rows.params, rows.firsts, rows.seconds))]
    counts = [*map(_numel, rows.params)]
    return (
        len(set(map(_dtype, every))) == 1
        and len(set(map(_get_device, every))) == 1
        and all(map(_is_contiguous, every))
        and not any(map(_is_inference, every))
        and not any(map(_is_neg, rows.grads))
        and [*map(_numel, rows.grads)] == counts
        and [*map(_numel, rows.firsts)] == counts
        and [*map(_numel, rows.seconds)] == counts
        and len(set(written)) == len(written)
        and set(map(_data_ptr, rows.grads)).isdisjoint(written)
    )


@lru_cache(maxsize=64)
def _numbers(
    lr: float,
    eps: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    step: float,
    decoupled: bool,
    maximize: bool,
) -> Numbers:
    """Returns what a step is made with; all units of a step have it in common."""
    settings = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "beta1": beta1, "beta2": beta2}
    decay, values = foreach_numbers(settings, step, decoupled=decoupled)
    return Numbers(values, decay, decoupled, maximize)


_NO_NUMBERS = Numbers((), decay=False, decoupled=False, maximize=False)
_NO_ROWS = Rows([], [], [], [])
_NONE = _Kind(
    torch.optim.Adam, torch.float32, False, False, False, False, False, torch.device("cpu")
)


def _count(rows: Rows, counts: Writes) -> None:
    """Counts the writes of tensors as torch does."""
    written = rows.params, rows.firsts, rows.seconds
    for tensors, times in zip(written, counts, strict=True):
        for _ in range(times):
            increment_versions(tuple(tensors))


def _writes_of(kernel: AdamKernel, kind: _Kind, group: dict[str, Any]) -> Writes | None:
    """Returns how torch counts the writes of such a step; None if the bits differ."""
    if kind not in _tried:
        with outside_inference(), torch.no_grad():
            try:
                _tried[kind] = _try(kernel, kind, group)
            except torch.OutOfMemoryError:
                return None  # it is tried later
            except Exception:  # whatever a version of torch says to settings of another one
                _tried[kind] = None
    return _tried[kind]


def _try(kernel: AdamKernel, kind: _Kind, group: dict[str, Any]) -> Writes | None:
    """Performs steps both ways; returns how torch counts them, None if a bit differs."""
    cls: Any = kind.cls
    settings = {name: group[name] for name in (*_NUMBERS, "betas", "maximize")}
    if cls is torch.optim.Adam and kind.decoupled:
        settings["decoupled_weight_decay"] = True
    source = torch.Generator().manual_seed(1)
    counts: Writes | None = None
    for made in _TRIED:
        theirs = [nn.Parameter(_values(size, kind, source)) for size in _SIZES]
        mine = [nn.Parameter(param.detach().clone()) for param in theirs]
        plain = [cls(params, foreach=True, **settings) for params in (theirs, mine)]
        for params, own in zip((theirs, mine), plain, strict=True):
            generator = torch.Generator().manual_seed(made + 2)
            for param in params:
                own.state[param] = {
                    "step": torch.tensor(float(made), dtype=torch.float32, device="cpu"),
                    "exp_avg": _values(param.numel(), kind, generator),
                    "exp_avg_sq": _values(param.numel(), kind, generator).abs(),
                }
        for _ in range(_ROUNDS):
            for param, other in zip(theirs, mine, strict=True):
                param.grad = _values(param.numel(), kind, source)
                other.grad = param.grad.clone()
            before = [t._version for t in _written(plain[0], theirs[0])]
            type(plain[0]).step.__wrapped__(plain[0])  # nobody sees it
            after = [t._version for t in _written(plain[0], theirs[0])]
            found = tuple(now - then for then, now in zip(before, after, strict=True))
            if counts is not None and counts != found:
                return None
            counts = found  # type: ignore[assignment]
            _step_mine(kernel, kind, plain[1], mine)
            for param, other in zip(theirs, mine, strict=True):
                sides = zip(_written(plain[0], param), _written(plain[1], other), strict=True)
                if not all(torch.equal(bits(a), bits(b)) for a, b in sides):
                    return None
    return counts


def _step_mine(
    kernel: AdamKernel,
    kind: _Kind,
    optimizer: torch.optim.Optimizer,
    params: Sequence[nn.Parameter],
) -> None:
    """Performs a step with the kernel, of any size."""
    group, states = optimizer.param_groups[0], [optimizer.state[param] for param in params]
    torch._foreach_add_([state["step"] for state in states], 1)
    settings = *map(group.__getitem__, _NUMBERS), *group["betas"]
    numbers = _numbers(*settings, states[0]["step"].item(), kind.decoupled, kind.maximize)
    grads: list[Any] = [param.grad for param in params]
    firsts, seconds = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
    kernel.step(kind.dtype, numbers, Rows([*params], grads, firsts, seconds))


def _written(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> list[torch.Tensor]:
    state = optimizer.state[param]
    return [param, state["exp_avg"], state["exp_avg_sq"]]


def _values(size: int, kind: _Kind, source: torch.Generator) -> torch.Tensor:
    """Returns values of all sizes, on the device.

    Not every pattern of bits, as where steps on the host are tried: to draw those takes three times
    as long, and here the first step of a program waits for it.
    """
    mantissas = torch.randn(size, generator=source, device="cpu", dtype=torch.float32)
    exponents = torch.randint(-40, 20, (size,), generator=source, device="cpu")
    values = torch.ldexp(mantissas, exponents)
    special = torch.tensor(SPECIAL, dtype=torch.float32, device="cpu")
    places = torch.randint(0, size, (20 * len(special),), generator=source, device="cpu")
    values[places] = special.repeat(20)
    return values.to(kind.dtype).to(kind.device)
