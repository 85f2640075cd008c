"""Frozen experts in a model that is trained: by rows, forward and backward, with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_ctrl_c import cut_short
from support_examples import examples
from support_nn import same_bits
from support_stacks import (
    EXPERTS,
    INNER,
    LAYER,
    LAYERS,
    LEAST,
    ROW,
    SEAT,
    WIDTH,
    Experts,
    Listed,
    Model,
    choose,
    states,
)
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tiermem

moe = pytest.importorskip("transformers.integrations.moe")


@moe.use_experts_implementation(has_gate=False)
class Decorated(nn.Module):
    """One of transformers' own, which multiplies as its configuration says."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up_proj = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 4)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 4)
        self.act_fn = nn.Tanh()

    def forward(self, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(x)
        for expert in torch.unique(index):
            tokens, place = torch.where(index == expert)
            y = functional.linear(x[tokens], self.up_proj[expert]).tanh()
            y = functional.linear(y, self.down_proj[expert]) * weight[tokens, place, None]
            found.index_add_(0, tokens, y)
        return found


def decorated(how: str) -> Callable[[], nn.Module]:
    return partial(Decorated, SimpleNamespace(_experts_implementation=how))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "rows": Experts,
    "copies": Listed,
    **{how: decorated(how) for how in ("eager", "batched_mm", "grouped_mm")},
}
EACH = pytest.mark.parametrize("kind", sorted(KINDS))
WAYS = {"saved": None, "reentrant": True, "recomputed": False}


