"""Programs that look at anything at any moment, with the defaults: as plain torch, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support_examples import examples
from support_hostbits import device_of_numpy, tried_shares
from support_nn import Tiers, assert_same, check_table, seed, wrap_tight
from support_packed_homes import all_packed
from torch import nn

import tiermem
from tiermem.core import parts
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.optim.host.loop import library
from tiermem.optim.units.parted import PartedUnit

WIDTH = 8
LAYERS = 4
BATCH = 3

CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "Adam, a tensor rate": (torch.optim.Adam, {"lr": torch.tensor(0.01), "foreach": False}),
    "fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01}),
}


class Stop(Exception):
    """Raised by a hook of the program's."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.up(x)))


class Model(nn.Module):
    """Layers, some of which a call may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, skip: int = -1) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index != skip:
                x = layer(x)
        return x


def weights(model: Any) -> list[torch.Tensor]:
    return [p * 1 for p in model.parameters()]


def gradients(model: Any) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def state_of(optimizer: Any, index: int) -> dict[str, Any]:
    param = optimizer.param_groups[0]["params"][index]
    return {key: 1 * value for key, value in sorted(optimizer.state[param].items())}


LOOKS: dict[str, Callable[[Any, Any, int], Any]] = {
    "a weight": lambda m, o, i: m.layers[i].up.weight.sum(),
    "all weights": lambda m, o, i: weights(m),
    "data": lambda m, o, i: m.layers[i].norm.bias.data.clone(),
    "numpy": lambda m, o, i: torch.from_numpy(m.layers[i].up.bias.detach().numpy().copy()),
    "state_dict": lambda m, o, i: dict(m.state_dict()),
    "a gradient": lambda m, o, i: gradients(m.layers[i]),
    "all gradients": lambda m, o, i: gradients(m),
    "the optimizer's state": lambda m, o, i: state_of(o, i),
    "deepcopy": lambda m, o, i: weights(copy.deepcopy(m.layers[i])),
    "settings": lambda m, o, i: {k: v for k, v in o.param_groups[0].items() if k != "params"},
}

KEEPS: dict[str, Callable[[Any, Any, int], Any]] = {
    "a view of weights": lambda m, o, i: m.layers[i].up.weight.data[1:],
    "a view of a gradient": lambda m, o, i: m.layers[i].up.weight.grad[1:],
    "the state": lambda m, o, i: o.state,
    "a parameter's state": lambda m, o, i: o.state[m.layers[i].up.bias],
    "a number of it": lambda m, o, i: o.state[m.layers[i].up.weight]["step"],
    "a view of a number": lambda m, o, i: o.state[m.layers[i].up.weight]["step"].view(1),
    "a stand-in": lambda m, o, i: sorted(o.state[m.layers[i].up.weight].items())[0],
}


def shown(kept: Any) -> Any:
    """What something that was kept shows by now."""
    if isinstance(kept, torch.Tensor):
        return kept * 1
    if isinstance(kept, tuple):
        return shown(kept[1])
    if not isinstance(kept, dict):
        return kept
    return [(key, shown(kept[key])) for key in kept if isinstance(key, str)] or [
        shown(value) for value in kept.values()
    ]


def scale_rate(optimizer: Any, number: float) -> None:
    rate = optimizer.param_groups[0]["lr"]
    if isinstance(rate, torch.Tensor):
        rate.mul_(number)
    else:
        optimizer.param_groups[0]["lr"] = rate * number


def change_betas(optimizer: Any, number: float) -> None:
    group = optimizer.param_groups[0]
    if isinstance(group.get("betas"), list):  # in place
        group["betas"][0] = 0.5 * number
    elif "betas" in group:
        group["betas"] = [0.5 * number, group["betas"][1]]


def change_the_rest(optimizer: Any, number: float) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.1 * number
    optimizer.param_groups[0]["maximize"] = number < 0.5


def add(param: torch.Tensor) -> None:
    with torch.no_grad():
        param.add_(1.0)


def give(param: torch.Tensor) -> None:
    param.grad = torch.ones_like(param)


def forget(param: torch.Tensor) -> None:
    param.grad = None


class Disturbed:
    """Makes steps ahead, or has one fail or be dropped in the middle, as a list says."""

    def __init__(self, ahead: Any, what: list[str]) -> None:
        self.ahead, self.what = ahead, what
        self.make = ahead._make_one
        self.has_room = ahead.provisional.has_room
        self.begin = ahead._begin_there
        ahead._make_one = self
        ahead._begin_there = self.begin_there
        ahead.provisional.has_room = self.room

    def room(self, group: Any, units: Any) -> bool:
        if self.what and self.what[0] == "no room":
            del self.what[0]
            return False
        return bool(self.has_room(group, units))

    def __call__(self, unit: Any, made: Any, keep: Callable[[Any], None]) -> None:
        what = self.what.pop(0) if self.what else ""
        if what == "no room in HBM":
            raise tiermem.CapacityError(what)
        spoilt = unit.parts[-1].unit if isinstance(unit, PartedUnit) else unit
        if what == "no memory":
            spoilt._run = partial(self.spoil, spoilt)
        try:
            self.make(unit, made, partial(self.keep, keep, what))
        finally:
            spoilt.__dict__.pop("_run", None)
        if what == "dropped":
            self.ahead.provisional.drop()

    def begin_there(self, host: Any, group: Any, units: Any) -> None:
        """The same on the host, which is at it while the program goes on."""
        what = self.what.pop(0) if self.what else ""
        if what == "no room in HBM":
            return
        if what == "no memory":
            units[0].host.update.update = partial(self.fail, units[0].host.update)
        self.begin(host, group, units)
        found = self.ahead.provisional
        LookingOnBothSides.there += len(found._elsewhere)
        if what == "no memory":  # so that it is known before step(): later it raises
            for step in found._elsewhere:
                step.job.wait()
        if what in ("dropped", "dropped midway"):
            found.drop()
        if what == "a home needs room":
            self.ahead._runtime.manager.parts.homes._reclaim()

    def fail(self, update: Any, *_: Any) -> None:
        del update.update
        raise torch.OutOfMemoryError

    def keep(self, keep: Callable[[Any], None], what: str, blocks: Any) -> None:
        keep(blocks)
        if what == "dropped midway":
            self.ahead.provisional.drop()
        if what == "a home needs room":
            self.ahead._runtime.manager.parts.homes._reclaim()

    def spoil(self, unit: Any, *_: Any) -> None:
        """An update that finds no memory once it has written half of everything."""
        for param, _number in unit.members:
            unit.own(param).detach().add_(7.0)
        for state in unit.plain._optimizer.state.values():
            for value in state.values():
                value.add_(3.0)
        raise torch.OutOfMemoryError


DISTURBED = (
    *("", "", "", "", "no room", "no room in HBM", "no memory"),
    *("dropped", "dropped midway", "a home needs room"),
)


def scale_gradient(param: torch.Tensor) -> None:
    if param.grad is not None:
        param.grad.mul_(3.0)


def step_by_factor(optimizer: Any, model: nn.Module, most: float) -> torch.Tensor:
    """Clips in the step alone: gradients keep what they are. Returns their norm."""
    if hasattr(optimizer, "grad_norm"):
        norm: torch.Tensor = optimizer.grad_norm()
        optimizer.grad_factor = torch.clamp(most / (norm + 1e-6), max=1.0)
        optimizer.step()
        return norm
    given = [p for p in model.parameters() if p.grad is not None]
    gradients = [p.grad for p in given]
    norm = nn.utils.get_total_norm(gradients)
    for param in given:
        param.grad = param.grad * torch.clamp(most / (norm + 1e-6), max=1.0)
    optimizer.step()
    for param, gradient in zip(given, gradients, strict=True):
        param.grad = gradient
    return norm


number = st.integers(0, 1 << 20)
layers = st.integers(0, LAYERS - 1)


class Looking(RuleBasedStateMachine):
    """Does everything to both; whatever the program sees has to agree."""

    waited = confirmed = dropped = 0
    both_sides = False

    @initialize(
        kind=st.sampled_from(sorted(CLASSES)),
        master=st.booleans(),
        spare=st.sampled_from([0, 1 << 14, 1 << 14, 1 << 17]),
        policy=st.sampled_from([None, None, {"params": "hbm"}, {"optimizer": "hbm"}]),
        start=number,
        ahead=st.sampled_from([True, True, False]),
    )
    def begin(
        self, kind: str, master: bool, spare: int, policy: Any, start: int, ahead: bool
    ) -> None:
        if self.both_sides:
            kind, policy = "fused", None
            spare = min(spare, 1 << 14)  # the host is asked for nothing where all of it fits
        cls, given = CLASSES[kind]
        options = {"master_dtype": torch.float32} if master else {}  # no weight has another dtype

        def make() -> Model:
            seed(start)
            return Model()

        self.plain = make()
        tiers = Tiers("dram", policy=policy, extra_hbm=spare)
        own = {**copy.deepcopy(given), **options}
        self.tier, self.model, self.optimizer = wrap_tight(make, tiers, (cls, own))
        self.spare, self.master = spare, master
        self.plain_optimizer = cls(self.plain.parameters(), **copy.deepcopy(given))
        self.kept: list[tuple[Any, Any]] = []
        if not ahead:  # as where DRAM has no room for shadows: steps wait, or are made at once
            self.optimizer._timing.ahead._may_begin = lambda: False
        self.disturbed = Disturbed(self.optimizer._timing.ahead, [])
        self.scaler = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
        if self.both_sides:
            self.optimizer._host.movable.trial._load = int  # one share, whatever is called
            self.share(True)
        for number in range(3):
            self.train(start, -1, "after", False, "", [])
            if number == 2:  # steps are made ahead by now
                self.drop(False)
            self.step("none", False)

    def _both(self, use: Callable[[Any, Any], Any]) -> None:
        expected = use(self.plain, self.plain_optimizer)
        assert_same(expected, use(self.model, self.optimizer), "result")
        for mine, theirs in self.kept:
            assert_same(shown(mine), shown(theirs), "what was kept")

    @rule(
        start=number,
        skip=st.integers(-1, LAYERS - 1),
        clear=st.sampled_from(["before", "after", "no"]),
        none=st.booleans(),
        peek=st.sampled_from(["", "", "", "", "a weight", "a gradient", "data"]),
        disturbed=st.lists(st.sampled_from(DISTURBED), max_size=LAYERS),
    )
    def train(
        self, start: int, skip: int, clear: str, none: bool, peek: str, disturbed: list[str]
    ) -> None:
        """Forward and backward; gradients are forgotten before, in between (trainers), or not."""
        self.disturbed.what[:] = disturbed

        def use(model: Any, optimizer: Any) -> Any:
            seen: list[Any] = []
            index = start % LAYERS

            def look(_: Any) -> None:
                seen.append(LOOKS[peek](model, optimizer, index))

            hooked = model.layers[0].up.weight
            handle = hooked.register_post_accumulate_grad_hook(look) if peek else None
            try:
                return run(model, optimizer), seen
            finally:
                if handle is not None:
                    handle.remove()

        def run(model: Any, optimizer: Any) -> Any:
            if clear == "before":
                optimizer.zero_grad(set_to_none=none)
            seed(start)
            loss = model(torch.randn(BATCH, WIDTH), skip).square().mean()
            if clear == "after":
                optimizer.zero_grad(set_to_none=none)
            loss.backward()
            return loss

        self._both(use)

    @rule(
        clip=st.sampled_from(
            [
                *("none", "none", "torch", "own", "value", "factor"),
                *("torch, not needed", "own, not needed", "factor, not needed"),
            ]
        ),
        clear=st.booleans(),
    )
    def step(self, clip: str, clear: bool) -> None:
        most = 1e6 if "not needed" in clip else 0.1

        def use(model: Any, optimizer: Any) -> Any:
            norm = None
            if clip == "value" and any(p.grad is not None for p in model.parameters()):
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            elif clip.startswith("own") and model is self.model:
                norm = optimizer.clip_grad_norm_(most)
            elif clip.startswith(("own", "torch")):
                norm = nn.utils.clip_grad_norm_(model.parameters(), most)
            if clip.startswith("factor"):
                norm = step_by_factor(optimizer, model, most)
            else:
                optimizer.step()
            if clear:
                optimizer.zero_grad()
            return norm

        self._both(use)
        Looking.waited += len(self.optimizer._units.owed)

    # else the scale is undone in the step, and gradients keep it; and the device of NumPy has none
    @precondition(lambda self: not (self.master or self.both_sides))
    @rule(start=number, infinite=st.booleans())
    def scaled(self, start: int, infinite: bool) -> None:
        """A step by a scaler, which may be left out."""

        def use(model: Any, optimizer: Any) -> Any:
            scaler = self.scaler[model is self.model]
            optimizer.zero_grad()
            seed(start)
            loss = model(torch.randn(BATCH, WIDTH)).square().mean()
            scaler.scale(loss * float("inf") if infinite else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return scaler.get_scale()

        self._both(use)

    @rule(what=st.sampled_from(sorted(LOOKS)), index=layers)
    def look(self, what: str, index: int) -> None:
        self._both(lambda model, optimizer: LOOKS[what](model, optimizer, index))

    @precondition(lambda self: self.spare)
    @rule(what=st.sampled_from(sorted(KEEPS)), index=layers)
    def keep(self, what: str, index: int) -> None:
        if "gradient" in what and self.plain.layers[index].up.weight.grad is None:
            return
        if not self.plain_optimizer.state[self.plain.layers[index].up.weight].get("step", 1):
            return
        try:
            mine = KEEPS[what](self.plain, self.plain_optimizer, index)
        except KeyError:  # no number in this class's state
            return
        self.kept.append((mine, KEEPS[what](self.model, self.optimizer, index)))

    @rule()
    def let_go(self) -> None:
        self.kept.clear()

    @precondition(lambda self: self.both_sides)
    @rule(on_host=st.booleans())
    def share(self, on_host: bool) -> None:
        """The host gets its share, or loses it."""
        self.optimizer._host.movable.trial.is_on = on_host

    @rule(release=st.booleans())
    def drop(self, release: bool) -> None:
        """What was made ahead is dropped where the program can see no reason."""
        self.optimizer._timing.ahead.settle()
        if release:
            self.tier._manager.parts.homes._reclaim()

    @rule(
        what=st.sampled_from([add, give, forget, scale_gradient]),
        index=layers,
        which=st.sampled_from(["weight", "bias"]),
    )
    def write(self, what: Any, index: int, which: str) -> None:
        if what is give:
            self.kept.clear()
        self._both(lambda model, _: what(getattr(model.layers[index].up, which)))

    @rule(
        what=st.sampled_from([scale_rate, change_betas, change_the_rest]),
        by=st.sampled_from([0.25, 0.5, 1.0]),
    )
    def change(self, what: Any, by: float) -> None:
        self._both(lambda _, optimizer: what(optimizer, by))

    @rule()
    def settings_that_the_class_cannot_use(self) -> None:
        """Where the resident optimizer raises in ``step()``, so does the tiered one."""
        if any(p.grad is None for p in self.plain.parameters()):
            return
        self.kept.clear()
        before = copy.deepcopy((self.plain.state_dict(), self.plain_optimizer.state_dict()))

        def use(model: Any, optimizer: Any) -> str:
            rate = optimizer.param_groups[0]["lr"]
            optimizer.param_groups[0]["lr"] = "fast"
            try:
                optimizer.step()
            except (TypeError, RuntimeError) as error:
                return type(error).__name__
            finally:
                optimizer.param_groups[0]["lr"] = rate
                if optimizer is self.optimizer:
                    optimizer.abandon_step()
            return ""

        self._both(use)
        for model, optimizer in (
            (self.plain, self.plain_optimizer),  # which is left half written
            (self.model, self.optimizer),
        ):
            model.load_state_dict(before[0])
            optimizer.load_state_dict(copy.deepcopy(before[1]))

    @rule(index=layers, mode=st.sampled_from([torch.no_grad, torch.inference_mode]))
    def evaluate(self, index: int, mode: Any) -> None:
        def use(model: Any, _: Any) -> Any:
            with mode():
                return model(torch.ones(BATCH, WIDTH)), model.layers[index](torch.ones(1, WIDTH))

        self._both(use)

    @rule(index=layers, backward=st.booleans())
    def a_hook_raises(self, index: int, backward: bool) -> None:
        """In forward, or in backward, which leaves some gradients."""

        def use(model: Any, _: Any) -> None:
            layer = model.layers[index]

            def stop(*_: Any) -> None:
                raise Stop

            register = layer.register_full_backward_hook if backward else None
            handle = (register or layer.register_forward_hook)(stop)
            try:
                model(torch.ones(BATCH, WIDTH, requires_grad=True)).sum().backward()
            except Stop:
                return
            finally:
                handle.remove()
            raise AssertionError("nothing was raised")

        self._both(use)
        if backward:
            self._both(lambda model, _: model.zero_grad())

    @precondition(lambda self: not self.both_sides)  # torch counts NumPy's writes otherwise
    @rule(factor=st.sampled_from([1.0, 2.0]))
    def a_graph_from_before(self, factor: float) -> None:
        """Backward through weights that a step has written is refused, or right."""

        def use(model: Any, optimizer: Any) -> str:
            loss = model(torch.ones(BATCH, WIDTH)).sum() * factor
            optimizer.step()
            try:
                loss.backward()
            except RuntimeError as error:
                assert "inplace" in str(error) or "in-place" in str(error)
                return "refused"
            return "made"

        self._both(use)
        self._both(lambda model, _: model.zero_grad())

    @rule(swap=st.booleans())
    def check(self, swap: bool = False) -> None:
        expected, found = self.plain_optimizer.state_dict(), self.optimizer.state_dict()
        found.pop("master", None)
        assert_same(expected, found, "optimizer")
        assert_same(dict(self.plain.state_dict()), dict(self.model.state_dict()), "weights")
        assert_same(gradients(self.plain), gradients(self.model), "gradients")
        check_table(self.tier) if not self.kept else None
        if swap:
            self.kept.clear()
            copies = copy.deepcopy(expected), copy.deepcopy(found)
            self.plain_optimizer.load_state_dict(copies[1])
            self.optimizer.load_state_dict(copies[0])

    def teardown(self) -> None:
        if hasattr(self, "kept"):
            self.kept.clear()
            Looking.confirmed += self.optimizer.stepped_in_backward
            Looking.dropped += self.optimizer._timing.ahead.provisional.drops
            self.check()
            self.tier.close()


Looking.TestCase.settings = settings(
    max_examples=examples(20, 400), stateful_step_count=examples(15, 25)
)


class TestLooking(Looking.TestCase):  # type: ignore[name-defined,misc]
    """The machine; and steps did wait in it, were made ahead and were dropped."""

    @classmethod
    def tearDownClass(cls) -> None:
        assert Looking.waited
        assert Looking.confirmed
        assert Looking.dropped


class LookingAtParts(Looking):
    """The same where every weight is stepped in parts."""

    ahead = 0

    def teardown(self) -> None:
        units = self.optimizer._units if hasattr(self, "kept") else ()
        if any(isinstance(unit, PartedUnit) for unit in units):
            LookingAtParts.ahead += self.optimizer.stepped_in_backward
        super().teardown()


LookingAtParts.TestCase.settings = settings(
    max_examples=examples(9, 400), stateful_step_count=examples(12, 25)
)


class TestLookingAtParts(LookingAtParts.TestCase):  # type: ignore[name-defined,misc]
    """The machine; and steps in parts were made ahead in it."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.stack = ExitStack()
        patch = cls.stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in (("_ALIGNED", 16), ("_LEAST", 0), ("_MOST", 0), ("_FEWER", 1 << 40)):
            patch.setattr(parts, name, value)
        patch.setattr(ModuleRuntime, "unit_limit", lambda *_: 1)

    @classmethod
    def tearDownClass(cls) -> None:
        cls.stack.close()
        assert LookingAtParts.ahead


