"""A loop that repeats: what it did is done again, and nothing is that must not be."""

from __future__ import annotations

import os
import random
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_loop import PAGE, Loop, loop

from tiermem.core.residency import Record, State
from tiermem.core.schedule import Planner
from tiermem.errors import ClosedError, ConfigError
from tiermem.runtime.lookahead.prefetcher import Prefetcher
from tiermem.runtime.lookahead.replay import Replay
from tiermem.runtime.memory.slots import Slot
from tiermem.runtime.placement.evictor import Evictor
from tiermem.runtime.transfers.deferred import Deferred


def decide_always(made: Loop) -> None:
    """Turns replay off: every pass is decided anew."""
    made.manager.replay.begin = lambda *_: False  # type: ignore[method-assign]


def only_recorded(made: Loop) -> None:
    """Lays nothing out beforehand: passes repeat only what was recorded."""
    made.manager.replay.arranger._fetcher = SimpleNamespace(beside=False)  # type: ignore[assignment]


def until_it_repeats(made: Loop) -> None:
    for _ in range(40):
        made.go_round()
        if made.manager.replay.repeating:
            return
        made.manager.flush()  # what is read from a file is there, at whatever speed
    raise AssertionError("the loop is never taken for steady")


@pytest.mark.parametrize("home", ["dram", "file"])
@pytest.mark.parametrize(("slots", "large"), [(3, 0), (5, 2), (6, 3), (8, 5)])
def test_nothing_is_decided_in_a_loop_that_repeats(
    slots: int, large: int, home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loop(7, slots, large=large, nvme=tmp_path if home == "file" else None) as made:
        until_it_repeats(made)
        made.manager.parts.pass_timer.estimates.wants = lambda _: False  # type: ignore[method-assign]
        before = made.manager.stats()

        def decided(*_: object) -> None:
            raise AssertionError("this had been decided")

        for owner, name in ((Prefetcher, "look_ahead"), (Evictor, "place"), (Planner, "touch")):
            monkeypatch.setattr(owner, name, decided)
        for _ in range(5):
            made.go_round()
        after = made.manager.stats()
        assert after.misses == before.misses and after.hits == before.hits + 35
        came, went = after.prefetches - before.prefetches, after.evictions - before.evictions
        assert came == went > 0, "as many as in any loop that goes round"
        read = [after.links[link] for link in after.links if link.startswith("nvme")]
        assert read == [before.links[link] for link in before.links if link.startswith("nvme")]
        moved = after.links["dram->hbm"].moves - before.links["dram->hbm"].moves
        assert moved == after.prefetches - before.prefetches
        assert after.prefetch_wasted == before.prefetch_wasted
        made.check()


@settings(max_examples=examples(25), deadline=None)
@given(
    blocks=st.integers(2, 9),
    slots=st.integers(2, 10),
    depth=st.sampled_from(["auto", 1, 2, 3]),
    large=st.integers(0, 3),
    seed=st.integers(0, 1 << 20),
)
def test_what_is_done_again_is_what_would_have_been_decided(
    blocks: int, slots: int, depth: Any, large: int, seed: int
) -> None:
    order = list(range(blocks)) + random.Random(seed).choices(range(blocks), k=blocks // 2)
    slots += 2 * (large > 0)
    with (
        loop(blocks, slots, depth=depth, large=large) as one,
        loop(blocks, slots, depth=depth, large=large) as other,
    ):
        decide_always(other)
        only_recorded(one)
        for made in (one, other):  # estimates from the host's clock would differ
            made.manager.parts.pass_timer.estimates.wants = lambda _: False  # type: ignore[method-assign]
        for _ in range(8):
            assert one.go_round(order) == other.go_round(order)
        mine, theirs = one.manager.stats(), other.manager.stats()
        for name in ("hits", "misses", "prefetches", "prefetch_wasted", "evictions"):
            assert getattr(mine, name) == getattr(theirs, name), name
        one.check()


def lease(made: Loop, number: int) -> Callable[[], None]:
    made.manager.acquire(made.blocks[number])
    return lambda: made.manager.release(made.blocks[number])


def look(made: Loop, number: int) -> Callable[[], None]:
    slot = made.manager.acquire(made.blocks[number])
    seen, value = slot.views[0].view(-1), made.values[number]
    made.manager.release(made.blocks[number])

    def stop() -> None:
        assert seen.eq(value).all(), "bytes that somebody looked at were overwritten"

    return stop


def point(made: Loop, number: int) -> Callable[[], None]:
    slot = made.manager.slot_at_hand(made.blocks[number])
    if slot is not None:
        slot.pointed = 0  # as if no parameter pointed there
    return lambda: None


def write(made: Loop, number: int) -> Callable[[], None]:
    made.use(number, write=True)
    return lambda: None


def evict(made: Loop, number: int) -> Callable[[], None]:
    record = made.manager.record(made.blocks[number])
    if record.usable and made.manager.parts.evictor.clear([record.extent.offset], wait=True):  # type: ignore[union-attr]
        assert not record.usable
    return lambda: None


def discard(made: Loop, number: int) -> Callable[[], None]:
    block = made.blocks[number]
    made.manager.discard(block)
    made.values[number] = 250
    made.manager.write_home(block, [torch.full((block.nbytes,), 250, dtype=torch.uint8)])
    return lambda: None


def keep_out(made: Loop, number: int) -> Callable[[], None]:
    """Uses another block at a moment when it is not foreseen."""
    made.use(number)
    return lambda: None


DISTURBANCES = [lease, look, point, write, evict, discard, keep_out]


@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    blocks=st.integers(4, 9),
    slots=st.integers(3, 6),
    large=st.integers(0, 4),
    from_file=st.booleans(),
    depth=st.sampled_from(["auto", 1]),  # laid out beforehand, or recorded
    several=st.booleans(),
)
def test_whatever_happens_in_a_loop_that_repeats_no_byte_is_lost(
    seed: int, blocks: int, slots: int, large: int, from_file: bool, depth: Any, several: bool
) -> None:
    rng = random.Random(seed)
    passes = {("loop",): [*range(blocks)]}
    if several:
        passes = {("forward",): [*range(blocks)], ("backward",): [*range(blocks)][::-1], ("o",): []}
    with (
        tempfile.TemporaryDirectory() as folder,
        loop(
            blocks,
            slots + 2 * (large > 0),
            depth=depth,
            large=large,
            nvme=Path(folder) if from_file else None,
        ) as made,
    ):
        for _ in range(5):
            made.sweep(passes)
            made.manager.flush()
        for _ in range(6):
            at = rng.randrange(blocks), rng.choice([*passes])
            stop: Callable[[], None] = lambda: None  # noqa: E731
            for name, order in passes.items():
                made.manager.begin_pass(name)
                for number in order:
                    if (number, name) == at:
                        stop = rng.choice(DISTURBANCES)(made, rng.randrange(blocks))
                    if rng.random() < 0.97:
                        made.use(number)
            stop()
            del stop
            for _ in range(rng.randrange(3)):
                made.sweep(passes)
            made.check()


@pytest.mark.parametrize("disturb", [lease, look, write])
def test_a_block_in_use_is_not_the_one_that_leaves(disturb: Callable[..., Any]) -> None:
    """Whichever block it is, and wherever in the pass."""
    for number in range(6):
        for at in range(6):
            with loop(6, 4) as made:
                until_it_repeats(made)
                made.manager.begin_pass("loop")
                stop: Callable[[], None] = lambda: None  # noqa: E731
                for use in range(6):
                    if use == at:
                        stop = disturb(made, number)
                    made.use(use)
                stop()
                del stop
                made.check()


def swift(made: Loop, uses: int) -> None:
    """Goes on until passes repeat and are not measured, and into the next one."""
    until_it_repeats(made)
    made.manager.parts.pass_timer.estimates.wants = lambda _: False  # type: ignore[method-assign]
    for _ in range(3):
        made.go_round()
    made.manager.begin_pass("loop")
    for number in range(uses):
        made.use(number)
    assert made.manager.replay.repeating


def test_what_is_owed_to_a_block_is_done_before_its_use() -> None:
    with loop(7, 3) as made:
        swift(made, 2)
        done: list[int] = []
        block = made.blocks[2]

        def work() -> None:
            assert made.manager.record(block).leases == 0
            done.append(2)

        made.manager.parts.deferred.add(Deferred("a step", [block.id], work))
        made.use(1)
        assert not done
        made.use(2)
        assert done == [2]
        for number in range(3, 7):
            made.use(number)
        made.go_round()
        made.check()


def test_a_graph_that_is_captured_in_between_is_seen() -> None:
    with loop(7, 3) as made:
        swift(made, 2)
        capturing = made.manager.parts.copy.capturing
        made.manager.parts.copy.capturing = lambda: True  # type: ignore[method-assign]
        with pytest.raises(ConfigError, match="CUDA graph"):
            made.manager.acquire(made.blocks[2])
        made.manager.parts.copy.capturing = capturing  # type: ignore[method-assign]
        for number in range(2, 7):
            made.use(number)
        made.check()


def test_a_copy_that_cannot_be_asked_for_leaves_no_lease() -> None:
    with loop(7, 3) as made:
        swift(made, 1)
        up = made.manager.parts.copy.up

        def failing(*_: Any, **__: Any) -> Any:
            raise RuntimeError("no copy")

        made.manager.parts.copy.up = failing  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="no copy"):
            for number in range(1, 7):
                made.use(number)
        assert not any(record.leases for record in made.manager.parts.table)
        made.manager.parts.copy.up = up  # type: ignore[method-assign]
        made.manager.parts.table.check()
        until_it_repeats(made)
        made.check()


