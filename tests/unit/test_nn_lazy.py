"""References to a gradient's stand-in are counted right in every version of Python."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tiermem.nn.tensors.lazy import LazyTensor, is_held


class Owner:
    def __init__(self) -> None:
        self.thing: Any = object()


def taken(owner: Owner) -> bool:
    """As the gradient store does it: out of where it was, into one local variable."""
    thing, owner.thing = owner.thing, None
    return is_held(thing)


def test_one_local_variable_does_not_count() -> None:
    assert not taken(Owner())


def test_one_reference_elsewhere_does() -> None:
    owner = Owner()
    kept = [owner.thing]
    assert taken(owner)
    del kept
    assert not taken(Owner())


def test_a_stand_in_is_used_again_where_no_program_could_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, made = torch.Tensor._make_subclass, list[Any]()

    def making(*given: Any) -> Any:
        made.append(given)
        return make(*given)

    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    x = torch.ones(2, 64)
    # where all fits, gradients are left to torch
    with tiermem.TierManager("cpu", hbm="56KiB", dram="1MiB") as tier:
        tier.wrap(model)

        def step() -> torch.Tensor:
            model.zero_grad()
            model(x).sum().backward()
            gradient = model[0].weight.grad
            assert isinstance(gradient, LazyTensor)
            return gradient

        step()
        monkeypatch.setattr(torch.Tensor, "_make_subclass", staticmethod(making))
        step()
        assert not made

        step().mark = 1  # type: ignore[attr-defined]
        assert not hasattr(step(), "mark")

        watched = weakref.ref(step())
        step()
        assert watched() is None

        held = step()
        before = held.clone()
        with torch.no_grad():
            model[0].weight.grad[0].zero_()
        changed = held.clone()
        assert step() is not held
        assert torch.equal(held, changed) and not torch.equal(held, before)
        assert torch.equal(step(), before)


def test_other_memory_for_a_gradient_is_refused_with_what_to_do() -> None:
    with tiermem.TierManager("cpu", hbm="64KiB", dram="1MiB") as tier:
        model = tier.wrap(nn.Linear(8, 8))
        model(torch.ones(2, 8)).sum().backward()
        with pytest.raises(tiermem.ParameterError, match=r"\(8, 8\).*copy_\(\).*param\.grad = "):
            model.weight.grad.set_(torch.ones(8, 8))
        assert model.weight.grad.sum() == 128
