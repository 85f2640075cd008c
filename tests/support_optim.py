"""A mixed-precision training loop written by hand, and the same one in the tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support_nn import assert_same, check_table, seed, wrap_tight
from torch import nn


class Layer(nn.Module):
    """Uneven sizes, so that blocks and units differ."""

    def __init__(self, width: int, inside: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inside)
        self.down = nn.Linear(inside, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied embedding, layers, and a part that a step may leave without a gradient."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 24)
        self.layers = nn.ModuleList(Layer(24, 16 + 24 * i) for i in range(layers))
        self.extra = nn.Linear(24, 24)
        self.to(dtype)

    def forward(self, ids: torch.Tensor, use_extra: bool = True) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        if use_extra:
            x = self.extra(x)
        return torch.nn.functional.linear(x, self.embed.weight)


def loss_of(model: nn.Module, number: int, use_extra: bool = True) -> torch.Tensor:
    """The loss of one micro-batch, the same for the same number."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 20, (2, 7), generator=generator)
    logits = model(ids[:, :-1], use_extra).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


Groups = Callable[[nn.Module], list[dict[str, Any]]]


def one_group(model: nn.Module) -> list[dict[str, Any]]:
    """Every parameter that is trained, together."""
    return [{"params": [p for p in model.parameters() if p.requires_grad]}]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices and vectors, with settings of their own, across all blocks."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.dim() > 1], "lr": 0.02},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]


class ByHand:
    """Plain torch: masters, an optimizer over them, gradients cast, weights copied back.

    Attributes:
        masters: One per trained parameter, in the order of the groups; itself where there is none.
        optimizer: Over the masters.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        cls: type[torch.optim.Optimizer],
        settings: dict[str, Any],
        master_dtype: torch.dtype | None,
        grad_dtype: torch.dtype | None,
    ) -> None:
        self.params: list[nn.Parameter] = []
        self.masters: list[torch.Tensor] = []
        self.grad_dtype = grad_dtype
        self._sums: dict[int, torch.Tensor] = {}
        own = []
        for group in groups:
            masters = []
            for param in group["params"]:
                wanted = master_dtype or param.dtype
                master = param
                if param.dtype is not wanted:
                    master = param.detach().to(wanted).requires_grad_()
                masters.append(master)
                self.params.append(param)
            self.masters += masters
            own.append({**group, "params": masters})
        self.optimizer = cls(own, **settings)

    def after_backward(self) -> None:
        """Adds gradients up in the dtype asked for."""
        if self.grad_dtype is None:
            return
        for param in self.params:
            if param.grad is not None:
                fresh = param.grad.to(self.grad_dtype)
                if id(param) in self._sums:
                    fresh = self._sums[id(param)] + fresh
                self._sums[id(param)] = fresh
                param.grad = None

    def gradients(self) -> list[torch.Tensor]:
        """The gradients there are, as they are summed up."""
        found = [self._sums.get(id(p), p.grad) for p in self.params]
        return [g for g in found if g is not None]

    def step(self, factor: torch.Tensor | None = None) -> None:
        """One step; ``factor`` undoes a loss scale."""
        self.hand_over(factor)
        self.optimizer.step()
        self.derive()

    @torch.no_grad()
    def hand_over(self, factor: torch.Tensor | None = None) -> None:
        """Gives the masters the gradients."""
        for param, master in zip(self.params, self.masters, strict=True):
            gradient = self._sums.get(id(param), param.grad)
            if gradient is not None:
                gradient = gradient.to(master.dtype)
                if factor is not None:
                    gradient = gradient * factor
            master.grad = gradient

    @torch.no_grad()
    def derive(self) -> None:
        """Makes the weights the casts of their masters."""
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(master)

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        self._sums.clear()
        for param, master in zip(self.params, self.masters, strict=True):
            param.grad = None
            master.grad = None

    def state_dict(self) -> dict[str, Any]:
        """As the tiered optimizer gives it."""
        state = self.optimizer.state_dict()
        masters = {
            number: master.detach()
            for number, (param, master) in enumerate(zip(self.params, self.masters, strict=True))
            if master is not param
        }
        return {**state, "master": masters}


class Twins:
    """The loop by hand over a resident model, and the tiered one, step by step."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        tiers: Any,
        cls: type[torch.optim.Optimizer] = torch.optim.AdamW,
        settings: dict[str, Any] | None = None,
        *,
        groups: Groups = one_group,
        master_dtype: torch.dtype | None = torch.float32,
        grad_dtype: torch.dtype | None = None,
        blocks: Any = "auto",
        **options: Any,
    ) -> None:
        settings = {"lr": 0.01} if settings is None else settings

        def make() -> nn.Module:
            seed(3)
            return build()

        self.plain = make()
        self.master_dtype = master_dtype
        self.by_hand = ByHand(groups(self.plain), cls, settings, master_dtype, grad_dtype)
        extra = {"master_dtype": master_dtype, "grad_dtype": grad_dtype, **options}
        self.tier, self.model, self.optimizer = wrap_tight(
            make, tiers, (cls, {**settings, **extra}), blocks, groups
        )

    def __enter__(self) -> Twins:
        return self

    def __exit__(self, *error: object) -> None:
        self.tier.close()

    def backward(self, number: int, *, scale: float = 1.0, use_extra: bool = True) -> None:
        """One micro-batch through both."""
        losses = []
        for model in (self.plain, self.model):
            seed(number)
            loss = loss_of(model, number, use_extra)
            (loss * scale).backward()
            losses.append(loss.detach())
        self.by_hand.after_backward()
        assert_same(losses[0], losses[1], f"loss {number}")

    def clip_norm(self, norm: float) -> None:
        """Clips both; the norms are equal."""
        grads = self.by_hand.gradients()
        expected = nn.utils.get_total_norm(grads)
        nn.utils.clip_grads_with_norm_(_stand_ins(grads), norm, expected)
        assert_same(expected, self.optimizer.clip_grad_norm_(norm), "norm")

    def clip_value(self, value: float) -> None:
        """Clamps both."""
        for gradient in self.by_hand.gradients():
            gradient.clamp_(-value, value)
        self.optimizer.clip_grad_value_(value)

    def step(self) -> None:
        """Steps both and forgets the gradients."""
        self.by_hand.step()
        self.optimizer.step()
        self.by_hand.zero_grad()
        self.optimizer.zero_grad()

    def check(self) -> None:
        """Compares weights, masters and state."""
        assert_same(dict(self.plain.state_dict()), dict(self.model.state_dict()), "weights")
        expected, found = self.by_hand.state_dict(), self.optimizer.state_dict()
        if self.master_dtype is None:
            del expected["master"]
        assert_same(expected, found, "optimizer")
        check_table(self.tier)


