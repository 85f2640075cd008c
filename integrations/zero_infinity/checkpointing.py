"""``deepspeed.checkpointing``: recomputation, by torch's own."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as recompute

_state: dict[str, Any] = {"configured": False}


def checkpoint(function: Any, *args: Any) -> Any:
    """Calls a function and recomputes it in backward, so that only its inputs are saved.

    With ``activation_checkpointing.cpu_checkpointing`` the inputs leave HBM.
    """
    return recompute(function, *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Notes that it was called; the configuration of the engine says where inputs are kept."""
    if checkpoint_in_cpu:
        warnings.warn(
            "checkpoint_in_cpu=True has no effect here; write activation_checkpointing: "
            "{cpu_checkpointing: true} into the configuration",
            stacklevel=2,
        )
    _state["configured"] = True


class RngTracker:
    """Named random number states; one process needs only torch's own."""

    def fork(self, name: str = "") -> AbstractContextManager[None]:
        """Returns a context in which numbers are drawn as outside it."""
        return nullcontext()

    def add(self, name: str, seed: int) -> None:
        """Does nothing."""

    def reset(self) -> None:
        """Does nothing."""

    def get_states(self) -> dict[str, Any]:
        """Returns no states."""
        return {}

    def set_states(self, states: Any) -> None:
        """Does nothing."""


_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
_CUDA_RNG_STATE_TRACKER = RngTracker()


def get_cuda_rng_tracker() -> RngTracker:
    """Returns the tracker there is."""
    return _CUDA_RNG_STATE_TRACKER


def is_configured() -> bool:
    """Whether :func:`configure` was called."""
    return bool(_state["configured"])


def reset() -> None:
    """Does nothing: nothing is kept between steps."""


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds the devices."""
    torch.cuda.manual_seed_all(seed)
