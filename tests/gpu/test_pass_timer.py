"""On a CUDA device: passes are measured with events, and the host waits for none of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import tiermem
from tiermem.runtime.metrics.pass_timer import _MOST_WAITING

pytestmark = pytest.mark.gpu

WIDTH = 4096
BLOCK = 2 * WIDTH * WIDTH


class Repeated(nn.Module):
    """A matrix that is multiplied with several times: bytes of one, work of many."""

    def __init__(self, times: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False, dtype=torch.bfloat16)
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.linear(x)
        return x


@pytest.fixture
def sync_debug() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def opened(
    hbm: int, layers: int = 8, dram: int = 0, width: int = WIDTH
) -> tuple[tiermem.TierManager, nn.Module]:
    torch.manual_seed(0)
    block = 2 * width * width
    model = nn.Sequential(*(Repeated(4 if n % 2 else 1, width) for n in range(layers)))
    tier = tiermem.TierManager("cuda", hbm=hbm * block, dram=(dram or layers + 1) * block)
    return tier, tier.wrap(model, blocks=[str(n) for n in range(layers)])


def always(tier: tiermem.TierManager) -> None:
    """Measures every pass."""
    estimates = tier._manager.parts.pass_timer.estimates
    wants = estimates.wants
    estimates.wants = lambda key: wants(key) or True  # type: ignore[method-assign]


@torch.no_grad()
def run(model: nn.Module, passes: int, tokens: int) -> None:
    width = model[0].linear.in_features
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    for _ in range(passes):
        model(x)
    torch.cuda.synchronize()


def test_times_are_learned() -> None:
    tier, model = opened(4)
    with tier:
        run(model, 6, 16384)
        rows = tier.pace()  # in the order of use
        assert len({row.block for row in rows}) == len(rows) == 8
        for row in rows:
            assert row.samples >= 1 and row.nbytes == BLOCK
            assert 1e9 < row.nbytes / row.transfer_seconds < 200e9, row
        seconds = [row.compute_seconds for row in rows]
        # the first one has what the device waits for until the host has begun the pass, and on a
        # busy host another one has as well
        assert sum(seconds[1::2]) > 2 * sum(seconds[2::2]), seconds


def test_efficiency_says_where_the_time_went() -> None:
    """One token: the link is the limit. Many: the compute is, and hardly waits.

    Blocks take the link 2.4 ms each, which no host is as slow as.
    """
    tier, model = opened(4, width=2 * WIDTH)
    with tier:
        run(model, 6, 1)
        tier.reset_stats()
        run(model, 20, 1)
        stats = tier.stats()
        assert stats.limit == "dram->hbm" and stats.efficiency is not None
        assert 0.3 < stats.efficiency < 1.2  # others may use the device meanwhile
        assert stats.losses["dram->hbm"] > 0.3 * stats.measured_seconds
        for _ in range(40):  # what is measured is seen before the next begins
            run(model, 1, 16384)
        tier.reset_stats()
        run(model, 20, 16384)
        stats = tier.stats()
        assert stats.limit == "compute" and stats.efficiency is not None
        assert stats.efficiency > 0.2
        assert stats.losses.get("dram->hbm", 0.0) < 0.3 * stats.measured_seconds


def test_the_estimates_follow_the_batch_size() -> None:
    tier, model = opened(4)
    with tier:
        run(model, 6, 2048)
        small = sum(row.compute_seconds for row in tier.pace())
        for _ in range(24):  # what is measured is seen before the next begins
            run(model, 1, 16384)
        large = sum(row.compute_seconds for row in tier.pace())
        assert large > 4 * small


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("train", [False, True])
def test_measuring_makes_the_host_wait_for_nothing(train: bool, sync_debug: None) -> None:
    tier, model = opened(10 if train else 4, dram=24)
    with tier:
        if not train:
            model.requires_grad_(False)
        always(tier)
        x = torch.randn(256, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)

        def step() -> None:
            model(x).float().square().mean().backward()
            x.grad = None

        for _ in range(4):
            step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(8):
            step()
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        stats = tier.stats()
        assert stats.efficiency is not None and stats.measured_seconds > 0


def test_events_are_used_again() -> None:
    tier, model = opened(4)
    with tier:
        pass_timer = tier._manager.parts.pass_timer
        always(tier)
        run(model, 1, 64)
        of_a_pass = pass_timer._clock._made
        for _ in range(20):
            run(model, 5, 64)
        assert of_a_pass > 0
        # of one pass under way, and of those that wait to be read
        assert pass_timer._clock._made <= (1 + _MOST_WAITING) * of_a_pass


def test_a_captured_graph_holds_no_stamps() -> None:
    tier, model = opened(9)
    with tier:
        pass_timer = tier._manager.parts.pass_timer
        always(tier)
        run(model, 3, 64)
        clock = pass_timer._clock
        graph = torch.cuda.CUDAGraph()
        assert clock.usable()
        x = torch.zeros(8, device="cuda")
        with torch.cuda.graph(graph):
            x.add_(1)
            assert not clock.usable()
        graph.replay()
        torch.cuda.synchronize()
        assert x.sum().item() > 0