class Refused(Exception):
    """What a user's code raises."""


class FailsMidway(torch.optim.SGD):
    """Raises once it has written weights, in the first step that is asked for once it is lit."""

    lit = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        if FailsMidway.lit:
            FailsMidway.lit = False
            raise Refused


def _stand_ins(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns tensors whose ``grad`` is given, for torch's functions over parameters."""
    found = []
    for gradient in gradients:
        param = torch.empty_like(gradient, requires_grad=True)
        param.grad = gradient
        found.append(param)
    return found


def watched(pair: Twins) -> Twins:
    """Makes the first steps of a pair, which ``overlap="backward"`` only watches."""
    for number in (90, 91):
        pair.backward(number)
        pair.step()
    assert pair.optimizer.stepped_in_backward == 0 or pair.optimizer._timing.auto is not None
    return pair


def units(pair: Twins) -> int:
    return len(pair.optimizer._units)


def made(pair: Twins) -> int:
    """How many units are stepped inside backward, of the step that is to come."""
    return len(pair.optimizer._timing.inside.made)


def stop_in_backward(pair: Twins, number: int) -> None:
    """Runs a backward of the tiered model that ends with an error at its first layer."""
    loss = loss_of(pair.model, number)

    def stop(_gradient: torch.Tensor) -> None:
        raise KeyError("stop")

    hook = pair.model.layers[0].up.weight.register_hook(stop)
    with pytest.raises(KeyError):
        loss.backward()
    hook.remove()
    assert 0 < made(pair) < units(pair)
