"""Llama shapes of random weights, what is run on them, and the clocks and meters around it."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

Call = Callable[[], tuple[torch.Tensor, ...]]

SHAPES = {
    "6.7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "heads": 32},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "heads": 24},
    "1b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 8, "heads": 24},
    "narrow": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 32, "heads": 4},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "heads": 4},
}
"""``narrow`` has as many blocks as ``6.7b`` and next to no bytes in them."""

LONGEST = 4096


def config_of(
    shape: str, *, layers: int | None = None, kv_heads: int | None = None, **settings: Any
) -> Any:
    """Returns the transformers configuration of a shape.

    Args:
        shape: A key of ``SHAPES``.
        layers: How many layers instead of the shape's own.
        kv_heads: How many key and value heads instead of as many as there are others.
        **settings: Further ones.
    """
    from transformers import LlamaConfig

    sizes = dict(SHAPES[shape])
    heads = sizes.pop("heads")
    if layers:
        sizes["num_hidden_layers"] = layers
    return LlamaConfig(
        vocab_size=32000 if sizes["hidden_size"] > 256 else 128,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads,
        max_position_embeddings=LONGEST,
        use_cache=False,
        tie_word_embeddings=False,
        **sizes,
        **settings,
    )


@contextmanager
def random_bf16(device: torch.device) -> Iterator[None]:
    """Modules made inside are bf16 on the device, with the same random weights every time."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def build(shape: str, device: torch.device, *, head: bool = False) -> Any:
    """Returns a bf16 Llama of random weights, made on the device itself.

    Args:
        shape: A key of ``SHAPES``.
        device: Where.
        head: Whether with the language model's head, to ``generate()``.
    """
    from transformers import LlamaForCausalLM, LlamaModel

    config = config_of(shape, attn_implementation="sdpa")
    with random_bf16(device):
        model = (LlamaForCausalLM if head else LlamaModel)(config)
    return model.eval().requires_grad_(False)


def nbytes_of(tensors: Iterator[torch.Tensor]) -> int:
    """Returns the bytes of tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def layers_of(model: Any) -> torch.nn.ModuleList:
    """Returns a Llama's decoder layers, with the head or without."""
    return getattr(model, "model", model).layers


