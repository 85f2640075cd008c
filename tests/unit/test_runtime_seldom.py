"""What is used now and then takes no room from what is used in every pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import tiermem

WIDTH, LAYERS = 64, 8


def stack(layers: int = LAYERS) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])


class EncoderDecoder(nn.Module):
    """Its encoder is called once for many calls of its decoder, as ``generate()`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = stack(), stack()

    def forward(self, x: torch.Tensor, encoded: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the decoder's output.

        Args:
            x: (batch, width).
            encoded: What the encoder has made; None to make it here.
        """
        if encoded is None:
            encoded = self.encoder(x)
        return self.decoder(x + encoded)  # type: ignore[no-any-return]


def moved_by(tier: tiermem.TierManager, call: Callable[[], object]) -> int:
    """Returns the bytes that come up in a call."""
    counters = tier._manager.parts.counters
    before = counters.bytes_by_link().get("dram->hbm", 0)
    call()
    return counters.bytes_by_link().get("dram->hbm", 0) - before


@contextmanager
def streamed(share: float, *models: nn.Module) -> Iterator[tuple[tiermem.TierManager, int]]:
    """Wraps models.

    Args:
        share: Of the bytes of all of them, as HBM.
        models: What is wrapped.

    Yields:
        The manager, and the bytes.
    """
    nbytes = sum(param.nbytes for model in models for param in model.parameters())
    hbm = int(share * nbytes) // 4096 * 4096
    with torch.no_grad(), tiermem.TierManager("cpu", hbm=hbm, dram=8 * nbytes) as tier:
        for model in models:
            tier.wrap(model)
        yield tier, nbytes


@pytest.mark.parametrize("tokens", [6, 10, 25])
def test_a_decoder_that_fits_stays_beside_its_encoder(tokens: int) -> None:
    torch.manual_seed(0)
    model = EncoderDecoder().eval()
    x, found = torch.randn(2, WIDTH), []
    with streamed(0.625, model) as (tier, nbytes):
        for _ in range(6):
            encoded: list[torch.Tensor] = []
            found.append(moved_by(tier, lambda: encoded.append(model.encoder(x))))  # noqa: B023
            found += [
                moved_by(tier, lambda: model(x, encoded[0]))  # noqa: B023
                for _ in range(tokens)
            ]
        for number, nbytes_up in enumerate(found[4 * (tokens + 1) :]):
            # the encoder comes up each time, by way of what the decoder leaves
            assert nbytes_up <= (0 if number % (tokens + 1) else nbytes // 2), number


def test_two_models_of_one_manager_share_it_the_same_way() -> None:
    torch.manual_seed(0)
    often, seldom = stack().eval(), stack().eval()
    x = torch.randn(2, WIDTH)
    with streamed(0.625, often, seldom) as (tier, nbytes):
        for number in range(4):
            moved = [moved_by(tier, lambda: often(x)) for _ in range(12)]
            moved.append(moved_by(tier, lambda: seldom(x)))
            if number > 1:
                assert sum(moved[:-1]) == 0
                assert moved[-1] <= nbytes // 2


@pytest.mark.parametrize(
    ("layers", "first", "second", "most"),
    [(8, 2, 1, 0.6), (10, 3, 1, 0.5), (16, 3, 1, 0.45), (16, 4, 1, 0.45), (8, 30, 30, 3.0)],
)
def test_what_stays_is_the_same_wherever_in_a_loop_it_is(
    layers: int, first: int, second: int, most: float
) -> None:
    """However many of its passes are foreseen: what stays would move each time it changes."""
    torch.manual_seed(0)
    models = [(stack(layers).eval(), first), (stack(layers).eval(), second)]
    x, rounds = torch.randn(2, WIDTH), list[int]()
    with streamed(0.65, *(model for model, _ in models)) as (tier, nbytes):
        for _ in range(5):
            rounds.append(0)
            for model, times in models:
                rounds[-1] += sum(moved_by(tier, lambda: model(x)) for _ in range(times))  # noqa: B023
        assert sum(rounds[3:]) / 2 <= most * nbytes