def test_copies_are_told_of_each_stream_that_uses_a_block_in_a_loop_that_repeats() -> None:
    with loop(7, 3) as made:
        swift(made, 1)
        streams, told = [7], []
        copy: Any = made.manager.replay._copy
        copy.stream = lambda: streams[-1]
        copy.use = lambda event: told.append(streams[-1])
        copy.hold_up = lambda stream, event: None
        for number, stream in enumerate((7, 7, 8, 8, 7), 1):
            streams.append(stream)
            made.use(number)
            assert made.manager.replay.repeating
        assert told == [7, 8, 7]


SWAPS: dict[str, Callable[[Record, Record, Slot], Any]] = {
    "as they were": lambda leaves, comes, slot: None,
    "leased": lambda leaves, comes, slot: setattr(leaves, "leases", 1),
    "there for good": lambda leaves, comes, slot: setattr(leaves, "fixed", True),
    "written": lambda leaves, comes, slot: setattr(leaves, "in_hbm", State.DIRTY),
    "on its way": lambda leaves, comes, slot: setattr(leaves, "in_hbm", State.FILLING),
    "going home": lambda leaves, comes, slot: setattr(leaves, "in_hbm", State.DRAINING),
    "nowhere else": lambda leaves, comes, slot: setattr(leaves, "at_home", State.ABSENT),
    "looked at": lambda leaves, comes, slot: slot.views[0].view(-1),
    "read": lambda leaves, comes, slot: slot.sight.read_view((torch.uint8, 0, (4,), (1,))),
    "wanted": lambda leaves, comes, slot: setattr(slot, "pointed", 1),
    "there": lambda leaves, comes, slot: setattr(comes, "in_hbm", State.VALID),
    "coming": lambda leaves, comes, slot: setattr(comes, "in_hbm", State.FILLING),
    "stale at home": lambda leaves, comes, slot: setattr(comes, "at_home", State.ABSENT),
    "lent at home": lambda leaves, comes, slot: setattr(comes, "at_home", State.FILLING),
}
"""What makes of a block that is to leave, or to come up, one that must not."""


