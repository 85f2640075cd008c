"""Weights that HBM has no room for at all: kernels read them where they lie, in DRAM.

A head of 250,000 tokens may have a third of a small model's bytes. Where HBM is less than that,
no copy of it fits, but a kernel reaches page-locked memory over the bus: the same kernel, with the
same bits, as slow as the copy for a few tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from tiermem.core.block import Tier
from tiermem.nn.compat.entrances import inside
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.group import Group
from tiermem.nn.groups.inplace import no_room
from tiermem.nn.groups.pointing import ORDINARY
from tiermem.nn.wrap.scope import CallInterceptor, Scope
from tiermem.runtime.manager import BlockManager

_KINDS = (nn.Linear, nn.Embedding)
_item = dict.get  # a name is looked at, and nothing brought up for it


class InPlaceInterceptor(CallInterceptor):
    """Has a module's call read its weights in DRAM, in passes without gradients."""

    __slots__ = ("_entries", "_made")

    def __init__(self, module: nn.Module, scope: Scope) -> None:
        """Finds the weights; see :func:`can_be_read_in_place`."""
        super().__init__(module, scope)
        names: dict[str, Any] = module.__dict__["_parameters"]
        by_param = {id(entry.param): entry for entry in scope.groups[0].entries}
        self._entries: dict[str, Entry] = {
            name: by_param[id(param)] for name, param in dict.items(names) if param is not None
        }
        self._made: tuple[Sequence[torch.Tensor], dict[str, nn.Parameter]] = ((), {})

    @property
    def manager(self) -> BlockManager:
        """Where the block is."""
        return self._manager

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, its weights standing where they lie in DRAM.

        Raises:
            CapacityError: If gradients are taken, or the bytes at home are not to be read now.
        """
        if self._manager.gate.unsure:
            self.runtime.repair()
        entries = self._entries.values()
        if any(entry.materialized for entry in entries) or not self._is_its_own():
            return self.inner(*args, **kwargs)
        found = None if torch.is_grad_enabled() else self._found(args, kwargs)
        if found is None:
            raise no_room(self._manager, self._groups[0])
        return found[0]

    def _is_its_own(self) -> bool:
        """Whether the module has its own weights: not others, as in ``functional_call``."""
        names = self.module.__dict__["_parameters"]
        return all(_item(names, name) is entry.param for name, entry in self._entries.items())

    @inside  # the calls around this one take an exception of it for the user's
    def _found(self, args: Any, kwargs: Any) -> tuple[Any] | None:
        """Calls the module; returns its result, or None where the weights cannot be read."""
        group, names = self._groups[0], self.module.__dict__

        def look(tensors: Sequence[torch.Tensor]) -> tuple[Any]:
            managed = names["_parameters"]
            names["_parameters"] = {**dict(dict.items(managed)), **self._standing(tensors)}
            try:
                result = self.inner(*args, **kwargs)
            finally:
                names["_parameters"] = managed
            if isinstance(result, torch.Tensor) and _share_memory(result, tensors):
                result = result.clone()  # nobody is to keep a view of the home
            return (result,)

        self._manager.gate.guard()  # before the lock: a forked child may find it taken for ever
        with self._manager.lock:
            zero_copy = self._manager.zero_copy
            return zero_copy.read(group.block, look, group.block.nbytes, again=True)

    def _standing(self, tensors: Sequence[torch.Tensor]) -> dict[str, nn.Parameter]:
        """Returns parameters over a block's tensors in DRAM, by their names in the module."""
        if self._made[0] is not tensors:
            with torch.inference_mode(False):
                made = {
                    name: nn.Parameter(tensors[entry.index], requires_grad=False)
                    for name, entry in self._entries.items()
                }
            self._made = tensors, made
        return self._made[1]


def can_be_read_in_place(
    group: Group, users: Iterable[tuple[nn.Module, Scope]], manager: BlockManager
) -> bool:
    """Whether all that a model does with a block, as far as is known, are calls that may read it.

    Args:
        group: Of the block.
        users: Every module whose call needs it, and its scope.
        manager: Where it is.
    """
    record = manager.record(group.block)
    if record.fixed or record.home is not Tier.DRAM or record.home_extent is None:
        return False
    if group.shells or group.buffers or group.carried or group.writes.suspect:
        return False
    if any(entry.kind not in ORDINARY for entry in group.entries):
        return False
    for module, scope in users:
        params = [p for p in dict.values(module.__dict__["_parameters"]) if p is not None]
        own = {id(entry.param) for entry in group.entries}
        if not isinstance(module, _KINDS) or len(scope.groups) != 1:
            return False
        if any(module.children()) or not all(id(param) in own for param in params):
            return False
    home = manager.parts.homes.arena.bytes_of(record.home_extent)
    return manager.parts.copy.seen(home) is not None


def _share_memory(result: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a result is a view of one of a block's tensors."""
    if result.layout is not torch.strided:
        return False
    at = result.untyped_storage().data_ptr()
    return any(at == tensor.untyped_storage().data_ptr() for tensor in tensors)
