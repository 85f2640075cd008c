"""Loops that are laid out: replayed once their times are known, decided where that cannot be."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Hashable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_loop import PAGE, Loop, loop
from support_runtime import EvenClock

from tiermem.core.block import Block, Role
from tiermem.core.layout import TensorShape
from tiermem.runtime.lookahead.plan_maker import PlanMaker
from tiermem.runtime.memory.slots import Slot
from tiermem.runtime.metrics.pass_timer import PassTimer


def arranged(made: Loop) -> bool:
    """Whether the pass under way goes as it was laid out."""
    run = made.manager.replay.run
    return run is not None and run.arranged


def ups(events: list[tuple[str, int]]) -> int:
    return sum(what == "up" for what, _ in events)


@pytest.mark.parametrize("large", [0, 4])
def test_the_pass_after_those_that_were_measured_is_replayed(large: int) -> None:
    with loop(12, 6 + 2 * (large > 0), depth="auto", large=large) as made:
        for _ in range(2):
            made.go_round()
            assert not arranged(made)
        for _ in range(5):
            before = made.manager.stats().misses
            made.go_round()
            assert arranged(made)
            assert made.manager.stats().misses == before
        made.check()


def test_plans_are_made_as_passes_end_once_they_can_be_foreseen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pass begins with what was decided before: neither measurements nor plans hold it up."""
    with loop(12, 6, depth="auto") as made:
        manager = made.manager
        manager.parts.pass_timer.estimates.flops = 1e12
        done: list[str] = []
        for what, name in ((PlanMaker, "make"), (PassTimer, "harvest")):
            real = getattr(what, name)

            def noted(*args: Any, real: Any = real, name: str = name, **kwargs: Any) -> Any:
                done.append(name)
                return real(*args, **kwargs)

            monkeypatch.setattr(what, name, noted)
        begins, ends = [], []
        for _ in range(6):
            done.clear()
            manager.begin_pass("loop", range(1, 13), load=64)
            begins.append(list(done))
            for number in range(12):
                made.use(number)
            done.clear()
            manager.end_pass()
            ends.append(list(done))
        assert begins[:2] == [["make"], ["harvest", "make"]]
        assert begins[2:] == [[]] * 4
        assert ends == [[], [], ["harvest", "make"], [], [], []]
        made.check()


@pytest.mark.parametrize("decided", [False, True])
def test_a_plan_that_only_times_have_changed_for_waits_for_the_end_of_the_pass(
    decided: bool,
) -> None:
    with loop(12, 6, depth="auto") as made:
        manager = made.manager
        for _ in range(5):
            made.go_round()
            manager.end_pass()
        before = manager.prefetcher.outlook.made_of
        manager.parts.pass_timer.estimates.version += 1
        if decided:
            manager.replay.repair()
            manager.replay.arranger._fetcher = SimpleNamespace(beside=False)  # type: ignore[assignment]
        made.go_round()
        assert arranged(made) is not decided and manager.replay.repeating is not decided
        assert manager.prefetcher.outlook.made_of == before
        manager.end_pass()
        assert manager.prefetcher.outlook.made_of != before


