"""What stands for a view of a weight that autograd saves."""

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
        view: What it shows of the block.
        weights: Of the manager that has the block.
        owner: The parameter or buffer whose bytes they are, if that is known.
        version: Of the owner when the view was saved; -1 where changes are no error.
        times: How often weights had been given other data by then; as often as can be where it
            is to show what the owner is given.
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
        # a tensor with a counter of its own (``weight.data``) is not said to be changed either
        self.version = -1 if owner is None else tensor._version
        # a parameter itself shows what it is given, with torch as well
        self.times = ALWAYS if tensor is owner else REPLACED.times
