"""Steps inside backward: the same bits, or a refusal that comes in time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support_nn import Tiers, assert_same
from support_optim import (
    Net,
    Twins,
    loss_of,
    made,
    stop_in_backward,
    two_groups,
    units,
    watched,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem.core.block import Role

DRAM = Tiers("dram")
SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})


def twins(build: Callable[[], nn.Module] = Net, tiers: Tiers = DRAM, *a: Any, **o: Any) -> Twins:
    return Twins(build, tiers, *a, overlap="backward", **o)


def tried(*arguments: Any, **options: Any) -> Twins:
    """The first steps are made, which are only watched."""
    return watched(twins(*arguments, **options))


class Recomputed(Net):
    """Each layer is recomputed; the embedding's rows are used again, detached, in the middle."""

    reentrant = False
    detached = False

    def forward(self, ids: torch.Tensor, use_extra: bool = True) -> torch.Tensor:
        x = self.embed(ids)
        if self.detached:
            x = nn.functional.linear(x, self.extra.weight.detach())
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        if use_extra:
            x = self.extra(x)
        return nn.functional.linear(x, self.embed.weight)


def with_attributes(**attributes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Recomputed()
        for name, value in attributes.items():
            setattr(model, name, value)
        return model

    return build


def test_every_block_is_stepped_in_backward_from_the_third_step_on() -> None:
    with tried() as pair:
        for step in range(1, 5):
            pair.backward(step)
            assert made(pair) == units(pair)
            pair.step()
            assert made(pair) == 0
            pair.check()
        assert pair.optimizer.stepped_in_backward == 4 * units(pair)


@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_gradients_do_not_leave_hbm(overlap: str) -> None:
    """All that goes down is weights, masters and state; the bytes of gradients would be more."""
    tiers = Tiers("dram", extra_hbm=1 << 17)
    build = lambda: Net(layers=8)  # noqa: E731
    with Twins(build, tiers, overlap=overlap) as pair:
        assert pair.tier._manager.parts.table.hbm.capacity < sum(
            row.nbytes for row in pair.tier.residency()
        )
        written = []
        drain = pair.tier._manager.parts.transfers.drain

        def spy(record: Any) -> None:
            written.append(record.block.role)
            drain(record)

        for step in range(5):
            pair.backward(step)
            if step == 2:
                pair.tier._manager.parts.transfers.drain = spy
            pair.step()
        pair.check()
        assert Role.OPTIMIZER in written
        assert (Role.GRAD in written) == (overlap == "forward")


def test_rates_are_those_of_the_step() -> None:
    chosen = (torch.optim.AdamW, {"lr": 0.01, "foreach": False})
    for given in (0.01, torch.tensor(0.01)):
        settings = {**chosen[1], "lr": given}
        with twins(Net, DRAM, chosen[0], settings, groups=two_groups) as pair:
            rates = [
                torch.optim.lr_scheduler.CosineAnnealingLR(o, 5)
                for o in (pair.by_hand.optimizer, pair.optimizer)
            ]
            for step in range(5):
                pair.backward(step)
                pair.step()
                for rate in rates:
                    rate.step()
                pair.check()
            assert pair.optimizer.stepped_in_backward


def test_accumulation_that_is_announced() -> None:
    with twins(grad_dtype=torch.float32) as pair:
        pair.optimizer.accumulate(3)
        number = 0
        for step in range(5):
            if step == 4:  # a last step of fewer
                pair.optimizer.accumulate(2)
            for part in range(3 if step < 4 else 2):
                pair.backward(number)
                number += 1
                last = part == (2 if step < 4 else 1)
                assert made(pair) == (units(pair) if last and step > 1 else 0)
            pair.step()
            pair.check()
        pair.backward(number)  # one, where two were said: stepped like any other
        assert made(pair) == 0
        pair.step()
        pair.check()


@pytest.mark.parametrize("overlap", ["auto", False, "backward"])
@pytest.mark.parametrize("micro_batches", [0, -1, 1.5, True, "2"])
def test_numbers_of_backwards_that_cannot_be(micro_batches: Any, overlap: Any) -> None:
    with Twins(Net, DRAM, overlap=overlap) as pair:
        with pytest.raises(tiermem.ConfigError, match="accumulate"):
            pair.optimizer.accumulate(micro_batches)


@pytest.mark.parametrize("first", [True, False])
def test_a_second_backward_is_refused_before_anything_of_it_counts(first: bool) -> None:
    with twins() if first else tried() as pair:
        pair.backward(1)
        before = made(pair)
        losses = None
        if first:
            losses = loss_of(pair.model, 2)
        else:
            with pytest.raises(tiermem.StepError, match=r"optimizer\.step\(\) first"):
                loss_of(pair.model, 2)
        if losses is not None:
            with pytest.raises(tiermem.StepError, match=r"accumulate\(n\)"):
                losses.backward()
        assert made(pair) == before
        pair.step()
        pair.check()


def test_a_second_backward_of_an_earlier_forward_is_refused() -> None:
    with tried() as pair:
        losses = [loss_of(pair.model, 1), loss_of(pair.model, 2)]
        loss_of(pair.plain, 1).backward()
        losses[0].backward()
        assert made(pair) == units(pair)
        with pytest.raises(tiermem.StepError, match=r"again before|another gradient"):
            losses[1].backward()
        pair.step()
        pair.check()


def _clip(pair: Twins) -> None:
    pair.optimizer.clip_grad_norm_(1.0)


def _clamp(pair: Twins) -> None:
    pair.optimizer.clip_grad_value_(1.0)


def _scaled(pair: Twins) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(pair.optimizer)


def _unscaled(pair: Twins) -> None:
    for param in pair.model.parameters():
        param.grad.mul_(0.5)  # what unscale_ does
    pair.optimizer.step()


def _new_rate(pair: Twins) -> None:
    pair.optimizer.param_groups[0]["lr"] = 0.5
    pair.optimizer.step()


def _own_gradient(pair: Twins) -> None:
    dict(pair.model.named_parameters())["extra.bias"].grad = torch.ones(24, dtype=torch.bfloat16)
    pair.optimizer.step()


def _no_gradient(pair: Twins) -> None:
    dict(pair.model.named_parameters())["extra.bias"].grad = None
    pair.optimizer.step()


REFUSED = (_clip, _clamp, _scaled, _unscaled, _new_rate, _own_gradient, _no_gradient)


@pytest.mark.parametrize("what", REFUSED)
def test_loops_that_cannot_be_are_refused_before_anything_is_stepped(what: Any) -> None:
    with twins() as pair:
        pair.backward(0)
        with pytest.raises(tiermem.StepError, match="overlap='forward'"):
            what(pair)
        assert_same(dict(pair.plain.state_dict()), dict(pair.model.state_dict()), "weights")
        assert not pair.optimizer.state_dict()["state"]


@pytest.mark.parametrize("clip", [_clip, _clamp])
def test_who_clips_is_told_of_the_default(clip: Any) -> None:
    said = "overlap='auto', the default, or overlap='forward' to clip"
    with twins() as pair:
        pair.backward(0)
        with pytest.raises(tiermem.StepError, match=said):
            clip(pair)
    with Twins(Net, DRAM, overlap="auto") as pair:
        pair.backward(0)
        pair.clip_norm(0.1) if clip is _clip else pair.clip_value(0.001)
        pair.step()


LATER: dict[str, Callable[[Twins], Any]] = {
    **{what.__name__: what for what in REFUSED},
    "zero_grad": lambda p: p.optimizer.zero_grad(),
    "read": lambda p: next(p.model.parameters()).grad.norm(),
    "torch's clipping": lambda p: nn.utils.clip_grad_norm_(p.model.parameters(), 1.0),
    "state_dict": lambda p: p.optimizer.state_dict(),
    "load_state_dict": lambda p: p.optimizer.load_state_dict({}),
    "state": lambda p: p.optimizer.state,
    "accumulate": lambda p: p.optimizer.accumulate(2),
    "group": lambda p: p.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    "weight": lambda p: p.model.extra.weight.sum(),
    "weights": lambda p: p.model.state_dict(),
    "write": lambda p: p.model.extra.weight.data.zero_(),
    "evaluation": lambda p: loss_of(p.model.eval(), 5),
    "materialize": lambda p: p.tier.materialize(p.model).__enter__(),
    "unwrap": lambda p: p.tier.unwrap(p.model),
}


@pytest.mark.parametrize("what", sorted(LATER))
@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.one_in(3)
def test_what_cannot_be_seen_between_backward_and_step_is_refused(what: str, where: str) -> None:
    """No byte is shown that the plain loop would not show; then the step can be finished."""
    chosen = (torch.optim.AdamW, {"lr": 0.01, "foreach": False})
    with tried(Net, DRAM, *chosen, where=where) as pair:
        pair.backward(1)
        assert made(pair) == units(pair)
        with pytest.raises(tiermem.StepError, match="overlap='forward'"):
            LATER[what](pair)
        if what in ("_new_rate", "_own_gradient", "_no_gradient"):
            with pytest.raises(tiermem.StepError, match="units are stepped already"):
                pair.optimizer.step()
            return
        pair.model.train()
        pair.step()
        pair.check()
        pair.backward(2)
        pair.step()
        pair.check()


def test_gradients_that_are_gone_cannot_be_used_twice() -> None:
    with tried() as pair:
        pair.backward(1)
        pair.by_hand.step()
        pair.optimizer.step()
        assert pair.model.extra.weight.grad.shape == (24, 24)
        with pytest.raises(tiermem.StepError, match="used up"):
            pair.optimizer.step()
        with pytest.raises(tiermem.StepError, match="zero_grad"):
            loss_of(pair.model, 2).backward()
        assert_same(dict(pair.plain.state_dict()), dict(pair.model.state_dict()), "weights")
        for loop in (pair.by_hand, pair.optimizer):
            loop.zero_grad()
        pair.backward(2)
        pair.step()
        pair.check()


@pytest.mark.parametrize("how", ["materialize", "unwrap"])
def test_a_model_taken_out_without_its_gradients(how: str) -> None:
    """What was used up stays a stand-in, or is no gradient any more."""
    with tried() as pair:
        pair.backward(1)
        pair.by_hand.step()
        pair.optimizer.step()
        if how == "materialize":
            with pair.tier.materialize(pair.model):
                assert_same(list(pair.plain.parameters()), list(pair.model.parameters()), "inside")
            with pytest.raises(tiermem.StepError, match="used up"):
                pair.model.extra.weight.grad.sum()
            pair.by_hand.zero_grad()
            pair.optimizer.zero_grad()
            pair.backward(2)
            pair.step()
            pair.check()
        else:
            pair.tier.unwrap(pair.model)
            assert_same(list(pair.plain.parameters()), list(pair.model.parameters()), "after it")
            assert all(p.grad is None for p in pair.model.parameters())


def test_gradients_set_to_zero() -> None:
    """Zeros are gradients: what has no other one in the next step is stepped with them."""
    with tried(Net, DRAM, *SGD, master_dtype=None) as pair:
        for number in range(1, 4):
            pair.backward(number, use_extra=number != 2)
            pair.by_hand.step()
            pair.optimizer.step()
            pair.by_hand.optimizer.zero_grad(set_to_none=False)
            pair.optimizer.zero_grad(set_to_none=False)
            pair.check()
        assert pair.optimizer.stepped_in_backward


def test_gradients_cleared_by_hand() -> None:
    clear: list[Callable[[nn.Module], Any]] = [
        lambda m: m.zero_grad(),
        lambda m: [setattr(p, "grad", None) for p in m.parameters()],
    ]
    with tried() as pair:
        for number in range(1, 5):
            pair.backward(number)
            assert made(pair) == units(pair)
            pair.by_hand.step()
            pair.optimizer.step()
            pair.by_hand.zero_grad()
            clear[number % 2](pair.model)
            pair.check()


def test_parameters_without_gradient_and_frozen_parts() -> None:
    def build() -> nn.Module:
        model = Net()
        model.layers[1].requires_grad_(False)
        return model

    with tried(build) as pair:
        for number in range(1, 5):
            pair.backward(number, use_extra=number % 2 == 0)
            assert made(pair) == units(pair) - number % 2
            pair.step()
            pair.check()


@pytest.mark.parametrize("frozen", [["norm.weight", "norm.bias"], ["norm.weight", "up.bias"]])
def test_parts_of_a_block_that_are_frozen_later(frozen: list[str]) -> None:
    """What was its last gradient comes no more, and its weights are used after the one before."""
    with tried() as pair:
        before = pair.optimizer.stepped_in_backward
        for requires_grad in (False, True):
            for model in (pair.plain, pair.model):
                for name in frozen:
                    model.layers[1].get_parameter(name).requires_grad_(requires_grad)
            for number in range(1, 5):
                pair.backward(number)
                pair.step()
                pair.check()
        assert pair.optimizer.stepped_in_backward > before


def test_recomputation() -> None:
    with tried(with_attributes()) as pair:
        for number in range(1, 4):
            pair.backward(number)
            assert made(pair) == units(pair)
            pair.step()
            pair.check()


def test_a_backward_inside_backward_leaves_its_blocks_to_the_step() -> None:
    """The gradients of reentrant checkpoints come in parts; the rest is stepped in backward."""
    with tried(with_attributes(reentrant=True)) as pair:
        for number in range(1, 4):
            pair.backward(number)
            assert 0 < made(pair) < units(pair)
            pair.step()
            pair.check()


def test_a_layer_used_in_a_backward_inside_backward_and_outside() -> None:
    class Both(Net):
        def forward(self, ids: torch.Tensor, use_extra: bool = True) -> torch.Tensor:
            x = self.embed(ids)
            x = checkpoint(self.layers[1], x, use_reentrant=True)
            x = self.layers[2](self.layers[1](self.layers[0](x)))
            return nn.functional.linear(self.extra(x), self.embed.weight)

    with tried(Both) as pair:
        for number in range(1, 4):
            pair.backward(number)
            assert 0 < made(pair) < units(pair)
            pair.step()
            pair.check()


def test_checkpoints_that_become_reentrant() -> None:
    """What was learned of a loop does not hold any more: refused, and nothing is wrong."""
    with tried(with_attributes()) as pair:
        pair.backward(1)
        pair.step()
        for model in (pair.plain, pair.model):
            model.reentrant = True
        pair.backward(2)  # all blocks in checkpoints are left to the step
        assert 0 < made(pair) < units(pair)
        pair.step()
        pair.check()


def test_weights_that_are_used_again_after_their_gradient() -> None:
    """Detached: its gradient is final before backward is done with the weight itself."""
    with tried(with_attributes(detached=True)) as pair:
        assert pair.optimizer._timing.inside._late
        for number in range(1, 4):
            pair.backward(number)
            assert 0 < made(pair) < units(pair)
            pair.step()
            pair.check()


def test_weights_that_come_to_be_used_again_after_their_gradient() -> None:
    with tried(with_attributes()) as pair:
        pair.model.detached = True
        loss = loss_of(pair.model, 1)
        with pytest.raises(tiermem.StepError, match=r"extra.*used again"):
            loss.backward()


def test_a_block_of_several_units() -> None:
    with tried(lambda: Net(layers=2), blocks=[]) as pair:
        assert units(pair) > 1
        for number in range(1, 4):
            pair.backward(number)
            assert made(pair) == units(pair)
            pair.step()
            pair.check()


def test_views_that_are_kept_are_stepped_by_the_step() -> None:
    roomy = Tiers("dram", extra_hbm=1 << 16)
    with tried(Net, roomy, *SGD, master_dtype=None) as pair:
        views = [m.layers[0].up.weight.data for m in (pair.plain, pair.model)]
        pair.backward(1)
        assert 0 < made(pair) < units(pair)
        assert_same(views[0], views[1], "before the step")
        pair.step()
        assert_same(views[0], views[1], "after it")
        del views
        pair.check()


def test_gradients_asked_for_without_accumulation() -> None:
    with tried() as pair:
        for number in range(1, 4):
            found = []
            for model in (pair.plain, pair.model):
                params = [p for p in model.parameters() if p.requires_grad]
                found.append(torch.autograd.grad(loss_of(model, 50 + number), params))
            assert_same(found[0], found[1], "gradients")
            assert made(pair) == 0
            pair.backward(number)
            assert made(pair) == units(pair)
            pair.by_hand.step()
            pair.optimizer.step()
            for model in (pair.plain, pair.model):
                params = list(model.parameters())
                torch.autograd.grad(loss_of(model, 60), params)
            pair.by_hand.zero_grad()
            pair.optimizer.zero_grad()
            pair.check()


def test_two_optimizers_and_gradients_that_are_thrown_away() -> None:
    """As in adversarial training: one loss leaves gradients that only zero_grad looks at."""
    torch.manual_seed(1)
    plain = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)]
    with tiermem.TierManager(device="cpu", hbm="64KiB", dram="16MiB") as tier:
        tiered = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)]
        for one, other in zip(tiered, plain, strict=True):
            one.load_state_dict(other.state_dict())
            tier.wrap(one)

        def train(models: Any, optimizers: Any) -> list[torch.Tensor]:
            losses = []
            for number in range(4):
                x = torch.full((2, 8), 0.1 * number)
                for which in (0, 1):
                    made_up = models[0](x)
                    loss = (models[1](made_up) * (1 - 2 * which)).square().mean()
                    optimizers[which].zero_grad()
                    loss.backward()
                    optimizers[which].step()
                    losses.append(loss.detach())
            return losses

        cls = torch.optim.AdamW
        first = train(plain, [cls(m.parameters(), lr=0.1) for m in plain])
        second = train(tiered, [tier.optimizer(m, cls, lr=0.1, overlap="backward") for m in tiered])
        assert_same(first, second, "losses")


