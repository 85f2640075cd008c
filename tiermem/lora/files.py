"""Adapters as peft's files: ``adapter_model.safetensors`` and ``adapter_config.json``.

Names are peft's: ``base_model.model.`` and the module's qualified name, then ``lora_A.weight`` and
so on; a trained bias of an adapted module is its ``base_layer.bias``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from tiermem.config import parse_path
from tiermem.errors import CheckpointError, ConfigError, StorageError
from tiermem.lora.adapters import (
    adapted,
    add_adapters,
    check_plain,
    peft_options,
    settings_of,
    trained_biases,
)
from tiermem.lora.config import Lora
from tiermem.lora.pair import left_beside, replace_pair
from tiermem.lora.targets import by_pattern, chosen, saved_whole
from tiermem.storage.checkpoint.folder import ADAPTERS

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MOST_SETTINGS = 1 << 24  # maximal bytes of a configuration

PathLike = str | os.PathLike[str]


def save_adapters(model: nn.Module, path: PathLike) -> None:
    """Writes a model's adapters as peft's files.

    Both files are written beside the former ones and synced, then renamed: a crash
    leaves the former adapters, the new ones, or a folder without ``adapter_config.json``, which no
    reader takes for adapters.

    Args:
        model: A module with adapters, wrapped or not.
        path: A folder; it is created if necessary.

    Raises:
        CheckpointError: If the model has no adapters, or ``path`` cannot be a folder.
        StorageError: If a file cannot be written; the former ones are unchanged.
    """
    lora = settings_of(model)
    if lora is None:
        raise CheckpointError(
            f"{type(model).__name__} has no adapters of tiermem's (tiermem.add_adapters); a model "
            "with peft's is saved by its save_pretrained"
        )
    folder = Path(parse_path(path, "path", CheckpointError))
    with torch.no_grad():
        tensors = {name: _copy_of(param) for name, param in _own(model).items()}
        tensors.update((name, _copy_of(bias)) for name, bias in _biases(model, lora).items())
        for name, module in saved_whole(model, lora):
            for key, value in module.state_dict().items():
                tensors[f"{_PREFIX}{name}.{key}"] = _copy_of(value)
    text = json.dumps(peft_options(model, lora), indent=2, sort_keys=True, default=list)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_pair(
            folder / ADAPTERS,
            lambda new: Path(new).write_text(text, encoding="utf-8"),
            folder / WEIGHTS,
            lambda new: save_file(tensors, new, metadata={"format": "pt"}),
        )
    except (OSError, SafetensorError) as error:
        raise StorageError(
            "the adapters cannot be written; the model has them still: save them elsewhere",
            kind="adapters", path=str(folder), errno=_number_of(error),
        ) from error  # fmt: skip


def load_adapters(model: nn.Module, path: PathLike) -> None:
    """Loads files of tiermem or peft into a model.

    A model without adapters gets them according to the files; this has to be done before
    ``tier.wrap``.
    If it has adapters, they must be the same.

    Args:
        model: The base model, or one with adapters, wrapped or not.
        path: The folder.

    Raises:
        CheckpointError: If the files do not fit the model, or are not adapters; nothing is changed.
        ConfigError: If their adapters are of an unsupported kind; nothing is changed.
        WrapError: If the model is wrapped and has no adapters.
    """
    folder = Path(parse_path(path, "path", CheckpointError))
    lora = read_settings(folder / ADAPTERS)
    plain = settings_of(model) is None
    _check_values(model, lora, folder / WEIGHTS)
    if plain:
        check_plain(model)
    else:
        _check_alike(model, lora, folder / ADAPTERS)
    wanted = _expected(model, lora, folder / ADAPTERS)
    tensors = _read(folder / WEIGHTS, wanted, _also(model, lora))
    if plain:
        with torch.random.fork_rng(devices=()):  # the drawn values are not used
            add_adapters(model, lora)
        for each in adapted(model).values():
            each.lora_dropout.train(each.training)
    own = {**_own(model), **_biases(model, lora)}
    own.update((name, param) for name, param in _also(model, lora).items() if name in tensors)
    parts = {_PREFIX + name: module for name, module in saved_whole(model, lora)}
    for name, module in parts.items():
        start = f"{name}."
        mine = {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}
        module.load_state_dict(mine)
    with torch.no_grad():
        for name, param in own.items():
            if not any(name.startswith(f"{part}.") for part in parts):
                _set(param, tensors[name])


# -- names -----------------------------------------------------------------


def _own(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the adapters' parameters by their names in the file."""
    return {
        f"{_PREFIX}{name}.{part}": param
        for name, module in adapted(model).items()
        for part, param in module.factors().items()
    }


