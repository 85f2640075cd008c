"""Steps on the host with the device's bits: the loop, its proof, and ``where="auto"``.

The device is one that NumPy plays (:mod:`support_hostbits`), which shares no code with the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support_hostbits import Kernels, device_of_numpy, every_second
from support_nn import Tiers
from support_optim import Net, Twins

from tiermem.optim.host import loop, proof
from tiermem.optim.host.devicebits import ShareTrial
from tiermem.optim.host.exact import kind_of_step
from tiermem.optim.host.spread import Rates
from tiermem.optim.rules.probe import settings_of

pytestmark = pytest.mark.skipif(
    isinstance(loop.library(), str), reason=f"no loop here: {loop.library()}"
)

CPU = torch.device("cpu")
DRAM = Tiers("dram")
BF16, FP32 = torch.bfloat16, torch.float32
FUSED = {"lr": 0.01, "fused": True}
STEPS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"weight_decay": 0.0, "amsgrad": True, "betas": (0.3, 0.98)}),
    (torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
]


_TRY = ShareTrial.host_has_share


def _keeps(self: ShareTrial, ticket: object) -> bool:
    """The host has its share in every step."""
    self.on_host = True
    return True


@pytest.fixture(autouse=True)
def _few_values(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Proofs of few values, and of no other test."""
    monkeypatch.setattr(proof, "_SIZES", (2048, 1021))
    monkeypatch.setattr(proof, "_COUNTS", (*range(1, 40), 100, 1000, 12345))
    monkeypatch.setattr("tiermem.optim.host.sides._LEAST", 0)
    monkeypatch.setattr("tiermem.optim.host.sides.measure_both", lambda *_: Rates(1.0, 1.0))
    monkeypatch.setattr("tiermem.optim.host.sides.spread", every_second)
    monkeypatch.setattr(ShareTrial, "host_has_share", _keeps)
    proof.forget()
    yield
    proof.forget()


def _prove(cls: Any, settings: dict[str, Any], stepped: torch.dtype, weight: torch.dtype) -> Any:
    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = cls(groups, **FUSED, **settings)
        return found

    group = make([{"params": [torch.nn.Parameter(torch.zeros(1))]}]).param_groups[0]
    kind = kind_of_step(cls, settings_of(group), stepped, weight, CPU)
    assert not isinstance(kind, str), kind
    return proof.prove(kind, settings_of(group), make, CPU)


@pytest.mark.parametrize(("stepped", "weight"), [(FP32, FP32), (FP32, BF16), (BF16, BF16)])
@pytest.mark.parametrize(("cls", "settings"), STEPS)
def test_the_loop_is_the_device_on_values_of_all_sizes(
    cls: Any, settings: dict[str, Any], stepped: torch.dtype, weight: torch.dtype
) -> None:
    with device_of_numpy(Kernels(off=1)) as kernels:
        found = _prove(cls, settings, stepped, weight)
    assert isinstance(found, proof.Proven), found
    assert kernels.calls
    proof.forget()
    if stepped is FP32:  # another one is noticed, that differs in the last bit of a float32
        with device_of_numpy(Kernels(wrong=True)):
            assert isinstance(_prove(cls, settings, stepped, weight), str)


@pytest.mark.parametrize(("seconds", "kept"), [(0.5, True), (0.99, False), (2.0, False)])
def test_a_share_stays_where_it_makes_a_loop_faster(seconds: float, kept: bool) -> None:
    now = 0.0
    trial = ShareTrial(lambda: now)
    seen = []
    for number in range(15):
        ticket = object()
        seen.append(_TRY(trial, ticket))
        assert _TRY(trial, ticket) is seen[-1]  # made again after an error, it counts once
        first = number in (*range(6), 8)  # what is learned anew takes its time
        now += 9.0 if first else seconds if seen[-1] else 1.0
    assert seen == [False] * 8 + [True] * 3 + [kept] * 4
    assert trial.decided


def test_a_share_is_tried_with_each_number_of_tokens_and_remembered() -> None:
    """Here the host helps short passes and hinders long ones; lengths come in turn."""
    now, load = 0.0, 0
    trial = ShareTrial(lambda: now, lambda: load)
    seen: dict[int, list[bool]] = {1: [], 4: []}
    for number in range(48):
        load = 4 if number % 2 else 1
        now += load * (1.5 if load == 4 else 0.5) if trial.on_host else load
        seen[load].append(_TRY(trial, object()))
    for load, kept in ((1, True), (4, False)):
        assert seen[load] == [False] * 8 + [True] * 3 + [kept] * 13
        assert trial.decided and trial.on_host is kept
    load = 2
    assert not trial.decided and not trial.on_host


