"""Weights for which HBM has no room at all: kernels read them in place, in DRAM.

A head with 250,000 tokens may have a third of a small model's bytes. If HBM is smaller than that,
no copy of it fits, but a kernel can read page-locked memory over the bus: the same kernel, with the
same bits, and for a few tokens no slower than a copy.
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
_item = dict.get  # looks a name up without fetching anything


class InPlaceInterceptor(CallInterceptor):
    """Holds no block that is in DRAM: operations of a module's forward read its weights there.

    See :class:`tiermem.nn.groups.away.InPlace`. Other tensors of the module (a bias that is shared
    with another one) are held as for any call.
    """

    __slots__ = ("_entries", "_first")

    def __init__(self, module: nn.Module, scope: Scope) -> None:
        """Finds the weights; see :func:`can_be_read_in_place`."""
        super().__init__(module, scope)
        self._first = scope.in_place[0]
        by_param = {id(entry.param): entry for group in scope.in_place for entry in group.entries}
        self._entries: dict[str, Entry] = {
            name: by_param[id(param)]
            for name, param in dict.items(module.__dict__["_parameters"])
            if id(param) in by_param
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module.

        Raises:
            CapacityError: If gradients are computed: of the weights, or of the inputs.
        """
        if self._manager.gate.unsure:
            self.runtime.repair()
        if not torch.is_grad_enabled() or not self._is_its_own():
            return self._call(args, kwargs)
        names: dict[str, Any] = self.module.__dict__["_parameters"]
        if any(map(_takes_gradients, (*dict.values(names), *args, *kwargs.values()))):
            raise no_room(self._manager, self._first, self.runtime.program)
        with torch.no_grad():
            return self._call(args, kwargs)

    def _call(self, args: Any, kwargs: Any) -> Any:
        if self._groups:
            return super().__call__(*args, **kwargs)
        return self.inner(*args, **kwargs)

    def _is_its_own(self) -> bool:
        """Whether the module has its own weights in DRAM: not so in ``functional_call``."""
        names, entries = self.module.__dict__["_parameters"], self._entries
        return all(
            _item(names, name) is entry.param for name, entry in entries.items()
        ) and not any(entry.materialized for entry in entries.values())


def _takes_gradients(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def has_params_of(module: nn.Module, group: Group) -> bool:
    """Whether a module itself, not one inside it, has parameters of a block."""
    own = {id(param) for param in dict.values(module.__dict__["_parameters"])}
    return any(id(entry.param) in own for entry in group.entries)


def has_vocabulary(owners: Iterable[nn.Module], modules: Iterable[nn.Module]) -> bool:
    """Whether a block belongs to an embedding, or a linear layer with as many rows as the largest.

    Args:
        owners: The modules that have parameters of it.
        modules: All modules of the model.
    """
    found = list(owners)
    if any(isinstance(module, nn.Embedding) for module in found):
        return True
    embeddings = [module for module in modules if isinstance(module, nn.Embedding)]
    largest = max(embeddings, key=lambda m: m.num_embeddings * m.embedding_dim, default=None)
    rows = {module.out_features for module in found if isinstance(module, nn.Linear)}
    return largest is not None and largest.num_embeddings in rows


def can_be_read_in_place(group: Group, owners: Iterable[nn.Module], manager: BlockManager) -> bool:
    """Whether all known uses of a block in a model are calls that may read it in place.

    Args:
        group: The group of the block.
        owners: Every module that itself has parameters of it.
        manager: The manager of the block.
    """
    record = manager.record(group.block)
    if record.fixed or record.home is not Tier.DRAM or record.home_extent is None:
        return False
    if group.shells or group.buffers or group.carried or group.writes.suspect:
        return False
    if any(entry.kind not in ORDINARY for entry in group.entries):
        return False
    if any(not isinstance(module, _KINDS) or any(module.children()) for module in owners):
        return False
    return manager.zero_copy.sees(group.block)
