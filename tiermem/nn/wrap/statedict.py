"""State dicts of wrapped models; loading one also fills blocks whose bytes are lost."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from tiermem.errors import CheckpointError, StorageError
from tiermem.nn.compat.entrances import entrance
from tiermem.nn.compat.outside import outside
from tiermem.nn.compat.quiet import unrecorded
from tiermem.nn.groups.group import Group
from tiermem.nn.groups.shellparam import ShellParam
from tiermem.nn.passes.givenstates import GivenStates
from tiermem.nn.tensors.shells import insides
from tiermem.nn.wrap.scope import Interceptor, meant
from tiermem.runtime.base.functorch import outside_inference
from tiermem.runtime.manager import BlockManager


def _loads_plainly(module: nn.Module) -> bool:
    """Whether a module loads its state as torch's own modules do."""
    return type(module)._load_from_state_dict.__module__.startswith("torch.")


def given_values(module: nn.Module, state: Any) -> dict[int, torch.Tensor]:
    """Returns a state dict's matching value for each tensor of a module, by the tensor's id."""
    found: dict[int, torch.Tensor] = {}
    if not isinstance(state, Mapping):
        return found
    for name, part in module.named_modules():
        if part._load_state_dict_pre_hooks or not _loads_plainly(part):
            continue  # it may transform its values
        for own, tensor in [*part._parameters.items(), *part._buffers.items()]:
            value = state.get(f"{name}.{own}" if name else own)
            if tensor is None or not isinstance(value, torch.Tensor):
                continue
            if value.shape == tensor.shape or (tensor.dim() == 0 and value.numel() == 1):
                inside, given = insides(tensor), insides(value)
                if [path for path, _ in inside] == [path for path, _ in given]:
                    found.update((id(t), v) for (_, t), (_, v) in zip(inside, given, strict=True))
    return found


def _may_give(module: nn.Module, state: Any, group_of: Mapping[int, Group]) -> bool:
    """Whether a state dict may have a value for a tensor in the tiers.

    Args:
        module: The module that will load it.
        state: The state dict.
        group_of: The group of each tensor in the tiers, by the tensor's id.
    """
    if not isinstance(state, Mapping):
        return True
    for name, part in module.named_modules(remove_duplicate=False):
        if part._load_state_dict_pre_hooks or not _loads_plainly(part):
            return True  # it may rename them
        for own, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if id(tensor) in group_of and (f"{name}.{own}" if name else own) in state:
                return True
    return False


def hold_or_give(group: Group, given: Mapping[int, torch.Tensor]) -> None:
    """Holds a group; a block that its disk has lost is first filled with the given values.

    Args:
        group: The group of the block.
        given: Values by the id of each tensor, with its shape.

    Raises:
        StorageError: If the block cannot be read, and not all its values are given.
    """
    try:
        group.hold()
    except StorageError:
        if not _give_anew(group, given):
            raise
        group.hold()


def _give_anew(group: Group, given: Mapping[int, torch.Tensor]) -> bool:
    """Fills a block without reading it: all of it, or returns False."""
    members = [*group.entries, *group.buffers]
    if any(member.materialized or id(member.tensor) not in given for member in members):
        return False
    manager, block = group.manager, group.block
    manager.discard(block)
    slot = manager.acquire(block)
    try:
        with outside_inference(), torch.no_grad():
            for member in members:
                view = slot.views[member.index]
                view.copy_(given[id(member.tensor)].reshape(view.shape))
    except BaseException:
        manager.release(block)
        manager.discard(block)
        raise
    manager.release(block, dirty=True)
    return True