@pytest.mark.parametrize("what", SWAPS)
def test_a_swap_is_made_if_both_blocks_are_as_they_were(what: str) -> None:
    with loop(7, 3) as made:
        swift(made, 1)
        replay = made.manager.replay
        run = replay.run
        assert run is not None
        swap = next(s for s in run.steps[2].swaps if s.leaves is not s.comes)
        leaves, comes = swap.leaves, swap.comes
        slot = made.manager.parts.slots.current[leaves.block.id]
        names = ("in_hbm", "at_home", "extent", "leases", "fixed")
        before = [
            (record, name, getattr(record, name)) for record in (leaves, comes) for name in names
        ]
        extent = leaves.extent
        alias = SWAPS[what](leaves, comes, slot)
        changed = [getattr(record, name) for record, name, _ in before]
        assert replay._swap(run, swap) == (what == "as they were")
        if what == "as they were":
            assert leaves.in_hbm is State.ABSENT and leaves.extent is None
            assert comes.in_hbm is State.VALID and comes.extent == extent
            assert made.manager.parts.table.at(extent.offset) is comes  # type: ignore[union-attr]
        else:
            assert [getattr(record, name) for record, name, _ in before] == changed
            assert not replay.repeating
            del alias
            slot.pointed = 0
            for record, name, value in before:
                setattr(record, name, value)
        made.check()


