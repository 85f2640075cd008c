"""Reading what users write on the command line."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, cast

from tiermem.config import Home, Policy, parse_size
from tiermem.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Prints the message and stops with status 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


MOST = 1 << 40
"""The largest number of layers, tokens, steps and their like that an option takes."""

_LEAST, _LARGEST = 1e-6, 1e18
"""Of what is counted or measured: models, speeds."""

_THREADS_A_CORE = 8
"""Threads that may be asked for, by core: OpenMP dies of some ten thousand."""

_SETTING = re.compile(r"\b(hbm|dram|nvme|nvme_bytes|policy|prefetch_depth)= ?")
_MANAGER = re.compile(r"\bTierManager\(([^()]*)\)")

_NAMES = "load it in Python, with names= of tiermem.load_checkpoint: the command has no such option"


def with_options(message: str) -> str:
    """Returns an error's message with the command line's options for the library's settings."""
    message = _MANAGER.sub(r"\1", message).replace("give names=", _NAMES)
    return _SETTING.sub(lambda found: f"--{found[1].replace('_', '-')} ", message)


def out_folder(path: str, files: Sequence[str] = ()) -> Path:
    """Returns the folder of ``--out``, made if need be, before anything is worked out for it.

    Args:
        path: What the user wrote.
        files: Names of those that will be written there.

    Raises:
        ConfigError: If it cannot be made, or takes no file.
    """
    out = Path(path)
    with written(out):
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    for file in (out / name for name in files):
        if file.exists():
            with written(file), open(file, "ab"):
                pass
    return out


