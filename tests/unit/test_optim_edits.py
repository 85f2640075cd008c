"""State that users put, delete or load: taken as a plain optimizer takes it."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support_late_state import Pair
from support_nn import Tiers, assert_same
from support_optim import Net, Twins

from tiermem.core import parts
from tiermem.optim.units.parted import PartedUnit

LARGE = "layers.2.up.weight"
Edit = Callable[[Any, torch.Tensor], None]


def _set(optimizer: Any, param: torch.Tensor) -> None:
    optimizer.state[param] = {
        "step": torch.tensor(5.0),
        "exp_avg": torch.full(param.shape, 0.5),
        "exp_avg_sq": torch.full(param.shape, 0.25),
    }


def _one_key(optimizer: Any, param: torch.Tensor) -> None:
    optimizer.state[param]["exp_avg"] = torch.full(param.shape, 0.25)


def _anew(optimizer: Any, _param: torch.Tensor) -> None:
    optimizer.state = defaultdict(dict)


EDITS: dict[str, Edit] = {
    "cleared": lambda optimizer, param: optimizer.state.clear(),
    "replaced": _anew,
    "one deleted": lambda optimizer, param: optimizer.state.pop(param),
    "one emptied": lambda optimizer, param: optimizer.state.update({param: {}}),
    "one set": _set,
    "one key set": _one_key,
    "written": lambda optimizer, param: optimizer.state[param]["exp_avg"].mul_(3.0),
}


@pytest.fixture(params=[False, True], ids=["whole", "parts"])
def in_parts(request: pytest.FixtureRequest) -> Iterator[bool]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            patch.setattr(parts, "_ALIGNED", 64)
            patch.setattr(parts, "_LEAST", 0)
            patch.setattr(parts, "_MOST", 0.0)
        yield request.param


def twins_of(
    overlap: Any = False,
    where: str = "device",
    cls: Any = torch.optim.AdamW,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Twins:
    tiers = Tiers("edits", policy="dram")
    settings = {"lr": 0.01, "foreach": False, **settings}
    masters = None if dtype is torch.float32 else torch.float32
    options = {"master_dtype": masters, "overlap": overlap, "where": where}
    # every parameter in a block of its own, so that the large ones may have parts
    blocks = [name for name, _ in Net().named_modules() if name.count(".") == 2] + ["embed"]
    return Twins(lambda: Net(dtype), tiers, cls, settings, blocks=blocks, **options)


def train(twins: Twins, *numbers: int) -> None:
    for number in numbers:
        twins.backward(number)
        twins.step()


def both(twins: Twins, name: str) -> list[tuple[Any, torch.Tensor]]:
    models = (twins.plain, twins.by_hand.optimizer), (twins.model, twins.optimizer)
    return [(optimizer, dict(model.named_parameters())[name]) for model, optimizer in models]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("where", ["device", pytest.param("host", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("overlap", [False, "forward", "backward"])
@pytest.mark.one_in(6)
def test_what_is_put_there_is_what_is_stepped_with(
    edit: str, overlap: Any, where: str, in_parts: bool
) -> None:
    if in_parts and where == "host":
        pytest.skip("the host steps nothing in parts")
    with twins_of(overlap, where) as twins:
        parts = [unit.name for unit in twins.optimizer._units if isinstance(unit, PartedUnit)]
        assert in_parts == (f"step[{LARGE}]" in parts)
        train(twins, 0, 1, 2)
        for optimizer, param in both(twins, LARGE):
            EDITS[edit](optimizer, param)
        twins.check()
        train(twins, 3, 4)
        twins.check()


@pytest.mark.parametrize("overlap", [False, "forward"])
def test_state_before_the_first_step(overlap: Any, in_parts: bool) -> None:
    with twins_of(overlap) as twins:
        for optimizer, param in both(twins, LARGE):
            _set(optimizer, param)
        train(twins, 0, 1)
        twins.check()


def test_an_emptied_state_is_in_the_state_dict(in_parts: bool) -> None:
    with twins_of() as twins:
        train(twins, 0)
        for optimizer, param in both(twins, LARGE):
            optimizer.state[param] = {}
        plain, mine = twins.by_hand.optimizer.state_dict(), twins.optimizer.state_dict()
        assert_same(plain["state"], mine["state"], "state")
        train(twins, 1)
        twins.check()


def test_an_emptied_state_is_loaded_as_one(in_parts: bool) -> None:
    """It keeps its place; one that is not there at all leaves none."""
    with twins_of() as twins:
        train(twins, 0)
        for emptied in (True, False):
            for optimizer, _ in both(twins, LARGE):
                state = optimizer.state_dict()
                number = [*dict(twins.plain.named_parameters())].index(LARGE)
                if emptied:
                    state["state"][number] = {}
                else:
                    del state["state"][number]
                optimizer.load_state_dict(state)
            plain, mine = twins.by_hand.optimizer.state_dict(), twins.optimizer.state_dict()
            assert [*plain["state"]] == [*mine["state"]]
            assert_same(plain["state"], mine["state"], "state")
            train(twins, 1)
            twins.check()


def _later(optimizer: Any) -> None:
    optimizer.param_groups[0]["momentum"] = 0.9


def _loaded(optimizer: Any) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["momentum"] = 0.9
    for number, param in enumerate(optimizer.param_groups[0]["params"]):
        saved["state"][number] = {"momentum_buffer": _some(param)}
    optimizer.load_state_dict(saved)


def _put(optimizer: Any) -> None:
    _later(optimizer)
    for param in optimizer.param_groups[0]["params"]:
        optimizer.state[param]["momentum_buffer"] = _some(param)


def _some(param: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-0.1, 0.1, param.numel()).view(param.shape)


@pytest.mark.parametrize("how", [_later, _loaded, _put])
@pytest.mark.parametrize("overlap", [False, "forward", "auto"])
@pytest.mark.one_in(3)
def test_state_for_which_no_room_was_planned(
    overlap: Any, how: Callable[[Any], None], in_parts: bool
) -> None:
    """Each part has its run of it; all of them had that of the first part."""
    with twins_of(overlap, cls=torch.optim.SGD, dtype=torch.bfloat16) as twins:
        assert in_parts == any(isinstance(unit, PartedUnit) for unit in twins.optimizer._units)
        train(twins, 0)
        for optimizer, _ in both(twins, LARGE):
            how(optimizer)
        train(twins, 1, 2)
        twins.check()
        for optimizer, _ in both(twins, LARGE):
            for param in optimizer.param_groups[0]["params"]:
                optimizer.state[param]["momentum_buffer"].mul_(3.0)
        train(twins, 3)
        twins.check()
        for optimizer, _ in both(twins, LARGE):
            _put(optimizer)
        train(twins, 4, 5)
        twins.check()


@pytest.mark.parametrize(
    ("cls", "setting"),
    [(torch.optim.AdamW, {"amsgrad": True}), (torch.optim.RMSprop, {"momentum": 0.5})],
)
@pytest.mark.one_in(2)
def test_settings_that_ask_for_more_state_before_the_first_step(
    cls: Any, setting: dict[str, Any], in_parts: bool
) -> None:
    with twins_of("auto", cls=cls) as twins:
        for optimizer, _ in both(twins, LARGE):
            optimizer.param_groups[0].update(setting)
        train(twins, 0, 1, 2)
        twins.check()


def test_what_is_loaded_is_no_others(in_parts: bool) -> None:
    """A rate that is a tensor is written in place, by a scheduler say: of one optimizer alone."""
    with twins_of(lr=torch.tensor(0.01)) as first, twins_of(lr=torch.tensor(0.01)) as second:
        for twins in (first, second):
            train(twins, 0)
        for mine, other in zip(both(first, LARGE), both(second, LARGE), strict=True):
            other[0].load_state_dict(mine[0].state_dict())
            other[0].param_groups[0]["lr"].fill_(0.5)
            assert mine[0].param_groups[0]["lr"].item() == pytest.approx(0.01)
        train(first, 1)
        first.check()


def test_hooks_around_loading() -> None:
    with twins_of() as twins:
        train(twins, 0)
        calls: list[list[str]] = []
        for optimizer, _ in both(twins, LARGE):
            heard: list[str] = []

            def before(_optimizer: Any, state_dict: Any, heard: list[str] = heard) -> Any:
                heard.append("before")
                groups = [{**group, "lr": 0.25} for group in state_dict["param_groups"]]
                return {**state_dict, "param_groups": groups}

            def after(optimizer: Any, heard: list[str] = heard) -> None:
                heard.append(f"after {optimizer.param_groups[0]['lr']}")

            optimizer.register_load_state_dict_pre_hook(before)
            optimizer.register_load_state_dict_post_hook(after)
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            calls.append(heard)
        assert calls[0] == calls[1] == ["before", "after 0.25"]
        train(twins, 1)
        twins.check()


def test_checkpoints_of_old(in_parts: bool) -> None:
    """Their numbers of steps are no tensors; the class makes some of them."""
    with twins_of() as twins:
        train(twins, 0, 1)
        for optimizer, _ in both(twins, LARGE):
            state_dict = copy.deepcopy(optimizer.state_dict())
            for state in state_dict["state"].values():
                state["step"] = int(state["step"])
            optimizer.load_state_dict(state_dict)
        train(twins, 2)
        twins.check()


class Converts(torch.optim.AdamW):
    """Has other settings than it had in its first version, and says so as torch's classes do."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            if "rate" in group:
                group["lr"] = group.pop("rate") / 10


