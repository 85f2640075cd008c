"""The CUDA driver's calls for streams and events, at a microsecond each.

Through torch, a copy on another stream costs the host about ten times as much:
a context for the stream, a look-up of the device, objects for the events. The
driver's functions take the same handles (``torch.cuda.Stream.cuda_stream``) and
mix freely with torch's own calls. Signatures are those of the CUDA driver API
reference, sections "Stream Management", "Event Management" and "Memory Management".
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch

from tiermem.errors import ConfigError, InvariantError, TierError
from tiermem.transfer.homekernels import HomeKernels, load_home_kernels
from tiermem.transfer.kernels import PackingKernels, load_kernels

_NO_TIMING = 2
_NON_BLOCKING = 1
_NOT_READY = 600
_DEVICE_POINTER = 3
_FIRST = -1000
"""A priority higher than all others: the driver uses the nearest that exists."""

_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)


class Event:
    """A point in the work of a stream.

    Attributes:
        handle: The driver's handle.
        waiter: The stream that was last made to wait for it; it need not wait twice.
    """

    __slots__ = ("_calls", "_over", "handle", "waiter")

    def __init__(self, calls: DriverCalls, handle: int) -> None:
        """Wraps a handle, which is returned to ``calls`` when this object is freed."""
        self._calls = calls
        self._over = False
        self.handle = handle
        self.waiter = -1

    def done(self) -> bool:
        """Whether the stream has reached it."""
        if not self._over:
            self._over = self._calls.passed(self.handle)
        return self._over

    def synchronize(self) -> None:
        """Makes the host wait until the stream has reached it."""
        if not self._over:
            self._calls.wait_for(self.handle)
            self._over = True

    def __del__(self) -> None:
        # nobody can wait for it any more, and earlier waits keep their meaning
        self._calls.spare.append(self.handle)


def _destroy(library: Any, events: Iterable[int], process: int) -> None:
    """Destroys events; streams that still wait for one keep their meaning of it."""
    if os.getpid() == process:  # a forked child has no driver
        for event in events:
            library.cuEventDestroy_v2(event)


class _Thread(threading.local):
    """State of each thread: whether it has a context."""

    bound = False


class Signal(Protocol):
    """A recorded event of any device."""

    waiter: int

    def done(self) -> bool:
        """Whether the stream has reached it."""
        ...

    def synchronize(self) -> None:
        """Makes the host wait until the stream has reached it."""
        ...


class StreamCalls(Protocol):
    """The stream and event calls that the copy engine needs. Streams are named by handles."""

    def current(self) -> int:
        """Returns the calling thread's compute stream."""
        ...

    def record(self, stream: int, again: Any = None) -> Signal:
        """Marks the end of what was submitted to ``stream`` so far.

        Args:
            stream: The stream.
            again: An event of the same stream to record again, and to return; for its other holders
                it then means this later point. Waits submitted before keep their meaning.
        """
        ...

    def wait(self, stream: int, event: Any) -> None:
        """Makes ``stream`` wait for ``event`` from now on; the host does not wait."""
        ...

    def follow(self, stream: int, other: int) -> None:
        """Makes ``stream`` wait from now on for what was submitted to ``other`` so far."""
        ...

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Submits a copy between addresses of the device and of page-locked memory."""
        ...

    def copy_behind(
        self,
        stream: int,
        others: Iterable[int],
        target: int,
        source: int,
        nbytes: int,
        again: Any = None,
        after: Iterable[Any] = (),
    ) -> Signal:
        """Submits a copy that waits for events and for the work so far of other streams.

        Does the same as :meth:`wait` for each of ``after``, :meth:`follow` for each of ``others``,
        :meth:`copy` and :meth:`record`.

        Returns:
            The event of its end.
        """
        ...

    def fill(self, stream: int, target: int, value: int, nbytes: int) -> None:
        """Submits setting every byte of device memory to ``value``."""
        ...

    def can_pack(self) -> bool:
        """Whether there are kernels for :meth:`pack` and :meth:`unpack`."""
        ...

    def pack(self, stream: int, target: int, source: int, tiles: int, spoiled: int) -> None:
        """Submits a kernel that packs tiles.

        Args:
            stream: The stream.
            target: Device address for the packed form.
            source: Device address of the words.
            tiles: The number of tiles.
            spoiled: Device address of four bytes that become 1 if a tile cannot be packed.
        """
        ...

    def unpack(self, stream: int, target: int, tiles: int) -> None:
        """Submits a kernel that unpacks tiles in place.

        Args:
            stream: The stream; always the same.
            target: Device address for the words; the packed tiles are at the end of this memory.
            tiles: The number of tiles, at least one.
        """
        ...

    def can_pack_homes(self) -> bool:
        """Whether there are kernels for :meth:`pack_home` and :meth:`unpack_home`."""
        ...

    def pack_home(
        self,
        stream: int,
        target: int,
        source: int,
        tiles: int,
        rest: int,
        spill: int,
        raw: int,
        seen: int,
    ) -> None:
        """Submits a kernel that packs a piece of a home.

        Args:
            stream: The stream.
            target: Device address for the packed form.
            source: Device address of the words.
            tiles: The number of tiles.
            rest: Bytes after the tiles.
            spill: Host address for the last bytes of raw tiles.
            raw: Host address of a byte for each tile, which says whether it is raw.
            seen: Device address of as many bytes with the same meaning, or ``raw``.
        """
        ...

    def unpack_home(self, stream: int, target: int, tiles: int, spill: int, seen: int) -> None:
        """Submits a kernel that unpacks tiles of a home in place.

        Args:
            stream: The stream; always the same.
            target: Device address for the words; the packed tiles are at the end of this memory.
            tiles: The number of tiles, at least one.
            spill: Host address of the last bytes of raw tiles.
            seen: Address of a byte for each tile, which says whether it is raw.
        """
        ...

    def synchronize(self) -> None:
        """Makes the host wait for everything on the device."""
        ...

    def capturing(self) -> bool:
        """Whether the current compute stream is captured into a graph."""
        ...

    def new_event(self, *, timing: bool = False) -> int:
        """Creates an event for :meth:`mark`; it exists as long as these calls do.

        Args:
            timing: Whether :meth:`seconds` may be called for it.
        """
        ...

    def mark(self, event: int, stream: int) -> None:
        """Records ``event`` after what was submitted to ``stream`` so far."""
        ...

    def passed(self, event: int) -> bool:
        """Whether the stream has reached an event."""
        ...

    def seconds(self, first: int, second: int) -> float:
        """Returns the time between two timing events that the stream has reached."""
        ...


class DriverCalls:
    """The calls of one device.

    Attributes:
        spare: Event handles that are not in use.
        current: Returns the calling thread's compute stream.
        capturing: Whether that is captured into a CUDA graph. It asks about the stream of the
            current
            device: a capture on another device does not concern these calls.
    """

    def __init__(self, device: torch.device) -> None:
        """Loads the driver's library.

        Args:
            device: A CUDA device; ``cuda`` without a number is the current one.

        Raises:
            ConfigError: If no CUDA driver can be loaded.
        """
        self.spare: list[int] = []
        self._events: list[int] = []
        self._marks: dict[int, int] = {}
        self._local = _Thread()
        self._kernels: PackingKernels | None = None
        self._home_kernels: HomeKernels | None = None
        self._asked = self._asked_homes = False
        try:
            # short calls keep the GIL: releasing and taking it again costs more,
            # and lets another thread run for its whole switch interval
            self._lib = ctypes.PyDLL("libcuda.so.1")
            self._waiting = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigError(
                f"the CUDA driver (libcuda.so.1) cannot be loaded: {error}; install the driver, "
                'or use device="cpu"'
            ) from error
        self._declare()
        index = device.index
        self.index: int = torch.cuda.current_device() if index is None else index
        with torch.cuda.device(self.index):
            torch.empty(1, device=f"cuda:{self.index}")  # creates the context, if there is none yet
            context = ctypes.c_void_p()
            self._check("cuCtxGetCurrent", self._lib.cuCtxGetCurrent(ctypes.byref(context)))
        self._context = context
        # every event refers to this object, or has no other reference
        weakref.finalize(self, _destroy, self._lib, self._events, os.getpid()).atexit = False
        self.current: Callable[[], int] = partial(torch._C._cuda_getCurrentRawStream, self.index)
        self.capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing

    def record(self, stream: int, again: Event | None = None) -> Event:
        """Marks the end of what was submitted to ``stream`` so far, with a new event or again."""
        event = self._event(again)
        self.mark(event.handle, stream)
        return event

    def mark(self, event: int, stream: int) -> None:
        """Records ``event`` after what was submitted to ``stream`` so far."""
        foreign = not (stream and self._local.bound) and self._enter(stream)
        code = self._record(event, stream)
        if foreign:
            self._leave()
        if code:
            self._check("cuEventRecord", code)

    def wait(self, stream: int, event: Event) -> None:
        """Makes ``stream`` wait for ``event`` from now on; the host does not wait."""
        if event.waiter == stream:
            return
        local = self._local.bound and (stream or _current_device() == self.index)
        foreign = not local and self._enter(stream)  # torch's default stream has the handle 0
        code = self._wait(stream, event.handle, 0)
        if foreign:
            self._leave()
        if code:
            self._check("cuStreamWaitEvent", code)
        event.waiter = stream

    def follow(self, stream: int, other: int) -> None:
        """Makes ``stream`` wait from now on for what was submitted to ``other`` so far.

        The event in between is used only here, so it can be recorded again immediately: waits
        submitted before keep their meaning.
        """
        mark = self._marks.get(other) or self._new_mark(other)
        foreign = not (stream and other and self._local.bound) and self._enter(stream and other)
        code = self._record(mark, other) or self._wait(stream, mark, 0)
        if foreign:
            self._leave()
        if code:
            self._check("cuEventRecord or cuStreamWaitEvent", code)

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Submits a copy between addresses of the device and of page-locked memory."""
        foreign = self._go_there()
        code = self._copy(target, source, nbytes, stream)
        if foreign:
            self._leave()
        if code:
            self._check(f"cuMemcpyAsync of {nbytes} bytes", code)

    def copy_behind(
        self,
        stream: int,
        others: Iterable[int],
        target: int,
        source: int,
        nbytes: int,
        again: Event | None = None,
        after: Iterable[Event] = (),
    ) -> Event:
        """Submits a copy that waits for events and for the work so far of other streams."""
        if not (stream and self._local.bound) or _current_device() != self.index:
            for event in after:
                self.wait(stream, event)
            for other in others:
                self.follow(stream, other)
            self.copy(stream, target, source, nbytes)
            return self.record(stream, again)
        code = 0
        for event in after:
            if event.waiter != stream and not code:
                code = self._wait(stream, event.handle, 0)
                event.waiter = -1 if code else stream
        for other in others:
            mark = self._marks.get(other) or self._new_mark(other)
            code = code or self._record(mark, other) or self._wait(stream, mark, 0)
        if code:
            self._check("cuEventRecord or cuStreamWaitEvent", code)
        code = self._copy(target, source, nbytes, stream)
        if code:
            self._check(f"cuMemcpyAsync of {nbytes} bytes", code)
        if again is None:
            event = Event(self, self.spare.pop() if self.spare else self.new_event())
        else:  # the same in line
            event = again
            event._over = False
            event.waiter = -1
        code = self._record(event.handle, stream)
        if code:
            self._check("cuEventRecord", code)
        return event

    def fill(self, stream: int, target: int, value: int, nbytes: int) -> None:
        """Submits setting every byte of device memory to ``value``."""
        foreign = self._go_there()
        code = self._lib.cuMemsetD8Async(target, value, nbytes, stream)
        if foreign:
            self._leave()
        if code:
            self._check(f"cuMemsetD8Async of {nbytes} bytes", code)

    def can_pack(self) -> bool:
        """Whether there are kernels for :meth:`pack` and :meth:`unpack`; compiles them once."""
        if not self._asked:
            self._asked = True
            self._kernels = load_kernels(self._lib, torch.device("cuda", self.index))
        return self._kernels is not None

    def pack(self, stream: int, target: int, source: int, tiles: int, spoiled: int) -> None:
        """Submits a kernel that packs tiles."""
        kernels, foreign = self._launching()
        code = kernels.pack(stream, target, source, tiles, spoiled)
        if foreign:
            self._leave()
        if code:
            self._check("cuLaunchKernel of tiermem_pack", code)

    def unpack(self, stream: int, target: int, tiles: int) -> None:
        """Submits a kernel that unpacks tiles in place."""
        kernels, foreign = self._launching()
        code = kernels.unpack(stream, target, tiles)
        if foreign:
            self._leave()
        if code:
            self._check("cuLaunchKernel of tiermem_unpack", code)

    def can_pack_homes(self) -> bool:
        """Whether there are kernels for homes that are stored packed; compiles them once."""
        if not self._asked_homes:
            self._asked_homes = True
            self._home_kernels = load_home_kernels(self._lib, torch.device("cuda", self.index))
        return self._home_kernels is not None

    def pack_home(
        self,
        stream: int,
        target: int,
        source: int,
        tiles: int,
        rest: int,
        spill: int,
        raw: int,
        seen: int,
    ) -> None:
        """Submits a kernel that packs a piece of a home."""
        kernels, foreign = self._launching_homes()
        code = kernels.pack(stream, target, source, tiles, rest, spill, raw, seen)
        if foreign:
            self._leave()
        if code:
            self._check("cuLaunchKernel of tiermem_pack_home", code)

    def unpack_home(self, stream: int, target: int, tiles: int, spill: int, seen: int) -> None:
        """Submits a kernel that unpacks tiles of a home in place."""
        kernels, foreign = self._launching_homes()
        code = kernels.unpack(stream, target, tiles, spill, seen)
        if foreign:
            self._leave()
        if code:
            self._check("cuLaunchKernel of tiermem_unpack_home", code)

    def new_stream(self, *, first: bool = False) -> int:
        """Creates a stream that waits for no other.

        torch hands its streams out of a pool that is created completely with the first one: 32
        streams for each of the device's priorities, and each takes device memory.

        Args:
            first: Whether its kernels have priority over those of other streams.
        """
        stream, priority = ctypes.c_void_p(), _FIRST if first else 0
        self._push()  # a stream belongs to the context in which it is created
        try:
            code = self._lib.cuStreamCreateWithPriority(
                ctypes.byref(stream), _NON_BLOCKING, priority
            )
            self._check("cuStreamCreateWithPriority", code)
        finally:
            self._leave()
        return stream.value or 0

    def reaches(self, address: int) -> bool:
        """Whether kernels can access page-locked host memory at the host's address."""
        there = ctypes.c_uint64()
        self._push()
        try:
            code = self._lib.cuPointerGetAttribute(ctypes.byref(there), _DEVICE_POINTER, address)
        finally:
            self._leave()
        return code == 0 and there.value == address

    def synchronize(self) -> None:
        """Makes the host wait for everything on the device."""
        torch.cuda.synchronize(self.index)

    def passed(self, event: int) -> bool:
        """Whether the stream has reached an event."""
        code: int = self._query(event)
        if code not in (0, _NOT_READY):
            self._check("cuEventQuery", code)
        return code == 0

    def seconds(self, first: int, second: int) -> float:
        """Returns the time between two timing events that the stream has reached."""
        milliseconds = ctypes.c_float()
        code = self._elapsed(ctypes.byref(milliseconds), first, second)
        if code:
            self._check("cuEventElapsedTime", code)
        return milliseconds.value / 1e3

    def wait_for(self, handle: int) -> None:
        """Makes the host wait until the stream has reached an event."""
        self._check("cuEventSynchronize", self._waiting.cuEventSynchronize(handle))

    # -- contexts --------------------------------------------------------

    def _enter(self, stream: int) -> bool:
        """Makes the device's context current if the stream's handle does not identify the device.

        The default stream has the same handle on all devices.

        Returns:
            Whether :meth:`_leave` must follow.
        """
        if not self._local.bound:
            self._bind()
        if stream or _current_device() == self.index:
            return False
        self._push()
        return True

    def _launching(self) -> tuple[PackingKernels, bool]:
        """Returns the kernels, with this device's context current, as CUDA before 13 requires.

        Returns:
            The kernels, and whether :meth:`_leave` must follow.
        """
        kernels = self._kernels
        if kernels is None:
            raise InvariantError("there are no kernels that pack; ask can_pack first")
        return kernels, self._go_there()

    def _launching_homes(self) -> tuple[HomeKernels, bool]:
        """Like :meth:`_launching`, for the kernels of homes."""
        kernels = self._home_kernels
        if kernels is None:
            raise InvariantError("there are no kernels that pack homes; ask can_pack_homes first")
        return kernels, self._go_there()

    def _go_there(self) -> bool:
        """Makes the device's context current, if another one's is.

        Memory that is mapped at reserved addresses belongs to no context: a copy in the context of
        a device without access to it is refused.

        Returns:
            Whether :meth:`_leave` must follow.
        """
        if not self._local.bound:
            self._bind()
        foreign = _current_device() != self.index
        if foreign:
            self._push()
        return foreign

    def _push(self) -> None:
        self._check("cuCtxPushCurrent", self._lib.cuCtxPushCurrent_v2(self._context))

    def _leave(self) -> None:
        dropped = ctypes.c_void_p()
        self._check("cuCtxPopCurrent", self._lib.cuCtxPopCurrent_v2(ctypes.byref(dropped)))

    def _bind(self) -> None:
        """Gives the calling thread a context, if it has none."""
        context = ctypes.c_void_p()
        self._check("cuCtxGetCurrent", self._lib.cuCtxGetCurrent(ctypes.byref(context)))
        if not context.value:
            self._check("cuCtxSetCurrent", self._lib.cuCtxSetCurrent(self._context))
        self._local.bound = True

    # -- inside ----------------------------------------------------------

    def _event(self, again: Event | None) -> Event:
        """Returns an event that is not recorded yet: the given one, or a new one."""
        if again is None:
            return Event(self, self.spare.pop() if self.spare else self.new_event())
        again._over = False
        again.waiter = -1
        return again

    def _new_mark(self, stream: int) -> int:
        """Creates the event by which other streams follow ``stream``."""
        mark = self._marks[stream] = self.new_event()
        return mark

    def new_event(self, *, timing: bool = False) -> int:
        """Creates an event; it is destroyed with this object."""
        event = ctypes.c_void_p()
        self._push()  # an event belongs to the context in which it is created
        try:
            flags = 0 if timing else _NO_TIMING
            self._check("cuEventCreate", self._lib.cuEventCreate(ctypes.byref(event), flags))
        finally:
            self._leave()
        self._events.append(event.value or 0)
        return event.value or 0

    def _declare(self) -> None:
        pointer, out = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
        for name, arguments in {
            "cuCtxGetCurrent": [out],
            "cuCtxSetCurrent": [pointer],
            "cuCtxPushCurrent_v2": [pointer],
            "cuCtxPopCurrent_v2": [out],
            "cuStreamCreateWithPriority": [out, ctypes.c_uint, ctypes.c_int],
            "cuEventCreate": [out, ctypes.c_uint],
            "cuEventRecord": [pointer, pointer],
            "cuEventQuery": [pointer],
            "cuEventElapsedTime": [ctypes.POINTER(ctypes.c_float), pointer, pointer],
            "cuEventDestroy_v2": [pointer],
            # as wide as what the driver declares, or wider; fastest to convert from an int
            "cuStreamWaitEvent": [pointer, pointer, pointer],
            "cuMemcpyAsync": [pointer, pointer, pointer, pointer],
            "cuPointerGetAttribute": [pointer, ctypes.c_int, ctypes.c_uint64],
            "cuMemsetD8Async": [ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, pointer],
        }.items():
            getattr(self._lib, name).argtypes = arguments
        self._waiting.cuEventSynchronize.argtypes = [pointer]
        self._record = self._lib.cuEventRecord
        self._wait = self._lib.cuStreamWaitEvent
        self._copy = self._lib.cuMemcpyAsync
        self._query = self._lib.cuEventQuery
        self._elapsed = self._lib.cuEventElapsedTime

    def _check(self, what: str, code: int) -> None:
        if code:
            name = ctypes.c_char_p()
            self._lib.cuGetErrorName(code, ctypes.byref(name))
            text = (name.value or b"unknown error").decode()
            raise TierError(
                f"{what} on cuda:{self.index} failed with {text} ({code}); if a kernel failed "
                "before, its error shows here: run with CUDA_LAUNCH_BLOCKING=1 to find it"
            )
