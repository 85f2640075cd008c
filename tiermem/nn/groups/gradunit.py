"""Blocks of gradients, and the changes that are pending for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from tiermem.core.block import Block
from tiermem.core.layout import split
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.group import Group

Change = Callable[[list[torch.Tensor]], None]
Measure = Callable[[torch.Tensor], torch.Tensor]


class Pending:
    """A pending change of gradients of one block; applied once to each, even if interrupted.

    Attributes:
        entries: The parameters of the gradients.
        change: Called with the gradients.
    """

    __slots__ = ("_done", "_under_way", "change", "entries")

    def __init__(self, entries: Sequence[Entry], change: Change) -> None:
        self.entries = list(entries)
        self.change = change
        self._done: list[Entry] = []
        self._under_way: list[tuple[Entry, torch.Tensor, int]] = []

    def make(self, found: dict[int, torch.Tensor]) -> None:
        """Changes the gradients that exist and are not changed yet; may be called again.

        Args:
            found: Gradients by the id of their entry; each is changed in place with one call.
        """
        self.note_written()
        left = [e for e in self.entries if id(e) in found and e not in self._done]
        if not left:
            return
        self._under_way = [(e, found[id(e)], found[id(e)]._version) for e in left]
        try:
            self.change([found[id(entry)] for entry in left])
        finally:  # after Ctrl-C or out of memory: torch's version counters say which are changed
            self.note_written()

    def is_due_to(self, entries: Iterable[Entry]) -> bool:
        """Whether it still has to be applied to each of some gradients."""
        left = {id(entry) for entry in self.entries} - {id(entry) for entry in self._done}
        return not self._under_way and left.issuperset(map(id, entries))

    def is_awaited(self) -> bool:
        """Whether it still has to be applied to any gradient that exists."""
        return any(entry.has_grad and entry not in self._done for entry in self.entries)

    def copy(self) -> Pending:
        """Returns an independent copy without the call in progress, for gradients read again."""
        found = Pending(self.entries, self.change)
        found._done = list(self._done)
        return found

    def take_over(self, copy: Pending) -> None:
        """Notes as changed what a copy has changed, if its gradients are used from now on."""
        self._done = [*self._done, *(e for e in copy._done if e not in self._done)]

    def note_written(self) -> None:
        """Notes which gradients were changed by a call that may have been interrupted."""
        written = [e for e, tensor, version in self._under_way if tensor._version != version]
        self._done = [*self._done, *(e for e in written if e not in self._done)]
        self._under_way = []


class GradUnit:
    """One block of gradients: those of consecutive parameters of one group.

    Attributes:
        block: The block; for a gradient in runs, the first one.
        blocks: All of its blocks.
        nbytes: Bytes of these.
        entries: Its parameters, in the order of the block's specs.
        group: Their group.
        runs: The runs of its only gradient, if that is too large to be in HBM as a whole; else
            empty.
        pending: Pending changes of its gradients (the factor of a clipping), applied when the block
            is next in HBM, so that they need no sweep of their own. For a gradient in runs, each
            run has its own list.
        usual: How many of its gradients arrived in a row in the last backward.
    """

    __slots__ = ("block", "blocks", "entries", "group", "nbytes", "pending", "runs", "usual")

    def __init__(
        self, block: Block, entries: list[Entry], group: Group, runs: Sequence[GradRun] = ()
    ) -> None:
        self.block = block
        self.blocks: Sequence[Block] = [run.block for run in runs] or [block]
        self.nbytes = sum(block.nbytes for block in self.blocks)
        self.entries = entries
        self.group = group
        self.runs = runs
        self.pending: list[Pending] = []
        self.usual = 0

    @property
    def parts(self) -> Sequence[GradUnit]:
        """The parts that are in HBM separately: the runs, or the unit as a whole."""
        return self.runs or (self,)

    @property
    def awaits(self) -> bool:
        """Whether a change is pending for any part."""
        return any(run.pending for run in self.runs) if self.runs else bool(self.pending)

    def of(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the elements that it has of the gradient of one of its parameters."""
        return gradient

    def await_change(self, entries: Sequence[Entry], change: Change) -> None:
        """Adds a pending change of the gradients of some of its parameters."""
        for part in self.parts:
            part.pending.append(Pending(entries, change))

    def forget_change(self, change: Change) -> None:
        """Removes a change that has not been applied."""
        for part in self.parts:
            part.pending[:] = [found for found in part.pending if found.change is not change]

    def forget_changes(self) -> None:
        """Removes all changes, as there are no gradients."""
        for part in self.parts:
            part.pending.clear()


class GradRun(GradUnit):
    """A run of the elements of one gradient, in a block of its own.

    Attributes:
        begin: Its first element.
        end: The first after it.
    """

    __slots__ = ("begin", "end")

    def __init__(self, block: Block, entry: Entry, begin: int, end: int) -> None:
        super().__init__(block, [entry], entry.group)
        self.begin, self.end = begin, end

    def of(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns its elements of the whole gradient."""
        return gradient.reshape(-1)[self.begin : self.end]


def divide(group: Group, limit: int) -> list[list[Entry]]:
    """Divides a group's trainable parameters into units of at most ``limit`` bytes each."""
    entries = [e for e in group.entries if e.param.requires_grad and e.unit is None]
    sizes = [e.param.numel() * e.param.element_size() for e in entries]
    return [[entries[i] for i in run] for run in split(sizes, limit)]


def make_first(pending: list[Pending], found: dict[int, torch.Tensor]) -> None:
    """Applies the first of some pending changes and removes it."""
    first = pending[0]
    first.make(found)
    del pending[0]


def units_of(entries: Iterable[Entry]) -> list[GradUnit]:
    """Returns the units of parameters, each once."""
    return [*{id(e.unit): e.unit for e in entries if e.unit is not None}.values()]
