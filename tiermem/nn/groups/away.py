"""Managed parameters and large buffers while their block is not held.

The object stays the same, but its class is then one derived from its own, whose
operations fetch the block first. So a parameter can be used outside every
wrapped call (a penalty on the weights in the loss, an average of weights, a
hand-written update), wherever the reference to it was kept. While the block is
held, the object has its own class again, and torch treats it like any other.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.optim.optimizer import _foreach_supported_types

from tiermem.errors import ClosedError, InvariantError, ParameterError, WrapError
from tiermem.nn.compat.quiet import unrecorded
from tiermem.nn.compat.views import VIEWS
from tiermem.nn.groups.inplace import no_room
from tiermem.nn.groups.inspect import OR_SHARDED
from tiermem.nn.groups.olddata import REPLACED, give, keep_old, share
from tiermem.nn.groups.pickled import reduced, refuse_processes
from tiermem.nn.groups.placeview import place_view
from tiermem.nn.groups.replaced import named, why_not
from tiermem.nn.tensors.placeholder import is_placeholder
from tiermem.nn.tensors.standin import Opened, StandIn, writes
from tiermem.runtime.base.functorch import outside_inference

if TYPE_CHECKING:
    from tiermem.nn.groups.group import Group

_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
SET_REQUIRES_GRAD = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_UNSEEN_WRITES = {torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.__dlpack__}
_ALIASES = {*_UNSEEN_WRITES, torch.Tensor.storage, torch.Tensor.numpy, torch.Tensor.__array__}
"""Functions that return a tensor's memory itself, not in a tensor."""
NEW_PARAMETER = nn.Parameter.__new__.__code__
_FLATTENS = "_detach_if_needed"
"""The function in which FSDP reads the weights that it flattens into one; not imported, as that
takes long."""
_BUCKETS = "_param_buckets"
"""End of the names of functions in which torch's ZeroRedundancyOptimizer puts weights into buckets.
"""
_classes: dict[type, type] = {}
group_of: WeakValueDictionary[int, Group] = WeakValueDictionary()
"""Group of each managed tensor, by id. It is not an attribute of the tensor, since attributes are
copied and pickled with it."""


class IsParameter:
    """``tensor._is_param``: the last attribute that ``nn.Parameter(tensor)`` sets on its result.

    From then on that result is not a managed tensor in any way.
    """

    def __get__(self, tensor: Any, owner: type) -> Any:
        if tensor is None or "_is_param" not in tensor.__dict__:
            raise AttributeError("_is_param")
        return tensor.__dict__["_is_param"]

    def __set__(self, tensor: Any, value: Any) -> None:
        if id(tensor) in group_of:
            tensor.__dict__["_is_param"] = value
        else:
            tensor.__class__ = nn.Parameter


