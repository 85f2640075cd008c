"""The command itself: exit statuses and one-line errors."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tiermem import cli
from tiermem.cli import plan
from tiermem.cli.options import parse_path
from tiermem.errors import ConfigError, StorageError


def test_help_names_every_command(capsys) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_of_each_command(command, capsys) -> None:
    assert cli.main([command, "--help"]) == 0
    assert f"tiermem {command}" in capsys.readouterr().out


def test_version(capsys) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tiermem ")


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["fly"],
        ["plan"],
        ["plan", "--hbm", "1GiB", "--dram", "1GiB", "--params", "many"],
        ["plan", "--hbm", "-1", "--dram", "1GiB", "--params", "7e9"],
        ["plan", "--hbm", "1XB", "--dram", "1GiB", "--params", "7e9"],
        ["train", "--layers", "x"],
        ["train", "--layers", "0"],
        ["train", "--width", "10", "--heads", "3"],
        ["train", "--steps", "0"],
        ["train", "--lr", "nan"],
        ["train", "--lr", "inf"],
        ["train", "--lr", "1e300"],
        ["train", "--nvme", "none", "--nvme-bytes", "1GiB"],
        ["train", "--policy", "params=dram,params=nvme"],
        ["train", "--checkpoint", "a", "--lora", "r=8,r=4"],
        ["train", "--checkpoint", "a", "--lora", "r=8", "--lr", "1e300"],
        ["train", "--checkpoint", "a", "--lora", "r=8", "--threads", "0"],
        ["train", "--checkpoint", "a", "--lora", "r=8,task_type=causal"],
        ["train", "--hbm", "-5"],
        ["train", "--policy", "params=moon"],
        ["train", "--policy", "wings=dram"],
        ["train", "--prefetch-depth", "deep"],
        ["train", "--device", "abacus"],
        ["train", "--data", "/nowhere/at/all"],
        ["bench", "--repeat", "0"],
        ["bench", "--size", "0"],
        ["bench", "--device", "cpu:x"],
        ["plan", "--hbm", "1", "--dram", "1", "--width", "9" * 400],
        ["plan", "--hbm", "1", "--dram", "1", "--params", "7B", "--layers", "9" * 400],
        ["train", "--width", "9" * 30],
        ["train", "--layers", "99999999999"],
        ["train", "--batch", "9" * 30],
    ],
)
def test_bad_options_give_one_line_and_status_2(line, capsys) -> None:
    assert cli.main(line) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and "error: " in captured.err


def test_tier_errors_are_one_line(monkeypatch, capsys) -> None:
    def fail(arguments: object) -> int:
        raise StorageError("read failed", block="layer.3", path="/disk", offset=4096, errno=5)

    monkeypatch.setattr(plan, "run", fail)
    assert cli.main(["plan", "--hbm", "1", "--dram", "1"]) == 2
    err = capsys.readouterr().err
    assert "layer.3" in err and "errno 5" in err and err.count("\n") == 1


@pytest.mark.parametrize("kind", ["of the host", "of a device", "of python"])
def test_out_of_memory_is_one_line(monkeypatch, capsys, kind: str) -> None:
    def fail(arguments: object) -> int:
        if kind == "of the host":
            torch.empty(1 << 50)
        raise MemoryError if kind == "of python" else torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(plan, "run", fail)
    assert cli.main(["plan", "--hbm", "1", "--dram", "1"]) == 2
    err = capsys.readouterr().err
    assert "out of memory" in err and "smaller" in err and err.count("\n") == 1


def test_other_errors_are_not_hidden(monkeypatch) -> None:
    def fail(arguments: object) -> int:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(plan, "run", fail)
    with pytest.raises(RuntimeError, match="a mistake"):
        cli.main(["plan", "--hbm", "1", "--dram", "1"])


def test_ctrl_c_is_130(monkeypatch, capsys) -> None:
    def interrupt(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "run", interrupt)
    assert cli.main(["plan", "--hbm", "1", "--dram", "1"]) == 130
    assert "interrupted" in capsys.readouterr().err


INTERRUPTED_AGAIN = """
import atexit, os, signal, sys
from tiermem import cli
from tiermem.cli import plan
from tiermem.cli.options import parse_path

