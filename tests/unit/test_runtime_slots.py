"""Slots of blocks that lie alike share what they look at; who looks there is told all the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tiermem.core.block import Block, Extent, Role, Tier
from tiermem.core.layout import TensorShape, pack
from tiermem.runtime.memory.slots import Slot, SlotCache, View
from tiermem.storage.arena import HostArena

PAGE = 4096


def block(number: int, sizes: tuple[int, ...] = (64, 32), role: Role = Role.PARAM) -> Block:
    shapes = [TensorShape(f"w{number}.{n}", (n,), (1,), torch.float32, 4) for n in sizes]
    specs, nbytes = pack(shapes)
    return Block(number, f"b{number}", role, nbytes, specs)


@pytest.fixture
def cache() -> Iterator[SlotCache]:
    arena = HostArena(Tier.HBM, 64 * PAGE)
    yield SlotCache(arena)
    arena.close()


def place(number: int) -> Extent:
    return Extent(number * PAGE, PAGE)


def test_blocks_that_lie_alike_share_their_views_at_one_place(cache: SlotCache) -> None:
    first, second = cache.slot(block(0), place(1)), cache.slot(block(1), place(1))
    assert first is not second and first.views is second.views
    assert first.baseline == second.baseline and not (first.aliased or second.aliased)
    for other in (
        cache.slot(block(2), place(2)),
        cache.slot(block(3, (32, 64)), place(1)),
        cache.slot(block(4, role=Role.GRAD), place(1)),
        cache.slot(block(5, role=Role.GRAD), place(1)),
    ):
        assert other.views is not first.views and other.storage != first.storage
    gradients = [cache.slot(block(n, role=Role.GRAD), place(1)) for n in (4, 5)]
    assert gradients[0].views is gradients[1].views
    assert cache.slot(block(0), place(1)) is first


def test_each_is_told_who_looks_while_it_is_there(cache: SlotCache) -> None:
    slots = [cache.slot(block(number), place(1)) for number in range(3)]
    for slot in slots:  # one after the other, as blocks do that take turns at a place
        weight = torch.nn.Parameter(torch.zeros(64), requires_grad=False)
        weight.data = slot.views[0]
        slot.pointed = 1
        assert not slot.aliased and not slot.others()
        kept = weight.data[:3]
        assert slot.aliased and slot.others()
        del kept
        assert not slot.aliased and not slot.others()
        weight.data = torch.zeros(64)
        assert slot.others()  # it does not point here
        slot.pointed = 0
        assert not slot.aliased and not slot.others()


def test_what_only_reads_is_told_from_what_may_write(cache: SlotCache) -> None:
    slot = cache.slot(block(0), place(1))
    reading = torch.empty(0, dtype=torch.uint8).set_(slot.sight.reading, 0, (8,), (1,))
    assert slot.aliased and not slot.others()
    del reading
    assert not slot.aliased


WHOLE: View = (torch.float32, 0, (8, 8), (8, 1))


def test_a_view_that_is_read_again_is_another_tensor_and_counts_while_it_lives(
    cache: SlotCache,
) -> None:
    slot, other = cache.slot(block(0), place(1)), cache.slot(block(1), place(1))
    slot.views[0].copy_(torch.arange(64.0))
    for _ in range(3):
        view = slot.sight.read_view(WHOLE)
        assert view.shape == (8, 8) and view._version == 0 and not view.requires_grad
        assert torch.equal(view.flatten(), torch.arange(64.0))
        assert slot.aliased and other.aliased and not slot.others()
        view.unsqueeze_(0)
        torch.autograd.graph.increment_version(view)
        del view
        assert not slot.aliased and not other.aliased
    assert len(slot.sight.read) == 1


def test_views_beyond_what_is_kept_are_told_from_it(cache: SlotCache) -> None:
    slot = cache.slot(block(0), place(1))
    views = [slot.sight.read_view((torch.float32, n, (1,), (1,))) for n in range(40)]
    assert 0 < len(slot.sight.read) < 20
    while views:
        assert slot.aliased
        views.pop()
    assert not slot.aliased


def test_what_a_mode_or_a_transform_makes_is_not_kept(cache: SlotCache) -> None:
    slot = cache.slot(block(0), place(1))
    slot.views[0].fill_(2.0)

    def use(x: torch.Tensor) -> torch.Tensor:
        return (x * slot.sight.read_view(WHOLE)).sum()

    x = torch.ones(8, 8)
    with torch.inference_mode():
        assert use(x) == 128.0
    with FakeTensorMode(allow_non_fake_inputs=True):
        slot.sight.read_view(WHOLE)
    assert torch.equal(torch.func.grad(use)(x), 2.0 * x)
    assert not slot.sight.read and not slot.aliased
    weight = x.clone().requires_grad_()
    use(weight).backward()  # saves the view
    assert torch.equal(torch.func.grad(use)(x), 2.0 * x)
    assert weight.grad is not None and torch.equal(weight.grad, 2.0 * x)
    assert len(slot.sight.read) == 1 and not slot.aliased


def test_what_no_slot_looks_at_any_more_is_let_go(cache: SlotCache) -> None:
    for number in range(40):  # more places than are kept of one block
        cache.slot(block(0), place(number))
    assert 0 < len(cache._sights) < 40
    cache.forget(0)
    assert not cache._sights


def test_a_loop_of_layers_makes_one_set_of_views_a_place(cache: SlotCache) -> None:
    made: list[Slot] = []
    for turn in range(60):  # five layers take turns in twelve places: none is where it was for long
        made.append(cache.slot(block(turn % 5), place(turn % 12)))
    assert len({id(slot.views) for slot in made}) == 12
