"""Half precision with a loss scale: gradients unscaled by hand, clipped, then stepped."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_nn import Tiers, assert_same, default_dtype
from support_optim import Net, Twins, loss_of, made

import tiermem

SETTINGS = {"lr": 0.01, "foreach": False}
HALF = {"master_dtype": torch.float32, "grad_dtype": torch.float32}


class Step(NamedTuple):
    """What a loop does in one step."""

    micro_batches: int = 2
    infinite: bool = False
    unscale: bool = True
    clip: str = "optimizer"
    use_extra: bool = True


class Scaled:
    """A loop with a GradScaler over float32 masters by hand, and the same one in the tiers."""

    def __init__(self, twins: Twins, scale: float) -> None:
        self.twins = twins
        self.plain, self.tiered = (
            torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2) for _ in range(2)
        )
        self._number = 0

    def step(self, step: Step) -> float:
        """One step of both; returns the scale after it."""
        twins = self.twins
        for part in range(step.micro_batches):
            self._number += 1
            for model, scaler in ((twins.plain, self.plain), (twins.model, self.tiered)):
                loss = loss_of(model, self._number, step.use_extra)
                if step.infinite and part == 0:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
            twins.by_hand.after_backward()
        twins.by_hand.hand_over()
        if step.unscale:
            self.plain.unscale_(twins.by_hand.optimizer)
            self.tiered.unscale_(twins.optimizer)
            self._clip(step.clip)
        self.plain.step(twins.by_hand.optimizer)
        twins.by_hand.derive()
        twins.by_hand.zero_grad()
        self.tiered.step(twins.optimizer)
        twins.optimizer.zero_grad()
        for scaler in (self.plain, self.tiered):
            scaler.update()
        assert self.plain.get_scale() == self.tiered.get_scale()
        return self.tiered.get_scale()

    def _clip(self, how: str) -> None:
        masters, twins = self.twins.by_hand.masters, self.twins
        if how == "value":
            torch.nn.utils.clip_grad_value_(masters, 0.003)
            twins.optimizer.clip_grad_value_(0.003)
        elif how:
            expected = torch.nn.utils.clip_grad_norm_(masters, 0.05)
            found = (
                twins.optimizer.clip_grad_norm_(0.05)
                if how == "optimizer"
                else torch.nn.utils.clip_grad_norm_(twins.model.parameters(), 0.05)
            )
            assert found.dtype is expected.dtype
            assert_same(expected, found, "norm")


def _half(tiers: Tiers, **options: Any) -> Twins:
    chosen = {**SETTINGS, **options.pop("settings", {})}
    return Twins(
        lambda: Net(torch.float16), tiers, torch.optim.AdamW, chosen, **{**HALF, **options}
    )


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("home", ["dram", "nvme"])
@pytest.mark.one_in(2)
def test_unscaled_clipped_and_stepped(tmp_path: Path, where: str, overlap: bool, home: str) -> None:
    """One of the steps is left out, as a gradient is infinite; the scale grows and shrinks."""
    tiers = Tiers("one", nvme=str(tmp_path), policy=home)
    options: dict[str, Any] = {"where": where, "overlap": overlap, "master_dtype": None}
    with Twins(lambda: Net(torch.float32), tiers, torch.optim.AdamW, SETTINGS, **options) as twins:
        pairs = [
            (model, optimizer, torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2))
            for model, optimizer in (
                (twins.plain, twins.by_hand.optimizer),
                (twins.model, twins.optimizer),
            )
        ]
        norms: list[torch.Tensor] = []
        scales: list[float] = []
        for step in range(6):
            for model, optimizer, scaler in pairs:
                for number in (2 * step, 2 * step + 1):
                    with torch.autocast("cpu", dtype=torch.float16):
                        loss = loss_of(model, number)
                    if step == 3:
                        loss = loss * float("inf")
                    scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                if model is twins.plain:
                    norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
                else:
                    assert_same(norms[-1], twins.optimizer.clip_grad_norm_(0.05), "norm")
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            scales.append(pairs[1][2].get_scale())
            assert pairs[0][2].get_scale() == scales[-1]
            if step in (2, 3):
                twins.check()
        assert min(scales) < max(scales) and not norms[3].isfinite()
        twins.check()


@pytest.mark.parametrize("where", ["device", "host", "fused"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("home", ["dram", pytest.param("nvme", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("clip", ["optimizer", "torch"])
@pytest.mark.one_in(3)
def test_float16_weights_with_float32_masters(
    tmp_path: Path, where: str, overlap: bool, home: str, clip: str
) -> None:
    """Unscaled, clipped and stepped as if every gradient were float32, skipped steps and all."""
    tiers = Tiers("one", nvme=str(tmp_path), policy=home)
    options: dict[str, Any] = {"overlap": overlap}
    options |= {"settings": {"fused": True}} if where == "fused" else {"where": where}
    with _half(tiers, **options) as twins:
        loop = Scaled(twins, 64.0)
        scales = []
        for number in range(6):
            scales.append(loop.step(Step(infinite=number == 3, clip=clip)))
            if number in (2, 3):
                twins.check()
        assert min(scales) < max(scales)
        twins.check()


STEPS = st.builds(
    Step,
    micro_batches=st.integers(1, 3),
    infinite=st.integers(0, 4).map(lambda n: n == 0),
    unscale=st.booleans(),
    clip=st.sampled_from(["", "optimizer", "torch", "value"]),
    use_extra=st.booleans(),
)


@settings(max_examples=examples(8))
@given(
    steps=st.lists(STEPS, min_size=2, max_size=5),
    scale=st.sampled_from([1.0, 3.0, 1000.0, 2.0**14, 2.0**20]),
    where=st.sampled_from(["device", "host"]),
    overlap=st.booleans(),
    grad_dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_any_loop_with_a_scaler(
    steps: list[Step], scale: float, where: str, overlap: bool, grad_dtype: torch.dtype
) -> None:
    """Also where scaled gradients pass what float16 can hold, alone or summed up."""
    masters = {"master_dtype": grad_dtype, "grad_dtype": grad_dtype}
    with _half(Tiers("dram"), where=where, overlap=overlap, **masters) as twins:
        loop = Scaled(twins, scale)
        for step in steps:
            loop.step(step)
            twins.check()


@pytest.mark.parametrize("unscale", [False, True])
def test_a_sum_that_float16_could_not_hold_is_no_infinity(unscale: bool) -> None:
    with _half(Tiers("dram")) as twins:
        loss_of(twins.plain, 1).backward()
        loss_of(twins.plain, 2).backward()
        largest = max(p.grad.abs().max().item() for p in twins.plain.parameters())
        twins.plain.zero_grad()
        scale = torch.finfo(torch.float16).max * 1.02 / largest
        loop = Scaled(twins, scale)
        assert loop.step(Step(unscale=unscale)) == loop.step(Step(unscale=unscale)) / 2
        twins.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_scale_is_undone_under_any_default_dtype(dtype: torch.dtype) -> None:
    """The scaler's kernel takes a float32 flag, whatever dtype new tensors have by default."""
    with _half(Tiers("dram")) as twins:
        loop = Scaled(twins, 64.0)
        with default_dtype(dtype):
            for number in range(4):
                loop.step(Step(infinite=number == 2))
        twins.check()