def test_two_optimizers_over_the_same_parameters() -> None:
    """One after the other, and one beside the other: no gradient is used up that both want."""
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    with tiermem.TierManager(device="cpu", hbm="64KiB", dram="16MiB") as tier:
        tiered = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        tiered.load_state_dict(plain.state_dict())
        tier.wrap(tiered)
        x = torch.linspace(-1, 1, 16).reshape(2, 8)

        def train(model: nn.Module, *optimizers: Any) -> list[torch.Tensor]:
            losses = []
            for _ in range(4):
                loss = model(x).square().mean()
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
                model.zero_grad()
                losses.append(loss.detach())
            return losses

        def make(rate: float) -> tuple[Any, Any]:
            chosen = {"lr": rate, "momentum": 0.9}
            return torch.optim.SGD(plain.parameters(), **chosen), tier.optimizer(
                tiered, torch.optim.SGD, overlap="backward", **chosen
            )

        first = make(0.1)
        assert_same(train(plain, first[0]), train(tiered, first[1]), "the first")
        assert first[1].stepped_in_backward
        second = make(0.2)
        assert_same(train(plain, second[0]), train(tiered, second[1]), "the second")
        assert second[1].stepped_in_backward
        before = first[1].stepped_in_backward
        for model in (plain, tiered):
            model(x).square().mean().backward()
        second[0].step()
        second[1].step()
        with pytest.raises(tiermem.StepError, match="used up"):
            first[1].step()  # the second has used the gradient
        assert_same(dict(plain.state_dict()), dict(tiered.state_dict()), "weights")
        for model in (plain, tiered):
            model.zero_grad()
        assert before == first[1].stepped_in_backward
        third, fourth = make(0.3), make(0.4)
        losses = [train(plain, third[0], fourth[0]), train(tiered, third[1], fourth[1])]
        assert_same(losses[0], losses[1], "both")
        assert not third[1].stepped_in_backward and not fourth[1].stepped_in_backward


