"""Tensor subclasses that wrap plain tensors: unwrapping, and rebuilding around other tensors.

A quantized optimizer state, for example, consists of codes and scales that appear as one tensor.
For its compiler, torch defines how to unwrap and rebuild such a class: ``__tensor_flatten__`` and
``__tensor_unflatten__``. The plain tensors inside have bytes that can be moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_is_shell: Any = is_traceable_wrapper_subclass  # its annotation promises too much
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _wraps(value: torch.Tensor) -> bool:
    """Whether a tensor is of a subclass that wraps others, and can be unwrapped."""
    return type(value) not in _PLAIN and bool(_is_shell(value))


def _taken_apart(value: Any) -> tuple[list[str], Any]:
    names, context = value.__tensor_flatten__()
    return names, context


def insides(value: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Returns the plain tensors in a tensor, by path; for a plain one, itself by ``""``.

    Args:
        value: Plain, or of a subclass that can be unwrapped.
    """
    if not _wraps(value):
        return [("", value)]
    return [(path, tensor) for path, _, _, tensor in _walk(value)]


def parts(value: torch.Tensor) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """Yields the plain tensors in a tensor of a subclass, each with its owner and name there.

    In the order of :func:`insides`; a plain tensor has none.
    """
    if _wraps(value):
        for _, owner, name, tensor in _walk(value):
            yield owner, name, tensor


def _walk(value: Any, above: str = "") -> Iterator[tuple[str, Any, str, torch.Tensor]]:
    """Yields the path of each plain tensor inside, its owner, its name there, and the tensor."""
    for name in _taken_apart(value)[0]:
        inner = getattr(value, name)
        if _wraps(inner):
            yield from _walk(inner, f"{above}.{name}")
        else:
            yield f"{above}.{name}", value, name, inner


def nbytes_of(value: torch.Tensor) -> int:
    """Returns the bytes of a tensor, or of the tensors that it wraps."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in insides(value))


def is_opaque(value: torch.Tensor) -> bool:
    """Whether a tensor is of a subclass that cannot be unwrapped and rebuilt."""
    if _is_shell(value):
        return any(is_opaque(inner) for _, inner in insides(value))
    return type(value) not in _PLAIN


@dataclass(frozen=True, slots=True)
class Shell:
    """The metadata of a tensor of a subclass, without the tensors inside.

    Attributes:
        kind: Its class.
        names: Names of the attributes with the tensors inside.
        context: The other metadata of the class.
        size: Its shape.
        stride: Its strides.
        inner: For each attribute the shell of its tensor, None if that is plain.
        device: Device of the tensor.
    """

    kind: Any
    names: tuple[str, ...]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]
    inner: tuple[Shell | None, ...]
    device: torch.device = field(compare=False)

    @classmethod
    def of(cls, value: torch.Tensor) -> Shell | None:
        """Returns the shell of a tensor, or None for a plain one."""
        if not _wraps(value):
            return None
        names, context = _taken_apart(value)
        inner = tuple(cls.of(getattr(value, name)) for name in names)
        shape, stride, device = value.size(), value.stride(), value.device
        return cls(type(value), tuple(names), context, shape, stride, inner, device)

    def around(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns such a tensor around other tensors, in the order of :func:`insides`."""
        return self._around(iter(tensors))

    def _around(self, tensors: Iterator[torch.Tensor]) -> torch.Tensor:
        found = {
            name: next(tensors) if shell is None else shell._around(tensors)
            for name, shell in zip(self.names, self.inner, strict=True)
        }
        devices = {tensor.device for tensor in found.values()}
        context = self.context if self.device in devices else _on(devices.pop(), self.context)
        value: torch.Tensor = self.kind.__tensor_unflatten__(found, context, self.size, self.stride)
        return value


def _on(device: torch.device, context: Any) -> Any:
    """Returns the context of a class for a tensor on another device.

    Some classes store the device in it (torchao's NF4).
    """
    if isinstance(context, torch.device):
        return device
    if type(context) in (list, tuple):
        return type(context)(_on(device, item) for item in context)
    if type(context) is dict:
        return {key: _on(device, item) for key, item in context.items()}
    if is_dataclass(context) and not isinstance(context, type):
        own = {f.name: getattr(context, f.name) for f in fields(context) if f.init}
        return replace(context, **{name: _on(device, item) for name, item in own.items()})
    return context


def why_not_wrapped(param: torch.Tensor) -> str | None:
    """Returns why a parameter around other tensors cannot be in the tiers; None if it can.

    Args:
        param: The parameter, with its own memory.
    """
    if type(param).__module__.startswith("torch.distributed"):
        return "it is one part of several that processes have"
    shell = Shell.of(param)
    if shell is None or any(type(tensor) not in _PLAIN for _, _, tensor in parts(param)):
        return "it cannot be taken apart into plain tensors (`__tensor_flatten__`)"
    inside = [tensor for _, _, tensor in parts(param)]
    if [*map(id, inside)] != [id(tensor) for _, _, tensor in parts(param)]:
        return "its class makes the tensors inside anew whenever they are asked for"
    if len({(tensor.device, tensor.is_meta) for tensor in inside}) > 1:
        return "the tensors inside are on several devices"
    for tensor in inside:
        if tensor.layout is not torch.strided or tensor.is_inference() or tensor.requires_grad:
            return "a tensor inside is sparse, was made in inference_mode, or is trained by itself"
    try:
        with torch.no_grad():
            own = [tensor.detach() for tensor in inside]
            made = shell.around(own)
    except Exception as error:  # whatever the class raises
        return f"it cannot be put together again: {type(error).__name__}: {error}"
    looks = [(t.shape, t.stride(), t.dtype, t.device) for t in (param, made)]
    if type(made) is not type(param) or looks[0] != looks[1]:
        return "put together again it is not the same"
    if [*map(id, own)] != [id(tensor) for _, _, tensor in parts(made)]:
        return "its class copies the tensors that it is put together of"
    return None
