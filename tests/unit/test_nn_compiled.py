"""Functions that ``torch.compile`` compiles, given what is in the tiers; compiled steps."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support_nn import assert_same, same_bits, seed
from torch import nn

import tiermem

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own


def layers() -> nn.Sequential:
    seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))


@pytest.fixture
def pair() -> Iterator[tuple[nn.Module, nn.Module]]:
    """A model in the tiers, whose weights are away, and the resident one."""
    with tiermem.TierManager("cpu", hbm="8KiB", dram="1MiB") as tier:
        model, resident = tier.wrap(layers()), layers()
        for one in (model, resident):
            one(torch.ones(2, 16)).square().mean().backward()
        yield model, resident
    torch.compiler.reset()


@pytest.mark.parametrize("what", ["weights", "gradients", "closure"])
def test_a_compiled_function_of_what_is_away(pair: tuple[nn.Module, nn.Module], what: str) -> None:
    def use(model: Any) -> Any:
        weights = [layer.weight for layer in model]
        given = [weight.grad for weight in weights] if what == "gradients" else weights

        @torch.compile(backend="eager")
        def lerp(means: list[torch.Tensor], given: list[torch.Tensor]) -> torch.Tensor:
            for mean, tensor in zip(means, given, strict=True):
                mean.lerp_(tensor, 0.1)
            return model[0].weight.sum() if what == "closure" else given[0].sum() + given[7].sum()

        means = [torch.ones(16, 16) for _ in given]
        with torch.no_grad():
            return [[lerp(means, given) for _ in range(2)], means]

    assert_same(use(pair[0]), use(pair[1]), what)


def test_a_compiled_step_is_made_as_others_are() -> None:
    """Those inside backward and in the next forward are not compiled."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with tiermem.TierManager("cpu", hbm="12KiB", dram="1MiB") as tier:
        model, resident = tier.wrap(layers()), layers()
        mine = tier.optimizer(model, torch.optim.AdamW, lr=1e-3, overlap=False)
        theirs = torch.optim.AdamW(resident.parameters(), lr=1e-3)
        for step in (torch.compile(mine.step, backend=backend), mine.step):
            for one in (model, resident):
                one(torch.ones(2, 16)).square().mean().backward()
            step()
            theirs.step()
            for optimizer in (mine, theirs):
                optimizer.zero_grad()
        assert not graphs
        state = model.state_dict()
        assert all(same_bits(value, state[name]) for name, value in resident.state_dict().items())
    torch.compiler.reset()


def test_a_layer_of_several_blocks_is_refused_with_their_names_and_works_as_one() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x))

    model, x = nn.Sequential(Layer(), Layer()), torch.ones(2, 128)
    expected = model(x)
    with tiermem.TierManager("cpu", hbm="300KiB", dram="4MiB") as tier:
        tier.wrap(model, blocks=["0.up", "0.down", "1"])
        said = r"compile\(\) of '0'.*Blocks begin at '0.up', '0.down' in it.*blocks=\["
        with pytest.raises(tiermem.WrapError, match=said):
            model[0].compile(fullgraph=True)
        tier.unwrap(model)
        tier.wrap(model, blocks=["0", "1"])
        model[0].compile(fullgraph=True, backend="eager")
        assert same_bits(model(x), expected)
    torch.compiler.reset()


def test_compiled_autograd_is_refused_where_weights_come_and_go(
    pair: tuple[nn.Module, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes all of them at once, as inputs of one graph."""
    compiled = importlib.import_module("torch._dynamo.compiled_autograd")
    for one in pair:
        one.zero_grad()
        losses = [one(torch.ones(2, 16)).square().mean() for _ in range(2)]
        if one is pair[0]:
            with monkeypatch.context() as patched:
                patched.setattr(compiled, "compiled_autograd_enabled", True)
                with pytest.raises(tiermem.WrapError, match=r"leave .*compiled_autograd off"):
                    losses[0].backward()
            one.zero_grad()
        losses[1].backward()
    for mine, theirs in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert same_bits(mine.grad, theirs.grad)
