"""A disk that fails in the middle of a step, and bad input: what users get, and what is left."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support_nn import assert_same, check_table, same_bits, seed
from torch import nn

import tiermem
from tiermem.config import parse_size
from tiermem.core.residency import State
from tiermem.io.engine import IoOp, IoRequest
from tiermem.testing.io import Fault, ScriptedEngine


class Disk:
    """Decides which request fails, and how.

    Attributes:
        fault: What goes wrong, or None.
        after: Requests of that kind that still go well.
        hits: How often it went wrong.
    """

    def __init__(self) -> None:
        self.op: IoOp | None = None
        self.fault: Fault | None = None
        self.after = 0
        self.lasting = False
        self.hits = 0

    def arm(self, op: IoOp, fault: Fault, after: int, *, lasting: bool = False) -> None:
        self.op, self.fault, self.after, self.lasting = op, fault, after, lasting

    def heal(self) -> None:
        self.fault = None

    def __call__(self, request: IoRequest, tries: int) -> Fault | None:
        if self.fault is None or request.op is not self.op:
            return None
        self.after -= 1
        if self.after >= 0:
            return None
        fault = self.fault
        self.hits += 1
        if not self.lasting:
            self.fault = None
        return fault


def net() -> nn.Module:
    seed(3)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(5)])


def data(number: int) -> torch.Tensor:
    seed(number)
    return torch.randn(4, 32)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    found = Disk()
    monkeypatch.setattr(
        "tiermem.runtime.memory.opening.choose_engine",
        lambda *_: (lambda: ScriptedEngine(fault=found), "scripted", "a test"),
    )
    return found


class Bench:
    """A plain and a tiered model with their optimizers, on a disk that can fail."""

    def __init__(self, path: Path) -> None:
        self.plain = net()
        self.plain_optimizer = torch.optim.Adam(self.plain.parameters(), lr=0.01)
        self.tier = tiermem.TierManager(
            device="cpu", hbm=8 * 8192, dram=1 << 20, nvme=path, policy="nvme", prefetch_depth=2
        )
        self.model = self.tier.wrap(net())
        self.optimizer = self.tier.optimizer(self.model, torch.optim.Adam, lr=0.01)

    def step(self, number: int) -> None:
        for model, optimizer in (
            (self.plain, self.plain_optimizer),
            (self.model, self.optimizer),
        ):
            model(data(number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def check(self) -> None:
        check_table(self.tier)
        assert_same(dict(self.plain.state_dict()), dict(self.model.state_dict()), "state")
        assert_same(self.plain_optimizer.state_dict(), self.optimizer.state_dict(), "optimizer")


@pytest.fixture
def bench(disk: Disk, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    with made.tier:
        made.step(0)
        made.step(1)
        yield made


def expect_error(error: tiermem.StorageError, path: Path, number: int | None) -> None:
    assert error.block and error.tier == "nvme"
    assert error.path.startswith(str(path))
    assert error.offset >= 0
    if number is not None:
        assert error.errno == number
    for part in (error.block, "tier nvme", error.path, str(error.offset)):
        assert part in str(error)


def empty_hbm(tier: tiermem.TierManager) -> None:
    """Evicts every clean block, prefetched ones as well, and what was read ahead into DRAM."""
    manager = tier._manager
    with manager.lock:
        manager.flush()
        manager.parts.transfers.ahead.drop_all()
        for record in list(manager.parts.table):
            if record.in_hbm is State.VALID and not record.leases and not record.fixed:
                manager.parts.evictor.evict(record)


FAULTS = {
    "eio": (IoOp.READ, Fault(errno=errno.EIO), errno.EIO),
    "flip": (IoOp.READ, Fault(flip_bit=12345), None),
    "enospc": (IoOp.WRITE, Fault(errno=errno.ENOSPC), errno.ENOSPC),
    "write-eio": (IoOp.WRITE, Fault(errno=errno.EIO), errno.EIO),
}


@pytest.mark.parametrize("after", [0, 1, 3, 6])
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
@pytest.mark.one_in(3)
def test_a_fault_that_passes(
    bench: Bench, disk: Disk, tmp_path: Path, where: str, kind: str, after: int
) -> None:
    op, fault, number = FAULTS[kind]
    loss = bench.plain(data(2)).square().mean()
    loss.backward()
    bench.plain_optimizer.step()
    bench.plain_optimizer.zero_grad()
    model, optimizer = bench.model, bench.optimizer

    def run() -> None:
        """One step; armed in the phase in question, the first time."""
        optimizer.zero_grad()
        phase("forward")
        loss = model(data(2)).square().mean()
        phase("backward")
        loss.backward()
        phase("step")
        optimizer.step()

    def phase(name: str) -> None:
        disk.heal()
        if name == where and not armed:
            armed.append(name)
            disk.arm(op, fault, after)

    armed: list[str] = []
    try:
        run()
    except tiermem.StorageError as error:
        expect_error(error, tmp_path, number)
        bench.tier._manager.parts.table.check()
        if where == "step":
            for act in (optimizer.zero_grad, lambda: model(data(2)), optimizer.state_dict):
                with pytest.raises(tiermem.StepError, match=r"step\(\) again"):
                    act()
            with torch.no_grad():
                model(data(2))
            optimizer.step()
        else:
            run()
    disk.heal()
    optimizer.zero_grad()
    bench.check()
    bench.step(3)
    bench.check()
    bench.tier.unwrap(model)
    assert_same(dict(bench.plain.state_dict()), dict(model.state_dict()), "unwrapped")


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_a_disk_that_stays_broken(bench: Bench, disk: Disk, tmp_path: Path, where: str) -> None:
    loss = bench.model(data(2)).square().mean() if where != "forward" else None
    if where == "step" and loss is not None:
        loss.backward()
    empty_hbm(bench.tier)  # else whether anything is read depends on what came ahead
    disk.arm(IoOp.READ, Fault(errno=errno.EIO), 0, lasting=True)
    with pytest.raises(tiermem.StorageError) as caught:
        for _ in range(3):
            if where == "forward":
                bench.model(data(2))
            elif where == "backward" and loss is not None:
                loss.backward(retain_graph=True)
            else:
                bench.optimizer.step()
    expect_error(caught.value, tmp_path, errno.EIO)
    bench.tier._manager.parts.table.check()
    disk.heal()
    if where == "step":
        bench.optimizer.step()
    with bench.tier.materialize(bench.model):
        assert all(p.isfinite().all() for p in bench.model.parameters())
    if where != "step":
        bench.optimizer.zero_grad()
        bench.check()


def test_a_fault_while_changes_are_taken_back(bench: Bench, disk: Disk, tmp_path: Path) -> None:
    with pytest.raises(tiermem.StorageError):
        with bench.tier.materialize(bench.model):
            for p in bench.model.parameters():
                p.data.mul_(2)
            empty_hbm(bench.tier)
            disk.arm(IoOp.READ, Fault(errno=errno.EIO), 0, lasting=True)
    disk.heal()
    for p in bench.plain.parameters():
        p.data.mul_(2)
    with bench.tier.materialize(bench.model):
        pass
    bench.check()
    bench.step(4)
    bench.check()


def test_wrap_that_fails_leaves_the_model_as_it_was(disk: Disk, tmp_path: Path) -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    params = [(p, p.data_ptr()) for p in model.parameters()]
    with tiermem.TierManager(
        device="cpu", hbm="64KiB", dram="1MiB", nvme=tmp_path, policy="nvme"
    ) as tier:
        disk.arm(IoOp.WRITE, Fault(errno=errno.ENOSPC), 2, lasting=True)
        with pytest.raises(tiermem.StorageError) as caught:
            tier.wrap(model)
        expect_error(caught.value, tmp_path, errno.ENOSPC)
        assert all(p.data_ptr() == address for p, address in params)
        assert_same(dict(before), dict(model.state_dict()), "state")
        assert not tier.residency()
        disk.heal()
        tier.wrap(model)
        assert same_bits(model(data(1)), net()(data(1)))


# -- bad input -------------------------------------------------------------------------


def repr_of(value: object) -> str:
    """Names a case; Python writes no number of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 100:
        return f"{'-' if value < 0 else ''}{value.bit_length()} bits"
    return repr(value)[:20]


