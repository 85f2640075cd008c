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
"""Where ``torch.func.functional_call`` puts other tensors in a module's, for one call."""
_FUNCTIONS = "torch.nn.utils.parametrize"
"""Where a function of a parameter is put in its place; peft's ``target_parameters`` do in calls."""

_REMOVERS = {f"torch.nn.utils.{name}" for name in ("prune", "weight_norm", "spectral_norm")}
"""Where functions of a parameter that hooks put in its place are taken out again."""

_item = dict.__getitem__  # every use of a weight may come by: a name is found sooner than super()


class HeldDict(dict[str, Any]):
    """A module's ``_parameters`` or ``_buffers`` while the block of all its names is held.

    Looking a name up is torch's own code then: it happens a dozen times in every layer.
    """

    def __init__(self, plain: dict[str, Any], groups: dict[str, Group], lender: Lender) -> None:
        """Copies ``plain``.

        Args:
            plain: The dictionary it takes the place of.
            groups: The group of each managed name.
            lender: Brings blocks up that are not held.
        """
        super().__init__(plain)
        self.groups = groups
        self.lender = lender
        self.behind: dict[str, Any] = {}  # parameters that are out, with functions in their place

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
        """Removes a name that is not managed, or is a buffer's."""
        if name in self.groups:
            self._let_go(name)
        return super().pop(name, *default)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Sets several names; torch's own would not ask whether they are managed."""
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
        """Refuses, outside of calls, to let a parameter make way for a function of it.

        Args:
            name: The parameter's, or one that is not managed.

        Raises:
            ParameterError: If it lives in the tiers.
        """
        if name in self.groups and not self.lender.here.is_in_pass():
            raise self._replaced(name)

    def _takes(self, name: str, value: Any) -> bool:
        """Whether a parameter around other tensors has taken a new one's values over.

        Libraries load their quantized weights so.
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
            del self.behind[name]  # the function in its place is gone
        elif value is None and self.lender.here.is_in_pass() and _puts_function(sys._getframe(3)):
            self.behind[name] = _item(self, name)
        elif not _is_swap(sys._getframe(2)):
            second = f"{name}_orig"  # pruning gives it this name as well, and then takes it out
            if second not in self.groups and self.get(second, self) is self.get(name):
                super().pop(second)
            raise self._replaced(name)

    def _undo(self, name: str, remover: types.FrameType) -> None:
        """Undoes what has been done of a removal by the time that it comes to a managed tensor.

        Args:
            name: Of the tensor.
            remover: The removal.
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
    """Whether a tensor is taken out for a call or put back: it is not used, and need not be there.

    Putting back must not fail for want of room, else the other call's tensors would stay.
    """
    return frame.f_globals.get("__name__") == _SWAPS


def _remover(frame: types.FrameType) -> types.FrameType | None:
    """Returns the call that takes a function of a parameter out, if one deletes a name.

    Args:
        frame: Of that call, or of the ``del`` of a module's attribute in it.
    """
    if frame.f_code.co_name == "__delattr__" and frame.f_back is not None:
        frame = frame.f_back
    known = frame.f_globals.get("__name__") in _REMOVERS and frame.f_code.co_name == "remove"
    return frame if known else None


def _puts_function(frame: types.FrameType) -> bool:
    """Whether a parameter makes way for a function of it, which uses it as any other code does."""
    return frame.f_globals.get("__name__") == _FUNCTIONS


class TieredDict(HeldDict):
    """A :class:`HeldDict` whose block is not held, or that has names of several blocks.

    Looking a name up fetches its block. So a parameter that is used outside its own module's call
    (``F.linear(x, self.embedding.weight)``) is there as well. A group changes the class of its
    dictionaries when it is held and when it is let go. Once several threads use the block, it is
    one of these while it is held, too: the thread that looks may be another than those that hold.
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
                return _item(self, name)  # it points at its block
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
