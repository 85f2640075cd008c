"""Steps that the host makes ahead of ``step()``: confirmed if there was no access, else dropped.

The device is one that NumPy plays (:mod:`support_hostbits`), which shares no code with the loop.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support_ahead import DROPS, ROOMY, ahead, drops, units, warm
from support_hostbits import device_of_numpy, keeps_share, tried_shares
from support_nn import Tiers, assert_same, check_table
from support_optim import Net, Twins, loss_of
from support_saving import DURING, save_during
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import tiermem
from tiermem.optim.host import exact, loop

pytestmark = pytest.mark.skipif(
    isinstance(loop.library(), str), reason=f"no loop here: {loop.library()}"
)

FUSED = {"lr": 0.01, "fused": True}
ADAMW = (Net, ROOMY, torch.optim.AdamW, FUSED)


@pytest.fixture(autouse=True)
def _host_has_share(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The host has every second block in every step; proofs are of few values."""
    with tried_shares(monkeypatch, keeps_share), device_of_numpy():
        yield


def hosted(pair: Twins) -> list[Any]:
    """The units that are stepped ahead on the host, and not confirmed."""
    found = pair.optimizer._timing.ahead.provisional
    assert len(found._elsewhere) == sum(u.host is not None for u in found.units)
    return [unit for unit in found.units if unit.host is not None]


STEPS: list[tuple[Any, dict[str, Any], torch.dtype | None]] = [
    (torch.optim.AdamW, {}, torch.float32),
    (torch.optim.AdamW, {"amsgrad": True, "weight_decay": 0.0}, None),
    (torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}, torch.float32),
    (torch.optim.SGD, {}, None),
]


@pytest.mark.parametrize(("cls", "settings", "master"), STEPS)
def test_the_hosts_units_are_stepped_ahead_and_confirmed(cls, settings, master) -> None:
    with warm(Net, ROOMY, cls, {**FUSED, **settings}, master_dtype=master) as pair:
        for number in range(4):
            pair.backward(number, use_extra=number != 1)
            all_units = pair.optimizer._units
            with_gradient = sum(any(e.has_grad for e in unit.entries) for unit in all_units)
            assert ahead(pair) == with_gradient
            assert 2 <= len(hosted(pair)) < with_gradient  # a block of one unit, one of several
            total = pair.optimizer.stepped_in_backward
            pair.step()
            assert not ahead(pair)
            assert pair.optimizer.stepped_in_backward == total + with_gradient
        assert not drops(pair)
        pair.check()


@pytest.mark.parametrize("what", sorted(DROPS))
@pytest.mark.one_in(2)
def test_whoever_looks_finds_everything_as_it_was(what: str) -> None:
    master = None if what == "a weight is written" else torch.float32
    with warm(*ADAMW, master_dtype=master) as pair:
        for number in range(2):
            pair.backward(number)
            assert hosted(pair)
            DROPS[what](pair)
            if what == "a rate":  # seen by step() alone
                pair.by_hand.step()
                pair.optimizer.step()
                assert drops(pair) == 1
                break
            assert not ahead(pair)
            if number == 0:
                assert_same(dict(pair.plain.state_dict()), dict(pair.model.state_dict()), "weights")
            pair.step()
            if pair.optimizer._units.looked_into or what == "another backward":
                break
        pair.check()


@pytest.mark.parametrize("by", ["model", "optimizer"])
def test_gradients_thrown_away_are_not_used(by: str) -> None:
    with warm(*ADAMW) as pair:
        pair.backward(1)
        assert hosted(pair)
        getattr(pair, by).zero_grad()
        pair.by_hand.zero_grad()
        pair.backward(7)
        pair.step()
        pair.check()


def test_clipping_that_does_not_clip_costs_nothing() -> None:
    with warm(*ADAMW) as pair:
        for number in range(3):
            pair.backward(number)
            assert hosted(pair)
            before = drops(pair)
            if number % 2:
                nn.utils.clip_grad_norm_(pair.model.parameters(), 1e6)
            else:
                pair.clip_norm(1e6)
            assert (drops(pair) > before) == (number == 0)  # the first has to look
            pair.step()
        pair.check()


class Held:
    """The loop, which begins once it is let, or its block ends: however slow the machine is.

    Whoever waits for it before then waits for ever.
    """

    def __init__(self, make_steps: Callable[[Any], None]) -> None:
        self._make_steps = make_steps
        self._may_go_on, self._has_begun = threading.Event(), threading.Event()
        self.let_go, self.wait_until_begun = self._may_go_on.set, self._has_begun.wait

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()

    def __call__(self, rows: Any) -> None:
        self._has_begun.set()
        self._may_go_on.wait()
        self._make_steps(rows)


def _no_memory(_rows: Any) -> None:
    raise MemoryError("none left")


