"""Full training steps of a Llama shape, resident and tiered, with the same arithmetic.

Work weights are bf16, gradients are summed up in bf16 or fp32, masters and AdamW's states are
fp32; every layer is recomputed in backward unless asked otherwise; logits and loss are made in
chunks. The resident trainer is the loop one writes by hand.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from llama import LONGEST, Clock, config_of, random_bf16
from torch import Tensor, nn

import tiermem
from tiermem.nn.loss import chunked_cross_entropy

KV_HEADS = {"3b": 8, "1b": 8}
"""Shapes with fewer key and value heads: 3.02 B and 1.0 B parameters, as peers were measured."""

LR = 1e-4
_BITS = 1 << 24
DTYPES = {"weights": None, "fp32": torch.float32, "bf16": torch.bfloat16}


class Head(nn.Linear):
    """The last layer: the loss itself, without ever having all logits."""

    def forward(self, hidden: Tensor, targets: Tensor, chunks: int) -> Tensor:
        """Returns the mean cross-entropy."""
        return chunked_cross_entropy(hidden, self.weight, targets, chunks=chunks)


class Lm(nn.Module):
    """A Llama and its head; forward gives the loss.

    Args:
        body: A transformers ``LlamaModel``.
        chunks: In how many parts logits and loss are made.
    """

    def __init__(self, body: Any, chunks: int) -> None:
        super().__init__()
        self.model = body
        self.head = Head(body.config.hidden_size, body.config.vocab_size, bias=False)
        self.chunks = chunks

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the loss of predicting ``ids``, ``(batch, length + 1)``."""
        hidden = self.model(input_ids=ids[:, :-1]).last_hidden_state
        return self.head(hidden, ids[:, 1:], self.chunks)


def build(
    shape: str,
    device: torch.device,
    *,
    chunks: int = 16,
    layers: int | None = None,
    recompute: bool = True,
) -> Lm:
    """Returns a bf16 model of random weights, made on the device itself, ready to be trained.

    Args:
        shape: A key of ``SHAPES``.
        device: Where.
        chunks: In how many parts the loss is made.
        layers: How many layers instead of the shape's own.
        recompute: Whether every layer is recomputed in backward.
    """
    from transformers import LlamaModel

    kv_heads = KV_HEADS.get(shape)
    config = config_of(shape, layers=layers, kv_heads=kv_heads, attn_implementation="sdpa")
    with random_bf16(device):
        model = Lm(LlamaModel(config), chunks)
        nn.init.normal_(model.head.weight, std=0.02)
    model.train()
    if recompute:
        model.model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def parts_of(model: Lm) -> list[nn.Module]:
    """Returns the modules that have all parameters between them."""
    return [model.model.embed_tokens, *model.model.layers, model.model.norm, model.head]


def parameters_of(model: nn.Module) -> int:
    """Returns the number of parameters."""
    return sum(p.numel() for p in model.parameters())


