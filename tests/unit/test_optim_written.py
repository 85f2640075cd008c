"""When what was written goes home: as early as it helps, and no earlier."""

from __future__ import annotations

from typing import Any

import pytest
from support_nn import Tiers
from support_optim import Net, Twins, watched

from tiermem.core.block import Role
from tiermem.core.residency import State
from tiermem.runtime.pipeline import Pipeline

DRAM = Tiers("dram", extra_hbm=1 << 17)


def test_kept_gradients_go_home_as_others_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where copies hide behind compute; those that are used at once never do."""
    real = Pipeline.__init__

    def beside(pipeline: Pipeline, manager: Any) -> None:
        real(pipeline, manager)
        pipeline._dram = True

    monkeypatch.setattr(Pipeline, "__init__", beside)
    with Twins(lambda: Net(layers=8), DRAM, overlap="forward") as pair:
        manager, drain = pair.tier._manager, pair.tier._manager.traffic.drain
        found: list[str] = []

        def spy(record: Any) -> None:
            if record.block.role is Role.GRAD:
                found.append(record.block.name)
            drain(record)

        for step in range(4):
            pair.backward(step)
            pair.step()
        manager.traffic.drain = spy
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
        ]
        pair.backward(2)
        for hook in hooks:
            hook.remove()
        assert seen[0] == {State.DIRTY}
        assert State.DIRTY not in seen[1]
        assert runtime.unwritten  # of the second step
        pair.step()
        pair.check()
