"""Gradients that autograd has just accumulated: those of a unit are taken into the tiers together.

Taking a gradient into the tiers costs the host as much as several kernels: its block is leased, its
stand-in is put into ``param.grad``, and optimizers check whether it was the last one. So a gradient
stays in ``param.grad`` as an ordinary tensor until as many of its unit have arrived as in the
previous backward; then one call copies them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tiermem.core.alike import set_all
from tiermem.core.need import LARGEST_WHOLE
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.gradunit import GradUnit

_AT_MOST = LARGEST_WHOLE
"""Most bytes of gradients that wait for each other, as many as the largest unit has. They are in
memory outside the budgets."""


class NewGradients:
    """Gradients that wait until more of their unit have arrived."""

    def __init__(self, device: torch.device, take_in: Callable[[Sequence[Entry]], None]) -> None:
        """Starts without any.

        Args:
            device: The device of the gradients.
            take_in: Takes the gradients of parameters of one unit into the tiers.
        """
        self._device, self._index = device, device.index or 0
        cuda = device.type == "cuda"
        self._stream_of: Callable[[int], int] | None
        self._stream_of = torch._C._cuda_getCurrentRawStream if cuda else None
        self._take_in = take_in
        self._waiting: list[Entry] = []
        self._unit: GradUnit | None = None
        self._came = 0  # gradients of the current unit that arrived in a row
        self._bytes = 0  # bytes of the waiting ones, if their unit has more than may wait
        self._stream = 0  # the stream on which the waiting ones were computed

    def add(self, entry: Entry) -> None:
        """Adds a gradient that was just accumulated; takes all in if no more are expected."""
        unit, stream = entry.unit, 0 if self._stream_of is None else self._stream_of(self._index)
        if unit is not self._unit or stream != self._stream:
            if self._waiting:
                self.take()
            if unit is not self._unit:
                self._turn_to(unit)
            self._stream = stream
        self._came = came = self._came + 1
        entry.waits = True
        self._waiting.append(entry)
        if unit is None or came >= unit.usual or entry.has_grad:
            self.take()
            return
        if unit.nbytes > _AT_MOST:
            self._bytes += unit.block.tensors[entry.unit_index].nbytes
            if self._bytes >= _AT_MOST:
                self.take()
                return
        # the delay cannot be observed: a gradient that is accumulated further is only a partial
        # sum until then, and hooks after accumulation see the value in the tiers
        hooks = entry.hooks[1].hooks_dict_ref()  # all of the parameter's
        if hooks is None or len(hooks) > 1:
            self.take()

    def take(self) -> None:
        """Takes all waiting gradients in, on the stream on which they were computed."""
        waiting, self._waiting = self._waiting, []
        self._bytes = 0
        set_all(waiting, "waits", False)
        if self._stream_of is None or self._stream == self._stream_of(self._index):
            self._take_in(waiting)
            return
        theirs = torch.cuda.ExternalStream(self._stream, self._device)
        with torch.cuda.stream(theirs):
            self._take_in(waiting)
        torch.cuda.current_stream(self._device).wait_stream(theirs)

    def end_backward(self) -> None:
        """Takes all waiting gradients in: no more arrive."""
        if self._waiting:
            self.take()
        self._turn_to(None)

    def forget(self) -> None:
        """Leaves waiting gradients as ordinary gradients, after an exception anywhere."""
        for entry in self._waiting:
            entry.waits = False
        self._waiting, self._unit, self._bytes = [], None, 0

    def _turn_to(self, unit: GradUnit | None) -> None:
        """Notes how many gradients of a unit arrived in a row, when those of another one begin."""
        if self._unit is not None:
            self._unit.usual = self._came
        self._unit, self._came = unit, 0
