"""Pages are locked as homes need them, and every home lies within one locked piece."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_locks import FakeLocks

from tiermem.core.block import Extent, Tier, align_up
from tiermem.errors import CapacityError
from tiermem.runtime.memory.homes import HomeRequest, Homes
from tiermem.storage.pagelock import CudaPageLocks, PageLocks

MIB = 1 << 20
CPU = torch.device("cpu")


class FakeCuda:
    """The calls that lock pages, and a launch: it raises what the last call that failed left."""

    def __init__(self, locks: FakeLocks) -> None:
        self.locks = locks
        self.error = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        try:
            self.locks.lock(address, nbytes)
        except CapacityError:
            self.error = 2
            return 2
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        code = 0 if address in self.locks.runs else 713
        self.error = code or self.error
        self.locks.unlock(address)
        return code

    def launch(self, *_: object) -> None:
        code, self.error = self.error, 0
        if code:
            raise RuntimeError(f"CUDA error {code}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Stands for CUDA."""
    fake = FakeCuda(FakeLocks())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "_sleep", fake.launch)
    return fake


def homes_of(dram: int, locks: PageLocks) -> Homes:
    return Homes(dram, (), None, CPU, locks)


def check(homes: Homes, locks: FakeLocks, spare: Iterable[Extent] = ()) -> None:
    for extent in {*homes.dram.extents()} - {*spare}:
        assert locks.holds(homes.arena.address + extent.offset, extent.nbytes), extent
    assert homes.arena.locked == sum(locks.runs.values())


Sizes = st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=4)
Spare = st.tuples(st.integers(1, 3 * MIB))


