"""Tensors that autograd saves: views of weights become references, large ones leave HBM.

autograd keeps views of weights (``weight.t()``) that look into an HBM slot.
Kept as they are, they would hold the slot until backward. So they are packed
as (block, offset, shape, stride) and unpacked from wherever the block is then.

Saved-tensor hooks do not chain: only the innermost pair sees a tensor. So each
pair here remembers the pair it covers (``checkpoint``'s, or the user's) and
hands on every tensor that is not a view of a weight. Where it covers none, what is
no view of a weight goes to :mod:`tiermem.nn.activations`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tiermem.core.block import Block, Role
from tiermem.nn.activations import Kept, SavedActivation
from tiermem.nn.hookpair import Pair, top_pair
from tiermem.nn.repair import inside
from tiermem.runtime.slots import Slot, typed_view

if TYPE_CHECKING:
    from tiermem.nn.runtime import ModuleRuntime

_REFERRED = (Role.PARAM, Role.BUFFER)


class SavedView:
    """A view of a block's bytes, without holding them."""

    __slots__ = ("block", "conj", "dtype", "neg", "offset", "owner", "shape", "stride", "version")

    def __init__(self, block: Block, tensor: torch.Tensor, owner: torch.Tensor | None) -> None:
        self.block = block
        self.offset = int(tensor.storage_offset())
        self.shape = tuple(tensor.shape)
        self.stride = tensor.stride()
        self.dtype = tensor.dtype
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()
        self.owner = owner
        self.version = tensor._version if owner is not None else -1


