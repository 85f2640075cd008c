"""Steps, state dicts and state under ``torch.inference_mode()``, as with plain torch."""

from __future__ import annotations

import copy
import gc
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from support_nn import assert_same, seed
from torch import nn
from torch.autograd import grad_mode

import tiermem

WIDTH = 64


def build() -> nn.Module:
    seed(1)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)])


def batch(step: int) -> torch.Tensor:
    seed(10 + step)
    return torch.randn(4, WIDTH)


def backward(model: nn.Module, step: int) -> None:
    model(batch(step)).square().mean().backward()


def tiers() -> tiermem.TierManager:
    return tiermem.TierManager("cpu", hbm="96KiB", dram="4MiB")


class CutShort:
    """Raises as one of the calls of torch's contexts returns, into which it may be nested."""

    def __init__(self, number: int) -> None:
        self.left = number
        self._former = sys.gettrace()

    def __enter__(self) -> None:
        sys.settrace(self._called)

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._former)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._inside if frame.f_code.co_filename == grad_mode.__file__ else None

    def _inside(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "return":
            self.left -= 1
            if self.left == 0:
                sys.settrace(self._former)
                raise KeyboardInterrupt
        return self._inside


def test_what_was_cut_short_switches_nothing_when_it_is_freed() -> None:
    """A context of torch's for inference mode puts autograd's switch back at any time later."""
    with tiers() as tier:
        model = tier.wrap(build())
        for number in range(1, 100):
            cut = CutShort(number)
            with suppress(KeyboardInterrupt), cut:
                model.state_dict()
            gc.collect()
            assert torch.is_grad_enabled(), number
            if cut.left > 0:
                break
        assert 5 < number < 99
        backward(model, 0)


@pytest.mark.parametrize("overlap", ["auto", False, "forward", "backward"])
def test_steps_are_the_same(overlap: Any) -> None:
    """Some are made in a forward or a backward later on, which is not in that mode."""
    plain, model = build(), build()
    with tiers() as tier:
        tier.wrap(model)
        stepper = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=1e-2, overlap=overlap)
        for step in range(6):
            for one, by in ((plain, stepper), (model, optimizer)):
                backward(one, step)
                with torch.inference_mode():
                    by.step()
                    by.zero_grad()
            with torch.inference_mode():
                assert_same(plain(batch(9)), model(batch(9)), "validation")
        assert_same(dict(plain.state_dict()), dict(model.state_dict()), "weights")


def test_hooks_of_a_step_are_called_once() -> None:
    """One that clips or scales gradients would do so twice."""
    model, called = build(), list[str]()
    with tiers() as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=1e-2)
        optimizer.register_step_pre_hook(lambda *_: called.append("before"))
        optimizer.register_step_post_hook(lambda *_: called.append("after"))
        backward(model, 0)
        with torch.inference_mode():
            optimizer.step()
        assert called == ["before", "after"]


def test_a_state_dict_can_be_written_outside() -> None:
    plain, model = build(), build()
    with tiers() as tier:
        tier.wrap(model)
        with torch.inference_mode():
            state = model.state_dict()
        for name, value in plain.state_dict().items():
            assert not state[name].is_inference() and not value.is_inference()
            state[name].mul_(2)
            assert torch.equal(state[name], 2 * value)


def test_a_model_that_is_made_from_a_checkpoint_can_be_trained(tmp_path: Path) -> None:
    """As one of ``from_pretrained`` can, called in that mode."""
    from safetensors.torch import save_file

    plain = build()
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    with tiers() as tier:
        with torch.inference_mode():
            model = tiermem.load_checkpoint(build, tmp_path, tier=tier)
            assert_same(plain(batch(0)), model(batch(0)), "in inference mode")
        for one in (plain, model):
            backward(one, 1)
        grads = [[param.grad for param in one.parameters()] for one in (plain, model)]
        assert_same(*grads, "gradients")


def test_a_step_that_cannot_write_its_counters_is_taken_back() -> None:
    """State that was copied in that mode cannot be written outside of it, says torch."""
    model = build()
    with tiers() as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=1e-2, overlap=False)
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode():
            state = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(state)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        backward(model, 1)
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            optimizer.step()
        optimizer.abandon_step()
        optimizer.zero_grad()
        assert_same(before, dict(model.state_dict()), "in the tiers")
    assert_same(before, dict(model.state_dict()), "given back")


ASKED = {
    "of nothing": lambda model: ((model[2][0].weight * 2).sum(), list(model.parameters()), None),
    "of itself": lambda model: (model[2][0].weight, model[2][0].weight, torch.ones(WIDTH, WIDTH)),
    "by others": lambda model: (
        model[2][0].weight,
        [*model[3].parameters(), model[2][0].weight],
        torch.full((WIDTH, WIDTH), 0.5),
    ),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("hbm", ["96KiB", "4MiB"])
@pytest.mark.parametrize("trained", [False, True])
def test_gradients_asked_for_in_a_hook(asked: str, hbm: str, trained: bool) -> None:
    """It is torch's own error, where there is one."""
    plain, model = build(), build()
    with tiermem.TierManager("cpu", hbm=hbm, dram="4MiB") as tier:
        tier.wrap(model)
        if trained:
            backward(model, 0)
            model.zero_grad()
        seen: list[list[Any]] = []
        for one in (plain, model):
            found: list[Any] = []

            def hook(*_: Any, one: Any = one, found: list[Any] = found) -> None:
                of, inputs, given = ASKED[asked](one)
                try:
                    got = torch.autograd.grad(of, inputs, given, allow_unused=True)
                    found.extend(None if g is None else g.clone() for g in got)
                except RuntimeError as error:
                    found.append(str(error))

            handle = one[2].register_forward_hook(hook)
            with torch.inference_mode():
                found.append(one(batch(0)).clone())
            handle.remove()
            seen.append(found)
        assert_same(*seen, "gradients")
        assert all(param.grad is None for param in model.parameters())
