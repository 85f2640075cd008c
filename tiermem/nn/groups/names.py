"""Dictionaries that replace a module's ``_parameters`` and ``_buffers`` while it is wrapped."""

from __future__ import annotations

import sys
import types
from copy import deepcopy
from threading import get_ident
from typing import TYPE_CHECKING, Any

from tiermem.core.block import Role
from tiermem.errors import ParameterError
from tiermem.nn.compat.fastpaths import only_asks
from tiermem.nn.groups.above import Lender
from tiermem.nn.groups.pickled import as_pickled

if TYPE_CHECKING:
    from tiermem.nn.groups.group import Group

_SWAPS = "torch.nn.utils._named_member_accessor"
"""Module in which ``torch.func.functional_call`` swaps a module's tensors for one call."""
_FUNCTIONS = "torch.nn.utils.parametrize"
"""Module that replaces parameters by functions of them; peft's ``target_parameters`` use it."""

_REMOVERS = {f"torch.nn.utils.{name}" for name in ("prune", "weight_norm", "spectral_norm")}
"""Modules that remove the functions of parameters that hooks compute."""

_item = dict.__getitem__  # faster than super(), for every use of a weight


class HeldDict(dict[str, Any]):
    """A module's ``_parameters`` or ``_buffers`` while the block of all its names is held.

    Look-ups, of which every layer makes a dozen, then use the built-in code of ``dict``.
    """

    def __init__(self, plain: dict[str, Any], groups: dict[str, Group], lender: Lender) -> None:
        """Copies ``plain``.

        Args:
            plain: The dictionary that it replaces.
            groups: The group of each managed name.
            lender: Fetches blocks that are not held.
        """
        super().__init__(plain)
        self.groups = groups
        self.lender = lender
        self.behind: dict[str, Any] = {}  # parameters that are replaced by functions

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self.groups and value is not self.get(name):
            if self._takes(name, value):
                return
            self._let_go(name, value)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        if name in self.groups:
            self._let_go(name)
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        """Removes a name that is not managed, or a buffer."""
        if name in self.groups:
            self._let_go(name)
        return super().pop(name, *default)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Sets several names; the built-in method would not check whether they are managed."""
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __ior__(self, other: Any) -> HeldDict:  # type: ignore[override, misc]
        self.update(other)
        return self

    def clear(self) -> None:
        """Removes all names, unless one is managed."""
        for name in [*self]:
            del self[name]

    def popitem(self) -> tuple[str, Any]:
        """Removes the last name, unless it is managed."""
        if not self:
            return super().popitem()  # raises
        name = next(reversed(self))
        return name, self.pop(name)

    def refuse_outside(self, name: str) -> None:
        """Refuses, outside of calls, to replace a parameter by a function of it.

        Args:
            name: Name of the parameter, or one that is not managed.

        Raises:
            ParameterError: If it lives in the tiers.
        """
        if name in self.groups and not self.lender.here.is_in_pass():
            raise self._replaced(name)

    def _takes(self, name: str, value: Any) -> bool:
        """Whether a parameter that wraps other tensors has copied the values of a new one.

        Libraries load their quantized weights in this way.
        """
        group = self.groups[name]
        shell = group.shell_of(self.get(name))
        if shell is None or _is_swap(sys._getframe(2)):
            return False
        group.hold()
        taken = False
        try:
            taken = shell.take(value)
        finally:
            group.let_go(dirty=taken)
        return taken

    def _let_go(self, name: str, value: Any = None) -> None:
        """Handles a new tensor for a name: a buffer's may change (``self.mean = mean + x``)."""
        if value is None and (remover := _remover(sys._getframe(2))) is not None:
            self._undo(name, remover)
            raise self._replaced(name)
        if self.groups[name].block.role is not Role.PARAM:
            del self.groups[name]
        elif value is not None and self.behind.get(name) is value:
            del self.behind[name]  # the function that replaced it is gone
        elif value is None and self.lender.here.is_in_pass() and _puts_function(sys._getframe(3)):
            self.behind[name] = _item(self, name)
        elif not _is_swap(sys._getframe(2)):
            second = f"{name}_orig"  # pruning adds this name, too, and then removes it
            if second not in self.groups and self.get(second, self) is self.get(name):
                super().pop(second)
            raise self._replaced(name)

    def _undo(self, name: str, remover: types.FrameType) -> None:
        """Undoes what a removal has done before it comes to a managed tensor.

        Args:
            name: Name of the tensor.
            remover: The call that removes it.
        """
        here, group = remover.f_locals, self.groups[name]
        hook = here["self"]
        shown = getattr(hook, "_tensor_name", None) or hook.name
        here["module"].__dict__.setdefault(shown, here["weight"])
        slot, member = group.pointing.slot, group.pointing.member_of(_item(self, name))
        if slot is not None and member is not None and "orig" in here:  # it was given other data
            group.part(member.tensor, member.index, slot.views[member.index])

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        # a copied module is an ordinary one: a plain dictionary of ordinary tensors
        copied: dict[str, Any] = {}
        for name, value in self.items():
            group = self.groups.get(name)
            if group is not None and id(value) not in memo:
                group.copy_into(memo)
            copied[name] = deepcopy(value, memo)
        return copied

    def __reduce__(self) -> Any:
        pickled = [(name, as_pickled(value, self.groups.get(name))) for name, value in self.items()]
        return dict, (), None, None, iter(pickled)

    def _replaced(self, name: str) -> ParameterError:
        return ParameterError(
            f"{name!r} of block {self.groups[name].block.name!r} lives in the tiers and cannot be "
            "replaced or removed behind the manager's back; change its values inside "
            "`with tier.materialize(...)`; what puts other tensors in its place (weight_norm, "
            "pruning, another library's offloading) belongs before tier.wrap, or after "
            "tier.unwrap(module); a model has either FSDP or tiers"
        )


