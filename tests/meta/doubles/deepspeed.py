"""Stands in for DeepSpeed: its public calls, strict about settings, plain torch inside.

With ``FAKE_DEEPSPEED=fails`` handing a model over fails as it does where its host Adam cannot be
compiled. What was done is written to the file ``FAKE_DEEPSPEED_LOG`` when an engine ends.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_TOP = {
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "bf16",
    "optimizer",
    "zero_optimization",
    "aio",
    "steps_per_print",
}
_ZERO = {"stage", "offload_param", "offload_optimizer"}
_PARAM = {"device", "pin_memory", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu"}
_OPTIMIZER = {"device", "pin_memory", "nvme_path", "buffer_count", "ratio"}
_AIO = {"block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events"}


def init_distributed(dist_backend: str, *, auto_mpi_discovery: bool, verbose: bool) -> None:
    """Makes the group that the environment describes."""
    assert os.environ["LOCAL_RANK"] == "0" and os.environ["WORLD_SIZE"] == "1"
    dist.init_process_group(dist_backend)


def initialize(
    model: Any, model_parameters: list[Any] | None, config: dict[str, Any]
) -> tuple[Any, ...]:
    """Returns engine, optimizer, loader and scheduler."""
    assert dist.is_initialized() and dist.get_world_size() == 1
    if os.environ.get("FAKE_DEEPSPEED") == "fails":
        raise RuntimeError("Error building extension 'cpu_adam'")
    _check(config)
    engine = _Engine(model, model_parameters, config)
    return engine, engine.optimizer, None, None


def _check(config: dict[str, Any]) -> None:
    zero = config["zero_optimization"]
    known = [(config, _TOP), (zero, _ZERO), (zero["offload_param"], _PARAM)]
    known += [(zero.get("offload_optimizer", {}), _OPTIMIZER), (config.get("aio", {}), _AIO)]
    for given, names in known:
        assert set(given) <= names, set(given) - names
    assert zero["stage"] == 3


class _Engine:
    def __init__(self, model: Any, params: list[Any] | None, config: dict[str, Any]) -> None:
        self.module, self.config = model, config
        self.micro = config.get("gradient_accumulation_steps", 1)
        self.backwards = self.counted = self.steps = 0
        self.optimizer = None
        if "optimizer" in config:
            assert params and config["optimizer"]["type"] == "AdamW"
            self.optimizer = torch.optim.AdamW(params, **config["optimizer"]["params"])

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def backward(self, loss: torch.Tensor) -> None:
        assert self.backwards == self.counted, "step() is called after each backward"
        (loss / self.micro).backward()
        self.backwards += 1

    def step(self) -> None:
        self.counted += 1
        assert self.counted == self.backwards
        if self.counted % self.micro == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1

    def destroy(self) -> None:
        log = os.environ.get("FAKE_DEEPSPEED_LOG")
        if log:
            found = {"backwards": self.backwards, "steps": self.steps, "config": self.config}
            Path(log).write_text(json.dumps(found))