class Data:
    """Random tokens, the same for every trainer.

    Args:
        tokens: In a micro-batch, sequences of at most 4,096.
        vocabulary: How many different ones.
        device: Where they are.
        count: How many different micro-batches there are.
    """

    def __init__(self, tokens: int, vocabulary: int, device: torch.device, count: int = 8) -> None:
        length = min(tokens, LONGEST)
        made = torch.Generator().manual_seed(tokens)
        shape = (count, max(1, tokens // length), length + 1)
        self._ids = torch.randint(0, vocabulary, shape, generator=made).to(device)

    def micro_batch(self, number: int) -> Tensor:
        """Returns the micro-batch of that number; after the last the first comes again."""
        return self._ids[number % len(self._ids)]


class Trainer:
    """What a loop steps.

    Args:
        model: Is called for the loss; its ``head`` says how many different tokens there are.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def backward(self, loss: Tensor) -> None:
        """Makes the gradients of one micro-batch."""
        loss.backward()

    def step(self) -> None:
        """Steps, and forgets the gradients."""
        raise NotImplementedError

    def rest(self) -> None:
        """Waits until nothing is under way between steps."""


class Resident(Trainer):
    """Everything in HBM: masters, states and steps by hand, a layer's parameters at a time.

    Layer by layer no more than one layer's gradients exist in fp32, so the 6.74 B shape fits.

    Args:
        model: On its device.
        grad_dtype: In which gradients are summed up, or None for the weights' own.
    """

    def __init__(self, model: Lm, grad_dtype: torch.dtype | None = None) -> None:
        super().__init__(model)
        self._sums: dict[int, Tensor] = {}
        self._units: list[tuple[list[nn.Parameter], list[Tensor], torch.optim.Optimizer]] = []
        for part in parts_of(model):
            params = list(part.parameters())
            masters = [p.detach().float().requires_grad_() for p in params]
            self._units.append((params, masters, adamw(masters)))
        if grad_dtype is not None:
            for params, _, _ in self._units:
                for param in params:
                    self._sum_in(param, grad_dtype)

    def _sum_in(self, param: nn.Parameter, dtype: torch.dtype) -> None:
        def add(_: Tensor) -> None:
            fresh = param.grad.to(dtype)
            known = self._sums.get(id(param))
            self._sums[id(param)] = fresh if known is None else known.add_(fresh)
            param.grad = None

        param.register_post_accumulate_grad_hook(add)

    @torch.no_grad()
    def step(self) -> None:
        """Steps the masters, casts the weights from them, and forgets the gradients."""
        for params, masters, optimizer in self._units:
            for param, master in zip(params, masters, strict=True):
                gradient = self._sums.pop(id(param), None)
                master.grad = (param.grad if gradient is None else gradient).to(master.dtype)
                param.grad = None
            optimizer.step()
            torch._foreach_copy_(params, masters)
            for master in masters:
                master.grad = None


def adamw(params: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Returns the optimizer that every run uses."""
    return torch.optim.AdamW(params, lr=LR, fused=True)


class Tiered(Trainer):
    """The same by tiermem.

    Args:
        tier: An open manager.
        model: Is wrapped.
        grad_dtype: In which gradients are summed up, or None for the weights' own.
        where: Where steps are made.
        overlap: ``"auto"``: the default; ``"forward"``: in the next forward;
            ``"backward"``: inside backward, and the loop says
            ``optimizer.accumulate(n)``; False: in ``step()``.
    """

    def __init__(
        self,
        tier: tiermem.TierManager,
        model: Lm,
        grad_dtype: torch.dtype | None = None,
        where: Any = "auto",
        overlap: Any = "auto",
    ) -> None:
        super().__init__(tier.wrap(model))
        self.tier = tier
        self.optimizer = tier.optimizer(
            model,
            torch.optim.AdamW,
            master_dtype=torch.float32,
            grad_dtype=grad_dtype,
            overlap=overlap,
            where=where,
            lr=LR,
            fused=True,
        )

    def step(self) -> None:
        """Steps, and forgets the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def rest(self) -> None:
        """Waits until the host steps nothing any more; nothing is brought forward."""
        if self.optimizer._host.steps is not None:
            self.optimizer._host.steps._pool.submit(int).result()  # its one thread works in order

    def on_host(self) -> int:
        """Returns how many parameters the host steps."""
        units = [unit for unit in self.optimizer._units if unit.host is not None]
        return sum(p.numel() for unit in units for p, _ in unit.members)


class WithoutStep(Trainer):
    """Forward and backward only: gradients are made and forgotten."""

    def step(self) -> None:
        """Forgets the gradients."""
        self.model.zero_grad(set_to_none=True)


@dataclass
class Split:
    """Where the time of steps went, in seconds on the device's own clock.

    Attributes:
        forward: Of each step, micro-batches added up.
        backward: Likewise.
        step: The optimizer.
    """

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)


class Loop:
    """Steps of one trainer over the same data.

    Args:
        trainer: One of the above.
        data: The micro-batches.
        micro: How many of them are a step.
        clock: Of the device.
    """

    def __init__(self, trainer: Any, data: Data, micro: int, clock: Clock) -> None:
        self.trainer = trainer
        self.micro = micro
        self.split = Split()
        self._data = data
        self._clock = clock
        self._number = 0
        self._marks: list[list[Any]] = []

    def run(self, steps: int) -> list[Tensor]:
        """Makes steps without waiting for the device; returns their losses, which are there."""
        losses = []
        for _ in range(steps):
            marks, total = [self._now()], None
            for _ in range(self.micro):
                loss = self.trainer.model(self._data.micro_batch(self._number)) / self.micro
                self._number += 1
                marks.append(self._now())
                self.trainer.backward(loss)
                marks.append(self._now())
                total = loss.detach() if total is None else total + loss.detach()
                del loss
            self.trainer.step()
            marks.append(self._now())
            self._marks.append(marks)
            losses.append(total)
        return losses

    def seconds(self, steps: int) -> float:
        """Returns the seconds of a step, of so many from an idle device to an idle device."""
        took = self._clock.once(lambda: self.run(steps)) / steps
        self._marks.clear()
        return took

    def turn(self, steps: int) -> list[float]:
        """Returns the seconds of each of so many steps in the middle of a loop.

        From the begin of one to that of the next, on the device's own clock. A step before them
        does not count: it finds the device idle, and what the one before would have left to it
        done. What the last one leaves to the next is waited for and does not count either, as
        the first that counts found as much. What is between is added to ``split``.
        """
        self._marks.clear()
        self._clock.once(lambda: self.run(steps + 1))
        begins = [marks[0] for marks in self._marks] + [self._marks[-1][-1]]
        taken = [self._between(a, b) for a, b in itertools.pairwise(begins)]
        for marks in self._marks[1:]:
            between = [self._between(a, b) for a, b in itertools.pairwise(marks)]
            self.split.forward.append(sum(between[0:-1:2]))
            self.split.backward.append(sum(between[1:-1:2]))
            self.split.step.append(between[-1])
        self._marks.clear()
        return taken[1:]

    def _now(self) -> Any:
        if not self._clock.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, first: Any, second: Any) -> float:
        if self._clock.cuda:
            return first.elapsed_time(second) / 1e3
        return float(second - first)


def bits_of(trainer: Any, device: torch.device) -> list[int]:
    """Returns a number for each of some parameters, to compare their bits across processes."""
    model = trainer.model
    parts = [model.model.embed_tokens, model.model.layers[0], model.model.layers[-1], model.head]
    found = []
    for part in parts:
        whole: Any = nullcontext()
        if isinstance(trainer, Tiered):
            whole = trainer.tier.materialize(part, device)
        with whole, torch.no_grad():
            found += [_number_of(param) for param in part.parameters()]
    return found


def _number_of(param: Tensor) -> int:
    number = 0
    for part in param.detach().view(torch.int16).flatten().split(_BITS):
        places = torch.arange(1, part.numel() + 1, device=part.device)
        number = number * 31 + int((part * places).sum())
    return number % 2**63


def differences(tiered: Tiered, resident: Resident, device: torch.device) -> tuple[int, int]:
    """Compares all weights, a layer at a time: a block is read whole for each part of it.

    Returns:
        How many elements differ, of how many.
    """
    differ = total = 0
    pairs = zip(parts_of(tiered.model), parts_of(resident.model), strict=True)
    for mine, theirs in pairs:
        with tiered.tier.materialize(mine, device), torch.no_grad():
            for param, other in zip(mine.parameters(), theirs.parameters(), strict=True):
                differ += int((param != other).sum())
                total += param.numel()
    return differ, total


@contextmanager
def opened(
    device: torch.device, hbm: Any, dram: Any, nvme: str | None = None, **settings: Any
) -> Iterator[tiermem.TierManager]:
    """Opens a manager."""
    with tiermem.TierManager(device, hbm=hbm, dram=dram, nvme=nvme, **settings) as tier:
        yield tier


def settle_python() -> None:
    """Excludes all objects that exist by now from garbage collection, for every engine measured.

    A full collection of such a process takes a quarter of a second, and falls into one step of ten.
    """
    gc.collect()
    gc.freeze()


def taking_turns(loops: Sequence[Loop], repeats: int, steps: int) -> list[list[float]]:
    """Times loops in turn, so that a clock that drifts meets them alike.

    Args:
        loops: What takes turns.
        repeats: Turns of each.
        steps: That follow one another in a turn and count.

    Returns:
        Seconds of every step, by loop.
    """
    found: list[list[float]] = [[] for _ in loops]
    for _ in range(repeats):
        for loop, seconds in zip(loops, found, strict=True):
            seconds += loop.turn(steps)
            loop.trainer.rest()  # not in the other one's turn
    return found
