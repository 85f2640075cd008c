"""One step on the host: what it has borrowed, where its results go, and how far it is."""

from __future__ import annotations

from collections.abc import Container
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from tiermem.core.block import Block
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.gradunit import GradUnit, Pending
from tiermem.nn.tensors.lazy import refresh
from tiermem.optim.host.exact import Proven
from tiermem.optim.host.factor import Factor
from tiermem.optim.rules.scaling import Scaling
from tiermem.runtime.services.host_staging import HostStage, Load, Order
from tiermem.transfer.copy import Event


@dataclass(slots=True, eq=False)
class StepGradients:
    """The gradients that one step uses, and what they await.

    Attributes:
        stored: Entries whose gradients are in the tiers.
        loose: The other gradients, by the id of the parameter.
        changes: What gradients of each block await. It stays pending, for other steps of gradients
            of the block.
        scaling: What a GradScaler left to the step.
        factors: What a step with the device's bits multiplies them by as it reads them, if
            anything: what they await, which is not made to them.
        made: Copies of the changes, for the step's thread, by the id of the block: they know of
            which gradients they were made to, in what was read from files in the last try.
    """

    stored: list[Entry]
    loose: dict[int, torch.Tensor]
    changes: list[tuple[GradUnit, list[Pending]]]
    scaling: Scaling | None
    factors: tuple[Factor, ...] = ()
    made: dict[int, list[Pending]] = field(default_factory=dict)

    @property
    def factor(self) -> float:
        """What a step with the device's bits multiplies them by; waits for the device."""
        return self.factors[0].value() if self.factors else 1.0

    def units(self) -> list[GradUnit]:
        """Returns the units of those in the tiers, each once."""
        units = [entry.unit for entry in self.stored if entry.unit is not None]
        return list({id(u): u for u in units}.values())

    def make_changes(self, found: dict[int, torch.Tensor], files: Container[int]) -> None:
        """Makes the changes that gradients await.

        Args:
            found: The gradients, by the id of the parameter.
            files: Ids of the blocks that are in files: each try reads those anew, unchanged.
        """
        for u, changes in self.changes:
            mine = {id(e): found[id(e.param)] for e in self.stored if e.unit is u}
            if u.block.id not in self.made or u.block.id in files:
                self.made[u.block.id] = [change.copy() for change in changes]
            for change in self.made[u.block.id]:
                change.make(mine)

    def show(self, views: dict[int, list[torch.Tensor]], files: Container[int]) -> None:
        """Shows in the stand-ins the changes that were made in DRAM."""
        for u, _ in self.changes:
            if u.block.id in self.made and u.block.id not in files:
                for entry in self.stored:
                    if entry.unit is u:
                        refresh(entry.lazy, views[u.block.id][entry.unit_index])

    def note_made(self, files: Container[int], written: Container[int]) -> None:
        """Takes over which gradients have had their changes; what none awaits any more is done.

        Args:
            files: Ids of the blocks that are in files.
            written: Ids of those that went home, with the changes.
        """
        for u, changes in self.changes:
            if u.block.id in written or u.block.id not in files:
                for change, made in zip(changes, self.made.get(u.block.id, ()), strict=False):
                    change.take_over(made)
            u.pending[:] = [p for p in u.pending if p not in changes or p.is_awaited()]


@dataclass(slots=True, eq=False)
class Staged:
    """The blocks of one step that are at home in files, on their way to DRAM and back.

    Attributes:
        stage: Brings them.
        load: They.
        order: The load, asked for.
    """

    stage: HostStage
    load: Load
    order: Order | None = None

    def bring(self, views: dict[int, list[torch.Tensor]]) -> None:
        """Waits until they are there, and enters their tensors by the ids of the blocks."""
        if self.order is not None:
            for block_id, cargo in self.stage.bring(self.order).items():
                views[block_id] = cargo.views

    def write_home(self, written: set[int]) -> None:
        """Begins to write home those that were changed; a second call does nothing."""
        if self.order is not None:
            self.stage.write_home(self.order, written)

    def give_up(self) -> None:
        """Drops what is in DRAM; the load has to be asked for again."""
        if self.order is not None:
            self.stage.give_up(self.order)
            self.order = None


