"""One process: what loops ask of ``torch.distributed`` through DeepSpeed's names."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    get_rank,
    get_world_size,
    is_initialized,
)

from tiermem import ConfigError

__all__ = [
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "device_of",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_distributed",
    "is_initialized",
    "local_rank",
]


def local_rank() -> int:
    """Returns the rank of this process on its machine, by the environment."""
    return max(0, int(os.environ.get("LOCAL_RANK", "0")))


get_local_rank = local_rank


def device_of(device: str | torch.device) -> torch.device:
    """Returns where inputs belong, with the number of a CUDA device."""
    found = torch.device(device)
    if found.type == "cuda" and ":" not in str(found):  # no number given: the current one
        return torch.device("cuda", torch.cuda.current_device())
    return found


def init_distributed(dist_backend: str | None = None, *ignored: Any, **also: Any) -> None:
    """Makes a process group of this one process, unless there is one.

    Args:
        dist_backend: By default NCCL where there is CUDA, else Gloo.
        *ignored: The rest of DeepSpeed's settings: there is nobody to find.
        **also: Likewise.

    Raises:
        ConfigError: If the environment, or the process group, has several processes.
    """
    refuse_several()
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    if not dist.is_available() or dist.is_initialized():
        return
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)


def refuse_several() -> None:
    """Refuses to be one of several processes.

    Raises:
        ConfigError: Saying so.
    """
    several = int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_available() and dist.is_initialized():
        several = dist.get_world_size()
    if several > 1:
        raise ConfigError(
            f"WORLD_SIZE={several}: zero_infinity trains with one process and one GPU; start the "
            "script with python, or with one process"
        )
