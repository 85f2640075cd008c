"""What users do around a training step, in the tiers bit for bit."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support_nn import Pair, Tiers, assert_same, check_table, same_bits, scalar_of, seed
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import tiermem

DRAM = Tiers("dram")
Use = Callable[[nn.Module, Any], Any]


class Net(nn.Module):
    """Three blocks, a method that is not forward, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.norm = nn.BatchNorm1d(16)
        self.decoder = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.encoder(x))

    def weight_sum(self) -> torch.Tensor:
        return self.decoder[0].weight.sum() + F.linear(torch.ones(16), self.encoder[0].weight).sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encode(x))


def data() -> torch.Tensor:
    return torch.randn(5, 16)


def step(model: nn.Module, optimizer: Any) -> torch.Tensor:
    loss = model(data()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def follow(use: Use, tiers: Tiers = DRAM, **options: Any) -> None:
    """Steps, does something, steps again; everything has to agree."""
    with Pair(options.pop("build", Net), tiers, **options) as pair:
        pair.both(step, 1)
        pair.both(use, 2)
        pair.check_gradients("lazy")
        pair.check_state()
        pair.both(step, 3)
        pair.both(step, 4)
        pair.finish()


# -- passes ----------------------------------------------------------------------------


def test_several_forwards_before_one_backward() -> None:
    def use(model: nn.Module, optimizer: Any) -> Any:
        loss = sum(model(data()).square().mean() for _ in range(3))
        loss.backward()
        return loss

    follow(use)


def test_accumulation_and_two_losses() -> None:
    def use(model: nn.Module, optimizer: Any) -> Any:
        for _ in range(3):
            model(data()).square().mean().backward()
        first, second = model(data()).mean(), model(data()).abs().mean()
        second.backward()
        first.backward()
        optimizer.step()

    follow(use)


def test_retain_graph() -> None:
    def use(model: nn.Module, optimizer: Any) -> Any:
        out = model(data())
        out.mean().backward(retain_graph=True)
        out.square().mean().backward()

    follow(use)


def test_autograd_grad_and_double_backward() -> None:
    def use(model: nn.Module, optimizer: Any) -> Any:
        x = data().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        (out.mean() + penalty).backward()
        optimizer.step()
        grads = torch.autograd.grad(model(data()).sum(), list(model.parameters()))
        return [slope, grads, x.grad]

    follow(use)


def test_hooks_that_look_at_other_gradients_inside_autograd_grad() -> None:
    """It adds nothing to any: they are there all the while."""

    def use(model: nn.Module, optimizer: Any) -> Any:
        optimizer.zero_grad()
        model(data()).mean().backward()
        params, seen = list(model.parameters()), list[Any]()

        def look(_gradient: torch.Tensor) -> None:
            seen.append([None if p.grad is None else p.grad.detach().clone() for p in params])

        hooks = [param.register_hook(look) for param in params]
        seen.append(torch.autograd.grad(model(data()).square().mean(), params))
        seen.append(torch.autograd.grad(model(data()).mean(), params[:2]))
        model(data()).square().mean().backward()
        for hook in hooks:
            hook.remove()
        return seen

    follow(use)


def test_gradients_that_have_a_graph() -> None:
    def use(model: nn.Module, optimizer: Any) -> Any:
        optimizer.zero_grad()
        model(data()).square().mean().backward(create_graph=True)
        total = sum(p.grad.square().sum() for p in model.parameters())
        total.backward()
        found = [p.grad.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = None
        return found

    with pytest.warns(UserWarning, match="create_graph"):
        follow(use)


def test_modes_without_gradients() -> None:
    def use(model: nn.Module, optimizer: Any) -> Any:
        model.eval()
        with torch.no_grad():
            first = model(data())
        with torch.inference_mode():
            second = model(data()).clone()
        model.train()
        return [first, second.tolist()]

    follow(use)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_the_middle(where: str) -> None:
    class Stop(Exception):
        pass

    def use(model: Any, optimizer: Any) -> Any:
        def stop(*_: Any) -> None:
            raise Stop

        if where == "forward":
            handle = model.decoder[1].register_forward_hook(stop)
            with pytest.raises(Stop):
                model(data())
        else:
            handle = model.encoder[1].register_full_backward_hook(stop)
            with pytest.raises(Stop):
                model(data()).square().mean().backward()
        handle.remove()
        optimizer.zero_grad()

    follow(use)


def test_methods_that_are_not_forward_and_parameters_used_outside() -> None:
    def use(model: Any, optimizer: Any) -> Any:
        code = model.encode(data())
        loss = model.decoder(code).square().mean() + model.weight_sum() * 1e-3
        loss = loss + 1e-3 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return [loss, [p.norm() for p in model.parameters()], model.encoder[0].weight[0].tolist()]

    follow(use)


# -- hooks -----------------------------------------------------------------------------


def test_hooks_of_the_users_own() -> None:
    def use(model: Any, optimizer: Any) -> Any:
        seen: list[Any] = []
        handles = [
            model.encoder.register_forward_pre_hook(lambda m, a: (a[0] * 2,)),
            model.encoder.register_forward_hook(lambda m, a, o: o + m[0].weight.mean()),
            model.decoder.register_full_backward_hook(
                lambda m, i, o: seen.append([t.clone() for t in (*i, *o)])
            ),
            model.decoder.register_full_backward_pre_hook(lambda m, o: (o[0] * 3,)),
            model.decoder[0].weight.register_hook(lambda g: g * 2),
            model.decoder[0].weight.register_post_accumulate_grad_hook(
                lambda p: seen.append(p.grad.clone())
            ),
            nn.modules.module.register_module_forward_hook(lambda m, a, o: None),
        ]
        out = model(data())
        out.register_hook(lambda g: g + 1)
        out.square().mean().backward()
        for handle in handles:
            handle.remove()
        return seen

    follow(use)


def test_an_optimizer_in_the_backward_pass() -> None:
    """Each parameter is stepped by a hook as soon as its gradient is there."""

    def use(model: nn.Module, optimizer: Any) -> Any:
        def update(param: torch.Tensor) -> None:
            with torch.no_grad():
                param.add_(param.grad, alpha=-0.1)
            param.grad = None

        handles = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]
        model(data()).square().mean().backward()
        for handle in handles:
            handle.remove()

    follow(use)


@pytest.mark.parametrize("kind", ["save_on_cpu", "own"])
def test_saved_tensor_hooks_around(kind: str) -> None:
    def use(model: nn.Module, optimizer: Any) -> Any:
        hooks = (
            save_on_cpu()
            if kind == "save_on_cpu"
            else saved_tensors_hooks(lambda t: (t.clone(), 1), lambda packed: packed[0])
        )
        with hooks:
            out = model(data())
        out.square().mean().backward()

    follow(use)


# -- gradients by hand -----------------------------------------------------------------


def test_clearing_and_editing_gradients_by_hand() -> None:
    def use(model: nn.Module, optimizer: Any) -> Any:
        seen = []
        for how in range(5):
            model(data()).square().mean().backward()
            for p in model.parameters():
                if how == 0:
                    p.grad = None
                elif how == 1:
                    p.grad.zero_()
                elif how == 2:
                    p.grad.data.mul_(2)
                elif how == 3:
                    p.grad[0] = 1
                    p.grad.view(-1)[1:].clamp_(-0.01, 0.01)
                else:
                    p.grad = p.grad * 2
            seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        kept = [p.grad for p in model.parameters()]
        model.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        model(data()).square().mean().backward()
        model.zero_grad(set_to_none=False)
        return [seen, [g.clone() for g in kept]]

    follow(use)


def test_a_view_of_a_gradient_that_is_kept() -> None:
    def use(model: Any, optimizer: Any) -> Any:
        model(data()).square().mean().backward()
        row = model.decoder[0].weight.grad[0]
        row.mul_(3)
        first = row.clone()
        optimizer.step()
        return [first, row.clone(), model.decoder[0].weight.grad.clone()]

    follow(use)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm", [2.0, 1.0, float("inf")])
@pytest.mark.one_in(3)
def test_clipping(norm: float, foreach: bool | None) -> None:
    def use(model: nn.Module, optimizer: Any) -> Any:
        (model(data()).square().mean() * 50).backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm, foreach=foreach)
        optimizer.step()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        return total

    follow(use)

    def ours(model: nn.Module, optimizer: Any) -> Any:
        (model(data()).square().mean() * 50).backward()
        if isinstance(optimizer, tiermem.TieredOptimizer):
            total = optimizer.clip_grad_norm_(0.5, norm, foreach=foreach)
        else:
            total = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm, foreach=foreach)
        optimizer.step()
        return total

    follow(ours)


