"""Kernels that pack and unpack bfloat16 words on a CUDA device (see :mod:`tiermem.core.packing`).

They are compiled when first needed, by the compiler that comes with torch's CUDA libraries
(NVRTC), for the present device; no toolkit and no host compiler is needed. If it is not
available, or if packing and unpacking does not restore every bit, nothing is packed.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import torch

from tiermem.core.packing import GROWS, MOST, PACKED_TILE, TILE, WORDS
from tiermem.transfer.nvrtc import Launch, Module, check, compiled

_SOURCE = r"""
static const unsigned WORDS = 8192, ESCAPES = 30, PACKED = 12416, GROWS = 3968, THREADS = 256;
static const unsigned GROUPS = WORDS / 8 / THREADS;  // of 8 words, of each thread

// One block of threads packs one tile.
extern "C" __global__ void tiermem_pack(
    const uint4* source, unsigned char* target, unsigned* spoiled)
{
    __shared__ unsigned counts[272], best, found, list[ESCAPES];
    const unsigned t = threadIdx.x;
    source += (unsigned long long)blockIdx.x * (WORDS / 8);
    target += (unsigned long long)blockIdx.x * PACKED;
    counts[t] = 0;
    if (t < 16) counts[256 + t] = 0;
    if (t == 0) best = found = 0;
    if (t < ESCAPES) list[t] = 0;
    __syncthreads();
    unsigned words[GROUPS][4];
    #pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const uint4 in = source[g * THREADS + t];
        words[g][0] = in.x; words[g][1] = in.y; words[g][2] = in.z; words[g][3] = in.w;
        #pragma unroll
        for (int k = 0; k < 8; k++)
            atomicAdd(&counts[(words[g][k >> 1] >> ((k & 1) * 16 + 7)) & 0xff], 1u);
    }
    __syncthreads();
    if (t <= 240) {
        unsigned inside = 0;
        for (int k = 1; k <= 15; k++) inside += counts[t + k];
        atomicMax(&best, inside << 8 | (255 - t));  // of those as good the first
    }
    __syncthreads();
    const unsigned base = 255 - (best & 0xff);
    #pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        unsigned low[2] = {0, 0}, codes = 0;
        #pragma unroll
        for (int k = 0; k < 8; k++) {
            const unsigned word = (words[g][k >> 1] >> ((k & 1) * 16)) & 0xffff;
            const unsigned exponent = (word >> 7) & 0xff;
            unsigned code = exponent - base;
            if (exponent == 0) code = 0;
            else if (code - 1 > 14u) {
                const unsigned at = atomicAdd(&found, 1u);
                if (at < ESCAPES) list[at] = (8 * (g * THREADS + t) + k) | word << 16;
                code = 0;
            }
            low[k >> 2] |= (((word >> 8) & 0x80) | (word & 0x7f)) << ((k & 3) * 8);
            codes |= code << (4 * k);
        }
        reinterpret_cast<uint2*>(target)[g * THREADS + t] = make_uint2(low[0], low[1]);
        reinterpret_cast<unsigned*>(target + WORDS)[g * THREADS + t] = codes;
    }
    __syncthreads();
    unsigned* head = reinterpret_cast<unsigned*>(target + WORDS + WORDS / 2);
    if (t == 0) {
        head[0] = base | (found < ESCAPES ? found : ESCAPES) << 8;
        head[1] = 0;
        if (found > ESCAPES) atomicOr(spoiled, 1u);
    }
    if (t < ESCAPES) head[2 + t] = list[t];
}

