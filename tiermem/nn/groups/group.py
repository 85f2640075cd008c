"""A block's parameters and buffers as the module sees them: pointed at HBM, or at a placeholder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import is_inference_mode_enabled, nn
from torch.utils.hooks import RemovableHandle

from tiermem.core.block import Block
from tiermem.nn.groups.above import Calls, WeightViews
from tiermem.nn.groups.away import away_class, group_of
from tiermem.nn.groups.names import HeldDict, TieredDict
from tiermem.nn.groups.replaced import bring_home, reshaped, take_home
from tiermem.nn.tensors.lazy import Ways
from tiermem.nn.tensors.placeholder import shared_placeholder
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.memory.slots import Holder, Slot
from tiermem.runtime.services.verify import differs_from_home

if TYPE_CHECKING:
    from tiermem.nn.groups.addresses import Addresses
    from tiermem.nn.groups.gradunit import GradUnit

ORDINARY = (nn.Parameter, torch.Tensor)
"""Classes that add nothing to what torch does with a tensor."""
_Plain = torch._C.DisableTorchFunctionSubclass
"""Within it ``data`` of a tensor that is away can be set."""


class Member:
    """One tensor of a module whose bytes are in a block.

    Attributes:
        tensor: The parameter or buffer, always the same object.
        group: The group whose block holds its bytes.
        index: Which tensor of the block.
        placeholder: What it holds while released.
        kind: Its class while it is held.
        away: Its class while it is not.
        materialized: Whether a user has it as an ordinary tensor.
    """

    __slots__ = (
        "__weakref__",
        "away",
        "group",
        "index",
        "kind",
        "materialized",
        "placeholder",
        "tensor",
    )

    def __init__(self, tensor: torch.Tensor, group: Group, index: int) -> None:
        """Describes ``tensor``; moves nothing."""
        self.tensor = tensor
        self.group = group
        self.index = index
        self.placeholder = shared_placeholder(
            tensor.shape, tensor.dtype, group.manager.parts.device
        )
        self.kind: type = type(tensor)
        self.away = away_class(self.kind)
        self.materialized = False

    def point(self, data: torch.Tensor, kind: type) -> None:
        """Sets the tensor's data and its class."""
        tensor: Any = self.tensor
        if type(tensor) is not self.kind:
            tensor.__class__ = self.kind
        tensor.data = data
        if kind is not self.kind:
            tensor.__class__ = kind


class Entry(Member):
    """One managed parameter.

    Attributes:
        param: The parameter, always the same object.
        name: Qualified name.
        unit: Block of its gradient, once gradients have a home.
        unit_index: Which tensor of that block.
        has_grad: Whether a gradient is in the tiers.
        displaced: Whether its stand-in made way for a new gradient that is not there yet.
        tracked: Whether gradients of it are taken.
        announced: Whether one was announced and has not come yet.
        waits: Whether one has come, and waits for others of its unit.
        hooks: Handles of the hooks that take them.
        lazy: What stands for the gradient in ``param.grad``.
        ways: How stand-ins get at the gradient, once there was one.
    """

    __slots__ = (
        "announced",
        "displaced",
        "has_grad",
        "hooks",
        "lazy",
        "name",
        "param",
        "tracked",
        "unit",
        "unit_index",
        "waits",
        "ways",
    )

    def __init__(self, param: nn.Parameter, name: str, group: Group, index: int) -> None:
        """Describes ``param``; moves nothing."""
        super().__init__(param, group, index)
        self.param = param
        self.name = name
        self.unit: GradUnit | None = None
        self.unit_index = -1
        self.has_grad = False
        self.displaced = False
        self.tracked = False
        self.announced = self.waits = False
        self.hooks: list[RemovableHandle] = []
        self.lazy: torch.Tensor | None = None
        self.ways: Ways | None = None


