"""The order in which an optimizer's state shows its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any

Rank = tuple[int, int]
"""The step with which a parameter first got state, and its place among those of that step."""


class StateOrder:
    """Keeps the state in the same order as torch's.

    There, parameters are added with their first step, in the order of the groups. Here units are
    stepped in another order, some later and some ahead of ``step()``. So the step with which a
    parameter is added is noted, and the state is sorted before user code can see it.
    """

    def __init__(self, state: dict[Any, Any], groups: Sequence[dict[str, Any]]) -> None:
        """Starts with the present order.

        Args:
            state: The tiered optimizer's, by parameter.
            groups: The optimizer's list of parameter groups, which may grow.
        """
        self._state = state
        self._groups = groups
        self._ranks: dict[Any, Rank] = {}
        self._steps = 0
        self._is_open = False  # whether anything was added since the state was sorted
        self._is_edited = False  # whether users may have removed something since a step
        self._whole: dict[Any, Any] = {}

    def note_edits(self) -> None:
        """Notes the order that users have left, before a step adds parameters."""
        self._put_back()
        self._is_edited = True
        if not self._is_open:
            self.note(self._state)

    def note_step(self) -> None:
        """Notes that parameters without a place are added now, after all others."""
        self._put_back()
        self._rank()
        if len(self._ranks) < sum(len(group["params"]) for group in self._groups):
            self._steps += 1
            self._is_open = True

    def note(self, params: Iterable[Any]) -> None:
        """Notes the order of all state, for example of a loaded one."""
        self._put_back()
        self._ranks = {param: (self._steps, place) for place, param in enumerate(params)}
        self._steps += 1  # what is added from now on comes after these
        self._is_open = True

    def restore(self) -> None:
        """Sorts the state; after an interruption, it or any other call continues."""
        self._put_back()
        if not self._is_open:
            return
        self._rank()
        last = self._steps + 1, 0
        found = sorted(self._state, key=lambda param: self._ranks.get(param, last))
        if not all(map(is_, found, self._state)):
            self._whole = {param: self._state[param] for param in found}
            self._state.clear()
            self._put_back()
        self._is_open = False

    def _put_back(self) -> None:
        if self._whole:  # a call was interrupted after the state was cleared
            self._state.update(self._whole)
            self._whole = {}

    def _rank(self) -> None:
        """Gives a place to parameters added since a step was noted; forgets removed ones.

        Usually none were added, and the optimizer may train few of thousands of parameters.
        """
        ranks, state = self._ranks, self._state
        if len(ranks) == len(state) and not self._is_edited:
            return
        lists = [group["params"] for group in self._groups]
        for place, param in enumerate(chain.from_iterable(lists)):
            if param not in state:
                ranks.pop(param, None)
            elif param not in ranks:
                ranks[param] = self._steps, place
        self._is_edited = False
