"""Forked children: of their parent's tiers they use nothing, keep nothing and harm nothing."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from support_process import child
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tiermem
from tiermem.errors import ClosedError

WIDTH = 64


def net(norm: bool = True) -> nn.Sequential:
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH) if norm else nn.ReLU()]
    return nn.Sequential(*layers)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def waiting_child() -> Iterator[int]:
    """Forks a child that waits until the end and does nothing; yields its process id."""
    out, into = os.pipe()
    ready, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        os.close(into)
        os.write(say, b"x")
        os.read(out, 1)
        os._exit(0)
    try:
        os.read(ready, 1)
        yield pid
    finally:
        for number in (out, into, ready, say):
            os.close(number)
        os.waitpid(pid, 0)


def anonymous(pid: int | str) -> int:
    """Returns the bytes of ordinary memory that a process has in its page tables."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel does not say")


def test_a_child_has_no_copy_of_the_arenas() -> None:
    with tiermem.TierManager(device="cpu", hbm="16MiB", dram="64MiB") as tier:
        layers = [nn.Linear(1024, 1024) for _ in range(14)]
        model = tier.wrap(nn.Sequential(*layers))
        model(torch.randn(2, 1024))
        gc.collect()
        mine = anonymous("self")
        with waiting_child() as pid:
            assert mine - anonymous(pid) > 64 << 20


@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_a_child_that_outlives_its_parent_keeps_no_swap_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setenv("TIERMEM_IO_ENGINE", engine)
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="4MiB", nvme=tmp_path) as tier:
        model = tier.wrap(net())
        optimizer = tier.optimizer(model, torch.optim.SGD)
        train(model, optimizer, 1)
        with waiting_child() as pid:
            targets = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
            assert not [name for name in targets if str(tmp_path) in name or "uring" in name]
            assert "io_uring" not in Path(f"/proc/{pid}/maps").read_text()
            train(model, optimizer, 1)
        train(model, optimizer, 1)


def touches(model: nn.Sequential, tier: tiermem.TierManager) -> dict[str, Callable[[], object]]:
    weight, mean = model[0].weight, model[1].running_mean
    others: dict[str, Callable[[], object]] = {
        "a name": lambda: model[0].weight,
        "a weight": lambda: weight.sum(),
        "a printed weight": lambda: repr(weight),
        "a write": lambda: weight.data.zero_(),
        "a small buffer": lambda: mean.sum(),
        "a gradient": lambda: weight.grad.sum(),
        "a call": lambda: model(torch.randn(8, WIDTH)),
        "a layer's call": lambda: model[0](torch.randn(8, WIDTH)),
        "state_dict": model.state_dict,
        "pickle": lambda: pickle.dumps(model),
        "unwrap": lambda: tier.unwrap(model),
        "wrap": lambda: tier.wrap(nn.Linear(2, 2)),
        "materialize": lambda: tier.materialize(model).__enter__(),
    }
    return others


@pytest.mark.parametrize("policy", [None, {"params": "hbm"}, {"params": "nvme"}])
def test_a_child_that_touches_what_is_wrapped_is_told(tmp_path: Path, policy) -> None:
    tier = tiermem.TierManager("cpu", "1MiB", "4MiB", tmp_path, policy=policy)
    with tier:
        model = tier.wrap(net())
        optimizer = tier.optimizer(model, torch.optim.SGD)
        train(model, optimizer, 1)
        model(torch.randn(8, WIDTH)).sum().backward()
        ways = touches(model, tier)

        def inside() -> None:
            for name, touch in ways.items():
                try:
                    touch()
                except ClosedError as error:
                    assert "forked child" in str(error), name
                else:
                    raise AssertionError(f"{name} was not refused")

        assert child(inside) == 0


