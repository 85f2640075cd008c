"""Views of weights that are taken outside of the calls that hold them, in passes without gradients.

What they write is found out as the pass ends, or before the block leaves. The oracle is the same
module, resident.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_nn import same_bits
from torch import nn

import tiermem
from tiermem.core.residency import State
from tiermem.nn.groups.group import Group
from tiermem.nn.passes.awayuses import AwayUses

LAYERS, WIDTH = 6, 64
NBYTES = WIDTH * WIDTH * 4

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "t": lambda w: w.t(),
    "T": lambda w: w.T,
    "torch.t": torch.t,
    "view": lambda w: w.view(WIDTH, WIDTH),
    "rows": lambda w: w[8:24],
    "column": lambda w: w[:, 3],
    "chunk": lambda w: w.chunk(2)[1],
    "unbind": lambda w: w.unbind()[5],
    "heads": lambda w: w.reshape(4, 16, WIDTH).transpose(0, 1),
    "float": lambda w: w.float(),
    "alias": torch.ops.aten.alias,
    "detach": lambda w: w.detach(),
}
Action = tuple[str, int, str]


class Viewing(nn.Module):
    """Does what a program says with the weights of its layers; keeps views if it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.program: list[Action] = []
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        views: list[torch.Tensor] = []
        for what, number, kind in self.program:
            layer = self.layers[number % LAYERS]
            if what == "call":
                x = torch.tanh(layer(x))
            elif what == "take":
                views.append(VIEWS[kind](layer.weight))  # type: ignore[arg-type]
            elif what == "read" and views:
                x = x + views[number].sum()
            elif what == "write" and views:
                views[number].mul_(0.75)
            elif what == "drop" and views:
                views.pop()
            elif what == "keep" and views:
                self.kept.append(views.pop())
            elif what == "fail":
                raise RuntimeError("the program fails")
        return x


def run(model: Any, x: torch.Tensor) -> torch.Tensor | None:
    try:
        found: torch.Tensor = model(x)
    except RuntimeError:
        return None
    return found


def passes(random: Random) -> list[list[Action]]:
    """Draws what each pass does: views are taken, read, written, dropped and kept between calls."""
    found = []
    for _ in range(random.randint(2, 6)):
        program: list[Action] = []
        for _ in range(random.randint(1, 5)):
            if random.random() < 0.5:
                begin = random.randrange(LAYERS)
                program += [("call", begin + n, "") for n in range(random.randint(1, LAYERS))]
            else:
                program.append(("take", random.randrange(LAYERS), random.choice(sorted(VIEWS))))
                program += [(random.choice(["read", "write"]), -1, "")] * random.randint(0, 2)
                if random.random() < 0.7:
                    program.append((random.choice(["drop", "drop", "drop", "keep"]), -1, ""))
        if random.random() < 0.1:
            program.append(("fail", 0, ""))
        found.append(program)
    return found


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(2, 5), st.booleans(), st.booleans())
def test_what_views_write_is_as_resident(
    seed: int, layers: int, inference: bool, beside: bool
) -> None:
    torch.manual_seed(0)
    model = Viewing().eval()
    plain = deepcopy(model)
    x = torch.randn(2, WIDTH)
    mode: type[AbstractContextManager[Any]] = torch.inference_mode if inference else torch.no_grad
    hbm = layers * (NBYTES + WIDTH * 4 + 8192)
    with tiermem.TierManager("cpu", hbm=hbm, dram="4MiB") as tier, mode():
        tier._manager.prefetcher.fetcher.beside = beside
        tier.wrap(model, blocks=[f"layers.{n}" for n in range(LAYERS)])
        for program in passes(Random(seed)):
            for one in (model, plain):
                one.program = program
                one.kept.clear()
            try:
                mine = run(model, x)
            except tiermem.CapacityError:  # views hold more than there is room for
                return
            theirs = run(plain, x)
            assert (mine is None) is (theirs is None)
            assert mine is None or theirs is None or same_bits(mine, theirs)
            for ours, other in zip(model.kept, plain.kept, strict=True):
                ours.add_(0.5)
                other.add_(0.5)
            model.kept.clear()
            plain.kept.clear()
        states = model.state_dict(), plain.state_dict()
        assert all(same_bits(value, states[1][name]) for name, value in states[0].items())
        assert tier.stats().peak["hbm"] <= hbm


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("kind", ["t", "T", "view", "rows", "chunk", "heads"])
def test_views_that_are_gone_and_have_written_nothing_cost_nothing(
    kind: str, inference: bool
) -> None:
    """``x @ self.layers[0].weight.t()``: the block was written home after each call."""
    model = Viewing().eval()
    calls: list[Action] = [("call", number, "") for number in range(LAYERS)]
    model.program = [*calls, ("take", 0, kind), ("read", 0, ""), ("drop", 0, "")]
    mode: type[AbstractContextManager[Any]] = torch.inference_mode if inference else torch.no_grad
    with tiermem.TierManager("cpu", hbm=3 * (NBYTES + 8192), dram="4MiB") as tier, mode():
        tier.wrap(model, blocks=[f"layers.{n}" for n in range(LAYERS)])
        for _ in range(4):
            model(torch.ones(2, WIDTH))
        links = tier.stats().links
    assert links["dram->hbm"].nbytes > 0
    assert "hbm->dram" not in links or not links["hbm->dram"].nbytes


