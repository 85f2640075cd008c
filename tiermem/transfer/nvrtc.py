"""CUDA kernels that are compiled when first needed, by the compiler that comes with torch.

That is NVRTC, from torch's own CUDA libraries; no toolkit and no host compiler is needed.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

import torch

THREADS = 256
"""Threads of a block."""
_END, _BUFFER, _SIZE = 0, 1, 2  # CU_LAUNCH_PARAM_END, _BUFFER_POINTER and _BUFFER_SIZE


class Module:
    """Kernels of one source, in the context that was current when they were loaded."""

    def __init__(self, driver: Any, image: bytes) -> None:
        """Loads compiled code.

        Args:
            driver: The driver's library.
            image: The result of :func:`compiled`.

        Raises:
            RuntimeError: If the driver refuses.
        """
        pointer, word = ctypes.c_void_p, ctypes.c_uint
        driver.cuLaunchKernel.argtypes = [pointer, *([word] * 7), pointer, pointer, pointer]
        self._driver = driver
        self._image = ctypes.create_string_buffer(image, len(image))
        self._module = ctypes.c_void_p()
        check("cuModuleLoadData", driver.cuModuleLoadData(ctypes.byref(self._module), self._image))

    def function(self, name: bytes) -> int:
        """Returns the handle of a kernel.

        Raises:
            RuntimeError: If there is none of that name.
        """
        found = ctypes.c_void_p()
        code = self._driver.cuModuleGetFunction(ctypes.byref(found), self._module, name)
        check("cuModuleGetFunction", code)
        return found.value or 0


class Launch:
    """Launches a kernel with arguments in one run of bytes, which the driver copies."""

    __slots__ = ("_extra", "_handle", "_launch", "_size", "arguments")

    def __init__(self, driver: Any, handle: int, nbytes: int) -> None:
        """Reserves room for the arguments.

        Args:
            driver: The driver's library.
            handle: Handle of the kernel.
            nbytes: Bytes of its arguments.
        """
        self._launch, self._handle = driver.cuLaunchKernel, handle
        self.arguments = ctypes.create_string_buffer(nbytes)
        self._size = ctypes.c_size_t(nbytes)
        places = ctypes.addressof(self.arguments), _SIZE, ctypes.addressof(self._size)
        self._extra = (ctypes.c_void_p * 5)(_BUFFER, *places, _END)

    def __call__(self, stream: int, blocks: int) -> int:
        """Launches it; returns the driver's code."""
        code: int = self._launch(
            self._handle, blocks, 1, 1, THREADS, 1, 1, 0, stream, None, self._extra
        )
        return code


@cache
def compiled(source: str, major: int, minor: int, *options: str) -> bytes:
    """Compiles a source for devices of a compute capability.

    Raises:
        OSError: If there is no compiler.
        RuntimeError: If it fails.
    """
    # torch's own library of that name loads the compiler that belongs to this torch
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    nvrtc = ctypes.CDLL(os.path.join(folder, "libcaffe2_nvrtc.so"))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    code = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"tiermem.cu", 0, None, None
    )
    check("nvrtcCreateProgram", code)
    try:
        texts = [f"--gpu-architecture=sm_{major}{minor}", *options]
        given = (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))
        check("nvrtcCompileProgram", nvrtc.nvrtcCompileProgram(program, len(texts), given))
        check("nvrtcGetCUBINSize", nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        image = ctypes.create_string_buffer(size.value)
        check("nvrtcGetCUBIN", nvrtc.nvrtcGetCUBIN(program, image))
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return image.raw


def check(what: str, code: int) -> None:
    """Raises for a call that did not succeed.

    Raises:
        RuntimeError: With the call and its code.
    """
    if code:
        raise RuntimeError(f"{what} failed with code {code}")
