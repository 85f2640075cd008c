"""Saves and loads a training state: tiermem beside the raw disk, torch.save and torch's DCP.

The state is that of AdamW over layers of one matrix: weights and two moments in float32, twelve
bytes for each parameter. All of it is at home in DRAM. Every round does one after the other; what
counts is the ratio within a round. What is read was put out of the page cache before.

The folder that was saved is removed before the next thing is measured, so that the disk needs room
for one state; a peer's file is as large, and its rounds are set against the raw figures of ours.
Rows are printed and written as they come, and one that fails costs no other.

    python benchmarks/bench_save.py --folder /mnt/nvme --out results/save_H200.json

Without --quick that is the 3.02 B state (36 GB), which needs 90 GiB of host memory: another copy of
it is what the peers save, and where steps go on meanwhile, blocks are copied.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from common import failure, report
from pagecache import evict
from torch import nn

import tiermem
from tiermem.config import format_size, parse_size

CHUNK = 8 << 20
THREADS = 4
PEERS = ("torch", "dcp")


def raw_write(path: Path, nbytes: int) -> None:
    """Writes a file past the page cache, by threads, and syncs it to the disk."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        memory = [mmap.mmap(-1, CHUNK) for _ in range(THREADS)]
        for each in memory:
            each[:] = os.urandom(1 << 20) * (CHUNK >> 20)
        _in_chunks(
            nbytes, lambda thread, at, size: os.pwrite(fd, memoryview(memory[thread])[:size], at)
        )
        os.fsync(fd)
    finally:
        os.close(fd)


def raw_read_all(folder: Path) -> None:
    """Reads the tensors' files of a checkpoint past the page cache, one after another."""
    for path in sorted(folder.glob("*.safetensors")):
        raw_read(path, path.stat().st_size)


