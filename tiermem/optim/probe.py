"""Learns of an optimizer class, by trying it, whether it can be stepped block by block.

No list of known classes: the class is run on tiny parameters, all at once and
one by one, and must give the same bits; and on stand-ins of the real shapes,
to learn what state it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tiermem.errors import StepError

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Makes an optimizer of the class and settings in question from parameter groups."""

_STEPS = 3


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a parameter group without its parameters."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


@contextmanager
def _own_randomness() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _gradient(param: torch.Tensor, *, sparse: bool) -> torch.Tensor:
    dense = torch.rand(param.shape).to(param.dtype).to(param.device) + 0.5
    return dense.to_sparse(1) if sparse and dense.dim() else dense


def _tiny(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> list[nn.Parameter]:
    return [nn.Parameter(torch.rand(shape).to(dtype).to(device)) for shape in shapes]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _plain_state(optimizer: torch.optim.Optimizer) -> str:
    """Returns what is odd about an optimizer's state, or nothing."""
    for state in optimizer.state.values():
        if not isinstance(state, dict):
            return "its state is not one dictionary per parameter"
        for key, value in state.items():
            if not isinstance(value, torch.Tensor | int | float | bool | str | None):
                return f"its state {key!r} is a {type(value).__name__}, not a tensor or a number"
    extra = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
    return f"it keeps state {extra[0]!r} that belongs to no parameter" if extra else ""


def _run(
    make: Make, settings: dict[str, Any], params: list[nn.Parameter], *, apart: bool, sparse: bool
) -> str:
    """Steps tiny parameters; returns what is odd, or nothing."""
    sets = [[p] for p in params] if apart else [params]
    optimizers = [make([{**settings, "params": members}]) for members in sets]
    before = [_numbers(o.param_groups[0]) for o in optimizers]
    for step in range(_STEPS):
        torch.manual_seed(step)
        for param in params:
            param.grad = _gradient(param, sparse=sparse)
        torch.manual_seed(100 + step)
        for optimizer in reversed(optimizers):  # an order of our own, so that random draws show
            optimizer.step()
    for optimizer, old in zip(optimizers, before, strict=True):
        if _numbers(optimizer.param_groups[0]) != old:
            return "it keeps numbers of all parameters together in its parameter groups"
        odd = _plain_state(optimizer)
        if odd:
            return odd
    return ""


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in settings_of(group).items() if isinstance(v, int | float | bool | str)}


