"""Estimates whether a forward is host-bound or link-bound, before anything is measured.

A use of a block that is copied costs the host about the same time for any size. If the model's own
code leaves the host no time for many uses, few large blocks are better. If copies take longer,
small blocks are better, as blocks in use or being copied take HBM in which others could stay.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from tiermem.core.block import Tier
from tiermem.core.pace import FASTEST_UP, GUESSED_RATES
from tiermem.nn.groups.partition import CONTAINERS
from tiermem.nn.tensors.shells import Shell
from tiermem.runtime.metrics.pass_timer import LINK_UP

_FASTEST = FASTEST_UP
"""Assumed for a link from DRAM if there is no machine profile, so that the time of copies is not
overestimated."""
_COPY = 64 << 20  # bytes of a copy, whose speed is looked up
SHARES = (16, 12, 10, 8)
"""Coarser blocks take at most one of these parts of HBM; the finer ones are tried first."""
_HOSTS = (1.0, 2.0)
"""Relative times of a fast and a slow host: machines of one kind differ by this much, and shared
ones change by it from minute to minute."""
_OPERATION = 8e-6
"""Seconds of the host for a call or an operator in a forward's code: 3 to 14 us, 8 in the mean, for
23 architectures of transformers in HBM at one token on H100 machines."""
_AROUND = 12
"""Operations that a use of a parameter costs that wraps others (torchao, eight bits)."""
_USE = 130e-6
"""Seconds of the host for a use of a block with its copy, including the slowdown of other code by
cache misses: 110 to 250 us on H100 and H200 machines, 130 on fast hosts."""
_SLOTS = 2  # one in use and one being fetched
_FAR_LARGER = 2  # this many largest blocks stay if they are far larger: an embedding and a head
_MOST_WRAPPERS = 16  # nested decorators of a function


def rate_up(known: Callable[[str, int], float | None] | None = None, *, files: bool) -> float:
    """Returns the bytes per second at which weights are expected to be copied to HBM.

    Args:
        known: Returns the known speed of a link for copies of a size, or None.
        files: Whether weights have files as their home.
    """
    link = LINK_UP[Tier.NVME if files else Tier.DRAM]
    found = None if known is None else known(link, _COPY)
    return found or (GUESSED_RATES[link] if files else _FASTEST)


@dataclass(frozen=True)
class Streamed:
    """The blocks that may stream in a forward of a model.

    Attributes:
        sizes: Bytes of the blocks whose home is not HBM.
        room: Bytes of HBM beside those whose home it is.
    """

    sizes: Sequence[int]
    room: int

    def seconds(self, host: float, rate: float) -> tuple[float, float]:
        """Returns the seconds of the host and of the link.

        Args:
            host: Seconds of the host for the model's own code.
            rate: Bytes per second of the link.
        """
        total = sum(self.sizes)
        beside = sorted(self.sizes)[:-_FAR_LARGER]
        slots = _SLOTS * max(beside, default=0)
        moved = min(total, total - self.room + slots) if total > self.room else 0
        copies = len(self.sizes) * moved / total if total else 0.0
        return host + _USE * copies, moved / rate

    def on_hosts(self, host: float, rate: float) -> tuple[float, bool]:
        """Returns the sum of the seconds of a pass on a fast and on a slow host.

        Args:
            host: Seconds of a fast host for the model's own code.
            rate: Bytes per second of the link.

        Returns:
            The sum, and whether the pass is link-bound on both.
        """
        host, link = self.seconds(host, rate)
        return sum(max(slower * host, link) for slower in _HOSTS), _HOSTS[-1] * host <= link


def host_seconds(model: nn.Module) -> float:
    """Returns about how long a forward's own code takes the host, with each module called once.

    It counts the calls and operators in the source of the modules' forwards, and of the functions
    and methods of the same file that they name. Parameters that wrap others are counted extra.
    """
    known: dict[type[nn.Module], int] = {}
    total = 0
    for module in model.modules():
        kind = type(module)
        if not isinstance(module, CONTAINERS):
            if kind not in known:
                known[kind] = _operations(kind.forward, kind, set())
            total += known[kind]
    shells = sum(Shell.of(param) is not None for param in model.parameters())
    return (total + shells * _AROUND) * _OPERATION


def _operations(called: Any, kind: type[nn.Module], seen: set[CodeType]) -> int:
    """Returns the calls and operators in a function of a module's class, each function once."""
    function = _plain(called)
    if function is None:
        return 1
    code = function.__code__
    if code in seen:
        return 0
    seen.add(code)
    names = (step.opname for step in dis.get_instructions(code))
    total = sum(name.startswith(("CALL", "BINARY")) for name in names)
    for name in code.co_names:
        found = _plain(inspect.getattr_static(kind, name, function.__globals__.get(name)))
        if found is not None and found.__globals__ is function.__globals__:
            total += _operations(found, kind, seen)
    return total


def _plain(found: Any) -> FunctionType | None:
    """Returns the Python function of a function or method; None for any other object.

    No attributes of other objects are read, as an object may invent them.
    """
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    for _ in range(_MOST_WRAPPERS):
        if isinstance(found, FunctionType):
            found = found.__dict__.get("__wrapped__", found)
    return found if isinstance(found, FunctionType) else None