def test_steps_are_made_both_ways_until_it_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are made in backward, on the side that is tried by then."""
    monkeypatch.setattr(ShareTrial, "host_has_share", _TRY)
    with device_of_numpy(), Twins(Net, DRAM, torch.optim.AdamW, FUSED) as twins:
        optimizer = twins.optimizer
        assert optimizer._timing.ahead is not None
        hosted = [unit for unit in optimizer._units if unit.host is not None]
        ahead, sides = [], []
        for step in range(12):
            twins.backward(step, use_extra=step != 2)
            ahead.append(any(unit in optimizer._timing.ahead.provisional for unit in hosted))
            twins.step()
            sides.append(any(unit.host is not None for unit in hosted))
        twins.check()
        assert sides[:11] == [False] * 9 + [True] * 2  # 8 of them were stepped before its step()
        assert ahead == [False, *[True] * 11]


def test_torchs_own_cpu_kernels_have_other_bits() -> None:
    assert "others" in _prove(torch.optim.AdamW, {}, FP32, BF16)
    assert "gives other bits" in _prove(torch.optim.SGD, {"momentum": 0.9}, FP32, BF16)


@pytest.mark.parametrize("overlap", ["auto", False, "backward"])
@pytest.mark.parametrize(
    ("cls", "settings"), [STEPS[0], STEPS[1], (torch.optim.SGD, {"weight_decay": 0.1})]
)
def test_auto_steps_on_both_sides_with_the_residents_bits(
    cls: Any, settings: dict[str, Any], overlap: Any
) -> None:
    given = {**FUSED, **settings}
    with device_of_numpy(), Twins(Net, DRAM, cls, given, overlap=overlap) as twins:
        units = twins.optimizer._units
        assert 0 < sum(unit.host is not None for unit in units) < len(units)
        for step in range(4):
            twins.backward(step, use_extra=step != 1)
            twins.step()
            if step > 1 or overlap != "backward":
                twins.check()


def test_what_the_host_would_round_otherwise_is_the_devices_for_that_step() -> None:
    with device_of_numpy(), Twins(Net, DRAM, torch.optim.AdamW, FUSED) as twins:
        units = [unit for unit in twins.optimizer._units if unit.host is not None]
        assert units
        assert "with the device's bits" in twins.optimizer.stepped_where
        twins.backward(0)
        twins.step()
        twins.backward(1)
        twins.clip_norm(0.01)
        twins.step()
        assert not any(unit.host is not None for unit in units)  # gradients awaited a factor
        twins.check()
        twins.backward(2)
        for model in (twins.plain, twins.model):  # a user puts an ordinary tensor there
            weight = model.layers[0].up.weight
            weight.grad = weight.grad * 2
        twins.step()
        there = [unit.host is not None for unit in units]
        assert any(there)
        assert not all(there)
        twins.check()
        for optimizer in (twins.by_hand.optimizer, twins.optimizer):
            optimizer.param_groups[0]["lr"] = torch.tensor(0.02)
        twins.backward(3)
        twins.step()
        twins.check()


def test_state_comes_about_in_the_order_of_the_parameters() -> None:
    """A program that adds up what it finds in the state adds in the same order."""
    with device_of_numpy(), Twins(Net, DRAM, torch.optim.AdamW, FUSED) as twins:
        units = [unit for unit in twins.optimizer._units if unit.host is not None]
        assert 0 < len(units) < len(twins.optimizer._units)
        for step in range(2):
            twins.backward(step)
            twins.step()
        assert all(unit.host is not None for unit in units)
        order = [id(param) for param in twins.optimizer.state]
        assert order == [id(p) for group in twins.optimizer.param_groups for p in group["params"]]


def test_a_clipping_that_does_not_clip_leaves_steps_to_the_host() -> None:
    with device_of_numpy(), Twins(Net, DRAM, torch.optim.AdamW, FUSED) as twins:
        units = [unit for unit in twins.optimizer._units if unit.host is not None]
        for step, norm in enumerate((1e6, 1e6, 0.01, 1e6)):
            twins.backward(step)
            twins.clip_norm(norm)
            twins.step()
            on_host = step > 0 and norm > 1  # the first steps are the device's
            assert all((unit.host is not None) == on_host for unit in units)
            twins.check()
        twins.backward(3)
        twins.clip_norm(1e6)
        twins.optimizer.step()
        twins.by_hand.step()
        for mine, theirs in zip(twins.model.parameters(), twins.plain.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)


def test_other_settings_are_proved_or_left_to_the_device() -> None:
    with device_of_numpy(), Twins(Net, DRAM, torch.optim.AdamW, FUSED) as twins:
        units = [unit for unit in twins.optimizer._units if unit.host is not None]
        twins.backward(0)
        twins.step()  # the first steps are the device's
        for change in ({"lr": 0.003}, {"weight_decay": 0.0}, {"betas": (0.8, 0.95)}):
            for optimizer in (twins.by_hand.optimizer, twins.optimizer):
                optimizer.param_groups[0].update(change)
            twins.backward(len(change))
            twins.step()
            assert all(unit.host is not None for unit in units)
            twins.check()


def test_a_device_with_other_bits_makes_all_steps() -> None:
    with Twins(Net, DRAM, torch.optim.AdamW, FUSED) as twins:
        assert not any(unit.host is not None for unit in twins.optimizer._units)
        assert "all on the device: the powers of betas" in twins.optimizer.stepped_where
        twins.backward(0)
        twins.step()
        twins.check()


@pytest.mark.parametrize("where", ["host", "both"])
def test_the_host_that_is_asked_for_has_the_devices_bits_where_they_are_proved(where: Any) -> None:
    with device_of_numpy(), Twins(Net, DRAM, torch.optim.AdamW, FUSED, where=where) as twins:
        assert any(unit.host is not None for unit in twins.optimizer._units)
        for step in range(2):
            twins.backward(step)
            twins.step()
        twins.check()


def test_without_a_compiler_the_device_makes_all_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    loop.library.cache_clear()
    try:
        with device_of_numpy(), Twins(Net, DRAM, torch.optim.AdamW, FUSED) as twins:
            assert "there is no C compiler ('no-such-compiler')" in twins.optimizer.stepped_where
            twins.backward(0)
            twins.step()
            twins.check()
    finally:
        loop.library.cache_clear()
