"""``tier.save(wait=False)``: what a step waits for while a save is under way, and what is kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support_ahead import leave_no_state, warm
from support_locks import FakeLocks
from support_saving import DURING, nothing_is_copied_ahead, save_during
from torch import nn

import tiermem
from tiermem.errors import CapacityError, StorageError
from tiermem.runtime.memory import homes
from tiermem.runtime.memory.homes import HomeRequest
from tiermem.saving import later
from tiermem.saving.later import _State
from tiermem.storage import pagelock
from tiermem.storage.arena import HostArena

WIDTH, LAYERS = 64, 6
UNIT = WIDTH * WIDTH * 4
OVERLAPS = ("auto", False, "backward")
_MAKE_ROOM = later.SaveHandle._make_room


class Loop:
    """A training loop whose weights and state are three times as large as HBM."""

    def __init__(self, overlap: Any = "auto") -> None:
        torch.manual_seed(0)
        self.tier = tiermem.TierManager(device="cpu", hbm=8 * UNIT, dram=120 * UNIT, policy="dram")
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        self.model = self.tier.wrap(nn.Sequential(*layers))
        self.optimizer = self.tier.optimizer(
            self.model, torch.optim.AdamW, lr=1e-3, overlap=overlap
        )

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *error: object) -> None:
        self.tier.close(discard=True)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.model(torch.randn(4, WIDTH)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> Any:
        return {k: v.clone() for k, v in self.model.state_dict().items()}


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> FakeLocks:
    """DRAM is page-locked as for a device, a page at a time."""
    found = FakeLocks()
    monkeypatch.setattr(pagelock, "_PIECE", 4096)
    monkeypatch.setattr(homes, "HostArena", lambda *a, **k: HostArena(*a, **{**k, "locks": found}))
    return found


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Takes nothing before the event is set; a step that waits for it does so for a while."""
    found, put = threading.Event(), later.SaveHandle._put

    def slow(self: later.SaveHandle, entry: Any, whole: torch.Tensor) -> None:
        found.wait(20)
        put(self, entry, whole)

    monkeypatch.setattr(later.SaveHandle, "_put", slow)
    yield found
    found.set()


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_no_page_is_locked_and_no_step_waits_for_the_disk(tmp_path, locks, disk, overlap) -> None:
    """Neither in the first save of a run nor in the second."""
    with Loop(overlap) as run:
        run.step(4)
        arena, called = run.tier._manager.parts.homes.arena, []
        locked, locks.before = arena.locked, called.append
        for path in (tmp_path / "first", tmp_path / "second"):
            disk.clear()
            called.clear()
            state = run.state()
            handle = run.tier.save(path, wait=False)
            run.step(2)
            assert not handle.done() and not any(
                entry.state is _State.DONE for entry in handle._entries.values()
            )
            copies = [entry.copy for entry in handle._entries.values()]
            assert all(copy is not None and copy.offset >= locked for copy in copies)
            disk.set()
            handle.result()
            assert not called and arena.locked == locked
            with Loop() as other:
                other.tier.load(path)
                assert all(torch.equal(v, state[k]) for k, v in other.state().items())


def test_blocks_are_copied_to_locked_memory_where_that_is_all_there_is(
    tmp_path, locks, disk
) -> None:
    with Loop(False) as run:
        run.step(2)
        manager = run.tier._manager
        with manager.lock:
            manager.parts.homes.arena.need([manager.parts.homes.dram.gaps()[-1]])
        handle = run.tier.save(tmp_path / "run", wait=False)
        assert all(entry.copy is not None for entry in handle._entries.values())
        disk.set()  # what is written has a copy no more
        run.step()
        handle.result()


@pytest.mark.parametrize("overlap", OVERLAPS[:2])
def test_what_steps_overwrite_first_is_copied_first(tmp_path, monkeypatch, overlap) -> None:
    with Loop(overlap) as run:
        leave_no_state(run.optimizer)
        run.step(4)
        with nothing_is_copied_ahead(monkeypatch):
            handle = run.tier.save(tmp_path / "run", wait=False)
            order = [entry.block.name for entry in handle._ahead]
            assert len(order) == len(handle._entries) == 2 * LAYERS
            before = len(run.tier.timeline)
            run.step(2)
            later_events = run.tier.timeline.events()[before:]
        handle.result()
    written = dict.fromkeys(e.name for e in later_events if e.lane == "hbm->dram")
    assert [name for name in written if name in order] == [n for n in order if n in written]
    assert len(written.keys() & order) > LAYERS


