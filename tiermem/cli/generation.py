"""Token after token: the loops behind ``tiermem generate``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tiermem.cli.model import ByteGPT

OnToken = Callable[[int], object]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        tokens: How many are made at most.
        temperature: 0 for the likeliest; otherwise logits are divided by it and one is drawn.
        seed: Of the draws.
    """

    tokens: int
    temperature: float = 0.0
    seed: int = 0


def write_on(
    model: nn.Module, prompt: Sequence[int], device: str, sampling: Sampling, on_token: OnToken
) -> None:
    """Continues a prompt.

    Args:
        model: A :class:`ByteGPT` or a model of transformers, wrapped or not.
        prompt: Its tokens; at least one, and no more than the model has positions.
        device: Where the model computes.
        sampling: How tokens are chosen.
        on_token: Called with each token as soon as it is known.
    """
    torch.manual_seed(sampling.seed)
    if isinstance(model, ByteGPT):
        _bytes(model, list(prompt), device, sampling, on_token)
    else:
        _transformers(model, prompt, device, sampling, on_token)


def _bytes(
    model: ByteGPT, tokens: list[int], device: str, sampling: Sampling, on_token: OnToken
) -> None:
    """Sees the last bytes that the model has positions for; it keeps no keys and values."""
    model.eval()
    for _ in range(sampling.tokens):
        window = torch.tensor([tokens[-model.shape.context :]], device=device)
        with torch.no_grad():
            logits = model(window)[0, -1].float()
        if sampling.temperature:
            chances = torch.softmax(logits / sampling.temperature, dim=-1)
            token = int(torch.multinomial(chances, 1))
        else:
            token = int(logits.argmax())
        tokens.append(token)
        on_token(token)


def _transformers(
    model: Any, prompt: Sequence[int], device: str, sampling: Sampling, on_token: OnToken
) -> None:
    """Generates with transformers' ``generate`` and the rest of the folder's configuration."""
    ids = torch.tensor([list(prompt)], device=device)
    config = model.generation_config
    end = config.eos_token_id
    pad = config.pad_token_id
    if pad is None:
        pad = end[0] if isinstance(end, list) else end
    how: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if sampling.temperature:
        how = {"do_sample": True, "temperature": sampling.temperature}
    with torch.no_grad():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=sampling.tokens,
            num_beams=1,
            use_cache=True,
            pad_token_id=0 if pad is None else pad,
            streamer=_Streamer(on_token),
            **how,
        )


class _Streamer:
    """What transformers gives tokens to: the prompt first, then each as it is made."""

    def __init__(self, on_token: OnToken) -> None:
        self._on_token = on_token
        self._begun = False

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt, or a token."""
        if self._begun:
            self._on_token(int(value.reshape(-1)[0]))
        self._begun = True

    def end(self) -> None:
        """Nothing is held back."""
