"""Text as the tokens of a model: by its folder's tokenizer, or byte by byte."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tiermem.cli.model import VOCABULARY
from tiermem.errors import ConfigError

_FILES = ("tokenizer*", "vocab*", "*.model", "merges.txt", "spiece*")
_SHOWN = 2


class Tokens(Protocol):
    """Between text and numbers."""

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens; of half a character U+FFFD."""
        ...


class ByteTokens:
    """Every byte of UTF-8 is a token."""

    def encode(self, text: str) -> list[int]:
        """Returns the bytes of a text."""
        return list(text.encode("utf-8", "surrogateescape"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of bytes."""
        return bytes(tokens).decode("utf-8", "replace")


class FolderTokens:
    """The tokenizer that lies in a folder of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, with those that the model wants at the beginning."""
        return list(self._tokenizer(text)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, without special ones."""
        text = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)


def tokens_of(
    folder: Path, vocabulary: int, base: Path | None = None, own: Path | None = None
) -> Tokens:
    """Returns the tokenizer of a folder, or bytes where there is none and the model has 256 tokens.

    Args:
        folder: The model's folder.
        vocabulary: How many tokens the model has.
        base: Where the tokenizer is, if not there.
        own: Where it is if there is one, first of all.

    Raises:
        ConfigError: If it cannot be used, or there is none for another vocabulary.
    """
    where = [each for each in (own, folder, base) if each is not None]
    for each in where:
        if any(True for pattern in _FILES for _ in each.glob(pattern)):
            return _tokenizer(each)
    if vocabulary == VOCABULARY and base is None:
        return ByteTokens()
    why = (
        f"the model has {vocabulary} tokens, so they are no bytes"
        if base is None
        else f"{base}, whose tokenizer its adapters were trained with, has none now"
    )
    raise ConfigError(
        f"{folder} has no tokenizer, and {why}; copy the tokenizer's files (tokenizer.json, "
        "tokenizer_config.json) there"
    )


def _tokenizer(folder: Path) -> Tokens:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever its libraries raise: there is no common class
        said = " ".join(str(error).split())
        raise ConfigError(f"{folder}: its tokenizer cannot be used: {said}") from error
    return FolderTokens(tokenizer)


class TextStream:
    """Turns tokens into text as they come; half a character waits for the rest of it.

    Args:
        tokens: The tokenizer.
        before: What came before the first of them: some tokenizers drop a space that begins a text.
    """

    def __init__(self, tokens: Tokens, before: Sequence[int]) -> None:
        self._tokens = tokens
        self._held = list(before[-_SHOWN:])
        self._said = len(self._held)  # of the tokens held, so many are text already

    def add(self, token: int, last: bool = False) -> str:
        """Returns the text that a token adds, which may be none.

        Args:
            token: The token.
            last: Whether none comes after it, so that what waits is said.
        """
        self._held.append(token)
        return self._say(last)

    def end(self) -> str:
        """Returns the text that has waited for tokens that did not come."""
        return self._say(True)

    def _say(self, last: bool) -> str:
        former = self._tokens.decode(self._held[: self._said])
        text = self._tokens.decode(self._held)
        if len(text) <= len(former) or (text.endswith("\ufffd") and not last):
            return ""
        # From here on only what was said just now stands before what comes.
        self._held = self._held[self._said :]
        self._said = len(self._held)
        return text[len(former) :]


class TokenCorpus:
    """A run of tokens, and random windows of it.

    Args:
        tokens: The tokens.
        source: Where they came from, for people.
    """

    def __init__(self, tokens: Sequence[int], source: str) -> None:
        self.source = source
        self.count = len(tokens)
        self._tokens = torch.tensor(tokens, dtype=torch.int64)

    def batch(self, generator: torch.Generator, batch: int, length: int) -> Tensor:
        """Draws windows.

        Args:
            generator: Source of the positions; the same state gives the same windows.
            batch: Number of windows.
            length: Tokens in each.

        Returns:
            An int64 tensor of shape ``(batch, length)``.
        """
        starts = torch.randint(self.count - length + 1, (batch, 1), generator=generator)
        return self._tokens[starts + torch.arange(length)]

    def check(self, length: int) -> None:
        """Checks that there is a window.

        Raises:
            ConfigError: If there is none of that length.
        """
        if self.count < length:
            raise ConfigError(
                f"{self.source}: {self.count} tokens are fewer than one window of {length}; "
                "give more --data or a smaller --context"
            )
