"""A tensor whose bytes are in the tiers, and that fetches itself when it is used.

``param.grad`` and the optimizer's state are such tensors between their uses
by tiermem itself. Any torch operation on one gets the real tensor instead;
where the operation changed it, the change is written back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tiermem.nn.placeholder import placeholder

_METADATA = {
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__,  # type: ignore[attr-defined]
    torch.Tensor.layout.__get__,  # type: ignore[attr-defined]
    torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.grad_fn.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_leaf.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_sparse.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_sparse_csr.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_mps.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_quantized.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_meta.__get__,  # type: ignore[attr-defined]
    torch.Tensor.itemsize.__get__,  # type: ignore[attr-defined]
    torch.Tensor.nbytes.__get__,  # type: ignore[attr-defined]
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.get_device,
    torch.Tensor.__len__,
    torch.is_floating_point,
    torch.is_complex,
    torch.Tensor.__hash__,
    torch.Tensor.register_hook,
}
_NOTHING = {torch.Tensor.detach_, torch.Tensor.requires_grad_}
_LISTS = ("_foreach_", "_amp_foreach_")


class LazyTensor(torch.Tensor):
    """Stands for a tensor in the tiers. Make it with :func:`lazy`."""

    _load: Callable[[], torch.Tensor]
    _store: Callable[[torch.Tensor], None]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs ``func`` on the real tensors; see the module's text."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                return func(*args, **kwargs)
            if func in _NOTHING:
                return args[0]
            name = getattr(func, "__name__", "")
            if name.startswith(_LISTS) and args and isinstance(args[0], list | tuple):
                return _one_by_one(func, args, kwargs)
            return _run(func, args, kwargs)


def lazy(
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    load: Callable[[], torch.Tensor],
    store: Callable[[torch.Tensor], None],
) -> LazyTensor:
    """Makes a lazy tensor.

    Args:
        shape: Of the real tensor.
        dtype: Of the real tensor.
        device: Of the real tensor.
        load: Returns a copy of the real tensor, in ordinary memory.
        store: Takes a changed copy back.
    """
    tensor: LazyTensor = torch.Tensor._make_subclass(
        LazyTensor, placeholder(shape, dtype, device)
    )
    tensor._load = load
    tensor._store = store
    return tensor


def _run(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    loaded: dict[int, tuple[LazyTensor, torch.Tensor, int]] = {}

    def real(value: Any) -> Any:
        if isinstance(value, LazyTensor):
            if id(value) not in loaded:
                tensor = value._load()
                loaded[id(value)] = (value, tensor, tensor._version)
            return loaded[id(value)][1]
        if isinstance(value, list | tuple):
            items = [real(item) for item in value]
            return type(value)(items) if type(value) in (list, tuple) else items
        if isinstance(value, dict):
            return {key: real(item) for key, item in value.items()}
        return value

    result = func(*real(args), **real(kwargs))
    by_tensor = {}
    for value, tensor, version in loaded.values():
        if tensor._version != version:
            value._store(tensor.detach())
        by_tensor[id(tensor)] = value
    return by_tensor.get(id(result), result)


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
