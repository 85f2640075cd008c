"""Two optimizers over the same weights, or over weights of the same blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support_hostbits import device_of_numpy, keeps_share, tried_shares
from support_nn import assert_same
from support_two import Two, everything, matrices, two, vectors
from torch import nn

import tiermem
from tiermem.optim.host import exact
from tiermem.optim.host.loop import library
from tiermem.optim.host.side import HostSide

MASTERS = {"master_dtype": torch.float32}
OVERLAPS = [False, "auto", "forward", "backward"]
ROUNDS = [(0,)] * 6 + [(1,)] + [(0,)] * 3 + [(1,)] * 5 + [(0, 1)] * 5 + [(1, 0)] * 2
"""Which optimizers step in each round: long enough alone that their steps are made ahead."""


def train(pair: Two, rounds: list[tuple[int, ...]] = ROUNDS) -> None:
    for number, which in enumerate(rounds):
        pair.backward(number)
        pair.step(*which)
    pair.check()


@pytest.mark.parametrize("where", ["device", "host", "both"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_masters_follow_what_another_optimizer_writes(overlap: Any, where: str) -> None:
    """Each has masters of its own, and none brings back what was before the other's step."""
    options = {"overlap": overlap, "where": where, **MASTERS}
    with two(options, options) as pair:
        train(pair)
        if overlap == "auto" and where == "device":
            assert pair.optimizers[0].stepped_in_backward


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("mine", [0, 1])
def test_masters_follow_an_optimizer_that_has_none(overlap: Any, mine: int) -> None:
    options = [{"overlap": overlap}, {"overlap": overlap}]
    options[mine] |= MASTERS
    with two(*options) as pair:
        train(pair)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_masters_follow_what_another_optimizer_was_loaded_with(overlap: Any) -> None:
    """Weights are the casts of masters that are loaded."""
    options = {"overlap": overlap, **MASTERS}
    with two(options, options) as pair:
        train(pair, [(0,)] * 4)
        saved = pair.optimizers[0].state_dict()
        train(pair, [(1,)] * 4)
        pair.by_hand[0].load(saved)
        pair.optimizers[0].load_state_dict(saved)
        train(pair, [(1,)] * 4 + [(0,)] * 4)


@pytest.mark.parametrize("where", ["device", "host"])
def test_masters_are_not_looked_at_for_steps_of_other_weights_of_the_block(where: str) -> None:
    options = {"overlap": False, "where": where, **MASTERS}
    with two(options, options, params=(matrices, vectors)) as pair:
        train(pair, [(0, 1)] * 3)
        looks: list[bool] = []
        for unit in (unit for optimizer in pair.optimizers for unit in optimizer._units):

            def seen(look: Callable[[], bool] = unit.foreign.look) -> bool:
                looks.append(look())
                return looks[-1]

            unit.foreign.look = seen  # type: ignore[method-assign]
        for number in range(3):
            pair.backward(number)
            pair.step(0, 1)
        assert looks and not any(looks)


class WhenAwaited(Future[None]):
    """Work that is done as late as may be: when somebody waits for it, in that thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self.work = work

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Does the work, once."""
        if not self.done() and self.set_running_or_notify_cancel():
            try:
                self.work()
            except BaseException as error:
                self.set_exception(error)
            else:
                self.set_result(None)
        return super().exception(timeout)


class Unhurried:
    """Stands for the thread of an optimizer's steps on the host."""

    def __init__(self, real: Any) -> None:
        self.begun: list[WhenAwaited] = []
        self.shutdown = real.shutdown

    def submit(self, run: Callable[..., None], *args: Any) -> WhenAwaited:
        """Begins nothing."""
        self.begun.append(WhenAwaited(lambda: run(*args)))
        return self.begun[-1]


def unhurried(optimizer: Any) -> Unhurried:
    """Makes the host's steps of an optimizer as late as may be, until it is closed."""
    steps = optimizer._host.steps
    found = steps._pool = Unhurried(steps._pool)
    return found


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("overlap", ["auto", "forward", "backward"])
def test_the_host_makes_steps_of_one_weight_in_their_order(overlap: Any, masters: bool) -> None:
    """Each optimizer has a thread of its own, and the first one's is slow."""
    options = {"overlap": overlap, "where": "host", **(MASTERS if masters else {})}
    dtype = torch.bfloat16 if masters else torch.float32
    with two(options, options, dtype=dtype) as pair:
        slow = unhurried(pair.optimizers[0])
        train(pair, [(0, 1)] * 4)
        assert slow.begun


