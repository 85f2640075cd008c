"""On a CUDA device: text and adapters of the command line, beside transformers resident."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermem
from tiermem import cli
from tiermem.cli import adapting
from tiermem.cli.finetune import Tiers, capped, context_nbytes
from tiermem.cli.folders import open_folder
from tiermem.cli.generation import Sampling, write_on

transformers: Any = pytest.importorskip("transformers")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        dtype=torch.bfloat16,
    )
    folder = tmp_path / "llama"
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_text_is_the_resident_model_s(llama: Path) -> None:
    plain = transformers.AutoModelForCausalLM.from_pretrained(llama).cuda()
    prompt = list(b"the weights stream")
    for temperature in (0.0, 0.9):
        sampling = Sampling(24, temperature, seed=3)
        expected: list[int] = []
        found: list[int] = []
        write_on(plain, prompt, "cuda", sampling, expected.append)
        folder = open_folder(str(llama))
        with tiermem.TierManager("cuda", hbm="64MiB", dram="64MiB") as tier:
            model = tiermem.load_checkpoint(folder.model, folder.path, tier=tier)
            write_on(model, prompt, "cuda", sampling, found.append)
            tier.close(discard=True)
        assert found == expected


def test_the_command_writes(llama: Path, capfd: Any) -> None:
    line = ["generate", str(llama), "--prompt", "x", "--max-new-tokens", "8", "--device", "cuda"]
    assert cli.main([*line, "--dram", "64MiB"]) == 0
    out, err = capfd.readouterr()
    assert out.endswith("\n") and "first token after" in err


def test_adapters_under_a_cap(llama: Path, tmp_path: Path, capfd: Any, deterministic: None) -> None:
    peft: Any = pytest.importorskip("peft")
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 20)
    line = ["train", "--checkpoint", str(llama), "--lora", "r=4,target_modules=q_proj+v_proj"]
    line += ["--data", str(text), "--context", "256", "--batch", "1", "--steps", "3", "--json"]
    line += ["--device", "cuda", "--dram", "256MiB", "--out", str(tmp_path / "adapters")]
    torch.cuda.empty_cache()
    cap = (2 << 30) + torch.cuda.memory_reserved()  # which other tests of this process have left
    torch.cuda.reset_peak_memory_stats()
    assert cli.main([*line, "--hbm", str(cap)]) == 0
    found = json.loads(capfd.readouterr().out)
    # CUDA's part, torch's and the tiers' keep to the cap together
    assert found["context"] >= 64 << 20
    assert torch.cuda.max_memory_reserved() <= cap - found["hbm"] - found["context"]
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_pretrained(llama)
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    plain = peft.get_peft_model(plain, config).cuda().train()
    trained = [param for param in plain.parameters() if param.requires_grad]
    expected: list[float] = []
    adapting.train(
        plain,
        torch.optim.AdamW(trained, lr=1e-3),
        lambda norm: torch.nn.utils.clip_grad_norm_(trained, norm),
        adapting.corpus_of([str(text)], open_folder(str(llama)).tokens),
        adapting.Plan(1, 1, 256, 3, 1e-3, 1.0, 0, "cuda"),
        lambda _, loss: expected.append(loss),
    )
    assert found["losses"] == expected


def test_torch_refuses_more_than_the_cap() -> None:
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    context = context_nbytes(torch.device("cuda:0"))
    tiers = Tiers(held + context + (96 << 20), 0, 0, 32 << 20, context)
    for device in ("cuda", "cuda:0"):
        with tiermem.TierManager(device, hbm=tiers.hbm, dram="4MiB") as tier:
            with capped(tier, tiers, device), pytest.raises(torch.cuda.OutOfMemoryError):
                torch.empty(held + (100 << 20), dtype=torch.uint8, device=device)
            with capped(tier, tiers, device):
                torch.empty(40 << 20, dtype=torch.uint8, device=device)
        torch.empty(held + (100 << 20), dtype=torch.uint8, device=device)
