"""Other loaders of safetensors files, beside tiermem: from the call to the first logits.

Each reads the whole folder to the device, puts the tensors into a model that was made on the meta
device, and runs one forward with everything there. tiermem keeps to its budget of HBM. They take
turns, in another order in each round, with the page cache emptied of the folder before each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from common import failure, listed
from llama import build, give_back
from pagecache import evict, is_cached
from raw import RawRead

import tiermem

Row = dict[str, Any]
Tensors = dict[str, torch.Tensor]
Load = Callable[[Path, torch.device], AbstractContextManager[Any]]
"""Gives a model whose weights are on the device, until the context ends."""


def files_of(folder: Path) -> list[str]:
    """Returns the paths of a folder's tensors' files, in order."""
    return [str(path) for path in sorted(folder.glob("*.safetensors"))]


def model_of(folder: Path, device: torch.device, tensors: Tensors) -> Any:
    """Returns the folder's Llama with these tensors as its weights; none is copied.

    Raises:
        RuntimeError: If one is missing, or too many.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.load_state_dict(tensors, strict=True, assign=True)
    rotary = model.model.rotary_emb  # its buffers are in no file
    model.model.rotary_emb = type(rotary)(config).to(device)
    return model.eval()


@contextmanager
def fastsafetensors(folder: Path, device: torch.device) -> Iterator[Any]:
    """IBM's: all files at once by threads with O_DIRECT, tensors as views of whole files.

    Without GPUDirect Storage (``nogds``), which virtual machines do not have.
    """
    from fastsafetensors import SafeTensorsFileLoader

    with closing(SafeTensorsFileLoader(None, str(device), nogds=True)) as loader:
        loader.add_filenames({0: files_of(folder)})
        with closing(loader.copy_files_to_device()) as buffers:
            tensors = {key: buffers.get_tensor(key) for key in loader.get_keys()}
            yield model_of(folder, device, tensors)


