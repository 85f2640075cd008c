"""The basic data types: tiers, roles, extents, tensor specs, blocks."""

from __future__ import annotations

import enum
from dataclasses import dataclass

ALIGNMENT = 4096
"""Every extent begins and ends on this many bytes: a page, and O_DIRECT's safe unit."""


def align_up(nbytes: int, unit: int = ALIGNMENT) -> int:
    """Returns ``nbytes`` rounded up to a multiple of ``unit``."""
    return -(-nbytes // unit) * unit


class Tier(enum.Enum):
    """Where bytes can be: device memory, host memory, a file on a fast disk."""

    HBM = "hbm"
    DRAM = "dram"
    NVME = "nvme"


class Role(enum.Enum):
    """What a tensor is for."""

    PARAM = "param"
    BUFFER = "buffer"
    GRAD = "grad"
    MASTER = "master"
    OPTIMIZER = "optimizer"
    ACTIVATION = "activation"
    QUANT = "quant"


@dataclass(frozen=True, slots=True)
class Extent:
    """An address inside one store.

    Attributes:
        offset: First byte.
        nbytes: Length in bytes.
    """

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """The byte after the last."""
        return self.offset + self.nbytes


ANNEX = 1 << 61
"""First address of the annex of HBM: places in DRAM at which kernels always use a block."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor inside a block.

    Attributes:
        name: Qualified name, for messages.
        offset: First byte within the block.
        nbytes: Bytes of its storage.
        shape: Sizes.
        stride: Strides in elements; dense, any order.
        dtype: A ``torch.dtype``; kept opaque here so that ``core`` stays free of torch.
    """

    name: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: object


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Tensors that move together, packed into one contiguous run of bytes.

    Attributes:
        id: Position in the manager's list of blocks; never reused.
        name: For messages and tables.
        role: What its tensors are for.
        nbytes: Length, a multiple of :data:`ALIGNMENT`.
        tensors: What is packed inside, by ascending offset.
    """

    id: int
    name: str
    role: Role
    nbytes: int
    tensors: tuple[TensorSpec, ...] = ()
