"""Training of models that are in HBM as a whole: graphs and gradients are left to torch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_nn import same_bits
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem.nn.passes.leftout import left_out
from tiermem.nn.tensors.lazy import LazyTensor
from tiermem.nn.wrap.bypass import Bypass
from tiermem.optim.units.foreign import ForeignWrites
from tiermem.runtime.memory.slots import Slot

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
WIDTH, LAYERS = 8, 3
X = torch.linspace(-1.0, 1.0, 2 * WIDTH * 5).reshape(2, WIDTH, 5)


class Layer(nn.Module):
    """A layer of which autograd saves parameters themselves, and views of others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.up, self.down = nn.Linear(5, 4 * WIDTH), nn.Linear(4 * WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.conv(self.norm(x))).tanh())


class Model(nn.Module):
    """Layers, parts of which may be computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(5, 3)
        self.again: bool | None = None  # whether with reentrant checkpoints
        self.seen: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if self.again is None or number != 1:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.again)
            self.seen = x if number == 1 else self.seen
        return self.head(x)


def crowd(tier: tiermem.TierManager) -> nn.Module:
    """Makes HBM too small, and uses all of it; returns the model that does."""
    torch.manual_seed(3)
    capacity = tier._manager.parts.table.hbm.capacity
    width = 256 if capacity > 1 << 20 else 64  # a thousand layers would take long
    layers = -(-capacity // (width * width * 4))
    other = tier.wrap(nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))))
    use(other)
    return other


def use(other: Any) -> None:
    with torch.no_grad():
        for _ in range(2):
            other(torch.ones(1, other[0].in_features))


def same_gradients(model: nn.Module, plain: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert same_bits(mine.grad, theirs.grad)


def all_in_tiers(model: nn.Module) -> bool:
    return all(isinstance(p.grad, LazyTensor) for p in model.parameters())


def any_in_tiers(model: nn.Module) -> bool:
    return any(isinstance(p.grad, LazyTensor) for p in model.parameters())


class Pair:
    """A resident model and its twin in the tiers, each with an optimizer."""

    def __init__(
        self,
        hbm: str = "16MiB",
        make: type[Model] = Model,
        cls: type[torch.optim.Optimizer] = torch.optim.AdamW,
        resident: Any = "auto",
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.plain: Any = make()
        self.model: Any = deepcopy(self.plain)
        self.tier = tiermem.TierManager("cpu", hbm=hbm, dram="32MiB")
        self.tier.wrap(self.model, resident=resident)
        (one,) = self.tier._runtime.models.values()
        self.bypass = one.bypass
        self.both = self.plain, self.model
        self.optimizers = [
            cls(self.plain.parameters(), lr=0.01),  # type: ignore[call-arg]
            self.tier.optimizer(self.model, cls, lr=0.01, **options),
        ]

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.tier.close(discard=True)

    def train(self, steps: int, *, kept: bool = True) -> None:
        for _ in range(steps):
            for one, optimizer in zip(self.both, self.optimizers, strict=True):
                optimizer.zero_grad()
                one(X).square().mean().backward()
                optimizer.step()
        self.check(kept=kept)

    def check(self, *, kept: bool = True) -> None:
        """Compares weights, and gradients where steps have ``kept`` them."""
        want = dict(self.plain.named_parameters())
        for group in self.groups():  # not through the parameters: that puts interceptors back
            values = self.tier._manager.read(group.block)
            for entry in group.entries:
                assert same_bits(values[entry.index], want[entry.name].detach()), entry.name
        pairs = zip(self.model.parameters(), self.plain.parameters(), strict=True)
        for mine, theirs in pairs if kept else ():
            assert (mine.grad is None) == (theirs.grad is None)
            assert mine.grad is None or same_bits(mine.grad, theirs.grad)

    def crowd(self) -> nn.Module:
        """Makes HBM too small, and uses all of it; returns the model that does."""
        return crowd(self.tier)

    def blocks_in_hbm(self) -> int:
        """Of how many blocks of the model's weights the bytes are in HBM."""
        groups = [g for g in self.tier._runtime.groups if g.entries and g in self.groups()]
        return sum(group.record.usable for group in groups)

    def groups(self) -> list[Any]:
        (first, *_) = self.tier._runtime.models.values()
        return list(first.groups)


