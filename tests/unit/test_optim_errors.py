"""An optimizer class, or a hook, that raises in the middle of a step; and a way out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support_nn import Tiers, assert_same, check_table
from support_optim import Layer, Twins, loss_of, one_group
from torch import nn
from torch.optim import optimizer as torch_optimizer

import tiermem
from tiermem.optim.rules.plainstep import run_scaled


class Bang(Exception):
    """What goes wrong."""


class Fuse:
    """When it goes wrong: after so many parameters, once; or at every one of them."""

    left = -1
    always = False
    error: type[BaseException] = Bang

    @classmethod
    def burn(cls) -> bool:
        if cls.always or cls.left == 0:
            cls.left = -1
            return True
        cls.left -= cls.left > 0
        return False


@pytest.fixture(autouse=True)
def _unlit() -> Any:
    yield
    Fuse.left, Fuse.always, Fuse.error = -1, False, Bang


class Own(torch.optim.Optimizer):
    """Momentum by hand. Where it raises, everything it has is half written."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "decay": 0.9})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"], state["count"] = torch.tensor(0.0), 0
                    state["momentum"] = torch.zeros_like(param)
                state["step"] += 1
                state["count"] += 1
                param.grad.mul_(0.5)  # so that gradients are spoiled, too
                state["momentum"].mul_(group["decay"]).add_(param.grad)
                param.add_(state["momentum"], alpha=-group["lr"] / state["count"])
                if Fuse.burn():
                    state["momentum"] = state["momentum"] * 3
                    state["junk"], group["junk"], group["decay"] = 1, 2, 0.1
                    param.data = param.data * 2
                    raise Fuse.error("bang")
                param.mul_(0.999)


class Small(nn.Module):
    """A tied embedding and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList([Layer(8, 8), Layer(8, 12)])

    def forward(self, ids: torch.Tensor, use_extra: bool = True) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.linear(x, self.embed.weight)


def half() -> nn.Module:
    return Small().to(torch.bfloat16)


PARAMS = 11
PLACES = {
    "streaming": Tiers("tight"),
    "staying": Tiers("roomy", extra_hbm=1 << 20),
    "home in hbm": Tiers("hbm", policy="hbm", extra_hbm=1 << 16),
    "weights in hbm": Tiers("weights", policy={"params": "hbm"}, extra_hbm=1 << 14),
    "disk": Tiers("disk", policy="nvme"),
}


def twins(place: str, path: Path, masters: bool, **options: Any) -> Twins:
    tiers = PLACES[place]
    if place == "disk":
        tiers = Tiers("disk", nvme=str(path), policy="nvme")
    dtype = torch.float32 if masters else None
    return Twins(half if masters else Small, tiers, Own, master_dtype=dtype, **options)


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.one_in(2)
def test_step_again_finishes_a_step_that_the_class_cut_short(
    place: str, masters: bool, tmp_path: Path
) -> None:
    """At each parameter, at the first step and at later ones: the step is made once."""
    with twins(place, tmp_path, masters) as pair:
        for number in range(PARAMS + 1):
            pair.backward(number)
            pair.by_hand.step()
            Fuse.left = (5 * number + 3) % PARAMS
            Fuse.error = (Bang, MemoryError, KeyboardInterrupt)[number % 3]
            with pytest.raises(Fuse.error):
                pair.optimizer.step()
            check_table(pair.tier)
            for refused in (pair.optimizer.zero_grad, lambda: loss_of(pair.model, 0)):
                with pytest.raises(tiermem.StepError, match=r"call optimizer\.step"):
                    refused()
            pair.optimizer.param_groups[0]["lr"] = 100.0  # what is left uses that of before
            pair.optimizer.step()
            pair.optimizer.param_groups[0]["lr"] = 0.01
            pair.by_hand.zero_grad()
            pair.optimizer.zero_grad()
            if number % 4 == 3:
                pair.check()


@pytest.mark.parametrize("where", ["device", "host", "both"])
@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_a_class_that_raises_where_steps_overlap(overlap: str, where: str, tmp_path: Path) -> None:
    """The forward that pays for a step raises, or ``step()``; what they leave is made then."""
    with twins("staying", tmp_path, True, overlap=overlap, where=where) as pair:
        for number in range(8):
            Fuse.left = (5 * number + 3) % PARAMS if number else -1
            for _ in range(3):
                try:
                    pair.model(torch.arange(6).view(1, 6))
                    break
                except (Bang, tiermem.StepError):
                    continue
            pair.backward(number)
            left, Fuse.left = Fuse.left, -1
            pair.by_hand.step()
            Fuse.left = left
            for _ in range(3):
                try:
                    pair.optimizer.step()
                    break
                except (Bang, tiermem.StepError):
                    continue
            pair.by_hand.zero_grad()
            pair.optimizer.zero_grad()
            if number == 4:
                assert overlap == "forward" or pair.optimizer.stepped_in_backward > 0
        Fuse.left = -1
        with suppress(Bang, tiermem.StepError):  # of a step on the host, not raised before
            pair.optimizer.finish()
        pair.check()


def test_an_error_inside_backward_is_raised_by_step(tmp_path: Path) -> None:
    """Where the resident optimizer raises it; backward goes on to its end."""
    with twins("streaming", tmp_path, False, overlap="backward") as pair:
        for number in range(3):
            pair.backward(number)
            pair.step()
        Fuse.left = 3
        pair.backward(3)
        assert Fuse.left == -1
        pair.by_hand.step()
        with pytest.raises(Bang):
            pair.optimizer.step()
        with pytest.raises(tiermem.StepError):
            pair.optimizer.zero_grad()
        pair.optimizer.step()
        pair.by_hand.zero_grad()
        pair.optimizer.zero_grad()
        pair.check()
        pair.backward(4)
        pair.step()
        pair.check()


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_for_all_optimizers_are_called_once_a_step(kind: str, tmp_path: Path) -> None:
    """And not for each unit: one that writes gradients would write them twice."""
    register: dict[str, Any] = {
        "pre": torch_optimizer.register_optimizer_step_pre_hook,
        "post": torch_optimizer.register_optimizer_step_post_hook,
    }
    raises = False

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if raises:
            raise Bang
        for group in optimizer.param_groups:
            for param in group["params"]:
                with torch.no_grad():
                    param.grad.mul_(0.5) if kind == "pre" else param.mul_(0.5)

    handle = register[kind](hook)
    try:
        with twins("streaming", tmp_path, False) as pair:
            for number in range(2):
                pair.backward(number)
                pair.step()
                pair.check()
            pair.backward(2)
            raises = True
            for optimizer in (pair.by_hand.optimizer, pair.optimizer):
                with pytest.raises(Bang):
                    optimizer.step()
            raises = False
            pair.step()  # after "post" it is one more, as with torch's own
            pair.check()
    finally:
        handle.remove()


def test_a_hook_of_the_optimizers_own_that_raises_after_the_step(tmp_path: Path) -> None:
    """The step is made by then, as torch's is."""
    with twins("streaming", tmp_path, False) as pair:
        pair.backward(0)
        pair.by_hand.step()

        def hook(*_: Any) -> None:
            raise Bang

        handle = pair.optimizer.register_step_post_hook(hook)
        with pytest.raises(Bang):
            pair.optimizer.step()
        handle.remove()
        pair.by_hand.zero_grad()
        pair.optimizer.zero_grad()
        pair.check()


