"""Copies between chunks and tensors that run by themselves, and which are not over."""

from __future__ import annotations

from tiermem.transfer.file.copiers import ChunkCopier, Fence, HostCopier
from tiermem.transfer.file.jobs import Chunk, Job


class FencedCopies:
    """Starts copies, and has the chunks in which one is under way.

    Attributes:
        chunks: Those, in the order in which their copies were started.
    """

    def __init__(self, copier: ChunkCopier) -> None:
        """Starts with no copy under way.

        Args:
            copier: How chunks are copied on.
        """
        self.chunks: list[Chunk] = []
        self._copier = copier
        self._on_host = isinstance(copier, HostCopier)
        self._device_only = getattr(copier, "device_only", False)

    def in_host(self, job: Job) -> bool:
        """Whether the bytes of a job lie where a helper thread copies them."""
        if job.tensor is None:
            return False
        return self._on_host or (self._device_only and job.tensor.device.type == "cpu")

    def start(self, chunk: Chunk) -> Fence:
        """Starts a chunk's copy, and returns the fence of it."""
        if chunk.job.transfer.is_read:
            for target, source in chunk.parts():  # on one stream: the last is over last
                fence = self._copier.to_target(target, source, chunk.job.after)
            chunk.job.transfer.event = fence.event
        else:
            fence = self._copier.from_source(chunk.memory, chunk.part())
        return fence

    def note(self, chunk: Chunk, fence: Fence) -> None:
        """Notes that a copy that was started is under way, unless it is over already."""
        if not fence.done():
            chunk.fence = fence
            self.chunks.append(chunk)

    def take_done(self) -> list[Chunk]:
        """Returns the chunks whose copies are over, and has them no longer."""
        if not self.chunks:
            return []
        done = [c for c in self.chunks if c.fence is None or c.fence.done()]
        if done:
            self.chunks = [c for c in self.chunks if c not in done]
        return done
