"""Full training steps by a DeepSpeed configuration: through zero_infinity, by DeepSpeed, plain.

Each runs in a process of its own, so that its memory is its own: ``tiermem`` is
``tiermem.integrations.zero_infinity`` with the file, ``deepspeed`` DeepSpeed with the same file
where it is installed, ``plain`` the same model with everything in HBM, stepped by hand. The first
``--check-steps`` losses are made with deterministic kernels and compared; then steps are timed.

    python benchmarks/bench_zero_infinity.py --tokens 4096 16384 --out results/zero_infinity.json
    python benchmarks/bench_zero_infinity.py --shape 1b --nvme /mnt/nvme --out results/nvme.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_memory import host_memory
from common import failure, integration, report
from llama import SHAPES, Clock, allow_deterministic_products, deterministic, peak_of
from profile_step import profile_step
from torch import Tensor, nn
from training import Data, Loop, Trainer, build, parameters_of, settle_python
from zero3 import AIO, Call, engine_of

zero_infinity = integration("zero_infinity")
KINDS = ("tiermem", "plain", "deepspeed")
Row = dict[str, Any]

_BELOW = {"device": "cpu", "pin_memory": True}
FILE = {
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": _BELOW,
        "offload_param": _BELOW,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 1e5,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
"""The shape of the ZeRO-3 files that projects ship, with everything on the host."""

ARGS = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-4,
    "weight_decay": 0.01,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "bf16": True,
}
"""What fills "auto"."""


class Engine(Trainer):
    """Steps of an engine, of either library.

    Args:
        engine: Its loss is that of the model.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(Call(engine))
        self.engine = engine

    def backward(self, loss: Tensor) -> None:
        """Makes one backward."""
        self.engine.backward(loss)

    def step(self) -> None:
        """Steps; the engine forgets the gradients."""
        self.engine.step()


class Plain(Trainer):
    """Everything in HBM: float32 masters whose gradients are clipped, weights cast from them.

    Args:
        model: In bf16, on its device.
        config: The file, "auto" filled.
    """

    def __init__(self, model: nn.Module, config: dict[str, Any]) -> None:
        super().__init__(model)
        self.params = list(model.parameters())
        self.masters = [p.detach().float().requires_grad_() for p in self.params]
        chosen = config["optimizer"]
        device = str(self.params[0].device)
        make = zero_infinity.optimizers.from_config
        cls, settings = make("plain", chosen["type"], chosen["params"], device)
        self.optimizer = cls(self.masters, **settings)
        self.clip = config["gradient_clipping"]

    @torch.no_grad()
    def step(self) -> None:
        """Clips, steps, casts, and forgets the gradients."""
        for param, master in zip(self.params, self.masters, strict=True):
            master.grad, param.grad = param.grad.float(), None
        if self.clip:
            nn.utils.clip_grad_norm_(self.masters, self.clip)
        self.optimizer.step()
        torch._foreach_copy_(self.params, self.masters)
        for master in self.masters:
            master.grad = None


