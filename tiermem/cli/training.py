"""The loop that both runs of ``tiermem train`` share: tiered and resident."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from tiermem.cli.data import Corpus
from tiermem.cli.model import ByteGPT, Layer, Shape, loss_of

_WARMUP_SHARE = 0.1
_LEAST_RATE = 0.1

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@dataclass(frozen=True)
class Settings:
    """What is trained, and how; the same for both runs.

    Attributes:
        shape: The model's sizes.
        batch: Sequences in one forward.
        accumulate: Forwards in one step.
        steps: Optimizer steps.
        lr: Highest learning rate.
        seed: Of the weights and of the batches.
        dtype: Of the weights.
        device: Torch device.
        checkpointing: Whether each layer is recomputed in backward.
        loss_chunks: In how many parts the logits and the loss are made; 0 for all at once.
        master: Of the masters of the weights, or None for none.
        optimizer_on: Where the tiered run makes its steps, as ``where`` of ``tier.optimizer``; the
            resident run is all on the device.
        overlap: When the tiered run makes its steps, as for ``tier.optimizer``.
        clip: Most that the norm of all gradients may be, or 0 for any.
    """

    shape: Shape
    batch: int
    accumulate: int
    steps: int
    lr: float
    seed: int
    dtype: torch.dtype
    device: str
    checkpointing: bool
    loss_chunks: int = 0
    master: torch.dtype | None = None
    optimizer_on: Literal["auto", "device", "host", "both"] = "auto"
    overlap: Literal["auto", "forward", "backward"] = "auto"
    clip: float = 1.0

    @property
    def rounds_alike(self) -> bool:
        """Whether steps have the device's bits wherever they are made."""
        return self.optimizer_on in ("auto", "device")

    @property
    def tokens_per_step(self) -> int:
        """Bytes predicted in one step."""
        return self.batch * self.accumulate * self.shape.context

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.shape.parameters * self.dtype.itemsize

    @property
    def activation_bytes(self) -> int:
        """Most bytes that backward needs of one forward, by the count of what a layer saves.

        In widths per token: residual and norm of both halves 4, query, key and value 3, attention
        and its projection's input 2, the MLP's two 8; rounded up, masks and pages included.
        """
        widths = 2 if self.checkpointing else 24
        tokens = self.batch * self.shape.context
        layers = self.shape.layers + 2
        return widths * layers * max(4096, tokens * self.shape.width * self.dtype.itemsize)

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients, masters and two moments."""
        kept = 2 * (self.master or self.dtype).itemsize
        if self.master is not None and self.master is not self.dtype:
            kept += self.master.itemsize
        return 2 * self.weight_bytes + self.shape.parameters * kept


@dataclass(frozen=True)
class Outcome:
    """The results of a run.

    Attributes:
        losses: Loss of each step, exactly.
        weights: The final weights, copied to host memory.
        seconds: Wall time of all steps.
        interrupted: Whether it was ended before its time; then there are no weights.
        resumed: How many of the steps were made before the checkpoint that it went on from.
    """

    losses: list[float]
    weights: dict[str, Tensor]
    seconds: float
    interrupted: bool = False
    resumed: int = 0

    @property
    def steps(self) -> int:
        """How many steps took its seconds."""
        return len(self.losses) - self.resumed


@dataclass
class Progress:
    """How far a run has come; it holds also where that is ended by an error.

    Attributes:
        losses: Of the steps that are done.
        begins: When each step began, in nanoseconds of ``time.perf_counter_ns()``.
        ended: When the last one was done.
        resumed: How many of the losses are from a checkpoint.
    """

    losses: list[float] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    ended: int = 0
    resumed: int = 0

    @property
    def seconds(self) -> float:
        """Wall time of the steps that are done."""
        return (self.ended - self.begins[0]) / 1e9 if self.ended and self.begins else 0.0


class RunCheckpoints(Protocol):
    """Saves a run as it goes; see :class:`tiermem.cli.checkpoints.Checkpoints`."""

    def resume(self, progress: Progress, scheduler: Any, generator: torch.Generator) -> None:
        """Goes on from a checkpoint: ``progress`` has the losses of the steps that are made."""
        ...

    def after(
        self,
        step: int,
        last: bool,
        optimizer: torch.optim.Optimizer,
        progress: Progress,
        scheduler: Any,
        generator: torch.Generator,
    ) -> None:
        """A step was made; ``step`` are, by now."""
        ...


def new_model(settings: Settings) -> ByteGPT:
    """Builds the model on the host; the same seed gives the same weights."""
    torch.manual_seed(settings.seed)
    model = ByteGPT(settings.shape, checkpointing=settings.checkpointing)
    return model.to(settings.dtype)


def learning_rate(step: int, steps: int) -> float:
    """Returns the factor of step ``step``: linear warm-up, then a cosine."""
    warmup = max(1, round(steps * _WARMUP_SHARE))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return _LEAST_RATE + (1 - _LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * progress))


def run_steps(
    model: nn.Module,
    optimizer: Any,
    clip: Callable[[float], object],
    corpus: Corpus,
    settings: Settings,
    on_step: Callable[[int, float], None],
    progress: Progress | None = None,
    checkpoints: RunCheckpoints | None = None,
) -> Progress:
    """Trains.

    Args:
        model: On its device, or wrapped.
        optimizer: A plain or a tiered one.
        clip: Clips the gradients to a norm.
        corpus: What to train on.
        settings: How.
        on_step: Called after each step with its number and its loss.
        progress: Where to keep what has come of it.
        checkpoints: Saves and resumes the run; None for neither.

    Returns:
        The same, at the end.
    """
    progress = progress or Progress()
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(step, settings.steps)
    )
    generator = torch.Generator().manual_seed(settings.seed)
    if checkpoints is not None:
        checkpoints.resume(progress, scheduler, generator)
        progress.resumed = len(progress.losses)
    for step in range(len(progress.losses), settings.steps):
        progress.begins.append(time.perf_counter_ns())
        optimizer.zero_grad(set_to_none=True)
        parts: list[Tensor] = []
        for _ in range(settings.accumulate):
            tokens = corpus.batch(generator, settings.batch, settings.shape.context + 1)
            loss = loss_of(model, tokens.to(settings.device), settings.loss_chunks)
            loss = loss / settings.accumulate
            loss.backward()
            parts.append(loss.detach())
        if settings.clip:
            clip(settings.clip)
        optimizer.step()
        scheduler.step()
        progress.losses.append(sum(part.item() for part in parts))
        progress.ended = time.perf_counter_ns()
        on_step(step, progress.losses[-1])
        if checkpoints is not None:
            last = step + 1 == settings.steps
            checkpoints.after(step + 1, last, optimizer, progress, scheduler, generator)
    if settings.device.startswith("cuda"):
        torch.cuda.synchronize(settings.device)  # the last step is made when the device says so
    progress.ended = time.perf_counter_ns()
    return progress


class MixedAdamW(torch.optim.AdamW):
    """AdamW over masters, and sums of gradients in a dtype of their own, by hand."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        """Makes a master of each parameter of ``model`` that needs one."""
        self._params = list(model.parameters())
        master = settings.master or settings.dtype
        self._masters: list[Tensor] = [
            p if p.dtype is master else p.detach().to(master).requires_grad_() for p in self._params
        ]
        super().__init__(self._masters, lr=settings.lr)

    def step(self, closure: Any = None) -> Any:
        """Steps the masters and casts the weights from them."""
        for param, master in zip(self._params, self._masters, strict=True):
            if master is not param and param.grad is not None:
                master.grad = param.grad.to(master.dtype)
        result = super().step(closure)
        with torch.no_grad():
            for param, master in zip(self._params, self._masters, strict=True):
                if master is not param:
                    param.copy_(master)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of parameters and masters."""
        for param, master in zip(self._params, self._masters, strict=True):
            param.grad = master.grad = None