@dataclass(slots=True, eq=False)
class Job:
    """One step of one unit on the host.

    Attributes:
        gradients: What it steps by.
        blocks: What was lent, the weights last.
        views: Their tensors, by id; those of files once they are staged.
        events: To be waited for before anything is touched.
        follows: Whether the weights may have been written since the last step.
        proven: What a step with the device's bits needs; None where torch's CPU kernel makes it.
        staged: The blocks whose home is a file; None where no home is.
        written: Ids of the blocks that were changed.
        renewed: First tensors of the state that the class made anew; views are of the old.
        computed: Whether the step is made; it may still have to go home.
        broken: Whether it is to be begun, or begun anew: its failure was reported.
        returned: Whether the blocks were given back.
        future: Its end in the thread.
        elsewhere: Where results go, by the id of the block, if what was lent shall stay as it is.
        spare: Which tensors of the weights it has to bring there, if no step writes them.
    """

    gradients: StepGradients
    blocks: list[Block]
    views: dict[int, list[torch.Tensor]]
    events: list[Event]
    follows: bool
    proven: Proven | None
    staged: Staged | None
    written: set[int] = field(default_factory=set)
    renewed: set[int] = field(default_factory=set)
    computed: bool = False
    broken: bool = True
    returned: bool = False
    future: Future[None] | None = None
    elsewhere: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    spare: set[int] = field(default_factory=set)

    def announce(self) -> None:
        """Announces the blocks in files: they are read ahead, and stay until used."""
        staged = self.staged
        if staged is None:
            return
        if staged.order is None:
            staged.order = staged.stage.order(staged.load)
        if not self.computed:
            staged.stage.announce(staged.order)

    def in_files(self) -> set[int]:
        """Returns the ids of the blocks in files that are read for this step alone."""
        return set() if self.staged is None else {block.id for block in self.staged.load.own}

    def settled_gradients(self) -> dict[int, torch.Tensor]:
        """Makes the changes that gradients await; returns gradients by the id of the parameter."""
        gradients = self.gradients
        found = dict(gradients.loose)
        for entry in gradients.stored:
            if entry.unit is not None:
                found[id(entry.param)] = self.views[entry.unit.block.id][entry.unit_index]
        if gradients.changes and self.proven is None:  # else the loop knows their factor
            gradients.make_changes(found, self.in_files())
        return found

    def succeeded(self) -> bool:
        """Whether it is over, and well."""
        if self.future is None or not self.future.done() or not self.computed:
            return False
        return self.staged is None or self.staged.stage.at_home(self.staged.load.blocks)

    def failed(self) -> bool:
        """Whether the step was tried and could not be made."""
        if self.future is None or not self.future.done() or self.future.cancelled():
            return False
        return not self.computed and self.future.exception() is not None

    def finish(self) -> None:
        """Waits until its thread has made it, well or not."""
        if self.future is not None:
            futures.wait([self.future])

    def wait(self) -> None:
        """Waits until it is over, well or not; its blocks are not used any more."""
        if self.future is not None and not self.future.cancel():
            self.future.exception()

    def report(self) -> None:
        """Waits until the thread has ended it; a failure counts as reported from now on."""
        self.broken = self.future is None or self.future.exception() is not None

    def targets(self) -> dict[int, int] | None:
        """Returns the addresses of results by those of what they follow from; None for in place."""
        if not self.elsewhere:
            return None
        pairs = [
            pair
            for number, after in self.elsewhere.items()
            for pair in zip(self.views[number], after, strict=True)
        ]
        return {before.data_ptr(): after.data_ptr() for before, after in pairs if before.numel()}

    def bring_the_rest(self, written: Container[int]) -> None:
        """Copies what no step has written to where results go.

        Args:
            written: Addresses there that were written.
        """
        for number, after in self.elsewhere.items():
            weights = number == self.blocks[-1].id
            for index, (old, new) in enumerate(zip(self.views[number], after, strict=True)):
                if (index in self.spare or not weights) and new.data_ptr() not in written:
                    new.copy_(old)