def check_separable(
    name: str,
    make: Make,
    settings: dict[str, Any],
    dims: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Makes sure that stepping parameters one by one gives the same bits as all at once.

    Args:
        name: Of the class, for messages.
        make: Makes an instance.
        settings: Of the parameter group.
        dims: Numbers of dimensions that the real parameters have.
        dtype: Theirs.
        device: Where to try if it does not run on the CPU.

    Returns:
        Whether the class takes sparse gradients only.

    Raises:
        StepError: Saying why it cannot be streamed, and what to do.
    """
    shapes = [(4,) * d for d in dims for _ in range(2)] or [(4, 4)]
    problem: Exception | None = None
    for where in dict.fromkeys((torch.device("cpu"), device)):
        for sparse in (False, True):
            try:
                with _own_randomness():
                    return _try(name, make, settings, shapes, dtype, where, sparse)
            except StepError:
                raise
            except Exception as error:  # whatever a foreign class raises on what it cannot do
                problem = problem or error
    raise StepError(
        f"{name} cannot be streamed through the tiers: a trial step without a closure failed with "
        f"{type(problem).__name__}: {problem}. Use an optimizer that updates each parameter from "
        "its own gradient and state, or keep these parameters out of tier.wrap"
    ) from problem


def _try(
    name: str,
    make: Make,
    settings: dict[str, Any],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    sparse: bool,
) -> bool:
    torch.manual_seed(1)
    together = _tiny(shapes, dtype, device)
    one_by_one = [nn.Parameter(p.detach().clone()) for p in together]
    odd = _run(make, settings, together, apart=False, sparse=sparse)
    odd = odd or _run(make, settings, one_by_one, apart=True, sparse=sparse)
    if not odd:
        for first, second in zip(together, one_by_one, strict=True):
            if not torch.equal(_bits(first), _bits(second)):
                odd = "its update of one parameter depends on the others, or on random numbers"
    if odd:
        raise StepError(
            f"{name} cannot be streamed block by block: {odd}. Use an optimizer that updates each "
            "parameter from its own gradient and state, or keep these parameters out of tier.wrap"
        )
    return sparse


class StateProbe:
    """Learns the state that a class keeps for a parameter of a given shape.

    Attributes:
        sparse: Whether gradients have to be sparse.
        eager: Whether the class makes the state when it is made, not at the first step.
    """

    def __init__(self, make: Make, device: torch.device, *, sparse: bool) -> None:
        """Uses ``make``; tries the meta device, then the CPU, then ``device``."""
        self._make = make
        self._devices = (torch.device("meta"), torch.device("cpu"), device)
        self.sparse = sparse
        self._known: dict[Any, dict[str, torch.Tensor]] = {}
        self._spoils: dict[Any, bool] = {}
        self.eager = False

    def state_of(
        self, param: torch.Tensor, stride: tuple[int, ...], group: int, settings: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Returns, by key, stand-ins on the meta device for the tensors that the state has.

        Args:
            param: Its shape and dtype count, not its values.
            stride: The strides it has in HBM.
            group: Number of its parameter group.
            settings: Of that group.
        """
        key = (tuple(param.shape), stride, param.dtype, group)
        if key not in self._known:
            self._known[key] = self._learn(param, stride, settings)
        return self._known[key]

    def spoils(self, param: torch.Tensor, group: int, settings: dict[str, Any]) -> bool:
        """Returns whether a step writes gradients; where it cannot be tried it is taken to.

        What it does not write need not be written back.

        Args:
            param: Its dtype and number of dimensions count.
            group: Number of its parameter group.
            settings: Of that group.
        """
        key = (param.dim(), param.dtype, group)
        if key not in self._spoils:
            self._spoils[key] = any(
                self._try_spoil(param, settings, large) for large in (False, True)
            )
        return self._spoils[key]

    def _try_spoil(self, param: torch.Tensor, settings: dict[str, Any], large: bool) -> bool:
        """Tries a few steps with gradients below or above what anybody would clip."""
        for device in self._devices[1:]:
            try:
                with _own_randomness(), torch.inference_mode(False):
                    (tiny,) = _tiny([(4,) * param.dim()], param.dtype, device)
                    optimizer = self._make([{**settings, "params": [tiny]}])
                    for _ in range(_STEPS):
                        tiny.grad = _gradient(tiny, sparse=self.sparse)
                        with torch.no_grad():
                            tiny.grad *= 100.0 if large else 0.01
                        kept, before = tiny.grad, tiny.grad.to_dense().clone()
                        optimizer.step()
                        if not torch.equal(_bits(kept.to_dense()), _bits(before)):
                            return True
                    return False
            except Exception:  # a class may not run there
                continue
        return True

    def _learn(
        self, param: torch.Tensor, stride: tuple[int, ...], settings: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        problem: Exception | None = None
        for device in self._devices:
            if self.sparse and device.type == "meta":
                continue
            try:
                with _own_randomness(), torch.inference_mode(False):
                    return self._step(param, stride, settings, device)
            except Exception as error:  # a class may not run on meta; the next device will do
                problem = error
        raise StepError(
            f"a trial step for a parameter of shape {tuple(param.shape)} failed: {problem}"
        ) from problem

    def _step(
        self,
        param: torch.Tensor,
        stride: tuple[int, ...],
        settings: dict[str, Any],
        device: torch.device,
    ) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            raw = torch.empty_strided(tuple(param.shape), stride, dtype=param.dtype, device=device)
            raw.zero_()
        stand_in = nn.Parameter(raw)
        stand_in.grad = torch.zeros_like(stand_in)
        if self.sparse:
            stand_in.grad = stand_in.grad.to_sparse(1)
        optimizer = self._make([{**settings, "params": [stand_in]}])
        self.eager = bool(optimizer.state)
        optimizer.step()
        found = {}
        for name, value in optimizer.state[stand_in].items():
            if isinstance(value, torch.Tensor) and value.dim() and value.layout is torch.strided:
                found[str(name)] = value.detach().to("meta")
        return found
