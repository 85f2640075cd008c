"""Copies between HBM and DRAM: the interface of a copy engine, and the engine of the CPU.

Engines are ordered by streams, not by the host: a copy counts as complete once it is submitted, and
later users of its bytes wait for its event. On the CPU copies are synchronous. The engine for
CUDA is in :mod:`tiermem.transfer.streams`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from tiermem.core.block import Extent
from tiermem.core.packedhome import PackedHome
from tiermem.core.packing import Packed, Part
from tiermem.errors import InvariantError
from tiermem.transfer.driver import Signal
from tiermem.transfer.hosthomes import pack_home, unpack_home

POISON = 0xFF
"""Overwrites bytes that must not be read: NaN in every float format, -1 in the integers."""

Event = Signal
"""The event of a copy; None if the copy is already complete."""


def host_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies host bytes in the calling thread, without the GIL.

    torch's own copy would wake several threads, and wait for all of them: on cores that are
    busy with other work that takes longer than the copy.

    Args:
        target: 1-D contiguous uint8.
        source: The same, of the same length.
    """
    ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())


class Packer(Protocol):
    """Packs blocks that are in host memory."""

    def pack(self, source: torch.Tensor, target: torch.Tensor, parts: Sequence[Part]) -> None:
        """Begins to pack a block; the result is valid when all copies have ended.

        Args:
            source: The block's bytes in host memory.
            target: Host memory for the packed form.
            parts: The parts in which it is packed.
        """
        ...


class CopyEngine(Protocol):
    """Moves bytes between device memory and host memory."""

    @property
    def packs(self) -> bool:
        """Whether it can create packed copies of blocks, and copy them to the device."""
        ...

    def packing(self, room: torch.Tensor, extent: Extent, piece: int) -> Packer:
        """Returns an object that packs blocks.

        Args:
            room: Device bytes that it works with; earlier readers are waited for.
            extent: The extent of ``room``.
            piece: How many tiles are packed at once.
        """
        ...

    def up_packed(self, target: torch.Tensor, packed: Packed, extent: Extent) -> Event | None:
        """Does the same as :meth:`up` with a packed block.

        Args:
            target: Device bytes.
            packed: The packed block.
            extent: The extent of ``target``.
        """
        ...

    def up_packed_behind(
        self, target: torch.Tensor, packed: Packed, after: Iterable[Event]
    ) -> Event | None:
        """Does the same as :meth:`up_behind` with a packed block, or a part of one.

        Args:
            target: Device bytes.
            packed: The packed bytes.
            after: :meth:`guards` at the time when the last reader of ``target`` had been submitted,
                and the event of the previous copy to it.
        """
        ...

    @property
    def packs_homes(self) -> bool:
        """Whether blocks can be written home packed, and fetched from there."""
        ...

    def use_room(self, room: torch.Tensor | None, extent: Extent) -> None:
        """Provides device memory for packing homes, before the first :meth:`down_home`.

        Args:
            room: Device bytes, which the engine owns until the next call, at which no transfer may
                use them; earlier readers are waited for. None takes the memory away.
            extent: The extent of ``room``.
        """
        ...

    def up_home(
        self,
        target: torch.Tensor,
        home: PackedHome,
        extent: Extent,
        after: Event | None,
        *,
        copied: bool = False,
    ) -> Event | None:
        """Does the same as :meth:`up` with a packed home.

        Args:
            target: Device bytes.
            home: The packed home.
            extent: The extent of ``target``.
            after: The event that it waits for.
            copied: As for :meth:`up`.
        """
        ...

    def down_home(
        self, home: PackedHome, source: torch.Tensor, extent: Extent, after: Event | None
    ) -> Event | None:
        """Does the same as :meth:`down`, and packs the bytes.

        Args:
            home: The target.
            source: Device bytes.
            extent: The extent of ``source``.
            after: The event that it waits for.
        """
        ...

    def open_home(self, home: PackedHome) -> None:
        """Unpacks a home in place; returns when it is done.

        Args:
            home: The home; no copy from or to it is in progress.
        """
        ...

    def up(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        extent: Extent,
        after: Event | None,
        again: Event | None = None,
        *,
        copied: bool = False,
    ) -> Event | None:
        """Copies host bytes into the HBM ``extent`` that ``target`` covers.

        Args:
            target: Device bytes.
            source: Host bytes.
            extent: The extent of ``target``, whose earlier readers are waited for.
            after: Event of the last write to ``source``.
            again: Event of an earlier copy up that is no longer needed; may be recorded again.
            copied: Whether only copies down have used the place since compute did: as they have
                waited for compute, only they are waited for.
        """
        ...

    def up_behind(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Event]
    ) -> Event | None:
        """Copies host bytes into HBM after events only, not after later compute.

        Args:
            target: Device bytes.
            source: Host bytes.
            after: :meth:`guards` at the time when the last reader of ``target`` had been submitted,
                the event of the previous copy to it, and that of the last write to ``source``.
        """
        ...

    def down(
        self, target: torch.Tensor, source: torch.Tensor, extent: Extent, after: Event | None
    ) -> Event | None:
        """Copies the HBM ``extent`` that ``source`` covers into host bytes.

        Args:
            target: Host bytes.
            source: Device bytes.
            extent: The extent of ``source``, which must not be overwritten too soon.
            after: Event of the copy to ``source``.
        """
        ...

    def claim(self, extent: Extent) -> None:
        """Makes the current compute stream wait for all other users of ``extent``.

        Compute is about to write there; copies from and to it, and other compute streams that
        read its former contents, may not have ended.
        """
        ...

    def poison(self, target: torch.Tensor, extent: Extent, *, copied: bool = False) -> None:
        """Sets every bit of the HBM ``extent`` that ``target`` covers, after its last readers.

        Args:
            target: Device bytes.
            extent: The extent of ``target``.
            copied: As for :meth:`up`.
        """
        ...

    def guards(self, extent: Extent) -> tuple[Event, ...]:
        """Returns the events that a copy into ``extent``, submitted later, has to wait for."""
        ...

    def landed(self, extent: Extent, event: Event) -> None:
        """Notes that a copy from a file into ``extent`` has ended when ``event`` has passed."""
        ...

    def prepare_down(self) -> None:
        """Orders copies that another thread will submit after the compute so far."""
        ...

    def use(self, event: Event | None) -> None:
        """Makes the current compute stream wait for ``event``; the host does not wait."""
        ...

    def hold_up(self, stream: int, event: Event) -> None:
        """Makes a compute stream wait for ``event``, for which :meth:`use` was called before."""
        ...

    def wait(self, event: Event | None) -> None:
        """Makes the host wait for ``event``."""
        ...

    def risen(self) -> Event | None:
        """Returns an event for the host that marks the end of all copies up from DRAM so far."""
        ...

    def mark(self) -> Event | None:
        """Returns an event after all work that the current compute stream has so far."""
        ...

    def seen(self, source: torch.Tensor) -> torch.Tensor | None:
        """Returns host bytes as kernels see them in place; None if kernels cannot.

        Args:
            source: 1-D uint8, page-locked.
        """
        ...

    def synchronize(self) -> None:
        """Makes the host wait for everything submitted."""
        ...

    def capturing(self) -> bool:
        """Whether submitted work is captured into a CUDA graph instead of run."""
        ...

    def stream(self) -> int:
        """Returns a number of the calling thread's compute stream."""
        ...


