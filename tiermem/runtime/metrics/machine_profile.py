"""The machine profile: speeds of this machine's links, measured once and kept in a file.

``tiermem bench`` measures and saves a profile; ``tiermem plan`` and the scheduler read
it. A file that is missing, damaged or of another format is ignored, with the reason.
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
"""Environment variable that names the file, instead of the one in the cache folder."""

FORMAT = 1
"""Version of the file format; files of another version are not read."""

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
"""Largest size of a profile in bytes; usual ones have about two thousand."""
_MOST = 1 << 60
"""Largest number of bytes, or bytes per second, in a profile, so that results stay finite."""
_TEXTS = ("device", "date", "tiermem", "torch")
_COUNTS = ("nvme_chunk", "nvme_depth")


@dataclass(frozen=True)
class MachineProfile:
    """Measured link speeds, in bytes per second; ``None`` if unknown.

    Attributes:
        device: Name of the device, ``"cpu"`` where host memory stands in for it.
        date: Day of the measurement, such as ``"2026-11-21"``.
        tiermem: Version of tiermem that measured.
        torch: Version of torch.
        h2d: Page-locked host memory to the device.
        d2h: The device to page-locked host memory.
        duplex: Both at once, sum of both.
        d2d: Bytes copied within the device (each is read and written).
        host_copy: Bytes copied within host memory.
        nvme_read: Swap file to the device, through the file mover.
        nvme_write: The device to the swap file, through the file mover.
        nvme_mixed: Both at once, sum of both.
        nvme_chunk: The best size of a request, in bytes.
        nvme_depth: The best number of requests in flight.
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
        """Returns the speed of a copy of that size to the device: that of the next smaller one.

        Args:
            nbytes: Bytes of one copy; below the smallest measured size, that size counts.
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
    """Returns the name that identifies profiles: of the GPU, or ``"cpu"``.

    Args:
        device: Which; the first CUDA device by default, or the CPU if there is none.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def cache_folder() -> Path:
    """Returns tiermem's folder in the user's cache, which may not exist yet."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path there has to be ignored (XDG specification).
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "tiermem"


def profile_path(device: str) -> Path:
    """Returns the file of a device's profile.

    Args:
        device: Its name, see :func:`device_name`.
    """
    if named := os.environ.get(VARIABLE):
        return Path(named)
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return cache_folder() / f"profile-{slug}.json"


def save(profile: MachineProfile, path: str | os.PathLike[str] | None = None) -> Path:
    """Writes a profile to a temporary file and renames it, so readers see the old or the new one.

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
    """Reads a profile; a problem with the file is returned as a reason, never raised.

    Args:
        path: The file; by default that of ``device``, see :func:`profile_path`.
        device: Name of the device it must be of. With a path, any by default; without
            one, this machine's, see :func:`device_name`.

    Returns:
        The profile if there is one that can be used, and a sentence on why, or why not.
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
    """Returns the contents of a file; never waits for one, nor reads more than a profile can have.

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
    """Opens a file; for a pipe, without waiting for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _parse(data: dict[str, Any]) -> MachineProfile:
    """Checks every value; unknown fields are ignored."""
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
