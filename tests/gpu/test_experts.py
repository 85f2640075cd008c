"""On a CUDA device: experts come up one by one, with the bits of the resident model."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

from support_experts import (
    CONFIGS,
    all_bytes,
    build,
    check_step,
    expert_bytes,
    freeze_experts,
    tokens,
)

import tiermem
from tiermem.core.experts import Way

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]


def wide(name: str) -> Any:
    """Returns a configuration of which rows are worth a copy."""
    config = CONFIGS[name]()
    config.hidden_size, config.head_dim = 256, 64
    config.intermediate_size = config.moe_intermediate_size = 512
    return config


@pytest.mark.parametrize("how", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_many_tokens_and_few(name: str, how: str) -> None:
    plain = build(wide(name), how, torch.bfloat16).cuda()
    model = build(wide(name), how, torch.bfloat16)
    hbm = expert_bytes(model) // 2 + (8 << 20)
    with tiermem.TierManager("cuda", hbm=hbm, dram="1GiB") as tier, torch.no_grad():
        tier.wrap(model)
        for count, seed in ((40, 0), (1, 1), (1, 2), (40, 3), (1, 4), (1, 1)):
            ids = tokens(count, seed).cuda()
            assert torch.equal(model(ids).logits, plain(ids).logits)
        assert tier.stats().experts_chosen > tier.stats().expert_hits > 0


@pytest.mark.parametrize("share", [4, 2])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_whole_tensors_beside_compute_that_is_late(name: str, share: int) -> None:
    config = wide(name)
    config.num_hidden_layers = 8
    if name == "gpt_oss":
        config.layer_types = ["full_attention"] * 8
    plain = build(config, "grouped_mm", torch.bfloat16).cuda()
    model = build(config, "grouped_mm", torch.bfloat16)
    random = Random(0)
    for one in model.model.layers:
        one.self_attn.register_forward_pre_hook(
            lambda *_: torch.cuda._sleep(random.choice([0, 0, 1_000_000]))
        )
    rest = all_bytes(model) - expert_bytes(model)
    with (
        tiermem.TierManager(
            "cuda", hbm=expert_bytes(model) // share + rest + (2 << 20), dram="1GiB"
        ) as tier,
        torch.no_grad(),
    ):
        tier.wrap(model)
        store, ways = tier._runtime.experts, set()
        for turn in range(24):
            ids = tokens(512, turn).cuda()
            assert torch.equal(model(ids).logits, plain(ids).logits)
            ways.add(store.goes)
        assert Way.TENSORS in ways


@pytest.mark.parametrize("recomputed", [None, True, False], ids=["saved", "reentrant", "not"])
@pytest.mark.parametrize("how", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_frozen_experts_beside_trained_attention(
    name: str, how: str, recomputed: bool | None
) -> None:
    plain = build(wide(name), how, torch.bfloat16).cuda()
    model = build(wide(name), how, torch.bfloat16)
    for one in (model, plain):
        freeze_experts(one, recomputed)
    hbm = expert_bytes(model) // 2 + (8 << 20)
    with tiermem.TierManager("cuda", hbm=hbm, dram="1GiB") as tier:
        tier.wrap(model)
        for count, seed in ((40, 0), (1, 1), (40, 2), (1, 1), (3, 3)):
            before = tier.stats().experts_chosen
            check_step(model, plain, tokens(count, seed).cuda())
            assert tier.stats().experts_chosen > before


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("skew", [0.0, 3.0])
@pytest.mark.parametrize("tokens", [1, 8, 100, 4096])
@pytest.mark.parametrize("shape", [(8, 512, 1024), (64, 1024, 256), (32, 2880, 1440)])
def test_groups_do_not_depend_on_each_other(
    shape: tuple[int, int, int], tokens: int, skew: float, turned: bool
) -> None:
    """One grouped product, the same without the empty groups, and each group alone.

    Matrices lie as they do in forward (``turned``), or as in backward.
    """
    experts, features, outputs = shape
    grouped = getattr(torch, "_grouped_mm", None)
    if grouped is None:
        pytest.skip("this torch has no grouped product")
    generator = torch.Generator("cuda").manual_seed(tokens)
    share = torch.softmax(skew * torch.randn(experts, generator=generator, device="cuda"), 0)
    drawn = torch.multinomial(share, tokens, replacement=True, generator=generator)
    counts = torch.bincount(drawn, minlength=experts)
    rows = torch.randn(tokens, features, generator=generator, device="cuda").bfloat16()
    sizes = (outputs, features) if turned else (features, outputs)
    weights = torch.randn(experts, *sizes, generator=generator, device="cuda").bfloat16()

    def lying(matrices: torch.Tensor) -> torch.Tensor:
        return matrices.mT if turned else matrices

    offsets = counts.cumsum(0).int()
    whole = grouped(rows, lying(weights), offs=offsets)
    hit = counts.nonzero()[:, 0]
    assert torch.equal(grouped(rows, lying(weights[hit]), offs=offsets[hit]), whole)
    start = 0
    for expert in hit.tolist():
        end = int(offsets[expert])
        one = torch.tensor([end - start], dtype=torch.int32, device="cuda")
        alone = grouped(rows[start:end], lying(weights[expert][None]), offs=one)
        assert torch.equal(alone, whole[start:end])
        start = end