class Trained(Model):
    """Experts are frozen; layers may be recomputed, and use their experts twice."""

    def __init__(self, kind: Any) -> None:
        super().__init__(kind)
        self.way: bool | None = None
        self.twice = False
        self.experts.requires_grad_(False)

    def forward(self, x: torch.Tensor, chosen: Sequence[torch.Tensor]) -> torch.Tensor:
        for number, index in enumerate(chosen):
            layer = partial(self.layer, number, index)
            if self.way is None or not torch.is_grad_enabled():
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.way)
        return x

    def layer(self, number: int, index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        experts = self.experts[number]
        x = self.inner[number](x)
        weight = x[:, : index.shape[1]].softmax(-1)
        y = experts(x, index, weight)
        if self.twice:
            y = y + experts(y.tanh(), (index + 1) % EXPERTS, weight)
        return x + y


ROOMY = LEAST + 8 * SEAT


@contextmanager
def twins(kind: str, hbm: int = ROOMY, **options: Any) -> Iterator[tuple[Any, Any, Any]]:
    torch.manual_seed(0)
    model = Trained(KINDS[kind])
    torch.manual_seed(0)
    plain = Trained(KINDS[kind])
    with tiermem.TierManager("cpu", hbm=hbm, dram=4 << 20, **options) as tier:
        yield tier.wrap(model), plain, tier


def begin(model: Any, chosen: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    x = states(len(chosen[0])).requires_grad_()
    return x, model(x, chosen)


def gradients(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    found = [x.grad, *(p.grad for p in model.inner.parameters())]
    assert all(p.grad is None for p in model.experts.parameters())
    copies = [g.detach().clone() for g in found if g is not None]
    model.zero_grad()
    return copies


def train(model: Any, chosen: Sequence[torch.Tensor], backwards: int = 1) -> list[torch.Tensor]:
    """Returns the output and all gradients of one step."""
    x, y = begin(model, chosen)
    loss = y.square().sum()
    for left in range(backwards)[::-1]:
        loss.backward(retain_graph=left > 0)
    return [y.detach(), *gradients(model, x)]


def check(model: Any, plain: Any, chosen: Sequence[torch.Tensor], backwards: int = 1) -> None:
    mine, theirs = (train(one, chosen, backwards) for one in (model, plain))
    assert len(mine) == len(theirs) >= 2
    for a, b in zip(mine, theirs, strict=True):
        assert same_bits(a, b)


def up(tier: Any) -> int:
    """Returns the bytes of experts that came up since the timeline was cleared."""
    events = tier.timeline.events()
    return sum(e.nbytes for e in events if e.lane == "dram->hbm" and "experts" in e.name)


def by_rows(model: Any, tier: Any) -> bool:
    """Whether no stack is in HBM as a whole."""
    rows = {row.block: row.tiers for row in tier.residency()}
    name = type(model).__name__
    return all(rows[f"{name}.experts.{i}"]["hbm"] == "absent" for i in range(LAYERS))


@EACH
@pytest.mark.parametrize("way", sorted(WAYS))
def test_only_chosen_experts_move(kind: str, way: str) -> None:
    """Two of eight in each layer; all that a step uses is copied at most once for each use."""
    with twins(kind) as (model, plain, tier):
        model.way = plain.way = WAYS[way]
        check(model, plain, choose(1, 0, of=1))
        for seed in range(1, 6):
            chosen = [index + seed for index in choose(3, seed, among=2)]
            names = sum(len(index.unique()) for index in chosen)
            tier.reset_stats()
            tier.timeline.clear()
            check(model, plain, chosen)
            stats = tier.stats()
            uses = 2 if way == "saved" else 3
            assert up(tier) <= 2 * uses * names * ROW + 2 * LAYERS * SEAT < LAYERS * LAYER
            missing = stats.experts_chosen - stats.expert_hits + stats.expert_guesses
            assert up(tier) <= 2 * missing * ROW + 2 * LAYERS * SEAT
            # copies that a checkpoint has made anew are there when backward comes to them
            assert stats.experts_chosen in (uses * names, 2 * names)
            assert by_rows(model, tier)
            assert stats.peak["hbm"] <= stats.budget["hbm"]


@EACH
def test_nothing_stays_for_backward(kind: str) -> None:
    """What a graph has saved takes no seat, which others have before backward comes."""
    with twins(kind) as (model, plain, tier):
        chosen = choose(4, 0)
        x, y = begin(model, chosen)
        store = tier._runtime.experts
        assert store.open
        assert not any(seat.aliased for seat in store.room.seats.values())
        with torch.no_grad():
            for seed in range(1, 6):
                model(states(8), choose(8, seed))
        y.square().sum().backward()
        for a, b in zip(gradients(model, x), train(plain, chosen)[1:], strict=True):
            assert same_bits(a, b)
        assert by_rows(model, tier)


@settings(max_examples=examples(20), deadline=None)
@given(
    st.sampled_from(sorted(KINDS)),
    st.integers(0, 3 * LAYER),
    st.booleans(),
    st.lists(
        st.tuples(
            st.sampled_from(["saved", "reentrant", "recomputed", "none"]),
            st.integers(0, 9),  # tokens
            st.integers(0, 99),
            st.sampled_from([2, 3, EXPERTS]),  # of how many experts
            st.integers(1, 2),  # backwards
        ),
        max_size=5,
    ),
)
def test_any_budget_and_choice(
    kind: str, more: int, twice: bool, calls: list[tuple[str, int, int, int, int]]
) -> None:
    with twins(kind, hbm=ROOMY + more) as (model, plain, tier):
        model.twice = plain.twice = twice
        for way, tokens, seed, among, backwards in calls:
            chosen = choose(tokens, seed, among)
            if way == "none":
                with torch.no_grad():
                    x = states(tokens)
                    assert same_bits(model(x, chosen), plain(x, chosen))
                continue
            model.way = plain.way = WAYS[way]
            check(model, plain, chosen, 1 if way == "reentrant" else backwards)
        stats = tier.stats()
        assert stats.peak["hbm"] <= stats.budget["hbm"]


@EACH
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_graphs_side_by_side(kind: str, order: tuple[int, int]) -> None:
    with twins(kind) as (model, plain, _):
        choices = choose(3, 0), choose(5, 1)
        found = []
        for one in (model, plain):
            begun = [begin(one, chosen) for chosen in choices]
            for number in order:
                begun[number][1].square().sum().backward()
            found.append([x.grad for x, _ in begun])
        assert all(map(same_bits, *found))


@EACH
@pytest.mark.parametrize("way", ["saved", "recomputed", "reentrant"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_with_no_room_the_whole_layer_comes(kind: str, way: str, when: str) -> None:
    """Forward by rows and backward from the block, or the other way round."""
    with twins(kind, hbm=ROOMY + LAYER) as (model, plain, tier):
        model.way = plain.way = WAYS[way]
        store, chosen = tier._runtime.experts, choose(3, 0)
        check(model, plain, chosen)
        most = store.room.share
        if when == "before":
            store.close()
            store.room.share = 0.0
        x, y = begin(model, chosen)
        tier.reset_stats()
        assert store.open == (when == "after")
        store.close()
        store.room.share = most / 4 if when == "before" else 0.0
        y.square().sum().backward()
        assert store.open == (when == "before")
        assert (tier.stats().experts_chosen > 0) == (when == "before" and way != "saved")
        theirs = train(plain, chosen)
        assert same_bits(y.detach(), theirs[0])
        assert all(map(same_bits, gradients(model, x), theirs[1:]))


@EACH
def test_the_graph_of_a_gradient(kind: str) -> None:
    found = []
    with twins(kind) as (model, plain, _):
        for one in (model, plain):
            x, y = begin(one, choose(3, 0))
            [first] = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            first.square().sum().backward()
            found.append([first.detach(), *gradients(one, x)])
        assert len(found[0]) == len(found[1]) > 2
        assert all(map(same_bits, *found))


@EACH
@pytest.mark.parametrize("hooks", [save_on_cpu, None, "clones"])
def test_hooks_of_the_users(kind: str, hooks: Any) -> None:
    def context() -> Any:
        if hooks == "clones":
            return saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
        return hooks() if hooks else saved_tensors_hooks(lambda t: t, lambda t: t)

    with twins(kind) as (model, plain, tier):
        for seed in range(3):
            found = []
            for one in (model, plain):
                with context():
                    x, y = begin(one, choose(3, seed))
                y.square().sum().backward()
                found.append(gradients(one, x))
            assert all(map(same_bits, *found))
        assert tier.stats().experts_chosen > 0


@EACH
def test_activations_that_leave_hbm(kind: str) -> None:
    policy = tiermem.Policy(activations="dram")
    with twins(kind, policy=policy, activation_min=64) as (model, plain, tier):
        for seed in range(3):
            check(model, plain, choose(6, seed))
        assert tier.stats().experts_chosen > 0
        assert tier.stats().activations.kept == 0


@EACH
def test_from_a_swap_file(tmp_path: Any, kind: str) -> None:
    policy = tiermem.Policy(params="nvme")
    with twins(kind, nvme=tmp_path, policy=policy) as (model, plain, tier):
        for seed in range(3):
            check(model, plain, choose(3, seed))
        assert tier.stats().experts_chosen > 0


@pytest.mark.parametrize("kind", ["rows", "eager", "grouped_mm"])
def test_a_weight_that_changes_before_backward(kind: str) -> None:
    """As resident: an error, and no gradient of other weights than those of the forward."""
    with twins(kind) as (model, plain, _):
        for one in (model, plain):
            _, y = begin(one, choose(3, 0))
            with torch.no_grad():
                next(one.experts[1].parameters()).mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
            one.zero_grad()
        check(model, plain, choose(3, 0))


@EACH
def test_a_weight_that_changes_before_it_is_recomputed(kind: str) -> None:
    """As resident: a checkpoint computes with the weights of then."""
    with twins(kind) as (model, plain, _):
        found = []
        for one in (model, plain):
            one.way = False
            x, y = begin(one, choose(3, 0))
            with torch.no_grad():
                next(one.experts[1].parameters()).mul_(2)
            y.square().sum().backward()
            found.append(gradients(one, x))
        assert all(map(same_bits, *found))


class Doubled(Listed):
    """Changes its copies of rows in place, before or after they are saved."""

    late = False

    def forward(self, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        pairs = index.reshape(-1)
        many = x.repeat_interleave(index.shape[1], 0)[:, :, None]
        rows = self.up[pairs]
        if not self.late:
            torch.Tensor.mul_(rows, 2)  # where the method's source does not say so
        y = torch.bmm(self.down[pairs], torch.bmm(rows, many).relu())[:, :, 0]
        if self.late:
            torch.Tensor.mul_(rows, 2)
        return (y * weight.reshape(-1, 1)).view(*index.shape, WIDTH).sum(1)


@pytest.mark.parametrize("late", [False, True])
def test_copies_that_change(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "changed", Doubled)
    monkeypatch.setattr(Doubled, "late", late)
    with twins("changed") as (model, plain, tier):
        if not late:
            check(model, plain, choose(3, 0))
        else:
            for one in (model, plain):
                _, y = begin(one, choose(3, 0))
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    y.sum().backward()
        assert tier.stats().experts_chosen > 0


@EACH
@pytest.mark.parametrize("way", ["saved", "recomputed"])
@pytest.mark.parametrize("others", [False, True])
def test_a_model_that_leaves_before_backward(kind: str, way: str, others: bool) -> None:
    with twins(kind) as (model, plain, tier):
        model.way = plain.way = WAYS[way]
        chosen = choose(3, 0)
        x, y = begin(model, chosen)
        tier.unwrap(model)
        if others:  # have a room of their own now
            other = tier.wrap(Model().requires_grad_(False))
            other(states(3), chosen)
        assert tier._runtime.experts.open == others
        y.square().sum().backward()
        assert all(map(same_bits, gradients(model, x), train(plain, chosen)[1:]))


@EACH
def test_trained_stacks_come_whole_beside_frozen_ones(kind: str) -> None:
    with twins(kind, hbm=ROOMY + 2 * LAYER) as (model, plain, tier):
        tier.wrap(Model().requires_grad_(False))  # so that not all fits
        with torch.no_grad():
            model(states(2), choose(2, 9))  # a room that the pass after it has to make smaller
        for one in (model, plain):
            one.experts[1].requires_grad_(True)
        for seed in range(3):
            chosen, found = choose(3, seed), []
            tier.reset_stats()
            for one in (model, plain):
                x, y = begin(one, chosen)
                y.square().sum().backward()
                found.append([x.grad, *(p.grad for p in one.experts[1].parameters())])
            pairs = zip(*found, strict=True)
            assert all(same_bits(a.detach(), b) for a, b in pairs if b is not None)
            names = sum(len(chosen[layer].unique()) for layer in (0, 2))
            assert tier.stats().experts_chosen == 2 * names
            for one in (model, plain):
                one.zero_grad()


def test_an_optimizer_steps_beside_the_room() -> None:
    with twins("rows") as (model, plain, tier):
        with torch.no_grad():
            model(states(2), choose(2, 0))
        assert tier._runtime.experts.open
        mine = tier.optimizer(model, torch.optim.Adam, lr=1e-2)
        theirs = torch.optim.Adam(plain.parameters(), lr=1e-2)
        for seed in range(4):
            for one, optimizer in ((model, mine), (plain, theirs)):
                _, y = begin(one, choose(3, seed))
                y.square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert by_rows(model, tier)
        state = plain.state_dict()
        assert all(same_bits(value, state[name]) for name, value in model.state_dict().items())


def forward_alone(model: Any, chosen: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(states(len(chosen[0])), chosen)]


class Inner(Experts):
    """Takes gradients in its forward, whether its caller does or not."""

    def forward(self, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            rows = x.detach().requires_grad_()
            y = torch.zeros_like(rows)
            for expert in torch.unique(index):
                inner = functional.linear(rows, self.up[expert]).relu()
                y = y + functional.linear(inner, self.down[expert]) + self.bias[expert]
            y.square().sum().backward()
        assert rows.grad is not None
        return y.detach() + rows.grad


@pytest.mark.parametrize("trained", [False, True])
def test_a_forward_that_takes_gradients_where_none_are_asked_for(
    trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "inner", Inner)
    found = []
    with twins("inner", hbm=ROOMY + 2 * LAYER) as (model, plain, tier):
        tier.wrap(Model().requires_grad_(False))  # so that not all fits
        for one in (model, plain):
            one.experts[1].requires_grad_(trained)
            y = forward_alone(one, choose(3, 0))
            params = list(one.experts[1].parameters())
            assert all((p.grad is not None) == trained for p in params)
            found.append([*y, *(p.grad.detach().clone() for p in params if trained)])
        assert tier.stats().experts_chosen > 0
    assert all(map(same_bits, *found))


class Beside(nn.Tanh):
    """Between a layer's two products something else happens, once."""

    meanwhile: Callable[[], object] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.meanwhile is not None:
            beside, self.meanwhile = self.meanwhile, None
            beside()
        return super().forward(x)


@pytest.mark.parametrize("kind", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("run", [forward_alone, train])
def test_two_threads_in_one_layer_have_their_own_rows(kind: str, run: Any) -> None:
    """One goes on while the other is still in the layer, with rows of its own choice."""
    first, second = choose(3, 0), choose(3, 1)
    found: list[torch.Tensor] = []
    there, leave = Event(), Event()
    with twins(kind, hbm=ROOMY + 2 * LAYER) as (model, plain, tier):
        tier.wrap(Model().requires_grad_(False))  # so that not all fits
        between = model.experts[1].act_fn = Beside()
        other = Thread(target=lambda: found.extend(forward_alone(model, second)))

        def stay() -> None:
            there.set()
            leave.wait(60)

        def beside() -> None:
            between.meanwhile = stay
            other.start()
            there.wait(60)

        between.meanwhile = beside
        tier.reset_stats()
        try:
            mine = run(model, first)
        finally:
            leave.set()
            other.join()
        assert all(map(same_bits, mine, run(plain, first)))
        assert all(map(same_bits, found, forward_alone(plain, second))) and len(found) == 1
        names = [sum(len(index.unique()) for index in chosen) for chosen in (first, second)]
        uses = 2 if run is train else 1
        assert tier.stats().experts_chosen == uses * names[0] + names[1]


_FILES = [
    "nn/wrap/experts",
    "nn/groups/rows",
    "nn/groups/grouped",
    "nn/passes/savedrows",
    "runtime/services/expert_",
    "runtime/services/saved_experts",
]


@pytest.mark.parametrize("kind", ["rows", "copies", "grouped_mm"])
def test_ctrl_c_at_a_line_of_ours(kind: str) -> None:
    """Everything is right again with the next call, and nothing of HBM is lost."""
    cut = 0
    with twins(kind) as (model, plain, tier):
        for number in range(1, 2000, 61):
            chosen = choose(2, number)
            cut += bool(cut_short(lambda c=chosen: train(model, c), number, _FILES))
            model.zero_grad()
            check(model, plain, chosen)
            table = tier._manager.parts.table
            table.check()
            assert sum(r.block.name == "expert room" for r in table) <= 1
    assert cut > 10
