"""Sizes and policies as users write them."""

from __future__ import annotations

import copy
import pickle

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tiermem
from tiermem.config import Policy, format_size, parse_size
from tiermem.core.block import Role
from tiermem.errors import ConfigError, TierError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("1b", 1),
        ("7GiB", 7 * 2**30),
        ("7GB", 7 * 10**9),
        (" 7 gib ", 7 * 2**30),
        ("1.5KiB", 1536),
        (".5MiB", 2**19),
        ("2TiB", 2**41),
        ("3tb", 3 * 10**12),
        (numpy.int64(4096), 4096),
        (numpy.uint32(4096), 4096),
    ],
)
def test_sizes(text, value) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *(-1, "-1", "-1GiB", "", "GiB", "7 bees", "1e9", "nan", None, 1.5, True, [], "7GiB 8GiB"),
        *(numpy.int8(-1), numpy.bool_(True), numpy.float64(7)),
    ],
)
def test_bad_sizes(text) -> None:
    with pytest.raises(ConfigError, match="hbm"):
        parse_size(text, "hbm")


def test_a_float_is_told_to_be_none() -> None:
    with pytest.raises(ConfigError, match=r"whole number of bytes \(an int\).* not 7000000000\.0"):
        parse_size(7e9, "hbm")  # type: ignore[arg-type]


def test_more_memory_than_can_be_mapped_is_refused_with_what_to_do() -> None:
    with pytest.raises(tiermem.CapacityError, match=r"tier dram: no .*; give dram= less, or raise"):
        tiermem.TierManager("cpu", hbm="1MiB", dram=2**62)


def test_config_errors_are_value_errors_too() -> None:
    with pytest.raises(ValueError):
        parse_size(-1)
    with pytest.raises(TierError):
        parse_size(-1)


@given(st.integers(0, 2**60))
def test_a_number_survives_its_text(nbytes) -> None:
    assert parse_size(str(nbytes)) == nbytes == parse_size(f"{nbytes}B")
    assert parse_size(f"{nbytes}KiB") == nbytes * 1024


@given(st.integers(0, 2**50))
def test_shown_sizes_are_close(nbytes) -> None:
    shown = format_size(nbytes)
    assert parse_size(shown) == pytest.approx(nbytes, rel=0.006, abs=1)


def test_policy_of() -> None:
    assert Policy.of(None) == Policy()
    policy = Policy(params="dram", optimizer="nvme")
    assert Policy.of(policy) is policy
    assert Policy.of({"params": "dram", "optimizer": "nvme"}) == policy
    assert Policy.of("dram") == Policy("dram", "dram", "dram", "dram", "dram")


def test_policy_homes() -> None:
    policy = Policy(params="dram", grads="hbm", master="auto", optimizer="nvme", activations="hbm")
    homes = {role: policy.home(role) for role in Role}
    assert homes[Role.PARAM] == homes[Role.BUFFER] == homes[Role.QUANT] == "dram"
    assert homes[Role.GRAD] == "hbm" and homes[Role.OPTIMIZER] == "nvme"
    assert homes[Role.MASTER] == "auto" and homes[Role.ACTIVATION] == "hbm"


@pytest.mark.parametrize("value", ["moon", {"params": "moon"}, {"wings": "dram"}, 3, ["dram"]])
def test_bad_policies(value) -> None:
    with pytest.raises(ConfigError):
        Policy.of(value)


def test_policy_fields_are_checked_at_once() -> None:
    with pytest.raises(ConfigError, match="grads"):
        Policy(grads="disk")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_folder_that_cannot_be_is_named(name: str) -> None:
    with pytest.raises(tiermem.ConfigError, match=r"nvme='a.*cannot be the path of a file"):
        tiermem.TierManager("cpu", hbm="1MiB", nvme=["here", name])


def test_a_limit_of_files_wants_files() -> None:
    with pytest.raises(tiermem.ConfigError, match="give nvme=folder"):
        tiermem.TierManager("cpu", hbm="1MiB", nvme_bytes="1GiB")


def test_a_module_that_has_the_manager_can_be_copied() -> None:
    with tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB") as tier:
        model = nn.Linear(4, 4)
        model.tier = tier
        tier.wrap(model)
        copied = copy.deepcopy(model)
        assert copied.tier is tier
        assert torch.equal(copied.weight, model.weight)
        with pytest.raises(tiermem.WrapError, match=r"tier\.save"):
            pickle.dumps(tier)
