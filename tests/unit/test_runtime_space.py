"""Room in HBM: who leaves, who is moved, what a fetch ahead may and may not do."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from support_runtime import PAGE, Owner, Rig, rig

from tiermem.config import Policy, Settings, exact_size
from tiermem.core.block import Block, Extent, Role, Tier
from tiermem.core.layout import TensorShape
from tiermem.core.residency import Record
from tiermem.errors import CapacityError
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.memory.homes import HomeRequest, Homes
from tiermem.transfer.file.mover import FileTransfer


def where(made: Rig) -> dict[int, int]:
    """Returns the page at which each block in HBM begins, by the block's number."""
    return {
        i: r.extent.offset // PAGE
        for i, block in enumerate(made.blocks)
        if (r := made.manager.parts.table.get(block.id)) is not None and r.extent is not None
    }


def loop(made: Rig, order: list[int], rounds: int = 2) -> None:
    for _ in range(rounds):
        made.manager.begin_pass("f")
        for number in order:
            made.use(made.blocks[number])


# -- eviction and fetching ahead ----------------------------------------------


def test_a_loop_evicts_what_is_needed_last(tmp_path: Path) -> None:
    """Five of six blocks fit, used to and fro: the misses are as few as can be."""
    with rig(5, [(1, "dram")] * 6) as made:
        sweep = [*range(6), *range(5, -1, -1)]
        loop(made, sweep, 3)
        made.manager.parts.counters.reset()
        loop(made, sweep, 10)
        assert made.manager.stats().misses <= 2 * 10


def test_a_wait_for_the_disk_leaves_it_more_to_read(tmp_path: Path) -> None:
    """The use before is over by then, so the read into its slot begins ahead of the wait."""
    with rig(2, [(1, "nvme")] * 6, nvme=tmp_path, dram=0) as made:
        transfers, engine = made.manager.parts.transfers, made.engine
        assert engine is not None
        loop(made, [*range(6)], 4)
        waits: list[int] = []
        wait = transfers.wait

        def seen(transfer: FileTransfer) -> None:
            waits.append(len(transfers.flights))
            engine.release()
            wait(transfer)
            engine.hold()

        transfers.settle_all()
        transfers.wait = seen  # type: ignore[method-assign]
        engine.hold()
        loop(made, [*range(6)], 1)
        engine.release()
    assert waits == [2] * len(waits)
    assert len(waits) >= 2


SEVERAL_SIZES = [(2, "nvme"), (1, "dram"), (3, "nvme"), (2, "nvme"), (1, "nvme"), (2, "dram")]


@pytest.mark.parametrize(
    ("pages", "homes"), [(6, SEVERAL_SIZES), (6, [(2, "nvme")] * 6), (3, [(1, "nvme")] * 6)]
)
def test_a_fetch_ahead_evicts_nothing_needed_sooner(
    tmp_path: Path, pages: int, homes: list[tuple[int, str]]
) -> None:
    """Nor where places of one size change hands."""
    with rig(pages, homes, nvme=tmp_path, depth=4) as made:
        manager = made.manager
        position: list[int] = []
        evicted: list[tuple[int, int]] = []
        evict, fill = manager.parts.evictor.evict, manager.prefetcher.fetcher.fill

        def evicting(record: Record, *, free: bool = True) -> None:
            if position:
                evicted.append((manager.parts.planner.distance(record.block.id), position[-1]))
            evict(record, free=free)

        def filling(record: Record, at: int) -> bool:
            position.append(at)
            try:
                return fill(record, at)
            finally:
                position.pop()

        manager.parts.evictor.evict, manager.prefetcher.fetcher.fill = evicting, filling  # type: ignore[method-assign]
        for _ in range(10):
            loop(made, [0, 1, 2, 3, 4, 5, 2, 1, 4], 1)
            manager.flush()
        assert len(evicted) > 5
        assert all(distance > at for distance, at in evicted)
        made.check()


def test_ahead_of_use_files_are_read(tmp_path: Path) -> None:
    with rig(
        12, [(2, "nvme"), (2, "nvme"), (2, "dram"), (2, "nvme")], nvme=tmp_path, depth=4
    ) as made:
        made.manager.begin_pass("f", [b.id for b in made.blocks])
        made.manager.flush()
        assert made.manager.stats().prefetches == 3
        loop(made, [0, 1, 2, 3], 1)
        stats = made.manager.stats()
        assert (stats.hits, stats.misses) == (3, 1)
        assert stats.links["nvme->hbm"].moves == 3


def test_no_depth_no_fetching(tmp_path: Path) -> None:
    with rig(12, [(2, "nvme"), (2, "nvme")], nvme=tmp_path, depth=0) as made:
        loop(made, [0, 1])
        assert made.manager.stats().prefetches == 0


