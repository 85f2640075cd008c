"""NorMuon: orthogonalized momentum with a second moment per neuron.

Z. Li et al., "NorMuon: Making Muon more efficient and scalable", 2025: algorithm 1. Surogate's
kernels hold the momentum in 8 bits and orthogonalize by other polynomials, so their numbers differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_QUINTIC = (3.4445, -4.7750, 2.0315)  # K. Jordan, "Muon", 2024
_ITERATIONS = 5
_SHARE = 0.2  # root mean square of an update, in learning rates: that of AdamW


class NorMuon(torch.optim.Optimizer):
    """Steps matrices with NorMuon, and groups with ``orthogonal=False`` with AdamW."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 2e-4,
        momentum: float = 0.95,
        beta2: float = 0.95,
        weight_decay: float = 0.0,
        cautious: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        orthogonal: bool = True,
    ) -> None:
        """Takes the parameters.

        Args:
            params: Parameters or groups; those with ``orthogonal`` must be matrices.
            lr: Learning rate.
            momentum: Decay of the moving average of a matrix's gradient.
            beta2: Decay of the moving average of each row's mean square.
            weight_decay: Decoupled weight decay.
            cautious: Whether to decay only where update and weight have the same sign.
            betas: Betas of AdamW, for the other parameters.
            eps: Added to denominators.
            orthogonal: Default for groups that do not set it.
        """
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "beta2": beta2,
                "weight_decay": weight_decay,
                "cautious": cautious,
                "betas": betas,
                "eps": eps,
                "orthogonal": orthogonal,
            },
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override, unused-ignore]
        """Performs one step; returns what ``closure`` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            update = _step_matrix if group["orthogonal"] else _step_adamw
            for param in group["params"]:
                if param.grad is not None:
                    update(param, param.grad, self.state[param], group)
        return loss


def _step_matrix(param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if not state:
        state["momentum"] = torch.zeros_like(param)
        state["square"] = torch.zeros_like(param[:, :1])
    momentum, square, lr = state["momentum"], state["square"], group["lr"]
    momentum.lerp_(grad, 1 - group["momentum"])
    update = orthogonalized(momentum)
    square.lerp_(update.square().mean(dim=1, keepdim=True), 1 - group["beta2"])
    update = update / (square.sqrt() + group["eps"])
    norm = update.norm().clamp_min(group["eps"])
    update = update * (_SHARE * float(update.numel()) ** 0.5 / norm)
    decay = lr * group["weight_decay"]
    if group["cautious"]:
        param.sub_(param * (update * param > 0), alpha=decay)
    else:
        param.mul_(1 - decay)
    param.sub_(update, alpha=lr)


def orthogonalized(matrix: Tensor) -> Tensor:
    """Returns nearly the orthogonal factor of a matrix's polar decomposition.

    Five Newton-Schulz iterations, in bfloat16 on CUDA and in the matrix's dtype elsewhere.
    """
    a, b, c = _QUINTIC
    x = matrix.bfloat16() if matrix.device.type == "cuda" else matrix
    x = x / x.norm().clamp_min(1e-7)
    flat = matrix.shape[0] > matrix.shape[1]
    x = x.mT if flat else x
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x.mT if flat else x).to(matrix.dtype)
    return result


def _step_adamw(param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if not state:
        state["step"] = torch.zeros(())
        state["exp_avg"] = torch.zeros_like(param)
        state["exp_avg_sq"] = torch.zeros_like(param)
    state["step"] += 1
    step = float(state["step"])
    first, second = group["betas"]
    param.mul_(1 - group["lr"] * group["weight_decay"])
    state["exp_avg"].lerp_(grad, 1 - first)
    state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
    root = (state["exp_avg_sq"] / (1 - second**step)).sqrt_().add_(group["eps"])
    param.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - first**step))
