"""The compiler of the host's loop: run once, ahead where that pays, nothing left behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import tiermem
from tiermem.optim.host import build, sides


class Compiler:
    """A shell script in the compiler's place.

    Attributes:
        folder: Where the loop is kept.
        temporary: Where programs have their temporary files.
    """

    def __init__(self, at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = at / "cache" / "tiermem"
        self._script, self._log, self._gate = at / "compiler", at / "log", at / "gate"
        self.temporary = at / "temporary"
        self.temporary.mkdir()
        monkeypatch.setenv("TMPDIR", str(self.temporary))
        monkeypatch.setenv("XDG_CACHE_HOME", str(at / "cache"))
        monkeypatch.setenv("CC", str(self._script))
        monkeypatch.setattr(build, "_under_way", None)

    def writes(self, text: str, code: int = 0, *, gated: bool = False) -> None:
        """Lets it write a file and end with a code; once the gate is open, if it is gated."""
        wait = ""
        if gated:
            os.mkfifo(self._gate)
            wait = f"read line < {self._gate}\n"
        self._script.write_text(
            f'#!/bin/sh\necho run >> {self._log}\n: > "$TMPDIR/made.s"\n'
            f'{wait}while [ "$1" != -o ]; do shift; done\n'
            f'printf %s "{text}" > "$2"\necho "it says {text}" >&2\nexit {code}\n'
        )
        self._script.chmod(0o700)

    def open(self) -> None:
        """Opens the gate, once the compiler waits there."""
        self._gate.write_text("go\n")

    def come_to_the_gate(self) -> int:
        """Returns the gate's descriptor, once the compiler waits there."""
        return os.open(self._gate, os.O_WRONLY)

    @property
    def runs(self) -> int:
        """How often it ran."""
        return len(self._log.read_text().split()) if self._log.exists() else 0

    @property
    def files(self) -> list[str]:
        """What the folder has: names without what makes them unique."""
        return sorted(path.name.split("-")[0] for path in self.folder.glob("*"))


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    yield Compiler(tmp_path, monkeypatch)
    build._leave_nothing()


def test_it_is_compiled_once(compiler: Compiler) -> None:
    compiler.writes("loop")
    assert build.built().read_text() == "loop"
    build.prepare()
    assert build.built().read_text() == "loop"
    assert compiler.runs == 1
    assert compiler.files == ["exact"]


def test_it_is_compiled_anew_for_another_folder(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.writes("loop")
    first = build.built()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    other = build.built()
    assert other.read_text() == "loop"
    assert other != first
    assert compiler.runs == 2


def test_what_was_begun_ahead_is_waited_for(compiler: Compiler) -> None:
    compiler.writes("loop", gated=True)
    build.prepare()
    build.prepare()
    assert "exact" not in compiler.files
    opens = threading.Thread(target=compiler.open)
    opens.start()
    assert build.built().read_text() == "loop"
    opens.join()
    assert compiler.runs == 1
    assert compiler.files == ["exact"]


def test_a_compiler_that_fails_is_told_of_and_tried_anew(compiler: Compiler) -> None:
    compiler.writes("nonsense", 1)
    build.prepare()
    with pytest.raises(build.NoLoop, match="fails: it says nonsense"):
        build.built()
    assert compiler.files == []
    compiler.writes("loop")
    assert build.built().read_text() == "loop"


def test_no_compiler_is_told_of_where_the_loop_is_asked_for(compiler: Compiler) -> None:
    build.prepare()
    with pytest.raises(build.NoLoop, match="no C compiler"):
        build.built()


def test_a_compiler_that_takes_too_long_is_ended(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.writes("loop", gated=True)
    monkeypatch.setattr(build, "_SECONDS", 0.0)
    with pytest.raises(build.NoLoop, match="took more than 0 s"):
        build.built()
    assert compiler.files == []


def test_nothing_is_left_of_one_that_nobody_waited_for(compiler: Compiler) -> None:
    compiler.writes("loop", gated=True)
    build.prepare()
    assert len(compiler.files) == 1
    build._leave_nothing()
    assert compiler.files == []


def test_nothing_is_left_of_the_files_of_one_that_is_ended(compiler: Compiler) -> None:
    compiler.writes("loop", gated=True)
    build.prepare()
    gate = compiler.come_to_the_gate()
    build._leave_nothing()
    os.close(gate)
    assert compiler.files == [] and list(compiler.temporary.iterdir()) == []


def test_ctrl_c_while_it_is_waited_for_costs_nothing(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.writes("loop")
    build.prepare()
    assert build._under_way is not None

    def interrupted(**_: float) -> tuple[str, str]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build._under_way._process, "communicate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build.built()
    assert build.built().read_text() == "loop"
    assert compiler.runs == 1


def test_a_forked_child_compiles_for_itself(compiler: Compiler) -> None:
    compiler.writes("loop")
    build.prepare()
    parents = build._under_way
    assert parents is not None
    parents.pid += 1  # as a child sees it
    assert build.built().read_text() == "loop"
    assert compiler.runs == 2
    parents.discard()
    assert compiler.files == ["exact"]


@pytest.mark.parametrize(
    ("hbm", "trained", "expected"), [("64KiB", True, 1), ("4MiB", True, 0), ("64KiB", False, 0)]
)
def test_it_is_begun_where_an_optimizer_would_ask_for_it(
    monkeypatch: pytest.MonkeyPatch, hbm: str, trained: bool, expected: int
) -> None:
    begun: list[int] = []
    monkeypatch.setattr(sides, "_LEAST", 1 << 12)
    monkeypatch.setattr(sides, "prepare", lambda: begun.append(1))
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]).requires_grad_(trained)
    with tiermem.TierManager(torch.device("cpu"), hbm=hbm, dram="8MiB") as tier:
        tier.wrap(model)
        sides.prepare_share(tier._runtime)
    assert len(begun) == expected