def test_steps_of_other_weights_of_the_block_are_not_waited_for() -> None:
    options = {"overlap": "forward", "where": "host"}
    with two(options, options, dtype=torch.float32, params=(matrices, vectors)) as pair:
        slow = unhurried(pair.optimizers[0])
        for number in range(3):
            pair.backward(number)
            pair.by_hand[0].step()
            pair.by_hand[1].step()
            begun = len(slow.begun)
            for optimizer in pair.optimizers:
                optimizer.step()
            assert len(slow.begun) > begun
            assert not any(step.done() for step in slow.begun[begun:])
            pair.step()
        pair.check()


@pytest.mark.parametrize("params", [(matrices, vectors), (everything, everything)])
@pytest.mark.parametrize("overlap", ["auto", "forward", "backward"])
@pytest.mark.parametrize("where", [("device", "host"), ("host", "device"), ("both", "both")])
def test_what_waits_in_hbm_is_made_before_the_host_is_lent_the_block(
    where: tuple[str, str], overlap: Any, params: Any
) -> None:
    options = [{"overlap": overlap, "where": side} for side in where]
    with two(*options, dtype=torch.float32, params=params) as pair:
        train(pair)


@pytest.mark.skipif(isinstance(library(), str), reason=f"no loop here: {library()}")
def test_by_default_the_host_keeps_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps that have the device's bits, in every second block."""
    adamw = (torch.optim.AdamW, {"lr": 0.01, "fused": True})
    adam = (torch.optim.Adam, {"lr": 0.02, "fused": True})
    with (
        tried_shares(monkeypatch, keeps_share),
        device_of_numpy(),
        two({}, {}, dtype=torch.float32, chosen=(adamw, adam), hbm="64KiB") as pair,
    ):
        slow = unhurried(pair.optimizers[0])
        train(pair, [(0, 1)] * 6)
        assert slow.begun


class Held:
    """Two optimizers whose steps the host makes; those of one are held until they are waited for.

    Attributes:
        pair: Both loops, in which both have been stepped a few times.
        may_go_on: Set while steps are not held.
    """

    def __init__(self, pair: Two, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pair, self.may_go_on = pair, threading.Event()
        for number in range(3):
            pair.backward(number)
            pair.step(0, 1)
        for optimizer in pair.optimizers:
            optimizer.finish()
        self._name = pair.optimizers[first]._host.steps._pool._thread_name_prefix
        self._make_steps, self._wait = exact.make_steps, HostSide._await
        monkeypatch.setattr(exact, "make_steps", self._held)
        monkeypatch.setattr(HostSide, "_await", lambda *given: self._waits(*given))

    def _held(self, rows: Any) -> None:
        if threading.current_thread().name.startswith(self._name):
            self.may_go_on.wait()
        self._make_steps(rows)

    def _waits(self, *given: Any) -> None:
        self.may_go_on.set()
        self._wait(*given)


@contextmanager
def held(first: int, hbm: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """Makes them, over matrices and vectors of the same blocks."""
    adamw = (torch.optim.AdamW, {"lr": 0.01, "fused": True})
    chosen, params = (adamw, adamw), (matrices, vectors)
    with (
        tried_shares(monkeypatch, keeps_share),
        device_of_numpy(),
        two({}, {}, dtype=torch.float32, chosen=chosen, hbm=hbm, params=params) as pair,
    ):
        yield Held(pair, first, monkeypatch)


@pytest.mark.skipif(isinstance(library(), str), reason=f"no loop here: {library()}")
def test_a_block_is_whole_in_its_new_home_before_the_host_steps_others_of_its_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step ahead brings those there as well, behind its own."""
    with held(0, "32KiB", monkeypatch) as loop:
        pair = loop.pair
        pair.backward(9)
        assert pair.optimizers[0]._timing.ahead.provisional._elsewhere
        for number in (0, 1):
            pair.by_hand[number].step()
            pair.optimizers[number].step()
        begun = [job.future for _, job in pair.optimizers[1]._host.steps._jobs.values()]
        assert begun
        for future in begun:
            future.result()
        loop.may_go_on.set()
        pair.check()


@pytest.mark.skipif(isinstance(library(), str), reason=f"no loop here: {library()}")
@pytest.mark.parametrize("first", [0, 1])
def test_a_step_on_the_host_that_has_taken_a_clippings_factor_leaves_it_to_the_others(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both step gradients of one block, which await the factor together."""
    with held(first, "48KiB", monkeypatch) as loop:
        pair = loop.pair
        for number in range(4):
            loop.may_go_on.set()
            pair.backward(9 + number)
            for model in (pair.plain, pair.model):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.001)
            loop.may_go_on.clear()  # what was made ahead is dropped by now
            (*_, shared) = pair.optimizers[first]._units[0].grad_units()
            assert len(shared.entries) == 2
            for which in (first, 1 - first):
                pair.by_hand[which].step()
                pair.optimizers[which].step()
            assert any(unit.host is not None for unit in pair.optimizers[1 - first]._units)
            loop.may_go_on.set()
            pair.check()
            for optimizer in (*pair.by_hand, *pair.optimizers):
                optimizer.zero_grad()


FUSED = (torch.optim.AdamW, {"lr": 0.01, "fused": True})
PLAIN = (torch.optim.SGD, {"lr": 0.05, "foreach": False})


def clip(pair: Two) -> None:
    """Clips the gradients of both models, so that all of them are changed."""
    for model in (pair.plain, pair.model):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.001)


