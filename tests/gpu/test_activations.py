"""On a CUDA device: saved tensors below HBM, with late streams, reused memory, and no waiting."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem.nn.loss import chunked_cross_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]
WIDTH = 1024
ROWS = 2048  # the residual stream is 8 MiB


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, layers: int, mode: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            if self.mode == "plain":
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.mode == "reentrant")
        return x


def build(layers: int, mode: str) -> Net:
    torch.manual_seed(0)
    return Net(layers, mode).cuda()


def manager(home: str, folder: Path | None = None, **options: Any) -> tiermem.TierManager:
    options = {"hbm": "160MiB", "dram": "2GiB", **options}
    policy = tiermem.Policy("dram", "dram", "dram", "dram", activations=home)
    return tiermem.TierManager("cuda", nvme=folder, policy=policy, **options)


def dirty_free_memory() -> None:
    """Writes NaN, on the compute stream, to all free memory of the caching allocator.

    Each free run is asked for in its own size, so that no more is taken from the device.
    """
    reserved = torch.cuda.memory_reserved()
    free = [
        run["size"]
        for segment in torch.cuda.memory_snapshot()
        for run in segment["blocks"]
        if run["state"] == "inactive" and run["size"] >= 1 << 20
    ]
    kept = []
    for size in sorted(free, reverse=True):
        kept.append(torch.full((size // 4,), float("nan"), device="cuda"))
        if torch.cuda.memory_reserved() > reserved:
            break


def train(
    net: nn.Module, steps: int, between: Callable[[], None] | None = None
) -> list[torch.Tensor]:
    results = []
    handles = []
    if between is not None:
        for layer in net.layers:
            handles.append(layer.register_forward_hook(partial(_both_ways, between)))
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
        loss = net(x).square().mean()
        loss.backward()
        results += [loss.detach(), x.grad]
    for handle in handles:
        handle.remove()
    return results


def _both_ways(between: Callable[[], None], _layer: Any, _args: Any, out: torch.Tensor) -> None:
    between()
    if out.requires_grad:
        out.register_hook(partial(_call, between))


def _call(between: Callable[[], None], _gradient: torch.Tensor) -> None:
    between()


def check(plain: nn.Module, model: nn.Module, expected: list[Any], found: list[Any]) -> None:
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert torch.equal(one, other), index
    ours = dict(model.named_parameters())
    for name, param in plain.named_parameters():
        assert torch.equal(param.grad, ours[name].grad.clone()), name


@pytest.mark.parametrize("mode", ["plain", "nonreentrant", "reentrant"])
@pytest.mark.parametrize("home", ["dram", "nvme"])
@pytest.mark.parametrize("ahead", ["auto", 0, "16MiB"])
def test_gradients_have_the_same_bits(mode: str, home: str, ahead: Any, tmp_path: Path) -> None:
    plain, model = build(6, mode), build(6, mode)
    expected = train(plain, 3)
    with manager(home, tmp_path, activation_ahead=ahead) as tier:
        tier.wrap(model)
        found = train(model, 3, dirty_free_memory)
        check(plain, model, expected, found)
        stats = tier.stats().activations
        assert stats.offloaded > 0 and stats.used == 0
        assert stats.fetched_ahead + stats.fetched_late > 0


def delay(engine: Any, which: str, cycles: int) -> None:
    """Makes every copy in one direction late."""
    inner = getattr(engine, f"copy_{which}")
    stream = getattr(engine, f"{which}_stream")

    def late(target: torch.Tensor, source: torch.Tensor) -> Any:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
        return inner(target, source)

    setattr(engine, f"copy_{which}", late)


@pytest.mark.parametrize("late", ["up", "down", "both", "compute"])
@pytest.mark.parametrize("mode", ["plain", "nonreentrant", "reentrant"])
@pytest.mark.parametrize("ahead", ["auto", 0])
def test_late_streams_change_nothing(late: str, mode: str, ahead: Any) -> None:
    plain, model = build(6, mode), build(6, mode)
    expected = train(plain, 3)
    if late == "compute":
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda *_: torch.cuda._sleep(5_000_000))
    with manager("dram", activation_ahead=ahead) as tier:
        tier.wrap(model)
        for which in ("up", "down"):
            if late in (which, "both"):
                delay(tier._manager.parts.copy, which, 3_000_000)
        check(plain, model, expected, train(model, 3, dirty_free_memory))


def synchronizing(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("mode", ["plain", "nonreentrant"])
def test_the_steady_state_neither_synchronizes_nor_allocates(mode: str) -> None:
    model = build(6, mode)
    with manager("dram") as tier:
        tier.wrap(model)
        x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
        for _ in range(4):
            model(x).sum().backward()
        torch.cuda.synchronize()
        segments = torch.cuda.memory_stats()["segment.all.allocated"]
        used = tier.stats().used["dram"]
        synchronizing("error")
        try:
            for _ in range(4):
                model(x).sum().backward()
        finally:
            synchronizing("default")
        assert torch.cuda.memory_stats()["segment.all.allocated"] == segments
        assert tier.stats().used["dram"] == used
        assert tier.stats().activations.fetched_ahead > 0


def peak(layers: int, mode: str, home: str) -> int:
    """Returns the most memory allocated in a step, beyond what there is before it."""
    model = build(layers, mode)
    for param in model.parameters():
        param.requires_grad_(False)
    with manager(home, hbm="64MiB") as tier:
        tier.wrap(model)
        x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
        for _ in range(2):
            model(x).sum().backward()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(x).sum().backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("mode", ["nonreentrant", "reentrant"])
def test_under_recomputation_hbm_does_not_grow_with_the_layers(mode: str) -> None:
    stream = ROWS * WIDTH * 4
    few, many = peak(8, mode, "dram"), peak(32, mode, "dram")
    assert many <= few + stream // 2
    assert peak(32, mode, "hbm") >= many + 20 * stream


def test_without_recomputation_hbm_holds_the_window_only() -> None:
    few, many = peak(8, "plain", "dram"), peak(24, "plain", "dram")
    assert many <= few + ROWS * WIDTH * 4


def test_a_graph_that_is_dropped_gives_all_back() -> None:
    model = build(6, "plain")
    torch.nn.Linear(WIDTH, WIDTH, device="cuda")(torch.zeros(ROWS, WIDTH, device="cuda"))
    with manager("dram") as tier:  # cuBLAS has its workspace now, which stays
        tier.wrap(model)
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            out = model(torch.randn(ROWS, WIDTH, device="cuda"))
            del out
        with torch.no_grad():
            model(torch.randn(ROWS, WIDTH, device="cuda"))
        assert tier.stats().activations.used == 0
        assert torch.cuda.memory_allocated() <= before + (1 << 20)


def test_chunked_loss_is_deterministic_and_small() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32_000, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 32_000, (ROWS,), device="cuda")
    results = []
    synchronizing("error")
    try:
        for _ in range(2):
            hidden.grad = weight.grad = None
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss = chunked_cross_entropy(hidden, weight, targets, chunks=16)
            loss.backward()
            rise = torch.cuda.max_memory_allocated() - before
            results.append((loss.detach(), hidden.grad, weight.grad))
    finally:
        synchronizing("default")
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert rise < ROWS * 32_000 * 2  # the logits of all tokens in bf16
    expected = F.cross_entropy((hidden @ weight.t()).float(), targets)
    torch.testing.assert_close(results[0][0], expected, rtol=1e-2, atol=1e-2)
