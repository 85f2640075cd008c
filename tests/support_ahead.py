"""Steps that are made ahead of ``step()``: a pair of loops that makes them, and what drops them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support_nn import Tiers
from support_optim import Net, Twins, loss_of

ROOMY = Tiers("dram", dram=8 << 20)
SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})


def warm(*arguments: Any, **options: Any) -> Twins:
    """Two steps are made: the first at once, and the second ahead."""
    pair = Twins(*(arguments or (Net, ROOMY)), **options)
    for number in (90, 91):
        pair.backward(number)
        pair.step()
    assert pair.optimizer.stepped_in_backward == units(pair)
    return pair


def units(pair: Twins) -> int:
    return len(pair.optimizer._units)


def ahead(pair: Twins) -> int:
    """How many units are stepped and not confirmed."""
    return len(pair.optimizer._timing.ahead.provisional.units)


def drops(pair: Twins) -> int:
    return int(pair.optimizer._timing.ahead.provisional.drops)


def look_at_state(pair: Twins) -> None:
    param = next(iter(pair.model.parameters()))
    assert pair.optimizer.state[param]["exp_avg"].abs().sum() >= 0


def change_rate(pair: Twins) -> None:
    for optimizer in (pair.by_hand.optimizer, pair.optimizer):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5


def scale_gradient(pair: Twins) -> None:
    for gradient in pair.by_hand.gradients():
        gradient.mul_(2.0)
    for param in pair.model.parameters():
        if param.grad is not None:
            param.grad.mul_(2.0)


def write_weight(pair: Twins) -> None:
    for model in (pair.plain, pair.model):
        with torch.no_grad():
            next(iter(model.parameters())).mul_(2.0)


DROPS: dict[str, Callable[[Twins], Any]] = {
    "a weight": lambda p: p.model.layers[0].up.weight.sum(),
    "a gradient": lambda p: p.model.layers[0].up.weight.grad.sum(),
    "state": look_at_state,
    "state_dict": lambda p: p.optimizer.state_dict(),
    "a rate": change_rate,
    "gradients are scaled": scale_gradient,
    "a weight is written": write_weight,
    "clipping": lambda p: p.clip_norm(0.01),
    "clamping": lambda p: p.clip_value(0.001),
    "another backward": lambda p: p.backward(7),
    "evaluation": lambda p: loss_of(p.model, 3),
    "room for a home": lambda p: p.tier._manager.parts.homes._reclaim(),
}


def leave_no_state(optimizer: Any) -> None:
    """Has every step ahead write its state: what is stepped is what is written."""
    ahead = optimizer._timing.ahead
    if ahead is not None:
        ahead.late.share = 0.0
