"""On a CUDA device: homes that lie packed, with streams that are late."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support_nn import assert_same
from support_packed_homes import packing_always
from support_stress import Late
from torch import nn

import tiermem
from tiermem.core.packedhome import PACKED_TILE, SPILL, TILE, WORDS, pack_tile
from tiermem.runtime.services import home_packing
from tiermem.transfer.driver import DriverCalls

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

WIDTH, LAYERS = 2048, 10


@pytest.fixture(autouse=True)
def packing() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, packing_always(patch):
        patch.setattr(home_packing, "_OF_HBM", 32)
        yield


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=n % 2 == 0) for n in range(LAYERS))).to(
        "cuda", torch.bfloat16
    )


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(number))
    return model(x.to("cuda", torch.bfloat16)).float().square().mean()


def test_kernels_pack_as_the_reference_does() -> None:
    calls = DriverCalls(torch.device("cuda"))
    assert calls.can_pack_homes()
    generator = torch.Generator().manual_seed(0)
    scales = [1e-30, 1e-3, 1.0, 1e30]
    tiles = [torch.randn(WORDS, generator=generator) * scale for scale in scales]
    tiles += [value.square() * 1e-3 for value in tiles]
    words = [tile.bfloat16().view(torch.int16) for tile in tiles]
    words.append(torch.randint(-(1 << 15), 1 << 15, (WORDS,), generator=generator).short())
    words.append(torch.zeros(WORDS, dtype=torch.int16))
    count = len(words)
    source = torch.cat(words).cuda()
    packed = torch.zeros(count * PACKED_TILE, dtype=torch.uint8, device="cuda")
    host = torch.zeros(count * (SPILL + 1), dtype=torch.uint8, pin_memory=True)
    seen = torch.zeros(count, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    spill, raw = host.data_ptr(), host.data_ptr() + count * SPILL
    there = packed.data_ptr(), source.data_ptr()
    calls.pack_home(stream, *there, count, 0, spill, raw, seen.data_ptr())
    torch.cuda.synchronize()
    for number, each in enumerate(words):
        expected, behind = pack_tile(each.numpy().view("<u2"))
        assert bool(host[count * SPILL + number]) == bool(seen[number]) == (behind is not None)
        found = packed[number * PACKED_TILE :][:PACKED_TILE].cpu().numpy()
        first = PACKED_TILE if behind is not None else PACKED_TILE - 120  # escapes in any order
        assert (found[:first] == expected[:first]).all(), number
        if behind is not None:
            assert (host[number * SPILL :][:SPILL].numpy() == behind).all()
    room = torch.zeros(count * TILE, dtype=torch.uint8, device="cuda")
    for flags in (seen.data_ptr(), raw):
        room[count * SPILL :].copy_(packed)
        calls.unpack_home(stream, room.data_ptr(), count, spill, flags)
        assert torch.equal(room.view(torch.int16), source)


@pytest.mark.parametrize("late", [0.0, 0.5])
@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (torch.optim.AdamW, {"lr": 1e-3}),
        (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
        (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    ],
)
def test_the_same_bits(cls: Any, settings: Any, wild: bool, late: float, tmp_path: Path) -> None:
    plain = layers()
    own = cls(plain.parameters(), **settings)
    nbytes = sum(p.numel() * p.element_size() for p in plain.parameters())
    with tiermem.TierManager(device="cuda", hbm=nbytes * 2 // 3, dram=16 * nbytes) as tier:
        model = tier.wrap(layers())
        optimizer = tier.optimizer(model, cls, **settings)
        Late(1, late, "cuda").copies(tier._manager.parts.copy)
        homes = tier._manager.parts.homes
        for number in range(16):
            losses = []
            for which, stepper in ((plain, own), (model, optimizer)):
                loss = loss_of(which, number)
                loss.backward()
                stepper.step()
                stepper.zero_grad()
                losses.append(loss.detach())
            assert_same(*losses, f"loss {number}")
            if number == 10:
                assert len(homes.packed) > LAYERS
                tier.save(tmp_path / "save")
                theirs = optimizer.state_dict()["state"]
                for key, values in own.state_dict()["state"].items():
                    for name, value in values.items():
                        assert_same(value.cpu(), theirs[key][name].cpu(), name)
            if number == 7 and wild:
                for params in (plain.parameters(), model.parameters()):
                    for each, param in enumerate(params):
                        generator = torch.Generator().manual_seed(each)
                        drawn = torch.randint(-(1 << 15), 1 << 15, param.shape, generator=generator)
                        words = drawn.short().view(torch.bfloat16).cuda()
                        with torch.no_grad():
                            param.copy_(torch.where(words.abs() < 1e-3, words, param))
        assert len(homes.packed) > LAYERS
        for name, value in plain.state_dict().items():
            assert_same(value.cpu(), model.state_dict()[name].cpu(), name)
