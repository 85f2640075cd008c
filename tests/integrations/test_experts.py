"""transformers' mixtures of experts come up expert by expert, bit for bit as resident ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support_experts import CONFIGS, build, check, expert_bytes, tokens, twins

import tiermem

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


def test_gradients_take_the_whole_layer() -> None:
    with twins(CONFIGS["mixtral"](), "eager", 1.2) as (model, plain, _):
        ids = tokens(6)
        check(model, plain, ids)
        for one in (model, plain):
            one(ids, labels=ids).loss.backward()
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad), name
            mine.grad = theirs.grad = None
        check(model, plain, ids)
