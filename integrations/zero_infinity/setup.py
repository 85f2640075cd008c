"""``initialize``: reads and checks everything before it moves anything."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from tiermem import Budgets, CapacityError, ConfigError, TieredOptimizer, TierManager, WrapError

from ..conversion import share_hooks, without_hooks
from . import (
    autofill,
    comm,
    mapping,
    notation,
    optimizers,
    precision,
    reading,
    schedules,
    sizing,
    utils,
    zero,
)
from .engine import DeepSpeedEngine
from .explaining import explained
from .mapping import Plan
from .onecycle import OneCycle
from .optimizers import Made

Parameters = Iterable[Any] | None
Client = torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None
Initialized = tuple[DeepSpeedEngine, TieredOptimizer | None, Any, Any]

SCHEDULES: dict[str, Any] = {
    "WarmupLR": schedules.WarmupLR,
    "WarmupDecayLR": schedules.WarmupDecayLR,
    "WarmupCosineLR": schedules.WarmupCosineLR,
    "LRRangeTest": schedules.LRRangeTest,
    "OneCycle": OneCycle,
}


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Client = None,
    model_parameters: Parameters = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: notation.Source | None = None,
    mesh_param: Any = None,
    config_params: notation.Source | None = None,
    *,
    tiermem: Mapping[str, Any] | None = None,
) -> Initialized:
    """Wraps a model by a DeepSpeed configuration.

    Args:
        args: A namespace: ``deepspeed_config`` if there is no ``config``, and values for "auto".
        model: The module, on the host or on the device.
        optimizer: An optimizer over the model's parameters or a function that makes one; by
            default the configuration's. Without either, the model only infers.
        model_parameters: Parameters or groups; by default all that are trained.
        training_data: A dataset; a loader of micro-batches is made of it.
        lr_scheduler: A scheduler or a function of the optimizer; by default the configuration's.
        distributed_port: Not used.
        mpu: Must be None.
        dist_init_required: False to make no process group.
        collate_fn: For the loader.
        config: A path, a dict, or text in base64.
        mesh_param: Must be None.
        config_params: An old name of ``config``.
        tiermem: Settings that override the file's ``tiermem`` section: ``device``, ``hbm``,
            ``dram``, ``nvme_bytes``, ``overlap``, ``where`` and others.

    Returns:
        Engine, optimizer, loader and scheduler; None for what there is not.

    Raises:
        ConfigError: Naming file, key and value; nothing has been moved.
        WrapError: If the model is wrapped already, or by another system.
        CapacityError: If a budget cannot hold it.
    """
    if mpu is not None or mesh_param is not None:
        raise ConfigError("initialize(mpu=, mesh_param=): there is one process; leave them out")
    model = _checked(model)
    client = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    plan = _planned(_source(args, config, config_params), args, model, client, tiermem)
    made, groups = _optimizer_of(plan, model, optimizer, model_parameters)
    schedule = _schedule_of(plan, lr_scheduler, made, groups) if made is not None else None
    needed = sizing.size(plan, model, made, groups)
    if plan.refused:
        raise CapacityError(plan.refused)
    _join(args, alone=dist_init_required is False)
    engine = _open(
        plan, model, needed, collate_fn, lambda tier: _tiered(plan, tier, made, groups, client)
    )
    _add_schedule(engine, schedule)
    engine.client_optimizer = client
    if made is not None:
        engine.optimizer_class = made[0]
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    if plan.config["dump_state"]:
        utils.logger.info("%s", explained(plan))
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _join(args: Any, *, alone: bool) -> None:
    """Makes the process group unless the caller has none, and tells the caller its rank."""
    if not alone:
        comm.init_distributed()
    if hasattr(args, "local_rank"):
        args.local_rank = comm.local_rank()


def _add_schedule(
    engine: DeepSpeedEngine, schedule: Callable[[torch.optim.Optimizer], Any] | None
) -> None:
    """Makes the scheduler; where that fails, the engine gives its model back."""
    if engine.optimizer is None or schedule is None:
        return
    try:
        engine.lr_scheduler = schedule(engine.optimizer)
    except BaseException:
        engine.tier.unwrap(engine.module)
        engine.destroy()
        raise


def _planned(
    source: notation.Source,
    args: Any,
    model: nn.Module,
    client: torch.optim.Optimizer | None,
    more: Mapping[str, Any] | None,
) -> Plan:
    """Reads a configuration, and returns what it becomes.

    Raises:
        ConfigError: If it is wrong, or lacks something on this machine.
    """
    read = reading.read(source)
    autofill.fill(read, autofill.Caller(args, model, client))
    plan = mapping.plan(read, more)
    if plan.refused:
        raise ConfigError(plan.refused)
    return plan


def _source(args: Any, *given: notation.Source | None) -> notation.Source:
    """Returns the one configuration there is."""
    found = [source for source in given if source is not None]
    for name in ("deepspeed_config", "deepscale_config"):
        named = getattr(args, name, None)
        if named is not None:
            found.append(named)
    if not found:
        raise ConfigError("initialize(config=): there is none; give a path or a dict")
    if len(found) > 1 and any(source != found[0] for source in found[1:]):
        raise ConfigError("initialize(): args.deepspeed_config and config are both given; keep one")
    return found[0]


def _checked(model: nn.Module | None) -> nn.Module:
    """Returns the model; refuses what is none, and what is wrapped or sharded already."""
    if model is None or not isinstance(model, nn.Module):
        raise ConfigError(f"initialize(model=): it takes a module, not {model!r}")
    comm.refuse_several()
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, DeepSpeedEngine) or kind in (
            "DistributedDataParallel", "FullyShardedDataParallel", "DataParallel",
        ):  # fmt: skip
            raise WrapError(
                f"module {name or kind!r} is a {kind}: another system has wrapped it; give "
                "initialize() the module inside it"
            )
    for name, param in model.named_parameters():
        tier = zero.managed.get(param)
        if tier is not None and not tier.closed:
            raise WrapError(f"parameter {name!r} belongs to an engine already; destroy() it")
        if hasattr(param, "ds_id") or hasattr(param, "device_mesh"):
            raise WrapError(
                f"parameter {name!r} is sharded by another system; make the model without it"
            )
    return model


def _optimizer_of(
    plan: Plan, model: nn.Module, optimizer: Client, parameters: Parameters
) -> tuple[Made | None, list[Any]]:
    """Returns class, settings and groups of the optimizer, checked; None for none."""
    config = plan.config
    groups = [p for p in model.parameters() if p.requires_grad] if parameters is None else None
    groups = list(parameters or []) if groups is None else groups
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(groups)
    if isinstance(optimizer, TieredOptimizer):
        raise ConfigError("initialize(optimizer=): it lives in the tiers already; give a plain one")
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizers.from_client(optimizer, plan.device)
    if optimizer is not None:
        raise ConfigError(
            f"initialize(optimizer=): it is an optimizer or a function, not {optimizer!r}"
        )
    kind = config["optimizer.type"]
    if kind is None or not groups:
        return None, []
    kind = "AdamW" if kind == "auto" else kind
    params = dict(config["optimizer.params"] or {})
    norm = params.pop("max_grad_norm", None)
    if norm is not None and not config.given("gradient_clipping"):
        config.settings["gradient_clipping"] = reading.Setting(
            float(norm), "optimizer.params.max_grad_norm"
        )
    return optimizers.from_config(config.name, kind, params, plan.device), groups


def _schedule_of(
    plan: Plan, given: Any, made: Made, groups: list[Any]
) -> Callable[[torch.optim.Optimizer], Any] | None:
    """Returns what makes the scheduler of an optimizer."""
    config = plan.config
    if callable(given) and not hasattr(given, "step"):
        return given  # type: ignore[no-any-return]
    if given is not None:
        return lambda optimizer: given
    kind = config["scheduler.type"]
    if kind is None:
        return None
    cls: Any = SCHEDULES.get(kind) or getattr(torch.optim.lr_scheduler, kind, None)
    if not inspect.isclass(cls):
        raise config.error(
            "scheduler.type", f"it is one of {', '.join(SCHEDULES)}, or a class of torch's"
        )
    params = dict(config["scheduler.params"] or {})
    taken = list(inspect.signature(cls).parameters)[1:]
    for key in params:
        if key not in taken:
            raise ConfigError(
                f"{config.name}: scheduler.params.{key}={params[key]!r}: {kind} has no such "
                f"setting; it has {', '.join(taken)}"
            )
    for key, parameter in list(inspect.signature(cls).parameters.items())[1:]:
        if parameter.default is parameter.empty and key not in params:
            raise ConfigError(f"{config.name}: scheduler.params.{key} is missing; {kind} needs it")
    make: Any = cls
    tried = None
    with contextlib.suppress(Exception):  # some classes cannot be made just to be tried
        tried = optimizers.trial(made, groups)
    try:
        if tried is not None:
            make(tried, **params)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{config.name}: scheduler.params={params!r}: {kind} does not take them: {error}"
        ) from error
    return lambda optimizer: make(optimizer, **params)


def _open(
    plan: Plan,
    model: nn.Module,
    needed: Budgets,
    collate_fn: Any,
    optimizer_in: Callable[[TierManager], TieredOptimizer | None],
) -> DeepSpeedEngine:
    """Opens the tiers, casts and wraps the model, and makes the optimizer there."""
    tier = TierManager(**plan.manager)
    wrapped = False
    try:
        missing = sizing.missing(plan, needed, tier)
        if missing:
            raise CapacityError(missing)
        precision.cast(plan, model)
        tier.wrap(model)
        wrapped = True
        engine = DeepSpeedEngine(plan, model, tier, collate_fn=collate_fn)
        engine.optimizer = optimizer_in(tier)
        engine.show_scale()
    except BaseException as error:
        if wrapped:
            tier.unwrap(model)
        tier.close()
        if isinstance(error, CapacityError):
            raise CapacityError(f"{error} {_hint(plan)}") from error
        raise
    for param in model.parameters():
        zero.managed[param] = tier
        if engine.optimizer is not None:
            zero.optimizers[param] = engine.optimizer
    return engine


def _hint(plan: Plan) -> str:
    policy = plan.manager["policy"]
    inside = [role for role in ("params", "optimizer") if policy[role] == "hbm"]
    if not inside:
        return "(the budgets are the tiermem section's: hbm, dram, nvme_bytes)"
    names = {"params": "offload_param", "optimizer": "offload_optimizer"}
    said = " and ".join(f"zero_optimization.{names[role]}.device: cpu" for role in inside)
    return f"({plan.config.name} offloads nothing of it: {said} would)"


def _tiered(
    plan: Plan,
    tier: TierManager,
    made: Made | None,
    groups: list[Any],
    client: torch.optim.Optimizer | None,
) -> TieredOptimizer | None:
    if made is None:
        return None
    cls, settings = made
    optimizer = tier.optimizer(groups, cls, **plan.optimizer, **settings)
    if plan.optimizer["overlap"] == "backward":
        optimizer.accumulate(plan.accumulation)
    if client is not None:
        if client.state:
            with without_hooks(client):
                optimizer.load_state_dict(client.state_dict())
        share_hooks(client, optimizer)
        client.param_groups = optimizer.param_groups  # which its schedulers write
    return optimizer


def add_config_arguments(parser: Any) -> Any:
    """Adds DeepSpeed's arguments to a parser.

    Args:
        parser: An ``argparse.ArgumentParser``.

    Returns:
        The parser.
    """
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="for the script")
    group.add_argument("--deepspeed_config", default=None, type=str, help="a configuration")
    group.add_argument("--deepscale", default=False, action="store_true", help="an old name")
    group.add_argument("--deepscale_config", default=None, type=str, help="an old name")
    return parser


def set_z3_leaf_modules(model: nn.Module, classes: Any) -> list[nn.Module]:
    """Returns the modules of these classes; each expert is a block of its own as it is."""
    warnings.warn(
        "set_z3_leaf_modules has no effect: experts are blocks of their own", stacklevel=2
    )
    kinds = tuple(classes) if isinstance(classes, list | tuple | set) else (classes,)
    if any(isinstance(kind, str) for kind in kinds):
        return [m for m in model.modules() if type(m).__name__ in kinds]
    return [module for module in model.modules() if isinstance(module, kinds)]
