"""The methods of an engine that only return something."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tiermem import ConfigError, TieredOptimizer

from .counts import Counts
from .mapping import Plan
from .scaling import LossScale
from .stepmaker import StepMaker
from .zerooptions import PARAM, STATE, ZERO

_OF_CONFIG = {
    "amp_enabled": "amp.enabled",
    "communication_data_type": "communication_data_type",
    "dataloader_drop_last": "dataloader_drop_last",
    "dump_state": "dump_state",
    "fp16_auto_cast": "fp16.auto_cast",
    "managed_gradient_accumulation": "managed_gradient_accumulation",
    "memory_breakdown": "memory_breakdown",
    "optimizer_name": "optimizer.type",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "sparse_gradients_enabled": "sparse_gradients",
    "steps_per_print": "steps_per_print",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    **{
        f"zero_{name}": f"{ZERO}.{name}"
        for name in (
            "allgather_bucket_size", "allgather_partitions", "contiguous_gradients",
            "elastic_checkpoint", "ignore_unused_parameters", "load_from_fp32_weights",
            "overlap_comm", "reduce_bucket_size", "reduce_scatter", "round_robin_gradients",
            "sub_group_size",
        )
    },
    **{
        f"zero_{name}": f"{ZERO}.stage3_{name}"
        for name in (
            "gather_16bit_weights_on_model_save", "max_live_parameters", "max_reuse_distance",
            "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold",
        )
    },
}  # fmt: skip
"""Methods that return an option's value, by name."""


class Queries(nn.Module):
    """The part of an engine that only answers.

    Attributes:
        plan: What the configuration became.
        optimizer: The tiered optimizer, or None.
        scaler: The loss scale, or None.
    """

    plan: Plan
    optimizer: TieredOptimizer | None
    scaler: LossScale | None
    _counts: Counts
    _maker: StepMaker

    def gradient_accumulation_steps(self) -> int:
        """Returns the number of backwards per step."""
        return self.plan.accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        """Returns the samples per backward."""
        return self.plan.micro

    def train_batch_size(self) -> int:
        """Returns the samples per step."""
        return self.plan.batch

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the samples per step, by changing the number of backwards.

        Raises:
            ConfigError: If it is not a multiple of the samples per backward.
        """
        if train_batch_size % self.plan.micro:
            raise ConfigError(
                f"train_batch_size={train_batch_size}: it must be a multiple of "
                f"train_micro_batch_size_per_gpu={self.plan.micro}"
            )
        accumulation = train_batch_size // self.plan.micro
        if self.optimizer is not None and self.plan.optimizer["overlap"] == "backward":
            self.optimizer.accumulate(accumulation)
        self.plan.batch, self.plan.accumulation = train_batch_size, accumulation

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the samples per backward; the number of backwards per step stays the same."""
        self.plan.micro = micro_batch_size
        self.plan.batch = micro_batch_size * self.plan.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Returns the samples per step and per backward, and the backwards per step."""
        return self.plan.batch, self.plan.micro, self.plan.accumulation

    def get_type(self) -> list[Any]:
        """Returns the ``type`` of each group, which is None unless the caller gave one."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get("type") for group in groups]

    def get_global_grad_norm(self) -> float | None:
        """Returns the norm of the last step's gradients before clipping; None if not taken."""
        norm = self._maker.clipping.norm
        return None if norm is None else float(norm)

    def get_lr(self) -> list[Any]:
        """Returns the learning rate of each group."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """Returns betas, or the momentum, of each group."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    def _of_groups(self, key: str) -> list[Any]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get(key, 0.0) for group in groups]

    def was_step_applied(self) -> bool:
        """Whether the last :meth:`step` changed the weights."""
        return self._counts.applied

    def loss_scale(self) -> float:
        """Returns the loss scale; 1 where there is none."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def gradient_clipping(self) -> float:
        """Returns the norm to which gradients are clipped; 0 for no clipping."""
        return self._maker.clipping.limit

    def zero_optimization_stage(self) -> int:
        """Returns the ZeRO stage of the configuration."""
        return self.plan.stage

    def zero_optimization(self) -> bool:
        """Whether the ZeRO stage is more than 0."""
        return self.plan.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether the ZeRO stage is 2 or more."""
        return self.plan.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether the ZeRO stage is 3."""
        return self.plan.stage >= 3

    def zero_offload_optimizer(self) -> bool:
        """Whether masters and state are offloaded."""
        return bool(self.plan.config[f"{STATE}.device"] != "none")

    zero_cpu_offload = zero_use_cpu_optimizer = zero_offload_optimizer

    def zero_offload_param(self) -> bool:
        """Whether weights are offloaded."""
        return bool(self.plan.config[f"{PARAM}.device"] != "none")

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes."""
        return self.scaler is not None and self.scaler.dynamic

    def fp16_enabled(self) -> bool:
        """Whether weights are float16."""
        return self.plan.dtype is torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether weights are bfloat16."""
        return self.plan.dtype is torch.bfloat16


def _asks(path: str) -> Any:
    """Returns a method that returns an option's value."""

    def query(self: Queries) -> Any:
        return self.plan.config[path]

    query.__doc__ = f"Returns ``{path}`` of the configuration."
    return query


for _name, _path in _OF_CONFIG.items():
    setattr(Queries, _name, _asks(_path))
