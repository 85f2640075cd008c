"""Steps on the host that fail: each unit is as it was or as it shall be, and step() finishes."""

from __future__ import annotations

import errno
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_nn import Tiers
from support_optim import Net, Twins, two_groups

import tiermem
from tiermem.core.block import Tier
from tiermem.io.engine import IoOp, IoRequest
from tiermem.optim.host.side import HostSide
from tiermem.testing.io import Fault, ScriptedEngine

FAULTS = {
    "eio": (IoOp.READ, Fault(errno=errno.EIO)),
    "flip": (IoOp.READ, Fault(flip_bit=4321)),
    "write-eio": (IoOp.WRITE, Fault(errno=errno.EIO)),
    "enospc": (IoOp.WRITE, Fault(errno=errno.ENOSPC)),
}


class Disk:
    """Fails as it is told to, and ends what is asked of it in any order."""

    def __init__(self) -> None:
        self.op: IoOp | None = None
        self.fault = Fault()
        self.after = self.times = 0

    def arm(self, kind: str, after: int, times: int) -> None:
        self.op, self.fault = FAULTS[kind]
        self.after, self.times = after, times

    def heal(self) -> None:
        self.op = None

    def __call__(self, request: IoRequest, tries: int) -> Fault | None:
        if request.op is not self.op:
            return None
        self.after -= 1
        if self.after >= 0 or self.times <= 0:
            return None
        self.times -= 1
        return self.fault


class HalfWay(torch.optim.AdamW):
    """Steps some of its parameters and fails, when told to."""

    fail_at: int | None = None
    lasting = True

    def step(self, closure: Any = None) -> Any:
        if HalfWay.fail_at is None:
            return super().step(closure)
        HalfWay.fail_at -= 1
        if HalfWay.fail_at >= 0:
            return super().step(closure)
        HalfWay.fail_at = HalfWay.fail_at if HalfWay.lasting else None
        groups = self.param_groups
        kept = [list(group["params"]) for group in groups]
        for group in groups:
            group["params"] = group["params"][: (len(group["params"]) + 1) // 2]
        try:
            super().step(closure)
        finally:
            for group, params in zip(groups, kept, strict=True):
                group["params"] = params
        raise MemoryError("no room for a temporary")


@contextmanager
def scripted(disk: Disk, seed: int) -> Iterator[None]:
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "tiermem.runtime.memory.opening.choose_engine",
            lambda *_: (lambda: ScriptedEngine(rng.randrange, disk), "scripted", "a test"),
        )
        yield


def until_done(act: Any, disk: Disk, tries: int) -> int:
    """Acts until it goes well; heals everything after some tries; returns how often it failed."""
    for number in range(tries + 40):
        try:
            act()
        except (tiermem.StorageError, tiermem.StepError) as error:
            found = re.search(
                r"(\d+) of (\d+) units .* are made, each whole, and (\d+)", str(error)
            )
            if found is not None:
                made, units, left = map(int, found.groups())
                assert made + left == units
            if number >= tries:
                disk.heal()
                HalfWay.fail_at = None
            continue
        return number
    raise AssertionError("it never goes well")


