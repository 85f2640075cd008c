"""One step on the host: what it has borrowed, where its results go, and its progress."""

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
    """The gradients of one step, and the changes that they await.

    Attributes:
        stored: Entries whose gradients are in the tiers.
        loose: The other gradients, by the id of the parameter.
        changes: The changes that gradients of each block await. They remain pending for other steps
            with gradients of the block.
        scaling: What a GradScaler left to the step.
        factors: Factors by which a step with the device's bits multiplies gradients as it reads
            them:
            changes that are not made to the gradients themselves.
        made: Copies of the changes, for the step's thread, by the id of the block: they record
            which gradients have been changed, in what the last try read from files.
    """

    stored: list[Entry]
    loose: dict[int, torch.Tensor]
    changes: list[tuple[GradUnit, list[Pending]]]
    scaling: Scaling | None
    factors: tuple[Factor, ...] = ()
    made: dict[int, list[Pending]] = field(default_factory=dict)

    @property
    def factor(self) -> float:
        """The factor for gradients in a step with the device's bits; waits for the device."""
        return self.factors[0].value() if self.factors else 1.0

    def units(self) -> list[GradUnit]:
        """Returns the units of those in the tiers, each once."""
        units = [entry.unit for entry in self.stored if entry.unit is not None]
        return list({id(u): u for u in units}.values())

    def make_changes(self, found: dict[int, torch.Tensor], files: Container[int]) -> None:
        """Makes the changes that gradients await.

        Args:
            found: The gradients, by the id of the parameter.
            files: Ids of the blocks that are in files: each try reads those again, unchanged.
        """
        for u, changes in self.changes:
            mine = {id(e): found[id(e.param)] for e in self.stored if e.unit is u}
            if u.block.id not in self.made or u.block.id in files:
                self.made[u.block.id] = [change.copy() for change in changes]
            for change in self.made[u.block.id]:
                change.make(mine)

    def show(self, views: dict[int, list[torch.Tensor]], files: Container[int]) -> None:
        """Updates the stand-ins with the changes that were made in DRAM."""
        for u, _ in self.changes:
            if u.block.id in self.made and u.block.id not in files:
                for entry in self.stored:
                    if entry.unit is u:
                        refresh(entry.lazy, views[u.block.id][entry.unit_index])

    def note_made(self, files: Container[int], written: Container[int]) -> None:
        """Records which gradients were changed; a change that no gradient awaits is done.

        Args:
            files: Ids of the blocks that are in files.
            written: Ids of those that were written home, with the changes.
        """
        for u, changes in self.changes:
            if u.block.id in written or u.block.id not in files:
                for change, made in zip(changes, self.made.get(u.block.id, ()), strict=False):
                    change.take_over(made)
            u.pending[:] = [p for p in u.pending if p not in changes or p.is_awaited()]


@dataclass(slots=True, eq=False)
class Staged:
    """The blocks of one step whose homes are in files, while they are in DRAM or in transfer.

    Attributes:
        stage: The staging memory.
        load: The blocks.
        order: The order for the load.
    """

    stage: HostStage
    load: Load
    order: Order | None = None

    def bring(self, views: dict[int, list[torch.Tensor]]) -> None:
        """Waits until they have been read, and adds their tensors by the ids of the blocks."""
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
        gradients: The gradients of the step.
        blocks: The lent blocks, the weights last.
        views: Their tensors, by id; those of files once they are staged.
        events: Events to wait for before any memory is accessed.
        follows: Whether the weights may have been written since the last step.
        proven: What a step with the device's bits needs; None if torch's CPU kernel performs it.
        staged: The blocks whose home is a file; None if there are none.
        written: Ids of the blocks that were changed.
        renewed: First tensors of the state that the class created anew; views show the old ones.
        computed: Whether the step has been computed; it may still have to be written home.
        broken: Whether it has to be begun (again): its failure was reported.
        returned: Whether the blocks were given back.
        future: Its future in the thread.
        elsewhere: Where results go, by the id of the block, if the lent blocks must not change.
        spare: Which tensors of the weights it has to copy there, if no step writes them.
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
        """Announces the blocks in files: they are read ahead, and stay until they are used."""
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
        if gradients.changes and self.proven is None:  # otherwise the loop gets their factor
            gradients.make_changes(found, self.in_files())
        return found

    def succeeded(self) -> bool:
        """Whether it has ended without an error."""
        if self.future is None or not self.future.done() or not self.computed:
            return False
        return self.staged is None or self.staged.stage.at_home(self.staged.load.blocks)

    def failed(self) -> bool:
        """Whether the step was tried and has failed."""
        if self.future is None or not self.future.done() or self.future.cancelled():
            return False
        return not self.computed and self.future.exception() is not None

    def finish(self) -> None:
        """Waits until its thread has performed it, with or without an error."""
        if self.future is not None:
            futures.wait([self.future])

    def wait(self) -> None:
        """Waits until it has ended; its blocks are not used any more."""
        if self.future is not None and not self.future.cancel():
            self.future.exception()

    def report(self) -> None:
        """Waits until the thread has ended it; a failure counts as reported from now on."""
        self.broken = self.future is None or self.future.exception() is not None

    def targets(self) -> dict[int, int] | None:
        """Returns the addresses of results by those of their sources; None for in place."""
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
