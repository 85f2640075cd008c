"""A tensor whose bytes are in the tiers, and which fetches them when it is used.

``param.grad`` and the optimizer's state are such tensors between uses
by tiermem itself. Any torch operation on one gets a copy of the real tensor
instead; if the operation changed it, the change is written back.

A gradient may be kept in another dtype than its parameter's. torch's C++ accepts only a tensor
of the parameter's dtype for ``param.grad``, so the stand-in formally has it; Python code
and all operations see the dtype in which the gradient is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from tiermem.core.alike import any_none, set_all
from tiermem.errors import ParameterError
from tiermem.nn.compat.quiet import unrecorded
from tiermem.nn.tensors.placeholder import shared_placeholder
from tiermem.nn.tensors.shells import insides
from tiermem.nn.tensors.standin import Opened, StandIn, writes
from tiermem.runtime.memory.slots import use_count

_spare_of, _has_of = attrgetter("spare"), attrgetter("_has")
_attributes_of = attrgetter("__dict__")
_NOTHING = {torch.Tensor.detach_, torch.Tensor.requires_grad_}
_OWN_REFERENCES = 2
_TENSOR: Any = torch.Tensor
UNSCALE: Any = torch._amp_foreach_non_finite_check_and_unscale_
"""The function with which a GradScaler undoes its scale, for a list of gradients."""

LOOK: Any = object()
"""Represents that function when it only checks for infinities."""

ANSWERS: dict[Any, Callable[..., Any]] = {}
"""Replacements of functions over lists; they may return NotImplemented."""


class LazyTensor(StandIn, torch.Tensor):
    """Stands for a tensor in the tiers. It is created by :class:`Ways`."""

    _load: Callable[[], torch.Tensor]
    _store: Callable[[torch.Tensor], Any]
    _kept: torch.Tensor | None
    _dtype: torch.dtype
    _gone = False
    _shelled = False  # the real tensor is of a subclass that wraps others
    _clippable: Any = None  # set for the gradient of a parameter

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Returns the real tensor's dtype if that is requested; runs all else on the tensor."""
        if func in _OF_DTYPE and args and isinstance(args[0], LazyTensor):
            return _OF_DTYPE[func](args[0])
        if func == UNSCALE and _only_looks(*args, **kwargs or {}):
            func = LOOK
        if func in ANSWERS:
            with torch._C.DisableTorchFunctionSubclass():
                result = ANSWERS[func](*args, **kwargs or {})
            if result is not NotImplemented:
                return result
        return super().__torch_function__(func, types, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute that the class of the real tensor has beyond torch's own."""
        if not self._shelled or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        flush(self)
        with unrecorded():
            self._kept = kept = self._load() if self._kept is None else self._kept
            found = getattr(kept, name)
            # an alias, so that references to it can be counted
            return found.detach() if isinstance(found, torch.Tensor) else found

    def _answer(self, func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[bool, Any]:
        return (True, self) if func in _NOTHING else (False, None)

    def _open(self) -> Opened:
        flush(self)
        if self._kept is not None:
            return _Copy(self, self._kept)
        with unrecorded():  # torch does not count changes of inference tensors
            return _Copy(self, self._load())

    def _written(self) -> None:
        flush(self)

    def _in_a_pass(self) -> Any:
        flush(self)
        return self._load()

    def set_(self, *_: Any, **__: Any) -> Any:
        """Refuses an operation that torch does not pass to ``__torch_function__``.

        Raises:
            ParameterError: Always.
        """
        raise ParameterError(
            f"a tensor of shape {tuple(self.shape)} that lives in the tiers (a gradient, or state) "
            "cannot take other memory with set_(): copy_() takes values, and `param.grad = tensor` "
            "another gradient"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = self._load()
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self._load().__reduce_ex__(protocol)


_OF_DTYPE: dict[Any, Callable[[LazyTensor], Any]] = {
    _TENSOR.dtype.__get__: lambda tensor: tensor._dtype,
    _TENSOR.itemsize.__get__: lambda tensor: tensor._dtype.itemsize,
    _TENSOR.element_size: lambda tensor: tensor._dtype.itemsize,
    _TENSOR.nbytes.__get__: lambda tensor: tensor._dtype.itemsize * tensor.numel(),
}
"""Functions that depend on the dtype only, as passed to ``__torch_function__``."""


def _only_looks(
    tensors: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> bool:
    """Whether a GradScaler only checks for infinities and leaves the gradients unchanged."""
    return inv_scale.item() == 1.0  # a wait for the device; step() waits for the answer anyway


def look(tensors: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Checks copies for infinities, one at a time, so that nothing has to be written back."""
    for tensor in tensors:
        with torch._C.DisableTorchFunctionSubclass():
            copy = tensor._open().tensor if isinstance(tensor, LazyTensor) else tensor
            UNSCALE([copy], found_inf, inv_scale)


ANSWERS[LOOK] = look


class _Copy(Opened):
    """A copy of a lazy tensor, in use by an operation."""

    __slots__ = ("lazy", "version")

    def __init__(self, stand_in: LazyTensor, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self.lazy = stand_in
        self.version = tensor._version

    def close(self, func: Callable[..., Any]) -> None:
        """Writes a change back; keeps the copy while something else shares its memory."""
        if self.tensor._version != self.version or writes(func):
            self.lazy._store(self.tensor.detach())
        by_address = func is torch.Tensor.data_ptr  # it is unknown for how long
        self.lazy._kept = self.tensor if by_address or _seen(self.tensor) else None


def _seen(tensor: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor:  # of a subclass: the tensors it wraps
        inner = insides(tensor)
        if len(inner) != 1 or inner[0][1] is not tensor:
            return any(_seen(plain) for _, plain in inner)
    return is_shared(tensor) or is_elsewhere(tensor)


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether other tensors share the memory of an ordinary one."""
    if tensor.layout is not torch.strided:
        return False
    storage = tensor.untyped_storage()  # this reference counts as well
    if use_count(storage._cdata) > _OWN_REFERENCES:
        return True
    return sys.getrefcount(storage) > _ALONE_AS_STORAGE  # ``tensor.untyped_storage()``


def flush(tensor: torch.Tensor | None) -> None:
    """Writes back changes made through a view of a lazy tensor (``p.grad[0].zero_()``).

    Not every change is counted (``p.grad.data``, numpy), so one is assumed.
    """
    if not isinstance(tensor, LazyTensor) or tensor._kept is None:
        return
    with torch._C.DisableTorchFunctionSubclass():
        kept, tensor._kept = tensor._kept, None
        tensor._store(kept.detach())
        if _seen(kept):
            tensor._kept = kept


def forget(tensor: Any) -> None:
    """Drops the copy of a lazy tensor: its views are no longer updated."""
    if isinstance(tensor, LazyTensor):
        tensor._kept = None


def ordinary(gradient: torch.Tensor, param: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a gradient as an ordinary tensor that torch accepts for ``param.grad``."""
    if isinstance(gradient, LazyTensor):
        return gradient.to(device, param.dtype)
    return gradient.to(device)


def is_viewed(tensor: Any) -> bool:
    """Whether there may be a view of a copy that a lazy tensor made."""
    return isinstance(tensor, LazyTensor) and tensor._kept is not None


def is_gone(tensor: Any) -> bool:
    """Whether a lazy tensor has lost its bytes, so that its use raises."""
    return isinstance(tensor, LazyTensor) and tensor._gone


def ensure_there(tensor: Any) -> None:
    """Raises the error of a lazy tensor whose bytes are gone, if they are."""
    if is_gone(tensor):
        tensor._load()


def orphan(tensor: LazyTensor, value: torch.Tensor | None = None) -> None:
    """Gives a lazy tensor its final value: its bytes in the tiers will be dropped.

    Args:
        tensor: The lazy tensor.
        value: Its value, if the caller has it; it is not copied.
    """
    kept = tensor._kept
    if kept is None:
        kept = tensor._load() if value is None else value
    tensor._load = lambda: kept
    tensor._store = kept.copy_
    tensor._kept = None


def is_held(thing: object, *, besides: int = 0) -> bool:
    """Whether there is a reference to an object apart from one local variable of the caller.

    Args:
        thing: The object.
        besides: How many more references the caller knows of.
    """
    return sys.getrefcount(thing) > _ALONE + besides


def is_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether torch refers to a tensor, apart from its Python object.

    Another parameter's ``grad`` does, which not every version of torch counts as a Python
    reference.
    """
    with torch._C.DisableTorchFunctionSubclass():
        count: int = tensor._use_count()  # type: ignore[attr-defined]
    return count > 1


def _alone() -> int:
    thing = object()
    return _counted(thing)


def _counted(thing: object, *, besides: int = 0) -> int:
    """Counts like :func:`is_held`: what a call adds differs between versions of Python."""
    return sys.getrefcount(thing)


_ALONE = _alone()


def _alone_as_storage() -> int:
    tensor = torch.zeros(1, device="cpu")
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


_ALONE_AS_STORAGE = _alone_as_storage()
"""The same for the storage of a tensor in use, to which torch may refer as well."""


def _alone_in_grad() -> int:
    param = torch.zeros(1, requires_grad=True, device="cpu")
    param.grad = torch.zeros(1, device="cpu")
    gradient = param.grad
    return sys.getrefcount(gradient)


ALONE_IN_GRAD = _alone_in_grad()
"""References that ``sys.getrefcount`` counts for a gradient that is only in ``param.grad`` and
one local variable of the caller. Not every version of torch counts its own."""


def _alone_in_grad_and_list() -> int:
    param = torch.zeros(1, requires_grad=True, device="cpu")
    param.grad = torch.zeros(1, device="cpu")
    gradients = [param.grad]
    return next(map(sys.getrefcount, gradients))


ALONE_IN_GRAD_AND_LIST = _alone_in_grad_and_list()
"""The same for one in ``param.grad`` and in a list over which ``sys.getrefcount`` is mapped."""


def _alone_here() -> int:
    thing = object()
    return sys.getrefcount(thing)


ALONE = _alone_here()
"""The same for an object that is only in one local variable of the caller."""


def _alone_in_list() -> int:
    things = [object()]
    return next(map(sys.getrefcount, things))


ALONE_IN_LIST = _alone_in_list()
"""The same for an object that is in a list over which ``sys.getrefcount`` is mapped."""


def refresh(tensor: torch.Tensor | None, value: torch.Tensor) -> None:
    """Copies a changed stored value into the views of a lazy tensor that are still alive."""
    if isinstance(tensor, LazyTensor) and tensor._kept is not None:
        kept = tensor._kept
        tensor._kept = kept if _seen(kept) else None
        if tensor._kept is not None:
            with torch.no_grad():
                for (_, mine), (_, theirs) in zip(insides(kept), insides(value), strict=True):
                    mine.copy_(theirs)


class Ways:
    """How to access the bytes of a tensor, for one stand-in after another.

    Attributes:
        dtype: Dtype of the real tensor.
        marks: How many attributes a stand-in has.
        spare: A stand-in without other references, for reuse, as creating one takes longer. No
            other code has set attributes of it, or has a weak reference to it.
    """

    __slots__ = ("_has", "_placeholder", "dtype", "marks", "spare")

    def __init__(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        load: Callable[[], torch.Tensor],
        store: Callable[[torch.Tensor], Any],
        formal: torch.dtype | None = None,
        clippable: Any = None,
    ) -> None:
        """Describes a tensor.

        Args:
            shape: Shape of the real tensor.
            dtype: Dtype of the real tensor.
            device: Device of the real tensor.
            load: Returns a copy of the real tensor, in ordinary memory.
            store: Writes a changed copy back.
            formal: The dtype that torch's C++ sees, if different.
            clippable: For the gradient of a parameter: knows its norm, and pending changes.
        """
        self.dtype = dtype
        self._has: dict[str, Any]
        self._has = {"_dtype": dtype, "_load": load, "_store": store, "_kept": None}
        if clippable is not None:
            self._has["_clippable"] = clippable
        self.marks = len(self._has)
        self.spare: LazyTensor | None = None
        self._placeholder = shared_placeholder(shape, formal or dtype, device)

    def stand_in(self) -> LazyTensor:
        """Returns a lazy tensor without other references: a new one, or the spare one."""
        tensor, self.spare = self.spare, None
        if tensor is None:
            tensor = torch.Tensor._make_subclass(LazyTensor, self._placeholder)
        tensor.__dict__.update(self._has)
        return tensor


def stand_ins_of(ways: Sequence[Ways]) -> list[LazyTensor]:
    """Returns a lazy tensor for each of some, like :meth:`Ways.stand_in`."""
    spares = [*map(_spare_of, ways)]
    if any_none(spares):
        return [way.stand_in() for way in ways]
    set_all(ways, "spare", None)
    any(map(dict.update, map(_attributes_of, spares), map(_has_of, ways)))
    return spares


def gone(
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    refuse: Callable[..., Any],
    formal: torch.dtype | None = None,
) -> LazyTensor:
    """Creates a stand-in for a tensor whose bytes no longer exist.

    Args:
        shape: Shape of the former tensor.
        dtype: Its dtype.
        device: Its device.
        refuse: Raises, with the reason, when its values are read or written.
        formal: The dtype that torch's C++ sees, if different.
    """
    tensor = Ways(shape, dtype, device, refuse, refuse, formal).stand_in()
    end(tensor, refuse)
    return tensor


def end(tensor: Any, refuse: Callable[..., Any]) -> None:
    """Marks the bytes of a lazy tensor as lost: its use raises from now on.

    Args:
        tensor: The tensor; one of another class is not changed.
        refuse: Raises, with the reason, when its values are read or written.
    """
    if isinstance(tensor, LazyTensor):
        tensor._load = tensor._store = refuse
        tensor._kept = None
        tensor._gone = True
