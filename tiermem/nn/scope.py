"""What stands in front of a module's methods while it is wrapped.

A module's call is intercepted at ``_call_impl`` in its instance dictionary,
not with forward hooks: torch's own fast paths switch themselves off where
hooks are attached, user's hooks then run inside as they should, and an
exception passes through a plain ``finally``.
"""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from tiermem.core.block import Role
from tiermem.errors import ParameterError, WrapError
from tiermem.nn.group import Group
from tiermem.nn.runtime import ModuleRuntime, outputs_with_grad
from tiermem.nn.statedict import check_state

if TYPE_CHECKING:
    from tiermem.nn.wrapped import WrappedModel


_SWAPS = "torch.nn.utils._named_member_accessor"
"""Where ``torch.func.functional_call`` puts other tensors in a module's, for one call."""


class Scope:
    """The groups that a module's call needs.

    Attributes:
        name: The module's qualified name.
        number: Which wrapped model of the manager it belongs to.
        groups: Held during the call.
        begins: Whether a block begins at this module.
    """

    __slots__ = ("begins", "groups", "name", "number", "wrapped")

    def __init__(
        self,
        name: str,
        number: int,
        groups: Sequence[Group],
        wrapped: WrappedModel,
        *,
        begins: bool,
    ) -> None:
        self.name = name
        self.number = number
        self.groups = tuple(groups)
        self.wrapped = wrapped
        self.begins = begins

    def order(self) -> Iterator[Group]:
        """Yields the groups at and below this module, in the order of the modules."""
        prefix = f"{self.name}." if self.name else ""
        seen: set[int] = set()
        for name, scope in self.wrapped.scopes.items():
            if name == self.name or name.startswith(prefix):
                for group in scope.groups:
                    if id(group) not in seen:
                        seen.add(id(group))
                        yield group


class Interceptor:
    """Stands in a module's ``__dict__`` for one of its methods.

    A deep copy of the module gets its plain method back.
    """

    method: ClassVar[str]

    def __init__(self, module: nn.Module, scope: Scope) -> None:
        """Takes the place of ``method`` on ``module``."""
        self.module = module
        self.scope = scope
        self.runtime: ModuleRuntime = scope.wrapped.runtime
        self.inner: Callable[..., Any] = getattr(type(module), self.method).__get__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the method."""
        return self.inner(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = memo.get(id(self.module), self.module)
        return types.MethodType(getattr(type(module), self.method), module)

    def __reduce__(self) -> Any:
        raise WrapError(
            "a wrapped module cannot be pickled; save its state_dict(), or take it out of the "
            "tiers first with tier.unwrap(module)"
        )


class CallInterceptor(Interceptor):
    """Holds a module's groups while it runs."""

    method = "_call_impl"

    def __init__(self, module: nn.Module, scope: Scope) -> None:
        """Takes over a module that ``module.compile()`` was called on, too."""
        super().__init__(module, scope)
        self.compiled: Any = module.__dict__.pop("_compiled_call_impl", None)
        if self.compiled is not None:
            self.inner = self.compiled

    def give_back(self) -> None:
        """Leaves the module as it was found, compiled or not."""
        if self.compiled is not None:
            self.module.__dict__["_compiled_call_impl"] = self.compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, hooks and all."""
        scope = self.scope
        runtime = self.runtime
        if scope.begins or not runtime.stack or not runtime.saved.on_top():
            return self._within(scope, runtime, args, kwargs)
        for group in scope.groups:
            if not group.holds:
                return self._within(scope, runtime, args, kwargs)
        return self.inner(*args, **kwargs)

    def _within(self, scope: Scope, runtime: ModuleRuntime, args: Any, kwargs: Any) -> Any:
        began = 0
        stack = runtime.stack
        if not stack:
            runtime.manager.guard()
            runtime.begin_forward(scope)
            began = time.perf_counter_ns()
        held: list[Group] = []
        stack.append(held)
        pushed = entered = False
        try:
            if scope.begins:
                entered = runtime.activations.enter(scope)
            for group in scope.groups:
                group.hold()
                held.append(group)
            pushed = runtime.saved.push()
            result = self.inner(*args, **kwargs)
            if pushed or (scope.begins and torch.is_grad_enabled()):
                self._watch(scope, runtime, result)
            return result
        finally:
            if pushed:
                runtime.saved.pop()
            if entered:
                runtime.activations.leave()
            stack.pop()
            for group in reversed(held):
                group.let_go()
            if began:
                runtime.busy(scope.name or "forward", began)

    @staticmethod
    def _watch(scope: Scope, runtime: ModuleRuntime, result: Any) -> None:
        """Has backward announce itself when it reaches this module."""
        if not scope.begins or torch._C._functorch.peek_interpreter_stack() is not None:
            return
        for tensor in outputs_with_grad(result)[:1]:
            tensor.register_hook(partial(_announce, runtime, scope))


def _announce(runtime: ModuleRuntime, scope: Scope, _gradient: torch.Tensor) -> None:
    runtime.before_backward(scope)


class CompileInterceptor(Interceptor):
    """Has ``module.compile()`` compile what runs while the blocks are held, and nothing of us."""

    method = "compile"

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the module's call."""
        call = self.module.__dict__[CallInterceptor.method]
        plain = getattr(type(self.module), CallInterceptor.method).__get__(self.module)
        call.inner = call.compiled = torch.compile(plain, *args, **kwargs)
        self.scope.wrapped.leave_to_compiler(self.scope.name)