def test_stats_show_what_a_pass_that_repeats_has_done_so_far() -> None:
    with loop(7, 3) as made:
        swift(made, 0)
        before = made.manager.stats()
        made.events.clear()
        for number in range(7):
            made.use(number)
            now = made.manager.stats()
            assert now.hits == before.hits + number + 1
            ups = sum(kind == "up" for kind, _ in made.events)
            assert now.prefetches - before.prefetches == ups
            assert now.evictions - before.evictions == ups
            assert now.links["dram->hbm"].moves - before.links["dram->hbm"].moves == ups
        assert ups > 0 and made.manager.replay.repeating
        made.manager.parts.counters.reset()
        made.manager.replay.add_up()
        assert made.manager.stats().hits == 0


def test_a_manager_that_is_closed_in_between_is_not_used() -> None:
    with loop(7, 3) as made:
        swift(made, 2)
        made.manager.close()
        with pytest.raises(ClosedError):
            made.manager.acquire(made.blocks[2])


def test_a_child_that_is_forked_in_between_is_refused() -> None:
    """In the middle of a pass, uses do not check each time which process they are in."""
    with loop(7, 3) as made:
        swift(made, 2)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            code = 1
            try:
                with suppress(ClosedError), made.manager.lock:
                    made.manager.acquirer.acquire(made.blocks[2])
                    code = 2
                code = 0 if code == 1 else code
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for number in range(2, 7):
            made.use(number)
        made.check()


def test_another_order_is_decided_anew_and_learned() -> None:
    with loop(8, 3) as made:
        until_it_repeats(made)
        replay = made.manager.replay
        order = [0, 3, 1, 2, 5, 4, 7, 6]
        made.go_round(order)
        assert not replay.repeating
        until = [made.go_round(order) and replay.repeating for _ in range(8)]
        assert any(until)
        made.check()


def test_a_block_that_left_in_between_is_fetched_ahead() -> None:
    with loop(5, 5) as made:
        until_it_repeats(made)
        before = made.manager.stats()
        made.manager.parts.evictor.evict(made.manager.record(made.blocks[3]))
        made.go_round()
        after = made.manager.stats()
        assert after.misses == before.misses and after.prefetches == before.prefetches + 1
        made.manager.begin_pass("loop")
        made.use(0)
        until_it_repeats(made)
        made.manager.begin_pass("loop")
        made.use(0)
        made.manager.parts.evictor.evict(made.manager.record(made.blocks[3]))
        for number in range(1, 5):
            made.use(number)
        assert made.manager.stats().misses == after.misses


def test_a_new_plan_is_followed_at_once() -> None:
    with loop(8, 4) as made:
        until_it_repeats(made)
        maker = made.manager.prefetcher._maker
        make = maker.make
        maker.make = lambda *a, **k: replace(make(*a, **k), ahead=3 * PAGE)  # type: ignore[method-assign]
        made.manager.parts.pass_timer.estimates.version += 1
        made.go_round()
        assert not made.manager.replay.repeating
        until_it_repeats(made)


def test_a_plan_that_says_the_same_of_other_times_takes_them_over_and_goes_on() -> None:
    with loop(8, 4) as made:
        until_it_repeats(made)
        manager = made.manager
        before = manager.prefetcher.outlook
        times = before.timetable
        manager.parts.pass_timer.estimates.version += 1
        made.go_round()
        assert manager.replay.repeating
        assert manager.prefetcher.outlook is before
        assert before.timetable is not times
        assert before.made_of == manager.prefetcher._maker.made_of(manager.prefetcher._held)
        made.check()


