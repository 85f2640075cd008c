"""Methods that an optimizer class adds to torch's, and counters in its parameter groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from tiermem.errors import StepError
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.optim.rules.separable import Counter, Make, Nature, settings_of
from tiermem.optim.rules.trial import trial
from tiermem.optim.units.parted import PartedUnit
from tiermem.optim.units.unit import State, StepUnit

Check = Callable[[dict[str, Any], str, Callable[[torch.optim.Optimizer], None]], Any]


class Counts:
    """Keeps the counters of a class in its parameter groups, as one optimizer over all would.

    Each unit is stepped with the former settings; after the step they advance once.
    """

    def __init__(self) -> None:
        """Starts without groups."""
        self._counters: dict[int, tuple[Counter, bool]] = {}
        self._private: set[int] = set()
        self._uncounted: set[int] = set()
        self._with_gradients: set[int] = set()

    def add(self, number: int, make: Make, nature: Nature) -> None:
        """Adds a group.

        Args:
            number: Number of the group.
            make: Makes an optimizer of the class.
            nature: What trial steps with the group's settings have shown.
        """
        kind = nature.dims, nature.dtype, nature.device
        counter = Counter(make, *kind, sparse=nature.sparse)
        self._counters[number] = counter, nature.counts
        if nature.private:
            self._private.add(number)
        if not nature.counted:
            self._uncounted.add(number)

    def forget(self, number: int) -> None:
        """Forgets a group that is removed again."""
        self._counters.pop(number, None)
        self._private.discard(number)
        self._uncounted.discard(number)

    def prepare(self, units: Sequence[StepUnit]) -> None:
        """Marks units whose class writes settings in place, so that they step with copies.

        Also marks those whose class writes weights without updating torch's version counters.
        """
        for unit in units:
            unit.counted.uncounted |= self._uncounted
            unit.plain.private |= any(number in self._private for _, number in unit.members)

    def note(self, units: Sequence[StepUnit], made: Collection[int]) -> None:
        """Notes which groups have gradients, when a step begins.

        Args:
            units: All units of the optimizer.
            made: Ids of those that were stepped inside backward: their gradients are gone.
        """
        if any(counts for _, counts in self._counters.values()):
            self._with_gradients = {
                number
                for unit in units
                for param, number in unit.members
                if param.grad is not None or id(unit) in made
            }

    def after_step(
        self, before: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]]
    ) -> None:
        """Advances the counters in the groups; called again, it gives the same result.

        Args:
            before: Settings with which the step was performed.
            groups: The parameter groups, which are updated.
        """
        for number, (counter, counts) in self._counters.items():
            if counts:
                given = number in self._with_gradients
                with trial():
                    changed = counter.after(settings_of(before[number]), has_gradients=given)
                groups[number].update(changed)

    def after_call(
        self, groups: Sequence[dict[str, Any]], call: Callable[[torch.optim.Optimizer], None]
    ) -> None:
        """Updates the groups' settings as a method of the class changes them."""
        for number, (counter, _) in self._counters.items():
            with trial():
                settings = settings_of(groups[number])
                changed = counter.after(settings, has_gradients=False, method=call)
            groups[number].update(changed)


class Methods:
    """Calls methods of the class for each unit's plain optimizer, on its weights and state.

    If an error ends a call, it has been made for some units only. Calling the same method again
    continues there; until then other methods are refused.
    """

    def __init__(self, cls: type[torch.optim.Optimizer], check: Check, counts: Counts) -> None:
        """Starts without an unfinished call.

        Args:
            cls: The class.
            check: Raises unless a method, by group and name, may be called for one parameter
                after the other.
            counts: The counters of the class.
        """
        self._cls, self._check, self._counts = cls, check, counts
        self._tried: set[str] = set()
        self._begun = ""
        self._left: list[StepUnit] = []

    def is_begun(self, name: str) -> bool:
        """Whether a call of that method is unfinished."""
        return bool(self._left) and self._begun == name

    def refuse_if_begun(self, what: str) -> None:
        """Refuses something else while a call is unfinished.

        Raises:
            StepError: If one is.
        """
        if self._left:
            raise StepError(
                f"{what} while optimizer.{self._begun}() is unfinished, with {len(self._left)} "
                f"units to go: call optimizer.{self._begun}() again, it goes on where it stopped"
            )

    def call(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        runtime: ModuleRuntime,
        units: Sequence[StepUnit],
        groups: Sequence[dict[str, Any]],
        state: State,
    ) -> None:
        """Calls a method for each unit.

        Args:
            name: Name of the method.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            runtime: The modules' runtime.
            units: All units of the optimizer.
            groups: The parameter groups.
            state: The tiered optimizer's state, to be kept up to date.

        Raises:
            StepError: If it cannot be called unit by unit, or another call is unfinished.
            StorageError: If the disk fails; the same call continues there.
        """
        what = f"{self._cls.__name__}.{name}()"
        if not self.is_begun(name):
            self.refuse_if_begun(f"optimizer.{name}()")

        def call(optimizer: torch.optim.Optimizer) -> None:
            if getattr(optimizer, name)(*args, **kwargs) is not None:
                raise StepError(f"{what} returns a value, which no single block has")

        if not self._left:
            self._refuse_elsewhere(what, units)
            for group in groups if name not in self._tried else ():
                if group["params"]:
                    self._check(group, what, call)
            self._tried.add(name)
            self._begun, self._left = name, list(units)
        while self._left:
            self._left[0].apply(runtime, groups, state, call)
            del self._left[0]
        self._counts.after_call(groups, call)

    def _refuse_elsewhere(self, what: str, units: Sequence[StepUnit]) -> None:
        for unit in units:
            if unit.host is not None or isinstance(unit, PartedUnit):
                raise StepError(
                    f"{what} cannot be called, as {unit.name!r} is stepped on the host or in parts:"
                    " make the optimizer with where='device'"
                )
