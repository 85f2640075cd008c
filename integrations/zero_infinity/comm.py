"""``deepspeed.comm`` for one process: ``torch.distributed`` under DeepSpeed's names."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from tiermem import ConfigError


def __getattr__(name: str) -> Any:
    """Returns what ``torch.distributed`` has of this name."""
    return getattr(dist, name)


def is_initialized() -> bool:
    """Whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def get_rank(group: Any = None) -> int:
    """Returns the rank of this process: 0 without a process group."""
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """Returns the number of processes: 1 without a process group."""
    return dist.get_world_size(group) if is_initialized() else 1


def barrier(group: Any = None, *_: Any, **__: Any) -> None:
    """Waits for every process, of which there is one."""
    if is_initialized():
        dist.barrier(group)


def configure(*_: Any, **__: Any) -> None:
    """Does nothing: there is no communication to log."""


log_summary = configure


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
        *ignored: The rest of DeepSpeed's settings: there are no other processes.
        **also: Also ignored.

    Raises:
        ConfigError: If the environment, or the process group, has several processes.
    """
    refuse_several()
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    if not dist.is_available() or is_initialized():
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
    if is_initialized():
        several = dist.get_world_size()
    if several > 1:
        raise ConfigError(
            f"WORLD_SIZE={several}: zero_infinity trains with one process and one GPU; start the "
            "script with python, or with one process"
        )
