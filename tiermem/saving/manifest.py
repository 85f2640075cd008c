"""Reads and checks a checkpoint's manifest and headers, before anything is loaded."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

import xxhash

from tiermem.errors import CheckpointError, IntegrityError
from tiermem.saving.folder import MANIFEST, VERSION, CheckpointFolder, manifest_of, told_of
from tiermem.saving.layout import DTYPES, Spec
from tiermem.saving.reader import Stored
from tiermem.saving.save import seal_of
from tiermem.saving.writer import Checks


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose manifest and headers are what was written.

    Attributes:
        path: Its folder.
        manifest: What is no tensor.
        stored: Where the tensors are, by their key.
        checks: Their checksums.
    """

    path: str
    manifest: dict[str, Any]
    stored: dict[str, Stored]
    checks: Checks


def open_checkpoint(folder: CheckpointFolder) -> Checkpoint:
    """Reads manifest and headers.

    Raises:
        CheckpointError: If there is no checkpoint of this version, or files are missing, or have
            other lengths.
        IntegrityError: If manifest or a header is not what was written.
        StorageError: If they cannot be read.
    """
    with told_of(folder.path, "the checkpoint cannot be read:"):
        manifest = _manifest(folder.path)
        stored: dict[str, Stored] = {}
        for name, described in manifest["files"].items():
            begin = _beginning(os.path.join(folder.path, name), name, described)
            if name.endswith(".safetensors"):
                _take_header(folder.path, name, begin, stored)
        checks = {key: [(n, d) for n, d in runs] for key, runs in manifest["checks"].items()}
    if stored.keys() != checks.keys():
        raise CheckpointError(
            f"{folder.path}: tensors without checksums, or the other way round: "
            f"{sorted(stored.keys() ^ checks.keys())[:3]}"
        )
    return Checkpoint(folder.path, manifest, stored, checks)


def _manifest(path: str) -> dict[str, Any]:
    if not os.path.isdir(path):
        raise CheckpointError(f"there is no checkpoint {path}: no such folder; correct the path")
    found = manifest_of(path)
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


def _beginning(path: str, name: str, described: dict[str, Any]) -> bytes:
    """Returns the first bytes of a file, compared with their checksum."""
    nbytes, digest = described["begin"]
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno()).st_size
            begin = file.read(nbytes)
    except FileNotFoundError:
        raise CheckpointError(f"the checkpoint's file {path} is missing") from None
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
    return begin


def _take_header(path: str, name: str, begin: bytes, stored: dict[str, Stored]) -> None:
    """Enters the tensors of a file whose header is what was written."""
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
            stored[spec.key] = Stored(spec, os.path.join(path, name), offset)
