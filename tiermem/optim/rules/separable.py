"""Finds out, by trying an optimizer class, whether it can be stepped block by block.

There is no list of known classes: the class is run on tiny parameters, all at once and one by one,
with gradients that are missing at times, and must give the same bits. One by one is how blocks are
stepped: settings are those of the group when a step begins, and counters of the class there
continue as for a single parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tiermem.errors import StepError
from tiermem.nn.tensors.shells import insides, is_opaque
from tiermem.optim.rules.bits import bits
from tiermem.optim.rules.plainstep import run_unseen
from tiermem.optim.rules.trial import Draws, ExchangeError, trial, undispatched

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Creates an optimizer of the class and settings in question from parameter groups."""

_STEPS = 8
_REMEDY = (
    "Use an optimizer that updates each parameter from its own gradient and state, make this one "
    "without tier.optimizer (over the parameters of the wrapped model: the same bits, with its "
    "state in device memory beside hbm=), or keep these parameters out of tier.wrap"
)
_WHOLE = (
    "Use an optimizer that steps all parameters in each process (tiers have room for its state), "
    "and exchange gradients before: DistributedDataParallel(tier.wrap(model)), or "
    "dist.all_reduce(param.grad)"
)
_SMALL = (1.0, 2.0**-24, 2.0**-12)  # below the epsilons of float32 and of short dtypes


@dataclass(frozen=True, slots=True)
class Nature:
    """The properties of an optimizer class, as found by trying it.

    Attributes:
        sparse: Whether it requires sparse gradients.
        draws: Whether it draws random numbers as it steps.
        counts: Whether a step changes settings of its parameter groups, alike for all parameters.
        counted: Whether torch counts its writes of the weights.
        private: Whether settings have to be copied for each step of a block, as the class writes
            them.
        whole: Whether it can be stepped block by block only if every parameter has a gradient:
            some classes also update parameters without one (as if it were zero).
        device: The device where it was tried.
        dims: Number of dimensions of a parameter of the group.
        dtype: Dtype of a stepped parameter.
    """

    sparse: bool
    draws: bool
    counts: bool
    counted: bool
    private: bool
    whole: bool
    device: torch.device
    dims: int
    dtype: torch.dtype


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a parameter group without its parameters."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def copied(value: Any) -> Any:
    """Returns a copy of a setting; writing it does not change the user's."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: copied(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    return value


def ready(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns an optimizer in training mode, if it has modes."""
    if callable(getattr(type(optimizer), "train", None)):
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer


def tiny(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device, seed: int = 1
) -> list[nn.Parameter]:
    """Returns parameters with values between 0 and 1."""
    return [nn.Parameter(value) for value in _values(shapes, dtype, device, seed)]


def give_gradients(
    params: Sequence[nn.Parameter], seed: int, *, sparse: bool, but: int | None = None
) -> None:
    """Sets gradients with values between 0.5 and 1.5.

    Args:
        params: The parameters.
        seed: Seed of the values.
        sparse: Whether they are sparse.
        but: Index of the first parameter without a gradient, as every other one after it; None if
            all have one.
    """
    shapes = [tuple(param.shape) for param in params]
    values = _values(shapes, torch.float32, torch.device("cpu"), seed)
    for number, (param, value) in enumerate(zip(params, values, strict=True)):
        dense = value.to(param.device, param.dtype) + 0.5
        missing = but is not None and number % 2 == but
        param.grad = None if missing else dense.to_sparse(1) if sparse and dense.dim() else dense


def _values(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device, seed: int
) -> list[torch.Tensor]:
    source = torch.Generator("cpu").manual_seed(seed)
    return [
        torch.rand(shape, generator=source, dtype=torch.float32, device="cpu").to(device, dtype)
        for shape in shapes
    ]


