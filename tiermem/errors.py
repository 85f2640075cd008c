"""Every exception that tiermem raises on purpose.

All of them derive from :class:`TierError`, so ``except tiermem.TierError``
catches every error of the library. Each also derives from the built-in
exception that fits best, for code that knows nothing of tiermem.
"""

from __future__ import annotations

import os


class TierError(Exception):
    """Base of every error of this library."""


class ConfigError(TierError, ValueError):
    """A setting that cannot be used: a bad size, role, tier, path or option."""


class CapacityError(TierError, MemoryError):
    """A budget that is too small.

    The message names the block, its size, the tier and the smallest budget
    that would be enough.

    Attributes:
        what: What does not fit.
        hint: What else may be done, to be added to the budgets that would be enough.
    """

    def __init__(self, what: str, advice: str = "", hint: str = "") -> None:
        """Composes the message: what does not fit, and what to do.

        Args:
            what: What does not fit.
            advice: The smallest budget that would be enough, if it is known.
            hint: What else may be done; begins with a comma, or is empty.
        """
        super().__init__(f"{what}; {advice}{hint}" if advice else what)
        self.what = what
        self.hint = hint


class WrapError(TierError, TypeError):
    """A module that cannot be wrapped (or is wrapped already), and why."""


class ParameterError(TierError, RuntimeError):
    """A managed parameter was replaced, moved or written in a way that tiermem cannot follow."""


class CheckpointError(TierError, ValueError, RuntimeError):
    """A checkpoint or state dict that is not valid, or does not fit the model.

    Also a ``RuntimeError``, which torch raises for a state dict that does not fit.
    """


class StepError(TierError, RuntimeError):
    """An optimizer step that cannot be begun, or one that was interrupted."""


class ClosedError(TierError, RuntimeError):
    """The manager was closed, or belongs to another process."""


class InvariantError(TierError, RuntimeError):
    """A rule of the library was broken from inside: a defect of tiermem, please report it."""


class StorageError(TierError, OSError):
    """File I/O that failed.

    Attributes:
        block: Name of the block that was moving, or ``""``.
        tier: Name of the tier, ``"nvme"``; ``""`` if the file does not belong to a tier.
        kind: What the file is in that case: ``"checkpoint"`` or ``"adapters"``; else ``""``.
        path: Folder of the file (swap files have no name).
        offset: Byte offset in that file, or -1.
        nbytes: Requested bytes.
        errno: The system's error number, or ``None``.
    """

    def __init__(
        self,
        what: str,
        *,
        block: str = "",
        tier: str = "nvme",
        kind: str = "",
        path: str = "",
        offset: int = -1,
        nbytes: int = 0,
        errno: int | None = None,
    ) -> None:
        detail = f" (errno {errno}: {os.strerror(errno)})" if errno else ""
        where = [kind or f"tier {tier}"]
        if block:
            where.insert(0, f"block {block!r}")
        if path:
            where.append(f"path {path}")
        if offset >= 0:
            where.append(f"offset {offset}")
        if nbytes:
            where.append(f"{nbytes} bytes")
        message = f"{what}{detail}: {', '.join(where)}"
        super().__init__(errno, message)
        self.message = message
        self.block = block
        self.tier = "" if kind else tier
        self.kind = kind
        self.path = path
        self.offset = offset
        self.nbytes = nbytes
        self.errno = errno

    def __str__(self) -> str:
        return self.message


class IntegrityError(StorageError):
    """Bytes read back are not the bytes written (their checksum differs)."""


REFUSALS = (
    CapacityError,
    CheckpointError,
    ClosedError,
    ConfigError,
    ParameterError,
    StepError,
    StorageError,
    WrapError,
)
"""Errors that are raised on purpose; whatever raises one leaves nothing half done."""
