"""When passes let go of blocks: what is seen of one that broke off is expected of the next."""

from __future__ import annotations

from tiermem.runtime.lookahead.lates import Lates

FORWARD, BACKWARD = ("forward", ""), ("backward", "")


def watch(lates: Lates, order: list[int], held: dict[int, tuple[int, int]], since: int) -> None:
    """Goes on with a pass that broke off at a use.

    Args:
        lates: Is told.
        order: Blocks that it uses.
        held: Where each block that is held is used, and the first use at which it may leave.
        since: At which use it broke off.
    """
    late = [b for b, (begin, end) in held.items() if begin < since < end]
    lates.broke_off(FORWARD, {block: order.index(block) for block in late})
    for at in range(since, len(order)):
        for block, (_, end) in held.items():
            assert lates.of(FORWARD).further.get(block, 0) <= end
        lates.look(order[at], at, lambda b, at=at: b not in held or at >= held[b][1])  # type: ignore[misc]
    lates.end(len(order))


def test_each_block_is_expected_to_stay_as_long_as_it_did() -> None:
    lates, order = Lates(), [*range(10)]
    watch(lates, order, {0: (0, 10), 1: (1, 4), 5: (5, 7)}, 2)
    further = lates.of(FORWARD).further
    assert {block: n for block, n in further.items() if n} == {0: 9, 1: 2, 5: 1}
    assert lates.version == 1 and not lates.watching
    assert lates.of(FORWARD).lag == 0 and not lates.of("other").further


def test_what_is_seen_again_replaces_what_was_seen_before() -> None:
    lates, order = Lates(), [*range(6)]
    watch(lates, order, {1: (1, 4), 2: (2, 6)}, 3)
    assert lates.of(FORWARD).further[1] == 2
    watch(lates, order, {1: (1, 3), 2: (2, 6)}, 2)
    further = lates.of(FORWARD).further
    assert further[1] == 1 and further[2] == 3


def test_backward_lets_go_of_everything_later() -> None:
    lates = Lates()
    lags = []
    for _ in range(5):
        lates.broke_off(BACKWARD, {3: 1})
        assert not lates.watching
        lags.append(lates.of(BACKWARD).lag)
    assert lags == [4, 6, 8, 8, 8] and lates.version == 5


def test_nothing_is_learned_of_a_pass_that_is_forgotten() -> None:
    lates = Lates()
    lates.broke_off(FORWARD, {0: 0})
    lates.forget()
    lates.end(4)
    assert lates.version == 0 and not lates.of(FORWARD).further


def test_what_is_held_for_most_of_a_pass_stays_where_there_is_room() -> None:
    lates, order = Lates(), [*range(10)]
    watch(lates, order, {0: (0, 10), 1: (1, 4)}, 2)
    spans, sizes = [(0, 10, FORWARD), (10, 20, BACKWARD)], dict.fromkeys(order, 3)
    assert lates.throughout(spans, sizes, 6) == {0}
    assert lates.throughout(spans, sizes, 5) == set()
    assert lates.throughout(spans, {1: 3}, 6) == set()
