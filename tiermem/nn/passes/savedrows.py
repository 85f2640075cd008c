"""Rows of stacked experts that autograd saves: packed as references, fetched again in backward.

A row is in a seat, which is needed for another row long before backward. Copies of rows are as
large as the chosen rows together. Instead of either, only the numbers of the rows and their block
are kept. Backward copies the rows into seats again, or reads them from the whole block if there are
no seats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tiermem.nn.compat.hookpair import top_pair
from tiermem.nn.groups.above import WeightViews
from tiermem.nn.groups.rows import gather
from tiermem.nn.passes.savedview import SavedView
from tiermem.runtime.memory.expert_seats import Piece, Use
from tiermem.runtime.memory.slots import View, typed_view
from tiermem.runtime.services.expert_store import ExpertStore
from tiermem.runtime.services.saved_experts import SavedExperts

if TYPE_CHECKING:
    from tiermem.nn.passes.runtime import ModuleRuntime


class _OfStack(SavedView):
    """A view of rows of one of a stack's tensors.

    Attributes:
        index: Index of the tensor in its block.
        use: The call that got the rows.
    """

    __slots__ = ("index", "use")

    def __init__(
        self, weights: WeightViews, tensor: torch.Tensor, view: View, use: Use, index: int
    ) -> None:
        block = use.stack.block
        group = weights.group_of(block)
        super().__init__(weights, block, tensor, view, None)
        self.index = index
        self.use = use
        for entry in group.entries:
            if entry.index == index:
                self.owner = entry.param
                with torch._C.DisableTorchFunctionSubclass():  # it is away
                    self.version = self.owner._version


class SavedRow(_OfStack):
    """A view of one expert's row.

    Attributes:
        piece: The row.
    """

    __slots__ = ("piece",)

    def __init__(self, weights: WeightViews, tensor: torch.Tensor, use: Use, piece: Piece) -> None:
        first = use.stack.begin_of(piece) // tensor.dtype.itemsize + int(tensor.storage_offset())
        view = tensor.dtype, first, tensor.shape, tensor.stride()
        super().__init__(weights, tensor, view, use, piece.tensor)
        self.piece = piece


class SavedCopies(_OfStack):
    """A view of copies of rows; ``view`` is the whole parameter's.

    Attributes:
        counter: A tensor without bytes that has the copies' version counter.
        counted: The version of the copies when they were saved.
        experts: Their experts, in order.
        shown: Shape, strides and offset of the view in the copies.
    """

    __slots__ = ("counted", "counter", "experts", "shown")

    def __init__(self, weights: WeightViews, tensor: torch.Tensor, copied: Copied) -> None:
        spec: Any = copied.use.stack.block.tensors[copied.tensor]
        whole = spec.dtype, spec.offset // spec.dtype.itemsize, spec.shape, spec.stride
        super().__init__(weights, tensor, whole, copied.use, copied.tensor)
        self.experts = list(copied.experts)
        self.shown = tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride()
        self.counter, self.counted = tensor.detach(), tensor._version
        self.counter.data = tensor.new_empty(0)


class Copied(NamedTuple):
    """Copies of rows that a current call has got.

    ``weak`` prevents that the handle of their storage is reused, without keeping the bytes.
    """

    use: Use
    tensor: int
    experts: Sequence[int]
    version: int
    weak: StorageWeakRef


class SavedRows:
    """Packs and unpacks rows of the stacks of one runtime.

    Attributes:
        copies: Copies of rows in current calls, by the handles of their storages.
        store: The store of rows.
    """

    def __init__(self, weights: WeightViews, runtime: ModuleRuntime) -> None:
        """Starts with nothing packed."""
        self._weights = weights
        self._runtime = runtime
        self._manager = runtime.manager
        self.store: ExpertStore = runtime.experts
        self.calls = SavedExperts(runtime.experts)
        self.copies: dict[int, Copied] = {}

    # -- what calls were given -------------------------------------------

    def copied(self, use: Use, index: int, experts: Sequence[int], copy: torch.Tensor) -> None:
        """Notes copies of rows that a call gets."""
        storage = copy.untyped_storage()
        weak = StorageWeakRef(storage)
        self.copies[storage._cdata] = Copied(use, index, experts, copy._version, weak)

    @staticmethod
    def version(weight: torch.Tensor) -> int:
        """Returns the version of a weight that is saved now; -1 if changes are not an error."""
        outer = top_pair()
        if outer is not None and getattr(outer[0], "recomputes", False):
            return -1
        with torch._C.DisableTorchFunctionSubclass():  # it is away
            return weight._version

    def end(self, use: Use) -> None:
        """Forgets the copies of a call that has ended."""
        if self.copies:
            for handle in [h for h, copied in list(self.copies.items()) if copied.use is use]:
                del self.copies[handle]

    # -- packing ---------------------------------------------------------

    def reference(self, tensor: torch.Tensor) -> SavedView | None:
        """Returns a reference to replace a row, copies of rows or a view of either, or None."""
        storage = tensor.untyped_storage()
        copied = self.copies.get(storage._cdata)
        if copied is not None:
            if tensor._version != copied.version:
                return None  # they were written, so they are no longer copies
            use, index, experts = copied.use, copied.tensor, copied.experts
            use.saved.update((use.stack.piece(index, e), None) for e in sorted({*experts}))
            return SavedCopies(self._weights, tensor, copied)
        with self._manager.lock:  # another thread's call may give the room back
            found = self.calls.shown(storage.data_ptr())
        if found is None:
            return None
        use, piece = found
        use.saved[piece] = None
        return SavedRow(self._weights, tensor, use, piece)

    # -- unpacking -------------------------------------------------------

    def resume(self, use: Use) -> Use:
        """Returns backward's use of the rows that a call has saved."""
        self._runtime.backward.enter()
        if torch._C._current_graph_task_id() == -1:
            return use
        with self._manager.lock:
            return self.calls.resume(use)

    def again(self, saved: SavedView) -> torch.Tensor | None:
        """Returns the saved tensor from rows in seats; None if that is not possible."""
        if not isinstance(saved, SavedRow | SavedCopies) or self._manager.gate.closed:
            return None
        use, index, stack = self.resume(saved.use), saved.index, saved.use.stack

        def rows(experts: Sequence[int]) -> list[torch.Tensor] | None:
            with self._manager.lock:
                return self.store.rows(use, stack, index, experts)

        if isinstance(saved, SavedCopies):
            copies = gather(rows, saved.experts, self.store.seats_for(stack, index))
            return None if copies is None else _seen(copies, saved.shown)
        found = rows((saved.piece.expert,))
        if found is None:
            return None
        dtype, first, shape, stride = saved.view
        first -= stack.begin_of(saved.piece) // dtype.itemsize
        return typed_view(found[0].untyped_storage(), dtype, first, shape, stride)

    @staticmethod
    def out_of(saved: SavedView, view: torch.Tensor) -> torch.Tensor:
        """Returns the saved tensor, from a view of the whole block's bytes."""
        if not isinstance(saved, SavedCopies):
            return view
        return _seen(
            view[torch.tensor(saved.experts, dtype=torch.int64, device=view.device)], saved.shown
        )


def _seen(copies: torch.Tensor, view: View) -> torch.Tensor:
    return typed_view(copies.untyped_storage(), *view)
