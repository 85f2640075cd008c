"""State on NVMe: while a unit is stepped the next is read and the one before is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support_nn import Tiers, assert_same
from support_optim import Net, Twins
from torch import nn

import tiermem
from tiermem.core.residency import State
from tiermem.runtime.services.sweep import BlockSweep

NVME = {"optimizer": "nvme", "master": "nvme", "grads": "dram", "params": "dram"}


class Watched(torch.optim.AdamW):
    """Says when it is about to update, once everything is at hand."""

    look: Any = None

    def step(self, closure: Any = None) -> Any:
        if Watched.look is not None:
            Watched.look()
        return super().step(closure)


class Even(nn.Module):
    """Layers of one size, so that a budget holds a number of units."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.to(torch.bfloat16)

    def forward(self, ids: torch.Tensor, use_extra: bool = True) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.nn.functional.linear(x, self.embed.weight)


@pytest.mark.parametrize("room", ["two units", "everything"])
def test_the_next_is_read_and_the_last_is_written(
    tmp_path: Path, room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = BlockSweep.fetch

    def after_the_writes(pipeline: BlockSweep, blocks: Any) -> None:
        for _ in blocks:  # a disk that is quick enough: what has to leave for one is written
            pipeline._manager.flush()
            real(pipeline, blocks)

    monkeypatch.setattr(BlockSweep, "fetch", after_the_writes)
    extra = {"two units": 160 << 10, "everything": 16 << 20}[room]
    tiers = Tiers("nvme", nvme=str(tmp_path), policy=NVME, extra_hbm=extra)
    with Twins(Even, tiers, Watched) as twins:
        for step in range(2):
            twins.backward(step)
            twins.step()
        manager = twins.tier._manager
        units = twins.optimizer._units
        seen: list[tuple[set[State], set[State]]] = []

        def look() -> None:
            now = len(seen)
            before = units[now - 1].kept_blocks() if now else []
            after = units[now + 1].kept_blocks() if now + 1 < len(units) else []
            seen.append(
                (
                    {manager.parts.table[b.id].in_hbm for b in before},
                    {manager.parts.table[b.id].in_hbm for b in after},
                )
            )

        twins.backward(2)
        twins.by_hand.step()
        Watched.look = look
        try:
            twins.optimizer.step()
        finally:
            Watched.look = None
        assert len(seen) == len(units)
        for before, after in seen:
            assert State.ABSENT not in after  # it is there, or under way
            if room == "two units":
                assert State.DIRTY not in before  # it is written, or under way
        writes = twins.tier.stats().write_backs
        twins.check()
        if room == "everything":
            assert writes == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_cut_short_says_how_far_it_got(tmp_path: Path, overlap: bool) -> None:
    tiers = Tiers("nvme", nvme=str(tmp_path), policy=NVME)
    with Twins(lambda: Net(layers=6), tiers, overlap=overlap) as twins:
        for step in range(2):
            twins.backward(step)
            twins.step()
        twins.backward(2)
        twins.by_hand.step()
        units = twins.optimizer._units
        broken = units[3]
        real = type(broken).held
        error = tiermem.StorageError("cannot read", block="state", path=str(tmp_path))

        def held(unit: Any, runtime: Any, **options: Any) -> Any:
            if unit is broken:
                raise error
            return real(unit, runtime, **options)

        type(broken).held = held  # type: ignore[method-assign,assignment]
        try:
            with pytest.raises(tiermem.StorageError) as caught:
                twins.optimizer.step()
                twins.optimizer.finish()
        finally:
            type(broken).held = real  # type: ignore[method-assign]
        assert f"3 of {len(units)} units of the optimizer step are made" in str(caught.value)
        assert repr(broken.name) in str(caught.value)
        if overlap:
            twins.optimizer.finish()
        else:
            twins.optimizer.step()
        twins.check()
        assert_same(dict(twins.plain.state_dict()), dict(twins.model.state_dict()), "weights")
