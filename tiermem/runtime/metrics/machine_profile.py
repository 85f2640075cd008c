"""The machine profile: speeds of this machine's links, measured once and kept in a file.

``tiermem bench`` measures and saves a profile; ``tiermem plan`` and the scheduler read
it. A file that is missing, damaged or of another format is left alone, with the reason.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

VARIABLE = "TIERMEM_PROFILE"
"""Environment variable that names the file, over the cache folder."""

FORMAT = 1
"""Version of the file's layout; files of another one are not read."""

_RATES = (
    "h2d",
    "d2h",
    "duplex",
    "d2d",
    "host_copy",
    "nvme_read",
    "nvme_write",
    "nvme_mixed",
)
_LARGEST = 1 << 20
"""Bytes of a profile at most; one that is measured has about two thousand."""
_MOST = 1 << 60
"""Bytes, or bytes a second, that a profile may have: what is worked out with them is a number."""
_TEXTS = ("device", "date", "tiermem", "torch")
_COUNTS = ("nvme_chunk", "nvme_depth")


@dataclass(frozen=True)
class MachineProfile:
    """Measured link speeds, in bytes per second; ``None`` where one is not known.

    Attributes:
        device: Name of the device, ``"cpu"`` where host memory stands in for it.
        date: Day of the measurement, such as ``"2026-11-21"``.
        tiermem: Version that measured.
        torch: Version of torch.
        h2d: Page-locked host memory to the device.
        d2h: The device to page-locked host memory.
        duplex: Both at once, in sum.
        d2d: Bytes copied within the device (each is read and written).
        host_copy: Bytes copied within host memory.
        nvme_read: Swap file to the device, through the file mover.
        nvme_write: The device to the swap file, through the file mover.
        nvme_mixed: Both at once, in sum.
        nvme_chunk: Bytes of a request that were best.
        nvme_depth: Requests in flight that were best.
        h2d_by_size: ``(bytes of one copy, bytes per second)``, by ascending size.
        folders: Folders whose disks were measured.
    """

    device: str
    date: str
    tiermem: str
    torch: str
    h2d: float | None = None
    d2h: float | None = None
    duplex: float | None = None
    d2d: float | None = None
    host_copy: float | None = None
    nvme_read: float | None = None
    nvme_write: float | None = None
    nvme_mixed: float | None = None
    nvme_chunk: int | None = None
    nvme_depth: int | None = None
    h2d_by_size: tuple[tuple[int, float], ...] = ()
    folders: tuple[str, ...] = ()

    def h2d_at(self, nbytes: int) -> float | None:
        """Returns the speed up of a copy of that size: of the next smaller one measured.

        Args:
            nbytes: Bytes of one copy; below the smallest size measured, that one counts.
        """
        best = self.h2d_by_size[0][1] if self.h2d_by_size else self.h2d
        for size, rate in self.h2d_by_size:
            if size <= nbytes:
                best = rate
        return best


@dataclass(frozen=True)
class Loaded:
    """The result of reading a profile.

    Attributes:
        profile: The profile, or ``None``.
        reason: One sentence: where it is from, or why there is none.
    """

    profile: MachineProfile | None
    reason: str


def device_name(device: str | torch.device | None = None) -> str:
    """Returns the name that profiles go by: of the GPU, or ``"cpu"``.

    Args:
        device: Which; the first CUDA device by default, or the CPU where there is none.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def cache_folder() -> Path:
    """Returns where the user's cache has a folder of tiermem's, which may not be there yet."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path there is to be ignored, says the XDG specification.
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "tiermem"


def profile_path(device: str) -> Path:
    """Returns where the profile of a device is kept.

    Args:
        device: Its name, see :func:`device_name`.
    """
    if named := os.environ.get(VARIABLE):
        return Path(named)
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return cache_folder() / f"profile-{slug}.json"


def save(profile: MachineProfile, path: str | os.PathLike[str] | None = None) -> Path:
    """Writes a profile: beside, then renamed, so that readers see all of it or the old one.

    Args:
        profile: What was measured.
        path: The file; by default that of ``profile.device``, see :func:`profile_path`.

    Returns:
        The file.

    Raises:
        OSError: If it cannot be written, or is a device or the like, which a file would replace.
    """
    target = profile_path(profile.device) if path is None else Path(path)
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": FORMAT, **asdict(profile)}, indent=1) + "\n"
    handle, beside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        raise
    return target


def load(path: str | os.PathLike[str] | None = None, device: str | None = None) -> Loaded:
    """Reads a profile; whatever is wrong with the file is a reason, never an error.

    Args:
        path: The file; by default that of ``device``, see :func:`profile_path`.
        device: Name of the device it must be of. With a path, any by default; without
            one, this machine's, see :func:`device_name`.

    Returns:
        The profile if there is one that can be used, and a sentence on why (not).
    """
    if path is None:
        device = device_name() if device is None else device
        try:
            path = profile_path(device)
        except RuntimeError as error:
            return Loaded(None, f"there is no place for a profile: {error}")
    try:
        data = json.loads(_text(path))
    except FileNotFoundError:
        return Loaded(None, f"there is no {path}; `tiermem bench` makes it")
    except OSError as error:
        return Loaded(None, f"{path} cannot be read: {error.strerror}")
    except (ValueError, RecursionError):
        return Loaded(None, f"{path} is not JSON; `tiermem bench` makes it anew")
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else None
        return Loaded(None, f"{path} has format {found!r}, not {FORMAT}")
    try:
        profile = _parse(data)
    except ValueError as error:
        return Loaded(None, f"{path} is damaged: {error}")
    if device is not None and profile.device != device:
        return Loaded(None, f"{path} is of {profile.device}, not of {device}")
    return Loaded(profile, f"measured {profile.date}, {path}")


def _text(path: str | os.PathLike[str]) -> str:
    """Returns what is in a file; never waits for one, nor reads more than a profile has.

    Raises:
        OSError: If it cannot be read, or is no regular file, or larger than a profile can be.
        ValueError: If it is not UTF-8.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise OSError(errno.EFBIG, f"it has more than {_LARGEST} bytes, which no profile has")
    return content.decode("utf-8")


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file, and a pipe whether or not somebody writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _parse(data: dict[str, Any]) -> MachineProfile:
    """Checks every value; fields that are not known are left out."""
    values: dict[str, Any] = {}
    for name in _TEXTS:
        values[name] = _checked(name, data.get(name), str)
    for name in _RATES:
        values[name] = _positive(name, data.get(name), (int, float))
    for name in _COUNTS:
        values[name] = _positive(name, data.get(name), int)
    sizes = []
    for pair in _checked("h2d_by_size", data.get("h2d_by_size", []), list):
        if len(_checked("h2d_by_size", pair, list)) != 2 or None in pair:
            raise ValueError(f"h2d_by_size has {pair!r}")
        size = _positive("h2d_by_size", pair[0], int)
        sizes.append((size, _positive("h2d_by_size", pair[1], (int, float))))
    values["h2d_by_size"] = tuple(sorted(sizes))
    folders = _checked("folders", data.get("folders", []), list)
    values["folders"] = tuple(_checked("folders", folder, str) for folder in folders)
    return MachineProfile(**{field.name: values[field.name] for field in fields(MachineProfile)})


def _checked(name: str, value: Any, kind: type | tuple[type, ...]) -> Any:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r}")
    return value


def _positive(name: str, value: Any, kind: type | tuple[type, ...]) -> Any:
    if value is not None and not 1 <= _checked(name, value, kind) < _MOST:
        raise ValueError(f"{name} is {value!r}")
    return value
