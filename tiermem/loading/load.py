"""Models whose weights come from a safetensors checkpoint, and stay there until they are used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiermem.config import parse_path
from tiermem.errors import CheckpointError, ConfigError
from tiermem.loading.build import is_pretrained_class, model_of
from tiermem.loading.origins import FileOrigins
from tiermem.loading.sources import Names, Source, sources_of, wanted_by
from tiermem.loading.tied import untie
from tiermem.loading.untouched import Untouched
from tiermem.nn.wrap.wrapped import Blocks
from tiermem.runtime.base.functorch import outside_inference
from tiermem.storage.checkpoint.folder import CheckpointFiles
from tiermem.tier import TierManager


def load_checkpoint(
    model_or_factory: Any,
    path: str | os.PathLike[str],
    *,
    tier: TierManager,
    names: Names | None = None,
    dtype: torch.dtype | None = None,
    lora: Any = None,
    blocks: Blocks = "auto",
) -> nn.Module:
    """Wraps a model whose weights are in a safetensors checkpoint.

    The checkpoint's files are a home of the NVMe tier. With ``Policy(params="auto")`` or ``"nvme"``
    weights are read from them when they are needed, and DRAM keeps copies as far as it has room.
    ``"dram"`` and ``"hbm"`` fill that tier once. The files are never written: a weight that is
    written gets a home as the policy says. They must not be changed while the model is in the
    tiers.

    Args:
        model_or_factory: A module, whose parameters may be on the meta device; a callable that
            makes one, whose parameters take no memory; or a class of transformers, such as
            ``AutoModelForCausalLM``, or of diffusers, such as ``UNet2DConditionModel``, which is
            made from the folder's ``config.json`` with the dtypes, buffers and tied weights of
            ``from_pretrained``.
        path: A safetensors file, or a folder with ``model.safetensors`` or an index.
        tier: The manager.
        names: The file's name for each of the model's parameters and persistent buffers: a
            mapping (names that are not in it stay) or a callable. With it, other tensors of the
            files are ignored.
        dtype: Parameters of floating dtype get this one; by default a module's stay as they are.
            Those of a class of transformers or diffusers are as ``from_pretrained`` makes them,
            with and without it.
        lora: Puts adapters around frozen weights: a :class:`tiermem.Lora` or a ``peft.LoraConfig``.
        blocks: As :meth:`tiermem.TierManager.wrap` takes it.

    Returns:
        The model, wrapped.

    Raises:
        CheckpointError: If the files are no valid checkpoint, names are missing or unexpected,
            shapes differ, or a meta buffer gets no value. Nothing is changed.
        CapacityError: If a budget cannot hold it.
        ConfigError: If the first argument makes no module, or another is of a wrong kind.
        StorageError: If the files cannot be read, or change meanwhile.
    """
    if torch.is_inference_mode_enabled():  # a model made in it could not be trained
        options: dict[str, Any] = {"names": names, "dtype": dtype, "lora": lora, "blocks": blocks}
        with outside_inference():
            return load_checkpoint(model_or_factory, path, tier=tier, **options)
    if not isinstance(tier, TierManager):
        raise ConfigError(f"tier must be a TierManager, not {tier!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"dtype must be a floating dtype such as torch.bfloat16, not {dtype!r}")
    where = Path(parse_path(path, "path", CheckpointError))
    files = CheckpointFiles.open(where)
    by_class = is_pretrained_class(model_or_factory)
    model = model_of(model_or_factory, where, files, dtype)
    settings = None if lora is None else _settings(lora)
    sources = sources_of(model, files, names, initialize=by_class)
    untie(model, sources, files)
    _check_buffers(model, sources)
    if settings is not None:
        from tiermem.lora.adapters import add_adapters

        add_adapters(model, settings)
    own = None if by_class else dtype  # such are made in it
    _wrap(model, files, sources, tier, own, blocks)
    return model


def _wrap(
    model: nn.Module,
    files: CheckpointFiles,
    sources: dict[str, Source],
    tier: TierManager,
    dtype: torch.dtype | None,
    blocks: Blocks,
) -> None:
    """Wraps the model with its values from the files, and begins to read them."""
    manager = tier._manager
    untouched = Untouched(model, _casts(model, dtype, sources))
    try:
        wanted = wanted_by(model)
        by_id = {id(wanted[name]): source for name, source in sources.items()}
        names = {id(wanted[name]): name for name in sources}
        first = manager.attach_files(files.paths, files.check_unchanged)
        store = manager.parts.homes.open_sources()
        fds = [store.fds[2 * file + 1] for file in range(first, first + len(files.paths))]
        origins = FileOrigins(files, first, by_id, names, manager.read_files, fds)
        wrapped = tier._wrap_model(model, blocks, origins=origins)
    except BaseException:
        untouched.undo()
        raise
    managed = wrapped.managed()
    with torch.no_grad():
        for tensor in {id(t): t for t in wanted.values()}.values():
            value = None if id(tensor) in managed else origins.value(tensor)
            if value is not None:
                tensor.copy_(value)


def _settings(lora: Any) -> Any:
    from tiermem.lora.config import Lora

    return Lora.of(lora)


def _casts(
    model: nn.Module, dtype: torch.dtype | None, sources: dict[str, Source]
) -> dict[int, torch.dtype]:
    """Returns the dtypes of the parameters that get another one, by id."""
    if dtype is None:
        return {}
    params = dict(model.named_parameters(remove_duplicate=False))
    return {
        id(params[name]): dtype
        for name in sources
        if name in params and params[name].is_floating_point()
    }


def _check_buffers(model: nn.Module, sources: dict[str, Source]) -> None:
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if buffer.is_meta and name not in sources:
            raise CheckpointError(
                f"buffer {name!r} is on the meta device and has no value in the checkpoint; make "
                "the model with real buffers (give load_checkpoint the callable that makes it)"
            )