@pytest.mark.skipif(isinstance(library(), str), reason=f"no loop here: {library()}")
@pytest.mark.parametrize(
    ("chosen", "options"),
    [(FUSED, {}), (FUSED, {"where": "host"}), (PLAIN, {"where": "host", "overlap": False})],
)
def test_the_hosts_steps_of_a_block_of_gradients_have_a_clipping_each(
    chosen: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters of a group that was added are stepped apart, by gradients of the same block."""
    with (
        tried_shares(monkeypatch, keeps_share),
        device_of_numpy(),
        two(options, dtype=torch.float32, chosen=[chosen], params=[matrices]) as pair,
    ):
        pair.by_hand[0].optimizer.add_param_group({"params": vectors(pair.plain)})
        pair.optimizers[0].add_param_group({"params": vectors(pair.model)})
        by_hand = pair.by_hand[0].optimizer
        for number in range(3):
            pair.backward(number)
            clip(pair)
            by_hand.step()
            pair.optimizers[0].step()
            assert number == 0 or any(unit.host is not None for unit in pair.optimizers[0]._units)
            for optimizer in (by_hand, *pair.optimizers):
                optimizer.zero_grad()
            pair.compare_weights()


@pytest.mark.skipif(isinstance(library(), str), reason=f"no loop here: {library()}")
def test_what_the_host_can_step_is_asked_once_other_steps_of_the_gradients_are_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some gradients of a block have had a clipping then: the device makes it to the others."""
    with (
        tried_shares(monkeypatch, keeps_share),
        device_of_numpy(),
        two(
            {"where": "host"},
            {},
            dtype=torch.float32,
            chosen=[PLAIN, FUSED],
            params=(matrices, everything),
        ) as pair,
    ):
        unhurried(pair.optimizers[0])
        for number in range(3):
            pair.backward(number)
            clip(pair)
            pair.step(0, 1)
            pair.check()


class Spoils(torch.optim.SGD):
    """Changes the gradients that it is given."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.add_(param, alpha=0.1)
        return super().step(closure)


@pytest.mark.parametrize("cls", [torch.optim.SGD, Spoils])
@pytest.mark.parametrize("in_files", [False, True])
def test_a_step_with_the_hosts_own_bits_leaves_a_clipping_of_other_gradients_to_be_made(
    cls: Any, in_files: bool, tmp_path: Path
) -> None:
    """It clips those that it uses, of a block that another optimizer has gradients in as well."""
    chosen = [(cls, {"lr": 0.05, "foreach": False})] * 2
    options = [{"where": "host", "overlap": False}, {"where": "device", "overlap": False}]
    files = tmp_path if in_files else None
    made = {"dtype": torch.float32, "chosen": chosen, "params": (matrices, vectors), "files": files}
    with two(*options, **made) as pair:
        for number in range(3):
            pair.backward(number)
            clip(pair)
            for which in (0, 1):
                pair.by_hand[which].step()
                pair.optimizers[which].step()
                grads = [[p.grad.clone() for p in m.parameters()] for m in (pair.plain, pair.model)]
                assert_same(*grads, f"gradients after the step of {which}")
            for optimizer in (*pair.by_hand, *pair.optimizers):
                optimizer.zero_grad()
            pair.check()


class Halves(nn.Module):
    """Two matrices in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(32, 32, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.up(x).tanh())
        return found


def halves() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Halves() for _ in range(4))).bfloat16()


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(number)).bfloat16()
    return model(x).float().square().mean()


