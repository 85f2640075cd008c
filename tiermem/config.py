"""Frozen settings, and the parsing of what users write."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

from tiermem.core.block import Role
from tiermem.errors import ConfigError, TierError

Home = Literal["hbm", "dram", "nvme", "auto"]

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_MOST = 2**80
_DIGITS = len(str(_MOST))
_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%\s*")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*")


def parse_size(value: int | str, name: str = "size", *, besides: str = "") -> int:
    """Reads a size as users write it.

    Args:
        value: Bytes as an int, or text such as ``"7GiB"``, ``"7 GB"``, ``"512MiB"``.
        name: The setting's name, for the message.
        besides: What else the setting may be, for the message.

    Returns:
        The size in bytes.

    Raises:
        ConfigError: If it is negative, not a number, or has an unknown unit.
    """
    if not isinstance(value, str):
        try:
            number = None if isinstance(value, bool) else operator.index(value)  # also of numpy
        except TypeError:
            number = None
        if number is None:
            raise ConfigError(
                f"{name} must be a whole number of bytes (an int) or text such as '7GiB', "
                f"not {value!r}"
            )
        if number > _MOST:
            raise _too_large(name, f"a number of {number.bit_length()} bits")
        if number < 0:
            raise ConfigError(f"{name} must not be negative: {max(number, -_MOST)}")
        return number
    match = _SIZE.fullmatch(value)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(
            f"{name} is not a size: {_short(value)!r}; write bytes or a number with one of "
            f"KB, MB, GB, TB, KiB, MiB, GiB, TiB{besides}"
        )
    digits = match.group(1)
    if len(digits.partition(".")[0].lstrip("0")) > _DIGITS:
        raise _too_large(name, _short(value))  # Python reads no number of thousands of digits
    size = int(float(digits) * unit) if "." in digits else int(digits.lstrip("0") or "0") * unit
    if size > _MOST:
        raise _too_large(name, _short(value))
    return size


def parse_path(path: object, name: str, error: type[TierError] = ConfigError) -> str:
    """Reads the path of a file or folder, which need not exist.

    Args:
        path: Text, or an object that ``os.fspath`` converts to text.
        name: The setting's name, for the message.
        error: The class of the error.

    Raises:
        TierError: Of the class ``error``, if no file can have that path.
    """
    try:
        text = os.fspath(path)  # type: ignore[call-overload]  # what is no path is refused here
    except TypeError as wrong:
        raise error(f"{name} must be a path, not {path!r}") from wrong
    if not isinstance(text, str):
        raise error(f"{name}={text!r} must be text; use os.fsdecode")
    try:
        os.fsencode(text)
    except UnicodeEncodeError as wrong:
        raise error(
            f"{name}={text!r} cannot be the path of a file: the system has no name for "
            f"{text[wrong.start : wrong.end]!r}; name another"
        ) from wrong
    if "\0" in text:
        raise error(
            f"{name}={text!r} cannot be the path of a file: it has a null byte; name another"
        )
    return text


def parse_budget(value: int | str | None, name: str, total: Callable[[], int]) -> int | None:
    """Reads a budget: a size, a share of the memory, or "auto".

    Args:
        value: As for :func:`parse_size`, or a share such as ``"80%"``, or ``"auto"``, or None.
        name: The setting's name, for the message.
        total: Returns the bytes that are 100%.

    Returns:
        The budget in bytes; None for ``"auto"`` and None.

    Raises:
        ConfigError: If it is none of these.
    """
    if value is None or value == "auto":
        return None
    share = _SHARE.fullmatch(value) if isinstance(value, str) else None
    if share is None:
        return parse_size(value, name, besides=", a share such as '80%', or 'auto'")
    percent = float(share.group(1)[:_DIGITS])
    if not 0 < percent <= 100:
        raise ConfigError(f"{name}={_short(str(value))!r}: a share is above 0% and at most 100%")
    return int(total() * percent / 100)


def _short(text: str) -> str:
    """Returns a text, shortened for a message."""
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"


def _too_large(name: str, value: str) -> ConfigError:
    return ConfigError(f"{name} is more than any machine has: {value}; at most {_MOST} bytes")


def format_size(nbytes: int | float) -> str:
    """Returns ``nbytes`` as text for people, in binary units."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{int(size)} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def budget_size(nbytes: int) -> str:
    """Returns a budget as text for people; it is in whole pages, so 0 is less than a page."""
    return format_size(nbytes) if nbytes else f"less than a page ({format_size(4096)})"


