"""Repairs gradients that an exception has left half changed, or half cleared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tiermem.nn.groups.gradunit import units_of

if TYPE_CHECKING:
    from tiermem.nn.groups.entry import Entry
    from tiermem.nn.passes.runtime import ModuleRuntime
    from tiermem.runtime.manager import BlockManager


def finish_changes(runtime: ModuleRuntime) -> None:
    """Notes how far interrupted changes of gradients got; the rest is done at the next use.

    Called before anything else is written to the gradients.
    """
    for group in runtime.groups:
        for unit in units_of(group.entries):
            for pending in [pending for part in unit.parts for pending in part.pending]:
                pending.note_written()


def repair_gradients(runtime: ModuleRuntime) -> None:
    """Makes entries consistent with their blocks; no backward runs.

    A gradient that was being cleared, or shown for the first time, is dropped: after an
    interrupted backward gradients have to be set to None before the next.
    """
    runtime.backward.incoming.forget_backward()
    for group in runtime.groups:
        for entry in group.entries:
            entry.announced = entry.displaced = False
            if not entry.materialized:
                _repair(entry, runtime.manager)


def _repair(entry: Entry, manager: BlockManager) -> None:
    unit = entry.unit
    lent = unit is not None and manager.host_loans.borrowers(unit.block) > 0  # to a host step
    blocks = [] if unit is None else unit.blocks
    defined = [block for block in blocks if manager.parts.table[block.id].defined]
    there = unit is not None and (lent or len(defined) == len(blocks))
    with torch._C.DisableTorchFunctionSubclass():
        if entry.has_grad and (not there or entry.lazy is None):
            entry.has_grad = False
        if not entry.has_grad and entry.lazy is not None:
            if entry.param.grad is entry.lazy:
                entry.param.grad = None
            entry.lazy = None
    if unit is not None and (lent or defined) and not any(e.has_grad for e in unit.entries):
        unit.forget_changes()
        for block in defined if not lent else ():
            manager.discard(block)
