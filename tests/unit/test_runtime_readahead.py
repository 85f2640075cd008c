"""Reads from files into spare DRAM, ahead of room in HBM."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support_runtime import PAGE, Rig, rig

from tiermem.core.loops import Plan
from tiermem.errors import StorageError
from tiermem.io.engine import IoOp, IoRequest
from tiermem.runtime.transfers.early_reads import ReadAhead
from tiermem.testing.io import Fault
from tiermem.transfer.file.mover import FileTransfer

BLOCKS = [(1, "nvme")] * 8


@pytest.fixture(params=["host", "device"])
def opened(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Opens a rig; as on a GPU, where a read straight into HBM would wait for the compute."""

    @contextmanager
    def make(*args: Any, **settings: Any) -> Iterator[Rig]:
        with rig(*args, **settings) as made:
            made.manager.prefetcher.fetcher.beside = request.param == "device"
            unplanned(made, through_dram=True)
            yield made

    return make


def unplanned(made: Rig, *, through_dram: bool) -> None:
    """Makes the order of use alone decide what is in DRAM, whatever the loop measures."""
    maker = made.manager.prefetcher._maker
    maker._times.compute = lambda _, order, load: [None] * len(order)  # type: ignore[method-assign]
    maker._by_way_of_dram = lambda *_: through_dram  # type: ignore[method-assign]


def loop(made: Rig, order: list[int], rounds: int = 1, key: str = "f") -> None:
    for _ in range(rounds):
        made.manager.begin_pass(key)
        for number in order:
            made.use(made.blocks[number])


def staged(made: Rig) -> set[int]:
    """Returns the numbers of the blocks that are in DRAM or on their way there."""
    ids = made.manager.parts.transfers.ahead.staged
    return {n for n, block in enumerate(made.blocks) if block.id in ids}


def forgotten(made: Rig, number: int) -> int:
    """Runs a loop until it is learned, and drops all read ahead; returns a block's home offset."""
    loop(made, [*range(8)], 3)
    made.manager.flush()
    made.manager.parts.transfers.ahead.drop_all()
    extent = made.manager.record(made.blocks[number]).home_extent
    assert extent is not None
    return extent.offset


def test_the_disk_goes_on_while_hbm_has_no_room(opened: Callable[..., Any], tmp_path: Path) -> None:
    with opened(2, BLOCKS, nvme=tmp_path, dram=4) as made:
        loop(made, [*range(8)], 4)
        made.manager.flush()
        assert len(staged(made)) == 4, "as much as DRAM has to spare"
        reads = made.manager.stats().links["nvme->dram"]
        assert reads.nbytes == reads.moves * PAGE
        made.manager.parts.counters.reset()
        loop(made, [*range(8)])
        links = made.manager.stats().links
        assert links["dram->hbm"].moves >= 4
        assert links["nvme->dram"].moves + links.get("nvme->hbm", reads).moves >= 4
        made.check()


def test_what_is_read_ahead_is_read_once(opened: Callable[..., Any], tmp_path: Path) -> None:
    """Every block that streams is read once a round, by whichever way."""
    with opened(2, BLOCKS, nvme=tmp_path, dram=16) as made:
        loop(made, [*range(8)], 4)
        made.manager.flush()
        assert made.engine is not None
        made.engine.log.clear()
        loop(made, [*range(8)], 10)
        made.manager.flush()
        reads = [r for r in made.engine.log if r.op is IoOp.READ]
        assert len(reads) <= 10 * 8 + 2, "where a round ends, one more may have begun"


def test_what_comes_back_soon_stays_in_dram(opened: Callable[..., Any], tmp_path: Path) -> None:
    """To and fro, as forward and backward go; without it two more blocks would be read each way."""
    with opened(2, BLOCKS, nvme=tmp_path, dram=4) as made:
        order = [*range(8), *range(7, -1, -1)]

        def sweep() -> None:
            made.manager.begin_pass("f")
            for number in order:
                made.use(made.blocks[number])
                made.manager.flush()  # which thread is quicker shall not count

        for _ in range(4):
            sweep()
        assert made.engine is not None
        made.engine.log.clear()
        for _ in range(10):
            sweep()
        reads = [r for r in made.engine.log if r.op is IoOp.READ]
        assert len(reads) <= 10 * 11


