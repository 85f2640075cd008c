"""Any torch optimizer class, stepped block by block, with all its tensors in the tiers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from tiermem.errors import StepError
from tiermem.nn.compat.entrances import entrance
from tiermem.nn.compat.outside import outside
from tiermem.nn.compat.quiet import quiet, uncompiled
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.nn.tensors.lazy import end
from tiermem.optim import clip
from tiermem.optim.classes import (
    check_wrapped,
    optimizer_class,
    refuse_arguments,
    refuse_others,
)
from tiermem.optim.contents import Contents
from tiermem.optim.host.share import Speeds
from tiermem.optim.hostpart import HostPart, Where, check_where
from tiermem.optim.intake import Intake
from tiermem.optim.methods import Methods
from tiermem.optim.parts import OptimizerParts
from tiermem.optim.rounds import Round
from tiermem.optim.rules.groups import Params, floating, groups_of, told_of_duplicates
from tiermem.optim.rules.scaling import Scaling
from tiermem.optim.state import MASTER, export_all, load_state, loaded_order, take_in_edits
from tiermem.optim.timing import Overlap, StepTiming, check_overlap
from tiermem.optim.tried import TriedClass
from tiermem.optim.units.collection import Units
from tiermem.runtime.base.functorch import outside_inference


class TieredOptimizer(torch.optim.Optimizer):
    """The result of ``tier.optimizer``: an optimizer of the requested class, whose state streams.

    ``param_groups``, learning-rate schedulers, ``state_dict``, ``zero_grad`` and
    step hooks work as with the plain optimizer, with bitwise identical results.

    Attributes:
        grad_factor: A 0-d tensor that the next ``step()`` multiplies each gradient by, after the
            gradient's cast to the master's dtype; None for no factor. ``param.grad`` keeps what it
            is. ``step()`` and ``zero_grad()`` reset it.
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
        wrap_to_train: Callable[[Iterable[torch.Tensor]], None] | None = None,
        **settings: Any,
    ) -> None:
        """Tries the class, finds out its state and reserves homes for it.

        Args:
            runtime: The modules' runtime.
            params: A wrapped module, parameters, or parameter groups.
            cls: The optimizer class.
            number: Distinguishes the optimizers of one manager.
            master_dtype: The dtype of the masters, or None to step the weights themselves.
            grad_dtype: The dtype in which gradients are accumulated and kept, or None for that of
                the weights.
            overlap: When steps are performed; see :meth:`tiermem.TierManager.optimizer`.
            where: Where blocks are stepped.
            host_share: With ``where="both"``: the host's share of the elements; None to measure.
            wrap_to_train: Called with the parameters, before anything is reserved for them.
            **settings: The class's own.

        Raises:
            ConfigError: If an option has a value that is not allowed.
            StepError: If the class cannot be stepped block by block, or a dtype does not suit the
                parameters.
            CapacityError: If a step or the state does not fit in a budget; nothing is changed.
        """
        self._runtime = runtime
        runtime.manager.gate.guard()
        cls = optimizer_class(cls)
        check_overlap(overlap)
        check_where(where, host_share)
        masters = floating("master_dtype", master_dtype)
        self._grad_dtype = floating("grad_dtype", grad_dtype)
        self._closed = False
        reorders = overlap not in (False, "auto") or where in ("host", "both")
        device = runtime.manager.parts.device
        self._tried = TriedClass(cls, settings, device, masters, reorders=reorders)
        groups = groups_of(params)
        check_wrapped(runtime, groups, params)
        if wrap_to_train is not None:
            wrap_to_train([param for group in groups for param in group["params"]])
        groups = self._complete(groups)
        with told_of_duplicates():
            super().__init__(groups, dict(self._tried.defaults))
        units = self._units = Units(self.param_groups, self._state)
        self._methods = Methods(cls, self._tried.try_on, self._tried.counts)
        self._norms = clip.Norms(runtime, number)
        parts = OptimizerParts(runtime, self._tried, units, number)
        self._host = HostPart(parts, where, host_share)
        self._timing = StepTiming(parts, self._host, overlap, self._take_in_edits)
        self._tried.learn(self.param_groups, range(len(self.param_groups)))
        self._intake = Intake(parts, self._host, self._timing)
        undo = self._keep_gradients(self.param_groups)
        try:
            self._intake.take_wanted(self.param_groups)
        except BaseException:
            undo()
            raise
        self._intake.register(self, self._before_forward)
        self._timing.begin()

    # -- the optimizer's own methods -------------------------------------

    @entrance
    def step(self, closure: Callable[[], Any] | None = None, *more: Any, **settings: Any) -> Any:
        """Performs one step, block by block.

        If an error interrupts a step, some blocks have been stepped and the others have not, but no
        block only in part (of a large parameter, some of its parts). Call ``step()`` again to
        finish it, with the gradients, settings and loss scale with which it began. Until then
        gradients cannot be cleared and no training forward can begin. :meth:`abandon_step` leaves
        the blocks as they are.

        Args:
            closure: Evaluated once, first, with gradients enabled.
            more: Arguments that only some classes accept; refused, since blocks may be stepped
                later.
            settings: Keyword arguments; refused, too.

        Returns:
            The result of ``closure``.
        """
        if more or settings:
            refuse_arguments(self._tried.cls, closure, more, settings)
        if torch.is_inference_mode_enabled():  # a later step, inside backward, writes what is made
            with outside_inference():
                return self._step(closure)  # not step(): its hooks have been called already
        return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        self._refuse_if_closed("step()")
        self._runtime.models.refuse_half_loaded("step()")
        self._methods.refuse_if_begun("step()")
        self._runtime.manager.gate.guard()
        self._runtime.given.look()
        if not self._timing.rounds:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = outside(closure)
            if not self._begin_round(loss):
                return loss
        return self._go_on(self._timing.rounds[-1])

    def _begin_round(self, loss: Any) -> bool:
        """Collects the units to step; returns whether there is anything to do."""
        self._runtime.backward.end()
        scaling, on_host = Scaling.of(self), self._host.steps is not None
        scaling = self._timing.before_step(scaling)
        if scaling is not None and not (self._tried.fused and not on_host) and scaling.skips:
            self.grad_factor = None
            return False
        self._timing.finish()
        self._norms.forget(self._units)  # a class may write gradients
        self._units.members.check(self._units)
        self._tried.refuse_missing(self.param_groups)
        self._intake.take_wanted(self.param_groups)
        self._tried.note_settings(self._units, self.param_groups)
        self._take_in_edits(inside=self._timing.has_made)
        self._units.order.note_step()
        self._timing.begin_round(self.param_groups, scaling, loss)
        return True

    def _go_on(self, current: Round) -> Any:
        """Performs the rest of a step; returns the result of its closure."""
        self.grad_factor = None  # the round has it now
        rounds = self._timing.rounds
        try:
            uncompiled(StepTiming.make)(self._timing, current)  # as for steps at other times
            self._tried.counts.after_step(current.groups, self.param_groups)
        except BaseException as error:
            current.cut_short(error)
            raise
        return rounds.pop().loss  # one line: whatever is raised before, the round has not ended

    @entrance
    def abandon_step(self) -> None:
        """Gives up the rest of an interrupted step that ``step()`` cannot finish.

        Blocks that were stepped stay stepped, the others are unchanged; gradients are kept.
        Everything can be used again, as after an error in the middle of a plain optimizer's step.
        Does nothing if no step is unfinished.

        Raises:
            StorageError: If a block cannot be restored because its disk fails.
        """
        self._refuse_if_closed("abandon_step()")
        self._timing.abandon()

    @entrance
    def finish(self) -> None:
        """Performs deferred steps (``overlap``), as an access to their blocks would."""
        self._timing.finish()
        self._timing.catch_up()

    @entrance
    def accumulate(self, micro_batches: int) -> None:
        """Sets how many backwards there are for each step, from the next step on.

        Only ``overlap="backward"`` needs this, as it steps blocks in the last of them. ``step()``
        may be called earlier (then all blocks are stepped there); a further backward is refused.

        Args:
            micro_batches: At least 1, the default.

        Raises:
            ConfigError: If it is not such a number.
            StepError: If blocks were stepped in backward and ``step()`` was not called yet.
        """
        self._refuse_if_closed("accumulate()")
        self._timing.accumulate(micro_batches)

    @property
    def stepped_where(self) -> str:
        """Which share of the elements the host steps, or why it steps none."""
        return str(self._host)

    @property
    def speeds(self) -> Speeds | None:
        """Measured speeds of host and device, if steps are shared between them; else None."""
        return self._host.speeds

    @property
    def stepped_in_backward(self) -> int:
        """How many units were stepped inside backward so far and confirmed by ``step()``."""
        return self._timing.total

    @property
    def states_left(self) -> int:
        """How many times a unit's state was late so far, to be updated in its next step.

        In one of two steps inside backward this may happen, which saves a copy home. It cannot be
        observed in any other way.
        """
        return self._timing.left

    @property
    @entrance
    def state(self) -> Any:
        """The state by parameter, as in any optimizer; deferred steps are performed first."""
        self._refuse_if_closed("optimizer.state")
        self._timing.finish_before("optimizer.state")
        self._units.order.restore()
        self._units.looked_into = True
        return self._state

    @state.setter
    def state(self, value: Any) -> None:
        if not hasattr(self, "_state"):
            self._state = value
            return
        shown = self.state
        if value is not shown:  # other code may hold that one, too
            given = dict(value)
            shown.clear()
            shown.update(given)

    def _take_in_edits(self, *, inside: bool = False) -> None:
        """Copies users' edits of the state into the units that have no deferred step.

        Args:
            inside: Whether steps inside backward were performed in between.
        """
        if not self._units.looked_into:
            return
        if not inside:
            self._units.order.note_edits()
        manager = self._runtime.manager
        with manager.lock, quiet(manager.parts.device):
            take_in_edits(self._runtime, self._units.settled(), self.param_groups, self._state)

    @entrance
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, or sets them to zero."""
        self._refuse_if_closed("zero_grad()")
        self._timing.refuse_if_made("zero_grad()")
        self._refuse_if_pending("zero_grad()")
        self._timing.before_clearing()
        self._intake.complete()
        self.grad_factor = None
        for unit in self._units:
            unit.zero_grad(self._runtime, set_to_none=set_to_none)
        self._units.members.zero_grad(set_to_none=set_to_none)
        self._timing.after_clearing(set_to_none=set_to_none)

    @entrance
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Clips the norm of all gradients together, bitwise as ``torch.nn.utils`` does.

        From the second call with the same settings on, norms are computed in backward, when
        gradients arrive; those that are not known are computed here, in a sweep. The factor is
        applied when gradients are next in HBM, at the latest in ``step()``.

        Returns:
            The norm before clipping, 0-d.

        Raises:
            RuntimeError: If it is not finite and ``error_if_nonfinite``.
        """
        self._settle_to_clip("clip_grad_norm_()")
        self._runtime.backward.end()
        self._intake.take_wanted(self.param_groups)
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
        """Returns the norm of all gradients together, 0-d; does not change them.

        Args:
            norm_type: Which norm.
            foreach: Whether torch's ``foreach`` kernels are used.
            dtype: The dtype to which gradients are cast first, such as the masters'; None for no
                cast.
        """
        self._settle_to_clip("grad_norm()")
        self._runtime.backward.end()
        self._intake.take_wanted(self.param_groups)
        kind = float(norm_type), foreach, floating("dtype", dtype)
        params = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            return self._norms.total(self._units, params, kind)

    @entrance
    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamps every gradient to ``[-clip_value, clip_value]``."""
        self._settle_to_clip("clip_grad_value_()")
        self._intake.take_wanted(self.param_groups)
        change = partial(clip.clamp, limit=float(clip_value))
        clip.change_all(self._runtime, self._units, change)

    @entrance
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters as torch takes them, and reserves homes for their state.

        Raises:
            CapacityError: If their state or a step does not fit in a budget; nothing is changed.
        """
        if "_intake" not in self.__dict__ or not isinstance(param_group, dict):
            outside(super().add_param_group, param_group)  # raises for what torch refuses
            return
        self._settle("add_param_group()")
        count = len(self.param_groups)
        (group,) = self._complete(groups_of([param_group]))
        refuse_others(self._runtime, [group])
        undo = None
        try:
            with told_of_duplicates():
                outside(super().add_param_group, group)
            undo = self._keep_gradients([group])
            self._intake.take_wanted(self.param_groups)
        except BaseException:
            if not self._intake.has_any_of(count):
                if undo is not None:
                    undo()
                del self.param_groups[count:]
                self._tried.forget(count)
                self._units.members.list_anew()
            raise

    @entrance
    def state_dict(self) -> dict[str, Any]:
        """Returns what the plain optimizer's ``state_dict`` would, with tensors in host memory.

        With ``master_dtype`` there is one more key, ``"master"``: the master of each parameter that
        has one, by the parameter's number, as in ``"state"``.
        """
        self._settle("state_dict()")
        for hook in self._optimizer_state_dict_pre_hooks.values():
            outside(hook, self)
        self._units.order.restore()
        args = self._runtime, self._units, self.param_groups, self._state
        result = export_all(*args, self._tried.cls, self._tried.make)
        if self._tried.master_dtype is None:
            del result[MASTER]
        for post in self._optimizer_state_dict_post_hooks.values():
            changed = outside(post, self, result)
            result = result if changed is None else changed
        return result

    @entrance
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this or of the plain optimizer.

        If it has masters, the weights become their casts; otherwise the masters are unchanged.

        Raises:
            CheckpointError: If it has other groups or shapes; nothing is changed.
        """
        self._refuse_if_closed("load_state_dict()")
        if not self._timing.rounds:
            self._settle("load_state_dict()")
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = outside(hook, self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._intake.take_on(self._units.members.of_state(state_dict), self.param_groups)
        begin = self.abandon_step if self._timing.rounds else None
        args = self._runtime, self._units, self.param_groups, self._state
        tried = self._tried
        known = tried.cls, self.defaults.keys(), tried.probe, tried.make
        load_state(*args, state_dict, *known, begin)
        self._units.order.note(loaded_order(self.param_groups, state_dict))
        self.defaults.setdefault("differentiable", False)  # as torch's __setstate__ does then
        for post in self._optimizer_load_state_dict_post_hooks.values():
            outside(post, self)

    @property
    def made_of(
        self,
    ) -> tuple[type[torch.optim.Optimizer], torch.dtype | None, torch.dtype | None]:
        """The class that performs the steps, and the dtypes of masters and gradients, or None."""
        return self._tried.cls, self._tried.master_dtype, self._grad_dtype

    def contents(self, what: str) -> Contents:
        """Returns the contents for a checkpoint; deferred steps are performed first.

        For :mod:`tiermem.saving`.

        Args:
            what: The operation, for messages.

        Raises:
            StepError: If a step is unfinished, or has been performed in part inside backward.
        """
        self._settle(what)
        self._take_in_edits()
        self._units.order.restore()
        return Contents(
            self._tried.cls,
            self.param_groups,
            self._units,
            self._state,
            self._tried.master_dtype,
            self._grad_dtype,
            self.grad_factor,
            self._timing.backwards,
        )

    def is_left(self) -> bool:
        """Whether all of its parameters were in models that were unwrapped: it has no units."""
        units = list(self._units)
        stepped = sum(len(unit.members) for unit in units)
        given = sum(len(group["params"]) for group in self.param_groups)
        freed = all(unit.group is not None and unit.group.freed for unit in units)
        return bool(units) and freed and stepped == given

    def contents_to_replace(self, numbered: dict[str, Any]) -> Contents:
        """Returns its contents, to be replaced; an interrupted step is abandoned.

        Args:
            numbered: A state dict whose state and masters have keys and no values. Parameters that
                are not stepped so far but have an entry there are stepped from now on.

        Raises:
            CapacityError: If these do not fit in a budget; nothing is changed then.
        """
        self._refuse_if_closed("tier.load()")
        if not self._timing.rounds:
            self._settle("tier.load()")
        self._intake.take_on(self._units.members.of_state(numbered), self.param_groups)
        if self._timing.rounds:
            self.abandon_step()
        return self.contents("tier.load()")

    def replaced(
        self, grad_factor: torch.Tensor | None, backwards: int, order: Sequence[torch.Tensor]
    ) -> None:
        """Ends the replacement of its contents, and continues with the new ones.

        Args:
            grad_factor: The factor of its next step.
            backwards: How many backwards there were since the last step.
            order: The parameters that have state, in the order of ``state``.
        """
        self._units.order.note(order)
        self.grad_factor = grad_factor
        self._timing.backwards = backwards
        self._norms.forget(self._units)
        self.defaults.setdefault("differentiable", False)  # as torch's __setstate__ does then

    @entrance
    def close(self) -> None:
        """Frees state and masters; deferred steps are performed first.

        Weights and gradients are unchanged. Without this call, the space is reserved until the
        manager is closed. A closed optimizer cannot be used; closing it again does nothing.

        Raises:
            StepError: If a step is unfinished, or blocks were stepped in backward and ``step()``
                was not called yet; the optimizer stays open.
            StorageError: If a deferred step fails; the optimizer stays open.
        """
        runtime = self._runtime
        if self._closed or runtime.manager.gate.closed:
            return
        self._settle("close()")
        units, rooms = list(self._units), self._intake.rooms()
        with runtime.manager.lock:
            runtime.manager.remove_blocks([b for unit in units for b in unit.kept_blocks()])
            self._closed = True
            self._units.replace([])
            self._intake.unregister()
            self._norms.close(units)
            for kept in self._state.values():
                for value in kept.values() if isinstance(kept, dict) else ():
                    end(value, partial(self._refuse_if_closed, "its state"))
        self._timing.close()
        self._host.close(rooms)

    def __getattr__(self, name: str) -> Any:
        """Returns methods that the class adds to torch's, such as ``train()``.

        They are called for the weights and state of one block after another, if a trial on tiny
        tensors has shown that the result is the same.
        """
        tried = self.__dict__.get("_tried")
        cls = None if tried is None else tried.cls
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
        raise StepError(
            "a tiered optimizer cannot be copied or pickled, as its state is in the tiers: save "
            "its state_dict(), or load that into an optimizer that you make over the copy of the "
            "model: torch's own, or one of tier.optimizer after tier.wrap"
        )

    def __repr__(self) -> str:
        shown = super().__repr__()  # what scripts log: as the class shows itself
        return shown.replace(type(self).__name__, self._tried.cls.__name__, 1)

    # -- setting up ------------------------------------------------------

    def _complete(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Fills all defaults into groups, as the class itself does; returns them."""
        groups = self._tried.complete(groups)
        self._step_supports_amp_scaling = self._tried.undoes_scale  # read by a GradScaler
        return groups

    def _keep_gradients(self, groups: Sequence[dict[str, Any]]) -> Callable[[], None]:
        """Sets the dtype of gradients, also of frozen parameters; returns a function to undo it."""
        params = [param for group in groups for param in group["params"]]
        return self._runtime.grads.homes.keep_in(self._grad_dtype, params)

    def _before_forward(self, training: bool) -> None:
        self._timing.before_forward()
        if training:
            self._refuse_if_pending("a training forward")
            if not self._timing.has_made:
                self._intake.take_on(self._units.members.thawed(), self.param_groups)

    def _settle(self, what: str, *, drop: bool = True) -> None:
        """Raises if a step is unfinished, and drops steps ahead."""
        self._refuse_if_closed(what)
        self._timing.finish_before(what, drop=drop)
        self._refuse_if_pending(what)
        self._intake.complete()

    def _settle_to_clip(self, what: str) -> None:
        self._timing.refuse_clipping(what)
        self._settle(what, drop=False)  # reading norms is not reading gradients

    def _refuse_if_closed(self, what: str, *_: Any) -> None:
        if self._closed:
            raise StepError(
                f"{what}: this optimizer is closed, its state and masters are gone; make another "
                "with tier.optimizer (a state_dict() that was taken before can be loaded there)"
            )

    def _refuse_if_pending(self, what: str) -> None:
        self._methods.refuse_if_begun(what)
        self._timing.refuse_if_pending(what)
