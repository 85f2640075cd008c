"""A GradScaler's scale, undone the way it was undone last, without a pass over the gradients.

``unscale_()`` asks at once whether a gradient is not finite, so all of them had to come to HBM for
it. But they are there as they arrive, and the scale is mostly that of the step before. So it is
tried on copies of them then: whether they are finite does not depend on the scale, and their norms
behind it are those that clipping asks for, if it is the same again. The gradients themselves are
changed when they are next in HBM, by the scale that the program undoes.
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
"""So many gradients of a parameter that were tried in a row, and no scale was undone: the program
has none any more."""


class FormerScale:
    """What the scale was undone by last, and what was found of gradients that have arrived since.

    Attributes:
        inverse: What gradients were multiplied by, 0-d; None where no scale was undone lately.
        is_one: Whether that is 1: somebody only looks whether gradients are finite.
        change: What undoes the scale of gradients that wait for it; None before there is one.
    """

    def __init__(self) -> None:
        """Starts without a scale."""
        self.inverse: torch.Tensor | None = None
        self.is_one = False
        self.change: Change | None = None
        # by the id of an entry: 1.0 where any is not finite of those that were tried together, and
        # how many these were
        self._infinite: dict[int, tuple[torch.Tensor, int]] = {}
        self._first: Entry | None = None  # the first one that was tried, and how often it was
        self._tried = 0

    @property
    def changes(self) -> bool:
        """Whether a scale was undone lately that is not 1, so that gradients were written."""
        return self.inverse is not None and not self.is_one

    def is_again(self, inverse: torch.Tensor) -> bool:
        """Notes by what a scale is undone; returns whether it was the same before.

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
        """Forgets what was found of gradients that may be written now."""
        if self._infinite:
            for entry in entries:
                self._infinite.pop(id(entry), None)

    def try_on(
        self, entries: Sequence[Entry], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Undoes the former scale in copies of gradients that have just arrived.

        Args:
            entries: Their parameters.
            gradients: In HBM; they are not written.

        Returns:
            The copies; none where there is no scale, no memory for them, or one of them is complex.
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
        """Whether it is known of gradients of a unit, as they are now, whether they are finite.

        Not where others were tried with them, which the program does not ask for or has written.
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
        """Returns 1.0 where any of some gradients that are known is not finite, else 0.0."""
        found = {id(flag): flag for flag, _ in (self._infinite[id(entry)] for entry in entries)}
        return torch.stack(list(found.values())).amax(0)

    def new_change(self) -> Change:
        """Returns the change that undoes the scale in gradients of which it is known."""
        if self.inverse is None:
            raise RuntimeError("no scale was undone yet")
        self.change = partial(_undo, inverse=self.inverse)
        return self.change

    def is_awaited(self, unit: GradUnit, entry: Entry, inverse: torch.Tensor) -> bool:
        """Whether a gradient of a unit awaits that change by an inverse, and the unit no other."""
        if inverse is not self.inverse:
            return False
        return len(unit.pending) == 1 and self._is_of(unit.pending[0], entry)

    def _is_of(self, pending: Pending, entry: Entry) -> bool:
        """Whether what is pending is that change, of this gradient too."""
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
