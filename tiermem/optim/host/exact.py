"""Steps of torch's Adam, AdamW and SGD on the host with the bits that CUDA's kernels give.

The plain optimizer is torch's own, with ``fused=True``: torch keeps its state, its counters and its
settings. Only the call that computes is replaced by the loop of :mod:`tiermem.optim.host.loop`. The
loop reads gradients and writes work weights in bfloat16 itself, so casts need no separate pass over
memory.

Two kinds of kernels are known: ``fused=True``, and ``foreach``, torch's default on a GPU.
For their operations see ADR 45.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from tiermem.optim.host.loop import Row, make_steps, power
from tiermem.optim.rules.plainstep import is_bare
from tiermem.optim.rules.torchsteps import (
    Flavour,
    flavour_of,
    foreach_numbers,
    is_decoupled,
    is_torchs,
)

CLASSES: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
)
_METHODS = {("fused", False): 0, ("fused", True): 1, ("foreach", False): 2, ("foreach", True): 3}
_SGD = {"fused": 4, "foreach": 5}
_NO_MOMENTUM, _FIRST_MOMENTUM, _MOMENTUM = 0, 1, 2
_ADAMS = (torch.optim.Adam, torch.optim.AdamW)
_ADAM_SETTINGS = ("lr", "weight_decay", "eps", "amsgrad", "maximize")
_ADAM_NUMBERS = ("lr", "beta1", "beta2", "weight_decay", "eps")
_SCALES = ("grad_scale", "found_inf")
_MOST_NUMBERS = 64
_bits_of = Struct("5d").pack  # zeros of both signs are two settings, and NaN is one
_f32 = np.float32


@dataclass(frozen=True, slots=True)
class Kind:
    """The operations of a step.

    Attributes:
        cls: The optimizer class.
        flavour: Flavour of the device's kernels.
        stepped: Dtype of the stepped tensors and their state.
        weight: Dtype of weights; differs if masters are stepped.
        flags: The settings that select operations.
    """

    cls: type[torch.optim.Optimizer]
    flavour: Flavour
    stepped: torch.dtype
    weight: torch.dtype
    flags: tuple[Any, ...]


def kind_of_step(
    cls: type[torch.optim.Optimizer],
    settings: Mapping[str, Any],
    stepped: torch.dtype,
    weight: torch.dtype,
    device: torch.device,
) -> Kind | str:
    """Returns the kind of a step on a device, or why the host has no such step.

    Args:
        cls: The optimizer class.
        settings: Settings of the parameter group, as set by the user.
        stepped: Dtype of the stepped tensors.
        weight: Dtype of the weights.
        device: The device of the kernels.
    """
    if cls not in CLASSES:
        return f"{cls.__name__} is none of {', '.join(c.__name__ for c in CLASSES)}"
    flavour = flavour_of(settings, device)
    if flavour is None:
        return "foreach=False: torch steps it by single operations"
    if (stepped, weight) not in (
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
    ):
        return f"weights in {weight}, stepped in {stepped}"
    if settings.get("capturable") or settings.get("differentiable"):
        return "capturable or differentiable"
    names = ("lr", "weight_decay", "momentum", "dampening", "eps")
    values = [settings[name] for name in names if name in settings]
    if not all(type(v) in (int, float) for v in (*values, *settings.get("betas", ()))):
        return "settings that are not plain numbers"
    flags = _sgd_flags(settings, flavour) if cls is torch.optim.SGD else _adam_flags(settings)
    return flags if isinstance(flags, str) else Kind(cls, flavour, stepped, weight, flags)


def _adam_flags(settings: Mapping[str, Any]) -> tuple[Any, ...] | str:
    betas = settings["betas"]
    if not all(0 <= beta < 1 for beta in betas) or betas[1] == 0:
        return f"betas={betas}"
    rest = _f32(1 - betas[0])
    return (
        settings["weight_decay"] != 0,
        _f32(settings["weight_decay"]) != 0,
        bool(settings["amsgrad"]),
        bool(settings["maximize"]),
        bool(settings.get("decoupled_weight_decay")),
        bool(abs(rest) < _f32(0.5)),
    )


def _sgd_flags(settings: Mapping[str, Any], flavour: Flavour) -> tuple[Any, ...] | str:
    decay = settings["weight_decay"] != 0
    nesterov, maximize = bool(settings["nesterov"]), bool(settings["maximize"])
    if flavour == "foreach" and nesterov and not decay and not maximize:
        return "foreach with nesterov writes gradients"
    return (
        decay,
        _f32(settings["weight_decay"]) != 0,
        settings["momentum"] != 0,
        settings["dampening"] != 0,
        nesterov,
        maximize,
    )


@dataclass(slots=True)
class Proven:
    """The facts about a device that host steps of one kind need to give its bits.

    Attributes:
        flavour: Flavour of the device's kernels.
        nan16: Bits of NaN in bfloat16.
        offsets: For each beta, as float32, the reciprocal that the device's powers are based on.
        numbers: What kernels derive from settings and the number of a step; the last few.
    """

    flavour: Flavour
    nan16: int
    offsets: dict[float, int] = field(default_factory=dict)
    numbers: dict[Any, tuple[bool, list[float]]] = field(default_factory=dict)


@dataclass(slots=True)
class Beside:
    """Further tensors of one parameter for the loop, which torch's call does not pass.

    Attributes:
        gradient: In its own dtype, if the one in the call is a stand-in.
        cast: Receives the cast of the result, if there is one.
        factor: The gradient is multiplied by it when read, and not changed.
    """

    gradient: torch.Tensor | None = None
    cast: torch.Tensor | None = None
    factor: float = 1.0


class ExactCalls(TorchFunctionMode):
    """Replaces torch's fused CPU optimizer kernels with the compiled loop, inside ``with``.

    Attributes:
        written: Addresses of the tensors elsewhere that were written.
    """

    def __init__(
        self,
        device: Proven,
        beside: Mapping[int, Beside] | None = None,
        elsewhere: Mapping[int, int] | None = None,
    ) -> None:
        """Stores what the loop needs; the mode is entered around the optimizer's ``step()``.

        Args:
            device: What is known about the device.
            beside: Further tensors, by the address of the stepped tensor.
            elsewhere: Addresses for the results, by the address of the stepped tensor or of its
                state, which are then not changed. None for in place.
        """
        super().__init__()
        self._device = device
        self._beside = beside or {}
        self._elsewhere = elsewhere
        self.written: set[int] = set()
        self._calls: dict[Any, Callable[..., list[Row]]] = {
            torch._fused_adam_: self._adam,
            torch._fused_adamw_: self._adamw,
            torch._fused_sgd_: self._sgd,
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls ``func``; the loop runs these kernels instead, completely or not at all."""
        rows_of = self._calls.get(func)
        if rows_of is None:
            return func(*args, **(kwargs or {}))
        make_steps(rows_of(*args, **(kwargs or {})))
        return None

    def step(
        self, optimizer: torch.optim.Optimizer, run: Callable[[torch.optim.Optimizer], None]
    ) -> None:
        """Performs a step of an optimizer.

        For Adam and AdamW this bypasses the Python code that torch runs around its kernel, which
        takes ten times as long as starting the loop, in the thread that launches the device's
        kernels.

        Args:
            optimizer: A plain one with ``fused=True``.
            run: Performs any other step, inside this mode.
        """
        rows = self._rows_of(optimizer) if type(optimizer) in _ADAMS else None
        if rows is not None:
            make_steps(rows)
            return
        with self:
            run(optimizer)

    def _rows_of(self, optimizer: torch.optim.Optimizer) -> list[Row] | None:
        """Begins a step of Adam or AdamW; returns None if the class's behaviour is not known."""
        cls = type(optimizer)
        if not is_bare(optimizer) or not all(map(is_torchs, (cls.step, cls._init_group))):  # type: ignore[attr-defined]
            return None
        if any(getattr(optimizer, name, None) is not None for name in _SCALES):
            return None
        calls: list[tuple[list[Any], list[Any], dict[str, Any]]] = []
        for group in optimizer.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            states = [optimizer.state.get(param) for param in params]
            if not all(states) or group["differentiable"] or group["capturable"]:
                return None  # torch creates the state
            calls.append((params, states, group))
        rows: list[Row] = []
        for params, states, group in calls:
            if not params:
                continue
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            firsts = [state["exp_avg"] for state in states]
            seconds = [state["exp_avg_sq"] for state in states]
            tops = [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else []
            settings = {name: group[name] for name in _ADAM_SETTINGS}
            settings["beta1"], settings["beta2"] = group["betas"]
            grads = [param.grad for param in params]
            settings["decoupled"] = is_decoupled(optimizer, group)
            rows += self._adam(params, grads, firsts, seconds, tops, steps, **settings)
        return rows

    def _adamw(self, *args: Any, **settings: Any) -> list[Row]:
        return self._adam(*args, decoupled=True, **settings)

    def _adam(
        self,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        firsts: Sequence[torch.Tensor],
        seconds: Sequence[torch.Tensor],
        largest: Sequence[torch.Tensor],
        steps: Sequence[torch.Tensor],
        *,
        decoupled: bool = False,
        **settings: Any,
    ) -> list[Row]:
        _refuse_scale(settings)
        rows = []
        amsgrad = bool(settings["amsgrad"])
        tops: Sequence[torch.Tensor | None] = largest if amsgrad else [None] * len(params)
        for param, grad, first, second, top, step in zip(
            params, grads, firsts, seconds, tops, steps, strict=True
        ):
            decay, numbers = self._numbers(settings, float(step), decoupled=decoupled)
            row = self._row(param, grad, numbers, [first, second, top])
            row.method = _METHODS[self._device.flavour, decoupled]
            row.maximize, row.decay, row.amsgrad = settings["maximize"], decay, amsgrad
            rows.append(row)
        return rows

    def _numbers(
        self, settings: Mapping[str, Any], step: float, *, decoupled: bool
    ) -> tuple[bool, list[float]]:
        """Returns what kernels derive from settings, common to all units of a step."""
        known = self._device.numbers
        key = (step, decoupled, _bits_of(*(settings[name] for name in _ADAM_NUMBERS)))
        found = known.get(key)
        if found is None:
            if len(known) >= _MOST_NUMBERS:
                known.clear()  # another thread may just have found its own
            fused = self._device.flavour == "fused"
            numbers_of = self._fused_numbers if fused else foreach_numbers
            found = known[key] = numbers_of(settings, step, decoupled=decoupled)
        return found

    def _fused_numbers(
        self, settings: Mapping[str, Any], step: float, *, decoupled: bool
    ) -> tuple[bool, list[float]]:
        """Returns the numbers that the kernel first derives from settings, all in float32."""
        lr, eps, decay = (_f32(settings[name]) for name in ("lr", "eps", "weight_decay"))
        betas = [_f32(settings[name]) for name in ("beta1", "beta2")]
        with np.errstate(all="ignore"):
            powers = [_f32(power(float(b), step, self._device.offsets[float(b)])) for b in betas]
            size = lr / (_f32(1) - powers[0])
            root = np.sqrt(_f32(1) - powers[1])
            factor = lr * decay if decoupled else decay
            rest = [_f32(1) - beta for beta in betas]
        return bool(decay != 0), [float(x) for x in (*betas, size, root, eps, factor, *rest)]

    def _sgd(
        self,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        **settings: Any,
    ) -> list[Row]:
        _refuse_scale(settings)
        momentum, dampening = settings["momentum"], settings["dampening"]
        fused = self._device.flavour == "fused"
        rest = _f32(1) - _f32(dampening) if fused else _f32(1 - dampening)
        decay = (_f32(settings["weight_decay"]) if fused else settings["weight_decay"]) != 0
        numbers = [-_f32(settings["lr"]), momentum, rest, settings["weight_decay"]]
        state: Sequence[torch.Tensor | None] = buffers or [None] * len(params)
        rows = []
        for param, grad, buffer in zip(params, grads, state, strict=True):
            row = self._row(param, grad, [float(_f32(x)) for x in numbers], [buffer, None, None])
            row.method = _SGD[self._device.flavour]
            row.maximize, row.decay = settings["maximize"], bool(decay)
            first = _FIRST_MOMENTUM if settings["is_first_step"] else _MOMENTUM
            row.momentum = _NO_MOMENTUM if momentum == 0 else first
            row.nesterov = settings["nesterov"]
            rows.append(row)
        return rows

    def _row(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        numbers: Sequence[float],
        state: Sequence[torch.Tensor | None],
    ) -> Row:
        beside = self._beside.get(param.data_ptr(), _NOTHING)
        gradient = grad if beside.gradient is None else beside.gradient
        row = Row(count=param.numel())
        row.numbers[:] = [*numbers, *([0.0] * (len(row.numbers) - len(numbers)))]
        row.nan16 = self._device.nan16
        row.bf16 = param.dtype is torch.bfloat16
        row.grad_bf16 = gradient.dtype is torch.bfloat16
        row.scaled, row.factor = beside.factor != 1, beside.factor
        row.param, row.grad, row.cast = map(_address, (param, gradient, beside.cast))
        row.first, row.second, row.largest = map(_address, state)
        if self._elsewhere is not None:
            row.param_to, row.cast = map(self._target, (param, beside.cast))
            row.first_to, row.second_to, row.largest_to = map(self._target, state)
        return row

    def _target(self, tensor: torch.Tensor | None) -> int | None:
        """Returns the address for the results of a tensor.

        Raises:
            RuntimeError: If there is none (new state); nothing is stepped then.
        """
        address = _address(tensor)
        if address is None or self._elsewhere is None or not tensor.numel():  # type: ignore[union-attr]
            return None
        if address not in self._elsewhere:
            raise RuntimeError("the host's step has new state, which has no second place")
        self.written.add(self._elsewhere[address])
        return self._elsewhere[address]


_NOTHING = Beside()


def _refuse_scale(settings: Mapping[str, Any]) -> None:
    if settings.get("grad_scale") is not None or settings.get("found_inf") is not None:
        raise RuntimeError("the host's steps are given gradients without a scale")


def _address(tensor: torch.Tensor | None) -> int | None:
    """Returns the address of a tensor.

    Raises:
        RuntimeError: If its elements are not contiguous; nothing is stepped then.
    """
    if tensor is None:
        return None
    if not tensor.is_contiguous():
        raise RuntimeError("the host's steps are given tensors whose elements lie in order")
    return tensor.data_ptr()