@pytest.mark.parametrize("overlap", [False, "auto"])
@pytest.mark.parametrize("trained", [False, True])
def test_wider_gradients_that_leave_no_room_for_the_steps_of_another(
    overlap: Any, trained: bool
) -> None:
    """They are refused as the optimizer that wants them is made, and the other one goes on."""
    plain = halves()
    own = torch.optim.AdamW([layer.up.weight for layer in plain], lr=0.1)
    with tiermem.TierManager("cpu", hbm=12 << 10, dram="16MiB") as tier:
        model = tier.wrap(halves(), blocks=[str(number) for number in range(4)])
        weights = [layer.up.weight for layer in model]
        optimizer = tier.optimizer(weights, torch.optim.AdamW, lr=0.1, overlap=overlap)

        def train(number: int) -> None:
            for one, steps in ((plain, own), (model, optimizer)):
                loss_of(one, number).backward()
                steps.step()
                one.zero_grad()

        for number in range(3 * trained):
            train(number)
        for _ in range(2):
            with pytest.raises(tiermem.CapacityError, match="give hbm= at least 16"):
                tier.optimizer(model, torch.optim.SGD, lr=0.1, grad_dtype=torch.float64)
        for number in range(3, 6):
            train(number)
        assert_same(dict(plain.state_dict()), dict(model.state_dict()), "weights")


def test_wider_gradients_beside_those_of_another_that_were_cleared() -> None:
    """The block has gradients of the other's parameters no more, and nobody has looked yet."""
    with tiermem.TierManager("cpu", hbm="1MiB", dram="16MiB") as tier:
        model = tier.wrap(halves())
        first = tier.optimizer([layer.up.weight for layer in model], torch.optim.SGD, lr=0.1)
        loss_of(model, 0).backward()
        first.step()
        downs = [layer.down.weight for layer in model]
        with pytest.raises(tiermem.StepError, match="zero_grad"):
            tier.optimizer(downs, torch.optim.SGD, lr=0.1, grad_dtype=torch.float32)
        model.zero_grad()
        tier.optimizer(downs, torch.optim.SGD, lr=0.1, grad_dtype=torch.float32)
        loss_of(model, 1).backward()
        for layer in model:
            assert layer.up.weight.grad.dtype is torch.bfloat16
            assert layer.down.weight.grad.dtype is torch.float32


@pytest.mark.parametrize("shared", [False, True], ids=["its own optimizer", "a shared one"])
def test_an_optimizer_beside_one_whose_model_was_unwrapped(shared: bool) -> None:
    """Nobody closed the other one, as after a script's first phase; its steps need no room now."""
    plain = halves()
    own = torch.optim.AdamW(plain.parameters(), lr=0.1)
    with tiermem.TierManager("cpu", hbm="64KiB", dram="16MiB") as tier:
        former, other = tier.wrap(halves()), tier.wrap(halves())
        params = [*former.parameters(), *(other.parameters() if shared else ())]
        first = tier.optimizer(params, torch.optim.AdamW, lr=0.1)
        loss_of(former, 0).backward()
        first.step()
        tier.unwrap(former)
        model = tier.wrap(halves())
        if shared:
            first.add_param_group({"params": model[0].parameters()})
            second = tier.optimizer(model[1:].parameters(), torch.optim.AdamW, lr=0.1)
            own = torch.optim.AdamW(plain[1:].parameters(), lr=0.1)
        else:
            second = tier.optimizer(model, torch.optim.AdamW, lr=0.1)
        for number in range(2):
            for one, steps in ((plain, own), (model, second)):
                loss_of(one, number).backward()
                steps.step()
                one.zero_grad()
        assert_same(dict(plain.state_dict()), dict(model.state_dict()), "weights")
