"""Tensors of a transformers model that its checkpoints do not have, and tensors it ignores."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tiermem.loading.untouched import Untouched

HAS_VALUES = "_is_hf_initialized"
"""The attribute by which ``transformers.initialization`` (release 5) marks what has values."""


def saved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the buffers of a model that its checkpoints have, tied ones under each name."""
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def complained_of(
    model: Any, missing: Iterable[str] = (), unexpected: Iterable[str] = ()
) -> set[str]:
    """Returns those of the names about which transformers would also warn."""
    info = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected))
    model._adjust_missing_and_unexpected_keys(info)
    return set(info.missing_keys) | set(info.unexpected_keys)


def kept_dtype(model: Any, dtype: torch.dtype) -> Callable[[str], torch.dtype | None]:
    """Returns a function from a tensor's name to the dtype its class keeps it in; mostly None.

    Args:
        model: A transformers model.
        dtype: The requested dtype.
    """
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(dtype)
    if not plan:
        return lambda name: None
    pattern, group_of, _ = build_glob_alternation(list(plan))

    def kept(name: str) -> torch.dtype | None:
        match = pattern.search(name)
        return None if match is None else plan[group_of[str(match.lastgroup)]]

    return kept


def make_expected(model: Any, missing: Sequence[str]) -> list[str]:
    """Gives tensors that no checkpoint of this class has their values, like ``from_pretrained``.

    These are, for example, position tables that the model computes.

    Args:
        model: A transformers model.
        missing: Names of tensors that the files do not have.

    Returns:
        The remaining names: those about which transformers would warn.
    """
    left = complained_of(model, missing=missing)
    _initialize(model, _with_memory(model, [name for name in missing if name not in left]))
    return [name for name in missing if name in left]


def make_missing(
    model: Any, missing: Sequence[str], found: Collection[str], others: Sequence[str]
) -> list[str]:
    """Gives all tensors that the files do not have their values, like ``from_pretrained``.

    The random generator is left in the same state, too: some classes draw numbers for tensors that
    have values, and drop them. So does ``from_pretrained`` for a weight that the files have
    under the name of one tied to it.

    Args:
        model: A transformers model, as created by its class, tied.
        missing: Names of tensors that the files do not have under any name.
        found: Names that the files have.
        others: Names of buffers that are in no checkpoint and have to be recomputed.

    Returns:
        The names about which transformers would warn, as newly initialized.
    """
    own_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    pairs: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    tied = {name: to for name, to in pairs.items() if name in own_names and to in own_names}
    kept = kept_dtype(model, model.config.dtype)
    own = {name: model.config.dtype for name in missing if kept(name) is not None}
    made = [name for name in _with_memory(model, missing, own) if name not in tied]
    dropped = {name for name in tied.values() if name not in found and name not in missing}
    with ExitStack() as stack:
        for name in dropped:  # its values are under another name
            stack.callback(_replaced(model, name, torch.zeros_like, "cpu"))
        for name in tied:  # it gets its values with the tensor to which it is tied
            if name not in dropped:
                stack.callback(_replaced(model, name, torch.empty_like, "meta"))
        _initialize(model, {*made, *dropped, *others})
    left = complained_of(model, missing=missing)
    return [name for name in missing if name in left]


def _with_memory(
    model: Any, names: Sequence[str], dtypes: Mapping[str, torch.dtype] | None = None
) -> list[str]:
    """Gives tensors on the meta device memory, the same for tied ones; returns the names."""
    blank: dict[int, torch.Tensor] = {}
    for name in names:
        tensors, own = _place(model, name)
        tensor = tensors[own]
        if tensor.is_meta:
            made = _blank(tensor, (dtypes or {}).get(name, tensor.dtype))
            tensors[own] = blank.setdefault(id(tensor), made)
    return list(names)


def _place(model: Any, name: str) -> tuple[dict[str, Any], str]:
    parent, _, own = name.rpartition(".")
    module = model.get_submodule(parent)
    return (module._parameters if own in module._parameters else module._buffers), own


def _replaced(
    model: Any, name: str, make: Callable[..., torch.Tensor], device: str
) -> Callable[[], None]:
    """Replaces a tensor, and returns a function that restores it."""
    tensors, own = _place(model, name)
    tensor = tensors[own]
    data = make(tensor, device=device)
    parameter = isinstance(tensor, nn.Parameter)
    tensors[own] = nn.Parameter(data, tensor.requires_grad) if parameter else data
    return lambda: tensors.__setitem__(own, tensor)


def _initialize(model: Any, names: Collection[str]) -> None:
    """Makes a model initialize some of its tensors, and no others."""
    untouched = Untouched(model, {})  # on the meta device nothing would be drawn
    try:
        with _all_have_values_but(model, names):
            model.initialize_weights()
    finally:
        untouched.undo()


def _blank(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns memory for a tensor on the meta device; zeros, if nothing sets it."""
    data = torch.zeros_like(tensor, device="cpu", dtype=dtype)
    return nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


@contextmanager
def _all_have_values_but(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Makes transformers initialize only some tensors."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    tensors |= dict(model.named_buffers())
    for module in model.modules():
        module.__dict__.pop(HAS_VALUES, None)
    for name, tensor in tensors.items():
        if name not in names:
            setattr(tensor, HAS_VALUES, True)
    try:
        yield
    finally:
        for tensor in tensors.values():
            tensor.__dict__.pop(HAS_VALUES, None)
