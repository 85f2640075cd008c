"""Makes the model that a checkpoint is for: its parameters take no memory, its buffers are real."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiermem.errors import CheckpointError, ConfigError
from tiermem.loading.expected import HAS_VALUES, saved_buffers
from tiermem.loading.untouched import parameters_on_meta
from tiermem.storage.checkpoint.folder import CheckpointFiles

Factory = nn.Module | Callable[[], nn.Module]


def model_of(
    made_by: Any, path: Path, files: CheckpointFiles, dtype: torch.dtype | None
) -> nn.Module:
    """Returns a module, or makes one.

    Args:
        made_by: A module; a callable without arguments that makes one; or a class of transformers
            (``AutoModelForCausalLM``, ``LlamaForCausalLM``) or of diffusers, made from the folder's
            config.json.
        path: The checkpoint.
        files: The same, opened.
        dtype: Of such a class's parameters; None for what ``from_pretrained`` takes.

    Raises:
        CheckpointError: If the folder has no configuration for a class.
        ConfigError: If it is none of these.
    """
    if isinstance(made_by, nn.Module):
        return made_by
    if is_pretrained_class(made_by):
        folder = _with_config(made_by, path)
        if hasattr(made_by, "load_config"):
            return _diffusers_model(made_by, folder, dtype)
        return _transformers_model(made_by, folder, files, dtype)
    if not callable(made_by):
        raise ConfigError(
            "load_checkpoint takes a module, a callable that makes one or a class of "
            f"transformers or diffusers, not {made_by!r}"
        )
    with parameters_on_meta():
        model = made_by()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{made_by!r} returned {type(model).__name__}, and no torch module")
    return model


def is_pretrained_class(made_by: Any) -> bool:
    """Whether models are made of a folder's config.json by it, in the dtypes that they are to have.

    Raises:
        ConfigError: If it has ``from_pretrained`` but nobody here knows how it makes models.
    """
    if not isinstance(made_by, type) or not hasattr(made_by, "from_pretrained"):
        return False
    module = issubclass(made_by, nn.Module)
    if hasattr(made_by, "load_config") and module:  # of diffusers
        return True
    if (
        hasattr(made_by, "config_class")
        if module
        else made_by.__module__.startswith("transformers") and hasattr(made_by, "from_config")
    ):
        return True
    raise ConfigError(
        f"load_checkpoint knows the classes of transformers' and diffusers' models, and "
        f"{made_by.__module__}.{made_by.__name__} is none of them; give it a callable that makes "
        "the model, such as `lambda: Model(config)`"
    )


def _with_config(cls: Any, path: Path) -> Path:
    """Returns the folder of a checkpoint that has a config.json."""
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder}: there is no config.json, which {cls.__name__} is made from; give a module "
            "or a callable that makes one"
        )
    return folder


def _diffusers_model(cls: Any, folder: Path, dtype: torch.dtype | None) -> nn.Module:
    """Makes a model as ``from_pretrained`` of diffusers does."""
    try:
        config = cls.load_config(folder, local_files_only=True)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{folder}/config.json: {error}") from error
    if config.get("quantization_config") is not None:
        raise _quantized(folder)
    from diffusers.models import modeling_utils

    # draws from the generator as often as from_pretrained, so that adapters get the same numbers
    with (
        getattr(modeling_utils, "no_init_weights", nullcontext)(),
        parameters_on_meta(),
        _by_default(dtype),
    ):
        model: Any = cls.from_config(config)
    model.register_to_config(_name_or_path=str(folder))
    kept = set(cls._keep_in_fp32_modules or ())
    for name, tensor in (*model.named_parameters(), *saved_buffers(model).items()):
        if dtype is not None and tensor.is_floating_point():
            own = torch.float32 if kept.intersection(name.split(".")) else dtype
            tensor.data = tensor.data.to(own)
    return model.eval()  # type: ignore[no-any-return]


@contextmanager
def _by_default(dtype: torch.dtype | None) -> Iterator[None]:
    """Floating tensors are made in a dtype, if it may be a default: buffers of no file as well."""
    before = torch.get_default_dtype()
    if dtype is not None and dtype.itemsize > 1:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _quantized(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder}/config.json: quantized checkpoints cannot be streamed from their files; load it "
        "to host memory with from_pretrained(folder) and call tier.wrap(model), or make one that "
        "is not quantized with from_pretrained(folder).dequantize() and save_pretrained(another)"
    )


def _transformers_model(
    cls: Any, folder: Path, files: CheckpointFiles, dtype: torch.dtype | None
) -> nn.Module:
    from transformers import AutoConfig, GenerationConfig
    from transformers.initialization import guard_torch_init_functions

    auto = not isinstance(cls, type) or not issubclass(cls, nn.Module)
    config_class = AutoConfig if auto else cls.config_class
    try:
        config = config_class.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError(f"{folder}/config.json: {error}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise _quantized(folder)
    dtype = dtype or getattr(config, "dtype", None) or _first_dtype(files)
    make = cls.from_config if auto else cls._from_config
    # transformers draws no values for what is said to have them: random numbers for parameters
    # without memory took as long as all else that makes a model of 32 layers
    before = torch.get_rng_state()
    with (
        torch.random.fork_rng(devices=[]),
        guard_torch_init_functions(),
        parameters_on_meta(**{HAS_VALUES: True}),
    ):
        model: Any = make(config, dtype=dtype)
        drawn = not torch.equal(torch.get_rng_state(), before)
        _thaw(model)
    if drawn:
        _draw_as_from_pretrained(lambda: make(copy.deepcopy(config), dtype=dtype))
    for param in model.parameters():
        param.__dict__.pop(HAS_VALUES, None)
    model.tie_weights()
    _keep_in_float32(model, dtype)
    model.config._name_or_path = str(folder)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model.eval()  # type: ignore[no-any-return]


def _draw_as_from_pretrained(make: Callable[[], Any]) -> None:
    """Leaves the random generator as ``from_pretrained`` does: adapters are drawn next.

    It makes the model on the meta device, where ``torch.randn`` draws nothing, and
    ``torch.normal(0.0, 1.0, size)`` and what names another device do.
    """
    from transformers import initialization

    safe = getattr(initialization, "meta_device_safe_creation_ops", nullcontext)
    with torch.device("meta"), safe():
        make()


def _thaw(model: Any) -> None:
    """Has those parameters trained that are after ``from_pretrained``.

    It makes new ones of all it reads, which are trained: also those that the class freezes as it is
    made, such as tables of positions. Then it calls ``_init_weights``, which may freeze some again.
    """
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    if not frozen:
        return
    for param in frozen:
        param.requires_grad = True
    for module in model.modules():
        module.__dict__.pop(HAS_VALUES, None)  # else it is passed over
    model.initialize_weights()


def _first_dtype(files: CheckpointFiles) -> torch.dtype:
    floating = (t.dtype for t in files.tensors.values() if t.dtype.is_floating_point)
    return next(floating, torch.get_default_dtype())


def _keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Gives what transformers keeps in float32 that dtype: parameters, and buffers of its files."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    pattern, group_of, _ = build_glob_alternation(list(plan))
    params = [(name, param) for name, param in model.named_parameters() if param.is_meta]
    for name, tensor in (*params, *saved_buffers(model).items()):
        match = pattern.search(name)
        if match is not None:
            tensor.data = tensor.data.to(plan[group_of[str(match.lastgroup)]])
