"""The states of the random generators that a run uses."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def generator_states(device: torch.device) -> dict[str, Any]:
    """Returns the states of torch's, Python's and numpy's default generators.

    Args:
        device: The device whose generator is included, beside the CPU's.
    """
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": _plain(np.random.get_state(legacy=False)),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore_generators(states: dict[str, Any], device: torch.device) -> None:
    """Sets the generators; one that did not exist at the time of the save is not changed."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(_arrays(states["numpy"]))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _plain(value: Any) -> Any:
    """Returns numpy's dictionary of a state with arrays as lists and numbers as Python's."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.tolist()]
    return value.item() if isinstance(value, np.generic) else value


def _arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _arrays(item) for key, item in value.items()}
    if isinstance(value, list):
        return np.array(value[1], dtype=value[0])
    return value
