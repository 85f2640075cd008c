"""Managed parameters and large buffers while their block is not held.

Then the class of the very same object is one derived from its own, whose
operations bring the block first. A parameter that is used outside every wrapped
call (a penalty on the weights in the loss, an average of weights, a hand-written
update) is there, wherever the reference to it was kept. While the block is held
the object has its own class again, and no torch behaviour depends on us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch.autograd.graph import get_gradient_edge

from tiermem.errors import ParameterError, WrapError
from tiermem.nn.standin import Opened, StandIn, writes

if TYPE_CHECKING:
    from tiermem.nn.group import Group

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SET_REQUIRES_GRAD = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_UNSEEN_WRITES = {torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.__dlpack__}
_classes: dict[type, type] = {}
group_of: WeakValueDictionary[int, Group] = WeakValueDictionary()
"""Managed tensors by id to their group, which keeps them; not kept on the tensors, since what is
there is copied and pickled with them."""


class Away(StandIn):
    """A parameter or buffer whose block is not held."""

    __slots__ = ()

    def set_(self, *source: Any, **kwargs: Any) -> Any:
        """Takes the values over, as ``data = ...`` does; torch sends this nowhere."""
        away: Any = self
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            value = torch.empty(0, dtype=away.dtype, device=away.device)
            _take_data(away, value.set_(*source, **kwargs))
        return self

    def _answer(self, func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[bool, Any]:
        if func == _SET_DATA:
            _take_data(self, args[1])
            return True, None
        if func is torch.Tensor.requires_grad_ or func == _SET_REQUIRES_GRAD:
            result = func(*args, **kwargs)
            group_of[id(self)].lender.thawed(args[0])
            return True, result
        return False, None

    def _open(self) -> Opened:
        return _Held(self)

    def _in_a_pass(self) -> Any:
        return get_gradient_edge(self)  # type: ignore[arg-type]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            group_of[id(self)].copy_into(memo)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise WrapError(
            "a parameter that lives in the tiers cannot be pickled; save the state_dict()"
        )


class _Held(Opened):
    """The block of a parameter is held for one operation."""

    __slots__ = ("group", "pushed")

    def __init__(self, away: Any) -> None:
        super().__init__(away)
        self.group = group_of[id(away)]
        lender = self.group.lender
        self.pushed = lender.lend(self.group)
        if torch.is_grad_enabled() and away.requires_grad and lender.saved.refused():
            # autograd keeps what it is given, where no hook of ours sees it: not the parameter
            # itself then, which is pointed elsewhere one day, but a view that holds the bytes
            self.tensor = away.view_as(away)

    def close(self, func: Callable[..., Any]) -> None:
        """Lets go; whoever got an address may write through it."""
        self.group.lender.lent(
            self.group, self.pushed, dirty=func in _UNSEEN_WRITES or writes(func)
        )


def away_class(kind: type) -> type:
    """Returns the class that a tensor of class ``kind`` has while it is away."""
    found = _classes.get(kind)
    if found is None:
        found = _classes[kind] = type(kind)(
            kind.__name__, (Away, kind), {"__module__": kind.__module__, "__slots__": ()}
        )
    return found


def _take_data(away: Any, value: torch.Tensor) -> None:
    """``param.data = value``: takes the values over, since the memory has to be the block's."""
    if value.shape != away.shape or value.dtype is not away.dtype:
        raise ParameterError(
            f"a parameter of block {group_of[id(away)].block.name!r} cannot become "
            f"{tuple(value.shape)} {value.dtype} behind the manager's back, it is "
            f"{tuple(away.shape)} {away.dtype}; call tier.unwrap(module) first"
        )
    with torch.no_grad():
        use = _Held(away)
        try:
            away.detach().copy_(value)
        finally:
            use.group.lender.lent(use.group, use.pushed, dirty=True)