@given(steps=st.lists(st.one_of(Sizes, Spare, st.integers(0, 1 << 16)), max_size=25))
@settings(max_examples=60)
def test_every_home_can_be_copied_from_and_keeps_its_bytes(
    steps: list[list[int] | tuple[int] | int],
) -> None:
    """An integer frees one of what is there, a list asks for homes, a tuple for spare memory."""
    locks = FakeLocks()
    homes = homes_of(16 * MIB, locks)
    kept: list[Extent] = []
    spare: set[Extent] = set()
    used = 0
    for number, step in enumerate(steps):
        if isinstance(step, int):
            if kept:
                extent = kept.pop(step % len(kept))
                spare.discard(extent)
                homes.release(Tier.DRAM, extent)
            continue
        if isinstance(step, tuple):
            before = dict(locks.runs)
            room = homes.lend_spare(*step)
            assert locks.runs == before
            if room is None:
                assert not homes.dram.has_gap(align_up(*step))
                continue
            extent, _ = room
            homes.bytes_of(extent).fill_(extent.offset // 4096 % 251)
            kept.append(extent)
            spare.add(extent)
            continue
        try:
            places = homes.reserve([HomeRequest(f"{number}", n, "dram") for n in step])
        except CapacityError:
            whole = sum(align_up(n) for n in step)
            assert len(step) > 1 or not homes.dram.has_gap(whole)
            continue
        for _, extent in places:
            assert extent is not None
            homes.bytes_of(extent).fill_(extent.offset // 4096 % 251)
            kept.append(extent)
        used = max([used, *(extent.end for extent in kept)])
        check(homes, locks, spare)
        assert homes.arena.locked <= used * 9 // 8 + 2 * MIB
    for extent in kept:
        assert bool((homes.bytes_of(extent) == extent.offset // 4096 % 251).all())
    homes.arena.unlock()
    assert not locks.runs
    homes.close()


def test_what_is_lent_is_locked_or_not_had() -> None:
    locks = FakeLocks(most=4 * MIB)
    homes = homes_of(16 * MIB, locks)
    extent = homes.lend(3 * MIB)
    assert extent is not None
    check(homes, locks)
    used = homes.dram.used
    assert homes.lend(6 * MIB) is None
    assert homes.dram.used == used
    homes.release(Tier.DRAM, extent)
    homes.close()


def test_spare_memory_leaves_what_is_locked_to_homes() -> None:
    locks = FakeLocks()
    homes = homes_of(16 * MIB, locks)
    homes.reserve([HomeRequest("home", MIB, "dram")])
    room = homes.lend_spare(MIB // 2)
    assert room is not None and room[0].offset >= homes.arena.locked
    homes.reserve([HomeRequest("another", MIB, "dram")])
    assert locks.calls == 1
    assert homes.lend_spare(13 * MIB) is not None
    assert homes.lend_spare(MIB // 2) is not None and locks.calls == 1
    homes.close()


def test_pages_of_spare_memory_are_fresh_once() -> None:
    homes = homes_of(16 * MIB, FakeLocks())
    for fresh in (True, False):
        rooms = [homes.lend_spare(MIB), homes.lend_spare(MIB)]
        for room in rooms:
            assert room is not None and room[1] is fresh
            homes.release(Tier.DRAM, room[0])
    homes.close()


def test_staging_is_locked_and_refused_where_it_cannot_be(tmp_path: Path) -> None:
    locks = FakeLocks()
    homes = Homes(64 * MIB, [str(tmp_path)], None, CPU, locks)
    assert homes.staging is not None
    assert locks.holds(homes.staging.data_ptr(), homes.staging.numel())
    assert homes.arena.locked < 16 * MIB
    homes.close()
    with pytest.raises(CapacityError, match="no more pages"):
        Homes(64 * MIB, [str(tmp_path)], None, CPU, FakeLocks(most=0))
    assert not list(tmp_path.iterdir())


def test_a_toy_locks_little_of_a_large_budget() -> None:
    locks = FakeLocks()
    homes = homes_of(8 << 30, locks)
    assert homes.arena.locked == 0
    homes.reserve([HomeRequest("toy", 4096, "dram")])
    assert homes.arena.locked == 2 * MIB
    homes.close()
    assert not locks.runs


def test_many_small_homes_take_few_pieces() -> None:
    locks = FakeLocks()
    homes = homes_of(64 * MIB, locks)
    for number in range(500):
        homes.reserve([HomeRequest(f"{number}", MIB // 8, "dram")])
    assert locks.calls < 30
    check(homes, locks)
    homes.close()


def test_what_lies_across_two_pieces_makes_them_one() -> None:
    locks = FakeLocks()
    homes = homes_of(8 * MIB, locks)
    first, second, third = (
        homes.reserve([HomeRequest("one", 2 * MIB, "dram")])[0][1] for _ in range(3)
    )
    homes.reserve([HomeRequest("rest", 2 * MIB, "dram")])
    assert first is not None
    assert second is not None
    assert third is not None
    assert len(locks.runs) == 4
    homes.bytes_of(first).fill_(7)
    homes.release(Tier.DRAM, second)
    homes.release(Tier.DRAM, third)
    seen: list[str] = []
    locks.before = seen.append
    homes.reserve([HomeRequest("large", 4 * MIB, "dram")])
    assert seen[0] == "synchronize"  # nothing may be moving while pages are unlocked
    check(homes, locks)
    assert bool((homes.bytes_of(first) == 7).all())
    homes.close()


def test_pages_that_cannot_be_locked_are_a_capacity_error_that_changes_nothing() -> None:
    locks = FakeLocks(most=4 * MIB)
    homes = homes_of(16 * MIB, locks)
    homes.reserve([HomeRequest("fits", 3 * MIB, "dram")])
    before = homes.dram.used
    with pytest.raises(CapacityError, match="no more pages"):
        homes.reserve([HomeRequest("small", 4096, "dram"), HomeRequest("not", 6 * MIB, "dram")])
    assert homes.dram.used == before
    check(homes, locks)
    homes.reserve([HomeRequest("small", 4096, "dram")])
    check(homes, locks)
    homes.close()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["lock", "unlock", "synchronize"])
def test_interrupted_anywhere_it_goes_on(what: str, when: str) -> None:
    locks = FakeLocks()
    homes = homes_of(8 * MIB, locks)
    kept = [homes.reserve([HomeRequest("one", 2 * MIB, "dram")])[0][1] for _ in range(4)]
    for index, extent in enumerate(kept):
        assert extent is not None
        homes.bytes_of(extent).fill_(index)
    for extent in kept[1:3]:
        assert extent is not None
        homes.release(Tier.DRAM, extent)

    def stop(call: str) -> None:
        if call == what:
            locks.before = locks.after = lambda call: None
            raise KeyboardInterrupt

    setattr(locks, when, stop)
    before = set(homes.dram.extents())
    with pytest.raises(KeyboardInterrupt):
        homes.reserve([HomeRequest("large", 4 * MIB, "dram")])
    homes.repair([(Tier.DRAM, extent) for extent in before])
    check(homes, locks)
    homes.reserve([HomeRequest("large", 4 * MIB, "dram")])
    check(homes, locks)
    for index in (0, 3):
        extent = kept[index]
        assert extent is not None
        assert bool((homes.bytes_of(extent) == index).all())
    homes.close()
    assert not locks.runs


def test_an_unlock_that_is_made_again_leaves_no_error_for_the_next_kernel(cuda: FakeCuda) -> None:
    homes = homes_of(8 * MIB, CudaPageLocks(CPU))
    kept = [homes.reserve([HomeRequest("one", 2 * MIB, "dram")])[0][1] for _ in range(4)]
    for extent in kept[1:3]:
        assert extent is not None
        homes.release(Tier.DRAM, extent)

    def stop(call: str) -> None:
        if call == "unlock":
            cuda.locks.after = lambda call: None
            raise KeyboardInterrupt

    cuda.locks.after = stop
    before = set(homes.dram.extents())
    with pytest.raises(KeyboardInterrupt):
        homes.reserve([HomeRequest("large", 4 * MIB, "dram")])
    homes.repair([(Tier.DRAM, extent) for extent in before])
    homes.reserve([HomeRequest("large", 4 * MIB, "dram")])
    check(homes, cuda.locks)
    cuda.launch()
    homes.close()
    assert not cuda.locks.runs
    cuda.launch()


def test_nor_do_pages_that_cannot_be_locked(cuda: FakeCuda) -> None:
    cuda.locks.most = 4 * MIB
    homes = homes_of(16 * MIB, CudaPageLocks(CPU))
    with pytest.raises(CapacityError, match=r"error 2\)"):
        homes.reserve([HomeRequest("large", 6 * MIB, "dram")])
    cuda.launch()
    homes.close()
    cuda.launch()
