"""What stands for a view of a weight that autograd saves."""

from __future__ import annotations

import torch

from tiermem.core.block import Block
from tiermem.nn.groups.above import WeightViews
from tiermem.runtime.memory.slots import View


class SavedView:
    """A view of a block's bytes, without holding them.

    Attributes:
        block: The block.
        view: What it shows of the block.
        hooks: Of the manager that has the block.
        owner: The parameter or buffer whose bytes they are, if that is known.
        version: Of the owner when the view was saved; -1 where changes are no error.
    """

    __slots__ = (
        "block", "conj", "hooks", "neg", "owner", "version", "view"
    )  # fmt: skip

    def __init__(
        self,
        hooks: WeightViews,
        block: Block,
        tensor: torch.Tensor,
        view: View,
        owner: torch.Tensor | None,
    ) -> None:
        self.hooks = hooks
        self.block = block
        self.view = view
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()
        self.owner = owner
        # a tensor with a counter of its own (``weight.data``) is not said to be changed either
        self.version = -1 if owner is None else tensor._version
