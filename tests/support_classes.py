"""Optimizer classes of kinds that are met outside torch, small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Plain(torch.optim.Optimizer):
    """Momentum, with a method for one parameter's update."""

    def __init__(self, params: Any, lr: float = 0.1, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self.begin()
        for group in self.param_groups:
            self.count(group)
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["mean"] = torch.zeros_like(p)
                    state["mean"].mul_(0.9).add_(p.grad)
                    self.update(p, state, group)

    def begin(self) -> None:
        """Called before each step."""

    def count(self, group: dict[str, Any]) -> None:
        """Called for each group in a step."""

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Updates one parameter."""
        p.sub_(group["lr"] * state["mean"])


class Counting(Plain):
    """Keeps one counter for all parameters of a group, from the first step on."""

    def count(self, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1
        group["best"] = max(group.get("best", 0.0), group["lr"] / group["step"])

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(group["lr"] / group["step"] * state["mean"] + group["best"] * 1e-3)


class CountingInPlace(Plain):
    """Its counter is a tensor, which steps write."""

    def count(self, group: dict[str, Any]) -> None:
        if "step" not in group:
            group["step"] = torch.tensor(0.0)
        group["step"].add_(1)

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(group["lr"] / group["step"].item() * state["mean"])


class CountingBySelf(Plain):
    """Its counter is the optimizer's, and goes on where a parameter has no gradient, too."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.steps = 0

    def begin(self) -> None:
        self.steps += 1

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(group["lr"] / self.steps * state["mean"])


class CountingNorms(Plain):
    """What it counts in the group comes from all gradients of it."""

    def count(self, group: dict[str, Any]) -> None:
        norms = [p.grad.norm() for p in group["params"] if p.grad is not None]
        group["d"] = group.get("d", 0.0) + float(sum(norms))


class Noisy(Plain):
    """Draws random numbers for one parameter after the other."""

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        noise = torch.randn_like(p) + torch.rand(p.shape).to(p) + torch.randint_like(p, 3)
        p.sub_(group["lr"] * (state["mean"] + noise.bernoulli_(0.5)))


class Averaging(Plain):
    """Trains one set of weights and shows another, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr, k=0, training=False)

    def count(self, group: dict[str, Any]) -> None:
        if not group["training"]:
            raise RuntimeError("call train() first")
        group["k"] += 1

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "z" not in state:
            state["z"] = p.clone()
        state["z"].sub_(group["lr"] * p.grad)
        p.lerp_(state["z"], 1 / (group["k"] + 1))

    @torch.no_grad()
    def _mode(self, training: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["training"] is not training:
                group["training"] = training
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)

    def train(self) -> None:
        """Goes on with the weights that are trained."""
        self._mode(True, 0.25)

    def eval(self) -> None:
        """Shows those for use."""
        self._mode(False, -1 / 3)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Scales all weights."""
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(factor)

    @torch.no_grad()
    def center(self) -> None:
        """Takes the mean of all weights from each."""
        params = [p for group in self.param_groups for p in group["params"]]
        mean = sum(p.sum() for p in params) / sum(p.numel() for p in params)
        for p in params:
            p.sub_(mean)

    def norm(self) -> float:
        """Returns a number over all weights."""
        return float(sum(p.detach().norm() for g in self.param_groups for p in g["params"]))

    @staticmethod
    def version() -> str:
        """Returns a text that depends on nothing."""
        return "1.0"


class TwoNames(Plain):
    """Reads its momentum by another name, by a view of it, or keeps the weight itself."""

    def __init__(self, params: Any, kept: str, lr: float = 0.1) -> None:
        super().__init__(params, lr, kept=kept)

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        kept = {"same": state["mean"], "view": state["mean"].view(-1), "weight": p.detach()}
        state.setdefault("other", kept[group["kept"]])
        p.add_(state["other"].view_as(p), alpha=-group["lr"])


class Halves(Plain):
    """Keeps two tensors in one piece of memory, which have nothing in common."""

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "first" not in state:
            both = torch.zeros(*p.shape, 2, dtype=p.dtype, device=p.device)
            state["first"], state["second"] = both.unbind(-1)
        state["first"].add_(state["mean"])
        state["second"].add_(state["first"])
        p.sub_(group["lr"] * state["second"])


class Exchanging(Plain):
    """Exchanges its two buffers at each step."""

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "last" not in state:
            state["last"], state["now"] = torch.zeros_like(p), torch.zeros_like(p)
        state["last"], state["now"] = state["now"], state["last"]
        state["now"].copy_(state["mean"])
        p.add_(state["now"] - 0.5 * state["last"], alpha=-group["lr"])


class Filling(Plain):
    """Gives parameters that have no gradient one of zeros, and updates them like the others."""

    def begin(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)

    def update(self, p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.mul_(1 - 0.1 * group["lr"]).sub_(group["lr"] * state["mean"])
