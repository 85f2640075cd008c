"""Two optimizers, drawn at random, over the same weights: as by hand, whenever steps are made."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_two import ADAMW, MOMENTUM, everything, matrices, two

CHOSEN = st.sampled_from(
    [
        ADAMW,
        MOMENTUM,
        (torch.optim.SGD, {"lr": 0.05, "foreach": False}),
        (torch.optim.RMSprop, {"lr": 0.003, "foreach": False}),
    ]
)
OPTIONS = st.fixed_dictionaries(
    {
        "overlap": st.sampled_from(["auto", "auto", "forward", "backward", False]),
        "where": st.sampled_from(["device", "device", "host", "both"]),
        "master_dtype": st.sampled_from([torch.float32, torch.float32, None]),
    }
)
ROUND = st.tuples(
    st.sampled_from([(0,), (0,), (0,), (1,), (1,), (0, 1), (1, 0)]),
    st.sampled_from(["", "", "", "", "weights", "state", "write"]),
)


@settings(max_examples=examples(15, 1000))
@given(
    chosen=st.tuples(CHOSEN, CHOSEN),
    options=st.tuples(OPTIONS, OPTIONS),
    params=st.sampled_from([(everything, everything), (everything, matrices)]),
    hbm=st.sampled_from(["48KiB", "64KiB", "256KiB"]),
    rounds=st.lists(ROUND, min_size=8, max_size=24),
)
def test_two_optimizers_over_the_same_weights(
    chosen: Any, options: Any, params: Any, hbm: str, rounds: list[tuple[tuple[int, ...], str]]
) -> None:
    with two(*options, chosen=chosen, params=params, hbm=hbm) as pair:
        for number, (which, then) in enumerate(rounds):
            pair.backward(number)
            pair.step(*which)
            if then == "weights":
                pair.compare_weights()
            elif then == "state":
                pair.check()
            elif then == "write":
                pair.write(number)
        pair.check()
