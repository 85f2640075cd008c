"""One wrapped model: moved into the tiers, intercepted there, and given back."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from threading import get_ident

import torch
from torch import nn

from tiermem.config import Home, budget_size, exact_size, format_size
from tiermem.core.block import Role
from tiermem.errors import REFUSALS, CapacityError, WrapError
from tiermem.nn.compat.compiler import hide_from_compiler
from tiermem.nn.compat.outside import OUTSIDE
from tiermem.nn.groups.blocks import BlockPlan, Inventory
from tiermem.nn.groups.entry import Entry, Member
from tiermem.nn.groups.gradunit import units_of
from tiermem.nn.groups.group import Group
from tiermem.nn.groups.hostbound import rate_up
from tiermem.nn.groups.inspect import (
    Found,
    can_move,
    carried,
    find,
    is_made_in,
    is_ordinary,
    link_shared,
    may_grow,
    of_scripts,
    opened,
    owners,
    set_apart,
)
from tiermem.nn.groups.parametrized import follow_parametrizations
from tiermem.nn.groups.partition import Predicate, checked_homes
from tiermem.nn.groups.resident import Resident, is_resident
from tiermem.nn.groups.shellparam import ShellParam
from tiermem.nn.groups.swapped import follow_swaps
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.nn.tensors.profiled import follow_profiler
from tiermem.nn.tensors.shells import parts
from tiermem.nn.tensors.transformed import follow_transforms
from tiermem.nn.wrap import around
from tiermem.nn.wrap.bypass import Bypass
from tiermem.nn.wrap.intercepted import InterceptedModules
from tiermem.nn.wrap.originals import Originals, undo_wrap
from tiermem.nn.wrap.origins import Origins, read_in
from tiermem.nn.wrap.scope import Scope
from tiermem.nn.wrap.statedict import StateDicts
from tiermem.runtime.base.functorch import outside_inference
from tiermem.runtime.memory.homes import StoredBlock
from tiermem.runtime.memory.slots import has_saved, use_count


class WrappedModel:
    """A model whose parameters are in the tiers.

    Attributes:
        model: The module.
        runtime: The runtime that it shares with the manager's other modules.
        groups: Its groups of parameters, then those of large buffers.
        entries: Its parameters.
        modules: Its modules, intercepted.
        scopes: Scopes of those that have tensors in the tiers, by qualified name.
        bypass: Removes interceptors if its forwards need none.
        dicts: Creates and loads its state dicts.
        resident: The group of small buffers, which stay in HBM; None if there are none.
        name: For messages.
        given_back: Whether the model has left the tiers.
        origins: The source of values that its tensors did not have; None if they had all.
        inventory: Its tensors and modules, and how it was wrapped.
        leaving: Ids of the tensors that :mod:`tiermem.nn.wrap.giveback` has begun to make ordinary.
    """

    def __init__(
        self,
        model: nn.Module,
        runtime: ModuleRuntime,
        blocks: str | Iterable[str] | Predicate,
        number: int,
        homes: Mapping[str, Home] | None = None,
        origins: Origins | None = None,
        resident: Resident = "auto",
        *,
        training: bool | None = None,
    ) -> None:
        """Plans the blocks, checks the budgets, and only then moves the tensors in.

        Args:
            model: The model.
            runtime: The modules' runtime.
            blocks: Which modules move together; see :meth:`tiermem.TierManager.wrap`.
            number: Distinguishes the models of one manager.
            homes: Homes of modules' weights instead of the policy's, by qualified name.
            origins: Values that are not in the model's tensors; by default all are.
            resident: Which parameters stay in HBM; see :meth:`tiermem.TierManager.wrap`.
            training: Whether it will be trained; by default, whether it is in training mode.

        Raises:
            CapacityError: If a budget has no room for it; the model is not changed.
            ConfigError: If ``blocks`` or ``homes`` names no module.
            StorageError: If a file cannot be written; the model is not changed.
        """
        self.model = model
        self.runtime = runtime
        self.number = number
        self.groups: list[Group] = []
        self.entries: list[Entry] = []
        self.scopes: dict[str, Scope] = {}
        self.resident: Group | None = None
        self.origins = origins
        self.given_back = False
        self.leaving: set[int] = set()
        self._unswapped: list[weakref.ref[torch.Tensor]] = []
        self._threads = set[int]()
        self.name = type(model).__name__ if number == 0 else f"{type(model).__name__}#{number}"
        whole = find(model, "_parameters")
        params = opened(whole)
        link_shared(params)
        every = find(model, "_buffers")
        apart = set_apart(params, [f for f in every if is_ordinary(f)]) | of_scripts(model)
        buffers = [f for f in every if can_move(f) and id(f.tensor) not in apart]
        self._apart = [f.tensor for f in every if may_grow(f) or id(f.tensor) in apart]
        modules = dict(model.named_modules())
        own = checked_homes(homes, modules)
        rate = self._rate_up(params)
        inventory = Inventory(
            model, blocks, params, buffers, own, resident, rate, training=training
        )
        self.before: Originals | None = None  # its former state, until it is wrapped
        runtime.models.wrapping = self
        hide_from_compiler()
        around.follow(runtime.backward.reduced)
        follow_transforms()
        follow_profiler()
        follow_parametrizations()
        follow_swaps()
        try:
            self.runtime.program.models.append(inventory)
            plan = inventory.plan(self.runtime.manager.parts.table.hbm.capacity)
            sources = self._plan(plan)
            self._add_shells(whole)
            again = inventory.other_places
            self.modules = InterceptedModules(
                self, modules, again, plan.territory, self.groups, plan.divided
            )
            self.scopes = self.modules.scopes
            self.bypass = Bypass(self)
            large = [found for members in plan.buffers.values() for found in members]
            self.modules.find_groups([*inventory.params, *large])
            self.dicts = StateDicts(
                self.runtime.manager,
                self.modules.group_of,
                self.resident,
                self.runtime.given,
            )
            self._check_hbm(inventory)
            self._move_in(sources)
            self.inventory = inventory
            self._install()
            self.modules.look_at_new_code()  # what takes longer for the first time
            runtime.models[id(model)] = self
            runtime.models.wrapping = self.before = None
        except BaseException as error:
            if not isinstance(error, REFUSALS) and OUTSIDE not in error.__dict__:
                self.runtime.manager.cut_short()
            undo_wrap(self)
            refused: BaseException = error
            if isinstance(error, CapacityError):
                refused = runtime.program.refuse_model(error)
            if inventory in runtime.program.models:
                runtime.program.models.remove(inventory)
            if refused is not error:
                raise refused from None
            raise

    # -- planning --------------------------------------------------------

    def _rate_up(self, params: Iterable[Found]) -> float:
        """Returns the expected bytes per second of copies of the weights to HBM."""
        parts = self.runtime.manager.parts
        home = parts.settings.policy.home(Role.PARAM)
        nbytes = sum(f.tensor.numel() * f.tensor.element_size() for f in params)
        overflows = bool(parts.settings.nvme) and nbytes > parts.settings.dram
        files = home == "nvme" or (home == "auto" and (self.origins is not None or overflows))
        return rate_up(parts.pass_timer.estimates.known_before, files=files)

    def _plan(self, plan: BlockPlan) -> dict[int, list[torch.Tensor]]:
        """Reserves the blocks' homes; returns the tensors that have the bytes, by block."""
        known = plan.inventory
        wanted = []
        for root, members in plan.params.items():
            shapes = [known.shape(f) for f in members]
            wanted.append((self._block_name(root), Role.PARAM, shapes))
        for root, members in plan.buffers.items():
            shapes = [known.shape(f) for f in members]
            wanted.append((f"{self._block_name(root)}.buffers", Role.BUFFER, shapes))
        homes = plan.homes()
        members_of = [*plan.params.values(), *plan.buffers.values()]
        stored = [
            self._stored(members, own) if role is Role.PARAM else None
            for (_, role, _), members, own in zip(wanted, members_of, homes, strict=True)
        ]
        blocks = self.runtime.manager.add_blocks(wanted, home=homes, stored=stored)
        sources: dict[int, list[torch.Tensor]] = {}
        roots = [*plan.params, *plan.buffers]
        for root, block, members, in_files in zip(roots, blocks, members_of, stored, strict=True):
            group = Group(self.runtime.manager, block, writes_hidden=block.role is Role.BUFFER)
            group.resident, group.few = is_resident(root), plan.few
            self._fill_group(group, members, known.params)
            self.groups.append(group)
            if in_files is None:
                sources[block.id] = [f.tensor for f in members]
        self.resident = self._place_small(plan)
        if self.resident is not None:
            sources[self.resident.block.id] = [f.tensor for f in plan.small]
        return sources

    def _block_name(self, root: str) -> str:
        return f"{self.name}.{root.lstrip('.')}" if root else self.name

    def _place_small(self, plan: BlockPlan) -> Group | None:
        """Gives the small buffers their permanent place in HBM."""
        if not plan.small:
            return None
        shapes = [plan.inventory.shape(f) for f in plan.small]
        name = f"{self.name}.small_buffers"
        block = self.runtime.manager.add_blocks([(name, Role.BUFFER, shapes)], home="hbm")[0]
        group = Group(self.runtime.manager, block, writes_hidden=True)
        group.stays = group.pointing.alone = True
        self._fill_group(group, plan.small, [])
        return group

    def _stored(self, members: Sequence[Found], home: str | None) -> StoredBlock | None:
        """Returns where files have a block that stays there; None for an ordinary home."""
        where = home or self.runtime.manager.parts.settings.policy.home(Role.PARAM)
        if self.origins is None or where not in ("auto", "nvme"):
            return None
        return self.origins.stored([found.tensor for found in members])

    def _fill_group(self, group: Group, members: list[Found], params: Sequence[Found]) -> None:
        if group.block.role is Role.BUFFER:
            group.buffers = [Member(f.tensor, group, index) for index, f in enumerate(members)]
            return
        position = {id(found): index for index, found in enumerate(members)}
        for found in params:
            index = position.get(id(found.same_as or found), -1)
            if index >= 0 and isinstance(found.tensor, nn.Parameter | torch.Tensor):
                entry = Entry(found.tensor, found.name, group, index)  # type: ignore[arg-type]
                entry.sparse = found.sparse
                group.entries.append(entry)
                known = {id(member.tensor) for member in group.carried}
                along = [t for t in carried(found, self.model) if id(t) not in known]
                group.carried += [Member(tensor, group, index) for tensor in along]
        self.entries.extend(group.entries)

    def _add_shells(self, whole: Iterable[Found]) -> None:
        """Enters the parameters that wrap others, in the groups of the wrapped tensors.

        Raises:
            WrapError: If one has tensors in several blocks.
        """
        modules = dict(self.model.named_modules())
        entries: dict[int, Member] = {id(entry.param): entry for entry in self.entries}
        for found in whole:
            inside = [entries[id(tensor)] for _, _, tensor in parts(found.tensor)]
            if len({member.group for member in inside}) > 1:
                raise WrapError(
                    f"parameter {found.name!r} is a {type(found.tensor).__name__}, and shares "
                    "some of the tensors inside with a parameter of another block; make them one "
                    "parameter, or clone one of them before tier.wrap"
                )
            if inside:
                places = [(modules[module], name) for module, name in found.places]
                inside[0].group.shells.append(ShellParam(found.tensor, inside, places))

    def _check_hbm(self, inventory: Inventory) -> None:
        """Refuses a device budget with which the model could not run.

        In evaluation, a block that alone is too large is left in DRAM and read there; in training
        this is done with embeddings, which are also written there (:mod:`tiermem.nn.wrap.inplace`).

        Args:
            inventory: That of the model; it is told what calls hold.

        Raises:
            CapacityError: With the largest block at the worst moment, and the smallest sufficient
                budget.
        """
        fixed = self.runtime.manager.parts.table.fixed_nbytes()
        worst, chain = self.modules.worst_chain()
        while chain and not self.runtime.manager.can_hold(fixed + worst):
            largest = max(chain, key=lambda g: g.block.nbytes)
            vocabulary = self.modules.has_vocabulary(largest)
            if inventory.training:
                left = vocabulary and self.modules.annex(largest)
            else:
                left = self.modules.leave_in_place(largest)
                inventory.only_read |= left and vocabulary
                largest.wanted = fixed + worst
            if not left:
                break
            worst, chain = self.modules.worst_chain()
        inventory.worst_chain = worst
        self.modules.leave_ends()
        least = fixed + worst
        if not chain or self.runtime.manager.can_hold(least):
            return
        budget = self.runtime.manager.parts.table.hbm.capacity
        block = max(chain, key=lambda g: g.block.nbytes).block
        raise CapacityError(
            f"block {block.name!r} ({format_size(block.nbytes)}) cannot be used in tier hbm "
            f"with a budget of {budget_size(budget)}: together with what is needed at the same "
            f"time it takes {format_size(least)}",
            f"give hbm= at least {exact_size(least)}",
        )

    def _fixed(self, group: Group) -> bool:
        return self.runtime.manager.record(group.block).fixed

    # -- moving ----------------------------------------------------------

    def _move_in(self, sources: dict[int, list[torch.Tensor]]) -> None:
        """Copies every tensor to its block, then frees the tensors' own memory."""
        if self.origins is not None:
            for block in read_in(self.runtime.manager, self.origins, self.groups, sources):
                del sources[block.id]
        with torch.no_grad():
            for group in self.every_group():
                tensors = sources.pop(group.block.id, None)
                if tensors is None:
                    continue  # its home is a file that has it
                values = [self._value(tensor) for tensor in tensors]
                if self._fixed(group):
                    slot = self.runtime.manager.acquire(group.block)
                    for view, source in zip(slot.views, values, strict=True):
                        view.copy_(source)
                    self.runtime.manager.release(group.block, dirty=True)
                else:
                    self.runtime.manager.write_home(group.block, values)

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        value = None if self.origins is None else self.origins.value(tensor)
        return tensor.detach() if value is None else value

    def blocks(self) -> set[int]:
        """Returns the ids of the blocks of its parameters and buffers."""
        return {group.block.id for group in self.every_group()}

    def _install(self) -> None:
        """Points the tensors at their blocks' placeholders and intercepts the modules."""
        self.before = self.modules.originals(self.every_group())
        self.runtime.add(self.groups)
        # torch swaps no tensors with weak references (a program may have had its function before)
        self._unswapped = [weakref.ref(m.tensor) for group in self.groups for m in group.buffers]
        if self.resident is not None:
            self.resident.ready(self.runtime.away)
            self.resident.hold()
        self._begin_reading()
        for entry in self.entries:
            owners[entry.param] = id(self.runtime.manager)
        for entry in self.entries:
            old = entry.param.grad
            entry.param.grad = None
            self.runtime.backward.incoming.track(entry)
            if old is not None:
                entry.param.grad = old.to(self.runtime.manager.parts.device)
        self.modules.install()
        self.move_apart(self.runtime.manager.parts.device)
        self._stay_for_graphs()

    def _stay_for_graphs(self) -> None:
        """Keeps in HBM, if all fit, blocks of parameters that an earlier graph has saved.

        The graph sees whatever they point at.
        """
        manager = self.runtime.manager
        for group in self.groups if manager.parts.table.all_fit else ():
            if any(map(has_saved, group.pointing.tensors)):
                group.hold()
                manager.parts.slots.current[group.block.id].saved = group.pointing.tensors
                group.let_go()

    def move_apart(self, device: torch.device) -> None:
        """Moves the buffers in no block: those that may grow, share memory, or are a script's."""
        with torch.no_grad():
            for tensor in self._apart:
                if tensor.device != device:
                    tensor.data = tensor.data.to(device)

    def move_made(self, device: torch.device) -> None:
        """Moves buffers out of HBM that forwards have since put in place of others."""
        here, managed = self.runtime.manager.parts.device, self.managed()
        moved: dict[int, torch.Tensor] = {}
        with outside_inference(), torch.no_grad():
            for module in self.model.modules():
                for name, tensor in module._buffers.items():
                    if (
                        tensor is not None
                        and device != here
                        and id(tensor) not in managed
                        and is_made_in(tensor, here)
                    ):
                        if id(tensor) not in moved:
                            moved[id(tensor)] = tensor.detach().to(device)
                        module._buffers[name] = moved[id(tensor)]

    def _begin_reading(self) -> None:
        """Begins to read values from files while the host still has work to do."""
        order = [group.block.id for group in self.groups]
        if self.origins is not None and order:
            # a wrap that is interrupted and repeated has other blocks: its pass is another
            self.runtime.manager.begin_pass(("loaded", order[0]), order)

    @cached_property
    def kept(self) -> tuple[Group, ...]:
        """The groups that a pass holds as a whole; they stay in HBM."""
        return tuple(group for group in self.groups if group.resident)

    def note_thread(self) -> None:
        """Notes which threads call it, once there are several; under the manager's lock."""
        thread = get_ident()
        if thread not in self._threads and torch._C._current_graph_task_id() == -1:
            self._threads.add(thread)
            for group in self.groups:
                group.note_user()

    def managed(self) -> set[int]:
        """Returns the ids of the tensors that are in the tiers."""
        small = self.resident.tensors() if self.resident is not None else ()
        return {*self.modules.group_of, *map(id, small)}

    def uninstall(self) -> None:
        """Removes the interceptors and the blocks; every tensor is an ordinary one already."""
        self.bypass.end(for_good=True)
        self._unswapped.clear()
        for group in self.groups:
            group.freed = True
        self.runtime.backward.incoming.forget(self.entries)
        self.runtime.grads.forget(self.entries)
        for entry in self.entries:
            owners.pop(entry.param, None)
        self.modules.uninstall()
        gradients = [block for unit in units_of(self.entries) for block in unit.blocks]
        blocks = gradients + [group.block for group in self.groups]
        if self.resident is not None:
            if self.resident.holds:  # otherwise it was interrupted there
                self.resident.let_go()
            blocks.append(self.resident.block)
        self.runtime.remove(self.groups)
        for block in blocks:
            self.runtime.manager.parts.holders.pop(block.id, None)
        self.runtime.manager.remove_blocks(blocks)
        if self.inventory in self.runtime.program.models:
            self.runtime.program.models.remove(self.inventory)
        self.given_back = True

    def every_group(self) -> list[Group]:
        """Returns its groups, and that of small buffers, which stay in HBM, if there are any."""
        return [*self.groups, *([self.resident] if self.resident is not None else [])]

    def restore_sizes(self) -> None:
        """Restores tensors' sizes, after torch has failed to enlarge one in place."""
        for group in self.every_group():
            group.pointing.restore_sizes()

    def staying(self) -> set[int]:
        """Returns the ids of buffers that stay in HBM."""
        return {id(member.tensor) for member in self.resident.buffers} if self.resident else set()

    def has_views_of_buffers(self) -> bool:
        """Whether anybody has a view of a buffer that has its own storage, not a block's."""
        small = self.resident.pointing.tensors if self.resident is not None else ()
        own = (*self._apart, *small)
        storages = [t.untyped_storage() for t in own if t.layout is torch.strided]
        counts = Counter(storage._cdata for storage in storages)
        return any(use_count(key) > count + 1 for key, count in counts.items())  # and the caller


Blocks = str | Iterable[str] | Callable[[str, nn.Module], bool]
