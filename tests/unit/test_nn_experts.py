"""Experts stacked in one parameter come up one by one, and the model computes the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_ctrl_c import cut_short
from support_nn import same_bits
from support_stacks import (
    EXPERTS,
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
    twins,
)
from torch import nn
from torch.nn import functional

import tiermem
from tiermem.nn.compat.stacks import experts_of, reads_rows
from tiermem.nn.groups.grouped import ends_of
from tiermem.nn.wrap.experts import counted
from tiermem.runtime.memory.expert_seats import QUIET, Use


class Dense(Experts):
    """Uses every row, whatever was chosen."""

    def forward(self, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        share = torch.zeros(len(x), EXPERTS).scatter_(1, index, weight)
        y = torch.einsum("th,eih->tei", x, self.up).relu()
        y = torch.einsum("tei,ehi->teh", y, self.down) + self.bias
        return (y * share[:, :, None]).sum(1)


class Sneaky(Experts):
    """Reads rows one by one, and others than those it was told of."""

    def forward(self, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x
        for expert in (0, 3, -1):
            y = functional.linear(functional.linear(y, self.up[expert]), self.down[expert])
        return y + self.bias[-1] + self.up[2:4].sum() + self.down[index.reshape(-1)].sum()


class Assigning(Experts):
    """Changes the row that was chosen first, and computes."""

    def forward(self, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        first = int(index[0, 0])
        self.up[first] = self.up[first] * 0.5
        return functional.linear(x, self.up[first]) @ self.down[first].t()


class Adding(Experts):
    def forward(self, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        first = int(index[0, 0])
        self.up[first] += 0.5
        return functional.linear(x, self.up[first]) @ self.down[first].t()


class Scaling(Experts):
    def forward(self, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        first = int(index[0, 0])
        self.up[first].t().mul_(0.5)
        return functional.linear(x, self.up[first]) @ self.down[first].t()


class Naming(Experts):
    def forward(self, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        up, down = self.up[index[0, 0]], self.down[index[0, 0]]
        up *= 0.5
        torch.add(down, 0.5, out=down[:])
        return functional.linear(x, up) @ down.t()


class Calling(Experts):
    """Writes by functions of torch, in place."""

    def forward(self, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        first = int(index[0, 0])
        torch.clamp_(self.up[first], -0.2, 0.2)
        functional.relu(input=self.down[first], inplace=True)
        return functional.linear(x, self.up[first]) @ self.down[first].t()


WRITING = [Assigning, Adding, Scaling, Naming, Calling]


class Helped(Experts):
    """Writes where the source of its forward does not say so."""

    def scale(self, expert: int) -> None:
        self.up[expert].mul_(0.5)
        self.bias[expert].add_(1)

    def forward(self, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        first = int(index[0, 0])
        self.scale(first)
        return functional.linear(x, self.up[first]) @ self.down[first].t() + self.bias[first]


def check(model: Any, plain: Any, chosen: Sequence[torch.Tensor]) -> None:
    x = states(len(chosen[0]))
    with torch.no_grad():
        assert same_bits(model(x, chosen), plain(x, chosen))


def moved(tier: Any, call: Callable[[], Any]) -> int:
    tier.reset_stats()
    call()
    return sum(link.nbytes for link in tier.stats().links.values())


def test_stacks_are_found_and_how_they_are_read() -> None:
    assert [experts_of(kind()) for kind in (Experts, Listed, Dense)] == [EXPERTS] * 3
    assert experts_of(nn.Linear(8, 8)) == 0
    assert [reads_rows(kind()) for kind in (Experts, Listed, Dense)] == ["eager", "eager", ""]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", WRITING)
def test_rows_that_a_forward_writes_are_those_of_the_weight(
    kind: type[nn.Module], training: bool
) -> None:
    """As resident: what was written stays, in forward and wherever the weight is read."""
    assert reads_rows(kind()) == ""
    with twins(kind) as (model, plain, _):
        for seed in range(4):
            for one in (model, plain):
                one.experts.requires_grad_(False)
            with torch.set_grad_enabled(training):
                x, chosen = states(3), choose(3, seed)
                assert same_bits(model(x, chosen).detach(), plain(x, chosen).detach())
        state = plain.state_dict()
        assert all(same_bits(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("inference", [False, True])
def test_rows_that_a_method_writes_are_those_of_the_weight(inference: bool) -> None:
    """What the call has written shows as it ends, and is written into the block then."""
    assert reads_rows(Helped()) == "eager"
    with twins(Helped) as (model, plain, tier), torch.inference_mode(inference), torch.no_grad():
        for seed in range(4):
            x, chosen = states(3), choose(3, seed)
            assert same_bits(model(x, chosen), plain(x, chosen))
        state = plain.state_dict()
        assert all(same_bits(value, state[name]) for name, value in model.state_dict().items())
        assert tier.stats().experts_chosen > 0


def test_rows_that_are_written_and_lost_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have come into their place, in the same call."""
    written = Use.written
    with twins(Helped) as (model, _, _tier), torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(Use, "written", lambda use: dict.fromkeys(written(use)))
            with pytest.raises(tiermem.ParameterError, match=r"has written rows of 'up'.* lost"):
                model(states(3), choose(3, 0))
        model(states(3), choose(3, 0))


