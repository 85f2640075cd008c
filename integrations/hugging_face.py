"""Hugging Face's ``Trainer``, and classes derived from it, with tiers: one added argument.

    from tiermem.integrations.hugging_face import TrainerTiers

    with TrainerTiers(hbm="7GiB", nvme="/mnt/nvme") as tier:
        trainer = Trainer(model, args, train_dataset=data, optimizers=tier.optimizers(model, args))
        trainer.train()

or, for trainers that add adapters to the model or train more than it, ``tier.attach(trainer)``.
Accumulation, clipping, evaluation, schedulers, bf16, recomputation, saving and resuming are the
trainer's own, and the results are bitwise identical to the resident run. The same holds for several
processes with a GPU each (``torchrun``): make ``TrainingArguments`` before the tiers, since they
choose the device of each process.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn

from tiermem import ConfigError, TieredOptimizer, TierManager

from .conversion import hand_over, tiered
from .options import need

_made_for: weakref.WeakKeyDictionary[TieredOptimizer, weakref.ref[nn.Module]] = (
    weakref.WeakKeyDictionary()
)
"""Optimizers of :class:`TrainerTiers`, and the models that they were made for."""

_from_arguments: weakref.WeakSet[TieredOptimizer] = weakref.WeakSet()
"""Optimizers that were made from a trainer's arguments, without the trainer."""


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
            **settings: Settings of :meth:`tiermem.TierManager.optimizer` and of the class.

        Returns:
            The optimizer, and None: the trainer makes the scheduler.

        Raises:
            ConfigError: If ``args`` asks for another device or for another system's sharding.
            WrapError: If the model cannot be wrapped.
            CapacityError: If a budget cannot hold it.
        """
        _refuse_others(args, self._manager.parts.device)
        trainer = need("transformers", "transformers", "hugging_face.TrainerTiers").Trainer
        _watch_trainers()
        own: dict[str, Any] = {}
        if cls is None:
            cls, own = trainer.get_optimizer_cls_and_kwargs(args, model)
        _check_class(cls, own, args)
        self._wrap_as_one(model)
        decaying = set(trainer.get_decay_parameter_names(None, model))
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        groups = own.pop("params", None) or [
            {
                "params": [p for name, p in trained if (name in decaying) is decays],
                "weight_decay": args.weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        made = self.optimizer(groups, cls, **{**own, **settings})  # type: ignore[arg-type, unused-ignore]
        _made_for[made] = weakref.ref(model)
        _from_arguments.add(made)
        return made, None

    def attach(
        self, trainer: Any, cls: type[torch.optim.Optimizer] | None = None, **settings: Any
    ) -> TieredOptimizer:
        """Wraps a trainer's model, unless it is wrapped, and gives the trainer a tiered optimizer.

        The optimizer has the same class, groups and learning rates as the one that the trainer
        would make itself. It includes adapters that the trainer has added, and parameters of its
        loss (which stay on the device).

        Args:
            trainer: A ``Trainer``, or a derived one, that has not trained yet.
            cls: Another class than the trainer would use.
            **settings: Settings of :meth:`tiermem.TierManager.optimizer` and of the class.

        Returns:
            The optimizer, which is ``trainer.optimizer`` from now on.

        Raises:
            ConfigError: If the trainer makes its model itself, has a tiered optimizer already, or
                asks for another device or for another system's sharding.
            WrapError: If the model cannot be wrapped.
            StepError: If the class cannot be stepped block by block, or has made a step already.
            CapacityError: If a budget cannot hold it.
        """
        _refuse_others(trainer.args, self._manager.parts.device)
        _watch_trainers()
        if trainer.model is None or trainer.model_init is not None:
            raise ConfigError(
                "model_init= has the trainer make another model, and its optimizer, each time that "
                "it trains; give it model= instead"
            )
        # as it has trained, accelerate's own is around it
        kept = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        if isinstance(kept, TieredOptimizer):
            raise ConfigError(
                "the trainer has a tiered optimizer already; attach makes the one that it would "
                "make by itself: leave optimizers= out"
            )
        self._wrap_as_one(trainer.model)
        plain = kept or _asked_of(trainer)
        if cls is not None:
            made = self.optimizer(_groups_of(plain), cls, **settings)
        elif isinstance(plain, _Asked):
            made = self.optimizer(_groups_of(plain), plain.cls, **{**plain.settings, **settings})
        else:
            made = tiered(self, plain, **settings)
            hand_over(plain, made)
        _made_for[made] = weakref.ref(trainer.model)
        trainer.optimizer = made
        return made

    def wraps(self, model: nn.Module) -> bool:
        """Whether a model is wrapped by this manager already."""
        return id(model) in self._wrapped

    def _wrap_as_one(self, model: nn.Module) -> None:
        """Wraps a model as a whole, even if its parts were wrapped; not if it is wrapped already.

        If trained parameters were added to it since it was wrapped, it is wrapped anew.
        """
        for root in list(self._wrapped.values()):
            if not any(model is part for part in root.model.modules()):
                continue
            # it may be wrapped beside what shares its weights, say
            inside = {id(entry.param) for entry in root.entries}
            if any(id(p) not in inside and p.requires_grad for p in root.model.parameters()):
                self.unwrap(root.model)
                known = root.inventory
                self.wrap(root.model, known.blocks, homes=known.homes, resident=known.resident)
            return
        for part in [module for module in model.modules() if self.wraps(module)]:
            self.unwrap(part)  # adapters were put around it: they belong to the model
        self.wrap(model)


class _Asked(torch.optim.Optimizer):
    """Records what a trainer would make an optimizer from; never creates state.

    Attributes:
        cls: The class, once it is known.
        settings: Those of the class.
    """

    cls: Any = None

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, {})
        self.settings = settings

    def step(self, closure: Any = None) -> Any:
        """Does nothing: the trainer never uses this optimizer."""
        raise NotImplementedError


def _asked_of(trainer: Any) -> torch.optim.Optimizer:
    """Asks a trainer for its optimizer, through the methods that its class may override.

    Returns:
        What it would make; a plain optimizer if its class makes one in a way of its own.
    """
    given, kept = trainer.optimizer_cls_and_kwargs, trainer.optimizer
    cls, settings = given or trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    _check_class(cls, settings, trainer.args)
    trainer.optimizer, trainer.optimizer_cls_and_kwargs = None, (_Asked, dict(settings))
    try:
        trainer.create_optimizer()
        made: torch.optim.Optimizer = trainer.optimizer
    finally:
        trainer.optimizer, trainer.optimizer_cls_and_kwargs = kept, given
    if isinstance(made, _Asked):
        made.cls = cls
    return made


def _groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Returns the groups of an optimizer, to make another of."""
    return [dict(group) for group in optimizer.param_groups]


