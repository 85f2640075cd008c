"""Which parameters of an optimizer's groups it steps at present.

torch's optimizers hold all parameters that they are given, and skip those without a
gradient. So frozen ones may be unfrozen at any time, and are trained from then on. Here state and
masters have homes, which are reserved once a parameter is trained, and not before. But if a
class creates all state in its constructor (Adagrad), frozen parameters have theirs from then on,
too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch

from tiermem.errors import StepError
from tiermem.optim.units.plan import Member
from tiermem.optim.units.unit import StepUnit


class Membership:
    """Knows which parameters have a unit, and which need one."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        """Watches parameter groups, whose list is the optimizer's own; none has a unit yet."""
        self._groups = groups
        self._taken: dict[int, int] = {}
        self._units_checked = -1
        self._checked: list[list[torch.Tensor]] = []
        self._listed: list[list[torch.Tensor]] = []
        self._idle: list[Member] = []

    def taken(self, members: Sequence[Member]) -> None:
        """Notes that parameters have units."""
        self._taken.update((id(param), number) for param, number in members)
        self._idle = [member for member in self._idle if id(member[0]) not in self._taken]

    def wanted(self, *, frozen: bool = False) -> list[Member]:
        """Returns parameters that are trained, or have a gradient, and have no unit yet.

        Args:
            frozen: Include frozen ones, for a class that creates all state in its constructor.
        """
        self.list_anew()
        if frozen:
            return list(self._idle)
        with torch._C.DisableTorchFunctionSubclass():
            return [m for m in self._idle if m[0].requires_grad or m[0].grad is not None]

    def thawed(self) -> list[Member]:
        """Returns those that are trained, of the parameters that existed last time."""
        with torch._C.DisableTorchFunctionSubclass():
            return [member for member in self._idle if member[0].requires_grad]

    def of_state(self, state_dict: dict[str, Any]) -> list[Member]:
        """Returns those without a unit for which a state dict of the same groups has state."""
        self.list_anew()
        idle = {id(param) for param, _ in self._idle}
        has = {*state_dict.get("state", ()), *state_dict.get("master", ())}
        found: list[Member] = []
        both = zip(self._groups, _groups(state_dict), strict=False)
        for number, (group, other) in enumerate(both):
            for param, name in zip(group["params"], other, strict=False):
                if id(param) in idle and name in has:
                    found.append((param, number))
        return found

    def list_anew(self) -> None:
        """Lists the parameters without a unit again, if the groups have changed."""
        lists = [list(group["params"]) for group in self._groups]
        if not _are_same(lists, self._listed):
            members = [(param, n) for n, params in enumerate(lists) for param in params]
            self._idle = [member for member in members if id(member[0]) not in self._taken]
            self._listed = lists

    def check(self, units: Sequence[StepUnit]) -> None:
        """Checks that no parameter was removed from its group, or moved, by user code.

        Raises:
            StepError: With the name of the unit that has one of them.
        """
        lists = [list(group["params"]) for group in self._groups]
        if len(units) == self._units_checked and _are_same(lists, self._checked):
            return
        number_of = {id(param): n for n, params in enumerate(lists) for param in params}
        for unit in units:
            for param, number in unit.members:
                if number_of.get(id(param)) != number:
                    raise StepError(
                        f"a parameter of {unit.name!r} is no longer in parameter group {number}: "
                        "parameters cannot be taken out of param_groups or moved between them; "
                        "freeze it with requires_grad_(False), or make a new optimizer"
                    )
        self._checked, self._units_checked = lists, len(units)

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clears gradients of parameters without a unit, or sets them to zero."""
        self.list_anew()
        with torch._C.DisableTorchFunctionSubclass():
            found = [param for param, _ in self._idle if param.grad is not None]
        for param in found:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad = param.grad.detach_().zero_()


def _are_same(first: list[list[torch.Tensor]], second: list[list[torch.Tensor]]) -> bool:
    """Whether lists have the same tensors, in the same order."""
    if list(map(len, first)) != list(map(len, second)):
        return False
    return all(map(is_, chain.from_iterable(first), chain.from_iterable(second)))


def _groups(state_dict: dict[str, Any]) -> list[list[Any]]:
    return [list(group["params"]) for group in state_dict.get("param_groups", ())]
