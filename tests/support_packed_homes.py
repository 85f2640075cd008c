"""Homes that lie packed, in tests: tiles of a kilobyte, and every home in DRAM packed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tiermem.core import packedhome
from tiermem.core.block import Extent
from tiermem.core.residency import ResidencyTable
from tiermem.optim import ahead
from tiermem.optim.balance import Speed
from tiermem.optim.looptrial import LoopTrial
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.services import home_packing
from tiermem.runtime.transfers import packed_homes
from tiermem.runtime.transfers.packed_homes import PackedHomes
from tiermem.transfer import streams
from tiermem.transfer.copy import HostCopyEngine
from tiermem.transfer.streams import StreamCopyEngine

WORDS = 512
SMALL = {"WORDS": WORDS, "TILE": 2 * WORDS, "PACKED_TILE": 960, "SPILL": 64}
_MODULES = (packedhome, streams, packed_homes)


@contextmanager
def small_tiles() -> Iterator[pytest.MonkeyPatch]:
    """Makes tiles small, inside ``with``; for devices that are simulated."""
    with pytest.MonkeyPatch.context() as patch:
        for module in _MODULES:
            for name, value in SMALL.items():
                patch.setattr(module, name, value, raising=module is packedhome)
        yield patch


@contextmanager
def some_raw(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has tiles lie raw that begin with a multiple of three, whatever is in them."""
    pack = packedhome.pack_tile

    def pack_tile(words: packedhome.Words) -> tuple[packedhome.Bytes, packedhome.Bytes | None]:
        if int(words[0]) % 3:
            return pack(words)
        whole = np.ascontiguousarray(words).view(np.uint8)
        return whole[: packedhome.PACKED_TILE], whole[packedhome.PACKED_TILE :]

    patch.setattr(packedhome, "pack_tile", pack_tile)
    yield


def begin_packing(manager: BlockManager, places: int) -> None:
    """Has what is marked written home packed, by way of device memory of its own.

    Args:
        manager: Of the blocks.
        places: Tiles of a place; none for no packing.
    """
    if not places:
        return
    copy, homes = manager.parts.copy, manager.parts.transfers.packed_homes
    assert isinstance(copy, StreamCopyEngine)
    room = torch.zeros(3 * places * packedhome.TILE, dtype=torch.uint8)
    flags = torch.zeros(
        packedhome.flags_nbytes(manager.parts.homes.dram.capacity), dtype=torch.uint8
    )
    copy.use_room(room, Extent(1 << 40, 0))
    assert homes.begin(flags.data_ptr())
    homes.kept = room, flags  # type: ignore[attr-defined]


@contextmanager
def packing_always(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has every optimizer pack homes as soon as it chooses anything, whatever copies take.

    For blocks and budgets of any size; where no copies hide behind compute as well.
    """
    patch.setattr(ahead, "_PACKING_PAYS", -1.0)
    patch.setattr(HostCopyEngine, "packs_homes", True)
    patch.setattr(LoopTrial, "for_step", lambda trial, ticket: True)
    patch.setattr(home_packing, "_LEAST", 1024)
    patch.setattr(home_packing, "_LEAST_PLACE", 1)
    patch.setattr(
        ahead.LeftToForward, "_measured", lambda self: Speed(1.0, 2.0, 1e6, 1e6), raising=True
    )
    yield


@contextmanager
def all_packed() -> Iterator[None]:
    """Has every block that is at home in DRAM written there packed, inside ``with``.

    What says which tiles are raw takes no DRAM of the budget, so that budgets stay as they are.
    """
    begin, add = PackedHomes.__init__, ResidencyTable.add

    def begin_packing(self: PackedHomes, *arguments: Any) -> None:
        begin(self, *arguments)
        flags = torch.zeros(
            packedhome.flags_nbytes(self._homes.dram.capacity), dtype=torch.uint8, device="cpu"
        )
        self._kept, self.packs = flags, True  # type: ignore[attr-defined]
        self._raw = self._seen = flags.data_ptr()

    def add_packing(self: ResidencyTable, *arguments: Any, **options: Any) -> Any:
        record = add(self, *arguments, **options)
        record.packs = True
        return record

    with small_tiles() as patch:
        patch.setattr(PackedHomes, "__init__", begin_packing)
        patch.setattr(ResidencyTable, "add", add_packing)
        yield
