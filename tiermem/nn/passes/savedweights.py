"""Packs weights among the tensors that autograd saves as references, and unpacks them.

Autograd saves views of weights (``weight.t()``) that share the memory of an HBM
slot, and would hold the slot until backward. So they are packed as (block, offset,
shape, stride) and unpacked from wherever the block is then.

The parameter itself must never be kept: in backward it may point elsewhere, or at a
placeholder. It is recognized by its identity, whatever class it has at the moment.
If a user's hook has kept it, it is replaced by its bytes when it is unpacked.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import torch

from tiermem.core.block import Block, Role
from tiermem.errors import REFUSALS, ParameterError
from tiermem.nn.compat.entrances import inside
from tiermem.nn.compat.outside import OUTSIDE
from tiermem.nn.groups.away import group_of
from tiermem.nn.groups.olddata import REPLACED
from tiermem.nn.groups.pointing import Plain
from tiermem.nn.groups.writes import refuse_changed, refuse_replaced
from tiermem.nn.passes.activations import Kept, changed
from tiermem.nn.passes.savedrows import SavedCopies, SavedRows
from tiermem.nn.passes.savedview import SavedView
from tiermem.runtime.memory.slots import Slot, View, typed_view

if TYPE_CHECKING:
    from tiermem.nn.groups.group import Group
    from tiermem.nn.passes.runtime import ModuleRuntime

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Tensors of other classes are looked up by id: they may be managed, wherever they point."""
_REFERRED = (Role.PARAM, Role.BUFFER)
_MOST_VIEWS = 1 << 16
_STRIDED = torch.strided


class Beside(tuple[Kept, SavedView]):
    """An alias of a weight's bytes that never leave HBM, and the reference to the view."""

    __slots__ = ()


class SavedWeights:
    """Packs and unpacks views of the weights and large buffers of one runtime.

    Attributes:
        manager: The manager of their blocks.
        rows: Rows of stacked experts.
    """

    def __init__(self, runtime: ModuleRuntime) -> None:
        """Serves ``runtime``."""
        self._runtime = runtime
        self._owners = runtime.groups.owners
        self._group_of = runtime.groups.by_block.get
        self.manager = manager = runtime.manager
        self._gate = manager.gate
        self._at_hand = manager.acquirer.at_hand
        self._deferred = manager.parts.deferred
        self._record_of = manager.parts.table.get
        self._slots = manager.parts.slots.current
        self._slot_at = manager.parts.slots.by_address.get
        self.rows = SavedRows(self, runtime)
        self._room = runtime.experts.room
        self._views: dict[View, View] = {}

    # -- packing ---------------------------------------------------------

    def reference(self, tensor: torch.Tensor) -> SavedView | None:
        """Returns a reference to replace a weight, a large buffer or a view of one, or None."""
        if type(tensor) not in PLAIN_TYPES:
            return _whole(tensor)
        if tensor.layout is not _STRIDED:
            return None
        try:
            slot = self._slot_at(begin_of(tensor))
        except RuntimeError:  # zeros without memory, as forward-mode differentiation makes them
            return None
        if self.rows.copies or self._room.seats:
            found = self.rows.reference(tensor)
            if found is not None:
                return found
        return None if slot is None else self.view_in(slot, tensor)

    def view_in(self, slot: Slot, tensor: torch.Tensor) -> SavedView | None:
        """Returns a reference to replace a tensor whose bytes are in a slot, or None."""
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
        view = self._views.setdefault(view, view)  # shared: fewer objects for garbage collection
        return SavedView(self, block, tensor, view, owner)

    def group_of(self, block: Block) -> Group:
        """Returns the group of a block."""
        return self._runtime.groups.by_block[block.id]

    def beside(self, saved: SavedView, tensor: torch.Tensor) -> Beside | None:
        """Returns an alias, which is faster in backward, if the bytes never leave HBM; else None.

        It uses the storage that is only read, and has the tensor's version counter.
        """
        record = self._record_of(saved.block.id)
        if record is None or not record.fixed or saved.conj or saved.neg:
            return None
        slot = self._slots[saved.block.id]
        with Plain():
            alias = tensor.detach()
            alias.data = slot.sight.read_view(saved.view)
        return Beside((Kept((alias, alias._version)), saved))

    # -- unpacking -------------------------------------------------------

    def view(self, saved: SavedView) -> torch.Tensor:
        """Returns the view that was saved, in HBM.

        Raises:
            RuntimeError: If the weight was changed in place since.
            ParameterError: If its module was unwrapped and it is unknown where the bytes are.
            StorageError: If they cannot be read.
            ClosedError: If the manager is closed.
        """
        owner, version, backward = saved.owner, saved.version, self._runtime.backward
        if saved.block.id in self._deferred.owed:
            self.pay(saved.block.id)
        if owner is not None and version != -1:
            with Plain():  # it may not be held
                now = owner._version
            if now != version:
                refuse_changed(owner, version, saved.block.name)  # raises; nothing to repair
            if type(saved) is SavedCopies and saved.counter._version != saved.counted:
                raise changed(saved.counter, saved.counted, saved.shown[2])
        refuse_replaced_since(saved)
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
        """Performs the deferred step of a block, which changes the weights and their version."""
        with self.manager.lock:
            self.manager.parts.deferred.pay(block_id)

    def _fetch(self, saved: SavedView, view: torch.Tensor | None) -> torch.Tensor:
        """Returns the saved tensor; ``view`` is a view of the block's bytes if these are in HBM."""
        if type(saved) is not SavedView:
            view = self.rows.again(saved)
            whole = self._here(saved) if view is None else None
            if whole is not None:
                view = self.rows.out_of(saved, whole)
        if view is None:
            view = self.rows.out_of(saved, self._brought(saved))
        if torch.is_grad_enabled():
            # a double backward saves this again, without hooks of tiermem's: a copy in ordinary
            # memory does not hold the block in HBM
            with torch.no_grad():
                view = view.clone(memory_format=torch.preserve_format)
        if saved.conj:
            view = view.conj()
        if saved.neg:
            view = torch._neg_view(view)
        return view

    def _here(self, saved: SavedView) -> torch.Tensor | None:
        """Returns a view of a block that backward has just used, or that never leaves HBM."""
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
        """Returns the saved tensor of a block that has to be acquired first, or was removed."""
        block = saved.block
        if self._record_of(block.id) is None and not self._gate.closed:
            return _taken_out(saved)
        slot = self.manager.acquire(block)
        try:
            return slot.sight.read_view(saved.view)
        finally:
            self.manager.release(block)


