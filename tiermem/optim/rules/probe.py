"""Finds out, by trying a class on stand-ins of the real shapes, what it keeps per parameter."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from tiermem.errors import StepError
from tiermem.nn.tensors.shells import insides, is_opaque
from tiermem.optim.rules.bits import bits
from tiermem.optim.rules.plainstep import run_unseen
from tiermem.optim.rules.separable import (
    Make,
    copied,
    give_gradients,
    opaque,
    ready,
    settings_of,
    tiny,
)
from tiermem.optim.rules.trial import trial

__all__ = ["Make", "StateProbe", "StateTensor", "settings_of"]

_STEPS = 3
_NAMED = (bool, str, type(None))
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a parameter's state.

    Attributes:
        shape: The shape that it shows.
        tensors: The plain tensors in it by their path, on the meta device; one, with path ``""``,
            if it is plain itself.
    """

    shape: tuple[int, ...]
    tensors: list[tuple[str, torch.Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for _, tensor in self.tensors)


def zeros_of(settings: dict[str, Any]) -> tuple[tuple[str, bool], ...]:
    """Returns which settings are zero: then classes keep other state and write other tensors."""
    numbers = (int, float)
    return tuple((key, not value) for key, value in settings.items() if type(value) in numbers)


def way_of(settings: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Returns the settings that select a class's behaviour: zeros, switches and names."""
    named = [(key, value) for key, value in settings.items() if type(value) in _NAMED]
    return (*zeros_of(settings), *named)


class StateProbe:
    """Learns the state that a class keeps for a parameter of a given shape.

    Attributes:
        sparse: Whether the class requires sparse gradients.
    """

    def __init__(self, make: Make, device: torch.device, *, sparse: bool) -> None:
        """Uses ``make``; tries the meta device, then the CPU, then ``device``."""
        self._make = make
        self._devices = (torch.device("meta"), torch.device("cpu"), device)
        self.sparse = sparse
        self._known: dict[Any, dict[str, StateTensor]] = {}
        self._spoils: dict[Any, bool] = {}
        self._varying: dict[Any, frozenset[str]] = {}
        self._ignoring: dict[Any, bool] = {}

    def state_of(
        self, param: torch.Tensor, stride: tuple[int, ...], group: int, settings: dict[str, Any]
    ) -> dict[str, StateTensor]:
        """Returns, by key, the tensors that the state has.

        Args:
            param: Its shape and dtype matter, not its values.
            stride: Its strides in HBM.
            group: Number of its parameter group.
            settings: Settings of that group.

        Raises:
            StepError: If it has a tensor of a class that cannot be unwrapped, or it cannot be
                tried at all.
        """
        key = (tuple(param.shape), stride, param.dtype, group, zeros_of(settings))
        if key not in self._known:
            self._known[key] = self._learn(param, stride, settings)
        return self._known[key]

    def spoils(self, param: torch.Tensor, group: int, settings: dict[str, Any]) -> bool:
        """Returns whether a step writes gradients; if it cannot be tried, this is assumed.

        If it does not write them, they need not be written back.

        Args:
            param: Its dtype and number of dimensions matter.
            group: Number of its parameter group.
            settings: Settings of that group.
        """
        key = (param.dim(), param.dtype, group, zeros_of(settings))
        if key not in self._spoils:
            # with gradients far below and above any usual clipping limit
            self._spoils[key] = any(
                self._try_tiny(param, settings, partial(self._spoiled, factor), or_else=True)
                for factor in (0.01, 100.0)
            )
        return self._spoils[key]

    def varying(self, param: torch.Tensor, group: int, settings: dict[str, Any]) -> frozenset[str]:
        """Returns the keys of state tensors whose shape changes from step to step, as a history's.

        Args:
            param: Its dtype and number of dimensions matter.
            group: Number of its parameter group.
            settings: Settings of that group.
        """
        key = (param.dim(), param.dtype, group, zeros_of(settings))
        if key not in self._varying:
            self._varying[key] = self._try_tiny(
                param, settings, self._varied, or_else=frozenset[str]()
            )
        return self._varying[key]

    def ignores_weights(self, param: torch.Tensor, group: int, settings: dict[str, Any]) -> bool:
        """Returns whether the new state of a step is independent of the weights.

        Args:
            param: Its dtype and number of dimensions matter.
            group: Number of its parameter group.
            settings: Settings of that group.
        """
        key = (param.dim(), param.dtype, group, way_of(settings))
        if key not in self._ignoring:
            self._ignoring[key] = self._try_tiny(param, settings, self._ignores, or_else=False)
        return self._ignoring[key]

    def _try_tiny(
        self,
        param: torch.Tensor,
        settings: dict[str, Any],
        look: Callable[[nn.Parameter, torch.optim.Optimizer], Found],
        *,
        or_else: Found,
    ) -> Found:
        """Returns the result of a check of an optimizer with one tiny parameter.

        Args:
            param: Its dtype and number of dimensions are used.
            settings: Settings of its group.
            look: Called with the tiny parameter and its optimizer; steps it.
            or_else: The result if no such optimizer can be stepped.
        """
        for device in self._devices[1:]:
            try:
                with trial():
                    (one,) = params = tiny([(4,) * param.dim()], param.dtype, device)
                    return look(one, ready(self._make([{**copied(settings), "params": params}])))
            except Exception:  # a class may not run there
                continue
        return or_else

    def _varied(self, one: nn.Parameter, optimizer: torch.optim.Optimizer) -> frozenset[str]:
        """Returns the keys of state tensors whose shape differs between a few steps."""
        shapes: dict[str, set[tuple[int, ...]]] = {}
        for step in range(_STEPS):
            give_gradients([one], step, sparse=self.sparse)
            run_unseen(optimizer)
            for name, value in optimizer.state[one].items():
                if isinstance(value, torch.Tensor):
                    shapes.setdefault(str(name), set()).add(tuple(value.shape))
        return frozenset(name for name, found in shapes.items() if len(found) > 1)

    def _ignores(self, one: nn.Parameter, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a few steps give the same state with any weights, even NaN."""
        others = (float("nan"), float("inf"), -3.0, 0.0)
        for step in range(_STEPS):
            give_gradients([one], step, sparse=self.sparse)
            before, weights = copy.deepcopy(dict(optimizer.state[one])), one.detach().clone()
            run_unseen(optimizer)
            after, stepped = dict(optimizer.state[one]), one.detach().clone()
            for other in others:
                optimizer.state[one] = copy.deepcopy(before)
                with torch.no_grad():
                    one.copy_(weights * other if math.isfinite(other) else weights + other)
                run_unseen(optimizer)
                if not _alike(after, dict(optimizer.state[one])):
                    return False
            optimizer.state[one] = after
            with torch.no_grad():
                one.copy_(stepped)
        return True

    def _spoiled(self, factor: float, one: nn.Parameter, optimizer: torch.optim.Optimizer) -> bool:
        """Whether one of a few steps writes its gradient, which is multiplied by ``factor``."""
        for step in range(_STEPS):
            give_gradients([one], step, sparse=self.sparse)
            one.grad = kept = factor * torch.as_tensor(one.grad, device=one.device)
            before = kept.to_dense().clone()
            run_unseen(optimizer)
            if not torch.equal(bits(kept.to_dense()), bits(before)):
                return True
        return False

    def _learn(
        self, param: torch.Tensor, stride: tuple[int, ...], settings: dict[str, Any]
    ) -> dict[str, StateTensor]:
        problem: Exception | None = None
        for device in self._devices:
            if self.sparse and device.type == "meta":
                continue
            try:
                with trial():
                    state = self._step(param, stride, settings, device)
            except Exception as error:  # a class may not run on meta; the next device is tried
                problem = error
                continue
            return _kept(state)
        raise StepError(
            f"a trial step for a parameter of shape {tuple(param.shape)} failed: {problem}"
        ) from problem

    def _step(
        self,
        param: torch.Tensor,
        stride: tuple[int, ...],
        settings: dict[str, Any],
        device: torch.device,
    ) -> dict[str, Any]:
        """Returns the state after a step of a stand-in for a parameter."""
        with torch.no_grad():
            raw = torch.empty_strided(tuple(param.shape), stride, dtype=param.dtype, device=device)
            raw.zero_()
        stand_in = nn.Parameter(raw)
        stand_in.grad = torch.zeros_like(stand_in)
        if self.sparse:
            stand_in.grad = stand_in.grad.to_sparse(1)
        optimizer = ready(self._make([{**copied(settings), "params": [stand_in]}]))
        run_unseen(optimizer)
        return dict(optimizer.state[stand_in])


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two states of a parameter have the same bits."""
    if one.keys() != other.keys():
        return False
    for mine, theirs in zip(one.values(), other.values(), strict=True):
        if not isinstance(mine, torch.Tensor):
            if type(mine) is not type(theirs) or mine != theirs:
                return False
            continue
        if mine.shape != theirs.shape or mine.dtype is not theirs.dtype:
            return False
        if not torch.equal(bits(mine), bits(theirs)):
            return False
    return True


def _kept(state: dict[str, Any]) -> dict[str, StateTensor]:
    """Returns those tensors of a state that get a home in the tiers.

    Raises:
        StepError: If one is of a class that cannot be unwrapped.
    """
    found = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        if is_opaque(value):
            raise StepError(
                f"the class cannot be streamed through the tiers: {opaque(str(name), value)}; use "
                "one whose state is plain tensors"
            )
        inner = insides(value)
        if value.dim() and all(tensor.layout is torch.strided for _, tensor in inner):
            tensors = [(path, tensor.detach().to("meta")) for path, tensor in inner]
            found[str(name)] = StateTensor(tuple(value.shape), tensors)
    return found
