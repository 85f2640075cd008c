"""Cross-entropy in chunks: torch's own to rounding, the same bits tiered as resident."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support_nn import Tiers, compare_training, seed
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import tiermem
from tiermem.nn.loss import chunked_cross_entropy


def _leaves(tokens: int, width: int, words: int, dtype: torch.dtype, biased: bool) -> list[Any]:
    made = [torch.randn(tokens, width), torch.randn(words, width)]
    made.append(torch.randn(words) if biased else None)
    return [None if t is None else t.to(dtype).requires_grad_() for t in made]


@given(
    tokens=st.integers(1, 40),
    width=st.integers(1, 16),
    words=st.integers(1, 30),
    chunks=st.integers(1, 50),
    biased=st.booleans(),
    ignored=st.integers(0, 40),
    number=st.integers(0, 1 << 20),
)
def test_equals_torch(
    tokens: int, width: int, words: int, chunks: int, biased: bool, ignored: int, number: int
) -> None:
    seed(number)
    ours = _leaves(tokens, width, words, torch.float64, biased)
    theirs = [None if t is None else t.detach().clone().requires_grad_() for t in ours]
    targets = torch.randint(0, words, (tokens,))
    targets[:ignored] = -100
    found = chunked_cross_entropy(ours[0], ours[1], targets, chunks=chunks, bias=ours[2])
    logits = F.linear(theirs[0], theirs[1], theirs[2])
    expected = F.cross_entropy(logits, targets)
    torch.testing.assert_close(found, expected, equal_nan=True)
    if ignored >= tokens:
        return  # no target counts: NaN, as with torch
    (found * 3).backward()
    (expected * 3).backward()
    for mine, other in zip(ours, theirs, strict=True):
        if mine is not None:
            torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    seed(0)
    hidden, weight, _ = _leaves(64, 32, 100, dtype, False)
    targets = torch.randint(0, 100, (64,))
    loss = chunked_cross_entropy(hidden, weight, targets, chunks=4)
    assert loss.dtype is torch.float32
    loss.backward()
    h, w = (t.detach().double().requires_grad_() for t in (hidden, weight))
    expected = F.cross_entropy(h @ w.t(), targets)
    expected.backward()
    rough = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(loss.double(), expected, rtol=rough, atol=rough)
    for mine, other in ((hidden, h), (weight, w)):
        assert mine.grad.dtype is dtype
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=4 * rough, atol=rough)


def test_a_loss_scale_reaches_the_gradient_before_it_is_rounded() -> None:
    seed(0)
    hidden, weight, _ = _leaves(64, 8, 50, torch.float16, False)
    with torch.no_grad():
        weight.mul_(1e-4)  # gradients of `hidden` lie below what fp16 can hold
    targets = torch.randint(0, 50, (64,))
    (chunked_cross_entropy(hidden, weight, targets, chunks=4) * 2.0**16).backward()
    h, w = (t.detach().double().requires_grad_() for t in (hidden, weight))
    (F.cross_entropy(h @ w.t(), targets) * 2.0**16).backward()
    torch.testing.assert_close(hidden.grad.double(), h.grad, rtol=0.02, atol=1e-5)


class Largest(TorchDispatchMode):
    """Sees the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        return result


def test_logits_of_all_tokens_never_exist() -> None:
    tokens, words = 256, 400
    hidden, weight, _ = _leaves(tokens, 4, words, torch.float32, False)
    targets = torch.randint(0, words, (tokens,))
    for chunks in (1, 4, 16):
        with Largest() as seen:
            chunked_cross_entropy(hidden, weight, targets, chunks=chunks).backward()
        assert seen.numel == max(tokens // chunks * words, words * 4)


def test_only_what_needs_a_gradient_gets_one() -> None:
    hidden, weight, bias = _leaves(8, 4, 5, torch.float32, True)
    targets = torch.randint(0, 5, (8,))
    for frozen in (hidden, weight, bias):
        for leaf in (hidden, weight, bias):
            leaf.grad = None
            leaf.requires_grad_(leaf is not frozen)
        chunked_cross_entropy(hidden, weight, targets, chunks=3, bias=bias).backward()
        for leaf in (hidden, weight, bias):
            assert (leaf.grad is None) == (leaf is frozen)


def test_under_autocast_it_computes_as_the_head_would() -> None:
    hidden, weight, _ = _leaves(16, 8, 20, torch.float32, False)
    targets = torch.randint(0, 20, (16,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = chunked_cross_entropy(hidden, weight, targets, chunks=1)
    found.backward()
    assert hidden.grad.dtype is torch.float32
    logits = F.linear(hidden.bfloat16(), weight.bfloat16()).float()
    torch.testing.assert_close(found, F.cross_entropy(logits, targets))


@pytest.mark.parametrize("chunks", [0, -1, True, 1.5])
def test_bad_chunks(chunks: Any) -> None:
    with pytest.raises(tiermem.ConfigError, match="chunks"):
        chunked_cross_entropy(
            torch.randn(2, 3), torch.randn(4, 3), torch.zeros(2).long(), chunks=chunks
        )


def test_bad_shapes() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        chunked_cross_entropy(torch.randn(2, 3), torch.randn(4, 3), torch.zeros(3).long(), chunks=1)


class Head(nn.Linear):
    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return chunked_cross_entropy(x, self.weight, targets, chunks=3, bias=self.bias)


class Model(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = Head(16, 64)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x, ids.roll(-1, dims=-1))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("activations", ["hbm", "dram"])
def test_tiered_bits_are_resident_bits(tied: bool, activations: str) -> None:
    policy = tiermem.Policy("dram", "dram", "dram", "dram", activations)  # type: ignore[arg-type]
    compare_training(
        lambda: Model(tied),
        lambda: ((torch.randint(0, 64, (2, 9)),), {}),
        Tiers("dram", policy=policy, options={"activation_min": 1}),
        optimizer=(torch.optim.AdamW, {"lr": 0.01}),
    )


def test_large_embeddings_are_blocks_of_their_own() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(2048, 32)
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
            self.norm = nn.LayerNorm(32)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed_tokens(ids)
            for layer in self.layers:
                x = layer(x)
            return self.norm(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Inner()
            self.lm_head = nn.Linear(32, 2048, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.lm_head(self.model(ids))

    with tiermem.TierManager("cpu", hbm="800KiB", dram="4MiB") as tier:
        model = tier.wrap(Outer())
        blocks = {row.block: row.nbytes for row in tier.residency()}
        for name in ("Outer.model.embed_tokens", "Outer.lm_head"):
            assert blocks[name] == 2048 * 32 * 4
        assert model(torch.zeros(1, 2).long()).shape == (1, 2, 2048)
