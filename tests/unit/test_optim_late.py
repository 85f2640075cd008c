"""State that steps ahead leave as it was: less goes down the link, and nobody can tell."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from support_ahead import leave_no_state, warm
from support_late_down import LateDownEngine
from support_late_state import LAYERS, NBYTES, WIDTH, Pair, layers, pair_of
from support_nn import assert_same
from torch import nn

import tiermem
from tiermem.core.block import Block, Extent, Role, Tier
from tiermem.core.residency import ResidencyTable
from tiermem.errors import InvariantError
from tiermem.optim.provisional import Made
from tiermem.optim.rules.plainstep import run
from tiermem.optim.rules.probe import StateProbe
from tiermem.optim.units import late
from tiermem.optim.units.late import LateState
from tiermem.optim.units.undo import Undo
from tiermem.runtime import assembly
from tiermem.runtime.transfers.block_io import view_of
from tiermem.runtime.transfers.deferred import Deferred, DeferredWork


def moved(pair: Pair) -> tuple[int, int]:
    """Returns the percent of the weights' bytes that two steps copy up and down."""
    pair.tier.reset_stats()
    pair.step(2)
    links = pair.tier.stats().links
    return tuple(50 * links[way].nbytes // NBYTES for way in ("dram->hbm", "hbm->dram"))  # type: ignore[return-value]


def test_half_of_the_units_leave_their_state_in_each_round_by_turns() -> None:
    with pair_of() as pair:
        pair.step(3)
        count, found = len(pair.optimizer._units), []
        for _ in range(4):
            pair.step()
            found.append(set(pair.late))
        assert [len(late) for late in found] == [count // 2] * 4
        assert found[0] == found[2] and found[1] == found[3] and not found[0] & found[1]
        assert pair.optimizer.states_left >= 4 * count // 2
        assert not pair.ahead.provisional.drops
        pair.check()


def test_a_quarter_less_goes_down_and_an_eighth_more_comes_up() -> None:
    with pair_of() as pair:
        pair.step(6)
        up, down = moved(pair)
        leave_no_state(pair.optimizer)
        pair.step(4)
        up_before, down_before = moved(pair)
        assert not pair.late
        assert down < down_before - 75
        assert up < up_before + 80


@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("rounds", [1, 2])
def test_whoever_looks_at_the_state_finds_it_up_to_date(clear: bool, rounds: int) -> None:
    """Whether the gradients lie where they were, or were cleared since."""
    with pair_of() as pair:
        pair.step(4)
        pair.step(rounds, clear=clear)
        assert pair.late
        pair.check()
        assert not pair.late
        pair.step(3)
        pair.check()


LOOKS: dict[str, Any] = {
    "finish": lambda pair: pair.optimizer.finish(),
    "a copy of the state dict": lambda pair: copy.deepcopy(pair.optimizer.state_dict()),
    "state": lambda pair: pair.optimizer.state,
    "a block": lambda pair: pair.tier._manager.read(
        next(unit.block for unit in pair.optimizer._units if unit.late is not None)
    ),
    "an acquired block": lambda pair: _acquire(pair),
}


def _acquire(pair: Pair) -> None:
    block = next(unit.block for unit in pair.optimizer._units if unit.late is not None)
    manager = pair.tier._manager
    manager.acquire(block)
    manager.release(block)


@pytest.mark.parametrize("look", sorted(LOOKS))
def test_a_look_brings_it_up_to_date(look: str) -> None:
    with pair_of() as pair:
        pair.step(5)
        before = len(pair.late)
        LOOKS[look](pair)
        assert len(pair.late) == (before - 1 if "block" in look else 0)
        pair.step(2)
        pair.check()


CHANGES: dict[str, Any] = {
    "added to": lambda pair: pair.backward(),
    "set to zero": lambda pair: [
        optimizer.zero_grad(set_to_none=False) for optimizer in (pair.own, pair.optimizer)
    ],
    "written": lambda pair: [model[3].weight.grad.mul_(2) for model in (pair.plain, pair.model)],
    "clipped": lambda pair: [
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3) for model in (pair.plain, pair.model)
    ],
    "replaced": lambda pair: [
        setattr(model[3].weight, "grad", torch.ones(WIDTH, WIDTH))
        for model in (pair.plain, pair.model)
    ],
    "cleared in part": lambda pair: [
        setattr(model[3].weight, "grad", None) for model in (pair.plain, pair.model)
    ],
}


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_gradient_that_changes_after_its_step_changes_nothing_of_it(change: str) -> None:
    with pair_of() as pair:
        for _ in range(2):
            pair.step(4)
            pair.step(clear=False)
            assert pair.late
            CHANGES[change](pair)
            pair.check()
            pair.step(2)
            pair.check()


class Halves(nn.Module):
    """Two matrices of one block, of which the first is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.whole = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) if self.whole else x)


@pytest.mark.parametrize("clears", [False, True])
def test_gradients_that_are_zeros_by_now_are_none_of_the_step_before(clears: bool) -> None:
    """A unit that has them, as no other gradient came, is stepped with the rest of its block."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(Halves() for _ in range(LAYERS // 2)))
    model = copy.deepcopy(plain)
    cls, settings = torch.optim.AdamW, {"lr": 0.01}
    with tiermem.TierManager("cpu", hbm=NBYTES * 2 // 3, dram=16 << 20) as tier:
        tier.wrap(model, blocks=[name for name, _ in model.named_children()])
        both = [
            (plain, cls(plain.parameters(), **settings)),
            (model, tier.optimizer(model, cls, **settings)),
        ]
        for number in range(12):
            for net, optimizer in both:
                for at, layer in enumerate(net):
                    layer.whole = number < 2 or (number + at) % 3 > 0
                x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
                net(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=clears)
        assert both[1][1].states_left > LAYERS
        assert_same(dict(plain.state_dict()), dict(model.state_dict()), "weights")


def test_a_dropped_step_leaves_what_was_late_late() -> None:
    with pair_of() as pair:
        pair.step(5)
        late = pair.late
        pair.backward()
        float(pair.model[2].weight.grad.sum())
        assert pair.ahead.provisional.drops == 1
        assert pair.late == late
        for optimizer in (pair.own, pair.optimizer):
            optimizer.step()
            optimizer.zero_grad()
        pair.step(2)
        pair.check()


def test_a_model_taken_out_of_the_tiers_leaves_the_state_complete() -> None:
    with pair_of() as pair:
        pair.step(5)
        assert pair.late
        pair.tier.unwrap(pair.model)
        assert not pair.late
        assert_same(pair.own.state_dict()["state"], pair.optimizer.state_dict()["state"], "state")


def test_weights_of_which_views_are_held_are_not_needed_for_it() -> None:
    with pair_of() as pair:
        pair.step(5)
        assert pair.late
        views = [layer.weight.data[1:] for layer in pair.model[:5]]
        assert_same(pair.own.state_dict()["state"], pair.optimizer.state_dict()["state"], "state")
        del views
        pair.step(2)
        pair.check()


def test_gradients_are_at_home_where_they_were_once_spare_blocks_go() -> None:
    """So that the room of those is in one piece again."""
    with pair_of() as pair:
        manager = pair.tier._manager
        pair.step()
        blocks = [unit.grad_units()[0].block for unit in pair.optimizer._units]
        before = [manager.record(block).home_extent for block in blocks]
        pair.step(4)  # by then one half has others
        assert [manager.record(block).home_extent for block in blocks] != before
        assert manager.parts.homes._reclaim()
        assert [manager.record(block).home_extent for block in blocks] == before
        pair.step(2)
        pair.check()


def test_state_is_looked_at_in_inference_mode() -> None:
    with pair_of() as pair:
        pair.step(5)
        with torch.inference_mode():
            pair.optimizer.finish()
        assert not pair.late
        pair.step(2)
        pair.check()


def test_closing_gives_the_spare_blocks_back() -> None:
    with pair_of() as pair:
        pair.step(5)
        rows = [row.block for row in pair.tier.residency() if row.block.endswith(" before")]
        assert len(rows) == len(pair.optimizer._units)
        pair.optimizer.close()
        assert not [row for row in pair.tier.residency() if row.block.endswith(" before")]
        assert not pair.tier._manager.parts.deferred.standing
        assert not pair.tier._runtime.grads.kept_for


def test_spare_blocks_go_where_no_state_is_left_any_more() -> None:
    with pair_of() as pair:
        pair.step(4)
        used = pair.tier._manager.parts.homes.dram.used
        leave_no_state(pair.optimizer)
        pair.step(3)
        assert pair.tier._manager.parts.homes.dram.used == used - NBYTES
        pair.check()


def test_no_room_is_taken_that_a_home_needs() -> None:
    """Spare blocks make way, and what is late is brought up to date before."""
    with pair_of(dram=9 * NBYTES) as pair:
        pair.step(5)
        assert pair.late
        other = pair.tier.wrap(nn.Sequential(layers(), layers(), layers()))
        assert not pair.late
        other(torch.ones(1, WIDTH))
        pair.step(3)
        pair.check()


@pytest.mark.parametrize("budget", [5, 6, 7, 8])
def test_where_dram_is_short_less_state_is_left(budget: int) -> None:
    with pair_of(dram=budget * NBYTES + 4096 * LAYERS) as pair:
        pair.step(8)
        ahead = pair.ahead.provisional
        assert (ahead.left < 7 * LAYERS // 2 - LAYERS) is (budget < 8)
        pair.check()


KINDS = [
    (torch.optim.AdamW, {"weight_decay": 0.1}, True),
    (torch.optim.AdamW, {"amsgrad": True}, True),
    (torch.optim.Adam, {}, True),
    (torch.optim.Adam, {"weight_decay": 0.1}, False),
    (torch.optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}, True),
    (torch.optim.NAdam, {}, True),
    (torch.optim.RAdam, {}, True),
    (torch.optim.Adamax, {}, True),
    (torch.optim.Adamax, {"weight_decay": 0.1}, False),
    (torch.optim.Adagrad, {}, True),
    (torch.optim.Adadelta, {}, True),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}, True),
    (torch.optim.SGD, {"momentum": 0.9}, True),
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}, False),
    (torch.optim.ASGD, {}, False),
]