def intercepted(model: nn.Module) -> int:
    return sum("_call_impl" in module.__dict__ for module in model.modules())


def entered(pair: Pair) -> None:
    """Trains until graphs and gradients are left to torch."""
    before = intercepted(pair.model)
    pair.train(4)
    assert pair.bypass.active
    assert intercepted(pair.model) < before / 2
    assert not any_in_tiers(pair.model)


def test_steps_of_a_model_that_fits_are_as_without_tiers() -> None:
    with Pair() as pair:
        pair.train(1)
        assert any_in_tiers(pair.model)
        entered(pair)
        packed: list[object] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pair.tier._runtime.saved, "_reference", packed.append)
            pair.train(3)
        assert not packed
        assert not any(group.holds for group in pair.tier._runtime.groups)


def test_a_model_that_does_not_fit_keeps_its_hooks() -> None:
    with Pair("40KiB") as pair:
        pair.train(6)
        assert not pair.bypass.active
        assert all_in_tiers(pair.model)


def test_gradients_have_room_beside_or_stay_in_the_tiers() -> None:
    with Pair() as pair:
        needed = pair.tier._manager.parts.table.nbytes
    with Pair(str(needed + 16384)) as pair:
        pair.train(2)  # gradients have homes now
        assert pair.tier._manager.parts.table.all_fit
        pair.train(4)
        assert pair.bypass.active
        assert all_in_tiers(pair.model)


def test_what_gradients_took_in_the_tiers_is_given_back_once_they_are_left() -> None:
    with Pair() as pair:
        parts = pair.tier._manager.parts
        gaps: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            inner = type(parts.limit).trim
            patch.setattr(type(parts.limit), "trim", lambda self: gaps.append(inner(self)))
            pair.train(8)
        assert len(gaps) == 1
        used = sum(row.nbytes for row in pair.tier.residency() if row.tiers["hbm"] != "absent")
        assert parts.slots.arena.mapped < used + 2 * parts.slots.arena.chunk


def test_gradients_that_are_left_stay_so_where_they_themselves_have_lessened_hbm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Pair() as pair:
        entered(pair)
        monkeypatch.setattr(Bypass, "_gradients", lambda _self, new=False: 0 if new else 1 << 40)
        pair.train(2)
        assert not any_in_tiers(pair.model)
        pair.tier._runtime.backward.incoming.left = 0
        pair.train(4)
        assert pair.bypass.active
        assert all_in_tiers(pair.model)


class Partly(Model):
    """Has a head that is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(5, 256)
        self.uses_other = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        return self.other(found.repeat(1, 1, 2)[..., :5]) if self.uses_other else found


def test_what_is_not_used_may_be_away() -> None:
    with Pair(make=Partly) as pair:
        pair.train(5)
        assert pair.bypass.active
        assert pair.blocks_in_hbm() < len(pair.groups())
        for one in pair.both:
            one.uses_other = True
        pair.train(1)
        assert not pair.bypass.active
        pair.train(4)
        assert pair.bypass.active


def test_steps_without_state_are_not_made_in_backward_where_all_fits() -> None:
    with Pair(cls=torch.optim.SGD) as pair:
        entered(pair)
        pair.train(4)
        assert pair.bypass.active
        assert not pair.optimizers[1].stepped_in_backward


def test_weights_alone_that_fit_are_not_given_to_graphs() -> None:
    """Gradients to come need room that a graph would not give."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    model = deepcopy(plain)
    x = torch.linspace(-1.0, 1.0, 128).reshape(2, 64).requires_grad_()  # so all weights are saved
    with tiermem.TierManager("cpu", hbm="164KiB", dram="1MiB") as tier:
        tier.wrap(model)
        assert tier._manager.parts.table.all_fit
        for _ in range(5):
            want, got = plain(x), model(x)
            assert same_bits(want, got)
        for loss in (want, got):
            loss.sum().backward(retain_graph=True)
            loss.sum().backward()
        same_gradients(model, plain)


