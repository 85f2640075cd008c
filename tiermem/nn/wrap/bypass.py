"""Calls of a model that is in HBM as a whole: one hold for all of a pass, nothing between.

Where HBM has room for everything, intercepting each module's call and holding each block for its
own calls costs a host-bound forward a tenth of its time, and brings nothing up. So once such
forwards have come round, the interceptors inside the model are taken out of its modules, and the
outermost call holds all blocks, and what a graph saves is left to torch. They are put back as soon
as anything is otherwise: HBM has become less, a second thread comes, the compiler is at work, or a
weight is used while no call holds it. Gradients are left to torch wherever all blocks have room.
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
"""Passes in a row that need no interceptors before those are taken out for the first time."""
_CLEARED = 3
"""Forwards with gradients left to torch until those before them are cleared from the tiers."""
_MOST = 1024
"""The same at the most, however often they were put back."""


class Bypass:
    """Takes the interceptors of one model out of its modules, and puts them back.

    Attributes:
        over: Whether they stay in for as long as the model is in the tiers.
        manager: Of the blocks.
    """

    def __init__(self, wrapped: WrappedModel) -> None:
        """Takes none out yet."""
        self.over = False
        self._wrapped = wrapped
        self.manager = wrapped.runtime.manager
        self._out: dict[nn.Module, CallInterceptor] = {}
        self._calm = 0
        self._patience = _FIRST
        self._trained = 0  # passes with gradients
        self._served = 0  # passes since they were taken out
        self._ends = False
        self._last: Scope | None = None  # of the last pass, if it was held as a whole
        self._there: set[Group] = set()  # in HBM as interceptors were taken out: others are unused
        self._groups: dict[str, tuple[Group, ...]] = {}

    @property
    def active(self) -> bool:
        """Whether interceptors are out."""
        return bool(self._out)

    def goes_on(self, scope: Scope) -> bool:
        """Whether a pass that begins uses no block but those it holds as a whole, as the last did.

        Then it need not be entered anywhere, which a small model's token takes a tenth longer for.

        Args:
            scope: Of the outermost call.
        """
        if not self._out or self._last is not scope or is_grad_enabled() or compiling():
            return False
        with self.manager.lock:
            return self._may() and self._wrapped.runtime.goes_on()

    def begin(self, scope: Scope) -> Sequence[Group]:
        """Decides on a pass that begins; the caller has the manager's lock.

        Args:
            scope: Of the outermost call.

        Returns:
            The groups to hold for all of it; none where the calls inside hold their own.
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
            if self._out and left_out.of is not self:  # other code computes something again
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
        themselves are saved: while a graph has any, the block does not leave HBM.

        Args:
            groups: All that the forward uses; they are held.
        """
        for group in groups:
            pointing = group.pointing
            if pointing.slot is not None:
                pointing.slot.saved = pointing.tensors
        if is_grad_enabled():  # else a graph comes where code inside enables gradients
            left_out.of = self

    def _leave_gradients(self) -> None:
        """Decides whether gradients of a forward that begins are left to torch."""
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
        """Holds all blocks until backward is over, as it may compute parts of a forward again.

        What is saved there is left to torch as it was the first time, so that checkpoints see the
        same tensors; that is so wherever blocks are by then.
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
        """Has calls intercepted again; see :meth:`end`."""
        with self.manager.lock:
            self.end()

    def used_alone(self) -> None:
        """Called as a weight is used while no call holds it; the caller has the manager's lock."""
        again = _in_backward()  # then other code computes something again, and will the next time
        if not self._wrapped.runtime.saved.leave_checkpoint_out(self):
            self.end(for_good=again)
        else:
            self._ends = self._ends or again

    def end(self, *, for_good: bool = False) -> None:
        """Puts the interceptors back; the caller has the manager's lock.

        Args:
            for_good: Whether they stay in.
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
        """Whether nothing but the pass itself uses the blocks, all of which have room in HBM."""
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
        """Whether that is so in backward, too, where nothing else moves tensors."""
        return self._may() and self._wrapped.runtime.activations.store is None

    def _may_leave_graph_out(self) -> bool:
        """Whether a forward's graph may have the blocks: nothing needs their room, and no hook."""
        return (
            self._may_in_backward()
            and not self._wrapped.runtime.backward.reduced.active
            and self._wrapped.runtime.saved.may_be_left_out()
            and self._fits(self._gradients(new=True))
        )

    def _may_leave_gradients(self, *, already: bool) -> bool:
        """Whether gradients may be ordinary tensors, as they are without tiermem.

        They are memory beside that of the blocks then. So HBM has to have room for them a second
        time, but where they are left already: what it has is what they have let it.

        Args:
            already: Whether those of the backward before were.
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
        """Returns the bytes of the gradients of all models; ``new``: that have no home yet."""
        nbytes = 0
        with DisableTorchFunctionSubclass():
            for group in self._wrapped.runtime.groups:
                for entry in group.entries:
                    if entry.param.requires_grad and not (new and entry.unit is not None):
                        nbytes += align_up(entry.param.nbytes)
        return nbytes

    def _fits(self, nbytes: int) -> bool:
        """Whether HBM has room for so much beside all blocks."""
        table = self.manager.parts.table
        return table.nbytes + nbytes <= table.hbm.capacity

    def _take_out(self, scope: Scope) -> bool:
        """Takes the interceptors out, if what the model uses is in HBM; returns whether it has."""
        modules = self._wrapped.modules
        if not (scope.around or not scope.name):
            return False  # layers are called one by one: all would be held for each of them
        moved = [group for group in self._wrapped.groups if not group.resident]
        there = {group for group in moved if group.record.usable}
        nbytes = [sum(group.block.nbytes for group in found) for found in (there, moved)]
        if moved and 2 * nbytes[0] <= nbytes[1]:
            return False
        # which weights such code has written is told by who held them when
        found = None if modules.uncounted else modules.calls_inside()
        if not found:
            self.over = found is None
            return False
        self._served = 0
        self._there, self._groups = there, {}
        self._out = found  # first: cut short from here on, they are put back
        taken_out.add(self)
        for group in self._wrapped.groups:
            group.left_open = self.used_alone
        for module, call in found.items():
            module.__dict__.pop(CallInterceptor.method, None)
            if isinstance(module, ASK):
                module.__dict__[CallInterceptor.method] = LeftInterceptor(module, call)
        return True

    def _of(self, scope: Scope) -> tuple[Group, ...]:
        """Returns the groups that a call and those inside it use, but for those that stay."""
        found = self._groups.get(scope.name)
        if found is None:
            inside = set(scope.order())
            groups = [g for g in self._wrapped.groups if g in self._there]
            found = tuple(g for g in groups if not scope.name or g.block.id in inside)
            self._groups[scope.name] = found
        return found


def _in_backward() -> bool:
    return _current_graph_task_id() != -1
