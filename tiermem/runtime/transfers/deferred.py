"""Deferred work of blocks: done before the next access to their bytes, and not sooner."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Elsewhere(Protocol):
    """Work in progress in another thread."""

    def succeeded(self) -> bool:
        """Whether it has ended without an error."""
        ...

    def finish(self) -> None:
        """Waits until it has been done, with or without an error."""
        ...

    def wait(self) -> None:
        """Waits until it has ended; what has not begun is not done any more."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Deferred:
    """One piece of work.

    Attributes:
        name: For messages.
        blocks: Ids of the blocks that it reads or writes, in the order in which it uses them.
        work: Does it; completely, or not at all if it raises. A second call after it was done,
            which exceptions may cause, does nothing.
        elsewhere: Work in another thread whose results ``work`` takes over; None if ``work``
            does everything.
        writes: Ids of the tensors that are written there, in blocks whose other tensors may be
            used.
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
        standing: Work that may remain over many passes, by block: only an access to the block
            itself requires it, and the plans of passes need not know about it.
        elsewhere: Work in other threads, in the order in which it was registered.
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
        """Whether there is deferred work that is not in progress in another thread already."""
        return any(debt.elsewhere is None for owed in self.owed.values() for debt in owed)

    def add(self, debt: Deferred, *, first: bool = False) -> None:
        """Registers a piece of work for each of its blocks.

        Args:
            debt: The work.
            first: Whether it is done before the work that is already registered.
        """
        for block_id in dict.fromkeys(debt.blocks):
            owed = self.owed.setdefault(block_id, [])
            owed.insert(0 if first else len(owed), debt)
        if debt.elsewhere is not None:
            self.elsewhere.append(debt)

    def stand(self, debt: Deferred) -> None:
        """Registers work that may remain over many passes; its blocks have no other such work.

        Args:
            debt: The work; it cancels itself when it begins, and registers itself again if it
                fails.
        """
        for block_id in debt.blocks:
            self.standing[block_id] = debt

    def cancel(self, debt: Deferred) -> None:
        """Forgets a piece of work that is no longer needed."""
        self._strike(debt)
        for block_id in debt.blocks:
            if self.standing.get(block_id) is debt:
                del self.standing[block_id]

    def that_take_up(self, elsewhere: Elsewhere) -> list[Deferred]:
        """Returns the pieces of work that take over the results of ``elsewhere``."""
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
        """Does the deferred work that cannot wait until after a loan of the block.

        That is all work that uses the block in HBM, and work of another thread on the same tensors;
        during its work on other tensors the block can be lent again.

        Args:
            block_id: The block.
            writes: Ids of the tensors that the borrower reads and writes.
        """
        owed = self.owed.get(block_id, ())
        self._settle([d for d in owed if d.elsewhere is None or not writes.isdisjoint(d.writes)])

    def pay_standing(self) -> None:
        """Does all work that may remain over many passes."""
        while self.standing:
            next(iter(self.standing.values())).work()

    def collect(self) -> None:
        """Takes over the results of other threads, in the order in which the work was registered.

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
        """Waits for other threads' work on a block, and takes over all results available by then.

        Work that failed waits for the next access.
        """
        for debt in self.owed.get(block_id, ()):
            if debt.elsewhere is not None:
                debt.elsewhere.finish()
        self.collect()

    def wait(self) -> None:
        """Waits for other threads without taking over results: the blocks are not used again."""
        for debt in self.elsewhere:
            if debt.elsewhere is not None:
                debt.elsewhere.wait()

    def order(self, block_ids: Iterable[int]) -> list[int]:
        """Returns the order in which blocks are used if those of ``block_ids`` are, one by one.

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
        """Registers interrupted work again; what was already done then does nothing."""
        for debt in deferred:
            self._strike(debt)
            self.add(debt)
            if debt in self._paying:
                self._paying.remove(debt)

    def repair(self) -> None:
        """Registers work again that an exception interrupted; none of it is in progress."""
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
