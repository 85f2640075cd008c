"""Runs a resident model and its tiered twin side by side and compares every bit."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

import tiermem
from tiermem.nn.groups.need import _refusal as refusal
from tiermem.nn.groups.need import check_gradients

Build = Callable[[], nn.Module]
Settings = tuple[type[torch.optim.Optimizer], dict[str, Any]]
_TIERED_ONLY = ("overlap", "where")
_ASKED = re.compile(r"\b(hbm|dram|nvme_bytes)= at least [^()]*\((\d+) bytes\)")
_ALONE = re.compile(r"Forward alone, .* would do with (hbm|dram)=[^()]*\((\d+) bytes\)")


def seed(number: int) -> None:
    """Seeds every generator a model may draw from."""
    if torch.cuda.is_available():
        torch.manual_seed(number)
    else:  # the other puts a formatted stack in a queue for a GPU that never comes: 5 ms
        torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Makes another dtype the default one, as scripts do."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def assert_trained_alike(
    model: nn.Module, mine: Any, plain: nn.Module, theirs: torch.optim.Optimizer, width: int
) -> None:
    """Trains a model in the tiers and a plain one in four steps, and compares every bit.

    Args:
        model: The one in the tiers.
        mine: Its optimizer.
        plain: The same, resident.
        theirs: Its optimizer.
        width: Of the inputs, (3, width).
    """
    for step in range(4):
        x = torch.randn(3, width, generator=torch.Generator().manual_seed(step))
        losses = []
        for one in (model, plain):
            losses.append(one(x).square().mean())
            losses[-1].backward()
        mine.clip_grad_norm_(1.0)
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert same_bits(*[loss.detach() for loss in losses])
    state = plain.state_dict()
    assert all(same_bits(value, state[name]) for name, value in model.state_dict().items())


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors agree in shape, dtype and every bit."""
    if first.layout is not torch.strided or second.layout is not torch.strided:
        if first.layout is not second.layout:
            return False
        if first.layout is torch.sparse_coo:
            a, b = first.detach().coalesce(), second.detach().coalesce()
            return same_bits(a.indices(), b.indices()) and same_bits(a.values(), b.values())
        first, second = first.to_dense(), second.to_dense()
    if first.shape != second.shape or first.dtype is not second.dtype:
        return False
    return torch.equal(_bits(first), _bits(second))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    flat = torch.empty(plain.shape, dtype=plain.dtype).copy_(plain)
    return flat.reshape(-1).view(torch.uint8)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every tensor and number in a nest of containers, with its path."""
    if isinstance(value, Mapping):
        for key in value:
            yield from leaves(value[key], f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    elif isinstance(value, torch.Tensor | int | float | str | bool | None):
        yield path, value
    elif hasattr(value, "__dict__"):
        yield from leaves(vars(value), f"{path}.")


def assert_same(first: Any, second: Any, what: str) -> None:
    """Fails where two nests of tensors differ in any bit."""
    mine, theirs = list(leaves(first)), list(leaves(second))
    paths = [p for p, _ in mine], [p for p, _ in theirs]
    assert paths[0] == paths[1], f"{what}: other structure {set(paths[0]) ^ set(paths[1])}"
    for (path, a), (_, b) in zip(mine, theirs, strict=True):
        if isinstance(a, torch.Tensor):
            assert isinstance(b, torch.Tensor), f"{what}{path}: {type(b)}"
            assert same_bits(a, b), f"{what}{path} differs:\n{a}\n{b}"
        else:
            assert a == b or (a != a and b != b), f"{what}{path}: {a!r} and {b!r}"


def step_alike(losses: Sequence[torch.Tensor], optimizers: Sequence[Any]) -> None:
    """Makes a step of each of several runs, whose losses have to agree in every bit."""
    assert all(same_bits(losses[0], loss) for loss in losses[1:])
    for loss in losses:
        loss.backward()  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def asked(error: tiermem.CapacityError) -> tuple[str, int]:
    """Returns the tier and the least budget that a CapacityError names.

    Where it names one for AdamW, as no optimizer is known yet, and one for forward alone, the
    latter: for another optimizer the former may be more than the least.
    """
    match = _ALONE.search(str(error)) or _ASKED.search(str(error))
    assert match is not None, f"no least budget in: {error}"
    return match.group(1), int(match.group(2))


def asked_for(error: tiermem.CapacityError) -> dict[str, int]:
    """Returns every budget that a CapacityError asks for, in bytes."""
    return {name: int(nbytes) for name, nbytes in _ASKED.findall(str(error))}


@dataclass
class Tiers:
    """Budgets to wrap under; the least that works is found by asking."""

    name: str
    dram: int = 16 << 20
    nvme: str | None = None
    policy: Any = None
    extra_hbm: int = 0
    options: dict[str, Any] = field(default_factory=dict)


def wrap_tight(
    make: Build,
    tiers: Tiers,
    optimizer: Settings | None = None,
    blocks: Any = "auto",
    groups: Callable[[nn.Module], Any] = lambda model: model,
    *,
    trained: bool = False,
) -> tuple[tiermem.TierManager, nn.Module, Any]:
    """Wraps under the least HBM that the errors ask for.

    Args:
        make: Makes the model.
        tiers: The budgets but for HBM's.
        optimizer: Its class and settings, or None.
        blocks: As for ``tier.wrap``.
        groups: What of the model the optimizer gets.
        trained: Whether there is a backward although there is no optimizer. A model alone is
            wrapped under what its forward needs, and its first backward asks for the rest.

    Returns:
        Manager, wrapped model, and its optimizer if settings are given.
    """
    budgets = {"hbm": 4096, "dram": tiers.dram}
    refused: nn.Module | None = None
    for _ in range(24):
        tier = tiermem.TierManager(
            device="cpu", nvme=tiers.nvme, policy=tiers.policy, **budgets, **tiers.options
        )
        _ask_for_forward(tier)
        try:
            refused = model = refused or make()
            tier.wrap(model, blocks)
            refused = stepper = None
            if optimizer is not None and any(p.requires_grad for p in model.parameters()):
                stepper = tier.optimizer(groups(model), optimizer[0], **optimizer[1])
            if trained:
                check_gradients(tier._runtime)
        except tiermem.CapacityError as error:
            tier.close()
            which, least = asked(error)
            assert least > budgets[which], f"asks for no more than it has: {error}"
            budgets[which] = least
            continue
        except BaseException:
            tier.close()
            raise
        if tiers.extra_hbm:
            extra = Tiers(tiers.name, budgets["dram"], tiers.nvme, tiers.policy)
            tier.close()
            extra.options = tiers.options
            return _wrap_with(
                make, budgets["hbm"] + tiers.extra_hbm, extra, optimizer, blocks, groups
            )
        return tier, model, stepper
    raise AssertionError("the least budget was never enough")


def _ask_for_forward(tier: tiermem.TierManager) -> None:
    """Spares refusals of a model what training would take: :func:`asked` does not look at it."""
    program = tier._runtime.program
    whole = program.refuse_model

    def refuse_model(error: tiermem.CapacityError) -> tiermem.CapacityError:
        forward = program.budgets(gradients=False)
        return refusal(error, "To call the model", forward) if forward else whole(error)

    program.refuse_model = refuse_model  # type: ignore[method-assign]


def _wrap_with(
    make: Build,
    hbm: int,
    tiers: Tiers,
    optimizer: Settings | None,
    blocks: Any,
    groups: Callable[[nn.Module], Any],
) -> tuple[tiermem.TierManager, nn.Module, Any]:
    tier = tiermem.TierManager(
        device="cpu",
        hbm=hbm,
        dram=tiers.dram,
        nvme=tiers.nvme,
        policy=tiers.policy,
        **tiers.options,
    )
    model = tier.wrap(make(), blocks)
    if optimizer is None or not any(p.requires_grad for p in model.parameters()):
        return tier, model, None
    return tier, model, tier.optimizer(groups(model), optimizer[0], **optimizer[1])


class Pair:
    """A resident model and its tiered twin.

    Attributes:
        plain: The resident one.
        model: The wrapped one.
        tier: Its manager.
        plain_optimizer: Of the resident one.
        optimizer: Of the wrapped one.
    """

    def __init__(
        self,
        build: Build,
        tiers: Tiers,
        optimizer: Settings | None = (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
        blocks: Any = "auto",
        prepare: Callable[[nn.Module], None] | None = None,
        *,
        trained: bool = False,
    ) -> None:
        def make() -> nn.Module:
            seed(11)
            model = build()
            if prepare is not None:
                prepare(model)
            return model

        self.plain = make()
        self.plain_optimizer: Any = None
        trains = any(p.requires_grad for p in self.plain.parameters())
        if optimizer is not None and trains:
            own = {k: v for k, v in optimizer[1].items() if k not in _TIERED_ONLY}
            self.plain_optimizer = optimizer[0](self.plain.parameters(), **own)
        self.tier, self.model, self.optimizer = wrap_tight(
            make, tiers, optimizer, blocks, trained=trained
        )

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *error: object) -> None:
        self.tier.close()

    def both(self, use: Callable[[nn.Module, Any], Any], number: int = 0, what: str = "") -> Any:
        """Runs ``use(model, optimizer)`` on both with the same seed; results must be equal."""
        seed(number)
        expected = use(self.plain, self.plain_optimizer)
        seed(number)
        found = use(self.model, self.optimizer)
        assert_same(expected, found, what or getattr(use, "__name__", "result"))
        return found

    def check_gradients(self, how: str) -> None:
        """Compares every gradient, through the lazy tensor or through materialize."""
        ours = dict(self.model.named_parameters())
        if how == "materialize":
            with self.tier.materialize(self.model):
                self._compare_gradients(ours)
        else:
            self._compare_gradients(ours)

    def _compare_gradients(self, ours: dict[str, nn.Parameter]) -> None:
        for name, param in self.plain.named_parameters():
            mine = ours[name].grad
            if param.grad is None:
                assert mine is None, f"{name}: a gradient that the plain model does not have"
                continue
            assert mine is not None, f"{name}: no gradient"
            real = mine.detach().clone()
            assert same_bits(param.grad, real), f"{name}.grad differs:\n{param.grad}\n{real}"
            assert mine.layout is param.grad.layout

    def check_state(self) -> None:
        """Compares weights, buffers and optimizer state, and the table's own rules."""
        expected = dict(self.plain.state_dict())
        found = dict(self.model.state_dict())
        assert_same(expected, found, "state_dict")
        ours = dict(self.model.named_buffers())
        for name, buffer in self.plain.named_buffers():
            if name in expected or buffer is None:
                continue
            assert same_bits(buffer, ours[name].clone()), f"buffer {name} differs"
        if self.optimizer is not None:
            plain, ours = self.plain_optimizer.state_dict(), self.optimizer.state_dict()
            assert_same(plain, ours, "optimizer")
        self.check_table()

    def check_table(self) -> None:
        """No lease is left over, and the table keeps its rules."""
        check_table(self.tier)

    def finish(self) -> None:
        """Takes the model out of the tiers and compares it once more."""
        self.check_state()
        self.tier.unwrap(self.model)
        assert_same(dict(self.plain.state_dict()), dict(self.model.state_dict()), "unwrapped")


