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
