"""After ``materialize`` nothing looks at a place that its block has left meanwhile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_nn import same_bits, seed
from torch import nn

import tiermem

WIDTH, COUNT = 64, 6
NBYTES = WIDTH * WIDTH * 4
LAYER = st.integers(0, COUNT - 1)


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(LAYER, st.lists(LAYER, max_size=6)), min_size=1, max_size=6))
def test_who_comes_to_a_place_is_not_taken_for_seen(turns: list[tuple[int, list[int]]]) -> None:
    seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(COUNT)]
    before = [layer.weight.detach().clone() for layer in layers]
    with tiermem.TierManager("cpu", hbm=3 * NBYTES, dram="1MiB") as tier, torch.no_grad():
        tier.wrap(nn.Sequential(*layers))
        table, current = tier._manager.parts.table, tier._manager.parts.slots.current
        for chosen, others in turns:
            layers[chosen](torch.ones(1, WIDTH))
            with tier.materialize(layers[chosen]):
                for other in others:
                    layers[other](torch.ones(1, WIDTH))
            assert not any(slot.aliased for slot in current.values())
            assert not any(record.leases for record in table)
        for layer, weight in zip(layers, before, strict=True):
            with tier.materialize(layer):
                assert same_bits(layer.weight, weight)


def test_gradients_of_what_was_unfrozen_meanwhile_are_in_the_tiers() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(COUNT))).requires_grad_(False)
    with tiermem.TierManager("cpu", hbm=4 * NBYTES, dram="1MiB") as tier:
        tier.wrap(model)
        with tier.materialize(model[2]):
            model[2].weight.requires_grad_(True)
        model(torch.ones(1, WIDTH)).sum().backward()
        assert [row.role for row in tier.residency()].count("grad") == 1
        assert [param.grad is not None for param in model.parameters()].count(True) == 1


def test_data_with_other_strides_is_refused_as_the_block_ends() -> None:
    """Plain torch would keep them, and round otherwise; outside of ``materialize`` it is alike."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    first, second = model
    before, column = first.weight.detach().clone(), torch.rand(WIDTH, 2)[:, 0]
    with tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB") as tier, torch.no_grad():
        tier.wrap(model)
        with (
            pytest.raises(tiermem.ParameterError, match=r"'0.weight' has strides \(1, 64\).*copy_"),
            tier.materialize(model),
        ):
            first.weight.data = first.weight.data.t().contiguous().t() + 1
            first.bias.data = column  # with one dimension the strides change no bit
            second.weight.data = second.weight.data + 1
            changed = second.weight.detach().clone()
        assert same_bits(first.weight.detach(), before)
        assert same_bits(first.bias.detach(), column)
        assert same_bits(second.weight.detach(), changed)
        with tier.materialize(model):
            first.weight.data.copy_(before.t())
        assert same_bits(first.weight.detach(), before.t())
