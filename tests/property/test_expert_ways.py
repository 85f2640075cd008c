"""Random programs over a mixture of experts that goes now by whole layers, now expert by expert.

The oracle is the same model, never wrapped; how long passes seem to take is drawn as well.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_experts import VOCABULARY, check, check_step, freeze_experts, mixtral, twins

from tiermem.core.experts import Way

MANY, FEW = 40, 1

Acts = st.lists(
    st.one_of(
        st.tuples(st.just("call"), st.sampled_from([MANY, MANY, MANY, FEW]), st.integers(1, 4)),
        st.tuples(st.just("step"), st.sampled_from([MANY, FEW]), st.just(1)),
        st.tuples(st.just("write"), st.integers(0, 7), st.just(1)),
        st.tuples(st.just("fail"), st.just(0), st.just(1)),
        st.tuples(st.just("leave"), st.just(0), st.just(1)),
    ),
    min_size=3,
    max_size=14,
)


def ids(tokens: int) -> torch.Tensor:
    return torch.arange(tokens)[None] % VOCABULARY


def written(tier: Any, model: Any, plain: Any, layer: int) -> None:
    """Writes one expert of a layer in both models."""
    name = f"model.layers.{layer}.mlp.experts.down_proj"
    with tier.materialize(model), torch.no_grad():
        for one in (model, plain):
            one.get_parameter(name)[1].mul_(1.5)


def scripted(tier: Any, least: float, other: Way) -> Any:
    """Makes the manager copy as beside a GPU, and think that a pass takes so long at the least.

    ``other`` is tried beside one by one, whatever it moves.
    """
    way = tier._runtime.experts.way
    tier._manager.prefetcher.fetcher.beside = True
    way._least = lambda *_: least
    way._worth_a_trial = lambda **_: (other, 1)
    return way


@settings(max_examples=examples(12), deadline=None)
@given(Acts, st.floats(1e-9, 1.0), st.sampled_from([Way.TENSORS, Way.LAYERS]))
def test_whichever_way_it_goes_the_bits_are_the_same(
    acts: list[tuple[str, int, int]], least: float, other: Way
) -> None:
    config = mixtral(4)
    config.num_hidden_layers = 8
    with twins(config, "grouped_mm", 0.2) as (model, plain, tier):
        for one in (model, plain):
            freeze_experts(one, None)
        way = scripted(tier, least, other)
        for what, number, times in acts:
            for _ in range(times):
                if what == "call":
                    check(model, plain, ids(number))
                elif what == "step":
                    check_step(model, plain, ids(number))
                elif what == "write":
                    written(tier, model, plain, number)
                elif what == "fail":
                    with torch.no_grad():
                        try:
                            model(torch.tensor([[VOCABULARY + 5]]))
                        except IndexError:
                            pass
                else:
                    tier.unwrap(model)
                    check(model, plain, ids(FEW))
                    tier.wrap(model)
                    way = scripted(tier, least, other)
            tier._manager.parts.table.check()
        for _ in range(3):
            check(model, plain, ids(MANY))
            kind = way._kinds[way._last]
        assert kind.chosen >= 0.8
