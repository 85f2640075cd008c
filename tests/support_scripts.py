"""Runs scripts as processes of their own that need not import torch, tiermem and others again.

Each is forked from a server that has imported those, and no more: nothing of a test, nor of
another script, is in it.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import resource
import runpy
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.context import ForkServerContext
from pathlib import Path

_SERVER = "TIERMEM_TESTS_SERVER"

if _SERVER in os.environ:  # this is the server, which imports this module first
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in (
        "torch._dynamo",
        "transformers.models.llama.modeling_llama",
        "matplotlib.figure",
        "matplotlib.backends.backend_agg",
        "tiermem.tier",
        "tiermem.optim",
        "tiermem.loading",
    ):
        with suppress(ImportError):
            import_module(name)
    sys.modules["torch"].set_num_threads(1)
    gc.freeze()  # what was imported is not looked through in every script


def run_script(path: Path, arguments: Sequence[str], folder: Path, seconds: int) -> str:
    """Runs a script with ``folder`` as its working directory.

    Args:
        path: The script; it finds what lies beside it.
        arguments: Its command line.
        folder: Also where what it prints goes, in files that are deleted.
        seconds: Of processor time that it may take: other work on the machine does not count;
            each process that it starts may take as much.

    Returns:
        What it printed on standard output.

    Raises:
        AssertionError: If it fails or takes too long (it ended with -9 then), with all that it
            printed.
    """
    return run_at_once(path, [arguments], folder, seconds)[0]


def run_at_once(
    path: Path, lines: Sequence[Sequence[str]], folder: Path, seconds: int
) -> list[str]:
    """Runs a script several times at once, each with a command line of its own; see above."""
    started = []
    try:
        for number, arguments in enumerate(lines):
            outputs = [folder / f".stdout{number}", folder / f".stderr{number}"]
            given = path, list(arguments), folder, outputs, seconds
            process = _context().Process(target=_run, args=given)
            process.start()
            started.append((process, outputs))
        for process, _ in started:
            process.join()  # what hangs is for pytest's own limit
    finally:
        for process, _ in started:
            process.kill()
            process.join()
    printed = [
        [output.read_text() if output.exists() else "" for output in outputs]
        for _, outputs in started
    ]
    for _, outputs in started:
        for output in outputs:
            output.unlink(missing_ok=True)
    for (process, _), texts in zip(started, printed, strict=True):
        assert process.exitcode == 0, f"ended with {process.exitcode}\n" + "".join(texts)
    return [texts[0] for texts in printed]


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    os.environ[_SERVER] = "1"
    try:
        from multiprocessing.forkserver import ensure_running

        ensure_running()
    finally:
        del os.environ[_SERVER]
    return context


def _run(path: Path, arguments: list[str], folder: Path, outputs: list[Path], seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    os.environ.pop(_SERVER, None)
    os.environ["PYTHONPATH"] = str(path.parents[1])
    os.chdir(folder)
    for number, output in enumerate(outputs, 1):
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    code = 0
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
