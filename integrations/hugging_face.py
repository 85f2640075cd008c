"""Hugging Face's ``Trainer``, and those that derive from it, over tiers: one added argument.

    from tiermem.integrations.hugging_face import TrainerTiers

    with TrainerTiers(hbm="7GiB", nvme="/mnt/nvme") as tier:
        trainer = Trainer(model, args, train_dataset=data, optimizers=tier.optimizers(model, args))
        trainer.train()

Accumulation, clipping, evaluation, schedulers, bf16, recomputation, saving and resuming are the
trainer's own, and give the bits of the resident run.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn

from tiermem import ConfigError, TieredOptimizer, TierManager

from .options import need

_made_for: weakref.WeakKeyDictionary[TieredOptimizer, weakref.ref[nn.Module]] = (
    weakref.WeakKeyDictionary()
)
"""Optimizers of :meth:`TrainerTiers.optimizers`, and the models that they were made for."""


class TrainerTiers(TierManager):
    """A manager that makes what a ``Trainer`` takes as ``optimizers``."""

    def optimizers(
        self,
        model: nn.Module,
        args: Any,
        cls: type[torch.optim.Optimizer] | None = None,
        **settings: Any,
    ) -> tuple[TieredOptimizer, None]:
        """Wraps a model, unless it is wrapped, and makes its optimizer as the trainer would.

        Args:
            model: What the trainer trains; adapters, if any, are in it already.
            args: ``TrainingArguments``: the class of the optimizer (``optim``), learning rate,
                betas, decay.
            cls: Another class than ``args.optim`` says.
            **settings: Of :meth:`tiermem.TierManager.optimizer` and of the class.

        Returns:
            The optimizer, and None: the trainer makes the scheduler.

        Raises:
            ConfigError: If ``args`` asks for several processes or for another system's sharding.
            WrapError: If the model cannot be wrapped.
            CapacityError: If a budget cannot hold it.
        """
        _refuse_others(args)
        trainer = need("transformers", "transformers", "hugging_face.TrainerTiers").Trainer
        _leave_placing_to_tiers()
        own: dict[str, Any] = {}
        if cls is None:
            cls, own = trainer.get_optimizer_cls_and_kwargs(args, model)
        if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer):
            raise ConfigError(
                f"optim={args.optim!r} makes its optimizer from the whole model; give cls= a "
                "torch.optim.Optimizer class instead"
            )
        if not self.wraps(model):
            for part in [module for module in model.modules() if self.wraps(module)]:
                self.unwrap(part)  # adapters were put around it: they belong to the model
            self.wrap(model)
        decaying = set(trainer.get_decay_parameter_names(None, model))
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        groups = [
            {
                "params": [p for name, p in trained if (name in decaying) is decays],
                "weight_decay": args.weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        made = self.optimizer(groups, cls, **{**own, **settings})  # type: ignore[arg-type, unused-ignore]
        _made_for[made] = weakref.ref(model)
        return made, None

    def wraps(self, model: nn.Module) -> bool:
        """Whether a model is wrapped by this manager already."""
        return id(model) in self._wrapped


def _leave_placing_to_tiers() -> None:
    """Keeps accelerate from moving the state of tiered optimizers.

    ``Accelerator.prepare`` would bring all of it to the device at once, masters too.
    """
    kind: Any = need("accelerate", "accelerate", "hugging_face.TrainerTiers").Accelerator
    prepare = kind.prepare_optimizer
    if hasattr(prepare, "__wrapped__"):
        return

    @functools.wraps(prepare)
    def placed(self: Any, optimizer: Any, device_placement: bool | None = None) -> Any:
        if isinstance(optimizer, TieredOptimizer):
            _check_what_it_trains(optimizer)
            device_placement = False
        return prepare(self, optimizer, device_placement)

    kind.prepare_optimizer = placed


def _check_what_it_trains(optimizer: TieredOptimizer) -> None:
    """Refuses to train with an optimizer that does not have what is trained.

    A trainer that is given ``peft_config=`` freezes the model and puts adapters on it after the
    optimizer was made: it would step none of them, and say nothing.

    Raises:
        ConfigError: Naming a parameter.
    """
    made_for = _made_for.get(optimizer)
    model = made_for() if made_for is not None else None
    if model is None:
        return
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    known = {id(p) for p in stepped}
    left = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in known]
    if not left and any(p.requires_grad for p in stepped):
        return
    what = f"{left[0]!r} is trained, but not by" if left else "nothing is trained by"
    raise ConfigError(
        f"{what} the optimizer that tier.optimizers(model, args) made: adapters were added or "
        "parameters thawed after it. In place of a trainer's peft_config=, give the trainer and "
        "tier.optimizers the model that peft.get_peft_model(model, config) returns; or make the "
        "trainer first, without optimizers=, then "
        "trainer.optimizer, _ = tier.optimizers(trainer.model, args)"
    )


def _refuse_others(args: Any) -> None:
    """Refuses what shards or moves the model by itself.

    Raises:
        ConfigError: Naming the argument.
    """
    for name in ("deepspeed", "fsdp"):
        value = getattr(args, name, None)
        if value:
            raise ConfigError(
                f"TrainingArguments({name}={value!r}) hands the model to another system; leave it "
                "out, or leave tiermem out"
            )
    if getattr(args, "world_size", 1) > 1:
        raise ConfigError(
            f"TrainingArguments asks for {args.world_size} processes; tiermem trains on one GPU a "
            "process so far"
        )
    if getattr(args, "n_gpu", 1) > 1:
        raise ConfigError(
            f"the trainer would replicate the model over {args.n_gpu} GPUs; set "
            "CUDA_VISIBLE_DEVICES to one"
        )
