"""Plain torch models of many kinds, trained in the tiers bit for bit."""

from __future__ import annotations

import _thread
import copy
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support_nn import Pair, Tiers, compare_training, same_bits
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm
from torch.utils.checkpoint import checkpoint

import tiermem

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
DRAM = Tiers("dram")


def vector(width: int = 16, rows: int = 3) -> Callable[[], Any]:
    return lambda: ((torch.randn(rows, width, requires_grad=True),), {})


def image(channels: int = 3, size: int = 8) -> Callable[[], Any]:
    return lambda: ((torch.randn(2, channels, size, size, requires_grad=True),), {})


def tokens(high: int = 40, length: int = 7) -> Callable[[], Any]:
    return lambda: ((torch.randint(0, high, (2, length)),), {})


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.second = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.short = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(y)) + self.short(x))


class Experts(nn.Module):
    """A mixture in which each token goes to one expert."""

    def __init__(self, width: int = 64, count: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: torch.Tensor, only: int | None = None) -> torch.Tensor:
        scores = self.router(x)
        chosen = scores.argmax(-1) if only is None else torch.full((len(x),), only)
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            rows = (chosen == index).nonzero()[:, 0]
            gate = scores.softmax(-1)[rows, index, None]
            out = out.index_add(0, rows, self.experts[index](x[rows]) * gate)
        return out


class TiedLanguageModel(nn.Module):
    def __init__(self, by_function: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1) for _ in range(2)
        )
        self.by_function = by_function
        if not by_function:
            self.head = nn.Linear(16, 40, bias=False)
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.embed.weight) if self.by_function else self.head(x)


class Repeated(nn.Module):
    """One layer called several times, and checkpointed or not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.other = nn.Linear(16, 16)
        self.how = how

    def _region(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(torch.tanh(self.layer(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            if self.how == "plain":
                x = self._region(x)
            else:
                x = checkpoint(self._region, x, use_reentrant=self.how == "reentrant")
        return x


class Parameters(nn.Module):
    """Parameters in lists and dictionaries, 0-d, empty, of one element, frozen, of ints."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ParameterList([nn.Parameter(torch.randn(16, 16)) for _ in range(3)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(16))})
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.counts = nn.Parameter(torch.arange(16), requires_grad=False)
        self.flags = nn.Parameter(torch.arange(16) % 2 == 0, requires_grad=False)
        self.frozen = nn.Parameter(torch.randn(16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for item in self.items:
            x = torch.tanh(x @ item) * self.scale
        x = x + self.named["a"] * self.counts + self.frozen
        return torch.where(self.flags, x, -x) + self.empty.sum()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 9, dtype=torch.complex64))
        self.register_buffer("phase", torch.randn(9, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) @ self.weight.conj().T[:, :9] * self.phase, n=16)


class Buffers(nn.Module):
    """Buffers of every kind: large, written in place, reassigned, not saved, shared."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("large", torch.zeros(300, 300))
        self.register_buffer("table", torch.randn(300, 300), persistent=False)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("big_mean", torch.zeros(300, 300))
        self.alias = nn.Linear(16, 16)
        self.alias.register_buffer("mean", self.mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        with torch.no_grad():
            self.large.add_(x.mean())
            self.large.data[0] += 1
            self.mean = self.mean * 0.9 + x.mean(0) * 0.1
            self.big_mean = self.big_mean * 0.5 + self.count
        y = self.linear(x) + self.mean + self.alias(x) * self.alias.mean
        return y * self.large.mean() + self.table[: x.shape[0], :16] + self.big_mean[0, 0]


class SavesItsWeight(torch.autograd.Function):
    """Keeps the parameter on the context, out of autograd's sight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight, ctx.x = weight, x
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad @ ctx.weight, grad.t() @ ctx.x


