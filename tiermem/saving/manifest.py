"""Reads and checks a checkpoint's manifest and headers, before anything is loaded."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import xxhash

from tiermem.errors import CheckpointError, IntegrityError, TierError
from tiermem.runtime.base.undisturbed import undisturbed
from tiermem.saving.folder import MANIFEST, VERSION, CheckpointFolder, manifest_of, told_of
from tiermem.saving.layout import DTYPES, Spec
from tiermem.saving.reader import Stored
from tiermem.saving.save import seal_of
from tiermem.saving.writer import Checks


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose manifest and headers have been verified.

    Attributes:
        path: Its folder.
        manifest: Everything that is not a tensor.
        stored: Where the tensors are, by key.
        checks: Their checksums.
    """

    path: str
    manifest: dict[str, Any]
    stored: dict[str, Stored]
    checks: Checks


@contextmanager
def open_checkpoint(folder: CheckpointFolder) -> Iterator[Checkpoint]:
    """Reads manifest and headers, and keeps the files of tensors open.

    So all of it is one checkpoint, even if another process saves to the same path meanwhile.

    Raises:
        CheckpointError: If there is no checkpoint of this version, or files are missing, or have
            other lengths.
        IntegrityError: If manifest or a header differs from what was written.
        StorageError: If they cannot be read.
    """
    fds: list[int] = []
    found: list[Checkpoint] = []

    def read() -> None:
        while not found:
            found.extend(_opened(folder.path, fds))

    try:
        with told_of(folder.path, "the checkpoint cannot be read:"):
            undisturbed(read)  # no Ctrl-C between opening a file and storing its number
        yield found[0]
    finally:
        _close(fds)


def _close(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


def _opened(path: str, fds: list[int]) -> list[Checkpoint]:
    """Returns the checkpoint in a folder; empty if another one took its place meanwhile.

    Args:
        path: The folder.
        fds: Receives the opened files.
    """
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"there is no checkpoint {path}: no such folder; correct the path"
        ) from None
    fds.append(directory)
    try:
        return [_read(path, directory, fds)]
    except TierError:
        if _is_still(path, directory):
            raise
    _close(fds)  # it has been replaced, and its files are being removed
    return []


def _is_still(path: str, directory: int) -> bool:
    """Whether a path leads to an open folder, or to nothing."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(directory))
    except FileNotFoundError:
        return True


def _read(path: str, directory: int, fds: list[int]) -> Checkpoint:
    manifest = _manifest(path, directory)
    stored: dict[str, Stored] = {}
    for name, described in manifest["files"].items():
        fd, begin = _beginning(path, directory, name, described, fds)
        if name.endswith(".safetensors"):
            _take_header(path, name, fd, begin, stored)
    checks = {key: [(n, d) for n, d in runs] for key, runs in manifest["checks"].items()}
    if stored.keys() != checks.keys():
        raise CheckpointError(
            f"{path}: tensors without checksums, or the other way round: "
            f"{sorted(stored.keys() ^ checks.keys())[:3]}"
        )
    return Checkpoint(path, manifest, stored, checks)


def _manifest(path: str, directory: int) -> dict[str, Any]:
    found = manifest_of(path, directory)
    if found is None:
        raise CheckpointError(
            f"{path} has no {MANIFEST} that tier.save() finished, so it is no checkpoint of a run; "
            "weights alone are loaded with tiermem.load_checkpoint(model, path, tier=tier)"
        )
    if found.get("version") != VERSION:
        raise CheckpointError(
            f"{path} is of version {found.get('version')!r} of the format, this tiermem reads "
            f"version {VERSION}; use the tiermem that saved it"
        )
    seal = found.pop("seal", None)
    if seal != seal_of(json.dumps(found, separators=(",", ":"))):
        raise IntegrityError(
            "the manifest of a checkpoint is not what was written: its checksum differs",
            kind="checkpoint",
            path=os.path.join(path, MANIFEST),
        )
    return found


def _beginning(
    folder: str, directory: int, name: str, described: dict[str, Any], fds: list[int]
) -> tuple[int, bytes]:
    """Opens a file; returns it with its first bytes, compared with their checksum."""
    path = os.path.join(folder, name)
    nbytes, digest = described["begin"]
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        raise CheckpointError(f"the checkpoint's file {path} is missing") from None
    fds.append(fd)
    found = os.fstat(fd).st_size
    with open(fd, "rb", closefd=False) as file:
        begin = file.read(nbytes)
    if found != described["nbytes"]:
        raise CheckpointError(
            f"the checkpoint's file {path} has {found} bytes, not {described['nbytes']}: it was "
            "truncated, or is another file"
        )
    if xxhash.xxh3_64_hexdigest(begin) != digest:
        raise IntegrityError(
            f"the first {nbytes} bytes of the checkpoint's file {name!r} are not what was "
            "written: their checksum differs",
            kind="checkpoint", path=path, offset=0, nbytes=nbytes,
        )  # fmt: skip
    return fd, begin


def _take_header(path: str, name: str, fd: int, begin: bytes, stored: dict[str, Stored]) -> None:
    """Enters the tensors of a file whose header has been verified."""
    try:  # tensors are read past the page cache, if the file system can
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    folder = name[: name.rfind("/") + 1]
    for own, described in json.loads(begin[8:]).items():
        if own != "__metadata__":
            dtype = DTYPES.get(described["dtype"])
            if dtype is None:
                raise CheckpointError(
                    f"tensor {own!r} of {os.path.join(path, name)} has the dtype "
                    f"{described['dtype']}, which this torch does not have"
                )
            spec = Spec(own, dtype, tuple(described["shape"]), folder)
            offset = len(begin) + described["data_offsets"][0]
            stored[spec.key] = Stored(spec, os.path.join(path, name), offset, fd)