def exact_size(nbytes: int) -> str:
    """Returns ``nbytes`` as text, rounded for people and to the byte for programs."""
    return f"{format_size(nbytes)} ({nbytes} bytes)"


@dataclass(frozen=True, init=False)
class Policy:
    """The home tier of each role.

    ``"auto"`` uses DRAM first, and NVMe once DRAM is full. For activations it means HBM,
    since their copies would take time on the links that weights and state need.

    Attributes:
        params: Weights (and large buffers).
        grads: Gradients.
        master: Master weights of mixed-precision training.
        optimizer: Optimizer state.
        activations: Tensors saved for backward.
    """

    params: Home = "auto"
    grads: Home = "auto"
    master: Home = "auto"
    optimizer: Home = "auto"
    activations: Home = "auto"

    def __init__(
        self,
        params: Home = "auto",
        grads: Home = "auto",
        master: Home = "auto",
        optimizer: Home = "auto",
        activations: Home = "auto",
        **unknown: object,
    ) -> None:
        """Checks and keeps the homes.

        Raises:
            ConfigError: If a role or a tier is unknown.
        """
        if unknown:
            names = [field.name for field in fields(self)]
            raise ConfigError(f"policy names unknown roles {sorted(unknown)}; roles are {names}")
        homes = {
            "params": params,
            "grads": grads,
            "master": master,
            "optimizer": optimizer,
            "activations": activations,
        }
        for name, home in homes.items():
            if home not in ("hbm", "dram", "nvme", "auto"):
                raise ConfigError(
                    f"Policy({name}={home!r}): a home is one of 'hbm', 'dram', 'nvme', 'auto'"
                )
            object.__setattr__(self, name, home)

    @classmethod
    def of(cls, value: Policy | dict[str, Home] | str | None) -> Policy:
        """Returns a policy from one, a mapping of roles, one tier for every role, or None.

        Raises:
            ConfigError: If a role or a tier is unknown.
        """
        if value is None:
            return cls()
        if isinstance(value, Policy):
            return value
        names = [field.name for field in fields(cls)]
        if isinstance(value, str):
            return cls(**dict.fromkeys(names, value))  # type: ignore[arg-type]
        if not isinstance(value, dict):
            raise ConfigError(
                f"policy must be a tiermem.Policy or a mapping of roles, not {value!r}"
            )
        return cls(**{str(role): home for role, home in value.items()})

    def home(self, role: Role) -> Home:
        """Returns the home that the policy gives a role; buffers have the home of the weights."""
        return {
            Role.PARAM: self.params,
            Role.BUFFER: self.params,
            Role.QUANT: self.params,
            Role.GRAD: self.grads,
            Role.MASTER: self.master,
            Role.OPTIMIZER: self.optimizer,
            Role.ACTIVATION: self.activations,
        }[role]


@dataclass(frozen=True, slots=True)
class Settings:
    """A manager's settings, checked, with sizes in bytes.

    Attributes:
        device: ``"cpu"`` or a CUDA device.
        hbm: Budget in bytes; with ``hbm_auto``, the most that it may become.
        dram: Budget in bytes.
        nvme: Folders; empty if there is no NVMe tier.
        nvme_bytes: Most bytes on disk, or None.
        policy: Home tier of each role.
        prefetch_depth: How many blocks ahead of the compute fetches may begin, or ``"auto"``.
        activation_min: Size from which saved tensors leave HBM, in bytes.
        activation_layers: How many layers' saved tensors leave HBM, from the first; None for all.
        activation_ahead: Bytes of saved tensors that may be prefetched; None for two blocks' worth.
        hbm_auto: Whether the budget of HBM follows from what the program leaves free.
    """

    device: str
    hbm: int
    dram: int
    nvme: tuple[str, ...]
    nvme_bytes: int | None
    policy: Policy
    prefetch_depth: int | Literal["auto"]
    activation_min: int = 1 << 20
    activation_layers: int | None = None
    activation_ahead: int | None = None
    hbm_auto: bool = False
