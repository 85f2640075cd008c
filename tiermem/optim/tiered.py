"""Any torch optimizer, stepped block by block over weights, gradients and state in the tiers."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch

from tiermem.errors import CapacityError, StepError, StorageError
from tiermem.nn.lazy import end
from tiermem.nn.need import Kept
from tiermem.nn.quiet import quiet, uncompiled
from tiermem.nn.runtime import ModuleRuntime
from tiermem.optim import clip
from tiermem.optim.backward import InBackward
from tiermem.optim.classes import (
    check_wrapped,
    in_order,
    optimizer_class,
    refuse_draws,
    refuse_others,
)
from tiermem.optim.groups import Params, floating, frozen_settings, groups_of, with_defaults
from tiermem.optim.host import rooms_of
from tiermem.optim.hoststeps import HostSteps, say_how_far
from tiermem.optim.master import master_dtype_of
from tiermem.optim.methods import Counts, Methods
from tiermem.optim.parted import ELEMENTWISE
from tiermem.optim.plan import kept_of, plan_units
from tiermem.optim.probe import StateProbe
from tiermem.optim.scaling import Scaling
from tiermem.optim.separable import Nature, check_separable, settings_of
from tiermem.optim.share import Speeds
from tiermem.optim.sides import choose_sides
from tiermem.optim.state import MASTER, export_all, load_state, take_in_edits
from tiermem.optim.unit import StepUnit
from tiermem.runtime.debts import Debt
from tiermem.runtime.pipeline import Pipeline

Where = Literal["device", "host", "both"]
Overlap = bool | Literal["forward", "backward"]


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
        overlap: Overlap = False,
        where: Where = "device",
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
        self._manager.guard()
        self._cls = optimizer_class(cls)
        self._settings = settings
        if overlap not in (False, True, "forward", "backward"):
            raise StepError(f"overlap={overlap!r}: it is False, True, 'forward' or 'backward'")
        self._overlap = bool(overlap)
        self._inside = InBackward(runtime, self._take_in_edits) if overlap == "backward" else None
        self._owed: set[int] = set()
        if where not in ("device", "host", "both"):
            raise StepError(f"where={where!r}: a step is made on 'device', 'host' or 'both'")
        if host_share is not None and (where != "both" or not 0 <= host_share <= 1):
            raise StepError(
                f"host_share={host_share!r}, where={where!r}: it is a share from 0 to 1 of what "
                "where='both' has the host step"
            )
        self._where = where
        self._host_share = host_share
        self._host: HostSteps | None = None
        self._looked_into = False  # so that users may have edited the state
        self._begun = False  # and not ended: by a step on the host that failed
        self._closed = False
        self.speeds: Speeds | None = None
        self._master_dtype = floating("master_dtype", master_dtype)
        self._grad_dtype = floating("grad_dtype", grad_dtype)
        self._number = number
        self._norms = clip.Norms(runtime, number)
        self._pending: list[StepUnit] = []
        self._scaling: Scaling | None = None
        self._failed = ""
        self._units: list[StepUnit] = []
        self._counts = Counts()
        self._methods = Methods(self._cls, self._tried, self._counts)
        self._kept: list[Kept] = []
        groups = groups_of(params)
        check_wrapped(runtime, groups, params)
        template = self._template(groups)
        super().__init__(template, dict(self._defaults))
        self._ready = True
        self._extend(self.param_groups)
        runtime.on_begin.append(self._before_forward)

    # -- the optimizer's own methods -------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step, each block of weights in turn.

        A step that an error cuts short has stepped some blocks and not the others, never part
        of one (of a large parameter, some parts). Calling ``step()`` again finishes it; until
        then gradients cannot be cleared and no training forward can begin.

        Args:
            closure: Evaluated once, first, with gradients on.

        Returns:
            What ``closure`` returned.
        """
        loss = None
        self._refuse_if_closed("step()")
        self._methods.refuse_if_begun("step()")
        self._manager.guard()
        again = bool(self._pending) or (self._begun and bool(self._unfinished()))
        if closure is not None and not again:
            with torch.enable_grad():
                loss = closure()
        self._runtime.end_backward()
        scaling = self._scaling if again else Scaling.of(self)
        self.grad_factor = None
        if self._inside is not None and not again:
            self._inside.before_step(scaling)
        if scaling is not None and not (self._fused and self._host is None) and scaling.skips:
            return loss
        self.finish()
        self._norms.forget(self._units)  # a class may write gradients
        units = self._pending
        if not again:
            self._take_in_edits()
            units = [unit for unit in self._units if self._is_left(unit)]
            self._tell_others(units)
            self._counts.note(self._units)
        units = self._begin_on_host(units, scaling)
        if self._overlap and not again:
            units = self._owe(units, scaling)
        self._begun = not self._overlap
        self._step(units, scaling)
        if self._inside is not None:
            self._inside.after_step()
        if not self._overlap:
            self.finish()
        self._begun = False
        self._counts.after_step(self.param_groups)
        return loss

    def _tell_others(self, units: Sequence[StepUnit]) -> None:
        """Has no other optimizer use gradients inside backward that this one uses, too."""
        for other in self._runtime.backwards:
            if isinstance(other, InBackward) and other is not self._inside:
                other.leave(units)

    def _is_left(self, unit: StepUnit) -> bool:
        """Whether a unit has a gradient that no step inside backward has used."""
        made = self._inside is not None and id(unit) in self._inside.made
        return not made and unit.wanted(self._runtime)

    def _begin_on_host(self, units: Sequence[StepUnit], scaling: Scaling | None) -> list[StepUnit]:
        """Begins the steps that the host makes; returns the other units."""
        if self._host is not None and any(unit.host is not None for unit in units):
            try:
                self._host.begin(units, frozen_settings(self.param_groups), scaling)
            except BaseException as error:
                # the rest of them waits for the next call
                if self._pending or any(id(unit) in self._owed for unit in units):
                    self._cut_short(error, [u for u in units if id(u) not in self._owed], scaling)
                raise
        return [unit for unit in units if unit.host is None]

    def _cut_short(
        self, error: BaseException, left: list[StepUnit], scaling: Scaling | None
    ) -> None:
        self._pending, self._scaling, self._begun = left, scaling, True
        self._failed = f"{type(error).__name__} at {left[0].name!r}" if left else ""

    def _step(self, units: Sequence[StepUnit], scaling: Scaling | None) -> None:
        """Steps units now."""
        guess = [block.id for unit in units for block in unit.blocks()]
        began = time.perf_counter_ns()
        if units or not self._owed:
            self._manager.begin_pass(("optimizer", self._number), guess)
        remaining = list(units)
        pipeline = Pipeline(self._manager)
        try:
            with torch.no_grad(), pipeline.sweeping():
                while remaining:
                    unit, following = remaining[0], remaining[1:2]
                    ahead = [block for other in following for block in other.begins_with()]
                    unit.step(
                        self._runtime,
                        self.param_groups,
                        self._state,
                        scaling,
                        meanwhile=partial(pipeline.fetch, ahead),
                        write=pipeline.write,
                    )
                    del remaining[0]
                    pipeline.write([block for block in unit.blocks() if block not in ahead])
        except BaseException as error:
            self._cut_short(error, remaining, scaling)
            self._explain(error, [unit.name for unit in remaining])
            raise
        self._pending = []
        self._runtime.busy("optimizer", began)

    def _owe(self, units: Sequence[StepUnit], scaling: Scaling | None) -> list[StepUnit]:
        """Puts off the step of every unit that can wait, settings as now; returns the others."""
        settings = frozen_settings(self.param_groups)
        scaling = None if scaling is None else scaling.frozen()
        now = []
        pipeline = Pipeline(self._manager)
        with self._manager.lock:
            for unit in units:
                for gradients in unit.grad_units():  # another optimizer's: one may clear them
                    self._runtime.grads.pay(gradients)
                if unit.group is None or not unit.can_wait(self._runtime):
                    now.append(unit)
                    continue
                unit.group.unpoint()
                blocks = [block.id for block in unit.blocks()]
                work = partial(self._pay, unit, settings, scaling, pipeline)
                self._owed.add(id(unit))
                self._manager.debts.add(Debt(unit.name, blocks, work))
        return now

    def _pay(
        self,
        unit: StepUnit,
        settings: Sequence[dict[str, Any]],
        scaling: Scaling | None,
        pipeline: Pipeline,
    ) -> None:
        """Makes a step that was put off, wherever we are by now."""
        began = time.perf_counter_ns()
        with quiet(self._manager.device), pipeline.sweeping():
            step = uncompiled(type(unit).step)  # the call around it may be a compiled one
            try:
                step(unit, self._runtime, settings, self._state, scaling, owed=True)
            except BaseException as error:
                self._explain(error, [u.name for u in self._units if id(u) in self._owed])
                raise
        self._owed.discard(id(unit))
        pipeline.write(unit.kept_blocks())
        self._manager.timeline.add("optimizer", unit.name, began, time.perf_counter_ns())

    def finish(self) -> None:
        """Makes what is left of the last step (``overlap``); whoever looks has it made anyway."""
        unfinished = self._unfinished()
        with self._manager.lock:
            for unit in self._units if unfinished else ():
                if id(unit) in unfinished and unit.group is not None:
                    self._manager.debts.pay(unit.group.block.id)

    def _unfinished(self) -> set[int]:
        """Returns units that are owed a step, of those that were asked for."""
        return self._owed if self._inside is None else self._owed - self._inside.made.keys()

    def accumulate(self, micro_batches: int) -> None:
        """Says how many backwards there are for each step, from the next step on.

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
    def stepped_in_backward(self) -> int:
        """How many units were stepped inside backward so far (``overlap="backward"``)."""
        return 0 if self._inside is None else self._inside.total

    @property
    def state(self) -> Any:
        """The state by parameter, as in any optimizer; every step asked for is made in it."""
        self._refuse_if_closed("optimizer.state")
        if self._inside is not None:
            self._inside.refuse("optimizer.state")
        self.finish()
        self._looked_into = True
        return self._state

    @state.setter
    def state(self, value: Any) -> None:
        if not hasattr(self, "_state"):
            self._state = value
            return
        shown = self.state
        if value is not shown:  # which others have as well
            given = dict(value)
            shown.clear()
            shown.update(given)

    def _take_in_edits(self) -> None:
        """Has blocks that are owed no step be stepped with the state as users have left it."""
        if not self._looked_into:
            return
        units = [unit for unit in self._units if id(unit) not in self._owed]
        with self._manager.lock, quiet(self._manager.device):
            take_in_edits(self._runtime, units, self.param_groups, self._state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, or sets them to zero."""
        self._refuse_if_closed("zero_grad()")
        if self._inside is not None:
            self._inside.refuse("zero_grad()")
        self._refuse_if_pending("zero_grad()")
        self.grad_factor = None
        for unit in self._units:
            unit.zero_grad(self._runtime, set_to_none=set_to_none)
        if self._inside is not None:
            self._inside.forgotten(set_to_none=set_to_none)

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
        params = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            return self._norms.clip(
                self._units,
                params,
                float(max_norm),
                (float(norm_type), foreach, None),
                error_if_nonfinite=error_if_nonfinite,
            )

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
        kind = float(norm_type), foreach, floating("dtype", dtype)
        params = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            return self._norms.total(self._units, params, kind)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamps every gradient to ``[-clip_value, clip_value]``."""
        self._settle_to_clip("clip_grad_value_()")
        for unit in self._units:
            unit.change(self._runtime, partial(clip.clamp, limit=float(clip_value)))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, and reserves homes for their state."""
        if not hasattr(self, "_units") or not getattr(self, "_ready", False):
            super().add_param_group(param_group)
            return
        self._settle("add_param_group()")
        group = self._template([param_group])[0]
        refuse_others(self._runtime, [group])
        super().add_param_group(group)
        try:
            self._extend([group])
        except BaseException:
            self.param_groups.remove(group)
            raise

    def state_dict(self) -> dict[str, Any]:
        """Returns what the plain optimizer's ``state_dict`` would, with tensors in host memory.

        With ``master_dtype`` there is a key ``"master"`` more: the master of each parameter that
        has one, by the parameter's number, as in ``"state"``.
        """
        self._settle("state_dict()")
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        args = self._runtime, self._units, self.param_groups, self._state
        result = export_all(*args, self._cls, self.make)
        if self._master_dtype is None:
            del result[MASTER]
        for post in self._optimizer_state_dict_post_hooks.values():
            changed = post(self, result)
            result = result if changed is None else changed
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state over, from this or from the plain optimizer.

        Where it has masters, the weights become their casts; where it has none, the masters
        stay as they are.

        Raises:
            CheckpointError: If it is of other groups or shapes; nothing is changed.
        """
        self._settle("load_state_dict()")
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        args = self._runtime, self._units, self.param_groups, self._state
        load_state(*args, state_dict, self._cls)
        for post in self._optimizer_load_state_dict_post_hooks.values():
            post(self)

    def close(self) -> None:
        """Gives the room of state and masters back; what it has not stepped is stepped first.

        Weights and gradients stay as they are. Without it, the room is taken until the manager is
        closed. Closed, it refuses to be used; closing it once more does nothing.

        Raises:
            StepError: If a step was cut short, or is to be asked for by ``step()``; it stays open.
            StorageError: If a step that was put off fails; likewise.
        """
        if self._closed or self._manager.closed:
            return
        self._settle("close()")
        runtime, units = self._runtime, self._units
        with self._manager.lock:
            self._manager.remove_blocks([b for unit in units for b in unit.kept_blocks()])
            self._closed = True
            self._units = []
            for kept in self._kept:
                runtime.program.optimizers.remove(kept)
            runtime.on_begin.remove(self._before_forward)
            self._norms.close(units)
            for kept in self._state.values():
                for value in kept.values() if isinstance(kept, dict) else ():
                    end(value, partial(self._refuse_if_closed, "its state"))
        if self._inside is not None:
            self._inside.close()
        if self._host is not None:
            self._host.close()
        for room in rooms_of(units):
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
        return self._cls(groups, **self._settings)

    def _template(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the groups with every default filled in, as the class itself does it."""
        filled, optimizer = with_defaults(self.make, groups, self._stepped_dtype)
        self._defaults = optimizer.defaults
        self._fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        # a GradScaler then leaves it to step() to undo the scale: after the cast to the master
        self._step_supports_amp_scaling = self._fused or self._master_dtype is not None
        return filled

    def _natures(self, groups: Sequence[dict[str, Any]]) -> list[Nature | None]:
        """Tries the class on each group; None for an empty one.

        Raises:
            StepError: If its update of a parameter depends on others.
        """
        found = [self._tried(group) if group["params"] else None for group in groups]
        if not hasattr(self, "_probe"):
            sparse = any(nature is not None and nature.sparse for nature in found)
            self._probe = StateProbe(self.make, self._manager.device, sparse=sparse)
        if self._overlap or self._where != "device":
            refuse_draws(self._cls.__name__, found)
        return found

    def _tried(self, group: dict[str, Any], what: str = "", method: Any = None) -> Nature:
        return check_separable(
            what or self._cls.__name__,
            self.make,
            settings_of(group),
            sorted({p.dim() for p in group["params"]}),
            self._stepped_dtype(group["params"][0]),
            self._manager.device,
            method,
        )

    def _stepped_dtype(self, param: torch.Tensor) -> torch.dtype:
        """Returns the dtype of what is stepped: of the parameter, or of its master."""
        return master_dtype_of(param, self._master_dtype) or param.dtype

    def _extend(self, groups: Sequence[dict[str, Any]]) -> None:
        """Plans the units of new groups and reserves their homes."""
        first = len(self.param_groups) - len(groups)
        natures = self._natures(groups)
        self._runtime.grads.keep_in(self._grad_dtype, [p for g in groups for p in g["params"]])
        elementwise = self._cls in ELEMENTWISE and self._where != "host"
        kept = kept_of(
            groups,
            first,
            self._probe,
            self._master_dtype,
            overlap=self._overlap,
            elementwise=elementwise,
        )
        program, planned = self._runtime.program, []
        try:
            planned = plan_units(
                self._runtime,
                groups,
                first,
                self._probe,
                self.make,
                self._master_dtype,
                overlap=self._overlap,
                on_host=self._where != "device",
                elementwise=elementwise,
            )
            if any(nature is not None and nature.draws for nature in natures):
                planned = in_order(self._cls.__name__, planned, groups)
            self._choose_sides(planned)
        except StepError:
            self._manager.remove_blocks([b for unit in planned for b in unit.kept_blocks()])
            raise
        except CapacityError as error:
            self._manager.remove_blocks([b for unit in planned for b in unit.kept_blocks()])
            raise program.refuse_optimizer(error, kept) from None
        program.optimizers.append(kept)
        self._kept.append(kept)
        if self._probe.eager:
            for unit in planned:
                unit.begin(self._runtime, self.param_groups, self._state)
        self._units.extend(planned)
        self._counts.add(self.make, natures, planned)
        self._tell_others(planned)
        if self._inside is not None:
            self._inside.extend(planned, self.param_groups, self._state, self._host)

    def _choose_sides(self, units: Sequence[StepUnit]) -> None:
        """Decides which units the host steps."""
        if self._where == "device":
            return
        dtype = next((self._stepped_dtype(p) for u in units for p, _ in u.members), torch.float32)
        some, self.speeds = choose_sides(
            self._runtime,
            units,
            self.make,
            dtype,
            self.param_groups,
            share=self._where == "both" if self._host_share is None else float(self._host_share),
            in_backward=self._inside is not None,
            earlier=[unit for unit in self._units if unit.host is not None],
        )
        if some and self._host is None:
            args = self._number, self._owed, self._state, self._explain
            self._host = HostSteps(self._runtime, *args)

    def _before_forward(self, training: bool) -> None:
        if training:
            self._refuse_if_pending("a training forward")

    def _explain(self, error: BaseException, left: Sequence[str]) -> None:
        """Has an error of the disk, or of the host, say how far the step got."""
        if isinstance(error, StorageError | StepError):
            again = "optimizer.step() goes on there"
            if self._owed:
                again = "the next use of them makes it, or optimizer.step()"
            say_how_far(error, len(self._units), left, again)

    def _settle(self, what: str) -> None:
        """Makes sure that no step is unfinished."""
        self._refuse_if_closed(what)
        if self._inside is not None:
            self._inside.refuse(what)
        self.finish()
        self._refuse_if_pending(what)

    def _settle_to_clip(self, what: str) -> None:
        if self._inside is not None:
            self._inside.refuse_clipping(what)
        self._settle(what)

    def _refuse_if_closed(self, what: str, *_: Any) -> None:
        if self._closed:
            raise StepError(
                f"{what}: this optimizer is closed, its state and masters are gone; make another "
                "with tier.optimizer (a state_dict() that was taken before can be loaded there)"
            )

    def _refuse_if_pending(self, what: str) -> None:
        self._methods.refuse_if_begun(what)
        if self._pending:
            raise StepError(
                f"{what} while an optimizer step is unfinished: it was cut short by "
                f"{self._failed}, with {len(self._pending)} of {len(self._units)} units to go; "
                "call optimizer.step() again, it goes on where it stopped"
            )
