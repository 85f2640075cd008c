"""Saved tensors below HBM: the same bits, the same errors, and nothing left behind."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support_activations import (
    HOMES,
    ROWS,
    WIDTH,
    Net,
    check_empty,
    check_gradients,
    data,
    manager,
    twins,
)
from support_nn import assert_same, seed
from torch import nn

import tiermem

MODES = ["plain", "nonreentrant", "reentrant", "selective", "region"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("ahead", ["auto", 0, "4KiB"])
@pytest.mark.one_in(3)
def test_gradients_have_the_same_bits(mode: str, home: str, ahead: Any, tmp_path: Path) -> None:
    plain, model = twins(lambda: Net(mode=mode))
    with manager(home, tmp_path, activation_ahead=ahead) as tier:
        tier.wrap(model)
        for step in range(3):
            grads = []
            for net in (plain, model):
                x = data(step)
                net(x).square().sum().backward()
                grads.append(x.grad)
            assert_same(grads[0], grads[1], "input gradient")
            check_gradients(plain, model)
            check_empty(tier)
        stats = tier.stats()
        found = stats.activations
        assert found.offloaded > 0 and found.peak > 0
        link = stats.links[f"hbm->{home}"]
        assert link.nbytes > 0 and found.offloaded_bytes > 0
        if mode in ("plain", "nonreentrant", "reentrant"):
            fetched = found.fetched_ahead + found.fetched_late
            assert fetched > 0 and fetched + found.reused >= found.offloaded
            if ahead == 0:
                assert found.fetched_ahead == 0
            elif home == "dram":  # with a disk it depends on what has been written by then
                assert found.fetched_ahead > 0
                assert found.fetched_late == 0 or ahead != "auto"


@pytest.mark.parametrize("mode", ["plain", "nonreentrant", "reentrant"])
def test_in_the_steady_state_nothing_is_allocated(mode: str, tmp_path: Path) -> None:
    _, model = twins(lambda: Net(mode=mode))
    with manager("dram") as tier:
        tier.wrap(model)
        taken = []
        for step in range(4):
            model(data(step)).sum().backward()
            taken.append((tier.stats().used["dram"], tier._runtime.activations.store.pool.idle))
        assert len(set(taken)) == 1 and taken[0][1] > 0


@pytest.mark.parametrize("mode", ["nonreentrant", "reentrant"])
def test_under_recomputation_hbm_holds_two_inputs_however_many_layers(mode: str) -> None:
    most = {}
    for layers in (6, 24):
        _, model = twins(lambda layers=layers: Net(layers, mode))
        with manager("dram") as tier:
            tier.wrap(model)
            model(data()).sum().backward()
            seen: list[int] = []
            for layer in model.layers:
                layer.register_forward_pre_hook(partial(count, tier, seen))
            model(data()).sum().backward()
            most[layers] = max(seen)
            assert tier.stats().activations.peak >= layers * ROWS * WIDTH * 4
            assert len(seen) == 2 * layers
    assert most[6] == most[24] <= 4


def count(tier: tiermem.TierManager, seen: list[int], *_: object) -> None:
    seen.append(in_hbm(tier))


def in_hbm(tier: tiermem.TierManager) -> int:
    rows = [row for row in tier.residency() if row.role == "activation"]
    return sum(row.tiers["hbm"] == "valid" for row in rows)


def test_views_of_one_storage_share_a_copy() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            return (q * k) * v + (q.sigmoid() * k).tanh()

    plain, model = twins(Split)
    with manager("dram", activation_min=3000) as tier:
        tier.wrap(model)
        for net in (plain, model):
            net(data()).sum().backward()
        check_gradients(plain, model)
        found = tier.stats().activations
        # the input is a leaf; qkv's output, q * k, sigmoid and tanh are one copy each
        assert found.offloaded == 4
        assert found.shared == 4  # of k, v, q and k again
        check_empty(tier)


def test_parts_of_a_storage_with_counters_of_their_own_share_nothing() -> None:
    class Gates(nn.Module):
        """As in a GRU cell: each part is written in place, one after the other, and saved."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            r, z, n = torch.unsafe_chunk(self.linear(x), 3, dim=-1)
            r = r.add_(1).sigmoid_()
            z = z.add_(2).sigmoid_()
            n = n.mul_(r).tanh_()
            return z * r + n

    plain, model = twins(Gates)
    with manager("dram", activation_ahead=0) as tier:
        tier.wrap(model)
        for net in (plain, model):
            net(data()).sum().backward()
        check_gradients(plain, model)
        assert tier.stats().activations.offloaded >= 3


