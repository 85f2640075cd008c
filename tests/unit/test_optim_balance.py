"""Which steps are left to the next forward, and that they are the same steps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support_nn import Tiers
from support_optim import Net, Twins, made, units, watched

import tiermem
from tiermem.core.block import Role
from tiermem.core.residency import State
from tiermem.optim.balance import choose, share_for_forward
from tiermem.runtime.pacing import PassTimes
from tiermem.runtime.pipeline import Pipeline

DRAM = Tiers("dram", extra_hbm=1 << 17)
GB = 10**9

# Llama 3.02 B in 4 GiB of HBM on an H200, by number of tokens: measured times of the two passes
LONG = PassTimes(0.24, 0.15, 65 * GB // 10), PassTimes(0.68, 0.78, 34 * GB)
SHORT = PassTimes(0.06, 0.13, 55 * GB // 10), PassTimes(0.19, 0.80, 34 * GB)
WEIGHTS = 6 * GB


def test_backward_gives_away_what_its_compute_does_not_hide() -> None:
    share = share_for_forward(*LONG, WEIGHTS)
    forward, backward = LONG
    weights = WEIGHTS * backward.up / backward.nbytes
    steps = backward.up - weights
    assert 0.05 < share < 0.2
    # no more than forward's compute hides, and less in backward than without
    assert share * steps + forward.up * WEIGHTS / forward.nbytes <= forward.compute
    assert (1 - share) * steps + weights >= backward.compute * 0.9


def test_a_forward_that_is_busy_itself_is_given_nothing() -> None:
    assert share_for_forward(*SHORT, WEIGHTS) == 0.0


def test_a_backward_that_hides_its_copies_gives_nothing_away() -> None:
    forward, backward = LONG
    assert share_for_forward(forward, PassTimes(2.0, backward.up, backward.nbytes), WEIGHTS) == 0.0


@pytest.mark.parametrize("which", [0, 1])
def test_where_nothing_comes_up_nothing_is_given_away(which: int) -> None:
    passes = list(LONG)
    passes[which] = PassTimes(passes[which].compute, 0.0, 0)
    assert share_for_forward(*passes, WEIGHTS) == 0.0


def test_weights_alone_are_no_steps() -> None:
    forward, _ = LONG
    assert share_for_forward(forward, PassTimes(0.1, 0.2, WEIGHTS), WEIGHTS) == 0.0


@given(st.lists(st.integers(1, 1000), max_size=60), st.floats(0, 0.4))
def test_as_many_are_chosen_as_asked_for_none_of_them_early_or_tiny(
    sizes: list[int], share: float
) -> None:
    chosen = choose(sizes, share)
    total = sum(sizes)
    assert len(chosen) == len(sizes)
    mine = sum(n for n, on in zip(sizes, chosen, strict=True) if on)
    assert mine <= share * total + max(sizes, default=0) / 2 + 1
    before = 0
    for size, on in zip(sizes, chosen, strict=True):
        if on:
            assert before >= total // 6
            assert size > max(sizes) // 64
        before += size
    if share == 0.0:
        assert not any(chosen)


def test_the_chosen_ones_are_spread_evenly() -> None:
    chosen = choose([10] * 60, 0.1)
    places = [i for i, on in enumerate(chosen) if on]
    assert len(places) == 6
    gaps = {b - a for a, b in itertools.pairwise(places)}
    assert max(gaps) - min(gaps) <= 1


def passes(pair: Any, forward: PassTimes, backward: PassTimes) -> None:
    """Has both passes measured, with these results."""
    runtime, pacing = pair.optimizer._runtime, pair.tier._manager.pacing
    pacing.times[runtime.last_forward] = forward
    pacing.times[runtime.last_stepping] = backward


def weights_of(pair: Any) -> int:
    return sum(g.block.nbytes for g in pair.optimizer._runtime.groups)


def measured(pair: Any, compute: float) -> None:
    """A backward whose copies take longer than its compute, and a forward with time left."""
    nbytes = weights_of(pair)
    pair.optimizer._inside._balance.beside = True
    passes(pair, PassTimes(compute, 0.1, nbytes), PassTimes(0.5, 1.0, 8 * nbytes))


def test_steps_are_put_off_once_passes_are_measured_and_stay_the_same() -> None:
    build = lambda: Net(layers=8)  # noqa: E731
    with watched(Twins(build, DRAM, overlap="backward")) as pair:
        inside = pair.optimizer._inside
        pair.backward(1)
        assert made(pair) == units(pair)
        measured(pair, 0.4)
        pair.step()
        share = inside._balance.share
        assert 0.0 < share <= 0.4
        for step in range(2, 7):
            pair.backward(step)
            assert 0 < made(pair) < units(pair)
            measured(pair, 0.4)
            pair.step()
            if step % 2:
                pair.check()  # whoever looks has them made
        pair.check()


def test_another_length_is_decided_anew_and_the_same_one_is_not() -> None:
    with watched(Twins(lambda: Net(layers=8), DRAM, overlap="backward")) as pair:
        inside = pair.optimizer._inside
        pair.backward(1)
        measured(pair, 0.4)
        pair.step()
        put_off = set(inside._postponed)
        assert put_off
        for compute, changes in ((0.42, False), (0.1, True), (0.4, True)):
            pair.backward(2)
            measured(pair, compute)
            pair.step()
            assert (inside._postponed == put_off) == (compute != 0.1)
            assert (inside._balance._decided.compute == compute) == changes
        pair.check()


def test_what_the_user_forgets_or_looks_at_is_stepped_first() -> None:
    with watched(Twins(lambda: Net(layers=8), DRAM, overlap="backward")) as pair:
        pair.backward(1)
        measured(pair, 0.4)
        pair.step()
        for step in range(2, 5):
            pair.backward(step)
            measured(pair, 0.4)
            pair.step()
            pair.optimizer.zero_grad()
            pair.by_hand.zero_grad()
            state = pair.optimizer.state_dict()["state"]
            assert all(int(entry["step"]) == step + 2 for entry in state.values())
        pair.check()


def test_kept_gradients_go_home_as_others_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where copies hide behind compute; those that are used at once never do."""
    real = Pipeline.__init__

    def beside(pipeline: Pipeline, manager: Any) -> None:
        real(pipeline, manager)
        pipeline._dram = True

    monkeypatch.setattr(Pipeline, "__init__", beside)
    with Twins(lambda: Net(layers=8), DRAM, overlap="forward") as pair:
        manager, drain = pair.tier._manager, pair.tier._manager.traffic.drain
        found: list[str] = []

        def spy(record: Any) -> None:
            if record.block.role is Role.GRAD:
                found.append(record.block.name)
            drain(record)

        for step in range(4):
            pair.backward(step)
            pair.step()
        manager.traffic.drain = spy
        pair.backward(4)
        kept = [e.unit for g in pair.optimizer._runtime.groups for e in g.entries if e.unit]
        assert {unit.block.name for unit in kept} <= set(found)
        for unit in kept:
            record = manager.record(unit.block)
            assert record.at_home.name == "VALID", "it is at home before its room is needed"
        pair.step()
        pair.check()


