"""State that is left by turns in programs that look at it at any moment, as plain torch."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from support_adam_kernel import faked
from support_examples import examples
from support_nn import assert_same, check_table
from torch import nn

import tiermem
from tiermem.optim.units.direct import DirectSteps

WIDTH, LAYERS = 32, 6
NBYTES = LAYERS * WIDTH * WIDTH * 4
CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
}
BY_KERNEL: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "foreach": True}),
}
CHANGES: dict[str, Any] = {
    "rate": lambda group: group.update(lr=group["lr"] * 0.5),
    "decay": lambda group: group.update(weight_decay=0.1),
    "no decay": lambda group: group.update(weight_decay=0.0),
}
WRITES: dict[str, Any] = {
    "a weight": lambda model, at: model[at].weight.data.mul_(0.5),
    "a gradient": lambda model, at: _grad(model, at, lambda g: g.mul_(0.5)),
    "a gradient is cleared": lambda model, at: setattr(model[at].weight, "grad", None),
    "a gradient is given": lambda model, at: setattr(
        model[at].weight, "grad", torch.ones(WIDTH, WIDTH)
    ),
    "clipped": lambda model, at: nn.utils.clip_grad_norm_(model.parameters(), 10.0 ** (at - 3)),
}
INSIDE = ("", "", "", "dropped", "dropped midway", "no room in HBM", "a home needs room")


def _grad(model: Any, at: int, use: Any) -> None:
    gradient = model[at].weight.grad
    if gradient is not None:
        use(gradient)


def layers(start: int) -> nn.Module:
    torch.manual_seed(start)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


class Late(RuleBasedStateMachine):
    """Does everything to both loops; whatever the program sees has to agree."""

    left = drops = 0
    classes = CLASSES

    @initialize(
        kind=st.runner().flatmap(lambda machine: st.sampled_from(sorted(machine.classes))),
        start=st.integers(0, 1000),
        dram=st.sampled_from([7, 9, 20]),
        share=st.sampled_from([1.0, 1.0, 0.5]),
    )
    def begin(self, kind: str, start: int, dram: int, share: float) -> None:
        cls, given = self.classes[kind]
        self.plain = layers(start)
        self.own = cls(self.plain.parameters(), **given)
        self.tier = tiermem.TierManager(
            "cpu", hbm=NBYTES + 3 * WIDTH * WIDTH * 4, dram=dram * NBYTES
        )
        self.model = self.tier.wrap(layers(start))
        self.optimizer = self.tier.optimizer(self.model, cls, **given)
        self.ahead = self.optimizer._timing.ahead
        self.ahead.late.share = share
        self.inside: list[str] = []
        self.make = self.ahead._make_one
        self.ahead._make_one = self._made
        for _ in range(2):
            self.rounds(1, "after", [])

    def _made(self, unit: Any, made: Any, keep: Any) -> None:
        """Makes a step ahead, or has it dropped or fail in the middle."""
        what = self.inside.pop(0) if self.inside else ""
        if what == "no room in HBM":
            raise tiermem.CapacityError(what)
        self.make(unit, made, partial(self._keep, keep, what))
        if what == "dropped":
            self.ahead.provisional.drop()

    def _keep(self, keep: Any, what: str, blocks: Any) -> None:
        keep(blocks)
        if what == "dropped midway":
            self.ahead.provisional.drop()
        if what == "a home needs room":
            self.tier._manager.parts.homes._reclaim()

    def both(self, use: Any) -> None:
        assert_same(use(self.plain, self.own), use(self.model, self.optimizer), "result")

    @rule(
        times=st.integers(1, 4),
        clear=st.sampled_from(["after", "after", "before", "to zero", "never"]),
        inside=st.lists(st.sampled_from(INSIDE), max_size=2 * LAYERS),
    )
    def rounds(self, times: int, clear: str, inside: list[str]) -> None:
        self.inside[:] = inside
        for _ in range(times):
            number = torch.randint(1 << 30, ()).item()

            def use(model: Any, optimizer: Any, number: int = number) -> Any:
                x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number))
                if clear == "before":
                    optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                if clear in ("after", "to zero"):
                    optimizer.zero_grad(set_to_none=clear == "after")
                return loss.detach()

            self.both(use)

    @rule(at=st.integers(0, LAYERS - 1), what=st.sampled_from(sorted(WRITES)), then=st.booleans())
    def write(self, at: int, what: str, then: bool) -> None:
        """Between a backward and its step, or after it."""

        def use(model: Any, optimizer: Any) -> None:
            if then:
                model(torch.ones(1, WIDTH)).square().mean().backward()
            WRITES[what](model, at)
            if then:
                optimizer.step()

        self.both(use)

    @rule(what=st.sampled_from(sorted(CHANGES)))
    def change(self, what: str) -> None:
        self.both(lambda _, optimizer: CHANGES[what](optimizer.param_groups[0]))

    @rule()
    def drop(self) -> None:
        self.ahead.settle()

    @rule()
    def room_is_needed(self) -> None:
        self.tier._manager.parts.homes._reclaim()

    @rule(at=st.integers(0, LAYERS - 1))
    def freeze(self, at: int) -> None:
        """A part that has no gradient for a while."""

        def use(model: Any, optimizer: Any) -> None:
            optimizer.zero_grad()
            model[at].weight.requires_grad_(not model[at].weight.requires_grad)

        self.both(use)

    @rule()
    def evaluate(self) -> None:
        with torch.no_grad():
            self.both(lambda model, _: model(torch.ones(2, WIDTH)))

    @rule(load=st.booleans())
    def check(self, load: bool) -> None:
        expected, found = self.own.state_dict(), self.optimizer.state_dict()
        assert_same(expected["state"], found["state"], "state")
        assert_same(dict(self.plain.state_dict()), dict(self.model.state_dict()), "weights")
        grads = [[p.grad for p in model.parameters()] for model in (self.plain, self.model)]
        assert_same(*[[None if g is None else g * 1 for g in some] for some in grads], "gradients")
        check_table(self.tier)
        if load:
            self.own.load_state_dict(copy.deepcopy(expected))
            self.optimizer.load_state_dict(copy.deepcopy(found))

    def teardown(self) -> None:
        if hasattr(self, "inside"):
            type(self).left += self.ahead.provisional.left
            type(self).drops += self.ahead.provisional.drops
            self.check(load=False)
            self.optimizer.close()
            rows = self.tier.residency()
            assert not [row for row in rows if row.block.endswith(" before")]
            self.tier.close()


class LateByKernel(Late):
    """The same with steps that the (fake) kernel of Adam makes where the tensors lie."""

    left = drops = direct = updated = 0
    classes = BY_KERNEL

    def __init__(self) -> None:
        super().__init__()
        self.open = ExitStack()
        self.open.enter_context(faked())
        patch = self.open.enter_context(pytest.MonkeyPatch.context())
        make, update = DirectSteps.make, DirectSteps.update_state

        def made(*given: Any) -> bool:
            done = make(*given)
            LateByKernel.direct += done
            return done

        def updated(*given: Any) -> bool:
            done = update(*given)
            LateByKernel.updated += done
            return done

        patch.setattr(DirectSteps, "make", made)
        patch.setattr(DirectSteps, "update_state", updated)

    def teardown(self) -> None:
        super().teardown()
        self.open.close()


Late.TestCase.settings = settings(
    max_examples=examples(20, 400), stateful_step_count=examples(15, 25)
)


class TestLate(Late.TestCase):  # type: ignore[name-defined,misc]
    """The machine; and state was left in it, and steps were dropped."""

    @classmethod
    def tearDownClass(cls) -> None:
        assert Late.left
        assert Late.drops


LateByKernel.TestCase.settings = Late.TestCase.settings


class TestLateByKernel(LateByKernel.TestCase):  # type: ignore[name-defined,misc]
    """The same; and steps and updates of the state were made directly."""

    @classmethod
    def tearDownClass(cls) -> None:
        assert LateByKernel.direct
        assert LateByKernel.updated
        assert LateByKernel.drops