def filled(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the file with "auto" filled, and its files in the folder that is given."""
    raw: dict[str, Any] = json.loads(json.dumps(FILE))
    if options.config:
        raw = zero_infinity.notation.load(options.config)[0]
    found = zero_infinity.explain(raw, args=ARGS)
    result = _without_auto(raw)
    batch = "train_micro_batch_size_per_gpu"
    result.update({batch: 1, "gradient_accumulation_steps": 1})
    result.pop("train_batch_size", None)
    result["bf16"], result["fp16"] = {"enabled": True}, {"enabled": False}
    result["gradient_clipping"] = next(
        (row.value for row in found if row.option == "gradient_clipping"), 1.0
    )
    result.setdefault("optimizer", {"type": "AdamW", "params": {}})
    params = next((row.value for row in found if row.option == "optimizer.params"), None)
    result["optimizer"]["params"] = dict(params or {"lr": ARGS["learning_rate"]})
    result.pop("scheduler", None)
    if options.nvme:
        folder = {"device": "nvme", "nvme_path": os.path.abspath(options.nvme)}
        zero = result.setdefault("zero_optimization", {"stage": 3})
        for section in ("offload_param", "offload_optimizer"):
            zero[section] = {**zero.get(section, {}), **folder}
        result.setdefault("aio", AIO)
    return result


def _without_auto(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_auto(v) for k, v in value.items() if v != "auto"}
    return value


@contextmanager
def trainer_of(options: argparse.Namespace, kind: str, model: Any) -> Iterator[Trainer]:
    """Opens one of the three."""
    config = filled(options)
    device = torch.device(options.device)
    allow_deterministic_products(device)
    if kind == "plain":
        yield Plain(model, config)
    elif kind == "deepspeed":
        largest = max(p.numel() for p in model.parameters())
        if options.nvme:
            config["zero_optimization"]["offload_param"]["buffer_size"] = largest
        with engine_of(device, lambda: model, lambda _: config) as engine:
            yield Engine(engine)
    else:
        own = {"device": options.device, "hbm": options.hbm, "dram": options.dram}
        own |= {"where": options.where, "overlap": options.overlap}
        engine = zero_infinity.initialize(
            model=model, model_parameters=model.parameters(), config=config, tiermem=own
        )[0]
        try:
            yield Engine(engine)
        finally:
            engine.destroy()


def measure(options: argparse.Namespace, kind: str) -> Row:
    """Makes the steps of one of the three; its losses, seconds and memory."""
    device = torch.device(options.device)
    allow_deterministic_products(device)
    before = host_memory()["rss"]
    model = build(options.shape, device, chunks=options.chunks, layers=options.layers)
    count, vocabulary = parameters_of(model), model.head.out_features
    row: Row = {"kind": kind, "parameters": count, "hbm": options.hbm or "default"}
    with trainer_of(options, kind, model) as trainer:
        del model
        clock = Clock(device)
        for tokens in options.tokens:
            loop = Loop(trainer, Data(tokens, vocabulary, device), 1, clock)
            if tokens == options.tokens[0]:
                with deterministic():
                    row["losses"] = [loss.item() for loss in loop.run(options.check_steps)]
            loop.run(options.warm)
            settle_python()
            seconds = [s for _ in range(options.repeats) for s in loop.turn(options.steps)]
            row[f"{tokens} tokens s"] = statistics.median(seconds)
            row[f"{tokens} tokens max s"] = max(seconds)
            if device.type == "cuda":
                peak = peak_of(partial(loop.run, 1), device)
                row[f"{tokens} tokens peak HBM GB"] = peak.allocated / 1e9
            if options.profile:
                path = f"{options.profile}.{kind}.{tokens}.txt"
                profile_step(partial(loop.run, 1), path, device)
        rss = host_memory()["rss"]
        row |= {"host RSS GB": rss / 1e9, "host bytes per parameter": (rss - before) / count}
        if kind == "tiermem":
            row |= _of_tiers(trainer)
    return row


def _of_tiers(trainer: Any) -> Row:
    stats = trainer.engine.tier.stats()
    row: Row = {f"peak {tier} GB": nbytes / 1e9 for tier, nbytes in stats.peak.items()}
    row["GB kept in HBM"] = stats.kept_in_hbm / 1e9
    optimizer = trainer.engine.optimizer
    row["where"] = optimizer.stepped_where
    row["stepped in backward"] = optimizer.stepped_in_backward
    row["norm of the last gradients"] = trainer.engine.get_global_grad_norm()
    return row


def compare(rows: list[Row], options: argparse.Namespace) -> None:
    """Adds to tiermem's row what it is beside the others'."""
    by = {row["kind"]: row for row in rows if "losses" in row}
    mine = by.get("tiermem")
    if mine is None:
        return
    for kind in ("plain", "deepspeed"):
        other = by.get(kind)
        if other is None:
            continue
        pairs = list(zip(mine["losses"], other["losses"], strict=True))
        mine[f"losses equal {kind}'s"] = all(a == b for a, b in pairs)
        mine[f"losses differ from {kind}'s by"] = max(abs(a - b) / abs(b) for a, b in pairs)
        for tokens in options.tokens:
            key = f"{tokens} tokens s"
            mine[f"{tokens} tokens, times as fast as {kind}"] = other[key] / mine[key]
        mine[f"host memory of {kind}'s"] = mine["host RSS GB"] / other["host RSS GB"]


def main() -> None:
    """Measures and reports."""
    options = _options()
    if options.one:
        Path(options.out).write_text(json.dumps(measure(options, options.one)))
        return
    rows: list[Row] = []
    for kind in options.what:
        part = Path(options.out or "zero_infinity.json").resolve().with_suffix(f".{kind}.part")
        part.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, __file__, *sys.argv[1:], "--one", kind, "--out", str(part)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if part.exists():
            rows.append(json.loads(part.read_text()))
            part.unlink()
        else:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            rows.append({"kind": kind, "failed": failure(RuntimeError(last))})
            print(done.stderr[-4000:], file=sys.stderr)
        compare(rows, options)
        title = f"Full training, Llama {options.shape}, by a DeepSpeed configuration"
        report(title, rows, options.out, tall=True, config=json.dumps(filled(options)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="3b")
    parser.add_argument("--layers", type=int, help="instead of the shape's own")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--chunks", type=int, default=16, help="parts of the loss")
    parser.add_argument("--config", help="a DeepSpeed configuration; by default a common one")
    parser.add_argument("--nvme", help="folder: parameters and optimizer on NVMe")
    parser.add_argument("--hbm", help="tiermem's budget; by default 80%% of what is free")
    parser.add_argument("--dram", help="likewise; by default what the file asks for")
    parser.add_argument("--where", choices=("auto", "device", "host", "both"))
    parser.add_argument("--overlap", choices=("auto", "forward", "backward"))
    parser.add_argument("--what", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--check-steps", type=int, default=3)
    parser.add_argument("--warm", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", metavar="PATH", help="where a step's time goes, to PATH.*.txt")
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--out", help="JSON file; the same as Markdown beside it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
