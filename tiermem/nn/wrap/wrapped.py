"""One wrapped model: moved into the tiers, intercepted there, and given back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn

from tiermem.config import Home, format_size
from tiermem.core.block import Role
from tiermem.errors import REFUSALS, CapacityError
from tiermem.nn.compat.compiler import hide_from_compiler
from tiermem.nn.compat.outside import OUTSIDE
from tiermem.nn.compat.writes import may_write_uncounted, only_unmerges
from tiermem.nn.groups.blocks import BlockPlan, Inventory
from tiermem.nn.groups.group import Entry, Group, Member
from tiermem.nn.groups.inspect import Found, can_move, find, link_shared, owners
from tiermem.nn.groups.names import HeldDict, TieredDict
from tiermem.nn.groups.partition import CONTAINERS, Predicate, checked_homes
from tiermem.nn.groups.resident import Resident, is_resident
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.nn.tensors.transformed import follow_transforms
from tiermem.nn.wrap import around
from tiermem.nn.wrap.applied import ApplyInterceptor
from tiermem.nn.wrap.experts import ExpertsInterceptor, is_experts
from tiermem.nn.wrap.lookup import LookupInterceptor, is_lookup
from tiermem.nn.wrap.originals import Originals, undo_wrap
from tiermem.nn.wrap.origins import Origins, read_in
from tiermem.nn.wrap.scope import (
    OF_ALL,
    OF_AROUND,
    OF_SCOPES,
    CallInterceptor,
    Inside,
    Interceptor,
    Scope,
)
from tiermem.nn.wrap.statedict import hold_or_give
from tiermem.runtime.memory.homes import StoredBlock

_OF_ALL: tuple[type[Interceptor], ...] = (ApplyInterceptor, *OF_ALL)
_REPLACED = (
    "_parameters",
    "_buffers",
    "_compiled_call_impl",
    *(kind.method for kind in (*OF_SCOPES, *_OF_ALL)),
)


class WrappedModel:
    """A model whose parameters are in the tiers.

    Attributes:
        model: The module.
        runtime: What it shares with the manager's other modules.
        groups: Its groups of parameters, then those of large buffers.
        entries: Its parameters.
        scopes: Its intercepted modules, by qualified name.
        resident: The group of small buffers, which stay in HBM; None where there are none.
        name: For messages.
        given_back: Whether the model has left the tiers.
        given: While a state dict is loaded: its values by the id of each tensor.
        origins: Where values come from that its tensors did not have; None where they had all.
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
    ) -> None:
        """Plans the blocks, checks the budgets, and only then moves the tensors in.

        Args:
            model: The model.
            runtime: The modules' runtime.
            blocks: What moves as one; see :meth:`tiermem.TierManager.wrap`.
            number: Tells the models of one manager apart.
            homes: Homes of modules' weights in place of the policy's, by qualified name.
            origins: Values that are not in the model's tensors; by default all are.
            resident: Which parameters stay in HBM; see :meth:`tiermem.TierManager.wrap`.

        Raises:
            CapacityError: If a budget cannot hold it; the model is as it was.
            ConfigError: If ``blocks`` or ``homes`` names no module.
            StorageError: If a file cannot be written; the model is as it was.
        """
        self.model = model
        self.runtime = runtime
        self.manager = runtime.manager
        self.number = number
        self.groups: list[Group] = []
        self.entries: list[Entry] = []
        self.scopes: dict[str, Scope] = {}
        self.resident: Group | None = None
        self.origins = origins
        self._sources: dict[int, list[torch.Tensor]] = {}
        self.given_back = False
        self.given: dict[int, torch.Tensor] = {}
        self.leaving: set[int] = set()
        self._modules = dict(model.named_modules())
        self._states: dict[int, tuple[dict[int, torch.Tensor], set[tuple[int, str]]]] = {}
        self.name = type(model).__name__ if number == 0 else f"{type(model).__name__}#{number}"
        params = find(model, "_parameters")
        link_shared(params)
        buffers = [f for f in find(model, "_buffers") if can_move(f)]
        own = checked_homes(homes, self._modules)
        inventory = Inventory(model, blocks, params, buffers, own, resident)
        self.before: Originals | None = None  # what it was, until it is wrapped
        runtime.wrapping = self
        hide_from_compiler()
        around.follow(runtime.reduced)
        follow_transforms()
        try:
            self.runtime.program.models.append(inventory)
            plan = inventory.plan(self.manager.parts.table.hbm.capacity)
            self._territory = plan.territory
            self._plan(plan)
            self._check_hbm()
            self._move_in()
            self._inventory = inventory
            self._install()
            runtime.models[id(model)] = self
            runtime.wrapping = self.before = None
        except BaseException as error:
            if not isinstance(error, REFUSALS) and OUTSIDE not in error.__dict__:
                self.manager.cut_short()
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

    def _plan(self, plan: BlockPlan) -> None:
        """Reserves the blocks' homes."""
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
        blocks = self.manager.add_blocks(wanted, home=homes, stored=stored)
        roots = [*plan.params, *plan.buffers]
        for root, block, members, in_files in zip(roots, blocks, members_of, stored, strict=True):
            group = Group(self.manager, block, writes_hidden=block.role is Role.BUFFER)
            group.resident, group.layer = is_resident(root), plan.joined.get(root, 0)
            self._fill_group(group, members, known.params)
            self.groups.append(group)
            if in_files is None:
                self._sources[block.id] = [f.tensor for f in members]
        self.resident = self._place_small(plan)
        large = [found for members in plan.buffers.values() for found in members]
        self._find_groups(known.params, large)

    def _block_name(self, root: str) -> str:
        return f"{self.name}.{root.lstrip('.')}" if root else self.name

    def _place_small(self, plan: BlockPlan) -> Group | None:
        """Gives the small buffers their place in HBM, where they stay."""
        if not plan.small:
            return None
        shapes = [plan.inventory.shape(f) for f in plan.small]
        name = f"{self.name}.small_buffers"
        block = self.manager.add_blocks([(name, Role.BUFFER, shapes)], home="hbm")[0]
        group = Group(self.manager, block, writes_hidden=True)
        group.stays = True
        self._fill_group(group, plan.small, [])
        self._sources[block.id] = [f.tensor for f in plan.small]
        return group

    def _stored(self, members: Sequence[Found], home: str | None) -> StoredBlock | None:
        """Returns where files have a block that is to stay there; None for an ordinary home."""
        where = home or self.manager.parts.settings.policy.home(Role.PARAM)
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
                group.entries.append(Entry(found.tensor, found.name, group, index))  # type: ignore[arg-type]
        self.entries.extend(group.entries)

    def _find_groups(self, params: Sequence[Found], large: Sequence[Found]) -> None:
        """Decides which groups each module's call holds."""
        group_of: dict[int, Group] = {}
        for group in self.groups:
            for tensor in group.tensors():
                group_of[id(tensor)] = group
        self._group_of = group_of
        needed: dict[str, dict[int, Group]] = {}
        own: set[str] = set()
        called: set[str] = set()
        numbered = self.runtime.activations.store is not None  # by the calls of layers
        for found in [*params, *large]:
            group = group_of[id(found.tensor)]
            for module_name, _ in found.places:
                own.add(module_name)
                root = self._territory[module_name]
                if not group.resident:  # else the pass holds it
                    needed.setdefault(root, {})[id(group)] = group
                    called.add(module_name)
                elif numbered:
                    needed.setdefault(root, {})
        insides: dict[str, Inside] = {}
        for name in self._modules:
            root = self._territory[name]
            groups = list(needed.get(root, {}).values())
            if root not in insides:
                insides[root] = Inside(groups)
            inside = insides[root]
            begins = root == name and (name in needed or not name)
            if begins or name in own or not name:
                is_called = begins or name in called
                self.scopes[name] = Scope(
                    name, self.number, groups, self, inside, begins=begins, called=is_called
                )
        self._around = self._scopes_around()
        for name, module in self._modules.items():
            if may_write_uncounted(module):
                only = only_unmerges(module)
                for group in needed.get(self._territory[name], {}).values():
                    group.suspect_writes(module if only else None)

    def _scopes_around(self) -> dict[str, Scope]:
        """Returns scopes of the modules that have no tensors themselves, and blocks inside."""
        around: dict[str, Scope] = {}
        for name in [name for name, scope in self.scopes.items() if scope.begins]:
            while (name := name.rpartition(".")[0]) and name not in around:
                module = self._modules[name]
                if name not in self.scopes and not isinstance(module, CONTAINERS):
                    around[name] = Scope(
                        name, self.number, (), self, Inside(), begins=False, around=True
                    )
        return around

    def _check_hbm(self) -> None:
        """Refuses a device budget in which the model could not run.

        Raises:
            CapacityError: Naming the largest block of the worst moment, and the least budget.
        """
        fixed = self.manager.parts.table.fixed_nbytes()
        worst, chain = self._worst_chain()
        self.runtime.program.worst_chain = max(self.runtime.program.worst_chain, worst)
        least = fixed + worst
        if not chain or self.manager.can_hold(least):
            return
        budget = self.manager.parts.table.hbm.capacity
        largest = max(chain, key=lambda g: g.block.nbytes).block
        raise CapacityError(
            f"block {largest.name!r} ({format_size(largest.nbytes)}) cannot be used in tier hbm "
            f"with a budget of {format_size(budget)}: together with what is needed at the same "
            f"time it takes {format_size(least)}",
            f"give hbm= at least {least}",
        )

    def _worst_chain(self) -> tuple[int, list[Group]]:
        """Returns the most bytes that nested calls hold at once, and by which groups."""
        best: tuple[int, list[Group]] = (0, [])
        for name in self.scopes:
            chain: dict[int, Group] = {}
            for outer, scope in self.scopes.items():
                if outer in ("", name) or name.startswith(f"{outer}."):
                    chain.update({id(g): g for g in scope.groups if not self._fixed(g)})
            total = sum(g.block.nbytes for g in chain.values())
            if total > best[0]:
                best = (total, list(chain.values()))
        return best

    def _fixed(self, group: Group) -> bool:
        return self.manager.record(group.block).fixed

    # -- moving ----------------------------------------------------------

    def _move_in(self) -> None:
        """Copies every tensor to its block, then frees the tensors' own memory."""
        if self.origins is not None:
            for block in read_in(self.manager, self.origins, self.groups, self._sources):
                del self._sources[block.id]
        with torch.no_grad():
            for group in [*self.groups, *([self.resident] if self.resident else [])]:
                tensors = self._sources.get(group.block.id)
                if tensors is None:
                    continue  # its home is a file that has it
                sources = [self._value(tensor) for tensor in tensors]
                if self._fixed(group):
                    slot = self.manager.acquire(group.block)
                    for view, source in zip(slot.views, sources, strict=True):
                        view.copy_(source)
                    self.manager.release(group.block, dirty=True)
                else:
                    self.manager.write_home(group.block, sources)
        self._sources.clear()

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        value = None if self.origins is None else self.origins.value(tensor)
        return tensor.detach() if value is None else value

    def blocks(self) -> set[int]:
        """Returns the ids of the blocks of its parameters and buffers."""
        resident = [self.resident] if self.resident is not None else []
        return {group.block.id for group in (*self.groups, *resident)}

    def _install(self) -> None:
        """Points the tensors at their blocks' placeholders and intercepts the modules."""
        groups = [*self.groups, *([self.resident] if self.resident is not None else [])]
        self.before = Originals(groups, self._modules.values(), _REPLACED)
        self.runtime.add(self.groups)
        if self.resident is not None:
            self.resident.ready(self.runtime)
            self.resident.hold()
        for entry in self.entries:
            owners[entry.param] = id(self.manager)
        for entry in self.entries:
            old = entry.param.grad
            entry.param.grad = None
            self.runtime.grads.track(entry)
            if old is not None:
                entry.param.grad = old.to(self.manager.parts.device)
        for name, scope in self.scopes.items():
            module = self._modules[name]
            for kind in OF_SCOPES:
                if kind is CallInterceptor and not scope.called:
                    continue
                if kind is CallInterceptor and is_lookup(module, scope):
                    kind = LookupInterceptor
                elif kind is CallInterceptor and is_experts(module, scope):
                    kind = ExpertsInterceptor
                module.__dict__[kind.method] = kind(module, scope)
            self._intercept_names(module)
        for name, scope in self._around.items():
            module = self._modules[name]
            for kind in OF_AROUND:
                module.__dict__[kind.method] = kind(module, scope)
        for name in self.scopes:
            call = self._modules[name].__dict__.get(CallInterceptor.method)
            if call is not None and call.compiled is not None:
                self.leave_to_compiler(name)
        root = self.scopes[""]
        for module in self._modules.values():
            for whole in _OF_ALL:
                module.__dict__[whole.method] = whole(module, root)

    def beside(self, name: str) -> list[nn.Module]:
        """Returns the other modules that a module's parent has."""
        parent = self._modules.get(name.rpartition(".")[0])
        own = self._modules.get(name)
        return [] if parent is None else [c for c in parent.children() if c is not own]

    def entry_of(self, param: torch.Tensor) -> Entry | None:
        """Returns the entry of a managed parameter; None where it is none of this model."""
        group = self._group_of.get(id(param))
        entries = [] if group is None else group.entries
        return next((entry for entry in entries if entry.param is param), None)

    @cached_property
    def kept(self) -> tuple[Group, ...]:
        """The groups that a pass holds as a whole; they stay in HBM."""
        return tuple(group for group in self.groups if group.resident)

    def managed(self) -> set[int]:
        """Returns the ids of the tensors that live in the tiers."""
        small = self.resident.tensors() if self.resident is not None else ()
        return {*self._group_of, *map(id, small)}

    def leave_to_compiler(self, name: str) -> None:
        """Takes interceptors out that a compiler cannot trace, inside a module that is compiled.

        Its own call, which stays intercepted, holds all that the modules of its block need.
        """
        prefix = f"{name}." if name else ""
        for inner, module in self._modules.items():
            below = inner.startswith(prefix) and self._territory[inner] == self._territory[name]
            if inner != name and not below:
                continue
            self._plain_names(module)
            if inner != name:
                call = module.__dict__.pop(CallInterceptor.method, None)
                if call is not None:
                    call.give_back()

    @staticmethod
    def _plain_names(module: nn.Module) -> None:
        for which in ("_parameters", "_buffers"):
            if isinstance(module.__dict__[which], HeldDict):
                module.__dict__[which] = dict(module.__dict__[which].items())

    def _intercept_names(self, module: nn.Module) -> None:
        for which in ("_parameters", "_buffers"):
            plain = module.__dict__[which]
            managed = {
                name: self._group_of[id(tensor)]
                for name, tensor in plain.items()
                if tensor is not None and id(tensor) in self._group_of
            }
            if managed:
                names = module.__dict__[which] = TieredDict(plain, managed, self.runtime)
                first, *others = {id(group): group for group in managed.values()}.values()
                if not others:
                    first.add_names(names)

    def uninstall(self) -> None:
        """Takes the interceptors out, and the blocks; every tensor is an ordinary one already."""
        for group in self.groups:
            group.freed = True
        self.runtime.grads.forget(self.entries)
        for entry in self.entries:
            owners.pop(entry.param, None)
        for name in (*self.scopes, *self._around):
            module = self._modules[name]
            call = module.__dict__.get(CallInterceptor.method)
            if isinstance(call, CallInterceptor):
                call.give_back()
            for kind in OF_SCOPES:
                if isinstance(module.__dict__.get(kind.method), Interceptor):
                    del module.__dict__[kind.method]  # what other code put there stays
            self._plain_names(module)
        for module in self._modules.values():
            for whole in _OF_ALL:
                module.__dict__.pop(whole.method, None)
        units = {id(e.unit): e.unit for e in self.entries if e.unit is not None}
        blocks = [u.block for u in units.values()] + [g.block for g in self.groups]
        if self.resident is not None:
            if self.resident.holds:  # else this was cut short there
                self.resident.let_go()
            blocks.append(self.resident.block)
        self.runtime.remove(self.groups)
        for block in blocks:
            self.manager.parts.holders.pop(block.id, None)
        self.manager.remove_blocks(blocks)
        if self._inventory in self.runtime.program.models:
            self.runtime.program.models.remove(self._inventory)
        self.given_back = True

    # -- state dicts -----------------------------------------------------

    def export(self, module: nn.Module, destination: Any, prefix: str) -> None:
        """Replaces a module's own entries of a state dict by copies in host memory."""
        cache = self._state_of(destination, (id(module), prefix))
        for which in ("_parameters", "_buffers"):
            for name, tensor in module.__dict__[which].items():
                key = prefix + name
                if tensor is None or key not in destination:
                    continue
                group = self._group_of.get(id(tensor))
                if group is not None:
                    destination[key] = self._copy_of(tensor, group, cache)
                elif self.resident is not None and which == "_buffers":
                    destination[key] = tensor.detach().clone()

    def _state_of(self, destination: Any, part: tuple[int, str]) -> dict[int, torch.Tensor]:
        """Returns the copies made for one state dict, so that tied tensors stay tied in it.

        A part that comes once more, or the whole model, is of another call: it gets new copies.
        """
        key = id(destination)
        if key not in self._states:
            try:
                weakref.finalize(destination, self._states.pop, key, None)
            except TypeError:
                return {}
            self._states[key] = ({}, set())
        copies, parts = self._states[key]
        if part in parts or part[0] == id(self.model):
            copies.clear()
            parts.clear()
        parts.add(part)
        return copies

    def _copy_of(
        self, tensor: torch.Tensor, group: Group, cache: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        if id(tensor) not in cache:
            tensors = self.manager.read(group.block)
            for entry in group.entries:
                source = entry.param.detach() if entry.materialized else tensors[entry.index]
                cache[id(entry.param)] = source.clone()
            for member in group.buffers:
                cache[id(member.tensor)] = tensors[member.index].clone()
        return cache[id(tensor)]

    def staying(self) -> set[int]:
        """Returns the ids of buffers that stay in HBM."""
        return {id(member.tensor) for member in self.resident.buffers} if self.resident else set()

    @contextmanager
    def holding(self, module: nn.Module) -> Iterator[None]:
        """Holds the blocks of a module's own tensors."""
        groups: dict[int, Group] = {}
        for which in ("_parameters", "_buffers"):
            for tensor in module.__dict__[which].values():
                group = self._group_of.get(id(tensor))
                if group is not None:
                    groups[id(group)] = group
        held = []
        self.manager.gate.guard()
        try:
            for group in groups.values():
                hold_or_give(group, self.given)
                held.append(group)
            yield
        finally:
            for group in reversed(held):
                group.let_go()


Blocks = str | Iterable[str] | Callable[[str, nn.Module], bool]
