"""Random freezing, thawing, groups and errors inside the user's callbacks, against plain torch."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support_examples import examples
from support_nn import asked, assert_same, check_table, seed
from torch import nn

import tiermem

WIDTH = 8
LAYERS = 4


class Bang(Exception):
    """Raised by a callback of the user's."""


class FromHook(Bang):
    """From a hook of the optimizer's step, not from the step itself."""


class Fuse:
    """After how many parameters the optimizer's class raises, once; -1 for never."""

    left = -1

    @classmethod
    def burn(cls) -> bool:
        burnt = cls.left == 0
        cls.left -= cls.left >= 0
        return burnt


class Own(torch.optim.Optimizer):
    """Momentum by hand. Where it raises, what it has is half written."""

    def __init__(self, params: Any, lr: float = 0.01, decay: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["momentum"] = torch.zeros_like(param)
                state["step"] += 1
                state["momentum"].mul_(group["decay"]).add_(param.grad)
                param.add_(state["momentum"], alpha=-group["lr"])
                if Fuse.burn():
                    state["junk"], group["junk"] = 1, 2
                    param.mul_(3)
                    raise Bang
                param.mul_(0.999)


class Late(torch.optim.AdamW):
    """torch's own, and an error when everything is written."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if Fuse.burn():
            raise Bang
        return result


class Block(nn.Module):
    def __init__(self, tied: nn.Parameter | None) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        if tied is not None:
            self.up.weight = tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.up(x)))


class Model(nn.Module):
    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for index in range(LAYERS):
            tied = self.layers[0].up.weight if tie and index == 2 else None
            self.layers.append(Block(tied))

    def forward(self, x: torch.Tensor, skip: int = -1) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index != skip:
                x = layer(x)
        return x


def fresh(model: Any, layer: int, optimizer: torch.optim.Optimizer | None) -> list[nn.Parameter]:
    """The parameters of a layer that an optimizer does not have."""
    groups = [] if optimizer is None else optimizer.param_groups
    there = {id(p) for group in groups for p in group["params"]}
    return [p for p in model.layers[layer].parameters() if id(p) not in there]


number = st.integers(0, 1 << 20)
layers = st.integers(0, LAYERS - 1)


class Stepping(RuleBasedStateMachine):
    """Does everything to both; all bits have to agree all along."""

    @initialize(
        tie=st.booleans(),
        cls=st.sampled_from([Own, Own, Late, torch.optim.AdamW]),
        first=st.integers(1, LAYERS),
        frozen=st.sets(layers),
        overlap=st.sampled_from([False, "auto", "forward", "backward"]),
        where=st.sampled_from(["device", "device", "device", "host", "both"]),
        home=st.sampled_from(["auto", "auto", "auto", "hbm", "nvme", "weights"]),
        spare=st.sampled_from([0, 4096, 1 << 16]),
        start=number,
    )
    def begin(
        self, tie: bool, cls: Any, first: int, frozen: Any, overlap: Any, where: str, home: str,
        spare: int, start: int,
    ) -> None:  # fmt: skip
        Fuse.left = -1
        seed(start)
        self.plain = Model(tie)
        for index in frozen:
            self.plain.layers[index].requires_grad_(False)
        self.overlap = overlap
        self.folder = tempfile.mkdtemp() if home == "nvme" else None
        policy: Any = {"params": "hbm"} if home == "weights" else home
        hbm = 1 << 17 if home in ("hbm", "weights") else 1 << 15  # for what is thawed, too
        own = {} if cls is Own else {"foreach": False}
        while True:
            self.tier = tiermem.TierManager(
                device="cpu", hbm=hbm, dram=3 << 19, nvme=self.folder, policy=policy
            )
            self.model = copy.deepcopy(self.plain)
            try:
                self.tier.wrap(self.model)
                some = [p for index in range(first) for p in fresh(self.model, index, None)]
                self.optimizer = self.tier.optimizer(
                    list({id(p): p for p in some}.values()), cls, lr=0.01, overlap=overlap,
                    where=where, **own,
                )  # fmt: skip
            except tiermem.CapacityError as error:
                self.tier.close()
                hbm = asked(error)[1]
                continue
            if not spare:
                break
            self.tier.close()
            hbm, spare = hbm + spare, 0
        some = [p for index in range(first) for p in fresh(self.plain, index, None)]
        self.plain_optimizer = cls(list({id(p): p for p in some}.values()), lr=0.01, **own)
        self.dirty = False
        self.on_host = where != "device"

    def _meet_errors_of_the_host(self) -> None:
        """A step that failed there says so at the next use, whichever that is."""
        if self.on_host:
            self._tiered(self.optimizer.finish)

    def _tiered(self, use: Callable[[], Any]) -> Any:
        """Does something tiered, again where it meets with the fuse."""
        for _ in range(4):
            try:
                return use()
            except FromHook:
                raise
            except (Bang, tiermem.StepError) as error:
                if isinstance(error, tiermem.StepError) and "failed with Bang" not in str(error):
                    raise
        raise AssertionError("it fails for ever")

    def _both(self, use: Callable[[Any, Any], Any]) -> None:
        expected = use(self.plain, self.plain_optimizer)
        found = self._tiered(lambda: use(self.model, self.optimizer))
        assert_same(expected, found, "result")

    @rule(start=number, skip=st.integers(-1, LAYERS - 1), times=st.sampled_from([1, 1, 2]))
    def train(self, start: int, skip: int, times: int) -> None:
        """Forward and backward; more than one only where no step is made in between."""
        if self.overlap == "backward":
            if self.dirty:
                return
            times = 1
        for _ in range(times):

            def run(model: Any, _: Any) -> Any:
                seed(start)
                return model(torch.randn(3, WIDTH, requires_grad=True), skip)

            outputs = run(self.plain, None), self._tiered(lambda: run(self.model, None))
            assert_same(outputs[0], outputs[1], "output")
            for output in outputs:
                output.square().sum().backward()
        self.dirty = True

    @rule(
        start=number,
        index=layers,
        where=st.sampled_from(["forward", "backward", "gradient", "accumulated", "module"]),
    )
    def a_hook_raises(self, start: int, index: int, where: str) -> None:
        if self.overlap == "backward" and (where != "forward" or self.dirty):
            return
        self._meet_errors_of_the_host()

        def bang(*_: Any) -> None:
            raise Bang

        for model in (self.plain, self.model):
            layer: Any = model.layers[index]
            weight = layer.up.weight
            if where in ("gradient", "accumulated") and not weight.requires_grad:
                return
            register = {
                "forward": layer.register_forward_hook,
                "backward": layer.register_full_backward_hook,
                "module": layer.up.register_full_backward_pre_hook,
                "gradient": weight.register_hook,
                "accumulated": weight.register_post_accumulate_grad_hook,
            }[where]

            def run(model: Any = model, register: Any = register) -> bool:
                handle = register(bang)
                try:
                    seed(start)
                    model(torch.randn(3, WIDTH, requires_grad=True)).sum().backward()
                except Bang:
                    if Fuse.left < 0 or model is self.plain:
                        return True
                    raise
                finally:
                    handle.remove()
                return False

            # what is owed may raise first: then again
            kept, Fuse.left = Fuse.left, -1
            assert run()
            Fuse.left = kept
            if where != "forward":
                for param in model.parameters():
                    param.grad = None  # how much of it was made depends on nothing we promise
        if where != "forward":
            self.dirty = False

    @rule(fuse=st.integers(-1, 6), clip=st.booleans())
    def step(self, fuse: int, clip: bool) -> None:
        Fuse.left = -1
        if clip and self.overlap != "backward":
            params = [p for g in self.plain_optimizer.param_groups for p in g["params"]]
            expected = nn.utils.clip_grad_norm_(params, 0.1)
            found = self._tiered(lambda: self.optimizer.clip_grad_norm_(0.1))
            assert_same(expected, found, "norm")
        self.plain_optimizer.step()
        Fuse.left = fuse
        self._tiered(self.optimizer.step)
        self.dirty = False
        if self.overlap == "backward":
            self.clear(True)

    @rule(when=st.sampled_from(["pre", "post"]))
    def a_step_hook_raises(self, when: str) -> None:
        Fuse.left = -1
        self._meet_errors_of_the_host()
        for optimizer in (self.plain_optimizer, self.optimizer):

            def bang(*_: Any) -> None:
                raise FromHook

            register = optimizer.register_step_pre_hook
            if when == "post":
                register = optimizer.register_step_post_hook
            handle = register(bang)
            step = optimizer.step
            if optimizer is self.optimizer:  # what failed inside backward says so first
                step = partial(self._tiered, optimizer.step)
            try:
                step()
                raise AssertionError("no error")
            except FromHook:
                pass
            finally:
                handle.remove()
        if when == "post":
            self.dirty = False
            if self.overlap == "backward":
                self.clear(True)

    @rule(factor=st.sampled_from([0.5, 1.0, 2.0]), raises=st.booleans())
    def a_scheduler(self, factor: float, raises: bool) -> None:
        """New rates, or an error in the middle of setting them."""
        if self.dirty and self.overlap == "backward":
            return
        for optimizer in (self.plain_optimizer, self.optimizer):

            def rate(epoch: int) -> float:
                if raises and epoch:
                    raise Bang
                return factor

            for group in optimizer.param_groups:
                group["initial_lr"] = 0.01
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
            optimizer._opt_called = True  # type: ignore[attr-defined]
            try:
                scheduler.step()
            except Bang:
                assert raises

    @rule(none=st.booleans())
    def clear(self, none: bool) -> None:
        if self.dirty and self.overlap == "backward":
            return
        self._both(lambda _, optimizer: optimizer.zero_grad(set_to_none=none))
        self.dirty = False

    @rule(index=layers, what=st.sampled_from(["module", "weight", "bias"]), on=st.booleans())
    def freeze(self, index: int, what: str, on: bool) -> None:
        if self.dirty and self.overlap == "backward":
            return
        for model in (self.plain, self.model):
            layer = model.layers[index]

            def use(layer: Any = layer) -> None:
                if what == "module":
                    layer.requires_grad_(on)
                elif what == "weight":
                    layer.up.weight.requires_grad_(on)
                else:
                    layer.norm.bias.requires_grad = on

            self._tiered(use)

    @rule(index=layers, how=st.sampled_from(["generator", "list", "appended"]))
    def add_group(self, index: int, how: str) -> None:
        if self.dirty and self.overlap == "backward":
            return
        for model, optimizer in (
            (self.plain, self.plain_optimizer),
            (self.model, self.optimizer),
        ):
            params = fresh(model, index, optimizer)
            if not params:
                return

            def add(params: Any = params, optimizer: Any = optimizer) -> None:
                if how == "appended":
                    optimizer.param_groups[0]["params"].extend(params)
                elif how == "list":
                    optimizer.add_param_group({"params": params, "lr": 0.02})
                else:
                    optimizer.add_param_group({"params": (p for p in params)})

            self._tiered(add)

    @precondition(lambda self: not (self.overlap == "backward" and self.dirty))
    @rule(swap=st.booleans())
    def check(self, swap: bool = False) -> None:
        found = self._tiered(self.optimizer.state_dict)
        expected = self.plain_optimizer.state_dict()
        assert_same(expected, found, "optimizer")
        assert_same(dict(self.plain.state_dict()), dict(self.model.state_dict()), "weights")
        check_table(self.tier)
        ours = dict(self.model.named_parameters())
        for name, param in self.plain.named_parameters():
            mine = ours[name].grad
            assert (mine is None) == (param.grad is None), name
            if param.grad is not None and mine is not None:
                assert_same(param.grad, mine.clone(), name)
        if swap:
            copies = copy.deepcopy(expected), copy.deepcopy(found)
            self.plain_optimizer.load_state_dict(copies[1])
            self.optimizer.load_state_dict(copies[0])

    def teardown(self) -> None:
        if hasattr(self, "dirty"):
            Fuse.left = -1
            if not (self.overlap == "backward" and self.dirty):
                self.check()
            self.tier.close()
            if self.folder is not None:
                os.rmdir(self.folder)


Stepping.TestCase.settings = settings(
    max_examples=examples(15), stateful_step_count=examples(15, 25)
)
TestStepping = Stepping.TestCase