def budget_of(model: Any, share: float) -> int:
    """Returns a share of the bytes of the layers' blocks, and all of what lies outside them.

    Blocks are whole pages; buffers, and tensors within a block, take whole 256 bytes.
    """

    def block(tensors: Iterator[torch.Tensor]) -> int:
        packed = sum(-(-t.numel() * t.element_size() // 256) * 256 for t in tensors)
        return -(-packed // 4096) * 4096

    layers = layers_of(model)
    inside = sum(block(layer.parameters()) for layer in layers)
    mine = {id(p) for p in layers.parameters()}
    outside = sum(block(iter([p])) for p in model.parameters() if id(p) not in mine)
    outside += sum(block(iter([b])) for b in model.buffers())
    return int(inside * share) + outside


def sequences(tokens: int) -> tuple[int, int]:
    """Returns how many sequences so many tokens are in, and their length: at most 4,096."""
    length = min(tokens, LONGEST)
    return max(1, tokens // length), length


def inputs(model: Any, tokens: int, device: torch.device) -> torch.Tensor:
    """Returns token ids, the same every time."""
    made = torch.Generator().manual_seed(tokens)
    vocabulary = model.config.vocab_size
    return torch.randint(0, vocabulary, sequences(tokens), generator=made).to(device)


def forward(model: Any, tokens: int, device: torch.device) -> Call:
    """Returns a call that runs the model once without gradients."""
    ids = inputs(model, tokens, device)

    def call() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return (model(input_ids=ids).last_hidden_state,)

    return call


def both_ways(model: Any, tokens: int, device: torch.device) -> Call:
    """Returns a call of forward and backward with recomputation; the weights are frozen."""
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    config = model.config
    made = torch.Generator(device).manual_seed(tokens)
    draw = partial(torch.randn, dtype=torch.bfloat16, device=device, generator=made)
    shape = (*sequences(tokens), config.hidden_size)
    # Not the embedding's own output: called alone, some peers' weights are not on the device.
    embedded = (draw(shape) * config.initializer_range).requires_grad_()
    seed = draw(shape)

    def call() -> tuple[torch.Tensor, ...]:
        embedded.grad = None
        output = model(inputs_embeds=embedded).last_hidden_state
        output.backward(seed)
        return output.detach(), embedded.grad

    return call


def generation(model: Any, new_tokens: int, device: torch.device) -> Call:
    """Returns a call of ``generate()``, batch 1, 32 tokens of prompt, greedy, with a KV cache."""
    prompt = inputs(model, 32, device)
    model.generation_config.eos_token_id = None  # always as many tokens as asked for
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "use_cache": True}

    def call() -> tuple[torch.Tensor, ...]:
        mask = torch.ones_like(prompt)
        return (model.generate(prompt, attention_mask=mask, pad_token_id=0, **settings),)

    return call


def allow_deterministic_products(device: torch.device) -> None:
    """Makes cuBLAS pass torch's check for deterministic algorithms; call it before any product.

    torch asks once whether ``CUBLAS_WORKSPACE_CONFIG`` is set, but as long as it is parses it
    again, with a regular expression, at every product: on the host of an H200 that made a
    forward of a vision transformer take 30 ms instead of 11. The workspace itself is torch's
    own, one for each stream, which is what cuBLAS asks for (cuBLAS documentation, "Results
    reproducibility").
    """
    if device.type != "cuda":
        return
    name = "CUBLAS_WORKSPACE_CONFIG"
    before = os.environ.get(name)
    os.environ[name] = ":4096:8"
    small = torch.ones(8, 8, device=device)
    torch.mm(small, small)
    if before is None:
        del os.environ[name]
    else:
        os.environ[name] = before


@contextmanager
def deterministic() -> Iterator[None]:
    """Makes torch choose kernels that give the same bits every time.

    Only flash attention and the plain one are left: torch makes the first deterministic
    in backward under ``use_deterministic_algorithms(True)``, but not with ``warn_only``.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False  # would cost time and no more
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def same(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> bool:
    """Whether tensors are equal, element by element, compared where ``first`` is."""
    return len(first) == len(second) and all(
        torch.equal(a, b.to(a.device)) for a, b in zip(first, second, strict=True)
    )


def on_host(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Returns copies in host memory, so that they take nothing of the device's."""
    return tuple(t.detach().to("cpu", copy=True) for t in tensors)


class Clock:
    """Times calls on the device, or on the host where there is none."""

    def __init__(self, device: torch.device) -> None:
        """Remembers the device."""
        self.device = device
        self.cuda = device.type == "cuda"

    def wait(self) -> None:
        """Waits until the device is through."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def once(self, call: Callable[[], Any]) -> float:
        """Returns the seconds of one call."""
        self.wait()
        began = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - began

    def time(self, call: Callable[[], Any], repeats: int, warm: int = 2) -> list[float]:
        """Returns seconds per call."""
        for _ in range(warm):
            call()
        return [self.once(call) for _ in range(repeats)]


@dataclass(frozen=True)
class Peak:
    """The device's memory over one call, in bytes; all 0 where there is no device.

    Attributes:
        allocated: The most that tensors had.
        device: What the device says is in use afterwards, the allocator's reserves included.
    """

    allocated: int = 0
    device: int = 0


def peak_of(call: Callable[[], Any], device: torch.device) -> Peak:
    """Returns the most memory over a call that has run before (its kernels are loaded)."""
    if device.type != "cuda":
        return Peak()
    give_back(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return Peak(torch.cuda.max_memory_allocated(device), total - free)


def give_back(device: torch.device) -> None:
    """Frees what nothing uses any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
