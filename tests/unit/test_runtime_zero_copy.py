"""When a block may be looked at where it lies in DRAM, and what that leaves as it was."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from support_runtime import Rig, rig

from tiermem.core.block import Block
from tiermem.core.residency import State
from tiermem.runtime.transfers.deferred import Deferred

BLOCKS = [(1, "dram")] * 4


def glance(bench: Rig, block: Block, *, again: bool = False) -> torch.Tensor | None:
    """Returns what a kernel sees of a block in place, if it may look."""

    def look(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tensors[0].clone()

    return bench.manager.zero_copy.read(block, look, 7, again=again)


def seen(bench: Rig, block: Block, *, again: bool = False) -> bool:
    """Whether a kernel may look; if so, it sees what the block holds."""
    found = glance(bench, block, again=again)
    if found is not None:
        bench.compare(found, block)
    return found is not None


def test_it_moves_nothing_and_tells_the_planner_nothing() -> None:
    with rig(2, BLOCKS) as bench:
        manager = bench.manager
        assert all(seen(bench, block) for block in bench.blocks)
        stats = manager.stats()
        assert (stats.reads_in_place, stats.read_in_place) == (4, 28)
        assert not stats.links and not stats.misses and not manager.parts.planner.schedule.order
        assert all(record.extent is None for record in manager.parts.table)
        bench.check()


def test_where_everything_fits_in_hbm_it_is_used_there() -> None:
    with rig(4, BLOCKS) as bench:
        assert not seen(bench, bench.blocks[0])
        bench.add(1, "dram")
        assert seen(bench, bench.blocks[0])
        bench.manager.remove_blocks([bench.blocks.pop()])
        assert not seen(bench, bench.blocks[0])


def test_what_is_in_hbm_as_well_may_be_looked_at_in_dram() -> None:
    with rig(2, BLOCKS) as bench:
        bench.use(bench.blocks[0])
        assert seen(bench, bench.blocks[0])
        assert bench.manager.parts.table[bench.blocks[0].id].in_hbm is State.VALID


def test_what_was_written_in_hbm_is_copied_home_first_or_not_looked_at() -> None:
    with rig(2, BLOCKS) as bench:
        block = bench.blocks[0]
        bench.use(block)
        bench.write(block)
        assert not seen(bench, block)
        assert seen(bench, block, again=True)
        assert seen(bench, block)
        assert bench.manager.stats().write_backs == 1
        bench.check()


@pytest.mark.parametrize("again", [False, True])
def test_what_somebody_holds_may_be_being_written(again: bool) -> None:
    with rig(2, BLOCKS) as bench:
        block = bench.blocks[0]
        slot = bench.manager.acquire(block)
        slot.bytes.copy_(bench.noise(block))
        assert not seen(bench, block, again=again)
        bench.manager.release(block, dirty=True)
        assert seen(bench, block, again=again) is again


@pytest.mark.parametrize("again", [False, True])
def test_what_somebody_has_a_view_of_may_be_being_written(again: bool) -> None:
    with rig(2, BLOCKS) as bench:
        block = bench.blocks[0]
        view = bench.manager.acquire(block).bytes[:]
        bench.manager.release(block)
        assert not seen(bench, block, again=again)
        del view
        assert seen(bench, block, again=again)


def test_what_is_owed_to_it_comes_first() -> None:
    with rig(2, BLOCKS) as bench:
        manager, block = bench.manager, bench.blocks[0]
        manager.parts.deferred.add(Deferred("step", [block.id], lambda: bench.write(block)))
        assert not seen(bench, block)
        bench.use(block)
        assert seen(bench, block, again=True)


def test_what_is_lent_to_the_host_is_not_looked_at() -> None:
    with rig(2, BLOCKS) as bench:
        manager, block = bench.manager, bench.blocks[0]
        assert seen(bench, block)
        (tensors,), _ = manager.host_loans.lend([block])
        assert not seen(bench, block)
        tensors[0].copy_(bench.noise(block))
        manager.host_loans.give_back([block])
        assert seen(bench, block)


def test_an_error_of_the_kernel_is_the_callers() -> None:
    with rig(2, BLOCKS) as bench:

        def fail(tensors: Sequence[torch.Tensor]) -> None:
            raise IndexError("no such row")

        with pytest.raises(IndexError, match="no such row"):
            bench.manager.zero_copy.read(bench.blocks[0], fail, 7, again=False)
        assert seen(bench, bench.blocks[0])
        bench.check()


@pytest.mark.parametrize("when", ["look", "mark"])
def test_cut_short_the_host_waits_for_kernels_that_nobody_knows_of(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    with rig(2, BLOCKS) as bench:
        manager, waited = bench.manager, []

        def cut(*_: object) -> None:
            raise KeyboardInterrupt

        look = cut if when == "look" else lambda tensors: tensors[0].clone()
        with monkeypatch.context() as patch:
            patch.setattr(manager.parts.copy, "synchronize", lambda: waited.append(1))
            if when == "mark":
                patch.setattr(manager.parts.copy, "mark", cut)
            with pytest.raises(KeyboardInterrupt):
                manager.zero_copy.read(bench.blocks[0], look, 7, again=False)
            assert waited
            waited.clear()
        assert seen(bench, bench.blocks[0])
        assert manager.stats().reads_in_place == 1 and not waited
        bench.check()


def test_a_block_without_data_and_one_in_hbm_for_good_are_not_looked_at() -> None:
    with rig(3, [*BLOCKS, (1, "hbm")]) as bench:
        blank = bench.add(1, "dram", blank=True)
        assert glance(bench, blank) is None
        assert glance(bench, bench.blocks[4]) is None


def test_a_place_that_the_device_does_not_reach_is_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with rig(2, BLOCKS) as bench:
        monkeypatch.setattr(bench.manager.parts.copy, "seen", lambda source: None)
        assert not seen(bench, bench.blocks[0])
        bench.check()


def test_in_a_captured_graph_it_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(2, BLOCKS) as bench:
        monkeypatch.setattr(bench.manager.parts.copy, "capturing", lambda: True)
        assert not seen(bench, bench.blocks[0])
