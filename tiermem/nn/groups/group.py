"""A block's parameters and buffers as modules see them, held and released together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from threading import enumerate as enumerate_threads
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tiermem.core.block import Block
from tiermem.nn.groups.above import Calls, Lender
from tiermem.nn.groups.away import group_of
from tiermem.nn.groups.entry import Entry, Member
from tiermem.nn.groups.keptviews import put_away, put_off
from tiermem.nn.groups.names import HeldDict
from tiermem.nn.groups.pointing import Plain, Pointing, change
from tiermem.nn.groups.replaced import bring_home, given_in_call, reshaped, take_home
from tiermem.nn.groups.shellparam import ShellParam
from tiermem.nn.groups.writes import Writes
from tiermem.runtime.base.functorch import modes, outside_inference
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.memory.slots import Holder, Slot, use_count
from tiermem.runtime.services.verify import differs_from_home


class Group(Holder):
    """The parameters (or large buffers) of one block, held and released together.

    While *held*, the block is leased and the tensors point at it. While *soft*,
    they point at it without a lease: the block may leave, and then they are pointed
    elsewhere. After a hold they still point at the block, or at its former place
    if it has left. Programs cannot see that, since every operation on the tensors
    holds the block first. So if a block stays, or returns to the same place, its
    tensors need not be pointed at it again.

    Attributes:
        manager: The manager of the block.
        block: The block.
        record: Its row in the residency table.
        pointing: Where its tensors point, and their classes.
        writes: What is known of writes to them.
        entries: Its parameters.
        buffers: Its buffers.
        carried: Other tensors over the memory of its parameters, which move with these.
        shells: Parameters that wrap some of its tensors.
        holds: How many calls hold it.
        thread: The thread that holds it; 0, which is no thread's id, if several do.
        stream: The compute stream of the first of those calls.
        holders: The threads of those calls, once several threads are seen; a thread may be missing.
        users: The threads that have called its model, or used it apart, once several are seen.
        apart: Whether it is used outside its own modules' calls.
        soft: Whether it is pointed at without a lease.
        lender: Fetches it for operations on tensors while it is not held.
        insides: The current calls of the modules that need it.
        freed: Whether its module was taken out of the tiers.
        stays: Whether it is held for as long as its module is in the tiers.
        resident: Whether gradients and state of its parameters have HBM as their home, too.
        in_place: Whether HBM has no room for it: kernels read it in place in DRAM.
        wanted: If it is read there, the budget of HBM that would have room for it.
        few: Whether its gradients are one unit if possible, since steps are host-bound.
        left_open: Restores the interceptors of its modules; None if none were removed.
        graph_views: How many views of it are in graphs that torch handles; -1 if unknown.
        pickled: Memory of copies in pickles, if several tensors have the same bytes, by index.
    """

    def __init__(self, manager: BlockManager, block: Block, *, writes_hidden: bool = False) -> None:
        """Describes a block.

        Args:
            manager: The manager of the block.
            block: The block.
            writes_hidden: Whether its tensors may be written without torch counting it
                (buffers, by C++ kernels), so that every use counts as a write.
        """
        self.manager = manager
        self._acquirer, self._stream = manager.acquirer, manager.parts.copy.stream
        self.record = manager.record(block)
        self.block = block
        self.pointing = Pointing(block)
        self.writes = Writes(always=writes_hidden)
        self.lender: Lender
        self.freed = self.stays = self.resident = self.few = self.in_place = False
        self.entries: list[Entry] = []
        self.buffers: list[Member] = []
        self.carried: list[Member] = []
        self.shells: list[ShellParam] = []
        self.holds = self.thread = self.stream = self.wanted = 0
        self.holders: list[int] = []
        self.users = set[int]()
        self.apart = False
        self.insides: list[Calls] = []
        self.soft = False
        self.left_open: Callable[[], object] | None = None
        self.graph_views = -1
        self.pickled: dict[int, StorageWeakRef] = {}
        manager.parts.holders[block.id] = self

    def ready(self, host_loans: Lender) -> None:
        """Frees the tensors' own memory; from now on their block is fetched by ``host_loans``."""
        self.lender = host_loans
        members = (*self.entries, *self.buffers, *self.carried)
        for member in members:
            group_of[id(member.tensor)] = self
        for shell in self.shells:
            group_of[id(shell.param)] = self
        self.pointing.begin(members, self.shells)
        # for buffers, counters only show that one has another form; those that stay never move
        buffers = () if self.stays else self.buffers
        counted = [member.tensor for member in (*self.entries, *self.carried, *buffers)]
        # writes in an operation on a parameter that wraps them are counted by torch only there
        self.writes.begin([*counted, *(shell.param for shell in self.shells)])
        self.pointing.away()
        self.follow()

    def watch(self, user: int = 0) -> None:
        """Intercepts uses by one thread while another holds the block; under the manager's lock.

        Otherwise the tensors would have ordinary classes for every thread while the block is held,
        and another thread's use would read memory that may be overwritten once it is released.

        Args:
            user: The only thread of the program so far, if there was any.
        """
        if user and (self.holds or self.thread):
            self.users.add(user)
        self.holders = [self.thread] * self.holds
        self.pointing.watched = True
        self.pointing.sort()
        if self.holds:
            self.pointing.show()

    def use_apart(self) -> None:
        """Notes that the calling thread uses it outside its own modules' calls."""
        if self.pointing.watched or not self.apart:
            with self.manager.lock:
                self.apart = True
                self.note_user()

    def _forget_holder(self) -> None:
        """Notes that a call no longer holds it, perhaps not of the thread that began the hold."""
        if get_ident() in self.holders:
            self.holders.remove(get_ident())
        else:
            self.holders.clear()  # it is not known which of them ended

    def note_user(self) -> None:
        """Notes that the calling thread uses its model; the caller has the manager's lock.

        If a thread may use the tensors while another one holds the block, they stay hidden.
        """
        pointing = self.pointing
        if not pointing.watched or torch._C._current_graph_task_id() != -1:
            return  # autograd's threads do not count as the program's
        self.users.add(get_ident())
        if self.apart and len(self.users) > 1 and not (pointing.veiled or self.resident):
            pointing.veiled = True
            pointing.sort()
            pointing.hide()

    def _lift_veil(self) -> None:
        """Shows tensors again while their block is held, if the other threads have ended.

        A user's dispatch mode, such as ``make_fx``, only accepts tensors of ordinary classes.
        """
        self.users &= {thread.ident for thread in enumerate_threads()}
        if self.users <= {get_ident()}:
            self.pointing.veiled = False
            self.pointing.sort()

    def add_names(self, names: Iterable[HeldDict]) -> None:
        """Adds modules' dictionaries whose managed names are all tensors of this group."""
        self.pointing.add_names(names)
        if self.holds:
            self.pointing.show()

    def recapture(self, member: Member) -> None:
        """Takes back a tensor that was freed."""
        current = self.manager.parts.slots.current.get(self.block.id)
        self.pointing.recapture(member, current, held=self.holds > 0)

    def hold(self) -> None:
        """Leases the block and points its tensors at it."""
        self.manager.gate.guard()  # before the lock: in a forked child it may be locked for ever
        with self.manager.lock:  # threads may evaluate one model together
            self.hold_locked()

    def hold_locked(self, *, again: bool = False) -> None:
        """As :meth:`hold`; the caller has the manager's lock.

        Args:
            again: Whether the hold is a part of the previous use, if the tensors are soft.
        """
        if self.holds:
            deferred = self.manager.parts.deferred
            if deferred.owed:  # a step that could not be undone
                deferred.pay(self.block.id)
            self.holds += 1
            if self.pointing.watched:
                self.holders.append(get_ident())
            parts = self.manager.parts
            other = self.thread != get_ident()
            if other:
                self.thread = 0  # until all have released it
            if other or self.stream != self._stream():
                # the copy may still be in progress, and this stream does not wait for it yet
                parts.copy.use(parts.transfers.ready.get(self.block.id))
            return
        if self.writes.merging:
            self.writes.look_for_adapters()
        slot, pointing = None, self.pointing
        if again and self.soft:
            slot = self._acquirer.again(self.block)
        if slot is None:
            slot = self.manager.replay.use(self.block.id)  # Acquirer.acquire, in line
            if slot is None:
                slot = self._acquirer.decide(self.block)
        if pointing.watched:
            self.holders.append(get_ident())
            if pointing.veiled and modes():
                self._lift_veil()
        change(pointing.shown)  # ordinary ones, since their block is held
        if slot is not pointing.slot:
            pointing.point(slot, plain=pointing.plain)
        slot.idle = self.soft = False
        self.holds, self.thread, self.stream = 1, get_ident(), self._stream()

    def hold_as_it_is(self, stream: int) -> bool:
        """As :meth:`hold_locked`, for a block that is where it was, without waiting.

        It does not count as a use in the schedule: no block is fetched or evicted for it.

        Args:
            stream: The current compute stream.

        Returns:
            Whether it was possible; if not, nothing was changed.
        """
        pointing, record, parts = self.pointing, self.record, self.manager.parts
        slot, ready = pointing.slot, parts.transfers.ready.get(self.block.id)
        if (
            self.holds
            or slot is None
            or slot is not parts.slots.current.get(self.block.id)
            or not record.usable
            or self.writes.merging
            or self.block.id in parts.deferred.owed
            or (ready is not None and ready.waiter != stream)
        ):
            return False
        record.leases += 1
        record.copied = False
        change(pointing.shown)
        slot.idle = self.soft = False
        self.holds, self.thread, self.stream = 1, get_ident(), stream
        parts.counters.hits += 1
        return True

    def let_go(self, *, dirty: bool = False, soft: bool = False, views_wait: bool = False) -> None:
        """Ends one hold; the last one hides the tensors.

        Args:
            dirty: Whether the block is known to have been written.
            soft: Whether to leave the tensors pointed at the block, without a lease.
            views_wait: Whether :meth:`settle_views` will find out later if views have written it.
        """
        with self.manager.lock:
            self.let_go_locked(dirty=dirty, soft=soft, views_wait=views_wait)

    def let_go_locked(
        self,
        *,
        dirty: bool = False,
        soft: bool = False,
        views_wait: bool = False,
        seen: bool = False,
        result: Any = None,
        given: Sequence[Any] = (),
    ) -> None:
        """As :meth:`let_go`; the caller has the manager's lock.

        Args:
            dirty: As for :meth:`let_go`.
            soft: As for :meth:`let_go`.
            views_wait: As for :meth:`let_go`.
            seen: Whether a graph has views of the block, which do not mean replaced data.
            result: Result of the call that ends, whose autograd functions may keep views of it.
            given: Arguments of that call.
        """
        if self.holds > 1:
            self.holds -= 1
            if self.pointing.watched:
                self._forget_holder()
                if result is not None and self.pointing.slot is not None:
                    self._put_away(self.pointing.slot, result, given)
            if dirty:
                self.manager.mark_dirty(self.block)
            return
        pointing, writes, record = self.pointing, self.writes, self.record
        if pointing.veiled and torch._C._is_torch_function_enabled():
            with Plain():  # reading attributes here must not hold the block
                self.let_go_locked(
                    dirty=dirty,
                    soft=soft,
                    views_wait=views_wait,
                    seen=seen,
                    result=result,
                    given=given,
                )
            return
        slot, versions = pointing.slot, writes.count()
        written, refused = dirty or writes.always, None
        if (
            slot is None
            or versions != writes.versions
            or use_count(slot.storage) != slot.baseline + slot.pointed  # Slot.others, in line
            # an alias kept in its place, or another form of it
            or (writes.suspect and not pointing.all_at(slot, forms=True))
        ):
            known = seen or (views_wait and not (written or writes.uncounted))
            same = known and versions == writes.versions
            if slot is None or not same or not pointing.all_at(slot):
                written, refused = self._look_for_writes(slot, versions, written, result, given)
            elif seen:
                self._count_graph_views(slot)
                written = True  # by something else among the views, perhaps, later on
            else:
                slot.viewed = True
        elif seen:
            self.graph_views = 0
        if writes.suspect and not written:
            written = differs_from_home(self.manager, self.block)
        self.holds = 0
        if pointing.watched:
            self.holders.clear()
        change(pointing.hidden)  # from now on every operation on them fetches the block first
        if slot is not None:
            slot.idle = not soft
            self.soft = soft
        if self.manager.threads.waiting:
            self.manager.threads.notify()
        if written or not record.leases:
            self.manager.parts.table.release(self.block.id, dirty=written)
        else:
            record.leases -= 1  # the same in line
        if refused is not None:
            raise refused

    def _count_graph_views(self, slot: Slot) -> None:
        """Counts the views that a graph has of the block.

        If there are as many as the graph had before, masters need not be updated: a user's view
        would be one more.
        """
        views = use_count(slot.storage) - slot.baseline - slot.pointed
        self.writes.stepped += views == self.graph_views
        if not 0 <= self.graph_views <= views:
            self.graph_views = views

    def _look_for_writes(
        self, slot: Slot | None, versions: int, written: bool, result: Any, given: Sequence[Any]
    ) -> tuple[bool, Exception | None]:
        """Checks tensors that were written, or whose bytes other code may write.

        Args:
            slot: Where they point.
            versions: The sum of their version counters.
            written: Whether they are known to be written.
            result: As for :meth:`let_go_locked`.
            given: As for :meth:`let_go_locked`.

        Returns:
            Whether they count as written, and the error about values that cannot be copied.
        """
        if slot is not None and versions != self.writes.versions:
            for shell in self.shells:
                shell.take_in()
            versions = self.writes.count() if self.shells else versions
        # writes while the block was not held count as well, which does no harm
        before, self.writes.versions = self.writes.versions, versions
        refused = None
        if slot is not None and versions != before:
            refused = reshaped(self, slot)
        if slot is None:
            return written or versions != before, refused
        if refused is not None or not self.pointing.all_at(slot, forms=self.writes.suspect):
            refused = refused or bring_home(self, slot)
            self.pointing.point(slot)
            return True, refused
        others = self._put_away(slot, result, given)
        return written or versions != before or others, None  # an alias may write the bytes

    def _put_away(self, slot: Slot, result: Any, given: Sequence[Any]) -> bool:
        """Releases the block from views that functions keep; returns whether others are left.

        Args:
            slot: Where the block is.
            result: As for :meth:`let_go_locked`.
            given: As for :meth:`let_go_locked`.
        """
        aliases = use_count(slot.storage) - slot.baseline - slot.pointed
        if aliases > 0 and not (self.record.fixed or self.writes.always):
            done = put_off(self) if result is None else put_away(self, aliases, result, given)
            return not done
        return aliases != 0

    def may_be_written(self) -> bool:
        """Whether other code can write the bytes, or has written them since the last use."""
        slot = self.pointing.slot
        if slot is not None and use_count(slot.storage) != slot.baseline + slot.pointed:
            return True
        return self.writes.count() != self.writes.versions

    def settle_views(self) -> None:
        """Marks the block as written if views that an operation returned have written it.

        Also if such views still exist and may write it later. The caller has the manager's lock.
        """
        slot = self.pointing.slot
        if slot is None or not slot.viewed:
            return
        slot.viewed = False
        with torch._C.DisableTorchFunctionSubclass():  # they may not be held
            versions = self.writes.count()
        if versions != self.writes.versions or slot.others():
            self.writes.versions = versions
            self.record.leases += 1
            self.manager.parts.table.release(self.block.id, dirty=True)

    def point_softly(self, *, dirty: bool) -> None:
        """Points the tensors at the block without holding it.

        Args:
            dirty: Whether to assume that they will be written.
        """
        manager, pointing = self.manager, self.pointing
        if manager.gate.closed or manager.gate.torn:
            manager.gate.guard()  # before the lock, as in :meth:`hold`
        with manager.lock:
            if self.holds:
                return
            slot = self.manager.replay.use(self.block.id)  # Acquirer.acquire, in line
            if slot is None:
                slot = self._acquirer.decide(self.block)
            if slot is not pointing.slot:
                pointing.point(slot)
            slot.idle, self.soft = False, True
            if dirty or self.writes.always:
                manager.parts.table.release(self.block.id, dirty=True)
            else:
                self.record.leases -= 1  # the same in line

    def unpoint(self) -> None:
        """Points soft tensors elsewhere; the caller has the manager's lock.

        Called before the block leaves HBM.
        """
        if not self.holds and self.pointing.slot is not None:
            self.soft = False
            self.pointing.away()

    def rest(self) -> None:
        """Ends the soft state; the tensors keep pointing at the block until it leaves.

        The caller has the manager's lock.
        """
        if self.soft and not self.holds:
            self.soft = False
            if self.pointing.slot is not None:
                self.pointing.slot.idle = True

    def forked(self) -> None:
        """Hides the tensors in a forked child, so that every operation on them is refused."""
        self.pointing.hide()
        self.pointing.away()

    def repoint(self, slot: Slot) -> None:
        """Points the tensors at the block's new place."""
        self.pointing.point(slot)
        slot.idle = not (self.holds or self.soft)

    def repair(self) -> None:
        """Drops all holds after an exception anywhere; no call holds the group then.

        Tensors that a user has pointed at memory of their own keep those values.
        """
        pointing, writes = self.pointing, self.writes
        if self.stays or not pointing.members:
            return
        for inside in self.insides:
            inside.reset()
        record = self.manager.parts.table.get(self.block.id)
        slot = self.manager.parts.slots.current.get(self.block.id)
        self.holds, self.soft, pointing.rows = 0, False, {}
        self.holders.clear()
        with Plain(), outside_inference(), torch.no_grad():
            if slot is not None and record is not None and record.usable:
                written = take_home(self, slot) or writes.count() != writes.versions or slot.viewed
                record.leases += written
                if written:
                    self.manager.parts.table.mark_dirty(self.block.id)
            for left in (pointing.slot, slot):
                if left is not None:
                    left.pointed, left.idle, left.viewed = 0, False, False
            pointing.slot = None
            pointing.sort()
            pointing.away()
            there = slot is not None and record is not None and record.usable
            if slot is not None and there and slot.is_saved():
                pointing.point(slot)  # a graph shows what they point at
                slot.idle = True
        writes.versions = writes.count()
        pointing.hide()

    def leases(self) -> int:
        """Returns how many leases of the block are this group's own."""
        return 1 if self.holds else 0

    def is_held_here(self) -> bool:
        """Whether a call of this thread (or of any, while only one is seen) may hold it."""
        return not self.pointing.watched or get_ident() in self.holders

    def read_elsewhere(self) -> bool:
        """Whether another thread may be in an operation on the tensors."""
        held = self.holds > 0 and self.manager.threads.several
        return held and self.thread != get_ident()

    def tensors(self) -> Sequence[torch.Tensor]:
        """Returns the tensors that point at the block, in the order of the block's specs."""
        return [m.tensor for m in (*self.entries, *self.buffers)]

    def values(self) -> list[tuple[Member, torch.Tensor]]:
        """Returns the tensors with their values: materialized ones as they are, others on the host.

        Raises:
            StorageError: If the block cannot be read.
        """
        tensors = self.manager.read(self.block)
        found = []
        with self.manager.lock, outside_inference(), torch.no_grad():
            for member in (*self.entries, *self.buffers):
                if member.materialized:
                    value: torch.Tensor | None = member.tensor.detach()
                else:
                    value = given_in_call(self, member)
                found.append((member, tensors[member.index] if value is None else value))
        return found

    def part(self, tensor: torch.Tensor, index: int, old: torch.Tensor) -> None:
        """Separates a parameter that gets other data from the tensors over the same memory.

        As with torch, the tensors that do not get other data keep the former values.

        Args:
            tensor: The one of them that gets other data.
            index: Their index among the tensors of the block.
            old: The former values.
        """
        alike = self.carried_with(index)
        mine = [m for m in alike if m.tensor is tensor]
        own = old.clone() if alike and not mine else old
        for member in mine or alike:
            self.pointing.free(member, own)
            group_of.pop(id(member.tensor), None)

    def carried_with(self, index: int) -> list[Member]:
        """Returns the tensors over the memory of a parameter, by its index in the block."""
        return [m for m in self.carried if m.index == index and not m.materialized]

    def follow(self) -> None:
        """Moves parameters that wrap tensors to the device on which these are by now.

        Raises:
            WrapError: If other references prevent changing one of them.
        """
        for shell in self.shells:
            if len({member.materialized for member in shell.members}) == 1:
                shell.follow()
        (self.pointing.show if self.holds else self.pointing.hide)()

    def take_in(self) -> None:
        """Copies into the block tensors with which programs have replaced those inside parameters.

        Raises:
            ParameterError: If one has another form.
        """
        changed = [shell for shell in self.shells if shell.is_changed()]
        if changed:
            self.hold()
            try:
                for shell in changed:
                    shell.take_in()
            finally:
                self.let_go(dirty=True)

    def shell_of(self, tensor: torch.Tensor | None) -> ShellParam | None:
        """Returns the description of a parameter that wraps tensors of the block, or None."""
        return next((shell for shell in self.shells if shell.param is tensor), None)

    def copy_into(self, memo: dict[int, Any]) -> None:
        """Adds ordinary copies of the tensors to a deepcopy's memo."""
        copies, with_names = dict[int, torch.Tensor](), list[tuple[torch.Tensor, torch.Tensor]]()
        for member, value in self.values():
            own = copies[member.index] = value.clone()
            if isinstance(member, Entry) and member.kind is torch.Tensor:
                own.requires_grad_(member.param.requires_grad)  # no program's own parameter
            elif isinstance(member, Entry) and issubclass(member.kind, nn.Parameter):
                own = member.kind(own, requires_grad=member.param.requires_grad)
            else:
                if isinstance(member, Entry):  # nn.Parameter() of a tensor of another class
                    trained = member.param.requires_grad
                    own = torch.Tensor._make_subclass(member.kind, own, trained)
                with_names.append((member.tensor, own))
            memo[id(member.tensor)] = own
        for member in (m for m in self.carried if not m.materialized):
            own = memo[id(member.tensor)] = copies[member.index].detach()
            with_names.append((member.tensor, own))
        for tensor, own in with_names:  # attributes may be tensors of this block
            own.__dict__.update(deepcopy(tensor.__dict__, memo))
        for shell in self.shells:
            shell.copy_into(memo)
