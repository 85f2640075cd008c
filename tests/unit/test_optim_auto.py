"""``overlap="auto"``: where a step that waits could be seen, it is made at once."""

from __future__ import annotations

import copy
import gc
import sys
from typing import Any

import pytest
import torch
from support_nn import Tiers, assert_same, seed
from support_optim import FailsMidway, Net, Refused, Twins, two_groups
from torch import nn

import tiermem
from tiermem.optim.auto import kind_of
from tiermem.optim.provisional import Provisional
from tiermem.optim.units.attempt import Attempt
from tiermem.optim.units.unit import StepUnit

DRAM = Tiers("dram")


@pytest.fixture(autouse=True)
def _no_shadows(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no DRAM to spare for steps ahead: what may wait waits."""
    monkeypatch.setattr(Provisional, "has_room", lambda *_: False)


def waiting(twins: Twins) -> int:
    """How many units are still to be stepped."""
    return len(twins.optimizer._units.owed)


def units(twins: Twins) -> int:
    return len(twins.optimizer._units)


def ask(twins: Twins, number: int) -> int:
    """Backward and a step; returns how many units wait after it."""
    twins.backward(number)
    twins.by_hand.step()
    twins.optimizer.step()
    found = waiting(twins)
    twins.by_hand.zero_grad()
    twins.optimizer.zero_grad()
    return found


def test_the_first_step_is_made_at_once_and_the_others_wait() -> None:
    with Twins(Net, DRAM) as twins:
        assert [ask(twins, number) for number in range(4)] == [0, *[units(twins)] * 3]
        twins.check()


def test_gradients_that_somebody_has_are_there_when_a_step_that_waits_has_cleared_them() -> None:
    """The look itself has the step made."""
    with Twins(Net, DRAM, master_dtype=None) as twins:
        ask(twins, 0)
        twins.backward(1)
        both = [[p.grad for p in one.parameters()] for one in (twins.plain, twins.model)]
        values = [gradient.clone() for gradient in both[0] if gradient is not None]
        twins.by_hand.step()
        twins.optimizer.step()
        twins.optimizer.zero_grad()
        assert waiting(twins)
        assert_same(values, [gradient for gradient in both[1] if gradient is not None], "kept")
        assert not waiting(twins)


def test_a_gradient_that_is_given_while_a_step_without_it_waits_stays() -> None:
    """The step of the others of its unit, whoever asks for it, takes it neither in nor away."""
    with Twins(Net, DRAM, master_dtype=None) as twins:
        unit = next(unit for unit in twins.optimizer._units if len(unit.members) > 1)
        (first, _), *_, (last, _) = unit.members
        numbers = {id(param): number for number, param in enumerate(twins.model.parameters())}
        both = [[*model.parameters()][numbers[id(last)]] for model in (twins.plain, twins.model)]
        for param in both:
            param.requires_grad_(False)
        assert [ask(twins, number) for number in range(3)] == [0, *[units(twins)] * 2]
        for param in both:
            param.grad = torch.ones(param.shape, dtype=param.dtype)
        assert first.abs().sum() >= 0
        assert waiting(twins) < units(twins)
        assert last.grad is not None
        ask(twins, 3)
        twins.check()


@pytest.mark.parametrize("overlap", ["auto", "forward"])
def test_steps_that_wait_are_no_unfinished_step(overlap: Any) -> None:
    """So there is nothing to give up."""
    with Twins(Net, DRAM, overlap=overlap) as twins:
        ask(twins, 0)
        assert ask(twins, 1) == units(twins)
        twins.optimizer.abandon_step()
        twins.check()


def test_the_least_budget_is_that_of_no_overlap_and_enough() -> None:
    """What has no room beside what a forward holds is stepped at once."""

    class Nested(nn.Module):
        """Its own weights are held while its layers are called."""

        def __init__(self) -> None:
            super().__init__()
            self.net = Net(torch.float32)
            self.own = nn.Parameter(torch.ones(24, 24))

        def forward(self, ids: torch.Tensor, use_extra: bool = True) -> torch.Tensor:
            return self.net(ids, use_extra) * (self.own.sum() / 576)

    least = {}
    for overlap in ("auto", False, "forward"):
        with Twins(Nested, DRAM, master_dtype=None, overlap=overlap) as twins:
            least[overlap] = twins.tier.stats().budget["hbm"]
            if overlap == "auto":
                found = [ask(twins, number) for number in range(4)]
                assert max(found) < units(twins)  # the others have no room
                twins.check()
    assert least["auto"] == least[False] < least["forward"]


def test_room_that_others_hold_in_forward_is_not_counted_on() -> None:
    """A model that keeps views of its weights from forward to backward."""
    kept: list[torch.Tensor] = []

    class Keeping(Net):
        def forward(self, ids: torch.Tensor, use_extra: bool = True) -> torch.Tensor:
            kept.extend(layer.up.weight.data for layer in self.layers)
            x = self.embed(ids)
            x.register_hook(lambda _: kept.clear())
            for layer in self.layers:
                x = layer(x)
            return torch.nn.functional.linear(self.extra(x), self.embed.weight)

    build = lambda: Keeping(torch.float32, 8)  # noqa: E731
    tight = 45 << 12  # with less it depends on how the pieces lie, with any overlap
    with Twins(build, Tiers("dram", extra_hbm=tight), master_dtype=None, overlap=False) as twins:
        for number in range(4):
            ask(twins, number)  # it is enough
    with Twins(build, Tiers("dram", extra_hbm=tight), master_dtype=None) as twins:
        for number in range(4):
            ask(twins, number)
        twins.check()


def _add_data(target: torch.Tensor, param: torch.Tensor) -> None:
    target.data.add_(0.1 * param.data)


def _lerp(target: torch.Tensor, param: torch.Tensor) -> None:
    with torch.no_grad():
        target.lerp_(param, 0.1)


@pytest.mark.parametrize("begins", [0, 3])
@pytest.mark.parametrize("follow", [_add_data, _lerp])
def test_room_that_looks_between_steps_hold_is_not_counted_on(follow: Any, begins: int) -> None:
    """Another model's weight is held as one is looked at: no step may wait to be made then."""

    def train(model: nn.Module, target: nn.Module, optimizer: Any) -> None:
        for number in range(begins + 4):
            torch.manual_seed(number)
            model(torch.randn(4, 96)).square().mean().backward()
            torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)  # so none is made ahead
            optimizer.step()
            optimizer.zero_grad()
            pairs = zip(target.parameters(), model.parameters(), strict=True)
            for one, other in pairs if number >= begins else ():
                follow(one, other)

    def build() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Sequential(*[nn.Linear(96, 96) for _ in range(6)]) for _ in range(2)]

    plain = build()
    train(*plain, torch.optim.Adam(plain[0].parameters()))
    with tiermem.TierManager(device="cpu", hbm="156KiB", dram="16MiB") as tier:
        model, target = map(tier.wrap, build())
        train(model, target, tier.optimizer(model, torch.optim.Adam))
        for mine, other in zip((model, target), plain, strict=True):
            assert_same(dict(other.state_dict()), dict(mine.state_dict()), "weights")


