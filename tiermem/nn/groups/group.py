"""A block's parameters and buffers as the module sees them, held together and let go together."""

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
    """The parameters (or large buffers) of one block, held and let go together.

    While *held* the block is leased and the tensors point at it. While *soft*
    they point at it without a lease: it may leave, and then they let go. Once
    let go they point at it still, and where it leaves, at where it was. No program
    can see that, since every operation on them holds the block first; and a block that
    stays, or comes back to the same place, need not be pointed at anew.

    Attributes:
        manager: Where the block is.
        block: The block.
        record: What is known of where it is.
        pointing: Where its tensors point, and what intercepts their use.
        writes: What is known of writes to them.
        entries: Its parameters.
        buffers: Its buffers.
        carried: Other tensors over the memory of its parameters, which go where these go.
        shells: Parameters that wrap some of its tensors.
        holds: How many calls hold it.
        thread: The thread that holds it; 0, which no thread is called, where several do.
        stream: The compute stream on which the first of those calls came.
        holders: The threads of those calls, once several threads are seen; a thread may be missing.
        users: The threads that have called its model, or used it apart, once several are seen.
        apart: Whether it is used outside its own modules' calls.
        soft: Whether it is pointed at without a lease.
        lender: Brings it up for operations on tensors that are away.
        insides: Of the modules that need it.
        freed: Whether its module was taken out of the tiers.
        stays: Whether it is held for as long as its module is in the tiers.
        resident: Whether gradients and state of its parameters are at home in HBM as well.
        in_place: Whether HBM has no room for it: kernels read it in DRAM, where it lies.
        wanted: Where it is read there, the budget of HBM that would have room for it.
        few: Whether its gradients are one unit if they can, since steps bind the host.
        left_open: Puts the interceptors of its modules back; None where none were taken out.
        graph_views: How many views graphs that are left to torch have of it; -1 where unknown.
        pickled: Memory of copies in pickles, where several tensors have the same bytes, by index.
    """

    def __init__(self, manager: BlockManager, block: Block, *, writes_hidden: bool = False) -> None:
        """Describes a block.

        Args:
            manager: Where the block is.
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
        # of buffers it only says that one has another form; of those that stay, nothing is moved
        buffers = () if self.stays else self.buffers
        counted = [member.tensor for member in (*self.entries, *self.carried, *buffers)]
        # what is written inside an operation on a parameter around them, torch counts there alone
        self.writes.begin([*counted, *(shell.param for shell in self.shells)])
        self.pointing.away()
        self.follow()

    def watch(self, user: int = 0) -> None:
        """Has uses by one thread seen while another holds the block; under the manager's lock.

        The tensors are of ordinary classes then, for every thread, and are overwritten where they
        are once the other one has let the block go.

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
        """Notes that a call does no longer; of several, it may not be the thread that began it."""
        if get_ident() in self.holders:
            self.holders.remove(get_ident())
        else:
            self.holders.clear()  # which of them it was is not known

    def note_user(self) -> None:
        """Notes that the calling thread uses its model; the caller has the manager's lock.

        Where a thread may use the tensors while another one holds the block, they stay hidden.
        """
        pointing = self.pointing
        if not pointing.watched or torch._C._current_graph_task_id() != -1:
            return  # autograd's threads are none of the program's
        self.users.add(get_ident())
        if self.apart and len(self.users) > 1 and not (pointing.veiled or self.resident):
            pointing.veiled = True
            pointing.sort()
            pointing.hide()

    def _lift_veil(self) -> None:
        """Has tensors shown again while their block is held, if the other threads have ended.

        A dispatch mode of the user's, such as ``make_fx``, takes those of ordinary classes only.
        """
        self.users &= {thread.ident for thread in enumerate_threads()}
        if self.users <= {get_ident()}:
            self.pointing.veiled = False
            self.pointing.sort()

    def add_names(self, names: Iterable[HeldDict]) -> None:
        """Enters modules' dictionaries, all of whose managed names are tensors of this group."""
        self.pointing.add_names(names)
        if self.holds:
            self.pointing.show()

    def recapture(self, member: Member) -> None:
        """Takes a tensor back that was freed."""
        current = self.manager.parts.slots.current.get(self.block.id)
        self.pointing.recapture(member, current, held=self.holds > 0)

    def hold(self) -> None:
        """Leases the block and points its tensors at it."""
        self.manager.gate.guard()  # before the lock: a forked child may find it taken for ever
        with self.manager.lock:  # threads may evaluate one model together
            self.hold_locked()

    def hold_locked(self, *, again: bool = False) -> None:
        """Does what :meth:`hold` does; the caller has the manager's lock.

        Args:
            again: Whether a hold is a part of the use before, if the tensors are pointed softly.
        """
        if self.holds:
            deferred = self.manager.parts.deferred
            if deferred.owed:  # of a step that could not be taken back
                deferred.pay(self.block.id)
            self.holds += 1
            if self.pointing.watched:
                self.holders.append(get_ident())
            parts = self.manager.parts
            other = self.thread != get_ident()
            if other:
                self.thread = 0  # until all have let it go
            if other or self.stream != self._stream():
                # it may be on its way still, for which this stream does not wait yet
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
        """Does what :meth:`hold_locked` does for a block that is where it was, with no wait.

        It has no place in the order of use then: nothing comes or leaves for it.

        Args:
            stream: The current compute stream.

        Returns:
            Whether it could be done; else nothing was.
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
        """Gives one hold back; the last one points the tensors away.

        Args:
            dirty: Whether it was certainly written.
            soft: Whether to leave the tensors pointed at the block, without a lease.
            views_wait: Whether :meth:`settle_views` will find out what views have written.
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
        """Does what :meth:`let_go` does; the caller has the manager's lock.

        Args:
            dirty: As there.
            soft: As there.
            views_wait: As there.
            seen: Whether a graph has views of the block, which are no sign of replaced data.
            result: Of the call that ends, whose functions may keep views of it.
            given: What that call was given.
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
            with Plain():  # what is looked at here is not to be held for that
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
        change(pointing.hidden)  # every operation on them is to bring the block first
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

        Masters need not follow where there are as many as the graph had before: a user's would be
        one more.
        """
        views = use_count(slot.storage) - slot.baseline - slot.pointed
        self.writes.stepped += views == self.graph_views
        if not 0 <= self.graph_views <= views:
            self.graph_views = views

    def _look_for_writes(
        self, slot: Slot | None, versions: int, written: bool, result: Any, given: Sequence[Any]
    ) -> tuple[bool, Exception | None]:
        """Looks at tensors that were written, or whose bytes something else may write.

        Args:
            slot: Where they point.
            versions: The sum of their counters.
            written: Whether they are known to be written.
            result: As in :meth:`let_go_locked`.
            given: As there.

        Returns:
            Whether they are to be taken for written, and the error of what cannot be taken over.
        """
        if slot is not None and versions != self.writes.versions:
            for shell in self.shells:
                shell.take_in()
            versions = self.writes.count() if self.shells else versions
        # what was written while the block was not held counts as well, which does no harm
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
        """Has views that functions keep hold the block no longer; returns if others are left.

        Args:
            slot: Where the block is.
            result: As in :meth:`let_go_locked`.
            given: As there.
        """
        aliases = use_count(slot.storage) - slot.baseline - slot.pointed
        if aliases > 0 and not (self.record.fixed or self.writes.always):
            done = put_off(self) if result is None else put_away(self, aliases, result, given)
            return not done
        return aliases != 0

    def may_be_written(self) -> bool:
        """Whether other code can write the bytes, or has written them since their last use."""
        slot = self.pointing.slot
        if slot is not None and use_count(slot.storage) != slot.baseline + slot.pointed:
            return True
        return self.writes.count() != self.writes.versions

    def settle_views(self) -> None:
        """Takes the block for written if views have written it that an operation returned.

        Or if they are still there, and may do so later. The caller has the manager's lock.
        """
        slot = self.pointing.slot
        if slot is None or not slot.viewed:
            return
        slot.viewed = False
        with torch._C.DisableTorchFunctionSubclass():  # they may be away
            versions = self.writes.count()
        if versions != self.writes.versions or slot.others():
            self.writes.versions = versions
            self.record.leases += 1
            self.manager.parts.table.release(self.block.id, dirty=True)

    def point_softly(self, *, dirty: bool) -> None:
        """Points the tensors at the block without holding it there.

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
        """Points tensors without a lease elsewhere; the caller has the manager's lock.

        Called before the block leaves HBM.
        """
        if not self.holds and self.pointing.slot is not None:
            self.soft = False
            self.pointing.away()

    def rest(self) -> None:
        """Ends the soft hold; tensors that point at the block do so until it leaves.

        The caller has the manager's lock.
        """
        if self.soft and not self.holds:
            self.soft = False
            if self.pointing.slot is not None:
                self.pointing.slot.idle = True

    def forked(self) -> None:
        """Hides the tensors in a forked child, where every operation on them is refused."""
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
        """Whether a call of the calling thread may hold it; a call of any, while one is seen."""
        return not self.pointing.watched or get_ident() in self.holders

    def read_elsewhere(self) -> bool:
        """Whether another thread may be in an operation on the tensors."""
        held = self.holds > 0 and self.manager.threads.several
        return held and self.thread != get_ident()

    def tensors(self) -> Sequence[torch.Tensor]:
        """Returns the tensors that point at the block, in the order of the block's specs."""
        return [m.tensor for m in (*self.entries, *self.buffers)]

    def values(self) -> list[tuple[Member, torch.Tensor]]:
        """Returns the tensors with their values: ordinary ones as they are, others on the host.

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
        """Parts a parameter, which gets other data, from what was carried along with it.

        That keeps the values of before then, as with torch; or it is what gets other data.

        Args:
            tensor: Which of them gets other data.
            index: Which tensor of the block they are.
            old: Its values.
        """
        alike = self.carried_with(index)
        mine = [m for m in alike if m.tensor is tensor]
        own = old.clone() if alike and not mine else old
        for member in mine or alike:
            self.pointing.free(member, own)
            group_of.pop(id(member.tensor), None)

    def carried_with(self, index: int) -> list[Member]:
        """Returns what is carried along with a parameter, by which tensor of the block it is."""
        return [m for m in self.carried if m.index == index and not m.materialized]

    def follow(self) -> None:
        """Makes parameters around tensors ones of the device where these are by now.

        Raises:
            WrapError: If something else refers to one in a way that keeps it as it is.
        """
        for shell in self.shells:
            if len({member.materialized for member in shell.members}) == 1:
                shell.follow()
        (self.pointing.show if self.holds else self.pointing.hide)()

    def take_in(self) -> None:
        """Copies into the block what programs have put in the place of tensors inside parameters.

        Raises:
            ParameterError: If that is of another form.
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
        """Returns what is known of a parameter that wraps tensors of the block, if it is one."""
        return next((shell for shell in self.shells if shell.param is tensor), None)

    def copy_into(self, memo: dict[int, Any]) -> None:
        """Enters ordinary copies of the tensors into a deepcopy's memo."""
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
