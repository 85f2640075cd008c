"""The engine: a wrapped model, its optimizer and scheduler, behind the calls of users' loops."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tiermem import StepError, TieredOptimizer, TierManager

from . import checkpoints, comm, precision, utils
from .accumulation import Accumulation
from .batches import Batches
from .counts import Counts
from .explaining import Explanation, explained
from .mapping import Plan
from .queries import Queries
from .reporting import Reporting
from .stepmaker import StepMaker


def _of(part: str, name: str, doc: str) -> Any:
    """Returns a property with DeepSpeed's name for an attribute of a part of the engine."""

    def read(self: DeepSpeedEngine) -> Any:
        return getattr(getattr(self, part), name)

    def write(self: DeepSpeedEngine, value: Any) -> None:
        setattr(getattr(self, part), name, value)

    return property(read, write, doc=doc)


class DeepSpeedEngine(Queries):
    """What ``initialize`` returns first: called like the model, with DeepSpeed's methods.

    Attributes:
        module: The model, wrapped.
        tier: The manager; ``tier.stats()`` and ``tier.residency()`` say what goes on.
        optimizer: The tiered optimizer, or None.
        lr_scheduler: The scheduler, or None.
        device: Where inputs belong.
        local_rank: The local rank of this process.
        optimizer_class: The class that steps the blocks.
        config: The configuration as it was read.
    """

    global_rank, world_size, dp_world_size = 0, 1, 1

    training_dataloader = _of("_batches", "loader", "The loader of ``training_data``, or None.")
    client_optimizer = _of("_maker", "client", "The user's own optimizer, or None.")
    scaler = _of("_maker", "scaler", "The scale of the loss, or None.")
    global_steps = _of("_counts", "steps", "Steps so far, those left out with them.")
    skipped_steps = _of("_counts", "skipped", "Steps that were left out.")
    global_samples = _of("_counts", "samples", "Samples so far.")
    micro_steps = _of("_counts", "calls", "Calls of :meth:`step` so far.")
    monitor = _of("_reporting", "monitor", "What scripts write events to.")
    tput_timer = _of("_reporting", "throughput", "What scripts tell of epochs.")

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        tier: TierManager,
        *,
        collate_fn: Any = None,
    ) -> None:
        """Serves a wrapped model; optimizer, scheduler and loader are set by ``initialize``."""
        super().__init__()
        self.module = model
        self.tier = tier
        self.plan = plan
        self.optimizer = None
        self.lr_scheduler: Any = None
        self.optimizer_class: type[torch.optim.Optimizer] = torch.optim.Optimizer
        self.config = plan.config.raw
        self.device = comm.device_of(plan.device)
        self.local_rank = comm.local_rank()
        self._maker = StepMaker(plan)
        self._accumulation = Accumulation(
            managed=bool(plan.config["managed_gradient_accumulation"])
        )
        self._counts = Counts()
        self._batches = Batches(plan, self.device, collate_fn)
        self._reporting = Reporting(plan, self.device)

    def __getattr__(self, name: str) -> Any:
        """Returns what the model has and the engine has not."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise
            return getattr(module, name)

    # -- the loop --------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Performs all backwards of a step, and the step, for a model that returns its loss.

        Args:
            data_iter: Iterator over micro-batches; by default over the loader of ``training_data``.

        Returns:
            The mean of the losses.
        """
        if data_iter is None:
            data_iter = iter(self._batches.repeated())
        losses = []
        for _ in range(self.gradient_accumulation_steps()):
            loss = self._loss_of(next(data_iter))
            self.backward(loss)
            losses.append(loss.detach())
            self.step()
        return torch.stack(losses).mean()

    @torch.no_grad()
    def eval_batch(self, data_iter: Iterator[Any], *_: Any, **__: Any) -> torch.Tensor:
        """Returns the mean loss over the micro-batches of one step, without gradients."""
        training = self.training
        self.eval()
        try:
            count = range(self.gradient_accumulation_steps())
            return torch.stack([self._loss_of(next(data_iter)) for _ in count]).mean()
        finally:
            self.train(training)

    def _loss_of(self, batch: Any) -> torch.Tensor:
        batch = utils.move_to_device(batch, self.device)
        if isinstance(batch, Mapping):
            found = self(**batch)
        else:
            found = self(*batch) if isinstance(batch, list | tuple) else self(batch)
        loss = getattr(found, "loss", found)
        loss = loss[0] if isinstance(loss, list | tuple) else loss
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise StepError(f"train_batch(): the model has to return its loss, not {_said(loss)}")
        return loss

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        with self._reporting.timed("forward"):
            if self.scaler is not None and self.plan.config["fp16.auto_cast"]:
                inputs = precision.halved(inputs)
            with precision.autocast(self.plan, self.device):
                found = self.module(*inputs, **kwargs)
        if self.optimizer is not None and torch.is_grad_enabled():
            self._watch(found)
        return found

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Performs a backward of the loss, divided by the accumulation and times the loss scale.

        Args:
            loss: One number.
            retain_graph: As torch has it.
            scale_wrt_gas: Whether the loss is divided by ``gradient_accumulation_steps()``.

        Returns:
            The loss, divided.

        Raises:
            StepError: If there is no optimizer, or the loss is not one number with a graph.
        """
        self._refuse_without_optimizer("backward()")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.grad_fn is None:
            raise StepError(
                f"backward() takes a loss of one number that has a graph, not {_said(loss)}"
            )
        steps = self.gradient_accumulation_steps()
        divided = loss / steps if scale_wrt_gas and steps > 1 else loss
        work = self._maker.scaled(divided)
        with self._accumulation.backward(), self._reporting.timed("backward"):
            work.backward(retain_graph=retain_graph)
        self._counts.backwards += 1
        return divided.detach()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss for a ``backward()`` of its own: divided, and times the loss scale."""
        self._refuse_without_optimizer("scale()")
        self._accumulation.scaled = True
        self._counts.backwards += 1
        return self._maker.scaled(loss / self.gradient_accumulation_steps())

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Performs the step if accumulation is complete; otherwise only counts.

        Args:
            lr_kwargs: Arguments for the scheduler.

        Raises:
            StepError: If there is no optimizer, inside ``no_sync``, where the scheduler does not
                take ``lr_kwargs``, or where the loss scale can go no lower.
        """
        optimizer = self._refuse_without_optimizer("step()")
        self._accumulation.begin_step()
        self._counts.applied = False
        boundary = not self._accumulation.managed or self.is_gradient_accumulation_boundary()
        if boundary:
            self._refuse_unknown(lr_kwargs or {})
            with self._reporting.timed("step"):
                self._take_step(optimizer, lr_kwargs or {})
            self._reporting.report(self._counts, lambda: (self.get_lr(), self.get_mom()))
        self._counts.calls += 1

    def _refuse_unknown(self, lr_kwargs: dict[str, Any]) -> None:
        """Refuses a step after which the scheduler could not be called.

        Raises:
            StepError: Naming the scheduler, and what its ``step`` takes.
        """
        if self.lr_scheduler is None:
            return
        try:
            taken = inspect.signature(self.lr_scheduler.step)
        except (TypeError, ValueError):
            return  # its arguments are not known
        try:
            taken.bind(**lr_kwargs)
        except TypeError as error:
            raise StepError(
                f"step(lr_kwargs={lr_kwargs!r}): {type(self.lr_scheduler).__name__}.step{taken}: "
                f"{error}; hand it over as engine.step(lr_kwargs={{...}}); no step was made"
            ) from error

    def _take_step(self, optimizer: TieredOptimizer, lr_kwargs: dict[str, Any]) -> None:
        self._counts.applied = self._maker.make(optimizer)
        if self._counts.applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        made = 0 if self._accumulation.managed else self._counts.backwards  # the loop decides
        self._counts.count_step(self.plan.micro * (made or self.plan.accumulation))

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next :meth:`step` performs a step."""
        return self._accumulation.is_boundary(
            self._counts.calls, self.gradient_accumulation_steps()
        )

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Sets whether :meth:`step` performs a step, until it is set again."""
        self._accumulation.set_boundary(is_boundary)

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context for backwards without gradient exchange, which never happens here."""
        return self._accumulation.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)

    # -- what it made of the configuration -------------------------------

    def explain(self) -> Explanation:
        """Returns what each setting of the configuration became."""
        return explained(self.plan)

    # -- data, saving, the end -------------------------------------------

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """Returns a loader of micro-batches, shuffled as DeepSpeed's for one process."""
        return self._batches.loader_of(
            dataset,
            batch_size,
            shuffle=route == "train",
            pin_memory=pin_memory,
            sampler=data_sampler,
            collate_fn=collate_fn,
            workers=num_local_io_workers or 0,
        )

    def save_checkpoint(
        self,
        save_dir: Any,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes a checkpoint; see :func:`checkpoints.save`."""
        state = client_state or {}
        return checkpoints.save(self, save_dir, tag, state, save_latest, exclude_frozen_parameters)

    def load_checkpoint(self, load_dir: Any, tag: Any = None, **options: Any) -> Any:
        """Reads a checkpoint; see :func:`checkpoints.load`."""
        return checkpoints.load(self, load_dir, tag, **options)

    def save_16bit_model(
        self,
        save_dir: Any,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the weights alone; see :func:`checkpoints.save_weights`."""
        return checkpoints.save_weights(self, save_dir, save_filename, exclude_frozen_parameters)

    def save_fp16_model(self, save_dir: Any, save_filename: str = "pytorch_model.bin") -> bool:
        """An old name of :meth:`save_16bit_model`."""
        return self.save_16bit_model(save_dir, save_filename)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any]:
        """Returns the model's state; libraries that use DeepSpeed call this method."""
        return self.module_state_dict(exclude_frozen_parameters)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Returns the model's state, in host memory."""
        return checkpoints.weights_of(self.module, exclude_frozen_parameters)

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Takes the model's state over."""
        self.module.load_state_dict(state_dict, strict=strict)

    def empty_partition_cache(self) -> None:
        """Does nothing: there is no cache outside the budget."""

    def allreduce_gradients(self, *_: Any, **__: Any) -> None:
        """Does nothing: there is one process."""

    def offload_states(self, *_: Any, **__: Any) -> None:
        """Does nothing: blocks that are not in use leave HBM anyway."""

    reload_states = offload_states

    def compile(self, *_: Any, **__: Any) -> None:
        """Refuses: a wrapped model is compiled block by block, before ``initialize``."""
        raise StepError(
            "engine.compile(): call compile() on the layers of the model before initialize()"
        )

    def destroy(self) -> None:
        """Closes the tiers; the model can no longer be used."""
        self.tier.close()

    # -- inside ----------------------------------------------------------

    def show_scale(self) -> None:
        """Sets the loss scale as attributes of the optimizer, as DeepSpeed does."""
        self._maker.show_scale(self.optimizer)

    def _refuse_without_optimizer(self, what: str) -> TieredOptimizer:
        if self.optimizer is None:
            raise StepError(
                f"{what}: there is no optimizer; give initialize() one, or name one in the file"
            )
        return self.optimizer

    def _watch(self, found: Any) -> None:
        """Refuses a backward that does not go through the engine and would lack a factor."""
        if self.scaler is None and self.gradient_accumulation_steps() == 1:
            return
        self._accumulation.watch(found)


def _said(loss: Any) -> str:
    if isinstance(loss, torch.Tensor):
        return f"a tensor of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
    return f"a {type(loss).__name__}"
