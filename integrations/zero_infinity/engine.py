"""The engine: a wrapped model, its optimizer and scheduler, behind the calls of users' loops."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from tiermem import StepError, TieredOptimizer, TierManager

from . import checkpoints, comm, mapping, utils
from .accumulation import Accumulation
from .clipping import Clipping
from .explaining import Explanation, explained
from .mapping import Plan
from .queries import Monitor, Queries, Throughput
from .scaling import LossScale

logger = utils.logger


class DeepSpeedEngine(Queries):
    """What ``initialize`` returns first: called like the model, with DeepSpeed's methods.

    Attributes:
        module: The model, wrapped.
        tier: The manager; ``tier.stats()`` and ``tier.residency()`` say what goes on.
        optimizer: In the tiers, or None.
        lr_scheduler: Or None.
        training_dataloader: Or None.
        device: Where inputs belong.
        local_rank: Of this process.
        optimizer_class: What steps the blocks.
        global_steps: Steps so far, those left out with them.
        skipped_steps: Steps that were left out.
        global_samples: Samples so far.
        micro_steps: Calls of :meth:`step` so far.
    """

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
        self.training_dataloader: Any = None
        self.client_optimizer: torch.optim.Optimizer | None = None
        self.optimizer_class: type[torch.optim.Optimizer] = torch.optim.Optimizer
        self.config = plan.config.raw
        self.device = comm.device_of(plan.device)
        self.local_rank = comm.local_rank()
        self.global_rank, self.world_size, self.dp_world_size = 0, 1, 1
        self.global_steps = self.skipped_steps = self.global_samples = self.micro_steps = 0
        self.scaler = LossScale.of(plan.config)
        self.monitor, self.tput_timer = Monitor(), Throughput()
        self._repeating: utils.RepeatingLoader | None = None
        self._collate_fn = collate_fn
        self._clipping = Clipping(plan)
        self._accumulation = Accumulation(
            managed=bool(plan.config["managed_gradient_accumulation"])
        )
        self._step_applied = False
        self._times: dict[str, float] = {}

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
        """Makes all backwards of a step, and the step, for a model that returns its loss.

        Args:
            data_iter: Of micro-batches; by default of the loader of ``training_data``.

        Returns:
            The mean of the losses.
        """
        if data_iter is None:
            data_iter = iter(self._own_batches())
        losses = []
        for _ in range(self.gradient_accumulation_steps()):
            loss = self._loss_of(next(data_iter))
            self.backward(loss)
            losses.append(loss.detach())
            self.step()
        return torch.stack(losses).mean()

    @torch.no_grad()
    def eval_batch(self, data_iter: Iterator[Any], *_: Any, **__: Any) -> torch.Tensor:
        """Returns the mean loss of as many micro-batches as a step has, without gradients."""
        training = self.training
        self.eval()
        try:
            count = range(self.gradient_accumulation_steps())
            return torch.stack([self._loss_of(next(data_iter)) for _ in count]).mean()
        finally:
            self.train(training)

    def _own_batches(self) -> Any:
        """Returns the loader, begun anew where it ends."""
        if self.training_dataloader is None:
            raise StepError("train_batch() takes an iterator: there is no training_data")
        if self._repeating is None:
            self._repeating = utils.RepeatingLoader(self.training_dataloader)
        return self._repeating

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
        with self._timed("forward"):
            if self.scaler is not None and self.plan.config["fp16.auto_cast"]:
                inputs = _halved(inputs)
            with self._autocast():
                found = self.module(*inputs, **kwargs)
        if self.optimizer is not None and torch.is_grad_enabled():
            self._watch(found)
        return found

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Makes one backward, of the loss divided by the accumulation and times the loss scale.

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
        work = divided if self.scaler is None else divided.float() * self.scaler.scale
        with self._accumulation.backward(), self._timed("backward"):
            work.backward(retain_graph=retain_graph)
        return divided.detach()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss for a ``backward()`` of its own: divided, and times the loss scale."""
        self._refuse_without_optimizer("scale()")
        self._accumulation.scaled = True
        divided = loss / self.gradient_accumulation_steps()
        return divided if self.scaler is None else divided.float() * self.scaler.scale

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Makes the step where accumulation is complete; else counts.

        Args:
            lr_kwargs: For the scheduler.

        Raises:
            StepError: If there is no optimizer, inside ``no_sync``, or where the loss scale can
                go no lower.
        """
        optimizer = self._refuse_without_optimizer("step()")
        self._accumulation.begin_step()
        self._step_applied = False
        boundary = not self._accumulation.managed or self.is_gradient_accumulation_boundary()
        if boundary:
            with self._timed("step"):
                self._take_step(optimizer, lr_kwargs or {})
            self._report()
        self.micro_steps += 1

    def _take_step(self, optimizer: TieredOptimizer, lr_kwargs: dict[str, Any]) -> None:
        scale = 1.0 if self.scaler is None else self.scaler.scale
        overflow = self._clipping.settle(optimizer, scale)
        if not overflow:
            optimizer.step()
            if self.client_optimizer is not None:  # which torch's schedulers look at
                self.client_optimizer._opt_called = True  # type: ignore[attr-defined]
        optimizer.zero_grad()
        optimizer.__dict__["overflow"] = overflow
        if self.scaler is not None:
            self.scaler.update(overflow)
            self.show_scale()
        self._step_applied = not overflow
        if overflow:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        self.global_samples += self.plan.batch

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next :meth:`step` steps."""
        return self._accumulation.is_boundary(self.micro_steps, self.gradient_accumulation_steps())

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Sets whether :meth:`step` steps, until it is set again."""
        self._accumulation.set_boundary(is_boundary)

    def no_sync(self) -> AbstractContextManager[None]:
        """For backwards without an exchange of gradients, of which there is none here."""
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
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            data_sampler = DistributedSampler(dataset, 1, 0, shuffle=route == "train")
        return DataLoader(
            dataset,
            batch_size or self.plan.micro,
            sampler=data_sampler,
            collate_fn=collate_fn or self._collate_fn,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory and self.device.type == "cuda",
            drop_last=self.plan.config["dataloader_drop_last"],
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
        """Returns the model's state; libraries around DeepSpeed call it so."""
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
        """Does nothing: what is not in use leaves HBM by itself."""

    reload_states = offload_states

    def compile(self, *_: Any, **__: Any) -> None:
        """Refuses: a wrapped model is compiled block by block, before ``initialize``."""
        raise StepError(
            "engine.compile(): call compile() on the layers of the model before initialize()"
        )

    def destroy(self) -> None:
        """Gives every tier back; the model can no longer be used."""
        self.tier.close()

    # -- inside ----------------------------------------------------------

    def show_scale(self) -> None:
        """Sets the loss scale as attributes of the optimizer, as DeepSpeed does."""
        if self.optimizer is not None and self.scaler is not None:
            shown = {"loss_scale": self.scaler.scale, "cur_scale": self.scaler.scale}
            self.optimizer.__dict__.update(shown)

    def _refuse_without_optimizer(self, what: str) -> TieredOptimizer:
        if self.optimizer is None:
            raise StepError(
                f"{what}: there is no optimizer; give initialize() one, or name one in the file"
            )
        return self.optimizer

    def _autocast(self) -> AbstractContextManager[Any]:
        config = self.plan.config
        if not config["torch_autocast.enabled"]:
            return nullcontext()
        return torch.autocast(self.device.type, mapping.dtype_of(config, "torch_autocast.dtype"))

    def _watch(self, found: Any) -> None:
        """Refuses a backward past the engine that would miss a factor."""
        if self.scaler is None and self.gradient_accumulation_steps() == 1:
            return
        self._accumulation.watch(found)

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        if not self.plan.config["wall_clock_breakdown"]:
            yield
            return
        self._wait()
        began = time.perf_counter()
        yield
        self._wait()
        self._times[what] = self._times.get(what, 0.0) + time.perf_counter() - began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _report(self) -> None:
        if self._times:
            said = " | ".join(f"{what}: {s * 1e3:.2f}" for what, s in self._times.items())
            logger.info("time (ms) | %s", said)
            self._times = {}
        every = self.plan.config["steps_per_print"]
        if every and self.global_steps % every == 0:
            logger.info(
                "step=%d, skipped=%d, lr=%s, mom=%s",
                self.global_steps,
                self.skipped_steps,
                self.get_lr(),
                self.get_mom(),
            )


def _halved(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.half() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: _halved(item) for key, item in value.items()}
    return type(value)(map(_halved, value)) if isinstance(value, list | tuple) else value


def _said(loss: Any) -> str:
    if isinstance(loss, torch.Tensor):
        return f"a tensor of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
    return f"a {type(loss).__name__}"
