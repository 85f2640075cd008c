"""Creates the model of a checkpoint: its parameters take no memory, its buffers are real."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiermem.errors import CheckpointError, ConfigError
from tiermem.loading.expected import HAS_VALUES, kept_dtype, saved_buffers
from tiermem.loading.options import ClassOptions
from tiermem.loading.untouched import parameters_on_meta
from tiermem.storage.checkpoint.folder import CheckpointFiles
from tiermem.storage.checkpoint.header import LFS_POINTER, POINTER_SAID


def model_of(
    made_by: Any,
    path: Path,
    files: CheckpointFiles,
    dtype: torch.dtype | None,
    options: ClassOptions | None = None,
) -> nn.Module:
    """Returns a module, or creates one.

    Args:
        made_by: A module; a callable without arguments that creates one; or a class of transformers
            (``AutoModelForCausalLM``, ``LlamaForCausalLM``) or of diffusers, created from the
            folder's config.json.
        path: The checkpoint.
        files: The same, opened.
        dtype: Dtype of such a class's parameters; None for the default of ``from_pretrained``.
        options: Options of such a class.

    Raises:
        CheckpointError: If the folder has no configuration for the class, or that of another one.
        ConfigError: If it is none of these, or the class has no such option.
    """
    if isinstance(made_by, nn.Module):
        return made_by
    if is_pretrained_class(made_by):
        options = options or ClassOptions()
        folder = _with_config(made_by, path, options)
        if hasattr(made_by, "load_config"):
            return _diffusers_model(made_by, folder, dtype, options)
        return _transformers_model(made_by, folder, files, dtype, options)
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
    """Whether it creates models from a folder's config.json, in their final dtypes.

    Raises:
        ConfigError: If it has ``from_pretrained`` but tiermem does not support how it creates
            models.
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
    name = made_by.__name__
    if made_by.__module__.startswith("peft."):
        instead = (
            "give it the class of the base model, its folder and lora=, then call "
            "tiermem.load_adapters(model, the adapters' folder)"
        )
    elif name.endswith("Pipeline"):
        instead = "give it the class of one of its models and subfolder="
    else:
        instead = "give it a callable that makes the model, such as `lambda: Model(config)`"
    raise ConfigError(
        f"load_checkpoint knows the classes of transformers' and diffusers' models, and "
        f"{made_by.__module__}.{name} is none of them; {instead}"
    )


def _with_config(cls: Any, path: Path, options: ClassOptions) -> Path:
    """Returns the folder of a checkpoint that has a config.json, unless another is given."""
    folder = path if path.is_dir() else path.parent
    if not path.is_dir() and path.name.startswith("adapter_model"):
        raise CheckpointError(
            f"{path}: these are adapters: load their base model with lora=, then call "
            "tiermem.load_adapters(model, folder)"
        )
    if options.config is None and not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder}: there is no config.json, which {cls.__name__} is made from; download it, "
            "or give config=, a module or a callable that makes one"
        )
    return folder


def _diffusers_model(
    cls: Any, folder: Path, dtype: torch.dtype | None, options: ClassOptions
) -> nn.Module:
    """Creates a model like ``from_pretrained`` of diffusers."""
    where = folder if options.config is None else options.config
    try:
        config, unused = cls.load_config(
            where, local_files_only=True, return_unused_kwargs=True, **options.others
        )
    except Exception as error:  # as for transformers
        raise _no_config(where, error) from error
    if config.get("quantization_config") is not None:
        raise _quantized(folder)
    from diffusers.models import modeling_utils

    # draws from the generator as often as from_pretrained, so that adapters get the same values
    with (
        getattr(modeling_utils, "no_init_weights", nullcontext)(),
        parameters_on_meta(),
        _by_default(dtype),
    ):
        model: Any = _made(cls, folder, unused, lambda: cls.from_config(config, **unused))
    model.register_to_config(_name_or_path=str(folder))
    kept = set(cls._keep_in_fp32_modules or ())
    for name, tensor in (*model.named_parameters(), *saved_buffers(model).items()):
        if dtype is not None and tensor.is_floating_point():
            own = torch.float32 if kept.intersection(name.split(".")) else dtype
            tensor.data = tensor.data.to(own)
    return model.eval()  # type: ignore[no-any-return]


