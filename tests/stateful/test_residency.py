"""The residency table against an oracle of five facts per block that shares no code with it.

Every transition is asked for in every state. What the oracle allows must do what it says; what
it does not allow must raise and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support_examples import examples

from tiermem.core.block import Block, Extent, Role, Tier
from tiermem.core.residency import ResidencyTable
from tiermem.errors import InvariantError

PAGE = 4096
SIZES = [1, 2, 1, 3, 2]
CAPACITY = 6
HOME = {True: "valid", False: "absent", None: "filling"}


@dataclass
class Fact:
    """What is true of one block.

    Attributes:
        pages: Size.
        below: Whether it has a home below HBM.
        data: Whether it holds any.
        home: Whether the home copy is good; None while it is being written.
        here: "no", "coming", "clean", "dirty" or "going".
        holds: Leases.
        fixed: Whether it must stay.
        at: Page in HBM.
    """

    pages: int
    below: bool
    data: bool
    home: bool | None
    here: str = "no"
    holds: int = 0
    fixed: bool = False
    at: int | None = None


class Residency(RuleBasedStateMachine):
    @initialize(homes=st.lists(st.sampled_from(["dram", "nvme", "hbm"]), min_size=5, max_size=5))
    def start(self, homes: list[str]) -> None:
        self.table = ResidencyTable(CAPACITY * PAGE)
        self.facts: dict[int, Fact] = {}
        self.orphans: set[tuple[int, int]] = set()
        for number, (home, pages) in enumerate(zip(homes, SIZES, strict=True)):
            data = number % 2 == 0
            extent = None if home == "hbm" else Extent(number * 8 * PAGE, pages * PAGE)
            block = Block(number, f"b{number}", Role.PARAM, pages * PAGE)
            self.table.add(block, Tier(home), extent, defined=data and extent is not None)
            good = data and extent is not None
            self.facts[number] = Fact(pages, extent is not None, good, good)

    # -- helpers -----------------------------------------------------------

    def seen(self) -> list[Any]:
        rows = []
        for record in self.table:
            rows.append(
                (
                    record.block.id,
                    record.at_home,
                    record.in_hbm,
                    record.extent,
                    record.leases,
                    record.defined,
                    record.fixed,
                )
            )
        return [rows, list(self.table.hbm.extents()), self.table.orphans()]

    def ask(self, allowed: bool, call: Callable[[], Any]) -> Any:
        if allowed:
            return call()
        before = self.seen()
        with pytest.raises(InvariantError):
            call()
        assert self.seen() == before, "a refusal changes nothing"
        return None

    def pick(self, number: int) -> tuple[int, Fact] | None:
        alive = sorted(self.facts)
        if not alive:
            return None
        chosen = alive[number % len(alive)]
        return chosen, self.facts[chosen]

    def room(self, fact: Fact) -> Extent | None:
        return self.table.hbm.allocate(fact.pages * PAGE)

    numbers = st.integers(0, 4)

    # -- in ----------------------------------------------------------------

    @rule(number=numbers)
    def fill(self, number: int) -> None:
        block, fact = self.pick(number) or (None, None)
        extent = self.room(fact) if fact else None
        if fact is None or extent is None:
            return
        allowed = fact.here == "no" and fact.home is True
        move = self.ask(allowed, lambda: self.table.begin_fill(block, extent))
        if allowed:
            assert move.source_extent.nbytes == extent.nbytes and move.target_extent == extent
            fact.here, fact.at = "coming", extent.offset // PAGE
        else:
            self.table.hbm.free(extent)

    @rule(number=numbers, offset=st.integers(0, 8))
    def fill_where_nothing_was_given(self, number: int, offset: int) -> None:
        block, fact = self.pick(number) or (None, None)
        if fact is not None:
            extent = Extent(offset * PAGE, fact.pages * PAGE + PAGE)
            self.ask(False, lambda: self.table.begin_fill(block, extent))
            self.ask(False, lambda: self.table.place_blank(block, extent))

    @rule(number=numbers, ok=st.booleans(), keep=st.booleans())
    def filled(self, number: int, ok: bool, keep: bool) -> None:
        block, fact = self.pick(number) or (None, None)
        if fact is None:
            return
        allowed = fact.here == "coming"
        self.ask(allowed, lambda: self.table.end_fill(block, ok=ok, keep=keep))
        if allowed and ok:
            fact.here = "clean"
        elif allowed:
            self.left(fact, keep)

    @rule(number=numbers)
    def blank(self, number: int) -> None:
        block, fact = self.pick(number) or (None, None)
        extent = self.room(fact) if fact else None
        if fact is None or extent is None:
            return
        allowed = fact.here == "no" and not fact.data
        self.ask(allowed, lambda: self.table.place_blank(block, extent))
        if allowed:
            fact.here, fact.at = "clean", extent.offset // PAGE
            if not fact.below:
                fact.fixed = self.table[block].fixed = True
        else:
            self.table.hbm.free(extent)

    # -- use ---------------------------------------------------------------

    @rule(number=numbers)
    def lease(self, number: int) -> None:
        block, fact = self.pick(number) or (None, None)
        if fact is not None:
            allowed = fact.here in ("clean", "dirty")
            self.ask(allowed, lambda: self.table.lease(block))
            fact.holds += allowed

    @rule(number=numbers, dirty=st.booleans())
    def release(self, number: int, dirty: bool) -> None:
        block, fact = self.pick(number) or (None, None)
        if fact is not None:
            allowed = fact.holds > 0
            self.ask(allowed, lambda: self.table.release(block, dirty=dirty))
            if allowed:
                fact.holds -= 1
                if dirty:
                    fact.here, fact.home, fact.data = "dirty", False, True

    @rule(number=numbers)
    def write(self, number: int) -> None:
        block, fact = self.pick(number) or (None, None)
        if fact is not None:
            allowed = fact.holds > 0
            self.ask(allowed, lambda: self.table.mark_dirty(block))
            if allowed:
                fact.here, fact.home, fact.data = "dirty", False, True

    @rule(number=numbers, dirty=st.booleans(), hold=st.booleans())
    def use(self, number: int, dirty: bool, hold: bool) -> None:
        """The way a block is used, so that searches get far."""
        chosen = self.pick(number)
        if chosen is None:
            return
        fact = chosen[1]
        if fact.here == "no":
            self.fill(number) if fact.data else self.blank(number)
        if fact.here == "coming":
            self.filled(number, ok=True, keep=False)
        self.lease(number)
        if dirty:
            self.write(number)
            self.drain(number)  # refused: it is held
        else:
            self.drop(number)  # likewise
        if not hold:
            self.release(number, dirty=False)

    # -- out ---------------------------------------------------------------

    @rule(number=numbers)
    def drain(self, number: int) -> None:
        block, fact = self.pick(number) or (None, None)
        if fact is not None:
            allowed = fact.here == "dirty" and not fact.holds and fact.below
            self.ask(allowed, lambda: self.table.begin_drain(block))
            if allowed:
                fact.here, fact.home = "going", None

    @rule(number=numbers, ok=st.booleans())
    def drained(self, number: int, ok: bool) -> None:
        block, fact = self.pick(number) or (None, None)
        if fact is not None:
            allowed = fact.here == "going"
            self.ask(allowed, lambda: self.table.end_drain(block, ok=ok))
            if allowed:
                fact.here, fact.home = ("clean", True) if ok else ("dirty", False)

    @rule(number=numbers, ok=st.booleans())
    def write_back(self, number: int, ok: bool) -> None:
        """The way a block goes home: written, let go of, drained."""
        chosen = self.pick(number)
        if chosen is None or chosen[1].holds:
            return
        self.use(number, dirty=True, hold=False)
        self.drain(number)
        self.drained(number, ok)

    @rule(number=numbers)
    def drop(self, number: int) -> None:
        block, fact = self.pick(number) or (None, None)
        if fact is not None:
            safe = fact.home is True or not fact.data
            allowed = fact.here == "clean" and not fact.holds and not fact.fixed and safe
            self.ask(allowed, lambda: self.table.drop(block))
            if allowed:
                self.left(fact, keep=False)

    @rule(number=numbers, keep=st.booleans())
    def discard(self, number: int, keep: bool) -> None:
        block, fact = self.pick(number) or (None, None)
        if fact is not None:
            allowed = not fact.holds and fact.here not in ("coming", "going")
            self.ask(allowed, lambda: self.table.discard(block, keep=keep))
            if allowed:
                fact.data, fact.home = False, False
                if fact.fixed:
                    fact.here = "clean" if fact.here == "dirty" else fact.here
                elif fact.here != "no":
                    self.left(fact, keep)

    @rule(number=numbers, keep=st.booleans(), often=st.integers(0, 3))
    def remove(self, number: int, keep: bool, often: int) -> None:
        block, fact = self.pick(number) or (None, None)
        if fact is None or often:
            return
        allowed = not fact.holds and fact.here not in ("coming", "going")
        self.ask(allowed, lambda: self.table.remove(block, keep=keep))
        if allowed:
            if fact.here != "no":
                self.left(fact, keep)
            del self.facts[block]
            assert self.table.get(block) is None

    @rule(number=numbers)
    def write_at_home(self, number: int) -> None:
        block, fact = self.pick(number) or (None, None)
        if fact is not None:
            allowed = fact.here == "no" and fact.below
            self.ask(allowed, lambda: self.table.home_written(block))
            if allowed:
                fact.home = fact.data = True

    @rule(number=numbers, page=st.integers(0, CAPACITY))
    def relocate(self, number: int, page: int) -> None:
        block, fact = self.pick(number) or (None, None)
        if fact is None:
            return
        others = self.taken_pages(without=block)
        free = not others & set(range(page, page + fact.pages)) and page + fact.pages <= CAPACITY
        allowed = fact.here in ("clean", "dirty") and free
        self.ask(allowed, lambda: self.table.relocate(block, page * PAGE))
        if allowed:
            fact.at = page

    @rule(offset=st.integers(0, CAPACITY), pages=st.integers(1, 3))
    def reclaim(self, offset: int, pages: int) -> None:
        allowed = (offset, pages) in self.orphans
        self.ask(allowed, lambda: self.table.reclaim(Extent(offset * PAGE, pages * PAGE)))
        self.orphans.discard((offset, pages))

    def left(self, fact: Fact, keep: bool) -> None:
        if keep:
            self.orphans.add((fact.at, fact.pages))
        fact.here, fact.at, fact.holds = "no", None, 0

    # -- rules that always hold ---------------------------------------------

    def taken_pages(self, without: int | None = None) -> set[int]:
        runs = [(f.at, f.pages) for b, f in self.facts.items() if f.at is not None and b != without]
        pages = [p for at, count in [*runs, *self.orphans] for p in range(at, at + count)]
        assert len(pages) == len(set(pages)), "extents overlap"
        return set(pages)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "table"):
            return
        self.table.check()
        names = {"no": "absent", "coming": "filling", "clean": "valid", "dirty": "dirty"}
        assert len(self.table) == len(self.facts)
        for block, fact in self.facts.items():
            record = self.table[block]
            assert record.in_hbm.value == names.get(fact.here, "draining")
            assert (
                record.at_home.value == {True: "valid", False: "absent", None: "filling"}[fact.home]
            )
            assert (record.leases, record.defined) == (fact.holds, fact.data)
            place = None if fact.at is None else Extent(fact.at * PAGE, fact.pages * PAGE)
            assert record.extent == place
            if place is not None:
                assert self.table.at(place.offset) is record
            good = fact.home is True or fact.here in ("clean", "dirty", "going")
            assert good or not fact.data, "data without a good copy"
        pages = self.taken_pages()
        assert self.table.hbm.used == len(pages) * PAGE <= CAPACITY * PAGE
        assert {(e.offset // PAGE, e.nbytes // PAGE) for e in self.table.orphans()} == self.orphans


TestResidency = Residency.TestCase
TestResidency.settings = settings(max_examples=examples(150), stateful_step_count=50)


def test_a_block_is_entered_once_and_rightly() -> None:
    table = ResidencyTable(8 * PAGE)
    block = Block(0, "b", Role.GRAD, PAGE)
    with pytest.raises(InvariantError, match="needs an extent"):
        table.add(block, Tier.DRAM, None)
    with pytest.raises(InvariantError, match="needs an extent"):
        table.add(block, Tier.HBM, Extent(0, PAGE))
    table.add(block, Tier.DRAM, Extent(0, PAGE))
    with pytest.raises(InvariantError, match="already"):
        table.add(block, Tier.DRAM, Extent(0, PAGE))
    assert len(table) == 1