@pytest.mark.parametrize(("cls", "settings", "ignores"), KINDS)
def test_whether_weights_come_into_the_state(cls: Any, settings: Any, ignores: bool) -> None:
    probe = StateProbe(partial(cls, **settings), torch.device("cpu"), sparse=False)
    param = nn.Parameter(torch.ones(3, 3))
    full = cls([param], **settings).param_groups[0]
    named = {key: value for key, value in full.items() if key != "params"}
    assert probe.ignores_weights(param, 0, named) is ignores


@pytest.mark.parametrize(("cls", "settings", "ignores"), KINDS)
@pytest.mark.one_in(2)
def test_every_class_keeps_its_bits(cls: Any, settings: Any, ignores: bool) -> None:
    with pair_of(cls, settings) as pair:
        pair.step(6)
        assert bool(pair.ahead.provisional.left) is (ignores and bool(pair.ahead.provisional.total))
        pair.check()


def test_a_decay_that_sets_in_is_seen() -> None:
    """From then on the state is made with the weights."""
    with pair_of(torch.optim.Adam, {"lr": 0.01}) as pair:
        pair.step(5)
        assert pair.late
        for optimizer in (pair.own, pair.optimizer):
            optimizer.param_groups[0]["weight_decay"] = 0.5
        pair.step(4)
        assert not pair.late
        pair.check()


