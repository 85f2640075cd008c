"""Saved-tensor hooks: tiermem's pairs, and the pairs of others that they cover.

:mod:`tiermem.nn.passes.savedweights` packs weights.

Saved-tensor hooks do not chain: only the innermost pair sees a tensor. So each
pair here remembers the pair that it covers (``checkpoint``'s, or the user's) and
calls it. The user's pair sees every tensor, weights included, as without tiermem,
since it may return another value. A pair that only keeps tensors elsewhere does
not see weights. A checkpoint's pair sees a stand-in for each weight, as it counts
saved tensors. If no pair is covered, tensors that are not weights go to
:mod:`tiermem.nn.passes.activations`. If torch refuses hooks, see
:mod:`tiermem.nn.passes.unseen`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tiermem.errors import REFUSALS
from tiermem.nn.compat.entrances import inside
from tiermem.nn.compat.hookpair import (
    Pair,
    change_pushed,
    is_of_checkpoint,
    is_recomputation,
    is_stand_in,
    passed_over,
    push_pair,
    stand_in,
    top_pair,
)
from tiermem.nn.compat.outside import OUTSIDE
from tiermem.nn.groups.away import group_of
from tiermem.nn.groups.keptviews import unpacked
from tiermem.nn.groups.pointing import Plain
from tiermem.nn.groups.writes import refuse_changed
from tiermem.nn.passes.activations import Kept, SavedActivation, changed
from tiermem.nn.passes.leftout import Again, LeavesOut, left_out
from tiermem.nn.passes.savedrows import SavedCopies
from tiermem.nn.passes.savedview import ALWAYS, SavedView
from tiermem.nn.passes.savedweights import (
    PLAIN_TYPES,
    Beside,
    SavedWeights,
    begin_of,
    bytes_of,
    refuse_replaced_since,
)
from tiermem.nn.passes.unseen import UnseenGraphs, forget_lifted, lift_for_transforms
from tiermem.nn.tensors.shells import Shell, parts
from tiermem.runtime.base.functorch import transforming

if TYPE_CHECKING:
    from tiermem.nn.passes.runtime import ModuleRuntime

_is_enabled: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
_Tensor = torch.Tensor


class _Handed(tuple[Any, Callable[[Any], torch.Tensor]]):
    """The result of a covered pair's pack hook, and its unpack hook."""

    __slots__ = ()


class _Counted(tuple[SavedView, Any, Callable[[Any], torch.Tensor]]):
    """A weight, with the checkpoint's result for its stand-in, and the checkpoint's unpack hook."""

    __slots__ = ()


class _Around(tuple[Shell, Sequence[Any], torch.Tensor | None, int]):
    """A tensor that wraps others, and the packed inner tensors.

    A parameter is kept, too, with its version, as torch counts writes of inner tensors there.
    """

    __slots__ = ()