def _check_class(cls: Any, settings: dict[str, Any], args: Any) -> None:
    """Refuses anything that is not an optimizer class, or has to be made from a model.

    Raises:
        ConfigError: Naming the argument.
    """
    made_by_class = isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    if not made_by_class or "model" in settings:
        raise ConfigError(
            f"optim={args.optim!r} makes its optimizer from the whole model; give cls= a "
            "torch.optim.Optimizer class instead"
        )


def _watch_trainers() -> None:
    """Patches trainers and accelerate to check how they use tiered optimizers."""
    _look_before_training()
    _leave_placing_to_tiers()


def _look_before_training() -> None:
    """Checks every trainer when it begins to train."""
    kind: Any = need("transformers", "transformers", "hugging_face.TrainerTiers").Trainer
    train = kind.train
    if hasattr(train, "_tiermem"):
        return

    @functools.wraps(train)
    def looked_at(self: Any, *args: Any, **settings: Any) -> Any:
        _check_its_model(self)
        _check_its_groups(self, kind)
        return train(self, *args, **settings)

    looked_at._tiermem = True  # type: ignore[attr-defined]
    kind.train = looked_at


def _leave_placing_to_tiers() -> None:
    """Keeps accelerate from moving the state of tiered optimizers.

    ``Accelerator.prepare`` would move all of it, masters included, to the device at once.
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
    """Refuses to train if the optimizer does not have the trained parameters.

    A trainer that is given ``peft_config=`` freezes the model and adds adapters to it after the
    optimizer was made, which would silently step none of them.

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
        "trainer first, without optimizers=, then tier.attach(trainer)"
    )


