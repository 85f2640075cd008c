"""What a steady loop does without: searches for room, new views, wrappers in a held block."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support_copies import SECONDS
from support_examples import examples
from support_runtime import EvenClock
from torch import nn

import tiermem
from tiermem.config import Policy, Settings
from tiermem.core.allocator import Allocator
from tiermem.core.block import Block, Extent, Role
from tiermem.core.layout import TensorShape
from tiermem.core.residency import State
from tiermem.nn.groups.names import HeldDict, TieredDict
from tiermem.nn.groups.pointing import Pointing
from tiermem.runtime.lookahead.walks import SequenceWalk
from tiermem.runtime.manager import BlockManager
from tiermem.transfer.streams import Fences

PAGE = 4096


def counted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[Any]:
    """Counts the calls of a method: a list that grows by one object for each."""
    calls: list[Any] = []
    method: Callable[..., Any] = getattr(owner, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return method(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


def opened(blocks: int, slots: int) -> tuple[BlockManager, list[Block]]:
    """Opens a manager that fetches ahead as on a GPU, with one-page blocks of their number."""
    manager = BlockManager(
        Settings(
            device="cpu",
            hbm=slots * PAGE,
            dram=blocks * PAGE,
            nvme=(),
            nvme_bytes=None,
            policy=Policy(params="dram"),
            prefetch_depth=1,
        )
    )
    manager.prefetcher.fetcher.beside = True
    shape = TensorShape("w", (PAGE,), (1,), torch.uint8, 1)
    made = manager.add_blocks([(f"b{i}", Role.PARAM, [shape]) for i in range(blocks)])
    for number, block in enumerate(made):
        manager.write_home(block, [torch.full((PAGE,), number, dtype=torch.uint8)])
    return manager, made


def go_round(manager: BlockManager, blocks: list[Block]) -> None:
    manager.begin_pass("loop")
    for number, block in enumerate(blocks):
        slot = manager.acquire(block)
        assert slot.bytes.eq(number).all()
        manager.release(block)


def test_a_place_changes_hands_without_being_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, blocks = opened(7, 3)
    for _ in range(4):
        go_round(manager, blocks)
    freed = counted(monkeypatch, Allocator, "free")
    searched = counted(monkeypatch, Allocator, "window_around")
    before = manager.stats()
    go_round(manager, blocks)
    after = manager.stats()
    assert after.evictions > before.evictions
    assert not freed and not searched
    manager.parts.table.check()
    manager.close()


def test_nothing_is_looked_for_while_all_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, blocks = opened(5, 5)
    for _ in range(3):
        go_round(manager, blocks)
    looks = counted(monkeypatch, SequenceWalk, "_wants_more")
    go_round(manager, blocks)
    assert not looks
    manager.parts.evictor.evict(manager.record(blocks[3]))
    fetched = manager.stats().prefetches
    go_round(manager, blocks)
    assert looks and manager.stats().prefetches == fetched + 1
    manager.close()


class Inner(nn.Module):
    """A block of two linear layers, the second of which may be called by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.between: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.between()
        return self.second(x)


def wrapped(layers: int, hbm: int) -> tuple[tiermem.TierManager, nn.Sequential]:
    torch.manual_seed(0)
    net = nn.Sequential(*(Inner() for _ in range(layers)))
    tier = tiermem.TierManager("cpu", hbm=hbm, dram=1 << 20)
    tier.wrap(net, blocks=[str(i) for i in range(layers)])
    return tier, net


def test_weights_of_a_block_that_stays_are_pointed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tier, net = wrapped(3, 1 << 20)
    x = torch.rand(2, 8)
    with tier, torch.no_grad():
        expected = net(x)
        pointed = counted(monkeypatch, Pointing, "point")
        assert torch.equal(net(x), expected)
        assert not pointed


def test_weights_of_a_block_that_left_are_not_looked_at_where_they_were() -> None:
    tier, net = wrapped(4, 2 * PAGE)
    torch.manual_seed(0)
    plain = nn.Sequential(*(Inner() for _ in range(4)))
    x = torch.rand(2, 8)
    with tier, torch.no_grad():
        for _ in range(3):
            net(x)
        for weight, kept in zip(net.parameters(), plain.parameters(), strict=True):
            assert torch.equal(weight * 1, kept)
        assert torch.equal(net(x), plain(x))


def test_names_are_plain_only_while_their_block_is_held() -> None:
    tier, net = wrapped(2, 1 << 20)
    seen: list[type] = []
    names = net[0].second._parameters
    net[0].between = lambda: seen.append(type(names))
    with tier, torch.no_grad():
        assert type(names) is TieredDict
        net(torch.rand(2, 8))
        assert seen == [HeldDict] and type(names) is TieredDict


def test_another_thread_inside_a_held_block_holds_it_itself() -> None:
    tier, net = wrapped(2, 1 << 20)
    block = net[0]
    (group,) = block.second.__dict__["_call_impl"].scope.groups
    holds: list[int] = []
    inside, done = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert done.wait(SECONDS)

    def call_inner() -> None:
        assert inside.wait(SECONDS)
        with torch.no_grad():
            block.second.register_forward_pre_hook(lambda *_: holds.append(group.holds))
            block.second(torch.rand(2, 8))
        done.set()

    block.between = wait
    with tier, torch.no_grad():
        other = threading.Thread(target=call_inner)
        other.start()
        net(torch.rand(2, 8))
        other.join()
        assert holds[0] == 2 and group.holds == 0