class Lender(Protocol):
    """Brings blocks up for operations on tensors that are away."""

    def lend(self, group: Group) -> int:
        """Holds a group for one operation; returns the token for :meth:`lent`."""
        ...

    def lent(self, group: Group, token: int, *, dirty: bool) -> None:
        """Ends the operation that :meth:`lend` began."""
        ...

    def thawed(self, tensor: torch.Tensor) -> None:
        """Called when a parameter's ``requires_grad`` was set."""
        ...

    @property
    def addresses(self) -> Addresses:
        """The addresses that users were given for its tensors."""
        ...

    @property
    def saved(self) -> WeightViews:
        """The hooks that save tensors of its groups for backward."""
        ...


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
        writes_hidden: Whether every use counts as a write.
        suspect: Whether the code of its modules may write weights in a way that torch does not
            count (``weight.data``), so that the bytes are compared after every use.
        merging: Modules that may only while they have merged adapters; looked at in every use.
        entries: Its parameters.
        buffers: Its buffers.
        holds: How many calls hold it.
        soft: Whether it is pointed at without a lease.
        lender: Brings it up for operations on tensors that are away.
        insides: Of the modules that need it.
        freed: Whether its module was taken out of the tiers.
        stepped: How many of its writes were steps of an optimizer.
        stays: Whether it is held for as long as its module is in the tiers.
        resident: Whether gradients and state of its parameters are at home in HBM as well.
        rows: While experts of it come up one by one: what stands for each parameter, by its name
            in the module.
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
        self._acquirer = manager.acquirer
        self._deferred = manager.parts.deferred
        self._release = manager.parts.table.release
        self.block = block
        self.writes_hidden = writes_hidden
        self.lender: Lender
        self.freed = self.stays = self.resident = False
        self.stepped = 0
        self.rows: Mapping[str, Any] | None = None
        self.entries: list[Entry] = []
        self.buffers: list[Member] = []
        self.holds = 0
        self.insides: list[Calls] = []
        self.soft = False
        self.suspect = False
        self.merging: list[Any] = []
        self._names: list[HeldDict] = []
        self._members: Sequence[Member] = ()
        self._tensors: Sequence[torch.Tensor] = ()
        self._indices: Sequence[int] = ()
        self._placeholders: Sequence[torch.Tensor] = ()
        self._whole = False
        self._plain = False
        self._shown: Sequence[tuple[type, list[Any]]] = ()
        self._hidden: Sequence[tuple[type, list[Any]]] = ()
        self._counted: Sequence[torch.Tensor] = ()
        self._versions = 0
        self._slot: Slot | None = None
        manager.parts.holders[block.id] = self

    def ready(self, host_loans: Lender) -> None:
        """Frees the tensors' own memory; from now on their block is fetched by ``host_loans``."""
        self.lender = host_loans
        self._members = (*self.entries, *self.buffers)
        for member in self._members:
            group_of[id(member.tensor)] = self
        self.sort_members()
        self._versions = self._count()  # what was written before is at home already
        self._away()
        _change(self._hidden)

    def suspect_writes(self, unless_empty: Any = None) -> None:
        """Turns on the comparison of the block's bytes with their home copy after uses.

        Args:
            unless_empty: A module that writes only while its ``merged_adapters`` are not empty.
        """
        if unless_empty is None:
            self.merging, self.suspect = [], True
        elif not self.suspect:
            self.merging.append(unless_empty)

    def add_names(self, names: HeldDict) -> None:
        """Enters a module's dictionary, all of whose managed names are tensors of this group."""
        self._names.append(names)
        self.sort_members()
        if self.holds:
            names.__class__ = HeldDict

    def member_of(self, tensor: torch.Tensor) -> Member | None:
        """Returns the member that a tensor is, None where it is none of this group's."""
        return next((member for member in self._members if member.tensor is tensor), None)

    def is_replaced(self) -> bool:
        """Whether its modules have other tensors just now (``torch.func.functional_call``)."""
        own = {id(tensor) for tensor in self._tensors}
        values = [value for names in self._names for value in names.values()]
        return bool(values) and not any(id(value) in own for value in values)

    def free(self, member: Member, data: torch.Tensor) -> None:
        """Makes a tensor an ordinary one over ``data``; it is one once it is ``materialized``."""
        member.point(data, member.kind)
        if self._slot is not None and not member.materialized:
            self._slot.pointed -= 1
        member.materialized = True  # after the tensor has its data: it gets none later
        self.sort_members()

    def recapture(self, member: Member) -> None:
        """Takes a tensor back that was freed."""
        member.materialized = False
        self.sort_members()
        slot = self._slot
        if slot is not self.manager.parts.slots.current.get(self.block.id):
            slot = self._slot = None  # nothing pointed at it: a departure was not reported
        if slot is None:
            member.point(member.placeholder, member.away)
        else:
            member.point(slot.views[member.index], member.kind if self.holds else member.away)
            slot.pointed += 1

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
            if self._deferred.owed:  # of a step that could not be taken back
                self._deferred.pay(self.block.id)
            self.holds += 1
            return
        if self.merging:
            self.suspect = any(module.merged_adapters for module in self.merging)
        slot = self._acquirer.again(self.block) if again and self.soft else None
        if slot is None:
            slot = self._acquirer.acquire(self.block)
        for kind, things in self._shown:  # ordinary ones, since their block is held
            for thing in things:
                thing.__class__ = kind
        if slot is not self._slot:
            self._point(slot, plain=self._plain)
        slot.idle = self.soft = False
        self.holds = 1

    def hide(self) -> None:
        """Intercepts every operation on the tensors, although the block is held."""
        _change(self._hidden)

    def show(self) -> None:
        """Ends :meth:`hide`."""
        _change(self._shown)

    def let_go(self, *, dirty: bool = False, soft: bool = False) -> None:
        """Gives one hold back; the last one points the tensors away.

        Args:
            dirty: Whether it was certainly written.
            soft: Whether to leave the tensors pointed at the block, without a lease.
        """
        with self.manager.lock:
            self.let_go_locked(dirty=dirty, soft=soft)

    def let_go_locked(self, *, dirty: bool = False, soft: bool = False) -> None:
        """Does what :meth:`let_go` does; the caller has the manager's lock."""
        if self.holds > 1:
            self.holds -= 1
            if dirty:
                self.manager.mark_dirty(self.block)
            return
        slot, versions = self._slot, 0
        for param in self._counted:  # :meth:`_count`, in line
            versions += param._version
        written, refused = dirty or self.writes_hidden, None
        if versions != self._versions or (slot is not None and slot.others()):
            written, refused = self._look_for_writes(slot, versions, written)
        if self.suspect and not written:
            written = differs_from_home(self.manager, self.block)
        self.holds = 0
        for kind, things in self._hidden:  # every operation on them is to bring the block first
            for thing in things:
                thing.__class__ = kind
        if slot is not None:
            self.soft = soft
            slot.idle = not soft
        self._release(self.block.id, dirty=written)
        if refused is not None:
            raise refused

    def _look_for_writes(
        self, slot: Slot | None, versions: int, written: bool
    ) -> tuple[bool, Exception | None]:
        """Looks at tensors that were written, or whose bytes something else may write.

        Args:
            slot: Where they point.
            versions: The sum of their counters.
            written: Whether they are known to be written.

        Returns:
            Whether they are to be taken for written, and the error of what cannot be taken over.
        """
        # what was written while the block was not held counts as well, which does no harm
        before, self._versions = self._versions, versions
        refused = None
        if slot is not None and versions != before:
            refused = reshaped(self, slot)
        if slot is not None and (refused is not None or slot.others()):
            refused = refused or bring_home(self, slot)
            self._point(slot)
            return True, refused  # an alias may write the bytes, or has replaced them
        return written or versions != before, refused

    def may_be_written(self) -> bool:
        """Whether other code can write the bytes, or has written them since their last use."""
        if self._slot is not None and self._slot.others():
            return True
        return self._count() != self._versions

    def count_writes(self, tensors: Sequence[torch.Tensor]) -> None:
        """Counts a write of tensors made elsewhere in torch's version counters, and here."""
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)
        self._versions += len(tensors)

    def point_softly(self, *, dirty: bool) -> None:
        """Points the tensors at the block without holding it there.

        Args:
            dirty: Whether to assume that they will be written.
        """
        with self.manager.lock:
            if self.holds:
                return
            slot = self.manager.acquire(self.block)
            if slot is not self._slot:
                self._point(slot)
            slot.idle, self.soft = False, True
            self.manager.release(self.block, dirty=dirty or self.writes_hidden)

    def unpoint(self) -> None:
        """Points tensors without a lease elsewhere; called before the block leaves HBM."""
        with self.manager.lock:
            if not self.holds and self._slot is not None:
                self.soft = False
                self._away()

    def rest(self) -> None:
        """Ends the soft hold; tensors that point at the block do so until it leaves."""
        with self.manager.lock:
            if self.soft and not self.holds:
                self.soft = False
                if self._slot is not None:
                    self._slot.idle = True

    def forked(self) -> None:
        """Hides the tensors in a forked child, where every operation on them is refused."""
        _change(self._hidden)
        self._away()

    def repoint(self, slot: Slot) -> None:
        """Points the tensors at the block's new place."""
        self._point(slot)
        slot.idle = not (self.holds or self.soft)

    def repair(self) -> None:
        """Drops all holds after an exception anywhere; no call holds the group then.

        Tensors that a user has pointed at memory of their own keep those values.
        """
        if self.stays or not self._members:
            return
        for inside in self.insides:
            inside.reset()
        record = self.manager.parts.table.get(self.block.id)
        slot = self.manager.parts.slots.current.get(self.block.id)
        self.holds, self.soft, self.rows = 0, False, None
        with _Plain(), torch.inference_mode(False), torch.no_grad():
            if slot is not None and record is not None and record.usable:
                written = take_home(self, slot) or self._count() != self._versions
                record.leases += written
                if written:
                    self.manager.parts.table.mark_dirty(self.block.id)
            for left in (self._slot, slot):
                if left is not None:
                    left.pointed, left.idle = 0, False
            self._slot = None
            self.sort_members()
            self._away()
        self._versions = self._count()
        _change(self._hidden)

    def leases(self) -> int:
        """Returns how many leases of the block are this group's own."""
        return 1 if self.holds else 0

    def tensors(self) -> Sequence[torch.Tensor]:
        """Returns the tensors that point at the block, in the order of the block's specs."""
        return [m.tensor for m in (*self.entries, *self.buffers)]

    def members(self) -> Sequence[Member]:
        """Returns what lives in the block: parameters, then buffers."""
        return self._members

    def copy_into(self, memo: dict[int, Any]) -> None:
        """Enters ordinary copies of the tensors into a deepcopy's memo."""
        tensors = self.manager.read(self.block)
        for entry in self.entries:
            if entry.materialized:
                with torch.no_grad():
                    source = entry.param.detach()
            else:
                source = tensors[entry.index]
            copy = entry.kind(source.clone(), requires_grad=entry.param.requires_grad)
            memo[id(entry.param)] = copy
        for buffer in self.buffers:
            memo[id(buffer.tensor)] = tensors[buffer.index].clone()

    def sort_members(self) -> None:
        """Lays out what is done to the tensors at every use, so that it takes a loop each."""
        managed = [member for member in self._members if not member.materialized]
        self._tensors = [member.tensor for member in managed]
        self._indices = [member.index for member in managed]
        self._whole = self._indices == list(range(len(self.block.tensors)))
        self._placeholders = [member.placeholder for member in managed]
        self._shown = _by_class([(m.kind, m.tensor) for m in managed], HeldDict, self._names)
        self._hidden = _by_class([(m.away, m.tensor) for m in managed], TieredDict, self._names)
        self._plain = all(member.kind in ORDINARY for member in managed)
        self._counted = [entry.param for entry in self.entries]

    def _point(self, slot: Slot, *, plain: bool = False) -> None:
        """Points the tensors at the block.

        Args:
            slot: Where it is.
            plain: Whether they are of torch's own classes just now, which intercept nothing.
        """
        if is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self._point(slot, plain=plain)
        views = slot.views
        if not self._whole:
            views = [views[index] for index in self._indices]
        if plain:
            for tensor, view in zip(self._tensors, views, strict=True):
                tensor.data = view
        else:
            with _Plain():
                for tensor, view in zip(self._tensors, views, strict=True):
                    tensor.data = view
        if self._slot is not None:
            self._slot.pointed = 0
        slot.pointed = len(self._tensors)
        self._slot = slot

    def _away(self) -> None:
        """Points the tensors at their placeholders."""
        if is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self._away()
        with _Plain():
            for tensor, away in zip(self._tensors, self._placeholders, strict=True):
                tensor.data = away
        if self._slot is not None:
            self._slot.pointed = 0
            self._slot.idle = False
            self._slot = None

    def _count(self) -> int:
        total = 0
        for param in self._counted:
            total += param._version
        return total


def _change(classes: Sequence[tuple[type, list[Any]]]) -> None:
    """Sets the classes of tensors and dictionaries."""
    for kind, things in classes:
        for thing in things:
            thing.__class__ = kind


def _by_class(
    tensors: Sequence[tuple[type, torch.Tensor]], kind: type, names: list[HeldDict]
) -> list[tuple[type, list[Any]]]:
    """Returns which tensors, and which dictionaries, get which class."""
    found: dict[type, list[Any]] = {}
    for of, tensor in tensors:
        found.setdefault(of, []).append(tensor)
    return [*found.items(), (kind, names)]
