"""What a wrapped model gets back as it leaves the tiers: read first, then handed out.

Cut short anywhere, handing out goes on where it was: what was read is kept until its tensors have
it, and the blocks stay until every tensor is an ordinary one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tiermem.nn.group import Entry, Group
from tiermem.nn.inspect import owners
from tiermem.nn.lazy import is_gone, ordinary

if TYPE_CHECKING:
    from tiermem.nn.wrapped import WrappedModel


class Returning:
    """Values and gradients of one model, on their way to its tensors."""

    def __init__(self, wrapped: WrappedModel, target: torch.device) -> None:
        """Reads everything; changes nothing.

        Args:
            wrapped: The model; nobody holds its blocks.
            target: Where its tensors go.

        Raises:
            StorageError: If a block cannot be read.
        """
        grads, manager = wrapped.runtime.grads, wrapped.manager
        for entry in wrapped.entries:
            if not entry.materialized:
                grads.sync(entry)
        self._wrapped = wrapped
        self._target = target
        self._gradients: dict[int, torch.Tensor | None] = {}
        for entry in wrapped.entries:
            if entry.has_grad:
                self._gradients[id(entry)] = grads.load(entry)
            elif not entry.materialized and not is_gone(entry.param.grad):
                self._gradients[id(entry)] = entry.param.grad
        self._ours = [e for e in wrapped.entries if not e.materialized]
        self._values = {g.block.id: manager.read(g.block) for g in wrapped.groups}

    def finish(self) -> None:
        """Makes every tensor an ordinary one; what has been done already is not done again."""
        for group in self._wrapped.groups:
            tensors = self._values.get(group.block.id)
            if tensors is not None:
                self._free(group, tensors)
                del self._values[group.block.id]

    def _free(self, group: Group, tensors: list[torch.Tensor]) -> None:
        shared: dict[int, torch.Tensor] = {}
        ours = {id(entry) for entry in self._ours}
        for entry in group.entries:
            if entry.index not in shared:
                shared[entry.index] = tensors[entry.index].clone().to(self._target)
            if id(entry) in ours:
                self._free_entry(entry, shared[entry.index])
            owners.pop(entry.param, None)
        for member in group.buffers:
            group.free(member, tensors[member.index].clone().to(self._target))

    def _free_entry(self, entry: Entry, value: torch.Tensor) -> None:
        gradient = self._gradients.get(id(entry))
        if entry.has_grad:
            self._wrapped.runtime.grads.clear(entry)
        entry.param.grad = None
        entry.group.free(entry, value)
        if gradient is not None:
            entry.param.grad = ordinary(gradient, entry.param, value.device)
