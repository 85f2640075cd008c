"""Makes modules, gradients and leases consistent after an exception in tiermem's own code.

Entry points note such an exception (:mod:`tiermem.nn.compat.entrances`); the next call
from outside tiermem begins with :func:`repair`. At that time nothing is held: not by this thread,
which is not inside any call of tiermem, nor by another one, which is checked. So any remaining hold
was left by the interrupted call. See :mod:`tiermem.runtime.repair` for the blocks themselves.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import FrameType

import torch

from tiermem.core.block import Role
from tiermem.errors import REFUSALS
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.nn.wrap.materialize import take_back_left
from tiermem.nn.wrap.originals import undo_wrap
from tiermem.nn.wrap.unfinished import finish_changes, repair_gradients
from tiermem.runtime.repair import end_leases, repair_homes

_PACKAGE = str(Path(__file__).parent.parent.parent) + os.sep
_ROOMS = (f"{_PACKAGE}nn{os.sep}", f"{_PACKAGE}optim{os.sep}", f"{_PACKAGE}tier.py")
"""Code in which blocks are held between calls of the manager."""


def repair(runtime: ModuleRuntime) -> None:
    """Repairs everything that is not in progress.

    Called by every public entry point, before it does anything else. Inside another call of
    tiermem (a model that caught the error continues) only the blocks are repaired; leases that were
    left behind are ended by the next call from outside.
    """
    manager = runtime.manager
    if manager.gate.closed:
        return
    manager.gate.guard()  # repairs the blocks
    if not _is_alone():
        return
    with manager.lock:
        manager.repair_blocks()
        if runtime.models.wrapping is not None:
            undo_wrap(runtime.models.wrapping)
        while torch.is_grad_enabled() and runtime.saved.on_top():
            runtime.saved.pop()
        runtime.here.inside = False
        manager.threads.repair()
        kept = _end_attempts(runtime)
        for block_id, holder in list(manager.parts.holders.items()):
            if block_id not in kept:
                holder.repair()
        finish_changes(runtime)
        end_leases(manager.parts, kept)
        runtime.reset()
        repair_gradients(runtime)
        if runtime.activations.store is not None:
            runtime.activations.store.repair()
        _drop_lost(runtime)
        runtime.saved.rows.copies.clear()
        runtime.experts.repair()
        runtime.packer.repair()
        runtime.home_packing.repair()
        repair_homes(manager.parts)
        manager.gate.torn = manager.gate.unsure = False
    _take_back(runtime)


def _end_attempts(runtime: ModuleRuntime) -> Counter[int]:
    """Undoes interrupted steps; returns the leases of those that cannot be undone yet.

    Nothing that they hold may move: it is in an intermediate state.
    """
    kept: Counter[int] = Counter()
    holds: Counter[int] = Counter()
    for attempt in list(runtime.keepers.attempts):
        with suppress(*REFUSALS):  # the disk still fails: the next use of the blocks raises
            attempt.end()
            continue
        group, blocks = attempt.leased()
        kept.update(block.id for block in blocks)
        if group is not None:
            holds[group.block.id] += 1
    for group in runtime.groups:
        if group.block.id in holds:
            group.holds = holds[group.block.id]
            kept[group.block.id] += 1  # a group has one lease, however many calls hold it
            for inside in group.insides:
                inside.reset()
    return kept


def _take_back(runtime: ModuleRuntime) -> None:
    """Takes back what a user had as ordinary tensors when the exception occurred."""
    if any(lending.left for lending in runtime.models.lendings):
        take_back_left(runtime)


def _drop_lost(runtime: ModuleRuntime) -> None:
    """Removes blocks of gradients that no parameter has, and of state that no optimizer has.

    They were about to be assigned.
    """
    units = [e.unit for g in runtime.groups for e in g.entries if e.unit is not None]
    known = {block.id for unit in units for block in unit.blocks}
    known |= {block.id for keeper in runtime.keepers for block in keeper.blocks()}
    kinds = (Role.GRAD, Role.OPTIMIZER, Role.MASTER)
    records = list(runtime.manager.parts.table)
    lost = [r.block for r in records if r.block.role in kinds and r.block.id not in known]
    if lost:
        runtime.manager.remove_blocks(lost)


def _is_alone() -> bool:
    """Whether no thread is inside a call of tiermem, except the calling one, just begun."""
    if torch._C._current_graph_task_id() != -1:
        return False
    here = sys._getframe(3)
    mine = _inside(here)
    others = (
        _inside(frame)
        for thread, frame in sys._current_frames().items()
        if thread != threading.get_ident()
    )
    return not (mine or any(others))


def _inside(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_ROOMS):
            return True
        frame = frame.f_back
    return False
