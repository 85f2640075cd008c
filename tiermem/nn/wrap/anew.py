"""Models that were wrapped for evaluation and will be trained, before they were called.

Most of such a model is trained; or little of it, beside a vocabulary for which HBM has no room.
That one can be read in DRAM by calls without gradients, and is annexed when the model is wrapped
again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from tiermem.core.block import Tier

if TYPE_CHECKING:
    from tiermem.nn.passes.runtime import ModuleRuntime
    from tiermem.nn.wrap.wrapped import WrappedModel


def to_wrap_anew(runtime: ModuleRuntime, params: Iterable[torch.Tensor]) -> WrappedModel | None:
    """Returns the model that should be wrapped in another way for training, if any.

    A model loaded from a checkpoint is in evaluation mode (``from_pretrained``), and many scripts
    call ``train()`` only after they have created the optimizer. It has to be the last wrapped one,
    so that models stay in order.

    Args:
        runtime: The runtime of the manager.
        params: The parameters that an optimizer will step.
    """
    if runtime.manager.parts.planner.key is not None or not runtime.models:  # a pass has begun
        return None
    last = [*runtime.models.values()][-1]
    stepped = {id(param) for param in params if param.requires_grad}
    return last if _is_stepped(last, stepped) and _can_leave(last) and _gains(last) else None


def _is_stepped(wrapped: WrappedModel, stepped: set[int]) -> bool:
    """Whether enough of a model is stepped, and no part of it by another optimizer.

    Args:
        wrapped: The model.
        stepped: Ids of the stepped parameters.
    """
    taken = frozenset[int]().union(*(kept.params for kept in wrapped.runtime.program.optimizers))
    if any(id(entry.param) in taken for entry in wrapped.entries):
        return False
    sizes = [(id(entry.param) in stepped, entry.param.numel()) for entry in wrapped.entries]
    if wrapped.inventory.only_read:  # otherwise its vocabulary's calls would refuse gradients
        return any(mine for mine, _ in sizes)
    return 2 * sum(count for mine, count in sizes if mine) > sum(count for _, count in sizes)


def _can_leave(wrapped: WrappedModel) -> bool:
    """Whether a model is as it was wrapped, and no user has a tensor in its blocks."""
    parts = wrapped.runtime.manager.parts
    if wrapped.origins is not None or not wrapped.inventory.is_as_found():
        return False
    for entry in wrapped.entries:
        if entry.materialized or entry.has_grad or entry.param.grad is not None:
            return False
    if any(parts.table[group.block.id].home is Tier.NVME for group in wrapped.groups):
        return False
    if wrapped.has_views_of_buffers():
        return False
    with wrapped.runtime.manager.lock:
        slots = [parts.slots.current.get(block_id) for block_id in wrapped.blocks()]
        return not any(slot is not None and slot.aliased for slot in slots)


def _gains(wrapped: WrappedModel) -> bool:
    return wrapped.inventory.is_better_trained(wrapped.runtime.manager.parts.table.hbm.capacity)
