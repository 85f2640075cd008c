"""Optimizer state in tensor subclasses lives in the tiers, as what it wraps."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from support_coded import Coded, CodedAnew, CodedMomentum, Failing, Opaque, OpaqueMomentum
from support_nn import Pair, Tiers, assert_same
from support_optim import Twins
from torch import nn

import tiermem

POLICY = dict.fromkeys(("params", "grads", "master", "optimizer"), "dram")
DRAM = Tiers("dram", policy=POLICY)


class Net(nn.Module):
    """Large parameters, whose state is coded, and small ones, whose is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def train(model: nn.Module, optimizer: Any) -> torch.Tensor:
    loss = model(torch.randn(3, 12)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("cls", [CodedMomentum, CodedAnew])
@pytest.mark.parametrize("options", [{}, {"overlap": "forward"}, {"overlap": "backward"}], ids=str)
@pytest.mark.parametrize("home", ["dram", "nvme"])
def test_state_of_a_subclass_trains_like_the_resident(
    cls: Any, options: dict[str, Any], home: str, tmp_path: Path
) -> None:
    policy = {**POLICY, "optimizer": home}
    tiers = Tiers(home, nvme=str(tmp_path) if home == "nvme" else None, policy=policy)
    with Pair(Net, tiers, (cls, {"lr": 0.1, **options})) as pair:
        for number in range(5):
            pair.both(train, number)
        state = pair.optimizer.state_dict()["state"]
        assert type(state[0]["mean"]) is Coded
        assert type(state[1]["mean"]) is torch.Tensor
        pair.finish()


def test_the_tiers_keep_the_bytes_of_what_is_wrapped() -> None:
    with Pair(Net, DRAM, (CodedMomentum, {})) as pair:
        pair.both(train, 1)
        unit = pair.optimizer._units[0]
        assert [(s.dtype, s.shape) for s in unit.block.tensors] == [
            (torch.int8, (12, 12)),
            (torch.float32, (12,)),
            (torch.float32, ()),
            (torch.float32, (12,)),
        ]


def test_steps_on_the_host_and_back_after_a_failure() -> None:
    with Pair(Net, DRAM, (Failing, {"where": "host"})) as pair:
        for number in range(3):
            pair.both(train, number)
        before = copy.deepcopy(pair.optimizer.state_dict())
        torch.manual_seed(9)
        pair.model(torch.randn(3, 12)).square().mean().backward()
        Failing.fail = 1
        with pytest.raises(tiermem.StepError, match="told to fail"):
            pair.optimizer.step()
        assert Failing.fail == 0
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        torch.manual_seed(9)
        train(pair.plain, pair.plain_optimizer)
        pair.both(train, 4)
        pair.check_state()
        assert before["state"][0]["step"] == 3


@pytest.mark.parametrize("where", ["device", "host"])
def test_state_of_a_subclass_over_masters(where: str) -> None:
    class Half(CodedMomentum):
        """Large is what the layers' matrices are."""

    def check(twins: Twins) -> None:
        for number in range(4):
            twins.backward(number)
            twins.step()
        twins.check()

    with Twins(_net, DRAM, Half, {"lr": 0.01, "large": 300}, where=where) as twins:
        check(twins)
        kinds = {type(s["mean"]) for s in twins.optimizer.state_dict()["state"].values()}
        assert kinds == {Coded, torch.Tensor}


def _net() -> nn.Module:
    from support_optim import Net as Mixed

    return Mixed(layers=2)


def test_state_dicts_go_both_ways_and_through_a_file() -> None:
    with Pair(Net, DRAM, (CodedMomentum, {})) as pair:
        for number in range(3):
            pair.both(train, number)
        file = io.BytesIO()
        torch.save(pair.optimizer.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=False)
        assert_same(pair.plain_optimizer.state_dict()["state"], saved["state"], "saved")
        pair.both(train, 4)
        for optimizer in (pair.plain_optimizer, pair.optimizer):
            optimizer.load_state_dict(copy.deepcopy(saved))
        pair.both(train, 5)
        fresh = pair.plain_optimizer.state_dict()
        pair.optimizer.load_state_dict(copy.deepcopy(fresh))
        pair.both(train, 6)
        pair.finish()


def test_a_plain_state_in_place_of_a_coded_one() -> None:
    """As torch does it, the class goes on with what it was given."""
    with Pair(Net, DRAM, (CodedMomentum, {})) as pair:
        pair.both(train, 1)
        saved = copy.deepcopy(pair.plain_optimizer.state_dict())
        for state in saved["state"].values():
            if isinstance(state["mean"], Coded):
                state["mean"] = state["mean"].value()
        for optimizer in (pair.plain_optimizer, pair.optimizer):
            optimizer.load_state_dict(copy.deepcopy(saved))
        for number in (2, 3):
            pair.both(train, number)
        pair.finish()


def test_a_state_of_another_shape_is_refused() -> None:
    with Pair(Net, DRAM, (CodedMomentum, {})) as pair:
        pair.both(train, 1)
        saved = copy.deepcopy(pair.plain_optimizer.state_dict())
        saved["state"][0]["mean"] = Coded.zeros(torch.zeros(3, 4))
        with pytest.raises(tiermem.CheckpointError, match=r"shape \(3, 4\)"):
            pair.optimizer.load_state_dict(saved)
        pair.both(train, 2)
        pair.finish()


def test_the_state_is_looked_at_and_written() -> None:
    def use(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        found = []
        for param in model.parameters():
            mean = optimizer.state[param]["mean"]
            found.append(mean.float() + 1)
            assert mean.shape == param.shape
            mean.copy_(found[-1] * 0.5)
        return found

    with Pair(Net, DRAM, (CodedMomentum, {})) as pair:
        pair.both(train, 1)
        pair.both(use, 2)
        pair.both(train, 3)
        pair.finish()


def test_attributes_of_the_class_are_there() -> None:
    def use(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        mean = optimizer.state[next(iter(model.parameters()))]["mean"]
        value = mean.value()
        mean.codes.add_(1)
        return [value, mean.scale.clone()]

    with Pair(Net, DRAM, (CodedMomentum, {})) as pair:
        pair.both(train, 1)
        pair.both(use, 2)
        pair.both(train, 3)
        pair.finish()
        plain = pair.optimizer
        assert not hasattr(plain.state_dict()["state"][1]["mean"], "codes")


def test_a_class_that_cannot_be_taken_apart_is_refused() -> None:
    with tiermem.TierManager("cpu", hbm="64KiB", dram="1MiB", policy=POLICY) as tier:
        model = tier.wrap(Net())
        for large in (1, 100):  # seen in the trial, and on the real shapes
            with pytest.raises(tiermem.StepError, match="__tensor_flatten__") as caught:
                tier.optimizer(model, OpaqueMomentum, large=large)
            assert Opaque.__name__ in str(caught.value)
        train(model, tier.optimizer(model, CodedMomentum))
