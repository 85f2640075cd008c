"""When what was written goes home: as early as it helps, and no earlier."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_nn import Tiers
from support_optim import Net, Twins, watched
from torch import nn

import tiermem
from tiermem.core.block import Role
from tiermem.core.residency import State
from tiermem.runtime.services.sweep import BlockSweep

DRAM = Tiers("dram", extra_hbm=1 << 17)


def test_kept_gradients_go_home_as_others_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where copies hide behind compute; those that are used at once never do."""
    real = BlockSweep.__init__

    def beside(pipeline: BlockSweep, manager: Any) -> None:
        real(pipeline, manager)
        pipeline._dram = True

    monkeypatch.setattr(BlockSweep, "__init__", beside)
    with Twins(lambda: Net(layers=8), DRAM, overlap="forward") as pair:
        manager, drain = pair.tier._manager, pair.tier._manager.parts.transfers.drain
        found: list[str] = []

        def spy(record: Any) -> None:
            if record.block.role is Role.GRAD:
                found.append(record.block.name)
            drain(record)

        for step in range(4):
            pair.backward(step)
            pair.step()
        manager.parts.transfers.drain = spy
        pair.backward(4)
        kept = [e.unit for g in pair.optimizer._runtime.groups for e in g.entries if e.unit]
        assert {unit.block.name for unit in kept} <= set(found)
        for unit in kept:
            record = manager.record(unit.block)
            assert record.at_home.name == "VALID", "it is at home before its room is needed"
        pair.step()
        pair.check()


def test_what_forward_begins_with_is_written_once_it_has_got_further() -> None:
    with watched(Twins(lambda: Net(layers=8), DRAM, overlap="backward")) as pair:
        manager, runtime = pair.tier._manager, pair.optimizer._runtime
        first = runtime.groups[0]
        pair.backward(1)
        kept = [b for u in pair.optimizer._units if u.group is first for b in u.kept_blocks()]
        assert kept
        assert {manager.record(b).in_hbm for b in kept} == {State.DIRTY}
        assert set(map(id, kept)) <= set(map(id, runtime.unwritten))
        pair.step()
        seen: list[set[State]] = []

        def look(*_: Any) -> None:
            seen.append({manager.record(b).in_hbm for b in kept})

        hooks = [
            pair.model.embed.register_forward_hook(look),
            pair.model.layers[0].register_forward_hook(look),
            pair.model.layers[2].register_forward_hook(look),
        ]
        pair.backward(2)
        for hook in hooks:
            hook.remove()
        assert seen[0] == {State.DIRTY}
        assert seen[1] == {State.DIRTY}, "first some kernels are launched"
        assert State.DIRTY not in seen[2]
        assert runtime.unwritten  # of the second step
        pair.step()
        pair.check()


class Body(nn.Module):
    """As in a Llama, a block of its own surrounds what forward begins with, and ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.norm = nn.LayerNorm(32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x)


def test_a_block_around_the_first_one_does_not_count() -> None:
    model = nn.Sequential(Body())
    names = ["0", "0.embed", *(f"0.layers.{n}" for n in range(4))]
    with tiermem.TierManager(device="cpu", hbm="64KiB", dram="4MiB") as tier:
        tier.wrap(model, blocks=names)
        optimizer = tier.optimizer(model.parameters(), torch.optim.AdamW, overlap="backward")
        runtime, manager = optimizer._runtime, tier._manager
        seen: list[int] = []
        for module in (model[0].embed, model[0].layers[2]):
            module.register_forward_hook(lambda *_: seen.append(len(runtime.unwritten)))
        for _ in range(4):
            seen.clear()
            model(torch.arange(6)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert runtime.groups[0].block.name.endswith("embed")
        assert seen[0] > 0 and seen[1] == 0
        assert {manager.record(b).in_hbm for b in runtime.unwritten} == {State.DIRTY}
