"""What is expected of passes that were not measured, and how little plans change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiermem.core.block import Block, Role, TensorSpec
from tiermem.core.forecast import Forecast, Sized, rounded, timed
from tiermem.core.pace import Estimates
from tiermem.core.residents import adjust_residents
from tiermem.nn.passes.load import Kinds, tokens
from tiermem.runtime.metrics import device_speed

FLOPS = 1e12


def matrix(number: int, rows: int, columns: int, itemsize: int = 2) -> Block:
    nbytes = rows * columns * itemsize
    spec = TensorSpec("w", 0, nbytes, (rows, columns), (columns, 1), None)
    return Block(number, f"b{number}", Role.PARAM, nbytes, (spec,))


BLOCKS = [matrix(0, 65536, 64), matrix(1, 1000, 1000), matrix(2, 1000, 1000, 4)]
ORDER = [(block.id, block) for block in BLOCKS]


def learned(estimates: Estimates, key: object, load: int, seconds: dict[int, float]) -> None:
    for _ in range(2):
        estimates.wants(timed(key, load))
        estimates.observe(timed(key, load), seconds, {}, ())


@given(st.integers(1, 1 << 40))
def test_loads_differ_by_a_fifth_at_most(count: int) -> None:
    load = rounded(count)
    assert 0.8 * load - 1 <= count <= 1.2 * load + 1 and rounded(load) == load
    assert rounded(0) == 0


def known(found: list[float | None]) -> list[float]:
    assert None not in found
    return [seconds for seconds in found if seconds is not None]


def test_shapes_say_what_nothing_measured_does() -> None:
    forecast = Forecast(Estimates(flops=FLOPS))
    table, half, whole = known(forecast.seconds("f", 1000, ORDER))
    assert half == pytest.approx(2 * 1e6 * 1000 / FLOPS) and whole == pytest.approx(8 * half)
    assert table < 1e-4  # rows of it are looked up
    assert forecast.seconds(("backward", "f"), 1000, ORDER)[1] == pytest.approx(2 * half)
    assert forecast.seconds("f", 0, ORDER) == [None] * 3
    assert Forecast(Estimates()).seconds("f", 1000, ORDER) == [None] * 3


def test_what_was_measured_is_scaled_to_another_load() -> None:
    estimates = Estimates(flops=FLOPS)
    learned(estimates, "f", 1024, {0: 1e-5, 1: 4e-3, 2: 8e-3})
    forecast = Forecast(estimates)
    assert forecast.seconds("f", 1024, ORDER) == [1e-5, 4e-3, 8e-3]
    scaled = forecast.seconds("f", 4096, ORDER)
    assert scaled[1] == pytest.approx(16e-3) and scaled[2] == pytest.approx(32e-3)
    assert forecast.seconds("g", 1024, ORDER)[1] != 4e-3
    learned(estimates, "f", 4096, {0: 1e-5, 1: 10e-3, 2: 20e-3})
    assert forecast.seconds("f", rounded(8192), ORDER)[1] == pytest.approx(20e-3)
    assert {row[0] for row in estimates.rows()} == {Sized("f", 1024), Sized("f", 4096)}


def test_what_is_measured_without_tokens_goes_by_that() -> None:
    """An optimizer's pass knows of none, and is planned with those of the pass before."""
    for flops in (0.0, FLOPS):
        estimates = Estimates(flops=flops)
        learned(estimates, "o", 0, {0: 0.1, 1: 0.2, 2: 0.3})
        assert Forecast(estimates).seconds("o", 1000, ORDER) == [0.1, 0.2, 0.3]


def test_what_the_host_takes_does_not_grow_with_the_load() -> None:
    """A token's use of 300 us is launches: with 1,024 tokens the matrix adds its 2 ms to them."""
    estimates = Estimates(flops=FLOPS)
    learned(estimates, "f", 1, {0: 1e-4, 1: 3e-4, 2: 3e-4})
    assert Forecast(estimates).seconds("f", 1024, ORDER)[1] == pytest.approx(
        3e-4 + 2.048e-3 - 8e-6, rel=0.01
    )


@given(
    st.dictionaries(st.integers(0, 30), st.integers(1, 20), min_size=1),
    st.integers(0, 200),
    st.randoms(),
)
def test_what_stays_changes_as_little_as_it_takes(
    sizes: dict[int, int], room: int, random: Any
) -> None:
    order = sorted(sizes)
    kept = random.sample(order, random.randint(0, len(order)))
    there = [block for block in order if block not in kept and random.random() < 0.5]
    found = adjust_residents(kept, there, order, sizes, room)
    assert sum(sizes[block] for block in found) <= room and found <= sizes.keys()
    if sum(sizes[block] for block in kept) <= room:
        assert found >= set(kept)


def test_none_goes_that_is_far_larger_than_what_has_to() -> None:
    sizes = {0: 280, 1: 10, 2: 45, 3: 25, 4: 10}
    assert adjust_residents([0, 1, 2, 3], [], [], sizes, 340) == {0, 1, 2}, "20 have to go"
    assert adjust_residents([0, 1, 4], [], [], sizes, 285) == {0}, "15, which both small ones make"
    assert adjust_residents([0, 2], [], [], sizes, 60) == {2}, "none but the large one will do"


def test_tokens_of_a_call() -> None:
    ids, mask = torch.zeros(2, 7, dtype=torch.long), torch.ones(2, 1, 9, 9)
    assert tokens((ids,), {"attention_mask": mask}) == 14
    assert tokens((), {"input_ids": ids, "attention_mask": mask, "use_cache": True}) == 14
    assert tokens((), {"inputs_embeds": torch.zeros(2, 5, 64), "position_ids": ids}) == 10
    assert tokens((), {"input_ids": ids, "decoder_input_ids": ids[:, :1]}) == 16
    assert tokens((), {"pixel_values": torch.zeros(2, 3, 224, 224)}) == 2 * 196
    assert tokens((), {"other": torch.zeros(4, 8)}) == 4
    assert tokens((torch.zeros(8),), {}) == 1 and tokens((3, None), {}) == 0


def test_calls_with_other_arguments_or_in_another_mode_are_other_kinds() -> None:
    kinds = Kinds()
    assert kinds.number("", True, (1,), {"cache": None}) == 0
    assert kinds.number("", True, (2,), {}) == 0
    assert kinds.number("", True, (2,), {"cache": 3}) == 1
    assert kinds.number("", False, (2,), {}) == 2
    assert kinds.number("encoder", False, (2,), {}) == 0
    for count in range(1000):
        assert kinds.number("", True, (), {f"a{count}": 1}) < 64


def test_a_devices_speed_is_what_it_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = SimpleNamespace(major=9, minor=0, multi_processor_count=132, clock_rate=1_980_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: h200)
    assert 4e14 < device_speed.flops_of(torch.device("cuda", 0)) < 9e14
    assert device_speed.flops_of(torch.device("cpu")) == 0.0