def test_a_former_home_is_a_copy_until_it_is_written(tmp_path, monkeypatch) -> None:
    """A step ahead writes to shadows: what it steps need not have been copied by then."""
    with Loop() as run:
        leave_no_state(run.optimizer)
        run.step(4)
        with nothing_is_copied_ahead(monkeypatch):
            handle = run.tier.save(tmp_path / "run", wait=False)
            states = [e.state for e in handle._entries.values()]
            assert set(states) == {_State.AT_HOME}
            run.step()
            assert {e.state for e in handle._entries.values()} == {_State.AT_HOME}
            run.step()
            found = [e.state for e in handle._entries.values()]
            assert found.count(_State.COPIED) > LAYERS
        handle.result()


@pytest.mark.parametrize("what", DURING)
@pytest.mark.one_in(3)
def test_what_was_there_at_the_call_is_saved(tmp_path, monkeypatch, what) -> None:
    save_during(warm, tmp_path / "run", DURING[what], monkeypatch)


class Weights:
    """Three layers, at home in files or in DRAM."""

    def __init__(self, folder: Path, policy: str) -> None:
        folder.mkdir()
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.expected = {k: v.clone() for k, v in model.state_dict().items()}
        self.tier = tiermem.TierManager(
            device="cpu", hbm=8 * UNIT, dram="1MiB", nvme=folder, policy=policy
        )
        self.model = self.tier.wrap(model)

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *error: object) -> None:
        self.tier.close(discard=True)

    def check(self, path: Path) -> None:
        """Compares what is loaded."""
        self.tier.load(path)
        found = self.model.state_dict()
        assert all(torch.equal(v, self.expected[k]) for k, v in found.items())


def test_a_file_that_was_read_is_not_waited_for(tmp_path, disk, monkeypatch) -> None:
    """What is at home in files is read, and may be overwritten while it is being written."""
    with Weights(tmp_path / "swap", "nvme") as run:
        reading, put = threading.Event(), later.SaveHandle._put

        def note(self: later.SaveHandle, entry: Any, whole: torch.Tensor) -> None:
            reading.set()
            put(self, entry, whole)

        monkeypatch.setattr(later.SaveHandle, "_put", note)
        handle = run.tier.save(tmp_path / "run", wait=False)
        assert reading.wait(20)
        manager, entry = run.tier._manager, next(iter(handle._entries.values()))
        with manager.lock:
            handle.before_write(manager.record(entry.block))
        assert not any(entry.state is _State.DONE for entry in handle._entries.values())
        disk.set()
        handle.result()
        run.check(tmp_path / "run")


def test_the_disk_is_given_nothing_that_is_to_be_copied(tmp_path, disk, monkeypatch) -> None:
    """Else a step would wait for it: the writer waits for the copy, as slow as that may be."""
    looking, copying, next_of = threading.Event(), threading.Event(), later.SaveHandle._next
    copy_ahead = later.SaveHandle._copy_ahead

    def look(self: later.SaveHandle) -> Any:
        looking.set()
        return next_of(self)

    def slow(self: later.SaveHandle) -> None:
        copying.wait()
        copy_ahead(self)

    monkeypatch.setattr(later.SaveHandle, "_next", look)
    monkeypatch.setattr(later.SaveHandle, "_copy_ahead", slow)
    with Loop(False) as run:
        run.step(2)
        handle = run.tier.save(tmp_path / "run", wait=False)
        try:
            assert looking.wait(20)
            run.step()
            assert not any(entry.state is _State.DONE for entry in handle._entries.values())
        finally:
            copying.set()
            disk.set()
        handle.result()


@pytest.mark.parametrize("policy", ["nvme", "dram"])
def test_a_copy_that_is_cut_short_is_none(tmp_path, monkeypatch, policy) -> None:
    """Ctrl-C while a block is being kept: it is saved from its home."""

    def cut(_extent: Any) -> torch.Tensor:
        patch.undo()
        raise KeyboardInterrupt

    patch = pytest.MonkeyPatch()
    with Weights(tmp_path / "swap", policy) as run:
        manager = run.tier._manager
        with nothing_is_copied_ahead(monkeypatch):
            handle = run.tier.save(tmp_path / "run", wait=False)
            entry = next(iter(handle._entries.values()))
            with manager.lock:
                patch.setattr(manager.parts.homes.arena, "bytes_of", cut)
                with pytest.raises(KeyboardInterrupt):
                    handle.before_write(manager.record(entry.block))
        handle.result()
        run.check(tmp_path / "run")


