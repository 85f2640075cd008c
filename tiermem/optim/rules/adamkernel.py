"""A kernel for steps of Adam and AdamW that does the operations of torch's ``foreach`` in one pass.

``foreach``, torch's default on a GPU, has one kernel per operation,
and each result goes to memory and back: some fourteen passes over weights, gradients and moments.
Here each element is read and written once. The operations and their order are those that
``exact.c`` uses on the host (ADR 45): each result is rounded as ``foreach`` stores it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, chain
from typing import NamedTuple

import torch

from tiermem.transfer.nvrtc import Launch, Module, check, compiled

_ROWS = 64
_CHUNK = 8192
"""Elements per block of threads."""
_DECAY, _DECOUPLED, _MAXIMIZE = 1, 2, 4
_OPTIONS = ("--fmad=false",)  # fused operations are written as such

_SOURCE = r"""
struct Row { unsigned long long param, grad, first, second; long long count; long long block; };
struct Step {
    float beta1, beta2, size, root, eps, decay, rest1, rest2;
    int flags, rows, unused1, unused2;
    Row row[64];
};
static const int CHUNK = 8192, THREADS = 256, DECAY = 1, DECOUPLED = 2, MAXIMIZE = 4;

__device__ __forceinline__ unsigned short narrowed(float x)
{
#if __CUDA_ARCH__ >= 800
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
#else
    const unsigned bits = __float_as_uint(x);
    return x != x ? 0x7fff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
#endif
}

__device__ __forceinline__ float widened(unsigned short bits)
{
    return __uint_as_float((unsigned)bits << 16);
}

struct Half {
    typedef unsigned short kept;
    static __device__ __forceinline__ float load(kept x) { return widened(x); }
    static __device__ __forceinline__ kept store(float x) { return narrowed(x); }
    static __device__ __forceinline__ float stored(float x) { return widened(narrowed(x)); }
};

struct Single {
    typedef float kept;
    static __device__ __forceinline__ float load(kept x) { return x; }
    static __device__ __forceinline__ kept store(float x) { return x; }
    static __device__ __forceinline__ float stored(float x) { return x; }
};

// One element; stored() is what a kernel of foreach leaves to the next one.
template <class T>
__device__ __forceinline__ void element(
    const Step& s, typename T::kept& p, typename T::kept g, typename T::kept& m,
    typename T::kept& v)
{
    float param = T::load(p), grad = T::load(g), one = T::load(m), two = T::load(v);
    if (s.flags & MAXIMIZE) grad = T::stored(-grad);
    if (s.flags & DECAY) {
        if (s.flags & DECOUPLED) param = T::stored(param * s.decay);
        else grad = T::stored(__fmaf_rn(param, s.decay, grad));
    }
    const float apart = grad - one;
    one = T::stored(fabsf(s.rest1) < 0.5f ? __fmaf_rn(s.rest1, apart, one)
                                          : __fmaf_rn(-apart, 1.0f - s.rest1, grad));
    two = T::stored(__fmaf_rn(s.rest2, grad * grad, T::stored(two * s.beta2)));
    const float below =
        T::stored(T::stored(__fdiv_rn(T::stored(__fsqrt_rn(two)), s.root)) + s.eps);
    p = T::store(__fmaf_rn(s.size, __fdiv_rn(one, below), param));
    m = T::store(one);
    v = T::store(two);
}

template <class T> union Lane { uint4 all; typename T::kept each[16 / sizeof(typename T::kept)]; };

template <class T> __device__ __forceinline__ void step(const Step& s)
{
    typedef typename T::kept kept;
    const int LANES = 16 / sizeof(kept);
    int number = 0;
    while (number + 1 < s.rows && s.row[number + 1].block <= blockIdx.x) number++;
    const Row& row = s.row[number];
    kept* p = (kept*)row.param;
    const kept* g = (const kept*)row.grad;
    kept *m = (kept*)row.first, *v = (kept*)row.second;
    const long long begin = (blockIdx.x - row.block) * CHUNK;
    const long long end = begin + CHUNK < row.count ? begin + CHUNK : row.count;
    if ((row.param | row.grad | row.first | row.second) & 15) {
        for (long long i = begin + threadIdx.x; i < end; i += THREADS)
            element<T>(s, p[i], g[i], m[i], v[i]);
        return;
    }
    for (long long i = begin + threadIdx.x * LANES; i < end; i += THREADS * LANES) {
        if (i + LANES <= end) {
            Lane<T> a, b, c, d;
            a.all = *(const uint4*)(p + i);
            b.all = *(const uint4*)(g + i);
            c.all = *(const uint4*)(m + i);
            d.all = *(const uint4*)(v + i);
            #pragma unroll
            for (int k = 0; k < LANES; k++)
                element<T>(s, a.each[k], b.each[k], c.each[k], d.each[k]);
            *(uint4*)(p + i) = a.all;
            *(uint4*)(m + i) = c.all;
            *(uint4*)(v + i) = d.all;
        } else {
            for (long long j = i; j < end; j++) element<T>(s, p[j], g[j], m[j], v[j]);
        }
    }
}

