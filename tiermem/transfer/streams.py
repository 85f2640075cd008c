"""Copies between HBM and DRAM on their own streams, and what they wait for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from tiermem.core.block import Extent
from tiermem.core.packedhome import ALIGNED, PACKED_TILE, SPILL, TILE, PackedHome
from tiermem.core.packing import GROWS, Packed
from tiermem.errors import InvariantError
from tiermem.storage.arena import DeviceBytes
from tiermem.transfer.copy import POISON, Event
from tiermem.transfer.driver import DriverCalls, StreamCalls
from tiermem.transfer.hosthomes import unpack_home
from tiermem.transfer.packing import Packing

_SPARE_STREAMS: dict[int, list[tuple[int, int, int, int, int]]] = {}
"""Streams of closed engines, by device: up, down, files, for kernels that unpack, and for
those that pack homes."""

_FENCES = 16
PLACES = 3
"""Pieces of homes that are packed or copied at the same time."""


class Fences:
    """Copies from or to HBM on one stream that may not have ended yet, by begin.

    Attributes:
        fences: End and event of each copy, by its begin.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self.fences: dict[int, tuple[int, Event]] = {}
        self._most = _FENCES

    def add(self, extent: Extent, event: Event) -> None:
        """Remembers a copy until a later one takes its place, or there are many.

        A copy of bytes that are not in the arena has an empty extent, and replaces none.
        """
        if not extent.nbytes:
            return
        fences = self.fences
        offset = extent.offset
        end = offset + extent.nbytes
        before = fences.get(offset)
        if before is not None:
            if before[0] > end:
                self._keep_rest(offset, end)
                fences = self.fences
            else:
                del fences[offset]
        fences[offset] = (end, event)  # the last in order: copies of a stream end in order
        if len(fences) > self._most:
            self._tidy()

    def renew(self, offset: int, event: Event) -> bool:
        """Makes the copy that begins at an offset the last one, if the event is that copy's.

        The event is recorded again: it then stands for a later copy than those after it.
        """
        fence = self.fences.get(offset)
        if fence is None or fence[1] is not event:
            return False
        del self.fences[offset]
        self.fences[offset] = fence
        return True

    def last(self, extent: Extent) -> Event | None:
        """Returns the last copy that touches ``extent``; earlier ones have ended when it has."""
        first = extent.offset
        behind = first + extent.nbytes
        for start, (end, event) in reversed(self.fences.items()):
            if start < behind and first < end:
                return event
        return None

    def _keep_rest(self, offset: int, begin: int) -> None:
        """Changes the begin of the copy at ``offset`` to ``begin``, which is inside it."""
        kept: dict[int, tuple[int, Event]] = {}
        for start, (end, event) in self.fences.items():
            if start in (offset, begin):  # if two would begin there, the later one
                reach = kept.pop(begin, (end, event))[0]
                kept[begin] = (max(end, reach), event)
            else:
                kept[start] = (end, event)
        self.fences = kept

    def _tidy(self) -> None:
        """Forgets the copies that have ended."""
        for start, (_, event) in list(self.fences.items()):
            if event.done():
                del self.fences[start]
        self._most = max(_FENCES, 2 * len(self.fences))


class Both:
    """Two events as one, for the host; no stream can wait for it."""

    waiter = -1

    def __init__(self, one: Event, other: Event) -> None:
        """Stores both."""
        self._events = one, other

    def done(self) -> bool:
        """Whether both have completed."""
        return all(event.done() for event in self._events)

    def synchronize(self) -> None:
        """Makes the host wait for both."""
        for event in self._events:
            event.synchronize()


