"""Which blocks are stepped inside backward, which in the next forward, and how much state is late.

Bytes over the link in each direction ("up" is to HBM) in the two passes, from the bytes of weights
W, gradients G, masters M and state S (with recomputation; no block stays in HBM; a step ahead keeps
its gradient)::

    stepped              forward up       down         backward up    down
    in backward          W                0            W + M + S      G + W + M + S
    the same, by turns   W                0            W + M + S + G/2    G + W + M + S/2
    in the next forward  W + G + M + S    W + M + S    W              G
    by the host          W                0            W              G

*By turns*: one of two steps does not update the state (*late state*), and the next one performs
both updates, the missed one with the gradient that was kept (:mod:`tiermem.optim.units.late`).

A pass takes as long as its compute, as the busier direction or, in backward, as the host, whichever
is longest. So steps are deferred to the forward until its copies take as long as its compute, and
state is made late until backward's copies take equally long in both directions. These blocks are
spread evenly, as HBM has room for the state of only one or two blocks ahead. Which blocks the host
steps is not chosen here (:class:`tiermem.optim.host.devicebits.ShareTrial` tries it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

_WORTH = 0.98  # another choice has to take at most this share of the present time
_FEWER = 1.02
"""Steps are deferred only for more than this factor: they interrupt the forward, which the model
leaves out."""
_AS_GOOD = 1.01
_SHARE_PAYS = 0.97  # the time with a share on the host is at most this part of that without it
_BINDS = 1.5
"""A loop counts as bound by copies if they take at least this many times the compute. With less,
keeping more of the weights in HBM costs more waits than it saves copies. For a Llama with half of
its weights' bytes as HBM (simulated): 692 instead of 619 ms with 550 ms of compute, 585 and 575
with 330, 565 and 569 with 240."""
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True)
class Load:
    """The bytes that move with one block of weights.

    Attributes:
        weights: Bytes of the weights.
        gradients: Bytes of their gradients.
        kept: Bytes of masters and state.
        host: Seconds that the host takes to step it; None if the device steps it.
        state: Bytes of state that may be late.
        stays: Whether the weights stay in HBM; then they are written home in the next forward.
    """

    weights: int
    gradients: int
    kept: int
    host: float | None = None
    state: int = 0
    stays: bool = False

    @property
    def moved(self) -> int:
        """Bytes of the weights that move as the block is used."""
        return 0 if self.stays else self.weights


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a loop computes and copies.

    Attributes:
        forward: Seconds that a forward computes.
        backward: The same of a backward.
        up: Bytes per second into HBM, while copies go both ways.
        down: Bytes per second out of it, likewise.
        alone: Bytes per second while copies go in one direction only; 0 if that is not faster.
    """

    forward: float
    backward: float
    up: float
    down: float
    alone: float = 0.0

    def times(self, factor: float) -> Speed:
        """Returns the same with copies that are faster by a factor."""
        up, down, alone = self.up * factor, self.down * factor, self.alone * factor
        return replace(self, up=up, down=down, alone=alone)

    def copies(self, up: float, down: float) -> float:
        """Returns the seconds of copies in both directions; the rest of the longer one runs alone.

        Args:
            up: Bytes into HBM.
            down: Bytes out of it.
        """
        ends = up / self.up, down / self.down
        rate = self.up if ends[0] > ends[1] else self.down
        return min(ends) + (max(ends) - min(ends)) * rate / max(self.alone, rate)


@dataclass(frozen=True, slots=True)
class Choice:
    """When the device's steps are performed.

    Attributes:
        left: Numbers of the blocks whose steps are deferred to the next forward.
        turns: Share of the others whose state is late by turns, from 0 to 1.
        copies_bind: Whether copies take longer than compute, if no weights stay in HBM.
    """

    left: frozenset[int] = frozenset()
    turns: float = 0.0
    copies_bind: bool = False


def best_choice(loads: Sequence[Load], speed: Speed, now: frozenset[int] | None = None) -> Choice:
    """Returns the choice with which forward and backward take the least time.

    Args:
        loads: The load of each block, in the order of forward.
        speed: The measured speed.
        now: The present deferred blocks; others are chosen only if that is worth it.
    """
    moved = Passes([replace(load, stays=False) for load in loads], frozenset())
    copies = moved.least(replace(speed, forward=0.0, backward=0.0))
    if copies > _BINDS * (speed.forward + speed.backward):
        none = frozenset[int]()  # forward has no time left
        return Choice(none, Passes(loads, none).turns(speed), copies_bind=True)
    found = _seconds_of_choices(loads, speed)
    most = min(found.values()) * _FEWER
    left = next(choice for choice, seconds in found.items() if seconds <= most)
    if now is not None and all(loads[number].host is None for number in now):
        is_worth_it = found[left] <= _WORTH * Passes(loads, now).least(speed)
        left = left if is_worth_it else now
    return Choice(left, Passes(loads, left).turns(speed))


