"""The header of one safetensors file: which bytes belong to which tensor.

The format is that of https://github.com/huggingface/safetensors: the length of the header
(8 bytes, little-endian), the header (a JSON object, padded with spaces), the tensors' bytes
without gaps. What that library refuses is refused here. These are also refused, which
no writer produces and the library happens to accept: duplicate keys, white space before the
object, fields by position instead of by name, and numbers of less than a byte (F4).

The library returns tensors, not offsets, and maps the file into memory: if the file is
then truncated, the process is killed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from tiermem.errors import CheckpointError, StorageError

MAX_HEADER_NBYTES = 100_000_000
"""Maximal length of a header, as in the library."""

LFS_POINTER = b"version https://git-lfs"
"""First bytes of the pointer file that Git LFS leaves instead of a large file."""

POINTER_SAID = (
    "it is a pointer of Git LFS and not the file itself; run `git lfs pull` in its folder, or "
    "download the file"
)
_AGAIN = "; download or copy it again"
_LENGTH_NBYTES = 8
_METADATA = "__metadata__"
_FIELDS = ("dtype", "shape", "data_offsets")
_LARGEST = 2**64 - 1
_LARGEST_FLOAT = 1.79e308
_INTEGER_DIGITS = 20  # more do not fit in 64 bits
_DEEPEST = 125  # levels within a tensor's fields; the library's parser stops there
_SHOWN = 200
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

_DTYPE_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
_WITHOUT_DTYPE = ("F4", "F6_E2M3", "F6_E3M2")

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, attribute)
    for name, attribute in _DTYPE_NAMES.items()
    if hasattr(torch, attribute)  # F8_E8M0 came with torch 2.7
}
"""The format's names of the dtypes that this torch has."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is stored.

    Attributes:
        name: Its key in the file.
        file: Index of the file.
        dtype: Its dtype in the file.
        shape: Its shape.
        offset: First byte, from the beginning of the file; not necessarily aligned.
        nbytes: Length in bytes; 0 if the shape has a zero.
    """

    name: str
    file: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """The contents of one file's header.

    Attributes:
        tensors: Its tensors by name, in the order of their offsets.
        metadata: The free text under ``__metadata__``; empty if there is none.
    """

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


class BadJsonError(ValueError):
    """JSON that is refused, and why; it never leaves this package."""


def read_header(fd: int, path: Path, file: int = 0) -> Header:
    """Reads and checks the header of an open file.

    No memory is allocated for a length that exceeds the file, and no header of more than 100 MB
    is read; time grows with its length, and memory to thirty times that at worst.

    Args:
        fd: The file, open for reading, without O_DIRECT.
        path: Its path, for messages.
        file: Its index, which the tensors get.

    Raises:
        CheckpointError: If it is not a valid safetensors file, naming the file and the tensor.
        StorageError: If reading fails.
    """
    size = os.fstat(fd).st_size
    text, begin = _header_text(fd, path, size)
    try:
        if not text.startswith("{"):
            raise BadJsonError("it does not begin with '{'")
        entries = parse_object(text)
    except BadJsonError as error:
        _refuse(path, f"its header is not the JSON that the format asks for: {error}")
    metadata = _metadata(path, entries.pop(_METADATA, None))
    tensors = [_stored(path, file, begin, name, entry) for name, entry in entries.items()]
    tensors.sort(key=lambda stored: (stored.offset, stored.nbytes))
    _check_cover(path, tensors, begin, size)
    return Header({stored.name: stored for stored in tensors}, metadata)


def parse_object(text: str) -> dict[str, Any]:
    """Reads a JSON object as strictly as the library's parser does, and refuses duplicate keys.

    Returns:
        The object. Integers that 64 bits cannot hold, and ``-0``, are floats.

    Raises:
        BadJsonError: If it is not valid, with the reason.
    """
    try:
        found = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_constant,
        )
        if _SURROGATE.search(text):  # Python takes halves of a pair, of which UTF-8 has none
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise BadJsonError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise BadJsonError("it has half of a surrogate pair in a text") from None
    except json.JSONDecodeError as error:  # it holds the whole text, which must be freed
        raise BadJsonError(f"{error.msg} at character {error.pos}") from None
    if not isinstance(found, dict):
        raise BadJsonError("it is no object")
    return found


def shown(name: str) -> str:
    """Returns a name as a message shows it: quoted, and shortened if long."""
    return repr(name if len(name) <= _SHOWN else f"{name[:_SHOWN]}...")


def pread_exactly(fd: int, view: memoryview, offset: int, path: Path, what: str) -> None:
    """Fills ``view`` with the file's bytes from ``offset`` on.

    Raises:
        StorageError: If reading fails, or the file is too short.
    """
    done = 0
    while done < view.nbytes:
        try:
            count = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            raise StorageError(
                f"reading {what} failed",
                kind="checkpoint",
                path=str(path),
                offset=offset + done,
                nbytes=view.nbytes - done,
                errno=error.errno,
            ) from error
        if count == 0:
            raise StorageError(
                f"the file ended within {what}; it was made shorter meanwhile",
                kind="checkpoint",
                path=str(path),
                offset=offset + done,
                nbytes=view.nbytes - done,
            )
        done += count


# Parts of reading -----------------------------------------------------------------------


def _header_text(fd: int, path: Path, size: int) -> tuple[str, int]:
    """Returns the header, and the offset after it."""
    if size < _LENGTH_NBYTES:
        why = f"it has {size} bytes, fewer than the length of a header; it was cut off"
        _refuse(path, why + _AGAIN)
    length = bytearray(_LENGTH_NBYTES)
    pread_exactly(fd, memoryview(length), 0, path, "the length of the header")
    nbytes = int.from_bytes(length, "little")
    if nbytes > MAX_HEADER_NBYTES:
        begin = bytearray(min(size, len(LFS_POINTER)))
        pread_exactly(fd, memoryview(begin), 0, path, "the beginning")
        if begin == LFS_POINTER:
            _refuse(path, POINTER_SAID)
        if begin.startswith((b"PK", b"\x80")):
            _refuse(
                path,
                "torch.save wrote it, and it can only be read as a whole; write what torch.load "
                "reads of it with safetensors.torch.save_file",
            )
        _refuse(
            path,
            f"its first 8 bytes ask for a header of {nbytes} bytes, more than "
            f"{MAX_HEADER_NBYTES}; it is no safetensors file, or a damaged one: download it again",
        )
    if nbytes > size - _LENGTH_NBYTES:
        _refuse(path, f"its header has {nbytes} bytes, the file {size}; it was cut off{_AGAIN}")
    header = bytearray(nbytes)
    pread_exactly(fd, memoryview(header), _LENGTH_NBYTES, path, "the header")
    try:
        return header.decode("utf-8"), _LENGTH_NBYTES + nbytes
    except UnicodeDecodeError as error:
        at = error.start
    _refuse(path, f"its header is no UTF-8 at byte {at}")


def _metadata(path: Path, found: object) -> dict[str, str]:
    if found is None:  # `null` counts as absent, as in the library
        return {}
    if not isinstance(found, dict):
        _refuse(path, f"{_METADATA} is no object")
    for key, value in found.items():
        if not isinstance(value, str):
            _refuse(path, f"{_METADATA} has {shown(key)}, which is no text")
    return found


def _stored(path: Path, file: int, begin: int, name: str, entry: object) -> StoredTensor:
    """Returns where a tensor is stored, after all checks that concern it alone."""
    if not isinstance(entry, dict):
        _refuse(path, f"tensor {shown(name)} is no object with the fields {', '.join(_FIELDS)}")
    for field in _FIELDS:
        if field not in entry:
            _refuse(path, f"tensor {shown(name)} has no field {field!r}")
    if len(entry) > len(_FIELDS):
        _check_depth(path, name, entry)
    dtype = _dtype(path, name, entry["dtype"])
    shape = tuple(_numbers(path, name, entry, "shape"))
    offsets = _numbers(path, name, entry, "data_offsets")
    if len(offsets) != 2:
        _refuse(path, f"tensor {shown(name)}: 'data_offsets' has {len(offsets)} numbers, not 2")
    nbytes = _nbytes(path, name, dtype, shape)
    first, end = offsets
    if end - first != nbytes:
        _refuse(
            path,
            f"tensor {shown(name)}: {nbytes} bytes by dtype and shape, but bytes {first} to "
            f"{end} by 'data_offsets'",
        )
    return StoredTensor(name, file, dtype, shape, begin + first, nbytes)


def _dtype(path: Path, name: str, written: object) -> torch.dtype:
    if not isinstance(written, str):
        _refuse(path, f"tensor {shown(name)}: its dtype is no text")
    found = DTYPES.get(written)
    if found is not None:
        return found
    why = "which the format does not know"
    if written in _DTYPE_NAMES or written in _WITHOUT_DTYPE:
        why = f"for which torch {torch.__version__} has none of whole bytes; convert the tensor"
    _refuse(path, f"tensor {shown(name)}: its dtype is {shown(written)}, {why}")


def _numbers(path: Path, name: str, entry: dict[str, Any], field: str) -> list[int]:
    found = entry[field]
    # A bool is an int to Python, so types are compared.
    if isinstance(found, list) and all(type(n) is int and 0 <= n <= _LARGEST for n in found):
        return found
    _refuse(path, f"tensor {shown(name)}: {field!r} is no list of whole numbers from 0 to 2**64-1")


def _nbytes(path: Path, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    elements = 1
    for length in shape:
        elements *= length
        if elements > _LARGEST:  # from the left, so that a zero further right does not hide it
            break
    nbits = elements * dtype.itemsize * 8
    if nbits > _LARGEST:
        _refuse(path, f"tensor {shown(name)}: the size of its shape is past 64 bits")
    if elements == 0:
        try:
            torch.empty(0, dtype=torch.uint8, device="cpu").reshape(shape)
        except (RuntimeError, TypeError, ValueError, OverflowError):
            _refuse(path, f"tensor {shown(name)}: torch has no empty tensor of its shape")
    return nbits // 8


def _check_cover(path: Path, tensors: list[StoredTensor], begin: int, size: int) -> None:
    """Checks that tensors, by ascending offset, cover the file to its end without gaps."""
    at = begin
    for stored in tensors:
        if stored.offset != at:
            what = "a hole of" if stored.offset > at else "it overlaps the one before by"
            _refuse(
                path,
                f"tensor {shown(stored.name)} begins at byte {stored.offset - begin} of the data, "
                f"not at {at - begin}: {what} {abs(stored.offset - at)} bytes",
            )
        at += stored.nbytes
    if at != size:
        last = f"tensor {shown(tensors[-1].name)}" if tensors else "the header"
        what = "it was cut off" if at > size else "something was added"
        _refuse(path, f"{last}, the last, ends at byte {at}, the file at {size}; {what}{_AGAIN}")


def _check_depth(path: Path, name: str, entry: dict[str, Any]) -> None:
    """Refuses unused fields that are nested deeper than the library reads."""
    level: list[object] = [value for field, value in entry.items() if field not in _FIELDS]
    for _ in range(_DEEPEST + 1):
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            return
    _refuse(path, f"tensor {shown(name)} has fields that are nested too deeply")


def _inside(value: object) -> Iterator[object]:
    """Yields the containers' contents, and a placeholder for an empty container."""
    if isinstance(value, dict):
        yield from value.values() or (None,)
    elif isinstance(value, list):
        yield from value or (None,)


# JSON -----------------------------------------------------------------------------------


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise BadJsonError(f"the key {shown(key)} comes twice")
            seen.add(key)
    return found


def _integer(text: str) -> int | float:
    # Only short ones: Python's time grows with the square of the digits.
    if len(text) <= _INTEGER_DIGITS and text != "-0":
        value = int(text)
        if -(2**63) <= value <= _LARGEST:
            return value
    return _float(text)


def _float(text: str) -> float:
    value = float(text)
    if not abs(value) < _LARGEST_FLOAT:
        raise BadJsonError(f"the number {text[:_SHOWN]} is out of range")
    return value


def _constant(text: str) -> NoReturn:
    raise BadJsonError(f"{text} is no number of JSON")


def _refuse(path: Path, why: str) -> NoReturn:
    raise CheckpointError(f"{path}: {why}")
