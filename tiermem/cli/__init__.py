"""The ``tiermem`` command: train, generate, bench, plan, doctor."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

COMMANDS = ("train", "generate", "bench", "plan", "doctor")
INTERRUPTED = 130

_AGAIN = 0.01
"""Seconds after which Ctrl-C comes again that Python has dropped."""


def command() -> int:
    """Runs the command line as all that a process does.

    Ctrl-C again, once it ends, neither breaks off what is closed then nor changes the status.

    Returns:
        The exit status, as of :func:`main`.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed (`>&-`): the next file that is opened would be in its place
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):  # paths and texts may have what it cannot encode
            stream.reconfigure(errors="backslashreplace")
    sys.unraisablehook = _dropped
    try:
        status = _flushed(main())
    except KeyboardInterrupt:  # again, while the first was reported
        status = INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The arguments; those of the process by default.

    Returns:
        The exit status: 0, 1 if what was checked does not hold, 2 for bad
        options or a machine that cannot do what was asked, 130 after Ctrl-C.
    """
    try:
        return _main(argv)
    except KeyboardInterrupt:  # as torch is imported, too
        print("\ntiermem: interrupted", file=sys.stderr)
        return INTERRUPTED


def _dropped(dropped: sys.UnraisableHookArgs) -> None:
    """Tells of an exception that Python drops, but has Ctrl-C come again.

    It came while an object was deleted, or in a callback of a weak reference: nothing that is
    raised there, or in this function, gets any further. So it has to come a little later.
    """
    if not issubclass(dropped.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(dropped)
        return
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, _AGAIN)


def _flushed(status: int) -> int:
    """Writes what is left of the output; returns the status, another one if that fails."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        return _failed_output(error, "tiermem")
    return status


def _failed_output(error: OSError, command: str) -> int:
    """Tells why output could not be written, and sees that nothing is tried again at exit.

    Returns:
        The exit status.
    """
    sys.stdout = None
    if isinstance(error, BrokenPipeError):  # the reader went away (`| head`)
        return 1
    print(f"{command}: error: {error.strerror}", file=sys.stderr)
    return 2


def _main(argv: Sequence[str] | None) -> int:
    """Runs the command line; Ctrl-C before a command runs is raised."""
    from tiermem import TierError, __version__
    from tiermem.cli.options import Parser, with_options

    parser = Parser(
        prog="tiermem",
        description="Train and run torch models larger than their GPU, bit for bit.",
    )
    parser.add_argument("--version", action="version", version=f"tiermem {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules: dict[str, ModuleType] = {}
    for name in COMMANDS:
        # A module per command, so that each stays small; they import torch only when run.
        modules[name] = import_module(f"tiermem.cli.{name}")
        text = (modules[name].__doc__ or "").strip()
        subparser = subparsers.add_parser(name, help=text.splitlines()[0], description=text)
        modules[name].add_arguments(subparser)

    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:  # --help, --version, or a usage error already printed
        return stop.code if isinstance(stop.code, int) else 2
    try:
        return int(modules[arguments.command].run(arguments))
    except TierError as error:
        text = with_options(str(error))
        print(f"tiermem {arguments.command}: error: {text}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        first = str(error).partition("\n")[0]
        print(
            f"tiermem {arguments.command}: error: out of memory: {first}; give smaller sizes, or "
            "free memory",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print(f"\ntiermem {arguments.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        return _failed_output(error, f"tiermem {arguments.command}")


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether memory is what an error is about; torch has no class of its own for the host's."""
    import torch

    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)
