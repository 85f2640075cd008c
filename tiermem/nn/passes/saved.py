"""Tensors that autograd saves: views of weights become references, large ones leave HBM.

autograd keeps views of weights (``weight.t()``) that look into an HBM slot.
Kept as they are, they would hold the slot until backward. So they are packed
as (block, offset, shape, stride) and unpacked from wherever the block is then.

The parameter itself must never be what is kept: it shows whatever it points at by
then, which may be nothing. It is packed by its identity, whatever class it has at the
moment, and where a hook of the user's kept it, it is replaced by its bytes when it
comes back.

Saved-tensor hooks do not chain: only the innermost pair sees a tensor. So each
pair here remembers the pair it covers (``checkpoint``'s, or the user's). The user's
sees every tensor, weights too, as it does without tiermem: what it returns may be
another value. Those that only keep tensors elsewhere see those that are no weights.
A checkpoint's sees a stand-in for each weight, as it counts them.
Where none is covered, what is no weight goes to :mod:`tiermem.nn.passes.activations`.

``torch.func.grad`` and its like refuse every pair: where one is called inside a module, tiermem's
are taken off until it is over, and what was in use meanwhile stays in HBM as long as the graph.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from tiermem.core.block import Block, Role
from tiermem.errors import REFUSALS, ParameterError
from tiermem.nn.compat.entrances import inside
from tiermem.nn.compat.hookpair import (
    Pair,
    change_disabling,
    change_pushed,
    is_of_checkpoint,
    is_recomputation,
    is_stand_in,
    passed_over,
    stand_in,
    top_pair,
)
from tiermem.nn.compat.outside import OUTSIDE
from tiermem.nn.groups.away import group_of
from tiermem.nn.groups.keptviews import unpacked
from tiermem.nn.groups.olddata import REPLACED
from tiermem.nn.groups.writes import refuse_changed, refuse_replaced
from tiermem.nn.passes.activations import Kept, SavedActivation, changed
from tiermem.nn.passes.leftout import Again, LeavesOut, left_out
from tiermem.nn.passes.savedrows import SavedCopies, SavedRows
from tiermem.nn.passes.savedview import ALWAYS, SavedView
from tiermem.nn.tensors.shells import Shell, parts
from tiermem.runtime.base.functorch import transforming, untransformed
from tiermem.runtime.memory.slots import Slot, View, typed_view

if TYPE_CHECKING:
    from tiermem.nn.groups.group import Group
    from tiermem.nn.passes.runtime import ModuleRuntime

_REFERRED = (Role.PARAM, Role.BUFFER)
_push = torch._C._autograd._push_saved_tensors_default_hooks  # not as it is changed below
_is_enabled: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
_MOST_VIEWS = 1 << 16
_Tensor, _STRIDED = torch.Tensor, torch.strided
_Plain = torch._C.DisableTorchFunctionSubclass
"""Within it a parameter that is away is asked as an ordinary tensor is."""


class _Handed(tuple[Any, Callable[[Any], torch.Tensor]]):
    """The result of a covered pair's pack hook, and its unpack hook."""

    __slots__ = ()


class _Beside(tuple[Kept, SavedView]):
    """An alias of a weight's bytes that never leave HBM, and what it is of."""

    __slots__ = ()


class _Counted(tuple[SavedView, Any, Callable[[Any], torch.Tensor]]):
    """A weight, with what a checkpoint made of its stand-in, and the checkpoint's unpack hook."""

    __slots__ = ()


class _Around(tuple[Shell, Sequence[Any], torch.Tensor | None, int]):
    """A tensor that wraps others, and what stands for these.

    A parameter is kept as well, with its version: what its class writes inside, torch counts there.
    """

    __slots__ = ()


class _Off(threading.local):
    """Pairs of tiermem's that are off in the calling thread, as torch takes none just now."""

    pairs: Sequence[Pair] = ()


_off = _Off()