# What takes long to import, one process imports for all runs.
runs = int(sys.argv.pop())
for number in range(runs):
    if (pid := os.fork()) == 0:
        break
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(2, f"ended with {status}\\n".encode())
else:
    sys.exit()

def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)

def run(arguments):
    atexit.register(interrupt)
    interrupt()

class Stderr:
    def write(self, text):
        os.write(2, text.encode())
        if "interrupted" in text and again:
            again.pop()
            interrupt()

    def flush(self):
        pass

again = [None] * number
sys.stderr, plan.run = Stderr(), run
sys.exit(cli.command())
"""


def test_ctrl_c_again_as_the_process_ends() -> None:
    """Once at its end, and before that as often as there were runs before, while it is said."""
    line = ["plan", "--hbm", "1", "--dram", "1", "3"]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_AGAIN, *line],
        capture_output=True,
        text=True,
        check=True,
    )
    *runs, rest = done.stderr.split("ended with 130\n")
    assert len(runs) == 3 and not rest, done.stderr
    for said in runs:
        assert "interrupted" in said and "Traceback" not in said


DROPPED = """
import os, signal, sys
import tiermem.cli as cli, tiermem.cli.plan as plan  # torch would take seconds

class Deleted:
    def __init__(self, act):
        self.act = act

    def __del__(self):
        self.act()

def fail():
    raise ValueError("of another kind")

def run(arguments):
    Deleted(fail)
    Deleted(lambda: os.kill(os.getpid(), signal.SIGINT))
    while True:
        signal.pause()

