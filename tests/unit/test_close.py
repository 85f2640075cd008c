"""Leaving ``with``: models come back as ordinary ones, or nothing is lost and it is said why."""

from __future__ import annotations

import copy
import errno
import gc
import os
import resource
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support_nn import assert_same, seed
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem.io.engine import IoOp
from tiermem.nn.groups.pointing import Pointing
from tiermem.nn.wrap import giveback
from tiermem.testing.io import Fault, ScriptedEngine

ORDINARY = (nn.Parameter, torch.Tensor)
POLICIES = ("dram", "nvme", "auto", {"params": "hbm"}, {"params": "nvme", "grads": "dram"})


class Net(nn.Module):
    """Tied weights, buffers large and small, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 24)
        self.layers = nn.Sequential(*[nn.Linear(24, 24) for _ in range(4)])
        self.norm = nn.BatchNorm1d(24)
        self.register_buffer("table", torch.randn(80_000))
        self.layers[1].requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.layers(self.embed(ids))) + self.table[:24]
        return x @ self.embed.weight.t()


def build() -> nn.Module:
    seed(7)
    return Net()


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    seed(number)
    return model(torch.randint(0, 11, (6,))).square().mean()


def steps(model: nn.Module, optimizer: Any, numbers: range) -> None:
    for number in numbers:
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()


def open_tiers(path: Path, policy: Any = "dram", hbm: int = 1 << 20) -> tiermem.TierManager:
    return tiermem.TierManager("cpu", hbm=hbm, dram="4MiB", nvme=path, policy=policy)


def assert_ordinary(model: nn.Module) -> None:
    """Nothing of ours is left in the model, and every tensor has memory of its own."""
    for module in model.modules():
        assert type(module._parameters) is dict and type(module._buffers) is dict
        assert not {"_call_impl", "_apply", "load_state_dict"} & set(module.__dict__)
    tensors = [*model.parameters(), *model.buffers()]
    for tensor in tensors:
        assert type(tensor) in ORDINARY and tensor.device.type == "cpu"
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.grad is None or type(tensor.grad) is torch.Tensor
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)
    copy.deepcopy(model)(torch.tensor([1, 2]))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("how", ["with", "close", "error", "ctrl-c"])
def test_the_model_comes_back(tmp_path: Path, policy: Any, how: str) -> None:
    plain = build()
    steps(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), range(3))
    loss_of(plain, 9).backward()
    model = build()
    stops = {"error": KeyError, "ctrl-c": KeyboardInterrupt}

    def run() -> None:
        with open_tiers(tmp_path, policy) as tier:
            tier.wrap(model)
            steps(model, tier.optimizer(model, torch.optim.AdamW, lr=0.01), range(3))
            loss_of(model, 9).backward()
            if how in stops:
                raise stops[how]("stop")
            if how == "close":
                tier.close()

    if how in stops:
        with pytest.raises(stops[how], match="stop"):
            run()
    else:
        run()
    assert_ordinary(model)
    assert_same(dict(plain.state_dict()), dict(model.state_dict()), "state")
    for mine, theirs in zip(plain.parameters(), model.parameters(), strict=True):
        assert_same(mine.grad, theirs.grad, "gradient")


def test_training_goes_on_in_the_next_manager(tmp_path: Path) -> None:
    plain, model = build(), build()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    state: dict[str, Any] | None = None
    for number, policy in enumerate(POLICIES):
        with open_tiers(tmp_path, policy, hbm=(1 << 20) + (number << 16)) as tier:
            assert tier.wrap(model) is model
            optimizer = tier.optimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
            if state is not None:
                optimizer.load_state_dict(state)
            steps(model, optimizer, range(2 * number, 2 * number + 2))
            state = optimizer.state_dict()
        steps(plain, plain_optimizer, range(2 * number, 2 * number + 2))
        assert_same(dict(plain.state_dict()), dict(model.state_dict()), f"round {number}")
        with pytest.raises(tiermem.ClosedError, match="state_dict"):
            optimizer.state_dict()
    resident = torch.optim.AdamW(model.parameters(), lr=0.01)
    resident.load_state_dict(state)
    steps(model, resident, range(90, 92))
    steps(plain, plain_optimizer, range(90, 92))
    assert_same(dict(plain.state_dict()), dict(model.state_dict()), "resident again")


@pytest.mark.parametrize("options", [{"overlap": True}, {"overlap": True, "where": "host"}])
def test_steps_that_were_put_off_are_made_first(tmp_path: Path, options: dict[str, Any]) -> None:
    plain, model = build(), build()
    settings = {"lr": 0.25, "momentum": 0.5, "foreach": False}
    steps(plain, torch.optim.SGD(plain.parameters(), **settings), range(2))
    with open_tiers(tmp_path) as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(model, torch.optim.SGD, **settings, **options)
        steps(model, optimizer, range(2))
        assert tier._manager.parts.deferred
    for mine, theirs in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    if "where" not in options:
        assert_same(dict(plain.state_dict()), dict(model.state_dict()), "state")


def test_blocks_stepped_inside_a_backward_that_failed(tmp_path: Path) -> None:
    """They stay stepped, and nothing is refused on the way out."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])

    def step(number: int) -> None:
        seed(number)
        model(torch.randn(2, 8)).square().mean().backward()

    def stop(_gradient: torch.Tensor) -> None:
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"), open_tiers(tmp_path) as tier:
        tier.wrap(model, blocks=["0", "1", "2"])
        optimizer = tier.optimizer(model, torch.optim.SGD, lr=0.5, overlap="backward")
        for number in range(3):
            step(number)
            optimizer.step()
            optimizer.zero_grad()
        before = copy.deepcopy(model.state_dict())
        model[0].weight.register_hook(stop)
        step(3)
    assert not model[0]._parameters["weight"].isnan().any()
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not torch.equal(model[2].weight, before["2.weight"])


