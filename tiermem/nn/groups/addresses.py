"""Addresses that users got for tensors that move (``data_ptr()``).

Programs compare addresses to find tensors that share memory (tied weights). Two tensors that were
at the same place in HBM one after the other do not share memory. So an address that was returned
for one tensor is never returned for another, or the first answer would have become wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

import torch

from tiermem.errors import ParameterError
from tiermem.nn.groups.away import group_of
from tiermem.nn.groups.replaced import named

if TYPE_CHECKING:
    from tiermem.nn.groups.group import Group


class Addresses:
    """The addresses that users got for tensors of one manager."""

    def __init__(self) -> None:
        """Starts without addresses."""
        self._at: dict[int, ReferenceType[torch.Tensor]] = {}
        self._of: dict[int, int] = {}

    def tell(self, group: Group, tensor: torch.Tensor, address: int) -> None:
        """Notes that a user gets a tensor's address.

        Args:
            group: The tensor's group.
            tensor: The tensor; its block is in HBM.
            address: Address of its first byte.

        Raises:
            ParameterError: If that address was the last one returned for another tensor.
        """
        before = self._of.get(id(tensor))
        other = self._at[address]() if address in self._at else None
        if other is not None and other is not tensor and id(other) in group_of:
            theirs = group_of[id(other)].pointing.member_of(other)
            member = group.pointing.member_of(tensor)
            tied = theirs is not None and member is not None and theirs.index == member.index
            if not (tied and group_of[id(other)] is group):
                raise ParameterError(
                    f"{named(group, tensor)} is in HBM where {named(group_of[id(other)], other)} "
                    "was said to be, which has left since: addresses of tensors in the tiers "
                    "cannot be compared or kept; compare the tensors with `is`, or ask for "
                    "addresses inside `with tier.materialize(module)`"
                )
        if before is not None and before != address and self._is_at(before, tensor):
            del self._at[before]
        self._at[address] = ref(tensor)
        self._of[id(tensor)] = address

    def _is_at(self, address: int, tensor: torch.Tensor) -> bool:
        found = self._at.get(address)
        return found is not None and found() is tensor