@pytest.mark.parametrize("kind", [Experts, Listed])
def test_only_chosen_experts_move(kind: type[nn.Module]) -> None:
    with twins(kind) as (model, plain, tier):
        check(model, plain, choose(1, 0))
        for seed in range(1, 6):
            chosen = choose(1, seed)
            nbytes = moved(tier, lambda chosen=chosen: check(model, plain, chosen))
            stats = tier.stats()
            missing = stats.experts_chosen - stats.expert_hits + stats.expert_guesses
            assert nbytes <= 2 * missing * ROW
            assert stats.experts_chosen == 2 * LAYERS
        rows = {row.block: row.tiers for row in tier.residency()}
        assert all(rows[f"Model.experts.{i}"]["hbm"] == "absent" for i in range(LAYERS))


@pytest.mark.parametrize("trained", [False, True])
def test_a_first_token_waits_for_what_it_chooses_alone(trained: bool) -> None:
    """What all tokens use, and the room for experts, is there since the model was wrapped."""
    model = Model().train(trained)
    with tiermem.TierManager("cpu", hbm=LEAST + 2 * SEAT, dram=4 << 20) as tier:
        tier._manager.prefetcher.fetcher.beside = True
        tier.wrap(model)
        assert tier._runtime.experts.open is not trained
        if trained:
            return
        there = {row.block for row in tier.residency() if row.tiers["hbm"] != "absent"}
        assert {f"Model.inner.{i}" for i in range(LAYERS)} <= there
        with torch.no_grad():
            nbytes = moved(tier, lambda: model(states(1), choose(1, 0)))
        missing = tier.stats().experts_chosen + tier.stats().expert_guesses
        assert 0 < nbytes <= missing * (2 * ROW + 256)


@pytest.mark.parametrize("trained", [False, True])
def test_a_model_wrapped_to_be_trained_in_part_has_as_much_room_where_it_is_not(
    trained: bool,
) -> None:
    """The room left place for the whole stack that is to be trained, in every pass."""
    model = Model().train(trained).requires_grad_(False)
    model.experts[-1].requires_grad_(True)
    with tiermem.TierManager("cpu", hbm=2 * LAYER + 2 * SEAT, dram=4 << 20) as tier:
        tier.wrap(model)
        with torch.no_grad():
            model(states(1), choose(1, 0))
        room = tier._runtime.experts.room.block
        assert room is not None and room.nbytes > 1.5 * LAYER


def test_experts_chosen_time_and_again_stay() -> None:
    with twins() as (model, plain, tier):
        often, rare = choose(1, 0), choose(EXPERTS, 1)
        for _ in range(4):
            check(model, plain, often)
        assert moved(tier, lambda: check(model, plain, often)) == 0
        assert tier.stats().expert_hits == tier.stats().experts_chosen == 2 * LAYERS
        check(model, plain, rare)
        tier.reset_stats()
        check(model, plain, often)
        assert tier.stats().expert_hits >= LAYERS


