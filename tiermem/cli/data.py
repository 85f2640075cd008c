"""Bytes to train on: by default the source of Python's standard library."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tiermem.errors import ConfigError

LIMIT = 16 * 2**20
"""Bytes read at most."""
_NOT_PYTHONS = {"site-packages", "dist-packages", "test", "tests"}
"""Folders below the standard library's that are not looked into."""


class Corpus:
    """A run of bytes, and random windows of it.

    Args:
        data: The bytes.
        source: Where they came from, for people.
    """

    def __init__(self, data: bytes, source: str) -> None:
        self.source = source
        self.nbytes = len(data)
        # torch refuses an empty buffer and complains about a read-only one.
        self._bytes = torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)

    def content(self) -> bytes:
        """Returns all the bytes."""
        return self._bytes[: self.nbytes].numpy().tobytes()

    def batch(self, generator: torch.Generator, batch: int, length: int) -> Tensor:
        """Draws windows.

        Args:
            generator: Source of the positions; the same state gives the same windows.
            batch: Number of windows.
            length: Bytes in each.

        Returns:
            An int64 tensor of shape ``(batch, length)``.

        Raises:
            ConfigError: If the corpus is shorter than one window.
        """
        last = self.nbytes - length
        if last < 0:
            raise ConfigError(
                f"{self.source}: {self.nbytes} bytes are fewer than one window of {length}; "
                "give more --data or a smaller --context"
            )
        starts = torch.randint(last + 1, (batch, 1), generator=generator)
        return self._bytes[starts + torch.arange(length)].long()


def load_corpus(paths: Sequence[str] = (), limit: int = LIMIT) -> Corpus:
    """Reads files in a fixed order, up to a limit.

    Args:
        paths: Files, or folders whose files are read; the standard library's
            ``.py`` files when there are none.
        limit: Bytes read at most.

    Returns:
        The corpus.

    Raises:
        ConfigError: If a path is not there or cannot be read, or nothing was found.
    """
    if paths:
        files = [file for path in paths for file in _files(Path(path))]
        source = ", ".join(paths)
    else:
        files = _standard_library()
        source = "the Python standard library"
    parts: list[bytes] = []
    room = limit
    for file in files:
        if room <= 0:
            break
        try:
            with open(file, "rb") as stream:
                part = stream.read(room)
        except OSError as error:
            raise ConfigError(f"--data {file}: {error.strerror}") from error
        parts.append(part)
        room -= len(part)
    data = b"".join(parts)
    if not data:
        raise ConfigError(f"{source}: no bytes to train on; give --data")
    return Corpus(data, source)


def _files(path: Path) -> list[Path]:
    try:
        if path.is_dir():
            return sorted(file for file in path.rglob("*") if file.is_file())
        if not path.exists():
            raise ConfigError(f"--data {path}: no such file or folder")
    except OSError as error:  # a folder inside that this user may not read, a name too long
        raise ConfigError(f"--data {error.filename or path}: {error.strerror}") from error
    return [path]


def _standard_library() -> list[Path]:
    """Returns only what Python itself brings: the same bytes wherever that Python is."""
    found: list[Path] = []
    for folder, inside, names in os.walk(sysconfig.get_path("stdlib")):
        inside[:] = [name for name in inside if name not in _NOT_PYTHONS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)