@pytest.mark.parametrize("kind", ["alias", "detach", "t"])
@pytest.mark.parametrize("beside", [False, True])
def test_what_views_that_are_gone_have_written_is_there(kind: str, beside: bool) -> None:
    """In inference mode no counter has seen what an alias made by ``torch.ops`` writes."""
    model = Viewing().eval()
    plain = deepcopy(model)
    calls: list[Action] = [("call", number, "") for number in range(LAYERS)]
    writing = [("take", 0, kind), ("write", -1, ""), ("drop", -1, "")]
    x = torch.randn(2, WIDTH)
    with (
        tiermem.TierManager("cpu", hbm=2 * (NBYTES + 8192), dram="4MiB") as tier,
        torch.inference_mode(),
    ):
        tier._manager.prefetcher.fetcher.beside = beside
        tier.wrap(model, blocks=[f"layers.{n}" for n in range(LAYERS)])
        for program in (writing, calls[1:], calls, [*writing, *calls[1:], *calls], calls):
            model.program = plain.program = program
            assert same_bits(model(x), plain(x))


def test_views_taken_outside_of_a_pass_count_as_writers_at_once() -> None:
    """There is no pass at whose end they could be looked at."""
    model = Viewing()
    with tiermem.TierManager("cpu", hbm=2 * (NBYTES + 8192), dram="4MiB") as tier, torch.no_grad():
        tier.wrap(model, blocks=[f"layers.{n}" for n in range(LAYERS)])
        view = next(iter(model.parameters())).t()
        assert view.shape == (WIDTH, WIDTH)
        rows = {row.block: row.tiers for row in tier.residency()}
        assert rows["Viewing.layers.0"]["hbm"] == "dirty"


@pytest.mark.parametrize("where", [(Group, "hold_locked"), (AwayUses, "settle_views")])
def test_a_view_that_outlives_a_pass_that_was_cut_short_still_writes(
    where: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Viewing().eval()
    plain = deepcopy(model)
    calls: list[Action] = [("call", number, "") for number in range(LAYERS)]
    x = torch.randn(2, WIDTH)
    whole = getattr(*where)

    def cut(self: Any, **options: Any) -> None:
        if type(self) is AwayUses or self.block.name.endswith("layers.2"):
            raise KeyboardInterrupt
        whole(self, **options)

    with tiermem.TierManager("cpu", hbm=2 * (NBYTES + 8192), dram="4MiB") as tier, torch.no_grad():
        tier.wrap(model, blocks=[f"layers.{n}" for n in range(LAYERS)])
        model.program = [("take", 0, "t"), ("keep", 0, ""), ("call", 2, "")]
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(*where, cut)
            model(x)
        for program in ([("call", 1, "")], calls[2:], calls):
            model.program = plain.program = program
            assert same_bits(model(x), plain(x))
            if model.kept:
                model.kept.pop().mul_(0.5)
                plain.layers[0].weight.mul_(0.5)  # type: ignore[operator, union-attr]


class Uncounted(Viewing):
    """Writes what no counter of torch's sees."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        view: Any = self.layers[0].weight
        view.t().data.mul_(0.5)
        return super().forward(x)


def test_what_is_written_through_the_data_of_a_view_is_there() -> None:
    model = Uncounted().eval()
    plain = deepcopy(model)
    x = torch.randn(2, WIDTH)
    with tiermem.TierManager("cpu", hbm=2 * (NBYTES + 8192), dram="4MiB") as tier, torch.no_grad():
        tier.wrap(model, blocks=[f"layers.{n}" for n in range(LAYERS)])
        for begin in (1, 0, 1, 0):
            model.program = plain.program = [("call", n, "") for n in range(begin, LAYERS)]
            assert same_bits(model(x), plain(x))


def test_a_block_is_looked_at_before_it_is_moved() -> None:
    """Its next place knows nothing of the views of this one."""
    seen = []

    class Moved(Viewing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = super().forward(x)
            record = next(r for r in table if r.block.name.endswith("layers.0"))
            with tier._manager.lock:
                seen.append((record.in_hbm, rules.movable(record), record.in_hbm))
            return found

    model = Moved()
    model.program = [("take", 0, "t"), ("write", -1, ""), ("drop", -1, "")]
    with tiermem.TierManager("cpu", hbm=2 * (NBYTES + 8192), dram="4MiB") as tier, torch.no_grad():
        table, rules = tier._manager.parts.table, tier._manager.parts.evictor.rules
        tier.wrap(model, blocks=[f"layers.{n}" for n in range(LAYERS)])
        model(torch.randn(2, WIDTH))
    assert seen == [(State.VALID, True, State.DIRTY)]
