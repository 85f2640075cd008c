"""A large parameter stepped in parts: its state and masters pass through HBM one part at a time.

The step of an embedding uses eight times the bytes of its bf16 weights. With a vocabulary
of 128 Ki tokens, 4,096 wide, these are 1 GiB, and master and AdamW's state 6 GiB more, all at once;
and while they are copied in and out, nothing else can be. In parts, weights and gradient are in HBM
as a whole, as for the model, and of the rest one part is in use, one arriving and one leaving. If
HBM has no room for the gradient beside the weights, it is in runs as well
(:mod:`tiermem.nn.groups.gradwanted`), and each part fetches its own.

This is only for torch classes whose update of an element depends on that element, its state and
numbers that all elements share. Each part has its own plain optimizer, for a run of elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from tiermem.core.block import Block
from tiermem.errors import StepError
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.gradunit import GradRun, GradUnit
from tiermem.nn.groups.group import Group
from tiermem.nn.passes.keepers import UnderWay
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.nn.tensors.lazy import refresh
from tiermem.optim.rules.scaling import Scaling
from tiermem.optim.units.attempt import Waiting
from tiermem.optim.units.held import Held
from tiermem.optim.units.late import Ahead
from tiermem.optim.units.part import Part
from tiermem.optim.units.partsstate import PartsState, is_as_large, numbers_of
from tiermem.optim.units.undo import Undo
from tiermem.optim.units.unit import State, StepUnit
from tiermem.runtime.services.sweep import BlockSweep

__all__ = ["ELEMENTWISE", "Part", "PartedUnit"]

ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Classes that may be stepped in parts; not subclasses, which may do anything."""


