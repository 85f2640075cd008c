"""Writes of weights that torch does not count are noticed wherever a call may come to them."""

from __future__ import annotations

import copy
import functools
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import support_writing
import torch
from support_nn import same_bits
from support_writing import Scaler
from torch import nn

import tiermem
from tiermem.nn.wrap import intercepted

WIDTH, LAYERS = 32, 6
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class Layer(nn.Module):
    """Writes its weight once it is told to; returns a product with it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.writes = False

    def write(self) -> None:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            self.writes = False
            self.write()
        return x @ self.weight


class OfModule(Layer):
    def write(self) -> None:
        support_writing.scale(self.weight)


SCALER = Scaler()


class OfGlobalObject(Layer):
    def write(self) -> None:
        SCALER(self.weight)


class OfAttribute(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.scaler = Scaler()

    def write(self) -> None:
        self.scaler(self.weight)


def quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return args[0].leave(function, *args)

    return call


class OfDecorator(Layer):
    @staticmethod
    def leave(function: Callable[..., Any], *args: Any) -> Any:
        with torch.no_grad():
            return function(*args)

    @quietly
    def write(self) -> None:
        support_writing.scale(self.weight)


def again(function: Callable[..., Any]) -> Callable[..., Any]:
    """Knows what it is put around by ``__wrapped__`` alone."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return call.__wrapped__(*args)  # type: ignore[attr-defined]

    return call


class OfWrapped(Layer):
    @again
    def write(self) -> None:
        support_writing.scale(self.weight)


class Inner(Layer):
    def scale(self) -> None:
        self.weight.data.mul_(1.5)


class OfChild(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def write(self) -> None:
        self.inner.scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(super().forward(x))


class OfChildren(OfChild):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Inner()])  # type: ignore[assignment]

    def write(self) -> None:
        for inner in self.inner:  # type: ignore[attr-defined]
            inner.scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner[0](Layer.forward(self, x))  # type: ignore[index]


class Replacing(Layer):
    """Has other values elsewhere, and keeps the memory with those of before."""

    def write(self) -> None:
        self.before = self.weight.data
        self.weight.data = self.before * 2 + 1


