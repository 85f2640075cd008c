"""The names of models, parameters, classes and dtypes in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tiermem.errors import CheckpointError
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.group import Group
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.nn.tensors.shells import insides
from tiermem.nn.wrap.wrapped import WrappedModel
from tiermem.optim.contents import Contents
from tiermem.optim.tiered import TieredOptimizer


@dataclass(slots=True, eq=False)
class Named:
    """A tensor of a model.

    Attributes:
        name: Name in ``state_dict()``.
        tensor: The tensor; bytes of a managed one may be in any tier.
        persistent: Whether it is in ``state_dict()`` at all.
    """

    name: str
    tensor: torch.Tensor
    persistent: bool


def names_of(model: nn.Module) -> tuple[list[Named], dict[str, str]]:
    """Returns the tensors of a model, each once, and their other names."""
    found: dict[int, Named] = {}
    aliases: dict[str, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for which in ("_parameters", "_buffers"):
            for own, tensor in module.__dict__[which].items():
                if tensor is None:
                    continue
                kept = which == "_parameters" or own not in module._non_persistent_buffers_set
                for path, inside in insides(tensor):
                    name = (f"{prefix}.{own}" if prefix else own) + path
                    first = found.get(id(inside))
                    if first is None:
                        found[id(inside)] = Named(name, inside, kept)
                    elif first.name != name:
                        aliases[name] = first.name
    return list(found.values()), aliases


@dataclass(slots=True, eq=False)
class ModelNames:
    """The tensors of a wrapped model, by name.

    Attributes:
        wrapped: The model.
        folder: The folder of its files in the checkpoint; empty for the only one.
        tensors: Its tensors, each once, without those that share their bytes with another.
        aliases: Other names, and the name in the files.
        entries: Its managed parameters by the id of the tensor.
    """

    wrapped: WrappedModel
    folder: str
    tensors: list[Named]
    aliases: dict[str, str]
    entries: dict[int, Entry]

    @classmethod
    def of(cls, wrapped: WrappedModel, folder: str) -> ModelNames:
        """Returns the names of a model."""
        for group in wrapped.groups:
            group.take_in()
        tensors, aliases = names_of(wrapped.model)
        entries = {id(entry.param): entry for entry in wrapped.entries}
        first: dict[tuple[int, int], str] = {}
        distinct = []
        for named in tensors:  # other parameters may share the same bytes
            entry = entries.get(id(named.tensor))
            if entry is not None:
                name = first.setdefault((entry.group.block.id, entry.index), named.name)
                if name != named.name:
                    aliases[named.name] = name
                    continue
            distinct.append(named)
        for alias, name in aliases.items():
            aliases[alias] = aliases.get(name, name)
        return cls(wrapped, folder, distinct, aliases, entries)

    def places(self) -> dict[int, tuple[Group, int]]:
        """Returns block and number of each managed tensor that is not lent, by its id.

        A buffer that stays in HBM and was given other memory (``buffer.data = ...``) is no longer
        in its block.
        """
        groups = self.wrapped.every_group()
        members = [(g, m) for g in groups for m in (*g.entries, *g.buffers)]
        return {
            id(m.tensor): (g, m.index)
            for g, m in members
            if not (m.materialized or (g.stays and not g.pointing.has_bytes_of(m)))
        }

    def keys(self) -> dict[int, str]:
        """Returns each parameter's name in the whole checkpoint, by its id."""
        found: dict[int, str] = {}
        for name, param in self._all_params():
            found.setdefault(id(param), self.folder + name)
        return found

    def _all_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, module in self.wrapped.model.named_modules(remove_duplicate=False):
            for own, param in module.__dict__["_parameters"].items():
                for path, inside in [] if param is None else insides(param):
                    yield (f"{prefix}.{own}" if prefix else own) + path, inside


def models_of(runtime: ModuleRuntime) -> list[ModelNames]:
    """Returns the wrapped models in the order in which they were wrapped.

    Raises:
        CheckpointError: If there is none.
    """
    wrapped = list(runtime.models.values())
    if not wrapped:
        raise CheckpointError(
            "no model is wrapped in this TierManager, so there is nothing to save or to load into: "
            "call tier.wrap(model) first"
        )
    several = len(wrapped) > 1
    return [ModelNames.of(w, f"model-{n}/" if several else "") for n, w in enumerate(wrapped)]


def optimizers_of(runtime: ModuleRuntime) -> list[TieredOptimizer]:
    """Returns the open optimizers, in the order in which they were created.

    One whose models were all unwrapped is left out: it cannot continue.
    """
    found = [keeper.optimizer for keeper in runtime.keepers]
    ours = [optimizer for optimizer in found if isinstance(optimizer, TieredOptimizer)]
    return [optimizer for optimizer in ours if not optimizer.is_left()]


def keys_of(models: Sequence[ModelNames], optimizers: Sequence[Contents]) -> dict[int, str]:
    """Returns each parameter's name, by its id; also of those that are in no model."""
    found: dict[int, str] = {}
    for model in models:
        found = {**model.keys(), **found}
    for number, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.groups):
            for i, param in enumerate(group["params"]):
                found.setdefault(id(param), f"outside.{number}.{g}.{i}")
    return found


def class_name(value: type) -> str:
    """Returns the full name of a class."""
    return f"{value.__module__}.{value.__qualname__}"


def name_of(dtype: torch.dtype | None) -> str | None:
    """Returns the name of a dtype, None for none."""
    return None if dtype is None else str(dtype).removeprefix("torch.")
