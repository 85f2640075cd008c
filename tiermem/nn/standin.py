"""Tensors whose bytes are elsewhere, and that are there as soon as an operation uses them.

Two kinds share this module: a managed parameter while its block is not held
(:mod:`tiermem.nn.away`), and a gradient or a piece of optimizer state in the
tiers (:mod:`tiermem.nn.lazy`). Every torch operation on one comes to
:func:`dispatch`, which has the real tensors stand in for the time of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_T = torch.Tensor
_METADATA = {
    _T.shape.__get__,  # type: ignore[attr-defined]
    _T.dtype.__get__,  # type: ignore[attr-defined]
    _T.device.__get__,  # type: ignore[attr-defined]
    _T.layout.__get__,  # type: ignore[attr-defined]
    _T.ndim.__get__,  # type: ignore[attr-defined]
    _T.requires_grad.__get__,  # type: ignore[attr-defined]
    _T.grad_fn.__get__,  # type: ignore[attr-defined]
    _T.grad.__get__,  # type: ignore[attr-defined]
    _T.grad.__set__,  # type: ignore[attr-defined]
    _T.grad.__delete__,  # type: ignore[attr-defined]
    _T.name.__get__,  # type: ignore[attr-defined]
    _T.is_leaf.__get__,  # type: ignore[attr-defined]
    _T.is_sparse.__get__,  # type: ignore[attr-defined]
    _T.is_sparse_csr.__get__,  # type: ignore[attr-defined]
    _T.is_cuda.__get__,  # type: ignore[attr-defined]
    _T.is_cpu.__get__,  # type: ignore[attr-defined]
    _T.is_mps.__get__,  # type: ignore[attr-defined]
    _T.is_xpu.__get__,  # type: ignore[attr-defined]
    _T.is_mkldnn.__get__,  # type: ignore[attr-defined]
    _T.is_nested.__get__,  # type: ignore[attr-defined]
    _T.is_quantized.__get__,  # type: ignore[attr-defined]
    _T.is_meta.__get__,  # type: ignore[attr-defined]
    _T.itemsize.__get__,  # type: ignore[attr-defined]
    _T.nbytes.__get__,  # type: ignore[attr-defined]
    _T._version.__get__,  # type: ignore[attr-defined]
    _T.retains_grad.__get__,  # type: ignore[attr-defined]
    _T._backward_hooks.__get__,  # type: ignore[attr-defined]
    _T._backward_hooks.__set__,  # type: ignore[attr-defined]
    _T._post_accumulate_grad_hooks.__get__,  # type: ignore[attr-defined]
    _T._post_accumulate_grad_hooks.__set__,  # type: ignore[attr-defined]
    _T.size,
    _T.dim,
    _T.ndimension,
    _T.numel,
    _T.nelement,
    _T.element_size,
    _T.is_floating_point,
    _T.is_complex,
    _T.is_signed,
    _T.is_inference,
    _T.get_device,
    _T.__len__,
    _T.__hash__,
    _T.register_hook,
    _T.register_post_accumulate_grad_hook,
    torch.is_floating_point,
    torch.is_complex,
    torch.is_inference,
    torch.numel,
}
_PASSES = {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}
_LISTS = ("_foreach_", "_amp_foreach_")


class Opened:
    """A real tensor in use by one operation."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def close(self, func: Callable[..., Any]) -> None:
        """Ends the use; ``func`` is what was done with it."""


class StandIn:
    """What both kinds have in common. Comes before a tensor class among the bases."""

    __slots__ = ()

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
        """Answers an operation on ``self`` in another way than by running it."""
        return False, None

    def _open(self) -> Opened:
        raise NotImplementedError

    def _in_a_pass(self) -> Any:
        """Returns what stands for the tensor among the arguments of a backward pass."""
        raise NotImplementedError


def _pass(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs a backward pass, which names parameters and does not need them all at once."""

    def known(value: Any) -> Any:
        if isinstance(value, StandIn):
            with torch._C.DisableTorchFunctionSubclass():
                return value._in_a_pass()
        if type(value) in (list, tuple):
            return type(value)(known(item) for item in value)
        return value

    return func(*known(args), **{key: known(value) for key, value in kwargs.items()})


def dispatch(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs an operation some of whose arguments are stand-ins."""
    if args and isinstance(args[0], StandIn):
        answered, result = args[0]._answer(func, args, kwargs)
        if answered:
            return result
    name = getattr(func, "__name__", "")
    if name.startswith(_LISTS) and args and isinstance(args[0], list | tuple):
        return _one_by_one(func, args, kwargs)
    return _run(func, args, kwargs)


def _run(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    opened: dict[int, tuple[StandIn, Opened]] = {}

    def real(value: Any) -> Any:
        if isinstance(value, StandIn):
            if id(value) not in opened:
                opened[id(value)] = (value, value._open())
            return opened[id(value)][1].tensor
        if isinstance(value, list | tuple):
            items = [real(item) for item in value]
            return type(value)(items) if type(value) in (list, tuple) else items
        if isinstance(value, dict):
            return {key: real(item) for key, item in value.items()}
        return value

    try:
        result = func(*real(args), **real(kwargs))
    finally:
        for _, use in reversed(opened.values()):
            use.close(func)
    for value, use in opened.values():
        if use.tensor is result:
            return value  # an operation in place returns the tensor it was called on
    return result


def _one_by_one(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs an operation on lists of tensors one tensor at a time, so that one is here at a time."""
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
