"""PyTorch Lightning and Fabric with tiers: strategies.

    from tiermem.integrations.lightning import TierStrategy

    trainer = Trainer(strategy=TierStrategy(hbm="7GiB", nvme="/mnt/nvme"))

and for Fabric ``Fabric(strategy=FabricTierStrategy(hbm="7GiB"))``. ``configure_optimizers`` stays
as it is: plain torch optimizers become tiered ones, and their schedulers keep working.

With several GPUs, each process trains a replica on its own: ``Trainer(devices=2,
strategy=TierDDPStrategy(hbm="7GiB"))``, and for Fabric ``FabricTierDDPStrategy``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tiermem import ConfigError, TieredOptimizer, TierManager

from .conversion import hand_over, tiered, without_hooks
from .options import need

if TYPE_CHECKING:
    _Strategy = Any
    _DDPStrategy = Any
    _FabricStrategy = Any
    _FabricDDPStrategy = Any
else:
    _strategies = need("lightning.pytorch.strategies", "lightning", "TierStrategy")
    _Strategy, _DDPStrategy = _strategies.SingleDeviceStrategy, _strategies.DDPStrategy
    _strategies = need("lightning.fabric.strategies", "lightning", "FabricTierStrategy")
    _FabricStrategy, _FabricDDPStrategy = _strategies.SingleDeviceStrategy, _strategies.DDPStrategy


class _OverTiers:
    """What all strategies do: one manager, opened when the first model is set up.

    Attributes:
        tier: The manager, once there is one.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        hbm: int | str | None = None,
        dram: int | str | None = None,
        nvme: Any = None,
        *,
        optimizer: Mapping[str, Any] | None = None,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        **settings: Any,
    ) -> None:
        """Keeps the settings; the manager is opened when a model is set up.

        Args:
            device: Where the model computes; CUDA where there is one. Strategies of several
                processes have it from ``Trainer(devices=...)``.
            hbm: Budget of device memory; bytes or text such as ``"7GiB"``.
            dram: Budget of host memory.
            nvme: A folder on a fast disk, or several, or None.
            optimizer: Settings of ``tier.optimizer``, such as ``{"overlap": "forward"}``.
            accelerator: As in Lightning's strategies.
            checkpoint_io: As in Lightning's strategies.
            **settings: Others of :class:`tiermem.TierManager`; what that does not know goes to
                Lightning's strategy.

        Raises:
            ConfigError: If a device is given to one that has several processes.
        """
        known = inspect.signature(TierManager).parameters
        own = {name: settings.pop(name) for name in list(settings) if name in known}
        super().__init__(
            *self._places(device),  # type: ignore[call-arg]
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            **settings,
        )
        self.tier: TierManager | None = None
        self._settings = {"hbm": hbm, "dram": dram, "nvme": nvme, **own}
        self._of_optimizers = dict(optimizer or {})
        self._plain: dict[int, torch.optim.Optimizer] = {}  # by id of the tiered one

    def _places(self, device: str | torch.device | None) -> tuple[torch.device, ...]:
        """Returns the positional arguments of Lightning's strategy, which say the device."""
        return (_device(device),)

    def _open(self, device: torch.device) -> TierManager:
        """Returns the manager; opens it where there is none."""
        if self.tier is None or self.tier.closed:
            self.tier = TierManager(device, **self._settings)
        return self.tier

    def _convert(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Returns the tiered optimizer of a plain one; one without parameters stays as it is."""
        if self.tier is None:
            raise ConfigError("the model is set up before its optimizers")
        if not any(group["params"] for group in optimizer.param_groups):
            return optimizer  # Lightning's stand-in for a module that has none
        new = tiered(self.tier, optimizer, **self._of_optimizers)
        if new is not optimizer:
            hand_over(optimizer, new)
        return new


def _device(device: str | torch.device | None) -> torch.device:
    """Returns the device with its number, which Lightning's accelerators ask for."""
    found = "cuda" if torch.cuda.is_available() else "cpu"
    text = str(found if device is None else device)
    if text == "cuda":
        text = f"cuda:{torch.cuda.current_device() if torch.cuda.is_available() else 0}"
    return torch.device(text)


class _TrainedOverTiers(_OverTiers):
    """What strategies of a ``Trainer`` do."""

    model: Any
    root_device: torch.device
    optimizers: list[Any]
    lightning_module: Any

    def model_to_device(self) -> None:
        """Wraps the model instead of moving it."""
        self._open(self.root_device).wrap(self.model)

    def setup_optimizers(self, trainer: Any) -> None:
        """Makes the module's optimizers and schedulers, then replaces the optimizers."""
        super().setup_optimizers(trainer)  # type: ignore[misc]
        plain: list[torch.optim.Optimizer] = self.optimizers
        self.optimizers = [self._convert(optimizer) for optimizer in plain]
        self._plain = {id(new): old for old, new in zip(plain, self.optimizers, strict=True)}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads state into the tiers; nothing of it is moved to the device as a whole."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        """Gives the model and the optimizers' state back to host memory; closes the manager."""
        tier = self.tier
        if tier is not None and not tier.closed:
            states = [_state_of(optimizer) for optimizer in self.optimizers]
            if self.lightning_module is not None:
                tier.unwrap(self.lightning_module)  # first: state goes where its parameter is
            self.optimizers = [
                optimizer if state is None else _given_back(self._plain[id(optimizer)], state)
                for optimizer, state in zip(self.optimizers, states, strict=True)
            ]
            self._plain = {}
            tier.close()
        super().teardown()  # type: ignore[misc]


class TierStrategy(_TrainedOverTiers, _Strategy):  # type: ignore[misc, unused-ignore]
    """Trains a ``LightningModule`` on one device, with its tensors in tiers."""

    strategy_name = "tiers"


class _ManyProcesses:
    """What differs in strategies with several processes, each with its own device."""

    def _places(self, device: str | torch.device | None) -> tuple[torch.device, ...]:
        if device is not None:
            raise ConfigError(
                f"device={device!r}: with several processes each has a device of its own, which "
                "Lightning chooses; say devices= to the Trainer or to Fabric"
            )
        return ()


class TierDDPStrategy(_ManyProcesses, _TrainedOverTiers, _DDPStrategy):  # type: ignore[misc, unused-ignore]
    """Trains a replica in each process; gradients are exchanged as by ``DDPStrategy``."""

    strategy_name = "tiers_ddp"


class _SetUpOverTiers(_OverTiers):
    """What strategies of Fabric do."""

    root_device: torch.device

    def module_to_device(self, module: nn.Module) -> None:
        """Wraps the module instead of moving it."""
        self._open(self.root_device).wrap(module)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Makes the tiered optimizer of a plain one."""
        return self._convert(optimizer)


class FabricTierStrategy(_SetUpOverTiers, _FabricStrategy):  # type: ignore[misc, unused-ignore]
    """Fabric's strategy: ``fabric.setup(model, optimizer)`` gives tiered ones of both."""


class FabricTierDDPStrategy(_ManyProcesses, _SetUpOverTiers, _FabricDDPStrategy):  # type: ignore[misc, unused-ignore]
    """The same in each of several processes, which exchange gradients as in ``DDPStrategy``."""


def _state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Returns a tiered optimizer's state in host memory; None for another."""
    if not isinstance(optimizer, TieredOptimizer):
        return None
    optimizer.abandon_step()  # an exception may have ended the loop in the middle of a step
    with without_hooks(optimizer):
        return optimizer.state_dict()


def _given_back(old: torch.optim.Optimizer, state: dict[str, Any]) -> torch.optim.Optimizer:
    """Returns the plain optimizer that a tiered one was made of, with its state."""
    with without_hooks(old):
        old.load_state_dict(state)
    return old
