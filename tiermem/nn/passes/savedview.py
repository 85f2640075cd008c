"""A reference to a view of a weight that autograd saves."""

from __future__ import annotations

import sys

import torch

from tiermem.core.block import Block
from tiermem.nn.groups.above import WeightViews
from tiermem.nn.groups.olddata import REPLACED
from tiermem.runtime.memory.slots import View

ALWAYS = sys.maxsize


class SavedView:
    """A view of a block's bytes, without holding them.

    Attributes:
        block: The block.
        view: Shape, strides and offset of the view in the block.
        weights: The saved weights of the block's manager.
        owner: The parameter or buffer with these bytes, if known.
        version: The owner's version when the view was saved; -1 if changes are not an error.
        times: How often weights had been given other data by then; the maximum if the view should
            show the owner's new data.
    """

    __slots__ = (
        "block", "conj", "neg", "owner", "times", "version", "view", "weights"
    )  # fmt: skip

    def __init__(
        self,
        weights: WeightViews,
        block: Block,
        tensor: torch.Tensor,
        view: View,
        owner: torch.Tensor | None,
    ) -> None:
        self.weights = weights
        self.block = block
        self.view = view
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()
        self.owner = owner
        # as with torch, changes of a tensor with its own counter (``weight.data``) are not detected
        self.version = -1 if owner is None else tensor._version
        # a saved parameter itself shows its new data, with torch, too
        self.times = ALWAYS if tensor is owner else REPLACED.times