def _cut(_self: Any, *_: Any) -> Any:
    raise KeyboardInterrupt


def _begins_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", _cut)


def _begins_and_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def begin(self: threading.Thread) -> None:
        start(self)
        if self.name == "tiermem-save":
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", begin)


def _takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later.SaveHandle, "_take", _cut)


@pytest.mark.parametrize("where", [_takes_nothing, _begins_no_thread, _begins_and_is_cut])
def test_a_call_that_is_cut_short_leaves_nothing_that_others_wait_for(
    tmp_path, monkeypatch, where
) -> None:
    with Loop(False) as run:
        run.step(2)
        used = run.tier._manager.parts.homes.dram.used
        with monkeypatch.context() as patch:
            where(patch)
            with pytest.raises(KeyboardInterrupt):
                run.tier.save(tmp_path / "run", wait=False)
        run.step()
        state = run.state()
        handle = run.tier.save(tmp_path / "run", wait=False)
        run.step()
        handle.result()
        homes = run.tier._manager.parts.homes
        assert homes.keeper is None and homes.dram.used == used
        with Loop(False) as other:
            other.tier.load(tmp_path / "run")
            assert all(torch.equal(v, state[k]) for k, v in other.state().items())


def test_a_save_that_is_waited_for_in_vain_is_still_the_one_under_way(tmp_path, disk) -> None:
    """Ctrl-C while the next one waits: there never are two, of which one would watch the homes."""
    with Loop(False) as run:
        run.step(2)
        state = run.state()
        handle = run.tier.save(tmp_path / "first", wait=False)
        run.step()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(later.SaveHandle, "settle", _cut)
            with pytest.raises(KeyboardInterrupt):
                run.tier.save(tmp_path / "second", wait=False)
        disk.set()
        second = run.tier.save(tmp_path / "second", wait=False)
        assert handle.done()
        run.step()
        second.result()
        with Loop(False) as other:
            other.tier.load(tmp_path / "first")
            assert all(torch.equal(v, state[k]) for k, v in other.state().items())


@contextmanager
def _a_block_to_write(run: Any, folder: Any, monkeypatch: Any) -> Iterator[tuple[Any, ...]]:
    """A save of which nothing is copied yet: its handle, a block, what asks before the block is
    written, and a patch that ends before the save goes on."""
    manager = run.tier._manager
    with nothing_is_copied_ahead(monkeypatch):
        handle = run.tier.save(folder / "run", wait=False)
        entry = next(iter(handle._entries.values()))
        with manager.lock, monkeypatch.context() as patch:
            write = partial(handle.before_write, manager.record(entry.block))
            yield handle, entry, write, patch


def test_a_step_that_is_cut_short_as_it_writes_to_the_save_ends_it(tmp_path, monkeypatch) -> None:
    """Nobody waits for a block that nobody is writing any more."""
    with Weights(tmp_path / "swap", "dram") as run:
        with _a_block_to_write(run, tmp_path, monkeypatch) as (handle, _, write, patch):
            patch.setattr(run.tier._manager.parts.homes, "lend_spare", lambda _: None)
            patch.setattr(later.SaveHandle, "_put", _cut)
            with pytest.raises(KeyboardInterrupt):
                write()
            write()
        with pytest.raises(StorageError, match="KeyboardInterrupt came while a step wrote"):
            handle.result()
        run.tier.save(tmp_path / "run", wait=False).result()
        run.check(tmp_path / "run")


class _CutCondition(threading.Condition):
    """Where ``with`` of one ends, Ctrl-C comes before it lets go of its lock."""

    def __exit__(self, *_error: object) -> None:
        raise KeyboardInterrupt


def test_no_lock_of_a_step_is_let_go_of_in_python(tmp_path, monkeypatch) -> None:
    """A lock lets go before a Ctrl-C is raised; a condition is Python, and may not."""
    with Weights(tmp_path / "swap", "dram") as run:
        with _a_block_to_write(run, tmp_path, monkeypatch) as (handle, entry, write, patch):
            patch.setattr(handle._changed, "__class__", _CutCondition)  # threads have others
            try:
                write()
            except KeyboardInterrupt:
                handle._guard.release()  # which the save would wait for
                raise
            assert entry.state is _State.COPIED
        handle.result()


