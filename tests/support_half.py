"""A Llama of 6.7 B whose weights are in DRAM, on a GPU in virtual time: a page stands for 2 MiB.

The planner, the prefetcher and what repeats a loop are the real ones. The host takes time for
every use, and each pass begins with none of a lead: it has read something from the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from support_virtual import PAGE, Clock, HostBus, Machine, World

from tiermem.config import Policy, Settings
from tiermem.core.block import Block, Role
from tiermem.core.layout import TensorShape
from tiermem.core.loops import Plan
from tiermem.core.pace import Estimates
from tiermem.core.residency import State
from tiermem.runtime.manager import BlockManager

SMALL, LARGE = 16, 43
"""Pages of a matrix of attention, and of one of the rest."""
LAYERS = 32
LAYER = (1, *[SMALL] * 4, *[LARGE] * 3)
"""What a layer holds itself (its norms; a page is far more than they need), then its matrices."""
OUTSIDE = (125, 1)
"""The embedding, which comes first, and the last norm."""
PAGES = (OUTSIDE[0], *LAYER * LAYERS, OUTSIDE[1])
WEIGHTS = LAYERS * (sum(LAYER) - 1)
BESIDE = sum(OUTSIDE) + LAYERS
"""Pages of whatever is no matrix of a layer."""
BUS = 55.3e9 / (2 << 20) * PAGE


@dataclass(frozen=True)
class Host:
    """Seconds that the host takes.

    Attributes:
        use: For the work of the model and of tiermem, per block.
        copy: For asking for a copy.
        prelude: For what comes before the first layer.
    """

    use: float = 157e-6
    copy: float = 100e-6
    prelude: float = 1e-3


def compute(tokens: int) -> list[float]:
    """Returns the seconds of each use of :data:`PAGES` on the device."""
    many = tokens / 2048
    small, large = max(12e-6, 107e-6 * many), max(28e-6, 280e-6 * many)
    norm, attention = max(8e-6, 86e-6 * many), max(12e-6, 321e-6 * many)
    layer = [norm, small, small, small + attention, small + norm, large, large + norm / 2, large]
    return [5e-6, *layer * LAYERS, norm]


@dataclass
class Forward:
    """Forward passes of the model, one after the other.

    Attributes:
        manager: The manager.
        world: The time.
        blocks: One by entry of :data:`PAGES`.
        bus: Its copies.
        host: What the host takes.
    """

    manager: BlockManager
    world: World
    blocks: Sequence[Block]
    bus: HostBus
    host: Host

    def once(self, tokens: int) -> float:
        """Runs a pass and waits for all of it and for what it fetched; returns its seconds."""
        manager, world = self.manager, self.world
        began = world.now
        seconds = compute(tokens)
        manager.begin_pass("forward")
        last = len(self.blocks) - 1
        whole: Block | None = None
        for number, (block, took) in enumerate(zip(self.blocks, seconds, strict=True)):
            if number == 1:
                world.advance(world.now + self.host.prelude)
            world.advance(world.now + self.host.use)
            outer = number == last or number % len(LAYER) == 1
            if outer and whole is not None:
                manager.release(whole)
            manager.acquire(block)
            world.kernel(took)
            if outer and number != last:
                whole = block  # the layer's own tensors are held while its matrices are used
            else:
                manager.release(block)
        manager.end_pass()
        manager.parts.copy.synchronize()
        manager.flush()
        return world.now - began

    def passes(self, tokens: int, n: int = 5, warm: int = 12) -> tuple[float, float]:
        """Returns the median seconds of a pass once the loop is known, and the pages it moves."""
        for _ in range(warm):
            self.once(tokens)
        before = self.bus.nbytes
        found = [self.once(tokens) for _ in range(n)]
        return median(found), (self.bus.nbytes - before) / n / PAGE

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.manager.prefetcher.outlook.plan


@contextmanager
def forward(hbm: int, host: Host | None = None) -> Iterator[Forward]:
    """Opens a manager with so many pages of HBM."""
    world = World(Machine(bus=BUS))
    settings = Settings(
        "cpu", hbm * PAGE, sum(PAGES) * PAGE, (), None, Policy(params="dram"), "auto"
    )
    manager = BlockManager(settings)
    try:
        bus = HostBus(world, (host or Host()).copy)
        manager.parts.transfers.copy = manager.acquirer._copy = bus  # type: ignore[assignment]
        manager.replay._copy = bus  # type: ignore[assignment]
        object.__setattr__(manager.parts, "copy", bus)  # a frozen bundle
        manager.parts.transfers.poisons = False
        manager.prefetcher.fetcher.beside = True
        manager.parts.pass_timer.estimates = Estimates(lambda link, _: {"dram->hbm": BUS}.get(link))
        manager.parts.pass_timer._clock = Clock(world)  # type: ignore[assignment]
        blocks = manager.add_blocks(
            [
                (f"b{n}", Role.PARAM, [TensorShape("t", (p * PAGE,), (1,), torch.uint8, 1)])
                for n, p in enumerate(PAGES)
            ]
        )
        for block in blocks:
            record = manager.record(block)
            record.defined, record.at_home = True, State.VALID
        yield Forward(manager, world, blocks, bus, host or Host())
    finally:
        manager.close()
