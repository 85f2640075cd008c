"""transformers architectures on a CUDA device: the same bits as resident, tight budgets."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import tiermem

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

_SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 256,
}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SMALL),
    "qwen2": ("Qwen2Config", _SMALL),
    "qwen3": ("Qwen3Config", {**_SMALL, "head_dim": 64}),
    "mistral": ("MistralConfig", _SMALL),
    "mixtral": ("MixtralConfig", {**_SMALL, "num_local_experts": 4}),
    "gemma2": ("Gemma2Config", {**_SMALL, "head_dim": 64}),
    "phi3": ("Phi3Config", {**_SMALL, "pad_token_id": 0}),
    "gpt2": ("GPT2Config", {"n_embd": 256, "n_layer": 6, "n_head": 4, "vocab_size": 1024}),
    "opt": (
        "OPTConfig",
        {
            "hidden_size": 256,
            "ffn_dim": 512,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "vocab_size": 1024,
            "word_embed_proj_dim": 256,
        },
    ),
    "falcon": (
        "FalconConfig",
        {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 1024},
    ),
}


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    config_name, sizes = _MODELS[name]
    config = getattr(transformers, config_name)(**sizes, attn_implementation="eager")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    return model.cuda().eval()


def budget(model: Any) -> int:
    """A third of the weights, or what the largest block and its step need."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    return max(total // 3, 6 * largest)


@pytest.mark.parametrize("name", sorted(_MODELS))
def test_training_and_generation_equal_resident(name: str) -> None:
    plain, model = build(name), build(name)
    ids = torch.randint(1, 1024, (2, 32), device="cuda")
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    dram = 8 * sum(p.numel() * p.element_size() for p in plain.parameters()) + (64 << 20)
    with tiermem.TierManager("cuda", hbm=budget(plain), dram=dram) as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=1e-3)
        for _ in range(3):
            losses = []
            for m, o in ((plain, reference), (model, optimizer)):
                o.zero_grad()
                loss = m(input_ids=ids, labels=ids).loss
                loss.backward()
                o.step()
                losses.append(loss.item())
            assert losses[0] == losses[1]
        state = model.state_dict()
        for key, value in plain.state_dict().items():
            assert torch.equal(value.cpu(), state[key].cpu()), key
        expected = plain.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert torch.equal(
            model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0), expected
        )
        assert tier.stats().evictions > 0


@pytest.mark.parametrize("mode", ["autocast", "checkpoint", "bf16"])
def test_llama_modes(mode: str) -> None:
    dtype = torch.bfloat16 if mode == "bf16" else torch.float32
    plain, model = build("llama", dtype), build("llama", dtype)
    ids = torch.randint(1, 1024, (2, 64), device="cuda")
    with tiermem.TierManager("cuda", hbm=budget(plain), dram="256MiB") as tier:
        for m in (plain, model):
            m.train()
            if mode == "checkpoint":
                m.gradient_checkpointing_enable({"use_reentrant": False})
        tier.wrap(model)
        for _ in range(2):
            grads = []
            for m in (plain, model):
                m.zero_grad()
                with torch.autocast("cuda", torch.bfloat16, enabled=mode == "autocast"):
                    loss = m(input_ids=ids, labels=ids).loss
                loss.backward()
                grads.append([p.grad.clone() for p in m.parameters()])
            for a, b in zip(*grads, strict=True):
                assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore")  # what the compiler imports warns of itself
def test_a_compiled_layer_equals_the_same_layer_compiled_and_resident() -> None:
    plain, model = build("llama"), build("llama")
    ids = torch.randint(1, 1024, (2, 64), device="cuda")
    for m in (plain, model):
        for layer in m.model.layers:
            layer.compile()
    with tiermem.TierManager("cuda", hbm=budget(plain), dram="256MiB") as tier, torch.no_grad():
        tier.wrap(model)
        for _ in range(3):
            assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
        assert tier.stats().evictions > 0


class Averaging(nn.Module):
    """Keeps an average in a buffer that every forward makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)
        self.register_buffer("average", torch.zeros(256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        return y + self.average


class Lazily(nn.Module):
    """Copies a layer in its first forward, as self-supervised training makes its target network."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256))
        self.targets: list[nn.Module] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.targets:
            self.targets.append(copy.deepcopy(self.online))
        return self.online(x) - self.targets[0](x).detach()


def test_a_copy_made_inside_a_forward_is_on_the_device() -> None:
    torch.manual_seed(0)
    plain = Lazily()
    model, x = copy.deepcopy(plain), torch.randn(4, 256, device="cuda")
    plain.cuda()
    with tiermem.TierManager("cuda", hbm="300KiB", dram="16MiB") as tier:
        tier.wrap(model)
        for _ in range(2):
            assert torch.equal(model(x), plain(x))


def test_buffers_that_forwards_make_go_with_the_model() -> None:
    torch.manual_seed(0)
    plain = Averaging()
    model = copy.deepcopy(plain)
    x = torch.randn(4, 256)
    with tiermem.TierManager("cuda", hbm="1MiB", dram="16MiB") as tier:
        tier.wrap(model)
        model(x.cuda())
        copied = copy.deepcopy(model)
        tier.unwrap(model)
    for each in (model, copied):
        assert {buffer.device.type for buffer in each.buffers()} == {"cpu"}
        each(x)