def test_a_class_that_is_not_torchs_own_raises_in_step() -> None:
    with Twins(Net, DRAM, FailsMidway, {"lr": 0.1}) as twins:
        for number in range(3):
            assert ask(twins, number) == 0
        twins.backward(3)
        FailsMidway.lit = True
        with pytest.raises(Refused):
            twins.optimizer.step()
        twins.optimizer.step()
        twins.by_hand.step()
        twins.check()


def test_settings_that_torch_cannot_use_are_refused_in_step() -> None:
    settings = {"lr": 0.01, "foreach": False}
    with Twins(Net, DRAM, torch.optim.AdamW, settings, groups=two_groups) as twins:
        for number in range(3):
            ask(twins, number)
        twins.backward(3)
        group = twins.optimizer.param_groups[1]
        rate, group["lr"] = group["lr"], "fast"
        with pytest.raises(TypeError):
            twins.optimizer.step()
        twins.optimizer.abandon_step()
        group["lr"] = rate


def test_what_tells_settings_apart() -> None:
    plain = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "maximize": False, "params": []}
    same = [{"lr": 0.2}, {"betas": (0.5, 0.99)}, {"params": [1]}]
    other = [
        {"lr": torch.tensor(0.1)},
        {"lr": float("nan")},
        {"lr": -1.0},
        {"lr": "0.1"},
        {"betas": (1.0, 0.99)},
        {"betas": [0.9, 0.99]},
        {"eps": 1e-7},
        {"maximize": True},
        {"more": None},
    ]
    assert all(kind_of({**plain, **change}) == kind_of(plain) for change in same)
    assert not any(kind_of({**plain, **change}) == kind_of(plain) for change in other)
    del plain["eps"]
    assert kind_of(plain) != kind_of({**plain, "eps": 1e-8})


