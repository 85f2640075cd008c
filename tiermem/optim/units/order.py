"""The order in which an optimizer's state shows its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any

Rank = tuple[int, int]
"""The step with which a parameter came in, and its place among those that came in with it."""


class StateOrder:
    """Keeps the state in the order that torch's has.

    There, parameters come in with their first step, in the order of the groups. Here units are
    stepped in another order, some later and some ahead of ``step()``. So it is noted with which
    step a parameter comes in, and the state is put in order before somebody looks at it.
    """

    def __init__(self, state: dict[Any, Any], groups: Sequence[dict[str, Any]]) -> None:
        """Starts with the order that there is.

        Args:
            state: The tiered optimizer's, by parameter.
            groups: The optimizer's list of parameter groups, which may grow.
        """
        self._state = state
        self._groups = groups
        self._ranks: dict[Any, Rank] = {}
        self._steps = 0
        self._is_open = False  # whether anything came in since the state was put in order
        self._is_edited = False  # whether users may have taken something out since a step
        self._whole: dict[Any, Any] = {}

    def note_edits(self) -> None:
        """Notes the order that users have left, before a step adds anything."""
        self._put_back()
        self._is_edited = True
        if not self._is_open:
            self.note(self._state)

    def note_step(self) -> None:
        """Notes that parameters without a place come in now, behind all others."""
        self._put_back()
        self._rank()
        if len(self._ranks) < sum(len(group["params"]) for group in self._groups):
            self._steps += 1
            self._is_open = True

    def note(self, params: Iterable[Any]) -> None:
        """Notes the order of all state, say of a loaded one."""
        self._put_back()
        self._ranks = {param: (self._steps, place) for place, param in enumerate(params)}
        self._steps += 1  # what comes in from now on is behind these
        self._is_open = True

    def restore(self) -> None:
        """Puts the state in order; cut short, it or any other call goes on."""
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
        if self._whole:  # a call was cut short where the state was cleared
            self._state.update(self._whole)
            self._whole = {}

    def _rank(self) -> None:
        """Gives a place to what has come in since a step was noted; forgets what is there no more.

        Mostly nothing has, and one may be asked to train a few of thousands of parameters.
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
