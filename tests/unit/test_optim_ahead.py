"""Steps that are made ahead of ``step()``: confirmed if there was no access, else dropped."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support_ahead import DROPS, ROOMY, SGD, ahead, drops, units, warm
from support_nn import Tiers, assert_same, check_table
from support_optim import Net, Twins, loss_of, two_groups
from torch import nn

import tiermem
from tiermem.core.block import Block
from tiermem.core.residency import Record
from tiermem.optim.ahead import Habit
from tiermem.optim.balance import Choice, Load, Passes, Speed, best_choice, host_helps
from tiermem.optim.host.spread import Rates
from tiermem.runtime.services.sweep import BlockSweep
from tiermem.runtime.transfers.transfers import Transfers


@pytest.mark.parametrize("master", [torch.float32, None])
@pytest.mark.parametrize(("cls", "settings"), [SGD, (torch.optim.AdamW, {"lr": 0.01})])
def test_every_unit_is_stepped_ahead_and_confirmed(cls, settings, master) -> None:
    with warm(Net, ROOMY, cls, settings, master_dtype=master, groups=two_groups) as pair:
        for number in range(4):
            pair.backward(number)
            assert ahead(pair) == units(pair)
            pair.step()
            assert not ahead(pair)
        assert pair.optimizer.stepped_in_backward == 5 * units(pair)
        assert not drops(pair)
        pair.check()


@pytest.mark.parametrize("what", sorted(DROPS))
@pytest.mark.one_in(2)
def test_whoever_looks_finds_everything_as_it_was(what: str) -> None:
    master = None if what == "a weight is written" else torch.float32
    with warm(groups=two_groups, master_dtype=master) as pair:
        for number in range(2):
            pair.backward(number)
            assert ahead(pair) == units(pair)
            DROPS[what](pair)
            if what == "a rate":  # seen by step() alone
                pair.by_hand.step()
                pair.optimizer.step()
                assert drops(pair) == 1
                break
            assert not ahead(pair)
            if number == 0:
                assert_same(dict(pair.plain.state_dict()), dict(pair.model.state_dict()), "weights")
            pair.step()
            pair.check()
            if pair.optimizer._units.looked_into or what == "another backward":
                break


def test_gradients_thrown_away_are_not_used() -> None:
    with warm() as pair:
        for _ in range(2):
            pair.backward(1)
            pair.by_hand.zero_grad()
            pair.optimizer.zero_grad()
            assert not ahead(pair)
            pair.check()
        pair.backward(2)
        pair.model.zero_grad()
        pair.by_hand.zero_grad()
        pair.backward(3)
        pair.step()
        pair.check()


def test_clipping_that_does_not_clip_costs_nothing() -> None:
    """By torch's own function or the optimizer's, once norms are taken in backward."""
    with warm() as pair:
        for number in range(4):
            pair.backward(number)
            before = drops(pair)
            if number % 2:
                norm = nn.utils.clip_grad_norm_(pair.model.parameters(), 1e6)
            else:
                norm = pair.optimizer.clip_grad_norm_(1e6)
            assert_same(nn.utils.get_total_norm(pair.by_hand.gradients()), norm, "norm")
            assert (drops(pair) > before) == (number == 0)  # the first has to look
            pair.step()
        pair.check()


def test_accumulation_is_learned() -> None:
    with Twins(Net, ROOMY) as pair:
        for step in range(4):
            for micro in range(3):
                assert not ahead(pair)
                pair.backward(3 * step + micro)
            assert ahead(pair) == (units(pair) if step else 0)
            pair.step()
        assert not drops(pair)
        pair.check()


def rounds(habit: Habit, count: int, drops: Callable[[int], bool]) -> list[int]:
    """Lets rounds of a loop go by; returns the numbers of those in which steps are tried ahead."""
    tried = []
    for number in range(count):
        habit.backwards = 1
        last = habit.is_last(1)
        dropped = last and drops(number)
        habit.ends_round(dropped=dropped, confirms=last and not dropped)
        if last:
            tried.append(number)
    return tried


def always(_number: int) -> bool:
    return True


def never(_number: int) -> bool:
    return False


def test_a_loop_that_drops_twice_in_a_row_pauses_ever_longer() -> None:
    assert rounds(Habit(), 200, always) == [1, 2, 11, 28, 61, 126, 191]


@pytest.mark.parametrize(("every", "least", "most"), [(2, 5, 20), (3, 5, 30), (8, 199, 200)])
def test_a_loop_that_drops_now_and_then_pauses_if_that_is_often(
    every: int, least: int, most: int
) -> None:
    tried = rounds(Habit(), 200, lambda number: number % every == 1)
    assert least <= len(tried) <= most


def test_a_loop_that_stops_dropping_pauses_shortly_again() -> None:
    habit = Habit()
    assert len(rounds(habit, 100, always)) == 5
    assert habit.in_vain
    assert len(rounds(habit, 100, never)) > 60  # the rest of the pause first
    assert not habit.in_vain
    found = [(2, always), (8, always), (1, never)]
    assert [len(rounds(habit, count, drops)) for count, drops in found] == [2, 0, 1]


def test_a_loop_that_logs_gradients_moves_no_more_than_one_whose_steps_wait() -> None:
    """Two rounds are in vain; those after them move what they do where no step is made ahead."""

    def moved(overlap: Any) -> list[int]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(40)))
        weights = sum(p.numel() * 4 for p in model.parameters())
        found = []
        with tiermem.TierManager("cpu", hbm=weights // 3, dram="16MiB") as tier:
            optimizer = tier.optimizer(tier.wrap(model), torch.optim.AdamW, overlap=overlap)
            for _ in range(10):
                tier.reset_stats()
                model(torch.ones(2, 64)).square().mean().backward()
                assert sum(float(p.grad.norm()) for p in model.parameters()) > 0
                optimizer.step()
                optimizer.zero_grad()
                found.append(sum(link.nbytes for link in tier.stats().links.values()))
        return [100 * nbytes // weights for nbytes in found]

    found, waiting = moved("auto"), moved("forward")
    assert max(found[1:3]) > 1500  # percent of the weights' bytes: a step twice, and what undoes it
    assert max(found[3:]) < 1200  # 11 times the weights: the norms take one of them
    assert max(abs(a - b) for a, b in zip(found[4:], waiting[4:], strict=True)) < 50


def test_a_backward_that_raises_leaves_what_is_final() -> None:
    with warm() as pair:
        for model in (pair.plain, pair.model):
            hook = model.layers[0].up.weight.register_hook(_stop)
            with pytest.raises(KeyError):
                loss_of(model, 5).backward()
            hook.remove()
        pair.by_hand.after_backward()
        assert 0 < ahead(pair) < units(pair)
        pair.step()
        pair.check()


def _stop(_gradient: torch.Tensor) -> None:
    raise KeyError("stop")


def test_where_dram_has_room_for_some_the_others_wait() -> None:
    with Twins(Net, ROOMY) as pair:
        used = pair.tier.stats().used["dram"]
    with Twins(Net, Tiers("dram", dram=used + (1 << 16))) as pair:
        for number in range(4):
            pair.backward(number)
            found = ahead(pair)
            assert (0 < found < units(pair)) == bool(number)
            pair.by_hand.step()
            pair.optimizer.step()
            assert len(pair.optimizer._units.owed) == (units(pair) - found if number else 0)
            pair.by_hand.zero_grad()
            pair.optimizer.zero_grad()
        pair.check()


def test_the_second_round_finds_its_shadows() -> None:
    """They are page-locked with the first step, which takes long anyway."""
    with Twins(Net, ROOMY) as pair:
        homes, shadows = (
            pair.tier._manager.parts.homes,
            pair.optimizer._timing.ahead.provisional._shadows,
        )
        pair.backward(0)
        assert not shadows.nbytes
        pair.step()
        used, reserved = homes.dram.used, shadows.nbytes
        assert reserved
        pair.backward(1)
        assert ahead(pair) == units(pair)
        assert (homes.dram.used, shadows.nbytes) == (used, reserved)
        pair.step()
        pair.check()


@pytest.mark.parametrize("master", [None, torch.float32])
def test_a_loop_that_scales_takes_no_memory_for_steps_ahead(master) -> None:
    """Whether the scaler undoes the scale in the gradients, or leaves that to ``step()``."""
    with Twins(Net, ROOMY, torch.optim.AdamW, {"lr": 0.01}, master_dtype=master) as pair:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for number in range(4):
            scaler.scale(loss_of(pair.model, number)).backward()
            assert not ahead(pair)
            scaler.step(pair.optimizer)
            scaler.update()
            pair.optimizer.zero_grad()
        assert not drops(pair)
        assert not pair.optimizer._timing.ahead.provisional._shadows.nbytes


def test_shadows_go_with_the_optimizer() -> None:
    with warm() as pair:
        homes = pair.tier._manager.parts.homes
        assert homes.dram.used > sum(
            record.home_extent.nbytes for record in pair.tier._manager.parts.table
        )
        pair.backward(1)
        pair.optimizer.close()
        assert homes.dram.used == sum(
            record.home_extent.nbytes for record in pair.tier._manager.parts.table
        )
        assert_same(dict(pair.plain.state_dict()), dict(pair.model.state_dict()), "weights")
        check_table(pair.tier)


def test_a_model_that_leaves_is_as_it_was_before_the_steps() -> None:
    with warm() as pair:
        pair.backward(1)
        assert ahead(pair)
        pair.tier.unwrap(pair.model)
        assert_same(dict(pair.plain.state_dict()), dict(pair.model.state_dict()), "weights")
    with warm() as pair:
        pair.backward(1)
        pair.tier.close()
        assert_same(dict(pair.plain.state_dict()), dict(pair.model.state_dict()), "weights")


LAYERS = [Load(weights=2, gradients=2, kept=12)] * 30
BUSY = Speed(forward=150.0, backward=400.0, up=1.0, down=1.0)


def best_left(loads: Any, speed: Speed, now: frozenset[int] | None = None) -> frozenset[int]:
    return best_choice(loads, speed, now).left


def seconds(loads: Any, speed: Speed, left: frozenset[int]) -> float:
    return Passes(loads, left).seconds(speed)


def test_what_forward_has_time_for_is_left_to_it() -> None:
    """The best of all numbers of blocks, evenly spread; none where the link is busy throughout."""
    left = best_left(LAYERS, BUSY)
    assert 0 < len(left) < 15
    assert all(b - a > 1 for a, b in itertools.pairwise(sorted(left)))
    for other in (frozenset(), frozenset(range(30))):
        assert seconds(LAYERS, BUSY, left) < seconds(LAYERS, BUSY, other)
    assert best_left(LAYERS, Speed(1.0, 3.0, 1.0, 1.0)) == frozenset()
    assert len(best_left(LAYERS, Speed(900.0, 1.0, 1.0, 1.0))) > 28


def test_what_the_host_steps_is_not_left_and_does_not_move_in_backward() -> None:
    hosted = frozenset(range(0, 30, 3))
    loads = [
        replace(load, host=20.0) if number in hosted else load for number, load in enumerate(LAYERS)
    ]
    busy = Speed(forward=150.0, backward=300.0, up=1.0, down=1.0)
    left = best_left(loads, busy)
    assert left
    assert not left & hosted
    assert seconds(loads, busy, left) < seconds(loads, busy, frozenset())
    assert seconds(loads, busy, frozenset()) == 150 + max(300, 60 + 20 * 12 + 20 * 2)
    slow = [replace(load, host=load.host and 40.0) for load in loads]  # the longest in backward
    assert seconds(slow, busy, frozenset()) == 150 + 10 * 40
    assert not best_left(loads, busy, now=hosted) & hosted  # that were left before it was tried


def test_state_is_left_by_turns_until_as_much_comes_up_as_goes_down() -> None:
    """None where compute is the longest, all where nothing but the state's bytes goes down."""
    loads = [replace(load, state=8) for load in LAYERS]
    busy = Speed(forward=1.0, backward=1.0, up=1.0, down=1.0)
    found = best_choice(loads, busy, frozenset())
    assert found.left == frozenset() and 0.25 < found.turns < 1
    up, down = 14 + found.turns, 16 - found.turns * 4
    assert abs(up - down) < 1.3
    assert Passes(loads, found.left).seconds(busy, found.turns) == 60 + 30 * max(up, down)
    assert best_choice(loads, replace(busy, backward=480.0)).turns == 0.0
    assert best_choice(loads, replace(busy, down=0.1)).turns == 1.0
    assert best_choice(LAYERS, busy) == Choice(copies_bind=True)