class ApplyInterceptor(Interceptor):
    """Refuses ``to()``, ``half()`` and their like where they would change anything."""

    method = "_apply"

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Returns the module where ``fn`` changes no dtype and no device."""
        for entry in self.scope.wrapped.entries:
            probe = torch.empty(0, dtype=entry.param.dtype, device=entry.placeholder.device)
            changed = fn(probe)
            if changed.dtype != probe.dtype or changed.device != probe.device:
                raise ParameterError(
                    f"parameter {entry.name!r} lives in the tiers: its module cannot be moved or "
                    f"cast to {changed.dtype} on {changed.device}; convert it before tier.wrap, or "
                    "call tier.unwrap(module) first"
                )
            return self.module
        return self.module


class SaveInterceptor(Interceptor):
    """Puts real tensors into ``state_dict()``."""

    method = "_save_to_state_dict"

    def __call__(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Fills ``destination`` with copies in host memory."""
        self.inner(destination, prefix, keep_vars)
        self.scope.wrapped.export(self.module, destination, prefix)


class LoadInterceptor(Interceptor):
    """Has a module's blocks at hand while its state is loaded."""

    method = "_load_from_state_dict"

    def __call__(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> Any:
        """Loads into the blocks."""
        with self.scope.wrapped.holding(self.module):
            return self.inner(state_dict, prefix, *args, **kwargs)


class LoadAllInterceptor(Interceptor):
    """Refuses a checkpoint of another shape before anything of it is loaded."""

    method = "load_state_dict"

    def __call__(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Checks every shape, then loads."""
        self.runtime.manager.guard()
        check_state(self.module, state_dict, *args, **kwargs)
        return self.inner(state_dict, *args, **kwargs)


_item = dict.__getitem__  # every use of a weight comes by: a name is found sooner than super()


class TieredDict(dict[str, Any]):
    """A module's ``_parameters`` or ``_buffers``: fetches what is reached for by name.

    So a parameter that is used outside its own module's call (``F.linear(x,
    self.embedding.weight)``) is there as well.
    """

    def __init__(
        self, plain: dict[str, Any], groups: dict[str, Group], runtime: ModuleRuntime
    ) -> None:
        """Copies ``plain``.

        Args:
            plain: The dictionary it takes the place of.
            groups: The group of each managed name.
            runtime: Where to ask for blocks.
        """
        super().__init__(plain)
        self.groups = groups
        self.runtime = runtime

    def __getitem__(self, name: str) -> Any:
        group = self.groups.get(name)
        if group is not None and not group.holds:
            self.runtime.demand(group)
        return _item(self, name)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self.groups and value is not self.get(name):
            self._let_go(name, value)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        if name in self.groups:
            self._let_go(name)
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        """Removes a name that is not managed, or is a buffer's."""
        if name in self.groups:
            self._let_go(name)
        return super().pop(name, *default)

    def _let_go(self, name: str, value: Any = None) -> None:
        """A name gets another tensor: a buffer's may, as in ``self.mean = 0.9 * self.mean + x``."""
        if self.groups[name].block.role is not Role.PARAM:
            del self.groups[name]
        elif sys._getframe(2).f_globals.get("__name__") != _SWAPS:
            raise self._replaced(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        # a copied module is an ordinary one: a plain dictionary of ordinary tensors
        copied: dict[str, Any] = {}
        for name, value in self.items():
            group = self.groups.get(name)
            if group is not None and id(value) not in memo:
                group.copy_into(memo)
            copied[name] = deepcopy(value, memo)
        return copied

    def __reduce__(self) -> Any:
        raise WrapError("the parameters of a wrapped module cannot be pickled; use state_dict()")

    def _replaced(self, name: str) -> ParameterError:
        return ParameterError(
            f"{name!r} of block {self.groups[name].block.name!r} lives in the tiers and cannot be "
            "replaced or removed behind the manager's back; change its values inside "
            "`with tier.materialize(...)`, or call tier.unwrap(module) first"
        )