class SavedHooks:
    """Makes, pushes and pops the pairs of one runtime."""

    def __init__(self, runtime: ModuleRuntime) -> None:
        """Serves ``runtime``."""
        self._runtime = runtime
        self._owners = runtime.groups.owners
        self._group_of = runtime.groups.by_block.get
        self.manager = manager = runtime.manager
        self.device = manager.parts.device
        self._gate = manager.gate
        self._at_hand = manager.acquirer.at_hand
        self._deferred = manager.parts.deferred
        self._record_of = manager.parts.table.get
        self._slots = manager.parts.slots.current
        self._slot_at = manager.parts.slots.by_address.get
        self.rows = SavedRows(self, runtime)
        self._room = runtime.experts.room
        activations = runtime.activations
        self._offload = None if activations.store is None else activations.pack
        self._plain: Pair = (self._pack_plain, self._unpack)
        self._last: tuple[Any, Any] = None, None  # a checkpoint's, and what covers it
        self._views: dict[View, View] = {}

    def may_be_left_out(self) -> bool:
        """Whether a forward's graph may be left to torch: nobody's hooks are to see what it saves.

        Asked where gradients are taken.
        """
        return _is_enabled() and top_pair() is None and not transforming()

    @staticmethod
    def leave_checkpoint_out(model: LeavesOut) -> bool:
        """Has a part that a checkpoint will compute again seen by no hooks, either time.

        Called as a weight of a model without interceptors is used by itself.

        Returns:
            Whether the thread is in such a part, and no hooks have seen any of it so far.
        """
        outer = top_pair()
        again = None if outer is None else outer[1]
        if not isinstance(again, Again) or again.covered or again.of not in (None, model):
            return False
        again.of = model
        return True

    @staticmethod
    def is_checkpointed() -> bool:
        """Whether a checkpoint counts what is saved, and will save the same again."""
        outer = top_pair()
        return outer is not None and (
            is_of_checkpoint(outer) or (type(outer[0]) is _Covering and outer[0].recomputes)
        )

    def on_top(self) -> bool:
        """Whether a pair of tiermem's sees what is saved; asked where gradients are taken."""
        outer = top_pair()
        return outer is not None and (outer[0] is self._plain[0] or _hooks_of(outer) is self)

    def let_go(self) -> None:
        """Forgets the checkpoint that was covered last: its hooks keep what it began with."""
        self._last = None, None

    def push_for_operation(self) -> bool:
        """Pushes a pair for an operation outside every module, unless a checkpoint's is there.

        A checkpoint runs such an operation once inside a module's call, where it is not seen here,
        and once more on its own: both times it has to see the same tensors.
        """
        outer = top_pair()
        return not (outer is not None and is_of_checkpoint(outer)) and self.push()

    def push(self) -> bool:
        """Pushes a pair of tiermem's, unless one is on top or none can be.

        Asked where gradients are taken: nothing is saved elsewhere.

        Returns:
            Whether one was pushed, so that :meth:`pop` must follow.
        """
        if not _is_enabled() or transforming():
            return False
        outer = top_pair()
        if outer is None:
            _push(*self._plain)
            return True
        pack = outer[0]
        if pack is self._plain[0] or (type(pack) is _Covering and pack.hooks is self):
            return False
        before, pair = self._last
        if pack is not before or pair is None:
            pair = self.cover(outer)
            if pair[0].recomputes:  # it covers call after call of modules
                self._last = pack, pair
        _push(*pair)
        return True

    def is_thrown_away(self) -> bool:
        """Whether what is computed now is a checkpoint's recomputation: no graph of it is used.

        Only what it saves is, detached, by the nodes of the first computation.
        """
        outer = top_pair()
        return outer is not None and type(outer[0]) is _Covering and outer[0].recomputing

    def cover(self, outer: Pair) -> tuple[_Covering, Callable[[Any], torch.Tensor]]:
        """Returns a pair of tiermem's over another one."""
        return _Covering(self, outer), self._unpack

    def pop(self) -> None:
        """Takes the pair pushed last off again."""
        try:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        except RuntimeError:  # it is off: Ctrl-C came where it was to be put back
            if not _off.pairs:
                raise
            _off.pairs = ()

    @staticmethod
    def refused() -> bool:
        """Whether torch takes no hooks now: in ``torch.func``, or where they are disabled."""
        return not _is_enabled() or bool(transforming())

    def hold_for(self, outputs: Sequence[torch.Tensor], groups: Iterable[Group]) -> None:
        """Keeps blocks in HBM as long as an autograd graph lives that no hook here has seen.

        It has saved the parameters themselves. An alias of each block goes into the graph.

        Args:
            outputs: Of the module that has just used the blocks.
            groups: The blocks; they are held now.
        """
        aliases = self._aliases_of(groups)
        if _off.pairs:  # the graph of the call around the transform has saved them as well
            self._runtime.here.unseen += aliases
        _put_into_graphs(outputs, aliases)

    def _aliases_of(self, groups: Iterable[Group]) -> list[torch.Tensor]:
        used = [group.block.id for group in groups if not group.pointing.is_replaced()]
        with untransformed() if transforming() else nullcontext():
            return [_alias(self.manager.parts.slots.current[block_id]) for block_id in used]

    def hold_unseen(self, outputs: Sequence[torch.Tensor]) -> None:
        """Keeps in HBM what was in use where hooks were off inside a call, as :meth:`hold_for`.

        Args:
            outputs: Of the outermost call.
        """
        aliases, self._runtime.here.unseen = self._runtime.here.unseen, []
        _put_into_graphs(outputs, aliases)

    def note_unseen(self) -> None:
        """Notes what the calls under way hold as torch takes hooks again."""
        held = [g for g in self._runtime.groups if g.holds and g.block.id in self._slots]
        self._runtime.here.unseen += self._aliases_of(held)

    def reference(self, tensor: torch.Tensor) -> SavedView | None:
        """Returns a reference in place of a weight, a large buffer or a view of one, or None."""
        if type(tensor) not in _PLAIN_TYPES:
            return _whole(tensor)
        if tensor.layout is not _STRIDED:
            return None
        try:
            slot = self._slot_at(_begin_of(tensor))
        except RuntimeError:  # zeros without memory, as forward-mode differentiation makes them
            return None
        if self.rows.copies or self._room.seats:
            found = self.rows.reference(tensor)
            if found is not None:
                return found
        return None if slot is None else self._view_in(slot, tensor)

    def _view_in(self, slot: Slot, tensor: torch.Tensor) -> SavedView | None:
        """Returns a reference in place of a tensor whose bytes are in a block, if that has any."""
        if slot.block.role not in _REFERRED:
            return None
        block, offset, dtype, owner = slot.block, int(tensor.storage_offset()), tensor.dtype, None
        known = self._owners.get(block.id)
        if known is not None:
            owner = known[1][bisect_right(known[0], offset * dtype.itemsize) - 1]
            if owner is not None and owner._version != tensor._version:
                owner = None  # it has a version counter of its own
        view: View = dtype, offset, tensor.shape, tensor.stride()
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        view = self._views.setdefault(view, view)  # one for all passes: the collector counts them
        return SavedView(self, block, tensor, view, owner)

    def group_of(self, block: Block) -> Group:
        """Returns the group of a block that has one."""
        return self._runtime.groups.by_block[block.id]

    @passed_over
    def _pack_plain(self, tensor: torch.Tensor) -> Any:
        try:
            if type(tensor) is not _Tensor or self.rows.copies or self._room.seats:
                found = self.reference(tensor)
            else:
                try:  # the same in line: mostly it is no weight
                    address: Any = tensor.data_ptr() - tensor.storage_offset() * tensor.itemsize
                    slot = self._slot_at(address if address > 0 else _begin_of(tensor))
                except RuntimeError:  # not strided, or without memory
                    slot = None
                found = None if slot is None else self._view_in(slot, tensor)
            if found is not None:
                record = self._record_of(found.block.id)
                fixed = record is None or record.fixed  # of another manager's, it is not known
                return (found.hooks.beside(found, tensor) if fixed else None) or found
            if type(tensor) not in _PLAIN_TYPES:
                return self._pack_around(tensor)
            offloaded = self._offload and self._offload(tensor)
            if offloaded:
                return offloaded
            # ``grad_fn`` would make an object of each node, as long as the graph lives
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
        """Returns what stands for a tensor that wraps others, if weights are among these."""
        shell = Shell.of(tensor)
        if shell is None:
            return tensor
        packed = [self._pack_plain(inner) for _, _, inner in parts(tensor)]
        weights = any(isinstance(inner, SavedView | _Beside) for inner in packed)
        own = tensor if id(tensor) in group_of else None
        return _Around((shell, packed, own, tensor._version)) if weights else tensor

    def beside(self, saved: SavedView, tensor: torch.Tensor) -> _Beside | None:
        """Returns an alias of bytes that never leave HBM, which backward finds sooner; else None.

        It looks through the storage that is only read, and has the tensor's version counter.
        """
        record = self._record_of(saved.block.id)
        if record is None or not record.fixed or saved.conj or saved.neg:
            return None
        slot = self._slots[saved.block.id]
        with _Plain():
            alias = tensor.detach()
            alias.data = slot.sight.read_view(saved.view)
        return _Beside((Kept((alias, alias._version)), saved))

    def _unpack(self, packed: Any) -> torch.Tensor:
        kind = type(packed)
        if kind is _Beside:
            packed, saved = packed
            _refuse_replaced(saved)
            kind = Kept
        if kind is Kept:
            tensor: torch.Tensor
            tensor, version = packed
            if tensor._version != version:
                raise changed(tensor, version, tensor.shape)
            return tensor if type(tensor) in _PLAIN_TYPES else _bytes_of(tensor)
        if isinstance(packed, SavedView):
            return packed.hooks.view(packed)
        if kind is _Around:
            shell, inside, own, version = packed
            group = None if own is None else group_of.get(id(own))
            if own is not None and group is not None and not group.freed:
                refuse_changed(own, version, group.block.name)
            with torch.no_grad():
                around: torch.Tensor = shell.around([self._unpack(inner) for inner in inside])
            return around
        if kind is _Counted:
            weight, inner, unpack = packed
            again: torch.Tensor = unpacked(unpack, inner)  # it computes again what it has to
            if not is_stand_in(again):  # the model has left the tiers since, or has come anew
                return _bytes_of(again)
            view: torch.Tensor = weight.hooks.view(weight)
            return view
        if kind is _Handed:
            inner, unpack = packed
            if isinstance(inner, SavedView):
                inner = inner.hooks.view(inner)
            found: torch.Tensor = unpacked(unpack, inner)  # the user's: its exceptions are no fault
            return found if type(found) in _PLAIN_TYPES else _bytes_of(found)
        if type(packed) is SavedActivation:
            if packed.counter._version != packed.version:
                raise changed(packed.counter, packed.version, packed.shape)
            return self._activation(packed)
        if kind is _Tensor and packed._version:
            raise changed(packed, 0, packed.shape)
        return _bytes_of(packed)

    @inside
    def _activation(self, packed: SavedActivation) -> torch.Tensor:
        self._runtime.backward.enter()
        return self._runtime.activations.open(packed)

    def view(self, saved: SavedView) -> torch.Tensor:
        """Returns the view that was saved, in HBM.

        Raises:
            RuntimeError: If the weight was changed in place since.
            ParameterError: If its module was unwrapped and the bytes are not known any more.
            StorageError: If they cannot be read.
            ClosedError: If the manager is closed.
        """
        owner, version, backward = saved.owner, saved.version, self._runtime.backward
        if saved.block.id in self._deferred.owed:
            self.pay(saved.block.id)
        if owner is not None and version != -1:
            with _Plain():  # it may be away
                now = owner._version
            if now != version:
                refuse_changed(owner, version, saved.block.name)  # and nothing to repair
            if type(saved) is SavedCopies and saved.counter._version != saved.counted:
                raise changed(saved.counter, saved.counted, saved.shown[2])
        _refuse_replaced(saved)
        try:
            if not backward.under_way or backward.ending() is None:
                backward.enter()
            found = self._here(saved) if type(saved) is SavedView else None
            if found is None or saved.conj or saved.neg or torch.is_grad_enabled():
                return self._fetch(saved, found)
            return found
        except REFUSALS:
            raise
        except BaseException as error:  # as the decorator ``inside`` does
            if OUTSIDE not in error.__dict__:
                self.manager.gate.torn = self.manager.gate.unsure = True
            raise

    @inside
    def pay(self, block_id: int) -> None:
        """Makes the deferred step of a block: it changes the weights, and is counted then."""
        with self.manager.lock:
            self.manager.parts.deferred.pay(block_id)

    def _fetch(self, saved: SavedView, view: torch.Tensor | None) -> torch.Tensor:
        """Returns what was saved; ``view`` is of the block's bytes, where these are there."""
        if type(saved) is not SavedView:
            view = self.rows.again(saved)
            whole = self._here(saved) if view is None else None
            if whole is not None:
                view = self.rows.out_of(saved, whole)
        if view is None:
            view = self.rows.out_of(saved, self._brought(saved))
        if torch.is_grad_enabled():
            # backward with a graph of its own saves this again, where no hook here sees it: a
            # copy in ordinary memory does not hold the block in HBM
            with torch.no_grad():
                view = view.clone(memory_format=torch.preserve_format)
        if saved.conj:
            view = view.conj()
        if saved.neg:
            view = torch._neg_view(view)
        return view

    def _here(self, saved: SavedView) -> torch.Tensor | None:
        """Returns a view of a block that backward has just come to, or that never leaves HBM."""
        block_id = saved.block.id
        group, record = self._group_of(block_id), self._record_of(block_id)
        if group is None or record is None or self._gate.closed:
            return None
        if not (group.soft or record.fixed):
            return None
        with self.manager.lock:
            if self._at_hand(block_id) is None:
                return None
            sight = self._slots[block_id].sight
            found = sight.read.get(saved.view)
            return sight.read_view(saved.view) if found is None else found.data

    def _brought(self, saved: SavedView) -> torch.Tensor:
        """Returns what was saved of a block that has to be acquired first, or is one no more."""
        block = saved.block
        if self._record_of(block.id) is None and not self._gate.closed:
            return _taken_out(saved)
        slot = self.manager.acquire(block)
        try:
            return slot.sight.read_view(saved.view)
        finally:
            self.manager.release(block)


