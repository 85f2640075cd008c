"""Small mixtures of experts, resident and in the tiers, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support_nn import same_bits

import tiermem

transformers = pytest.importorskip("transformers", minversion="5.0")
VOCABULARY = 64
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def mixtral(experts: int = 8, of: int = 2) -> Any:
    return transformers.MixtralConfig(
        **_COMMON, intermediate_size=64, num_local_experts=experts, num_experts_per_tok=of
    )


def qwen3(experts: int = 16, of: int = 4) -> Any:
    return transformers.Qwen3MoeConfig(
        **_COMMON,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=experts,
        num_experts_per_tok=of,
    )


def gpt_oss(experts: int = 8, of: int = 2) -> Any:
    return transformers.GptOssConfig(
        **_COMMON, intermediate_size=32, num_local_experts=experts, num_experts_per_tok=of
    )


CONFIGS = {"mixtral": mixtral, "qwen3": qwen3, "gpt_oss": gpt_oss}


def build(config: Any, how: str, dtype: torch.dtype = torch.float32) -> Any:
    """Returns a model with random weights, the biases of its experts and routers among them."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation=how, dtype=dtype
    ).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "experts" in name or "router" in name or name.endswith("mlp.gate.weight"):
                param.normal_(0, 0.2)
    return model


def expert_bytes(model: Any) -> int:
    return sum(p.numel() * p.element_size() for n, p in model.named_parameters() if "experts" in n)


def all_bytes(model: Any) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


@contextmanager
def twins(
    config: Any, how: str, share: float, dtype: torch.dtype = torch.float32, **settings: Any
) -> Iterator[tuple[Any, Any, Any]]:
    """Yields a model in the tiers, the same one resident, and the front.

    Args:
        config: Of the model.
        how: The implementation of its experts.
        share: HBM, in bytes of the experts, beside those of everything else and of a layer.
        dtype: Of the weights.
        settings: Of the manager, where they are others.
    """
    model, plain = build(config, how, dtype), build(config, how, dtype)
    experts = expert_bytes(model)
    rest = all_bytes(model) - experts
    hbm = int(share * experts) + 2 * rest + experts // config.num_hidden_layers + (64 << 10)
    with tiermem.TierManager("cpu", **{"hbm": hbm, "dram": 16 << 20, **settings}) as tier:
        yield tier.wrap(model), plain, tier


def check(model: Any, plain: Any, ids: torch.Tensor) -> None:
    """Checks that a call without gradients gives the same bits."""
    with torch.no_grad():
        assert same_bits(model(ids).logits, plain(ids).logits)


def freeze(model: Any, trained: str) -> None:
    """Leaves gradients to parameters of which the names contain one of some words."""
    for name, param in model.named_parameters():
        param.requires_grad_(any(word in name for word in trained.split()))


def freeze_experts(model: Any, recomputed: bool | None) -> None:
    """Leaves gradients to the router and to a part of attention.

    Args:
        model: A mixture of experts.
        recomputed: Whether its layers are recomputed by reentrant checkpoints; None for not at all.
    """
    freeze(model, "q_proj router mlp.gate.weight")
    if recomputed is not None:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": recomputed})
        model.enable_input_require_grads()


def check_step(model: Any, plain: Any, ids: torch.Tensor) -> None:
    """Checks that the loss and every gradient have the same bits, and clears them."""
    losses = [one(input_ids=ids, labels=ids).loss for one in (model, plain)]
    assert same_bits(losses[0].detach(), losses[1].detach())
    for loss in losses:
        loss.backward()
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        assert theirs.grad is None or same_bits(mine.grad.detach(), theirs.grad), name
        mine.grad = theirs.grad = None


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (1, count), generator=generator)
