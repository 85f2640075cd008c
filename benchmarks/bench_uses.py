"""Processor time of the uses of blocks in passes that are replayed: whole models, without a GPU.

A pass of the plain model and one of the same model in the tiers take turns; what the second takes
longer, divided by its uses of blocks, is tiermem's own. The models are as deep as those of the
GPU's table and narrow, so that kernels cost little; the sizes by which blocks are made are divided
as the weights are. Copies go through the same engine and the same calls as on CUDA: the driver is a
library of a few lines (made by cc), which copies at once, or, while times are taken, not at all.

    python benchmarks/bench_uses.py [t5] [vit] [bart] [...] [--calls] [--profile] [--train]
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import gc
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tiermem
from tiermem.core import need, parts
from tiermem.nn.groups import hostbound, partition, resident
from tiermem.runtime import assembly
from tiermem.runtime.lookahead.walks import Reach
from tiermem.transfer import driver
from tiermem.transfer.driver import DriverCalls
from tiermem.transfer.streams import StreamCopyEngine

OTHER_CALLS = """
int cuMemsetD8Async(p t, unsigned char v, size_t b, p s) { memset(t, v, b); return 0; }
int cuCtxGetCurrent(p *c) { *c = (p)1; return 0; }
int cuCtxSetCurrent(p c) { return 0; }
int cuCtxPushCurrent_v2(p c) { return 0; }
int cuCtxPopCurrent_v2(p *c) { return 0; }
int cuPointerGetAttribute(p d, int a, p s) { return 1; }
int cuGetErrorName(int c, char **s) { *s = "none"; return 0; }
"""
"""What is answered alike whether time is kept or not, in C."""
_DRIVER = """
#include <string.h>
typedef void *p;
static long n;
int idle = 0;
int cuEventCreate(p *e, unsigned f) { *e = (p)(++n); return 0; }
int cuEventRecord(p e, p s) { return 0; }
int cuEventQuery(p e) { return 0; }
int cuEventSynchronize(p e) { return 0; }
int cuEventElapsedTime(float *t, p a, p b) { *t = 0.01f; return 0; }
int cuEventDestroy_v2(p e) { return 0; }
int cuStreamCreateWithPriority(p *s, unsigned f, int r) { *s = (p)(++n); return 0; }
int cuStreamWaitEvent(p s, p e, p f) { return 0; }
int cuMemcpyAsync(p t, p f, p b, p s) { if (!idle) memcpy(t, f, (size_t)b); return 0; }
"""


class StandInCalls(DriverCalls):
    """The driver's calls, answered on the host: each does at once what it asks for."""

    def __init__(self, device: torch.device, library: str = _DRIVER + OTHER_CALLS) -> None:
        """Compiles the library, and loads it in the driver's place.

        Args:
            device: Of the engine.
            library: Its source, in C.
        """
        with tempfile.TemporaryDirectory() as folder:
            source, made = Path(folder, "driver.c"), Path(folder, "driver.so")
            source.write_text(library)
            subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", made, source], check=True)
            loaded = ctypes.PyDLL(str(made)), ctypes.CDLL(str(made))
        kept = ctypes.PyDLL, ctypes.CDLL, torch.cuda.device, torch.empty
        own: Any = torch._C
        own._cuda_getCurrentRawStream = _stream
        own._cuda_isCurrentStreamCapturing = bool
        try:
            ctypes.PyDLL, ctypes.CDLL = (lambda _: loaded[0]), (lambda _: loaded[1])  # type: ignore[misc, assignment]
            torch.cuda.device = lambda _: torch.no_grad()  # type: ignore[misc, assignment]
            torch.empty = lambda *_, **__: None
            super().__init__(torch.device("cuda", 0))
        finally:
            ctypes.PyDLL, ctypes.CDLL, torch.cuda.device, torch.empty = kept  # type: ignore[misc]

    def synchronize(self) -> None:
        """Everything is over."""


def _never(_key: object) -> bool:
    return False


def _stream(_index: int) -> int:
    return 7


