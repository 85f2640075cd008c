"""Mixtures of which all experts are chosen: by whole layers where that is the faster way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_ctrl_c import cut_short
from support_experts import VOCABULARY, check, mixtral, twins

MANY, FEW = 40, 1
_FILES = ["runtime/services/expert_", "core/experts", "nn/passes/runtime"]


def deep() -> Any:
    config = mixtral(4)
    config.num_hidden_layers = 16
    return config


def ids(tokens: int) -> torch.Tensor:
    return torch.arange(tokens)[None] % VOCABULARY


def scripted(tier: Any, monkeypatch: pytest.MonkeyPatch, whole: float, single: float) -> Any:
    """Makes the manager copy as beside a GPU, and passes take as long as is said."""
    manager, way = tier._manager, tier._runtime.experts.way
    manager.prefetcher.fetcher.beside = True
    real = manager.parts.pass_timer.clock
    took = {True: whole, False: single}

    class Clock(type(real)):  # type: ignore[misc]
        def seconds(self, begin: Any, end: Any) -> float:
            timed = way._timed[0] if way._timed else None
            if timed is not None and timed.begin is begin:
                return took[timed.whole]
            return float(super().seconds(begin, end))

    monkeypatch.setattr(manager.parts.pass_timer, "_clock", Clock())
    monkeypatch.setattr(way, "_least", lambda _: 1.0)
    return way


def goes(model: Any, plain: Any, tier: Any, tokens: int) -> bool:
    """Runs a pass, checks its bits, and returns whether it went by whole layers."""
    check(model, plain, ids(tokens))
    return bool(tier._runtime.experts.whole)


@pytest.mark.parametrize(
    ("whole", "single", "then"),
    [
        (1.1, 1.0, [True] * 8),  # near what is possible
        (1.5, 2.0, [True] * 4 + [False] * 4 + [True] * 4),
        (2.0, 1.5, [True] * 4 + [False] * 8),
    ],
)
def test_the_faster_way_is_found(
    monkeypatch: pytest.MonkeyPatch, whole: float, single: float, then: list[bool]
) -> None:
    with twins(deep(), "grouped_mm", 0.13) as (model, plain, tier):
        scripted(tier, monkeypatch, whole, single)
        assert not goes(model, plain, tier, MANY)  # which are chosen is not known before
        assert [goes(model, plain, tier, MANY) for _ in then] == then


def test_calls_among_others_go_expert_by_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are often chosen stay then; and few tokens choose few."""
    with twins(deep(), "grouped_mm", 0.13) as (model, plain, tier):
        scripted(tier, monkeypatch, 1.0, 2.0)
        for _ in range(3):
            assert not goes(model, plain, tier, MANY)
            assert [goes(model, plain, tier, FEW) for _ in range(3)] == [False] * 3
        assert not goes(model, plain, tier, MANY)
        assert goes(model, plain, tier, MANY)
        assert not goes(model, plain, tier, FEW)


def test_an_exception_leaves_no_pass_half_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    with twins(deep(), "grouped_mm", 0.13) as (model, plain, tier), torch.no_grad():
        way = scripted(tier, monkeypatch, 1.0, 2.0)
        for _ in range(2):
            goes(model, plain, tier, MANY)
        with pytest.raises(Exception, match="index"):
            model(torch.tensor([[VOCABULARY + 5]]))
        assert way._open is None
        assert not goes(model, plain, tier, MANY)
        assert goes(model, plain, tier, MANY)


@pytest.mark.parametrize("first", [1, 60, 200])
def test_ctrl_c_where_the_way_is_chosen(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """Everything is right again with the next call, whichever way that goes."""
    with twins(deep(), "grouped_mm", 0.13) as (model, plain, tier), torch.no_grad():
        scripted(tier, monkeypatch, 1.5, 2.0)
        for number in range(first, first + 700, 97):
            check(model, plain, ids(MANY))
            where = cut_short(lambda: model(ids(MANY)), number, _FILES)
            check(model, plain, ids(MANY))
            check(model, plain, ids(FEW))
            table = tier._manager.parts.table
            table.check()
            assert sum(r.block.name == "expert room" for r in table) <= 1, where
