"""Where the tensors of a block point, and of which class they and their dictionaries are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import is_grad_enabled, is_inference_mode_enabled, nn

from tiermem.core.alike import set_each
from tiermem.core.block import Block
from tiermem.nn.groups.entry import Member
from tiermem.nn.groups.names import HeldDict, TieredDict
from tiermem.nn.groups.shellparam import ShellParam
from tiermem.runtime.base.functorch import outside_inference
from tiermem.runtime.memory.slots import Slot, in_own_storage

ORDINARY = (nn.Parameter, torch.Tensor)
"""Classes that add nothing to what torch does with a tensor."""
Classes = tuple[Sequence[Any], Sequence[type]]
"""Tensors and dictionaries, and as many classes."""
Plain = torch._C.DisableTorchFunctionSubclass
"""Within it ``data`` of a tensor that is away can be set."""
_address = torch._C.TensorBase.data_ptr


class Pointing:
    """What modules see of one block: where its tensors point, and what intercepts their use.

    Tensors point at a slot, or at their placeholders. They are *shown* while the block is held,
    of their own classes, and *hidden* while it is not: then every operation on them brings the
    block first. The dictionaries that modules have them in change with them.

    What is done to them at every use is laid out beforehand, so that it takes a loop each.

    Attributes:
        members: What lives in the block: parameters, then buffers.
        tensors: Those that are not materialized, which point here or there.
        plain: Whether those are of classes that intercept nothing while they are shown.
        shown: Them and each dictionary, and of which class each is while the block is held.
        hidden: The same for while it is not.
        slot: Where they point; None where that is their placeholders.
        watched: Whether look-ups of them are seen although the block is held.
        veiled: Whether they stay hidden although the block is held: a thread may use them while
            another one holds it, and each of their operations holds the block itself then.
        alone: Whether each tensor has a storage of its own over its bytes, so that no code can make
            one longer in place, over those beside it; for a block that stays where it is.
        rows: While experts come up one by one: what stands for each parameter, by the thread whose
            call it is and the name in the module.
    """

    __slots__ = (
        "_block", "_indices", "_names", "_placeholders", "_shells", "alone", "hidden", "members",
        "plain", "rows", "shown", "slot", "tensors", "veiled", "watched",
    )  # fmt: skip

    def __init__(self, block: Block) -> None:
        """Describes no tensor yet.

        Args:
            block: Where their bytes are.
        """
        self._block = block
        self.members: Sequence[Member] = ()
        self._shells: Sequence[ShellParam] = ()
        self.tensors: Sequence[torch.Tensor] = ()
        self.plain = self.watched = self.veiled = self.alone = False
        self.shown: Classes = (), ()
        self.hidden: Classes = (), ()
        self.slot: Slot | None = None
        self.rows: dict[int, dict[str, Any]] = {}
        self._names: list[HeldDict] = []
        self._indices: Sequence[int] | None = ()  # None where they are all of the block's
        self._placeholders: Sequence[torch.Tensor] = ()  # of the tensors

    def begin(self, members: Sequence[Member], shells: Sequence[ShellParam] = ()) -> None:
        """Takes the tensors, all of which point at memory of their own.

        Args:
            members: The tensors.
            shells: Parameters that wrap some of them.
        """
        self.members, self._shells = members, shells
        self.sort()

    def add_names(self, names: Iterable[HeldDict]) -> None:
        """Enters modules' dictionaries, all of whose managed names are tensors of the block."""
        self._names += names
        self.sort()

    def member_of(self, tensor: torch.Tensor) -> Member | None:
        """Returns the member that a tensor is, None where it is none of the block's."""
        return next((member for member in self.members if member.tensor is tensor), None)

    def is_replaced(self) -> bool:
        """Whether modules have other tensors just now (``torch.func.functional_call``)."""
        own = {id(tensor) for tensor in self.tensors}
        values = [value for names in self._names for value in names.values()]
        return bool(values) and not any(id(value) in own for value in values)

    def sort(self) -> None:
        """Lays out what is done to the tensors at every use, once other ones are materialized."""
        managed = [member for member in self.members if not member.materialized]
        self.tensors = [member.tensor for member in managed]
        indices = [member.index for member in managed]
        whole = indices == list(range(len(self._block.tensors)))
        self._indices = None if whole else indices
        self._placeholders = [member.placeholder for member in managed]
        names = self._names
        held = TieredDict if self.watched else HeldDict
        shells = [s for s in self._shells if not any(m.materialized for m in s.members)]
        things = [*self.tensors, *(s.param for s in shells), *names]
        kinds = [*(m.kind for m in managed), *(s.kind for s in shells), *(held for _ in names)]
        away = [*(m.away for m in managed), *(s.away for s in shells)]
        self.shown = things, kinds
        self.hidden = things, [*away, *(TieredDict for _ in names)]
        if self.veiled:
            self.shown = self.hidden
        self.plain = not self.veiled and all(member.kind in ORDINARY for member in managed)

    def point(self, slot: Slot, *, plain: bool = False) -> None:
        """Points the tensors at the block.

        Args:
            slot: Where it is.
            plain: Whether they are of torch's own classes just now, which intercept nothing.
        """
        if is_inference_mode_enabled():
            with outside_inference():
                return self.point(slot, plain=plain)
        views = slot.views
        if self._indices is not None:
            views = [views[index] for index in self._indices]
        if self.alone:
            views = [in_own_storage(view) for view in views]
        if plain:
            set_each(self.tensors, "data", views)
        else:
            with Plain():
                set_each(self.tensors, "data", views)
        before = self.slot
        if before is not None:
            before.pointed = 0
        slot.pointed = len(self.tensors)
        slot.pointer = self
        self.slot = slot

    def all_at(self, slot: Slot, *, forms: bool = False) -> bool:
        """Whether each tensor, shown just now, is where it was pointed.

        Args:
            slot: Where that was.
            forms: Whether to look at shapes and strides as well (``weight.data = weight.data.t()``
                leaves the memory as it was).
        """
        views = slot.views
        if self._indices is not None:
            views = [views[index] for index in self._indices]
        return list(map(_address, self.tensors)) == list(map(_address, views)) and not (
            forms
            and any(
                a.shape != b.shape or a.stride() != b.stride()
                for a, b in zip(self.tensors, views, strict=True)
            )
        )

    def has_bytes_of(self, member: Member) -> bool:
        """Whether a tensor shows its bytes of the block, and was not given other memory.

        Args:
            member: A tensor of a block that is in HBM.
        """
        view = None if self.slot is None else self.slot.views[member.index]
        data = member.tensor
        return (
            view is not None
            and _address(data) == _address(view)
            and (data.shape, data.stride()) == (view.shape, view.stride())
        )

    def restore_sizes(self) -> None:
        """Gives tensors their sizes back, which torch changes before it finds no room for more."""
        slot = self.slot
        if slot is None:
            return
        with Plain(), outside_inference(), torch.no_grad():
            for member in self.members:
                view: Any = slot.views[member.index]
                same = _address(member.tensor) == _address(view)
                if same and not (member.materialized or self.has_bytes_of(member)):
                    member.tensor.data = in_own_storage(view) if self.alone else view

    def away(self) -> None:
        """Points the tensors at their placeholders."""
        if is_inference_mode_enabled():
            with outside_inference():
                return self.away()
        with Plain():
            set_each(self.tensors, "data", self._placeholders)
        slot = self.slot
        if slot is not None:
            slot.pointed = 0
            slot.idle = False
            self.slot = None

    def free(self, member: Member, data: torch.Tensor) -> None:
        """Makes a tensor an ordinary one over ``data``; it is one once it is ``materialized``."""
        member.point(data, member.kind)
        if self.slot is not None:  # not one less: cut short after this, it is called again
            others = [m for m in self.members if m is not member and not m.materialized]
            self.slot.pointed = len(others)
        member.materialized = True  # after the tensor has its data: it gets none later
        self.sort()

    def recapture(self, member: Member, current: Slot | None, *, held: bool) -> None:
        """Takes a tensor back that was freed.

        Args:
            member: The tensor.
            current: Where the block is now.
            held: Whether it is held.
        """
        member.materialized = False
        self.sort()
        slot = self.slot
        if slot is not current:
            slot = self.slot = None  # nothing pointed at it: a departure was not reported
        if slot is None:
            member.point(member.placeholder, member.away)
        else:
            shown = held and not self.veiled
            member.point(slot.views[member.index], member.kind if shown else member.away)
            slot.pointed += 1

    def plain_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns a tensor of a plain class, for code that asks a hidden one for its class.

        It would go another way, which rounds differently.

        Returns:
            None where the tensor itself will do: where gradients are taken, or its own class
            intercepts operations, all go the same way.
        """
        member = self.member_of(tensor)
        with Plain():
            if is_grad_enabled() and tensor.requires_grad:
                return None
        if member is None or member.materialized or _intercepts(member.kind):
            return None
        return member.placeholder

    def hide(self) -> None:
        """Intercepts every operation on the tensors, whether or not their block is held."""
        change(self.hidden)

    def show(self) -> None:
        """Ends :meth:`hide`."""
        change(self.shown)


def _intercepts(kind: Any) -> bool:
    """Whether a class of tensors is one whose operations are intercepted."""
    plain = torch._C._disabled_torch_function_impl
    return kind is not torch.Tensor and kind.__torch_function__ is not plain


def change(classes: Classes) -> None:
    """Sets the classes of tensors and dictionaries."""
    set_each(classes[0], "__class__", classes[1])
