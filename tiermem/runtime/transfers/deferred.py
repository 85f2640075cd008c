"""Deferred work of blocks: done before the next look at their bytes, and not sooner."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Elsewhere(Protocol):
    """Work under way in another thread."""

    def succeeded(self) -> bool:
        """Whether it is over, and well."""
        ...

    def finish(self) -> None:
        """Waits until it has been done, well or not."""
        ...

    def wait(self) -> None:
        """Waits until it is over, well or not; what has not begun is not done any more."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Deferred:
    """One piece of work.

    Attributes:
        name: For messages.
        blocks: Ids of the blocks that it reads or writes, in the order in which it uses them.
        work: Does it; whole, or not at all where it raises. Called once more after it was done, as
            an exception may have it, it does nothing.
        elsewhere: What goes on in another thread, to be taken up by ``work``; None where that
            does it all.
        writes: Ids of the tensors that are written there, of blocks that others may write beside.
    """

    name: str
    blocks: Sequence[int]
    work: Callable[[], None]
    elsewhere: Elsewhere | None = None
    writes: frozenset[int] = frozenset()


class DeferredWork:
    """Deferred work, by block; used under the manager's lock.

    Every access to a block calls :meth:`pay` first. So no access sees the block as it was before
    the work, and the work may wait until the blocks are fetched anyway.

    Attributes:
        owed: The work of each block that has any, by id.
        standing: Work that may stand over many passes, by block: only a look at the block itself
            asks for it, and the plans of passes need not know of it.
        elsewhere: What goes on in other threads, in the order in which it was registered.
    """

    def __init__(self) -> None:
        """Starts without deferred work."""
        self.owed: dict[int, list[Deferred]] = {}
        self.standing: dict[int, Deferred] = {}
        self.elsewhere: deque[Deferred] = deque()
        self._paying: list[Deferred] = []

    def __bool__(self) -> bool:
        return bool(self.owed)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self.owed

    @property
    def here(self) -> bool:
        """Whether there is deferred work that is not under way in another thread already."""
        return any(debt.elsewhere is None for owed in self.owed.values() for debt in owed)

    def add(self, debt: Deferred, *, first: bool = False) -> None:
        """Registers a piece of work for each of its blocks.

        Args:
            debt: The work.
            first: Whether it comes before what is registered already.
        """
        for block_id in dict.fromkeys(debt.blocks):
            owed = self.owed.setdefault(block_id, [])
            owed.insert(0 if first else len(owed), debt)
        if debt.elsewhere is not None:
            self.elsewhere.append(debt)

    def stand(self, debt: Deferred) -> None:
        """Registers work that may stand over many passes; its blocks have no other such work.

        Args:
            debt: The work; it cancels itself as it begins, and stands again where it fails.
        """
        for block_id in debt.blocks:
            self.standing[block_id] = debt

    def cancel(self, debt: Deferred) -> None:
        """Forgets a piece of work that need not be done any more."""
        self._strike(debt)
        for block_id in debt.blocks:
            if self.standing.get(block_id) is debt:
                del self.standing[block_id]

    def that_take_up(self, elsewhere: Elsewhere) -> list[Deferred]:
        """Returns the pieces of work that take up what goes on elsewhere."""
        owed = (debt for found in self.owed.values() for debt in found)
        return list({id(d): d for d in owed if d.elsewhere is elsewhere}.values())

    def pay(self, block_id: int) -> None:
        """Does the deferred work of a block, in the order in which it was registered.

        Work that an error leaves undone stays registered.
        """
        self._settle(list(self.owed.get(block_id, ())))
        standing = self.standing.get(block_id)
        if standing is not None:
            standing.work()

    def pay_before_loan(self, block_id: int, writes: frozenset[int]) -> None:
        """Does the deferred work that cannot be left to the time after a loan of the block.

        That is all that uses the block in HBM, and what another thread does to the same tensors;
        beside its work on other tensors the block can be lent once more.

        Args:
            block_id: The block.
            writes: Ids of the tensors that the borrower reads and writes.
        """
        owed = self.owed.get(block_id, ())
        self._settle([d for d in owed if d.elsewhere is None or not writes.isdisjoint(d.writes)])

    def pay_standing(self) -> None:
        """Does all work that may stand over many passes."""
        while self.standing:
            next(iter(self.standing.values())).work()

    def collect(self) -> None:
        """Takes up what other threads have finished, in the order in which it was registered.

        So its blocks can be prefetched. Work that failed waits for the next access.
        """
        while self.elsewhere:
            debt = self.elsewhere[0]
            if debt.elsewhere is None or not debt.elsewhere.succeeded():
                return
            self.elsewhere.popleft()
            if debt in self.owed.get(debt.blocks[-1], ()):
                self._settle([debt])  # and nothing else, which might have to be waited for

    def finish(self, block_id: int) -> None:
        """Waits for what other threads do to a block, and takes up all that is over by then.

        Work that failed waits for the next access.
        """
        for debt in self.owed.get(block_id, ()):
            if debt.elsewhere is not None:
                debt.elsewhere.finish()
        self.collect()

    def wait(self) -> None:
        """Waits for other threads without taking their work up: the blocks are not used again."""
        for debt in self.elsewhere:
            if debt.elsewhere is not None:
                debt.elsewhere.wait()

    def order(self, block_ids: Iterable[int]) -> list[int]:
        """Returns in which order blocks are used if those of ``block_ids`` are, one after another.

        The deferred work of one of them uses its blocks first.
        """
        order, seen = list[int](), set[int]()
        for block_id in block_ids:
            owed = [block for debt in self.owed.get(block_id, ()) for block in debt.blocks]
            paid = [block for block in dict.fromkeys(owed) if block not in seen]
            for used in (*paid, block_id):
                if used not in order[-1:]:
                    order.append(used)
                seen.add(used)
        return order

    def _settle(self, deferred: list[Deferred]) -> None:
        self._paying.extend(deferred)
        try:
            for debt in deferred:  # all first: the work of one may use the block
                self._strike(debt)
            while deferred:
                deferred[0].work()
                self._paying.remove(deferred[0])
                del deferred[0]
        except BaseException:
            self._owe_again(deferred)
            raise

    def _owe_again(self, deferred: Sequence[Deferred]) -> None:
        """Registers work again that was cut short; what was done by then does nothing again."""
        for debt in deferred:
            self._strike(debt)
            self.add(debt)
            if debt in self._paying:
                self._paying.remove(debt)

    def repair(self) -> None:
        """Registers again work that an exception interrupted; nothing of it is under way."""
        self._owe_again(list(self._paying))

    def _strike(self, debt: Deferred) -> None:
        for block_id in dict.fromkeys(debt.blocks):
            owed = self.owed.get(block_id, ())
            if debt not in owed:
                continue
            if len(owed) > 1:
                self.owed[block_id] = [other for other in owed if other is not debt]
            else:
                self.owed.pop(block_id, None)