def _refuse_replaced(saved: SavedView) -> None:
    """Refuses a view whose values are gone, as its weight has been given other data since.

    Raises:
        RuntimeError: If it has.
    """
    owner, times = saved.owner, saved.times
    if times < REPLACED.times and owner is not None and REPLACED.since(owner, times):
        raise refuse_replaced(saved.block.name)


def _alias(slot: Slot) -> torch.Tensor:
    """Returns a view of a block's first byte: as long as it lives the block stays where it is."""
    return typed_view(slot.sight.reading, torch.uint8, 0, (1,), (1,))


def _taken_out(saved: SavedView) -> torch.Tensor:
    """Returns a view of a weight whose module was unwrapped since: the parameter has the bytes.

    Raises:
        ParameterError: If it is not known whose bytes they are, or the parameter has others.
    """
    owner, (dtype, offset, shape, stride) = saved.owner, saved.view
    item = dtype.itemsize
    position = offset * item
    index = bisect_right(saved.block.tensors, position, key=lambda spec: spec.offset) - 1
    spec = saved.block.tensors[index]
    if owner is None or owner.stride() != spec.stride:
        raise ParameterError(
            f"backward needs a weight of block {saved.block.name!r}, which was taken out of the "
            "tiers after forward; call tier.unwrap(module) after backward"
        )
    offset = (position - spec.offset + int(owner.storage_offset()) * owner.itemsize) // item
    storage = owner.detach().untyped_storage()
    return typed_view(storage, dtype, offset, shape, stride)


