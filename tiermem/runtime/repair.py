"""Makes a manager consistent again after an exception raised in its own code.

Ctrl-C, a signal handler of the user's, a RecursionError or a MemoryError may occur between any two
lines. No order of assignments makes every operation atomic for all of them. So the public entry
points note that such an exception has passed (:attr:`CallGate.torn`), and the next call runs this
repair first, before it uses any state.

State that changes by one assignment, or is the only copy of something, is trusted: the records of
the blocks, the transfers in progress, the bytes of tensors. Everything else (the places in HBM, the
free space, what was read ahead, the learned order of use) is rebuilt from that.
"""

from __future__ import annotations

from collections.abc import Mapping

from tiermem.core.block import Role
from tiermem.runtime.loans.host_loans import HostLoans
from tiermem.runtime.loans.zero_copy import ZeroCopy
from tiermem.runtime.lookahead.prefetcher import Prefetcher
from tiermem.runtime.lookahead.replay import Replay
from tiermem.runtime.parts import Parts


def repair_blocks(
    parts: Parts, host_loans: HostLoans, zero_copy: ZeroCopy, prefetcher: Prefetcher, replay: Replay
) -> None:
    """Makes table, slots and transfers consistent; leases and their holders are not changed.

    Called under the manager's lock right after it was taken, so that no operation on blocks is
    in progress. It waits for the disk. If it is interrupted, it can be called again.
    """
    parts.evictor.repair()
    parts.transfers.repair()
    parts.evictor.reclaim_lost()
    host_loans.repair()
    parts.planner.reset()
    prefetcher.repair()
    replay.repair()
    parts.pass_timer.cut_short()
    zero_copy.clear()
    parts.deferred.repair()
    parts.evictor.reap()


def repair_homes(parts: Parts) -> None:
    """Frees unowned space below HBM; no other operation may be in progress in any thread."""
    homes = [(r.home, r.home_extent) for r in parts.table if r.home_extent is not None]
    parts.homes.repair(homes)


def end_leases(parts: Parts, kept: Mapping[int, int]) -> None:
    """Ends every lease that no holder of the block counts as its own.

    A leased block may have been written without being marked dirty: the copy in HBM is never older,
    and is the valid one from now on. No other operation may be in progress.

    Args:
        parts: The parts of the manager.
        kept: Leases that stay, by block id: those of a step that could not be undone, which
            marks blocks that it has written itself.
    """
    for record in parts.table:
        if record.block.id in kept:
            record.leases = kept[record.block.id]
            continue
        holder = parts.holders.get(record.block.id)
        known = holder.leases() if holder is not None else 0
        if record.leases == known:
            continue
        if record.usable and record.block.role is not Role.QUANT:
            record.leases = 1
            parts.table.mark_dirty(record.block.id)
        record.leases = known
