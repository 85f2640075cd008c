"""Views of weights that are too large for HBM, which kernels read in place in DRAM.

``x @ self.embedding.weight.T`` is two operations. The first would return a view of the home, which
may belong to another block later, and writes through it would go unnoticed. So programs get a
stand-in that knows which elements of the weight it refers to. Each operation on it accesses the
weight again, like operations on the weight itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tiermem.errors import ParameterError
from tiermem.nn.compat.quiet import unrecorded
from tiermem.nn.tensors.placeholder import shared_placeholder
from tiermem.nn.tensors.standin import Opened, StandIn

_Form = tuple[torch.dtype, torch.Size, tuple[int, ...]]


class PlaceView(StandIn, torch.Tensor):
    """A view of a weight that is read in DRAM. Make it with :func:`place_view`."""

    _weight: torch.Tensor
    _form: _Form
    _size: torch.Size
    _stride: tuple[int, ...]
    _offset: int

    def set_(self, *_: Any, **__: Any) -> Any:
        """Refuses ``set_``, which torch does not dispatch to ``__torch_function__``.

        Raises:
            ParameterError: Always.
        """
        raise ParameterError(
            f"a view of shape {tuple(self.shape)} of a weight that is read in tier dram cannot "
            "take other memory with set_(): copy_() takes values"
        )

    def _open(self) -> Opened:
        """Opens the weight, and takes the same part of it."""
        weight: Any = self._weight
        use = weight._open() if isinstance(weight, StandIn) else Opened(weight.detach())
        try:
            whole = use.tensor
            if _form(whole) != self._form:
                raise ParameterError(
                    f"a view of shape {tuple(self._size)} was made of a weight that has another "
                    "dtype or form now; make the view anew"
                )
            return _Part(use, whole, self)
        except BaseException:
            use.close(torch.Tensor.detach)
            raise

    def _cut_short(self) -> None:
        if isinstance(self._weight, StandIn):
            self._weight._cut_short()

    def _in_a_pass(self) -> Any:
        return self  # it is not in a graph

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = memo[id(self)] = self.clone()
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


class _Part(Opened):
    """A view in use by one operation."""

    __slots__ = ("whole",)

    def __init__(self, use: Opened, whole: torch.Tensor, view: PlaceView) -> None:
        offset = whole.storage_offset() + view._offset
        super().__init__(whole.as_strided(view._size, view._stride, offset))
        self.whole = use

    def close(self, func: Callable[..., Any]) -> None:
        """Ends the use of the weight."""
        self.whole.close(func)

    def given(self, result: Any) -> Any:
        """Returns the result for the program: views become stand-ins, too."""
        return self.whole.given(result)


def place_view(weight: torch.Tensor, whole: torch.Tensor, found: torch.Tensor) -> PlaceView | None:
    """Returns the stand-in for a view.

    Args:
        weight: The weight, as the program has it.
        whole: The weight with its bytes.
        found: The view, over memory of ``whole``.

    Returns:
        The stand-in; None if it is not a view of elements of the weight.
    """
    if (
        type(found) is not torch.Tensor
        or found.requires_grad
        or (found.dtype, found.is_conj(), found.is_neg()) != (whole.dtype, False, False)
    ):
        return None
    size, stride = found.shape, found.stride()
    with unrecorded():
        kind: Any = PlaceView
        made = kind._make_subclass(kind, shared_placeholder(size, found.dtype, found.device))
    made._weight, made._form, made._size, made._stride = weight, _form(whole), size, stride
    made._offset = int(found.storage_offset()) - int(whole.storage_offset())
    return made  # type: ignore[no-any-return]


def _form(tensor: torch.Tensor) -> _Form:
    return tensor.dtype, tensor.shape, tensor.stride()