@given(
    st.tuples(st.integers(0, 50), st.integers(0, 50)),
    st.tuples(st.integers(1, 8), st.integers(1, 8)),
    st.integers(0, 12),
)
def test_what_is_left_of_copies_both_ways_goes_by_itself(
    nbytes: tuple[int, int], rates: tuple[int, int], alone: int
) -> None:
    """Oracle: both ways are filled in turns of a hundredth of a second."""
    left, seconds, turn = [float(n) for n in nbytes], 0.0, 1e-2
    while max(left) > 0:
        both = min(left) > 0
        for way, rate in enumerate(rates):
            left[way] -= turn * (rate if both else max(alone, rate))
        seconds += turn
    found = Speed(1.0, 1.0, *rates, alone=alone).copies(*nbytes)
    assert abs(found - seconds) <= 3 * turn


def test_a_faster_way_down_leaves_less_state_by_turns() -> None:
    loads = [replace(load, state=8) for load in LAYERS]
    even = Speed(forward=1.0, backward=1.0, up=1.0, down=1.0, alone=1.2)
    turns = [best_choice(loads, replace(even, down=down)).turns for down in (0.8, 1.0, 1.25)]
    assert turns[0] > turns[1] > turns[2]


def test_a_share_of_the_host_helps_where_copies_both_ways_are_the_longest() -> None:
    """A third of the blocks is the host's, whose own time is short, or is not."""
    hosted = [
        replace(load, host=1.0) if number % 3 == 0 else load for number, load in enumerate(LAYERS)
    ]
    busy = Speed(forward=100.0, backward=100.0, up=1.0, down=1.0)
    assert host_helps(hosted, LAYERS, busy)
    assert not host_helps(hosted, LAYERS, replace(busy, backward=600.0))
    down = sum(load.weights + load.gradients + load.kept for load in LAYERS)
    near = replace(busy, forward=1.0, backward=1.04 * down)
    assert not host_helps(hosted, LAYERS, near)
    assert host_helps(hosted, LAYERS, replace(near, up=0.85, down=0.85, alone=1.0))  # both ways
    slow = [replace(load, host=load.host and 70.0) for load in hosted]
    assert not host_helps(slow, LAYERS, busy)
    assert not host_helps(LAYERS, LAYERS, busy)
    for waits in (False, True):  # the next forward moves state as well then, and backward does not
        assert host_helps(hosted, LAYERS, replace(busy, backward=600.0), waits=waits) is waits
        assert not host_helps(hosted, LAYERS, replace(busy, forward=600.0), waits=waits)
    assert not host_helps(slow, LAYERS, replace(busy, backward=600.0), waits=True)


