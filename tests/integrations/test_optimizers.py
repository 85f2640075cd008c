"""Optimizers of other packages, where those are installed, with tiers smaller than the model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support_nn import Pair, Tiers, assert_same
from torch import nn

import tiermem

pytestmark = pytest.mark.filterwarnings("ignore")

POLICY = dict.fromkeys(("params", "grads", "master", "optimizer"), "dram")
DRAM = Tiers("dram", policy=POLICY)


@pytest.fixture
def _as_written() -> Iterator[None]:
    """Runs compiled functions eagerly: compiling is slow, and not what is tested."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(6)]
    return nn.Sequential(*layers).to(dtype)


def train(model: nn.Module, optimizer: Any, skip: int | None = None) -> torch.Tensor:
    x = torch.randn(4, 64).to(next(iter(model.parameters())).dtype)
    for number, layer in enumerate(model):
        if number != skip:
            x = torch.tanh(layer(x))
    loss = x.float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def check(cls: Any, settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
    """Trains both for some steps, saves, loads, and trains on."""
    with Pair(partial(build, dtype), DRAM, (cls, settings)) as pair:
        hbm = pair.tier._manager.parts.settings.hbm
        assert hbm < sum(p.nbytes for p in pair.plain.parameters())
        if hasattr(cls, "train"):
            pair.both(lambda model, optimizer: optimizer.train())
        for number in range(6):
            pair.both(partial(train, skip=2 if number == 3 else None), number)
        if hasattr(cls, "eval"):
            pair.both(lambda model, optimizer: optimizer.eval())
            pair.check_state()
            pair.both(lambda model, optimizer: optimizer.train())
        saved = pair.plain_optimizer.state_dict()
        pair.optimizer.load_state_dict(saved)
        pair.plain_optimizer.load_state_dict(pair.optimizer.state_dict())
        pair.both(train, 7)
        pair.check_state()
        groups = [
            [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups]
            for o in (pair.plain_optimizer, pair.optimizer)
        ]
        assert_same(*groups, "groups")


@pytest.mark.usefixtures("_as_written")
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_torchao(name: str) -> None:
    optim = pytest.importorskip("torchao.optim")
    check(getattr(optim, name), {"lr": 0.01})


@pytest.mark.usefixtures("_as_written")
def test_torchao_rounds_stochastically() -> None:
    optim = pytest.importorskip("torchao.optim")
    check(optim.AdamW8bit, {"lr": 0.01, "bf16_stochastic_round": True}, torch.bfloat16)
    with pytest.raises(tiermem.StepError, match="draws random numbers"):
        settings = {"bf16_stochastic_round": True, "overlap": "forward"}
        check(optim.AdamW8bit, settings, torch.bfloat16)


@pytest.mark.parametrize("name", ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"])
def test_schedulefree(name: str) -> None:
    package = pytest.importorskip("schedulefree")
    check(getattr(package, name), {"lr": 0.01})


@pytest.mark.parametrize("name", ["Adan", "Lion", "AdaBelief", "Ranger", "ScheduleFreeAdamW"])
def test_pytorch_optimizer(name: str) -> None:
    package = pytest.importorskip("pytorch_optimizer")
    check(getattr(package, name), {"lr": 0.01})


def test_pytorch_optimizer_that_learns_its_rate_from_all_gradients_is_refused() -> None:
    package = pytest.importorskip("pytorch_optimizer")
    with pytest.raises(tiermem.StepError, match="all parameters together"):
        check(package.Prodigy, {})


@pytest.mark.parametrize("name", ["adan", "lamb", "adafactorbv"])
def test_timm(name: str) -> None:
    optim = pytest.importorskip("timm.optim")
    cls = optim.get_optimizer_class(name, bind_defaults=False)
    check(cls, {"lr": 0.01, **({"max_grad_norm": None} if name == "lamb" else {})})


def test_adafactor_of_transformers() -> None:
    optimization = pytest.importorskip("transformers.optimization")
    check(optimization.Adafactor, {})


@pytest.mark.parametrize("name", ["Adam8bit", "Lion8bit"])
def test_bitsandbytes(name: str) -> None:
    optim = pytest.importorskip("bitsandbytes.optim")
    check(getattr(optim, name), {"lr": 0.01})
