"""The forecast: its formulas by hand, and what must hold for all of them."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem import cli
from tiermem.cli.forecast import Machine, Workload, forecast
from tiermem.errors import CapacityError

GIB = 2**30
WORK = Workload(parameters=GIB, layers=16, itemsize=2, states=2, tokens=1000)
MACHINE = Machine(
    hbm=GIB, dram=4 * GIB, nvme=8 * GIB, link=GIB, read=GIB, write=GIB / 2, flops=1e12
)


def test_by_hand() -> None:
    # Weights and gradients 2 GiB each, states 4; a block of all roles is 0.5, two fill HBM.
    result = forecast(WORK, MACHINE)
    assert result.in_work == GIB
    assert result.homes["params"] == {"dram": 2 * GIB, "nvme": 0}
    assert result.homes["grads"] == {"dram": 2 * GIB, "nvme": 0}
    assert result.homes["optimizer"] == {"dram": 0, "nvme": 4 * GIB}
    assert result.traffic == {
        "dram->hbm": (3 * 2 + 2) * GIB,
        "hbm->dram": (2 + 2) * GIB,
        "nvme->hbm": 4 * GIB,
        "hbm->nvme": 4 * GIB,
    }
    assert result.seconds["host link, up"] == pytest.approx(12)
    assert result.seconds["host link, down"] == pytest.approx(8)
    assert result.seconds["disks"] == pytest.approx(4 + 8)
    assert result.seconds["compute"] == pytest.approx(6 * GIB * 1000 / 1e12)


def test_room_in_hbm_keeps_weights() -> None:
    result = forecast(WORK, dataclasses.replace(MACHINE, hbm=1.5 * GIB))
    assert result.stays == 0.5 * GIB and result.homes["params"]["dram"] == 2 * GIB
    assert result.traffic["dram->hbm"] == (3 * 1.5 + 2) * GIB
    assert result.traffic["hbm->dram"] == (1.5 + 2) * GIB


def test_inference_moves_weights_up_once() -> None:
    work = dataclasses.replace(WORK, inference=True)
    result = forecast(work, dataclasses.replace(MACHINE, hbm=0.25 * GIB, nvme=0))
    assert result.traffic == {
        "dram->hbm": 2 * GIB,
        "hbm->dram": 0,
        "nvme->hbm": 0,
        "hbm->nvme": 0,
    }


def test_what_does_not_fit() -> None:
    with pytest.raises(CapacityError, match=r"at least 512\.00 MiB"):
        forecast(WORK, dataclasses.replace(MACHINE, hbm=0.4 * GIB))
    with pytest.raises(CapacityError, match="optimizer do not fit"):
        forecast(WORK, dataclasses.replace(MACHINE, nvme=GIB))


@pytest.mark.parametrize("parameters", [5.07e9, 7e9, 1.23e9], ids=str)
def test_the_budgets_that_are_named_do(parameters: float) -> None:
    """To the byte: what two digits are left of may be less than is needed."""
    work = dataclasses.replace(WORK, parameters=parameters, layers=32)
    machine = dataclasses.replace(MACHINE, hbm=1, dram=1, nvme=0)
    for name in ("hbm", "dram"):
        with pytest.raises(CapacityError) as refused:
            forecast(work, machine)
        found = re.search(r"give .*\((\d+) bytes\)", str(refused.value))
        assert found is not None
        machine = dataclasses.replace(machine, **{name: int(found[1])})
    forecast(work, machine)


@given(
    hbm=st.floats(0.5, 30),
    dram=st.floats(0, 20),
    more=st.floats(0, 10),
    recompute=st.booleans(),
)
def test_more_memory_never_costs(hbm, dram, more, recompute) -> None:
    work = dataclasses.replace(WORK, recompute=recompute)
    base = dataclasses.replace(MACHINE, hbm=hbm * GIB, dram=dram * GIB, nvme=8 * GIB)
    result = forecast(work, base)
    sizes = work.role_bytes()
    for role, homes in result.homes.items():
        assert sum(homes.values()) == pytest.approx(sizes[role])
    assert sum(homes["dram"] for homes in result.homes.values()) <= base.dram * (1 + 1e-9)
    for field in ("hbm", "dram"):
        bigger = dataclasses.replace(base, **{field: getattr(base, field) + more * GIB})
        assert forecast(work, bigger).step_seconds <= result.step_seconds * (1 + 1e-9)


def test_hiding_tokens_is_where_the_bound_turns() -> None:
    result = forecast(WORK, MACHINE)
    at = dataclasses.replace(WORK, tokens=result.hiding_tokens * 1.001)
    assert forecast(at, MACHINE).bound == "compute"
    before = dataclasses.replace(WORK, tokens=result.hiding_tokens * 0.999)
    assert forecast(before, MACHINE).bound != "compute"


def test_command(capsys) -> None:
    line = ["plan", "--params", "7B", "--hbm", "10GiB", "--dram", "64GiB"]
    assert cli.main(line) == 0
    assert "takes at least" in capsys.readouterr().out
    assert cli.main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_seconds"] == found["seconds"][found["bound"]]
    assert cli.main(["plan", "--width", "4096", "--hbm", "10GiB", "--dram", "64GiB"]) == 0


def test_command_needs_one_size(capsys) -> None:
    assert cli.main(["plan", "--hbm", "10GiB", "--dram", "64GiB"]) == 2
    assert "--params or --width" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--params", "1e-300"],
        ["--params", "0.5"],
        ["--params", "7B", "--tokens", "1e-300"],
        ["--params", "7B", "--tflops", "1e-300"],
        ["--params", "7B", "--link-gbps", "1e-300"],
        ["--params", "7B", "--link-gbps", "1e300"],
        ["--params", "7B", "--profile", "/dev/null"],
    ],
)
def test_what_no_step_can_be_worked_out_from_is_refused(capsys, options) -> None:
    assert cli.main(["plan", *options, "--hbm", "10GiB", "--dram", "64GiB"]) == 2
    assert f"{options[-2]}" in capsys.readouterr().err
