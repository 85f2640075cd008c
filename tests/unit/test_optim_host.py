"""Steps on the host, in DRAM: the arithmetic of torch's CPU optimizers, bit for bit."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_nn import Tiers, assert_same, check_table
from support_optim import Net, Twins, loss_of, one_group, two_groups
from torch import nn

import tiermem
from tiermem.core.block import Tier
from tiermem.optim.host.share import Speeds, choose_host

DRAM = Tiers("dram")
HOMES = st.sampled_from(["dram", "nvme"])
CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True, "amsgrad": True}),
    (torch.optim.Adam, {"lr": 0.01, "foreach": True}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "foreach": False}),
    (torch.optim.Adagrad, {"lr": 0.02, "foreach": False}),
    (torch.optim.RMSprop, {"lr": 0.002, "foreach": False}),
]


@settings(max_examples=examples(6, 300))
@given(
    homes=st.fixed_dictionaries(dict.fromkeys(("params", "grads", "master", "optimizer"), HOMES)),
    chosen=st.sampled_from(CLASSES),
    groups=st.sampled_from([one_group, two_groups]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    grad_dtype=st.sampled_from([None, torch.float32]),
    where=st.sampled_from(["host", "both"]),
    overlap=st.booleans(),
    clip=st.sampled_from(["none", "norm", "value"]),
    extra=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_the_same_as_on_the_cpu_by_hand(
    tmp_path_factory: pytest.TempPathFactory,
    homes: dict[str, str],
    chosen: Any,
    groups: Any,
    dtype: torch.dtype,
    grad_dtype: torch.dtype | None,
    where: str,
    overlap: bool,
    clip: str,
    extra: list[bool],
) -> None:
    tiers = Tiers("mixed", nvme=str(tmp_path_factory.mktemp("swap")), policy=homes)
    options = {"groups": groups, "grad_dtype": grad_dtype, "overlap": overlap, "where": where}
    with Twins(lambda: Net(dtype), tiers, *chosen, **options) as twins:
        if where == "host":
            assert all(unit.host is not None for unit in twins.optimizer._units)
        for step, use_extra in enumerate(extra):
            twins.backward(2 * step, use_extra=use_extra)
            twins.backward(2 * step + 1, use_extra=use_extra)
            if clip == "norm":
                twins.clip_norm(0.05)
            elif clip == "value":
                twins.clip_value(0.003)
            twins.step()
            if step % 2:
                twins.check()


def test_nothing_but_weights_and_gradients_crosses_the_bus() -> None:
    with Twins(Net, DRAM, where="host") as twins:
        twins.backward(0)
        twins.step()
        twins.tier.reset_stats()
        twins.backward(1)
        moved = twins.tier.stats().links
        before = {name: link.nbytes for name, link in moved.items()}
        twins.by_hand.step()
        twins.optimizer.step()
        after = {name: link.nbytes for name, link in twins.tier.stats().links.items()}
        gradients = sum(r.nbytes for r in twins.tier.residency() if r.role == "grad")
        assert after["dram->hbm"] == before["dram->hbm"]
        assert after["hbm->dram"] - before["hbm->dram"] <= gradients


def test_the_fused_kernel_is_the_default_and_rounds_close_by() -> None:
    with Twins(Net, DRAM, where="host", overlap=True) as twins:
        assert all(u.plain.optimizer_for is not None for u in twins.optimizer._units)
        for step in range(4):
            twins.backward(0) if step == 0 else _backward_loosely(twins, step)
            twins.step()
        units = [u for u in twins.optimizer._units if u.host is not None]
        assert units
        assert all(u.plain.optimizer_for(None).param_groups[0]["fused"] for u in units)
        for mine, theirs in zip(
            twins.model.state_dict().values(), twins.plain.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=1e-3)


class Waves(torch.nn.Module):
    """Complex weights, and others that the fused kernels can step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.real = torch.nn.Linear(16, 16)
        self.waves = torch.nn.Parameter(torch.randn(16, 16, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.real(x).to(self.waves.dtype) @ self.waves).abs()


@pytest.mark.parametrize("where", ["host", "both"])
def test_complex_weights_which_the_fused_kernel_does_not_take(where: Any) -> None:
    plain, model = Waves(), Waves()
    by_hand = torch.optim.Adam([plain.waves], lr=0.01)
    with tiermem.TierManager(device="cpu", hbm="64KiB", dram="8MiB") as tier:
        on_host = tier.optimizer(tier.wrap(model), torch.optim.Adam, where=where, lr=0.01)
        x = torch.randn(3, 16)
        plain(x).sum().backward()
        model(x).sum().backward()
        by_hand.step()
        on_host.step()
    assert_same(plain.waves.detach(), model.waves.detach(), where)


def test_closing_the_tiers_ends_the_thread() -> None:
    before = set(threading.enumerate())  # others may have the same name, and outlive this test
    with Twins(Net, DRAM, where="host", overlap=True) as twins:
        twins.backward(0)
        twins.step()
        begun = set(threading.enumerate()) - before
        workers = [t for t in begun if t.name.startswith("tiermem-optimizer")]
        assert workers
    assert not any(thread.is_alive() for thread in workers)


def _backward_loosely(twins: Twins, number: int) -> None:
    for model in (twins.plain, twins.model):
        loss_of(model, number).backward()


@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
def test_a_gradient_scaler(grad_dtype: torch.dtype | None) -> None:
    chosen = (torch.optim.AdamW, {"lr": 0.01, "foreach": False})
    build = lambda: Net(torch.float16)  # noqa: E731
    with Twins(build, DRAM, *chosen, where="host", grad_dtype=grad_dtype) as twins:
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
        for step in range(4):
            broken = step == 2
            scale = scaler.get_scale() or 128.0
            twins.backward(step, scale=float("inf") if broken else scale)
            if not broken:
                twins.by_hand.step(torch.tensor(1 / scale))
            twins.by_hand.zero_grad()
            scaler.scale(torch.ones(()))
            scaler.step(twins.optimizer)
            scaler.update()
            twins.optimizer.zero_grad()
            twins.check()


def test_state_goes_from_the_device_to_the_host_and_back() -> None:
    chosen = (torch.optim.AdamW, {"lr": 0.01, "foreach": False})
    with Twins(Net, DRAM, *chosen, where="host") as twins:
        for step in range(2):
            twins.backward(step)
            twins.step()
        with Twins(Net, DRAM, *chosen, where="device") as others:
            others.model.load_state_dict(twins.model.state_dict())
            others.optimizer.load_state_dict(twins.optimizer.state_dict())
            others.plain.load_state_dict(twins.plain.state_dict())
            twins.by_hand.params = list(dict(others.plain.named_parameters()).values())
            others.by_hand = twins.by_hand
            others.backward(2)
            others.step()
            others.check()
            with Twins(Net, DRAM, *chosen, where="host", overlap=True) as last:
                last.optimizer.load_state_dict(others.optimizer.state_dict())
                last.plain.load_state_dict(others.plain.state_dict())
                others.by_hand.params = list(dict(last.plain.named_parameters()).values())
                last.by_hand = others.by_hand
                for step in (3, 4):
                    last.backward(step)
                    last.step()
                last.check()


def test_weights_in_use_are_refused_before_anything_is_stepped() -> None:
    roomy = Tiers("dram", extra_hbm=1 << 15)
    chosen = (torch.optim.AdamW, {"lr": 0.01, "foreach": False})
    with Twins(Net, roomy, *chosen, where="host", overlap=True) as twins:
        twins.backward(0)
        twins.step()
        twins.backward(1)
        view = twins.model.layers[1].up.weight.data
        with pytest.raises(tiermem.StepError, match=r"layers\.1.* in use.*where='device'"):
            twins.optimizer.step()
        del view
        with twins.tier.materialize(twins.model.extra), pytest.raises(tiermem.StepError):
            twins.optimizer.step()
        twins.step()
        twins.check()
        with pytest.raises(tiermem.ConfigError, match="where='elsewhere'"):
            twins.tier.optimizer(twins.model, torch.optim.SGD, lr=0.1, where="elsewhere")


class Failing(torch.optim.SGD):
    """Fails when told to."""

    broken = False

    def step(self, closure: Any = None) -> Any:
        if Failing.broken:
            raise MemoryError("no room for a temporary")
        return super().step(closure)


def test_a_step_that_fails_on_the_host_is_reported_where_its_blocks_are_used() -> None:
    with Twins(Net, DRAM, Failing, {"lr": 0.1, "foreach": False}, where="host") as twins:
        twins.backward(0)
        twins.step()
        twins.check()
        twins.backward(1)
        Failing.broken = True
        try:
            for _ in range(2):
                with pytest.raises(tiermem.StepError, match=r"0 of \d+ units .* are made"):
                    twins.optimizer.step()
            with pytest.raises(tiermem.StepError, match="no room for a temporary"):
                twins.model.state_dict()
        finally:
            Failing.broken = False
        twins.step()
        twins.check()


def test_weights_that_were_looked_at_are_stepped_and_those_with_views_are_refused() -> None:
    """After two forwards, whose graphs might have saved the weights as they are."""
    plain, model = Net(), Net()
    model.load_state_dict(plain.state_dict())
    adam = torch.optim.AdamW(plain.parameters(), lr=0.01, foreach=False)
    with tiermem.TierManager("cpu", hbm="8MiB", dram="8MiB") as tier:
        tier.wrap(model)
        optimizer: Any = tier.optimizer(
            model, torch.optim.AdamW, lr=0.01, foreach=False, where="host"
        )
        for _ in range(2):
            for each, own in ((plain, adam), (model, optimizer)):
                own.zero_grad()
                loss_of(each, 0).backward()
                loss_of(each, 1).backward()
                assert all(param.data.isfinite().all() for param in each.parameters())
                own.step()
        loss_of(model, 0).backward()
        view = next(model.parameters()).data
        with pytest.raises(tiermem.StepError, match="let views of it go"):
            optimizer.step()
        del view
        optimizer.step()
        loss_of(plain, 0).backward()
        adam.step()
        assert_same(dict(plain.state_dict()), dict(model.state_dict()), "weights")
        check_table(tier)


def test_closing_while_the_host_works() -> None:
    twins = Twins(Net, DRAM, where="host", overlap=True)
    twins.backward(0)
    twins.optimizer.step()
    twins.tier.close()
    with pytest.raises(tiermem.ClosedError):
        twins.optimizer.state_dict()


@settings(max_examples=examples(60))
@given(
    elements=st.lists(st.integers(1, 10**9), max_size=60),
    host=st.floats(1e-12, 1e-6),
    device=st.floats(1e-12, 1e-6),
)
def test_both_sides_finish_together(elements: list[int], host: float, device: float) -> None:
    chosen = choose_host(elements, Speeds(host, device))
    assert len(chosen) == len(elements)
    on_host = sum(n * host for n, mine in zip(elements, chosen, strict=True) if mine)
    on_device = sum(n * device for n, mine in zip(elements, chosen, strict=True) if not mine)
    largest = max((n * max(host, device) for n in elements), default=0.0)
    assert abs(on_host - on_device) <= largest * (1 + 1e-9)
    alone = min(sum(elements) * host, sum(elements) * device)
    assert max(on_host, on_device) <= alone * (1 + 1e-9) + largest


def test_what_is_at_home_in_hbm_is_stepped_on_the_device() -> None:
    tiers = Tiers("hbm", policy={"optimizer": "hbm", "params": "dram"})
    with Twins(Net, tiers, where="host") as twins:
        assert all(unit.host is None for unit in twins.optimizer._units)
        twins.backward(0)
        twins.step()
        twins.check()
        check_table(twins.tier)
        assert_same(dict(twins.plain.state_dict()), dict(twins.model.state_dict()), "weights")


class ByHand(torch.optim.Optimizer):
    """May fail half way: what it does is nobody's kernel, so that the host keeps what was."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    kept = self.state[param].setdefault("sum", torch.zeros_like(param))
                    kept.add_(param.grad)
                    param.sub_(kept, alpha=group["lr"])
        return None if closure is None else closure()


@pytest.mark.parametrize("cls", [torch.optim.AdamW, ByHand])
@pytest.mark.parametrize("where", ["host", "both"])
@pytest.mark.parametrize("policy", ["nvme", "auto"])
@pytest.mark.parametrize("width", [64, 200])
@pytest.mark.one_in(2)
def test_a_dram_budget_that_an_error_names_does(
    tmp_path: Path, policy: Any, where: Any, width: int, cls: Any
) -> None:
    """More DRAM takes homes in before the host's room is asked for; all of them are counted."""
    budgets: dict[str, Any] = {"hbm": "1MiB", "nvme": tmp_path, "policy": policy}

    def run(dram: int) -> None:
        with tiermem.TierManager("cpu", dram=dram, **budgets) as tier:
            model = tier.wrap(nn.Sequential(*(nn.Linear(width, width) for _ in range(5))))
            optimizer = tier.optimizer(model, cls, lr=0.1, where=where)
            for _ in range(2):
                model(torch.ones(2, width)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(tiermem.CapacityError) as caught:
        run(600 << 10)
    (least,) = re.findall(r"give dram= at least [^(]*\((\d+) bytes", str(caught.value))
    run(int(least))


class Scaled(nn.Module):
    """A layer whose weights are integers, in a buffer, and scaled by a parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randint(-9, 9, (width, width), dtype=torch.int8))
        self.scale = nn.Parameter(torch.rand(width) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.codes.to(x.dtype) * self.scale[:, None])


def test_buffers_that_come_to_dram_count_in_the_budget_that_is_named(tmp_path: Path) -> None:
    """They take what a larger budget has before steps on the host have their staging."""
    policy: Any = {"optimizer": "nvme"}
    budgets: dict[str, Any] = {"hbm": "128KiB", "nvme": tmp_path, "policy": policy}

    def run(dram: int) -> None:
        with tiermem.TierManager("cpu", dram=dram, **budgets) as tier:
            model = tier.wrap(nn.Sequential(*(Scaled(128) for _ in range(6))))
            tier.optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9, where="host")

    with pytest.raises(tiermem.CapacityError, match="staging of steps on the host") as caught:
        run(512 << 10)
    (least,) = re.findall(r"give dram= at least [^(]*\((\d+) bytes", str(caught.value))
    run(int(least))


@pytest.mark.parametrize("policy", ["nvme", "auto"])
@pytest.mark.parametrize("dram", [512 << 10, 640 << 10])
def test_staging_within_the_dram_budget(tmp_path: Path, policy: str, dram: int) -> None:
    """However little DRAM there is beside the mover's own: the least that is asked for will do."""
    tiers = Tiers("tight", nvme=str(tmp_path), policy=policy, dram=dram)
    chosen = (torch.optim.AdamW, {"lr": 0.01, "foreach": False})
    with Twins(Net, tiers, *chosen, where="host") as twins:
        units = twins.optimizer._units
        assert all(unit.host is not None for unit in units)
        homes = {r.home for r in twins.tier._manager.parts.table}
        assert Tier.NVME in homes or policy == "auto"
        for step in range(3):
            twins.backward(step)
            twins.step()
            twins.check()
        stage = units[0].host.stage
        loads = [sum(b.nbytes for b in u.blocks()) for u in units]
        assert stage is None or stage.nbytes <= 4 * max(loads)
        assert not stage or stage.at_home(r.block for r in twins.tier._manager.parts.table)


@pytest.mark.parametrize("parts", ["groups", "optimizers"])
def test_weights_in_files_that_two_have_in_common(tmp_path: Path, parts: str) -> None:
    """Parameters of one block, in a group that was added, or in another optimizer."""
    settings: dict[str, Any] = {"lr": 0.05, "foreach": False, "fused": True}
    torch.manual_seed(0)
    plain = Net(torch.float32)
    budgets: dict[str, Any] = {"hbm": "1MiB", "dram": "4MiB", "nvme": tmp_path, "policy": "nvme"}
    with tiermem.TierManager(device="cpu", **budgets) as tier:
        model = Net(torch.float32)
        model.load_state_dict(plain.state_dict())
        model = tier.wrap(model)
        optimizers: list[list[Any]] = []
        for net, make in ((plain, torch.optim.SGD), (model, None)):
            params = list(net.parameters())

            def build(mine: Any, make: Any = make) -> Any:
                if make is not None:
                    return make(mine, **settings)
                return tier.optimizer(mine, torch.optim.SGD, where="host", overlap=True, **settings)

            made = [build(params[::2])]
            if parts == "groups":
                made[0].add_param_group({"params": params[1::2]})
            else:
                made.append(build(params[1::2]))
            optimizers.append(made)
        for number in range(3):
            for net, made in zip((plain, model), optimizers, strict=True):
                loss_of(net, number).backward()
                for optimizer in made:
                    optimizer.step()
                for optimizer in made:
                    optimizer.zero_grad()
        assert_same(dict(plain.state_dict()), dict(model.state_dict()), "weights")


@pytest.mark.parametrize("home", ["dram", "nvme"])
def test_a_tensor_rate_that_is_written_at_once(tmp_path: Path, home: str) -> None:
    tiers = Tiers("one", nvme=str(tmp_path), policy=home)
    rates = [torch.tensor(0.01), torch.tensor(0.01)]
    chosen = (torch.optim.AdamW, {"lr": rates[0], "fused": True})
    with Twins(Net, tiers, *chosen, where="host", overlap=True) as twins:
        twins.optimizer.param_groups[0]["lr"] = rates[1]
        for step in range(3):
            twins.backward(step)
            twins.step()
            for rate in rates:
                rate.mul_(0.5)
        twins.check()
