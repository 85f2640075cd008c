"""Usual scripts, plain and with tiermem's two lines: what somebody sees who tries it.

Small models and loops as in tutorials: fine-tuning in two precisions, with clipping, accumulation,
a GradScaler, autocast, a scheduler, other optimizers; layers that are computed again, experts,
convolutions, recurrent layers, adapters; forwards and ``generate()``. By default everything fits in
HBM, where tiermem has nothing to do and should cost nothing; rows named ``half`` give HBM for half
of the weights' bytes. Steps of both take
turns; ``of plain`` is the quotient of the least times, ``medians`` that of the medians::

    python benchmarks/bench_scripts.py --out scripts.json
    python benchmarks/bench_scripts.py --only amp half --steps 20
    python benchmarks/bench_scripts.py --device cpu --set tiny --steps 2
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from bench_calls import seconds_of
from common import failure, report
from llama import give_back
from torch import nn
from torch.nn.functional import cross_entropy

import tiermem

Row = dict[str, Any]


class Sizes(NamedTuple):
    """How large models and batches are."""

    width: int
    layers: int
    heads: int
    words: int
    batch: int
    length: int
    images: int
    pixels: int
    depths: tuple[int, ...]


SETS = {
    "usual": Sizes(1024, 12, 16, 16000, 8, 256, 32, 224, (3, 4, 6, 3)),
    "tiny": Sizes(64, 6, 4, 100, 2, 32, 2, 32, (1, 1, 1, 1)),
}


class Recurrent(nn.Module):
    """An embedding, four LSTM layers and a head."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.LSTM(width, width, 4, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the loss of each word, (batch, length) of them."""
        scores = self.head(self.layers(self.embed(input_ids))[0])
        return {"loss": cross_entropy(scores.flatten(0, 1), labels.flatten())}


def gpt2(sizes: Sizes, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Returns a GPT-2 without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=sizes.width,
        n_layer=sizes.layers,
        n_head=sizes.heads,
        vocab_size=sizes.words,
        n_positions=2 * sizes.length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).to(dtype)


def bf16(sizes: Sizes) -> nn.Module:
    """Returns the same in bfloat16."""
    return gpt2(sizes, torch.bfloat16)


def checkpointed(sizes: Sizes) -> nn.Module:
    """Returns the same, with layers that are computed again in backward."""
    model: Any = bf16(sizes)
    model.gradient_checkpointing_enable()
    return model


def mixture(sizes: Sizes) -> nn.Module:
    """Returns a mixture of 8 experts, of which each token uses 2, in bfloat16."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=sizes.width,
        intermediate_size=2 * sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        vocab_size=sizes.words,
        num_local_experts=8,
    )
    return MixtralForCausalLM(config).to(torch.bfloat16)


def resnet(sizes: Sizes) -> nn.Module:
    """Returns a ResNet with batch norms."""
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(depths=list(sizes.depths), num_labels=100))


def lstm(sizes: Sizes) -> nn.Module:
    """Returns recurrent layers."""
    return Recurrent(sizes.words, sizes.width)


def lora(sizes: Sizes) -> nn.Module:
    """Returns a GPT-2 in bfloat16 with adapters of peft's."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    return get_peft_model(bf16(sizes), config)


@dataclass
class Loop:
    """A model, what steps it, and what it is given.

    Attributes:
        model: The model.
        optimizer: Its optimizer; None where it is not trained.
        given: Keyword arguments of its calls.
    """

    model: nn.Module
    optimizer: Any
    given: dict[str, torch.Tensor]

    def __post_init__(self) -> None:
        self.device = next(iter(self.given.values())).device.type
        self.scaler = torch.amp.GradScaler(self.device)
        self.schedule: Any = None
        if self.optimizer is not None:
            self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer)

    def loss(self) -> torch.Tensor:
        """Returns the loss of a batch."""
        found: torch.Tensor = self.model(**self.given)["loss"]
        return found

    def update(self) -> None:
        """Steps, and clears the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clip(self) -> None:
        """Clips the gradients' norm to one."""
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


def step(loop: Loop) -> None:
    """A step."""
    loop.loss().backward()
    loop.update()


def clipped(loop: Loop) -> None:
    """A step with clipping and a scheduler."""
    loop.loss().backward()
    loop.clip()
    loop.update()
    loop.schedule.step()


def accumulated(loop: Loop) -> None:
    """A step of four batches."""
    for _ in range(4):
        (loop.loss() / 4).backward()
    loop.update()


def autocast(loop: Loop) -> None:
    """A step whose forward runs in bfloat16."""
    with torch.autocast(loop.device, torch.bfloat16):
        loss = loop.loss()
    loss.backward()
    loop.update()


def amp(loop: Loop) -> None:
    """A step with a GradScaler and clipping, whose forward runs in half precision on CUDA."""
    half = torch.float16 if loop.device == "cuda" else torch.bfloat16
    with torch.autocast(loop.device, half):
        loss = loop.loss()
    loop.scaler.scale(loss).backward()
    loop.scaler.unscale_(loop.optimizer)
    loop.clip()
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    loop.optimizer.zero_grad()


def forward(loop: Loop) -> None:
    """A forward with gradients, as in a script that does not turn them off."""
    loop.model(input_ids=loop.given["input_ids"])


