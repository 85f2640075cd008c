"""Loops laid out in laps: every use finds its block, and nothing in use is overwritten."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples

from tiermem.core import laps
from tiermem.core.laps import (
    LaidOut,
    Missing,
    Place,
    Ways,
    lay_out,
    play,
    postpone_more,
    there_throughout,
    visits_of,
)
from tiermem.core.layouts import layouts
from tiermem.core.rounds import Fetch, Round, Rounds, first_in_place, opened, opening, postponed

ROUNDS = 7


class Memory:
    """What is where, byte by byte: it shares nothing with what it checks."""

    def __init__(self, room: int) -> None:
        self.cells: list[int | None] = [None] * room
        self.at: dict[int, tuple[int, int]] = {}

    def take_out(self, block: int) -> None:
        offset, nbytes = self.at.pop(block)
        assert self.cells[offset : offset + nbytes] == [block] * nbytes
        self.cells[offset : offset + nbytes] = [None] * nbytes

    def put(self, block: int, offset: int, nbytes: int) -> None:
        assert block not in self.at
        assert offset >= 0 and offset + nbytes <= len(self.cells)
        assert self.cells[offset : offset + nbytes] == [None] * nbytes
        self.cells[offset : offset + nbytes] = [block] * nbytes
        self.at[block] = offset, nbytes


def perform(memory: Memory, fetch: Fetch, in_use: Sequence[int], turns: bool) -> None:
    """Does what a fetch says; with slots that take turns an exchange says no place."""
    offset = fetch.offset
    if fetch.exchanged:
        (leaves,) = fetch.leaves
        offset = memory.at[leaves][0] if turns else offset
        assert memory.at[leaves][0] == offset
    assert not set(in_use) & set(fetch.leaves), "what is in use leaves"
    for block in fetch.leaves:
        memory.take_out(block)
    memory.put(fetch.block, offset, fetch.nbytes)


@dataclass
class Passes:
    """The passes of a round, for good.

    Attributes:
        orders: The blocks that each of them uses.
        lags: How many blocks are still in use, of each, when another one is come to.
        held: Blocks that are in use to the end of each pass.
    """

    orders: list[list[int]]
    lags: list[int]
    held: frozenset[int] = frozenset()

    @property
    def order(self) -> list[int]:
        return [block for order in self.orders for block in order]

    @property
    def events(self) -> Round:
        further = [len(self.order) * (block in self.held) for block in self.order]
        return Round([len(order) for order in self.orders], self.lags, further)

    def in_use(self, number: int, at: int) -> list[int]:
        """Returns what may not leave when so many uses of a pass have been entered."""
        order = self.orders[number]
        return [*self.late(number, at), *self.held.intersection(order[:at])]

    def late(self, number: int, at: int) -> list[int]:
        """Returns what a pass has not let go of yet, but for what it holds to its end."""
        order, lag = self.orders[number], self.lags[number]
        used = order[:at]
        # what came just before the last ones is let go when the first of those has been entered
        return used[-lag - 1 :]

    def used_later(self, number: int, use: int) -> int:
        """Returns the block used at a place counted from the begin of a pass, or far later."""
        ahead = [block for order in self.orders[number:] for block in order] + 9 * self.order
        return ahead[use]


def go_through(
    memory: Memory, passes: Passes, number: int, fetches: Sequence[Fetch], turns: bool
) -> None:
    """Goes through one pass."""
    order = passes.orders[number]
    assert [f.event for f in fetches] == sorted(f.event for f in fetches)
    assert all(passes.used_later(number, f.use) == f.block for f in fetches)
    made = 0
    for event in range(len(order) + 1):
        if event:
            assert order[event - 1] in memory.at, "a use before its block is there"
        for fetch in fetches:
            if fetch.event == event:
                perform(memory, fetch, passes.in_use(number, event), turns)
                made += 1
    assert made == len(fetches)


def check(memory: Memory, passes: Passes, rounds: Rounds, stay: set[int], turns: bool) -> None:
    at = 0
    for number in range(ROUNDS * len(passes.orders)):
        go_through(memory, passes, number % len(passes.orders), rounds.fetches[at], turns)
        at = rounds.after(at)
        if number >= len(passes.orders):
            assert all(block in memory.at for block in stay)


Made = tuple[Passes, dict[int, int], list[tuple[int, int]], set[int]]


@st.composite
def loops(draw: st.DrawFn) -> Made:
    """The passes of a round, the sizes, runs of room, and what is in HBM to stay."""
    count = draw(st.integers(2, 12))
    alike = draw(st.booleans())
    sizes = {b: 2 if alike else draw(st.integers(1, 4)) for b in range(count)}
    order: list[int] = []
    for block in draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=24)):
        if not order or order[-1] != block:
            order.append(block)
    stay = draw(st.sets(st.sampled_from(range(count)), max_size=count - 1)) & set(order)
    orders = [order]
    if len(order) > 1 and draw(st.booleans()):
        back = order[::-1]
        for at in draw(st.lists(st.integers(0, len(back) - 2), max_size=3)):
            back[at], back[at + 1] = back[at + 1], back[at]
        orders.append(back[draw(st.integers(0, len(back) // 2)) :])
        if draw(st.booleans()):
            orders.append(draw(st.permutations(order)))
    orders = [[block for block, _ in groupby(order)] for order in orders]  # none twice in a row
    lags = [draw(st.integers(0, 2)) if len(orders) > 1 else 0 for _ in orders]
    runs, at = [], 0
    for nbytes, gap in draw(
        st.lists(st.tuples(st.integers(2, 16), st.integers(1, 2)), min_size=1, max_size=3)
    ):
        runs.append((at, at + nbytes))
        at += nbytes + gap
    held = draw(st.frozensets(st.sampled_from(range(count)), max_size=1))
    return Passes(orders, lags, held), sizes, runs, stay


@settings(max_examples=examples(300))
@given(loops(), st.data())
def test_every_use_finds_its_block(made: Made, data: st.DataObject) -> None:
    passes, sizes, runs, stay = made
    order = passes.order
    moving = {b: sizes[b] for b in order if b not in stay}
    if not moving:
        return
    room = sum(end - begin for begin, end in runs)
    visits = visits_of(order, moving, data.draw(st.integers(0, room)))
    assert {v.block for v in visits} == set(moving)
    top = runs[-1][1]
    for layout in layouts([v.block for v in visits], [v.nbytes for v in visits], runs):
        memory = Memory(top + sum(sizes[b] for b in stay))
        missing, offset = [], top
        for block in sorted(stay, key=order.index):
            if data.draw(st.booleans()):
                memory.put(block, offset, sizes[block])
            else:
                missing.append(Missing(block, order.index(block), offset, sizes[block]))
            offset += sizes[block]
        inside: dict[int, Place] = {}
        for visit, at in zip(visits, layout[0], strict=True):
            free = memory.cells[at : at + visit.nbytes] == [None] * visit.nbytes
            if free and visit.block not in memory.at and data.draw(st.booleans()):
                memory.put(visit.block, at, visit.nbytes)
                inside[visit.block] = Place(at, visit.nbytes)
        rounds = play(visits, layout, passes.events, inside, missing)
        if rounds is not None:
            late = postponed(rounds, data.draw(st.integers(0, 5)), passes.events.lengths)
            fetches = opening(late)
            ahead = opened(late, fetches)
            if ahead is not None and not inside:
                filled = deepcopy(memory)
                for fetch in fetches:
                    filled.put(fetch.block, fetch.offset, fetch.nbytes)
                check(filled, passes, ahead, stay, len(layout) > 1)
            check(memory, passes, late, stay, len(layout) > 1)


def fewest(order: Sequence[int], slots: int) -> float:
    """Returns how many fetches a round takes at the least, where all blocks are of one size.

    What is needed last leaves, and nothing is fetched before its use (Belady).
    """
    inside: set[int] = set()
    uses = list(order) * ROUNDS * 2
    count = [0] * (2 * ROUNDS)
    for at, block in enumerate(uses):
        if block in inside:
            continue
        count[at // len(order)] += 1
        if len(inside) == slots:
            ahead = uses[at + 1 :]
            inside.remove(max(inside, key=lambda b: ahead.index(b) if b in ahead else len(uses)))
        inside.add(block)
    return sum(count[2:ROUNDS]) / (ROUNDS - 2)


@settings(max_examples=examples(60))
@given(st.integers(3, 20), st.integers(2, 8), st.integers(0, 2))
def test_forward_and_backward_move_no_more_than_they_must(count: int, slots: int, lag: int) -> None:
    """What closes one pass opens the next, and does not move between them."""
    if slots < 2 + lag + (lag > 0) or slots >= count:
        return
    passes = Passes([[*range(count)], [*range(count)][::-1]], [0, lag])
    transfer = dict.fromkeys(range(count), 1e-3)
    streams = dict.fromkeys(range(count), 3)
    ways = Ways(passes.order, passes.events, streams, [(0, 3 * slots + 1)])
    out = lay_out(ways, [1e-4] * 2 * count, transfer, 0.0)
    assert out is not None
    assert fewest(passes.order, slots) == 2 * (count - slots)
    assert round(out.moved / 1e-3) == 2 * (count - slots)
    rounds = play(out.visits, out.layout, passes.events, {})
    assert rounds is not None
    check(Memory(3 * slots + 1), passes, rounds, set(), len(out.layout) > 1)


def clock(rounds: Rounds, order: Sequence[int], compute: float, transfer: float) -> float:
    """Returns the seconds of a pass once passes repeat, played copy by copy and use by use.

    All is at rest as a pass begins. The host takes 1 ms to its first use, and 0.2 ms for each.
    """
    number, taken = 0, []
    used: dict[int, float] = {}
    for _ in range(ROUNDS * len(rounds.fetches)):
        came: dict[int, float] = {}
        ended, link, device = dict.fromkeys(used, 0.0), 0.0, 0.0
        fetches = list(rounds.fetches[number])
        for event in range(len(order) + 1):
            host = 1e-3 + 0.2e-3 * event if event else 0.0
            while fetches and fetches[0].event == event:
                fetch = fetches.pop(0)
                link = max(link, host, *(ended.get(block, 0.0) for block in fetch.leaves))
                link += transfer
                came[fetch.block] = link
            if event < len(order):
                device = max(device, host, came.get(order[event], 0.0)) + compute
                ended[order[event]] = device
        taken.append(max(link, device))
        used = ended
        number = rounds.after(number)
    repeated = len(rounds.fetches) - rounds.again
    return sum(taken[-repeated:]) / repeated


def begun(ways: Ways, compute: float, transfer: float) -> LaidOut:
    """Lays a loop out whose uses, and whose copies, are alike."""
    seconds, copies = [compute] * len(ways.order), dict.fromkeys(ways.order, transfer)
    out = lay_out(ways, seconds, copies, 0.0)
    assert out is not None
    return postpone_more(out, ways, seconds, copies, 0.0)


@settings(max_examples=examples(100))
@given(
    st.integers(4, 16),
    st.integers(2, 5),
    st.integers(1, 40).map(lambda n: n * 5e-5),
    st.integers(1, 40).map(lambda n: n * 5e-5),
)
def test_what_is_left_to_the_begin_takes_no_longer(
    count: int, slots: int, compute: float, transfer: float
) -> None:
    if slots >= count:
        return
    one = Round([count])
    ways = Ways(range(count), one, dict.fromkeys(range(count), 3), [(0, 3 * slots)])
    out = begun(ways, compute, transfer)
    rounds = play(out.visits, out.layout, one, {})
    assert rounds is not None
    took = [clock(postponed(rounds, n, [count]), range(count), compute, transfer) for n in range(7)]
    assert out.seconds == pytest.approx(took[out.postponed], rel=5e-4)
    least = 1 if transfer > compute else 0
    assert took[out.postponed] <= 1.0005 * took[least]
    assert out.postponed == least or least or took[out.postponed] < took[out.postponed - 1]
    most = max(sum(fetch.use >= count for fetch in fetches) for fetches in rounds.fetches)
    if least and out.postponed < most:
        assert took[out.postponed + 1] > took[out.postponed]  # what comes to the same is left
    assert took[out.postponed + 1] >= 0.999 * took[out.postponed]


def test_all_slots_are_left_to_the_begin_where_the_host_comes_late() -> None:
    """And none where the device has to wait for them; the third comes as a pass begins anyway."""
    ways = Ways(range(12), Round([12]), dict.fromkeys(range(12), 3), [(0, 9)])
    assert begun(ways, 1e-5, 4e-4).postponed == 2
    assert begun(ways, 1e-2, 4e-4).postponed == 0


def laid_out(order: list[int], sizes: dict[int, int], room: int) -> Rounds | None:
    visits = visits_of(order, sizes, room // 2)
    for layout in layouts([v.block for v in visits], [v.nbytes for v in visits], [(0, room)]):
        rounds = play(visits, layout, Round([len(order)]), {})
        if rounds is not None:
            return rounds
    return None


@settings(max_examples=examples(100))
@given(st.integers(3, 40), st.integers(2, 6))
def test_blocks_of_one_size_can_always_be_laid_out(count: int, slots: int) -> None:
    """However many slots there are for however many blocks."""
    if slots >= count:
        return
    rounds = laid_out(list(range(count)), dict.fromkeys(range(count), 3), 3 * slots + 2)
    assert rounds is not None
    again = rounds.fetches[-1]
    assert len(again) == count  # each block once
    assert all(f.exchanged for f in again)
    # as early as there is room: a block takes the place of that which came so many before
    assert all((f.block - f.leaves[0]) % count == slots for f in again)


def test_layers_of_several_sizes_are_laid_out() -> None:
    sizes = {}
    for layer in range(12):
        sizes.update({3 * layer: 4, 3 * layer + 1: 4, 3 * layer + 2: 11})
    for room in range(30, 80, 5):
        rounds = laid_out(list(range(36)), sizes, room)
        assert rounds is not None
        again = rounds.fetches[-1]
        assert sorted(f.block for f in again) == list(range(36))
        early = [f.use - (f.event - 1) for f in again]
        assert min(early) >= 1
        assert max(early) > 2


def test_a_block_that_would_overwrite_what_is_in_use_is_not_laid_out() -> None:
    assert laid_out([0, 1, 2, 3], dict.fromkeys(range(4), 3), 5) is None
    assert laid_out([0, 1, 2, 3], {0: 3, 1: 2, 2: 3, 3: 2}, 4) is None


def test_uses_near_each_other_are_one_visit() -> None:
    visits = visits_of([0, 1, 0, 2, 3, 4, 0], dict.fromkeys(range(5), 1), 1)
    assert [(v.block, v.first, v.last) for v in visits] == [
        (0, 0, 2),
        (1, 1, 1),
        (2, 3, 3),
        (3, 4, 4),
        (4, 5, 5),
        (0, 6, 6),
    ]


def test_many_blocks_of_many_sizes_take_little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places that come round only after hundreds of rounds are not gone through."""
    sizes = {block: 1 + (7 * block * block + block) % 39 for block in range(2000)}
    room = sum(sizes.values()) // 4
    looked = 0

    def counted(*arguments: Any) -> Fetch:
        nonlocal looked
        looked += 1
        return Fetch(*arguments)

    counted.same = Fetch.same  # type: ignore[attr-defined]
    monkeypatch.setattr(laps, "Fetch", counted)
    order = list(range(2000))
    transfer = {block: size * 1e-6 for block, size in sizes.items()}
    ways = Ways(order, Round([2000]), sizes, [(0, room)])
    found = lay_out(ways, [1e-6] * 2000, transfer, 0.0)
    assert found is not None
    assert 0 < looked <= 150_000
    looked = 0
    assert lay_out(ways, [1e-6] * 2000, transfer, 0.0) == found
    assert not looked, "only times are new: nothing is played again"


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=24))
def test_first_in_place_is_what_no_other_comes_before(places: list[tuple[int, int]]) -> None:
    fetches = [Fetch(0, n, nbytes, at, (), False, 0) for n, (at, nbytes) in enumerate(places)]
    taken, expected = set[int](), list[Fetch]()
    for fetch in fetches:
        there = set(range(fetch.offset, fetch.offset + fetch.nbytes))
        if taken.isdisjoint(there):
            expected.append(fetch)
        taken |= there
    assert list(first_in_place(fetches)) == expected