class OwnFunction(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return SavesItsWeight.apply(x, self.weight) + self.bias


class MaskedThroughData(nn.Linear):
    """Writes its weight in a way that torch does not count."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.register_buffer("mask", (torch.rand(16, 16) > 0.5).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _mask(self)
        return super().forward(x)


def _mask(layer: Any) -> None:
    layer.weight.data *= layer.mask


class ReplacesData(MaskedThroughData):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data * self.mask
        return F.linear(x, self.weight, self.bias)


class ReturnsItsWeight(nn.Module):
    """A child hands out its parameter and a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Linear(16, 16)
        self.child = nn.Embedding(16, 16)
        self.child.forward = lambda: (self.child.weight, self.child.weight[:3])  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole, some = self.child()
        return self.position(x @ whole) + some


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.net = kind(16, 12, num_layers=2, batch_first=True, **settings)
        width = settings.get("proj_size", 12) * (2 if settings.get("bidirectional") else 1)
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> Any:
        out, state = self.net(x)
        return self.head(out), state


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(16, 16), nn.GRUCell(16, 16), nn.RNNCell(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, c = torch.zeros_like(x), torch.zeros_like(x)
        for _ in range(3):
            h, c = self.lstm(x, (h, c))
            h = self.rnn(x, self.gru(c, h))
        return h


class Attention(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.net = nn.MultiheadAttention(16, 2, batch_first=True, **settings)

    def forward(self, x: torch.Tensor) -> Any:
        more = {} if self.net.kdim == 16 else {"key": x[..., :8], "value": x[..., :8]}
        return self.net(x, **({"key": x, "value": x} | more))


class Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.out = nn.AdaptiveLogSoftmaxWithLoss(16, 40, [10, 20], div_value=2.0)

    def forward(self, ids: torch.Tensor) -> Any:
        found = self.out(self.embed(ids).flatten(0, 1), ids.flatten())
        return found.output, found.loss, self.out.log_prob(self.embed(ids).flatten(0, 1))


class Bag(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(40, 16, mode="sum", sparse=sparse)
        self.embed = nn.Embedding(40, 16, max_norm=1.0, sparse=sparse, padding_idx=0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.bag(ids) + self.embed(ids).sum(1)


def _sequence(width: int = 16) -> Callable[[], Any]:
    return lambda: ((torch.randn(2, 5, width, requires_grad=True),), {})


def _orthogonal() -> nn.Module:
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    parametrizations.orthogonal(net[0])
    parametrizations.spectral_norm(net[2])
    return net


def _channels_last() -> nn.Module:
    return Residual(3, 8).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _strided() -> nn.Module:
    net = nn.Linear(16, 16)
    net.weight = nn.Parameter(torch.randn(16, 16).t())
    net.bias = nn.Parameter(torch.randn(32)[::2])
    return net


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "resnet": (lambda: nn.Sequential(Residual(3, 8), Residual(8, 8)), image()),
    "channels-last": (_channels_last, image()),
    "strided-weights": (_strided, vector()),
    "conv-transpose": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.GELU(), nn.ConvTranspose2d(8, 3, 3)),
        image(),
    ),
    "depthwise": (
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=4), nn.GroupNorm(2, 8)),
        image(4),
    ),
    "lstm": (lambda: Recurrent(nn.LSTM), _sequence()),
    "lstm-both-ways": (lambda: Recurrent(nn.LSTM, bidirectional=True, dropout=0.1), _sequence()),
    "lstm-projected": (lambda: Recurrent(nn.LSTM, proj_size=6, bidirectional=True), _sequence()),
    "gru": (lambda: Recurrent(nn.GRU, bidirectional=True), _sequence()),
    "rnn": (lambda: Recurrent(nn.RNN, nonlinearity="relu"), _sequence()),
    "cells": (Cells, vector()),
    "attention": (lambda: Attention(dropout=0.1), _sequence()),
    "attention-apart": (lambda: Attention(kdim=8, vdim=8, add_bias_kv=True), _sequence()),
    "transformer": (
        lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True),
        lambda: ((torch.randn(2, 5, 16, requires_grad=True), torch.randn(2, 3, 16)), {}),
    ),
    "tied": (lambda: TiedLanguageModel(False), tokens()),
    "tied-by-function": (lambda: TiedLanguageModel(True), tokens()),
    "experts": (Experts, vector(64, 12)),
    "repeated": (lambda: Repeated("plain"), vector()),
    "checkpointed": (lambda: Repeated("not"), vector()),
    "checkpointed-reentrant": (lambda: Repeated("reentrant"), vector()),
    "parameters": (Parameters, vector()),
    "complex": (Complex, vector()),
    "buffers": (Buffers, vector()),
    "own-function": (lambda: nn.Sequential(OwnFunction(16, 16), OwnFunction(16, 16)), vector()),
    "data-masked": (lambda: nn.Sequential(MaskedThroughData(), MaskedThroughData()), vector()),
    "data-replaced": (lambda: nn.Sequential(ReplacesData(), ReplacesData()), vector()),
    "returns-weight": (ReturnsItsWeight, vector()),
    "adaptive": (Adaptive, tokens()),
    "bag": (lambda: Bag(False), tokens()),
    "bag-sparse": (lambda: Bag(True), tokens()),
    "weight-norm": (
        lambda: nn.Sequential(
            parametrizations.weight_norm(nn.Linear(16, 16)), nn.Linear(16, 16), nn.Linear(16, 4)
        ),
        vector(),
    ),
    "orthogonal": (_orthogonal, vector()),
    "old-weight-norm": (
        lambda: nn.Sequential(old_weight_norm(nn.Linear(16, 16)), nn.Linear(16, 4)),
        vector(),
    ),
    "old-spectral-norm": (
        lambda: nn.Sequential(old_spectral_norm(nn.Linear(16, 16)), nn.Linear(16, 4)),
        vector(),
    ),
    "bilinear": (
        lambda: nn.Bilinear(16, 16, 4),
        lambda: ((torch.randn(3, 16), torch.randn(3, 16)), {}),
    ),
    "instance-norm": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        ),
        image(),
    ),
}