def test_how_long_both_passes_compute_is_known_to_the_balance() -> None:
    pair = warm()
    for number in range(20):
        pair.backward(number)
        pair.step()
    estimates = pair.tier._manager.parts.pass_timer.estimates
    forward, backward = map(estimates.computes, pair.optimizer._timing.ahead._runtime.names.last)
    assert forward is not None and backward is not None and min(forward, backward) > 0


def test_the_link_is_as_fast_as_it_was_measured_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = warm()
    for number in range(20):
        pair.backward(number)
        pair.step()
    timing = pair.optimizer._timing
    pace = pair.tier._manager.parts.pass_timer.estimates
    monkeypatch.setattr(pair.tier._manager.prefetcher.fetcher, "beside", True)
    monkeypatch.setattr(pace, "rate", lambda *_: 5.0)
    monkeypatch.setattr(pace, "best_rate", lambda link: 6.0 if link == "dram->hbm" else None)
    found = timing.ahead._left._speed()
    assert (found.up, found.down, found.alone) == (5.0, 5.0, 0.0)
    monkeypatch.setattr(timing.ahead._others, "rates", Rates(1.0, 1.0, both_ways=(4.0, 3.0)))
    found = timing.ahead._left._speed()
    assert (found.up, found.down, found.alone) == (4.0, 3.0, 6.0)