def test_wrapping_while_gradients_exist() -> None:
    def prepare(model: nn.Module) -> None:
        model(data()).square().mean().backward()

    with Pair(Net, DRAM, prepare=prepare) as pair:
        pair.check_gradients("lazy")
        pair.both(step, 1)
        pair.both(step, 2)
        pair.finish()


def test_freezing_and_unfreezing() -> None:
    def freeze(model: Any) -> None:
        for p in model.encoder.parameters():
            p.requires_grad_(False)

    everything = (torch.optim.AdamW, {"lr": 0.01})
    with Pair(Net, DRAM, prepare=freeze, optimizer=None) as pair:
        pair.plain_optimizer = everything[0](pair.plain.parameters(), **everything[1])
        with pytest.raises(tiermem.CapacityError):
            pair.tier.optimizer(list(pair.model.parameters()), everything[0], **everything[1])
    roomy = Tiers("dram", extra_hbm=1 << 16)
    with Pair(Net, roomy, prepare=freeze, optimizer=None) as pair:
        pair.plain_optimizer = everything[0](pair.plain.parameters(), **everything[1])
        pair.optimizer = pair.tier.optimizer(
            list(pair.model.parameters()), everything[0], **everything[1]
        )
        pair.both(step, 1)

        def thaw(model: Any, optimizer: Any) -> None:
            for p in model.encoder.parameters():
                p.requires_grad = True

        pair.both(thaw)

        def clipped(model: Any, optimizer: Any) -> Any:
            (model(data()).square().mean() * 50).backward()
            total = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            return total

        pair.both(clipped, 2)
        pair.both(step, 3)
        if hasattr(pair.optimizer, "clip_grad_norm_"):
            seed(4)
            (pair.plain(data()).square().mean() * 50).backward()
            expected = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.5)
            seed(4)
            (pair.model(data()).square().mean() * 50).backward()
            assert same_bits(expected, pair.optimizer.clip_grad_norm_(0.5))
            pair.plain_optimizer.step()
            pair.optimizer.step()

        def freeze_again(model: Any, optimizer: Any) -> None:
            for p in model.decoder.parameters():
                p.requires_grad_(False)
            optimizer.zero_grad()

        pair.both(freeze_again)
        pair.both(step, 5)
        pair.finish()


