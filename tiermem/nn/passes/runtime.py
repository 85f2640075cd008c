"""The passes of all wrapped modules of one manager: forward, backward, and what they hold."""

from __future__ import annotations

import threading
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from tiermem.core.block import Block, Extent, Role, Tier
from tiermem.core.forecast import rounded, timed
from tiermem.core.need import unit_limit
from tiermem.errors import CapacityError, CheckpointError, WrapError
from tiermem.nn.compat.entrances import inside
from tiermem.nn.groups.addresses import Addresses
from tiermem.nn.groups.grads import GradStore
from tiermem.nn.groups.group import Entry, Group
from tiermem.nn.groups.need import Program, beside_optimizer
from tiermem.nn.passes.activations import Activations
from tiermem.nn.passes.load import Kinds, tokens
from tiermem.nn.passes.reduced import ReducedGradients
from tiermem.nn.passes.saved import SavedHooks
from tiermem.nn.passes.scopes import PassScope
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.services.expert_store import ExpertStore
from tiermem.runtime.services.sweep import BlockSweep

if TYPE_CHECKING:
    from tiermem.nn.wrap.materialize import Lending
    from tiermem.nn.wrap.wrapped import WrappedModel

_SOFT_IN_BACKWARD = 2
_PAST = 3  # blocks that forward has come to after the first one: it "has got further"


class BackwardWatcher(Protocol):
    """Notified of every backward."""

    @property
    def revocable(self) -> bool:
        """Whether steps that it makes in backward can be taken back."""
        ...

    def begins(self) -> bool:
        """Called as one begins; returns if it uses more blocks than weights and gradients."""
        ...

    def ends(self) -> None:
        """Called when it is over."""
        ...

    def settle(self) -> None:
        """Permits access to all blocks, also while a step is under way."""
        ...

    def repair(self) -> None:
        """Takes back what can be, after an exception anywhere; nothing is under way."""
        ...


class _Ending:
    """Ends a backward; autograd drops it uncalled where that is cut short by an error."""

    __slots__ = ("__weakref__", "_runtime", "_waited")

    def __init__(self, runtime: ModuleRuntime) -> None:
        self._runtime = runtime
        self._waited = False

    def __call__(self) -> None:
        if self._runtime.reduced.active and not self._waited:
            self._waited = True  # for what was queued since: the reducer's end is among it
            torch.autograd.Variable._execution_engine.queue_callback(self)
            return
        self._runtime.end_backward()


class _Here(threading.local):
    """Where one thread is.

    Attributes:
        depth: How many calls of wrapped modules it is in.
    """

    depth = 0


@dataclass(frozen=True, slots=True, eq=False)
class Keeper:
    """What one optimizer keeps in the tiers.

    Attributes:
        blocks: Returns its blocks of state and masters.
        space: Returns the space below HBM that it has beside these.
        optimizer: The optimizer itself.
    """

    blocks: Callable[[], list[Block]]
    space: Callable[[], list[tuple[Tier, Extent]]]
    optimizer: object = None


class UnderWay(Protocol):
    """A step that holds blocks until it is made or taken back."""

    def end(self) -> None:
        """Takes it back unless it is made, and releases everything."""
        ...

    def leased(self) -> tuple[Group | None, list[Block]]:
        """Returns the group that it holds, and the blocks that it leases beside that."""
        ...


