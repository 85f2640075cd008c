"""``deepspeed.utils.zero_to_fp32``: the float32 weights of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiermem import CheckpointError
from tiermem.config import parse_size

from . import shards, unpickling


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Any,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """Returns the float32 weights of a checkpoint, DeepSpeed's or an engine's of this package.

    Args:
        checkpoint_dir: Folder.
        tag: Folder inside it; by default what ``latest`` names.
        exclude_frozen_parameters: Without parameters that were not trained.
        lazy_mode: Without effect: tensors that need no joining are mapped from the file anyway.

    Raises:
        CheckpointError: If there is none.
    """
    if tag is None:
        latest = Path(checkpoint_dir) / "latest"
        if not latest.is_file():
            raise CheckpointError(f"{latest}: there is no such file; give tag=")
        tag = latest.read_text(encoding="utf-8").strip()
    folder = Path(checkpoint_dir) / str(tag)
    path = shards.model_file(folder)
    if path is None:
        raise CheckpointError(f"{folder}: there is no file *_model_states.pt")
    model = unpickling.load(path)
    if shards.is_deepspeeds(model):
        found = shards.read(folder, ())
        weights, masters = found.weights, found.masters
        frozen = set(found.model.get("frozen_param_shapes") or ())
    else:
        weights, (masters, frozen) = model["module"], _own_masters(folder, model["module"])
    whole = {name: value for name, value in weights.items() if value.numel() or value.dim() == 0}
    whole |= masters
    return {
        name: value.float() if value.is_floating_point() else value
        for name, value in whole.items()
        if not (exclude_frozen_parameters and name in frozen)
    }


def _own_masters(
    folder: Path, weights: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Returns the masters of a checkpoint of this package, and the names that have no state."""
    path = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    if not path.is_file():
        return {}, set()
    saved = unpickling.load(path)
    names, masters = saved.get("names", []), saved["optimizer"].get("master", {})
    return {names[n]: v for n, v in masters.items()}, set(weights) - set(names)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: Any, tag: str | None = None
) -> nn.Module:
    """Gives a plain model, in host memory, the weights of a checkpoint; returns it."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model.cpu().load_state_dict(state, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Any,
    output_dir: Any,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the float32 weights of a checkpoint as files of transformers' names.

    Args:
        checkpoint_dir: Folder.
        output_dir: Folder; made if it is not there.
        max_shard_size: Most bytes of a file; None for one file.
        safe_serialization: Whether to write safetensors.
        tag: Folder inside ``checkpoint_dir``; by default what ``latest`` names.
        exclude_frozen_parameters: Without parameters that were not trained.
    """
    from safetensors.torch import save_file

    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    stem, end = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    most = None if max_shard_size is None else parse_size(max_shard_size, "max_shard_size")
    parts: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, value in state.items():
        if most is not None and parts[-1] and size + value.nbytes > most:
            parts.append({})
            size = 0
        parts[-1][name] = value.contiguous().clone()
        size += value.nbytes
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        several = f"-{number:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
        file = f"{stem}{several}.{end}"
        index |= dict.fromkeys(part, file)
        if safe_serialization:
            save_file(part, folder / file, metadata={"format": "pt"})
        else:
            torch.save(part, folder / file)
    if len(parts) > 1:
        total = sum(value.nbytes for value in state.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        (folder / f"{stem}.{end}.index.json").write_text(text + "\n", encoding="utf-8")
