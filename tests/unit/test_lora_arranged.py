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
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem.nn.groups.away import group_of

WIDTH, LAYERS = 32, 12
_PARTS = ("q_proj", "v_proj", "up_proj", "down_proj")
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


class Recomputed(Layer):
    """A layer whose forward is computed again in backward, several parts one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(torch.tanh(self.up_proj(super().forward(x))))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().__call__, x, use_reentrant=False)  # type: ignore[no-any-return]


class Headed(nn.Sequential):
    """A model the weight of whose last layer a program uses by itself, outside of every call."""

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self[0](tokens)
        made = checkpoint(functional.linear, hidden, self[1].weight, use_reentrant=False)
        return made.square().mean()  # type: ignore[no-any-return]


def build(kind: type[Layer] = Layer) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, WIDTH), *(kind() for _ in range(LAYERS)))
    if kind is Recomputed:
        model = Headed(model, nn.Linear(WIDTH, 256, bias=False))
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
        backwards: How many of them add up their gradients before a step.
    """

    backwards = 1

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
        for _ in range(self.backwards):
            loss = self.loss(torch.randint(0, 256, (4, 16)))
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        if self.tier is not None:
            self.tier._manager.flush()
        return self.came_up() - before

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        if isinstance(self.model, Headed):
            return self.model.loss(tokens)
        return self.model(tokens).square().mean()  # type: ignore[no-any-return]

    def came_up(self) -> int:
        links = {} if self.tier is None else self.tier.stats().links
        return sum(found.nbytes for link, found in links.items() if link.endswith("->hbm"))


@contextmanager
def streamed(
    home: str,
    folder: Path,
    flops: float = 0.0,
    kind: type[Layer] = Layer,
    blocks: Any = "auto",
    share: float = 0.5,
) -> Iterator[Steps]:
    """Opens a model whose frozen weights stream, with a device that copies beside its compute.

    Args:
        home: Of the frozen weights.
        folder: For files.
        flops: Operations a second of the device, from which times are expected before they are
            measured.
        kind: Of the layers.
        blocks: As for ``tier.wrap``.
        share: Of the frozen weights, how much HBM there is beside 220 KiB.
    """
    model = build(kind)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    with tiermem.TierManager(
        "cpu",
        hbm=int(share * frozen) + (220 << 10),
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
@pytest.mark.one_in(2)
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
        replay.arranger._fetcher = SimpleNamespace(beside=False)  # type: ignore[assignment]
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
        for number in range(8):
            steps.arranged.clear()
            steps.step()
            plain.step()
            assert number < 3 or steps.arranged == [True] * 3, number  # at once, after the break
        assert steps.losses == plain.losses


@pytest.mark.parametrize(
    ("kind", "home", "share", "parts"),
    # what a program uses by itself may have been written: there it would be written to the disk
    [
        (Layer, "dram", 0.5, ()),
        (Layer, "nvme", 0.5, ()),
        (Recomputed, "dram", 0.4, ()),
        (Recomputed, "dram", 0.4, _PARTS),
        (Recomputed, "dram", 0.2, _PARTS),
    ],
)
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.one_in(5)
def test_no_step_breaks_off(
    kind: type[Layer],
    home: str,
    share: float,
    parts: tuple[str, ...],
    backwards: int,
    tmp_path: Path,
) -> None:
    resident = build(kind)
    plain = Steps(resident, torch.optim.AdamW(trained(resident), lr=LR), None)
    blocks = [f"0.{number}.{part}" for number in range(1, LAYERS + 1) for part in parts]
    with streamed(home, tmp_path, 1e12, kind, blocks or "auto", share) as steps:
        steps.backwards = plain.backwards = backwards
        breaks: list[object] = []
        arranger = steps.tier._manager.replay.arranger  # type: ignore[union-attr]
        arranger.broke_off = breaks.append  # type: ignore[method-assign]
        for number in range(7):
            steps.arranged.clear()
            steps.step()
            plain.step()
            assert number < 3 or all(steps.arranged), number
        assert steps.losses == plain.losses
        assert not breaks


def test_a_weight_used_by_itself_is_let_go_as_backward_goes_on(tmp_path: Path) -> None:
    blocks = [f"0.{number}.{part}" for number in range(1, LAYERS + 1) for part in _PARTS]
    with streamed("dram", tmp_path, kind=Recomputed, blocks=blocks) as steps:
        model: Any = steps.model
        head = group_of[id(model[1]._parameters["weight"])]
        held: list[bool] = []
        model[0][2].register_full_backward_hook(lambda *_: held.append(head.soft))
        for _ in range(3):
            steps.step()
        assert held == [False] * 3


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
