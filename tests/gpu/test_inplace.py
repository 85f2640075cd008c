"""On a CUDA device: weights that HBM has no room for are used over the bus, with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import tiermem

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

ROWS, WIDTH, DEPTH = 60_000, 512, 6
HEAD = ROWS * WIDTH * 2
LATE = 300_000_000
"""Cycles of the device that a stream is held up for: far longer than the host takes to read."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x).tanh()
        out: torch.Tensor = self.head(x)
        return out


def build() -> Model:
    torch.manual_seed(0)
    return Model().to(torch.bfloat16).cuda().eval()


@contextmanager
def twins() -> Iterator[tuple[Any, Any, Any]]:
    """Yields a model in the tiers, the same in HBM, and the manager's front."""
    model, plain = build(), build()
    with tiermem.TierManager("cuda", hbm=HEAD // 2, dram="1GiB") as tier, torch.no_grad():
        yield tier.wrap(model), plain, tier


def ids(tokens: int) -> torch.Tensor:
    return torch.randint(0, ROWS, (1, tokens), generator=torch.Generator().manual_seed(1)).cuda()


@pytest.mark.parametrize("tokens", [1, 7, 64, 300, 2048])
def test_forwards_have_the_same_bits(tokens: int) -> None:
    with twins() as (model, plain, tier):
        for _ in range(3):
            assert torch.equal(model(ids(tokens)), plain(ids(tokens)))
        assert tier.stats().reads_in_place >= 3
        assert tier.stats().peak["hbm"] <= HEAD // 2


def test_half_of_the_layers_stream_beside_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(24)], nn.Linear(1024, 40_000))
    plain = model.to(torch.bfloat16).cuda().eval()
    torch.manual_seed(0)
    twin = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(24)], nn.Linear(1024, 40_000))
    twin = twin.to(torch.bfloat16).cuda().eval()
    x = torch.randn(5, 1024, device="cuda", dtype=torch.bfloat16)
    with tiermem.TierManager("cuda", hbm="24MiB", dram="1GiB") as tier, torch.no_grad():
        tier.wrap(twin)
        for _ in range(6):
            assert torch.equal(twin(x), plain(x))


def test_what_is_written_there_is_read_by_the_host_once_it_is_there() -> None:
    with twins() as (model, plain, _):
        for net in (model, plain):
            torch.cuda._sleep(LATE)
            net.head.weight.mul_(1.5)
        state = model.state_dict()
        assert torch.equal(state["embed.weight"], plain.state_dict()["embed.weight"].cpu())
        assert torch.equal(model(ids(9)), plain(ids(9)))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_new_values_do_not_come_before_the_kernels_that_read_the_old_ones(device: str) -> None:
    with twins() as (model, plain, _):
        torch.cuda._sleep(LATE)
        found, wanted = model(ids(9)), plain(ids(9))
        values = plain.state_dict().items()
        other = {name: torch.randn_like(value).to(device) for name, value in values}
        other["head.weight"] = other["embed.weight"]
        for net in (model, plain):
            net.load_state_dict(other)
        assert torch.equal(found, wanted)
        assert torch.equal(model(ids(9)), plain(ids(9)))


@pytest.mark.parametrize("tokens", [7, 300])
@pytest.mark.parametrize("masters", [False, True])
def test_it_is_trained_there_to_the_same_bits(tokens: int, masters: bool) -> None:
    """Its gradient is made by the same kernels, and its step writes over the bus."""
    model, plain = build().train(), build().train()
    dtype = torch.float32 if masters else torch.bfloat16
    copies = [p.detach().to(dtype).requires_grad_() for p in plain.parameters()]
    theirs = torch.optim.AdamW(copies, lr=0.01)
    with tiermem.TierManager("cuda", hbm=HEAD // 2, dram="4GiB") as tier:
        tier.wrap(model)
        mine = tier.optimizer(
            model, torch.optim.AdamW, lr=0.01, master_dtype=dtype if masters else None
        )
        for number in range(4):
            x = (ids(tokens) + number) % ROWS
            losses = [net(x).float().square().mean() for net in (model, plain)]
            assert torch.equal(*losses)
            for loss in losses:
                loss.backward()
            mine.step()
            mine.zero_grad()
            with torch.no_grad():
                for param, copy in zip(plain.parameters(), copies, strict=True):
                    copy.grad, param.grad = param.grad.to(dtype), None
                theirs.step()
                for param, copy in zip(plain.parameters(), copies, strict=True):
                    param.copy_(copy)
            torch.cuda._sleep(LATE)  # what is read next is what kernels have yet to write
        state = model.state_dict()
        for name, value in plain.state_dict().items():
            assert torch.equal(state[name], value.cpu()), name
        assert tier.stats().peak["hbm"] <= HEAD // 2
        tier.unwrap(model)
        for name, value in plain.state_dict().items():
            assert torch.equal(model.state_dict()[name].cpu(), value.cpu()), name


def test_its_place_is_not_used_again_before_kernels_are_through() -> None:
    model, plain = build().train(), build().train()
    with tiermem.TierManager("cuda", hbm=HEAD // 2, dram="1GiB") as tier:
        tier.wrap(model)
        torch.cuda._sleep(LATE)
        found = model(ids(9)).detach()
        tier.unwrap(model)
        other = build().train()
        with torch.no_grad():
            other.embed.weight.zero_()
        tier.wrap(other)
        assert torch.equal(found, plain(ids(9)).detach())
