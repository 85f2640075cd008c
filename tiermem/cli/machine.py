"""Facts about the machine that commands show and choose by."""

from __future__ import annotations

import os
import platform
import resource
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from tiermem.config import format_size
from tiermem.errors import TierError
from tiermem.storage import nameless

_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
_PROMISING = ("ext3", "ext4", "xfs", "tmpfs")
"""File systems that write in place, into the space that a file was given."""


@dataclass(frozen=True)
class PathFacts:
    """What a folder offers to a swap file.

    Attributes:
        path: The folder.
        file_system: Its type, such as ``"ext4"``.
        free: Bytes free for this user.
        usable: Whether a swap file can be made there.
        direct: Whether it goes past the page cache (O_DIRECT).
        note: What stands in the way, or ``""``.
        promises: Whether space that was reserved there stays reserved. Never so on a
            thin-provisioned disk, which the file system does not know of.
    """

    path: str
    file_system: str
    free: int
    usable: bool
    direct: bool
    note: str
    promises: bool = False


def file_system_of(path: str | os.PathLike[str]) -> str:
    """Returns the type of the file system that holds ``path``, or ``"unknown"``."""
    target = Path(path).resolve()
    best, kind = -1, "unknown"
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return kind
    for line in lines:
        fields = line.split()
        point = Path(fields[1].replace("\\040", " "))
        # Of two mounts at one point the later one is on top.
        if (point == target or point in target.parents) and len(point.parts) >= best:
            best, kind = len(point.parts), fields[2]
    return kind


def default_swap_folder() -> str:
    """Returns a folder on a real disk: the temporary folder, or the current one."""
    folder = tempfile.gettempdir()
    return os.getcwd() if file_system_of(folder) in _MEMORY_FILE_SYSTEMS else folder


def inspect_path(path: str) -> PathFacts:
    """Tries what a swap file does first: open a nameless file, with O_DIRECT."""
    try:
        folder = nameless.check_folder(Path(path))
        opened = nameless.open_nameless(folder)
    except TierError as error:
        return PathFacts(path, "unknown", 0, False, False, str(error))
    os.close(opened.fd)
    disk = os.statvfs(folder)
    free = nameless.free_nbytes(disk) or 0
    kind = file_system_of(folder)
    promises = kind in _PROMISING or (kind == "btrfs" and opened.in_place)
    return PathFacts(path, kind, free, True, opened.direct, opened.reason, promises)


def locked_memory_limit() -> str:
    """Returns RLIMIT_MEMLOCK as people read it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else format_size(soft)


def hardware() -> dict[str, str]:
    """Returns what a result was measured on, as rows for a table or a report."""
    rows = {
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "memory": format_size(psutil.virtual_memory().total),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": "none",
    }
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        rows["device"] = (
            f"{torch.cuda.device_count()} × {facts.name}, {format_size(facts.total_memory)}"
        )
    return rows


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