// One block of threads unpacks one tile, in the order in which blocks begin. Packed tiles end where
// the last one will; so a tile covers others, none of which is behind it, and waits until they have
// been read: by blocks that began before, which wait for nothing until they have. `state` has a
// ticket and, of each tile, the launch that read it last.
extern "C" __global__ void tiermem_unpack(
    unsigned char* target, unsigned* state, unsigned tiles, unsigned launch)
{
    __shared__ unsigned mine, list[ESCAPES + 2];
    const unsigned t = threadIdx.x;
    volatile unsigned* read = state + 1;
    if (t == 0) {
        mine = atomicAdd(state, 1u);
        if (mine == tiles - 1) *(volatile unsigned*)state = 0;  // nobody comes behind it
    }
    __syncthreads();
    const unsigned long long tile = mine, before = (unsigned long long)tiles * GROWS;
    const unsigned char* source = target + before + tile * PACKED;
    uint2 low[GROUPS];
    unsigned codes[GROUPS];
    #pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        low[g] = reinterpret_cast<const uint2*>(source)[g * THREADS + t];
        codes[g] = reinterpret_cast<const unsigned*>(source + WORDS)[g * THREADS + t];
    }
    if (t < ESCAPES + 2)
        list[t] = reinterpret_cast<const unsigned*>(source + WORDS + WORDS / 2)[t];
    __syncthreads();  // all of it has been read
    if (t == 0) {
        __threadfence();
        read[tile] = launch;
        const unsigned long long first = tile * 2 * WORDS, last = first + 2 * WORDS - 1;
        if (last >= before) {
            unsigned long long other = first < before ? 0 : (first - before) / PACKED;
            const unsigned long long end = (last - before) / PACKED;
            for (; other <= end && other < tile; other++)
                while (read[other] != launch) {}
        }
        __threadfence();
    }
    __syncthreads();
    const unsigned base = list[0] & 0xff, found = min((list[0] >> 8) & 0xff, ESCAPES);
    unsigned char* to = target + tile * 2 * WORDS;
    #pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const unsigned bytes[2] = {low[g].x, low[g].y};
        unsigned out[4] = {0, 0, 0, 0};
        #pragma unroll
        for (int k = 0; k < 8; k++) {
            const unsigned byte = (bytes[k >> 2] >> ((k & 3) * 8)) & 0xff;
            const unsigned code = (codes[g] >> (4 * k)) & 15;
            const unsigned exponent = code ? base + code : 0;
            const unsigned word = (byte & 0x80) << 8 | exponent << 7 | (byte & 0x7f);
            out[k >> 1] |= word << ((k & 1) * 16);
        }
        reinterpret_cast<uint4*>(to)[g * THREADS + t] =
            make_uint4(out[0], out[1], out[2], out[3]);
    }
    __syncthreads();
    if (t < found)
        reinterpret_cast<unsigned short*>(to)[list[2 + t] & (WORDS - 1)] = list[2 + t] >> 16;
}
"""

_PACK = struct.Struct("=QQQ")
_UNPACK = struct.Struct("=QQII")


class Function:
    """A kernel, and the layout of its arguments."""

    def __init__(self, driver: Any, handle: int, layout: struct.Struct) -> None:
        self._write = layout.pack_into
        self._launch = Launch(driver, handle, layout.size)

    def __call__(self, stream: int, blocks: int, *arguments: int) -> int:
        """Launches it; returns the driver's code."""
        self._write(self._launch.arguments, 0, *arguments)
        return self._launch(stream, blocks)


