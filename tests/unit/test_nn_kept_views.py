"""Views of frozen weights that a function of autograd keeps on its ``ctx``."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support_nn import same_bits, seed
from torch import nn
from torch.autograd.graph import Node
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem.nn.groups.keptviews import KeptView

WIDTH, LAYERS = 64, 6
BYTES = WIDTH * WIDTH * 4

Keep = Callable[[Any, torch.Tensor], None]
Back = Callable[[Any], torch.Tensor]


def _as_list(ctx: Any, w: torch.Tensor) -> None:
    ctx.kept = [None, {"w": (w.t(),)}]


def _as_bytes(ctx: Any, w: torch.Tensor) -> None:
    ctx.kept = w.view(torch.uint8).view(-1)


def _in_parts(ctx: Any, w: torch.Tensor) -> None:
    ctx.upper, ctx.lower = w[: WIDTH // 2].view(-1), w[WIDTH // 2 :].t()


def _of_detached(ctx: Any, w: torch.Tensor) -> None:
    ctx.kept = w.detach().view(-1).view(WIDTH, WIDTH)


def _twice(ctx: Any, w: torch.Tensor) -> None:
    ctx.kept = w.view(-1)
    ctx.other = ctx.same = ctx.kept.view(WIDTH, WIDTH)


def _address(ctx: Any) -> torch.Tensor:
    assert ctx.kept.data_ptr()
    return ctx.kept.view(torch.float32).view(WIDTH, WIDTH)


WAYS: dict[str, tuple[Keep, Back]] = {
    "nested": (_as_list, lambda ctx: ctx.kept[1]["w"][0].t()),
    "bytes": (_as_bytes, _address),
    "parts": (
        _in_parts,
        lambda ctx: torch.cat([ctx.upper.view(-1, WIDTH), ctx.lower.t()]),
    ),
    "detached": (_of_detached, lambda ctx: ctx.kept),
    "twice": (_twice, lambda ctx: ctx.other * 0.5 + ctx.same * 0.5),
}


class Times(torch.autograd.Function):
    """A product that keeps its weight in a way of the test's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, way: tuple[Keep, Back]) -> torch.Tensor:
        way[0](ctx, w)
        ctx.back = way[1]
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient @ ctx.back(ctx).t(), None, None


class Layer(nn.Module):
    """A frozen weight, with a trained factor beside it where a test says so."""

    def __init__(self, way: str, trained: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8, requires_grad=False)
        self.factor = nn.Parameter(torch.ones(WIDTH)) if trained else None
        self.way = WAYS[way]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = Times.apply(x, self.weight, self.way)  # type: ignore[no-untyped-call]
        return torch.tanh(y if self.factor is None else y * self.factor)


def stack(way: str = "nested", *, trained: bool = False) -> nn.Sequential:
    """Returns a model with the same bits each time."""
    seed(0)
    return nn.Sequential(*[Layer(way, trained) for _ in range(LAYERS)])


def manager(hbm: int = 2 * BYTES + 4096) -> tiermem.TierManager:
    """Returns one in which HBM has room for two layers."""
    return tiermem.TierManager("cpu", hbm=hbm, dram="1MiB")


def start() -> torch.Tensor:
    """Returns an input that takes a gradient, the same each time."""
    seed(1)
    return torch.randn(3, WIDTH, requires_grad=True)


