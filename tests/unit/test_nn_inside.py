"""Calls of modules below the one where a block begins: in its call, beside it, by themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_nn import check_table, same_bits
from support_threads import in_the_middle, lets_go_first
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem.nn.wrap.scope import CallInterceptor
from tiermem.runtime.base import threads as threads_module
from tiermem.runtime.base.threads import UserThreads

CALL = CallInterceptor.method


class Layer(nn.Module):
    """Two inner modules with weights, and a hook for the test in the middle of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.meanwhile: Callable[[Layer], Any] = lambda layer: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.meanwhile(self)
        return self.last(x).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@contextmanager
def wrapped() -> Iterator[tuple[Any, Any]]:
    """Yields a model in the tiers, one block a layer, and the manager's front."""
    model = Model()
    with tiermem.TierManager("cpu", hbm=4 * 4096, dram=1 << 20) as tier:
        yield tier.wrap(model, blocks=[f"layers.{i}" for i in range(4)]), tier


@pytest.mark.parametrize("hbm", [2 * 4096, 6 * 4096], ids=["streamed", "resident"])
@pytest.mark.parametrize(
    "use",
    [
        lambda layer, x: layer.last(layer.first(x)),
        lambda layer, x: nn.functional.linear(x, layer.first.weight) * layer.last.weight.sum(),
        lambda layer, x: next(layer.parameters()) * 2,
    ],
    ids=["modules", "weights", "a weight kept"],
)
def test_modules_called_by_themselves_are_right(
    hbm: int, use: Callable[[Layer, torch.Tensor], torch.Tensor]
) -> None:
    x = torch.randn(3, 8)
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    with tiermem.TierManager("cpu", hbm=hbm, dram=1 << 20) as tier, torch.no_grad():
        tier.wrap(model, blocks=[f"layers.{i}" for i in range(4)])
        for _ in range(3):
            assert torch.equal(model(x), plain(x))
            for mine, theirs in zip(model.layers, plain.layers, strict=True):
                assert torch.equal(use(mine, x), use(theirs, x))


def test_a_copy_made_in_the_middle_of_forward_is_a_plain_module() -> None:
    x = torch.randn(3, 8)
    with wrapped() as (model, _), torch.no_grad():
        layer = model.layers[0]
        copies: list[Layer] = []

        def copy(layer: Layer) -> None:
            layer.meanwhile = lambda layer: None
            copies.append(deepcopy(layer))

        layer.meanwhile = copy
        found = layer(x)
        assert not any(
            isinstance(m.__dict__.get(CALL), CallInterceptor) for m in copies[0].modules()
        )
        assert torch.equal(copies[0](x), found)
        nn.init.zeros_(copies[0].last.weight)
        assert torch.equal(layer(x), found)


def test_a_module_compiled_in_the_middle_of_forward_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(3, 8)
    monkeypatch.setattr(torch, "compile", lambda plain, **_: plain)  # what counts is who is called
    with wrapped() as (model, _), torch.no_grad():
        layer = model.layers[0]
        before = layer(x)

        def compile_first(layer: Layer) -> None:
            layer.meanwhile = lambda layer: None
            layer.first.compile()

        layer.meanwhile = compile_first
        assert torch.equal(layer(x), before)
        call = layer.first.__dict__[CALL]
        assert isinstance(call, CallInterceptor) and call.compiled is not None
        assert torch.equal(layer(x), before) and layer.first.__dict__[CALL] is call


def test_a_call_below_passes_only_where_its_thread_alone_is_inside() -> None:
    x, me = torch.randn(3, 8), threading.get_ident()
    with wrapped() as (model, _), torch.no_grad():
        layer = model.layers[0]
        inside = layer.__dict__[CALL].scope.inside
        seen: list[int] = []

        def look(layer: Layer) -> None:
            seen.append(inside.thread)

        def beside(layer: Layer) -> None:
            layer.meanwhile = look
            look(layer)
            other = threading.Thread(target=layer, args=(x,))
            other.start()
            other.join()
            look(layer)

        layer.meanwhile = beside
        layer(x)
        assert seen == [me, 0, 0], "one of two was in still, and nobody knew which"
        assert inside.thread == 0
        layer(x)
        assert seen[3:] == [me]


def test_two_threads_in_one_block_are_both_right() -> None:
    x = torch.randn(3, 8)
    with wrapped() as (model, _), torch.no_grad():
        layer = model.layers[0]
        alone = layer(x)
        found: list[torch.Tensor] = []

        def beside(layer: Layer) -> None:
            layer.meanwhile = lambda layer: None

            def run() -> None:
                with torch.no_grad():
                    found.append(layer(x))

            thread = threading.Thread(target=run)
            thread.start()
            thread.join()

        layer.meanwhile = beside
        assert torch.equal(layer(x), alone) and torch.equal(found[0], alone)