def test_gradients_that_somebody_keeps(tmp_path: Path) -> None:
    model = build()
    with open_tiers(tmp_path) as tier:
        tier.wrap(model)
        loss_of(model, 1).backward()
        kept = model.layers[0].weight.grad
        expected = kept.clone()
    assert torch.equal(kept.clone(), expected)
    assert torch.equal(model.layers[0].weight.grad, expected)


# -- no room ---------------------------------------------------------------


def no_room(monkeypatch: pytest.MonkeyPatch, nbytes: int = 1000) -> None:
    monkeypatch.setattr(giveback, "available_memory", lambda: nbytes)


def test_no_room_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = build(), build()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    with pytest.raises(tiermem.CapacityError, match=r"'Net' \(.* KiB\).*state_dict\(\).*discard"):
        with open_tiers(tmp_path, "nvme") as tier:
            tier.wrap(model)
            optimizer = tier.optimizer(model, torch.optim.AdamW, lr=0.01)
            steps(model, optimizer, range(2))
            no_room(monkeypatch)
    assert not tier.closed
    steps(plain, plain_optimizer, range(4))
    steps(model, optimizer, range(2, 4))
    assert_same(dict(plain.state_dict()), dict(model.state_dict()), "still trained")
    with pytest.raises(tiermem.CapacityError, match="host memory"):
        tier.unwrap(model)
    parts = {n: copy.deepcopy(dict(m.state_dict())) for n, m in model.named_children()}
    assert_same(dict(plain.norm.state_dict()), parts["norm"], "part by part")
    tier.close(discard=True)
    assert tier.closed
    with pytest.raises(tiermem.ClosedError, match="closed"):
        loss_of(model, 1)
    with open_tiers(tmp_path) as another:
        with pytest.raises(tiermem.WrapError, match=r"make .* anew"):
            another.wrap(model)


def test_once_there_is_room_it_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = build(), build()
    tier = open_tiers(tmp_path)
    tier.wrap(model)
    with monkeypatch.context() as patch:
        no_room(patch)
        with pytest.raises(tiermem.CapacityError):
            tier.close()
    tier.close()
    assert_ordinary(model)
    assert_same(dict(plain.state_dict()), dict(model.state_dict()), "state")


def test_too_many_open_files_keep_no_model(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    tier = tiermem.TierManager(device="cpu", hbm="4MiB", dram="4MiB", nvme=tmp_path, policy="nvme")
    model = tier.wrap(build())
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        tier.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert_same(dict(build().state_dict()), dict(model.state_dict()), "state")


def test_an_error_on_the_way_out_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build()
    with pytest.raises(KeyError, match="the first") as caught, open_tiers(tmp_path) as tier:
        tier.wrap(model)
        no_room(monkeypatch)
        raise KeyError("the first")
    told = "".join(getattr(caught.value, "__notes__", ())) + capsys.readouterr().err
    assert "cannot be given back" in told and "discard=True" in told
    assert not tier.closed
    loss_of(model, 1)
    tier.close(discard=True)


def test_what_is_at_home_in_dram_needs_one_block_more() -> None:
    """Pages are given back behind each block: the model is never in memory twice."""
    width, layers = 1024, 16
    block = 4 * width * width
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    process = psutil.Process()
    seen: list[int] = []

    def look(pointing: Pointing, *args: Any) -> None:
        seen.append(process.memory_info().rss)
        free(pointing, *args)

    free = Pointing.free
    with tiermem.TierManager(
        "cpu", hbm=2 * block, dram=(layers + 2) * block, policy="dram"
    ) as tier:
        tier.wrap(model)
        gc.collect()
        before = process.memory_info().rss
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Pointing, "free", look)
            tier.close()
    assert len(seen) == layers
    assert max(seen) - before < 4 * block


