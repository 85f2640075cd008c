"""Weights that HBM has no room for at all: kernels read them where they lie, in DRAM.

A head of 250,000 tokens may have a third of a small model's bytes. Where HBM is less than that,
no copy of it fits, but a kernel reaches page-locked memory over the bus: the same kernel, with the
same bits, as slow as the copy for a few tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tiermem.core.block import Tier
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.group import Group
from tiermem.nn.groups.inplace import no_room
from tiermem.nn.groups.pointing import ORDINARY
from tiermem.nn.wrap.scope import CallInterceptor, Scope
from tiermem.runtime.manager import BlockManager

_KINDS = (nn.Linear, nn.Embedding)
_item = dict.get  # a name is looked at, and nothing brought up for it


class InPlaceInterceptor(CallInterceptor):
    """Holds nothing: operations of a module's forward on its weights read them in DRAM.

    See :class:`tiermem.nn.groups.away.InPlace`.
    """

    __slots__ = ("_entries",)

    def __init__(self, module: nn.Module, scope: Scope) -> None:
        """Finds the weights; see :func:`can_be_read_in_place`."""
        super().__init__(module, scope)
        names: dict[str, Any] = module.__dict__["_parameters"]
        by_param = {id(entry.param): entry for entry in scope.groups[0].entries}
        self._entries: dict[str, Entry] = {
            name: by_param[id(param)] for name, param in dict.items(names) if param is not None
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module.

        Raises:
            CapacityError: If gradients are taken: of the weights, or of what is put in.
        """
        if self._manager.gate.unsure:
            self.runtime.repair()
        if not torch.is_grad_enabled() or not self._is_its_own():
            return self.inner(*args, **kwargs)
        params = [entry.param for entry in self._entries.values()]
        if any(_takes_gradients(value) for value in (*params, *args, *kwargs.values())):
            raise no_room(self._manager, self._groups[0])
        with torch.no_grad():
            return self.inner(*args, **kwargs)

    def _is_its_own(self) -> bool:
        """Whether the module has its own weights in DRAM: not others, as in ``functional_call``."""
        names, entries = self.module.__dict__["_parameters"], self._entries
        return all(
            _item(names, name) is entry.param for name, entry in entries.items()
        ) and not any(entry.materialized for entry in entries.values())


def _takes_gradients(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


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
    own = {id(entry.param) for entry in group.entries}
    for module, scope in users:
        params = [p for p in dict.values(module.__dict__["_parameters"]) if p is not None]
        if not isinstance(module, _KINDS) or len(scope.groups) != 1:
            return False
        if any(module.children()) or not all(id(param) in own for param in params):
            return False
    return manager.zero_copy.sees(group.block)