def test_the_closure_is_called_once_and_its_loss_is_not_lost(tmp_path: Path) -> None:
    with twins("streaming", tmp_path, False) as pair:
        pair.backward(0)
        pair.by_hand.step()
        calls: list[int] = []

        def closure() -> float:
            calls.append(1)
            return 7.0

        Fuse.left = 4
        with pytest.raises(Bang):
            pair.optimizer.step(closure)
        assert pair.optimizer.step(closure) == 7.0
        assert calls == [1]
        pair.by_hand.zero_grad()
        pair.optimizer.zero_grad()
        pair.check()


def test_a_fused_step_under_a_grad_scaler_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's fused kernels undo the scale in the gradients themselves."""

    def failing(*args: Any) -> bool:
        made = run_scaled(*args)
        if Fuse.burn():
            raise Bang
        return made

    settings = {"lr": 0.01, "fused": True}
    tiers = Tiers("tight")
    options = {"master_dtype": None, "overlap": False}
    with Twins(Small, tiers, torch.optim.AdamW, settings, **options) as pair:
        for number in range(2):
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            pair.backward(number, scale=8.0)
            for gradient in pair.by_hand.gradients():
                gradient.mul_(0.125)
            pair.by_hand.step()
            scaler.scale(torch.ones(()))
            monkeypatch.setattr("tiermem.optim.units.unit.run_scaled", failing)
            Fuse.left = 2
            with pytest.raises(Bang):
                scaler.step(pair.optimizer)
            scaler.step(pair.optimizer)
            pair.by_hand.zero_grad()
            pair.optimizer.zero_grad()
            pair.check()