class ModuleRuntime:
    """State shared by every wrapped module of one manager.

    Attributes:
        manager: The blocks.
        groups: Every group of parameters, in the order of the modules.
        here: Where the calling thread is.
        grads: The gradients.
        program: What models and optimizers there are, to say what budgets would do.
        reduced: Those that a ``DistributedDataParallel`` around a model takes part in.
        saved: The saved-tensor hooks.
        addresses: The addresses that users were given for parameters.
        activations: Saved tensors that leave HBM.
        experts: Layers of which the experts come up one by one.
        on_begin: Called before each top-level pass (the optimizers check in here).
        on_backward: Called as each backward begins.
        keepers: What each optimizer has in the tiers.
        attempts: Steps that are under way, or could not be taken back yet.
        backwards: Notified of every backward (optimizers that step in it).
        unwritten: What steps wrote of the blocks that forward begins with; it goes home once
            forward has got further. Models read values back as they begin (is a mask needed?), and
            on CUDA such a read waits for all copies down that are ready to run.
        worst_chain: Most bytes of blocks that nested calls of one model hold at once.
        models: The wrapped models, by the id of their module.
        wrapping: The one that is being wrapped.
        lendings: What users have as ordinary tensors, and what could not be taken back from them.
        half_loaded: The error of a checkpoint that was loaded in part; empty where none was.
        owner: The manager that users see, kept alive as long as models are wrapped.
    """

    def __init__(self, manager: BlockManager, repair: Callable[[ModuleRuntime], None]) -> None:
        """Starts with no module.

        Args:
            manager: Of the blocks.
            repair: :func:`tiermem.nn.wrap.repair.repair`, for those below that begin with it.
        """
        self.manager = manager
        self.repair = partial(repair, self)  # no Python frame of its own: repair reads frames
        self.groups: list[Group] = []
        self.here = _Here()
        self.grads = GradStore(self)
        self.program = Program(manager.parts.settings, self.grads.dtype_for)
        self.reduced = ReducedGradients(self)
        self.saved = SavedHooks(self)
        self.addresses = Addresses()
        settings = manager.parts.settings
        self.activations = Activations(
            manager,
            settings.policy.activations,
            settings.activation_min,
            settings.activation_layers,
            settings.activation_ahead,
        )
        self.experts = ExpertStore(manager)
        self.on_begin: list[Callable[[bool], None]] = []
        self.on_backward: list[Callable[[], None]] = []
        self.keepers: list[Keeper] = []
        self.attempts: list[UnderWay] = []
        manager.parts.homes.owners.append(self._owned)
        self.backwards: list[BackwardWatcher] = []
        self.lendings: list[Lending] = []
        self.models: dict[int, WrappedModel] = {}
        self.wrapping: WrappedModel | None = None
        self.half_loaded = ""
        self.owner: object = None
        self.unwritten: list[Block] = []
        self._past = -1
        self.worst_chain = 0
        self._by_block: dict[int, Group] = {}
        self._ambient: list[Group] = []
        self._backward: deque[Group] = deque()
        self._kept: list[Group] = []
        self._in_backward = False
        self._backward_began = 0
        self._ending: weakref.ref[_Ending] | None = None
        self._last_forward: Hashable = None
        self._last_backward: Hashable = None
        self._kinds = Kinds()
        self._load = 0
        self._homed = 0

    # -- membership ------------------------------------------------------

    def add(self, groups: Iterable[Group]) -> None:
        """Enters groups."""
        for group in groups:
            self.groups.append(group)
            self._by_block[group.block.id] = group
            group.ready(self)

    def remove(self, groups: Iterable[Group]) -> None:
        """Takes groups out."""
        gone = {id(group) for group in groups}
        self.groups = [group for group in self.groups if id(group) not in gone]
        self._by_block = {g.block.id: g for g in self.groups}
        self._ambient = [g for g in self._ambient if id(g) not in gone]
        self._backward = deque(g for g in self._backward if id(g) not in gone)

    def unit_limit(self, group: Group) -> int:
        """Returns the bytes a unit of gradients may have, so that an optimizer step fits in HBM."""
        sizes = [e.param.numel() * e.param.element_size() for e in group.entries]
        hbm = self.manager.parts.table.hbm.capacity
        return unit_limit(hbm, group.block.nbytes, sizes, group.layer)

    def group_of(self, block: Block) -> Group | None:
        """Returns the group of weights or buffers that a block is of."""
        return self._by_block.get(block.id)

    def owner_of(self, block: Block, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the parameter or buffer that shares a version counter with a view of a block."""
        group = self._by_block.get(block.id)
        if group is None:
            return None
        position = tensor.storage_offset() * tensor.dtype.itemsize
        index = bisect_right(block.tensors, position, key=lambda spec: spec.offset) - 1
        for entry in group.entries:
            if entry.index == index:
                return entry.param if entry.param._version == tensor._version else None
        for member in group.buffers:
            if member.index == index:
                buffer = member.tensor
                return buffer if buffer._version == tensor._version else None
        return None

    # -- forward ---------------------------------------------------------

    def begin_forward(
        self, module: nn.Module, scope: PassScope, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Begins a forward: a wrapped module is called while none is running.

        Args:
            module: The module.
            scope: Its scope.
            args: Of the call.
            kwargs: Of the call.
        """
        if torch._C._current_graph_task_id() != -1:
            self.enter_backward()  # recomputation
            self._keep(scope.wrapped.kept)
            return
        if torch._C._get_tracing_state() is not None:
            raise WrapError(
                "torch.jit.trace takes weights as they are; trace the module before tier.wrap, or "
                "take it out of the tiers first with tier.unwrap(module)"
            )
        with self.manager.lock:
            self.refuse_half_loaded("a forward")
            self.end_backward()
            self.reduced.begin_forward(scope)
            training = torch.is_grad_enabled()
            for check in self.on_begin:
                check(training)
            self.experts.prepare(training)
            self.grads.drop_forgotten()
            self._drop(self._ambient)
            self._ambient = []
            # with optimizer steps in it the pass uses other blocks: it is learned as another
            stepping = self.manager.parts.deferred.here
            kind = self._kinds.number((scope.name, scope.number), module.training, args, kwargs)
            key: tuple[Hashable, ...]
            key = ("forward", scope.name, scope.number, training, stepping)
            if kind:
                key = (*key, kind)
            self._last_forward = key
            self._load = rounded(tokens(args, kwargs))
            guess: Sequence[int] = ()
            if not self.manager.parts.planner.knows(key):
                guess = self.manager.parts.deferred.order(scope.order())
            self.manager.begin_pass(key, guess, load=self._load, again=not training)
            if self.activations.store is not None and training:
                self._home_gradients()
            self.activations.begin_forward()

    def refuse_half_loaded(self, what: str) -> None:
        """Refuses to compute with a checkpoint of which only a part was loaded.

        Raises:
            CheckpointError: If that is so.
        """
        if self.half_loaded:
            raise CheckpointError(
                f"{what} with a checkpoint that was loaded in part: {self.half_loaded}; weights "
                "and state are partly its own and partly those of before: load a whole "
                "checkpoint with tier.load(path)"
            )

    def refuse_inside(self, what: str) -> None:
        """Refuses a call from within a forward or backward, where things are half done.

        Raises:
            CheckpointError: If it is.
        """
        if self.here.depth or torch._C._current_graph_task_id() != -1:
            raise CheckpointError(
                f"{what} inside a forward or backward, where buffers and gradients are half made; "
                "call it between them"
            )

    def got_further(self, scope: PassScope) -> None:
        """Notes that forward uses a block; writes ``unwritten`` home once it is past the first.

        Modules around both may be called, and have blocks of their own, before either. And not
        before some kernels of what follows are launched: until then the device has nothing to do.
        """
        if self.groups and self.groups[0] in scope.groups:
            self._past = 0
        elif self._past >= 0:
            self._past += 1
            if self._past >= _PAST:
                self._home_unwritten()

    def _home_unwritten(self) -> None:
        """Writes the ``unwritten`` blocks home, except those in use."""
        get, blocks = self.manager.parts.table.get, self.unwritten
        self.unwritten = [b for b in blocks if (record := get(b.id)) is not None and record.leases]
        if not self.unwritten:
            self._past = -1
        if len(self.unwritten) < len(blocks):
            used = {block.id for block in self.unwritten}
            BlockSweep(self.manager).write([block for block in blocks if block.id not in used])

    def _owned(self) -> list[tuple[Tier, Extent]]:
        """Returns the space below HBM that optimizers have beside blocks."""
        return [place for keeper in self.keepers for place in keeper.space()]

    def _home_gradients(self) -> None:
        """Reserves the gradients' homes before saved tensors take what room there is."""
        if self._homed != len(self.groups):
            self._homed = len(self.groups)
            with suppress(CapacityError):  # there may be no backward; if there is, it says so
                self.grads.reserve(self.groups)

    @inside
    def demand(self, group: Group) -> None:
        """Fetches a group whose parameter is looked up while its block is not held."""
        if group.soft and self.here.depth > 0:
            return  # it was just before, and points at its block
        self.manager.gate.guard()
        # every torch operation on the parameter brings its block for its own time; it is pointed
        # there for code that torch does not see, which may write if it runs outside every pass
        inside = self.here.depth > 0 or torch._C._current_graph_task_id() != -1
        group.point_softly(dirty=not inside)
        self._remember(group)

    @inside
    def lend(self, group: Group) -> int:
        """Holds a group for one operation on a tensor of it that is away."""
        self.manager.gate.guard()
        self.enter_backward()
        try:
            group.hold()
        except CapacityError as error:
            raise beside_optimizer(error) from None
        return 2 if self.saved.push_for_operation() else 1

    @inside
    def lent(self, group: Group, token: int, *, dirty: bool) -> None:
        """Ends :meth:`lend`; the group stays pointed at the block until that leaves."""
        if token == 2:
            self.saved.pop()
        group.let_go(dirty=dirty, soft=True)
        self._remember(group)

    def thawed(self, tensor: torch.Tensor) -> None:
        """Takes a parameter's gradients from now on, since its ``requires_grad`` was set."""
        if not tensor.requires_grad:
            return
        for group in self.groups:
            for entry in group.entries:
                if entry.param is tensor:
                    self.grads.track(entry)

    def _remember(self, group: Group) -> None:
        if group not in self._ambient:
            self._ambient.append(group)

    # -- backward --------------------------------------------------------

    @property
    def last_passes(self) -> tuple[Hashable, Hashable]:
        """Names under which the last forward and the last backward that have begun are measured."""
        return timed(self._last_forward, self._load), timed(self._last_backward, self._load)

    def enter_backward(self) -> None:
        """Called where backward reaches a wrapped module: begins a new pass the first time."""
        if torch._C._current_graph_task_id() == -1:
            return
        if not self._in_backward or self._ending is None or self._ending() is None:
            self._begin_backward()

    @inside
    def _begin_backward(self) -> None:
        if self._in_backward:
            self.end_backward()  # that was another one
        ending = _Ending(self)
        self._ending = weakref.ref(ending, self._cut_short)
        torch.autograd.Variable._execution_engine.queue_callback(ending)
        self._in_backward = True
        self._backward_began = time.perf_counter_ns()
        for look in self.on_backward:
            look()
        trained = {e.unit.block.id for g in self.groups for e in g.entries if e.unit is not None}
        order = [b for b in self.manager.parts.planner.schedule.order if b not in trained]
        del order[self.manager.parts.planner.cursor :]
        asked = [(watcher.begins(), watcher.revocable) for watcher in self.backwards]
        stepping = [steps for steps, revocable in asked if steps or not revocable]
        self._last_backward = ("backward", self._last_forward, *stepping)
        self.manager.begin_pass(self._last_backward, order[::-1], load=self._load)
        self.activations.begin_backward()
        self.grads.begin_backward()

    @inside
    def before_backward(self, scope: PassScope) -> None:
        """Called when the gradient of a module's output is there: its backward comes next."""
        if self.manager.gate.closed:
            return
        self.enter_backward()
        for group in scope.groups:
            if group.holds or group.freed or group.block.role is not Role.PARAM:
                continue
            group.point_softly(dirty=False)
            if group in self._backward:
                self._backward.remove(group)
            self._backward.append(group)
        while len(self._backward) > _SOFT_IN_BACKWARD:
            self._backward.popleft().rest()

    def _keep(self, groups: Iterable[Group]) -> None:
        """Holds groups until backward is over: each layer that is computed again would hold them.

        They are at home in HBM, so that it takes no room.
        """
        for group in groups:
            if group not in self._kept:
                group.hold()
                self._kept.append(group)

    def let_go_kept(self) -> None:
        """Releases the groups that backward holds."""
        while self._kept:
            self._kept.pop().let_go()

    def _cut_short(self, ending: weakref.ref[_Ending]) -> None:
        """Ends a backward that an error cut short; gradients that made way are shown again."""
        if self._in_backward and ending is self._ending:
            self.grads.restore()

    @inside
    def end_backward(self) -> None:
        """Ends a backward that is over, or was cut short by an error some time ago."""
        if not self._in_backward:
            return
        self._in_backward = False
        self.let_go_kept()
        self.reduced.end_backward()
        for watcher in self.backwards:
            watcher.ends()
        self.grads.end_backward()
        self._drop(self._backward)
        self._backward.clear()
        self.activations.end_backward()
        self.busy("backward", self._backward_began)

    def reset_backward(self) -> None:
        """Ends a backward after an exception anywhere, however far its end had come."""
        self._in_backward = True
        self._kept = []  # no group is held
        self.end_backward()
        self._ambient = []

    def busy(self, what: str, began_ns: int) -> None:
        """Counts host time spent in a pass."""
        ended = time.perf_counter_ns()
        self.manager.parts.counters.busy_ns += ended - began_ns
        if not self._in_backward:  # what is computed again there is a part of it
            self.manager.end_pass()
        lane = "optimizer" if what == "optimizer" else "compute"
        self.manager.parts.timeline.add(lane, what, began_ns, ended)

    def _drop(self, groups: Iterable[Group]) -> None:
        for group in groups:
            group.rest()


def entries_of(groups: Iterable[Group]) -> list[Entry]:
    """Returns the managed parameters of groups."""
    return [entry for group in groups for entry in group.entries]


def outputs_with_grad(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in a module's output that backward will come through."""
    if isinstance(value, torch.Tensor):
        return [value] if value.requires_grad else []
    if isinstance(value, list | tuple):
        return [t for item in value for t in outputs_with_grad(item)]
    if isinstance(value, dict):
        return [t for item in value.values() for t in outputs_with_grad(item)]
    return []
