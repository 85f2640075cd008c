"""The public names are there, documented, and one per line of ``__all__``."""

from __future__ import annotations

import inspect
from pathlib import Path

import tiermem
from tiermem import errors

ROOT = Path(__file__).resolve().parents[2]

FIXED = {"TierManager", "Policy", "Tier", "Role", "Stats"}


def test_public_names() -> None:
    assert set(tiermem.__all__) >= FIXED
    assert len(set(tiermem.__all__)) == len(tiermem.__all__)
    for name in tiermem.__all__:
        assert hasattr(tiermem, name), name


def test_version_is_that_of_the_package() -> None:
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    assert f'version = "{tiermem.__version__}"' in lines


def test_every_error_is_public_and_of_the_tree() -> None:
    found = {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert set(found) <= set(tiermem.__all__)
    assert all(issubclass(error, tiermem.TierError) for error in found.values())


def test_public_names_are_documented() -> None:
    for name in tiermem.__all__:
        value = getattr(tiermem, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name


def test_methods_of_the_manager_are_documented() -> None:
    for name, value in vars(tiermem.TierManager).items():
        if not name.startswith("_") and callable(value):
            assert inspect.getdoc(value), name
