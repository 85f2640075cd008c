"""Which saved tensors leave HBM between forward and backward, and how they are fetched again.

Autograd passes every tensor that it saves to a pack hook (:mod:`tiermem.nn.passes.saved`). If a
tensor is not a weight, is large enough and on the device, it is copied to DRAM or NVMe, and
autograd keeps a :class:`SavedActivation` instead. All views of one storage share one copy.

A saved tensor that is changed in place afterwards is an error in backward, as it is without hooks.
With hooks autograd does not check that, so it is checked here. To keep the tensor's version counter
after the tensor is freed, there is an alias of it without bytes.
"""

from __future__ import annotations

import threading
from weakref import ref

import torch

from tiermem.config import Home
from tiermem.errors import CapacityError
from tiermem.nn.passes.scopes import PassScope
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.memory.slots import typed_view
from tiermem.runtime.metrics.counters import ActivationStats, ResidencyRow
from tiermem.runtime.services.activation_store import ActivationStore, Copy

_ALIGNED = 64
_UNIT = 512
_SPREAD = 4
_AHEAD_BLOCKS = 2


class Kept(tuple[torch.Tensor, int]):
    """A saved tensor that stays where it is, and the version of its contents when it was saved.

    For the output of a node it has an alias instead, as the node would otherwise keep it in a
    reference cycle. It is a tuple, since that is created without a Python call. A tensor of version
    0 needs no such tuple: the tensor (or its alias) itself is saved, and must still have version 0.
    """

    __slots__ = ()


def changed(counter: torch.Tensor, version: int, shape: tuple[int, ...]) -> RuntimeError:
    """Returns the error that autograd raises if a saved tensor was changed in place."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an "
        f"inplace operation: [{counter.type()} {list(shape)}] is at version "
        f"{counter._version}; expected version {version} instead. Hint: enable anomaly "
        "detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )


class SavedActivation:
    """A view of a copy below HBM.

    Attributes:
        copy: The copy, shared by all views of the storage.
        counter: An alias of the tensor without bytes; it has the tensor's version counter.
        version: The version when the tensor was saved.
    """

    __slots__ = ("conj", "copy", "counter", "dtype", "neg", "offset", "shape", "stride", "version")

    def __init__(self, copy: Copy, tensor: torch.Tensor, counter: torch.Tensor) -> None:
        self.copy = copy
        self.counter = counter
        self.version = tensor._version
        self.offset = int(tensor.storage_offset())
        self.shape = tuple(tensor.shape)
        self.stride = tensor.stride()
        self.dtype = tensor.dtype
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()


class _Where(threading.local):
    """The position of a thread in its forward pass."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.next_layer = 0
        self.name = "the model"