# -- cut short -------------------------------------------------------------


@pytest.mark.parametrize("policy", ["dram", "nvme"])
@pytest.mark.parametrize("after", [0, 1, 3, 6])
def test_ctrl_c_while_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, policy: str
) -> None:
    """Closing once more goes on where it was cut short."""
    plain, model = build(), build()
    tier = open_tiers(tmp_path, policy)
    tier.wrap(model)
    for one in (plain, model):
        loss_of(one, 1).backward()
    free, count = Pointing.free, iter(range(after + 1))

    def cut(pointing: Pointing, *args: Any) -> None:
        if next(count, None) is None:
            monkeypatch.setattr(Pointing, "free", free)
            raise KeyboardInterrupt
        free(pointing, *args)

    monkeypatch.setattr(Pointing, "free", cut)
    with pytest.raises(KeyboardInterrupt):
        tier.close()
    tier.close()
    assert tier.closed
    assert_ordinary(model)
    assert_same(dict(plain.state_dict()), dict(model.state_dict()), "state")
    for mine, theirs in zip(plain.parameters(), model.parameters(), strict=True):
        assert_same(mine.grad, theirs.grad, "gradient")


class Broken:
    """A disk that reads nothing of the first bytes of the file, once it is armed."""

    def __init__(self) -> None:
        self.below = 0

    def __call__(self, request: Any, *_: Any) -> Fault | None:
        if request.op is IoOp.READ and request.offset < self.below:
            return Fault(errno=errno.EIO)
        return None


