"""Norms are taken as gradients arrive, so that clipping brings none of them up again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_nn import Tiers, assert_same, seed
from support_optim import Net, Twins, loss_of
from torch import nn

import tiermem
from tiermem.core.block import Role
from tiermem.nn.wrap.bypass import Bypass

DRAM = Tiers("dram")


def counts(pair: Twins) -> tuple[int, int]:
    """How many norms the last clipping knew, and how many it had to take."""
    norms = pair.optimizer._norms
    return norms.taken, norms.swept


def gradients(pair: Twins) -> int:
    return sum(p.grad is not None for p in pair.plain.parameters())


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
def test_from_the_second_step_on_none_is_brought_up(
    accumulate: int, grad_dtype: torch.dtype | None
) -> None:
    with Twins(lambda: Net(layers=6), DRAM, overlap=True, grad_dtype=grad_dtype) as pair:
        for step in range(3):
            for part in range(accumulate):
                pair.backward(10 * step + part)
            pair.optimizer.finish()
            manager = pair.tier._manager
            used: list[Any] = []
            acquire = manager.acquire

            def spy(block: Any, used: list[Any] = used, acquire: Any = acquire) -> Any:
                used.append(block.role)
                return acquire(block)

            manager.acquire = spy
            pair.clip_norm(0.05)
            manager.acquire = acquire
            total = len(list(pair.plain.parameters()))
            assert counts(pair) == ((total, 0) if step else (0, total))
            assert (Role.GRAD in used) == (step == 0)
            pair.step()
            pair.check()


def test_another_kind_of_norm_is_taken_anew() -> None:
    with Twins(Net, DRAM, master_dtype=None) as pair:
        for step, (kind, foreach) in enumerate(
            [(2.0, None), (1.0, None), (float("inf"), False), (float("inf"), False), (2.0, True)]
        ):
            pair.backward(step)
            expected = nn.utils.clip_grad_norm_(
                pair.plain.parameters(), 0.1, norm_type=kind, foreach=foreach
            )
            found = pair.optimizer.clip_grad_norm_(0.1, norm_type=kind, foreach=foreach)
            assert_same(expected, found, "norm")
            assert (counts(pair)[1] == 0) == (step == 3)
            pair.step()
            pair.check()


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "halved": lambda m: m.extra.weight.grad.mul_(0.5),
    "through a view": lambda m: m.extra.weight.grad[1].zero_(),
    "replaced": lambda m: setattr(m.extra.weight, "grad", torch.ones_like(m.extra.weight)),
    "forgotten": lambda m: setattr(m.extra.weight, "grad", None),
}


@pytest.mark.parametrize("how", sorted(CHANGES))
def test_a_gradient_that_somebody_wrote_is_measured_again(how: str) -> None:
    with Twins(Net, DRAM, master_dtype=None) as pair:
        for step in range(2):
            pair.backward(step)
            for model in (pair.plain, pair.model):
                CHANGES[how](model)
            pair.clip_norm(0.05)
            if step:
                assert counts(pair)[1] == (how != "forgotten")
            pair.step()
            pair.check()


def test_clipping_twice_and_by_value_before() -> None:
    """What is clipped has other norms; what the user sees is clipped."""
    with Twins(Net, DRAM, master_dtype=None) as pair:
        for step in range(3):
            pair.backward(step)
            if step == 1:
                pair.clip_value(0.002)
            pair.clip_norm(0.05)
            if step == 2:
                pair.model.extra.weight.grad.sum()  # the factor is applied now
            pair.clip_norm(0.01)
            for mine, theirs in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
                assert_same(theirs.grad, mine.grad.clone(), "a clipped gradient")
            pair.step()
            pair.check()


PLAIN: dict[str, Callable[[nn.Module], Any]] = {
    "by norm": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.05),
    "by value": lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.002),
    "zeroed": lambda m: m.zero_grad(set_to_none=False),
}
TIERED: dict[str, Callable[[Any], Any]] = {
    "by norm": lambda optimizer: optimizer.clip_grad_norm_(0.05),
    "by value": lambda optimizer: optimizer.clip_grad_value_(0.002),
    "zeroed": lambda optimizer: optimizer.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("how", sorted(PLAIN))
def test_a_view_of_a_gradient_shows_what_changes_all(how: str) -> None:
    """The view is followed where it is written through, so it may not show what was before."""
    with Twins(Net, DRAM, master_dtype=None) as pair:
        for step in range(2):
            pair.backward(step)
            views = [m.extra.weight.grad[1:] for m in (pair.plain, pair.model)]
            PLAIN[how](pair.plain)
            TIERED[how](pair.optimizer)
            assert_same(views[0], views[1], "a view that was taken before")
            for mine, theirs in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
                assert_same(theirs.grad, mine.grad.clone(), "a gradient")
            pair.step()
            pair.check()


class WritesGradients(torch.optim.SGD):
    """Leaves other gradients behind than it found."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(0.5)
        return result


@pytest.mark.parametrize("overlap", [False, "forward"])
def test_an_optimizer_that_writes_gradients(overlap: Any) -> None:
    with Twins(Net, DRAM, WritesGradients, {"lr": 0.1}, master_dtype=None, overlap=overlap) as pair:
        for step in range(2):
            pair.backward(step)
            for part in range(2):
                if part or not step:
                    pair.clip_norm(0.05)
                pair.by_hand.step()
                pair.optimizer.step()
            pair.by_hand.zero_grad()
            pair.optimizer.zero_grad()
            pair.check()


