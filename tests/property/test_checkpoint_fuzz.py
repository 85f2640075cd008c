"""Headers and indexes that were tampered with, against the safetensors library itself."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file
from support_checkpoint import entry, file_bytes, same_bits, write_folder
from support_examples import examples

from tiermem import CheckpointError
from tiermem.storage.checkpoint.folder import CheckpointFiles
from tiermem.storage.checkpoint.header import DTYPES

SIZES = {name: dtype.itemsize for name, dtype in DTYPES.items()}

texts = st.text('aß\U0001f600"\\\n\0', max_size=3)
names = st.one_of(st.sampled_from(["a", "b.weight", "__metadata"]), texts)
shapes = st.lists(st.integers(0, 3), max_size=3)
ODD = (
    "0 -0 1 -1 00 01 1.0 1e0 1E400 4294967296 9223372036854775808 18446744073709551615 "
    '18446744073709551616 NaN -Infinity null true [] {} [0] "F32" "F4" "F6_E2M3" "U8" "" '
    '"\\ud800" "\\ud83d\\ude00" "\\u0000" , : ] } { [ " \\ '
).split(" ")
"""What may stand in the place of a part of a header."""


@pytest.fixture(scope="module")
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:
        yield Path(name) / "a.safetensors"


@st.composite
def valid(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """Draws a header, its entries in any order, and data."""
    header: dict[str, Any] = {}
    end = 0
    for name in draw(st.lists(names, max_size=4, unique=True)):
        dtype, shape, begin = draw(st.sampled_from(sorted(SIZES))), draw(shapes), end
        end = begin + SIZES[dtype] * int(torch.tensor(shape, dtype=torch.int64).prod())
        header[name] = entry(dtype, shape, begin, end)
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.dictionaries(texts, texts))
    order = draw(st.permutations(list(header)))
    return {name: header[name] for name in order}, draw(st.binary(min_size=end, max_size=end))


def text_of(header: dict[str, Any], draw: st.DrawFn) -> str:
    space = draw(st.sampled_from(["", " ", "\n"]))
    text = json.dumps(header, ensure_ascii=draw(st.booleans()), separators=(f",{space}", ":"))
    return text + draw(st.sampled_from(["", "  ", "\n", "\t\r"]))


@st.composite
def other_fields(draw: st.DrawFn) -> bytes:
    """Draws a valid file with one field changed, added, taken out, or there twice."""
    header, data = draw(valid())
    if header:
        name = draw(st.sampled_from(list(header)))
        fields = header[name]
        field = draw(st.sampled_from(["dtype", "shape", "data_offsets", "x", "y"]))
        if draw(st.booleans()):
            fields.pop(field, None)
        else:
            fields[field] = draw(
                st.recursive(
                    st.one_of(st.none(), st.integers(-2, 40), st.floats(), st.sampled_from(ODD)),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner),
                    max_leaves=4,
                )
            )
    return file_bytes(text_of(header, draw), data)


@st.composite
def other_text(draw: st.DrawFn) -> bytes:
    """Draws a valid file with parts of the header's text in the place of others."""
    header, data = draw(valid())
    text = text_of(header, draw)
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, len(text)))
        end = min(len(text), at + draw(st.integers(0, 3)))
        text = text[:at] + draw(st.sampled_from(ODD)) + text[end:]
    return file_bytes(text, data)


@st.composite
def other_numbers(draw: st.DrawFn) -> bytes:
    """Draws a valid file with one number of a shape or of an offset changed."""
    header, data = draw(valid())
    tensors = [fields for name, fields in header.items() if name != "__metadata__"]
    if tensors:
        fields = draw(st.sampled_from(tensors))
        numbers = fields[draw(st.sampled_from(["shape", "data_offsets"]))]
        if numbers:
            at = draw(st.integers(0, len(numbers) - 1))
            change = st.sampled_from([2**32, 2**62, 2**63, 2**64 - 1, 2**64])
            near = st.integers(-2, 2).map(lambda by: numbers[at] + by)
            numbers[at] = draw(st.one_of(near, change))
    return file_bytes(text_of(header, draw), data)