extern "C" __global__ void tiermem_adam16(const Step s) { step<Half>(s); }
extern "C" __global__ void tiermem_adam32(const Step s) { step<Single>(s); }
"""

_NBYTES = 48 + 48 * _ROWS
_NAMES = {torch.bfloat16: b"tiermem_adam16", torch.float32: b"tiermem_adam32"}


class Numbers(NamedTuple):
    """The numbers of a step.

    Attributes:
        values: ``beta1``, ``beta2``, the step size (negative), the root of the second bias
            correction, ``eps``, the decay, ``1 - beta1`` and ``1 - beta2``; all float32.
        decay: Whether there is a weight decay.
        decoupled: Whether it is decoupled from the gradients.
        maximize: Whether gradients are negated.
    """

    values: Sequence[float]
    decay: bool
    decoupled: bool
    maximize: bool


class Rows(NamedTuple):
    """The stepped tensors: four per parameter, contiguous and with the same number of elements.

    Attributes:
        params: The parameters.
        grads: Their gradients.
        firsts: Their first moments.
        seconds: Their second moments.
    """

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    firsts: list[torch.Tensor]
    seconds: list[torch.Tensor]


class AdamKernel:
    """The kernel for one device."""

    def __init__(self, device: torch.device) -> None:
        """Compiles and loads it; the device's context is current.

        Raises:
            OSError: If there is no compiler or driver.
            RuntimeError: If one of them fails.
        """
        self._driver = ctypes.CDLL("libcuda.so.1")
        image = compiled(_SOURCE, *torch.cuda.get_device_capability(device), *_OPTIONS)
        self._module = Module(self._driver, image)
        self._handles = {dtype: self._module.function(name) for dtype, name in _NAMES.items()}
        self._index = device.index or 0

    def step(self, dtype: torch.dtype, numbers: Numbers, rows: Rows) -> None:
        """Submits the steps of some parameters to the current stream.

        Args:
            dtype: Dtype of all tensors: float32 or bfloat16.
            numbers: The numbers of the step.
            rows: The tensors.

        Raises:
            RuntimeError: If the driver fails.
        """
        flags = numbers.decay * _DECAY | numbers.decoupled * _DECOUPLED
        flags |= numbers.maximize * _MAXIMIZE
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        addresses = [[*map(torch.Tensor.data_ptr, tensors)] for tensors in rows]
        counts = [*map(torch.Tensor.numel, rows.params)]
        for start in range(0, len(counts), _ROWS):
            some = counts[start : start + _ROWS]
            ends = [*accumulate(-(-count // _CHUNK) for count in some)]
            if not ends[-1]:
                continue
            columns = [*(column[start : start + _ROWS] for column in addresses), some, [0, *ends]]
            values = chain.from_iterable(zip(*columns, strict=False))
            # a separate one per launch: several threads may step
            launch = Launch(self._driver, self._handles[dtype], _NBYTES)
            layout = _layout(len(some))
            layout.pack_into(launch.arguments, 0, *numbers.values, flags, len(some), 0, 0, *values)
            check("cuLaunchKernel of tiermem_adam", launch(stream, ends[-1]))


@cache
def _layout(rows: int) -> struct.Struct:
    """Returns the layout of a step with this many rows."""
    return struct.Struct("=8f4i" + rows * "QQQQqq")


@cache
def kernel_for(device: torch.device) -> AdamKernel | None:
    """Returns the kernel for a CUDA device; None if it is not available."""
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).synchronize()  # this ensures that there is a context
        try:
            return AdamKernel(device)
        except (OSError, AttributeError, RuntimeError):
            return None
