"""Takes out one safeguard after another and shows which tests notice.

Works in copies of the tree, one for each job. Tests that fail without any mutation (for want of
io_uring, say) are named first, and left out of what follows; mutants that only a GPU can tell are
skipped where there is none. Exit status 1 if the tests miss any of it (a mutant survives).

    python benchmarks/mutation_check.py --jobs 16
    python benchmarks/mutation_check.py --jobs 8 --part 2/3
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
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

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


def run_tests(
    tree: Path,
    tests: Sequence[str],
    seconds: int = SECONDS,
    *,
    without: Collection[str] = (),
    to_the_end: bool = False,
) -> list[str] | None:
    """Runs tests; returns what failed, or None if all passed.

    Args:
        tree: A copy of the tree.
        tests: Files.
        seconds: After which they count as failed.
        without: Tests that are left out.
        to_the_end: Whether to go on after the first that fails.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TIERMEM_POISON": "1",
    }
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow", "--timeout", "120"]
    options += ["--every-variant"]
    options += [] if to_the_end else ["-x"]
    options += [option for test in without for option in ("--deselect", test)]
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


def attempt(tree: Path, mutation: Mutation, without: Collection[str] = ()) -> list[str] | None:
    """Returns which tests notice a mutation, or None; some may be left out."""
    before = mutate(tree, mutation)
    try:
        for test in mutation.tests:
            noticed = run_tests(tree, [test], without=without)
            if noticed is not None:
                return noticed
        return None
    finally:
        (tree / mutation.file).write_text(before, encoding="utf-8")


def has_gpu() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


class Trees:
    """Copies of the tree, each for one job at a time."""

    def __init__(self, folder: Path, count: int) -> None:
        """Makes ``count`` copies in a folder."""
        self._free: SimpleQueue[Path] = SimpleQueue()
        for number in range(count):
            tree = folder / str(number)
            tree.mkdir()
            copy_tree(tree)
            self._free.put(tree)

    @contextmanager
    def one(self) -> Iterator[Path]:
        """Yields one that no other thread has meanwhile."""
        tree = self._free.get()
        try:
            yield tree
        finally:
            self._free.put(tree)


def failing(trees: Trees, pool: ThreadPoolExecutor, mutations: Sequence[Mutation]) -> list[str]:
    """Returns the tests that fail without any mutation."""

    def run(test: str) -> list[str] | None:
        with trees.one() as tree:
            return run_tests(tree, [test], 4 * SECONDS, to_the_end=True)

    files = dict.fromkeys(test for mutation in mutations for test in mutation.tests)
    return [test for failed in pool.map(run, files) for test in failed or ()]


def check(mutations: Sequence[Mutation], *, baseline: bool, jobs: int = 1) -> int:
    """Tries every mutation; returns how many survive."""
    gpu = has_gpu()
    survivors = 0
    due = [mutation for mutation in mutations if gpu or not mutation.gpu]
    for mutation in mutations:
        if mutation not in due:
            print(f"{'skipped':8} {'':>6}  {mutation.name}: needs a GPU", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="tiermem-mutants-") as folder,
        ThreadPoolExecutor(jobs) as pool,
    ):
        trees = Trees(Path(folder), jobs)
        without = failing(trees, pool, due) if baseline else []
        for test in without:
            print(f"{'fails':8} {'':>6}  without any mutation: {test}", flush=True)

        def run(mutation: Mutation) -> tuple[Mutation, list[str] | None, float]:
            with trees.one() as tree:
                began = time.monotonic()
                noticed = attempt(tree, mutation, without)
                return mutation, noticed, time.monotonic() - began

        for done in as_completed([pool.submit(run, mutation) for mutation in due]):
            mutation, noticed, seconds = done.result()
            survivors += noticed is None
            word = "SURVIVED" if noticed is None else "caught"
            print(f"{word:8} {seconds:5.1f}s  {mutation.name}", flush=True)
            for test in noticed or [f"by {', '.join(mutation.tests)}"]:
                print(f"{'':18}{test}", flush=True)
    skipped = len(mutations) - len(due)
    left_out = f"{skipped} skipped, {len(without)} tests left out"
    print(f"{len(due)} mutants, {survivors} survived, {left_out}")
    return survivors


def part_of(text: str) -> tuple[int, int]:
    """Returns which part of how many ``I/N`` says."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part such as 2/3")
    return int(number), int(count)


def main() -> int:
    """Reads the options and runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="how many are tried at a time")
    parser.add_argument(
        "--part",
        type=part_of,
        default=(1, 1),
        metavar="I/N",
        help="the I-th of N parts of the list",
    )
    parser.add_argument("--only", default="", help="mutations whose name contains this")
    parser.add_argument("--list", action="store_true", help="list them and stop")
    parser.add_argument(
        "--no-baseline", action="store_true", help="do not run the tests unmutated first"
    )
    options = parser.parse_args()
    number, count = options.part
    chosen = [m for m in MUTATIONS if options.only in m.name][number - 1 :: count]
    if options.list:
        for mutation in chosen:
            print(f"{mutation.file}: {mutation.name}{' (GPU)' if mutation.gpu else ''}")
        return 0
    return 1 if check(chosen, baseline=not options.no_baseline, jobs=options.jobs) else 0


if __name__ == "__main__":
    sys.exit(main())