def test_a_place_of_the_schedule_is_looked_at_once(tmp_path: Path) -> None:
    """With everything resident, a use costs the same however long the loop is."""
    with rig(64, [(1, "nvme")] * 40, nvme=tmp_path, dram=8) as made:
        order = list(range(40))
        loop(made, order, 3)
        looked = 0
        real = made.manager.parts.table.get

        def counting(block_id: int) -> object:
            nonlocal looked
            looked += 1
            return real(block_id)

        made.manager.parts.table.get = counting  # type: ignore[method-assign]
        loop(made, order, 1)
        assert looked <= 6 * 40 + 40


def test_what_stays_for_good_lies_side_by_side() -> None:
    """Where it comes late, the blocks at the lowest addresses leave for it."""
    with rig(12, [(2, "dram")] * 8) as made:
        loop(made, list(range(8)), 1)
        for _ in range(3):
            made.add(1, "hbm")
        places = sorted(made.manager.record(b).extent.offset for b in made.blocks[8:])
        assert places == [0, PAGE, 2 * PAGE]
        loop(made, list(range(8)), 4)
        made.check()


def test_what_stays_for_good_is_placed_around_a_lease() -> None:
    with rig(12, [(2, "dram")] * 8) as made:
        held = made.blocks[0]
        made.manager.acquire(held)
        start = made.manager.record(held).extent
        added = made.add(3, "hbm")
        there = made.manager.record(added).extent
        assert start == made.manager.record(held).extent
        assert there.offset == start.end
        made.manager.release(held)
        loop(made, list(range(8)), 4)
        made.check()


def test_slots_lie_on_both_sides_of_what_stays_for_good() -> None:
    with rig(20, [(2, "dram")] * 8) as made:
        held = made.blocks[0]
        made.manager.acquire(held)
        middle = made.add(1, "hbm")
        made.manager.release(held)
        regions = made.manager.parts.evictor.regions
        assert regions.keep(frozenset({made.blocks[7].id}), 2 * PAGE)
        there = made.manager.record(middle).extent
        parts = regions.parts_for(made.blocks[0])
        assert parts[0] == (0, 2 * PAGE) == (0, there.offset)
        assert parts[1][0] == there.end
        assert parts[-1][1] == regions.border == 18 * PAGE
        assert all(end - begin >= 2 * PAGE for begin, end in parts)


@pytest.mark.parametrize("home", ["dram", "nvme"])
@pytest.mark.parametrize("said", ["at release", "before"])
def test_what_was_written_comes_back(tmp_path: Path, home: str, said: str) -> None:
    with rig(2, [(2, home), (2, "dram")], nvme=tmp_path) as made:
        block, other = made.blocks
        made.manager.acquire(block).bytes.copy_(made.noise(block))
        if said == "before":
            made.manager.mark_dirty(block)
        made.manager.release(block, dirty=said == "at release")
        made.use(other)
        assert where(made) == {1: 0}
        made.use(block)
        assert made.manager.stats().write_backs == 1
        made.use(other)
        assert made.manager.stats().write_backs == 1, "what is clean is not written again"
        made.check()


# -- what may not leave ---------------------------------------------------------


def test_what_is_seen_stays() -> None:
    with rig(4, [(2, "dram"), (2, "dram"), (2, "dram")]) as made:
        view = made.manager.acquire(made.blocks[0]).views[0]
        view = view[1:]
        made.manager.release(made.blocks[0])
        made.use(made.blocks[1])
        made.use(made.blocks[2])
        assert where(made)[0] == 0
        assert view.numpy().tobytes() == made.data[made.blocks[0].id][1:]
        with pytest.raises(CapacityError, match="still referred to") as caught:
            made.manager.acquire_all([made.blocks[1], made.blocks[2]])
        assert f"at least {exact_size(6 * PAGE)}" in str(caught.value)
        del view
        made.manager.acquire_all([made.blocks[1], made.blocks[2]])
        for block in made.blocks[1:]:
            made.manager.release(block)
        made.check()


def test_what_a_parameter_hid_is_found_once_it_points_elsewhere() -> None:
    """A parameter was given other data while pointed: a user's view counts in its place."""
    with rig(2, [(2, "dram"), (2, "dram")]) as made:
        owner = Owner(made.manager, made.blocks[0])
        slot = owner.hold()
        view = slot.views[0][3:]
        owner.param.data = torch.zeros(1, dtype=torch.uint8)  # one reference less, and one more
        owner.let_go(soft=True)
        with pytest.raises(CapacityError):
            made.manager.acquire(made.blocks[1])
        assert view.numpy().tobytes() == made.data[made.blocks[0].id][3:]
        del view, slot
        made.use(made.blocks[1])
        made.check()


