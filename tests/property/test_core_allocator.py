"""The allocator against a map of bytes, and its windows against every window there is."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.core.allocator import Allocator
from tiermem.core.block import ALIGNMENT, Extent, align_up
from tiermem.errors import InvariantError

PAGES = 24

steps = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(1, 8 * ALIGNMENT)),
        st.tuples(st.just("free"), st.integers(0, PAGES)),
        st.tuples(st.just("take"), st.tuples(st.integers(0, PAGES), st.integers(1, 6))),
        st.tuples(
            st.just("take at"), st.tuples(st.integers(0, PAGES), st.integers(1, 6 * ALIGNMENT))
        ),
        st.tuples(
            st.just("retake"), st.tuples(st.integers(0, PAGES), st.integers(1, 6 * ALIGNMENT))
        ),
    ),
    max_size=60,
)


class ByteMap:
    """One cell per page: the number of the extent that has it, or 0."""

    def __init__(self, pages: int) -> None:
        self.cells = [0] * pages
        self.extents: dict[int, Extent] = {}

    def runs(self) -> list[tuple[int, int]]:
        """Returns (first page, pages) of every free run that cannot be made longer."""
        found, start = [], None
        for page, owner in enumerate([*self.cells, -1]):
            if owner == 0 and start is None:
                start = page
            elif owner != 0 and start is not None:
                found.append((start, page - start))
                start = None
        return found

    def put(self, extent: Extent) -> None:
        number = max(self.extents, default=0) + 1
        first, pages = extent.offset // ALIGNMENT, extent.nbytes // ALIGNMENT
        assert extent.offset % ALIGNMENT == 0 and extent.nbytes % ALIGNMENT == 0
        assert all(cell == 0 for cell in self.cells[first : first + pages]), "it was taken"
        assert first + pages <= len(self.cells), "past the capacity"
        self.cells[first : first + pages] = [number] * pages
        self.extents[number] = extent

    def drop(self, number: int) -> Extent:
        self.cells = [0 if cell == number else cell for cell in self.cells]
        return self.extents.pop(number)


def check(allocator: Allocator, oracle: ByteMap) -> None:
    taken = sorted(oracle.extents.values(), key=lambda extent: extent.offset)
    assert list(allocator.extents()) == taken
    assert allocator.used == sum(extent.nbytes for extent in taken)
    runs = [Extent(p * ALIGNMENT, n * ALIGNMENT) for p, n in oracle.runs()]
    assert allocator.gaps() == runs, "gaps that touch are joined, and nothing is lost"
    largest = max((run.nbytes for run in runs), default=0)
    assert not allocator.has_gap(largest + 1) and (not largest or allocator.has_gap(largest))
    assert allocator.peak >= allocator.used


@given(st.integers(0, PAGES * ALIGNMENT), steps)
def test_it_agrees_with_a_map_of_bytes(capacity, script) -> None:
    allocator = Allocator(capacity)
    oracle = ByteMap(capacity // ALIGNMENT)
    for kind, value in script:
        if kind == "allocate":
            pages = align_up(value) // ALIGNMENT
            fitting = [run for run in oracle.runs() if run[1] >= pages]
            extent = allocator.allocate(value)
            assert (extent is None) == (not fitting)
            if extent is not None:
                smallest = min(fitting, key=lambda run: (run[1], run[0]))
                assert extent == Extent(smallest[0] * ALIGNMENT, pages * ALIGNMENT)
                oracle.put(extent)
        elif kind == "free" and oracle.extents:
            number = sorted(oracle.extents)[value % len(oracle.extents)]
            allocator.free(oracle.drop(number))
        elif kind == "take":
            extent = Extent(value[0] * ALIGNMENT, value[1] * ALIGNMENT)
            inside = oracle.cells[value[0] : sum(value)]
            if len(inside) == value[1] and not any(inside):
                oracle.put(allocator.take(extent))
            else:
                with pytest.raises(InvariantError):
                    allocator.take(extent)
        elif kind == "take at":
            first, nbytes = value
            pages = align_up(nbytes) // ALIGNMENT
            inside = oracle.cells[first : first + pages]
            taken = allocator.take_at(first * ALIGNMENT, nbytes)
            if len(inside) == pages and not any(inside):
                assert taken == Extent(first * ALIGNMENT, pages * ALIGNMENT)
                oracle.put(taken)
            else:
                assert taken is None
        elif kind == "retake" and oracle.extents:
            which, nbytes = value
            number = sorted(oracle.extents)[which % len(oracle.extents)]
            before = oracle.drop(number)
            first, pages = before.offset // ALIGNMENT, align_up(nbytes) // ALIGNMENT
            inside = oracle.cells[first : first + pages]
            made = Extent(before.offset, pages * ALIGNMENT)
            fits = len(inside) == pages and not any(inside)
            assert allocator.retake(before, made) == fits
            oracle.put(made if fits else before)
            for wrong in (
                (Extent(before.offset + 1, before.nbytes), made),
                (made if fits else before, Extent(before.offset + ALIGNMENT, ALIGNMENT)),
                (made if fits else before, Extent(before.offset, ALIGNMENT + 1)),
            ):
                with pytest.raises(InvariantError):
                    allocator.retake(*wrong)
        check(allocator, oracle)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 4),
            st.booleans(),
            st.one_of(st.none(), st.sampled_from([0.0, 1e-3, 1.0, 7.5, 1e12, 1e15 + 1])),
        ),
        min_size=1,
        max_size=9,
    ),
    st.integers(1, 12),
)
def test_the_cheapest_window_is_the_cheapest(layout, wanted) -> None:
    """Every run of neighbours is tried, and their prices added without rounding."""
    pages = sum(size for size, _, _ in layout)
    allocator = Allocator(pages * ALIGNMENT)
    prices: dict[int, float | None] = {}
    segments = []
    offset = 0
    for size, free, price in layout:
        extent = Extent(offset, size * ALIGNMENT)
        if not free:
            allocator.take(extent)
            prices[offset] = price
        segments.append((extent, [] if free else [price]))
        offset = extent.end
    best = None
    for first, last in combinations(range(len(segments) + 1), 2):
        run = segments[first:last]
        fees = [fee for _, own in run for fee in own]
        if sum(extent.nbytes for extent, _ in run) >= wanted * ALIGNMENT and None not in fees:
            cost = sum(int(fee * 2**20) for fee in fees)
            best = cost if best is None else min(best, cost)
    window = allocator.cheapest_window(wanted * ALIGNMENT, prices.__getitem__)
    assert (window is None) == (best is None)
    if window is not None:
        assert sum(int(prices[v] * 2**20) for v in window.victims) == best
        assert window.cost == best / 2**20
        for victim in window.victims:
            allocator.free(
                Extent(victim, next(e.nbytes for e, _ in segments if e.offset == victim))
            )
        allocator.take(window.extent)  # it is free once they have gone


@pytest.mark.parametrize("nbytes", [0, -1])
def test_nothing_cannot_be_had(nbytes) -> None:
    allocator = Allocator(4 * ALIGNMENT)
    for ask in (allocator.allocate, lambda n: allocator.cheapest_window(n, lambda _: 0.0)):
        with pytest.raises(InvariantError):
            ask(nbytes)
    for extent in (Extent(0, nbytes), Extent(5, ALIGNMENT), Extent(0, 5)):
        with pytest.raises(InvariantError):
            allocator.take(extent)
    assert allocator.used == 0


def test_only_what_was_handed_out_comes_back() -> None:
    allocator = Allocator(4 * ALIGNMENT)
    extent = allocator.allocate(2 * ALIGNMENT)
    for wrong in (Extent(0, ALIGNMENT), Extent(ALIGNMENT, ALIGNMENT), Extent(3 * ALIGNMENT, 4096)):
        with pytest.raises(InvariantError, match="was not allocated"):
            allocator.free(wrong)
    allocator.free(extent)
    with pytest.raises(InvariantError):
        allocator.free(extent)
    assert allocator.gaps() == [Extent(0, 4 * ALIGNMENT)]


@given(st.integers(1, PAGES), steps, st.integers(0, PAGES), st.integers(1, 8), st.data())
def test_the_next_run_is_the_first_that_may_be_had(capacity, script, start, pages, data) -> None:
    allocator, oracle = Allocator(capacity * ALIGNMENT), ByteMap(capacity)
    for what, amount in script:
        extent = allocator.allocate(amount) if what == "allocate" else None
        if extent is not None:
            oracle.put(extent)
    for number in [n for n in oracle.extents if data.draw(st.booleans())]:
        allocator.free(oracle.drop(number))
    stays = {n for n in oracle.extents if data.draw(st.booleans())}
    start = min(start, capacity - 1)
    end = data.draw(st.none() | st.integers(1, capacity), label="end")

    def may_be_had(first: int) -> bool:
        inside = oracle.cells[first : first + pages]
        whole = all(
            oracle.cells.index(n) >= low for n in set(inside) - {0}
        )  # one that begins before is not looked at
        ends = first + pages <= (capacity if end is None else end)
        return len(inside) == pages and ends and whole and not stays & set(inside)

    expected = None
    for low in (start, 0):
        # a run begins at the bound, or behind something
        for first in range(low, capacity):
            if expected is None and may_be_had(first):
                expected = first
    offsets = {e.offset: n for n, e in oracle.extents.items()}
    found = allocator.next_run(
        start * ALIGNMENT,
        pages * ALIGNMENT,
        lambda offset: offsets[offset] not in stays,
        None if end is None else end * ALIGNMENT,
    )
    assert (None if found is None else found[0] // ALIGNMENT) == expected
    if found is not None:
        made, victims = Extent(found[0], pages * ALIGNMENT), found[1]
        first, last = made.offset // ALIGNMENT, made.end // ALIGNMENT
        assert {offsets[v] for v in victims} >= set(oracle.cells[first:last]) - {0}
        assert not {offsets[v] for v in victims} & stays
        for victim in victims:
            allocator.free(oracle.drop(offsets[victim]))
        assert allocator.take_at(made.offset, made.nbytes) == made
        assert allocator.take_at(made.offset, made.nbytes) is None
