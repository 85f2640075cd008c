"""A tensor subclass that wraps plain tensors, and optimizers that keep their state in such."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Coded(torch.Tensor):
    """A tensor in eight bits and a scale for each row, which shows itself in float.

    Attributes:
        codes: Of its shape.
        scale: One for each row, and one for the whole.
        table: Two numbers that all have; nested, and without a dimension.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    bound: torch.Tensor

    @staticmethod
    def __new__(
        cls, codes: torch.Tensor, scale: torch.Tensor, bound: torch.Tensor, dtype: torch.dtype
    ) -> Coded:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, codes.shape, device=codes.device, dtype=dtype
        )

    def __init__(
        self, codes: torch.Tensor, scale: torch.Tensor, bound: torch.Tensor, dtype: torch.dtype
    ) -> None:
        self.codes, self.scale, self.bound = codes, scale, bound

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale", "bound"], self.dtype

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any
    ) -> Coded:
        return cls(inner["codes"], inner["scale"], inner["bound"], context)

    @classmethod
    def zeros(cls, param: torch.Tensor) -> Coded:
        """Returns one for a parameter."""
        return cls(
            torch.zeros(param.shape, dtype=torch.int8, device=param.device),
            torch.zeros(param.shape[:1], device=param.device),
            torch.tensor(127.0, device=param.device),
            param.dtype,
        )

    def value(self) -> torch.Tensor:
        """Returns what it stands for."""
        scale = self.scale.view(-1, *[1] * (self.dim() - 1))
        return (self.codes.float() * scale).to(self.dtype)

    def take(self, value: torch.Tensor) -> None:
        """Becomes a value, rounded."""
        rows = value.float().reshape(value.shape[0], -1).abs().amax(1).clamp(min=1e-12)
        self.scale.copy_(rows / self.bound)
        scale = self.scale.view(-1, *[1] * (value.dim() - 1))
        self.codes.copy_((value.float() / scale).round())

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        if func is aten.copy_.default and isinstance(args[0], Coded):
            mine, other = args[0], args[1]
            if isinstance(other, Coded):
                mine.codes.copy_(other.codes)
                mine.scale.copy_(other.scale)
            else:
                mine.take(other)
            return mine
        if func in (aten._to_copy.default, aten.clone.default, aten.detach.default):
            one, kwargs = args[0], kwargs or {}
            where = {"device": kwargs.get("device")}
            inner = [t.to(**where).clone() for t in (one.codes, one.scale, one.bound)]
            return cls(*inner, kwargs.get("dtype") or one.dtype)
        plain = [a.value() if isinstance(a, Coded) else a for a in args]
        return func(*plain, **(kwargs or {}))


class Opaque(torch.Tensor):
    """Says not how it is put together."""


class CodedMomentum(torch.optim.Optimizer):
    """Momentum that is kept in eight bits."""

    kind: Callable[[torch.Tensor], torch.Tensor] = Coded.zeros

    def __init__(self, params: Any, lr: float = 0.1, large: int = 20) -> None:
        super().__init__(params, {"lr": lr, "large": large})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    large = p.numel() >= group["large"]
                    state["mean"] = type(self).kind(p) if large else torch.zeros_like(p)
                    state["step"] = torch.tensor(0.0)
                state["step"] += 1
                mean = state["mean"].float() * 0.9 + p.grad.float()
                state["mean"].copy_(mean)
                p.sub_(group["lr"] * mean.to(p.dtype))


class CodedAnew(CodedMomentum):
    """Makes its state anew in every step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        super().step(closure)
        for state in self.state.values():
            state["mean"] = state["mean"].clone()


class OpaqueMomentum(CodedMomentum):
    """Its momentum is of a class that cannot be taken apart."""

    kind = staticmethod(lambda p: torch.zeros_like(p).as_subclass(Opaque))  # type: ignore[assignment]


class Failing(CodedMomentum):
    """Fails in the middle of a step, once for every time it is told to."""

    fail = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        super().step(closure)
        if Failing.fail:
            Failing.fail -= 1
            raise ValueError("told to fail")
