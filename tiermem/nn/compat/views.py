"""Which of torch's functions return a view of a tensor that shares its version counter.

Writes through such a view are counted, also in inference mode; writes through ``data``, and through
what ``torch.ops`` returns there, are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_METHODS = (
    "__getitem__", "adjoint", "chunk", "diagonal", "expand", "expand_as", "flatten", "movedim",
    "moveaxis", "narrow", "permute", "ravel", "reshape", "reshape_as", "select", "split",
    "split_with_sizes", "squeeze", "swapaxes", "swapdims", "t", "tensor_split", "transpose",
    "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as",
)  # fmt: skip
_PROPERTIES = ("T", "H", "mT", "mH")

VIEWS: frozenset[Callable[..., Any]] = frozenset(
    [
        *(
            getattr(of, name)
            for of in (torch, torch.Tensor)
            for name in _METHODS
            if hasattr(of, name)
        ),
        *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES),
    ]
)
"""In the form in which they are passed to ``__torch_function__``."""
