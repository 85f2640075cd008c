"""Checkpoints that DeepSpeed wrote, of any ZeRO stage and number of ranks, by names of parameters.

Below stage 3 a rank's file has, for every parameter group, its share of all weights of the group
one after another; at stage 3 it has, for every sub-group, its share of each weight. The universal
format has a folder for each weight. The names and shapes are in the model's file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from tiermem import CheckpointError

from .unpickling import load

Shapes = Sequence[Mapping[str, Sequence[int]]]
_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)(?:_\d+)?_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)(?:_\d+)?_model_states\.pt")
_BASE = "base_optimizer_state"
_LEAN = "single_partition_of_fp32_groups"
_FLAT = "fp32_flat_groups"


@dataclass
class Saved:
    """What a checkpoint of DeepSpeed's holds.

    Attributes:
        path: The model's file.
        model: What is in it.
        weights: The module's state in the compute dtype; empty tensors have been replaced.
        masters: float32 weights by the name of the parameter.
        state: The optimizer's state, by the name of the parameter.
        settings: Settings of each parameter group: learning rate and others.
        group_of: Number of the parameter group by name.
        scale: For the loss scale, or None.
        plain: A plain optimizer's state dict instead, in the order of its parameters (stage 0).
    """

    path: Path
    model: dict[str, Any]
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    masters: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    settings: list[dict[str, Any]] = field(default_factory=list)
    group_of: dict[str, int] = field(default_factory=dict)
    scale: dict[str, Any] | None = None
    plain: dict[str, Any] | None = None


def model_file(folder: Path) -> Path | None:
    """Returns the first rank's file of the model, or None."""
    found = sorted(path for path in folder.glob("*_model_states.pt") if _MODEL.fullmatch(path.name))
    return found[0] if found else None


def is_deepspeeds(model: Mapping[str, Any]) -> bool:
    """Whether a model's file was written by DeepSpeed."""
    return "ds_version" in model or "buffer_names" in model


def read(folder: Path, order: Shapes, *, optimizer: bool = True) -> Saved:
    """Reads a folder.

    Args:
        folder: With the files of every rank, or of the universal format.
        order: Names and shapes of the parameters of each group here, for files without names.
        optimizer: Whether state and masters are wanted.

    Raises:
        CheckpointError: If files are missing, of several tensor-parallel ranks, or do not hold
            what they should.
    """
    files = _of_ranks(folder, _MODEL)
    if not files:
        raise CheckpointError(f"{folder}: there is no file *_model_states.pt")
    models = [load(path) for path in files]
    found = Saved(files[0], models[0])
    found.weights = {k: v for k, v in (models[0].get("module") or {}).items() if v is not None}
    if (folder / "zero").is_dir():
        _read_universal(found, folder / "zero", optimizer=optimizer)
    else:
        _read_ranks(found, folder, models, order, optimizer=optimizer)
    _add_frozen(found, models)
    for name, same in (models[0].get("shared_params") or {}).items():
        if same in found.masters and name in found.weights:
            found.weights[name] = found.masters[same]
    return found


