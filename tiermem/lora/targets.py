"""Which modules get adapters: peft's rules, applied to the names of a model's modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from tiermem.errors import ConfigError
from tiermem.lora.config import Lora
from tiermem.lora.experts import (
    ALL_LINEAR,
    as_peft_means,
    check_names,
    is_all_linear,
    stacked_experts,
)

_COMMON = (
    ("q_proj", "v_proj"),
    ("query", "value"),
    ("query_key_value",),
    ("qkv_proj",),
    ("Wqkv",),
    ("c_attn",),
    ("q", "v"),
    ("query_proj", "value_proj"),
    ("in_proj",),
)
"""Names of the projections of query and value; the first ones that a model has are used."""


@dataclass(frozen=True, slots=True)
class Target:
    """A module that gets an adapter.

    Attributes:
        name: Its qualified name.
        module: The module.
        r: Rank.
        scaling: Factor of the adapter's output.
    """

    name: str
    module: nn.Module
    r: int
    scaling: float


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' ``Conv1D``: a linear layer with a transposed weight."""
    return any(
        kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
        for kind in type(module).__mro__
    )


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes ``x @ weight.T``, or is transformers' ``Conv1D``."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def resolved(model: nn.Module, lora: Lora) -> str | tuple[str, ...]:
    """Returns the intended target modules: a regular expression, names or "all-linear".

    Raises:
        ConfigError: If none are given, and the architecture is not known; or if peft adapts not
            only modules.
    """
    targets: Any = lora.target_modules
    if targets is not None:
        if stacked_experts(model):
            targets = as_peft_means(model, lora)
        return ALL_LINEAR if is_all_linear(targets) else targets
    kind = getattr(getattr(model, "config", None), "model_type", None)
    found = _of_peft(kind) if isinstance(kind, str) else None
    if found is not None:
        return found if isinstance(found, str) else tuple(found)
    ends = {name.rpartition(".")[2] for name, m in model.named_modules() if is_linear(m)}
    for names in _COMMON:
        if ends.issuperset(names):
            return names
    raise ConfigError(
        f"target_modules: none are known for {type(model).__name__}; give names, such as some of "
        f"{sorted(ends)[:12]}, or 'all-linear'"
    )


def _of_peft(kind: str) -> Any:
    """Returns peft's target modules for an architecture, None for none."""
    if find_spec("peft") is None:
        return None
    try:
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as known
    except ImportError:  # another version of it, or of its imports
        return None
    return known.get(kind)


def chosen(model: nn.Module, lora: Lora) -> list[Target]:
    """Returns the modules that get adapters, in the order of the model's modules.

    Raises:
        ConfigError: If there are none, or one of them cannot have an adapter.
    """
    targets = resolved(model, lora)
    if targets == ALL_LINEAR:
        names = set(_all_linear(model, lora))
    else:
        names = {name for name, _ in model.named_modules() if name and _matches(name, targets)}
    if lora.target_modules is not None and stacked_experts(model):
        check_names(model, targets, names, lambda name, target: _matches(name, (target,)))
    kept = _kept(lora, isinstance(targets, str) and targets != ALL_LINEAR)
    found = [
        Target(name, module, r, lora.scaling(r, by_pattern(name, lora.alpha_pattern, lora.alpha)))
        for name, module in model.named_modules()
        if name in names and kept(name)
        for r in [int(by_pattern(name, lora.rank_pattern, lora.r))]
    ]
    if not found:
        raise ConfigError(
            f"target_modules={lora.target_modules!r}: {type(model).__name__} has no module of such "
            "a name that is not excluded or saved whole"
        )
    places = _places(model)
    whole = [name for name, _ in saved_whole(model, lora)]
    for target in found:
        _check(target, lora, places)
        if any(f"{target.name}.".startswith(f"{each}.") for each in whole):
            raise ConfigError(
                f"target module {target.name!r} is trained whole, too: its name has the end of one "
                "in modules_to_save, or of a head of the task; exclude it with exclude_modules"
            )
    return found


