"""The meaning of target modules if experts are stacked: peft's rules, found by running peft."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

from torch import nn

from tiermem.errors import ConfigError
from tiermem.lora.config import Lora

ALL_LINEAR = "all-linear"


def is_all_linear(targets: object) -> bool:
    """Whether the target is "all-linear"."""
    return isinstance(targets, str) and targets.lower() == ALL_LINEAR


def stacked_experts(model: nn.Module) -> list[str]:
    """Returns the names of parameters of three dimensions that hold a layer's experts."""
    return [n for n, p in model.named_parameters() if p.dim() == 3 and ".experts." in n]


def as_peft_means(model: nn.Module, lora: Lora) -> str | tuple[str, ...]:
    """Returns peft's interpretation of the target modules, for a model with stacked experts.

    For some architectures it accepts names of the projections of experts from older releases of
    transformers, and "all-linear" includes the stacked parameters as well.

    Args:
        model: A model with such parameters.
        lora: The settings, with target modules.

    Raises:
        ConfigError: If it would put adapters on such parameters, or peft is not available.
    """
    targets: Any = lora.target_modules
    found = _asked(model, lora)
    if found is None:
        if is_all_linear(targets):
            raise _refused(model, targets, "peft, whose rules these are, is not installed")
        return targets  # type: ignore[no-any-return]
    modules, parameters = found
    if parameters:
        names = "none" if isinstance(modules, str) else sorted(modules)[:12]
        raise _refused(
            model,
            targets,
            f"peft puts adapters on {sorted(parameters)}, too, which cannot be had on streamed "
            f"weights, and of these names on modules only for {names}",
        )
    return modules if isinstance(modules, str) else tuple(sorted(modules))


def check_names(
    model: nn.Module, targets: Any, names: Iterable[str], fits: Callable[[str, str], bool]
) -> None:
    """Refuses names that no module has: those of projections of experts, which are stacked.

    Raises:
        ConfigError: If there are any, with the names.
    """
    if isinstance(targets, str):
        return
    missing = [each for each in targets if not any(fits(name, each) for name in names)]
    if missing:
        raise _refused(model, missing, "no module has such a name")


def _asked(model: nn.Module, lora: Lora) -> tuple[Any, Any] | None:
    """Returns the modules and parameters that peft adapts, None if peft cannot be run."""
    if find_spec("peft") is None:
        return None
    try:
        from peft import LoraConfig
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # another version of it, or of its imports
        return None
    targets: Any = lora.target_modules
    config: Any = LoraConfig(
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=lora.exclude_modules,  # type: ignore[arg-type]
    )
    try:
        convert_peft_config_for_transformers(config, model=model, conversions=None)
    except ValueError as error:  # one of two projections that are joined
        raise _refused(model, targets, str(error)) from error
    return config.target_modules, config.target_parameters


def _refused(model: nn.Module, targets: Any, why: str) -> ConfigError:
    return ConfigError(
        f"target_modules={targets!r}: the experts of {type(model).__name__} are stacked in "
        f"parameters such as {stacked_experts(model)[0]!r}; {why}. Give names of linear layers "
        "that are no experts', such as those of the attention"
    )