class StreamCopyEngine:
    """Streams for copies up, down and up from files, ordered with compute streams by events.

    An extent of HBM may be written once its last readers have ended: the
    compute submitted so far (an event on each compute stream that was seen) and
    the copies down that still read it (a fence kept for their extent). Copies
    up need not wait for each other: they share a stream. Those from files have
    their own stream, and wait for what was submitted when their read was
    requested: on the stream of the others they would also wait for copies requested since.
    Later users of the place of one that has landed wait for its event.

    What is copied packed is unpacked in place on another stream, after its copy: the next
    copy does not wait for that.

    Attributes:
        calls: The device.
        capturing: Whether the current compute stream is captured into a CUDA graph.
        stream: Returns the handle of the current compute stream.
        hold_up: Makes a known compute stream wait for an event.
    """

    def __init__(
        self,
        calls: StreamCalls,
        up: int,
        down: int,
        files: int,
        unpack: int | None = None,
        pack: int | None = None,
    ) -> None:
        """Uses streams of a device.

        Args:
            calls: The device.
            up: Handle of the stream for copies up.
            down: Handle of the stream for copies down.
            files: Handle of the stream for copies up from files.
            unpack: Handle of the stream for kernels that unpack; None if nothing is packed.
            pack: Handle of the stream for kernels that pack homes; None if no homes are packed.
        """
        self.calls = calls
        self._up = up
        self._down = down
        self._files = files
        self._unpack = unpack
        self._pack = pack
        self._places: list[tuple[int, Event | None]] = []  # address, the last copy from there
        self._place = self._tiles = 0  # bytes of each, and the tiles that are packed there at once
        self._unpacked = Fences()
        self._compute: dict[int, None] = {}
        self._rising = Fences()
        self._landed = Fences()
        self._falling = Fences()
        self._behind: Event | None = None  # the last copy from DRAM not ordered after compute
        self.capturing: Callable[[], bool] = calls.capturing
        self.stream: Callable[[], int] = calls.current
        self.hold_up: Callable[[int, Event], None] = calls.wait

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
        """Submits a copy up; see :class:`CopyEngine`."""
        calls, up = self.calls, self._up
        waits = () if after is None else (after,)
        if self._falling.fences and (before := self._falling.last(extent)) is not None:
            waits = (*waits, before)
        if self._landed.fences and (landed := self._landed.last(extent)) is not None:
            waits = (*waits, landed)
        if self._unpacked.fences and (unpacked := self._unpacked.last(extent)) is not None:
            waits = (*waits, unpacked)
        self._compute[calls.current()] = None
        if again is not None and not self._rising.renew(extent.offset, again):
            again = None  # a file mover may look at it
        to, at = target.data_ptr(), source.data_ptr()
        compute = () if copied else self._compute
        event = calls.copy_behind(up, compute, to, at, target.numel(), again, waits)
        if again is None:
            self._rising.add(extent, event)
        return event

    def up_behind(
        self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Event]
    ) -> Event | None:
        """Submits a copy up that does not wait for compute; see :class:`CopyEngine`."""
        to, at = target.data_ptr(), source.data_ptr()
        event = self.calls.copy_behind(self._files, (), to, at, target.numel(), None, after)
        self._behind = event
        return event

    @property
    def packs(self) -> bool:
        """Whether packed copies can be created here; see :class:`CopyEngine`."""
        return self._unpack is not None and self.calls.can_pack()

    def packing(self, room: torch.Tensor, extent: Extent, piece: int) -> Packing:
        """Returns an object that packs blocks; see :class:`CopyEngine`."""
        streams = self._up, self._kernels(), self._down
        for stream in streams:
            self._follow_compute(stream)
            for event in self._copies(extent):
                self.calls.wait(stream, event)
        return Packing(self.calls, streams, room, piece)

    def up_packed(self, target: torch.Tensor, packed: Packed, extent: Extent) -> Event | None:
        """Submits copies of packed bytes up, and their unpacking; see :class:`CopyEngine`."""
        waits = self._others_at(extent)
        self._compute[self.calls.current()] = None
        event, unpacked = self._up_packed(self._up, self._compute, waits, target, packed)
        self._rising.add(extent, event)
        self._unpacked.add(extent, unpacked)
        return unpacked

    def up_packed_behind(
        self, target: torch.Tensor, packed: Packed, after: Iterable[Event]
    ) -> Event | None:
        """Like :meth:`up_packed`, without waiting for compute; see :class:`CopyEngine`."""
        self._behind, unpacked = self._up_packed(self._files, (), after, target, packed)
        return unpacked

    def _up_packed(
        self,
        copies: int,
        others: Iterable[int],
        waits: Iterable[Event],
        target: torch.Tensor,
        packed: Packed,
    ) -> tuple[Event, Event]:
        """Submits copies and kernels; returns the events of the last copy and of the last kernel.

        Args:
            copies: The stream for the copies.
            others: Streams whose work so far is waited for.
            waits: Events that are waited for.
            target: Device bytes for all parts.
            packed: The packed bytes.
        """
        calls, unpack = self.calls, self._kernels()
        to, event = target.data_ptr() - packed.parts[0].begin, None
        for part in packed.parts:
            at, tiles, source = to + part.begin, part.tiles, packed.address + part.offset
            event = calls.copy_behind(
                copies, others, at + tiles * GROWS, source, part.moved, None, waits
            )
            others, waits = (), ()
            calls.wait(unpack, event)
            if tiles:
                calls.unpack(unpack, at, tiles)
        if event is None:
            raise InvariantError("a packed block has no parts")
        return event, calls.record(unpack)

    def down(
        self, target: torch.Tensor, source: torch.Tensor, extent: Extent, after: Event | None
    ) -> Event | None:
        """Submits a copy down; see :class:`CopyEngine`."""
        calls, down = self.calls, self._down
        waits = () if after is None else (after,)
        self._compute[calls.current()] = None
        to, at = target.data_ptr(), source.data_ptr()
        event = calls.copy_behind(down, self._compute, to, at, target.numel(), None, waits)
        self._falling.add(extent, event)
        return event

    @property
    def packs_homes(self) -> bool:
        """Whether homes can be packed here; see :class:`CopyEngine`."""
        able = self._unpack is not None and self._pack is not None
        return able and self.calls.can_pack_homes()

    def use_room(self, room: torch.Tensor | None, extent: Extent) -> None:
        """Provides device memory for packing homes; see :class:`CopyEngine`."""
        self._places = []
        if room is None:
            return
        pack = self._packs()
        self._follow_compute(pack)
        for event in self._copies(extent):
            self.calls.wait(pack, event)
        at, self._place = room.data_ptr(), room.numel() // PLACES // ALIGNED * ALIGNED
        self._tiles = self._place // TILE - 1  # and what is after the last one
        self._places = [(at + number * self._place, None) for number in range(PLACES)]

    def up_home(
        self,
        target: torch.Tensor,
        home: PackedHome,
        extent: Extent,
        after: Event | None,
        *,
        copied: bool = False,
    ) -> Event | None:
        """Submits copies of a packed home, and its unpacking; see :class:`CopyEngine`."""
        calls, kernels, up = self.calls, self._kernels(), self._up
        waits = self._others_at(extent)
        if after is not None:
            waits = (after, *waits)
        self._compute[calls.current()] = None
        others: Iterable[int] = () if copied else self._compute
        to = target.data_ptr()
        at = to + home.tiles * SPILL
        event = calls.copy_behind(up, others, at, home.address, home.moved, None, waits)
        calls.wait(kernels, event)
        if home.tiles:
            calls.unpack_home(kernels, to, home.tiles, home.spill, home.seen)
        self._rising.add(extent, event)
        unpacked = calls.record(kernels)
        self._unpacked.add(extent, unpacked)
        return unpacked

    def down_home(
        self, home: PackedHome, source: torch.Tensor, extent: Extent, after: Event | None
    ) -> Event | None:
        """Submits the packing of a block, and copies to its home; see :class:`CopyEngine`."""
        calls, kernels = self.calls, self._packs()
        self._follow_compute(kernels)
        if after is not None:
            calls.wait(kernels, after)
        at, event, first = source.data_ptr(), None, 0
        while event is None or first < home.tiles:
            tiles = min(self._tiles, home.tiles - first)
            rest = home.rest if first + tiles == home.tiles else 0
            place, free = self._places[0]
            if free is not None:
                calls.wait(kernels, free)
            calls.pack_home(
                kernels,
                place,
                at + first * TILE,
                tiles,
                rest,
                home.spill + first * SPILL,
                home.raw + first,
                home.seen + first,
            )
            to, nbytes = home.address + first * PACKED_TILE, tiles * PACKED_TILE + rest
            event = calls.copy_behind(self._down, (kernels,), to, place, nbytes)
            # in one assignment: after an interruption anywhere, each place is still known to
            # open_home
            self._places = [*self._places[1:], (place, event)]
            first += tiles
        self._falling.add(extent, event)
        return event

    def open_home(self, home: PackedHome) -> None:
        """Unpacks a home in place, while no copy is in progress; see :class:`CopyEngine`.

        It begins at the end, as unpacking a piece overwrites packed ones before it, and unpacks the
        last bytes of raw tiles at once.
        """
        if not self._places or home.tiles * SPILL > (PLACES - 1) * self._place:
            unpack_home(home, home.address)
            return
        calls, stream = self.calls, self._packs()
        place, spill = sorted(place for place, _ in self._places)[:2]  # a place, and all after it
        calls.copy(stream, spill, home.spill, home.tiles * SPILL)
        for first in range((max(home.tiles, 1) - 1) // self._tiles * self._tiles, -1, -self._tiles):
            tiles = min(self._tiles, home.tiles - first)
            rest = home.rest if first + tiles == home.tiles else 0
            at, nbytes = home.address + first * PACKED_TILE, tiles * PACKED_TILE + rest
            calls.copy(stream, place + tiles * SPILL, at, nbytes)
            if tiles:
                calls.unpack_home(stream, place, tiles, spill + first * SPILL, home.seen + first)
            calls.copy(stream, home.address + first * TILE, place, tiles * TILE + rest)
        self.synchronize()

    def claim(self, extent: Extent) -> None:
        """Makes the current compute stream wait for all other users of ``extent``."""
        stream = self.calls.current()
        for other in self._compute:
            if other != stream:
                self.calls.follow(stream, other)
        for event in self._copies(extent):
            self.calls.wait(stream, event)

    def poison(self, target: torch.Tensor, extent: Extent, *, copied: bool = False) -> None:
        """Sets every bit, on the up stream."""
        self.prepare_up(extent, copied=copied)
        self.calls.fill(self._up, target.data_ptr(), POISON, target.numel())
        self._rising.add(extent, self.calls.record(self._up))

    def prepare_up(self, extent: Extent, *, copied: bool = False) -> None:
        """Makes the up stream wait for every reader of ``extent``."""
        if not copied:
            self._follow_compute(self._up)
        for event in self._copies(extent):
            self.calls.wait(self._up, event)

    def guards(self, extent: Extent) -> tuple[Event, ...]:
        """Returns events after all compute so far, and of copies from and to ``extent``."""
        self._compute[self.calls.current()] = None
        computed = (self.calls.record(stream) for stream in self._compute)
        return (*computed, *self._copies(extent))

    def landed(self, extent: Extent, event: Event) -> None:
        """Stores the event of a file mover's copy up, for later users of the place."""
        self._landed.add(extent, event)

    def prepare_down(self) -> None:
        """Makes the down stream wait for the compute submitted so far."""
        self._follow_compute(self._down)

    def use(self, event: Event | None) -> None:
        """Makes the current compute stream wait for ``event``."""
        stream = self.calls.current()
        self._compute[stream] = None
        if event is not None and event.waiter != stream:  # else it waits already
            self.calls.wait(stream, event)

    def wait(self, event: Event | None) -> None:
        """Makes the host wait for ``event``."""
        if event is not None:
            event.synchronize()

    def risen(self) -> Event | None:
        """Returns an event for the host that marks the end of all copies up from DRAM so far."""
        if self._unpack is None or not self._unpacked.fences:
            event = self.calls.record(self._up)
        else:
            self.calls.follow(self._unpack, self._up)
            event = self.calls.record(self._unpack)
        if self._behind is not None and self._behind.done():
            self._behind = None
        return event if self._behind is None else Both(event, self._behind)

    def mark(self) -> Event | None:
        """Returns an event after all work that the current compute stream has so far."""
        return self.calls.record(self.calls.current())

    def seen(self, source: torch.Tensor) -> torch.Tensor | None:
        """Returns the bytes themselves: the stand-in's memory is the host's."""
        return source

    def synchronize(self) -> None:
        """Makes the host wait for all copies and the device's compute."""
        self.calls.synchronize()

    def copy_up(self, target: torch.Tensor, source: torch.Tensor, after: Iterable[Event]) -> Event:
        """Submits a copy up of a part of a file, from any thread.

        Args:
            target: Device bytes.
            source: Host bytes.
            after: The events to wait for: :meth:`guards` at the time when the read was requested.
        """
        for event in after:
            self.calls.wait(self._files, event)
        self.calls.copy(self._files, target.data_ptr(), source.data_ptr(), target.numel())
        return self.calls.record(self._files)

    def copy_down(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        """Submits a copy down; the work that orders it has been submitted before."""
        self.calls.copy(self._down, target.data_ptr(), source.data_ptr(), target.numel())
        return self.calls.record(self._down)

    def _copies(self, extent: Extent) -> Iterator[Event]:
        """Yields the last copies from and to ``extent``, one of each stream."""
        for fences in (self._rising, self._landed, self._falling, self._unpacked):
            event = fences.last(extent) if fences.fences else None
            if event is not None:
                yield event

    def _others_at(self, extent: Extent) -> tuple[Event, ...]:
        """Returns the last copies from and to ``extent`` that are not on the stream up."""
        return tuple(
            event
            for fences in (self._falling, self._landed, self._unpacked)
            if fences.fences and (event := fences.last(extent)) is not None
        )

    def _kernels(self) -> int:
        """Returns the stream for kernels that unpack."""
        if self._unpack is None:
            raise InvariantError("nothing is packed here")
        return self._unpack

    def _packs(self) -> int:
        """Returns the stream for kernels that pack homes."""
        if self._pack is None:
            raise InvariantError("no homes are packed here")
        return self._pack

    def _follow_compute(self, copies: int) -> None:
        """Makes a copy stream wait for the compute submitted so far."""
        self._compute[self.calls.current()] = None
        for stream in self._compute:
            self.calls.follow(copies, stream)


class CudaCopyEngine(StreamCopyEngine):
    """The engine of a CUDA device.

    Attributes:
        device: The device.
        up_stream: Stream of the copies up.
        down_stream: Stream of the copies down.
    """

    def __init__(self, device: torch.device) -> None:
        """Creates the streams, or takes those of a closed engine."""
        self.device = device
        calls = DriverCalls(device)
        spare = _SPARE_STREAMS.setdefault(calls.index, [])
        if not spare:
            up, down, files = (calls.new_stream() for _ in range(3))
            unpack, pack = (calls.new_stream(first=True) for _ in range(2))
            spare.append((up, down, files, unpack, pack))
        up, down, files, unpack, pack = streams = spare.pop()
        self.up_stream: torch.cuda.Stream = torch.cuda.ExternalStream(up, calls.index)
        self.down_stream: torch.cuda.Stream = torch.cuda.ExternalStream(down, calls.index)
        super().__init__(calls, up, down, files, unpack, pack)
        self._reaches = calls.reaches
        # streams are not destroyed: there may still be events of theirs
        weakref.finalize(self, spare.append, streams)

    def seen(self, source: torch.Tensor) -> torch.Tensor | None:
        """Returns host bytes as kernels see them, at the same address.

        Not every system has page-locked memory at that address for the device, and torch has to
        treat it as memory of this device.
        """
        if not self._reaches(source.data_ptr()):
            return None
        with torch._C.DisableTorchFunction():  # a default device of the user's would copy it there
            found = torch.as_tensor(DeviceBytes(source, source.data_ptr(), source.numel()))
        return found if found.device == self.up_stream.device else None


class CudaChunkCopier:
    """Copies staging chunks to and from HBM on the copy engine's streams.

    Attributes:
        device_only: Whether a file mover leaves copies of host memory to its helper threads.
    """

    device_only = True

    def __init__(self, engine: StreamCopyEngine) -> None:
        """Uses the streams of ``engine``; its owner orders copies down beforehand."""
        self._engine = engine

    def to_target(
        self, target: torch.Tensor, staging: torch.Tensor, after: Sequence[Event] = ()
    ) -> StreamFence:
        """Copies a chunk up."""
        return StreamFence(self._engine.copy_up(target, staging, after))

    def from_source(self, staging: torch.Tensor, source: torch.Tensor) -> StreamFence:
        """Copies a chunk down."""
        return StreamFence(self._engine.copy_down(staging, source))


class StreamFence:
    """A copy on a stream, as the file mover sees it.

    Attributes:
        event: The copy's, for other streams.
    """

    def __init__(self, event: Event) -> None:
        """Stores the copy's event."""
        self.event: Event | None = event
        self._event = event

    def done(self) -> bool:
        """Whether the copy has ended."""
        return self._event.done()

    def wait(self) -> None:
        """Waits until the copy has ended."""
        self._event.synchronize()
