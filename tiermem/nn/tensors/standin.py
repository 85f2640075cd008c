"""Base of stand-ins: tensors whose bytes are fetched when a torch operation uses them.

There are two kinds: a managed parameter while its block is not held
(:mod:`tiermem.nn.groups.away`), and a gradient or a tensor of optimizer state in the
tiers (:mod:`tiermem.nn.tensors.lazy`). Every torch operation on one is passed to
:func:`dispatch`, which runs it on the real tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed

from tiermem.errors import REFUSALS, CapacityError
from tiermem.nn.compat.collectives import collectives, tell
from tiermem.nn.compat.compiler import leave_to_interpreter
from tiermem.runtime.placement.no_room import MANY

_GETTERS = [
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "requires_grad",
    "grad_fn",
    "grad",
    "name",
    "is_leaf",
    "is_sparse",
    "is_sparse_csr",
    "is_cuda",
    "is_cpu",
    "is_mps",
    "is_xpu",
    "is_mkldnn",
    "is_nested",
    "is_quantized",
    "is_meta",
    "itemsize",
    "nbytes",
    "_version",
    "retains_grad",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
]
_SETTERS = ("grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_METHODS = [
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "element_size",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "is_inference",
    "get_device",
    "__len__",
    "__hash__",
    "register_hook",
    "register_post_accumulate_grad_hook",
]
_FUNCTIONS = ("is_floating_point", "is_complex", "is_inference", "numel")


def _metadata() -> set[Any]:
    """Returns the operations that need no bytes, as passed to ``__torch_function__``."""
    kind: Any = torch.Tensor
    found = {getattr(kind, name).__get__ for name in _GETTERS if hasattr(kind, name)}
    found |= {getattr(kind, name).__set__ for name in _SETTERS if hasattr(kind, name)}
    found |= {getattr(kind, name) for name in _METHODS if hasattr(kind, name)}
    found |= {getattr(torch, name) for name in _FUNCTIONS if hasattr(torch, name)}
    return found | {kind.grad.__delete__}


_METADATA = _metadata()
_PASSES = {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}
_LISTS = ("_foreach_", "_amp_foreach_")
_C10D = sys.modules.get("torch.distributed.distributed_c10d")  # not every build of torch has it
_COLLECTIVES = collectives(_C10D)
"""Collectives. They write, some of them later, and torch does not count these writes."""


class Opened:
    """A real tensor in use by one operation."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def close(self, func: Callable[..., Any]) -> None:
        """Ends the use; ``func`` is the operation."""

    def given(self, result: Any) -> Any:
        """Returns what the program gets for the result of the operation."""
        return result


class StandIn:
    """Base of both kinds of stand-ins; comes before a tensor class among the bases."""

    __slots__ = ()

    _has_functions = False  # whether the class of the real tensor handles torch functions itself

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        leave_to_interpreter(cls)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs ``func`` on the real tensors."""
        if func in _PASSES:
            return _pass(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                return func(*args, **kwargs or {})
            return dispatch(func, args, kwargs or {})

    def _answer(self, func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[bool, Any]:
        """Returns whether an operation on ``self`` was answered without a run, and its result."""
        return False, None

    def _open(self) -> Opened:
        raise NotImplementedError

    def _written(self) -> None:
        """Processes what was written through ``detach()``; nothing refers to that any more."""

    def _cut_short(self) -> None:
        """Notes that an exception occurred between lines that use the tensor for an operation."""

    def _in_a_pass(self) -> Any:
        """Returns what replaces the tensor among the arguments of a backward pass."""
        raise NotImplementedError


def _pass(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs a backward pass, whose arguments name parameters but do not use their bytes."""

    def known(value: Any) -> Any:
        if isinstance(value, StandIn):
            with torch._C.DisableTorchFunctionSubclass():
                return value._in_a_pass()
        if type(value) in (list, tuple):
            return type(value)(known(item) for item in value)
        return value

    return func(*known(args), **{key: known(value) for key, value in kwargs.items()})


