"""Copies between HBM and DRAM: in line on the CPU, on streams of their own on CUDA.

Both engines are ordered by streams, not by the host: a copy counts as made
once it is submitted, and whoever touches its bytes waits on its event. On the
CPU there is nothing to wait for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch

from tiermem.core.block import Extent

POISON = 0xFF
"""Fills what must not be read: NaN in every float format, -1 in the integers."""

Event = torch.cuda.Event
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


class CopyEngine(Protocol):
    """Moves bytes between device memory and host memory."""

    def up(
        self, target: torch.Tensor, source: torch.Tensor, extent: Extent, after: Event | None
    ) -> Event | None:
        """Copies host bytes into the HBM ``extent`` that ``target`` covers.

        Args:
            target: Device bytes.
            source: Host bytes.
            extent: Where ``target`` is, so that earlier readers are waited for.
            after: Event of the last write to ``source``.
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
        """Makes the current compute stream wait for copies from and to ``extent``.

        Compute is about to write there, and what was there before may still be on its way.
        """
        ...

    def poison(self, target: torch.Tensor, extent: Extent) -> None:
        """Sets every bit of the HBM ``extent`` that ``target`` covers, after its last readers."""
        ...

    def prepare_up(self, extent: Extent) -> None:
        """Orders copies that another thread will submit after the extent's last readers."""
        ...

    def prepare_down(self) -> None:
        """Orders copies that another thread will submit after the compute so far."""
        ...

    def use(self, event: Event | None) -> None:
        """Makes the current compute stream wait for ``event``; the host does not wait."""
        ...

    def wait(self, event: Event | None) -> None:
        """Makes the host wait for ``event``."""
        ...

    def synchronize(self) -> None:
        """Makes the host wait for everything submitted."""
        ...


class HostCopyEngine:
    """The engine of ``device="cpu"``: plain copies, over when they return."""

    def up(
        self, target: torch.Tensor, source: torch.Tensor, extent: Extent, after: Event | None
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

    def poison(self, target: torch.Tensor, extent: Extent) -> None:
        """Sets every bit of ``target``."""
        ctypes.memset(target.data_ptr(), POISON, target.numel())

    def prepare_up(self, extent: Extent) -> None:
        """Nothing to order."""

    def prepare_down(self) -> None:
        """Nothing to order."""

    def use(self, event: Event | None) -> None:
        """Nothing to wait for."""

    def wait(self, event: Event | None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class CudaCopyEngine:
    """One stream up, one down, events between them and the compute streams.

    An extent of HBM may be written once its last readers are through: the
    compute submitted so far (a mark on each compute stream that was seen) and
    the copies down that still read it (a fence kept for their extent).
    """

    def __init__(self, device: torch.device) -> None:
        """Makes the streams."""
        self.device = device
        self.up_stream = torch.cuda.Stream(device)
        self.down_stream = torch.cuda.Stream(device)
        self._compute: dict[int, torch.cuda.Stream] = {}
        self._fences: list[tuple[int, int, Event]] = []

    def up(
        self, target: torch.Tensor, source: torch.Tensor, extent: Extent, after: Event | None
    ) -> Event | None:
        """Submits a copy up; see :class:`CopyEngine`."""
        self.prepare_up(extent)
        if after is not None:
            self.up_stream.wait_event(after)
        event = self._copy(self.up_stream, target, source)
        self._fence(extent, event)
        return event

    def down(
        self, target: torch.Tensor, source: torch.Tensor, extent: Extent, after: Event | None
    ) -> Event | None:
        """Submits a copy down; see :class:`CopyEngine`."""
        self.prepare_down()
        if after is not None:
            self.down_stream.wait_event(after)
        event = self._copy(self.down_stream, target, source)
        self._fence(extent, event)
        return event

    def claim(self, extent: Extent) -> None:
        """Makes the current compute stream wait for copies from and to ``extent``."""
        stream = torch.cuda.current_stream(self.device)
        for event in self._fences_of(extent):
            stream.wait_event(event)

    def poison(self, target: torch.Tensor, extent: Extent) -> None:
        """Sets every bit, on the up stream."""
        self.prepare_up(extent)
        event = Event()
        with torch.cuda.stream(self.up_stream):
            target.fill_(POISON)
            event.record(self.up_stream)
        self._fence(extent, event)

    def prepare_up(self, extent: Extent) -> None:
        """Makes the up stream wait for every reader of ``extent``."""
        for mark in self._marks():
            self.up_stream.wait_event(mark)
        for event in self._fences_of(extent):
            self.up_stream.wait_event(event)

    def prepare_down(self) -> None:
        """Makes the down stream wait for the compute submitted so far."""
        for mark in self._marks():
            self.down_stream.wait_event(mark)

    def use(self, event: Event | None) -> None:
        """Makes the current compute stream wait for ``event``."""
        stream = torch.cuda.current_stream(self.device)
        self._compute.setdefault(stream.stream_id, stream)
        if event is not None:
            stream.wait_event(event)

    def wait(self, event: Event | None) -> None:
        """Makes the host wait for ``event``."""
        if event is not None:
            event.synchronize()

    def synchronize(self) -> None:
        """Makes the host wait for both copy streams and the device's compute."""
        torch.cuda.synchronize(self.device)

    def _fence(self, extent: Extent, event: Event) -> None:
        """Remembers a copy from or to an extent until it is over."""
        if len(self._fences) > 64:
            self._fences = [fence for fence in self._fences if not fence[2].query()]
        self._fences.append((extent.offset, extent.end, event))

    def _fences_of(self, extent: Extent) -> list[Event]:
        return [e for start, end, e in self._fences if start < extent.end and extent.offset < end]

    def _marks(self) -> Sequence[Event]:
        self.use(None)
        marks = []
        for stream in self._compute.values():
            mark = Event()
            mark.record(stream)
            marks.append(mark)
        return marks

    def _copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> Event:
        event = Event()
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event.record(stream)
        return event


class StreamFence:
    """A copy on a stream, as the file mover sees it."""

    def __init__(self, event: Event) -> None:
        """Keeps the copy's event."""
        self._event = event

    def done(self) -> bool:
        """Whether the copy is over."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Waits until it is over."""
        self._event.synchronize()


class CudaChunkCopier:
    """Copies staging chunks to and from HBM on the copy engine's streams."""

    def __init__(self, engine: CudaCopyEngine) -> None:
        """Uses the streams of ``engine``, whose owner orders them before a transfer begins."""
        self._engine = engine

    def to_target(self, target: torch.Tensor, staging: torch.Tensor) -> StreamFence:
        """Copies a chunk up."""
        return StreamFence(self._engine._copy(self._engine.up_stream, target, staging))

    def from_source(self, staging: torch.Tensor, source: torch.Tensor) -> StreamFence:
        """Copies a chunk down."""
        return StreamFence(self._engine._copy(self._engine.down_stream, staging, source))
