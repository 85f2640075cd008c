"""On a CUDA device: rows of an embedding are read over the bus, and never while they change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import tiermem

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

ROWS, WIDTH, DEPTH = 32_000, 256, 6
BLOCK = ROWS * WIDTH * 2
LATE = 1_000_000_000
"""Cycles of the device that a stream is held up for: far longer than the host takes to write."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, ROWS, bias=False) for _ in range(DEPTH))

    def forward(self, ids: torch.Tensor, late: int = -1) -> torch.Tensor:
        if late >= 0:  # nothing but the rows, and only when the host has gone on for long
            torch.cuda._sleep(late)
            return self.embed(ids)
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)[..., :WIDTH].tanh()
        return x


def build() -> nn.Module:
    torch.manual_seed(0)
    return Model().to(torch.bfloat16).cuda().requires_grad_(False)


@contextmanager
def twins(**options: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yields a model in the tiers, the same in HBM, and the manager's front."""
    model, plain = build(), build()
    with tiermem.TierManager("cuda", hbm=4 * BLOCK, dram="1GiB", **options) as tier:
        yield tier.wrap(model), plain, tier


def tokens(count: int, number: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(number)
    return torch.randint(0, ROWS, (1, count), generator=made).cuda()


@pytest.mark.parametrize("count", [1, 100, ROWS // 2])
def test_the_bits_are_those_of_the_resident_model(count: int) -> None:
    with twins() as (model, plain, tier), torch.no_grad():
        for number in range(8):
            ids = tokens(count, number)
            assert torch.equal(model(ids), plain(ids))
            assert torch.equal(model.embed(ids), plain.embed(ids))  # by itself it comes up
        assert tier.stats().reads_in_place == 8


def rewrite(tier: Any, value: float) -> None:
    """The host writes the embedding where it lies, as soon as it may."""
    manager = tier._manager
    block = next(record.block for record in manager.parts.table if "embed" in record.block.name)
    with manager.lock:
        (tensors,), events = manager.host_loans.lend([block])
    for event in events:
        event.synchronize()
    tensors[0].fill_(value)
    with manager.lock:
        manager.host_loans.give_back([block])


def race(tier: Any, model: Any, plain: Any) -> bool:
    """Whether rows that are looked up late are those of when they were asked for."""
    ids = tokens(2048)
    expected = plain.embed(ids).clone()
    for _ in range(4):
        model(ids)  # at the end of which the embedding is not in HBM
    assert next(r for r in tier.residency() if "embed" in r.block).tiers["hbm"] == "absent"
    for _ in range(3):
        model(ids, late=0)  # what comes once is over, and nothing is fetched for later
    torch.cuda.synchronize()
    before = tier.stats().reads_in_place
    found = model(ids, late=LATE)
    assert tier.stats().reads_in_place == before + 1
    rewrite(tier, 2.0)
    torch.cuda.synchronize()
    return torch.equal(found, expected)


def test_the_host_does_not_write_what_a_kernel_is_yet_to_read() -> None:
    with twins(prefetch_depth=0) as (model, plain, tier), torch.no_grad():
        assert race(tier, model, plain)
        assert bool((model(tokens(5), late=LATE) == 2.0).all())


def test_without_the_event_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    # a copy up that waits for compute would be waited for by the host, and hide what is missing
    with twins(prefetch_depth=0) as (model, plain, tier), torch.no_grad():
        monkeypatch.setattr(tier._manager.parts.copy, "mark", lambda: None)
        assert not race(tier, model, plain)


def test_another_device_than_the_one_of_now_reads_its_own() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    plain = build().to("cuda:1")
    model = build()
    with tiermem.TierManager("cuda:1", hbm=4 * BLOCK, dram="1GiB") as tier, torch.no_grad():
        tier.wrap(model)
        for number in range(3):
            ids = tokens(100, number).to("cuda:1")
            assert torch.equal(model(ids), plain(ids))
        assert tier.stats().reads_in_place == 3
