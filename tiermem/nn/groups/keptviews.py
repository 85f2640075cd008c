"""Views of frozen weights that an autograd function keeps as attributes of its ``ctx``.

Saved-tensor hooks see what ``save_for_backward`` gets, but not attributes of ``ctx``. A view of a
weight there would hold its block in HBM until backward. So when a block is released, the graph
nodes of the call are searched for such views, and these are *put away*: the same tensor objects are
pointed at placeholders and get a class that intercepts operations. When backward reaches their
node, they are ordinary tensors over the block's bytes until the node is done. If the block has no
other alias, nothing can have written it unnoticed. Any other use of such a view makes it an
ordinary alias, which holds the block as long as it exists.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import BackwardCFunction

from tiermem.errors import ParameterError
from tiermem.nn.compat.hookpair import is_recomputation, top_pair
from tiermem.nn.groups.away import group_of
from tiermem.nn.groups.olddata import REPLACED
from tiermem.nn.groups.pointing import Plain
from tiermem.nn.groups.writes import refuse_replaced
from tiermem.nn.tensors.placeholder import shared_placeholder
from tiermem.nn.tensors.standin import Opened, StandIn
from tiermem.runtime.base.functorch import outside_inference, transforming
from tiermem.runtime.memory.slots import Slot, View, typed_view

if TYPE_CHECKING:
    from tiermem.nn.groups.group import Group

_WHERE = "_tiermem_where"
"""Attribute name in the ``__dict__`` of a view that is put away, so that it ends with the view."""
_doubtful: list[Group] = []
"""Groups that an interrupted recomputation has released while aliases of their block existed."""
_MOST_NODES = 4096
_DEPTH = 4
_references = torch._C.TensorBase._use_count  # type: ignore[attr-defined]


class _Where:
    """The block and the elements of a view that is put away.

    Attributes:
        group: The group of the block.
        owner: The parameter to which the bytes belong.
        index: Its index among the tensors of the block.
        view: Shape, strides and offset in the block's storage.
        times: How often weights had been given other data when it was put away.
        uses: How many nodes that backward has reached use it at the moment.
    """

    __slots__ = ("group", "index", "owner", "times", "uses", "view")

    def __init__(self, group: Group, owner: torch.Tensor, index: int, view: View) -> None:
        self.group, self.owner, self.index, self.view = group, owner, index, view
        self.times, self.uses = REPLACED.times, 0

    def __deepcopy__(self, memo: Any) -> None:
        """Returns None: a copy of the view has bytes of its own."""

    def __reduce__(self) -> Any:
        return type(None), ()

    def of_owner(self) -> torch.Tensor | None:
        """Returns the view of the parameter if that is materialized; else None.

        Raises:
            RuntimeError: If the parameter was given other data since, so that the bytes are gone.
            ParameterError: If it has another form now.
        """
        if REPLACED.since(self.owner, self.times):
            raise refuse_replaced(self.group.block.name)
        member = self.group.pointing.member_of(self.owner)
        if member is not None and not member.materialized:
            return None
        spec, owner = self.group.block.tensors[self.index], self.owner
        dtype, offset, shape, stride = self.view
        with Plain():
            form = owner.dtype, tuple(owner.shape), owner.stride()
            if form != (spec.dtype, tuple(spec.shape), tuple(spec.stride)):
                raise ParameterError(
                    f"backward needs a view of a weight of block {self.group.block.name!r}, which "
                    "was taken out of the tiers after forward, and has another dtype or form now; "
                    "call tier.unwrap(module) after backward"
                )
            begin = int(owner.storage_offset()) * owner.itemsize - spec.offset
            storage = owner.detach().untyped_storage()
        return typed_view(storage, dtype, offset + begin // dtype.itemsize, shape, stride)


_Shown = tuple[torch.Tensor, _Where, int]
"""A view that is pointed at the block's bytes, and its version before it was used."""


class KeptView(StandIn, torch.Tensor):
    """A view of a frozen weight whose block is not held."""

    __slots__ = ()

    def set_(self, *source: Any, **kwargs: Any) -> Any:
        """As torch's; torch does not dispatch ``set_`` itself."""
        self._open()
        return self.set_(*source, **kwargs)

    def _open(self) -> Opened:
        """Makes it an ordinary tensor permanently, through which the block may be written."""
        where = self.__dict__.get(_WHERE)
        if where is None:  # a tensor that torch has made of this class
            self.__class__ = torch.Tensor  # type: ignore[assignment]
        else:
            _show(self, where, for_good=True)
        return Opened(self)

    def _in_a_pass(self) -> Any:
        return self._open().tensor