# -- optimizers ------------------------------------------------------------------------


def test_closures_schedulers_groups_and_hooks() -> None:
    def build_optimizer(model: Any, make: Any) -> Any:
        return make(
            [
                {"params": list(model.encoder.parameters()), "lr": 0.02},
                {"params": list(model.norm.parameters()), "weight_decay": 0.0},
            ]
        )

    with Pair(Net, Tiers("dram", extra_hbm=1 << 15), optimizer=None) as pair:
        pair.plain_optimizer = build_optimizer(
            pair.plain, lambda g: torch.optim.AdamW(g, lr=0.01, weight_decay=0.1)
        )
        pair.optimizer = build_optimizer(
            pair.model,
            lambda g: pair.tier.optimizer(g, torch.optim.AdamW, lr=0.01, weight_decay=0.1),
        )

        def use(model: Any, optimizer: Any) -> Any:
            optimizer.add_param_group({"params": list(model.decoder.parameters()), "lr": 0.005})
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.03, total_steps=6)
            calls: list[str] = []
            optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
            optimizer.register_step_post_hook(lambda *_: calls.append("post"))
            losses = []
            for _ in range(4):

                def closure() -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = model(data()).square().mean()
                    loss.backward()
                    return loss

                losses.append(optimizer.step(closure))
                scheduler.step()
            return [losses, calls, scheduler.get_last_lr()]

        pair.both(use)
        pair.finish()


