"""What an architecture of :mod:`zoo` is: how it is built, and what is put into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from llama import random_bf16
from torch import Tensor, nn

Given = dict[str, Any]
Sizes = Mapping[str, Any]
SETS = ("full", "quick", "tiny")


@dataclass(frozen=True)
class Kind:
    """An architecture, and how it is called.

    Attributes:
        make: Builds one from sizes; the default dtype and device are those wanted.
        given: Makes keyword arguments from the model, a number of tokens, the draw of random
            tensors, and whether it is to be trained on them.
        full: Sizes of 2 to 10 GB in bf16.
        quick: What differs in the smaller one.
        tiny: What differs in the one that a test runs.
        generates: Whether it has ``generate()``.
        experts: How many experts of how many a token chooses, and the parameters' names.
        cudnn: Whether cuDNN's attention may be used, resident as well.
        most_trained: The most tokens of a training step, where more take too much memory.
        apart: Whether it is measured only where it is asked for by name.
    """

    make: Callable[[Given], nn.Module]
    given: Callable[[Any, int, Draw, bool], Given]
    full: Sizes
    quick: Sizes
    tiny: Sizes
    generates: bool = False
    experts: tuple[int, int, str] | None = None
    most_trained: int = 1 << 30
    cudnn: bool = True
    apart: bool = False

    def build(self, which: str, device: torch.device) -> nn.Module:
        """Returns one of a set, the same every time, made on the device itself."""
        sizes = dict(self.full)
        if which != "full":
            sizes |= self.quick if which == "quick" else self.tiny
        with random_bf16(device):
            return self.make(sizes).eval()


@dataclass
class Draw:
    """Random inputs, the same every time.

    Args:
        device: Where they are.
        seed: A number.
    """

    device: torch.device
    seed: int
    _made: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        """Begins anew."""
        self._made = torch.Generator().manual_seed(self.seed)

    def ids(self, vocabulary: int, *shape: int) -> Tensor:
        """Returns token ids."""
        return torch.randint(2, vocabulary, shape, generator=self._made).to(self.device)

    def normal(self, *shape: int) -> Tensor:
        """Returns bf16 values."""
        made = torch.Generator(self.device).manual_seed(self.seed)
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device, generator=made)


def loss_of(output: Any) -> Tensor:
    """Returns the loss that a model gives, or else a number that every output has a part in."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss  # type: ignore[no-any-return]
    return first_of(output).float().square().mean()


def first_of(output: Any) -> Tensor:
    """Returns the first tensor of a model's output."""
    for name in ("logits", "last_hidden_state", "sample"):
        found = getattr(output, name, None)
        if found is not None:
            return found  # type: ignore[no-any-return]
    if hasattr(output, "to_tuple"):
        output = output.to_tuple()
    return output[0] if isinstance(output, tuple) else output


def split(tokens: int, longest: int) -> tuple[int, int]:
    """Returns how many sequences so many tokens are in, and their length."""
    length = min(tokens, longest)
    return max(1, tokens // length), length


def images(model: Any, tokens: int, draw: Draw, train: bool) -> Given:
    """Returns images for a vision transformer, one for 256 tokens."""
    side = model.config.image_size
    return {"pixel_values": draw.normal(max(1, tokens // 256), 3, side, side)}


def of_transformers(
    name: str, kind: str = "ForCausalLM", config: str = ""
) -> Callable[[Given], nn.Module]:
    """Returns what builds a model of transformers from its configuration.

    Args:
        name: The architecture's, as its classes begin.
        kind: How the class of the model ends.
        config: The configuration's class, where it does not begin so.
    """

    def make(sizes: Given) -> nn.Module:
        import transformers

        settings = getattr(transformers, config or f"{name}Config")(**sizes)
        return getattr(transformers, f"{name}{kind}")(settings)  # type: ignore[no-any-return]

    return make