def test_a_child_forked_inside_a_call_is_told_at_the_next_weight() -> None:
    """There the weights are ordinary tensors over memory that the child does not have."""
    codes: list[int] = []

    class Forks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = self.scale
            if not codes:

                def inside() -> None:
                    for touch in (
                        lambda: x * scale,
                        lambda: self.scale + 1,
                        lambda: self.inner(x),
                    ):
                        with pytest.raises(ClosedError, match="forked child"):
                            touch()

                codes.append(child(inside))
            return self.inner(x * scale)

    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="4MiB") as tier:
        plain, wrapped = Forks(), Forks()
        codes.append(0)
        wrapped.load_state_dict(plain.state_dict())
        x = torch.randn(4, WIDTH)
        tier.wrap(wrapped)
        expected = plain(x)
        codes.clear()
        assert torch.equal(wrapped(x), expected)
        assert codes == [0]


def test_what_a_user_keeps_of_a_weight_is_right_in_a_child() -> None:
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="4MiB") as tier:
        model = tier.wrap(net())
        optimizer = tier.optimizer(model, torch.optim.SGD)
        train(model, optimizer, 1)
        kept = model[2].weight.detach()
        values = kept.clone()
        assert kept.data_ptr() != values.data_ptr()

        def inside(kept: torch.Tensor = kept) -> None:
            assert torch.equal(kept, values)

        assert child(inside) == 0
        assert torch.equal(kept, values)
        del kept, inside
        train(model, optimizer, 1)
        assert child(lambda: None) == 0


def test_a_backward_in_a_child_is_refused() -> None:
    with tiermem.TierManager(device="cpu", hbm="256KiB", dram="4MiB") as tier:
        model = tier.wrap(net(norm=False))
        loss = model(torch.randn(8, WIDTH)).sum()

        def inside() -> None:
            with pytest.raises(ClosedError, match="forked child"):
                loss.backward()

        assert child(inside) == 0
        loss.backward()


@pytest.mark.parametrize(("nvme", "where"), [(False, "device"), (True, "host")])
def test_a_child_may_forget_a_model_and_its_manager(
    tmp_path: Path, nvme: bool, where: Literal["device", "host"]
) -> None:
    folder = tmp_path if nvme else None
    gc.collect()
    gc.freeze()  # what the test run has already is not looked through in every child
    things: dict[str, Any] = {"tier": tiermem.TierManager("cpu", "1MiB", "4MiB", folder)}
    things["model"] = things["tier"].wrap(net())
    things["optimizer"] = things["tier"].optimizer(things["model"], torch.optim.SGD, where=where)
    train(things["model"], things["optimizer"], 1)
    things["loss"] = things["model"](torch.randn(8, WIDTH)).sum()

    for first in things:

        def inside(first: str = first) -> None:
            watched = [weakref.ref(thing) for thing in things.values()]
            del things[first]
            gc.collect()
            things.clear()
            gc.collect()
            assert all(watch() is None for watch in watched)
            with tiermem.TierManager("cpu", "1MiB", "4MiB", folder) as own:
                own.wrap(net())(torch.randn(8, WIDTH)).sum().backward()

        assert child(inside) == 0
    del things["loss"]
    train(things["model"], things["optimizer"], 1)
    things["tier"].close()
    gc.unfreeze()


def test_workers_of_a_data_loader_may_have_the_model_in_what_they_are_given() -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16, WIDTH))
    results = []
    for wrapped in (False, True):
        with tiermem.TierManager(device="cpu", hbm="1MiB", dram="4MiB") as tier:
            model = net()
            if wrapped:
                tier.wrap(model)
                optimizer = tier.optimizer(model, torch.optim.SGD)
            else:
                optimizer = torch.optim.SGD(model.parameters())

            def collate(rows: list[tuple[torch.Tensor]], model: nn.Module = model) -> torch.Tensor:
                assert model is not None
                return torch.stack([row[0] for row in rows])

            for batch in DataLoader(data, 4, num_workers=2, collate_fn=collate):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append({name: value.clone() for name, value in model.state_dict().items()})
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name
