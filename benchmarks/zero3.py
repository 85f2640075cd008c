"""DeepSpeed's ZeRO-3 on one GPU: parameters, and with training optimizer state, on the host.

Where it is not installed, importing it fails with the package's name, which the tables show.
Settings are those of its documentation (https://www.deepspeed.ai/docs/config-json/).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from single_rank import one_rank
from torch import Tensor
from training import LR, Trainer

_NEVER = 10**9
AIO = {"block_size": 4 << 20, "queue_depth": 32, "intra_op_parallelism": 4}
"""Its fastest on the reference machine. It ignores keys that it does not know."""


@contextmanager
def engine_of(
    device: torch.device, build: Callable[[], Any], settings: Callable[[Any], dict[str, Any]]
) -> Iterator[Any]:
    """Starts DeepSpeed with one rank and hands a model over to it.

    Args:
        device: Where the model computes.
        build: Returns a module on the device or the host; not called without DeepSpeed.
        settings: Returns what its JSON file would say of the module.

    Yields:
        The engine. What it sets in the environment and the process group end with it.

    Raises:
        ImportError: If it is not installed.
    """
    import deepspeed

    with one_rank():
        deepspeed.init_distributed(
            dist_backend="nccl" if device.type == "cuda" else "gloo",
            auto_mpi_discovery=False,
            verbose=False,
        )
        model = build()
        trained = [p for p in model.parameters() if p.requires_grad]
        engine = deepspeed.initialize(
            model=model, model_parameters=trained or None, config=settings(model)
        )[0]
        try:
            yield engine
        finally:
            end = getattr(engine, "destroy", None)  # older releases have none
            if end is not None:
                end()


def inference_settings(model: Any, nvme: str | None) -> dict[str, Any]:
    """Returns the settings of ZeRO-3 without an optimizer, which DeepSpeed calls ZeRO-Inference.

    Args:
        model: Its largest parameter has to fit into a buffer of NVMe reads.
        nvme: Folder of the weights; None for page-locked host memory.
    """
    below: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    if nvme is not None:
        largest = max(p.numel() for p in model.parameters())
        below |= {"device": "nvme", "nvme_path": os.path.abspath(nvme), "buffer_size": largest}
    found = _common() | {"zero_optimization": {"stage": 3, "offload_param": below}}
    return found if nvme is None else found | {"aio": AIO}


def training_settings(micro: int) -> dict[str, Any]:
    """Returns the settings of full training: bf16 work weights, fp32 masters and states.

    Args:
        micro: Micro-batches of a step.
    """
    below = {"device": "cpu", "pin_memory": True}
    params = {"lr": LR, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
    return _common() | {
        "gradient_accumulation_steps": micro,
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": {"stage": 3, "offload_param": below, "offload_optimizer": {**below}},
    }


def _common() -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "steps_per_print": _NEVER,
    }


class Call:
    """What is called for the loss.

    Args:
        engine: Of DeepSpeed.
    """

    def __init__(self, engine: Any) -> None:
        self.head = engine.module.head
        self._engine = engine

    def __call__(self, ids: Tensor) -> Tensor:
        """Returns the loss."""
        loss: Tensor = self._engine(ids)
        return loss


class ZeRO3(Trainer):
    """An engine's training steps.

    Args:
        engine: Of DeepSpeed.
        micro: How many micro-batches it was told are a step.
    """

    def __init__(self, engine: Any, micro: int) -> None:
        super().__init__(Call(engine))
        self._engine = engine
        self._micro = micro
        self._uncounted = False

    def backward(self, loss: Tensor) -> None:
        """Makes one backward. The engine divides by the micro-batches itself, and counts them."""
        self._count()
        self._engine.backward(loss * self._micro)
        self._uncounted = True

    def step(self) -> None:
        """Makes the step, which the engine does after the last micro-batch."""
        self._count()

    def _count(self) -> None:
        if self._uncounted:
            self._uncounted = False
            self._engine.step()


@contextmanager
def zero3_training(build: Callable[[], Any], device: torch.device, micro: int) -> Iterator[ZeRO3]:
    """DeepSpeed ZeRO-3, parameters and optimizer state on the host; its own Adam there."""
    with engine_of(device, build, lambda _: training_settings(micro)) as engine:
        yield ZeRO3(engine, micro)


@contextmanager
def zero3_forward(model: Any, device: torch.device, nvme: str | None) -> Iterator[None]:
    """DeepSpeed ZeRO-3 without an optimizer; the head stays in HBM.

    The body is what is handed over, as it is what is called: its hooks count passes.

    Args:
        model: Whose ``model`` is the body.
        device: Where it computes.
        nvme: Folder of the weights; None for page-locked host memory.
    """
    with engine_of(device, lambda: model.model, lambda body: inference_settings(body, nvme)):
        yield None