def test_rounds_that_use_all_find_some_there() -> None:
    """A cache of those used last would find none."""
    everything = [torch.arange(EXPERTS)[:, None].repeat(1, 2)] * LAYERS
    with twins(hbm=LEAST + LAYER // 2) as (model, plain, tier):
        for _ in range(3):
            check(model, plain, everything)
        assert moved(tier, lambda: check(model, plain, everything)) <= LAYERS * LAYER * 2 // 3
        assert tier.stats().expert_guesses_right > 0


@pytest.mark.parametrize("kind", [Dense, Sneaky])
def test_rows_that_nobody_chose_are_there_as_well(kind: type[nn.Module]) -> None:
    with twins(kind) as (model, plain, _):
        for seed in range(3):
            check(model, plain, choose(3, seed))


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([Experts, Listed]),
    st.integers(0, 3 * LAYER),
    st.lists(
        st.tuples(st.integers(1, 12), st.integers(0, 99), st.integers(2, EXPERTS)), max_size=6
    ),
)
def test_any_budget_and_choice(
    kind: type[nn.Module], more: int, calls: list[tuple[int, int, int]]
) -> None:
    with twins(kind, hbm=LEAST + more) as (model, plain, tier):
        for tokens, seed, among in calls:
            check(model, plain, choose(tokens, seed, among))
        stats = tier.stats()
        assert stats.peak["hbm"] <= stats.budget["hbm"]


class Hollow(Experts):
    """Has tensors without elements beside its weights, one of them with rows."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.empty(EXPERTS, 4, 0))
        self.offset = nn.Parameter(torch.empty(EXPERTS, 0))

    def forward(self, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x
        for expert in torch.unique(index).tolist():
            y = functional.linear(functional.linear(y, self.up[expert]), self.down[expert])
            y = y + self.bias[expert] + self.extra[expert].sum() + self.offset[expert].sum()
        return y


def test_a_stack_with_a_tensor_without_elements_is_a_block_as_ever() -> None:
    with twins(Hollow) as (model, plain, _), torch.no_grad():
        for tokens in (1, 5, 1):
            x, chosen = states(tokens), choose(tokens, seed=tokens)
            assert same_bits(model(x, chosen), plain(x, chosen))


def test_a_hook_of_all_modules_sees_parameters() -> None:
    seen: list[bool] = []

    def look(module: nn.Module, _args: Any, _result: Any) -> None:
        if isinstance(module, Experts):
            seen.append(isinstance(module.up, nn.Parameter))

    with twins() as (model, plain, tier), torch.no_grad():
        x, chosen = states(3), choose(3, seed=0)
        expected = plain(x, chosen)
        assert same_bits(model(x, chosen), expected)
        assert tier.stats().experts_chosen
        handle = nn.modules.module.register_module_forward_hook(look)
        try:
            assert same_bits(model(x, chosen), expected)
        finally:
            handle.remove()
    assert seen == [True] * LAYERS


@pytest.mark.parametrize("kind", [Experts, Listed])
def test_a_layer_that_is_called_by_itself(kind: type[nn.Module]) -> None:
    with twins(kind) as (model, plain, _):
        check(model, plain, choose(3, 0))
        x, index = states(3), choose(3, 1)[1]
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                found = [one.experts[1](x, index, x[:, :2]) for one in (model, plain)]
            assert same_bits(*found)


def test_what_fits_in_hbm_is_used_there() -> None:
    with twins(hbm=4 * LAYER + 64 * SEAT) as (model, plain, tier):
        for seed in range(3):
            check(model, plain, choose(2, seed))
        assert tier.stats().experts_chosen == 0


def test_weights_that_are_written_are_read_anew() -> None:
    with twins() as (model, plain, tier):
        chosen = choose(4, 0)
        for step in range(3):
            check(model, plain, chosen)
            for one in (model, plain):
                with torch.no_grad():
                    one.experts[step].up.mul_(1.5)
                    one.experts[step].bias[:, 0] = step
            check(model, plain, chosen)
            values = {n: v + 0.25 for n, v in plain.state_dict().items()}
            model.load_state_dict(values)
            plain.load_state_dict(values)
        assert tier.stats().experts_chosen > 0


def test_training_in_between() -> None:
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    with tiermem.TierManager("cpu", hbm=6 * LAYER, dram=4 << 20) as tier:
        tier.wrap(model)
        other = tier.wrap(Model())  # so that not all fits
        optimizers = [
            tier.optimizer(model, torch.optim.SGD, lr=1e-2),
            torch.optim.SGD(plain.parameters(), lr=1e-2),
        ]
        for step in range(2):
            chosen = choose(4, step)
            check(model, plain, chosen)
            with torch.no_grad():
                other(states(4), chosen)
            for one, optimizer in zip((model, plain), optimizers, strict=True):
                one(states(4), chosen).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            check(model, plain, chosen)
        for (name, mine), theirs in zip(
            model.state_dict().items(), plain.state_dict().values(), strict=True
        ):
            assert same_bits(mine, theirs), name
        assert tier.stats().experts_chosen > 0


class Routed(nn.Module):
    """Layers with routers, each of which adds little to what goes by it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"gate": nn.Linear(WIDTH, EXPERTS), "experts": Experts()})
            for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            weight, index = layer["gate"](x).softmax(-1).topk(2)
            x = x + layer["experts"](x, index, weight / 1000)
        return x


