"""The current backward: its begin and end, and which groups it points at their blocks."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from tiermem.core.block import Role
from tiermem.core.schedule import SOFT
from tiermem.errors import WrapError
from tiermem.nn.compat.compiler import is_autograd_compiled
from tiermem.nn.compat.entrances import inside
from tiermem.nn.groups.group import Group
from tiermem.nn.groups.incoming import IncomingGradients
from tiermem.nn.passes.reduced import ReducedGradients
from tiermem.nn.passes.scopes import PassScope

if TYPE_CHECKING:
    from tiermem.nn.passes.runtime import ModuleRuntime

_USES = 3
"""How often in a row a backward is assumed to use a trained block, until one has been seen."""


class BackwardWatcher(Protocol):
    """Notified of every backward."""

    @property
    def revocable(self) -> bool:
        """Whether steps that it performs in backward can be undone."""
        ...

    def begins(self) -> int:
        """Called when a backward begins.

        Returns:
            0 if it uses weights and gradients only; otherwise a number that identifies the other
            blocks that it uses.
        """
        ...

    def foresees(self, order: Sequence[int]) -> Sequence[int]:
        """Returns the order of use of a backward with steps, given that of one without.

        Args:
            order: Ids of blocks.
        """
        ...

    def ends(self) -> None:
        """Called when a backward has ended."""
        ...

    def settle(self) -> None:
        """Makes all blocks accessible, even during a step."""
        ...

    def repair(self) -> None:
        """Undoes steps as far as possible, after an exception anywhere; none is in progress."""
        ...


class _Ending:
    """Ends a backward; if an error ends the backward, autograd drops it without calling it."""

    __slots__ = ("__weakref__", "_backward", "_waited")

    def __init__(self, backward: BackwardPass) -> None:
        self._backward = backward
        self._waited = False

    def __call__(self) -> None:
        if self._backward.reduced.active and not self._waited:
            self._waited = True  # for what was queued since: the reducer's end is among it
            torch.autograd.Variable._execution_engine.queue_callback(self)
            return
        self._backward.end()


def _nothing() -> None:
    return None


class BackwardPass:
    """Begins a pass when autograd reaches a wrapped module, and ends it with the backward.

    Attributes:
        runtime: The runtime of the modules.
        manager: The manager of their blocks.
        under_way: Whether a backward has begun and not ended.
        ending: Returns the object that ends it; None once autograd has dropped that after an error.
        on_begin: Functions called when a backward begins.
        watchers: Notified of every backward (optimizers that step in it).
        incoming: The gradients that it accumulates.
        reduced: Gradients that a ``DistributedDataParallel`` around a model reduces.
    """

    def __init__(self, runtime: ModuleRuntime) -> None:
        """Starts without a backward."""
        self.runtime = runtime
        self.manager = runtime.manager
        self.under_way = False
        self.on_begin: list[Callable[[], None]] = []
        self.watchers: list[BackwardWatcher] = []
        self.incoming = IncomingGradients(runtime, self)
        self.reduced = ReducedGradients(runtime)
        self._soft: deque[Group] = deque()
        self._kept: list[Group] = []
        self._owners: list[object] = []  # of which all groups are among those
        self._began = 0
        self.ending: Callable[[], _Ending | None] = _nothing

    def enter(self) -> None:
        """Called when backward reaches a wrapped module: begins a new pass the first time."""
        if torch._C._current_graph_task_id() == -1:
            return
        if not self.under_way or self.ending() is None:
            self._begin()

    @inside
    def _begin(self) -> None:
        if self.under_way:
            self.end()  # the one before
        runtime, manager = self.runtime, self.manager
        if is_autograd_compiled() and not manager.parts.table.all_fit:
            raise WrapError(
                "compiled autograd takes all weights of a backward at once, and HBM has no room "
                "for them: leave torch._dynamo.config.compiled_autograd off (what torch.compile "
                "makes of each block is compiled in backward as well), or give a larger hbm="
            )
        ending = _Ending(self)
        self.ending = weakref.ref(ending, self._cut_short)
        torch.autograd.Variable._execution_engine.queue_callback(ending)
        self.under_way = True
        self._began = time.perf_counter_ns()
        for look in self.on_begin:
            look()
        asked = [(watcher.begins(), watcher.revocable) for watcher in self.watchers]
        stepping = [steps for steps, revocable in asked if steps or not revocable]
        key = runtime.names.backward(stepping)
        known = manager.parts.planner.knows(key)
        guess = () if known else self._guess([steps for steps, _ in asked])
        manager.begin_pass(key, guess, load=runtime.names.load)
        with manager.lock:
            runtime.away.end()
            runtime.experts.prepare(runtime.experts.whole)
        runtime.activations.begin_backward()
        self.incoming.begin_backward()

    def _guess(self, stepping: Sequence[int]) -> Sequence[int]:
        """Returns the expected order of use of a backward that has not been seen before.

        Args:
            stepping: Whether steps are performed in it, by watcher.
        """
        runtime, planner = self.runtime, self.manager.parts.planner
        if planner.observed(runtime.names.like_backward):
            guess = planner.order_of(runtime.names.like_backward)
            for steps, watcher in zip(stepping, self.watchers, strict=True):
                guess = watcher.foresees(guess) if steps else guess
            return guess
        units = [(g, e.unit) for g in runtime.groups for e in g.entries if e.unit is not None]
        trained = {group.block.id for group, _ in units}
        gradients = {block.id for _, unit in units for block in unit.blocks}
        order = [b for b in planner.schedule.order if b not in gradients]
        del order[planner.cursor :]
        # a recomputed block is released in between, and would leave before its modules' backward
        return [b for b in order[::-1] for _ in range(_USES if b in trained else 1)]

    @inside
    def comes_to(self, scope: PassScope) -> None:
        """Called when the gradient of a module's output is computed: its backward comes next."""
        if self.manager.gate.closed:
            return
        if not self.under_way or self.ending() is None:
            self.enter()
        for group in scope.groups:
            if group.holds or group.freed or group.block.role is not Role.PARAM:
                continue
            group.point_softly(dirty=False)
            self.keep_soft(group)

    def keep_soft(self, group: Group) -> None:
        """Leaves a group pointed at its block until backward has used two others.

        Args:
            group: A soft group.
        """
        with self.manager.lock:  # another thread's forward may end this backward
            if group in self._soft:
                self._soft.remove(group)
            self._soft.append(group)
            if len(self._soft) > SOFT:
                self._soft.popleft().rest()

    def recomputes(self) -> None:
        """Called before a part of the forward is recomputed.

        The backward of everything after that part is done, so its blocks are released. Otherwise
        two of them would be held until the part's backward has used two others.
        """
        if not self.under_way or self.ending() is None:
            self.enter()
        if self._soft:
            with self.manager.lock:
                self._let_go_soft()

    def keep(self, groups: Iterable[Group]) -> None:
        """Holds groups until backward ends; otherwise each recomputed layer would hold them again.

        Their home is HBM, so this takes no room.
        """
        for group in groups:
            if group not in self._kept:
                group.hold()
                self._kept.append(group)

    def keep_all(self, owner: object, groups: Iterable[Group]) -> None:
        """Holds groups that are in HBM until backward ends; the caller has the manager's lock.

        Args:
            owner: The owner of the groups; see :meth:`keeps_all_of`.
            groups: All of its groups.
        """
        stream = self.manager.acquirer.enter_stream()
        self._owners.append(owner)
        for group in groups:
            if not (group.freed or group.resident):
                if not group.hold_as_it_is(stream):
                    group.hold_locked()
                self._kept.append(group)

    def keeps_all_of(self, owner: object) -> bool:
        """Whether all groups of an owner are held for the current backward."""
        return owner in self._owners and self.under_way and self.ending() is not None

    def let_go_kept(self) -> None:
        """Releases the groups that backward holds."""
        self._owners.clear()
        while self._kept:
            self._kept.pop().let_go()

    def forget(self, gone: set[int]) -> None:
        """Forgets groups, given by their ids, that are removed."""
        self._soft = deque(g for g in self._soft if id(g) not in gone)

    def _cut_short(self, ending: weakref.ref[_Ending]) -> None:
        """Ends a backward after an error, and restores stand-ins of gradients."""
        if self.under_way and ending is self.ending:
            self.runtime.grads.restore()
            self.let_go_kept()  # what is written meanwhile is to be seen

    @inside
    def end(self) -> None:
        """Ends a backward that has finished, or was ended by an error some time ago."""
        if not self.under_way:
            return
        self.under_way = False
        self.let_go_kept()
        try:
            self.reduced.end_backward()
            self.incoming.take_rest()  # watchers may then step units that have waited in vain
        finally:
            self._tell_of_end()

    def _tell_of_end(self) -> None:
        """Tells the other parts of the runtime that the backward has ended."""
        runtime = self.runtime
        for watcher in self.watchers:
            watcher.ends()
        self.incoming.end_backward()
        with self.manager.lock:
            self._let_go_soft()
            runtime.saved.rows.calls.end_backward()
            runtime.saved.let_go()
        runtime.activations.end_backward()
        runtime.busy("backward", self._began)

    def _let_go_soft(self) -> None:
        """Releases the groups that backward used last; the caller has the manager's lock."""
        while self._soft:
            self._soft.popleft().rest()

    def reset(self) -> None:
        """Ends a backward after an exception anywhere, even in the middle of its end.

        Before that, watchers undo steps as far as possible.
        """
        for watcher in self.watchers:
            watcher.repair()
        self.incoming.forget_new()
        self.under_way = True
        self._kept, self._owners = [], []  # no group is held
        self.end()
