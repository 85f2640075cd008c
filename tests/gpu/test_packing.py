"""Packed copies on a device: the kernels, and models whose weights come up packed."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

import tiermem
from tiermem.core.block import Extent
from tiermem.core.packing import (
    GROWS,
    PACKED_TILE,
    TILE,
    WORDS,
    Packed,
    pack_tile,
    packed_nbytes,
    parts_of,
    unpack_tile,
)
from tiermem.runtime.lookahead.stream_plan import StreamPlan
from tiermem.transfer.packing import PIECE, home_nbytes, is_spoiled, room_nbytes
from tiermem.transfer.streams import CudaCopyEngine

pytestmark = pytest.mark.gpu

WIDTH, LAYERS = 2048, 8


@pytest.fixture(scope="module")
def engine() -> CudaCopyEngine:
    """An engine whose kernels have been compiled."""
    engine = CudaCopyEngine(torch.device("cuda"))
    assert engine.packs, "no compiler, or what was packed did not come back"
    return engine


def weights(nbytes: int, seed: int, *, odd: int = 0) -> torch.Tensor:
    """Returns page-locked bytes as weights are, with some words of any kind in every tile."""
    generator = torch.Generator().manual_seed(seed)
    words = (torch.randn(nbytes // 2, generator=generator) * 0.02).bfloat16().view(torch.int16)
    words[::1000] = 0
    for _ in range(odd):
        at = torch.randint(len(words), (max(1, len(words) // WORDS),), generator=generator)
        words[at] = torch.randint(-(1 << 15), 1 << 15, at.shape, generator=generator).short()
    found = torch.empty(nbytes, dtype=torch.uint8).pin_memory()
    found[: 2 * len(words)] = words.view(torch.uint8)
    return found


def packed_by(engine: CudaCopyEngine, source: torch.Tensor) -> tuple[Packed, torch.Tensor]:
    """Returns what the device makes of some bytes, and the memory it is in."""
    parts = parts_of(source.numel())
    target = torch.empty(home_nbytes(parts), dtype=torch.uint8).pin_memory()
    room = torch.empty(room_nbytes(PIECE), dtype=torch.uint8, device="cuda")
    engine.packing(room, Extent(1 << 40, 0), PIECE).pack(source, target, parts)
    engine.synchronize()
    assert not is_spoiled(target)
    return Packed(target.data_ptr(), parts, packed_nbytes(parts)), target


@pytest.mark.parametrize("nbytes", [TILE, TILE + 2, 5 * TILE - 1, 700 * TILE + 4096, 3000 * TILE])
def test_bytes_come_back(engine: CudaCopyEngine, nbytes: int) -> None:
    source = weights(nbytes, seed=nbytes % 97, odd=4)
    packed, kept = packed_by(engine, source)
    assert packed.moved < 0.76 * nbytes + TILE
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        target.fill_(0xFF)
        engine.use(engine.up_packed(target, packed, Extent(0, nbytes)))
        assert torch.equal(target.cpu(), source)
    del kept


def test_the_device_packs_as_the_reference_does(engine: CudaCopyEngine) -> None:
    source = weights(20 * TILE, seed=1, odd=8)
    packed, target = packed_by(engine, source)
    for tile in range(20):
        words = source[tile * TILE : (tile + 1) * TILE].numpy().view(np.uint16)
        expected = pack_tile(words)
        assert expected is not None
        found = target[tile * PACKED_TILE : (tile + 1) * PACKED_TILE].numpy()
        planes = WORDS + WORDS // 2 + 8
        assert (found[:planes] == expected[:planes]).all()  # escapes come in any order
        assert (unpack_tile(found) == words).all()
    assert packed.moved == 20 * (TILE - GROWS)


def test_too_many_escapes_are_noticed(engine: CudaCopyEngine) -> None:
    source = weights(600 * TILE, seed=2)
    source[599 * TILE :] = torch.randint(0, 256, (TILE,), dtype=torch.uint8)
    parts = parts_of(source.numel())
    target = torch.empty(home_nbytes(parts), dtype=torch.uint8).pin_memory()
    room = torch.empty(room_nbytes(PIECE), dtype=torch.uint8, device="cuda")
    packing = engine.packing(room, Extent(1 << 40, 0), PIECE)
    packing.pack(source, target, parts)
    engine.synchronize()
    assert is_spoiled(target)


def test_beside_compute_and_copies_into_one_place_after_the_other(engine: CudaCopyEngine) -> None:
    """Kernels of compute hold the device while others wait to unpack; each reads its own bytes."""
    nbytes, count = 900 * TILE, 4
    sources = [weights(nbytes, seed=10 + i, odd=2) for i in range(count)]
    made = [packed_by(engine, source) for source in sources]
    expected = [source.cuda() for source in sources]
    place = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    busy = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(60):
        number = turn % count
        if turn % 3:
            engine.use(engine.up_packed(place, made[number][0], Extent(0, nbytes)))
        else:
            engine.use(engine.up(place, sources[number], Extent(0, nbytes), None))
        for _ in range(turn % 4):
            busy @ busy
        wrong += (place != expected[number]).sum()
    assert not int(wrong)


class Layer(nn.Module):
    """Two linear layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def model(seed: int = 0) -> nn.Sequential:
    """Returns a model of eight layers of 17 MB in bfloat16, in host memory."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Layer() for _ in range(LAYERS))).to(torch.bfloat16)


@pytest.fixture
def link_binds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every pass that only reads counts as one that waits for the link."""
    monkeypatch.setattr(StreamPlan, "link_binds", lambda *_: True)
    yield
    gc.collect()


