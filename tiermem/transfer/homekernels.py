"""Kernels that pack and unpack homes on a CUDA device (see :mod:`tiermem.core.packedhome`).

The docstring of :mod:`tiermem.transfer.kernels` applies to these, too. In addition they write and
read page-locked host memory directly: which tiles are raw, and the last bytes of those.
"""

from __future__ import annotations

import struct
from typing import Any

import torch

from tiermem.core.packedhome import PACKED_TILE, SPILL, TILE, WORDS
from tiermem.transfer.kernels import Function, state_of
from tiermem.transfer.nvrtc import Module, check, compiled

_SOURCE = r"""
static const unsigned WORDS = 8192, TILE = 16384, ESCAPES = 30, PACKED = 13440, SPILL = 2944;
static const unsigned HIGH = WORDS + WORDS / 2, HEAD = HIGH + WORDS / 8;
static const unsigned THREADS = 256, GROUPS = WORDS / 8 / THREADS;  // of 8 words, of each thread
static const unsigned MOVED = PACKED / 16;  // groups of a raw tile that are copied

// One block of threads packs one tile; one more copies what is behind them.
extern "C" __global__ void tiermem_pack_home(
    const unsigned char* source, unsigned char* target, unsigned char* spill, unsigned char* raw,
    unsigned char* seen, unsigned tiles, unsigned rest)
{
    __shared__ unsigned top, found, list[ESCAPES];
    const unsigned t = threadIdx.x;
    const unsigned long long tile = blockIdx.x;
    source += tile * TILE;
    target += tile * PACKED;
    if (tile == tiles) {
        for (unsigned at = t; at < rest; at += THREADS) target[at] = source[at];
        return;
    }
    if (t == 0) top = found = 0;
    if (t < ESCAPES) list[t] = 0;
    __syncthreads();
    uint4 in[GROUPS];
    unsigned largest = 0;
    #pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        in[g] = reinterpret_cast<const uint4*>(source)[g * THREADS + t];
        const unsigned pairs[4] = {in[g].x, in[g].y, in[g].z, in[g].w};
        #pragma unroll
        for (int k = 0; k < 8; k++)
            largest = max(largest, (pairs[k >> 1] >> ((k & 1) * 16 + 7)) & 0xff);
    }
    #pragma unroll
    for (int lane = 16; lane; lane >>= 1)
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, lane));
    if ((t & 31) == 0) atomicMax(&top, largest);
    __syncthreads();
    const unsigned base = top > 31 ? top - 31 : 0;
    #pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const unsigned pairs[4] = {in[g].x, in[g].y, in[g].z, in[g].w};
        unsigned low[2] = {0, 0}, codes = 0, high = 0;
        #pragma unroll
        for (int k = 0; k < 8; k++) {
            const unsigned word = (pairs[k >> 1] >> ((k & 1) * 16)) & 0xffff;
            const unsigned exponent = (word >> 7) & 0xff;
            unsigned code = exponent > base ? exponent - base : 0;
            if (exponent != 0 && code == 0) {
                const unsigned at = atomicAdd(&found, 1u);
                if (at < ESCAPES) list[at] = (8 * (g * THREADS + t) + k) | word << 16;
            }
            low[k >> 2] |= (((word >> 8) & 0x80) | (word & 0x7f)) << ((k & 3) * 8);
            codes |= (code & 15) << (4 * k);
            high |= (code >> 4) << k;
        }
        reinterpret_cast<uint2*>(target)[g * THREADS + t] = make_uint2(low[0], low[1]);
        reinterpret_cast<unsigned*>(target + WORDS)[g * THREADS + t] = codes;
        target[HIGH + g * THREADS + t] = high;
    }
    __syncthreads();
    const bool is_raw = found > ESCAPES;
    if (t == 0) raw[tile] = seen[tile] = is_raw;
    if (is_raw) {
        uint4* last = reinterpret_cast<uint4*>(spill + tile * SPILL);
        #pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const unsigned at = g * THREADS + t;
            if (at < MOVED) reinterpret_cast<uint4*>(target)[at] = in[g];
            else last[at - MOVED] = in[g];
        }
        return;
    }
    unsigned* head = reinterpret_cast<unsigned*>(target + HEAD);
    if (t == 0) {
        head[0] = base | found << 8;
        head[1] = 0;
    }
    if (t < ESCAPES) head[2 + t] = list[t];
}

// One block of threads unpacks one tile, in the order in which blocks begin; what is said of
// tiermem_unpack holds here.
extern "C" __global__ void tiermem_unpack_home(
    unsigned char* target, unsigned* state, const unsigned char* spill,
    const volatile unsigned char* seen, unsigned tiles, unsigned launch)
{
    __shared__ unsigned mine, is_raw, list[ESCAPES + 2];
    const unsigned t = threadIdx.x;
    volatile unsigned* read = state + 1;
    if (t == 0) {
        mine = atomicAdd(state, 1u);
        if (mine == tiles - 1) *(volatile unsigned*)state = 0;  // nobody comes behind it
        is_raw = seen[mine];
    }
    __syncthreads();
    const unsigned long long tile = mine, before = (unsigned long long)tiles * SPILL;
    const unsigned char* source = target + before + tile * PACKED;
    uint4 out[GROUPS];
    unsigned found = 0;
    if (is_raw) {
        const uint4* last = reinterpret_cast<const uint4*>(spill + tile * SPILL);
        #pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const unsigned at = g * THREADS + t;
            out[g] = at < MOVED ? reinterpret_cast<const uint4*>(source)[at] : last[at - MOVED];
        }
    } else {
        if (t < ESCAPES + 2) list[t] = reinterpret_cast<const unsigned*>(source + HEAD)[t];
        uint2 low[GROUPS];
        unsigned codes[GROUPS], high[GROUPS];
        #pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            low[g] = reinterpret_cast<const uint2*>(source)[g * THREADS + t];
            codes[g] = reinterpret_cast<const unsigned*>(source + WORDS)[g * THREADS + t];
            high[g] = source[HIGH + g * THREADS + t];
        }
        __syncthreads();  // the list is there
        const unsigned base = list[0] & 0xff;
        found = min((list[0] >> 8) & 0xff, ESCAPES);
        #pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const unsigned bytes[2] = {low[g].x, low[g].y};
            unsigned words[4] = {0, 0, 0, 0};
            #pragma unroll
            for (int k = 0; k < 8; k++) {
                const unsigned byte = (bytes[k >> 2] >> ((k & 3) * 8)) & 0xff;
                const unsigned code = ((codes[g] >> (4 * k)) & 15) | ((high[g] >> k) & 1) << 4;
                const unsigned exponent = code ? base + code : 0;
                const unsigned word = (byte & 0x80) << 8 | exponent << 7 | (byte & 0x7f);
                words[k >> 1] |= word << ((k & 1) * 16);
            }
            out[g] = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
    __syncthreads();  // all of it has been read
    if (t == 0) {
        __threadfence();
        read[tile] = launch;
        const unsigned long long first = tile * TILE, end = first + TILE - 1;
        if (end >= before) {
            unsigned long long other = first < before ? 0 : (first - before) / PACKED;
            const unsigned long long most = (end - before) / PACKED;
            for (; other <= most && other < tile; other++)
                while (read[other] != launch) {}
        }
        __threadfence();
    }
    __syncthreads();
    unsigned char* to = target + tile * TILE;
    #pragma unroll
    for (int g = 0; g < GROUPS; g++) reinterpret_cast<uint4*>(to)[g * THREADS + t] = out[g];
    __syncthreads();
    if (t < found)
        reinterpret_cast<unsigned short*>(to)[list[2 + t] & (WORDS - 1)] = list[2 + t] >> 16;
}
"""

