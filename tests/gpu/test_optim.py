"""On a CUDA device: masters, steps in the next forward, and steps on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support_nn import assert_same
from support_optim import ByHand, one_group
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem.nn.tensors.norms import measure_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

HOMES = {
    "dram": {"params": "dram", "grads": "dram", "master": "dram", "optimizer": "dram"},
    "nvme": {"params": "dram", "grads": "dram", "master": "nvme", "optimizer": "nvme"},
}


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(8)
    ]
    return nn.Sequential(*layers).to(torch.bfloat16)


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(64, 512, generator=generator).to("cuda", torch.bfloat16)
    return (model(x) - x).float().square().mean()


def run(
    tmp_path: Path,
    homes: str,
    steps: int,
    clip: bool,
    settings: dict,
    micro_batches: int = 2,
    **options: object,
) -> tuple[dict, dict, list[float], list[float]]:
    plain = build().cuda()
    by_hand = ByHand(one_group(plain), torch.optim.AdamW, settings, torch.float32, torch.float32)
    tier = tiermem.TierManager(
        device="cuda", hbm="128MiB", dram="1GiB", nvme=tmp_path, policy=HOMES[homes]
    )
    with tier:
        model = tier.wrap(build(), blocks=[str(i) for i in range(8)])
        optimizer = tier.optimizer(
            model,
            torch.optim.AdamW,
            master_dtype=torch.float32,
            grad_dtype=torch.float32,
            **settings,
            **options,
        )
        optimizer.accumulate(micro_batches)
        rates = [torch.optim.lr_scheduler.StepLR(o, 3, 0.5) for o in (by_hand.optimizer, optimizer)]
        losses: tuple[list[float], list[float]] = ([], [])
        for step in range(steps):
            for part in range(micro_batches):
                for which, found in zip((plain, model), losses, strict=True):
                    loss = loss_of(which, micro_batches * step + part)
                    loss.backward()
                    found.append(loss.item())
                by_hand.after_backward()
            if clip:
                stand_ins = [torch.empty_like(g, requires_grad=True) for g in by_hand.gradients()]
                for stand_in, gradient in zip(stand_ins, by_hand.gradients(), strict=True):
                    stand_in.grad = gradient
                total = nn.utils.clip_grad_norm_(stand_ins, 0.1)
                norm = optimizer.clip_grad_norm_(0.1)
                if "where" in options:  # the host rounds otherwise, and so the weights differ
                    torch.testing.assert_close(norm, total, rtol=1e-2, atol=0.0)
                else:
                    assert_same(total, norm, "norm")
                    assert (optimizer._norms.swept == 0) == (step > 0)
            by_hand.step()
            optimizer.step()
            for rate in rates:
                rate.step()
            by_hand.zero_grad()
            optimizer.zero_grad()
        if options.get("overlap") == "backward":  # the first two steps are watched
            assert optimizer.stepped_in_backward == (steps - 2) * len(optimizer._units)
        state = optimizer.state_dict()
        weights = {name: value.cpu() for name, value in model.state_dict().items()}
        theirs = {name: value.cpu() for name, value in plain.state_dict().items()}
    expected = by_hand.state_dict()
    assert expected["state"].keys() == state["state"].keys()
    if "where" not in options:
        assert_same(theirs, weights, "weights")
        masters = {n: m.cpu() for n, m in expected["master"].items()}
        assert_same(masters, state["master"], "masters")
        for number, values in expected["state"].items():
            for key, value in values.items():
                assert_same(value.cpu(), state["state"][number][key].cpu(), key)
    return theirs, weights, *losses


@pytest.mark.parametrize("homes", sorted(HOMES))
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_the_same_bits(tmp_path: Path, homes: str, overlap: bool, fused: bool, clip: bool) -> None:
    settings = {"lr": 1e-3, "fused": fused}
    _, _, plain, tiered = run(tmp_path, homes, 12, clip, settings, overlap=overlap)
    assert plain == tiered


@pytest.mark.parametrize("homes", sorted(HOMES))
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_same_bits_inside_backward(
    tmp_path: Path, homes: str, fused: bool, micro_batches: int
) -> None:
    settings = {"lr": 1e-3, "fused": fused}
    _, _, plain, tiered = run(
        tmp_path, homes, 12, False, settings, micro_batches, overlap="backward"
    )
    assert plain == tiered


@pytest.mark.parametrize("homes", sorted(HOMES))
@pytest.mark.parametrize("where", ["host", "both"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_host_steps_inside_backward(
    tmp_path: Path, homes: str, where: str, micro_batches: int
) -> None:
    """Every unit is begun inside backward, on whichever side (counted in ``run``)."""
    settings = {"lr": 1e-3}
    theirs, weights, plain, tiered = run(
        tmp_path, homes, 12, False, settings, micro_batches, overlap="backward", where=where
    )
    for one, other in zip(plain, tiered, strict=True):
        assert abs(one - other) < 0.02 * abs(one)
    for name, value in theirs.items():
        torch.testing.assert_close(weights[name], value, rtol=5e-2, atol=5e-3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_inside_backward(reentrant: bool) -> None:
    """Engine threads run a device's backward: a reentrant checkpoint's is told from the outer."""
    plain, other = build().cuda(), build()
    with tiermem.TierManager(
        device="cuda", hbm="128MiB", dram="1GiB", policy=HOMES["dram"]
    ) as tier:
        model = tier.wrap(other, blocks=[str(i) for i in range(8)])
        cls, settings = torch.optim.AdamW, {"lr": 1e-3}
        loops = [
            (plain, cls(plain.parameters(), **settings)),
            (model, tier.optimizer(model, cls, overlap="backward", **settings)),
        ]
        for step in range(8):
            losses = []
            for which, optimizer in loops:
                generator = torch.Generator().manual_seed(step)
                start = torch.randn(64, 512, generator=generator).to("cuda", torch.bfloat16)
                x = start.requires_grad_()
                for index, layer in enumerate(which):
                    if index in (0, 7):
                        x = layer(x)
                    else:
                        x = checkpoint(layer, x, use_reentrant=reentrant)
                loss = x.float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            assert losses[0] == losses[1], step
        units = len(loops[1][1]._units)
        made = loops[1][1].stepped_in_backward
        assert made == 6 * units if not reentrant else 0 < made < 6 * units
        for name, value in plain.state_dict().items():
            assert_same(value.cpu(), model.state_dict()[name].cpu(), name)


@pytest.mark.parametrize("where", ["host", "both"])
@pytest.mark.parametrize("overlap", [False, True])
def test_steps_on_the_host_round_close_by(tmp_path: Path, where: str, overlap: bool) -> None:
    theirs, weights, plain, tiered = run(
        tmp_path, "dram", 12, True, {"lr": 1e-3}, overlap=overlap, where=where
    )
    for one, other in zip(plain, tiered, strict=True):
        assert abs(one - other) < 0.02 * abs(one)
    for name, value in theirs.items():
        torch.testing.assert_close(weights[name], value, rtol=5e-2, atol=5e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
def test_norms_that_cast_as_they_read_have_the_bits_of_a_cast_beforehand(
    dtype: torch.dtype, order: float
) -> None:
    measure = measure_of((order, None, torch.float32))
    generator = torch.Generator("cuda").manual_seed(0)
    for size in (1, 7, 1000, 65536, 65537, 3072 * 1024, 2**20 + 5):
        for begin in (0, 1, 4, 8):
            whole = torch.randn(size + begin, generator=generator, device="cuda").to(dtype)
            (expected,) = torch._foreach_norm([whole[begin:].float()], order)
            assert torch.equal(measure(whole[begin:]), expected), (size, begin)
