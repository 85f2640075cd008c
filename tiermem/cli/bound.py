"""The most tokens per second that links and disks allow, beside those that there were.

A token of text needs every weight once. What HBM has no room for comes over the host link, and what
DRAM has no room for either comes from the disks, each time. The bound on the time of a token is the
longer of both at the machine's measured speeds (``tiermem bench``), or at those that the options
say; where neither is known, at the best speed that each link sustained in the run itself.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from torch import nn

from tiermem import Stats
from tiermem.cli.plan import read_speeds
from tiermem.config import format_size

_NAMES = {"link": "host link", "read": "disk"}


@dataclass(frozen=True)
class Bound:
    """The most that can be had.

    Attributes:
        tokens_per_second: So much; None where nothing has to move.
        reason: What sets it.
    """

    tokens_per_second: float | None
    reason: str


def streamed_nbytes(model: nn.Module) -> int:
    """Returns the bytes of weights that a token needs; of an embedding of its own, rows alone."""
    params = {id(param): param.numel() * param.element_size() for param in model.parameters()}
    linear = {id(m.weight) for m in model.modules() if not isinstance(m, nn.Embedding) and _has(m)}
    for module in model.modules():
        if isinstance(module, nn.Embedding) and id(module.weight) not in linear:
            params.pop(id(module.weight), None)
    return sum(params.values())


def _has(module: nn.Module) -> bool:
    return isinstance(module._parameters.get("weight"), nn.Parameter)


def bound_of(
    arguments: argparse.Namespace, weights: int, stats: Stats, tokens: int, speed: float
) -> Bound:
    """Returns the bound on tokens per second.

    Args:
        arguments: With the options about speeds.
        weights: Bytes that each token needs.
        stats: Of the tokens that were measured.
        tokens: How many these were.
        speed: Of them, in tokens per second.
    """
    hbm, dram = stats.budget.get("hbm", 0), stats.budget.get("dram", 0)
    moved = {name: value.nbytes / max(tokens, 1) for name, value in stats.links.items()}
    up = sum(nbytes for name, nbytes in moved.items() if name.endswith("->hbm"))
    disk = sum(nbytes for name, nbytes in moved.items() if name.startswith("nvme->"))
    # A model of experts needs fewer than all: no more than what did move.
    must = {
        "link": min(up, max(0, weights - hbm)),
        "read": min(disk, max(0, weights - hbm - dram)),
    }
    if not any(must.values()):
        return Bound(None, "nothing has to move: compute sets the pace")
    speeds, sources = read_speeds(arguments)
    unknown = [link for link in must if must[link] and sources[link].startswith("not measured")]
    if unknown:
        if not stats.efficiency:
            return Bound(None, "too few tokens to measure the links; tiermem bench does")
        return Bound(
            speed / stats.efficiency,
            "by the best speed that each link sustained in this run; tiermem bench measures them",
        )
    seconds = {link: nbytes / speeds[link] for link, nbytes in must.items()}
    slowest = max(seconds, key=lambda link: seconds[link])
    reason = (
        f"{_NAMES[slowest]}: {format_size(must[slowest])} a token at "
        f"{speeds[slowest] / 1e9:.3g} GB/s ({sources[slowest]})"
    )
    return Bound(1 / seconds[slowest], reason)