def test_a_broken_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be given back is; the rest is named, and stays readable where it can be read."""
    broken = Broken()
    monkeypatch.setattr(
        "tiermem.runtime.memory.opening.choose_engine",
        lambda *_: (lambda: ScriptedEngine(fault=broken), "scripted", "a test"),
    )
    lost, kept = (nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]) for _ in range(2))
    expected = [copy.deepcopy(dict(m.state_dict())) for m in (lost, kept)]
    tier = open_tiers(tmp_path, "nvme", hbm=1 << 17)
    tier.wrap(lost)
    tier.wrap(kept)
    with torch.no_grad():
        kept(lost(torch.randn(2, 64)))
        kept(torch.randn(2, 64))
    tier._manager.flush()
    extents = [tier._manager.record(g.block).home_extent for g in tier._runtime.groups]
    broken.below = extents[1].end
    with pytest.raises(
        tiermem.StorageError, match=r"2 blocks of model 'Sequential'.*'Sequential.0'"
    ):
        tier.close()
    assert not tier.closed
    assert type(kept[0].weight) is nn.Parameter
    assert_same(expected[1], dict(kept.state_dict()), "the other model")
    assert torch.equal(lost[3].weight.clone(), expected[0]["3.weight"])
    tier.close(discard=True)


# -- without close ---------------------------------------------------------


def test_a_model_keeps_its_tiers(tmp_path: Path) -> None:
    """Nobody has the manager any more, and the model works on; with it, everything goes."""
    plain, model = build(), build()

    def wrap(model: nn.Module) -> tuple[Any, weakref.ref[Any]]:
        tier = open_tiers(tmp_path)
        tier.wrap(model)
        return tier.optimizer(model, torch.optim.AdamW, lr=0.01), weakref.ref(tier)

    optimizer, tier = wrap(model)
    gc.collect()
    steps(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), range(2))
    steps(model, optimizer, range(2))
    assert_same(dict(plain.state_dict()), dict(model.state_dict()), "state")
    manager = weakref.ref(optimizer._runtime.manager)
    param = model.layers[0].weight
    del optimizer, model
    gc.collect()
    assert tier() is None and manager() is None
    with pytest.raises(tiermem.ClosedError, match="keep the model"):
        param.sum()


def test_a_manager_without_models_goes_at_once(tmp_path: Path) -> None:
    gc.disable()
    try:
        tier = open_tiers(tmp_path)
        model = tier.wrap(nn.Linear(2, 2))
        tier.unwrap(model)
        manager = tier._manager
        del tier
        assert manager.gate.closed
    finally:
        gc.enable()


def test_a_forked_child_leaves_with(tmp_path: Path) -> None:
    """It gives nothing back, and takes nothing from its parent."""
    plain, model = build(), build()
    with open_tiers(tmp_path) as tier:
        tier.wrap(model)
        child = os.fork()
        if not child:
            code = 1
            try:
                tier.__exit__(None, None, None)
                tier.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        loss_of(model, 1)
    loss_of(plain, 1)
    assert_same(dict(plain.state_dict()), dict(model.state_dict()), "state")


def test_unwrap_in_a_call_is_refused(tmp_path: Path) -> None:
    model = build()
    plain = build()
    tier = open_tiers(tmp_path)
    tier.wrap(model)
    acts: list[Callable[[], Any]] = [lambda: tier.unwrap(model), tier.close]
    for act in acts:
        handle = model.layers.register_forward_hook(lambda *_: act())  # noqa: B023
        with pytest.raises(tiermem.WrapError, match="in use"):
            loss_of(model, 1)
        handle.remove()
        assert_same(loss_of(plain, 1), loss_of(model, 1), "loss")
    tier.close()
    assert_ordinary(model)


def test_a_parameter_whose_model_and_manager_are_gone_says_so() -> None:
    """Its placeholder cannot be read, and is known for one all the same."""
    tier = tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB")
    model = tier.wrap(nn.Sequential(nn.Linear(32, 32)))
    model(torch.ones(2, 32))
    weight = model[0].weight
    del model, tier
    gc.collect()
    for use in (lambda: weight + 1, weight.sum, weight.data_ptr, weight.numpy):
        with pytest.raises(tiermem.ClosedError, match="gone; keep the model"):
            use()


@pytest.mark.parametrize(("policy", "tier_name"), [({"params": "hbm"}, "hbm"), ("dram", "dram")])
def test_where_dropped_models_take_the_room_the_error_says_how_to_free_it(
    policy: Any, tier_name: str
) -> None:
    """A model that was not taken out is in the tiers for as long as they are there."""
    budgets = {"hbm": 1 << 20, "dram": 1 << 20} | {tier_name: 24 << 10}
    with tiermem.TierManager("cpu", policy=policy, **budgets) as tier:
        tier.wrap(nn.Linear(64, 64))
        with pytest.raises(tiermem.CapacityError, match=r"dropped or not \(tier.unwrap\(model\)"):
            tier.wrap(nn.Linear(64, 64))


class Keeping(nn.Module):
    """Keeps an output, and so a graph: the collector does not see what that refers to."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.again, self.keeps, self.kept = again, True, torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, x, use_reentrant=False) if self.again else self.first(x)
        if self.keeps:
            self.kept = x
        return self.last(x)


@pytest.mark.parametrize(
    ("graph", "end"),
    [
        *[("trained", end) for end in ("dropped", "closed", "discarded")],
        *[(graph, end) for graph in ("begun", "earlier") for end in ("closed", "discarded")],
        ("checkpoint", "closed"),
    ],
)
def test_a_graph_that_a_model_keeps_keeps_no_model(graph: str, end: str) -> None:
    """One that backward has been through, or not; ``earlier``: from before graphs were torch's."""
    left = graph in ("earlier", "checkpoint")
    seed(1)
    model = Keeping(again=graph == "checkpoint")
    tier = tiermem.TierManager("cpu", hbm="8MiB", dram="8MiB")
    tier.wrap(model)
    optimizer = tier.optimizer(model, torch.optim.AdamW, lr=0.01)
    if graph == "earlier":
        model(torch.ones(2, 8))
        model.keeps = False
    for _ in range(4 if left else 1):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    if graph in ("begun", "checkpoint"):
        model(torch.ones(2, 8))
    (wrapped,) = tier._wrapped.values()
    assert wrapped.bypass.active == left
    if end != "dropped":
        tier.close(discard=end == "discarded")
    gone = [weakref.ref(each) for each in (model, model.first, optimizer, tier, tier._manager)]
    del model, optimizer, tier, wrapped
    for _ in range(3):  # what a graph refers to goes with the model, and is seen the next time
        gc.collect()
    assert not any(each() for each in gone)
