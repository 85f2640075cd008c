"""Models whose weights are in a safetensors checkpoint, and stay there until they are used."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiermem.config import parse_path
from tiermem.errors import CheckpointError, ConfigError
from tiermem.loading.build import is_pretrained_class, model_of
from tiermem.loading.options import ClassOptions, dtype_of
from tiermem.loading.origins import FileOrigins
from tiermem.loading.sources import Found, Names, Source, some_of, sources_of, wanted_by
from tiermem.loading.tied import untie
from tiermem.loading.untouched import Untouched
from tiermem.nn.wrap.wrapped import Blocks
from tiermem.runtime.base.functorch import outside_inference
from tiermem.storage.checkpoint.folder import ADAPTERS, CheckpointFiles
from tiermem.tier import TierManager


def load_checkpoint(
    model_or_factory: Any,
    path: str | os.PathLike[str],
    *,
    tier: TierManager,
    names: Names | None = None,
    dtype: torch.dtype | str | None = None,
    lora: Any = None,
    blocks: Blocks = "auto",
    **options: Any,
) -> nn.Module:
    """Wraps a model whose weights are in a safetensors checkpoint.

    The checkpoint's files become a home of the NVMe tier. With ``Policy(params="auto")`` or
    ``"nvme"`` weights are read from them when they are needed, and DRAM keeps copies as far as it
    has room. ``"dram"`` and ``"hbm"`` read them into that tier once. The files are never written: a
    weight that is written gets a home according to the policy. They must not be changed while the
    model is in the tiers.

    Args:
        model_or_factory: A module, whose parameters may be on the meta device; a callable that
            creates one, whose parameters take no memory; or a class of transformers, such as
            ``AutoModelForCausalLM``, or of diffusers, such as ``UNet2DConditionModel``, which is
            created from the folder's ``config.json`` with the dtypes, buffers and tied weights of
            ``from_pretrained``. With a class of transformers, weights that the files do not have
            are initialized like in ``from_pretrained``, and tensors that the model does not have
            are ignored; a ``UserWarning`` names them. With a module or a callable these are errors.
        path: A safetensors file, or a folder with ``model.safetensors`` or an index.
        tier: The manager.
        names: The file's name for each of the model's parameters and persistent buffers: a
            mapping (names not in it are unchanged) or a callable. It replaces the rules by which
            transformers adds or removes prefixes and renames or converts tensors. With it,
            other tensors of the files are ignored.
        dtype: Parameters of floating dtype get this one, given as ``torch.bfloat16`` or
            ``"bfloat16"``; by default, or with ``"auto"``, those of a module are not changed.
            Those of a class of transformers or diffusers are the same as with
            ``from_pretrained``, with and without this argument.
        lora: Puts adapters around frozen weights: a :class:`tiermem.Lora` or a ``peft.LoraConfig``.
        blocks: As for :meth:`tiermem.TierManager.wrap`.
        **options: Options of a class's ``from_pretrained``: ``subfolder``, ``variant``, ``config``,
            ``trust_remote_code``, ``attn_implementation``, ``ignore_mismatched_sizes``,
            ``torch_dtype``, and attributes of the configuration, such as ``num_labels=3``. Those of
            downloads (``revision``, ...) have no effect for a folder; those that determine where
            weights go (``device_map``, ...) or that quantize them are refused.

    Returns:
        The model, wrapped.

    Raises:
        CheckpointError: If the files are not a valid checkpoint, names are missing or unexpected,
            shapes differ, or a meta buffer gets no value. Nothing is changed.
        CapacityError: If a budget has no room for it.
        ConfigError: If the first argument creates no module, or another one is of a wrong kind.
        StorageError: If the files cannot be read, or change meanwhile.
    """
    former = options.pop("torch_dtype", None)  # its name in earlier releases of transformers
    dtype = former if dtype is None else dtype
    return _load(model_or_factory, path, tier, names, dtype, lora, blocks, options)


def load_made(
    model: nn.Module,
    path: Path,
    *,
    tier: TierManager,
    tell: Callable[[str], object],
    lora: Any = None,
) -> nn.Module:
    """Wraps a model created by :func:`tiermem.loading.build.model_of`, like a class.

    Tensors that the files do not have are an error, as newly drawn values must not be used.

    Args:
        model: The model.
        path: Its folder.
        tier: The manager.
        tell: Called with the warnings of :func:`load_checkpoint`.
        lora: As for :func:`load_checkpoint`.
    """
    return _load(model, path, tier, None, None, lora, "auto", {}, tell)


def _load(
    made_by: Any,
    path: str | os.PathLike[str],
    tier: TierManager,
    names: Names | None,
    dtype: Any,
    lora: Any,
    blocks: Blocks,
    given: dict[str, Any],
    tell: Callable[[str], object] | None = None,
) -> nn.Module:
    if torch.is_inference_mode_enabled():  # a model created in inference mode could not be trained
        with outside_inference():
            return _load(made_by, path, tier, names, dtype, lora, blocks, given, tell)
    if not isinstance(tier, TierManager):
        raise ConfigError(f"tier must be a TierManager, not {tier!r}")
    dtype = dtype_of(dtype)
    where = Path(parse_path(path, "path", CheckpointError))
    by_class, made = is_pretrained_class(made_by), tell is not None
    options = ClassOptions.of(given, by_class)
    where = where / options.subfolder if options.subfolder else where
    files = CheckpointFiles.open(where, options.variant)
    model = model_of(made_by, where, files, dtype, options)
    if by_class and lora is None:
        _check_no_adapters(where)
    settings = None if lora is None else _settings(lora)
    found = sources_of(
        model, files, names, initialize=by_class or made,
        mismatched_too=options.ignore_mismatched_sizes,
    )  # fmt: skip
    if made and found.drawn:
        raise CheckpointError(
            f"{where}: {len(found.drawn)} tensors of {type(model).__name__} are missing: "
            f"{some_of(found.drawn)}; load_checkpoint in Python would draw them at random, as "
            "from_pretrained does"
        )
    apart = untie(model, found.sources, files)
    _check_buffers(model, found.sources)
    if settings is not None:
        from tiermem.lora.adapters import add_adapters

        add_adapters(model, settings)
    own = None if by_class else dtype  # a class creates its model in it
    _wrap(model, files, found.sources, tier, own, blocks)
    said = _said(found, apart)
    if said and tell is not None:
        tell(f"{where}: {said}")
    elif said:
        level = 3  # for the caller of load_checkpoint
        warnings.warn(f"{type(model).__name__} from {where}: {said}", UserWarning, level)
    return model


def _check_no_adapters(where: Path) -> None:
    """Refuses a folder of a model that also has adapters, which ``from_pretrained`` would add.

    Raises:
        CheckpointError: If there are adapters that were not requested.
    """
    folder = where if where.is_dir() else where.parent
    if (folder / ADAPTERS).is_file():
        raise CheckpointError(
            f"{folder} has adapters beside the model (adapter_config.json), which from_pretrained "
            f"would put on it; give lora=peft.LoraConfig.from_pretrained({str(folder)!r}) and call "
            "tiermem.load_adapters(model, folder) then, or move the adapters to another folder"
        )


def _said(found: Found, apart: list[str]) -> str:
    """Returns the warnings of ``from_pretrained``."""
    said = []
    if found.drawn:
        said.append(
            f"{len(found.drawn)} tensors of the model are not in the files and were newly "
            f"initialized, as from_pretrained does ({some_of(found.drawn)}): train them before "
            "you use the model"
        )
    if found.mismatched:
        said.append(
            f"{len(found.mismatched)} have another shape in the files and were newly initialized "
            f"({some_of(found.mismatched)})"
        )
    if found.unused:
        said.append(
            f"{len(found.unused)} tensors of the files are none of the model's and were left "
            f"({some_of(found.unused)})"
        )
    if apart:
        said.append(
            f"the configuration ties {some_of(apart)}, and the files have other values for them, "
            "so they were not tied; set tie_word_embeddings=False in config.json"
        )
    return "; ".join(said)


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
    """Returns the dtypes of the parameters that are cast, by id."""
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
