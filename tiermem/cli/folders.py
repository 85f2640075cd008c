"""A model's folder as a command is given it: a transformers folder, or one of ``tiermem train``.

Either may be what a run of adapters saved: then the model has them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiermem.cli.model import VOCABULARY, ByteGPT, Shape
from tiermem.cli.tokens import ByteTokens, Tokens, tokens_of
from tiermem.errors import CheckpointError, ConfigError
from tiermem.loading.build import model_of
from tiermem.storage.checkpoint.folder import ADAPTERS, CheckpointFiles, base_of

MANIFEST = "tiermem.json"
"""What ``tiermem train --save`` writes beside the weights."""


@dataclass(frozen=True)
class Folder:
    """A model that has not been read.

    Attributes:
        path: The folder.
        files: Its safetensors files.
        model: The model; its parameters take no memory.
        tokens: Its tokenizer.
        adapters: Folder of peft's adapters that are to be put on it; None for none.
    """

    path: Path
    files: CheckpointFiles
    model: nn.Module
    tokens: Tokens
    adapters: Path | None = None

    @property
    def is_byte_gpt(self) -> bool:
        """Whether it is what ``tiermem train`` saved."""
        return isinstance(self.model, ByteGPT)


def open_folder(path: str, *, checkpointing: bool = False) -> Folder:
    """Reads configuration and headers, and makes the model without its weights.

    Args:
        path: The folder.
        checkpointing: Whether a byte GPT recomputes its layers in backward.

    Raises:
        CheckpointError: If it is no folder of either kind, or files are damaged.
        ConfigError: If transformers is needed and missing, or there is no tokenizer.
    """
    folder = Path(path)
    if not os.path.isdir(folder):  # False of a name that is too long, too
        raise CheckpointError(f"{folder}: no such folder")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise CheckpointError(f"{folder}: this user may not read it; change its permissions")
    adapters = folder if (folder / ADAPTERS).is_file() else None
    if adapters is not None and not (folder / "config.json").is_file():
        folder = _base_of(adapters)
    files = CheckpointFiles.open(folder)
    run = _run_of(folder)
    if (folder / "config.json").is_file():
        model = _transformers_model(folder, files)
        tokens = tokens_of(folder, vocabulary_of(model), run.tokenizer, own=adapters)
    elif (folder / MANIFEST).is_file():
        shape = _shape(folder, files, run)

        def make() -> nn.Module:
            return ByteGPT(shape, checkpointing=checkpointing).to(files.tensors[_FIRST].dtype)

        model, tokens = model_of(make, folder, files, None), ByteTokens()
    else:
        raise CheckpointError(
            f"{folder} has neither config.json (a transformers folder) nor {MANIFEST} (of "
            "tiermem train --save)"
        )
    if run.lora is not None:
        _adapt(model, run.lora, files)
    return Folder(folder, files, model, tokens, adapters)


def _base_of(adapters: Path) -> Path:
    """Returns the folder of the model that adapters are for.

    Raises:
        CheckpointError: If it is not on this machine, with its name.
    """
    base = base_of(adapters / ADAPTERS)
    if base is None:
        raise CheckpointError(
            f"{adapters / ADAPTERS} names no base model; set base_model_name_or_path in it to the "
            "model's folder"
        )
    for found in (Path(base), adapters / base):
        if found.is_dir():
            return found
    with contextlib.suppress(Exception):  # whatever is wrong with the Hub's cache, it is not there
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(base, local_files_only=True))
    raise CheckpointError(
        f"{adapters} has adapters on {base!r} (adapter_config.json), which is no folder here and "
        "was not downloaded from the Hub; download it, or set base_model_name_or_path there to its "
        "folder"
    )


@dataclass(frozen=True)
class _Run:
    """What a folder says of the run that saved it.

    Attributes:
        lora: Options of its adapters, as ``--lora`` has them; None for none.
        heads: How many the model has, where it is a byte GPT and that was saved.
        tokenizer: The folder of its base, where that one's tokenizer made tokens of the text.
    """

    lora: str | None = None
    heads: int | None = None
    tokenizer: Path | None = None


def about(folder: Folder) -> dict[str, Any]:
    """Returns what a run of adapters on a folder's model saves for :func:`open_folder`."""
    own = folder.model
    return {
        "checkpoint": os.path.abspath(folder.path),
        "tokenizer": not isinstance(folder.tokens, ByteTokens),
        "shape": asdict(own.shape) if isinstance(own, ByteGPT) else None,
    }