def _hooks_of(pair: Pair) -> SavedHooks | None:
    """Returns the hooks that a pair belongs to, None if it is not one of tiermem's."""
    found = getattr(pair[0], "__self__", None) or getattr(pair[0], "hooks", None)
    return found if isinstance(found, SavedHooks) else None


def _covered(pair: Pair) -> Pair:
    """Returns the pair to push for another: one that covers it, if there are wrapped modules.

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
    """Whether a pair is tiermem's, and covers none of anybody else's."""
    pack: Any = pair[0]
    while type(pack) is _Covering:
        pack = pack.outer[0]
    return isinstance(getattr(pack, "__self__", None), SavedHooks)


def _take_off() -> None:
    """Takes tiermem's pairs off where torch is about to refuse all; not where others' are."""
    pairs: list[Pair] = []
    while (pair := top_pair()) is not None and _is_own(pair):
        torch._C._autograd._pop_saved_tensors_default_hooks()
        pairs.insert(0, pair)
    if pair is None and pairs:
        _off.pairs = pairs
    else:  # torch refuses, as it does without tiermem
        for own in pairs:
            _push(*own)


def _put_back() -> None:
    """Puts the pairs that are off back, as torch takes hooks again."""
    for pair in _off.pairs:
        _push(*pair)
    pairs, _off.pairs = _off.pairs, ()
    for pair in pairs:
        hooks = _hooks_of(pair)
        if hooks is not None:
            hooks.note_unseen()


def _put_into_graphs(outputs: Sequence[torch.Tensor], aliases: Sequence[torch.Tensor]) -> None:
    """Has aliases of blocks live as long as the graphs of some outputs."""
    for tensor in outputs:
        if tensor.grad_fn is not None:
            kept: dict[str, Any] = tensor.grad_fn.metadata  # type: ignore[assignment]
            kept.setdefault("tiermem", []).extend(aliases)


def _begin_of(tensor: torch.Tensor) -> int:
    """Returns where the storage of a tensor begins.

    Without asking for the storage where that can be: it would be an object as long as it lives, and
    there is one for most tensors that are saved.

    Raises:
        RuntimeError: If it is not strided, or has no memory.
    """
    first = tensor.data_ptr()
    if first:
        return int(first) - int(tensor.storage_offset()) * tensor.itemsize
    return tensor.untyped_storage().data_ptr()  # it has no elements


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a managed tensor that may be away; any other tensor as it is."""
    if type(tensor) in _PLAIN_TYPES:
        return tensor
    found = _whole(tensor)
    if found is None:
        return tensor
    found.version = -1  # with hooks torch does not look for changes
    return found.hooks.view(found)


