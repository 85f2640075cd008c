"""A model that was wrapped to be evaluated is wrapped anew as it gets an optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support_blocks import divide_as_large
from support_nn import assert_same, seed
from torch import nn

import tiermem
from tiermem.errors import CapacityError
from tiermem.nn.groups import partition
from tiermem.nn.wrap import giveback

WIDTH, LAYERS = 48, 40


class Net(nn.Module):
    """Layers with a vocabulary before them."""

    def __init__(self, words: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("one", torch.ones(1))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            for _ in range(LAYERS)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    divide_as_large(monkeypatch)


def made(words: int = 8) -> nn.Module:
    seed(0)
    return Net(words).eval()


def budget(model: nn.Module) -> int:
    return 27 * partition.parameter_bytes(model.layers[0])  # two in a tenth


def weights_of(tier: tiermem.TierManager) -> dict[str, int]:
    return {row.block: row.nbytes for row in tier.residency() if row.role == "param"}


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> list[torch.Tensor]:
    losses = []
    for number in range(steps):
        seed(number)
        loss = model(torch.randint(0, 8, (2, 5))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def trained(model: nn.Module) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Returns what plain torch makes of a model."""
    plain = copy.deepcopy(model)
    losses = train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    return losses, plain.state_dict()


def test_it_has_the_blocks_of_one_that_is_trained() -> None:
    model = made()
    hbm, (losses, state) = budget(model), trained(model)
    with tiermem.TierManager("cpu", hbm=hbm, dram="64MiB") as tier:
        tier.wrap(made().train())
        expected = weights_of(tier)
    params = [*model.parameters()]
    with tiermem.TierManager("cpu", hbm=hbm, dram="64MiB") as tier:
        assert tier.wrap(model) is model
        finer = weights_of(tier)
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=0.01)
        assert weights_of(tier) == expected
        assert len(expected) < len(finer)
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        assert not model.training
        assert_same(losses, train(model, optimizer), "losses")
    assert_same(state, dict(model.state_dict()), "weights")


def test_parameters_may_be_given_by_a_generator() -> None:
    model = made()
    with tiermem.TierManager("cpu", hbm=budget(model), dram="64MiB") as tier:
        tier.wrap(model)
        finer = weights_of(tier)
        tier.optimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        assert len(weights_of(tier)) < len(finer)


@pytest.mark.parametrize("mode", [True, False])
def test_weights_that_were_frozen_as_it_was_wrapped_count(mode: bool) -> None:
    model = made().train(mode).requires_grad_(False)
    with tiermem.TierManager("cpu", hbm=budget(model), dram="64MiB") as tier:
        tier.wrap(model)
        finer = weights_of(tier)
        model.requires_grad_(True)
        tier.optimizer(model, torch.optim.AdamW, lr=0.01)
        assert len(weights_of(tier)) < len(finer)


Held = list[Any]


def _called(tier: tiermem.TierManager, model: nn.Module) -> Held:
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long))
    return []


def _frozen(tier: tiermem.TierManager, model: nn.Module) -> Held:
    model.layers[:30].requires_grad_(False)
    return []


def _has_optimizer(tier: tiermem.TierManager, model: nn.Module) -> Held:
    return [tier.optimizer(model.embed, torch.optim.AdamW, lr=0.01)]


def _has_gradient(tier: tiermem.TierManager, model: nn.Module) -> Held:
    model.embed.weight.grad = torch.zeros_like(model.embed.weight)
    return []


def _has_a_view_of_a_weight(tier: tiermem.TierManager, model: nn.Module) -> Held:
    return [model.layers[3][0].weight.data]


def _has_a_view_of_a_buffer(tier: tiermem.TierManager, model: nn.Module) -> Held:
    return [model.scale.view(-1)]


def _has_a_view_of_a_buffer_of_one(tier: tiermem.TierManager, model: nn.Module) -> Held:
    return [model.one[0]]


def _has_one_layer_less(tier: tiermem.TierManager, model: nn.Module) -> Held:
    del model.layers[LAYERS - 1]
    return []


def _has_a_layer_in_another(tier: tiermem.TierManager, model: nn.Module) -> Held:
    model.layers[5] = nn.Sequential(model.layers[5])
    return []


def _has_another_layer(tier: tiermem.TierManager, model: nn.Module) -> Held:
    model.head = nn.Linear(4, 4, device="meta")
    return []


