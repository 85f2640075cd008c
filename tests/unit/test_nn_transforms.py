"""Under ``torch.func``, forward-mode differentiation and inference mode nothing of ours is marked.

What an operation returns there dies with the transform, has no memory, or counts no changes; what
is kept in the tiers outlives all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import tiermem

Use = Callable[[nn.Module, Any], Sequence[torch.Tensor]]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)])


def data() -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(data()).square().mean().backward()
    optimizer.step()


def values(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    found = list(model.state_dict().values())
    for _, state in sorted(optimizer.state_dict()["state"].items()):
        found += [value for _, value in sorted(state.items())]
    return found


def follow(
    use: Use, hbm: str = "128KiB", *, build: Callable[[], nn.Module] = build, **settings: Any
) -> None:
    """Does the same to a plain model and to one in the tiers, and compares every bit."""
    plain = build()
    expected = use(plain, torch.optim.Adam(plain.parameters(), lr=0.01))
    with tiermem.TierManager(
        device="cpu",
        hbm=hbm,
        dram="4MiB",
        policy=tiermem.Policy(params="dram", grads="dram", optimizer="dram"),
    ) as tier:
        model = tier.wrap(build())
        optimizer = tier.optimizer(model, torch.optim.Adam, lr=0.01, **settings)
        found = use(model, optimizer)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))


def test_slots_first_seen_within_a_transform_outlive_it() -> None:
    """Their views would be dead with it, and torch would read what it has freed."""

    def use(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        names = {name: value.detach().clone() for name, value in model.named_parameters()}

        def loss_of(params: Any) -> torch.Tensor:
            return torch.func.functional_call(model, params, (data(),)).square().mean()

        found = list(torch.func.grad(loss_of)(names).values())
        train(model, optimizer)
        return [*found, model(data()).detach(), *values(model, optimizer)]

    follow(use, "40KiB")


def test_a_step_that_is_owed_is_made_outside_of_the_transform_that_asks_for_it() -> None:
    def use(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        found = []
        for _ in range(3):
            train(model, optimizer)
            inputs = torch.func.grad(lambda x: model(x).square().mean())(data())
            found.append(inputs.detach().clone())
        return [*found, *values(model, optimizer)]

    follow(use, overlap=True)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own use of it
@pytest.mark.filterwarnings("ignore:.torch.jit.script:FutureWarning")
@pytest.mark.parametrize("overlap", [False, True])
def test_forward_mode_differentiation(overlap: bool) -> None:
    """It saves zeros that have no memory to ask the address of."""

    def use(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        found = []
        for _ in range(2):
            train(model, optimizer)
            with forward_ad.dual_level():
                output = model(forward_ad.make_dual(data(), torch.ones_like(data())))
                tangent = forward_ad.unpack_dual(output).tangent
                assert tangent is not None
                found.append(tangent.detach().clone())
        return [*found, *values(model, optimizer)]

    follow(use, overlap=overlap)


def test_a_model_that_leaves_in_inference_mode_is_an_ordinary_one() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB") as tier:
        tier.wrap(model)
        with torch.inference_mode():
            tier.unwrap(model)
    assert not any(tensor.is_inference() for tensor in model.state_dict(keep_vars=True).values())
    model(torch.randn(4, 8)).sum().backward()


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_and_state_are_used_and_written_in_inference_mode(overlap: bool) -> None:
    def use(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        found = []
        for _ in range(3):
            train(model, optimizer)
            with torch.inference_mode():
                weight = next(model.parameters())
                norm = weight.grad.norm().item()  # type: ignore[union-attr]
                optimizer.state[weight]["exp_avg"].mul_(0.5)
                weight.grad[0].zero_()  # type: ignore[index]
                found.append(torch.tensor([norm, model(data()).sum().item()]))
            optimizer.step()
        return [*found, *values(model, optimizer)]

    follow(use, overlap=overlap)


class Force(nn.Module):
    """Takes a derivative of a use of its weight in forward, then calls the layers inside."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(2048) / 2)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        force = torch.func.grad(lambda rows: torch.tanh(rows * self.scale).square().sum())(x)
        return self.layers(x) + force * self.scale


@pytest.mark.parametrize("hbm", ["100KiB", "1MiB"])
def test_a_transform_inside_a_models_forward(hbm: str) -> None:
    """Torch refuses it where a pair of hooks is on top: tiermem's is lifted meanwhile.

    What the graph has of the weights then are they themselves: their blocks stay until backward.
    """

    def run(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 2048) * 0.1).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return [*found, *values(model, optimizer)]

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Force(*[Force() for _ in range(8)])

    plain = make()
    expected = run(plain, torch.optim.Adam(plain.parameters(), lr=0.01))
    with tiermem.TierManager(device="cpu", hbm=hbm, dram="4MiB") as tier:
        model = tier.wrap(make())
        found = run(model, tier.optimizer(model, torch.optim.Adam, lr=0.01))
        assert all(map(torch.equal, found, expected))


def test_a_call_that_fails_after_a_transform_holds_nothing() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("of the model")

    model = Force(Fails())
    with tiermem.TierManager(device="cpu", hbm="100KiB", dram="1MiB") as tier:
        tier.wrap(model)
        for _ in range(2):
            with pytest.raises(ValueError, match="of the model"):
                model(torch.ones(4, 2048))
            assert not tier._runtime.here.unseen


class Scaled(nn.Module):
    """Its operation saves the parameter itself, and no view that would keep the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.randn(8, 128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.repeat(1, 4) * self.by).tanh()


class Forced(nn.Module):
    """Layers, and in front of them one whose output is the gradient of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 128))
        self.energy = Scaled()
        self.layers = build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def energy_of(x: torch.Tensor) -> torch.Tensor:
            return (self.energy(x) * self.weight).tanh().sum()

        force = torch.func.grad(energy_of)(x)
        _, pull = torch.func.vjp(energy_of, force)
        each = torch.vmap(torch.func.grad(lambda x: (x @ x).tanh()))(force)
        found: torch.Tensor = self.layers(each)
        return found + pull(torch.ones(()))[0]


def forced() -> nn.Module:
    torch.manual_seed(0)
    return Forced()


@pytest.mark.parametrize("hbm", ["28KiB", "40KiB", "1MiB"])
def test_a_module_takes_gradients_by_transforms_inside_its_forward(hbm: str) -> None:
    """torch refuses that where there are saved-tensor hooks, as tiermem's are."""

    def use(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(data()).square().mean()
            with torch.no_grad():  # what the graph has saved may leave meanwhile
                found.append(model(data()))
            loss.backward()
            found.append(loss.detach())
            optimizer.step()
        return [*found, *values(model, optimizer)]

    follow(use, hbm, build=forced)


def test_transforms_inside_a_forward_are_refused_under_the_programs_own_hooks() -> None:
    """As torch does: the program's hooks would miss what is saved."""

    def same(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="4MiB") as tier:
        model = tier.wrap(forced())
        with (
            torch.autograd.graph.saved_tensors_hooks(same, same),
            pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"),
        ):
            model(data())
        model(data()).sum().backward()
