"""Calls of a model that is entirely in HBM: one hold for a whole pass, no interceptors inside.

If HBM has room for everything, intercepting each module's call and holding each block for its
own calls costs a host-bound forward a tenth of its time, without any benefit. So after some such
forwards, the interceptors are removed from the modules inside the model, the
outermost call holds all blocks, and what a graph saves is left to torch. They are restored as soon
as a condition changes: HBM has shrunk, a second thread appears, the compiler is active, or a
weight is used while no call holds it. Gradients are left to torch whenever all blocks have room.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import is_grad_enabled, nn
from torch._C import DisableTorchFunctionSubclass, _current_graph_task_id

from tiermem.core.block import align_up
from tiermem.nn.compat.compiler import compiling
from tiermem.nn.compat.entrances import inside
from tiermem.nn.compat.fastpaths import ASK
from tiermem.nn.groups.group import Group
from tiermem.nn.passes.leftout import left_out, taken_out
from tiermem.nn.wrap.scope import CallInterceptor, LeftInterceptor, Scope

if TYPE_CHECKING:
    from tiermem.nn.wrap.wrapped import WrappedModel

_FIRST = 2
"""Passes in a row without need of interceptors before those are removed, at first."""
_CLEARED = 3
"""Forwards with gradients left to torch before earlier gradients are cleared from the tiers."""
_MOST = 1024
"""Maximum of that number of passes, which doubles whenever the removal was in vain."""


class Bypass:
    """Removes the interceptors from the modules of one model, and restores them.

    Attributes:
        over: Whether they are never removed again.
        manager: The manager of the blocks.
    """

    def __init__(self, wrapped: WrappedModel) -> None:
        """Starts with all interceptors in place."""
        self.over = False
        self._wrapped = wrapped
        self.manager = wrapped.runtime.manager
        self._out: dict[nn.Module, CallInterceptor] = {}
        self._calm = 0
        self._patience = _FIRST
        self._trained = 0  # passes with gradients
        self._served = 0  # passes since they were removed
        self._ends = False
        self._last: Scope | None = None  # scope of the last pass, if it was held as a whole
        self._there: set[Group] = set()  # in HBM when interceptors were removed; others are unused
        self._groups: dict[str, tuple[Group, ...]] = {}

    @property
    def active(self) -> bool:
        """Whether interceptors are removed."""
        return bool(self._out)

    def goes_on(self, scope: Scope) -> bool:
        """Whether a new pass uses exactly the blocks that it holds as a whole, like the last one.

        Then it need not be registered anywhere, which would take a tenth of a small model's token
        time.

        Args:
            scope: The scope of the outermost call.
        """
        if not self._out or self._last is not scope or is_grad_enabled() or compiling():
            return False
        with self.manager.lock:
            return self._may() and self._wrapped.runtime.goes_on()

    def begin(self, scope: Scope) -> Sequence[Group]:
        """Decides how a new pass holds its blocks; the caller has the manager's lock.

        Args:
            scope: The scope of the outermost call.

        Returns:
            The groups to hold for the whole pass; none if the calls inside hold their own.
        """
        found = self._begin(scope)
        if is_grad_enabled() and not _in_backward():
            self._leave_gradients()
        return found

    def _begin(self, scope: Scope) -> Sequence[Group]:
        if self.over:
            return ()
        if compiling() or (self._ends and not _in_backward()):
            self.end(for_good=True)
            return ()
        if _in_backward():
            if self._out and left_out.of is not self:  # other code recomputes something
                self.end(for_good=True)
            return ()
        if not (self._may_leave_graph_out() if is_grad_enabled() else self._may()):
            self.end()
            return ()
        if not self._out:
            self._last = None
            self._calm += 1
            if self._calm <= self._patience or self._wrapped.runtime.saved.is_checkpointed():
                return ()
            if not self._take_out(scope):
                return ()
        else:
            self._last = scope
            self._served += 1
        return self._of(scope)

    def leave_graph_out(self, groups: Iterable[Group]) -> None:
        """Leaves what a forward saves to torch; the caller has the manager's lock.

        Hooks would be called for every tensor. Without them views of weights and parameters
        themselves are saved: as long as a graph has any, the block does not leave HBM.

        Args:
            groups: All groups that the forward uses; they are held.
        """
        for group in groups:
            pointing = group.pointing
            if pointing.slot is not None:
                pointing.slot.saved = pointing.tensors
        if is_grad_enabled():  # otherwise a graph begins where code inside enables gradients
            left_out.of = self

    def _leave_gradients(self) -> None:
        """Decides whether gradients of a new forward are left to torch."""
        incoming = self._wrapped.runtime.backward.incoming
        self._trained += 1
        if self._trained <= _FIRST or not self._may_leave_gradients(already=incoming.left > 0):
            incoming.left = 0
            return
        incoming.left += 1
        if incoming.left == _CLEARED:
            self.manager.parts.limit.trim()

    @inside
    def begin_again(self) -> None:
        """Holds all blocks until backward ends, as it may recompute parts of a forward.

        What is saved there is left to torch as it was the first time, so that checkpoints see the
        same tensors; this holds wherever the blocks are then.
        """
        backward = self._wrapped.runtime.backward
        if backward.keeps_all_of(self):
            return
        with self.manager.lock:
            if not self._may():
                self.end()  # the calls inside hold their own
                return
            backward.enter()
            backward.keep(self._wrapped.kept)
            backward.keep_all(self, self._there)

    @inside
    def put_back(self) -> None:
        """Intercepts calls again; see :meth:`end`."""
        with self.manager.lock:
            self.end()

    def used_alone(self) -> None:
        """Called when a weight is used while no call holds it; under the manager's lock."""
        again = _in_backward()  # then other code recomputes, and will do so the next time
        if not self._wrapped.runtime.saved.leave_checkpoint_out(self):
            self.end(for_good=again)
        else:
            self._ends = self._ends or again

    def end(self, *, for_good: bool = False) -> None:
        """Restores the interceptors; the caller has the manager's lock.

        Args:
            for_good: Whether they are never removed again.
        """
        self.over = self.over or for_good
        self._calm = 0
        if self._out:
            in_vain = self._served <= self._patience
            self._patience = min(_MOST, 2 * self._patience) if in_vain else _FIRST
            for module, call in self._out.items():
                if isinstance(module.__dict__.get(CallInterceptor.method), LeftInterceptor):
                    del module.__dict__[CallInterceptor.method]
                module.__dict__.setdefault(CallInterceptor.method, call)
            for group in self._wrapped.groups:
                group.left_open, group.graph_views = None, -1
            self._out = {}
            taken_out.discard(self)

    # -- inside ----------------------------------------------------------

    def _may(self) -> bool:
        """Whether only the pass itself uses the blocks, all of which have room in HBM."""
        manager, runtime = self.manager, self._wrapped.runtime
        return (
            manager.parts.table.all_fit
            and not manager.threads.several
            and not runtime.experts.open
            and not runtime.unwritten
            and not manager.parts.deferred.owed
            and not manager.parts.copy.capturing()
        )

    def _may_in_backward(self) -> bool:
        """The same for a backward, in which no other component may move tensors."""
        return self._may() and self._wrapped.runtime.activations.store is None

    def _may_leave_graph_out(self) -> bool:
        """Whether a forward's graph may keep the blocks in HBM: room is not needed, and no hook."""
        return (
            self._may_in_backward()
            and not self._wrapped.runtime.backward.reduced.active
            and self._wrapped.runtime.saved.may_be_left_out()
            and self._fits(self._gradients(new=True))
        )

    def _may_leave_gradients(self, *, already: bool) -> bool:
        """Whether gradients may be ordinary tensors, as they are without tiermem.

        Then they need memory beside that of the blocks. So HBM has to have room for them a second
        time, unless they are left to torch already: then its limit takes them into account.

        Args:
            already: Whether those of the previous backward were left to torch.
        """
        runtime, parts = self._wrapped.runtime, self.manager.parts
        return (
            self._may_in_backward()
            and runtime.grads.in_own_dtypes
            and all(watcher.revocable for watcher in runtime.backward.watchers)
            and parts.slots.arena.grows
            and (already or self._fits(self._gradients()))
        )

    def _gradients(self, *, new: bool = False) -> int:
        """Returns the bytes of the gradients of all models; ``new``: those without a home yet."""
        nbytes = 0
        with DisableTorchFunctionSubclass():
            for group in self._wrapped.runtime.groups:
                for entry in group.entries:
                    if entry.param.requires_grad and not (new and entry.unit is not None):
                        nbytes += align_up(entry.param.nbytes)
        return nbytes

    def _fits(self, nbytes: int) -> bool:
        """Whether HBM has room for so many bytes beside all blocks."""
        table = self.manager.parts.table
        return table.nbytes + nbytes <= table.hbm.capacity

    def _take_out(self, scope: Scope) -> bool:
        """Removes the interceptors if what the model uses is in HBM; returns whether it did."""
        modules = self._wrapped.modules
        if not (scope.around or not scope.name):
            return False  # layers are called one by one: each call would hold all
        moved = [group for group in self._wrapped.groups if not group.resident]
        there = {group for group in moved if group.record.usable}
        nbytes = [sum(group.block.nbytes for group in found) for found in (there, moved)]
        if moved and 2 * nbytes[0] <= nbytes[1]:
            return False
        # for such code, the holds show which weights were written
        found = None if modules.uncounted else modules.calls_inside()
        if not found:
            self.over = found is None
            return False
        self._served = 0
        self._there, self._groups = there, {}
        self._out = found  # first: if interrupted after this, they are restored
        taken_out.add(self)
        for group in self._wrapped.groups:
            group.left_open = self.used_alone
        for module, call in found.items():
            module.__dict__.pop(CallInterceptor.method, None)
            if isinstance(module, ASK):
                module.__dict__[CallInterceptor.method] = LeftInterceptor(module, call)
        return True

    def _of(self, scope: Scope) -> tuple[Group, ...]:
        """Returns the groups that a call and those inside it use, except those that stay in HBM."""
        found = self._groups.get(scope.name)
        if found is None:
            inside = set(scope.order())
            groups = [g for g in self._wrapped.groups if g in self._there]
            found = tuple(g for g in groups if not scope.name or g.block.id in inside)
            self._groups[scope.name] = found
        return found


def _in_backward() -> bool:
    return _current_graph_task_id() != -1