class ClockOfStreams(EvenClock):
    """Stamps of threads with a stream each: what was set later may have come earlier."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._draw = random.Random(seed)

    def stamp(self) -> int:
        return super().stamp() - self._draw.choice((0, 0, 300_000, 1_000_000))


@pytest.mark.parametrize("large", [0, 4])
def test_times_between_streams_do_not_spoil_plans(large: int) -> None:
    for seed in range(4):
        with loop(8, 3 + 2 * (large > 0), depth="auto", large=large) as made:
            made.manager.parts.pass_timer._clock = ClockOfStreams(seed)
            for number in range(12):
                made.manager.begin_pass(f"loop {number % 3}", load=1 + number % 2)
                for block in range(8):
                    made.use(block)
                made.manager.end_pass()
            made.check()
            rows = made.manager.parts.pass_timer.rows(made.manager.parts.table)
            assert rows and all(row.compute_seconds >= 0.0 for row in rows)


def test_what_stays_is_not_moved_again() -> None:
    with loop(12, 6, depth="auto") as made:
        for _ in range(4):
            made.go_round()
        stay = len(made.manager.parts.evictor.residents)
        assert stay >= 3
        for _ in range(3):
            assert ups(made.go_round()) == 12 - stay


@settings(max_examples=examples(40), deadline=None)
@given(
    blocks=st.integers(3, 10),
    slots=st.integers(2, 8),
    large=st.integers(0, 4),
    seed=st.integers(0, 1 << 20),
)
def test_any_order_finds_its_blocks(blocks: int, slots: int, large: int, seed: int) -> None:
    rng = random.Random(seed)
    order = list(range(blocks)) + rng.choices(range(blocks), k=rng.randrange(blocks))
    with loop(blocks, slots + 2 * (large > 0), depth="auto", large=large) as made:
        for _ in range(3):
            rng.shuffle(order)
            for _ in range(7):
                assert ups(made.go_round(order)) <= len(order) + blocks
        made.check()


@settings(max_examples=examples(40), deadline=None)
@given(
    blocks=st.integers(4, 10),
    slots=st.integers(3, 8),
    large=st.integers(0, 4),
    seed=st.integers(0, 1 << 20),
)
def test_what_is_written_in_between_is_not_lost(
    blocks: int, slots: int, large: int, seed: int
) -> None:
    rng = random.Random(seed)
    usual = list(range(blocks))
    with loop(blocks, slots + 2 * (large > 0), depth="auto", large=large) as made:
        for _ in range(4):
            for _ in range(4):
                made.go_round(usual)
            made.manager.begin_pass("other")
            for number in rng.sample(usual, rng.randrange(1, blocks)):
                made.use(number, write=rng.random() < 0.5)
        made.check()


def test_another_order_is_decided_once_and_laid_out_then() -> None:
    with loop(10, 5, depth="auto") as made:
        for _ in range(4):
            made.go_round()
        turned = list(reversed(range(10)))
        made.go_round(turned)
        assert not arranged(made)
        for _ in range(4):
            made.go_round(turned)
        assert arranged(made)
        made.check()


def test_orders_that_change_all_the_time_are_given_up() -> None:
    """Nothing is gained where passes break off, so ever fewer are laid out."""
    with loop(10, 5, depth="auto") as made:
        rng, begun = random.Random(3), 0
        for _ in range(60):
            order = list(range(10))
            rng.shuffle(order)
            made.manager.begin_pass("loop")
            begun += arranged(made)
            for number in order:
                made.use(number)
        assert begun <= 8
        made.check()


def held(made: Loop, block: Block) -> Slot:
    return made.manager.acquire(block)


def test_a_block_in_the_way_that_cannot_leave_is_no_obstacle_to_the_loop() -> None:
    with loop(10, 6, depth="auto") as made:
        for _ in range(4):
            made.go_round()
        streams = [
            block
            for block in made.blocks
            if block.id not in made.manager.parts.evictor.residents
            and made.manager.record(block).usable
        ]
        slot = held(made, streams[0])
        for _ in range(6):
            made.go_round()
            assert slot.bytes.eq(made.values[made.blocks.index(streams[0])]).all()
        made.manager.release(streams[0])
        for _ in range(80):
            made.go_round()
            if arranged(made):
                break
        assert arranged(made)
        made.check()


def test_an_exception_ends_the_layout_and_it_is_made_again() -> None:
    with loop(10, 5, depth="auto") as made:
        for _ in range(4):
            made.go_round()
        made.manager._repair()
        for _ in range(5):
            made.go_round()
        assert arranged(made)
        made.check()


def test_a_user_who_says_how_far_to_fetch_ahead_is_heard() -> None:
    with loop(10, 5, depth=2) as made:
        for _ in range(6):
            made.go_round()
            assert not arranged(made)


FORWARD, BACKWARD, STEP = ("forward",), ("backward", "forward"), ("optimizer", 0)


def there_and_back(blocks: int, *others: Hashable) -> dict[Hashable, list[int]]:
    """Forward and backward, as adapters on frozen weights have them, and passes that use none."""
    order = [*range(blocks)]
    return {FORWARD: order, BACKWARD: order[::-1], **{other: [] for other in others}}


def settled(made: Loop, passes: Mapping[Hashable, list[int]], rounds: int) -> int:
    """Goes some rounds, waiting for disks; returns how many blocks came up in the last one."""
    found = 0
    for _ in range(rounds):
        found = ups(made.sweep(passes))
        made.manager.flush()
    return found


@pytest.mark.parametrize("home", ["dram", "file"])
@pytest.mark.parametrize("slots", [5, 8])
@pytest.mark.parametrize("step", [False, True])
def test_forward_and_backward_are_laid_out_as_one_round(
    slots: int, step: bool, home: str, tmp_path: Path
) -> None:
    """From the third round on, and they move no more than what is decided, and recorded."""
    nvme = tmp_path if home == "file" else None
    passes = there_and_back(12, *[STEP][:step])
    with loop(12, slots, depth="auto", nvme=nvme) as made:
        settled(made, passes, 2)
        assert not arranged(made)
        settled(made, passes, 1)
        before = made.manager.stats().misses
        for _ in range(5):
            for name, order in passes.items():
                came = ups(made.sweep({name: order}))
                assert arranged(made)
                assert came == (12 - slots if order else 0)
        after = made.manager.stats()
        assert after.misses == before
        made.check()
    (tmp_path / "other").mkdir()
    with loop(12, slots, depth="auto", nvme=nvme and tmp_path / "other") as made:
        made.manager.replay.arranger._fetcher = SimpleNamespace(beside=False)  # type: ignore[assignment]
        assert settled(made, passes, 20) >= 2 * (12 - slots)
        assert made.manager.replay.repeating and not arranged(made)


@settings(max_examples=examples(40), deadline=None)
@given(
    blocks=st.integers(3, 10),
    slots=st.integers(2, 8),
    large=st.integers(0, 4),
    from_file=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_rounds_of_several_passes_find_their_blocks(
    blocks: int, slots: int, large: int, from_file: bool, seed: int
) -> None:
    """Whatever their orders are; some change in between, some write."""
    rng = random.Random(seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        loop(
            blocks,
            slots + 2 * (large > 0),
            depth="auto",
            large=large,
            nvme=Path(folder) if from_file else None,
        ) as made,
    ):
        for _ in range(3):
            passes = there_and_back(blocks, STEP)
            for name in rng.sample([*passes], rng.randrange(3)):
                order = passes[name] or [*range(blocks)]
                rng.shuffle(order)
                passes[name] = order[rng.randrange(len(order)) :]
            for _ in range(6):
                settled(made, passes, 1)
                if rng.random() < 0.2:
                    made.use(rng.randrange(blocks), write=rng.random() < 0.5)
        made.check()


def test_a_pass_that_uses_only_what_stays_may_come_at_any_time() -> None:
    """As an optimizer's does, after one backward or after several."""
    with loop(12, 6, depth="auto") as made:
        passes = there_and_back(12)
        for _ in range(8):
            made.sweep(passes)
        made.sweep({STEP: []})  # nobody knows yet what it uses
        settled(made, passes, 2)
        arranger, anew = made.manager.replay.arranger, list[Any]()
        arranger._arranged = anew.append  # type: ignore[method-assign, assignment]
        for often in (1, 3, 2, 1, 1, 4):
            made.sweep({STEP: []})
            assert arranged(made)
            for _ in range(often):
                assert ups(made.sweep(passes)) == 2 * (12 - 6)
                assert arranged(made)
        assert not anew  # HBM is not laid out again for it
        made.check()


