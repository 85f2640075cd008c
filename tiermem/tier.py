"""The public front end: :class:`TierManager`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from tiermem.config import Home, Policy, Settings, parse_budget, parse_size
from tiermem.core.block import Role
from tiermem.errors import REFUSALS, CapacityError, WrapError
from tiermem.given import (
    PathLike,
    Size,
    default_dram,
    depth_of,
    device_of,
    disk_limit_of,
    folders_of,
    hbm_of,
    layers_of,
    most_hbm,
)
from tiermem.nn.compat.entrances import entrance
from tiermem.nn.compat.outside import OUTSIDE
from tiermem.nn.groups.inspect import check_module
from tiermem.nn.groups.resident import Resident
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.nn.wrap import around
from tiermem.nn.wrap.anew import to_wrap_anew
from tiermem.nn.wrap.giveback import Leaving, finish, give_back, prepare, say_beside
from tiermem.nn.wrap.materialize import Target, materialize
from tiermem.nn.wrap.origins import Origins
from tiermem.nn.wrap.repair import repair
from tiermem.nn.wrap.wrapped import Blocks, WrappedModel
from tiermem.optim.host.sides import prepare_share
from tiermem.optim.hostpart import Where
from tiermem.optim.rules.groups import Params
from tiermem.optim.tiered import TieredOptimizer
from tiermem.optim.timing import Overlap
from tiermem.plainoptimizers import follow_optimizers
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.memory.hostmemory import total_memory
from tiermem.runtime.metrics.counters import PaceRow, ResidencyRow, Stats
from tiermem.runtime.metrics.timeline import Timeline
from tiermem.saving.later import SaveHandle
from tiermem.saving.load import load_run
from tiermem.saving.save import make_plan, save_now

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class TierManager:
    """Three tiers of memory, and the models whose tensors live in them.

    Use it as a context manager, or call :meth:`close`. Either makes the models ordinary torch
    modules again, and frees memory and disk space. Without either, the tiers exist as long as there
    is a reference to the manager, to a wrapped model, or to an optimizer of one. Even a process
    that is killed leaves no file behind.
    """

    def __init__(
        self,
        device: str | torch.device = "cuda",
        hbm: Size | None = None,
        dram: Size | None = None,
        nvme: PathLike | Sequence[PathLike] | None = None,
        *,
        nvme_bytes: Size | None = None,
        policy: Policy | dict[str, Home] | str | None = None,
        prefetch_depth: int | Literal["auto"] = "auto",
        activation_min: Size = "1MiB",
        activation_layers: int | None = None,
        activation_ahead: Size | Literal["auto"] = "auto",
    ) -> None:
        """Opens the tiers.

        Args:
            device: ``"cuda"`` (or ``"cuda:1"``, ...), or ``"cpu"``, where an arena of host
                memory stands in for HBM and the same code runs.
            hbm: Budget of device memory for blocks (activations and the framework's own memory
                come on top): a number of bytes, text such as ``"7GiB"``, or a share such as
                ``"80%"`` of the device's memory. It is a limit: memory is taken as blocks
                arrive. By default, and with ``"auto"``, the limit on a GPU starts at half of the
                free memory, and later grows to all that the rest of the program leaves free,
                less a margin. After torch has run out of memory, it is as low as possible, and
                the step that raised can be repeated. With ``device="cpu"`` the default is an
                eighth of the available host memory.
            dram: Budget of host memory, also a limit. A share such as ``"50%"`` is a share of the
                memory that the machine has and the process's cgroups allow. By default, and
                with ``"auto"``, half of the memory that is available within these limits.
                The part that is not used for homes is used to read ahead from files.
            nvme: A folder on a fast disk, or several, over which data is striped; None for two
                tiers only.
            nvme_bytes: The most bytes that may be used on disk; by default as many as are needed.
            policy: The home tier of each role: a :class:`tiermem.Policy`, a mapping of roles, or
                one tier for all roles.
            prefetch_depth: How many blocks ahead of the compute fetches may begin, or ``"auto"``.
            activation_min: With ``Policy(activations="dram")`` or ``"nvme"``: the size from which
                tensors saved for backward leave HBM. A tensor for which its tier has no room
                stays in HBM, and ``stats().activations.kept`` counts it.
            activation_layers: Only the tensors saved by this many layers, from the first, leave
                HBM; None for all.
            activation_ahead: How many bytes of such tensors may be prefetched in backward, and may
                still be in HBM while they are copied out in forward; ``"auto"`` for what two
                blocks save.

        Raises:
            ConfigError: If a setting cannot be used.
            CapacityError: If there is not enough memory or disk space.
        """
        where = device_of(device)
        room = hbm_of(hbm, where)
        below, folders = parse_budget(dram, "dram", total_memory), folders_of(nvme)
        self._manager = BlockManager(
            Settings(
                device=str(where),
                hbm=most_hbm(where) if room is None else room,
                dram=default_dram() if below is None else below,
                nvme=folders,
                nvme_bytes=disk_limit_of(nvme_bytes, folders),
                policy=Policy.of(policy),
                prefetch_depth=depth_of(prefetch_depth),
                activation_min=parse_size(activation_min, "activation_min"),
                activation_layers=layers_of(activation_layers),
                activation_ahead=(
                    None
                    if activation_ahead == "auto"
                    else parse_size(activation_ahead, "activation_ahead")
                ),
                hbm_auto=room is None and where.type == "cuda",
            )
        )
        try:
            self._runtime = ModuleRuntime(self._manager, repair)
            self._wrapped = self._runtime.models
            self._wraps = 0
            self._optimizers = 0
            self._leaving: list[Leaving] = []
            self._saving: SaveHandle | None = None
            # runs when the interpreter exits; a weak reference, as blocks refer back to self
            weakref.finalize(self, _close, weakref.ref(self._manager))
        except BaseException:  # Ctrl-C
            self._manager.close()
            raise

    # -- models ----------------------------------------------------------

    @entrance
    def wrap(
        self,
        model: ModuleT,
        blocks: Blocks = "auto",
        *,
        homes: Mapping[str, Home] | None = None,
        resident: Resident = "auto",
    ) -> ModuleT:
        """Moves a model's parameters into the tiers, in place.

        Args:
            model: Any module. It may be on the CPU or on the device already.
            blocks: How parameters are divided into blocks, which move as a whole: ``"auto"``; the
                names of modules at which a block begins; or a predicate of name and module. With
                ``"auto"``, blocks are chosen for training if the model is in training mode, or if
                an optimizer for most of it is made before its first call (which wraps the model
                anew). Otherwise they are chosen for evaluation.
            homes: Homes of weights that differ from the policy's: a mapping of a module's qualified
                name to the home of everything in it, such as ``{"layers.0": "dram"}``. Where names
                are nested, the innermost counts.
            resident: Parameters that stay in HBM with their gradients, masters and state, whatever
                the policy and ``homes`` say: a predicate of qualified name and parameter, or None
                for none. ``"auto"``: the adapters that :func:`tiermem.add_adapters` added. If there
                are none: the trained parameters, if they take at most an eighth of the bytes of the
                frozen ones and, with gradients and Adam's state, at most an eighth of HBM.
                With ``blocks="auto"``, blocks that are too small to be worth moving stay, too.

        Returns:
            The same module.

        Raises:
            ConfigError: If ``blocks`` or ``homes`` names a module that the model does not have.
            WrapError: If the model cannot be wrapped; the message says what to do instead.
            CapacityError: If it does not fit in a budget. After any error the model is unchanged.
        """
        self._wrap_model(model, blocks, homes, resident=resident)
        return model

    def _wrap_model(
        self,
        model: nn.Module,
        blocks: Blocks,
        homes: Mapping[str, Home] | None = None,
        origins: Origins | None = None,
        resident: Resident = "auto",
        *,
        number: int | None = None,
        training: bool | None = None,
    ) -> WrappedModel:
        """Wraps a model, whose values may be in files instead of in its tensors.

        Args:
            model: The model.
            blocks: As for :meth:`wrap`.
            homes: As for :meth:`wrap`.
            origins: Where values are that the model's tensors do not have.
            resident: As for :meth:`wrap`.
            number: If the model is wrapped anew, its former number.
            training: Whether it will be trained; by default, whether it is in training mode.
        """
        self._manager.gate.guard()
        check_module(model, id(self._manager))
        if number is None:  # a model that is wrapped anew was first wrapped before any replication
            around.refuse_replica(model)
        self._runtime.activations.check()
        follow_optimizers()
        on_device = any(p.is_cuda for p in model.parameters())
        number = self._wraps if number is None else number
        wrapped = WrappedModel(
            model, self._runtime, blocks, number, homes, origins, resident, training=training
        )
        if on_device:
            torch.cuda.empty_cache()  # else torch's allocator keeps the memory of the weights
        self._runtime.models.owner = self  # a reference to a model keeps the tiers open
        self._wraps = max(self._wraps, number + 1)
        try:
            training, held = wrapped.inventory.training, wrapped.modules.held()
            self._runtime.pack_ahead(wrapped.number, wrapped.groups, written=training)
            self._runtime.fill_ahead(wrapped.scopes[""], held, written=training)
            if training and self._manager.parts.device.type == "cuda":
                prepare_share(self._runtime)
        except BaseException:
            give_back(wrapped, self._manager.parts.device if on_device else None)
            self._forget(id(model))
            raise
        return wrapped

    @entrance
    def unwrap(self, model: ModuleT, device: str | torch.device | None = None) -> ModuleT:
        """Makes a wrapped model an ordinary one again.

        Args:
            model: A module given to :meth:`wrap`.
            device: Where its tensors go; host memory by default.

        Returns:
            The same module.

        Raises:
            ConfigError: If there is no such device; nothing is changed.
            WrapError: If the module is not wrapped in this manager, or is being called.
        """
        self._manager.gate.guard()
        wrapped = self._wrapped.get(id(model))
        if wrapped is None:
            raise WrapError("this module is not wrapped here; unwrap takes what wrap returned")
        give_back(wrapped, None if device is None else device_of(device))
        self._forget(id(model))
        return model

    @entrance
    def optimizer(
        self,
        params: Params,
        cls: type[torch.optim.Optimizer],
        *,
        master_dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
        overlap: Overlap = "auto",
        where: Where = "auto",
        host_share: float | None = None,
        **settings: Any,
    ) -> TieredOptimizer:
        """Makes an optimizer whose state lives in the tiers.

        Args:
            params: A wrapped module, parameters, or parameter groups as torch takes them. Some may
                be outside the tiers; these stay where they are.
            cls: Any ``torch.optim.Optimizer`` class that updates each parameter from its own
                gradient and state only; trial steps check this. The returned optimizer also has
                the methods that the class adds to torch's, such as ``train()``.
            master_dtype: Every floating-point parameter of another dtype gets a master of this
                dtype, such as ``torch.float32`` for a bfloat16 model. The class steps the masters
                with gradients that are cast to their dtype, and the weights are the masters, cast.
                ``Policy(master=...)`` says in which tier masters live.
            grad_dtype: The dtype in which gradients are accumulated and kept, such as
                ``torch.float32``; ``param.grad`` has it, too. By default the parameter's. For
                float16 weights ``GradScaler.unscale_`` needs it, as torch does not unscale float16
                gradients. Without ``unscale_`` the gradients are unscaled in ``step()``, after the
                cast to the master's dtype.
            overlap: When the step of a block is performed.

                ``False``: in ``step()``.

                ``"forward"`` (or True): just before the block's next use, in the next forward,
                for which its weights are copied to HBM anyway. No code sees a weight before its
                step, and the step uses the settings of the time when ``step()`` was called.

                ``"backward"``: in backward, as soon as the block's gradient is final. The gradient
                never leaves HBM (steps on the host also begin then); ``step()`` performs the steps
                that are left. It is for loops that do not use gradients themselves: clipping, loss
                scaling, and settings that change between backward and ``step()`` are refused, at
                the first step, which is performed after backward. With several backwards per step,
                call ``optimizer.accumulate(n)``.

                ``"auto"``: in backward, to be confirmed by ``step()``, if DRAM has room for a copy
                of the block's former bytes. Otherwise as with ``"forward"`` for the blocks for
                which no program can tell the difference (checked at each step), and in ``step()``
                for the others. The resulting bits, the budgets that are enough and what a program
                can observe are the same as with ``False``. A disk error may be raised by the next
                forward, which can be called again.
            where: Where steps are performed.

                ``"device"``: on the device; state and masters are copied to HBM for the step.

                ``"host"``: on the host, for blocks whose weights, gradients, state and masters all
                have their home in DRAM or in files (which pass through staging buffers within the
                DRAM budget); on the device for the others. Steps on the host are bitwise identical
                to the device's if trial steps have shown it. If not, torch's CPU kernels perform
                them, and round differently.

                ``"both"``: as with ``"host"``, but for a share of the blocks, chosen by measured
                speed so that device and host finish together.

                ``"auto"``: whatever is fastest and bitwise identical to the resident optimizer:
                the device, and the host for a measured share of the blocks with their home in
                DRAM, if trial steps of this class with these settings have shown that the host
                computes the device's bits (Adam, AdamW, SGD). ``optimizer.stepped_where`` says
                what was chosen.
            host_share: With ``where="both"``: the share of the elements that the host steps, from 0
                to 1, met as closely as whole blocks allow; by default it is measured.
            **settings: The class's own settings.

        Returns:
            The optimizer. Space for its state and masters is reserved until its ``close()``, or
            until the manager is closed.

        Raises:
            ConfigError: If an option has a value that is not allowed.
            StepError: If the class cannot be stepped block by block, none of the parameters is in
                the tiers, or a dtype does not suit them.
            CapacityError: If its state, or what a step needs, does not fit in a budget.
        """
        self._optimizers += 1
        known = {record.block.id for record in self._manager.parts.table}
        runtime = self._runtime
        watched = runtime.backward.on_begin, runtime.away.on_look
        lists: list[list[Any]] = [*watched, runtime.keepers]
        begun = [len(found) for found in lists]
        try:
            return TieredOptimizer(
                self._runtime,
                params,
                cls,
                self._optimizers,
                master_dtype=master_dtype,
                grad_dtype=grad_dtype,
                overlap=overlap,
                where=where,
                host_share=host_share,
                wrap_to_train=self._wrap_to_train,
                **settings,
            )
        except REFUSALS:
            raise
        except BaseException as error:  # homes that were reserved already have no owner
            for found, count in zip(lists, begun, strict=True):
                del found[count:]
            if OUTSIDE not in error.__dict__:  # not raised by the class: by tiermem, anywhere
                self._manager.cut_short()
                self._manager.gate.guard()
            kinds = (Role.OPTIMIZER, Role.MASTER)
            new = [r.block for r in self._manager.parts.table if r.block.id not in known]
            self._manager.remove_blocks([block for block in new if block.role in kinds])
            raise

    def _wrap_to_train(self, params: Iterable[torch.Tensor]) -> None:
        """Wraps a model anew that was wrapped for evaluation and has not been called yet.

        For training, other blocks are better. If host memory has no room for the model in between,
        or a budget none for the new blocks, the model stays as it is.

        Args:
            params: The parameters that an optimizer will step.
        """
        wrapped = to_wrap_anew(self._runtime, params)
        if wrapped is None:
            return
        model, known = wrapped.model, wrapped.inventory
        again = partial(
            self._wrap_model,
            model,
            known.blocks,
            known.homes,
            resident=known.resident,
            number=wrapped.number,
        )
        try:
            with suppress(CapacityError):
                give_back(wrapped, None)
                self._forget(id(model))
                again(training=True)
        finally:
            if wrapped.leaving and not wrapped.given_back:  # interrupted: finish it
                self._manager.cut_short()
                self._manager.gate.guard()
                give_back(wrapped, None)
            if wrapped.given_back and self._wrapped.get(id(model), wrapped) is wrapped:
                self._wrapped.pop(id(model), None)
                again()

    def materialize(
        self, target: Target, device: str | torch.device | None = None
    ) -> AbstractContextManager[None]:
        """Makes parameters and gradients ordinary tensors in a ``with``; then writes changes back.

        Args:
            target: A module, a parameter, or several of them.
            device: Where the tensors are; host memory by default.

        Raises:
            ConfigError: If there is no such device, or the target is none of these.
        """
        return materialize(self._runtime, target, None if device is None else device_of(device))

    # -- checkpoints -----------------------------------------------------

    @entrance
    def save(self, path: PathLike, extra: Any = None, wait: bool = True) -> SaveHandle | None:
        """Writes the whole state of the run, so that a crash at any instant leaves a checkpoint.

        The state consists of the parameters, buffers and gradients of the wrapped models; masters,
        state and settings of the optimizers that are open (deferred steps are performed first); the
        random generators of torch, of the device, of Python and of numpy; and ``extra``. ``path``
        becomes a folder with ``model.safetensors`` (or several, and an index), whose names are
        those of ``model.state_dict()``; the configuration, for a transformers model;
        ``optimizer.safetensors``; and ``tiermem.json``. If several models are wrapped, they have
        folders ``model-0``, ``model-1``, ... in it.

        At any instant ``path`` is either the former checkpoint or the new one, complete and on
        disk. In addition to the budgets, this takes host memory for one block and some buffers of
        8 MiB.

        Args:
            path: A path that does not exist, an empty folder, or a checkpoint, which is replaced;
                the parent folder has to exist. Files of your own in it (``config.json``, a
                tokenizer, notes) stay; a folder that has only such files may become a checkpoint.
            extra: What else a run needs, such as ``scheduler.state_dict()``: numbers, text, None
                and tensors, in lists, tuples and dictionaries.
            wait: Whether to return only when the checkpoint is complete. With False, the present
                state is saved while training continues: before a block is stepped, it is copied to
                free DRAM of the budget; if there is none, the step waits until its block is
                written. The next save, load or close waits for this save.

        Returns:
            With ``wait=False``, a handle: ``done()`` says whether the save has ended; ``result()``
            waits for it and raises its error. An error that is not raised there is raised by the
            next save, load or close.

        Raises:
            CheckpointError: If ``extra`` or a tensor cannot be saved, or ``path`` is something
                else; nothing is written.
            CapacityError: If the file system has no room; the former checkpoint stays.
            StepError: If an optimizer's step is unfinished.
            StorageError: If a file cannot be written, or a block cannot be read; the former
                checkpoint stays.
        """
        self._manager.gate.guard()
        self._end_saving()
        plan = make_plan(self._runtime, path, extra)
        if wait:
            save_now(self._runtime, plan)
            return None
        self._saving = saving = SaveHandle(self._runtime, plan)
        saving.begin(plan)  # `_saving` is set before: the next save waits even after an interrupt
        return saving

    def _end_saving(self) -> None:
        """Waits for a save in progress; raises its error if that was not raised before."""
        if self._saving is not None:
            self._saving.settle()
            self._saving = None  # only now: after Ctrl-C in `settle` the save is still in progress

    @entrance
    def load(self, path: PathLike) -> Any:
        """Resumes from a checkpoint that :meth:`save` wrote, bitwise identically.

        Before, wrap the same models and make the same optimizers, in the same order. Budgets,
        policies, ``blocks``, ``overlap`` and ``where`` may be different. Names, shapes and settings
        are checked before anything is changed. Tensors are compared with their checksums as they
        are read. If one differs, the checkpoint has been loaded only in part; the models then
        refuse to compute, and to be saved, until a whole checkpoint is loaded.

        Args:
            path: The checkpoint.

        Returns:
            The ``extra`` of the save; its tensors are in host memory.

        Raises:
            CheckpointError: If it is not a checkpoint, or does not fit; nothing is changed.
            IntegrityError: If the bytes of a file are not those that were written.
            StorageError: If a file cannot be read.
            CapacityError: If state that is in the checkpoint does not fit in a budget.
        """
        self._manager.gate.guard()
        self._end_saving()
        return load_run(self._runtime, path)

    # -- reports ---------------------------------------------------------

    def stats(self) -> Stats:
        """Returns counters: bytes moved per link, hits, misses, stalls and more."""
        stats = self._manager.stats()
        return replace(stats, activations=self._runtime.activations.stats())

    def reset_stats(self) -> None:
        """Resets counters, timeline and the measured efficiency; schedules and plans are kept."""
        with self._manager.lock:
            self._manager.replay.add_up()
            self._manager.parts.counters.reset()
            self._manager.parts.timeline.clear()
            self._manager.parts.pass_timer.reset()

    def pace(self) -> list[PaceRow]:
        """Returns the measured compute and transfer times of each block in each kind of pass."""
        with self._manager.lock:
            return self._manager.parts.pass_timer.rows(self._manager.parts.table)

    def residency(self) -> list[ResidencyRow]:
        """Returns where every block is, and every saved tensor that left HBM."""
        return [*self._manager.residency(), *self._runtime.activations.rows()]

    @property
    def timeline(self) -> Timeline:
        """Spans of compute, optimizer, stalls and copies, and pictures of them."""
        return self._manager.parts.timeline

    # -- the end ---------------------------------------------------------

    @entrance
    def close(self, *, discard: bool = False) -> None:
        """Makes wrapped models ordinary ones in host memory, and frees the memory of all tiers.

        Parameters, buffers and gradients are as :meth:`unwrap` leaves them. Deferred optimizer
        steps are performed first. Blocks that were stepped inside backward
        (``overlap="backward"``) keep the new values, whether or not ``optimizer.step()`` was
        called. The optimizers' state is dropped: call ``optimizer.state_dict()`` before to keep it.
        The end of the ``with`` block calls this.

        Args:
            discard: Whether to drop the models' tensors instead of giving them back; such a model
                can no longer be used.

        An error of a save (``wait=False``) that was not raised yet is raised after closing.

        Raises:
            CapacityError: If host memory has no room for the models: nothing is changed, and the
                manager stays open, so that they can be saved.
            StorageError: If blocks cannot be read back: the models that do not need these blocks
                are given back, and the manager stays open for the others.
            StepError: If a deferred step fails; nothing is changed.
            WrapError: If a model is being called; nothing is changed.
        """
        if self._saving is not None and not self._manager.gate.closed:
            self._saving.wait()
        if not discard and not self._manager.gate.closed:
            for watcher in self._runtime.backward.watchers:
                watcher.settle()
            try:
                self._leaving = prepare(self._wrapped.values())
            finally:
                for key in [k for k, w in self._wrapped.items() if w.given_back]:
                    self._forget(key)
        if self._leaving and not discard:
            finish(self._manager, self._leaving)
        self._manager.close()
        self._leaving = []
        # autograd graphs may keep tiers alive, which the garbage collector cannot see; they must
        # not keep a model alive through them
        for wrapped in self._wrapped.values():
            wrapped.bypass.end(for_good=True)
        self._runtime.program.models.clear()
        self._wrapped.clear()
        self._runtime.models.owner = None
        if self._saving is not None and self._saving.done():  # never the parent's, after `fork`
            self._saving.settle()

    def _forget(self, key: int) -> None:
        """Forgets a model that was given back."""
        del self._wrapped[key]
        if not self._wrapped:
            self._runtime.models.owner = None

    @property
    def closed(self) -> bool:
        """Whether the manager can no longer be used in this process."""
        return self._manager.gate.closed

    def __deepcopy__(self, memo: dict[int, Any]) -> TierManager:
        """Returns the manager itself, so that modules that refer to it can be copied."""
        return self

    def __reduce__(self) -> Any:
        raise WrapError(
            "a TierManager cannot be pickled; tier.save(path) saves the state of the run"
        )

    def __enter__(self) -> TierManager:
        self._manager.gate.guard()
        return self

    @entrance
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except BaseException as second:
            say_beside(error, second)

    def __del__(self) -> None:
        if hasattr(self, "_manager"):
            self._manager.close()  # no model is left

    def __repr__(self) -> str:
        settings = self._manager.parts.settings
        state = "closed" if self.closed else f"{len(self._manager.parts.table)} blocks"
        hbm = "auto" if settings.hbm_auto else settings.hbm
        return f"TierManager({settings.device}, hbm={hbm}, dram={settings.dram}, {state})"


def _close(manager: weakref.ref[BlockManager]) -> None:
    found = manager()
    if found is not None:
        found.close()