def test_on_the_cpu_nothing_is_put_off() -> None:
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="16MiB") as tier:
        model = tier.wrap(torch.nn.Linear(4, 4))
        optimizer = tier.optimizer(model.parameters(), torch.optim.AdamW, overlap="backward")
        assert optimizer._inside._balance.share == 0.0
        assert not optimizer._inside._balance.beside


def test_what_forward_begins_with_is_written_once_it_has_got_further() -> None:
    with watched(Twins(lambda: Net(layers=8), DRAM, overlap="backward")) as pair:
        manager, runtime = pair.tier._manager, pair.optimizer._runtime
        first = runtime.groups[0]
        pair.backward(1)
        kept = [b for u in pair.optimizer._units if u.group is first for b in u.kept_blocks()]
        assert kept
        assert {manager.record(b).in_hbm for b in kept} == {State.DIRTY}
        assert set(map(id, kept)) <= set(map(id, runtime.unwritten))
        pair.step()
        seen: list[set[State]] = []

        def look(*_: Any) -> None:
            seen.append({manager.record(b).in_hbm for b in kept})

        hooks = [
            pair.model.embed.register_forward_hook(look),
            pair.model.layers[0].register_forward_hook(look),
        ]
        pair.backward(2)
        for hook in hooks:
            hook.remove()
        assert seen[0] == {State.DIRTY}
        assert State.DIRTY not in seen[1]
        assert runtime.unwritten  # of the second step
        pair.step()
        pair.check()
