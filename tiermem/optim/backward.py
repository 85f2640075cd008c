"""Steps inside backward: each block as soon as its gradient is final.

A gradient is final once autograd has run the node that accumulates it, in a backward after which
no other follows before ``step()``. Then its block of weights is in HBM, so is the gradient, and
nothing of it has to leave: state and masters come up, the step is made, and the gradient is gone.
Where the host steps the block, the gradient goes home, and the host's thread begins.

A step inside backward must not differ from one made by ``optimizer.step()``. So until
``optimizer.step()`` is called, access to the block's weights, state or masters is refused (by
deferred work that raises), and so is every call that would have used the gradient.
The first two steps are made after backward and only watched, as a loop has come round once then:
one that clips, scales, changes rates in between, throws gradients away or uses weights once more
after their gradients is refused, or served otherwise, before anything is stepped wrongly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from tiermem.errors import CapacityError, StepError, StorageError
from tiermem.nn.compat.outside import OUTSIDE
from tiermem.nn.compat.quiet import quiet, uncompiled
from tiermem.nn.groups.group import Entry, Group
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.nn.tensors.lazy import LazyTensor, gone
from tiermem.optim.host.steps import HostSteps
from tiermem.optim.rules.groups import frozen_settings
from tiermem.optim.rules.scaling import Scaling
from tiermem.optim.units.arrivals import Arrivals
from tiermem.optim.units.finality import accumulates, grad_of, is_nested, is_own, marks_of
from tiermem.optim.units.unit import State, StepUnit
from tiermem.runtime.services.sweep import BlockSweep
from tiermem.runtime.transfers.deferred import Deferred

_ELSE = "or make the optimizer with overlap='forward'"
_TRIALS = 2


class InBackward:
    """Makes the steps of one optimizer inside backward.

    Attributes:
        revocable: Whether its steps can be taken back.
        made: Units stepped since the last ``step()``, or begun on the host, by id.
        total: How many units were so far.
        ticket: Given to every unit that is stepped for the same ``step()``.
        failure: What the class has raised in a step, to be raised by ``step()``, or None.
    """

    revocable = False

    def __init__(self, runtime: ModuleRuntime, take_in: Callable[[], None]) -> None:
        """Watches the backwards of ``runtime``; ``take_in`` takes in edits of the state."""
        self._take_in = take_in
        self.made: dict[int, StepUnit] = {}
        self.total = 0
        self.ticket = object()
        self.failure: Exception | None = None
        self._runtime = runtime
        self._manager = runtime.manager
        self._micro_batches = 1
        self.count = 0
        self._arrivals = Arrivals()
        self._entries, self._units = self._arrivals.entries, self._arrivals.units
        self._groups: Sequence[dict[str, Any]] = ()
        self._state: State = {}
        self._host: HostSteps | None = None
        self._spent: dict[int, LazyTensor] = {}
        self._consumed: set[int] = set()
        self._settings: list[dict[str, Any]] = []
        self._marks: object = None
        self._deferred: list[Deferred] = []
        self._late: set[int] = set()
        # the steps that are only watched
        self._trials = 0
        self._watched = self._thrown = False
        self._trained: list[bool] = []
        self._final: list[Entry] = []
        self._edited: set[int] = set()
        # the backward under way
        self._task = -1
        self._counted = self._steps = self._watches = False
        self._pipeline = BlockSweep(self._manager)
        self._held_back: set[int] = set()  # blocks that go home in the next forward
        runtime.backward.watchers.append(self)
        runtime.grads.watchers.append(self)

    def extend(
        self,
        units: Iterable[StepUnit],
        groups: Sequence[dict[str, Any]],
        state: State,
        host: HostSteps | None = None,
    ) -> None:
        """Takes units on; the next steps are watched, and made after backward.

        Args:
            units: New ones.
            groups: All parameter groups, with the settings that a step uses.
            state: The tiered optimizer's, to be kept up to date.
            host: Makes the steps of units that are the host's, if any are.
        """
        self._groups, self._state, self._host = groups, state, host
        self._trials = 0
        self._watched = False
        self._arrivals.add(units)

    def close(self) -> None:
        """Stops watching backwards."""
        self._runtime.backward.watchers.remove(self)
        self._runtime.grads.watchers.remove(self)

    def leave(self, units: Iterable[StepUnit]) -> None:
        """Leaves blocks to ``step()`` for good: another optimizer steps them as well."""
        self._late.update(id(unit.group) for unit in units)

    # -- what the user calls ---------------------------------------------

    def accumulate(self, micro_batches: int) -> None:
        """Sets after how many backwards gradients are final.

        Raises:
            StepError: If it is no such number, or blocks are stepped already.
        """
        if isinstance(micro_batches, bool) or not isinstance(micro_batches, int):
            raise StepError(f"accumulate() takes a number of backwards, not {micro_batches!r}")
        if micro_batches < 1:
            raise StepError(f"accumulate() takes at least 1 backward, not {micro_batches}")
        self.refuse("accumulate()")
        self._micro_batches = micro_batches

    def refuse(self, what: str) -> None:
        """Refuses a call between a backward that stepped and ``step()``.

        Raises:
            StepError: Then.
        """
        self._account()
        if self.made:
            raise StepError(
                f"{what} between backward and optimizer.step(): {len(self.made)} units are "
                "stepped already (overlap='backward'), and their gradients are gone; call "
                f"optimizer.step() first, {_ELSE}"
            )

    def refuse_clipping(self, what: str) -> None:
        """Refuses what has to see all gradients before the first is used.

        Raises:
            StepError: Always.
        """
        raise StepError(
            f"{what}: with overlap='backward' blocks are stepped before all gradients are known; "
            f"make the optimizer with overlap='forward' to clip{self._damage()}"
        )

    def before_step(self, scaling: Scaling | None) -> None:
        """Makes sure that what was stepped inside backward is what ``step()`` would step now.

        Raises:
            StepError: If it is not, or would not be the next time.
        """
        self._account()
        if scaling is not None:
            raise StepError(
                "a GradScaler says only after backward whether a step is made, and by what its "
                "gradients are to be divided; make the optimizer with overlap='forward'"
                + self._damage()
            )
        if (self.made or self._watched) and self._marks != marks_of(self._groups):
            raise StepError(
                "the settings of the parameter groups (lr, ...) were changed between backward and "
                "optimizer.step(); with overlap='backward' steps use those of backward: change "
                f"them after optimizer.step(), {_ELSE}{self._damage()}"
            )
        self._check_gradients()
        self.settle()
        if self._host is not None:
            self._host.retry()

    def after_step(self) -> None:
        """Begins to count backwards anew; the step is made, or asked for.

        Cut short, it may be called again.
        """
        watched, thrown = self._watched, self._thrown
        self._watched = self._thrown = False
        if thrown and not self._tried:
            self._trials = 0
        elif watched:
            self._trials += 1
        self.count = 0
        self.failure = None
        self.made.clear()
        self._consumed.clear()
        self._final.clear()
        self._edited.clear()
        self.ticket = object()

    def forgotten(self, *, set_to_none: bool) -> None:
        """Called when gradients are cleared or set to zero, those already used included.

        Args:
            set_to_none: Whether they are cleared.
        """
        self.count = 0
        self.failure = None
        # gradients that are thrown away must not be used: another loop has to be seen
        self._thrown = self._thrown or bool(self._final)
        self._watched = False
        if not set_to_none:
            for param, stand_in in self._spent.items():
                entry = self._entries[param]
                if grad_of(entry) is stand_in:
                    shape, dtype = entry.param.shape, entry.param.dtype
                    zeros = torch.zeros(shape, dtype=dtype, device=self._manager.parts.device)
                    self._runtime.grads.store(entry, zeros)
        self._final.clear()
        self._edited.clear()

    @property
    def _tried(self) -> bool:
        return self._trials >= _TRIALS

    def settle(self) -> None:
        """Permits access to all blocks again."""
        with self._manager.lock:
            for debt in self._deferred:
                self._manager.parts.deferred.cancel(debt)
            self._deferred.clear()

    def repair(self) -> None:
        """After an exception at a line of tiermem's: blocks that were stepped stay stepped."""

    # -- what backward calls ---------------------------------------------

    def begins(self) -> bool:
        """Called as a backward begins; returns whether steps are likely to be made in it."""
        self._account()
        self._task = torch._C._current_graph_task_id()
        self._counted = self._steps = self._watches = False
        self._arrivals.forget()
        return self._tried and self.count + 1 == self._micro_batches

    def ends(self) -> None:
        """Called as a backward ends."""
        self._task = -1
        self._arrivals.forget()
        if self._watches:
            self._watched = True
            self.settle()
        self._steps = self._watches = False

    def arriving(self, entry: Entry) -> bool:
        """Called before a gradient is accumulated, or caught by ``autograd.grad``.

        Returns:
            Whether ``param.grad`` is to be left as it is.

        Raises:
            StepError: If the gradient that it adds to is gone.
        """
        if id(entry.param) not in self._entries:
            return False
        used = self._is_gone(entry)
        task = torch._C._current_graph_task_id()
        known = self._counted and task == self._task
        if known and not used and id(entry.param) not in self._consumed:
            return False
        if not accumulates(entry):
            return used
        if task == self._task and not self._counted and not is_nested():
            self._first()
        elif task != self._task or not self._counted:
            self._late.add(id(entry.group))  # a backward inside another: more may follow
        if used or id(entry.param) in self._consumed:
            raise self._another(entry)
        return False

    def arrived(self, entry: Entry) -> None:
        """Called when a gradient is in the tiers; steps its block if it was the last of that."""
        if not (self._steps or self._watches) or id(entry.param) not in self._entries:
            return
        if torch._C._current_graph_task_id() != self._task:
            return
        group = entry.group
        if id(group) in self._late or self._arrivals.awaits(group, entry):
            return
        if self._steps:
            self._step(group)
            return
        self._final += [e for u in self._units[id(group)] for e in u.entries if e.has_grad]
        late = partial(self._late.add, id(group))  # called where the weights are used once more
        self._owe(group.block.name, [group.block.id], late)

    def edited(self, entry: Entry) -> None:
        """Called when other code has written a gradient."""
        self._edited.add(id(entry.param))

    def has_used(self, entry: Entry) -> bool:
        """Whether a gradient that is there was used, and may stay as it is: none is."""
        return False

    # -- inside ----------------------------------------------------------

    def _first(self) -> None:
        """Decides, at the first gradient of a backward, whether steps are made in it."""
        for param in (*self._spent, *self._consumed):
            entry = self._entries[param]
            if (param in self._consumed or self._is_gone(entry)) and accumulates(entry):
                raise self._another(entry)
        if self.count >= self._micro_batches:
            if any(grad_of(entry) is not None for entry in self._entries.values()):
                raise StepError(
                    f"this is backward {self.count + 1} before optimizer.step(), and with "
                    "overlap='backward' blocks are stepped in backward "
                    f"{self._micro_batches}: say optimizer.accumulate(n) for n backwards per "
                    f"step, {_ELSE}; nothing of this backward was taken"
                )
            self.count = 0  # they were set to None by hand
        self._counted = True
        self.count += 1
        if self.count == self._micro_batches:
            with torch._C.DisableTorchFunctionSubclass():
                trained = [entry.param.requires_grad for entry in self._entries.values()]
            if trained != self._trained:  # a block's last gradient may be another from now on
                self._trained, self._trials = trained, 0
            self._steps, self._watches = self._tried, not self._tried
            self._settings = frozen_settings(self._groups)
            self._marks = marks_of(self._groups)
            self._pipeline = BlockSweep(self._manager)
            self._runtime.unwritten.clear()
            self._held_back = self._arrivals.held_back(self._runtime)
            self._edited.clear()
            if self._steps:
                self._take_in()

    def _step(self, group: Group) -> None:
        """Steps the units of a block whose gradients are final.

        What cannot be done here (a disk that fails, no room) is left to ``step()``, which tries
        again and says what is wrong.
        """
        units = [u for u in self._units[id(group)] if any(e.has_grad for e in u.entries)]
        for unit in units:
            if not unit.can_wait(self._runtime):
                return
        on_host = any(unit.host is not None for unit in units)
        work = uncompiled(InBackward._begin if on_host else InBackward._make)
        with self._manager.lock, quiet(self._manager.parts.device):
            work(self, group, units)

    def _make(self, group: Group, units: Sequence[StepUnit]) -> None:
        """Makes the steps of a block."""
        try:
            for unit in units:
                began = time.perf_counter_ns()
                write = self._pipeline.write if id(group) not in self._held_back else None
                unit.step(
                    self._runtime, self._settings, self._state, ticket=self.ticket, write=write
                )
                ended = time.perf_counter_ns()
                self._manager.parts.timeline.add("optimizer", unit.name, began, ended)
        except (StorageError, CapacityError):
            pass
        except Exception as error:
            if OUTSIDE not in error.__dict__:
                raise  # a signal handler's, or no memory, at a line of tiermem's
            self.failure = error
            self._steps = False
        finally:
            made = [unit for unit in units if unit.made is self.ticket]
            for unit in made:
                self._account_for(unit)
            if made:
                self._close_off(group, made)

    def _close_off(self, group: Group, made: Sequence[StepUnit]) -> None:
        """Refuses access to a block that is stepped, and writes it home in time."""
        blocks = [group.block, *(block for unit in made for block in unit.kept_blocks())]
        ids = [block.id for block in blocks]
        self._owe(group.block.name, ids, partial(self._refuse_look, group))
        if id(group) in self._held_back:
            self._runtime.unwritten += blocks  # until forward has got further
        else:
            self._pipeline.write(blocks)

    def _account(self) -> None:
        """Finds units that were stepped without a note of it (Ctrl-C at that moment)."""
        for units in self._units.values():
            for unit in units:
                if unit.made is self.ticket and id(unit) not in self.made:
                    self._account_for(unit)

    def _account_for(self, unit: StepUnit) -> None:
        """Notes that a unit was stepped, and clears its gradients; it may be called again."""
        if id(unit) not in self.made:
            if unit.host is None:
                self._spend(unit)
            self.made[id(unit)] = unit
            self.total += 1

    def _begin(self, group: Group, units: Sequence[StepUnit]) -> None:
        """Begins the steps of a block on the host, if the host steps all of its units.

        The gradients stay until they have been used. What cannot be begun here (a tensor has an
        alias, a file is to be written first) is left to ``step()``.
        """
        host = self._host
        if host is None or not all(host.can_begin(u, self._settings) for u in units):
            return
        try:
            host.begin(units, self._settings, None, self.ticket)
        except (StorageError, CapacityError, StepError):
            pass
        finally:
            begun = [unit for unit in units if host.is_begun(unit)]
            self.made.update((id(unit), unit) for unit in begun)
            self.total += len(begun)
            entries = [e for unit in begun for e in unit.entries if e.has_grad]
            self._consumed.update(id(entry.param) for entry in entries)
            ids = [block.id for unit in begun for block in unit.blocks()]
            if begun:
                refuse = partial(self._refuse_look, group)
                self._owe(group.block.name, ids, refuse, first=True)

    def _spend(self, unit: StepUnit) -> None:
        """Replaces the gradients that a step has used by stand-ins that raise."""
        with torch._C.DisableTorchFunctionSubclass():
            for entry in unit.entries:
                param = id(entry.param)
                if not entry.has_grad and param not in self._consumed:
                    continue
                if param not in self._spent:
                    self._spent[param] = self._spent_one(entry)
                self._consumed.add(param)
                if entry.has_grad:
                    self._runtime.grads.clear(entry)
                entry.param.grad = self._spent[param]

    def _spent_one(self, entry: Entry) -> LazyTensor:
        shape, formal, where = entry.param.shape, entry.param.dtype, self._manager.parts.device
        dtype = self._runtime.grads.dtype_of(entry)
        return gone(shape, dtype, where, partial(_gone, entry.name), formal)

    def _owe(
        self, name: str, blocks: Sequence[int], work: Callable[[], None], *, first: bool = False
    ) -> None:
        debt = Deferred(name, blocks, work)
        with self._manager.lock:
            self._manager.parts.deferred.add(debt, first=first)
        self._deferred.append(debt)

    def _refuse_look(self, group: Group) -> None:
        raise StepError(
            f"block {group.block.name!r} was stepped inside backward (overlap='backward') and its "
            "weights, gradients or state are used again before optimizer.step(): call "
            f"optimizer.step() first, {_ELSE}"
        )

    def _another(self, entry: Entry) -> StepError:
        return StepError(
            f"another gradient of parameter {entry.name!r} arrives, and the one that it adds to "
            "was used up by a step inside backward (overlap='backward'): call "
            "optimizer.step() and zero_grad() before the next backward, say "
            f"optimizer.accumulate(n) for n backwards per step, {_ELSE}"
        )

    def _check_gradients(self) -> None:
        """Refuses a step whose gradients are others than those of backward."""
        wrong = [e for e in self._final if id(e.param) in self._edited or not is_own(e)]
        wrong = [e for e in wrong if id(e.group) not in self._late]
        for unit in self.made.values():
            for entry in unit.entries:
                if id(entry.param) not in self._consumed:
                    same = grad_of(entry) is None
                elif unit.host is None:
                    same = self._is_gone(entry)
                else:  # it is kept, for the host
                    same = is_own(entry) and id(entry.param) not in self._edited
                if not same:
                    wrong.append(entry)
        if wrong:
            raise StepError(
                f"the gradient of parameter {wrong[0].name!r} was changed or replaced after it "
                "was final (by GradScaler.unscale_, clipping, a hook, ...); with "
                "overlap='backward' the step uses it before that: make the optimizer with "
                f"overlap='forward'{self._damage()}"
            )
        for param in self._spent:
            entry = self._entries[param]
            if param not in self._consumed and self._is_gone(entry):
                _gone(entry.name)

    def _damage(self) -> str:
        if not self.made:
            return "; nothing has been stepped yet"
        return f"; {len(self.made)} units are stepped already, load a checkpoint"

    def _is_gone(self, entry: Entry) -> bool:
        stand_in = self._spent.get(id(entry.param))
        return stand_in is not None and grad_of(entry) is stand_in


def _gone(name: str, *_: object) -> Any:
    """Raises the error for access to a gradient that a step inside backward has used up."""
    raise StepError(
        f"the gradient of parameter {name!r} was used up by a step inside backward "
        "(overlap='backward') and is kept nowhere; look at it with overlap='forward', or read it "
        "in a hook of the parameter (register_hook)"
    )
