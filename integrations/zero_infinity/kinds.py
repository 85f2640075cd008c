"""Kinds of values: what a value may be, and how it is read from what people write."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_YES = {"true", "yes", "on", "1"}
_NO = {"false", "no", "off", "0"}
_MOST = 2**63 - 1
_EXPONENT = 1023
_LONGEST = 400


@dataclass(frozen=True)
class Kind:
    """One kind of value.

    Attributes:
        says: What it may be, for messages and tables.
        read: Takes a value and returns it as Python has it; raises ValueError if it cannot.
    """

    says: str
    read: Callable[[Any], Any]


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in _YES | _NO:
        return value.strip().lower() in _YES
    raise ValueError(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(value)
    found = float(value)
    if math.isnan(found):
        raise ValueError(value)
    return found


def _integer(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        whole = value
    else:
        found = _number(value)
        if not math.isfinite(found) or found != int(found):
            raise ValueError(value)
        whole = int(found)
    if abs(whole) > _MOST:  # a loss divided by it would not be a finite number
        raise ValueError(value)
    return whole


def _at_least(read: Callable[[Any], Any], least: float, most: float = math.inf) -> Any:
    def bounded(value: Any) -> Any:
        found = read(value)
        if not least <= found <= most:
            raise ValueError(value)
        return found

    return bounded


def _finite(value: Any) -> float:
    found = _number(value)
    if not math.isfinite(found):
        raise ValueError(value)
    return found


def _interval(value: Any) -> int | None:
    found = _number(value)
    return None if math.isinf(found) or found <= 0 else _integer(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value


def _one_of(*words: str) -> Kind:
    def read(value: Any) -> str:
        if not isinstance(value, str) or value.lower() not in words:
            raise ValueError(value)
        return value.lower()

    return Kind("one of " + ", ".join(map(repr, words)), read)


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(value)
    return value


def _any(value: Any) -> Any:
    return value


def shown(value: Any) -> str:
    """Returns a value as text for a message, shortened if it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python does not format numbers of thousands of digits
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else "this"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}... ({len(text)} characters)"


BOOL = Kind("true or false", _boolean)
INT = Kind("a whole number", _integer)
COUNT = Kind("a whole number, 0 or more", _at_least(_integer, 0))
POSITIVE = Kind("a whole number, 1 or more", _at_least(_integer, 1))
ELEMENTS = Kind("a number of elements, 0 or more", _at_least(_integer, 0))
POWER = Kind("a number from -1022 to 1023", _at_least(_finite, 1.0 - _EXPONENT, _EXPONENT))
AMOUNT = Kind("a finite number, 0 or more", _at_least(_finite, 0.0))
SHARE = Kind("a number from 0 to 1", _at_least(_finite, 0.0, 1.0))
INTERVAL = Kind("a whole number of steps, or 'inf' for never", _interval)
STAGE = Kind("0, 1, 2 or 3", _at_least(_integer, 0, 3))
TEXT = Kind("text", _text)
MAPPING = Kind("an object", _mapping)
DEVICE = _one_of("none", "cpu", "nvme")
DTYPE = _one_of("fp32", "float32", "fp16", "float16", "half", "bf16", "bfloat16")
ANY = Kind("anything", _any)