class Counter:
    """Advances the settings of a parameter group like a class that counts steps there."""

    def __init__(
        self, make: Make, dims: int, dtype: torch.dtype, device: torch.device, *, sparse: bool
    ) -> None:
        """Counts with steps of a tiny parameter.

        Args:
            make: Creates an optimizer of the class.
            dims: Number of dimensions of a parameter of the group.
            dtype: Dtype of a stepped parameter.
            device: Where the class runs.
            sparse: Whether it requires sparse gradients.
        """
        self._make, self._sparse = make, sparse
        self._shape, self._dtype, self._device = (4,) * dims, dtype, device

    def after(
        self, settings: dict[str, Any], *, has_gradients: bool, method: Any = None
    ) -> dict[str, Any]:
        """Returns those of a group's settings that a step changes.

        Args:
            settings: The settings before it; not written.
            has_gradients: Whether any parameter of the group has a gradient.
            method: Does something other than a step with an optimizer.
        """
        params = tiny([self._shape], self._dtype, self._device)
        if has_gradients:
            give_gradients(params, 2, sparse=self._sparse)
        optimizer = self._make([{**copied(settings), "params": params}])
        group = optimizer.param_groups[0]
        group.update(copied(settings))
        (method or run_unseen)(optimizer)
        return {k: v for k, v in settings_of(group).items() if not _same(v, settings.get(k, _NONE))}


_NONE = object()


def check_separable(
    name: str,
    make: Make,
    settings: dict[str, Any],
    dims: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    method: Any = None,
) -> Nature:
    """Checks that stepping parameters one by one gives the same bits as all at once.

    Args:
        name: Name of the class, for messages.
        make: Creates an instance.
        settings: Settings of the parameter group.
        dims: Numbers of dimensions that the real parameters have.
        dtypes: Dtypes of the real parameters, in their order.
        device: The device to try if it does not run on the CPU.
        method: Does something else with an optimizer between two steps, which is tried as well.

    Returns:
        The properties of the class.

    Raises:
        StepError: If it cannot be streamed, with the reason and advice.
    """
    shapes = [shape for d in dims for shape in ((4,) * d, (4,) * d, _large(d))] or [(4, 4)] * 2
    nature = _tried(name, make, settings, shapes, dtypes[0], device, method)
    odd = _mixed(nature, make, settings, shapes, dtypes, method) if dtypes[1:] else ""
    if odd:
        names = ", ".join(str(dtype) for dtype in dtypes)
        raise StepError(
            f"{name} cannot be streamed block by block over a group of several dtypes ({names}): "
            f"{odd}. Give the parameters of each dtype a group of their own, or set what the "
            "class takes from a dtype (eps, say)"
        )
    return nature


def _mixed(
    nature: Nature,
    make: Make,
    settings: dict[str, Any],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    method: Any,
) -> str:
    """Returns why parameters of several dtypes cannot be stepped one by one, or "".

    Some classes take a default from the dtype of the first one (torch's Adafactor).
    """
    try:
        with trial() as draws:
            draws.seen = nature.draws
            found = _Trial(
                make, settings, shapes, dtypes, nature.device, nature.sparse, draws, method
            )
            return found.run(private=nature.private, late=False)
    except Exception:  # it does not run on them, so it will not in the tiers either
        return ""


def _tried(
    name: str,
    make: Make,
    settings: dict[str, Any],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    method: Any,
) -> Nature:
    """Returns the properties of a class for parameters of one dtype."""
    problem: Exception | None = None
    for where in dict.fromkeys((torch.device("cpu"), device)):
        for sparse, late in ((False, True), (True, True), (False, False)):
            odd = ""
            try:
                whole = False
                for private in (False, True, False, True):
                    with trial() as draws:
                        found = _Trial(
                            make, settings, shapes, [dtype], where, sparse, draws, method
                        )
                        reason = found.run(private=private, late=late and not whole)
                    if not reason:
                        counted = found.counted or (
                            not draws.seen and _is_counted(make, settings, shapes[0], dtype, device)
                        )
                        kind = sparse, draws.seen, found.counts, counted, private, whole
                        return Nature(*kind, where, len(shapes[0]), dtype)
                    odd = reason
                    if private and not found.updates_all:
                        break
                    whole = whole or private  # it remains to try with all gradients
            except StepError:
                raise
            except ExchangeError as error:
                raise StepError(
                    f"{name} cannot be streamed block by block: it shares parameters out among "
                    f"processes ({error}). {_WHOLE}"
                ) from None
            except Exception as error:  # whatever a foreign class raises on what it cannot do
                problem = problem or error
            if odd:
                raise StepError(f"{name} cannot be streamed block by block: {odd}. {_REMEDY}")
    why = f"a trial step without a closure failed with {type(problem).__name__}: {problem}"
    if "closure" in str(problem):  # like LBFGS, which searches the length of a step by the loss
        why = f"its step() computes the loss of the whole model again, by a closure ({problem})"
    raise StepError(f"{name} cannot be streamed through the tiers: {why}. {_REMEDY}") from problem


