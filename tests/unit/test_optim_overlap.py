"""Steps that are made in the next forward: no difference but in time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support_nn import Pair, Tiers, assert_same, same_bits, seed
from support_optim import Net, Twins, loss_of, two_groups
from torch import nn

import tiermem

DRAM = Tiers("dram")
Look = Callable[[nn.Module, Any], Any]


def owed(twins: Twins) -> int:
    """How many units are still to be stepped."""
    return len(twins.optimizer._units.owed)


def trained(**options: Any) -> Twins:
    """Two steps made, one asked for."""
    twins = Twins(Net, options.pop("tiers", DRAM), overlap=True, **options)
    for step in range(2):
        twins.backward(step)
        twins.step()
    twins.backward(2)
    twins.by_hand.step()
    twins.optimizer.step()
    assert owed(twins)
    return twins


LOOKS: dict[str, Look] = {
    "an operation on a weight": lambda m, t: m.layers[1].up.weight * 2,
    "a sum over all": lambda m, t: [p.sum() for p in m.parameters()],
    "data": lambda m, t: m.layers[0].norm.weight.data.clone(),
    "detach": lambda m, t: m.extra.bias.detach().clone(),
    "state_dict": lambda m, t: dict(m.state_dict()),
    "of a part": lambda m, t: dict(m.layers[2].state_dict()),
    "numpy": lambda m, t: torch.from_numpy(m.extra.weight.detach().float().numpy()),
    "deepcopy": lambda m, t: dict(copy.deepcopy(m.layers[1].up.weight.detach())[None]),
    "no_grad": lambda m, t: _evaluate(m, torch.no_grad),
    "inference_mode": lambda m, t: _evaluate(m, torch.inference_mode),
    "gradient": lambda m, t: [p.grad.clone() for p in m.parameters()],
    "a gradient's norm": lambda m, t: m.extra.weight.grad.norm(),
}
LOOKS["deepcopy"] = lambda m, t: copy.deepcopy(m.layers[1].up.weight).detach()


def _evaluate(model: nn.Module, mode: Any) -> torch.Tensor:
    with mode():
        return loss_of(model, 77)


@pytest.mark.parametrize("look", sorted(LOOKS))
def test_whoever_looks_sees_the_step_made(look: str) -> None:
    with trained() as twins:
        assert_same(LOOKS[look](twins.plain, None), LOOKS[look](twins.model, None), look)
        twins.check()
        assert not owed(twins)


def test_the_optimizers_own_state() -> None:
    with trained() as twins:
        param = twins.model.extra.weight
        index = [p is twins.plain.extra.weight for p in twins.by_hand.params].index(True)
        master = twins.by_hand.masters[index]
        assert_same(
            dict(twins.by_hand.optimizer.state[master]),
            {k: v.clone() for k, v in twins.optimizer.state[param].items()},
            "state",
        )
        twins.check()


def test_materialize_and_unwrap() -> None:
    with trained() as twins:
        with twins.tier.materialize(twins.model):
            for mine, theirs in zip(
                twins.model.parameters(), twins.plain.parameters(), strict=True
            ):
                assert same_bits(mine, theirs)
        twins.check()
    with trained() as twins:
        twins.tier.unwrap(twins.model)
        assert_same(dict(twins.plain.state_dict()), dict(twins.model.state_dict()), "unwrapped")


def test_each_block_is_stepped_before_its_own_use_and_not_sooner() -> None:
    with trained() as twins:
        left = []
        hooks = [
            layer.register_forward_hook(lambda *_: left.append(owed(twins)))
            for layer in twins.model.layers
        ]
        twins.optimizer.zero_grad()
        before = owed(twins)
        twins.by_hand.zero_grad()
        twins.backward(3)
        for hook in hooks:
            hook.remove()
        assert len(left) == 3
        assert before > left[0] > left[1] > left[2]
        assert owed(twins) == 0
        twins.step()
        twins.check()


def test_settings_are_those_of_when_the_step_was_asked_for() -> None:
    rate = torch.tensor(0.01)
    chosen = (torch.optim.AdamW, {"lr": 0.01, "foreach": False})
    for given in (0.01, rate):
        settings = {**chosen[1], "lr": given}
        with Twins(Net, DRAM, chosen[0], settings, groups=two_groups, overlap=True) as twins:
            for step in range(3):
                twins.backward(step)
                twins.step()
                assert owed(twins)
                for group in (*twins.by_hand.optimizer.param_groups, *twins.optimizer.param_groups):
                    if isinstance(group["lr"], torch.Tensor):
                        group["lr"] = group["lr"].clone().mul_(0.5)
                    else:
                        group["lr"] *= 0.5
                    group["weight_decay"] += 0.1
            twins.check()


def test_a_tensor_rate_written_in_place() -> None:
    settings = {"lr": torch.tensor(0.01), "foreach": False}
    plain = dict(settings, lr=settings["lr"].clone())
    with Twins(Net, DRAM, torch.optim.AdamW, settings, overlap=True) as twins:
        twins.by_hand.optimizer.param_groups[0]["lr"] = plain["lr"]
        for step in range(3):
            twins.backward(step)
            twins.step()
            twins.by_hand.optimizer.param_groups[0]["lr"].mul_(0.25)
            twins.optimizer.param_groups[0]["lr"].mul_(0.25)
        twins.check()


def test_writing_after_the_step_comes_after_it() -> None:
    with trained() as twins:
        saved = {k: v * 2 for k, v in list(twins.plain.state_dict().items())[3:5]}
        for model in (twins.plain, twins.model):
            with torch.no_grad():
                model.layers[1].down.weight.mul_(0.5)
            model.load_state_dict(saved, strict=False)
        assert_same(dict(twins.plain.state_dict()), dict(twins.model.state_dict()), "written")


def test_gradients_that_are_not_cleared_go_on_summing_up() -> None:
    with trained() as twins:
        twins.backward(3)
        twins.step()
        twins.check()


def test_gradients_cleared_in_many_ways() -> None:
    clear: list[Look] = [
        lambda m, o: o.zero_grad(),
        lambda m, o: o.zero_grad(set_to_none=False),
        lambda m, o: m.zero_grad(),
        lambda m, o: [setattr(p, "grad", None) for p in m.parameters()] and None,
        lambda m, o: setattr(m.extra.weight, "grad", torch.ones_like(m.extra.weight)),
        lambda m, o: m.extra.bias.grad.zero_(),
    ]
    with Twins(Net, DRAM, torch.optim.SGD, {"lr": 0.1}, master_dtype=None, overlap=True) as twins:
        for number, how in enumerate(clear):
            twins.backward(2 * number)
            twins.clip_norm(0.1)
            twins.by_hand.step()
            twins.optimizer.step()
            assert owed(twins)
            how(twins.plain, twins.by_hand.optimizer)
            how(twins.model, twins.optimizer)
            twins.backward(2 * number + 1)
            twins.step()
            twins.check()


def test_views_that_are_kept_see_the_step_at_once() -> None:
    roomy = Tiers("dram", extra_hbm=1 << 15)
    with Twins(Net, roomy, master_dtype=None, overlap=True) as twins:
        twins.backward(0)
        twins.step()
        mine = twins.model.layers[0].up.weight.data
        theirs = twins.plain.layers[0].up.weight.data
        twins.backward(1)
        grads = [m.layers[2].down.weight.grad[:2] for m in (twins.plain, twins.model)]
        twins.by_hand.step()
        twins.optimizer.step()
        assert same_bits(mine, theirs)
        for gradient in grads:
            gradient.zero_()
        assert_same(grads[0], grads[1], "views")
        del mine, theirs
        twins.check()
        assert_same(grads[0], grads[1], "views, once all is stepped")


def test_parameters_that_no_forward_uses() -> None:
    with trained() as twins:
        twins.by_hand.zero_grad()
        twins.optimizer.zero_grad()
        for number in (3, 4, 5):
            twins.backward(number, use_extra=False)
            twins.step()
        twins.backward(6)
        twins.step()
        twins.check()


def test_a_block_of_several_units() -> None:
    build = lambda: Net(layers=2)  # noqa: E731
    with Twins(build, DRAM, blocks=[], overlap=True) as twins:
        assert len(twins.optimizer._units) > 1
        for step in range(3):
            twins.backward(step)
            twins.step()
            assert owed(twins) == len(twins.optimizer._units)
        twins.check()


def test_autocast_and_selective_checkpointing_around() -> None:
    """What is switched on around the forward does not reach the steps in it."""
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
    )

    def policy(_context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    class Checkpointed(Net):
        def forward(self, ids: torch.Tensor, use_extra: bool = True) -> torch.Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
            return torch.nn.functional.linear(x, self.embed.weight)

    build = lambda: Checkpointed(torch.float32)  # noqa: E731
    with Twins(build, DRAM, master_dtype=None, overlap=True) as twins:
        for step in range(4):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                twins.backward(step)
            twins.step()
        twins.check()


def test_the_least_budget_holds_a_step_inside_a_forward(tmp_path: Path) -> None:
    for home in ("dram", "nvme"):
        tiers = Tiers(home, nvme=str(tmp_path), policy=home)
        with Twins(lambda: Net(layers=6), tiers, overlap=True) as twins:
            for step in range(3):
                twins.backward(step)
                twins.step()
                seed(step)
            twins.check()


def test_an_evaluation_that_uses_a_part() -> None:
    with trained() as twins:
        x = torch.ones(2, 24, dtype=torch.bfloat16)
        with torch.no_grad():
            assert same_bits(twins.plain.layers[0](x), twins.model.layers[0](x))
        assert owed(twins)
        twins.check()


def test_a_second_optimizer_and_more_parameters() -> None:
    """Two optimizers over parts of a model owe each their own."""
    build = lambda: Net(torch.float32)  # noqa: E731
    seed(3)
    plain = build()
    seed(3)
    with tiermem.TierManager(device="cpu", hbm="2MiB", dram="16MiB") as tier:
        model = tier.wrap(build())
        pairs = []
        for part in ("layers", "extra"):
            cls = torch.optim.AdamW
            pairs.append(
                (
                    cls(getattr(plain, part).parameters(), lr=0.01),
                    tier.optimizer(getattr(model, part).parameters(), cls, lr=0.01, overlap=True),
                )
            )
        for number in range(3):
            for which in (plain, model):
                loss_of(which, number).backward()
            for first, second in pairs:
                first.step()
                second.step()
                first.zero_grad()
                second.zero_grad()
            if number == 1:
                pairs[0][0].add_param_group({"params": [plain.embed.weight], "lr": 0.1})
                pairs[0][1].add_param_group({"params": [model.embed.weight], "lr": 0.1})
        assert_same(dict(plain.state_dict()), dict(model.state_dict()), "weights")


def test_two_optimizers_over_the_same_parameters() -> None:
    """Both use the same gradients, which one of them clears once its step is made."""
    build = lambda: Net(torch.float32)  # noqa: E731
    seed(3)
    plain = build()
    seed(3)
    with tiermem.TierManager(device="cpu", hbm="2MiB", dram="16MiB") as tier:
        model = tier.wrap(build())
        cls = torch.optim.AdamW
        optimizers = (
            [cls(plain.parameters(), lr=rate) for rate in (0.01, 0.02)],
            [tier.optimizer(model, cls, lr=rate, overlap=True) for rate in (0.01, 0.02)],
        )
        for number in range(3):
            for which, steppers in zip((plain, model), optimizers, strict=True):
                loss_of(which, number).backward()
                for stepper in steppers:
                    stepper.step()
                which.zero_grad()
        assert_same(dict(plain.state_dict()), dict(model.state_dict()), "weights")


@pytest.mark.filterwarnings("ignore::UserWarning")  # dynamo looks at .grad of what is no leaf
@pytest.mark.parametrize("whole", [True, False])
def test_steps_inside_compiled_modules_are_not_compiled(whole: bool) -> None:
    def prepare(model: Any) -> None:
        for part in () if whole else model:
            part.compile(backend="eager")

    build = lambda: nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])  # noqa: E731
    settings = (torch.optim.AdamW, {"lr": 0.01, "overlap": True})
    roomy = Tiers("dram", extra_hbm=1 << 15)
    with Pair(build, roomy, settings, prepare=prepare) as pair:

        def use(model: nn.Module, optimizer: Any) -> Any:
            called = torch.compile(model, backend="eager") if whole else model
            losses = []
            for _ in range(3):
                loss = called(torch.randn(3, 16)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss)
            return losses

        pair.both(use)
        pair.finish()
    torch.compiler.reset()
