"""One parameter that is most of HBM, or more with its gradient and state: the bits of plain torch.

Budgets are drawn from what has to do to plenty; plain torch is the oracle.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_nn import asked_for, assert_same, check_table, seed
from torch import nn
from torch.nn import functional

import tiermem
from tiermem.optim.units.parted import PartedUnit

WIDTH = 32
PAGE = 4096


class Tied(nn.Module):
    """An embedding that is the head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2048, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = x[:, :3].abs().mul(1000).long() % 2048
        return functional.linear(self.inner(self.embed(ids)), self.embed.weight)


class Looked(Tied):
    """An embedding that is only looked up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.embed(x[:, :3].abs().mul(1000).long() % 2048))


class Wide(nn.Module):
    """A large matrix with a bias in the same block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, 2048)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(self.inner(x))


class Uneven(nn.Module):
    """Two large parameters and small ones in one block, the larger one last."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.up = nn.Parameter(torch.randn(1500, WIDTH) * 0.1)
        self.down = nn.Parameter(torch.randn(WIDTH, 2048) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(functional.linear(x * self.small, self.up))
        return inner[:, :WIDTH] @ self.down


class ByHand(nn.Module):
    """A parameter of the root, used by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2048, WIDTH) * 0.1)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.inner(x), self.weight)


class Convolved(nn.Module):
    """A large kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, 512, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.t()[None])


class Stacked(nn.Module):
    """Two parameters of ``[experts, ...]`` in one block, by batched products."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(8, WIDTH, 128) * 0.1)
        self.down = nn.Parameter(torch.randn(8, 128, WIDTH) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(torch.bmm(x.expand(8, -1, -1), self.up))
        return torch.bmm(inner, self.down).sum(0)


MODELS: list[Callable[[], nn.Module]] = [Tied, Looked, Wide, ByHand, Convolved, Stacked, Uneven]
SETTINGS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {}),
]


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(number))
    return model(x.to(next(model.parameters()).dtype)).float().square().mean()


