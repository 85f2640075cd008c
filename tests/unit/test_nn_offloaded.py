"""Another library's offloading and ours on one model: an error that says to choose."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_nn import same_bits
from torch import nn

import tiermem


def build() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])


class OffloadHook:
    """As libraries have it: keeps copies, and points weights at them around each call."""

    def __init__(self, module: nn.Module) -> None:
        self.copies = {name: p.detach().clone() for name, p in module.named_parameters()}


class AlignHook:
    """One whose class does not tell: with ``offload`` it takes weights away between calls."""

    def __init__(self, offload: bool) -> None:
        self.offload = offload


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "one": OffloadHook,
    "a flag": lambda module: AlignHook(True),
    "a tuple": lambda module: SimpleNamespace(hooks=(AlignHook(False), OffloadHook(module))),
    "a registry": lambda module: SimpleNamespace(hooks={"group": OffloadHook(module)}),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_module_that_is_offloaded_already_is_refused(kind: str) -> None:
    model = build()
    model[1]._other_hook = HOOKS[kind](model[1])
    with tiermem.TierManager("cpu", hbm="64KiB", dram="1MiB") as tier:
        with pytest.raises(tiermem.WrapError, match=r"module '1'.*'_other_hook'.*use one of the"):
            tier.wrap(model)
        del model[1]._other_hook
        tier.wrap(model)


def test_hooks_that_offload_nothing_are_no_reason() -> None:
    model, plain = build(), build()
    model[1]._other_hook = AlignHook(False)
    model[2]._other_hook = SimpleNamespace(hooks={"log": object()})
    model[3]._other_hook = lambda module: None
    with tiermem.TierManager("cpu", hbm="64KiB", dram="1MiB") as tier:
        tier.wrap(model)
        x = torch.ones(2, 32)
        assert same_bits(model(x), plain(x))


def test_weights_that_another_library_took_away_are_told_from_those_never_there() -> None:
    model = build()
    model[2].weight = nn.Parameter(torch.empty(32, 32, device="meta"))
    with tiermem.TierManager("cpu", hbm="64KiB", dram="1MiB") as tier:
        with pytest.raises(tiermem.WrapError, match="load its weights first"):
            tier.wrap(model)
        plain = model[2].forward
        model[2].forward = lambda x: plain(x)  # it brings them for the time of the call
        with pytest.raises(tiermem.WrapError, match=r"another library.*use one of the two"):
            tier.wrap(model)


@pytest.mark.parametrize("how", ["class of the old one", "meta"])
def test_a_library_that_puts_other_tensors_in_place_is_told_to_choose(how: str) -> None:
    model, plain = build(), build()
    x = torch.ones(2, 32)
    with tiermem.TierManager("cpu", hbm="16KiB", dram="1MiB") as tier:
        tier.wrap(model)
        old = model[1]._parameters["weight"]
        if how == "meta":
            new = nn.Parameter(old.to("meta"))
        else:  # as libraries put a tensor in a parameter's place
            new = type(old)(old.to("cpu", copy=True), requires_grad=old.requires_grad)
        with pytest.raises(tiermem.ParameterError, match=r"offloading.*after tier\.unwrap"):
            model[1]._parameters["weight"] = new
        assert same_bits(model(x), plain(x))


class Moves(nn.Module):
    """A forward around another, as group offloading has it: weights come for the call only."""

    def __init__(self, inner: nn.Linear, to: torch.Tensor) -> None:
        super().__init__()
        self.inner, self.to_ = inner, to

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner.weight.data = self.to_
        return x


@pytest.mark.parametrize("budget", ["16KiB", "1MiB"])
@pytest.mark.parametrize(
    ("value", "held", "said"),
    [  # torch itself refuses the meta device for a tensor that is there
        (torch.empty(32, 32, device="meta"), False, "'cpu'.* moved to 'meta'.*use one of the two"),
        (torch.zeros(2, 2), False, r"cannot become \(2, 2\)"),
        (torch.zeros(2, 2), True, r"cannot become \(2, 2\)"),
        (torch.zeros(32, 32, dtype=torch.float64), False, r"cannot become .* torch.float64"),
        (torch.zeros(32, 32, dtype=torch.float64), True, r"cannot become .* torch.float64"),
    ],
)
def test_data_of_another_device_or_form_is_refused(
    value: torch.Tensor, held: bool, said: str, budget: str
) -> None:
    model, plain = build(), build()
    x = torch.ones(2, 32)
    if held:
        model[1] = nn.Sequential(Moves(model[1], value))
    with tiermem.TierManager("cpu", hbm=budget, dram="1MiB") as tier:
        tier.wrap(model)
        with pytest.raises(tiermem.ParameterError, match=rf"1\..*weight of block '.+'.*{said}"):
            if held:
                model(x)
            else:
                model[1].weight.data = value
        if held:
            assert same_bits(model[1][0].inner(x), plain[1](x))
        else:
            assert same_bits(model(x), plain(x))


def test_data_of_the_same_device_is_taken_over() -> None:
    model, plain = build(), build()
    value = torch.full((32, 32), 0.25)
    with tiermem.TierManager("cpu", hbm="16KiB", dram="1MiB") as tier:
        tier.wrap(model)
        for one in (model, plain):
            one[1].weight.data = value.clone()
        assert same_bits(model(torch.ones(2, 32)), plain(torch.ones(2, 32)))