def test_closures() -> None:
    with tried() as pair:
        for number in (1, 2):

            def closure(number: int = number) -> torch.Tensor:
                pair.optimizer.zero_grad()
                loss = loss_of(pair.model, number)
                loss.backward()
                return loss

            pair.by_hand.zero_grad()
            plain = loss_of(pair.plain, number)
            plain.backward()
            assert_same(plain.detach(), pair.optimizer.step(closure).detach(), "loss")
            pair.by_hand.step()
            pair.check()


def test_an_exception_in_the_middle_of_backward() -> None:
    """Blocks that were stepped are new, the others old, and ``step()`` goes on from there."""
    with tried() as pair:
        before = {n: p.detach().clone() for n, p in pair.model.named_parameters()}
        stop_in_backward(pair, 1)
        with pytest.raises(tiermem.StepError, match="zero_grad"):
            pair.optimizer.zero_grad()
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        changed = {
            n for n, p in pair.model.named_parameters() if not torch.equal(p.detach(), before[n])
        }
        assert "extra.weight" in changed
        assert "layers.0.up.weight" not in changed and "embed.weight" not in changed
        loss_of(pair.model, 2).backward()
        pair.optimizer.step()


class Broken:
    """Makes the steps of one unit fail as a disk does, inside ``with``."""

    def __init__(self, unit: Any, path: Path) -> None:
        self.error = tiermem.StorageError("cannot read", block="state", path=str(path))
        self.unit = unit
        self.real = type(unit).held

    def __enter__(self) -> None:
        def held(unit: Any, runtime: Any, **options: Any) -> Any:
            if unit is self.unit:
                raise self.error
            return self.real(unit, runtime, **options)

        type(self.unit).held = held

    def __exit__(self, *error: object) -> None:
        type(self.unit).held = self.real


