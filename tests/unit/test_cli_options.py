"""Reading counts, policies and depths."""

from __future__ import annotations

import pytest
import torch

from tiermem.cli.options import (
    parse_bytes,
    parse_count,
    parse_depth,
    parse_policy,
    pick_device,
    with_options,
)
from tiermem.config import Policy
from tiermem.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [("7e9", 7e9), ("7B", 7e9), ("350M", 3.5e8), ("16k", 16e3), ("1.5t", 1.5e12), ("3", 3.0)],
)
def test_counts(text, value) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize(
    "text", ["", "k", "0", "-3", "nan", "inf", "7 bees", "1e400", "1e-300", "1e300"]
)
def test_bad_counts(text) -> None:
    with pytest.raises(ConfigError, match="--params"):
        parse_count(text, "--params")


def test_bytes() -> None:
    assert parse_bytes(" 4096 ", "--hbm") == 4096
    assert parse_bytes("2KiB", "--hbm") == 2048
    with pytest.raises(ConfigError, match="--hbm must not be negative"):
        parse_bytes("-1", "--hbm")
    with pytest.raises(ConfigError, match=r"--hbm is more than any machine has: .*5000 characters"):
        parse_bytes("9" * 5000, "--hbm")


def test_policies() -> None:
    assert parse_policy(None) == Policy()
    assert parse_policy("nvme") == Policy("nvme", "nvme", "nvme", "nvme", "nvme")
    assert parse_policy("params=dram, optimizer=nvme") == Policy(params="dram", optimizer="nvme")


@pytest.mark.parametrize("text", ["moon", "params=moon", "wings=dram", "params=dram,nvme", ""])
def test_bad_policies(text) -> None:
    with pytest.raises(ConfigError):
        parse_policy(text)


def test_depths() -> None:
    assert parse_depth("auto") == "auto"
    assert parse_depth("3") == 3
    for bad in ("-1", "1.5", "many"):
        with pytest.raises(ConfigError, match="prefetch-depth"):
            parse_depth(bad)


def test_numbers_of_thousands_of_digits_are_no_depth() -> None:
    with pytest.raises(ConfigError, match="--prefetch-depth must be"):
        parse_depth("9" * 5000)


def test_devices() -> None:
    assert pick_device("cpu") == "cpu"
    assert pick_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ConfigError, match="abacus"):
        pick_device("abacus")


def test_cuda_that_is_not_there(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        pick_device("cuda")


def test_a_device_past_the_last_one(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1") == "cuda:1"
    with pytest.raises(ConfigError, match="the last CUDA device that torch sees is cuda:1"):
        pick_device("cuda:2")


def test_errors_name_options() -> None:
    message = "give hbm= at least 4096 and nvme_bytes= at least 9, or nvme=folder (alone hbm=12)"
    assert with_options(message) == (
        "give --hbm at least 4096 and --nvme-bytes at least 9, or --nvme folder (alone --hbm 12)"
    )
    assert with_options("none; give TierManager(nvme=folder)") == "none; give --nvme folder"
