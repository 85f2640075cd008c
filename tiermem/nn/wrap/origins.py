"""Where the values of a model's tensors come from, if they are not in the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from tiermem.runtime.memory.homes import StoredBlock


class Origins(Protocol):
    """Values of a model that is loaded from files as it is wrapped."""

    def stored(self, tensors: Sequence[torch.Tensor]) -> StoredBlock | None:
        """Returns where files have the tensors of a block as they are.

        None where one of them is nowhere in the files, or not in its dtype and order.
        """

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Reads the value of a tensor into host memory; None where it has its value itself."""

    def mapped(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the value of a tensor that is ``stored``, mapped from its file where possible.

        Raises:
            StorageError: If the file was changed.
        """