@contextmanager
def _by_default(dtype: torch.dtype | None) -> Iterator[None]:
    """Creates floating tensors in a dtype, if it may be a default; also buffers in no file."""
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


def _made(cls: Any, folder: Path, options: Mapping[str, Any], make: Callable[[], Any]) -> Any:
    """Creates a model from a configuration.

    Raises:
        CheckpointError: If it cannot be created from it.
        ConfigError: If options were given that class and configuration do not have.
    """
    try:
        return make()
    except Exception as error:  # any exception of a class: there is no common one
        said = str(error).partition("\n")[0]
        if options and isinstance(error, TypeError):
            named = ", ".join(options)
            raise ConfigError(
                f"{cls.__name__} and its configuration know no option {named}: {said}"
            ) from error
        raise CheckpointError(
            f"{folder}/config.json: {cls.__name__} makes no model of it: {said}"
        ) from error


def _transformers_config(
    cls: Any, folder: Path, options: ClassOptions
) -> tuple[Any, dict[str, Any]]:
    """Returns the configuration, and the options that it does not have."""
    from transformers import AutoConfig, PreTrainedConfig

    others = dict(options.others)
    if isinstance(options.config, PreTrainedConfig):
        return copy.deepcopy(options.config), others
    where = folder if options.config is None else options.config
    auto = not issubclass(cls, nn.Module)
    if auto and options.trust_remote_code is not None:
        others["trust_remote_code"] = options.trust_remote_code
    # those belong to the model, not to the configuration
    apart = {name: others.pop(name) for name in _IMPLEMENTATIONS if name in others}
    config_class = AutoConfig if auto else cls.config_class
    try:
        config, unused = config_class.from_pretrained(
            where, local_files_only=True, return_unused_kwargs=True, **others
        )
    except Exception as error:  # a broken file may cause any exception
        raise _no_config(where, error) from error
    unused.pop("trust_remote_code", None)
    return config, {**unused, **apart}


def _no_config(where: Any, error: Exception) -> CheckpointError:
    """Returns the error for a config.json that cannot be read, or belongs to another model."""
    path = f"{where}/config.json"
    begin = b""
    with suppress(OSError, ValueError), open(path, "rb") as file:
        begin = file.read(len(LFS_POINTER))
    if begin == LFS_POINTER:
        return CheckpointError(f"{path}: {POINTER_SAID}")
    said = " ".join(str(error).split()).rstrip(".")
    again = "" if "trust_remote_code" in said else "; if it is damaged, download it again"
    return CheckpointError(f"{path}: no configuration can be made of it: {said}{again}")


_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")


def _text_alone(cls: Any, config: Any) -> Any:
    """Returns the part of a configuration from which an auto class creates its model.

    For a model of text and images ``AutoModelForCausalLM`` creates the text model, in its dtype.
    """
    part = getattr(config, "sub_configs", {}).get("text_config")
    mapping = getattr(cls, "_model_mapping", None)
    if part is None or mapping is None or type(config) not in mapping:
        return config
    made = mapping[type(config)]
    classes = made if isinstance(made, (list, tuple)) else (made,)
    if all(getattr(each, "config_class", None) is part for each in classes):
        return config.get_text_config()
    return config


