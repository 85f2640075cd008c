"""Reads straight into HBM that begin before there is room: what becomes of them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support_runtime import PAGE, Rig, park_always, rig

from tiermem.errors import StorageError
from tiermem.io.engine import IoOp, IoRequest
from tiermem.testing.io import Fault, ScriptedEngine
from tiermem.transfer.file.mover import Fence, FileMover, FileTransfer, HostCopier

BLOCKS = [(1, "nvme")] * 8


class Copier:
    """Copies at once, in the pump's thread, as a device's copies begin there."""

    def to_target(
        self, target: torch.Tensor, staging: torch.Tensor, after: Sequence[Any] = ()
    ) -> Fence:
        return HostCopier().to_target(target, staging)

    def from_source(self, staging: torch.Tensor, source: torch.Tensor) -> Fence:
        return HostCopier().from_source(staging, source)


@contextmanager
def parking(folder: Path, hbm: int = 2, fault: Any = None) -> Iterator[Rig]:
    """Opens a rig whose plans all have the disk begin before there is room."""
    with rig(hbm, BLOCKS, nvme=folder) as made:
        manager = made.manager
        homes = manager.parts.homes
        assert (
            manager.parts.mover is not None and homes.swap is not None and homes.staging is not None
        )
        manager.parts.mover.close()
        made.engine = engine = ScriptedEngine(fault=fault)
        manager.parts.transfers.mover = FileMover(
            homes.swap, lambda: engine, homes.staging, homes.chunk, Copier()
        )
        park_always(manager.prefetcher)
        yield made


def loop(made: Rig, rounds: int = 1) -> None:
    for _ in range(rounds):
        made.manager.begin_pass("f")
        for block in made.blocks:
            made.use(block)


def parked(made: Rig) -> list[str]:
    """Returns the names of the blocks whose reads have no place yet."""
    table = made.manager.parts.table
    return [table[block_id].block.name for block_id in made.manager.parts.transfers.ahead.parked]


def test_every_block_is_read_once_a_round(tmp_path: Path) -> None:
    with parking(tmp_path) as made:
        loop(made, 4)
        made.manager.flush()
        (name,) = parked(made)
        assert name == "block1", "the first of the next round has room already"
        assert made.engine is not None
        made.engine.log.clear()
        loop(made, 10)
        made.manager.flush()
        reads = [request for request in made.engine.log if request.op is IoOp.READ]
        assert len(reads) == 10 * len(made.blocks)
        made.check()


def test_a_block_that_loses_its_data_is_not_read_as_it_was(tmp_path: Path) -> None:
    with parking(tmp_path) as made:
        loop(made, 4)
        (name,) = parked(made)
        (block,) = [block for block in made.blocks if block.name == name]
        made.manager.discard(block)
        assert not parked(made)
        made.write(block)
        loop(made, 2)
        made.check()


def test_a_home_that_was_written_meanwhile_is_read_anew(tmp_path: Path) -> None:
    """Whoever writes it: the read has none of the new bytes."""
    with parking(tmp_path) as made:
        loop(made, 4)
        (block_id,) = made.manager.parts.transfers.ahead.parked
        record = made.manager.parts.table[block_id]
        mover = made.manager.parts.transfers.need_mover()
        assert record.home_extent is not None
        write = mover.write(record.home_extent, made.noise(record.block), label="elsewhere")
        mover.wait(write)
        assert write.error is None
        loop(made, 2)
        made.check()


@pytest.mark.parametrize("what", ["remove", "close"])
def test_it_is_nobody_s_when_its_block_goes(what: str, tmp_path: Path) -> None:
    with parking(tmp_path) as made:
        loop(made, 4)
        (name,) = parked(made)
        entry = next(iter(made.manager.parts.transfers.ahead.parked.values()))
        if what == "remove":
            (block,) = [block for block in made.blocks if block.name == name]
            made.manager.remove_blocks([block])
            made.blocks.remove(block)
            made.manager.parts.transfers.need_mover().wait(entry.transfer)
            assert not parked(made)
            loop(made, 2)
            made.check()
        else:
            made.manager.close()
            made.manager.parts.transfers.ahead.drop(
                next(iter(made.manager.parts.transfers.ahead.parked))
            )
        assert entry.transfer.error is not None


def failing(offsets: set[int]) -> Callable[[IoRequest, int], Fault | None]:
    def fault(request: IoRequest, tries: int) -> Fault | None:
        bad = request.op is IoOp.READ and request.offset in offsets
        return Fault(errno=errno.EIO) if bad else None

    return fault


def test_one_that_fails_is_made_again_and_that_one_s_error_counts(tmp_path: Path) -> None:
    offsets: set[int] = set()
    with parking(tmp_path, fault=failing(offsets)) as made:
        loop(made, 4)
        made.manager.flush()
        extent = made.manager.record(made.blocks[5]).home_extent
        assert extent is not None
        offsets.add(extent.offset)
        with pytest.raises(StorageError, match="block5"):
            loop(made)
        offsets.clear()
        loop(made, 2)
        made.check()


def test_another_order_leaves_nothing_behind(tmp_path: Path) -> None:
    with parking(tmp_path) as made:
        loop(made, 4)
        for number in (6, 2, 6, 0, 7, 3, 3, 1):
            made.manager.begin_pass("other")
            made.use(made.blocks[number])
        assert len(parked(made)) <= 1
        loop(made, 2)
        made.check()
        assert made.manager.stats().used["hbm"] <= 2 * PAGE


@pytest.mark.parametrize("when", ["before", "after"])
def test_ctrl_c_as_it_gets_a_place_leaves_no_read_behind(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with parking(tmp_path, hbm=3) as made:
        loop(made, 4)
        mover = made.manager.parts.transfers.need_mover()
        land = mover.land

        def interrupted(*args: Any, **settings: Any) -> Any:
            if when == "after":
                land(*args, **settings)
            monkeypatch.setattr(mover, "land", land)
            raise KeyboardInterrupt

        monkeypatch.setattr(mover, "land", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop(made, 2)
        loop(made, 2)
        made.check()
        waiting = mover._pump.pieces.queue.without_target()
        assert [job.transfer.label for job in waiting] == parked(made)


def test_the_time_it_rested_is_not_the_disk_s(tmp_path: Path) -> None:
    with parking(tmp_path) as made:
        block = made.blocks[0]
        extent = made.manager.record(block).home_extent
        assert extent is not None
        transfer = FileTransfer(extent, is_read=True, label="b", urgent=False)
        transfer.started_ns, transfer.rested_ns, transfer.finished_ns = 1000, 400_000, 1_001_000
        made.manager.parts.counters.reset()
        made.manager.parts.transfers.log.landed("nvme->hbm", block, transfer)
        link = made.manager.stats().links["nvme->hbm"]
        assert link.seconds == pytest.approx(600e-6)
