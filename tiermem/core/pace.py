"""Estimates from measurements: compute, links, and which prefetches were useful. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field

_WINDOW = 5
_SURE = 2
_SAMPLES_AT_FIRST = 2
_EVERY = 16
_EXTRA = 4
_CALM = 64
"""After an unexpected time, another one within this many passes does not cause more measurements:
on a shared machine times differ from pass to pass, and measuring costs host time."""
_CHANGED = 0.25
_NOISE = 20e-6
"""Seconds per use by which host time varies between passes; differences below change no plan."""
_NEW_PLAN = 0.2
_MOST_PASSES = 256
_MOST_FILLS = 1 << 16
_SPARE_BLOCKS = 64
_MEMORY = 8
_PASSES_TO_TRUST = 2

GUESSED_RATES = {"dram->hbm": 20e9, "hbm->dram": 20e9, "nvme->hbm": 2e9, "hbm->nvme": 2e9}
"""Bytes per second assumed of a link before anything is known of it."""
FASTEST_UP = 55e9
"""Bytes per second of the fastest link from DRAM: PCI Express 5 with 16 lanes. It is assumed where
a slow link should not be assumed before it has been measured."""


class Recent:
    """The last five samples, and their median: of an even number the lower one.

    Attributes:
        value: The median; 0 before any sample.
        announced: The value with which the plan in force was made.
    """

    __slots__ = ("_samples", "announced", "value")

    def __init__(self) -> None:
        """Starts without samples."""
        self._samples: list[float] = []
        self.value = 0.0
        self.announced = 0.0

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, sample: float) -> None:
        """Adds a sample; of six, the oldest is dropped."""
        samples = self._samples
        if len(samples) == _WINDOW:
            del samples[0]
        samples.append(sample)
        self.value = sorted(samples)[(len(samples) - 1) // 2]

    @property
    def most(self) -> float:
        """The largest sample kept."""
        return max(self._samples, default=0.0)


@dataclass(slots=True)
class _Pass:
    """The estimates of the passes of one name."""

    blocks: dict[int, Recent] = field(default_factory=dict)
    left_out: bool = False  # whether the first was not measured
    samples: int = 0
    asked: int = 0  # measurements begun; the results of some may not have been read yet
    since: int = 0
    extra: int = 0
    calm: int = 0
    typical: float = 0.0
    odd: bool = False
    whole: Recent = field(default_factory=Recent)
    compute: Recent = field(default_factory=Recent)

    @property
    def sure(self) -> bool:
        """Whether it was measured often enough to be reliable."""
        return bool(self.blocks) and self.samples + self.left_out >= _SURE

    @property
    def known(self) -> bool:
        """Whether it is measured only now and then."""
        return max(self.asked, self.samples) + self.left_out >= _SAMPLES_AT_FIRST


class Estimates:
    """Seconds of compute by pass and block, and of transfers by link and block.

    A pass is measured the first two times (only the second time, if the first was left out), then
    one time in sixteen. If it took a quarter more or less than expected (twice in a row, if it was
    not measured), it is also measured the next four times, so that the medians follow. Memory is
    bounded: 256 passes, and for each the blocks that still occur in it.

    Attributes:
        version: Increases when plans made with the estimates have become stale.
        flops: Operations per second that are expected of the device for matrices of 2-byte
            elements; 0 if unknown.
    """

    def __init__(
        self, first: Callable[[str, int], float | None] | None = None, flops: float = 0.0
    ) -> None:
        """Starts with nothing measured.

        Args:
            first: Returns the bytes per second of a link for a copy of a size, known before
                anything is measured (from the machine profile), or None.
            flops: Operations per second to expect of the device; 0 if unknown.
        """
        self.version = 0
        self.flops = flops
        self._first = first
        self._passes: dict[Hashable, _Pass] = {}
        self._fills: dict[tuple[str, int], Recent] = {}
        self._rates: dict[str, Recent] = {}

    # -- sampling --------------------------------------------------------

    def wants(self, key: Hashable) -> bool:
        """Notes that a pass begins; returns whether it is to be measured."""
        known = self._passes.pop(key, None) or _Pass()
        self._passes[key] = known
        if len(self._passes) > _MOST_PASSES:
            del self._passes[next(iter(self._passes))]
        known.since += 1
        if known.calm:
            known.calm -= 1
        if known.extra:
            known.extra -= 1
        elif known.known and known.since < _EVERY:
            return False
        known.since = 0
        return True

    def leave_out(self, key: Hashable) -> bool:
        """Notes that the first pass of a name is not measured, if plans can be made without that.

        In a first pass, tiermem and torch do other work for the first time, so its times are the
        least meaningful, and measuring would make it even longer.

        Returns:
            Whether it is left out; not if it is not the first, or its times are needed.
        """
        known = self._passes.get(key)
        if known is None or known.left_out or known.samples or known.asked or not self.flops:
            return False
        known.left_out = True
        return True

    def asked(self, key: Hashable) -> None:
        """Notes that a pass is being measured; :meth:`observe` may follow some passes later."""
        known = self._passes.get(key)
        if known is not None:
            known.asked += 1

    def took(self, key: Hashable, seconds: float) -> None:
        """Notes how long a pass took that was not measured.

        A single one that took a quarter more or less than usual may be chance; two are a change.

        Args:
            key: Name of the pass.
            seconds: From its begin to its end on the device, or to the begin of the next pass by
                the host's clock.
        """
        known = self._passes.get(key)
        if known is None or seconds <= 0.0:
            return
        usual, noise = known.whole.value, _NOISE * len(known.blocks)
        odd = usual > 0.0 and abs(seconds - usual) > _CHANGED * usual + noise
        if odd and not known.odd:
            known.odd = True
            return
        if odd:
            known.whole = Recent()
            if not known.calm:
                known.extra, known.calm = _EXTRA, _CALM
        known.odd = False
        known.whole.add(seconds)

    def ask_again(self) -> None:
        """Makes :meth:`wants` ask for a measurement of the next pass of every name.

        Measurements that have not been read yet are lost.
        """
        for known in self._passes.values():
            known.since, known.asked = _EVERY, known.samples

    def observe(
        self,
        key: Hashable,
        compute: Mapping[int, float],
        flows: Mapping[str, tuple[int, float]],
        fills: Collection[tuple[str, int, float]],
        whole: float | None = None,
    ) -> None:
        """Notes a measured pass.

        Args:
            key: Name of the pass.
            compute: Seconds of a use, by block.
            flows: Bytes, and seconds in which they moved, by link.
            fills: Link, block and seconds of single transfers.
            whole: Seconds of all uses; None if every block was used once.
        """
        known = self._passes.get(key)
        if known is None:
            return
        surprised = self._flow(flows)
        for link, block, seconds in fills:
            self._fill(link, block, seconds)
        if compute:
            surprised |= _surprise(known, compute)
            known.compute.add(sum(compute.values()) if whole is None else whole)
            for block, seconds in compute.items():
                recent = known.blocks.get(block)
                if recent is None:
                    recent = known.blocks[block] = Recent()
                recent.add(seconds)
            if len(known.blocks) > 2 * len(compute) + _SPARE_BLOCKS:
                known.blocks = {b: r for b, r in known.blocks.items() if b in compute}
            values = sorted(recent.value for recent in known.blocks.values())
            known.typical = values[len(values) // 2]
        known.samples += 1
        if surprised and known.samples > _SAMPLES_AT_FIRST and not known.calm:
            known.extra, known.calm = _EXTRA, _CALM
        if known.sure and _stale(known.blocks.values()):
            self.version += 1

    def _flow(self, flows: Mapping[str, tuple[int, float]]) -> bool:
        surprised = False
        for link, (nbytes, seconds) in flows.items():
            if nbytes <= 0 or seconds <= 0:
                continue
            rate = nbytes / seconds
            recent = self._rates.setdefault(link, Recent())
            if recent.value and abs(rate - recent.value) > _CHANGED * recent.value:
                surprised = True
            recent.add(rate)
            if _stale((recent,)):
                self.version += 1
        return surprised

    def _fill(self, link: str, block: int, seconds: float) -> None:
        recent = self._fills.pop((link, block), None) or Recent()
        recent.add(seconds)
        self._fills[link, block] = recent
        if len(self._fills) > _MOST_FILLS:
            del self._fills[next(iter(self._fills))]

    # -- answers ---------------------------------------------------------

    def compute(self, key: Hashable, block: int) -> float | None:
        """Returns the seconds a block computes in a pass; None if the pass is not known yet.

        For a block that has not been seen in it, returns the seconds of a typical block.
        """
        known = self._passes.get(key)
        if known is None or not known.sure:
            return None
        recent = known.blocks.get(block)
        return known.typical if recent is None else recent.value

    def computes(self, key: Hashable) -> float | None:
        """Returns the seconds a pass computes; None if it is not known yet."""
        known = self._passes.get(key)
        if known is None or not known.sure:
            return None
        return known.compute.value

    def longest(self, key: Hashable) -> float | None:
        """Returns the seconds of the longest of the last passes that were not measured, or None."""
        known = self._passes.get(key)
        return None if known is None else known.whole.most or None

    def transfer(self, link: str, block: int, nbytes: int) -> float:
        """Returns the seconds a block takes to arrive: measured, or else from the link's speed."""
        recent = self._fills.get((link, block))
        return recent.value if recent is not None else nbytes / self.rate(link, nbytes)

    def rate(self, link: str, nbytes: int = 1 << 62) -> float:
        """Returns the bytes per second to expect of a link, for copies of ``nbytes``."""
        recent = self._rates.get(link)
        if recent is not None:
            return recent.value
        return self.known_before(link, nbytes) or GUESSED_RATES[link]

    def best_rate(self, link: str) -> float | None:
        """Returns the best recent speed, or else the one known beforehand; None if neither."""
        recent = self._rates.get(link)
        return recent.most if recent is not None else self.known_before(link, 1 << 62)

    def fastest(self, link: str) -> float:
        """Returns the bytes per second of a link, the best that were measured."""
        return max(self.rate(link), self.best_rate(link) or 0.0)

    def passed(self, key: Hashable) -> bool:
        """Whether a pass of that name was measured, or left out."""
        known = self._passes.get(key)
        return known is not None and (known.left_out or known.samples > 0)

    def samples(self, key: Hashable) -> int:
        """Returns how many passes of that name were measured."""
        known = self._passes.get(key)
        return 0 if known is None else known.samples

    def sure(self, key: Hashable) -> bool:
        """Whether passes of that name were measured often enough to be reliable."""
        known = self._passes.get(key)
        return known is not None and known.sure

    def can_foresee(self, key: Hashable) -> bool:
        """Whether plans for passes of that name can be made before they are measured again."""
        return self.sure(key) or (self.flops > 0.0 and self.samples(key) > 0)

    def known(self) -> Iterator[Hashable]:
        """Yields the names of the passes that were measured often enough."""
        return (key for key in self._passes if self.sure(key))

    def rows(self) -> Iterator[tuple[Hashable, int, float, int]]:
        """Yields pass, block, seconds of compute and how many samples they come from."""
        for key, known in self._passes.items():
            for block, recent in known.blocks.items():
                yield key, block, recent.value, len(recent)

    def known_before(self, link: str, nbytes: int) -> float | None:
        """Returns the bytes per second of a link that were known before anything was measured."""
        return None if self._first is None else self._first(link, nbytes)


