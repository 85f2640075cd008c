"""Pieces of experts that autograd has saved: which they are, and fetching them in backward.

Nothing is kept in HBM for them: the call notes what was saved, and backward copies those pieces
into seats again, the last one first.
"""

from __future__ import annotations

from tiermem.runtime.memory.expert_seats import WHOLE, Piece, Use
from tiermem.runtime.services.expert_store import ExpertStore


class SavedExperts:
    """What the graphs of calls have saved of stacks; under the manager's lock."""

    def __init__(self, store: ExpertStore) -> None:
        """Starts with nothing saved."""
        self._store = store
        self._resumed: dict[Use, Use] = {}

    def shown(self, address: int) -> tuple[Use, Piece] | None:
        """Returns the piece that views of a storage show, and the call that got them.

        Args:
            address: The first byte of the storage.

        Returns:
            None if the storage is not a seat, or its bytes are no longer those of the piece.
        """
        store = self._store
        seat = store.room.seats.get(address)
        if seat is None or seat.piece is None or seat.use is None or not store.is_seated(seat):
            return None
        return seat.use, seat.piece

    def resume(self, use: Use) -> Use:
        """Returns the use with which backward reads what was saved of a call.

        The first time, its copies begin, and those for the call before it.
        """
        again = self._resumed.get(use)
        if again is None:
            stack, store = use.stack, self._store
            experts = {piece.expert for piece in use.saved}
            counts = dict.fromkeys(sorted(experts - {WHOLE}), 1)
            again = self._resumed[use] = Use(stack, counts, reversed(use.saved), again=True)
            if store.usable(stack):
                store.enter(again)
                before = use.before()
                if before is not None and store.usable(before.stack):
                    store.bring_guesses(before.stack, reversed(before.saved))
        return again

    def end_backward(self) -> None:
        """Ends the resumed uses of a backward: pieces that were not asked for may leave."""
        for use in self._resumed.values():
            self._store.end(use)
        self._resumed.clear()
