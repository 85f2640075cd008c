"""What a pump uses for its work: the I/O engine, and the helper threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiermem.io.engine import IoEngine
from tiermem.transfer.file.copiers import ChunkCopier, HostCopier
from tiermem.transfer.file.helpers import HelperFactory, Helpers, carry_out, threads
from tiermem.transfer.file.jobs import Chunk


class Workers:
    """The I/O engine and the helpers of one pump.

    Attributes:
        engine: Set once it has been created.
        helpers: Likewise.
        name: Name of the engine; "" until it is open.
        detail: How it runs.
    """

    def __init__(
        self,
        engine_factory: Callable[[], IoEngine],
        helper_factory: HelperFactory | None,
        copier: ChunkCopier,
    ) -> None:
        self.engine: IoEngine
        self.helpers: Helpers
        self.name = self.detail = ""
        self._make_engine = engine_factory
        self._make_helpers = threads() if helper_factory is None else helper_factory
        self._copier = copier if isinstance(copier, HostCopier) else HostCopier()

    def make(self) -> None:
        """Creates both; neither is started yet."""
        self.engine = self._make_engine()
        self.helpers = self._make_helpers(self._help, self.engine.wake)

    def _help(self, chunk: Chunk) -> None:
        carry_out(chunk, self._copier)

    def open(self, files: Sequence[int], area: tuple[int, int]) -> None:
        """Opens the engine for some files and one area of memory, and starts the helpers."""
        self.engine.open(files, [area])
        self.helpers.start()
        self.name, self.detail = self.engine.name, self.engine.describe()

    def close(self) -> Exception | None:
        """Ends the helpers, then the engine; returns the first error."""
        first: Exception | None = None
        for close in (self.helpers.close, self.engine.close):
            try:
                close()
            except Exception as error:
                first = first or error
        return first

    def forked(self) -> None:
        """Closes the engine's descriptors in a forked child."""
        engine = getattr(self, "engine", None)
        if engine is not None:
            engine.forked()
