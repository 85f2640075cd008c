"""Saved tensors below HBM: the same bits, the same errors, and nothing left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support_late import LateCopyEngine
from support_nn import assert_same, check_table, same_bits, seed
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import tiermem

HOMES = ["dram", "nvme"]
WIDTH = 32
ROWS = 32  # WIDTH * ROWS floats are one page, so that all of it goes to a file


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Layers, each by itself or in a checkpoint of one of the two kinds."""

    def __init__(self, layers: int = 6, mode: str = "plain") -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.mode == "region":
            return checkpoint(self.through, x, use_reentrant=False)
        for layer in self.layers:
            x = self.call(layer, x)
        return x

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def call(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.mode == "plain":
            return layer(x)
        if self.mode == "selective":
            return checkpoint(
                layer,
                x,
                use_reentrant=False,
                context_fn=partial(
                    create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]
                ),
            )
        return checkpoint(layer, x, use_reentrant=self.mode == "reentrant")


def manager(home: str, folder: Path | None = None, **options: Any) -> tiermem.TierManager:
    options = {"hbm": "1MiB", "dram": "16MiB", "activation_min": 1, **options}
    return tiermem.TierManager(
        "cpu",
        nvme=folder,
        policy=tiermem.Policy("dram", "dram", "dram", "dram", activations=home),
        **options,
    )


def twins(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    seed(0)
    first = build()
    seed(0)
    return first, build()


def data(number: int = 0) -> torch.Tensor:
    seed(number + 100)
    return torch.randn(ROWS, WIDTH, requires_grad=True)


def check_gradients(plain: nn.Module, model: nn.Module) -> None:
    ours = dict(model.named_parameters())
    for name, param in plain.named_parameters():
        assert param.grad is not None
        assert same_bits(param.grad, ours[name].grad.clone()), name


def check_empty(tier: tiermem.TierManager) -> None:
    """Nothing that was saved is anywhere any more; garbage is not collected for it."""
    store = tier._runtime.activations.store
    assert store is not None
    store.reap()
    assert store.pool.used == 0 == tier.stats().activations.used
    assert not store._live and not store._held and not store._fetched and not store._seqs
    assert store._held_bytes == store._fetched_bytes == 0
    assert not [row for row in tier.residency() if row.role == "activation"]
    check_table(tier)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are small: a team of threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


MODES = ["plain", "nonreentrant", "reentrant", "selective", "region"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("ahead", ["auto", 0, "4KiB"])
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
            assert (found.fetched_ahead == 0) == (ahead == 0)
            if ahead in (0, "auto"):
                assert (found.fetched_late == 0) == (ahead == "auto")


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
            assert store._fetched_bytes <= 4 * (8 << 10) + 4 * WIDTH * ROWS * 4
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


def test_only_the_first_layers() -> None:
    per_layer = {}
    for mode in ("plain", "nonreentrant"):
        for layers in (0, 1, 3, 6, 99, None):
            _, model = twins(lambda mode=mode: Net(6, mode))
            with manager("dram", activation_layers=layers, activation_min=4096) as tier:
                tier.wrap(model)
                out = model(data())
                per_layer[mode, layers] = tier.stats().activations.offloaded
                del out
    # input, normed input, two of four times the width; `first` saves its input, a leaf
    assert per_layer["plain", 0] == 0
    assert [per_layer["plain", n] for n in (1, 3, 6, 99, None)] == [3, 9, 18, 18, 18]
    assert [per_layer["nonreentrant", n] for n in (0, 1, 3, 6, 99, None)] == [0, 1, 3, 6, 6, 6]


def test_the_minimum_is_in_bytes() -> None:
    found = []
    for minimum in (1, 4096, 4097, 4 * 4096, 4 * 4096 + 1):
        _, model = twins(lambda: Net(2))
        with manager("dram", activation_min=minimum) as tier:
            tier.wrap(model)
            out = model(data())
            found.append(tier.stats().activations.offloaded)
            del out
    assert found == [2 * 5, 2 * 3, 2 * 1, 2 * 1, 0]


def test_hbm_and_auto_leave_them_alone() -> None:
    for home in ("hbm", "auto"):
        _, model = twins(Net)
        with manager(home) as tier:
            tier.wrap(model)
            model(data()).sum().backward()
            assert tier.stats().activations == tiermem.ActivationStats()
            assert not [row for row in tier.residency() if row.role == "activation"]


@pytest.mark.parametrize("home", HOMES)
def test_what_has_no_room_stays(home: str, tmp_path: Path) -> None:
    plain, model = twins(lambda: Net(12))
    limit = {"nvme_bytes": 64 << 10} if home == "nvme" else {"dram": "1100KiB", "hbm": "512KiB"}
    with manager(home, tmp_path if home == "nvme" else None, activation_min=4096, **limit) as tier:
        tier.wrap(model)
        for step in range(2):
            for net in (plain, model):
                net(data(step)).square().sum().backward()
        check_gradients(plain, model)
        found = tier.stats().activations
        assert found.kept > 0 and found.offloaded > 0
        check_empty(tier)


def test_idle_space_goes_to_who_needs_it() -> None:
    """What lies idle in the pool is no reason to refuse a model."""
    _, model = twins(lambda: Net(12))
    with manager("dram", dram="2MiB", activation_min=4096) as tier:
        tier.wrap(model)
        model(data()).sum().backward()
        pool = tier._runtime.activations.store.pool
        assert pool.idle > 0
        free = tier._manager.homes.dram.capacity - tier._manager.homes.dram.used
        pieces = 1 + free // (64 << 10)
        tier.wrap(nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(pieces)]))
        assert pool.idle == 0
        model(data()).sum().backward()