def test_what_is_fetched_for_the_pass_after_next_is_not_for_nothing() -> None:
    """A pass that uses only what stays lies between the fetch and the use."""
    with loop(12, 5, depth="auto") as made:
        passes = {"a": [*range(6)], STEP: [], "b": [*range(6, 12)]}
        settled(made, passes, 4)
        before = made.manager.stats()
        for _ in range(6):
            for name, order in passes.items():
                made.sweep({name: order})
                assert arranged(made)
        after = made.manager.stats()
        assert after.prefetch_wasted == before.prefetch_wasted and after.misses == before.misses
        made.check()


def test_a_round_that_breaks_off_again_and_again_is_decided() -> None:
    """The first time may be the last, as where the first backward makes gradients."""
    with loop(12, 6, depth="auto") as made:
        passes = there_and_back(12)
        settled(made, passes, 4)
        assert arranged(made)
        odd = {name: [*order[:6], order[0], *order[6:]] for name, order in passes.items()}
        for again in (True, False):
            for name in passes:
                made.sweep({name: odd[name] if again else passes[name]})
                assert not arranged(made)
        settled(made, passes, 6)
        assert arranged(made)
        made.check()


def test_a_file_whose_blocks_have_not_all_room_in_dram_is_not_laid_out(tmp_path: Path) -> None:
    with loop(12, 6, depth="auto", nvme=tmp_path) as made:
        manager = made.manager
        dram = manager.parts.homes.dram
        dram.allocate(dram.capacity - dram.used - 4 * PAGE)
        laid_out = []
        begin = manager.replay.arranger.begin

        def beginning(*arguments: Any) -> Any:
            found = begin(*arguments)
            laid_out.append(found is not None)
            return found

        manager.replay.arranger.begin = beginning  # type: ignore[method-assign]
        settled(made, {"loop": [*range(12)]}, 6)
        assert not any(laid_out)
        made.check()


