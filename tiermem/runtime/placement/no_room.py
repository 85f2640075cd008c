"""Errors for a block that finds no room in HBM: what is in its way, which budget is enough."""

from __future__ import annotations

from collections.abc import Sequence

from tiermem.config import exact_size, format_size
from tiermem.core.block import Block, Role, align_up
from tiermem.core.residency import ResidencyTable
from tiermem.errors import CapacityError
from tiermem.runtime.memory.homes import UNUSED
from tiermem.runtime.memory.slots import SlotCache

_WEIGHTS = (Role.PARAM, Role.BUFFER)
_SEEN = "still referred to"
MANY = (
    "; what needs many weights at once (views of them in a list, torch.func, an average) works "
    "inside `with tier.materialize(model)`"
)
"""What to do if a program keeps more weights in use than HBM has room for."""


def too_small(block: Block, table: ResidencyTable, slots: SlotCache) -> CapacityError:
    """Returns the error for a block that does not fit beside the blocks that cannot leave.

    Args:
        block: The block.
        table: The residency table.
        slots: Their slots, which count aliases.
    """
    held, weights, beside = [], 0, 0
    for record in table:
        weights += align_up(record.block.nbytes) if record.block.role in _WEIGHTS else 0
        slot = slots.current.get(record.block.id)
        if record.extent is None or slot is None:
            continue
        if record.leases or record.fixed or slot.aliased:
            why = "leased" if record.leases else "fixed" if record.fixed else _SEEN
            held.append((record.block.nbytes, record.block.name, why))
            beside += 0 if record.block.role in _WEIGHTS else align_up(record.block.nbytes)
    for extent in table.orphans():
        held.append((extent.nbytes, "a block that is gone", _SEEN))
    held.sort(reverse=True)
    capacity = table.hbm.capacity
    least = sum(entry[0] for entry in held) + align_up(block.nbytes)
    pieces = ""
    if least <= capacity:  # it would fit if the free space was contiguous
        pieces = ", and what is free lies in pieces between blocks that cannot be moved"
        least = capacity + align_up(block.nbytes)
        beside += align_up(block.nbytes)
    names = ", ".join(f"{name!r} ({format_size(n)}, {why})" for n, name, why in held[:6])
    seen = any(why == _SEEN for _, _, why in held)
    fixed = any(why == "fixed" for _, _, why in held)
    whole = weights + beside + (0 if block.role in _WEIGHTS else align_up(block.nbytes))
    every = f", or {exact_size(whole)} for all weights at once" if seen and whole > least else ""
    if table.hbm.walled:
        return CapacityError(
            f"block {block.name!r} ({format_size(block.nbytes)}) does not fit in tier hbm "
            f"({format_size(capacity)}) beside {names or 'nothing'}: the device has no memory for "
            f"{format_size(table.hbm.walled)} of it",
            "free memory of the device, or have activations take less; the next pass tries again",
        )
    return CapacityError(
        f"block {block.name!r} ({format_size(block.nbytes)}) does not fit in tier hbm "
        f"({format_size(capacity)}) beside {names or 'nothing'}{pieces}",
        f"give hbm= at least {exact_size(least)}{every}",
        f", or wrap with smaller blocks{MANY if seen else ''}{UNUSED if fixed else ''}",
    )


def too_much_for_good(blocks: Sequence[Block], there: int, capacity: int) -> CapacityError:
    """Returns the error for blocks with HBM as home that do not fit.

    Args:
        blocks: The blocks to be added.
        there: Bytes that permanent blocks took before.
        capacity: The budget.
    """
    largest = max(blocks, key=lambda block: block.nbytes)
    least = there + sum(block.nbytes for block in blocks)
    return CapacityError(
        f"blocks whose home tier is hbm take {format_size(least)} of it for good, "
        f"{format_size(there)} of them before these ({largest.name!r} is the largest, "
        f"{format_size(largest.nbytes)}); the budget is {format_size(capacity)}",
        f"give hbm= at least {exact_size(least)}, and room for what streams",
        f", or another home tier to some roles{UNUSED if there else ''}",
    )
