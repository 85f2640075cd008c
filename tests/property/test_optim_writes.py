"""Nothing is written that is there already, and nothing more often than it was changed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_nn import Tiers
from support_optim import Net, Twins, loss_of

from tiermem.core.block import Role
from tiermem.testing.io import ScriptedEngine

HOMES = st.sampled_from(["nvme", "nvme", "dram"])


class Writes:
    """Every write-back of a manager, and what each block held when it was last written."""

    def __init__(self, manager: Any) -> None:
        self.count: Counter[int] = Counter()
        self.idle: list[str] = []
        self._last: dict[int, bytes] = {}
        real = manager.parts.transfers.drain

        def drain(record: Any) -> None:
            block = record.block
            held = manager.parts.slots.current[block.id].bytes.numpy().tobytes()
            if self._last.get(block.id) == held:
                self.idle.append(f"{block.role.value} {block.name}")
            self._last[block.id] = held
            self.count[block.id] += 1
            real(record)

        manager.parts.transfers.drain = drain

    def forget(self, block_id: int) -> None:
        """A block without data is written anew, whatever it holds."""
        self._last.pop(block_id, None)


class SpoilingSGD(torch.optim.SGD):
    """Writes the gradients that it is given, uncounted by torch."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.data.mul_(0.5)
        return super().step(closure)


@settings(max_examples=examples(7, 400))
@given(
    homes=st.fixed_dictionaries(dict.fromkeys(("params", "grads", "master", "optimizer"), HOMES)),
    masters=st.booleans(),
    overlap=st.booleans(),
    frozen=st.booleans(),
    clip=st.booleans(),
    extra_hbm=st.sampled_from([0, 0, 1 << 15, 1 << 17]),
    micro=st.integers(1, 2),
    seed=st.integers(0, 2**32),
)
def test_only_what_changed_is_written(
    tmp_path_factory: pytest.TempPathFactory,
    homes: dict[str, str],
    masters: bool,
    overlap: bool,
    frozen: bool,
    clip: bool,
    extra_hbm: int,
    micro: int,
    seed: int,
) -> None:
    def build() -> Net:
        net = Net(torch.bfloat16)
        net.layers[0].requires_grad_(not frozen)
        return net

    tiers = Tiers("mixed", nvme=str(tmp_path_factory.mktemp("swap")), policy=homes)
    tiers.extra_hbm = extra_hbm
    with (
        _engine(lambda: ScriptedEngine(random.Random(seed).randrange)),
        Twins(
            build, tiers, overlap=overlap, master_dtype=torch.float32 if masters else None
        ) as twins,
    ):
        manager = twins.tier._manager
        manager.flush()
        seen = Writes(manager)
        discard = manager.discard

        def forget(block: Any) -> None:
            seen.forget(block.id)
            discard(block)

        manager.discard = forget
        trained = {u.group.block.id for u in twins.optimizer._units if u.group is not None}
        for step in range(4):
            for number in range(micro):
                twins.backward(micro * step + number)
            if clip:
                twins.clip_norm(0.05)
            twins.step()
        twins.optimizer.finish()
        manager.flush()
        assert seen.idle == []
        for record in manager.parts.table:
            block, times = record.block, seen.count[record.block.id]
            if block.role is Role.GRAD:
                continue
            steps = 4 if block.role is not Role.PARAM or block.id in trained else 0
            assert times <= steps + (0 if block.role is Role.PARAM else 1), (block.name, times)
        twins.check()


def test_a_class_that_writes_gradients_keeps_them(tmp_path: Any) -> None:
    """They are what ``param.grad`` shows after the step, wherever their block has been."""
    policy = {"params": "nvme", "grads": "nvme", "optimizer": "nvme"}
    settings = {"lr": 0.1, "foreach": False}
    with Twins(
        lambda: Net(torch.float32),
        Tiers("nvme", nvme=str(tmp_path), policy=policy),
        SpoilingSGD,
        settings,
        master_dtype=None,
    ) as twins:
        assert all(unit.handed.spoils for unit in twins.optimizer._units)
        twins.backward(0)
        twins.by_hand.step()
        twins.optimizer.step()
        for mine, theirs in zip(twins.model.parameters(), twins.plain.parameters(), strict=True):
            assert torch.equal(mine.grad.clone(), theirs.grad)


def _engine(make: Callable[[], ScriptedEngine]) -> Any:
    patch = pytest.MonkeyPatch()
    patch.setattr(
        "tiermem.runtime.memory.opening.choose_engine", lambda *_: (make, "scripted", "a test")
    )
    return _Undo(patch)


class _Undo:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_on_the_host_reads_and_writes_each_block_once(tmp_path: Any, overlap: bool) -> None:
    """Gradients are read and not written, clipped or not; weights of many units move once."""
    policy = {"params": "nvme", "grads": "nvme", "master": "nvme", "optimizer": "nvme"}
    tiers = Tiers("nvme", nvme=str(tmp_path), policy=policy)
    with Twins(lambda: Net(layers=3), tiers, where="host", overlap=overlap) as twins:
        manager, units = twins.tier._manager, twins.optimizer._units
        for step in range(3):
            _backward(twins, step)
            twins.optimizer.step()
            twins.optimizer.finish()
            twins.optimizer.zero_grad()
        _backward(twins, 3)
        twins.optimizer.clip_grad_norm_(0.01)
        manager.flush()
        before = manager.parts.counters.bytes_by_link()
        twins.optimizer.step()
        twins.optimizer.finish()
        after = manager.parts.counters.bytes_by_link()
        kept = sum(block.nbytes for unit in units for block in unit.kept_blocks())
        weights = sum({u.group.block.id: u.group.block.nbytes for u in units}.values())
        gradients = sum(u.block.nbytes for unit in units for u in unit.grad_units())
        moved = {name: after[name] - before.get(name, 0) for name in ("nvme->dram", "dram->nvme")}
        assert moved == {"nvme->dram": kept + weights + gradients, "dram->nvme": kept + weights}


def _backward(twins: Twins, number: int) -> None:
    loss_of(twins.model, number).backward()