@pytest.mark.parametrize("frozen", ["", "conv", "norm", "up"])
@pytest.mark.parametrize("hidden", [False, True])
def test_what_a_graph_has_saved_stays_where_it_is(frozen: str, hidden: bool) -> None:
    with Pair() as pair:
        for one in pair.both:
            for name, param in one.named_parameters():
                param.requires_grad_(not frozen or frozen not in name)
        entered(pair)
        kept = []
        for one in pair.both:
            one.zero_grad()
            out = one(X)
            kept.append(one.seen if hidden else out)  # of the other nothing is left
        del out
        for one in pair.both:
            one.seen = None
        other = pair.crowd()
        assert pair.blocks_in_hbm() > 0
        for loss in kept:
            loss.square().sum().backward()
        pair.check()
        del loss, kept
        use(other)
        assert pair.blocks_in_hbm() < len(pair.groups())
        pair.train(2)
        assert not pair.bypass.active


class Kernels(nn.Module):
    """A model of whose weights autograd saves no views."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Sequential(*(nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(3)))

    @torch.enable_grad()
    def forward(self, x: torch.Tensor) -> Any:
        return self.all(x)


def test_a_graph_that_comes_where_gradients_are_off() -> None:
    torch.manual_seed(0)
    plain = Kernels()
    model = deepcopy(plain)
    with tiermem.TierManager("cpu", hbm="256KiB", dram="4MiB") as tier:
        tier.wrap(model)
        with torch.no_grad():
            for _ in range(4):
                outs = [one(X) for one in (plain, model)]
        (one,) = tier._runtime.models.values()
        assert one.bypass.active
        crowd(tier)
        for out in outs:
            out.square().sum().backward()
        same_gradients(model, plain)


@pytest.mark.parametrize("before", [False, True])
def test_a_model_that_is_wrapped_while_a_graph_lives(before: bool) -> None:
    """The graph has its parameters; with ``before``, from a time when it was wrapped as well."""
    torch.manual_seed(0)
    plain = Kernels()
    model = deepcopy(plain)
    with tiermem.TierManager("cpu", hbm="256KiB", dram="4MiB") as tier:
        if before:
            tier.wrap(model)
            for _ in range(4):
                model(X)
            (one,) = tier._runtime.models.values()
            assert one.bypass.active
        losses = [one(X).square().sum() for one in (plain, model)]
        if before:
            tier.unwrap(model)
        tier.wrap(model)
        crowd(tier)
        for loss in losses:
            loss.backward()
        same_gradients(model, plain)


@pytest.mark.parametrize("direct", [False, True])
def test_a_graph_made_while_parameters_are_ordinary(direct: bool) -> None:
    with Pair() as pair:
        entered(pair)
        losses = []
        for one in pair.both:
            one.zero_grad()
            with nullcontext() if one is pair.plain else pair.tier.materialize(one):
                loss = one(X).square().mean()
                if direct:
                    loss = sum(((p * p.abs()).sum() for p in one.parameters()), start=loss)
            losses.append(loss)
            one.seen = None
        other = pair.crowd()
        for loss in losses:
            loss.backward()
        pair.check()
        del loss, losses
        use(other)
        assert pair.blocks_in_hbm() < len(pair.groups())
        pair.train(2)


def test_a_graph_outlives_an_exception_anywhere() -> None:
    """Whatever uses the manager next puts everything in order."""
    with Pair() as pair:
        entered(pair)
        losses = []
        for one in pair.both:
            one.zero_grad()
            losses.append(one(X).square().mean())
        gate = pair.tier._manager.gate
        gate.torn = gate.unsure = True  # as Ctrl-C at a line of tiermem's leaves it
        pair.crowd()
        for loss in losses:
            loss.backward()
        pair.check()
        pair.train(2)


@pytest.mark.parametrize("views", [False, True])
def test_a_graph_from_before_a_load_is_refused(views: bool, tmp_path: Path) -> None:
    """As it is where ``load_state_dict`` writes the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)) if views else Kernels()
    with tiermem.TierManager("cpu", hbm="256KiB", dram="4MiB") as tier:
        tier.wrap(model)
        tier.save(tmp_path / "run")
        for _ in range(4):
            loss = model(X).square().sum()
        (one,) = tier._runtime.models.values()
        assert one.bypass.active
        tier.load(tmp_path / "run")
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_slot_is_let_go_with_the_last_graph() -> None:
    with Pair() as pair:
        entered(pair)
        group = next(g for g in pair.groups() if any("norm" in e.name for e in g.entries))
        slot: Slot = pair.tier._manager.parts.slots.current[group.block.id]
        out = pair.model(X)
        assert slot.saved and slot.is_saved()
        del out
        pair.model.seen = None
        assert not slot.is_saved() and not slot.saved
        loss = pair.model(X).sum()
        assert slot.is_saved()
        loss.backward()
        pair.model.seen = None
        assert not slot.is_saved()  # though the nodes are there that accumulate
        seen: list[bool] = []
        handle = pair.model.layers[0].register_forward_pre_hook(
            lambda *_: seen.append(slot.is_saved())
        )
        loss = pair.model(X).sum()
        assert seen == [True] and slot.is_saved()  # what is saved later counts as well
        assert loss.requires_grad
        handle.remove()
        del loss


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("over", [False, True])
def test_a_parameter_that_is_frozen_between_forward_and_backward(steps: int, over: bool) -> None:
    with Pair() as pair:
        pair.bypass.over = over
        pair.train(steps)
        for one in pair.both:
            loss = one(X).square().mean()
            for param in one.layers[1].parameters():
                param.requires_grad_(False)
            loss.backward()
        pair.check()
        assert pair.model.layers[1].norm.weight.grad is not None  # as it was before