def _biases(model: nn.Module, lora: Lora) -> dict[str, torch.Tensor]:
    """Returns the biases of the base model that are trained, likewise."""
    found: dict[str, torch.Tensor] = {}
    inside = adapted(model)
    for name, bias in trained_biases(model, lora).items():
        found[_bias_name(name, inside)] = bias
    return found


def _bias_name(name: str, inside: Iterable[str]) -> str:
    """Returns a bias's name in the file: peft wraps the modules that it adapts."""
    module = name.rpartition(".")[0]
    return f"{_PREFIX}{module}.base_layer.bias" if module in inside else _PREFIX + name


def _also(model: nn.Module, lora: Lora) -> dict[str, torch.Tensor]:
    """Returns the weights of adapted modules: peft saves embeddings' with their adapters."""
    inside: dict[str, nn.Module] = {**adapted(model)}
    if not inside:
        inside = {target.name: target.module for target in chosen(model, lora)}
    return {
        f"{_PREFIX}{name}.base_layer.{part}": param
        for name, module in inside.items()
        for part in ("weight", "bias")
        if (param := module._parameters.get(part)) is not None
    }


def _expected(model: nn.Module, lora: Lora, path: Path) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of a file's expected tensors; the model may have no adapters.

    Raises:
        CheckpointError: If the model lacks modules that should have adapters.
    """
    if settings_of(model) is not None:
        tensors = {**_own(model), **_biases(model, lora)}
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    else:
        try:
            found = _planned(model, lora)
        except ConfigError as error:
            raise CheckpointError(f"{path} does not fit the model: {error}") from error
    for name, module in saved_whole(model, lora):
        for key, value in _state_of(module).items():
            found[f"{_PREFIX}{name}.{key}"] = tuple(value.shape)
    return found


def _planned(model: nn.Module, lora: Lora) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of the adapters and biases that a model would have."""
    found: dict[str, tuple[int, ...]] = {}
    targets = {target.name: target for target in chosen(model, lora)}
    for name, target in targets.items():
        module: Any = target.module
        if isinstance(module, nn.Embedding):
            found[f"{_PREFIX}{name}.lora_embedding_A"] = (target.r, module.num_embeddings)
            found[f"{_PREFIX}{name}.lora_embedding_B"] = (module.embedding_dim, target.r)
            continue
        first, second = module.weight.shape
        inputs, outputs = (second, first) if isinstance(module, nn.Linear) else (first, second)
        found[f"{_PREFIX}{name}.lora_A.weight"] = (target.r, inputs)
        found[f"{_PREFIX}{name}.lora_B.weight"] = (outputs, target.r)
        if lora.lora_bias:
            found[f"{_PREFIX}{name}.lora_B.bias"] = (outputs,)
    for name, param in model.named_parameters():
        module_name, _, last = name.rpartition(".")
        if last == "bias" and (
            lora.bias == "all" or (lora.bias == "lora_only" and module_name in targets)
        ):
            found[_bias_name(name, targets)] = tuple(param.shape)
    return found


def _state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns a module's state dict without values."""
    found: dict[str, torch.Tensor] = {}
    for prefix, each in module.named_modules():
        start = f"{prefix}." if prefix else ""
        found.update((start + n, p) for n, p in each._parameters.items() if p is not None)
        lasting = (n for n in each._buffers if n not in each._non_persistent_buffers_set)
        buffers = ((n, each._buffers[n]) for n in lasting)
        found.update((start + n, b) for n, b in buffers if b is not None)
    return found


# -- read ------------------------------------------------------------------


