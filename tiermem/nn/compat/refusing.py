"""Memory that cannot be read: torch raises if anything asks for its address.

torch has a switch for that in each storage. Its CUDA graph trees set it, with their own text,
on memory that was overwritten. A torch that was built without CUDA has the switch but not
the function that sets it. There the switch is searched for: it is beside two others that torch's
Python functions set, and is only used if reading a tensor fails with it and works again without
it. They are bytes of an object whose address torch provides.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import nn

from tiermem.core.block import Block
from tiermem.errors import ParameterError

_WITH_TEXT = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
_LOOKED_AT = 64  # bytes of a storage object to search; the object is larger


OURS = "tiermem: the bytes of a"
"""Begin of the text that torch is given, if this is possible."""
_TORCHS = "Cannot access data pointer of Storage that is invalid"
_NO_LONGER = "Trying to resize storage that is not resizable"


def was_refused(error: BaseException) -> bool:
    """Whether an error is torch's for bytes that must not be read."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in (_TORCHS, OURS))


def read_elsewhere(module: nn.Module, name: str, blocks: Sequence[Block]) -> ParameterError:
    """Returns the error for code in a call that has read a weight which is not in HBM.

    Args:
        module: The called module.
        name: Its qualified name.
        blocks: The blocks in HBM for that call.
    """
    here = ", ".join(repr(block.name) for block in blocks) or "none of its own"
    return ParameterError(
        f"code in the call of {name or type(module).__name__!r} has read a parameter of a wrapped "
        "model that is not in HBM, in a way that torch does not show to tiermem (a C++ extension, "
        f"say); blocks in HBM for this call: {here}. Give that code the weight as `module.weight` "
        "and not from a list made before, or a clone of it, or make the call inside `with "
        "tier.materialize(module)`"
    )


def could_not_grow(error: BaseException) -> bool:
    """Whether an error is torch's for a tensor that cannot be enlarged in place."""
    return type(error) is RuntimeError and _NO_LONGER in str(error)


def keeps_its_size(module: nn.Module, name: str) -> ParameterError:
    """Returns the error for code in a call that has enlarged a tensor in place.

    Args:
        module: The called module.
        name: Its qualified name.
    """
    return ParameterError(
        f"code in the call of {name or type(module).__name__!r} makes a tensor longer in place "
        "(`resize_`, `out=`, a kernel). If it is a buffer or a weight of a wrapped model: that "
        "lies beside others in tier hbm and keeps its size. Run one batch through the module "
        "before tier.wrap, so that it has the size that it needs, or give the module a new buffer "
        "(`module.buffer = ...`)"
    )


def refuse(tensor: torch.Tensor, text: str) -> bool:
    """Makes every access to the bytes of a tensor's storage raise from now on.

    Args:
        tensor: Its storage; no other tensor may share it.
        text: The text of the error, if torch can be given one.

    Returns:
        Whether it will; False if this torch has no such switch.
    """
    with torch._C.DisableTorchFunctionSubclass():
        handle: int = tensor._typed_storage()._cdata
    if _WITH_TEXT is not None:
        _WITH_TEXT(handle, text)
        return True
    return _switch(handle, on=True)


def permit(tensor: torch.Tensor) -> None:
    """Permits reads of the bytes of a tensor after :func:`refuse`, until that is called again."""
    with torch._C.DisableTorchFunctionSubclass():
        _switch(tensor._typed_storage()._cdata, on=False)


def _switch(handle: int, *, on: bool) -> bool:
    found = _switches()
    for offset in found:
        _byte(handle, offset).value = on
    return bool(found)


@cache
def _switches() -> tuple[int, ...]:
    """Returns where in a storage object the switch is, and the one that enables its check.

    Returns:
        Offsets in bytes; none if they are not found.
    """
    known, tried = torch.zeros(1, device="cpu"), torch.zeros(1, device="cpu")
    handle = known.untyped_storage()._cdata
    before = ctypes.string_at(handle, _LOOKED_AT)
    torch._C._set_throw_on_mutable_data_ptr(known)
    after = ctypes.string_at(handle, _LOOKED_AT)
    changed = [i for i in range(_LOOKED_AT) if before[i] != after[i]]
    flipped = [(before[i], after[i]) for i in changed]
    if flipped != [(0, 1)] * 2 or changed[1] != changed[0] + 1 or changed[1] + 1 == _LOOKED_AT:
        return ()
    offsets = (changed[0], changed[1] + 1)
    switches = [_byte(tried.untyped_storage()._cdata, offset) for offset in offsets]
    if any(switch.value for switch in switches):
        return ()
    for switch in switches:
        switch.value = 1
    refused = not (_can_be_read(tried) or _has_address(tried))
    for switch in switches:
        switch.value = 0
    return offsets if refused and _can_be_read(tried) and _has_address(tried) else ()


def _byte(address: int, offset: int) -> ctypes.c_uint8:
    return ctypes.c_uint8.from_address(address + offset)


def _can_be_read(tensor: torch.Tensor) -> bool:
    try:
        return bool((tensor + 1).item() == 1)
    except RuntimeError:
        return False


def _has_address(tensor: torch.Tensor) -> bool:
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:
        return False
