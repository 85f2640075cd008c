"""A transformer of Flux's sizes in plain torch: 11.8 B parameters, two kinds of blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

SHAPES = {
    "flux": {
        "width": 3072,
        "heads": 24,
        "double": 19,
        "single": 38,
        "text": 512,
        "image": 4096,
        "text_width": 4096,
    },
    "tiny": {
        "width": 64,
        "heads": 4,
        "double": 2,
        "single": 3,
        "text": 8,
        "image": 16,
        "text_width": 64,
    },
}
"""``flux`` is FLUX.1's: 512 tokens of T5-XXL's width, and an image of 1024 by 1024 pixels."""

CHANNELS = 64
RATIO = 4
_SPREAD = 0.02


class Attention(nn.Module):
    """Attention with normed queries and keys, without its projections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_norm = nn.RMSNorm(width // heads)
        self.key_norm = nn.RMSNorm(width // heads)

    def forward(self, qkv: Tensor) -> Tensor:
        """Returns the mix of values; ``qkv`` is ``(batch, tokens, 3 * width)``."""
        batch, tokens, _ = qkv.shape
        q, k, v = qkv.view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(self.query_norm(q), self.key_norm(k), v)
        return mixed.transpose(1, 2).reshape(batch, tokens, -1)


class Stream(nn.Module):
    """What a double block has for the image, and once more for the text."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 6 * width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, RATIO * width)
        self.down = nn.Linear(RATIO * width, width)

    def begin(self, hidden: Tensor, time: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Returns queries, keys and values, and the factors of :meth:`end`."""
        shift, scale, *others = self.modulation(functional.silu(time))[:, None].chunk(6, -1)
        return self.qkv(self.norm(hidden) * (1 + scale) + shift), others

    def end(self, hidden: Tensor, mixed: Tensor, factors: list[Tensor]) -> Tensor:
        """Returns the residual stream after attention and MLP."""
        gate, shift, scale, other = factors
        hidden = hidden + gate * self.out(mixed)
        inside = self.norm(hidden) * (1 + scale) + shift
        return hidden + other * self.down(functional.gelu(self.up(inside), approximate="tanh"))


class DoubleBlock(nn.Module):
    """Image and text with weights of their own, attending to each other."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.image, self.text = Stream(width, heads), Stream(width, heads)
        self.attention = Attention(width, heads)

    def forward(self, image: Tensor, text: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both residual streams."""
        of_text, text_factors = self.text.begin(text, time)
        of_image, image_factors = self.image.begin(image, time)
        mixed = self.attention(torch.cat([of_text, of_image], 1))
        mixed_text, mixed_image = mixed.split([text.shape[1], image.shape[1]], 1)
        return (
            self.image.end(image, mixed_image, image_factors),
            self.text.end(text, mixed_text, text_factors),
        )


class SingleBlock(nn.Module):
    """Image and text together; attention and MLP side by side."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.sizes = [3 * width, RATIO * width]
        self.modulation = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.up = nn.Linear(width, sum(self.sizes))
        self.attention = Attention(width, heads)
        self.down = nn.Linear((1 + RATIO) * width, width)

    def forward(self, hidden: Tensor, time: Tensor) -> Tensor:
        """Returns the residual stream."""
        shift, scale, gate = self.modulation(functional.silu(time))[:, None].chunk(3, -1)
        qkv, inside = self.up(self.norm(hidden) * (1 + scale) + shift).split(self.sizes, -1)
        inside = functional.gelu(inside, approximate="tanh")
        return hidden + gate * self.down(torch.cat([self.attention(qkv), inside], -1))


class Flux(nn.Module):
    """The transformer; forward is one denoising step.

    Args:
        shape: A key of ``SHAPES``.
    """

    def __init__(self, shape: str) -> None:
        super().__init__()
        sizes = SHAPES[shape]
        width, heads = sizes["width"], sizes["heads"]
        self.image_in = nn.Linear(CHANNELS, width)
        self.text_in = nn.Linear(sizes["text_width"], width)
        self.time_in = nn.Linear(256, width)
        self.doubles = nn.ModuleList(DoubleBlock(width, heads) for _ in range(sizes["double"]))
        self.singles = nn.ModuleList(SingleBlock(width, heads) for _ in range(sizes["single"]))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.out = nn.Linear(width, CHANNELS)

    def forward(self, image: Tensor, text: Tensor, time: Tensor) -> Tensor:
        """Returns the velocity of the image's latents, ``(batch, tokens, 64)``."""
        image, text, time = self.image_in(image), self.text_in(text), self.time_in(time)
        for block in self.doubles:
            image, text = block(image, text, time)
        hidden = torch.cat([text, image], 1)
        for block in self.singles:
            hidden = block(hidden, time)
        latents: Tensor = self.out(self.norm(hidden[:, text.shape[1] :]))
        return latents


def build(shape: str, device: torch.device) -> Flux:
    """Returns one in bf16 with random weights, made on the device itself, the same every time."""
    with torch.device("meta"):
        model = Flux(shape).bfloat16()
    model.to_empty(device=device)
    made = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("_norm.weight"):
                param.fill_(1.0)
            else:
                param.normal_(std=_SPREAD, generator=made)
    return model.eval().requires_grad_(False)


def inputs(shape: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns latents, text and time of one image."""
    sizes = SHAPES[shape]
    made = torch.Generator(device).manual_seed(1)
    shapes = (1, sizes["image"], CHANNELS), (1, sizes["text"], sizes["text_width"]), (1, 256)
    image, text, time = (
        torch.randn(s, generator=made, device=device, dtype=torch.bfloat16) for s in shapes
    )
    return image, text, time