def test_of_the_passes_that_are_measured_one_in_four_is_decided() -> None:
    with loop(7, 3) as made:
        until_it_repeats(made)
        manager, estimates = made.manager, made.manager.parts.pass_timer.estimates
        estimates.wants = lambda _: True  # type: ignore[method-assign]
        repeated = []
        for _ in range(8):
            made.go_round()
            repeated.append(manager.replay.repeating)
            # decided or not, what comes and goes is the same, and what it takes is seen
            assert manager.parts.pass_timer.sampling
        assert sorted(repeated) == [False] * 2 + [True] * 6
        estimates.wants = lambda _: False  # type: ignore[method-assign]
        made.go_round()
        assert manager.replay.repeating  # it did what those before it did
        made.check()


def test_a_pass_that_repeats_is_measured_as_one_that_is_decided() -> None:
    with loop(7, 3) as made:
        until_it_repeats(made)
        manager = made.manager
        observed = []

        def observe(key: Any, compute: Any, flows: Any, fills: Any, whole: Any) -> None:
            observed.append((sorted(compute), sorted(flows), len(fills)))

        manager.parts.pass_timer.estimates.observe = observe  # type: ignore[method-assign]
        manager.parts.pass_timer.estimates.wants = lambda _: True  # type: ignore[method-assign]
        decided = []
        for _ in range(8):
            decided.append(not len(made.go_round()) or not manager.replay.repeating)
        manager.parts.pass_timer.estimates.wants = lambda _: False  # type: ignore[method-assign]
        for _ in range(4):
            made.go_round()
        observed = observed[-8:]
        assert len(observed) == 8 and True in decided and False in decided
        assert all(entry == observed[0] for entry in observed)
        ids = [block.id for block in made.blocks[:-1]]  # the end of the last one is not announced
        assert observed[0][0] == ids and observed[0][1] == ["dram->hbm"] and observed[0][2] > 0


def test_what_is_held_beside_others_shows_in_a_measured_pass_that_repeats() -> None:
    with loop(7, 4) as made:
        until_it_repeats(made)
        manager = made.manager
        manager.parts.pass_timer.estimates.wants = lambda _: True  # type: ignore[method-assign]
        while made.go_round() and manager.replay.repeating:
            pass  # until the one of four that is decided
        manager.begin_pass("loop")
        assert manager.replay.repeating
        manager.acquire(made.blocks[0])
        made.use(1)
        manager.release(made.blocks[0])
        assert made.blocks[0].id in manager.prefetcher._held


def test_passes_that_write_are_not_repeated() -> None:
    with loop(6, 3) as made:
        for _ in range(8):
            made.manager.begin_pass("loop")
            for number in range(6):
                made.use(number, write=number == 2)
            assert not made.manager.replay.repeating
        made.check()


def test_a_copy_that_fails_leaves_both_blocks_where_they_can_be_had() -> None:
    with loop(7, 3) as made:
        until_it_repeats(made)
        manager = made.manager
        manager.begin_pass("loop")
        up = manager.parts.copy.up

        def fails(*_: object, **__: object) -> None:
            raise OSError("no")

        manager.parts.copy.up = fails  # type: ignore[method-assign]
        with pytest.raises(OSError, match="no"):
            for number in range(7):
                made.use(number)
        manager.parts.copy.up = up  # type: ignore[method-assign]
        assert not any(record.leases for record in manager.parts.table)
        made.check()
        for _ in range(4):
            made.go_round()
        made.check()


def test_old_schedules_are_let_go() -> None:
    with loop(5, 3) as made:
        for number in range(40):
            made.manager.begin_pass(("loop", number), [block.id for block in made.blocks])
            for use in range(5):
                made.use(use)
        assert len(made.manager.replay.recordings._tapes) <= 16
        assert isinstance(made.manager.replay, Replay)


def test_a_block_whose_copy_in_dram_is_gone_is_read_again(tmp_path: Path) -> None:
    with loop(7, 3, nvme=tmp_path) as made:
        until_it_repeats(made)
        made.manager.begin_pass("loop")
        for number in range(7):
            if number == 3:
                assert made.manager.parts.transfers.ahead.drop_all()
            made.use(number)
        assert not made.manager.replay.repeating
        made.check()
        until_it_repeats(made)
        made.check()
