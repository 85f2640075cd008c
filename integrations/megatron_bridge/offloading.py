"""A model trained with Megatron's offloading fields."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from tiermem import Policy, TierManager

from ..layers import layers_of
from ..options import Row, became
from ..run import Run
from .fields import FIELDS, Fields


class Offloading(Run):
    """A wrapped model with its manager, from Megatron's fields.

    Attributes:
        model: The model, wrapped.
        fields: The fields, checked.
        policy: Where each role's home is.
        homes: Homes of single layers' weights, by name.
        tier: The manager: ``tier.optimizer(...)``, ``stats()``, ``residency()``.
    """

    def __init__(
        self,
        model: nn.Module,
        config: object | None = None,
        *,
        device: str | torch.device = "cuda",
        hbm: int | str | None = None,
        dram: int | str | None = None,
        **fields: Any,
    ) -> None:
        """Wraps a model with the settings that the fields stand for.

        Args:
            model: Any module with a list of layers.
            config: A model provider, a configuration or a mapping that has the fields.
            device: Where the model computes.
            hbm: Budget of device memory; tiermem's default.
            dram: Budget of host memory; tiermem's default.
            **fields: Fields by name, over those of ``config``.

        Raises:
            ConfigError: If a field is refused; nothing was changed.
            CapacityError: If the model does not fit in a budget; it is unchanged.
        """
        self.fields = Fields(config, **fields)
        layers = layers_of(model)
        self.fields.check_layers(len(layers))
        f = self.fields
        names = {id(module): name for name, module in model.named_modules()}
        first = [names[id(layer)] for layer in layers[: f.cpu_offloading_num_layers]]
        weights = f.cpu_offloading and f.cpu_offloading_weights
        self.homes = dict.fromkeys(first, "dram") if weights else {}
        saved = bool(f.fine_grained_activation_offloading) or (
            f.cpu_offloading and f.cpu_offloading_activations
        )
        below = "dram" if _offloads_state(f) else "hbm"
        self.policy = Policy(
            params="hbm",
            grads="hbm",
            master=below,  # type: ignore[arg-type]
            optimizer=below,  # type: ignore[arg-type]
            activations="dram" if saved else "hbm",
        )
        self.tier = TierManager(
            device=device,
            hbm=hbm,
            dram=dram,
            policy=self.policy,
            activation_min=_least(f, model),
            activation_layers=_saved_layers(f, len(layers)),
        )
        self.wrap(model, homes=self.homes)

    def explain(self) -> list[Row]:
        """Returns what every field that was given became."""
        return explain(self.fields)


def explain(config: object | None = None, **fields: Any) -> list[Row]:
    """Returns what each field of a configuration becomes, including those without effect.

    Raises:
        ConfigError: If the configuration is refused.
    """
    read = config if isinstance(config, Fields) else Fields(config, **fields)
    rows = []
    for field in FIELDS:
        if field.name in read.given:
            why = read.without_effect(field.name)
            rows.append(became(field, read.values[field.name], why))
    return rows


def _offloads_state(fields: Fields) -> bool:
    return bool(fields.optimizer_cpu_offload) and fields.optimizer_offload_fraction != 0


def _least(fields: Fields, model: nn.Module) -> int:
    """Returns the size in bytes from which saved tensors leave HBM."""
    if not fields.fine_grained_activation_offloading:
        return 4096  # layer by layer, everything large enough to be worth a copy
    width = max((p.element_size() for p in model.parameters()), default=4)
    return int(fields.min_offloaded_tensor_size) * width


def _saved_layers(fields: Fields, layers: int) -> int | None:
    """Returns how many layers' saved tensors leave HBM, None for all."""
    if fields.cpu_offloading:
        return int(fields.cpu_offloading_num_layers)
    if fields.activation_offload_fraction < 1:
        return math.ceil(float(fields.activation_offload_fraction) * layers)
    return None