@contextlib.contextmanager
def written(path: Path) -> Iterator[None]:
    """Tells of ``--out`` where something in it cannot be written, inside ``with``."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror}; name another folder") from error


def parse_path(text: str) -> str:
    """Parses the path of a file or folder; an empty one would be the current folder's.

    Raises:
        ArgumentTypeError: If it is empty, as that of a variable that is not set.
    """
    if not text:
        raise argparse.ArgumentTypeError("it is empty; the current folder is '.'")
    return text


def parse_seed(text: str) -> int:
    """Parses the seed of random numbers, as ``torch.manual_seed`` takes it.

    Raises:
        ArgumentTypeError: If it is no whole number of 64 bits.
    """
    try:
        seed = int(text)
    except ValueError:
        seed = 1 << 64
    if not -(1 << 63) <= seed < 1 << 64:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 64 bits")
    return seed


def check_whole(name: str, value: int, least: int = 1) -> None:
    """Refuses a whole number that no run can have; one of hundreds of digits is no number of C's.

    Args:
        name: The option without dashes at its beginning, for the message.
        value: What the user wrote.
        least: The least that it may be.

    Raises:
        ConfigError: If it is less than ``least``, or too large.
    """
    if value < least:
        raise ConfigError(f"--{name} must be at least {least}, not {value}")
    if value > MOST:
        raise ConfigError(
            f"--{name} must be at most {MOST}, not a number of {value.bit_length()} bits"
        )


def check_rate(value: float) -> None:
    """Refuses a learning rate that no step can be made with.

    Raises:
        ConfigError: If it is one.
    """
    if not 0 <= value <= _LARGEST:
        raise ConfigError(f"--lr must be a number from 0 to {_LARGEST:g}, not {value}")


def check_threads(number: int | None) -> None:
    """Refuses a number of CPU threads that torch cannot have, or OpenMP dies of.

    Raises:
        ConfigError: If it is one.
    """
    if number is None:
        return
    if number < 1:
        raise ConfigError(f"--threads must be at least 1, not {number}")
    cores = os.cpu_count() or 1
    if number > _THREADS_A_CORE * cores:
        raise ConfigError(
            f"--threads {number} is more than this machine has any use for: it has {cores} cores, "
            "and OpenMP fails with a few ten thousand; give "
            f"{_THREADS_A_CORE * cores} at most"
        )


def parse_count(text: str | float, name: str = "count", least: float = _LEAST) -> float:
    """Reads a positive number such as ``7e9``, ``7B``, ``350M`` or ``16k``.

    Args:
        text: What the user wrote.
        name: The option, for the message.
        least: The least that it may be.

    Returns:
        The number.

    Raises:
        ConfigError: If it is not one, or so small or large that what is worked out from it
            would be no number.
    """
    units = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
    body = str(text).strip().lower()
    factor = units.get(body[-1:], 1.0)
    if factor != 1.0:
        body = body[:-1]
    try:
        value = float(body) * factor
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise ConfigError(f"{name} must be a number above zero such as 7e9 or 350M, not {text!r}")
    if not least <= value <= _LARGEST:
        raise ConfigError(f"{name} must be a number from {least:g} to {_LARGEST:g}, not {text!r}")
    return value


def parse_bytes(text: str, name: str) -> int:
    """Reads a size given as an option.

    Raises:
        ConfigError: If it is negative or not a size.
    """
    read: int | str = text
    if text.strip().lstrip("+-").isdecimal():
        with contextlib.suppress(ValueError):  # Python reads no number of thousands of digits
            read = int(text)
    return parse_size(read, name)


def read_budget(text: str | None, name: str) -> int | str | None:
    """Reads a budget as :class:`tiermem.TierManager` takes it: also ``"80%"`` and ``"auto"``.

    Raises:
        ConfigError: If it is neither that nor a size.
    """
    if text is None or text.strip() == "auto" or text.strip().endswith("%"):
        return None if text is None else text.strip()
    return parse_bytes(text, name)


def parse_policy(text: str | None) -> Policy:
    """Reads ``"dram"`` (every role) or ``"params=dram,optimizer=nvme"``.

    Raises:
        ConfigError: If a role or tier is unknown, or a part is not ``role=tier``.
    """
    if text is None:
        return Policy()
    if "=" not in text:
        return Policy.of(text.strip())
    homes: dict[str, Home] = {}
    for part in text.split(","):
        role, equals, home = part.partition("=")
        if not equals:
            raise ConfigError(f"--policy: {part!r} is not role=tier")
        if role.strip() in homes:
            raise ConfigError(f"--policy: {role.strip()} is given twice")
        homes[role.strip()] = cast(Home, home.strip())
    return Policy.of(homes)


def add_activation_arguments(group: argparse._ArgumentGroup) -> None:
    """Adds the options for tensors saved for backward."""
    group.add_argument(
        "--activations",
        choices=("hbm", "dram", "nvme"),
        help="where tensors saved for backward live (default: as --policy says, else hbm)",
    )
    group.add_argument(
        "--activation-min", metavar="SIZE", help="least size of one that leaves (default: 1MiB)"
    )
    group.add_argument(
        "--activation-layers", metavar="N", help="only the first N layers' leave (default: all)"
    )


def policy_of(arguments: argparse.Namespace) -> Policy:
    """Returns the policy of ``--policy``, with the home of ``--activations``.

    Raises:
        ConfigError: If a role or tier is unknown.
    """
    policy = parse_policy(arguments.policy)
    if arguments.activations is None:
        return policy
    homes = {field.name: getattr(policy, field.name) for field in fields(policy)}
    return Policy.of({**homes, "activations": arguments.activations})


def activation_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the manager's options for saved tensors that were given.

    Raises:
        ConfigError: If one cannot be used.
    """
    found: dict[str, Any] = {}
    if arguments.activation_min is not None:
        found["activation_min"] = parse_bytes(arguments.activation_min, "--activation-min")
    if arguments.activation_layers is not None:
        if not _is_whole(arguments.activation_layers):
            raise ConfigError(
                f"--activation-layers must be a number of layers, not "
                f"{arguments.activation_layers!r}"
            )
        found["activation_layers"] = int(arguments.activation_layers)
    return found


def _is_whole(text: str) -> bool:
    """Whether a text is a number of layers or blocks that a run can have."""
    return text.isdecimal() and len(text) <= len(str(MOST))


def parse_depth(text: str) -> int | str:
    """Reads a prefetch depth: ``"auto"`` or a number of blocks.

    Raises:
        ConfigError: If it is neither.
    """
    if text == "auto":
        return "auto"
    if not _is_whole(text):
        raise ConfigError(f"--prefetch-depth must be 'auto' or a number of blocks, not {text!r}")
    return int(text)


def pick_device(text: str) -> str:
    """Returns the torch device asked for, or the best there is for ``"auto"``.

    Raises:
        ConfigError: If there is no such device.
    """
    import torch

    from tiermem.given import device_of

    if text == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if text.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be auto, cpu or cuda, not {text!r}")
    if text.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device; use --device cpu")
    device_of(text)  # refuses one that is not there
    return text
