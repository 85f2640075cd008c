"""Models that were wrapped to be evaluated, and are to be trained before they were called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from tiermem.core.block import Tier

if TYPE_CHECKING:
    from tiermem.nn.passes.runtime import ModuleRuntime
    from tiermem.nn.wrap.wrapped import WrappedModel


def to_wrap_anew(runtime: ModuleRuntime, params: Iterable[torch.Tensor]) -> list[WrappedModel]:
    """Returns the models that would be wrapped in another way, as most of them is trained.

    What is loaded from a checkpoint is in evaluation mode (``from_pretrained``), and many scripts
    call ``train()`` only after they have made the optimizer.

    Args:
        runtime: Of the manager.
        params: What an optimizer is to step.
    """
    if runtime.manager.parts.planner.key is not None:  # a pass has begun
        return []
    stepped = {id(param) for param in params if param.requires_grad}
    taken = frozenset[int]().union(*(kept.params for kept in runtime.program.optimizers))
    return [
        wrapped
        for wrapped in runtime.models.values()
        if wrapped.origins is None and _may(wrapped, stepped, taken)
    ]


def _may(wrapped: WrappedModel, stepped: set[int], taken: frozenset[int]) -> bool:
    """Whether one model is to be wrapped anew, and has nothing yet that would be lost.

    Args:
        wrapped: The model.
        stepped: Ids of what is stepped.
        taken: Ids of what optimizers step by now.
    """
    entries, table = wrapped.entries, wrapped.runtime.manager.parts.table
    if any(id(e.param) in taken or e.materialized for e in entries):
        return False
    if any(e.has_grad or e.param.grad is not None for e in entries):
        return False
    sizes = [(id(e.param) in stepped, e.param.numel()) for e in entries]
    if 2 * sum(count for mine, count in sizes if mine) <= sum(count for _, count in sizes):
        return False
    if any(table[group.block.id].home is Tier.NVME for group in wrapped.groups):
        return False
    return wrapped.inventory.is_better_trained(table.hbm.capacity)
