"""Models whose weights torchao or quanto has quantized, where these libraries are installed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support_nn import same_bits, step_alike
from torch import nn

import tiermem
from tiermem.nn.tensors.shells import insides, nbytes_of

transformers = pytest.importorskip("transformers")
_TORCHAO = ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"]
_QUANTO = ["qint8", "qint4", "qfloat8"]
Quantize = Callable[[nn.Module], object]


def _quantizer(library: str, name: str) -> Quantize:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            if library == "torchao":
                found = pytest.importorskip("torchao.quantization")
                if not hasattr(found, name):
                    pytest.skip(f"this torchao has no {name}")
                return lambda model: found.quantize_(model, getattr(found, name)())
            quanto = pytest.importorskip("optimum.quanto")
        finally:
            logging.disable(logging.NOTSET)

    def quantize(model: nn.Module) -> None:
        quanto.quantize(model, weights=getattr(quanto, name))
        quanto.freeze(model)
        model.requires_grad_(False)

    return quantize


@pytest.fixture(params=[*(("torchao", n) for n in _TORCHAO), *(("quanto", n) for n in _QUANTO)],
                ids="-".join)  # fmt: skip
def quantize(request: pytest.FixtureRequest) -> Iterator[Quantize]:
    found = _quantizer(*request.param)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of these libraries
        yield found


def llama(quantize: Quantize) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=256,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    quantize(model)
    return model


def third(model: nn.Module) -> int:
    return sum(map(nbytes_of, model.parameters())) // 3 // 4096 * 4096


def test_generate_and_state_dict(quantize: Quantize) -> None:
    plain, model = llama(quantize), llama(quantize)
    ids = torch.arange(24).view(2, 12)
    wanted = {"max_new_tokens": 6, "do_sample": False}
    with tiermem.TierManager("cpu", hbm=third(model)) as tier:
        tier.wrap(model)
        assert torch.equal(model.generate(ids, **wanted), plain.generate(ids, **wanted))
        mine, theirs = model.state_dict(), plain.state_dict()
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            if isinstance(value, torch.Tensor):
                pairs = zip(insides(mine[key]), insides(value), strict=True)
                assert all(p == q and same_bits(a, b) for (p, a), (q, b) in pairs)
        links = tier.stats().links
        assert links["dram->hbm"].nbytes > 0
        assert "hbm->dram" not in links
    with torch.no_grad():
        assert same_bits(model(ids).logits, plain(ids).logits)


@pytest.mark.parametrize("recomputed", [None, False, True], ids=["kept", "again", "reentrant"])
def test_adapters_on_them(recomputed: bool | None) -> None:
    """peft's LoRA over torchao's weights of eight bits."""
    peft = pytest.importorskip("peft")
    found, ids = _quantizer("torchao", "Int8WeightOnlyConfig"), torch.arange(24).view(2, 12)
    models = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            model = llama(found)
            torch.manual_seed(1)
            lora = peft.LoraConfig(
                r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False
            )
            model = peft.get_peft_model(model, lora).train()
            if recomputed is not None:
                model.gradient_checkpointing_enable({"use_reentrant": recomputed})
                model.enable_input_require_grads()
            models.append(model)
        model, plain = models
        other = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
        with tiermem.TierManager("cpu", hbm=third(model)) as tier:
            tier.wrap(model)
            optimizer = tier.optimizer(model, torch.optim.AdamW, lr=1e-2)
            for _ in range(3):
                losses = [each(ids, labels=ids).loss for each in models]
                step_alike(losses, (optimizer, other))
