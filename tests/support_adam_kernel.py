"""A fake of the kernel that steps Adam: the operations of ``foreach``, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pytest
import torch

from tiermem.nn.compat.counters import keep_versions
from tiermem.optim.rules import adamstep
from tiermem.optim.rules.adamkernel import Numbers, Rows


class FakeKernel:
    """Makes a step as torch's ``foreach`` does, on the CPU; may give one wrong bit."""

    def __init__(self, *, wrong: bool = False) -> None:
        self.steps = 0
        self.wrong = wrong

    def step(self, dtype: torch.dtype, numbers: Numbers, rows: Rows) -> None:
        """Makes it."""
        self.steps += 1
        beta1, beta2, size, root, eps, decay, rest1, rest2 = numbers.values
        del beta1
        assert all(map(torch.Tensor.data_ptr, chain(*rows)))  # the kernel is given addresses
        for param, grad, first, second in zip(*rows, strict=True):
            kept = keep_versions([param, first, second])
            with torch.no_grad():
                used = -grad if numbers.maximize else grad
                if numbers.decay and numbers.decoupled:
                    torch._foreach_mul_([param], decay)  # mul_ rounds bfloat16 otherwise
                elif numbers.decay:
                    used = used.add(param, alpha=decay)
                first.lerp_(used, rest1)
                torch._foreach_mul_([second], beta2)
                second.addcmul_(used, used, value=rest2)
                below = second.sqrt().div_(root).add_(eps)
                param.addcdiv_(first, below, value=size)
                if self.wrong:
                    param.view(-1)[:1].add_(1.0)
            for counter in kept:
                counter.__exit__(None, None, None)


class Looks(torch.overrides.TorchFunctionMode):
    """Sees torch's functions.

    Attributes:
        seen: Those that were called.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Any] = []

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls the function."""
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


@contextmanager
def faked() -> Iterator[FakeKernel]:
    """Has steps on the CPU made by a fake kernel, of whatever size."""
    made = FakeKernel()
    adamstep.forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adamstep, "_DEVICE", "cpu")
        patch.setattr(adamstep, "_LEAST", 0)
        patch.setattr(adamstep, "_SIZES", (5, 8))
        patch.setattr(adamstep, "kernel_for", lambda _: made)
        yield made
    adamstep.forget()
