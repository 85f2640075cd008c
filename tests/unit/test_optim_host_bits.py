"""Steps on the host with the device's bits: the loop, its proof, and ``where="auto"``.

The device is one that NumPy plays (:mod:`support_hostbits`), which shares no code with the loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support_hostbits import (
    Kernels,
    device_of_numpy,
    foreach_adam,
    foreach_sgd,
    keeps_share,
    tried_shares,
)
from support_nn import Tiers, default_dtype
from support_optim import Net, Twins, loss_of

from tiermem.errors import StepError
from tiermem.nn.groups.grads import GradStore
from tiermem.nn.groups.gradunit import GradUnit
from tiermem.optim.balance import Speed
from tiermem.optim.host import exact, loop, proof
from tiermem.optim.host.devicebits import ShareTrial
from tiermem.optim.host.exact import ExactCalls, kind_of_step
from tiermem.optim.host.factor import Factor
from tiermem.optim.host.spread import Rates
from tiermem.optim.rules.bits import bits
from tiermem.optim.rules.plainstep import run_unseen
from tiermem.optim.rules.probe import settings_of

pytestmark = pytest.mark.skipif(
    isinstance(loop.library(), str), reason=f"no loop here: {loop.library()}"
)

CPU = torch.device("cpu")
DRAM = Tiers("dram")
BF16, FP32 = torch.bfloat16, torch.float32
FUSED = {"lr": 0.01, "fused": True}
STEPS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"weight_decay": 0.0, "amsgrad": True, "betas": (0.3, 0.98)}),
    (torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
]


_TRY = ShareTrial.host_has_share


@pytest.fixture(autouse=True)
def _few_values(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Proofs of few values, and of no other test."""
    counts = (*range(1, 40), 100, 1000, 12345)
    with tried_shares(monkeypatch, keeps_share, sizes=(2048, 1021), counts=counts):
        yield


def _prove(cls: Any, settings: dict[str, Any], stepped: torch.dtype, weight: torch.dtype) -> Any:
    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = cls(groups, **FUSED, **settings)
        return found

    group = make([{"params": [torch.nn.Parameter(torch.zeros(1))]}]).param_groups[0]
    kind = kind_of_step(cls, settings_of(group), stepped, weight, CPU)
    assert not isinstance(kind, str), kind
    return proof.prove(kind, settings_of(group), make, CPU)


@pytest.mark.parametrize(("stepped", "weight"), [(FP32, FP32), (FP32, BF16), (BF16, BF16)])
@pytest.mark.parametrize(("cls", "settings"), STEPS)
def test_the_loop_is_the_device_on_values_of_all_sizes(
    cls: Any, settings: dict[str, Any], stepped: torch.dtype, weight: torch.dtype
) -> None:
    with device_of_numpy(Kernels(off=1)) as kernels:
        found = _prove(cls, settings, stepped, weight)
    assert isinstance(found, proof.Proven), found
    assert kernels.calls
    proof.forget()
    if stepped is FP32:  # another one is noticed, that differs in the last bit of a float32
        with device_of_numpy(Kernels(wrong=True)):
            assert isinstance(_prove(cls, settings, stepped, weight), str)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("cls", "settings"), [STEPS[0], STEPS[4]])
