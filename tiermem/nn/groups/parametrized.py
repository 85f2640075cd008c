"""Parametrizations of parameters in the tiers, refused before torch has written anything.

torch first gives the parameter the values that the parametrization's right inverse returns, and
then removes it from its module. If only that was refused, the weight would have other values
already.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from tiermem.nn.groups.names import HeldDict

_followed: list[str] = []


def follow_parametrizations() -> None:
    """Replaces torch's function that registers a parametrization; may be called twice."""
    if _followed:
        return
    _followed.append(parametrize.__name__)
    register: Any = parametrize.register_parametrization

    @functools.wraps(register)
    def follow(module: nn.Module, tensor_name: str, *args: Any, **kwargs: Any) -> Any:
        if isinstance(module._parameters, HeldDict):
            module._parameters.refuse_outside(tensor_name)
        return register(module, tensor_name, *args, **kwargs)

    parametrize.register_parametrization = follow