@pytest.mark.parametrize(
    "meanwhile",
    [
        _called,
        _frozen,
        _has_optimizer,
        _has_gradient,
        _has_a_view_of_a_weight,
        _has_a_view_of_a_buffer,
        _has_a_view_of_a_buffer_of_one,
        _has_one_layer_less,
        _has_a_layer_in_another,
        _has_another_layer,
    ],
)
def test_it_stays_as_it_is(meanwhile: Any) -> None:
    """Where most of it is not trained, or something of it is in use, or other than it was."""
    model = made()
    with tiermem.TierManager("cpu", hbm=budget(model), dram="64MiB") as tier:
        tier.wrap(model)
        held = meanwhile(tier, model)
        before = weights_of(tier)
        optimizer = tier.optimizer(
            [p for n, p in model.named_parameters() if not n.startswith(("embed", "head"))],
            torch.optim.AdamW,
            lr=0.01,
        )
        assert weights_of(tier) == before
        train(model, optimizer, 1)
        model.scale.mul_(2)
        model.one.mul_(2)
        for tensor in held:
            if isinstance(tensor, torch.Tensor):
                whole = [model.one[0], model.scale, model.layers[3][0].weight][tensor.dim()]
                assert torch.equal(tensor, whole.detach())


def test_blocks_that_were_chosen_stay() -> None:
    model = made()
    with tiermem.TierManager("cpu", hbm=budget(model), dram="64MiB") as tier:
        tier.wrap(model, blocks=[f"layers.{i}.0" for i in range(LAYERS)])
        before = weights_of(tier)
        tier.optimizer(model, torch.optim.AdamW, lr=0.01)
        assert weights_of(tier) == before


def test_models_stay_in_order() -> None:
    """A checkpoint knows them by their order: only the last one is wrapped anew."""
    model, other = made(), made()
    with tiermem.TierManager("cpu", hbm=budget(model), dram="64MiB") as tier:
        tier.wrap(model)
        tier.wrap(other)
        before = weights_of(tier)
        tier.optimizer(model, torch.optim.AdamW, lr=0.01)
        assert weights_of(tier) == before
        tier.optimizer(other, torch.optim.AdamW, lr=0.01)
        after = weights_of(tier)
        first = {n: size for n, size in before.items() if not n.startswith("Net#1")}
        assert first == {n: size for n, size in after.items() if not n.startswith("Net#1")}
        assert len(after) < len(before)
        assert [id(m) for m in (model, other)] == [*tier._wrapped]


def test_without_room_for_it_meanwhile_it_stays_as_it_is() -> None:
    model = made()
    losses, state = trained(model)
    with tiermem.TierManager("cpu", hbm=budget(model), dram="64MiB") as tier:
        tier.wrap(model)
        before = weights_of(tier)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(giveback, "available_memory", lambda: 0)
            optimizer = tier.optimizer(model, torch.optim.AdamW, lr=0.01)
        assert weights_of(tier) == before
        assert_same(losses, train(model, optimizer), "losses")
    assert_same(state, dict(model.state_dict()), "weights")


def test_blocks_that_a_budget_has_no_room_for_are_those_of_before() -> None:
    model = made()
    losses, state = trained(model)
    with tiermem.TierManager("cpu", hbm=budget(model), dram="64MiB") as tier:
        tier.wrap(model)
        before, wrap = weights_of(tier), tier._wrap_model

        def short(*args: Any, training: bool | None = None, **kwargs: Any) -> Any:
            if training:
                raise CapacityError("no room", "give more")
            return wrap(*args, training=training, **kwargs)

        tier._wrap_model = short  # type: ignore[method-assign]
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=0.01)
        assert weights_of(tier) == before
        assert_same(losses, train(model, optimizer), "losses")
    assert_same(state, dict(model.state_dict()), "weights")


def test_a_vocabulary_larger_than_hbm_is_trained_though_it_was_wrapped_to_be_read() -> None:
    """As `from_pretrained` returns models."""
    model = made(words=4000)
    losses, state = trained(model)
    with tiermem.TierManager("cpu", hbm="400KiB", dram="64MiB") as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=0.01)
        assert_same(losses, train(model, optimizer), "losses")
    assert_same(state, dict(model.state_dict()), "weights")
