"""C files of the package, compiled on the machine that they run on when they are first needed.

The compiled files are kept in the user's cache folder. Nothing needs them: where there is no
compiler, :class:`NotCompiled` says so, and the same is done in Python or on the device.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_SECONDS = 120.0


class NotCompiled(Exception):
    """A C file cannot be compiled on this machine; the message says why."""


def compiled(source: Path, flags: Sequence[str], libraries: Sequence[str] = ()) -> Path:
    """Returns a shared library made of a C file; compiles it if there is none yet, for seconds.

    Args:
        source: The file.
        flags: Options of the compiler, beside those that make a shared library.
        libraries: What it is linked with, as options.

    Raises:
        NotCompiled: If there is no compiler, or it fails.
        OSError: If no folder can be written.
    """
    compiler = os.environ.get("CC") or "cc"
    command = shutil.which(compiler.split()[0])
    target = _target(source, f"{platform.machine()} {compiler} {tuple(flags)}")
    if target.exists():
        return target
    if command is None:
        raise NotCompiled(
            f"{source.name} is compiled when first needed, and there is no C compiler "
            f"({compiler!r})"
        )
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, made = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    options = [*compiler.split()[1:], *flags, "-shared", "-fPIC", "-fvisibility=hidden"]
    try:
        done = subprocess.run(
            [command, *options, "-o", made, str(source), *libraries],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        if done.returncode:
            raise NotCompiled(f"{compiler!r} fails: {done.stderr.strip()[-400:]}")
        os.replace(made, target)  # at once: another process may be at it too
    except subprocess.TimeoutExpired as error:
        raise NotCompiled(f"{compiler!r} took more than {_SECONDS:.0f} s") from error
    finally:
        Path(made).unlink(missing_ok=True)
    return target


def cache_folder() -> Path:
    """Returns where compiled files are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tiermem"


def _target(source: Path, kind: str) -> Path:
    """Returns where a C file's library is kept, by its text and how it is compiled."""
    made_of = hashlib.sha256(source.read_bytes() + kind.encode()).hexdigest()[:24]
    return cache_folder() / f"{source.stem}-{made_of}.so"
