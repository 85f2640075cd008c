"""Byte planes and lz4: every bit comes back, and the break-even is the textbook's."""

from __future__ import annotations

import lz4.block
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiermem import IntegrityError
from tiermem.cli.codec import break_even
from tiermem.storage.codec import PackedChunk, pack, unpack


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy()


def back(chunk: PackedChunk) -> bytes:
    out = np.full(chunk.nbytes, 0xA5, np.uint8)
    unpack(chunk, out)
    return out.tobytes()


@given(st.integers(1, 8), st.lists(st.binary(min_size=1, max_size=300), max_size=6), st.data())
def test_every_bit_comes_back(itemsize: int, parts: list[bytes], data: st.DataObject) -> None:
    written = b"".join(part * data.draw(st.integers(1, 40)) for part in parts)
    written = written[: len(written) // itemsize * itemsize]
    chunk = pack(np.frombuffer(written, np.uint8), itemsize)
    assert back(chunk) == written
    assert chunk.packed_nbytes <= chunk.nbytes == len(written)


def test_weights_shrink_by_planes_only() -> None:
    weights = bytes_of((torch.randn(1 << 16) * 0.02).to(torch.bfloat16))
    chunk = pack(weights, 2)
    assert back(chunk) == weights.tobytes()
    assert weights.nbytes > 1.1 * chunk.packed_nbytes
    assert len(lz4.block.compress(weights)) > 0.99 * weights.nbytes
    assert chunk.planes[0] == weights[::2].tobytes(), "mantissas do not, and stay as they are"


def test_zeros_shrink() -> None:
    assert pack(np.zeros(1 << 20, np.uint8), 4).packed_nbytes < 5000


def test_damage_that_is_noticed() -> None:
    chunk = pack(np.arange(4000, dtype=np.uint16).view(np.uint8), 2)
    low, high = chunk.planes
    assert len(high) < 4000
    for planes in ((low, high[:-3]), (low, b"\xff" * 9), (low, lz4.block.compress(b"x" * 90))):
        with pytest.raises(IntegrityError, match="packed bytes are damaged"):
            back(PackedChunk(8000, planes))


def test_lengths_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="7 bytes are not whole numbers of 2"):
        pack(np.zeros(7, np.uint8), 2)
    with pytest.raises(ValueError, match="8 bytes for what takes 4"):
        unpack(pack(np.zeros(4, np.uint8), 2), np.zeros(8, np.uint8))


def test_the_break_even_of_the_textbook() -> None:
    """7 GB/s of disk, a ratio of 1.5: lz4 at 2 GB/s loses, 21 are needed, 50 win."""
    slow = break_even("weights", "disks, writing", 7e9, 2e9, 1.5)
    assert slow.needed == pytest.approx(21e9)
    assert slow.pays_below == pytest.approx(2e9 / 3)
    assert slow.gain == pytest.approx(1.43 / 5.95, abs=1e-3)
    assert slow.gain_beside == pytest.approx(2 / 7)
    fast = break_even("weights", "host link", 7e9, 50e9, 1.5)
    assert fast.gain == pytest.approx(1.24, abs=1e-3)
    assert fast.gain_beside == pytest.approx(1.5)
    at = break_even("weights", "disks, reading", slow.pays_below, 2e9, 1.5)
    assert at.gain == pytest.approx(1) and at.needed == pytest.approx(2e9)


def test_no_speed_is_enough_for_what_does_not_shrink() -> None:
    same = break_even("noise", "disks, reading", 1e9, 9e9, 1.0)
    assert same.needed is None and same.pays_below == 0 and same.gain < 1