@pytest.mark.parametrize("disk", [False, True], ids=["dram", "nvme"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(3)
def test_trains_bit_for_bit(name: str, disk: bool, tmp_path: Any) -> None:
    build, inputs = CASES[name]
    tiers = Tiers("nvme", 1 << 20, str(tmp_path), "nvme") if disk else DRAM
    if name in ("returns-weight", "orthogonal"):
        tiers.extra_hbm = 16384  # views of weights that live on keep their block in HBM
    if name == "bag-sparse":
        compare_training(
            build, inputs, tiers, optimizer=(torch.optim.SparseAdam, {"lr": 0.05}), steps=3
        )
        return
    compare_training(build, inputs, tiers)
    if not disk:
        compare_training(build, inputs, tiers, train=False, steps=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    compare_training(
        lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)).to(dtype),
        lambda: ((torch.randn(3, 16, dtype=dtype, requires_grad=True),), {}),
        DRAM,
    )


@pytest.mark.parametrize("name", ["tied", "resnet", "transformer"])
def test_autocast(name: str) -> None:
    build, inputs = CASES[name]
    compare_training(
        build, inputs, DRAM, context=lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    )


def test_the_fast_path_of_the_encoder_is_taken() -> None:
    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        return nn.TransformerEncoder(layer, 2).eval()

    with Pair(build, DRAM, optimizer=None) as pair:

        def kernels(model: nn.Module, optimizer: Any) -> Any:
            x = torch.randn(2, 5, 16)
            with (
                torch.no_grad(),
                torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen,
            ):
                out = model(x)
            names = {event.key for event in seen.key_averages()}
            assert "aten::_transformer_encoder_layer_fwd" in names
            return out

        pair.both(kernels)


def _evaluated(build: Callable[[], nn.Module], blocks: Any, use: Callable[[Any], Any]) -> Any:
    """Compares evaluations without gradients; returns the names of the blocks."""
    with Pair(build, DRAM, optimizer=None, blocks=blocks) as pair:

        def evaluate(model: nn.Module, optimizer: Any) -> Any:
            with torch.no_grad():
                return use(model)

        for _ in range(3):
            pair.both(evaluate)
        names = {row.block for row in pair.tier.residency()}
        pair.finish()
        return names


def _padding() -> torch.Tensor:
    mask = torch.zeros(3, 6, dtype=torch.bool)
    mask[1, 3:] = True
    return mask


def test_the_encoder_leaves_padding_out() -> None:
    """It does where none of its first layer's weights intercepts operations."""

    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        return nn.TransformerEncoder(layer, 3).eval()

    def use(model: Any) -> Any:
        found = model(torch.randn(3, 6, 16), src_key_padding_mask=_padding())
        assert not found[1, 3:].any()  # else numbers
        return found

    _evaluated(build, "auto", use)


def test_weights_stay_away_while_the_encoder_looks_at_them() -> None:
    class Raises(nn.TransformerEncoderLayer):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise ZeroDivisionError

    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)
    encoder.eval()
    weight, value = encoder.layers[0].linear1.weight, encoder.layers[0].linear1.weight.clone()
    x = torch.randn(3, 6, 16)
    with tiermem.TierManager("cpu", hbm="64KiB", dram="1MiB") as tier, torch.no_grad():
        tier.wrap(encoder)
        encoder.layers[0].__class__ = Raises
        with pytest.raises(ZeroDivisionError):
            encoder(x, src_key_padding_mask=_padding())
        assert type(weight) is not nn.Parameter
        assert torch.equal(weight, value)


