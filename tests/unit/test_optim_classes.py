"""Optimizer classes from outside torch: counters, modes, random numbers, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support_classes import (
    Averaging,
    Counting,
    CountingBySelf,
    CountingInPlace,
    CountingNorms,
    Exchanging,
    Filling,
    Halves,
    Noisy,
    Plain,
    TwoNames,
)
from support_nn import Pair, Tiers, assert_same, seed
from torch import nn

import tiermem
from tiermem.optim.host import fused

POLICY = dict.fromkeys(("params", "grads", "master", "optimizer"), "dram")
DRAM = Tiers("dram", policy=POLICY)


class Net(nn.Module):
    """Layers of which a forward may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: torch.Tensor, skip: int | None = None) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != skip:
                x = torch.tanh(layer(x))
        return x


def train(model: nn.Module, optimizer: Any, skip: int | None = None) -> torch.Tensor:
    loss = model(torch.randn(3, 12), skip).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def numbers_of(model: nn.Module, optimizer: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def follow(pair: Pair, steps: int = 6) -> None:
    """Trains both, with layers that have no gradient at times, from the first step on."""
    for number in range(steps):
        skip = {0: 2, 3: 1}.get(number)
        pair.both(partial(train, skip=skip), number, f"step {number}")
        pair.both(numbers_of, number, f"groups after step {number}")


@pytest.mark.parametrize("options", [{}, {"overlap": "forward"}, {"overlap": "backward"}], ids=str)
def test_a_class_that_fails_where_first_gradients_come_late(options: dict[str, Any]) -> None:
    """It does so in plain torch, so that programs which use it give all of them at once."""
    fused = {"lr": 0.1, "momentum": 0.9, "fused": True}
    with Pair(Net, DRAM, (torch.optim.SGD, {**fused, **options})) as pair:
        for number, skip in enumerate((None, None, 1, None)):
            pair.both(partial(train, skip=skip), number, f"step {number}")
        pair.finish()


def train_and_leave_one_out(pair: Pair, refusal: str) -> None:
    """Trains both; then a step of which a gradient is missing says so."""
    for number in range(3):
        pair.both(train, number, f"step {number}")
    pair.model(torch.randn(3, 12), 2).sum().backward()
    with pytest.raises(tiermem.StepError, match=refusal):
        pair.optimizer.step()
    pair.optimizer.zero_grad()


def test_a_class_that_updates_what_has_no_gradient() -> None:
    """As some that orthogonalize do: where one is missing, the step says so, and nothing moves."""
    with Pair(Net, DRAM, (Filling, {})) as pair:
        train_and_leave_one_out(pair, r"parameter 4 of group 0, .*has none\. Give")

        def with_zeros(model: nn.Module, optimizer: Any) -> None:
            model(torch.ones(3, 12), 2).sum().backward()
            for p in model.parameters():
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
            optimizer.step()
            optimizer.zero_grad()

        pair.both(with_zeros)
        pair.finish()


class CountingAll(torch.optim.SGD):
    """Counts steps of each parameter, also those without a gradient."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["steps"] = self.state[param].get("steps", 0) + 1
        return super().step(closure)


def test_a_class_that_counts_steps_without_a_gradient() -> None:
    """Was said to keep state that depends on other parameters."""
    with Pair(Net, DRAM, (CountingAll, {})) as pair:
        train_and_leave_one_out(pair, r"or their state, .* of group 0, .*has none")
        pair.finish()


@pytest.mark.parametrize("options", [{"overlap": "backward"}, {"where": "host"}], ids=str)
def test_what_updates_all_is_refused_where_it_is_stepped_too_soon(options: dict[str, Any]) -> None:
    with pytest.raises(tiermem.StepError, match="have no gradient as well"):
        Pair(Net, DRAM, (Filling, options))


class Batched(torch.optim.SGD):
    """Takes something by position."""

    def step(self, closure: Any = None, size: int = 1) -> Any:
        del size
        return super().step(closure)


def test_arguments_of_a_step_are_refused() -> None:
    """Some classes take a batch size there, say."""
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB") as tier:
        optimizer = tier.optimizer(tier.wrap(Net()), Batched, lr=0.1)
        with pytest.raises(
            tiermem.StepError, match=r"Batched\.step\(\) was given size=8, .*subclass"
        ):
            optimizer.step(size=8)


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW, Batched])
@pytest.mark.parametrize(("more", "named"), [((1, 2, 3), {}), ((), {"size_": 3}), ((None, 2), {})])
def test_arguments_that_the_class_does_not_take_are_its_own_error(
    cls: Any, more: Any, named: dict[str, Any]
) -> None:
    """With torch's words, and nothing is evaluated or stepped."""
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="1MiB") as tier:
        net = Net()
        plain = cls(nn.Linear(2, 2).parameters(), lr=0.1)
        optimizer = tier.optimizer(tier.wrap(net), cls, lr=0.1)
        net(torch.ones(3, 12), 2).sum().backward()
        before = {k: v.clone() for k, v in net.state_dict().items()}
        wanted = pytest.raises(TypeError)
        if cls is Batched and more == (None, 2):
            wanted = pytest.raises(tiermem.StepError, match="subclass")  # it takes them
        else:
            with pytest.raises(TypeError) as expected:
                plain.step(*more, **named)
        with wanted as caught:
            optimizer.step(*more, **named)
        if isinstance(caught.value, TypeError):
            assert str(caught.value) == str(expected.value)
        assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
        optimizer.state_dict()
        optimizer.step()


