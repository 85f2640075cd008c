"""The passes of all wrapped modules of one manager: forward, backward, and their state."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tiermem.core.block import align_up
from tiermem.core.experts import Way
from tiermem.core.need import unit_limit
from tiermem.errors import CheckpointError, WrapError
from tiermem.nn.compat.compiler import tell_compiler
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.grads import GradStore
from tiermem.nn.groups.group import Group
from tiermem.nn.groups.need import Program
from tiermem.nn.passes.activations import Activations
from tiermem.nn.passes.awayuses import AwayUses
from tiermem.nn.passes.backward import BackwardPass
from tiermem.nn.passes.givenstates import GivenStates
from tiermem.nn.passes.keepers import Keepers
from tiermem.nn.passes.members import Groups
from tiermem.nn.passes.models import Models
from tiermem.nn.passes.names import PassNames
from tiermem.nn.passes.saved import SavedHooks
from tiermem.nn.passes.scopes import PassScope
from tiermem.nn.passes.unwritten import Unwritten
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.services.expert_store import ExpertStore
from tiermem.runtime.services.home_packing import HomePacking
from tiermem.runtime.services.packer import Packer, Wanted

_UNTRAINED = 2
"""After this many forwards without gradients a model counts as not trained."""


@dataclass(slots=True)
class _Trainable:
    """Groups of a model that get packed copies if the model turns out not to be trained.

    Attributes:
        groups: Groups that could be trained.
        forwards: How many forwards of the model there have been.
    """

    groups: list[Group]
    forwards: int = 0


class Here(threading.local):
    """What one thread is doing.

    Attributes:
        inside: Whether it is in a call of a wrapped module.
        unseen: Aliases of blocks that this call used while torch refused hooks.
    """

    inside = False

    def __init__(self) -> None:
        """Starts outside of every call."""
        self.unseen: list[torch.Tensor] = []

    def is_in_pass(self) -> bool:
        """Whether it is in a call of a wrapped module, or in a backward."""
        return self.inside or torch._C._current_graph_task_id() != -1


class ModuleRuntime:
    """State shared by every wrapped module of one manager.

    Attributes:
        manager: The manager of the blocks.
        groups: Every group of parameters, in the order of the modules.
        here: What the calling thread is doing.
        given: Values of state dicts that programs got.
        grads: The gradients.
        program: The models and optimizers, to find which budgets would be enough.
        saved: The saved-tensor hooks.
        away: Uses of tensors outside their own module's call.
        activations: Saved tensors that leave HBM.
        experts: Layers whose experts are copied one by one.
        names: The names of passes.
        backward: The current backward.
        keepers: What each optimizer has in the tiers.
        unwritten: Blocks that steps have written and that forward uses first.
        models: The wrapped models.
    """

    def __init__(self, manager: BlockManager, repair: Callable[[ModuleRuntime], None]) -> None:
        """Starts without modules.

        Args:
            manager: The manager of the blocks.
            repair: :func:`tiermem.nn.wrap.repair.repair`, which packages below cannot import.
        """
        self.manager = manager
        self.repair = partial(repair, self)  # adds no Python frame, as repair reads frames
        self.groups = Groups()
        self.here = Here()
        self.given = GivenStates()
        self.grads = GradStore(self)
        self.program = Program(manager.parts.settings, self.grads.homes.dtype_for)
        self.away = AwayUses(self)
        settings = manager.parts.settings
        self.activations: Activations = Activations(
            manager,
            settings.policy.activations,
            settings.activation_min,
            settings.activation_layers,
            settings.activation_ahead,
        )
        self.experts: ExpertStore = ExpertStore(manager)
        self.packer = Packer(manager)
        self.home_packing = HomePacking(manager)
        self._trainable: dict[int, _Trainable] = {}
        self.saved = SavedHooks(self)
        self.names = PassNames()
        self.backward = BackwardPass(self)
        self.keepers = Keepers()
        manager.parts.homes.owners.append(self.keepers.space)
        self.models = Models()
        self.unwritten = Unwritten(self)
        manager.threads.then = self._watch

    # -- membership ------------------------------------------------------

    def add(self, groups: Iterable[Group]) -> None:
        """Adds groups."""
        for group in groups:
            self.groups.add(group)
            group.ready(self.away)
            if self.manager.threads.several:
                group.watch()

    def _watch(self, thread: int) -> None:
        """Watches the groups, since more threads than ``thread`` use them; under the lock."""
        for group in self.groups:
            group.watch(thread)

    def remove(self, groups: Iterable[Group]) -> None:
        """Removes groups."""
        gone = {id(group) for group in groups}
        self.groups.remove(gone)
        for number, found in list(self._trainable.items()):
            found.groups = [group for group in found.groups if id(group) not in gone]
            if not found.groups:
                del self._trainable[number]
        self.away.forget(gone)
        self.backward.forget(gone)

    def pack_ahead(self, number: int, groups: Iterable[Group], *, written: bool) -> None:
        """Makes packed copies of a model's weights in ``wrap``, except those that will be trained.

        Args:
            number: Number of the model, as in its scopes.
            groups: Groups of the model.
            written: Whether parameters that require gradients are assumed to be trained.
        """
        wanted, trained = [], []
        for group in groups:
            if group.in_place:
                continue  # it is never copied to HBM
            with torch._C.DisableTorchFunctionSubclass():
                is_trained = written and any(e.param.requires_grad for e in group.entries)
            if is_trained:
                trained.append(group)
            else:
                stack = self.experts.stacks.get(group.block.id)
                wanted.append(Wanted(group.block, () if stack is None else stack.with_rows()))
        if trained:
            self._trainable[number] = _Trainable(trained)
        with self.manager.lock:
            if self.manager.parts.planner.key is None:
                self.manager.parts.limit.begin()  # no pass has begun yet, so this finds the limit
            self.packer.pack(wanted)

    def _pack_untrained(self, number: int, training: bool) -> None:
        """Makes packed copies of trainable weights at the second forward without gradients.

        Args:
            number: Number of the model.
            training: Whether the forward that begins computes gradients: then it is trained.
        """
        found = self._trainable.get(number)
        if found is None or self.manager.parts.copy.capturing():
            return
        found.forwards += 1
        if training or self.keepers:
            del self._trainable[number]
        elif found.forwards >= _UNTRAINED:
            del self._trainable[number]
            self.pack_ahead(number, found.groups, written=False)

    def fill_ahead(self, scope: PassScope, held: Collection[int], *, written: bool) -> None:
        """Begins to prefetch, in ``wrap``, the blocks that the first pass of a model uses first.

        For experts that are copied one by one, as tokens choose them, it only makes room.

        Args:
            scope: The scope of the model itself.
            held: Ids of its blocks that are held while others are used.
            written: Whether parameters that require gradients are assumed to be trained.
        """
        with self.manager.lock:
            if self.manager.parts.planner.key is None:  # no pass has begun
                trained = self._trained()[0] if written else set()
                # room made beside a few trained stacks would stay that small if none is trained
                self.experts.prepare(trained if len(trained) == len(self.experts.stacks) else ())
        order = scope.order(self._looked_up(1))
        self.manager.fill_ahead(order, held)
        self.manager.prepare_stamps(len(order))

    def _looked_up(self, tokens: int) -> int:
        """Returns a call's tokens if rows of embeddings are read in DRAM, else 0."""
        return 0 if self.manager.parts.table.all_fit else tokens

    def unit_limit(self, group: Group) -> int:
        """Returns the bytes a unit of gradients may have, so that an optimizer step fits in HBM."""
        sizes = [e.param.numel() * e.param.element_size() for e in group.entries]
        hbm = self.manager.parts.table.hbm.capacity
        here = 0 if group.record.annexed else group.block.nbytes
        return unit_limit(hbm, here, sizes, few=group.few)

    # -- forward ---------------------------------------------------------

    def begin_forward(
        self, module: nn.Module, scope: PassScope, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Begins a forward: a wrapped module is called while none is running.

        Args:
            module: The module.
            scope: Its scope.
            args: Arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        if torch._C._current_graph_task_id() != -1:
            self.backward.recomputes()
            self.backward.keep(scope.wrapped.kept)
            return
        if torch._C._get_tracing_state() is not None:
            raise WrapError(
                "torch.jit.trace takes weights as they are; trace the module before tier.wrap, or "
                "take it out of the tiers first with tier.unwrap(module)"
            )
        tell_compiler()  # torch's compiler may have been imported since
        with self.manager.lock:
            self.models.refuse_half_loaded("a forward")
            self.backward.end()
            self.backward.reduced.begin_forward(scope)
            training = torch.is_grad_enabled()
            if self._trainable:
                self._pack_untrained(scope.number, training)
            for keeper in self.keepers:
                keeper.before_forward(training)
            load, way = self.names.weigh(args, kwargs), Way.EACH
            if self.experts.stacks:
                way = self._prepare_experts((scope.name, scope.number, load), training)
            self.grads.drop_forgotten()
            self.away.end()
            # a pass with optimizer steps in it uses other blocks, so it has another name
            modes = module.training, training, self.manager.parts.deferred.here, way
            key = self.names.forward(scope, modes, args, kwargs)
            guess: Sequence[int] = ()
            if not self.manager.parts.planner.knows(key):
                guess = self.manager.parts.deferred.order(
                    scope.order(0 if training else self._looked_up(load))
                )
            like = self.names.like
            self.manager.begin_pass(key, guess, like=like, load=load, again=not training)
            self.experts.begin_pass()
            if self.activations.store is not None and training:
                self.groups.home_gradients(self.grads)
            self.activations.begin_forward()

    def goes_on(self) -> bool:
        """Whether a forward without gradients that uses no block can belong to the last pass.

        The caller has the manager's lock.
        """
        if (
            self.keepers
            or self.backward.under_way
            or self.grads.has_any
            or self.activations.store is not None
            or torch._C._current_graph_task_id() != -1
            or torch._C._get_tracing_state() is not None
        ):
            return False
        self.models.refuse_half_loaded("a forward")
        self.away.end()
        return self.manager.goes_on()

    def most_calls(self) -> int:
        """Returns for how many calls at once HBM has room, by the most that each may hold."""
        table, held = self.manager.parts.table, self.program.worst_chain
        return max(1, (table.hbm.capacity - table.fixed_nbytes()) // max(1, held))

    def _prepare_experts(self, name: Hashable, training: bool) -> Way:
        """Makes room for single experts, or for whole tensors or layers of them.

        Args:
            name: Name of forwards that do the same.
            training: Whether the forward computes gradients.

        Returns:
            How experts that are not trained are copied to HBM.
        """
        if training:
            self.experts.prepare(*self._trained())
            return Way.EACH
        way = self.experts.way.choose(name, self.names.load)
        return self.experts.prepare((), way=way)

    def _trained(self) -> tuple[set[int], int]:
        """Returns the stacks of experts that are trained, and the bytes of gradients in HBM."""
        stacks, nbytes = self.experts.stacks, 0
        whole = set()
        for group in self.groups if stacks else ():
            with torch._C.DisableTorchFunctionSubclass():  # they are not held
                trained = [entry for entry in group.entries if entry.param.requires_grad]
            if trained and group.block.id in stacks:
                whole.add(group.block.id)
            if any(entry.unit is None for entry in trained) or (trained and not group.resident):
                specs = group.block.tensors
                nbytes += align_up(sum(specs[entry.index].nbytes for entry in trained))
        return whole, nbytes

    def refuse_inside(self, what: str) -> None:
        """Refuses a call from within a forward or backward, when state is inconsistent.

        Raises:
            CheckpointError: If it is made there.
        """
        if self.here.is_in_pass():
            raise CheckpointError(
                f"{what} inside a forward or backward, where buffers and gradients are half made; "
                "call it between them"
            )

    def reset(self) -> None:
        """Ends the current passes after an exception anywhere."""
        self.backward.reset()
        self.away.reset()

    def busy(self, what: str, began_ns: int) -> None:
        """Counts host time spent in a pass."""
        ended = time.perf_counter_ns()
        self.manager.parts.counters.busy_ns += ended - began_ns
        self.away.settle_views()
        if not self.backward.under_way:  # a recomputation is a part of backward
            if self.experts.stacks:
                with self.manager.lock:
                    self.experts.way.ended(self.experts.goes, self.names.last[0])
            self.manager.end_pass()
            self.saved.let_go()
        lane = "optimizer" if what == "optimizer" else "compute"
        self.manager.parts.timeline.add(lane, what, began_ns, ended)


def entries_of(groups: Iterable[Group]) -> list[Entry]:
    """Returns the managed parameters of groups."""
    return [entry for group in groups for entry in group.entries]


def outputs_with_grad(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in a module's output through which backward may come."""
    if isinstance(value, torch.Tensor):
        return [value] if value.requires_grad else []
    if isinstance(value, list | tuple):
        return [t for item in value for t in outputs_with_grad(item)]
    if isinstance(value, dict):
        return [t for item in value.values() for t in outputs_with_grad(item)]
    return []
