"""Casts of gradients into memory that is used again."""

from __future__ import annotations

import threading

import torch
from hypothesis import given
from hypothesis import strategies as st

from tiermem.optim.rules.casts import Casts

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
SHAPES = st.lists(st.integers(0, 7), max_size=3)
CASES = st.lists(st.tuples(SHAPES, DTYPES, DTYPES, st.booleans(), st.booleans()), max_size=5)


@given(CASES)
def test_casts_are_torchs_own(
    cases: list[tuple[list[int], torch.dtype, torch.dtype, bool, bool]],
) -> None:
    casts = Casts()
    for _ in range(2):  # the second time the memory is there, with other values in it
        tensors: list[torch.Tensor | None] = []
        for shape, dtype, _, turned, missing in cases:
            tensor = torch.randn(shape).to(dtype)
            if turned and tensor.dim() == 2:
                tensor = tensor.t()
            tensors.append(None if missing else tensor)
        found = casts(tensors, [case[2] for case in cases])
        for tensor, cast, case in zip(tensors, found, cases, strict=True):
            if tensor is None:
                assert cast is None
                continue
            assert cast is not None
            assert cast.dtype is case[2]
            assert cast.shape == tensor.shape
            assert torch.equal(cast, tensor.to(case[2]))


def test_memory_is_used_again_and_never_shared_by_threads() -> None:
    casts = Casts()
    tensor = torch.ones(1000, dtype=torch.bfloat16)
    first = casts([tensor], [torch.float32])[0]
    second = casts([tensor[:500]], [torch.float32])[0]
    assert first is not None
    assert second is not None
    assert first.data_ptr() == second.data_ptr()
    elsewhere: list[int] = []

    def other() -> None:
        cast = casts([tensor], [torch.float32])[0]
        assert cast is not None
        elsewhere.append(cast.data_ptr())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert elsewhere
    assert elsewhere[0] != first.data_ptr()
