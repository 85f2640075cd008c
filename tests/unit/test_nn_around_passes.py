"""What a resident model allows around its passes and a tiered one once got wrong."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support_nn import Pair, Tiers, check_table, same_bits, seed
from torch import nn

import tiermem

WIDTH = 16


def net() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])


def loss(model: nn.Module, factor: float = 1.0) -> torch.Tensor:
    return model(torch.linspace(-1, factor, 3 * WIDTH).reshape(3, WIDTH)).square().sum()


class Stop(Exception):
    """Raised in the middle of backward."""


@contextmanager
def pair() -> Iterator[Pair]:
    with Pair(net, Tiers("dram")) as both:
        yield both
        both.check_gradients("lazy")
        both.finish()


# -- gradients that were put aside -------------------------------------------------------


def put_back(model: nn.Module, _: Any) -> None:
    loss(model).backward()
    aside = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss(model, 2).backward()
    for param, gradient in zip(model.parameters(), aside, strict=True):
        param.grad = gradient
    loss(model, 3).backward()


def exchange(model: Any, _: Any) -> None:
    loss(model).backward()
    first, second = model[0].weight, model[1].weight
    first.grad, second.grad = second.grad, first.grad
    loss(model, 3).backward()


def exchange_and_step(model: Any, optimizer: Any) -> None:
    loss(model).backward()
    first, second = model[0].weight, model[1].weight
    first.grad, second.grad = second.grad, first.grad
    optimizer.step()


def exchange_and_clip(model: Any, optimizer: Any) -> Any:
    exchange(model, None)
    model[2].weight.grad, model[3].weight.grad = model[3].weight.grad, model[2].weight.grad
    if isinstance(optimizer, tiermem.TieredOptimizer):
        norm = optimizer.clip_grad_norm_(0.5)
    else:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return norm


def change_aside(model: nn.Module, _: Any) -> None:
    loss(model).backward()
    aside = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss(model, 2).backward()
    for param, gradient in zip(model.parameters(), aside, strict=True):
        gradient.mul_(2)
        param.grad.add_(gradient)


def change_what_was_taken_off(model: Any, _: Any) -> None:
    loss(model).backward()
    first, second, third = (layer.weight for layer in list(model)[:3])
    aside, first.grad = first.grad, None
    aside.mul_(2)
    assert first.grad is None
    second.grad, third.grad = third.grad, second.grad
    second.grad.mul_(2)
    third.grad.view(-1)[:3] = aside.view(-1)[:3]


ASIDE = [
    put_back,
    exchange,
    exchange_and_step,
    exchange_and_clip,
    change_aside,
    change_what_was_taken_off,
]


@pytest.mark.parametrize("use", ASIDE)
def test_a_gradient_that_was_put_aside_is_an_ordinary_one(use: Callable[..., Any]) -> None:
    with pair() as both:
        both.both(use)


# -- hooks of users on parameters --------------------------------------------------------


def test_a_hook_that_is_new_sees_the_gradient_that_is_added_to() -> None:
    def use(model: Any, _: Any) -> Any:
        loss(model).backward()
        param, seen = model[1].weight, []
        param.register_hook(lambda _: seen.append(param.grad.clone()))
        loss(model, 2).backward()
        loss(model, 3).backward()
        return seen

    with pair() as both:
        both.both(use)


def _halve(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def test_a_hook_from_before_the_wrap_sees_the_whole_sum() -> None:
    def hooked() -> nn.Module:
        model = net()
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(_halve)
        return model

    def use(model: Any, _: Any) -> None:
        for factor in (1.0, 2.0, 3.0):
            loss(model, factor).backward()

    with Pair(hooked, Tiers("dram")) as both:
        both.both(use)
        both.check_gradients("lazy")
        both.finish()


# -- a backward cut short ----------------------------------------------------------------


def test_gradients_are_there_after_a_backward_that_a_hook_of_theirs_cut_short() -> None:
    def use(model: Any, _: Any) -> None:
        loss(model).backward()
        handle = model[1].weight.register_hook(_stop)
        with pytest.raises(Stop):
            loss(model).backward()
        handle.remove()
        assert all(p.grad is not None for p in model.parameters())
        model.zero_grad()

    with pair() as both:
        both.both(use)


def test_a_backward_after_one_cut_short_is_another_one() -> None:
    def use(model: Any, _: Any) -> Any:
        loss(model).backward()
        later = loss(model, 2)
        middle = model[1](model[0](torch.ones(1, WIDTH)))
        middle.register_hook(_stop)
        end = model[3](model[2](middle)).sum()
        with pytest.raises(Stop):
            end.backward()
        found = torch.autograd.grad(later, list(model[0].parameters()))
        assert all(p.grad is not None for p in model.parameters())
        return [g.clone() for g in found]

    with pair() as both:
        both.both(use)


def _stop(_: torch.Tensor) -> None:
    raise Stop


# -- materialize, unwrap, state dicts ----------------------------------------------------


@pytest.mark.parametrize("part", [False, True])
def test_a_model_unwrapped_inside_materialize_is_left_alone(part: bool) -> None:
    with Pair(net, Tiers("dram")) as both:
        both.both(lambda model, _: loss(model).backward())
        with both.tier.materialize(both.model[0] if part else both.model):
            both.tier.unwrap(both.model)
        both.check_gradients("lazy")
        check_table(both.tier)
        for name, value in both.plain.state_dict().items():
            assert same_bits(value, both.model.state_dict()[name])
        both.both(lambda model, _: loss(model, 2))


def test_a_frozen_parameter_keeps_the_gradient_it_came_with() -> None:
    def prepare(model: Any) -> None:
        loss(model).backward()
        model[1].requires_grad_(False)

    with Pair(net, Tiers("dram"), prepare=prepare) as both:
        with both.tier.materialize(both.model):
            both.check_gradients("lazy")
        both.check_gradients("lazy")
        both.finish()


@pytest.mark.parametrize("other", [False, True])
def test_unwrap_goes_by_what_param_grad_was_set_to(other: bool) -> None:
    def use(model: nn.Module, _: Any) -> None:
        loss(model).backward()
        for param in model.parameters():
            param.grad = torch.ones_like(param) if other else None

    with Pair(net, Tiers("dram")) as both:
        both.both(use)
        both.tier.unwrap(both.model)
        both.check_gradients("lazy")


def test_a_state_dict_made_twice_in_one_place_has_the_values_of_now() -> None:
    def use(model: nn.Module, _: Any) -> Any:
        state: OrderedDict[str, Any] = OrderedDict()
        model.state_dict(destination=state)
        for param in model.parameters():
            param.data.mul_(2)
        model.state_dict(destination=state)
        return dict(state)

    with pair() as both:
        both.both(use)


@pytest.mark.parametrize("how", ["counted", "data", "alias", "step"])
def test_a_state_dict_made_in_several_calls_has_the_values_of_each(how: str) -> None:
    """Of one module under two names, and of others: what was written in between shows."""

    def use(model: Any, optimizer: Any) -> Any:
        state: OrderedDict[str, Any] = OrderedDict()
        alias = model[0].weight.data if how == "alias" else None
        loss(model).backward()
        model[0].state_dict(destination=state, prefix="before.")
        with torch.no_grad():
            if alias is not None:
                alias.mul_(2)
            elif how == "step":
                optimizer.step()
            for param in model.parameters() if how in ("counted", "data") else ():
                (param if how == "counted" else param.data).mul_(2)
        model[0].state_dict(destination=state, prefix="after.")
        state["after.weight"].requires_grad_(False)
        model[1].state_dict(destination=state, prefix="other.")
        return {name: value.clone() for name, value in state.items() if "before" not in name}

    with pair() as both:
        both.both(use)


def test_a_state_dict_made_in_several_calls_keeps_what_is_tied() -> None:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    model[2].weight = model[0].weight
    with tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB") as tier:
        tier.wrap(model)
        for alias in (None, model[0].weight.data):
            state: OrderedDict[str, Any] = OrderedDict()
            for name in ("0", "2", "1"):
                model.get_submodule(name).state_dict(destination=state, prefix=f"{name}.")
            assert state["0.weight"] is state["2.weight"]
            state["0.weight"].zero_()  # a copy
            model[0].state_dict(destination=state, prefix="again.")
            assert same_bits(state["again.weight"], model[0].weight)
            del alias
        with tier.materialize(model):
            for name in ("first", "then", "last"):
                model[0].weight.data.mul_(2)
                model[0].state_dict(destination=state, prefix=f"{name}.")
                assert same_bits(state[f"{name}.weight"], model[0].weight)


def test_memory_that_a_parameter_is_set_to_is_taken_over() -> None:
    def use(model: Any, _: Any) -> None:
        with torch.no_grad():
            assert model[0].weight.set_(torch.ones(WIDTH, WIDTH)) is model[0].weight
        loss(model).backward()

    with pair() as both:
        both.both(use)
        with pytest.raises(tiermem.ParameterError, match="cannot become"):
            both.model[0].weight.set_(torch.ones(WIDTH + 1))


def test_an_unwrapped_model_can_be_collected_while_its_manager_goes_on() -> None:
    with tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB") as tier:
        for training in (False, True):
            seed(0)
            model = tier.wrap(net())
            if training:
                loss(model).backward()
            kept = [weakref.ref(param) for param in model.parameters()]
            tier.unwrap(model)
            for param in model.parameters():
                assert not param._backward_hooks and not param._post_accumulate_grad_hooks
            del model, param
            gc.collect()
            assert not any(ref() is not None for ref in kept)
