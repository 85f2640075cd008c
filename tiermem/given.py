"""What users give a manager, checked: devices, budgets, folders, and what counts without them."""

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
    """Returns the device that a name says, with its number.

    Raises:
        ConfigError: If tiermem does not run there, or it is not there.
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
    return torch.device("cpu")  # with no number: tensors there have none


def folders_of(nvme: PathLike | Sequence[PathLike] | None) -> tuple[str, ...]:
    """Returns the folders of the NVMe tier; none where there is no such tier.

    Raises:
        ConfigError: If one has no name, or one that no folder can have.
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
    """Returns the most bytes of the NVMe tier; None where nothing limits them.

    Raises:
        ConfigError: If it is no size, or there is no such tier.
    """
    if nbytes is None:
        return None
    if not folders:
        raise ConfigError(
            f"nvme_bytes={nbytes!r} limits files that nothing asks for: give nvme=folder as well"
        )
    return parse_size(nbytes, "nvme_bytes")


def depth_of(depth: int | Literal["auto"]) -> int | Literal["auto"]:
    """Returns how many blocks are looked ahead.

    Raises:
        ConfigError: If it is no such number.
    """
    if depth == "auto":
        return "auto"
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
        raise ConfigError(f"prefetch_depth must be 'auto' or a number of blocks, not {depth!r}")
    return depth


def layers_of(layers: int | None) -> int | None:
    """Returns of how many layers saved tensors leave HBM; None for all.

    Raises:
        ConfigError: If it is no such number.
    """
    if layers is None:
        return None
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 0:
        raise ConfigError(f"activation_layers must be None or a number of layers, not {layers!r}")
    return layers


def hbm_of(hbm: Size | None, device: torch.device) -> int | None:
    """Returns a budget of device memory in bytes; None where it is to be found out.

    Raises:
        ConfigError: If it is no budget.
    """

    def total() -> int:
        return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else total_memory()

    return parse_budget(hbm, "hbm", total)


def default_hbm(device: torch.device) -> int:
    """Returns the bytes of device memory that blocks are chosen for where nothing is said."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * AT_ONCE)
    return default_dram() // 4


def most_hbm(device: torch.device) -> int:
    """Returns the bytes that ``hbm="auto"`` never passes; on the CPU its default."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return default_hbm(device)


def default_dram() -> int:
    """Returns the bytes of host memory that are taken at most where nothing is said.

    Processes that torchrun has started on one machine take as much together as one alone.
    """
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")
    return available_memory() // 2 // max(int(processes) if processes.isdecimal() else 1, 1)
