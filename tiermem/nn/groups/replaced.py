"""Assignments of other memory to a tensor by users: ``weight.data = ...``.

The memory has to stay the block's, so the values are copied. Values with another shape, dtype,
device or strides are refused. They may come from another library that moves weights to a device for
each call; it would not find them there, and would replace trained weights by copies of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tiermem.errors import ParameterError
from tiermem.nn.groups.olddata import REPLACED
from tiermem.nn.tensors.placeholder import is_placeholder
from tiermem.runtime.base.functorch import outside_inference
from tiermem.runtime.memory.slots import Slot

if TYPE_CHECKING:
    from tiermem.nn.groups.entry import Member
    from tiermem.nn.groups.group import Group


def why_not(
    group: Group, tensor: torch.Tensor, own: torch.Tensor, value: torch.Tensor
) -> ParameterError | None:
    """Returns why the values of ``value`` cannot be copied to a tensor, or None if they can.

    Args:
        group: The tensor's group.
        tensor: A parameter or buffer in the tiers.
        own: A tensor of its shape and dtype.
        value: The value to which ``tensor.data`` was set, or will be.
    """
    what, here = named(group, tensor), group.manager.parts.device
    if value.shape != own.shape or value.dtype is not own.dtype:
        return ParameterError(
            f"{what} cannot become {tuple(value.shape)} {value.dtype} behind the manager's back, "
            f"it is {tuple(own.shape)} {own.dtype}; call tier.unwrap(module) first"
        )
    indices = {value.device.index, here.index} - {None}
    if value.device.type != here.type or len(indices) > 1:
        return ParameterError(
            f"{what} lives in the tiers of device {str(here)!r} and cannot be moved to "
            f"{str(value.device)!r} by `.data = ...`; where that is another library's offloading, "
            "use one of the two: remove its hooks, or call tier.unwrap(module) first; where only "
            f"the values are meant, use `.data.copy_(value)` or `.data = value.to({str(here)!r})`"
        )
    member = group.pointing.member_of(tensor)
    # not those of ``own``, which may be a placeholder
    strides = own.stride() if member is None else group.block.tensors[member.index].stride
    if not laid_alike(value, strides):
        return ParameterError(
            f"{what} cannot have strides {value.stride()}, its memory has {tuple(strides)}; where "
            "only the values are meant, use `.data.copy_(value)`, with which plain torch keeps its "
            "strides as well, else call tier.unwrap(module) first"
        )
    return None


def laid_alike(value: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether a tensor has the given strides; with others, torch may round differently.

    Args:
        value: The tensor.
        strides: The strides of another tensor of its shape.
    """
    shape, own = value.shape, value.stride()
    if _channels_last(shape, own) is not _channels_last(shape, strides):
        return False
    return _steps(shape, own) == _steps(shape, strides)


def _channels_last(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether torch considers strides to be channels last, which selects convolution kernels.

    Strides of dimensions with one element (those of a 1x1 convolution) count, too.
    """
    if len(shape) not in (4, 5) or 0 in shape:
        return False
    least = 0
    for n in (1, *range(len(shape) - 1, 1, -1), 0):
        if strides[n] < least or (n == 0 and least == strides[1]):
            return False
        least = strides[n] * shape[n]
    return True


def _steps(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Returns size and stride of the dimensions with more than one element, if there are two."""
    found = [(n, strides[n]) for n, size in enumerate(shape) if size > 1]
    return found if len(found) > 1 else []


def reshaped(group: Group, slot: Slot) -> ParameterError | None:
    """Returns the error about an operation that changed a tensor's form, or None.

    ``resize_``, ``t_``, ``squeeze_`` and the like change shape or strides.

    Args:
        group: The group of the tensors.
        slot: Where its block is.
    """
    with torch._C.DisableTorchFunctionSubclass():
        for member in group.pointing.members:
            if member.materialized:
                continue
            tensor, view = member.tensor, slot.views[member.index]
            if tensor.shape == view.shape and tensor.stride() == view.stride():
                continue
            if not is_placeholder(tensor):
                return why_not(group, tensor, view, tensor) or ParameterError(
                    f"{named(group, tensor)} cannot have strides {tensor.stride()}, its memory has "
                    f"{view.stride()}; call tier.unwrap(module) first"
                )
    return None


def named(group: Group, tensor: torch.Tensor) -> str:
    """Returns the name of a tensor, for messages."""
    name = getattr(group.pointing.member_of(tensor), "name", "") or "a tensor"
    return f"{name} of block {group.block.name!r}"


def bring_home(group: Group, slot: Slot) -> ParameterError | None:
    """Copies into the block the values of tensors that were given other data (``w.data = ...``).

    Args:
        group: The group of the tensors.
        slot: Where its block is.

    Returns:
        The error about one that cannot be copied, or None; that tensor keeps its former values.
    """
    refused: ParameterError | None = None
    moved: list[tuple[Member, torch.Tensor]] = []
    with outside_inference(), torch.no_grad():
        for member in group.pointing.members:
            if member.materialized:
                continue
            data, view = member.tensor.data, slot.views[member.index]
            as_it_was = data.shape == view.shape and data.stride() == view.stride()
            if is_placeholder(data) or (as_it_was and data.data_ptr() == view.data_ptr()):
                continue
            if member in group.carried:
                group.part(member.tensor, member.index, data)
                continue
            found = why_not(group, member.tensor, view, data)
            if found is None:  # one may have another's memory (``a.data, b.data = b.data, a.data``)
                inside = data.untyped_storage().data_ptr() == slot.address
                moved.append((member, data.clone() if inside else data))
                REPLACED.note(member.tensor)
            refused = refused or found
        for member, data in moved:
            view = slot.views[member.index]
            group.part(member.tensor, member.index, view)
            view.copy_(data)
    return refused


def given_in_call(group: Group, member: Member) -> torch.Tensor | None:
    """Returns the data that a tensor was given in the current call (``weight.data = ...``).

    It is copied into the block when the call ends.

    Args:
        group: The group of the tensor; the caller has the manager's lock.
        member: The tensor.

    Returns:
        The data, in host memory; None if the tensor has the block's data.
    """
    slot = group.pointing.slot
    if not group.holds or slot is None:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        data = member.tensor.data
    if is_placeholder(data) or data.data_ptr() == slot.views[member.index].data_ptr():
        return None
    return data.cpu()


def take_home(group: Group, slot: Slot) -> bool:
    """As :func:`bring_home`, after an exception anywhere.

    Returns:
        Whether values were copied.
    """
    arena = group.manager.parts.slots.arena
    base = arena.address
    found = False
    for member in group.pointing.members:
        data, view = member.tensor.data, slot.views[member.index]
        if member.materialized or is_placeholder(data):
            continue
        if base <= data.untyped_storage().data_ptr() < base + arena.capacity:
            continue
        if why_not(group, member.tensor, view, data) is None:
            view.copy_(data)
            found = True
    return found
