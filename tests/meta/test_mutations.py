"""The mutation check stays usable: each mutation has its one place, and the script works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from mutation_check import attempt, copy_tree, run_tests  # noqa: E402
from mutations import MUTATIONS, Mutation  # noqa: E402

QUICK = "gaps that touch are not joined"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_there_is_exactly_one_place(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1
    assert mutation.new != mutation.old
    if mutation.file.endswith(".py"):  # the loop in C is compiled when the mutant is tried
        compile(text.replace(mutation.old, mutation.new), mutation.file, "exec")
    for test in mutation.tests:
        assert (ROOT / test).exists()


def test_names_are_told_apart() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 30


@pytest.mark.thorough
def test_a_quick_one_is_caught(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    (mutation,) = [m for m in MUTATIONS if m.name == QUICK]
    assert run_tests(tmp_path, mutation.tests) is None
    noticed = attempt(tmp_path, mutation)
    assert noticed and all(test.startswith(mutation.tests) for test in noticed)
    assert (tmp_path / mutation.file).read_text() == (ROOT / mutation.file).read_text()


@pytest.mark.thorough
def test_a_mutant_that_changes_nothing_survives(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    (tmp_path / "tests" / "test_nothing.py").write_text("def test_it(): pass\n")
    harmless = Mutation(
        "nothing",
        "tiermem/core/cost.py",
        "import math\n",
        "import math  # as ever\n",
        ("tests/test_nothing.py",),
    )
    assert attempt(tmp_path, harmless) is None


def test_the_script_lists_them() -> None:
    script = ROOT / "benchmarks" / "mutation_check.py"
    done = subprocess.run(
        [sys.executable, str(script), "--list"], capture_output=True, text=True, check=True
    )
    assert len(done.stdout.splitlines()) == len(MUTATIONS)


def test_parts_are_the_whole_list_and_nothing_twice() -> None:
    script = ROOT / "benchmarks" / "mutation_check.py"
    found: list[str] = []
    for part in ("1/3", "2/3", "3/3"):
        command = [sys.executable, str(script), "--list", "--part", part]
        found += subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.splitlines()
    assert len(found) == len(set(found)) == len(MUTATIONS)


@pytest.mark.thorough
def test_what_fails_anyway_is_left_out(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    (tmp_path / "tests" / "test_some.py").write_text(
        "def test_bad(): assert False\ndef test_worse(): assert False\ndef test_good(): pass\n"
    )
    failed = run_tests(tmp_path, ["tests/test_some.py"], to_the_end=True)
    assert failed == ["tests/test_some.py::test_bad", "tests/test_some.py::test_worse"]
    assert run_tests(tmp_path, ["tests/test_some.py"], without=failed) is None
