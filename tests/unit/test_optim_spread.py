"""The share of the host inside backward, against a search over all shares."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_nn import Tiers
from support_optim import Net, Twins

from tiermem.optim.host.spread import Rates, Traffic, measure_both, spread

SECONDS = st.floats(1e-12, 1e-8)
RATES = st.builds(Rates, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS)
LINK, HOST, MEMORY = 101e9, 4.5e9, 160e9
REFERENCE = Rates(
    host=1 / HOST,
    device=28 / LINK,
    passing=4 / LINK,
    memory_device=28 / MEMORY,
    memory_host=(4 + 36) / MEMORY,
)
"""bf16 weights and gradients, fp32 masters and states of AdamW; a measured machine."""


@settings(max_examples=examples(60))
@given(rates=RATES)
def test_no_other_share_is_faster(rates: Rates) -> None:
    def longest(share: float) -> float:
        on_device = 1 - share
        return max(
            rates.host * share,
            rates.device * on_device + rates.passing * share,
            rates.memory_device * on_device + rates.memory_host * share,
        )

    best = rates.best_share()
    assert 0 <= best <= 1
    least = min(longest(number / 2000) for number in range(2001))
    assert longest(best) <= least * (1 + 1e-9)


def test_the_share_of_the_reference_machine() -> None:
    share = REFERENCE.best_share()
    assert 0.25 < share < 0.35
    count = 3.02e9
    assert REFERENCE.seconds(0.0) * count == pytest.approx(0.837, abs=0.01)
    assert REFERENCE.seconds(share) * count < 0.69  # what backward computes, at 16,384 tokens


@settings(max_examples=examples(60))
@given(elements=st.lists(st.integers(1, 10**9), max_size=60), rates=RATES)
def test_the_host_has_no_more_than_its_share_and_is_through_in_time(
    elements: list[int], rates: Rates
) -> None:
    chosen = spread(elements, rates)
    assert len(chosen) == len(elements)
    pace = rates.seconds(rates.best_share())
    whole, largest = sum(elements), max(elements, default=0)
    share = rates.best_share() * whole
    end = whole * pace

    def needed(i: int) -> float:
        """When forward comes to a block, at its pace, less a part of backward for the way there."""
        return end + sum(elements[i + 1 :]) * pace / 4 - 0.15 * end

    able = [
        count > largest // 64
        and sum(elements[: i + 1]) * pace + 1.1 * count * rates.host <= needed(i) * (1 + 1e-9)
        for i, count in enumerate(elements)
    ]
    assert not any(on for on, can in zip(chosen, able, strict=True) if not can)
    total = sum(n for n, can in zip(elements, able, strict=True) if can)
    had = through = 0.0
    for i, (count, on_host) in enumerate(zip(elements, chosen, strict=True)):
        if not on_host:
            continue
        had += count
        passed = sum(n for n, can in zip(elements[: i + 1], able, strict=False) if can)
        assert had <= passed * min(1.0, share / total) + largest * (0.5 + 1e-6)
        arrives = sum(elements[: i + 1]) * pace
        through = max(through, arrives) + count * rates.host
        assert through <= needed(i) * (1 + 1e-9)


def test_the_last_blocks_of_backward_are_the_devices() -> None:
    layers = [100] + [100] * 28 + [98]  # head, layers from the last to the first, embedding
    chosen = spread(layers, REFERENCE)
    assert not any(chosen[-2:])
    assert sum(chosen) == pytest.approx(REFERENCE.best_share() * len(layers), abs=1.5)
    gaps = [i for i, on_host in enumerate(chosen) if on_host]
    between = [b - a for a, b in itertools.pairwise(gaps)]
    assert max(between) - min(between) <= 1


def test_what_is_measured() -> None:
    def adamw(groups: list) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=0.1)

    cpu = torch.device("cpu")
    bf16, fp32 = torch.bfloat16, torch.float32
    rates = measure_both(adamw, adamw, cpu, bf16, fp32, Traffic(28, 4, 36))
    assert rates.host > 0 and rates.device > 0
    assert rates.passing == rates.memory_host == 0  # there is no link


def test_bytes_that_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def measured(*args: object) -> Rates:
        seen.append(args[5])
        return REFERENCE

    monkeypatch.setattr("tiermem.optim.host.sides.measure_both", measured)
    for grad_dtype in (None, torch.float32):
        options = {"where": "both", "overlap": "backward", "grad_dtype": grad_dtype}
        with Twins(Net, Tiers("dram"), **options) as pair:
            assert pair.optimizer.speeds is REFERENCE
    small, large = seen
    # blocks are whole pages, and these are small: at least the formula's bytes
    assert small.device >= 28 and small.passing >= 4 and small.host >= 24 + 2 + 8 + 2
    assert large.passing >= small.passing
