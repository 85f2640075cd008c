"""transformers' mixtures of experts come up expert by expert, bit for bit as resident ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support_experts import (
    CONFIGS,
    all_bytes,
    build,
    check,
    check_step,
    expert_bytes,
    freeze,
    freeze_experts,
    tokens,
    twins,
)

import tiermem

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
HOW = ["eager", "batched_mm", "grouped_mm"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_implementation(name: str, how: str) -> None:
    with twins(CONFIGS[name](), how, 0.25) as (model, plain, tier):
        for count, seed in ((9, 0), (1, 1), (1, 2), (20, 3), (1, 4)):
            check(model, plain, tokens(count, seed))
        stats = tier.stats()
        assert stats.expert_hits > 0
        assert stats.experts_chosen > stats.expert_hits
        assert stats.peak["hbm"] <= stats.budget["hbm"]
        whole = [
            row for row in tier.residency() if row.block.endswith("experts") and row.home != "hbm"
        ]
        assert len(whole) == 3
        assert all(row.tiers["hbm"] == "absent" for row in whole)


@pytest.mark.parametrize("how", ["eager", "grouped_mm"])
def test_half_precision_and_generation(how: str) -> None:
    with twins(CONFIGS["mixtral"](), how, 0.25, torch.bfloat16) as (model, plain, tier):
        prompt = tokens(5)
        found = [
            one.generate(
                prompt,
                max_new_tokens=6,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
            for one in (model, plain)
        ]
        assert torch.equal(found[0].sequences, found[1].sequences)
        assert all(map(torch.equal, found[0].logits, found[1].logits))
        assert tier.stats().experts_chosen > 0


@pytest.mark.parametrize("where", ["files", "nvme"])
def test_from_files(tmp_path: Path, where: str) -> None:
    """A checkpoint whose stacks lie in its files as they are, and a swap file."""
    plain = build(CONFIGS["gpt_oss"](), "eager")
    experts = expert_bytes(plain)
    settings: dict[str, Any] = {"hbm": experts, "dram": 8 << 20}
    if where == "nvme":
        settings |= {"nvme": tmp_path, "policy": tiermem.Policy(params="nvme")}
    with tiermem.TierManager("cpu", **settings) as tier:
        if where == "nvme":
            model = tier.wrap(build(CONFIGS["gpt_oss"](), "eager"))
        else:
            plain.save_pretrained(tmp_path / "saved")
            model = tiermem.load_checkpoint(
                lambda: build(CONFIGS["gpt_oss"](), "eager"), tmp_path / "saved", tier=tier
            )
        for count, seed in ((6, 0), (1, 1), (1, 2)):
            check(model, plain, tokens(count, seed))
        assert tier.stats().experts_chosen > 0
        assert tier.stats().links["nvme->hbm" if where == "files" else "dram->hbm"].nbytes > 0


@pytest.mark.parametrize("recomputed", [None, True, False], ids=["saved", "reentrant", "not"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.one_in(3)
def test_frozen_experts_beside_trained_attention(
    name: str, how: str, recomputed: bool | None
) -> None:
    """Forward and backward, whether or not layers are recomputed."""
    dtype = torch.bfloat16 if name == "qwen3" else torch.float32
    with twins(CONFIGS[name](), how, 0.25, dtype) as (model, plain, tier):
        for one in (model, plain):
            freeze_experts(one, recomputed)
        for count, seed in ((5, 0), (1, 1), (9, 2)):
            before = tier.stats().experts_chosen
            check_step(model, plain, tokens(count, seed))
            if recomputed is None:
                check(model, plain, tokens(1, seed))
            assert tier.stats().experts_chosen > before
        stats = tier.stats()
        assert stats.expert_hits > 0
        assert stats.peak["hbm"] <= stats.budget["hbm"]
        whole = [r for r in tier.residency() if r.block.endswith("experts") and r.home != "hbm"]
        assert len(whole) == 3
        assert all(row.tiers["hbm"] == "absent" for row in whole)


@pytest.mark.parametrize("how", HOW)
def test_a_trained_head_and_frozen_layers_below(how: str) -> None:
    """Nothing is saved of layers through which no gradient goes."""
    with twins(CONFIGS["mixtral"](), how, 0.25) as (model, plain, tier):
        for one in (model, plain):
            freeze(one, "lm_head layers.2.mlp.gate")
        for seed in range(3):
            tier.reset_stats()
            check_step(model, plain, tokens(1, seed))
            assert tier.stats().experts_chosen in (6, 8)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.one_in(3)
def test_adapters_beside_frozen_experts(how: str, dtype: torch.dtype) -> None:
    """Steps of an optimizer, a sample with no gradients between two, and the adapters' bits."""
    models = [build(CONFIGS["mixtral"](), how, dtype) for _ in range(2)]
    settings = tiermem.Lora(r=4, target_modules=["q_proj", "v_proj"])
    for one in models:
        torch.manual_seed(1)
        tiermem.add_adapters(one, settings)
    model, plain = models
    hbm = 2 * all_bytes(model) // 3
    with tiermem.TierManager("cpu", hbm=hbm, dram="16MiB") as tier:
        tier.wrap(model)
        optimizers = [
            make([p for p in one.parameters() if p.requires_grad], torch.optim.AdamW, lr=1e-2)
            for one, make in ((model, tier.optimizer), (plain, lambda p, kind, **kw: kind(p, **kw)))
        ]
        for seed in range(4):
            ids = tokens(4, seed)
            losses = [one(input_ids=ids, labels=ids).loss for one in models]
            assert torch.equal(*losses)
            for loss, optimizer in zip(losses, optimizers, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            check(model, plain, tokens(1, seed))
        assert tier.stats().experts_chosen > 0
        assert "hbm->dram" not in tier.stats().links
        for name, value in plain.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name


def test_trained_experts_take_the_whole_layer() -> None:
    with twins(CONFIGS["mixtral"](), "eager", 1.2) as (model, plain, _):
        ids = tokens(6)
        check(model, plain, ids)
        for one in (model, plain):
            one(ids, labels=ids).loss.backward()
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad), name
            mine.grad = theirs.grad = None
        check(model, plain, ids)
