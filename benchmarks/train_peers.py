"""Full training steps by peers, with fp32 masters and states and bf16 compute, as tiermem's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from single_rank import process_group
from torch import Tensor, nn
from training import Lm, WithoutStep, adamw
from zero3 import zero3_training


class Plain(WithoutStep):
    """A model and an optimizer that have it all done by themselves.

    Args:
        model: Is called for the loss.
        optimizer: Steps it.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        super().__init__(model)
        self._optimizer = optimizer

    def step(self) -> None:
        """Steps, and forgets the gradients."""
        self._optimizer.step()
        super().step()


class Cast(nn.Module):
    """A model of fp32 weights that computes in bf16.

    Args:
        inner: The model.
    """

    def __init__(self, inner: Lm) -> None:
        super().__init__()
        self.inner = inner
        self.head = inner.head

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the loss."""
        with torch.autocast(ids.device.type, torch.bfloat16):
            return self.inner(ids)


@contextmanager
def fsdp2(build: Callable[[], Lm], device: torch.device, micro: int) -> Iterator[Plain]:
    """torch's FSDP2 with CPUOffloadPolicy, one rank; AdamW on the host."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    with process_group(device):
        settings = {
            "mesh": torch.distributed.device_mesh.init_device_mesh(device.type, (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
        }
        model = build().float().to("cpu")
        for layer in model.model.layers:
            fully_shard(layer, **settings)
        fully_shard(model, **settings)
        yield Plain(model, adamw(list(model.parameters())))


@contextmanager
def torchao(build: Callable[[], Lm], device: torch.device, micro: int) -> Iterator[Plain]:
    """torchao's CPUOffloadOptimizer; weights stay in HBM, in fp32 as its states."""
    from torchao.optim import CPUOffloadOptimizer

    model = build().float()
    optimizer = CPUOffloadOptimizer(
        list(model.parameters()), torch.optim.AdamW, offload_gradients=True, lr=1e-4, fused=True
    )
    yield Plain(Cast(model), optimizer)


PEERS = {
    "FSDP2 CPUOffloadPolicy": fsdp2,
    "torchao CPUOffloadOptimizer": torchao,
    "DeepSpeed ZeRO-3": zero3_training,
}
"""By name: each takes what builds a model, the device and the micro-batches of a step."""