def _of_ranks(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Returns the files of every data-parallel rank, in order."""
    numbered: dict[int, Path] = {}
    for path in folder.glob("*_states.pt"):
        match = pattern.fullmatch(path.name)
        if match is None:
            if "expp_rank" in path.name or path.name.startswith("layer_"):
                raise CheckpointError(
                    f"{path}: experts and pipeline layers in files of their own are not read; "
                    "convert the checkpoint with DeepSpeed's ds_to_universal"
                )
            continue
        if int(match[2]):
            raise CheckpointError(
                f"{path} is of a tensor-parallel run: convert the checkpoint to the universal "
                "format with DeepSpeed's ds_to_universal"
            )
        numbered[int(match[1] or 0)] = path
    missing = [rank for rank in range(len(numbered)) if rank not in numbered]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(numbered)} files of ranks, and none of rank {missing[0]}"
        )
    return [numbered[rank] for rank in sorted(numbered)]


def _read_ranks(
    found: Saved, folder: Path, models: list[Any], order: Shapes, *, optimizer: bool
) -> None:
    """Reads state and masters out of the files of ranks."""
    files = _of_ranks(folder, _FILE)
    if not files:
        whole = found.model.get("optimizer")
        if whole is not None and optimizer:
            _read_unsharded(found, whole, order)
        return
    stage_3 = "zero_pp_rank" in found.path.name
    if not optimizer and not stage_3:
        return
    parts = []
    for path in files:
        inside = load(path)
        if not isinstance(inside, dict) or not inside.get("optimizer_state_dict"):
            raise CheckpointError(f"{path} has no 'optimizer_state_dict'")
        parts.append(inside["optimizer_state_dict"])
    count = parts[0].get("partition_count", len(parts))
    count = max(count) if isinstance(count, list | tuple) else count
    if count != len(files):
        raise CheckpointError(
            f"{folder}: files of {count} ranks are needed, {len(files)} are there"
        )
    shapes = found.model.get("param_shapes")
    if shapes is None:
        raise CheckpointError(f"{found.path} has no 'param_shapes': names of what {files[0]} holds")
    shapes = shapes if isinstance(shapes, list | tuple) else [shapes]
    where = str(files[0])
    if _FLAT in parts[0]:
        _read_stage_3(found, parts, shapes, where)
    elif _LEAN in parts[0]:
        _read_stage_2(found, parts, shapes, where)
    else:
        raise CheckpointError(f"{where} has neither {_LEAN!r} nor {_FLAT!r}")
    found.scale = scale_of(parts[0])


# -- pieces of flat tensors ------------------------------------------------


class _Run:
    """Several 1-D tensors, read as if concatenated."""

    def __init__(self, pieces: Sequence[Any], where: str) -> None:
        self._pieces = [piece.reshape(-1) for piece in pieces]
        self._where = where

    def elements(self, start: int, numel: int) -> torch.Tensor:
        """Returns some of its elements: a view if they are all in one tensor."""
        parts: list[torch.Tensor] = []
        at = 0
        for piece in self._pieces:
            low, high = max(start, at), min(start + numel, at + piece.numel())
            if low < high or (numel == 0 and not parts):
                parts.append(piece[max(0, low - at) : max(0, high - at)])
            at += piece.numel()
        if sum(part.numel() for part in parts) != numel:
            raise CheckpointError(
                f"{self._where}: {at} elements where {start + numel} are needed; state that was "
                "on NVMe is not in DeepSpeed's checkpoints, and files of another run do not fit"
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _flat_keys(state: Mapping[str, Any]) -> list[str]:
    return [k for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim() > 0]


def _scalars(state: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is the same for all weights of a flat tensor: the number of steps."""
    found = {k: v for k, v in state.items() if not (isinstance(v, torch.Tensor) and v.dim() > 0)}
    if "step" not in found and "step" in group and state:
        found["step"] = group["step"]
    return found


def _read_stage_2(found: Saved, parts: list[Any], shapes: Shapes, where: str) -> None:
    """Reads stages 1 and 2: each group is one run over all ranks."""
    bases = [part[_BASE] for part in parts]
    listed = isinstance(bases[0], list)  # as elastic checkpoints have it
    groups = [{}] * len(shapes) if listed else bases[0]["param_groups"]
    common = parts[0].get("base_optimizer_state_step")
    for number, names in enumerate(shapes):
        each = [
            (base[number] if number < len(base) else {})
            if listed
            else base["state"].get(number, {})
            for base in bases
        ]
        runs = {key: _Run([state[key] for state in each], where) for key in _flat_keys(each[0])}
        masters = _Run([part[_LEAN][number] for part in parts], where)
        group = groups[number] if number < len(groups) else {}
        scalars = _scalars(each[0], group if common is None else {"step": common})
        at = 0
        for name, shape in names.items():
            numel = prod(shape)
            found.masters[name] = masters.elements(at, numel).view(tuple(shape))
            values = {key: run.elements(at, numel).view(tuple(shape)) for key, run in runs.items()}
            if values or scalars:
                found.state[name] = {**scalars, **values}
            found.group_of[name] = number
            at += numel
    found.settings = [dict(group) for group in groups]


def _state_of(base: Any, number: int) -> dict[str, Any]:
    """Returns the state of a flat group, of a plain optimizer's state dict or a list."""
    if isinstance(base, list):
        return dict(base[number]) if number < len(base) else {}
    return dict(base["state"].get(number, {}))


def _read_stage_3(found: Saved, parts: list[Any], shapes: Shapes, where: str) -> None:
    """Reads stage 3: each weight is a share of every rank's run over all sub-groups."""
    bases = [part["optimizer_state_dict"] for part in parts]
    count = len(parts[0][_FLAT])
    states = [[base["state"].get(n, {}) for n in range(count)] for base in bases]
    masters = [_Run(part[_FLAT], where) for part in parts]
    keys = _flat_keys(states[0][0]) if count else []
    runs = {key: [_Run([s[key] for s in each], where) for each in states] for key in keys}
    groups = bases[0]["param_groups"]
    group_of_sub = {n: i for i, group in enumerate(groups) for n in group["params"]}
    ends: list[int] = []
    total = 0
    for flat in parts[0][_FLAT]:
        total += flat.numel()
        ends.append(total)
    at = 0
    for name, shape in ((n, s) for names in shapes for n, s in names.items()):
        numel = prod(shape)
        share = -(-numel // len(parts))

        def whole(several: list[_Run]) -> torch.Tensor:
            pieces = [run.elements(at, share) for run in several]  # noqa: B023  called at once
            joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            return joined[:numel].view(tuple(shape))  # noqa: B023

        sub = next((n for n, end in enumerate(ends) if at < end), max(0, count - 1))
        found.masters[name] = whole(masters)
        found.group_of[name] = group_of_sub.get(sub, 0)
        scalars = _scalars(states[0][sub], groups[found.group_of[name]])
        values = {key: whole(several) for key, several in runs.items()}
        if values or scalars:
            found.state[name] = {**scalars, **values}
        found.weights[name] = found.masters[name]
        at += share
    found.settings = [dict(group) for group in groups]


def _read_unsharded(found: Saved, whole: dict[str, Any], order: Shapes) -> None:
    """Reads stage 0: a plain optimizer's state, or one over flat groups with float32 masters."""
    if "fp32_groups_flat" not in whole:
        found.plain = whole.get("optimizer_state_dict", whole)
    else:
        parts = [{_BASE: whole["optimizer_state_dict"], _LEAN: whole["fp32_groups_flat"]}]
        _read_stage_2(found, parts, order, str(found.path))
    found.scale = scale_of(whole)


def _add_frozen(found: Saved, models: list[Any]) -> None:
    """Joins frozen weights, which stage 3 stores in the model files of all ranks."""
    shapes = found.model.get("frozen_param_shapes") or {}
    for name, shape in shapes.items():
        pieces = [(model.get("frozen_param_fragments") or {}).get(name) for model in models]
        if any(piece is None for piece in pieces):
            continue
        run = _Run(pieces, str(found.path))
        found.weights[name] = run.elements(0, prod(shape)).view(tuple(shape))


# -- the universal format ----------------------------------------------------


def _read_universal(found: Saved, folder: Path, *, optimizer: bool) -> None:
    rest = load(folder / "optimizer_state.pt") if (folder / "optimizer_state.pt").is_file() else {}
    found.settings = [dict(group) for group in rest.get("param_groups", ())]
    shapes = dict(_named_shapes(found))
    for path in sorted(folder.glob("*/fp32.pt")):
        name = path.parent.name
        shape = shapes.get(name)
        found.masters[name] = _whole(path, shape)
        found.weights[name] = found.masters[name]
        if not optimizer:
            continue
        state = {p.stem: _whole(p, shape) for p in path.parent.glob("*.pt") if p.stem != "fp32"}
        found.state[name] = _scalars(state, found.settings[0] if found.settings else {}) | state
    found.scale = scale_of(rest)


def _named_shapes(found: Saved) -> Iterator[tuple[str, Sequence[int]]]:
    listed = found.model.get("param_shapes") or ()
    for number, names in enumerate(listed if isinstance(listed, list | tuple) else [listed]):
        for name, shape in names.items():
            found.group_of[name] = number
            yield name, shape


def _whole(path: Path, shape: Sequence[int] | None) -> Any:
    """Returns a value of the universal format: a tensor, or one stored with how it was divided."""
    value = load(path)
    value = value["param"] if isinstance(value, dict) else value
    if path.stem == "step" or not isinstance(value, torch.Tensor) or shape is None:
        return value
    if value.numel() != prod(shape):
        raise CheckpointError(f"{path} has {value.numel()} elements, {tuple(shape)} are needed")
    return value.reshape(tuple(shape))


def scale_of(inside: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the loss scale's state of an optimizer's file, for ``LossScale``; None for none."""
    scaler = inside.get("loss_scaler")
    kept = dict(inside) if scaler is None else vars(scaler)
    if "cur_scale" not in kept:
        return None
    return {
        "scale": float(kept["cur_scale"]),
        "iteration": int(kept.get("cur_iter", 0)),
        "last_overflow": int(kept.get("last_overflow_iter", -1)),
        "left": int(kept.get("cur_hysteresis", 1)),
    }
