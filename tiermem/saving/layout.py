"""Where each tensor is in the safetensors files of a checkpoint; all of it is known beforehand.

The format is that of https://github.com/huggingface/safetensors: eight bytes with the length of a
JSON header, the header, and the tensors' bytes one after another, without gaps. The header is
padded with spaces to whole pages. Tensors are in the order in which they are written, those with
wide elements first: so every tensor begins at a multiple of its element's size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tiermem.errors import CheckpointError

PAGE = 4096
SHARD_NBYTES = 32 << 30
"""Maximal bytes of tensors in one file, if it has more than one tensor."""

_NAMED = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, own) for name, own in _NAMED.items() if hasattr(torch, own)
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Spec:
    """One tensor of a checkpoint.

    Attributes:
        name: Name in its file.
        dtype: Its dtype.
        shape: Sizes.
        folder: Folder of its file in the checkpoint, ending in a slash; empty for the checkpoint
            itself.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    folder: str = ""

    @property
    def key(self) -> str:
        """Its name in the whole checkpoint."""
        return self.folder + self.name

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass(slots=True)
class FilePlan:
    """One safetensors file to be written.

    Attributes:
        path: Path within the checkpoint.
        specs: Its tensors in order.
        header: Everything before the tensors' bytes.
        offsets: First byte of each tensor in the file.
        nbytes: Bytes of the whole file.
    """

    path: str
    specs: list[Spec]
    header: bytes = b""
    offsets: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0


def dtype_name(dtype: torch.dtype, what: str) -> str:
    """Returns safetensors' name of a dtype.

    Raises:
        CheckpointError: If it has no name for it; ``what`` says whose dtype it is.
    """
    found = _NAMES.get(dtype)
    if found is None:
        raise CheckpointError(
            f"{what} has the dtype {dtype}, which safetensors files do not know; "
            f"they know {', '.join(sorted(_NAMES.values()))}"
        )
    return found


def plan_files(
    stem: str,
    specs: Sequence[Spec],
    metadata: Mapping[str, str],
    limit: int,
) -> list[FilePlan]:
    """Lays tensors out in one file, or in several where they are more than ``limit`` bytes.

    Args:
        stem: Begin of the files' names, with the folder within the checkpoint.
        specs: The tensors in the order in which they will be written.
        metadata: Metadata for each header.
        limit: Maximal bytes in one file.

    Returns:
        The files; there is at least one.
    """
    runs: list[list[Spec]] = [[]]
    size = 0
    for spec in specs:
        if runs[-1] and size + spec.nbytes > limit:
            runs.append([])
            size = 0
        runs[-1].append(spec)
        size += spec.nbytes
    plans = []
    for number, run in enumerate(runs, 1):
        shard = f"-{number:05}-of-{len(runs):05}" if len(runs) > 1 else ""
        plans.append(_lay_out(f"{stem}{shard}.safetensors", run, metadata))
    return plans


def _lay_out(path: str, specs: list[Spec], metadata: Mapping[str, str]) -> FilePlan:
    ordered = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    begin = 0
    for spec in ordered:
        if spec.name in header:
            raise CheckpointError(
                f"{spec.name!r} is the name of a tensor, and in {path} that of something else: "
                "call it otherwise"
            )
        header[spec.name] = {
            "dtype": dtype_name(spec.dtype, repr(spec.name)),
            "shape": list(spec.shape),
            "data_offsets": [begin, begin + spec.nbytes],
        }
        begin += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    whole = -(-(8 + len(text)) // PAGE) * PAGE
    text = text.ljust(whole - 8)
    plan = FilePlan(path, ordered, len(text).to_bytes(8, "little") + text, nbytes=whole + begin)
    for spec in ordered:
        plan.offsets[spec.name] = whole + header[spec.name]["data_offsets"][0]
    return plan


def index_of(plans: Sequence[FilePlan]) -> bytes:
    """Returns the index of several files, as transformers and torch read it."""
    total = sum(spec.nbytes for plan in plans for spec in plan.specs)
    names = {spec.name: plan.path.rpartition("/")[2] for plan in plans for spec in plan.specs}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's bytes in the order of its elements, 1-D uint8; a view if possible."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)
