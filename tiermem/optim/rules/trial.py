"""A context in which an optimizer class is tried without changing the process's state.

Random numbers come from generators of the trial, so other threads' numbers are not affected. Code
that the class has compiled runs uncompiled: a step on tiny tensors is not worth minutes of
compiling. Collectives in which processes have different roles are refused: each process would find
something else, and wait for the others. All of this affects the calling thread only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._guards import TracingContext, tracing
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily

from tiermem.runtime.base.functorch import outside_inference

_PLAIN = (torch.Tensor, nn.Parameter)
_AS_DEFAULTS = torch.Tag.nondeterministic_seeded
_EXCHANGES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of collectives."""

_ALIKE = ("allreduce", "all_reduce", "barrier", "monitored_barrier", "wait", "_wrap")
"""Collectives in which each process has the same role."""


class ExchangeError(Exception):
    """What is tried is distributed among processes."""


class Draws(TorchDispatchMode):
    """Gives operations that draw random numbers separate generators, inside ``with``.

    Attributes:
        seen: Whether any numbers were drawn.
    """

    def __init__(self) -> None:
        """Starts without generators."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False
        self._seed = 0
        self._generators: dict[torch.device, torch.Generator] = {}

    def seed(self, seed: int) -> None:
        """Seeds all generators of the trial again."""
        self._seed = seed
        self._generators.clear()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation; one that draws from torch's generators uses those of the trial.

        Raises:
            ExchangeError: If it is a collective in which processes have different roles.
        """
        if func.namespace in _EXCHANGES and not func.overloadpacket.__name__.startswith(_ALIKE):
            raise ExchangeError(func.name())
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a subclass unwraps itself, and calls again with plain tensors
        kwargs = dict(kwargs or {})
        if _AS_DEFAULTS not in func.tags:
            return func(*args, **kwargs)
        device = _device_of(args, kwargs)
        given = next((a for a in args if isinstance(a, torch.Generator)), kwargs.get("generator"))
        if given is not None and given is not _default_generator(device):
            return func(*args, **kwargs)  # a generator of the class's own
        self.seen = True
        if device.type == "meta":
            return func(*args, **kwargs)  # draws nothing
        return _drawn(func, args, kwargs, self._generator(device))

    def _generator(self, device: torch.device) -> torch.Generator:
        found = self._generators.get(device)
        if found is None:
            found = self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return found


def _device_of(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    for value in (kwargs.get("device"), *args):
        if isinstance(value, torch.device):
            return value
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.device("cpu")


def _default_generator(device: torch.device) -> torch.Generator | None:
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda" and torch.cuda.is_initialized():
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return None


def _drawn(func: Any, args: Any, kwargs: dict[str, Any], generator: torch.Generator) -> Any:
    """Runs an operation that draws, with a generator."""
    if any(argument.name == "generator" for argument in func._schema.arguments):
        return func(*args, **{**kwargs, "generator": generator})
    packet, overload = func.overloadpacket, func._schema.overload_name
    other = f"{overload}_generator" if overload else "generator"
    if other in packet.overloads():
        return getattr(packet, other)(*args, **{**kwargs, "generator": generator})
    name = packet.__name__
    if name in ("rand_like", "randn_like", "randint_like"):
        empty = torch.ops.aten.empty_like.default(args[0], **kwargs)
        if name == "rand_like":
            return empty.uniform_(generator=generator)
        if name == "randn_like":
            return empty.normal_(generator=generator)
        low, high = args[1:] if len(args) > 2 else (0, args[1])
        return empty.random_(low, high, generator=generator)
    raise NotImplementedError(f"it draws random numbers by {func}, which takes no generator")


@contextmanager
def trial() -> Iterator[Draws]:
    """Returns a context for trying a class; autograd is enabled in it, as by default."""
    draws = Draws()
    with ExitStack() as stack:
        stack.enter_context(outside_inference())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(tracing(_uncompiled()))
        stack.enter_context(draws)
        yield draws


@contextmanager
def undispatched() -> Iterator[None]:
    """Returns a context for a trial of a class that draws no random numbers.

    Below a dispatch mode torch does not count the writes of kernels that write several tensors.
    """
    with trial(), _pop_mode_temporarily():
        yield


def _uncompiled() -> TracingContext:
    """Returns a context of torch's compiler in which compiled functions run uncompiled.

    The compiler never compiles inside code that it runs as a kernel itself. If a version of torch
    does not check that, it finds the dispatch mode of :class:`Draws`, and does not compile either.
    """
    context = TracingContext(None)
    context.fake_mode = SimpleNamespace(in_kernel_invocation=True, shape_env=None)  # type: ignore[assignment]
    return context