@settings(max_examples=examples(60))
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 4), st.booleans()), min_size=1, max_size=30
    ),
    st.integers(0, 6),
    st.integers(1, 2),
)
@example(copies=[(0, 4, False), (0, 1, False)], begin=2, pages=1)
def test_fences_cover_every_copy_that_is_not_over(
    copies: list[tuple[int, int, bool]], begin: int, pages: int
) -> None:
    """Copies of a stream end in order: whatever still touches the bytes ends with the fence."""

    class Fence:
        waiter = -1

        def __init__(self, number: int) -> None:
            self.number = number

        def done(self) -> bool:
            return self.number <= ended

        def synchronize(self) -> None:
            raise NotImplementedError

    ended = -1
    fences = Fences()
    submitted: list[range] = []
    for number, (start, length, ends) in enumerate(copies):
        fences.add(Extent(start * PAGE, length * PAGE), Fence(number))
        submitted.append(range(start, start + length))
        if ends:
            ended = number
    wanted = range(begin, begin + pages)
    touching = [n for n, pages_of in enumerate(submitted) if set(pages_of) & set(wanted)]
    fence = fences.last(Extent(begin * PAGE, pages * PAGE))
    if touching and touching[-1] > ended:
        assert isinstance(fence, Fence) and fence.number >= touching[-1]


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_weights_that_are_only_read_are_clean_from_the_first_use(share: float) -> None:
    """One that counts as written lies where it is for good, and is written when it leaves."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).requires_grad_(False)
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    with tiermem.TierManager("cpu", hbm=int(nbytes * share) + 4096, dram=2 * nbytes) as tier:
        tier.wrap(model)
        for _ in range(3):
            model(torch.rand(64))
            assert not [row for row in tier.residency() if "dirty" in row.tiers.values()]
        assert tier.stats().write_backs == 0


@pytest.mark.parametrize("hbm", [3, 4, 5])
def test_bytes_are_right_in_a_loop_of_modules_that_repeats(hbm: int) -> None:
    """Nothing counts as written, who looks at bytes keeps them, and what left is not looked at."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(30, 30) for _ in range(8))).requires_grad_(False)
    plain, x = copy.deepcopy(model), torch.rand(2, 30)
    expected = plain(x)
    with tiermem.TierManager("cpu", hbm=hbm * PAGE, dram=16 * PAGE) as tier, torch.no_grad():
        manager = tier._manager
        manager.prefetcher.fetcher.beside = True
        manager.parts.pass_timer._clock = EvenClock()
        tier.wrap(model, blocks=[str(i) for i in range(8)])
        for _ in range(12):
            assert torch.equal(model(x), expected)
        manager.parts.pass_timer.estimates.wants = lambda _: False  # type: ignore[method-assign]
        for _ in range(4):
            assert torch.equal(model(x), expected)
        assert manager.replay.repeating
        with torch._C.DisableTorchFunctionSubclass():  # a use that is not intercepted
            seen = [_cannot_be_read(weight) for weight in model.parameters()]
        gone = [r.in_hbm is State.ABSENT for r in manager.parts.table for _ in ("weight", "bias")]
        assert any(gone) and all(nan for nan, left in zip(seen, gone, strict=True) if left)
        assert tier.stats().write_backs == 0
        assert not [row for row in tier.residency() if "dirty" in row.tiers.values()]
        kept = [model[i].weight.detach() for i in (2, 6)]  # aliases of these bytes
        for _ in range(4):
            assert torch.equal(model(x), expected)
            assert torch.equal(kept[0], plain[2].weight) and torch.equal(kept[1], plain[6].weight)
        del kept
        model[3].weight.mul_(2)
        plain[3].weight.mul_(2)
        for _ in range(4):
            assert torch.equal(model(x), plain(x))
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        manager.parts.table.check()
    tier.close()


def _cannot_be_read(weight: torch.Tensor) -> bool:
    """Whether its bytes are refused; a torch that cannot refuse them shows NaN."""
    try:
        return bool(weight.isnan().all())
    except RuntimeError:
        return True


class Watched(nn.Parameter):
    """A user's kind of parameter, which sees what is done to it."""

    seen: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_users_kind_of_parameter_does_not_see_what_it_is_pointed_at() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(30, 30, bias=False) for _ in range(4)))
    plain, x = copy.deepcopy(model), torch.rand(2, 30)
    for layer in model:
        layer.weight = Watched(layer.weight.detach(), requires_grad=False)
    with tiermem.TierManager("cpu", hbm=2 * PAGE, dram=16 * PAGE) as tier, torch.no_grad():
        tier.wrap(model, blocks=[str(i) for i in range(4)])
        Watched.seen.clear()
        for _ in range(3):
            assert torch.equal(model(x), plain(x))
        assert tier.stats().evictions
        pointed = torch.Tensor.data.__set__  # type: ignore[attr-defined]
        assert nn.functional.linear in Watched.seen and pointed not in Watched.seen
