"""A weight written between forward and backward is an error, as it is without tiermem."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiermem


class Writes(nn.Module):
    """Changes a weight after it was used, if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, write: bool) -> torch.Tensor:
        y = self.second(self.first(x))
        if write:
            with torch.no_grad():
                self.second.weight.mul_(2.0)
        return y.sum()


@pytest.mark.parametrize("tiered", [False, True])
def test_a_weight_written_after_its_use_is_noticed(tiered: bool) -> None:
    with tiermem.TierManager("cpu", hbm="1MiB", dram="4MiB") as tier:
        model = Writes()
        if tiered:
            model = tier.wrap(model)
        x = torch.ones(2, 8, requires_grad=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(x, True).backward()
        model(x, False).backward()
        assert x.grad is not None


@pytest.mark.parametrize("tiered", [False, True])
def test_hooks_around_a_model_get_every_activation(tiered: bool) -> None:
    """Whoever packs saved tensors outside sees what the resident model's hooks see."""

    def seen(wrap: bool) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        packed: list[tuple[int, ...]] = []
        unpacked: list[tuple[int, ...]] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.append(tuple(tensor.shape))
            return tensor * 1

        def unpack(tensor: torch.Tensor) -> torch.Tensor:
            unpacked.append(tuple(tensor.shape))
            return tensor

        with tiermem.TierManager("cpu", hbm="1MiB", dram="4MiB") as tier:
            model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
            if wrap:
                model = tier.wrap(model)
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                out = model(torch.ones(2, 8)).sum()
            out.backward()
        return packed, unpacked

    packed, unpacked = seen(tiered)
    activations = {(2, 8), (2, 16)}
    assert activations <= set(packed)
    assert activations <= set(unpacked)
    assert (packed, unpacked) == seen(False)


@pytest.mark.parametrize("home", ["hbm", "dram"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_frozen_weights_in_a_checkpoint(home: str, reentrant: bool) -> None:
    """A checkpoint keeps a frozen parameter itself, which points elsewhere after the call."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(8, 8)
            self.frozen = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.frozen, self.before(x), use_reentrant=reentrant).square().sum()

    torch.manual_seed(0)
    plain = Frozen()
    x = torch.rand(3, 8)
    plain(x).backward()
    with tiermem.TierManager("cpu", hbm="1MiB", dram="4MiB", policy={"params": home}) as tier:
        model = Frozen()
        model.load_state_dict(plain.state_dict())
        tier.wrap(model)(x).backward()
        assert torch.equal(model.before.weight.grad.clone(), plain.before.weight.grad)


@pytest.mark.parametrize("rounds", [0, 5])  # from the third on without hooks, where all fits
@pytest.mark.parametrize("between", ["unwrap", "unwrap and wrap", "wrap"])
@pytest.mark.parametrize("home", ["hbm", "dram"])
def test_a_model_leaves_or_comes_between_a_checkpoint_and_its_backward(
    home: str, between: str, rounds: int
) -> None:
    """Checkpoints compare what is saved with the tiers and without: both look the same to them."""

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))
                for _ in range(3)
            )
            self.parts[1].requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=False)
            return x.square().sum()

    torch.manual_seed(0)
    plain = Recomputed()
    model = copy.deepcopy(plain)
    x = torch.rand(3, 8)
    for _ in range(rounds + 1):
        plain(x).backward()
    with tiermem.TierManager("cpu", hbm="1MiB", dram="4MiB", policy={"params": home}) as tier:
        if between != "wrap":
            tier.wrap(model)
        for _ in range(rounds):
            model(x).backward()
        loss = model(x)
        if between != "wrap":
            tier.unwrap(model)
        if between != "unwrap":
            tier.wrap(model)
        loss.backward()
        for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (its.grad is None)
            assert its.grad is None or torch.equal(mine.grad.clone(), its.grad)


@pytest.mark.parametrize("last", ["weights alone", "a weight", "what a weight made"])
@pytest.mark.parametrize("home", ["hbm", "dram"])
def test_a_checkpoint_computes_as_much_again_as_without_tiers(home: str, last: str) -> None:
    """It stops at the last tensor that was saved, if that is a weight or not."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(8, 8)
            self.frozen = nn.Linear(8, 8).requires_grad_(False)
            self.register_buffer("calls", torch.zeros(3))

        def part(self, x: torch.Tensor) -> torch.Tensor:
            self.calls[0] += 1
            if last == "a weight":
                x = x.sigmoid()
                self.calls[1] += 1
            y: torch.Tensor = self.frozen(x)
            self.calls[2] += 1
            return y.sigmoid() if last == "what a weight made" else y

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(self.part, self.before(x), use_reentrant=False)
            return y.square().sum()

    torch.manual_seed(0)
    plain = Counts()
    x = torch.rand(3, 8)
    with tiermem.TierManager("cpu", hbm="1MiB", dram="4MiB", policy={"params": home}) as tier:
        model = Counts()
        model.load_state_dict(plain.state_dict())
        tier.wrap(model)
        for _ in range(5):  # from the third on without hooks, where HBM holds everything
            plain(x).backward()
            model(x).backward()
            assert torch.equal(model.calls.clone(), plain.calls)
            assert torch.equal(model.before.weight.grad.clone(), plain.before.weight.grad)