def no_grad(loop: Loop) -> None:
    """A forward without."""
    with torch.no_grad():
        forward(loop)


def generate(loop: Loop) -> None:
    """Writes 32 words behind 8."""
    ids = loop.given["input_ids"][:1, :4].repeat(1, 2)
    model: Any = loop.model
    model.generate(ids, max_new_tokens=32, min_new_tokens=32, do_sample=False, pad_token_id=0)


class Script(NamedTuple):
    """A script: its model, its step, its optimizer with settings, and how much HBM there is."""

    build: Callable[[Sizes], nn.Module]
    act: Callable[[Loop], None]
    cls: Any = torch.optim.AdamW
    settings: dict[str, Any] = {}  # noqa: RUF012 - never written
    share: float | None = None


_SGD = {"momentum": 0.9}
SCRIPTS = {
    "gpt2": Script(gpt2, step),
    "gpt2 bf16 fused": Script(bf16, step, settings={"fused": True}),
    "gpt2 checkpointed": Script(checkpointed, step, settings={"fused": True}),
    "mixture": Script(mixture, step, settings={"fused": True}),
    "gpt2 clipped": Script(gpt2, clipped),
    "gpt2 accumulated": Script(gpt2, accumulated),
    "gpt2 autocast": Script(gpt2, autocast),
    "gpt2 amp": Script(gpt2, amp),
    "gpt2 sgd": Script(gpt2, step, torch.optim.SGD, _SGD),
    "gpt2 adafactor": Script(gpt2, step, torch.optim.Adafactor),
    "resnet": Script(resnet, step, torch.optim.SGD, _SGD),
    "lstm": Script(lstm, step),
    "lora": Script(lora, step),
    "gpt2 forward": Script(bf16, forward, None),
    "gpt2 no_grad": Script(bf16, no_grad, None),
    "gpt2 generate": Script(bf16, generate, None),
    "gpt2 half": Script(gpt2, step, share=0.5),
    "gpt2 amp half": Script(gpt2, amp, share=0.5),
    "gpt2 accumulated half": Script(gpt2, accumulated, share=0.5),
    "resnet half": Script(resnet, step, torch.optim.SGD, _SGD, share=0.5),
    "lora half": Script(lora, step, share=0.5),
}


def inputs(script: Script, sizes: Sizes, device: torch.device) -> dict[str, torch.Tensor]:
    """Returns a batch."""
    if script.build is resnet:
        shape = sizes.images, 3, sizes.pixels, sizes.pixels
        labels = torch.randint(0, 100, (sizes.images,), device=device)
        return {"pixel_values": torch.randn(shape, device=device), "labels": labels}
    ids = torch.randint(0, sizes.words, (sizes.batch, sizes.length), device=device)
    return {"input_ids": ids, "labels": ids}


def measure(name: str, options: argparse.Namespace, device: torch.device) -> Row:
    """Measures one script; returns its row."""
    script, sizes = SCRIPTS[name], SETS[options.set]
    torch.manual_seed(0)
    given = inputs(script, sizes, device)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(script.build(sizes).train(script.cls is not None))
    nbytes = sum(p.nbytes for p in models[0].parameters())
    models[0].to(device)
    budgets: dict[str, Any] = {}
    if device.type != "cuda":
        budgets = {"hbm": "256MiB", "dram": "256MiB"}
    if script.share is not None:
        budgets["hbm"] = int(nbytes * script.share)
    began = time.perf_counter()
    with tiermem.TierManager(device=device, **budgets) as tier:
        tier.wrap(models[1])
        loops = []
        for model, make in zip(models, (_plain, tier.optimizer), strict=True):
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = script.cls and make(trained, script.cls, lr=1e-4, **script.settings)
            loops.append(Loop(model, optimizer, given))
        row = {"script": name, "GB": nbytes / 1e9, "set up s": time.perf_counter() - began}
        times: tuple[list[float], list[float]] = [], []
        for _ in range(options.warm + options.steps):
            for loop, found in zip(loops, times, strict=True):
                found.append(1e3 * seconds_of(partial(script.act, loop), device)[0])
        tier.close(discard=True)
    plain, mine = (found[options.warm :] for found in times)
    medians = statistics.median(plain), statistics.median(mine)
    return row | {
        "plain ms": min(plain),
        "tiermem ms": min(mine),
        "of plain": min(plain) / min(mine),
        "medians": medians[0] / medians[1],
        "first ms": ", ".join(f"{ms:.0f}" for ms in times[1][:3]),
    }


def _plain(params: list[nn.Parameter], cls: Any, **settings: Any) -> Any:
    return cls(params, **settings)


def main() -> None:
    """Measures the scripts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], help="parts of scripts' names")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm", type=int, default=4, help="steps that do not count")
    parser.add_argument("--set", choices=SETS, default="usual", help="sizes of the models")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", help="JSON file; the same as Markdown beside it")
    options = parser.parse_args()
    device = torch.device(options.device)
    rows: list[Row] = []
    for name in SCRIPTS:
        if not any(part in name for part in options.only):
            continue
        try:
            rows.append(measure(name, options, device))
        except Exception as error:
            traceback.print_exc()
            rows.append({"script": name, "note": failure(error)})
        print(name, rows[-1].get("of plain"), flush=True)
        give_back(device)
    report("Usual scripts beside plain torch", rows, options.out)


if __name__ == "__main__":
    main()