class LookingAtPacked(Looking):
    """The same where whatever is written to a home in DRAM is packed."""

    packed = 0

    def teardown(self) -> None:
        if hasattr(self, "kept"):
            LookingAtPacked.packed += len(self.tier._manager.parts.homes.packed)
        super().teardown()


LookingAtPacked.TestCase.settings = settings(
    max_examples=examples(8, 400), stateful_step_count=examples(12, 25)
)


class TestLookingAtPacked(LookingAtPacked.TestCase):  # type: ignore[name-defined,misc]
    """The machine; and homes did lie packed in it."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.stack = ExitStack()
        cls.stack.enter_context(all_packed())

    @classmethod
    def tearDownClass(cls) -> None:
        cls.stack.close()
        assert LookingAtPacked.packed


class LookingOnBothSides(Looking):
    """The same where the host steps every second block, with the bits of a device of NumPy's."""

    there = 0
    both_sides = True


LookingOnBothSides.TestCase.settings = settings(
    max_examples=examples(6, 400), stateful_step_count=examples(12, 25)
)


@pytest.mark.skipif(isinstance(library(), str), reason=f"no loop here: {library()}")
class TestLookingOnBothSides(LookingOnBothSides.TestCase):  # type: ignore[name-defined,misc]
    """The machine; and the host did make steps ahead in it."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.stack = ExitStack()
        patch = cls.stack.enter_context(pytest.MonkeyPatch.context())
        cls.stack.enter_context(tried_shares(patch, lambda trial, _: trial.is_on))
        cls.stack.enter_context(device_of_numpy())

    @classmethod
    def tearDownClass(cls) -> None:
        cls.stack.close()
        assert LookingOnBothSides.there
