"""Keeps a model's tensors from before it was wrapped, to undo an interrupted wrap."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tiermem.core.block import Role
from tiermem.nn.groups.away import group_of
from tiermem.nn.groups.inspect import owners

if TYPE_CHECKING:
    from tiermem.nn.groups.entry import Member
    from tiermem.nn.groups.group import Group
    from tiermem.nn.wrap.wrapped import WrappedModel

_MISSING = object()


class Originals:
    """The tensors of some groups, and some names of some modules, in their present state.

    It keeps the tensors' own memory, so drop it once the wrap is complete.
    """

    def __init__(
        self, groups: Iterable[Group], modules: Iterable[nn.Module], names: Iterable[str]
    ) -> None:
        """Notes everything; changes nothing.

        Args:
            groups: Groups whose tensors will be pointed at their blocks.
            modules: Modules in whose dictionaries names will be replaced.
            names: Those names.
        """
        groups = list(groups)
        self._shells = [shell for group in groups for shell in group.shells]
        members = [m for g in groups for m in (*g.entries, *g.buffers, *g.carried)]
        self._tensors: list[tuple[Member, torch.Tensor, Any]] = [
            (member, member.tensor.detach(), member.tensor.grad) for member in members
        ]
        self._names = [
            (m.__dict__, name, m.__dict__.get(name, _MISSING)) for m in modules for name in names
        ]

    def restore(self) -> None:
        """Restores everything; can be called again if interrupted."""
        for names, name, value in self._names:
            if value is _MISSING:
                names.pop(name, None)
            else:
                names[name] = value
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for member, data, grad in self._tensors:
                member.materialized = True
                member.tensor.grad = None
                member.point(data, member.kind)
                member.tensor.grad = grad
                group_of.pop(id(member.tensor), None)
                owners.pop(member.tensor, None)
        for shell in self._shells:
            group_of.pop(id(shell.param), None)
            shell.give_back()


def undo_wrap(wrapped: WrappedModel) -> None:
    """Undoes a wrap that an exception interrupted anywhere; can be called again."""
    manager, runtime = wrapped.runtime.manager, wrapped.runtime
    manager.gate.guard()
    runtime.models.pop(id(wrapped.model), None)
    if wrapped.before is not None:
        wrapped.before.restore()
    runtime.backward.incoming.forget(wrapped.entries)
    runtime.grads.forget(wrapped.entries)
    runtime.remove(wrapped.groups)
    with manager.lock:
        known = {block_id for model in runtime.models.values() for block_id in model.blocks()}
        kinds = (Role.PARAM, Role.BUFFER)
        ours = [r for r in manager.parts.table if r.block.role in kinds and r.block.id not in known]
        for record in ours:  # also blocks created last, which no group has yet
            manager.parts.holders.pop(record.block.id, None)
            record.leases = 0
        manager.remove_blocks([record.block for record in ours])
    runtime.models.wrapping = None