@pytest.mark.parametrize(
    "size",
    [
        *(-1, "-3GiB", "7 parsecs", "", 1.5, None.__class__, True, "GiB"),
        *(
            "9" * 5000,
            "1" + "0" * 400 + ".5GiB",
            "x" * 5000,
            10**5000,
            -(10**5000),
            2**100,
            "9" * 30 + "TiB",
        ),
    ],
    ids=repr_of,
)
@pytest.mark.parametrize("which", ["hbm", "dram", "nvme_bytes"])
def test_sizes_that_cannot_be_read(which: str, size: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"hbm": "1MiB", "dram": "1MiB", "nvme": tmp_path, which: size}
    with pytest.raises(tiermem.ConfigError, match=which) as error:
        tiermem.TierManager(device="cpu", **settings)
    assert len(str(error.value)) < 300


def test_sizes_with_leading_zeros() -> None:
    assert parse_size("0" * 5000 + "7KiB") == 7 << 10
    assert parse_size("0") == parse_size("000.0GiB") == 0


@pytest.mark.parametrize("nvme", ["", ["", "/tmp"], b"/tmp", [b"/tmp"], 5, [5]])
def test_what_names_no_folder(nvme: Any) -> None:
    """An empty path meant the current folder."""
    with pytest.raises(tiermem.ConfigError, match="nvme"):
        tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB", nvme=nvme)


