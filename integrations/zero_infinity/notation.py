"""Reading a DeepSpeed configuration: a dict, a file, or text in base64.

DeepSpeed reads Hjson: JSON with comments, trailing commas, keys and strings without quotes. Text
that is not plain JSON is read as Hjson here, too.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiermem import ConfigError

Source = str | os.PathLike[str] | Mapping[str, Any]
"""A path, a mapping, or text in base64 as DeepSpeed's launcher hands it on."""

_LITERALS = {"true": True, "false": False, "null": None}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def load(config: Source) -> tuple[dict[str, Any], str]:
    """Returns a configuration as nested plain data, and what to call it in messages.

    Args:
        config: A path, a mapping, or text in base64.

    Raises:
        ConfigError: If there is no such file, or it cannot be read as Hjson.
    """
    if isinstance(config, Mapping):
        return _plain(config), "config"
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(
            f"config must be a path, a dict or base64 text, not a {type(config).__name__}"
        )
    path = Path(config)
    if _is_file(path):
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read as UTF-8: {error}") from error
        return parse(text, str(path)), str(path)
    return _decoded(str(config)), "base64 config"


def parse(text: str, name: str) -> dict[str, Any]:
    """Reads JSON or Hjson.

    Args:
        text: The text.
        name: What to call it in messages.

    Raises:
        ConfigError: Saying in which line it cannot be read, or which key is given twice.
    """
    try:
        found = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, name))
    except RecursionError:
        raise ConfigError(f"{name}: it has too many objects or lists inside one another") from None
    except ValueError:  # not JSON, or a number of thousands of digits
        found = _Reader(text, name).document()
    if not isinstance(found, dict):
        raise ConfigError(f"{name}: a configuration is an object, not a {type(found).__name__}")
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # text in base64 may be longer than a file name can be
        return False


def _decoded(text: str) -> dict[str, Any]:
    try:
        found = base64.b64decode(text.encode(), altchars=b"-_", validate=True).decode("utf-8")
        if found.strip():
            return parse(found, "base64 config")
        problem: Exception | None = None
    except (binascii.Error, UnicodeError, ConfigError) as error:
        problem = error
    shown = text if len(text) < 200 else text[:200] + "..."
    raise ConfigError(
        f"config={shown!r}: there is no such file, and it is not base64 text of a configuration"
    ) from problem


def _unique(pairs: list[tuple[str, Any]], name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise ConfigError(
                f"{name}: {key!r} is given twice, as {found[key]!r} and as {value!r}; keep one"
            )
        found[key] = value
    return found


class _Reader:
    """Reads Hjson, one character after the other."""

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self.name = name
        self.at = 0

    def document(self) -> Any:
        """Reads all of it; the outermost braces may be left out."""
        self._skip()
        if self.text[self.at : self.at + 1] == "{":
            found = self._value()
        else:
            found = self._members(closed=False)
        self._skip()
        if self.at < len(self.text):
            raise self._error("there is something after the end")
        return found

    def _value(self) -> Any:
        first = self.text[self.at : self.at + 1]
        if first == "{":
            self.at += 1
            return self._members(closed=True)
        if first == "[":
            self.at += 1
            return self._items()
        if first in ('"', "'"):
            return self._quoted()
        return self._bare()

    def _members(self, *, closed: bool) -> dict[str, Any]:
        pairs: list[tuple[str, Any]] = []
        while True:
            self._skip(",")
            if self.at >= len(self.text):
                if closed:
                    raise self._error("a '}' is missing")
                return _unique(pairs, self.name)
            if closed and self.text[self.at] == "}":
                self.at += 1
                return _unique(pairs, self.name)
            key = self._key()
            self._skip()
            if self.text[self.at : self.at + 1] != ":":
                raise self._error(f"a ':' is missing after {key!r}")
            self.at += 1
            self._skip()
            pairs.append((key, self._value()))

    def _items(self) -> list[Any]:
        found: list[Any] = []
        while True:
            self._skip(",")
            if self.at >= len(self.text):
                raise self._error("a ']' is missing")
            if self.text[self.at] == "]":
                self.at += 1
                return found
            found.append(self._value())

    def _key(self) -> str:
        if self.text[self.at] in "\"'":
            return self._quoted()
        match = re.compile(r"[^\s,:\[\]{}]+").match(self.text, self.at)
        if match is None:
            raise self._error("a key is missing")
        self.at = match.end()
        return match.group()

    def _quoted(self) -> str:
        mark = self.text[self.at]
        if self.text.startswith("'''", self.at):
            end = self.text.find("'''", self.at + 3)
            if end < 0:
                raise self._error("a text is not closed")
            found, self.at = self.text[self.at + 3 : end], end + 3
            return found.strip("\n")
        parts: list[str] = []
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] not in (mark, "\n"):
            parts.append(self._escaped() if self.text[self.at] == "\\" else self.text[self.at])
            self.at += 1
        if self.text[self.at : self.at + 1] != mark:
            raise self._error("a text is not closed")
        self.at += 1
        return "".join(parts)

    def _escaped(self) -> str:
        self.at += 1
        letter = self.text[self.at : self.at + 1]
        if letter == "u":
            digits = self.text[self.at + 1 : self.at + 5]
            self.at += 4
            try:
                return chr(int(digits, 16))
            except ValueError:
                raise self._error(f"\\u{digits} is no character") from None
        return _ESCAPES.get(letter, letter)

    def _bare(self) -> Any:
        """Reads a number, a literal, or text up to the end of the line."""
        match = re.compile(r"[^\n\r]*").match(self.text, self.at)
        line = match.group() if match else ""
        word = re.split(r"[,\]}#]|//|/\*", line, maxsplit=1)[0]
        token = word.strip()
        if not token:
            raise self._error("a value is missing")
        if token in _LITERALS or _NUMBER.fullmatch(token):
            self.at += len(word)
            if token in _LITERALS:
                return _LITERALS[token]
            try:
                return float(token) if re.search(r"[.eE]", token) else int(token)
            except ValueError:
                raise self._error(f"a number has {len(token)} digits") from None
        self.at += len(line)
        return line.strip()

    def _skip(self, also: str = "") -> None:
        """Skips white space, comments, and what else is named."""
        while self.at < len(self.text):
            if self.text[self.at].isspace() or self.text[self.at] in also:
                self.at += 1
            elif self.text[self.at] == "#" or self.text.startswith("//", self.at):
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif self.text.startswith("/*", self.at):
                end = self.text.find("*/", self.at)
                if end < 0:
                    raise self._error("a comment is not closed")
                self.at = end + 2
            else:
                return

    def _error(self, what: str) -> ConfigError:
        line = self.text.count("\n", 0, self.at) + 1
        return ConfigError(f"{self.name}, line {line}: {what}")
