"""Two optimizers in one program, in the tiers and by hand; masters follow what the other writes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from support_nn import assert_same, check_table, seed
from support_optim import ByHand
from torch import nn

import tiermem

WIDTH, LAYERS = 32, 6
DRAM = dict.fromkeys(("params", "grads", "master", "optimizer"), "dram")
Settings = tuple[type[torch.optim.Optimizer], dict[str, Any]]

# kernels chosen here, so that steps on the host are those of the device
ADAMW: Settings = (torch.optim.AdamW, {"lr": 0.01, "foreach": False})
MOMENTUM: Settings = (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "foreach": False})


class Stack(nn.Module):
    """Layers that a step moves far enough to be seen in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Following(ByHand):
    """The loop by hand, whose masters become the weights that somebody else has written."""

    @torch.no_grad()
    def follow(self) -> None:
        """Keeps all bits of a master whose cast is its weight, and none of another."""
        for param, master in zip(self.params, self.masters, strict=True):
            if master is not param:
                written = master.to(param.dtype).view(torch.int16) != param.view(torch.int16)
                master[written] = param[written].to(master.dtype)

    def step(self, factor: torch.Tensor | None = None) -> None:
        """One step."""
        self.follow()
        super().step(factor)

    def state_dict(self) -> dict[str, Any]:
        """With the masters as a step would find them; they stay as they are."""
        kept = [master.detach().clone() for master in self.masters]
        self.follow()
        shown = copy.deepcopy(super().state_dict())
        with torch.no_grad():
            for master, value in zip(self.masters, kept, strict=True):
                master.copy_(value)
        return shown

    @torch.no_grad()
    def load(self, saved: dict[str, Any]) -> None:
        """Takes over what the tiered one's ``state_dict()`` was, and the weights with it."""
        saved = copy.deepcopy(saved)
        self.optimizer.load_state_dict({key: saved[key] for key in ("state", "param_groups")})
        for number, (param, master) in enumerate(zip(self.params, self.masters, strict=True)):
            master.copy_(saved["master"][number])
            param.copy_(master)


class Two:
    """A model with two optimizers, resident and in the tiers.

    Attributes:
        plain: The resident model.
        model: The one in the tiers.
        by_hand: The optimizers of the one.
        optimizers: Those of the other.
    """

    def __init__(
        self,
        tier: tiermem.TierManager,
        dtype: torch.dtype,
        chosen: Sequence[Settings],
        options: Sequence[dict[str, Any]],
        params: Sequence[Callable[[nn.Module], list[nn.Parameter]]],
    ) -> None:
        self.tier = tier
        self.plain, self.model = self._make(dtype), self._make(dtype)
        tier.wrap(self.model)
        self.by_hand: list[Following] = []
        self.optimizers: list[Any] = []
        for (cls, settings), own, of in zip(chosen, options, params, strict=True):
            groups = [{"params": of(self.plain)}]
            master = own.get("master_dtype")
            self.by_hand.append(Following(groups, cls, settings, master, None))
            self.optimizers.append(tier.optimizer(of(self.model), cls, **settings, **own))

    @staticmethod
    def _make(dtype: torch.dtype) -> nn.Module:
        seed(5)
        return Stack().to(dtype)

    def backward(self, number: int) -> None:
        """One micro-batch through both; losses are equal."""
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        losses = []
        for model in (self.plain, self.model):
            loss = model(x.to(next(self.plain.parameters()).dtype)).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        assert_same(losses[0], losses[1], f"loss {number}")

    def step(self, *which: int) -> None:
        """Steps some of the optimizers, and forgets all gradients."""
        for number in which:
            self.by_hand[number].step()
            self.optimizers[number].step()
        for optimizer in (*self.by_hand, *self.optimizers):
            optimizer.zero_grad()

    def write(self, number: int) -> None:
        """Writes a weight of both, as a constraint does."""
        for model in (self.plain, self.model):
            with torch.no_grad():
                model.layers[number % LAYERS].weight[number % WIDTH :].clamp_(-0.1, 0.1)

    def compare_weights(self) -> None:
        """Compares weights alone."""
        assert_same(dict(self.plain.state_dict()), dict(self.model.state_dict()), "weights")

    def check(self) -> None:
        """Compares weights, masters and state."""
        self.compare_weights()
        for by_hand, optimizer in zip(self.by_hand, self.optimizers, strict=True):
            found = optimizer.state_dict()
            expected = by_hand.state_dict()
            if "master" not in found:
                del expected["master"]
            assert_same(expected, found, type(by_hand.optimizer).__name__)
        check_table(self.tier)


def everything(model: nn.Module) -> list[nn.Parameter]:
    """All parameters."""
    return list(model.parameters())


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """Those that Muon would be given."""
    return [param for param in model.parameters() if param.dim() > 1]


def vectors(model: nn.Module) -> list[nn.Parameter]:
    """The others, of the same blocks."""
    return [param for param in model.parameters() if param.dim() <= 1]


@contextmanager
def two(
    *options: dict[str, Any],
    dtype: torch.dtype = torch.bfloat16,
    chosen: Sequence[Settings] = (ADAMW, MOMENTUM),
    params: Sequence[Callable[[nn.Module], list[nn.Parameter]]] = (everything, everything),
    hbm: str = "48KiB",
    files: Path | None = None,
) -> Iterator[Two]:
    """Makes both, with options of :meth:`tiermem.TierManager.optimizer` for each optimizer.

    Args:
        options: Of each.
        dtype: Of the weights.
        chosen: Their classes and settings.
        params: What each steps.
        hbm: The budget.
        files: Where gradients are at home; None for DRAM.
    """
    budgets: dict[str, Any] = {"hbm": hbm, "dram": "16MiB", "policy": DRAM}
    if files is not None:
        budgets |= {"nvme": files, "policy": {**DRAM, "grads": "nvme"}}
    with tiermem.TierManager("cpu", **budgets) as tier:
        yield Two(tier, dtype, chosen, options, params)
