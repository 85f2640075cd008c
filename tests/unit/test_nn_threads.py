"""Weights that one thread uses by themselves, while another one is in the call that holds them."""

from __future__ import annotations

import copy
import ctypes
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from support_nn import check_table, same_bits
from support_threads import in_the_middle, lets_go_first
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tiermem
from tiermem.core.schedule import SOFT
from tiermem.runtime.base import threads as module
from tiermem.runtime.base.threads import UserThreads

FEATURES = 32
_SHAPE = (FEATURES, FEATURES)
BLOCK = 2 * 4096
"""Bytes of a block: of a layer's weight and bias."""


class Tied(nn.Module):
    """Uses the first layer's weight outside that layer's call, and then its other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(6))
        self.kept = [self.first.weight]

    def forward(
        self,
        x: torch.Tensor,
        *,
        keeps: bool = False,
        calls: bool = True,
    ) -> torch.Tensor:
        if calls:
            x = self.first(x)
        weight = self.kept[0] if keeps else self.first.weight
        x = x @ weight
        for layer in self.layers:
            x = layer(x)
        return x


class Pause(TorchDispatchMode):
    """Stops in the first product, as a kernel does that has the addresses of its operands."""

    def __init__(self, pause: Callable[[], object]) -> None:
        super().__init__()
        self._pause: Callable[[], object] | None = pause

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default and self._pause is not None:
            pause, self._pause = self._pause, None
            with torch._C.DisableTorchFunctionSubclass():
                address, stride = args[1].data_ptr(), args[1].stride()
            pause()
            there = (ctypes.c_float * FEATURES**2).from_address(address)
            weight = torch.frombuffer(there, dtype=torch.float32).as_strided(_SHAPE, stride)
            return func(args[0], weight)
        return func(*args, **kwargs or {})


@contextmanager
def tied(blocks: int) -> Iterator[tuple[tiermem.TierManager, Tied, Tied]]:
    """Yields a wrapped model of seven blocks, of which HBM holds so many, and its original."""
    torch.manual_seed(0)
    model = Tied()
    plain = copy.deepcopy(model)
    names = ["first", *(f"layers.{number}" for number in range(6))]
    with tiermem.TierManager("cpu", hbm=blocks * BLOCK, dram=1 << 20) as tier, torch.no_grad():
        tier.wrap(model, blocks=names)
        yield tier, model, plain


@pytest.mark.parametrize(
    ("before", "seen", "keeps"),
    [
        (False, False, False),
        (False, True, False),
        (True, False, False),
        (True, True, False),
        (True, False, True),
        (True, True, True),
    ],
)
def test_a_weight_is_there_after_the_thread_that_held_it_let_it_go(
    before: bool, seen: bool, keeps: bool
) -> None:
    """The other one's layers come into its place in the middle of an operation.

    Args:
        before: Whether it was used outside its layer's call by one thread alone before.
        seen: Whether several threads are known to use blocks.
        keeps: Whether the model has a reference to it that is not looked up.
    """
    x = torch.randn(3, FEATURES)
    done = threading.Event()
    with tied(2) as (tier, model, plain):
        wanted = [plain(x), plain(x, calls=False)]
        found = list[torch.Tensor]()
        if before:
            model(x)
        if seen:
            model.layers[0](x)
            with in_the_middle(model.layers[5], partial(model.layers[5], x)):
                pass

        def in_a_thread() -> None:
            found.append(model(x))
            done.set()

        with in_the_middle(model.first, in_a_thread) as go_on:

            def pause() -> None:
                go_on.set()
                assert done.wait(60)

            with Pause(pause):
                y = model(x, keeps=keeps, calls=False)
        found.append(y)
        assert all(map(torch.equal, found, wanted))
        assert not any(record.leases for record in tier._manager.parts.table)


def test_threads_share_a_weight_that_they_use_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them has room as it would have alone: no more is held for the weight."""
    monkeypatch.setattr(module, "_TURN", 0.001)
    xs = [torch.randn(3 + number, FEATURES) for number in range(4)]
    failed = list[BaseException]()
    with tied(1) as (_, model, plain):
        wanted = [plain(x) for x in xs]

        def run(number: int) -> None:
            torch.set_num_threads(1)  # of this thread: with more, products round otherwise
            try:
                with torch.no_grad():
                    for _ in range(4):
                        assert torch.equal(model(xs[number]), wanted[number])
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed


def test_a_weight_that_is_looked_up_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the thread that holds another block in its place lets that go."""
    monkeypatch.setattr(module, "_TURN", 0.001)
    x = torch.randn(3, FEATURES)
    with tied(1) as (_, model, plain):
        wanted = plain(x, calls=False)
        with in_the_middle(model.layers[0], partial(model.layers[0], x)) as go_on:
            monkeypatch.setattr(UserThreads, "wait", lets_go_first(UserThreads.wait, go_on))
            assert torch.equal(model(x, calls=False), wanted)


def test_weights_are_ordinary_in_their_modules_call() -> None:
    """But for one that a thread uses by itself, in a model that another thread calls as well."""
    x = torch.randn(3, FEATURES)
    kinds = list[bool]()

    def look(module: nn.Module, *_: object) -> None:
        kinds.append(type(module.weight) is nn.Parameter)

    other = nn.Linear(FEATURES, FEATURES)
    with tied(4) as (tier, model, _):
        tier.wrap(other)
        for looked in (model.first, model.layers[0]):
            looked.register_forward_pre_hook(look)
        model(x)
        with in_the_middle(other, partial(other, x)):
            model(x)  # which no other thread does
        assert kinds == [True, True] * 2
        with in_the_middle(model.layers[1], partial(model, x)):
            model(x)
        assert kinds[4:] == [False, True] * 2


def test_a_backward_goes_on_where_another_threads_forward_has_ended_it() -> None:
    """That takes the lock just before the backward keeps one more block."""
    with tied(3) as (tier, _model, _):
        backward = tier._runtime.backward
        groups = list(tier._runtime.groups)
        lock = tier._manager.lock

        class Late:
            def __enter__(self) -> None:
                lock.acquire()
                backward._soft.clear()

            def __exit__(self, *_: object) -> None:
                lock.release()

        for group in groups[:SOFT]:
            backward.keep_soft(group)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backward, "manager", types.SimpleNamespace(lock=Late()))
            backward.keep_soft(groups[SOFT])
        assert list(backward._soft) == [groups[SOFT]]


class Attends(nn.Module):
    """Evaluates what torch computes with one kernel where no weight intercepts operations."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(FEATURES, 2, FEATURES, batch_first=True)
        self.attention = nn.MultiheadAttention(FEATURES, 2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.encoder(x, src_key_padding_mask=mask)


def _used_apart_by_threads(model: nn.Module, x: torch.Tensor) -> None:
    """Weights that a thread may use while another one holds them stay hidden from then on."""
    with torch.no_grad():
        thread = threading.Thread(target=partial(model, x, None))
        thread.start()
        thread.join()
        for weight in model.parameters():
            weight.sum()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_attention_takes_torchs_fast_path_after_threads_that_use_weights_apart(
    mode: Any, padded: bool, frozen: bool
) -> None:
    """Its weights stay hidden then, and torch asks for their class; what is padded is zero."""
    torch.manual_seed(0)
    model = Attends().eval().requires_grad_(not frozen)
    plain = copy.deepcopy(model)
    x, mask = torch.randn(3, 6, FEATURES), None
    if padded:
        mask = torch.zeros(3, 6, dtype=torch.bool)
        mask[1, 3:] = True
    with tiermem.TierManager("cpu", hbm="64KiB", dram="1MiB") as tier:
        tier.wrap(model)
        _used_apart_by_threads(model, x)
        with mode():
            for _ in range(2):
                assert same_bits(model(x, mask), plain(x, mask))
        check_table(tier)


def test_attention_under_autocast_has_the_casts_that_torch_keeps() -> None:
    """Of weights as they were first used within it, on the fast path as well."""
    torch.manual_seed(0)
    model = Attends().eval()
    plain = copy.deepcopy(model)
    x = torch.randn(3, 6, FEATURES)
    with tiermem.TierManager("cpu", hbm="64KiB", dram="1MiB") as tier:
        tier.wrap(model)
        _used_apart_by_threads(model, x)
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(2):
                assert same_bits(model(x, None), plain(x, None))
                with torch.no_grad():
                    for weight in (*model.parameters(), *plain.parameters()):
                        weight.mul_(0.9)
                    assert same_bits(model(x, None), plain(x, None))


def _padded(encoder: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = encoder(x, src_key_padding_mask=torch.arange(5).expand(2, 5) > 2)
    return found


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "use",
    [
        lambda encoder, x: encoder(x),
        _padded,
        lambda encoder, x: encoder.layers[0](x),
        lambda encoder, x: encoder.layers[0].self_attn(x, x, x, need_weights=False)[0],
    ],
    ids=["encoder", "padded", "layer", "attention"],
)
def test_torchs_fast_path_is_taken_after_a_weight_is_used_by_itself(
    use: Callable[[Any, torch.Tensor], torch.Tensor], frozen: bool
) -> None:
    """It rounds differently, and is for weights of a plain class only."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(FEATURES, 2, 2 * FEATURES, batch_first=True)
    plain = nn.TransformerEncoder(layer, 3).eval().requires_grad_(not frozen)
    model, x = copy.deepcopy(plain), torch.randn(2, 5, FEATURES)
    nbytes = sum(p.nbytes for p in layer.parameters())
    with (
        tiermem.TierManager("cpu", hbm=nbytes + BLOCK, dram=1 << 20) as tier,
        torch.set_grad_enabled(frozen),
    ):
        tier.wrap(model)
        with in_the_middle(model.layers[2], partial(model, x)):
            pass
        for number in (0, 1):
            model.layers[number].linear1.weight.sum()
            for _ in range(2):
                assert torch.equal(use(model, x), use(plain, x))


_WRAPS: dict[str, Callable[[tiermem.TierManager, Any], object]] = {
    "layers": lambda tier, encoder: tier.wrap(encoder.layers),
    "each": lambda tier, encoder: [tier.wrap(layer) for layer in encoder.layers],
    "attention": lambda tier, encoder: [tier.wrap(layer.self_attn) for layer in encoder.layers],
    "projection": lambda tier, encoder: [
        tier.wrap(layer.self_attn.out_proj) for layer in encoder.layers
    ],
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("parts", _WRAPS)
def test_torchs_fast_path_is_taken_where_parts_of_an_encoder_are_wrapped(parts: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(FEATURES, 2, 2 * FEATURES, batch_first=True)
    plain = nn.TransformerEncoder(layer, 3).eval()
    model, x = copy.deepcopy(plain), torch.randn(2, 5, FEATURES)
    nbytes = sum(p.nbytes for p in layer.parameters())
    with tiermem.TierManager("cpu", hbm=nbytes + BLOCK, dram=1 << 20) as tier, torch.no_grad():
        _WRAPS[parts](tier, model)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            model(x)
        kernels = {event.key: event.count for event in seen.key_averages()}
        assert kernels.get("aten::_transformer_encoder_layer_fwd") == len(plain.layers)
        for _ in range(3):
            assert torch.equal(model(x), plain(x))
            assert torch.equal(_padded(model, x), _padded(plain, x))