def test_blocks_stay_where_others_are_hardly_better() -> None:
    left = best_left(LAYERS, BUSY)
    near = frozenset(number + 1 for number in left if number + 1 < len(LAYERS))
    assert best_left(LAYERS, BUSY, near) is near
    assert best_left(LAYERS, BUSY, frozenset(range(30))) == left


class Normed(nn.Module):
    """Layers with a norm, which is small and stays in HBM; autograd keeps views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(self.norm(x)) + x
        return x


def test_views_of_what_lives_in_hbm_keep_no_step_from_being_made_ahead() -> None:
    with tiermem.TierManager("cpu", hbm="2MiB", dram="32MiB") as tier:
        model = tier.wrap(Normed())
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=0.01)
        for _ in range(4):
            model(torch.ones(2, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        homes = {row.block: row.home for row in tier.residency() if row.role == "param"}
        small = [name for name, home in homes.items() if home == "hbm"]
        assert small and len(small) < len(homes)
        moved = [unit for unit in optimizer._units if unit.group.block.name not in small]
        assert optimizer.stepped_in_backward == 3 * len(moved) > 0
        assert optimizer.states_left > 0  # what never moves needs no room to be stepped ahead


def test_a_view_that_was_kept_once_keeps_steps_from_being_made_ahead_once() -> None:
    with warm(Net, replace(ROOMY, extra_hbm=1 << 15)) as pair:
        made = pair.optimizer.stepped_in_backward
        kept = next(pair.model.parameters()).data[:1]
        pair.backward(1)
        assert not ahead(pair)  # views would show it before step()
        pair.step()
        assert pair.optimizer.stepped_in_backward == made
        del kept
        for number in range(2, 4):
            pair.backward(number)
            assert ahead(pair) == units(pair)
            pair.step()
        pair.check()


def test_gradients_go_home_before_what_their_step_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where copies down hide behind compute; else they would be last in the queue."""
    begin = BlockSweep.__init__
    written: list[Block] = []
    drain = Transfers.drain

    def as_on_cuda(self: BlockSweep, manager: Any) -> None:
        begin(self, manager)
        self._dram = True

    def noted(self: Transfers, record: Record) -> None:
        if torch._C._current_graph_task_id() != -1:  # in backward
            written.append(record.block)
        drain(self, record)

    with warm() as pair:
        monkeypatch.setattr(BlockSweep, "__init__", as_on_cuda)
        pair.backward(0)
        pair.step()
        monkeypatch.setattr(Transfers, "drain", noted)
        pair.backward(1)
        assert ahead(pair) == units(pair)
        first = {block.id: number for number, block in reversed([*enumerate(written)])}
        last = {block.id: number for number, block in enumerate(written)}
        made = pair.optimizer._timing.ahead.provisional.units
        for unit in made:
            gradients = [first[found.block.id] for found in unit.grad_units()]
            others = [last.get(b.id, len(written)) for b in (unit.group.block, *unit.kept_blocks())]
            assert max(gradients) < min(others)
        pair.step()
        pair.check()
