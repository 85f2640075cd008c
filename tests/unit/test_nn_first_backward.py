"""The first rounds of training move no more than later ones: what backward uses is foreseen."""

from __future__ import annotations

import pytest
import torch
from support_ahead import leave_no_state
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiermem

WIDTH, LAYERS = 64, 12


class Layer(nn.Module):
    """A block of three matrices, which backward uses one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the residual stream."""
        return x + self.c(torch.relu(self.b(torch.relu(self.a(x)))))  # type: ignore[no-any-return]


class Recomputed(nn.Sequential):
    """Layers that are computed again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Runs them."""
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def rounds(
    kind: type[nn.Sequential], count: int, *, frozen: bool = False, micro_batches: int = 1
) -> list[tuple[float, float]]:
    """Trains under half of the weights' bytes.

    Args:
        kind: Of the model.
        count: Of rounds.
        frozen: Whether nothing is trained but the input.
        micro_batches: Backwards in each round.

    Returns:
        What each backward moved up and down, as parts of the weights.
    """
    torch.manual_seed(0)
    model = kind(*[Layer() for _ in range(LAYERS)]).requires_grad_(not frozen)
    nbytes = sum(param.numel() * 4 for param in model.parameters())
    x = torch.randn(2, WIDTH, requires_grad=True)
    found = []
    with tiermem.TierManager("cpu", hbm=nbytes // 8192 * 4096, dram=14 * nbytes) as tier:
        tier.wrap(model)
        optimizer = None if frozen else tier.optimizer(model, torch.optim.AdamW, lr=1e-3)
        if optimizer is not None:  # less moves once state is left by turns
            leave_no_state(optimizer)
        counters = tier._manager.parts.counters
        for number in range(1, count * micro_batches + 1):
            loss = model(x).square().mean()
            before = counters.bytes_by_link()
            loss.backward()
            after = counters.bytes_by_link()
            moved = [
                (after.get(link, 0) - before.get(link, 0)) / nbytes
                for link in ("dram->hbm", "hbm->dram")
            ]
            found.append((moved[0], moved[1]))
            if optimizer is not None and not number % micro_batches:
                optimizer.step()
                optimizer.zero_grad()
    return found


@pytest.mark.parametrize("kind", [nn.Sequential, Recomputed])
def test_every_backward_moves_what_later_ones_do(kind: type[nn.Sequential]) -> None:
    first, *others = rounds(kind, 6)
    assert first[0] < 1.0  # each block once; half of them are there
    assert first[1] < 1.2  # gradients, and the rest of their pages
    up, down = others[-1]
    for second_or_later in others:
        assert second_or_later[0] < 1.1 * up
        assert second_or_later[1] < 1.1 * down


@pytest.mark.parametrize("kind", [nn.Sequential, Recomputed])
def test_frozen_weights_are_not_written_home(kind: type[nn.Sequential]) -> None:
    """The last tensor that a checkpoint counts, where it stops, is a weight."""
    assert all(down == 0 for _, down in rounds(kind, 3, frozen=True))


@pytest.mark.parametrize("kind", [nn.Sequential, Recomputed])
def test_the_last_of_several_backwards_foresees_its_steps(kind: type[nn.Sequential]) -> None:
    """Gradients come up and go down in each but the first, and state with the last alone."""
    moved = rounds(kind, 4, micro_batches=3)
    firsts, middles, lasts = moved[::3], moved[1::3], moved[2::3]
    assert all(up < 1.0 and down < 1.3 for up, down in firsts)
    assert all(up < 2.0 and down < 1.3 for up, down in middles)
    for up, down in lasts[1:]:
        assert up < 4.3
        assert down < 4.4
