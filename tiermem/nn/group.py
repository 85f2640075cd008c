"""A block's parameters and buffers as the module sees them: pointed at HBM, or at a placeholder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from tiermem.core.block import Block
from tiermem.nn.placeholder import placeholder
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.slots import Slot

if TYPE_CHECKING:
    from tiermem.nn.grads import GradUnit


class Entry:
    """One managed parameter.

    Attributes:
        param: The parameter, always the same object.
        name: Qualified name.
        group: The group whose block holds its bytes.
        index: Which tensor of the block.
        placeholder: What it holds while released.
        unit: Block of its gradient, once gradients have a home.
        unit_index: Which tensor of that block.
        has_grad: Whether a gradient is in the tiers.
        tracked: Whether gradients of it are taken.
        materialized: Whether a user has it as an ordinary tensor.
    """

    __slots__ = (
        "group",
        "has_grad",
        "index",
        "lazy",
        "materialized",
        "name",
        "param",
        "placeholder",
        "tracked",
        "unit",
        "unit_index",
    )

    def __init__(self, param: nn.Parameter, name: str, group: Group, index: int) -> None:
        """Describes ``param``; moves nothing."""
        self.param = param
        self.name = name
        self.group = group
        self.index = index
        self.placeholder = placeholder(param.shape, param.dtype, group.manager.device)
        self.unit: GradUnit | None = None
        self.unit_index = -1
        self.has_grad = False
        self.tracked = False
        self.materialized = False
        self.lazy: torch.Tensor | None = None


class Group:
    """The parameters (or large buffers) of one block, held and let go together.

    While *held* the block is leased and the tensors point at it. While *soft*
    they point at it without a lease: it may leave, and then they let go.
    """

    def __init__(self, manager: BlockManager, block: Block, *, writes_hidden: bool = False) -> None:
        """Describes a block.

        Args:
            manager: Where the block is.
            block: The block.
            writes_hidden: Whether its tensors may be written without torch counting it
                (buffers, by C++ kernels), so that every use counts as a write.
        """
        self.manager = manager
        self.block = block
        self.writes_hidden = writes_hidden
        self.entries: list[Entry] = []
        self.buffers: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        self.holds = 0
        self.soft = False
        self._versions = 0
        self._slot: Slot | None = None
        manager.holders[block.id] = self

    def hold(self) -> None:
        """Leases the block and points its tensors at it."""
        if self.holds == 0:
            slot = self.manager.acquire(self.block)
            if not self.soft:
                self._point(slot)
            self.soft = False
            self._versions = self._count()
        self.holds += 1

    def let_go(self, *, dirty: bool = False) -> None:
        """Gives one hold back; the last one points the tensors away."""
        if self.holds > 1:
            self.holds -= 1
            if dirty:
                self.manager.mark_dirty(self.block)
            return
        written = dirty or self.writes_hidden or self._count() != self._versions
        self.holds = 0
        self._away()
        self.manager.release(self.block, dirty=written)

    def point_softly(self, *, dirty: bool) -> None:
        """Points the tensors at the block without holding it there.

        Args:
            dirty: Whether to assume that they will be written.
        """
        if self.holds:
            return
        slot = self.manager.acquire(self.block)
        if not self.soft:
            self._point(slot)
            self.soft = True
        self.manager.release(self.block, dirty=dirty or self.writes_hidden)

    def unpoint(self) -> None:
        """Ends a soft pointing (the manager calls this before the block leaves)."""
        if self.soft:
            self.soft = False
            self._away()

    def tensors(self) -> Sequence[torch.Tensor]:
        """Returns the tensors that point at the block, in the order of the block's specs."""
        return [e.param for e in self.entries] + [b[0] for b in self.buffers]

    def _point(self, slot: Slot) -> None:
        views = slot.views
        count = 0
        with torch.inference_mode(False):
            for entry in self.entries:
                if not entry.materialized:
                    entry.param.data = views[entry.index]
                    count += 1
            for tensor, index, _ in self.buffers:
                tensor.data = views[index]
                count += 1
        slot.pointed = count
        self._slot = slot

    def _away(self) -> None:
        with torch.inference_mode(False):
            for entry in self.entries:
                if not entry.materialized:
                    entry.param.data = entry.placeholder
            for tensor, _, empty in self.buffers:
                tensor.data = empty
        if self._slot is not None:
            self._slot.pointed = 0
            self._slot = None

    def _count(self) -> int:
        total = 0
        for entry in self.entries:
            total += entry.param._version
        return total
