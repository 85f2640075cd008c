"""Mixtures of which all experts are chosen: by whole tensors or layers where that is faster."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_ctrl_c import cut_short
from support_experts import VOCABULARY, build, check, gpt_oss, mixtral, twins

from tiermem.core.experts import Way, moved_whole
from tiermem.runtime.services import expert_way
from tiermem.runtime.transfers.packed_copies import PackedCopies

MOST, MANY, FEW = 64, 40, 1
_FILES = ["runtime/services/expert_", "core/experts", "nn/passes/runtime"]


def deep() -> Any:
    config = mixtral(4)
    config.num_hidden_layers = 16
    return config


def ids(tokens: int) -> torch.Tensor:
    return torch.arange(tokens)[None] % VOCABULARY


def scripted(tier: Any, monkeypatch: pytest.MonkeyPatch, whole: float, single: float) -> Any:
    """Makes the manager copy as beside a GPU, and passes take as long as is said."""
    manager, way = tier._manager, tier._runtime.experts.way
    manager.prefetcher.fetcher.beside = True
    real = manager.parts.pass_timer.clock
    took = {Way.TENSORS: whole, Way.LAYERS: whole, Way.EACH: single}

    class Clock(type(real)):  # type: ignore[misc]
        def seconds(self, begin: Any, end: Any) -> float:
            timed = way._timed[0] if way._timed else None
            if timed is not None and timed.begin is begin:
                return took[timed.way]
            return float(super().seconds(begin, end))

    monkeypatch.setattr(manager.parts.pass_timer, "_clock", Clock())
    monkeypatch.setattr(way, "_least", lambda *_: 1.0)
    return way


def goes(model: Any, plain: Any, tier: Any, tokens: int) -> bool:
    """Runs a pass, checks its bits, and returns whether it went by whole tensors or layers."""
    check(model, plain, ids(tokens))
    way = tier._runtime.experts.goes
    grouped = all(stack.grouped for stack in tier._runtime.experts.stacks.values())
    assert way in (Way.EACH, Way.TENSORS if grouped else Way.LAYERS)
    return way is not Way.EACH


@pytest.mark.parametrize("how", ["grouped_mm", "eager"])
@pytest.mark.parametrize(
    ("whole", "single", "then"),
    [
        (1.2, 1.0, [True] * 8),  # near what is possible
        (1.5, 2.0, [True] * 4 + [False] * 4 + [True] * 4),
        (2.0, 1.5, [True] * 4 + [False] * 8),
    ],
)
@pytest.mark.one_in(2)
def test_the_faster_way_is_found(
    monkeypatch: pytest.MonkeyPatch, whole: float, single: float, then: list[bool], how: str
) -> None:
    with twins(deep(), how, 0.13) as (model, plain, tier):
        scripted(tier, monkeypatch, whole, single)
        assert not goes(model, plain, tier, MANY)  # which are chosen is not known before
        assert [goes(model, plain, tier, MANY) for _ in then] == then


def test_many_tokens_for_each_expert_go_by_whole_tensors_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the first call on, among calls with one token; nothing is tried."""
    with twins(deep(), "grouped_mm", 0.13) as (model, plain, tier):
        scripted(tier, monkeypatch, 2.0, 1.0)
        for _ in range(4):
            assert goes(model, plain, tier, MOST)
            assert not goes(model, plain, tier, FEW)
        assert all(goes(model, plain, tier, MOST) for _ in range(6))


@pytest.mark.parametrize(("seconds", "unpacks"), [(100.0, False), (1e-12, True)])
def test_tensors_come_up_packed_only_where_a_pass_waits_for_their_copies(
    monkeypatch: pytest.MonkeyPatch, seconds: float, unpacks: bool
) -> None:
    """Two passes are timed; other kinds of calls go on as they did."""
    with twins(deep(), "grouped_mm", 0.13) as (model, plain, tier):
        scripted(tier, monkeypatch, seconds, 1.0)
        manager, found = tier._manager, list[bool]()
        packed, begin = manager.parts.transfers.packed, manager.begin_pass
        monkeypatch.setattr(PackedCopies, "__len__", lambda _: 1)

        def asked(*args: Any, **options: Any) -> None:
            found.append(packed.by_rows())
            begin(*args, **options)

        monkeypatch.setattr(manager, "begin_pass", asked)
        for _ in range(5):
            check(model, plain, ids(MOST))
        assert found == [True, True, *[unpacks] * 3]
        check(model, plain, ids(FEW))
        assert found[-1]