@given(
    order=st.lists(st.integers(0, 5), min_size=1, max_size=30),
    sizes=st.lists(st.integers(1, 4), min_size=6, max_size=6),
    room=st.integers(2, 30),
)
def test_what_is_there_throughout_would_hardly_leave(
    order: list[int], sizes: list[int], room: int
) -> None:
    """Of each block the longest run of uses with no more than half of the room between two."""
    streams = dict(enumerate(sizes))
    found = there_throughout(order, streams, room)
    for block in set(order):
        uses = [n for n, used in enumerate(order) if used == block]
        begin, longest = uses[0], 0
        for before, use in pairwise(uses):
            if fetched_between(order, streams, before, use, room // 2) > room // 2:
                begin = use
            longest = max(longest, use - begin)
        assert (block in found) == (longest > len(order) / 2)


def fetched_between(
    order: Sequence[int], sizes: dict[int, int], first: int, last: int, reach: int
) -> int:
    """Returns the bytes that come up between two uses, each block whenever it was away for long."""
    came, counts = 0, []  # bytes that had come up before each use, and after it
    seen: dict[int, int] = {}
    for block in order[: last + 1]:
        before = came
        if block not in seen or came - seen[block] > reach:
            came += sizes[block]
        seen[block] = came
        counts.append((before, came))
    return counts[last][0] - counts[first][1]
