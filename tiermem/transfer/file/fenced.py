"""Asynchronous copies between chunks and tensors, and which of them are in progress."""

from __future__ import annotations

from tiermem.transfer.file.copiers import ChunkCopier, Fence, HostCopier
from tiermem.transfer.file.jobs import Chunk, Job


class FencedCopies:
    """Starts copies, and keeps the chunks whose copies are in progress.

    Attributes:
        chunks: Those chunks, in the order in which their copies were started.
    """

    def __init__(self, copier: ChunkCopier) -> None:
        """Starts without copies.

        Args:
            copier: Makes the copies of chunks.
        """
        self.chunks: list[Chunk] = []
        self._copier = copier
        self._on_host = isinstance(copier, HostCopier)
        self._device_only = getattr(copier, "device_only", False)

    def in_host(self, job: Job) -> bool:
        """Whether the bytes of a job are where a helper thread copies them."""
        if job.tensor is None:
            return False
        return self._on_host or (self._device_only and job.tensor.device.type == "cpu")

    def start(self, chunk: Chunk) -> Fence:
        """Starts a chunk's copy, and returns its fence."""
        if chunk.job.transfer.is_read:
            for target, source in chunk.parts():  # on one stream: the last one ends last
                fence = self._copier.to_target(target, source, chunk.job.after)
            chunk.job.transfer.event = fence.event
        else:
            fence = self._copier.from_source(chunk.memory, chunk.part())
        return fence

    def note(self, chunk: Chunk, fence: Fence) -> None:
        """Notes that a copy that was started is in progress, unless it has already ended."""
        if not fence.done():
            chunk.fence = fence
            self.chunks.append(chunk)

    def take_done(self) -> list[Chunk]:
        """Returns the chunks whose copies have ended, and removes them."""
        if not self.chunks:
            return []
        done = [c for c in self.chunks if c.fence is None or c.fence.done()]
        if done:
            self.chunks = [c for c in self.chunks if c not in done]
        return done
