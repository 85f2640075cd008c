"""A model's folder as a command is given it: a transformers folder, or one of ``tiermem train``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from tiermem.cli.model import VOCABULARY, ByteGPT, Shape
from tiermem.cli.tokens import ByteTokens, Tokens, tokens_of
from tiermem.errors import CheckpointError, ConfigError
from tiermem.loading.build import model_of
from tiermem.storage.checkpoint.folder import CheckpointFiles

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
    """

    path: Path
    files: CheckpointFiles
    model: nn.Module
    tokens: Tokens

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
    files = CheckpointFiles.open(folder)
    if (folder / "config.json").is_file():
        model = _transformers_model(folder, files)
        return Folder(folder, files, model, tokens_of(folder, vocabulary_of(model)))
    if (folder / MANIFEST).is_file():
        shape = _shape(folder, files)

        def make() -> nn.Module:
            return ByteGPT(shape, checkpointing=checkpointing).to(files.tensors[_FIRST].dtype)

        return Folder(folder, files, model_of(make, folder, files, None), ByteTokens())
    raise CheckpointError(
        f"{folder} has neither config.json (a transformers folder) nor {MANIFEST} (of "
        "tiermem train --save)"
    )


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


def _shape(folder: Path, files: CheckpointFiles) -> Shape:
    """Returns the sizes of a byte GPT: from its tensors, the heads from the manifest."""
    found = files.tensors
    if _FIRST not in found or "positions.weight" not in found:
        raise CheckpointError(
            f"{folder} is a checkpoint of tiermem, but not of the model of tiermem train; load it "
            "with tiermem.load_checkpoint and the program that made the model"
        )
    vocabulary, width = found[_FIRST].shape
    numbers = {int(name.split(".")[1]) for name in found if name.startswith("layers.")}
    heads = _heads(folder)
    if vocabulary != VOCABULARY or not numbers or width % heads:
        raise CheckpointError(
            f"{folder}: {vocabulary} tokens, {len(numbers)} layers, width {width} and {heads} "
            "heads are no model of tiermem train"
        )
    return Shape(len(numbers), width, heads, found["positions.weight"].shape[0])


def _heads(folder: Path) -> int:
    """Returns how many heads there are, which no tensor's shape says."""
    path = folder / MANIFEST
    try:
        at: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    for key in ("extra", "settings", "shape", "heads"):
        at = at.get(key) if isinstance(at, Mapping) else None
    if not isinstance(at, int) or isinstance(at, bool) or at < 1:
        raise CheckpointError(
            f"{path} does not say how many heads the model has: it was not saved by tiermem train"
        )
    return at
