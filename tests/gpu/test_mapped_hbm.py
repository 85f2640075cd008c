"""HBM that is mapped piece by piece, on a true driver."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tiermem
from tiermem.core.block import Extent, Tier
from tiermem.runtime.memory import opening
from tiermem.storage.arena import HostArena
from tiermem.storage.devicepieces import SPARE, open_calls
from tiermem.storage.mapped import MappedDeviceArena
from tiermem.storage.pieces import CHUNK, Pieces
from tiermem.transfer.streams import CudaCopyEngine

pytestmark = [pytest.mark.gpu]
MIB, GIB = 1 << 20, 1 << 30
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def device() -> torch.device:
    found = torch.device("cuda", torch.cuda.current_device())
    torch.empty(1, device=found)
    return found


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """Every test leaves the device as it was, but for what torch and the driver keep."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    yield
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > before - 256 * MIB, "device memory is not given back"


def arena_of(device: torch.device, nbytes: int, chunk: int = CHUNK) -> MappedDeviceArena:
    calls = open_calls(device)
    assert calls is not None, "this driver maps no memory piece by piece"
    return MappedDeviceArena(nbytes, device, calls, chunk=chunk)


@contextmanager
def all_but(device: torch.device, nbytes: int) -> Iterator[None]:
    """Takes the device's memory but for so many bytes."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    ballast = torch.empty(max(0, free - nbytes), dtype=torch.uint8, device=device)
    try:
        yield
    finally:
        del ballast
        torch.cuda.empty_cache()


@pytest.mark.parametrize("chunk", [2 * MIB, CHUNK, 64 * MIB])
def test_how_long_mapping_takes(device: torch.device, chunk: int) -> None:
    calls = open_calls(device)
    assert calls is not None
    assert calls.granularity >= 4096 and CHUNK % calls.granularity == 0
    pieces = Pieces(calls, 4 * GIB, chunk)
    free = torch.cuda.mem_get_info(device)[0]
    begin = time.perf_counter()
    assert pieces.back(Extent(0, 4 * GIB))
    mapped = time.perf_counter()
    assert free - torch.cuda.mem_get_info(device)[0] >= 4 * GIB - 64 * MIB
    middle = time.perf_counter()
    assert pieces.give_back(0, 4 * GIB) == 4 * GIB
    end = time.perf_counter()
    assert torch.cuda.mem_get_info(device)[0] >= free - 64 * MIB
    print(
        f"\nchunks of {chunk // MIB} MiB: mapping {(mapped - begin) / 4 * 1e3:.2f} ms per GiB, "
        f"unmapping {(end - middle) / 4 * 1e3:.2f} ms per GiB"
    )


def test_addresses_stay_as_memory_comes_and_goes(device: torch.device) -> None:
    arena = arena_of(device, 8 * CHUNK)
    chunks = [Extent(at * CHUNK, CHUNK) for at in range(8)]
    assert arena.mapped == 0 and len(arena.missing()) == 1
    for at in (0, 2, 5):
        assert arena.back(chunks[at])
    first, second = arena.bytes_of(chunks[0]), arena.bytes_of(chunks[2])
    assert (first.device, second.device) == (device, device)
    assert second.data_ptr() == first.data_ptr() + 2 * CHUNK
    first.fill_(1)
    second.fill_(2)
    assert arena.trim(CHUNK, 8 * CHUNK) == 2 * CHUNK
    assert arena.mapped == CHUNK
    assert bool((first == 1).all())
    assert arena.back(Extent(CHUNK, 3 * CHUNK))
    second.fill_(3)  # the same tensor, other memory
    across = arena.bytes_of(Extent(0, 4 * CHUNK))
    assert int(across[:CHUNK].sum(dtype=torch.int64)) == CHUNK
    assert int(across[2 * CHUNK : 3 * CHUNK].sum(dtype=torch.int64)) == 3 * CHUNK
    arena.close()
    del arena
    gc.collect()
    assert bool((second == 3).all()), "whoever sees the bytes keeps them"


def test_kernels_go_over_the_borders_of_chunks(device: torch.device) -> None:
    arena = arena_of(device, 4 * CHUNK)
    extent = Extent(4096, 4 * CHUNK - 4096)
    assert arena.back(extent)
    size = 2048
    there = arena.bytes_of(extent)[: 3 * size * size * 4].view(torch.float32).view(3, size, size)
    torch.manual_seed(0)
    plain = torch.randn(3, size, size, device=device)
    there.copy_(plain)
    assert torch.equal(there, plain)
    assert torch.equal(there[0] @ there[1], plain[0] @ plain[1])
    assert torch.equal(there.sum(0), plain.sum(0))
    assert torch.equal(torch.sort(there.flatten()).values, torch.sort(plain.flatten()).values)
    arena.close()


def test_copies_go_over_the_borders_of_chunks(device: torch.device) -> None:
    """By the copy engines, from and to memory that is page-locked in pieces of its own."""
    arena = arena_of(device, 4 * CHUNK)
    host = HostArena(Tier.DRAM, 8 * CHUNK, device=device)
    engine = CudaCopyEngine(device)
    extent = Extent(12288, 3 * CHUNK + 8192)
    assert arena.back(extent)
    source = host.bytes_of(Extent(0, extent.nbytes))
    back = host.bytes_of(Extent(4 * CHUNK, extent.nbytes))
    source.random_(0, 256)
    there = arena.bytes_of(extent)
    engine.use(engine.up(there, source, extent, None))
    there.bitwise_xor_(255)
    engine.wait(engine.down(back, there, extent, None))
    assert torch.equal(back, source ^ 255)
    engine.poison(there, extent)
    torch.cuda.synchronize()
    assert int(there.unique().numel()) == 1
    begin = time.perf_counter()
    for _ in range(20):
        engine.up(there, source, extent, None)
    torch.cuda.synchronize()
    rate = 20 * extent.nbytes / (time.perf_counter() - begin)
    print(f"\ncopies into mapped memory: {rate / 1e9:.1f} GB/s")
    arena.close()
    host.close()


def test_a_full_device_refuses_and_loses_nothing(device: torch.device) -> None:
    arena = arena_of(device, 8 * GIB)
    with all_but(device, 1 * GIB):
        assert not arena.back(Extent(0, 4 * GIB))
        mapped = arena.mapped
        assert 256 * MIB <= mapped <= 1 * GIB - SPARE
        assert not arena.back(Extent(4 * GIB, 1 * GIB))
        assert arena.trim(0, 8 * GIB) >= mapped
        assert arena.mapped == 0
        assert arena.back(Extent(0, 256 * MIB))
    assert arena.back(Extent(0, 4 * GIB))
    arena.close()


def net(layers: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> list[torch.Tensor]:
    losses = []
    for step in range(5):
        made = torch.Generator("cuda").manual_seed(step)
        x = torch.randn(16, width, device="cuda", generator=made)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def same_training(hbm: str | None, width: int = 512, **tiers: Any) -> tiermem.Stats:
    """Trains resident and in tiers; returns what the tiers did."""
    plain = net(12, width).cuda()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3), width)
    with tiermem.TierManager(hbm=hbm, dram="2GiB", **tiers) as tier:
        model = tier.wrap(net(12, width))
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=1e-3)
        for found, loss in zip(train(model, optimizer, width), expected, strict=True):
            assert torch.equal(found, loss)
        state = model.state_dict()
        for name, value in plain.state_dict().items():
            assert torch.equal(state[name].cuda(), value), name
        return tier.stats()


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("hbm", [None, "6MiB", "40MiB", "1%"])
def test_training_equals_resident(hbm: str | None) -> None:
    stats = same_training(hbm)
    assert stats.used["hbm"] <= stats.hbm_mapped <= stats.budget["hbm"] + 2 * MIB
    if hbm == "6MiB":
        assert stats.evictions


@pytest.mark.usefixtures("deterministic")
def test_without_mapping_it_is_one_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "open_calls", lambda device: None)
    stats = same_training("8MiB")
    assert stats.hbm_mapped == stats.budget["hbm"]


def test_a_toy_takes_what_it_needs(device: torch.device) -> None:
    x = torch.randn(16, 512, device=device)
    warm = net(2, 512).cuda()
    warm(x).sum().backward()  # what libraries take for good
    del warm
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    with tiermem.TierManager() as tier:
        model = tier.wrap(net(4, 512))
        optimizer = tier.optimizer(model, torch.optim.AdamW)
        for _ in range(4):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        ours = free - torch.cuda.mem_get_info(device)[0] - torch.cuda.memory_reserved(device)
        assert tier.stats().hbm_mapped < 64 * MIB
        assert ours < 64 * MIB + 32 * MIB  # streams and events are the driver's
        assert tier._manager.parts.homes.arena.locked < 64 * MIB


def test_beside_expandable_segments() -> None:
    """torch maps memory by the same calls then."""
    environment = {
        **os.environ,
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/gpu")]),
    }
    code = (
        "import torch; torch.use_deterministic_algorithms(True);"
        "import test_mapped_hbm as t; t.same_training('6MiB'); t.same_training(None)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=300)


def test_an_error_of_torch_gives_hbm_back(device: torch.device) -> None:
    """A call that runs out of memory raises once, and the same call fits then."""
    total = torch.cuda.mem_get_info(device)[1]
    margin = max(256 * MIB, total // 32)
    width, layers = 4096, 96  # 64 MiB each, 6 GiB in all
    room = 2 * margin + 4 * GIB
    big = [0]

    def activations(*_: Any) -> None:
        if big[0]:
            torch.empty(big[0], dtype=torch.uint8, device=device)

    torch.manual_seed(0)
    weights = [torch.randn(width, width) / 64 for _ in range(layers)]
    x = torch.randn(16, width, device=device)
    expected = x
    for weight in weights:
        expected = F.linear(expected, weight.to(device))
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in weights])
    with torch.no_grad():
        for layer, weight in zip(model, weights, strict=True):
            layer.weight.copy_(weight)
    model[layers // 2].register_forward_hook(activations)
    with all_but(device, room), torch.no_grad(), tiermem.TierManager(dram="8GiB") as tier:
        tier.wrap(model)
        for _ in range(6):
            assert torch.equal(model(x), expected)
        before = tier.stats()
        big[0] = room - GIB
        raised = 0
        for _ in range(4):
            try:
                assert torch.equal(model(x), expected)
            except torch.OutOfMemoryError:
                raised += 1
        after = tier.stats()
        print(f"\nmapped {before.hbm_mapped >> 20} MiB, then {after.hbm_mapped >> 20} MiB")
        assert raised == 1
        assert after.hbm_mapped < before.hbm_mapped
        big[0] = 0
        assert torch.equal(model(x), expected)


def test_what_the_device_has_not_got_is_done_without(device: torch.device) -> None:
    """A budget that is a limit: others have most of the device."""
    width = 4096
    with all_but(device, 2 * GIB), torch.no_grad():
        x = torch.randn(16, width, device=device)
        with tiermem.TierManager(hbm="5GiB", dram="8GiB") as tier:
            torch.manual_seed(0)
            model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(64)])
            weights = [layer.weight.detach().clone() for layer in model]
            tier.wrap(model)
            found = [model(x) for _ in range(4)]
            assert tier.stats().hbm_mapped < 2 * GIB
        expected = x
        for weight in weights:
            expected = F.linear(expected, weight.to(device))
        for each in found:
            assert torch.equal(each, expected)
    with pytest.raises(tiermem.CapacityError, match="asked for with hbm="):
        tiermem.TierManager(hbm=torch.cuda.mem_get_info(device)[1] + GIB)