@pytest.mark.parametrize("piece", [1e-12, 1.0])
def test_many_tokens_that_choose_few_experts_are_found_out(
    monkeypatch: pytest.MonkeyPatch, piece: float
) -> None:
    """They go expert by expert then, unless that is more work for the host than for the link."""
    monkeypatch.setattr(expert_way, "_PIECE", piece)
    with twins(deep(), "grouped_mm", 0.13) as (model, plain, tier):
        scripted(tier, monkeypatch, 1.0, 2.0)
        with tier.materialize(model), torch.no_grad():
            for one in (model, plain):
                for layer in one.model.layers:
                    layer.mlp.gate.weight.zero_()  # the first two experts, all the same
        assert [goes(model, plain, tier, MOST) for _ in range(4)] == [True] + [piece > 0.5] * 3
        assert not goes(model, plain, tier, FEW)


def test_tensors_that_share_seats_are_copied_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than by whole layers, and whatever the routers say."""
    with twins(deep(), "grouped_mm", 0.13) as (model, plain, tier):
        scripted(tier, monkeypatch, 1.0, 2.0)
        moved, counters = [], tier._manager.parts.counters
        store = tier._runtime.experts
        lend, waited = store.tensors.lend, []

        def watched(*args: Any) -> Any:
            before = sum(counters.bytes_by_link().values())
            lent = lend(*args)
            waited.append(sum(counters.bytes_by_link().values()) - before)
            return lent

        monkeypatch.setattr(store.tensors, "lend", watched)
        for _ in range(6):
            before = sum(counters.bytes_by_link().values())
            check(model, plain, ids(MANY))
            moved.append(sum(counters.bytes_by_link().values()) - before)
        assert len(waited) == 5 * 32 and not any(waited)  # each has been copied ahead
        rows = {size: len(bank.seats) for size, bank in store.room.banks.items()}
        shared = [size * moved_whole(16, 4, count, abreast=False) for size, count in rows.items()]
        assert len(rows) == 2 and all(4 < count < 64 for count in rows.values())
        assert moved[3:] == [sum(shared)] * 3


def test_a_tensor_that_is_read_keeps_its_seats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiermem.nn.groups.rows._LONGEST", 0.0)
    with twins(deep(), "grouped_mm", 0.02) as (model, plain, tier):
        scripted(tier, monkeypatch, 1.0, 2.0)
        while not goes(model, plain, tier, MANY):
            pass
        store = tier._runtime.experts
        first, second = list(store.stacks.values())[1:3]  # what follows each other shares seats
        lent = store.lend(first, 0)
        assert lent is not None
        with tier.materialize(model), torch.no_grad():
            wanted = plain.model.layers[1].mlp.experts.gate_up_proj
            assert torch.equal(lent[1], wanted)
        for _ in range(2):  # other threads' calls
            check(model, plain, ids(MANY))
        assert torch.equal(lent[1], wanted)
        assert store.lend(second, 0) is None
        store.close()  # as for a block that has no place
        check(model, plain, ids(FEW))
        assert torch.equal(lent[1], wanted)
        store.tensors.take_back(lent[0])
        del lent
        check(model, plain, ids(MANY))
        assert not tier._manager.parts.evictor._orphans


def test_a_call_waits_for_another_threads_product(monkeypatch: pytest.MonkeyPatch) -> None:
    with twins(deep(), "grouped_mm", 0.02) as (model, plain, tier):
        scripted(tier, monkeypatch, 1.0, 2.0)
        while not goes(model, plain, tier, MANY):
            pass
        store = tier._runtime.experts
        first = list(store.stacks.values())[1]
        held, slept = [store.lend(first, 0)], []

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            store.tensors.take_back(held.pop()[0])

        double = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
        monkeypatch.setattr("tiermem.nn.groups.rows.time", double)
        moved = tier.stats().links["dram->hbm"].nbytes
        assert goes(model, plain, tier, MANY)
        assert len(slept) == 1 and not held
        most = sum(stack.block.nbytes for stack in store.stacks.values())
        assert tier.stats().links["dram->hbm"].nbytes - moved <= most


def test_biases_as_large_as_rows_have_seats_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config = gpt_oss(4, of=4)
    config.num_hidden_layers, config.layer_types = 12, ["full_attention"] * 12
    with twins(config, "grouped_mm", 0.3) as (model, plain, tier):
        way = scripted(tier, monkeypatch, 1.0, 2.0)
        monkeypatch.setattr(way, "_worth_a_trial", lambda **_: (Way.TENSORS, 1))
        assert [goes(model, plain, tier, MANY) for _ in range(4)] == [False] + [True] * 3
        assert 4096 in tier._runtime.experts.room.banks  # a row of one tensor, and all of a bias


def test_a_way_that_other_stacks_make_impossible_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with twins(deep(), "grouped_mm", 0.3) as (model, plain, tier):
        scripted(tier, monkeypatch, 1.0, 2.0)
        others = [build(mixtral(experts), "grouped_mm") for experts in (4, 8)]
        tier.wrap(others[0])
        with torch.no_grad():
            others[0](ids(MANY))
        assert [goes(model, plain, tier, MANY) for _ in range(5)] == [False] + [True] * 4
        tier.unwrap(others[0])
        tier.wrap(others[1])  # as many layers, of more experts
        with torch.no_grad():
            others[1](ids(MANY))
        assert [goes(model, plain, tier, MANY) for _ in range(3)] == [False] * 3
        assert tier._runtime.experts.goes is Way.EACH


@pytest.mark.parametrize("within", [False, True], ids=["between", "within"])
def test_a_room_that_has_given_way_becomes_as_large_again(
    monkeypatch: pytest.MonkeyPatch, within: bool
) -> None:
    """And whole tensors come up again, also if that was in a pass that went so."""
    with twins(deep(), "grouped_mm", 0.13) as (model, plain, tier):
        scripted(tier, monkeypatch, 1.0, 2.0)
        while not goes(model, plain, tier, MANY):
            pass
        store = tier._runtime.experts
        if within:

            def close(*_: Any) -> None:
                store.give_way()

            closing = model.model.layers[4].register_forward_pre_hook(close)
            check(model, plain, ids(MANY))
            closing.remove()
        else:
            store.give_way()
        assert store.room.share == 0.5
        assert not goes(model, plain, tier, MANY)
        for _ in range(9):
            last = goes(model, plain, tier, MANY)
        assert store.room.share == 1.0 and last


def test_stacks_that_are_written_are_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with twins(deep(), "grouped_mm", 0.13) as (model, plain, tier):
        scripted(tier, monkeypatch, 1.0, 2.0)
        for layer in range(0, 16, 3):
            assert goes(model, plain, tier, MANY) or layer < 6
            name = f"model.layers.{layer}.mlp.experts.gate_up_proj"
            with tier.materialize(model), torch.no_grad():
                for one in (model, plain):
                    one.get_parameter(name)[1].mul_(1.5)
            check(model, plain, ids(MANY))


def test_calls_among_others_go_expert_by_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are often chosen stay then; and few tokens choose few."""
    with twins(deep(), "grouped_mm", 0.13) as (model, plain, tier):
        scripted(tier, monkeypatch, 1.0, 2.0)
        for _ in range(3):
            assert not goes(model, plain, tier, MANY)
            assert [goes(model, plain, tier, FEW) for _ in range(3)] == [False] * 3
        assert not goes(model, plain, tier, MANY)
        assert goes(model, plain, tier, MANY)
        assert not goes(model, plain, tier, FEW)


def test_an_exception_leaves_no_pass_half_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    with twins(deep(), "grouped_mm", 0.13) as (model, plain, tier), torch.no_grad():
        way = scripted(tier, monkeypatch, 1.0, 2.0)
        for _ in range(2):
            goes(model, plain, tier, MANY)
        with pytest.raises(Exception, match="index"):
            model(torch.tensor([[VOCABULARY + 5]]))
        assert way._open is None
        assert not goes(model, plain, tier, MANY)
        assert goes(model, plain, tier, MANY)


@pytest.mark.parametrize("first", [1, 60, 200])
def test_ctrl_c_where_the_way_is_chosen(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """Everything is right again with the next call, whichever way that goes."""
    with twins(deep(), "grouped_mm", 0.13) as (model, plain, tier), torch.no_grad():
        scripted(tier, monkeypatch, 1.5, 2.0)
        for number in range(first, first + 700, 97):
            check(model, plain, ids(MANY))
            where = cut_short(lambda: model(ids(MANY)), number, _FILES)
            check(model, plain, ids(MANY))
            check(model, plain, ids(FEW))
            table = tier._manager.parts.table
            table.check()
            assert sum(r.block.name == "expert room" for r in table) <= 1, where