def run_resident(
    corpus: Corpus, settings: Settings, on_step: Callable[[int, float], None]
) -> Outcome:
    """Trains the same model the plain way, with everything on the device."""
    model = new_model(settings).to(settings.device)
    optimizer = MixedAdamW(model, settings)

    def clip(norm: float) -> object:
        return nn.utils.clip_grad_norm_(model.parameters(), norm)

    progress = run_steps(model, optimizer, clip, corpus, settings, on_step)
    return Outcome(progress.losses, copy_weights(model), progress.seconds)


def trial(settings: Settings) -> Callable[[], object]:
    """Returns a piece of the work: forward and backward of one layer."""
    shape = settings.shape
    with torch.random.fork_rng([]):
        layer = Layer(shape.width, shape.heads).to(settings.dtype)
        x = torch.randn(settings.batch, shape.context, shape.width).to(settings.dtype)
    return lambda: layer(x).sum().backward()


def largest_loss_difference(tiered: Outcome, resident: Outcome) -> float:
    """Returns by how much the losses of two runs differ at most, relative to the resident one's."""
    pairs = zip(tiered.losses, resident.losses, strict=True)
    return max(abs(one - other) / max(abs(other), 1e-12) for one, other in pairs)


def copy_weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns copies of all parameters and buffers in host memory."""
    state = model.state_dict(keep_vars=False)
    return {name: value.detach().to("cpu", copy=True) for name, value in state.items()}


def first_difference(tiered: Outcome, resident: Outcome) -> str | None:
    """Compares two runs bit for bit.

    Returns:
        A sentence about the first difference, or ``None`` if there is none.
    """
    for step, (one, other) in enumerate(zip(tiered.losses, resident.losses, strict=True)):
        if one.hex() != other.hex():
            return f"the loss of step {step} is {one!r} tiered and {other!r} resident"
    if tiered.weights.keys() != resident.weights.keys():
        return f"names of weights differ: {sorted(tiered.weights.keys() ^ resident.weights.keys())}"
    for name, expected in resident.weights.items():
        found = tiered.weights[name]
        if found.shape != expected.shape or found.dtype != expected.dtype:
            return f"{name} is {found.dtype} {tuple(found.shape)}, not {tuple(expected.shape)}"
        # As bytes: NaN equals itself, and 0.0 is not -0.0.
        same = (_bytes(found) == _bytes(expected)).all(dim=-1)
        if not bool(same.all()):
            at = int(torch.nonzero(~same)[0])
            values = found.flatten()[at].item(), expected.flatten()[at].item()
            count = int((~same).sum())
            return (
                f"{name} differs in {count} of {same.numel()} elements, first at {at}: "
                f"{values[0]!r} tiered and {values[1]!r} resident"
            )
    return None


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8).view(-1, tensor.element_size())


@contextmanager
def deterministic(device: str) -> Iterator[None]:
    """Asks torch for kernels that give the same bits twice, within the ``with`` block.

    On the CPU they do so anyway. On CUDA some kernels add in a random order
    otherwise, and two resident runs would already differ from one another.
    """
    if not device.startswith("cuda"):
        yield
        return
    if _WORKSPACE not in os.environ:
        # torch looks once whether it is set, but parses it at every product while it is: 0.1 ms
        os.environ[_WORKSPACE] = ":4096:8"
        torch.mm(*2 * [torch.ones(8, 8, device=device)])
        del os.environ[_WORKSPACE]
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
