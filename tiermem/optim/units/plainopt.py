"""The plain torch optimizer of one unit, and its state between steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tiermem.core.alike import all_are, all_none, all_same
from tiermem.errors import StepError
from tiermem.nn.tensors.lazy import LazyTensor, Ways, flush, forget, refresh
from tiermem.optim.rules.separable import Make, copied, settings_of
from tiermem.optim.rules.torchsteps import states_of
from tiermem.optim.units.places import Place, part_exchanged
from tiermem.runtime.memory.slots import Slot

if TYPE_CHECKING:
    from tiermem.nn.passes.runtime import ModuleRuntime
    from tiermem.optim.units.unit import Shown, State, StepUnit

_kept = attrgetter("_kept")


class Settled(NamedTuple):
    """The tensors of a state that a step has left in their places, by columns.

    Attributes:
        numbers: Numbers of the members.
        keys: Keys of the tensors, in the state of the member.
        places: Their numbers in the block.
        stand_ins: Their stand-ins between steps.
    """

    numbers: Sequence[int] = ()
    keys: Sequence[str] = ()
    places: Sequence[int] = ()
    stand_ins: Sequence[LazyTensor] = ()


_NOTHING = Settled()


class PlainOptimizer:
    """Creates the plain optimizer of a unit, and keeps its state in the unit's block between steps.

    Attributes:
        make: Creates the plain optimizer.
        places: Where the unit's block has each tensor of the state.
        private: Whether a step writes settings of its group in place, so that it gets copies.
        numbers: The numbers of the user's groups, for those of the plain optimizer.
        settled: The tensors of the state, once a step has left all of them in their places.
    """

    def __init__(self, unit: StepUnit, make: Make) -> None:
        """Creates no optimizer yet; the state gets a home later."""
        self.make = make
        self.places: list[Place] = []
        self.private = False
        self._unit = unit
        self._members = unit.members
        self._optimizer: torch.optim.Optimizer | None = None
        self._owns: list[torch.Tensor] = []  # its tensor for each member
        self._placed: list[tuple[int, Place]] = []  # and the number of its member
        self._carried: list[tuple[torch.Tensor, State]] = []
        self._stand_ins: dict[int, LazyTensor] = {}
        # references to the state itself are counted, so it is not stored
        self.settled = _NOTHING
        self.numbers = list(dict.fromkeys(number for _, number in unit.members))

    @property
    def is_settled(self) -> bool:
        """Whether all of the state is in its places, as after most steps."""
        return bool(self.settled.keys)

    def owns(self) -> list[torch.Tensor]:
        """Returns the tensor that the plain optimizer gets for each member, in order."""
        return self._owns or [self._unit.own(param) for param, _ in self._members]

    def stored_state(self) -> list[tuple[State | None, Place]]:
        """Returns, for each tensor of its state, the state of that parameter, and its place.

        The former is the plain optimizer's state of the parameter, None if it has none yet.
        """
        if self._optimizer is None:
            kept = {id(param): state for param, state in self._carried}
            return [(kept.get(id(place.param)), place) for place in self.places if kept]
        states = self.states()
        return [(states[number], place) for number, place in self._placed]

    def carry(self) -> None:
        """Sets the state aside for a plain optimizer that will replace this one."""
        if self._optimizer is not None:
            kept = zip(self._members, self.states(), strict=True)
            self._carried = [(param, state) for (param, _), state in kept if state]
            by_own = self._optimizer.state
            self.settled = _NOTHING
            self._optimizer = None  # from here on the carried state is valid
            self._owns = []
            by_own.clear()  # it has one owner

    def _take_along(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives a new plain optimizer the state of its predecessor."""
        for param, state in self._carried:
            settings = optimizer.param_groups[0]
            there = self._unit.host is None and (
                settings.get("fused") or settings.get("capturable")
            )
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].to(param.device if there else "cpu")
            optimizer.state[self._unit.own(param)] = state

    def optimizer_for(self, groups: Sequence[dict[str, Any]] | None) -> torch.optim.Optimizer:
        """Returns the plain optimizer of this unit, with the settings of ``groups`` if given."""
        if self._optimizer is None:
            if groups is None:
                raise RuntimeError(f"{self._unit.name}: no optimizer yet")
            make = self.make
            with torch.enable_grad():
                made = make(
                    [
                        {
                            **settings_of(groups[number]),
                            "params": [self._unit.own(p) for p, n in self._members if n == number],
                        }
                        for number in self.numbers
                    ]
                )
            number_of = {id(param): number for number, (param, _) in enumerate(self._members)}
            self._placed = [(number_of[id(place.param)], place) for place in self.places]
            self._take_along(made)
            self._owns = [self._unit.own(param) for param, _ in self._members]
            self._optimizer, self._carried = made, []
        if groups is None:
            return self._optimizer
        for mine, number in zip(self._optimizer.param_groups, self.numbers, strict=True):
            settings = groups[number]
            settings = settings_of(settings) if "params" in settings else settings
            settings = copied(settings) if self.private else settings
            if self._unit.host is not None and "fused" in mine:
                settings = {**settings, "fused": mine["fused"]}  # the host's own kernel is kept
            mine.update(settings)  # in one call, which cannot be interrupted
        return self._optimizer

    def attach(self, slot: Slot | None) -> None:
        """Points the state at its slot, if there is state already."""
        if slot is None:
            return
        views = slot.views
        settled = self.settled
        owns = self.settled_states()
        if owns and all_same(map(dict.get, owns, settled.keys), settled.stand_ins):
            any(map(dict.__setitem__, owns, settled.keys, map(views.__getitem__, settled.places)))
            return
        for state, place in self.stored_state():
            if state is not None and isinstance(state.get(place.key), LazyTensor):
                plain = place.shell is None
                state[place.key] = views[place.first] if plain else place.over(views)

    def take_in(self, runtime: ModuleRuntime, slot: Slot | None, state: State) -> list[Shown]:
        """Copies new state tensors into the slot, and shows the state in the tiered optimizer's.

        Returns:
            The values for views of the stand-ins.
        """
        states = self.states()
        shown = self._store_new(runtime, slot, states)
        self._publish(state, states)
        return shown

    def _store_new(
        self, runtime: ModuleRuntime, slot: Slot | None, states: Sequence[Any]
    ) -> list[Shown]:
        shown: list[Shown] = []
        if slot is None or self._unit.block is None:
            return shown
        views, stand_ins = slot.views, self._stand_ins
        if self._is_as_before(views, states, shown):
            return shown
        self.settled = _NOTHING
        part_exchanged([(states[number], place) for number, place in self._placed], views)
        settled: list[tuple[int, str, int, LazyTensor]] = []
        for number, place in self._placed:
            own = states[number]
            value = own.get(place.key) if own is not None else None
            stand_in = stand_ins.get(place.first)
            if (
                stand_in is not None
                and own is not None
                and value is views[place.first]
                and place.shell is None
                and not stand_in._shelled
                and stand_in._dtype is value.dtype
            ):
                own[place.key] = stand_in
                settled.append((number, place.key, place.first, stand_in))
                if stand_in._kept is not None:
                    shown.append((stand_in, value))
                continue
            if own is None or not isinstance(value, torch.Tensor) or isinstance(value, LazyTensor):
                continue
            new = value is not views[place.first] and not place.is_over(value, views)
            if new:
                if not place.put(value, views):
                    continue  # it became something else: it stays in ordinary memory
                forget(self._stand_ins.get(place.first))  # its views show the former one
            own[place.key] = stand_in = self.stand_in(runtime, place, value.dtype)
            if stand_in._kept is not None:
                shown.append((stand_in, place.over(views) if new else value))
        if settled and len(settled) == len(self._placed):
            self.settled = Settled(*zip(*settled, strict=True))
        return shown

    def _is_as_before(
        self, views: Sequence[torch.Tensor], states: Sequence[Any], shown: list[Shown]
    ) -> bool:
        """Restores the stand-ins; returns whether nothing is new, as after most steps."""
        settled = self.settled
        owns = self.settled_states(states)
        values = [*map(views.__getitem__, settled.places)] if owns else []
        if not (owns and all_same(map(dict.get, owns, settled.keys), values)):
            return False
        any(map(dict.__setitem__, owns, settled.keys, settled.stand_ins))
        if not all_none(map(_kept, settled.stand_ins)):
            found = zip(settled.stand_ins, values, strict=True)
            shown += [(stand_in, value) for stand_in, value in found if stand_in._kept is not None]
        return True

    def settled_states(self, states: Sequence[Any] | None = None) -> list[Any]:
        """Returns the state dict that has each settled tensor; empty if any tensor was replaced.

        Args:
            states: The state of each member, if the caller has it.
        """
        settled = self.settled
        if not settled.keys:
            return []
        states = self.states() if states is None else states
        owns = [*map(states.__getitem__, settled.numbers)]
        return owns if all_are(map(type, owns), dict) else []

    def publish(self, state: State) -> None:
        """Shows the state in the tiered optimizer's."""
        self._publish(state, self.states())

    def _publish(self, state: State, states: Sequence[Any]) -> None:
        for (param, _), kept in zip(self._members, states, strict=True):
            if kept is not None:
                state[param] = kept

    def detach(
        self,
        runtime: ModuleRuntime,
        slot: Slot | None,
        state: State,
    ) -> None:
        """Copies new state tensors into the slot and leaves lazy stand-ins instead."""
        for stand_in, value in self.take_in(runtime, slot, state):
            refresh(stand_in, value)

    def is_viewed(self) -> bool:
        """Whether users may have a view of the state."""
        return not all_none(map(_kept, self._stand_ins.values()))

    def flush(self) -> None:
        """Stores what was written through views of the state."""
        for stand_in in self._stand_ins.values() if self.is_viewed() else ():
            if stand_in._kept is not None:
                flush(stand_in)

    def stand_in(self, runtime: ModuleRuntime, place: Place, dtype: torch.dtype) -> LazyTensor:
        """Returns the stand-in for a tensor of the state between its uses.

        It is the same object every time, and always shows the present state.
        """
        found = self._stand_ins.get(place.first)
        shelled = place.shell is not None
        if found is not None and found._dtype is dtype and found._shelled is shelled:
            return found
        if self._unit.block is None:
            raise RuntimeError(f"{self._unit.name}: no state")
        ways = Ways(
            torch.Size(place.shape),
            dtype,
            runtime.manager.parts.device,
            partial(self._load, runtime, place),
            partial(self._store, runtime, place),
        )
        found = self._stand_ins[place.first] = ways.stand_in()
        found._shelled = shelled
        return found

    def load(self, runtime: ModuleRuntime, key: str) -> torch.Tensor:
        """Returns a copy of a value in the state of its only parameter, by key."""
        return self._load(runtime, self._by_key(key))

    def store(self, runtime: ModuleRuntime, key: str, value: torch.Tensor) -> None:
        """Writes a value in the state of its only parameter, by key."""
        self._store(runtime, self._by_key(key), value)

    def _by_key(self, key: str) -> Place:
        return next(place for place in self.places if place.key == key)

    def _load(self, runtime: ModuleRuntime, place: Place) -> torch.Tensor:
        if self._unit.block is None:
            raise RuntimeError(f"{self._unit.name}: no state")
        self._unit.catch_up()
        slot = runtime.manager.acquire(self._unit.block)
        try:
            with torch.no_grad():
                return place.copy(slot.views)
        finally:
            runtime.manager.release(self._unit.block)

    def _store(self, runtime: ModuleRuntime, place: Place, value: torch.Tensor) -> None:
        if self._unit.block is None:
            raise RuntimeError(f"{self._unit.name}: no state")
        self._unit.catch_up()
        slot = runtime.manager.acquire(self._unit.block)
        self.settled = _NOTHING
        try:
            with torch.no_grad():
                if not place.put(value, slot.views):
                    raise StepError(
                        f"{place.name!r}: a state of the class {type(value).__name__} cannot be "
                        "kept where another was; load it with load_state_dict()"
                    )
        finally:
            runtime.manager.release(self._unit.block, dirty=True)

    def states(self) -> list[Any]:
        """Returns the plain optimizer's state of each member, None if it has none."""
        if self._optimizer is None:
            return [None for _ in self._members]
        return states_of(self._optimizer.state, self.owns())
