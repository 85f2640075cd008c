"""Options of adapters, by tiermem's names or by peft's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tiermem.errors import ConfigError

Names = str | Iterable[str] | None

_INITS = {True: "default", False: "random", "gaussian": "gaussian"}
_BIASES = ("none", "all", "lora_only")
_TASKS = (
    *("SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS"),
    "FEATURE_EXTRACTION",
)
"""The type that peft reads in a file; it refuses files with another one."""
_CLASSIFIER = ("classifier", "score")
_HEADS = {"SEQ_CLS": _CLASSIFIER, "TOKEN_CLS": _CLASSIFIER, "QUESTION_ANS": ("qa_outputs",)}
"""Heads of transformers' classes for a task, which peft trains if it is told the task."""


_PEFT = {
    "r": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "target_modules": "target_modules",
    "exclude_modules": "exclude_modules",
    "bias": "bias",
    "rslora": "use_rslora",
    "modules_to_save": "modules_to_save",
    "init": "init_lora_weights",
    "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern",
    "layers_to_transform": "layers_to_transform",
    "layers_pattern": "layers_pattern",
    "lora_bias": "lora_bias",
    "task_type": "task_type",
}
"""tiermem's names of the options of peft's ``LoraConfig`` (0.14 to 0.21), and peft's."""

_SAYS_NOTHING = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "fan_in_fan_out",  # known from the module
        "inference_mode",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
    }
)
"""Other entries of peft's configurations, which change no number."""


@dataclass(frozen=True)
class Lora:
    """Which modules get adapters, and which kind.

    Options and their meaning are those of ``peft.LoraConfig``, whose names are in brackets if
    they differ.

    Attributes:
        r: Rank of the adapters.
        alpha: Their output is scaled by ``alpha / r`` (``lora_alpha``).
        dropout: Probability with which inputs of adapters are dropped (``lora_dropout``).
        target_modules: Modules that get one: names, each a module's whole name or the end of it;
            a regular expression that matches whole names; or ``"all-linear"``. None: peft's
            defaults for the model's architecture if peft is installed, otherwise the projections of
            query and value by their common names.
        exclude_modules: Modules that get none, likewise.
        bias: Which biases of the model are trained: ``"none"``, ``"all"``, or ``"lora_only"`` for
            those of target modules.
        rslora: Scales by ``alpha / sqrt(r)`` instead (``use_rslora``).
        modules_to_save: Names of modules that are trained as a whole, and saved with the adapters.
        init: ``"default"``, which begins with the model's output; ``"gaussian"``, likewise; or
            ``"random"`` (``init_lora_weights`` True, "gaussian", False).
        rank_pattern: Other ranks, by regular expressions of the ends of names.
        alpha_pattern: Other alphas, likewise.
        layers_to_transform: Numbers of the layers whose targets get adapters; None for all.
        layers_pattern: Names of the list of layers, if it is not the first number in a name.
        lora_bias: Whether adapters have a bias.
        task_type: The kind of model that peft creates for the saved files, such as ``"CAUSAL_LM"``.
    """

    r: int = 8
    alpha: float = 16
    dropout: float = 0.0
    target_modules: Names = None
    exclude_modules: Names = None
    bias: str = "none"
    rslora: bool = False
    modules_to_save: Iterable[str] | None = None
    init: str = "default"
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    layers_to_transform: int | Iterable[int] | None = None
    layers_pattern: Names = None
    lora_bias: bool = False
    task_type: str | None = None

    def __post_init__(self) -> None:
        """Checks every option.

        Raises:
            ConfigError: If one is not valid, with its name.
        """
        for name in ("target_modules", "exclude_modules", "layers_pattern"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        saved = self.modules_to_save
        if isinstance(saved, str):
            raise ConfigError(f"Lora: modules_to_save={saved!r} is not a list of names")
        object.__setattr__(self, "modules_to_save", _names("modules_to_save", saved))
        layers = self.layers_to_transform
        if layers is not None:
            numbers = (layers,) if isinstance(layers, int) else tuple(layers)
            _need(all(map(_whole, numbers)), "layers_to_transform", layers, "numbers of layers")
            object.__setattr__(self, "layers_to_transform", numbers)
        self._check_numbers()
        self._check_choices()

    def _check_numbers(self) -> None:
        _need(_whole(self.r) and self.r > 0, "r", self.r, "a whole number above 0")
        _need(_number(self.alpha), "alpha", self.alpha, "a number")
        chance = _number(self.dropout) and 0 <= self.dropout < 1
        _need(chance, "dropout", self.dropout, "a number from 0 to less than 1")
        checks: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
            ("rank_pattern", lambda r: _whole(r) and r > 0, "whole numbers above 0 by name"),
            ("alpha_pattern", _number, "numbers by name"),
        )
        for name, right, what in checks:
            value = getattr(self, name)
            _need(isinstance(value, Mapping), name, value, what)
            object.__setattr__(self, name, dict(value))
            _need(all(map(right, value.values())), name, value, what)

    def _check_choices(self) -> None:
        _need(self.bias in _BIASES, "bias", self.bias, f"one of {list(_BIASES)}")
        _need(self.init in _INITS.values(), "init", self.init, f"one of {list(_INITS.values())}")
        for name in ("rslora", "lora_bias"):
            value = getattr(self, name)
            _need(isinstance(value, bool), name, value, "True or False")
        task = self.task_type
        _need(task is None or task in _TASKS, "task_type", task, f"one of {list(_TASKS)}")

    @classmethod
    def of(cls, config: Any) -> Lora:
        """Returns a configuration as a :class:`Lora`.

        Args:
            config: A :class:`Lora`; a ``peft.LoraConfig``, or anything with its attributes; or a
                mapping with its names, as in ``adapter_config.json``.

        Raises:
            ConfigError: For an option that is not supported, or another kind of configuration.
        """
        if isinstance(config, cls):
            return config
        options = _options(config)
        if "r" not in options:
            raise ConfigError(
                f"lora= takes a tiermem.Lora or a peft.LoraConfig, not {type(config).__name__}"
            )
        kind = _plain(options.get("peft_type", "LORA"))
        if kind != "LORA":
            raise ConfigError(
                f"peft_type={kind!r} is not LoRA; it cannot be had on streamed weights"
            )
        known = set(_PEFT.values()) | _SAYS_NOTHING
        for name, value in sorted(options.items()):
            if name not in known and value:
                raise ConfigError(
                    f"the LoRA option {name}={value!r} cannot be had on streamed weights; leave it "
                    "out, or use peft on the resident model"
                )
        given = {ours: options[peft] for ours, peft in _PEFT.items() if peft in options}
        if "alpha" not in given:
            given["alpha"] = 8  # peft's default
        given["init"] = _init(given.get("init", True))
        given["task_type"] = _plain(given.get("task_type"))
        for name in ("rank_pattern", "alpha_pattern"):
            given[name] = given.get(name) or {}
        return cls(**given)

    def peft_options(self) -> dict[str, Any]:
        """Returns the options by peft's names, as in ``adapter_config.json``."""
        found: dict[str, Any] = {"peft_type": "LORA"}
        inits: dict[Any, Any] = {ours: peft for peft, ours in _INITS.items()}
        for each in fields(self):
            value = getattr(self, each.name)
            value = list(value) if isinstance(value, tuple) else value
            found[_PEFT[each.name]] = inits[value] if each.name == "init" else value
        return found

    def saved_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns names of modules trained as a whole: requested ones, and the task's heads.

        A model has one of the latter. peft writes all of them into its configuration, as if they
        had been requested.
        """
        named: Any = self.modules_to_save or ()
        heads = _HEADS.get(self.task_type or "", ())
        return tuple(each for each in named if each not in heads), heads

    def scaling(self, r: int, alpha: float) -> float:
        """Returns the factor of an adapter's output."""
        return alpha / math.sqrt(r) if self.rslora else alpha / r


