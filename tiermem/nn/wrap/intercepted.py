"""Which modules of a wrapped model are intercepted, and what the calls of each hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, repeat
from operator import contains
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as of_all

from tiermem.core.block import Role, align_up
from tiermem.nn.compat.callees import Places
from tiermem.nn.compat.writes import hook_may, may_write_uncounted, only_unmerges
from tiermem.nn.groups.blocks import AT_ONCE
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.group import Group
from tiermem.nn.groups.inspect import Found
from tiermem.nn.groups.names import HeldDict, TieredDict
from tiermem.nn.groups.partition import CONTAINERS, MOST_PLACES, PARAMETERS, names_above, places
from tiermem.nn.wrap.applied import ApplyInterceptor
from tiermem.nn.wrap.copies import (
    CopyInterceptor,
    ReduceInterceptor,
    ReplicaInterceptor,
    ScriptInterceptor,
    StateInterceptor,
)
from tiermem.nn.wrap.experts import ExpertsInterceptor, is_experts
from tiermem.nn.wrap.hooked import HookInterceptor, PreHookInterceptor
from tiermem.nn.wrap.inplace import (
    InPlaceInterceptor,
    can_be_read_in_place,
    has_params_of,
    has_vocabulary,
)
from tiermem.nn.wrap.lookup import LookupInterceptor, few_tokens, is_lookup
from tiermem.nn.wrap.originals import Originals
from tiermem.nn.wrap.scope import (
    AroundInterceptor,
    CallInterceptor,
    CompileInterceptor,
    Inside,
    Interceptor,
    Scope,
)
from tiermem.nn.wrap.statedict import LoadAllInterceptor, LoadInterceptor, SaveInterceptor

if TYPE_CHECKING:
    from tiermem.nn.wrap.wrapped import WrappedModel

_OF_SCOPES: tuple[type[Interceptor], ...] = (
    CallInterceptor,
    CompileInterceptor,
    LoadInterceptor,
)
"""Interceptors in modules whose calls are intercepted."""
_OF_ALL: tuple[type[Interceptor], ...] = (
    ApplyInterceptor,
    HookInterceptor,
    PreHookInterceptor,
    SaveInterceptor,
    LoadAllInterceptor,
    CopyInterceptor,
    StateInterceptor,
    ReduceInterceptor,
    ReplicaInterceptor,
    ScriptInterceptor,
)
"""Interceptors in every module of a wrapped model."""
_OF_AROUND: tuple[type[Interceptor], ...] = (AroundInterceptor, CompileInterceptor)
"""What stands in modules that have no tensors themselves, and blocks inside."""
_HOOKS_OF_ALL = (of_all._global_forward_pre_hooks, of_all._global_forward_hooks)
_TENSORS = ("_parameters", "_buffers")
_REPLACED = (
    *_TENSORS,
    "_compiled_call_impl",
    *(kind.method for kind in (*_OF_SCOPES, *_OF_ALL)),
)


class InterceptedModules:
    """Decides which groups each module's call holds, and installs and removes interceptors.

    Attributes:
        scopes: Scopes of the modules that have tensors in the tiers, by qualified name.
        group_of: The group of each tensor, by the tensor's id.
        uncounted: Whether code of some module may write weights, its own or those of others, in a
            way that torch does not count.
    """

    def __init__(
        self,
        wrapped: WrappedModel,
        modules: Mapping[str, nn.Module],
        again: Sequence[Sequence[str]],
        territory: Mapping[str, str],
        groups: Iterable[Group],
        divided: Collection[str] = (),
    ) -> None:
        """Intercepts nothing yet.

        Args:
            wrapped: The model.
            modules: Its modules, by qualified name.
            again: Their other places: the names around each such place, its own last.
            territory: The root of the block of each module's tensors, by name.
            groups: Its groups, except the resident one.
            divided: Modules whose calls do not hold their own tensors.
        """
        self._wrapped = wrapped
        self._modules = modules
        self._again = again
        self._territory = territory
        self._divided = divided
        self.scopes: dict[str, Scope] = {}
        self._around: dict[str, Scope] = {}
        self._looked_up: dict[str, list[Group]] = {}  # by the name of a list of parameters
        self.group_of: dict[int, Group] = {}
        self.uncounted = False  # whether torch does not count all that their code may write
        self._looked_at: set[int] = set()
        self._listed = list(modules.values())
        self._names = [vars(module) for module in self._listed]
        self._forwards = {i: names.get("forward") for i, names in enumerate(self._names)}
        self._kinds: list[type] = [*map(type, self._listed)]
        self._sizes = [-1] * len(self._listed)  # numbers of their own attributes
        self._writing: set[int] = set()  # the modules whose code may write
        self._places = Places()  # the places of the inspected code
        for group in groups:
            for tensor in group.tensors():
                self.group_of[id(tensor)] = group
            for shell in group.shells:
                self.group_of[id(shell.param)] = group

    # -- who holds what --------------------------------------------------

    def find_groups(self, found: Sequence[Found]) -> None:
        """Decides which groups each module's call holds.

        Args:
            found: The parameters and the large buffers.
        """
        needed, called = self._needed(found)
        own = {module_name for tensor in found for module_name, _ in tensor.places}
        insides: dict[str, Inside] = {}
        for name in self._modules:
            root = self._territory[name]
            groups = list(needed.get(root, {}).values())
            if isinstance(self._modules[root], PARAMETERS):
                # nobody calls it: each is fetched when it is looked up
                self._looked_up[root], groups = groups, []
            if root not in insides:
                insides[root] = Inside(groups)
            begins = root == name and (name in needed or not name)
            if begins or name in own or not name:
                self.scopes[name] = Scope(
                    name,
                    self._wrapped.number,
                    groups,
                    self._wrapped,
                    insides[root],
                    begins=begins,
                    called=begins or name in called,
                )
        self._find_around()
        for name, module in self._modules.items():
            if may_write_uncounted(module, places=self._places):
                self._writing.add(id(module))
                only = only_unmerges(module)
                if not only:
                    self._note_uncounted()
                for group in needed.get(self._territory[name], {}).values():
                    group.writes.suspect_code(module if only else None)

    def hooked(self, module: nn.Module, hook: Any) -> None:
        """Inspects a forward hook that a module gets while it is wrapped."""
        if hook_may(module, hook, places=self._places):
            self._suspect_now(module, None)

    def look_at_new_code(self) -> None:
        """Inspects, when a pass begins, code that was added since the last one.

        That includes forward hooks of all modules, functions that replace a module's forward, other
        functions that an instance now has, another class, and new values of names in code that was
        inspected: methods of classes and of instances, functions of files.
        """
        kinds, sizes = [*map(type, self._listed)], [*map(len, self._names)]  # these are quick, too
        replaced = self._places.changed()
        if kinds != self._kinds or sizes != self._sizes or replaced:
            self._look_at_instances(kinds, sizes, replaced=replaced)
        there = any(map(contains, self._names, repeat("forward")))  # in every pass: this is quick
        for number, names in enumerate(self._names if there else ()):
            if "forward" in names and self._forwards.get(number) is not names["forward"]:
                module, forward = self._listed[number], names["forward"]
                self._forwards[number] = forward
                if hook_may(module, forward, places=self._places):
                    self._suspect_now(module, None)
        for hooks in _HOOKS_OF_ALL:
            for key in [key for key in hooks if key not in self._looked_at] if hooks else ():
                self._looked_at.add(key)
                if hook_may(self._wrapped.model, hooks[key], places=self._places):
                    for name in self.scopes:
                        self._suspect_now(self._modules[name], None)

    def _look_at_instances(self, kinds: list[type], sizes: list[int], *, replaced: bool) -> None:
        """Inspects modules whose class or number of attributes has changed.

        Args:
            kinds: The classes of all modules, now.
            sizes: The number of attributes of each.
            replaced: Whether a name in their code has a new value: then all are inspected.
        """
        if replaced:  # what was noted is noted again, or is no longer valid
            self._places = Places()
            self._looked_at.clear()
        former = zip(self._kinds, self._sizes, strict=True)
        for module, before, now in zip(
            self._listed, [*former], [*zip(kinds, sizes, strict=True)], strict=True
        ):
            if (before == now and not replaced) or (
                before[0] is now[0] and id(module) in self._writing
            ):
                continue
            if may_write_uncounted(module, places=self._places):
                self._writing.add(id(module))
                self._suspect_now(module, module if only_unmerges(module) else None)
        self._kinds, self._sizes = kinds, sizes

    def joined(self, parent: nn.Module, child: nn.Module) -> None:
        """Inspects a module that becomes another's child while that is wrapped."""
        for module in child.modules():
            if may_write_uncounted(module):
                self._suspect_now(parent, module if only_unmerges(module) else None)

    def _suspect_now(self, module: nn.Module, unless_empty: Any) -> None:
        """Suspects code that runs while the blocks of a module are held."""
        with self._wrapped.runtime.manager.lock:
            self._note_uncounted()
            self._wrapped.bypass.end(for_good=True)
            for name in [name for name, other in self._modules.items() if other is module]:
                scope = self.scopes.get(self._territory[name])
                for group in () if scope is None else scope.groups:
                    group.writes.suspect_code(unless_empty)

    def _note_uncounted(self) -> None:
        self.uncounted = True
        self._wrapped.runtime.away.counted = False

    def _needed(self, found: Sequence[Found]) -> tuple[dict[str, dict[int, Group]], set[str]]:
        """Returns the groups that blocks' modules need, and the modules whose calls hold them."""
        needed: dict[str, dict[int, Group]] = {}
        called: set[str] = set()
        numbered = self._wrapped.runtime.activations.store is not None  # by the calls of layers
        for tensor in found:
            group = self.group_of[id(tensor.tensor)]
            for module_name, _ in tensor.places:
                root = self._territory[module_name]
                if module_name in self._divided and group.block.role is Role.PARAM:
                    # each is fetched when it is looked up
                    needed.setdefault(root, {})
                    looked_up = self._looked_up.setdefault(root, [])
                    looked_up += [group] if group not in looked_up else []
                elif not group.resident:  # otherwise the pass holds it
                    needed.setdefault(root, {})[id(group)] = group
                    called.add(module_name)
                elif numbered:
                    needed.setdefault(root, {})
        return needed, called

    def _find_around(self) -> None:
        """Finds the modules without tensors that contain blocks."""
        around, number = self._around, self._wrapped.number
        for name in [name for name, scope in self.scopes.items() if scope.begins]:
            while (name := name.rpartition(".")[0]) and name not in around:
                module = self._modules[name]
                if name not in self.scopes and not isinstance(module, CONTAINERS):
                    around[name] = Scope(
                        name, number, (), self._wrapped, Inside(), begins=False, around=True
                    )

    def worst_chain(self) -> tuple[int, list[Group]]:
        """Returns the maximal bytes that nested calls hold at once, and their groups."""
        record = self._wrapped.runtime.manager.record
        best: tuple[int, list[Group]] = (0, [])
        for scopes in self._nested():
            held = {id(group): group for scope in scopes for group in scope.groups}
            for scope in scopes:
                apart = sorted(self._looked_up.get(scope.name, ()), key=lambda g: g.block.nbytes)
                most = 1 if isinstance(self._modules[scope.name], PARAMETERS) else AT_ONCE
                held.update((id(group), group) for group in apart[-most:])
            moves = [g for g in held.values() if not record(g.block).fixed]
            total = sum(group.block.nbytes for group in moves)
            if total > best[0]:
                best = (total, moves)
        return best

    def leave_ends(self) -> None:
        """Keeps blocks that calls hold while others are used at an end of HBM, if HBM is small.

        Views that code of a call has created fix their place, so they must not divide the free
        space: elsewhere they may be only if each of the two pieces is large enough.
        """
        table = self._wrapped.runtime.manager.parts.table
        for scopes in self._nested():
            chain = {id(group): group for scope in scopes for group in scope.groups}.values()
            moves = [align_up(g.block.nbytes) for g in chain if not table[g.block.id].fixed]
            if not moves or table.hbm.capacity >= sum(moves) + (len(moves) - 1) * max(moves):
                continue
            held = set[int]()
            for number, scope in enumerate(scopes):
                held |= {id(group) for group in scope.groups}
                inside = {
                    g.block.id: g.block
                    for s in scopes[number:]
                    for g in s.groups
                    if id(g) not in held
                }
                nbytes = sum(align_up(block.nbytes) for block in inside.values())
                for group in scope.groups:
                    record = table[group.block.id]
                    record.later = max(record.later, nbytes)

    def _owners(self, group: Group) -> dict[nn.Module, Scope]:
        """Returns the modules that themselves have parameters of a block, and their scopes."""
        found = [(self._modules[n], scope) for n, scope in self.scopes.items()]
        return {m: s for m, s in found if group in s.groups and has_params_of(m, group)}

    def has_vocabulary(self, group: Group) -> bool:
        """Whether a block belongs to an embedding, or to a head with as many rows."""
        return has_vocabulary(self._owners(group), self._modules.values())

    def leave_in_place(self, group: Group) -> bool:
        """Makes a block be read in place in DRAM, if all modules that have it can do that."""
        owners, manager = self._owners(group), self._wrapped.runtime.manager
        if not can_be_read_in_place(group, owners, manager):
            return False
        group.in_place = True
        for scope in owners.values():
            scope.in_place = (*scope.in_place, group)
        for scope in self.scopes.values():  # other groups that they need are held as usual
            scope.groups = tuple(other for other in scope.groups if other is not group)
        return True

    def annex(self, group: Group) -> bool:
        """Makes a block permanently used and trained in DRAM, if its modules can do that."""
        owners, manager = self._owners(group), self._wrapped.runtime.manager
        return can_be_read_in_place(group, owners, manager) and manager.annex(group.block)

    def _nested(self) -> Iterator[list[Scope]]:
        """Yields the scopes of nested calls, the outermost first."""
        first = ([name, *names_above(name)][::-1] for name in self.scopes)
        for names in chain(first, self._again):
            if names[-1] in self.scopes:
                yield [self.scopes[name] for name in names if name in self.scopes]

    def uses_below(self, name: str) -> list[tuple[int, int]]:
        """Returns the blocks at and below a module, in the order of the modules.

        A module with several places in the model appears at each of them, with its own block, or
        that of another module that shares its weights.

        Args:
            name: The module's qualified name.

        Returns:
            The id of each block, and up to how many tokens its rows are read in place.
        """
        scopes = {id(self._modules[place]): scope for place, scope in self.scopes.items()}
        found, seen = list[tuple[int, int]](), set[int]()
        most = MOST_PLACES * len(self._modules)
        for *_, module in islice(places(self._modules[name]), most):
            scope = scopes.get(id(module))
            for group in scope.groups if scope is not None else ():
                block = group.block.id
                if scope is not None and (block not in seen or scope.begins):
                    found.append((block, few_tokens(module, scope)))
                    seen.add(block)
        return found

    def held(self) -> set[int]:
        """Returns the ids of blocks that calls hold while calls inside use others."""
        found = set[int]()
        for *outer, scope in self._nested():
            inner = {group.block.id for group in scope.groups} if scope.begins else set[int]()
            if inner:
                found |= {group.block.id for around in outer for group in around.groups} - inner
        return found

    # -- interceptors ----------------------------------------------------

    def originals(self, groups: Iterable[Group]) -> Originals:
        """Returns the tensors of groups and the modules' dictionaries, in their present state."""
        return Originals(groups, self._modules.values(), _REPLACED)

    def install(self) -> None:
        """Installs the interceptors."""
        alone: dict[Group, list[TieredDict]] = {}
        for name, scope in self.scopes.items():
            module = self._modules[name]
            for kind in _OF_SCOPES:
                if kind is not CallInterceptor:
                    module.__dict__[kind.method] = kind(module, scope)
                elif scope.called:
                    module.__dict__[kind.method] = _call_kind(module, scope)(module, scope)
            self._intercept_names(module, alone)
        for group, names in alone.items():  # at once: there may be thousands
            group.add_names(names)
        for name, scope in self._around.items():
            module = self._modules[name]
            for kind in _OF_AROUND:
                module.__dict__[kind.method] = kind(module, scope)
        self._leave_compiled()
        root = self.scopes[""]
        for module in self._modules.values():
            for whole in (kind for kind in _OF_ALL if kind.suits(module)):
                module.__dict__[whole.method] = whole(module, root)
        self._sizes = [*map(len, self._names)]  # find_groups has inspected their other attributes

    def calls_inside(self) -> dict[nn.Module, CallInterceptor] | None:
        """Returns the interceptors of modules inside the model that only hold blocks.

        Returns:
            The interceptors, by module; None if one of them has compiled code.
        """
        found = {}
        for name in self.scopes:
            module = self._modules[name]
            call = module.__dict__.get(CallInterceptor.method)
            if isinstance(call, CallInterceptor) and call.compiled is not None:
                return None
            if name and type(call) is CallInterceptor:
                found[module] = call
        return found

    def uninstall(self) -> None:
        """Removes the interceptors."""
        for name in (*self.scopes, *self._around):
            module = self._modules[name]
            call = module.__dict__.get(CallInterceptor.method)
            if isinstance(call, CallInterceptor):
                call.give_back()
            _take_out(module, _OF_SCOPES)
            _plain_names(module)
        for module in self._modules.values():
            _take_out(module, _OF_ALL)

    def _leave_compiled(self) -> None:
        """Leaves modules to the compiler whose ``compile()`` was called before."""
        for name in self.scopes:
            call = self._modules[name].__dict__.get(CallInterceptor.method)
            if call is not None and call.compiled is not None:
                self.leave_to_compiler(name)

    def leave_to_compiler(self, name: str) -> None:
        """Removes interceptors that a compiler cannot trace, inside a module that is compiled.

        Its own call, which remains intercepted, holds all that the modules of its block need.
        """
        prefix = f"{name}." if name else ""
        for inner, module in self._modules.items():
            below = inner.startswith(prefix) and self._territory[inner] == self._territory[name]
            if inner != name and not below:
                continue
            _plain_names(module)
            if inner != name:
                call = module.__dict__.pop(CallInterceptor.method, None)
                if call is not None:
                    call.give_back()

    def _intercept_names(self, module: nn.Module, alone: dict[Group, list[TieredDict]]) -> None:
        """Installs intercepting dictionaries, and enters in ``alone`` those of one group each."""
        for which in _TENSORS:
            plain = module.__dict__[which]
            managed = {
                name: self.group_of[id(tensor)]
                for name, tensor in plain.items()
                if tensor is not None and id(tensor) in self.group_of
            }
            if managed:
                names = module.__dict__[which] = TieredDict(
                    plain, managed, self._wrapped.runtime.away
                )
                first, *others = {id(group): group for group in managed.values()}.values()
                if not others:
                    alone.setdefault(first, []).append(names)

    # -- looks -----------------------------------------------------------

    def beside(self, name: str) -> list[nn.Module]:
        """Returns the other modules that a module's parent has."""
        parent = self._modules.get(name.rpartition(".")[0])
        own = self._modules.get(name)
        return [] if parent is None else [c for c in parent.children() if c is not own]

    def entry_of(self, param: torch.Tensor) -> Entry | None:
        """Returns the entry of a managed parameter; None if it is not of this model."""
        group = self.group_of.get(id(param))
        entries = [] if group is None else group.entries
        return next((entry for entry in entries if entry.param is param), None)


def _call_kind(module: nn.Module, scope: Scope) -> type[CallInterceptor]:
    """Returns the class that intercepts a module's calls."""
    if scope.in_place:
        return InPlaceInterceptor
    if is_lookup(module, scope):
        return LookupInterceptor
    return ExpertsInterceptor if is_experts(module, scope) else CallInterceptor


def _take_out(module: nn.Module, kinds: Iterable[type[Interceptor]]) -> None:
    """Removes interceptors of some kinds from a module, unless other code has replaced them."""
    for kind in kinds:
        found = module.__dict__.get(kind.method)
        if isinstance(found, Interceptor):
            found.take_out()


def _plain_names(module: nn.Module) -> None:
    for which in _TENSORS:
        if isinstance(module.__dict__[which], HeldDict):
            module.__dict__[which] = dict(module.__dict__[which].items())
