"""Adapters inside the modules that they adapt: parameters keep their names.

A target module gets another class, derived from its own and from one of those here, and the
adapter's parts as children under peft's names. What it computes without the adapter is still its
own code, its weight is where other code looks for it (``layer.weight``), and checkpoints of the
base model fit without changes. Every operation, its order and its dtypes are peft's
(``peft/tuners/lora/layer.py`` of 0.21), and so are the bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from tiermem.errors import ConfigError, WrapError
from tiermem.lora.config import Lora
from tiermem.lora.targets import Target, chosen, is_conv1d, resolved, saved_whole
from tiermem.nn.groups.inspect import runtime_of

_SETTINGS = "tiermem_lora"


class AdapterLinear(nn.Linear):
    """One factor of an adapter."""

    resident_names: ClassVar[tuple[str, ...]] = ("weight", "bias")


class Adapted(nn.Module):
    """A module with an adapter.

    Attributes:
        lora_r: The adapter's rank.
        lora_scaling: Factor of its output.
        lora_dropout: The dropout of its input.
    """

    lora_r: int
    lora_scaling: float
    lora_dropout: nn.Module

    def extra_repr(self) -> str:
        """Includes the adapters' settings."""
        return f"{super().extra_repr()}, lora_r={self.lora_r}, lora_scaling={self.lora_scaling:g}"

    def factors(self) -> dict[str, nn.Parameter]:
        """Returns the adapter's parameters, by their names in the module."""
        raise NotImplementedError


class AdaptedLinear(Adapted):
    """A linear layer with an adapter: adds ``lora_B(lora_A(dropout(x))) * scaling``.

    Attributes:
        lora_A: From the layer's inputs to the rank.
        lora_B: From the rank to its outputs.
    """

    lora_A: AdapterLinear
    lora_B: AdapterLinear

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the layer's output, in the dtype of the layer without the adapter."""
        result: torch.Tensor = super().forward(x, *args, **kwargs)
        dtype = result.dtype
        x = x.to(self.lora_A.weight.dtype)
        result = result + self.lora_B(self.lora_A(self.lora_dropout(x))) * self.lora_scaling
        return result.to(dtype)

    def factors(self) -> dict[str, nn.Parameter]:
        """Returns the adapter's parameters, by their names in the module."""
        parts = {"lora_A": self.lora_A, "lora_B": self.lora_B}
        return {
            f"{part}.{name}": param
            for part, module in parts.items()
            for name, param in module.named_parameters()
        }


class AdaptedEmbedding(Adapted):
    """An embedding with an adapter: adds rows of one factor, times the other.

    Attributes:
        lora_embedding_A: Of shape ``(rank, rows)``.
        lora_embedding_B: Of shape ``(width, rank)``.
    """

    resident_names: ClassVar[tuple[str, ...]] = ("lora_embedding_A", "lora_embedding_B")
    lora_embedding_A: nn.Parameter
    lora_embedding_B: nn.Parameter

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the embedding's output, in the dtype of the embedding without the adapter."""
        result: torch.Tensor = super().forward(x, *args, **kwargs)
        own: Any = self
        rows = functional.embedding(
            x,
            self.lora_embedding_A.T,
            padding_idx=own.padding_idx,
            max_norm=own.max_norm,
            norm_type=own.norm_type,
            scale_grad_by_freq=own.scale_grad_by_freq,
            sparse=own.sparse,
        )
        added = (rows @ self.lora_embedding_B.T) * self.lora_scaling
        scale = _scale_of(self)
        if scale is not None:
            added = added * scale.to(added.dtype)
        return (result + added).to(result.dtype)

    def factors(self) -> dict[str, nn.Parameter]:
        """Returns the adapter's parameters, by their names in the module."""
        return {
            "lora_embedding_A": self.lora_embedding_A,
            "lora_embedding_B": self.lora_embedding_B,
        }


def _scale_of(module: nn.Module) -> torch.Tensor | None:
    """Returns the factor of an embedding's output (Gemma's), None for none."""
    scale = getattr(module, "embed_scale", None)
    if isinstance(scale, int | float):
        weight: Any = module.weight
        return torch.tensor(scale, device=weight.device, dtype=weight.dtype)
    return scale if isinstance(scale, torch.Tensor) and scale.numel() == 1 else None


_classes: dict[tuple[type, type], type] = {}


def _class_of(adapted: type[Adapted], kind: type) -> type:
    """Returns the class of adapted modules of a kind."""
    if (adapted, kind) not in _classes:
        _classes[adapted, kind] = type(f"Adapted{kind.__name__}", (adapted, kind), {})
    return _classes[adapted, kind]


def add_adapters(model: nn.Module, lora: Any) -> list[str]:
    """Freezes a model and adds adapters to it, in place.

    The parameters of the model may be on the meta device, with their final dtypes.
    Names do not change: what is added is ``NAME.lora_A.weight`` and ``NAME.lora_B.weight``
    beside ``NAME.weight`` (for embeddings ``NAME.lora_embedding_A`` and ``..._B``). With the same
    seed they have the same bits as with ``peft.get_peft_model``.
    ``tier.wrap`` keeps them in HBM, with their gradients and optimizer state.

    Args:
        model: Any module with linear layers or embeddings, not wrapped yet.
        lora: A :class:`tiermem.Lora`, or a ``peft.LoraConfig``.

    Returns:
        The qualified names of the parameters added.

    Raises:
        ConfigError: If an option or a module is not supported; the model is unchanged.
        WrapError: If it is wrapped already.
    """
    wish = Lora.of(lora)
    check_plain(model)
    targets, whole = chosen(model, wish), saved_whole(model, wish)
    model.requires_grad_(False)
    for target in targets:
        _adapt(target, wish)
    for _, module in whole:
        module.requires_grad_(True)
    for param in trained_biases(model, wish).values():
        param.requires_grad_(True)
    model.__dict__[_SETTINGS] = wish
    recomputes = getattr(model, "is_activation_checkpointing", None)  # the name in later releases
    if recomputes is None:
        recomputes = getattr(model, "is_gradient_checkpointing", False)
    if recomputes:
        # without it torch's reentrant checkpoints would see no input that requires a gradient
        enable: Callable[[], None] | None = getattr(model, "enable_input_require_grads", None)
        if enable is not None:
            enable()
    return list(adapter_parameters(model))


