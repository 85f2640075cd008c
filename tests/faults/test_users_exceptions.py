"""Exceptions of a user's own code, and of torch's, that pass through calls of tiermem's.

None of tiermem's lines was cut short by them, so there is nothing to repair and nothing to learn
again; and what they interrupt can be gone on with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support_nn import check_table, same_bits
from support_optim import FailsMidway, Refused
from torch import nn

import tiermem


class Loop:
    """A model in a few blocks, more than HBM holds, and its optimizer."""

    def __init__(self, tier: tiermem.TierManager, **options: Any) -> None:
        torch.manual_seed(0)
        self.tier = tier
        self.plain = nn.Sequential(*[nn.Linear(48, 48) for _ in range(5)])
        self.model = nn.Sequential(*[nn.Linear(48, 48) for _ in range(5)])
        self.model.load_state_dict(self.plain.state_dict())
        self.by_hand = FailsMidway(self.plain.parameters(), lr=0.1, momentum=0.9)
        tier.wrap(self.model)
        self.optimizer = tier.optimizer(self.model, FailsMidway, lr=0.1, momentum=0.9, **options)

    def backward(self) -> None:
        for net in (self.plain, self.model):
            net(torch.linspace(0, 1, 96).view(2, 48)).square().sum().backward()

    def zero_grad(self) -> None:
        self.by_hand.zero_grad()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.backward()
        self.by_hand.step()
        self.optimizer.step()
        self.zero_grad()

    def check(self) -> None:
        pairs = zip(self.plain.parameters(), self.model.parameters(), strict=True)
        assert all(same_bits(a.detach(), b.detach()) for a, b in pairs)
        check_table(self.tier)


def refuse(*_: Any, **__: Any) -> Any:
    raise Refused


def closure(loop: Loop) -> None:
    loop.optimizer.step(refuse)


def wrong_shape(loop: Loop) -> None:
    state = loop.model.state_dict()
    del state["3.weight"]
    loop.model.load_state_dict(state)


def optimizer_class(loop: Loop) -> None:
    loop.backward()
    loop.by_hand.step()
    FailsMidway.lit = True
    loop.optimizer.step()


def state_dict_hook(loop: Loop) -> None:
    handle = loop.optimizer.register_state_dict_post_hook(refuse)
    try:
        loop.optimizer.state_dict()
    finally:
        handle.remove()


def load_state_dict_hook(loop: Loop) -> None:
    handle = loop.optimizer.register_load_state_dict_pre_hook(refuse)
    try:
        loop.optimizer.load_state_dict(loop.optimizer.state_dict())
    finally:
        handle.remove()


def same_parameter_again(loop: Loop) -> None:
    loop.optimizer.add_param_group({"params": [loop.model[0].weight]})


def bad_setting(loop: Loop) -> None:
    loop.tier.optimizer(loop.model, FailsMidway, lr=-1.0)


def predicate(loop: Loop) -> None:
    loop.tier.wrap(nn.Linear(2, 2), blocks=refuse)


def infinite_norm(loop: Loop) -> None:
    loop.backward()
    loop.model[0].weight.grad.fill_(float("inf"))
    try:
        loop.optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    finally:
        loop.zero_grad()


CASES: dict[str, tuple[Callable[[Loop], None], type[Exception]]] = {
    "a closure": (closure, Refused),
    "a state dict that does not fit": (wrong_shape, RuntimeError),
    "an optimizer class": (optimizer_class, Refused),
    "a state dict hook": (state_dict_hook, Refused),
    "a hook of load_state_dict": (load_state_dict_hook, Refused),
    "a parameter that is there already": (same_parameter_again, ValueError),
    "a setting that the class refuses": (bad_setting, ValueError),
    "a predicate of blocks": (predicate, Refused),
    "a norm that is not finite": (infinite_norm, RuntimeError),
}


@pytest.fixture
def loop() -> Iterator[Loop]:
    """A loop that knows its order of use by heart."""
    with tiermem.TierManager("cpu", hbm="96KiB", dram="8MiB") as tier:
        loop = Loop(tier)
        for _ in range(4):
            loop.step()
        loop.check()
        yield loop


@pytest.mark.parametrize("case", CASES)
def test_a_users_exception_makes_nothing_be_repaired_or_learned_again(
    loop: Loop, case: str
) -> None:
    act, kind = CASES[case]
    manager = loop.tier._manager
    reset: list[bool] = []
    before = manager.parts.planner.reset
    manager.parts.planner.reset = lambda: (reset.append(True), before())  # type: ignore[method-assign]
    with pytest.raises(kind):
        act(loop)
    assert not manager.gate.torn and not manager.gate.unsure
    if case == "an optimizer class":
        loop.optimizer.step()
        loop.zero_grad()
    loop.check()
    for _ in range(2):
        loop.step()
    loop.check()
    assert not reset, "the order of use was learned again"


def test_an_exception_of_the_class_in_an_owed_step() -> None:
    """It comes out of a forward, through calls of the manager's."""
    with tiermem.TierManager("cpu", hbm="96KiB", dram="8MiB") as tier:
        loop = Loop(tier, overlap="forward")
        for _ in range(3):
            loop.step()
        loop.backward()
        loop.by_hand.step()
        loop.optimizer.step()
        loop.zero_grad()
        FailsMidway.lit = True
        with pytest.raises(Refused):
            loop.model(torch.ones(2, 48))
        assert not tier._manager.gate.torn and not tier._manager.gate.unsure
        loop.step()
        loop.check()


def test_what_a_signal_handler_raises_in_the_same_calls_is_repaired(loop: Loop) -> None:
    """The class of an exception does not tell: this one comes at a line of tiermem's."""
    manager = loop.tier._manager
    loop.backward()
    loop.by_hand.step()
    before = manager.acquire_all
    manager.acquire_all = refuse  # type: ignore[method-assign]
    with pytest.raises(Refused):
        loop.optimizer.step()
    manager.acquire_all = before  # type: ignore[method-assign]
    assert manager.gate.torn and manager.gate.unsure
    loop.optimizer.step()
    loop.zero_grad()
    assert not manager.gate.unsure
    loop.check()


def test_a_state_dict_of_something_else_is_refused_by_name(loop: Loop) -> None:
    with pytest.raises(tiermem.CheckpointError, match="param_groups"):
        loop.optimizer.load_state_dict(loop.model.state_dict())
    loop.check()
