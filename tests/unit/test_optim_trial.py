"""An optimizer class is tried apart from the process: nothing of it is used or changed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support_classes import Noisy, Plain
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import tiermem

POLICY = dict.fromkeys(("params", "grads", "master", "optimizer"), "dram")


@contextmanager
def wrapped() -> Iterator[tuple[tiermem.TierManager, nn.Module]]:
    model = nn.Sequential(*[nn.Linear(12, 12) for _ in range(3)])
    with tiermem.TierManager("cpu", hbm="64KiB", dram="1MiB", policy=POLICY) as tier:
        yield tier, tier.wrap(model)


class Beside(Plain):
    """While it is stepped, another thread draws random numbers."""

    drawn: list[float]

    def begin(self) -> None:
        thread = threading.Thread(target=lambda: Beside.drawn.append(float(torch.rand(()))))
        thread.start()
        thread.join()


def test_another_thread_has_random_numbers_of_its_own_meanwhile() -> None:
    with wrapped() as (tier, model):
        torch.manual_seed(7)
        expected = [float(torch.rand(())) for _ in range(200)]
        torch.manual_seed(7)
        Beside.drawn = []
        tier.optimizer(model, Beside)
        assert len(Beside.drawn) > 10
        assert Beside.drawn == expected[: len(Beside.drawn)]


@pytest.mark.parametrize("cls", [torch.optim.AdamW, Noisy])
def test_no_generator_is_drawn_from_or_written(cls: Any) -> None:
    with wrapped() as (tier, model):
        torch.manual_seed(7)
        random.seed(7)
        before, mine = torch.get_rng_state(), random.getstate()
        tier.optimizer(model, cls)
        assert torch.equal(torch.get_rng_state(), before)
        assert random.getstate() == mine


def test_a_class_with_a_generator_of_its_own_is_refused() -> None:
    class OfItsOwn(Plain):
        """Each instance draws the same numbers."""

        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, lr)
            self.generator = torch.Generator().manual_seed(3)

        def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            p.add_(torch.rand(p.shape, generator=self.generator).to(p))

    with wrapped() as (tier, model), pytest.raises(tiermem.StepError, match="random numbers"):
        tier.optimizer(model, OfItsOwn)


def test_hooks_for_the_steps_of_all_optimizers_see_no_trial() -> None:
    seen = []
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    try:
        with wrapped() as (tier, model):
            for options in ({}, {"where": "host"}, {"where": "both"}):
                tier.optimizer(model, torch.optim.AdamW, **options).close()
    finally:
        hook.remove()
    assert not seen


def test_the_users_settings_are_not_written() -> None:
    class Keeps(Plain):
        """Writes lists and tensors among its settings."""

        def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            group["seen"][0] = p.sum().item() * 0
            group["bound"].mul_(1)
            p.sub_(group["bound"] * p.grad)

        def count(self, group: dict[str, Any]) -> None:
            group["seen"].append(1)

    bound, seen = torch.tensor(0.5), [0.0]
    with wrapped() as (tier, model):
        groups = [{"params": list(model.parameters()), "bound": bound, "seen": seen}]
        tier.optimizer(groups, Keeps)
        assert seen == [0.0]
        assert bound._version == 0


@contextmanager
def in_double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        torch.inference_mode,
        in_double,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("cpu"),
    ],
    ids=["no_grad", "inference_mode", "float64", "autocast", "device"],
)
def test_what_the_user_has_switched_on_stays_and_does_not_matter(
    context: Callable[[], Any],
) -> None:
    def modes() -> tuple[Any, ...]:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            torch.is_autocast_enabled("cpu"),
        )

    with wrapped() as (tier, model):
        with context():
            before = modes()
            optimizer = tier.optimizer(model, torch.optim.AdamW, lr=0.1)
            assert modes() == before
        model(torch.ones(1, 12)).sum().backward()
        optimizer.step()
        state = optimizer.state_dict()["state"]
        assert {s["exp_avg"].dtype for s in state.values()} == {torch.float32}


def test_nothing_is_compiled_for_a_trial() -> None:
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    def move(p: torch.Tensor, mean: torch.Tensor, lr: float) -> None:
        p.sub_(lr * mean)

    class Compiled(Plain):
        """Compiles its update, as a whole."""

        def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            whole = torch.compile(move, backend=backend, fullgraph=True, dynamic=False)
            whole(p.detach(), state["mean"], group["lr"])

    with wrapped() as (tier, model):
        optimizer = tier.optimizer(model, Compiled)
        assert not compiled
        model(torch.ones(1, 12)).sum().backward()
        optimizer.step()
        assert compiled


def test_a_trial_takes_little_time() -> None:
    """Beside what torch itself takes to make any first optimizer, which imports its compiler."""
    with wrapped() as (tier, model):
        taken = []
        for _ in range(4):
            began = time.thread_time()
            tier.optimizer(model, torch.optim.AdamW, lr=0.1).close()
            taken.append(time.thread_time() - began)
        assert min(taken) < 0.3
