"""DeepSpeed's optimizers: torch's classes where the results are the same, else its formulas."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tiermem import ConfigError

from ..conversion import settings_of

Values = dict[str, Any]
Made = tuple[type[torch.optim.Optimizer], dict[str, Any]]
"""A class and its settings."""

_ADAM = {"adam", "adamw", "onebitadam", "zerooneadam"}
_LAMB = {"lamb", "fusedlamb", "onebitlamb"}
_OWN = {
    "torch_adam", "adam_w_mode", "adamw_mode", "bias_correction", "set_grad_none",
    "fp32_optimizer_states", "max_grad_norm", "legacy_fusion",
}  # fmt: skip
_COMPRESSION = {
    "freeze_step", "cuda_aware", "comm_backend_name", "coeff_beta", "factor_max", "factor_min",
    "factor_threshold", "var_freeze_step", "var_update_scaler", "local_step_scaler",
    "local_step_clipper",
}  # fmt: skip
COMPRESSED = {"onebitadam", "zerooneadam", "onebitlamb"}
"""Optimizers that compress the exchange between processes; one process uses the plain ones."""


class _Stepped(torch.optim.Optimizer):
    """An optimizer that steps each parameter by itself."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one step.

        Args:
            closure: Evaluated first, with gradients enabled.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        self._step_one(param, param.grad, group, self.state[param])
        return loss

    def _step_one(self, param: Tensor, gradient: Tensor, group: Values, state: Values) -> None:
        raise NotImplementedError


def _moments(
    param: Tensor, gradient: Tensor, group: Values, state: Values
) -> tuple[Tensor, Tensor]:
    """Counts a step, and updates and returns both moments."""
    if not state:
        state["step"] = 0
        state["exp_avg"] = torch.zeros_like(param)
        state["exp_avg_sq"] = torch.zeros_like(param)
    state["step"] += 1
    first, second = group["betas"]
    if group.get("l2"):
        gradient = gradient.add(param, alpha=group["weight_decay"])
    state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
    state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
    return state["exp_avg"], state["exp_avg_sq"]


class Adam(_Stepped):
    """Adam and AdamW, with or without bias correction; the base of DeepSpeed's names for it.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        bias_correction: Whether moments are corrected for their begin at zero.
        betas: Decay of the moments.
        eps: Added to the denominator.
        adam_w_mode: Decoupled weight decay (AdamW); else it is added to the gradient.
        weight_decay: Weight decay.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
    ) -> None:
        settings = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        settings |= {"bias_correction": bias_correction, "l2": not adam_w_mode}
        super().__init__(params, settings)

    def _step_one(self, param: Tensor, gradient: Tensor, group: Values, state: Values) -> None:
        first, second = _moments(param, gradient, group, state)
        low = high = 1.0
        if group["bias_correction"]:
            low = 1 - group["betas"][0] ** state["step"]
            high = 1 - group["betas"][1] ** state["step"]
        if not group["l2"]:
            param.mul_(1 - group["lr"] * group["weight_decay"])
        root = second.sqrt().div_(math.sqrt(high)).add_(group["eps"])
        param.addcdiv_(first, root, value=-group["lr"] / low)


class FusedAdam(Adam):
    """DeepSpeed's name for Adam on the device; ``initialize`` steps it by torch's own class."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _no_amsgrad("FusedAdam", amsgrad)
        super().__init__(params, lr, bias_correction, betas, eps, adam_w_mode, weight_decay)


class DeepSpeedCPUAdam(Adam):
    """DeepSpeed's name for Adam with offloaded state; ``initialize`` steps it by torch's class."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _no_amsgrad("DeepSpeedCPUAdam", amsgrad)
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay)


class FusedLamb(_Stepped):
    """LAMB as DeepSpeed has it.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        bias_correction: Whether moments are corrected for their begin at zero.
        betas: Decay of the moments.
        eps: Added to the denominator.
        eps_inside_sqrt: Added before the root is taken.
        weight_decay: Weight decay.
        max_grad_norm: Not used, as in DeepSpeed.
        max_coeff: The most that a layer's rate is scaled by.
        min_coeff: The least.
        amsgrad: Must be false.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        _no_amsgrad("FusedLamb", amsgrad)
        settings = {"lr": lr, "bias_correction": bias_correction, "betas": tuple(betas)}
        settings |= {"eps": eps, "eps_inside_sqrt": eps_inside_sqrt, "weight_decay": weight_decay}
        super().__init__(params, {**settings, "max_coeff": max_coeff, "min_coeff": min_coeff})

    def _step_one(self, param: Tensor, gradient: Tensor, group: Values, state: Values) -> None:
        first, second = _moments(param, gradient, group, state)
        inside, eps = group["eps_inside_sqrt"], group["eps"]
        root = second.add(eps).sqrt_() if inside else second.sqrt().add_(eps)
        update = first / root
        update.add_(param, alpha=group["weight_decay"])
        weight, change = param.norm(), update.norm()
        ratio = (weight / change).clamp(group["min_coeff"], group["max_coeff"])
        ratio = torch.where((weight > 0) & (change > 0), ratio, torch.ones_like(ratio))
        rate = group["lr"]
        if group["bias_correction"]:
            low, high = (1 - beta ** state["step"] for beta in group["betas"])
            rate = rate * math.sqrt(high) / low
        param.sub_(update.mul_(ratio * rate))


