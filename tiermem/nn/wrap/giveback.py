"""Makes wrapped models ordinary again: their tensors leave the tiers, block by block.

There are two stages. :meth:`Leaving.read` may fail (a disk, too little memory) and changes nothing:
it performs the deferred steps, and reads gradients and all blocks that do not have their home in
DRAM.
:meth:`Leaving.finish` cannot fail for such reasons: it makes the tensors ordinary and copies
blocks out of DRAM one at a time, freeing the pages after each. So the memory needed beyond the
DRAM budget is one block, and what was in HBM or in files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from tiermem.config import format_size
from tiermem.core.block import Tier
from tiermem.core.residency import State
from tiermem.errors import CapacityError, StorageError, TierError, WrapError
from tiermem.nn.groups.entry import Entry, Member
from tiermem.nn.groups.gradunit import GradUnit
from tiermem.nn.groups.group import Group
from tiermem.nn.tensors.lazy import is_gone, ordinary
from tiermem.runtime.base.functorch import outside_inference
from tiermem.runtime.memory.hostmemory import available_memory

if TYPE_CHECKING:
    from tiermem.nn.wrap.wrapped import WrappedModel
    from tiermem.runtime.manager import BlockManager

_HOST = torch.device("cpu")


class Leaving:
    """Moves one wrapped model out of the tiers.

    Attributes:
        wrapped: The model.
    """

    def __init__(
        self, wrapped: WrappedModel, device: torch.device | None = None, *, closing: bool = False
    ) -> None:
        """Stores its arguments; reads nothing yet.

        Args:
            wrapped: The model.
            device: Where its tensors go; None for host memory.
            closing: Whether the manager closes, too. Then weights that still have their home in
                checkpoint files are mapped from them, and take no memory until they are used.
        """
        self.wrapped = wrapped
        self._closing = closing
        self._target = device or _HOST
        self._runtime = wrapped.runtime
        self._manager = wrapped.runtime.manager
        self._values: dict[int, list[torch.Tensor]] = {}
        self._gradients: dict[int, torch.Tensor] = {}
        self._not_ours: set[int] = set()  # what a user has as ordinary tensors, or has got already

    # -- what it takes ---------------------------------------------------

    def nbytes(self) -> int:
        """Returns the bytes of the tensors and gradients to be given back."""
        groups = self._groups()
        units = self._units()
        return sum(g.block.nbytes for g in groups) + sum(unit.nbytes for unit in units)

    def host_bytes(self) -> int:
        """Returns the bytes of host memory needed beyond the DRAM budget."""
        groups = [group for group in self._groups() if not self._stays_in_files(group)]
        largest = max((g.block.nbytes for g in groups), default=0)
        if self._target.type != "cpu":
            return 2 * largest
        frees = self._closing or not self._manager.parts.homes.arena.locked
        new = sum(g.block.nbytes for g in groups if not (frees and self._in_dram(g)))
        return new + largest + sum(unit.nbytes for unit in self._units())

    def _groups(self) -> list[Group]:
        return [group for group in self.wrapped.groups if not group.freed]

    def _units(self) -> list[GradUnit]:
        """Returns the blocks of gradients that hold any."""
        entries = [e for e in self.wrapped.entries if e.has_grad]
        entries = [e for e in entries if not e.materialized or self._is_begun(e)]
        units = [e.unit for e in entries if e.unit is not None]
        return list({id(unit): unit for unit in units}.values())

    def _free_pages(self, group: Group) -> None:
        """Frees the pages of a group's home, once no save needs them."""
        record, homes = self._manager.record(group.block), self._manager.parts.homes
        if record.home is not Tier.DRAM or record.home_extent is None:
            return
        with self._manager.lock:
            homes.packed.pop(record.home_extent.offset, None)
            if homes.keeper is not None:
                homes.keeper.before_write(record)
            homes.arena.give_back(record.home_extent)

    def _stays_in_files(self, group: Group) -> bool:
        """Whether a group's tensors will be mapped from checkpoint files."""
        record = self._manager.record(group.block)
        return (
            self._closing
            and self._target.type == "cpu"
            and record.at_home is State.VALID
            and self._manager.parts.homes.read_only(record.home_extent)
        )

    def _in_dram(self, group: Group) -> bool:
        return self._manager.record(group.block).home is Tier.DRAM

    # -- the two stages --------------------------------------------------

    def read(self) -> None:
        """Reads everything whose reading may fail; the model is not changed.

        Raises:
            StorageError: Naming every block that could not be read.
            StepError: If a step inside backward waits for ``optimizer.step()``.
            WrapError: If the model is in use.
        """
        self._values.clear()
        self._gradients.clear()
        members = [member for group in self._groups() for member in group.pointing.members]
        self._not_ours = {id(m) for m in members if m.materialized and not self._is_begun(m)}
        if torch._C._current_graph_task_id() == -1:
            self._runtime.backward.let_go_kept()  # of a backward that was interrupted
        self._refuse_in_use()
        lost: dict[str, StorageError] = {}
        for group in self._groups():
            try:
                with self._manager.lock:
                    group.unpoint()
                    self._manager.parts.deferred.pay(group.block.id)
                if not self._in_dram(group):
                    self._values[group.block.id] = self._tensors(group)
            except StorageError as error:
                lost[group.block.name] = error
        for entry in self.wrapped.entries:
            if not entry.materialized and not entry.group.freed:
                self._runtime.grads.sync(entry)
        for unit in self._units():
            try:
                self._read_gradients(unit)
            except StorageError as error:
                lost[unit.block.name] = error
        if lost:
            raise _lost(self.wrapped, lost)

    def _refuse_in_use(self) -> None:
        """Performs the waiting steps, and refuses a model that is in use.

        Raises:
            WrapError: If it is in use.
        """
        deferred = self._manager.parts.deferred
        with self._manager.lock:
            for group in self._groups():
                with suppress(StorageError):  # the caller names it with all others
                    deferred.pay(group.block.id)
            with suppress(StorageError):  # likewise; steps that were dropped may have left some
                deferred.pay_standing()
            for group in self._groups():
                waits = group.block.id in deferred  # for a disk
                if not waits and group.holds > self._runtime.backward.reduced.holds(group):
                    raise WrapError(
                        f"block {group.block.name!r} is in use (its module is being called); take "
                        "the model out of the tiers once the call has returned"
                    )

    def _read_gradients(self, unit: GradUnit) -> None:
        if unit.awaits:
            self._runtime.grads.settle_now(unit)
        if unit.runs:
            (entry,) = unit.entries
            runs = [self._manager.read(block)[0] for block in unit.blocks]
            self._gradients[id(entry)] = torch.cat(runs).view(entry.param.shape)
            return
        tensors = self._manager.read(unit.block)
        for entry in unit.entries:
            if entry.has_grad:
                self._gradients[id(entry)] = tensors[entry.unit_index].clone()

    def _tensors(self, group: Group) -> list[torch.Tensor]:
        """Returns a group's tensors in their final place, each in its own memory."""
        origins = self.wrapped.origins
        if origins is not None and self._stays_in_files(group):
            found = {member.index: member.tensor for member in group.pointing.members}
            return [origins.mapped(found[index]) for index in sorted(found)]
        with self._manager.lock, outside_inference(), torch.no_grad():
            return self._manager.block_io.clone(group.block, self._target)

    def finish(self) -> None:
        """Makes the tensors ordinary; continues after an interruption (by Ctrl-C)."""
        self._runtime.backward.reduced.let_go(self._groups())
        small = self.wrapped.resident
        for group in (*self.wrapped.groups, *([] if small is None else [small])):
            group.pointing.sort()  # an exception may have left this list inconsistent
        for group in self._groups():
            values = self._values.get(group.block.id) or self._tensors(group)
            for member in group.pointing.members:
                if id(member) not in self._not_ours:
                    self._free(member, values[member.index])
                    self._not_ours.add(id(member))
            for shell in group.shells:
                shell.give_back()
            group.freed = True
            self._values.pop(group.block.id, None)
            self._free_pages(group)
        for member in small.buffers if small is not None else ():
            if id(member) not in self._not_ours:
                with outside_inference(), torch.no_grad():
                    value = member.tensor.detach().clone().to(self._target)
                self._free(member, value)
                self._not_ours.add(id(member))
        self._gradients.clear()
        self.wrapped.move_apart(self._target)
        self.wrapped.move_made(self._target)
        self.wrapped.uninstall()

    def _is_begun(self, member: Member) -> bool:
        """Whether a tensor was being made ordinary when that was interrupted."""
        return id(member) in self.wrapped.leaving

    def _free(self, member: Member, value: torch.Tensor) -> None:
        """Makes a tensor an ordinary one, and its gradient; repeated after an interruption.

        The tiers keep the gradient until the parameter has it.
        """
        self.wrapped.leaving.add(id(member))
        if not isinstance(member, Entry):
            if not member.materialized:
                member.group.pointing.free(member, value)
            return
        own = member.param.grad
        if member.has_grad and (not member.materialized or own is member.lazy):
            own = self._gradients[id(member)].to(member.param.dtype)
        elif is_gone(own):
            own = None
        if not member.materialized:
            member.group.pointing.free(member, value)
        # in one assignment: a second call finds the stand-in, or the gradient
        member.param.grad = None if own is None else ordinary(own, member.param, value.device)
        if member.has_grad:
            self._runtime.grads.hand_over(member, self._gradients[id(member)])


