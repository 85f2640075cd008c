"""The machine profile's file: what is written is read, and nothing else is believed."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest

from tiermem.runtime.metrics import machine_profile as profile
from tiermem.runtime.metrics.machine_profile import (
    FORMAT,
    MachineProfile,
    device_name,
    load,
    profile_path,
    save,
)

FULL = MachineProfile(
    device="NVIDIA H200",
    date="2026-11-21",
    tiermem="0.1.0",
    torch="2.11.0",
    h2d=55.4e9,
    d2h=55.3e9,
    duplex=101.5e9,
    d2d=2.1e12,
    host_copy=38e9,
    nvme_read=3e9,
    nvme_write=2.5e9,
    nvme_mixed=4e9,
    nvme_chunk=4 << 20,
    nvme_depth=8,
    h2d_by_size=((64 << 10, 10.8e9), (1 << 20, 48.5e9), (16 << 20, 55e9)),
    folders=("/mnt/nvme",),
)
BARE = MachineProfile(device="cpu", date="2026-11-21", tiermem="0.1.0", torch="2.13.0")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv(profile.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("wanted", [FULL, BARE], ids=["full", "bare"])
def test_round_trip(wanted) -> None:
    path = save(wanted)
    assert path == profile_path(wanted.device)
    found = load(device=wanted.device)
    assert found.profile == wanted
    assert found.reason == f"measured 2026-11-21, {path}"
    assert os.listdir(path.parent) == [path.name]


def test_where_it_is_kept(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "cache" / "tiermem"
    assert profile_path("NVIDIA H200 (80GB)") == folder / "profile-nvidia-h200-80gb.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert profile_path("cpu") == tmp_path / ".cache" / "tiermem" / "profile-cpu.json"
    monkeypatch.setenv(profile.VARIABLE, str(tmp_path / "mine.json"))
    assert profile_path("cpu") == tmp_path / "mine.json"


def test_none_there() -> None:
    found = load(device="cpu")
    assert found.profile is None and "`tiermem bench` makes it" in found.reason


def test_one_file_for_another_device(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(profile.VARIABLE, str(tmp_path / "one.json"))
    path = save(FULL)
    found = load(device="cpu")
    assert found.profile is None and found.reason.endswith("is of NVIDIA H200, not of cpu")
    assert load(path).profile == FULL  # a file that is named may be of any device


def test_default_device_is_the_machines(monkeypatch) -> None:
    monkeypatch.setattr(profile.torch.cuda, "is_available", lambda: False)
    assert device_name() == "cpu"
    save(BARE)
    assert load().profile == BARE
    monkeypatch.setattr(profile.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(profile.torch.cuda, "get_device_name", lambda device: f"GPU at {device}")
    assert device_name() == "GPU at cuda" and device_name("cuda:1") == "GPU at cuda:1"
    assert device_name("cpu") == "cpu"
    assert load().profile is None


@pytest.mark.parametrize("text", ["", "{", "\x00", '{"format": 1', "[" * 200_000])
def test_not_json(tmp_path, text) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    assert load(path).profile is None and "is not JSON" in load(path).reason
    path.write_bytes(b"\xff\xfe\xff")
    assert "is not JSON" in load(path).reason


def test_cannot_be_read(tmp_path) -> None:
    found = load(tmp_path)
    assert found.profile is None and "cannot be read" in found.reason


@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_neither_read_nor_replaced(tmp_path) -> None:
    """A pipe stands for devices as well: the first waits for ever, `/dev/full` never ends."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    found = load(path)
    assert found.profile is None and "cannot be read: it is not a regular file" in found.reason
    with pytest.raises(OSError, match="not a regular file"):
        save(FULL, path)
    assert path.is_fifo()


def test_a_file_larger_than_a_profile_is_not_read(tmp_path) -> None:
    path = save(FULL, tmp_path / "profile.json")
    os.truncate(path, 1 << 40)
    assert "it has more than 1048576 bytes" in load(path).reason


@pytest.mark.parametrize("text", ["[]", "3", "{}", '{"format": 99}', '{"format": "1"}'])
def test_another_format(tmp_path, text) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    assert load(path).profile is None and f"not {FORMAT}" in load(path).reason


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", None),
        ("torch", 2.6),
        ("h2d", -1.0),
        ("h2d", 0),
        ("h2d", "fast"),
        ("h2d", 1e-300),
        ("h2d", 10**400),
        ("nvme_chunk", 10**400),
        ("h2d", True),
        ("d2h", float("inf")),
        ("duplex", float("nan")),
        ("nvme_depth", 1.5),
        ("h2d_by_size", {}),
        ("h2d_by_size", [[1]]),
        ("h2d_by_size", [3]),
        ("h2d_by_size", [[None, 1.0]]),
        ("h2d_by_size", [[-4, 1.0]]),
        ("folders", [1]),
        ("folders", "/mnt"),
    ],
)
def test_damaged(tmp_path, field, value) -> None:
    path = save(FULL, tmp_path / "profile.json")
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, field: value}))
    found = load(path)
    assert found.profile is None and f"is damaged: {field}" in found.reason


def test_unknown_fields_are_left_out(tmp_path) -> None:
    path = save(FULL, tmp_path / "profile.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "color": "green"}))
    assert load(path).profile == FULL


def test_a_failed_save_leaves_the_old_one(tmp_path, monkeypatch) -> None:
    path = save(BARE, tmp_path / "profile.json")

    def refuse(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(profile.os, "replace", refuse)
    with pytest.raises(OSError, match="no"):
        save(FULL, path)
    assert load(path).profile == BARE and os.listdir(tmp_path) == ["profile.json"]


def test_speed_by_size() -> None:
    assert FULL.h2d_at(1) == FULL.h2d_at(64 << 10) == 10.8e9
    assert FULL.h2d_at((1 << 20) - 1) == 10.8e9 and FULL.h2d_at(1 << 20) == 48.5e9
    assert FULL.h2d_at(1 << 30) == 55e9
    assert BARE.h2d_at(1) is None
    assert dataclasses.replace(BARE, h2d=5.0).h2d_at(1) == 5.0