@st.composite
def other_bytes(draw: st.DrawFn) -> bytes:
    """Draws a valid file with bytes changed, added or taken out anywhere."""
    header, data = draw(valid())
    written = bytearray(file_bytes(text_of(header, draw), data))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(written)))
        end = min(len(written), at + draw(st.integers(0, 2)))
        written[at:end] = draw(st.binary(max_size=2))
    return bytes(written)


def only_we_refuse(written: bytes) -> bool:
    """Whether a file that the library takes is one of those that are refused nevertheless."""
    twice = False

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal twice
        twice = twice or len(dict(found)) < len(found)
        return dict(found)

    nbytes = int.from_bytes(written[:8], "little")
    text = written[8 : 8 + nbytes].decode()
    header = json.loads(text, object_pairs_hook=pairs)
    header.pop("__metadata__", None)
    entries = header.values()
    by_position = any(isinstance(e, list) or isinstance(e["dtype"], dict) for e in entries)
    return twice or text[0] != "{" or by_position or any(e["dtype"] == "F4" for e in entries)


def compare(path: Path, written: bytes) -> None:
    path.write_bytes(written)
    expected, files = None, None
    try:
        expected = load_file(path)
    except (SafetensorError, TypeError, RuntimeError) as error:
        event(f"refused: {type(error).__name__}")
    try:
        files = CheckpointFiles.open(path)
    except CheckpointError:
        pass
    if expected is None:
        assert files is None, "the library refuses it"
    elif files is None:
        assert only_we_refuse(written)
        event("refused by us alone")
    else:
        assert not only_we_refuse(written)
        assert list(files.tensors.keys() ^ expected.keys()) == []
        assert all(same_bits(files.read_tensor(name), expected[name]) for name in expected)
        event("taken")


@given(st.data())
@settings(max_examples=examples(60))
def test_valid_files(path: Path, data: st.DataObject) -> None:
    header, content = data.draw(valid())
    written = file_bytes(data.draw(st.composite(lambda draw: text_of(header, draw))()), content)
    compare(path, written)
    files = CheckpointFiles.open(path)
    assert files.metadata == header.pop("__metadata__", {})
    assert set(files.tensors) == set(header)


@given(st.one_of(other_fields(), other_text(), other_numbers(), other_bytes()))
@settings(max_examples=examples(300, 20_000))
def test_files_that_were_tampered_with(path: Path, written: bytes) -> None:
    compare(path, written)


@given(st.data())
@settings(max_examples=examples(60))
def test_indexes_that_were_tampered_with(path: Path, data: st.DataObject) -> None:
    """Whatever an index says, what is read is in the folder, and is what its files hold."""
    first, second = {"a": torch.arange(2), "b": torch.ones(1)}, {"c": torch.zeros(1)}
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        folder = Path(name) / "folder"
        tensors = write_folder(folder, {"one": first, "two": second})
        write_folder(Path(name), {"outside": first})
        index = folder / "model.safetensors.index.json"
        named = data.draw(st.permutations([("a", "one"), ("b", "one"), ("c", "two")]))
        text = json.dumps({"weight_map": dict(named[: data.draw(st.integers(1, 3))])})
        if data.draw(st.booleans()):
            parts = ["a", "c", "d", "one", "two", "../outside", f"{name}/outside", ".", "./one", ""]
            old = data.draw(st.sampled_from(['"a"', '"c"', '"one"', '"two"', "{"]))
            new = data.draw(st.sampled_from([*map(json.dumps, parts), *ODD]))
            text = text.replace(old, new, data.draw(st.integers(1, 3)))
        index.write_text(text)
        try:
            files = CheckpointFiles.open(folder)
        except CheckpointError:
            event("refused")
            return
        event("taken")
        weight_map = json.loads(index.read_text())["weight_map"]
        assert set(weight_map) <= set(files.tensors)
        assert {p.resolve().parent for p in files.paths} == {folder.resolve()}
        for tensor in files.tensors:
            assert same_bits(files.read_tensor(tensor), tensors[tensor])