_PACK = struct.Struct("=QQQQQII")
_UNPACK = struct.Struct("=QQQQII")


class HomeKernels:
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
        self._pack = Function(driver, module.function(b"tiermem_pack_home"), _PACK)
        self._unpack = Function(driver, module.function(b"tiermem_unpack_home"), _UNPACK)
        self._device = device

    def pack(
        self,
        stream: int,
        target: int,
        source: int,
        tiles: int,
        rest: int,
        spill: int,
        raw: int,
        seen: int,
    ) -> int:
        """Launches the kernel that packs a piece.

        Args:
            stream: The stream.
            target: Address for the packed form, a multiple of 16.
            source: Address of the words, a multiple of 16.
            tiles: The number of tiles.
            rest: Bytes after the tiles.
            spill: Host address for the last bytes of raw tiles, a multiple of 16.
            raw: Host address of a byte for each tile.
            seen: Address of as many bytes with the same meaning.

        Returns:
            The driver's code.
        """
        blocks = tiles + bool(rest)
        return self._pack(stream, blocks, source, target, spill, raw, seen, tiles, rest)

    def unpack(self, stream: int, target: int, tiles: int, spill: int, seen: int) -> int:
        """Launches the kernel that unpacks tiles in place.

        Args:
            stream: The stream.
            target: Address of the words, a multiple of 16. The packed tiles are at the end of this
                memory.
            tiles: The number of tiles, at least one.
            spill: As for :meth:`pack`.
            seen: Likewise.

        Returns:
            The driver's code.
        """
        state = state_of(self._device, stream)
        launch = state.next_launch()
        return self._unpack(stream, tiles, target, state.address, spill, seen, tiles, launch)


