"""The state of a parameter that is stepped in parts, as users see it: one tensor for each key.

State that the settings did not require when room was planned (a momentum that is set later, or
loaded) has no home in the tiers. Then it is one ordinary tensor, and each part has its run of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.nn.tensors.lazy import LazyTensor, Ways, flush, forget, is_viewed, refresh
from tiermem.optim.rules.separable import copied
from tiermem.optim.units.part import Part
from tiermem.optim.units.unit import State


class PartsState:
    """Shows what the parts of a parameter keep as the state of the whole."""

    def __init__(self, param: torch.Tensor, parts: Sequence[Part]) -> None:
        """Starts without state.

        Args:
            param: The whole parameter.
            parts: Its runs, in order.
        """
        self._param = param
        self._parts = parts
        self._stand_ins: dict[str, LazyTensor] = {}
        self._outside: dict[str, torch.Tensor] = {}  # tensors without a home in the tiers

    def is_viewed(self) -> bool:
        """Whether users may have a view of it."""
        return any(map(is_viewed, self._stand_ins.values()))

    def flush(self) -> None:
        """Stores what was written through views of it."""
        for shown in self._stand_ins.values():
            flush(shown)

    def forget(self) -> None:
        """Detaches what users have of it from the tiers."""
        for shown in self._stand_ins.values():
            forget(shown)
        self._outside.clear()

    def publish(self, runtime: ModuleRuntime, state: State) -> None:
        """Shows the state of all parts as the parameter's.

        A number that a class writes in place is written to the object that users may have kept.
        """
        part = self._parts[0]
        first = part.state.get(part.param)
        if first is None:
            return
        kept = state.setdefault(self._param, {})
        before = dict(kept)
        kept.clear()
        for key, value in first.items():
            if not isinstance(value, LazyTensor):
                if is_as_large(value, part.param):
                    kept[key] = self._joined(key)
                    continue
                number = before.get(key)
                written = isinstance(value, torch.Tensor) and part.given.get(key) is value
                if written and isinstance(number, torch.Tensor):
                    with torch.no_grad():
                        kept[key] = number.copy_(value)
                else:
                    kept[key] = copied(value)
                continue
            kept[key] = self._stand_in(runtime, key, value.dtype)
            if is_viewed(kept[key]):
                refresh(kept[key], self._load(runtime, key))

    def copies(self, runtime: ModuleRuntime, state: State) -> Iterator[tuple[torch.Tensor, State]]:
        """Yields the parameter with copies of its state in host memory, if it has any.

        An empty state counts as one, as in torch's ``state_dict()``.
        """
        if state.get(self._param) is None:
            return
        self.flush()
        shown = state[self._param].items()
        values = {key: copied(value) for key, value in shown if not isinstance(value, LazyTensor)}
        runs: dict[str, list[torch.Tensor]] = {}
        for part in self._parts:
            block = part.unit.block
            tensors = runtime.manager.read(block) if block is not None else []
            for place in part.unit.plain.places:
                runs.setdefault(place.key, []).append(tensors[place.first])
        for key, value in state[self._param].items():
            if isinstance(value, LazyTensor):
                values[key] = torch.cat(runs[key]).view(self._param.shape)
        yield self._param, {key: values[key] for key in state[self._param]}

    def is_edited(self, state: State) -> bool:
        """Whether a user has set other tensors in ``state``, or deleted some."""
        shown, first = state.get(self._param) or {}, self._parts[0]
        mine = first.state.get(first.param) or {}
        if bool(shown) != bool(mine):
            return True
        whole = {key: value for key, value in shown.items() if is_as_large(value, self._param)}
        kept = {
            key: (self._stand_ins if isinstance(value, LazyTensor) else self._outside).get(key)
            for key, value in mine.items()
            if is_as_large(value, first.param)
        }
        return whole.keys() != kept.keys() or any(whole[key] is not kept[key] for key in kept)

    def _joined(self, key: str) -> torch.Tensor:
        """Returns a tensor outside the tiers of which the parts have runs, so writes are shared.

        If the parts have separate tensors, as after their first step, these are joined.
        """
        states = [part.state[part.param] for part in self._parts]
        whole = self._outside.get(key)
        if whole is None or any(_memory(state[key]) != _memory(whole) for state in states):
            whole = torch.cat([state[key] for state in states]).view(self._param.shape)
            self._outside[key] = whole
            for part, state in zip(self._parts, states, strict=True):
                state[key] = part.run_of(whole)
        return whole

    def _stand_in(self, runtime: ModuleRuntime, key: str, dtype: torch.dtype) -> LazyTensor:
        found = self._stand_ins.get(key)
        if found is None:
            ways = Ways(
                self._param.shape,
                dtype,
                runtime.manager.parts.device,
                partial(self._load, runtime, key),
                partial(self._store, runtime, key),
            )
            found = self._stand_ins[key] = ways.stand_in()
        return found

    def _load(self, runtime: ModuleRuntime, key: str) -> torch.Tensor:
        runs = [part.unit.plain.load(runtime, key) for part in self._parts]
        return torch.cat(runs).view(self._param.shape)

    def _store(self, runtime: ModuleRuntime, key: str, value: torch.Tensor) -> None:
        flat = value.reshape(-1)
        for part in self._parts:
            part.unit.plain.store(runtime, key, flat[part.begin : part.end])


def numbers_of(state: State, param: torch.Tensor) -> State:
    """Returns the present state values of a parameter that all of its parts share."""
    return {key: copied(value) for key, value in state.items() if not is_as_large(value, param)}


def is_as_large(value: Any, param: torch.Tensor) -> bool:
    """Whether a state value has one element per element of a parameter, unlike a number."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == param.shape


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