def give_back(wrapped: WrappedModel, device: torch.device | None) -> None:
    """Moves one model out of the tiers of a manager that stays open.

    Raises:
        CapacityError: If host memory has no room for it; then nothing is changed.
        StorageError: If blocks of it cannot be read.
        StepError: If a step inside backward waits for ``optimizer.step()``.
        WrapError: If it is in use.
    """
    leaving = Leaving(wrapped, device)
    _check_room([leaving])
    leaving.read()
    leaving.finish()


def prepare(models: Iterable[WrappedModel]) -> list[Leaving]:
    """Reads what all models of a manager need to leave with it, or raises and changes nothing.

    If blocks of some models cannot be read, the others leave immediately.

    Raises:
        CapacityError: If host memory has no room for all of them.
        StorageError: If blocks of some cannot be read; these stay in the tiers.
        StepError: If a step inside backward waits for ``optimizer.step()``.
        WrapError: If a model is in use.
    """
    leaving = [Leaving(model, closing=True) for model in models]
    _check_room(leaving)
    failed: StorageError | None = None
    ready = []
    for each in leaving:
        try:
            each.read()
            ready.append(each)
        except StorageError as error:
            failed = failed or error
    if failed is None:
        return leaving
    for each in ready:
        try:
            _check_room([each])
        except CapacityError:
            continue
        each.finish()
    raise failed