@pytest.mark.parametrize("resident", ["auto", lambda _, p: p.dim() == 1])
@pytest.mark.parametrize("soon", [False, True])
def test_parts_that_are_computed_again_in_the_same_way(soon: bool, resident: Any) -> None:
    with Pair(resident=resident) as pair:
        if not soon:
            entered(pair)
        for one in pair.both:
            one.again = False
        pair.train(5)
        assert pair.bypass.active and not pair.bypass.over
        assert not any(group.holds for group in pair.tier._runtime.groups)
        for one in pair.both:
            one.again = None
        pair.train(1)


@pytest.mark.parametrize("soon", [False, True])
def test_parts_that_other_code_computes_again_have_their_interceptors(soon: bool) -> None:
    with Pair() as pair:
        if not soon:
            entered(pair)
        for one in pair.both:
            one.again = True
        pair.train(6)
        assert not pair.bypass.active and pair.bypass.over
        assert not any_in_tiers(pair.model)


@pytest.mark.parametrize(
    ("between", "steps"),
    [("unwrap", 5), *itertools.product(["crowd", "read", "nothing"], [0, 1, 5])],
)
def test_parts_are_computed_again_as_they_were_whatever_comes_between(
    between: str, steps: int
) -> None:
    """Checkpoints have to see the same tensors both times, with hooks or without."""
    with Pair() as pair:
        for one in pair.both:
            one.again = False
        pair.train(steps)
        losses: list[list[torch.Tensor]] = []
        for one, optimizer in zip(pair.both, pair.optimizers, strict=True):
            optimizer.zero_grad()
            losses.append([one(X * number).square().mean() for number in range(1, 5)])
            one.seen = None
        if between == "crowd":
            pair.crowd()
        elif between == "read":
            pair.model.state_dict()
        elif between == "unwrap":
            pair.tier.unwrap(pair.model)
        for some in losses:
            for loss in some:
                loss.backward()
        same_gradients(pair.model, pair.plain)


def test_a_backward_that_fails_while_all_is_held_lets_go() -> None:
    with Pair() as pair:
        for one in pair.both:
            one.again = False
        entered(pair)
        for one in pair.both:
            loss = one(X).square().mean()
            handle = one.layers[1].register_forward_pre_hook(fail)
            with pytest.raises(ArithmeticError):
                loss.backward()
            handle.remove()
            del loss
            one.layers[0].up.weight.data.mul_(0.5)  # nothing counts that
            one.zero_grad()
            one.seen = None
        assert not any(group.holds for group in pair.tier._runtime.groups)
        pair.crowd()
        pair.check()
        pair.train(2)


