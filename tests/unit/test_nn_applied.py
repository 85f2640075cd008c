"""`to()`, `half()` and the like after `wrap`: what changes nothing does nothing, or an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support_nn import assert_same, seed
from torch import nn

import tiermem


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1)
        self.linear = nn.Linear(5, 4)
        self.half_layer = nn.Linear(4, 4).bfloat16()
        self.norm = nn.BatchNorm1d(4, affine=False)  # nothing but buffers
        self.rnn = nn.LSTM(4, 3)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        self.register_buffer("sparse", torch.eye(4).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(self.conv(x).mean((2, 3)))
        x = self.norm(self.half_layer(x.bfloat16()).float()) * self.mask
        return self.rnn(x @ self.sparse.to_dense().to(x.dtype))[0]


def build() -> nn.Module:
    seed(1)
    return Net()


def use(model: nn.Module) -> torch.Tensor:
    seed(2)
    return model(torch.randn(6, 3, 4, 4))


@pytest.fixture
def model() -> Iterator[nn.Module]:
    with tiermem.TierManager("cpu", hbm="64KiB", dram="1MiB") as tier:
        yield tier.wrap(build())


REFUSED: dict[str, Callable[[Any], Any]] = {
    "half": lambda m: m.half(),
    "float": lambda m: m.float(),  # half_layer is bfloat16
    "double": lambda m: m.double(),
    "bfloat16": lambda m: m.bfloat16(),
    "type": lambda m: m.type(torch.float64),
    "type by name": lambda m: m.conv.type("torch.DoubleTensor"),
    "to dtype": lambda m: m.to(torch.float16),
    "to device": lambda m: m.to("meta"),
    "to both": lambda m: m.to("cpu", torch.float64),
    "to like a tensor": lambda m: m.to(torch.zeros(1, dtype=torch.float64)),
    "channels_last": lambda m: m.to(memory_format=torch.channels_last),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "to_empty with a number": lambda m: m.to_empty(device=torch.device("cpu:0")),
    "to both with a number": lambda m: m.to("cpu:0", torch.float64),
    "share_memory": lambda m: m.share_memory(),
    "in place": lambda m: m._apply(lambda t: t.add_(1) if t.is_floating_point() else t),
    "copy": lambda m: m._apply(torch.clone),
    "submodule": lambda m: m.half_layer.float(),
    "only a later one": lambda m: m.to(torch.float32),
    "buffers": lambda m: m.norm.half(),
    "channels of one layer": lambda m: m.conv.to(memory_format=torch.channels_last),
    "rnn": lambda m: m.rnn.double(),
    "outer": lambda m: nn.Sequential(nn.Identity(), m).half(),
}
ALLOWED: dict[str, Callable[[Any], Any]] = {
    "to device": lambda m: m.to("cpu"),
    "to device with a number": lambda m: m.to("cpu:0"),  # torch copies for it
    "to device object": lambda m: m.to(torch.device("cpu"), non_blocking=True),
    "cpu": lambda m: m.cpu(),
    "float": lambda m: m.conv.float(),
    "bfloat16": lambda m: m.half_layer.bfloat16(),
    "contiguous": lambda m: m.to(memory_format=torch.contiguous_format),
    "channels without convolution": lambda m: m.linear.to(memory_format=torch.channels_last),
    "rnn": lambda m: m.rnn.float(),
    "type": lambda m: m.linear.type(torch.float32),
    "itself": lambda m: m._apply(lambda t: t),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_change_tensors_is_refused(model: nn.Module, what: str) -> None:
    with pytest.raises(tiermem.ParameterError, match=r"before tier\.wrap.*tier\.unwrap"):
        REFUSED[what](model)
    plain = build()
    assert_same(dict(plain.state_dict()), dict(model.state_dict()), "state")
    assert_same(use(plain), use(model), "output")


@pytest.mark.parametrize("what", ALLOWED)
def test_what_changes_nothing_does_nothing(model: nn.Module, what: str) -> None:
    assert isinstance(ALLOWED[what](model), nn.Module)
    plain = build()
    ALLOWED[what](plain)
    assert_same(dict(plain.state_dict()), dict(model.state_dict()), "state")
    assert_same(use(plain), use(model), "output")


def test_a_layout_that_is_there_already_is_allowed() -> None:
    model = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    with tiermem.TierManager("cpu", hbm="64KiB", dram="1MiB") as tier:
        tier.wrap(model)
        assert model.to(memory_format=torch.channels_last) is model
        with pytest.raises(tiermem.ParameterError, match="memory format"):
            model.to(memory_format=torch.contiguous_format)


def test_what_is_not_managed_is_converted_as_ever(model: nn.Module) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("sparse", torch.eye(4).to_sparse())

    with tiermem.TierManager("cpu", hbm="64KiB", dram="1MiB") as tier:
        both = tier.wrap(nn.Sequential(nn.Linear(2, 2, dtype=torch.float64), Sparse()))
        both.double()
        assert both[1].sparse.dtype is torch.float64


def test_parameters_that_came_after_wrap_are_converted_and_stay_parameters(
    model: nn.Module,
) -> None:
    model.conv.extra = extra = nn.Linear(3, 3).double()
    weight = extra.weight
    weight.grad = torch.ones(3, 3, dtype=torch.float64)
    model.conv.float()
    assert extra.weight is weight
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    assert weight.dtype is torch.float32
    assert weight.grad.dtype is torch.float32
    assert not weight.grad.requires_grad


def test_it_works_again_after_unwrap() -> None:
    with tiermem.TierManager("cpu", hbm="64KiB", dram="1MiB") as tier:
        model = tier.unwrap(tier.wrap(build()))
        assert model.double().conv.weight.dtype is torch.float64
