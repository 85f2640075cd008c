"""From which tensors of a checkpoint each tensor of a model is created."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tiermem.errors import CheckpointError, ConfigError
from tiermem.loading.expected import complained_of, make_expected, make_missing, saved_buffers
from tiermem.loading.traced import NotTracedError, Run, StoredView
from tiermem.storage.checkpoint.folder import CheckpointFiles

Names = Mapping[str, str] | Callable[[str], str]
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Converted:
    """A tensor that is computed from several of the files'; read and converted when needed.

    Attributes:
        sources: Names of those, by the pattern that matched them.
        convert: Computes the tensor from their values.
    """

    sources: dict[str, list[str]]
    convert: Callable[[dict[str, list[torch.Tensor]]], torch.Tensor]


Source = StoredView | Converted


@dataclass(frozen=True, slots=True)
class Found:
    """What files have for a model.

    Attributes:
        sources: Sources by the model's name; for tied parameters at least one name.
        drawn: Names of tensors that are missing and were newly initialized.
        unused: Names of tensors of the files that the model does not have.
        mismatched: Names of tensors that the files have in another shape; also newly initialized.
    """

    sources: dict[str, Source]
    drawn: list[str]
    unused: list[str]
    mismatched: list[str]


def sources_of(
    model: nn.Module,
    files: CheckpointFiles,
    names: Names | None,
    initialize: bool = False,
    *,
    mismatched_too: bool = False,
) -> Found:
    """Finds the source of every parameter and persistent buffer.

    Args:
        model: The model; values are not read.
        files: The checkpoint.
        names: The file's name for each of the model's; by default the same, or for a transformers
            model its rules.
        initialize: Whether its class created it, so that differences are treated like in
            ``from_pretrained``: missing tensors are newly initialized, and unused ones
            ignored. The class also does what it does to weights during loading, even
            if none are missing.
        mismatched_too: Whether tensors of another shape are then newly initialized, too.

    Raises:
        CheckpointError: If names are missing or unexpected, or shapes differ.
        ConfigError: If ``names`` is neither, or returns no names.
    """
    wanted = wanted_by(model)
    of_transformers = hasattr(model, "base_model_prefix") and hasattr(model, "config")
    if names is not None:
        found, used = _by_names(wanted, files, names)
    elif of_transformers:
        found, used = _by_transformers(model, wanted, files, noted=initialize)
    else:
        found = {name: view_of(files, name) for name in wanted if name in files.tensors}
        used = set(found)
    mismatched = _mismatched(wanted, found) if initialize and mismatched_too else []
    for name in mismatched:
        del found[name]
    _check_shapes(wanted, found, files)
    missing, drawn = _missing(wanted, found), []
    by_class = initialize and of_transformers and names is None
    if by_class and wanted and not found:
        raise _nothing_found(model, files)
    if by_class:
        drawn = make_missing(model, missing, found.keys(), _not_saved(model))
    else:
        if missing and of_transformers and names is None:
            missing = make_expected(model, missing)
        others = [name for name in files.tensors if name not in used]
        _check_missing(model, missing, others, files, names, initialize)
    unused: list[str] = []
    if names is None:  # with names given, the other tensors are ignored
        used.update(name for name, _ in model.named_buffers(remove_duplicate=False))
        left = files.tensors.keys() - used
        if left and hasattr(model, "_adjust_missing_and_unexpected_keys"):
            left = complained_of(model, unexpected=left)
        unused = [name for name in files.tensors if name in left]
        if unused and not initialize:
            raise _unexpected(model, files, unused)
    return Found(found, [name for name in drawn if name not in mismatched], unused, mismatched)


def wanted_by(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the parameters and persistent buffers of a model, tied ones under each name."""
    wanted: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return wanted | saved_buffers(model)


def _not_saved(model: nn.Module) -> list[str]:
    """Returns the names of the buffers that checkpoints do not contain."""
    found = []
    for prefix, module in model.named_modules():
        found += [
            f"{prefix}.{name}" if prefix else name for name in module._non_persistent_buffers_set
        ]
    return found


