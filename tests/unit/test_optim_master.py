"""Masters: mixed precision in the tiers equals the loop written by hand, bit for bit."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_nn import Tiers, assert_same, same_bits, seed
from support_optim import Net, Twins, loss_of, one_group, two_groups
from torch import nn

import tiermem
from tiermem.nn.compat.shapes import follow

CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01, "foreach": False, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    (torch.optim.Adagrad, {"lr": 0.02}),
]
HOMES = ("hbm", "dram", "nvme", "auto")


def thawed_but_one(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    model = Net(dtype)
    model.layers[1].requires_grad_(False)
    return model


@settings(max_examples=examples(5, 400))
@given(
    homes=st.fixed_dictionaries(
        {role: st.sampled_from(HOMES) for role in ("params", "grads", "master", "optimizer")}
    ),
    chosen=st.sampled_from(CLASSES),
    groups=st.sampled_from([one_group, two_groups]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    grad_dtype=st.sampled_from([None, torch.float32]),
    accumulate=st.integers(1, 3),
    clip=st.sampled_from(["none", "norm", "value"]),
    frozen=st.booleans(),
    overlap=st.booleans(),
    extra=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_every_combination_of_homes(
    tmp_path_factory: pytest.TempPathFactory,
    homes: dict[str, str],
    chosen: Any,
    groups: Any,
    dtype: torch.dtype,
    grad_dtype: torch.dtype | None,
    accumulate: int,
    clip: str,
    frozen: bool,
    overlap: bool,
    extra: list[bool],
) -> None:
    tiers = Tiers("mixed", nvme=str(tmp_path_factory.mktemp("swap")), policy=homes)
    build = (lambda: thawed_but_one(dtype)) if frozen else (lambda: Net(dtype))
    with Twins(
        build, tiers, *chosen, groups=groups, grad_dtype=grad_dtype, overlap=overlap
    ) as twins:
        rates = [
            torch.optim.lr_scheduler.StepLR(o, 2, 0.5)
            for o in (twins.by_hand.optimizer, twins.optimizer)
        ]
        for step, use_extra in enumerate(extra):
            for part in range(accumulate):
                twins.backward(10 * step + part, use_extra=use_extra)
            if clip == "norm":
                twins.clip_norm(0.05)
            elif clip == "value":
                twins.clip_value(0.003)
            twins.step()
            for rate in rates:
                rate.step()
            if step % 2:
                twins.check()


def test_masters_live_where_the_policy_says(tmp_path: Path) -> None:
    policy = {"master": "nvme", "optimizer": "dram", "grads": "dram", "params": "dram"}
    with Twins(Net, Tiers("nvme", nvme=str(tmp_path), policy=policy)) as twins:
        rows = [r for r in twins.tier.residency() if r.role == "master"]
        assert rows
        assert {row.home for row in rows} == {"nvme"}
        trained = sum(p.numel() for p in twins.model.parameters())
        assert sum(row.nbytes for row in rows) >= 4 * trained


def test_state_dicts_to_and_fro() -> None:
    with Twins(Net, Tiers("dram")) as twins:
        assert_same(
            {n: p.float() for n, p in enumerate(twins.plain.parameters())},
            twins.optimizer.state_dict()["master"],
            "masters before any step",
        )
        for step in range(2):
            twins.backward(step)
            twins.step()
        buffer = io.BytesIO()
        torch.save(twins.optimizer.state_dict(), buffer)
        buffer.seek(0)
        saved = torch.load(buffer)
        with Twins(Net, Tiers("dram")) as others:
            others.optimizer.load_state_dict(saved)
            assert_same(
                dict(twins.plain.state_dict()), dict(others.model.state_dict()), "derived weights"
            )
            others.plain.load_state_dict(twins.plain.state_dict())
            others.by_hand = twins.by_hand
            params = dict(others.plain.named_parameters())
            others.by_hand.params = list(params.values())
            for step in range(2, 4):
                others.backward(step)
                others.step()
            others.check()


def test_a_state_dict_with_masters_where_there_are_none() -> None:
    with Twins(Net, Tiers("dram")) as twins:
        twins.backward(1)
        twins.step()
        saved = twins.optimizer.state_dict()
        with Twins(Net, Tiers("dram"), master_dtype=None) as others:
            before = others.optimizer.state_dict()
            with pytest.raises(tiermem.CheckpointError, match=r"master_dtype=torch\.float32"):
                others.optimizer.load_state_dict(saved)
            assert_same(before, others.optimizer.state_dict(), "nothing was loaded")
            del saved["master"]
            others.optimizer.load_state_dict(saved)


@pytest.mark.parametrize("where", ["device", "host"])
def test_masters_follow_weights_that_somebody_wrote(where: str) -> None:
    """Elements that were written start from there; the others keep all their bits."""
    chosen = (torch.optim.AdamW, {"lr": 0.01, "foreach": False})
    with Twins(Net, Tiers("dram"), *chosen, where=where) as twins:
        for step in range(2):
            twins.backward(step)
            twins.step()
        for model in (twins.plain, twins.model):
            with torch.no_grad():
                model.extra.weight[:3].mul_(0.5)
        by_hand = twins.by_hand
        index = next(i for i, p in enumerate(by_hand.params) if p is twins.plain.extra.weight)
        with torch.no_grad():
            by_hand.masters[index][:3] = twins.plain.extra.weight[:3].float()
        for step in range(2, 4):
            twins.backward(step)
            twins.step()
        twins.check()


def test_loading_weights_starts_the_masters_anew() -> None:
    with Twins(Net, Tiers("dram")) as twins:
        twins.backward(1)
        twins.step()
        seed(99)
        other = Net().state_dict()
        before = [param.detach().clone() for param in twins.by_hand.params]
        twins.plain.load_state_dict(other)
        twins.model.load_state_dict(other)
        with torch.no_grad():
            for old, master, param in zip(
                before, twins.by_hand.masters, twins.by_hand.params, strict=True
            ):
                master[old != param] = param[old != param].float()
        twins.backward(2)
        twins.step()
        twins.check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_that_skips(
    dtype: torch.dtype, grad_dtype: torch.dtype | None, fused: bool
) -> None:
    chosen = (torch.optim.AdamW, {"lr": 0.01, "fused": fused})
    make = lambda: Net(dtype)  # noqa: E731
    with Twins(make, Tiers("dram"), *chosen, grad_dtype=grad_dtype) as twins:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        scale = 256.0
        clean = 0
        for step in range(6):
            assert scaler.get_scale() == scale
            broken = step in (1, 4)
            for number in (2 * step, 2 * step + 1):
                twins.backward(number, scale=float("inf") if broken and number % 2 else scale)
            factor = torch.tensor(scale).double().reciprocal().float()
            if not broken:
                twins.by_hand.step(factor)
            twins.by_hand.zero_grad()
            scaler.scale(torch.ones(()))
            scaler.step(twins.optimizer)
            scaler.update()
            twins.optimizer.zero_grad()
            clean = 0 if broken else clean + 1
            scale = scale / 2 if broken else scale * 2 if clean == 2 else scale
            clean %= 2
            if not fused:  # a fused step counts in a way of its own
                twins.check()
        assert_same(dict(twins.plain.state_dict()), dict(twins.model.state_dict()), "weights")


def test_unscaling_and_clipping_by_hand() -> None:
    with Twins(Net, Tiers("dram"), grad_dtype=torch.float32) as twins:
        for step in range(3):
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
            twins.backward(step, scale=64.0)
            for gradient in twins.by_hand.gradients():
                gradient.mul_(1 / 64)
            scaler.scale(torch.ones(()))
            scaler.unscale_(twins.optimizer)
            twins.clip_norm(0.01)
            scaler.step(twins.optimizer)
            twins.by_hand.step()
            scaler.update()
            twins.by_hand.zero_grad()
            twins.optimizer.zero_grad()
            twins.check()


def test_gradients_kept_in_more_bits_are_shown_in_them() -> None:
    with Twins(Net, Tiers("dram"), grad_dtype=torch.float32) as twins:
        for part in range(3):
            twins.backward(part)
        for param, own in zip(twins.by_hand.params, twins.model.parameters(), strict=True):
            sums = twins.by_hand._sums[id(param)]
            grad = own.grad
            assert grad is not None and own.dtype is torch.bfloat16
            assert grad.dtype is grad.clone().dtype is torch.float32
            assert grad.float() is grad
            assert grad.itemsize == grad.element_size() == 4 and grad.nbytes == 4 * grad.numel()
            assert same_bits(grad.clone(), sums)
        view = twins.model.extra.weight.grad[:2]  # looked at and kept
        assert view.shape == (2, 24)
        with twins.tier.materialize(twins.model):
            shown = twins.model.extra.weight.grad
            assert shown.dtype is torch.bfloat16  # an ordinary one, as torch wants it
        twins.backward(3)
        twins.step()
        twins.check()


def test_gradients_kept_in_more_bits_are_changed_in_them() -> None:
    """In place; torch refuses another one of another dtype than the parameter's."""
    with Twins(Net, Tiers("dram"), grad_dtype=torch.float32) as twins:
        for step in range(2):
            twins.backward(2 * step)
            twins.backward(2 * step + 1)
            for gradient in twins.by_hand.gradients():
                gradient.mul_(1 / 3)
            for param in twins.model.parameters():
                param.grad.mul_(1 / 3)
            grads = twins.by_hand.gradients()
            expected = torch.nn.utils.get_total_norm(grads)
            for gradient in grads:
                gradient.mul_(torch.clamp(0.1 / (expected + 1e-6), max=1.0))
            norm = torch.nn.utils.clip_grad_norm_(twins.model.parameters(), 0.1)
            assert_same(expected, norm, "norm")
            twins.step()
            twins.check()
        twins.backward(8)
        param, bias = twins.model.extra.weight, twins.model.extra.bias
        held = bias.grad
        value = held.clone()
        assert value.dtype is torch.float32
        with pytest.raises(RuntimeError, match="grad"):
            param.grad = param.grad * 2
        param.grad = (param.grad * 2).to(param.dtype)
        twins.optimizer.zero_grad()
        assert same_bits(held.clone(), value) and held.dtype is torch.float32
        bias.grad = held  # a stand-in that is no longer kept up to date
        twins.tier.unwrap(twins.model)
        assert same_bits(bias.grad, value.bfloat16())