@pytest.mark.parametrize("stays", [True, False])
def test_what_was_written_does_not_keep_a_loop_from_being_laid_out(stays: bool) -> None:
    with loop(12, 6, depth="auto") as made:
        for _ in range(5):
            made.go_round()
        residents = made.manager.parts.evictor.residents
        chosen = [n for n, block in enumerate(made.blocks) if (block.id in residents) == stays]
        for number in chosen:
            made.use(number, write=True)
            made.go_round()  # what was written may be in the way, or leave: it is decided
            for _ in range(3):
                made.go_round()
                assert arranged(made)
        made.check()


def test_what_was_written_is_written_home_before_hbm_is_arranged() -> None:
    with loop(12, 6, depth="auto") as made:
        for number in range(11):  # the last one would be used once more in a row
            for _ in range(5):
                made.go_round()
            assert arranged(made)
            made.use(number, write=True)  # ends the replay
            made.go_round()
            assert not arranged(made)
            made.use(number, write=True)
            made.go_round()
            assert arranged(made)
        made.check()


def test_a_pass_that_uses_only_what_another_one_holds_is_planned() -> None:
    """An outer module's parameter stays; a call that uses nothing else leaves nothing to plan."""
    with loop(12, 6, depth="auto") as made:
        manager = made.manager
        for short in [False, False, False, True, True, False, False, True, True]:
            manager.begin_pass(short)
            if short:
                made.use(0)
            else:
                manager.acquire(made.blocks[0])
                for number in range(1, 12):
                    made.use(number)
                manager.release(made.blocks[0])
            manager.end_pass()
        made.check()


def test_a_plan_that_cannot_be_laid_out_is_not_kept_for_a_loop_that_can() -> None:
    """By a model that leaves out what it waits for it looks as good, and every round has misses."""
    with loop(7, 5, depth="auto", large=1) as made:
        usual = [2, 0, 1, 4, 5, 6, 3]

        def turn(order: list[int], load: int) -> None:
            made.manager.begin_pass("loop", load=load)
            for number in order:
                made.use(number)

        for _ in range(6):
            turn(usual, 8)
        turn([*usual, 6], 32)
        for _ in range(10):
            turn(usual, 8)
        before = made.manager.stats().misses
        for _ in range(4):
            turn(usual, 8)
        assert made.manager.stats().misses == before
        made.check()


@pytest.mark.parametrize("slots", [7, 8, 10])
def test_modules_that_hold_their_own_while_inner_ones_run_break_off_no_more(slots: int) -> None:
    """An outermost one does to the end of forward, a layer while what is in it runs."""
    with loop(13, slots, depth="auto") as made:
        manager, broken = made.manager, []
        broke_off = manager.replay.arranger.broke_off

        def noted(*late: Any) -> None:
            broken.append(late)
            broke_off(*late)

        manager.replay.arranger.broke_off = noted  # type: ignore[method-assign]
        for number in range(40):
            if number == 12:
                broken.clear()
            manager.begin_pass(FORWARD)
            manager.acquire(made.blocks[0])
            for outer in range(1, 13, 2):
                manager.acquire(made.blocks[outer])
                made.use(outer + 1)
                manager.release(made.blocks[outer])
            manager.release(made.blocks[0])
            made.sweep({BACKWARD: [*range(13)][::-1]})
        assert not broken
        assert manager.replay.repeating
        made.check()


