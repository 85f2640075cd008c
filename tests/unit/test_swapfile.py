"""The swap file: space, stripes, checksums, and what it refuses."""

from __future__ import annotations

import errno
import os
import random
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_process import nothing_left_open

from tiermem.core.block import Extent
from tiermem.errors import CapacityError, ClosedError, ConfigError
from tiermem.storage import nameless
from tiermem.storage.checksum import checksum
from tiermem.storage.freelist import FreeList
from tiermem.storage.swapfile import Piece, SwapFile
from tiermem.testing.io import Memory

PAGE = 4096
CHUNK = 4 * PAGE


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SwapFile]:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    with SwapFile(folders, None, CHUNK) as swap:
        yield swap


def lengths(store: SwapFile) -> list[int]:
    return [os.fstat(fd).st_size for fd in store.fds]


def test_the_files_have_no_name_and_their_space_is_given_back(tmp_path: Path) -> None:
    with nothing_left_open():
        with SwapFile([tmp_path], None, CHUNK) as store:
            store.grow(10 * CHUNK)
            assert list(tmp_path.iterdir()) == []
            facts = os.fstat(store.fds[0])
            assert facts.st_nlink == 0
            assert facts.st_size == 10 * CHUNK
            assert facts.st_blocks * 512 >= 10 * CHUNK, "the space is there before it is used"
        store.close()


def test_growth_is_spread_evenly(store: SwapFile) -> None:
    store.grow(6 * CHUNK)
    assert lengths(store) == [2 * CHUNK] * 3
    store.grow(CHUNK + PAGE)
    assert lengths(store) == [3 * CHUNK, 2 * CHUNK + PAGE, 2 * CHUNK]
    store.grow(1)
    assert lengths(store) == [3 * CHUNK, 2 * CHUNK + 2 * PAGE, 2 * CHUNK]
    assert store.capacity == 7 * CHUNK + 2 * PAGE
    assert store.used == 0


def test_pieces_cover_the_extent_and_never_overlap(store: SwapFile) -> None:
    store.grow(20 * CHUNK + PAGE)
    seen: set[tuple[int, int]] = set()
    for offset in range(0, store.capacity - PAGE, 7 * PAGE):
        extent = Extent(offset, min(7 * PAGE, store.capacity - offset))
        at = 0
        for piece in store.pieces(extent):
            assert piece.extent_offset == at
            assert 0 < piece.nbytes <= CHUNK
            assert piece.file_offset + piece.nbytes <= lengths(store)[piece.file]
            for page in range(0, piece.nbytes, PAGE):
                place = (piece.file, piece.file_offset + page)
                assert place not in seen
                seen.add(place)
            at += piece.nbytes
        assert at == extent.nbytes


def test_one_extent_is_spread_over_all_files(store: SwapFile) -> None:
    store.grow(6 * CHUNK)
    assert store.pieces(Extent(CHUNK, 3 * CHUNK)) == [
        Piece(1, 0, 0, CHUNK),
        Piece(2, 0, CHUNK, CHUNK),
        Piece(0, CHUNK, 2 * CHUNK, CHUNK),
    ]


@pytest.mark.parametrize("extent", [Extent(0, PAGE + 1), Extent(8, PAGE), Extent(PAGE, CHUNK)])
def test_an_extent_that_cannot_be_is_refused(store: SwapFile, extent: Extent) -> None:
    store.grow(CHUNK)
    with pytest.raises(ValueError, match="Extent"):
        store.pieces(extent)


def test_the_limit_holds_and_nothing_changes(tmp_path: Path) -> None:
    with SwapFile([tmp_path], 4 * CHUNK, CHUNK) as store:
        store.grow(3 * CHUNK)
        with pytest.raises(CapacityError, match=f"{tmp_path}.*at least .*{5 * CHUNK} bytes"):
            store.grow(2 * CHUNK)
        assert store.capacity == 3 * CHUNK
        assert lengths(store) == [3 * CHUNK]
        store.grow(CHUNK)


