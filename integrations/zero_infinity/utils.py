"""``deepspeed.utils`` and ``deepspeed.runtime.utils``: what scripts use around the engine."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from . import zero

logger = logging.getLogger("tiermem.integrations.zero_infinity")


def log_dist(
    message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO, *_: Any
) -> None:
    """Logs a message where this process, of rank 0, is among ``ranks``; None and -1 are all."""
    if ranks is None or {0, -1} & set(ranks):
        logger.log(level, "[Rank 0] %s", message)


def see_memory_usage(message: str, force: bool = False, *_: Any) -> None:
    """Logs the device memory that torch has, and the host memory in use."""
    if not force:
        return
    import psutil

    host = psutil.virtual_memory()
    parts = [f"host memory: {host.used / 1e9:.2f} GB used, {host.percent}%"]
    if torch.cuda.is_available():
        now, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        parts.insert(0, f"device memory: {now / 1e9:.2f} GB, at most {most / 1e9:.2f} GB")
    logger.info("%s | %s", message, " | ".join(parts))


def set_random_seed(seed: int) -> None:
    """Seeds Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def move_to_device(item: Any, device: Any, *_: Any, **__: Any) -> Any:
    """Returns lists, tuples and mappings of tensors on a device."""
    if isinstance(item, torch.Tensor):
        return item.to(device)
    if isinstance(item, Mapping):
        return {key: move_to_device(value, device) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return type(item)(move_to_device(value, device) for value in item)
    return item


def instrument_w_nvtx(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function: ranges for profilers are ``tier.timeline``'s."""
    return function


class RepeatingLoader:
    """Begins a loader anew where it ends.

    Args:
        loader: A loader of batches.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class OnDevice:
    """Makes modules of a dtype, on a device; on ``"meta"`` without values.

    Args:
        dtype: The dtype of the modules.
        device: Their device.
        enabled: False to do nothing.
    """

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> None:
        self._init = zero.Init(dtype=dtype, enabled=enabled)
        self._device = torch.device(device) if enabled else None

    def __enter__(self) -> None:
        self._init.__enter__()
        if self._device is not None:
            self._device.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._device is not None:
            self._device.__exit__(*error)
        self._init.__exit__(*error)


# -- whole weights, gradients and state of one parameter ----------------------


def _kept(param: torch.Tensor, key: str) -> Any:
    """Returns a value that the optimizer keeps of a parameter; None for none."""
    optimizer = zero.optimizers.get(param)
    if optimizer is None:
        return None
    order = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if id(param) not in order:
        return None
    number, state = order.index(id(param)), optimizer.state_dict()
    if key == "master":
        return state.get("master", {}).get(number)
    return state["state"].get(number, {}).get(key)


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """Returns the float32 master of a parameter in host memory; where it has none, its value.

    It takes time: the state of the whole optimizer is read.
    """
    with zero.GatheredParameters(param):
        value = param.detach().float().clone()
    master: torch.Tensor | None = _kept(param, "master")
    return value if master is None else master


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Returns the gradient of a parameter in host memory, in float32; None for none."""
    gradient = param.grad  # not gathered: that would round it to the dtype of the weight
    return None if gradient is None else gradient.detach().to("cpu", torch.float32, copy=True)


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> Any:
    """Returns a value of the optimizer's state of a parameter, say ``exp_avg``; None for none."""
    return _kept(param, optim_state_key)


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Gives a parameter a value; its master follows."""
    with zero.GatheredParameters(param), torch.no_grad():
        param.copy_(value.view(param.shape))
