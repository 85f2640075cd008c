"""Random loops whose steps on the host begin inside backward and end whenever."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_hoststeps import gated
from support_nn import Tiers
from support_optim import Net, Twins, one_group, two_groups
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem.optim.backward import InBackward
from tiermem.optim.host.spread import Rates

HOMES = st.sampled_from(["dram", "dram", "nvme"])


class Sometimes(torch.optim.AdamW):
    """Fails half way through, as often as it is told to."""

    times = 0

    def step(self, closure: Any = None) -> Any:
        if not self.times:
            return super().step(closure)
        self.times -= 1
        params = self.param_groups[0]["params"]
        self.param_groups[0]["params"] = params[: (len(params) + 1) // 2]
        try:
            super().step(closure)
        finally:
            self.param_groups[0]["params"] = params
        raise MemoryError("no room for a temporary")


CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    (torch.optim.AdamW, {"lr": 0.01, "foreach": False, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "foreach": False}),
    (Sometimes, {"lr": 0.01, "foreach": False}),
    (Sometimes, {"lr": 0.01, "foreach": False}),
]


class Recomputed(Net):
    """Some layers are recomputed in backward."""

    modes: tuple[bool, ...] = ()

    def forward(self, ids: torch.Tensor, use_extra: bool = True) -> torch.Tensor:
        x = self.embed(ids)
        for layer, again in zip(self.layers, self.modes, strict=True):
            x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        if use_extra:
            x = self.extra(x)
        return nn.functional.linear(x, self.embed.weight)


def insist(act: Any) -> None:
    """Acts until it goes well; each failure says which units are whole and new, and which old."""
    for _ in range(40):
        try:
            return act()
        except tiermem.StepError as error:
            assert "no room for a temporary" in str(error)
            found = re.search(r"(\d+) of (\d+) units .* each whole, and (\d+) are as", str(error))
            assert found is not None
            assert int(found[1]) + int(found[3]) == int(found[2])
    raise AssertionError("it never goes well")


@settings(max_examples=examples(10, 500))
@given(
    homes=st.fixed_dictionaries(
        {"params": HOMES, "grads": HOMES, "master": HOMES, "optimizer": HOMES}
    ),
    chosen=st.sampled_from(CLASSES),
    where=st.sampled_from(["host", "both"]),
    groups=st.sampled_from([one_group, two_groups]),
    master=st.sampled_from([None, torch.float32]),
    grad_dtype=st.sampled_from([None, torch.float32]),
    accumulate=st.integers(1, 3),
    modes=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    extra=st.lists(st.booleans(), min_size=5, max_size=5),
    checks=st.integers(0, 31),
    spare=st.sampled_from([0, 1 << 14, 1 << 18]),
    seed=st.integers(0, 1 << 20),
)
def test_any_loop_and_any_order_of_ends(
    tmp_path_factory: pytest.TempPathFactory,
    homes: dict[str, str],
    chosen: Any,
    where: str,
    groups: Any,
    master: torch.dtype | None,
    grad_dtype: torch.dtype | None,
    accumulate: int,
    modes: tuple[bool, ...],
    extra: list[bool],
    checks: int,
    spare: int,
    seed: int,
) -> None:
    draw = random.Random(seed)

    def build() -> nn.Module:
        model = Recomputed(torch.float32 if master is None else torch.bfloat16)
        model.modes = modes
        return model

    swap = str(tmp_path_factory.mktemp("swap"))
    tiers = Tiers("mixed", nvme=swap, policy=homes, extra_hbm=spare)
    options = {"groups": groups, "grad_dtype": grad_dtype, "master_dtype": master}
    arrived = InBackward.arrived
    in_dram = homes["grads"] == "dram" and set(homes.values()) == {"dram"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "tiermem.optim.host.sides.measure_both", lambda *_: Rates(draw.random(), draw.random())
        )
        with Twins(build, tiers, *chosen, overlap="backward", where=where, **options) as twins:
            optimizer = twins.optimizer
            optimizer.accumulate(accumulate)
            on_host = [unit for unit in optimizer._units if unit.host is not None]
            with gated() as gate:

                def let_some(watcher: Any, entry: Any) -> None:
                    arrived(watcher, entry)
                    gate.let(draw.choice([0, 0, 0, 1, 2, 9]))

                patch.setattr(InBackward, "arrived", let_some)
                rates = [
                    torch.optim.lr_scheduler.StepLR(o, 2, 0.5)
                    for o in (twins.by_hand.optimizer, optimizer)
                ]
                for step, use_extra in enumerate(extra):
                    for part in range(accumulate):
                        twins.backward(accumulate * step + part, use_extra=use_extra)
                    made = optimizer._timing.inside.made
                    assert step > 1 or not made
                    if step > 1 and in_dram:
                        wanted = [u for u in on_host if any(e.has_grad for e in u.entries)]
                        assert {id(u) for u in wanted} <= made.keys()
                    gate.let(draw.choice([0, 0, 1, 9]))
                    twins.by_hand.step()
                    insist(optimizer.step)
                    gate.let(draw.choice([0, 0, 1]))
                    twins.by_hand.zero_grad()
                    optimizer.zero_grad()
                    for rate in rates:
                        rate.step()
                    if checks & 1 << step:
                        insist(optimizer.finish)
                        twins.check()
                    if chosen[0] is not Sometimes:
                        continue
                    insist(optimizer.finish)  # else a forward fails, which is no matter here
                    for unit in on_host:
                        made_by = unit.plain._optimizer
                        if made_by is not None and draw.random() < 0.3:
                            made_by.times = draw.choice([1, 1, 2, 3])
            insist(optimizer.finish)
            twins.check()