@settings(max_examples=examples(12, 1000))
@given(
    homes=st.fixed_dictionaries(
        dict.fromkeys(
            ("params", "grads", "master", "optimizer"), st.sampled_from(["nvme", "nvme", "dram"])
        )
    ),
    masters=st.booleans(),
    overlap=st.booleans(),
    groups=st.sampled_from([None, two_groups]),
    clip=st.booleans(),
    kinds=st.lists(st.sampled_from([*FAULTS, "class", "none"]), min_size=3, max_size=3),
    after=st.integers(0, 40),
    times=st.integers(1, 4),
    tries=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_a_step_that_fails_is_finished_by_the_next(
    tmp_path_factory: pytest.TempPathFactory,
    homes: dict[str, str],
    masters: bool,
    overlap: bool,
    groups: Any,
    clip: bool,
    kinds: list[str],
    after: int,
    times: int,
    tries: int,
    seed: int,
) -> None:
    tiers = Tiers("mixed", nvme=str(tmp_path_factory.mktemp("swap")), policy=homes)
    disk = Disk()
    options: dict[str, Any] = {"overlap": overlap, "where": "host"}
    if groups is not None:
        options["groups"] = groups
    dtype = torch.float32 if masters else None
    chosen = (HalfWay, {"lr": 0.01, "foreach": False})
    HalfWay.fail_at = None
    with scripted(disk, seed), Twins(Net, tiers, *chosen, master_dtype=dtype, **options) as twins:
        for step, kind in enumerate(kinds):
            twins.backward(step)
            if clip:
                twins.clip_norm(0.05)
            twins.by_hand.step()
            if kind == "class":
                HalfWay.fail_at = after % 12
            elif kind != "none":
                disk.arm(kind, after, times)
            try:
                until_done(twins.optimizer.step, disk, tries)
                until_done(twins.optimizer.finish, disk, tries)
            finally:
                HalfWay.fail_at = None
                disk.heal()
            twins.by_hand.zero_grad()
            twins.optimizer.zero_grad()
            twins.check()


@pytest.mark.parametrize("gives_up", [False, True])
def test_a_second_try_clips_gradients_in_files_again(tmp_path: Path, gives_up: bool) -> None:
    """It reads them anew, as they were before the first try clipped its copy of them."""
    homes = {"params": "dram", "grads": "nvme", "master": "dram", "optimizer": "dram"}
    tiers = Tiers("mixed", nvme=str(tmp_path), policy=homes)
    HalfWay.fail_at = None
    with Twins(Net, tiers, HalfWay, {"lr": 0.01, "foreach": False}, where="host") as twins:
        twins.backward(0)
        twins.clip_norm(0.05)
        HalfWay.fail_at = 0
        try:
            with pytest.raises(tiermem.StepError):
                twins.optimizer.step()
        finally:
            HalfWay.fail_at = None
        if gives_up:
            twins.optimizer.abandon_step()
            for mine, theirs in zip(twins.model.parameters(), twins.by_hand.params, strict=True):
                if mine.grad is not None:
                    assert torch.equal(mine.grad.clone(), theirs.grad)
            return
        twins.optimizer.step()
        twins.by_hand.step()
        twins.by_hand.zero_grad()
        twins.optimizer.zero_grad()
        twins.check()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.one_in(3)
def test_a_write_whose_failure_another_wait_takes_up(tmp_path: Path, seed: int, times: int) -> None:
    """Gradients that are in HBM alone are all written before a step, those that failed again."""
    homes = {"params": "dram", "grads": "nvme", "master": "dram", "optimizer": "dram"}
    tiers = Tiers("mixed", nvme=str(tmp_path), policy=homes, extra_hbm=1 << 18)
    disk = Disk()
    chosen = (torch.optim.AdamW, {"lr": 0.01, "foreach": False})
    with scripted(disk, seed), Twins(Net, tiers, *chosen, where="host") as twins:
        twins.backward(0)
        twins.by_hand.step()
        disk.arm("write-eio", 0, times)
        until_done(twins.optimizer.step, disk, times + 1)
        assert disk.times == 0
        twins.by_hand.zero_grad()
        twins.optimizer.zero_grad()
        twins.check()


def homes_of(manager: Any, unit: Any) -> list[bytes]:
    """What the homes of a unit's weights, masters and state hold, past the manager."""
    found = []
    for block in [unit.group.block, *unit.kept_blocks()]:
        record = manager.parts.table[block.id]
        if record.home is Tier.DRAM:
            manager.parts.homes.open(record.home_extent)
            found.append(manager.parts.homes.arena.bytes_of(record.home_extent).numpy().tobytes())
        else:
            found.append(manager.block_io.read_home(block).numpy().tobytes())
    return found


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("home", ["dram", "nvme"])
def test_a_class_that_fails_half_way_leaves_no_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str, masters: bool
) -> None:
    monkeypatch.setattr(HalfWay, "lasting", False)
    policy = {"params": "dram", "grads": "dram", "master": home, "optimizer": home}
    tiers = Tiers("mixed", nvme=str(tmp_path), policy=policy)
    settings: dict[str, Any] = {"lr": 0.01, "foreach": False}
    HalfWay.fail_at = None
    with Twins(
        Net,
        tiers,
        HalfWay,
        settings,
        where="host",
        master_dtype=torch.float32 if masters else None,
        blocks=["embed", "layers.0", "layers.1", "layers.2", "extra"],
    ) as twins:
        for step in range(2):
            twins.backward(step)
            twins.step()
        twins.backward(2)
        twins.by_hand.step()
        manager, units = twins.tier._manager, twins.optimizer._units
        alone = [u for u in units if sum(u.group is other.group for other in units) == 1]
        broken = next(number for number, u in enumerate(units) if len(u.members) > 1)
        before = {u.name: homes_of(manager, u) for u in alone}
        HalfWay.fail_at = broken
        try:
            with pytest.raises(tiermem.StepError, match="no room for a temporary") as caught:
                twins.optimizer.step()
        finally:
            HalfWay.fail_at = None
        left = set(re.findall(r"'(step\[[^']*\])'", str(caught.value).split("as they were")[1]))
        assert left == {units[broken].name}
        for unit in alone:
            same = homes_of(manager, unit) == before[unit.name]
            assert same == (unit.name in left), unit.name
        twins.optimizer.step()
        twins.by_hand.zero_grad()
        twins.optimizer.zero_grad()
        twins.check()


@pytest.mark.parametrize("home", ["dram", "nvme"])
@pytest.mark.parametrize("number", [0, 3, 7])
@pytest.mark.parametrize("where", ["submit", "begin", "take_up"])
@pytest.mark.one_in(3)
def test_ctrl_c_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str, number: int, where: str
) -> None:
    """Whatever was begun by then is finished, and what was not is made by the next call."""
    tiers = Tiers("one", nvme=str(tmp_path), policy=home)
    with Twins(
        Net, tiers, torch.optim.AdamW, {"lr": 0.01, "foreach": False}, where="host", overlap=False
    ) as twins:
        for step in range(2):
            twins.backward(step)
            twins.step()
        twins.backward(2)
        twins.by_hand.step()
        real, calls = getattr(HostSide, where), []

        def interrupted(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == number + 1:
                raise KeyboardInterrupt
            return real(*args)

        monkeypatch.setattr(HostSide, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            twins.optimizer.step()
        # a step begins once the next one is known: with the last but one none is left to go
        last_but_one = where == "begin" and number + 2 == len(twins.optimizer._units)
        if last_but_one:
            left = [unit for current in twins.optimizer._timing.rounds for unit in current.left()]
            assert all(id(unit) in twins.optimizer._units.owed for unit in left)
        elif where != "take_up" and (number or where == "begin"):
            with pytest.raises(tiermem.StepError, match=r"step\(\) again"):
                twins.optimizer.zero_grad()
        twins.optimizer.step()
        twins.by_hand.zero_grad()
        twins.optimizer.zero_grad()
        twins.check()