@pytest.mark.parametrize("ahead", range(1, 25, 3))
def test_one_of_several_copies_of_a_storage_is_let_go_before_the_others(ahead: int) -> None:
    """What the others still have is not overwritten."""

    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.ModuleList([nn.GRU(WIDTH, WIDTH) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for cell in self.cells:
                x = torch.tanh(cell(x)[0])
            return x

    plain, model = twins(Cells)
    with manager("dram", activation_min=64, activation_ahead=ahead * 4 * WIDTH) as tier:
        tier.wrap(model)
        for net in (plain, model):
            net(data()[:4]).sum().backward()
        check_gradients(plain, model)


def test_a_small_part_of_a_large_storage_goes_alone() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.weight * x  # 64 rows
            return h[5:9].square().sum() + h[7].exp().sum()

    plain, model = twins(Part)
    with manager("dram", activation_min=64) as tier:
        tier.wrap(model)
        for net in (plain, model):
            seed(1)
            net(torch.randn(64, 100)).backward()
        check_gradients(plain, model)
        whole = 64 * 100 * 4
        assert tier.stats().activations.offloaded_bytes < 2 * whole
        check_empty(tier)


class Writer(nn.Module):
    """Changes something in place after it was saved."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        y = h.tanh()  # keeps its result
        z = y * h
        if self.what == "saved":
            y.add_(1)
        elif self.what == "input":
            h.mul_(2)
        elif self.what == "view":
            y[0].zero_()
        elif self.what == "other":
            z.add_(1)
        elif self.what == "between":
            y.mul_(3)
            z = z + y * y.detach()
        return z


@pytest.mark.parametrize("what", ["saved", "input", "view", "other", "between"])
@pytest.mark.parametrize("minimum", [1, 1 << 20])
@pytest.mark.parametrize("ahead", [0, "auto"])
def test_changes_in_place_are_errors_as_without(what: str, minimum: int, ahead: Any) -> None:
    plain, model = twins(lambda: Writer(what))
    outcomes = []
    with manager("dram", activation_min=minimum, activation_ahead=ahead) as tier:
        tier.wrap(model)
        for net in (plain, model):
            loss = net(data()).sum()
            try:
                loss.backward()
                outcomes.append("went well")
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)
                assert "expected version" in str(error)
                outcomes.append("error")
            del loss
        assert outcomes[0] == outcomes[1] == ("went well" if what == "other" else "error")
        if what == "other":
            check_gradients(plain, model)


def test_graphs_dropped_without_backward_leave_nothing() -> None:
    _, model = twins(Net)
    gc.collect()
    gc.disable()
    try:
        with manager("dram") as tier:
            tier.wrap(model)
            out = model(data())
            assert tier.stats().activations.used > 0
            assert [row for row in tier.residency() if row.role == "activation"]
            del out
            check_empty(tier)
            for _ in range(3):
                out = model(data())
            loss = out.sum()
            del out
            (grad,) = torch.autograd.grad(loss, [model.layers[3].up.weight])
            del loss, grad
            check_empty(tier)
    finally:
        gc.enable()


def test_a_graph_kept_and_used_again() -> None:
    plain, model = twins(lambda: Net(12))
    with manager("dram", activation_ahead="8KiB") as tier:
        tier.wrap(model)
        outs = [net(data()).square().sum() for net in (plain, model)]
        store = tier._runtime.activations.store
        for _ in range(3):
            for out in outs:
                out.backward(retain_graph=True)
            check_gradients(plain, model)
            assert store._fetched.nbytes <= 4 * (8 << 10) + 4 * WIDTH * ROWS * 4
        assert tier.stats().activations.used > 0
        del outs, out
        check_empty(tier)


@pytest.mark.parametrize("home", HOMES)
def test_backward_of_backward(home: str, tmp_path: Path) -> None:
    plain, model = twins(Net)
    with manager(home, tmp_path) as tier:
        tier.wrap(model)
        results = []
        for net in (plain, model):
            x = data()
            (first,) = torch.autograd.grad(net(x).square().sum(), [x], create_graph=True)
            (first.square().sum() + net(x).sum()).backward()
            results.append([first.detach(), x.grad])
            del first
        assert_same(results[0], results[1], "second derivative")
        check_gradients(plain, model)
        gc.collect()
        check_empty(tier)


def test_a_change_before_the_second_backward_is_an_error() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = self.linear(x).exp()
            return h * h.sin(), h

    for tiered in (False, True):
        model: nn.Module = Twice()
        with manager("dram", activation_ahead=0) as tier:
            if tiered:
                tier.wrap(model)
            x = data()
            out, h = model(x)
            (first,) = torch.autograd.grad(out.sum(), [x], create_graph=True)
            h.detach().mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                first.sum().backward()
            del first, out, h


@pytest.mark.parametrize("order", ["first", "last", "together"])
def test_several_forwards_before_a_backward(order: str) -> None:
    plain, model = twins(lambda: Net(mode="nonreentrant"))
    with manager("dram") as tier:
        tier.wrap(model)
        for net in (plain, model):
            losses = [net(data(number)).square().sum() for number in range(3)]
            if order == "together":
                sum(losses).backward()
            else:
                for loss in losses if order == "first" else reversed(losses):
                    loss.backward()
            del losses
            if order != "together":
                del loss
        check_gradients(plain, model)
        check_empty(tier)


def test_an_exception_in_the_middle() -> None:
    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    plain, model = twins(Net)
    with manager("dram") as tier:
        tier.wrap(model)
        handle = model.layers[3].register_forward_pre_hook(stop)
        with pytest.raises(Stop):
            model(data())
        handle.remove()
        out = model(data())
        out.register_hook(stop)
        with pytest.raises(Stop):
            out.sum().backward()
        del out
        gc.collect()
        for net in (plain, model):
            net.zero_grad()
            net(data()).square().sum().backward()
        check_gradients(plain, model)
        check_empty(tier)


def test_hooks_of_the_users_own_keep_what_they_pack() -> None:
    plain, model = twins(Net)
    with manager("dram") as tier:
        tier.wrap(model)
        with torch.autograd.graph.save_on_cpu():
            outs = [net(data()).square().sum() for net in (plain, model)]
        for out in outs:
            out.backward()
        check_gradients(plain, model)
        assert tier.stats().activations.offloaded == 0