def test_a_layer_by_itself_in_a_checkpoint_saves_the_same_both_times() -> None:
    """Its first weight would put interceptors back in the middle of what is saved."""
    with Pair() as pair:
        entered(pair)
        for one in reversed(pair.both):
            one.zero_grad()
            checkpoint(one.layers[1], X, use_reentrant=False).square().sum().backward()
        pair.check()
        assert pair.bypass.active


def test_a_checkpoint_inside_a_reentrant_one() -> None:
    def inner(layer: nn.Module, x: torch.Tensor) -> Any:
        return checkpoint(layer, x, use_reentrant=False) * 2.0

    with Pair() as pair:
        entered(pair)
        for one in pair.both:
            layer = one.layers[1]
            layer.forward = lambda x, f=layer.forward: checkpoint(  # type: ignore[method-assign]
                lambda x: checkpoint(f, x, use_reentrant=False) * 2.0, x, use_reentrant=True
            )
        for one in reversed(pair.both):
            one.zero_grad()
            one(X).square().mean().backward()
        pair.check()
        pair.train(1)
        assert pair.bypass.over
    with Pair() as pair:
        entered(pair)
        for one in reversed(pair.both):
            one.zero_grad()
            x = X.clone().requires_grad_()
            checkpoint(inner, one.layers[1], x, use_reentrant=True).square().sum().backward()
        pair.check()


def test_none_are_taken_out_while_a_checkpoint_counts_what_is_saved() -> None:
    """They would be out only as the part is computed for the first time."""

    def part(one: nn.Module, x: torch.Tensor) -> Any:
        for _ in range(4):
            with torch.no_grad():
                one(x)
        return one.layers[1](x)  # type: ignore[index, operator]

    with Pair() as pair:
        for one in reversed(pair.both):
            x = X.clone().requires_grad_()
            checkpoint(part, one, x, use_reentrant=False).square().sum().backward()
            one.seen = None
        pair.check()
        assert not pair.bypass.active


class Saving(torch.autograd.Function):
    """Uses a weight in backward by Python code."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


def test_a_weight_that_python_code_uses_in_backward() -> None:
    with Pair() as pair:
        for one in pair.both:
            one.layers[1].up.forward = (  # type: ignore[method-assign]
                lambda x, one=one: Saving.apply(x, one.layers[1].up.weight)
            )
        pair.train(6)
        assert pair.bypass.over


@pytest.mark.parametrize("inside", [False, True])
def test_hooks_of_users_see_what_is_saved(inside: bool) -> None:
    with Pair() as pair:
        entered(pair)
        seen: list[list[torch.Size]] = []
        for one, optimizer in zip(pair.both, pair.optimizers, strict=True):
            shapes: list[torch.Size] = []

            def pack(tensor: torch.Tensor, shapes: list[torch.Size] = shapes) -> torch.Tensor:
                shapes.append(tensor.shape)
                return tensor.clone()

            hooks = torch.autograd.graph.saved_tensors_hooks(pack, torch.clone)
            optimizer.zero_grad()
            if inside:
                layer = one.layers[1]
                first = layer.register_forward_pre_hook(lambda *_, h=hooks: h.__enter__())
                last = layer.register_forward_hook(lambda *_, h=hooks: h.__exit__())
                loss = one(X).square().mean()
                first.remove()
                last.remove()
            else:
                with hooks:
                    loss = one(X).square().mean()
                assert one is pair.plain or not pair.bypass.active
            loss.backward()
            seen.append(shapes)
        assert seen[0] == seen[1] and seen[0]
        pair.check()
        pair.train(3)


@pytest.mark.parametrize("first", [0, 1])
def test_gradients_of_both_kinds_are_one_sum(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with Pair() as pair:
        entered(pair)
        kinds: set[type] = set()
        for one in pair.both:
            one.zero_grad()
            for part in range(5):
                monkeypatch.setattr(
                    Bypass, "_may_leave_gradients", lambda *_, part=part, **__: part % 2 == first
                )
                one.layers[1](X * part).sum().backward()
                one(X * (part + 1)).square().mean().backward()
                kinds |= {type(p.grad) for p in one.parameters()}
        assert kinds == {torch.Tensor, LazyTensor}
        pair.check()
        monkeypatch.undo()
        pair.train(3)


@pytest.mark.parametrize("kept", [True, False])
def test_a_stand_in_that_is_put_back_is_added_to(kept: bool) -> None:
    """One of before gradients were left to torch, or one that stood for another's gradient."""
    with Pair() as pair:
        before = []
        for one in pair.both:
            one(X).square().mean().backward()
            before.append([p.grad for p in one.parameters()])
        assert all_in_tiers(pair.model)
        if kept:
            entered(pair)
        else:
            for one in pair.both:
                one(X)
        for one, gradients in zip(pair.both, before, strict=True):
            if kept:
                for p, gradient in zip(one.parameters(), gradients, strict=True):
                    p.grad = gradient
            else:
                first, second = one.layers[0].up.weight, one.layers[1].up.weight
                first.grad, second.grad = second.grad, first.grad
            for gradient in gradients:
                gradient.detach().clone()
            one(X).square().mean().backward()
        pair.check()
        pair.train(3)