def test_a_proof_is_the_same_under_any_default_dtype(
    cls: Any, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    with device_of_numpy(Kernels(off=1)), default_dtype(dtype):
        assert isinstance(_prove(cls, settings, FP32, BF16), proof.Proven)
    proof.forget()
    with device_of_numpy(Kernels(wrong=True)), default_dtype(dtype):
        assert isinstance(_prove(cls, settings, FP32, BF16), str)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"betas": (0.3, 0.98), "amsgrad": True}),
        (torch.optim.Adam, {"maximize": True, "amsgrad": True}),
        (torch.optim.Adam, {"betas": (0.95, 0.9), "eps": 1e-3}),
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    ],
)
def test_what_each_kernel_of_foreach_stores_in_bfloat16(
    cls: Any, settings: dict[str, Any], decay: float
) -> None:
    """In whole vectors and not, in place."""
    source = torch.Generator().manual_seed(3)
    param = torch.nn.Parameter(proof._values(5003, BF16, source))
    optimizer = cls([param], lr=0.013, fused=True, weight_decay=decay, **settings)
    keys = {"p": param, **({} if cls is torch.optim.SGD else _moments(optimizer, source))}
    want = {name: tensor.detach().float().numpy().copy() for name, tensor in keys.items()}
    kw = {**optimizer.param_groups[0], "decoupled": cls is torch.optim.AdamW}
    steps = foreach_sgd if cls is torch.optim.SGD else foreach_adam
    for step in range(1, 4):
        param.grad = proof._values(5003, BF16, source)
        steps(want, param.grad.float().numpy(), step, kw)
        with ExactCalls(proof.Proven("foreach", 0x7FFF)):
            optimizer.step()
        momentum = optimizer.state[param].get("momentum_buffer")
        found = keys if momentum is None else {**keys, "m": momentum}
        for name, values in want.items():
            theirs = torch.from_numpy(values).to(BF16)
            ours = found[name].detach()
            same = (ours.view(torch.int16) == theirs.view(torch.int16)) | ours.isnan()
            assert bool(same.all()) and torch.equal(ours.isnan(), theirs.isnan()), (name, step)
            if name != "m" or cls is not torch.optim.SGD or step > 1:  # else a copy of gradients
                assert set(ours.view(torch.int16)[ours.isnan()].tolist()) <= {0x7FFF}


def _moments(optimizer: Any, source: torch.Generator) -> dict[str, torch.Tensor]:
    (param,) = optimizer.param_groups[0]["params"]
    state = optimizer.state[param]
    state["step"] = torch.tensor(0.0)
    names = {"m": "exp_avg", "v": "exp_avg_sq"}
    if optimizer.param_groups[0]["amsgrad"]:
        names["x"] = "max_exp_avg_sq"
    for key in names.values():
        values = proof._values(param.numel(), BF16, source)
        state[key] = values.abs_() if key.endswith("sq") else values
    return {name: state[key] for name, key in names.items()}


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_step_without_torchs_python_is_the_step_with_it(cls: Any, hooked: bool) -> None:
    """Several groups, parameters without gradients or state, steps of several numbers."""
    source = torch.Generator().manual_seed(4)
    start = [proof._values(257 + n, FP32, source) for n in range(5)]
    gradients = [[proof._values(257 + n, FP32, source) for n in range(5)] for _ in range(5)]
    found = []
    for run in (ExactCalls.step, _with_torch):
        params = [torch.nn.Parameter(value.clone()) for value in start]
        groups = [{"params": params[:2], "weight_decay": 0.0}, {"params": params[2:]}]
        optimizer = cls(groups, lr=0.01, fused=True, weight_decay=0.1, amsgrad=True)
        seen: list[int] = []
        if hooked:
            optimizer.register_step_post_hook(partial(_count, seen))
        for step, given in enumerate(gradients):
            for number, (param, gradient) in enumerate(zip(params, given, strict=True)):
                param.grad = None if (number + step) % 4 == 0 or step < number else gradient
            run(ExactCalls(proof.Proven("foreach", 0x7FFF)), optimizer, run_unseen)
        assert len(seen) == (len(gradients) if hooked else 0)
        state = optimizer.state_dict()["state"].values()
        found.append([*params, *(value for kept in state for value in kept.values())])
    assert len(found[0]) == len(found[1])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("name", ["step", "_init_group"])
