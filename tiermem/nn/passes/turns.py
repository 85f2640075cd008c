"""Whose turn it is, where several threads of a program use one manager.

Threads that train take turns by a lock of the program's. Those that only look (a save, an
optimizer's state dict, an evaluation) are easily left out of it. So they are refused while another
thread trains, before anything is touched; and what would change a run waits until no other thread
looks at all of it.

Threads in which autograd runs backward are none here: one of those belongs to the call of
``backward()`` that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, get_ident
from typing import TYPE_CHECKING

import torch

from tiermem.errors import StepError
from tiermem.runtime.manager import BlockManager

if TYPE_CHECKING:
    from tiermem.nn.passes.backward import BackwardPass

TAKE_TURNS = (
    "threads that use what one manager trains take turns: one lock around forward, backward and "
    "step(), which a thread that saves or evaluates takes, too"
)
_PATIENCE = 0.1
"""Seconds until a thread that waits asks whether a call was cut short, which does not wake it."""


class Turns:
    """Which threads train just now, and which look at all of a run's state."""

    def __init__(self, manager: BlockManager, backward: BackwardPass) -> None:
        """Nobody does anything.

        Args:
            manager: Says where a call was cut short.
            backward: Says whether a backward is under way.
        """
        self._gate, self._on_cpu = manager.gate, manager.parts.device.type == "cpu"
        self._backward = backward
        self._changed = Condition()
        self._looking, self._stepping = list[int](), list[int]()
        self._forwards = set[int]()
        self._last = 0  # the thread of the last forward that takes gradients
        self._backwards = 0  # that of the backward under way

    @contextmanager
    def looks(self, what: str) -> Iterator[None]:
        """Has the calling thread look at all of a run's state, or replace it.

        Args:
            what: The call, for messages.

        Raises:
            StepError: If another thread trains just now.
        """
        with self._entered(self._looking, what, forwards=True):
            yield

    @contextmanager
    def steps(self, what: str) -> Iterator[None]:
        """Has the calling thread change weights, gradients or state.

        Args:
            what: The call, for messages.

        Raises:
            StepError: If another thread does so, or is in a backward.
        """
        with self._entered(self._stepping, what):
            yield

    @contextmanager
    def begins_forward(self, training: bool) -> Iterator[None]:
        """Has the calling thread begin a forward.

        Args:
            training: Whether gradients are taken in it; it lasts until :meth:`end_forward` then.

        Raises:
            StepError: If another thread changes weights, or is in a backward, which it would end.
        """
        with self._entered(self._looking, "a forward", waits=training):
            if training:
                self._last = get_ident()
                self._forwards.add(self._last)
            yield

    def end_forward(self) -> None:
        """Ends a forward of the calling thread."""
        self._forwards.discard(get_ident())

    def begin_backward(self, begin: Callable[[], None]) -> None:
        """Begins a backward once no other thread looks.

        Args:
            begin: Notes that it is under way.
        """
        # on a GPU it runs in a thread of autograd's, for that of the last forward
        thread = get_ident() if self._on_cpu else self._last
        with self._changed:
            self._wait(thread)
            self._backwards = thread
            begin()

    def reset(self) -> None:
        """Forgets all after an exception anywhere: nothing is under way."""
        with self._changed:
            self._looking.clear()
            self._stepping.clear()
            self._forwards.clear()
            self._changed.notify_all()

    @contextmanager
    def _entered(
        self, list_: list[int], what: str, *, forwards: bool = False, waits: bool = True
    ) -> Iterator[None]:
        """Enters the calling thread in a list.

        Args:
            list_: The list.
            what: The call, for messages.
            forwards: Whether no other thread may be in a forward that takes gradients.
            waits: Whether no other thread may look.
        """
        if torch._C._current_graph_task_id() != -1:
            yield
            return
        thread = get_ident()
        with self._changed:
            self._refuse(thread, what, forwards=forwards)
            if waits and self._wait(thread):
                self._refuse(thread, what, forwards=forwards)
            list_.append(thread)
        try:
            yield
        finally:
            with self._changed:
                if thread in list_:
                    list_.remove(thread)
                self._changed.notify_all()

    def _refuse(self, thread: int, what: str, *, forwards: bool) -> None:
        """Raises if another thread trains; under the lock."""
        if any(other != thread for other in self._stepping):
            where = "an optimizer's call"
        elif self._backwards != thread and self._backward.is_live():
            where = "a backward"
        elif forwards and any(other != thread for other in self._forwards):
            where = "a forward that takes gradients"
        else:
            return
        raise StepError(f"{what} while another thread is at it, in {where}: {TAKE_TURNS}")

    def _wait(self, thread: int) -> bool:
        """Waits until no other thread looks; returns whether one did; under the lock."""
        waited = False
        while any(other != thread for other in self._looking) and not self._gate.unsure:
            waited = True
            self._changed.wait(_PATIENCE)
        return waited
