"""What the doctor says."""

from __future__ import annotations

import json

from tiermem import cli
from tiermem.cli import machine


def test_text(tmp_path, capsys) -> None:
    assert cli.main(["doctor", "--nvme", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "page-lock limit" in out and "file I/O" in out


def test_json(tmp_path, capsys) -> None:
    assert cli.main(["doctor", "--nvme", str(tmp_path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["io_engine"] in ("uring", "threads") and facts["io_reason"]
    assert facts["paths"][0]["usable"] and facts["paths"][0]["free"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_used(tmp_path, capsys) -> None:
    missing = tmp_path / "missing"
    assert cli.main(["doctor", "--nvme", str(missing)]) == 1
    assert "cannot be used" in capsys.readouterr().out


def test_engine_can_be_refused(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TIERMEM_IO_ENGINE", "threads")
    assert cli.main(["doctor", "--nvme", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["io_engine"] == "threads"


def test_default_folder_is_not_in_memory(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: "/mem")
    monkeypatch.setattr(machine, "file_system_of", lambda path: "tmpfs")
    monkeypatch.chdir(tmp_path)
    assert machine.default_swap_folder() == str(tmp_path)
    monkeypatch.setattr(machine, "file_system_of", lambda path: "ext4")
    assert machine.default_swap_folder() == "/mem"


def test_file_system_of_known_mounts() -> None:
    assert machine.file_system_of("/proc/self") == "proc"
    assert machine.file_system_of("/") != "unknown"