def test_clipping_and_a_scale_of_gradients_left_to_torch() -> None:
    with Pair() as pair:
        entered(pair)
        scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in pair.both]
        for number in range(4):
            for one, optimizer, scaler in zip(pair.both, pair.optimizers, scalers, strict=True):
                optimizer.zero_grad()
                scaler.scale(one(X).square().mean()).backward()
                if number % 2:
                    scaler.unscale_(optimizer)
                    norm = nn.utils.clip_grad_norm_(one.parameters(), 0.01)
                    assert norm > 0.01
                scaler.step(optimizer)
                scaler.update()
            pair.check()
        for one, optimizer in zip(pair.both, pair.optimizers, strict=True):
            one(X).square().mean().backward()
            clip = getattr(optimizer, "clip_grad_norm_", None)
            norm = clip(0.01) if clip else nn.utils.clip_grad_norm_(one.parameters(), 0.01)
            optimizer.step()
        pair.check()


def test_a_graph_of_a_gradient() -> None:
    with Pair() as pair:
        entered(pair)
        for one in pair.both:
            one.zero_grad()
            loss = one(X).square().mean()
            first = torch.autograd.grad(loss, list(one.parameters()), create_graph=True)
            sum(g.square().sum() for g in first).backward()
        pair.check()


@contextmanager
def in_bfloat16(**dtypes: torch.dtype) -> Iterator[tuple[tiermem.TierManager, Model, Any]]:
    """A model in bfloat16 that fits, and its optimizer."""
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16)
    with tiermem.TierManager("cpu", hbm="16MiB", dram="32MiB") as tier:
        tier.wrap(model)
        yield (
            tier,
            model,
            tier.optimizer(model, torch.optim.AdamW, lr=0.01, overlap=False, **dtypes),
        )


def test_gradients_in_another_dtype_stay_in_the_tiers() -> None:
    with in_bfloat16(grad_dtype=torch.float32) as (_, model, optimizer):
        for _ in range(5):
            optimizer.zero_grad()
            model(X.bfloat16()).float().square().mean().backward()
            optimizer.step()
        assert all_in_tiers(model)


def test_gradients_stay_in_the_tiers_where_memory_is_taken_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Pair() as pair:
        monkeypatch.setattr(pair.tier._manager.parts.slots.arena, "grows", False, raising=False)
        pair.train(5)
        assert pair.bypass.active
        assert all_in_tiers(pair.model)


def test_steps_asked_for_in_backward_are_made_there() -> None:
    with Pair(overlap="backward") as pair:
        pair.train(5, kept=False)
        assert pair.optimizers[1].stepped_in_backward


def test_masters_are_not_looked_at_for_what_a_graph_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[bool] = []
    inner = ForeignWrites.look
    monkeypatch.setattr(ForeignWrites, "look", lambda self: looks.append(inner(self)) or looks[-1])
    with in_bfloat16(master_dtype=torch.float32) as (tier, model, optimizer):
        for _ in range(6):
            looks.clear()
            optimizer.zero_grad()
            model(X.bfloat16()).float().square().mean().backward()
            optimizer.step()
        (one,) = tier._runtime.models.values()
        assert one.bypass.active
        assert looks and not any(looks)