def _check_its_model(trainer: Any) -> None:
    """Refuses to train a model of which the optimizer has no parameters.

    The model may be a copy, for example, or one that the trainer has made itself.

    Args:
        trainer: What is about to train.

    Raises:
        ConfigError: Naming the model.
    """
    # as it has trained, accelerate's own is around it
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    if not isinstance(optimizer, TieredOptimizer) or trainer.model is None:
        return
    _check_what_it_trains(optimizer)
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    if trained and not any(id(p) in known for p in trained):
        raise ConfigError(
            f"the trainer's model ({type(trainer.model).__name__}) is not the one that its tiered "
            "optimizer steps, and would not be trained: give tier.optimizers the model that the "
            "trainer has, or make the trainer without optimizers=, then tier.attach(trainer)"
        )


_WAYS = ("create_optimizer", "get_optimizer_cls_and_kwargs", "get_decay_parameter_names")
"""Methods that a trainer's class may override to make an optimizer of its own."""


def _check_its_groups(trainer: Any, base: Any) -> None:
    """Refuses to train if the trainer's class would step other parameters, or in other groups.

    For example, the parameters of a trained loss would silently not be stepped.

    Args:
        trainer: What is about to train.
        base: ``transformers.Trainer``.

    Raises:
        ConfigError: Naming the class.
    """
    kind, optimizer = type(trainer), trainer.optimizer
    if not isinstance(optimizer, TieredOptimizer) or optimizer not in _from_arguments:
        return
    if all(getattr(kind, way) is getattr(base, way) for way in _WAYS):
        return
    asked = _asked_of(trainer)
    own_rates = isinstance(asked, _Asked) and any("lr" in group for group in asked.param_groups)
    if own_rates or _partition(asked) != _partition(optimizer):
        raise ConfigError(
            f"{kind.__name__} makes its optimizer in a way of its own: parameters, groups or "
            "learning rates are not those of tier.optimizers(model, args). Make the trainer "
            "without optimizers=, then tier.attach(trainer)"
        )


def _partition(optimizer: torch.optim.Optimizer) -> set[frozenset[int]]:
    """Returns which parameters are in a group together."""
    groups = (frozenset(map(id, group["params"])) for group in optimizer.param_groups)
    return {group for group in groups if group}


def _refuse_others(args: Any, device: torch.device) -> None:
    """Refuses arguments with which something else shards or moves the model.

    Args:
        args: ``TrainingArguments``.
        device: The tiers'.

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
    if "layerwise" in str(getattr(args, "optim", "")):
        raise ConfigError(
            f"optim={args.optim!r} steps each parameter inside backward by hooks of its own; take "
            "the optimizer without layerwise: its state is in the tiers anyway"
        )
    if getattr(args, "n_gpu", 1) > 1:
        raise ConfigError(
            f"the trainer would replicate the model over {args.n_gpu} GPUs; set "
            "CUDA_VISIBLE_DEVICES to one, or run a process for each with torchrun"
        )
    chosen = getattr(args, "device", device)
    if chosen.type != device.type or (chosen.type == "cuda" and chosen != device):
        raise ConfigError(
            f"TrainingArguments trains on {chosen} in this process, and these tiers are of "
            f"{device}: make TrainingArguments first, then the tiers, or pass device=args.device"
        )
