"""Parameters and groups as torch's optimizers take them, and what is thawed or added later."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support_nn import assert_same, check_table, seed
from torch import nn

import tiermem


def build() -> nn.Sequential:
    seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3)])


class Both:
    """A resident model and a tiered one, each with an optimizer over what a test gives."""

    def __init__(
        self,
        prepare: Callable[[nn.Module], None] = lambda model: None,
        params: Callable[[nn.Module], Any] = lambda model: model.parameters(),
        hbm: str = "32KiB",
        dram: str = "1MiB",
        policy: Any = None,
        cls: type[torch.optim.Optimizer] = torch.optim.AdamW,
        **options: Any,
    ) -> None:
        model = build()
        prepare(model)
        self.plain, self.model = copy.deepcopy(model), model
        self.tier = tiermem.TierManager(device="cpu", hbm=hbm, dram=dram, policy=policy)
        self.tier.wrap(model)
        settings = {"lr": 0.05, "foreach": False}
        self.plain_optimizer = cls(params(self.plain), **settings)
        self.optimizer = self.tier.optimizer(params(model), cls, **settings, **options)

    def __enter__(self) -> Both:
        return self

    def __exit__(self, *error: object) -> None:
        self.tier.close()

    def do(self, use: Callable[[nn.Module, Any], Any]) -> None:
        use(self.plain, self.plain_optimizer)
        use(self.model, self.optimizer)

    def train(self, number: int, *, clip: bool = True) -> None:
        """One step of both."""
        seed(number)
        x = torch.randn(4, 8)
        for model, optimizer in (
            (self.plain, self.plain_optimizer),
            (self.model, self.optimizer),
        ):
            model(x).square().sum().backward()
            if clip and isinstance(optimizer, tiermem.TieredOptimizer):
                optimizer.clip_grad_norm_(0.3)
            elif clip:
                params = [p for group in optimizer.param_groups for p in group["params"]]
                nn.utils.clip_grad_norm_(params, 0.3)
            optimizer.step()
            optimizer.zero_grad()

    def check(self) -> None:
        assert_same(dict(self.plain.state_dict()), dict(self.model.state_dict()), "weights")
        expected = self.plain_optimizer.state_dict()
        assert_same(expected, self.optimizer.state_dict(), "optimizer")
        check_table(self.tier)

    def bytes_of(self, role: str) -> int:
        return sum(row.nbytes for row in self.tier.residency() if row.role == role)


# -- how parameters are given --------------------------------------------------------------

GIVEN: dict[str, Callable[[nn.Module], Any]] = {
    "generator": lambda m: m.parameters(),
    "list": lambda m: list(m.parameters()),
    "named": lambda m: m.named_parameters(),
    "groups of generators": lambda m: [{"params": layer.parameters()} for layer in m],
    "groups of one tensor": lambda m: [{"params": p} for p in m.parameters()],
    "groups of named ones": lambda m: [
        {"params": layer.named_parameters(), "lr": 0.01 * n} for n, layer in enumerate(m)
    ],
}


@pytest.mark.parametrize("how", GIVEN)
def test_parameters_are_taken_as_torch_takes_them(how: str) -> None:
    with Both(params=GIVEN[how]) as both:
        for number in range(3):
            both.train(number)
        both.check()


@pytest.mark.parametrize("how", ["generator", "list", "named", "tensor"])
def test_a_group_is_added_as_torch_adds_it(how: str) -> None:
    def names(module: nn.Module) -> Any:
        return module.named_parameters() if how == "named" else module.parameters()

    def add(model: Any, optimizer: Any) -> None:
        last = model[2]
        given = {
            "generator": last.parameters,
            "named": last.named_parameters,
            "list": lambda: list(last.parameters()),
            "tensor": lambda: last[0].weight,
        }
        group = {"params": given[how](), "lr": 0.02}
        optimizer.add_param_group(group)
        assert optimizer.param_groups[-1] is group  # code that kept it sets its rate
        group["lr"] = 0.03

    with Both(params=lambda m: names(m[:2])) as both:
        both.train(0)
        both.do(add)
        for number in range(1, 4):
            both.train(number)
        both.check()
        changed = both.plain[2][0].weight.equal(build()[2][0].weight)
        assert not changed


def wrong(kind: str, model: nn.Module) -> Any:
    params = list(model.parameters())
    return {
        "set in a group": [{"params": set(params)}],
        "tensor": params[0],
        "text": ["weight"],
        "not a leaf": [params[0] * 2],
        "some names": [("a", params[0]), params[1]],
        "in two groups": [{"params": params[:2]}, {"params": params[1:]}],
        "nothing": [],
    }[kind]


@pytest.mark.parametrize(
    "kind",
    ["set in a group", "tensor", "text", "not a leaf", "some names", "in two groups", "nothing"],
)
def test_what_torch_refuses_is_refused_in_its_words(kind: str) -> None:
    with pytest.raises((TypeError, ValueError)) as expected:
        torch.optim.SGD(wrong(kind, build()), lr=0.1)
    with tiermem.TierManager(device="cpu", hbm="32KiB", dram="1MiB") as tier:
        model = tier.wrap(build())
        with pytest.raises((TypeError, ValueError)) as found:
            tier.optimizer(wrong(kind, model), torch.optim.SGD, lr=0.1)
    assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]
    assert found.type is expected.type


def test_a_group_that_is_refused_changes_nothing() -> None:
    with Both(params=lambda m: m[:2].parameters()) as both:
        for group in (set(both.model[2].parameters()), list(both.model[0].parameters())):
            with pytest.raises((TypeError, ValueError)):
                both.optimizer.add_param_group({"params": group})
        with pytest.raises(TypeError, match="must be a dict"):
            both.optimizer.add_param_group(list(both.model[2].parameters()))
        both.train(0)
        both.check()


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Rprop])
def test_it_is_printed_as_torchs_optimizer_is(cls: Any) -> None:
    """Scripts log it, and a log is to be that of the resident run."""
    with Both(params=lambda model: model[:2].parameters(), cls=cls) as both:
        assert repr(both.optimizer) == repr(both.plain_optimizer)
        both.do(lambda model, own: own.add_param_group({"params": model[2].parameters()}))
        both.train(0, clip=False)
        both.do(lambda model, own: own.param_groups[1].update(lr=0.25))
        assert repr(both.optimizer) == repr(both.plain_optimizer)
        both.optimizer.close()
        assert repr(both.optimizer) == repr(both.plain_optimizer)


def test_a_parameter_given_twice_is_stepped_twice_after_torchs_warning() -> None:
    def twice(model: nn.Module) -> list[nn.Parameter]:
        return [*model.parameters(), next(model.parameters())]

    with pytest.warns(UserWarning, match="duplicate parameters"), Both(params=twice) as both:
        for number in range(2):
            both.train(number, clip=False)
        both.check()


# -- frozen and thawed ---------------------------------------------------------------------


def freeze(model: Any) -> None:
    model[1].requires_grad_(False)
    model[0][0].bias.requires_grad_(False)


def thaw(model: Any, optimizer: Any) -> None:
    model[1].requires_grad_(True)
    model[0][0].bias.requires_grad = True


KINDS: list[dict[str, Any]] = [
    {},
    {"overlap": "forward"},
    {"overlap": "backward"},
    {"where": "host"},
    {"policy": "hbm", "hbm": "1MiB"},
]


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_what_is_thawed_is_trained_and_clipped(options: dict[str, Any]) -> None:
    clip = options.get("overlap") != "backward"
    with Both(freeze, **options) as both:
        for number in range(3):
            both.train(number, clip=clip)
        both.check()
        before = both.bytes_of("optimizer")
        both.do(thaw)
        assert both.bytes_of("optimizer") == before  # room is taken when it is needed
        for number in range(3, 6):
            both.train(number, clip=clip)
        both.check()
        assert both.bytes_of("optimizer") > before
        both.do(lambda model, _: freeze(model))
        both.train(6, clip=clip)
        both.do(thaw)
        both.train(7, clip=clip)
        both.check()


@pytest.mark.parametrize("policy", [None, {"params": "hbm", "optimizer": "hbm"}])
def test_state_made_with_the_optimizer_is_there_for_what_is_frozen(policy: Any) -> None:
    def some(model: nn.Module) -> None:
        freeze(model)
        model[2][0].bias.requires_grad_(False)

    with Both(some, cls=torch.optim.Adagrad, hbm="64KiB", policy=policy) as both:
        both.check()
        assert len(both.optimizer.state) == len(both.plain_optimizer.state) == 12
        both.train(0)
        both.check()
        both.do(thaw)
        both.train(1)
        both.do(lambda model, optimizer: optimizer.load_state_dict(optimizer.state_dict()))
        both.train(2)
        both.check()


def test_thawed_between_backward_and_step_and_given_a_gradient_by_hand() -> None:
    def give(model: Any, _: Any) -> None:
        model[1][0].weight.grad = torch.ones(8, 8)

    with Both(freeze) as both:
        both.do(give)  # frozen still: torch steps it
        both.do(lambda model, optimizer: optimizer.step())
        both.check()
        both.do(lambda model, optimizer: optimizer.zero_grad())
        assert both.model[1][0].weight.grad is None
        both.train(1)
        both.check()


def test_masters_of_what_is_thawed() -> None:
    """They begin as the weights are then, and take no room before."""

    def half(model: nn.Module) -> None:
        model.to(torch.bfloat16)
        freeze(model)

    model = build()
    half(model)
    with tiermem.TierManager(device="cpu", hbm="64KiB", dram="1MiB") as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(
            model, torch.optim.SGD, lr=0.1, momentum=0.9, master_dtype=torch.float32
        )
        first = optimizer.state_dict()["master"]
        assert len(first) == 7
        thaw(model, optimizer)
        model(torch.ones(2, 8, dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()
        assert len(optimizer.state_dict()["master"]) == 12


def test_what_cannot_be_thawed_is_refused_before_anything_changes() -> None:
    with Both(freeze, dram="28KiB") as both:
        both.train(0)
        both.check()
        both.do(thaw)
        used = both.tier.stats().used
        with pytest.raises(tiermem.CapacityError, match="dram= at least"):
            both.model(torch.ones(2, 8))
        assert both.tier.stats().used == used
        both.do(lambda model, _: freeze(model))
        both.train(1)
        both.check()


def test_state_of_what_is_frozen_is_loaded() -> None:
    with Both() as both:
        both.train(0)
        saved = copy.deepcopy(both.optimizer.state_dict())
    with Both(freeze) as both:
        for optimizer in (both.plain_optimizer, both.optimizer):
            optimizer.load_state_dict(copy.deepcopy(saved))
        both.check()
        both.do(thaw)
        both.train(1)
        both.check()


def test_parameters_appended_to_a_group() -> None:
    def append(model: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["params"].extend(model[2].parameters())

    with Both(params=lambda m: m[:2].parameters()) as both:
        both.train(0)
        both.do(append)
        for number in range(1, 3):
            both.train(number)
        both.check()


def test_gradients_of_appended_parameters_are_cleared_before_they_are_stepped() -> None:
    def append(model: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["params"].extend(model[2].parameters())

    with Both(params=lambda m: m[:2].parameters()) as both:
        x = torch.randn(4, 8)
        both.do(lambda model, _: model(x).square().sum().backward())
        both.do(append)
        both.do(lambda _, optimizer: optimizer.zero_grad())
        both.do(lambda _, optimizer: optimizer.step())
        both.check()
        assert all(param.grad is None for param in both.model.parameters())


def test_a_group_added_after_a_state_was_loaded_has_torchs_settings() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float, foreach: bool) -> None:
            super().__init__(params, {"lr": lr, "foreach": foreach})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.data.add_(param.grad, alpha=-group["lr"])

    with Both(params=lambda m: m[:2].parameters(), cls=Own) as both:
        both.train(0)
        both.do(lambda _, optimizer: optimizer.load_state_dict(optimizer.state_dict()))
        both.do(lambda model, o: o.add_param_group({"params": model[2].parameters()}))
        both.check()
        both.train(1)
        both.check()


def test_what_is_refused_leaves_the_dtype_of_gradients_as_it_was() -> None:
    """A group that has no room, and an optimizer that has none."""
    sizes = {"hbm": "128KiB", "dram": "160KiB"}
    with tiermem.TierManager("cpu", **sizes, policy={"params": "dram"}) as tier:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(128, 128)).bfloat16()
        tier.wrap(model, ["0", "1"])
        large, options = list(model[1].parameters()), {"grad_dtype": torch.float32}
        with pytest.raises(tiermem.CapacityError):
            tier.optimizer(large, torch.optim.AdamW, **options)
        optimizer = tier.optimizer(model[0], torch.optim.AdamW, **options)
        with pytest.raises(tiermem.CapacityError):
            optimizer.add_param_group({"params": large})
        for layer, dtype in ((model[0], torch.float32), (model[1], torch.bfloat16)):
            layer(torch.ones(1, layer.in_features, dtype=torch.bfloat16)).sum().backward()
            assert layer.weight.grad.dtype is dtype


def test_parameters_taken_out_of_a_group_are_refused() -> None:
    with Both() as both:
        both.train(0)
        del both.optimizer.param_groups[0]["params"][3]
        with pytest.raises(tiermem.StepError, match="make a new optimizer"):
            both.train(1)


def test_clipping_where_parameters_of_one_block_have_two_units() -> None:
    """The factor is applied to each gradient once, and to none of another optimizer."""
    with Both(params=lambda m: [p for p in m.parameters() if p.dim() > 1]) as both:
        both.train(0)

        def add(model: nn.Module, optimizer: Any) -> None:
            optimizer.add_param_group({"params": [model[0][0].bias]})

        both.do(add)
        for number in range(1, 3):
            both.train(number)
        for (_, mine), (_, theirs) in zip(
            both.model.named_parameters(), both.plain.named_parameters(), strict=True
        ):
            assert (mine.grad is None) == (theirs.grad is None)
            if mine.grad is not None:
                assert_same(theirs.grad, mine.grad.clone(), "gradient")
        both.check()


class _Renewed(torch.optim.Optimizer):
    """Keeps a mean in place for three steps, and makes a new one in each later step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                if not state:
                    state["number"], state["mean"] = 0, torch.zeros_like(param)
                state["number"] += 1
                if state["number"] > 3:
                    state["mean"] = state["mean"] * 0.5 + param.grad
                else:
                    state["mean"].mul_(0.5).add_(param.grad)
                param.sub_(state["mean"], alpha=group["lr"])