def test_paths_that_the_system_does_not_look_at(tmp_path: Path) -> None:
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    for path, words in (
        ("x" * 300, "too long.*shorter"),
        ("/".join(["x" * 200] * 30), "too long.*shorter"),
        ("a\0b", "null byte.*another"),
        (circle, "symbolic links.*another"),
    ):
        with pytest.raises(tiermem.ConfigError, match=words) as error:
            tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB", nvme=path)
        assert len(str(error.value)) < 600


def test_paths_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path in (tmp_path / "missing", file):
        with pytest.raises(tiermem.ConfigError, match=path.name):
            tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB", nvme=path)


@pytest.mark.skipif(not os.path.isdir("/sys/kernel"), reason="no folder that refuses even root")
def test_a_read_only_path() -> None:
    with pytest.raises(tiermem.ConfigError, match="/sys/kernel"):
        tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB", nvme="/sys/kernel")


def test_a_full_disk_is_refused_up_front(tmp_path: Path) -> None:
    model = net()
    with tiermem.TierManager(
        device="cpu", hbm="1MiB", dram="1MiB", nvme=tmp_path, nvme_bytes=8192, policy="nvme"
    ) as tier:
        with pytest.raises(tiermem.CapacityError, match="nvme"):
            tier.wrap(model)
        assert type(model[0][0].weight) is nn.Parameter
        assert not tier.residency()


def test_budgets_too_small_name_the_block_and_the_least() -> None:
    with tiermem.TierManager(device="cpu", hbm=4096, dram="1MiB") as tier:
        with pytest.raises(tiermem.CapacityError, match=r"'Sequential.0[^']*'.*hbm= at least \d+"):
            tier.wrap(net())
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram=4096) as tier:
        with pytest.raises(tiermem.CapacityError, match=r"'Sequential.0[^']*'.*dram= at least \d+"):
            tier.wrap(net())


def test_policies_that_name_what_is_not_there() -> None:
    with pytest.raises(tiermem.ConfigError, match="'weights'"):
        tiermem.Policy(weights="dram")
    with pytest.raises(tiermem.ConfigError, match="'tape'"):
        tiermem.Policy(params="tape")  # type: ignore[arg-type]
    for policy in ({"weights": "dram"}, {"params": "tape"}, "tape", 7):
        with pytest.raises(tiermem.ConfigError):
            tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB", policy=policy)  # type: ignore[arg-type]
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB", policy="nvme") as tier:
        with pytest.raises(tiermem.CapacityError, match="nvme=folder"):
            tier.wrap(net())


def test_other_settings_that_cannot_be() -> None:
    for device in ("tpu", "meta", 3.5):
        with pytest.raises(tiermem.ConfigError, match="device"):
            tiermem.TierManager(device=device, hbm="1MiB", dram="1MiB")  # type: ignore[arg-type]
    for depth in (-1, "deep", True, 1.5):
        with pytest.raises(tiermem.ConfigError, match="prefetch_depth"):
            tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB", prefetch_depth=depth)  # type: ignore[arg-type]


def test_wrapping_what_is_wrapped() -> None:
    model = net()
    with (
        tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB") as one,
        tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB") as two,
    ):
        one.wrap(model)
        for tier in (one, two):
            with pytest.raises(tiermem.WrapError, match=r"tier\.unwrap"):
                tier.wrap(model)
            with pytest.raises(tiermem.WrapError, match=r"tier\.unwrap"):
                tier.wrap(nn.Sequential(model[0]))
        shares = nn.Linear(32, 32)
        shares._parameters["weight"] = model[0][0].weight
        with pytest.raises(tiermem.WrapError, match="another TierManager"):
            two.wrap(shares)
        with pytest.raises(tiermem.WrapError, match=r"share it as one: .*nn\.ModuleList"):
            one.wrap(shares)  # unwrap alone leaves one of the two outside
        with pytest.raises(tiermem.WrapError, match="not wrapped here"):
            two.unwrap(model)
        one.unwrap(model)
        two.wrap(model)
        assert same_bits(model(data(1)), net()(data(1)))


