"""Whether operations on the host, in the order of torch's fused CUDA kernels, give their bits.

The kernels (fused_adam_utils.cuh, FusedSgdKernel.cu of torch) compute with settings in double and
tensors in float32, each result rounded to float32. nvcc may contract a product and a sum to one
fused multiply-add, and which of two products it takes is its choice; here every choice is tried,
and one of them has to give all bits of all cases. ``where="auto"`` can use the host only then.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

ELEMENTS = 20_000
Array = np.ndarray[Any, Any]

_libm = ctypes.CDLL(ctypes.util.find_library("m"))
_libm.fma.argtypes = [ctypes.c_double] * 3
_libm.fma.restype = ctypes.c_double


def fma(a: Array | float, b: Array | float, c: Array | float) -> Array:
    """``a * b + c`` in float64, rounded once."""
    a, b, c = np.broadcast_arrays(*(np.asarray(value, np.float64) for value in (a, b, c)))
    made = map(_libm.fma, a.tolist(), b.tolist(), c.tolist())
    return np.fromiter(made, np.float64, a.size)


def sum_of_products(a: Any, b: Any, c: Any, d: Any, contracted: str) -> Array:
    """``a * b + c * d`` in float64, with one of the products fused into the sum, or none."""
    if contracted == "first":
        return fma(a, b, np.asarray(c, np.float64) * d)
    if contracted == "second":
        return fma(c, d, np.asarray(a, np.float64) * b)
    return np.asarray(a, np.float64) * b + np.asarray(c, np.float64) * d


def plus_product(x: Any, a: float, b: Any, contracted: bool) -> Array:
    """``x + a * b`` in float64."""
    if contracted:
        return fma(a, b, x)
    return np.asarray(x, np.float64) + a * np.asarray(b, np.float64)


def single(values: Array) -> Array:
    """Rounds to float32."""
    return values.astype(np.float32)


@dataclass(frozen=True)
class Contraction:
    """What the compiler may have fused.

    Attributes:
        decay: Whether weight decay, and the update where that is a product, are.
        first: Which product of the first state's sum is.
        second: Which of the second's.
    """

    decay: bool
    first: str
    second: str


CHOICES = [
    Contraction(*choice)
    for choice in itertools.product((True, False), *[("first", "second", "none")] * 2)
]


def wide(value: Array) -> Array:
    return value.astype(np.float64)


def adam(
    how: Contraction, param: Array, grad: Array, avg: Array, square: Array, step: int,
    decoupled: bool, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
) -> list[Array]:  # fmt: skip
    """One step of Adam, or of AdamW where decay is decoupled; ``step`` counts this one."""
    if weight_decay and decoupled:
        param = single(plus_product(param, -(lr * weight_decay), param, how.decay))
    elif weight_decay:
        grad = single(plus_product(grad, weight_decay, param, how.decay))
    one, two = betas
    avg = single(sum_of_products(one, wide(avg), 1 - one, wide(grad), how.first))
    square = single(
        sum_of_products(two, wide(square), (1 - two) * wide(grad), wide(grad), how.second)
    )
    correction = np.float32(1 - math.pow(one, step))
    size = np.float32(lr / float(correction))
    root = np.sqrt(np.float32(1 - math.pow(two, step)))
    denominator = single(wide(np.sqrt(square) / root) + eps)
    return [param - size * avg / denominator, avg, square]


def sgd(
    how: Contraction, param: Array, grad: Array, buffer: Array, lr: float, momentum: float,
    weight_decay: float, nesterov: bool,
) -> list[Array]:  # fmt: skip
    """One step of SGD with momentum that is not the first."""
    if weight_decay:
        grad = single(plus_product(grad, weight_decay, param, how.decay))
    buffer = single(sum_of_products(momentum, wide(buffer), 1.0, wide(grad), how.first))
    used = single(plus_product(grad, momentum, buffer, how.decay)) if nesterov else buffer
    return [single(plus_product(param, -lr, used, how.decay)), buffer]


def of_all_sizes(seed: int, *, positive: bool = False) -> Array:
    """float32 values with every exponent, subnormal ones and zeros among them."""
    generator = np.random.default_rng(seed)
    bits = generator.integers(0, 0x7F800000, ELEMENTS, dtype=np.uint32)
    bits[: ELEMENTS // 8] = generator.integers(0, 1 << 23, ELEMENTS // 8, dtype=np.uint32)
    bits[:16] = 0
    if not positive:
        bits |= generator.integers(0, 2, ELEMENTS, dtype=np.uint32) << np.uint32(31)
    return bits.view(np.float32)


def usual(seed: int, scale: float, *, positive: bool = False) -> Array:
    """Values as training has them."""
    values = np.random.default_rng(seed).standard_normal(ELEMENTS) * scale
    return single(np.abs(values) if positive else values)


def inputs(seed: int) -> Iterator[tuple[Array, Array, Array, Array]]:
    """Weights, gradients, and first and second states."""
    yield (
        usual(seed, 0.02),
        usual(seed + 1, 1e-3),
        usual(seed + 2, 1e-4),
        usual(seed + 3, 1e-7, positive=True),
    )
    sizes = [of_all_sizes(seed + i, positive=i == 3) for i in range(4)]
    yield sizes[0], sizes[1], sizes[2], sizes[3]


def same(found: Array, expected: Array) -> bool:
    """Equal bits, but for the bits of what is no number."""
    both = np.isnan(found) & np.isnan(expected)
    return bool(np.all(both | (found.view(np.uint32) == expected.view(np.uint32))))


Case = tuple[list[Array], Callable[[Contraction], list[Array]]]
ADAM = [
    {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.0},
]
SGD = [
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "nesterov": False},
    {"lr": 0.01, "momentum": 0.95, "weight_decay": 0.0, "nesterov": True},
]


def on_device(
    cls: Any, settings: dict[str, Any], param: Array, grad: Array, state: dict[str, Any]
) -> list[Array]:
    """Steps there; returns the weights and the state's tensors of their shape, in order."""
    weight = torch.nn.Parameter(torch.from_numpy(param.copy()).cuda())
    optimizer = cls([weight], fused=True, **settings)
    weight.grad = torch.from_numpy(grad.copy()).cuda()
    optimizer.state[weight] = {
        key: torch.as_tensor(value, dtype=torch.float32, device="cuda").clone()
        for key, value in state.items()
    }
    optimizer.step()
    kept = optimizer.state[weight]
    found = [weight.detach(), *(kept[key] for key in state if key != "step")]
    return [tensor.cpu().numpy() for tensor in found]


