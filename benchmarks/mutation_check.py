"""Takes out one safeguard after another and shows which tests notice.

Works in a copy of the tree. Exit status 1 if the tests miss any of it (a
mutant survives), or fail without it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("tiermem", "integrations", "tests", "benchmarks", "pyproject.toml")
SECONDS = 240
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def copy_tree(target: Path) -> None:
    """Copies what the tests need."""
    skip = shutil.ignore_patterns("__pycache__", "results", ".hypothesis")
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, target / part, ignore=skip)
        else:
            shutil.copy(source, target / part)


def run_tests(tree: Path, tests: Sequence[str], seconds: int = SECONDS) -> list[str] | None:
    """Runs tests until one fails; returns what failed, or None if all passed."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TIERMEM_POISON": "1",
    }
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--timeout", "120"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            preexec_fn=_hear_ctrl_c,
        )
    except subprocess.TimeoutExpired:
        return [f"no end within {seconds} s"]
    if done.returncode == 0:
        return None
    if done.returncode == 5:  # nothing was collected
        return None
    return _FAILED.findall(done.stdout) or [f"pytest ended with {done.returncode}"]


def _hear_ctrl_c() -> None:
    """Undoes what a shell does to what it starts in the background: some tests send SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def mutate(tree: Path, mutation: Mutation) -> str:
    """Applies a mutation; returns the text that was there before."""
    path = tree / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        raise SystemExit(f"{mutation.file}: not exactly one place to mutate for {mutation.name!r}")
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    return text


def attempt(tree: Path, mutation: Mutation) -> list[str] | None:
    """Returns which tests notice a mutation, or None."""
    before = mutate(tree, mutation)
    try:
        for test in mutation.tests:
            noticed = run_tests(tree, [test])
            if noticed is not None:
                return noticed
        return None
    finally:
        (tree / mutation.file).write_text(before, encoding="utf-8")


def has_gpu() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def check(mutations: Sequence[Mutation], *, baseline: bool) -> int:
    """Tries every mutation; returns how many survive."""
    gpu = has_gpu()
    survivors = tried = 0
    with tempfile.TemporaryDirectory(prefix="tiermem-mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        due = [m for m in mutations if gpu or not m.gpu]
        if baseline:
            tests = list(dict.fromkeys(test for m in due for test in m.tests))
            failed = run_tests(tree, tests, 4 * SECONDS)
            if failed is not None:
                print(f"the tests fail without any mutation: {', '.join(failed)}")
                return 1
        for mutation in mutations:
            if mutation.gpu and not gpu:
                print(f"{'skipped':8} {'':>6}  {mutation.name}: needs a GPU", flush=True)
                continue
            began = time.monotonic()
            noticed = attempt(tree, mutation)
            seconds = time.monotonic() - began
            tried += 1
            survivors += noticed is None
            word = "SURVIVED" if noticed is None else "caught"
            print(f"{word:8} {seconds:5.1f}s  {mutation.name}", flush=True)
            for test in noticed or [f"by {', '.join(mutation.tests)}"]:
                print(f"{'':18}{test}", flush=True)
    print(f"{tried} mutants, {survivors} survived")
    return survivors


def main() -> int:
    """Reads the options and runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutations whose name contains this")
    parser.add_argument("--list", action="store_true", help="list them and stop")
    parser.add_argument(
        "--no-baseline", action="store_true", help="do not run the tests unmutated first"
    )
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if options.only in m.name]
    if options.list:
        for mutation in chosen:
            print(f"{mutation.file}: {mutation.name}{' (GPU)' if mutation.gpu else ''}")
        return 0
    return 1 if check(chosen, baseline=not options.no_baseline) else 0


if __name__ == "__main__":
    sys.exit(main())
