"""Whether the host or the link binds a forward, before anything is measured.

A use of a block that is copied costs the host about as much whatever the block's size. Where the
model's own code leaves the host no time for many of them, few large blocks are better; where copies
take longer, small ones are, as what is in use and on its way takes HBM that could spare copies.
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
"""Of a link from DRAM of which nothing is known: copies are not thought to take longer than they
do, where no machine profile says it."""
_COPY = 64 << 20  # bytes of a copy whose speed is asked for
SHARES = (16, 12, 10, 8)
"""Parts of HBM that coarser blocks are no larger than, the finer first."""
_HOSTS = (1.0, 2.0)
"""How long a quick and a slow host take: those of one kind of machine differ by that, and change by
it from minute to minute where others use them as well."""
_OPERATION = 8e-6
"""Seconds of the host for a call or an operator in a forward's code: 3 to 14 us, 8 in the mean, for
23 architectures of transformers in HBM at one token on H100 machines."""
_AROUND = 12
"""As many operations does a use of a parameter cost that wraps others (torchao, eight bits)."""
_USE = 130e-6
"""Seconds of the host for a use of a block with its copy, and for what it costs the code around it,
whose caches it empties: 110 to 250 us on H100 and H200 machines, 130 where the host is quick."""
_SLOTS = 2  # one in use and one on its way
_FAR_LARGER = 2  # as many blocks stay rather than set the size of slots: an embedding and a head
_MOST_WRAPPERS = 16  # of a function that is decorated, one in another


def rate_up(known: Callable[[str, int], float | None] | None = None, *, files: bool) -> float:
    """Returns the bytes a second at which weights are expected to come to HBM.

    Args:
        known: Returns what is known of a link for copies of so many bytes, or None.
        files: Whether weights are at home in files.
    """
    link = LINK_UP[Tier.NVME if files else Tier.DRAM]
    found = None if known is None else known(link, _COPY)
    return found or (GUESSED_RATES[link] if files else _FASTEST)


@dataclass(frozen=True)
class Streamed:
    """What moves in a forward of a model that is divided into blocks.

    Attributes:
        sizes: Bytes of the blocks that are not at home in HBM.
        room: Bytes of HBM beside what is.
    """

    sizes: Sequence[int]
    room: int

    def seconds(self, host: float, rate: float) -> tuple[float, float]:
        """Returns the seconds of the host and of the link.

        Args:
            host: Seconds of the host for the model's own code.
            rate: Bytes a second of the link.
        """
        total = sum(self.sizes)
        beside = sorted(self.sizes)[:-_FAR_LARGER]
        slots = _SLOTS * max(beside, default=0)
        moved = min(total, total - self.room + slots) if total > self.room else 0
        copies = len(self.sizes) * moved / total if total else 0.0
        return host + _USE * copies, moved / rate

    def on_hosts(self, host: float, rate: float) -> tuple[float, bool]:
        """Returns the seconds of a pass on a quick and a slow host together.

        Args:
            host: As there, on a quick one.
            rate: As there.

        Returns:
            The sum, and whether the link binds on both.
        """
        host, link = self.seconds(host, rate)
        return sum(max(slower * host, link) for slower in _HOSTS), _HOSTS[-1] * host <= link


def host_seconds(model: nn.Module) -> float:
    """Returns about how long a forward's own code takes the host: each of the modules once.

    Counted are the calls and operators that stand in the code of the modules' forwards, and of the
    functions and methods of the same file which that names. Parameters that wrap others have
    functions of their own.
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
    """Returns the function in Python behind a function or method; None for any other object.

    Other objects are asked for nothing: one that a forward names may make attributes up.
    """
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    for _ in range(_MOST_WRAPPERS):
        if isinstance(found, FunctionType):
            found = found.__dict__.get("__wrapped__", found)
    return found if isinstance(found, FunctionType) else None
