"""The loop of ``tiermem train --checkpoint``, over tiers or resident."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tiermem.cli.data import load_corpus
from tiermem.cli.folders import text_config
from tiermem.cli.model import ByteGPT, loss_of
from tiermem.cli.tokens import ByteTokens, TokenCorpus, Tokens
from tiermem.cli.training import learning_rate
from tiermem.errors import ConfigError
from tiermem.nn.loss import chunked_cross_entropy


@dataclass(frozen=True)
class Plan:
    """How adapters are trained.

    Attributes:
        batch: Sequences in one forward.
        accumulate: Forwards in one step.
        context: Tokens in a sequence.
        steps: Optimizer steps.
        lr: Highest learning rate.
        clip: Most that the norm of all gradients may be, or 0 for any.
        seed: Of adapters and batches.
        device: Torch device.
        loss_chunks: In how many parts logits and loss are made; 0 for all at once.
    """

    batch: int
    accumulate: int
    context: int
    steps: int
    lr: float
    clip: float
    seed: int
    device: str
    loss_chunks: int = 0

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step sees."""
        return self.batch * self.accumulate * self.context


class Saves(Protocol):
    """Saves a run as it goes."""

    def resume(self, scheduler: Any, generator: torch.Generator) -> int:
        """Goes on where the run was, if it was; returns how many steps are made."""

    def after(
        self, step: int, last: bool, optimizer: Any, scheduler: Any, generator: torch.Generator
    ) -> None:
        """Saves after a step, if it is time to."""


def corpus_of(paths: Sequence[str], tokens: Tokens) -> TokenCorpus:
    """Reads text files and makes tokens of them.

    Args:
        paths: As ``--data`` takes them.
        tokens: The model's tokenizer.

    Raises:
        ConfigError: If nothing can be read.
    """
    found = load_corpus(paths)
    data = found.content()
    if isinstance(tokens, ByteTokens):
        return TokenCorpus(list(data), found.source)
    return TokenCorpus(tokens.encode(data.decode("utf-8", "replace")), found.source)


def prepare(model: Any) -> None:
    """Sets a model to training, with its layers recomputed in backward where it can do that."""
    model.train()
    if not can_recompute(model) or isinstance(model, ByteGPT):
        return
    enable = getattr(model, "activation_checkpointing_enable", None)  # its name in later releases
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


def can_recompute(model: nn.Module) -> bool:
    """Whether a model's layers can be recomputed in backward."""
    return isinstance(model, ByteGPT) or bool(
        getattr(model, "supports_gradient_checkpointing", False)
    )


def train(
    model: nn.Module,
    optimizer: Any,
    clip: Callable[[float], object],
    corpus: TokenCorpus,
    plan: Plan,
    on_step: Callable[[int, float], None],
    saves: Saves | None = None,
) -> None:
    """Makes all steps, or those that are left of a run that goes on.

    Args:
        model: With adapters; wrapped, or on its device.
        optimizer: Of the adapters.
        clip: Clips their gradients to a norm.
        corpus: What to train on.
        plan: How.
        on_step: Called after each step with its number and its loss.
        saves: Saves the run as it goes, and knows where it was.
    """
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(step, plan.steps)
    )
    generator = torch.Generator().manual_seed(plan.seed)
    done = 0 if saves is None else saves.resume(scheduler, generator)
    for step in range(done, plan.steps):
        optimizer.zero_grad(set_to_none=True)
        parts: list[Tensor] = []
        for _ in range(plan.accumulate):
            tokens = corpus.batch(generator, plan.batch, plan.context).to(plan.device)
            loss = next_token_loss(model, tokens, plan.loss_chunks) / plan.accumulate
            loss.backward()
            parts.append(loss.detach())
        if plan.clip:
            clip(plan.clip)
        optimizer.step()
        scheduler.step()
        on_step(step, sum(part.item() for part in parts))
        if saves is not None:
            saves.after(step + 1, step + 1 == plan.steps, optimizer, scheduler, generator)


def next_token_loss(model: Any, tokens: Tensor, chunks: int = 0) -> Tensor:
    """Returns the mean cross-entropy of predicting each token from those before it.

    Args:
        model: A :class:`ByteGPT` or a model of transformers.
        tokens: ``(batch, length)``, int64.
        chunks: In how many parts logits and loss are made; 0 for all at once, as the model does.

    Raises:
        ConfigError: If the model's logits are more than a linear layer, so that they have no parts.
    """
    if isinstance(model, ByteGPT):
        return loss_of(model, tokens, chunks)
    if not chunks:
        loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss
    head = model.get_output_embeddings()
    config = text_config(model)
    changed = any(
        getattr(config, name, None)
        for name in ("final_logit_softcapping", "logit_scale", "logits_scaling")
    )
    if not isinstance(head, nn.Linear) or changed:
        raise ConfigError(
            f"--loss-chunks: the logits of {type(model).__name__} are not those of one linear "
            "layer; leave it out"
        )
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    return chunked_cross_entropy(
        hidden[:, :-1].flatten(0, 1), head.weight, tokens[:, 1:].flatten(), chunks=chunks,
        bias=head.bias,
    )  # fmt: skip