def refuse_replaced_since(saved: SavedView) -> None:
    """Refuses a view whose values are lost, as its weight has been given other data since.

    Raises:
        RuntimeError: If it has.
    """
    owner, times = saved.owner, saved.times
    if times < REPLACED.times and owner is not None and REPLACED.since(owner, times):
        raise refuse_replaced(saved.block.name)


def _taken_out(saved: SavedView) -> torch.Tensor:
    """Returns a view of a weight whose module was unwrapped since, from the parameter's bytes.

    Raises:
        ParameterError: If the parameter is unknown, or has other data.
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


def begin_of(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's storage.

    If possible without reading the storage itself, for which torch would create a Python object
    that exists as long as the storage; there is one for most saved tensors.

    Raises:
        RuntimeError: If the tensor is not strided, or has no memory.
    """
    first = tensor.data_ptr()
    if first:
        return int(first) - int(tensor.storage_offset()) * tensor.itemsize
    return tensor.untyped_storage().data_ptr()  # it has no elements


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a managed tensor that may not be held; any other tensor as it is."""
    if type(tensor) in PLAIN_TYPES:
        return tensor
    found = _whole(tensor)
    if found is None:
        return tensor
    found.version = -1  # with hooks torch does not check for changes
    return found.weights.view(found)


def _whole(tensor: torch.Tensor) -> SavedView | None:
    """Returns a reference to replace a managed tensor, wherever it points, or None."""
    group = group_of.get(id(tensor))
    member = None if group is None else group.pointing.member_of(tensor)
    if group is None or member is None or member.materialized:
        return None
    weights = group.lender.saved.weights
    if group.block.id in group.manager.parts.deferred:
        weights.pay(group.block.id)
    spec = group.block.tensors[member.index]
    with Plain():
        view = tensor.dtype, spec.offset // tensor.dtype.itemsize, tensor.shape, spec.stride
        return SavedView(weights, group.block, tensor, view, tensor)
