"""Grouped products: of groups of rows with the matrices of the experts that have a group.

A group's product does not depend on the other groups, so it is computed alone or with some others,
from matrices that are in seats of HBM at the moment. If gradients are computed, backward fetches
the matrices again, and autograd keeps no reference to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol

import torch

from tiermem.nn.compat.hookpair import stand_in
from tiermem.runtime.base.functorch import outside_inference

_FEW = 32
"""Average tokens per chosen expert up to which one kernel for all experts, on copies of their
matrices, is faster than a kernel for each."""
_COUNTED = 256
"""How many groups of one row have their ends kept on the device, for calls with one token."""
_AT_ONCE = 64 << 20
"""Bytes of matrices that are concatenated for one kernel, as small ones are not worth one each."""


class Matrices(Protocol):
    """The matrices of a layer's experts; see :class:`tiermem.nn.groups.rows.Rows`."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameter."""
        ...

    @property
    def shape(self) -> torch.Size:
        """The shape of all of them."""
        ...

    @property
    def device(self) -> torch.device:
        """Where they are used."""
        ...

    def matrices(self, experts: Sequence[int]) -> torch.Tensor | None:
        """Returns those of some experts; None if only all are available together."""
        ...

    def whole(self) -> torch.Tensor:
        """Returns those of all experts."""
        ...

    def at_hand(self) -> tuple[int, int]:
        """Returns how many are available at once, and the bytes of one."""
        ...

    def save(self, experts: Sequence[int]) -> None:
        """Notes that backward will need those of some experts."""
        ...

    def turned_again(self) -> Matrices:
        """Returns the matrices transposed, for a backward."""
        ...


class Groups:
    """A grouped product with the matrices of some experts.

    Attributes:
        matrices: The matrices of all experts.

    Args:
        matrices: The matrices of all experts.
        function: ``torch.nn.functional.grouped_mm`` or one like it.
        counts: The rows of each expert's group, by expert, of those that have any, ascending.
    """

    __slots__ = ("_counts", "_function", "matrices")

    def __init__(
        self, matrices: Matrices, function: Callable[..., Any], counts: Mapping[int, int]
    ) -> None:
        self.matrices = matrices
        self._function = function
        self._counts = counts

    def __call__(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Returns the products.

        Args:
            rows: ``[tokens, features]``, group by group.
            offsets: ``[experts]``, the end of each group.
        """
        if torch.is_grad_enabled() and rows.requires_grad:
            self.matrices.save([*self._counts])
            return _Product.apply(rows, offsets, self)  # type: ignore[no-any-return, no-untyped-call]
        return self.product(rows, offsets)

    def product(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Returns the products, without autograd."""
        found = self._by_parts(rows, offsets)
        if found is None:
            found = self._function(rows, self.matrices.whole(), offs=offsets)
        return found

    def turned_again(self) -> Groups:
        """Returns the grouped product that computes the gradient of the rows."""
        return Groups(self.matrices.turned_again(), self._function, self._counts)

    def _by_parts(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor | None:
        counts = self._counts
        experts, each = [*counts], [*counts.values()]
        seats, nbytes = self.matrices.at_hand()
        at_once = min(seats // 4, _AT_ONCE // max(nbytes, 1))
        if rows.shape[0] <= _FEW * len(experts):
            at_once = seats // 2
        at_once = max(1, at_once)
        parts, start = [], 0
        for first in range(0, len(experts), at_once):
            some = experts[first : first + at_once]
            matrices = self.matrices.matrices(some)
            if matrices is None:
                return None
            sizes = each[first : first + at_once]
            end = start + sum(sizes)
            ends = ends_of(sizes, offsets)
            part = rows if len(some) == len(experts) else rows[start:end]
            parts.append(self._function(part, matrices, offs=ends))
            start = end
            del matrices
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def ends_of(sizes: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Returns the ends of consecutive groups, without making the host wait for the device.

    Args:
        sizes: Sizes of the groups.
        like: A tensor with the dtype and device of the result.
    """
    few = len(sizes)
    if max(sizes) == 1 and few <= _COUNTED:
        return _counted(few, like.dtype, like.device)
    ends = torch.tensor([*accumulate(sizes)], dtype=like.dtype, device="cpu")
    return ends.to(like.device, non_blocking=True)


@lru_cache(maxsize=64)
def _counted(few: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns 1, 2, 3 and so on: the ends of groups of one row."""
    with outside_inference():
        return torch.tensor(range(1, few + 1), dtype=dtype, device=device)


class _Product(torch.autograd.Function):
    """A grouped product with matrices that get no gradients.

    It saves the offsets, as torch's own function does after the matrices: a recomputed layer may
    use either function, and has to save the same tensors as before.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, offsets: torch.Tensor, groups: Groups
    ) -> torch.Tensor:
        matrices = groups.matrices
        shown = stand_in(matrices.dtype, matrices.shape, matrices.device)
        ctx.save_for_backward(shown, offsets)
        ctx.groups = groups
        return groups.product(rows, offsets)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        _, offsets = ctx.saved_tensors
        return ctx.groups.turned_again()(gradient, offsets), None, None
