"""Reading files of ``torch.save`` without running what is in them."""

from __future__ import annotations

import argparse
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tiermem import CheckpointError


def _named(module: str, name: str, base: type = object) -> Any:
    """Returns a class that stands for one of DeepSpeed's: what was kept is its attributes."""
    return type(name, (base,), {"__module__": module, "__qualname__": name})


def _also(function: Callable[..., Any], module: str) -> Any:
    """Returns a function under the module it was in before."""

    def call(*args: Any) -> Any:
        return function(*args)

    call.__module__, call.__qualname__ = module, function.__name__
    return call


_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
_OF_NUMPY: list[Any] = [np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0]]
_KINDS = ["bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "S", "U"]
ALLOWED: list[Any] = [
    _named("deepspeed.runtime.zero.config", "ZeroStageEnum", int),
    *(_named(_SCALERS, name) for name in ("LossScalerBase", "LossScaler", "DynamicLossScaler")),
    _named("deepspeed.utils.tensor_fragment", "fragment_address"),
    _named("deepspeed.runtime.bf16_optimizer", "fragment_address"),
    _named("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"),
    argparse.Namespace,
    np.ndarray,
    np.dtype,
    *{type(np.dtype(kind)) for kind in _KINDS},
    *(
        _also(function, f"numpy.{core}.multiarray")
        for function in _OF_NUMPY
        for core in ("core", "_core")
    ),
]
"""Classes and functions that files may name besides torch's own; they only hold data."""


def load(path: Path) -> Any:
    """Returns what ``torch.save`` wrote, tensors in host memory, mapped from the file.

    Raises:
        CheckpointError: If it cannot be read, or names a class that is not allowed.
    """
    with torch.serialization.safe_globals(ALLOWED):
        try:
            mapped = zipfile.is_zipfile(path)
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except pickle.UnpicklingError as error:
            names = _refused(path)
            if not names:
                raise CheckpointError(f"{path} is no file of torch.save: {error}") from error
            raise CheckpointError(
                f"{path} holds {', '.join(names)}: a checkpoint is read without running code, and "
                "such objects are not known to be plain data. Where you trust it, allow them with "
                "torch.serialization.add_safe_globals([...]) before load_checkpoint"
            ) from error
        except (OSError, RuntimeError, EOFError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error


def _refused(path: Path) -> list[str]:
    """Returns the names in a file that are not allowed."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # it is broken, or of a format without a list of them
        return []
