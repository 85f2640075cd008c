"""Copies and pickles of wrapped modules are ordinary ones; ``torch.jit.script`` is refused."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable
from copy import copy, deepcopy
from functools import partial
from sys import getrefcount
from typing import Any

import torch
from torch import nn

from tiermem.errors import WrapError
from tiermem.nn.groups.away import group_of
from tiermem.nn.groups.inspect import is_made_in
from tiermem.nn.groups.names import HeldDict
from tiermem.nn.groups.pickled import Pickled, as_pickled, refuse_processes
from tiermem.nn.wrap.scope import Interceptor, meant, take_ours_out

_COPIES = ("copy", __name__)
_DEPTH = 4  # a tuple, the arguments in it, a module's names, a list of parameters


class CopyInterceptor(Interceptor):
    """Creates an ordinary module, without interceptors, if a wrapped one is copied."""

    __slots__ = ()

    method = "__deepcopy__"

    def _plain(self) -> Callable[..., Any]:
        has = hasattr(type(self.module), self.method)
        return super()._plain() if has else partial(_copy, self.module)

    def __call__(self, memo: dict[int, Any]) -> Any:
        """Returns the copy, in host memory; inside a forward on the device, where it is used."""
        if (other := meant(self, sys._getframe(1))) is not None:
            return deepcopy(other, memo)
        wrapped, device = self.scope.wrapped, self.runtime.manager.parts.device
        stay, moves = wrapped.staying(), wrapped.modules.group_of
        for tensor in self.module._buffers.values():
            if tensor is None or id(tensor) in memo:
                continue
            made = id(tensor) not in moves and is_made_in(tensor, device)  # by a forward
            if id(tensor) in stay or (made and device.type != "cpu"):
                own = memo[id(tensor)] = tensor.detach().to("cpu", copy=True)
                own.__dict__.update(deepcopy(tensor.__dict__, memo))
        copied = self.inner(memo)
        memo.setdefault(id(self.module), copied)
        names, formers = getattr(copied, "__dict__", {}), _formers(self.module)
        for name in _ours(self.module):
            names.pop(name, None)
        names.update({name: deepcopy(former, memo) for name, former in formers.items()})
        if self.runtime.here.inside and isinstance(copied, nn.Module):
            copied.to(device)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Copies nothing: interceptors that a class copies itself are removed afterwards."""


def _ours(module: nn.Module) -> dict[str, Interceptor]:
    """Returns the interceptors of a module, by name."""
    return {n: value for n, value in vars(module).items() if isinstance(value, Interceptor)}


def _formers(module: nn.Module) -> dict[str, Any]:
    """Returns what a module's interceptors have replaced, by name."""
    ours = _ours(module).items()
    return {name: value.former for name, value in ours if value.former is not None}


def _copy(module: nn.Module, memo: dict[int, Any]) -> Any:
    """Does the same as ``copy.deepcopy`` for a module that has no ``__deepcopy__``."""
    reduced: Any = module.__reduce_ex__(4)
    make, arguments, state, items, pairs, setter = (*reduced, *[None] * 4)[:6]
    copied = make(*deepcopy(arguments, memo))
    memo[id(module)] = copied  # before copying what may refer to it
    if state is not None:
        (setter or type(copied).__setstate__)(copied, deepcopy(state, memo))
    for item in items or ():
        copied.append(deepcopy(item, memo))
    for key, value in pairs or ():
        copied[deepcopy(key, memo)] = deepcopy(value, memo)
    return copied