def test_a_class_that_is_not_torchs_leaves_none() -> None:
    class Mine(torch.optim.AdamW):
        pass

    with pair_of(Mine, {"lr": 0.01}) as pair:
        pair.step(5)
        assert not pair.ahead.provisional.left
        pair.check()


def test_masters_and_bfloat16() -> None:
    with warm(*(), master_dtype=torch.float32) as pair:
        for number in range(5):
            pair.backward(number)
            pair.step()
        assert pair.optimizer._timing.ahead.provisional.left
        pair.check()


def test_gradients_are_kept_also_where_copies_down_are_late(monkeypatch) -> None:
    """A gradient that is handed over may be on its way home still."""
    monkeypatch.setattr(assembly, "HostCopyEngine", LateDownEngine)
    with pair_of() as pair:
        pair.step(12)
        assert pair.ahead.provisional.left
        pair.check()


def test_a_gradient_that_was_handed_over_is_at_home(monkeypatch) -> None:
    monkeypatch.setattr(assembly, "HostCopyEngine", LateDownEngine)
    with pair_of(hbm=3 * NBYTES) as pair:
        pair.step(4)
        pair.backward()
        pair.own.step()
        pair.optimizer.step()
        kept = {name: p.grad.clone() for name, p in pair.plain.named_parameters()}
        pair.own.zero_grad()
        pair.optimizer.zero_grad()
        parts, seen = pair.tier._manager.parts, 0
        for unit in pair.optimizer._units:
            if unit.late is not None:
                block = unit.late.block
                parts.copy.wait(parts.transfers.home_ready.get(block.id))
                extent = parts.table[block.id].home_extent
                (spec,) = block.tensors
                parts.homes.open(extent)
                found = view_of(parts.homes.arena.bytes_of(extent), spec)
                assert_same(kept[unit.entries[0].name], found, unit.name)
                seen += 1
        assert seen == LAYERS // 2
        pair.check()


def test_an_update_that_fails_is_made_at_the_next_look() -> None:
    with pair_of() as pair:
        pair.step(5)
        unit = next(unit for unit in pair.optimizer._units if unit.late is not None)
        count = len(pair.late)

        def fail(_: Any) -> None:
            raise torch.OutOfMemoryError("no memory")

        missed = unit.late
        missed.make = fail
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                pair.optimizer.state_dict()
            assert unit.late is not None
        with pytest.raises(torch.OutOfMemoryError):
            LOOKS["an acquired block"](pair)
        del missed.make
        assert 0 < len(pair.late) <= count
        pair.step(2)
        pair.check()


