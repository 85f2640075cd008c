"""The public front: one manager, one line to wrap a model."""

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
    """Three tiers of memory, and the models that live in them.

    Use it as a context manager, or call :meth:`close`. Either makes the models ordinary ones again,
    and gives memory and disk space back. Without either, the tiers are there as long as you keep
    the manager, a model wrapped in it, or an optimizer over one. Nothing is left behind even if the
    process is killed.
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
                memory stands in for HBM and the very same code runs.
            hbm: Budget of device memory for what tiermem holds there (activations and the
                framework's own memory come on top): bytes, text such as ``"7GiB"``, or a share
                such as ``"80%"`` of what the device has. It is a limit: memory is taken as
                blocks arrive. By default, and with ``"auto"``, it is found out on a GPU: half of
                what is free at first, then all that the program leaves but for a margin. After
                torch has run out of memory it is as little as possible; the step that raised
                can be repeated. With ``device="cpu"`` the default is an eighth of the available
                host memory.
            dram: Budget of host memory, likewise a limit; ``"50%"`` is of what the machine has
                and the process's cgroups allow. By default, and with ``"auto"``, half of what
                is available, to the machine and within these limits. What homes leave of it
                is used to read ahead from files.
            nvme: A folder on a fast disk, or several to stripe over; None for two tiers only.
            nvme_bytes: Most bytes on disk; by default what is needed.
            policy: The home tier of each role: a :class:`tiermem.Policy`, a mapping of roles, or
                one tier for all roles.
            prefetch_depth: How many blocks ahead fetches may begin, or ``"auto"``.
            activation_min: With ``Policy(activations="dram")`` or ``"nvme"``: the least size of a
                tensor saved for backward that leaves HBM. One for which there is no room in its
                tier stays in HBM, and ``stats().activations.kept`` counts it.
            activation_layers: Only the first so many layers' tensors leave HBM; None for all.
            activation_ahead: Bytes of them brought up ahead in backward, and held on their way
                down in forward; ``"auto"`` for what two blocks save.

        Raises:
            ConfigError: If a setting cannot be used.
            CapacityError: If memory or disk space is not there.
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
            # at the end of the interpreter; weakly: the blocks lead back here while models live
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
            blocks: What moves as one: ``"auto"``; names of modules at which a block begins; or a
                predicate of name and module. With ``"auto"``, blocks suit training if the model is
                in training mode, or gets an optimizer for most of it before its first call (which
                wraps it anew). Otherwise they suit evaluation.
            homes: Homes of weights that differ from the policy's: a mapping of a module's qualified
                name to the home of all that is in it, say ``{"layers.0": "dram"}``. Where names
                are nested, the innermost counts.
            resident: Parameters that stay in HBM with their gradients, masters and state, whatever
                the policy and ``homes`` say: a predicate of qualified name and parameter, or None
                for none. ``"auto"``: adapters that :func:`tiermem.add_adapters` put in. If there
                are none: what is trained, if it is little: at most an eighth of the bytes of what
                is frozen and, with gradients and the state of Adam, an eighth of HBM.
                With ``blocks="auto"`` also blocks that are too small to be worth moving.

        Returns:
            The same module.

        Raises:
            ConfigError: If ``blocks`` or ``homes`` names a module that the model does not have.
            WrapError: If it cannot be wrapped, with what to do instead.
            CapacityError: If a budget cannot hold it. Whatever is raised, the model is as it was.
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
        """Wraps a model whose values may come from elsewhere; see :meth:`wrap`.

        Args:
            model: The model.
            blocks: As there.
            homes: As there.
            origins: Values that its tensors do not have.
            resident: As there.
            number: Of the model that it was before, where it is wrapped anew.
            training: Whether it will be trained; by default, whether it is in training mode.
        """
        self._manager.gate.guard()
        check_module(model, id(self._manager))
        if number is None:  # what is wrapped anew was wrapped before it was replicated
            around.refuse_replica(model)
        self._runtime.activations.check()
        follow_optimizers()
        on_device = any(p.is_cuda for p in model.parameters())
        number = self._wraps if number is None else number
        wrapped = WrappedModel(
            model, self._runtime, blocks, number, homes, origins, resident, training=training
        )
        if on_device:
            torch.cuda.empty_cache()  # torch keeps what the model has left for tensors to come
        self._runtime.models.owner = self  # a model keeps the tiers alive
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
            WrapError: If it is not wrapped here, or in use just now.
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
                be outside the tiers, where they stay.
            cls: Any ``torch.optim.Optimizer`` class that updates each parameter from its own
                gradient and state, which trial steps find out. Methods that it has beyond
                torch's, such as ``train()``, are the returned optimizer's, too.
            master_dtype: Gives every floating parameter of another dtype a master of this one,
                say ``torch.float32`` for a bfloat16 model. The class steps the masters, with
                the gradients cast; the weights are the masters, cast. They live where
                ``Policy(master=...)`` says.
            grad_dtype: Gradients are summed up and kept in this dtype, say ``torch.float32``,
                rather than in the parameters', and ``param.grad`` has it. For float16 weights,
                ``GradScaler.unscale_`` needs it (torch unscales no float16 gradients); without
                ``unscale_`` the scale is undone in ``step()``, after the cast to the master.
            overlap: When the step of a block is made.

                ``False``: in ``step()``.

                ``"forward"`` (or True): just before the block's next use, in the next forward,
                where its weights come up anyway. Nobody sees a weight before its step is made,
                and the step uses the settings that held when ``step()`` was called.

                ``"backward"``: in backward, as soon as the block's gradient is final. The gradient
                never leaves HBM (what the host steps is begun there); ``step()`` makes what is
                left. It is for loops that look at no gradient: clipping, loss scaling, and
                settings changed between backward and ``step()`` are refused, at the first step,
                which is made after backward. With several backwards per step, call
                ``optimizer.accumulate(n)``.

                ``"auto"``: in backward, to be confirmed by ``step()``, where DRAM has room to keep
                the former bytes of a block as well. Else as ``"forward"``, for every block where
                no program can tell, which is found out at each step; the others are stepped in
                ``step()``. Bits, the budgets that suffice and what a program can look at are
                those of ``False``. An error of a disk may be raised by the next forward, which
                can be called again.
            where: Where steps are made.

                ``"device"``: state and masters come up for the step.

                ``"host"``: in DRAM, for blocks whose weights, gradients, state and masters are
                all at home in DRAM or in files (which pass through staging in the DRAM budget); the
                others on the device. Steps on the host have the device's bits where that is
                proved. Else torch's CPU kernels make them, which round differently.

                ``"both"``: as ``"host"`` for a share of the blocks, by measured speed, so that
                both sides finish together.

                ``"auto"``: what is fastest with the resident optimizer's bits. That is the
                device. For a measured share of what is at home in DRAM it is the host, if trial
                steps of this class and these settings have shown the device's bits (Adam, AdamW,
                SGD). ``optimizer.stepped_where`` says what was chosen.
            host_share: With ``where="both"``: the share of the elements that the host steps, 0 to
                1, met as closely as whole blocks allow; by default the one that is measured.
            **settings: The class's own settings.

        Returns:
            The optimizer. Its state and masters take their room until its ``close()``, or until
            the manager is closed.

        Raises:
            ConfigError: If an option has no such value.
            StepError: If the class cannot be stepped block by block, none of the parameters is in
                the tiers, or a dtype does not suit them.
            CapacityError: If a budget cannot hold its state or a step.
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
        except BaseException as error:  # what was reserved has no owner
            for found, count in zip(lists, begun, strict=True):
                del found[count:]
            if OUTSIDE not in error.__dict__:  # it may have come anywhere
                self._manager.cut_short()
                self._manager.gate.guard()
            kinds = (Role.OPTIMIZER, Role.MASTER)
            new = [r.block for r in self._manager.parts.table if r.block.id not in known]
            self._manager.remove_blocks([block for block in new if block.role in kinds])
            raise

    def _wrap_to_train(self, params: Iterable[torch.Tensor]) -> None:
        """Wraps a model anew that was wrapped to be evaluated, and has not been called yet.

        As it is trained, other blocks are better. Where host memory has no room for it meanwhile,
        or a budget none for it as such, it stays as it is.

        Args:
            params: What an optimizer is to step.
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
            if wrapped.leaving and not wrapped.given_back:  # cut short: it goes on
                self._manager.cut_short()
                self._manager.gate.guard()
                give_back(wrapped, None)
            if wrapped.given_back and self._wrapped.get(id(model), wrapped) is wrapped:
                self._wrapped.pop(id(model), None)
                again()

    def materialize(
        self, target: Target, device: str | torch.device | None = None
    ) -> AbstractContextManager[None]:
        """Makes parameters and gradients ordinary tensors inside ``with``; takes changes back.

        Args:
            target: A module, a parameter, or several.
            device: Where the tensors are; host memory by default.

        Raises:
            ConfigError: If there is no such device, or the target is none of these.
        """
        return materialize(self._runtime, target, None if device is None else device_of(device))

    # -- checkpoints -----------------------------------------------------

    @entrance
    def save(self, path: PathLike, extra: Any = None, wait: bool = True) -> SaveHandle | None:
        """Writes the whole state of the run, so that a crash at any instant leaves a checkpoint.

        Parameters, buffers and gradients of the wrapped models; masters, state and settings of the
        optimizers that are open (steps that they owe are made first); the random generators of
        torch, of the device, of Python and of numpy; and ``extra``. ``path`` becomes a folder: with
        ``model.safetensors`` (or several, and an index), whose names are those of
        ``model.state_dict()``, the configuration of a model of transformers',
        ``optimizer.safetensors`` and ``tiermem.json``. Several wrapped models have folders
        ``model-0``, ``model-1``, ... in it.

        At any instant ``path`` is the former checkpoint, or the new one, whole and on the disk.
        Beyond the budgets it takes the memory of one block, and of some buffers of 8 MiB.

        Args:
            path: A name that is free, an empty folder, or a checkpoint, which is replaced; the
                folder that it lies in has to exist. Files of your own in it (``config.json``, a
                tokenizer, notes) stay; a folder that has only such files may become a checkpoint.
            extra: Numbers, text, None and tensors, in lists, tuples and dictionaries: what else a
                run needs, such as ``scheduler.state_dict()``.
            wait: Whether to return only when the checkpoint is complete. With False, the present
                state is saved while training goes on: blocks are copied to DRAM that the budget has
                free before they are stepped; if there is none, the step waits until its block is
                written. The next save, load or close waits for this save.

        Returns:
            With ``wait=False``, a handle: ``done()`` says whether it is over, ``result()`` waits
            and raises what went wrong; an error not raised there is raised by the next save, load
            or close.

        Raises:
            CheckpointError: If ``extra`` or a tensor cannot be saved, or ``path`` is something
                else; nothing is written.
            CapacityError: If the file system has no room; the former checkpoint stays.
            StepError: If an optimizer's step is unfinished.
            StorageError: If a file cannot be written, or a block not be read; the former
                checkpoint stays.
        """
        self._manager.gate.guard()
        self._end_saving()
        plan = make_plan(self._runtime, path, extra)
        if wait:
            save_now(self._runtime, plan)
            return None
        self._saving = saving = SaveHandle(self._runtime, plan)
        saving.begin(plan)  # entered before: the next save waits for it, wherever this is cut short
        return saving

    def _end_saving(self) -> None:
        """Waits for a save under way; raises an error of it that was not raised before."""
        if self._saving is not None:
            self._saving.settle()
            self._saving = None  # not before: Ctrl-C leaves it under way

    @entrance
    def load(self, path: PathLike) -> Any:
        """Goes on from a checkpoint that :meth:`save` wrote, bit for bit.

        Wrap the same models and make the same optimizers before, in the same order. Budgets,
        policies, ``blocks``, ``overlap`` and ``where`` may be different. All that can be
        known from names, shapes and settings is checked first. Tensors are compared with their
        checksums as they are read. If one differs, a part has been loaded; the models then refuse
        to compute, and to be saved, until a whole checkpoint is loaded.

        Args:
            path: The checkpoint.

        Returns:
            ``extra`` of the save; its tensors are in host memory.

        Raises:
            CheckpointError: If it is none, or does not fit; nothing is changed.
            IntegrityError: If a file is not what was written.
            StorageError: If a file cannot be read.
            CapacityError: If a budget does not hold state that is in the checkpoint.
        """
        self._manager.gate.guard()
        self._end_saving()
        return load_run(self._runtime, path)

    # -- reports ---------------------------------------------------------

    def stats(self) -> Stats:
        """Returns what moved, which uses were hits and misses, and how long the host waited."""
        stats = self._manager.stats()
        return replace(stats, activations=self._runtime.activations.stats())

    def reset_stats(self) -> None:
        """Sets the counters, the timeline and what was measured to zero; what was learned stays."""
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
        """Gives wrapped models back as ordinary ones in host memory, and gives all room back.

        Parameters, buffers and gradients are as :meth:`unwrap` leaves them; steps that an optimizer
        put off are made first, and blocks that were stepped inside a backward
        (``overlap="backward"``) are given back as stepped, whether or not ``optimizer.step()`` was
        called. The optimizers' state is dropped: take ``optimizer.state_dict()`` before. Leaving
        the ``with`` block calls this.

        Args:
            discard: Whether to drop the models' tensors rather than to give them back; such a model
                can no longer be used.

        An error of a save (``wait=False``) that nobody was told of is raised when all is closed.

        Raises:
            CapacityError: If host memory has no room for the models: nothing is changed, and the
                manager stays open, so that they can be saved.
            StorageError: If blocks cannot be read back: the models that have none of these are
                given back, and the manager stays open for the others.
            StepError: If a step that was put off fails; nothing is changed.
            WrapError: If a model is being called just now; nothing is changed.
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
        # what graphs keep of the tiers, unseen by the garbage collector, must not keep a model
        for wrapped in self._wrapped.values():
            wrapped.bypass.end(for_good=True)
        self._runtime.program.models.clear()
        self._wrapped.clear()
        self._runtime.models.owner = None
        if self._saving is not None and self._saving.done():  # not the parent's, in a forked child
            self._saving.settle()

    def _forget(self, key: int) -> None:
        """Forgets a model that has left."""
        del self._wrapped[key]
        if not self._wrapped:
            self._runtime.models.owner = None

    @property
    def closed(self) -> bool:
        """Whether the manager can no longer be used from here."""
        return self._manager.gate.closed

    def __deepcopy__(self, memo: dict[int, Any]) -> TierManager:
        """Returns the same: a copy of a module that has a reference to it has one as well."""
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
