"""The checksum of a piece: xxh3, 64 bits, computed in place."""

from __future__ import annotations

import xxhash

from tiermem.io.engine import memory_view


def checksum(memory: memoryview | bytes | bytearray | int, nbytes: int) -> int:
    """Returns the xxh3 64-bit checksum of the first ``nbytes`` bytes.

    Nothing is copied, and the GIL is released while it runs.

    Args:
        memory: Contiguous bytes, or the address of host memory.
        nbytes: How many bytes to include.

    Raises:
        ValueError: If ``memory`` is shorter than that.
    """
    if isinstance(memory, int):
        if nbytes == 0:
            return xxhash.xxh3_64_intdigest(b"")
        return xxhash.xxh3_64_intdigest(memory_view(memory, nbytes))
    view = memoryview(memory).cast("B")
    if nbytes > view.nbytes:
        raise ValueError(f"{nbytes} bytes to check, but only {view.nbytes} are there")
    return xxhash.xxh3_64_intdigest(view[:nbytes])
