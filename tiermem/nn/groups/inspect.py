"""Inspects a module before it is wrapped: its tensors, and what cannot be wrapped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

from tiermem.core.layout import is_dense
from tiermem.errors import WrapError
from tiermem.nn.tensors.shells import insides, why_not_wrapped

owners: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""For each managed parameter, the id of its manager."""

_OR_AS_ONE = "or wrap models that share it as one: tier.wrap(nn.ModuleList([first, second]))"
OR_SHARDED = (
    "FSDP moves and replaces weights itself, so that a model has either FSDP or tiers; with "
    "several processes use DistributedDataParallel(tier.wrap(model))"
)


@dataclass(slots=True)
class Found:
    """A tensor of a module tree.

    Attributes:
        tensor: The parameter or buffer.
        name: The first qualified name under which it was found.
        places: Every (module name, attribute) that holds it.
        same_as: Another one over exactly the same memory, if there is one.
        sparse: Whether a module computes sparse gradients of it.
        shell: The parameter that wraps it, if it is a tensor inside another one. If parameters
            share an inner tensor, the first of them for all of their inner tensors.
    """

    tensor: torch.Tensor
    name: str
    places: list[tuple[str, str]] = field(default_factory=list)
    same_as: Found | None = None
    sparse: bool = False
    shell: Found | None = None


def find(model: nn.Module, which: str) -> list[Found]:
    """Returns the distinct tensors in ``_parameters`` or ``_buffers``, in the modules' order."""
    found: dict[int, Found] = {}
    for module_name, module in model.named_modules():
        sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        named = getattr(module, which).items()
        if isinstance(module, nn.RNNBase):  # in cuDNN's order, or each call would copy them all
            named = sorted(named, key=lambda item: not item[0].startswith("weight"))
        for name, tensor in named:
            if tensor is not None:
                full = f"{module_name}.{name}" if module_name else name
                one = found.setdefault(id(tensor), Found(tensor, full))
                one.places.append((module_name, name))
                one.sparse |= sparse
    return list(found.values())


def opened(found: Iterable[Found]) -> list[Found]:
    """Returns the tensors with bytes: parameters that wrap others are replaced by these.

    Args:
        found: Parameters, each once.
    """
    inside: dict[int, Found] = {}
    for one in found:
        own = insides(one.tensor)
        # a parameter that shares a tensor with another one is in that one's block
        lead = next((inside[id(tensor)] for _, tensor in own if id(tensor) in inside), one)
        for path, tensor in own:
            if id(tensor) in inside:
                inside[id(tensor)].places += one.places
            elif tensor is one.tensor:
                inside[id(tensor)] = one
            else:
                places = [*one.places] if lead is one else [lead.places[0], *one.places]
                whole = lead.shell or lead
                inside[id(tensor)] = Found(tensor, one.name + path, places, shell=whole)
    return list(inside.values())


_SHARDED = ("FullyShardedDataParallel", "FSDPModule")
"""Classes of modules that FSDP has changed; not imported, as that takes long."""


def runtime_of(module: nn.Module) -> Any:
    """Returns the runtime of the manager in which a module is wrapped, or None."""
    return getattr(module.__dict__.get("load_state_dict"), "runtime", None)


def check_module(model: object, manager_id: int) -> nn.Module:
    """Refuses a model that cannot be wrapped.

    Raises:
        WrapError: With the reason, and what to do instead.
    """
    if not isinstance(model, nn.Module):
        raise WrapError(f"tier.wrap takes a torch.nn.Module, not {type(model).__name__}")
    for name, module in model.named_modules():
        what = f"module {name or type(module).__name__!r}"
        runtime = runtime_of(module)
        if runtime is not None:
            if runtime.manager.gate.closed:
                raise WrapError(
                    f"{what} was wrapped in a TierManager that cannot be used any more, and its "
                    "weights are gone with it (close(discard=True), or it is the parent "
                    "process's); make the module anew"
                )
            inside = ", then wrap the whole (adapters are added before tier.wrap)" if name else ""
            raise WrapError(
                f"{what} is wrapped already; call tier.unwrap(module) first{inside}, {_OR_AS_ONE}"
            )
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise WrapError(
                f"{what} is a ScriptModule, whose weights are out of reach; wrap the "
                "Python module it was made from"
            )
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            kind = type(module).__name__
            raise WrapError(
                f"{what} replicates its module; wrap that first: {kind}(tier.wrap(model))"
            )
        if any(cls.__name__ in _SHARDED for cls in type(module).__mro__):
            raise WrapError(f"{what} is sharded by torch's FSDP: {OR_SHARDED}")
        _check_hooks(module, what)
    for found in find(model, "_parameters"):
        _check_taken_away(model, found)
        _check_parameter(found, manager_id)
    return model


