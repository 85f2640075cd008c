"""A stand-in for a stacked parameter in a call that reads a few of its rows.

A *row* is the slice of one expert. ``weight[expert]`` is that expert's row, which is in HBM by
itself; ``weight[experts]`` is a copy of those rows; a grouped product is computed for the groups
that have members. Every other operation fetches the whole block, and returns what it would return
for the parameter itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tiermem.nn.compat.entrances import inside
from tiermem.nn.compat.outside import outside
from tiermem.nn.groups.above import RowSaving
from tiermem.nn.groups.grouped import Groups
from tiermem.nn.groups.writes import refuse_changed
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.memory.expert_seats import Stack, Use
from tiermem.runtime.services.expert_store import ExpertStore
from tiermem.runtime.services.expert_tensors import Lent

_LONGEST = 0.2
"""Seconds for which a product waits for other threads to submit theirs."""
_GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")
_DERIVED = _GROUPED[:2]
"""Functions among these whose gradient is such a product again."""
_INDICES = (torch.int64, torch.int32)
_OPERATORS = (
    "__add__",
    "__radd__",
    "__sub__",
    "__rsub__",
    "__mul__",
    "__rmul__",
    "__truediv__",
    "__rtruediv__",
    "__matmul__",
    "__rmatmul__",
    "__neg__",
    "__pow__",
    "__rpow__",
    "__eq__",
    "__ne__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__len__",
    "__iter__",
    "__setitem__",
    "__iadd__",
    "__imul__",
    "__isub__",
    "__abs__",
    "__invert__",
    "__and__",
    "__or__",
    "__xor__",
)


class Choice:
    """The experts of one layer in one call, and where their rows are.

    Attributes:
        store: The store of rows in HBM.
        stack: The layer.
        use: The call.
        indices: The choices in their original order, on the host; None if the forward may change
            them.
        exact: Whether the sizes of groups follow from the choices.
        saving: Knows of rows that autograd saves.
    """

    __slots__ = ("_call", "exact", "indices", "manager", "saving", "stack", "store", "use")

    def __init__(
        self,
        manager: BlockManager,
        store: ExpertStore,
        use: Use,
        indices: Sequence[int] | None,
        *,
        exact: bool,
        saving: RowSaving,
        call: Use | None = None,
    ) -> None:
        """Stores the arguments.

        Args:
            manager: The manager of the blocks.
            store: The store of rows.
            use: The call.
            indices: The choices, if the call will use them unchanged.
            exact: Whether the sizes of groups follow from the choices.
            saving: Knows of rows that autograd saves.
            call: The call in which the choice was made; ``use`` unless this is for a backward.
        """
        self.manager = manager
        self.store = store
        self.use = use
        self.stack: Stack = use.stack
        self.indices = indices
        self.exact = exact
        self.saving = saving
        self._call = call or use

    def again(self) -> Choice:
        """Returns the same choice for a backward."""
        use = self.saving.resume(self._call)
        return Choice(
            self.manager, self.store, use, None, exact=False, saving=self.saving, call=self._call
        )

    def copied(self, tensor: int, experts: Sequence[int], copy: torch.Tensor) -> None:
        """Notes copies of rows that autograd may save."""
        if torch.is_grad_enabled():
            self.saving.copied(self.use, tensor, experts, copy)

    @inside
    def copies(self, tensor: int, experts: Sequence[int]) -> torch.Tensor | None:
        """Returns copies of rows; None if there are not enough seats for them at once."""
        self.manager.gate.guard()
        with self.manager.lock:
            found = self.store.together(self.use, self.stack, tensor, experts)
            return None if found is None else outside(torch.cat, found)

    @inside
    def rows(self, tensor: int, experts: Sequence[int]) -> list[torch.Tensor] | None:
        """Returns rows; see :meth:`ExpertStore.rows`."""
        self.manager.gate.guard()
        with self.manager.lock:
            return self.store.rows(self.use, self.stack, tensor, experts)

    def whole(
        self, tensor: int, read: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor | None:
        """Reads a whole tensor, if the current pass copies it to HBM as one.

        Args:
            tensor: Index of the tensor in the block.
            read: Submits kernels that read it, and keeps no view of it.

        Returns:
            The result of ``read``; None if the tensor is not in HBM.
        """
        if torch.is_grad_enabled():
            return None
        lent, began = self._lend(tensor), time.monotonic()
        while lent is None and time.monotonic() - began < _LONGEST and self._is_read(tensor):
            time.sleep(1e-4)  # as HBM may be too small for a whole block for each thread
            lent = self._lend(tensor)
        if lent is None:
            return None
        try:
            return read(lent[1])
        finally:
            self._take_back(lent[0])

    @inside
    def _lend(self, tensor: int) -> tuple[Lent, torch.Tensor] | None:
        self.manager.gate.guard()
        with self.manager.lock:
            return self.store.lend(self.stack, tensor)

    @inside
    def _is_read(self, tensor: int) -> bool:
        with self.manager.lock:
            return self.store.tensors.is_read(self.stack, tensor)

    @inside
    def _take_back(self, lent: Lent) -> None:
        with self.manager.lock:
            self.store.tensors.take_back(lent)

    def row(self, tensor: int, expert: int) -> torch.Tensor | None:
        """Returns a row; None if it is not available by itself."""
        found = self.rows(tensor, (expert,))
        return None if found is None else found[0]


class Rows:
    """Stands for one parameter of ``[experts, ...]``.

    Args:
        choice: The choice of experts.
        tensor: Index of the tensor in the block.
        param: The parameter itself.
        turned: Whether its last two dimensions are transposed.
    """

    __slots__ = ("_choice", "_param", "_tensor", "_turned", "_version")
    __hash__ = object.__hash__

    def __init__(
        self, choice: Choice, tensor: int, param: torch.Tensor, *, turned: bool = False
    ) -> None:
        self._choice = choice
        self._tensor = tensor
        self._param = param
        self._turned = turned
        self._version = -1

    # -- what needs no bytes ---------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """The parameter's, without an access to it; programs read this before each product."""
        return self._choice.stack.forms[self._tensor][0]

    @property
    def device(self) -> torch.device:
        """As of the parameter."""
        return self._choice.store.room.device

    @property
    def shape(self) -> torch.Size:
        """As of the parameter, turned where this is."""
        shape = list(self._choice.stack.block.tensors[self._tensor].shape)
        if self._turned:
            shape[-1], shape[-2] = shape[-2], shape[-1]
        return torch.Size(shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self._choice.stack.block.tensors[self._tensor].shape)

    def size(self, dim: int | None = None) -> Any:
        """As of the parameter, turned where this is."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Number of dimensions."""
        return self.ndim

    # -- rows ------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        """Returns one expert's row, copies of several, or the result for the whole parameter."""
        if self._takes_gradients():
            return self.whole()[index]
        if self._tensor not in self._choice.stack.rows:
            small = self._choice.row(self._tensor, 0)
            return (self.whole() if small is None else small)[index]
        if not self._turned:
            expert = _number(index)
            if expert is not None:
                found = self._row(expert)
                if found is not None:
                    return found
            elif _is_list(index):
                found = self._gathered(index)
                if found is not None:
                    return found
        return self.whole()[index]

    def transpose(self, first: int, second: int) -> Any:
        """Transposes the last two dimensions, or the whole parameter."""
        ndim = self.ndim
        if {first % ndim, second % ndim} == {ndim - 1, ndim - 2} and ndim == 3:
            return Rows(self._choice, self._tensor, self._param, turned=not self._turned)
        return self.whole().transpose(first, second)

    def _takes_gradients(self) -> bool:
        """Whether the parameter needs gradients now, in a call that began without them."""
        if not torch.is_grad_enabled():
            return False
        with torch._C.DisableTorchFunctionSubclass():  # it is away
            return self._param.requires_grad

    def _row(self, expert: int) -> torch.Tensor | None:
        """Returns a row in place; None if the whole parameter is needed."""
        if not 0 <= expert < self._choice.stack.experts:
            return None  # the whole parameter handles negative indices, or raises
        return self._choice.row(self._tensor, expert)

    def _gathered(self, index: torch.Tensor) -> torch.Tensor | None:
        """Returns copies of rows, as indexing does."""
        known = self._choice.indices
        same = known is not None and len(known) == index.numel()
        experts: Sequence[int] = known if same else index.tolist()  # type: ignore[assignment]
        if not experts or min(experts) < 0 or max(experts) >= self._choice.stack.experts:
            return None
        copies = self._choice.copies(self._tensor, experts)
        if copies is None:
            copies = gather(partial(self._choice.rows, self._tensor), experts, self.at_hand()[0])
        if copies is not None:
            self._choice.copied(self._tensor, experts, copies)
        return copies

    def grouped(
        self, function: Callable[..., Any], rows: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor | None:
        """Returns the products of groups of rows with their experts' matrices.

        A group's product does not depend on the other groups: it is computed alone, or with some.

        Args:
            function: ``torch.nn.functional.grouped_mm`` or one like it.
            rows: ``[tokens, features]``, group by group.
            offsets: ``[experts]``, the end of each group.

        Returns:
            ``[tokens, outputs]``; None if the whole parameter is needed.
        """
        choice = self._choice
        if choice.store.tensors:
            product = choice.whole(self._tensor, partial(self._product, function, rows, offsets))
            if product is not None:
                return product
        counts, total = choice.use.counts, rows.shape[0]
        experts = choice.stack.experts
        exact = choice.exact and experts == offsets.shape[0]
        if not exact or sum(counts.values()) != total:
            ends = offsets.tolist()
            sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
            counts = {expert: size for expert, size in enumerate(sizes) if size}
        if not counts or sum(counts.values()) != total or min(counts.values()) < 0:
            return None
        return Groups(self, function, counts)(rows, offsets)

    def _product(
        self,
        function: Callable[..., Any],
        rows: torch.Tensor,
        offsets: torch.Tensor,
        matrices: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the product with the matrices of all experts."""
        turned = matrices.transpose(-2, -1) if self._turned else matrices
        return function(rows, turned, offs=offsets)  # type: ignore[no-any-return]

    def matrices(self, experts: Sequence[int]) -> torch.Tensor | None:
        """Returns copies of some experts' rows, a single one in place; None if not available."""
        if len(experts) > 1:
            matrices = self._choice.copies(self._tensor, experts)
        else:
            row = self._choice.row(self._tensor, experts[0])
            matrices = None if row is None else row[None]
        if matrices is None:
            return None
        return matrices.transpose(-2, -1) if self._turned else matrices

    def at_hand(self) -> tuple[int, int]:
        """Returns how many rows are available at once, and the bytes of one."""
        stack = self._choice.stack
        return self._choice.store.seats_for(stack, self._tensor), stack.nbytes(self._tensor)

    def save(self, experts: Sequence[int]) -> None:
        """Notes that backward will need the present rows of some experts."""
        choice = self._choice
        self._version = choice.saving.version(self._param)
        choice.use.saved.update((choice.stack.piece(self._tensor, e), None) for e in experts)

    def turned_again(self) -> Rows:
        """Returns the same transposed, for a backward.

        Raises:
            RuntimeError: If they were changed in place since they were saved.
        """
        refuse_changed(self._param, self._version, self._choice.stack.block.name)
        return Rows(self._choice.again(), self._tensor, self._param, turned=not self._turned)

    # -- everything else -------------------------------------------------

    def whole(self) -> torch.Tensor:
        """Returns the parameter; every operation on it fetches the block."""
        return self._param.transpose(-2, -1) if self._turned else self._param

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole(), name)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Computes a grouped product with rows, or runs the function on the whole parameter."""
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _GROUPED and len(args) == 2 and isinstance(args[1], Rows):
            rows, offsets = args[0], kwargs.get("offs")
            others = len(kwargs) > 1 and [v for k, v in kwargs.items() if k != "offs"]
            if (
                type(rows) is torch.Tensor
                and type(offsets) is torch.Tensor
                and rows.dim() == 2
                and not (others and any(value is not None for value in others))
            ):
                graph = torch.is_grad_enabled() and rows.requires_grad
                found = None
                if not args[1]._takes_gradients() and (not graph or name in _DERIVED):
                    found = args[1].grouped(function, rows, offsets)
                if found is not None:
                    return found
        return function(*map(_real, args), **{key: _real(v) for key, v in kwargs.items()})


def gather(
    rows: Callable[[Sequence[int]], list[torch.Tensor] | None], experts: Sequence[int], seats: int
) -> torch.Tensor | None:
    """Returns copies of rows.

    Args:
        rows: Returns rows of experts in place.
        experts: The expert of each copy; some may be equal.
        seats: How many rows are available at once.

    Returns:
        ``[len(experts), ...]``; None if a row is not available.
    """
    kinds = sorted(set(experts))
    if len(kinds) < seats:
        found = rows(kinds)
        if found is None:
            return None
        by_expert = dict(zip(kinds, found, strict=True))
        return torch.stack([by_expert[expert] for expert in experts])
    copies: torch.Tensor | None = None
    for expert in kinds:
        found = rows((expert,))
        if found is None:
            return None
        row = found[0]
        if copies is None:
            copies = row.new_empty((len(experts), *row.shape))
        for place in (place for place, other in enumerate(experts) if other == expert):
            copies[place].copy_(row)
    return copies


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: Rows, *args: Any) -> Any:
        return getattr(self.whole(), name)(*map(_real, args))

    apply.__name__ = name
    return apply


for _name in _OPERATORS:
    setattr(Rows, _name, _operator(_name))


def _real(value: Any) -> Any:
    """Returns a value in which stand-ins are replaced by the whole parameters."""
    if isinstance(value, Rows):
        return value.whole()
    if type(value) in (list, tuple):
        return type(value)(map(_real, value))
    return value


def _number(index: Any) -> int | None:
    """Returns the number of the row that an index selects, if it selects one."""
    if type(index) is int:
        return index
    if type(index) is torch.Tensor and index.dim() == 0 and index.dtype in _INDICES:
        return int(index)
    return None


def _is_list(index: Any) -> bool:
    return type(index) is torch.Tensor and index.dim() == 1 and index.dtype in _INDICES