def view_of(files: CheckpointFiles, name: str) -> StoredView:
    """Returns a tensor of the files, without reading it."""
    stored = files.tensors[name]
    run = Run(stored.file, stored.offset, stored.nbytes)
    return StoredView(stored.shape, stored.dtype, [run])


def _by_names(
    wanted: Mapping[str, torch.Tensor], files: CheckpointFiles, names: Names
) -> tuple[dict[str, Source], set[str]]:
    if not callable(names) and not isinstance(names, Mapping):
        raise ConfigError(
            "names must be a mapping of the model's names to the files', or a callable that is "
            f"given the former and returns the latter, not {names!r}"
        )
    found: dict[str, Source] = {}
    used = set()
    for name in wanted:
        stored: Any = names(name) if callable(names) else names.get(name, name)
        if stored is not None and not isinstance(stored, str):
            raise ConfigError(f"names gives {stored!r} for {name!r}, and not one tensor's name")
        if stored in files.tensors:
            found[name] = view_of(files, stored)
            used.add(stored)
    return found, used


def _by_transformers(
    model: Any, wanted: Mapping[str, torch.Tensor], files: CheckpointFiles, *, noted: bool
) -> tuple[dict[str, Source], set[str]]:
    """Follows transformers' own rules of renaming and conversion (release 5).

    Like ``convert_and_load_state_dict_in_model`` of ``transformers.core_model_loading``, with
    tensors that have not been read.

    Args:
        model: The model.
        wanted: Its tensors by name.
        files: The checkpoint.
        noted: Whether the applied rules are recorded in the model, like in ``from_pretrained``:
            ``save_pretrained`` reverses them.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )
    except ImportError as error:
        raise ConfigError(
            "models of transformers are loaded by the rules of its release 5, and an older one is "
            "installed; upgrade it, or give names="
        ) from error

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    state, prefix = dict(wanted), model.base_model_prefix
    found: dict[str, Source] = {}
    used: set[str] = set()
    gathered: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for name in sorted(files.tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target not in state:
            continue
        used.add(name)
        if pattern is None:
            found[target] = view_of(files, name)
        else:
            _, sources = gathered.setdefault(target, (by_pattern[pattern], {}))
            sources.setdefault(pattern, []).append(name)
    for target, (rule, sources) in gathered.items():
        found.update(_conversion(model, target, rule, sources, files))
    if noted:
        model._weight_conversions = [rule for rule in rules if _was_used(rule)]
    return found, used


def _was_used(rule: Any) -> bool:
    """Whether a rule was applied; one of the first releases of transformers 5 omits this."""
    return bool(rule.was_used()) if hasattr(rule, "was_used") else True


def _conversion(
    model: Any, target: str, rule: Any, sources: dict[str, list[str]], files: CheckpointFiles
) -> dict[str, Source]:
    """Returns the tensors that a conversion rule of transformers creates, by the model's names."""

    def run(tensors: dict[str, list[Any]]) -> dict[str, Any]:
        own = deepcopy(rule)
        for operation in own.operations:
            tensors = operation.convert(
                tensors,
                source_patterns=own.source_patterns,
                target_patterns=own.target_patterns,
                full_layer_name=target,
                model=model,
                config=model.config,
                missing_keys=None,
            )
        return _full_names(target, tensors)

    views = {key: [view_of(files, name) for name in names] for key, names in sources.items()}
    try:
        return {name: _only(made) for name, made in run(views).items()}
    except NotTracedError:
        pass
    except Exception as error:
        raise _not_converted(target, rule, sources, files, error) from error
    blank = {
        key: [torch.empty(view.shape, dtype=view.dtype, device="meta") for view in members]
        for key, members in views.items()
    }
    try:
        made = list(run(blank))
    except Exception as error:
        raise _not_converted(target, rule, sources, files, error) from error
    return {name: Converted(sources, _one_of(run, name)) for name in made}