class Causal(nn.Module):
    """A decoder with layers in it, and a head, as transformers' causal models."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Model()
        self.head = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.decoder(x))


def test_a_module_without_tensors_called_by_itself_is_one_pass() -> None:
    """The decoder alone, with the head's weight used beside it: the loss in chunks."""
    torch.manual_seed(0)
    plain = Causal()
    model = deepcopy(plain)
    x = torch.randn(3, 8)
    with tiermem.TierManager("cpu", hbm=4 * 4096, dram=1 << 20) as tier:
        tier.wrap(model, blocks=[*(f"decoder.layers.{i}" for i in range(4)), "head"])
        timer, keys = tier._manager.parts.pass_timer, list[Any]()
        begin = timer.begin
        timer.begin = lambda key: (keys.append(key), begin(key))  # type: ignore[method-assign]
        for recompute in (False, True, True):
            keys.clear()
            for each in (plain, model):
                each.zero_grad()
                call = each.decoder
                hidden = checkpoint(call, x, use_reentrant=False) if recompute else call(x)
                nn.functional.linear(hidden, each.head.weight).square().sum().backward()
            assert len(keys) == 2, "one forward, one backward"
            for a, b in zip(plain.parameters(), model.parameters(), strict=True):
                assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad.to("cpu"))
        assert torch.equal(plain(x), model(x))
        plain_again = tier.unwrap(model)
        assert CALL not in vars(plain_again.decoder) and "compile" not in vars(plain_again.decoder)


