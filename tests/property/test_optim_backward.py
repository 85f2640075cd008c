"""Random loops with steps inside backward: bit for bit the loop written by hand."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_nn import Tiers
from support_optim import Net, Twins, one_group, two_groups
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem.optim.units.unit import StepUnit

HOMES = ("hbm", "dram", "nvme", "auto")
CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01, "foreach": False, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
]
MODES = ("plain", "not", "reentrant")


class Ways(Net):
    """Layers in a random order, each recomputed in its own way, or not."""

    def __init__(self, dtype: torch.dtype, modes: list[str], order: list[int]) -> None:
        super().__init__(dtype, len(modes))
        self.modes, self.order = modes, order

    def forward(self, ids: torch.Tensor, use_extra: bool = True) -> torch.Tensor:
        x = self.embed(ids)
        for index in self.order:
            mode = self.modes[index]
            layer = self.layers[index]
            x = layer(x) if mode == "plain" else checkpoint(layer, x, use_reentrant=mode != "not")
        if use_extra:
            x = self.extra(x)
        return nn.functional.linear(x, self.embed.weight)


@contextmanager
def faults(chance: float, number: int) -> Iterator[list[str]]:
    """Makes some steps inside backward fail as a disk does; yields their names."""
    found: list[str] = []
    draw = random.Random(number)
    real = StepUnit.held

    def held(unit: Any, runtime: Any, **options: Any) -> Any:
        if torch._C._current_graph_task_id() != -1 and draw.random() < chance:
            found.append(unit.name)
            raise tiermem.StorageError("cannot read", block=unit.name)
        return real(unit, runtime, **options)

    StepUnit.held = held  # type: ignore[method-assign,assignment]
    try:
        yield found
    finally:
        StepUnit.held = real  # type: ignore[method-assign]


@settings(max_examples=examples(8, 400))
@given(
    homes=st.fixed_dictionaries(
        {role: st.sampled_from(HOMES) for role in ("params", "grads", "master", "optimizer")}
    ),
    chosen=st.sampled_from(CLASSES),
    groups=st.sampled_from([one_group, two_groups]),
    master=st.sampled_from([None, torch.float32]),
    grad_dtype=st.sampled_from([None, torch.float32]),
    accumulate=st.integers(1, 3),
    modes=st.lists(st.sampled_from(MODES), min_size=2, max_size=4),
    shuffle=st.integers(0, 1 << 20),
    frozen=st.booleans(),
    extra=st.lists(st.booleans(), min_size=6, max_size=6),
    short=st.sampled_from([None, 3, 5]),
    to_none=st.booleans(),
    spare=st.sampled_from([0, 1 << 14, 1 << 18]),
    chance=st.sampled_from([0.0, 0.0, 0.3]),
)
def test_any_loop(
    tmp_path_factory: pytest.TempPathFactory,
    homes: dict[str, str],
    chosen: Any,
    groups: Any,
    master: torch.dtype | None,
    grad_dtype: torch.dtype | None,
    accumulate: int,
    modes: list[str],
    shuffle: int,
    frozen: bool,
    extra: list[bool],
    short: int | None,
    to_none: bool,
    spare: int,
    chance: float,
) -> None:
    if "reentrant" in modes:  # its gradients come in parts, which plain torch sums up as they come
        grad_dtype = None
    order = list(range(len(modes))) * 2
    random.Random(shuffle).shuffle(order)
    order = order[: len(modes) + 1]  # layers used twice, and not at all

    def build() -> nn.Module:
        model = Ways(torch.float32 if master is None else torch.bfloat16, modes, order)
        if frozen:
            model.layers[0].requires_grad_(False)
        return model

    swap = str(tmp_path_factory.mktemp("swap"))
    tiers = Tiers("mixed", nvme=swap, policy=homes, extra_hbm=spare)
    options = {"groups": groups, "grad_dtype": grad_dtype, "master_dtype": master}
    with Twins(build, tiers, *chosen, overlap="backward", **options) as twins:
        loops = (twins.by_hand, twins.optimizer)
        rates = [torch.optim.lr_scheduler.StepLR(getattr(o, "optimizer", o), 2, 0.5) for o in loops]
        twins.optimizer.accumulate(accumulate)
        before = 0
        for step, use_extra in enumerate(extra):
            parts = max(1, accumulate - 1) if step == short else accumulate
            with faults(chance, shuffle + step) as failed:
                for part in range(parts):
                    twins.backward(10 * step + part, use_extra=use_extra)
            made = len(twins.optimizer._timing.inside.made)
            assert step > 1 or not made
            assert made or failed or step < 2 or step == short or set(modes) != {"plain"}
            for loop in loops:
                loop.step()
            if to_none or grad_dtype is not None:
                for loop in loops:
                    loop.zero_grad()
            else:
                twins.by_hand.optimizer.zero_grad(set_to_none=False)
                for param in twins.by_hand.params:
                    if param.grad is not None:
                        param.grad.zero_()
                twins.optimizer.zero_grad(set_to_none=False)
            for rate in rates:
                rate.step()
            if step % 2:
                twins.check()
            before += made
        assert twins.optimizer.stepped_in_backward == before
