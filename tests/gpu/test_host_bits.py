"""The host's steps have this GPU's bits, or are not made: fuzz, and a training run."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tiermem.optim.host import loop, proof
from tiermem.optim.host.exact import kind_of_step
from tiermem.optim.host.spread import Rates, _both_ways
from tiermem.optim.rules.probe import settings_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(isinstance(loop.library(), str), reason=f"no loop: {loop.library()}"),
]
BF16, FP32 = torch.bfloat16, torch.float32
FUSED = {"fused": True}
KINDS: list[tuple[Any, dict[str, Any], torch.dtype, torch.dtype]] = [
    (cls, {"lr": 1.3e-3, **how, **settings}, stepped, weight)
    for cls, all_settings in (
        (torch.optim.AdamW, [{}, {"amsgrad": True}, {"weight_decay": 0.0, "maximize": True}]),
        (torch.optim.AdamW, [{"betas": (0.95, 0.98), "eps": 1e-6}, {"betas": (0.3, 0.7)}]),
        (torch.optim.Adam, [{}, {"betas": (0.85, 0.95), "amsgrad": True}]),
        (torch.optim.SGD, [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}]),
        (torch.optim.SGD, [{"momentum": 0.9, "dampening": 0.1}, {"momentum": 0.8}]),
        (torch.optim.SGD, [{"momentum": 0.9, "weight_decay": 0.1, "maximize": True}]),
    )
    for settings in all_settings
    for how in ({}, FUSED)
    for stepped, weight in ((FP32, FP32), (FP32, BF16), (BF16, BF16))
]


@pytest.fixture(autouse=True)
def _anew() -> None:
    proof.forget()


@pytest.mark.parametrize(("cls", "settings", "stepped", "weight"), KINDS)
def test_values_of_all_sizes(
    cls: Any, settings: dict[str, Any], stepped: torch.dtype, weight: torch.dtype
) -> None:
    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = cls(groups, **settings)
        return found

    device = torch.device("cuda", torch.cuda.current_device())
    group = make([{"params": [torch.nn.Parameter(torch.zeros(1))]}]).param_groups[0]
    kind = kind_of_step(cls, settings_of(group), stepped, weight, device)
    assert not isinstance(kind, str), kind
    found = proof.prove(kind, settings_of(group), make, device)
    if isinstance(found, str) and torch.__version__.split("+")[0] != "2.11.0":
        pytest.skip(f"left to the device: {found}")
    assert isinstance(found, proof.Proven), found


def test_copies_both_ways_are_measured_by_direction() -> None:
    """The faster way is through before the time of both is over, the other one after it."""
    device = torch.device("cuda", torch.cuda.current_device())
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    with _both_ways(device, streams) as copy:
        copy(2)
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        each = copy(64) / 2
        torch.cuda.synchronize(device)
        least = each / (time.perf_counter() - began)
        up, down = copy.rates()
    assert 0.3 * least < min(up, down) <= 1.1 * least
    assert 0.9 * least <= max(up, down) < 2.2 * least


def _keeps(self: Any, ticket: object) -> bool:
    """The host has its share in every step."""
    self.is_on = True
    return True


@pytest.mark.parametrize(
    ("overlap", "clip"), [("auto", 0.0), ("auto", 1e-4), (False, 0.0), ("backward", 0.0)]
)
@pytest.mark.parametrize("how", [{}, FUSED])
def test_a_run_with_steps_on_both_sides_has_the_residents_bits(
    monkeypatch: pytest.MonkeyPatch, overlap: Any, clip: float, how: dict[str, Any]
) -> None:
    import tiermem

    monkeypatch.setattr("tiermem.optim.host.sides._LEAST", 0)
    monkeypatch.setattr("tiermem.optim.host.sides.measure_both", lambda *_: Rates(1.0, 1.0))
    monkeypatch.setattr("tiermem.optim.host.devicebits.ShareTrial.host_has_share", _keeps)
    settings: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, **how}

    def build() -> torch.nn.Sequential:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(512, 512) for _ in range(8)]
        return torch.nn.Sequential(*layers).to("cuda", BF16)

    plain, model = build(), build()
    masters = [p.detach().float().requires_grad_() for p in plain.parameters()]
    by_hand = torch.optim.AdamW(masters, **settings)
    with tiermem.TierManager(hbm="8MiB", dram="256MiB") as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(
            model, torch.optim.AdamW, master_dtype=FP32, overlap=overlap, **settings
        )
        assert "with the device's bits" in optimizer.stepped_where, optimizer.stepped_where
        for step in range(6):
            generator = torch.Generator("cuda").manual_seed(step)
            x = torch.randn(64, 512, device="cuda", dtype=BF16, generator=generator)
            for net in (plain, model):
                net(x).float().square().mean().backward()
                if clip:
                    torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            for master, param in zip(masters, plain.parameters(), strict=True):
                master.grad = param.grad.float()
                param.grad = None
            by_hand.step()
            with torch.no_grad():
                for master, param in zip(masters, plain.parameters(), strict=True):
                    param.copy_(master)
            optimizer.step()
            on_host = any(unit.host is not None for unit in optimizer._units)
            assert on_host or not (clip and step)  # the first steps are the device's
            optimizer.zero_grad()
        for name, value in model.state_dict().items():
            assert torch.equal(value.cpu(), plain.state_dict()[name].cpu()), name
        kept = optimizer.state_dict()["state"]
        for number, state in by_hand.state_dict()["state"].items():
            for key, value in state.items():
                assert torch.equal(value.cpu(), kept[number][key].cpu()), (number, key)
