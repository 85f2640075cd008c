"""The block manager under faults: failing starts, failing disks, endings."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support_process import nothing_left_open
from support_runtime import PAGE, Owner, Rig, rig

import tiermem.runtime.manager as manager_module
from tiermem.config import Policy, Settings
from tiermem.core.block import Role
from tiermem.core.residency import State
from tiermem.errors import CapacityError, ClosedError, InvariantError, StorageError
from tiermem.io.engine import IoOp
from tiermem.runtime import assembly
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.memory import opening
from tiermem.testing.io import Fault, ScriptedEngine


def leases_of(made: Rig) -> dict[str, int]:
    return {r.block.name: r.leases for r in made.manager.parts.table if r.leases}


# -- starts that fail --------------------------------------------------------


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException) -> None:
    real = getattr(owner, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(owner, name, real)
        raise error

    monkeypatch.setattr(owner, name, broken)


@pytest.mark.parametrize(
    ("part", "name", "wanted"),
    [
        ("copy", "up", 0),
        ("copy", "guards", 1),
        ("mover", "read", 1),
        ("slots", "enter", 0),
        ("slots", "enter", 1),
        ("copy", "claim", 2),
        ("slots", "enter", 2),
        ("copy", "use", 0),
    ],
)
@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), MemoryError(), KeyboardInterrupt()])
def test_a_fill_that_cannot_begin_changes_nothing(
    tmp_path, monkeypatch, part, name, wanted, error
) -> None:
    with rig(8, [(2, "dram"), (2, "nvme")], nvme=tmp_path) as made:
        made.add(2, "dram", blank=True)
        fail_once(monkeypatch, getattr(made.manager.parts, part), name, error)
        with pytest.raises(type(error)):
            made.manager.acquire(made.blocks[wanted])
        assert leases_of(made) == {}
        made.check()
        assert made.manager.parts.table.hbm.used == sum(
            r.extent.nbytes for r in made.manager.parts.table if r.extent is not None
        ) + sum(e.nbytes for e in made.manager.parts.table.orphans())
        made.manager.acquire(made.blocks[wanted])
        made.manager.release(made.blocks[wanted])
        made.check()


@pytest.mark.parametrize(
    ("part", "name", "home"),
    [("copy", "down", "dram"), ("copy", "prepare_down", "nvme"), ("mover", "write", "nvme")],
)
def test_a_write_back_that_cannot_begin_changes_nothing(
    tmp_path, monkeypatch, part, name, home
) -> None:
    with rig(4, [(3, home), (3, "dram")], nvme=tmp_path) as made:
        dirty, other = made.blocks
        made.manager.acquire(dirty).bytes.copy_(made.noise(dirty))
        made.manager.release(dirty, dirty=True)
        fail_once(monkeypatch, getattr(made.manager.parts, part), name, RuntimeError("no"))
        with pytest.raises(RuntimeError):
            made.manager.acquire(other)
        assert made.manager.record(dirty).in_hbm is State.DIRTY
        made.check()
        made.use(other)
        assert made.manager.record(dirty).in_hbm is State.ABSENT
        made.check()


def test_a_read_posted_and_lost_is_never_written_over(tmp_path, monkeypatch) -> None:
    """Ctrl-C between the start of a read and the note of it: its bytes may come at any time."""
    with rig(4, [(2, "nvme"), (2, "dram")], nvme=tmp_path) as made:
        mover = made.manager.parts.mover
        real = mover.read

        def posted(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.setattr(mover, "read", real)
            made.engine.hold()
            real(*args, **kwargs)
            raise KeyboardInterrupt

        monkeypatch.setattr(mover, "read", posted)
        with pytest.raises(KeyboardInterrupt):
            made.manager.acquire(made.blocks[0])
        (lost,) = made.manager.parts.table.orphans()
        made.use(made.blocks[1])
        slot = made.manager.acquire(made.blocks[1])
        assert slot.extent.end <= lost.offset or lost.end <= slot.extent.offset
        made.engine.release()
        made.manager.release(made.blocks[1])
        made.use(made.blocks[0])
        made.check()


def test_waiting_can_be_interrupted(tmp_path, monkeypatch) -> None:
    with rig(4, [(2, "nvme")], nvme=tmp_path) as made:
        fail_once(monkeypatch, made.manager.parts.mover, "wait", KeyboardInterrupt())
        made.engine.hold()
        with pytest.raises(KeyboardInterrupt):
            made.manager.acquire(made.blocks[0])
        assert made.manager.record(made.blocks[0]).in_hbm is State.FILLING
        made.engine.release()
        made.use(made.blocks[0])
        made.check()


# -- disks that fail ---------------------------------------------------------


class Breaks:
    """A disk that can be told which operation fails."""

    def __init__(self) -> None:
        self.op: IoOp | None = None
        self.code = errno.EIO
        self.tries = 0

    def __call__(self, request: Any, tries: int) -> Fault | None:
        if request.op is not self.op:
            return None
        self.tries += 1
        return Fault(errno=self.code)


def settle(made: Rig) -> None:
    made.engine.release()
    made.manager.flush()


def test_a_fetch_ahead_that_failed_is_made_again(tmp_path) -> None:
    disk = Breaks()
    with rig(12, [(2, "dram"), (2, "nvme")], nvme=tmp_path, fault=disk) as made:
        first, second = made.blocks
        disk.op = IoOp.READ
        made.manager.begin_pass("f", [first.id, second.id])
        settle(made)
        assert made.manager.stats().errors == 1
        assert made.manager.record(second).in_hbm is State.ABSENT
        with pytest.raises(StorageError) as caught:
            made.manager.acquire(second)
        assert (caught.value.block, caught.value.errno) == (second.name, errno.EIO)
        disk.op = None
        made.use(second)
        made.check()


def test_the_wait_for_a_fetch_ahead_that_fails_tries_again(tmp_path) -> None:
    disk = Breaks()
    with rig(12, [(2, "dram"), (2, "nvme")], nvme=tmp_path, fault=disk) as made:
        disk.op = IoOp.READ
        made.engine.hold()
        made.manager.begin_pass("f", [block.id for block in made.blocks])
        assert made.manager.record(made.blocks[1]).in_hbm is State.FILLING
        made.engine.release()
        with pytest.raises(StorageError):
            made.manager.acquire(made.blocks[1])
        assert disk.tries >= 2
        disk.op = None
        made.use(made.blocks[1])
        made.check()


def test_a_full_disk_is_not_tried_again_and_again_ahead_of_need(tmp_path) -> None:
    disk = Breaks()
    disk.code = errno.ENOSPC
    with rig(4, nvme=tmp_path, fault=disk, depth=2) as made:
        # of a role that is written, so that neither is promised a part of HBM of its own
        dirty, other = (made.add(3, "nvme", Role.OPTIMIZER) for _ in range(2))
        made.write(dirty)
        disk.op = IoOp.WRITE
        for number in range(5):
            made.manager.begin_pass(number, [other.id])
            settle(made)
        assert disk.tries == 1
        assert made.manager.record(dirty).in_hbm is State.DIRTY
        with pytest.raises(StorageError) as caught:
            made.manager.acquire(other)
        assert (caught.value.block, caught.value.errno) == (dirty.name, errno.ENOSPC)
        disk.op = None
        made.use(other)
        made.check()


def test_only_part_of_a_window_cleared(tmp_path) -> None:
    """One of two victims cannot be written: what left has left, nothing is lost."""
    disk = Breaks()
    with rig(4, [(2, "dram"), (2, "nvme"), (4, "dram")], nvme=tmp_path, fault=disk) as made:
        made.write(made.blocks[0])
        made.write(made.blocks[1])
        disk.op = IoOp.WRITE
        with pytest.raises(StorageError):
            made.manager.acquire(made.blocks[2])
        disk.op = None
        made.check()
        made.use(made.blocks[2])
        made.check()


def test_discarding_what_is_being_written_waits_for_it(tmp_path) -> None:
    with rig(4, nvme=tmp_path, depth=2) as made:
        dirty, other = (made.add(3, "nvme", Role.OPTIMIZER) for _ in range(2))
        made.write(dirty)
        made.engine.hold()
        made.manager.begin_pass("f", [other.id])
        assert made.manager.record(dirty).in_hbm is State.DRAINING
        made.engine.release()
        made.manager.discard(dirty)
        assert not made.manager.record(dirty).defined
        made.data.pop(dirty.id)
        made.check()


def test_removing_blocks_under_way(tmp_path) -> None:
    with rig(8, [(3, "nvme"), (3, "nvme")], nvme=tmp_path) as made:
        made.engine.hold()
        made.manager.begin_pass("f", [block.id for block in made.blocks])
        assert made.manager.record(made.blocks[0]).in_hbm is State.FILLING
        made.engine.release()
        made.manager.remove_blocks(made.blocks)
        made.manager.remove_blocks(made.blocks)
        assert len(made.manager.parts.table) == 0 and made.manager.parts.table.hbm.used == 0
        assert made.manager.stats().used["nvme"] == 0


def test_what_is_leased_is_not_removed() -> None:
    with rig(8, [(3, "dram"), (3, "dram")]) as made:
        made.manager.acquire(made.blocks[1])
        with pytest.raises(InvariantError, match="in use"):
            made.manager.remove_blocks(made.blocks)
        assert len(made.manager.parts.table) == 2
        made.manager.release(made.blocks[1])


# -- aliases -----------------------------------------------------------------


@pytest.mark.parametrize("removed", [False, True])
def test_who_looks_at_a_discarded_block_keeps_seeing_it(removed) -> None:
    with rig(4, [(2, "dram"), (2, "dram"), (2, "dram")]) as made:
        block = made.blocks[0]
        view = made.manager.acquire(block).views[0][7:]
        made.manager.release(block)
        data = made.data.pop(block.id)
        if removed:
            made.manager.remove_blocks([block])
            made.blocks.remove(block)
        else:
            made.manager.discard(block)
        for other in made.blocks[-2:]:
            made.use(other)
        assert view.numpy().tobytes() == data[7:]
        assert len(made.manager.parts.table.orphans()) == 1
        wide = made.add(3, "dram")
        with pytest.raises(CapacityError, match="still referred to"):
            made.manager.acquire(wide)
        del view
        made.use(wide)
        assert made.manager.parts.table.orphans() == []
        made.check()


# -- the end -----------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No descriptor and no thread outlives a manager."""
    with nothing_left_open():
        yield


