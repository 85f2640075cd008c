"""Where the tensors of a block point, and which classes they and their dictionaries have."""

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
"""Tensors and dictionaries, and the class of each."""
Plain = torch._C.DisableTorchFunctionSubclass
"""Context in which ``data`` of a tensor that is not held can be set."""
_address = torch._C.TensorBase.data_ptr


class Pointing:
    """The tensors of one block as modules see them: where they point, and their classes.

    Tensors point at a slot, or at their placeholders. While the block is held, they are *shown*,
    with their own classes. While it is not, they are *hidden*: then every operation on them fetches
    the block first. The classes of the modules' dictionaries change with them.

    The data of these changes is prepared beforehand, so that each change is one loop.

    Attributes:
        members: The tensors in the block: parameters, then buffers.
        tensors: Those that are not materialized.
        plain: Whether the classes of these intercept nothing while they are shown.
        shown: These and each dictionary, with the class of each while the block is held.
        hidden: The same while it is not.
        slot: The slot at which they point; None if they point at their placeholders.
        watched: Whether look-ups of them are intercepted although the block is held.
        veiled: Whether they stay hidden although the block is held: a thread may use them while
            another one holds it, so each operation on them has to hold the block itself.
        alone: Whether each tensor has its own storage over its bytes, so that no code can resize
            one in place over its neighbours; for a block that never moves.
        rows: While experts are copied one by one: the stand-in of each parameter, by the thread of
            the call and the name in the module.
    """

    __slots__ = (
        "_block", "_indices", "_names", "_placeholders", "_shells", "alone", "hidden", "members",
        "plain", "rows", "shown", "slot", "tensors", "veiled", "watched",
    )  # fmt: skip

    def __init__(self, block: Block) -> None:
        """Describes no tensor yet.

        Args:
            block: The block with their bytes.
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
        """Sets the tensors, all of which point at memory of their own.

        Args:
            members: The tensors.
            shells: Parameters that wrap some of them.
        """
        self.members, self._shells = members, shells
        self.sort()

    def add_names(self, names: Iterable[HeldDict]) -> None:
        """Adds modules' dictionaries whose managed names are all tensors of the block."""
        self._names += names
        self.sort()

    def member_of(self, tensor: torch.Tensor) -> Member | None:
        """Returns the member of a tensor; None if it is not in the block."""
        return next((member for member in self.members if member.tensor is tensor), None)

    def is_replaced(self) -> bool:
        """Whether modules have other tensors at the moment (``torch.func.functional_call``)."""
        own = {id(tensor) for tensor in self.tensors}
        values = [value for names in self._names for value in names.values()]
        return bool(values) and not any(id(value) in own for value in values)

    def sort(self) -> None:
        """Prepares the data of changes, after other tensors were materialized."""
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
            slot: Where the block is.
            plain: Whether they have torch's own classes at the moment, which intercept nothing.
        """
        if is_inference_mode_enabled():
            with outside_inference():
                return self.point(slot, plain=plain)
        views = self._views_of(slot)
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
        """Whether each tensor, shown at the moment, still points where it was pointed.

        Args:
            slot: The slot at which it was pointed.
            forms: Whether to compare shapes and strides, too (``weight.data = weight.data.t()``
                does not change the memory).
        """
        views = self._views_of(slot)
        return list(map(_address, self.tensors)) == list(map(_address, views)) and not (
            forms
            and any(
                a.shape != b.shape or a.stride() != b.stride()
                for a, b in zip(self.tensors, views, strict=True)
            )
        )

    def _views_of(self, slot: Slot) -> Sequence[torch.Tensor]:
        """Returns the views in a slot that belong to the tensors, in their order."""
        views = slot.views
        return views if self._indices is None else [views[index] for index in self._indices]

    def has_bytes_of(self, member: Member) -> bool:
        """Whether a tensor points at its bytes in the block, and was not given other memory.

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
        """Restores sizes of tensors, which torch changes before a resize fails."""
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
        if self.slot is not None:  # not one less: after an interrupt this is called again
            others = [m for m in self.members if m is not member and not m.materialized]
            self.slot.pointed = len(others)
        member.materialized = True  # only after the tensor has got its data
        self.sort()

    def recapture(self, member: Member, current: Slot | None, *, held: bool) -> None:
        """Takes back a tensor that was freed.

        Args:
            member: The tensor.
            current: Where the block is now.
            held: Whether it is held.
        """
        member.materialized = False
        self.sort()
        slot = self.slot
        if slot is not current:
            slot = self.slot = None  # nothing pointed at the slot, so no departure was reported
        if slot is None:
            member.point(member.placeholder, member.away)
        else:
            shown = held and not self.veiled
            member.point(slot.views[member.index], member.kind if shown else member.away)
            slot.pointed += 1

    def plain_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns a tensor of a plain class, for code that tests the class of a hidden one.

        Otherwise that code would use another kernel, which rounds differently.

        Returns:
            The tensor; None if the tensor itself can be used, since the kernel is the same anyway:
            if gradients are computed, or its own class intercepts operations.
        """
        member = self.member_of(tensor)
        with Plain():
            if is_grad_enabled() and tensor.requires_grad:
                return None
        if member is None or member.materialized or _intercepts(member.kind):
            return None
        return member.placeholder

    def hide(self) -> None:
        """Hides the tensors even while their block is held."""
        change(self.hidden)

    def show(self) -> None:
        """Ends :meth:`hide`."""
        change(self.shown)


def _intercepts(kind: Any) -> bool:
    """Whether operations on tensors of a class are intercepted."""
    plain = torch._C._disabled_torch_function_impl
    return kind is not torch.Tensor and kind.__torch_function__ is not plain


def change(classes: Classes) -> None:
    """Sets the classes of tensors and dictionaries."""
    set_each(classes[0], "__class__", classes[1])