def test_what_a_user_gives_a_class_is_called(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    own, seen = getattr(torch.optim.AdamW, name), []

    def method(self: Any, *args: Any) -> Any:
        seen.append(1)
        return own(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, name, method)
        _two_steps(_fresh())
    assert len(seen) == 2


def _two_steps(
    proven: proof.Proven, lrs: tuple[float, float] = (0.01, 0.01), **given: Any
) -> torch.Tensor:
    param = torch.nn.Parameter(torch.full((3,), -0.0))
    optimizer = torch.optim.AdamW([param], fused=True, weight_decay=0.0)
    for lr in lrs:
        optimizer.param_groups[0]["lr"] = lr
        param.grad = torch.ones(3)
        ExactCalls(proven).step(optimizer, run_unseen)
        vars(optimizer).update(given)
    return param.detach()


def test_a_scale_is_refused_with_and_without_torchs_python() -> None:
    for name in ("grad_scale", "found_inf"):
        with pytest.raises(RuntimeError, match="without a scale"):
            _two_steps(_fresh(), **{name: torch.ones(1)})


def test_numbers_are_kept_by_all_bits_of_the_settings() -> None:
    proven = _fresh()
    for lr in (0.0, -0.0):
        kept = _two_steps(proven, (lr, lr))
        assert torch.equal(kept.signbit(), _two_steps(_fresh(), (lr, lr)).signbit())
    nan = [float(value) for value in ("nan", "nan")]
    _two_steps(proven, (nan[0], nan[1]))
    _two_steps(proven, (nan[1], nan[0]))
    assert len(proven.numbers) == 6


def _fresh() -> proof.Proven:
    return proof.Proven("foreach", 0x7FFF)


def test_another_thread_may_clear_the_numbers_that_are_kept() -> None:
    """The thread that measures steps has the same ones as that which makes them."""

    class Cleared(dict[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key, value)
            self.clear()

    proven = proof.Proven("foreach", 0x7FFF, numbers=Cleared())
    assert torch.equal(_two_steps(proven), _two_steps(_fresh()))


def _count(seen: list[int], *_: object) -> None:
    seen.append(1)


@pytest.mark.parametrize("flavour", ["fused", "foreach"])
@pytest.mark.parametrize("apart", [False, True])
def test_gradients_in_float32_are_cast_before_a_step_in_bfloat16(flavour: Any, apart: bool) -> None:
    """In place and elsewhere; so the device casts them."""
    source = torch.Generator().manual_seed(5)
    start = [proof._values(3001, BF16, source) for _ in range(3)]
    gradient = proof._values(3001, FP32, source)
    found = []
    for given in (gradient, gradient.to(BF16)):
        param, first, second = (t.clone() for t in (start[0], start[1], start[2].abs()))
        optimizer = torch.optim.AdamW([torch.nn.Parameter(param)], lr=0.01, fused=True)
        own = optimizer.param_groups[0]["params"][0]
        state = {"step": torch.tensor(3.0), "exp_avg": first, "exp_avg_sq": second}
        optimizer.state[own] = state
        own.grad = proof.stand_in(own)
        there = {t.data_ptr(): torch.zeros_like(t) for t in (own.detach(), first, second)}
        where = {address: t.data_ptr() for address, t in there.items()} if apart else None
        device = proof.Proven(flavour, 0x7FFF, {float(np.float32(b)): 0 for b in (0.9, 0.999)})
        calls = ExactCalls(device, {own.data_ptr(): proof.Beside(given)}, where)
        with torch.no_grad():
            calls.step(optimizer, run_unseen)
        found.append([*there.values()] if apart else [own.detach(), first, second])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(bits(ours), bits(theirs))
        assert ours.count_nonzero() > 2000


def _with_torch(mode: ExactCalls, optimizer: Any, run: Any) -> None:
    with mode:
        run(optimizer)


def _loop(seconds: Callable[[int, bool], float], steps: int, load: Any = lambda: 0) -> list[bool]:
    """Makes steps, each of which takes what ``seconds`` says; returns on which sides."""
    now = 0.0
    trial = ShareTrial(lambda: now, load)
    seen: list[bool] = []
    for number in range(steps):
        ticket = object()
        seen.append(_TRY(trial, ticket))
        assert _TRY(trial, ticket) is seen[-1]  # made again after an error, it counts once
        now += seconds(number, seen[-1])
    return seen


_TRIED = [True] * 16 + [False] * 6  # 13 and 2 of them are made before any of a side counts
_CLEAR = _TRIED[:-2]
"""The same where two steps without the share are enough to see that it is far faster."""


@pytest.mark.parametrize(
    ("seconds", "kept", "tried"),
    [(0.5, True, _CLEAR), (0.95, True, _TRIED), (0.99, False, _TRIED), (2.0, False, _TRIED)],
)
def test_a_share_stays_where_it_makes_a_loop_faster(
    seconds: float, kept: bool, tried: list[bool]
) -> None:
    def takes(number: int, on_host: bool) -> float:
        if number in (*range(12), 16, 17):  # what is learned anew takes its time
            return 9.0
        odd = (-1) ** number * 0.4  # what one step is late, the next one is early
        return (seconds if on_host else 1.0) + (9.0 if number in (14, 20) else odd)

    assert _loop(takes, 46) == tried + [kept] * (46 - len(tried))


def test_a_share_that_comes_to_hinder_is_tried_anew_and_so_is_one_that_did() -> None:
    """The host is slow from step 90 to 150, and again from 1,000 on."""

    def takes(number: int, on_host: bool) -> float:
        slow = 90 <= number < 150 or number >= 1000
        return (3.0 if slow else 0.5) if on_host else 1.0

    seen = _loop(takes, 1100)
    again = [False] * 6 + [True] * 6
    assert seen[:20] == _CLEAR
    assert all(seen[20:90])
    late = 94  # four of the last eight steps took longer
    assert seen[late : late + 12] == again
    assert not any(seen[late + 12 : 150])
    back = seen.index(True, 150)
    assert back < 150 + 128 and all(seen[back:1000])
    assert sum(seen[1005:]) <= 6


def test_a_share_is_tried_with_each_number_of_tokens_and_remembered() -> None:
    """Here the host helps short passes and hinders long ones; lengths come in turn.

    Those of another length begin on the side of the ones before.
    """
    now, load = 0.0, 0
    trial = ShareTrial(lambda: now, lambda: load)
    seen: dict[int, list[bool]] = {1: [], 4: []}
    for number in range(48):
        load = 4 if number % 2 else 1
        now += load * (1.5 if load == 4 else 0.5) if trial.is_on else load
        seen[load].append(_TRY(trial, object()))
    after = [True] * 9 + [False] * 6  # 6 and 2 are made before any counts
    for load, first, kept in ((1, _CLEAR, True), (4, after, False)):
        assert seen[load] == first + [kept] * (24 - len(first))
        assert trial.decided and trial.is_on is kept
    load = 2
    assert not trial.decided and not trial.is_on
    load = 1
    assert trial.is_on
    load = 3
    assert not trial.decided and trial.is_on


def test_a_share_is_not_tried_where_it_is_not_expected_to_help() -> None:
    """As soon as it is expected it is tried, and what was tried is known better."""
    now, load, shared = 0.0, 1, 0.5
    trial = ShareTrial(lambda: now, lambda: load)

    def steps(count: int) -> list[bool]:
        nonlocal now
        seen = []
        for _ in range(count):
            seen.append(_TRY(trial, object()))
            now += shared if seen[-1] else 1.0
        return seen

    assert all(steps(5))
    trial.expect(helps=False)
    assert trial.decided and not trial.is_measured
    assert not any(steps(3000))
    load = 2
    assert steps(1) == [False] and not trial.decided  # another length may be expected to have it
    trial.expect(helps=False)
    load = 1
    trial.expect(helps=True)
    assert not trial.decided
    trial.expect(helps=True)
    after = steps(40)
    assert after[:15] == [True] * 9 + [False] * 4 + [True] * 2  # 6 and 2 before any counts
    assert trial.decided and trial.is_measured and all(after[15:])
    trial.expect(helps=False)
    assert trial.decided and all(steps(40))
    shared = 3.0  # the host has other work by now
    steps(60)
    assert trial.decided and not any(steps(3000))
    load = 2
    assert trial.decided and not trial.is_on


def test_a_share_is_expected_to_help_where_copies_are_the_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compute is measured with the host's own time in it, where the device waits for that."""
    monkeypatch.setattr(ShareTrial, "host_has_share", _TRY)
    with device_of_numpy(), Twins(Net, DRAM, torch.optim.AdamW, FUSED) as twins:
        for step in range(3):
            twins.backward(step)
            twins.step()
        trial, ahead = twins.optimizer._host.movable.trial, twins.optimizer._timing.ahead
        assert trial.is_on
        busy = Speed(forward=1e-9, backward=1e-9, up=1e6, down=1e6)
        groups = twins.optimizer.param_groups
        twins.optimizer._host.movable.rates = Rates(0.0, 1.0)
        for speed, on_host in (
            (replace(busy, forward=1.0, backward=1.0), False),
            (busy, True),
            (replace(busy, backward=0.3), False),
        ):
            ahead._left._choose(speed, groups)
            assert trial.is_on is on_host
            hosted = any(map(ahead._others.has, twins.optimizer._units))
            assert hosted is on_host
        monkeypatch.setattr(ahead._left, "_speed", lambda: replace(busy, backward=0.3))
        monkeypatch.setattr(twins.tier._manager.prefetcher.fetcher, "beside", True)
        for waits in (False, True, True, False):  # where steps wait, forward copies state too
            ahead._left.note_waits(waits, groups)
            assert trial.decided is not waits  # it is tried there, by itself
        assert {waits for _, waits in trial._by_load} == {False, True}
        monkeypatch.undo()
        # its own time, a second for an element, is the longest
        twins.optimizer._host.movable.rates = Rates(1.0, 1.0)
        ahead._left._choose(busy, groups)
        assert not trial.is_on
        twins.backward(3)
        twins.step()
        assert "compute takes as long" in twins.optimizer.stepped_where
        twins.check()


def test_groups_that_are_added_while_steps_wait_are_expected_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """How long passes take is known later here; no backward has noted settings since."""

    def all_but_one(model: torch.nn.Module) -> list[dict[str, Any]]:
        return [{"params": [p for n, p in model.named_parameters() if "layers.2" not in n]}]

    busy = Speed(forward=1e-9, backward=1e-9, up=1e6, down=1e6)
    given = (Net, Tiers("dram", dram=8 << 20), torch.optim.AdamW, FUSED)
    with device_of_numpy(), Twins(*given, groups=all_but_one) as twins:
        ahead = twins.optimizer._timing.ahead
        monkeypatch.setattr(twins.tier._manager.prefetcher.fetcher, "beside", True)
        for step in range(6):
            if step == 3:
                assert ahead._habit.in_vain
                twins.optimizer.add_param_group(
                    {"params": list(twins.model.layers[2].parameters())}
                )
            if step == 5:
                monkeypatch.setattr(ahead._left, "_speed", lambda: busy)
            loss_of(twins.model, step).backward()
            torch.nn.utils.clip_grad_norm_(twins.model.parameters(), 0.01)
            twins.optimizer.step()
            twins.optimizer.zero_grad()
        assert {waits for _, waits in twins.optimizer._host.movable.trial._by_load} == {False, True}


def test_steps_are_made_both_ways_until_it_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are made in backward, on the side that is tried by then."""
    monkeypatch.setattr(ShareTrial, "host_has_share", _TRY)
    with device_of_numpy(), Twins(Net, DRAM, torch.optim.AdamW, FUSED) as twins:
        optimizer = twins.optimizer
        assert optimizer._timing.ahead is not None
        hosted = [unit for unit in optimizer._units if unit.host is not None]
        ahead, sides = [], []
        for step in range(20):
            twins.backward(step, use_extra=step != 2)
            ahead.append(any(unit in optimizer._timing.ahead.provisional for unit in hosted))
            twins.step()
            sides.append(any(unit.host is not None for unit in hosted))
        twins.check()
        first = [False] + [True] * 16  # state comes about on the device
        assert sides == [*first, *[False] * 3]  # the last of those was stepped before its step()
        assert ahead == [False, *[True] * 19]


def test_a_scale_is_undone_at_once_as_long_as_the_host_has_a_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It makes no step of gradients that await anything."""
    changed: list[GradUnit] = []
    change_now = GradStore.change_now

    def spy(self: GradStore, unit: GradUnit, *args: Any) -> None:
        changed.append(unit)
        change_now(self, unit, *args)

    monkeypatch.setattr(GradStore, "change_now", spy)
    options: dict[str, Any] = {"overlap": False, "master_dtype": None}
    with device_of_numpy(), Twins(Net, DRAM, torch.optim.AdamW, FUSED, **options) as twins:
        both = [(twins.plain, twins.by_hand.optimizer), (twins.model, twins.optimizer)]
        scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in both]
        for step in range(6):
            changed.clear()
            twins.optimizer._host.movable.trial.is_on = on_host = step < 3
            for (model, optimizer), scaler in zip(both, scalers, strict=True):
                scaler.scale(loss_of(model, step)).backward()
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert bool(changed) is on_host
            twins.check()
        shares = twins.optimizer._runtime.grads.host_shares
        twins.optimizer.close()
        assert not shares


def test_torchs_own_cpu_kernels_have_other_bits() -> None:
    assert "others" in _prove(torch.optim.AdamW, {}, FP32, BF16)
    assert "gives other bits" in _prove(torch.optim.SGD, {"momentum": 0.9}, FP32, BF16)


@pytest.mark.parametrize("overlap", ["auto", False, "backward"])
@pytest.mark.parametrize(
    ("cls", "settings"), [STEPS[0], STEPS[1], (torch.optim.SGD, {"weight_decay": 0.1})]
)
@pytest.mark.one_in(3)
def test_auto_steps_on_both_sides_with_the_residents_bits(
    cls: Any, settings: dict[str, Any], overlap: Any
) -> None:
    given = {**FUSED, **settings}
    with device_of_numpy(), Twins(Net, DRAM, cls, given, overlap=overlap) as twins:
        units = twins.optimizer._units
        assert 0 < sum(unit.host is not None for unit in units) < len(units)
        for step in range(4):
            twins.backward(step, use_extra=step != 1)
            twins.step()
            if step > 1 or overlap != "backward":
                twins.check()


@pytest.mark.parametrize("where", ["auto", "both"])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.one_in(2)
def test_gradients_in_float32_of_bfloat16_weights_are_cast_first(cls: Any, where: Any) -> None:
    """As the device does, which has one dtype for all that a kernel is given."""
    dtypes = {"master_dtype": None, "grad_dtype": FP32}
    options: dict[str, Any] = {**dtypes, "where": where, "overlap": False}
    with device_of_numpy(), Twins(Net, DRAM, cls, FUSED, **options) as twins:
        for step in range(3):
            twins.backward(step)
            twins.step()
            twins.check()
        assert any(unit.host is not None for unit in twins.optimizer._units)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.one_in(2)
def test_gradients_that_the_loop_does_not_read_are_the_devices(
    dtype: torch.dtype, later: bool
) -> None:
    """It reads float32 and bfloat16; another optimizer may ask for others later."""
    options: dict[str, Any] = {"master_dtype": None, "grad_dtype": None if later else dtype}
    roomy = Tiers("dram", extra_hbm=1 << 16)
    with device_of_numpy(), Twins(Net, roomy, torch.optim.AdamW, FUSED, **options) as twins:
        if later:
            assert any(unit.host is not None for unit in twins.optimizer._units)
            given = {"lr": 0.0, "grad_dtype": dtype}
            other = twins.tier.optimizer(twins.model, torch.optim.SGD, **given)
            assert other.stepped_where
            twins.by_hand.grad_dtype = dtype
        for step in range(3):
            twins.backward(step)
            twins.step()
            twins.check()
        assert not any(unit.host is not None for unit in twins.optimizer._units)


@pytest.mark.parametrize(
    ("weights", "gradients", "total"),
    [(FP32, BF16, FP32), (FP32, BF16, BF16), (BF16, FP32, FP32), (BF16, FP32, BF16)],
)
@pytest.mark.one_in(2)
def test_factors_of_gradients_in_other_dtypes_than_weights_are_the_devices(
    weights: torch.dtype, gradients: torch.dtype, total: torch.dtype
) -> None:
    """On CUDA a product of bfloat16 and a factor in float32 has that rounded first."""
    build = partial(Net, weights)
    options: dict[str, Any] = {"master_dtype": None, "grad_dtype": gradients}
    with device_of_numpy(), Twins(build, DRAM, torch.optim.AdamW, FUSED, **options) as twins:
        units = [unit for unit in twins.optimizer._units if unit.host is not None]
        for step, norm in enumerate((1e6, 1e6, 0.7, 1e6)):
            twins.backward(step)
            norms = torch.ones((), dtype=total)
            given = twins.by_hand.gradients()
            torch._foreach_mul_(given, torch.clamp(norm / (norms + 1e-6), max=1.0))
            torch.nn.utils.clip_grads_with_norm_(twins.model.parameters(), norm, norms)
            twins.step()
            assert all((unit.host is not None) == (step in (1, 3)) for unit in units)
            twins.check()


@pytest.mark.parametrize("where", ["auto", "host"])
def test_a_step_that_fails_after_its_counters_leaves_them_as_they_were(
    monkeypatch: pytest.MonkeyPatch, where: Any
) -> None:
    make_steps, left = exact.make_steps, [1]

    def fails(rows: Any) -> None:
        if left and threading.current_thread() is not threading.main_thread():
            left.pop()
            raise RuntimeError("the host's step has new state")
        make_steps(rows)

    options = {"where": where, "overlap": False}
    with device_of_numpy(), Twins(Net, DRAM, torch.optim.AdamW, FUSED, **options) as twins:
        for step in range(2):
            twins.backward(step)
            twins.step()
        twins.backward(2)
        monkeypatch.setattr(exact, "make_steps", fails)
        with pytest.raises(StepError, match="new state"):
            twins.optimizer.step()
            twins.check()
        twins.step()  # makes what is left
        twins.check()


def test_what_the_host_would_round_otherwise_is_the_devices_for_that_step() -> None:
    with device_of_numpy(), Twins(Net, DRAM, torch.optim.AdamW, FUSED) as twins:
        units = [unit for unit in twins.optimizer._units if unit.host is not None]
        assert units
        assert "with the device's bits" in twins.optimizer.stepped_where
        twins.backward(0)
        twins.step()
        twins.backward(1)
        twins.clip_value(0.001)
        twins.step()
        assert not any(unit.host is not None for unit in units)  # gradients awaited a change
        twins.check()
        twins.backward(2)
        for model in (twins.plain, twins.model):  # a user puts an ordinary tensor there
            weight = model.layers[0].up.weight
            weight.grad = weight.grad * 2
        twins.step()
        there = [unit.host is not None for unit in units]
        assert any(there)
        assert not all(there)
        twins.check()
        for optimizer in (twins.by_hand.optimizer, twins.optimizer):
            optimizer.param_groups[0]["lr"] = torch.tensor(0.02)
        twins.backward(3)
        twins.step()
        twins.check()


def test_state_comes_about_in_the_order_of_the_parameters() -> None:
    """A program that adds up what it finds in the state adds in the same order."""
    with device_of_numpy(), Twins(Net, DRAM, torch.optim.AdamW, FUSED) as twins:
        units = [unit for unit in twins.optimizer._units if unit.host is not None]
        assert 0 < len(units) < len(twins.optimizer._units)
        for step in range(2):
            twins.backward(step)
            twins.step()
        assert all(unit.host is not None for unit in units)
        order = [id(param) for param in twins.optimizer.state]
        assert order == [id(p) for group in twins.optimizer.param_groups for p in group["params"]]


def test_products_that_are_others_on_the_device_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    multiply = torch._foreach_mul_

    def truncated(tensors: Any, by: Any) -> None:
        multiply(tensors, by)
        for tensor in tensors:
            tensor.nan_to_num_().nextafter_(torch.zeros_like(tensor))

    monkeypatch.setattr(torch, "_foreach_mul_", truncated)
    with device_of_numpy(Kernels(off=1)):
        assert isinstance(_prove(torch.optim.AdamW, {}, FP32, FP32), str)
        assert isinstance(_prove(torch.optim.SGD, {}, FP32, FP32), proof.Proven)


def test_a_factor_is_that_of_when_it_was_asked_for() -> None:
    by = torch.tensor([0.25], dtype=BF16, requires_grad=True)
    factor = Factor(by)
    by.data.zero_()
    assert factor.dtype is BF16
    assert factor.value() == 0.25


@pytest.mark.parametrize("norms", [(1e6, 1e6, 0.01, 1e6), (0.01, 0.02, 0.01, 0.005)])
def test_gradients_that_await_a_clipping_are_stepped_on_the_host(norms: Sequence[float]) -> None:
    with device_of_numpy(), Twins(Net, DRAM, torch.optim.AdamW, FUSED) as twins:
        units = [unit for unit in twins.optimizer._units if unit.host is not None]
        for step, norm in enumerate(norms):
            twins.backward(step)
            twins.clip_norm(norm)
            twins.step()
            on_host = step > 0  # the first steps are the device's
            assert all((unit.host is not None) == on_host for unit in units)
            twins.check()
        twins.backward(3)
        twins.clip_norm(norms[-1])
        twins.optimizer.step()
        twins.by_hand.step()
        for mine, theirs in zip(twins.model.parameters(), twins.plain.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
        twins.check()


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_device_makes_two_products_and_those_of_other_dtypes(dtype: torch.dtype) -> None:
    with device_of_numpy(), Twins(Net, DRAM, torch.optim.AdamW, FUSED) as twins:
        units = [unit for unit in twins.optimizer._units if unit.host is not None]
        for step, norms in enumerate(((1e6,), (0.7,), (0.7, 0.9), (0.7, 1e6))):
            twins.backward(step)
            for norm in norms:
                for model in (twins.plain, twins.model):
                    total = torch.ones((), dtype=dtype)
                    torch.nn.utils.clip_grads_with_norm_(model.parameters(), norm, total)
            twins.step()
            on_host = step in (1, 3) and dtype is BF16  # as the gradients
            assert all((unit.host is not None) == on_host for unit in units)
            twins.check()


def test_a_clipping_of_some_gradients_only_is_the_devices() -> None:
    with device_of_numpy(), Twins(Net, DRAM, torch.optim.AdamW, FUSED) as twins:
        units = [unit for unit in twins.optimizer._units if unit.host is not None]
        twins.backward(0)
        twins.step()
        twins.backward(1)
        for model in (twins.plain, twins.model):
            torch.nn.utils.clip_grad_norm_(model.layers[0].up.weight, 0.001)
        twins.step()
        there = [unit.host is not None for unit in units]
        assert any(there)
        assert not all(there)
        twins.check()


def test_a_gradient_that_is_clipped_twice_in_one_call_is_the_devices() -> None:
    """As that of a tied weight is, where parameters of both of its modules are given."""
    with device_of_numpy(), Twins(Net, DRAM, torch.optim.AdamW, FUSED) as twins:
        units = [unit for unit in twins.optimizer._units if unit.host is not None]
        twins.backward(0)
        twins.step()
        for number in (1, 2):
            twins.backward(number)
            for model in (twins.plain, twins.model):
                torch.nn.utils.clip_grad_norm_([*model.parameters()] * number, 0.001)
            twins.step()
            twins.check()
            assert all((unit.host is not None) == (number == 1) for unit in units)


def test_other_settings_are_proved_or_left_to_the_device() -> None:
    with device_of_numpy(), Twins(Net, DRAM, torch.optim.AdamW, FUSED) as twins:
        units = [unit for unit in twins.optimizer._units if unit.host is not None]
        twins.backward(0)
        twins.step()  # the first steps are the device's
        for change in ({"lr": 0.003}, {"weight_decay": 0.0}, {"betas": (0.8, 0.95)}):
            for optimizer in (twins.by_hand.optimizer, twins.optimizer):
                optimizer.param_groups[0].update(change)
            twins.backward(len(change))
            twins.step()
            assert all(unit.host is not None for unit in units)
            twins.check()


def test_a_device_with_other_bits_makes_all_steps() -> None:
    with Twins(Net, DRAM, torch.optim.AdamW, FUSED) as twins:
        assert not any(unit.host is not None for unit in twins.optimizer._units)
        assert "all on the device: the powers of betas" in twins.optimizer.stepped_where
        twins.backward(0)
        twins.step()
        twins.check()


@pytest.mark.parametrize("where", ["host", "both"])
def test_the_host_that_is_asked_for_has_the_devices_bits_where_they_are_proved(where: Any) -> None:
    with device_of_numpy(), Twins(Net, DRAM, torch.optim.AdamW, FUSED, where=where) as twins:
        assert any(unit.host is not None for unit in twins.optimizer._units)
        for step in range(2):
            twins.backward(step)
            twins.step()
        twins.check()


def test_without_a_compiler_the_device_makes_all_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    loop.library.cache_clear()
    try:
        with device_of_numpy(), Twins(Net, DRAM, torch.optim.AdamW, FUSED) as twins:
            assert "there is no C compiler ('no-such-compiler')" in twins.optimizer.stepped_where
            twins.backward(0)
            twins.step()
            twins.check()
    finally:
        loop.library.cache_clear()
