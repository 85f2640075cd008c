"""Modules that are put around a wrapped one, or into it, detected when this happens.

torch calls a hook for every module that becomes another's child. Four kinds of parents matter
here: a wrapped one, whose blocks the child's code may write; a ``DistributedDataParallel``,
which broadcasts buffers in C++, invisible to Python; a ``DataParallel``, which copies all weights
to several devices in each call; and the result of ``torch.compile``, if one graph of the whole is
requested.

The weights that a ``DistributedDataParallel`` sends to all processes when it is created, and when
its ``join()`` ends, are sent one by one here: all at once they would need room for the whole model.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable, Collection
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import utils
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel, distributed

from tiermem.errors import WrapError
from tiermem.nn.compat.compiler import WHOLE_GRAPH
from tiermem.nn.groups.away import group_of
from tiermem.nn.passes.reduced import ReducedGradients
from tiermem.nn.wrap.statedict import LoadAllInterceptor

_COMPILED = "OptimizedModule"
_MADE_ALIKE = "_sync_module_states"
"""The torch function that sends all weights and buffers from one process to the others."""
_make_all_alike: Callable[..., None] = getattr(distributed, _MADE_ALIKE)
_FRAMES = 5
_everybody: WeakSet[ReducedGradients] = WeakSet()
_replicas: WeakSet[DistributedDataParallel] = WeakSet()


def follow(reduced: ReducedGradients) -> None:
    """Notifies ``reduced`` of every ``DistributedDataParallel`` from now on."""
    _everybody.add(reduced)
    for place in (distributed, utils):
        setattr(place, _MADE_ALIKE, _make_alike)


def refuse_replica(model: nn.Module) -> None:
    """Refuses a model that a ``DistributedDataParallel`` contains before it is wrapped.

    It refers to the parameters for as long as it exists, so that no block could leave HBM, and
    broadcasts buffers wherever they are.

    Raises:
        WrapError: Always then, with advice.
    """
    if _is_replica(model):
        gc.collect()  # of one that is no longer used
        if _is_replica(model):
            raise WrapError(
                f"module {type(model).__name__!r} is in a DistributedDataParallel that was made "
                "before tier.wrap, beside which its weights cannot come and go; wrap first, and "
                "make that anew: DistributedDataParallel(tier.wrap(model))"
            )


def _make_alike(
    module: nn.Module,
    process_group: Any,
    broadcast_bucket_size: int,
    src: int,
    params_and_buffers_to_ignore: Collection[str],
    broadcast_buffers: bool = True,
) -> None:
    """Copies the weights and buffers of one process to all, in place of torch's function.

    Those of a wrapped model are sent tensor by tensor, each from a copy: its blocks may be
    different in another process, and a block may be used in place if HBM has no room for it.

    Args:
        module: The replicated module.
        process_group: The processes.
        broadcast_bucket_size: Bytes that torch sends at a time.
        src: The sending process, by its number in the group.
        params_and_buffers_to_ignore: Names of tensors that each process keeps unchanged.
        broadcast_buffers: Whether buffers are sent.
    """
    if not is_wrapped(module):
        _make_all_alike(
            module,
            process_group,
            broadcast_bucket_size,
            src,
            params_and_buffers_to_ignore,
            broadcast_buffers,
        )
        return
    named = [*module.named_parameters(), *(module.named_buffers() if broadcast_buffers else ())]
    receives = dist.get_rank(process_group) != src
    with torch.no_grad():
        for name, tensor in named:
            if name in params_and_buffers_to_ignore:
                continue
            # to the device: a block that is used in place gives a copy in host memory
            sent = tensor.clone().to(tensor.device)
            dist._broadcast_coalesced(  # type: ignore[attr-defined]
                process_group, [sent], broadcast_bucket_size, src
            )
            if receives:
                tensor.copy_(sent)
    for device in {tensor.device for _, tensor in named}:
        if device.type == "cuda":
            # some trainers create it on another stream than the one on which they use the model
            torch.cuda.current_stream(device).synchronize()


def _is_replica(model: nn.Module) -> bool:
    own = {id(param) for param in model.parameters()}
    return any(id(param) in own for replica in list(_replicas) for param in replica.parameters())


def _surrounded(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Checks a module that gets a child, and notifies observers of ``DistributedDataParallel``.

    Raises:
        CapacityError: If what a ``DistributedDataParallel`` broadcasts has no room in HBM.
        WrapError: If one graph is requested for a wrapped model, or copies of it on several
            devices, or the reduction of its parameters without its modules.
    """
    if child is None:
        return
    own = parent.__dict__.get(LoadAllInterceptor.method)
    if isinstance(own, LoadAllInterceptor):
        own.scope.wrapped.modules.joined(parent, child)
    if isinstance(parent, DistributedDataParallel):
        if isinstance(child, nn.ParameterList) and any(id(p) in group_of for p in child):
            raise WrapError(
                "a DistributedDataParallel around parameters of a wrapped model, without its "
                "modules, is not seen in its forwards (torch's replicate() makes one); put it "
                "around the model: DistributedDataParallel(tier.wrap(model))"
            )
        _replicas.add(parent)
        sends = _local_of_a_caller("forward_sync_buffers")  # the newer name
        if (_local_of_a_caller("broadcast_buffers") if sends is None else sends) is not False:
            for reduced in list(_everybody):
                reduced.hold_buffers(child)
    elif isinstance(parent, DataParallel) and is_wrapped(child):
        devices = _local_of_a_caller("device_ids") or ()
        if len(devices) > 1:
            raise WrapError(
                f"DataParallel copies all weights of a wrapped model to {len(devices)} devices in "
                "each call, where they have no tiers: name one with DataParallel(tier.wrap(model), "
                "device_ids=[0]), or run a process for each device with "
                "DistributedDataParallel(tier.wrap(model))"
            )
    elif type(parent).__name__ == _COMPILED and is_wrapped(child) and _is_whole():
        raise WrapError(f"torch.compile: {WHOLE_GRAPH}")


def is_wrapped(model: nn.Module) -> bool:
    """Whether any module of a tree is wrapped."""
    method = LoadAllInterceptor.method
    return any(isinstance(m.__dict__.get(method), LoadAllInterceptor) for m in model.modules())


def _is_whole() -> bool:
    """Whether the compiler that is being put around a module was asked for one graph.

    That is only visible in an argument of a function that is running (``dynamo_ctx``).
    """
    return bool(getattr(_local_of_a_caller("dynamo_ctx"), "fullgraph", False))


def _local_of_a_caller(name: str) -> Any:
    """Returns the local variable ``name`` of the nearest caller that has it; None for none."""
    frame: types.FrameType | None = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame is None:
            return None
        found: Any = frame.f_locals.get(name)
        if found is not None:
            return found
        frame = frame.f_back
    return None


_hook: Callable[..., Any] = _surrounded
register_module_module_registration_hook(_hook)
