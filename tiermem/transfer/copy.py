"""Copies between HBM and DRAM: what an engine of copies does, and the one of the CPU, in line.

Engines are ordered by streams, not by the host: a copy counts as made once it is submitted, and
later users of its bytes wait for its event. On the CPU there is nothing to wait for. The engine of
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
"""Fills what must not be read: NaN in every float format, -1 in the integers."""

Event = Signal
"""What a copy leaves behind; None where it is over already."""


def host_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies host bytes in the calling thread, without the GIL.

    torch's own copy would wake a team of threads, and wait for all of them: on cores that are
    busy with something else that takes longer than the copy.

    Args:
        target: 1-D contiguous uint8.
        source: The same, of the same length.
    """
    ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())


class Packer(Protocol):
    """Packs blocks that lie in host memory."""

    def pack(self, source: torch.Tensor, target: torch.Tensor, parts: Sequence[Part]) -> None:
        """Begins to pack a block; what has come of it is there once all copies are over.

        Args:
            source: The block's bytes in host memory.
            target: Host memory for the packed form.
            parts: In which it is packed.
        """
        ...


class CopyEngine(Protocol):
    """Moves bytes between device memory and host memory."""

    @property
    def packs(self) -> bool:
        """Whether it can make packed copies of blocks, and bring them up."""
        ...

    def packing(self, room: torch.Tensor, extent: Extent, piece: int) -> Packer:
        """Returns what packs blocks.

        Args:
            room: Device bytes that it works with; earlier readers are waited for.
            extent: Where they are.
            piece: Tiles that are packed at once.
        """
        ...

    def up_packed(self, target: torch.Tensor, packed: Packed, extent: Extent) -> Event | None:
        """Does what :meth:`up` does with a block that is packed.

        Args:
            target: Device bytes.
            packed: What comes there.
            extent: Where ``target`` is.
        """
        ...

    def up_packed_behind(
        self, target: torch.Tensor, packed: Packed, after: Iterable[Event]
    ) -> Event | None:
        """Does what :meth:`up_behind` does with a block, or a part of one, that is packed.

        Args:
            target: Device bytes.
            packed: What comes there.
            after: :meth:`guards` of when the last reader of ``target`` had been submitted, and
                the event of what came there before.
        """
        ...

    @property
    def packs_homes(self) -> bool:
        """Whether blocks can be written home packed, and brought up from there."""
        ...

    def use_room(self, room: torch.Tensor | None, extent: Extent) -> None:
        """Gives it device memory to pack homes in, before the first :meth:`down_home`.

        Args:
            room: Device bytes, which are its own until the next call, after which nothing must
                be under way there; earlier readers are waited for. None takes it away.
            extent: Where they are.
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
        """Does what :meth:`up` does with a home that lies packed.

        Args:
            target: Device bytes.
            home: What comes there.
            extent: Where ``target`` is.
            after: What it waits for.
            copied: As for :meth:`up`.
        """
        ...

    def down_home(
        self, home: PackedHome, source: torch.Tensor, extent: Extent, after: Event | None
    ) -> Event | None:
        """Does what :meth:`down` does, and packs what comes home.

        Args:
            home: Where it goes.
            source: Device bytes.
            extent: Where ``source`` is.
            after: What it waits for.
        """
        ...

    def open_home(self, home: PackedHome) -> None:
        """Unpacks a home where it is; returns when that is over.

        Args:
            home: The home; no copy from or to it is under way.
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
            extent: Where ``target`` is, so that earlier readers are waited for.
            after: Event of the last write to ``source``.
            again: Event of an earlier copy up that is no longer asked about; may be recorded anew.
            copied: Whether nothing but copies down has used the place since compute did: those have
                waited for that, and are waited for alone.
        """
        ...

    def up_behind(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Event]
    ) -> Event | None:
        """Copies host bytes into HBM behind events alone, not behind what compute has since.

        Args:
            target: Device bytes.
            source: Host bytes.
            after: :meth:`guards` of when the last reader of ``target`` had been submitted, the
                event of what came there before, and that of the last write to ``source``.
        """
        ...

    def down(
        self, target: torch.Tensor, source: torch.Tensor, extent: Extent, after: Event | None
    ) -> Event | None:
        """Copies the HBM ``extent`` that ``source`` covers into host bytes.

        Args:
            target: Host bytes.
            source: Device bytes.
            extent: Where ``source`` is, so that it is not overwritten too soon.
            after: Event of the copy that brought ``source`` up.
        """
        ...

    def claim(self, extent: Extent) -> None:
        """Makes the current compute stream wait for whatever else uses ``extent``.

        Compute is about to write there; copies from and to it, and other compute streams that
        read what was there before, may not be through.
        """
        ...

    def poison(self, target: torch.Tensor, extent: Extent, *, copied: bool = False) -> None:
        """Sets every bit of the HBM ``extent`` that ``target`` covers, after its last readers.

        Args:
            target: Device bytes.
            extent: Where ``target`` is.
            copied: As for :meth:`up`.
        """
        ...

    def guards(self, extent: Extent) -> tuple[Event, ...]:
        """Returns the events that a copy into ``extent``, submitted later, has to wait for."""
        ...

    def landed(self, extent: Extent, event: Event) -> None:
        """Notes that a copy from a file into ``extent`` is over when ``event`` has passed."""
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
        """Returns an event of when every copy up from DRAM so far has been made, for the host."""
        ...

    def mark(self) -> Event | None:
        """Returns an event of when what the current compute stream has so far is over."""
        ...

    def seen(self, source: torch.Tensor) -> torch.Tensor | None:
        """Returns host bytes as kernels see them where they lie; None where they cannot.

        Args:
            source: 1-D uint8, page-locked.
        """
        ...

    def synchronize(self) -> None:
        """Makes the host wait for everything submitted."""
        ...

    def capturing(self) -> bool:
        """Whether what is submitted now is recorded into a CUDA graph instead of run."""
        ...

    def stream(self) -> int:
        """Returns a number of the calling thread's compute stream."""
        ...


class HostCopyEngine:
    """The engine of ``device="cpu"``: plain copies, over when they return.

    Attributes:
        capturing: Nothing is ever recorded.
        stream: There is one.
        packs_homes: It takes the host longer than the copies; only tests have it done.
    """

    capturing: Callable[[], bool] = bool
    stream: Callable[[], int] = int
    packs = False
    packs_homes = False

    def packing(self, room: torch.Tensor, extent: Extent, piece: int) -> Packer:
        """Packs nothing.

        Raises:
            InvariantError: Always: the host's copies take as long as unpacking would.
        """
        raise InvariantError("host copies are not packed")

    def up_packed(self, target: torch.Tensor, packed: Packed, extent: Extent) -> Event | None:
        """Raises what :meth:`packing` does."""
        raise InvariantError("host copies are not packed")

    def up_packed_behind(
        self, target: torch.Tensor, packed: Packed, after: Iterable[Event]
    ) -> Event | None:
        """Raises what :meth:`packing` does."""
        raise InvariantError("host copies are not packed")

    def use_room(self, room: torch.Tensor | None, extent: Extent) -> None:
        """Needs none."""

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
        """Unpacks a home where it is."""
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
        """Does what :meth:`use` does."""
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