@pytest.mark.usefixtures("link_binds")
def test_a_model_in_evaluation_has_its_bits_and_moves_less() -> None:
    plain = model().cuda().eval()
    x = torch.randn(16, WIDTH, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), tiermem.TierManager("cuda", hbm="64MiB", dram="1GiB") as tier:
        wrapped = tier.wrap(model().eval())
        assert len(tier._manager.parts.transfers.packed) >= LAYERS
        expected = plain(x)
        for _ in range(6):
            assert torch.equal(wrapped(x), expected)
        tier.reset_stats()
        assert torch.equal(wrapped(x), expected)
        moved = tier.stats().links["dram->hbm"].nbytes
        nbytes = sum(p.nbytes for p in plain.parameters())
        assert moved < 0.77 * nbytes
        wrapped[2].up.weight.mul_(2)  # its packed copy is of what it was
        plain[2].up.weight.mul_(2)
        for _ in range(3):
            assert torch.equal(wrapped(x), plain(x))


@pytest.mark.usefixtures("link_binds")
def test_frozen_layers_come_up_packed_in_training() -> None:
    def adapted() -> nn.Sequential:
        found = model().train().requires_grad_(False)
        found.append(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16))
        torch.nn.init.zeros_(found[-1].weight)
        found[3].norm.requires_grad_(True)
        return found

    plain = adapted().cuda()
    x = torch.randn(16, WIDTH, device="cuda", dtype=torch.bfloat16)
    with tiermem.TierManager("cuda", hbm="64MiB", dram="1GiB") as tier:
        wrapped = tier.wrap(adapted())
        packed = tier._manager.parts.transfers.packed
        assert len(packed) >= LAYERS - 1
        own = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
        trained = [p for p in wrapped.parameters() if p.requires_grad]
        optimizer = tier.optimizer(trained, torch.optim.AdamW, lr=1e-2)
        for _ in range(5):
            for loop, steps in ((plain, own), (wrapped, optimizer)):
                loss = loop(x).float().square().mean()
                loss.backward()
                steps.step()
                steps.zero_grad()
        for mine, theirs in zip(
            wrapped.state_dict().values(), plain.state_dict().values(), strict=True
        ):
            assert torch.equal(mine.cpu(), theirs.cpu())


@pytest.mark.usefixtures("link_binds")
def test_what_training_writes_is_not_packed() -> None:
    with tiermem.TierManager("cuda", hbm="64MiB", dram="1GiB") as tier:
        tier.wrap(model().train())
        assert not len(tier._manager.parts.transfers.packed)


def test_nothing_is_packed_where_all_fits_or_there_is_no_dram() -> None:
    with tiermem.TierManager("cuda", hbm="512MiB", dram="1GiB") as tier:
        tier.wrap(model().eval())
        assert not len(tier._manager.parts.transfers.packed)
    nbytes = sum(p.nbytes for p in model().parameters())
    with torch.no_grad(), tiermem.TierManager("cuda", hbm="64MiB", dram=nbytes + (8 << 20)) as tier:
        wrapped = tier.wrap(model().eval())
        assert not len(tier._manager.parts.transfers.packed)
        x = torch.randn(16, WIDTH, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(wrapped(x), model().cuda().eval()(x))
