"""Checkpoints of an engine: written to a new folder and renamed, so a crash leaves the old one.

The files are written by ``torch.save``, with the names that DeepSpeed uses. The model's file has
DeepSpeed's format below stage 3. The optimizer's file has a format of tiermem's own, since
DeepSpeed's is flattened and divided by process. Both formats are read, and no code in them is run.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tiermem import CheckpointError

from . import foreign, shards, unpickling

if TYPE_CHECKING:
    from .engine import DeepSpeedEngine

MODEL = "mp_rank_00_model_states.pt"
STATE = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
_COUNTERS = ("global_steps", "skipped_steps", "global_samples", "micro_steps")
_OWN = {
    *_COUNTERS, "module", "lr_scheduler", "dp_world_size", "mp_world_size", "ds_config",
    "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
    "shared_params", "data_sampler", "random_ltd", "sparse_tensor_module_names", "ds_version",
    "checkpoint_parallel_dimensions", "universal_checkpoint_info",
}  # fmt: skip


def weights_of(module: nn.Module, exclude_frozen: bool = False) -> dict[str, Any]:
    """Returns a module's state dict.

    Args:
        module: Wrapped.
        exclude_frozen: Whether to leave out parameters that are not trained.
    """
    found: dict[str, Any] = module.state_dict()
    if exclude_frozen:
        for name, param in module.named_parameters(remove_duplicate=False):
            if not param.requires_grad:
                found.pop(name, None)
    return found


def save(
    engine: DeepSpeedEngine,
    save_dir: str | os.PathLike[str],
    tag: object,
    client_state: Mapping[str, Any],
    save_latest: bool,
    exclude_frozen: bool,
) -> bool:
    """Writes model, optimizer, scheduler, counters and the caller's state.

    Args:
        engine: The engine.
        save_dir: Folder; made if it is not there.
        tag: Folder inside it; by default ``global_step`` and the number.
        client_state: The caller's own, returned by :func:`load`.
        save_latest: Whether ``latest`` names this one from now on.
        exclude_frozen: Whether to leave out parameters that are not trained.

    Returns:
        True.

    Raises:
        CheckpointError: If ``client_state`` has a key that is in use.
    """
    taken = sorted(_OWN & client_state.keys())
    if taken:
        raise CheckpointError(f"client_state[{taken[0]!r}]: the key is in use; choose another")
    name = f"global_step{engine.global_steps}" if tag is None else str(tag)
    folder = Path(save_dir) / name
    folder.mkdir(parents=True, exist_ok=True)
    scheduler = engine.lr_scheduler
    model = {
        "module": weights_of(engine.module, exclude_frozen),
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": engine.config,
        **{key: getattr(engine, key) for key in _COUNTERS},
        **client_state,
    }
    _write(model, folder / MODEL)
    del model
    if engine.optimizer is not None:
        scale = None if engine.scaler is None else engine.scaler.state_dict()
        names = [name for group in foreign.names_of(engine) for name in group]
        state = {"optimizer": engine.optimizer.state_dict(), "loss_scale": scale, "names": names}
        _write(state, folder / STATE)
    if save_latest:
        beside = Path(save_dir) / "latest.part"
        beside.write_text(name, encoding="utf-8")
        beside.replace(Path(save_dir) / "latest")
    return True


def _write(value: Any, path: Path) -> None:
    beside = path.with_suffix(".part")
    with open(beside, "wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def load(
    engine: DeepSpeedEngine,
    load_dir: str | os.PathLike[str],
    tag: object = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Any = None,
) -> tuple[str | None, dict[str, Any] | None]:
    """Reads what :func:`save` wrote, or DeepSpeed: ZeRO 0 to 3 of any ranks, or universal.

    Args:
        engine: The engine.
        load_dir: Folder.
        tag: Folder inside it; by default what ``latest`` names.
        load_module_strict: Whether every name must fit.
        load_optimizer_states: Whether to load state and masters.
        load_lr_scheduler_states: Whether to load the scheduler's state.
        load_module_only: Whether to load only the weights.
        custom_load_fn: Called with ``src`` and ``dst`` in place of ``load_state_dict``.

    Returns:
        The path and the caller's state; twice None where there is no ``latest``.

    Raises:
        CheckpointError: If there is no such checkpoint, or it does not fit. A file that cannot be
            read leaves the engine as it was.
    """
    name = _latest(engine, Path(load_dir)) if tag is None else str(tag)
    if name is None:
        warnings.warn(f"{load_dir} has no file 'latest'; nothing is loaded", stacklevel=3)
        return None, None
    folder = Path(load_dir) / name
    path = shards.model_file(folder)
    if path is None:
        raise CheckpointError(f"{folder / MODEL}: there is no such file; tag={name!r}")
    optimizer = engine.optimizer if load_optimizer_states and not load_module_only else None
    states = optimizer is not None
    found = unpickling.load(path)
    saved = foreign.read(engine, folder, optimizer=states) if shards.is_deepspeeds(found) else None
    kept = None
    if optimizer is not None and saved is None:
        kept = _read_state(optimizer, folder / STATE)
        if kept["optimizer"].get("master") and engine.plan.optimizer["master_dtype"] is None:
            raise CheckpointError(
                f"{folder / STATE} has masters of half-precision weights, and this engine's are "
                "their own masters; nothing was loaded. Write bf16 or fp16 as the run had it, or "
                "load_optimizer_states=False for the weights alone"
            )
    schedules = load_lr_scheduler_states and engine.lr_scheduler is not None
    if schedules and not load_module_only and found.get("lr_scheduler") is None:
        raise CheckpointError(
            f"{path} has no state of a scheduler; load_lr_scheduler_states=False leaves the "
            "engine's as it is"
        )
    weights = found["module"] if saved is None else saved.weights
    if custom_load_fn is not None:
        with engine.tier.materialize(engine.module):
            custom_load_fn(src=weights, dst=engine.module)
    else:
        engine.module.load_state_dict(weights, strict=load_module_strict)
    if kept is not None:
        _take_state(engine, kept)
    elif states and saved is not None:
        foreign.take_state(engine, saved)
    if not load_module_only:
        if schedules:
            engine.lr_scheduler.load_state_dict(found["lr_scheduler"])
        _count(engine, found)
    return str(path), {key: value for key, value in found.items() if key not in _OWN}


def _count(engine: DeepSpeedEngine, found: Mapping[str, Any]) -> None:
    """Takes the counters over; DeepSpeed does not save them all.

    Gradients are in no checkpoint: accumulation begins anew, whatever the number of backwards was
    that a step had when it was saved.
    """
    steps = found.get("global_steps", 0)
    engine.global_steps, engine.skipped_steps = steps, found.get("skipped_steps", 0)
    engine.global_samples = found.get("global_samples", steps * engine.train_batch_size())
    each = engine.gradient_accumulation_steps()
    calls = found.get("micro_steps", steps * each)
    engine.micro_steps = calls - calls % each
    engine.zero_grad()


def _latest(engine: DeepSpeedEngine, folder: Path) -> str | None:
    """Returns the tag that a folder names, of the universal format where the file asks for it."""
    section = engine.plan.config.sections.get("checkpoint")
    universal = isinstance(section, Mapping) and bool(section.get("load_universal"))
    files = ["latest", "latest_universal"]
    for name in reversed(files) if universal else files:
        if (folder / name).is_file():
            return (folder / name).read_text(encoding="utf-8").strip()
    return None


def _read_state(optimizer: torch.optim.Optimizer, path: Path) -> dict[str, Any]:
    """Returns the optimizer's part of an engine's own checkpoint; nothing is loaded yet.

    Raises:
        CheckpointError: If it is not there, is broken, or is of an optimizer of other groups.
    """
    if not path.is_file():
        raise CheckpointError(
            f"{path}: there is no such file; load_optimizer_states=False loads the weights alone"
        )
    state: dict[str, Any] = unpickling.load(path)
    if "optimizer" not in state or "param_groups" not in state["optimizer"]:
        raise CheckpointError(
            f"{path} has no optimizer state of this engine's, and the model's file beside it is "
            "not DeepSpeed's; load_optimizer_states=False loads the weights alone"
        )
    saved, here = (
        [len(group["params"]) for group in groups]
        for groups in (state["optimizer"]["param_groups"], optimizer.param_groups)
    )
    if saved != here:
        raise CheckpointError(
            f"{path}: its optimizer has groups of {saved} parameters, this one of {here}; nothing "
            "was loaded. load_optimizer_states=False loads the weights alone"
        )
    return state


def _take_state(engine: DeepSpeedEngine, state: dict[str, Any]) -> None:
    if engine.optimizer is not None:
        engine.optimizer.load_state_dict(state["optimizer"])
    if engine.scaler is not None and state.get("loss_scale") is not None:
        engine.scaler.load_state_dict(state["loss_scale"])
        engine.show_scale()


def save_weights(
    engine: DeepSpeedEngine,
    save_dir: str | os.PathLike[str],
    save_filename: str,
    exclude_frozen: bool,
) -> bool:
    """Writes the model's state dict as the model computes with it.

    Args:
        engine: The engine.
        save_dir: Folder; made if it is not there.
        save_filename: File in it.
        exclude_frozen: Whether to leave out parameters that are not trained.

    Returns:
        Whether it was written: at stage 3 only with ``gather_16bit_weights_on_model_save``.
    """
    gathers = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    if engine.plan.stage == 3 and not engine.plan.config[gathers]:
        return False
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    _write(weights_of(engine.module, exclude_frozen), Path(save_dir) / save_filename)
    return True
