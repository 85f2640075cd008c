"""Options of ``from_pretrained`` for loading a class of transformers or diffusers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import torch

from tiermem.errors import ConfigError

_PLACES = frozenset(
    ("device_map", "max_memory", "offload_folder", "offload_buffers", "offload_state_dict",
     "tp_plan", "tp_size", "device_mesh", "distributed_config", "parallel_config")
)  # fmt: skip
_QUANTIZED = frozenset(("quantization_config", "load_in_4bit", "load_in_8bit"))
_UNKNOWN = frozenset(
    ("state_dict", "gguf_file", "key_mapping", "output_loading_info", "use_kernels",
     "kernel_config", "fusion_config", "allow_all_kernels", "adapter_kwargs", "adapter_name",
     "generation_config", "use_flashpack", "from_tf", "from_flax")
)  # fmt: skip
_OF_NO_MEANING = frozenset(
    ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "code_revision",
     "token", "use_auth_token", "resume_download", "mirror", "low_cpu_mem_usage", "weights_only",
     "disable_mmap", "_fast_init", "use_safetensors")
)  # fmt: skip
"""Options of downloads, and of memory use: they do not matter, as a local folder is read."""


@dataclass(frozen=True, slots=True)
class ClassOptions:
    """Options for creating and loading a class, besides its dtype.

    Attributes:
        subfolder: Subfolder with configuration and weights; ``""`` for the folder itself.
        variant: Variant of the weights' files, such as ``"fp16"``.
        ignore_mismatched_sizes: Whether tensors of another shape count as missing.
        trust_remote_code: Whether code of the folder may be run, as in transformers.
        config: A configuration, or another folder with one, instead of the folder's.
        others: Attributes of the configuration, and arguments of the class.
    """

    subfolder: str = ""
    variant: str | None = None
    ignore_mismatched_sizes: bool = False
    trust_remote_code: bool | None = None
    config: Any = None
    others: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, Any], by_class: bool) -> ClassOptions:
        """Parses options given by name.

        Args:
            given: The options for which ``load_checkpoint`` has no parameter.
            by_class: Whether the model is created by a class with ``from_pretrained``.

        Raises:
            ConfigError: If one cannot be used, with its name.
        """
        left = {k: v for k, v in given.items() if v is not None or k not in _NAMED}
        if not by_class and left:
            raise ConfigError(
                f"load_checkpoint got {_named(left)}, which only classes of transformers and "
                "diffusers take; set what is meant where the module is made"
            )
        for name, value in list(left.items()):
            _check(name, value)
            if name in _OF_NO_MEANING or (value is False and name in _NAMED.difference(_OWN)):
                del left[name]
        own = {name: left.pop(name) for name in _OWN if name in left}
        _check_text(own)
        return cls(**own, others=left)


_OWN = ("subfolder", "variant", "ignore_mismatched_sizes", "trust_remote_code", "config")
_NAMED = _PLACES | _QUANTIZED | _UNKNOWN | _OF_NO_MEANING | {*_OWN, "attn_implementation"}


def dtype_of(given: Any) -> torch.dtype | None:
    """Returns a dtype given as ``torch.float16``, ``"float16"`` or ``"auto"``; None for the last.

    Raises:
        ConfigError: If it is not a floating-point dtype.
    """
    if given is None or (isinstance(given, str) and given == "auto"):
        return None
    found = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(
            "dtype must be a floating dtype such as torch.bfloat16, its name ('bfloat16') or "
            f"'auto', not {given!r}"
        )
    return found


def _check(name: str, value: Any) -> None:
    if name in _PLACES and value is not False:
        raise ConfigError(
            f"load_checkpoint takes no {name}: the tiers say where weights go; leave it out, and "
            "give TierManager hbm=, dram= and nvme="
        )
    if name in _QUANTIZED and value is not False:
        raise ConfigError(
            f"load_checkpoint takes no {name}: weights are read as they are in the files; load the "
            "model with from_pretrained, then call tier.wrap(model)"
        )
    if name in _UNKNOWN and value is not False:
        what = "give names=" if name == "key_mapping" else "leave it out"
        raise ConfigError(
            f"load_checkpoint takes no {name}; {what}, or load the model with from_pretrained and "
            "call tier.wrap(model)"
        )
    if name == "use_safetensors" and value is False:
        raise ConfigError("load_checkpoint reads safetensors alone: leave use_safetensors out")


def _check_text(own: dict[str, Any]) -> None:
    """Checks ``subfolder`` and ``variant``."""
    for name in ("subfolder", "variant"):
        value = own.get(name, "")
        if isinstance(value, os.PathLike):
            value = own[name] = os.fspath(value)
        if not isinstance(value, str) or "\0" in value:
            raise ConfigError(f"{name} must be text, not {value!r}")
    inside = PurePosixPath(own.get("subfolder", ""))
    if inside.is_absolute() or ".." in inside.parts:
        raise ConfigError(f"subfolder={str(inside)!r} leads out of the folder")
    if "/" in own.get("variant", ""):
        raise ConfigError(f"variant={own['variant']!r} is no part of a file's name")


def _named(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}=" for name in options)
