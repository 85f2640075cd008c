"""CUDA's fused Adam, AdamW and SGD, written out with NumPy: an oracle, and a device that has them.

It shares no code with the compiled loop. A float32 fma is exact here: the product of two float32
numbers fits a float64, the sum with a third is rounded to odd there, and then to float32, which is
the same as rounding once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from support_tried import trials_apart

from tiermem.optim.host import proof, sides
from tiermem.optim.host.devicebits import ShareTrial
from tiermem.optim.host.spread import Rates

f = np.float32
Array = Any
_NAN = np.array([0x7FFFFFFF], np.uint32).view(f)[0]


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in float32, rounded once."""
    with np.errstate(all="ignore"):
        product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
        third = np.asarray(c, np.float64)
        total = np.atleast_1d(product + third)
        part = total - product
        rest = np.atleast_1d((product - (total - part)) + (third - part))
        even = (total.view(np.int64) & 1) == 0
        odd = np.where(
            np.isfinite(rest) & (rest != 0) & even,
            np.nextafter(total, np.where(rest > 0, np.inf, -np.inf)),
            total,
        )
        found = _clean(odd.astype(f))
    return found if np.ndim(product) or np.ndim(c) else found[0]


def _clean(values: Array) -> Array:
    return np.where(np.isnan(values), _NAN, values).astype(f)


@cache
def powf(base: Any, exponent: float, off: int) -> Any:
    """CUDA's powf for 0 < base < 1, with a reciprocal that is off by so many units."""
    base, exponent = f(base), f(exponent)
    mantissa, power = np.frexp(base)  # from 0.5 to 1; wanted is from sqrt(0.5) to sqrt(2)
    if np.array([mantissa]).view(np.uint32)[0] < 0x3F3504F3:
        mantissa, power = mantissa * 2, power - 1
    part, whole = f(mantissa), f(power)
    less = f(part - f(1))
    inverse = f(f(1) / f(part + f(1)))
    inverse = (np.atleast_1d(inverse).view(np.int32) + np.int32(off)).view(f)[0]
    log2e = f(1.4426950216293335)
    ratio = f(inverse * f(less + less))
    left = f(less - ratio)
    square = f(ratio * ratio)
    total = fma(ratio, log2e, whole)
    left = f(inverse * fma(less, -ratio, f(left + left)))
    low = fma(ratio, log2e, f(whole - total))
    low = fma(ratio, f(1.9251366722983220825e-08), fma(left, log2e, low))
    series = np.array([0x3A2C32E4], np.uint32).view(f)[0]
    series = fma(square, series, f(0.0032181653659790754))
    series = fma(square, series, f(0.018033718690276146))
    series = f(square * fma(square, series, f(0.12022458761930466)))
    low = fma(ratio, series, fma(left, f(series * f(3)), low))
    log = f(total + low)
    low = f(low - f(log - total))
    product = f(exponent * log)
    nearest = f(np.rint(product))
    rest = f(fma(exponent, low, fma(exponent, log, -product)) + f(product - nearest))
    value = np.array([0x391FCB8E], np.uint32).view(f)[0]
    for term in (0.0013391353, 0.009618839, 0.055503588, 0.24022645, 0.6931472, 1.0):
        value = fma(rest, value, f(term))
    if abs(product) > 152:
        return f(np.inf) if product > 0 else f(0)
    return f(np.ldexp(np.float64(value), int(nearest)))


class Kernels:
    """The kernels of a device, over tensors of host memory.

    Attributes:
        off: Of the reciprocals on which its powers rest.
        wrong: Whether it has other bits than any device that is known.
        calls: How many there were.
    """

    def __init__(self, off: int = 1, wrong: bool = False) -> None:
        self.off = off
        self.wrong = wrong
        self.calls = 0

    def adam(self, params, grads, firsts, seconds, tops, steps, **kw: Any) -> None:  # type: ignore[no-untyped-def]
        self._adam(params, grads, firsts, seconds, tops, steps, decoupled=False, **kw)

    def adamw(self, params, grads, firsts, seconds, tops, steps, **kw: Any) -> None:  # type: ignore[no-untyped-def]
        self._adam(params, grads, firsts, seconds, tops, steps, decoupled=True, **kw)

    def _adam(self, params, grads, firsts, seconds, tops, steps, *, decoupled, **kw) -> None:  # type: ignore[no-untyped-def]
        self.calls += 1
        lr, b1, b2, wd, eps = (f(kw[n]) for n in ("lr", "beta1", "beta2", "weight_decay", "eps"))
        for i, (param, step) in enumerate(zip(params, steps, strict=True)):
            p, g, m, v = (_read(t[i]) for t in (params, grads, firsts, seconds))
            with np.errstate(all="ignore"):
                c1 = f(f(1) - powf(b1, float(step), self.off))
                root = np.sqrt(f(f(1) - powf(b2, float(step), self.off)))
                g = -g if kw["maximize"] else g
                if wd != 0 and decoupled:
                    p = fma(p, -f(lr * wd), p)
                elif wd != 0:
                    g = fma(p, wd, g)
                m = fma(m, b1, fma(g, -b1, g))
                square = _clean(g * g)
                v = fma(v, b2, fma(square, -b2, square))
                top = v
                if kw["amsgrad"]:
                    old = _read(tops[i])
                    top = np.where(old < v, v, old)
                    _write(tops[i], top)
                below = np.sqrt(top) / root + eps
                p = _clean(p - (m * f(lr / c1)) / below)
                if self.wrong:
                    p = np.nextafter(p, f(0))
            _write(param, p)
            _write(firsts[i], m)
            _write(seconds[i], v)

    def sgd(self, params, grads, buffers, **kw: Any) -> None:  # type: ignore[no-untyped-def]
        self.calls += 1
        lr, keep, wd = f(kw["lr"]), f(kw["momentum"]), f(kw["weight_decay"])
        rest = f(f(1) - f(kw["dampening"]))
        for i, param in enumerate(params):
            p, g = _read(param), _read(grads[i])
            with np.errstate(all="ignore"):
                g = -g if kw["maximize"] else g
                g = fma(p, wd, g) if wd != 0 else g
                if kw["momentum"]:
                    if not kw["is_first_step"]:
                        kept = fma(rest, g, _clean(_read(buffers[i]) * keep))
                    else:
                        kept = g
                    _write(buffers[i], kept)
                    g = fma(kept, keep, g) if kw["nesterov"] else kept
                p = fma(g, -lr, p)
                p = np.nextafter(p, f(0)) if self.wrong else p
            _write(param, p)


