"""LoRA training of a model whose layers stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tiermem import (
    CapacityError,
    ConfigError,
    Policy,
    TieredOptimizer,
    TierManager,
    budgets_for,
)
from tiermem.config import parse_size

from ..layers import layers_of
from ..options import Option, checked, need
from ..run import Run

_TESTS = "test_extreme_offloading.py"

OPTIONS: tuple[Option, ...] = (
    Option(
        "cap",
        "size",
        "7GiB",
        "`hbm=`, less `activations`; on CUDA torch's allocator is capped as well",
        "the process takes no more device memory than this",
        f"{_TESTS}::test_the_cap_holds",
    ),
    Option(
        "activations",
        "size",
        None,
        "`hbm=` is `cap` less this",
        "device memory for activations and intermediate results; by default a quarter of the cap",
        f"{_TESTS}::test_the_cap_holds",
    ),
    Option(
        "rank",
        "int",
        8,
        "`peft.LoraConfig(r=...)`",
        "fp32 adapters of this rank on every linear module of the layers; A is random, B is zero",
        f"{_TESTS}::test_adapters",
        least=1,
    ),
    Option(
        "alpha",
        "int",
        16,
        "`peft.LoraConfig(lora_alpha=...)`",
        "",
        f"{_TESTS}::test_adapters",
        least=1,
    ),
    Option(
        "learning_rate",
        "float",
        1e-4,
        "`tier.optimizer(model, Adam, lr=...)`",
        "learning rate of Adam, which trains the adapters",
        f"{_TESTS}::test_losses_are_the_resident_ones",
        least=0,
    ),
    Option(
        "seed",
        "int",
        42,
        "seed of `torch.default_generator` while adapters are created",
        "the same adapters in every run; the state of the program's random generator is restored",
        f"{_TESTS}::test_adapters",
        least=-(1 << 63),
        most=(1 << 64) - 1,
    ),
    Option(
        "dtype",
        "dtype",
        None,
        "the model is cast before it is wrapped",
        "cast to it, such as bf16 or fp16, whichever is faster on the device; by default no cast",
        f"{_TESTS}::test_dtype",
    ),
    Option(
        "prefetch",
        "bool",
        True,
        '`prefetch_depth="auto"`, or 0',
        "layers are prefetched if that saves time",
        f"{_TESTS}::test_prefetch",
    ),
    Option(
        "pin",
        "bool",
        True,
        "no effect",
        "in any case the layers' homes are page-locked once, before the first step",
        f"{_TESTS}::test_pin_is_without_effect",
    ),
)

_HOMES = dict.fromkeys(("params", "grads", "master", "optimizer"), "hbm")
_NAMES = {option.name: option for option in OPTIONS}


class Offloading(Run):
    """A model with adapters, wrapped, and its manager."""

    def __init__(
        self,
        model: nn.Module,
        *,
        cap: int | str = "7GiB",
        activations: int | str | None = None,
        device: str | torch.device = "cuda",
        dram: int | str | None = None,
        **options: Any,
    ) -> None:
        """Adds adapters to the model and wraps it.

        Args:
            model: A model with a list of layers, in host memory. Its own weights are frozen.
            cap: Device memory for the whole process: bytes, or text such as ``"7GiB"``.
            activations: The part of it for activations and intermediate results; by default a
                quarter.
            device: Where the model computes.
            dram: Budget of host memory; by default tiermem's default.
            **options: ``rank``, ``alpha``, ``learning_rate``, ``seed``, ``dtype``,
                ``prefetch``, ``pin``.

        Raises:
            ConfigError: If an option is unknown or of a wrong type, or the model has no layers.
            CapacityError: If the model cannot be trained within the cap.
        """
        unknown = [name for name in options if name not in _NAMES]
        if unknown:
            raise ConfigError(f"no options {unknown}; there are {sorted(_NAMES)}")
        self._options = {
            option.name: checked(option, options.get(option.name), "the call")
            for option in OPTIONS
            if option.kind != "size"
        }
        peft = need("peft", "peft", "LoRA")
        layers = layers_of(model)
        if not layers:
            raise ConfigError(
                f"{type(model).__name__} has no list of layers of one class to stream"
            )
        hbm = _hbm(cap, activations)
        budgets_for(model, device=device, hbm=hbm, policy="dram")  # raises if it cannot be wrapped
        undo = _Adapters(model, _targets(model, layers))
        try:
            self._add_adapters(peft, model, undo.targets)
            self._check_budgets(model, layers, hbm, device)
            self.tier = TierManager(
                device=device,
                hbm=hbm,
                dram=dram,
                policy=Policy(**_HOMES),  # type: ignore[arg-type]
                prefetch_depth="auto" if self._options["prefetch"] else 0,
            )
            self._cast(model)
            if torch.device(device).type == "cuda":
                total = torch.cuda.get_device_properties(device).total_memory
                share = min(1.0, parse_size(cap, "cap") / total)
                torch.cuda.set_per_process_memory_fraction(share, device)
            self.wrap(model, recompute=True, homes=_homes(model, layers))
        except BaseException:
            undo()
            raise

    def _check_budgets(
        self, model: nn.Module, layers: list[nn.Module], hbm: int, device: str | torch.device
    ) -> None:
        """Refuses a cap that is too small, before a weight is cast or moved."""
        found = budgets_for(
            model,
            torch.optim.Adam,
            [param for param in model.parameters() if param.requires_grad],
            device=device,
            hbm=hbm,
            policy=Policy(**_HOMES),  # type: ignore[arg-type]
            homes=_homes(model, layers),  # type: ignore[arg-type]
            dtype=self._options["dtype"],
        )
        if found.least_hbm > hbm:
            raise CapacityError(
                f"weights, adapters and their optimizer take {found.least_hbm} bytes, "
                f"and cap= leaves {hbm} for them",
                "give a larger cap, less activations, or a lower rank",
            )

    def _cast(self, model: nn.Module) -> None:
        """Casts the model's own weights; adapters stay float32."""
        dtype = self._options["dtype"]
        for param in model.parameters() if dtype is not None else ():
            if not param.requires_grad and param.is_floating_point():
                param.data = param.data.to(dtype)
        for buffer in model.buffers() if dtype is not None else ():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(dtype)

    def _add_adapters(self, peft: Any, model: nn.Module, targets: list[str]) -> None:
        """Adds adapters to modules, initialized as peft does."""
        config = peft.LoraConfig(
            r=self._options["rank"], lora_alpha=self._options["alpha"], target_modules=targets
        )
        model.requires_grad_(False)
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(self._options["seed"])
        try:
            peft.inject_adapter_in_model(config, model)
        finally:
            torch.set_rng_state(state)
        for param in model.parameters():
            if param.requires_grad:
                param.data = param.data.float()

    def optimizer(self, **settings: Any) -> TieredOptimizer:
        """Makes Adam for the adapters.

        Args:
            **settings: Settings of :class:`torch.optim.Adam`; they override those of the run.
        """
        trained = [p for p in self.model.parameters() if p.requires_grad]
        settings = {"lr": self._options["learning_rate"], **settings}
        return self.tier.optimizer(trained, torch.optim.Adam, **settings)  # type: ignore[arg-type, unused-ignore]


