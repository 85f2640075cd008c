"""Experts of mixtures, copied to HBM one by one if their layers' blocks do not fit.

A *stack* is a block whose tensors hold one row for each expert of a layer. One row of one of these
tensors is a *piece*. The block stays below HBM; pieces are copied from its home into
seats in HBM (:mod:`tiermem.core.experts`), all of which are in one block, the *expert room*, whose
home is HBM. It is created when a pass begins that uses pieces, from HBM that other blocks leave
free, and given back as soon as another block needs room: pieces are copies, so nothing is lost.

A piece is valid until the block is written. Callers that write through the tensors they get detect
that from their use, and write the block; a seat is occupied as long as one of these tensors exists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any
from weakref import ref

import torch

from tiermem.core.block import Block, Tier
from tiermem.core.experts import FORESEEN, Way
from tiermem.core.residency import State
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.memory.expert_seats import (
    QUIET,
    WHOLE,
    Bank,
    Piece,
    Seat,
    Stack,
    Use,
    stack_of,
)
from tiermem.runtime.services.expert_room import ExpertRoom
from tiermem.runtime.services.expert_tensors import Lent, WholeTensors
from tiermem.runtime.services.expert_way import ExpertWay
from tiermem.runtime.services.piece_copies import PieceCopies
from tiermem.transfer.copy import Event

_GUESS_FROM = 0.6
"""Share of recent predictions that must have been right for a prediction to be worth a copy."""
_WORTH_WHOLE = 2.0  # more than any expert's


def _place(coming: tuple[int, deque[tuple[int, Piece]]]) -> int:
    """Returns the position in a call's order of a tensor's first piece."""
    return coming[1][0][0]


class ExpertStore:
    """The stacks of one manager, and the expert room; under the manager's lock.

    Attributes:
        stacks: The stacks by the id of their blocks.
        open: Whether there is an expert room.
        room: That room.
        whole: Stacks, by the id of their blocks, that are copied whole in the current pass.
        tensors: Copies whole tensors, in passes that use them so.
        way: Decides how the experts of forwards without gradients are copied.
    """

    def __init__(self, manager: BlockManager) -> None:
        """Starts without stacks."""
        self._manager = manager
        self._parts = parts = manager.parts
        self.stacks: dict[int, Stack] = {}
        self._copies = PieceCopies(parts, self.stacks.values)
        self._numbers: dict[int, Stack] = {}
        self.room = ExpertRoom(manager)
        self._uses: list[Use] = []
        self._guesses: dict[Piece, None] = {}
        self._last: Use | None = None
        self._lent: list[Seat] = []  # their readers may not all be submitted
        self._read: Seat | None = None  # the one whose readers are submitted but not yet marked
        self._reads: list[Event] = []  # shared by these: receives the events
        self._changes = 0  # changes of what is seated
        self.whole: frozenset[int] = frozenset()
        self.tensors = WholeTensors(parts)
        self.way = ExpertWay(manager, self.stacks, self.room)
        parts.transfers.packed.by_rows = lambda: self.open and self.way.unpacks
        limit, more = parts.limit, parts.evictor.more
        parts.evictor.more = lambda nbytes: more(nbytes) or self.give_way()
        limit.give_way.append(self.close)

    # -- stacks ----------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether there is an expert room."""
        return self.room.block is not None

    def add(self, block: Block, experts: int) -> Stack | None:
        """Adds a stack; returns None if its tensors are not laid out row by row."""
        stack = stack_of(block.id, block, experts)
        if stack is not None:
            self.close()
            self.stacks[block.id] = self._numbers[stack.number] = stack
        return stack

    def remove(self, block_id: int) -> None:
        """Removes a stack, if the block is one."""
        stack = self.stacks.get(block_id)
        if stack is not None:
            self.close()
            self._copies.forget_places(stack)
            del self.stacks[block_id], self._numbers[stack.number]

    # -- the expert room -------------------------------------------------

    @property
    def goes(self) -> Way:
        """How the experts are copied in the current pass."""
        if not self.open:
            return Way.LAYERS
        return Way.TENSORS if self.tensors else Way.EACH

    def by_rows(self, block_id: int) -> bool:
        """Whether a block is a stack whose rows are copied one by one in the current pass."""
        return self.open and block_id in self.stacks and block_id not in self.whole

    def prepare(
        self, whole: Collection[int], gradients: int | None = None, *, way: Way = Way.EACH
    ) -> Way:
        """Creates the expert room when a pass begins, gives it back, or keeps it.

        Args:
            whole: Stacks, by the id of their blocks, that are copied whole since their gradients
                are computed.
            gradients: Bytes of gradients that backward will add to HBM; None if unknown.
            way: How all stacks are copied, if none of them is in ``whole``.

        Returns:
            How they are copied: one by one if there is no room for whole tensors.
        """
        parts, stacks = self._parts, self.stacks.values()
        if not stacks or parts.copy.capturing():
            return way
        parts.counters.add_up()
        self.whole = frozenset(self.stacks if way is Way.LAYERS else whole)
        if len(self.whole) == len(stacks):
            self.close()
            return way
        suits = self.room.suits(self.whole, gradients)
        if not suits or bool(self.tensors) is not (way is Way.TENSORS):
            self.close()
        if not self.open and way is Way.TENSORS:
            if self.room.make(stacks, self._worth, tensors=True):
                self.tensors.lay_out(stacks, self.room.banks)
            if not self.tensors:  # blocks were added, or this room was given back too often
                self.close()
                self.way.refuse(way)
                way = Way.EACH
        if not self.open:
            self.room.make(stacks, self._worth)
        experts = max(s.experts for s in stacks) if self.way.all_chosen else 0
        for bank in self.room.banks.values():
            bank.who.expect(experts)
        return way

    def begin_pass(self) -> None:
        """Begins the copies of whole tensors; those of blocks that are used sooner have begun."""
        self.tensors.begin()

    def close(self) -> None:
        """Gives the expert room back, with all seated pieces."""
        if self.open:
            for seat in self.room.seats.values():
                self._copies.settle(seat)
            self._forget_seated()
            self.room.give_back()

    def repair(self) -> None:
        """Gives the expert room back after an exception anywhere; no operation is in progress."""
        self._uses.clear()
        self.tensors.repair()
        self._forget_seated()
        self.room.repair()
        self.way.reset()

    def give_way(self) -> bool:
        """Closes the expert room for a block without a place; returns whether that freed space."""
        if not self.open:
            return False
        self.close()
        self.room.shrink()
        return True

    def _forget_seated(self) -> None:
        """Empties every seat."""
        self.tensors.clear()
        for bank in self.room.banks.values():
            for piece in list(bank.who.seated):
                bank.who.give_up(piece)
            for seat in bank.seats:
                seat.transfer = seat.event = None
        self._guesses.clear()
        self._lent.clear()
        self._read, self._reads = None, []
        self._changes += 1
        for stack in self.stacks.values():
            stack.guessed.clear()

    def _worth(self, piece: Any) -> float:
        if not isinstance(piece, Piece):
            return 0.0  # out of date
        if piece.expert == WHOLE:
            return _WORTH_WHOLE
        return self._numbers[piece.stack].popularity.share(piece.expert)

    # -- use -------------------------------------------------------------

    def usable(self, stack: Stack) -> bool:
        """Whether pieces of a stack can be copied now: whether its home copy is current.

        The block's deferred work is done first, and a dirty copy is written home.
        """
        parts = self._parts
        if not self.open or parts.copy.capturing() or stack.block.id not in self.stacks:
            return False
        parts.deferred.pay(stack.block.id)  # the room may be given back for it
        return self.open and self._at_home(stack)

    def _at_home(self, stack: Stack) -> bool:
        """Whether a stack's home copy is current, and the pieces are copies of it."""
        parts = self._parts
        record = parts.table[stack.block.id]
        if record.fixed or not record.defined or parts.evictor.rules.is_held(record):
            return False  # a lease holder may be writing
        if record.in_hbm is State.DIRTY:
            parts.transfers.drain(record)
        if record.in_hbm is State.DRAINING:
            parts.transfers.settle(stack.block.id)
        if record.at_home is not State.VALID:
            return False
        stamp = record.stamp
        if stack.stamp != stamp:
            self._drop(stack)
            stack.stamp = stamp
        return True

    def _drop(self, stack: Stack) -> None:
        """Drops all pieces of a stack that was written."""
        self._changes += 1
        for bank in self.room.banks.values():
            pieces = [p for p in bank.who.seated if isinstance(p, Piece)]
            for piece in pieces:
                if piece.stack != stack.number:
                    continue
                seat = bank.seats[bank.who.seated[piece]]
                self._copies.settle(seat)
                if not seat.aliased:
                    bank.who.give_up(piece)
                else:  # it stays for its readers, but is no longer found by its piece
                    bank.who.rename(piece, object())
        self._copies.forget_places(stack)
        stack.guessed.clear()

    def begin(self, use: Use, expected: Sequence[int] = ()) -> None:
        """Notes what a call will ask for, and begins the copies for which there are seats.

        Args:
            use: The call.
            expected: Experts that the next stack will probably choose, the most probable first.
        """
        stack, last = use.stack, self._last
        self._last = use
        if last is not None:
            use.before = ref(last)
        if not use.again:
            stack.popularity.note(use.chosen)
            stack.order = tuple(use.wanted)
            if last is not None and not last.again:
                last.stack.after = stack
        self.enter(use, expected)

    def enter(self, use: Use, expected: Sequence[int] = ()) -> None:
        """Counts the choices of a call, and begins its copies."""
        stack, counters, coming = use.stack, self._parts.counters, use.coming
        seated, away = self._seated(stack), set[int]()
        for place, piece in enumerate(use.wanted):
            if piece not in seated[piece.tensor]:
                coming.setdefault(piece.tensor, deque()).append((place, piece))
                away.add(piece.expert)
        if not use.again:
            stack.quiet = 0 if coming or stack.guessed else stack.quiet + 1
            if not coming:
                stack.found = self._changes
        counters.experts_chosen += len(use.chosen)
        counters.expert_hits += len(use.chosen) - len(away - {WHOLE})
        if self._guesses:
            for piece in [p for p in self._guesses if p.stack == stack.number]:
                del self._guesses[piece]
        if stack.guessed:
            counters.expert_guesses_right += len(stack.guessed.intersection(use.chosen))
            stack.guessed = set()
        self._uses.append(use)
        begun = False
        try:
            here = self._go_on(use) if coming else True
            if here and expected and stack.after is not None:
                self._expect(stack.after, expected)
            begun = True
        finally:
            if not begun:
                self._uses.remove(use)

    def end(self, use: Use) -> None:
        """Ends a call: pieces not asked for may leave; copies predicted for the next call begin."""
        if use in self._uses:
            self._uses.remove(use)
        after = use.stack.after
        if use.again or after is None or (use.saved and after.number <= use.stack.number):
            return  # backward is next, and resumes what was saved
        if not self.tensors and self.open and after.found != self._changes:
            self._guess(after)

    def is_seated(self, seat: Seat) -> bool:
        """Whether a seat still has the piece that was copied there last."""
        if seat.piece is None:
            return False
        bank = self._bank(seat.piece)
        index = bank.who.seated.get(seat.piece)
        return index is not None and bank.seats[index] is seat

    def rows(
        self, use: Use, stack: Stack, tensor: int, experts: Sequence[int]
    ) -> list[torch.Tensor] | None:
        """Returns pieces, to be read by the work that is next submitted to the current stream.

        Args:
            use: The call that asks.
            stack: The stack.
            tensor: Which tensor of its block.
            experts: Which experts; no more than there are seats.

        Returns:
            A tensor for each, with the shape of a row, or of the whole tensor if it has no rows;
            None if no seat is available.

        Raises:
            StorageError: If one cannot be read.
        """
        if not self.open or (use not in self._uses and not self.usable(stack)):
            return None
        if self._lent or self._read is not None:
            self._note_released()
        spec, streams = stack.block.tensors[tensor], tensor in stack.rows
        shape = spec.shape[1:] if streams else spec.shape
        bank, pieces, lent = (
            self.room.bank_of[stack.number, tensor],
            stack.pieces[tensor],
            self._lent,
        )
        if use.coming:
            self._go_on(use)  # seats may be free since the last kernels were submitted
        found, seats, who, behind = [], bank.seats, bank.who, self._parts.copy.use
        for expert in experts:
            piece = pieces[expert]
            index = who.seated.get(piece)
            if index is None or seats[index].transfer is not None:
                seat = self._seat_of(bank, piece, use)
                if seat is None:
                    return None
            else:
                seat = seats[index]
                use.wanted.pop(piece, None)
                who.used(piece)
            lent.append(seat)
            seat.use = use
            found.append(seat.give(spec, shape, use, piece))
            behind(seat.event)
        if use.again and not use.wanted and use in self._uses:
            self._uses.remove(use)
        return found

    def together(
        self, use: Use, stack: Stack, tensor: int, experts: Sequence[int]
    ) -> list[torch.Tensor] | None:
        """Returns pieces for a copy of them that is submitted before the lock is released.

        Nobody else has these tensors: they do not count as views and are not written.

        Args:
            use: The call that asks.
            stack: The stack.
            tensor: Which tensor of its block.
            experts: Which experts, in the order of the copy.

        Returns:
            A tensor for each, with the shape of one row of a stack; None if there are not enough
            seats for all of them at once.

        Raises:
            StorageError: If one cannot be read.
        """
        if not self.open or (use not in self._uses and not self.usable(stack)):
            return None
        if self._read is not None and stack.quiet < QUIET:
            self._note_released()  # otherwise when something is copied: a later event is enough
        if use.coming:
            self._go_on(use)
        bank, pieces, form = (
            self.room.bank_of[stack.number, tensor],
            stack.pieces[tensor],
            stack.forms[tensor],
        )
        seats, seated, copy = bank.seats, bank.who.seated, self._parts.copy
        asked = [pieces[expert] for expert in experts]
        places = [seats[seated[piece]] for piece in asked if piece in seated]
        there = [seat for seat in places if seat.transfer is None]
        if len(there) < len(asked):
            there = self._seats_of(bank, asked, use)
            if not there:
                return None
        reads, stream, self._read = self._reads, copy.stream(), there[0]
        copy.use(None)
        for seat in there:
            seat.released = reads
            event = seat.event
            if event is not None and event.waiter != stream:
                copy.hold_up(stream, event)
        bank.who.used(*asked)
        if use.coming or use.again:  # otherwise they stay until the call ends: nothing needs room
            for piece in asked:
                use.wanted.pop(piece, None)
            if use.again and not use.wanted and use in self._uses:
                self._uses.remove(use)
        try:
            return [seat.kept[form] for seat in there]
        except KeyError:
            return [seat.look(*form) for seat in there]

    def _seats_of(self, bank: Bank, pieces: Sequence[Piece], use: Use) -> list[Seat]:
        """Returns where pieces are, as :meth:`_seat_of` does; none unless all have seats."""
        found = list[Seat]()
        try:
            for piece in pieces:
                seat = self._seat_of(bank, piece, use)
                if seat is None:
                    return []
                found.append(seat)
                seat.inside = True  # it stays while the others are fetched
            return found[:]
        finally:
            for seat in found:
                seat.inside = False

    def _seat_of(self, bank: Bank, piece: Piece, use: Use) -> Seat | None:
        """Returns a piece's seat, with its copy at least begun, or its file read complete."""
        use.wanted.pop(piece, None)
        asked = False
        while True:
            index = bank.who.seated.get(piece)
            if index is None:
                index = self._bring(bank, piece, urgent=True)
                asked = True
            if index is None:
                return None
            seat = bank.seats[index]
            bank.who.used(piece)
            error = None
            if seat.transfer is not None:
                seat.inside = True  # the next copies begin before the host waits for a disk
                try:
                    self._go_on(use)
                finally:
                    seat.inside = False
                error = self._copies.settle(seat)
            if error is None:
                return seat
            bank.who.give_up(piece)
            self._changes += 1
            if asked:  # the error of a read ahead is ignored: the read is repeated
                raise error

    def seats_for(self, stack: Stack, tensor: int) -> int:
        """Returns how many pieces of a tensor can be used at the same time."""
        bank = self.room.bank_of.get((stack.number, tensor))
        return 0 if bank is None else len(bank.seats)

    def lend(self, stack: Stack, tensor: int) -> tuple[Lent, torch.Tensor] | None:
        """Returns a whole tensor; see :meth:`WholeTensors.lend`."""
        return self.tensors.lend(stack, tensor) if self.tensors and self.usable(stack) else None

    # -- inside ----------------------------------------------------------

    def _note_released(self) -> None:
        """Notes, for seats without views, the events after which their last readers have ended."""
        lent, free = list[Seat](), list[Seat]()
        for seat in self._lent:
            (lent if seat.aliased else free).append(seat)
        one = free[0] if free else self._read
        if one is None:
            return
        self._lent[:] = lent  # in place: rows() uses it
        now = self._parts.copy.guards(one.extent)
        for seat in free:
            seat.released = now
        if self._read is not None:
            self._reads += now
            self._read, self._reads = None, []

    def _seated(self, stack: Stack) -> list[dict[Hashable, int]]:
        """Returns what is seated in the banks of a stack's pieces, by tensor."""
        number, bank_of = stack.number, self.room.bank_of
        return [bank_of[number, tensor].who.seated for tensor in range(len(stack.sizes))]

    def _bank(self, piece: Piece) -> Bank:
        return self.room.bank_of[piece.stack, piece.tensor]

    def _go_on(self, use: Use) -> bool:
        """Begins the copies of what is needed next; returns whether there were seats for all."""
        coming, open_ones, number = use.coming, dict(use.coming), use.stack.number
        while open_ones:
            tensor, pieces = min(open_ones.items(), key=_place)
            piece = pieces[0][1]
            bank = self.room.bank_of[number, tensor]
            needs = piece in use.wanted and piece not in bank.who.seated
            if needs and self._bring(bank, piece) is None:
                del open_ones[tensor]
                continue
            pieces.popleft()
            if not pieces:
                del open_ones[tensor], coming[tensor]
        return not coming

    def _expect(self, stack: Stack, experts: Sequence[int]) -> None:
        """Begins the copies of experts that an early router call has chosen, if mostly right."""
        stack.popularity.expected = list(experts)
        if stack.popularity.foreseen >= FORESEEN and self.usable(stack):
            rows = [stack.pieces[index] for index in stack.rows]
            self.bring_guesses(stack, [row[expert] for expert in experts for row in rows])

    def _guess(self, stack: Stack) -> None:
        """Begins the copies of the last choice, if that has predicted the next choice well."""
        if stack.popularity.repeats < _GUESS_FROM or not self.usable(stack):
            return
        changes = self._changes
        self.bring_guesses(stack, stack.order)
        if self._changes == changes:
            stack.found = changes

    def bring_guesses(self, stack: Stack, pieces: Iterable[Piece]) -> None:
        """Begins the copies of pieces that no call has asked for, as far as there are seats.

        Not from a swap file, as the host would wait for it.
        """
        record = self._parts.table[stack.block.id]
        if record.home is Tier.NVME and not self._parts.homes.read_only(record.home_extent):
            return
        full, seated = set[int](), self._seated(stack)
        for piece in pieces:
            if piece in seated[piece.tensor] or piece.tensor in full:
                continue
            if self._bring(self._bank(piece), piece, guessed=True) is None:
                full.add(piece.tensor)
                if len(full) == len(stack.rows):
                    return
                continue
            self._guesses[piece] = None
            if piece.expert not in stack.guessed:
                stack.guessed.add(piece.expert)
                self._parts.counters.expert_guesses += 1

    def _bring(
        self, bank: Bank, piece: Piece, *, urgent: bool = False, guessed: bool = False
    ) -> int | None:
        """Begins to copy a piece into a seat; returns its number, None if there is none."""
        if piece.expert != WHOLE and self.tensors:
            return None
        self._changes += 1
        uses, guesses, seats, seated = self._uses, self._guesses, bank.seats, bank.who.seated
        wanted = uses[0].wanted if len(uses) == 1 else {p for use in uses for p in use.wanted}

        def stays(other: Any) -> bool:
            return other in wanted or other in guesses or seats[seated[other]].aliased

        index = bank.who.seat(piece, stays, urgent=urgent, guessed=guessed)
        if index is None and urgent:
            index = self._make_leave(bank, piece)
        if index is None:
            return None
        filled = False
        try:
            seat = seats[index]
            if seat.transfer is not None:
                self._copies.settle(seat)  # a prediction that was not used
            if self._lent or self._read is not None:
                self._note_released()
            seat.piece, seat.use = piece, None
            self._copies.begin(seat, self._numbers[piece.stack], piece, urgent=urgent)
            filled = True
        finally:
            if not filled:
                bank.who.give_up(piece)
        return index

    def _make_leave(self, bank: Bank, piece: Piece) -> int | None:
        """Gives a piece the seat of a prefetched one: of a prediction, or the one needed last.

        The evicted piece is copied again when it is asked for.
        """
        for other in [*self._guesses, *(p for use in self._uses for p in reversed(use.wanted))]:
            index = bank.who.seated.get(other)
            if index is not None and not bank.seats[index].aliased:
                self._guesses.pop(other, None)
                bank.who.give_up(other)
                return bank.who.seat(piece, lambda _: True, urgent=True, guessed=False)
        return None
