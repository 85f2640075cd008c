"""Rearranged tensors that were not read, beside torch on real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples

from tiermem.loading.traced import NotTracedError, Run, StoredView

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3)


def pair(shape: list[int], offset: int) -> tuple[StoredView, torch.Tensor]:
    """Returns a tensor of two bytes an element, and its view: file, offset and value agree."""
    count = int(torch.tensor(shape).prod())
    values = torch.arange(offset, offset + count, dtype=torch.int16).reshape(shape)
    return StoredView(shape, torch.int16, [Run(0, 2 * offset, 2 * count)]), values


def read(view: StoredView) -> torch.Tensor:
    """Reads a view from a file in which every element is its own number."""
    file = torch.arange(4096, dtype=torch.int16).view(torch.uint8)
    parts = [file[run.offset : run.offset + run.nbytes] for run in view.runs]
    whole = torch.cat(parts) if parts else file[:0]
    return whole.view(torch.int16).reshape(tuple(view.shape))


def same(views: Any, tensors: Any) -> None:
    if isinstance(views, StoredView):
        assert views.shape == tensors.shape and torch.equal(read(views), tensors)
        return
    assert len(views) == len(tensors)
    for view, tensor in zip(views, tensors, strict=True):
        same(view, tensor)


@given(data=st.data(), shape=shapes, count=st.integers(1, 4))
@settings(max_examples=examples(80), deadline=None)
def test_stack_cat_and_split_in_any_order(
    data: st.DataObject, shape: list[int], count: int
) -> None:
    pairs = [pair(shape, 100 * number) for number in range(count)]
    views, tensors = [v for v, _ in pairs], [t for _, t in pairs]
    for _ in range(data.draw(st.integers(1, 3))):
        ndim = views[0].ndim
        dim = data.draw(st.integers(-ndim, ndim - 1))
        if data.draw(st.booleans()) and ndim < 5:
            views, tensors = [torch.stack(views, dim=dim)], [torch.stack(tensors, dim=dim)]  # type: ignore[arg-type,list-item]
        else:
            views, tensors = [torch.cat(views, dim=dim)], [torch.cat(tensors, dim=dim)]  # type: ignore[arg-type,list-item]
        same(views, tensors)
        dim = data.draw(st.integers(0, views[0].ndim - 1))
        parts = data.draw(st.integers(1, 3))
        chunks = torch.chunk(views[0], parts, dim=dim), torch.chunk(tensors[0], parts, dim=dim)  # type: ignore[arg-type]
        same(*chunks)
        alike = chunks[1][0].shape == chunks[1][-1].shape
        views, tensors = ([*c] if alike else [c[0]] for c in chunks)
    same(views[0].squeeze(0), tensors[0].squeeze(0))


def test_what_is_no_rearrangement_of_runs_is_not_traced() -> None:
    view, _ = pair([2, 3], 0)
    for change in (
        lambda: view.transpose(0, 1),
        lambda: torch.add(view, view),  # type: ignore[call-overload]
        lambda: torch.stack([StoredView([1 << 17, 1], torch.int16, [Run(0, 0, 1 << 18)])] * 2, 1),  # type: ignore[list-item]
    ):
        with pytest.raises(NotTracedError):
            change()


def test_shapes_that_do_not_fit_are_errors() -> None:
    first, second = pair([2, 3], 0)[0], pair([2, 4], 50)[0]
    with pytest.raises(ValueError, match="shapes"):
        torch.cat([first, second], dim=0)  # type: ignore[list-item]
    with pytest.raises(IndexError):
        torch.cat([first], dim=2)  # type: ignore[list-item]