def load_home_kernels(driver: Any, device: torch.device) -> HomeKernels | None:
    """Compiles the kernels for a device and tries them; None if they are not available.

    Args:
        driver: The driver's library.
        device: A CUDA device with a context.
    """
    with torch.cuda.device(device), torch._C._InferenceMode(False), torch.no_grad():
        try:
            image = compiled(_SOURCE, *torch.cuda.get_device_capability(device))
            kernels = HomeKernels(driver, image, device)
            return kernels if _come_back(kernels, device) else None
        except (OSError, AttributeError, RuntimeError):
            return None


def _come_back(kernels: HomeKernels, device: torch.device) -> bool:
    """Whether all words are restored exactly: in each window, as escapes, and in raw tiles.

    Raises:
        RuntimeError: If a launch fails.
    """
    stream = torch.cuda.current_stream(device).cuda_stream
    words = torch.arange(1 << 16, dtype=torch.int32, device="cpu")
    exponents = (words >> 7) & 0xFF
    tiles = [words[first : first + WORDS] for first in range(0, len(words), WORDS)]  # mostly raw
    for top in range(255, 0, -15):
        inside = words[(exponents > top - 31) & (exponents <= top) | (exponents == 0)]
        tile = inside.repeat(-(-WORDS // len(inside)))[:WORDS].clone()
        below = words[(exponents <= top - 31) & (exponents > 0)]
        if len(below):
            tile[:: WORDS // 28] = below[:: max(len(below) // 30, 1)][:29].repeat(29)[:29]
        tiles.append(tile)
    count, rest = len(tiles), 48
    chosen = torch.cat([*tiles, words[: rest // 2]]).to(torch.int16).to(device)
    host = torch.zeros(count * (SPILL + 1), dtype=torch.uint8, device="cpu", pin_memory=True)
    there = torch.zeros(count, dtype=torch.uint8, device=device)
    spill, raw = host.data_ptr(), host.data_ptr() + count * SPILL
    packed = torch.empty(count * PACKED_TILE + rest, dtype=torch.uint8, device=device)
    room = torch.zeros(count * TILE + rest, dtype=torch.uint8, device=device)
    source, to = chosen.data_ptr(), packed.data_ptr()
    code = kernels.pack(stream, to, source, count, rest, spill, raw, there.data_ptr())
    check("cuLaunchKernel of tiermem_pack_home", code)
    for seen in (there.data_ptr(), raw):
        room.zero_()
        room[count * SPILL :].copy_(packed)
        code = kernels.unpack(stream, room.data_ptr(), count, spill, seen)
        check("cuLaunchKernel of tiermem_unpack_home", code)
        if not torch.equal(room.view(torch.int16), chosen):
            return False
    flags = host[count * SPILL :]
    return bool(flags[:8].all()) and not bool(flags[8:].any())
