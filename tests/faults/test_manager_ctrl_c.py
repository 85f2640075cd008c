"""The block manager under Ctrl-C, at every line of every operation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support_examples import examples
from support_runtime import Rig, rig

import tiermem.runtime.manager as manager_module
from tiermem.transfer.file.mover import FileTransfer

RUNTIME = str(Path(manager_module.__file__).parent)
WATCHED = (
    "registry.py",
    "manager.py",
    "transfers/transfers.py",
    "transfers/departures.py",
    "transfers/transfer_log.py",
    "placement/evictor.py",
    "placement/leaving.py",
    "placement/compaction.py",
    "lookahead/prefetcher.py",
    "lookahead/walks.py",
    "lookahead/disk_ahead.py",
    "acquire.py",
    "lookahead/replay.py",
)


_STEP = examples(3, 1)
"""Every so many lines are tried, from a first one that differs between operations."""


class Stop(BaseException):
    """Stands for Ctrl-C."""


def cut_short(call: Callable[[], Any], number: int) -> bool:
    """Runs ``call``, raising before its ``number``-th line in the runtime.

    Returns:
        Whether it came to that line.
    """
    lines = 0
    hit = False

    def local(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines, hit
        if event == "line" and not hit:
            lines += 1
            if lines == number:
                hit = True
                raise Stop
        return local

    def trace(frame: FrameType, _event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        return local if file.startswith(RUNTIME) and file.endswith(WATCHED) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Stop:
        pass
    finally:
        sys.settrace(before)
    return hit


OPERATIONS: dict[str, Callable[[Rig], Any]] = {
    "fill from dram": lambda m: m.manager.acquire(m.blocks[0]),
    "fill from nvme": lambda m: m.manager.acquire(m.blocks[1]),
    "evict what is dirty on nvme": lambda m: m.manager.acquire(m.blocks[4]),
    "discard": lambda m: m.manager.discard(m.blocks[3]),
    "read": lambda m: m.manager.read(m.blocks[1]),
    "begin a pass": lambda m: m.manager.begin_pass("x", [b.id for b in m.blocks]),
    "remove": lambda m: m.manager.remove_blocks([m.blocks[3]]),
}


def only_while_waited_for(made: Rig) -> None:
    """Makes file transfers end only while one of them is waited for."""
    made.manager.flush()
    wait = made.manager.parts.mover.wait

    def waiting(transfer: FileTransfer, *, hurry: bool = True) -> None:
        made.engine.release()
        wait(transfer)
        for flight in made.manager.parts.transfers.flights.values():
            wait(flight.transfer)
        made.engine.hold()

    made.manager.parts.mover.wait = waiting
    made.engine.hold()


def at_once(made: Rig) -> None:
    """Makes every file transfer end before it is returned."""
    made.manager.flush()
    mover = made.manager.parts.mover

    def ended(start: Callable[..., FileTransfer], *args: Any, **options: Any) -> FileTransfer:
        transfer = start(*args, **options)
        mover.wait(transfer)
        return transfer

    mover.read, mover.write = partial(ended, mover.read), partial(ended, mover.write)


# Which lines run must not depend on how far the pump's thread has come.
@pytest.mark.parametrize("pace", [only_while_waited_for, at_once])
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.one_in(2)
def test_ctrl_c_at_every_line_leaves_a_state_to_go_on_from(tmp_path, name, pace) -> None:
    """Cut short before any line, an operation can be repeated and no byte is lost."""
    operation = OPERATIONS[name]
    number, leaked, lost = -_STEP + 1 + len(name) % _STEP, 0, 0
    while True:
        number += _STEP
        homes = [(2, "dram"), (2, "nvme"), (2, "dram"), (3, "nvme"), (6, "nvme")]
        with rig(8, homes, nvme=tmp_path) as made:
            pace(made)
            made.write(made.blocks[3])
            made.write(made.blocks[2])
            hit = cut_short(lambda: operation(made), number)
            if not hit:
                break
            gone = name in ("discard", "remove")
            if gone:
                made.data.pop(made.blocks[3].id)
            # between a lease and its receiver there is a line that nothing can guard
            leaked += sum(bool(record.leases) for record in made.manager.parts.table)
            for record in made.manager.parts.table:
                while record.leases:
                    made.manager.release(record.block)
            made.check()
            # a read may still be writing there, for all we know
            if made.manager.parts.table.orphans():
                lost += 1
                continue
            operation(made)
            made.manager.flush()
            made.manager.parts.table.check()
            if gone:
                del made.blocks[3]
            for block in made.blocks:
                while made.manager.record(block).leases:
                    made.manager.release(block)
            made.check()
    assert number > 5
    assert leaked <= 2 and lost <= 3


@pytest.mark.parametrize(("hbm", "pages"), [(3, [1] * 7), (7, [2, 1, 2, 1, 3, 3, 3])])
def test_ctrl_c_at_every_line_of_a_use_in_a_loop_that_repeats(hbm: int, pages: list[int]) -> None:
    """A block comes into the place of another, cut short before any line: both can be had."""
    number = 0
    while True:
        number += 1
        with rig(hbm, [(n, "dram") for n in pages], depth=1) as made:
            manager = made.manager
            manager.prefetcher.fetcher.beside = True
            while not manager.replay.repeating:
                manager.begin_pass("loop")
                for block in made.blocks:
                    made.use(block)
            manager.begin_pass("loop")
            for block in made.blocks[:3]:
                made.use(block)
            evictions = manager.stats().evictions

            def use() -> None:
                manager.acquire(made.blocks[3])  # noqa: B023

            hit = cut_short(use, number)
            for record in manager.parts.table:
                while record.leases:
                    manager.release(record.block)
            if not hit:
                assert manager.stats().evictions > evictions and manager.replay.repeating
                break
            made.check()
            for block in made.blocks[3:]:
                made.use(block)
            made.check()
    assert number > 40