def _known(name: str) -> Any:
    """Returns a property that returns the tensor's own attribute faster than torch would.

    Programs read it for each weight before they use it (``x.to(self.proj.weight.dtype)``).
    """
    get = getattr(torch.Tensor, name).__get__

    def look(tensor: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return get(tensor)

    return property(look)


class Away(StandIn):
    """A parameter or buffer whose block is not held.

    Users see this class as ``type(param)``. Calling it does the same as calling the parameter's own
    class. A tensor that torch makes of this class by itself (``tensor.as_subclass(type(param))``)
    is an ordinary tensor with its own memory, and gets its ordinary class at its first use.
    """

    __slots__ = ()

    _kind: type
    _is_param = IsParameter()
    dtype, device, shape = _known("dtype"), _known("device"), _known("shape")

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes an ordinary tensor."""
        return cls._kind(*args, **kwargs)

    def set_(self, *source: Any, **kwargs: Any) -> Any:
        """Copies the values, as ``data = ...`` does; torch does not dispatch ``set_`` itself."""
        if len(source) == 1 and source[0] is self:  # done when a parametrization is registered
            return self
        away: Any = self
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            value = torch.empty(0, dtype=away.dtype, device=away.device)
            _take_data(away, value.set_(*source, **kwargs))
        return self

    def _answer(self, func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[bool, Any]:
        if func == SET_DATA:
            self._refuse_buckets(sys._getframe(3).f_code)
            _take_data(self, args[1])
            return True, None
        if func == _GET_DATA and id(self) in group_of:
            return True, self._given(func)
        if func is torch.Tensor.requires_grad_ or func == SET_REQUIRES_GRAD:
            result = func(*args, **kwargs)
            group = group_of.get(id(self))
            if group is not None:
                group.lender.thawed(args[0])
            return True, result
        if func is torch.Tensor.detach:
            # the callers: nn.Parameter(), StandIn.__torch_function__(), dispatch(), this
            return self._detach(sys._getframe(3).f_code)
        if func is torch.Tensor.share_memory_ and id(self) in group_of:
            raise ParameterError(
                f"{named(_group(self), args[0])} comes and goes, and cannot be in memory that "
                "processes share; call tier.unwrap(module) first"
            )
        if func is torch.Tensor.data_ptr and id(self) in group_of:
            return True, self._located()
        return False, None

    def _located(self) -> int:
        """Returns the address of the tensor."""
        use = Held(self)
        try:
            address = use.tensor.data_ptr()
            if use.tensor.numel():
                use.group.lender.addresses.tell(use.group, use.tensor, address)
            return address
        finally:
            use.close(torch.Tensor.data_ptr)

    def _refuse_buckets(self, caller: types.CodeType) -> None:
        """Refuses code that relies on sharing memory with the parameter from then on."""
        if caller.co_name.endswith(_BUCKETS) and "zero_redundancy" in caller.co_filename:
            raise ParameterError(
                "ZeroRedundancyOptimizer(parameters_as_bucket_view=True) keeps weights in buckets "
                "of its own, where they cannot come and go; leave that option out, or use "
                "tier.optimizer(model, optimizer_class, ...), whose state is in the tiers"
            )

    def _detach(self, caller: types.CodeType) -> tuple[bool, Any]:
        if caller is NEW_PARAMETER:
            # it needs a tensor of the same class, to which it then gives the class nn.Parameter
            data = _ordinary(self, torch.Tensor, copy=False)
            kind: Any = type(self)
            return True, torch.Tensor._make_subclass(kind, data)
        if caller.co_name == _FLATTENS and "fsdp" in caller.co_filename:
            raise WrapError(f"torch's FSDP around a wrapped model: {OR_SHARDED}")
        return (True, self._given(torch.Tensor.detach)) if id(self) in group_of else (False, None)

    def _given(self, func: Callable[..., Any]) -> Any:
        """Returns a tensor over the memory of the block, for ``data`` and ``detach()``."""
        itself: Any = self
        use = self._open()
        try:
            found = func(use.tensor)
            return use.given(found) if isinstance(use, InPlace) else give(itself, found)
        finally:
            use.close(func)

    def _open(self) -> Opened:
        if (group := group_of.get(id(self))) is not None:
            if group.in_place and not torch.is_grad_enabled():
                return InPlace(self, group)
            return Held(self)
        itself: Any = self
        if is_placeholder(itself):
            _group(self)  # raises: the tensor was a managed one once
        itself.__class__ = self._kind
        return Opened(itself)

    def _cut_short(self) -> None:
        group = group_of.get(id(self))
        if group is not None:
            group.manager.cut_short()

    def _in_a_pass(self) -> Any:
        with outside_inference():  # in inference mode torch finds no edge
            return get_gradient_edge(self)  # type: ignore[arg-type]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            group = group_of.get(id(self))
            if group is None:
                memo[id(self)] = _ordinary(self, self._kind, copy=True)
            else:
                group.copy_into(memo)
        return memo[id(self)]

    def __copy__(self) -> Any:
        """Returns another parameter over the same memory, as torch does."""
        return _ordinary(self, self._kind, copy=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        group = group_of.get(id(self))
        if group is None:
            return _ordinary(self, self._kind, copy=True).__reduce_ex__(protocol)
        refuse_processes(sys._getframe(1))
        return reduced(group, self, protocol)  # type: ignore[arg-type]


class Held(Opened):
    """The block of a parameter is held for one operation."""

    __slots__ = ("group", "pushed")

    def __init__(self, away: Any) -> None:
        super().__init__(away)
        self.group = _group(away)
        lender = self.group.lender
        self.pushed = lender.lend(self.group)
        if torch.is_grad_enabled() and away.requires_grad and lender.saved.refused():
            # autograd may keep this tensor without calling a hook of tiermem's. So it does not get
            # the parameter itself, which may be pointed elsewhere later, but a view that holds the
            # bytes
            self.tensor = away.view_as(away)

    def close(self, func: Callable[..., Any]) -> None:
        """Releases the block; a result may have an address through which it can be written."""
        dirty = func in _UNSEEN_WRITES or writes(func)
        self.group.lender.lent(self.group, self.pushed, dirty=dirty, views=func in VIEWS)


class InPlace(Opened):
    """The block of a parameter is used in DRAM for one operation, since HBM has no room for it."""

    __slots__ = ("away", "group")

    def __init__(self, away: Any, group: Group) -> None:
        member = group.pointing.member_of(away)
        if member is None:
            raise InvariantError(f"a tensor of block {group.block.name!r} is none of its members")
        super().__init__(group.lender.lend_in_place(group)[member.index].detach())
        self.away, self.group = away, group

    def close(self, func: Callable[..., Any]) -> None:
        """Ends the use.

        Raises:
            CapacityError: If the operation returns the memory itself.
        """
        self.group.lender.lent_in_place(self.group)
        if func in _ALIASES:
            raise no_room(self.group.manager, self.group)

    def given(self, result: Any) -> Any:
        """Replaces views of the home by stand-ins, so that users never get one.

        Raises:
            CapacityError: If a result refers to the memory in another way.
        """
        if type(result) in (list, tuple):
            return type(result)(map(self.given, result))
        if (
            not isinstance(result, torch.Tensor)
            or isinstance(result, StandIn)
            or not _memory_of(result) == _memory_of(self.tensor) != 0
        ):
            return result
        view = place_view(self.away, self.tensor, result)
        if view is None:
            raise no_room(self.group.manager, self.group)
        return view


def _memory_of(tensor: torch.Tensor) -> int:
    """Returns the address of the memory of a tensor; 0 if it has none itself."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # one of functorch's, or around others
        return 0


def _group(away: Any) -> Group:
    """Returns the group of a tensor whose block is not held.

    Raises:
        ClosedError: If its module or its manager no longer exists.
    """
    found = group_of.get(id(away))
    if found is None:
        raise ClosedError(
            "this parameter lived in the tiers of a model and a TierManager that are gone; keep "
            "the model, or take it out with tier.unwrap(model) or tier.close() first"
        )
    return found


def away_class(kind: type, base: type[Away] = Away, **names: Any) -> type:
    """Returns the class that a tensor of class ``kind`` has while it is away.

    Args:
        kind: Its own class.
        base: What intercepts its operations.
        names: Further attributes of the class.
    """
    found = _classes.get(kind)
    if found is None:
        own = {"__module__": kind.__module__, "__slots__": (), "_kind": kind, **names}
        made: Any = type(kind)(kind.__name__, (base, kind), own)
        found = _classes[kind] = made
        if kind in _foreach_supported_types:
            # so that optimizers treat it like its own class: on a GPU they step tensors of unknown
            # classes one by one, which rounds differently
            _foreach_supported_types.append(made)
    return found


def _ordinary(away: Any, kind: Any, *, copy: bool) -> Any:
    """Returns an ordinary tensor of class ``kind`` with the values of one that is not held.

    Args:
        away: The tensor.
        kind: The class that it has while it is held.
        copy: Whether to use memory of its own; otherwise that of the block, which then stays in HBM
            as long as the tensor exists.
    """
    with torch._C.DisableTorchFunctionSubclass():
        use = away._open()
        try:
            with unrecorded():
                data = use.tensor.clone() if copy else use.tensor.detach()
        finally:
            use.close(torch.Tensor.detach)
        if isinstance(use, InPlace) and not copy:
            raise no_room(use.group.manager, use.group)
        made: Any = torch.Tensor._make_subclass(kind, data, away.requires_grad)
    if kind is not torch.Tensor:
        made.__dict__.update(away.__dict__)
    return made


def _take_data(away: Any, value: torch.Tensor) -> None:
    """``param.data = value``: copies the values, since the memory has to stay the block's."""
    group = _group(away)
    member = group.pointing.member_of(away)
    if member is not None and member in group.carried:
        group.part(away, member.index, value.clone() if isinstance(value, StandIn) else value)
        return
    if member is not None and any(m.tensor is value for m in group.carried_with(member.index)):
        return  # it has that memory
    refused = why_not(group, away, away, value)
    if refused is not None:
        raise refused
    with torch.no_grad():
        use = Held(away)
        try:
            own = away.detach()
            keep_old(away, own, value)
            inside = not isinstance(value, StandIn) and share(own, value)
            place = own.data_ptr(), own.stride()
            if not inside or (value.data_ptr(), value.stride()) != place:
                REPLACED.note(away)
                if member is not None:
                    group.part(away, member.index, own)
            if inside:  # ``param.data = param.data.t()``, or of another weight of the block
                value = value.clone()
            own.copy_(value)
        finally:
            use.group.lender.lent(use.group, use.pushed, dirty=True)
