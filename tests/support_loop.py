"""A manager that fetches ahead as beside a GPU, and a loop over its blocks."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from support_runtime import EvenClock

from tiermem.config import Policy, Settings
from tiermem.core.block import Block, Role
from tiermem.core.layout import TensorShape
from tiermem.runtime.lookahead.swaps import Swap
from tiermem.runtime.manager import BlockManager

PAGE = 4096


@dataclass
class Loop:
    """A manager that fetches ahead as beside a GPU, what its blocks hold, and what happened.

    Attributes:
        manager: The manager.
        blocks: Blocks of one or two pages, at home in DRAM or in a file.
        values: What every byte of each is.
        events: Blocks that came up or left, in order.
    """

    manager: BlockManager
    blocks: list[Block]
    values: list[int]
    events: list[tuple[str, int]] = field(default_factory=list)

    def use(self, number: int, *, write: bool = False) -> None:
        slot = self.manager.acquire(self.blocks[number])
        assert slot.bytes.eq(self.values[number]).all()
        if write:
            self.values[number] = (self.values[number] + 1) % 251
            slot.bytes.fill_(self.values[number])
        self.manager.release(self.blocks[number], dirty=write)

    def go_round(self, order: list[int] | None = None) -> list[tuple[str, int]]:
        """Uses the blocks in order; returns what came and left."""
        self.events.clear()
        self.manager.begin_pass("loop")
        for number in range(len(self.blocks)) if order is None else order:
            self.use(number)
        return list(self.events)

    def sweep(self, passes: Mapping[Hashable, list[int]]) -> list[tuple[str, int]]:
        """Goes through some passes, by name; returns what came and left."""
        self.events.clear()
        for name, order in passes.items():
            self.manager.begin_pass(name)
            for number in order:
                self.use(number)
        return list(self.events)

    def check(self) -> None:
        self.manager.parts.table.check()
        slots = self.manager.parts.slots
        present = {r.block.id for r in self.manager.parts.table if r.extent is not None}
        assert set(slots.current) == present
        assert set(map(id, slots.by_address.values())) == set(map(id, slots.current.values()))
        for block, value in zip(self.blocks, self.values, strict=True):
            assert self.manager.read(block)[0].eq(value).all()


@contextmanager
def loop(
    blocks: int, slots: int, *, depth: Any = 1, large: int = 0, nvme: Path | None = None
) -> Iterator[Loop]:
    """Opens a manager; ``large`` of its blocks have two pages, and all uses take as long.

    With ``nvme`` the blocks are at home in a file there, and DRAM has room for all of them.
    """
    manager = BlockManager(
        Settings(
            device="cpu",
            hbm=slots * PAGE,
            dram=2 * blocks * PAGE + (0 if nvme is None else 1 << 20),
            nvme=() if nvme is None else (nvme,),
            nvme_bytes=None,
            policy=Policy(params="dram" if nvme is None else "nvme"),
            prefetch_depth=depth,
        )
    )
    manager.prefetcher.fetcher.beside = True
    manager.parts.pass_timer._clock = EvenClock()
    pages = [2 if number < large else 1 for number in range(blocks)]
    made = manager.add_blocks(
        [
            (f"b{n}", Role.PARAM, [TensorShape("w", (p * PAGE,), (1,), torch.uint8, 1)])
            for n, p in enumerate(pages)
        ]
    )
    for number, (block, p) in enumerate(zip(made, pages, strict=True)):
        manager.write_home(block, [torch.full((p * PAGE,), number, dtype=torch.uint8)])
    found = Loop(manager, made, list(range(blocks)))
    up, left, swap = manager.parts.copy.up, manager.parts.transfers.leave, manager.replay._swap

    def rising(target: torch.Tensor, *args: Any, **how: bool) -> Any:
        found.events.append(("up", target.data_ptr() - manager.parts.slots.arena.address))
        return up(target, *args, **how)

    def leaving(block_id: int, **how: bool) -> None:
        found.events.append(("left", block_id))
        left(block_id, **how)

    def swapping(run: Any, made: Swap) -> bool:
        before = len(found.events)
        done = swap(run, made)
        if done and made.leaves is not made.comes:
            found.events.insert(before, ("left", made.leaves.block.id))
        return done

    manager.parts.copy.up = rising  # type: ignore[method-assign]
    manager.parts.transfers.leave = leaving  # type: ignore[method-assign]
    manager.replay._swap = swapping  # type: ignore[method-assign]
    try:
        yield found
    finally:
        manager.close()
