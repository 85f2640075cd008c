"""Steps that the kernel of Adam makes where the tensors lie: the same bits, and nobody can tell."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support_adam_kernel import FakeKernel, Looks, faked
from support_late_state import pair_of
from support_nn import assert_same
from torch import nn

import tiermem
from tiermem.optim.rules import adamstep
from tiermem.optim.rules.plainstep import run
from tiermem.optim.units import unit as units
from tiermem.optim.units.direct import DirectSteps

WIDTH, LAYERS = 32, 6


def layers() -> nn.Module:
    """Returns layers of a matrix and three vectors each."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(LAYERS))
    )


class Loops:
    """A plain loop and one in the tiers, with steps by the kernel.

    Attributes:
        direct: How many steps of units were made directly so far.
        asked: For how many that was tried.
    """

    def __init__(self, cls: Any = torch.optim.AdamW, **settings: Any) -> None:
        settings = {"lr": 0.01, "foreach": True, **settings}
        own = {name: value for name, value in settings.items() if name != "overlap"}
        self.plain = layers()
        self.own = cls(self.plain.parameters(), **own)
        nbytes = sum(p.nbytes for p in self.plain.parameters())
        self.tier = tiermem.TierManager("cpu", hbm=nbytes, dram=64 * nbytes + (1 << 20))
        self.model = self.tier.wrap(layers())
        self.optimizer = self.tier.optimizer(self.model, cls, **settings)
        self.direct = self.asked = self.number = 0

    def backward(self) -> None:
        self.number += 1
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(self.number))
        for model in (self.plain, self.model):
            model(x).square().mean().backward()

    def step(self, times: int = 1, *, between: Callable[[Any, Any], object] | None = None) -> None:
        for _ in range(times):
            self.backward()
            for model, optimizer in ((self.plain, self.own), (self.model, self.optimizer)):
                if between is not None:
                    between(model, optimizer)
                optimizer.step()
                optimizer.zero_grad()

    def check(self) -> None:
        assert_same(dict(self.plain.state_dict()), dict(self.model.state_dict()), "weights")
        assert_same(self.own.state_dict()["state"], self.optimizer.state_dict()["state"], "state")


Made = Callable[..., Loops]


@pytest.fixture
def kernel() -> Iterator[FakeKernel]:
    with faked() as made:
        yield made