def _is_swap(frame: types.FrameType) -> bool:
    """Whether a tensor is only swapped out or in for a call, so that its block is not needed.

    Swapping it in must not fail for lack of room, or the tensors of the call would stay.
    """
    return frame.f_globals.get("__name__") == _SWAPS


def _remover(frame: types.FrameType) -> types.FrameType | None:
    """Returns the call that removes a function of a parameter, if one is deleting a name.

    Args:
        frame: Frame of that call, or of the ``del`` of a module's attribute in it.
    """
    if frame.f_code.co_name == "__delattr__" and frame.f_back is not None:
        frame = frame.f_back
    known = frame.f_globals.get("__name__") in _REMOVERS and frame.f_code.co_name == "remove"
    return frame if known else None


def _puts_function(frame: types.FrameType) -> bool:
    """Whether a parameter is replaced by a function of it, which uses it like any other code."""
    return frame.f_globals.get("__name__") == _FUNCTIONS


class TieredDict(HeldDict):
    """A :class:`HeldDict` whose block is not held, or that has names of several blocks.

    Looking up a name fetches its block, so that a parameter can be used outside its own module's
    call (``F.linear(x, self.embedding.weight)``). A group changes the class of its dictionaries
    when it is held and when it is released. Once several threads use the block, the class stays
    this one, as a thread that does not hold the block may look up a name.
    """

    def __getitem__(self, name: str) -> Any:
        group = self.groups.get(name)
        held = group is not None and group.holds and group.is_held_here()
        if (
            group is not None
            and (not held or group.pointing.veiled)
            and (caller := sys._getframe(1).f_back) is not None
            and only_asks(caller)
        ):
            plain = group.pointing.plain_of(_item(self, name))
            if plain is not None:
                return plain
        if group is not None and not held:
            rows, lender = group.pointing.rows, self.lender
            if not rows and group.soft and group.apart and lender.here.inside:
                return _item(self, name)  # it points at its block already
            user = sys._getframe(1)
            where = user.f_globals.get("__name__")
            if where != _SWAPS:  # _is_swap, in line
                if where in _REMOVERS and (remover := _remover(user)) is not None:
                    self._undo(name, remover)  # before it gives the weight other data
                    raise self._replaced(name)
                if rows and name in (mine := rows.get(get_ident(), {})):
                    return mine[name]
                lender.note_apart(group)
                if not (group.holds or (group.soft and lender.here.inside)):
                    lender.demand(group)
        return _item(self, name)
