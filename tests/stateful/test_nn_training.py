"""Random models, budgets, policies and orders of operations, against the plain model."""

from __future__ import annotations

import copy
import os
import tempfile
from contextlib import suppress
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from support_classes import Counting, CountingInPlace, Noisy
from support_coded import CodedMomentum
from support_examples import examples
from support_nn import asked, assert_same, check_table, same_bits, seed
from support_process import child
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import tiermem

WIDTH = 8
KINDS = (
    "linear",
    "norm",
    "attention",
    "conv",
    "gru",
    "lstm",
    "encoder",
    "nested",
    "function",
    "hooked",
    "twice",
    "tied",
    "masked",
    "outside",
    "frozen",
)


class Stop(Exception):
    """Raised in the middle of a pass."""


class Masked(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-0.4, 0.4)
        return super().forward(x)


class Scale(torch.autograd.Function):
    """Multiplies by a weight, and saves the weight itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


HOOKS: dict[str, Any] = {
    "keep": (lambda t: t, lambda t: t),
    "clone": (lambda t: t.detach().clone(), lambda t: t),
    "change": (lambda t: t.half() if t.is_floating_point() else t, lambda t: _widened(t)),
}

COPYING = ("clone", "change")  # what autograd saves under these shares no memory with a weight


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


class Layer(nn.Module):
    """One of several kinds, with a trap that can be set."""

    def __init__(self, kind: str, mode: str, first: Layer | None) -> None:
        super().__init__()
        self.kind, self.mode = kind, mode
        self.trap = ""
        self.net: nn.Module = nn.Linear(WIDTH, WIDTH)
        if kind == "norm":
            self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        elif kind == "attention":
            self.net = nn.MultiheadAttention(WIDTH, 2, batch_first=True, dropout=0.1)
        elif kind == "conv":
            self.net = nn.Conv1d(1, 1, 3, padding=1)
        elif kind == "gru":
            self.net = nn.GRU(WIDTH, WIDTH, batch_first=True)
        elif kind == "lstm":
            self.net = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        elif kind == "encoder":
            self.net = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.1, batch_first=True)
        elif kind == "nested":
            inner = nn.Sequential(nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH))
            self.net = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), inner)
        elif kind in ("function", "hooked"):
            self.net = nn.LayerNorm(WIDTH)
        elif kind == "masked":
            self.net = Masked(WIDTH, WIDTH)
        elif kind == "tied" and first is not None and isinstance(first.net, nn.Linear):
            self.net.weight = first.net.weight  # type: ignore[union-attr]
        elif kind == "frozen":
            self.net.requires_grad_(False)
        if kind == "outside":
            self.scale = nn.Parameter(torch.randn(WIDTH))
            self.register_buffer("seen", torch.zeros(WIDTH))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        if self.trap == "forward":
            raise Stop
        if self.kind == "attention":
            x = self.net(x[:, None], x[:, None], x[:, None])[0][:, 0]
        elif self.kind in ("gru", "lstm"):
            x = self.net(x[:, None])[0][:, 0]
        elif self.kind == "encoder":
            x = self.net(x[:, None])[:, 0]
        elif self.kind == "function":
            x = Scale.apply(self.net(x), self.net.weight)
        elif self.kind == "hooked":
            with saved_tensors_hooks(*HOOKS["keep"]):
                x = nn.functional.layer_norm(x, (WIDTH,), self.net.weight, self.net.bias)
        elif self.kind == "conv":
            x = self.net(x[:, None])[:, 0]
        elif self.kind == "outside":
            if self.training:
                self.seen = self.seen * 0.5 + x.detach().mean(0)
            x = nn.functional.linear(x, self.net.weight * self.scale, self.net.bias) + self.seen
        else:
            x = self.net(x)
            if self.kind == "twice":
                x = self.net(torch.tanh(x))
        if self.trap == "backward" and x.requires_grad:
            x.register_hook(_stop)
        return torch.tanh(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mode == "plain" or not torch.is_grad_enabled():
            return self.run(x)
        return checkpoint(self.run, x, use_reentrant=self.mode == "reentrant")


def _stop(gradient: torch.Tensor) -> None:
    raise Stop


class Model(nn.Module):
    def __init__(self, kinds: list[tuple[str, str]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for kind, mode in kinds:
            self.layers.append(Layer(kind, mode, self.layers[0] if len(self.layers) else None))

    def forward(self, x: torch.Tensor, skip: int = -1) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index != skip:
                x = x + layer(x)
            if layer.kind == "function":
                x = Scale.apply(x, layer.net.weight)  # of a child that is not held now
        return x


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.05}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.Adagrad, {"lr": 0.01}),
    (torch.optim.Rprop, {"lr": 0.01}),
    (Counting, {"lr": 0.05}),
    (CountingInPlace, {"lr": 0.05}),
    (CodedMomentum, {"lr": 0.05}),
    (Noisy, {"lr": 0.01}),
]
ROLES = ("params", "grads", "master", "optimizer", "activations")
HOMES = ("hbm", "dram", "nvme", "auto")
number = st.integers(0, 1 << 20)


class Training(RuleBasedStateMachine):
    """Does everything to both models; all bits have to agree all along."""

    @initialize(
        kinds=st.lists(
            st.tuples(
                st.sampled_from(KINDS), st.sampled_from(["plain", "plain", "not", "reentrant"])
            ),
            min_size=1,
            max_size=5,
        ),
        optimizer=st.sampled_from(OPTIMIZERS),
        disk=st.booleans(),
        homes=st.lists(st.sampled_from(HOMES), min_size=len(ROLES), max_size=len(ROLES)),
        spare=st.sampled_from([0, 0, 4096, 1 << 16]),
        depth=st.sampled_from(["auto", 0, 1, 3]),
        start=number,
    )
    def begin(
        self, kinds: Any, optimizer: Any, disk: bool, homes: Any, spare: int, depth: Any, start: int
    ) -> None:
        seed(start)
        self.plain, self.plain_other = Model(kinds), Model(kinds[:2])
        # the plain and the tiered output, and whether the tiered graph holds copies alone
        self.pending: list[tuple[torch.Tensor, torch.Tensor, bool]] = []
        self.folder = tempfile.mkdtemp() if disk else None
        self.model, self.other = copy.deepcopy(self.plain), copy.deepcopy(self.plain_other)
        self.entered = False
        self.has_forked = False
        self.trains = optimizer
        self._open(homes, spare, depth)
        self.plain_optimizer = optimizer[0](self.plain.parameters(), **optimizer[1])

    def _open(self, homes: Any, spare: int, depth: Any) -> None:
        """Wraps the models in a manager with little more HBM than the least."""
        policy = {
            role: "auto" if home == "nvme" and not self.folder else home
            for role, home in zip(ROLES, homes, strict=True)
        }
        hbm, self.optimizer, tried = 4096, None, False
        models = self.model, self.other
        while True:
            self.tier = tiermem.TierManager(
                device="cpu", hbm=hbm, dram=3 << 19, nvme=self.folder, policy=policy,
                prefetch_depth=depth, activation_min=64,
            )  # fmt: skip
            # what a model gets before the budget is known does not count: that is tried on copies
            self.model, self.other = models if tried else copy.deepcopy(models)
            try:
                self.tier.wrap(self.model)
                self.tier.wrap(self.other)
                cls, options = self.trains
                self.optimizer = self.tier.optimizer(self.model, cls, **options)
                if not tried:
                    self._try()
            except tiermem.CapacityError as error:
                self.tier.close()
                hbm = asked(error)[1]
                continue
            if tried and not spare:
                break
            self.tier.close()
            hbm, spare, tried = hbm + spare, 0, True

    def _try(self) -> None:
        """Does what needs most HBM, so that what is missing is asked for before it counts."""
        nets = (self.model, self.model, self.other)
        outputs = [net(torch.randn(3, WIDTH, requires_grad=True)) for net in nets]
        for output in outputs:
            with suppress(RuntimeError):  # nothing is trained, or a masked weight was changed
                output.square().sum().backward()
        if self.optimizer is not None:
            self.optimizer.step()

    def _both(self, use: Any, start: int = 0) -> Any:
        results = []
        for model, optimizer in (
            (self.plain, self.plain_optimizer),
            (self.model, self.optimizer),
        ):
            seed(start)
            results.append(use(model, optimizer))
        assert_same(results[0], results[1], "result")
        return results

    @rule(start=number, skip=st.integers(-1, 4), train=st.booleans())
    def forward(self, start: int, skip: int, train: bool) -> None:
        def run(model: Any, optimizer: Any) -> Any:
            model.train(train)
            return model(torch.randn(3, WIDTH, requires_grad=True), skip)

        outputs = self._both(run, start)
        if len(self.pending) < 2 and outputs[0].requires_grad:
            self.pending.append((outputs[0], outputs[1], False))

    @rule(start=number, how=st.sampled_from(["call", "no_grad", "backward"]))
    def call_the_other_model(self, start: int, how: str) -> None:
        results = []
        for other in (self.plain_other, self.other):
            seed(start)
            with torch.set_grad_enabled(how != "no_grad"):
                output = other(torch.randn(3, WIDTH, requires_grad=True))
            if how == "backward":
                output.square().sum().backward()
            results.append(output)
        assert_same(results[0], results[1], "the other model")
        if how == "call" and len(self.pending) < 2:
            self.pending.append((results[0], results[1], False))

    @rule(start=number, how=st.sampled_from([*HOOKS, "reentrant", "not"]))
    def forward_inside_hooks_or_a_checkpoint(self, start: int, how: str) -> None:
        def run(model: Any, optimizer: Any) -> Any:
            x = torch.randn(3, WIDTH, requires_grad=True)
            if how not in HOOKS:
                return checkpoint(model, x, use_reentrant=how == "reentrant")
            with saved_tensors_hooks(*HOOKS[how]):
                return model(x)

        outputs = self._both(run, start)
        frozen = not any(param.requires_grad for param in self.plain.parameters())
        if len(self.pending) < 2:
            self.pending.append((outputs[0], outputs[1], frozen and how in COPYING))

    @rule(start=number, index=st.integers(0, 4))
    def use_a_weight_outside(self, start: int, index: int) -> None:
        results = []
        for model in (self.plain, self.model):
            seed(start)
            x = torch.randn(3, WIDTH, requires_grad=True)
            vectors = [p for p in model.parameters() if p.shape == (WIDTH,)]
            if not vectors:
                return
            weight = vectors[index % len(vectors)]
            results.append(Scale.apply(x * weight, weight))
        assert_same(results[0], results[1], "a weight outside")
        if len(self.pending) < 2:
            self.pending.append((results[0], results[1], False))

    @rule(start=number, inference=st.booleans())
    def evaluate(self, start: int, inference: bool) -> None:
        def run(model: Any, optimizer: Any) -> Any:
            model.eval()
            with torch.inference_mode() if inference else torch.no_grad():
                return model(torch.randn(3, WIDTH)).tolist()

        self._both(run, start)

    @precondition(lambda self: self.pending)
    @rule(first=st.booleans(), retain=st.booleans(), start=number)
    def backward(self, first: bool, retain: bool, start: int) -> None:
        plain, tiered, _ = self.pending.pop(0 if first else -1)
        outcomes = []
        for output in (plain, tiered):
            seed(start)
            try:
                output.square().sum().backward(retain_graph=retain)
                outcomes.append("")
            except RuntimeError as error:
                outcomes.append(type(error).__name__)
        assert outcomes[0] == outcomes[1], outcomes

    @rule(start=number, where=st.sampled_from(["forward", "backward"]), index=st.integers(0, 4))
    def interrupted(self, start: int, where: str, index: int) -> None:
        self.pending.clear()

        def run(model: Any, optimizer: Any) -> str:
            layer = model.layers[index % len(model.layers)]
            layer.trap = where
            try:
                model(torch.randn(3, WIDTH, requires_grad=True)).sum().backward()
            except Stop:
                return "stopped"
            finally:
                layer.trap = ""
                for p in model.parameters():
                    p.grad = None  # how much of it was made depends on nothing we promise
            return "went through"

        self._both(run, start)

    @precondition(lambda self: self.optimizer is not None)
    @rule(clip=st.booleans())
    def step(self, clip: bool) -> None:
        def run(model: Any, optimizer: Any) -> Any:
            total = None
            if clip and isinstance(optimizer, tiermem.TieredOptimizer):
                total = optimizer.clip_grad_norm_(0.1)
            elif clip:
                total = nn.utils.clip_grad_norm_(
                    [p for g in optimizer.param_groups for p in g["params"]], 0.1
                )
            optimizer.step()
            return total

        self._both(run)

    @rule(how=st.sampled_from(["none", "zero", "optimizer", "module", "by hand", "halved"]))
    def clear(self, how: str) -> None:
        def run(model: Any, optimizer: Any) -> None:
            if how in ("none", "zero") and optimizer is not None:
                optimizer.zero_grad(set_to_none=how == "none")
            elif how in ("optimizer", "module"):
                model.zero_grad()
            else:
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad.zero_() if how == "by hand" else p.grad.mul_(0.5)

        self._both(run)

    @rule(how=st.sampled_from(["data", "no_grad", "state"]), factor=st.sampled_from([0.5, -1.0]))
    def edit_outside(self, how: str, factor: float) -> None:
        self.pending.clear()

        def run(model: Any, optimizer: Any) -> None:
            if how == "state":
                model.load_state_dict({k: v * factor for k, v in model.state_dict().items()})
                return
            for p in model.parameters():
                if how == "data":
                    p.data.mul_(factor)
                else:
                    with torch.no_grad():
                        p.mul_(factor)

        self._both(run)

    @rule(index=st.integers(0, 4), start=number)
    def materialize(self, index: int, start: int) -> None:
        self.pending.clear()
        layer = self.model.layers[index % len(self.model.layers)]
        with self.tier.materialize(layer):
            for model in (self.plain, self.model):
                seed(start)
                for p in model.layers[index % len(model.layers)].parameters():
                    p.data.add_(torch.randn(p.shape), alpha=0.1)
                    if p.grad is not None:
                        p.grad.mul_(2)

    @precondition(lambda self: self.optimizer is not None)
    @rule(swap=st.booleans())
    def optimizer_state(self, swap: bool) -> None:
        states = [copy.deepcopy(o.state_dict()) for o in (self.plain_optimizer, self.optimizer)]
        assert_same(states[0], states[1], "optimizer state")
        if swap:
            self.plain_optimizer.load_state_dict(states[1])
            self.optimizer.load_state_dict(states[0])

    @precondition(lambda self: not self.has_forked)
    @rule(how=st.sampled_from(["touched", "run", "backward", "forgotten"]))
    def in_a_forked_child(self, how: str) -> None:
        """There everything is refused, nothing crashes, and the parent goes on."""
        self.has_forked = True  # once is enough: a fork takes longer than all the rest
        assert child(lambda: self._inside(how)) == 0

    def _inside(self, how: str) -> None:
        uses: list[Any] = []
        if how == "touched":
            uses = [param.sum for param in self.model.parameters()]
            uses += [self.model.state_dict, self.optimizer and self.optimizer.step]
        elif how == "run":
            uses = [lambda: self.model(torch.randn(3, WIDTH))]
        elif how == "backward":
            # a graph of copies alone needs nothing of the tiers, and is the child's to run
            uses = [output.sum().backward for _, output, copies in self.pending if not copies]
        elif how == "forgotten":
            self.pending.clear()
            del self.tier, self.model, self.optimizer
        for use in filter(None, uses):
            try:
                use()
            except tiermem.ClosedError as error:
                assert "forked child" in str(error)
            else:
                raise AssertionError(f"{use} was not refused")

    @rule()
    def copied(self) -> None:
        twin = copy.deepcopy(self.model)
        assert_same(dict(self.plain.state_dict()), dict(twin.state_dict()), "copy")

    @rule()
    def unwrapped_and_wrapped_again(self) -> None:
        if self.optimizer is not None or self.pending:
            return
        self.tier.unwrap(self.model)
        self._agree()
        self.tier.wrap(self.model)

    @precondition(lambda self: not self.entered)  # it takes as long as many others
    @rule(
        how=st.sampled_from(["close", "with", "error", "unwrap"]),
        homes=st.lists(st.sampled_from(HOMES), min_size=len(ROLES), max_size=len(ROLES)),
        spare=st.sampled_from([0, 4096, 1 << 16]),
        depth=st.sampled_from(["auto", 0, 1]),
    )
    def left_and_entered_again(self, how: str, homes: Any, spare: int, depth: Any) -> None:
        """The model leaves one manager, is an ordinary one, and goes on in the next."""
        self.pending.clear()
        self.entered = True
        state = None if self.optimizer is None else self.optimizer.state_dict()
        if how == "error":
            with suppress(Stop), self.tier:
                raise Stop
        elif how == "with":
            with self.tier:
                pass
        else:
            if how == "unwrap":
                self.tier.unwrap(self.model)
            self.tier.close()
        assert self.tier.closed
        kinds = {type(t) for t in (*self.model.parameters(), *self.model.buffers())}
        assert kinds <= {nn.Parameter, torch.Tensor}, kinds
        self._agree()
        self._open(homes, spare, depth)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state)

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "plain"):
            self._agree()
            check_table(self.tier)

    def _agree(self) -> None:
        for plain, model in ((self.plain, self.model), (self.plain_other, self.other)):
            self._agree_on(plain, model)

    def _agree_on(self, plain: nn.Module, model: nn.Module) -> None:
        assert_same(dict(plain.state_dict()), dict(model.state_dict()), "state")
        ours = dict(model.named_parameters())
        for name, param in plain.named_parameters():
            mine = ours[name].grad
            assert (mine is None) == (param.grad is None), name
            if param.grad is not None and mine is not None:
                assert same_bits(param.grad, mine.clone()), f"{name}.grad"

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.pending.clear()
            self.tier.close()
            if self.folder is not None:
                assert os.listdir(self.folder) == []
                os.rmdir(self.folder)


Training.TestCase.settings = settings(
    max_examples=examples(14),
    stateful_step_count=25,
)
TestTraining = Training.TestCase
