"""Loading a state dict: checks before anything is loaded, and refills blocks that are lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tiermem.errors import CheckpointError, StorageError

if TYPE_CHECKING:
    from tiermem.nn.groups.group import Group


def check_state(module: nn.Module, state: Any, strict: bool = True, assign: bool = False) -> None:
    """Refuses a state dict whose tensors have other shapes than the module's.

    Args:
        module: What is to be loaded.
        state: As given to ``load_state_dict``, like the rest.
        strict: As torch has it; missing and unexpected names are checked by torch.
        assign: Not possible here.

    Raises:
        CheckpointError: Naming the first tensor that differs.
    """
    if assign:
        raise CheckpointError(
            "load_state_dict(assign=True) would replace tensors that live in the tiers; leave "
            "assign out, the values are copied in"
        )
    if not isinstance(state, Mapping):
        return
    for name, part in module.named_modules():
        if part._load_state_dict_pre_hooks or not _loads_plainly(part):
            continue  # it may reshape what it is given
        for own, tensor in [*part._parameters.items(), *part._buffers.items()]:
            key = f"{name}.{own}" if name else own
            value = state.get(key)
            if tensor is None or not isinstance(value, torch.Tensor):
                continue
            if value.shape != tensor.shape and not (tensor.dim() == 0 and value.numel() == 1):
                raise CheckpointError(
                    f"the checkpoint's {key!r} has shape {tuple(value.shape)}, the model's has "
                    f"{tuple(tensor.shape)}; nothing was loaded"
                )


def _loads_plainly(module: nn.Module) -> bool:
    """Whether a module takes its state as torch's own modules do."""
    return type(module)._load_from_state_dict.__module__.startswith("torch.")


def given_values(module: nn.Module, state: Any) -> dict[int, torch.Tensor]:
    """Returns a state dict's value for each tensor of a module, by the tensor's id."""
    found: dict[int, torch.Tensor] = {}
    if not isinstance(state, Mapping):
        return found
    for name, part in module.named_modules():
        if part._load_state_dict_pre_hooks or not _loads_plainly(part):
            continue  # it may transform its values
        for own, tensor in [*part._parameters.items(), *part._buffers.items()]:
            value = state.get(f"{name}.{own}" if name else own)
            if tensor is not None and isinstance(value, torch.Tensor):
                found[id(tensor)] = value
    return found


def hold_or_give(group: Group, given: Mapping[int, torch.Tensor]) -> None:
    """Holds a group; a block that its disk has lost is filled with what is given first.

    Args:
        group: Tensors of a block.
        given: Values by the id of each tensor, of its shape.

    Raises:
        StorageError: If the block cannot be read, and is not given as a whole.
    """
    try:
        group.hold()
    except StorageError:
        if not _give_anew(group, given):
            raise
        group.hold()


def _give_anew(group: Group, given: Mapping[int, torch.Tensor]) -> bool:
    """Fills a block without reading it: all of it, or returns False."""
    members = [*group.entries, *group.buffers]
    if any(member.materialized or id(member.tensor) not in given for member in members):
        return False
    manager, block = group.manager, group.block
    manager.discard(block)
    slot = manager.acquire(block)
    try:
        with torch.inference_mode(False), torch.no_grad():
            for member in members:
                view = slot.views[member.index]
                view.copy_(given[id(member.tensor)].reshape(view.shape))
    except BaseException:
        manager.release(block)
        manager.discard(block)
        raise
    manager.release(block, dirty=True)
    return True
