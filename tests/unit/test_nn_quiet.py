"""What keeps a user's modes out of work of our own, and puts them back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from itertools import combinations
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tiermem.nn.compat.quiet import quiet, uncompiled, unrecorded

CPU = torch.device("cpu")


class Listening(TorchDispatchMode):
    """Counts the operations that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


LOUD: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference": lambda: torch.inference_mode(),
    "mode": Listening,
    "unrecorded": lambda: torch.no_grad(),
}
SETS = [names for size in range(len(LOUD) + 1) for names in combinations(LOUD, size)]


def switched_on() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch._C._len_torch_dispatch_stack(),
    )


@pytest.mark.parametrize("names", SETS, ids="+".join)
@pytest.mark.parametrize("fails", [False, True], ids=["ends", "raises"])
def test_all_is_off_inside_and_as_before_after(names: tuple[str, ...], fails: bool) -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with ExitStack() as stack:
        modes = [stack.enter_context(LOUD[name]()) for name in names]
        before = switched_on()
        with ExitStack() as around:
            if fails:
                around.enter_context(pytest.raises(ZeroDivisionError))
            with quiet(CPU):
                assert switched_on() == (False, False, False, before[3], 0)
                seen = [mode.seen for mode in modes if isinstance(mode, Listening)]
                product = weight @ weight
                assert product.dtype is torch.float32
                assert not product.requires_grad
                assert not product.is_inference()
                assert [m.seen for m in modes if isinstance(m, Listening)] == seen
                if fails:
                    raise ZeroDivisionError
        assert switched_on() == before


def test_one_inside_another_ends_alone() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), Listening():
        before = switched_on()
        with quiet(CPU):
            inner = switched_on()
            with quiet(CPU):
                assert switched_on() == inner
            assert switched_on() == inner
        assert switched_on() == before


@pytest.mark.parametrize("names", SETS, ids="+".join)
def test_unrecorded_leaves_autocast_and_modes_on(names: tuple[str, ...]) -> None:
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(LOUD[name]())
        before = switched_on()
        with unrecorded():
            assert switched_on() == (False, False, *before[2:])
        assert switched_on() == before


def test_what_is_not_to_be_compiled_is_wrapped_once() -> None:
    import torch._dynamo  # noqa: F401  the compiler is there from now on

    def call(number: int) -> int:
        return number + 1

    assert uncompiled(call)(1) == 2
    assert uncompiled(call) is uncompiled(call)