def read_settings(path: Path) -> Lora:
    """Returns the settings of adapters in a folder.

    Raises:
        CheckpointError: If there are none, or they cannot be read.
        ConfigError: If they are of an unsupported kind.
    """
    try:
        if path.stat().st_size > _MOST_SETTINGS:
            raise CheckpointError(f"{path} is too large for a configuration of adapters")
        options = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unlike)
    except OSError as error:
        left = left_beside(path, path.with_name(WEIGHTS))
        hint = f"; a save was cut short, the former files are there as {left}: rename them"
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): no adapters{hint if left else ''}"
        ) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is no configuration of adapters: {error}") from error
    if not isinstance(options, dict):
        raise CheckpointError(f"{path} is no configuration of adapters: it holds no names")
    try:
        return Lora.of(options)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _unlike(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _check_alike(model: nn.Module, lora: Lora, path: Path) -> None:
    """Refuses settings with which a model's adapters would compute something else.

    Raises:
        CheckpointError: If they do, with the module or the option.
    """
    own: Any = settings_of(model)
    whole = [[name for name, _ in saved_whole(model, each)] for each in (own, lora)]
    options = [("modules_to_save", *whole)]
    options += [(name, getattr(own, name), getattr(lora, name)) for name in ("bias", "lora_bias")]
    for option, mine, theirs in options:
        if mine != theirs:
            raise CheckpointError(
                f"{path} has adapters with {option}={theirs!r}; those of the model have {mine!r}"
            )
    for name, module in adapted(model).items():
        r = int(by_pattern(name, lora.rank_pattern, lora.r))
        scaling = lora.scaling(r, by_pattern(name, lora.alpha_pattern, lora.alpha))
        if (r, scaling) != (module.lora_r, module.lora_scaling):
            raise CheckpointError(
                f"{path}: the adapter of {name!r} has rank {r} and scaling {scaling:g}; that of "
                f"the model has {module.lora_r} and {module.lora_scaling:g}"
            )


def _check_values(model: nn.Module, lora: Lora, path: Path) -> None:
    """Refuses to load other tensors than adapters into parameters that have no values yet.

    Raises:
        CheckpointError: If it would, with one name.
    """
    whole = [name for name, _ in saved_whole(model, lora)]
    for name, param in model.named_parameters():
        trained = any(name.startswith(f"{each}.") for each in whole)
        trained |= lora.bias != "none" and name.endswith("bias")
        if trained and param.is_meta:
            raise _too_soon(path, name)


def _too_soon(path: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{path} has values for {name!r}, a weight of the model that has none of its own yet; load "
        "the base model first (tiermem.load_checkpoint), then tiermem.load_adapters"
    )


def _read(
    path: Path, expected: dict[str, tuple[int, ...]], also: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file, after checking them.

    Args:
        path: The file.
        expected: Shapes of the required tensors, by name.
        also: Other permitted tensors, with these shapes.

    Raises:
        CheckpointError: If it is not such a file, or has other tensors or other shapes.
    """
    if not path.is_file():
        raise CheckpointError(
            f"{path} is not there; have peft save adapters that are in adapter_model.bin anew "
            "(save_pretrained, safe_serialization=True)"
        )
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = set(file.keys())
            _check_names(path, names, expected, also)
            for name in sorted(names):
                shape = expected[name] if name in expected else tuple(also[name].shape)
                _check_tensor(path, name, file.get_slice(name), shape)
                if name not in expected and also[name].is_meta:
                    raise _too_soon(path, name)
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def _check_names(path: Path, names: set[str], expected: Iterable[str], also: Iterable[str]) -> None:
    missing = sorted(set(expected) - names)
    unknown = sorted(names.difference(expected, also))
    if missing:
        raise CheckpointError(f"{path} lacks {len(missing)} tensors of the model's: {missing[:3]}")
    if unknown:
        raise CheckpointError(
            f"{path} holds {len(unknown)} tensors that the model has no place for: {unknown[:3]}"
        )


def _check_tensor(path: Path, name: str, found: Any, shape: tuple[int, ...]) -> None:
    if tuple(found.get_shape()) != shape:
        raise CheckpointError(
            f"{path}: tensor {name!r} has the shape {list(found.get_shape())}; the model's has "
            f"{list(shape)}"
        )


# -- written ---------------------------------------------------------------


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())


def _set(param: torch.Tensor, value: torch.Tensor) -> None:
    """Writes a tensor only if the values differ: a block that is not written stays clean."""
    if param.requires_grad or not torch.equal(param.cpu(), value.to(param.dtype)):
        param.copy_(value)


def _number_of(error: OSError | SafetensorError) -> int | None:
    """Returns the system's number of an error, which safetensors only has in its text."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else None
