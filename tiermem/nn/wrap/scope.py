"""Interceptors of a module's methods while it is wrapped.

A module's call is intercepted at ``_call_impl`` in its instance dictionary,
not with forward hooks: torch's own fast paths are disabled for modules
with hooks, user hooks then run inside as they should, and an
exception passes through a plain ``finally``.
"""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import groupby
from sys import getrefcount
from threading import get_ident
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import is_grad_enabled, nn

from tiermem.errors import REFUSALS, CapacityError, WrapError
from tiermem.nn.compat.compiler import WHOLE_GRAPH
from tiermem.nn.compat.outside import OUTSIDE
from tiermem.nn.compat.refusing import (
    could_not_grow,
    keeps_its_size,
    read_elsewhere,
    was_refused,
)
from tiermem.nn.compat.weakly import Hook
from tiermem.nn.groups.group import Group
from tiermem.nn.passes.backward import BackwardPass
from tiermem.nn.passes.leftout import left_out
from tiermem.nn.passes.runtime import ModuleRuntime, outputs_with_grad
from tiermem.runtime.base.functorch import transforming

if TYPE_CHECKING:
    from tiermem.nn.wrap.wrapped import WrappedModel

_CALL = "_call_impl"


class Inside:
    """Counts the threads inside the modules of one block, all of which need the same groups.

    Each call enters and leaves with inlined code, under the manager's lock.

    Attributes:
        thread: The thread that is inside, if there is only one; else 0, which is no thread's id.
        stream: The compute stream with which it entered.
        depth: How many calls hold the groups.
    """

    __slots__ = ("depth", "stream", "thread")

    def __init__(self, groups: Sequence[Group] = ()) -> None:
        """Starts with no thread inside.

        Args:
            groups: The groups that all of the modules need.
        """
        self.thread = self.depth = self.stream = 0
        for group in groups:
            group.insides.append(self)

    def reset(self) -> None:
        """Clears the threads inside, after an exception anywhere; there are none then."""
        self.thread = self.depth = 0


_NOBODY = Inside()


class Scope:
    """The groups that a module's call needs.

    Attributes:
        name: The module's qualified name.
        number: Number of the wrapped model in the manager.
        groups: Held during the call.
        in_place: Not held, though the module has parameters of them, as HBM has no room for them.
        inside: Counts the threads inside the modules that need the same groups.
        begins: Whether a block begins at this module.
        called: Whether its calls are intercepted: not if all its tensors stay in HBM.
        around: Whether it has no tensors itself, and blocks begin inside.
    """

    __slots__ = (
        "__weakref__",
        "_uses",
        "around",
        "begins",
        "called",
        "groups",
        "in_place",
        "inside",
        "name",
        "number",
        "wrapped",
    )

    def __init__(
        self,
        name: str,
        number: int,
        groups: Sequence[Group],
        wrapped: WrappedModel,
        inside: Inside,
        *,
        begins: bool,
        called: bool = True,
        around: bool = False,
    ) -> None:
        self.name = name
        self.number = number
        self.groups = tuple(groups)
        self.in_place: tuple[Group, ...] = ()
        self.wrapped = wrapped
        self.inside = inside
        self.begins = begins
        self.called = called
        self.around = around
        self._uses: list[tuple[int, int]] | None = None

    def order(self, tokens: int = 0) -> tuple[int, ...]:
        """Returns the blocks that a call of this module is expected to use, in that order.

        Blocks whose experts are copied one by one are not used themselves.

        Args:
            tokens: Tokens of the call, if rows of an embedding may be read in place; else 0.
        """
        if self._uses is None:
            self._uses = self.wrapped.modules.uses_below(self.name)
        found = [block for block, few in self._uses if not 0 < tokens <= few]
        experts = self.wrapped.runtime.experts
        if experts.open:
            found = [block for block in found if not experts.by_rows(block)]
        return tuple(block for block, _ in groupby(found))