def writes(func: Callable[..., Any]) -> bool:
    """Whether an operation is in-place by its name or schema; not all are counted."""
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.is_mutable
    if isinstance(func, torch._ops.OpOverloadPacket):
        return any(getattr(func, name)._schema.is_mutable for name in func.overloads())
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def dispatch(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs an operation some of whose arguments are stand-ins."""
    if func in _COLLECTIVES:
        return _exchange(func, args, kwargs)
    if args and isinstance(args[0], StandIn):
        cut_short = args[0]._cut_short
        try:
            answered, result = args[0]._answer(func, args, kwargs)
        except (*REFUSALS, RuntimeError):
            raise
        except BaseException:
            cut_short()
            raise
        if answered:
            return result
    name = getattr(func, "__name__", "")
    if name.startswith(_LISTS) and args and isinstance(args[0], list | tuple):
        return _one_by_one(func, args, kwargs)
    return _run(func, args, kwargs)


def _run(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    opened: dict[int, tuple[StandIn, Opened]] = {}
    cuts: list[Callable[[], None]] = []  # a tensor that is opened has its own class
    theirs = ended = functions = False

    def real(value: Any) -> Any:
        nonlocal functions
        if isinstance(value, StandIn):
            if id(value) not in opened:
                functions |= value._has_functions
                cuts.append(value._cut_short)
                opened[id(value)] = (value, value._open())
            return opened[id(value)][1].tensor
        if isinstance(value, list | tuple):
            items = [real(item) for item in value]
            return type(value)(items) if type(value) in (list, tuple) else items
        if isinstance(value, dict):
            return {key: real(item) for key, item in value.items()}
        return value

    try:
        try:
            given, named = real(args), real(kwargs)
            theirs = True
            if functions:
                with torch._C._EnableTorchFunction():
                    result = func(*given, **named)
            else:
                result = func(*given, **named)
            theirs = False
        except CapacityError as error:
            if len(opened) < 2 or str(error).endswith(MANY):
                raise
            raise CapacityError(f"{error}{MANY}") from error
        finally:
            _close([use for _, use in opened.values()], func)
            ended = True
    except REFUSALS:
        raise
    except BaseException:
        if not (theirs and ended):  # Ctrl-C: what was just opened may not be recorded
            for cut_short in cuts:
                cut_short()
        raise
    for value, use in opened.values():
        if use.tensor is result:
            return value  # an in-place operation returns the tensor on which it was called
        result = use.given(result)
    return result


def _exchange(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs a collective on the results of ``detach()``, which are tracked while in use."""
    given: list[StandIn] = []

    def detached(value: Any) -> Any:
        if isinstance(value, StandIn):
            given.append(value)
            return dispatch(torch.Tensor.detach, (value,), {})
        if type(value) in (list, tuple):
            return type(value)(detached(item) for item in value)
        return value

    result = func(*detached(args), **{key: detached(value) for key, value in kwargs.items()})
    if result is None:  # otherwise it may continue: a later use processes what was written
        for value in given:
            value._written()
    return result


def _close(uses: list[Opened], func: Callable[..., Any]) -> None:
    """Ends uses, the last first; all are ended, even if the end of one raises."""
    while uses:
        try:
            uses.pop().close(func)
        except BaseException:
            _close(uses, func)
            raise


def _one_by_one(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs an operation on lists of tensors one by one, so only one is in HBM at a time."""
    first = args[0]
    length = len(first)

    def pick(value: Any, index: int) -> Any:
        if isinstance(value, list | tuple) and len(value) == length:
            return type(value)([value[index]])
        return value

    results: list[Any] = []
    for index in range(length):
        one = _run(
            func,
            tuple(pick(arg, index) for arg in args),
            {key: pick(arg, index) for key, arg in kwargs.items()},
        )
        if one is not None:
            results.extend(one)
    return type(first)(results) if results else None


tell(_C10D, torch.distributed, lambda value: isinstance(value, StandIn), _exchange)
_COLLECTIVES |= collectives(_C10D)  # torch's own functions name their replacements
