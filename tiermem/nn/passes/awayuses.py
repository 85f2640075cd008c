"""Uses of tensors whose block is not held, outside their own module's call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, cast

import torch

from tiermem.errors import CapacityError
from tiermem.nn.compat.entrances import inside
from tiermem.nn.groups.addresses import Addresses
from tiermem.nn.groups.group import Group
from tiermem.nn.groups.inplace import no_room
from tiermem.nn.groups.need import beside_optimizer
from tiermem.runtime.base.functorch import transforming
from tiermem.runtime.memory.slots import Slot

if TYPE_CHECKING:
    from tiermem.nn.passes.runtime import Here, ModuleRuntime
    from tiermem.nn.passes.saved import SavedHooks


_DEEPEST = 4
_MOST_PARTS = 256
"""How many parts of a call's result are searched for weights."""


class AwayUses:
    """Fetches blocks for such uses, and leaves tensors pointed at them until the next pass.

    Attributes:
        manager: The manager of the blocks.
        here: What the calling thread is doing.
        addresses: The addresses that users got for tensors.
        soft: Groups that are left pointed at their blocks, by id, in the order of use.
        counted: Whether torch counts all writes by the code of the modules, as far as is known.
        on_look: Functions called before each access to weights that are not held, between passes.
    """

    def __init__(self, runtime: ModuleRuntime) -> None:
        """Serves ``runtime``."""
        self._runtime = runtime
        self.manager = runtime.manager
        self.here: Here = runtime.here
        self.addresses = Addresses()
        self.soft: dict[int, Group] = {}
        self._viewed: list[Group] = []
        self.counted = True
        self.on_look: list[Callable[[Group], None]] = []

    @property
    def saved(self) -> SavedHooks:
        """The hooks that save tensors for backward."""
        return self._runtime.saved

    @inside
    def demand(self, group: Group) -> None:
        """Fetches a group whose parameter is looked up while its block is not held."""
        # every torch operation on the parameter fetches its block itself. The parameter is pointed
        # at the block for code that torch does not see, which may write it outside of passes
        if group.in_place:
            return  # an operation on it raises if there is no room; its shape can always be read
        self._close(group)
        inside = self.here.is_in_pass()
        if not inside:
            self._tell_of_look(group)
        while True:
            try:
                group.point_softly(dirty=not inside)
                break
            except CapacityError:
                if not self.manager.threads.wait():
                    raise
        self._keep_soft(group)

    @inside
    def note_apart(self, group: Group) -> None:
        """Notes a use outside of the calls that hold a group; other threads may make such uses."""
        if self.here.inside or self.manager.threads.several:
            group.use_apart()

    @inside
    def lend(self, group: Group) -> int:
        """Holds a group for one operation on a tensor of it while it is not held."""
        if group.in_place:
            raise no_room(self.manager, group, self._runtime.program)
        self.manager.gate.guard()
        self.manager.threads.note()
        self._close(group)
        self.note_apart(group)
        if self.on_look and not self.here.is_in_pass():
            self._tell_of_look(group)
        self._runtime.backward.enter()
        while True:
            try:
                group.hold()
                break
            except CapacityError as error:
                if not self.manager.threads.wait():
                    raise beside_optimizer(error) from None
        return 2 if torch.is_grad_enabled() and self.saved.push_for_operation() else 1

    @inside
    def lent(self, group: Group, token: int, *, dirty: bool, views: bool = False) -> None:
        """Ends :meth:`lend`; the group stays pointed at the block until that leaves.

        Args:
            group: The group.
            token: What :meth:`lend` returned.
            dirty: Whether the operation may have written the block.
            views: Whether it returns views that share the tensors' version counters. In a pass
                without gradients, their writes are detected when the pass ends, or before the
                block leaves: most views are freed by then (``x @ self.embedding.weight.t()``).
        """
        if token == 2:
            self.saved.pop()
        odd = group.writes.merging or group.shells  # their views have another class
        waits = views and not (dirty or odd) and self._may_wait()
        group.let_go(dirty=dirty, soft=True, views_wait=waits)
        if waits:
            self._viewed.append(group)
        self._keep_soft(group)

    @inside
    def lend_in_place(self, group: Group) -> Sequence[torch.Tensor]:
        """Lends the tensors of a group that is read in DRAM, for one operation on one of them.

        Raises:
            CapacityError: If they cannot be read in place now, so that HBM would need room.
        """
        self.manager.gate.guard()
        self.manager.threads.note()
        with self.manager.lock:
            homes = self.manager.parts.homes
            if homes.keeper is not None:  # the operation may write
                homes.keeper.before_write(group.record)
            tensors = self.manager.zero_copy.lend(group.block, again=True)
        if not tensors:
            raise no_room(self.manager, group)
        return tensors

    @inside
    def lent_in_place(self, group: Group) -> None:
        """Ends :meth:`lend_in_place`."""
        with self.manager.lock:
            self.manager.zero_copy.lent(group.block, group.block.nbytes)

    def _may_wait(self) -> bool:
        """Whether there is a current pass at whose end views can be checked."""
        return (
            self.counted
            and self.here.inside
            and not torch.is_grad_enabled()
            and not self.manager.threads.several
            and not transforming()
        )

    def settle_views(self) -> None:
        """Finds out which blocks were written through views, when a pass ends."""
        if self._viewed:
            with self.manager.lock:
                while self._viewed:
                    self._viewed.pop().settle_views()

    @inside
    def bring(self, group: Group, show: Callable[[Slot], None], *, dirty: bool) -> None:
        """Fetches a block for a tensor that is then pointed at it and keeps it there.

        Args:
            group: The group of the block.
            show: Points the tensor at the block.
            dirty: Whether to assume that the block will be written.

        Raises:
            CapacityError: If HBM has no room for it.
            ClosedError: If the manager is closed.
        """
        manager, block = self.manager, group.block
        manager.gate.guard()
        manager.threads.note()
        self._runtime.backward.enter()
        if group.soft and not dirty:  # a part of the use for which backward has fetched it
            with manager.lock:
                if manager.acquirer.at_hand(block.id) is not None:
                    show(manager.parts.slots.current[block.id])
                    return
        while True:
            try:
                slot = manager.acquire(block)
                break
            except CapacityError as error:
                if not manager.threads.wait():
                    raise beside_optimizer(error) from None
        try:
            show(slot)
        finally:
            manager.release(block, dirty=dirty)

    @inside
    def written(self, group: Group) -> None:
        """Notes that a block, of which there is an alias, was written."""
        if not self.manager.gate.closed and self.manager.parts.table.get(group.block.id):
            self.manager.acquire(group.block)
            self.manager.release(group.block, dirty=True)

    def _close(self, group: Group) -> None:
        """Intercepts calls of modules again, since one of their weights is used by itself."""
        if group.left_open is not None:
            with self.manager.lock:
                group.left_open()

    def _tell_of_look(self, group: Group) -> None:
        """Reports an access to weights between passes, before they are fetched."""
        for tell in self.on_look:
            tell(group)

    def _keep_soft(self, group: Group) -> None:
        """Leaves a group pointed at its block.

        Until the end of the module's call in which it was used (:meth:`rest`), or until the next
        pass; in backward, for a few uses.
        """
        backward = self._runtime.backward
        if backward.under_way and torch._C._current_graph_task_id() != -1:
            backward.keep_soft(group)
        else:
            self.soft.setdefault(id(group), group)

    def thawed(self, tensor: torch.Tensor) -> None:
        """Takes a parameter's gradients from now on, since its ``requires_grad`` was set."""
        if tensor.requires_grad:
            self._runtime.groups.track(tensor, self._runtime.backward.incoming)

    def end(self) -> None:
        """Ends the soft state of all groups; the caller has the manager's lock."""
        for group in self.soft.values():
            group.rest()
        self.soft.clear()

    def end_between(self, group: Group) -> None:
        """Ends the soft state of a group between passes; the caller has the manager's lock."""
        if (
            not self.here.is_in_pass()
            and not self.manager.threads.several
            and id(group) in self.soft
        ):
            self.soft.pop(id(group)).rest()

    @inside
    def rest(self, before: int, result: object) -> None:
        """Ends the soft state of groups used in a module's call, in a pass without gradients.

        Code in the call may have several weights at once and pass them to code that torch does not
        see; code after it has them only if they were returned.

        Args:
            before: How many groups were soft when the call began.
            result: The result of the call.
        """
        if torch.is_grad_enabled() or self.manager.threads.several or not self.here.inside:
            return
        with self.manager.lock:
            for key in [*self.soft][before:]:
                if not _is_in(self.soft[key], result):
                    self.soft.pop(key).rest()

    def forget(self, gone: set[int]) -> None:
        """Forgets groups, given by their ids, that are removed."""
        for key in gone:
            self.soft.pop(key, None)
        self._viewed = [group for group in self._viewed if id(group) not in gone]

    def reset(self) -> None:
        """Forgets all, after an exception anywhere: no group is soft, and no view waits."""
        self.soft.clear()
        self._viewed = []


def _is_in(group: Group, result: object, depth: int = _DEEPEST) -> bool:
    """Whether a call returns a tensor of a group, or may do so in an object of an unknown class.

    No code of the result is run.
    """
    if isinstance(result, torch.Tensor):
        return any(result is member.tensor for member in group.pointing.members)
    parts: Collection[object]
    if isinstance(result, dict):
        parts = dict.values(result)
    elif type(result) in (tuple, list):
        parts = cast("list[object]", result)
    else:
        return not (result is None or isinstance(result, (bool, int, float, str)))
    if not depth or len(parts) > _MOST_PARTS:
        return True
    return any(_is_in(group, part, depth - 1) for part in parts)