class Interceptor:
    """Replaces one of a module's methods, in its ``__dict__``.

    A deep copy of the module gets its plain method back, or a copy of what was there before.
    """

    __slots__ = ("former", "inner", "module", "runtime", "scope")

    method: ClassVar[str]

    def __init__(self, module: nn.Module, scope: Scope) -> None:
        """Replaces ``method`` of ``module``."""
        self.module = module
        self.scope = scope
        self.runtime: ModuleRuntime = scope.wrapped.runtime
        own = module.__dict__.get(self.method)  # what other code has put in place of the method
        self.former: Any = own.former if isinstance(own, Interceptor) else own
        self.inner: Callable[..., Any] = self.former or self._plain()

    @classmethod
    def suits(cls, module: nn.Module) -> bool:
        """Whether a module needs it."""
        return True

    def _plain(self) -> Callable[..., Any]:
        """Returns the method of the module's class."""
        found: Callable[..., Any] = getattr(type(self.module), self.method).__get__(self.module)
        return found

    @property
    def _runtime(self) -> ModuleRuntime:
        return self.runtime

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the method."""
        return self.inner(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.former is not None:
            return deepcopy(self.former, memo)
        module = memo.get(id(self.module), self.module)
        return types.MethodType(getattr(type(module), self.method), module)

    def take_out(self) -> None:
        """Restores what was in the module's ``__dict__`` before."""
        if self.former is not None:
            self.module.__dict__[self.method] = self.former
        else:
            del self.module.__dict__[self.method]

    def __reduce__(self) -> Any:
        if self.method.startswith("_"):  # no name of a module is kept from being seen here
            raise WrapError(
                f"class {type(self.module).__name__} has its modules pickled in a way of its own "
                "that tiers do not know (all of their attributes are inside another object): they "
                "cannot be pickled while they are wrapped; call tier.unwrap(module) first"
            )
        # if a program has it without its module: as the bound method of that
        return getattr, (self.module, self.method)