def test_an_update_that_fails_half_way_leaves_nothing(monkeypatch) -> None:
    def half_way(optimizer: Any) -> None:
        run(optimizer)
        raise torch.OutOfMemoryError("no memory")

    with pair_of() as pair:
        pair.step(5)
        with monkeypatch.context() as patch:
            patch.setattr(late, "run", half_way)
            with pytest.raises(torch.OutOfMemoryError):
                pair.optimizer.finish()
        assert pair.late
        pair.check()


def test_a_step_that_waits_for_late_state_is_made_after_its_update() -> None:
    with pair_of() as pair:
        pair.step(5)
        pair.ahead._left._ids |= {id(group) for group in pair.tier._runtime.groups}
        pair.step()
        assert pair.late and pair.optimizer._units.owed
        pair.optimizer.state_dict()
        pair.check()
        pair.step(3)
        pair.check()


def test_state_that_is_left_is_written_in_place_once_its_copy_home_is_made(monkeypatch) -> None:
    monkeypatch.setattr(assembly, "HostCopyEngine", LateDownEngine)
    with pair_of() as pair:
        pair.step(5)
        unit = next(unit for unit in pair.optimizer._units if unit.late is None)
        manager, provisional = pair.tier._manager, pair.ahead.provisional
        assert provisional.reserve(unit.group, [unit])
        manager.acquire(unit.group.block)
        provisional._shadows.turn([unit.group.block])  # which makes earlier copies as well
        manager.acquire(unit.block)
        manager.release(unit.block, dirty=True)
        manager.parts.transfers.drain(manager.record(unit.block))
        copy_home = manager.parts.transfers.home_ready[unit.block.id]
        assert not copy_home.made
        numbers = Undo()
        leaves = LateState(unit, pair.tier._runtime, [], numbers, unit.block)
        made = Made(unit, None, numbers, leaves=leaves)
        provisional._keep(unit.group, made, unit.kept_blocks())
        assert copy_home.made
        manager.release(unit.group.block)
        provisional._shadows.put_back()
        pair.check()


def test_a_unit_that_changes_sides_takes_the_state_along_complete() -> None:
    with pair_of() as pair:
        pair.step(5)
        for unit in pair.optimizer._units:
            unit.move(None, unit.plain.make)
        assert not pair.late
        pair.check()


# -- what is under it ----------------------------------------------------------


def table_of_two() -> ResidencyTable:
    table = ResidencyTable(4 * 4096)
    for number in range(2):
        block = Block(number, f"b{number}", Role.GRAD, 4096)
        table.add(block, Tier.DRAM, Extent(number * 4096, 4096), defined=number == 0)
    return table


def test_a_home_is_handed_over() -> None:
    table, taken = table_of_two(), dict[int, None]()
    table.begin_fill(0, table.hbm.allocate(4096) or pytest.fail("no room"))
    table.end_fill(0, ok=True)
    table.hand_home_over(0, 1, taken)
    assert taken == {1: None}
    assert table[1].home_extent == Extent(0, 4096) and table[0].home_extent == Extent(4096, 4096)
    assert table[1].defined and not table[0].defined
    table.check()
    table.discard(0)
    table.check()
    assert table.begin_fill(
        1, table.hbm.allocate(4096) or pytest.fail("no room")
    ).source_extent == (Extent(0, 4096))


def test_what_is_in_use_is_not_handed_over() -> None:
    table = table_of_two()
    with pytest.raises(InvariantError, match="b1"):
        table.hand_home_over(1, 0, {})  # the one holds nothing, the other does
    table.begin_fill(0, table.hbm.allocate(4096) or pytest.fail("no room"))
    with pytest.raises(InvariantError, match="handed over"):
        table.hand_home_over(0, 1, {})
    table.end_fill(0, ok=True)
    table.lease(0)
    with pytest.raises(InvariantError, match="handed over"):
        table.hand_home_over(0, 1, {})
    table.check()


def test_work_that_stands_is_done_once_for_all_its_blocks() -> None:
    deferred, done = DeferredWork(), []

    def work() -> None:
        deferred.cancel(debt)
        done.append(1)

    debt = Deferred("late", [1, 2], work)
    deferred.stand(debt)
    assert not deferred and 1 not in deferred  # passes need not know of it
    deferred.pay(3)
    assert not done
    deferred.pay(2)
    deferred.pay(1)
    assert done == [1] and not deferred.standing
    deferred.stand(debt)
    deferred.pay_standing()
    assert done == [1, 1]