class PartedUnit(StepUnit):
    """A unit of one parameter, stepped in parts.

    A step that fails has stepped some of them; the next one continues after these, with the numbers
    with which it began. The gradient has to stay until then.

    Attributes:
        parts: The parts in order.
        shown: The state of all parts, shown as the parameter's.
    """

    def __init__(self, whole: StepUnit, runs: Sequence[tuple[int, int]]) -> None:
        """Replaces a unit that has neither state nor masters in the tiers yet."""
        self._base = whole.name
        self._ticket: object = None  # of a step that has begun
        self.parts: list[Part] = []
        super().__init__(whole.name, whole.members, whole.entries, whole.plain.make)
        self.masters, self.handed.spoils = whole.masters, whole.handed.spoils
        self.parts += [Part(self, *run, number) for number, run in enumerate(runs)]
        self._param = whole.members[0][0]
        self._numbers_then: State | None = None  # those of a step that has begun
        self._follows = False
        # no frame refers to it: the traceback of a failure would keep it in its place
        self._gradient: torch.Tensor | None = None
        self._copied = False  # from runs that are not those of the parts
        self._whole: Held | None = None
        self._waiting: Waiting | None = None
        self._attempts: list[UnderWay] = []
        self.shown = PartsState(self._param, self.parts)

    @property
    def _made(self) -> int:
        """How many parts the current step has stepped."""
        if self._ticket is None:
            return 0
        return sum(part.unit.made is self._ticket for part in self.parts)

    @property
    def name(self) -> str:
        """The name for messages; says how far a failed step got."""
        if not self._made:
            return self._base
        return f"{self._base} ({self._made} of {len(self.parts)} parts stepped)"

    @name.setter
    def name(self, name: str) -> None:
        self._base = name

    def blocks(self) -> list[Block]:
        """Returns the blocks that a step uses, in the order of use."""
        return self._whole_blocks() + [block for part in self._parted() for block in part]

    def kept_blocks(self) -> list[Block]:
        """Returns the blocks of state and masters of all parts."""
        return [block for part in self.parts for block in part.unit.kept_blocks()]

    def state_shapes(self) -> Iterator[tuple[torch.Tensor, str, str, tuple[int, ...]]]:
        """Yields what its state has in the tiers: parameter, key, name and shape."""
        (entry,), first = self.entries, self.parts[0].unit
        for place in first.plain.places:
            yield self._param, place.key, f"{entry.name}.{place.key}", tuple(self._param.shape)

    def begins_with(self, blocks: list[Block]) -> list[Block]:
        """Returns the blocks of the first part."""
        return [*self._whole_blocks(), *self._parted()[0]]

    def at_once(self) -> list[Block]:
        """Returns the blocks of the largest part, three times.

        Weights and gradient stay where they are while parts are streamed, and the rest of HBM may
        be on both sides of either: of three runs, one then has room for a part.
        """
        largest = max(self._parted(), key=lambda found: sum(block.nbytes for block in found))
        return [*self._whole_blocks(), *largest, *largest, *largest]

    def _whole_blocks(self) -> list[Block]:
        """Returns the blocks that stay while parts are streamed."""
        weights = [] if self.group is None else [self.group.block]
        return weights + [unit.block for unit in self.grad_units() if not unit.runs]

    def _parted(self) -> list[list[Block]]:
        """Returns the blocks of each part."""
        unit = self.entries[0].unit
        runs = [] if unit is None else [[run.block] for run in unit.runs]
        kept = [part.unit.kept_blocks() for part in self.parts]
        found = zip_longest(runs, kept, fillvalue=list[Block]())
        return [[*mine, *others] for mine, others in found]

    # -- the step --------------------------------------------------------

    def step(
        self,
        runtime: ModuleRuntime,
        groups: Sequence[dict[str, Any]],
        state: State,
        scaling: Scaling | None = None,
        *,
        ticket: object,
        owed: bool = False,
        meanwhile: Callable[[], None] | None = None,
        write: Callable[[Sequence[Block]], None] | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        """Steps part by part, each completely or not at all; see :meth:`StepUnit.step`."""
        (entry,) = self.entries
        self.recover()
        if self.made is not ticket:
            if self.group is not None and self.group.freed:
                self.refuse_freed()
            if not owed and ahead is None:
                runtime.grads.sync(entry)
            self.flush()
            self._whole = Held(self, runtime, kept=False)
            self._waiting = Waiting(runtime, self)
            self._attempts = runtime.keepers.attempts
            self._attempts.append(self)
            try:
                self._hold(runtime, self._whole, owed=owed)
                if self._gradient is not None or self.parts[0].unit.run is not None:
                    self.counted.ahead(self, ticket)  # torch does not count the parts' writes
                    if self._ticket is None:
                        self._numbers_then = numbers_of(state.get(self._param, {}), self._param)
                        self._ticket = ticket
                    self._step_parts(runtime, groups, scaling, meanwhile, write, ahead)
                    if ahead is None:
                        self._show_gradient(runtime, entry)
                    self.shown.publish(runtime, state)
                else:
                    self._refuse_other_gradient()
                self._follows = False
                self.made, self._ticket = ticket, None
                self._let_go()
            except BaseException:
                self.foreign.forget()
                self._let_go()
                if ahead is not None:
                    self._begin_anew()  # the caller undoes all of it
                raise
        if owed:
            self.clear_forgotten(runtime)

    def _hold(self, runtime: ModuleRuntime, held: Held, *, owed: bool) -> None:
        """Fetches weights and gradient; see :meth:`_open`."""
        (entry,) = self.entries
        slots = held.open()
        self._look()
        unit = entry.unit
        runs: Sequence[GradRun] = ()
        self._copied = False
        if unit is not None and entry.has_grad:
            if not unit.runs:
                self._gradient = slots[id(unit.block)].views[entry.unit_index]
            elif self._has_runs(unit):
                runs = unit.runs
            else:
                self._gradient = runtime.grads.load(entry, runtime.grads.homes.dtype_of(entry))
                self._copied = True
        gradient = None if owed else entry.param.grad
        if gradient is not None and (entry.materialized or not entry.has_grad):
            self._refuse_sparse(gradient)
            self._gradient, runs = gradient.to(self._param.device).contiguous(), ()
            self._copied = False
        for part, run in zip_longest(self.parts, runs):
            part.unit.run = run

    def _refuse_sparse(self, gradient: torch.Tensor) -> None:
        """Raises for a gradient for whose runs torch has no kernels.

        Raises:
            StepError: If it is sparse.
        """
        if gradient.layout is not torch.strided:
            raise StepError(
                f"the gradient of {self.entries[0].name!r} is sparse, and its step is made in "
                "parts, as HBM has no room for the whole: give more hbm=, or use the weight in an "
                "nn.Embedding or nn.EmbeddingBag with sparse=True, which is planned for"
            )

    def _has_runs(self, unit: GradUnit) -> bool:
        """Whether a gradient is in the runs of the parts; not if its dtype was changed since."""
        return [(run.begin, run.end) for run in unit.runs] == [
            (part.begin, part.end) for part in self.parts
        ]

    def _show_gradient(self, runtime: ModuleRuntime, entry: Entry) -> None:
        """Shows a gradient that the step may have written, where users see it."""
        if not entry.has_grad:
            return
        if self._gradient is None:
            runtime.grads.show(entry)
        elif not self._copied:
            refresh(entry.lazy, self._gradient)
        elif self.handed.written:
            runtime.grads.store(entry, self._gradient)

    def _look(self) -> None:
        self._follows = self.foreign.look() or self._follows
        for part in self.parts:
            part.seen.written = self._follows

    def _let_go(self) -> None:
        """Releases weights and gradient, unless a part still has to be undone.

        A second call does nothing.
        """
        if any(part.unit.attempt is not None for part in self.parts):
            if self._waiting is not None:
                self._waiting.begin(self.recover)
            return
        self._gradient = None
        for part in self.parts:
            part.point_away()
        if self._whole is None or self._waiting is None:
            return
        self._waiting.pause()
        self._whole.close(written=True)
        self._waiting.end()
        self._whole = None
        if self in self._attempts:
            self._attempts.remove(self)

    def end(self) -> None:
        """Undoes what has to be undone, like :meth:`recover`."""
        self.recover()

    def leased(self) -> tuple[Group | None, list[Block]]:
        """Returns the group of weights that is held, and the other leased blocks."""
        return (None, []) if self._whole is None else self._whole.leased()

    def abandon(self) -> None:
        """Ends a step that failed; parts that are stepped stay stepped."""
        for part in self.parts:
            part.unit.abandon()
        self._let_go()
        self._begin_anew()

    def _step_parts(
        self,
        runtime: ModuleRuntime,
        groups: Sequence[dict[str, Any]],
        scaling: Scaling | None,
        meanwhile: Callable[[], None] | None,
        write: Callable[[Sequence[Block]], None] | None,
        ahead: Ahead | None,
    ) -> None:
        """Steps the parts that the current step has not stepped yet."""
        numbers, ticket = self._numbers_then or {}, self._ticket
        left = [part for part in self.parts if part.unit.made is not ticket]
        for part, following in zip_longest(left, left[1:]):
            fetch = meanwhile
            if meanwhile is not None and following is not None:
                coming = following.unit.blocks()
                fetch = partial(BlockSweep(runtime.manager).fetch, coming)
            part.take_numbers(numbers)
            part.point_at(self._param, self._gradient)
            part.unit.step(
                runtime, groups, part.state, scaling, ticket=ticket, meanwhile=fetch, ahead=ahead
            )
            part.point_away()
            self.handed.scaled |= part.unit.handed.scaled
            if write is not None:
                write(part.unit.kept_blocks())

    def recover(self) -> None:
        """Undoes what could not be undone when it failed, and ends the remaining leases."""
        for part in self.parts:
            part.unit.recover()
        self._let_go()

    def prepare_ahead(self, groups: Sequence[dict[str, Any]]) -> None:
        """Creates the plain optimizers of the parts, if they do not exist."""
        for part in self.parts:
            part.unit.prepare_ahead(groups)

    def can_be_taken_back(self) -> bool:
        """Whether a step of all parts can be undone from outside; see :class:`StepUnit`."""
        begun = self._ticket is not None or self._whole is not None
        return not begun and all(part.unit.can_be_taken_back() for part in self.parts)

    def keep_numbers(self, state: State) -> Undo:
        """Keeps the values of the state, both shown and of the parts, outside the tiers."""
        numbers = Undo()
        numbers.keep_entries(state, [self._param])
        for part in self.parts:
            plain = part.unit.plain
            numbers.keep_entries(plain.optimizer_for(None).state, plain.owns())
        return numbers

    @contextmanager
    def _open(self, runtime: ModuleRuntime) -> Iterator[None]:
        """Holds weights and gradient, if that is in the tiers."""
        with Held(self, runtime, kept=False):
            self._look()
            yield

    def _refuse_other_gradient(self) -> None:
        """Raises if parts would become inconsistent, as some were stepped with a lost gradient.

        Raises:
            StepError: If some were.
        """
        if self._made:
            raise StepError(
                f"the step of {self.name!r} was cut short, and the gradient for the other parts "
                "was set to None since: set it to what it was and call optimizer.step() again, "
                "or begin anew from a checkpoint"
            )

    def _begin_anew(self) -> None:
        self._ticket = self._numbers_then = None

    def store_first_state(
        self, runtime: ModuleRuntime, groups: Sequence[dict[str, Any]], state: State
    ) -> None:
        """Stores the state that the class creates before any step."""
        with torch.no_grad(), self._open(runtime):
            for part in self.parts:
                with part.over(self._param):
                    part.unit.store_first_state(runtime, groups, part.state)
            self._follows = False
        self.shown.publish(runtime, state)

    def zero_grad(self, runtime: ModuleRuntime, *, set_to_none: bool) -> None:
        """Clears the gradient, or sets it to zero; a deferred step keeps it until it is performed.

        Raises:
            StepError: If some parts were stepped with it, and the others were not.
        """
        if self._made and not any(map(runtime.grads.owed, self.grad_units())):
            raise StepError(
                f"zero_grad() while the step of {self.name!r} is unfinished: call "
                "optimizer.step(), it goes on where it stopped"
            )
        super().zero_grad(runtime, set_to_none=set_to_none)

    # -- the state -------------------------------------------------------

    def is_viewed(self) -> bool:
        """Whether users may have a view of the state."""
        return self.shown.is_viewed()

    def flush(self) -> None:
        """Stores what was written through views of the state."""
        self.shown.flush()

    def is_edited(self, state: State) -> bool:
        """Whether a user has set other tensors there, or deleted some; not during a step.

        Numbers are taken from the shown state anyway when a step begins.
        """
        return not self._made and self.shown.is_edited(state)

    def take_state(
        self,
        runtime: ModuleRuntime,
        state: State,
        loaded: State | None,
        take: Callable[[StepUnit, State, dict[int, State]], None],
    ) -> None:
        """Takes state over.

        Args:
            runtime: The modules' runtime.
            state: The tiered optimizer's, to be updated.
            loaded: The parameter's, which fits; None for none. An empty one counts as one: it is
                shown, as in torch.
            take: Loads a share into a part's unit: called with the unit, the state it shows, and
                the share by the id of the part's parameter.
        """

        def take_share(part: Part) -> None:
            share: dict[int, State] = {}
            if loaded:
                share[id(part.param)] = {k: self._share(part, v) for k, v in loaded.items()}
            take(part.unit, part.state, share)

        emptied = loaded is not None and not loaded
        self.replace_state(runtime, state, take_share, emptied=emptied)

    def replace_state(
        self,
        runtime: ModuleRuntime,
        state: State,
        take: Callable[[Part], None],
        *,
        emptied: bool = False,
    ) -> None:
        """Replaces the state of each part.

        Args:
            runtime: The modules' runtime.
            state: The tiered optimizer's, to be updated.
            take: Loads the state of one part into its unit; its shown state is empty then.
            emptied: Whether an empty state is shown if no part has any.
        """
        if emptied:
            state.setdefault(self._param, {}).clear()
        else:
            state.pop(self._param, None)
        self._begin_anew()
        self.shown.forget()
        for part in self.parts:
            part.state.clear()
            take(part)
        self.shown.publish(runtime, state)

    def _share(self, part: Part, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if is_as_large(value, self._param):
            return value.reshape(-1)[part.begin : part.end]
        return value.clone()

    def masters_in(
        self, runtime: ModuleRuntime, weight: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields the parameter with a copy of its master in host memory.

        Args:
            runtime: The modules' runtime.
            weight: The parameter's value in host memory.
        """
        runs = []
        flat = weight.reshape(-1)
        for part in self.parts:
            masters = part.unit.masters
            if masters is None:
                return
            stored = []
            if masters.block is not None and masters.made:
                stored = runtime.manager.read(masters.block)
            mine = {id(part.param): flat[part.begin : part.end]}
            runs += [value.reshape(-1) for _, value in masters.values(stored, mine)]
        yield self._param, torch.cat(runs).view(weight.shape)

    def take_master(self, runtime: ModuleRuntime, loaded: torch.Tensor) -> None:
        """Takes over a loaded master, and casts the weights from it."""
        flat = loaded.reshape(-1)
        with torch.no_grad(), self._open(runtime):
            for part in self.parts:
                with part.over(self._param), part.unit.held(runtime):
                    if part.unit.masters is not None:
                        part.unit.masters.take_loaded({id(part.param): flat[part.begin : part.end]})
            self._follows = False
