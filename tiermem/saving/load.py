"""``tier.load``: restores a training run from a checkpoint, under any budgets.

Manifest, headers, names, shapes, dtypes and settings are checked before anything is changed. The
tensors are compared with their checksums as they are read, once: reading all of it twice would take
twice as long, for something that hardly ever happens. So a flipped bit is detected when a part has
already been loaded; the model then refuses to compute until a whole checkpoint has been loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from tiermem.config import parse_path
from tiermem.errors import CheckpointError
from tiermem.nn.compat.outside import outside
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.need import check_gradients
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.optim.contents import Contents
from tiermem.optim.tiered import TieredOptimizer
from tiermem.optim.units.part import Part
from tiermem.optim.units.parted import PartedUnit
from tiermem.optim.units.unit import StepUnit
from tiermem.runtime.base.functorch import outside_inference
from tiermem.saving.fill import (
    ParamState,
    Run,
    fill_group,
    fill_masters,
    fill_state,
    state_runs,
)
from tiermem.saving.folder import CheckpointFolder, told_of
from tiermem.saving.layout import Spec
from tiermem.saving.manifest import Checkpoint, open_checkpoint
from tiermem.saving.names import (
    ModelNames,
    class_name,
    keys_of,
    models_of,
    name_of,
    optimizers_of,
)
from tiermem.saving.reader import Need, TensorReader
from tiermem.saving.rng import restore_generators
from tiermem.saving.save import FILES
from tiermem.saving.values import decode


@dataclass(frozen=True, slots=True, eq=False)
class _Action:
    """Part of a load.

    Attributes:
        needs: The bytes that it reads, in order.
        make: Performs it.
    """

    needs: list[Need]
    make: Callable[[TensorReader], None]


def load_run(runtime: ModuleRuntime, path: str | os.PathLike[str]) -> Any:
    """Loads a checkpoint into the existing models and optimizers.

    Returns:
        The values that the user passed to the save.

    Raises:
        CheckpointError: If it does not fit; nothing is changed.
        IntegrityError: If a file differs from what was written.
        StorageError: If it cannot be read.
    """
    folder = CheckpointFolder(parse_path(path, "path", CheckpointError), FILES)
    with told_of(folder.path, "the checkpoint cannot be read:"):
        folder.recover()
    runtime.refuse_inside("tier.load()")
    runtime.backward.end()
    with open_checkpoint(folder) as checkpoint:
        return _Loader(runtime, checkpoint).load()


class _Loader:
    """Loads one checkpoint."""

    def __init__(self, runtime: ModuleRuntime, checkpoint: Checkpoint) -> None:
        self._runtime = runtime
        self._manager = runtime.manager
        self._checkpoint = checkpoint
        self._manifest = checkpoint.manifest
        self._models = models_of(runtime)
        self._optimizers: list[TieredOptimizer] = optimizers_of(runtime)
        self._params: dict[str, torch.Tensor] = {}

    def load(self) -> Any:
        """Checks everything that can be known beforehand, then loads."""
        tensors = self._check_models()
        self._check_optimizers()
        values = self._values()
        found = [
            optimizer.contents_to_replace(self._numbered(saved))
            for optimizer, saved in zip(self._optimizers, self._manifest["optimizers"], strict=True)
        ]
        self._params = _by_key(keys_of(self._models, found), self._models, found)
        self._check_gradients()
        actions = [
            *self._of_models(tensors),
            *self._of_outside(),
            *(a for n, contents in enumerate(found) for a in self._of_optimizer(n, contents)),
            *self._of_gradients(),
        ]
        self._runtime.models.half_loaded = "the load was cut short"
        try:
            self._settle_groups(found, values)
            with outside_inference(), torch.no_grad():
                self._make(actions)
        except Exception as error:
            self._runtime.models.half_loaded = str(error)
            raise
        self._settle(values)
        self._runtime.models.half_loaded = ""
        restore_generators(values["rng"], self._manager.parts.device)
        return values["extra"]

    def _make(self, actions: Sequence[_Action]) -> None:
        needs = [need for action in actions for need in action.needs]
        reader = TensorReader(self._checkpoint.stored, self._checkpoint.checks, needs)
        try:
            for action in actions:
                action.make(reader)
        finally:
            reader.close()

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"the checkpoint {self._checkpoint.path} {what}; nothing was loaded")

    # -- models ----------------------------------------------------------

    def _check_models(self) -> list[list[tuple[torch.Tensor, Run]]]:
        """Returns, for each tensor of each model, the checkpoint's tensor to load."""
        saved = self._manifest["models"]
        if len(saved) != len(self._models):
            raise self._error(
                f"has {len(saved)} models, and {len(self._models)} are wrapped in this TierManager"
            )
        return [self._check_model(*pair) for pair in zip(self._models, saved, strict=True)]

    def _check_model(
        self, model: ModelNames, saved: dict[str, Any]
    ) -> list[tuple[torch.Tensor, Run]]:
        keys = {**saved["tensors"]}
        for alias, name in saved["aliases"].items():
            keys[alias] = saved["tensors"][name]
        mine = {named.name for named in model.tensors}
        missing = sorted(mine - keys.keys())
        unexpected = sorted(saved["tensors"].keys() - mine - model.aliases.keys())
        split = sorted(name for name in model.aliases if name in saved["tensors"])
        if missing:
            raise self._error(f"lacks {missing[0]!r} and {len(missing) - 1} more of the model")
        if unexpected:
            raise self._error(
                f"has {unexpected[0]!r} and {len(unexpected) - 1} more that the model has not"
            )
        if split:
            raise self._error(f"has {split[0]!r} apart, which the model shares with another")
        return [
            (named.tensor, self._fitting(keys[named.name], named.tensor)) for named in model.tensors
        ]

    def _fitting(self, key: str, tensor: torch.Tensor, name: str = "") -> Run:
        """Returns a tensor of the checkpoint as a whole, after comparing shape and dtype.

        Raises:
            CheckpointError: If they differ.
        """
        found = self._spec(key)
        with torch._C.DisableTorchFunctionSubclass():
            wanted = Spec(name or key, tensor.dtype, tuple(tensor.shape))
        if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
            path = self._checkpoint.stored[key].path
            raise self._error(f"({path}) has {key!r} as {found}, and here it is {wanted}")
        return Run.whole(found)

    def _spec(self, key: str) -> Spec:
        found = self._checkpoint.stored.get(key)
        if found is None:
            raise self._error(f"lacks the tensor {key!r}, which its manifest names")
        return found.spec

    def _of_models(self, tensors: Sequence[list[tuple[torch.Tensor, Run]]]) -> Iterator[_Action]:
        for model, pairs in zip(self._models, tensors, strict=True):
            places = model.places()
            picks: dict[int, list[tuple[int, Run]]] = {}
            groups = {}
            for tensor, run in pairs:
                place = places.get(id(tensor))
                if place is None:
                    yield _into(tensor.detach(), run)
                else:
                    groups[place[0].block.id] = place[0]
                    picks.setdefault(place[0].block.id, []).append((place[1], run))
            for number, group in groups.items():
                yield _Action(
                    [run.need for _, run in picks[number]],
                    partial(fill_group, group, picks[number]),
                )

    # -- values ----------------------------------------------------------

    def _values(self) -> dict[str, Any]:
        """Reads all values but the tensors of models and states; nothing is changed yet."""
        found: dict[str, Any] = {}
        encoded = {
            "extra": self._manifest["extra"],
            "rng": self._manifest["rng"],
            "modules": [model["extra_state"] for model in self._manifest["models"]],
            "optimizers": [
                [o["grad_factor"], *(group["settings"] for group in o["groups"])]
                for o in self._manifest["optimizers"]
            ],
        }
        needs: list[Need] = []

        def note(key: str) -> torch.Tensor:
            needs.append(Run.whole(self._spec(key)).need)
            return _NOTHING

        decode(encoded, note)
        reader = TensorReader(self._checkpoint.stored, self._checkpoint.checks, needs)
        try:
            found = decode(encoded, reader.tensor)
        finally:
            reader.close()
        return found

    def _settle(self, values: dict[str, Any]) -> None:
        """Sets modules' own values, and continues, now that all tensors are loaded."""
        for model, states in zip(self._models, values["modules"], strict=True):
            modules = dict(model.wrapped.model.named_modules())
            for name, state in states.items():
                outside(modules[name].set_extra_state, state)
        each = zip(
            self._optimizers, self._manifest["optimizers"], values["optimizers"], strict=True
        )
        for optimizer, saved, (factor, *_) in each:
            if factor is not None:
                factor = factor.to(self._manager.parts.device)
            order = [self._params[key] for key in saved["state"]]
            optimizer.replaced(factor, saved["backwards"], order)

    def _settle_groups(self, found: Sequence[Contents], values: dict[str, Any]) -> None:
        """Restores settings; tensors among them are written to the existing ones.

        A tensor that is a setting of several groups stays shared, if it was saved with one value.
        """
        each = zip(self._optimizers, found, values["optimizers"], strict=True)
        for optimizer, contents, (_, *settings) in each:
            shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
            for group, mine in zip(contents.groups, settings, strict=True):
                known = {"params", *mine, *optimizer.defaults}
                for key in [key for key in group if key not in known]:
                    del group[key]
                for key, value in mine.items():
                    there = group.get(key)
                    if isinstance(value, torch.Tensor) and isinstance(there, torch.Tensor):
                        value = value.to(there.device)
                        _, same = shared.setdefault(id(there), (there, value))
                        value = same if torch.equal(same, value) else value
                    group[key] = value

    # -- optimizers ------------------------------------------------------

    def _check_optimizers(self) -> None:
        saved = self._manifest["optimizers"]
        if len(saved) != len(self._optimizers):
            raise self._error(
                f"has {len(saved)} optimizers, and {len(self._optimizers)} are open in this "
                "TierManager: make them with tier.optimizer() before the load, as they were when "
                "it was saved, and close those that are not used any more, dropped or not "
                "(tiermem.load_checkpoint takes the weights alone)"
            )
        keys = keys_of(self._models, [])
        for number, (optimizer, mine) in enumerate(zip(self._optimizers, saved, strict=True)):
            self._check_optimizer(number, optimizer, mine, keys)

    def _check_optimizer(
        self, number: int, mine: TieredOptimizer, saved: dict[str, Any], keys: dict[int, str]
    ) -> None:
        what = f"has optimizer {number}"
        cls, master_dtype, grad_dtype = mine.made_of
        for name, here in (
            ("class", class_name(cls)),
            ("master_dtype", name_of(master_dtype)),
            ("grad_dtype", name_of(grad_dtype)),
        ):
            if saved[name] != here:
                raise self._error(f"{what} with {name}={saved[name]}, and here it is {here}")
        if len(saved["groups"]) != len(mine.param_groups):
            raise self._error(
                f"{what} with {len(saved['groups'])} parameter groups, and here there are "
                f"{len(mine.param_groups)}"
            )
        for g, (group, other) in enumerate(zip(mine.param_groups, saved["groups"], strict=True)):
            names = [
                keys.get(id(param), f"outside.{number}.{g}.{i}")
                for i, param in enumerate(group["params"])
            ]
            if names != other["params"]:
                pairs = zip_longest(names, other["params"])
                here, there = next(pair for pair in pairs if pair[0] != pair[1])
                raise self._error(
                    f"{what} with the parameter {there!r} in group {g}, where {here!r} is here"
                )

    @staticmethod
    def _numbered(saved: dict[str, Any]) -> dict[str, Any]:
        """Returns the keys of a state dict, to find out which parameters have any state."""
        numbers: dict[str, int] = {}
        groups = []
        for group in saved["groups"]:
            first = len(numbers)
            numbers.update({key: first + i for i, key in enumerate(group["params"])})
            groups.append({"params": [numbers[key] for key in group["params"]]})
        return {
            "param_groups": groups,
            "state": {numbers[key]: None for key in saved["state"]},
            "master": {numbers[key]: None for key in saved["masters"]},
        }

    def _of_optimizer(self, number: int, found: Contents) -> Iterator[_Action]:
        saved = self._manifest["optimizers"][number]
        names = {id(param): key for key, param in self._params.items()}
        for unit in found.units:
            if isinstance(unit, PartedUnit):
                yield self._of_parts(number, unit, found, saved, names)
                continue
            states = [
                self._state_of(param, saved["state"][names[id(param)]])
                for param, _ in unit.members
                if names[id(param)] in saved["state"]
            ]
            yield self._filling(unit, found.groups, found.state, states)
            if unit.masters is not None:
                picks = [(p, self._master_of(number, names[id(p)], p)) for p in unit.masters.params]
                yield _Action(
                    [run.need for _, run in picks],
                    partial(fill_masters, self._manager, unit.masters, picks),
                )

    def _of_parts(
        self, number: int, unit: PartedUnit, found: Contents, saved: dict[str, Any],
        names: dict[int, str],
    ) -> _Action:  # fmt: skip
        """Returns the action that loads state and masters of a parameter stepped in parts."""
        (param, _) = unit.members[0]
        whole = saved["state"].get(names[id(param)])
        actions: list[_Action] = []
        of_masters: list[_Action] = []
        for part in unit.parts:
            states = [] if whole is None else [self._state_of(part.param, whole, part, param)]
            actions.append(self._filling(part.unit, found.groups, part.state, states))
            if part.unit.masters is not None:
                run = self._master_of(number, names[id(param)], param)
                picks = [(part.param, Run(run.spec, part.begin, part.end))]
                make = partial(fill_masters, self._manager, part.unit.masters, picks)
                of_masters.append(_Action([run.need for _, run in picks], make))

        def make_all(reader: TensorReader) -> None:
            each = dict(zip(map(id, unit.parts), actions, strict=True))
            unit.flush()
            unit.replace_state(self._runtime, found.state, lambda part: each[id(part)].make(reader))
            for action in of_masters:
                action.make(reader)

        return _Action([n for a in (*actions, *of_masters) for n in a.needs], make_all)

    def _filling(
        self,
        unit: StepUnit,
        groups: Sequence[dict[str, Any]],
        shown: dict[Any, Any],
        states: Sequence[ParamState],
    ) -> _Action:
        needs = [run.need for run in state_runs(states)]

        def make(reader: TensorReader) -> None:
            fill_state(unit, self._runtime, groups, shown, states, reader)

        return _Action(needs, make)

    def _state_of(
        self,
        param: torch.Tensor,
        saved: dict[str, Any],
        part: Part | None = None,
        whole: torch.Tensor | None = None,
    ) -> ParamState:
        """Returns the state of a parameter, or of a part's share of it."""
        runs, values = {}, {}
        for key, value in saved.items():
            if not isinstance(value, dict) or "$tensor" not in value:
                values[key] = decode(value, _refuse)
                continue
            run = Run.whole(self._spec(value["$tensor"]))
            values[key] = None
            if part is not None and whole is not None and run.spec.shape == tuple(whole.shape):
                run = Run(run.spec, part.begin, part.end)
            runs[key] = run
        return ParamState(param, runs, values)

    def _master_of(self, number: int, key: str, param: torch.Tensor) -> Run:
        spec = self._spec(f"optimizer.{number}.master.{key}")
        if spec.shape != tuple(param.shape):
            raise self._error(f"has the master of {key!r} as {spec}, of {tuple(param.shape)}")
        return Run.whole(spec)

    def _of_outside(self) -> Iterator[_Action]:
        for key, param in self._params.items():
            if key.startswith("outside."):
                yield _into(param.detach(), self._fitting(key, param))

    # -- gradients -------------------------------------------------------

    def _check_gradients(self) -> None:
        for key, name in self._manifest["gradients"].items():
            if key not in self._params:
                raise self._error(f"has a gradient of {key!r}, which is here no parameter")
            spec, param = self._spec(name), self._params[key]
            if spec.shape != tuple(param.shape):
                raise self._error(f"has {name!r} as {spec}, of a parameter {tuple(param.shape)}")
        if self._manifest["gradients"]:
            check_gradients(self._runtime)

    def _of_gradients(self) -> Iterator[_Action]:
        """Yields the actions that replace the gradients with those of the checkpoint."""
        entries = {id(e.param): e for model in self._models for e in model.wrapped.entries}
        grads = self._runtime.grads

        def forget_all(_: TensorReader) -> None:
            for param in self._params.values():
                entry = entries.get(id(param))
                if entry is not None:
                    grads.sync(entry)
                    if entry.has_grad:
                        grads.clear(entry)
                param.grad = None

        yield _Action([], forget_all)
        for key, name in self._manifest["gradients"].items():
            param = self._params[key]
            yield _Action(
                [Run.whole(self._spec(name)).need],
                partial(self._take_gradient, name, param, entries.get(id(param))),
            )

    def _take_gradient(
        self, name: str, param: torch.Tensor, entry: Entry | None, reader: TensorReader
    ) -> None:
        gradient = reader.tensor(name)
        if entry is None or entry.unit is None or entry.materialized:
            param.grad = gradient.to(param.device)
        else:
            self._runtime.grads.store(entry, gradient.to(self._manager.parts.device))


_NOTHING = torch.empty(0, device="cpu")


def _into(target: torch.Tensor, run: Run) -> _Action:
    """Returns the action that loads a tensor in ordinary memory."""
    return _Action([run.need], lambda reader: run.into(reader, target))


def _refuse(name: str) -> torch.Tensor:
    raise CheckpointError(f"tensor {name!r} is inside another value of an optimizer's state")


def _by_key(
    keys: dict[int, str], models: Sequence[ModelNames], found: Sequence[Contents]
) -> dict[str, torch.Tensor]:
    """Returns every parameter by its name; one that has two names by the first."""
    params: list[torch.Tensor] = [e.param for model in models for e in model.wrapped.entries]
    params += [n.tensor for model in models for n in model.tensors]
    params += [p for contents in found for group in contents.groups for p in group["params"]]
    return {keys[id(param)]: param for param in params if id(param) in keys}
