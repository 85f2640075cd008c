"""A double for the helper threads of a file mover: the test determines the order."""

from __future__ import annotations

from collections.abc import Callable

from tiermem.transfer.file.jobs import Chunk


class ScriptedHelpers:
    """Does the work in the pump's own thread, when and in the order that a test asks for.

    The pump never stalls: as long as work is left, it is woken.

    Args:
        work: Processes a chunk.
        wake: Wakes the pump.
        choose: Called with the number of waiting chunks; returns the index of the next, or -1 to
            do no more this time.
        fail: Called with a chunk; returns the error to raise for it, if any.

    Attributes:
        eager: Whether the pump stands still until something is done.
        state: ``"new"``, ``"started"`` or ``"closed"``.
    """

    def __init__(
        self,
        work: Callable[[Chunk], None],
        wake: Callable[[], None],
        choose: Callable[[int], int] | None = None,
        fail: Callable[[Chunk], BaseException | None] | None = None,
    ) -> None:
        self.eager = False
        self.state = "new"
        self._work = work
        self._wake = wake
        self._choose = choose or (lambda count: 0)
        self._fail = fail or (lambda chunk: None)
        self._waiting: list[Chunk] = []

    def start(self) -> None:
        """Begins to take chunks."""
        self.state = "started"

    def give(self, chunk: Chunk) -> None:
        """Keeps the chunk until :meth:`collect` processes it."""
        if self.state != "started" or chunk in self._waiting:
            raise RuntimeError(f"{self.state} helpers were given chunk {chunk.index}")
        self._waiting.append(chunk)
        self._wake()

    def collect(self) -> list[Chunk]:
        """Does some of the work and returns the processed chunks."""
        done: list[Chunk] = []
        while self._waiting:
            index = self._choose(len(self._waiting))
            if index < 0:
                self._wake()
                break
            chunk = self._waiting.pop(index % len(self._waiting))
            error = self._fail(chunk)
            if error is not None:
                raise error
            self._work(chunk)
            done.append(chunk)
        return done

    def close(self) -> None:
        """Drops what was not done."""
        self.state = "closed"
        self._waiting.clear()