def test_a_setting_written_in_place_after_the_step() -> None:
    """Of any depth, and with any overlap."""
    for overlap in ("auto", "forward"):
        with Twins(Net, DRAM, overlap=overlap) as twins:
            for optimizer in (twins.by_hand.optimizer, twins.optimizer):
                optimizer.param_groups[0]["betas"] = [0.9, 0.99]
            for number in range(4):
                ask(twins, number)
                for optimizer in (twins.by_hand.optimizer, twins.optimizer):
                    optimizer.param_groups[0]["betas"][0] = 0.5
            twins.check()


def test_a_look_at_the_state_before_the_first_step_is_over_by_then() -> None:
    """As trainers do, who move it to the device."""
    with Twins(Net, DRAM) as twins:
        for values in twins.optimizer.state.values():
            assert not values
        assert [ask(twins, number) for number in range(3)] == [0, *[units(twins)] * 2]
        twins.check()


@pytest.mark.parametrize("what", ["all", "one", "number", "view", "numpy"])
def test_numbers_of_the_state_that_somebody_has_are_those_after_the_step(what: str) -> None:
    """They have no home in the tiers, through which it would be seen who looks."""
    with Twins(Net, DRAM) as twins:
        for number in range(3):
            ask(twins, number)
        param = twins.model.extra.weight
        kept: Any = twins.optimizer.state
        if what != "all":
            kept = kept[param]
        if what not in ("all", "one"):
            kept = kept["step"]
        if what in ("view", "numpy"):
            kept = kept.view(1) if what == "view" else kept.numpy()
        expected = 4.0
        for number in range(3, 5):
            ask(twins, number)
            shown = kept[param]["step"] if what == "all" else kept
            shown = shown["step"] if what == "one" else shown
            assert float(shown) == expected
            expected += 1
        del kept, shown
        assert ask(twins, 5) == units(twins)  # there is no reference to it any more
        twins.check()


def test_sparse_state_that_was_looked_into_is_stepped_at_once() -> None:
    """torch's SGD keeps a momentum of sparse gradients that is sparse."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for number in range(4):
            model(torch.tensor([number, 3])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert number or optimizer.state

    seed(0)
    plain = nn.Sequential(nn.Embedding(8, 16, sparse=True), nn.Linear(16, 16), nn.Linear(16, 16))
    model = copy.deepcopy(plain)
    settings = {"lr": 0.1, "momentum": 0.9}
    train(plain, torch.optim.SGD(plain.parameters(), **settings))
    with tiermem.TierManager("cpu", hbm="24KiB", dram="1MiB") as tier:
        train(model, tier.optimizer(tier.wrap(model), torch.optim.SGD, **settings))
        assert_same(dict(plain.state_dict()), dict(model.state_dict()), "weights")


def attempts() -> int:
    """How many steps there are that were begun, and that something has a reference to."""
    return sum(type(thing) is Attempt for thing in gc.get_objects())


@pytest.mark.parametrize("else_held", [False, True])
def test_state_that_is_kept_is_seen_whoever_has_held_it_before(else_held: bool) -> None:
    """Steps by one call of torch's leave nothing that holds it; what an error leaves is gone."""
    fused = {"lr": 0.01, "fused": True}
    gc.collect()
    gc.disable()
    before = attempts()
    try:
        with Twins(lambda: Net(torch.float32), DRAM, settings=fused, master_dtype=None) as twins:
            held = [twins.optimizer._units.state] * else_held
            for number in range(3):
                ask(twins, number)
            assert attempts() == before
            held.clear()
            kept = twins.optimizer.state
            for number in range(3, 6):
                twins.backward(number)
                twins.by_hand.step()
                twins.optimizer.step()
                assert {float(values["step"]) for values in kept.values()} == {number + 1}
                twins.by_hand.zero_grad()
                twins.optimizer.zero_grad()
            del kept
            twins.check()
    finally:
        gc.enable()