# -- the way out ---------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"overlap": "forward"}, {"where": "host"}], ids=str)
def test_a_step_that_cannot_be_made_is_given_up(options: dict[str, Any], tmp_path: Path) -> None:
    """A class that always raises blocks nothing else."""
    with twins("streaming", tmp_path, True, **options) as pair:
        pair.backward(0)
        pair.step()
        pair.backward(1)
        weights = {k: v.clone() for k, v in pair.model.state_dict().items()}
        state = pair.optimizer.state_dict()
        Fuse.always = True
        for _ in range(2):
            with pytest.raises((Bang, tiermem.StepError)):
                pair.optimizer.step()
                loss_of(pair.model, 0)
        pair.optimizer.abandon_step()
        assert_same(weights, dict(pair.model.state_dict()), "weights")
        assert_same(state, pair.optimizer.state_dict(), "state")
        Fuse.always = False
        pair.step()  # the gradients are there still
        pair.check()
        pair.backward(2)
        pair.step()
        pair.check()
        pair.optimizer.abandon_step()  # there is nothing to give up
        pair.check()


def test_a_checkpoint_ends_a_step_that_was_cut_short(tmp_path: Path) -> None:
    with twins("streaming", tmp_path, False) as pair:
        pair.backward(0)
        pair.step()
        weights = {k: v.clone() for k, v in pair.model.state_dict().items()}
        state = pair.optimizer.state_dict()
        pair.backward(1)
        Fuse.left = 6
        with pytest.raises(Bang):
            pair.optimizer.step()
        wrong = {**state, "param_groups": []}
        with pytest.raises(tiermem.CheckpointError):
            pair.optimizer.load_state_dict(wrong)
        with pytest.raises(tiermem.StepError):
            pair.optimizer.zero_grad()
        pair.model.load_state_dict(weights)
        pair.optimizer.load_state_dict(state)
        pair.by_hand.zero_grad()
        pair.optimizer.zero_grad()
        pair.check()
        pair.backward(2)
        pair.step()
        pair.check()


def test_where_there_is_no_memory_to_keep_what_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is made all the same; one that fails then is refused until it is decided upon."""

    def none(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with twins("staying", tmp_path, False) as pair:
        monkeypatch.setattr("tiermem.optim.units.attempt.Attempt._keep_bytes", none)
        pair.backward(0)
        pair.step()
        pair.check()
        state = pair.optimizer.state_dict()
        weights = {k: v.clone() for k, v in pair.model.state_dict().items()}
        pair.backward(1)
        Fuse.left = 6
        with pytest.raises(tiermem.StepError, match="neither old nor new"):
            pair.optimizer.step()
        for refused in (pair.optimizer.step, pair.optimizer.zero_grad):
            with pytest.raises(tiermem.StepError):
                refused()
        pair.optimizer.load_state_dict(state)
        pair.model.load_state_dict(weights)
        pair.by_hand.zero_grad()
        pair.optimizer.zero_grad()
        pair.check()
        pair.backward(2)
        pair.step()
        pair.check()


def test_the_error_says_how_far_the_step_got(tmp_path: Path) -> None:
    with twins("streaming", tmp_path, False) as pair:
        pair.backward(0)
        Fuse.left = 6
        with pytest.raises(Bang) as caught:
            pair.optimizer.step()
        notes = getattr(caught.value, "__notes__", ["units of the optimizer step are made"])
        assert "units of the optimizer step are made" in notes[0]
        assert len(one_group(pair.model)[0]["params"]) == PARAMS
        pair.optimizer.step()


class Meeting(torch.optim.SGD):
    """Calls something in each step, once it has that."""

    meet: Callable[[], object] | None = None

    def step(self, closure: Any = None) -> Any:
        if Meeting.meet is not None:
            Meeting.meet()
        return super().step(closure)


def test_a_forward_beside_another_threads_step_is_told_to_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised: list[BaseException] = []
    with tiermem.TierManager(device="cpu", hbm="64KiB", dram="1MiB") as tier:
        first, second = (tier.wrap(nn.Sequential(nn.Linear(8, 8))) for _ in range(2))
        optimizer = tier.optimizer(first, Meeting, lr=0.1, overlap=False)

        def forward() -> None:
            try:
                second(torch.ones(1, 8))
            except tiermem.StepError as error:
                raised.append(error)

        def meet() -> None:
            monkeypatch.setattr(Meeting, "meet", None)
            thread = threading.Thread(target=forward)
            thread.start()
            thread.join()

        first(torch.ones(1, 8)).sum().backward()
        monkeypatch.setattr(Meeting, "meet", staticmethod(meet))
        optimizer.step()
        second(torch.ones(1, 8))
    (error,) = raised
    assert "another thread is at it" in str(error) and "take turns" in str(error)
