"""The groups of all wrapped models of one manager."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import overload

import torch

from tiermem.errors import CapacityError
from tiermem.nn.groups.grads import GradStore
from tiermem.nn.groups.group import Group
from tiermem.nn.groups.incoming import IncomingGradients


class Groups(Sequence[Group]):
    """Every group of parameters, in the order of the modules, and found by block.

    Attributes:
        by_block: The same by the id of their block; always the same dictionary.
        owners: By the same id, the offset of each tensor in the block, and the parameter or buffer;
            always the same dictionary.
    """

    def __init__(self) -> None:
        """Starts without groups."""
        self._list: list[Group] = []
        self.by_block: dict[int, Group] = {}
        self.owners: dict[int, tuple[list[int], list[torch.Tensor | None]]] = {}
        self._homed = 0

    def __len__(self) -> int:
        return len(self._list)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._list)

    @overload
    def __getitem__(self, index: int) -> Group: ...

    @overload
    def __getitem__(self, index: slice) -> list[Group]: ...

    def __getitem__(self, index: int | slice) -> Group | list[Group]:
        return self._list[index]

    def add(self, group: Group) -> None:
        """Adds a group."""
        self._list.append(group)
        self.by_block[group.block.id] = group
        self.owners[group.block.id] = _owners_in(group)

    def remove(self, gone: set[int]) -> None:
        """Removes groups, given by their ids."""
        self._list = [group for group in self._list if id(group) not in gone]
        for block_id in [b for b, group in self.by_block.items() if id(group) in gone]:
            del self.by_block[block_id]
            self.owners.pop(block_id, None)
        self.owners.update((g.block.id, _owners_in(g)) for g in self._list)

    def track(self, tensor: torch.Tensor, incoming: IncomingGradients) -> None:
        """Takes the gradients of a parameter from now on."""
        for group in self._list:
            for entry in group.entries:
                if entry.param is tensor:
                    incoming.track(entry)

    def home_gradients(self, grads: GradStore) -> None:
        """Reserves homes for gradients before saved tensors take the room."""
        if self._homed != len(self._list):
            self._homed = len(self._list)
            with suppress(CapacityError):  # there may be no backward; if there is, it raises
                grads.homes.reserve(self._list)


def _owners_in(group: Group) -> tuple[list[int], list[torch.Tensor | None]]:
    """Returns the owners of a block's bytes; None for a tensor that is not in the group."""
    specs = group.block.tensors
    owners: list[torch.Tensor | None] = [None] * len(specs)
    for member in (*group.entries, *group.buffers):
        if owners[member.index] is None:  # otherwise several tensors share these bytes
            owners[member.index] = member.tensor
    return [spec.offset for spec in specs], owners
