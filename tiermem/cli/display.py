"""What ``tiermem train`` shows while it runs: a live panel, or plain lines."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tiermem.config import format_size

if TYPE_CHECKING:
    from tiermem import Stats

_PLAIN_LINES = 8
_BAR_WIDTH = 40


class Display(AbstractContextManager["Display"]):
    """Follows one run; what is shown is up to the subclass.

    Args:
        title: Which run this is.
        steps: Steps it will take.
        tokens_per_step: For tokens per second.
    """

    def __init__(self, title: str, steps: int, tokens_per_step: int) -> None:
        self.title = title
        self.steps = steps
        self.done = 0
        self.loss = float("nan")
        self.stats: Stats | None = None
        self._tokens_per_step = tokens_per_step
        self._begin = time.perf_counter()

    def __enter__(self) -> Display:
        self._begin = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def show_step(self, step: int, loss: float, stats: Stats | None = None) -> None:
        """Takes note of a finished step and shows it."""
        self.done, self.loss, self.stats = step + 1, loss, stats
        self.show()

    def show(self) -> None:
        """Shows the present state; nothing here."""

    @property
    def tokens_per_second(self) -> float:
        """Speed so far."""
        elapsed = time.perf_counter() - self._begin
        return self.done * self._tokens_per_step / max(elapsed, 1e-9)


class PlainDisplay(Display):
    """A handful of lines, for files and pipes."""

    def show(self) -> None:
        """Prints every eighth part of the run."""
        every = max(1, self.steps // _PLAIN_LINES)
        if self.done % every and self.done != self.steps:
            return
        line = (
            f"{self.title}: step {self.done}/{self.steps}  loss {self.loss:.4f}  "
            f"{self.tokens_per_second:,.0f} tokens/s"
        )
        if self.stats is not None:
            use = " ".join(
                f"{tier} {format_size(used)}/{format_size(self.stats.budget[tier])}"
                for tier, used in self.stats.used.items()
            )
            line += f"  {use}  {self.stats.stalls} stalls"
        print(line, flush=True)


class LiveDisplay(Display):
    """A panel that is drawn again after every step, for terminals."""

    def __init__(self, title: str, steps: int, tokens_per_step: int, console: Console) -> None:
        super().__init__(title, steps, tokens_per_step)
        self._live = Live(console=console, refresh_per_second=8)

    def __enter__(self) -> Display:
        self._live.__enter__()
        super().__enter__()
        self.show()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self) -> None:
        """Updates the panel."""
        self._live.update(self.panel())

    def panel(self) -> Group:
        """Returns what is drawn."""
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(self.title, style="bold"),
            ProgressBar(self.steps, self.done, width=_BAR_WIDTH),
            f"{self.done}/{self.steps}",
            f"loss {self.loss:.4f}" if self.done else "starting",
            f"{self.tokens_per_second:,.0f} tokens/s" if self.done else "",
        )
        return Group(head) if self.stats is None else Group(head, _tiers(self.stats))


def new_display(
    title: str, steps: int, tokens_per_step: int, console: Console, quiet: bool
) -> Display:
    """Returns the display that suits where the output goes."""
    if quiet:
        return Display(title, steps, tokens_per_step)
    if console.is_terminal:
        return LiveDisplay(title, steps, tokens_per_step, console)
    return PlainDisplay(title, steps, tokens_per_step)


def _tiers(stats: Stats) -> Table:
    table = Table.grid(padding=(0, 2))
    for tier, used in stats.used.items():
        budget = stats.budget[tier]
        table.add_row(
            tier,
            ProgressBar(max(budget, 1), used, width=_BAR_WIDTH),
            f"{format_size(used)} of {format_size(budget)}",
        )
    for link, moved in stats.links.items():
        if moved.nbytes:
            table.add_row(link, f"{format_size(moved.nbytes)} in {moved.moves:,} moves", "")
    table.add_row(
        "use",
        f"{stats.hit_rate:.1%} of uses found their block in place",
        f"{stats.stalls:,} stalls, {stats.stall_seconds:.2f} s",
    )
    return table
