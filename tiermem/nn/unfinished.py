"""Gradients that an exception has left half changed, or half forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tiermem.nn.grads import GradUnit
    from tiermem.nn.group import Entry
    from tiermem.nn.runtime import ModuleRuntime
    from tiermem.runtime.manager import BlockManager


def finish_change(unit: GradUnit) -> None:
    """Makes a change of the gradients that it was not made of yet: not written since it began."""
    if unit.changing is None:
        return
    change, before = unit.changing
    with torch.no_grad():
        for view, version in before:
            if view._version == version:
                change([view])
    if unit.pending and unit.pending[0] is change:
        del unit.pending[0]
    unit.changing = None


def finish_changes(runtime: ModuleRuntime) -> None:
    """Finishes every change that was cut short, while the blocks are where they were."""
    current = runtime.manager.slots.current
    for group in runtime.groups:
        for unit in {id(e.unit): e.unit for e in group.entries if e.unit is not None}.values():
            if unit.changing is not None and unit.block.id in current:
                finish_change(unit)


def repair_gradients(runtime: ModuleRuntime) -> None:
    """Makes entries agree with their blocks; no backward runs.

    A gradient that was being forgotten, or handed out for the first time, is none: whoever cuts a
    backward short sets the gradients to none before the next.
    """
    runtime.grads.forget_backward()
    for group in runtime.groups:
        for entry in group.entries:
            entry.announced = entry.displaced = False
            if not entry.materialized:
                _repair(entry, runtime.manager)


def _repair(entry: Entry, manager: BlockManager) -> None:
    unit = entry.unit
    there = unit is not None and manager.table[unit.block.id].defined
    with torch._C.DisableTorchFunctionSubclass():
        if entry.has_grad and (not there or entry.lazy is None):
            entry.has_grad = False
        if not entry.has_grad and entry.lazy is not None:
            if entry.param.grad is entry.lazy:
                entry.param.grad = None
            entry.lazy = None
    if unit is not None and there and not any(e.has_grad for e in unit.entries):
        unit.pending.clear()
        manager.discard(unit.block)
