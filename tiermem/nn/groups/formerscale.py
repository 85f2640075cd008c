"""Unscales gradients of a GradScaler without a sweep over them, if the scale has not changed.

``unscale_()`` has to know at once whether a gradient is not finite, for which all gradients would
have to be copied to HBM. But each is there when it arrives, and the scale is mostly that of the
previous step. So copies are unscaled then: whether they are finite does not depend on the scale,
and their norms are those that clipping needs, if the scale is the same again. The gradients
themselves are unscaled when they are next in HBM, by the scale that the program uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

import torch

from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.gradunit import Change, GradUnit, Pending
from tiermem.nn.tensors.lazy import UNSCALE

_IN_VAIN = 16
"""If this many gradients of a parameter in a row were unscaled in copies without a call of
``unscale_()``, the program no longer uses a scale."""


class FormerScale:
    """The last inverse scale, and what was found for gradients that have arrived since.

    Attributes:
        inverse: The factor by which gradients were multiplied, 0-d; None if there was none lately.
        is_one: Whether it is 1: the program only tests whether gradients are finite.
        change: The pending change that unscales gradients; None before there is one.
    """

    def __init__(self) -> None:
        """Starts without a scale."""
        self.inverse: torch.Tensor | None = None
        self.is_one = False
        self.change: Change | None = None
        # by the id of an entry: 1.0 if any gradient that was tested together with it is not finite,
        # and how many these were
        self._infinite: dict[int, tuple[torch.Tensor, int]] = {}
        self._first: Entry | None = None  # the first one that was tested, and how often it was
        self._tried = 0

    @property
    def changes(self) -> bool:
        """Whether the last scale is not 1, so that unscaling writes gradients."""
        return self.inverse is not None and not self.is_one

    def is_again(self, inverse: torch.Tensor) -> bool:
        """Notes the inverse scale; returns whether it was the same before.

        Waits for the device, as a GradScaler does before a step.
        """
        former, self._first, self._tried = self.inverse, None, 0
        if former is not None and torch.equal(former, inverse):
            return True
        self.inverse = inverse.detach().clone()
        self.is_one = float(self.inverse) == 1.0
        return False

    def forget(self) -> None:
        """Forgets the scale."""
        self.inverse = None
        self._infinite.clear()

    def invalidate(self, entries: Iterable[Entry]) -> None:
        """Forgets what was found for gradients that may be written now."""
        if self._infinite:
            for entry in entries:
                self._infinite.pop(id(entry), None)

    def try_on(
        self, entries: Sequence[Entry], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Unscales copies of gradients that have just arrived, by the former scale.

        Args:
            entries: Their parameters.
            gradients: The gradients in HBM; they are not written.

        Returns:
            The copies; none if there is no scale, no memory for them, or one of them is complex.
        """
        if self.inverse is None or any(map(torch.is_complex, gradients)):  # no kernel scales those
            return []
        self._first = self._first or entries[0]
        self._tried += self._first in entries
        if self._tried > _IN_VAIN:
            self.forget()
            return []
        try:
            copies = [gradient.clone() for gradient in gradients]
        except torch.OutOfMemoryError:
            self.forget()
            return []
        infinite = torch.zeros(1, dtype=torch.float32, device=copies[0].device)
        _undo(copies, self.inverse, infinite)
        self._infinite.update((id(entry), (infinite, len(entries))) for entry in entries)
        return copies

    def knows(self, unit: GradUnit, entries: Sequence[Entry]) -> bool:
        """Whether it is known whether the present gradients of a unit are finite.

        Not if they were tested together with others that the program does not unscale or has
        written.
        """
        if unit.awaits or unit.runs:
            return False
        asked: Counter[int] = Counter()
        together: dict[int, int] = {}
        for entry in entries:
            found = self._infinite.get(id(entry))
            if found is None:
                return False
            flag, together[id(flag)] = found
            asked[id(flag)] += 1
        return asked == together

    def infinite(self, entries: Iterable[Entry]) -> torch.Tensor:
        """Returns 1.0 if any of some gradients for which it is known is not finite, else 0.0."""
        found = {id(flag): flag for flag, _ in (self._infinite[id(entry)] for entry in entries)}
        return torch.stack(list(found.values())).amax(0)

    def new_change(self) -> Change:
        """Returns the change that unscales gradients that are known to be finite or not."""
        if self.inverse is None:
            raise RuntimeError("no scale was undone yet")
        self.change = partial(_undo, inverse=self.inverse)
        return self.change

    def is_awaited(self, unit: GradUnit, entry: Entry, inverse: torch.Tensor) -> bool:
        """Whether that change, with an inverse, is pending for a gradient, and no other one."""
        if inverse is not self.inverse:
            return False
        return len(unit.pending) == 1 and self._is_of(unit.pending[0], entry)

    def _is_of(self, pending: Pending, entry: Entry) -> bool:
        """Whether a pending change is that one, and includes this gradient."""
        return pending.change is self.change and any(e is entry for e in pending.entries)


def _undo(
    gradients: Sequence[torch.Tensor],
    inverse: torch.Tensor,
    infinite: torch.Tensor | None = None,
) -> None:
    """Multiplies gradients as ``GradScaler.unscale_`` does, by its kernel.

    Args:
        gradients: Written in place.
        inverse: What they are multiplied by, 0-d.
        infinite: Set to 1.0 if one of them is not finite.
    """
    device = gradients[0].device
    found = torch.zeros(1, dtype=torch.float32, device=device) if infinite is None else infinite
    inverse = inverse.to(device)
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        alike = [gradient for gradient in gradients if gradient.dtype is dtype]
        UNSCALE(alike, found, inverse)