@contextmanager
def runai(folder: Path, device: torch.device) -> Iterator[Any]:
    """Run:ai's streamer: threads read to host memory while what is there goes to the device."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files_of(folder), device=str(device))
        yield model_of(folder, device, dict(streamer.get_tensors()))


@contextmanager
def instanttensor(folder: Path, device: torch.device) -> Iterator[Any]:
    """InstantTensor: O_DIRECT through io_uring or AIO, for CUDA alone."""
    from instanttensor import safe_open

    with safe_open(files_of(folder), framework="pt", device=device) as opened:
        tensors = dict(opened.tensors())
    yield model_of(folder, device, tensors)


@contextmanager
def safetensors(folder: Path, device: torch.device) -> Iterator[Any]:
    """The library itself: files mapped into memory, one after another."""
    from safetensors.torch import load_file

    tensors: Tensors = {}
    for path in files_of(folder):
        tensors |= load_file(path, device=str(device))
    yield model_of(folder, device, tensors)


@contextmanager
def from_pretrained(folder: Path, device: torch.device) -> Iterator[Any]:
    """transformers, straight to the device."""
    import transformers

    yield transformers.AutoModelForCausalLM.from_pretrained(folder, device_map=str(device))


OTHERS: dict[str, Load] = {
    "from_pretrained": from_pretrained,
    "safetensors": safetensors,
    "fastsafetensors": fastsafetensors,
    "runai-model-streamer": runai,
    "instanttensor": instanttensor,
}
OURS = "tiermem"


class Loaders:
    """The rows of ``loaders``: tiermem's, a raw read's, a resident forward's, and the others'.

    A loader that is not installed, or fails, has a row that says so.

    Args:
        bench: Has the folder, the options, the clock and the rows.
    """

    def __init__(self, bench: Any) -> None:
        self.bench = bench
        self.folder: Path = bench.folder
        self.device = torch.device(bench.device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.tokens: int = bench.options.tokens[-1]
        self._rows: dict[str, Row] = {}
        self._seconds: dict[str, list[float]] = {}
        self._raw: list[float] = []
        self._expected: torch.Tensor | None = None

    def run(self) -> None:
        """Measures all of them in turns; the table is reported after each round."""
        names = [OURS, *self.bench.options.loaders]
        self._rows = {name: {"what": f"loader: {name}", "tokens": self.tokens} for name in names}
        self.bench.rows += self._rows.values()
        resident = self._resident()
        with self.bench.small_folder() as small:
            for name in names[1:]:  # imports, and what CUDA loads at its first use
                self._attempt(name, small, 8)
        self._seconds.clear()
        self._expected = None
        for turn in range(self.bench.options.repeats):
            left = [name for name in names if "note" not in self._rows[name]]
            for name in left[turn % len(left) :] + left[: turn % len(left)]:
                self._attempt(name, self.folder, self.tokens)
            self._summarize()
            self.bench.report()
        more = {"s": statistics.median(self._raw), "all s": listed(self._raw)} if self._raw else {}
        self.bench.rows.append({"what": "raw read", **more})
        self.bench.add({"what": "resident forward", "tokens": self.tokens, "s": resident})

    def _resident(self) -> float:
        """Returns the seconds of a forward with everything in HBM; other weights, the same work."""
        plain = build(self.bench.options.shape, self.device, head=True)
        seconds = self.bench.clock.time(self.bench.call(plain, self.tokens), 3)
        del plain
        give_back(self.device)
        return statistics.median(seconds)

    def _attempt(self, name: str, folder: Path, tokens: int) -> None:
        """Takes one turn; an error becomes the loader's note, and its last turn."""
        evict(folder)
        row = self._rows[name]
        try:
            if any(is_cached(path) for path in files_of(folder)):
                row["cached"] = True  # and so the figure is not the disk's
            self._turn(name, folder, tokens)
        except Exception as error:  # whatever a package of others does costs no other row
            row["note"] = failure(error)
            self.bench.say(f"{name}: {row['note']}")
        give_back(self.device)

    def _turn(self, name: str, folder: Path, tokens: int) -> None:
        load = self._ours if name == OURS else OTHERS[name]
        started = time.perf_counter()
        with load(folder, self.device) as model:
            loaded = time.perf_counter() - started
            logits = self.bench.call(model, tokens)()
            self.bench.clock.wait()
            seconds = time.perf_counter() - started
            self.bench.say(f"{name}: {seconds:.2f} s, of them {loaded:.2f} until it was loaded")
            self._seconds.setdefault(name, []).append(seconds)
            row = self._rows[name]
            row["HBM GiB"] = self.bench.used() / 2**30
            found = logits.float().cpu()
            if self._expected is None:
                self._expected = found
            row["equal"] = row.get("equal", True) and torch.equal(found, self._expected)
            del model, logits

    @contextmanager
    def _ours(self, folder: Path, device: torch.device) -> Iterator[Any]:
        """tiermem within its budget; a raw read of the same bytes comes after it."""
        import transformers

        options = self.bench.options
        with tiermem.TierManager(device, hbm=options.hbm, dram=options.dram) as tier:
            kind = transformers.AutoModelForCausalLM
            yield tiermem.load_checkpoint(kind, folder, tier=tier)
            with RawRead(tier, "") as raw:
                started = time.perf_counter()
                nbytes = raw.read()
                self._raw.append(time.perf_counter() - started)
            speed = nbytes / self._raw[-1] / 1e9
            self.bench.say(f"raw read {self._raw[-1]:.2f} s, {speed:.2f} GB/s")
            tier.close(discard=True)

    def _summarize(self) -> None:
        """Enters the medians so far; ratios are of one round each."""
        ours = self._seconds.get(OURS, [])
        for name, seconds in self._seconds.items():
            row = self._rows[name]
            row |= {"s": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
            row["of raw"] = _share(self._raw, seconds)
            row["times as long as tiermem"] = _share(seconds, ours)
            row["all s"] = listed(seconds)
        others = [statistics.median(s) for name, s in self._seconds.items() if name != OURS]
        if others and ours:
            self._rows[OURS]["fastest other over it"] = min(others) / statistics.median(ours)


def _share(these: list[float], those: list[float]) -> float | str:
    """Returns the median of the ratios of two that took turns; nothing where one took none."""
    ratios = [a / b for a, b in zip(these, those, strict=False)]
    return statistics.median(ratios) if ratios else ""