def test_a_cycle_that_holds_the_last_view_is_collected() -> None:
    with rig(2, [(2, "dram"), (2, "dram")]) as made:
        gc.freeze()
        knot: list[object] = [made.manager.acquire(made.blocks[0]).views[0][1:]]
        knot.append(knot)
        made.manager.release(made.blocks[0])
        del knot
        made.use(made.blocks[1])
        gc.unfreeze()


# -- pieces ---------------------------------------------------------------------


def in_the_middle(made: Rig) -> tuple[Block, Block]:
    """Puts block 1 into the middle of ten pages: 4 free, 2 taken, 4 free."""
    for block in made.blocks[:2]:
        made.use(block)
    assert where(made) == {0: 0, 1: 4}
    return made.blocks[1], made.blocks[2]


def test_a_block_in_use_is_moved_out_of_the_way() -> None:
    with rig(10, [(4, "dram"), (2, "dram"), (7, "dram")]) as made:
        held, wide = in_the_middle(made)
        owner = Owner(made.manager, held)
        owner.hold()
        made.use(wide)
        assert where(made) == {1: 0, 2: 2}
        made.compare(owner.param.detach(), held)
        assert made.manager.stats().relocations == 1
        owner.param.copy_(made.noise(held))
        owner.let_go(dirty=True)
        made.check()


def test_a_block_whose_address_is_known_is_not_moved() -> None:
    with rig(10, [(4, "dram"), (2, "dram"), (7, "dram")]) as made:
        held, wide = in_the_middle(made)
        slot = made.manager.acquire(held)
        with pytest.raises(CapacityError, match="in pieces") as caught:
            made.manager.acquire(wide)
        assert f"at least {exact_size(17 * PAGE)}" in str(caught.value)
        made.compare(slot.bytes, held)
        made.manager.release(held)
        made.use(wide)
        made.check()


def test_a_block_that_is_seen_is_not_moved() -> None:
    with rig(10, [(4, "dram"), (2, "dram"), (7, "dram")]) as made:
        held, wide = in_the_middle(made)
        owner = Owner(made.manager, held)
        view = owner.hold().views[0][1:]
        with pytest.raises(CapacityError, match="in pieces"):
            made.manager.acquire(wide)
        assert view.numpy().tobytes() == made.data[held.id][1:]
        del view
        made.use(wide)
        owner.let_go()
        made.check()


def in_two_pieces(made: Rig) -> tuple[Block, Block]:
    """Puts a block that is there for good into the middle of ten pages; 7 are wanted beside it."""
    made.manager.acquire(made.blocks[0])
    fixed = made.add(2, "hbm")
    made.manager.release(made.blocks[0])
    assert where(made) == {0: 0, 2: 4}
    return fixed, made.blocks[1]


def test_what_is_there_for_good_is_moved_and_streams_are_told() -> None:
    with rig(10, [(4, "dram"), (7, "dram")]) as made:
        _, wide = in_two_pieces(made)
        changes = made.manager.parts.evictor.regions.changes
        made.use(wide)
        assert where(made) == {1: 2, 2: 0}
        assert made.manager.parts.evictor.regions.changes == changes + 1
        made.check()


def test_what_is_known_by_its_address_is_not_moved() -> None:
    """Seats of experts lie in one, and CUDA graphs have been captured of another."""
    with rig(10, [(4, "dram"), (7, "dram")]) as made:
        fixed, wide = in_two_pieces(made)
        made.manager.record(fixed).still = True
        with pytest.raises(CapacityError, match="in pieces"):
            made.use(wide)
        assert where(made)[2] == 4
        made.check()


def test_what_is_used_together_finds_room_together() -> None:
    with rig(10, [(4, "dram"), (2, "dram"), (7, "dram"), (1, "dram")]) as made:
        held, wide = in_the_middle(made)
        slots = made.manager.acquire_all([held, made.blocks[3], wide])
        for slot, block in zip(slots, (held, made.blocks[3], wide), strict=True):
            made.compare(slot.bytes, block)
            assert made.manager.parts.slots.current[block.id] is slot
            made.manager.release(block)
        assert not made.manager.parts.evictor.rules.unseen
        made.check()


def test_what_is_only_pointed_at_is_moved_as_well() -> None:
    """A parameter still points at a block that is being gathered with others."""
    with rig(10, [(4, "dram"), (2, "dram"), (7, "dram")]) as made:
        held, wide = in_the_middle(made)
        owner = Owner(made.manager, held)
        owner.hold()
        owner.let_go(soft=True)
        slots = made.manager.acquire_all([held, wide])
        assert owner.param.numel() == 0, "it has let go"
        for slot, block in zip(slots, (held, wide), strict=True):
            made.compare(slot.bytes, block)
            made.manager.release(block)
        made.check()


