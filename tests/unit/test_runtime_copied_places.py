"""Places that are said to be such as only copies down have used, and are not."""

from __future__ import annotations

from functools import partial

from support_runtime import Owner
from support_streams import DOWN, UP, Case, Streamed

from tiermem.core.residency import State
from tiermem.runtime.memory.slots import Slot
from tiermem.runtime.services.sweep import BlockSweep


def end(bench: Streamed) -> None:
    """Makes what is submitted, copies first, and checks what everybody has read."""
    while bench.device.advance(UP) or bench.device.advance(DOWN):
        pass
    bench.device.synchronize()
    assert not bench.wrong, bench.wrong
    bench.manager.close()


class There:
    """What has pointed parameters at a block, all of which are where they were pointed."""

    def away(self) -> None:
        pass

    def all_at(self, slot: Slot) -> bool:
        return True


def test_what_is_handed_over_is_not_taken_for_what_was_once_handed_out_there() -> None:
    """A blank block was given a copied place: its mark must not be there for the next one."""
    bench = Streamed(Case(0, slots=1, blocks=2, depth=0, lag=0, late=None, poison=False))
    manager, device = bench.manager, bench.device
    first, second = bench.blocks
    bench.use(0, write=True, discard=False)
    bench.use(1, write=False, discard=True)  # blank, where the first one was copied home from
    assert manager.record(first).extent is None
    sweep = BlockSweep(manager)
    sweep._dram = True
    sweep.write([second])  # home in between; it stays
    device.synchronize()
    bench.use(1, write=False, discard=False)  # a kernel reads it, behind
    bench.use(0, write=False, discard=False)  # the place is handed over
    end(bench)


def test_what_a_parameter_points_at_softly_is_used_behind_a_copy_home() -> None:
    """A look in place writes it home while a parameter without a lease still expects it there."""
    bench = Streamed(Case(0, slots=1, blocks=2, depth=0, lag=0, late=None, poison=False))
    manager, device = bench.manager, bench.device
    first, _ = bench.blocks
    owner = Owner(manager, first)
    slot = owner.hold()
    owner.let_go(dirty=True, soft=True)
    assert slot.wanted and not slot.aliased
    slot.pointer = There()
    bench.glance(0)
    while manager.record(first).in_hbm is State.DIRTY:
        bench.glance(0)  # one look in two is one that writes it home
    device.synchronize()
    look = partial(bench.check, 0, bench.values[0], slot.address, "in HBM")
    device.submit(device.stream, look)  # the parameter is used, where it points
    bench.use(1, write=False, discard=False)
    end(bench)


def test_an_alias_that_hides_behind_a_parameter_uses_the_place_behind_a_copy_home() -> None:
    """The parameter was given other data, and a view has the reference that was counted for it."""
    bench = Streamed(Case(0, slots=1, blocks=2, depth=0, lag=0, late=None, poison=False))
    manager, device = bench.manager, bench.device
    first, _ = bench.blocks
    owner = Owner(manager, first)
    slot = owner.hold()
    view = owner.param.data
    owner.param.data = owner.away  # unseen
    owner.let_go(dirty=True, soft=True)
    slot.idle = True
    assert not slot.aliased and not slot.wanted
    sweep = BlockSweep(manager)
    sweep._dram = True
    sweep.write([first])
    device.synchronize()
    manager.parts.evictor.rules.let_loose(manager.record(first))  # it is found, and stays
    assert slot.aliased
    look = partial(bench.check, 0, bench.values[0], view.data_ptr(), "in HBM")
    device.submit(device.stream, look)  # the view is used
    del view
    manager.parts.evictor.clear([0], wait=True)  # as for a larger block: it is not handed over
    bench.use(1, write=False, discard=False)
    end(bench)