class _State:
    """The state that the unpacking kernels of one stream keep between launches.

    Attributes:
        address: Address of a ticket, and of the number of the launch that last read each tile.
    """

    def __init__(self, device: torch.device) -> None:
        """Starts with no launch; waits for the device, as torch does not order its streams."""
        self._memory = torch.zeros(1 + MOST // TILE, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        self.address = self._memory.data_ptr()
        self._launches = 0

    def next_launch(self) -> int:
        """Returns the number of a launch, which is not 0."""
        self._launches = (self._launches + 1) & 0xFFFFFFFF or 1
        return self._launches


@cache
def state_of(device: torch.device, stream: int) -> _State:
    """Returns the state of a stream, which exists as long as the process.

    Streams of closed engines are reused, and their last kernels may not have ended.
    """
    return _State(device)


class PackingKernels:
    """Both kernels, on one device; launched by one thread at a time."""

    def __init__(self, driver: Any, image: bytes, device: torch.device) -> None:
        """Loads them into the current context.

        Args:
            driver: The driver's library.
            image: The compiled code.
            device: The device.

        Raises:
            RuntimeError: If the driver refuses, or the device has no memory.
        """
        module = self._module = Module(driver, image)
        self._pack = Function(driver, module.function(b"tiermem_pack"), _PACK)
        self._unpack = Function(driver, module.function(b"tiermem_unpack"), _UNPACK)
        self._device = device
        self._states: dict[int, _State] = {}

    def pack(self, stream: int, target: int, source: int, tiles: int, spoiled: int) -> int:
        """Launches the kernel that packs tiles.

        Args:
            stream: The stream.
            target: Address for the packed form, a multiple of 16.
            source: Address of the words, a multiple of 16.
            tiles: The number of tiles.
            spoiled: Address of 4 bytes that become 1 if a tile has too many escapes.

        Returns:
            The driver's code.
        """
        return self._pack(stream, tiles, source, target, spoiled)

    def unpack(self, stream: int, target: int, tiles: int) -> int:
        """Launches the kernel that unpacks tiles in place.

        Args:
            stream: The stream.
            target: Address of the words, a multiple of 16. The packed tiles are at the end of this
                memory.
            tiles: The number of tiles, at least one.

        Returns:
            The driver's code.
        """
        state = self._states.get(stream)
        if state is None:
            state = self._states[stream] = state_of(self._device, stream)
        return self._unpack(stream, tiles, target, state.address, tiles, state.next_launch())


def load_kernels(driver: Any, device: torch.device) -> PackingKernels | None:
    """Compiles the kernels for a device and tries them; None if they are not available.

    Args:
        driver: The driver's library.
        device: A CUDA device with a context.
    """
    with torch.cuda.device(device), torch._C._InferenceMode(False), torch.no_grad():
        try:
            image = compiled(_SOURCE, *torch.cuda.get_device_capability(device))
            kernels = PackingKernels(driver, image, device)
            return kernels if _come_back(kernels, device) else None
        except (OSError, AttributeError, RuntimeError):
            return None


def _come_back(kernels: PackingKernels, device: torch.device) -> bool:
    """Whether all words are restored exactly, in all windows and as escapes.

    Raises:
        RuntimeError: If a launch fails.
    """
    stream = torch.cuda.current_stream(device)
    words = torch.arange(1 << 16, dtype=torch.int32, device="cpu")
    exponents = (words >> 7) & 0xFF
    tiles = []
    for base in range(-15, 256, 15):  # every word is in one of them, but for the base in others
        inside = words[(exponents > base) & (exponents <= base + 15) | (exponents == 0)]
        tile = inside.repeat(-(-WORDS // len(inside)))[:WORDS].clone()
        tile[:: WORDS // 28] = words[base % 7 :: 1 << 11][: len(tile[:: WORDS // 28])]
        tiles.append(tile)
    chosen = torch.cat(tiles).to(torch.int16).to(device)
    count = len(tiles)
    room = torch.zeros(count * TILE, dtype=torch.uint8, device=device)
    spoiled = torch.zeros(1, dtype=torch.int32, device=device)
    packed = torch.empty(count * PACKED_TILE, dtype=torch.uint8, device=device)
    at = packed.data_ptr()
    code = kernels.pack(stream.cuda_stream, at, chosen.data_ptr(), count, spoiled.data_ptr())
    check("cuLaunchKernel of tiermem_pack", code)
    for _ in range(2):
        room[count * GROWS :].copy_(packed)
        code = kernels.unpack(stream.cuda_stream, room.data_ptr(), count)
        check("cuLaunchKernel of tiermem_unpack", code)
        if bool(spoiled) or not torch.equal(room.view(torch.int16), chosen):
            return False
    return True