def test_a_weight_does_not_lie_where_its_gradient_would_not_fit() -> None:
    """What backward needs beside a weight fits wherever the weight happened to be."""
    with rig(10, [(4, "dram"), (2, "dram")]) as made:
        grad = made.add(8, "dram", Role.GRAD, blank=True)
        weight = made.blocks[1]
        made.use(made.blocks[0])
        made.use(weight)
        view = made.manager.acquire(weight).views[0][1:]
        made.manager.release(weight)
        made.manager.acquire(grad)
        made.manager.release(grad)
        assert view.numpy().tobytes() == made.data[weight.id][1:]


def test_fixed_blocks_that_do_not_fit_take_nothing_with_them() -> None:
    with rig(4, [(2, "dram")]) as made:
        shape = TensorShape("t", (3 * PAGE,), (1,), torch.uint8, 1)
        before = made.manager.stats().used
        wanted = [("a", Role.PARAM, [shape]), ("b", Role.PARAM, [shape])]
        with pytest.raises(CapacityError, match=rf"at least .*\({6 * PAGE} bytes\)"):
            made.manager.add_blocks(wanted, home="hbm")
        assert made.manager.stats().used == before and len(made.manager.parts.table) == 1
        made.check()


def test_one_fixed_block_among_others_that_fails_leaves_none() -> None:
    policy = Policy(params="dram", grads="hbm")
    manager = BlockManager(Settings("cpu", 2 * PAGE, 64 * PAGE, (), None, policy, "auto"))
    shape = TensorShape("t", (3 * PAGE,), (1,), torch.uint8, 1)
    with pytest.raises(CapacityError):
        manager.add_blocks([("a", Role.PARAM, [shape]), ("b", Role.GRAD, [shape])])
    assert len(manager.parts.table) == 0 and manager.stats().used["dram"] == 0
    manager.close()


# -- homes ----------------------------------------------------------------------


def homes(pages: int) -> Homes:
    return Homes(pages * PAGE, (), None, torch.device("cpu"))


def test_the_least_dram_that_is_named_is_enough() -> None:
    request = [HomeRequest(f"b{i}", 3 * PAGE, "hbm" if i == 1 else "dram") for i in range(4)]
    store = homes(10)
    store.reserve([HomeRequest("other", 2 * PAGE, "dram")])
    with pytest.raises(CapacityError, match="'b3'") as caught:
        store.reserve(request)
    assert store.dram.used == 2 * PAGE, "nothing of it is kept"
    assert f"at least {exact_size(11 * PAGE)}," in str(caught.value)
    store.close()
    store = homes(11)
    store.reserve([HomeRequest("other", 2 * PAGE, "dram")])
    given = store.reserve(request)
    assert [tier for tier, _ in given] == [Tier.DRAM, Tier.HBM, Tier.DRAM, Tier.DRAM]
    store.close()


def test_dram_in_pieces_is_said_to_be() -> None:
    store = homes(6)
    given = store.reserve([HomeRequest(f"b{i}", 2 * PAGE, "dram") for i in range(3)])
    for tier, extent in (given[0], given[2]):
        store.release(tier, extent or Extent(0, 0))
    with pytest.raises(CapacityError, match="in pieces"):
        store.reserve([HomeRequest("wide", 3 * PAGE, "dram")])
    with pytest.raises(CapacityError, match="there is none"):
        store.reserve([HomeRequest("disk", PAGE, "nvme")])
    store.close()


def test_what_was_placed_around_space_that_is_given_up_is_placed_anew() -> None:
    """DRAM that holds all of it is never too small because something was in the way before."""
    store = homes(8)
    before, lent, behind = (store.lend(pages * PAGE) for pages in (2, 3, 3))
    assert before is not None and lent is not None and behind is not None
    store.release(Tier.DRAM, before), store.release(Tier.DRAM, behind)
    kept = [lent]

    def give_up() -> bool:
        for extent in kept:
            store.release(Tier.DRAM, extent)
        return bool(kept) and not kept.clear()

    store.reclaimers.append(give_up)
    # the first has two pages before what is lent or three behind it, so that five are never in one
    given = store.reserve([HomeRequest(f"b{i}", n * PAGE, "dram") for i, n in enumerate((1, 2, 5))])
    assert {tier for tier, _ in given} == {Tier.DRAM} and store.dram.used == 8 * PAGE
    with pytest.raises(CapacityError):
        store.reserve([HomeRequest("more", PAGE, "dram")])
    store.close()