def _run_of(folder: Path) -> _Run:
    path = folder / MANIFEST
    if not path.is_file():
        return _Run()
    try:
        said: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # JSON that is deep, too
        raise CheckpointError(f"{path}: {error}") from error

    def at(*keys: str) -> Any:
        value = said
        for key in ("extra", *keys):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    lora, base = at("settings", "lora"), at("base", "checkpoint")
    heads = at("settings" if lora is None else "base", "shape", "heads")
    return _Run(
        lora if isinstance(lora, str) else None,
        heads if isinstance(heads, int) and not isinstance(heads, bool) and heads > 0 else None,
        Path(base) if isinstance(base, str) and at("base", "tokenizer") else None,
    )


def _adapt(model: nn.Module, lora: str, files: CheckpointFiles) -> None:
    """Puts adapters where files have values for them; nothing is drawn, and nothing is trained."""
    from tiermem import add_adapters
    from tiermem.cli.finetune import parse_lora

    adapted = [name.partition(".lora_")[0] for name in files.tensors if name.endswith(_ADAPTER)]
    options = replace(
        parse_lora(lora), target_modules=adapted, exclude_modules=None, layers_to_transform=None
    )
    with torch.random.fork_rng([]):
        add_adapters(model, options)
    model.requires_grad_(False).eval()


def vocabulary_of(model: nn.Module) -> int:
    """Returns how many tokens a model of transformers knows."""
    return int(text_config(model).vocab_size)


def text_config(model: Any) -> Any:
    """Returns the configuration of the part that reads and writes text."""
    return model.config.get_text_config(decoder=True)


def _transformers_model(folder: Path, files: CheckpointFiles) -> nn.Module:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(
            f"{folder} is a folder of transformers, which is not installed; install it with "
            "pip install transformers"
        ) from error
    try:
        return model_of(AutoModelForCausalLM, folder, files, None)
    except ValueError as error:
        said = str(error).partition("\n")[0]
        raise ConfigError(f"{folder}: it is no model that writes text: {said}") from error


_FIRST = "tokens.weight"
_ADAPTER = (".lora_A.weight", ".lora_embedding_A")


def _shape(folder: Path, files: CheckpointFiles, run: _Run) -> Shape:
    """Returns the sizes of a byte GPT: from its tensors, the heads from what the run says."""
    found = files.tensors
    if _FIRST not in found or "positions.weight" not in found:
        raise CheckpointError(
            f"{folder} is a checkpoint of tiermem, but not of the model of tiermem train; load it "
            "with tiermem.load_checkpoint and the program that made the model"
        )
    vocabulary, width = found[_FIRST].shape
    numbers = {int(name.split(".")[1]) for name in found if name.startswith("layers.")}
    heads = run.heads
    if heads is None and run.lora is not None:
        raise CheckpointError(
            f"{folder} holds adapters ({run.lora}) on a byte GPT of {len(numbers)} layers and "
            f"width {width}, and an older tiermem has not saved how many heads that has; make the "
            "run anew with another --save, or put the adapters of its --out on their base in "
            "Python (tiermem.load_adapters)"
        )
    if heads is None:
        raise CheckpointError(
            f"{folder / MANIFEST} does not say how many heads the model has: it was not saved by "
            "tiermem train"
        )
    if vocabulary != VOCABULARY or not numbers or width % heads:
        raise CheckpointError(
            f"{folder}: {vocabulary} tokens, {len(numbers)} layers, width {width} and {heads} "
            "heads are no model of tiermem train"
        )
    return Shape(len(numbers), width, heads, found["positions.weight"].shape[0])