@pytest.mark.parametrize("blocks", ["auto", lambda name, module: isinstance(module, nn.Linear)])
@pytest.mark.parametrize("masked", [False, True])
def test_what_one_kernel_takes_is_one_block(blocks: Any, masked: bool) -> None:
    """However large: with a part of it elsewhere torch would take another way."""

    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(128, 2, 512, batch_first=True)
        return nn.TransformerEncoder(layer, 3).eval()

    def use(model: Any) -> Any:
        mask = _padding() if masked else None
        return model(torch.randn(3, 6, 128), src_key_padding_mask=mask)

    names = _evaluated(build, blocks, use)
    assert names == {f"TransformerEncoder.layers.{i}" for i in range(3)}


def test_attention_that_one_kernel_computes_is_one_block() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(256, 4, batch_first=True)
            self.up = nn.Linear(256, 512)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(self.attention(x, x, x, need_weights=False)[0])

    def build() -> nn.Module:
        return nn.ModuleDict({"0": Block(), "1": Block()}).eval()

    def use(model: Any) -> Any:
        x = torch.randn(2, 5, 256)
        return model["0"](x), model["1"](x)

    names = _evaluated(build, "auto", use)
    assert any("attention" in name for name in names)
    assert not any("out_proj" in name for name in names)


@pytest.mark.parametrize("elements", [0, 1])
def test_a_buffer_that_grows_in_place_leaves_its_neighbours_alone(elements: int) -> None:
    """As those of torch's observers and fake quantization do: values of each channel."""

    class Observer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Buffer(torch.arange(3))
            self.low = nn.Buffer(torch.zeros(elements))
            self.enabled = nn.Buffer(torch.ones(240))
            self.linear = nn.Linear(200, 200)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = x.detach().amin(0)
            known = self.low.clone() if self.low.numel() > 1 else found
            self.low.resize_(found.shape).copy_(torch.minimum(known, found))
            return self.linear(x - self.low) * self.enabled[:200] + self.before.sum()

    compare_training(Observer, vector(200), DRAM, steps=3)


