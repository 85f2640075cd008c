"""The bounds of a training step: its bytes moved, and its parameters stepped, with nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import tiermem
from tiermem.core.block import Extent
from tiermem.io.engine import IoOp, IoRequest
from tiermem.io.probe import choose_engine
from tiermem.storage.arena import HostArena
from tiermem.storage.swapfile import Piece, SwapFile

_CHUNK = 64 << 20
_DOWN = 1 << 30
_ADAM = 1 << 24
_ADAMS = 8
_DEPTH = 8


class BothWays:
    """Copies up and down at once, between page-locked memory and the device.

    What goes up comes from the manager's own arena, whose bytes are only read; what comes down
    goes to 1 GiB of memory of its own. A context manager.

    Args:
        tier: Whose arena and device.
        chunk: Bytes of a copy.
        down: Bytes of host memory that what comes down is written to, over and over.
    """

    def __init__(self, tier: tiermem.TierManager, chunk: int = _CHUNK, down: int = _DOWN) -> None:
        manager = tier._manager
        self.device = manager.parts.device
        self._arena = manager.parts.homes.arena
        self._chunk = min(chunk, self._arena.capacity)
        cuda = self.device.type == "cuda"
        size = max(self._chunk, down // self._chunk * self._chunk)
        self._own = HostArena(tiermem.Tier.DRAM, size, device=self.device)
        made = {"dtype": torch.uint8, "device": self.device}
        self._up, self._down = torch.empty(self._chunk, **made), torch.zeros(self._chunk, **made)
        self._streams = [torch.cuda.Stream(self.device) for _ in range(2)] if cuda else []

    def __enter__(self) -> BothWays:
        return self

    def __exit__(self, *error: object) -> None:
        if self._streams:
            torch.cuda.synchronize(self.device)
        self._own.close()

    def copy(self, up: int, down: int) -> None:
        """Copies so many bytes each way, and does not wait for the device."""
        first, second = self._streams or (None, None)
        # in turn, so that both directions are busy from the beginning to the end
        ups, downs = self._parts(self._arena, up), self._parts(self._own, down)
        waiting = [(ups, up, self._up, first), (downs, down, self._down, second)]
        done = [0, 0]
        left = [parts is not None and total > 0 for parts, total, _, _ in waiting]
        while any(left):
            shares = [done[i] / max(1, waiting[i][1]) if left[i] else 2.0 for i in range(2)]
            at = shares.index(min(shares))
            parts, _, tensor, stream = waiting[at]
            host = next(parts, None)
            if host is None:
                left[at] = False
                continue
            piece = tensor[: host.numel()]
            with torch.cuda.stream(stream):
                if at == 0:
                    piece.copy_(host, non_blocking=True)
                else:
                    host.copy_(piece, non_blocking=True)
            done[at] += host.numel()

    def _parts(self, arena: HostArena, nbytes: int) -> Iterator[torch.Tensor]:
        """Yields the arena's bytes over and over, none of them across two page-locked parts."""
        whole = arena.locked or arena.capacity  # the rest is for homes to come
        while nbytes > 0:
            for begin, end in arena.parts:
                for offset in range(begin, min(end, whole), self._chunk):
                    size = min(self._chunk, nbytes, min(end, whole) - offset)
                    if size <= 0:
                        return
                    yield arena.bytes_of(Extent(offset, size))
                    nbytes -= size


class HostAdam:
    """torch's fused AdamW on the host, fp32, in pieces over and over.

    Args:
        parameters: That :meth:`step` steps.
        elements: Of a piece, about; eight of them and their states, 2 GiB, are what is stepped.
    """

    def __init__(self, parameters: int, elements: int = _ADAM) -> None:
        self._count = -(-parameters // elements)
        size = -(-parameters // self._count)
        self._pieces = []
        for _ in range(min(_ADAMS, self._count)):
            param = torch.nn.Parameter(torch.ones(size))
            param.grad = torch.ones(size)
            optimizer = torch.optim.AdamW([param], fused=True)
            optimizer.step()  # makes the states
            self._pieces.append(optimizer)

    def step(self) -> None:
        """Steps as many parameters as were asked for."""
        for number in range(self._count):
            self._pieces[number % len(self._pieces)].step()

    def beside(self, work: Callable[[], object]) -> None:
        """Steps them in a thread while ``work`` is called."""
        thread = threading.Thread(target=self.step)
        thread.start()
        work()
        thread.join()


class RawMix:
    """O_DIRECT reads and writes at once by the bare I/O engine. A context manager.

    Reads are of a manager's own swap file; writes go to a file of their own beside it, which has
    been written before, since writing to fresh blocks is slower.

    Args:
        tier: Whose swap file.
        folder: Where the second file is.
        written: Its size in bytes.
    """

    def __init__(self, tier: tiermem.TierManager, folder: str, written: int = 2 << 30) -> None:
        homes = tier._manager.parts.homes
        chunk = homes.chunk
        self._chunk = chunk
        self._arena = HostArena(tiermem.Tier.DRAM, chunk * 2 * _DEPTH)
        self._arena.bytes_of(Extent(0, chunk * 2 * _DEPTH)).fill_(1)
        records = [r for r in tier._manager.parts.table if r.home_extent is not None]
        on_disk = [r for r in records if r.home is tiermem.Tier.NVME]
        self._reads = [piece for r in on_disk for piece in homes.swap.pieces(r.home_extent)]
        self._own = SwapFile([Path(folder)], None, chunk)
        written = max(chunk, written // chunk * chunk)
        self._own.grow(written)
        self._writes = self._own.pieces(self._own.allocate(written))
        self._files = len(homes.swap.fds)
        self._engine = choose_engine()[0]()
        self._engine.open(
            [*homes.swap.fds, *self._own.fds], [(self._arena.address, chunk * 2 * _DEPTH)]
        )
        self.move(0, written)

    def __enter__(self) -> RawMix:
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.close()
        self._own.close()
        self._arena.close()

    def move(self, read: int, written: int) -> None:
        """Reads and writes so many bytes, whole pieces, 8 requests of each kind in flight."""
        kinds = (
            _Side(IoOp.READ, self._reads, read, 0, range(_DEPTH)),
            _Side(IoOp.WRITE, self._writes, written, self._files, range(_DEPTH, 2 * _DEPTH)),
        )
        under_way = 0
        while under_way or any(side.left > 0 for side in kinds):
            batch = [request for side in kinds for request in side.requests(self._address)]
            under_way += len(batch)
            if batch:
                self._engine.submit(batch)
            for done in self._engine.wait(None):
                if done.errno:
                    raise OSError(done.errno, "raw I/O failed")
                kinds[done.token >= _DEPTH].free.append(done.token)
                under_way -= 1

    def _address(self, slot: int) -> int:
        return self._arena.address + slot * self._chunk


class _Side:
    """Reads or writes that are still to be made."""

    def __init__(
        self, op: IoOp, pieces: list[Piece], nbytes: int, first: int, slots: range
    ) -> None:
        self.op, self.pieces, self.left, self.first = op, pieces, nbytes, first
        self.free = list(slots)
        self._at = 0

    def requests(self, address_of: Callable[[int], int]) -> list[IoRequest]:
        """Returns as many as there are slots for."""
        made = []
        while self.free and self.left > 0:
            piece, slot = self.pieces[self._at % len(self.pieces)], self.free.pop()
            address = address_of(slot)
            file = self.first + piece.file
            made.append(IoRequest(self.op, file, piece.file_offset, address, piece.nbytes, slot))
            self.left -= piece.nbytes
            self._at += 1
        return made
