"""Pickling of managed tensors, as ordinary tensors with their present values.

``torch.save(model, path)`` and ``pickle`` pickle each tensor separately, and keep all objects until
they are done: as with a state dict, that is a copy of every weight in host memory. A tensor with
several references (tied weights, attributes that are weights) is one object in the pickle.
"""

from __future__ import annotations

import sys
import types
from copy import deepcopy
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tiermem.errors import REFUSALS, WrapError
from tiermem.nn.compat.quiet import unrecorded
from tiermem.nn.groups.replaced import given_in_call
from tiermem.nn.tensors.standin import StandIn

if TYPE_CHECKING:
    from tiermem.nn.groups.entry import Member
    from tiermem.nn.groups.group import Group
    from tiermem.nn.groups.shellparam import ShellParam

_TO_PROCESSES = "multiprocessing.reduction"
_FRAMES = 8
_stands: WeakValueDictionary[int, Pickled] = WeakValueDictionary()


class Pickled:
    """Replaces, in a pickle, a tensor of an ordinary class over memory of the tiers or the device.

    The pickler identifies objects by their ids, and keeps them. So there is one such object for a
    tensor as long as a pickler that has seen it exists.
    """

    __slots__ = ("__weakref__", "_group", "_tensor")

    def __init__(self, tensor: torch.Tensor, group: Group | None) -> None:
        """Copies nothing yet.

        Args:
            tensor: The tensor.
            group: Its group; None if it is not in a block.
        """
        self._tensor, self._group = tensor, group

    @classmethod
    def of(cls, tensor: torch.Tensor, group: Group | None) -> Pickled:
        """Returns the object for a tensor."""
        found = _stands.get(id(tensor))
        if found is None:
            found = _stands[id(tensor)] = cls(tensor, group)
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_processes(sys._getframe(1))
        if self._group is None:
            with unrecorded():
                copy = self._tensor.detach().to("cpu", copy=True)
            copy.__dict__.update(self._tensor.__dict__)
            return copy.requires_grad_(self._tensor.requires_grad).__reduce_ex__(protocol)
        return reduced(self._group, self._tensor, protocol)


def as_pickled(value: Any, group: Group | None) -> Any:
    """Returns the object to pickle for a value that a module has.

    Args:
        value: Any value.
        group: Its group, if it is a tensor of the tiers.

    Returns:
        The value itself, unless it is a tensor that is held now, with which its whole storage would
        be pickled. The class of a tensor that is not held defines how it is pickled.
    """
    if group is None or isinstance(value, StandIn):
        return value
    shell = group.shell_of(value)
    members = [group.pointing.member_of(value)] if shell is None else shell.members
    if any(member is None or member.materialized for member in members):
        return value
    return Pickled.of(value, group)


def reduced(group: Group, tensor: torch.Tensor, protocol: Any) -> Any:
    """Returns the reduced form of an ordinary tensor with the same values, by its own class.

    Args:
        group: The group of the tensor.
        tensor: A tensor of its block, or a parameter that wraps some.
        protocol: The protocol of the pickle.

    Raises:
        StorageError: If the block cannot be read.
    """
    try:
        shell = group.shell_of(tensor)
        made = _ordinary(group, tensor) if shell is None else _around(group, shell)
    except REFUSALS:
        raise
    except BaseException:
        group.manager.cut_short()
        raise
    return made.__reduce_ex__(protocol)


def refuse_processes(frame: types.FrameType | None) -> None:
    """Refuses pickling for another process, which would share memory with this one.

    Args:
        frame: The frame that has called the pickler.

    Raises:
        WrapError: With what to do instead.
    """
    for _ in range(_FRAMES):
        if frame is None:
            return
        if frame.f_globals.get("__name__") == _TO_PROCESSES:
            raise WrapError(
                "a wrapped model cannot be given to another process, which would have to share "
                "its weights, while they come and go here: give it copy.deepcopy(model) or "
                "model.state_dict(), or the model after tier.unwrap(model)"
            )
        frame = frame.f_back


def _around(group: Group, shell: ShellParam) -> Any:
    """Returns an ordinary parameter that wraps copies of the tensors inside, with attributes."""
    inside = {id(member.tensor): _value(group, member) for member in shell.members}
    made = shell.copy(shell.values(inside))
    given = vars(shell.param)
    vars(made).update({k: deepcopy(v) for k, v in given.items() if k not in vars(made)})
    return made


def _ordinary(group: Group, tensor: torch.Tensor) -> Any:
    """Returns an ordinary tensor of the same class, with the values and attributes."""
    member = group.pointing.member_of(tensor)
    if member is None:
        raise WrapError("this tensor is no longer one of a wrapped model")
    value = _tied(group, member, _value(group, member))
    with torch._C.DisableTorchFunctionSubclass():
        trained = tensor.requires_grad
        made: Any
        if member.kind is torch.Tensor:
            made = value.requires_grad_(trained)
        else:
            made = torch.Tensor._make_subclass(member.kind, value, trained)
    made.__dict__.update(tensor.__dict__)
    return made


def _value(group: Group, member: Member) -> torch.Tensor:
    """Returns a tensor's value: a materialized one as it is, another one copied to the host."""
    manager = group.manager
    with unrecorded():
        if member.materialized:
            return member.tensor.detach()
        with manager.lock:
            given = given_in_call(group, member)
            return manager.read_one(group.block, member.index) if given is None else given.clone()


def _tied(group: Group, member: Member, value: torch.Tensor) -> torch.Tensor:
    """Returns the value, in the memory of another tensor's value if both have the same bytes.

    Such tensors share memory in a file that ``torch.save`` writes. The memory of an earlier pickle
    is reused if it still exists and has the same bits.
    """
    alike = [m for m in group.pointing.members if m.index == member.index and not m.materialized]
    if len(alike) < 2 or member.materialized:
        return value
    storage = value.untyped_storage()
    known = group.pickled.get(member.index)
    before = None if known is None else torch.UntypedStorage._new_with_weak_ptr(known.cdata)
    if before is not None and _same(before, storage):
        place = value.storage_offset(), value.shape, value.stride()
        with unrecorded():
            return torch.empty(0, dtype=value.dtype, device="cpu").set_(before, *place)
    group.pickled[member.index] = StorageWeakRef(storage)
    return value


def _same(first: torch.UntypedStorage, second: torch.UntypedStorage) -> bool:
    """Whether two storages on the host have the same bytes."""
    if first.nbytes() != second.nbytes():
        return False
    both = [
        torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage) for storage in (first, second)
    ]
    return torch.equal(*both)
