"""Stands in for InstantTensor where there is no CUDA: it refuses, as the real one does."""

from __future__ import annotations

import torch


class safe_open:
    """For CUDA alone."""

    def __init__(self, filename: list[str], framework: str, device: torch.device) -> None:
        assert filename and framework == "pt"
        if torch.device(device).type != "cuda":
            raise ValueError("InstantTensor only supports CUDA devices for now")
        raise NotImplementedError