def test_state_that_is_made_anew_after_steps_in_place_is_kept() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = copy.deepcopy(plain)
    x = torch.randn(3, 4)
    theirs = _Renewed(plain.parameters())
    with tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB") as tier:
        tier.wrap(model)
        mine = tier.optimizer(model, _Renewed)
        for _ in range(7):
            for which, optimizer in ((plain, theirs), (model, mine)):
                optimizer.zero_grad()
                which(x).square().sum().backward()
                optimizer.step()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(("cls", "dram"), [(torch.optim.RMSprop, 610), (torch.optim.Adam, 700)])
def test_training_goes_on_after_a_group_for_which_there_is_no_room(
    cls: type[torch.optim.Optimizer], dram: int
) -> None:
    seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    others = [nn.Linear(64, 64) for _ in range(9)]
    with tiermem.TierManager("cpu", hbm="200KiB", dram=f"{dram}KiB") as tier:
        tier.wrap(model)
        for other in others:
            tier.wrap(other)
        optimizer = tier.optimizer(model, cls, lr=0.1)
        with pytest.raises(tiermem.CapacityError):
            for other in others:
                optimizer.add_param_group({"params": list(other.parameters())})
        for _ in range(2):
            model(torch.randn(4, 64)).square().mean().backward()
        before = model[0].weight.detach().clone()
        optimizer.step()
        assert not torch.equal(model[0].weight.detach(), before)


