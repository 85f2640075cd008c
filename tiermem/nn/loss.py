"""The head's matmul and the cross-entropy in chunks of tokens.

The logits of all tokens are often the largest tensor of a training step: at 16,384
tokens and a vocabulary of 128,000 they take 4.2 GB in bf16, and several times that
while the loss and its gradient are computed. In chunks, only those of one chunk exist at
a time, in forward and in backward.

Backward recomputes a chunk's logits instead of keeping gradients from
forward. That costs one more matmul of the head; it applies a loss scale to the
gradient before it is rounded, holds no gradient of the head between forward and
backward, and computes nothing if no gradients are requested.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tiermem.errors import ConfigError


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunks: int,
    bias: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Returns the mean cross-entropy of ``hidden @ weight.T + bias``, computed in chunks.

    With ``z`` the logits of a token in fp32 and ``t`` its target, its loss is
    ``logsumexp(z) - z[t]``, and the gradient of ``z`` is ``softmax(z) - onehot(t)`` over the
    number of tokens that count. It equals ``F.cross_entropy(logits.float(), targets)`` up to
    rounding: sums over tokens are computed chunk by chunk, and the weight's gradient is rounded to
    the weight's dtype once per chunk. The same number of chunks always gives the same bits.

    Args:
        hidden: The head's input, ``(..., width)``, any floating dtype.
        weight: The head's weight, ``(vocabulary, width)``.
        targets: Indices, with the shape of ``hidden`` without the last dimension, int64.
        chunks: Number of parts into which the tokens are divided; fewer if there are fewer tokens.
        bias: The head's bias, ``(vocabulary,)``, or None.
        ignore_index: Targets that do not count.

    Returns:
        A scalar, fp32 (fp64 if ``hidden`` is); NaN if no target counts, as with torch.

    Raises:
        ConfigError: If ``chunks`` is not at least 1.
        ValueError: If the shapes do not fit.
    """
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ConfigError(f"chunks must be a number of at least 1, not {chunks!r}")
    if hidden.shape[:-1] != targets.shape or weight.shape[1:] != hidden.shape[-1:]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets "
            f"{tuple(targets.shape)} do not fit together"
        )
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    flat = hidden.reshape(-1, hidden.shape[-1])
    with torch.autocast(kind, enabled=False):
        loss: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call, unused-ignore]
            flat, weight, bias, targets.reshape(-1), chunks, ignore_index
        )
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """See :func:`chunked_cross_entropy`; ``hidden`` is 2-D here, ``targets`` 1-D."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunks: int,
        ignore_index: int,
    ) -> Tensor:
        counted = targets != ignore_index
        wide = _wide(hidden.dtype)
        # backward only needs the normalizer of each token to recompute the softmax
        normalizers = torch.empty(targets.shape, dtype=wide, device=hidden.device)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        for rows in _rows(len(targets), chunks):
            logits = F.linear(hidden[rows], weight, bias).to(wide)
            normalizers[rows] = logits.logsumexp(-1)
            index = torch.where(counted[rows], targets[rows], 0)
            losses = normalizers[rows] - logits.gather(-1, index[:, None]).squeeze(-1)
            total += torch.where(counted[rows], losses, 0).sum()
            del logits
        count = counted.sum()
        ctx.save_for_backward(hidden, weight, bias, targets, normalizers, count)
        ctx.chunks, ctx.ignore_index = chunks, ignore_index
        return total / count

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizers, count = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_weight = torch.zeros_like(weight) if wants_weight else None
        of_bias = torch.zeros_like(bias) if bias is not None and wants_bias else None
        scale = gradient / count
        counted = targets != ctx.ignore_index
        for rows in _rows(len(targets), ctx.chunks):
            logits = F.linear(hidden[rows], weight, bias).to(normalizers.dtype)
            of_logits = logits.sub_(normalizers[rows, None]).exp_()
            index = torch.where(counted[rows], targets[rows], 0)[:, None]
            of_logits.scatter_(-1, index, of_logits.gather(-1, index) - 1)
            of_logits.mul_(torch.where(counted[rows], scale, 0)[:, None])
            part = of_logits.to(hidden.dtype)
            del logits, of_logits
            if of_hidden is not None:
                torch.mm(part, weight, out=of_hidden[rows])
            if of_weight is not None:
                of_weight.addmm_(part.t(), hidden[rows])
            if of_bias is not None:
                of_bias += part.sum(0)
        return of_hidden, of_weight, of_bias, None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _rows(tokens: int, chunks: int) -> Iterator[slice]:
    """Yields which tokens each chunk has; all but the last have the same number."""
    length = max(1, -(-tokens // chunks))
    for start in range(0, tokens, length):
        yield slice(start, min(start + length, tokens))