def raw_read(path: Path, nbytes: int) -> None:
    """Reads a file past the page cache, by threads."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        memory = [mmap.mmap(-1, CHUNK) for _ in range(THREADS)]
        _in_chunks(nbytes, lambda thread, at, size: os.preadv(fd, [memory[thread]], at))
    finally:
        os.close(fd)


def _in_chunks(nbytes: int, use: Callable[[int, int, int], object]) -> None:
    def work(thread: int) -> None:
        for at in range(thread * CHUNK, nbytes, THREADS * CHUNK):
            use(thread, at, min(CHUNK, nbytes - at))

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))


_BEGAN = time.perf_counter()


def say(what: str) -> None:
    """Prints what has just been done, at once: a time limit may end the process."""
    print(f"{time.perf_counter() - _BEGAN:7.1f} s  {what}", flush=True)


def timed(work: Callable[[], object], what: str = "") -> float:
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    if what:
        say(f"{what}: {seconds:.3f} s")
    return seconds


class State:
    """A model and its optimizer, once stepped, in the tiers."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.tier = tiermem.TierManager(
            device=arguments.device, hbm=arguments.hbm, dram=arguments.dram, policy="dram"
        )
        width = arguments.width
        with torch.device(arguments.device):  # which draws their values faster than the host
            layers = [nn.Linear(width, width, bias=False) for _ in range(arguments.layers)]
        self.model = self.tier.wrap(nn.Sequential(*layers))
        self.optimizer = self.tier.optimizer(self.model, torch.optim.AdamW, lr=1e-4)
        self.nbytes = 12 * arguments.layers * width * width
        timed(self.step, "a first step")

    def step(self) -> None:
        x = torch.randn(self.arguments.tokens, self.arguments.width, device=self.arguments.device)
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if x.is_cuda:
            torch.cuda.synchronize()

    def plain(self) -> dict[str, Any]:
        """A copy of everything, as the peers are given it."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def dcp_save(state: dict[str, Any], path: Path) -> None:
    from torch.distributed import checkpoint

    writer = checkpoint.FileSystemWriter(path, thread_count=THREADS, overwrite=True)
    checkpoint.save(state, storage_writer=writer, no_dist=True)


def dcp_load(state: dict[str, Any], path: Path) -> None:
    from torch.distributed import checkpoint

    reader = checkpoint.FileSystemReader(path)
    checkpoint.load(state, storage_reader=reader, no_dist=True)


def torch_save(state: dict[str, Any], path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def one_round(state: State, folder: Path) -> dict[str, float]:
    """Returns the seconds of each thing, one after the other."""
    raw, run = folder / "raw", folder / "run"
    found = {"raw write": timed(lambda: raw_write(raw, state.nbytes), "raw write")}
    raw.unlink()
    found["tiermem save"] = timed(lambda: state.tier.save(run), "save")
    evict(folder)
    found["raw read"] = timed(lambda: raw_read_all(run), "raw read")
    found["tiermem load"] = timed(lambda: state.tier.load(run), "load")
    shutil.rmtree(run)
    return found


def peer_round(copied: dict[str, Any], folder: Path, name: str) -> dict[str, float]:
    """Returns the seconds that a peer takes to save and to load what it is given."""
    save, load = {"torch": (torch_save, torch_load), "dcp": (dcp_save, dcp_load)}[name]
    path = folder / name
    try:
        found = {f"{name} save": timed(lambda: save(copied, path), f"{name} save")}
        os.sync()
        evict(folder)
        found[f"{name} load"] = timed(lambda: load(copied, path), f"{name} load")
    finally:
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
    return found


class Bench:
    """The rows so far, printed and written after each of them.

    Args:
        state: What is saved.
        folder: On the disk that is measured.
    """

    def __init__(self, state: State, folder: Path) -> None:
        self.state, self.folder = state, folder
        self.rows: list[dict[str, Any]] = []
        self.errors: list[Exception] = []
        self._rounds: list[dict[str, float]] = []

    def run(self) -> None:
        """Measures everything; raises the first error at the end."""
        arguments = self.state.arguments
        for _ in range(arguments.repeats):
            self._rounds.append(one_round(self.state, self.folder))
            self._report([*self._of(self._rounds)])
        self.rows = self._of(self._rounds)
        if not arguments.no_later:  # it needs as much room as a peer, and comes first
            self._try("steps while saving", self._later)
        copied = self.state.plain() if arguments.peers else {}
        for name in arguments.peers:
            self._try(name, lambda name=name: self._peer(copied, name))
        if self.errors:
            raise self.errors[0]

    def _later(self) -> list[dict[str, Any]]:
        """Twice: in the first save pages of the spare DRAM that blocks go to are brought in."""
        rows = []
        for what in ("steps while saving", "steps while saving again"):
            rows.append({"what": what, **meanwhile(self.state, self.folder)})
            shutil.rmtree(self.folder / "later")
        return rows

    def _peer(self, copied: dict[str, Any], name: str) -> list[dict[str, Any]]:
        repeats = range(len(self._rounds))
        return self._of([peer_round(copied, self.folder, name) for _ in repeats])

    def _of(self, rounds: list[dict[str, float]]) -> list[dict[str, Any]]:
        """Returns a row for each thing, beside the raw figures of our rounds."""
        rows = []
        for what in rounds[0]:
            raw = "raw write" if what.endswith(("write", "save")) else "raw read"
            raws = [one[raw] for one in self._rounds]
            rows.append(row_of(what, [one[what] for one in rounds], raws, self.state.nbytes))
        return rows

    def _try(self, what: str, measure: Callable[[], list[dict[str, Any]]]) -> None:
        """Adds rows, or one that says why there are none."""
        try:
            self.rows += measure()
        except (tiermem.TierError, RuntimeError, OSError) as error:
            self.errors.append(error)
            self.rows.append({"what": f"{what}, failed", "note": failure(error)})
            say(f"{what} failed: {failure(error)}")
        self._report(self.rows)

    def _report(self, rows: list[dict[str, Any]]) -> None:
        size = format_size(self.state.nbytes)
        title = f"Saving and loading a training state of {size}"
        report(title, rows, self.state.arguments.out)
        print(end="", flush=True)


def torch_load(state: dict[str, Any], path: Path) -> None:
    found = torch.load(path)
    for name, tensor in found["model"].items():
        state["model"][name].copy_(tensor)


def meanwhile(state: State, folder: Path) -> dict[str, float]:
    """Returns the seconds of steps with and without a save under way, and of the call."""
    steps = state.arguments.steps
    alone = [timed(state.step, "a step") for _ in range(2 * steps)][steps:]
    arena = state.tier._manager.parts.homes.arena
    locked = arena.locked
    began = time.perf_counter()
    handle: Any = None

    def call() -> None:
        nonlocal handle
        handle = state.tier.save(folder / "later", wait=False)

    blocked = timed(call, "save(wait=False)")
    beside = []
    while not handle.done() or not beside:
        beside.append(timed(state.step, "a step while saving"))
    handle.result()
    whole = time.perf_counter() - began
    return {
        "step s": statistics.median(alone),
        "step while saving s": statistics.mean(beside),
        "longest step while saving s": max(beside),
        "steps while saving": len(beside),
        "of its speed": sum([statistics.median(alone)] * len(beside)) / sum(beside),
        "page-locked MiB": (arena.locked - locked) / 2**20,
        "call s": blocked,
        "whole save s": whole,
    }


def row_of(name: str, seconds: list[float], raw: list[float], nbytes: int) -> dict[str, Any]:
    shares = [r / s for r, s in zip(raw, seconds, strict=True)]
    return {
        "what": name,
        "s": statistics.median(seconds),
        "GB/s": nbytes / statistics.median(seconds) / 1e9,
        "of raw": statistics.median(shares),
        "min": min(shares),
        "max": max(shares),
    }


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", default=".", help="on the disk that is measured")
    parser.add_argument("--layers", type=int, default=45)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=2048, help="in a step")
    parser.add_argument("--steps", type=int, default=3, help="measured without a save")
    parser.add_argument("--hbm", default="4GiB")
    parser.add_argument("--dram", default="86GiB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--no-later", action="store_true", help="no steps while saving")
    parser.add_argument("--quick", action="store_true", help="a small state")
    parser.add_argument("--out")
    found = parser.parse_args()
    if found.quick:
        found.layers, found.width, found.tokens = 4, 256, 4
        found.hbm, found.dram, found.repeats, found.steps = "8MiB", "64MiB", 1, 1
    for name in ("hbm", "dram"):
        setattr(found, name, parse_size(getattr(found, name), name))
    return found


def main() -> None:
    arguments = arguments_of()
    folder = Path(arguments.folder) / f"bench_save_{os.getpid()}"
    folder.mkdir()
    try:
        state = State(arguments)
        with state.tier:
            Bench(state, folder).run()
            state.tier.close(discard=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
