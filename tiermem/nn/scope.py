"""What stands in front of a module's methods while it is wrapped.

A module's call is intercepted at ``_call_impl`` in its instance dictionary,
not with forward hooks: torch's own fast paths switch themselves off where
hooks are attached, user's hooks then run inside as they should, and an
exception passes through a plain ``finally``.
"""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Sequence
from functools import partial
from threading import active_count, get_ident
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import is_grad_enabled, nn

from tiermem.errors import ParameterError, WrapError
from tiermem.nn.group import Group
from tiermem.nn.runtime import ModuleRuntime, outputs_with_grad
from tiermem.nn.statedict import check_state

if TYPE_CHECKING:
    from tiermem.nn.wrapped import WrappedModel

_CALL = "_call_impl"
_MOST_CALLS = 32  # of a block of many modules (experts) few are called at a time


class Inside:
    """Who is inside the modules of one block, all of which need the same groups.

    While the only thread there is is inside and takes no gradients, the calls of the modules below
    the one where the block begins have nothing to add, and make way.

    Attributes:
        thread: The thread that is, if it is one alone; else 0, which no thread is called.
    """

    __slots__ = ("_calls", "_depth", "_made_way", "_may_make_way", "thread")

    def __init__(self) -> None:
        self.thread = 0
        self._depth = 0
        self._calls: list[tuple[dict[str, Any], CallInterceptor, Callable[..., Any]]] = []
        self._may_make_way = False
        self._made_way = False

    def add(self, call: CallInterceptor) -> None:
        """Has a module's call make way as well, where it may."""
        self._calls.append((call.module.__dict__, call, call.inner))
        self._may_make_way = len(self._calls) <= _MOST_CALLS

    def drop(self, call: CallInterceptor) -> None:
        """Has a call make way no more; it is about to be taken out or changed."""
        self.restore()
        self._calls = [entry for entry in self._calls if entry[1] is not call]

    def enter(self) -> None:
        """This thread holds the groups from now on; called under the manager's lock."""
        self._depth += 1
        try:
            if self._depth == 1:
                self.thread = get_ident()
                if self._may_make_way and not is_grad_enabled() and active_count() == 1:
                    self._made_way = True
                    for names, call, plain in self._calls:
                        if names[_CALL] is call:
                            names[_CALL] = plain
            elif self.thread != get_ident():
                self.thread = 0  # until all are out again
                self.restore()
        except BaseException:  # Ctrl-C
            self.leave()
            raise

    def leave(self) -> None:
        """It does so no more."""
        self._depth -= 1
        if not self._depth:
            self.thread = 0
            self.restore()

    def restore(self) -> None:
        """Puts the calls back that made way."""
        if self._made_way:
            for names, call, plain in self._calls:
                if names[_CALL] is plain:
                    names[_CALL] = call
            self._made_way = False


_NOBODY = Inside()


class Scope:
    """The groups that a module's call needs.

    Attributes:
        name: The module's qualified name.
        number: Which wrapped model of the manager it belongs to.
        groups: Held during the call.
        inside: Who is inside the modules that need the same groups.
        begins: Whether a block begins at this module.
    """

    __slots__ = ("_order", "begins", "groups", "inside", "name", "number", "wrapped")

    def __init__(
        self,
        name: str,
        number: int,
        groups: Sequence[Group],
        wrapped: WrappedModel,
        inside: Inside,
        *,
        begins: bool,
    ) -> None:
        self.name = name
        self.number = number
        self.groups = tuple(groups)
        self.wrapped = wrapped
        self.inside = inside
        self.begins = begins
        self._order: tuple[int, ...] | None = None

    def order(self) -> tuple[int, ...]:
        """Returns the blocks at and below this module, in the order of the modules."""
        if self._order is None:
            prefix = f"{self.name}." if self.name else ""
            scopes = self.wrapped.scopes.items()
            below = [s for name, s in scopes if name == self.name or name.startswith(prefix)]
            self._order = tuple(dict.fromkeys(g.block.id for s in below for g in s.groups))
        return self._order


