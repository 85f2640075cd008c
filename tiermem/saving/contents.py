"""The mapping between blocks in the tiers and tensors of a checkpoint.

Tensors of models have the names of ``state_dict()``. The others are called
``optimizer.0.exp_avg.PARAMETER``, ``optimizer.0.master.PARAMETER``, ``gradient.PARAMETER``,
``buffer.NAME`` (buffers that are not persistent), ``extra.PATH`` and ``rng.NAME``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from tiermem.core.block import Block
from tiermem.errors import CheckpointError
from tiermem.nn.compat.outside import outside
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.group import Group
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.nn.tensors.lazy import LazyTensor, is_gone
from tiermem.nn.wrap.wrapped import WrappedModel
from tiermem.optim.tiered import Contents, TieredOptimizer
from tiermem.optim.units.master import Masters
from tiermem.optim.units.parted import PartedUnit
from tiermem.optim.units.unit import StepUnit
from tiermem.runtime.manager import BlockManager
from tiermem.saving.layout import Spec, dtype_name
from tiermem.saving.values import encode

Run = tuple[str, int, torch.Tensor]
"""Key of a tensor in the checkpoint, first byte of a run in it, and the run's elements."""


class Source(Protocol):
    """Something that has tensors of a checkpoint.

    Attributes:
        block: The block that they are in; None for ordinary memory.
    """

    block: Block | None

    def runs(self) -> Iterator[Run]:
        """Yields the tensors as they are now; the manager's lock is held, and none is kept."""
        ...


@dataclass(slots=True, eq=False)
class BlockSource:
    """Tensors of one block.

    Attributes:
        manager: Of the block.
        block: The block.
        picks: Number of a tensor of it, its key, and its first byte there.
    """

    manager: BlockManager
    block: Block | None
    picks: list[tuple[int, str, int]] = field(default_factory=list)

    def runs(self) -> Iterator[Run]:
        """Yields the tensors; see :class:`Source`."""
        if self.block is None or not self.picks:
            return
        views = views_of(self.manager, self.block)
        for index, key, begin in self.picks:
            yield key, begin, views[index]


@dataclass(slots=True, eq=False)
class LooseSource:
    """One tensor in ordinary memory.

    Attributes:
        key: In the checkpoint.
        tensor: The tensor.
        block: None.
    """

    key: str
    tensor: torch.Tensor
    block: Block | None = None

    def runs(self) -> Iterator[Run]:
        """Yields the tensor."""
        yield self.key, 0, self.tensor


@dataclass(slots=True, eq=False)
class MasterSource:
    """The masters of a unit, or of a part of one.

    Where other code wrote the weights they are saved as they are, and follow them at the next
    step, before or after a load.

    Attributes:
        manager: Of the blocks.
        masters: The masters.
        weight: Returns the elements of the weight of one of the unit's parameters.
        picks: Parameter, key of its master, and its first byte there.
        block: The block of the masters; None where they are in ordinary memory.
    """

    manager: BlockManager
    masters: Masters
    weight: Callable[[torch.Tensor], torch.Tensor]
    picks: list[tuple[torch.Tensor, str, int]]
    block: Block | None = None

    def plain(self) -> BlockSource | None:
        """Returns the masters as tensors of their block, where all of them are in it."""
        found = [self.masters.index_of(param) for param, _, _ in self.picks]
        picks = [
            (index, key, begin)
            for index, (_, key, begin) in zip(found, self.picks, strict=True)
            if index is not None
        ]
        if self.block is None or len(picks) < len(self.picks):
            return None
        return BlockSource(self.manager, self.block, picks)

    def runs(self) -> Iterator[Run]:
        """Yields the masters; one that is only the cast of its weight is made from that."""
        masters = self.masters
        stored: Sequence[torch.Tensor] = ()
        if self.block is not None and masters.made:
            stored = views_of(self.manager, self.block)
        for param, key, begin in self.picks:
            kept = masters.kept(param, stored)
            if kept is None:
                kept = self.weight(param).to(masters.dtype)
            yield key, begin, kept