class Pair:
    """A model resident, and the same one in the tiers, with default settings."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        case: Any,
        dtype: torch.dtype,
        hbm: int,
        masters: bool,
        tier: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        seed(3)
        self.plain = make().to(dtype)
        cls, options = case
        options = {"lr": 0.01, **options}
        self.params = list(self.plain.parameters())
        self.masters = [p.detach().float().requires_grad_() if masters else p for p in self.params]
        self.by_hand = cls(self.masters, **options)
        self.tier = tiermem.TierManager(device="cpu", hbm=hbm, dram="16MiB", **(tier or {}))
        try:
            self.model = self.tier.wrap(copy.deepcopy(self.plain))
            if masters:
                more["master_dtype"] = torch.float32
            self.optimizer: Any = self.tier.optimizer(self.model, cls, **options, **more)
        except BaseException:
            self.tier.close(discard=True)
            raise

    def backward(self, number: int) -> None:
        for model in (self.plain, self.model):
            loss_of(model, number).backward()

    def step(self, *, again: bool = False) -> None:
        """Steps both; one that was deferred, and has failed, is finished ``again``."""
        if again:
            self.optimizer.finish()
        else:
            self.optimizer.step()
        for param, master in zip(self.params, self.masters, strict=True):
            if master is not param:
                master.grad = None if param.grad is None else param.grad.float()
        self.by_hand.step()
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                param.copy_(master)

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)
        for param in self.params:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def check(self) -> None:
        assert_same(dict(self.plain.state_dict()), dict(self.model.state_dict()), "weights")
        mine = self.optimizer.state_dict()["state"]
        theirs = self.by_hand.state_dict()["state"]
        assert_same(theirs, {key: mine[key] for key in theirs}, "state")
        for param, twin in zip(self.params, self.model.parameters(), strict=True):
            assert (param.grad is None) == (twin.grad is None)
            if param.grad is not None and twin.grad is not None:
                assert_same(param.grad, twin.grad.clone(), "gradient")
        stats = self.tier.stats()
        assert stats.peak["hbm"] <= stats.budget["hbm"]
        check_table(self.tier)


@contextmanager
def pair(
    make: Callable[[], nn.Module],
    case: Any,
    dtype: torch.dtype,
    hbm: int,
    masters: bool,
    **more: Any,
) -> Iterator[Pair]:
    found = Pair(make, case, dtype, hbm, masters, **more)
    try:
        yield found
    finally:
        found.tier.close(discard=True)


def sizes_of(make: Callable[[], nn.Module], dtype: torch.dtype) -> tuple[int, int]:
    """Returns the bytes of all weights, and of the largest parameter."""
    sizes = [p.numel() * dtype.itemsize for p in make().parameters()]
    return sum(sizes), max(sizes)


KINDS = st.sampled_from([(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
"""Of weights, and whether there are masters."""


@settings(max_examples=examples(12, 400))
@given(
    make=st.sampled_from(MODELS),
    case=st.sampled_from(SETTINGS),
    kind=KINDS,
    share=st.floats(0, 1),
)
def test_weights_and_gradient_fit_and_the_state_does_not(
    make: Any, case: Any, kind: tuple[torch.dtype, bool], share: float
) -> None:
    dtype, masters = kind
    weights, largest = sizes_of(make, dtype)
    hbm = weights + largest + (12 + round(share * 400)) * PAGE
    with pair(make, case, dtype, hbm, masters) as twins:
        train(twins, 2)
        twins.check()


@settings(max_examples=examples(24, 800))
@given(
    make=st.sampled_from(MODELS),
    case=st.sampled_from(SETTINGS),
    kind=KINDS,
    share=st.floats(0, 1),
    micro=st.integers(1, 3),
    clip=st.sampled_from(["not", "by torch", "by the optimizer", "by value"]),
    keeps=st.booleans(),
    look=st.sampled_from(["not", "clone", "write", "view"]),
)
def test_weights_fit_and_the_gradient_does_not(
    make: Any,
    case: Any,
    kind: tuple[torch.dtype, bool],
    share: float,
    micro: int,
    clip: str,
    keeps: bool,
    look: str,
) -> None:
    """From next to no room beside the weights, to room for the gradient."""
    dtype, masters = kind
    weights, largest = sizes_of(make, dtype)
    hbm = weights + 20 * PAGE + round(share * largest / PAGE) * PAGE
    with pair(make, case, dtype, hbm, masters) as twins:
        for number in range(3):
            for each in range(micro):
                twins.backward(number * micro + each)
            if look != "not":
                look_at_gradients(twins, look)
            clip_both(twins, clip)
            twins.step()
            twins.zero_grad(set_to_none=not keeps)
        twins.check()


def look_at_gradients(twins: Pair, look: str) -> None:
    """Reads or writes every gradient of both, as users do."""
    for mine, theirs in zip(twins.model.parameters(), twins.params, strict=True):
        one, other = mine.grad, theirs.grad
        assert one is not None and other is not None
        assert_same(other, one.clone(), "gradient")
        if look == "write":
            for gradient in (one, other):
                gradient.mul_(0.5)
        elif look == "view":
            views = [gradient[0] for gradient in (one, other)]
            for view in views:
                view.zero_()


def clip_both(twins: Pair, how: str) -> None:
    models = (twins.plain, twins.model)
    if how == "by value":
        for model in models:
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    elif how == "by torch":
        norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.01) for model in models]
        assert_same(*norms, "norm")
    elif how == "by the optimizer":
        norm = nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.01)
        assert_same(norm, twins.optimizer.clip_grad_norm_(0.01), "norm")


def train(twins: Pair, steps: int) -> None:
    """Makes so many steps, each of a backward of its own."""
    for number in range(steps):
        twins.backward(number)
        twins.step()
        twins.zero_grad()


def parted(twins: Pair) -> PartedUnit:
    return max(
        (unit for unit in twins.optimizer._units if isinstance(unit, PartedUnit)),
        key=lambda unit: len(unit.parts),
    )


@settings(max_examples=examples(12, 400))
@given(
    make=st.sampled_from(MODELS),
    case=st.sampled_from(SETTINGS),
    kind=KINDS,
    shares=st.tuples(st.floats(0, 1), st.floats(0, 3)),
    saves=st.booleans(),
)
def test_a_state_dict_goes_on_in_another_budget(
    tmp_path_factory: pytest.TempPathFactory,
    make: Any,
    case: Any,
    kind: tuple[torch.dtype, bool],
    shares: tuple[float, float],
    saves: bool,
) -> None:
    """By ``state_dict()``, or by ``tier.save`` with a gradient there."""
    dtype, masters = kind
    weights, largest = sizes_of(make, dtype)
    path = tmp_path_factory.mktemp("saved") / "run"
    first, second = (weights + 20 * PAGE + round(s * largest / PAGE) * PAGE for s in shares)
    with pair(make, case, dtype, first, masters) as twins:
        train(twins, 2)
        if saves:
            twins.backward(2)
            twins.tier.save(path)
        kept = copy.deepcopy(twins.plain), copy.deepcopy(twins.optimizer.state_dict())
        plain = twins.plain, twins.params, twins.masters, twins.by_hand
    with pair(make, case, dtype, second, masters) as twins:
        twins.plain, twins.params, twins.masters, twins.by_hand = plain
        if saves:
            twins.tier.load(path)
        else:
            twins.model.load_state_dict(kept[0].state_dict())
            twins.optimizer.load_state_dict(kept[1])
            twins.backward(2)
        twins.check()
        twins.step()
        twins.zero_grad()
        twins.check()


class Fails(Exception):
    """Of a test."""


@settings(max_examples=examples(16, 400))
@given(
    make=st.sampled_from(MODELS),
    case=st.sampled_from(SETTINGS),
    kind=KINDS,
    share=st.floats(0, 1),
    where=st.floats(0, 0.99),
    how=st.sampled_from(["unreadable", "raises", "abandoned"]),
    overlap=st.sampled_from([False, "auto", "forward"]),
)
def test_a_step_that_fails_between_parts_goes_on_there(
    make: Any,
    case: Any,
    kind: tuple[torch.dtype, bool],
    share: float,
    where: float,
    how: str,
    overlap: Any,
) -> None:
    dtype, masters = kind
    weights, largest = sizes_of(make, dtype)
    hbm = weights + 20 * PAGE + round(share * 0.8 * largest / PAGE) * PAGE
    with pair(make, case, dtype, hbm, masters, overlap=overlap) as twins:
        twins.backward(0)
        twins.step()
        twins.optimizer.finish()
        twins.zero_grad()
        unit = parted(twins)
        part = unit.parts[int(where * len(unit.parts))]
        twins.backward(1)
        weight = dict(twins.model.state_dict())
        plain = part.unit.plain.optimizer_for(twins.optimizer.param_groups)
        if how == "raises":
            handle = plain.register_step_post_hook(raise_it)
        else:
            part.unit.held = unreadable  # type: ignore[method-assign]
        with pytest.raises((Fails, tiermem.StorageError)):
            twins.optimizer.step()
            twins.optimizer.finish()
        check_table(twins.tier)
        if how == "raises":
            handle.remove()
        else:
            del part.unit.held
        if how == "abandoned":
            twins.optimizer.abandon_step()
            twins.optimizer.zero_grad()
            assert weight.keys() == dict(twins.model.state_dict()).keys()
            return
        if not overlap:
            with pytest.raises(tiermem.StepError, match="unfinished"):
                twins.optimizer.zero_grad()
        twins.step(again=bool(overlap))
        twins.zero_grad()
        twins.check()
        twins.backward(2)
        twins.step()
        twins.check()


def raise_it(*_: object) -> None:
    raise Fails


def unreadable(*_: object, **__: object) -> Any:
    raise tiermem.StorageError("cannot read", block="state", path="swap")


@settings(max_examples=examples(8, 200))
@given(make=st.sampled_from(MODELS), where=st.floats(0, 0.99), second=st.booleans())
def test_a_backward_that_fails_between_runs_is_made_again(
    make: Any, where: float, second: bool
) -> None:
    """As with any backward: the gradients are cleared and it is repeated."""
    weights, _ = sizes_of(make, torch.float32)
    with pair(make, SETTINGS[0], torch.float32, weights + 30 * PAGE, False) as twins:
        unit = parted(twins).entries[0].unit
        assert unit is not None and len(unit.runs) > 1
        broken = unit.runs[int(where * len(unit.runs))]
        if second:
            loss_of(twins.model, 0).backward()
        grads = twins.tier._runtime.grads
        with pytest.MonkeyPatch.context() as patch:
            real = grads.open

            def opened(one: Any) -> Any:
                if one is broken:
                    unreadable()
                return real(one)

            patch.setattr(grads, "open", opened)
            with pytest.raises(tiermem.StorageError):
                loss_of(twins.model, 1).backward()
        twins.optimizer.zero_grad()
        train(twins, 2)
        twins.check()


def test_a_class_that_may_do_anything_is_refused_before_anything_moves() -> None:
    class Own(torch.optim.AdamW):
        """May look at the gradient as a whole."""

    weights, largest = sizes_of(Tied, torch.float32)
    tier = tiermem.TierManager(device="cpu", hbm=weights + 20 * PAGE, dram="16MiB")
    with tier:
        seed(3)
        plain = Tied()
        model = tier.wrap(copy.deepcopy(plain))
        with pytest.raises(tiermem.CapacityError, match="hbm= at least") as caught:
            tier.optimizer(model, Own, lr=0.01)
        assert "embed.weight" in str(caught.value) and "tier hbm" in str(caught.value)
        least = asked_for(caught.value)["hbm"]
        assert least >= 4 * largest
        assert_same(dict(plain.state_dict()), dict(model.state_dict()), "weights")
        optimizer = tier.optimizer(model, torch.optim.AdamW, lr=0.01)  # nothing is left of it
        loss_of(model, 0).backward()
        optimizer.step()
    for make in (Tied, Wide, Stacked):
        with pair(make, (Own, {}), torch.float32, need_of(make, Own), False) as twins:
            train(twins, 2)
            twins.check()


def need_of(make: Any, cls: Any, hbm: int = PAGE) -> int:
    """Returns the HBM that errors ask for, from the first one on."""
    for _ in range(4):
        try:
            Pair(make, (cls, {}), torch.float32, hbm, False).tier.close(discard=True)
            return hbm
        except tiermem.CapacityError as error:
            hbm = asked_for(error)["hbm"]
    raise AssertionError(hbm)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.one_in(3)
def test_what_errors_ask_for_does(make: Any, cls: Any) -> None:
    weights, _ = sizes_of(make, torch.float32)
    hbm = need_of(make, cls)
    assert hbm <= weights + 30 * PAGE
    with pair(make, (cls, {}), torch.float32, hbm, False) as twins:
        train(twins, 2)
        twins.check()


def test_two_optimizers_of_one_parameter() -> None:
    """The second keeps gradients in another dtype, so in other runs, or needs them whole."""
    weights, _ = sizes_of(Tied, torch.bfloat16)
    hbm = weights + 36 * PAGE
    with pair(Tied, SETTINGS[0], torch.bfloat16, hbm, True) as twins:
        runs = [(run.begin, run.end) for run in parted(twins).entries[0].unit.runs]
        other = twins.tier.optimizer(twins.model, torch.optim.SGD, lr=0.0, grad_dtype=torch.float32)
        assert runs != [(run.begin, run.end) for run in parted(twins).entries[0].unit.runs]
        for number in range(2):
            twins.backward(number)
            twins.step()
            other.step()
            twins.zero_grad()
        twins.check()


def test_a_model_comes_back_with_a_gradient_in_runs() -> None:
    weights, _ = sizes_of(Tied, torch.float32)
    for leave in ("unwrap", "close"):
        with pair(Tied, SETTINGS[0], torch.float32, weights + 20 * PAGE, False) as twins:
            twins.backward(0)
            clip_both(twins, "by torch")
            if leave == "unwrap":
                twins.tier.unwrap(twins.model)
            else:
                twins.tier.close()
            for mine, theirs in zip(twins.model.parameters(), twins.params, strict=True):
                assert type(mine.grad) is torch.Tensor
                assert_same(theirs.grad, mine.grad, "gradient")
                assert_same(theirs, mine, "weight")


@pytest.mark.parametrize("make", [Tied, Looked])
@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.parametrize(
    ("dtype", "masters"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
@pytest.mark.one_in(2)
def test_embeddings_that_do_not_fit_are_trained_where_they_lie(
    make: Any, case: Any, dtype: torch.dtype, masters: bool
) -> None:
    _, largest = sizes_of(make, dtype)
    with pair(make, case, dtype, largest // 2, masters) as twins:
        for number in range(3):
            twins.backward(number)
            if number == 1:
                twins.backward(number + 7)
                clip_both(twins, "by torch")
            twins.step()
            twins.zero_grad()
            twins.check()
        twins.tier.unwrap(twins.model)
        assert_same(twins.plain.state_dict(), twins.model.state_dict(), "weights")


@pytest.mark.parametrize("make", [make for make in MODELS if make not in (Tied, Looked)])
def test_weights_that_do_not_fit_are_refused_by_name(make: Any) -> None:
    """Before anything has moved; what is asked for does."""
    seed(3)
    model = make()
    before = copy.deepcopy(model.state_dict())
    weights, largest = sizes_of(make, torch.float32)
    with (
        tiermem.TierManager(device="cpu", hbm=largest // 2, dram="16MiB") as tier,
        pytest.raises(tiermem.CapacityError, match="in HBM as a whole") as caught,
    ):
        tier.wrap(model)
    said = str(caught.value)
    assert "tier hbm" in said
    name = max(dict(model.named_parameters()).items(), key=lambda found: found[1].nbytes)[0]
    assert repr(name) in said
    assert_same(before, model.state_dict(), "weights")
    least = asked_for(caught.value)["hbm"]
    assert weights - 16 * PAGE <= least <= weights + 30 * PAGE
    with pair(make, SETTINGS[0], torch.float32, least, False) as twins:
        twins.backward(0)
        twins.step()
        twins.zero_grad()
        twins.check()


def test_gradients_of_a_scaled_loss_are_unscaled_in_runs() -> None:
    """torch's fused kernels undo a loss scale in the gradients themselves."""
    weights, _ = sizes_of(Tied, torch.float32)
    with pair(Tied, SETTINGS[1], torch.float32, weights + 24 * PAGE, False) as twins:
        scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
        for number in range(3):
            sides = ((twins.plain, twins.by_hand), (twins.model, twins.optimizer))
            for scaler, (model, optimizer) in zip(scalers, sides, strict=True):
                scaler.scale(loss_of(model, number)).backward()
                if number == 1:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            twins.check()
            twins.zero_grad()


@pytest.mark.parametrize("overlap", ["auto", "forward", "backward"])
def test_steps_at_any_time(overlap: str) -> None:
    weights, _ = sizes_of(Looked, torch.bfloat16)
    hbm = weights + 28 * PAGE
    with pair(Looked, SETTINGS[0], torch.bfloat16, hbm, True, overlap=overlap) as twins:
        assert parted(twins).entries[0].unit.runs
        train(twins, 5)
        twins.check()


def test_homes_in_files(tmp_path: Path) -> None:
    """Runs of the gradient, masters and state are written to a disk and read again."""
    weights, _ = sizes_of(Wide, torch.bfloat16)
    nvme = {"nvme": str(tmp_path), "nvme_bytes": "8MiB"}
    nvme |= {"policy": dict.fromkeys(("grads", "master", "optimizer", "params"), "nvme")}
    with pair(Wide, SETTINGS[0], torch.bfloat16, weights + 28 * PAGE, True, tier=nvme) as twins:
        assert parted(twins).entries[0].unit.runs
        for number in range(3):
            twins.backward(2 * number)
            twins.backward(2 * number + 1)
            clip_both(twins, "by torch")
            twins.step()
            twins.zero_grad(set_to_none=number == 1)
        twins.check()