class SavedHooks:
    """Makes, pushes and pops the pairs of one runtime.

    Attributes:
        weights: Packs weights.
        rows: Packs rows of stacked experts.
        unseen: Keeps blocks in HBM that are used in graphs that no hook sees.
    """

    def __init__(self, runtime: ModuleRuntime) -> None:
        """Serves ``runtime``."""
        self._runtime = runtime
        self.manager = manager = runtime.manager
        self.device = manager.parts.device
        self._record_of = manager.parts.table.get
        self._slot_at = manager.parts.slots.by_address.get
        self.weights = weights = SavedWeights(runtime)
        self._reference, self._view_in, self.rows = weights.reference, weights.view_in, weights.rows
        self._room = runtime.experts.room
        self.unseen = UnseenGraphs(runtime)
        activations = runtime.activations
        self._offload = None if activations.store is None else activations.pack
        self._plain: Pair = (self._pack_plain, self._unpack)
        self._last: tuple[Any, Any] = None, None  # a checkpoint's pair, and the pair that covers it

    def may_be_left_out(self) -> bool:
        """Whether a forward's graph may be left to torch, since no other hooks are active.

        Called only if gradients are computed.
        """
        return _is_enabled() and top_pair() is None and not transforming()

    @staticmethod
    def leave_checkpoint_out(model: LeavesOut) -> bool:
        """Makes hooks ignore a part that a checkpoint will recompute, both times.

        Called when a weight of a model without interceptors is used by itself.

        Returns:
            Whether the thread is in such a part, and no hooks have seen any of it so far.
        """
        outer = top_pair()
        again = None if outer is None else outer[1]
        if not isinstance(again, Again) or not again.may_leave_to(model):
            return False
        again.leave_to(model)
        return True

    @staticmethod
    def is_checkpointed() -> bool:
        """Whether a checkpoint counts saved tensors, and will save the same again."""
        outer = top_pair()
        return outer is not None and (
            is_of_checkpoint(outer) or (type(outer[0]) is _Covering and outer[0].recomputes)
        )

    def on_top(self) -> bool:
        """Whether tiermem's pair is the innermost; called only if gradients are computed."""
        outer = top_pair()
        return outer is not None and (outer[0] is self._plain[0] or _hooks_of(outer) is self)

    def let_go(self) -> None:
        """Forgets the checkpoint that was covered last, whose hooks keep its inputs alive."""
        self._last = None, None

    def push_for_operation(self) -> bool:
        """Pushes a pair for an operation outside every module, unless a checkpoint's is active.

        A checkpoint runs such an operation once in a module's call, where this is not called, and
        once more by itself: it has to see the same tensors both times.
        """
        outer = top_pair()
        return not (outer is not None and is_of_checkpoint(outer)) and self.push()

    def push(self) -> bool:
        """Pushes a pair of tiermem's, unless one is the innermost or torch refuses hooks.

        Called only if gradients are computed, as nothing is saved otherwise.

        Returns:
            Whether one was pushed, so that :meth:`pop` must follow.
        """
        if not _is_enabled() or transforming():
            return False
        outer = top_pair()
        if outer is None:
            push_pair(*self._plain)
            return True
        pack = outer[0]
        if pack is self._plain[0] or (type(pack) is _Covering and pack.hooks is self):
            return False
        before, pair = self._last
        if pack is not before or pair is None:
            pair = self.cover(outer)
            if pair[0].recomputes:  # the same checkpoint's pair is covered in many module calls
                self._last = pack, pair
        push_pair(*pair)
        return True

    def is_thrown_away(self) -> bool:
        """Whether the current computation is a checkpoint's recomputation, whose graph is not used.

        Only the saved tensors are used, detached, by the nodes of the first computation.
        """
        outer = top_pair()
        return outer is not None and type(outer[0]) is _Covering and outer[0].recomputing

    def cover(self, outer: Pair) -> tuple[_Covering, Callable[[Any], torch.Tensor]]:
        """Returns a pair of tiermem's over another one."""
        return _Covering(self, outer), self._unpack

    def pop(self) -> None:
        """Removes the pair pushed last."""
        try:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        except RuntimeError:  # it was removed: Ctrl-C came before it was restored
            if not forget_lifted():
                raise

    @staticmethod
    def refused() -> bool:
        """Whether torch refuses hooks now: in ``torch.func``, or if they are disabled."""
        return not _is_enabled() or bool(transforming())

    @passed_over
    def _pack_plain(self, tensor: torch.Tensor) -> Any:
        try:
            if type(tensor) is not _Tensor or self.rows.copies or self._room.seats:
                found = self._reference(tensor)
            else:
                try:  # the same in line: mostly it is not a weight
                    address: Any = tensor.data_ptr() - tensor.storage_offset() * tensor.itemsize
                    slot = self._slot_at(address if address > 0 else begin_of(tensor))
                except RuntimeError:  # not strided, or without memory
                    slot = None
                found = None if slot is None else self._view_in(slot, tensor)
            if found is not None:
                record = self._record_of(found.block.id)
                fixed = record is None or record.fixed  # unknown for another manager's block
                return (found.weights.beside(found, tensor) if fixed else None) or found
            if type(tensor) not in PLAIN_TYPES:
                return self._pack_around(tensor)
            offloaded = self._offload and self._offload(tensor)
            if offloaded:
                return offloaded
            # reading ``grad_fn`` would create a Python object for each node, for the graph's life
            kept = tensor if tensor.is_leaf else tensor.detach()
            version = tensor._version
            return Kept((kept, version)) if version or type(kept) is not _Tensor else kept
        except REFUSALS:
            raise
        except BaseException as error:  # as the decorator ``inside`` does
            if OUTSIDE not in error.__dict__:
                self.manager.gate.torn = self.manager.gate.unsure = True
            raise

    def _pack_around(self, tensor: torch.Tensor) -> Any:
        """Packs a tensor that wraps others, if weights are among these."""
        shell = Shell.of(tensor)
        if shell is None:
            return tensor
        packed = [self._pack_plain(inner) for _, _, inner in parts(tensor)]
        weights = any(isinstance(inner, SavedView | Beside) for inner in packed)
        own = tensor if id(tensor) in group_of else None
        return _Around((shell, packed, own, tensor._version)) if weights else tensor

    def _unpack(self, packed: Any) -> torch.Tensor:
        kind = type(packed)
        if kind is Beside:
            packed, saved = packed
            refuse_replaced_since(saved)
            kind = Kept
        if kind is Kept:
            tensor: torch.Tensor
            tensor, version = packed
            if tensor._version != version:
                raise changed(tensor, version, tensor.shape)
            return tensor if type(tensor) in PLAIN_TYPES else bytes_of(tensor)
        if isinstance(packed, SavedView):
            return packed.weights.view(packed)
        if kind is _Around:
            shell, inside, own, version = packed
            group = None if own is None else group_of.get(id(own))
            if own is not None and group is not None and not group.freed:
                refuse_changed(own, version, group.block.name)
            with torch.no_grad():
                around: torch.Tensor = shell.around([self._unpack(inner) for inner in inside])
            return around
        if kind is _Counted:
            saved, inner, unpack = packed
            again: torch.Tensor = unpacked(unpack, inner)  # it computes again what it has to
            if not is_stand_in(again):  # the model was unwrapped since, or wrapped anew
                return bytes_of(again)
            view: torch.Tensor = saved.weights.view(saved)
            return view
        if kind is _Handed:
            inner, unpack = packed
            if isinstance(inner, SavedView):
                inner = inner.weights.view(inner)
            found: torch.Tensor = unpacked(unpack, inner)  # the user's hook, which may raise
            return found if type(found) in PLAIN_TYPES else bytes_of(found)
        if type(packed) is SavedActivation:
            if packed.counter._version != packed.version:
                raise changed(packed.counter, packed.version, packed.shape)
            return self._activation(packed)
        if kind is _Tensor and packed._version:
            raise changed(packed, 0, packed.shape)
        return bytes_of(packed)

    @inside
    def _activation(self, packed: SavedActivation) -> torch.Tensor:
        self._runtime.backward.enter()
        return self._runtime.activations.open(packed)


