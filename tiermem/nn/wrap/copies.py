"""Copies of wrapped modules are ordinary ones; such as read weights in C++ are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

from torch import nn

from tiermem.errors import WrapError
from tiermem.nn.groups.inspect import is_made_in
from tiermem.nn.wrap.scope import Interceptor, meant, take_ours_out


class CopyInterceptor(Interceptor):
    """Makes an ordinary module where a wrapped one is copied, without interceptors."""

    __slots__ = ()

    method = "__deepcopy__"

    def _plain(self) -> Callable[..., Any]:
        has = hasattr(type(self.module), self.method)
        return super()._plain() if has else partial(_copy, self.module)

    def __call__(self, memo: dict[int, Any]) -> Any:
        """Returns the copy, in host memory."""
        if (other := meant(self, sys._getframe(1))) is not None:
            return deepcopy(other, memo)
        wrapped, device = self.scope.wrapped, self.runtime.manager.parts.device
        stay, moves = wrapped.staying(), wrapped.modules.group_of
        for tensor in self.module._buffers.values():
            if tensor is None or id(tensor) in memo:
                continue
            made = id(tensor) not in moves and is_made_in(tensor, device)  # by a forward
            if id(tensor) in stay or (made and device.type != "cpu"):
                memo[id(tensor)] = tensor.detach().to("cpu", copy=True)
        copied = self.inner(memo)
        memo.setdefault(id(self.module), copied)
        names, formers = getattr(copied, "__dict__", {}), _formers(self.module)
        for name in _ours(self.module):
            names.pop(name, None)
        names.update({name: deepcopy(former, memo) for name, former in formers.items()})
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Copies nothing: interceptors that a class copies by itself are taken out afterwards."""


def _ours(module: nn.Module) -> dict[str, Interceptor]:
    """Returns the interceptors of a module, by name."""
    return {n: value for n, value in vars(module).items() if isinstance(value, Interceptor)}


def _formers(module: nn.Module) -> dict[str, Any]:
    """Returns what interceptors of a module have taken the place of, by name."""
    ours = _ours(module).items()
    return {name: value.former for name, value in ours if value.former is not None}


def _copy(module: nn.Module, memo: dict[int, Any]) -> Any:
    """Does what ``copy.deepcopy`` does with a module that has no ``__deepcopy__``."""
    reduced: Any = module.__reduce_ex__(4)
    make, arguments, state = reduced[:3]
    copied = make(*deepcopy(arguments, memo))
    memo[id(module)] = copied  # before what may refer to it
    copied.__setstate__(deepcopy(state, memo))
    return copied


class StateInterceptor(Interceptor):
    """Keeps interceptors out of what ``copy.copy`` takes over: they are of this module."""

    __slots__ = ()

    method = "__getstate__"

    def _plain(self) -> Callable[..., Any]:
        has = hasattr(type(self.module), self.method)  # not before Python 3.11
        return super()._plain() if has else partial(vars, self.module)

    def __call__(self) -> Any:
        """Returns the module's state as it would be, were it not wrapped."""
        if (other := meant(self, sys._getframe(1))) is not None:
            return getattr(other, self.method, partial(vars, other))()
        state = self.inner()
        if not isinstance(state, dict):
            return state
        kept = {name: value for name, value in state.items() if not isinstance(value, Interceptor)}
        return kept | _formers(self.module)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Copies nothing: a copied module has that of its class."""


class ReplicaInterceptor(Interceptor):
    """Keeps interceptors out of the replicas that ``DataParallel`` makes."""

    __slots__ = ()

    method = "_replicate_for_data_parallel"

    def __call__(self) -> Any:
        """Returns the replica."""
        replica = self.inner()
        take_ours_out(replica)
        return replica

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Copies nothing: a copied module has that of its class."""


class ScriptInterceptor(Interceptor):
    """Refuses ``torch.jit.script``: its code reads weights in C++, where nothing fetches them."""

    __slots__ = ()

    method = "__prepare_scriptable__"

    def _plain(self) -> Callable[..., Any]:
        has = hasattr(type(self.module), self.method)
        return super()._plain() if has else lambda: self.module

    def __call__(self) -> Any:
        """Refuses to be compiled.

        Raises:
            WrapError: Always.
        """
        raise WrapError(
            "torch.jit.script makes code that reads weights where they are, and those of a "
            "wrapped module come and go: call tier.unwrap(module) first, or use torch.compile, "
            "which compiles block by block"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Copies nothing: a copied module has that of its class."""