def adam_cases(cls: Any) -> Iterator[Case]:
    for number, settings in enumerate(ADAM):
        for steps in (1, 2, 1000):
            for param, grad, avg, square in inputs(100 * number + steps):
                state = {"step": float(steps - 1), "exp_avg": avg, "exp_avg_sq": square}
                expected = on_device(cls, settings, param, grad, state)

                def host(
                    how: Contraction, args: Any = (param, grad, avg, square, steps),
                    settings: Any = settings,
                ) -> list[Array]:  # fmt: skip
                    return adam(how, *args, cls is torch.optim.AdamW, **settings)

                yield expected, host


def sgd_cases(cls: Any) -> Iterator[Case]:
    for number, settings in enumerate(SGD):
        for param, grad, buffer, _ in inputs(1000 + number):
            expected = on_device(cls, settings, param, grad, {"momentum_buffer": buffer})

            def host(
                how: Contraction, args: Any = (param, grad, buffer), settings: Any = settings
            ) -> list[Array]:
                return sgd(how, *args, **settings)

            yield expected, host


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("cls", "cases"),
    [
        (torch.optim.Adam, adam_cases),
        (torch.optim.AdamW, adam_cases),
        (torch.optim.SGD, sgd_cases),
    ],
)
def test_one_order_of_operations_gives_the_devices_bits(cls: Any, cases: Any) -> None:
    left = list(CHOICES)
    with np.errstate(all="ignore"):
        for number, (expected, host) in enumerate(cases(cls)):
            found = {how: host(how) for how in left}
            left = [h for h in left if all(map(same, found[h], expected))]
            if not left:
                wrong = {
                    how: [int((a != b).sum()) for a, b in zip(made, expected, strict=True)]
                    for how, made in found.items()
                }
                pytest.fail(f"case {number}: elements that differ, by what is fused: {wrong}")
    print(f"{cls.__name__}: {left}")


def test_a_fused_product_is_rounded_once() -> None:
    a, b = np.float64(1 + 2**-30), np.float64(1 - 2**-30)
    assert fma(a, b, -1.0).tolist() == [-(2.0**-60)]
    assert a * b - 1.0 == 0.0
