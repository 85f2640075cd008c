"""Handles code for which torch refuses saved-tensor hooks: blocks stay in HBM.

``torch.func.grad`` and similar functions refuse every pair of hooks. If one is called inside a
module, tiermem's pairs are removed until it ends. Then, or if hooks are disabled, no hook sees what
autograd saves, so it saves the parameters themselves. So an alias of each block that was in use is
put into the graph and freed with it; until then the block stays in HBM.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tiermem.nn.compat.hookpair import Pair, change_disabling, push_pair, top_pair
from tiermem.runtime.base.functorch import transforming, untransformed
from tiermem.runtime.memory.slots import Slot, typed_view

if TYPE_CHECKING:
    from tiermem.nn.groups.group import Group
    from tiermem.nn.passes.runtime import ModuleRuntime


class _Off(threading.local):
    """Pairs of tiermem's that are removed in the calling thread, while torch refuses hooks."""

    pairs: Sequence[Pair] = ()


_off = _Off()


def lift_for_transforms(is_own: Callable[[Pair], bool], back: Callable[[Pair], None]) -> None:
    """Removes tiermem's pairs when torch begins to refuse hooks, and restores them afterwards.

    Args:
        is_own: Returns whether a pair is tiermem's, and does not cover another one.
        back: Called with each pair, once all are restored.
    """
    change_disabling(partial(_take_off, is_own), partial(_put_back, back))


def forget_lifted() -> bool:
    """Forgets the removed pairs of the calling thread; returns whether there were any."""
    pairs, _off.pairs = _off.pairs, ()
    return bool(pairs)


class UnseenGraphs:
    """Keeps blocks in HBM as long as graphs exist that use them and that no hook has seen."""

    def __init__(self, runtime: ModuleRuntime) -> None:
        """Serves ``runtime``."""
        self._runtime = runtime
        self._slots = runtime.manager.parts.slots.current

    def hold_for(self, outputs: Sequence[torch.Tensor], groups: Iterable[Group]) -> None:
        """Keeps blocks in HBM as long as an autograd graph exists that no hook here has seen.

        It has saved the parameters themselves. An alias of each block is put into the graph.

        Args:
            outputs: Outputs of the module that has just used the blocks.
            groups: Groups of the blocks; they are held now.
        """
        aliases = self._aliases_of(groups)
        if _off.pairs:  # the graph of the call around the transform has saved them, too
            self._runtime.here.unseen += aliases
        _put_into_graphs(outputs, aliases)

    def _aliases_of(self, groups: Iterable[Group]) -> list[torch.Tensor]:
        used = [group.block.id for group in groups if not group.pointing.is_replaced()]
        with untransformed() if transforming() else nullcontext():
            return [_alias(self._slots[block_id]) for block_id in used]

    def hold_unseen(self, outputs: Sequence[torch.Tensor]) -> None:
        """As :meth:`hold_for`, for blocks that were in use while hooks were removed in a call.

        Args:
            outputs: Outputs of the outermost call.
        """
        aliases, self._runtime.here.unseen = self._runtime.here.unseen, []
        _put_into_graphs(outputs, aliases)

    def note(self) -> None:
        """Notes which blocks the current calls hold when torch accepts hooks again."""
        held = [g for g in self._runtime.groups if g.holds and g.block.id in self._slots]
        self._runtime.here.unseen += self._aliases_of(held)


def _take_off(is_own: Callable[[Pair], bool]) -> None:
    """Removes tiermem's pairs when torch is about to refuse hooks, unless there are others."""
    pairs: list[Pair] = []
    while (pair := top_pair()) is not None and is_own(pair):
        torch._C._autograd._pop_saved_tensors_default_hooks()
        pairs.insert(0, pair)
    if pair is None and pairs:
        _off.pairs = pairs
    else:  # torch raises, as without tiermem
        for own in pairs:
            push_pair(*own)


def _put_back(back: Callable[[Pair], None]) -> None:
    """Restores the removed pairs, when torch accepts hooks again."""
    for pair in _off.pairs:
        push_pair(*pair)
    pairs, _off.pairs = _off.pairs, ()
    for pair in pairs:
        back(pair)


def _put_into_graphs(outputs: Sequence[torch.Tensor], aliases: Sequence[torch.Tensor]) -> None:
    """Keeps aliases of blocks as long as the graphs of some outputs exist."""
    for tensor in outputs:
        if tensor.grad_fn is not None:
            kept: dict[str, Any] = tensor.grad_fn.metadata  # type: ignore[assignment]
            kept.setdefault("tiermem", []).extend(aliases)


def _alias(slot: Slot) -> torch.Tensor:
    """Returns a view of a block's first byte: as long as it exists, the block is not moved."""
    return typed_view(slot.sight.reading, torch.uint8, 0, (1,), (1,))