def _check_taken_away(model: nn.Module, found: Found) -> None:
    """Refuses a parameter without values in a module whose ``forward`` was replaced."""
    if not found.tensor.is_meta:
        return
    for name, _ in found.places:
        if "forward" in vars(model.get_submodule(name)):
            raise WrapError(
                f"parameter {found.name!r} is on the meta device, and the forward of its module "
                "was replaced: another library brings its values for each call; use one of the "
                "two: remove that library's hooks before tier.wrap, or leave the model to it"
            )


def _check_hooks(module: nn.Module, what: str) -> None:
    """Refuses a module that another library moves in and out of memory.

    Such a library keeps its hooks in an attribute of the module (such as ``_hf_hook``): one hook,
    or an object with several in ``hooks``. It may have copies of the weights, which would replace
    the trained ones with every call.
    """
    for name, value in vars(module).items():
        if not name.endswith("_hook"):
            continue
        hooks = getattr(value, "hooks", ())
        for hook in [value, *(hooks.values() if isinstance(hooks, dict) else hooks)]:
            if "offload" in type(hook).__name__.lower() or getattr(hook, "offload", None) is True:
                raise WrapError(
                    f"{what} is offloaded by another library already ({type(hook).__name__} in "
                    f"its attribute {name!r}); use one of the two: remove that library's hooks "
                    "before tier.wrap, or leave this module to it"
                )


def _check_parameter(found: Found, manager_id: int) -> None:
    param, what = found.tensor, f"parameter {found.name!r}"
    if isinstance(param, UninitializedParameter):
        raise WrapError(
            f"{what} has no shape yet; run one batch through the module before tier.wrap"
        )
    if param.is_meta:
        raise WrapError(
            f"{what} is on the meta device and has no values; load its weights first "
            "(module.to_empty and load_state_dict)"
        )
    if (
        type(param) not in (nn.Parameter, torch.Tensor)
        and hasattr(param, "__torch_dispatch__")
        and (type(param).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl)
    ):
        why = why_not_wrapped(param)
        if why is not None:
            raise WrapError(
                f"{what} is a {type(param).__name__}, a tensor with others inside, whose bytes "
                f"tiermem cannot move: {why}; wrap a model that is neither sharded nor quantized "
                "in this way"
            )
        for path, tensor in insides(param):
            _refuse_owned(f"{what[:-1]}{path}'", tensor, manager_id)
    if param.layout is not torch.strided:
        raise WrapError(f"{what} is {param.layout}; only dense parameters can be tiered")
    if param.is_inference():
        raise WrapError(f"{what} was made in inference_mode; build the module outside it")
    if not param.is_leaf:
        raise WrapError(f"{what} is not a leaf of autograd; assign it as an nn.Parameter")
    _refuse_owned(what, param, manager_id)


def _refuse_owned(what: str, param: torch.Tensor, manager_id: int) -> None:
    owner = owners.get(param)
    if owner is not None:
        whose = "this TierManager" if owner == manager_id else "another TierManager"
        raise WrapError(
            f"{what} is in {whose} already; call its tier.unwrap(module) first, {_OR_AS_ONE}"
        )


def is_uninitialized(tensor: torch.Tensor) -> bool:
    """Whether a buffer has no memory of its own kind to move."""
    return isinstance(tensor, UninitializedBuffer) or tensor.is_meta


def can_move(found: Found) -> bool:
    """Whether a buffer can live in a block."""
    return is_ordinary(found) and found.tensor.numel() > 0 and found.tensor.shape != (1,)


def may_grow(found: Found) -> bool:
    """Whether a buffer may be resized in place, which in a block would overwrite its neighbours.

    An observer's minima have no elements before it has seen its channels, and the scale of its fake
    quantization has one.
    """
    return is_ordinary(found) and not can_move(found)


