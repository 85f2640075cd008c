"""Stands in for fastsafetensors: its calls, in the order it wants, with safetensors inside."""

from __future__ import annotations

import torch
from safetensors.torch import load_file


class _Buffers:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors: dict[str, torch.Tensor] | None = tensors

    def get_tensor(self, name: str) -> torch.Tensor:
        assert self._tensors is not None, "closed"
        return self._tensors[name]

    def close(self) -> None:
        self._tensors = None


class SafeTensorsFileLoader:
    """Without GPUDirect Storage only."""

    def __init__(self, pg: None, device: str, *, nogds: bool) -> None:
        assert pg is None and nogds
        self._device = device
        self._tensors: dict[str, torch.Tensor] = {}

    def add_filenames(self, filenames: dict[int, list[str]]) -> None:
        for path in filenames[0]:
            self._tensors |= load_file(path, device=self._device)

    def get_keys(self) -> list[str]:
        return list(self._tensors)

    def copy_files_to_device(self) -> _Buffers:
        return _Buffers(self._tensors)

    def close(self) -> None:
        self._tensors = {}