def _hooks_of(pair: Pair) -> SavedHooks | None:
    """Returns the hooks that a pair belongs to, None if it is not one of tiermem's."""
    found = getattr(pair[0], "__self__", None) or getattr(pair[0], "hooks", None)
    return found if isinstance(found, SavedHooks) else None


def _covered(pair: Pair) -> Pair:
    """Returns the pair to push instead of another: one that covers it, if modules are wrapped.

    Checkpoints save nothing there, and have to see the same tensors when they recompute outside.
    """
    if not group_of or _hooks_of(pair) is not None:
        return pair
    if is_of_checkpoint(pair):
        again = is_recomputation(pair)
        return pair if again else (pair[0], Again(left_out.of, pair[1]))
    outer = top_pair()
    hooks = None if outer is None else _hooks_of(outer)
    if hooks is not None:
        return hooks.cover(pair)
    pack, unpack = pair
    return pack, WithBytes(unpack)


def _is_own(pair: Pair) -> bool:
    """Whether a pair is tiermem's, and does not cover another one."""
    pack: Any = pair[0]
    while type(pack) is _Covering:
        pack = pack.outer[0]
    return isinstance(getattr(pack, "__self__", None), SavedHooks)


def _note_unseen(pair: Pair) -> None:
    """Notes which blocks were in use while a pair of tiermem's was removed."""
    hooks = _hooks_of(pair)
    if hooks is not None:
        hooks.unseen.note()