def _transformers_model(
    cls: Any,
    folder: Path,
    files: CheckpointFiles,
    dtype: torch.dtype | None,
    options: ClassOptions,
) -> nn.Module:
    from transformers.initialization import guard_torch_init_functions

    auto = not isinstance(cls, type) or not issubclass(cls, nn.Module)
    config, others = _transformers_config(cls, folder, options)
    if getattr(config, "quantization_config", None) is not None:
        raise _quantized(folder)
    named = getattr(config, "transformers_weights", None)
    if named is not None and named not in {each.name for each in files.paths}:
        raise CheckpointError(
            f"{folder}/config.json: transformers_weights names {named!r}, and other files are "
            f"read; give load_checkpoint the path of that one, {folder / named}"
        )
    stated = _text_alone(cls, config) if auto else config
    dtype = dtype or getattr(stated, "dtype", None) or _first_dtype(files)
    if auto and options.trust_remote_code is not None:
        others["trust_remote_code"] = options.trust_remote_code
    config._name_or_path = str(folder)  # where an auto class looks for the folder's own code

    def make() -> Any:
        create = cls.from_config if auto else cls._from_config
        return _made(
            cls, folder, others, lambda: create(copy.deepcopy(config), dtype=dtype, **others)
        )

    # transformers does not initialize what is marked as having values: random numbers for
    # parameters without memory took as long as everything else in creating a model of 32 layers
    before = torch.get_rng_state()
    with (
        torch.random.fork_rng(devices=[]),
        guard_torch_init_functions(),
        parameters_on_meta(**{HAS_VALUES: True}),
    ):
        model: Any = make()
        drawn = not torch.equal(torch.get_rng_state(), before)
        _thaw(model)
    if drawn:
        _draw_as_from_pretrained(make)
    for param in model.parameters():
        param.__dict__.pop(HAS_VALUES, None)
    model.tie_weights()
    kept = kept_dtype(model, dtype)
    params = [(name, param) for name, param in model.named_parameters() if param.is_meta]
    for name, tensor in (*params, *saved_buffers(model).items()):
        tensor.data = tensor.data.to(kept(name) or tensor.dtype)
    model.config._name_or_path = str(folder)
    _set_generation(model, folder)
    return model.eval()  # type: ignore[no-any-return]


def _set_generation(model: Any, folder: Path) -> None:
    """Gives a text-generating model the folder's settings, like ``from_pretrained``."""
    from transformers import GenerationConfig

    if not model.can_generate():
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:  # there is none, or it is unreadable: settings may be in config.json
        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(
                folder, config_file_name="config.json", local_files_only=True,
                _from_model_config=True,
            )  # fmt: skip
    except Exception as error:
        raise CheckpointError(
            f"{folder}/generation_config.json: it cannot be used: {error}; mend it, or move it away"
        ) from error


def _draw_as_from_pretrained(make: Callable[[], Any]) -> None:
    """Leaves the random generator in the state after ``from_pretrained``: adapters are drawn next.

    That creates the model on the meta device, where ``torch.randn`` draws nothing, while
    ``torch.normal(0.0, 1.0, size)`` and operations on an explicit device do.
    """
    from transformers import initialization

    safe = getattr(initialization, "meta_device_safe_creation_ops", nullcontext)
    with torch.device("meta"), safe():
        make()


def _thaw(model: Any) -> None:
    """Makes those parameters trainable that are after ``from_pretrained``.

    It creates new parameters for all it reads, which are trainable, including those that the class
    freezes in its constructor, such as position tables. Then it calls ``_init_weights``, which may
    freeze some again.
    """
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    if not frozen:
        return
    for param in frozen:
        param.requires_grad = True
    for module in model.modules():
        module.__dict__.pop(HAS_VALUES, None)  # otherwise it is skipped
    model.initialize_weights()


def _first_dtype(files: CheckpointFiles) -> torch.dtype:
    """Returns the dtype that ``from_pretrained`` uses if the configuration has none.

    That is the dtype of the first floating tensor of the first file, by name; not of eight bits.
    """
    first = sorted((name, t.dtype) for name, t in files.tensors.items() if t.file == 0)
    floating = (dtype for _, dtype in first if dtype.is_floating_point and dtype.itemsize > 1)
    return next(floating, torch.get_default_dtype())
