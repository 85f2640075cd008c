"""Kills training runs that save at random times, resumes them, and compares every loss.

``python tests/sweep_kills.py --kills 300 --seed 1`` trains with ``tiermem train --save DIR
--save-every 1`` under budgets drawn at random, kills each process (SIGKILL) after a random time,
and goes on with ``--resume``. A run that has come to its end has to have the losses of one that
nobody killed, and nothing may lie beside its checkpoint. With ``--jobs 16`` as many go on at once,
each with seeds of its own: 200 kills take about a minute on 16 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from tiermem import cli

STEPS = 30
LINE = (
    "train --device cpu --layers 2 --width 32 --heads 2 --context 16 --batch 2 --accumulate 2 "
    f"--steps {STEPS} --threads 1 --no-compare --quiet"
).split()
BUDGETS = (
    "--hbm 1MiB --dram 8MiB --nvme none",
    "--hbm 512KiB --dram 8MiB --nvme none --overlap",
    "--hbm 512KiB --dram 2MiB --nvme .",
    "--hbm 4MiB --dram 8MiB --nvme none --policy hbm",
)


def train(folder: Path, *more: str) -> int:
    os.chdir(folder)
    return cli.main([*LINE, "--data", str(Path(__file__).parent), "--out", "out", *more])


def losses(folder: Path) -> list[float]:
    report = json.loads((folder / "out" / "report.json").read_text())
    found: list[float] = report["tiered"]["losses"]
    return found


def killed_after(folder: Path, seconds: float, more: list[str]) -> bool:
    """Runs a part of a run in a child; returns whether it came to its end before it was killed."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = train(folder, "--save", "run", "--save-every", "1", "--resume", *more)
        finally:
            os._exit(code)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            if status:
                raise SystemExit(f"a resumed run ended with {status}")
            return True
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def beside_each_other(arguments: argparse.Namespace) -> int:
    """Runs several sweeps, each with its share of the kills; returns 1 where one went wrong."""
    jobs = min(arguments.jobs, arguments.kills)
    began = time.monotonic()
    shares = [(arguments.kills + number) // jobs for number in range(jobs)]
    line = [sys.executable, __file__, "--longest", str(arguments.longest), "--jobs", "1"]
    running = [
        subprocess.Popen(
            [*line, "--kills", str(share), "--seed", str(arguments.seed * 1000 + number)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number, share in enumerate(shares)
    ]
    count: Counter[str] = Counter()
    wrong = 0
    for process in running:
        said = process.communicate()[0]
        if process.returncode:
            wrong = 1
            print(said)
        counted = [line for line in said.splitlines() if line.startswith("{")]
        count.update(json.loads(counted[-1]) if counted else {})
    print(json.dumps(count), f"in {time.monotonic() - began:.0f} s", flush=True)
    return wrong


def main() -> int:
    """Runs the sweep; returns how many runs went wrong, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=6.0, help="seconds until a kill")
    parser.add_argument("--jobs", type=int, default=1, help="sweeps at a time")
    arguments = parser.parse_args()
    if arguments.jobs > 1:
        return beside_each_other(arguments)
    torch.set_num_threads(1)
    rng = random.Random(arguments.seed)
    folder = Path(tempfile.mkdtemp())
    count: Counter[str] = Counter()
    try:
        train(folder, *BUDGETS[0].split())
        expected = losses(folder)
        while count["kills"] < arguments.kills:
            shutil.rmtree(folder / "run", ignore_errors=True)
            shutil.rmtree(folder / "out")
            while not killed_after(
                folder, rng.uniform(0.5, arguments.longest), rng.choice(BUDGETS).split()
            ):
                count["kills"] += 1
            count["runs"] += 1
            left = sorted(path.name for path in folder.iterdir())
            if losses(folder) != expected or left != ["out", "run"]:
                count["wrong"] += 1
                print(f"wrong: {left}\n{losses(folder)}\n{expected}")
            print(json.dumps(count), flush=True)
    finally:
        os.chdir("/")
        shutil.rmtree(folder)
    return min(1, count["wrong"])


if __name__ == "__main__":
    sys.exit(main())
