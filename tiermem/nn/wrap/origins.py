"""Where the values of a model's tensors come from, if they are not in the tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

import torch

from tiermem.core.block import Block, Tier
from tiermem.nn.groups.group import Group
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.memory.homes import StoredBlock


class Origins(Protocol):
    """Values of a model that is loaded from files when it is wrapped."""

    def stored(self, tensors: Sequence[torch.Tensor]) -> StoredBlock | None:
        """Returns where files have the tensors of a block in their present form.

        None if one of them is not in the files, or not in its dtype and order.
        """

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Reads the value of a tensor into host memory; None if it has its value itself."""

    def mapped(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the value of a tensor that is ``stored``, mapped from its file where possible.

        Raises:
            StorageError: If the file was changed.
        """


def read_in(
    manager: BlockManager,
    origins: Origins,
    groups: Sequence[Group],
    tensors: Mapping[int, Sequence[torch.Tensor]],
) -> list[Block]:
    """Fills the blocks with homes in DRAM or HBM that files have in that form, all at once.

    Args:
        manager: The manager of the blocks.
        origins: The source of the values.
        groups: The groups of the model.
        tensors: The tensors of each block that holds no data yet, by its id.

    Returns:
        The blocks that were filled.

    Raises:
        StorageError: If the files cannot be read.
        IntegrityError: If they were changed.
    """
    wanted: list[tuple[Block, StoredBlock]] = []
    with ExitStack() as leases:
        for group in groups:
            record = manager.record(group.block)
            members = tensors.get(group.block.id)
            if members is None or record.home is Tier.NVME:
                continue
            stored = origins.stored(members)
            if stored is None:
                continue
            wanted.append((group.block, stored))
            if record.fixed:
                manager.acquire(group.block)
                leases.callback(manager.release, group.block, dirty=True)
        manager.fill_from_files(wanted)
    return [block for block, _ in wanted]