def _surprise(known: _Pass, compute: Mapping[int, float]) -> bool:
    foreseen = actual = 0.0
    for block, seconds in compute.items():
        recent = known.blocks.get(block)
        if recent is not None:
            foreseen += recent.value
            actual += seconds
    return abs(actual - foreseen) > _CHANGED * foreseen + _NOISE * len(compute)


def _stale(estimates: Collection[Recent]) -> bool:
    """Whether values differ by a fifth from those announced; if so, announces the new ones."""
    total = sum(recent.announced for recent in estimates)
    off = sum(abs(recent.value - recent.announced) for recent in estimates)
    if off <= _NEW_PLAN * total:
        return False
    for recent in estimates:
        recent.announced = recent.value
    return True


class Waste:
    """Which prefetches were wasted, and which are therefore no longer made.

    A prefetch is wasted if the block leaves HBM unused, or if the pass for which it was made ends
    without using it (an expert that is not chosen). Once more than half of a block's last eight
    prefetches for a pass were wasted, it is not prefetched for that pass until two such passes in a
    row have used it.

    Attributes:
        pending: Pass of each prefetch whose outcome is not known yet, by block.
        outcomes: Whether the last prefetches were wasted, by pass and block, only if any was; while
            there are none, a use only removes its block from ``pending``.
        stopped: Blocks that are not prefetched, by pass, and how many such passes in a row have
            used them since.
        changes: Increases whenever the set of blocks that are prefetched changes.
    """

    def __init__(self) -> None:
        """Starts without prefetches."""
        self.pending: dict[int, tuple[int, Hashable]] = {}
        self.changes = 0
        self.outcomes: dict[tuple[Hashable, int], list[bool]] = {}
        self.stopped: dict[Hashable, dict[int, int]] = {}

    def fetched(self, block: int, number: int, key: Hashable) -> None:
        """Notes that a block is prefetched, for a pass with that number and name."""
        self.pending[block] = (number, key)

    def used(self, block: int) -> None:
        """Notes that a block is used."""
        entry = self.pending.pop(block, None)
        if entry is not None and self.outcomes:
            self.judge(entry[1], block, wasted=False)

    def left(self, block: int) -> bool:
        """Notes that a block leaves HBM; returns whether fetching it was a waste."""
        entry = self.pending.pop(block, None)
        if entry is not None:
            self.judge(entry[1], block, wasted=True)
        return entry is not None

    def withdraw(self, block: int) -> None:
        """Forgets a prefetch of a block that will leave HBM unused for another reason."""
        self.pending.pop(block, None)

    def end(self, number: int, key: Hashable, used: Collection[int]) -> int:
        """Notes that a pass has ended; returns how many prefetches for it were wasted.

        Args:
            number: Number of the pass.
            key: Its name.
            used: The blocks it used.
        """
        wasted = [block for block, entry in self.pending.items() if entry[0] <= number]
        for block in wasted:
            self.judge(self.pending.pop(block)[1], block, wasted=True)
        stopped = self.stopped.get(key)
        if stopped:
            seen = set(used)
            for block, streak in list(stopped.items()):
                stopped[block] = streak + 1 if block in seen else 0
                if stopped[block] >= _PASSES_TO_TRUST:
                    self.changes += 1
                    del stopped[block]
                    self.outcomes.pop((key, block), None)
            if not stopped:
                del self.stopped[key]
        return len(wasted)

    def stops(self, key: Hashable, block: int) -> bool:
        """Whether a block is not worth prefetching for a pass."""
        return bool(self.stopped) and block in self.stopped.get(key, ())

    def unsteady(self) -> set[int]:
        """Returns the blocks that some pass is expected to use and does not use."""
        return {block for stopped in self.stopped.values() for block in stopped}

    def forget(self, blocks: Collection[int]) -> None:
        """Removes blocks that no longer exist."""
        gone = set(blocks)
        for block in gone:
            self.pending.pop(block, None)
        if self.outcomes:
            self.outcomes = {n: o for n, o in self.outcomes.items() if n[1] not in gone}
        for stopped in self.stopped.values():
            for block in gone & stopped.keys():
                del stopped[block]
        self.stopped = {key: stopped for key, stopped in self.stopped.items() if stopped}

    def judge(self, key: Hashable, block: int, *, wasted: bool) -> None:
        """Notes the outcome of a prefetch that is no longer pending."""
        name = (key, block)
        outcomes = self.outcomes.pop(name, None)
        if outcomes is None:
            if not wasted:
                return  # nothing to hold against it
            outcomes = []
        outcomes.append(wasted)
        del outcomes[:-_MEMORY]
        if any(outcomes):
            self.outcomes[name] = outcomes
            if len(self.outcomes) > _MOST_FILLS:
                del self.outcomes[next(iter(self.outcomes))]
        if wasted and len(outcomes) > 1 and 2 * sum(outcomes) > len(outcomes):
            self.stopped.setdefault(key, {}).setdefault(block, 0)
            self.changes += 1