def test_nvme_asks_for_a_folder() -> None:
    _, model = twins(Net)
    before = model.state_dict()
    with manager("nvme") as tier:
        with pytest.raises(tiermem.CapacityError, match=r"activations .*nvme=folder"):
            tier.wrap(model)
    assert_same(before, model.state_dict(), "untouched")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"activation_min": -1}, "activation_min"),
        ({"activation_min": "many"}, "activation_min"),
        ({"activation_layers": -1}, "activation_layers"),
        ({"activation_layers": True}, "activation_layers"),
        ({"activation_ahead": "two"}, "activation_ahead"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(tiermem.ConfigError, match=said):
        manager("dram", **options)


def test_backward_after_close_says_so() -> None:
    _, model = twins(Net)
    tier = manager("dram", activation_ahead=0)
    tier.wrap(model)
    loss = model(data()).sum()
    tier.close()
    with pytest.raises(tiermem.ClosedError):
        loss.backward()
    del loss
    gc.collect()


def test_kinds_of_tensors() -> None:
    class Kinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.linear(x)
            c = torch.complex(h, h.sin())
            d = (c * c.conj().exp()).imag * c.real
            e = F.conv1d(d[None].transpose(1, 2), d[:, :, None].expand(-1, -1, 3)).squeeze(0)
            wide = h[:, :1].expand(ROWS, 4 * WIDTH)
            m = F.max_pool1d(wide.cos() * wide, 2)
            half = (h.bfloat16() @ h.bfloat16().t()).float()
            parts = F.dropout(half, 0.5) + half.index_select(0, torch.arange(ROWS))
            return e.exp().sum() + m.sum() + parts.sum() + (h.double() ** 3).sum()

    plain, model = twins(Kinds)
    with manager("dram", activation_ahead=0) as tier:
        tier.wrap(model)
        grads = []
        for net in (plain, model):
            x = data()
            seed(5)
            net(x).backward()
            grads.append(x.grad)
        assert_same(grads[0], grads[1], "input gradient")
        check_gradients(plain, model)
        found = tier.stats().activations
        assert found.fetched_late > 5
        check_empty(tier)


@pytest.mark.parametrize("seed_", range(6))
@pytest.mark.parametrize("mode", ["plain", "nonreentrant", "reentrant"])
def test_late_copies_change_nothing(seed_: int, mode: str) -> None:
    plain, model = twins(lambda: Net(8, mode))
    ahead = [0, "4KiB", "auto"][seed_ % 3]
    with manager("dram", activation_ahead=ahead) as tier:
        engine = LateCopyEngine(seed_, eager=[0.0, 0.3][seed_ % 2])
        tier._manager.copy = tier._manager.traffic.copy = engine
        tier.wrap(model)
        for step in range(4):
            if step == 2:
                out = model(data(7))
                del out
            for net in (plain, model):
                net(data(step)).square().sum().backward(retain_graph=step == 3)
        check_gradients(plain, model)
        assert not engine.harm
        assert tier.stats().activations.offloaded > 0
        gc.collect()
        check_empty(tier)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("mode", ["plain", "nonreentrant"])
def test_blocks_that_are_compiled(mode: str) -> None:
    plain, model = twins(lambda: Net(4, mode))
    with manager("dram", activation_min=4096) as tier:
        tier.wrap(model)
        for net in (plain, model):
            for layer in net.layers:
                layer.compile(backend="aot_eager")
        for step in range(2):
            for net in (plain, model):
                net(data(step)).square().sum().backward()
        check_gradients(plain, model)
        found = tier.stats().activations
        assert found.offloaded > 0 and found.fetched_ahead > 0
        check_empty(tier)


@pytest.mark.parametrize("layers_needed", [1, 2, 4])
def test_what_was_fetched_and_never_used_is_let_go_in_order(layers_needed: int) -> None:
    _, model = twins(lambda: Net(8))
    engine = LateCopyEngine(0, eager=0.0)
    with manager("dram", activation_ahead="16KiB") as tier:
        tier._manager.copy = tier._manager.traffic.copy = engine
        tier.wrap(model)
        for _ in range(3):
            loss = model(data()).square().sum()
            wanted = model.layers[-layers_needed].down.weight
            torch.autograd.grad(loss, [wanted])  # backward stops there, having looked ahead
            del loss
        found = tier.stats().activations
        assert found.fetched_ahead > 0
        tier._runtime.activations.store.reap()
        engine.synchronize()
        assert not engine.harm
        check_empty(tier)
