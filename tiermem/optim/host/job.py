"""One step on the host: what it has borrowed, where its results go, and how far it is."""

from __future__ import annotations

from collections.abc import Container
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from tiermem.core.block import Block
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.gradunit import GradUnit, Pending
from tiermem.optim.host.exact import Proven
from tiermem.optim.rules.scaling import Scaling
from tiermem.runtime.services.host_staging import HostStage, Load, Order
from tiermem.transfer.copy import Event


@dataclass(slots=True, eq=False)
class Job:
    """One step of one unit on the host.

    Attributes:
        stored: Entries whose gradients are in the tiers.
        gradients: The other gradients, by the id of the parameter.
        changes: What gradients of each block await.
        settled: Ids of those blocks that have had it, in DRAM.
        blocks: What was lent, the weights last.
        views: Their tensors, by id; those of files once they are staged.
        events: To be waited for before anything is touched.
        follows: Whether the weights may have been written since the last step.
        scaling: What a GradScaler left to the step.
        proven: What a step with the device's bits needs; None where torch's CPU kernel makes it.
        load: The blocks among them whose home is a file.
        order: The load, asked for.
        written: Ids of the blocks that were changed.
        renewed: First tensors of the state that the class made anew; views are of the old.
        computed: Whether the step is made; it may still have to go home.
        broken: Whether it is to be begun, or begun anew: its failure was reported.
        returned: Whether the blocks were given back.
        future: Its end in the thread.
        elsewhere: Where results go, by the id of the block, if what was lent shall stay as it is.
        spare: Which tensors of the weights it has to bring there, if no step writes them.
    """

    stored: list[Entry]
    gradients: dict[int, torch.Tensor]
    changes: list[tuple[GradUnit, list[Pending]]]
    blocks: list[Block]
    views: dict[int, list[torch.Tensor]]
    events: list[Event]
    follows: bool
    scaling: Scaling | None
    proven: Proven | None
    load: Load
    stage: HostStage | None
    settled: set[int] = field(default_factory=set)
    order: Order | None = None
    written: set[int] = field(default_factory=set)
    renewed: set[int] = field(default_factory=set)
    computed: bool = False
    broken: bool = True
    returned: bool = False
    future: Future[None] | None = None
    elsewhere: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    spare: set[int] = field(default_factory=set)

    def succeeded(self) -> bool:
        """Whether it is over, and well."""
        if self.future is None or not self.future.done() or not self.computed:
            return False
        return self.stage is None or self.stage.at_home(self.load.blocks)

    def failed(self) -> bool:
        """Whether the step was tried and could not be made."""
        if self.future is None or not self.future.done() or self.future.cancelled():
            return False
        return not self.computed and self.future.exception() is not None

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