def _matches(name: str, targets: str | Sequence[str]) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _all_linear(model: nn.Module, lora: Lora) -> Iterator[str]:
    """Yields the names of all linear layers except the one that computes logits."""
    get: Any = getattr(model, "get_output_embeddings", None)
    head = None if get is None else get()
    if head is None and lora.task_type == "SEQ_CLS":
        heads = [getattr(model, name, None) for name in ("score", "classifier")]
        head = next((module for module in heads if module is not None), None)
    for name, module in model.named_modules():
        if is_linear(module) and module is not head:
            yield name


def _kept(lora: Lora, by_expression: bool) -> Callable[[str], bool]:
    """Returns a predicate for names that are not excluded, and are in the chosen layers."""
    named, heads = lora.saved_names()
    excluded: Any = lora.exclude_modules or ()

    def kept(name: str) -> bool:
        if _matches(name, excluded):
            return False
        if any(f".{each}." in f".{name}." for each in (*named, *heads)):
            return False  # it, or a module around it, is trained as a whole
        return by_expression or _in_layers(name, lora)

    return kept


def _in_layers(name: str, lora: Lora) -> bool:
    """Whether a module is in one of the chosen layers."""
    layers: Any = lora.layers_to_transform
    if not layers:
        return True
    patterns: Any = lora.layers_pattern
    if not patterns:
        found = re.match(r".*?\.[^.]*\.(\d+)\.", name)
    else:
        each = (patterns,) if isinstance(patterns, str) else patterns
        matches = (re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", name) for pattern in each)
        found = next((match for match in matches if match is not None), None)
    return found is not None and int(found.group(1)) in layers


def by_pattern(name: str, patterns: Mapping[str, float], default: float) -> float:
    """Returns the value of the first pattern that matches the end of a name."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return float(value)
    return float(default)


def _places(model: nn.Module) -> dict[int, set[tuple[int, str]]]:
    """Returns the places of each module: the modules that have it, and its name there."""
    found: dict[int, set[tuple[int, str]]] = {}
    for module in model.modules():
        for name, child in module.named_children():
            found.setdefault(id(child), set()).add((id(module), name))
    return found


def _check(target: Target, lora: Lora, places: dict[int, set[tuple[int, str]]]) -> None:
    """Refuses a module that cannot have an adapter.

    Raises:
        ConfigError: If so, with its name.
    """
    module, what = target.module, f"target module {target.name!r}"
    if not is_linear(module) and not isinstance(module, nn.Embedding):
        raise ConfigError(
            f"{what} is a {type(module).__name__}; adapters are for nn.Linear, nn.Embedding and "
            "transformers' Conv1D: name those in it, or exclude it with exclude_modules"
        )
    weight = module._parameters.get("weight")
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
        raise ConfigError(f"{what} has no floating weight; quantized layers cannot have adapters")
    if weight.element_size() < 2:
        raise ConfigError(f"{what} has a weight of {weight.dtype}; it is float16 or wider")
    if lora.lora_bias and isinstance(module, nn.Embedding):
        raise ConfigError(f"{what} is an embedding, whose adapter can have no lora_bias")
    if len(places[id(module)]) > 1:
        raise ConfigError(
            f"{what} hangs in several modules, and peft gives one of them an adapter; exclude it "
            "with exclude_modules"
        )


def saved_whole(model: nn.Module, lora: Lora) -> list[tuple[str, nn.Module]]:
    """Returns the modules that are trained and saved as a whole, by qualified name.

    As in peft a name matches every module whose name ends with it: "norm" matches
    "input_layernorm",
    too, and "classifier" matches "pre_classifier".

    Raises:
        ConfigError: If one does not exist, or shares a weight with a module that is not among them.
    """
    named, heads = lora.saved_names()
    modules = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    for each in (*named, *heads):
        fitting = {n: m for n, m in modules.items() if n.endswith(each)}
        if not fitting and each in named:
            raise ConfigError(f"modules_to_save names {each!r}; the model has no such module")
        found.update(fitting)
    outer = {n: m for n, m in found.items() if not any(n.startswith(f"{o}.") for o in found)}
    inside = {id(module) for top in outer.values() for module in top.modules()}
    other = {id(p) for m in modules.values() if id(m) not in inside for p in m._parameters.values()}
    for name, module in outer.items():
        if any(id(param) in other for param in module.parameters()):
            raise ConfigError(
                f"modules_to_save names {name!r}, whose weight is tied to another module's; it "
                "cannot be trained without that one: leave it out, or untie the two before"
            )
    return list(outer.items())