def test_state_goes_to_and_from_the_plain_optimizer() -> None:
    settings = (torch.optim.Adam, {"lr": 0.01, "amsgrad": True})
    with Pair(Net, DRAM, optimizer=settings) as pair:
        pair.both(step, 1)
        pair.both(step, 2)
        buffer = io.BytesIO()
        torch.save(pair.optimizer.state_dict(), buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
        pair.plain_optimizer.load_state_dict(saved)
        pair.optimizer.load_state_dict(copy.deepcopy(pair.plain_optimizer.state_dict()))
        pair.both(step, 3)
        before = copy.deepcopy(pair.optimizer.state_dict())
        wrong = copy.deepcopy(before)
        wrong["state"][0]["exp_avg"] = torch.zeros(3)
        with pytest.raises(tiermem.CheckpointError, match="nothing was loaded"):
            pair.optimizer.load_state_dict(wrong)
        wrong = copy.deepcopy(before)
        wrong["param_groups"][0]["params"] = [0]
        with pytest.raises(tiermem.CheckpointError, match="nothing was loaded"):
            pair.optimizer.load_state_dict(wrong)
        assert_same(before, pair.optimizer.state_dict(), "unchanged")
        pair.finish()


def test_state_read_and_written_by_hand() -> None:
    def use(model: nn.Module, optimizer: Any) -> Any:
        seen = []
        for p in model.parameters():
            state = optimizer.state[p]
            seen.append(state["momentum_buffer"].norm())
            state["momentum_buffer"].mul_(0.5)
        return seen

    follow(use)


class WritesThroughData(torch.optim.Optimizer):
    """As many optimizers outside torch do it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["mean"] = 0, torch.zeros_like(p.data)
                state["step"] += 1
                state["mean"] = state["mean"] * 0.9 + p.grad.data
                p.grad.data.mul_(0.5)
                p.data = p.data - group["lr"] * state["mean"] / state["step"]


def test_an_optimizer_that_writes_through_data() -> None:
    follow(lambda m, o: None, optimizer=(WritesThroughData, {"lr": 0.05}))


class NormOfAll(torch.optim.Optimizer):
    """Its update of each parameter depends on all of them."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        total = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.sub_(p.grad / total, alpha=0.1)


def test_an_optimizer_over_all_parameters_is_refused() -> None:
    with pytest.raises(tiermem.StepError, match="depends on the others"):
        Pair(Net, DRAM, optimizer=(NormOfAll, {}))


class Noisy(torch.optim.Optimizer):
    """Draws random numbers for one parameter after the other."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad + torch.randn_like(p), alpha=0.1)


def test_an_optimizer_that_draws_random_numbers_draws_those_of_the_resident() -> None:
    """Its numbers depend on the order of the parameters, which is kept."""
    with Pair(Net, DRAM, optimizer=(Noisy, {})) as pair:
        for number in range(3):
            pair.both(step, number)
        pair.finish()


def test_an_optimizer_after_its_model_was_unwrapped() -> None:
    with Pair(Net, DRAM) as pair:
        pair.both(step, 1)
        pair.model(data()).sum().backward()
        pair.tier.unwrap(pair.model)
        with pytest.raises(tiermem.StepError, match="make a new"):
            pair.optimizer.step()


# -- state of modules ------------------------------------------------------------------


def test_state_dicts_between_plain_and_tiered() -> None:
    with Pair(Net, DRAM) as pair:
        pair.both(step, 1)
        state = copy.deepcopy(pair.model.state_dict())
        pair.both(step, 2)
        pair.plain.load_state_dict(state)
        pair.model.load_state_dict(state)
        pair.both(step, 3)
        pair.model.load_state_dict(pair.plain.state_dict())
        pair.plain.load_state_dict(pair.model.state_dict())
        pair.model.encoder.load_state_dict(pair.plain.encoder.state_dict())
        part = {k: v for k, v in state.items() if k.startswith("decoder")} | {
            "more": state["norm.weight"]
        }
        with pytest.raises(RuntimeError, match="Missing key"):
            pair.model.load_state_dict(part)
        for model in (pair.plain, pair.model):
            missing = model.load_state_dict(part, strict=False)
            assert missing.unexpected_keys == ["more"]
        pair.both(step, 4)
        pair.finish()


@pytest.mark.parametrize("key", ["decoder.2.weight", "norm.running_mean"])
def test_a_checkpoint_of_another_shape_is_loaded_but_for_that(key: str) -> None:
    """As in torch, which raises at the end."""
    with Pair(Net, DRAM) as pair:
        wrong = {name: value + 1 for name, value in pair.plain.state_dict().items()}
        wrong[key] = torch.zeros(7)
        said = []
        for model in (pair.plain, pair.model):
            with pytest.raises(RuntimeError, match="size mismatch") as caught:
                model.load_state_dict(wrong)
            said.append(str(caught.value))
        assert said[0] == said[1]
        assert_same(dict(pair.plain.state_dict()), dict(pair.model.state_dict()), "state")
        with pytest.raises(tiermem.CheckpointError, match="assign"):
            pair.model.load_state_dict(pair.plain.state_dict(), assign=True)
        pair.both(step, 4)
        pair.finish()


def test_modules_that_came_later_may_be_given_their_tensors() -> None:
    """``assign=True`` replaces tensors that are not in the tiers, as loaders of adapters do."""
    with Pair(Net, DRAM) as pair:
        for model in (pair.plain, pair.model):
            with torch.device("meta"):
                model.norm.later = nn.Linear(3, 3)
            given = {"norm.later.weight": torch.ones(3, 3), "norm.later.bias": torch.zeros(3)}
            found = model.load_state_dict(given, strict=False, assign=True)
            assert not found.unexpected_keys
            assert torch.equal(model.norm.later.weight, given["norm.later.weight"])
            model.norm.later.requires_grad_(False)
        renaming = pair.model.register_load_state_dict_pre_hook(lambda module, state, *rest: None)
        for more in ({}, {"norm.weight": torch.ones(1)}):
            with pytest.raises(tiermem.CheckpointError, match="assign"):
                pair.model.load_state_dict({**given, **more}, strict=False, assign=True)
            renaming.remove()
        pair.both(step, 4)
        del pair.plain.norm.later, pair.model.norm.later
        pair.finish()


def test_loading_where_torch_is_told_to_swap_parameters() -> None:
    """``set_swap_module_params_on_conversion(True)``: values are copied in."""
    swap = torch.__future__.set_swap_module_params_on_conversion
    with Pair(Net, DRAM) as pair:
        doubled = {name: 2 * value for name, value in pair.plain.state_dict().items()}
        params = list(pair.model.parameters())
        swap(True)
        try:
            for model in (pair.plain, pair.model):
                model.load_state_dict(doubled)
            for one, other in zip(pair.plain.children(), pair.model.children(), strict=True):
                state = one.state_dict()
                other.load_state_dict({name: 3 * value for name, value in state.items()})
                one.load_state_dict({name: 3 * value for name, value in state.items()})
            assert torch.__future__.get_swap_module_params_on_conversion()
        finally:
            swap(False)
        assert all(a is b for a, b in zip(params, pair.model.parameters(), strict=True))
        assert_same(dict(pair.plain.state_dict()), dict(pair.model.state_dict()), "state")


def test_a_submodules_checkpoint_of_another_shape_is_loaded_but_for_that() -> None:
    with Pair(Net, DRAM) as pair:
        wrong = {k: v + 1 for k, v in pair.plain.decoder.state_dict().items()}
        wrong["2.bias"] = torch.zeros(3)
        for model in (pair.plain, pair.model):
            with pytest.raises(RuntimeError, match=r"2\.bias"):
                model.decoder.load_state_dict(wrong, strict=False)
        pair.finish()


def test_copies_and_pickles() -> None:
    with Pair(Net, DRAM) as pair:
        pair.both(step, 1)
        twin = copy.deepcopy(pair.model)
        assert_same(dict(pair.plain.state_dict()), dict(twin.state_dict()), "deepcopy")
        assert all(type(p) is nn.Parameter for p in twin.parameters())
        plain_twin = copy.deepcopy(pair.plain)
        seed(5)
        expected = plain_twin(data())
        seed(5)
        assert same_bits(expected, twin(data()))
        weight = copy.deepcopy(pair.model.decoder[0].weight)
        assert same_bits(weight, pair.plain.decoder[0].weight)
        loaded = pickle.loads(pickle.dumps(pair.model))
        assert_same(dict(pair.plain.state_dict()), dict(loaded.state_dict()), "pickle")
        with pytest.raises(tiermem.StepError, match="state_dict"):
            pickle.dumps(pair.optimizer)
        buffer = io.BytesIO()
        torch.save(pair.model.state_dict(), buffer)
        pair.finish()


def test_average_of_weights() -> None:
    def use(model: nn.Module, optimizer: Any) -> Any:
        average = torch.optim.swa_utils.AveragedModel(model)
        for number in range(3):
            seed(number)
            step(model, optimizer)
            average.update_parameters(model)
        return [dict(average.state_dict()), average(data())]

    follow(use, Tiers("dram", extra_hbm=1 << 15))  # it looks at all weights together


def test_materialize_takes_changes_back() -> None:
    with Pair(Net, DRAM) as pair:
        pair.both(step, 1)
        seed(2)
        pair.plain(data()).square().mean().backward()
        seed(2)
        pair.model(data()).square().mean().backward()
        with pair.tier.materialize(pair.model.decoder):
            for model in (pair.plain, pair.model):
                for p in model.decoder.parameters():
                    assert type(p) is nn.Parameter
                    p.data.mul_(0.5)
                    p.grad.add_(1)
                model.decoder[0].weight.grad = None
        pair.check_gradients("lazy")
        pair.both(lambda m, o: o.step() or o.zero_grad())
        with pair.tier.materialize(pair.model):
            pair.both(step, 3)
        pair.both(step, 4)
        with pytest.raises(tiermem.ParameterError, match="old value is kept"):
            with pair.tier.materialize(pair.model.decoder[0].weight):
                pair.model.decoder[0].weight.data = torch.zeros(2, 2)
        with pytest.raises(tiermem.ParameterError, match="wrap their module first"):
            with pair.tier.materialize(nn.Linear(2, 2)):
                pass
        pair.finish()


def test_unwrapping_and_going_on() -> None:
    with Pair(Net, DRAM) as pair:
        pair.both(step, 1)
        seed(2)
        pair.plain(data()).square().mean().backward()
        seed(2)
        pair.model(data()).square().mean().backward()
        pair.tier.unwrap(pair.model)
        assert all(type(p) is nn.Parameter for p in pair.model.parameters())
        for first, second in zip(pair.plain.parameters(), pair.model.parameters(), strict=True):
            assert same_bits(first.grad, second.grad)
        pickle.dumps(pair.model)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (pair.plain, pair.model)]
        for model, optimizer in zip((pair.plain, pair.model), optimizers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            seed(3)
            step(model, optimizer)
        assert_same(dict(pair.plain.state_dict()), dict(pair.model.state_dict()), "after")
        pair.tier.wrap(pair.model)
        seed(4)
        expected = pair.plain(data())
        seed(4)
        assert same_bits(expected, pair.model(data()))


# -- torch.func ------------------------------------------------------------------------


def test_functional_calls() -> None:
    build = lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))  # noqa: E731

    def use(model: nn.Module, optimizer: Any) -> Any:
        params = {k: v.detach().clone() * 2 for k, v in model.named_parameters()}
        x = data()

        def loss_of(params: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, params, (x,)).square().mean()

        called = torch.func.functional_call(model, params, (x,))
        grads = torch.func.grad(loss_of)(params, x)
        each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(params, x[:, None])
        jacobian = torch.func.jacrev(loss_of)(params, x)
        own = torch.func.vmap(model)(x[:, None])
        return [called, grads, each, jacobian, own, model(x)]

    follow(use, build=build)


def test_functional_call_with_parameters() -> None:
    def use(model: nn.Module, optimizer: Any) -> Any:
        other = Net()
        out = torch.func.functional_call(model, dict(other.named_parameters()), (data(),))
        out.square().mean().backward()
        return [[p.grad for p in other.parameters()], model(data())]

    follow(use)


@pytest.mark.filterwarnings("ignore::UserWarning")  # dynamo looks at .grad of what is no leaf
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_with_the_eager_backend(whole: bool) -> None:
    def prepare(model: Any) -> None:
        if not whole:
            for part in (model.encoder, model.decoder):
                part.compile(backend="eager")

    with Pair(Net, DRAM, prepare=prepare) as pair:

        def use(model: nn.Module, optimizer: Any) -> Any:
            called = torch.compile(model, backend="eager") if whole else model
            losses = []
            for _ in range(2):
                loss = called(data()).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss)
            return losses

        pair.both(use)
        pair.finish()
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")  # torch is about to drop it
def test_tracing_is_refused() -> None:
    with Pair(Net, DRAM) as pair:
        with pytest.raises(tiermem.WrapError, match=r"tier\.unwrap"):
            torch.jit.trace(pair.model, data())
        pair.both(step)


class Scripted(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Linear(8, 8))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
def test_code_that_reads_weights_in_cpp_is_not_made_of_a_wrapped_module() -> None:
    """It would find them where they are not, at its first call."""
    with tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB") as tier:
        model = tier.wrap(Scripted())
        for module in (model, model[0], nn.Sequential(nn.ReLU(), model)):
            with pytest.raises(tiermem.WrapError, match=r"torch\.jit\.script.*tier\.unwrap"):
                torch.jit.script(module)
        copied, x = copy.deepcopy(model), torch.ones(2, 8)
        assert same_bits(torch.jit.script(copied)(x), copied(x))
        tier.unwrap(model)
        assert same_bits(torch.jit.script(model)(x), copied(x))


def test_scaled_losses() -> None:
    def use(model: nn.Module, optimizer: Any) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        totals = []
        for number in range(4):
            loss = model(data()).square().mean() * (float("inf") if number == 1 else 1)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            totals.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [totals, scaler.get_scale()]

    follow(use)


def test_threads_that_evaluate_together() -> None:
    build = lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))  # noqa: E731
    with Pair(build, Tiers("dram", extra_hbm=1 << 14), optimizer=None) as pair:
        inputs = [torch.randn(3, 16) for _ in range(4)]
        found: dict[int, list[torch.Tensor]] = {}

        def run(number: int) -> None:
            with torch.no_grad():
                found[number] = [pair.model(inputs[number]) for _ in range(20)]

        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, outputs in found.items():
            expected = pair.plain(inputs[number])
            assert all(same_bits(expected, output) for output in outputs)
        pair.check_table()


def test_initialised_again_and_looked_at() -> None:
    def use(model: Any, optimizer: Any) -> Any:
        nn.init.xavier_uniform_(model.encoder[0].weight)
        model.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
        weight = model.decoder[0].weight
        assert weight in set(model.parameters()) and isinstance(weight, nn.Parameter)
        weight.detach().numpy()[0, 0] = 3.0
        return [
            repr(model),
            repr(weight),
            weight.tolist(),
            weight.stride(),
            weight.to(torch.float64),
        ]

    follow(use)


# -- several of them -------------------------------------------------------------------


def test_two_modules_under_one_manager_and_two_managers() -> None:
    seed(0)
    plain = [Net(), Net(), Net()]
    tiered = [copy.deepcopy(m) for m in plain]
    with (
        tiermem.TierManager(device="cpu", hbm=1 << 15, dram=1 << 20) as one,
        tiermem.TierManager(device="cpu", hbm=1 << 15, dram=1 << 20) as two,
    ):
        for tier, model in zip((one, one, two), tiered, strict=True):
            tier.wrap(model)
        optimizers = [
            one.optimizer([*tiered[0].parameters(), *tiered[1].parameters()], torch.optim.Adam),
            two.optimizer(tiered[2], torch.optim.SGD, lr=0.1),
        ]
        plain_optimizers = [
            torch.optim.Adam([*plain[0].parameters(), *plain[1].parameters()]),
            torch.optim.SGD(plain[2].parameters(), lr=0.1),
        ]
        for number in range(3):
            losses = []
            for models, steppers in ((plain, plain_optimizers), (tiered, optimizers)):
                seed(number)
                x = data()
                for model in models:
                    x = model(x)
                loss = x.square().mean()
                loss.backward()
                for stepper in steppers:
                    stepper.step()
                    stepper.zero_grad()
                losses.append(loss)
            assert same_bits(*losses)
        for first, second in zip(plain, tiered, strict=True):
            assert_same(dict(first.state_dict()), dict(second.state_dict()), "state")
        check_table(one)
        check_table(two)


def test_a_module_inside_a_plain_one() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.head = inner, nn.Linear(16, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.inner(x))

    with Pair(Net, Tiers("dram", extra_hbm=1 << 14), optimizer=None) as pair:
        seed(9)
        outer = [Outer(pair.plain)]
        seed(9)
        outer.append(Outer(pair.model))
        plain = torch.optim.Adam(outer[0].parameters())
        tiered = pair.tier.optimizer(outer[1], torch.optim.Adam)
        for number in range(3):
            for model, optimizer in zip(outer, (plain, tiered), strict=True):
                seed(number)
                step(model, optimizer)
        assert_same(dict(outer[0].state_dict()), dict(outer[1].state_dict()), "outer")
        assert_same(plain.state_dict(), tiered.state_dict(), "optimizer")
        assert scalar_of(None) is None