def _whole(tensor: torch.Tensor) -> SavedView | None:
    """Returns a reference in place of a managed tensor, wherever it points; else None."""
    group = group_of.get(id(tensor))
    member = None if group is None else group.pointing.member_of(tensor)
    if group is None or member is None or member.materialized:
        return None
    if group.block.id in group.manager.parts.deferred:
        group.lender.saved.pay(group.block.id)
    spec = group.block.tensors[member.index]
    with _Plain():
        view = tensor.dtype, spec.offset // tensor.dtype.itemsize, tensor.shape, spec.stride
        return SavedView(group.lender.saved, group.block, tensor, view, tensor)


def _only_keeps(pair: Pair) -> bool:
    """Whether a pair returns what it is given, and would only make copies of weights."""
    if isinstance(pair[0], _Covering):
        return _only_keeps(pair[0].outer)
    name = getattr(pair[0], "__qualname__", "")
    return _hooks_of(pair) is not None or is_of_checkpoint(pair) or name.startswith("save_on_cpu.")


class WithBytes:
    """An unpack hook over another one, for pairs that are pushed outside every wrapped module.

    Attributes:
        unpack: The other one. A parameter that it returns is replaced by its bytes.
    """

    __slots__ = ("unpack",)

    def __init__(self, unpack: Callable[[Any], torch.Tensor]) -> None:
        self.unpack = unpack

    def __call__(self, packed: Any) -> torch.Tensor:
        """Unpacks."""
        return _bytes_of(self.unpack(packed))


