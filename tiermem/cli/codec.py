"""What packing a checkpoint's weights and moments would give: ratio, speed, and when it pays.

The break-even is that of bytes which are first packed and then moved: with ratio ``R``, link
``B`` and codec ``C`` (bytes of numbers per second) that takes ``1/C + 1/(R·B)`` seconds a byte
instead of ``1/B``, so it pays where ``C > B·R/(R-1)``, or ``B < C·(R-1)/R``. Where a codec works
beside the link, the slower of the two sets the pace: ``min(C, R·B)`` instead of ``B``.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tiermem.cli.measured import Measurement, rounds
from tiermem.errors import ConfigError, InvariantError
from tiermem.storage.checkpoint.folder import CheckpointFiles, open_to_read
from tiermem.storage.checkpoint.header import StoredTensor, pread_exactly
from tiermem.storage.codec import CHUNK_NBYTES, Bytes, PackedChunk, pack, unpack

STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
_DIRECTIONS = {"read": "unpack", "write": "pack", "link": "unpack"}
STEPS = 20
"""Steps of the run whose moments are measured where none were saved."""

_WIDTH = 1024
_ROWS = 64


@dataclass(frozen=True)
class Sample:
    """Numbers of one kind, in pieces that are packed one by one.

    Attributes:
        what: What they are, such as ``"weights, bfloat16"`` or ``"exp_avg (simulated)"``.
        itemsize: Bytes of one.
        pieces: Their bytes.
        total: Bytes of all that there are of this kind, sampled or not.
    """

    what: str
    itemsize: int
    pieces: Sequence[Bytes]
    total: int

    @property
    def nbytes(self) -> int:
        """Bytes that were sampled."""
        return sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True)
class Packing:
    """What packing one kind of numbers gives.

    Attributes:
        what: The kind.
        nbytes: Bytes that were packed.
        total: Bytes there are of it.
        ratio: Bytes before by bytes after.
        speeds: ``pack`` and ``unpack`` by number of threads, in bytes of numbers per second.
    """

    what: str
    nbytes: int
    total: int
    ratio: float
    speeds: Mapping[tuple[str, int], Measurement]


@dataclass(frozen=True)
class BreakEven:
    """Whether packing pays on one link.

    Attributes:
        what: The kind of numbers.
        way: Which link: ``"read"``, ``"write"`` or ``"link"``.
        link: Its speed, in bytes per second.
        codec: Speed of the codec with the number of threads that does best.
        needed: Speed that the codec would need; ``None`` if no speed were enough.
        pays_below: Speed of a link below which this codec pays.
        gain: Speed of first one, then the other, by that without packing.
        gain_beside: The same where the codec works while the link does.
    """

    what: str
    way: str
    link: float
    codec: float
    needed: float | None
    pays_below: float
    gain: float
    gain_beside: float


def break_even(what: str, way: str, link: float, codec: float, ratio: float) -> BreakEven:
    """Returns what packing by ``ratio`` at ``codec`` bytes/s does to a link of ``link`` bytes/s."""
    saved = 1 - 1 / ratio
    return BreakEven(
        what,
        way,
        link,
        codec,
        needed=link / saved if saved > 0 else None,
        pays_below=max(0.0, codec * saved),
        gain=1 / (link / codec + 1 / ratio),
        gain_beside=min(codec / link, ratio),
    )


def break_evens(packing: Packing, link_speeds: Mapping[str, float]) -> list[BreakEven]:
    """Returns the break-evens for disks and the host link, with the best number of threads.

    Args:
        packing: What was measured.
        link_speeds: Bytes per second of ``"read"`` and ``"write"`` (disks) and ``"link"`` (the
            host link, behind which the device would have to unpack as fast).
    """
    found = []
    for way, direction in _DIRECTIONS.items():
        speeds = [speed for (what, _), speed in packing.speeds.items() if what == direction]
        codec = max(speed.bytes_per_s for speed in speeds)
        found.append(break_even(packing.what, way, link_speeds[way], codec, packing.ratio))
    return found


def measure(sample: Sample, threads: Sequence[int], repeat: int) -> Packing:
    """Packs and unpacks a sample, having checked that every bit comes back.

    Raises:
        InvariantError: If one does not.
    """
    packed = [pack(piece, sample.itemsize) for piece in sample.pieces]
    out = np.empty(CHUNK_NBYTES, np.uint8)
    for piece, chunk in zip(sample.pieces, packed, strict=True):
        unpack(chunk, out[: chunk.nbytes])
        if not np.array_equal(piece, out[: chunk.nbytes]):
            raise InvariantError(f"{sample.what} are not what was packed")
    memory = _Memory()

    def unpack_one(chunk: PackedChunk) -> None:
        unpack(chunk, memory.out[: chunk.nbytes])

    def pack_one(piece: Bytes) -> None:
        pack(piece, sample.itemsize)  # what comes of it is dropped, as if it were written

    timed: dict[tuple[str, int], Callable[[], float]] = {}
    for count in threads:
        timed["pack", count] = _Timed(pack_one, sample.pieces, count)
        timed["unpack", count] = _Timed(unpack_one, packed, count)
    speeds = {
        key: Measurement.of(key[0], f"{key[1]} threads", sample.nbytes, seconds)
        for key, seconds in rounds(timed, repeat).items()
    }
    ratio = sample.nbytes / sum(chunk.packed_nbytes for chunk in packed)
    return Packing(sample.what, sample.nbytes, sample.total, ratio, speeds)


class _Memory(threading.local):
    """Each thread's own memory to unpack into: fresh pages would cost more than lz4."""

    def __init__(self) -> None:
        self.out = np.empty(CHUNK_NBYTES, np.uint8)