class _Adapters:
    """Removes adapters from a model again.

    Attributes:
        targets: Names of the modules that get adapters.
    """

    def __init__(self, model: nn.Module, targets: list[str]) -> None:
        """Notes the modules as they are, and which parameters are trained."""
        self.targets = targets
        self._model = model
        self._modules = {name: model.get_submodule(name) for name in targets}
        self._trained = [(param, param.requires_grad) for param in model.parameters()]

    def __call__(self) -> None:
        """Puts the modules back, and restores which parameters are trained."""
        for name, module in self._modules.items():
            parent, _, last = name.rpartition(".")
            setattr(self._model.get_submodule(parent), last, module)
        for param, trained in self._trained:
            param.requires_grad_(trained)


def _targets(model: nn.Module, layers: list[nn.Module]) -> list[str]:
    """Returns the names of every linear module of the layers.

    Raises:
        ConfigError: If there is none.
    """
    inside = {id(module) for layer in layers for module in layer.modules()}
    targets = [
        name
        for name, module in model.named_modules()
        if id(module) in inside and isinstance(module, nn.Linear)
    ]
    if not targets:
        raise ConfigError("the model's layers have no torch.nn.Linear to put adapters on")
    return targets


def _homes(model: nn.Module, layers: list[nn.Module]) -> dict[str, str]:
    """Returns homes by module name: DRAM for layers, HBM for adapters."""
    names = {id(module): name for name, module in model.named_modules()}
    homes = {names[id(layer)]: "dram" for layer in layers}
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own and all(param.requires_grad for param in own):
            homes[name] = "hbm"
    return homes


def _hbm(cap: int | str, activations: int | str | None) -> int:
    """Returns tiermem's budget of device memory in bytes.

    Raises:
        CapacityError: If activations take the whole cap.
    """
    whole = parse_size(cap, "cap")
    computed = whole // 4 if activations is None else parse_size(activations, "activations")
    if computed >= whole:
        raise CapacityError(
            f"activations={computed} leave nothing of cap={whole}; give a larger cap or less"
        )
    return whole - computed