# -- counters ------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Counting, CountingInPlace])
@pytest.mark.parametrize("options", [{}, {"overlap": "forward"}, {"overlap": "backward"}], ids=str)
def test_a_counter_in_the_group_goes_on_alike(cls: Any, options: dict[str, Any]) -> None:
    with Pair(Net, DRAM, (cls, {"lr": 0.1, **options})) as pair:
        follow(pair)
        pair.finish()


def test_a_counter_goes_on_with_steps_on_the_host() -> None:
    with Pair(Net, DRAM, (Counting, {"where": "host"})) as pair:
        follow(pair)
        pair.finish()


def test_a_counter_goes_on_where_nothing_has_a_gradient() -> None:
    with Pair(Net, DRAM, (Counting, {})) as pair:
        pair.both(train, 1)
        pair.both(lambda model, optimizer: optimizer.step())
        pair.both(numbers_of)
        follow(pair)


def test_a_counter_is_loaded_and_changed() -> None:
    with Pair(Net, DRAM, (Counting, {})) as pair:
        follow(pair, 3)
        saved = pair.plain_optimizer.state_dict()
        follow(pair, 2)
        pair.plain_optimizer.load_state_dict(saved)
        pair.optimizer.load_state_dict(saved)
        follow(pair, 2)

        def change(model: nn.Module, optimizer: Any) -> None:
            optimizer.param_groups[0].update(lr=0.3, step=40)

        pair.both(change)
        follow(pair, 2)
        pair.finish()


def test_counters_of_several_groups() -> None:
    def late(model: nn.Module, optimizer: Any) -> None:
        optimizer.add_param_group({"params": [extra[id(optimizer)]], "lr": 0.05})

    with Pair(Net, DRAM, (Counting, {})) as pair:
        extra = {id(o): nn.Parameter(torch.ones(3)) for o in (pair.plain_optimizer, pair.optimizer)}
        follow(pair, 2)
        pair.both(late)
        for param in extra.values():
            param.grad = torch.ones(3)
        pair.both(lambda m, o: o.step())
        first, second = extra.values()
        assert_same(first.detach(), second.detach(), "the parameter added")
        follow(pair, 2)
        assert pair.optimizer.param_groups[1]["step"] == 3


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (CountingNorms, r"parameter groups \('d'\)"),
        (CountingBySelf, "depends on the others"),
    ],
)
def test_counters_that_are_not_alike_are_refused(cls: Any, why: str) -> None:
    with pytest.raises(tiermem.StepError, match=why):
        Pair(Net, DRAM, (cls, {}))


# -- tensors of a state in the same memory -----------------------------------------------


@pytest.mark.parametrize(
    ("kept", "why"),
    [
        ("same", "'other' shares memory with 'mean'"),
        ("view", "'other' shares memory with 'mean'"),
        ("weight", "'other' shares memory with the parameter"),
    ],
)
def test_state_that_is_other_state_or_the_weight_is_refused(kept: str, why: str) -> None:
    """In the tiers each has a place of its own: a write to one would not show in the other."""
    with pytest.raises(tiermem.StepError, match=why):
        Pair(Net, DRAM, (TwoNames, {"kept": kept}))


def test_state_beside_other_state_in_the_same_memory() -> None:
    with Pair(Net, DRAM, (Halves, {})) as pair:
        follow(pair)


