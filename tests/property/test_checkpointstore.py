"""Blocks gathered from anywhere in files: bytes beside slices of the files, and every fault."""

from __future__ import annotations

import errno
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples

from tiermem.core.block import align_up
from tiermem.errors import CheckpointError, IntegrityError, StorageError
from tiermem.storage.checkpointstore import CheckpointStore, SourceRange
from tiermem.storage.files import JoinedFiles
from tiermem.storage.swapfile import SwapFile
from tiermem.testing.io import Fault, ScriptedEngine
from tiermem.transfer.file.mover import FileMover

PAGE = 4096
CHUNK = 4 * PAGE


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        made = random.Random(5)
        for number, size in enumerate((9 * PAGE, 3 * PAGE + 77, 5)):
            (Path(name) / f"{number}.bin").write_bytes(made.randbytes(size))
        yield Path(name)


def paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.bin"))


class Reads:
    """A mover over a store of checkpoint files; closes what it has opened.

    Args:
        folder: Where they are.
        swaps: How many swap files it has beside them.
        engine: Of :class:`ScriptedEngine`.
    """

    def __init__(self, folder: Path, swaps: int = 0, **engine: object) -> None:
        self.swap = SwapFile([folder] * swaps, None, CHUNK) if swaps else None
        self.store = CheckpointStore(CHUNK, swaps)
        self.store.add(paths(folder))
        self.double = ScriptedEngine(**engine)  # type: ignore[arg-type]
        self.staging = torch.zeros(8 * CHUNK, dtype=torch.uint8)
        offset = -self.staging.data_ptr() % PAGE
        staging = self.staging[offset : offset + 7 * CHUNK]
        files = JoinedFiles(self.swap, self.store, 1 << 60)
        self.mover = FileMover(files, lambda: self.double, staging, CHUNK, None)

    def __enter__(self) -> Reads:
        return self

    def __exit__(self, *_: object) -> None:
        self.mover.close()
        self.store.close()
        if self.swap is not None:
            self.swap.close()

    def read(self, ranges: list[SourceRange], nbytes: int) -> torch.Tensor:
        extent = self.store.place(ranges, nbytes)
        target = torch.full((nbytes,), 0xEE, dtype=torch.uint8)
        transfer = self.mover.read(extent, target, label="block", urgent=True)
        self.mover.wait(transfer)
        self.mover.poll()
        if transfer.error is not None:
            raise transfer.error
        return target


@st.composite
def gathered(draw: st.DrawFn, sizes: list[int]) -> list[SourceRange]:
    """Draws runs of bytes that overlap in the files and not in the block."""
    ranges, target = [], 0
    for _ in range(draw(st.integers(1, 6))):
        file = draw(st.integers(0, len(sizes) - 1))
        begin = draw(st.integers(0, sizes[file]))
        end = draw(st.integers(begin, sizes[file]))
        target += draw(st.integers(0, 300))
        ranges.append(SourceRange(file, begin, end - begin, target))
        target += end - begin
    order = draw(st.permutations(ranges))
    return list(order)


@given(data=st.data(), seed=st.integers(0, 1 << 16), swaps=st.integers(0, 2))
@settings(max_examples=examples(40), deadline=None)
def test_a_block_is_what_slices_of_the_files_are(
    folder: Path, data: st.DataObject, seed: int, swaps: int
) -> None:
    contents = [path.read_bytes() for path in paths(folder)]
    with Reads(folder, swaps, order=random.Random(seed).randrange) as reads:
        for _ in range(2):  # the second time checksums of pages are compared
            ranges = data.draw(gathered([len(content) for content in contents]))
            nbytes = align_up(max(r.target + r.nbytes for r in ranges) + 1)
            expected = bytearray(b"\xee" * nbytes)
            for r in ranges:
                part = contents[r.file][r.offset : r.offset + r.nbytes]
                expected[r.target : r.target + r.nbytes] = part
            assert bytes(reads.read(ranges, nbytes).numpy()) == expected
            assert bytes(reads.read(ranges, nbytes).numpy()) == expected


def test_pages_are_read_once_and_only_those_that_are_needed(folder: Path) -> None:
    store = CheckpointStore(CHUNK)
    store.add(paths(folder))
    ranges = [
        SourceRange(0, 10, 20, 0),
        SourceRange(0, 100, 50, 20),
        SourceRange(0, 8 * PAGE, 9, 70),
    ]
    pieces = store.pieces(store.place(ranges, PAGE))
    assert [(piece.file, piece.file_offset, piece.nbytes) for piece in pieces] == [
        (0, 0, PAGE),
        (0, 8 * PAGE, PAGE),
    ]
    store.close()


def test_a_range_beyond_the_file(folder: Path) -> None:
    store = CheckpointStore(CHUNK)
    store.add(paths(folder))
    with pytest.raises(CheckpointError, match=r"2\.bin: bytes 1 to 6 .* has 5"):
        store.place([SourceRange(2, 1, 5, 0)], PAGE)
    store.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.EINTR])
def test_a_disk_that_fails(folder: Path, code: int) -> None:
    with Reads(folder, fault=lambda *_: Fault(errno=code)) as reads:
        with pytest.raises(StorageError) as raised:
            reads.read([SourceRange(0, 3, 5000, 0)], 2 * PAGE)
        assert raised.value.errno == code
        assert "0.bin" in str(raised.value)


def copied(folder: Path, tmp_path: Path) -> Path:
    for path in paths(folder):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize("before", [True, False])
def test_a_file_that_is_cut_short(folder: Path, tmp_path: Path, before: bool) -> None:
    """The error names that, not the disk, also where the bytes had been read before."""
    own = copied(folder, tmp_path)
    ranges = [SourceRange(0, 0, 5 * PAGE, 0)]
    with Reads(own) as reads:
        if before:
            reads.read(ranges, 5 * PAGE)
        os.truncate(own / "0.bin", 2 * PAGE)
        with pytest.raises(StorageError, match=r"changed since it was opened; load .*0\.bin"):
            reads.read(ranges, 5 * PAGE)


def test_a_file_that_is_written_before_its_first_read(folder: Path, tmp_path: Path) -> None:
    own = copied(folder, tmp_path)
    with Reads(own) as reads:
        os.utime(own / "0.bin", ns=(1, 1))
        with pytest.raises((StorageError, IntegrityError), match="changed"):
            reads.read([SourceRange(0, 0, PAGE, 0)], PAGE)


def test_a_bit_that_differs_from_the_first_read(folder: Path, tmp_path: Path) -> None:
    own = copied(folder, tmp_path)
    with Reads(own) as reads:
        ranges = [SourceRange(0, 7, 100, 0)]
        first = reads.read(ranges, PAGE)
        facts = (own / "0.bin").stat()
        with (own / "0.bin").open("r+b") as file:
            file.seek(50)
            byte = file.read(1)[0]
            file.seek(50)
            file.write(bytes([byte ^ 1]))
        os.utime(own / "0.bin", ns=(facts.st_atime_ns, facts.st_mtime_ns))
        with pytest.raises(IntegrityError, match=r"0\.bin"):
            reads.read(ranges, PAGE)
        del first


def test_nothing_is_written(folder: Path) -> None:
    before = paths(folder)[0].read_bytes()
    with Reads(folder) as reads:
        extent = reads.store.place([SourceRange(0, 0, PAGE, 0)], PAGE)
        transfer = reads.mover.write(extent, torch.zeros(PAGE, dtype=torch.uint8), label="block")
        reads.mover.wait(transfer)
        assert isinstance(transfer.error, StorageError) and "never written" in str(transfer.error)
    assert paths(folder)[0].read_bytes() == before