def test_float16_gradients_are_left_to_the_step() -> None:
    """As torch has it: it unscales none in place, and ``step()`` does it after the cast."""
    with _half(Tiers("dram"), grad_dtype=None) as twins:
        loop = Scaled(twins, 64.0)
        for number in range(4):
            loop.step(Step(unscale=False, infinite=number == 2, micro_batches=1 + number % 2))
            twins.check()
        loop.tiered.scale(loss_of(twins.model, 9)).backward()
        with pytest.raises(ValueError, match="FP16"):
            loop.tiered.unscale_(twins.optimizer)


def test_looking_for_infinities_writes_nothing_back() -> None:
    with _half(Tiers("dram")) as twins:
        loop = Scaled(twins, 64.0)
        loop.step(Step())
        loss_of(twins.model, 5).backward()
        blocks = [u.block.id for unit in twins.optimizer._units for u in unit.grad_units()]
        manager = twins.optimizer._runtime.manager
        before = [manager.parts.table[block].writes for block in blocks]
        loop.tiered.scale(torch.ones(()))
        loop.tiered._check_inf_per_device(twins.optimizer)
        assert [manager.parts.table[block].writes for block in blocks] == before


def test_unscaling_what_a_step_inside_backward_used_up() -> None:
    with _half(Tiers("dram"), overlap="backward") as twins:
        for number in (1, 2):
            twins.backward(number)
            twins.step()
        twins.backward(3)
        assert made(twins) > 0
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        with pytest.raises(Exception, match="used up by a step inside backward"):
            scaler.unscale_(twins.optimizer)


@pytest.mark.parametrize("where", ["device", "host"])
def test_a_scaler_that_finds_no_gradient_of_an_optimizer_passes_over_it(where: Any) -> None:
    """As with torch's fused optimizers, which it leaves the scale to: it puts a plain 0."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    kept = [param.detach().clone() for param in model[1].parameters()]
    with tiermem.TierManager("cpu", hbm=1 << 16, dram=1 << 20) as tier:
        tier.wrap(model)
        pair = [
            tier.optimizer(half.parameters(), torch.optim.AdamW, fused=True, where=where)
            for half in model
        ]
        model[1].requires_grad_(False)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for _ in range(2):
            scaler.scale(model(torch.ones(2, 8)).sum()).backward()
            for optimizer in pair:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
        assert all(map(torch.equal, model[1].parameters(), kept))
