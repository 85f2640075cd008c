"""Adapters are two files: whatever happens to a save, no reader finds one of each pair."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support_process import child, nothing_left_open
from torch import nn

import tiermem
from tiermem.lora.files import WEIGHTS
from tiermem.storage.checkpoint.folder import ADAPTERS

CALLS = ("fsync", "rename", "replace", "unlink")
Fault = Callable[[int], None]


def made(alpha: int, value: float) -> nn.Module:
    """Returns a model whose adapters' weights are all of one value."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    tiermem.add_adapters(model, tiermem.Lora(r=2, alpha=alpha, target_modules=["0"]))
    for name, param in model.named_parameters():
        if "lora" in name:
            nn.init.constant_(param, value)
    return model


FORMER, NEW = (3, 1.0), (5, 2.0)
SAME = (3, 2.0)
"""With the settings of the former ones, and other weights."""


def save(path: Path, adapters: tuple[int, float], fault: Fault = lambda number: None) -> int:
    """Saves adapters; calls ``fault`` before each call of the system. Returns how many."""
    model, count = made(*adapters), 0

    def guarded(own: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            nonlocal count
            count += 1
            fault(count - 1)
            return own(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, guarded(getattr(os, name)))
        tiermem.save_adapters(model, path)
    return count


def found(path: Path) -> tuple[int, float] | None:
    """Returns which adapters are there; None where readers see that there are none."""
    model = made(*FORMER)
    try:
        settings = json.loads((path / ADAPTERS).read_text())
        weights = load_file(path / WEIGHTS)
    except FileNotFoundError:
        with pytest.raises(tiermem.CheckpointError, match=r"cannot be read|is not there"):
            tiermem.load_adapters(model, path)
        return None
    (value,) = {float(number) for tensor in weights.values() for number in tensor.unique()}
    return settings["lora_alpha"], value


def put_back(path: Path) -> None:
    """Does what the error of a load says."""
    with pytest.raises(tiermem.CheckpointError, match="a save was cut short") as caught:
        tiermem.load_adapters(made(*FORMER), path)
    for name in (WEIGHTS, ADAPTERS):
        for old in path.glob(f".{name}.*.old"):
            assert old.name in str(caught.value)
            old.rename(path / name)


@pytest.mark.parametrize("new", [NEW, SAME])
def test_a_save_is_killed_at_every_call(tmp_path: Path, new: tuple[int, float]) -> None:
    count = save(tmp_path / "all", FORMER) and save(tmp_path / "all", new)
    seen = []
    for at in range(count):
        path = tmp_path / str(at)
        save(path, FORMER)

        def kill(number: int, at: int = at) -> None:
            if number == at:
                os.kill(os.getpid(), signal.SIGKILL)

        assert child(lambda path=path, kill=kill: save(path, new, kill)) == -signal.SIGKILL
        seen.append(found(path))
        assert seen[-1] in (FORMER, new, None), at
        if seen[-1] is None:
            put_back(path)
            assert found(path) == FORMER
        save(path, NEW)
        assert found(path) == NEW and not list(path.glob("*.old"))
    assert FORMER in seen and new in seen
    assert (None in seen) == (new is NEW), "what has the same settings is replaced at once"


def test_the_first_save_of_all_is_killed(tmp_path: Path) -> None:
    for at in range(save(tmp_path / "all", NEW)):

        def kill(number: int, at: int = at) -> None:
            if number == at:
                os.kill(os.getpid(), signal.SIGKILL)

        path = tmp_path / str(at)
        assert child(lambda path=path, kill=kill: save(path, NEW, kill)) == -signal.SIGKILL
        assert found(path) in (NEW, None)


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("new", [NEW, SAME])
def test_every_call_fails_once(
    tmp_path: Path, new: tuple[int, float], kind: type[BaseException]
) -> None:
    count = save(tmp_path / "all", FORMER) and save(tmp_path / "all", new)
    failed = 0
    for at in range(count):
        path = tmp_path / str(at)
        save(path, FORMER)

        def fail(number: int, at: int = at) -> None:
            if number == at:
                raise kind(errno.EIO, "no")

        with nothing_left_open():
            try:
                save(path, new, fail)
            except (tiermem.StorageError, KeyboardInterrupt) as error:
                failed += 1
                assert isinstance(error, KeyboardInterrupt) or "save them elsewhere" in str(error)
                # at its very end the new ones may be there
                assert found(path) in (FORMER, new)
            else:
                assert found(path) == new
    assert failed >= 4


def test_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for adapters in (FORMER, NEW, SAME):
        save(tmp_path, adapters)
        assert sorted(os.listdir(tmp_path)) == sorted([ADAPTERS, WEIGHTS, "notes.txt"])
        model = made(adapters[0], 0.0)
        tiermem.load_adapters(model, tmp_path)
        (layer,) = model
        assert torch.equal(layer.lora_A.weight, torch.full((2, 4), adapters[1]))
