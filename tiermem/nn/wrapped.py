"""One wrapped model: how it is taken into the tiers, served there, and given back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tiermem.config import Home, format_size
from tiermem.core.block import Role
from tiermem.errors import CapacityError
from tiermem.nn import around
from tiermem.nn.compiler import hide_from_compiler
from tiermem.nn.group import Entry, Group, Member
from tiermem.nn.inspect import Found, find, is_uninitialized, link_shared, owners
from tiermem.nn.lazy import is_gone, ordinary
from tiermem.nn.lookup import LookupInterceptor, is_lookup
from tiermem.nn.names import HeldDict, TieredDict
from tiermem.nn.partition import (
    Predicate,
    checked_homes,
    home_of,
    largest_block,
    territories,
    training_bytes,
)
from tiermem.nn.runtime import ModuleRuntime
from tiermem.nn.scope import (
    OF_ALL,
    OF_SCOPES,
    CallInterceptor,
    Inside,
    Scope,
)
from tiermem.nn.shapes import shape_of
from tiermem.nn.transformed import follow_transforms
from tiermem.nn.writes import may_write_uncounted

_LARGE_BUFFER = 1 << 18


class WrappedModel:
    """A model whose parameters are in the tiers.

    Attributes:
        model: The module.
        runtime: What it shares with the manager's other modules.
        groups: Its groups of parameters, then those of large buffers.
        entries: Its parameters.
        scopes: Its intercepted modules, by qualified name.
    """

    def __init__(
        self,
        model: nn.Module,
        runtime: ModuleRuntime,
        blocks: str | Iterable[str] | Predicate,
        number: int,
        homes: Mapping[str, Home] | None = None,
    ) -> None:
        """Plans the blocks, checks the budgets, and only then moves the tensors in.

        Args:
            model: The model.
            runtime: The modules' runtime.
            blocks: What moves as one; see :meth:`tiermem.TierManager.wrap`.
            number: Tells the models of one manager apart.
            homes: Homes of modules' weights in place of the policy's, by qualified name.

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
        self._modules = dict(model.named_modules())
        self._states: dict[int, tuple[dict[int, torch.Tensor], set[tuple[int, str]]]] = {}
        self._name = type(model).__name__ if number == 0 else f"{type(model).__name__}#{number}"
        params = find(model, "_parameters")
        link_shared(params)
        buffers = [f for f in find(model, "_buffers") if self._can_move(f)]
        largest = largest_block(training_bytes(model), self.manager.table.hbm.capacity)
        self._homes = checked_homes(homes, self._modules)
        roots = territories(model, blocks, largest)
        roots.update((name, self._modules[name]) for name in self._homes)
        self._territory = self._territories_of(roots)
        self._plan(params, buffers)
        hide_from_compiler()
        around.follow(runtime.reduced)
        follow_transforms()
        try:
            self._check_hbm()
            self._move_in()
        except BaseException:
            self._abandon()
            raise
        self._install()

    # -- planning --------------------------------------------------------

    def _can_move(self, found: Found) -> bool:
        tensor = found.tensor
        return (
            not is_uninitialized(tensor)
            and tensor.layout is torch.strided
            and type(tensor) in (torch.Tensor, nn.Buffer)
            and not tensor.requires_grad
            and not tensor.is_inference()
        )

    def _territories_of(self, roots: Mapping[str, nn.Module]) -> dict[str, str]:
        """Returns, for every module, the name of the module at which its block begins."""
        found = {}
        for name in self._modules:
            root = name
            while root and root not in roots:
                root = root.rpartition(".")[0]
            found[name] = root
        return found

    def _plan(self, params: list[Found], buffers: list[Found]) -> None:
        """Decides the blocks and reserves their homes."""
        by_root: dict[str, list[Found]] = {}
        for found in params:
            if found.same_as is None:
                by_root.setdefault(self._territory[found.places[0][0]], []).append(found)
        large, small = self._sort_buffers(buffers)
        buffers_by_root: dict[str, list[Found]] = {}
        for found in large:
            buffers_by_root.setdefault(self._territory[found.places[0][0]], []).append(found)
        wanted = []
        for root, members in by_root.items():
            shapes = [shape_of(f.name, f.tensor) for f in members]
            wanted.append((self._block_name(root), Role.PARAM, shapes))
        for root, members in buffers_by_root.items():
            shapes = [shape_of(f.name, f.tensor) for f in members]
            wanted.append((f"{self._block_name(root)}.buffers", Role.BUFFER, shapes))
        own = [home_of(root, self._homes) for root in (*by_root, *buffers_by_root)]
        blocks = self.manager.add_blocks(wanted, home=own)
        self._sources: dict[int, list[torch.Tensor]] = {}
        members_of = list(by_root.values()) + list(buffers_by_root.values())
        for block, members in zip(blocks, members_of, strict=True):
            group = Group(self.manager, block, writes_hidden=block.role is Role.BUFFER)
            self._fill_group(group, members, params)
            self.groups.append(group)
            self._sources[block.id] = [f.tensor.detach() for f in members]
        self._resident = self._place_small(small)
        self._find_groups(params, large)

    def _block_name(self, root: str) -> str:
        return f"{self._name}.{root}" if root else self._name

    def _sort_buffers(self, buffers: list[Found]) -> tuple[list[Found], list[Found]]:
        """Divides buffers into those that travel and those that stay in HBM."""
        allowed = self.manager.table.hbm.capacity // 16
        ordered = sorted(buffers, key=lambda f: f.tensor.numel() * f.tensor.element_size())
        small, total = [], 0
        for found in ordered:
            nbytes = found.tensor.numel() * found.tensor.element_size()
            total += nbytes
            if nbytes > _LARGE_BUFFER or total > allowed:
                break
            small.append(found)
        stay = {id(f) for f in small}
        return [f for f in buffers if id(f) not in stay], [f for f in buffers if id(f) in stay]

    def _place_small(self, small: list[Found]) -> Group | None:
        """Gives the small buffers their place in HBM, where they stay."""
        if not small:
            return None
        shapes = [shape_of(f.name, f.tensor) for f in small]
        name = f"{self._name}.small_buffers"
        block = self.manager.add_blocks([(name, Role.BUFFER, shapes)], home="hbm")[0]
        group = Group(self.manager, block, writes_hidden=True)
        self._fill_group(group, small, [])
        self._sources[block.id] = [f.tensor.detach() for f in small]
        return group

    def _fill_group(self, group: Group, members: list[Found], params: list[Found]) -> None:
        if group.block.role is Role.BUFFER:
            group.buffers = [Member(f.tensor, group, index) for index, f in enumerate(members)]
            return
        position = {id(found): index for index, found in enumerate(members)}
        for found in params:
            index = position.get(id(found.same_as or found), -1)
            if index >= 0 and isinstance(found.tensor, nn.Parameter | torch.Tensor):
                group.entries.append(Entry(found.tensor, found.name, group, index))  # type: ignore[arg-type]
        self.entries.extend(group.entries)

    def _find_groups(self, params: list[Found], large: list[Found]) -> None:
        """Decides which groups each module's call holds."""
        group_of: dict[int, Group] = {}
        for group in self.groups:
            for tensor in group.tensors():
                group_of[id(tensor)] = group
        self._group_of = group_of
        needed: dict[str, dict[int, Group]] = {}
        own: set[str] = set()
        for found in [*params, *large]:
            group = group_of[id(found.tensor)]
            for module_name, _ in found.places:
                needed.setdefault(self._territory[module_name], {})[id(group)] = group
                own.add(module_name)
        insides: dict[str, Inside] = {}
        for name in self._modules:
            root = self._territory[name]
            groups = list(needed.get(root, {}).values())
            if root not in insides:
                insides[root] = Inside(groups)
            inside = insides[root]
            begins = root == name and (name in needed or not name)
            if begins or name in own or not name:
                self.scopes[name] = Scope(name, self.number, groups, self, inside, begins=begins)
        for name, module in self._modules.items():
            if may_write_uncounted(module):
                for group in needed.get(self._territory[name], {}).values():
                    group.suspect = True

    def _check_hbm(self) -> None:
        """Refuses a device budget in which the model could not run.

        Raises:
            CapacityError: Naming the largest block of the worst moment, and the least budget.
        """
        fixed = self.manager.table.fixed_nbytes()
        worst, chain = self._worst_chain()
        self.runtime.worst_chain = max(self.runtime.worst_chain, worst)
        trainable = any(e.param.requires_grad for e in self.entries)
        unit = max((self._largest_gradient(g) for g in self.groups), default=0) if trainable else 0
        least = fixed + worst + unit
        budget = self.manager.table.hbm.capacity
        if least <= budget or not chain:
            return
        largest = max(chain, key=lambda g: g.block.nbytes).block
        raise CapacityError(
            f"block {largest.name!r} ({format_size(largest.nbytes)}) cannot be used in tier hbm "
            f"with a budget of {format_size(budget)}: together with what is needed at the same "
            f"time it takes {format_size(least)}; give hbm= at least {least}"
        )

    def _largest_gradient(self, group: Group) -> int:
        sizes = [e.param.numel() * e.param.element_size() for e in group.entries]
        return -(-max(sizes, default=0) // 4096) * 4096

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
        """Copies every tensor to its block, then lets go of the tensors' own memory."""
        with torch.no_grad():
            for group in [*self.groups, *([self._resident] if self._resident else [])]:
                sources = self._sources[group.block.id]
                if self._fixed(group):
                    slot = self.manager.acquire(group.block)
                    for view, source in zip(slot.views, sources, strict=True):
                        view.copy_(source)
                    self.manager.release(group.block, dirty=True)
                else:
                    self.manager.write_home(group.block, sources)
        self._sources.clear()

    def _abandon(self) -> None:
        """Undoes a wrap that failed; the model's own tensors were not touched."""
        groups = [*self.groups, *([self._resident] if getattr(self, "_resident", None) else [])]
        for group in groups:
            if group is not None:
                self.manager.holders.pop(group.block.id, None)
        self.manager.remove_blocks([g.block for g in groups if g is not None])

    def _install(self) -> None:
        """Points the tensors at their blocks' placeholders and intercepts the modules."""
        self.runtime.add(self.groups)
        if self._resident is not None:
            self._resident.ready(self.runtime)
            self._resident.hold()
        for entry in self.entries:
            owners[entry.param] = id(self.manager)
        for entry in self.entries:
            old = entry.param.grad
            entry.param.grad = None
            self.runtime.grads.track(entry)
            if old is not None:
                entry.param.grad = old.to(self.manager.device)
        for name, scope in self.scopes.items():
            module = self._modules[name]
            for kind in OF_SCOPES:
                if kind is CallInterceptor and is_lookup(module, scope):
                    kind = LookupInterceptor
                module.__dict__[kind.method] = kind(module, scope)
            self._intercept_names(module)
        for name in self.scopes:
            call = self._modules[name].__dict__.get(CallInterceptor.method)
            if call is not None and call.compiled is not None:
                self.leave_to_compiler(name)
        root = self.scopes[""]
        for module in self._modules.values():
            for whole in OF_ALL:
                module.__dict__[whole.method] = whole(module, root)

    def leave_to_compiler(self, name: str) -> None:
        """Takes out what a compiler cannot see through, inside a module that is compiled.

        Its own call, which stays intercepted, holds all that the modules of its block need.
        """
        prefix = f"{name}." if name else ""
        self._restore_calls()
        for inner, module in self._modules.items():
            below = inner.startswith(prefix) and self._territory[inner] == self._territory[name]
            if inner != name and not below:
                continue
            self._plain_names(module)
            if inner != name:
                call = module.__dict__.pop(CallInterceptor.method, None)
                if call is not None:
                    call.give_back()

    def _restore_calls(self) -> None:
        """Puts every call back that is out of the way."""
        for scope in self.scopes.values():
            scope.inside.restore()

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

    def give_back(self, device: torch.device | None) -> None:
        """Makes the model an ordinary one again.

        Args:
            device: Where its tensors go; None for host memory.
        """
        with self.manager.lock:
            for scope in self.scopes.values():
                scope.inside.empty()
        self.runtime.reduced.let_go(self.groups)
        for group in self.groups:
            group.unpoint()
        for entry in self.entries:
            if not entry.materialized:
                self.runtime.grads.sync(entry)
        values = {g.block.id: self.manager.read(g.block) for g in self.groups}
        gradients = {id(e): self.runtime.grads.load(e) for e in self.entries if e.has_grad}
        target = device or torch.device("cpu")
        for group in self.groups:
            tensors = values.pop(group.block.id)
            shared: dict[int, torch.Tensor] = {}
            for entry in group.entries:
                if entry.index not in shared:
                    shared[entry.index] = tensors[entry.index].clone().to(target)
                if not entry.materialized:
                    self._free_entry(entry, shared[entry.index], gradients.get(id(entry)))
                owners.pop(entry.param, None)
            for member in group.buffers:
                group.free(member, tensors[member.index].clone().to(target))
        if self._resident is not None:
            for member in self._resident.buffers:
                self._resident.free(member, member.tensor.detach().clone().to(target))
        self._uninstall()

    def _free_entry(self, entry: Entry, value: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Makes a parameter an ordinary one."""
        own = entry.param.grad
        if entry.has_grad or is_gone(own):
            own = None
        if entry.has_grad:
            self.runtime.grads.clear(entry)
            own = gradient
        entry.param.grad = None
        entry.group.free(entry, value)
        if own is not None:
            entry.param.grad = ordinary(own, entry.param, value.device)

    def _uninstall(self) -> None:
        for group in self.groups:
            group.freed = True
        self.runtime.grads.forget(self.entries)
        self._restore_calls()
        for name in self.scopes:
            module = self._modules[name]
            call = module.__dict__.get(CallInterceptor.method)
            if call is not None:
                call.give_back()
            for kind in OF_SCOPES:
                module.__dict__.pop(kind.method, None)
            self._plain_names(module)
        for module in self._modules.values():
            for whole in OF_ALL:
                module.__dict__.pop(whole.method, None)
        units = {id(e.unit): e.unit for e in self.entries if e.unit is not None}
        blocks = [u.block for u in units.values()] + [g.block for g in self.groups]
        if self._resident is not None:
            self._resident.let_go()
            blocks.append(self._resident.block)
        self.runtime.remove(self.groups)
        for block in blocks:
            self.manager.holders.pop(block.id, None)
        self.manager.remove_blocks(blocks)

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
                elif self._resident is not None and which == "_buffers":
                    destination[key] = tensor.detach().clone()

    def _state_of(self, destination: Any, part: tuple[int, str]) -> dict[int, torch.Tensor]:
        """Returns the copies made for one state dict, so that tied tensors stay tied in it.

        A part that comes once more, or the whole model, is of another call, with values of now.
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

    def copy_small(self, module: nn.Module, memo: dict[int, Any]) -> None:
        """Enters copies of a module's buffers that stay in HBM into a deepcopy's memo."""
        stay = {id(member.tensor) for member in self._resident.buffers} if self._resident else ()
        for tensor in module._buffers.values():
            if id(tensor) in stay and id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().to("cpu", copy=True)  # type: ignore[union-attr]

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
        self.manager.guard()
        try:
            for group in groups.values():
                group.hold()
                held.append(group)
            yield
        finally:
            for group in reversed(held):
                group.let_go()


Blocks = str | Iterable[str] | Callable[[str, nn.Module], bool]
