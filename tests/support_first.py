"""How long each of the first passes takes: whole programs on a GPU in virtual time.

The planner, what stays, the prefetcher and what repeats a loop are the real ones, over the virtual
bus of ``support_virtual``. A page stands for 2 MiB of weights in bf16. The host takes time for each
use and each copy, and waits for the device after each pass, as a loop does that reads its result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from support_virtual import PAGE, Clock, HostBus, Machine, World

from tiermem.config import Policy, Settings
from tiermem.core.block import Block, Role
from tiermem.core.forecast import rounded
from tiermem.core.layout import TensorShape
from tiermem.core.pace import Estimates
from tiermem.core.residency import State
from tiermem.runtime.lookahead.walks import Reach
from tiermem.runtime.manager import BlockManager

BYTES = 2 << 20
"""What a page stands for."""
BUS = 55e9 / BYTES * PAGE
FLOPS = 500e12
"""Of the device, a second."""


@dataclass(frozen=True)
class Host:
    """Seconds that the host takes.

    Attributes:
        use: For the work of the model and of tiermem, per block.
        copy: For asking for a copy.
        prelude: For what comes before the second block.
    """

    use: float = 60e-6
    copy: float = 20e-6
    prelude: float = 5e-4


@dataclass(frozen=True)
class Shape:
    """A model.

    Attributes:
        pages: Of each block, in the order of the modules.
        uses: Blocks in order of use; by default that order.
        idle: Blocks whose compute is a look-up, whatever the tokens.
        attention: How much of the compute of a matrix comes on top of it for other things.
    """

    pages: tuple[int, ...]
    uses: tuple[int, ...] = ()
    idle: frozenset[int] = frozenset()
    attention: float = 0.2

    @property
    def order(self) -> Sequence[int]:
        return self.uses or range(len(self.pages))

    def compute(self, block: int, tokens: int) -> float:
        """Returns the seconds of a use on the device."""
        if block in self.idle:
            return 8e-6
        parameters = self.pages[block] * BYTES / 2
        return 8e-6 + (1.0 + self.attention) * 2.0 * parameters * tokens / FLOPS


@dataclass
class Called:
    """What one pass came to.

    Attributes:
        seconds: From its begin to the end of all that it submitted.
        compute: Seconds of its compute.
        moved: Seconds of its copies.
    """

    seconds: float
    compute: float
    moved: float


@dataclass
class Played:
    """A model whose blocks are at home in DRAM, on a device in virtual time."""

    manager: BlockManager
    world: World
    shape: Shape
    blocks: Sequence[Block]
    bus: HostBus
    host: Host
    calls: list[Called] = field(default_factory=list)

    def call(
        self, tokens: int, key: object = "forward", uses: Sequence[int] | None = None
    ) -> Called:
        """Runs a pass and waits for all of it."""
        manager, world, shape = self.manager, self.world, self.shape
        began, before = world.now, self.bus.nbytes
        order = shape.order if uses is None else uses
        self.begin(key, tokens)
        compute = 0.0
        for number, which in enumerate(order):
            if number == 1:
                world.advance(world.now + self.host.prelude)
            world.advance(world.now + self.host.use)
            manager.acquire(self.blocks[which])
            seconds = shape.compute(which, tokens)
            world.kernel(seconds)
            compute += seconds
            manager.release(self.blocks[which])
        manager.end_pass()
        world.advance(world.compute)
        call = Called(world.now - began, compute, (self.bus.nbytes - before) / BUS)
        self.calls.append(call)
        return call

    def begin(self, key: object, tokens: int) -> None:
        """Begins a pass, whose order is guessed from that of the modules."""
        guess = [block.id for block in self.blocks]
        self.manager.begin_pass(key, guess, load=rounded(tokens), again=True)

    def least(self, tokens: int) -> float:
        """Returns the seconds that a pass takes at least: its compute, or what does not fit."""
        away = sum(self.shape.pages) * PAGE - self.manager.parts.table.hbm.capacity
        return max(sum(self.shape.compute(b, tokens) for b in self.shape.order), away / BUS)


def scale_guesses(manager: BlockManager) -> None:
    """Scales the bytes fetched ahead without measurements as everything else is scaled."""
    least = min((64 << 20) // BYTES * PAGE, manager.parts.table.hbm.capacity // 4)
    manager.prefetcher._reach = Reach(None, least)
    manager.prefetcher._maker._least = least


@contextmanager
def played(
    shape: Shape,
    hbm: int,
    host: Host | None = None,
    flops: float = 0.7 * FLOPS,
    depth: int | Literal["auto"] = "auto",
) -> Iterator[Played]:
    """Opens a manager.

    Args:
        shape: The model.
        hbm: Pages of HBM.
        host: What the host takes.
        flops: What is expected of the device; by default it is thought to be slower than it is.
        depth: Blocks that are fetched ahead.
    """
    flops *= PAGE / BYTES * 2  # blocks of one byte an element, of which a page stands for more
    world = World(Machine(bus=BUS))
    settings = Settings(
        "cpu", hbm * PAGE, (sum(shape.pages) + 1) * PAGE, (), None, Policy(params="dram"), depth
    )
    manager = BlockManager(settings)
    try:
        bus = HostBus(world, (host or Host()).copy)
        manager.parts.copy = manager.parts.transfers.copy = manager.acquirer._copy = bus  # type: ignore[assignment]
        manager.replay._copy = bus  # type: ignore[assignment]
        manager.parts.transfers.poisons = False
        manager.prefetcher.fetcher.beside = True
        if depth == "auto":
            scale_guesses(manager)
        manager.parts.pass_timer.estimates = Estimates(
            lambda link, _: {"dram->hbm": BUS}.get(link), flops
        )
        manager.parts.pass_timer._clock = Clock(world)  # type: ignore[assignment]
        blocks = manager.add_blocks(
            [
                (f"b{n}", Role.PARAM, [TensorShape("t", (p * PAGE,), (1,), torch.uint8, 1)])
                for n, p in enumerate(shape.pages)
            ]
        )
        for block in blocks:
            record = manager.record(block)
            record.defined, record.at_home = True, State.VALID
        yield Played(manager, world, shape, blocks, bus, host or Host())
    finally:
        manager.close()


_MATRICES = (16, 4, 4, 16, 43, 43, 43)
DECODER = Shape((125, *_MATRICES * 24, 125), idle=frozenset([0]))
UNIFORM = Shape((24,) * 48)
SMALL = Shape((12,) * 160)
VISION = Shape((2, *(12, 4, 16, 16) * 40, 4))
ALTERNATING = Shape((16, 43) * 32)
GIANT = Shape((200, *(20,) * 40), idle=frozenset([0]))
_HALF = 1 + 24 * 6
ENCODER_DECODER = Shape((62, *(8, 8, 8, 8, 20, 20) * 24, *(8, 8, 8, 8, 8, 8, 8, 8, 20, 20) * 24))
SHAPES = {
    "decoder": DECODER,
    "uniform": UNIFORM,
    "small": SMALL,
    "vision": VISION,
    "alternating": ALTERNATING,
    "giant": GIANT,
    "encoder-decoder": ENCODER_DECODER,
}