def _passed_over(pack: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a pack hook that covers no other as none of a user's.

    From torch 2.15 on, selective checkpoints hand what they keep to the user's hooks if they are
    told to, and warn where they are not told. They pass over hooks of checkpoints, which they know
    by these two names; and what is ours has to be passed over as well.
    """
    pack.__dict__.update(_checkpoint_internal=True, _user_hooks=None)
    return pack


class _Handed:
    """What a covered pair made of a tensor, and how to undo it."""

    __slots__ = ("packed", "unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], torch.Tensor]) -> None:
        self.packed = packed
        self.unpack = unpack


class SavedHooks:
    """Makes, pushes and pops the pairs of one runtime."""

    def __init__(self, runtime: ModuleRuntime) -> None:
        """Serves ``runtime``."""
        self._runtime = runtime
        self.manager = runtime.manager
        self._plain: Pair = (self._pack_plain, self._unpack)

    def on_top(self) -> bool:
        """Whether a pair of ours sees what is saved, or nothing is."""
        if not torch.is_grad_enabled():
            return True
        outer = top_pair()
        return outer is not None and self._is_ours(outer)

    def _is_ours(self, pair: Pair) -> bool:
        return getattr(pair[0], "__self__", None) is self or getattr(pair[0], "hooks", None) is self

    def push_if_alone(self) -> bool:
        """Pushes a pair for an operation outside every module, unless somebody's is there.

        A checkpoint runs such an operation once inside a module's call, where we do not see it,
        and once more on its own: both times it has to see the same tensors.
        """
        return top_pair() is None and self.push()

    def push(self) -> bool:
        """Puts a pair of ours on top, unless one is there or none can be.

        Returns:
            Whether one was pushed, and :meth:`pop` is owed.
        """
        if not torch.is_grad_enabled() or not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            return False
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return False  # functorch refuses hooks; aliases hold the slots instead
        outer = top_pair()
        if outer is None:
            pack, unpack = self._plain
        elif self._is_ours(outer):
            return False
        else:
            covering = _Covering(self, outer)
            pack, unpack = covering, self._unpack
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
        return True

    def pop(self) -> None:
        """Takes the pair pushed last off again."""
        torch._C._autograd._pop_saved_tensors_default_hooks()

    def reference(self, tensor: torch.Tensor) -> SavedView | None:
        """Returns a reference in place of a view of a weight or large buffer, or None."""
        if tensor.layout is not torch.strided or type(tensor) not in _PLAIN_TYPES:
            return None
        slot = self._slot_of(tensor)
        if slot is None or slot.block.role not in _REFERRED:
            return None
        if self.manager.table[slot.block.id].fixed:
            return None
        owner = self._runtime.owner_of(slot.block, tensor)
        return SavedView(slot.block, tensor, owner)

    def is_fixed(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor looks into a block that never leaves HBM."""
        if tensor.layout is not torch.strided or type(tensor) not in _PLAIN_TYPES:
            return False
        slot = self._slot_of(tensor)
        return slot is not None and self.manager.table[slot.block.id].fixed

    def _slot_of(self, tensor: torch.Tensor) -> Slot | None:
        """Returns the slot that a tensor looks into, or None."""
        try:
            address = tensor.untyped_storage().data_ptr()
        except RuntimeError:  # zeros without memory, as forward-mode differentiation makes them
            return None
        return self.manager.by_address.get(address)

    @_passed_over
    @inside
    def _pack_plain(self, tensor: torch.Tensor) -> Any:
        found = self.reference(tensor)
        if found is not None:
            return found
        if type(tensor) not in _PLAIN_TYPES:
            return tensor
        return self._runtime.activations.pack(tensor) or Kept(tensor)

    @inside
    def _unpack(self, packed: Any) -> torch.Tensor:
        if type(packed) is SavedView:
            return self._view(packed)
        if type(packed) is _Handed:
            return packed.unpack(packed.packed)
        if type(packed) is Kept:
            return packed.open()
        if type(packed) is SavedActivation:
            self._runtime.enter_backward()
            return self._runtime.activations.open(packed)
        return packed  # type: ignore[no-any-return]

    def _view(self, saved: SavedView) -> torch.Tensor:
        owner = saved.owner
        if owner is not None and owner._version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a weight of block {saved.block.name!r} is at version "
                f"{owner._version}; expected version {saved.version} instead"
            )
        self._runtime.enter_backward()
        slot = self.manager.acquire(saved.block)
        try:
            view = typed_view(
                slot.sight.reading, saved.dtype, saved.offset, saved.shape, saved.stride
            )
        finally:
            self.manager.release(saved.block)
        if torch.is_grad_enabled():
            # backward with a graph of its own saves this again, where no hook of ours sees it: a
            # copy in ordinary memory does not hold the block in HBM
            with torch.no_grad():
                view = view.clone(memory_format=torch.preserve_format)
        if saved.conj:
            view = view.conj()
        if saved.neg:
            view = torch._neg_view(view)
        return view


class _Covering:
    """A pack hook over another pair."""

    __slots__ = ("hooks", "manager", "outer", "recomputes")

    def __init__(self, hooks: SavedHooks, outer: Pair) -> None:
        self.hooks = hooks
        self.manager = hooks.manager
        self.outer = outer
        # a checkpoint computes with the weights of then, changed or not
        self.recomputes = getattr(outer[0], "__module__", "") == "torch.utils.checkpoint"

    @property
    def _checkpoint_internal(self) -> bool:
        """As :func:`_passed_over` says, where it covers a checkpoint's pair."""
        return getattr(self.outer[0], "_checkpoint_internal", False)

    @property
    def _user_hooks(self) -> Pair | None:
        """The user's pair that such a pair covers."""
        return getattr(self.outer[0], "_user_hooks", None)

    @inside
    def __call__(self, tensor: torch.Tensor) -> Any:
        found = self.hooks.reference(tensor)
        if found is not None:
            if self.recomputes:
                found.owner = None
            return found
        if not tensor.requires_grad and self.hooks.is_fixed(tensor):
            tensor = tensor.detach()  # the parameter itself is pointed away after the call
        pack, unpack = self.outer
        return _Handed(pack(tensor), unpack)


_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
