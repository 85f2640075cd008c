"""Packing of tensors into blocks, against numpy's own idea of memory."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tiermem.core.block import ALIGNMENT, align_up
from tiermem.core.layout import (
    TENSOR_ALIGNMENT,
    TensorShape,
    contiguous_stride,
    is_dense,
    pack,
    packed_nbytes,
    split,
)

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def cells(shape: tuple[int, ...], stride: tuple[int, ...]) -> set[int]:
    """Returns the element offsets that a strided tensor touches."""
    return {sum(i * s for i, s in zip(index, stride, strict=True)) for index in np.ndindex(*shape)}


@st.composite
def strided(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes with strides of any order of dimensions, some of them with holes or overlaps."""
    shape = draw(shapes)
    order = draw(st.permutations(range(len(shape))))
    stride = [1] * len(shape)
    step = 1
    for dim in order:
        stride[dim] = step
        step *= max(shape[dim], 1)
    for dim in range(len(shape)):
        if draw(st.integers(0, 5)) == 0:
            stride[dim] = draw(st.integers(0, 40))
    return shape, tuple(stride)


@given(strided())
def test_dense_means_one_run_each_cell_once(case) -> None:
    shape, stride = case
    count = int(np.prod(shape, dtype=int))
    assert is_dense(shape, stride) == (cells(shape, stride) == set(range(count)))


@given(shapes)
def test_contiguous_strides_are_numpys(shape) -> None:
    stride = contiguous_stride(shape)
    if 0 not in shape:
        array = np.empty(shape, np.int8)
        relevant = [s for s, n in zip(stride, shape, strict=True) if n != 1]
        assert relevant == [s for s, n in zip(array.strides, shape, strict=True) if n != 1]
    assert is_dense(shape, stride)


@given(st.lists(st.tuples(strided(), st.sampled_from([1, 2, 4, 8, 16])), max_size=8))
def test_packed_tensors_keep_apart(tensors) -> None:
    wanted = [
        TensorShape(f"t{i}", shape, stride, object(), item)
        for i, ((shape, stride), item) in enumerate(tensors)
    ]
    specs, nbytes = pack(wanted)
    assert packed_nbytes(wanted) == nbytes
    assert nbytes > 0 and nbytes % ALIGNMENT == 0
    assert [spec.name for spec in specs] == [shape.name for shape in wanted]
    end = 0
    for spec, like in zip(specs, wanted, strict=True):
        assert spec.offset >= end and spec.offset % TENSOR_ALIGNMENT == 0
        touched = cells(spec.shape, spec.stride)
        assert touched == set(range(len(touched))), "what is not dense is made contiguous"
        assert len(touched) * like.itemsize == spec.nbytes == like.nbytes
        assert spec.shape == like.shape and spec.dtype is like.dtype
        if spec.nbytes and is_dense(like.shape, like.stride):
            assert spec.stride == like.stride
        end = spec.offset + spec.nbytes
    assert end <= nbytes < end + len(specs) * TENSOR_ALIGNMENT + 2 * ALIGNMENT


@given(st.lists(st.integers(0, 20), max_size=20), st.integers(0, 30))
def test_runs_cover_everything_once_within_the_limit(sizes, limit) -> None:
    runs = split(sizes, limit)
    assert [index for run in runs for index in run] == list(range(len(sizes)))
    for run in runs:
        assert len(run) >= 1
        assert len(run) == 1 or sum(sizes[i] for i in run) <= limit
    for left, right in pairwise(runs):
        assert sum(sizes[i] for i in left) + sizes[right.start] > limit, "no run ends too soon"


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 20))
def test_rounding_up(nbytes, unit) -> None:
    rounded = align_up(nbytes, unit)
    assert rounded % unit == 0 and nbytes <= rounded < nbytes + unit
