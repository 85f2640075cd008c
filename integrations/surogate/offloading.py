"""A model trained with Surogate's offloading options: tiers, recomputation, optimizer, loss."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

import tiermem
from tiermem import ConfigError, Policy, TieredOptimizer, TierManager

from ..layers import layers_of
from ..options import Row, became, need
from ..run import Run
from .normuon import NorMuon
from .options import NAMES, OPTIONS, Options

_IN_FLIGHT = 4  # blocks of layers: one in use, one arriving, one leaving, one to spare
_ROUNDING = 1 << 16  # bytes: what alignment of small tensors adds
_LEAST_RESIDUAL = 4096  # bytes; smaller tensors are no residuals, and cost more than they free


class Offloading(Run):
    """A wrapped model with its manager, from Surogate's options.

    Attributes:
        model: The model, wrapped.
        options: The options, checked.
        policy: Where each role's home is.
        tier: The manager, for ``stats()`` and ``residency()``.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        device: str | torch.device = "cuda",
        hbm: int | str | None = None,
        dram: int | str | None = None,
        **options: Any,
    ) -> None:
        """Wraps a model with the settings that the options stand for.

        Args:
            model: Any module that is not wrapped; adapters, if any, are in it already.
            config: Surogate's YAML file, or a mapping.
            device: Where the model computes.
            hbm: Budget of device memory for weights, gradients, masters and state. By default
                enough for everything that the options leave there, and buffers for streaming.
            dram: Budget of host memory; tiermem's default.
            **options: Surogate's options by name, over those of ``config``.

        Raises:
            ConfigError: If an option is refused; nothing was changed.
            CapacityError: If the model does not fit in a budget; it is unchanged.
        """
        self.options = Options(config, **options)
        self.lora = _has_frozen(model) if self.options.lora is None else self.options.lora
        self.policy = policy_of(self.options, model, lora=self.lora)
        self._check_optimizer()
        self._check_masters(model)
        self.tier = TierManager(
            device=device,
            hbm=hbm_of(model, self.policy, self.options, device) if hbm is None else hbm,
            dram=dram,
            policy=self.policy,
            activation_min=_LEAST_RESIDUAL,
            # without a list of layers, all saved tensors leave HBM
            activation_layers=(
                None if self.options.offload_saved_tensors else len(layers_of(model)) or None
            ),
        )
        self.wrap(model, recompute=bool(self.options.recompute))

    # -- the optimizer ---------------------------------------------------

    def _check_masters(self, model: nn.Module) -> None:
        """Refuses masters that would have fewer bits than their weights."""
        master = self.options.master_dtype
        for name, param in model.named_parameters():
            if master is not None and param.requires_grad and param.itemsize > master.itemsize:
                raise ConfigError(
                    f"master_dtype: {master} is narrower than {name!r} ({param.dtype}); leave it "
                    "out, or cast the model first"
                )

    def _check_optimizer(self) -> None:
        """Refuses an optimizer that is not available, before anything is moved."""
        if self.options.optimizer == "adamw_8bit" and not self._on_host:
            need("torchao.optim", "torchao", "optimizer: adamw_8bit (or set optimizer: adamw)")

    @property
    def _on_host(self) -> bool:
        """Whether the host performs the steps."""
        return bool(self.options.cpu_training) and not self.lora

    def optimizer(self, **settings: Any) -> TieredOptimizer:
        """Makes the optimizer that the options name.

        As in Surogate, weight decay applies to matrices, and not to biases and norms (parameters
        of one dimension).

        Args:
            **settings: Settings of the optimizer's class; they override those of the options.

        Raises:
            StepError: If it cannot be stepped block by block.
            CapacityError: If a budget cannot hold its state.
        """
        cls, own = self._class()
        master = self.options.master_dtype
        if self._on_host and master is None:
            master = torch.float32
        return self.tier.optimizer(
            list(self._groups(cls)),  # type: ignore[arg-type, unused-ignore]
            cls,
            where="host" if self._on_host else "device",
            master_dtype=master,
            grad_dtype=self.options.gradient_dtype,
            **{**own, **settings},
        )

    def _class(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """Returns the optimizer's class and its settings."""
        o = self.options
        adamw = {
            "lr": o.learning_rate,
            "betas": (o.adamw_beta1, o.adamw_beta2),
            "eps": o.adamw_epsilon,
        }
        if o.optimizer == "normuon" and not self._on_host:
            own = {"momentum": o.normuon_momentum, "beta2": o.normuon_beta2}
            return NorMuon, {**adamw, **own, "cautious": o.normuon_cautious_wd}
        if o.optimizer == "adamw_8bit" and not self._on_host:
            return need("torchao.optim", "torchao", "optimizer: adamw_8bit").AdamW8bit, adamw
        return torch.optim.AdamW, adamw

    def _groups(self, cls: type[torch.optim.Optimizer]) -> Iterator[dict[str, Any]]:
        """Yields parameter groups: matrices, and parameters without weight decay."""
        tables = {
            id(module.weight) for module in self.model.modules() if isinstance(module, nn.Embedding)
        }
        head = getattr(self.model, "get_output_embeddings", lambda: None)()
        tables |= {id(head.weight)} if head is not None else set()
        decay = float(self.options.weight_decay)
        kinds: dict[tuple[bool, bool], list[Any]] = {}
        for param in filter(lambda p: p.requires_grad, self.model.parameters()):
            matrix = param.ndim >= 2
            orthogonal = cls is NorMuon and param.ndim == 2 and id(param) not in tables
            kinds.setdefault((matrix, orthogonal), []).append(param)
        for (matrix, orthogonal), params in kinds.items():
            group = {"params": params, "weight_decay": decay if matrix else 0.0}
            yield {**group, "orthogonal": orthogonal} if cls is NorMuon else group

    def step(self, optimizer: TieredOptimizer) -> Tensor | None:
        """Clips by ``max_grad_norm``, steps and clears the gradients.

        Returns:
            The gradients' norm before clipping, 0-d; None if clipping is off.
        """
        norm = None
        if self.options.max_grad_norm > 0:
            norm = optimizer.clip_grad_norm_(self.options.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    # -- the loss --------------------------------------------------------

    def loss(self, hidden: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
        """Returns the mean cross-entropy of the head's logits, in ``lmhead_chunks`` parts.

        Args:
            hidden: The head's input, ``(..., width)``.
            head: The language model's head.
            targets: Indices, int64, ``hidden``'s shape without the last dimension; -100 is ignored.
        """
        return tiermem.chunked_cross_entropy(
            hidden, head.weight, targets, chunks=self.options.lmhead_chunks, bias=head.bias
        )

    # -- reports ---------------------------------------------------------

    def explain(self) -> list[Row]:
        """Returns what every given option became."""
        return explain(self.options)


def explain(
    options: Options | Mapping[str, Any] | str | os.PathLike[str] | None = None, **given: Any
) -> list[Row]:
    """Returns what each option of a configuration becomes, including those without effect.

    Args:
        options: Options, a mapping or the path of a YAML file.
        **given: Options by name, over those.

    Raises:
        ConfigError: If the configuration is refused.
    """
    read = options if isinstance(options, Options) else Options(options, **given)
    rows = []
    for name in (option.name for option in OPTIONS):
        if name in read.given:
            why = read.without_effect(name)
            rows.append(became(NAMES[name], read.values[name], why))
    rows += [
        Row(n, v, "", "the script's own: not about memory") for n, v in read.scripts_own.items()
    ]
    rows += [Row(name, None, "", "no option of Surogate's; ignored") for name in read.unknown]
    return rows


def policy_of(options: Options, model: nn.Module, *, lora: bool) -> Policy:
    """Returns where each role's home is.

    If every parameter has the dtype of its master, the weights are the masters: there is no other
    copy, and ``offload_master`` moves the weights themselves.
    """
    cpu = bool(options.cpu_training)
    full = cpu and not lora
    separate = options.master_dtype is not None and any(
        p.dtype != options.master_dtype for p in model.parameters() if p.requires_grad
    )

    def home(offloaded: bool) -> Literal["hbm", "dram"]:
        return "dram" if offloaded else "hbm"

    return Policy(
        params=home(cpu or (options.offload_master and not separate)),
        grads=home(full or options.offload_grads),
        master=home(full or options.offload_master),
        optimizer=home(full or options.offload_optimizer),
        activations=home(options.offload_residual or options.offload_saved_tensors),
    )


def _has_frozen(model: nn.Module) -> bool:
    return any(not p.requires_grad for p in model.parameters())


def hbm_of(
    model: nn.Module, policy: Policy, options: Options, device: str | torch.device
) -> int | None:
    """Returns the budget of device memory: everything that stays, and buffers for streaming.

    Returns:
        Bytes; None (tiermem's default) if that would be more than the default.
    """
    layers = layers_of(model)
    parts = {id(p): i for i, layer in enumerate(layers) for p in layer.parameters()}
    resident, streamed = 0, dict.fromkeys(range(-1, len(layers)), 0)
    largest_other = 0
    for param in model.parameters():
        stays, moves = _bytes_of(param, policy, options)
        resident += stays
        layer = parts.get(id(param), -1)
        if layer < 0:
            largest_other = max(largest_other, moves)
        else:
            streamed[layer] += moves
    buffers = max(max(streamed.values()), largest_other)
    need_bytes = resident + resident // 16 + _IN_FLIGHT * buffers + _ROUNDING
    where = torch.device(device)
    if where.type == "cuda" and need_bytes > 0.8 * torch.cuda.mem_get_info(where)[0]:
        return None
    return need_bytes


def _bytes_of(param: nn.Parameter, policy: Policy, options: Options) -> tuple[int, int]:
    """Returns the bytes that stay and that stream, of a parameter, its gradient and its state."""
    n, width = param.numel(), param.element_size()
    roles = [(policy.params, n * width)]
    if param.requires_grad:
        master = options.master_dtype
        separate = master is not None and master != param.dtype
        stepped = 4 if separate or options.cpu_training else width
        roles += [
            (policy.grads, n * max(width, 4 if options.gradient_dtype else 0)),
            (policy.master, n * stepped if separate or options.cpu_training else 0),
            (policy.optimizer, 2 * n * max(stepped, 4)),
        ]
    stays = sum(nbytes for home, nbytes in roles if home == "hbm")
    return stays, sum(nbytes for _, nbytes in roles) - stays