@pytest.mark.parametrize(
    "what", ["MappedHostArena", "SlotCache", "Evictor", "FileMover", "Prefetcher"]
)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_opening_that_fails_leaves_nothing(tmp_path, monkeypatch, what, error) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    rooms = {"MappedHostArena": opening, "FileMover": opening, "Prefetcher": manager_module}
    monkeypatch.setattr(rooms.get(what, assembly), what, refuse)
    config = Settings("cpu", 8 * PAGE, 1 << 20, (str(tmp_path),), None, Policy(), "auto")
    with pytest.raises(error):
        BlockManager(config, ScriptedEngine)


def test_closing_while_things_are_under_way(tmp_path) -> None:
    with rig(8, [(2, "nvme"), (2, "nvme")], nvme=tmp_path) as made:
        made.engine.hold()
        made.manager.begin_pass("f", [block.id for block in made.blocks])
        assert made.manager.parts.transfers.flights
        made.manager.close()
        assert made.engine.in_flight == 0
        for call in (
            lambda: made.manager.acquire(made.blocks[0]),
            lambda: made.manager.acquire_all(made.blocks),
            lambda: made.manager.read(made.blocks[0]),
            lambda: made.manager.begin_pass("f"),
            lambda: made.manager.add_blocks([]),
        ):
            with pytest.raises(ClosedError):
                call()
        assert made.manager.residency() and made.manager.stats()
        made.manager.remove_blocks(made.blocks)