class _Node:
    """Hooks that run before and after backward executes one node."""

    __slots__ = ("_shown", "_views")

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        """Handles the views that the node's ``ctx`` keeps.

        Args:
            views: The views, of any shapes and dtypes.
        """
        self._views = views
        self._shown: list[tuple[int, list[_Shown]]] = []

    def before(self, _gradients: Any) -> None:
        """Points the views at their bytes.

        Raises:
            CapacityError: If HBM has no room for the block.
        """
        shown: list[_Shown] = []
        self._shown.append((get_ident(), shown))
        for view in self._views:
            where = view.__dict__.get(_WHERE)
            if where is None:
                continue  # it is an ordinary tensor by now
            if type(view) is KeptView:
                _show(view, where, for_good=False)
            if _WHERE in view.__dict__:
                where.uses += 1
                shown.append((view, where, view._version))

    def after(self, _gradients: Any, _outputs: Any) -> None:
        """Puts the views away again, except those that other code uses now."""
        mine = [n for n, (thread, _) in enumerate(self._shown) if thread == get_ident()]
        _, shown = self._shown.pop(mine[-1])
        idle = []
        for view, where, version in shown:
            where.uses -= 1
            if view._version != version:
                where.group.lender.written(where.group)
            if not where.uses and view.__dict__.get(_WHERE) is where:
                idle.append((view, where))
        for view, where in _alone(idle):
            slot = where.group.manager.parts.slots.current.get(where.group.block.id)
            now = None if slot is None else _where(where.group, slot.reading, view)
            if now is None or now.owner is not where.owner:
                del view.__dict__[_WHERE]  # it was given other data
            else:
                where.view = now.view
                _put_away(view, where)


def put_off(group: Group) -> bool:
    """Defers the check for aliases of a block, if a recomputation was stopped early.

    Activation checkpointing stops a recomputation in the middle of a call. The tensors of that call
    are freed when its unpack hook returns; then the blocks are checked again (:func:`unpacked`).

    Args:
        group: The group of the block.

    Returns:
        Whether it was such a call.
    """
    outer = top_pair()
    if outer is None or not is_recomputation(outer):
        return False
    _doubtful.append(group)
    return True


def unpacked(unpack: Callable[[Any], Any], packed: Any) -> Any:
    """Calls an unpack hook, which may recompute a part, and returns its result.

    Blocks whose check was deferred meanwhile count as written if aliases of them still exist.

    Args:
        unpack: The hook.
        packed: Its argument.
    """
    try:
        return unpack(packed)
    finally:
        if _doubtful:
            _look_again()


def _look_again() -> None:
    """Marks the blocks of ``_doubtful`` as written if aliases of them still exist."""
    while _doubtful:
        group = _doubtful.pop()
        slot = group.pointing.slot
        if slot is not None and slot.others():
            group.lender.written(group)


def put_away(group: Group, aliases: int, result: Any, given: Sequence[Any]) -> bool:
    """Puts away views of a block that autograd functions of a call keep.

    Args:
        group: The group of the block; its tensors point at it. The caller has the manager's lock.
        aliases: How many tensors share the block's memory beside the group's own.
        result: Result of a call that used the block: a tensor, or tensors in lists, tuples, dicts.
        given: Arguments of the call. Nodes that are older than these are not visited.

    Returns:
        Whether no alias is left.
    """
    slot = group.pointing.slot
    if slot is None or transforming():
        return False
    found: dict[int, tuple[torch.Tensor, _Where]] = {}
    nodes: list[tuple[Any, list[torch.Tensor]]] = []
    for node in _nodes(result, given):
        views: list[torch.Tensor] = []
        for tensor in _tensors(list(node.__dict__.values()), _DEPTH):
            base: Any = tensor
            while type(base) is torch.Tensor:
                where = _where(group, slot.storage, base)
                if where is not None and all(base is not view for view in views):
                    found[id(base)] = base, where
                    views.append(base)
                base = base._base
        if views:
            nodes.append((node, views))
            if len(found) >= aliases:
                break
    alone = _alone(list(found.values()))
    for view, where in alone:
        _put_away(view, where)
    for node, views in nodes:
        uses = _Node(views)
        node.register_prehook(uses.before)
        node.register_hook(uses.after)
    return len(alone) == aliases


