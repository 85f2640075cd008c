"""Views of blocks in HBM, and whether anything else still holds one (an alias).

Each copy of a block at an address in HBM is seen through one storage. Its
reference count, minus the references that this module holds itself, is the number
of aliases that exist elsewhere: parameters that point there, views a user keeps.
Backward reads a weight through a second storage over the same bytes:
as long as that one has users the bytes stay too, but nothing writes through it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch.autograd.graph import get_gradient_edge

from tiermem.core.block import ANNEX, Block, Extent
from tiermem.runtime.base.functorch import (
    modes,
    outside_inference,
    transforming,
    untransformed,
    without_modes,
)
from tiermem.storage.arena import Arena, DeviceBytes

_KEPT_PER_BLOCK = 8
_KEPT_PER_TENSOR = 4  # at most so many views are kept per tensor and place

View = tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]
"""What a tensor shows of a storage: dtype, offset and sizes (both in elements), strides."""


_WithoutAutograd: Any = torch._C._AutoDispatchBelowADInplaceOrView

use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""Returns how many tensors and storage objects refer to a storage, given its handle."""


def typed_view(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:
    """Returns a tensor over a storage.

    Args:
        storage: The storage.
        dtype: Its dtype.
        offset: In elements of ``dtype``.
        shape: Sizes.
        stride: Strides in elements.
    """
    if modes():
        with without_modes():
            return typed_view(storage, dtype, offset, shape, stride)
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    recorded = torch.is_grad_enabled()  # torch.no_grad() in line
    torch._C._set_grad_enabled(False)
    try:
        return empty.set_(storage, offset, shape, stride)
    finally:
        torch._C._set_grad_enabled(recorded)


def in_own_storage(view: torch.Tensor) -> torch.Tensor:
    """Returns a tensor over the bytes of another one, with a storage of exactly those bytes.

    torch refuses operations that enlarge it in place (``resize_``, ``out=``, kernels). All views of
    it together count as one reference to the storage of the other tensor.

    Args:
        view: Dense.
    """
    if modes():
        with without_modes():
            return in_own_storage(view)
    begin, nbytes = int(view.storage_offset()) * view.dtype.itemsize, view.nbytes
    seen = typed_view(view.untyped_storage(), torch.uint8, begin, (nbytes,), (1,))
    if seen.device.type == "cpu":
        alone = torch.from_numpy(seen.numpy())
    else:
        alone = torch.as_tensor(DeviceBytes(seen, seen.data_ptr(), nbytes), device=seen.device)
    return typed_view(alone.untyped_storage(), view.dtype, 0, view.shape, view.stride())


def _views_of(block: Block, storage: torch.UntypedStorage) -> list[torch.Tensor]:
    """Returns one tensor per spec of a block, in order, over the storage it is in.

    Uses ``as_strided``, which takes half the time of an empty tensor and ``set_``: a training step
    creates several views of each parameter, as its blocks get another place each time. Autograd is
    disabled; otherwise it would treat them as views of one tensor, with one version counter.
    """
    views: list[torch.Tensor] = []
    flat: dict[torch.dtype, torch.Tensor] = {}
    with _WithoutAutograd():
        for spec in block.tensors:
            dtype = spec.dtype
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{spec.name}: {dtype!r} is not a torch dtype")
            over = flat.get(dtype)
            if over is None:
                over = flat[dtype] = typed_view(storage, dtype, 0, (0,), (1,))
            views.append(over.as_strided(spec.shape, spec.stride, spec.offset // dtype.itemsize))
    return views


@dataclass(eq=False)
class Sight:
    """Views of one range of HBM, for all blocks whose tensors are laid out alike.

    Layers of a model that are at the same place one after the other share it, so it is still in the
    processor's caches. Only one such block is there at a time, and it does not leave as long as
    there are aliases, so the reference counts are those of the block that is there.

    Attributes:
        bytes: All of it, 1-D uint8.
        views: One tensor per spec of the blocks, in order.
        storage: The storage of all of them.
        reading: Another storage over the same bytes, for tensors that are only read.
        handles: Handles of both storages; valid as long as the storages are kept here.
        address: First byte in memory.
        baseline: References to ``storage`` that tiermem holds itself.
        reading_baseline: Likewise for ``reading``, without those of ``read``.
        read: Tensors over ``reading``; copies of them are handed out.
    """

    bytes: torch.Tensor
    views: list[torch.Tensor]
    storage: torch.UntypedStorage
    reading: torch.UntypedStorage
    handles: tuple[int, int]
    address: int
    baseline: int
    reading_baseline: int
    read: dict[View, torch.Tensor] = field(default_factory=dict)

    def read_view(self, view: View) -> torch.Tensor:
        """Returns a new tensor over ``reading``, made from the last one with the same view."""
        found = self.read.get(view)
        if found is None:
            found = typed_view(self.reading, *view)
            full = len(self.read) >= _KEPT_PER_TENSOR * len(self.views)
            if full or transforming() or modes() or torch.is_inference_mode_enabled():
                return found  # a tensor of a transform or a mode cannot be used elsewhere
            self.read[view] = found
        return found.data


class Pointer(Protocol):
    """An object that has pointed parameters at a block."""

    def away(self) -> None:
        """Points them elsewhere; no lease holds them, and the block is about to leave."""
        ...

    def all_at(self, slot: Slot) -> bool:
        """Whether each is still where it was pointed; hidden ones are asked without their class."""
        ...


_references: Callable[[torch.Tensor], int] = torch._C.TensorBase._use_count  # type: ignore[attr-defined]


def has_saved(param: torch.Tensor) -> bool:
    """Whether a graph refers to a parameter for more than accumulating its gradient.

    The parameter's Python object counts as one reference, the accumulating node as another.
    """
    with torch._C.DisableTorchFunctionSubclass(), outside_inference():
        count = _references(param)
        if count <= 1 or not param.requires_grad:
            return count > 1
        if count > 2 or transforming() or modes():
            return True
        node = get_gradient_edge(param).node  # created now if no graph has it
        return _references(param) > 1 + (node is not None)


@dataclass(slots=True, eq=False)
class Slot:
    """A block at one address of HBM.

    Attributes:
        block: The block.
        extent: The address.
        bytes: All of it, 1-D uint8.
        views: One tensor per spec of the block, in order.
        storage: Handle of the storage of all of them.
        reading: Handle of another storage over the same bytes, for tensors that are only read.
        address: First byte in memory; identifies the storage of an alias.
        baseline: References to ``storage`` that tiermem holds itself.
        pointed: References of parameters and buffers that point here.
        idle: Whether those parameters are merely left pointing here: they cannot be used before
            the block is leased again, so the block may leave.
        sight: The object that has the views.
        pointer: The object that last pointed parameters here, and can point them elsewhere.
        saved: Parameters that autograd may have saved themselves, without a hook noticing.
        viewed: Whether it is still to be checked if views that an operation on the parameters
            has returned were written.
    """

    block: Block
    extent: Extent
    bytes: torch.Tensor
    views: list[torch.Tensor]
    storage: int
    reading: int
    address: int
    baseline: int
    sight: Sight
    pointed: int = 0
    idle: bool = False
    pointer: Pointer | None = None
    saved: Sequence[torch.Tensor] = ()
    viewed: bool = False

    @property
    def wanted(self) -> bool:
        """Whether a parameter that holds no lease expects to find the block here."""
        return self.pointed > 0 and not self.idle

    @property
    def aliased(self) -> bool:
        """Whether anything but tiermem and the pointed parameters has access to the bytes."""
        sight, writers = self.sight, self.baseline + self.pointed
        readers = sight.reading_baseline + len(sight.read)
        seen = use_count(self.storage) > writers or use_count(self.reading) > readers
        return seen or (bool(self.saved) and self.is_saved())

    def is_saved(self) -> bool:
        """Whether an existing graph may have saved parameters themselves, or still may.

        A parameter that is saved that way shows whatever it points at.
        """
        return self.wanted or self.was_saved()  # while it is used, more may be saved

    def was_saved(self) -> bool:
        """Whether an existing graph has saved parameters themselves."""
        if any(map(has_saved, self.saved)):
            return True
        self.saved = ()
        return False

    def others(self) -> bool:
        """Whether anything else may write the bytes, or a parameter does not point here."""
        return use_count(self.storage) != self.baseline + self.pointed


class Holder(Protocol):
    """An object that points parameters at a block.

    A subclass that overrides nothing has no lease and cannot be pointed anew.
    """

    def unpoint(self) -> None:
        """Points elsewhere what points at the block without a lease; the block is about to leave.

        The caller has the manager's lock.
        """
        return

    def repoint(self, slot: Slot) -> None:
        """Points at the block's new place; called only if :meth:`leases` allows it."""
        raise NotImplementedError

    def leases(self) -> int:
        """Returns how many leases of the block belong to this holder, and follow a repoint."""
        return 0

    def settle_views(self) -> None:
        """Marks the block as written if views have written it (:attr:`Slot.viewed`)."""
        return

    def read_elsewhere(self) -> bool:
        """Whether another thread may be reading the block, so that it cannot be moved."""
        return False

    def repair(self) -> None:
        """Drops all state after an exception anywhere; the block has no lease then."""
        return

    def forked(self) -> None:
        """Points elsewhere all that points at the block: a forked child has no bytes of it."""
        return


class SlotCache:
    """Creates slots and keeps them, since addresses repeat from step to step.

    Attributes:
        annex: Returns bytes of DRAM as kernels see them, given their address.
        current: Slot of each block that is in HBM or being fetched.
        by_address: The same slots by the address of their first byte.
        kept: Former and current slots of blocks, by id and by offset in HBM.
    """

    def __init__(self, arena: Arena) -> None:
        """Creates slots in ``arena``."""
        self.arena = arena
        self.annex: Callable[[Extent], torch.Tensor] = arena.bytes_of
        self.kept: dict[int, dict[int, Slot]] = {}
        self._sights: WeakValueDictionary[tuple[Extent, int], Sight] = WeakValueDictionary()
        self._layouts: dict[int, int] = {}  # by block: a number of its layout
        self._numbers: dict[Hashable, int] = {}
        self.current: dict[int, Slot] = {}
        self.by_address: dict[int, Slot] = {}

    def enter(self, block: Block, extent: Extent) -> Slot:
        """Returns the slot of a block at its new address."""
        kept = self.kept.get(block.id)
        slot = None if kept is None else kept.get(extent.offset)
        if slot is None:
            slot = self.slot(block, extent)
        if block.id in self.current:
            self.leave(block.id)
        self.current[block.id] = slot
        self.by_address[slot.address] = slot
        return slot

    def leave(self, block_id: int) -> None:
        """Removes a block that is no longer in HBM."""
        slot = self.current.pop(block_id, None)
        if slot is not None and self.by_address.get(slot.address) is slot:
            del self.by_address[slot.address]

    def slot(self, block: Block, extent: Extent) -> Slot:
        """Returns the slot of a block at an address."""
        kept = self.kept.get(block.id)
        if kept is None:
            kept = self.kept[block.id] = {}
        slot = kept.get(extent.offset)
        if slot is None:
            slot = kept[extent.offset] = self._make(block, extent)
            if len(kept) > _KEPT_PER_BLOCK:
                del kept[next(iter(kept))]
        return slot

    def repair(self, places: Iterable[tuple[Block, Extent]]) -> None:
        """Sets which blocks are in HBM, after an operation was interrupted.

        Args:
            places: Every block that is there or being fetched, and its extent.
        """
        self.by_address.clear()
        current = dict(self.current)
        self.current.clear()
        for block, extent in places:
            slot = current.get(block.id)
            if slot is None or slot.extent != extent:
                slot = self.slot(block, extent)
            self.current[block.id] = self.by_address[slot.address] = slot

    def forget(self, block_id: int) -> None:
        """Drops the slots of a block."""
        self.kept.pop(block_id, None)
        self._layouts.pop(block_id, None)

    def clear(self) -> None:
        """Drops every slot."""
        self.kept.clear()
        self.current.clear()
        self.by_address.clear()

    def _make(self, block: Block, extent: Extent) -> Slot:
        layout = self._layout_of(block)
        sight = self._sights.get((extent, layout))
        if sight is None:
            sight = self._sights[extent, layout] = self._look(block, extent)
        return Slot(
            block,
            extent,
            sight.bytes,
            sight.views,
            *sight.handles,
            sight.address,
            sight.baseline,
            sight,
        )

    def _layout_of(self, block: Block) -> int:
        """Returns a number that is the same for blocks of one role with the same layout."""
        found = self._layouts.get(block.id)
        if found is None:
            tensors = tuple((s.offset, s.shape, s.stride, s.dtype) for s in block.tensors)
            layout = block.role, tensors  # written blocks count their writes apart from weights
            found = self._numbers.setdefault(layout, len(self._numbers))
            self._layouts[block.id] = found
        return found

    def _look(self, block: Block, extent: Extent) -> Sight:
        if transforming():
            with untransformed():
                return self._look(block, extent)
        if modes():
            with without_modes():
                return self._look(block, extent)
        with outside_inference(), torch.no_grad():
            whole = self._bytes_of(extent)
            storage = whole.untyped_storage()
            views = _views_of(block, storage)
            reading = self._bytes_of(extent).untyped_storage()
        handles = storage._cdata, reading._cdata
        own, own_reading = map(use_count, handles)
        address = storage.data_ptr()
        return Sight(whole, views, storage, reading, handles, address, own, own_reading)

    def _bytes_of(self, extent: Extent) -> torch.Tensor:
        if extent.offset >= ANNEX:
            return self.annex(Extent(extent.offset - ANNEX, extent.nbytes))
        return self.arena.bytes_of(extent)