def test_step_does_not_wait_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """It confirms what is still under way; the next use of the weights waits for that."""
    with warm(*ADAMW) as pair, Held(exact.make_steps) as held:
        pair.optimizer.finish()  # what has not begun would be held, and backward waits for it
        monkeypatch.setattr(exact, "make_steps", held)
        pair.backward(1)
        there = hosted(pair)
        pair.step()
        assert not ahead(pair)
        assert {id(unit) for unit in there} <= pair.optimizer._units.owed
        homes = pair.tier._manager.parts.homes
        homes._reclaim()  # what steps under way read from is not given away
        shadows = pair.optimizer._timing.ahead.provisional._shadows
        assert shadows.nbytes
        held.let_go()
        pair.backward(2)
        pair.step()
        pair.check()


def test_a_step_that_failed_before_step_is_called_is_dropped(monkeypatch) -> None:
    with warm(*ADAMW) as pair:
        pair.optimizer.finish()
        with monkeypatch.context() as patch, Held(_no_memory) as failing:
            patch.setattr(exact, "make_steps", failing)
            pair.backward(2)
            failing.wait_until_begun()  # else the wait for it takes it back
            failing.let_go()
            for step in pair.optimizer._timing.ahead.provisional._elsewhere:
                step.job.wait()
        pair.step()
        assert drops(pair) == 1
        pair.check()


def test_a_step_cut_short_as_it_confirms_the_hosts_is_gone_on_with(monkeypatch) -> None:
    """Ctrl-C where the end of a step that the host has made is to be registered."""
    with warm(*ADAMW) as pair:
        deferred, cut = pair.tier._manager.parts.deferred, [True]
        add = deferred.add

        def cut_short(debt: Any, **given: Any) -> None:
            if cut and debt.elsewhere is not None:
                cut.clear()
                raise KeyboardInterrupt
            add(debt, **given)

        pair.backward(1)
        assert hosted(pair)
        monkeypatch.setattr(deferred, "add", cut_short)
        with pytest.raises(KeyboardInterrupt):
            pair.optimizer.step()
        pair.step()
        pair.check()
        pair.backward(2)
        pair.step()
        pair.check()


@pytest.mark.parametrize("again", [True, False])
def test_a_step_that_fails_later_raises_where_weights_are_used(again, monkeypatch) -> None:
    """It is made again, from what it read the first time, or given up."""
    with warm(*ADAMW) as pair:
        pair.optimizer.finish()
        with monkeypatch.context() as patch, Held(_no_memory) as failing:
            patch.setattr(exact, "make_steps", failing)
            pair.backward(2)
            there = hosted(pair)
            before = {n: p.clone() for n, p in pair.plain.named_parameters()}
            pair.by_hand.step()
            pair.optimizer.step()
            failing.let_go()
            with pytest.raises(tiermem.StepError, match="on the host failed"):
                pair.model.layers[2].up.weight.sum()
        if again:
            pair.check()
            return
        pair.optimizer.abandon_step()
        unmade = {id(param) for unit in there for param, _ in unit.members}
        after = dict(pair.plain.named_parameters())
        assert unmade
        for name, param in pair.model.named_parameters():
            expected = before if id(param) in unmade else after
            assert_same(expected[name].detach(), param.detach(), name)
        pair.optimizer.zero_grad()
        pair.optimizer.state_dict()
        check_table(pair.tier)


def test_a_backward_that_raises_leaves_what_is_final() -> None:
    with warm(*ADAMW) as pair:
        for model in (pair.plain, pair.model):
            hook = model.layers[0].up.weight.register_hook(_stop)
            with pytest.raises(KeyError):
                loss_of(model, 5).backward()
            hook.remove()
        pair.by_hand.after_backward()
        assert hosted(pair) and ahead(pair) < units(pair)
        pair.step()
        pair.check()


def _stop(_gradient: torch.Tensor) -> None:
    raise KeyError("stop")


def test_where_dram_has_room_for_some_the_others_are_left_to_step() -> None:
    with Twins(*ADAMW) as pair:
        used = pair.tier.stats().used["dram"]
    tight = Tiers("dram", dram=used + (1 << 16))
    with Twins(Net, tight, torch.optim.AdamW, FUSED) as pair:
        for number in range(4):
            pair.backward(number)
            assert (0 < ahead(pair) < units(pair)) == bool(number)
            pair.step()
        pair.check()


def test_frozen_weights_of_a_block_go_along() -> None:
    """A block that gets another home has all of it there, whatever the host writes."""

    class Partly(Net):
        def __init__(self) -> None:
            super().__init__()
            for layer in self.layers:
                layer.down.weight.requires_grad_(False)
                layer.norm.bias.requires_grad_(False)

    with warm(Partly, *ADAMW[1:]) as pair:
        for number in range(3):
            pair.backward(number)
            assert hosted(pair)
            pair.step()
        pair.check()


