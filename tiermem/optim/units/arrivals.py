"""Which gradients of a backward have arrived, and whether more of a block are to come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.group import Group
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.optim.units.finality import accumulates
from tiermem.optim.units.parted import PartedUnit
from tiermem.optim.units.unit import StepUnit

_HELD_BACK, _BESIDE_MORE = 0.3, 0.5
"""Limits for what steps write last and the next forward writes home, as parts of HBM, or of the HBM
beside what stays. Otherwise the copies would still run when forward begins, and a model that first
reads a value back would wait for all of them."""


class Arrivals:
    """Follows the gradients of one optimizer through a backward.

    Attributes:
        entries: Its managed parameters, by the id of the parameter.
        known: The same.
        units: Its units, by the id of the group of their weights.
    """

    def __init__(self) -> None:
        """Starts without units."""
        self.entries: dict[int, Entry] = {}
        self.known: set[Entry] = set()
        self.units: dict[int, list[StepUnit]] = {}
        self._there: dict[int, set[Entry]] = {}  # arrived gradients, by block
        self._awaited: dict[int, Entry] = {}  # one that is still to come
        self._last: dict[int, Entry] = {}  # the last one in the previous backward

    def add(self, units: Iterable[StepUnit]) -> None:
        """Follows the gradients of units from now on, if they are managed."""
        for unit in units:
            if unit.group is not None:
                mine = self.units.setdefault(id(unit.group), [])
                mine.append(unit)
                # while parts are streamed through HBM, gradients of other units would be evicted
                mine.sort(key=lambda unit: isinstance(unit, PartedUnit))
                self.entries.update((id(entry.param), entry) for entry in unit.entries)
                self.known.update(unit.entries)

    def forget(self) -> None:
        """Forgets arrived gradients, when a backward begins or ends."""
        self._there.clear()
        self._awaited.clear()

    def awaits(self, group: Group, arrived: Sequence[Entry]) -> bool:
        """Whether gradients of a block are still to come after these.

        Asking the engine about each of them costs more than knowing one of them: usually that is
        the last of the previous backward.
        """
        key = id(group)
        there = self._there.setdefault(key, set())
        there.update(arrived)
        awaited = self._awaited.get(key)
        if awaited is not None and awaited not in there:
            return True
        members = [unit.entries for unit in self.units[key]]
        if key in self._last:
            members.insert(0, [self._last[key]])
        for entries in members:
            for entry in entries:
                if entry not in there and accumulates(entry):
                    self._awaited[key] = entry
                    return True
        self._last[key] = arrived[-1]
        return False

    def held_back(self, runtime: ModuleRuntime) -> set[int]:
        """Returns the ids of the groups that backward steps last, and forward uses first."""
        evictor = runtime.manager.parts.evictor
        room = int(evictor.regions.border * (_BESIDE_MORE if evictor.residents else _HELD_BACK))
        found: set[int] = set()
        for group in runtime.groups:
            units = self.units.get(id(group), ())
            blocks = [group.block, *(block for unit in units for block in unit.kept_blocks())]
            room -= sum(block.nbytes for block in blocks if block.id not in evictor.residents)
            if room < 0 and found:
                break
            found.add(id(group))
        return found