def gradient(
    model: nn.Sequential, again: bool | None = None, given: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the input's gradient.

    Args:
        model: Plain or wrapped.
        again: Whether layers are computed again reentrantly; None where they are not.
        given: The input; None for the one of :func:`start`.
    """
    x = y = start() if given is None else given.detach().requires_grad_()
    for layer in model:
        y = layer(y) if again is None else checkpoint(layer, y, use_reentrant=again)
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return x.grad


def down(tier: tiermem.TierManager) -> int:
    """Returns the bytes that went home so far."""
    link = tier.stats().links.get("hbm->dram")
    return 0 if link is None else link.nbytes


def nodes(output: torch.Tensor) -> list[Any]:
    """Returns the nodes of ``Times``, the last first."""
    found, ahead = [], [output.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None:
            found += [node] if isinstance(node, torch.autograd.function.BackwardCFunction) else []
            ahead += [before for before, _ in node.next_functions]
    return found


@pytest.mark.parametrize("again", [None, False, True], ids=["kept", "again", "reentrant"])
@pytest.mark.parametrize("way", list(WAYS))
def test_they_hold_no_block(way: str, again: bool | None) -> None:
    """They would hold all of the weights in HBM, and have each go home for nothing."""
    expected = gradient(stack(way), again)
    with manager() as tier:
        model = tier.wrap(stack(way))
        for _ in range(2):
            assert same_bits(gradient(model, again), expected)
        assert not down(tier)


def test_they_are_shown_once_more() -> None:
    plain, x = stack(), start()
    y = plain(x).sum()
    y.backward(retain_graph=True)
    y.backward()
    with manager() as tier:
        model, z = tier.wrap(stack()), start()
        y = model(z).sum()
        y.backward(retain_graph=True)
        y.backward()
    assert same_bits(z.grad, x.grad)


def test_backward_may_read_their_bytes_by_any_way() -> None:
    """Code in C++ that takes tensors by itself sees ordinary ones."""
    seen = []

    def back(ctx: Any) -> torch.Tensor:
        assert type(ctx.kept) is torch.Tensor
        with torch._C.DisableTorchFunctionSubclass():
            seen.append(ctx.kept.data_ptr())
        return ctx.kept.view(torch.float32).view(WIDTH, WIDTH)

    plain, model = stack("bytes"), stack("bytes")
    for layer in (*plain, *model):
        layer.way = _as_bytes, back
    with manager() as tier:
        assert same_bits(gradient(tier.wrap(model)), gradient(plain))
    assert len(seen) == 2 * LAYERS
    assert all(seen)


def test_weights_that_are_trained_beside_them_move_on() -> None:
    def train(model: Any, optimizer: Any) -> list[torch.Tensor]:
        found = []
        for _ in range(3):
            found.append(gradient(model))
            optimizer.step()
            optimizer.zero_grad()
        return found

    plain, model = stack(trained=True), stack(trained=True)
    expected = train(plain, torch.optim.Adam([p for p in plain.parameters() if p.requires_grad]))
    with manager(3 * BYTES) as tier:
        model = tier.wrap(model)
        found = train(model, tier.optimizer(model, torch.optim.Adam))
        values = [p.detach().clone() for p in model.parameters()]
    assert all(map(same_bits, found, expected))
    assert all(map(same_bits, values, plain.parameters()))


@pytest.mark.parametrize("how", ["unwrap", "close"])
def test_a_model_may_leave_before_backward(how: str) -> None:
    expected, x = gradient(stack("parts")), start()
    tier = manager()
    model = tier.wrap(stack("parts"))
    y = model(x).sum()
    if how == "unwrap":
        tier.unwrap(model)
    else:
        tier.close()
    y.backward()
    assert same_bits(x.grad, expected)
    tier.close()


def test_tiers_that_are_gone_are_named() -> None:
    tier = manager()
    y = tier.wrap(stack())(start()).sum()
    tier.close(discard=True)
    with pytest.raises(tiermem.ClosedError):
        y.backward()


def test_what_is_written_in_between_shows() -> None:
    def run(model: Any) -> torch.Tensor:
        x = start()
        y = model(x).sum()
        with torch.no_grad():
            model[2].weight.mul_(2)
        y.backward()
        assert x.grad is not None
        return x.grad

    with manager() as tier:
        assert same_bits(run(tier.wrap(stack())), run(stack()))


def test_other_data_in_between_is_an_error() -> None:
    """The tiers keep one value of a weight, and torch would show the one of before."""
    with manager() as tier:
        model = tier.wrap(stack())
        y = model(start()).sum()
        model[2].weight.data = torch.zeros(WIDTH, WIDTH)
        with pytest.raises(RuntimeError, match="given other data"):
            y.backward()


def test_what_backward_writes_through_them_stays() -> None:
    def back(ctx: Any) -> torch.Tensor:
        ctx.kept.mul_(2)
        return ctx.kept.view(WIDTH, WIDTH)

    def keep(ctx: Any, w: torch.Tensor) -> None:
        ctx.kept = w.view(-1)

    plain, model = stack(), stack()
    for layer in (*plain, *model):
        layer.way = keep, back
    with manager() as tier:
        model = tier.wrap(model)
        for _ in range(2):
            assert same_bits(gradient(model), gradient(plain))
        tier.unwrap(model)
    assert all(map(same_bits, model.parameters(), plain.parameters()))


def test_backward_may_change_what_they_are() -> None:
    def keep(ctx: Any, w: torch.Tensor) -> None:
        ctx.kept, ctx.other = w.view(WIDTH, WIDTH), w.view(-1)

    def back(ctx: Any) -> torch.Tensor:
        ctx.kept.t_()
        ctx.other.data = ctx.other.data * 2
        return ctx.kept * ctx.other.view(WIDTH, WIDTH)

    def run(model: Any) -> torch.Tensor:
        for layer in model:
            layer.way = keep, back
        x = start()
        y = model(x).sum()
        for _ in range(3):
            y.backward(retain_graph=True)
        assert x.grad is not None
        return x.grad

    with manager() as tier:
        assert same_bits(run(tier.wrap(stack())), run(stack()))


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda view: view.sum(),
    "view": lambda view: view.view(WIDTH, WIDTH)[3],
    "copy": copy.deepcopy,
    "address": lambda view: torch.tensor([view.data_ptr() > 0]),
    "numpy": lambda view: torch.from_numpy(view.numpy()),
    "write": lambda view: view.add_(1),
    "set": lambda view: view.set_(torch.zeros(3)),
    "data": lambda view: view.data,
    "text": lambda view: torch.tensor(list(repr(view).encode())),
    "operator": lambda view: torch.ops.aten.sum.default(view),
}


@pytest.mark.parametrize("use", list(USES))
def test_others_may_use_them(use: str) -> None:
    def keep(ctx: Any, w: torch.Tensor) -> None:
        ctx.kept = w.view(-1)

    def run(model: Any) -> list[torch.Tensor]:
        for layer in model:
            layer.way = keep, lambda ctx: ctx.kept.view(-1)[:3].sum() * torch.eye(WIDTH)
        x = start()
        y = model(x)
        view = nodes(y)[-1].kept
        found = [USES[use](view).detach().clone()]
        y.sum().backward()
        assert x.grad is not None
        return [*found, x.grad, view.clone(), model[0].weight.detach().clone(), model(x)]

    with manager(3 * BYTES) as tier:
        model = tier.wrap(stack())
        model(start())
        found = run(model)
        assert all(map(same_bits, found, run(stack())))


def test_a_view_that_the_program_has_as_well_stays_one() -> None:
    """It is put away with each call, and brings the block with the next."""

    class Holds(Layer):
        view: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.view is None:
                self.view = self.weight.view(-1)
            view = self.view

            def keep(ctx: Any, _: torch.Tensor) -> None:
                ctx.kept = view

            way = keep, lambda ctx: ctx.kept.view(WIDTH, WIDTH)
            y = Times.apply(x, self.view.view(WIDTH, WIDTH), way)  # type: ignore[no-untyped-call]
            assert isinstance(y, torch.Tensor)
            return y

    def build() -> nn.Sequential:
        seed(0)
        return nn.Sequential(*[Holds("nested") for _ in range(LAYERS)])

    plain = build()
    with manager() as tier:
        model = tier.wrap(build())
        for _ in range(3):
            assert same_bits(gradient(model), gradient(plain))


def test_an_alias_that_is_not_found_holds_its_block() -> None:
    kept: list[torch.Tensor] = []

    def keep(ctx: Any, w: torch.Tensor) -> None:
        ctx.kept = w.view(-1)
        kept.append(w.view(-1))

    plain, model = stack(), stack()
    for layer in (*plain, *model):
        layer.way = keep, lambda ctx: ctx.kept.view(WIDTH, WIDTH)
    with manager(2 * LAYERS * BYTES) as tier:
        model = tier.wrap(model)
        model(start()), plain(start())
        for view in kept:
            view.mul_(2)
        kept.clear()
        assert same_bits(model(start()), plain(start()))
        tier.unwrap(model)
    assert all(map(same_bits, model.parameters(), plain.parameters()))


class Turned(Times):
    """A product whose backward hands what was kept to an operation as it is."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient @ ctx.kept, None, None


def test_a_second_graph_of_backward_may_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(ctx: Any, w: torch.Tensor) -> None:
        ctx.kept = w.t()

    def run(model: Any) -> torch.Tensor:
        for layer in model:
            layer.way = keep, None
        x = start()
        (first,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        first.pow(2).sum().backward()
        assert x.grad is not None
        return x.grad

    monkeypatch.setitem(globals(), "Times", Turned)
    with manager(2 * LAYERS * BYTES) as tier:
        assert same_bits(run(tier.wrap(stack())), run(stack()))
    with manager(LAYERS * BYTES - BYTES // 2) as tier:
        model = tier.wrap(stack()[:4])
        assert same_bits(run(model), run(stack()[:4]))


def test_a_backward_that_fails_can_be_made_again() -> None:
    calls = []

    def back(ctx: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("once")
        return ctx.kept[1]["w"][0].t()

    expected, x = gradient(stack()), start()
    with manager(3 * BYTES) as tier:
        model = tier.wrap(stack())
        for layer in model:
            layer.way = _as_list, back
        y = model(x).sum()
        with pytest.raises(ValueError, match="once"):
            y.backward(retain_graph=True)
        y.backward()
        assert same_bits(x.grad, expected)
        assert same_bits(gradient(model), expected)


def test_threads_compute_at_one_time() -> None:
    expected, found, x = gradient(stack()), dict[int, torch.Tensor](), start()
    with manager(4 * BYTES) as tier:
        model = tier.wrap(stack())

        def run(number: int) -> None:
            for _ in range(5):
                found[number] = gradient(model, given=x)
                if not same_bits(found[number], expected):
                    return

        threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 3
    assert all(same_bits(each, expected) for each in found.values())


def test_they_keep_nothing_alive() -> None:
    tier = manager()
    model = tier.wrap(stack())
    y = model(start())
    views = [weakref.ref(node.kept[1]["w"][0]) for node in nodes(y)]
    assert all(type(view()) is KeptView for view in views)
    del y
    gc.collect()
    assert not any(view() is not None for view in views)
    y = model(start())
    tier.unwrap(model)
    gone = weakref.ref(model)
    y.sum().backward()
    del y, model
    tier.close()
    gc.collect()
    assert gone() is None


def test_nothing_is_looked_for_where_no_alias_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from tiermem.nn.groups import keptviews

    monkeypatch.setattr(keptviews, "_nodes", lambda *_: pytest.fail("looked for"))
    seed(0)
    with manager() as tier:
        model = tier.wrap(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]))
        gradient(model.requires_grad_(False))


def test_only_nodes_of_the_call_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    from tiermem.nn.groups import keptviews

    looked: list[Node] = []
    whole = keptviews._nodes
    monkeypatch.setattr(
        keptviews, "_nodes", lambda *args: (looked.append(n) or n for n in whole(*args))
    )
    model, kept = stack(), list[torch.Tensor]()

    def keep(_: Any, w: torch.Tensor) -> None:
        kept.append(w.view(-1))  # which is never found

    for layer in model:
        layer.way = keep, lambda _: torch.ones(WIDTH, WIDTH)
    with manager(LAYERS * BYTES - 4096) as tier:
        gradient(tier.wrap(model[:4]))
        kept.clear()
    assert len(looked) == 4