def _one_of(
    run: Callable[[dict[str, list[Any]]], dict[str, Any]], name: str
) -> Callable[[dict[str, list[torch.Tensor]]], torch.Tensor]:
    def convert(values: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        made: torch.Tensor = _only(run(values)[name])
        return made

    return convert


def _only(made: Any) -> Any:
    return made[0] if isinstance(made, list) else made


def _full_names(target: str, tensors: dict[str, Any]) -> dict[str, Any]:
    """Gives results, which are named by the rule's patterns, their names in the model."""
    whole = target.replace("*.", "0.")
    for key in tensors:
        if key in whole:
            before, _, behind = whole.partition(key)
            return {before + name + behind: made for name, made in tensors.items()}
    return tensors


def _not_converted(
    target: str,
    rule: Any,
    sources: dict[str, list[str]],
    files: CheckpointFiles,
    error: Exception,
) -> CheckpointError:
    names = [name for members in sources.values() for name in members]
    return CheckpointError(
        f"{files.paths[0].parent}: {target!r} cannot be made of {some_of(names)} by transformers' "
        f"{rule.operations}: {error}"
    )


# -- checks --------------------------------------------------------------------------


def _missing(wanted: Mapping[str, torch.Tensor], found: Mapping[str, Source]) -> list[str]:
    there = {id(wanted[name]) for name in found if name in wanted}
    return [name for name, tensor in wanted.items() if id(tensor) not in there]


def _mismatched(wanted: Mapping[str, torch.Tensor], found: Mapping[str, Source]) -> list[str]:
    return [
        name
        for name, source in found.items()
        if isinstance(source, StoredView) and source.shape != wanted[name].shape
    ]


def _nothing_found(model: nn.Module, files: CheckpointFiles) -> CheckpointError:
    return CheckpointError(
        f"{files.paths[0].parent}: no tensor of the files is one of {type(model).__name__}'s; they "
        f"have {some_of(files.tensors)}: is this another model's folder? If the files call them "
        "otherwise, give names="
    )


def _check_missing(
    model: nn.Module,
    missing: Sequence[str],
    others: Sequence[str],
    files: CheckpointFiles,
    names: Names | None,
    by_class: bool,
) -> None:
    """Raises an error that names what is missing, with advice."""
    if not missing:
        return
    kind = type(model).__name__
    if names is not None:
        what = (
            "names= says none of the files for them. It stands for itself: a name that it does not "
            "change is looked for as it is, and no prefix is added or taken away; without names= "
            "a class of transformers does that by its own rules"
        )
    elif by_class:
        what = f"from_pretrained would leave them without values; make a {kind} without them"
    elif hasattr(model, "base_model_prefix"):
        what = (
            "if they are to be newly initialized, as from_pretrained does, give the class "
            f"({kind}) instead of a model; if the files call them otherwise, give names="
        )
    else:
        what = "if the files call them otherwise, give names="
    there = f" (the files have {some_of(others)}, and the model has not)" if others else ""
    raise CheckpointError(
        f"{files.paths[0].parent}: {len(missing)} tensors of the model are missing: "
        f"{some_of(missing)}{there}; {what}"
    )


def _unexpected(model: nn.Module, files: CheckpointFiles, unused: list[str]) -> CheckpointError:
    instead = (
        f"give the class ({type(model).__name__}) instead of a model, which leaves them as "
        "from_pretrained does, or names="
        if hasattr(model, "base_model_prefix")
        else "give names="
    )
    return CheckpointError(
        f"{files.paths[0].parent}: {len(unused)} tensors are none of the model's: "
        f"{some_of(unused)}; if it calls them otherwise, or they are to be left (a head that "
        f"this class has not), {instead}"
    )


def _check_shapes(
    wanted: Mapping[str, torch.Tensor], found: Mapping[str, Source], files: CheckpointFiles
) -> None:
    for name, source in found.items():
        tensor = wanted.get(name)
        if tensor is None or not isinstance(source, StoredView):
            continue
        if source.shape != tensor.shape:
            path = files.paths[source.runs[0].file] if source.runs else files.paths[0]
            raise CheckpointError(
                f"{path}: {name!r} has shape {tuple(source.shape)} there and "
                f"{tuple(tensor.shape)} in the model"
            )


def some_of(names: Iterable[str]) -> str:
    """Returns the first of the names, for a message."""
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(map(repr, listed[:_SHOWN])) + more
