"""The error about a block that is too large for HBM and cannot be read in place in DRAM."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tiermem.config import exact_size, format_size
from tiermem.errors import CapacityError

if TYPE_CHECKING:
    from tiermem.nn.groups.group import Group
    from tiermem.nn.groups.need import Program
    from tiermem.runtime.manager import BlockManager


def no_room(manager: BlockManager, group: Group, program: Program | None = None) -> CapacityError:
    """Returns the error of a use for which a block that is read in DRAM would have to fit in HBM.

    Args:
        manager: Where it is.
        group: Of the block.
        program: What runs there, where gradients need room as well: the budgets are for backward.
    """
    block, table = group.block, manager.parts.table
    least = max(group.wanted, table.fixed_nbytes() + block.nbytes)
    advice = f"give hbm= at least {exact_size(least)}"
    if torch.is_grad_enabled():
        advice = (program.for_backward() if program is not None else "") or advice
        advice = (
            f"call the model inside torch.no_grad(), or {advice}, or call model.train() before "
            "tier.wrap(model) if it is an embedding or a head, which is trained in DRAM then"
        )
    return CapacityError(
        f"block {block.name!r} ({format_size(block.nbytes)}) does not fit in tier hbm with a "
        f"budget of {format_size(table.hbm.capacity)}: it is read in tier dram, where it lies, by "
        "operations that take no gradients, and nothing has its address",
        advice,
    )