@pytest.mark.parametrize("missing", [["amsgrad"], ["maximize"], ["amsgrad", "eps"]])
@pytest.mark.one_in(2)
def test_settings_that_a_checkpoint_of_old_has_not_are_as_the_class_says(
    missing: list[str], in_parts: bool
) -> None:
    """And not as the optimizer was made; what the class does not set stays as it is."""
    with twins_of(amsgrad=True, maximize=True) as twins:
        train(twins, 0, 1)
        for optimizer, _ in both(twins, LARGE):
            state_dict = copy.deepcopy(optimizer.state_dict())
            eps = state_dict["param_groups"][0]["eps"]
            for key in missing:
                del state_dict["param_groups"][0][key]
            optimizer.load_state_dict(state_dict)
            optimizer.param_groups[0].setdefault("eps", eps)  # torch's own has none now
        assert not twins.optimizer.param_groups[0][missing[0]]
        train(twins, 2)
        expected, found = (o.state_dict() for o, _ in both(twins, LARGE))
        assert expected["param_groups"] == found["param_groups"]  # in another order
        assert_same(expected["state"], found["state"], "state")
        assert_same(dict(twins.plain.state_dict()), dict(twins.model.state_dict()), "weights")


@pytest.mark.parametrize("overlap", [False, "auto"])
@pytest.mark.one_in(2)
def test_settings_that_a_class_makes_of_those_of_old_are_stepped_with(
    overlap: Any, in_parts: bool
) -> None:
    with twins_of(overlap, cls=Converts) as twins:
        train(twins, 0, 1, 2)
        for optimizer, _ in both(twins, LARGE):
            state_dict = copy.deepcopy(optimizer.state_dict())
            state_dict["param_groups"][0]["rate"] = state_dict["param_groups"][0]["lr"]
            optimizer.load_state_dict(state_dict)
        assert twins.optimizer.param_groups[0]["lr"] == 0.001
        twins.check()
        train(twins, 3, 4)
        twins.check()


