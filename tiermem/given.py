"""Checks of the arguments that users give a manager (devices, budgets, folders), and defaults."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

import torch

from tiermem.config import parse_budget, parse_path, parse_size
from tiermem.errors import ConfigError
from tiermem.runtime.memory.hostmemory import available_memory, total_memory
from tiermem.runtime.memory.opening import AT_ONCE

Size = int | str
PathLike = str | os.PathLike[str]


def device_of(device: str | torch.device) -> torch.device:
    """Returns the device of a name, with its index.

    Raises:
        ConfigError: If tiermem does not support the device, or it does not exist.
    """
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"device={device!r}: {str(error).partition(chr(10))[0]}") from error
    if where.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r}: tiermem runs on 'cuda' and on 'cpu'")
    if where.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device={device!r}: torch sees no CUDA device here; use device='cpu', or install "
                "a CUDA build of torch"
            )
        if ":" not in str(where):  # no index given: the current one
            where = torch.device("cuda", torch.cuda.current_device())
        count = torch.cuda.device_count()
        if where.index >= count:
            last = f"cuda:{count - 1}"
            raise ConfigError(f"device={device!r}: the last CUDA device that torch sees is {last}")
        return where
    return torch.device("cpu")  # without an index, as the device of CPU tensors has none


def folders_of(nvme: PathLike | Sequence[PathLike] | None) -> tuple[str, ...]:
    """Returns the folders of the NVMe tier; none if there is no such tier.

    Raises:
        ConfigError: If a name is empty, or no folder can have it.
    """
    if nvme is None:
        return ()
    try:
        several = [nvme] if isinstance(nvme, str | os.PathLike) else list(nvme)
        paths = tuple(os.fspath(path) for path in several)
    except TypeError as error:
        raise ConfigError(f"nvme must be a folder or several, not {nvme!r}") from error
    for path in paths:
        if not isinstance(path, str) or not path:
            raise ConfigError(
                f"nvme={nvme!r} names no folder: write its path (the current folder is '.'), or "
                "leave nvme out for two tiers only"
            )
        parse_path(path, "nvme")
    return paths


def disk_limit_of(nbytes: Size | None, folders: Sequence[str]) -> int | None:
    """Returns the limit of the NVMe tier in bytes; None if there is no limit.

    Raises:
        ConfigError: If it is not a size, or there is no NVMe tier.
    """
    if nbytes is None:
        return None
    if not folders:
        raise ConfigError(
            f"nvme_bytes={nbytes!r} limits files that nothing asks for: give nvme=folder as well"
        )
    return parse_size(nbytes, "nvme_bytes")


def depth_of(depth: int | Literal["auto"]) -> int | Literal["auto"]:
    """Returns how many blocks ahead of the compute fetches may begin.

    Raises:
        ConfigError: If it is not such a number.
    """
    if depth == "auto":
        return "auto"
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
        raise ConfigError(f"prefetch_depth must be 'auto' or a number of blocks, not {depth!r}")
    return depth


def layers_of(layers: int | None) -> int | None:
    """Returns how many layers' saved tensors leave HBM; None for all.

    Raises:
        ConfigError: If it is not such a number.
    """
    if layers is None:
        return None
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 0:
        raise ConfigError(f"activation_layers must be None or a number of layers, not {layers!r}")
    return layers


def hbm_of(hbm: Size | None, device: torch.device) -> int | None:
    """Returns a budget of device memory in bytes; None for ``"auto"`` and None.

    Raises:
        ConfigError: If it is not a budget.
    """

    def total() -> int:
        return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else total_memory()

    return parse_budget(hbm, "hbm", total)


def default_hbm(device: torch.device) -> int:
    """Returns the bytes of device memory for which blocks are chosen by default."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * AT_ONCE)
    return default_dram() // 4


def most_hbm(device: torch.device) -> int:
    """Returns the most bytes that ``hbm="auto"`` takes; on the CPU the default budget."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return default_hbm(device)


def default_dram() -> int:
    """Returns the default budget of host memory in bytes.

    It is divided by the number of processes that torchrun has started on the machine.
    """
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")
    return available_memory() // 2 // max(int(processes) if processes.isdecimal() else 1, 1)