def test_weights_at_home_in_hbm_are_there_for_a_graph() -> None:
    """In a capture of the forward nothing could be stepped."""
    with Twins(Net, Tiers("hbm", policy={"params": "hbm"})) as twins:
        assert [ask(twins, number) for number in range(3)] == [0, 0, 0]
        twins.check()


def test_where_everything_is_in_hbm_there_is_nothing_to_wait_for() -> None:
    with Twins(Net, Tiers("dram", extra_hbm=1 << 20)) as twins:
        assert [ask(twins, number) for number in range(3)] == [0, 0, 0]
        twins.check()


def test_a_program_that_looks_after_each_step_is_stepped_at_once() -> None:
    """Else each look would bring up one block after another; now and then it is tried again."""
    with Twins(Net, DRAM) as twins:
        found = []
        for number in range(12):
            found.append(ask(twins, number))
            weights = [[p * 1 for p in m.parameters()] for m in (twins.plain, twins.model)]
            assert_same(weights[0], weights[1], "weights")
        assert [n for n, count in enumerate(found) if count] == [1, 3, 6, 11]
        assert ask(twins, 12) == 0
        twins.check()


def test_a_step_that_cannot_be_made_in_forward_is_made_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its error is raised once, nothing is lost, and no step waits after it."""
    inside: list[int] = []
    step = StepUnit.step

    def fails(self: StepUnit, runtime: Any, *args: Any, **kwargs: Any) -> None:
        inside.append(runtime.here.inside)
        if kwargs.get("owed") and runtime.here.inside and "layers.1" in self.name:
            raise tiermem.CapacityError("no room for block 'x'", "give hbm= more", "")
        step(self, runtime, *args, **kwargs)

    with Twins(Net, DRAM) as twins:
        for number in range(3):
            ask(twins, number)
        monkeypatch.setattr(StepUnit, "step", fails)
        with pytest.raises(tiermem.CapacityError, match="no room"):
            twins.backward(3)
        twins.by_hand.zero_grad()
        inside.clear()
        assert ask(twins, 3) == 0
        assert inside and not any(inside)
        assert ask(twins, 4) == 0
        twins.check()


def test_an_optimizer_that_is_closed_or_refused_looks_at_no_backward() -> None:
    with tiermem.TierManager(device="cpu", hbm="2MiB", dram="16MiB") as tier:
        model = tier.wrap(Net(torch.float32))
        watched = tier._runtime.backward.on_begin, tier._runtime.away.on_look
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=0.01)
        assert [len(found) for found in watched] == [1, 1]
        with pytest.raises(tiermem.StepError, match="loss of the whole model again, by a closure"):
            tier.optimizer(model, torch.optim.LBFGS)
        assert [len(found) for found in watched] == [1, 1]
        optimizer.close()
        assert not any(watched)


def test_other_words_are_refused() -> None:
    with tiermem.TierManager(device="cpu", hbm="2MiB", dram="16MiB") as tier:
        model = tier.wrap(Net(torch.float32))
        with pytest.raises(tiermem.ConfigError, match="'auto', False"):
            tier.optimizer(model, torch.optim.AdamW, overlap="later")
        with pytest.raises(tiermem.ConfigError, match="'device', 'host' or 'both'"):
            tier.optimizer(model, torch.optim.AdamW, where="cloud")
        with pytest.raises(tiermem.ConfigError, match="host_share"):
            tier.optimizer(model, torch.optim.AdamW, host_share=0.5)
        for name in ("master_dtype", "grad_dtype"):
            with pytest.raises(tiermem.ConfigError, match=f"{name} must be a floating dtype"):
                tier.optimizer(model, torch.optim.AdamW, **{name: "bfloat16"})


def test_what_finishes_a_step_that_was_put_off_is_named() -> None:
    """Not step(), which would make another one with gradients that are still there."""
    with Twins(Net, DRAM, FailsMidway, {"lr": 0.1}, overlap="forward") as twins:
        twins.backward(0)
        twins.step()
        twins.backward(1)
        twins.by_hand.step()
        twins.optimizer.step()
        FailsMidway.lit = True
        with pytest.raises(Refused) as raised:
            twins.optimizer.finish()
        if sys.version_info >= (3, 11):
            assert any("or optimizer.finish()" in note for note in raised.value.__notes__)
        twins.optimizer.finish()
        twins.check()
