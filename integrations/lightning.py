"""PyTorch Lightning and Fabric over tiers: a strategy.

    from tiermem.integrations.lightning import TierStrategy

    trainer = Trainer(strategy=TierStrategy(hbm="7GiB", nvme="/mnt/nvme"))

and for Fabric ``Fabric(strategy=FabricTierStrategy(hbm="7GiB"))``. ``configure_optimizers`` stays
as it is: plain optimizers of torch become tiered ones, schedulers go on with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tiermem import TieredOptimizer, TierManager

from .conversion import hand_over, tiered
from .options import need

if TYPE_CHECKING:
    _Strategy = Any
    _FabricStrategy = Any
else:
    _Strategy = need(
        "lightning.pytorch.strategies", "lightning", "TierStrategy"
    ).SingleDeviceStrategy
    _FabricStrategy = need(
        "lightning.fabric.strategies", "lightning", "FabricTierStrategy"
    ).SingleDeviceStrategy


class _Tiers:
    """What both strategies do: one manager, its settings, its models."""

    def __init__(self, optimizer: Mapping[str, Any] | None, settings: dict[str, Any]) -> None:
        self.of_optimizers = dict(optimizer or {})
        self.settings = settings
        self.manager: TierManager | None = None

    def open(self, device: torch.device) -> TierManager:
        """Returns the manager; opens it where there is none."""
        if self.manager is None or self.manager.closed:
            self.manager = TierManager(device=device, **self.settings)
        return self.manager

    def convert(self, optimizer: torch.optim.Optimizer) -> TieredOptimizer:
        """Returns the tiered optimizer of a plain one."""
        if self.manager is None:
            raise RuntimeError("the model is set up before its optimizers")
        return tiered(self.manager, optimizer, **self.of_optimizers)

    def close(self) -> None:
        """Closes the manager, if there is one."""
        if self.manager is not None:
            self.manager.close()


def _device(device: str | torch.device | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class TierStrategy(_Strategy):  # type: ignore[misc, unused-ignore]
    """Trains a ``LightningModule`` on one device, with its tensors in tiers.

    Attributes:
        tier: The manager, once the trainer has set the model up.
    """

    strategy_name = "tiers"
    optimizers: list[Any]

    def __init__(
        self,
        device: str | torch.device | None = None,
        *,
        optimizer: Mapping[str, Any] | None = None,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **settings: Any,
    ) -> None:
        """Keeps the settings; the manager is opened when the model is set up.

        Args:
            device: Where the model computes; CUDA where there is one.
            optimizer: Settings of ``tier.optimizer``, such as ``{"overlap": "forward"}``.
            accelerator: As in Lightning's strategies.
            checkpoint_io: As in Lightning's strategies.
            precision_plugin: As in Lightning's strategies.
            **settings: Of :class:`tiermem.TierManager`: ``hbm``, ``dram``, ``nvme``, ``policy``.
        """
        super().__init__(_device(device), accelerator, checkpoint_io, precision_plugin)
        self._tiers = _Tiers(optimizer, settings)
        self._plain: dict[int, torch.optim.Optimizer] = {}

    @property
    def tier(self) -> TierManager | None:
        """The manager."""
        return self._tiers.manager

    def model_to_device(self) -> None:
        """Wraps the model, in place of moving it."""
        manager = self._tiers.open(self.root_device)
        manager.wrap(self.model)

    def setup_optimizers(self, trainer: Any) -> None:
        """Makes the module's optimizers and schedulers, and tiered ones of them."""
        super().setup_optimizers(trainer)
        plain: list[torch.optim.Optimizer] = self.optimizers
        self.optimizers = [self._tiers.convert(optimizer) for optimizer in plain]
        self._plain = {id(new): old for old, new in zip(plain, self.optimizers, strict=True)}
        for config in self.lr_scheduler_configs:
            for old, new in zip(plain, self.optimizers, strict=True):
                hand_over(config.scheduler, old, new)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads state into the tiers; nothing of it is moved to the device as a whole."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        """Gives the model and the optimizers' state back to host memory; closes the manager."""
        manager = self._tiers.manager
        if manager is not None and not manager.closed and self.model is not None:
            self.optimizers = [_given_back(optimizer, self._plain) for optimizer in self.optimizers]
            manager.unwrap(self.model)
        self._tiers.close()
        super().teardown()


class FabricTierStrategy(_FabricStrategy):  # type: ignore[misc, unused-ignore]
    """Fabric's strategy: ``fabric.setup(model, optimizer)`` gives tiered ones of both.

    Attributes:
        tier: The manager, once a model is set up.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        *,
        optimizer: Mapping[str, Any] | None = None,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        **settings: Any,
    ) -> None:
        """Keeps the settings; as :class:`TierStrategy`."""
        super().__init__(_device(device), accelerator, checkpoint_io, precision)
        self._tiers = _Tiers(optimizer, settings)

    @property
    def tier(self) -> TierManager | None:
        """The manager."""
        return self._tiers.manager

    def module_to_device(self, module: nn.Module) -> None:
        """Wraps the module, in place of moving it."""
        self._tiers.open(self.root_device).wrap(module)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> TieredOptimizer:
        """Makes the tiered optimizer of a plain one."""
        return self._tiers.convert(optimizer)


def _given_back(
    optimizer: torch.optim.Optimizer, plain: Mapping[int, torch.optim.Optimizer]
) -> torch.optim.Optimizer:
    """Returns the plain optimizer of a tiered one, with its state in host memory."""
    old = plain[id(optimizer)]
    old.load_state_dict(optimizer.state_dict())
    return old