class Interceptor:
    """Stands in a module's ``__dict__`` for one of its methods.

    A deep copy of the module gets its plain method back.
    """

    __slots__ = ("inner", "module", "runtime", "scope")

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

    __slots__ = ("_inside", "compiled")

    method = _CALL

    def __init__(self, module: nn.Module, scope: Scope) -> None:
        """Takes over a module that ``module.compile()`` was called on, too."""
        super().__init__(module, scope)
        self.compiled: Any = module.__dict__.pop("_compiled_call_impl", None)
        if self.compiled is not None:
            self.inner = self.compiled
        # only where a block begins there is something to do although its groups are held
        self._inside = _NOBODY if scope.begins else scope.inside
        if not scope.begins and self.compiled is None:
            scope.inside.add(self)

    def give_back(self) -> None:
        """Leaves the module as it was found, compiled or not."""
        self.scope.inside.drop(self)
        if self.compiled is not None:
            self.module.__dict__["_compiled_call_impl"] = self.compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, hooks and all."""
        if self._inside.thread == get_ident() and (
            not is_grad_enabled() or self.runtime.saved.on_top()
        ):
            return self.inner(*args, **kwargs)
        return self._within(self.scope, self.runtime, args, kwargs)

    def _within(self, scope: Scope, runtime: ModuleRuntime, args: Any, kwargs: Any) -> Any:
        began = 0
        stack = runtime.stack
        if not stack:
            runtime.manager.guard()
            runtime.begin_forward(scope)
            began = time.perf_counter_ns()
        elif runtime.unwritten and scope.groups:
            runtime.got_further(scope)
        held: list[Group] = []
        stack.append(held)
        pushed = entered = inside = False
        try:
            if scope.begins and runtime.activations.store is not None:
                entered = runtime.activations.enter(scope)
            with runtime.manager.lock:
                for group in scope.groups:
                    group.hold_locked()
                    held.append(group)
                scope.inside.enter()
                inside = True
            pushed = is_grad_enabled() and runtime.saved.push()
            result = self.inner(*args, **kwargs)
            if pushed or (scope.begins and is_grad_enabled()):
                self._watch(scope, runtime, result)
            return result
        finally:
            if pushed:
                runtime.saved.pop()
            if entered:
                runtime.activations.leave()
            stack.pop()
            with runtime.manager.lock:
                if inside:
                    scope.inside.leave()
                for group in reversed(held):
                    group.let_go_locked()
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

    __slots__ = ()

    method = "compile"

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the module's call."""
        self.scope.inside.restore()
        call = self.module.__dict__[CallInterceptor.method]
        self.scope.inside.drop(call)
        plain = getattr(type(self.module), CallInterceptor.method).__get__(self.module)
        call.inner = call.compiled = torch.compile(plain, *args, **kwargs)
        self.scope.wrapped.leave_to_compiler(self.scope.name)


class ApplyInterceptor(Interceptor):
    """Refuses ``to()``, ``half()`` and their like where they would change anything."""

    __slots__ = ()

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

    __slots__ = ()

    method = "_save_to_state_dict"

    def __call__(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Fills ``destination`` with copies in host memory."""
        self.inner(destination, prefix, keep_vars)
        self.scope.wrapped.export(self.module, destination, prefix)


class LoadInterceptor(Interceptor):
    """Has a module's blocks at hand while its state is loaded."""

    __slots__ = ()

    method = "_load_from_state_dict"

    def __call__(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> Any:
        """Loads into the blocks."""
        with self.scope.wrapped.holding(self.module):
            return self.inner(state_dict, prefix, *args, **kwargs)


class LoadAllInterceptor(Interceptor):
    """Refuses a checkpoint of another shape before anything of it is loaded."""

    __slots__ = ()

    method = "load_state_dict"

    def __call__(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Checks every shape, then loads."""
        self.runtime.manager.guard()
        check_state(self.module, state_dict, *args, **kwargs)
        return self.inner(state_dict, *args, **kwargs)