class CallInterceptor(Interceptor):
    """Holds a module's groups while it runs."""

    __slots__ = (
        "_activations", "_begins", "_bypass", "_enters", "_gate", "_groups", "_here", "_inside",
        "_lock", "_manager", "_push", "_quick", "_saved", "_soft", "_stream", "_threads",
        "_unwritten", "compiled",
    )  # fmt: skip

    method = _CALL

    def __init__(self, module: nn.Module, scope: Scope) -> None:
        """Intercepts a module, even if ``module.compile()`` was called on it."""
        super().__init__(module, scope)
        self.compiled: Any = module.__dict__.pop("_compiled_call_impl", None)
        if self.compiled is not None:
            self.inner = self.compiled
        # used in every call, when the caches no longer contain them
        self._manager, self._here = self.runtime.manager, self.runtime.here
        self._gate, self._lock = self._manager.gate, self._manager.lock
        self._threads, self._stream = self._manager.threads, self._manager.parts.copy.stream
        self._saved, self._activations = self.runtime.saved, self.runtime.activations
        self._push, self._unwritten = self._saved.push, self.runtime.unwritten
        self._soft = self.runtime.away.soft
        self._groups, self._inside = scope.groups, scope.inside
        self._begins, self._bypass = scope.begins, scope.wrapped.bypass
        self._enters = scope.begins and self._activations.store is not None
        # if its groups are held already, only a module at which a block begins needs more work
        self._quick = _NOBODY if scope.begins else scope.inside

    def give_back(self) -> None:
        """Restores the module, compiled or not."""
        if self.compiled is not None:
            self.module.__dict__["_compiled_call_impl"] = self.compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, including its hooks."""
        if getrefcount(self) > _ALONE and (other := _given_ours(sys._getframe(1))) is not None:
            return other._call_impl(*args, **kwargs)
        thread = get_ident()
        if self._quick.thread == thread and (not is_grad_enabled() or self._saved.on_top()):
            if self._quick.stream != self._stream():
                self._follow()
            return self.inner(*args, **kwargs)
        if self._gate.unsure:
            self.runtime.repair()
        if not self._here.inside:
            return self._begin(args, kwargs)
        groups, inside, soft = self._groups, self._inside, len(self._soft)
        entered = pushed = held = theirs = ended = False
        result = None
        try:
            if self._unwritten and groups:
                self._unwritten.got_further(self.scope)
            try:
                entered = self._enters and self._activations.enter(self.scope)
                with self._lock:
                    while not held:
                        try:
                            for group in groups:
                                group.hold_locked()
                            held = True
                        except REFUSALS as error:
                            _let_go(groups[: groups.index(group)])
                            if type(error) is not CapacityError or not self._threads.wait():
                                raise
                    if not inside.depth:
                        inside.depth = 1
                        inside.thread = thread
                        inside.stream = self._stream()
                    else:
                        inside.depth += 1
                        if inside.thread != thread:
                            inside.thread = 0  # until all are out again
                pushed = is_grad_enabled() and left_out.of is not self._bypass and self._push()
                theirs = True
                result = self.inner(*args, **kwargs)
                theirs = False
                if self._begins if pushed else is_grad_enabled():
                    self._watch(self.scope, self.runtime, result, pushed)
                if len(self._soft) > soft:
                    self.runtime.away.rest(soft, result)
                return result
            finally:
                if pushed:
                    self._saved.pop()
                if entered:
                    self._activations.leave()
                if held:
                    with self._lock:
                        count = inside.depth - 1
                        inside.depth = count
                        if not count:
                            inside.thread = 0
                        try:
                            for group in groups:
                                group.let_go_locked(result=result, given=args)
                        except REFUSALS:
                            _let_go(groups[groups.index(group) + 1 :])
                            raise
                ended = True
        except REFUSALS:
            raise
        except BaseException as error:
            if not (ended and (theirs or OUTSIDE in error.__dict__)):
                # it came at a line of tiermem's; no call: see entrance
                self._gate.torn = self._gate.unsure = True
            elif was_refused(error):
                there = [group.block for group in groups]
                raise read_elsewhere(self.module, self.scope.name, there) from error
            elif could_not_grow(error):
                with self._lock:
                    self.scope.wrapped.restore_sizes()
                raise keeps_its_size(self.module, self.scope.name) from error
            raise

    def _follow(self) -> None:
        """Makes another compute stream wait for what is held, and evictions wait for it."""
        parts = self._manager.parts
        with self._lock:
            for group in self._groups:
                parts.copy.use(parts.transfers.ready.get(group.block.id))

    def _begin(self, args: Any, kwargs: Any) -> Any:
        """Makes the call a pass, as it is not inside another call of a wrapped module."""
        here, runtime, manager = self._here, self.runtime, self._manager
        runtime.given.look()
        # the pass holds what stays in HBM as a whole; in another pass its model's call does
        kept = self.scope.wrapped.kept
        held, outer = 0, left_out.of
        theirs = ended = False
        if torch._C._current_graph_task_id() == -1:
            left_out.of = None
        try:
            manager.gate.guard()
            with manager.lock:
                self._threads.enter(runtime.most_calls)
                if self._threads.several:
                    self.scope.wrapped.note_thread()
            try:
                if not self._bypass.goes_on(self.scope):
                    runtime.begin_forward(self.module, self.scope, args, kwargs)
                self.scope.wrapped.modules.look_at_new_code()
            except BaseException:
                with manager.lock:
                    self._threads.leave()
                raise
            began = time.perf_counter_ns()
            here.inside = True
            try:
                with manager.lock:
                    for group in kept:
                        group.hold_locked()
                        held += 1
                    whole = self._bypass.begin(self.scope)
                    stream = manager.acquirer.enter_stream() if whole else -1
                    kept = (*kept, *whole)
                    for group in whole:
                        if not group.hold_as_it_is(stream):
                            group.hold_locked()
                        held += 1
                    if whole:
                        self._bypass.leave_graph_out(kept)
                theirs = True
                result = CallInterceptor.__call__(self, *args, **kwargs)
                theirs = False
                if here.unseen:
                    self._saved.unseen.hold_unseen(outputs_with_grad(result))
                return result
            finally:
                here.inside = False
                here.unseen.clear()
                seen = left_out.of is self._bypass
                left_out.of = outer
                with manager.lock:
                    self._threads.leave()
                    _let_go(kept[:held], seen=seen)
                runtime.busy(self.scope.name or "forward", began)
                ended = True
        except REFUSALS:
            raise
        except BaseException as error:
            if not (ended and (theirs or OUTSIDE in error.__dict__)):
                manager.gate.torn = manager.gate.unsure = True  # as in __call__
                here.inside = False
            raise

    @staticmethod
    def _watch(scope: Scope, runtime: ModuleRuntime, result: Any, pushed: bool) -> None:
        """Registers a hook that reports when backward reaches this module."""
        if not pushed and runtime.saved.refused():
            runtime.saved.unseen.hold_for(outputs_with_grad(result), scope.groups)
        if not scope.begins or transforming() or runtime.saved.is_thrown_away():
            return
        plain = type(result) is torch.Tensor and result.requires_grad
        for tensor in [result] if plain else outputs_with_grad(result)[:1]:
            tensor.register_hook(_Announcement(runtime.backward, scope))


def _count_alone() -> int:
    """Returns the number of references in its call to what only one module has for that."""

    class Probe:
        def __call__(self, *_args: Any, **_kwargs: Any) -> int:
            return getrefcount(self)

    module = nn.Module()
    module.__dict__[_CALL] = Probe()
    return int(module())


_ALONE = _count_alone()


def _given_ours(frame: types.FrameType | None) -> nn.Module | None:
    """Returns the called module, if it has been given another one's interceptors.

    This occurs if a program copies all attributes of a wrapped module, as libraries do that create
    a functional twin of it. The interceptors are removed from it, and it is called as an ordinary
    module.

    Args:
        frame: The frame that has called an interceptor.
    """
    called: Any = None
    while frame is not None:
        called = frame.f_locals.get("self")
        if not isinstance(called, Interceptor):
            break
        frame = frame.f_back
    if not isinstance(called, nn.Module):
        return None
    call = called.__dict__.get(_CALL)
    if not isinstance(call, Interceptor) or call.module is called:
        return None
    take_ours_out(called)
    return called


def take_ours_out(module: nn.Module) -> None:
    """Removes the interceptors of another module from one that was given them."""
    for name, value in [*vars(module).items()]:
        if isinstance(value, Interceptor) and value.module is not module:
            del module.__dict__[name]
            if value.former is not None:
                module.__dict__[name] = value.former


def meant(interceptor: Interceptor, frame: types.FrameType | None) -> nn.Module | None:
    """Returns the module whose method is called, if it has been given this interceptor.

    The caller has it as ``self`` (methods of modules), as ``module`` (torch's loading of
    state dicts) or as ``x`` (Python's ``copy``). The interceptors are removed from it.

    Args:
        interceptor: The interceptor of another module.
        frame: The frame that has called it.
    """
    while frame is not None and isinstance(frame.f_locals.get("self"), Interceptor):
        frame = frame.f_back
    found = {} if frame is None else frame.f_locals
    for name in ("self", "module", "x"):
        other = found.get(name)
        if not isinstance(other, nn.Module) or other is interceptor.module:
            continue
        if vars(other).get(interceptor.method) is interceptor:
            take_ours_out(other)
            return other
    return None


def _let_go(groups: Sequence[Group], *, seen: bool = False) -> None:
    """Releases groups that a call holds; the caller has the manager's lock."""
    for group in groups:
        group.let_go_locked(seen=seen)


class _Announcement(Hook[BackwardPass, Scope]):
    """A hook of a module's output, which reports that backward has reached the module.

    A graph keeps it where the garbage collector does not see it, also after backward. A model
    that keeps one of its own outputs (an auxiliary loss) would keep itself alive for ever.
    """

    __slots__ = ()

    def __call__(self, _gradient: torch.Tensor) -> None:
        """Called with the output's gradient."""
        backward, scope = self._owner(), self._entry()
        if backward is not None and scope is not None:
            backward.comes_to(scope)


class LeftInterceptor(Interceptor):
    """Stands in for an interceptor that is removed, until the module is called by itself.

    For other modules, a use of a weight shows that. A module that first checks the class of weights
    would take another path in that call, as in a call that does not hold them: for a block that was
    not used before.
    """

    __slots__ = ("_call", "_here")

    method = _CALL

    def __init__(self, module: nn.Module, call: CallInterceptor) -> None:
        """Stands in for ``call``."""
        super().__init__(module, call.scope)
        self._call, self._here = call, self.runtime.here

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        if getrefcount(self) > _ALONE and (other := _given_ours(sys._getframe(1))) is not None:
            return other._call_impl(*args, **kwargs)
        bypass, held = self.scope.wrapped.bypass, all(group.holds for group in self.scope.groups)
        if not (self._here.inside or torch._C._current_graph_task_id() != -1):
            bypass.put_back()
        elif held:
            return self.inner(*args, **kwargs)
        else:
            with self.runtime.manager.lock:
                bypass.used_alone()
        return self._call(*args, **kwargs)


class AroundInterceptor(CallInterceptor):
    """Makes a call of a module without a block itself, but with blocks inside, one pass.

    Programs call the decoder of a causal model by itself, to compute the loss in chunks. Without
    this each of its layers would be a top-level call, and a separate pass: the planner would
    foresee a few layers at a time, and make a plan for each of them.

    A checkpoint may run the module once inside another call, and again by itself: what its other
    operations save is left to the checkpoint, which has to see the same tensors both times.
    """

    __slots__ = ()

    def __init__(self, module: nn.Module, scope: Scope) -> None:
        """Intercepts a module, even if ``module.compile()`` was called on it."""
        super().__init__(module, scope)
        self._push = self._saved.push_for_operation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; inside another call there is hardly anything to do."""
        if getrefcount(self) > _ALONE and (other := _given_ours(sys._getframe(1))) is not None:
            return other._call_impl(*args, **kwargs)
        if not self._here.inside:
            return super().__call__(*args, **kwargs)
        soft, result = len(self._soft), self.inner(*args, **kwargs)
        if len(self._soft) > soft:
            self.runtime.away.rest(soft, result)
        return result


class CompileInterceptor(Interceptor):
    """Makes ``module.compile()`` compile only what runs while the blocks are held."""

    __slots__ = ()

    method = "compile"

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the module's call.

        Raises:
            WrapError: If one graph is requested, and there are blocks in it.
        """
        whole = kwargs.get("fullgraph", args[0] if args else False)
        if whole and any(block not in self._own() for block in self.scope.order()):
            name = self.scope.name or type(self.module).__name__
            raise WrapError(f"compile() of {name!r}: {WHOLE_GRAPH}. {self._said_of_blocks()}")
        if not self.scope.called:
            self.scope.wrapped.modules.leave_to_compiler(self.scope.name)
            self.inner(*args, **kwargs)
            return
        with self.runtime.manager.lock:
            self.scope.wrapped.bypass.end(for_good=True)
        call = self.module.__dict__[CallInterceptor.method]
        plain = getattr(type(self.module), CallInterceptor.method).__get__(self.module)
        call.inner = call.compiled = torch.compile(plain, *args, **kwargs)
        if not self.scope.around:  # otherwise it holds nothing that the modules inside need
            self.scope.wrapped.modules.leave_to_compiler(self.scope.name)

    def _own(self) -> set[int]:
        return {group.block.id for group in self.scope.groups}

    def _said_of_blocks(self) -> str:
        """Returns a text: at which modules inside blocks begin, and how to make it one block."""
        above = f"{self.scope.name}." if self.scope.name else ""
        scopes = self.scope.wrapped.scopes.items()
        found = [name for name, scope in scopes if scope.groups and name.startswith(above)]
        names = [repr(name) for name in found if name not in ("", self.scope.name)]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} others" if names[3:] else "")
        return (
            f"Blocks begin at {shown} in it; where it is to be one of them, name it in "
            "tier.wrap(model, blocks=[...])"
        )