def finish(manager: BlockManager, leaving: Sequence[Leaving]) -> None:
    """Stops all transfers, so page-locked memory can be freed, and makes the models ordinary."""
    manager.stop()
    for each in leaving:
        if not each.wrapped.given_back:
            each.finish()


def _check_room(leaving: Sequence[Leaving]) -> None:
    """Refuses to give back models for which host memory has no room.

    Raises:
        CapacityError: If so, with the models and their bytes.
    """
    needed = sum(each.host_bytes() for each in leaving)
    try:
        available = available_memory()
    except OSError:  # too many open files: no reason to keep a model
        return
    if needed <= available:
        return
    names = ", ".join(f"{each.wrapped.name!r} ({format_size(each.nbytes())})" for each in leaving)
    raise CapacityError(
        f"{names} cannot be given back as ordinary tensors: that takes {format_size(needed)} of "
        f"host memory, and {format_size(available)} are available. Nothing was changed, the tiers "
        "are open still. Free some memory (zero_grad(), optimizer.close()), or save the model part "
        "by part: torch.save(part.state_dict(), path) for each part of it; then "
        "tier.close(discard=True) closes without giving it back"
    )


def _lost(wrapped: WrappedModel, lost: dict[str, StorageError]) -> StorageError:
    """Returns the error for blocks that could not be read: the first one's, naming all."""
    error = next(iter(lost.values()))
    error.message += (
        f"; so {len(lost)} blocks of model {wrapped.name!r} cannot be given back: "
        f"{', '.join(map(repr, list(lost)[:8]))}{', ...' if len(lost) > 8 else ''}. Its tiers stay "
        "open, and everything else of it can be read: save it part by part with "
        "torch.save(part.state_dict(), path), then tier.close(discard=True)"
    )
    return error


def say_beside(first: BaseException, second: BaseException) -> None:
    """Adds a second error, which occurred while leaving ``with`` and must not hide the first."""
    what = str(second) if isinstance(second, TierError) else f"{type(second).__name__}: {second}"
    text = f"tiermem: on the way out of `with`: {what}"
    if hasattr(first, "add_note"):
        first.add_note(text)
    else:  # Python 3.10 has no notes
        import sys

        print(text, file=sys.stderr)
