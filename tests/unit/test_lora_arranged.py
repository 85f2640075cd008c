"""Steps of adapters on frozen weights that stream: laid out, forward and backward as one round."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_runtime import EvenClock
from torch import nn

import tiermem

WIDTH, LAYERS = 32, 12
LR = 1e-2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.v_proj(torch.tanh(self.q_proj(x)))


class Normed(Layer):
    """A layer whose own weights are used between its parts, in backward as what was saved."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(4 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.v_proj(self.after(torch.tanh(self.q_proj(self.norm(x)))))


def build(kind: type[Layer] = Layer) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, WIDTH), *(kind() for _ in range(LAYERS)))
    tiermem.add_adapters(model, tiermem.Lora(r=2))
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


class Steps:
    """Training steps, and how their passes go.

    Attributes:
        losses: Of each step.
        arranged: Of each pass of the last step, whether it went as it was laid out.
        repeated: The same, or as recorded.
    """

    def __init__(self, model: nn.Module, optimizer: Any, tier: tiermem.TierManager | None) -> None:
        self.model, self.optimizer, self.tier = model, optimizer, tier
        self.losses: list[float] = []
        self.arranged: list[bool] = []
        self.repeated: list[bool] = []
        if tier is not None:
            self.watch(tier)

    def watch(self, tier: tiermem.TierManager) -> None:
        replay = tier._manager.replay
        end = replay.end

        def ending() -> None:
            run = replay.run  # as it ends: it may have broken off
            self.arranged.append(run is not None and run.arranged)
            self.repeated.append(run is not None)
            end()

        replay.end = ending  # type: ignore[method-assign]

    def step(self) -> int:
        """Makes one; returns the bytes that came up."""
        torch.manual_seed(len(self.losses))
        before = self.came_up()
        loss = self.model(torch.randint(0, 256, (4, 16))).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        if self.tier is not None:
            self.tier._manager.flush()
        return self.came_up() - before

    def came_up(self) -> int:
        links = {} if self.tier is None else self.tier.stats().links
        return sum(found.nbytes for link, found in links.items() if link.endswith("->hbm"))


@contextmanager
def streamed(
    home: str, folder: Path, flops: float = 0.0, kind: type[Layer] = Layer, blocks: Any = "auto"
) -> Iterator[Steps]:
    """Opens a model whose frozen weights stream, with a device that copies beside its compute.

    Args:
        home: Of the frozen weights.
        folder: For files.
        flops: Operations a second of the device, from which times are expected before they are
            measured.
        kind: Of the layers.
        blocks: As for ``tier.wrap``.
    """
    model = build(kind)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    with tiermem.TierManager(
        "cpu",
        hbm=frozen // 2 + (220 << 10),
        dram="32MiB",
        nvme=folder if home == "nvme" else None,
        policy={"params": home},
    ) as tier:
        tier._manager.prefetcher.fetcher.beside = True
        tier._manager.parts.pass_timer._clock = EvenClock()
        tier._manager.parts.pass_timer.estimates.flops = flops
        tier.wrap(model, blocks)
        yield Steps(model, tier.optimizer(trained(model), torch.optim.AdamW, lr=LR), tier)


@pytest.mark.parametrize("flops", [0.0, 1e12])
@pytest.mark.parametrize("home", ["dram", "nvme"])
def test_steps_are_laid_out_from_the_third_on(home: str, flops: float, tmp_path: Path) -> None:
    resident = build()
    plain = Steps(resident, torch.optim.AdamW(trained(resident), lr=LR), None)
    for _ in range(8):
        plain.step()
    with streamed(home, tmp_path, flops) as steps:
        for _ in range(2):
            steps.step()
        for _ in range(6):
            steps.arranged.clear()
            before = steps.tier.stats().misses  # type: ignore[union-attr]
            bytes_up = steps.step()
            # the pass before, which a step's first one ends, and a step's own but for its last
            assert steps.arranged[1:] == [True, True]
            assert steps.tier.stats().misses == before  # type: ignore[union-attr]
        assert steps.arranged[0], "an optimizer's pass is no reason to begin anew"
        assert steps.losses == plain.losses
        mine = {name: t.clone() for name, t in steps.model.state_dict().items()}
    for name, tensor in resident.state_dict().items():
        assert torch.equal(mine[name], tensor), name
    (tmp_path / "other").mkdir()
    with streamed(home, tmp_path / "other", flops) as steps:
        replay = steps.tier._manager.replay  # type: ignore[union-attr]
        replay._arranger._fetcher = SimpleNamespace(beside=False)  # type: ignore[assignment]
        recorded = [steps.step() for _ in range(12)]
        assert all(steps.repeated[-3:]) and not any(steps.arranged)
    assert bytes_up <= recorded[-1]


def test_a_backward_that_lets_go_later_is_laid_out_for_that(tmp_path: Path) -> None:
    resident = build(Normed)
    plain = Steps(resident, torch.optim.AdamW(trained(resident), lr=LR), None)
    linears = [
        f"{number}.{name}" for number in range(1, LAYERS + 1) for name in ("q_proj", "v_proj")
    ]
    layers = [str(number) for number in range(1, LAYERS + 1)]
    with streamed("dram", tmp_path, 1e12, Normed, [*layers, *linears]) as steps:
        for _ in range(8):
            steps.arranged.clear()
            steps.step()
            plain.step()
        assert steps.arranged == [True] * 3
        assert steps.losses == plain.losses


def test_an_evaluation_in_between_does_no_harm(tmp_path: Path) -> None:
    resident = build()
    plain = Steps(resident, torch.optim.AdamW(trained(resident), lr=LR), None)
    with streamed("dram", tmp_path) as steps:
        for number in range(12):
            assert steps.step() > 0
            plain.step()
            if number % 4 == 3:
                tokens = torch.arange(64).view(4, 16)
                with torch.no_grad():
                    assert torch.equal(steps.model(tokens), resident(tokens))
        assert steps.losses == plain.losses
        assert any(steps.arranged)
        other = copy.deepcopy(resident.state_dict())
        for name, tensor in steps.model.state_dict().items():
            assert torch.equal(tensor, other[name]), name
