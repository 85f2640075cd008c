"""The passes of all wrapped modules of one manager: forward, backward, and what they hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from tiermem.core.block import Block, Extent, Tier
from tiermem.core.need import unit_limit
from tiermem.errors import CapacityError, CheckpointError, WrapError
from tiermem.nn.compat.entrances import inside
from tiermem.nn.groups.addresses import Addresses
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.grads import GradStore
from tiermem.nn.groups.group import Group
from tiermem.nn.groups.need import Program, beside_optimizer
from tiermem.nn.passes.activations import Activations
from tiermem.nn.passes.backward import BackwardPass
from tiermem.nn.passes.members import Groups
from tiermem.nn.passes.names import PassNames
from tiermem.nn.passes.reduced import ReducedGradients
from tiermem.nn.passes.saved import SavedHooks
from tiermem.nn.passes.scopes import PassScope
from tiermem.nn.passes.unwritten import Unwritten
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.services.expert_store import ExpertStore

if TYPE_CHECKING:
    from tiermem.nn.wrap.materialize import Lending
    from tiermem.nn.wrap.wrapped import WrappedModel


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
        before_forward: Called before each top-level pass, with whether gradients are taken.
    """

    blocks: Callable[[], list[Block]]
    space: Callable[[], list[tuple[Tier, Extent]]]
    optimizer: object
    before_forward: Callable[[bool], None]


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
        names: Under which passes are measured.
        backward: The backward under way.
        enter_backward: Its :meth:`BackwardPass.enter`, called at every use in backward.
        keepers: What each optimizer has in the tiers.
        attempts: Steps that are under way, or could not be taken back yet.
        unwritten: What steps wrote of the blocks that forward begins with.
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
        self.groups = Groups()
        self.here = _Here()
        self.grads = GradStore(self)
        self.program = Program(manager.parts.settings, self.grads.dtype_for)
        self.reduced = ReducedGradients(self)
        self.addresses = Addresses()
        settings = manager.parts.settings
        self.activations: Activations = Activations(
            manager,
            settings.policy.activations,
            settings.activation_min,
            settings.activation_layers,
            settings.activation_ahead,
        )
        self.saved = SavedHooks(self)
        self.experts = ExpertStore(manager)
        self.names = PassNames()
        self.backward = BackwardPass(self)
        self.enter_backward = self.backward.enter
        self.keepers: list[Keeper] = []
        self.attempts: list[UnderWay] = []
        manager.parts.homes.owners.append(self._owned)
        self.lendings: list[Lending] = []
        self.models: dict[int, WrappedModel] = {}
        self.wrapping: WrappedModel | None = None
        self.half_loaded = ""
        self.owner: object = None
        self.unwritten = Unwritten(self)
        self._ambient: list[Group] = []

    # -- membership ------------------------------------------------------

    def add(self, groups: Iterable[Group]) -> None:
        """Enters groups."""
        for group in groups:
            self.groups.add(group)
            group.ready(self)

    def remove(self, groups: Iterable[Group]) -> None:
        """Takes groups out."""
        gone = {id(group) for group in groups}
        self.groups.remove(gone)
        self._ambient = [g for g in self._ambient if id(g) not in gone]
        self.backward.forget(gone)

    def unit_limit(self, group: Group) -> int:
        """Returns the bytes a unit of gradients may have, so that an optimizer step fits in HBM."""
        sizes = [e.param.numel() * e.param.element_size() for e in group.entries]
        hbm = self.manager.parts.table.hbm.capacity
        return unit_limit(hbm, group.block.nbytes, sizes)

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
            self.backward.keep(scope.wrapped.kept)
            return
        if torch._C._get_tracing_state() is not None:
            raise WrapError(
                "torch.jit.trace takes weights as they are; trace the module before tier.wrap, or "
                "take it out of the tiers first with tier.unwrap(module)"
            )
        with self.manager.lock:
            self.refuse_half_loaded("a forward")
            self.backward.end()
            self.reduced.begin_forward(scope)
            training = torch.is_grad_enabled()
            for keeper in self.keepers:
                keeper.before_forward(training)
            self.experts.prepare(training)
            self.grads.drop_forgotten()
            self._drop(self._ambient)
            self._ambient = []
            # with optimizer steps in it the pass uses other blocks: it is learned as another
            modes = module.training, training, self.manager.parts.deferred.here
            key = self.names.forward(scope, modes, args, kwargs)
            guess: Sequence[int] = ()
            if not self.manager.parts.planner.knows(key):
                guess = self.manager.parts.deferred.order(scope.order())
            self.manager.begin_pass(key, guess, load=self.names.load, again=not training)
            if self.activations.store is not None and training:
                self.groups.home_gradients(self.grads)
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

    def _owned(self) -> list[tuple[Tier, Extent]]:
        """Returns the space below HBM that optimizers have beside blocks."""
        return [place for keeper in self.keepers for place in keeper.space()]

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
        if tensor.requires_grad:
            self.groups.track(tensor, self.grads)

    def _remember(self, group: Group) -> None:
        if group not in self._ambient:
            self._ambient.append(group)

    def reset(self) -> None:
        """Ends what is under way after an exception anywhere, however far it had come."""
        self.backward.reset()
        self._ambient = []

    def busy(self, what: str, began_ns: int) -> None:
        """Counts host time spent in a pass."""
        ended = time.perf_counter_ns()
        self.manager.parts.counters.busy_ns += ended - began_ns
        if not self.backward.under_way:  # what is computed again there is a part of it
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
