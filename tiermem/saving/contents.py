"""The mapping between blocks in the tiers and tensors of a checkpoint.

Tensors of models have the names of ``state_dict()``. The others are called
``optimizer.0.exp_avg.PARAMETER``, ``optimizer.0.master.PARAMETER``, ``gradient.PARAMETER``,
``buffer.NAME`` (buffers that are not persistent), ``extra.PATH`` and ``rng.NAME``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tiermem.errors import CheckpointError
from tiermem.nn.compat.outside import outside
from tiermem.nn.groups.gradunit import GradRun
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.nn.tensors.lazy import LazyTensor, is_gone
from tiermem.optim.contents import Contents
from tiermem.optim.units.parted import PartedUnit
from tiermem.optim.units.unit import StepUnit
from tiermem.saving.layout import Spec, dtype_name
from tiermem.saving.names import ModelNames, Named, class_name, keys_of, models_of, name_of
from tiermem.saving.sources import (
    BlockSource,
    LooseSource,
    MasterSource,
    Source,
    WeightRun,
    Weights,
    placed_state,
)
from tiermem.saving.values import encode


class Collector:
    """Lists everything that a checkpoint has.

    Attributes:
        models: The wrapped models.
        model_specs: Tensors of each model's own files.
        specs: All other tensors.
        sources: The sources of all tensors.
        manifest: Everything that is not a tensor.
    """

    def __init__(self, runtime: ModuleRuntime) -> None:
        """Lists the wrapped models; :meth:`collect` does the rest."""
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
            **values: Plain values and tensors, by name.

        Raises:
            CheckpointError: With the name of what cannot be saved.
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
        """Collects parameters that optimizers step and no model has."""
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
            "state": {key: states[key] for key in self._in_order(found) if key in states},
            "masters": masters,
            "master_dtype": name_of(found.master_dtype),
            "grad_dtype": name_of(found.grad_dtype),
            "grad_factor": encode(found.grad_factor, f"{what}.grad_factor", self._put),
            "backwards": found.backwards,
        }

    def _in_order(self, found: Contents) -> list[str]:
        return [self._keys[id(p)] for p in found.state if id(p) in self._keys]

    def _take_state(
        self, number: int, unit: StepUnit, state: dict[Any, Any], states: dict[str, Any]
    ) -> None:
        placed = placed_state(unit, self._manager)
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
            weight = Weights(self._manager, unit)
            self.sources.append(MasterSource(self._manager, masters, weight, picks, masters.block))
            return
        (param, _), (entry,) = unit.members[0], unit.entries
        for part in unit.parts:
            mine = part.unit.masters
            if mine is not None:
                run = WeightRun(self._manager, unit, entry, part.begin, part.end)
                pick = (part.param, keys[id(param)], part.begin * masters.dtype.itemsize)
                self.sources.append(MasterSource(self._manager, mine, run, [pick], mine.block))

    # -- gradients -------------------------------------------------------

    def _gradients(self, optimizers: Sequence[Contents]) -> dict[str, str]:
        """Collects all gradients; those in the tiers are settled."""
        found: dict[str, str] = {}
        entries = {id(e.param): e for model in self.models for e in model.wrapped.entries}
        params = {id(n.tensor): n.tensor for model in self.models for n in model.tensors}
        params |= {id(e.param): e.param for e in entries.values()}
        params |= {id(p): p for o in optimizers for group in o.groups for p in group["params"]}
        sources: dict[int, BlockSource] = {}
        for ident, param in params.items():
            if ident not in self._keys:  # its module has been removed from the model
                continue
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
                if unit.awaits:
                    self._runtime.grads.settle_now(unit)
                mine = {block.id: BlockSource(self._manager, block) for block in unit.blocks}
                sources.update(mine)
                self.sources += mine.values()
            spec = unit.block.tensors[entry.unit_index]
            dtype = spec.dtype if isinstance(spec.dtype, torch.dtype) else param.dtype
            self.specs.append(Spec(name, dtype, tuple(param.shape)))
            for part in unit.parts:
                begin = part.begin * dtype.itemsize if isinstance(part, GradRun) else 0
                sources[part.block.id].picks.append((entry.unit_index, name, begin))
        return found

    # -- tensors in ordinary memory --------------------------------------

    def _put(self, path: str, tensor: torch.Tensor) -> str:
        """Collects a tensor among plain values; returns its unique name."""
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
            CheckpointError: If it is sparse, has no bytes, or is of a subclass.
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
