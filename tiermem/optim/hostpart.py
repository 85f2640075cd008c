"""The host's part in the steps of one optimizer (``where``, ``host_share``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from tiermem.errors import ConfigError
from tiermem.optim.host.devicebits import DeviceBits, Movable
from tiermem.optim.host.room import HostRoom
from tiermem.optim.host.share import Speeds
from tiermem.optim.host.side import rooms_of
from tiermem.optim.host.sides import choose_exact_sides, choose_sides
from tiermem.optim.host.steps import HostSteps
from tiermem.optim.parts import OptimizerParts
from tiermem.optim.rounds import Round
from tiermem.optim.rules.groups import frozen_settings
from tiermem.optim.units.unit import StepUnit

Where = Literal["auto", "device", "host", "both"]


def check_where(where: Where, host_share: float | None) -> None:
    """Checks the options that say where steps are performed.

    Raises:
        ConfigError: If ``where`` has no such value, or a share is given without ``"both"``.
    """
    if where not in ("auto", "device", "host", "both"):
        raise ConfigError(
            f"where={where!r}: a step is made on 'device', 'host' or 'both', or where it is "
            "fastest with the device's bits ('auto')"
        )
    if host_share is None:
        return
    is_share = isinstance(host_share, int | float) and 0 <= host_share <= 1
    if where != "both" or not is_share:
        raise ConfigError(
            f"host_share={host_share!r}, where={where!r}: it is a share from 0 to 1 of what "
            "where='both' has the host step"
        )


class HostPart:
    """Decides which units the host steps, and begins their steps there.

    Attributes:
        steps: Performs the steps on the host; None while the host has no unit.
        movable: Moves units between host and device (``where="auto"``), else None.
        speeds: The speeds of host and device, once they were measured.
    """

    def __init__(self, parts: OptimizerParts, where: Where, host_share: float | None) -> None:
        """Starts with all units on the device.

        Args:
            parts: The parts of the optimizer.
            where: Where blocks are stepped.
            host_share: With ``where="both"``: the host's share of the elements; None to measure.
        """
        runtime, tried = parts.runtime, parts.tried
        self._runtime, self._tried, self._units = runtime, tried, parts.units
        self._number = parts.number
        # by default the host only steps units for which it computes the device's bits
        self._where = "device" if where == "auto" else where
        self._share = host_share
        self._bits = DeviceBits(tried.cls, tried.make, runtime.manager.parts.device)
        self._why_device = "" if where == "auto" else f"where={where!r}"
        self.movable: Movable | None = None
        if where == "auto":
            self.movable = self.as_movable()
        self.steps: HostSteps | None = None
        self.speeds: Speeds | None = None

    @property
    def is_chosen(self) -> bool:
        """Whether the user has chosen steps on the host."""
        return self._where != "device"

    @property
    def whole_only(self) -> bool:
        """Whether the host steps all units; it does not step parameters in parts."""
        return self._where == "host"

    def as_movable(self) -> Movable:
        """Returns what knows of units whether the host steps them, for steps made ahead."""
        return self.movable or Movable(self._runtime, self._tried.make)

    def choose(
        self,
        planned: Sequence[StepUnit],
        groups: Sequence[dict[str, Any]],
        *,
        inside: bool,
        ahead: bool,
    ) -> None:
        """Decides which of some new units the host steps.

        Args:
            planned: The new units.
            groups: The parameter groups.
            inside: Whether steps are performed inside backward (``overlap="backward"``).
            ahead: Whether they may be performed there provisionally.

        Raises:
            CapacityError: If the DRAM budget is too small for steps on the host.
        """
        if not self.is_chosen and self.movable is None:
            return
        params = (p for unit in planned for p, _ in unit.members)
        dtype = next(map(self._tried.stepped_dtype, params), torch.float32)
        args = self._runtime, planned, self._tried.make, dtype, groups, self._bits
        earlier = [unit for unit in self._units if unit.host is not None]
        if self.movable is not None:
            why, rates = choose_exact_sides(
                *args, in_backward=inside or ahead, keeps=ahead, earlier=earlier
            )
            some, self._why_device = not why, why
            if rates is not None:
                self.speeds = self.movable.rates = rates
            if some:
                self.movable.take_on(planned, tried=not inside)
        else:
            share = self._where == "both" if self._share is None else float(self._share)
            some, self.speeds = choose_sides(
                *args, share=share, in_backward=inside, earlier=earlier
            )
        if some and self.steps is None:
            units = self._units
            self.steps = HostSteps(
                self._runtime, self._number, units.owed, units.state, units.explain
            )
            self._runtime.grads.host_shares.append(self._has_share)

    def _has_share(self) -> bool:
        """Whether the host performs some of the steps by now."""
        return self.movable is None or self.movable.has_share

    def begin(self, current: Round) -> list[StepUnit]:
        """Begins the steps on the host; returns the units that are left to the device."""
        left = current.left()
        host = self.steps
        if host is not None:
            if self.movable is not None:
                here = [unit for unit in left if not host.is_begun(unit)]
                host.settle_others([unit for unit in here if self.movable.has(unit)])
                self.movable.move(here, current.groups, current.scaling, current.ticket)
            mine = [u for u in left if u.host is not None and not host.is_begun(u)]
            if mine:
                host.begin(mine, frozen_settings(current.groups), current.scaling, current.ticket)
        return [unit for unit in left if unit.host is None]

    def rooms(self, units: Sequence[StepUnit]) -> list[HostRoom]:
        """Returns the DRAM reserved for steps of units on the host, wherever they are now."""
        found = rooms_of(units)
        if self.movable is not None:
            found += [room for room in self.movable.rooms() if room not in found]
        return found

    def abandon(self) -> None:
        """Abandons steps in progress on the host."""
        if self.steps is not None:
            self.steps.abandon()

    def close(self, rooms: Sequence[HostRoom]) -> None:
        """Ends its thread and frees its DRAM.

        Args:
            rooms: The DRAM that was reserved for it.
        """
        if self.steps is not None:
            self.steps.close()
            if self._has_share in self._runtime.grads.host_shares:
                self._runtime.grads.host_shares.remove(self._has_share)
        for room in rooms:
            room.close()

    def __str__(self) -> str:
        """Returns which share of the elements the host steps, or why it steps none."""
        share = self._units.host_share()
        if share:
            bits = "its own" if self._bits.reason else "the device's"
            return f"{share:.2f} of the elements on the host, with {bits} bits"
        trial = None if self.movable is None else self.movable.trial
        if trial is not None and not trial.is_on:
            if not trial.decided:
                return "all on the device: a share on the host is tried later"
            if not trial.is_measured:
                return "all on the device: compute takes as long as the copies that the host spares"
            return "all on the device: with a share on the host steps took longer"
        return f"all on the device: {self._why_device or self._bits.reason}"