@pytest.mark.parametrize("options", [{}, {"where": "host"}, {"overlap": "backward"}])
def test_buffers_that_are_exchanged(options: dict[str, Any]) -> None:
    """Each comes to the other one's place, whose bytes are those of the first by then."""
    with Pair(Net, DRAM, (Exchanging, options)) as pair:
        follow(pair)
        plain, tiered = pair.plain_optimizer.state_dict(), pair.optimizer.state_dict()
        assert_same(tiered["state"], plain["state"], "state")


# -- what is no class ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("AdamW", "text 'AdamW'"),
        (torch.optim.SGD([torch.zeros(2)], lr=0.1), "one that is made: give the class SGD"),
        (partial(torch.optim.AdamW, lr=0.1), "functools.partial"),
        (nn.Linear, "not the class Linear"),
        (3, "not a int"),
    ],
    ids=["text", "instance", "partial", "other class", "number"],
)
def test_what_is_no_optimizer_class_is_refused(given: Any, why: str) -> None:
    with tiermem.TierManager("cpu", hbm="64KiB", dram="1MiB", policy=POLICY) as tier:
        model = tier.wrap(Net())
        with pytest.raises(tiermem.StepError, match=why) as caught:
            tier.optimizer(model, given)
        assert "torch.optim.AdamW, lr=" in str(caught.value)
        train(model, tier.optimizer(model, torch.optim.AdamW))


# -- methods of the class --------------------------------------------------------------


def evaluated(model: nn.Module, optimizer: Any) -> torch.Tensor:
    optimizer.eval()
    with torch.no_grad():
        shown = model(torch.ones(1, 12)).clone()
    optimizer.train()
    return shown


@pytest.mark.parametrize("options", [{}, {"overlap": "forward"}], ids=str)
def test_modes_of_a_class(options: dict[str, Any]) -> None:
    with Pair(Net, DRAM, (Averaging, options)) as pair:
        pair.both(lambda m, o: o.train())
        for number in range(3):
            pair.both(train, number)
            pair.both(evaluated, number)
            pair.both(numbers_of)
        pair.both(lambda m, o: o.scale(0.5))
        pair.both(train, 7)
        pair.both(lambda m, o: o.eval())
        pair.check_state()
        assert pair.optimizer.version() == "1.0"
        pair.finish()


def test_a_method_over_masters() -> None:
    def make() -> Net:
        seed(3)
        return Net().to(torch.bfloat16)

    by_hand, losses = make(), []
    masters = [p.detach().float().requires_grad_() for p in by_hand.parameters()]
    plain = Averaging(masters)
    with tiermem.TierManager("cpu", hbm="64KiB", dram="1MiB", policy=POLICY) as tier:
        model = tier.wrap(make())
        optimizer = tier.optimizer(model, Averaging, master_dtype=torch.float32)
        for o in (plain, optimizer):
            o.train()
        for number in range(3):
            for mine in (by_hand, model):
                seed(number)
                losses.append(mine(torch.randn(3, 12, dtype=torch.bfloat16)).square().mean())
                losses[-1].backward()
            for p, master in zip(by_hand.parameters(), masters, strict=True):
                master.grad, p.grad = p.grad.float(), None
            plain.step()
            optimizer.step()
            optimizer.zero_grad()
            for mode in ("eval", "train"):
                getattr(plain, mode)()
                getattr(optimizer, mode)()
                with torch.no_grad():
                    for p, master in zip(by_hand.parameters(), masters, strict=True):
                        p.copy_(master)
                assert_same(dict(by_hand.state_dict()), dict(model.state_dict()), mode)


def test_methods_that_cannot_be_called_block_by_block() -> None:
    with Pair(Net, DRAM, (Averaging, {})) as pair:
        pair.both(lambda m, o: o.train())
        pair.both(train, 1)
        with pytest.raises(tiermem.StepError, match="depends on the others"):
            pair.optimizer.center()
        with pytest.raises(tiermem.StepError, match="returns a value"):
            pair.optimizer.norm()
        with pytest.raises(AttributeError, match="no attribute 'blend'"):
            pair.optimizer.blend()
        assert not hasattr(pair.optimizer, "_mode")
        pair.both(train, 2)
        pair.finish()
    with Pair(Net, DRAM, (torch.optim.AdamW, {})) as pair:
        assert not hasattr(pair.optimizer, "train")


