"""A default device of the user's is for the user's tensors: tiermem's lie where they belong.

``torch.set_default_device("cuda")`` is what many scripts begin with. Here it is the meta device,
where nothing has values: what is made there by mistake is seen on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support_nn import assert_same, seed
from torch import nn

import tiermem

WIDTH = 64


@contextmanager
def elsewhere() -> Iterator[None]:
    """Makes the meta device the default one."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    seed(1)
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(4)
    ]
    return nn.Sequential(*layers).to(dtype)


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, WIDTH, generator=generator, device="cpu")


def step(model: Any, optimizer: Any, number: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(number)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach().clone()


def state_of(optimizer: Any) -> dict[str, Any]:
    return {f"{k}": dict(v) for k, v in optimizer.state_dict()["state"].items()}


def copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def counts_on_the_host() -> bool:
    """Whether this torch's optimizers keep their counters on the host, whatever the default is."""
    param = nn.Parameter(torch.ones(2, device="cpu"))
    param.grad = torch.ones(2, device="cpu")
    try:
        with elsewhere():
            torch.optim.AdamW([param]).step()
    except RuntimeError:
        return False
    return True


@pytest.mark.skipif(not counts_on_the_host(), reason="plain torch cannot step there")
@pytest.mark.parametrize("home", ["dram", "nvme"])
def test_training_saving_and_going_on(home: Any, tmp_path: Path) -> None:
    plain, model, again = build(), build(), build()
    stepper = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    expected = [step(plain, stepper, number) for number in range(4)]
    options: dict[str, Any] = {
        "hbm": "96KiB",
        "dram": "4MiB",
        "nvme": tmp_path,
        "policy": tiermem.Policy(params=home, grads=home, optimizer=home),
    }
    with elsewhere():
        with tiermem.TierManager("cpu", **options) as tier:
            tier.wrap(model)
            optimizer = tier.optimizer(model, torch.optim.AdamW, lr=1e-2)
            found = [step(model, optimizer, number) for number in range(2)]
            tier.save(tmp_path / "run", extra={"step": torch.ones(2, device="cpu")})
        with tiermem.TierManager("cpu", **options) as tier:
            tier.wrap(again)
            optimizer = tier.optimizer(again, torch.optim.AdamW, lr=1e-2)
            extra = tier.load(tmp_path / "run")
            found += [step(again, optimizer, number) for number in (2, 3)]
            optimizer.load_state_dict(optimizer.state_dict())
            state = state_of(optimizer)
            again.load_state_dict(again.state_dict())
            inside = copies(again)
            with tier.materialize(again):
                assert again[0][0].weight.device.type == "cpu"  # type: ignore[index]
    assert_same(expected, found, "losses")
    assert_same(state_of(stepper), state, "state")
    assert_same(copies(plain), inside, "in the tiers")
    assert_same(copies(plain), copies(again), "given back")
    assert extra["step"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=["as it is", "converted"])
@pytest.mark.parametrize("home", ["auto", "dram"])
def test_a_checkpoint(dtype: torch.dtype | None, home: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file(build().state_dict(), path)
    plain = build()
    if dtype is not None:
        for param in plain.parameters():
            param.data = param.data.to(dtype)
    model = build()
    for param in model.parameters():
        param.data.zero_()
    with elsewhere(), tiermem.TierManager("cpu", hbm="96KiB", dram="4MiB", policy=home) as tier:
        tiermem.load_checkpoint(model, path, tier=tier, dtype=dtype)
        inside = copies(model)
    assert_same(copies(plain), inside, "in the tiers")
    assert_same(copies(plain), copies(model), "given back")
