"""The data structures of the expert store: stacks, their pieces, seats, and calls using them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tiermem.core.block import Block, Extent, TensorSpec, align_up
from tiermem.core.experts import Popularity, Seats
from tiermem.core.layout import contiguous_stride
from tiermem.runtime.base.functorch import outside_inference
from tiermem.runtime.memory.slots import typed_view, use_count
from tiermem.transfer.copy import Event
from tiermem.transfer.file.mover import FileTransfer

WHOLE = -1
"""Instead of an expert number: the piece is a whole tensor (biases, whose rows are small)."""
QUIET = 4
"""After this many calls in a row that found all pieces in HBM, the next is not prepared for
copies."""
_LEAST_SEATS = 3


class Piece(NamedTuple):
    """The part of one tensor of a stack that belongs to one expert.

    Attributes:
        stack: Number of the stack.
        tensor: Which tensor of the block.
        expert: Which expert, or :data:`WHOLE`.
    """

    stack: int
    tensor: int
    expert: int


@dataclass(eq=False)
class Stack:
    """A block that has the weights of a layer's experts.

    Attributes:
        number: Its number in the store.
        block: The block.
        experts: The number of experts.
        rows: The tensors whose rows, one per expert, are large enough to be copied one by one.
        popularity: How often each expert is chosen.
        stamp: Which bytes its pieces were copied from; see :meth:`ExpertStore.begin`.
        guessed: Experts whose pieces were fetched before a token chose them.
        places: Where checkpoint files have its pieces.
        after: The stack that was last used after it.
        order: The pieces that its last call asked for, in order.
        grouped: Whether its last call was one of grouped products.
        foresee: Computes scores of the experts from the hidden states of the layer before; None if
            its router is not available.
        quiet: How many calls in a row have found everything in HBM, without predictions.
        found: At which change of the expert room all of ``order`` was there.
        sizes: Bytes of one piece of each tensor.
        begins: The byte offset of each piece in the block, by tensor and expert.
        pieces: All pieces, by tensor and expert.
        forms: Dtype and shape of a piece of each tensor that has several.
        expert_nbytes: Bytes of all pieces of one expert.
    """

    number: int
    block: Block
    experts: int
    rows: tuple[int, ...]
    popularity: Popularity
    stamp: tuple[Any, ...] = ()
    guessed: set[int] = field(default_factory=set)
    places: dict[Piece, Extent] = field(default_factory=dict)
    after: Stack | None = None
    order: tuple[Piece, ...] = ()
    grouped: bool = False
    foresee: Callable[[torch.Tensor], torch.Tensor | None] | None = None
    quiet: int = 0
    found: int = -1
    sizes: list[int] = field(init=False)
    begins: list[list[int]] = field(init=False)
    pieces: list[list[Piece]] = field(init=False)
    forms: list[tuple[torch.dtype, tuple[int, ...]]] = field(init=False)
    expert_nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        """Creates all pieces once: each call asks for several of each tensor."""
        self.sizes, self.begins, self.pieces, self.forms = [], [], [], []
        for tensor, spec in enumerate(self.block.tensors):
            streams, experts = tensor in self.rows, range(self.experts)
            size = spec.nbytes // self.experts if streams else spec.nbytes
            self.sizes.append(size)
            self.begins.append([spec.offset + e * size for e in (experts if streams else (0,))])
            shape = spec.shape[1:] if streams else spec.shape
            dtype: Any = spec.dtype
            self.forms.append((dtype, (1, *shape)))
            self.pieces.append(
                [Piece(self.number, tensor, e if streams else WHOLE) for e in experts]
            )
        self.expert_nbytes = sum(map(self.nbytes, self.rows))

    def nbytes(self, tensor: int) -> int:
        """Returns the bytes of one piece of a tensor."""
        return self.sizes[tensor]

    def piece(self, tensor: int, expert: int) -> Piece:
        """Returns a tensor's piece for an expert."""
        return self.pieces[tensor][expert]

    def with_rows(self) -> list[tuple[int, int]]:
        """Returns byte offset and size of each tensor that has rows, in order."""
        return sorted(
            (spec.offset, spec.nbytes) for spec in map(self.block.tensors.__getitem__, self.rows)
        )

    def begin_of(self, piece: Piece) -> int:
        """Returns the offset of a piece in the block, in bytes."""
        return self.begins[piece.tensor][piece.expert]


