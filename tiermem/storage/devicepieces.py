"""The CUDA driver's calls that map device memory at reserved addresses.

Signatures and structures are those of the CUDA driver API reference, section "Virtual Memory
Management" (``cuda.h``: ``CUmemAllocationProp``, ``CUmemAccessDesc``), which holds since CUDA 10.2.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import Any

import torch

from tiermem.errors import CapacityError, TierError

_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
SPARE = 256 << 20
"""Bytes of a device that are never mapped: libraries allocate some at their first use,
and torch in pieces of 2 to 20 MiB."""


class Location(ctypes.Structure):
    """``CUmemLocation``: where memory is."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Flags(ctypes.Structure):
    """``allocFlags`` of :class:`Properties`."""

    _fields_ = [
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class Properties(ctypes.Structure):
    """``CUmemAllocationProp``: the kind of memory requested."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("meta_data", ctypes.c_void_p),
        ("flags", _Flags),
    ]


class Access(ctypes.Structure):
    """``CUmemAccessDesc``: which device may read or write it."""

    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


class _Thread(threading.local):
    """State of each thread: whether it has a context."""

    bound = False


class DevicePieceCalls:
    """The calls of one device.

    Attributes:
        granularity: Every address and size is a multiple of it, in bytes.
    """

    def __init__(self, device: torch.device, library: Any) -> None:
        """Asks the device for its granularity; see :func:`open_calls`.

        Args:
            device: A CUDA device.
            library: The driver's library, loaded.

        Raises:
            TierError: If the device or its driver cannot do that.
        """
        self._lib = library
        self._local = _Thread()
        self._declare()
        index = device.index
        self.index: int = torch.cuda.current_device() if index is None else index
        with torch.cuda.device(self.index):
            torch.empty(1, device=f"cuda:{self.index}")  # creates the context, if there is none yet
            context, number, able = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            self._check("cuCtxGetCurrent", library.cuCtxGetCurrent(ctypes.byref(context)))
            self._check("cuCtxGetDevice", library.cuCtxGetDevice(ctypes.byref(number)))
        self._context = context
        code = library.cuDeviceGetAttribute(ctypes.byref(able), _SUPPORTED, number)
        self._check("cuDeviceGetAttribute", code)
        if not able.value:
            raise TierError(f"cuda:{self.index} cannot map its memory piece by piece")
        where = Location(_ON_DEVICE, number.value)
        self._properties = Properties(type=_PINNED, location=where)
        self._access = Access(where, _READ_WRITE)
        found = ctypes.c_size_t()
        code = library.cuMemGetAllocationGranularity(
            ctypes.byref(found), ctypes.byref(self._properties), _MINIMUM
        )
        self._check("cuMemGetAllocationGranularity", code)
        self.granularity = found.value

    def reserve(self, nbytes: int) -> int:
        """Reserves ``nbytes`` addresses; returns the first.

        Raises:
            CapacityError: If there are none.
        """
        self._bind()
        address = ctypes.c_uint64()
        code = self._lib.cuMemAddressReserve(ctypes.byref(address), nbytes, 0, 0, 0)
        if code:
            raise CapacityError(
                f"tier hbm: the driver has no {nbytes} addresses for cuda:{self.index} "
                f"({self._name(code)})"
            )
        return address.value

    def create(self, nbytes: int) -> int | None:
        """Allocates device memory; returns its handle, or None if there is none to spare."""
        if torch.cuda.mem_get_info(self.index)[0] < nbytes + SPARE:
            return None
        self._bind()
        handle = ctypes.c_uint64()
        properties = ctypes.byref(self._properties)
        code = self._lib.cuMemCreate(ctypes.byref(handle), nbytes, properties, 0)
        if code == _OUT_OF_MEMORY:
            return None
        self._check(f"cuMemCreate of {nbytes} bytes", code)
        return handle.value

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Maps memory at reserved addresses."""
        self._bind()
        self._check("cuMemMap", self._lib.cuMemMap(address, nbytes, 0, handle, 0))

    def allow(self, address: int, nbytes: int) -> None:
        """Gives the device read and write access to mapped addresses."""
        self._bind()
        code = self._lib.cuMemSetAccess(address, nbytes, ctypes.byref(self._access), 1)
        self._check("cuMemSetAccess", code)

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmaps the memory at addresses."""
        self._bind()
        self._check("cuMemUnmap", self._lib.cuMemUnmap(address, nbytes))

    def release(self, handle: int) -> None:
        """Frees memory that is not mapped."""
        self._bind()
        self._check("cuMemRelease", self._lib.cuMemRelease(handle))

    def free(self, address: int, nbytes: int) -> None:
        """Frees reserved addresses."""
        self._bind()
        self._check("cuMemAddressFree", self._lib.cuMemAddressFree(address, nbytes))

    def synchronize(self) -> None:
        """Waits for the device: unlike freeing, unmapping does not wait."""
        torch.cuda.synchronize(self.index)

    def _bind(self) -> None:
        """Gives the calling thread a context, if it has none."""
        if self._local.bound:
            return
        context = ctypes.c_void_p()
        self._check("cuCtxGetCurrent", self._lib.cuCtxGetCurrent(ctypes.byref(context)))
        if not context.value:
            self._check("cuCtxSetCurrent", self._lib.cuCtxSetCurrent(self._context))
        self._local.bound = True

    def _declare(self) -> None:
        """Declares the arguments of the driver's functions.

        Raises:
            TierError: If the driver lacks one of them.
        """
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
        arguments = {
            "cuCtxGetCurrent": [pointer],
            "cuCtxSetCurrent": [pointer],
            "cuCtxGetDevice": [pointer],
            "cuDeviceGetAttribute": [pointer, ctypes.c_int, ctypes.c_int],
            "cuMemGetAllocationGranularity": [pointer, pointer, ctypes.c_int],
            "cuMemAddressReserve": [pointer, size, size, number, number],
            "cuMemCreate": [pointer, size, pointer, number],
            "cuMemMap": [number, size, size, number, number],
            "cuMemSetAccess": [number, size, pointer, size],
            "cuMemUnmap": [number, size],
            "cuMemRelease": [number],
            "cuMemAddressFree": [number, size],
        }
        for name, types in arguments.items():
            try:
                getattr(self._lib, name).argtypes = types
            except AttributeError:
                raise TierError(f"the CUDA driver has no {name}") from None

    def _name(self, code: int) -> str:
        name = ctypes.c_char_p()
        self._lib.cuGetErrorName(code, ctypes.byref(name))
        return f"{(name.value or b'unknown error').decode()} ({code})"

    def _check(self, what: str, code: int) -> None:
        if code:
            raise TierError(f"{what} on cuda:{self.index} failed with {self._name(code)}")


def open_calls(device: torch.device) -> DevicePieceCalls | None:
    """Returns the calls of a device; None if it or its driver does not have them."""
    with contextlib.suppress(OSError, TierError):
        return DevicePieceCalls(device, ctypes.CDLL("libcuda.so.1"))
    return None
