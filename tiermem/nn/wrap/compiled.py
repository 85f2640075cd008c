"""Calls and uses of blocks that are compiled (``uses.c``), in place of what they repeat in Python.

In a forward whose kernels are short, most of what tiermem adds is Python's work for each call of a
module and each use of a block. Compiled it takes about half as long. Nothing needs it: without a
compiler and Python's headers everything is done in Python, from call to call. It is for CUDA; the
environment variable ``TIERMEM_COMPILED`` turns it off (0), or on for ``device="cpu"`` too (1).
"""

from __future__ import annotations

import os
import sysconfig
import threading
import weakref
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import is_grad_enabled, is_inference_mode_enabled

from tiermem.core.block import Block, Extent, Tier
from tiermem.core.record import Record, State
from tiermem.errors import REFUSALS
from tiermem.nn.groups.group import Group
from tiermem.nn.groups.pointing import Plain, Pointing
from tiermem.nn.groups.writes import Writes
from tiermem.nn.wrap.scope import CallInterceptor, Inside
from tiermem.runtime.base.machinecode import NotCompiled, compiled
from tiermem.runtime.lookahead.replay import Run, Swapped
from tiermem.runtime.lookahead.swaps import Step, Swap
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.memory.slots import Slot, use_count
from tiermem.runtime.transfers.departures import Departures
from tiermem.transfer.driver import Event
from tiermem.transfer.streams import StreamCopyEngine

_NAME = "_tiermem_uses"
_SOURCE = Path(__file__).with_name("uses.c")
_BOUND = {
    "ABSENT": State.ABSENT,
    "Block": Block,
    "DIRTY": State.DIRTY,
    "DRAM": Tier.DRAM,
    "Departures": Departures,
    "Event": Event,
    "Extent": Extent,
    "FILLING": State.FILLING,
    "Inside": Inside,
    "Plain": Plain,
    "Pointing": Pointing,
    "REFUSALS": REFUSALS,
    "Record": Record,
    "Run": Run,
    "Slot": Slot,
    "Step": Step,
    "Swap": Swap,
    "Swapped": Swapped,
    "VALID": State.VALID,
    "Writes": Writes,
    "inference_mode": is_inference_mode_enabled,
    "is_grad_enabled": is_grad_enabled,
    "use_count": use_count,
}
_OF_A_COPY = (
    *("calls", "compute", "current_device", "driver", "falling", "landed", "local", "marks"),
    "rising",
)
_lock = threading.Lock()
_loaded: list[ModuleType | str] = []
_shared: weakref.WeakKeyDictionary[BlockManager, Any] = weakref.WeakKeyDictionary()


def _forget() -> None:
    """Makes the lock anew in a forked child, where another thread may have had it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)


def is_wanted(device: torch.device) -> bool:
    """Whether calls of models on a device are to be compiled ones."""
    return os.environ.get("TIERMEM_COMPILED", "1" if device.type == "cuda" else "0") == "1"


def prepare(device: torch.device) -> None:
    """Begins to compile what a device needs, in a thread of its own; it takes two seconds once."""
    if is_wanted(device) and not _loaded:
        threading.Thread(target=library, name="tiermem-compiles", daemon=True).start()


def library() -> ModuleType | str:
    """Returns the compiled module, or why it cannot be had."""
    with _lock:
        if not _loaded:
            _loaded.append(_load())
        return _loaded[0]


def _load() -> ModuleType | str:
    """Compiles the module, if that has not been done yet, and loads it."""
    include = sysconfig.get_path("include")
    try:
        path = compiled(
            _SOURCE, ("-O2", f"-I{include}", f"-DABI={sysconfig.get_config_var('SOABI')}")
        )
        spec = spec_from_loader(_NAME, ExtensionFileLoader(_NAME, str(path)))
        if spec is None or spec.loader is None:
            return "compiled uses cannot be loaded"
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        module.bind(_BOUND)
    except (NotCompiled, OSError, ImportError, TypeError) as error:
        return f"uses are made in Python: {error}"
    return module


class Compiled:
    """Makes the calls and uses of one manager's models compiled ones."""

    def __init__(self, module: ModuleType, manager: BlockManager) -> None:
        """Finds what all uses of ``manager`` share."""
        self._module = module
        self._shared = _shared.get(manager)
        if self._shared is None:
            copy = manager.parts.copy
            of_a_copy = copy.of_a_copy() if isinstance(copy, StreamCopyEngine) else {}
            parts = {name: of_a_copy.get(name) for name in _OF_A_COPY}
            functions = {"capturing": copy.capturing, "stream": copy.stream}
            self._shared = module.share({**manager.replay.of_a_use(), **parts, **functions})
            _shared[manager] = self._shared

    def take_over(self, group: Group) -> None:
        """Makes the uses of a block compiled ones; what is out of the ordinary is done in Python.

        The functions hold the group weakly, as it holds them.
        """
        if "hold_locked" not in group.__dict__:
            group.hold_locked, group.let_go_locked = self._module.uses_of(  # type: ignore[method-assign]
                self._shared,
                weakref.ref(group),
                group.block.id,
                group.record,
                group.pointing,
                group.writes,
                Group.hold_locked,
                Group.let_go_locked,
            )

    def call(self, interceptor: CallInterceptor) -> Any:
        """Returns what makes an interceptor's calls; it has the interceptor's attributes."""
        if type(interceptor) is not CallInterceptor or not interceptor.is_plain():
            return interceptor
        return self._module.call_of(*interceptor.of_a_call())


def of(manager: BlockManager) -> Compiled | None:
    """Returns what makes a manager's calls and uses compiled ones; None where that cannot be."""
    if not is_wanted(manager.parts.device):
        return None
    found = library()
    return None if isinstance(found, str) else Compiled(found, manager)
