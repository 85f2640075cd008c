"""Helpers that modules write their weights with: torch counts none of it."""

from __future__ import annotations

from typing import Any

import torch


def scale(weight: torch.Tensor) -> None:
    weight.data.mul_(1.5)


class Scaler:
    """Called with a weight, or as a forward hook."""

    def __call__(self, first: Any, *_: Any) -> None:
        self.run(first if isinstance(first, torch.Tensor) else first.weight)

    def run(self, weight: torch.Tensor) -> None:
        scale(weight)

    def hook(self, module: Any, *_: Any) -> None:
        self.run(module.weight)