def test_more_than_the_disk_has_is_refused_up_front(store: SwapFile, tmp_path: Path) -> None:
    store.grow(CHUNK)
    before = lengths(store)
    with pytest.raises(CapacityError, match=rf"{tmp_path}/.*bytes\) asked.*bytes\) are free"):
        store.grow(1 << 60)
    assert lengths(store) == before
    assert store.capacity == CHUNK


def test_space_that_runs_out_while_reserving_is_undone(
    store: SwapFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.grow(3 * CHUNK)
    real, calls = nameless.reserve, []

    def reserve(fd: int, offset: int, nbytes: int) -> None:
        calls.append(fd)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, offset, nbytes)

    monkeypatch.setattr(nameless, "reserve", reserve)
    with pytest.raises(CapacityError, match=f"{tmp_path}/c.*No space left"):
        store.grow(6 * CHUNK)
    assert lengths(store) == [CHUNK] * 3
    assert store.capacity == 3 * CHUNK


def test_a_file_size_limit_is_a_capacity_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with SwapFile([tmp_path], None, CHUNK) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 * CHUNK, hard))
        try:
            store.grow(2 * CHUNK)
            with pytest.raises(CapacityError, match=r"File too large.*ulimit -f"):
                store.grow(8 * CHUNK)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert lengths(store) == [2 * CHUNK]


def test_a_file_system_that_cannot_reserve_gets_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with SwapFile([tmp_path], None, CHUNK) as store:
        store.grow(300 * PAGE)
        assert os.fstat(store.fds[0]).st_blocks * 512 >= 300 * PAGE


def test_allocating_and_freeing(store: SwapFile) -> None:
    with pytest.raises(CapacityError, match="no free run of 4096 bytes"):
        store.allocate(1)
    store.grow(8 * PAGE)
    first, second = store.allocate(2 * PAGE), store.allocate(PAGE + 1)
    assert (first, second) == (Extent(0, 2 * PAGE), Extent(2 * PAGE, 2 * PAGE))
    assert store.used == 4 * PAGE
    store.free(first)
    with pytest.raises(ValueError, match="not handed out"):
        store.free(first)
    with pytest.raises(CapacityError, match=f"{6 * PAGE} bytes are free, {4 * PAGE} in one run"):
        store.allocate(5 * PAGE)
    assert store.allocate(PAGE) == Extent(0, PAGE), "the run that fits best"
    with pytest.raises(ValueError, match="cannot allocate 0"):
        store.allocate(0)


def test_the_free_list_against_a_list_of_pages() -> None:
    rng = random.Random(3)
    free, pages, taken = FreeList(), [], []
    for _ in range(2000):
        action = rng.random()
        if action < 0.05 and len(pages) < 200:
            more = rng.randint(1, 20)
            free.grow(more)
            pages += [False] * more
        elif action < 0.55:
            nbytes = rng.randint(1, 12)
            runs = "".join("x" if used else "." for used in pages).split("x")
            extent = free.take(nbytes)
            assert (extent is None) == (max(map(len, runs)) < nbytes)
            if extent is not None:
                assert not any(pages[extent.offset : extent.end])
                pages[extent.offset : extent.end] = [True] * nbytes
                taken.append(extent)
        elif taken:
            extent = taken.pop(rng.randrange(len(taken)))
            free.give_back(extent)
            pages[extent.offset : extent.end] = [False] * extent.nbytes
        runs = "".join("x" if used else "." for used in pages).split("x")
        assert free.largest == max(map(len, runs))
        assert free.used == sum(pages)


def test_a_piece_counts_only_when_its_own_write_ended(store: SwapFile) -> None:
    store.grow(3 * CHUNK)
    extent = store.allocate(2 * CHUNK)
    first, second = store.pieces(extent)
    assert store.written(extent, first) is None
    old = store.begin_write(extent, [first, second])
    store.end_write(extent, first, old, 7)
    entry = store.written(extent, first)
    assert entry is not None
    assert entry.checksum == 7
    assert store.written(extent, second) is None
    new = store.begin_write(extent, [first, second])
    store.end_write(extent, first, old, 8)
    assert store.written(extent, first) is None, "an outdated write must not count"
    store.end_write(extent, first, new, 9)
    store.free(extent)
    store.end_write(extent, second, new, 10)
    assert store.sums == {}, "a freed extent stays forgotten"


