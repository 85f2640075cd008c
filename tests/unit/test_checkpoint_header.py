"""Headers of safetensors files: where tensors lie, and everything that is refused."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from support_checkpoint import entry, file_bytes, same_bits

from tiermem import CheckpointError, StorageError
from tiermem.storage.checkpoint import header
from tiermem.storage.checkpoint.folder import CheckpointFiles
from tiermem.storage.checkpoint.header import DTYPES, MAX_HEADER_NBYTES, StoredTensor

GOOD = json.dumps({"a": entry("F32", [2], 0, 8)})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "weights.safetensors"


def test_offsets_are_those_of_the_file(path: Path) -> None:
    tensors = {"b": torch.arange(3, dtype=torch.int8), "a": torch.rand(2, 5)}
    save_file(tensors, path, metadata={"format": "pt", "who": "a test"})
    files = CheckpointFiles.open(path)
    assert files.paths == (path,) and files.metadata == {"format": "pt", "who": "a test"}
    written = path.read_bytes()
    begin = 8 + int.from_bytes(written[:8], "little")
    assert files.tensors["a"] == StoredTensor("a", 0, torch.float32, (2, 5), begin, 40)
    assert files.tensors["b"] == StoredTensor("b", 0, torch.int8, (3,), begin + 40, 3)
    for name, stored in files.tensors.items():
        lies = written[stored.offset : stored.offset + stored.nbytes]
        assert lies == tensors[name].numpy().tobytes()
        assert same_bits(files.read_tensor(name), tensors[name])


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_is_read_as_the_library_reads_it(path: Path, name: str) -> None:
    data = bytes(range(120, 120 + 6 * DTYPES[name].itemsize))
    path.write_bytes(file_bytes({"x": entry(name, [2, 3], 0, len(data))}, data))
    read = CheckpointFiles.open(path).read_tensor("x")
    assert read.dtype == DTYPES[name] and same_bits(read, load_file(path)["x"])


def test_tensors_come_in_the_order_in_which_they_lie(path: Path) -> None:
    wanted = {
        "late": entry("U8", [3], 9, 12),
        "empty": entry("F32", [4, 0], 1, 1),
        "odd": entry("F64", [], 1, 9),
        "early": entry("BOOL", [1], 0, 1),
    }
    path.write_bytes(file_bytes(wanted, bytes(range(12))))
    files = CheckpointFiles.open(path)
    assert list(files.tensors) == ["early", "empty", "odd", "late"]
    for name, tensor in load_file(path).items():
        assert same_bits(files.read_tensor(name), tensor)


@pytest.mark.parametrize(
    "header",
    [
        pytest.param("{}", id="no tensors"),
        pytest.param('{"__metadata__": null}', id="null for metadata"),
        pytest.param(GOOD + " \n\t\r  ", id="padding of other white space"),
        pytest.param(GOOD.replace("}}", ', "x": [1.5, {"y": null}]}}'), id="another field"),
        pytest.param(GOOD.replace("}}", f', "x": {"[" * 125 + "]" * 125}}}}}'), id="deep"),
        pytest.param(GOOD.replace('"a"', '"\\ud83d\\ude00"'), id="a pair of surrogates"),
        pytest.param(GOOD.replace('"a"', '"\\\\ud83d"'), id="a backslash"),
        pytest.param(json.dumps({"a": entry("F32", [0, 2**62, 1], 0, 0)}), id="long and empty"),
    ],
)
def test_what_the_library_takes_is_taken(path: Path, header: str) -> None:
    path.write_bytes(file_bytes(header, b"12345678" if "[2]" in header else b""))
    expected = load_file(path)
    files = CheckpointFiles.open(path)
    assert set(files.tensors) == set(expected)
    assert all(same_bits(files.read_tensor(name), expected[name]) for name in expected)


REFUSED = {
    "nothing": (b"", "0 bytes"),
    "cut in the length": (b"\1\0\0", "3 bytes"),
    "header past the end": (file_bytes(GOOD)[:-1], "cut off"),
    "header too long": ((MAX_HEADER_NBYTES + 1).to_bytes(8, "little"), "100000001 bytes"),
    "a length of 64 bits": (b"\xff" * 20, "first 8 bytes"),
    "empty header": (file_bytes(""), "does not begin"),
    "no UTF-8": (file_bytes(b'{"\xff": 1}'), "UTF-8 at byte 2"),
    "no JSON": (file_bytes("{what}"), "at character 1"),
    "JSON cut off": (file_bytes(GOOD[:-1], b"12345678"), "at character"),
    "zeros behind it": (file_bytes(GOOD + "\0", b"12345678"), "Extra data"),
    "a list": (file_bytes("[]"), "does not begin"),
    "a tensor that is a number": (file_bytes({"a": 1}), "tensor 'a' is no object"),
    "no shape": (file_bytes({"a": {"dtype": "F32", "data_offsets": [0, 0]}}), "no field 'shape'"),
    "metadata of numbers": (file_bytes({"__metadata__": {"epoch": 1}}), "'epoch', which is no"),
    "metadata that is a list": (file_bytes({"__metadata__": []}), "__metadata__ is no object"),
    "unknown dtype": (file_bytes({"a": entry("F31", [], 0, 4)}, b"1234"), "'a'.*'F31', which the"),
    "a dtype torch has not": (file_bytes({"a": entry("F6_E2M3", [4], 0, 3)}, b"123"), "F6_E2M3"),
    "a dtype that is a list": (file_bytes({"a": entry([], [], 0, 4)}, b"1234"), "'a'.*no text"),
    "a negative length": (file_bytes({"a": entry("U8", [-1], 0, 1)}, b"1"), "'a': 'shape'"),
    "a length with a point": (file_bytes({"a": entry("U8", [1.0], 0, 1)}, b"1"), "'a': 'shape'"),
    "true for a length": (file_bytes({"a": entry("U8", [True], 0, 1)}, b"1"), "'a': 'shape'"),
    "minus zero": (file_bytes(GOOD.replace("[0,", "[-0,"), b"12345678"), "'data_offsets'"),
    "past 64 bits": (file_bytes({"a": entry("U8", [2**64, 0], 0, 0)}), "'a': 'shape'"),
    "a shape that overflows": (file_bytes({"a": entry("U8", [2**33, 2**33], 0, 0)}), "64 bits"),
    "one that then has a zero": (file_bytes({"a": entry("I8", [2**40, 2**40, 0], 0, 0)}), "64"),
    "bytes that overflow": (file_bytes({"a": entry("F64", [2**62], 0, 2**64 - 1)}), "64 bits"),
    "no such tensor": (file_bytes({"a": entry("U8", [0, 2**63], 0, 0)}), "'a'.*no empty tensor"),
    "three offsets": (file_bytes(GOOD.replace("8]", "8, 8]"), b"12345678"), "3 numbers"),
    "other bytes than the shape's": (file_bytes({"a": entry("F32", [2], 0, 7)}), "8 bytes by"),
    "end before begin": (file_bytes({"a": entry("U8", [0], 1, 0)}), "bytes 1 to 0"),
    "a hole at first": (file_bytes({"a": entry("U8", [1], 1, 2)}, b"12"), "'a'.*hole of 1"),
    "a hole": (
        file_bytes({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 3, 4)}, b"1234"),
        "'b'.*hole of 2",
    ),
    "an overlap": (
        file_bytes({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"123"),
        "'b'.*overlaps.*by 1 ",
    ),
    "data cut off": (file_bytes(GOOD, b"1234567"), "'a'.*cut off"),
    "data added": (file_bytes(GOOD, b"123456789"), "'a'.*added"),
    "data without tensors": (file_bytes("{}", b"1"), "added"),
    "NaN": (file_bytes(GOOD.replace("}}", ', "x": NaN}}'), b"12345678"), "NaN"),
    "infinity": (file_bytes(GOOD.replace("}}", ', "x": 1e999}}'), b"12345678"), "out of range"),
    "a long number": (file_bytes(GOOD.replace("}}", f', "x": {"9" * 400}}}}}')), "out of range"),
    "half a surrogate": (file_bytes(GOOD.replace('"a"', '"\\ud800"'), b"12345678"), "surrogate"),
    "too deep": (file_bytes(GOOD.replace("}}", f',"x":{"[" * 126}{"]" * 126}}}}}')), "'a'.*deep"),
    "much too deep": (file_bytes('{"a":' + "[" * 100_000), "deep"),
}

STRICTER = {
    "a tensor twice": (file_bytes(f"{GOOD[:-1]}, {GOOD[1:]}", b"12345678"), "'a' comes twice"),
    "a field twice": (file_bytes(GOOD.replace("}}", ', "x":1, "x":1}}'), b"12345678"), "'x' comes"),
    "white space first": (file_bytes(" " + GOOD, b"12345678"), "does not begin"),
    "fields by position": (file_bytes({"a": ["F32", [2], [0, 8]]}, b"12345678"), "'a' is no obj"),
    "less than a byte": (file_bytes({"a": entry("F4", [4], 0, 2)}, b"12"), "'a'.*'F4', for which"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_as_by_the_library(path: Path, case: str) -> None:
    written, message = REFUSED[case]
    path.write_bytes(written)
    with pytest.raises((SafetensorError, TypeError)):
        load_file(path)
    with pytest.raises(CheckpointError, match=rf"weights\.safetensors: (?s:.*){message}"):
        CheckpointFiles.open(path)


@pytest.mark.parametrize("case", STRICTER)
def test_refused_though_the_library_takes_it(path: Path, case: str) -> None:
    written, message = STRICTER[case]
    path.write_bytes(written)
    load_file(path)
    with pytest.raises(CheckpointError, match=rf"weights\.safetensors: .*{message}"):
        CheckpointFiles.open(path)


def test_a_claim_takes_no_memory(path: Path) -> None:
    path.write_bytes(MAX_HEADER_NBYTES.to_bytes(8, "little") + b"{")
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="cut off"):
            CheckpointFiles.open(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_dtype_of_a_later_torch(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(header.DTYPES, "BF16")
    path.write_bytes(file_bytes({"a": entry("BF16", [1], 0, 2)}, b"12"))
    with pytest.raises(CheckpointError, match=f"'a': its dtype is 'BF16', for which torch {2}"):
        CheckpointFiles.open(path)


def test_long_names_make_no_long_message(path: Path) -> None:
    path.write_bytes(file_bytes({"n" * 100_000: 1}))
    with pytest.raises(CheckpointError) as caught:
        CheckpointFiles.open(path)
    assert len(str(caught.value)) < 1000


def test_short_reads_are_gone_on_with(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.rand(40)
    save_file({"a": tensor}, path)
    whole = header.os.preadv
    monkeypatch.setattr(header.os, "preadv", lambda fd, views, at: whole(fd, [views[0][:7]], at))
    assert same_bits(CheckpointFiles.open(path).read_tensor("a"), tensor)


def test_a_disk_that_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "no")

    save_file({"a": torch.rand(4)}, path)
    files = CheckpointFiles.open(path)
    monkeypatch.setattr(header.os, "preadv", fail)
    with pytest.raises(StorageError, match=r"header failed.*errno 5.*weights.safetensors"):
        CheckpointFiles.open(path)
    with pytest.raises(
        StorageError, match=r"tensor 'a' failed.*errno 5.*: checkpoint, path .*offset"
    ):
        files.read_tensor("a")
    monkeypatch.setattr(header.os, "preadv", lambda *_: 0)
    with pytest.raises(StorageError, match=r"made shorter.*: checkpoint, path "):
        CheckpointFiles.open(path)
