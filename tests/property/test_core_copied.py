"""Runs of free bytes that nothing but copies out of them has used, against a set of bytes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tiermem.core.allocator import Allocator
from tiermem.core.block import Extent
from tiermem.core.copied import CopiedRuns

PAGES = 12


class Machine(RuleBasedStateMachine):
    """Extents come and go; some leave bytes that only a copy has used since compute did."""

    @initialize()
    def begin(self) -> None:
        self.store = Allocator(PAGES, alignment=1)
        self.held: list[Extent] = []
        self.quiet: set[int] = set()
        self.asked: dict[int, bool] = {}

    def took(self, extent: Extent | None, ask: bool) -> None:
        if extent is None:
            return
        mine = set(range(extent.offset, extent.end))
        self.held.append(extent)
        self.asked[extent.offset] = mine <= self.quiet
        self.quiet -= mine
        if ask:
            self.ask(len(self.held) - 1)

    @rule(nbytes=st.integers(1, 6), ask=st.booleans())
    def take(self, nbytes: int, ask: bool) -> None:
        self.took(self.store.allocate(nbytes), ask)

    @rule(offset=st.integers(0, PAGES - 1), nbytes=st.integers(1, 6), ask=st.booleans())
    def take_at(self, offset: int, nbytes: int, ask: bool) -> None:
        self.took(self.store.take_at(offset, nbytes), ask)

    @rule(which=st.integers(0, 99), copied=st.booleans())
    def free(self, which: int, copied: bool) -> None:
        if self.held:
            extent = self.held.pop(which % len(self.held))
            self.store.free(extent, copied=copied)
            self.asked.pop(extent.offset, None)
            if copied:
                self.quiet |= set(range(extent.offset, extent.end))

    @rule(which=st.integers(0, 99), nbytes=st.integers(1, 6))
    def retake(self, which: int, nbytes: int) -> None:
        if not self.held:
            return
        extent = self.held[which % len(self.held)]
        made = Extent(extent.offset, nbytes)
        if self.store.retake(extent, made):
            self.held[which % len(self.held)] = made
            self.quiet -= set(range(made.offset, made.end))
            self.asked[extent.offset] = False

    @rule(which=st.integers(0, 99))
    def ask_later(self, which: int) -> None:
        if self.held:
            self.ask(which % len(self.held))

    def ask(self, number: int) -> None:
        offset = self.held[number].offset
        assert self.store.copied.was(offset) == self.asked.get(offset, False)
        self.asked[offset] = False

    @rule()
    def rebuild(self) -> None:
        self.store.rebuild(self.held)
        self.quiet.clear()
        self.asked.clear()

    @invariant()
    def runs_are_those_bytes(self) -> None:
        if not hasattr(self, "store"):
            return
        runs = self.store.copied.runs
        assert {byte for low, high in runs for byte in range(low, high)} == self.quiet
        assert runs == sorted(runs)
        assert all(first[1] < second[0] for first, second in pairwise(runs))


TestCopiedRuns = Machine.TestCase


def test_nothing_is_known_at_first() -> None:
    runs = CopiedRuns()
    runs.take(0, 8)
    assert not runs.was(0)
