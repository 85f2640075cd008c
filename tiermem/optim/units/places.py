"""Where a unit's block has the tensors of its state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiermem.nn.tensors.lazy import LazyTensor
from tiermem.nn.tensors.shells import Shell, insides


@dataclass(slots=True, eq=False)
class Place:
    """One tensor of a parameter's state, and the tensors of the block of which it consists.

    A plain one is one of them. One of a subclass has all tensors that it wraps there,
    consecutively.

    Attributes:
        param: The parameter of the state.
        key: The key in the state.
        name: For messages.
        shape: The shape that it shows.
        first: Number of its first tensor in the block.
        count: The number of its tensors.
        shell: How it is composed of them at present; None while it is plain.
    """

    param: torch.Tensor
    key: str
    name: str
    shape: tuple[int, ...]
    first: int
    count: int
    shell: Shell | None = None

    def tensors(self, views: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Selects its tensors from those of the block."""
        return views[self.first : self.first + self.count]

    def over(self, views: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the state tensor, over tensors of the block."""
        if self.shell is None:
            return views[self.first]
        return self.shell.around(self.tensors(views))

    def copy(self, views: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the state tensor, over copies of tensors of the block."""
        if self.shell is None:
            return views[self.first].clone()
        return self.shell.around([tensor.clone() for tensor in self.tensors(views)])

    def is_over(self, value: object, views: Sequence[torch.Tensor]) -> bool:
        """Whether a value consists of the tensors of the block."""
        if value is views[self.first]:
            return True
        if self.shell is None or not isinstance(value, torch.Tensor):
            return False
        inner = insides(value)
        return len(inner) == self.count and all(
            _is(tensor, view) for (_, tensor), view in zip(inner, self.tensors(views), strict=True)
        )

    def put(self, value: torch.Tensor, views: Sequence[torch.Tensor]) -> bool:
        """Writes a value to the tensors of the block, if it has the same structure.

        Returns:
            Whether it was written; otherwise it has become something else.
        """
        inner = [tensor for _, tensor in insides(value)]
        mine = self.tensors(views)
        if len(inner) != len(mine) or not all(map(_alike, inner, mine)):
            return False
        for view, tensor in zip(mine, inner, strict=True):
            if not _is(tensor, view):
                view.copy_(tensor)
        self.shell = Shell.of(value)
        return True


def part_exchanged(
    held: Iterable[tuple[dict[str, Any] | None, Place]], views: Sequence[torch.Tensor]
) -> None:
    """Copies tensors that a step has put under another name, as classes do that swap buffers.

    All are copied before any is stored, as one may be in the place of another.

    Args:
        held: For each tensor, the state of its parameter, and its place.
        views: The tensors of the block.
    """
    for own, place in held:
        value = None if own is None else own.get(place.key)
        if own is None or not isinstance(value, torch.Tensor) or isinstance(value, LazyTensor):
            continue
        if place.is_over(value, views):
            continue
        address = views[place.first].untyped_storage().data_ptr()
        inner = [tensor for _, tensor in insides(value) if tensor.layout is torch.strided]
        if any(tensor.untyped_storage().data_ptr() == address for tensor in inner):
            own[place.key] = value.clone()


def _alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    same = first.shape == second.shape and first.dtype is second.dtype
    return same and first.layout is second.layout  # a sparse gradient makes a sparse momentum


def _is(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors are the same memory; a class may return a new object for it."""
    if first is second:
        return True
    return (
        _alike(first, second)
        and first.device == second.device
        and first.data_ptr() == second.data_ptr()
        and first.stride() == second.stride()
    )
