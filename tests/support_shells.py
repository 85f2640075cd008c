"""Weights of tensor subclasses that wrap plain tensors, as quantizing libraries have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH = 64
_aten = torch.ops.aten


class Quantized(torch.Tensor):
    """Codes of eight bits and a scale for each row, which show themselves in bfloat16.

    Linear layers are computed as torch's functions are met, before torch takes them apart; what
    torch makes of it shares its memory, as a view does.
    """

    _names: tuple[str, ...] = ("codes", "scale")

    @staticmethod
    def __new__(cls, *inside: torch.Tensor) -> Any:
        first = cls._shape(*inside)
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, first, dtype=torch.bfloat16, device=inside[-1].device
        )

    def __init__(self, *inside: torch.Tensor) -> None:
        for name, tensor in zip(self._names, inside, strict=True):
            setattr(self, name, tensor)

    @staticmethod
    def _shape(codes: torch.Tensor, scale: torch.Tensor) -> torch.Size:
        return codes.shape

    @classmethod
    def of(cls, weight: torch.Tensor) -> Any:
        """Returns one of a weight."""
        scale = weight.float().abs().amax(1, keepdim=True) / 127
        return cls((weight.float() / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self._names), None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(*(inner[name] for name in cls._names))

    def value(self) -> torch.Tensor:
        """Returns what it stands for; only where it is of just this class."""
        if type(self) is not type(self)._own():
            raise NotImplementedError(type(self).__name__)
        return (self.codes * self.scale).to(torch.bfloat16)  # type: ignore[attr-defined]

    @classmethod
    def _own(cls) -> type:
        return Quantized

    def _each(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        return type(self)(*(function(getattr(self, name)) for name in self._names))

    def _moved(self, device: Any) -> Any:
        return self._each(
            lambda t: t._moved(device) if isinstance(t, Quantized) else t.to(device, copy=True)
        )

    def _copy_from(self, other: Any) -> None:
        for name in self._names:
            getattr(self, name).copy_(getattr(other, name))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is functional.linear and isinstance(args[1], Quantized):
            x, weight, *bias = args
            return functional.linear(x, weight.value(), *bias, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.copy_.default:
            args[0]._copy_from(args[1])
            return args[0]
        if func is _aten.detach.default:
            return args[0]._each(torch.Tensor.detach)
        if func is _aten.clone.default:
            return args[0]._each(torch.clone)
        if func is _aten._to_copy.default:
            return args[0]._moved(kwargs.get("device") or args[0].device)
        raise NotImplementedError(f"{func} of {cls.__name__}")


class Assigning(Quantized):
    """Has the other's tensors, and not copies of them, once it is copied to."""

    def _copy_from(self, other: Any) -> None:
        for name in self._names:
            setattr(self, name, getattr(other, name).clone())

    @classmethod
    def _own(cls) -> type:
        return Assigning


class Nested(Quantized):
    """One that wraps another one, and a zero point."""

    _names = ("inner", "zero")

    @staticmethod
    def _shape(inner: torch.Tensor, zero: torch.Tensor) -> torch.Size:
        return inner.shape

    @classmethod
    def of(cls, weight: torch.Tensor) -> Any:
        return cls(Quantized.of(weight), torch.full((1,), 0.5, dtype=torch.bfloat16))

    def value(self) -> torch.Tensor:
        return self.inner.value() + self.zero  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def _own(cls) -> type:
        return Nested


@dataclass(frozen=True)
class Look:
    """How a tensor looks."""

    device: torch.device


class Noting(Quantized):
    """Notes its device beside the tensors inside, and is made of what it has noted."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self._names), {"look": Look(self.device), "sizes": [8, (1, 2)]}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        made = cls(*(inner[name] for name in cls._names))
        if made.device != context["look"].device:
            raise ValueError(f"{made.device} is not {context['look'].device}")
        return made

    @classmethod
    def _own(cls) -> type:
        return Noting


class Scaled(Quantized):
    """Has a factor that is no tensor, and may have a zero point."""

    factor = 1.0
    zero: torch.Tensor | None = None

    @staticmethod
    def __new__(cls, *inside: torch.Tensor) -> Any:
        return Quantized.__new__(cls, *inside[:2])

    def __init__(self, *inside: torch.Tensor) -> None:
        super().__init__(*inside[:2])
        self.zero = inside[2] if inside[2:] else None

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [*self._names] if self.zero is None else [*self._names, "zero"]
        return names, (self.factor, str(self.stride()))

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        made = cls(*inner.values())
        made.factor = context[0]
        return made

    def value(self) -> torch.Tensor:
        found = super().value() * self.factor
        return found if self.zero is None else found + self.zero

    def _each(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        names, (factor, _) = self.__tensor_flatten__()
        made = type(self)(*(function(getattr(self, name)) for name in names))
        made.factor = factor
        return made

    @classmethod
    def _own(cls) -> type:
        return Scaled


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.value().t()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.value(), gradient.t() @ x


class Trained(Quantized):
    """Takes gradients, and is quantized anew once something is added to it."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is functional.linear:
            x, weight, *bias = args
            result: Any = _Linear.apply(x, weight)  # type: ignore[no-untyped-call]
            return result + bias[0] if bias and bias[0] is not None else result
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _aten.add_.Tensor:
            args[0]._copy_from(cls.of(args[0].value().add(*args[1:], **(kwargs or {}))))
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def _own(cls) -> type:
        return Trained


class Remade(Quantized):
    """Makes the tensors inside anew whenever they are asked for."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return value.clone() if name == "codes" else value


class Layer(nn.Module):
    """A norm, a quantized linear layer and a plain one."""

    def __init__(self, kind: type[Quantized]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.bfloat16)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH, dtype=torch.bfloat16)
        self.back = nn.Linear(4 * WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
        self.adapter = nn.Parameter(torch.zeros(WIDTH, dtype=torch.bfloat16))
        for linear in (self.wide, self.back):
            linear.weight = nn.Parameter(kind.of(linear.weight.detach()), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.wide(self.norm(x)))
        return x + self.back(hidden) * (1 + self.adapter)  # type: ignore[no-any-return]


def quantized(kind: type[Quantized] = Quantized, layers: int = 6, seed: int = 0) -> Any:
    """Returns layers with weights of a class, the same for each seed."""
    torch.manual_seed(seed)
    model = nn.Sequential(*[Layer(kind) for _ in range(layers)])
    for param in model.parameters():
        param.requires_grad_(False)
    return model


LAYER = 8 * WIDTH * WIDTH
"""Bytes of codes in one layer, nearly all of it."""
