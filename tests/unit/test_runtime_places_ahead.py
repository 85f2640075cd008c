"""Gradients get their places ahead of use, among what is fetched, where HBM goes in circles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support_late_down import LateDownEngine
from support_late_state import NBYTES, Pair, pair_of
from support_runtime import PAGE, Rig, rig

from tiermem.core.block import Extent, Role
from tiermem.core.residency import Record, State
from tiermem.runtime import assembly


def claims_of(made: Any) -> list[Extent]:
    """Notes the places that compute is made to wait for."""
    found: list[Extent] = []
    copies = made.manager.parts.copy
    claim = copies.claim

    def claiming(extent: Extent) -> None:
        found.append(extent)
        claim(extent)

    copies.claim = claiming
    return found


def place_ahead(made: Rig, pages: int = 1) -> Record:
    """Gives a new block without data a place, as a fetch ahead does."""
    block = made.add(pages, "dram", Role.GRAD, blank=True)
    record = made.manager.record(block)
    extent = made.manager.parts.table.hbm.allocate(block.nbytes)
    assert extent is not None
    made.manager.parts.transfers.blank(record, extent, ahead=True)
    return record


def test_compute_waits_for_the_place_as_the_block_is_used() -> None:
    with rig(8) as made:
        found = claims_of(made)
        record = place_ahead(made)
        assert record.in_hbm is State.VALID and not record.defined and not found
        assert made.manager.acquirer.at_hand(record.block.id) is None  # it was not used before
        made.write(record.block)
        assert found == [record.extent]
        made.use(record.block)
        assert made.manager.acquirer.at_hand(record.block.id) is record
        assert found == [record.extent]  # once
        made.check()


def test_what_is_used_again_waits_for_the_place_as_well() -> None:
    with rig(8) as made:
        found = claims_of(made)
        record = place_ahead(made)
        slot = made.manager.again(record.block)
        assert found == [record.extent] and slot.extent == record.extent
        assert made.manager.acquirer.at_hand(record.block.id) is record  # though it holds no data
        made.manager.release(record.block)


@pytest.mark.parametrize("how", ["evicted", "discarded", "removed", "repaired"])
def test_a_place_that_is_given_up_is_not_waited_for(how: str) -> None:
    with rig(8) as made:
        record = place_ahead(made)
        block, manager = record.block, made.manager
        if how == "evicted":
            manager.parts.evictor.evict(record)
        elif how == "discarded":
            manager.discard(block)
        elif how == "removed":
            manager.remove_blocks([block])
        else:
            manager.parts.transfers.repair()
        assert not manager.parts.transfers.unclaimed
        if how == "removed":
            made.blocks.remove(block)
            return
        found = claims_of(made)
        made.write(block)  # at home, where it has no place
        made.use(block)
        assert not found
        made.check()


def test_it_is_asked_for_where_the_ring_has_come_to() -> None:
    with rig(8) as made:
        blocks = [made.add(1, "dram", Role.OPTIMIZER) for _ in range(8)]
        for block in blocks:
            made.use(block)
        evictor = made.manager.parts.evictor
        new = made.add(2, "dram", Role.GRAD, blank=True)
        assert evictor.place_in_ring(new, 1) is None  # there is none
        evictor.ring.uses, evictor.ring.at = 1, 3 * PAGE
        assert evictor.place_in_ring(new, 1) == Extent(3 * PAGE, 2 * PAGE)
        assert evictor.ring.at == 5 * PAGE
        made.manager.parts.table.hbm.free(Extent(3 * PAGE, 2 * PAGE))
        held = [b for b in blocks if made.manager.record(b).extent is not None]
        made.manager.acquire_all(held)
        larger = made.add(3, "dram", Role.GRAD, blank=True)
        assert evictor.place_in_ring(larger, 1) is None  # nobody is sent away who is in use
        for block in held:
            made.manager.release(block)
        evictor.ring.uses = 0


def test_gradients_that_are_there_are_fetched_as_anything_else_is() -> None:
    """Not where fetches ahead for a pass came to nothing before."""
    with rig(6, depth=3) as made:
        fetcher = made.manager.prefetcher.fetcher
        fetcher.beside = True
        for _ in range(10):
            made.add(1, "dram", Role.GRAD)
        for due in (True, False):
            if not due:
                fetcher.is_due = lambda *_: False  # type: ignore[method-assign]
            for _ in range(3):
                made.manager.begin_pass("loop")
                before = made.manager.stats().prefetches
                for block in made.blocks:
                    made.write(block)
            assert (made.manager.stats().prefetches > before) == due
        made.check()


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """A loop that goes in circles, and whose copies down are made as late as they may be."""
    monkeypatch.setattr(assembly, "HostCopyEngine", LateDownEngine)
    with pair_of(hbm=NBYTES * 3 // 4) as pair:
        pair.tier._manager.prefetcher.fetcher.beside = True
        yield pair


def test_what_was_at_the_place_is_home_before_the_gradient_comes(late_copies: Pair) -> None:
    pair = late_copies
    manager = pair.tier._manager
    pair.step(3)
    made: list[int] = []
    transfers = manager.parts.transfers
    blank = transfers.blank

    def placing(record: Record, extent: Extent, *, ahead: bool = False) -> None:
        made.append(ahead)
        blank(record, extent, ahead=ahead)

    transfers.blank = placing  # type: ignore[method-assign]
    pair.step(6)
    assert made.count(True) > 3 * made.count(False)
    pair.check()
    pair.step(2)
    pair.check()


def test_blocks_that_take_gradients_over_go_where_they_were_though_they_have_places(
    late_copies: Pair,
) -> None:
    pair = late_copies
    pair.step(5)
    table = pair.tier._manager.parts.table
    x = torch.zeros(4, 64)
    loss = pair.model(x).square().mean()  # which has looked ahead
    gradients = [u.block for unit in pair.optimizer._units for u in unit.grad_units()]
    blank = [b for b in gradients if table[b.id].in_hbm is State.VALID]
    assert blank and not any(table[b.id].defined for b in blank)
    spares = pair.ahead.late._spares
    assert spares.blocks()
    homes = dict(spares._began)
    pair.ahead.late.catch_up()
    assert spares.close()
    assert all(table.get(number) is None for number in homes)
    mine = {table[b.id].home_extent for b in gradients}
    assert not mine & set(homes.values())
    del loss
    pair.step(3)
    pair.check()
