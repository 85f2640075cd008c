"""A tiered optimizer that is closed gives its room back, and another can take its place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tiermem.core.block import Tier
from tiermem.errors import StepError

WIDTH = 64


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def room(tier: tiermem.TierManager) -> dict[Tier, int]:
    """Returns the bytes of the blocks of each home tier."""
    found = dict.fromkeys(Tier, 0)
    for record in tier._manager.parts.table:
        found[record.home] += record.block.nbytes
    return found


def train(pairs: list[tuple[nn.Module, torch.optim.Optimizer]], steps: int = 3) -> None:
    for _ in range(steps):
        x = torch.randn(4, WIDTH)
        for model, optimizer in pairs:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def same(plain: nn.Module, model: nn.Module) -> bool:
    mine = model.state_dict()
    return all(torch.equal(value, mine[name]) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("overlap", [False, "forward", "backward"])
@pytest.mark.parametrize("home", ["dram", "nvme"])
def test_one_after_the_other_takes_the_room_of_one(overlap: Any, home: Any, tmp_path: Path) -> None:
    plain, model = net(), net()
    policy = tiermem.Policy(params=home, optimizer=home, grads="dram")
    with tiermem.TierManager(
        "cpu", hbm="96KiB", dram="1MiB", nvme=str(tmp_path), policy=policy
    ) as tier:
        tier.wrap(model)
        taken = []
        for phase in range(4):
            settings = {"lr": 0.01 * (phase + 1)}
            ours = tier.optimizer(model, torch.optim.AdamW, overlap=overlap, **settings)
            theirs = torch.optim.AdamW(plain.parameters(), **settings)
            train([(plain, theirs), (model, ours)])
            taken.append(room(tier))
            ours.close()
            assert same(plain, model)
        assert taken[1:] == taken[:-1]
        assert not tier._runtime.keepers and not tier._runtime.backward.watchers
        assert not tier._runtime.grads.watchers


def test_what_was_put_off_is_stepped_first() -> None:
    plain, model = net(), net()
    with tiermem.TierManager("cpu", hbm="96KiB", dram="1MiB") as tier:
        tier.wrap(model)
        ours = tier.optimizer(model, torch.optim.AdamW, overlap="forward")
        train([(plain, torch.optim.AdamW(plain.parameters())), (model, ours)], 1)
        assert ours._units.owed
        ours.close()
        assert same(plain, model)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.NAdam])
@pytest.mark.parametrize("where", ["host", "both"])
def test_the_host_s_thread_ends_and_its_staging_goes(where: Any, cls: Any, tmp_path: Path) -> None:
    model = net()
    policy = tiermem.Policy(params="dram", grads="dram", optimizer="nvme", master="nvme")
    with tiermem.TierManager(
        "cpu", hbm="192KiB", dram="2MiB", nvme=str(tmp_path), policy=policy
    ) as tier:
        tier.wrap(model)
        dram, threads = tier._manager.parts.homes.dram, threading.active_count()
        beside = dram.used - room(tier)[Tier.DRAM]  # what files pass through
        ours = tier.optimizer(model, cls, where=where)
        train([(model, ours)])
        assert threading.active_count() > threads
        assert dram.used > beside + room(tier)[Tier.DRAM]  # by the staging
        ours.close()
        assert threading.active_count() == threads
        assert dram.used == beside + room(tier)[Tier.DRAM] and not room(tier)[Tier.NVME]


def test_what_more_groups_need_on_the_host_takes_the_place_of_what_was() -> None:
    """Room for what a class without a fused kernel may have to take back."""
    model = net()
    policy = tiermem.Policy(params="dram", grads="dram", optimizer="dram")
    with tiermem.TierManager("cpu", hbm="192KiB", dram="1MiB", policy=policy) as tier:
        tier.wrap(model)
        dram = tier._manager.parts.homes.dram
        first, *others = model
        ours = tier.optimizer(first.parameters(), torch.optim.NAdam, where="host")
        beside = dram.used - room(tier)[Tier.DRAM]
        for layer in others:
            ours.add_param_group({"params": list(layer.parameters())})
            assert dram.used - room(tier)[Tier.DRAM] == beside > 0
        train([(model, ours)])
        ours.close()
        assert dram.used == room(tier)[Tier.DRAM]


_USES: tuple[Callable[[Any], object], ...] = (
    lambda ours: ours.step(),
    lambda ours: ours.zero_grad(),
    lambda ours: ours.state,
    lambda ours: ours.state_dict(),
    lambda ours: ours.load_state_dict({}),
    lambda ours: ours.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
    lambda ours: ours.clip_grad_norm_(1.0),
    lambda ours: ours.clip_grad_value_(1.0),
    lambda ours: ours.accumulate(2),
)


def test_closed_it_refuses_to_be_used() -> None:
    model = net()
    with tiermem.TierManager("cpu", hbm="96KiB", dram="1MiB") as tier:
        tier.wrap(model)
        ours = tier.optimizer(model, torch.optim.AdamW)
        train([(model, ours)])
        first = next(iter(ours.state.values()))["exp_avg"]
        assert first.abs().sum() > 0
        ours.close()
        ours.close()
        for use in _USES:
            with pytest.raises(StepError, match="closed"):
                use(ours)
        with pytest.raises(StepError, match="closed"):
            first.sum()
        model(torch.randn(4, WIDTH)).sum().backward()  # the model goes on
    ours.close()


def test_no_norm_is_taken_any_more() -> None:
    model = net()
    with tiermem.TierManager("cpu", hbm="96KiB", dram="1MiB") as tier:
        tier.wrap(model)
        first, second = (tier.optimizer(model, torch.optim.SGD, lr=0.1) for _ in "ab")
        for optimizer in (first, second, first):
            model(torch.randn(4, WIDTH)).sum().backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        second.close()  # what is measured is the first one's
        assert len(tier._runtime.grads.norms._measures) == len(list(model.parameters()))
        first.close()
        assert not tier._runtime.grads.norms._measures


def test_after_the_manager_there_is_nothing_to_close() -> None:
    model = net()
    with tiermem.TierManager("cpu", hbm="96KiB", dram="1MiB") as tier:
        tier.wrap(model)
        ours = tier.optimizer(model, torch.optim.AdamW, where="host")
    ours.close()


def test_a_step_to_come_keeps_it_open() -> None:
    plain, model = net(), net()
    with tiermem.TierManager("cpu", hbm="96KiB", dram="1MiB") as tier:
        tier.wrap(model)
        ours = tier.optimizer(model, torch.optim.AdamW, overlap="backward")
        theirs = torch.optim.AdamW(plain.parameters())
        train([(plain, theirs), (model, ours)])
        x = torch.randn(4, WIDTH)
        for each in (plain, model):
            each(x).sum().backward()
        assert ours.stepped_in_backward
        with pytest.raises(StepError, match=r"close\(\) between backward and"):
            ours.close()
        theirs.step()
        ours.step()
        ours.close()
        assert same(plain, model)


def test_a_step_after_unwrap_is_refused_before_it_begins() -> None:
    plain, model = net(), net()
    with tiermem.TierManager("cpu", hbm="96KiB", dram="1MiB") as tier:
        theirs = torch.optim.AdamW(plain.parameters())
        ours = tier.optimizer(tier.wrap(model), torch.optim.AdamW)
        train([(plain, theirs), (model, ours)])
        tier.unwrap(model)
        model(torch.randn(4, WIDTH)).sum().backward()
        with pytest.raises(StepError, match="make a new optimizer over it"):
            ours.step()
        state = ours.state_dict()
        model.zero_grad()
        again = tier.optimizer(tier.wrap(model), torch.optim.AdamW)
        again.load_state_dict(state)
        train([(plain, theirs), (model, again)])
        assert same(plain, model)


def test_no_room_in_dram_names_what_gives_some_back() -> None:
    with tiermem.TierManager("cpu", hbm="64KiB", dram="64KiB") as tier:
        tier.wrap(nn.Linear(64, 64))
        with pytest.raises(tiermem.CapacityError, match=r"unwrap\(model\), optimizer\.close\(\)"):
            for _ in range(8):
                tier.wrap(nn.Linear(64, 64))