@contextmanager
def stand_in() -> Iterator[StandInCalls]:
    """Gives managers of the CPU the engine of CUDA's copies, over :class:`StandInCalls`."""
    calls = StandInCalls(torch.device("cuda", 0))
    engine = StreamCopyEngine(calls, *(calls.new_stream() for _ in "abc"))
    kept = driver._current_device, assembly.HostCopyEngine
    driver._current_device = lambda: 0
    assembly.HostCopyEngine = lambda: engine  # type: ignore[misc, assignment]
    try:
        yield calls
    finally:
        driver._current_device, assembly.HostCopyEngine = kept  # type: ignore[misc]


def as_on_cuda(tier: Any, by: int) -> None:
    """Makes a manager of the CPU fetch ahead, and not look after memory as on the CPU."""
    manager = tier._manager
    manager.parts.transfers.poisons = False
    manager._heap = None
    manager.prefetcher.fetcher.beside = True
    least = min((64 << 20) // by, manager.parts.table.hbm.capacity // 4)
    manager.prefetcher._reach = Reach(None, least)
    manager.prefetcher._maker._least = least


class Layers(nn.Module):
    """Small layers, each of them with two matrices, one after another."""

    def __init__(self, layers: int = 120, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Runs them.

        Args:
            x: (batch, width).
        """
        for layer in self.layers:
            x = x + layer(x)
        return x


Case = tuple[nn.Module, Callable[[nn.Module], Any], int]
"""A model, what is asked of it, and by how much its weights are smaller than real ones."""


def asked(model: nn.Module, result: str, by: int, **inputs: torch.Tensor) -> Case:
    """Returns a model of transformers that is called with ``inputs``.

    Args:
        model: The model.
        result: What is taken of its output.
        by: By how much its weights are smaller.
        inputs: Arguments of its calls, by name.
    """
    return model, lambda m: getattr(m(**inputs), result), by


def t5() -> Case:
    """Returns a T5 of 24 and 24 layers, its pass of one token, and by what its weights are less."""
    import transformers

    config = transformers.T5Config(
        vocab_size=2008,
        d_model=96,
        d_ff=256,
        d_kv=16,
        num_heads=6,
        num_layers=24,
        num_decoder_layers=24,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
        use_cache=False,
    )
    ids = torch.ones(1, 1, dtype=torch.long)
    model = transformers.T5ForConditionalGeneration(config).bfloat16()
    return asked(model, "logits", 256, input_ids=ids, decoder_input_ids=ids)


def vit() -> Case:
    """Returns a ViT of 32 layers likewise."""
    import transformers

    config = transformers.ViTConfig(
        hidden_size=80,
        intermediate_size=320,
        num_hidden_layers=32,
        num_attention_heads=16,
        image_size=32,
        patch_size=16,
    )
    pixels = torch.rand(1, 3, 32, 32)
    model = transformers.ViTModel(config)
    return asked(model, "last_hidden_state", 256, pixel_values=pixels)


def bart() -> Case:
    """Returns a BART of 24 and 24 layers likewise."""
    import transformers

    config = transformers.BartConfig(
        vocab_size=3000,
        d_model=64,
        encoder_layers=24,
        decoder_layers=24,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        encoder_attention_heads=16,
        decoder_attention_heads=16,
        use_cache=False,
    )
    ids = torch.ones(1, 1, dtype=torch.long)
    model = transformers.BartForConditionalGeneration(config).bfloat16()
    return asked(model, "logits", 256, input_ids=ids, decoder_input_ids=ids)


def swin() -> Case:
    """Returns a Swin of 30 layers likewise."""
    import transformers

    config = transformers.SwinConfig(
        image_size=64, embed_dim=16, depths=[2, 2, 24, 2], num_heads=[1, 2, 4, 8], window_size=2
    )
    pixels = torch.rand(1, 3, 64, 64)
    model = transformers.SwinModel(config)
    return asked(model, "last_hidden_state", 128, pixel_values=pixels)


def deberta() -> Case:
    """Returns a DeBERTa of 24 layers likewise."""
    import transformers

    config = transformers.DebertaV2Config(
        vocab_size=2000,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=24,
        num_attention_heads=16,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
    )
    ids = torch.ones(1, 1, dtype=torch.long)
    model = transformers.DebertaV2Model(config).bfloat16()
    return asked(model, "last_hidden_state", 256, input_ids=ids)


def layers() -> Case:
    """Returns 120 small layers; each is a block."""
    x = torch.rand(1, 64)
    return Layers(), lambda m: m(x), 800


def lora() -> Case:
    """Returns a Llama of 32 layers with adapters, whose layers are computed again in backward."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=32,
        num_attention_heads=4,
        use_cache=False,
    )
    ids = torch.ones(1, 4, dtype=torch.long)
    model = transformers.LlamaForCausalLM(config).bfloat16()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.requires_grad_(False)
    tiermem.add_adapters(model, tiermem.Lora(r=2, target_modules=["q_proj", "v_proj"]))
    return asked(model, "logits", 4096, input_ids=ids)


KINDS = {
    "t5": t5,
    "vit": vit,
    "layers": layers,
    "bart": bart,
    "swin": swin,
    "deberta": deberta,
    "lora": lora,
}


@contextmanager
def smaller(by: int, vectors: int = 1) -> Iterator[None]:
    """Divides the sizes by which blocks are made.

    Args:
        by: What the weights are less by.
        vectors: By how much less vectors are divided: they are smaller by the width alone.
    """
    places: list[tuple[Any, str]] = [
        *(
            (partition, name)
            for name in ("_FINEST", "_COARSEST", "_RUN", "_RUN_TRAINED", "_PARTS", "_SMALL")
        ),
        (resident, "_LITTLE"),
        (hostbound, "_FASTEST"),
        (need, "_LEAST_UNIT"),
        (need, "LARGEST_WHOLE"),
        (parts, "_LEAST"),
        (parts, "_USUAL"),
    ]
    kept = [getattr(module, name) for module, name in places]
    try:
        for (module, name), value in zip(places, kept, strict=True):
            setattr(module, name, max(1, value // by * (vectors if name == "_SMALL" else 1)))
        yield
    finally:
        for (module, name), value in zip(places, kept, strict=True):
            setattr(module, name, value)


def python_calls(call: Callable[[], Any]) -> Counter[str]:
    """Returns the calls of Python functions of tiermem in a call, by file and name."""
    found: Counter[str] = Counter()
    root = str(Path(tiermem.__file__).parent)

    def look(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root):
            found[f"{code.co_filename[len(root) + 1 :]}:{code.co_name}"] += 1
        elif event == "c_call" and frame.f_code.co_filename.startswith(root):
            found[f"C {getattr(argument, '__qualname__', argument)}"] += 1

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def python_instructions(call: Callable[[], Any]) -> Counter[str]:
    """Returns the instructions of Python that tiermem executes in a call, by file and function."""
    found: Counter[str] = Counter()
    root = str(Path(tiermem.__file__).parent)

    def look(frame: Any, event: str, _argument: Any) -> Any:
        code = frame.f_code
        if event == "opcode":
            found[f"{code.co_filename[len(root) + 1 :]}:{code.co_name}"] += 1
        elif event == "call":
            if not code.co_filename.startswith(root):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return look

    sys.settrace(look)
    try:
        call()
    finally:
        sys.settrace(None)
    return found


def timed(call: Callable[[], Any]) -> float:
    """Returns the processor's seconds of a call: others may use the machine."""
    began = time.thread_time()
    call()
    return time.thread_time() - began


def measure(name: str, options: argparse.Namespace) -> None:
    """Measures one model, and prints a line of it."""
    torch.manual_seed(0)
    plain, use, by = KINDS[name]()
    torch.manual_seed(0)
    model, _, _ = KINDS[name]()
    for one in (plain, model):
        one.train(options.train)
        if name != "lora":
            one.requires_grad_(options.train)
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    state = 4 if options.train and name != "lora" else 1
    budget = int(nbytes * options.hbm) // 4096 * 4096 * state
    room = {"hbm": budget, "dram": 12 * nbytes + (1 << 24)}
    vectors = isqrt(by) if name == "lora" else 1
    with smaller(by, vectors), stand_in() as calls, tiermem.TierManager("cpu", **room) as tier:
        as_on_cuda(tier, by)
        optimizer: Any = None
        if options.train:
            own = torch.optim.AdamW(plain.parameters(), lr=1e-4)
        tier.wrap(model)
        if options.train:
            optimizer = tier.optimizer(model, torch.optim.AdamW, lr=1e-4)

        def run(which: nn.Module, steps: Any) -> Any:
            torch.manual_seed(0)  # dropout draws the same numbers in both
            if steps is None:
                with torch.no_grad():
                    return use(which)
            loss = use(which).float().square().mean()
            loss.backward()
            steps.step()
            steps.zero_grad()
            return loss.detach()

        def mine() -> Any:
            return run(model, optimizer)

        def theirs() -> Any:
            return run(plain, own if options.train else None)

        for _ in range(options.warm):
            mine()
            theirs()
        if not options.sample:  # nor is a plan made anew for what a busy machine makes of times
            tier._manager.parts.pass_timer.estimates.wants = _never
        for _ in range(8):
            mine()
            theirs()
        if not torch.equal(mine(), theirs()):
            print("  BITS DIFFER")
        ctypes.c_int.in_dll(calls._lib, "idle").value = 1  # a GPU's engine copies, not the host
        gc.collect()
        gc.disable()
        tier.reset_stats()
        pairs, whole, swift = [], [], []
        replay = tier._manager.replay
        for _ in range(options.repeats):
            whole.append(timed(theirs))
            pairs.append(timed(mine))
            if replay.repeating:
                swift.append(pairs[-1])
        stats = tier.stats()
        gc.enable()
        uses = (stats.hits + stats.misses) / options.repeats
        copies = sum(link.moves for link in stats.links.values()) / options.repeats
        extra = statistics.median(pairs) - statistics.median(whole)
        print(
            f"{name}: uses {uses:.0f}, copies {copies:.0f}, misses {stats.misses}; plain "
            f"{statistics.median(whole) * 1e3:.2f} ms (least {min(whole) * 1e3:.2f}), tiermem "
            f"{statistics.median(pairs) * 1e3:.2f} (least {min(pairs) * 1e3:.2f}); "
            f"{extra / uses * 1e6:.1f} us a use, {extra * 1e3:.2f} ms a pass; of the least "
            f"{(min(pairs) - min(whole)) / uses * 1e6:.1f} us a use",
            flush=True,
        )
        if swift:
            extra = statistics.median(swift) - statistics.median(whole)
            least = min(swift) - min(whole)
            print(
                f"  {len(swift)} of {options.repeats} passes replayed and not measured: "
                f"{extra / uses * 1e6:.1f} us a use, {extra * 1e3:.2f} ms a pass; of the least "
                f"{least / uses * 1e6:.1f} us a use",
                flush=True,
            )
        looked = options.calls or options.profile
        while looked and not options.train and not (mine(), replay.repeating)[1]:
            pass
        if options.calls:
            found = python_calls(mine)
            python = sum(n for key, n in found.items() if not key.startswith("C "))
            print(f"  calls a use: {python / uses:.1f} of Python, {sum(found.values()) / uses:.1f}")
            print(f"  calls a pass: {python} of Python, {sum(found.values())}")
            for key, number in found.most_common(options.lines):
                print(f"    {number / uses:6.2f} {number:6d}  {key}")
            counted = python_instructions(mine)
            print(f"  instructions a use: {sum(counted.values()) / uses:.0f}")
            print(f"  instructions a pass: {sum(counted.values())}")
            for key, number in counted.most_common(options.lines):
                print(f"    {number / uses:6.1f} {number:6d}  {key}")
        if options.profile:
            profile = cProfile.Profile()
            profile.enable()
            for _ in range(20):
                mine()
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(options.lines)


def main() -> None:
    """Measures the models that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=[])
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--warm", type=int, default=20)
    parser.add_argument("--lines", type=int, default=40)
    parser.add_argument("--hbm", type=float, default=0.25, help="as a part of the weights")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--calls", action="store_true", help="count calls and instructions")
    parser.add_argument("--sample", action="store_true", help="let passes be measured by tiermem")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.kinds or KINDS:
        measure(name, options)


if __name__ == "__main__":
    main()
