"""Compiles the loop for steps on the host in a separate process, before it is needed.

The file is kept in the user's cache folder, so this is done once per machine. It takes seconds:
:func:`prepare` begins it when a model is wrapped that is likely to be trained, :func:`built` waits.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import threading
from pathlib import Path

from tiermem.runtime.metrics.machine_profile import cache_folder

_SOURCE = Path(__file__).with_name("exact.c")
_FLAGS = (
    "-O3",
    "-ffp-contract=off",  # fused operations are written as fma
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
)
_SECONDS = 120.0


class NoLoop(Exception):
    """The loop is not available on this machine; the message says why."""


class _Compiling:
    """A running compiler process.

    Attributes:
        pid: Id of the process that started it.
    """

    def __init__(self, command: list[str], made: Path, target: Path) -> None:
        """Starts the compiler.

        Args:
            command: The compiler with its options.
            made: The file that it writes, in a separate folder, where its other files go as well.
            target: Where that file is moved in the end.
        """
        self.pid = os.getpid()
        self._name, self._made, self._target = " ".join(command[:1]), made, target
        # in a separate session, so that Ctrl-C does not reach it
        self._process = subprocess.Popen(
            [*command, "-o", str(made), str(_SOURCE), "-lpthread", "-lm"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(made.parent)},
        )

    def end(self) -> Path:
        """Waits for it; returns the file. If interrupted, it may be called again.

        Raises:
            NoLoop: If it fails.
            OSError: If the file cannot be put in its place.
        """
        try:
            _, said = self._process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired as error:
            self.discard()
            raise NoLoop(f"{self._name!r} took more than {_SECONDS:.0f} s") from error
        try:
            if self._process.returncode:
                raise NoLoop(f"{self._name!r} fails: {said.strip()[-400:]}")
            os.replace(self._made, self._target)  # at once: another process may be at it too
        finally:
            self._clear()
        return self._target

    def discard(self) -> None:
        """Kills it and removes its files."""
        if self._process.poll() is None:  # otherwise the id may belong to another process
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # and its child processes
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        self._clear()

    def _clear(self) -> None:
        shutil.rmtree(self._made.parent, ignore_errors=True)


_lock = threading.RLock()
_under_way: _Compiling | None = None


def prepare() -> None:
    """Begins to compile if necessary; returns immediately and raises nothing."""
    global _under_way
    with _lock:
        if _of_this_process(_under_way) is None:
            try:
                _under_way = _begin()
            except (NoLoop, OSError):
                pass  # code that asks for the loop gets the error


def built() -> Path:
    """Returns the compiled file; compiles it if necessary.

    Raises:
        NoLoop: If there is no compiler, or it fails.
        OSError: If no folder can be written.
    """
    global _under_way
    with _lock:
        compiling = _of_this_process(_under_way)
        if compiling is None or _target().exists():
            compiling = _begin()
        if compiling is None:
            return _target()
        _under_way = compiling
        try:
            made = compiling.end()
        except (NoLoop, OSError):
            _under_way = None
            raise
        _under_way = None  # another folder or compiler may be requested next
        return made


def _compiler() -> list[str]:
    return (os.environ.get("CC") or "cc").split()


def _target() -> Path:
    kind = f"{platform.machine()} {' '.join(_compiler())} {_FLAGS}".encode()
    name = f"exact-{hashlib.sha256(_SOURCE.read_bytes() + kind).hexdigest()[:24]}.so"
    return cache_folder() / name


def _begin() -> _Compiling | None:
    """Begins to compile; returns None if the file exists."""
    target, (name, *options) = _target(), _compiler()
    if target.exists():
        return None
    command = shutil.which(name)
    if command is None:
        raise NoLoop(f"it is compiled when first needed, and there is no C compiler ({name!r})")
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        return _Compiling([command, *options, *_FLAGS], folder / target.name, target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _of_this_process(compiling: _Compiling | None) -> _Compiling | None:
    """Returns the compilation if this process began it; a forked child cannot wait for it."""
    return compiling if compiling is not None and compiling.pid == os.getpid() else None


def _forget_lock() -> None:
    """Creates a new lock in a forked child, where the thread that holds it does not run."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forget_lock)


@atexit.register
def _leave_nothing() -> None:
    compiling = _of_this_process(_under_way)
    if compiling is not None:
        compiling.discard()