def test_a_method_is_refused_where_the_host_steps() -> None:
    with (
        Pair(Net, DRAM, (Averaging, {"where": "host"})) as pair,
        pytest.raises(tiermem.StepError, match="where='device'"),
    ):
        pair.optimizer.train()


def test_a_method_that_a_disk_cuts_short_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pair(Net, DRAM, (Averaging, {})) as pair:
        pair.both(lambda m, o: o.train())
        pair.both(train, 1)
        second = pair.optimizer._units[1]

        def fail(*_: Any) -> None:
            raise tiermem.StorageError("read failed", block=second.name)

        with monkeypatch.context() as patch:
            patch.setattr(second, "apply", fail)
            with pytest.raises(tiermem.StorageError):
                pair.optimizer.eval()
        for what in ("step", "train", "state_dict", "zero_grad"):
            with pytest.raises(tiermem.StepError, match=r"eval.* again, it goes on"):
                getattr(pair.optimizer, what)()
        pair.both(lambda m, o: o.eval())
        pair.check_state()
        pair.both(lambda m, o: o.train())
        pair.both(train, 2)
        pair.finish()


# -- random numbers --------------------------------------------------------------------


def test_what_draws_random_numbers_has_those_of_the_resident() -> None:
    with Pair(Net, DRAM, (Noisy, {})) as pair:
        follow(pair)
        pair.finish()


@pytest.mark.parametrize("options", [{"overlap": "forward"}, {"where": "host"}], ids=str)
def test_random_numbers_in_another_order_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(tiermem.StepError, match="draws random numbers"):
        Pair(Net, DRAM, (Noisy, options))


def test_random_numbers_over_groups_that_cross_blocks_are_refused() -> None:
    with tiermem.TierManager("cpu", hbm="64KiB", dram="1MiB", policy=POLICY) as tier:
        model = tier.wrap(Net())
        groups = [
            {"params": [p for p in model.parameters() if (p.dim() > 1) is matrices]}
            for matrices in (True, False)
        ]
        blocks = len(tier.residency())
        with pytest.raises(tiermem.StepError, match="another order"):
            tier.optimizer(groups, Noisy)
        assert len([r for r in tier.residency() if r.role == "optimizer"]) == 0
        assert blocks <= len(tier.residency())
        train(model, tier.optimizer(model, Noisy))


# -- what is not wrapped ---------------------------------------------------------------


# -- groups of several dtypes ---------------------------------------------------------------------


class Short(nn.Module):
    """A layer in half precision, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Linear(12, 12, dtype=torch.bfloat16)
        self.long = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor, skip: int | None = None) -> torch.Tensor:
        return self.long(self.short(x.bfloat16()).float()) * 1e-4


@pytest.mark.parametrize("foreach", [False, True])
def test_a_default_from_the_first_parameters_dtype_is_refused_over_several(foreach: bool) -> None:
    """Adafactor's epsilon is that of the dtype of the first parameter with a gradient."""
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="4MiB") as tier:
        model = tier.wrap(Short())
        with pytest.raises(tiermem.StepError, match=r"several dtypes \(torch.bfloat16, "):
            tier.optimizer(model, torch.optim.Adafactor, foreach=foreach)
        tier.optimizer(model, torch.optim.Adafactor, eps=(1e-30, 1e-3), foreach=foreach).close()
        tier.optimizer(model, torch.optim.AdamW, foreach=foreach).close()
        model.short.requires_grad_(False)  # it never has a gradient
        tier.optimizer(model, torch.optim.Adafactor, foreach=foreach)


def test_a_group_for_each_dtype() -> None:
    def steps(tier: tiermem.TierManager | None) -> nn.Module:
        seed(11)
        model = Short() if tier is None else tier.wrap(Short())
        groups = [{"params": list(part.parameters())} for part in model.children()]
        optimizer: Any = (
            torch.optim.Adafactor(groups, lr=0.1)
            if tier is None
            else tier.optimizer(groups, torch.optim.Adafactor, lr=0.1)
        )
        for _ in range(4):
            train(model, optimizer)
        return model

    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="4MiB") as tier:
        model = steps(tier)
    assert_same(dict(steps(None).state_dict()), dict(model.state_dict()), "weights")


