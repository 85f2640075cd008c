"""Any torch optimizer, stepped block by block over weights, gradients and state in the tiers."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, Literal

import torch

from tiermem.core.block import Block, Extent, Tier
from tiermem.errors import CapacityError, StepError
from tiermem.nn.compat.entrances import entrance
from tiermem.nn.compat.outside import outside
from tiermem.nn.compat.quiet import quiet
from tiermem.nn.groups.need import Kept
from tiermem.nn.passes.runtime import Keeper, ModuleRuntime, entries_of
from tiermem.nn.tensors.lazy import end
from tiermem.optim import clip
from tiermem.optim.ahead import StepsAhead
from tiermem.optim.auto import AutoOverlap
from tiermem.optim.backward import InBackward
from tiermem.optim.classes import (
    check_wrapped,
    in_order,
    optimizer_class,
    refuse_draws,
    refuse_others,
)
from tiermem.optim.host.devicebits import DeviceBits, Movable
from tiermem.optim.host.room import HostRoom
from tiermem.optim.host.share import Speeds
from tiermem.optim.host.side import rooms_of
from tiermem.optim.host.sides import choose_exact_sides, choose_sides
from tiermem.optim.host.steps import HostSteps, say_how_far
from tiermem.optim.methods import Counts, Methods
from tiermem.optim.putoff import PutOff
from tiermem.optim.rounds import Round
from tiermem.optim.rules.groups import (
    Params,
    floating,
    frozen_settings,
    groups_of,
    told_of_duplicates,
    with_defaults,
)
from tiermem.optim.rules.probe import StateProbe
from tiermem.optim.rules.scaling import Scaling
from tiermem.optim.rules.separable import Nature, check_separable, settings_of
from tiermem.optim.state import MASTER, export_all, load_state, take_in_edits
from tiermem.optim.units.master import master_dtype_of
from tiermem.optim.units.members import Membership
from tiermem.optim.units.parted import ELEMENTWISE
from tiermem.optim.units.plan import Member, kept_of, plan_units
from tiermem.optim.units.unit import StepUnit
from tiermem.runtime.services.sweep import BlockSweep

Where = Literal["auto", "device", "host", "both"]
Overlap = bool | Literal["auto", "forward", "backward"]


@dataclass(frozen=True, slots=True, eq=False)
class _Taking:
    """Units that are being added to an optimizer.

    Attributes:
        planned: The new units.
        units: All units of the optimizer, with the new ones, in order.
        members: The parameters of the planned ones.
        kept: What the optimizer keeps for them.
    """

    planned: list[StepUnit]
    units: list[StepUnit]
    members: Sequence[Member]
    kept: Kept


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """The parts of an optimizer that a checkpoint has.

    Attributes:
        cls: The class that makes the steps.
        groups: The parameter groups themselves.
        units: What is stepped together.
        state: By parameter, with stand-ins for what is in the tiers.
        master_dtype: Of the masters, or None.
        grad_dtype: Of the gradients, or None for the parameters'.
        grad_factor: What the next step multiplies gradients by, or None.
        backwards: How many there were since the last step (``overlap="backward"``).
    """

    cls: type[torch.optim.Optimizer]
    groups: list[dict[str, Any]]
    units: Sequence[StepUnit]
    state: dict[Any, Any]
    master_dtype: torch.dtype | None
    grad_dtype: torch.dtype | None
    grad_factor: torch.Tensor | None
    backwards: int


class TieredOptimizer(torch.optim.Optimizer):
    """What ``tier.optimizer`` returns: the class asked for, streamed.

    ``param_groups``, learning-rate schedulers, ``state_dict``, ``zero_grad`` and
    step hooks work as on the plain optimizer, and give the same bits.

    Attributes:
        grad_factor: What the next ``step()`` multiplies each gradient by, 0-d, after its cast to
            the master's dtype; None for nothing. ``zero_grad()`` forgets it.
    """

    grad_factor: torch.Tensor | None = None

    def __init__(
        self,
        runtime: ModuleRuntime,
        params: Params,
        cls: type[torch.optim.Optimizer],
        number: int,
        /,
        *,
        master_dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
        overlap: Overlap = "auto",
        where: Where = "auto",
        host_share: float | None = None,
        **settings: Any,
    ) -> None:
        """Tries the class, learns its state and reserves homes for it.

        Args:
            runtime: The modules' runtime.
            params: A wrapped module, parameters, or parameter groups.
            cls: The optimizer class.
            number: Tells the optimizers of one manager apart.
            master_dtype: Of the masters, or None to step the weights themselves.
            grad_dtype: In which gradients are summed up and kept, or None for the weights' own.
            overlap: When a step is made; see :meth:`tiermem.TierManager.optimizer`.
            where: Where blocks are stepped.
            host_share: With ``where="both"``: the host's share of the elements; None to measure.
            **settings: The class's own.

        Raises:
            StepError: If the class cannot be stepped block by block, or a dtype cannot be had.
            CapacityError: If a budget cannot hold a step or its state; nothing is changed.
        """
        self._runtime = runtime
        self._manager = runtime.manager
        self._manager.gate.guard()
        self._cls = optimizer_class(cls)
        self._settings = settings
        if overlap not in (False, True, "auto", "forward", "backward"):
            raise StepError(
                f"overlap={overlap!r}: it is 'auto', False, True, 'forward' or 'backward'"
            )
        self._overlap = overlap not in (False, "auto")  # whatever comes of it
        self._auto = AutoOverlap(runtime, self._cls) if overlap == "auto" else None
        self._inside = InBackward(runtime, self._take_in_edits) if overlap == "backward" else None
        self._owed: set[int] = set()
        self._ahead: StepsAhead | None = None
        if where not in ("auto", "device", "host", "both"):
            raise StepError(
                f"where={where!r}: a step is made on 'device', 'host' or 'both', or where it is "
                "fastest with the device's bits ('auto')"
            )
        if host_share is not None and (where != "both" or not 0 <= host_share <= 1):
            raise StepError(
                f"host_share={host_share!r}, where={where!r}: it is a share from 0 to 1 of what "
                "where='both' has the host step"
            )
        # by default the host only steps units where it has the device's bits
        self._where = "device" if where == "auto" else where
        self._bits = DeviceBits(self._cls, self.make, self._manager.parts.device)
        self._movable: Movable | None = None
        if where == "auto":
            self._movable = Movable(runtime, self._bits, self.make)
        self._why_device = "" if where == "auto" else f"where={where!r}"
        self._host_share = host_share
        self._host: HostSteps | None = None
        self._looked_into = False  # so that users may have edited the state
        self._closed = False
        self.speeds: Speeds | None = None
        self._master_dtype = floating("master_dtype", master_dtype)
        self._grad_dtype = floating("grad_dtype", grad_dtype)
        self._number = number
        self._norms = clip.Norms(runtime, number)
        self._rounds: list[Round] = []  # the one that is begun and not ended, if any
        self._units: list[StepUnit] = []
        self._counts = Counts()
        self._methods = Methods(self._cls, self._tried, self._counts)
        self._kept: list[Kept] = []
        self._taking: _Taking | None = None
        self._natures: dict[int, Nature] = {}  # what the class was found to be, by group
        groups = groups_of(params)
        check_wrapped(runtime, groups, params)
        groups = self._complete(groups)
        with told_of_duplicates():
            super().__init__(groups, dict(self._defaults))
        self._put_off = PutOff(runtime, self._owed, self._state, self._explain_owed, self._auto)
        if self._auto is not None:
            self._ahead = StepsAhead(
                runtime,
                self._auto,
                self._owed,
                self._is_begun,
                self._may_step_ahead,
                self._movable or Movable(runtime, self._bits, self.make),
            )
        self._members = Membership(self.param_groups)
        self._learn(range(len(self.param_groups)))
        self._ready = True
        self._keep_gradients(self.param_groups)
        self._take_on_wanted()
        self._keeper = Keeper(self._blocks, self._owned, self)
        runtime.keepers.append(self._keeper)
        runtime.on_begin.append(self._before_forward)
        if self._auto is not None:
            self._auto.begin(self._state)

    # -- the optimizer's own methods -------------------------------------

    @entrance
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step, each block of weights in turn.

        A step that an error cuts short has stepped some blocks and not the others, never part
        of one (of a large parameter, some parts). Calling ``step()`` again finishes it, with the
        gradients, settings and loss scale that it began with; until then gradients cannot be
        cleared and no training forward can begin. :meth:`abandon_step` leaves it as it is.

        Args:
            closure: Evaluated once, first, with gradients on.

        Returns:
            What ``closure`` returned.
        """
        self._refuse_if_closed("step()")
        self._runtime.refuse_half_loaded("step()")
        self._methods.refuse_if_begun("step()")
        self._manager.gate.guard()
        if not self._rounds:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = outside(closure)
            if not self._begin_round(loss):
                return loss
        return self._go_on(self._rounds[-1])

    def _begin_round(self, loss: Any) -> bool:
        """Collects the units to step; returns whether a step is to be made at all."""
        self._runtime.end_backward()
        scaling, inside, ahead = Scaling.of(self), self._inside, self._ahead
        if inside is not None:
            inside.before_step(scaling)
        if ahead is not None:
            ahead.before_step(scaling)
        if scaling is not None and not (self._fused and self._host is None) and scaling.skips:
            self.grad_factor = None
            return False
        self._finish()
        self._norms.forget(self._units)  # a class may write gradients
        self._members.check(self._units)
        self._take_on_wanted()
        self._take_in_edits()
        units = [unit for unit in self._units if self._is_left(unit)]
        self._tell_others(units)
        self._counts.note(self._units, set() if inside is None else set(inside.made))
        ticket = object() if inside is None else inside.ticket
        if ahead is not None and ahead.provisional.whole:
            ticket = ahead.provisional.ticket
        units = [unit for unit in units if unit.made is not ticket]
        error = None if inside is None else inside.failure
        self._rounds.append(Round(ticket, units, self.param_groups, scaling, loss, error))
        return True

    def _go_on(self, current: Round) -> Any:
        """Does what is left of a step; returns what its closure returned."""
        self.grad_factor = None  # the step has it
        try:
            self._confirm_ahead()
            if current.error is not None:
                error, current.error = current.error, None
                raise error
            if self._auto is not None:
                self._choose(self._auto, current)
            units = self._begin_on_host(current)
            waiting = [unit for unit in units if self._may_wait(unit)]
            if waiting:
                now = {id(unit) for unit in self._put_off.owe(waiting, current)}
                units = [u for u in units if id(u) in now or not self._may_wait(u)]
            self._step(units, current)
            self._finish_but_waiting(current)
            if self._auto is not None:
                self._auto.made(current.units, current.groups)
            if self._inside is not None:
                self._inside.after_step()
            self._counts.after_step(current.groups, self.param_groups)
        except BaseException as error:
            current.cut_short(error)
            raise
        return self._rounds.pop().loss  # in one line: whatever is raised before, it is not ended

    @entrance
    def abandon_step(self) -> None:
        """Gives up what is left of a step that was cut short, where ``step()`` cannot finish it.

        Blocks that were stepped stay stepped, the others are as they were; gradients are kept.
        Everything can be used again, as after an error in the middle of a plain optimizer's step.
        Does nothing where no step is unfinished.

        Raises:
            StorageError: If a block cannot be taken back because its disk fails.
        """
        self._refuse_if_closed("abandon_step()")
        self._confirm_ahead()
        cut_short = self._rounds or self._put_off.failed  # else deferred steps can be made
        with self._manager.lock, torch.no_grad():
            for unit in self._units:
                unit.abandon()
                if cut_short and self._put_off.cancel(unit):
                    unit.clear_forgotten(self._runtime)
            self._put_off.failed = False
            if self._host is not None:
                self._host.abandon()
        if self._inside is not None:
            self._inside.settle()
            self._inside.after_step()
        self._rounds.clear()

    def _tell_others(self, units: Sequence[StepUnit]) -> None:
        """Tells other optimizers not to step blocks inside backward that it steps too."""
        for other in self._runtime.backwards:
            own = other is self._inside or other is self._ahead
            if isinstance(other, InBackward | StepsAhead) and not own:
                other.leave(units)

    def _is_begun(self, ticket: object) -> bool:
        """Whether a step with some ticket is begun: what was made ahead for it counts."""
        return any(current.ticket is ticket for current in self._rounds)

    def _may_step_ahead(self) -> bool:
        """Whether steps may be made before they are asked for."""
        if self._auto is None or self._rounds or self._runtime.reduced.active:
            return False
        draws = any(nature.draws for nature in self._natures.values())
        return self._auto.may_begin(looked_into=self._looked_into, draws=draws)

    def _is_left(self, unit: StepUnit) -> bool:
        """Whether a unit has a gradient that no step inside backward has used."""
        inside = self._inside
        made = inside is not None and (id(unit) in inside.made or unit.made is inside.ticket)
        return not made and unit.wanted(self._runtime)

    def _begin_on_host(self, current: Round) -> list[StepUnit]:
        """Begins the steps that the host makes; returns the units that are left to the device."""
        left = current.left()
        host = self._host
        if host is not None:
            if self._movable is not None:
                here = [unit for unit in left if not host.is_begun(unit)]
                self._movable.place(here, current.groups, current.scaling, current.ticket)
            mine = [u for u in left if u.host is not None and not host.is_begun(u)]
            if mine:
                host.begin(mine, frozen_settings(current.groups), current.scaling, current.ticket)
        return [unit for unit in left if unit.host is None]

    def _step(self, units: Sequence[StepUnit], current: Round) -> None:
        """Steps units now."""
        guess = [block.id for unit in units for block in unit.blocks()]
        began = time.perf_counter_ns()
        if units or not self._owed:
            self._manager.begin_pass(("optimizer", self._number), guess)
        pipeline = BlockSweep(self._manager)
        try:
            with torch.no_grad(), pipeline.sweeping():
                for unit, following in zip_longest(units, units[1:]):
                    ahead = [] if following is None else following.begins_with()
                    self._put_off.cancel(unit)
                    unit.step(
                        self._runtime,
                        current.groups,
                        self._state,
                        current.scaling,
                        ticket=current.ticket,
                        meanwhile=partial(pipeline.fetch, ahead),
                        write=pipeline.write,
                    )
                    pipeline.write([block for block in unit.blocks() if block not in ahead])
        except BaseException as error:
            left = [unit for unit in units if unit.made is not current.ticket]
            self._explain(error, [unit.name for unit in left])
            raise
        self._runtime.busy("optimizer", began)

    @entrance
    def finish(self) -> None:
        """Makes what is left of the last step (``overlap``), as an access to its blocks would."""
        self._finish()

    def _finish(self) -> None:
        unfinished = self._unfinished()
        with self._manager.lock:
            for unit in self._units if unfinished else ():
                if id(unit) in unfinished and unit.group is not None:
                    self._manager.parts.deferred.pay(unit.group.block.id)

    def _finish_but_waiting(self, current: Round) -> None:
        """Makes what is left of a step and may not wait: the host's, if it was not made ahead."""
        if self._overlap or not self._owed:
            return
        with self._manager.lock:
            for unit in self._units:
                left = id(unit) in self._owed and unit.made is not current.ticket
                if left and unit.group is not None and not self._may_wait(unit):
                    self._manager.parts.deferred.pay(unit.group.block.id)

    def _choose(self, auto: AutoOverlap, current: Round) -> None:
        auto.choose(
            current.left(),
            current.groups,
            self._state,
            looked_into=self._looked_into,
            draws=any(nature.draws for nature in self._natures.values()),
        )

    def _may_wait(self, unit: StepUnit) -> bool:
        """Whether a step may wait for the next use of its block."""
        return self._overlap or (self._auto is not None and id(unit) in self._auto.waiting)

    def _unfinished(self) -> set[int]:
        """Returns the ids of units whose step was asked for and is still deferred."""
        return self._owed if self._inside is None else self._owed - self._inside.made.keys()

    @entrance
    def accumulate(self, micro_batches: int) -> None:
        """Sets how many backwards there are for each step, from the next step on.

        Only ``overlap="backward"`` has to know: it steps blocks in the last of them. A step may
        be asked for sooner (then it is made like any other); one backward more is refused.

        Args:
            micro_batches: At least 1, which it is without this call.

        Raises:
            StepError: If it is no such number, or blocks are stepped and ``step()`` is to come.
        """
        self._refuse_if_closed("accumulate()")
        if self._inside is not None:
            self._inside.accumulate(micro_batches)

    @property
    def stepped_where(self) -> str:
        """Which share of the elements the host steps, or why it steps none."""
        on_host = sum(p.numel() for u in self._units if u.host is not None for p, _ in u.members)
        if not on_host:
            trial = None if self._movable is None else self._movable.trial
            if trial is not None and not trial.on_host:
                slow = "with a share on the host steps took longer" if trial.decided else ""
                return f"all on the device: {slow or 'a share on the host is tried later'}"
            return f"all on the device: {self._why_device or self._bits.reason}"
        share = on_host / sum(p.numel() for u in self._units for p, _ in u.members)
        bits = "its own" if self._bits.reason else "the device's"
        return f"{share:.2f} of the elements on the host, with {bits} bits"

    @property
    def stepped_in_backward(self) -> int:
        """How many units were stepped inside backward so far, where ``step()`` has asked for it."""
        if self._ahead is not None:
            return self._ahead.provisional.total
        return 0 if self._inside is None else self._inside.total

    @property
    @entrance
    def state(self) -> Any:
        """The state by parameter, as in any optimizer; every step asked for is made in it."""
        self._refuse_if_closed("optimizer.state")
        if self._inside is not None:
            self._inside.refuse("optimizer.state")
        self._drop_ahead()
        self._finish()
        self._looked_into = True
        return self._state

    @state.setter
    def state(self, value: Any) -> None:
        if not hasattr(self, "_state"):
            self._state = value
            return
        shown = self.state
        if value is not shown:  # which other code may hold as well
            given = dict(value)
            shown.clear()
            shown.update(given)

    def _take_in_edits(self) -> None:
        """Copies users' edits of the state into the units that have no deferred step."""
        if not self._looked_into:
            return
        units = [unit for unit in self._units if id(unit) not in self._owed]
        with self._manager.lock, quiet(self._manager.parts.device):
            take_in_edits(self._runtime, units, self.param_groups, self._state)

    @entrance
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, or sets them to zero."""
        self._refuse_if_closed("zero_grad()")
        if self._inside is not None:
            self._inside.refuse("zero_grad()")
        self._refuse_if_pending("zero_grad()")
        if self._ahead is not None:
            self._ahead.thrown_away()
        self._end_taking()
        self.grad_factor = None
        for unit in self._units:
            unit.zero_grad(self._runtime, set_to_none=set_to_none)
        self._members.zero_grad(set_to_none=set_to_none)
        if self._inside is not None:
            self._inside.forgotten(set_to_none=set_to_none)

    @entrance
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Clips the norm of all gradients together, exactly as ``torch.nn.utils`` does.

        Norms are taken in backward, as gradients arrive, from the second call with the same
        settings on; those that are not known are taken here, in a sweep. The factor is applied
        when gradients are next in HBM, at the latest in ``step()``.

        Returns:
            The norm before clipping, 0-d.

        Raises:
            RuntimeError: If it is not finite and ``error_if_nonfinite``.
        """
        self._settle_to_clip("clip_grad_norm_()")
        self._runtime.end_backward()
        self._take_on_wanted()
        params = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            return self._norms.clip(
                self._units,
                params,
                float(max_norm),
                (float(norm_type), foreach, None),
                error_if_nonfinite=error_if_nonfinite,
            )

    @entrance
    def grad_norm(
        self,
        norm_type: float = 2.0,
        foreach: bool | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Returns the norm of all gradients together, 0-d; they stay as they are.

        Args:
            norm_type: Which norm.
            foreach: Whether torch's ``foreach`` kernels are used.
            dtype: The gradients are cast to it first, say to the masters'; None for as they are.
        """
        self._settle_to_clip("grad_norm()")
        self._runtime.end_backward()
        self._take_on_wanted()
        kind = float(norm_type), foreach, floating("dtype", dtype)
        params = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            return self._norms.total(self._units, params, kind)

    @entrance
    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamps every gradient to ``[-clip_value, clip_value]``."""
        self._settle_to_clip("clip_grad_value_()")
        self._take_on_wanted()
        change = partial(clip.clamp, limit=float(clip_value))
        clip.change_all(self._runtime, self._units, change)

    @entrance
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters as torch takes them, and reserves homes for their state.

        Raises:
            CapacityError: If a budget cannot hold their state or a step; nothing is changed.
        """
        if not getattr(self, "_ready", False) or not isinstance(param_group, dict):
            outside(super().add_param_group, param_group)  # raises for what torch refuses
            return
        self._settle("add_param_group()")
        count = len(self.param_groups)
        (group,) = self._complete(groups_of([param_group]))
        refuse_others(self._runtime, [group])
        try:
            with told_of_duplicates():
                outside(super().add_param_group, group)
            self._keep_gradients([group])
            self._take_on_wanted()
        except BaseException:
            if not any(n == count for unit in self._all_units() for _, n in unit.members):
                del self.param_groups[count:]
                self._natures.pop(count, None)
            raise

    @entrance
    def state_dict(self) -> dict[str, Any]:
        """Returns what the plain optimizer's ``state_dict`` would, with tensors in host memory.

        With ``master_dtype`` there is a key ``"master"`` more: the master of each parameter that
        has one, by the parameter's number, as in ``"state"``.
        """
        self._settle("state_dict()")
        for hook in self._optimizer_state_dict_pre_hooks.values():
            outside(hook, self)
        args = self._runtime, self._units, self.param_groups, self._state
        result = export_all(*args, self._cls, self.make)
        if self._master_dtype is None:
            del result[MASTER]
        for post in self._optimizer_state_dict_post_hooks.values():
            changed = outside(post, self, result)
            result = result if changed is None else changed
        return result

    @entrance
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state over, from this or from the plain optimizer.

        Where it has masters, the weights become their casts; where it has none, the masters
        stay as they are.

        Raises:
            CheckpointError: If it is of other groups or shapes; nothing is changed.
        """
        self._refuse_if_closed("load_state_dict()")
        if not self._rounds:
            self._settle("load_state_dict()")
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = outside(hook, self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._take_on(self._members.of_state(state_dict))
        begin = self.abandon_step if self._rounds else None
        args = self._runtime, self._units, self.param_groups, self._state
        load_state(*args, state_dict, self._cls, begin)
        self.defaults.setdefault("differentiable", False)  # as torch's __setstate__ does then
        for post in self._optimizer_load_state_dict_post_hooks.values():
            outside(post, self)

    @property
    def made_of(
        self,
    ) -> tuple[type[torch.optim.Optimizer], torch.dtype | None, torch.dtype | None]:
        """The class that makes the steps, and the dtypes of masters and gradients, where given."""
        return self._cls, self._master_dtype, self._grad_dtype

    def contents(self, what: str) -> Contents:
        """Returns all that a checkpoint has of it; every deferred step is made first.

        For :mod:`tiermem.saving`.

        Args:
            what: The operation, for messages.

        Raises:
            StepError: If a step is unfinished, or made in part inside backward.
        """
        self._settle(what)
        self._take_in_edits()
        inside = self._inside
        return Contents(
            self._cls,
            self.param_groups,
            self._units,
            self._state,
            self._master_dtype,
            self._grad_dtype,
            self.grad_factor,
            0 if inside is None else inside.count,
        )

    def contents_to_replace(self, numbered: dict[str, Any]) -> Contents:
        """Returns its contents, to be replaced; a step that was cut short is given up.

        Args:
            numbered: A state dict whose state and masters have keys and no values: parameters that
                are not stepped so far, and have any of these there, are from now on.

        Raises:
            CapacityError: If a budget does not hold what these need; nothing is changed then.
        """
        self._refuse_if_closed("tier.load()")
        if not self._rounds:
            self._settle("tier.load()")
        self._take_on(self._members.of_state(numbered))
        if self._rounds:
            self.abandon_step()
        return self.contents("tier.load()")

    def replaced(self, grad_factor: torch.Tensor | None, backwards: int) -> None:
        """Ends the replacement of its contents: goes on from the new ones.

        Args:
            grad_factor: Of its next step.
            backwards: How many there were since the last step.
        """
        self.grad_factor = grad_factor
        if self._inside is not None:
            self._inside.count = backwards
        self._norms.forget(self._units)
        self.defaults.setdefault("differentiable", False)  # as torch's __setstate__ does then

    @entrance
    def close(self) -> None:
        """Frees state and masters; deferred steps are made first.

        Weights and gradients stay as they are. Without it, the room is taken until the manager is
        closed. Closed, it refuses to be used; closing it once more does nothing.

        Raises:
            StepError: If a step was cut short, or is to be asked for by ``step()``; it stays open.
            StorageError: If a deferred step fails; likewise.
        """
        if self._closed or self._manager.gate.closed:
            return
        self._settle("close()")
        runtime, units, rooms = self._runtime, self._units, self._rooms()
        with self._manager.lock:
            self._manager.remove_blocks([b for unit in units for b in unit.kept_blocks()])
            self._closed = True
            self._units = []
            for kept in self._kept:
                runtime.program.optimizers.remove(kept)
            runtime.on_begin.remove(self._before_forward)
            if self._auto is not None:
                self._auto.close()
            runtime.keepers.remove(self._keeper)
            self._norms.close(units)
            for kept in self._state.values():
                for value in kept.values() if isinstance(kept, dict) else ():
                    end(value, partial(self._refuse_if_closed, "its state"))
        if self._inside is not None:
            self._inside.close()
        if self._ahead is not None:
            self._ahead.close()
        if self._host is not None:
            self._host.close()
        for room in rooms:
            room.close()

    def __getattr__(self, name: str) -> Any:
        """Gives methods of the class that are not torch's, such as ``train()``, over the tiers.

        They are called for the weights and state of one block after another, once a try on tiny
        tensors has shown that this is the same.
        """
        cls = self.__dict__.get("_cls")
        found = None if cls is None or name.startswith("_") else getattr(cls, name, None)
        if not callable(found):
            whose = type(self).__name__ if cls is None else f"{type(self).__name__} of {cls}"
            raise AttributeError(f"{whose} has no attribute {name!r}")
        if isinstance(inspect.getattr_static(cls, name), staticmethod | classmethod):
            return found
        return partial(self._call, name)

    @entrance
    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        if not self._methods.is_begun(name):
            self._settle(f"{name}()")
        self._methods.call(
            name, args, kwargs, self._runtime, self._units, self.param_groups, self._state
        )

    def __getstate__(self) -> dict[str, Any]:
        raise StepError("a tiered optimizer cannot be pickled; save its state_dict()")

    def __repr__(self) -> str:
        return f"Tiered{self._cls.__name__}({len(self._units)} units)"

    # -- setting up ------------------------------------------------------

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Returns a plain optimizer of the class and settings over ``groups``."""
        return outside(self._cls, groups, **self._settings)

    def _complete(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Fills every default into groups, as the class itself does it; returns them."""
        filled, optimizer = with_defaults(self.make, groups, self._stepped_dtype)
        self._defaults = optimizer.defaults
        self._eager = bool(optimizer.state)  # made with the optimizer, not at the first step
        self._fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        for group, full in zip(groups, filled, strict=True):
            group.update(full)
        # a GradScaler then leaves it to step() to undo the scale: after the cast to the master
        self._step_supports_amp_scaling = self._fused or self._master_dtype is not None
        return groups

    def _learn(self, numbers: Iterable[int]) -> None:
        """Tries the class on groups that have parameters, each once.

        Raises:
            StepError: If its update of a parameter depends on others.
        """
        new = [n for n in numbers if n not in self._natures and self.param_groups[n]["params"]]
        found = {n: self._tried(self.param_groups[n]) for n in new}
        if not hasattr(self, "_probe"):
            sparse = any(nature.sparse for nature in found.values())
            self._probe = StateProbe(self.make, self._manager.parts.device, sparse=sparse)
        if self._overlap or self._where != "device":
            refuse_draws(self._cls.__name__, list(found.values()))
        for number, nature in found.items():
            self._counts.add(number, self.make, nature)
        self._natures.update(found)

    def _tried(self, group: dict[str, Any], what: str = "", method: Any = None) -> Nature:
        return check_separable(
            what or self._cls.__name__,
            self.make,
            settings_of(group),
            sorted({p.dim() for p in group["params"]}),
            self._stepped_dtype(group["params"][0]),
            self._manager.parts.device,
            method,
        )

    def _stepped_dtype(self, param: torch.Tensor) -> torch.dtype:
        """Returns the dtype of what is stepped: of the parameter, or of its master."""
        return master_dtype_of(param, self._master_dtype) or param.dtype

    def _keep_gradients(self, groups: Sequence[dict[str, Any]]) -> None:
        """Sets the dtype in which gradients are kept, of frozen parameters as well."""
        params = [param for group in groups for param in group["params"]]
        self._runtime.grads.keep_in(self._grad_dtype, params)

    def _take_on_wanted(self) -> None:
        self._take_on(self._members.wanted(frozen=self._eager))

    def _take_on(self, members: Sequence[Member]) -> None:
        """Plans the units of parameters that are trained from now on, and reserves their homes.

        Raises:
            CapacityError: If a budget does not hold them; nothing is changed then.
        """
        self._end_taking()
        if not members:
            return
        self._learn(sorted({number for _, number in members}))
        grads, program = self._runtime.grads, self._runtime.program
        homed = {id(e.unit) for e in entries_of(self._runtime.groups)}
        elementwise = self._cls in ELEMENTWISE and self._where != "host"
        kept = kept_of(
            self.param_groups,
            members,
            self._probe,
            self._master_dtype,
            overlap=self._overlap,
            elementwise=elementwise,
        )
        planned: list[StepUnit] = []
        try:
            planned = plan_units(
                self._runtime,
                self.param_groups,
                members,
                self._probe,
                self.make,
                self._master_dtype,
                overlap=self._overlap,
                on_host=self._where != "device",
                elementwise=elementwise,
            )
            units = [*self._units, *planned]
            if any(nature.draws for nature in self._natures.values()):
                units = in_order(self._cls.__name__, units, self.param_groups)
            self._choose_sides(planned)
        except (CapacityError, StepError) as error:
            self._manager.remove_blocks([b for unit in planned for b in unit.kept_blocks()])
            fresh = {id(g): g for u in planned for g in u.grad_units() if id(g) not in homed}
            grads.unreserve(list(fresh.values()))
            if isinstance(error, StepError):
                raise
            raise program.refuse_optimizer(error, kept) from None
        self._taking = _Taking(planned, units, members, kept)  # from here on it is completed
        self._end_taking()

    def _end_taking(self) -> None:
        """Adds the planned units to the optimizer; goes on where that was cut short."""
        taking = self._taking
        if taking is None:
            return
        if taking.kept not in self._kept:
            self._kept.append(taking.kept)
        if taking.kept not in self._runtime.program.optimizers:
            self._runtime.program.optimizers.append(taking.kept)
        if self._eager:
            for unit in taking.planned:
                unit.begin(self._runtime, self.param_groups, self._state)
        self._units[:] = taking.units
        self._members.taken(taking.members)
        for unit in taking.planned:
            for entry in unit.entries:
                self._runtime.grads.track(entry)
        self._counts.prepare(taking.planned)
        self._tell_others(taking.planned)
        if self._inside is not None:
            self._inside.extend(taking.planned, self.param_groups, self._state, self._host)
        if self._ahead is not None:
            self._ahead.extend(taking.planned, self.param_groups, self._state, self._host)
        self._taking = None

    def _all_units(self) -> list[StepUnit]:
        """Returns the units, also those that are being added."""
        return self._units if self._taking is None else self._taking.units

    def _owned(self) -> list[tuple[Tier, Extent]]:
        """Returns the space below HBM that it has beside blocks."""
        return [place for room in self._rooms() for place in room.owned()]

    def _rooms(self) -> list[HostRoom]:
        """Returns the DRAM reserved for steps on the host."""
        found = rooms_of(self._all_units())
        if self._movable is not None:
            found += [room for room in self._movable.rooms() if room not in found]
        return found

    def _blocks(self) -> list[Block]:
        """Returns the blocks of state and masters."""
        return [block for unit in self._all_units() for block in unit.kept_blocks()]

    def _choose_sides(self, units: Sequence[StepUnit]) -> None:
        """Decides which units the host steps."""
        if self._where == "device" and self._movable is None:
            return
        dtype = next((self._stepped_dtype(p) for u in units for p, _ in u.members), torch.float32)
        args = self._runtime, units, self.make, dtype, self.param_groups, self._bits
        earlier = [unit for unit in self._units if unit.host is not None]
        inside, ahead = self._inside is not None, self._ahead is not None
        if self._movable is not None:
            why, speeds = choose_exact_sides(
                *args, in_backward=inside or ahead, keeps=ahead, earlier=earlier
            )
            some, self._why_device = not why, why
            self.speeds = speeds or self.speeds
            self._movable.seconds = 0.0 if self.speeds is None else self.speeds.host
            if some:
                self._movable.take_on(units, tried=not inside)
        else:
            share = self._where == "both" if self._host_share is None else float(self._host_share)
            some, self.speeds = choose_sides(
                *args, share=share, in_backward=inside, earlier=earlier
            )
        if some and self._host is None:
            owed = self._number, self._owed, self._state, self._explain
            self._host = HostSteps(self._runtime, *owed)

    def _before_forward(self, training: bool) -> None:
        self._drop_ahead()
        if self._auto is not None and self._auto.has_failed:
            self._finish()  # here, not in the middle of the forward, where it might have no room
        if training:
            self._refuse_if_pending("a training forward")
            if self._inside is None or not self._inside.made:
                self._take_on(self._members.thawed())

    def _explain(self, error: BaseException, left: Sequence[str]) -> None:
        """Adds to an error of the disk, or of the host, how far the step got."""
        again = "optimizer.step() goes on there"
        if self._owed:
            again = "the next use of them makes it, or optimizer.step()"
        say_how_far(error, len(self._units), left, again)

    def _explain_owed(self, error: BaseException) -> None:
        self._explain(error, [unit.name for unit in self._units if id(unit) in self._owed])

    def _confirm_ahead(self) -> None:
        """Confirms the steps made ahead of the one that is begun."""
        if self._ahead is not None:
            self._ahead.provisional.confirm()

    def _drop_ahead(self) -> None:
        """Drops the steps made ahead of ``step()``."""
        if self._ahead is not None:
            self._ahead.settle()

    def _settle(self, what: str, *, drop: bool = True) -> None:
        """Raises if a step is unfinished, and drops steps made ahead."""
        self._refuse_if_closed(what)
        if self._inside is not None:
            self._inside.refuse(what)
        if drop:
            self._drop_ahead()
        self._finish()
        self._refuse_if_pending(what)
        self._end_taking()

    def _settle_to_clip(self, what: str) -> None:
        if self._inside is not None:
            self._inside.refuse_clipping(what)
        self._settle(what, drop=False)  # a look at norms is none at gradients

    def _refuse_if_closed(self, what: str, *_: Any) -> None:
        if self._closed:
            raise StepError(
                f"{what}: this optimizer is closed, its state and masters are gone; make another "
                "with tier.optimizer (a state_dict() that was taken before can be loaded there)"
            )

    def _refuse_if_pending(self, what: str) -> None:
        self._methods.refuse_if_begun(what)
        if not self._rounds:
            return
        current = self._rounds[-1]
        left = [unit for unit in current.left() if id(unit) not in self._owed]
        if left or current.error is not None:
            raise StepError(
                f"{what} while an optimizer step is unfinished: it was cut short by "
                f"{current.failed}, with {len(left)} of {len(self._units)} units to go; call "
                "optimizer.step() again, it goes on where it stopped, or optimizer.abandon_step() "
                "to leave them unstepped"
            )
        self._confirm_ahead()
        if self._inside is not None:  # all is made or deferred, only the end was cut off
            self._inside.after_step()
        self._rounds.clear()