class _Covering:
    """A pack hook over another pair."""

    __slots__ = ("hooks", "only_keeps", "outer", "recomputes", "recomputing")

    def __init__(self, hooks: SavedHooks, outer: Pair) -> None:
        self.hooks = hooks
        self.outer = outer
        # a checkpoint computes with the weights of then, changed or not
        self.recomputes = is_of_checkpoint(outer)
        self.recomputing = is_recomputation(outer)
        if isinstance(outer[1], Again):
            outer[1].covered = True
        self.only_keeps = _only_keeps(outer)

    @property
    def _checkpoint_internal(self) -> bool:
        """As :func:`passed_over` says, where it covers a checkpoint's pair."""
        return getattr(self.outer[0], "_checkpoint_internal", False)

    @property
    def _user_hooks(self) -> Pair | None:
        """The user's pair that such a pair covers."""
        return getattr(self.outer[0], "_user_hooks", None)

    def __call__(self, tensor: torch.Tensor) -> Any:
        hooks = self.hooks
        try:  # the other pair's own exceptions (a checkpoint's stop) pass by
            if type(tensor) is not _Tensor or hooks.rows.copies or hooks._room.seats:
                found = hooks.reference(tensor)
            else:
                try:  # the same in line, as in _pack_plain
                    slot = hooks._slot_at(_begin_of(tensor))
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
                return self._given(tensor, None)  # it counts them where the whole block is used
            found.version, found.times = -1, ALWAYS
            if not self._counts(found):
                return self._given(hooks.view(found), None)  # a copy: gradients are taken here
            # it counts what it sees, and computes again up to the last of it, whatever has side
            # effects there; the weight itself it would hold in HBM
            pack, unpack = self.outer
            with _Plain():  # it may be away
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
        """Gives a tensor to the other pair."""
        pack, unpack = self.outer
        packed = pack(tensor)
        if found is not None and packed is tensor:
            found.version = -1  # with hooks torch does not look for changes
            return _Handed((found, unpack))
        return _Handed((packed, unpack))


_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
change_pushed(_covered)
change_disabling(_take_off, _put_back)