@pytest.mark.parametrize("passes", [True, False])
def test_a_disk_that_fails_inside_backward(tmp_path: Path, passes: bool) -> None:
    """The block stays as it was, its gradient is kept, and ``step()`` tries again."""
    nvme = Tiers("nvme", nvme=str(tmp_path), policy="nvme")
    with tried(Net, nvme) as pair:
        pair.check()  # what the first step left to the next forward is made as well
        broken = pair.optimizer._units[1]
        with Broken(broken, tmp_path):
            pair.backward(1)
            assert made(pair) == units(pair) - 1
            if not passes:
                with pytest.raises(tiermem.StorageError) as caught:
                    pair.optimizer.step()
                    pair.optimizer.finish()
                assert f"{units(pair) - 1} of {units(pair)} units" in str(caught.value)
                assert repr(broken.name) in str(caught.value)
        if passes:
            pair.step()
        else:
            pair.optimizer.finish()
            pair.by_hand.step()
            pair.by_hand.zero_grad()
            pair.optimizer.zero_grad()
        pair.check()
        pair.backward(2)
        assert made(pair) == units(pair)
        pair.step()
        pair.check()


def test_other_spellings_are_refused() -> None:
    with pytest.raises(tiermem.ConfigError, match="overlap='later'"):
        Twins(Net, DRAM, overlap="later")
    for overlap in (True, "forward"):
        with Twins(Net, DRAM, overlap=overlap) as pair:
            pair.optimizer.accumulate(2)  # says nothing to it
            pair.backward(0)
            pair.step()
            assert len(pair.optimizer._units.owed) == units(pair)
            pair.check()