def _need(right: bool, name: str, value: object, what: str) -> None:
    if not right:
        raise ConfigError(f"Lora: {name}={value!r} is not {what}")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _names(name: str, value: Names) -> str | tuple[str, ...] | None:
    """Returns text unchanged, names as a tuple; peft stores them as a set."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, Iterable):
        raise ConfigError(f"Lora: {name}={value!r} is neither text nor names")
    names = tuple(sorted(value) if isinstance(value, set | frozenset) else value)
    _need(all(isinstance(each, str) for each in names), name, value, "names of modules")
    return names


def _options(config: Any) -> dict[str, Any]:
    """Returns the options of a configuration by peft's names."""
    if isinstance(config, Mapping):
        return dict(config)
    found = dict(getattr(config, "__dict__", {}))
    names = [*_PEFT.values(), "peft_type"]
    found.update({name: getattr(config, name) for name in names if hasattr(config, name)})
    return found


def _plain(value: Any) -> Any:
    """Returns the text of an enumeration's member."""
    return getattr(value, "value", value)


def _init(value: Any) -> str:
    """Returns tiermem's name of an initialization."""
    if isinstance(value, bool | str) and value in _INITS:
        return _INITS[value]
    if isinstance(value, str) and value.lower() in ("true", "gaussian"):
        return _INITS[True if value.lower() == "true" else "gaussian"]
    raise ConfigError(
        f"the LoRA option init_lora_weights={value!r} cannot be had on streamed weights; it is "
        "True, False or 'gaussian'"
    )