plan.run = run
sys.exit(cli.command())
"""


def test_ctrl_c_that_python_drops_comes_again() -> None:
    """Other exceptions that it drops are told of, as ever."""
    line = [sys.executable, "-c", DROPPED, *PLAN[1:]]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == cli.INTERRUPTED
    assert done.stderr.count("Traceback") == 1 and "of another kind" in done.stderr
    assert done.stderr.endswith("tiermem plan: interrupted\n")
    assert "KeyboardInterrupt" not in done.stderr


def test_torch_is_imported_where_a_command_runs() -> None:
    """Ctrl-C comes to the command's own handler then, and usage is said at once."""
    program = (
        "import sys, tiermem.cli as cli\n"
        "assert cli.main(['--help']) == 0 and cli.main(['plan']) == 2\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_what_is_public_is_there() -> None:
    """Each name of the package, and its modules, with nothing else imported before."""
    program = (
        "import tiermem\n"
        "assert set(tiermem.__all__) <= set(dir(tiermem))\n"
        "assert all(getattr(tiermem, name).__name__ == name for name in tiermem.__all__)\n"
        "names = sorted(name for names in tiermem._MODULES.values() for name in names)\n"
        "assert names == tiermem.__all__\n"
        "assert tiermem.testing.__name__ == 'tiermem.testing'\n"
        "assert not hasattr(tiermem, 'nothing') and not hasattr(tiermem, '_nothing')"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_python_dash_m() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tiermem", "--version"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.startswith("tiermem ")


@pytest.mark.parametrize("seed", ["x", "1.5", str(1 << 64), str(-(1 << 63) - 1)])
@pytest.mark.parametrize("command", ["train", "generate"])
def test_a_seed_that_torch_does_not_take(command: str, seed: str, capsys: Any) -> None:
    line = [command, "--seed", seed]
    if command == "generate":
        line += ["folder", "--prompt", "a"]
    assert cli.main(line) == 2
    assert "64 bits" in capsys.readouterr().err


def test_interrupted_before_a_command_runs(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", interrupt)
    assert cli.main(["doctor"]) == cli.INTERRUPTED
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_output_on_a_full_disk(monkeypatch: pytest.MonkeyPatch, capsys: Any, code: int) -> None:
    def fail(arguments: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(plan, "run", fail)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # it is taken away
    line = ["plan", "--hbm", "1", "--dram", "1"]
    if code == errno.ENOSPC:
        assert cli.main(line) == 2
        assert os.strerror(code) in capsys.readouterr().err
    else:
        with pytest.raises(OSError, match=os.strerror(code)):
            cli.main(line)


PLAN = ["tiermem", "plan", "--hbm", "1", "--dram", "1"]


@pytest.fixture
def as_process(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """``cli.command()`` with the arguments of ``PLAN``; Ctrl-C stays what it was."""
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(sys, "argv", PLAN)
    return monkeypatch


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_what_a_stream_cannot_encode_is_written_all_the_same(
    as_process: pytest.MonkeyPatch, encoding: str
) -> None:
    """A model's text, a table, or a path that is no text: its bytes are none of the encoding's."""
    written = io.BytesIO()

    def run(arguments: object) -> int:
        print("24 layers × 192 in \udcff")
        return 0

    as_process.setattr(plan, "run", run)
    as_process.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    assert cli.command() == 0
    times = b"\\xd7" if encoding == "ascii" else "×".encode()
    assert written.getvalue() == b"24 layers " + times + b" 192 in \\udcff\n"


def test_output_that_was_closed_before(as_process: pytest.MonkeyPatch) -> None:
    """Nothing is told, also not on the other stream, and nothing fails."""

    def run(arguments: object) -> int:
        assert not sys.stdout.isatty()
        sys.stdout.write("a text")
        raise ConfigError("no such thing")

    both = io.StringIO()
    as_process.setattr(plan, "run", run)
    for closed, other in (("stdout", "stderr"), ("stderr", "stdout")):
        as_process.setattr(sys, closed, None)
        as_process.setattr(sys, other, both)
        assert cli.command() == 2
        getattr(sys, closed).close()
    assert both.getvalue() == "tiermem plan: error: no such thing\na text"


@pytest.mark.parametrize("printed", ["at once", "at the end"])
@pytest.mark.parametrize("target", ["no reader", "full disk"])
def test_output_that_nobody_takes(
    as_process: pytest.MonkeyPatch, capsys: Any, printed: str, target: str
) -> None:
    """``| head`` says nothing, also where text is left to be written as the process ends."""

    def run(arguments: object) -> int:
        print(json.dumps({"a": 1}), flush=printed == "at once")
        return 0

    if target == "no reader":
        reader, fd = os.pipe()
        os.close(reader)
    else:
        fd = os.open("/dev/full", os.O_WRONLY)
    as_process.setattr(plan, "run", run)
    stdout = os.fdopen(fd, "w", encoding="utf-8")
    as_process.setattr(sys, "stdout", stdout)
    assert cli.command() == (1 if target == "no reader" else 2)
    assert sys.stdout is None  # nothing is tried again
    said = "" if target == "no reader" else os.strerror(errno.ENOSPC)
    assert said in (err := capsys.readouterr().err) and err.count("\n") == bool(said)
    with contextlib.suppress(OSError):
        stdout.close()


@pytest.mark.parametrize(
    "line",
    [
        ["train", "--data", ""],
        ["train", "--nvme", ""],
        ["train", "--out", ""],
        ["train", "--save", ""],
        ["train", "--checkpoint", "", "--lora", "r=8"],
        ["generate", "", "--prompt", "a"],
        ["generate", "folder", "--prompt", "a", "--nvme", ""],
        ["bench", "--nvme", ""],
        ["bench", "--picture", ""],
        ["bench", "--codec", ""],
        [*PLAN[1:], "--params", "7B", "--profile", ""],
        ["doctor", "--nvme", ""],
    ],
)
def test_the_path_of_a_variable_that_is_not_set_is_not_the_current_folder(
    line: list[str], capsys: Any
) -> None:
    assert cli.main(line) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert "it is empty; the current folder is '.'" in captured.err


def test_other_paths_stay_as_they_are() -> None:
    assert parse_path(" a ") == " a "
    with pytest.raises(argparse.ArgumentTypeError):
        parse_path("")
