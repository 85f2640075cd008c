"""Steps are made, dropped and taken back while earlier copies down are still to come."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support_late_down import LateDownEngine
from support_nn import seed
from torch import nn

import tiermem
from tiermem.core.block import Block
from tiermem.core.residency import State
from tiermem.optim.units.attempt import Attempt
from tiermem.optim.units.undo import Undo
from tiermem.runtime import assembly
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.services.shadows import Shadows
from tiermem.runtime.services.verify import differs_from_home


@dataclass
class Falling:
    """A block in HBM whose copy to its home was submitted, and has not been made.

    Attributes:
        tier: Has its model, and an optimizer.
        block: The block.
        slot: Its bytes in HBM, each of them 50; they were 7 before, and are there still.
    """

    tier: tiermem.TierManager
    optimizer: Any
    block: Block
    slot: torch.Tensor

    @property
    def manager(self) -> BlockManager:
        return self.tier._runtime.manager

    @property
    def home(self) -> torch.Tensor:
        """The bytes at its home as it is now."""
        extent = self.manager.record(self.block).home_extent
        assert extent is not None
        self.manager.parts.homes.open(extent)
        return self.manager.parts.homes.arena.bytes_of(extent)


@pytest.fixture
def falling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Falling]:
    monkeypatch.setattr(assembly, "HostCopyEngine", LateDownEngine)
    seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="16MiB", policy="dram") as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(model, torch.optim.SGD, lr=1e-2)
        group = tier._runtime.groups[0]
        manager, block = tier._runtime.manager, group.block
        for value in (7, 50):
            slot = manager.acquire(block)
            slot.bytes.fill_(value)
            manager.release(block, dirty=True)
            manager.parts.transfers.drain(manager.record(block))
            if value == 7:
                manager.parts.copy.synchronize()
        manager.acquire(block)
        made = Falling(tier, optimizer, block, slot.bytes)
        assert set(made.home.tolist()) == {7} and manager.record(block).at_home is State.VALID
        yield made
        manager.release(block)


def test_what_a_provisional_step_writes_does_not_reach_the_former_home(falling: Falling) -> None:
    manager, block = falling.manager, falling.block
    shadows = Shadows(manager, lambda: False)
    assert shadows.reserve([block])
    former = falling.home
    shadows.turn([block])
    falling.slot.fill_(99)
    manager.parts.copy.synchronize()
    assert set(former.tolist()) == {50}
    shadows.confirm()
    shadows.close()


def test_a_step_is_taken_back_to_what_was_there(falling: Falling) -> None:
    """The way back is the home: its copy is still to come."""
    unit, undo = next(iter(falling.optimizer._units)), Undo()
    runtime = falling.tier._runtime
    views = falling.manager.parts.slots.current[falling.block.id].views
    Attempt(unit, runtime, unit.held(runtime))._keep_block(undo, falling.block, views, clean=True)
    falling.slot.fill_(99)
    falling.manager.parts.copy.synchronize()
    undo.take_back()
    for view in views:
        assert set(view.reshape(-1).view(torch.uint8).tolist()) == {50}


def test_a_look_at_the_home_waits_for_its_copy(falling: Falling) -> None:
    assert not differs_from_home(falling.manager, falling.block)


@pytest.mark.parametrize("kind", ["tuple", "list"])
def test_settings_that_change_inside_of_a_setting_are_seen(kind: str) -> None:
    """Between backward and ``step()``, after the steps were made ahead."""
    seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    plain = copy.deepcopy(model)
    settings: dict[str, Any] = {"lr": 1e-2, "foreach": False}

    def betas() -> Any:
        if kind == "list":
            return [0.9, 0.999]
        return torch.tensor(0.9), torch.tensor(0.999)

    resident = torch.optim.AdamW(plain.parameters(), **settings)
    with tiermem.TierManager(device="cpu", hbm="160KiB", dram="16MiB") as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(model, torch.optim.AdamW, **settings)
        for its in (resident, optimizer):
            its.param_groups[0]["betas"] = betas()
        for number in range(6):
            for net, its in ((plain, resident), (model, optimizer)):
                seed(number)
                net(torch.randn(4, 64)).square().mean().backward()
                if number == 4 and kind == "list":
                    its.param_groups[0]["betas"][0] = 0.5
                elif number == 4:
                    its.param_groups[0]["betas"][0].fill_(0.5)
                its.step()
                its.zero_grad()
        assert optimizer.stepped_in_backward
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.detach(), other.detach())


def test_a_class_that_writes_gradients_once_a_setting_is_zero() -> None:
    """SGD without decay adds the momentum into the gradients."""
    seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    plain = copy.deepcopy(model)
    settings: dict[str, Any] = {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "foreach": True}
    resident = torch.optim.SGD(plain.parameters(), weight_decay=0.1, **settings)
    with tiermem.TierManager(device="cpu", hbm="160KiB", dram="16MiB") as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(model, torch.optim.SGD, weight_decay=0.1, **settings)
        for number in range(8):
            seen = list[torch.Tensor]()
            for net, its in ((plain, resident), (model, optimizer)):
                seed(number)
                net(torch.randn(4, 64)).square().mean().backward()
                if number > 3:
                    gradient = net[2].weight.grad
                    assert gradient is not None
                    seen.append(gradient.clone())
                its.step()
                its.zero_grad()
                its.param_groups[0]["weight_decay"] = 0.1 if number < 3 else 0.0
            assert not seen or torch.equal(*seen)
        assert optimizer.stepped_in_backward
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.detach(), other.detach())