@pytest.fixture
def loops(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Makes loops, and closes them."""
    made: list[Loops] = []
    direct = DirectSteps.make

    def count(*given: Any) -> bool:
        done = direct(*given)
        for one in made:
            one.direct += done
            one.asked += 1
        return done

    def make(*args: Any, **settings: Any) -> Loops:
        made.append(Loops(*args, **settings))
        return made[-1]

    monkeypatch.setattr(DirectSteps, "make", count)
    yield make
    for one in made:
        one.tier.close()


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam])
def test_every_step_but_the_first_ones_is_made_directly(loops: Made, cls: Any) -> None:
    pair = loops(cls)
    pair.step(2)
    pair.direct = pair.asked = 0
    pair.step(4)
    assert pair.direct == pair.asked > 0
    pair.check()


def test_writes_of_weights_are_counted(loops: Made) -> None:
    pair = loops()
    pair.step(2)
    before = [[p._version for p in m.parameters()] for m in (pair.plain, pair.model)]
    pair.direct = 0
    pair.step(3)
    after = [[p._version for p in m.parameters()] for m in (pair.plain, pair.model)]
    assert pair.direct
    plain, tiered = (
        [b - a for a, b in zip(*both, strict=True)] for both in zip(before, after, strict=True)
    )
    assert all(number > 0 for number in tiered) and len(plain) == len(tiered)


def test_settings_of_each_step_are_used(loops: Made) -> None:
    pair = loops()
    pair.step(2)
    for rate in (0.1, 0.02, 0.3):
        for optimizer in (pair.own, pair.optimizer):
            optimizer.param_groups[0]["lr"] = rate
        pair.direct = 0
        pair.step(2)
        assert pair.direct
    pair.check()


def _vector(model: Any) -> nn.Parameter:
    """Returns a parameter that shares its unit with others."""
    bias: nn.Parameter = model[0][0].bias
    return bias


def _ordinary(model: Any, _optimizer: Any) -> None:
    _vector(model).grad = torch.ones(WIDTH)


def _none(model: Any, _optimizer: Any) -> None:
    _vector(model).grad = None


def _counter(model: Any, optimizer: Any) -> None:
    optimizer.state[_vector(model)]["step"] += 1


def _hook(_model: Any, optimizer: Any) -> None:
    if not optimizer._optimizer_step_pre_hooks:
        optimizer.register_step_pre_hook(lambda *_: None)


@pytest.mark.parametrize("change", [_ordinary, _none, _counter, _hook])
def test_what_a_program_does_in_between_is_followed(loops: Made, change: Any) -> None:
    pair = loops()
    pair.step(3)
    assert pair.direct
    pair.step(2, between=change)
    pair.step(2)
    pair.check()


def test_a_view_of_the_state_is_kept_up_to_date(loops: Made) -> None:
    pair = loops()
    pair.step(3)
    views = [
        optimizer.state[_vector(model)]["exp_avg"][:2]
        for model, optimizer in ((pair.plain, pair.own), (pair.model, pair.optimizer))
    ]
    pair.step(2)
    assert torch.equal(*views)
    pair.check()


@pytest.mark.parametrize(
    "settings",
    [
        {"amsgrad": True},
        {"foreach": False},
        {"capturable": False, "lr": torch.tensor(0.01)},
        {"fused": True, "foreach": None},
    ],
    ids=["amsgrad", "single", "rate", "fused"],
)
def test_other_settings_are_left_to_torch(loops: Made, settings: dict[str, Any]) -> None:
    if isinstance(settings.get("lr"), torch.Tensor):
        settings = {**settings, "foreach": False}  # torch refuses it with foreach
    pair = loops(**settings)
    pair.step(4)
    assert pair.asked and not pair.direct
    pair.check()


def test_the_profiler_sees_torchs_operations(loops: Made) -> None:
    pair = loops(overlap=False)
    pair.step(3)
    pair.direct = 0
    with torch.autograd.profiler.profile() as found:
        pair.step()
    assert not pair.direct
    assert any("foreach_addcdiv" in row.key for row in found.key_averages())
    pair.check()


def test_few_elements_are_left_to_torch(loops: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamstep, "_LEAST", 1 << 20)
    pair = loops()
    pair.step(4)
    assert pair.asked and not pair.direct
    pair.check()


def test_whoever_looks_at_torchs_operations_sees_them(loops: Made) -> None:
    pair = loops(overlap=False)
    pair.step(3)
    assert pair.direct
    pair.direct = 0
    with Looks() as looks:
        pair.step(2)
    assert torch._foreach_addcdiv_ in looks.seen and not pair.direct
    pair.check()


def test_an_update_of_late_state_that_fails_half_way_leaves_nothing(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = DirectSteps.update_state

    def half_way(*given: Any) -> bool:
        assert update(*given)
        raise torch.OutOfMemoryError("no memory")

    with pair_of(torch.optim.AdamW, {"lr": 0.01, "foreach": True}) as pair:
        pair.step(5)
        with monkeypatch.context() as patch:
            patch.setattr(DirectSteps, "update_state", half_way)
            with pytest.raises(torch.OutOfMemoryError):
                pair.optimizer.finish()
        assert pair.late and kernel.steps
        pair.check()


@pytest.mark.parametrize("fails", [False, True])
def test_weights_that_several_threads_use(
    loops: Made, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    pair = loops(overlap=False)

    def shrink(model: Any, _optimizer: Any = None) -> None:
        with torch.no_grad():
            model[0][0].weight.mul_(0.9)

    def no_memory(optimizer: torch.optim.Optimizer) -> None:
        run(optimizer)
        raise torch.OutOfMemoryError("no memory")

    pair.step(3)
    for model in (pair.plain, pair.model):
        thread = threading.Thread(target=shrink, args=(model,))
        thread.start()
        thread.join()
    pair.step(1, between=shrink)
    pair.backward()
    if fails:
        with monkeypatch.context() as patch:
            patch.setattr(units, "run", no_memory)
            patch.setattr(DirectSteps, "make", lambda *_: False)
            with pytest.raises(torch.OutOfMemoryError):
                pair.optimizer.step()
    pair.own.step()
    pair.optimizer.step()
    assert pair.direct
    assert not pair.tier._runtime.groups[0].lender.addresses._of  # no step has asked for any
    pair.check()