class Swapping(Layer):
    """Exchanges the memory of two weights, which are in one block."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def write(self) -> None:
        self.weight.data, self.other.data = self.other.data, self.weight.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu() @ self.other


def follow(kind: type[nn.Module], write: Callable[[Any], None], *, graph: bool = False) -> None:
    """Compares forwards, of which the third one writes a weight, and the weights at the end."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(kind() for _ in range(LAYERS)))
    model, x = copy.deepcopy(plain), torch.randn(2, WIDTH)
    hbm = sum(param.nbytes for param in plain.parameters()) // 2
    with tiermem.TierManager("cpu", hbm=hbm, dram=1 << 20) as tier:
        tier.wrap(model, blocks=[str(number) for number in range(LAYERS)])
        with torch.set_grad_enabled(graph):
            for number in range(6):
                if number == 2:
                    for one in (plain, model):
                        write(one[3])
                assert same_bits(model(x).detach(), plain(x).detach())
        state = model.state_dict()
        assert all(same_bits(state[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        OfModule,
        OfGlobalObject,
        OfAttribute,
        OfDecorator,
        OfWrapped,
        OfChild,
        OfChildren,
        Replacing,
        Swapping,
    ],
)
def test_what_a_module_writes_by_its_helpers(kind: type[nn.Module], graph: bool) -> None:
    def write(module: Any) -> None:
        module.writes = True

    follow(kind, write, graph=graph)


def by_array(weight: torch.Tensor) -> None:
    found = np.asarray(weight.detach())
    found *= 1.5


def by_numpys_dlpack(weight: torch.Tensor) -> None:
    found = np.from_dlpack(weight.detach())
    found *= 1.5


def by_torchs_dlpack(weight: torch.Tensor) -> None:
    torch.from_dlpack(weight.detach()).mul_(1.5)


def with_the_counter_kept(weight: torch.Tensor) -> None:
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
        weight.mul_(1.5)


def by_the_text_of_a_name(weight: torch.Tensor) -> None:
    weight.__getattribute__("data").mul_(1.5)


def by_the_text_of_a_method(weight: torch.Tensor) -> None:
    found = operator.methodcaller("numpy")(weight.detach())
    found *= 1.5


@pytest.mark.parametrize(
    "way",
    [
        by_array,
        by_numpys_dlpack,
        by_torchs_dlpack,
        with_the_counter_kept,
        by_the_text_of_a_name,
        by_the_text_of_a_method,
    ],
)
def test_ways_around_the_version_counter(way: Callable[[torch.Tensor], None]) -> None:
    class Written(Layer):
        def write(self) -> None:
            way(self.weight)

    follow(Written, lambda module: setattr(module, "writes", True))


class Linear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


@pytest.mark.parametrize("hook", [Scaler(), Scaler().hook, functools.partial(Scaler().hook)])
def test_what_a_hook_writes(hook: Any) -> None:
    """One that is an object, a method of one, or made of such."""
    follow(Linear, lambda module: module.register_forward_pre_hook(hook))


def test_a_method_that_takes_the_place_of_forward() -> None:
    def write(module: Any) -> None:
        module.writes = True

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            self.writes = False
            support_writing.scale(self.weight)
        return x @ self.weight

    class Patched(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.forward = types.MethodType(forward, self)  # type: ignore[method-assign]

        def __deepcopy__(self, memo: Any) -> Any:
            made = Patched()
            made.load_state_dict(self.state_dict())
            return made

    follow(Patched, write)


@functools.wraps(torch.relu)
def relu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


def test_code_around_a_builtin_function_is_looked_at() -> None:
    class Around(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return relu(super().forward(x))

    follow(Around, lambda _module: None)


@pytest.mark.parametrize("inside", [False, True])
def test_data_with_other_strides_is_refused(inside: bool) -> None:
    """Plain torch computes with them, and may round otherwise; of one dimension it does not."""

    class Assigns(nn.Linear):
        value: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.value is not None:
                self.weight.data = self.value
            return super().forward(x)

    model = Assigns(32, 32)
    weight, column = torch.rand(32, 32), torch.rand(32, 2)[:, 0]
    with tiermem.TierManager("cpu", hbm="1MiB", dram="4MiB") as tier:
        tier.wrap(model)
        before = model.weight.detach().clone()
        with pytest.raises(tiermem.ParameterError, match=r"strides \(1, 32\).*\.data\.copy_"):
            if inside:
                model.value = weight.t()
                model(torch.rand(2, 32))
            else:
                model.weight.data = weight.t()
        model.value = None
        assert torch.equal(model.weight.detach(), before)
        model.weight.data.copy_(weight.t())
        assert torch.equal(model.weight.detach(), weight.t())
        model.bias.data = column
        assert torch.equal(model.bias.detach(), column)


def test_data_is_assigned_to_weights_that_are_away() -> None:
    """Their placeholders have strides of their own."""
    model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(4)])
    values = [torch.rand(32, 32) for _ in model]
    with tiermem.TierManager("cpu", hbm="12KiB", dram="1MiB") as tier, torch.no_grad():
        tier.wrap(model)
        for _ in range(2):
            model(torch.rand(1, 32))
        for weight, value in zip(model.parameters(), values, strict=True):
            with pytest.raises(tiermem.ParameterError, match=r"its memory has \(32, 1\)"):
                weight.data = value.t()
            weight.data = value
        for layer, value in zip(model, values, strict=True):
            assert torch.equal(layer.weight, value)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("build", [lambda: nn.Conv2d(8, 4, 1), lambda: nn.Conv3d(1, 4, 3)])
def test_data_of_a_convolution_is_not_assigned_from_another_order_of_channels(
    build: Callable[[], nn.Module], last: bool
) -> None:
    """Only the strides of dimensions of one element tell them apart, and torch chooses by these."""
    model = build()
    given = torch.rand_like(model.weight)  # type: ignore[arg-type]
    formats = torch.contiguous_format, _LAST[given.ndim]
    model.to(memory_format=formats[last])  # type: ignore[call-overload]
    expected = given.to(memory_format=formats[last]) * 2
    with tiermem.TierManager("cpu", hbm="1MiB", dram="4MiB") as tier, torch.no_grad():
        tier.wrap(model)
        with pytest.raises(tiermem.ParameterError, match="cannot have strides"):
            model.weight.data = given.to(memory_format=formats[not last])
        model.weight.data = expected
        assert torch.equal(model.weight, expected)
    assert model.weight.stride() == expected.stride()


def test_code_that_wrap_has_looked_at_is_not_looked_at_in_the_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model of many modules would wait for that as long as for its weights."""
    looked_at = list[nn.Module]()
    may_write = intercepted.may_write_uncounted

    def noted(module: nn.Module, **options: Any) -> bool:
        looked_at.append(module)
        return may_write(module, **options)

    monkeypatch.setattr(intercepted, "may_write_uncounted", noted)
    model = nn.Sequential(*(Linear() for _ in range(LAYERS)))
    with tiermem.TierManager(device="cpu", hbm="16KiB", dram="1MiB") as tier, torch.no_grad():
        tier.wrap(model)
        assert looked_at == [model, *model]
        looked_at.clear()
        model(torch.randn(2, WIDTH))
        assert not looked_at
        model[1].further = Scaler()
        model(torch.randn(2, WIDTH))
        assert looked_at == [model[1]]


@pytest.mark.parametrize("part", [lambda w: w.t(), lambda w: w[:16]], ids=["strides", "shape"])
def test_another_form_of_the_same_memory_is_refused_in_a_call(
    part: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    class Assigns(nn.Linear):
        forms = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.forms:
                self.weight.data = part(self.weight.data)
            return super().forward(x)

    with tiermem.TierManager("cpu", hbm="16KiB", dram="1MiB") as tier, torch.no_grad():
        model = tier.wrap(nn.Sequential(*[Assigns(32, 32, bias=False) for _ in range(4)]))
        before = model[1].weight.detach().clone()
        model[1].forms = True  # type: ignore[assignment]
        with pytest.raises(tiermem.ParameterError, match=r"block .Sequential.1. cannot"):
            model(torch.ones(2, 32))
        model[1].forms = False  # type: ignore[assignment]
        assert same_bits(model[1].weight, before)


def calls_of(act: Callable[[], object]) -> int:
    """Returns how many functions of Python are called."""
    calls = 0

    def count(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("look", ["data", "detach"])
def test_a_look_at_one_weight_goes_through_no_others_of_its_block(look: str) -> None:
    """Loops over ``p.data`` of a block with many small parameters would be quadratic."""
    counts = []
    for number in (4, 400):
        model = nn.Module()
        for index in range(number):
            model.register_parameter(f"p{index}", nn.Parameter(torch.zeros(4)))
        with tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB") as tier:
            tier.wrap(model)
            weights = list(model.parameters())
            for weight in weights[:3]:
                use = (lambda: weight.data) if look == "data" else weight.detach  # noqa: B023
                calls = calls_of(use)
            counts.append(calls)
    assert counts[0] == counts[1]