class Normed(nn.Module):
    """A layer that has no tensors itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.one = nn.Linear(64, 1024)
        self.two = nn.Linear(1024, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.two(self.one(self.norm(x)).relu())


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Normed() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_a_checkpoint_sees_the_same_tensors_when_it_runs_a_layer_again_by_itself() -> None:
    torch.manual_seed(0)
    plain = Recomputed()
    model = deepcopy(plain)
    x = torch.randn(3, 64, requires_grad=True)
    blocks = [f"layers.{i}.{name}" for i in range(3) for name in ("one", "two")]
    with tiermem.TierManager("cpu", hbm=3 << 20, dram=1 << 24) as tier:
        tier.wrap(model, blocks=blocks, resident=lambda name, _: "norm" in name)
        assert CALL in vars(model.layers[0]) and CALL not in vars(model.layers[0].norm)
        for _ in range(2):
            for each in (plain, model):
                each.zero_grad()
                each(x).square().sum().backward()
            for a, b in zip(plain.parameters(), model.parameters(), strict=True):
                assert torch.equal(a.grad, b.grad.to("cpu"))


@pytest.mark.filterwarnings("ignore::UserWarning")  # dynamo looks at .grad of what is no leaf
def test_a_module_without_tensors_is_compiled_around_its_blocks() -> None:
    plain = Causal()
    model = deepcopy(plain)
    x = torch.randn(3, 8)
    with tiermem.TierManager("cpu", hbm=4 * 4096, dram=1 << 20) as tier:
        tier.wrap(model, blocks=[*(f"decoder.layers.{i}" for i in range(4)), "head"])
        with pytest.raises(tiermem.WrapError, match="fullgraph=True works for one block only"):
            model.decoder.compile(fullgraph=True, backend="eager")
        model.decoder.compile(backend="eager")
        assert vars(model.decoder)[CALL].compiled is not None
        for _ in range(2):
            assert torch.equal(plain.decoder(x), model.decoder(x))
            assert torch.equal(plain(x), model(x))


class Both(nn.Module):
    """Uses the matrices of two other modules, which are blocks of their own."""

    def __init__(self, first: nn.Linear, second: nn.Linear) -> None:
        super().__init__()
        self.first, self.second = first.weight, second.weight
        self.spoilt = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.first @ self.second
        if self.spoilt:
            getattr(self, self.spoilt).data = torch.ones(3)
        return x


class Pair(nn.Module):
    """Layers, the first two of which are used together at the end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
        self.both = Both(self.layers[0], self.layers[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.both(x)


@pytest.mark.parametrize("spoilt", ["first", "second"])
def test_a_call_refused_at_its_end_lets_all_of_its_blocks_go(spoilt: str) -> None:
    model, plain, x = Pair(), Pair(), torch.ones(2, 64)
    with tiermem.TierManager("cpu", hbm="1MiB", dram="8MiB") as tier, torch.no_grad():
        tier.wrap(model, blocks=[f"layers.{n}" for n in range(4)])
        model.both.spoilt = spoilt
        with pytest.raises(tiermem.ParameterError, match="cannot become"):
            model(x)
        check_table(tier)
        model.both.spoilt = ""
        assert same_bits(model(x), plain(x))


def test_a_call_that_gets_one_of_its_blocks_holds_none() -> None:
    model, plain, x = Pair(), Pair(), torch.ones(2, 64)
    with tiermem.TierManager("cpu", hbm="48KiB", dram="8MiB") as tier, torch.no_grad():
        tier.wrap(model, blocks=[f"layers.{n}" for n in range(4)])
        kept = [layer.weight.detach() for layer in model.layers[2:]]
        with pytest.raises(
            tiermem.CapacityError, match=r"layers\.1.*layers\.0' \(16.00 KiB, leased"
        ):
            model(x)
        check_table(tier)
        kept.clear()
        assert same_bits(model(x), plain(x))


@pytest.mark.parametrize("elsewhere", [True, False], ids=["another thread", "the same thread"])
def test_a_block_is_moved_for_another_unless_another_thread_may_be_reading_it(
    elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then that one is waited for."""
    x = torch.randn(3, 8)
    model = nn.ModuleDict({"layers": Model().layers, "wide": nn.Linear(8, 200)})  # 4,096 and 8,192
    weights = [param.detach().clone() for param in model["wide"].parameters()]
    blocks = ["wide", *(f"layers.{i}" for i in range(4))]
    results: list[torch.Tensor] = []
    with (
        tiermem.TierManager("cpu", hbm=3 * 4096, dram=1 << 20) as tier,
        torch.no_grad(),
        ExitStack() as beside,
    ):
        tier.wrap(model, blocks=blocks)
        wanted = [layer(x) for layer in model["layers"]]
        manager = tier._manager
        for row in list(manager.parts.table)[:3]:
            manager.acquire(row.block)
            beside.callback(manager.release, row.block)
        record = manager.parts.table.at(4096)
        assert record is not None
        number = int(record.block.name.rpartition(".")[2])
        layer = model["layers"][number]
        if not elsewhere:

            def call_the_wide_one(layer: Layer) -> None:
                beside.close()
                results.append(model["wide"](x))

            layer.meanwhile = call_the_wide_one
            assert same_bits(layer(x), wanted[number]) and len(results) == 1
            assert tier.stats().relocations == 1
            return
        monkeypatch.setattr(threads_module, "_TURN", 0.001)  # it does not wait for its turn
        with in_the_middle(layer.last, lambda: results.append(layer(x))) as go_on:
            beside.close()
            assert record.leases and record.extent is not None and record.extent.offset == 4096
            monkeypatch.setattr(UserThreads, "wait", lets_go_first(UserThreads.wait, go_on))
            wide = model["wide"](x)
            assert go_on.is_set()
        assert same_bits(results[0], wanted[number])
        assert same_bits(wide, nn.functional.linear(x, *weights))
        assert tier.stats().relocations == 0


@pytest.mark.parametrize("again", [False, True])
def test_a_stream_of_its_own_inside_a_block_waits_and_is_waited_for(again: bool) -> None:
    """The block's copy up may be under way still; and what leaves waits for streams that are known.

    Args:
        again: Whether the block is held once more there, else a module inside is called.
    """
    model = Model()
    current, used = [0], list[tuple[int, Any]]()
    with tiermem.TierManager("cpu", hbm=4 * 4096, dram=1 << 20) as tier, torch.no_grad():
        parts = tier._manager.parts
        copy: Any = parts.copy
        copy.stream = lambda: current[0]
        tier.wrap(model, blocks=[f"layers.{i}" for i in range(4)])
        copy.use = lambda event: used.append((current[0], event))
        layer, x = model.layers[2], torch.randn(3, 8)
        group = tier._runtime.groups[2]
        model(x)
        assert {stream for stream, _ in used} <= {0}
        arrival: Any = SimpleNamespace(waiter=0)

        def other_stream(_: Layer) -> None:
            parts.transfers.ready[group.block.id] = arrival
            current[0] = 7
            used.clear()
            if again:
                group.hold()
                group.let_go()
                first_stream()

        def first_stream(*_: Any) -> None:
            parts.transfers.ready.pop(group.block.id, None)
            current[0] = 0

        layer.meanwhile = other_stream
        layer.last.register_forward_hook(first_stream)
        model(x)
    assert (7, arrival) in used


def test_calls_inside_a_block_on_its_stream_wait_for_nothing_more() -> None:
    with wrapped() as (model, tier), torch.no_grad():
        x, used = torch.randn(3, 8), list[Any]()
        model(x)
        layer = model.layers[2]
        layer.meanwhile = lambda _: setattr(tier._manager.parts.copy, "use", used.append)

        def leave(*_: Any) -> None:
            tier._manager.parts.copy.__dict__.pop("use", None)

        layer.last.register_forward_hook(leave)
        model(x)
        assert not used