def least_seconds(loads: Sequence[Load], speed: Speed) -> float:
    """Returns the seconds of forward and backward with the best choice."""
    return min(_seconds_of_choices(loads, speed).values())


def host_helps(
    hosted: Sequence[Load], loads: Sequence[Load], speed: Speed, *, waits: bool = False
) -> bool:
    """Whether forward and backward are expected to take less time with a share on the host.

    They are not if they are bound by compute. The measured compute includes the host's own time, if
    the device waits for Python; a share would increase that.

    Args:
        hosted: The load of each block, in the order of forward, with the host's share.
        loads: The same without the host's share.
        speed: The measured speed.
        waits: Whether all steps are deferred to the next forward.
    """
    if waits:
        passes = [Passes(one, frozenset(_able(one)), waits=True) for one in (hosted, loads)]
        with_share, without = (one.least(speed) for one in passes)
    else:
        with_share, without = (least_seconds(one, speed) for one in (hosted, loads))
    return with_share < _SHARE_PAYS * without


def _able(loads: Sequence[Load]) -> list[int]:
    """Returns the numbers of the blocks that the device steps."""
    return [number for number, load in enumerate(loads) if load.host is None]


def _seconds_of_choices(loads: Sequence[Load], speed: Speed) -> dict[frozenset[int], float]:
    """Returns the seconds of both passes, by the set of deferred blocks, fewest first."""
    able = _able(loads)
    choices = (
        frozenset(able[n] for n in _evenly(count, len(able))) for count in range(len(able) + 1)
    )
    return {left: Passes(loads, left).least(speed) for left in choices}


class Passes:
    """The copies of forward and backward, if some of the device's steps are deferred."""

    def __init__(self, loads: Sequence[Load], left: frozenset[int], *, waits: bool = False) -> None:
        """Adds up the bytes.

        Args:
            loads: The load of each block, in the order of forward.
            left: Numbers of the deferred blocks.
            waits: Whether the host performs its steps in the next forward, too.
        """
        self._waits = waits
        later = [loads[number] for number in left]
        ahead = [
            load for number, load in enumerate(loads) if number not in left and load.host is None
        ]
        self._weights = sum(load.moved for load in loads)
        self._gradients = sum(load.gradients for load in loads)
        self._fetched = sum(load.gradients + load.kept for load in later)
        self._later = sum(load.moved + load.kept for load in later)
        self._later += sum(load.weights for load in ahead if load.stays)
        self._hosted = sum(load.host for load in loads if load.host is not None)
        self._kept = sum(load.kept for load in ahead)
        self._written = sum(load.moved + load.kept for load in ahead)
        self._state = sum(load.state for load in ahead)
        self._again = sum(load.gradients for load in ahead if load.state)

    def seconds(self, speed: Speed, turns: float = 0.0) -> float:
        """Returns the seconds of both passes.

        Args:
            speed: The measured speed.
            turns: Share of the state that is late by turns.
        """
        fetched, later = self._weights + self._fetched, self._later
        hosted = (self._hosted, 0.0) if self._waits else (0.0, self._hosted)
        forward = max(speed.forward, speed.copies(fetched, later), hosted[0])
        up = self._weights + self._kept + turns * self._again / 2
        down = self._gradients + self._written - turns * self._state / 2
        return forward + max(speed.backward, speed.copies(up, down), hosted[1])

    def least(self, speed: Speed) -> float:
        """Returns the seconds of both passes with the best share of late state."""
        return min(self.seconds(speed, turns) for turns in _SHARES)

    def turns(self, speed: Speed) -> float:
        """Returns the least share of late state with which both take hardly longer than that."""
        most = _AS_GOOD * self.least(speed)
        return next(turns for turns in _SHARES if self.seconds(speed, turns) <= most)


def _evenly(count: int, of: int) -> frozenset[int]:
    return frozenset(int((n + 0.5) * of / count) for n in range(count))
