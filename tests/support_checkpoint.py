"""Safetensors files written byte by byte, also such as no writer makes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def entry(dtype: str, shape: list[int], begin: int, end: int, **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


def file_bytes(header: dict[str, Any] | str | bytes, data: bytes = b"") -> bytes:
    """Returns a file of a header, which may be nonsense, and data."""
    if isinstance(header, dict):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode()
    return len(header).to_bytes(8, "little") + header + data


def raw(tensor: torch.Tensor) -> bytes:
    """Returns a tensor's bytes, which also tell NaNs apart."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    alike = (first.dtype, first.shape) == (second.dtype, second.shape)
    return alike and (first.numel() == 0 or raw(first) == raw(second))


def write_folder(
    folder: Path, files: dict[str, dict[str, torch.Tensor]], stem: str = "model", **index: Any
) -> dict[str, torch.Tensor]:
    """Writes several files and an index of them; returns all tensors."""
    os.makedirs(folder, exist_ok=True)
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    for file, tensors in files.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    written = {"metadata": {"total_size": 1}, "weight_map": weight_map, **index}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(written))
    return {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