@pytest.mark.parametrize("inner", [1, 3, 6])
@pytest.mark.parametrize("room", [1, 4])
@pytest.mark.parametrize("outer", [0, 1])
def test_a_loop_of_modules_that_hold_their_own_breaks_off_once(
    inner: int, room: int, outer: int
) -> None:
    """An outermost one to its end, layers while all that is in them runs; then it is laid out."""
    layers = 6
    with loop(outer + layers * (1 + inner), inner + 3 + room, depth="auto") as made:
        manager, laid_out = made.manager, list[bool]()
        for _ in range(12):
            manager.begin_pass("forward")
            for number in range(outer):
                manager.acquire(made.blocks[number])
            for layer in range(layers):
                own = outer + layer * (1 + inner)
                manager.acquire(made.blocks[own])
                for number in range(inner):
                    made.use(own + 1 + number)
                manager.release(made.blocks[own])
            laid_out.append(arranged(made))
            for number in range(outer):
                manager.release(made.blocks[number])
        assert all(laid_out[3:])
        made.check()


@pytest.mark.parametrize("parts", [3, 4, 5, 8, 12, 17])
def test_parts_of_a_model_that_are_called_one_after_another_are_laid_out(parts: int) -> None:
    """Two encoders, say, and what projects what they return: each call is a pass of its own."""
    each = 14
    with loop(parts * each, parts * each // 3, depth="auto") as made:
        passes = {
            ("forward", part): [*range(part * each, (part + 1) * each)] for part in range(parts)
        }
        for number in range(10):
            for name, order in passes.items():
                made.manager.begin_pass(name)
                for block in order:
                    made.use(block)
                assert number < 7 or arranged(made)
        made.check()


def test_a_block_that_was_written_may_come_to_another_place() -> None:
    order, written = [2, 4, 5, 1, 3, 7, 0, 6, 9, 8], {0, 3, 4, 7, 9}
    with loop(10, 10, depth="auto", large=3) as made:
        for number in range(12):
            made.manager.begin_pass("loop")
            for block in order:
                made.use(block, write=block in written)
            assert number < 4 or arranged(made)
        made.check()


@pytest.mark.parametrize("slots", [5, 7, 9])
def test_a_block_that_every_layer_uses_while_it_holds_its_own_stays(slots: int) -> None:
    """Embeddings of relative positions; the layers' own are held one after the other, not all."""
    with loop(21, slots, depth="auto") as made:
        manager = made.manager

        def turn() -> None:
            manager.begin_pass("forward")
            for layer in range(10):
                manager.acquire(made.blocks[2 * layer])
                made.use(20)
                manager.release(made.blocks[2 * layer])
                made.use(2 * layer + 1)

        for _ in range(10):
            turn()
        moved = ups(made.events)
        for _ in range(4):
            turn()
            assert arranged(made)
        assert ups(made.events) - moved <= 4 * (21 - (slots - 4))
        made.check()


@pytest.mark.parametrize("slots", [6, 7, 8, 9])
def test_what_comes_to_stay_for_good_is_not_laid_over(slots: int) -> None:
    """Another model's weights, at home in HBM, lie where the loop streamed through."""
    with loop(12, slots, depth="auto") as made:
        manager = made.manager
        for _ in range(2):
            for _ in range(6):
                made.go_round()
            assert arranged(made)
            shape = TensorShape("w", (PAGE,), (1,), torch.uint8, 1)
            fixed = manager.add_blocks([("fixed", Role.BUFFER, [shape])], home="hbm")
            for _ in range(6):
                made.go_round()
            assert arranged(made)
            manager.remove_blocks(fixed)
        made.check()


def test_a_pass_of_thousands_of_uses_is_laid_out() -> None:
    """Not all that is foreseen of it is planned for."""
    with loop(12, 6, depth="auto") as made:
        order = list(range(12)) * 300
        for _ in range(3):
            made.go_round(order)
        assert arranged(made)
        made.check()


def test_what_is_cleared_away_for_a_layout_was_not_fetched_for_nothing() -> None:
    """It is used all the same: it would no longer be fetched ahead after two of them."""
    with loop(12, 6, depth="auto") as made:
        waste, arranger = made.manager.parts.transfers.waste, made.manager.replay.arranger
        for _ in range(4):
            made.go_round()
        ahead = set(waste.pending)
        assert ahead
        arranger.repair()
        arranger._inside = lambda _: {}  # type: ignore[method-assign]
        made.events.clear()
        made.manager.begin_pass("loop")
        assert arranged(made) and ahead <= {block for what, block in made.events if what == "left"}
        assert not waste.outcomes and not waste.stopped
        made.check()