class _Copies:
    """The copies in one state dict, which several calls may fill (``destination=``).

    Tied tensors stay tied in it, within a call and between calls, unless they were written in
    between.

    Attributes:
        by_id: The copies by the ids of the tensors.
    """

    def __init__(self) -> None:
        """Starts without a call."""
        self.by_id: dict[int, torch.Tensor] = {}
        self._fresh: set[int] = set()  # created, or checked again, in the current call
        self._places: set[tuple[int, str]] = set()  # places that it has not reached

    def come_to(self, module: nn.Module, prefix: str) -> None:
        """Begins another call, unless the current one still has to reach a module with a prefix."""
        if (id(module), prefix) not in self._places:
            self._fresh = set()
            inside = module.named_modules(remove_duplicate=False)
            self._places = {
                (id(inner), f"{prefix}{name}." if name else prefix) for name, inner in inside
            }
        self._places.discard((id(module), prefix))

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether there is a copy of a tensor from the current call."""
        return id(tensor) in self._fresh

    def add(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Enters a copy of ``value``: that of an earlier call, if it has the same bits."""
        known = self.by_id.get(id(tensor))
        if known is None or known.device != value.device or not torch.equal(known, value):
            self.by_id[id(tensor)] = value.clone()
        self._fresh.add(id(tensor))

    def around(self, tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        """Enters a copy of a tensor that wraps others: the existing one, if it wraps the same."""
        inside = [value for _, value in insides(copy)]
        known = self.by_id.get(id(tensor))
        if known is None or [*map(id, inside)] != [id(value) for _, value in insides(known)]:
            known = self.by_id[id(tensor)] = copy
        return known


def _copy_if_inside(value: Any, addresses: set[int]) -> Any:
    """Returns a copy of a tensor at one of the given addresses; other objects unchanged.

    No view of a block must remain: if there is one when it is released, the block counts as
    written.
    """
    inside = insides(value) if isinstance(value, torch.Tensor) else []
    if not any(tensor.data_ptr() in addresses for _, tensor in inside):
        return value
    with unrecorded():
        return value.detach().to("cpu", copy=True)


class StateDicts:
    """Creates the state dicts of one wrapped model, and holds its blocks while one is loaded.

    Attributes:
        given: While a state dict is loaded: its values by the id of each tensor.
        group_of: The group of each tensor in the tiers, by the tensor's id.
    """

    def __init__(
        self,
        manager: BlockManager,
        group_of: Mapping[int, Group],
        resident: Group | None,
        given: GivenStates,
    ) -> None:
        """Starts without state dicts.

        Args:
            manager: The manager of the blocks.
            group_of: The group of each tensor, by the tensor's id.
            resident: The group of small buffers, which stay in HBM; None if there are none.
            given: The values of state dicts that programs got.
        """
        self._given_states = given
        self.given: dict[int, torch.Tensor] = {}
        self._manager = manager
        self.group_of = group_of
        self._resident = resident
        self._states: dict[int, _Copies] = {}

    def export(self, module: nn.Module, destination: Any, prefix: str, *, detach: bool) -> None:
        """Replaces a module's own entries of a state dict with copies in host memory.

        Args:
            module: The module.
            destination: The state dict.
            prefix: Prefix of its names there.
            detach: Whether tensors that are not in the tiers still have to be detached.
        """
        cache = self._copies_in(destination)
        cache.come_to(module, prefix)
        for which in ("_parameters", "_buffers"):
            for name, tensor in module.__dict__[which].items():
                key = prefix + name
                if tensor is None or key not in destination:
                    continue
                group = self.group_of.get(id(tensor))
                if group is not None:
                    shell = group.shell_of(tensor)
                    destination[key] = (
                        self._copy_of(tensor, group, cache, key)
                        if shell is None
                        else self._copy_around(shell, cache, key)
                    )
                elif self._resident is not None and which == "_buffers":
                    destination[key] = tensor.detach().clone()
                    self._given_states.note(key, destination[key])
                elif detach and destination[key] is tensor:
                    destination[key] = tensor.detach()

    def _copies_in(self, destination: Any) -> _Copies:
        """Returns the copies made for one state dict."""
        key = id(destination)
        if key not in self._states:
            try:
                weakref.finalize(destination, self._states.pop, key, None)
            except TypeError:
                return _Copies()
            self._states[key] = _Copies()
        return self._states[key]

    def _copy_of(
        self, tensor: torch.Tensor, group: Group, cache: _Copies, name: str
    ) -> torch.Tensor:
        if not cache.has(tensor):
            for member, value in group.values():
                cache.add(member.tensor, value)
        copy = cache.by_id[id(tensor)]
        self._given_states.note(name, copy)
        return copy

    def _copy_around(self, shell: ShellParam, cache: _Copies, name: str) -> torch.Tensor:
        """Returns a copy of a parameter that wraps others, around copies of these."""
        known = {id(m.tensor): self._copy_of(m.tensor, m.group, cache, name) for m in shell.members}
        return cache.around(shell.param, shell.around(shell.values(known)))

    @contextmanager
    def copying(self, module: nn.Module, destination: Any) -> Iterator[None]:
        """Replaces with copies what a module enters for parameters that it takes apart itself."""
        found = (self.group_of.get(id(t)) for t in module.__dict__["_parameters"].values())
        groups = {id(group): group for group in found if group is not None}.values()
        if not any(group.shells for group in groups):
            yield
            return
        before = set(destination)
        with self.holding(module):
            yield
            own = {tensor.data_ptr() for group in groups for tensor in group.tensors()}
            for key in [key for key in destination if key not in before]:
                destination[key] = _copy_if_inside(destination[key], own)

    def note_loaded(self, module: nn.Module, state: Any, prefix: str) -> None:
        """Notes which values of a state dict a module has loaded into its own tensors.

        Args:
            module: The module.
            state: The state dict.
            prefix: Prefix of its names there.
        """
        for name in [*module.__dict__["_parameters"], *module.__dict__["_buffers"]]:
            value = state.get(prefix + name)
            for _, tensor in insides(value) if isinstance(value, torch.Tensor) else []:
                self._given_states.loaded(tensor)

    @contextmanager
    def holding(self, module: nn.Module) -> Iterator[None]:
        """Holds the blocks of a module's own tensors."""
        groups: dict[int, Group] = {}
        for which in ("_parameters", "_buffers"):
            for tensor in module.__dict__[which].values():
                group = self.group_of.get(id(tensor))
                if group is not None and not group.in_place:  # else each operation looks there
                    groups[id(group)] = group
        held = []
        self._manager.gate.guard()
        try:
            for group in groups.values():
                hold_or_give(group, self.given)
                held.append(group)
            yield
            for group in groups.values():
                group.take_in()
        finally:
            for group in reversed(held):
                group.let_go()


class SaveInterceptor(Interceptor):
    """Puts real tensors into ``state_dict()``."""

    __slots__ = ()

    method = "_save_to_state_dict"

    @entrance
    def __call__(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Fills ``destination`` with copies in host memory; with ``keep_vars``, as in torch."""
        if (other := meant(self, sys._getframe(1))) is not None:
            other._save_to_state_dict(destination, prefix, keep_vars)
            return
        # torch's own only enters them: nothing is fetched to the device to be detached there
        torchs = getattr(self.inner, "__func__", None) is nn.Module._save_to_state_dict
        dicts = self.scope.wrapped.dicts
        if keep_vars:
            # the parameters themselves: programs ask them for `requires_grad`
            outside(self.inner, destination, prefix, True)
            return
        with nullcontext() if torchs else dicts.copying(self.module, destination):
            outside(self.inner, destination, prefix, torchs)
            with unrecorded():  # copies made in inference mode could not be written outside of it
                dicts.export(self.module, destination, prefix, detach=torchs)


class LoadInterceptor(Interceptor):
    """Holds a module's blocks while its state is loaded."""

    __slots__ = ()

    method = "_load_from_state_dict"

    @entrance
    def __call__(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> Any:
        """Loads into the blocks."""
        if (other := meant(self, sys._getframe(1))) is not None:
            return other._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        dicts = self.scope.wrapped.dicts
        with dicts.holding(self.module):
            result = outside(self.inner, state_dict, prefix, *args, **kwargs)
        dicts.note_loaded(self.module, state_dict, prefix)
        return result


class LoadAllInterceptor(Interceptor):
    """Fills blocks that their disk has lost with the loaded values."""

    __slots__ = ()

    method = "load_state_dict"

    @entrance
    def __call__(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Loads; if something does not fit, the rest is loaded first, as in torch.

        Raises:
            CheckpointError: With ``assign``, before anything is loaded, if that may replace a
                tensor in the tiers.
        """
        self.runtime.manager.gate.guard()
        assigns = kwargs.get("assign", args[1] if args[1:] else False)
        if assigns and _may_give(self.module, state_dict, self.scope.wrapped.dicts.group_of):
            raise CheckpointError(
                "load_state_dict(assign=True) would replace tensors that live in the tiers; leave "
                "assign out, the values are copied in"
            )
        dicts = self.scope.wrapped.dicts
        dicts.given = given_values(self.module, state_dict)
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        try:  # tensors in the tiers cannot be swapped; copying into them has the same result
            torch.__future__.set_swap_module_params_on_conversion(False)
            return outside(self.inner, state_dict, *args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)
            dicts.given = {}