def test_the_next_router_is_asked_early() -> None:
    torch.manual_seed(0)
    model, plain = Routed(), Routed()
    plain.load_state_dict(model.state_dict())
    with tiermem.TierManager("cpu", hbm=LEAST, dram=4 << 20) as tier, torch.no_grad():
        tier.wrap(model)
        for seed in range(24):
            x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(seed))
            assert same_bits(model(x), plain(x))
        stats = tier.stats()
        assert stats.expert_guesses > 5
        assert stats.expert_guesses_right > stats.expert_guesses // 2
        x = torch.randn(5, WIDTH)
        assert same_bits(model(x), plain(x))


def test_a_router_is_not_asked_early_where_nothing_is_missing() -> None:
    model = Routed()
    x = torch.randn(1, WIDTH)
    with tiermem.TierManager("cpu", hbm=LEAST, dram=4 << 20) as tier, torch.no_grad():
        tier.wrap(model)
        stacks = tier._runtime.experts.stacks.values()
        asked: list[int] = []
        for stack in stacks:
            stack.foresee = lambda _, stack=stack: asked.append(stack.number)
        model(x)
        model(x)
        assert asked
        for _ in range(QUIET + 1):
            model(x)
        asked.clear()
        model(x)
        assert not asked
        for seed in range(8):
            model(torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(seed)))
        assert asked


class Keeper(Experts):
    """Keeps a row beyond its call."""

    kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        row = self.up[int(index[0, 0])]
        if type(self).kept is None:
            type(self).kept = row
        return x + row.sum() * weight.sum()


def test_a_row_that_somebody_keeps_stays() -> None:
    with twins(Keeper) as (model, plain, tier):
        Keeper.kept = None
        x, first = states(1), choose(1, 0)
        with torch.no_grad():
            model(x, first)
            kept = Keeper.kept
            assert kept is not None
            before = kept.clone()
            for seed in range(12):
                model(x, choose(1, seed))
            assert same_bits(kept, before)
        model(states(2), choose(2, 1))  # for which the room is given back
        assert not tier._runtime.experts.open
        assert same_bits(kept, before)
        check(model, plain, first)
        assert same_bits(kept, before)
        Keeper.kept = kept = None


def test_a_row_that_somebody_keeps_when_all_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Keeper, "kept", None)
    with twins(Keeper) as (model, plain, tier), torch.no_grad():
        model(states(3), choose(3, 0))
        kept: Any = Keeper.kept
        value = kept.clone()
        assert tier._runtime.experts.open
    assert same_bits(kept, value)
    check(model, plain, choose(3, 1))


