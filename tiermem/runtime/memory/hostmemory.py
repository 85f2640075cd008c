"""How much host memory this process may still take, by the machine's memory and its cgroups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_NO_LIMIT = 1 << 60  # version 1 writes about 2**63 if there is none


@dataclass(frozen=True)
class _Names:
    """The names of a memory cgroup's files in one version of cgroups."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: str


_V1 = _Names(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names(("memory.max", "memory.high"), "memory.current", "inactive_file")


def available_memory(root: Path = Path("/")) -> int:
    """Returns the bytes of host memory that can be had without swapping or being killed.

    Args:
        root: The folder that contains ``proc`` and every path named there; for tests.
    """
    import psutil

    free: int = psutil.virtual_memory().available
    return max(0, min([free, *_allowed(root)]))


def total_memory(root: Path = Path("/")) -> int:
    """Returns the bytes of host memory that this process could have if no other used any.

    Args:
        root: As for :func:`available_memory`.
    """
    import psutil

    there: int = psutil.virtual_memory().total
    return min([there, *_allowed(root, whole=True)])


def _allowed(root: Path, *, whole: bool = False) -> Iterator[int]:
    """Yields the bytes that each memory cgroup around this process still allows.

    Args:
        root: As for :func:`available_memory`.
        whole: Whether to yield the limits themselves, without subtracting the use.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        mounts = (root / "proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in groups:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            names, kind, option = _V2, "cgroup2", ""
        elif "memory" in controllers.split(","):
            names, kind, option = _V1, "cgroup", "memory"
        else:
            continue
        for folder in _folders(mounts, kind, option, path):
            left = _left(root / str(folder).lstrip("/"), names, whole=whole)
            if left is not None:
                yield left


def _folders(mounts: list[str], kind: str, option: str, path: str) -> Iterator[PurePosixPath]:
    """Yields the folders of a cgroup and of those around it, if they are mounted here.

    Args:
        mounts: Lines of ``mountinfo``.
        kind: The type of the file system.
        option: One of the mount's options, or "" for any.
        path: The cgroup's path in its hierarchy.
    """
    for line in mounts:
        before, _, behind = line.partition(" - ")
        fields, facts = before.split(), behind.split()
        if len(fields) < 5 or len(facts) < 3 or facts[0] != kind:
            continue
        if option and option not in facts[2].split(","):
            continue
        top, point = PurePosixPath(fields[3]), PurePosixPath(fields[4])
        try:
            inside = PurePosixPath(path).relative_to(top)
        except ValueError:  # a container sees its own group as the top, whatever its path says
            inside = PurePosixPath()
        if ".." in inside.parts:
            inside = PurePosixPath()
        yield from (point / part for part in (inside, *inside.parents))
        return


def _left(folder: Path, names: _Names, *, whole: bool) -> int | None:
    """Returns the bytes that one cgroup still allows, or its limit; None if it has none."""
    limits = [limit for name in names.limits if (limit := _number(folder / name)) is not None]
    used = _number(folder / names.usage)
    least = min(limits, default=_NO_LIMIT)
    if used is None or least >= _NO_LIMIT:
        return None
    return least if whole else least - used + _reclaimable(folder, names.reclaimable)


def _number(path: Path) -> int | None:
    """Returns the number in a file; None if there is none ("max")."""
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _reclaimable(folder: Path, name: str) -> int:
    """Returns the bytes of page cache that the kernel gives up before anything else."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    for line in lines:
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0