def test_fake_quantization_of_each_channel() -> None:
    """A kernel makes its scale longer in place, from one element to one for each channel."""

    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(200, 200)
            self.on = nn.Buffer(torch.ones(1, dtype=torch.long))
            self.low, self.high = nn.Buffer(torch.zeros(0)), nn.Buffer(torch.zeros(0))
            self.scale = nn.Buffer(torch.ones(1))
            self.zero = nn.Buffer(torch.zeros(1, dtype=torch.int32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen = self.on, self.on, self.low, self.high, self.scale, self.zero
            weight = torch.fused_moving_avg_obs_fake_quant(
                self.linear.weight, *seen, 0.01, -128, 127, 0, True, True
            )
            return F.linear(x, weight, self.linear.bias)

    compare_training(lambda: nn.Sequential(Quantized(), Quantized()), vector(200), DRAM)


def test_a_small_buffer_that_has_a_length_is_not_made_longer_over_its_neighbours() -> None:
    layer = nn.Linear(4, 4)
    layer.table, layer.beside = nn.Buffer(torch.arange(3.0)), nn.Buffer(torch.arange(40.0))
    with tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB") as tier:
        tier.wrap(layer)
        with pytest.raises(RuntimeError, match="not resizable"):
            layer.table.resize_(30).fill_(1)
        assert torch.equal(layer.table[:3], torch.arange(3.0))
        assert torch.equal(layer.beside, torch.arange(40.0))
    assert layer.table.untyped_storage().resizable()


class Grows(nn.Module):
    """Makes a buffer as long as it needs, in place."""

    def __init__(self, grow: Any) -> None:
        super().__init__()
        self.before = nn.Buffer(torch.ones(3))
        self.grown = nn.Buffer(torch.zeros(2))
        self.behind = nn.Buffer(torch.arange(5))
        self.linear = nn.Linear(16, 16)
        self.grow = grow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.grow(self.grown)
        return self.linear(x) * self.behind.sum() + self.before.sum() + self.grown.mean()


GROWTH = {
    "resize_": lambda buffer: buffer.resize_(700).fill_(3.0),
    "out=": lambda buffer: torch.kron(torch.ones(40), torch.ones(30), out=buffer),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("how", GROWTH)
def test_a_small_buffer_is_not_made_longer_over_its_neighbours(how: str) -> None:
    model = Grows(GROWTH[how])
    x = torch.randn(2, 16)
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB") as tier:
        tier.wrap(model)
        with pytest.raises(tiermem.ParameterError, match="one batch through the module before"):
            model(x)
        assert torch.equal(model.before, torch.ones(3))
        assert torch.equal(model.behind, torch.arange(5))
    expected = model(x)
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB") as tier:  # as the error says
        tier.wrap(model)
        assert same_bits(model(x), expected)


def test_tensors_in_the_tiers_are_not_swapped() -> None:
    """One in the place of a large buffer was lost as that came up; small ones are ordinary."""

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.large = nn.Buffer(torch.arange(60000.0))
            self.small = nn.Buffer(torch.arange(16.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.large[:16] + self.small

    class Swaps(Tables):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.utils.swap_tensors(self.large, torch.ones(60000))
            return super().forward(x)

    swap = getattr(torch.utils.swap_tensors, "__wrapped__", torch.utils.swap_tensors)
    model, x = Tables().requires_grad_(False), torch.ones(2, 16)
    expected = model(x)
    with tiermem.TierManager(device="cpu", hbm="512KiB", dram="1MiB") as tier:
        tier.wrap(model)
        for name in ("linear.weight", "large"):
            module, _, own = name.rpartition(".")
            tensor = getattr(model.get_submodule(module), own)
            with pytest.raises(tiermem.ParameterError, match=r"copy\s+the values"):
                torch.utils.swap_tensors(tensor, torch.ones_like(tensor))
            with pytest.raises(RuntimeError, match="weakref"):
                swap(tensor, nn.Parameter(torch.ones(2)))
        assert same_bits(model(x), expected)
        torch.utils.swap_tensors(model.small, torch.zeros(16))
        assert torch.equal(model(x), model.linear(x) * torch.arange(16.0))
    torch.utils.swap_tensors(model.large, torch.ones(60000))
    assert torch.equal(model(x), model.linear(x))
    with tiermem.TierManager(device="cpu", hbm="512KiB", dram="1MiB") as tier:
        inside = tier.wrap(Swaps())
        with pytest.raises(tiermem.ParameterError, match=r"'Swaps\.buffers'"):
            inside(x)


def test_a_view_of_a_small_buffer_outlives_the_tiers() -> None:
    with tiermem.TierManager(device="cpu", hbm="64KiB", dram="1MiB") as tier:
        first = Grows(lambda buffer: None)
        tier.wrap(first)
        kept = first.behind[1:]
        tier.unwrap(first)
        for _ in range(2):  # its bytes are not given to others
            tier.wrap(nn.BatchNorm1d(64))
        assert torch.equal(kept, torch.arange(1, 5))
    assert torch.equal(kept, torch.arange(1, 5))


def test_scales_that_fake_quantization_learns_are_written_through_data() -> None:
    """By code of torch itself, in forward: kept at least eps, which steps make them less than."""
    from torch.ao.quantization import MovingAverageMinMaxObserver
    from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize

    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.quantize = _LearnableFakeQuantize(MovingAverageMinMaxObserver, 0, 255, scale=1e-3)
            self.quantize.enable_param_learning()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.quantize(x))

    compare_training(lambda: nn.Sequential(Quantized(), Quantized()), vector(), DRAM, steps=4)


def test_only_the_experts_that_are_used_move() -> None:
    with Pair(Experts, DRAM, optimizer=None) as pair:
        x = torch.randn(4, 64)
        with torch.no_grad():
            pair.model(x, only=2)
            pair.tier.reset_stats()
            pair.model(x, only=5)
        moved = pair.tier.stats().links["dram->hbm"].nbytes
        one = sum(p.numel() * p.element_size() for p in pair.plain.experts[5].parameters())
        assert moved < 2 * one, f"{moved} bytes moved for one expert of {one}"


def test_reparametrized_while_wrapped_is_refused() -> None:
    with Pair(lambda: nn.Sequential(nn.Linear(4, 4)), DRAM) as pair:
        with pytest.raises(RuntimeError):
            parametrizations.weight_norm(pair.model[0])
        assert not parametrize.is_parametrized(pair.model[0])
        with pytest.raises(tiermem.ParameterError, match=r"tier\.unwrap"):
            pair.model[0].weight = nn.Parameter(torch.zeros(4, 4))
        with pytest.raises(tiermem.ParameterError, match=r"tier\.unwrap"):
            del pair.model[0].weight
        names = pair.model[0]._parameters
        for act in (
            lambda: names.update(weight=nn.Parameter(torch.zeros(4, 4))),
            lambda: names.__ior__({"weight": nn.Parameter(torch.zeros(4, 4))}),
            names.clear,
            names.popitem,
        ):
            with pytest.raises(tiermem.ParameterError, match=r"tier\.unwrap"):
                act()
        pair.finish()


def test_the_first_function_of_all_may_look_a_weight_up() -> None:
    """As a script does outside of functions: nobody has called it."""
    found: list[torch.Tensor] = []
    model = nn.Sequential(nn.Linear(4, 4))
    expected = model[0].weight.detach().clone()
    with tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB") as tier:
        names = tier.wrap(model)[0]._parameters
        ended = threading.Lock()
        ended.acquire()

        def look() -> None:
            try:
                found.append(names["weight"].clone())
            finally:
                ended.release()

        _thread.start_new_thread(look, ())
        assert ended.acquire(timeout=60)
    assert torch.equal(found[0], expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_weights_lie_as_cudnn_wants_them(kind: Any) -> None:
    """All matrices in the order of the layers, then all biases; else each call copies them."""
    model = kind(64, 64, 2, bidirectional=True)
    with tiermem.TierManager("cpu", hbm="16MiB", dram="16MiB") as tier:
        tier.wrap(model)
        (group,) = tier._runtime.groups
        names = [spec.name for spec in group.block.tensors]
        want = [name for name in model._flat_weights_names if "weight" in name]
        want += [name for name in model._flat_weights_names if "bias" in name]
        assert names == want
        ends = [spec.offset + spec.nbytes for spec in group.block.tensors]
        assert ends[:-1] == [spec.offset for spec in group.block.tensors[1:]]


@pytest.mark.parametrize("name", ["load_state_dict", "_call_impl", "register_forward_hook"])
def test_methods_that_an_instance_overrides_are_called_and_come_back(name: str) -> None:
    """Before the wrap they are called from there on, and are there afterwards; later ones stay."""
    calls: list[str] = []

    def override(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append("before")
        return getattr(nn.Module, name)(self, *args, **kwargs)

    def use(model: nn.Module) -> None:
        acts: dict[str, Callable[[], object]] = {
            "load_state_dict": lambda: model.load_state_dict(model.state_dict()),
            "_call_impl": lambda: model(torch.ones(4)),
            "register_forward_hook": lambda: model.register_forward_hook(print).remove(),
        }
        acts[name]()

    model = nn.Linear(4, 4)
    mine = model.__dict__[name] = types.MethodType(override, model)
    with tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB") as tier:
        tier.wrap(model)
        use(model)
        assert calls == ["before"]
        copied = copy.deepcopy(model)
        tier.unwrap(model)
    assert model.__dict__[name] is mine
    use(model)
    assert calls == ["before", "before"]
    use(copied)
    assert calls == ["before"] * 3


def test_what_is_put_in_a_methods_place_while_wrapped_stays() -> None:
    calls: list[int] = []
    model = nn.Linear(4, 4)
    with tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB") as tier:
        tier.wrap(model)
        model.load_state_dict = lambda *args, **kwargs: calls.append(1)  # type: ignore[assignment, method-assign]
        tier.unwrap(model)
    model.load_state_dict({})
    assert calls == [1]


def test_a_change_of_a_large_buffers_form_is_refused() -> None:
    """In a block it would be lost."""

    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(300, 300)
            self.register_buffer("table", torch.randn(300, 300))
            self.turns = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.turns:
                self.table.unsqueeze_(0)
            return self.linear(x) + self.table.sum(0)

    model, x = Turns(), torch.randn(2, 300)
    expected = model(x)
    with tiermem.TierManager("cpu", hbm="1MiB", dram="4MiB") as tier, torch.no_grad():
        tier.wrap(model)
        assert torch.equal(model(x), expected)
        model.turns = True
        with pytest.raises(tiermem.ParameterError, match=r"Turns\.buffers.*cannot become"):
            model(x)
        model.turns = False
        assert torch.equal(model(x), expected)


class Code(nn.Module):
    """Is given its weights, and has tables and statistics of its own, as generated code has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16, affine=False)
        self.register_buffer("table", torch.randn(16, 16))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        self.count += 1  # type: ignore[operator]
        return torch.tanh(self.norm(x @ weight) @ self.table) + self.count  # type: ignore[operator]


class Generated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.code = torch.jit.script(Code())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.code(x, self.weight)
        return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch is about to drop it
def test_scripted_code_without_parameters_is_left_as_it_is() -> None:
    before = torch._C._jit_set_profiling_executor(False)  # its first call rounds otherwise
    try:
        compare_training(lambda: nn.Sequential(*[Generated() for _ in range(4)]), vector(), DRAM)
    finally:
        torch._C._jit_set_profiling_executor(before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_with_parameters_are_refused() -> None:
    with tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB") as tier:
        with pytest.raises(tiermem.WrapError, match=r"'0' is a ScriptModule, whose weights"):
            tier.wrap(nn.Sequential(torch.jit.script(nn.Linear(4, 4))))
