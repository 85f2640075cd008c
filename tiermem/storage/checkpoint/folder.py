"""A checkpoint: one safetensors file, or a folder of them; only the headers have been read."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NoReturn

import torch

from tiermem.errors import CheckpointError, StorageError
from tiermem.io.engine import memory_view
from tiermem.storage.checkpoint.header import (
    LFS_POINTER,
    MAX_HEADER_NBYTES,
    POINTER_SAID,
    BadJsonError,
    StoredTensor,
    parse_object,
    pread_exactly,
    read_header,
    shown,
)

INDEX_SUFFIX = ".json"
"""Suffix of an index: ``model.safetensors.index.json``, ``model.safetensors.index.fp16.json``."""

PIPELINE = "model_index.json"
"""The file in a folder of diffusers whose models are in folders of their own."""

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
)
"""The files that are looked for in a folder; the first that exists counts.

If there are one file and an index, transformers takes the file, diffusers the index.
"""

_STEMS = ("model.", "model-", "diffusion_pytorch_model.", "diffusion_pytorch_model-")

ADAPTERS = "adapter_config.json"
"""The file in a folder of peft's adapters."""

PICKLED_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "diffusion_pytorch_model.bin")
"""Files in a folder that was saved without safetensors."""


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Identifies a file, to check that it is still the one whose header was read.

    Attributes:
        device: Number of its file system (``st_dev``).
        inode: Number of the file there (``st_ino``).
        size: Length in bytes.
        mtime_ns: Time of the last change, in nanoseconds.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, fd: int) -> FileIdentity:
        """Returns the identity of an open file."""
        facts = os.fstat(fd)
        return cls(facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The files of a checkpoint and the tensors in them. No file stays open.

    Attributes:
        paths: The files; symbolic links are not resolved, so that messages show the user's paths.
        tensors: Every tensor by name, with its file and its place there.
        metadata: The merged ``__metadata__`` of the files; for keys that differ, the first file's.
        identities: The identity of each file when its header was read.
    """

    paths: tuple[Path, ...]
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    identities: tuple[FileIdentity, ...]

    @classmethod
    def open(cls, path: str | os.PathLike[str], variant: str | None = None) -> CheckpointFiles:
        """Reads and checks the headers of a checkpoint.

        Args:
            path: A safetensors file, an index (``*.json``), or a folder with one of
                :data:`WEIGHT_FILES`. Symbolic links are followed.
            variant: The variant of a folder's files, such as ``"fp16"`` for
                ``model.fp16.safetensors``.

        Raises:
            CheckpointError: If there is none, or a file or the index is not valid.
            StorageError: If reading fails.
        """
        found = _weight_file(Path(path).absolute(), variant)
        if not found.name.endswith(INDEX_SUFFIX):
            return cls._of_files([found])
        named = _read_index(found)
        names = sorted(set(named.values()))
        paths = [found.parent / name for name in names]
        _check_there(found, paths)
        files = cls._of_files(paths)
        files._check_index(found, named, names)
        return files

    @classmethod
    def _of_files(cls, paths: list[Path]) -> CheckpointFiles:
        tensors: dict[str, StoredTensor] = {}
        metadata: dict[str, str] = {}
        identities = []
        for file, path in enumerate(paths):
            with open_to_read(path) as fd:
                identity = FileIdentity.of(fd)
                header = read_header(fd, path, file)
            for name, stored in header.tensors.items():
                if name in tensors:
                    other = paths[tensors[name].file]
                    raise CheckpointError(
                        f"tensor {shown(name)} is in two files: {other} and {path}"
                    )
                tensors[name] = stored
            metadata = {**header.metadata, **metadata}
            identities.append(identity)
        return cls(tuple(paths), tensors, metadata, tuple(identities))

    def _check_index(self, index: Path, named: dict[str, str], names: list[str]) -> None:
        """Checks that each tensor of an index is in its file.

        Tensors of these files that the index does not name are included: transformers
        takes the list of files from an index, and the tensors from their headers.
        """
        for name, file in named.items():
            stored = self.tensors.get(name)
            if stored is None:
                raise CheckpointError(
                    f"{index}: tensor {shown(name)} is not in {shown(file)}, where the index has "
                    "it; a file of another checkpoint may have its name"
                )
            if names[stored.file] != file:
                raise CheckpointError(
                    f"{index}: tensor {shown(name)} is in {shown(names[stored.file])}, not in "
                    f"{shown(file)}, where the index has it"
                )

    def check_unchanged(self, fd: int, index: int) -> None:
        """Checks that an open file is the one whose header was read, unchanged.

        Args:
            fd: The file, opened later.
            index: Which of the files it should be.

        Raises:
            StorageError: If it was replaced, written or truncated since.
        """
        path = str(self.paths[index])
        try:
            before, now = self.identities[index], FileIdentity.of(fd)
        except OSError as error:  # a network file system forgets replaced files
            raise StorageError(
                "the file is gone", kind="checkpoint", path=path, errno=error.errno
            ) from error
        if now == before:
            return
        same = (now.device, now.inode) == (before.device, before.inode)
        if not same:
            what = "the path leads to another file"
        elif now.size != before.size:
            what = f"it had {before.size} bytes and has {now.size}"
        else:
            what = "it was written"
        raise StorageError(
            f"the checkpoint changed after its header was read: {what}; load it again, and do "
            "not write to files that are in use",
            kind="checkpoint",
            path=path,
        )

    def read_tensor(self, name: str) -> torch.Tensor:
        """Reads one tensor into new host memory; for small ones.

        Raises:
            CheckpointError: If there is no such tensor, or the file is gone.
            StorageError: If the file changed since its header was read, or reading fails.
        """
        stored = self.tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{self.paths[0].parent}: there is no tensor {shown(name)}")
        path = self.paths[stored.file]
        # As bytes first: an empty tensor may have a shape that no other call accepts.
        flat = torch.empty(stored.nbytes, dtype=torch.uint8, device="cpu")
        with open_to_read(path) as fd:
            self.check_unchanged(fd, stored.file)
            view = memory_view(flat.data_ptr(), stored.nbytes) if stored.nbytes else memoryview(b"")
            pread_exactly(fd, view, stored.offset, path, f"tensor {shown(name)}")
        return flat.view(stored.dtype).reshape(stored.shape)

    def read_view(
        self, shape: Sequence[int], dtype: torch.dtype, runs: Iterable[tuple[int, int, int]]
    ) -> torch.Tensor:
        """Reads a contiguous tensor from runs of bytes into new host memory.

        Args:
            shape: Sizes.
            dtype: Dtype of the elements.
            runs: Index of the file, first byte and length of each run, in the tensor's order.

        Raises:
            CheckpointError: If a file is gone.
            StorageError: If a file changed since its header was read, or reading fails.
        """
        flat = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device="cpu")
        view = memory_view(flat.data_ptr(), len(flat)) if len(flat) else memoryview(b"")
        with contextlib.ExitStack() as stack:
            opened: dict[int, int] = {}
            at = 0
            for file, offset, nbytes in runs:
                if file not in opened:
                    opened[file] = stack.enter_context(open_to_read(self.paths[file]))
                    self.check_unchanged(opened[file], file)
                part = view[at : at + nbytes]
                pread_exactly(opened[file], part, offset, self.paths[file], "a tensor")
                at += nbytes
        return flat.view(dtype).reshape(tuple(shape))

    def map_file(self, index: int) -> torch.UntypedStorage:
        """Maps a file into memory privately: writes to the memory do not change the file.

        Raises:
            CheckpointError: If the file is gone.
            StorageError: If it changed since its header was read.
        """
        with open_to_read(self.paths[index]) as fd:
            self.check_unchanged(fd, index)
        size = self.identities[index].size
        # typed as one of its base classes
        return torch.UntypedStorage.from_file(str(self.paths[index]), False, size)  # type: ignore[return-value]


@contextlib.contextmanager
def open_to_read(path: Path) -> Iterator[int]:
    """Opens a file of a checkpoint; yields its descriptor.

    Raises:
        CheckpointError: If it does not exist, is not readable, or is not a file.
        StorageError: If the disk fails.
    """
    try:
        # Without O_NONBLOCK the open of a pipe would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        _cannot_open(path, error)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CheckpointError(f"{path}: it is no file")
        yield fd
    finally:
        os.close(fd)


def _check_there(index: Path, paths: Sequence[Path]) -> None:
    """Raises if files of an index are missing; names all of them."""
    missing = [str(path) for path in paths if not os.path.lexists(path)]
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise CheckpointError(
            f"{index} names {len(paths)} files, and {len(missing)} of them are missing: "
            f"{', '.join(missing[:4])}{more}: there is no such file; download what is missing"
        )


def _cannot_open(path: Path, error: OSError | ValueError) -> NoReturn:
    if isinstance(error, OSError) and error.errno == errno.EIO:
        raise StorageError(
            "opening failed", kind="checkpoint", path=str(path), errno=error.errno
        ) from error
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        raise CheckpointError(f"{path}: this link leads nowhere; download it again") from error
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise CheckpointError(
            f"{path}: there is no such file or folder; a model of the Hugging Face Hub is "
            "downloaded first: huggingface_hub.snapshot_download(its name) returns its folder"
        ) from error
    reason = getattr(error, "strerror", None) or str(error)
    raise CheckpointError(f"{shown(str(path))}: it cannot be opened ({reason})") from error


def _weight_file(path: Path, variant: str | None) -> Path:
    """Returns the file to begin with: weights, or an index of them."""
    try:
        if not stat.S_ISDIR(os.stat(path).st_mode):
            return path
    except (OSError, ValueError) as error:
        _cannot_open(path, error)
    names = WEIGHT_FILES if variant is None else tuple(_of(variant, n) for n in WEIGHT_FILES)
    for name in names:
        if os.path.lexists(path / name):
            return path / name
    raise CheckpointError(
        f"{path}: this folder has no {names[0]} and no {names[1]}; name a folder "
        "with one of them, or a safetensors file" + _what_instead(path)
    )


def _of(variant: str, name: str) -> str:
    """Returns the name of a variant's file: the variant precedes the name's last part."""
    stem, _, suffix = name.rpartition(".")
    return f"{stem}.{variant}.{suffix}"


def _what_instead(path: Path) -> str:
    """Returns the text of a message about a folder's other files."""
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return ""
    if PIPELINE in names:
        return (
            f". {PIPELINE} is of a pipeline of diffusers: name the folder of one of its models"
            + _models_in(path, names)
        )
    weights = [n for n in names if n.endswith((".safetensors", INDEX_SUFFIX)) and ".safe" in n]
    ours = [n for n in weights if n.startswith(_STEMS)]
    whole = [n for n in ours if "-of-" not in n]  # of a variant, such as fp16
    if whole:
        return f". It has {', '.join(shown(name) for name in whole[:4])}: name one of these"
    if ours:
        return f". It has {shown(ours[0])}, of several, and no index of them: download it again"
    if ADAPTERS in names:
        return f". {ADAPTERS} says that it has adapters{_base_said(path / ADAPTERS)}"
    pickled = next((name for name in PICKLED_FILES if name in names), None)
    if pickled:
        return (
            f". {pickled} can only be read as a whole: load the model from it and save it again, "
            "with transformers by from_pretrained(folder).save_pretrained(another)"
        )
    packed = next((name for name in names if name.lower().endswith(".gguf")), None)
    if packed:
        return (
            f". {shown(packed)} is packed as llama.cpp does it: make safetensors of it, with "
            f"transformers by from_pretrained(folder, gguf_file={shown(packed)})"
            ".save_pretrained(another)"
        )
    if weights:
        return f". It has {', '.join(shown(name) for name in weights[:4])}: name one of these"
    return _models_in(path, names, ". There are models in folders of it: name one of them")


def _models_in(path: Path, names: Sequence[str], said: str = "") -> str:
    """Returns which folders in a folder have weights; "" for none."""
    folders = [name for name in names if _has_weights(path / name)]
    return f"{said} ({', '.join(folders)})" if folders else ""


def _base_said(path: Path) -> str:
    """Returns the advice for a folder of adapters, given their configuration."""
    base = base_of(path)
    on = f" on {shown(base)}" if base else ""
    return (
        f"{on}: load that model with lora=peft.LoraConfig.from_pretrained({shown(str(path.parent))}"
        "), then call tiermem.load_adapters(model, that folder)"
    )


def base_of(path: Path) -> str | None:
    """Returns the model that adapters are for, as their ``adapter_config.json`` names it."""
    try:
        base = json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return base if isinstance(base, str) and base else None


def _has_weights(path: Path) -> bool:
    return any(os.path.lexists(path / name) for name in WEIGHT_FILES)


def _read_index(path: Path) -> dict[str, str]:
    """Returns the file name of each tensor, from an index."""
    with open_to_read(path) as fd:
        size = os.fstat(fd).st_size
        if size > MAX_HEADER_NBYTES:
            raise CheckpointError(
                f"{path}: {size} bytes are no index (at most {MAX_HEADER_NBYTES} are read)"
            )
        written = bytearray(size)
        pread_exactly(fd, memoryview(written), 0, path, "the index")
    if written.startswith(LFS_POINTER):
        raise CheckpointError(f"{path}: {POINTER_SAID}")
    try:
        index = parse_object(written.decode("utf-8"))
    except (BadJsonError, UnicodeDecodeError) as error:
        why = "it is no UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise CheckpointError(f"{path}: it is no valid index: {why}") from None
    named = index.get("weight_map")
    if not isinstance(named, dict) or not named:
        raise CheckpointError(f"{path}: it is no valid index: 'weight_map' names no tensors")
    for name, file in named.items():
        _check_inside(path, name, file)
    return {name: str(PurePosixPath(file)) for name, file in named.items()}


def _check_inside(path: Path, name: str, file: object) -> None:
    if not isinstance(file, str) or not file or "\0" in file:
        raise CheckpointError(f"{path}: the index names no file for tensor {shown(name)}")
    named = PurePosixPath(file)
    if named.is_absolute() or ".." in named.parts:
        raise CheckpointError(
            f"{path}: the index has tensor {shown(name)} in {shown(file)}, which is outside of "
            "its folder"
        )