def test_the_room_stays_where_it_is() -> None:
    """Its seats know their addresses: it is not slid to the front of HBM, whatever leaves there."""
    with twins() as (model, plain, tier):
        view = model.inner[0].weight.detach()  # the user's: at the front until it is dropped
        check(model, plain, choose(3, 1))
        parts, room = tier._manager.parts, tier._runtime.experts.room.block
        place = parts.table[room.id].extent
        assert place.offset > 0
        del view
        with tier._manager.lock:
            parts.evictor._gather(place.offset)
        assert parts.table[room.id].extent == place
        check(model, plain, choose(3, 1))
        assert parts.table[room.id].extent == place


def test_a_room_that_was_cut_short_as_it_was_made_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C after its block was entered, and before anybody knows of it."""
    with twins() as (model, plain, tier):
        manager, room = tier._manager, tier._runtime.experts.room
        add_blocks = manager.add_blocks

        def cut(*args: Any, **options: Any) -> Any:
            add_blocks(*args, **options)
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(manager, "add_blocks", cut)
        with pytest.raises(KeyboardInterrupt):
            check(model, plain, choose(3, 1))
        assert room.block is None
        check(model, plain, choose(3, 1))
        assert [r.block for r in manager.parts.table if r.fixed] == [room.block]


@pytest.mark.parametrize("kind", [Experts, Listed])
def test_from_a_swap_file(tmp_path: Any, kind: type[nn.Module]) -> None:
    policy = tiermem.Policy(params="nvme")
    with twins(kind, nvme=tmp_path, policy=policy) as (model, plain, tier):
        for seed in range(5):
            check(model, plain, choose(1 + seed % 3, seed))
        assert tier.stats().experts_chosen > 0
        assert tier.stats().expert_hits > 0


def test_models_leave_and_come_back() -> None:
    with twins() as (model, plain, tier):
        check(model, plain, choose(2, 0))
        tier.unwrap(model)
        assert not tier._runtime.experts.stacks
        check(model, plain, choose(2, 1))
        tier.wrap(model)
        check(model, plain, choose(2, 2))
        assert tier.stats().experts_chosen > 0
    check(model, plain, choose(2, 3))


_FILES = ["nn/wrap/experts", "nn/groups/rows", "runtime/services/expert_", "core/experts"]


@pytest.mark.parametrize("first", [1, 150, 700])
def test_ctrl_c_at_a_line_of_ours(first: int) -> None:
    """Everything is right again with the next call, and nothing of HBM is lost."""
    with twins() as (model, plain, tier):
        for number in range(first, first + 1600, 113):
            chosen = choose(2, number)
            if number % 2:
                model(
                    states(1), choose(1, 0)
                )  # gives the room back: it is made within the cut call
            with torch.no_grad():
                where = cut_short(lambda c=chosen: model(states(2), c), number, _FILES)
            check(model, plain, chosen)
            check(model, plain, choose(1, number))
            table = tier._manager.parts.table
            table.check()
            assert sum(r.block.name == "expert room" for r in table) <= 1, where
        assert tier._runtime.experts.open


@given(st.lists(st.integers(-1, EXPERTS), min_size=1, max_size=600), st.booleans())
def test_choices_are_counted(indices: list[int], valid: bool) -> None:
    """By expert, ascending, without those of which there are none; few and many alike."""
    if valid:
        indices = [index % EXPERTS for index in indices]
    expected = {expert: indices.count(expert) for expert in sorted(set(indices))}
    inside = set(expected) <= set(range(EXPERTS))
    for given_as in (indices, torch.tensor(indices)):
        found = counted(given_as, EXPERTS)
        assert found == (expected if inside else None)
        assert found is None or list(found) == sorted(found)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=300), st.booleans())
def test_ends_of_groups(sizes: list[int], ones: bool) -> None:
    """As a sum that goes on, in the dtype of the offsets; those of one token among them."""
    sizes = [1] * len(sizes) if ones else sizes
    ends = ends_of(sizes, torch.zeros(1, dtype=torch.int32))
    assert ends.dtype == torch.int32
    assert ends.tolist() == [sum(sizes[: place + 1]) for place in range(len(sizes))]
