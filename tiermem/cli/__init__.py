"""The ``tiermem`` command: train, generate, bench, plan, doctor."""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

COMMANDS = ("train", "generate", "bench", "plan", "doctor")
INTERRUPTED = 130


def command() -> int:
    """Runs the command line as all that a process does.

    Ctrl-C again, once it ends, neither breaks off what is closed then nor changes the status.

    Returns:
        The exit status, as of :func:`main`.
    """
    try:
        status = main()
    except KeyboardInterrupt:  # again, while the first was reported
        status = INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
    except BrokenPipeError:
        # The reader went away (`| head`): say nothing, also not at interpreter exit.
        sys.stdout = None
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        # where output goes to a full disk, what is left of it must not be written at exit either
        print(f"tiermem {arguments.command}: error: {error.strerror}", file=sys.stderr)
        sys.stdout = None
        return 2


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether memory is what an error is about; torch has no class of its own for the host's."""
    import torch

    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)