@pytest.mark.parametrize("first", [2, 4])
def test_masters_follow_what_is_written_through_a_kept_view(first: int) -> None:
    """Beside views that the graph has; it is gone, as the graph is, when the step begins."""
    weights = []
    for over in (False, True):
        with in_bfloat16(master_dtype=torch.float32) as (tier, model, optimizer):
            (one,) = tier._runtime.models.values()
            one.bypass.over = over
            for number in range(6):
                optimizer.zero_grad()
                views: list[torch.Tensor] = []
                handle = model.layers[0].register_forward_hook(
                    lambda module, *_, views=views: views.append(module.up.weight.detach())
                )
                if number != first:
                    handle.remove()
                model(X.bfloat16()).float().square().mean().backward()
                handle.remove()
                assert one.bypass.active == (number > 1 and not over)
                if views:
                    views.pop().data.mul_(0.5)
                optimizer.step()
            weights.append([param.detach().clone() for param in model.parameters()])
    assert all(map(same_bits, *weights))


_put: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def test_memory_in_the_place_of_a_weights_is_copied_home() -> None:
    """Put there inside a forward by code that nothing tells of."""
    with Pair() as pair:
        entered(pair)
        for one in pair.both:
            handle = one.layers[0].register_forward_pre_hook(
                lambda module, _args: _put(module.down.weight, torch.full((5, 4 * WIDTH), 0.25))
            )
            one(X)
            handle.remove()
            one.seen = None
        assert pair.bypass.active
        pair.check()
        pair.train(1)


def test_a_view_that_a_module_keeps_is_seen() -> None:
    """It is written while no call holds the weight, and the block leaves afterwards."""
    with Pair() as pair:
        entered(pair)
        for one in pair.both:
            layer, views = one.layers[0], []
            handle = layer.register_forward_hook(
                lambda module, *_, views=views: views.append(module.conv.weight.detach())
            )
            one(X)
            handle.remove()
            with torch.no_grad():
                views.pop().mul_(0.5)
            one.seen = None
        pair.crowd()
        pair.check()
        pair.train(2)


def test_a_second_thread_has_its_own_hooks() -> None:
    with Pair() as pair:
        entered(pair)
        for one in pair.both:
            one.zero_grad()
            with ThreadPoolExecutor(1) as pool:
                pool.submit(one, X).result().sum().backward()
        assert not pair.bypass.active
        pair.check()


def test_a_model_inside_another_is_seen_by_its_own_hooks() -> None:
    with Pair() as pair:
        entered(pair)
        torch.manual_seed(5)
        plain = Layer()
        inner = pair.tier.wrap(deepcopy(plain))
        for one, part in ((pair.plain, plain), (pair.model, inner)):
            one.zero_grad()
            handle = one.layers[1].register_forward_hook(
                lambda _module, _args, out, part=part: part(out)
            )
            for _ in range(4):
                one(X).square().mean().backward()
            handle.remove()
        pair.check()
        same_gradients(inner, plain)


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    with Pair() as pair:
        entered(pair)
        handle = pair.model.layers[1].register_forward_hook(fail)
        with pytest.raises(ArithmeticError):
            pair.model(X)
        handle.remove()
        assert left_out.of is None
        assert not any(group.holds for group in pair.tier._runtime.groups)
        pair.train(2)
        assert pair.bypass.active


def test_a_program_that_reads_its_weights_now_and_then_goes_on_so() -> None:
    with Pair() as pair:
        entered(pair)
        for _ in range(5):
            pair.train(12)
            assert pair.bypass.active
            pair.model.state_dict()  # reads what is there
            assert pair.bypass.active
            parameters_to_vector(pair.model.parameters())
            assert not pair.bypass.active
        pair.train(4)
        assert pair.bypass.active


ACTS = (
    "train", "train", "train", "forward", "forward", "hidden", "backward", "backward", "drop",
    "step", "zero", "eval", "write", "data", "freeze", "thaw", "layer", "again", "cpu", "grad",
    "clip", "crowd", "functional", "fail", "edit",
)  # fmt: skip


