"""Copies and compute on streams in every order that events allow: no byte is read too soon."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_streams import DOWN, FILES, PAGE, UNPACK, UP, Case, Streamed, cases

import tiermem
from tiermem.core.block import Extent, Role
from tiermem.core.layout import TensorShape
from tiermem.core.packing import Packed, Part
from tiermem.testing.streams import SimulatedDevice, SimulatedEvent
from tiermem.transfer.streams import CudaChunkCopier, StreamCopyEngine


@settings(max_examples=120)
@given(cases(slots=(1, 4), blocks=(2, 7), depth=(0, 3)))
def test_nothing_is_read_or_overwritten_too_soon(case: Case) -> None:
    """Random uses, with the device running behind by random amounts, one stream most of all."""
    bench = Streamed(case)
    random = Random(case.seed + 1)
    loop = [random.randrange(case.blocks) for _ in range(case.blocks)]
    with bench:
        for round_number in range(4):
            bench.manager.begin_pass("loop")
            for number in loop:
                kind = random.random()
                writable = number > 0  # block 0 is looked at beside, and so only ever read
                bench.use(number, write=writable and kind < 0.3, discard=writable and kind > 0.85)
                bench.stray(random)
                bench.run_on(random)
            if round_number == 2:
                random.shuffle(loop)


@settings(max_examples=150)
@given(cases(slots=(1, 3), blocks=(5, 5), depth=(1, 1), lags=(0, 1, 3), poison=st.just(True)))
def test_nothing_is_written_in_dram_while_a_kernel_looks_at_it_there(case: Case) -> None:
    """Looks in place among writes in HBM, writes by the host, and homes that go to others."""
    bench, blocks = Streamed(case), case.blocks
    random = Random(case.seed + 1)
    with bench:
        for round_number in range(4):
            bench.manager.begin_pass("loop")
            for number in range(blocks):
                for _ in range(random.randint(0, 2)):
                    bench.glance(random.randrange(blocks))
                    if random.random() < 0.2:
                        bench.switch()
                kind = random.random()
                if kind < 0.5:
                    bench.use(number, write=kind < 0.25, discard=False)
                elif kind < 0.7:
                    bench.rewrite(number)
                elif kind < 0.8 and round_number:
                    bench.replace(number)
                bench.run_on(random)
    assert bench.glances, "no kernel looked at anything in place"


@settings(max_examples=120)
@given(cases(slots=(2, 5), blocks=(3, 8), depth=(1, 3)))
def test_nothing_is_read_too_soon_in_a_loop_that_repeats(case: Case) -> None:
    """The same where copies go into the places of blocks that leave for them, events and all."""
    bench, blocks = Streamed(case), case.blocks
    bench.manager.parts.pass_timer.estimates.wants = lambda _: False  # type: ignore[method-assign]
    random = Random(case.seed + 1)
    repeated = 0
    with bench:
        for round_number in range(8):
            bench.manager.begin_pass("loop")
            repeated += bench.manager.replay.repeating
            for number in range(blocks):
                written = round_number == 6 and number == blocks - 1
                bench.use(number, write=written, discard=False)
                if random.random() < 0.1:
                    bench.switch()
                bench.run_on(random)
    if case.depth + 2 <= case.slots < blocks:  # else a block is missed in every pass
        assert repeated, "no pass was taken for one that repeats"


@settings(max_examples=100)
@given(cases(slots=(1, 4), blocks=(2, 7), depth=(0, 3), late=(UP, FILES)))
def test_what_comes_from_files_overwrites_nothing_too_soon(
    tmp_path_factory: pytest.TempPathFactory, case: Case
) -> None:
    """Reads straight into HBM among copies from DRAM; chunks land when they like."""
    stream_from_files(case, str(tmp_path_factory.getbasetemp()))


def test_among_them_are_reads_that_began_before_there_was_room(tmp_path: Path) -> None:
    late = [
        stream_from_files(Case(seed, 3, 5, 2, 3, None, True), str(tmp_path)) for seed in range(5)
    ]
    assert all(late), late


def stream_from_files(case: Case, folder: str) -> int:
    """Uses blocks from files and from DRAM; returns how many reads began before there was room."""
    bench, blocks = Streamed(case, folder), case.blocks
    random = Random(case.seed + 1)
    loop = [random.randrange(2 * blocks) for _ in range(2 * blocks)]
    with bench:
        for _ in range(4):
            bench.manager.begin_pass("loop")
            for number in loop:
                kind = random.random()
                writable = 0 < number < blocks
                bench.use(number, write=writable and kind < 0.3, discard=writable and kind > 0.8)
                bench.stray(random)
                for _ in range(random.randint(0, 3)):
                    bench.landing.work(random)
                bench.run_on(random)
    return bench.landing.landed


def test_a_chunk_that_lands_waits_for_no_later_read_s_room() -> None:
    """Only for what used its own place, however much was submitted meanwhile."""
    device = SimulatedDevice(Random(0))
    engine = StreamCopyEngine(device, UP, DOWN, FILES)
    target = torch.zeros(2, PAGE, dtype=torch.uint8)
    ones = torch.ones(PAGE, dtype=torch.uint8)
    first = engine.guards(Extent(0, PAGE))
    device.submit(device.stream, lambda: None)
    second = engine.guards(Extent(PAGE, PAGE))
    engine.up(target[1], ones, Extent(PAGE, PAGE), None)  # behind that compute
    fence = CudaChunkCopier(engine).to_target(target[0], ones, first)
    while device.advance(FILES):
        pass
    assert fence.done() and bool((target[0] == 1).all())
    later = CudaChunkCopier(engine).to_target(target[1], ones, second)
    while device.advance(FILES):
        pass
    assert not later.done()
    device.synchronize()
    assert later.done()


def test_an_event_recorded_again_says_nothing_of_what_it_said_before() -> None:
    """Who waits for it already waits for the point of then; who asks now, for the one of now."""
    device = SimulatedDevice(Random(0))
    ran: list[str] = []
    device.submit(1, lambda: ran.append("first"))
    event = device.record(1)
    device.wait(2, event)
    device.submit(2, lambda: ran.append("after first"))
    device.submit(1, lambda: ran.append("second"))
    assert device.record(1, event) is event
    device.wait(3, event)
    device.submit(3, lambda: ran.append("after second"))
    for _ in range(2):
        device.advance(1)
    assert not event.done()
    while device.advance(2) or device.advance(3):
        pass
    assert ran == ["first", "after first"]
    device.synchronize()
    assert ran == ["first", "after first", "second", "after second"] and event.done()


def test_a_copy_whose_event_says_it_again_is_waited_for_however_many_there_were() -> None:
    """Copies that are over are forgotten when there are many; their events mean nothing then."""
    device = SimulatedDevice(Random(0))
    engine = StreamCopyEngine(device, UP, DOWN, FILES)
    target, source = torch.zeros(64, PAGE, dtype=torch.uint8), torch.ones(PAGE, dtype=torch.uint8)
    first = engine.up(target[0], source, Extent(0, PAGE), None)
    device.synchronize()
    for page in range(1, 64):
        engine.up(target[page], source, Extent(page * PAGE, PAGE), None)
        device.synchronize()
    target[0] = 0
    second = engine.up(target[0], source, Extent(0, PAGE), None, first)
    assert second is not first
    device.synchronize()
    target[0] = 0
    assert engine.up(target[0], source, Extent(0, PAGE), None, second) is second
    engine.claim(Extent(0, PAGE))
    seen: list[int] = []
    device.submit(device.stream, lambda: seen.append(int(target[0].sum())))
    while device.advance(device.stream):
        pass
    assert not seen
    device.synchronize()
    assert seen == [PAGE]


def test_copies_of_what_is_in_no_block_leave_the_first_block_s_alone() -> None:
    """Saved tensors have an empty extent, which begins where the arena does."""
    device = SimulatedDevice(Random(0))
    engine = StreamCopyEngine(device, UP, DOWN, FILES)
    block, home, twos, saved, other = torch.zeros(5, PAGE, dtype=torch.uint8)
    block.fill_(1), twos.fill_(2)
    place, nowhere = Extent(0, PAGE), Extent(0, 0)
    engine.down(home, block, place, None)
    engine.down(other, saved, nowhere, None)
    engine.up(block, twos, place, None)
    engine.up(saved, other, nowhere, None)
    while device.advance(UP):
        pass
    engine.claim(place)
    seen: list[int] = []
    device.submit(device.stream, lambda: seen.append(int(block[0])))
    while device.advance(device.stream):
        pass
    device.synchronize()
    assert bool((home == 1).all()) and seen == [2]


def test_a_copy_whose_event_is_recorded_again_is_the_last_one() -> None:
    """What overlapped its place was submitted before it, though after the event was made."""
    device = SimulatedDevice(Random(0))
    engine = StreamCopyEngine(device, UP, DOWN, FILES)
    target, source = torch.zeros(3 * PAGE, dtype=torch.uint8), torch.ones(PAGE, dtype=torch.uint8)
    twice = torch.ones(2 * PAGE, dtype=torch.uint8)
    first = engine.up(target[: 2 * PAGE], twice, Extent(0, 2 * PAGE), None)
    engine.up(target[PAGE:], twice, Extent(PAGE, 2 * PAGE), None)
    device.synchronize()
    target.zero_()
    assert engine.up(target[:PAGE], source, Extent(0, PAGE), None, first) is first
    engine.claim(Extent(0, 3 * PAGE))
    seen: list[int] = []
    device.submit(device.stream, lambda: seen.append(int(target.sum())))
    while device.advance(device.stream):
        pass
    assert not seen, "compute writes the place before the copy up has been made"
    device.synchronize()
    assert seen == [PAGE]


def test_what_a_file_mover_may_look_at_is_not_recorded_again() -> None:
    """A copy into the place of what came from a file waits for that, and has its own event."""
    device = SimulatedDevice(Random(0))
    engine = StreamCopyEngine(device, UP, DOWN, FILES)
    target = torch.zeros(PAGE, dtype=torch.uint8)
    ones, twos = torch.ones(PAGE, dtype=torch.uint8), torch.full((PAGE,), 2, dtype=torch.uint8)
    place = Extent(0, PAGE)
    landed = engine.copy_up(target, ones, engine.guards(place))
    engine.landed(place, landed)
    event = engine.up(target, twos, place, None, landed)
    assert event is not landed
    while device.advance(UP):
        pass
    assert not target.any()
    device.synchronize()
    assert landed.done() and bool((target == 2).all())


def test_who_writes_a_place_waits_for_what_still_comes_there_from_a_file() -> None:
    """A block that was fetched and not used has left; compute has not waited for it."""
    device = SimulatedDevice(Random(0))
    engine = StreamCopyEngine(device, UP, DOWN, FILES)
    target, ones = torch.zeros(PAGE, dtype=torch.uint8), torch.ones(PAGE, dtype=torch.uint8)
    place = Extent(0, PAGE)
    for write in (engine.claim, partial(engine.poison, target)):
        engine.landed(place, engine.copy_up(target, ones, engine.guards(place)))
        write(place)
        device.submit(device.stream, partial(target.fill_, 2))
        while device.advance(device.stream) or device.advance(UP):
            pass
        device.synchronize()
        assert not bool((target == 1).any())


@pytest.mark.parametrize("packed", [False, True])
def test_the_host_writes_no_home_before_pieces_of_it_have_come_up(packed: bool) -> None:
    """Copies beside those that wait for compute read homes, and packed copies, as well."""
    device = SimulatedDevice(Random(0))
    engine = StreamCopyEngine(device, UP, DOWN, FILES, UNPACK)
    target, home = torch.zeros(PAGE, dtype=torch.uint8), torch.ones(PAGE, dtype=torch.uint8)
    if packed:
        parts = (Part(0, PAGE, 0),)  # smaller than a tile, and so as it is
        engine.up_packed_behind(target, Packed(home.data_ptr(), parts, PAGE), ())
    else:
        engine.up_behind(target, home, ())
    risen = engine.risen()
    assert risen is not None
    while device.advance(UP):
        pass
    assert not risen.done()
    risen.synchronize()
    home.fill_(2)
    device.synchronize()
    assert bool((target == 1).all())


def test_a_circle_of_waits_is_an_error() -> None:
    """The simulation says so where work waits for what can never run."""
    device = SimulatedDevice(Random(0))
    device.submit(1, lambda: None)
    never = SimulatedEvent(device)
    device.wait(2, never)
    with pytest.raises(RuntimeError, match="in a circle"):
        device.synchronize()


def test_a_block_is_captured_once_a_stream_has_waited_for_it_where_all_fit() -> None:
    """A capture begins when the device is done with what waits: a copy ahead may not be one."""
    bench = Streamed(Case(0, slots=3, blocks=3, depth=3, lag=0, late=None, poison=True))
    manager, device = bench.manager, bench.device
    first, ahead, _ = bench.blocks
    manager.begin_pass("loop", [block.id for block in bench.blocks])
    bench.use(0, write=False, discard=False)
    record = manager.parts.table[ahead.id]
    assert record.usable and manager.parts.transfers.ready[ahead.id].waiter == -1
    device.captured = True
    with pytest.raises(tiermem.ConfigError, match="captured"):
        manager.acquire(ahead)
    seen = manager.acquire(first)
    manager.release(first)
    device.captured = False
    for number in (1, 2, 0, 1):
        bench.use(number, write=True, discard=False)
    assert manager.parts.slots.current[first.id] is seen and seen.aliased
    bench.finish()
    assert not bench.wrong


def test_a_block_that_may_move_is_not_captured_in_a_graph() -> None:
    bench = Streamed(Case(0, slots=2, blocks=3, depth=1, lag=0, late=None, poison=True))
    manager = bench.manager
    shape = TensorShape("pinned", (PAGE,), (1,), torch.uint8, 1)
    (pinned,) = manager.add_blocks([("pinned", Role.PARAM, [shape])], home="hbm")
    bench.use(0, write=False, discard=False)
    bench.device.captured = True
    before = manager.stats()
    with pytest.raises(tiermem.ConfigError, match=r"block 'b0' .* CUDA graph"):
        manager.acquire(bench.blocks[0])
    manager.begin_pass("captured")
    slot = manager.acquire(pinned)
    assert slot.extent == manager.parts.table[pinned.id].extent
    manager.release(pinned)
    assert manager.stats() == before  # nothing was fetched, nothing counted
    bench.device.captured = False
    bench.finish()
    assert not bench.wrong
