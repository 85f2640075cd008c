"""The state of a parameter that is stepped in parts, as users see it: one tensor for each key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.nn.tensors.lazy import LazyTensor, Ways, flush, forget, is_viewed, refresh
from tiermem.optim.rules.separable import copied
from tiermem.optim.units.part import Part
from tiermem.optim.units.unit import State


class PartsState:
    """Shows what the parts of a parameter keep as the state of the whole."""

    def __init__(self, param: torch.Tensor, parts: Sequence[Part]) -> None:
        """Shows nothing yet.

        Args:
            param: The whole.
            parts: Its runs, in order.
        """
        self._param = param
        self._parts = parts
        self._stand_ins: dict[str, LazyTensor] = {}

    def is_viewed(self) -> bool:
        """Whether users may have a view of it."""
        return any(map(is_viewed, self._stand_ins.values()))

    def flush(self) -> None:
        """Stores what was written through views of it."""
        for shown in self._stand_ins.values():
            flush(shown)

    def forget(self) -> None:
        """Makes what users have of it show nothing any more."""
        for shown in self._stand_ins.values():
            forget(shown)

    def publish(self, runtime: ModuleRuntime, state: State) -> None:
        """Shows the state of all parts as the parameter's.

        A number that a class writes in place is written where users see it: they may keep it.
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

        An empty state is one as well, which torch's ``state_dict()`` has.
        """
        if state.get(self._param) is None:
            return
        self.flush()
        values = numbers_of(state[self._param])
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
        """Whether a user has put other tensors into ``state``, or deleted some."""
        shown, first = state.get(self._param) or {}, self._parts[0]
        mine = first.state.get(first.param) or {}
        if bool(shown) != bool(mine):
            return True
        kept = [key for key, value in mine.items() if isinstance(value, LazyTensor)]
        return any(shown.get(key) is not self._stand_ins.get(key) for key in kept)

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


def numbers_of(state: State) -> State:
    """Returns the state values outside the tiers, as they are now."""
    return {k: copied(v) for k, v in state.items() if not isinstance(v, LazyTensor)}