def test_lost_extents_are_forgotten(store: SwapFile) -> None:
    store.grow(4 * CHUNK)
    lost, kept = store.allocate(2 * CHUNK), store.allocate(2 * CHUNK)
    for extent in (lost, kept):
        pieces = store.pieces(extent)
        generation = store.begin_write(extent, pieces)
        for piece in pieces:
            store.end_write(extent, piece, generation, 7)
    store.keep_only([kept])
    assert all(store.written(kept, piece) for piece in store.pieces(kept))
    assert store.allocate(2 * CHUNK) == lost
    assert not any(store.written(lost, piece) for piece in store.pieces(lost))


def test_bad_folders_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.mkdir()
    file = tmp_path / "file"
    file.write_text("")
    with nothing_left_open():
        for bad, why in ((tmp_path / "missing", "does not exist"), (file, "not a folder")):
            with pytest.raises(ConfigError, match=f"{bad} .*{why}"):
                SwapFile([good, bad], None, CHUNK)
        with pytest.raises(ConfigError, match="at least one"):
            SwapFile([], None, CHUNK)
        with pytest.raises(ConfigError, match="multiple of 4096"):
            SwapFile([good], None, 1000)
    assert list(good.iterdir()) == []


def test_folders_that_cannot_be_written_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *args: False)
    with pytest.raises(ConfigError, match=f"{tmp_path} is not writable"):
        SwapFile([tmp_path], None, CHUNK)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"/proc/self .*takes no file|not writable"):
        SwapFile([Path("/proc/self")], None, CHUNK)


def test_without_nameless_files_the_name_is_gone_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def without_tmpfile(path: object, flags: int, *args: object, **kwargs: object) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", without_tmpfile)
    with SwapFile([tmp_path], None, CHUNK) as store:
        assert list(tmp_path.iterdir()) == []
        store.grow(CHUNK)


@pytest.mark.parametrize(
    ("unit", "reason"), [(0, "no direct I/O"), (65536, "65536 bytes"), (None, "")]
)
def test_direct_io_and_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: int | None, reason: str
) -> None:
    monkeypatch.setattr(nameless, "dio_alignment", lambda fd: unit)
    with SwapFile([tmp_path], None, CHUNK) as store:
        assert reason in store.direct_reason
        if reason:
            assert not store.direct
            assert str(tmp_path) in store.direct_reason


def test_direct_io_that_is_refused_when_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(nameless, "_try_write", refuse)
    with SwapFile([tmp_path], None, CHUNK) as store:
        assert not store.direct
        assert "refused (Invalid argument)" in store.direct_reason


def test_a_closed_store_is_refused(tmp_path: Path) -> None:
    store = SwapFile([tmp_path], None, CHUNK)
    store.grow(CHUNK)
    extent = store.allocate(PAGE)
    store.close()
    store.close()
    for call in (lambda: store.grow(1), lambda: store.allocate(1), lambda: store.free(extent)):
        with pytest.raises(ClosedError):
            call()
    with pytest.raises(ClosedError):
        _ = store.fds


def test_checksums_of_views_and_addresses_agree() -> None:
    memory = Memory(3 * PAGE)
    memory.view[:] = os.urandom(3 * PAGE)
    for nbytes in (0, 1, PAGE, 3 * PAGE):
        expected = checksum(bytes(memory.view[:nbytes]), nbytes)
        assert checksum(memory.address, nbytes) == expected
        assert checksum(memory.view, nbytes) == expected
    before = checksum(memory.address, PAGE)
    memory.view[17] ^= 1
    assert checksum(memory.address, PAGE) != before
    with pytest.raises(ValueError, match="only 4096"):
        checksum(memory.view[:PAGE], PAGE + 1)