class FusedLion(_Stepped):
    """Lion as DeepSpeed has it.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        betas: Decay of what the sign is taken of, and of the moment.
        weight_decay: Decoupled weight decay.
        set_grad_none: Not used.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    def _step_one(self, param: Tensor, gradient: Tensor, group: Values, state: Values) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
        average = state["exp_avg"]
        first, second = group["betas"]
        sign = average.mul(first).add_(gradient, alpha=1 - first).sign_()
        param.mul_(1 - group["lr"] * group["weight_decay"]).add_(sign, alpha=-group["lr"])
        average.mul_(second).add_(gradient, alpha=1 - second)


def from_config(name: str, kind: str, params: Mapping[str, Any], device: str) -> Made:
    """Returns the class and settings of a configuration's optimizer.

    Args:
        name: The file, for messages.
        kind: ``optimizer.type``.
        params: ``optimizer.params``, "auto" filled or left out.
        device: Where steps are made.

    Raises:
        ConfigError: If the type or a setting is not known.
    """
    known = kind.lower()
    settings = dict(params)
    for key in _COMPRESSION if known in COMPRESSED else ():
        settings.pop(key, None)
    betas = settings.get("betas")
    if betas is not None:
        if isinstance(betas, str) or not isinstance(betas, Sequence) or len(betas) != 2:
            raise ConfigError(f"{name}: optimizer.params.betas={betas!r}: it must be two numbers")
        settings["betas"] = tuple(betas)
    if known in _ADAM:
        made = _adam(settings, device, decoupled=known == "adamw")
    elif known in _LAMB:
        settings.pop("max_grad_norm", None)
        made = FusedLamb, settings
    elif known == "lion":
        made = FusedLion, settings
    else:
        made = _of_torch(name, kind), {k: v for k, v in settings.items() if k not in _OWN}
    taken = inspect.signature(made[0]).parameters
    for key in made[1]:
        if key not in taken:
            raise ConfigError(
                f"{name}: optimizer.params.{key}={made[1][key]!r}: {made[0].__name__} has no such "
                f"setting; it has {', '.join(k for k in taken if k != 'params')}"
            )
    try:
        trial(made, [])
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name}: optimizer.params={dict(params)!r}: {made[0].__name__} does not take them: "
            f"{error}"
        ) from error
    return made


def trial(made: Made, groups: list[Any]) -> torch.optim.Optimizer:
    """Returns an optimizer with such settings and groups, of parameters of one element."""
    own = [_without(group, "params") for group in groups if isinstance(group, Mapping)]
    tiny = [
        {**group, "params": [torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))]}
        for group in own or [{}]
    ]
    return made[0](tiny, **_without(made[1], "fused"))


def _of_torch(name: str, kind: str) -> type[torch.optim.Optimizer]:
    for key, value in vars(torch.optim).items():
        if key.lower() != kind.lower() or not inspect.isclass(value) or key == "Optimizer":
            continue
        if issubclass(value, torch.optim.Optimizer):
            return value
    raise ConfigError(
        f"{name}: optimizer.type={kind!r} is not known here: write Adam, AdamW, SGD, Lamb, Lion or "
        "the name of another class of torch.optim, or hand initialize() an optimizer"
    )


def _adam(settings: dict[str, Any], device: str, *, decoupled: bool) -> Made:
    """Returns torch's class for DeepSpeed's Adam, whose weight decay is 0 by default."""
    by_torch = settings.pop("torch_adam", False)
    wanted = [settings.pop(key, None) for key in ("adam_w_mode", "adamw_mode")]
    decoupled = decoupled or False not in wanted
    correct = settings.pop("bias_correction", True)
    for key in _OWN & settings.keys():
        del settings[key]
    if not correct:
        return Adam, {**settings, "bias_correction": False, "adam_w_mode": decoupled}
    if not by_torch:
        settings.setdefault("weight_decay", 0.0)
        if device.startswith("cuda"):
            settings.setdefault("fused", True)
    return torch.optim.AdamW if decoupled else torch.optim.Adam, settings


def from_client(optimizer: torch.optim.Optimizer, device: str) -> tuple[Made, list[dict[str, Any]]]:
    """Returns class, settings and groups of an optimizer that the caller made.

    Args:
        optimizer: Any; DeepSpeed's names for Adam are stepped by torch's classes.
        device: Where steps are made.

    Raises:
        ConfigError: If its constructor needs what the optimizer does not tell.
    """
    groups = [dict(group) for group in optimizer.param_groups if group["params"]]
    if isinstance(optimizer, Adam) and all(_as_torch(group) for group in groups):
        decoupled = not groups[0]["l2"]
        groups = [_without(group, "l2", "bias_correction") for group in groups]
        settings = _without(optimizer.defaults, "l2", "bias_correction")
        settings["adam_w_mode"] = decoupled
        return _adam(settings, device, decoupled=False), groups
    if isinstance(optimizer, Adam):
        return (Adam, {}), groups
    taken = inspect.signature(type(optimizer)).parameters
    settings = {key: value for key, value in settings_of(optimizer).items() if key in taken}
    for key, parameter in list(taken.items())[1:]:
        if parameter.default is parameter.empty and key not in settings:
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            raise ConfigError(
                f"optimizer: {type(optimizer).__name__} cannot be made again in the tiers, its "
                f"constructor needs {key!r}; give the class a default, or name it in the file"
            )
    return (type(optimizer), settings), groups


def _as_torch(group: dict[str, Any]) -> bool:
    return bool(group["bias_correction"])


def _without(values: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


def _no_amsgrad(name: str, amsgrad: bool) -> None:
    if amsgrad:
        raise ConfigError(f"{name}(amsgrad=True): there is no AMSGrad there; use torch.optim.AdamW")
