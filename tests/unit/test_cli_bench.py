"""The quick measurements."""

from __future__ import annotations

import json

from tiermem import cli


def test_memory(capsys) -> None:
    line = ["bench", "--nvme", "none", "--size", "1MiB", "--repeat", "1", "--device", "cpu"]
    assert cli.main(line) == 0
    assert "dram -> hbm" in capsys.readouterr().out
    assert cli.main([*line, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [row["link"] for row in rows] == ["host -> host", "dram -> hbm", "hbm -> dram"]
    assert all(row["gb_per_s"] > 0 for row in rows)


def test_disks(tmp_path, capsys) -> None:
    line = ["bench", "--nvme", str(tmp_path), "--size", "9MiB", "--repeat", "1", "--device", "cpu"]
    assert cli.main([*line, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [row["link"] for row in rows[3:]] == ["dram -> nvme", "nvme -> dram"]
    assert all(row["gb_per_s"] > 0 and "checksums" in row["note"] for row in rows[3:])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path, capsys) -> None:
    missing = str(tmp_path / "missing")
    assert cli.main(["bench", "--nvme", missing, "--size", "4KiB", "--device", "cpu"]) == 2
    assert "missing does not exist" in capsys.readouterr().err