def stack_of(number: int, block: Block, experts: int) -> Stack | None:
    """Returns a block as a stack; None if its tensors are not laid out row by row."""
    specs = block.tensors
    if not all(spec.nbytes for spec in specs):
        return None  # a tensor without bytes has no seat
    if any(s.shape[0] != experts or s.stride != contiguous_stride(s.shape) for s in specs):
        return None
    rows = tuple(index for index, spec in enumerate(specs) if len(spec.shape) >= 3)
    # pieces have the alignment that they have in the whole tensor, as far as kernels care (256
    # bytes)
    if any(specs[index].nbytes // experts % 256 for index in rows):
        return None
    return Stack(number, block, experts, rows, Popularity(experts))


def small_pieces(stacks: Iterable[Stack]) -> Counter[int]:
    """Returns how many pieces are whole tensors (biases), by the bytes of a seat."""
    return Counter(
        align_up(stack.nbytes(index))
        for stack in stacks
        for index in range(len(stack.block.tensors))
        if index not in stack.rows
    )


def sizes_of(stacks: Iterable[Stack], *, tensors: bool = False) -> dict[int, tuple[int, int]]:
    """Returns the number of pieces, and the least number of seats, by the bytes of a seat.

    Args:
        stacks: The stacks.
        tensors: Whether one whole tensor is the least.
    """
    stacks = list(stacks)
    small = small_pieces(stacks)
    pieces, least = Counter(small), dict[int, int]()
    for stack in stacks:
        mine: Counter[int] = Counter()
        for index in stack.rows:
            size = align_up(stack.nbytes(index))
            pieces[size] += stack.experts
            mine[size] = max(mine[size], stack.experts) if tensors else mine[size] + _LEAST_SEATS
        for size, count in mine.items():
            least[size] = max(least.get(size, 0), count)
    return {size: (pieces[size], least.get(size, 0) + small[size]) for size in pieces}


class Seat:
    """One seat: its bytes, the piece in it, and the events to wait for.

    Attributes:
        extent: Where it is in HBM.
        inside: Whether a view of it is being created.
        kept: Views of it that do not count as aliases, by dtype and shape: only this class has
            them.
        event: The event of the copy that filled it.
        transfer: The read from a file that fills it; None once it is complete.
        released: Events after the last kernels that read the former piece; several seats may
            share a list to which they are added later.
        piece: The piece that was last copied there.
        use: The call that last got a view of it.
    """

    __slots__ = (
        "_baseline", "_storage", "bytes", "event", "extent", "inside", "kept", "piece", "released",
        "transfer", "use",
    )  # fmt: skip

    def __init__(self, whole: torch.Tensor, extent: Extent) -> None:
        """Covers ``whole``, 1-D uint8, with a storage of its own."""
        self.bytes = whole
        self.extent = extent
        self.event: Event | None = None
        self.transfer: FileTransfer | None = None
        self.inside = False
        self.released: Sequence[Event] = ()
        self.piece: Piece | None = None
        self.use: Use | None = None
        self._storage = whole.untyped_storage()
        self.kept: dict[tuple[Any, tuple[int, ...]], torch.Tensor] = {}
        self._baseline = use_count(self._storage._cdata)

    @property
    def aliased(self) -> bool:
        """Whether there are views of the bytes, or one is being created."""
        return self.inside or use_count(self._storage._cdata) > self._baseline

    @property
    def address(self) -> int:
        """The first byte in memory; identifies the storage of a view."""
        return self._storage.data_ptr()

    def view(self, spec: TensorSpec, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns the piece as a tensor; as long as the tensor exists, the seat is occupied."""
        return self.look(spec.dtype, shape).detach()

    def give(
        self, spec: TensorSpec, shape: tuple[int, ...], use: Use, piece: Piece
    ) -> torch.Tensor:
        """Returns a :meth:`view` for a call, which later checks whether the view was written."""
        counted = self.look(spec.dtype, shape)  # shares its version with all such views
        use.given.append((self, piece, counted, counted._version))
        return counted.detach()

    def look(self, dtype: Any, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns the piece as a tensor that is kept here and does not count as an alias."""
        found = self.kept.get((dtype, shape))
        if found is None:
            with outside_inference():
                found = typed_view(self._storage, dtype, 0, shape, contiguous_stride(shape))
            self.kept[dtype, shape] = found
            self._baseline += 1
        return found


class Bank:
    """Seats of one size.

    Attributes:
        seats: All of them.
        who: Which piece is in which seat.
    """

    def __init__(self, seats: list[Seat], who: Seats) -> None:
        """Starts with empty seats."""
        self.seats = seats
        self.who = who


def _nothing() -> None:
    return None


class Use:
    """One call of a layer's experts.

    Attributes:
        stack: The layer.
        chosen: The experts, ascending.
        counts: How often each of these was chosen.
        wanted: Pieces that were not asked for yet, in the order in which they will be.
        coming: Those of ``wanted`` that have no seat: by tensor, each with its index in that order.
        again: Whether it belongs to a backward: then its pieces were chosen in a forward.
        saved: Pieces of which autograd has saved views or copies, in that order.
        before: The call before it in the same direction, as long as that is known.
        given: The seats of which it got views, with their pieces, an object that has the
            version of these views, and the version at that time.
    """

    def __init__(
        self,
        stack: Stack,
        counts: Mapping[int, int],
        wanted: Iterable[Piece],
        *,
        again: bool = False,
    ) -> None:
        """Starts with all pieces still wanted."""
        self.stack = stack
        self.again = again
        self.saved: dict[Piece, None] = {}
        self.before: Callable[[], Use | None] = _nothing
        self.given: list[tuple[Seat, Piece, torch.Tensor, int]] = []
        self.counts = counts
        self.chosen = list(counts)
        self.wanted = dict.fromkeys(wanted)
        self.coming: dict[int, deque[tuple[int, Piece]]] = {}

    def written(self) -> dict[Piece, torch.Tensor | None]:
        """Returns the pieces that the call has written through its views.

        Returns:
            Copies of the present contents of their seats; None for pieces that have lost their
            seats.
        """
        given, self.given = self.given, []
        found: dict[Piece, torch.Tensor | None] = {}
        for seat, piece, counted, version in given:
            if counted._version != version:
                found[piece] = seat.bytes.clone() if seat.piece == piece else None
        return found
