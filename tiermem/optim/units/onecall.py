"""Steps that write all their bytes in one torch call, and need no copies to be undone.

torch's fused Adam and AdamW write weights and state in one call, which is completed or has no
effect, and nothing in the class can fail after it. If such a step is interrupted (Ctrl-C before any
line), this is before that call, when only step counters were written, or after it, when the step
is complete. The copies of masters and state that a step otherwise needs have as many bytes as it
writes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tiermem.optim.units.undo import cannot_fail_midway

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_COLLECTS = "_init_group"  # the method that collects a step's tensors, and computes nothing
_KERNELS: tuple[Any, ...] = (torch._fused_adam_, torch._fused_adamw_)


def writes_in_one_call(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the next step of a plain optimizer is of this kind."""
    fused = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    if not fused or not cannot_fail_midway(optimizer):
        return False
    state = optimizer.state
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return len({p.device for p in params}) == 1 and all(
        type(p) in _PLAIN and p.layout is torch.strided and state.get(p) for p in params
    )


def _unseen(collect: Callable[..., Any], *args: Any) -> Any:
    """Calls a method that only inspects ordinary tensors, without modes."""
    with torch._C.DisableTorchFunction():
        return collect(*args)


class OneCall(TorchFunctionMode):
    """Detects whether the writing call was made; entered around the plain optimizer's step.

    The code before that call inspects each tensor several times, which this mode need not see.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Starts without a step of ``optimizer``."""
        super().__init__()
        self._made: list[None] = []
        self._names = vars(optimizer)
        self._collect = partial(_unseen, type(optimizer)._init_group.__get__(optimizer))  # type: ignore[attr-defined]

    def __enter__(self) -> OneCall:
        """Enters the mode."""
        self._names.setdefault(_COLLECTS, self._collect)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failure: Any) -> None:
        """Leaves the mode."""
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        if self._names.get(_COLLECTS) is self._collect:
            del self._names[_COLLECTS]

    @property
    def made(self) -> bool:
        """Whether the call was made, so that everything is written."""
        return bool(self._made)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls ``func``; notes one of the calls that write."""
        if func not in _KERNELS:
            return func(*args, **(kwargs or {}))
        # called and noted without a line of Python in between, before which Ctrl-C could occur
        self._made.extend(starmap(partial(func, *args, **(kwargs or {})), ((),)))
        return None
