"""Norms of gradients for clipping, computed while the gradients are in HBM."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from tiermem.nn.compat.quiet import quiet, unrecorded
from tiermem.nn.groups.above import Norms
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.formerscale import FormerScale
from tiermem.nn.groups.gradunit import Measure
from tiermem.runtime.memory.slots import Slot


class GradNorms:
    """Norms of gradients, computed when these arrive, and forgotten when they are written.

    If a program changes all gradients before it needs norms (for example by unscaling them), the
    norms are computed after the change, or after the same change of copies.

    Attributes:
        scale: The last scale of a GradScaler.
    """

    def __init__(self, device: torch.device) -> None:
        """Starts with nothing to measure.

        Args:
            device: Where gradients are while they are measured.
        """
        self._device = device
        self._measures: dict[int, Measure] = {}
        self._optimizers: list[Norms] = []  # those that are open
        # by the id of an entry; the last item is the inverse scale that was applied first, or None
        self._known: dict[int, tuple[Measure, torch.Tensor, torch.Tensor | None]] = {}
        self._changed_first = False
        self.scale = FormerScale()

    def ask(self, entries: Iterable[Entry], measure: Measure) -> None:
        """Registers a function that is computed for every further gradient while it is in HBM.

        Args:
            entries: The parameters.
            measure: Returns a small tensor (a norm) for a gradient.
        """
        self._measures.update((id(entry), measure) for entry in entries)

    def add(self, norms: Norms) -> None:
        """Adds the norms of an optimizer that is open."""
        self._optimizers.append(norms)

    def remove(self, norms: Norms, entries: Iterable[Entry]) -> None:
        """Ends the measurements of these norms, except those that other norms use as well.

        Args:
            norms: The norms of an optimizer that is closed.
            entries: Its parameters.
        """
        self._optimizers.remove(norms)
        measure = norms.measure
        if measure is None or any(other.measure is measure for other in self._optimizers):
            return
        for entry in entries:
            if self._measures.get(id(entry)) is measure:
                self.forget(entry)

    def forget(self, entry: Entry) -> None:
        """Ends the measurements of a parameter's gradients."""
        self._measures.pop(id(entry), None)
        self._known.pop(id(entry), None)

    def invalidate(self, entries: Collection[Entry]) -> None:
        """Forgets the norms of gradients that may be written now."""
        self.scale.invalidate(entries)
        if self._known:
            for entry in entries:
                self._known.pop(id(entry), None)

    def known(self, entry: Entry, measure: Measure) -> torch.Tensor | None:
        """Returns what was measured for the present value of a gradient, or None."""
        found = self._known.get(id(entry))
        unit = entry.unit
        if found is None or found[0] is not measure or unit is None:
            self._changed_first = False
            return None
        _, norm, behind = found
        if not unit.awaits if behind is None else self.scale.is_awaited(unit, entry, behind):
            return norm if entry.has_grad else None
        if behind is None:
            self._changed_first = False
        elif not unit.awaits:  # the norm of a gradient that is still scaled is needed
            self.scale.forget()
        return None

    def take(self, entries: Sequence[Entry], slot: Slot) -> None:
        """Measures gradients that have just been written to a slot."""
        self.invalidate(entries)
        if self.scale.inverse is not None:
            with quiet(self._device):
                views = [slot.views[entry.unit_index] for entry in entries]
                copies = self.scale.try_on(entries, views)
                if copies:
                    self._measure(
                        entries, copies, behind=None if self.scale.is_one else self.scale.inverse
                    )
                    return
        if self._measures and not self._changed_first:
            self._measure_there(entries, slot)

    def take_changed(self, entries: Sequence[Entry], slot: Slot) -> None:
        """Measures gradients in a slot that a program has just changed."""
        if self._measures:
            self._changed_first = True
            self._measure_there(entries, slot)

    def _measure_there(self, entries: Sequence[Entry], slot: Slot) -> None:
        with quiet(self._device):
            self._measure(entries, [slot.views[entry.unit_index] for entry in entries])

    def _measure(
        self,
        entries: Sequence[Entry],
        gradients: Sequence[torch.Tensor],
        behind: torch.Tensor | None = None,
    ) -> None:
        for entry, gradient in zip(entries, gradients, strict=True):
            measure = self._measures.get(id(entry))
            if measure is not None:
                self._known[id(entry)] = measure, measure(gradient), behind

    def take_whole(self, entry: Entry, gradient: torch.Tensor, dtype: torch.dtype) -> None:
        """Measures a gradient that is kept in runs, in the dtype in which it is kept."""
        measure = self._measures.get(id(entry))
        if measure is not None:
            with quiet(self._device), unrecorded():
                self._known[id(entry)] = measure, measure(gradient.detach().to(dtype)), None
