"""CUDA graphs over wrapped layers: right where addresses stay, refused where they may not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tiermem

pytestmark = pytest.mark.gpu
WIDTH = 256


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer() for _ in range(6)]).cuda().eval().requires_grad_(False)


def warm_up(call, x: torch.Tensor) -> None:
    """Runs a call on a side stream, as torch asks for before a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            call(x)
    torch.cuda.current_stream().wait_stream(side)


def record(call, x: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Captures a call; returns the graph and where its result will be."""
    warm_up(call, x)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = call(x)
    return graph, y


def replays_as_resident(graphs, x: torch.Tensor, plain: nn.Module, model: nn.Module) -> None:
    """Checks both graphs, and both models, with new values."""
    x.normal_()
    for graph, _ in graphs:
        graph.replay()
    assert torch.equal(graphs[0][1], graphs[1][1])
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


def test_a_captured_layer_replays_the_bits_of_the_resident_one() -> None:
    plain, model = build(), build()
    x = torch.randn(8, WIDTH, device="cuda")
    with tiermem.TierManager(
        "cuda", hbm="32MiB", dram="32MiB", policy=tiermem.Policy(params="hbm")
    ) as tier:
        tier.wrap(model)
        for part in (lambda m: m[2], lambda m: m):
            graphs = [record(part(m), x) for m in (plain, model)]
            for _ in range(3):
                replays_as_resident(graphs, x, plain, model)
            with torch.no_grad():  # what is written later is what the graph reads
                for m in (plain, model):
                    m[2].up.weight.mul_(1.5)
            for graph, _ in graphs:
                graph.replay()
            assert torch.equal(graphs[0][1], graphs[1][1])


def test_torchs_own_graphed_layer() -> None:
    plain, model = build(), build()
    x = torch.randn(8, WIDTH, device="cuda")
    with tiermem.TierManager(
        "cuda", hbm="32MiB", dram="32MiB", policy=tiermem.Policy(params="hbm")
    ) as tier:
        tier.wrap(model)
        for m in (plain, model):
            torch.cuda.make_graphed_callables(m[3], (torch.randn_like(x),))
        for _ in range(3):
            x.normal_()
            assert torch.equal(model(x), plain(x))


def test_layers_that_may_move_are_refused_and_nothing_is_lost() -> None:
    plain, model = build(), build()
    x = torch.randn(8, WIDTH, device="cuda")
    with tiermem.TierManager("cuda", hbm="8MiB", dram="64MiB") as tier, torch.no_grad():
        tier.wrap(model)
        expected = plain(x)
        warm_up(model, x)
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(tiermem.ConfigError, match="CUDA graph"), torch.cuda.graph(graph):
            y = x * 2  # torch warns of graphs that are empty
            model(y)
        for _ in range(3):
            assert torch.equal(model(x), expected)


@pytest.mark.parametrize("warm", [3, 6])  # with interceptors, and without
def test_a_model_that_fits_stays_where_a_graph_has_seen_it(warm: int) -> None:
    """While another model streams beside it, and an optimizer steps it."""
    plain, model, other = build(), build(), build()
    x, batch = torch.randn(8, WIDTH, device="cuda"), torch.randn(8, WIDTH, device="cuda")
    for m in (plain, model):
        m.requires_grad_(True)
    with tiermem.TierManager("cuda", hbm="72MiB", dram="256MiB") as tier:
        tier.wrap(model)
        optimizers = [
            torch.optim.AdamW(plain.parameters()),
            tier.optimizer(model, torch.optim.AdamW),
        ]
        with torch.no_grad():
            for _ in range(warm):
                model(x)
        graphs = [record(m, x) for m in (plain, model)]
        beside = tier.wrap(nn.Sequential(other, *[build() for _ in range(3)]))
        for _ in range(4):
            for m, optimizer in zip((plain, model), optimizers, strict=True):
                m(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                beside(x)
            replays_as_resident(graphs, x, plain, model)


def test_a_graph_of_something_else_beside_a_model_that_streams() -> None:
    plain, model = build(), build()
    other = build()
    x = torch.randn(8, WIDTH, device="cuda")
    with tiermem.TierManager("cuda", hbm="8MiB", dram="64MiB") as tier:
        tier.wrap(model)
        with torch.no_grad():
            expected = plain(x)
            assert torch.equal(model(x), expected)
        graph, y = record(other, x)  # while copies ahead may still be under way
        with torch.no_grad():
            for _ in range(3):
                graph.replay()
                assert torch.equal(model(x), expected)
                assert torch.equal(y, expected)
        assert tier.stats().evictions > 0