def test_closing_within_a_use_lets_it_end() -> None:
    with rig(8, [(2, "dram")]) as made:
        owner = Owner(made.manager, made.blocks[0])
        owner.hold()
        made.manager.close()
        made.compare(owner.param.detach(), made.blocks[0])
        owner.let_go(dirty=True)


def test_closing_goes_through_whatever_fails(tmp_path, monkeypatch) -> None:
    with rig(8, [(2, "nvme")], nvme=tmp_path) as made:
        owner = Owner(made.manager, made.blocks[0])

        def refuse() -> None:
            raise RuntimeError("no")

        monkeypatch.setattr(owner, "unpoint", refuse)
        with pytest.raises(RuntimeError, match="no"):
            made.manager.close()
        assert made.manager.gate.closed
        monkeypatch.undo()  # closing again does what could not be done


def test_closing_cut_short_can_be_done_again(tmp_path, monkeypatch) -> None:
    with rig(8, [(2, "nvme")], nvme=tmp_path) as made:
        fail_once(monkeypatch, made.manager.parts.mover, "close", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            made.manager.close()
        made.manager.parts.mover.close()
        made.manager.close()


def test_a_forked_child_is_refused_even_where_the_lock_was_taken() -> None:
    with rig(8, [(2, "dram")]) as made:
        manager, block = made.manager, made.blocks[0]
        taken, done = threading.Event(), threading.Event()

        def keep() -> None:
            with manager.lock:
                taken.set()
                done.wait(60)

        thread = threading.Thread(target=keep)
        thread.start()
        taken.wait(60)
        try:
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                code = 1
                try:
                    code = 0 if refused(manager, block) else 1
                finally:
                    os._exit(code)
            status = os.waitpid(child, 0)[1]
        finally:
            done.set()
            thread.join()
        assert os.waitstatus_to_exitcode(status) == 0
        made.use(block)
        made.check()


def refused(manager: BlockManager, block: Any) -> bool:
    count = 0
    for call in (
        lambda: manager.acquire(block),
        lambda: manager.read(block),
        lambda: manager.begin_pass("f"),
        lambda: manager.add_blocks([]),
        lambda: manager.write_home(block, [None]),
    ):
        try:
            call()
        except ClosedError as error:
            count += "forked child" in str(error)
    manager.close()
    manager.remove_blocks([block])
    return count == 5 and manager.gate.closed and bool(manager.residency())


def test_threads_may_call_at_once(tmp_path) -> None:
    sizes = [(2, "dram"), (2, "nvme"), (3, "nvme"), (1, "dram"), (2, "nvme"), (2, "dram")]
    sizes += sizes  # more than fits
    # three blocks in use lie at worst two pages apart, and a fourth of three pages must fit
    with rig(3 * 3 + 4 * 2 + 1, sizes, nvme=tmp_path) as made:
        wrong: list[BaseException] = []

        def work(start: int) -> None:
            try:
                for turn in range(60):
                    made.use(made.blocks[(start * 7 + turn * (start + 1)) % len(made.blocks)])
                    if turn % 10 == start:
                        made.manager.begin_pass(start, [b.id for b in made.blocks])
                        made.manager.residency()
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        made.check()


def test_bytes_that_leave_are_poisoned() -> None:
    with rig(2, [(2, "dram"), (2, "dram")]) as made:
        slot = made.manager.acquire(made.blocks[0])
        made.manager.release(made.blocks[0])
        made.manager.discard(made.blocks[0])
        made.data.pop(made.blocks[0].id)
        assert bool((slot.bytes == 0xFF).all())
        made.use(made.blocks[1])
        assert torch.equal(slot.bytes, made.manager.parts.slots.current[made.blocks[1].id].bytes)