def is_made_in(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is a plain tensor on a device."""
    there = tensor.device
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and there.type == device.type
        and device.index in (None, there.index)
    )


def is_ordinary(found: Found) -> bool:
    """Whether a buffer is a tensor whose bytes can be moved."""
    tensor = found.tensor
    return (
        not is_uninitialized(tensor)
        and tensor.layout is torch.strided
        and type(tensor) in (torch.Tensor, nn.Buffer)
        and not tensor.requires_grad
        and not tensor.is_inference()
    )


def link_shared(params: list[Found]) -> None:
    """Finds distinct parameters over the same memory.

    Sets ``same_as`` if they cover exactly the same elements.

    Raises:
        WrapError: If two overlap partly.
    """
    for (start, end, first), (start2, end2, second) in _overlaps(params):
        a, b = first.tensor, second.tensor
        same = (start, end) == (start2, end2) and a.shape == b.shape and a.dtype == b.dtype
        if not same or a.stride() != b.stride():
            raise WrapError(
                f"parameters {first.name!r} and {second.name!r} share part of their memory; "
                "make them one parameter, or clone one of them before tier.wrap"
            )
        second.same_as = first.same_as or first


def carried(found: Found, model: nn.Module) -> list[torch.Tensor]:
    """Returns tensors over exactly the memory of a parameter, which have to move with it.

    They are attributes of the parameter, of its modules, and of plain objects in these (such as the
    codes of a quantized weight). Otherwise they would keep the parameter's memory allocated.
    """
    param = found.tensor
    if param.is_meta or not param.numel():
        return []
    modules = [vars(model.get_submodule(name)) for name, _ in found.places]
    objects = [
        _attributes(value)
        for names in modules
        for value in names.values()
        if not isinstance(value, nn.Module | torch.Tensor)
    ]
    every = {id(v): v for names in (vars(param), *modules, *objects) for v in names.values()}
    return [v for v in every.values() if v is not param and _is_alias(v, param)]


def _attributes(value: Any) -> dict[str, Any]:
    names = getattr(value, "__dict__", None)
    return names if isinstance(names, dict) else {}


def _is_alias(value: Any, param: torch.Tensor) -> bool:
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and not value.requires_grad
        and not value.is_inference()
        and (value.device, value.dtype, value.shape) == (param.device, param.dtype, param.shape)
        and value.stride() == param.stride()
        and value.data_ptr() == param.data_ptr()
    )


def of_scripts(model: nn.Module) -> set[int]:
    """Returns the ids of buffers of scripted code, whose operations cannot be intercepted."""
    scripts = [part for part in model.modules() if isinstance(part, torch.jit.ScriptModule)]
    return {id(buffer) for part in scripts for buffer in part._buffers.values()}


def set_apart(params: list[Found], buffers: list[Found]) -> set[int]:
    """Returns the ids of buffers that share memory with each other; these do not move.

    Raises:
        WrapError: If one shares memory with a parameter, which moves.
    """
    found = set[int]()
    own = {id(buffer.tensor) for buffer in buffers}
    for (_, _, first), (_, _, second) in _overlaps([*params, *buffers]):
        both = {id(first.tensor), id(second.tensor)}
        if len(both & own) == 1:
            param, buffer = (second, first) if id(first.tensor) in own else (first, second)
            raise WrapError(
                f"buffer {buffer.name!r} looks into the memory of parameter {param.name!r}, and "
                "would not have what is written there once that is in the tiers; clone it before "
                "tier.wrap, or use the parameter itself in its place"
            )
        found |= both & own
    return found


_Span = tuple[int, int, Found]


def _overlaps(tensors: list[Found]) -> Iterator[tuple[_Span, _Span]]:
    """Yields tensors that overlap, each with the one before it that reaches furthest."""
    spans: dict[int, list[_Span]] = {}
    for found in tensors:
        tensor = found.tensor
        if tensor.numel() == 0 or not is_dense(tuple(tensor.shape), tensor.stride()):
            continue
        start = tensor.data_ptr()
        end = start + tensor.numel() * tensor.element_size()
        spans.setdefault(tensor.untyped_storage().data_ptr(), []).append((start, end, found))
    for members in spans.values():
        members.sort(key=lambda span: (span[0], span[1]))
        first = members[0]
        for span in members[1:]:
            if span[0] < first[1]:
                yield first, span
            if span[1] > first[1]:
                first = span