def views_of(manager: BlockManager, block: Block) -> list[torch.Tensor]:
    """Returns a block's tensors as they are now; the lock is held.

    Raises:
        StorageError: If its bytes cannot be read.
    """
    manager.parts.deferred.pay(block.id)
    return manager.block_io.views(block)


@dataclass(slots=True, eq=False)
class Named:
    """A tensor of a model.

    Attributes:
        name: In ``state_dict()``.
        tensor: The tensor; bytes of a managed one may be in any tier.
        persistent: Whether it is in ``state_dict()`` at all.
    """

    name: str
    tensor: torch.Tensor
    persistent: bool


def names_of(model: nn.Module) -> tuple[list[Named], dict[str, str]]:
    """Returns the tensors of a model, each once, and other names of theirs."""
    found: dict[int, Named] = {}
    aliases: dict[str, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for which in ("_parameters", "_buffers"):
            for own, tensor in module.__dict__[which].items():
                if tensor is None:
                    continue
                name = f"{prefix}.{own}" if prefix else own
                first = found.get(id(tensor))
                if first is None:
                    kept = which == "_parameters" or own not in module._non_persistent_buffers_set
                    found[id(tensor)] = Named(name, tensor, kept)
                elif first.name != name:
                    aliases[name] = first.name
    return list(found.values()), aliases


@dataclass(slots=True, eq=False)
class ModelNames:
    """The tensors of a wrapped model, by name.

    Attributes:
        wrapped: The model.
        folder: Where its files are in the checkpoint; empty for the only one.
        tensors: Its tensors, each once; one that shares its bytes with another is not among them.
        aliases: Other names, and the name that the files have.
        entries: Its managed parameters by the id of the tensor.
    """

    wrapped: WrappedModel
    folder: str
    tensors: list[Named]
    aliases: dict[str, str]
    entries: dict[int, Entry]

    @classmethod
    def of(cls, wrapped: WrappedModel, folder: str) -> ModelNames:
        """Looks at a model."""
        tensors, aliases = names_of(wrapped.model)
        entries = {id(entry.param): entry for entry in wrapped.entries}
        first: dict[tuple[int, int], str] = {}
        distinct = []
        for named in tensors:  # other parameters may look at the very same bytes
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
        """Returns block and number of each managed tensor that is not lent, by its id."""
        resident = self.wrapped.resident
        groups = [*self.wrapped.groups, *([resident] if resident is not None else [])]
        members = [(g, m) for g in groups for m in (*g.entries, *g.buffers)]
        return {id(m.tensor): (g, m.index) for g, m in members if not m.materialized}

    def keys(self) -> dict[int, str]:
        """Returns each parameter's name in the whole checkpoint, by its id."""
        found: dict[int, str] = {}
        for name, param in self._all_params():
            found.setdefault(id(param), self.folder + name)
        return found

    def _all_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, module in self.wrapped.model.named_modules(remove_duplicate=False):
            for own, param in module.__dict__["_parameters"].items():
                if param is not None:
                    yield (f"{prefix}.{own}" if prefix else own), param


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
    """Returns the optimizers that are open, in the order in which they were made."""
    found = [keeper.optimizer for keeper in runtime.keepers]
    return [optimizer for optimizer in found if isinstance(optimizer, TieredOptimizer)]


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


class Collector:
    """Lists everything that a checkpoint has.

    Attributes:
        models: The wrapped models.
        model_specs: Tensors of each model's own files.
        specs: All other tensors.
        sources: What holds them.
        manifest: What is no tensor.
    """

    def __init__(self, runtime: ModuleRuntime) -> None:
        """Lists the wrapped models; the rest is for :meth:`collect`."""
        self._runtime = runtime
        self._manager = runtime.manager
        self.models = models_of(runtime)
        self.model_specs: list[list[Spec]] = [[] for _ in self.models]
        self.specs: list[Spec] = []
        self.sources: list[Source] = []
        self.manifest: dict[str, Any] = {}
        self._keys: dict[int, str] = {}
        self._taken: set[str] = set()

    def collect(self, optimizers: Sequence[Contents], **values: Any) -> None:
        """Lists models, optimizers, gradients and values.

        Args:
            optimizers: The contents of the optimizers.
            **values: Plain values and tensors, each by its name.

        Raises:
            CheckpointError: Naming what cannot be saved.
        """
        self._keys = keys_of(self.models, optimizers)
        for specs, model in zip(self.model_specs, self.models, strict=True):
            self._take_model(specs, model)
        self.manifest["models"] = [self._describe(model) for model in self.models]
        self._take_outside(optimizers)
        self.manifest["optimizers"] = [self._optimizer(*each) for each in enumerate(optimizers)]
        self.manifest["gradients"] = self._gradients(optimizers)
        for name, value in values.items():
            self.manifest[name] = encode(value, name, self._put)

    # -- models ----------------------------------------------------------

    def _take_model(self, specs: list[Spec], model: ModelNames) -> None:
        places = model.places()
        sources: dict[int, BlockSource] = {}
        for named in model.tensors:
            key = self._file_key(model, named)
            folder = model.folder if named.persistent else ""
            spec = self._spec(key.removeprefix(folder), named.tensor, folder)
            (specs if named.persistent else self.specs).append(spec)
            place = places.get(id(named.tensor))
            if place is None:
                self.sources.append(LooseSource(spec.key, self._dense(named.tensor, spec.key)))
                continue
            group, index = place
            source = sources.get(group.block.id)
            if source is None:
                source = sources[group.block.id] = BlockSource(self._manager, group.block)
                self.sources.append(source)
            source.picks.append((index, spec.key, 0))

    @staticmethod
    def _file_key(model: ModelNames, named: Named) -> str:
        """Returns the name of a model's tensor in the whole checkpoint."""
        return f"{'' if named.persistent else 'buffer.'}{model.folder}{named.name}"

    def _describe(self, model: ModelNames) -> dict[str, Any]:
        own = {}
        for name, module in model.wrapped.model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                what = f"get_extra_state() of module {name!r}"
                own[name] = encode(outside(module.get_extra_state), what, self._put)
        return {
            "folder": model.folder,
            "class": class_name(type(model.wrapped.model)),
            "tensors": {named.name: self._file_key(model, named) for named in model.tensors},
            "aliases": model.aliases,
            "extra_state": own,
        }

    def _take_outside(self, optimizers: Sequence[Contents]) -> None:
        """Takes parameters that optimizers step and no model has."""
        taken = set()
        for optimizer in optimizers:
            for param in (p for group in optimizer.groups for p in group["params"]):
                key = self._keys[id(param)]
                if key.startswith("outside.") and key not in taken:
                    taken.add(key)
                    self._put_at(key, param)

    # -- optimizers ------------------------------------------------------

    def _optimizer(self, number: int, found: Contents) -> dict[str, Any]:
        states: dict[str, Any] = {}
        masters: list[str] = []
        for unit in found.units:
            unit.flush()
            self._take_state(number, unit, found.state, states)
            self._take_masters(number, unit, masters)
        what = f"optimizer {number}"
        return {
            "class": class_name(found.cls),
            "groups": [
                {
                    "params": [self._keys[id(param)] for param in group["params"]],
                    "settings": encode(
                        {k: v for k, v in group.items() if k != "params"},
                        f"{what}.group.{g}",
                        self._put,
                    ),
                }
                for g, group in enumerate(found.groups)
            ],
            "state": states,
            "masters": masters,
            "master_dtype": name_of(found.master_dtype),
            "grad_dtype": name_of(found.grad_dtype),
            "grad_factor": encode(found.grad_factor, f"{what}.grad_factor", self._put),
            "backwards": found.backwards,
        }

    def _take_state(
        self, number: int, unit: StepUnit, state: dict[Any, Any], states: dict[str, Any]
    ) -> None:
        placed = _placed(unit, self._manager)
        used = []
        for param, _ in unit.members:
            if not state.get(param):
                continue
            mine = states[self._keys[id(param)]] = {}
            for key, value in state[param].items():
                name = f"optimizer.{number}.{key}.{self._keys[id(param)]}"
                if isinstance(value, LazyTensor):
                    if value._shelled:
                        raise CheckpointError(
                            f"{name}: the state of this optimizer is of a tensor class that a "
                            "checkpoint cannot keep; save optimizer.state_dict() with torch.save"
                        )
                    self.specs.append(Spec(name, value._dtype, tuple(value.shape)))
                    mine[key] = {"$tensor": name}
                    used.append((param, key, name, value._dtype.itemsize))
                else:
                    mine[key] = encode(value, name, self._put)
        for source, places in placed:
            for param, key, name, itemsize in used:
                for index, begin in places.get((id(param), key), ()):
                    source.picks.append((index, name, begin * itemsize))
            self.sources.append(source)

    def _take_masters(self, number: int, unit: StepUnit, names: list[str]) -> None:
        masters = unit.masters
        if masters is None:
            return
        keys = {}
        for param in masters.params:
            keys[id(param)] = name = f"optimizer.{number}.master.{self._keys[id(param)]}"
            names.append(self._keys[id(param)])
            self.specs.append(Spec(name, masters.dtype, tuple(param.shape)))
        if not isinstance(unit, PartedUnit):
            picks = [(param, keys[id(param)], 0) for param in masters.params]
            weight = _Weights(self._manager, unit)
            self.sources.append(MasterSource(self._manager, masters, weight, picks, masters.block))
            return
        (param, _), (entry,) = unit.members[0], unit.entries
        for part in unit.parts:
            mine = part.unit.masters
            if mine is not None:
                run = _WeightRun(self._manager, unit, entry, part.begin, part.end)
                pick = (part.param, keys[id(param)], part.begin * masters.dtype.itemsize)
                self.sources.append(MasterSource(self._manager, mine, run, [pick], mine.block))

    # -- gradients -------------------------------------------------------

    def _gradients(self, optimizers: Sequence[Contents]) -> dict[str, str]:
        """Takes every gradient that is there; those in the tiers are settled."""
        found: dict[str, str] = {}
        entries = {id(e.param): e for model in self.models for e in model.wrapped.entries}
        params = {id(n.tensor): n.tensor for model in self.models for n in model.tensors}
        params |= {id(e.param): e.param for e in entries.values()}
        params |= {id(p): p for o in optimizers for group in o.groups for p in group["params"]}
        sources: dict[int, BlockSource] = {}
        for ident, param in params.items():
            entry = entries.get(ident)
            if entry is not None:
                self._runtime.grads.sync(entry)
            with torch._C.DisableTorchFunctionSubclass():
                gradient = param.grad
            if gradient is None or is_gone(gradient):  # a step inside backward has used it
                continue
            key = self._keys[ident]
            name = found[key] = f"gradient.{key}"
            if entry is None or entry.unit is None or not isinstance(gradient, LazyTensor):
                self._put_at(name, gradient)
                continue
            unit = entry.unit
            if unit.block.id not in sources:
                if unit.pending:
                    self._runtime.grads.open(unit)
                    self._manager.release(unit.block)
                sources[unit.block.id] = BlockSource(self._manager, unit.block)
                self.sources.append(sources[unit.block.id])
            spec = unit.block.tensors[entry.unit_index]
            dtype = spec.dtype if isinstance(spec.dtype, torch.dtype) else param.dtype
            self.specs.append(Spec(name, dtype, tuple(param.shape)))
            sources[unit.block.id].picks.append((entry.unit_index, name, 0))
        return found

    # -- tensors in ordinary memory --------------------------------------

    def _put(self, path: str, tensor: torch.Tensor) -> str:
        """Takes a tensor among plain values; returns its name, which nothing else has."""
        name = path
        while name in self._taken:
            name += "'"
        self._taken.add(name)
        self._put_at(name, tensor)
        return name

    def _put_at(self, name: str, tensor: torch.Tensor) -> None:
        self.specs.append(self._spec(name, tensor))
        self.sources.append(LooseSource(name, self._dense(tensor, name)))

    @staticmethod
    def _spec(name: str, tensor: torch.Tensor, folder: str = "") -> Spec:
        dtype_name(tensor.dtype, repr(name))
        return Spec(name, tensor.dtype, tuple(tensor.shape), folder)

    @staticmethod
    def _dense(tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Returns a tensor without its gradient's graph.

        Raises:
            CheckpointError: If it is sparse, has no bytes, or is of a class of its own.
        """
        with torch._C.DisableTorchFunctionSubclass():
            wrong = ""
            if tensor.layout is not torch.strided:
                wrong = f"has the layout {tensor.layout}"
            elif tensor.is_meta:
                wrong = "is on the meta device and has no values"
            elif type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
                wrong = f"is of the class {type(tensor).__name__}"
            if wrong:
                raise CheckpointError(f"{name!r} {wrong}; a checkpoint keeps plain dense tensors")
            return tensor.detach()


@dataclass(frozen=True, slots=True, eq=False)
class _Weights:
    """Returns the weights of a unit's parameters."""

    manager: BlockManager
    unit: StepUnit

    def __call__(self, param: torch.Tensor) -> torch.Tensor:
        for entry in self.unit.entries:
            if entry.param is param:
                return _weight_of(self.manager, self.unit, entry)
        return param.detach()


@dataclass(frozen=True, slots=True, eq=False)
class _WeightRun:
    """Returns a run of the weight of a unit that is stepped in parts."""

    manager: BlockManager
    unit: StepUnit
    entry: Entry
    begin: int
    end: int

    def __call__(self, _: torch.Tensor) -> torch.Tensor:
        whole = _weight_of(self.manager, self.unit, self.entry)
        return whole.reshape(-1)[self.begin : self.end]


def _weight_of(manager: BlockManager, unit: StepUnit, entry: Entry) -> torch.Tensor:
    if entry.materialized or unit.group is None:
        return entry.param.detach()
    return views_of(manager, unit.group.block)[entry.index]


Places = dict[tuple[int, str], list[tuple[int, int]]]
"""By a parameter's id and a key of its state: numbers of tensors of a block, and the first element
of each in the whole."""


def _placed(unit: StepUnit, manager: BlockManager) -> list[tuple[BlockSource, Places]]:
    """Returns the blocks of a unit's state, and what is where in them."""
    found = []
    for block, owner, begin in state_blocks(unit):
        places: Places = {}
        for place in owner.plain.places:
            param = unit.members[0][0] if owner is not unit else place.param
            places.setdefault((id(param), place.key), []).append((place.first, begin))
        found.append((BlockSource(manager, block), places))
    return found


def state_blocks(unit: StepUnit) -> Iterator[tuple[Block, StepUnit, int]]:
    """Yields each block of state of a unit, the unit of the part that has it, and where it begins.

    That is the number of its first element in the parameter.
    """
    if not isinstance(unit, PartedUnit):
        if unit.block is not None:
            yield unit.block, unit, 0
        return
    for part in unit.parts:
        if part.unit.block is not None:
            yield part.unit.block, part.unit, part.begin


def name_of(dtype: torch.dtype | None) -> str | None:
    """Returns the name of a dtype, None for none."""
    return None if dtype is None else str(dtype).removeprefix("torch.")
