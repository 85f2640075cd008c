"""What programs write to the values of ``model.state_dict()`` reaches the model, as with torch."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support_nn import same_bits
from torch import Tensor, nn

import tiermem

WIDTH = 32


def layers() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(
        first, nn.BatchNorm1d(WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(4)), first
    )


def tiers() -> tiermem.TierManager:
    return tiermem.TierManager("cpu", hbm=20480, dram=8 << 20)  # the weights have 22 KB


def inputs(step: int = 0) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def by_name(model: nn.Module) -> None:
    """As weights of another architecture are loaded."""
    state = model.state_dict()
    state["0.weight"].copy_(torch.ones(WIDTH, WIDTH))
    state["1.running_mean"].fill_(0.25)


def each_value(model: nn.Module) -> None:
    for value in model.state_dict().values():
        value.mul_(2)


def by_a_view(model: nn.Module) -> None:
    row = model.state_dict()["3.weight"].view(-1)[5:9]
    row.zero_()


def of_a_part(model: Any) -> None:
    model[2].state_dict()["bias"] += 1


def anew_each_time(model: nn.Module) -> None:
    for name in ("0.bias", "5.weight"):
        model.state_dict()[name].clamp_(-0.01, 0.01)


def call(model: Any, tier: Any) -> Any:
    return model.eval()(inputs())


def look(model: Any, tier: Any) -> Any:
    return [p.sum() for p in model.parameters()], [b.clone() for b in model.buffers()]


def dictionary(model: Any, tier: Any) -> Any:
    return dict(model.state_dict())


def taken_out(model: Any, tier: Any) -> Any:
    if tier is not None:
        tier.unwrap(model)
    return dict(model.state_dict())


def closed(model: Any, tier: Any) -> Any:
    if tier is not None:
        tier.close()
    return dict(model.state_dict())


def ordinary(model: Any, tier: Any) -> Any:
    if tier is None:
        return [p.clone() for p in model.parameters()]
    with tier.materialize(model):
        return [p.clone() for p in model.parameters()]


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value
    return [tensor for item in values for tensor in flat(item)]


@pytest.mark.parametrize("use", [call, look, dictionary, taken_out, closed, ordinary])
@pytest.mark.parametrize("write", [by_name, each_value, by_a_view, of_a_part, anew_each_time])
def test_before_each_use(
    write: Callable[[nn.Module], None], use: Callable[[Any, Any], Any]
) -> None:
    plain = layers()
    write(plain)
    expected = flat(use(plain, None))
    with tiers() as tier:
        model = tier.wrap(layers())
        write(model)
        found = flat(use(model, tier))
    assert len(found) == len(expected)
    assert all(map(same_bits, found, expected))


def test_an_average_in_the_tiers() -> None:
    """As object detectors keep one."""

    def run(tier: Any) -> list[Tensor]:
        model = layers()
        average = copy.deepcopy(model).eval()
        optimizer: Any
        if tier is None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        else:
            tier.wrap(model)
            tier.wrap(average)
            optimizer = tier.optimizer(model, torch.optim.SGD, lr=0.1)
        found = []
        for step in range(3):
            model(inputs(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                now = model.state_dict()
                for name, value in average.state_dict().items():
                    if value.is_floating_point():
                        value *= 0.9
                        value += 0.1 * now[name].detach()
                found.append(average(inputs()))
        return [*found, *(value.clone() for value in average.state_dict().values())]

    expected = run(None)
    with tiers() as tier:
        assert all(map(same_bits, run(tier), expected))


def test_weights_that_are_clipped_by_it_between_steps() -> None:
    def run(tier: Any) -> list[Tensor]:
        model = layers() if tier is None else tier.wrap(layers())
        optimizer: Any
        if tier is None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        else:
            optimizer = tier.optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
        for step in range(3):
            model(inputs(step)).square().mean().backward()
            for value in model.state_dict().values():
                if value.dim() == 2:
                    value.clamp_(-0.05, 0.05)
            optimizer.step()
            optimizer.zero_grad()
        return [value.clone() for value in model.state_dict().values()]

    expected = run(None)
    with tiers() as tier:
        assert all(map(same_bits, run(tier), expected))


def test_a_save_has_it(tmp_path: Any) -> None:
    with tiers() as tier:
        model: Any = tier.wrap(layers())
        model.state_dict()["0.bias"].fill_(3)
        tier.save(tmp_path / "run")
        with torch.no_grad():
            model[0].bias.zero_()
        tier.load(tmp_path / "run")
        assert model[0].bias.eq(3).all()


def test_one_that_is_older_than_the_model_is_refused() -> None:
    """With torch it would have changed with the model; here nobody knows what was written."""
    with tiers() as tier:
        model: Any = tier.wrap(layers())
        old = model.state_dict()
        with torch.no_grad():
            model[3].weight.mul_(0.5)
        expected = model[3].weight.detach().clone()
        old["3.weight"].add_(1)
        with pytest.raises(tiermem.ParameterError, match=r"3\.weight.*call state_dict\(\) anew"):
            model(inputs())
        assert same_bits(model[3].weight.detach(), expected)  # said once, and nothing is changed


def test_the_manager_is_closed_where_one_is_refused() -> None:
    with pytest.raises(tiermem.ParameterError, match="anew"), tiers() as tier:
        model: Any = tier.wrap(layers())
        old = model.state_dict()
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        old["0.weight"].add_(1)
    assert tier.closed
    assert type(model[0].weight) is nn.Parameter


def test_copies_that_nobody_has_are_freed_with_the_next_use() -> None:
    with tiers() as tier:
        model = tier.wrap(layers())
        state = model.state_dict()
        one = weakref.ref(state["3.weight"])
        kept = state["2.weight"]
        del state
        model(inputs())
        assert one() is None
        kept.zero_()
        assert not model.state_dict()["2.weight"].any()
