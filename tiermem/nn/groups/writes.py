"""Finds out whether the uses of a block have written its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tiermem.nn.compat.counters import increment_versions, sum_of_versions


def refuse_changed(weight: torch.Tensor, version: int, block: str) -> None:
    """Refuses a weight that was changed in place but is needed for backward, as torch does.

    Args:
        weight: The weight, wherever it points.
        version: Its version when it was saved; -1 if changes are not an error.
        block: The name of its block.

    Raises:
        RuntimeError: If it was changed in place since.
    """
    with torch._C.DisableTorchFunctionSubclass():  # its block may not be held
        now = weight._version
    if version not in (-1, now):
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: a weight of block {block!r} is at version "
            f"{now}; expected version {version} instead"
        )


def refuse_replaced(block: str) -> RuntimeError:
    """Returns the error about a weight that backward needs but that has other data now.

    Args:
        block: The name of its block.
    """
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified: a weight of block "
        f"{block!r} was given other data (`weight.data = ...`) after forward had used it, and the "
        "tiers keep one value of a weight; assign it before forward uses it, or after backward"
    )


class Writes:
    """What is known of writes to the tensors of one block.

    torch counts writes by operations on a parameter. It does not count writes of ``weight.data`` or
    through an address; if the code of a module may do so, bytes are compared.

    Attributes:
        always: Whether every use counts as a write (buffers, which C++ kernels write).
        suspect: Whether the code of the modules may write weights in a way that torch does not
            count (``weight.data``), so that the bytes are compared after every use.
        merging: Modules that may do so only while they have merged adapters; checked in every use.
        counted: The parameters whose version counters are read.
        versions: The sum of these counters when they were last read.
        stepped: How many writes were steps of an optimizer.
    """

    __slots__ = ("always", "counted", "merging", "stepped", "suspect", "versions")

    def __init__(self, *, always: bool) -> None:
        """Starts with none.

        Args:
            always: Whether every use counts as a write.
        """
        self.always = always
        self.suspect = False
        self.merging: list[Any] = []
        self.counted: Sequence[torch.Tensor] = ()
        self.versions = 0
        self.stepped = 0

    @property
    def uncounted(self) -> bool:
        """Whether the last use may have made writes that torch does not count."""
        return self.suspect or self.always

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begins to count; earlier writes are at home already.

        Args:
            tensors: The tensors whose counters are read.
        """
        self.counted = tensors
        self.versions = self.count()

    def suspect_code(self, unless_empty: Any = None) -> None:
        """Turns on the comparison of the block's bytes with their home copy after uses.

        Args:
            unless_empty: A module that writes only while its ``merged_adapters`` are not empty.
        """
        if unless_empty is None:
            self.merging, self.suspect = [], True
        elif not self.suspect:
            self.merging.append(unless_empty)

    def look_for_adapters(self) -> None:
        """Sets ``suspect`` if modules have merged adapters, which their code may unmerge."""
        self.suspect = any(module.merged_adapters for module in self.merging)

    def count(self) -> int:
        """Returns the sum of the version counters as it is now."""
        return sum_of_versions(self.counted)

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Counts a write that was made elsewhere, in torch's version counters and here."""
        increment_versions(tensors)
        self.versions += len(tensors)
