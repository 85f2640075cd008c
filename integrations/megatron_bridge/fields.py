"""Megatron's fields: names, types and defaults, and the rules between them.

Names, defaults and rules are those of Megatron Bridge's page "CPU offloading" and of
Megatron-Core's ``TransformerConfig`` and ``OptimizerConfig``.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from typing import Any

from tiermem import ConfigError

from ..options import Option, checked, nearest

_TESTS = "test_megatron_bridge.py"
MODULES = (
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "expert_fc1",
    "moe_act",
)


def _flag(name: str, default: bool, setting: str, effect: str, test: str) -> Option:
    return Option(name, "bool", default, setting, effect, f"{_TESTS}::{test}")


FIELDS: tuple[Option, ...] = (
    _flag(
        "cpu_offloading",
        False,
        "the settings of the fields below",
        "without it nothing leaves HBM, whatever `cpu_offloading_num_layers` is",
        "test_the_number_alone_enables_nothing",
    ),
    Option(
        "cpu_offloading_num_layers",
        "int",
        0,
        '`tier.wrap(homes={"layers.0": "dram", ...})`, `activation_layers`',
        "this many layers, from the first; at most one less than the model has",
        f"{_TESTS}::test_weights_of_the_first_layers",
    ),
    _flag(
        "cpu_offloading_activations",
        True,
        '`Policy(activations="dram")`',
        "tensors that those layers save leave HBM in forward and are prefetched in backward",
        "test_activations_of_the_first_layers",
    ),
    _flag(
        "cpu_offloading_weights",
        False,
        '`tier.wrap(homes=...)`: `"dram"`',
        "weights of those layers have their home in DRAM and stream; also without activations",
        "test_weights_of_the_first_layers",
    ),
    _flag(
        "cpu_offloading_double_buffering",
        False,
        "no effect",
        "copies overlap with compute in any case",
        "test_without_effect",
    ),
    _flag(
        "cpu_offloading_retain_pinned_cpu_buffers",
        False,
        "no effect",
        "page-locked memory is kept until the manager is closed in any case",
        "test_without_effect",
    ),
    _flag(
        "fine_grained_activation_offloading",
        False,
        '`Policy(activations="dram")`',
        "saved tensors of at least the minimum size leave HBM, in every layer",
        "test_fine_grained",
    ),
    Option(
        "offload_modules",
        "list",
        None,
        "must name modules, but the size of a tensor decides",
        "large tensors that other modules save leave HBM, too",
        f"{_TESTS}::test_fine_grained",
    ),
    Option(
        "min_offloaded_tensor_size",
        "int",
        1 << 20,
        "`activation_min` is this times the bytes of an element",
        "smaller tensors stay in HBM",
        f"{_TESTS}::test_fine_grained_sizes_are_elements",
    ),
    Option(
        "activation_offload_fraction",
        "float",
        1.0,
        "`activation_layers`",
        "the saved tensors of this share of the layers leave HBM, rounded up, from the first",
        f"{_TESTS}::test_fine_grained_fraction",
        least=0,
        most=1,
    ),
    _flag(
        "optimizer_cpu_offload",
        False,
        '`Policy(master="dram", optimizer="dram")`',
        "state and masters stream; the device performs the steps, bitwise identical to resident",
        "test_optimizer_state",
    ),
    Option(
        "optimizer_offload_fraction",
        "float",
        None,
        "the state of all parameters has its home in DRAM",
        "0 (a recipe's default) offloads nothing, unset means 1; with a share in between, as much "
        "stays in HBM as fits",
        f"{_TESTS}::test_fraction_of_the_state",
        least=0,
        most=1,
    ),
    *(
        _flag(name, default, "no effect", why, "test_without_effect")
        for name, default, why in (
            ("overlap_cpu_optimizer_d2h_h2d", False, "copies overlap both ways in any case"),
            ("use_torch_optimizer_for_cpu_offload", False, "torch's classes step in any case"),
            ("pin_cpu_grads", True, "host memory is page-locked in any case"),
            ("pin_cpu_params", True, "host memory is page-locked in any case"),
        )
    ),
    Option(
        "pipeline_model_parallel_size",
        "int",
        1,
        "must be 1 with `cpu_offloading`",
        "a rule of Megatron's",
        f"{_TESTS}::test_rules",
        least=1,
    ),
    Option(
        "recompute_granularity",
        "str",
        None,
        "must be unset with `cpu_offloading`",
        "a rule of Megatron's",
        f"{_TESTS}::test_rules",
    ),
)

NAMES = {field.name: field for field in FIELDS}

_SWITCHES = {
    "cpu_offloading": [name for name in NAMES if name.startswith("cpu_offloading_")],
    "fine_grained_activation_offloading": [
        "offload_modules", "min_offloaded_tensor_size", "activation_offload_fraction",
    ],
    "optimizer_cpu_offload": ["optimizer_offload_fraction"],
}  # fmt: skip
"""Fields that do nothing without another one."""


_SHARES = {
    "cpu_offloading": "cpu_offloading_num_layers",
    "fine_grained_activation_offloading": "activation_offload_fraction",
    "optimizer_cpu_offload": "optimizer_offload_fraction",
}
"""The field that says how much a switch offloads; with 0 (some recipes' default) nothing."""


class Fields:
    """Megatron's fields that concern offloading, checked.

    Attributes:
        values: The values by name, with defaults filled in.
        given: Names of the fields that the configuration has.
    """

    def __init__(self, config: object | None = None, **given: Any) -> None:
        """Reads the fields and checks what does not depend on the model.

        Args:
            config: A mapping, or any object that has the fields as attributes, itself or in its
                ``model`` and ``optimizer``, like the configuration of a whole run.
            **given: Fields by name; they override those of ``config``.

        Raises:
            ConfigError: If a value is of a wrong type or a rule is broken; names field and value.
        """
        for name in given:
            if name not in NAMES:
                raise ConfigError(f"no field {name!r} of Megatron's{nearest(name, NAMES)}")
        raw = {**_fields_of(config), **given}
        where = "the call" if config is None else type(config).__name__
        _warn_of_near_misses(config, where)
        self.given = frozenset(raw)
        self.values: dict[str, Any] = {}
        for field in FIELDS:
            value = raw.get(field.name)
            self.values[field.name] = (
                _modules(value, where) if field.kind == "list" else checked(field, value, where)
            )
        self._check(where)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(f"no field {name!r} of Megatron's") from None

    def _check(self, where: str) -> None:
        v = self.values
        fine = v["fine_grained_activation_offloading"]
        if v["cpu_offloading"]:
            self._check_layerwise(where, fine=fine)
        elif v["cpu_offloading_num_layers"]:
            warnings.warn(
                f"{where}: cpu_offloading_num_layers is "
                f"{v['cpu_offloading_num_layers']}, but cpu_offloading is not set: nothing is "
                "offloaded by it",
                stacklevel=4,
            )
        for switch, share in _SHARES.items():
            if v[switch] and v[share] == 0:
                warnings.warn(
                    f"{where}: {switch} is set, but {share} is 0: nothing is offloaded by it",
                    stacklevel=4,
                )
        if fine and not v["offload_modules"]:
            raise ConfigError(
                f"{where}: fine_grained_activation_offloading needs offload_modules: some of "
                + ", ".join(MODULES)
            )
        if v["min_offloaded_tensor_size"] < 0:
            raise ConfigError(f"{where}: min_offloaded_tensor_size must not be negative")

    def _check_layerwise(self, where: str, *, fine: bool) -> None:
        v = self.values
        if v["pipeline_model_parallel_size"] > 1:
            raise ConfigError(
                f"{where}: cpu_offloading cannot be combined with pipeline_model_parallel_size: "
                f"{v['pipeline_model_parallel_size']}; set it to 1"
            )
        if v["recompute_granularity"] is not None:
            raise ConfigError(
                f"{where}: cpu_offloading cannot be combined with recompute_granularity: "
                f"{v['recompute_granularity']!r}; unset it"
            )
        if fine:
            raise ConfigError(
                f"{where}: cpu_offloading and fine_grained_activation_offloading exclude each other"
            )
        if not v["cpu_offloading_activations"] and not v["cpu_offloading_weights"]:
            raise ConfigError(
                f"{where}: cpu_offloading needs cpu_offloading_activations or "
                "cpu_offloading_weights; otherwise nothing would leave"
            )

    def without_effect(self, name: str) -> str:
        """Returns why a field has no effect, given the other fields; empty if it has one."""
        for switch, names in _SWITCHES.items():
            if name in names and not self.values[switch]:
                return f"{switch} is not set"
        for switch, share in _SHARES.items():
            of_it = name in (switch, *_SWITCHES[switch])
            if of_it and self.values[switch] and self.values[share] == 0:
                return f"{share} is 0: nothing is offloaded"
        return ""

    def check_layers(self, layers: int) -> None:
        """Checks the rules about the number of layers.

        Raises:
            ConfigError: If the model has too few layers for the fields.
        """
        asked = self.values["cpu_offloading_num_layers"]
        if self.values["cpu_offloading"] and not 0 <= asked < layers:
            raise ConfigError(
                f"cpu_offloading_num_layers: {asked} must be at least 0 and less than the model's "
                f"{layers} layers"
            )
        share = self.values["activation_offload_fraction"]
        if self.values["fine_grained_activation_offloading"] and 0 < share < 1 and not layers:
            raise ConfigError(
                f"activation_offload_fraction: {share} is a share of the layers, and the model has "
                "no list of layers; leave it out, or set it to 1"
            )


def _fields_of(config: object | None) -> dict[str, Any]:
    """Returns the known fields that a configuration has."""
    if config is None:
        return {}
    if isinstance(config, str | bytes | int | float | list | tuple | set):
        raise ConfigError(
            "a configuration is a mapping, or an object with the fields (a provider, a "
            f"TransformerConfig), not {config!r} ({type(config).__name__})"
        )
    found: dict[str, Any] = {}
    for part in (*(_part(config, name) for name in _PARTS), config):
        if isinstance(part, Mapping):
            found.update((name, part[name]) for name in NAMES if name in part)
        else:
            found.update((name, getattr(part, name)) for name in NAMES if hasattr(part, name))
    return found


_PARTS = ("model", "optimizer")
"""The parts with the fields in a whole configuration (a recipe's ``ConfigContainer`` or YAML)."""


def _part(config: object, name: str) -> object:
    """Returns a part of a whole configuration, or None."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _warn_of_near_misses(config: object | None, where: str) -> None:
    """Warns of names that resemble a field's name; all other names are ignored silently."""
    if config is None:
        return
    names: list[Any] = []
    for part in (config, *(_part(config, name) for name in _PARTS)):
        names += part if isinstance(part, Mapping) else getattr(part, "__dict__", {})
    for name in names:
        plain = str(name).lower().lstrip("-").replace("-", "_")  # as on a command line
        near = difflib.get_close_matches(plain, list(NAMES), n=1, cutoff=0.85)
        if near and name not in NAMES and str(name) not in _MEGATRONS:
            warnings.warn(
                f"{where}: {name!r} is no field of Megatron's (did you mean {near[0]}?); ignored",
                stacklevel=4,
            )


_MEGATRONS = ("_cpu_offloading_context", "cpu_offloading_context", "recompute_modules",
              "virtual_pipeline_model_parallel_size", "expert_model_parallel_size",
              "tensor_model_parallel_size", "context_parallel_size")  # fmt: skip
"""Other fields of Megatron's whose names resemble those above."""


def _modules(value: Any, where: str) -> tuple[str, ...]:
    names = () if value is None else value
    if isinstance(names, str) or not isinstance(names, list | tuple | set | frozenset):
        raise ConfigError(f"{where}: offload_modules must be a list of names, not {value!r}")
    for name in names:
        if name not in MODULES:
            raise ConfigError(
                f"{where}: offload_modules has {name!r}{nearest(str(name), MODULES)}; they are "
                + ", ".join(MODULES)
            )
    return tuple(names)