def test_no_second_copy_of_the_gradients() -> None:
    """Summed up in float32 they take their blocks, and not a byte of HBM beside them."""
    build = lambda: Net(layers=8)  # noqa: E731
    with Twins(build, Tiers("dram"), grad_dtype=torch.float32) as twins:
        trained = sum(p.numel() for p in twins.model.parameters())
        rows = [row for row in twins.tier.residency() if row.role == "grad"]
        packed = sum(row.nbytes for row in rows)
        assert 4 * trained <= packed <= 4 * trained + 4096 * len(rows)
        for part in range(4):
            twins.backward(part)
        assert twins.tier.stats().peak["hbm"] <= twins.tier.stats().budget["hbm"] < packed


def test_dtypes_that_cannot_be_had() -> None:
    with tiermem.TierManager(device="cpu", hbm="4MiB", dram="16MiB") as tier:
        model = tier.wrap(Net(torch.float32))
        with pytest.raises(tiermem.StepError, match="narrower"):
            tier.optimizer(model, torch.optim.SGD, lr=0.1, master_dtype=torch.bfloat16)
        with pytest.raises(tiermem.ConfigError, match="floating dtype"):
            tier.optimizer(model, torch.optim.SGD, lr=0.1, master_dtype=torch.int32)
        loss_of(model, 1).backward()
        with pytest.raises(tiermem.StepError, match="before the first backward"):
            tier.optimizer(model, torch.optim.SGD, lr=0.1, grad_dtype=torch.float64)
        model.zero_grad()
        optimizer = tier.optimizer(model, torch.optim.SGD, lr=0.1, grad_dtype=torch.float64)
        loss_of(model, 1).backward()
        optimizer.step()


@settings(max_examples=examples(20))
@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=40),
    written=st.lists(st.booleans(), min_size=40, max_size=40),
    coarse=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_following(values: list[float], written: list[bool], coarse: torch.dtype) -> None:
    precise = torch.tensor(values)
    shown = precise.to(coarse)
    for index, changed in enumerate(written[: len(values)]):
        if changed:
            shown[index] = 1.5 if shown[index] != 1.5 else 2.5
    expected = [
        shown[i].float().item() if written[i] else precise[i].item() for i in range(len(values))
    ]
    follow(precise, shown)
    assert same_bits(precise.nan_to_num(7.0), torch.tensor(expected).nan_to_num(7.0))
