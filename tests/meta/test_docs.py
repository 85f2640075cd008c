"""Every code block of README and docs is run; every link inside the repository exists."""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

import tiermem
from tiermem import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TRAINERS = {"optimizers", "attach"}
"""What ``TrainerTiers`` of the integration of Hugging Face has beside."""
QUICK = {"doctor", "plan"}
"""Commands that are run as they stand; the others are parsed only."""

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SKETCH = re.compile(r"^```python notest\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@dataclass(frozen=True)
class Code:
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def _blocks() -> list[Code]:
    blocks = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            blocks.append(Code(page, line, match.group(1), match.group(2)))
    return blocks


BLOCKS = _blocks()
SKETCHES = [
    pytest.param(text, id=f"{page.relative_to(ROOT)}:{number}")
    for page in PAGES
    for number, text in enumerate(_SKETCH.findall(page.read_text(encoding="utf-8")))
]
"""Lines of programs that need data, a large model or a GPU: they are compiled, not run."""


def _commands() -> list[tuple[Code, str]]:
    return [
        (block, line.partition("#")[0].strip())
        for block in BLOCKS
        if block.language in ("bash", "text")
        for line in block.text.replace("\\\n", " ").splitlines()
        if line.strip().startswith(("tiermem ", "python -m tiermem "))
    ]


@pytest.mark.parametrize("text", SKETCHES)
def test_sketches_are_python_with_names_that_there_are(text: str) -> None:
    tree = ast.parse(text)
    compile(tree, "a page", "exec")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "tiermem":
                assert node.attr in tiermem.__all__
            if node.value.id == "tier":  # TierManager's own, or that of an integration
                assert hasattr(tiermem.TierManager, node.attr) or node.attr in TRAINERS


def test_there_are_blocks() -> None:
    assert {block.language for block in BLOCKS} <= {"python", "bash", "text"}
    assert any(block.page.name == "README.md" and block.language == "python" for block in BLOCKS)


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "python"], ids=str
)
def test_python_block_runs(block: Code, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Padded, so that a traceback names the line of the page.
    source = "\n" * block.line + block.text
    exec(compile(source, str(block.page), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize(("block", "line"), _commands(), ids=lambda value: str(value))
def test_command_line_is_valid(block: Code, line: str, tmp_path, monkeypatch, capsys) -> None:
    words = shlex.split(line.replace("python -m tiermem", "tiermem"))[1:]
    words = [str(tmp_path) if word.startswith("/mnt/") else word for word in words]
    monkeypatch.chdir(tmp_path)
    if words[0] in QUICK:
        assert cli.main(words) == 0, capsys.readouterr().err
        return
    module = __import__(f"tiermem.cli.{words[0]}", fromlist=["run"])
    monkeypatch.setattr(module, "run", lambda arguments: 0)
    assert cli.main(words) == 0, capsys.readouterr().err


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_exist(page: Path) -> None:
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_decision_is_listed_in_order() -> None:
    numbers = [int(path.name[:4]) for path in sorted((ROOT / "docs" / "adr").glob("0*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))
