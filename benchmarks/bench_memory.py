"""Host memory of a process that streams, beyond its DRAM budget and beyond what torch takes.

Each figure is of a process of its own: python with torch and a CUDA context; the same with
a resident model (which adds its libraries); the same model wrapped and run. Models are made
on the device, so that their weights never were in host memory. What counts is the resident
set of ``/proc/self/smaps_rollup``; page-locked memory is part of it, and unlike the
proportional set it does not depend on which processes run at the same time.

With ``--model llama`` the model's own library comes on top of torch in two of the three; with
``--model encoder``, layers of ``torch.nn``, nothing does.

    python benchmarks/bench_memory.py --model encoder --out benchmarks/results/memory_h200.json
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

STATES = ("torch", "resident", "tiered")
MODELS = ("llama", "encoder")

Call = Callable[[], tuple[Any, ...]]


def host_memory() -> dict[str, int]:
    """Returns this process's resident, proportional and private bytes, and its swapped ones."""
    found = {}
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
        name, value, *_ = line.split()
        found[name.rstrip(":")] = int(value) * 1024
    private = found["Private_Clean"] + found["Private_Dirty"]
    return {"rss": found["Rss"], "pss": found["Pss"], "private": private, "swap": found["Swap"]}


def child(options: argparse.Namespace) -> dict[str, Any]:
    """Brings this process into the state asked for and returns its memory."""
    import torch

    device = torch.device(options.device)
    square = torch.ones(256, 256, device=device, dtype=torch.bfloat16)
    (square @ square).sum().item()  # the context, and the libraries that every model loads
    if options.state == "torch":
        return {**host_memory(), "budget": 0}
    model, call = (llama if options.model == "llama" else encoder)(options, device)
    if options.state == "resident":
        return {**steps(call, options.steps), "budget": 0}
    import tiermem
    from tiermem.config import parse_size

    with tiermem.TierManager(
        device,
        hbm=options.hbm,
        dram=options.dram,
        nvme=options.nvme,
        policy=tiermem.Policy(params="nvme" if options.nvme else "dram"),
    ) as tier:
        tier.wrap(model)
        return {**steps(call, options.steps), "budget": parse_size(options.dram)}


def llama(options: argparse.Namespace, device: Any) -> tuple[Any, Call]:
    """Returns a Llama of transformers, and what runs it."""
    from llama import build, forward

    model = build(options.shape, device)
    return model, forward(model, options.tokens, device)


def encoder(options: argparse.Namespace, device: Any) -> tuple[Any, Call]:
    """Returns a stack of torch's own layers with the sizes of a Llama's, and what runs it."""
    import torch
    from llama import SHAPES, random_bf16

    sizes = SHAPES[options.shape]
    width = sizes["hidden_size"]
    with random_bf16(device):
        layers = [
            torch.nn.TransformerEncoderLayer(
                width, sizes["heads"], sizes["intermediate_size"], 0.0, batch_first=True
            )
            for _ in range(sizes["num_hidden_layers"])
        ]
        model = torch.nn.Sequential(*layers).eval().requires_grad_(False)
        x = torch.randn(1, options.tokens, width)

    def call() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return (model(x),)

    return model, call


def steps(call: Call, count: int) -> dict[str, int]:
    """Runs the model and returns the memory then."""
    for _ in range(count):
        call()
    call()[0].float().sum().item()  # waits for the device
    gc.collect()
    return host_memory()


def main() -> None:
    """Starts a process per state, all at once, and prints what is between them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", choices=STATES, help="be that process (used by this script)")
    parser.add_argument("--model", default="llama", choices=MODELS)
    parser.add_argument("--shape", default="6.7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hbm", default="2.5GiB")
    parser.add_argument("--dram", default="14GiB")
    parser.add_argument("--nvme", default=None, help="folder: stream from there instead")
    parser.add_argument("--out", default=None)
    options = parser.parse_args()
    if options.state:
        print(json.dumps(child(options)))
        return
    commands = {s: [sys.executable, __file__, *sys.argv[1:], "--state", s] for s in STATES}
    running = {s: subprocess.Popen(c, stdout=subprocess.PIPE) for s, c in commands.items()}
    found: dict[str, dict[str, int]] = {}
    for state, process in running.items():
        said = process.communicate()[0]
        if process.returncode:
            raise SystemExit(f"the process of state {state} failed: {process.returncode}")
        found[state] = json.loads(said.splitlines()[-1])
    from common import report

    rows = []
    for state, values in found.items():
        row: dict[str, Any] = {"process": state}
        row |= {f"{kind} MiB": values[kind] / 2**20 for kind in ("rss", "pss", "private", "swap")}
        row["DRAM budget MiB"] = values["budget"] / 2**20
        for base in STATES[: STATES.index(state)]:
            beyond = values["rss"] - found[base]["rss"] - values["budget"]
            row[f"beyond {base} MiB"] = beyond / 2**20
        rows.append(row)
    what = f"Host memory, {options.model} {options.shape}, {options.steps} forwards"
    report(what, rows, options.out)


if __name__ == "__main__":
    main()
