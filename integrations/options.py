"""Shared by the integrations: options of other systems, and reports of what they became."""

from __future__ import annotations

import difflib
import importlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tiermem import ConfigError

_VARIABLE = re.compile(r"\$\{([^}]+)\}")
_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Option:
    """One option of another system.

    Attributes:
        name: As that system spells it.
        kind: The type of its values: ``"bool"``, ``"int"``, ``"float"``, ``"dtype"``, ``"str"`` or
            ``"choice"``.
        default: Its default in that system.
        setting: The tiermem setting that it becomes, for the documentation.
        effect: What that does for a user, in one sentence.
        test: The test that shows it, ``file::name`` below ``tests/integrations``.
        choices: The values that a ``"choice"`` may have.
        least: The least value of a number, or None.
        most: The greatest value of a number, or None.
        below: What a number has to be less than, or None.
    """

    name: str
    kind: str
    default: Any
    setting: str
    effect: str
    test: str
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    below: float | None = None


@dataclass(frozen=True)
class Row:
    """What one option of a configuration became.

    Attributes:
        option: Its name.
        value: Its value in the configuration.
        setting: The tiermem setting that it became, or that it has no effect.
        note: Why, or what else to know.
    """

    option: str
    value: Any
    setting: str
    note: str = ""


def need(module: str, package: str, what: str) -> ModuleType:
    """Imports a module of an optional dependency.

    Raises:
        ConfigError: If it is not installed; names the package and what needs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{what} needs {package}: pip install {package}") from error


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a YAML file that holds a mapping; ``${NAME}`` is an environment variable.

    Raises:
        ConfigError: If it cannot be read, or is not a YAML mapping; names the file.
    """
    yaml = need("yaml", "pyyaml", f"reading {os.fspath(path)}")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{os.fspath(path)} cannot be read: {error}") from error
    twice: list[Any] = []

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        """Notes keys that are given twice; of these YAML would use the last."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            named = [key for key, _ in node.value if not key.tag.endswith(":merge")]
            keys = [self.construct_object(key, deep=True) for key in named]
            self.flatten_mapping(node)
            twice.extend(key for number, key in enumerate(keys) if key in keys[:number])
            return super().construct_mapping(node, deep)

    try:
        content = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{os.fspath(path)} is no YAML: {error}") from error
    if twice:
        raise ConfigError(f"{os.fspath(path)}: {twice[0]!r} is given twice; keep one")
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{os.fspath(path)} does not hold a mapping of option names to values")
    return {key: _with_variables(value) for key, value in content.items()}


def _with_variables(value: Any) -> Any:
    """Returns a value with ``${NAME}`` replaced where the environment has such a variable."""
    if isinstance(value, dict):
        return {key: _with_variables(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_variables(item) for item in value]
    if isinstance(value, str):
        return _VARIABLE.sub(lambda found: os.environ.get(found[1], found[0]), value)
    return value


def checked(option: Option, value: Any, where: str) -> Any:
    """Returns a value, converted to the type of its option.

    Args:
        option: The option.
        value: The value in the configuration; None means the default.
        where: The file or call that it is from, for the message.

    Raises:
        ConfigError: If it is of another type; names file, option and value.
    """
    if value is None:
        return option.default
    read = {"bool": _bool, "int": _int, "float": _float, "dtype": _dtype, "str": _str}
    if option.kind == "choice":
        if isinstance(value, str) and value in option.choices:
            return value
        expected = "one of " + ", ".join(option.choices)
    else:
        found = read[option.kind](value)
        if found is not None:
            return _bounded(option, found, where)
        expected = {
            "bool": "true or false",
            "int": "a whole number",
            "float": "a number",
            "dtype": "one of " + ", ".join(_DTYPES),
            "str": "text",
        }[option.kind]
    raise ConfigError(
        f"{where}: {option.name} must be {expected}, not {value!r} ({type(value).__name__})"
    )


def _bounded(option: Option, value: Any, where: str) -> Any:
    """Returns a number that is within its option's bounds.

    Raises:
        ConfigError: If it is not.
    """
    low, high, below = option.least, option.most, option.below
    if low is not None and value < low:
        pass
    elif (high is None or value <= high) and (below is None or value < below):
        return value
    if high is not None:
        says = f"between {low} and {high}"
    elif below is not None:
        says = f"at least {low} and less than {below}"
    else:
        says = f"at least {low}"
    raise ConfigError(f"{where}: {option.name} must be {says}, not {value!r}")


def _bool(value: Any) -> bool | None:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return value if isinstance(value, bool) else None


def _int(value: Any) -> int | None:
    number = _float(value)
    return int(number) if number is not None and number == int(number) else None


def _float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)  # YAML reads 2e-4 as text
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < float("inf") else None


def _dtype(value: Any) -> torch.dtype | None:
    if isinstance(value, torch.dtype):
        return value if value.is_floating_point and value.itemsize > 1 else None
    return _DTYPES.get(value.lower()) if isinstance(value, str) else None


def _str(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ``" (did you mean ...?)"`` for an unknown name; empty if no known name is similar."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {found[0]}?)" if found else ""


def became(option: Option, value: Any, why: str) -> Row:
    """Returns what became of an option: its setting, or that it does nothing and why.

    Args:
        option: The option.
        value: Its value in the configuration.
        why: Why it has no effect, given the other options; empty if it has one.
    """
    if not why and value is False and not option.setting.startswith("no effect"):
        why = "it is off"
    setting, note = ("no effect", why) if why else (option.setting, option.effect)
    return Row(option.name, value, setting, note)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def option_table(options: Iterable[Option]) -> str:
    """Returns the documentation's table of options."""
    return table(
        ("option", "default", "tiermem setting", "effect", "test"),
        (
            (f"`{o.name}`", f"`{o.default}`", o.setting, o.effect, f"`{o.test}`" if o.test else "")
            for o in options
        ),
    )


def merged(
    config: Mapping[str, Any] | str | os.PathLike[str] | None, given: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """Returns options, of which keyword arguments override the configuration's, and a name for it.

    Raises:
        ConfigError: If it is neither a mapping nor a readable YAML file.
    """
    if config is None:
        return dict(given), "the call"
    if isinstance(config, Mapping):
        for name in config:
            if not isinstance(name, str):
                raise ConfigError(
                    f"the configuration: {name!r} ({type(name).__name__}) is no name of an option"
                )
        return {**config, **given}, "the configuration"
    if isinstance(config, str | os.PathLike):
        return {**read_yaml(config), **given}, os.fspath(config)
    raise ConfigError(
        f"a configuration is a mapping or the path of a YAML file, not {type(config).__name__}"
    )
