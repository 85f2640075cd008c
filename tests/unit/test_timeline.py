"""The timeline: what it keeps, the trace it writes, the picture it draws."""

from __future__ import annotations

import json
import random
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.runtime.metrics.timeline import Event, Timeline, coverage


def test_events_come_back_in_order() -> None:
    timeline = Timeline()
    timeline.add("compute", "layer.0", 10, 30)
    timeline.add("dram->hbm", "layer.1", 5, 25, 4096)
    assert timeline.events() == [
        Event("compute", "layer.0", 10, 30, 0),
        Event("dram->hbm", "layer.1", 5, 25, 4096),
    ]
    with pytest.raises(FrozenInstanceError):
        timeline.events()[0].lane = "x"  # type: ignore[misc]
    timeline.clear()
    assert timeline.events() == [] and len(timeline) == 0


def test_ring_drops_the_oldest() -> None:
    timeline = Timeline(limit=3)
    for i in range(10):
        timeline.add("compute", str(i), i, i + 1)
    assert [event.name for event in timeline.events()] == ["7", "8", "9"]


def test_chrome_trace(tmp_path) -> None:
    timeline = Timeline()
    timeline.add("nvme->hbm", "layer.1", 2_000, 5_500, 8192)
    timeline.add("compute", "layer.0", 1_000, 3_000)
    timeline.add("own", "x", 4_000, 4_000)
    path = tmp_path / "trace.json"
    timeline.chrome_trace(path)
    rows = json.loads(path.read_text())["traceEvents"]
    names = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert list(names.values()) == ["compute", "nvme->hbm", "own"]
    spans = {row["name"]: row for row in rows if row["ph"] == "X"}
    assert spans["layer.1"]["ts"] == 1.0 and spans["layer.1"]["dur"] == 3.5
    assert spans["layer.1"]["args"] == {"nbytes": 8192}
    assert names[spans["layer.0"]["tid"]] == "compute" and spans["layer.0"]["ts"] == 0.0


def _size_of_png(path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_picture_of_many_events(tmp_path) -> None:
    timeline = Timeline()
    rng = random.Random(0)
    lanes = ["compute", "optimizer", "stall", "dram->hbm", "hbm->dram", "nvme->hbm", "hbm->nvme"]
    for i in range(40_000):
        start = i * 1_000 + rng.randrange(500)
        timeline.add(lanes[i % 7], f"layer.{i}", start, start + rng.randrange(1, 5_000), 4096)
    path = tmp_path / "timeline.png"
    timeline.picture(path, title="forty thousand", last_seconds=0.001)
    width, height = _size_of_png(path)
    assert width > 1000 and height > 300


@pytest.mark.parametrize("spans", [[], [("compute", 5, 5)]])
def test_picture_of_nothing(tmp_path, spans) -> None:
    timeline = Timeline()
    for lane, start, end in spans:
        timeline.add(lane, "x", start, end)
    timeline.picture(tmp_path / "empty.png")
    timeline.chrome_trace(tmp_path / "empty.json")
    assert _size_of_png(tmp_path / "empty.png")


@given(
    st.lists(st.tuples(st.integers(-50, 150), st.integers(0, 60)), max_size=12),
    st.sampled_from([1, 4, 10, 100]),
)
def test_coverage_equals_counting(spans: list[tuple[int, int]], bins: int) -> None:
    zero = 1_700_000_000_000_000_000  # a wall clock's magnitude must not cost precision
    intervals = [(zero + start, zero + start + length) for start, length in spans]
    busy = np.zeros(100)
    for start, length in spans:
        busy[max(0, start) : max(0, min(100, start + length))] = 1
    expected = busy.reshape(bins, -1).mean(axis=1)
    np.testing.assert_allclose(coverage(intervals, (zero, zero + 100), bins), expected, atol=1e-9)


def test_when_something_happened_last() -> None:
    timeline = Timeline(limit=10)
    for number in range(12):
        timeline.add("hbm->dram", f"block {number % 4}", number, number + 1)
        timeline.add("dram->hbm", f"block {number % 3}", 100 + number, 200)
    assert timeline.last("hbm->dram") == {"block 3": 11, "block 0": 8, "block 1": 9, "block 2": 10}
    assert timeline.last("hbm->dram", among=4) == {"block 2": 10, "block 3": 11}
    assert timeline.last("stall") == {}
