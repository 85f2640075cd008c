"""Embeddings of which a call reads few rows: the rows are read in place, in DRAM.

For one token, one row of an embedding of 32,000 rows is read. If it was fetched like other blocks,
all of it would be copied, or would stay in HBM in place of blocks that are used entirely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as modules
from torch.utils._device import DeviceContext

from tiermem.nn.compat.entrances import inside
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.pointing import ORDINARY
from tiermem.nn.wrap.scope import CallInterceptor, Scope
from tiermem.runtime.manager import BlockManager

_SHARE = 2
"""How many times the bytes of the rows a block must have. The device waits for the rows, while it
does not wait for a block that is prefetched; but a loop that alternates between the two from call
to call would have to be learned again each time."""
_LEAST = 4 << 20
"""Bytes of a block below which another kernel's access over the bus is not worth it."""
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""Those that may inspect the weight; the others see the result."""
_GLOBAL_HOOKS = (
    modules._global_forward_hooks,
    modules._global_forward_pre_hooks,
    modules._global_backward_hooks,
    modules._global_backward_pre_hooks,
)
"""Those of all modules; torch adds and removes them."""
_ASKED_FOR = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_item = dict.get  # looks a name up without fetching anything
_TORCHS = (nn.Embedding.forward, functional.embedding, torch.embedding)
"""The functions that an embedding's call runs, unless they were replaced."""


class LookupInterceptor(CallInterceptor):
    """Intercepts calls of an embedding that is a block of its own."""

    __slots__ = ("_entry", "_row")

    def __init__(self, module: nn.Module, scope: Scope) -> None:
        """Finds the weight; see :func:`is_lookup`."""
        super().__init__(module, scope)
        weight: Any = _item(module.__dict__["_parameters"], "weight")
        self._entry: Entry = next(e for e in scope.groups[0].entries if e.param is weight)
        self._row: int = weight.shape[1] * weight.element_size()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Looks rows up in place in DRAM, or calls the module as any other."""
        if self._manager.gate.unsure:
            self.runtime.repair()
        ids = args[0] if len(args) == 1 and not kwargs else None
        if self._here.inside and isinstance(ids, torch.Tensor) and self._may(ids):
            found = self._found(ids)
            if found is not None:
                if self.runtime.unwritten:
                    self.runtime.unwritten.got_further(self.scope)
                return self._hooked(ids, found)
        return super().__call__(*args, **kwargs)

    @property
    def manager(self) -> BlockManager:
        """The manager of the block."""
        return self._manager

    @inside  # the calls around this one handle its exceptions as the user's
    def _found(self, ids: torch.Tensor) -> torch.Tensor | None:
        """Looks rows up in place; returns None if the block has to be fetched."""

        def look(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            return self._look(ids, tensors[self._entry.index])

        nbytes, frozen = ids.numel() * self._row, not self._entry.param.requires_grad
        self._manager.gate.guard()  # before the lock, which may be held for ever in a forked child
        with self._manager.lock:
            zero_copy = self._manager.zero_copy
            return zero_copy.read(self._groups[0].block, look, nbytes, again=frozen)

    def _may(self, ids: torch.Tensor) -> bool:
        """Whether a call reads a few rows of the present weight, and does nothing else.

        Code that may see or keep the weight in the call needs it in HBM: most hooks, torch's
        modes, transforms, a compiler; so does computing its gradient.
        """
        module: Any = self.module
        names, entry, group = module.__dict__, self._entry, self._groups[0]
        padding = names.get("padding_idx")
        return (
            type(module) is nn.Embedding
            and (nn.Embedding.forward, functional.embedding, torch.embedding) == _TORCHS
            and type(ids) is torch.Tensor
            and ids.device == self._manager.parts.device
            and ids.numel() * self._row * _SHARE <= group.block.nbytes
            and not (torch.is_grad_enabled() and entry.param.requires_grad)
            and all(name in names for name in _ASKED_FOR)
            and module.max_norm is None
            and (padding is None or 0 <= padding < entry.param.shape[0])
            and "forward" not in names
            and "weight" not in names
            and self.compiled is None
            and _item(names["_parameters"], "weight") is entry.param
            and not (entry.materialized or group.may_be_written())
            and not any(names[hooks] for hooks in _HOOKS)
            and not is_watched()
        )

    def _look(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Does the same as the module's forward (``torch.nn.functional.embedding``)."""
        module: Any = self.module
        padding = -1 if module.padding_idx is None else module.padding_idx
        return torch.embedding(weight, ids, padding, module.scale_grad_by_freq, module.sparse)

    def _hooked(self, ids: torch.Tensor, found: Any) -> Any:
        """Runs the module's forward hooks on the result (some make layer inputs require gradients).

        They run after the look-up: one that uses the weight fetches it.
        """
        for hook in tuple(self.module._forward_hooks.values()):
            changed = hook(self.module, (ids,), found)
            if changed is not None:
                found = changed
        return found


def is_lookup(module: nn.Module, scope: Scope) -> bool:
    """Whether a module is an embedding that is a block of its own, large enough to matter."""
    if type(module) is not nn.Embedding or not scope.begins or len(scope.groups) != 1:
        return False
    group, weight = scope.groups[0], _item(module.__dict__["_parameters"], "weight")
    if len(group.block.tensors) != 1 or group.block.nbytes < _LEAST or group.writes.suspect:
        return False
    if weight is None or weight.dim() != 2:
        return False
    return any(entry.param is weight and entry.kind in ORDINARY for entry in group.entries)


def few_tokens(module: nn.Module, scope: Scope) -> int:
    """Returns up to how many tokens a call reads rows in place; 0 if it never does."""
    if not is_lookup(module, scope):
        return 0
    rows, *_ = scope.groups[0].block.tensors[0].shape
    return rows // _SHARE


def is_watched() -> bool:
    """Whether anything may observe every call: hooks of all modules, modes, transforms, a trace."""
    return (
        any(_GLOBAL_HOOKS)
        or has_modes()
        or bool(torch._C._len_torch_dispatch_stack())
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


def has_modes() -> bool:
    """Whether any of torch's function modes observes every call, other than the default device."""
    number = torch._C._len_torch_function_stack()
    get = torch._C._get_function_stack_at
    return any(type(get(index)) is not DeviceContext for index in range(number))
