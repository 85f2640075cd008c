"""The pages in ``docs/integrations`` say what the code does."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tiermem.integrations import pages

ROOT = Path(__file__).parents[2]
TESTS = Path(__file__).parent


@pytest.mark.parametrize("name", sorted(pages.PAGES))
def test_tables_are_written_anew(name: str) -> None:
    text = (ROOT / "docs" / "integrations" / name).read_text(encoding="utf-8")
    assert pages.with_table(text, pages.PAGES[name]) == text, (
        "run: python -m tiermem.integrations.pages docs/integrations"
    )


@pytest.mark.parametrize("name", sorted(pages.PAGES))
def test_every_option_names_a_test_that_exists(name: str) -> None:
    for option in pages.PAGES[name]:
        file, _, test = option.test.partition("::")
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert test in found, f"{option.name}: {option.test}"


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the lines"):
        pages.with_table("text", ())
