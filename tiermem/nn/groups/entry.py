"""One tensor of a module whose bytes are in a block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tiermem.nn.groups.away import away_class
from tiermem.nn.tensors.lazy import Ways
from tiermem.nn.tensors.placeholder import shared_placeholder

if TYPE_CHECKING:
    from tiermem.nn.groups.gradunit import GradUnit
    from tiermem.nn.groups.group import Group


class Member:
    """One tensor of a module whose bytes are in a block.

    Attributes:
        tensor: The parameter or buffer, always the same object.
        group: The group whose block holds its bytes.
        index: Its index among the tensors of the block.
        placeholder: The tensor without memory at which it points while released.
        kind: Its class while it is held.
        away: Its class while it is not held.
        materialized: Whether a user has it as an ordinary tensor.
    """

    __slots__ = (
        "__weakref__",
        "away",
        "group",
        "index",
        "kind",
        "materialized",
        "placeholder",
        "tensor",
    )

    def __init__(self, tensor: torch.Tensor, group: Group, index: int) -> None:
        """Describes ``tensor``; moves nothing."""
        self.tensor = tensor
        self.group = group
        self.index = index
        stride = group.block.tensors[index].stride
        self.placeholder = shared_placeholder(
            tensor.shape, tensor.dtype, group.manager.parts.device, stride
        )
        self.kind: type = type(tensor)
        self.away = away_class(self.kind)
        self.materialized = False

    def point(self, data: torch.Tensor, kind: type) -> None:
        """Sets the tensor's data and its class."""
        tensor: Any = self.tensor
        if type(tensor) is not self.kind:
            tensor.__class__ = self.kind
        tensor.data = data
        if kind is not self.kind:
            tensor.__class__ = kind


class Entry(Member):
    """One managed parameter.

    Attributes:
        param: The parameter, always the same object.
        name: Qualified name.
        unit: Block of its gradient, once gradients have a home.
        unit_index: Index of its gradient among the tensors of that block.
        has_grad: Whether a gradient is in the tiers.
        displaced: Whether its stand-in was removed for a new gradient that has not arrived yet.
        tracked: Whether its gradients are taken into the tiers.
        announced: Whether a gradient was announced by a hook and has not arrived yet.
        unheard: Whether a gradient has ever arrived without being announced.
        waits: Whether a gradient has arrived and waits for others of its unit.
        shares: Whether gradients are added to an ordinary tensor that shares memory with others.
        hooks: Handles of the hooks that take its gradients.
        lazy: The stand-in for the gradient in ``param.grad``.
        ways: How stand-ins access the gradient, once there was one.
        whole: Whether its gradient should be in one block or in runs, as the optimizer needs it;
            None if that depends on the room only.
        sparse: Whether a module computes sparse gradients of it, which are stepped as a whole.
        steps: How many steps, of any optimizer, have written it.
    """

    __slots__ = (
        "announced",
        "displaced",
        "has_grad",
        "hooks",
        "lazy",
        "name",
        "param",
        "shares",
        "sparse",
        "steps",
        "tracked",
        "unheard",
        "unit",
        "unit_index",
        "waits",
        "ways",
        "whole",
    )

    def __init__(self, param: nn.Parameter, name: str, group: Group, index: int) -> None:
        """Describes ``param``; moves nothing."""
        super().__init__(param, group, index)
        self.param = param
        self.name = name
        self.unit: GradUnit | None = None
        self.unit_index = -1
        self.has_grad = False
        self.displaced = False
        self.tracked = False
        self.announced = self.unheard = self.waits = self.shares = False
        self.hooks: list[RemovableHandle] = []
        self.lazy: torch.Tensor | None = None
        self.ways: Ways | None = None
        self.whole: bool | None = None
        self.sparse = False
        self.steps = 0