class History(torch.optim.Optimizer):
    """Goes by the mean of the last gradients, which it keeps."""

    def __init__(self, params: Any, lr: float, foreach: bool) -> None:
        super().__init__(params, {"lr": lr, "foreach": foreach})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state, last = self.state[param], param.grad[None].clone()
                    state["last"] = torch.cat([state.get("last", last[:0]), last])[-3:]
                    param.sub_(state["last"].mean(0), alpha=group["lr"])


class Renames(torch.optim.AdamW):
    """Converts settings as it loads, from a dict that has state or not."""

    needs_state = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = [dict(group) for group in state_dict["param_groups"]]
        for group in groups:
            group["lr"] = group.pop("rate", 0.01) / 10
            assert state_dict["state"] or not self.needs_state
        super().load_state_dict({**state_dict, "param_groups": groups})


@pytest.mark.parametrize("steps", [0, 2])
def test_settings_that_a_class_changes_as_it_loads_are_stepped_with(
    steps: int, in_parts: bool
) -> None:
    with twins_of(cls=Renames) as twins:
        train(twins, *range(steps))
        for optimizer, _ in both(twins, LARGE):
            state_dict = copy.deepcopy(optimizer.state_dict())
            state_dict["param_groups"][0]["rate"] = 0.05
            optimizer.load_state_dict(state_dict)
        assert twins.optimizer.param_groups[0]["lr"] == 0.005
        assert "rate" not in twins.optimizer.param_groups[0]
        twins.check()
        train(twins, 3, 4)
        twins.check()


def test_a_class_that_loads_state_alone_has_the_settings_of_the_dict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Renames, "needs_state", True)
    with twins_of(cls=Renames) as twins:
        train(twins, 0)
        state_dict = copy.deepcopy(twins.optimizer.state_dict())
        state_dict["param_groups"][0]["lr"] = 0.02
        twins.optimizer.load_state_dict(state_dict)
        assert twins.optimizer.param_groups[0]["lr"] == 0.02


def test_state_that_grows_is_loaded() -> None:
    """Into an optimizer that has made no steps, as many, or more."""
    for steps in (0, 2, 4):
        with twins_of(cls=History) as first, twins_of(cls=History) as twins:
            train(first, 0, 1)
            train(twins, *range(steps))
            for (mine, _), (other, _) in zip(both(first, LARGE), both(twins, LARGE), strict=True):
                other.load_state_dict(copy.deepcopy(mine.state_dict()))
            twins.check()
            train(twins, 5, 6)
            twins.check()


@pytest.mark.parametrize(("steps", "at"), [(1, 11), (4, 3)])
def test_state_deleted_inside_backward_counts_for_blocks_whose_gradients_come_later(
    steps: int, at: int
) -> None:
    """They were stepped ahead in the rest of that backward, as if nothing had been deleted."""
    pair = Pair()
    try:
        pair.step(steps)
        hooks = []
        for optimizer, model in ((pair.own, pair.plain), (pair.optimizer, pair.model)):

            def forget(*_: object, optimizer: Any = optimizer, model: Any = model) -> None:
                optimizer.state.pop(model[0].weight)

            hooks.append(model[at].register_full_backward_hook(forget))
        pair.step()
        for hook in hooks:
            hook.remove()
        pair.step(2)
        assert_same(dict(pair.plain.state_dict()), dict(pair.model.state_dict()), "weights")
    finally:
        pair.tier.close()
