"""The walk that goes back only to what has left makes the copies of one that begins anew."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_runtime import Rig, rig

from tiermem.core.block import Role
from tiermem.runtime.lookahead import walks
from tiermem.runtime.lookahead.walks import RingWalk

COUNT = 12


def script_of(rng: random.Random, bother: float) -> list[tuple[str, int]]:
    """Returns uses of all blocks, and so often between them something that takes one away."""
    found = []
    for number in [*range(COUNT), *rng.choices(range(COUNT), k=3)]:
        found.append((rng.choice(["read", "write", "write"]), number))
        if rng.random() < bother:
            found.append((rng.choice(["forget", "lend", "out", "out"]), rng.randrange(COUNT)))
        if rng.random() < bother:
            found += [("back", other) for other in range(COUNT)]
    return found


class FromTheStart(RingWalk):
    """Looks at every place of the schedule again whenever anything has changed."""

    def _step_back(self, cursor: int) -> None:
        self.restart(cursor)


def copies_of(made: Rig) -> list[tuple[str, int]]:
    """Notes which block goes up or down, in order."""
    found: list[tuple[str, int]] = []
    transfers = made.manager.parts.transfers
    fill, drain = transfers.fill, transfers.drain

    def filling(record: Any, *args: Any) -> None:
        found.append(("up", record.block.id))
        fill(record, *args)

    def draining(record: Any) -> None:
        found.append(("down", record.block.id))
        drain(record)

    transfers.fill, transfers.drain = filling, draining  # type: ignore[method-assign]
    return found


def go(made: Rig, rounds: Sequence[Sequence[tuple[str, int]]]) -> list[tuple[str, int]]:
    """Goes through rounds of uses and of what else happens to blocks; returns the copies."""
    manager = made.manager
    manager.prefetcher.fetcher.beside = True
    manager.parts.pass_timer.estimates.wants = lambda _: False  # type: ignore[method-assign]
    found = copies_of(made)
    for script in rounds:
        manager.begin_pass("loop")
        for what, number in script:
            block = made.blocks[number]
            record, lent = manager.parts.table[block.id], manager.host_loans.borrowers(block)
            if what == "back" and lent:
                manager.host_loans.give_back([block], written=False)
            elif lent:
                continue  # its bytes are the borrower's
            elif what == "write":
                made.write(block)
            elif what == "read" and record.defined:
                made.use(block)
            elif what == "forget":
                manager.discard(block)
                made.data.pop(block.id, None)
            elif what == "lend" and not manager.host_loans.can_lend([block]):
                manager.host_loans.lend([block])
            elif what == "out" and record.extent is not None:
                manager.parts.evictor.clear([record.extent.offset], wait=True)
        manager.parts.table.check()
    for block in made.blocks:
        if manager.host_loans.borrowers(block):
            manager.host_loans.give_back([block], written=False)
    made.check()
    return found


@settings(max_examples=examples(30), deadline=None)
@given(
    hbm=st.integers(6, 11),
    depth=st.integers(2, 6),
    bother=st.sampled_from([0.1, 0.3, 0.6]),
    seed=st.integers(0, 1 << 20),
)
def test_it_makes_the_same_copies(hbm: int, depth: int, bother: float, seed: int) -> None:
    found = []
    for kind in (RingWalk, FromTheStart):
        rng = random.Random(seed)
        script, other = script_of(rng, bother), script_of(rng, bother)
        with rig(hbm, depth=depth) as made, patch.object(walks, "RingWalk", kind):
            for _ in range(COUNT):
                made.add(rng.choice([1, 1, 2]), "dram", Role.OPTIMIZER)
            found.append(go(made, [script, script, script, other, script, script]))
    assert found[0] == found[1]
