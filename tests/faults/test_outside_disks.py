"""Real file systems: shut down, thin, full, without reservations, in memory. From outside."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support_outside import Pair, mounted, net, shut_down

import tiermem
from tiermem.cli.machine import inspect_path

MIB = 1 << 20


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_file_system_that_is_shut_down_before_opening(tmp_path: Path, kind: str) -> None:
    with mounted(kind, tmp_path) as disk:
        folder = disk / "swap"
        folder.mkdir()
        shut_down(disk)
        with pytest.raises(tiermem.ConfigError, match=r"swap .*\(Input/output error\).*another"):
            tiermem.TierManager("cpu", "1MiB", "4MiB", folder)


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_file_system_that_is_shut_down_before_wrapping(tmp_path: Path, kind: str) -> None:
    with mounted(kind, tmp_path) as disk:
        with tiermem.TierManager("cpu", "1MiB", "4MiB", disk, policy="nvme") as tier:
            shut_down(disk)
            with pytest.raises(tiermem.StorageError, match=str(disk)) as error:
                Pair(tier)
            assert error.value.path == str(disk)
            assert "another" in str(error.value)


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_file_system_that_is_shut_down_amid_training(tmp_path: Path, kind: str) -> None:
    with mounted(kind, tmp_path) as disk:
        with tiermem.TierManager("cpu", "80KiB", "4MiB", disk, policy="nvme") as tier:
            pair = Pair(tier)
            pair.train(2)
            shut_down(disk)
            with pytest.raises(tiermem.StorageError) as error:
                pair.train(1)
            assert (error.value.path, error.value.tier) == (str(disk), "nvme")
            assert error.value.block
            with pytest.raises(tiermem.StorageError, match=r"given back|units of the optimizer"):
                tier.close()
            tier.close(discard=True)


def fill(folder: Path) -> Path:
    """Takes all the space of a file system but what nothing can be done with."""
    path = folder / "other"
    with path.open("wb", buffering=0) as file:
        for size in (MIB, 4096):
            try:
                while True:
                    file.write(b"x" * size)
                    os.fsync(file.fileno())
            except OSError:
                continue
    return path


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_space_that_was_reserved_is_there_when_the_disk_is_full(tmp_path: Path, kind: str) -> None:
    """On btrfs too, where a file that copies on write would need new space for every write."""
    with mounted(kind, tmp_path) as disk:
        assert inspect_path(str(disk)).promises
        with tiermem.TierManager("cpu", "1MiB", "8MiB", disk, policy="nvme") as tier:
            pair = Pair(tier, width=256)
            pair.train(1)
            fill(disk)
            pair.train(4)
            pair.compare()


@pytest.fixture
def thin(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A file system on a disk that has less than it says: a sparse file on a smaller one.

    Yields:
        Its folder, and the folder of what has the space.
    """
    with mounted("ext4", tmp_path, 48 * MIB) as below:
        image = below / "image"
        with image.open("wb") as file:
            file.truncate(256 * MIB)
        work = tmp_path / "thin"
        work.mkdir()
        with mounted("ext4", work, image=image) as disk:
            yield disk, below


def test_a_thin_disk_that_runs_out_amid_backward(thin: tuple[Path, Path]) -> None:
    """What was reserved is not there; nothing is lost, and it goes on once there is space."""
    disk, below = thin
    x = torch.randn(4, 512)
    with tiermem.TierManager("cpu", "3MiB", "16MiB", disk, policy="nvme") as tier:
        plain, model = net(512), tier.wrap(net(512))
        plain(x).square().sum().backward()
        other = fill(below)
        with pytest.raises(tiermem.StorageError) as error:
            model(x).square().sum().backward()
        assert (error.value.path, error.value.tier) == (str(disk), "nvme")
        assert error.value.errno
        assert error.value.block
        other.unlink()
        os.sync()
        model.zero_grad()
        model(x).square().sum().backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
            assert torch.equal(mine, theirs)


def test_a_thin_disk_that_runs_out_while_a_model_is_wrapped(thin: tuple[Path, Path]) -> None:
    disk, below = thin
    with tiermem.TierManager("cpu", "12MiB", "16MiB", disk, policy="nvme") as tier:
        model = net(1024)
        other = fill(below)
        with pytest.raises(tiermem.StorageError, match=str(disk)):
            tier.wrap(model)
        other.unlink()
        os.sync()
        for mine, theirs in zip(model.parameters(), net(1024).parameters(), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", ["ramfs", "tmpfs"])
def test_file_systems_in_memory_work_and_say_so(tmp_path: Path, kind: str) -> None:
    with mounted(kind, tmp_path) as folder:
        facts = inspect_path(str(folder))
        assert facts.usable
        assert facts.file_system == kind
        with tiermem.TierManager("cpu", "80KiB", "4MiB", folder, policy="nvme") as tier:
            pair = Pair(tier)
            pair.train(2)
            pair.compare()