def test_other_needs_of_dram_come_first(opened: Callable[..., Any], tmp_path: Path) -> None:
    with opened(2, BLOCKS, nvme=tmp_path, dram=6) as made:
        loop(made, [*range(8)], 3)
        made.manager.flush()
        assert staged(made)
        for _ in range(6):
            made.add(1, "dram")
        made.add(1, "auto")  # DRAM is full by now
        homes = [made.manager.record(block).home.value for block in made.blocks[8:]]
        assert homes == ["dram"] * 6 + ["nvme"]
        loop(made, [*range(8)], 2)
        assert not staged(made)
        made.check()


def test_auto_prefers_dram_that_is_only_kept(opened: Callable[..., Any], tmp_path: Path) -> None:
    with opened(2, BLOCKS, nvme=tmp_path, dram=2) as made:
        loop(made, [*range(8)], 3)
        made.manager.flush()
        assert len(staged(made)) == 2
        made.add(1, "auto")
        assert made.manager.record(made.blocks[8]).home.value == "dram"


def test_bytes_that_were_written_since_are_not_used(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    with opened(2, BLOCKS, nvme=tmp_path, dram=8) as made:
        loop(made, [*range(8)], 3)
        made.manager.flush()
        number = max(staged(made))
        block = made.blocks[number]
        made.manager.discard(block)
        made.write(block)
        loop(made, [*range(8)], 2)
        made.check()


def test_a_write_below_hbm_makes_the_copy_stale(opened: Callable[..., Any], tmp_path: Path) -> None:
    """A write of a home is not announced: the file's version shows it."""
    with opened(2, BLOCKS, nvme=tmp_path, dram=8) as made:
        manager = made.manager
        loop(made, [*range(8)], 3)
        manager.flush()
        away = [n for n in staged(made) if manager.record(made.blocks[n]).extent is None]
        block = made.blocks[max(away)]
        record = manager.record(block)
        assert record.home_extent is not None
        new = made.noise(block)
        manager.parts.transfers.wait_or_raise(
            manager.parts.transfers.need_mover().write(record.home_extent, new, label="w")
        )
        assert manager.parts.transfers.ahead.look(record) is None
        made.use(block)
        loop(made, [*range(8)], 2)
        made.check()


def test_places_of_an_old_loop_serve_the_new_one(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    with opened(2, BLOCKS * 2, nvme=tmp_path, dram=4) as made:
        loop(made, [*range(8)], 4)
        made.manager.flush()
        assert staged(made) <= set(range(8))
        loop(made, [*range(8, 16)], 6, key="g")
        made.manager.flush()
        assert staged(made) & set(range(8, 16))


def test_a_place_is_not_used_again_while_the_disk_reads_into_it(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    with opened(2, BLOCKS * 2, nvme=tmp_path, dram=4) as made:
        ahead = made.manager.parts.transfers.ahead
        loop(made, [*range(8)], 3)
        loop(made, [*range(8, 16)], 3, key="g")
        made.manager.flush()
        made.engine.hold()
        for block in made.blocks:
            ahead.drop(block.id)
        made.manager.begin_pass("f")
        under_way = [e.extent for e in ahead.staged.values() if not e.transfer.finished]
        assert len(under_way) == 4
        for block in made.blocks:
            ahead.drop(block.id)
        made.manager.begin_pass("g")
        assert not [e for e in ahead.staged.values() if e.extent in under_way]
        made.engine.release()
        loop(made, [*range(8, 16)], 2, key="g")
        made.check()


def test_on_a_gpu_the_host_waits_for_the_disk_only(tmp_path: Path) -> None:
    """No block goes through chunks that wait for the compute, as long as DRAM has room."""
    with rig(2, BLOCKS, nvme=tmp_path, dram=16) as made:
        made.manager.prefetcher.fetcher.beside = True
        loop(made, [*range(8)], 4)
        links = made.manager.stats().links
        assert "nvme->hbm" not in links
        made.check()


def test_what_the_disk_alone_holds_up_goes_straight_into_hbm(tmp_path: Path) -> None:
    with rig(2, BLOCKS, nvme=tmp_path, dram=4) as made:
        made.manager.prefetcher.fetcher.beside = True
        unplanned(made, through_dram=False)
        loop(made, [*range(8)], 6)
        made.manager.parts.counters.reset()
        loop(made, [*range(8)], 4)
        assert "nvme->dram" not in made.manager.stats().links
        made.check()


def test_which_way_depends_on_what_is_waited_for(tmp_path: Path) -> None:
    """Where no plan says what is in DRAM."""
    with rig(2, BLOCKS, nvme=tmp_path, dram=4) as made:
        maker = made.manager.prefetcher._maker
        order = [block.id for block in made.blocks] * 3
        plan = Plan(frozenset(), 2 * PAGE)

        def way(compute: float, disk: float, size: int = PAGE) -> bool:
            fetch = dict.fromkeys(order, ("nvme->hbm", disk))
            return maker._by_way_of_dram(
                order, dict.fromkeys(order, size), plan, [compute] * len(order), fetch
            )

        assert way(2.0, 1.0)
        assert way(1.0, 1.7), "a way that is taken stays taken for so little"
        assert not way(1.0, 2.0)
        assert not way(1.0, 1.3), "and one that is not does not change for so little"
        assert way(1.0, 0.5)
        assert not way(1.0, 0.5, 2 * PAGE), "no room for three"


def test_a_read_that_cannot_begin_takes_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(2, BLOCKS, nvme=tmp_path, dram=4) as made:
        manager = made.manager
        mover, ahead = manager.parts.transfers.need_mover(), manager.parts.transfers.ahead
        loop(made, [*range(8)], 3)
        manager.flush()
        ahead.drop_all()
        used = manager.parts.homes.dram.used

        def refuse(*_: Any, **__: Any) -> FileTransfer:
            raise ValueError("no")

        schedule = manager.parts.planner.schedule
        with monkeypatch.context() as patch:
            patch.setattr(mover, "read", refuse)
            with pytest.raises(ValueError, match="no"):
                ahead.begin(manager.record(made.blocks[4]), mover, schedule, 0, 4)
        assert manager.parts.homes.dram.used == used and not ahead.staged
        loop(made, [*range(8)])
        made.check()


def test_a_loop_of_which_all_is_held_has_nothing_to_share(tmp_path: Path) -> None:
    with rig(2, BLOCKS, nvme=tmp_path, dram=4) as made:
        loop(made, [*range(8)], 3)
        prefetcher, schedule = made.manager.prefetcher, made.manager.parts.planner.schedule
        compute = [1.0] * len(schedule)
        fetch = {block.id: ("nvme->hbm", 1.0) for block in made.blocks}
        plan = prefetcher._maker._share(schedule, {}, 0, compute, fetch, True)  # type: ignore[arg-type]
        assert not plan.residents


def test_removed_blocks_leave_nothing_behind(opened: Callable[..., Any], tmp_path: Path) -> None:
    with opened(2, BLOCKS, nvme=tmp_path, dram=4) as made:
        loop(made, [*range(8)], 3)
        made.manager.flush()
        free = made.manager.parts.homes.dram
        made.manager.remove_blocks(made.blocks)
        made.manager.parts.transfers.ahead.drop_all()
        assert free.used == made.manager.parts.homes.chunk * 16
        made.blocks.clear()


@pytest.mark.parametrize("lasting", [False, True])
def test_a_read_ahead_that_failed_says_nothing(
    opened: Callable[..., Any], tmp_path: Path, lasting: bool
) -> None:
    """It is made again when the block is needed; then its error counts."""
    broken: set[int] = set()

    def fault(request: IoRequest, tries: int) -> Fault | None:
        if request.op is IoOp.READ and request.offset in broken:
            if not lasting:
                broken.discard(request.offset)
            return Fault(errno=errno.EIO)
        return None

    with opened(2, BLOCKS, nvme=tmp_path, dram=8, fault=fault) as made:
        offset = forgotten(made, 5)
        broken.add(offset)
        if lasting:
            with pytest.raises(StorageError, match="block5"):
                loop(made, [*range(8)], 2)
            broken.clear()
        else:
            loop(made, [*range(8)], 2)
        loop(made, [*range(8)])
        made.check()


def test_torn_bytes_are_seen_in_dram_too(opened: Callable[..., Any], tmp_path: Path) -> None:
    flipped: set[int] = set()

    def fault(request: IoRequest, tries: int) -> Fault | None:
        return Fault(flip_bit=7) if request.offset in flipped else None

    with opened(2, BLOCKS, nvme=tmp_path, dram=8, fault=fault) as made:
        offset = forgotten(made, 5)
        flipped.add(offset)
        with pytest.raises(StorageError, match="checksum"):
            loop(made, [*range(8)], 2)
        flipped.clear()
        loop(made, [*range(8)])
        made.check()


def test_a_read_in_place_needs_host_memory(tmp_path: Path) -> None:
    with rig(2, [(1, "nvme")], nvme=tmp_path) as made:
        extent = made.manager.record(made.blocks[0]).home_extent
        assert extent is not None
        target = torch.empty(PAGE, dtype=torch.uint8, device="meta")
        with pytest.raises(ValueError, match="host memory"):
            made.manager.parts.transfers.need_mover().read(extent, target, label="r", in_place=True)


def shared(made: Rig, kept: list[int] | None) -> Callable[[int, int], bool]:
    """Shares DRAM out, or leaves it to the order of use; returns what begins to read a block."""
    manager = made.manager
    loop(made, [*range(8)], 3)
    manager.flush()
    ahead, mover = manager.parts.transfers.ahead, manager.parts.transfers.need_mover()
    ahead.drop_all()
    ahead.share(None if kept is None else {made.blocks[n].id: PAGE for n in kept}, mover)
    schedule = manager.parts.planner.schedule

    def begin(number: int, position: int) -> bool:
        record = manager.record(made.blocks[number])
        return ahead.begin(record, mover, schedule, 0, position)

    return begin


def test_a_plan_gives_some_blocks_places_and_the_rest_none(tmp_path: Path) -> None:
    with rig(2, BLOCKS, nvme=tmp_path, dram=4) as made:
        begin = shared(made, [6, 7])
        ahead = made.manager.parts.transfers.ahead
        assert ahead.kept == ahead.nbytes == 2 * PAGE
        assert ahead.keeps(made.blocks[6].id) and not ahead.keeps(made.blocks[0].id)
        assert [begin(n, n) for n in (6, 0, 7)] == [True, False, True]
        assert staged(made) == {6, 7}
        ahead.share(None)
        assert ahead.kept == 0
        made.manager.flush()
        assert begin(0, 0), "the order of use alone decides again"


def test_a_place_waits_for_the_read_that_it_was_used_for(tmp_path: Path) -> None:
    """As when a home is written while it is read: the same bytes of DRAM, and another read."""
    with rig(2, BLOCKS, nvme=tmp_path, dram=4) as made:
        begin = shared(made, [6])
        ahead = made.manager.parts.transfers.ahead
        made.engine.hold()
        assert begin(6, 6)
        ahead.drop(made.blocks[6].id)
        assert not begin(6, 6)
        made.engine.release()
        made.manager.flush()
        assert begin(6, 6)
        loop(made, [*range(8)])
        made.check()


def test_reads_that_a_plan_has_no_use_for_are_given_up(tmp_path: Path) -> None:
    """Behind urgent ones they might never end, and keep their places taken."""
    with rig(2, BLOCKS, nvme=tmp_path, dram=4) as made:
        begin = shared(made, None)
        manager = made.manager
        ahead = manager.parts.transfers.ahead
        made.engine.hold()
        assert all(begin(n, n) for n in (4, 5, 6, 7))
        errors = manager.parts.counters.errors
        ahead.share({made.blocks[0].id: PAGE}, manager.parts.transfers.need_mover())
        assert ahead.unsettled and not ahead.kept, "the disk still writes there"
        made.engine.release()
        manager.flush()
        ahead.lay_out()
        assert not ahead.unsettled and ahead.keeps(made.blocks[0].id)
        assert ahead.nbytes == PAGE and manager.parts.counters.errors == errors
        loop(made, [*range(8)], 2)
        made.check()


def read_before_a_plan(made: Rig) -> ReadAhead:
    """Reads three blocks into DRAM; returns where they are when a plan has no place for them."""
    begin = shared(made, None)
    manager = made.manager
    ahead, mover = manager.parts.transfers.ahead, manager.parts.transfers.need_mover()
    assert all(begin(n, n) for n in (0, 1, 2))
    manager.flush()
    ahead.share({made.blocks[7].id: PAGE}, mover)
    assert staged(made) == {0, 1, 2} and ahead.unsettled
    return ahead


def test_what_was_read_before_the_first_plan_waits_for_one_pass(tmp_path: Path) -> None:
    with rig(2, BLOCKS, nvme=tmp_path, dram=4) as made:
        ahead = read_before_a_plan(made)
        ahead.begin_pass()
        assert staged(made) == {0, 1, 2}, "it may be for this one"
        ahead.begin_pass()
        ahead.lay_out()
        assert staged(made) == set() and not ahead.unsettled