class Activations:
    """The saved tensors of one manager's modules.

    Attributes:
        store: Their copies; None if activations stay in HBM.
    """

    def __init__(
        self,
        manager: BlockManager,
        home: Home,
        minimum: int,
        layers: int | None,
        ahead: int | None,
    ) -> None:
        """Starts without saved tensors.

        Args:
            manager: The manager of the tiers.
            home: ``"dram"`` or ``"nvme"``; otherwise they stay in HBM.
            minimum: Bytes below which a tensor stays.
            layers: How many layers, from the first, have theirs offloaded; None for all.
            ahead: Bytes that may be prefetched; None for those of two blocks.
        """
        self._manager = manager
        self._home = home
        self._minimum = max(1, minimum)
        self._layers = layers
        self._ahead = ahead
        self._where = _Where()
        self._since = 0
        self._largest = 0
        self._numbers: dict[tuple[int, str], int] = {}
        self._none: dict[torch.dtype, torch.Tensor] = {}
        below = home in ("dram", "nvme") and layers != 0
        self.store = ActivationStore(manager, home, self.window) if below else None

    def check(self) -> None:
        """Refuses a home that does not exist.

        Raises:
            CapacityError: If activations should go to NVMe and there is no such tier.
        """
        if (
            self.store is not None
            and self._home == "nvme"
            and self._manager.parts.homes.swap is None
        ):
            raise CapacityError(
                "activations should live in tier nvme, and there is none; give "
                "TierManager(nvme=folder)"
            )

    def window(self) -> int:
        """Returns how many bytes may be in transfer in each direction."""
        if self._ahead is not None:
            return self._ahead
        return _AHEAD_BLOCKS * max(self._largest, self._since)

    # -- the pass --------------------------------------------------------

    def begin_forward(self) -> None:
        """Called when a wrapped module is called while none is running."""
        if self.store is None:
            return
        where = self._where
        where.layers.clear()
        where.next_layer = 0
        with self._manager.lock:
            self._block_begins()
            self.store.reap()

    def begin_backward(self) -> None:
        """Called when backward has reached a wrapped module."""
        if self.store is not None:
            with self._manager.lock:
                self.store.begin_sweep()

    def end_backward(self) -> None:
        """Called when backward has ended, or was interrupted."""
        if self.store is not None:
            with self._manager.lock:
                self.store.reap()

    def enter(self, scope: PassScope) -> bool:
        """Called when a module with a block of its own is called; returns if ``leave`` follows."""
        if self.store is None or torch._C._current_graph_task_id() != -1:
            return False
        where = self._where
        number = self._number_of(scope)
        if number is not None:
            where.layers.append(number)
            where.next_layer = number + 1
        with self._manager.lock:
            self._block_begins()
        where.name = scope.name or "the model"
        return number is not None

    def leave(self) -> None:
        """Called when that module has returned."""
        self._where.layers.pop()

    def _block_begins(self) -> None:
        self._largest = max(self._largest, self._since)
        self._since = 0

    def _number_of(self, scope: PassScope) -> int | None:
        """Returns the number of the layer that a module is, None if it is not a layer.

        Layers are the numbered items of lists at which a block begins, in the order of the
        model; a module inside another layer is part of that one.
        """
        key = (scope.number, scope.name)
        if key not in self._numbers:
            outer: list[str] = []
            for name, other in scope.wrapped.scopes.items():
                inside = any(name.startswith(f"{layer}.") for layer in outer)
                if other.begins and not inside and name.rpartition(".")[2].isdecimal():
                    self._numbers[scope.number, name] = len(outer)
                    outer.append(name)
            self._numbers.setdefault(key, -1)
        number = self._numbers[key]
        return None if number < 0 else number

    # -- saving ----------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> SavedActivation | None:
        """Copies a saved tensor out of HBM.

        Returns:
            The object that replaces it; None if it stays.
        """
        store = self.store
        if store is None or tensor.layout is not torch.strided or tensor.is_nested:
            return None  # some of these tensors have no number of bytes
        if tensor.nbytes < self._minimum:
            return None
        if torch._C._current_graph_task_id() != -1:
            return None  # recomputed: backward needs it immediately
        if self._layers is not None and self._layer() >= self._layers:
            return None
        if not self._can_leave(tensor):
            return None
        storage = tensor.untyped_storage()
        span = _span(tensor, storage)
        if span is None or span[1] - span[0] < self._minimum:
            return None
        with self._manager.lock:
            manager = self._manager
            if storage.data_ptr() in manager.parts.slots.by_address or manager.gate.closed:
                return None
            if manager.parts.copy.capturing():
                return None  # a CUDA graph is replayed without these hooks
            copy = store.known(storage, *span)
            if copy is not None and not _same_contents(copy, tensor):
                copy = None
            if copy is not None:
                store.again(copy)
            else:
                name = f"activation of {self._where.name}"
                copy = store.send(storage, span[0], span[1] - span[0], name)
                if copy is None:
                    return None
                self._since += copy.nbytes
                copy.root, copy.version = ref(_root(tensor)), tensor._version
            return SavedActivation(copy, tensor, self._counter(tensor))

    def _layer(self) -> int:
        """Returns the layer to which a tensor that is saved now belongs; between two, the next."""
        where = self._where
        return where.layers[-1] if where.layers else where.next_layer

    def _can_leave(self, tensor: torch.Tensor) -> bool:
        """Whether a strided tensor is an ordinary one, on the device, and not an autograd leaf."""
        if (
            type(tensor) is not torch.Tensor
            or tensor.device != self._manager.parts.device
            or tensor.is_quantized
            or tensor._is_zerotensor()
        ):
            return False
        base = _root(tensor)
        # the graph holds a leaf that needs a gradient anyway, so nothing would be gained
        return not (base.is_leaf and base.requires_grad)

    def _counter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns an alias of a tensor without bytes, with its version counter."""
        nothing = self._none.get(tensor.dtype)
        if nothing is None:
            nothing = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            self._none[tensor.dtype] = nothing
        alias = tensor.detach()
        alias.data = nothing
        return alias

    # -- using -----------------------------------------------------------

    def open(self, saved: SavedActivation) -> torch.Tensor:
        """Returns a saved tensor in HBM; the caller checks its version.

        Raises:
            StorageError: If its bytes cannot be read.
            ClosedError: If the manager is closed.
        """
        store = self.store
        if store is None:
            raise RuntimeError("nothing was offloaded here")
        with self._manager.lock:
            storage, low = store.open(saved.copy)
        offset = saved.offset - low // saved.dtype.itemsize
        view = typed_view(storage, saved.dtype, offset, saved.shape, saved.stride)
        if saved.conj:
            view = view.conj()
        if saved.neg:
            view = torch._neg_view(view)
        shared = saved.counter.detach()  # a graph of backward (double backward) checks it, too
        shared.data = view
        return shared

    # -- reports ---------------------------------------------------------

    def stats(self) -> ActivationStats:
        """Returns the counters."""
        counters = self._manager.parts.counters.activations
        if self.store is None:
            return counters.freeze(0, 0)
        with self._manager.lock:
            self.store.collect()
            return counters.freeze(self.store.pool.used, self.store.pool.peak)

    def rows(self) -> list[ResidencyRow]:
        """Returns where every saved tensor below HBM is."""
        if self.store is None:
            return []
        with self._manager.lock:
            return [_row(copy, self._home) for copy in self.store.copies()]


def _span(tensor: torch.Tensor, storage: torch.UntypedStorage) -> tuple[int, int] | None:
    """Returns which bytes of its storage are copied for a tensor, None if it should stay.

    The whole storage, if most of it belongs to the tensor: then other views of it are saved without
    further cost. Otherwise the bytes between its first and its last element, beginning at an
    aligned byte, so that kernels find the same alignment as in the original.
    """
    total, nbytes = storage.nbytes(), tensor.nbytes
    if storage.data_ptr() % _ALIGNED:
        return None
    if total <= _SPREAD * nbytes:
        return 0, total
    item = tensor.element_size()
    first = int(tensor.storage_offset())
    last = first
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * int(stride)
    low, high = first * item // _UNIT * _UNIT, (last + 1) * item
    return (low, high) if high - low <= _SPREAD * nbytes else None


def _root(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the base of a view, or the tensor itself."""
    return tensor if tensor._base is None else tensor._base


def _same_contents(copy: Copy, tensor: torch.Tensor) -> bool:
    """Whether nothing was written to the storage since the copy was made.

    Tensors of one storage need not share a version counter (``unsafe_chunk``, ``detach`` of
    ``data``); views of one tensor do.
    """
    root = None if copy.root is None else copy.root()
    return root is _root(tensor) and tensor._version == copy.version


def _row(copy: Copy, home: str) -> ResidencyRow:
    here = copy.fetched is not None or copy.alive() is not None
    return ResidencyRow(
        block=f"{copy.name} #{copy.ident}",
        role="activation",
        home=home,
        nbytes=copy.nbytes,
        tiers={"hbm": "valid" if here else "absent", home: "valid" if copy.place else "absent"},
        leases=0,
    )