def _is_counted(
    make: Make,
    settings: dict[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether torch counts the writes of a class on the device itself."""
    try:
        with undispatched():
            (param,) = params = tiny([shape], dtype, device)
            optimizer = ready(make([{**copied(settings), "params": params}]))
            give_gradients(params, 1, sparse=False)
            run_unseen(optimizer)
            return param._version > 0
    except Exception:  # errors there are raised in its first step
        return False


def _large(dims: int) -> tuple[int, ...]:
    """Returns a shape of 4,096 elements, from which on some classes keep different state."""
    return {0: (), 1: (64,), 2: (64, 64), 3: (16, 16, 16)}.get(dims, (8,) * dims)


class _Trial:
    """One run of a class on tiny parameters, together and separately.

    Attributes:
        counts: Whether steps changed settings of the group.
        updates_all: Whether steps changed parameters that had no gradient, created one, or may
            have changed their state.
    """

    def __init__(
        self,
        make: Make,
        settings: dict[str, Any],
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        sparse: bool,
        draws: Draws,
        method: Any,
    ) -> None:
        self._make, self._settings, self._sparse, self._draws = make, settings, sparse, draws
        self._together = [p for dtype in dtypes for p in tiny(shapes, dtype, device)]
        self._apart = [p for dtype in dtypes for p in tiny(shapes, dtype, device)]
        self._mixed = len(dtypes) > 1
        self._counter = Counter(make, len(shapes[0]), dtypes[0], device, sparse=sparse)
        self._method = method
        self._private = False
        self.counts = self.updates_all = False

    def run(self, *, private: bool, late: bool) -> str:
        """Returns why the class cannot be stepped one by one, or "".

        Args:
            private: Whether each parameter gets copies of the settings.
            late: Whether first gradients come late, and some are missing. Some classes fail
                then, in plain torch as well (SGD, fused and with momentum).
        """
        self._private = private
        whole = self._made(self._together)
        parts = [self._made([param]) for param in self._apart]
        shown = copied(settings_of(parts[0].param_groups[0]))
        for step in range(_STEPS):
            but = {0: 1, 2: 0}.get(step) if late else None
            for params in (self._together, self._apart):
                give_gradients(params, 100 + step, sparse=self._sparse, but=but)
                for number, param in enumerate(params if self._mixed else ()):
                    param.grad = None if param.grad is None else param.grad * _SMALL[number % 3]
            self._draws.seed(step)
            left = [(p, p.detach().clone()) for p in self._together if p.grad is None]
            run_unseen(whole)
            self.updates_all |= any(
                p.grad is not None or not _same(p.detach(), value) for p, value in left
            )
            self._step_parts(parts, shown, step)
            if self._method is not None and step == _STEPS // 2:
                odd = self._call_method(whole, parts, shown)
                if odd:
                    return odd
            kept = settings_of(whole.param_groups[0])
            for key in {**kept, **shown}:
                if not _same(kept.get(key, _NONE), shown.get(key, _NONE)):
                    return (
                        f"it keeps numbers of all parameters together in its parameter groups "
                        f"({key!r})"
                    )
        return self._compare(whole, parts)

    def _made(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return ready(self._make([{**copied(self._settings), "params": params}]))

    def _step_parts(
        self, parts: Sequence[torch.optim.Optimizer], shown: dict[str, Any], step: int
    ) -> None:
        """Steps each parameter that has a gradient separately, as the tiers do."""
        self._draws.seed(step)
        # in reverse order, unless numbers are drawn, which follow the order of parameters
        for optimizer in parts if self._draws.seen else reversed(parts):
            if optimizer.param_groups[0]["params"][0].grad is not None:
                optimizer.param_groups[0].update(copied(shown) if self._private else shown)
                run_unseen(optimizer)
        self._count(shown)

    def _call_method(
        self,
        whole: torch.optim.Optimizer,
        parts: Sequence[torch.optim.Optimizer],
        shown: dict[str, Any],
    ) -> str:
        """Tries the method, and then prepares to continue."""
        for method in (self._method, ready):
            method(whole)
            for optimizer in reversed(parts):
                optimizer.param_groups[0].update(copied(shown) if self._private else shown)
                method(optimizer)
            self._count(shown, method)
            odd = self._compare(whole, parts)
            if odd:
                return odd
        return ""

    def _count(self, shown: dict[str, Any], method: Any = None) -> None:
        seen = self._draws.seen
        changed = self._counter.after(shown, has_gradients=True, method=method)
        self._draws.seen = seen
        self.counts |= bool(changed) and method is None
        shown.update(changed)

    @property
    def counted(self) -> bool:
        """Whether torch has counted the writes of every parameter."""
        return all(param._version for param in self._together)

    def _compare(self, whole: torch.optim.Optimizer, parts: Sequence[torch.optim.Optimizer]) -> str:
        for optimizer in (whole, *parts):
            odd = _odd_state(optimizer)
            if odd:
                return odd
        for first, second, optimizer in zip(self._together, self._apart, parts, strict=True):
            if not _same(first.detach(), second.detach()):
                return (
                    "its update of one parameter depends on the others, on random numbers, or on "
                    "what it keeps in an attribute of its own (self.state[param] is the place)"
                )
            if not _same(dict(whole.state.get(first, {})), dict(optimizer.state.get(second, {}))):
                self.updates_all = True  # it may count steps that it does not perform
                return "its state of one parameter depends on the others"
        return ""


def _odd_state(optimizer: torch.optim.Optimizer) -> str:
    """Returns why an optimizer's state cannot be kept in the tiers, or ""."""
    for state in optimizer.state.values():
        if not isinstance(state, dict):
            return "its state is not one dictionary per parameter"
        for key, value in state.items():
            if not isinstance(value, torch.Tensor | int | float | bool | str | None):
                return f"its state {key!r} is a {type(value).__name__}, not a tensor or a number"
            if isinstance(value, torch.Tensor) and is_opaque(value):
                return opaque(str(key), value)
    for param, state in optimizer.state.items():
        if isinstance(param, torch.Tensor) and (shared := _shared(param, state)):
            return shared
    others = [key for key in optimizer.state_dict() if key not in ("state", "param_groups")]
    if others:
        return f"its state_dict() has {others[0]!r} beside the state of its parameters"
    extra = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
    return f"it keeps state {extra[0]!r} that belongs to no parameter" if extra else ""


def _shared(param: torch.Tensor, state: dict[Any, Any]) -> str:
    """Returns what a parameter's state shares memory with, or "".

    In the tiers each tensor of it has separate memory, so a write to one would not be seen in the
    other. Python numbers are not affected.
    """
    seen: list[tuple[str, torch.Tensor]] = [("the parameter", param)]
    for key, value in state.items():
        for _, own in insides(value) if isinstance(value, torch.Tensor) else ():
            for name, other in seen:
                numbers = not own.dim() and not other.dim() and other is not param
                if not numbers and _overlap(own, other):
                    return f"its state {key!r} shares memory with {name}, and is no clone() of it"
            seen.append((repr(key), own))
    return ""


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have a byte in common; sparse ones are assumed to have none."""
    if first.layout is not torch.strided or second.layout is not torch.strided:
        return False
    address = first.untyped_storage().data_ptr()
    return address == second.untyped_storage().data_ptr() and not _places(first).isdisjoint(
        _places(second)
    )


def _places(tensor: torch.Tensor) -> set[int]:
    """Returns the numbers of a tensor's bytes within its storage."""
    size = tensor.dtype.itemsize
    steps = [step * size for step in tensor.stride()]
    numbers = torch.arange(tensor.untyped_storage().nbytes(), device="cpu")
    seen = numbers.as_strided((*tensor.shape, size), (*steps, 1), tensor.storage_offset() * size)
    return set(seen.flatten().tolist())


def opaque(key: str, value: torch.Tensor) -> str:
    """Returns why a tensor of a subclass cannot be kept in the tiers."""
    return (
        f"its state {key!r} is a tensor of the class {type(value).__name__}, which says not how "
        "it is put together (it has no __tensor_flatten__ and __tensor_unflatten__)"
    )


def _same(first: Any, second: Any) -> bool:
    """Whether two values are the same, tensors bit for bit."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        mine, theirs = insides(first), insides(second)
        return len(mine) == len(theirs) and all(
            a.dtype is b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
            for (_, a), (_, b) in zip(mine, theirs, strict=True)
        )
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, float):
        return first == second or (first != first and second != second)
    return first is second or bool(first == second)