def test_what_cannot_be_wrapped() -> None:
    half = nn.Linear(4, 4)
    half.bias = nn.Parameter(half.weight.data[0])
    looks, norm = nn.Linear(4, 4), nn.LayerNorm(4)
    looks.register_buffer("copied", norm.weight.detach()[1:3])
    looks.norm = norm
    looks_at_one = nn.Linear(4, 4)
    looks_at_one.register_buffer("first", looks_at_one.bias.detach()[:1])
    with torch.inference_mode():
        inference = nn.Linear(4, 4)
    cases: list[tuple[Any, str]] = [
        (torch.zeros(3), "takes a torch.nn.Module"),
        (nn.Linear(4, 4, device="meta"), "meta device"),
        (nn.LazyLinear(4), "one batch"),
        (half, "share part of their memory"),
        (looks, r"'copied' looks into the memory of parameter 'norm\.weight'"),
        (looks_at_one, r"'first' looks into the memory of parameter 'bias'"),
        (inference, "inference_mode"),
        (nn.DataParallel(nn.Linear(4, 4)), r"wrap that first: DataParallel\(tier\.wrap\(model\)\)"),
    ]
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB") as tier:
        for model, message in cases:
            with pytest.raises(tiermem.WrapError, match=message):
                tier.wrap(model)
        for blocks in ("layers", ["nowhere"]):
            with pytest.raises(tiermem.ConfigError, match="blocks"):
                tier.wrap(net(), blocks=blocks)
        assert not tier.residency()


def test_a_parameter_replaced_behind_the_managers_back() -> None:
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB") as tier:
        model = tier.wrap(net())
        layer = model[0][0]
        acts: list[Callable[[], Any]] = [
            lambda: setattr(layer, "weight", nn.Parameter(torch.zeros(32, 32))),
            lambda: setattr(layer, "weight", None),
            lambda: delattr(layer, "weight"),
            lambda: layer._parameters.__setitem__("bias", nn.Parameter(torch.zeros(32))),
            lambda: layer._parameters.pop("bias"),
            lambda: setattr(layer.weight, "data", torch.zeros(2, 2)),
            lambda: model.half(),
            lambda: model[0].to(torch.float64),
            lambda: model.to("meta"),
        ]
        for act in acts:
            with pytest.raises(tiermem.ParameterError, match=r"tier\.unwrap"):
                act()
        assert model.float() is model
        assert model.to("cpu") is model
        assert same_bits(model(data(1)), net()(data(1)))


def test_use_after_close() -> None:
    tier = tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB")
    model = tier.wrap(net())
    optimizer = tier.optimizer(model, torch.optim.Adam)
    loss = model(data(1)).sum()
    tier.close(discard=True)
    tier.close()
    acts: list[Callable[[], Any]] = [
        lambda: model(data(1)),
        loss.backward,
        optimizer.step,
        lambda: model[0][0].weight.sum(),
        lambda: model.state_dict(),
        lambda: copy.deepcopy(model),
        lambda: tier.wrap(net()),
        lambda: tier.unwrap(model),
        lambda: tier.optimizer(model, torch.optim.Adam),
        lambda: tier.materialize(model).__enter__(),
        tier.__enter__,
    ]
    for number, act in enumerate(acts):
        with pytest.raises(tiermem.ClosedError):
            act()
            pytest.fail(f"number {number} went through")
    assert tier.closed and "closed" in repr(tier)
    assert tier.stats().hits >= 0


@pytest.mark.parametrize("fault", [Fault(errno=errno.EIO), Fault(flip_bit=77)])
def test_a_block_that_the_disk_lost_is_given_again_by_load_state_dict(
    disk: Disk, tmp_path: Path, fault: Fault
) -> None:
    """Writing the whole of it needs nothing of what was there."""
    with tiermem.TierManager("cpu", "16KiB", "8MiB", tmp_path, policy="nvme") as tier:
        model = tier.wrap(net())
        saved = model.state_dict()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
        disk.arm(IoOp.READ, fault, 0, lasting=True)
        with pytest.raises(tiermem.StorageError):
            model(data(1))
        lost = {name: value.clone() for name, value in saved.items() if not name.startswith("0.")}
        with pytest.raises(tiermem.StorageError):
            model.load_state_dict(lost, strict=False)  # that block is not given as a whole
        with pytest.raises(tiermem.StorageError):
            model.load_state_dict(
                {**saved, "0.0.weight": torch.zeros(3)}
            )  # nor is it here, in its shape
        model.load_state_dict(saved)
        disk.heal()
        plain = net()
        plain.load_state_dict(saved)
        assert_same(plain.state_dict(), model.state_dict(), "given again")
        x = data(1)
        assert same_bits(plain(x), model(x))
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({**saved, "0.0.weight": torch.zeros(3)})