class _Timed:
    """Seconds that some threads take for all pieces."""

    def __init__(self, work: Callable[..., None], pieces: Sequence[object], threads: int) -> None:
        self.work = work
        self.pieces = pieces
        self.threads = threads

    def __call__(self) -> float:
        with ThreadPoolExecutor(self.threads) as pool:
            began = time.perf_counter()
            for _ in pool.map(self.work, self.pieces):
                pass
            return time.perf_counter() - began


def usual_threads() -> list[int]:
    """Returns one thread, and one for each core that this process may use."""
    return sorted({1, len(os.sched_getaffinity(0))})


# Samples ------------------------------------------------------------------------------------


def samples(path: str | os.PathLike[str], nbytes: int) -> list[Sample]:
    """Returns samples of the weights and the optimizer's moments of a checkpoint.

    Where no ``optimizer*.safetensors`` lies beside the weights, the moments are float32 ones of
    Adam after a few steps of a small network on random data, and named so.

    Args:
        path: A checkpoint's folder, or one safetensors file.
        nbytes: Most bytes of each kind.

    Raises:
        CheckpointError: If it is no checkpoint.
        ConfigError: If it has no floating-point tensors.
        StorageError: If reading fails.
    """
    weights = CheckpointFiles.open(path)
    found = list(_of_files([weights], lambda name: "weights", nbytes))
    if not found:
        raise ConfigError(f"--codec {path}: there are no floating-point tensors in it")
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    beside = sorted(folder.glob("optimizer*.safetensors"))
    moments = [CheckpointFiles.open(file) for file in beside]
    found += _of_files(moments, _state_of, nbytes) if moments else _simulated(nbytes)
    return found


def _state_of(name: str) -> str:
    last = name.rpartition(".")[2]
    return last if last in STATES else "state"


def _of_files(
    checkpoints: Sequence[CheckpointFiles], kind: Callable[[str], str], nbytes: int
) -> Iterator[Sample]:
    """Yields a sample of each kind and dtype: pieces at even distances over all of its bytes."""
    places: dict[tuple[str, torch.dtype], list[_Place]] = {}
    for files in checkpoints:
        for stored in files.tensors.values():
            if stored.dtype.is_floating_point and stored.nbytes:
                found = places.setdefault((kind(stored.name), stored.dtype), [])
                found.extend(_Place.all_of(files, stored))
    for (what, dtype), every in places.items():
        count = min(len(every), max(1, nbytes // CHUNK_NBYTES))
        chosen = [every[index * len(every) // count] for index in range(count)]
        total = sum(place.nbytes for place in every)
        name = f"{what}, {str(dtype).removeprefix('torch.')}"
        yield Sample(name, dtype.itemsize, [place.read() for place in chosen], total)


@dataclass(frozen=True, slots=True)
class _Place:
    """A piece of a stored tensor."""

    files: CheckpointFiles
    stored: StoredTensor
    begin: int
    nbytes: int

    @classmethod
    def all_of(cls, files: CheckpointFiles, stored: StoredTensor) -> Iterator[_Place]:
        for begin in range(0, stored.nbytes, CHUNK_NBYTES):
            yield cls(files, stored, begin, min(CHUNK_NBYTES, stored.nbytes - begin))

    def read(self) -> Bytes:
        path = self.files.paths[self.stored.file]
        data = np.empty(self.nbytes, np.uint8)
        with open_to_read(path) as fd:
            self.files.check_unchanged(fd, self.stored.file)
            offset = self.stored.offset + self.begin
            pread_exactly(fd, data.data, offset, path, f"tensor {self.stored.name!r}")
        return data


def _simulated(nbytes: int) -> Iterator[Sample]:
    """Yields the moments of Adam (Kingma and Ba, 2014) after a few steps of a small network.

    The steps are written out: the first one of a torch optimizer loads its compiler, for seconds.
    """
    width = max(16, min(_WIDTH, math.isqrt(nbytes // 8)))
    random = torch.Generator().manual_seed(0)
    first, second, goal = (
        torch.randn(width, width, generator=random) / math.sqrt(width) for _ in range(3)
    )
    weights = [first.requires_grad_(), second.requires_grad_()]
    means = [torch.zeros_like(weight, requires_grad=False) for weight in weights]
    squares = [torch.zeros_like(mean) for mean in means]
    for step in range(1, STEPS + 1):
        x = torch.randn(_ROWS, width, generator=random)
        error = torch.nn.functional.gelu(x @ first) @ second - x @ goal
        grads = torch.autograd.grad(error.square().mean(), weights)
        with torch.no_grad():
            for weight, mean, square, grad in zip(weights, means, squares, grads, strict=True):
                mean.lerp_(grad, 0.1)
                square.mul_(0.999).addcmul_(grad, grad, value=0.001)
                corrected = (square / (1 - 0.999**step)).sqrt_().add_(1e-8)
                weight.addcdiv_(mean, corrected, value=-1e-3 / (1 - 0.9**step))
    for name, moments in (("exp_avg", means), ("exp_avg_sq", squares)):
        data = torch.cat(moments).reshape(-1).numpy().view(np.uint8)
        pieces = [data[at : at + CHUNK_NBYTES] for at in range(0, data.nbytes, CHUNK_NBYTES)]
        yield Sample(f"{name} (simulated)", 4, pieces, data.nbytes)
