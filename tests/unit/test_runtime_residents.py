"""Blocks that stay while a loop streams the rest past them: where they lie, and what moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tiermem.config import Policy, Settings
from tiermem.core.block import Block, Role
from tiermem.core.layout import TensorShape
from tiermem.runtime.manager import BlockManager

PAGE = 4096
SIZES = [3, 1, 1, 2, 5, 4, 1, 3, 2, 2, 1, 5, 3, 1, 4, 2]


def opened(sizes: list[int], hbm: int, depth: int) -> BlockManager:
    made = BlockManager(
        Settings(
            device="cpu",
            hbm=hbm * PAGE,
            dram=sum(sizes) * PAGE,
            nvme=(),
            nvme_bytes=None,
            policy=Policy(params="dram"),
            prefetch_depth=depth,
        )
    )
    made.prefetcher.fetcher.beside = True  # as on a GPU
    return made


@pytest.fixture(params=[1, 2, 3, 4])
def manager(request: pytest.FixtureRequest) -> Iterator[BlockManager]:
    made = opened(SIZES, sum(SIZES) // 2, request.param)
    yield made
    made.close()


def blocks_of(manager: BlockManager, sizes: list[int] = SIZES) -> list[Block]:
    wanted = [
        (
            f"b{i}",
            Role.PARAM,
            [TensorShape("w", (pages * PAGE,), (1,), torch.uint8, 1)],
        )
        for i, pages in enumerate(sizes)
    ]
    blocks = manager.add_blocks(wanted)
    for number, block in enumerate(blocks):
        manager.write_home(block, [torch.full((block.nbytes,), number, dtype=torch.uint8)])
    return blocks


def go_round(manager: BlockManager, blocks: list[Block], key: str = "loop") -> None:
    manager.begin_pass(key)
    for number, block in enumerate(blocks):
        slot = manager.acquire(block)
        assert bool((slot.bytes == number).all())
        manager.release(block)
    manager.parts.table.check()


def test_a_loop_moves_only_what_does_not_stay(manager: BlockManager) -> None:
    """Blocks of many sizes: room lost between them would show as bytes moved, or as waits."""
    blocks = blocks_of(manager)
    for _ in range(16):
        go_round(manager, blocks)
    residents = manager.parts.evictor.residents
    stay = sum(b.nbytes for b in blocks if b.id in residents)
    reserve = sum(sorted(SIZES)[-1 - manager.parts.settings.prefetch_depth :])  # type: ignore[operator]
    assert stay >= (sum(SIZES) // 2 - reserve) * PAGE
    manager.parts.counters.reset()
    go_round(manager, blocks)
    go_round(manager, blocks)
    moved = manager.parts.counters.links()["dram->hbm"].nbytes
    assert moved <= 2 * (sum(SIZES) * PAGE - stay)
    assert manager.parts.counters.misses == 0
    border = manager.parts.table.hbm.capacity - stay
    for block in blocks:
        extent = manager.record(block).extent
        if block.id in residents:
            assert extent is not None and extent.offset >= border
        elif extent is not None:
            assert extent.end <= border


def test_another_loop_may_have_other_residents(manager: BlockManager) -> None:
    """What stayed for one loop makes room in the next, and everything is still right."""
    blocks = blocks_of(manager)
    first, second = blocks[:12], blocks[4:]
    for _ in range(6):
        for _ in range(8):
            go_round(manager, first, "first")
        manager.begin_pass("second")
        for number, block in enumerate(second):
            slot = manager.acquire(block)
            assert bool((slot.bytes == number + 4).all())
            manager.release(block)
        manager.parts.table.check()


def test_blocks_of_a_decoder_are_never_late() -> None:
    """Four small and three large in every layer: holes between them would hold the next up."""
    sizes = [1, 4, 4, 4, 4, 11, 11, 11] * 12
    manager = opened(sizes, sum(sizes) // 2 + 1, depth=1)
    blocks = blocks_of(manager, sizes)
    for _ in range(12):
        go_round(manager, blocks)
    manager.parts.counters.reset()
    go_round(manager, blocks)
    assert manager.parts.counters.misses == 0
    manager.close()


def test_what_stays_moves_together_where_it_leaves_holes_too_small() -> None:
    """One of two pages in the middle of six: three more would not fit on either side."""
    manager = opened([1, 2, 3], 6, depth=0)
    small, middle, large = blocks_of(manager, [1, 2, 3])
    evictor = manager.parts.evictor
    manager.acquire(large)  # nothing is planned from here on
    manager.release(large)
    evictor.evict(manager.record(large))
    evictor.keep(frozenset({small.id, middle.id}), PAGE)
    for block in (middle, small):
        manager.acquire(block)
        manager.release(block)
    extent = manager.record(middle).extent
    assert extent is not None and extent.offset == 3 * PAGE
    evictor.keep(frozenset({middle.id, large.id}), PAGE)
    loop = object()
    evictor.rearrange(loop)
    assert manager.record(middle).extent == extent  # it may be for one round only
    fetched = manager.parts.counters.misses
    evictor.rearrange(loop)
    moved = manager.record(middle).extent
    assert moved is not None and moved.offset == PAGE
    for block in (large, middle):
        manager.acquire(block)
        manager.release(block)
    ends = sorted(r.extent.end // PAGE for b in (large, middle) if (r := manager.record(b)).extent)
    assert ends == [3, 6] and manager.parts.counters.misses == fetched + 1
    manager.parts.table.check()
    manager.close()


@pytest.mark.parametrize("slot", [PAGE, 0])
def test_what_stays_is_left_where_it_lies_if_nothing_streams(slot: int) -> None:
    """It would only be brought up again, for blocks that there are not."""
    manager = opened([1, 2], 8, depth=0)
    small, large = blocks_of(manager, [1, 2])
    for block in (small, large):
        manager.acquire(block)
        manager.release(block)
    evictor, loop = manager.parts.evictor, object()
    evictor.keep(frozenset({small.id, large.id}), slot)
    evictor.rearrange(loop)
    evictor.rearrange(loop)
    inside = [manager.record(block).extent is not None for block in (small, large)]
    assert inside == [slot == 0] * 2
    manager.parts.table.check()
    manager.close()


def test_what_stays_makes_place_for_others_where_it_is_missing_itself() -> None:
    """Nothing streams, but a stranger lies where the one that is missing belongs."""
    manager = opened([1, 1, 2, 2], 5, depth=0)
    stranger, other, there, missing = blocks_of(manager, [1, 1, 2, 2])
    evictor, loop = manager.parts.evictor, object()
    for residents, used in (((stranger, other), stranger), ((there, missing), there)):
        evictor.keep(frozenset(block.id for block in residents), 0)
        manager.acquire(used)
        manager.release(used)
    evictor.rearrange(loop)
    evictor.rearrange(loop)
    assert manager.record(stranger).extent is None
    assert manager.record(there).extent is not None
    manager.parts.table.check()
    manager.close()


def test_what_stays_leaves_no_other_for_want_of_a_place_in_its_region() -> None:
    """One of a page in the middle leaves none for two pages, of which there are more elsewhere."""
    manager = opened([1, 2, 2, 3], 8, depth=0)
    middle, first, last, gone = blocks_of(manager, [1, 2, 2, 3])
    evictor = manager.parts.evictor
    evictor.keep(frozenset({middle.id, gone.id}), 0)
    manager.acquire(middle)
    manager.release(middle)
    evictor.keep(frozenset({middle.id, first.id, last.id}), 0)
    for block in (first, last):
        manager.acquire(block)
        manager.release(block)
    assert all(manager.record(block).extent for block in (middle, first, last))
    assert manager.parts.counters.evictions == 0
    manager.parts.table.check()
    manager.close()


def test_what_stays_is_left_where_something_of_no_use_may_leave_instead() -> None:
    """It lies where others stream, and the other one lies at the border of the two regions."""
    manager = opened([2, 3, 3], 6, depth=0)
    stays, unused, comes = blocks_of(manager, [2, 3, 3])
    for block in (stays, unused):
        manager.acquire(block)
        manager.release(block)
    manager.parts.evictor.keep(frozenset({stays.id}), 0)
    manager.acquire(comes)
    assert manager.record(stays).extent is not None
    assert manager.record(unused).extent is None
    manager.release(comes)
    manager.parts.table.check()
    manager.close()