class Program:
    """What one twin does."""

    def __init__(self, pair: Pair, number: int) -> None:
        self.pair, self.number = pair, number
        self.one: Any = pair.both[number]
        self.optimizer = pair.optimizers[number]
        self.graphs: list[torch.Tensor] = []

    def act(self, what: str, draw: random.Random) -> list[Any]:
        one, optimizer = self.one, self.optimizer
        layer, x = one.layers[draw.randrange(LAYERS)], X * draw.choice([0.5, 1.0, 2.0])
        result: list[Any] = []
        if what == "train":
            optimizer.zero_grad()
            loss = one(x).square().mean()
            loss.backward()
            optimizer.step()
            result = [loss.detach()]
        elif what in ("forward", "hidden"):
            out = one(x)
            self.graphs.append(one.seen if what == "hidden" else out)
            result = [out.detach()]
        elif what in ("backward", "grad") and self.graphs:
            loss = self.graphs.pop(draw.randrange(len(self.graphs))).square().sum()
            params = [p for p in one.parameters() if p.requires_grad]
            if what == "backward" and loss.requires_grad:
                loss.backward(retain_graph=draw.random() < 0.3)
            elif loss.requires_grad:
                result = list(torch.autograd.grad(loss, params, allow_unused=True))
        elif what == "drop":
            self.graphs = []
            one.seen = None
        elif what == "step":
            optimizer.step()
        elif what == "zero":
            optimizer.zero_grad(set_to_none=draw.random() < 0.5)
        elif what == "eval":
            with torch.no_grad():
                result = [one(x)]
        elif what == "write":
            with torch.no_grad():
                layer.up.weight.mul_(1.25)
        elif what == "data":
            layer.conv.weight.data.mul_(0.75)
        elif what in ("freeze", "thaw"):
            layer.norm.weight.requires_grad_(what == "thaw")
            layer.conv.requires_grad_(what == "thaw")
        elif what == "layer":
            out = layer(x)
            self.graphs.append(out)
            result = [out.detach()]
        elif what == "again":
            one.again = draw.choice([None, False, True])
        elif what == "cpu":
            with torch.autograd.graph.save_on_cpu():
                out = one(x)
            out.square().sum().backward()
        elif what == "clip":
            if any(p.grad is not None for p in one.parameters()):
                result = [nn.utils.clip_grad_norm_(one.parameters(), 0.05)]
        elif what == "functional":
            own = {"head.weight": torch.ones(3, 5, requires_grad=True)}
            self.graphs.append(torch.func.functional_call(one, own, (x,)))
        elif what == "fail":
            handle = layer.register_forward_hook(fail)
            with pytest.raises(ArithmeticError):
                one(x)
            handle.remove()
        elif what == "edit":
            for param in one.head.parameters():
                if param.grad is not None:
                    with torch.no_grad():
                        param.grad.mul_(2.0)
        return result


def fail(*_: object) -> None:
    raise ArithmeticError


@settings(max_examples=examples(24), deadline=None)
@given(
    acts=st.lists(st.sampled_from(ACTS), min_size=5, max_size=40),
    first=st.integers(0, 4),
    hbm=st.sampled_from(["16MiB", "16MiB", "160KiB", "64KiB"]),
    seed=st.integers(0, 1 << 16),
)
def test_whatever_programs_do_has_the_bits_of_the_resident_model(
    acts: list[str], first: int, hbm: str, seed: int
) -> None:
    with Pair(hbm) as pair:
        programs = [Program(pair, number) for number in range(2)]
        pair.train(first)
        crowded = False
        for number, what in enumerate(acts):
            if what == "crowd":
                if not crowded and hbm == "16MiB":
                    crowded = True
                    pair.crowd()
                continue
            found: list[list[Any]] = []
            for program in programs:
                try:
                    found.append(program.act(what, random.Random(seed + number)))
                except RuntimeError as error:
                    found.append([type(error)])  # torch's: a weight was changed in between
            plain, mine = found
            assert len(plain) == len(mine), (number, what, found)
            for want, got in zip(plain, mine, strict=True):
                if isinstance(want, torch.Tensor):
                    assert same_bits(want, got), (number, what)
                else:
                    assert want == got, (number, what, found)
            assert not any(group.holds for group in pair.tier._runtime.groups), (number, what)
        pair.check()
