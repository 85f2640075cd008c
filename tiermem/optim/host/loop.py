"""The compiled loop behind steps on the host that have the device's bits (``exact.c``).

It is compiled with the machine's C compiler (:mod:`tiermem.optim.host.build`). It is optional:
if it is not available, :func:`library` says why, and steps are performed elsewhere. The loop has
its own threads, and releases the GIL.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Sequence
from functools import cache

import torch

from tiermem.optim.host.build import NoLoop, built

_INTS = (
    *("method", "bf16", "grad_bf16", "maximize", "decay", "amsgrad", "momentum", "nesterov"),
    *("nan16", "scaled"),
)
NUMBERS = 8


class Row(ctypes.Structure):
    """The step of one tensor, as ``step_t`` in ``exact.c``."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in _INTS),
        ("numbers", ctypes.c_float * NUMBERS),
        ("factor", ctypes.c_float),
        ("unused", ctypes.c_float),
        ("count", ctypes.c_int64),
        ("param", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("largest", ctypes.c_void_p),
        ("cast", ctypes.c_void_p),
        ("param_to", ctypes.c_void_p),
        ("first_to", ctypes.c_void_p),
        ("second_to", ctypes.c_void_p),
        ("largest_to", ctypes.c_void_p),
    )


@cache
def library() -> ctypes.CDLL | str:
    """Returns the loop, or why there is none; compiles it if necessary, which takes seconds."""
    try:
        found = ctypes.CDLL(str(built()))
    except (NoLoop, OSError) as error:
        return f"the loop for steps on the host cannot be had: {error}"
    if not found.tiermem_runs_here():
        return f"this processor ({platform.machine()}) has no vectors with fused multiply-add"
    found.tiermem_open.restype = ctypes.c_void_p
    found.tiermem_open.argtypes = [ctypes.c_int]
    found.tiermem_steps.restype = None
    found.tiermem_steps.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    found.tiermem_close.restype = None
    found.tiermem_close.argtypes = [ctypes.c_void_p]
    found.tiermem_power.restype = ctypes.c_float
    found.tiermem_power.argtypes = [ctypes.c_float, ctypes.c_float, ctypes.c_int]
    return found


class _Teams:
    """Threads of the loop, by their number; created when first used, in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._teams: dict[int, int] = {}
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Drops the teams in a forked child, which has none of the parent's threads."""
        self._lock = threading.Lock()
        self._teams = {}

    def run(self, rows: ctypes.Array[Row], threads: int) -> None:
        """Performs steps; the calling thread works, too."""
        loop = library()
        if isinstance(loop, str):
            raise NoLoop(loop)
        with self._lock:
            team = self._teams.get(threads)
            if team is None:
                team = loop.tiermem_open(threads)
                if not team:
                    raise MemoryError("no memory for the threads of steps on the host")
                self._teams[threads] = team
            loop.tiermem_steps(team, ctypes.addressof(rows), len(rows))


_teams = _Teams()


def make_steps(rows: Sequence[Row]) -> None:
    """Performs the steps of some tensors, with as many threads as torch would use here.

    Args:
        rows: The steps; the memory that they refer to must not move meanwhile. No two
            may have memory in common.

    Raises:
        NoLoop: If the loop is not available; nothing is stepped.
    """
    if rows:
        _teams.run((Row * len(rows))(*rows), torch.get_num_threads())


def power(base: float, exponent: float, off: int) -> float:
    """Returns a power as CUDA's ``powf`` computes it.

    Args:
        base: At least 0 and less than 1, a float32.
        exponent: At least 1, a float32.
        off: By how many units in the last place the device's approximate reciprocal, on which the
            power is based, is off: -1, 0 or 1.
    """
    loop = library()
    if isinstance(loop, str):
        raise NoLoop(loop)
    found: float = loop.tiermem_power(base, exponent, off)
    return found