def _alone(views: list[tuple[torch.Tensor, _Where]]) -> list[tuple[torch.Tensor, _Where]]:
    """Returns those of the views that C++ code does not refer to, except as base of others."""
    bases = [id(view._base) for view, _ in views]
    return [each for each in views if _references(each[0]) == 1 + bases.count(id(each[0]))]


def _nodes(result: Any, given: Sequence[Any]) -> Iterator[Any]:
    """Yields the nodes of Python functions of a call, the newest first."""
    oldest = max(
        (t.grad_fn._sequence_nr() for t in _tensors(given, _DEPTH) if t.grad_fn is not None),
        default=-1,
    )
    seen = set[Any]()
    ahead: list[tuple[int, int, Any]] = []

    def add(node: Any) -> None:
        if node is not None and node not in seen:
            number = node._sequence_nr()
            if number > oldest:
                seen.add(node)
                heapq.heappush(ahead, (-number, len(seen), node))

    for tensor in _tensors(result, _DEPTH):
        add(tensor.grad_fn)
    while ahead and len(seen) < _MOST_NODES:
        node = heapq.heappop(ahead)[2]
        if isinstance(node, BackwardCFunction) and not _is_torchs(node):
            yield node
        for before, _ in node.next_functions:
            add(before)


def _is_torchs(node: Any) -> bool:
    """Whether a function is torch's own; compiled ones pass tensors to kernels directly."""
    made_by = getattr(type(node), "_forward_cls", type(node)).__module__
    return made_by == "torch" or made_by.startswith("torch.")


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, depth - 1)
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, depth - 1)


def _where(group: Group, storage: int, tensor: torch.Tensor) -> _Where | None:
    """Returns the elements of one parameter that a tensor is a view of; None if it is not one.

    Args:
        group: The group of the block.
        storage: Handle of the block's storage.
        tensor: Any tensor.
    """
    if (
        tensor.layout is not torch.strided
        or tensor.requires_grad
        or tensor.is_inference()
        or tensor.is_conj()
        or tensor.is_neg()
        or id(tensor) in group_of
    ):
        return None
    try:
        handle = tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # a tensor without memory of its own
        return None
    if handle != storage:
        return None
    view: View = tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride()
    begin, item = view[1] * tensor.itemsize, tensor.itemsize
    end = begin + item * (1 + sum((n - 1) * s for n, s in zip(*view[2:], strict=True)))
    tensors = group.block.tensors
    index = bisect_right(tensors, begin, key=lambda spec: spec.offset) - 1
    spec = tensors[index]
    owner = next((entry.param for entry in group.entries if entry.index == index), None)
    with Plain():
        if owner is None or owner.requires_grad:
            return None
    if end > spec.offset + spec.nbytes or spec.offset % item:
        return None
    return _Where(group, owner, index, view)


def _put_away(view: torch.Tensor, where: _Where) -> None:
    """Points a view at a placeholder; it keeps its shape and dtype."""
    view.__dict__[_WHERE] = where
    view.__class__ = KeptView
    _set_data(view, shared_placeholder(view.shape, view.dtype, view.device))


def _set_data(view: torch.Tensor, data: torch.Tensor) -> None:
    """Sets the data of a tensor of any class."""
    if torch.is_inference_mode_enabled():
        with outside_inference():
            return _set_data(view, data)
    with Plain():
        view.data = data


def _point(view: torch.Tensor, data: torch.Tensor) -> None:
    """Makes a view an ordinary tensor over ``data``."""
    view.__class__ = torch.Tensor
    _set_data(view, data)


def _show(view: torch.Tensor, where: _Where, *, for_good: bool) -> None:
    """Makes a view that is put away an ordinary tensor.

    Args:
        view: The view.
        where: Its block and elements.
        for_good: Whether it may be written from now on; otherwise it is put away again soon.

    Raises:
        CapacityError: If HBM has no room for the block.
        ClosedError: If the manager is closed, and the weight was not given back.
        RuntimeError: If the bytes are gone.
    """
    data = where.of_owner()
    if data is not None:
        del view.__dict__[_WHERE]
        _point(view, data)
        return

    def show(slot: Slot) -> None:
        storage = slot.sight.storage if for_good else slot.sight.reading
        _point(view, typed_view(storage, *where.view))

    where.group.lender.bring(where.group, show, dirty=for_good)
    if for_good:
        del view.__dict__[_WHERE]