class PickleInterceptor(Interceptor):
    """Pickles a module as the ordinary one that it would be without wrapping."""

    __slots__ = ()

    def _begin(self, frame: types.FrameType | None, references: int) -> None:
        """Prepares pickling.

        Args:
            frame: The frame that has called the interceptor.
            references: The number of references to the interceptor.

        Raises:
            WrapError: If another module may be the one that is pickled.
        """
        refuse_processes(frame)
        if references > _ALONE and self._is_given():
            raise WrapError(
                f"a pickler asked a {type(self.module).__name__} that was given all attributes of "
                "a wrapped one, or that one, which cannot be told apart; they can be from now on: "
                "pickle it again"
            )
        if self.runtime.manager.gate.unsure:
            self.runtime.repair()

    def _is_given(self) -> bool:
        """Whether another module was given this interceptor; it is removed from that one."""
        found = False
        for names in gc.get_referrers(self):
            if type(names) is dict and names is not vars(self.module):
                ours = [n for n, value in names.items() if isinstance(value, Interceptor)]
                if self.method in ours:
                    found = True
                    plain = _without_ours(names)
                    for name in ours:
                        del names[name]
                    names.update(plain)
        return found

    def _pickled(self, state: Any) -> Any:
        """Returns the pickled form of the state that the module's class returns."""
        return as_unwrapped(state, self._in_pickle)

    def _in_pickle(self, value: Any) -> Any:
        """Returns the pickled form of a tensor, or of a dictionary of names."""
        if isinstance(value, HeldDict):
            return {name: self._in_pickle(tensor) for name, tensor in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        group = group_of.get(id(value))
        if group is None and any(value is tensor for tensor in self.module._buffers.values()):
            device = self.runtime.manager.parts.device
            if device.type != "cpu" and is_made_in(value, device):
                return Pickled.of(value, None)  # weights are in host memory, too
        return as_pickled(value, group)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Copies nothing: a copied module has the one of its class."""


def _count_alone() -> int:
    """Returns the number of references to what only one module has, while that is pickled."""

    class Probe:
        def __call__(self) -> int:
            return getrefcount(self)

    module = nn.Module()
    module.__dict__["__getstate__"] = Probe()
    return int(module.__reduce_ex__(4)[2])


_ALONE = _count_alone()


class StateInterceptor(PickleInterceptor):
    """Also keeps interceptors out of what ``copy.copy`` copies, as they belong to this module."""

    __slots__ = ()

    method = "__getstate__"

    def _plain(self) -> Callable[..., Any]:
        has = hasattr(type(self.module), self.method)  # not before Python 3.11
        return super()._plain() if has else partial(vars, self.module)

    def __call__(self) -> Any:
        """Returns the module's state as it would be without wrapping."""
        if (other := meant(self, sys._getframe(1))) is not None:
            return getattr(other, self.method, partial(vars, other))()
        references, copied = getrefcount(self), _is_copied(sys._getframe(1))
        if not copied:
            self._begin(sys._getframe(1), references)
        state = self.inner()
        if not copied:
            return self._pickled(state)
        return _without_ours(state) if isinstance(state, dict) else state


class ReduceInterceptor(PickleInterceptor):
    """Does the same as :class:`StateInterceptor` for classes that define their own pickling."""

    __slots__ = ()

    method = "__reduce_ex__"

    @classmethod
    def suits(cls, module: nn.Module) -> bool:
        """Whether a module is of such a class."""
        kind = type(module)
        found = kind.__reduce__, kind.__reduce_ex__
        return found != (object.__reduce__, object.__reduce_ex__)

    def __call__(self, protocol: Any) -> Any:
        """Returns the arguments to recreate the module, as without wrapping."""
        if (other := meant(self, sys._getframe(1))) is not None:
            return other.__reduce_ex__(protocol)
        references, copied = getrefcount(self), _is_copied(sys._getframe(1))
        if not copied:
            self._begin(sys._getframe(1), references)
        made = self.inner(protocol)
        return made if copied else self._pickled(made)


def _is_copied(frame: types.FrameType) -> bool:
    """Whether Python's ``copy``, or :func:`_copy`, is the caller, rather than a pickler."""
    return frame.f_globals.get("__name__") in _COPIES


def _without_ours(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a module's state without interceptors, and with what these have replaced."""
    formers = {n: v.former for n, v in state.items() if isinstance(v, Interceptor)}
    kept = copy(state)  # of its class, such as an OrderedDict
    for name in formers:
        del kept[name]
    return _changed(kept, {name: value for name, value in formers.items() if value is not None})


def _changed(state: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy with other values for some names."""
    made = copy(state)
    for name, value in changes.items():
        made[name] = value  # with its class's method, not dict's
    return made


def as_unwrapped(state: Any, pickled: Callable[[Any], Any], depth: int = _DEPTH) -> Any:
    """Returns the pickled form of a wrapped module's state.

    Args:
        state: The state from the module's class: its ``__dict__``, or an object around that.
        pickled: Returns the pickled form of a tensor or of a dictionary of names.
        depth: How deep containers are searched.
    """
    if isinstance(state, HeldDict | torch.Tensor):
        return pickled(state)
    if not depth or not (isinstance(state, dict) or type(state) in (list, tuple)):
        return state
    if isinstance(state, dict):
        if any(isinstance(value, Interceptor) for value in state.values()):
            state = _without_ours(state)
        made = {name: as_unwrapped(value, pickled, depth - 1) for name, value in state.items()}
        changes = {name: value for name, value in made.items() if value is not state[name]}
        return _changed(state, changes) if changes else state
    made = type(state)(as_unwrapped(value, pickled, depth - 1) for value in state)
    same = all(one is other for one, other in zip(made, state, strict=True))
    return state if same else made  # a list that several modules share stays shared


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
        """Copies nothing: a copied module has the one of its class."""


class ScriptInterceptor(Interceptor):
    """Refuses ``torch.jit.script``: its code reads weights in C++, where nothing fetches them."""

    __slots__ = ()

    method = "__prepare_scriptable__"

    def _plain(self) -> Callable[..., Any]:
        has = hasattr(type(self.module), self.method)
        return super()._plain() if has else lambda: self.module

    def __call__(self) -> Any:
        """Refuses compilation.

        Raises:
            WrapError: Always.
        """
        raise WrapError(
            "torch.jit.script makes code that reads weights where they are, and those of a "
            "wrapped module come and go: call tier.unwrap(module) first, or use torch.compile, "
            "which compiles block by block"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Copies nothing: a copied module has the one of its class."""
