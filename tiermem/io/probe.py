"""Which I/O engine this machine can run, found by trying."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

from tiermem.errors import ConfigError
from tiermem.io.engine import IoEngine, IoOp, IoRequest
from tiermem.io.fallback import FallbackEngine
from tiermem.io.threads import ThreadEngine
from tiermem.io.uring import UringEngine

VARIABLE = "TIERMEM_IO_ENGINE"
"""Environment variable that names the engine to use; it overrides any setting."""

_NAMES = ("uring", "threads")
_PROBE_NBYTES = 4096
_PROBE_SECONDS = 5.0


def choose_engine(preferred: str | None = None) -> tuple[Callable[[], IoEngine], str, str]:
    """Chooses the engine: io_uring if a real operation works, otherwise threads.

    Args:
        preferred: ``"uring"``, ``"threads"`` or ``None``; the environment variable
            ``TIERMEM_IO_ENGINE`` overrides it.

    Returns:
        A function that creates an engine, its name, and one sentence on why it was chosen.

    Raises:
        ConfigError: If there is no engine of that name.
    """
    from_environment = os.environ.get(VARIABLE) or None
    asked = from_environment or preferred
    source = f"{VARIABLE} says so" if from_environment else "the settings say so"
    if asked is not None and asked not in _NAMES:
        raise ConfigError(f"{asked!r} is no I/O engine ({source}): write 'uring' or 'threads'")
    if asked == "threads":
        return ThreadEngine, "threads", f"threads do the file I/O because {source}"
    refusal = probe_uring()
    if refusal is None:
        return FallbackEngine, "uring", "io_uring works here"
    return ThreadEngine, "threads", f"threads do the file I/O because {refusal}"


def probe_uring() -> str | None:
    """Tries a write and a read through io_uring on a file in memory.

    Returns:
        ``None`` if both worked, otherwise the reason.
    """
    if sys.platform != "linux":
        return "io_uring is a part of Linux"
    engine = UringEngine(depth=2)
    try:
        file = os.memfd_create("tiermem-probe", os.MFD_CLOEXEC)
    except OSError as error:
        return f"the probe of io_uring could not make its file: {error}"
    try:
        engine.open([file], [])
        return _round_trip(engine)
    except ImportError as error:
        return f"the package liburing cannot be used ({error})"
    except OSError as error:
        return explain(error.errno or 0)
    finally:
        engine.close()
        os.close(file)


def _round_trip(engine: IoEngine) -> str | None:
    written = ctypes.create_string_buffer(b"tiermem" * 500, _PROBE_NBYTES)
    read = ctypes.create_string_buffer(_PROBE_NBYTES)
    for op, memory in ((IoOp.WRITE, written), (IoOp.READ, read)):
        engine.submit([IoRequest(op, 0, 0, ctypes.addressof(memory), _PROBE_NBYTES, 1)])
        completions = engine.wait(_PROBE_SECONDS)
        if not completions:
            return f"a {op.value} through io_uring did not end within {_PROBE_SECONDS:g} s"
        if completions[0].errno:
            return explain(completions[0].errno)
    if read.raw != written.raw:
        return "io_uring read back other bytes than were written"
    return None


def explain(code: int) -> str:
    """Returns why the kernel refuses io_uring with this error number (part of a sentence)."""
    name = errno.errorcode.get(code, str(code))
    disabled = _read_setting()
    if code in (errno.EPERM, errno.EACCES):
        if disabled in ("1", "2"):
            return f"kernel.io_uring_disabled is {disabled} ({name}); an administrator can set 0"
        return f"io_uring is refused ({name}), as seccomp profiles of containers do"
    if code == errno.ENOSYS:
        return f"the kernel has no io_uring, or a seccomp profile hides it ({name})"
    if code == errno.ENOMEM:
        return f"io_uring finds no memory for its ring ({name}): raise RLIMIT_MEMLOCK (ulimit -l)"
    return f"io_uring does not work here ({name}: {os.strerror(code)})"


def _read_setting() -> str:
    try:
        return Path("/proc/sys/kernel/io_uring_disabled").read_text().strip()
    except OSError:
        return ""