def _only_keeps(pair: Pair) -> bool:
    """Whether a pair only stores tensors elsewhere, and would only make copies of weights."""
    if isinstance(pair[0], _Covering):
        return _only_keeps(pair[0].outer)
    name = getattr(pair[0], "__qualname__", "")
    return _hooks_of(pair) is not None or is_of_checkpoint(pair) or name.startswith("save_on_cpu.")


class WithBytes:
    """An unpack hook around another one, for pairs that are pushed outside every wrapped module.

    Attributes:
        unpack: The other hook. A parameter that it returns is replaced by its bytes.
    """

    __slots__ = ("unpack",)

    def __init__(self, unpack: Callable[[Any], torch.Tensor]) -> None:
        self.unpack = unpack

    def __call__(self, packed: Any) -> torch.Tensor:
        """Unpacks."""
        return bytes_of(self.unpack(packed))


class _Covering:
    """A pack hook over another pair."""

    __slots__ = ("hooks", "only_keeps", "outer", "recomputes", "recomputing")

    def __init__(self, hooks: SavedHooks, outer: Pair) -> None:
        self.hooks = hooks
        self.outer = outer
        # a checkpoint recomputes with the weights of that time, changed or not
        self.recomputes = is_of_checkpoint(outer)
        self.recomputing = is_recomputation(outer)
        if isinstance(outer[1], Again):
            outer[1].covered = True
        self.only_keeps = _only_keeps(outer)

    @property
    def _checkpoint_internal(self) -> bool:
        """See :func:`passed_over`; for a pair that covers a checkpoint's."""
        return getattr(self.outer[0], "_checkpoint_internal", False)

    @property
    def _user_hooks(self) -> Pair | None:
        """The user's pair that such a pair covers."""
        return getattr(self.outer[0], "_user_hooks", None)

    def __call__(self, tensor: torch.Tensor) -> Any:
        hooks = self.hooks
        try:  # exceptions of the other pair (a checkpoint's early stop) are not handled here
            if type(tensor) is not _Tensor or hooks.rows.copies or hooks._room.seats:
                found = hooks._reference(tensor)
            else:
                try:  # the same in line, as in _pack_plain
                    slot = hooks._slot_at(begin_of(tensor))
                except RuntimeError:
                    slot = None
                found = None if slot is None else hooks._view_in(slot, tensor)
        except REFUSALS:
            raise
        except BaseException as error:  # as the decorator ``inside`` does
            if OUTSIDE not in error.__dict__:
                hooks.manager.gate.torn = hooks.manager.gate.unsure = True
            raise
        if found is None:
            pack, unpack = self.outer
            return _Handed((pack(tensor), unpack))
        if self.recomputes:
            if type(found) is SavedCopies:
                return self._given(tensor, None)  # it counts them if the whole block is used
            found.version, found.times = -1, ALWAYS
            if not self._counts(found):
                return self._given(
                    hooks.weights.view(found), None
                )  # a copy, as gradients are computed here
            # a checkpoint counts saved tensors, and recomputes up to the last one, including any
            # side effects. It gets a stand-in, as it would hold the weight itself in HBM
            pack, unpack = self.outer
            with Plain():  # it may not be held
                shown = stand_in(tensor.dtype, tensor.shape, hooks.device)
            del tensor  # its stop would keep it by this frame, as if the program had a view
            return _Counted((found, pack(shown), unpack))
        if self.only_keeps:
            return found
        return self._given(tensor, found)

    def _counts(self, weight: SavedView) -> bool:
        """Whether a checkpoint is only to count a weight that is saved.

        What is computed again is unpacked as it was saved: by a reference only where there was one.
        """
        part, block = self.outer[1], (self.hooks, weight.block.id)
        if self.recomputing:
            return left_out.again is not None and block in left_out.again.counted
        if isinstance(part, Again):
            part.counted.add(block)
        return True

    def _given(self, tensor: torch.Tensor, found: SavedView | None) -> _Handed:
        """Passes a tensor to the other pair."""
        pack, unpack = self.outer
        packed = pack(tensor)
        if found is not None and packed is tensor:
            found.version = -1  # with hooks torch does not check for changes
            return _Handed((found, unpack))
        return _Handed((packed, unpack))


change_pushed(_covered)
lift_for_transforms(_is_own, _note_unseen)