def check_plain(model: nn.Module) -> None:
    """Refuses a model that has adapters already, or is wrapped.

    Raises:
        ConfigError: If it has adapters, with advice.
        WrapError: Likewise.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"adapters are for a torch.nn.Module, not {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, Adapted):
            raise ConfigError(
                f"module {name!r} has an adapter already; a model has one set of them"
            )
        if hasattr(module, "base_layer") and hasattr(module, "lora_A"):
            raise ConfigError(
                f"module {name!r} has peft's adapters already; tier.wrap takes the model as it is"
            )
        if runtime_of(module) is not None:
            raise WrapError(
                f"module {name or type(module).__name__!r} is wrapped already; adapters are added "
                "before tier.wrap, or after tier.unwrap(model)"
            )


def settings_of(model: nn.Module) -> Lora | None:
    """Returns the settings of a model's adapters, None if it has none."""
    found = model.__dict__.get(_SETTINGS)
    return found if isinstance(found, Lora) else None


def adapted(model: nn.Module) -> dict[str, Adapted]:
    """Returns the modules with adapters, by qualified name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Adapted)}


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters of all adapters, by qualified name."""
    return {
        f"{name}.{part}": param
        for name, module in adapted(model).items()
        for part, param in module.factors().items()
    }


def trained_biases(model: nn.Module, lora: Lora) -> dict[str, nn.Parameter]:
    """Returns the biases of the base model that are trained, by qualified name."""
    if lora.bias == "none":
        return {}
    own = adapter_parameters(model)
    if lora.bias == "all":
        return {
            name: param
            for name, param in model.named_parameters()
            if (name == "bias" or name.endswith(".bias")) and name not in own
        }
    biases = {f"{name}.bias": m._parameters.get("bias") for name, m in adapted(model).items()}
    return {name: bias for name, bias in biases.items() if bias is not None}


# -- made ------------------------------------------------------------------


def _adapt(target: Target, lora: Lora) -> None:
    """Adds an adapter to a module."""
    module: Any = target.module
    weight: torch.Tensor = module.weight
    kind = AdaptedEmbedding if isinstance(module, nn.Embedding) else AdaptedLinear
    made = _embedding_factors if kind is AdaptedEmbedding else _linear_factors
    with torch.device("cpu"), torch.enable_grad():
        parts = made(module, target.r, lora)
    # as in peft it drops, whatever the mode of a model from from_pretrained, until model.eval()
    module.lora_dropout = nn.Dropout(lora.dropout) if lora.dropout > 0 else nn.Identity()
    for name, part in parts.items():
        setattr(module, name, _in_dtypes(part, weight))
    module.lora_r, module.lora_scaling = target.r, target.scaling
    module.__class__ = _class_of(kind, type(module))


Part = AdapterLinear | nn.Parameter


def _in_dtypes(part: Part, weight: torch.Tensor) -> Any:
    """Returns a factor like peft's: rounded to the weight's dtype, stored in float32 at least."""
    device = torch.device("cpu") if weight.is_meta else weight.device
    wide = torch.float32 if weight.element_size() == 2 else weight.dtype
    if isinstance(part, nn.Parameter):
        return nn.Parameter(part.detach().to(device, weight.dtype).to(wide))
    return part.to(device, weight.dtype).to(wide)


def _linear_factors(module: Any, r: int, lora: Lora) -> dict[str, Part]:
    """Creates the factors of a linear layer, drawing as often from the generator as peft."""
    if is_conv1d(module):
        inputs, outputs = module.weight.shape
    else:
        inputs, outputs = module.in_features, module.out_features
    first = AdapterLinear(inputs, r, bias=False)
    second = AdapterLinear(r, outputs, bias=lora.lora_bias)
    if lora.init == "default":
        nn.init.kaiming_uniform_(first.weight, a=math.sqrt(5))
    elif lora.init == "gaussian":
        nn.init.normal_(first.weight, std=1 / r)
    if lora.init != "random":
        nn.init.zeros_(second.weight)
        if second.bias is not None:
            nn.init.zeros_(second.bias)
    return {"lora_A": first, "lora_B": second}


def _embedding_factors(module: Any, r: int, lora: Lora) -> dict[str, Part]:
    """Creates the factors of an embedding, likewise."""
    first = nn.Parameter(torch.randn((r, module.num_embeddings)))
    second = nn.Parameter(torch.randn((module.embedding_dim, r)))
    if lora.init != "random":
        nn.init.zeros_(first)
        nn.init.normal_(second)
    return {"lora_embedding_A": first, "lora_embedding_B": second}


def peft_options(model: nn.Module, lora: Lora) -> dict[str, Any]:
    """Returns the content of ``adapter_config.json`` for a model's adapters."""
    options = lora.peft_options()
    options["target_modules"] = resolved(model, lora)
    options["fan_in_fan_out"] = any(is_conv1d(module) for module in adapted(model).values())
    config = getattr(model, "config", None)
    options["base_model_name_or_path"] = getattr(config, "_name_or_path", None) or None
    options["inference_mode"] = True
    return options