class HostCopyEngine:
    """The engine of ``device="cpu"``: synchronous copies.

    Attributes:
        capturing: Always false.
        stream: The only stream.
        packs_homes: Packing takes the host longer than the copies; only tests use it.
    """

    capturing: Callable[[], bool] = bool
    stream: Callable[[], int] = int
    packs = False
    packs_homes = False

    def packing(self, room: torch.Tensor, extent: Extent, piece: int) -> Packer:
        """Always raises.

        Raises:
            InvariantError: Always: the host's copies take as long as unpacking would.
        """
        raise InvariantError("host copies are not packed")

    def up_packed(self, target: torch.Tensor, packed: Packed, extent: Extent) -> Event | None:
        """Raises the error of :meth:`packing`."""
        raise InvariantError("host copies are not packed")

    def up_packed_behind(
        self, target: torch.Tensor, packed: Packed, after: Iterable[Event]
    ) -> Event | None:
        """Raises the error of :meth:`packing`."""
        raise InvariantError("host copies are not packed")

    def use_room(self, room: torch.Tensor | None, extent: Extent) -> None:
        """Does nothing: no device memory is needed."""

    def up_home(
        self,
        target: torch.Tensor,
        home: PackedHome,
        extent: Extent,
        after: Event | None,
        *,
        copied: bool = False,
    ) -> Event | None:
        """Unpacks a home into ``target``."""
        unpack_home(home, target.data_ptr())
        return None

    def down_home(
        self, home: PackedHome, source: torch.Tensor, extent: Extent, after: Event | None
    ) -> Event | None:
        """Packs ``source`` into a home."""
        pack_home(home, source.data_ptr())
        return None

    def open_home(self, home: PackedHome) -> None:
        """Unpacks a home in place."""
        unpack_home(home, home.address)

    def up(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        extent: Extent,
        after: Event | None,
        again: Event | None = None,
        *,
        copied: bool = False,
    ) -> Event | None:
        """Copies ``source`` into ``target``."""
        host_copy(target, source)
        return None

    def up_behind(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Event]
    ) -> Event | None:
        """Copies ``source`` into ``target``."""
        host_copy(target, source)
        return None

    def down(
        self, target: torch.Tensor, source: torch.Tensor, extent: Extent, after: Event | None
    ) -> Event | None:
        """Copies ``source`` into ``target``."""
        host_copy(target, source)
        return None

    def claim(self, extent: Extent) -> None:
        """Nothing to wait for."""

    def poison(self, target: torch.Tensor, extent: Extent, *, copied: bool = False) -> None:
        """Sets every bit of ``target``."""
        ctypes.memset(target.data_ptr(), POISON, target.numel())

    def guards(self, extent: Extent) -> tuple[Event, ...]:
        """Nothing to wait for."""
        return ()

    def landed(self, extent: Extent, event: Event) -> None:
        """Nothing to remember."""

    def prepare_down(self) -> None:
        """Nothing to order."""

    def use(self, event: Event | None) -> None:
        """Nothing to wait for."""

    def hold_up(self, stream: int, event: Event) -> None:
        """Like :meth:`use`."""
        self.use(event)

    def wait(self, event: Event | None) -> None:
        """Nothing to wait for."""

    def risen(self) -> Event | None:
        """Nothing to wait for."""
        return None

    def mark(self) -> Event | None:
        """Nothing to wait for."""
        return None

    def seen(self, source: torch.Tensor) -> torch.Tensor | None:
        """Returns the bytes themselves."""
        return source

    def synchronize(self) -> None:
        """Nothing to wait for."""
