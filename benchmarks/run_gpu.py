"""Every figure that has to be reached on one GPU, from one command.

Each step is a process of its own with a time limit; one that fails or takes too long does not
keep the others from running, and leaves what it had. The most important come first, and at
the end stands a table of what is required and what was reached.

    python benchmarks/run_gpu.py --folder /mnt/nvme --results benchmarks/results --name h200
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gpu_train
from common import report
from required import Check, Results, Rows, Step, cell, most_of

HERE = Path(__file__).parent


_TINY = "--device cpu --shape tiny"
_TIERS = "--hbm 300KiB --dram 8MiB --repeats 2"
_FEW = "--tokens 1 32 --train-tokens 32 --new-tokens 2"
STEPS = (
    Step(
        "stream",
        "bench_stream.py --what forward half --repeats 7 --out {out}stream_%s_{name}.json",
        f"{_TINY} {_TIERS} {_FEW}",
        120,
    ),
    Step(
        "stream-more",
        "bench_stream.py --what train generate --repeats 5 --out {out}stream_%s_{name}.json",
        f"{_TINY} {_TIERS} {_FEW}",
        100,
    ),
    Step(
        "nvme",
        "bench_stream.py --what train forward --shape 1b --hbm 1.25GiB --dram 512MiB --repeats 5 "
        "--nvme {folder} --tokens 16384 1 --out {out}nvme_%s_{name}.json",
        f"{_TINY} {_TIERS} {_FEW} --dram 600KiB",
        90,
    ),
    Step("host", "bench_host.py --out {out}host_{name}.json", f"{_TINY} --repeats 3", 45),
    Step(
        "memory",
        "bench_memory.py --out {out}memory_{name}.json",
        f"{_TINY} --hbm 1MiB --dram 8MiB --steps 2 --tokens 8",
        60,
    ),
    Step(
        "memory-torch",
        "bench_memory.py --model encoder --out {out}memory_torch_{name}.json",
        f"{_TINY} --hbm 1MiB --dram 8MiB --steps 2 --tokens 8",
        60,
    ),
    Step("peers", "peers.py --out {out}peers_{name}.json", f"{_TINY} {_TIERS} {_FEW}", 300),
    Step(
        "peers-half",
        "peers.py --half --tokens 1 2048 --train-tokens --new-tokens 0 "
        "--out {out}peers_half_{name}.json",
        f"{_TINY} {_TIERS} --tokens 8",
        150,
    ),
    Step(
        "links",
        "bench_links.py --folder {folder} --startup-size 4GiB --repeats 5 --disk-rounds 1 "
        "--chunks 4MiB --depths 4 8 16 --no-fio --out {out}links_{name}.json",
        "--device cpu --size 1MiB --startup-size 1MiB --repeats 1 --chunks 256KiB --depths 4",
        60,
    ),
    Step(
        "peers-nvme",
        "peers.py --shape 1b --hbm 1.25GiB --dram 512MiB --nvme {folder} --new-tokens 0 "
        "--tokens 1 16384 --out {out}peers_nvme_{name}.json",
        f"{_TINY} {_TIERS} --tokens 8 --train-tokens",
        120,
    ),
    Step(
        "bench",
        "-m tiermem bench --nvme {folder} --picture {out}bench_{name}.png",
        "--device cpu --size 1MiB --repeat 1",
        40,
    ),
    *gpu_train.STEPS,
)


def times_as_fast(kind: str, as_what: str) -> Callable[[Results], float | None]:
    """Returns what reads how often a streamed call fits into another column, where it is least.

    Args:
        kind: Of results.
        as_what: The column: seconds of the resident call, or of a raw read of all layers. (Not of
            a raw read of what moved: a plan that moves less may have the disk rest.)
    """

    def read(results: Results) -> float | None:
        rows = [row for row in results.rows(kind) if as_what in row and "tiermem s" in row]
        return min((row[as_what] / row["tiermem s"] for row in rows), default=None)

    return read


def all_equal(*kinds: str) -> Callable[[Results], float | None]:
    """Returns what reads the share of rows whose bits are those of the resident run."""

    def read(results: Results) -> float | None:
        found = [v for kind in kinds for v in results.pick(kind, "equal")]
        agree = [v for kind in kinds for v in results.pick(kind, "resident again equal")]
        return sum(map(bool, [*found, *agree])) / len([*found, *agree]) if found else None

    return read


def startup_gain(results: Results) -> float | None:
    """Returns how many times faster the arena starts than cudaHostAlloc."""
    found = {
        row["how"].split(",")[0]: row["s per GiB"]
        for row in results.rows("links")
        if "s per GiB" in row
    }
    mine, theirs = found.get("HostArena"), found.get("cudaHostAlloc")
    return theirs / mine if mine and theirs else None


def beside(kind: str, peer: str) -> Callable[[Results], float | None]:
    """Returns what reads how many times faster tiermem is than a peer, where it is least."""

    def read(results: Results) -> float | None:
        rows = {row["what"]: row for row in results.rows(kind)}
        mine, theirs = rows.get("tiermem", {}), rows.get(peer, {})
        columns = [c for c in mine if c.endswith(" s") and c in theirs]
        return min((theirs[c] / mine[c] for c in columns), default=None)

    return read


_DRAM = ("stream_forward", "stream_half", "stream_train", "stream_generate")
_NVME = ("nvme_train", "nvme_forward")
CHECKS = (
    *(
        Check(
            f"forward, DRAM, {tokens} tokens",
            cell("stream_forward", "of bound", tokens=tokens),
            least,
        )
        for tokens, least in ((1, 0.98), (2048, 0.98), (8192, 0.97), (16384, 0.99))
    ),
    *(
        Check(f"half in HBM, {tokens} tokens", cell("stream_half", "of bound", tokens=tokens), 0.97)
        for tokens in (1, 2048, 8192, 16384)
    ),
    Check("forward + backward, of in-HBM speed", times_as_fast("stream_train", "in HBM s"), 0.98),
    Check("the same, NVMe, of the bound", cell("nvme_train", "of bound", tokens=16384), 0.95),
    Check(
        "forward, NVMe, of a raw read of all layers, least",
        times_as_fast("nvme_forward", "raw read of all s"),
        1,
    ),
    Check("generate(), of the raw copy of what moves", cell("stream_generate", "of raw"), 0.97),
    Check(
        "generate(), of the raw copy of the layers", cell("stream_generate", "of raw, layers"), 0.97
    ),
    Check(
        "HBM above the budget, MiB, tensors", most_of("above budget MiB", *_DRAM, *_NVME), most=64
    ),
    Check(
        "the same, as the device counts it",
        most_of("above budget, device MiB", *_DRAM, *_NVME),
        most=64,
    ),
    Check(
        "host memory beyond budget and torch, MiB",
        cell("memory", "beyond torch MiB", process="tiered"),
        most=256,
    ),
    Check(
        "the same, model of torch's own layers",
        cell("memory_torch", "beyond torch MiB", process="tiered"),
        most=256,
    ),
    Check(
        "the same beyond a resident model's process",
        cell("memory", "beyond resident MiB", process="tiered"),
        most=256,
    ),
    Check(
        "host time per block, streamed, us", cell("host", "us per block", what="streamed"), most=80
    ),
    Check(
        "the same beyond the driver's calls, us",
        cell("host", "hooks and scheduling us", what="streamed"),
        most=80,
    ),
    Check(
        "host time per block, resident, us", cell("host", "us per block", what="resident"), most=80
    ),
    Check("arena's start beside cudaHostAlloc, times", startup_gain, 4),
    Check("bits as resident, share of rows", all_equal(*_DRAM, *_NVME), 1),
    Check("times faster than accelerate, least", beside("peers", "accelerate offload"), 1),
    Check("times faster than diffusers, least", beside("peers", "diffusers group offloading"), 1),
    Check("times faster than FSDP2, least", beside("peers", "FSDP2 CPUOffloadPolicy"), 1),
    Check("times faster than DeepSpeed, least", beside("peers", "DeepSpeed ZeRO-3"), 1),
    Check("half: times faster than accelerate", beside("peers_half", "accelerate offload"), 1),
    Check(
        "half: times faster than diffusers", beside("peers_half", "diffusers group offloading"), 1
    ),
    Check("NVMe: times faster than accelerate", beside("peers_nvme", "accelerate offload"), 1),
    Check(
        "NVMe: times faster than diffusers", beside("peers_nvme", "diffusers group offloading"), 1
    ),
    *gpu_train.CHECKS,
)


def command(step: Step, options: argparse.Namespace) -> list[str]:
    """Returns the command of a step."""
    out = f"{options.results}{os.sep}"
    line = step.line.format(folder=options.folder, out=out, name=options.name).split()
    line = [part.replace("%s", "{what}") for part in line]
    if line[0] != "-m":
        line[0] = str(HERE / line[0])
    return [sys.executable, *line, *(step.small.split() if options.small else [])]


def run_step(step: Step, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Runs a step in at most so many seconds; returns what became of it."""
    line = command(step, options)
    print(f"\n== {step.name}: {' '.join(line[1:])}", flush=True)
    began = time.perf_counter()
    root = str(HERE.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if options.small:  # figures of tiny copies are not to become this machine's profile
        settings["TIERMEM_PROFILE"] = str(options.results / f"profile_{options.name}.json")
    process = subprocess.Popen(line, env=settings, start_new_session=True)
    try:
        ended = f"exit {process.wait(seconds)}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # with the processes that it may have started
        process.wait()
        ended = f"stopped after {seconds:.0f} s"
    took = time.perf_counter() - began
    print(f"== {step.name}: {ended}, {took:.1f} s", flush=True)
    return {"step": step.name, "ended": ended, "seconds": took}


def run(options: argparse.Namespace, steps: Sequence[Step]) -> Rows:
    """Runs the steps one after the other, within the time there is."""
    until = time.perf_counter() + options.seconds
    done = []
    for step in steps:
        left = until - time.perf_counter()
        if left < min(10, options.seconds / 2):
            done.append({"step": step.name, "ended": "no time left", "seconds": 0.0})
            continue
        done.append(run_step(step, options, min(step.seconds, left)))
    return done


def main() -> int:
    """Runs every step and prints what is required and what was reached."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=".", help="on the disk to measure")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder")
    parser.add_argument("--name", default="gpu", help="ends the names of the results")
    parser.add_argument("--seconds", type=float, default=420.0, help="for everything together")
    groups = list(dict.fromkeys(step.group for step in STEPS))
    parser.add_argument("--group", nargs="*", default=["stream"], choices=groups)
    parser.add_argument("--only", nargs="*", default=None, help="steps of the groups, by name")
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU, as a test")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    since = time.time() - 1
    chosen = [step for step in STEPS if step.group in options.group]
    if options.only is not None:
        chosen = [step for step in chosen if step.name in options.only]
    done = run(options, chosen)
    results = Results(options.results, options.name, since)
    rows = [check.row(results) for check in CHECKS if check.group in options.group]
    required = "_".join(["required", *(g for g in options.group if g != "stream")])
    print()
    report(
        "Required and reached",
        rows,
        str(options.results / f"{required}_{options.name}.json"),
        steps=done,
    )
    print(", ".join(f"{d['step']} {d['seconds']:.0f} s ({d['ended']})" for d in done))
    return 0 if all(d["ended"] == "exit 0" for d in done) else 1


if __name__ == "__main__":
    raise SystemExit(main())
