"""``deepspeed.zero``: makes models in host memory, and gives parameters as ordinary tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from tiermem import TieredOptimizer, TierManager

from . import notation, reading

T = TypeVar("T")


class OfParameters(Generic[T]):
    """What parameters belong to; keeps neither them nor that alive, which has them in turn."""

    def __init__(self) -> None:
        """Starts without parameters."""
        self._found = WeakIdKeyDictionary()

    def __setitem__(self, param: torch.Tensor, value: T) -> None:
        """Notes what a parameter belongs to."""
        self._found[param] = weakref.ref(value)

    def get(self, param: torch.Tensor) -> T | None:
        """Returns what a parameter belongs to; None for nothing, or where that is gone."""
        found: weakref.ref[T] | None = self._found.get(param)
        return None if found is None else found()


managed: OfParameters[TierManager] = OfParameters()
"""Parameters of every engine's model, and the manager that has them."""
optimizers: OfParameters[TieredOptimizer] = OfParameters()
"""The same parameters, and the engine's optimizer."""


class Init:
    """Makes modules in host memory, in the dtype that they will be trained in.

    Without it a model may be made on any device. With it, a model that is larger than the GPU is
    never on the GPU as a whole, and takes no more host memory than necessary.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *ignored: Any,
        config_dict_or_path: notation.Source | None = None,
        config: notation.Source | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        **also: Any,
    ) -> None:
        """Reads the dtype.

        Args:
            module: Stays as it is: ``initialize`` takes it.
            *ignored: DeepSpeed's settings of groups and devices.
            config_dict_or_path: The configuration.
            config: An old name for it.
            enabled: False to do nothing.
            dtype: The dtype of the modules; by default the configuration's, else torch's default.
            **also: Also ignored.
        """
        self._enabled = enabled
        self._dtype = dtype
        source = config if config_dict_or_path is None else config_dict_or_path
        if source is not None and dtype is None:
            found = reading.read(source)
            for section, half in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
                if found[f"{section}.enabled"] is True:
                    self._dtype = half
        self._stack = ExitStack()
        self._before: torch.dtype | None = None

    def __enter__(self) -> None:
        if not self._enabled:
            return
        self._stack.enter_context(torch.device("cpu"))
        if self._dtype is not None:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)

    def __exit__(self, *error: Any) -> None:
        if self._before is not None:
            torch.set_default_dtype(self._before)
            self._before = None
        self._stack.close()


class GatheredParameters:
    """Makes parameters ordinary tensors in host memory inside ``with``, and writes changes back."""

    def __init__(
        self,
        params: nn.Module | torch.Tensor | Iterable[torch.Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        """Notes which.

        Args:
            params: One, several, or a module's; those of no engine are ordinary anyway.
            modifier_rank: Changes are taken back whatever it is.
            fwd_module: Not needed.
            enabled: False to do nothing.
        """
        if isinstance(params, nn.Module):
            self._params = list(params.parameters())
        elif isinstance(params, torch.Tensor):
            self._params = [params]  # type: ignore[list-item]
        else:
            self._params = list(params)  # type: ignore[arg-type]
        self._enabled = enabled
        self._stack = ExitStack()

    def __enter__(self) -> None:
        if not self._enabled:
            return
        by_tier: dict[int, tuple[TierManager, list[nn.Parameter]]] = {}
        for param in self._params:
            tier = managed.get(param)
            if tier is not None and not tier.closed:
                by_tier.setdefault(id(tier), (tier, []))[1].append(param)
        for tier, params in by_tier.values():
            self._stack.enter_context(tier.materialize(params))

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing: a parameter may be used in any module."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing, for the same reason."""
