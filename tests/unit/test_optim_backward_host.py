"""Steps on the host that begin inside backward: the same bits, no waits, no visible change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support_hoststeps import gated
from support_nn import Tiers, assert_same
from support_optim import (
    Net,
    Twins,
    loss_of,
    made,
    stop_in_backward,
    two_groups,
    units,
    watched,
)
from torch import nn

import tiermem
from tiermem.optim.host.side import HostSide
from tiermem.optim.host.spread import Rates

DRAM = Tiers("dram")
ADAMW = (torch.optim.AdamW, {"lr": 0.01, "foreach": False})


def tried(tiers: Tiers = DRAM, chosen: Any = ADAMW, build: Any = Net, **options: Any) -> Twins:
    """The first steps are made, which are only watched."""
    options = {"where": "host", **options}
    return watched(Twins(build, tiers, *chosen, overlap="backward", **options))


@pytest.mark.parametrize("groups", [None, two_groups])
def test_every_unit_is_begun_in_backward(groups: Any) -> None:
    options = {} if groups is None else {"groups": groups}
    with tried(**options) as pair:
        assert all(unit.host is not None for unit in pair.optimizer._units)
        for step in range(1, 5):
            pair.backward(step)
            assert made(pair) == units(pair)
            pair.step()
            assert made(pair) == 0
            if step % 2:
                pair.check()
        assert pair.optimizer.stepped_in_backward == 4 * units(pair)


def test_steps_of_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = Rates(host=1.0, device=1.0)
    monkeypatch.setattr("tiermem.optim.host.sides.measure_both", lambda *_: rates)
    with tried(where="both") as pair:
        sides = {unit.host is None for unit in pair.optimizer._units}
        assert sides == {True, False}
        for step in range(1, 4):
            pair.backward(step)
            assert made(pair) == units(pair)
            pair.step()
            pair.check()


def test_nobody_waits_for_the_host() -> None:
    """Neither backward nor step() nor zero_grad(); the next forward does, layer by layer."""
    with tried() as pair:
        pair.optimizer.finish()
        with gated() as gate:
            pair.backward(1)
            pair.step()
            assert (len(gate.begun), gate.waited) == (units(pair), 0)
            assert len(pair.optimizer._units.owed) == units(pair)
            pair.backward(2)
            assert gate.waited
            pair.step()
        pair.check()


def test_accumulation_that_is_announced() -> None:
    with tried(grad_dtype=torch.float32) as pair:
        pair.optimizer.accumulate(3)
        for number in range(9):
            pair.backward(number)
            last = number % 3 == 2
            # announced late: the step after it is the first of three backwards
            assert made(pair) == (units(pair) if last else 0)
            if last:
                pair.step()
                pair.check()


def test_gradients_are_gone_after_the_step_and_not_before() -> None:
    with tried() as pair, gated() as gate:
        pair.backward(1)
        with pytest.raises(tiermem.StepError, match="weights, gradients or state"):
            pair.model.extra.weight.grad.sum()
        pair.by_hand.step()
        pair.optimizer.step()
        # a gradient that the host still steps by: it is there as long as the user keeps it
        assert_same(pair.plain.extra.weight.grad, pair.model.extra.weight.grad.clone(), "gradient")
        assert gate.waited
        pair.by_hand.zero_grad()
        pair.optimizer.zero_grad()
        assert all(p.grad is None for p in pair.model.parameters())
        pair.check()
        assert not any(e.has_grad for u in pair.optimizer._units for e in u.entries)


def test_a_gradient_that_stays_is_added_to() -> None:
    """No zero_grad(): the next backward adds to what the host has stepped by."""
    with tried() as pair:
        pair.backward(1)
        pair.by_hand.step()
        pair.optimizer.step()
        pair.backward(2)
        pair.step()
        pair.check()


def test_gradients_set_to_zero() -> None:
    with tried(master_dtype=None, build=lambda: Net(torch.float32)) as pair:
        for number in range(1, 4):
            pair.backward(number, use_extra=number != 2)
            pair.by_hand.step()
            pair.optimizer.step()
            pair.by_hand.optimizer.zero_grad(set_to_none=False)
            pair.optimizer.zero_grad(set_to_none=False)
            pair.check()


def test_a_state_is_saved_and_loaded_while_the_host_steps() -> None:
    with tried() as pair, gated():
        pair.backward(1)
        pair.step()
        kept = pair.optimizer.state_dict()
        weights = {name: value.clone() for name, value in pair.model.state_dict().items()}
        pair.backward(2)
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        pair.optimizer.load_state_dict(kept)  # what was begun is made first, and then replaced
        assert_same(weights, dict(pair.model.state_dict()), "weights")
        for param in pair.plain.parameters():
            param.grad = None
        pair.backward(3)
        pair.step()
        pair.check()


def test_rates_are_those_of_the_step() -> None:
    for given in (0.01, torch.tensor(0.01)):
        with tried(chosen=(torch.optim.AdamW, {"lr": given, "foreach": False})) as pair:
            loops = (pair.by_hand.optimizer, pair.optimizer)
            rates = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in loops]
            with gated():
                for step in range(4):
                    pair.backward(step)
                    pair.step()
                    for rate in rates:
                        rate.step()
            pair.check()
            pair.backward(9)
            pair.optimizer.param_groups[0]["lr"] = 0.5
            with pytest.raises(tiermem.StepError, match="settings of the parameter groups"):
                pair.optimizer.step()


class Failing(torch.optim.AdamW):
    """Steps one parameter and fails, as often as it is told to."""

    times = 0

    def step(self, closure: Any = None) -> Any:
        if self.times:
            self.times -= 1
            params = self.param_groups[0]["params"]
            self.param_groups[0]["params"] = params[:1]
            try:
                super().step(closure)
            finally:
                self.param_groups[0]["params"] = params
            raise MemoryError("no room for a temporary")
        return super().step(closure)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_step_that_fails_inside_backward_is_made_again(times: int) -> None:
    """Once: step() begins it anew, unseen. Later the error says what is made and what is not."""
    with tried(chosen=(Failing, ADAMW[1])) as pair, gated() as gate:
        pair.check()
        pair.backward(1)
        assert made(pair) == units(pair)
        broken = pair.optimizer._units[2]
        broken.plain.optimizer_for(None).times = times
        gate.let(units(pair))
        pair.by_hand.step()
        pair.optimizer.step()
        gate.let(1)
        for _ in range(times - 1):
            # the others are new, this one is wholly old
            with pytest.raises(tiermem.StepError, match="no room for a temporary") as caught:
                pair.optimizer.finish()
            assert f"{units(pair) - 1} of {units(pair)} units" in str(caught.value)
            assert f"1 are as they were: {broken.name!r};" in str(caught.value)
        assert broken.plain.optimizer_for(None).times == 0
        pair.optimizer.finish()
        pair.by_hand.zero_grad()
        pair.optimizer.zero_grad()
        pair.check()
        pair.backward(2)
        assert made(pair) == units(pair)
        pair.step()
        pair.check()


def test_what_fails_leaves_its_home_as_it_was() -> None:
    with tried(chosen=(Failing, ADAMW[1])) as pair, gated() as gate:
        pair.check()
        pair.backward(1)
        homes = [_home(pair, unit) for unit in pair.optimizer._units]
        pair.optimizer._units[2].plain.optimizer_for(None).times = 1
        gate.let(units(pair))
        changed = [_home(pair, u) != h for u, h in zip(pair.optimizer._units, homes, strict=True)]
        assert [number for number, new in enumerate(changed) if not new] == [2]
        pair.step()
        pair.check()


def _home(pair: Twins, unit: Any) -> bytes:
    manager = pair.tier._manager
    record = manager.parts.table[unit.masters.block.id]
    manager.parts.homes.open(record.home_extent)
    return manager.parts.homes.arena.bytes_of(record.home_extent).numpy().tobytes()


@pytest.mark.parametrize("where", ["submit", "begin"])
@pytest.mark.parametrize("number", [0, 2])
def test_ctrl_c_inside_backward(monkeypatch: pytest.MonkeyPatch, where: str, number: int) -> None:
    """What was begun is finished, and what was not is made by step(); no gradient counts twice."""
    with tried() as pair:
        real, calls = getattr(HostSide, where), []

        def interrupted(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == number + 1:
                raise KeyboardInterrupt
            return real(*args)

        for model in (pair.plain, pair.model):
            model.extra.requires_grad_(False)  # all gradients there are have come by then
        for watched in (3, 4):  # since others are trained now
            pair.backward(watched)
            pair.step()
        loss_of(pair.plain, 1).backward()
        loss = loss_of(pair.model, 1)
        monkeypatch.setattr(HostSide, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        monkeypatch.setattr(HostSide, where, real)
        done = {id(e.param) for u in pair.optimizer._units for e in u.entries if e.has_grad}
        for mine, theirs in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
            if id(mine) not in done:
                theirs.grad = None  # backward did not come to it
        pair.step()
        pair.check()
        pair.backward(2)
        pair.step()
        pair.check()


def test_an_exception_in_the_middle_of_backward() -> None:
    with tried() as pair:
        before = {n: p.detach().clone() for n, p in pair.model.named_parameters()}
        stop_in_backward(pair, 1)
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        after = {n for n, p in pair.model.named_parameters() if not torch.equal(p, before[n])}
        assert "extra.weight" in after and "layers.0.up.weight" not in after


@pytest.mark.parametrize("grads", ["dram", "nvme"])
def test_state_and_weights_in_files(tmp_path: Path, grads: str) -> None:
    """What has to be written to a file first is left to step()."""
    homes = {"params": "nvme", "grads": grads, "master": "nvme", "optimizer": "nvme"}
    with tried(Tiers("mixed", nvme=str(tmp_path), policy=homes)) as pair:
        for step in range(1, 4):
            pair.backward(step)
            assert made(pair) == (units(pair) if grads == "dram" else 0)
            pair.step()
        pair.check()
        for param in pair.model.parameters():
            param.detach()  # other code may write it from now on
        pair.backward(4)
        assert made(pair) == 0
        pair.step()
        pair.check()


def test_views_that_are_kept_are_left_to_the_step() -> None:
    roomy = Tiers("dram", extra_hbm=1 << 16)
    with tried(roomy, build=Net) as pair:
        view = pair.model.layers[0].up.weight.data
        pair.backward(1)
        assert 0 < made(pair) < units(pair)
        with pytest.raises(tiermem.StepError, match="in use"):
            pair.optimizer.step()
        del view
        pair.step()
        pair.check()


def test_another_gradient_is_refused() -> None:
    with tried() as pair:
        losses = [loss_of(pair.model, 1), loss_of(pair.model, 2)]
        loss_of(pair.plain, 1).backward()
        losses[0].backward()
        with pytest.raises(tiermem.StepError, match=r"again before|another gradient"):
            losses[1].backward()
        pair.step()
        pair.check()


def test_closing_while_the_host_works() -> None:
    pair = tried()
    pair.backward(1)
    pair.optimizer.step()
    pair.tier.close()
    with pytest.raises(tiermem.ClosedError):
        pair.optimizer.state_dict()


def test_parameters_without_gradient_and_frozen_parts() -> None:
    def build() -> nn.Module:
        model = Net()
        model.layers[1].requires_grad_(False)
        return model

    with tried(build=build) as pair:
        for number in range(1, 5):
            pair.backward(number, use_extra=number % 2 == 0)
            assert made(pair) == units(pair) - number % 2
            pair.step()
            pair.check()