def test_shadows_go_with_the_optimizer_and_the_model() -> None:
    with warm(*ADAMW) as pair:
        homes = pair.tier._manager.parts.homes
        pair.backward(1)
        assert hosted(pair)
        pair.optimizer.close()
        assert homes.dram.used == sum(
            record.home_extent.nbytes for record in pair.tier._manager.parts.table
        )
        assert_same(dict(pair.plain.state_dict()), dict(pair.model.state_dict()), "weights")
        check_table(pair.tier)
    with warm(*ADAMW) as pair:
        pair.backward(1)
        assert hosted(pair)
        pair.tier.unwrap(pair.model)
        assert_same(dict(pair.plain.state_dict()), dict(pair.model.state_dict()), "weights")
    with warm(*ADAMW) as pair:
        pair.backward(1)
        assert hosted(pair)
        pair.tier.close()
        assert_same(dict(pair.plain.state_dict()), dict(pair.model.state_dict()), "weights")


def test_the_host_that_is_asked_for_is_ahead_too_where_its_bits_are_proved() -> None:
    with warm(*ADAMW, where="host") as pair:
        pair.backward(1)
        assert len(hosted(pair)) == units(pair)
        pair.step()
        pair.check()


def test_other_code_in_a_step_keeps_it_from_the_host() -> None:
    """A hook of the plain optimizers might write what is read; their steps are left to step()."""
    seen = []
    with warm(*ADAMW) as pair:
        hook = register_optimizer_step_pre_hook(
            lambda *_: seen.append(threading.current_thread().name)
        )
        try:
            pair.backward(1)
            assert not hosted(pair)
            pair.step()
        finally:
            hook.remove()
        pair.check()


def _row(**given: Any) -> loop.Row:
    row = loop.Row(**given)
    row.numbers[:] = [0.9, 0.99, 0.01, 0.5, 1e-8, 0.001, 0.1, 0.01]
    return row


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("method", range(5))
@pytest.mark.parametrize("offset", [0, 1])  # whole vectors, and not
def test_the_loop_leaves_what_it_reads_where_results_go_elsewhere(method, bf16, offset) -> None:
    """And gives the bits that it gives in place, whatever the size and the alignment."""
    dtype, count = (torch.bfloat16 if bf16 else torch.float32), 70_001
    torch.manual_seed(method)
    start = [torch.rand(count + offset)[offset:].to(dtype) for _ in range(4)]
    gradient, nbytes = torch.randn(count).to(dtype), count * dtype.itemsize
    options = {"method": method, "bf16": bf16, "grad_bf16": bf16, "amsgrad": 1, "momentum": 2}
    names = ("param", "first", "second", "largest")[: 2 if method == 4 else 4]
    there = [t.clone() for t in start]
    casts = [torch.zeros(count + offset, dtype=torch.bfloat16)[offset:] for _ in range(2)]
    inside = {name: t.data_ptr() for name, t in zip(names, there, strict=False)}
    common = {**options, "count": count, "grad": gradient.data_ptr(), "decay": 1}
    loop.make_steps([_row(**common, **inside, cast=None if bf16 else casts[0].data_ptr())])
    kept = [t.clone() for t in start]
    to = [torch.zeros(count + offset, dtype=dtype)[offset:] for _ in start]
    apart = {name: t.data_ptr() for name, t in zip(names, kept, strict=False)}
    apart |= {f"{name}_to": t.data_ptr() for name, t in zip(names, to, strict=False)}
    loop.make_steps([_row(**common, **apart, cast=None if bf16 else casts[1].data_ptr())])
    for number, _ in enumerate(names):
        assert_same(start[number], kept[number], "read")
        assert ctypes.string_at(to[number].data_ptr(), nbytes) == ctypes.string_at(
            there[number].data_ptr(), nbytes
        )
    assert torch.equal(*casts) and bool(casts[0].any()) != bf16


@pytest.mark.parametrize("what", DURING)
@pytest.mark.one_in(3)
def test_a_save_keeps_what_the_host_steps_over(tmp_path, monkeypatch, what) -> None:
    """The loop writes to shadows, and on the next step to the homes of the save's call."""

    def do(pair: Twins) -> None:
        assert any(unit.host is not None for unit in pair.optimizer._units)
        DURING[what](pair)

    make = partial(warm, *ADAMW)
    save_during(make, tmp_path / "run", do, monkeypatch)


class Asked:
    """Stands for a save: notes the places that are about to be written."""

    def __init__(self) -> None:
        self.places: dict[int, Any] = {}

    def before_write(self, record: Any) -> None:
        pass

    def before_reuse(self, block_id: int, extent: Any) -> None:
        self.places[block_id] = extent


def test_a_save_is_asked_for_the_places_that_the_host_writes() -> None:
    """They were homes before: a step on the device may have left them since the save's call."""
    with warm(*ADAMW) as pair:
        parts, asked = pair.tier._manager.parts, Asked()
        homes = {record.block.id: record.home_extent for record in parts.table}
        parts.homes.keeper = asked
        pair.backward(1)
        parts.homes.keeper = None
        lent = {b.id for step in hosted(pair) for b in step.kept_blocks()}
        assert lent and lent <= asked.places.keys()
        for block_id, place in asked.places.items():
            assert parts.table[block_id].home_extent == place != homes[block_id]
        pair.step()
        pair.check()
