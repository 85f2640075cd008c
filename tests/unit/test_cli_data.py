"""The corpus: order, limit, windows, errors."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from tiermem.cli.data import Corpus, load_corpus
from tiermem.errors import ConfigError


def test_standard_library_is_there_and_the_same_twice() -> None:
    one, other = load_corpus(limit=2**20), load_corpus(limit=2**20)
    assert one.nbytes == 2**20
    windows = [c.batch(torch.Generator().manual_seed(1), 4, 32) for c in (one, other)]
    assert torch.equal(*windows)


def test_files_and_folders_in_order(tmp_path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two").write_bytes(b"22")
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "last").write_bytes(b"333")
    corpus = load_corpus([str(tmp_path), str(tmp_path / "a")])
    window = corpus.batch(torch.Generator(), 1, corpus.nbytes)
    assert bytes(window[0].tolist()) == b"1223331"
    assert load_corpus([str(tmp_path)], limit=4).nbytes == 4


def test_windows_cover_both_ends() -> None:
    corpus = Corpus(bytes(range(10)), "ten")
    windows = corpus.batch(torch.Generator().manual_seed(0), 200, 3)
    assert windows.shape == (200, 3) and windows.dtype == torch.int64
    assert set(windows[:, 0].tolist()) == set(range(8))
    assert torch.equal(windows[:, 2] - windows[:, 0], torch.full((200,), 2))


def test_too_short() -> None:
    with pytest.raises(ConfigError, match="--context"):
        Corpus(b"abc", "three").batch(torch.Generator(), 1, 4)


def test_nothing_to_read(tmp_path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_corpus([str(tmp_path / "missing")])
    with pytest.raises(ConfigError, match="no bytes"):
        load_corpus([str(tmp_path)])


@pytest.mark.parametrize("inside", [False, True])
def test_what_the_system_refuses_to_look_at(
    inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is too long, and a folder in the middle that this user may not read."""
    if inside:
        (tmp_path / "part").mkdir()

        def refused(self: Path) -> bool:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))

        monkeypatch.setattr(Path, "is_file", refused)
        with pytest.raises(ConfigError, match=r"--data .*part: Permission denied"):
            load_corpus([str(tmp_path)])
    else:
        with pytest.raises(ConfigError, match=r"--data x*: File name too long"):
            load_corpus(["x" * 300])