def check_table(tier: tiermem.TierManager) -> None:
    """No lease is left over, and the table keeps its rules."""
    manager = tier._manager
    manager.parts.table.check()
    leased = [r.block.name for r in manager.parts.table if r.leases and not r.fixed]
    assert not leased, f"leases left over: {leased}"
    for group in tier._runtime.groups:
        assert group.holds == 0, f"{group.block.name} is still held"
    assert not tier._runtime.here.inside


def scalar_of(output: Any) -> torch.Tensor | None:
    """Returns a scalar that depends on every differentiable tensor in an output."""
    total: torch.Tensor | None = None
    for _, value in leaves(output):
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            continue
        if value.layout is not torch.strided:
            continue
        real = torch.view_as_real(value) if value.is_complex() else value
        weights = torch.linspace(0.5, 1.5, max(real.numel(), 1), dtype=torch.float64)
        part = (real.double().reshape(-1) * weights[: real.numel()]).sum()
        total = part if total is None else total + part
    return total


@contextmanager
def no_context() -> Iterator[None]:
    """Does nothing."""
    yield


def train_step(
    pair: Pair,
    inputs: Callable[[], tuple[Sequence[Any], Mapping[str, Any]]],
    step: int,
    *,
    call: Callable[..., Any] | None = None,
    context: Callable[[], Any] = no_context,
) -> None:
    """One step of both: outputs, loss, gradients of inputs and parameters, then the weights."""
    results = []
    for model in (pair.plain, pair.model):
        seed(100 + step)
        args, kwargs = inputs()
        args, kwargs = _as_leaves(args), _as_leaves(kwargs)
        seed(200 + step)
        with context():
            output = call(model, *args, **kwargs) if call else model(*args, **kwargs)
        loss = scalar_of(output)
        if loss is not None:
            loss.backward()
        grads = [v.grad for _, v in leaves([args, kwargs]) if isinstance(v, torch.Tensor)]
        results.append((output, loss, grads))
    (output, loss, grads), (output2, loss2, grads2) = results
    assert_same(output, output2, "output")
    assert_same(loss, loss2, "loss")
    assert_same(grads, grads2, "input gradients")
    pair.check_table()
    del results, output, output2, loss, loss2
    pair.check_gradients("lazy" if step % 2 else "materialize")
    if pair.optimizer is not None:
        pair.plain_optimizer.step()
        pair.optimizer.step()
        pair.plain_optimizer.zero_grad()
        pair.optimizer.zero_grad()


def _as_leaves(value: Any) -> Any:
    """Returns the same nest with floating tensors as fresh leaves that require grad."""
    if isinstance(value, torch.Tensor):
        fresh = value.detach().clone()
        wants = fresh.is_floating_point() or fresh.is_complex()
        return fresh.requires_grad_(wants and value.requires_grad)
    if isinstance(value, Mapping):
        return {k: _as_leaves(v) for k, v in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_as_leaves(v) for v in value)
    return value


def compare_training(
    build: Build,
    inputs: Callable[[], tuple[Sequence[Any], Mapping[str, Any]]],
    tiers: Tiers,
    *,
    steps: int = 3,
    train: bool = True,
    **options: Any,
) -> None:
    """Trains both for some steps and compares everything all along."""
    call = options.pop("call", None)
    context = options.pop("context", no_context)
    trained = options.get("optimizer", ...) is None
    with Pair(build, tiers, trained=trained, **options) as pair:
        pair.plain.train(train)
        pair.model.train(train)
        for step in range(steps):
            train_step(pair, inputs, step, call=call, context=context)
        pair.finish()
