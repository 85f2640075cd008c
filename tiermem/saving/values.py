"""Plain values as JSON, tensors separately: what a checkpoint has beside blocks; no pickle.

A value that JSON cannot represent is an object with one key that begins with ``$``: ``$tensor``
(the name of a tensor in the files), ``$tuple``, ``$float`` (``nan``, ``inf``, ``-inf``) and
``$dict`` (pairs, where keys are not all text, or begin with ``$``).
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tiermem.errors import CheckpointError

Put = Callable[[str, torch.Tensor], str]
Get = Callable[[str], torch.Tensor]

_DICTS = (dict, OrderedDict, defaultdict, Counter)
_TENSORS = (torch.Tensor, nn.Parameter)
_DEEPEST = 100
_MOST_BITS = 14_284  # of an int of 4300 digits, the most that Python reads if not told otherwise


def encode(value: Any, path: str, put: Put, depth: int = 0) -> Any:
    """Returns the JSON representation of a value.

    Dictionaries of the standard library's other classes are restored as plain ones.

    Args:
        value: Numbers, text, None, tensors, in lists, tuples and dictionaries.
        path: Path of the value, for messages and names.
        put: Called with a path and a tensor, keeps it; returns its name in the files.
        depth: How deep it is nested in containers.

    Raises:
        CheckpointError: With the path of a value of another kind.
    """
    kind = type(value)
    if depth > _DEEPEST:
        raise CheckpointError(f"{path}: more than {_DEEPEST} containers inside each other")
    if kind is int and value.bit_length() > _MOST_BITS:
        raise CheckpointError(
            f"{path} is a number of {value.bit_length()} bits; a checkpoint keeps those of at most "
            f"{_MOST_BITS}: give it as text, such as hex(x)"
        )
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind in _TENSORS:
        return {"$tensor": put(path, value)}
    if kind in (list, tuple):
        items = [encode(v, f"{path}[{i}]", put, depth + 1) for i, v in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if kind in _DICTS:
        return _encode_dict(value, path, put, depth + 1)
    raise CheckpointError(
        f"{path} is of the class {kind.__module__}.{kind.__qualname__}: a checkpoint keeps "
        "numbers, text, None and plain tensors, in lists, tuples and dictionaries; give what the "
        "object is made of (its state_dict(), float(x), torch.from_numpy(x))"
    )


def _encode_dict(value: dict[Any, Any], path: str, put: Put, depth: int) -> Any:
    # the keys first: a key that cannot be saved may have no text for the paths below it
    keys = [encode(key, f"a key of {path}", _no_tensor, depth) for key in value]
    items = [encode(item, f"{path}[{key!r}]", put, depth) for key, item in value.items()]
    pairs = zip(keys, items, strict=True)
    if all(type(key) is str and not key.startswith("$") for key in value):
        return dict(pairs)
    return {"$dict": [[*pair] for pair in pairs]}


def _no_tensor(path: str, _: torch.Tensor) -> str:
    raise CheckpointError(f"{path} is a tensor; keys are numbers, text or tuples of them")


def decode(value: Any, get: Get) -> Any:
    """Returns the value represented by JSON.

    Args:
        value: The result of :func:`encode`.
        get: Returns the tensor with a given name in the files.

    Raises:
        CheckpointError: If it is not a result of :func:`encode`.
    """
    if isinstance(value, list):
        return [decode(item, get) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, inner),) = value.items()
        if key.startswith("$"):
            return _decode_tagged(key, inner, get)
    return {key: decode(item, get) for key, item in value.items()}


def _decode_tagged(tag: str, inner: Any, get: Get) -> Any:
    if tag == "$tensor":
        return get(inner)
    if tag == "$tuple":
        return tuple(decode(item, get) for item in inner)
    if tag == "$float":
        return float(inner)
    if tag == "$dict":
        return {decode(key, get): decode(item, get) for key, item in inner}
    raise CheckpointError(f"a value is marked {tag!r}, which this version does not know")