def rounded(values: Array) -> Array:
    """What is left of float32 numbers that are stored in bfloat16: NumPy has no such type."""
    bits = np.ascontiguousarray(values, f).view(np.uint32).astype(np.uint64)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return np.where(np.isnan(values), _NAN, kept.astype(np.uint32).view(f)).astype(f)


def foreach_adam(state: dict[str, Array], grad: Array, step: int, kw: dict[str, Any]) -> None:
    """CUDA's foreach Adam and AdamW in bfloat16: each kernel stores its result.

    Args:
        state: Weights ``p`` and moments ``m`` and ``v``, ``x`` with amsgrad; replaced.
        grad: The gradient.
        step: Its number, from 1.
        kw: Settings, and whether decay is ``decoupled``.
    """
    p, m, v = (state[name] for name in "pmv")
    lr, decay, (b1, b2) = kw["lr"], kw["weight_decay"], kw["betas"]
    with np.errstate(all="ignore"):
        g = -grad if kw["maximize"] else grad
        if decay and kw["decoupled"]:
            p = rounded(p * f(1 - lr * decay))
        elif decay:
            g = rounded(fma(p, f(decay), g))
        weight = f(1 - b1)
        if abs(weight) < 0.5:
            m = fma(weight, g - m, m)
        else:
            m = fma(-(g - m), f(1) - weight, g)
        v = rounded(fma(f(1 - b2), g * g, rounded(v * f(b2))))
        state["m"], state["v"], top = rounded(m), v, v
        if kw["amsgrad"]:
            old = state["x"]
            state["x"] = top = rounded(np.where(np.isnan(old) | (old > v), old, v))
        below = rounded(rounded(rounded(np.sqrt(top)) / f((1 - b2**step) ** 0.5)) + f(kw["eps"]))
        state["p"] = rounded(fma(f(-lr / (1 - b1**step)), state["m"] / below, p))


def foreach_sgd(state: dict[str, Array], grad: Array, step: int, kw: dict[str, Any]) -> None:
    """The same of SGD; ``m`` is its momentum."""
    p, lr, decay, keep = state["p"], kw["lr"], kw["weight_decay"], kw["momentum"]
    with np.errstate(all="ignore"):
        g = -grad if kw["maximize"] else grad
        g = rounded(fma(p, f(decay), g)) if decay else g
        if keep:
            m = g
            if step > 1:
                m = rounded(fma(f(1 - kw["dampening"]), g, rounded(state["m"] * f(keep))))
            g = rounded(fma(m, f(keep), g)) if kw["nesterov"] else m
            state["m"] = m
        state["p"] = rounded(fma(g, f(-lr), p))


def _read(tensor: torch.Tensor) -> Array:
    return tensor.detach().float().reshape(-1).numpy().copy()


def _write(tensor: torch.Tensor, values: Array) -> None:
    tensor.detach().copy_(torch.from_numpy(np.ascontiguousarray(values)).view(tensor.shape))


def every_second(sizes: Sequence[int], _rates: object) -> list[bool]:
    """A share of the host: every second block, not the first and not the last ones."""
    return [number % 2 == 1 for number in range(len(sizes))]


@contextmanager
def tried_shares(
    patch: pytest.MonkeyPatch,
    has_share: Callable[[ShareTrial, object], bool] = ShareTrial.host_has_share,
    *,
    sizes: tuple[int, ...] = (512, 253),
    counts: tuple[int, ...] = (*range(1, 10), 100),
) -> Iterator[None]:
    """Gives the host every second block, however few elements there are, by few and own proofs.

    Args:
        patch: What is replaced; its owner puts it back.
        has_share: Whether the host has its share in a step.
        sizes: Elements that proofs try at a time.
        counts: Numbers of steps that they try.
    """
    patch.setattr(proof, "_SIZES", sizes)
    patch.setattr(proof, "_COUNTS", counts)
    patch.setattr(sides, "_LEAST", 0)
    patch.setattr(sides, "measure_both", lambda *_: Rates(1.0, 1.0))
    patch.setattr(sides, "spread", every_second)
    patch.setattr(ShareTrial, "host_has_share", has_share)
    proof.forget()
    try:
        yield
    finally:
        proof.forget()


def keeps_share(trial: ShareTrial, _ticket: object) -> bool:
    """The host has its share in every step."""
    trial.is_on = True
    return True


@contextmanager
def device_of_numpy(kernels: Kernels | None = None) -> Iterator[Kernels]:
    """Replaces torch's fused CPU kernels by ones with a CUDA device's bits, inside ``with``."""
    kernels = kernels or Kernels()
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library.impl("_fused_adam_", kernels.adam, "CPU")
            library.impl("_fused_adamw_", kernels.adamw, "CPU")
            library.impl("_fused_sgd_", kernels.sgd, "CPU")
        with trials_apart():
            yield kernels
    finally:
        library._destroy()