def test_a_frozen_parameter_that_is_exchanged_by_hand_for_another() -> None:
    def freeze(model: nn.Module) -> None:
        model[0].requires_grad_(False)  # type: ignore[index]

    def params(model: nn.Module) -> list[nn.Parameter]:
        return [*model[0].parameters(), *model[1].parameters()]  # type: ignore[index]

    def exchange(model: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[0]["params"][0] = model[2][0].weight  # type: ignore[index]

    with Both(freeze, params) as both:
        both.train(0, clip=False)
        both.do(exchange)
        for number in (1, 2):
            both.train(number, clip=False)
        both.check()


@pytest.mark.parametrize("how", ["state dict", "checkpoint"])
def test_a_tensor_that_groups_have_in_common_is_one_after_a_load(how: str, tmp_path: Path) -> None:
    seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    rate = torch.tensor(1e-2)
    with tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB") as tier:
        tier.wrap(model)
        groups = [{"params": list(layer.parameters())} for layer in model]
        optimizer = tier.optimizer(groups, torch.optim.AdamW, lr=rate, foreach=False)
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        if how == "state dict":
            optimizer.load_state_dict(optimizer.state_dict())
        else:
            tier.save(tmp_path / "checkpoint")
            tier.load(tmp_path / "checkpoint")
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert first is second and first is not rate
