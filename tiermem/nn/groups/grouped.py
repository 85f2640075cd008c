"""Products of groups of rows with the matrices of the experts that have a group.

A group's product does not depend on the other groups: it is made alone, or with some, of matrices
that are in seats of HBM just then. Where gradients are taken, backward asks for the matrices anew,
and autograd keeps nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from tiermem.nn.compat.hookpair import STAND_IN

_FEW = 32
"""Tokens for each chosen expert, on average, up to which one kernel for all of them, over copies of
their rows, is better than a kernel for each."""
_AT_ONCE = 64 << 20
"""Bytes of rows that are concatenated for one kernel: small ones are not worth one each."""


class Matrices(Protocol):
    """The matrices of a layer's experts; see :class:`tiermem.nn.groups.rows.Rows`."""

    def matrices(self, experts: Sequence[int]) -> torch.Tensor | None:
        """Returns those of some experts; None where only all can be had."""
        ...

    def whole(self) -> torch.Tensor:
        """Returns those of all experts."""
        ...

    def at_hand(self) -> tuple[int, int]:
        """Returns how many can be had together, and the bytes of one."""
        ...

    def save(self, experts: Sequence[int]) -> None:
        """Notes that backward will ask for those of some experts."""
        ...

    def turned_again(self) -> Matrices:
        """Returns the matrices transposed, for a backward."""
        ...


class Groups:
    """A grouped product with the matrices of some experts.

    Args:
        matrices: Of all experts.
        function: ``torch.nn.functional.grouped_mm`` or one like it.
        counts: The rows of each expert's group.
    """

    __slots__ = ("_counts", "_function", "_matrices")

    def __init__(
        self, matrices: Matrices, function: Callable[..., Any], counts: Sequence[int]
    ) -> None:
        self._matrices = matrices
        self._function = function
        self._counts = counts

    def __call__(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Returns the products.

        Args:
            rows: Of ``[tokens, features]``, group by group.
            offsets: Of ``[experts]``: the end of each group.
        """
        if torch.is_grad_enabled() and rows.requires_grad:
            self._matrices.save([e for e, count in enumerate(self._counts) if count])
            return _Product.apply(rows, offsets, self)  # type: ignore[no-any-return, no-untyped-call]
        return self.product(rows, offsets)

    def product(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Returns the products, which autograd does not see."""
        found = self._by_parts(rows, offsets)
        if found is None:
            found = self._function(rows, self._matrices.whole(), offs=offsets)
        return found

    def turned_again(self) -> Groups:
        """Returns the product that the gradient of the rows is."""
        return Groups(self._matrices.turned_again(), self._function, self._counts)

    def _by_parts(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor | None:
        counts = self._counts
        experts = [expert for expert, count in enumerate(counts) if count]
        seats, nbytes = self._matrices.at_hand()
        at_once = min(seats // 4, _AT_ONCE // max(nbytes, 1))
        if rows.shape[0] <= _FEW * len(experts):
            at_once = seats // 2
        at_once = max(1, at_once)
        parts, start = [], 0
        for first in range(0, len(experts), at_once):
            some = experts[first : first + at_once]
            matrices = self._matrices.matrices(some)
            if matrices is None:
                return None
            total = sum(counts[expert] for expert in some)
            # the ends of their groups; those between them that are empty end where the last one did
            ends = offsets[some[0] : some[-1] + 1]
            if len(ends) > len(some):
                ends = torch.cat([offsets[expert : expert + 1] for expert in some])
            inner = ends - start  # the host waits for nothing
            parts.append(self._function(rows[start : start + total], matrices, offs=inner))
            start += total
            del matrices
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Product(torch.autograd.Function):
    """A grouped product with matrices of which no gradients are taken.

    It saves the offsets, as torch's own does after the matrices: what recomputes a layer may take
    the one or the other, and has to find the same saved tensors as before.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, offsets: torch.Tensor, groups: Groups
    ) -> torch.Tensor:
        ctx.save_for_backward(STAND_IN, offsets)
        ctx.groups = groups
        return groups.product(rows, offsets)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        _, offsets = ctx.saved_tensors
        return ctx.groups.turned_again()(gradient, offsets), None, None