def _take_spare(run: Loop, more: int) -> list[Any]:
    """Takes all free DRAM for homes, and room for ``more`` homes beside it."""
    homes = run.tier._manager.parts.homes
    free = (homes.dram.capacity - homes.dram.used) // UNIT
    request = HomeRequest("another", UNIT, "dram")
    return homes.reserve([request] * (free + more))


def _give_back(run: Loop, given: list[Any]) -> None:
    for tier, extent in given:
        run.tier._manager.parts.homes.release(tier, extent)


@contextmanager
def _ends(handle: Any) -> Iterator[None]:
    """Ends a save where a test fails: else all would wait for what nobody copies or writes."""
    try:
        yield
    except BaseException:
        handle._fail(StorageError("a test has failed"))
        raise


def _check_saved(path: Path, handle: Any, state: Any) -> None:
    with _ends(handle):
        assert handle._ended.wait(10), "nobody writes what is left"
    handle.result()
    with Loop(False) as other:
        other.tier.load(path)
        assert all(torch.equal(v, state[k]) for k, v in other.state().items())


def test_room_for_copies_is_given_to_homes(tmp_path, monkeypatch) -> None:
    """First what has no copy in it; what a step has written since is in its copy alone."""
    with Loop(False) as run:
        run.step(2)
        state, manager = run.state(), run.tier._manager
        with nothing_is_copied_ahead(monkeypatch):
            with monkeypatch.context() as patch:
                patch.setattr(later.SaveHandle, "_make_room", _MAKE_ROOM)
                handle = run.tier.save(tmp_path / "run", wait=False)
            entries = [e for e in handle._entries.values() if e.home is not None]
            written, copied = entries[:2]
            with _ends(handle), manager.lock, handle._guard, ExitStack() as ends:
                assert all(e.copy is not None and e.state is _State.AT_HOME for e in entries)
                home = written.home
                handle.before_write(manager.record(written.block))
                home.fill_(0xEE)  # as a step does
                assert handle._copy(copied, copied.home)  # as the thread that copies does
                given = _take_spare(run, 3)
                ends.callback(_give_back, run, given)
                assert [e for e in entries if e.copy is not None] == [written, copied]
                given += _take_spare(run, 1)
                assert [e for e in entries if e.copy is not None] == [written]
                assert copied.state is _State.AT_HOME
                with pytest.raises(CapacityError):
                    _take_spare(run, 1)
                assert written.state is _State.COPIED and copied not in handle._copied
                assert not handle._spare_room()
        _check_saved(tmp_path / "run", handle, state)
        assert handle._spare_room not in manager.parts.homes.reclaimers


def test_what_was_copied_and_is_written_then_keeps_its_copy(tmp_path, disk) -> None:
    """The thread that copies was there before the step."""
    with Loop(False) as run:
        run.step(2)
        state, manager = run.state(), run.tier._manager
        handle = run.tier.save(tmp_path / "run", wait=False)
        entries = list(handle._entries.values())
        with handle._guard:
            copied = [_State.COPIED] * len(entries)
            assert handle._changed.wait_for(lambda: [e.state for e in entries] == copied, 20)
        with _ends(handle), manager.lock, ExitStack() as ends:
            ends.callback(disk.set)
            with handle._guard:  # the disk has one of the others
                written, other = [e for e in handle._copied if e.home is not None][-2:]
                handle._left.clear()  # as that thread does with what has been copied
            home = written.home
            handle.before_write(manager.record(written.block))
            home.fill_(0xEE)
            ends.callback(_give_back, run, _take_spare(run, 1))
            assert written.copy is not None and other.copy is None
        _check_saved(tmp_path / "run", handle, state)


class Spare(nn.Module):
    """Two layers, and one that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.spare, self.last = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def test_state_in_a_file_that_no_step_has_made_yet_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run"
    budgets: dict[str, Any] = {"hbm": "64KiB", "dram": "1MiB", "policy": "nvme"}
    with tiermem.TierManager(device="cpu", nvme=str(tmp_path), **budgets) as tier:
        model = tier.wrap(Spare(), blocks=["first", "spare", "last"])
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=1e-3, overlap=False)
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
        saved = optimizer.state_dict()["state"]
        handle = tier.save(path, wait=False)
        assert handle is not None
        handle.result()
        optimizer.step()
        tier.load(path)
        state = optimizer.state_dict()["state"]
        assert state.keys() == saved.keys()
        assert len(state) < len(list(model.parameters()))
        assert all(torch.equal(v, state[n][k]) for n in saved for k, v in saved[n].items())