def test_a_step_that_undoes_a_scale_in_the_gradients() -> None:
    """A norm that is asked for behind it is not the one of the gradients that had the scale."""
    fused = {"lr": 0.01, "fused": True}
    with Twins(lambda: Net(torch.float32), DRAM, settings=fused, master_dtype=None) as pair:
        loops = (pair.plain, pair.by_hand.optimizer), (pair.model, pair.optimizer)
        scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in loops]
        for step in range(4):
            norms = []
            for (model, optimizer), scaler in zip(loops, scalers, strict=True):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, step)).backward()
                scaler.step(optimizer)
                scaler.update()
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e6))
            assert_same(norms[0], norms[1], f"norm {step}")
        pair.check()


def test_not_finite() -> None:
    with Twins(Net, DRAM, master_dtype=None) as pair:
        pair.backward(0)
        pair.clip_norm(1.0)
        pair.step()
        pair.backward(1, scale=float("inf"))
        with pytest.raises(RuntimeError, match="non-finite"):
            pair.optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
        for mine, theirs in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
            assert_same(theirs.grad, mine.grad.clone(), "unchanged")


class Scales(nn.Module):
    """Many little parameters, whose gradients lie in one block."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.rand(16) + 0.5 for _ in range(8))
        self.last = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = torch.tanh(x * scale)
        return self.last(x)


def test_a_view_that_was_written_stays_where_others_of_its_block_change() -> None:
    """Of a gradient that the optimizer has not: it does not look for what was written there."""

    def use(model: Any, make: Any) -> list[torch.Tensor]:
        others = [scale for layer in model for scale in layer.scales[::2]]
        optimizer = make([p for p in model.parameters() if all(p is not o for o in others)], lr=0.1)
        for number in range(3):
            model(torch.full((2, 16), number + 1.0)).square().sum().backward()
            if number == 1:
                for scale in others:
                    scale.grad.data.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return [scale.grad.clone() for scale in others]

    def build() -> nn.Module:
        seed(3)
        return nn.Sequential(*(Scales() for _ in range(6)))

    expected = use(build(), torch.optim.SGD)
    with tiermem.TierManager("cpu", hbm="24KiB", dram="1MiB") as tier:
        found = use(tier.wrap(build()), partial(tier.optimizer, cls=torch.optim.SGD))
        assert_same(expected, found, "gradients")


def test_two_optimizers_with_norms_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bypass, "_may_leave_gradients", lambda *_, **__: False)

    def build() -> nn.Module:
        seed(3)
        return Net(torch.float32)

    with tiermem.TierManager(device="cpu", hbm="2MiB", dram="16MiB") as tier:
        models = build(), tier.wrap(build())
        cls = torch.optim.SGD
        parts = {"layers": 2.0, "extra": 1.0}
        plain = {n: cls(getattr(models[0], n).parameters(), lr=0.1) for n in parts}
        tiered = {n: tier.optimizer(getattr(models[1], n).parameters(), cls, lr=0.1) for n in parts}
        for number in range(3):
            for model in models:
                loss_of(model, number).backward()
            for name, kind in parts.items():
                params = getattr(models[0], name).parameters()
                expected = nn.utils.clip_grad_norm_(params, 0.01, norm_type=kind)
                assert_same(expected, tiered[name].clip_grad_norm_(0.01, norm_type=kind), "norm")
                assert (tiered[name]._norms.swept == 0) == (number > 0)
                for optimizer in (plain[name], tiered[name]):
                    optimizer.step()
            for model in models:
                model.zero_grad()
        assert_same(dict(models[0].state_dict()), dict(models[1].state_dict()), "weights")


ACTS = ("clip", "clip", "value", "edit", "backward", "step", "zero", "none")


@settings(max_examples=examples(8, 400))
@given(
    homes=st.fixed_dictionaries(
        {role: st.sampled_from(["dram", "nvme", "auto"]) for role in ("params", "grads")}
    ),
    overlap=st.booleans(),
    grad_dtype=st.sampled_from([None, torch.float32]),
    acts=st.lists(st.sampled_from(ACTS), min_size=4, max_size=14),
)
def test_any_order_of_acts(
    tmp_path_factory: pytest.TempPathFactory,
    homes: dict[str, str],
    overlap: bool,
    grad_dtype: torch.dtype | None,
    acts: list[str],
) -> None:
    tiers = Tiers("mixed", nvme=str(tmp_path_factory.mktemp("swap")), policy=homes)
    with Twins(lambda: Net(layers=2), tiers, overlap=overlap, grad_dtype=grad_dtype) as pair:
        for number, act in enumerate(["backward", "clip", *acts, "backward", "clip", "step"]):
            if act == "clip":
                pair.clip_norm(0.05)
            elif act == "value":
                pair.clip_value(0.002)
            elif act == "edit" and grad_dtype is None:
                for model in (pair.plain, pair.model):
                    if model.extra.bias.grad is not None:
                        model.extra.bias.grad.mul_(0.5)
            elif act == "backward":
                pair.backward(number, use_extra=number % 3 != 0)
            elif act == "step":
                pair.by_hand.step()
                pair.optimizer.step()
            elif act == "zero":
                pair.by_hand.zero_grad()
                pair.optimizer.zero_grad()
        pair.check()
