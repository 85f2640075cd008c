"""HBM comes piece by piece: what is handed out has memory, and all of it is given back."""

from __future__ import annotations

import gc
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support_examples import examples

from tiermem.core.allocator import Allocator
from tiermem.core.block import Extent
from tiermem.errors import InvariantError, TierError
from tiermem.storage.mapped import MappedHostArena
from tiermem.testing.pieces import FakeDevice, FakePieceCalls

PAGE = 4096
CHUNK = 4 * PAGE
CHUNKS = 8


class Pieces(RuleBasedStateMachine):
    """An arena against a set of chunks and the bytes written there."""

    chunks = st.integers(0, CHUNKS - 1)
    extents = st.tuples(st.integers(0, 4 * CHUNKS - 1), st.integers(1, 12))

    @initialize(memory=st.integers(0, CHUNKS), tail=st.integers(0, 3))
    def start(self, memory: int, tail: int) -> None:
        self.device = FakeDevice(memory * CHUNK)
        self.calls = FakePieceCalls(self.device)
        self.nbytes = CHUNKS * CHUNK - tail * PAGE
        self.arena = MappedHostArena(self.nbytes, self.calls, chunk=CHUNK)
        self.there: dict[int, int] = {}
        self.number = 0

    def extent(self, pages: tuple[int, int]) -> Extent:
        first = min(pages[0], self.nbytes // PAGE - 1)
        return Extent(first * PAGE, min(pages[1] * PAGE, self.nbytes - first * PAGE))

    @rule(pages=extents)
    def back(self, pages: tuple[int, int]) -> None:
        extent = self.extent(pages)
        wanted = range(extent.offset // CHUNK, -(-extent.end // CHUNK))
        missing = [at for at in wanted if at not in self.there]
        most = sum(min(CHUNK, self.nbytes - at * CHUNK) for at in missing)
        enough = most <= self.device.free()
        assert self.arena.back(extent) == enough
        gone = [(run.offset, run.end) for run in self.arena.missing()]
        for at in wanted:
            if all(not begin <= at * CHUNK < end for begin, end in gone):
                self.there.setdefault(at, -1)
        if enough:
            self.calls.use(self.arena.address + extent.offset, extent.nbytes)

    @rule(at=chunks)
    def write(self, at: int) -> None:
        if at in self.there:
            self.number = self.number % 250 + 1
            self.seen(at).fill_(self.number)
            self.there[at] = self.number

    @rule(first=st.integers(0, 4 * CHUNKS), pages=st.integers(0, 20))
    def give_back(self, first: int, pages: int) -> None:
        end = min((first + pages) * PAGE, self.nbytes)
        inside = [
            at
            for at in self.there
            if first * PAGE <= at * CHUNK and min((at + 1) * CHUNK, self.nbytes) <= end
        ]
        before = self.arena.mapped
        assert self.arena.trim(first * PAGE, end) == before - self.arena.mapped
        for at in inside:
            del self.there[at]

    @rule(chunks=st.integers(0, CHUNKS))
    def others_take(self, chunks: int) -> None:
        free = self.device.free() + self.device.others
        self.device.others = min(chunks * CHUNK, free)

    @rule(name=st.sampled_from(["create", "map", "allow"]), pages=extents, skip=st.integers(0, 3))
    def fail(self, name: str, pages: tuple[int, int], skip: int) -> None:
        calls = [skip]

        def refuse(called: str) -> None:
            if called == name:
                calls[0] -= 1
                if calls[0] < 0:
                    raise TierError("broken")

        before = set(self.there)
        self.calls.before = refuse
        with suppress(TierError):
            self.arena.back(self.extent(pages))
        self.calls.before = lambda called: None
        gone = self.arena.missing()
        for at in range(-(-self.nbytes // CHUNK)):
            if all(not run.offset <= at * CHUNK < run.end for run in gone):
                self.there.setdefault(at, -1)
        assert before <= set(self.there)

    @invariant()
    def nothing_else_is_taken(self) -> None:
        expected = sum(min(CHUNK, self.nbytes - at * CHUNK) for at in self.there)
        assert self.arena.mapped == self.calls.taken == expected
        assert self.device.free() >= 0
        places = {self.arena.address + at * CHUNK for at in self.there}
        assert set(self.calls.mapped) == self.calls.allowed == places

    @invariant()
    def bytes_stay(self) -> None:
        for at, number in self.there.items():
            if number > 0:
                assert bool((self.seen(at) == number).all())

    def seen(self, at: int) -> torch.Tensor:
        return self.arena.bytes_of(Extent(at * CHUNK, min(CHUNK, self.nbytes - at * CHUNK)))

    def teardown(self) -> None:
        if not hasattr(self, "arena"):
            return
        last = self.seen(min(self.there)) if self.there else None
        number = self.there[min(self.there)] if self.there else 0
        self.arena.close()
        del self.arena
        if last is not None:
            assert not self.calls.closed
            assert number <= 0 or bool((last == number).all())
        del last
        gc.collect()
        assert self.calls.closed


TestPieces = Pieces.TestCase
TestPieces.settings = settings(max_examples=examples(10), stateful_step_count=20, deadline=None)


class Memory:
    """Backs so many chunks, whichever are asked for first."""

    def __init__(self, chunks: int, total: int) -> None:
        self.left = chunks
        self.total = total
        self.there: set[int] = set()

    def back(self, extent: Extent) -> bool:
        for at in range(extent.offset // CHUNK, -(-extent.end // CHUNK)):
            if at not in self.there:
                if not self.left:
                    return False
                self.left -= 1
                self.there.add(at)
        return True

    def missing(self) -> list[Extent]:
        every = range(-(-self.total // CHUNK))
        return [Extent(at * CHUNK, CHUNK) for at in every if at not in self.there]


STEPS = st.lists(
    st.tuples(st.sampled_from(["allocate", "at", "free", "open", "resize"]), st.integers(0, 60)),
    max_size=40,
)


@settings(max_examples=examples(50), deadline=None)
@given(chunks=st.integers(0, 6), pages=st.integers(8, 32), steps=STEPS)
def test_what_is_handed_out_has_memory(
    chunks: int, pages: int, steps: list[tuple[str, int]]
) -> None:
    memory = Memory(chunks, 40 * PAGE)
    store = Allocator(pages * PAGE, backing=memory)
    held: list[Extent] = []
    for what, number in steps:
        if what in ("allocate", "at"):
            nbytes = (number % 9 + 1) * PAGE
            found = (
                store.allocate(nbytes)
                if what == "allocate"
                else store.take_at(number % pages * PAGE, nbytes)
            )
            if found is not None:
                held.append(found)
            elif what == "allocate" and not store.walled:
                assert not store.has_gap(nbytes)
        elif what == "free" and held:
            store.free(held.pop(number % len(held)))
        elif what == "open":
            store.open_walls()
        elif what == "resize":
            end = (number % 32 + 8) * PAGE
            if max((extent.end for extent in held), default=0) <= end:
                store.resize(end)
                assert store.capacity == end
                pages = end // PAGE
            else:
                with pytest.raises(InvariantError):
                    store.resize(end)
        for extent in held:
            spots = range(extent.offset // CHUNK, -(-extent.end // CHUNK))
            assert memory.there.issuperset(spots), "handed out without memory"
            assert store.holds(extent)
        assert store.used == sum(extent.nbytes for extent in held)
        assert store.count == len(held)
        free = sum(gap.nbytes for gap in store.gaps())
        assert free + store.used + store.walled == store.capacity
        if store.walled:  # walls are neither handed out nor cleared
            walls = [e for e in store.extents() if store.is_wall(e.offset)]
            assert not any(store.holds(wall) for wall in walls)
            price = store.cheapest_window(PAGE, lambda offset: None)
            assert price is None or memory.back(price.extent) or store.gaps()


def test_a_window_does_not_pass_a_wall() -> None:
    memory = Memory(2, 4 * CHUNK)
    store = Allocator(4 * CHUNK, backing=memory)
    first = store.take_at(0, CHUNK)
    last = store.take_at(2 * CHUNK, CHUNK)
    assert first is not None and last is not None
    assert store.allocate(CHUNK) is None
    assert store.walled == 2 * CHUNK

    def leaves(offset: int) -> float | None:
        return None if store.is_wall(offset) else 1.0

    assert store.cheapest_window(2 * CHUNK, leaves) is None
    assert store.window_around(0, 2 * CHUNK, leaves) is None
    assert store.next_run(0, 2 * CHUNK, lambda o: leaves(o) is not None) is None
    store.free(first)
    assert store.allocate(CHUNK) == first
    memory.left = 2
    assert store.open_walls()
    assert store.allocate(CHUNK) == Extent(CHUNK, CHUNK)