class Quantized(nn.Module):
    """A model whose first weights are frozen, of a dtype that no optimizer steps."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        values = (torch.rand(12, 12) * 8).to(dtype)
        self.base = nn.Parameter(values, requires_grad=False)
        self.layer = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor, skip: int | None = None) -> torch.Tensor:
        return self.layer(x @ self.base.float())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_frozen_weights_of_any_dtype(dtype: torch.dtype) -> None:
    with Pair(partial(Quantized, dtype), DRAM, (torch.optim.AdamW, {"lr": 0.1})) as pair:
        follow(pair)


def test_a_group_with_nothing_but_frozen_weights() -> None:
    with tiermem.TierManager(device="cpu", hbm="1MiB", dram="4MiB") as tier:
        model = tier.wrap(Quantized(torch.int8))
        groups = [{"params": [model.base]}, {"params": list(model.layer.parameters())}]
        train(model, tier.optimizer(groups, torch.optim.AdamW))


def test_a_model_that_was_never_wrapped_is_refused() -> None:
    with tiermem.TierManager("cpu", hbm="64KiB", dram="1MiB", policy=POLICY) as tier:
        for given in (Net(), Net().parameters(), [{"params": Net().parameters()}]):
            with pytest.raises(tiermem.StepError, match=r"tier\.wrap") as caught:
                tier.optimizer(given, torch.optim.AdamW)
            assert "'layers.0.weight'" in str(caught.value) or "(12, 12)" in str(caught.value)
        model = tier.wrap(Net())
        tier.unwrap(model)
        with pytest.raises(tiermem.StepError, match=r"'layers\.0\.weight'"):
            tier.optimizer(model, torch.optim.AdamW)


def test_what_came_into_a_model_after_wrap_is_named() -> None:
    """As where peft's adapters are put in then."""
    with tiermem.TierManager("cpu", hbm="64KiB", dram="1MiB", policy=POLICY) as tier:
        model = tier.wrap(Net())
        model.layers[0].adapter = nn.Linear(2, 2)
        late = list(model.layers[0].adapter.parameters())
        with pytest.raises(
            tiermem.StepError, match=r"'layers\.0\.adapter\.weight' and 1 more.*add_"
        ):
            tier.optimizer(late, torch.optim.AdamW)
        around = nn.Sequential(model)
        with pytest.raises(tiermem.WrapError, match=r"'0' is wrapped already.*adapters are added"):
            tier.wrap(around)


def test_parameters_of_another_manager_are_refused() -> None:
    budgets = {"hbm": "64KiB", "dram": "1MiB", "policy": POLICY}
    with tiermem.TierManager("cpu", **budgets) as tier:
        theirs = tier.wrap(Net())
        with tiermem.TierManager("cpu", **budgets) as other:
            mine = other.wrap(Net())
            both = [*mine.parameters(), *theirs.parameters()]
            for given in (theirs, both):
                with pytest.raises(tiermem.StepError, match="another TierManager"):
                    other.optimizer(given, torch.optim.AdamW)
            optimizer = other.optimizer(mine, torch.optim.AdamW)
            with pytest.raises(tiermem.StepError, match="another TierManager"):
                optimizer.add_param_group({"params": [next(theirs.parameters())]})
            assert len(optimizer.param_groups) == 1
            train(mine, optimizer)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, Counting, Plain])
def test_a_few_parameters_outside_beside_a_wrapped_model(cls: Any) -> None:
    """Those of a criterion, say: they stay where they are and train as they would."""
    seed(5)
    plain, scale = Net(), nn.Parameter(torch.ones(12))
    seed(5)
    with tiermem.TierManager("cpu", hbm="64KiB", dram="1MiB", policy=POLICY) as tier:
        model, other = tier.wrap(Net()), nn.Parameter(torch.ones(12))
        pairs = [
            (plain, scale, cls([*plain.parameters(), scale], lr=0.1)),
            (model, other, tier.optimizer([*model.parameters(), other], cls, lr=0.1)),
        ]
        for number in range(4):
            for net, own, optimizer in pairs:
                seed(number)
                (net(torch.randn(3, 12)) * own).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same(scale.detach(), other.detach(), "outside")
        assert_same(dict(plain.state_dict()), dict(model.state_dict()), "inside")


def test_a_signal_as_the_fused_kernel_is_tried_is_not_taken_for_a_class_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What its handler raises comes through; the host would have stepped with other bits."""

    def alarmed(_: torch.optim.Optimizer) -> None:
        raise TimeoutError("alarm")

    monkeypatch.setattr(fused, "run_unseen", alarmed)
    with pytest.raises(TimeoutError, match="alarm"):
        fused.with_fused(torch.optim.AdamW)
