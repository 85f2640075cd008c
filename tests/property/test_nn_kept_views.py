"""Functions that keep views of frozen weights on ``ctx``, in any form and as long as they like.

What a backward computes with them has the plain model's bits, whatever happens in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_nn import assert_same, seed
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiermem

WIDTH = 32
BYTES = WIDTH * WIDTH * 4

FORMS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda w: w.view(-1),
    lambda w: w.t(),
    lambda w: w[3:9],
    lambda w: w[:, 5],
    lambda w: w.detach(),
    lambda w: w.detach()[7].view(4, 8),
    lambda w: w.view(torch.uint8),
    lambda w: w.view(-1)[10:500].view(torch.int32),
    lambda w: w.as_strided((5, 6), (3, 33), 2 + w.storage_offset()),
    lambda w: w[0:0],
    lambda w: w.clone(),
]
LOOKS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda v: v.float().abs().clamp(max=4).sum(),
    lambda v: v.reshape(-1)[:7].float().tanh().sum(),
    lambda v: torch.ops.aten.mean.default(v.to(torch.float64).clamp(-4, 4)).float().nan_to_num(),
    lambda v: torch.tensor(float(v.numel() + v.dim() + v.element_size())),
    lambda v: v.view(-1).float().clamp(-4, 4).sum() if v.is_contiguous() else v.float().sum(),
]
SHAPES: list[Callable[[list[torch.Tensor]], Any]] = [
    lambda views: views,
    lambda views: tuple(views),
    lambda views: {"views": views, "other": None},
    lambda views: [[{"a": view} for view in views]],
    lambda views: [[[[[view]]]] for view in views],  # too deep to be found
]


def flat(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [tensor for item in items or () for tensor in flat(item)]


class Keeps(torch.autograd.Function):
    """Scales by what it has kept, in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, how: Any, own: list[Any]) -> Any:
        forms, shape, ctx.look, drops, shared = how
        views = [FORMS[form](w) for form in forms]
        ctx.kept = SHAPES[shape](views)
        ctx.drops = drops
        if shared and views:
            own.append(views[0])
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        for view in flat(ctx.kept):
            gradient = gradient * (1 + LOOKS[ctx.look](view) / 64)
        if ctx.drops:
            ctx.kept = None
        return gradient, None, None, None


class Layer(nn.Module):
    """Frozen weights, and a trained one beside them."""

    def __init__(self, hows: list[Any], own: list[Any]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(WIDTH, WIDTH) / 8, requires_grad=False) for _ in hows
        )
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.hows, self.own = hows, own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for w, how in zip(self.weights, self.hows, strict=True):
            x = Keeps.apply(x, w, how, self.own).tanh() * self.scale  # type: ignore[no-untyped-call]
        return x


def run(model: Any, own: list[Any], events: list[str], leave: Callable[[], None]) -> list[Any]:
    """Returns everything that a program computes.

    Args:
        model: Plain or wrapped.
        own: Views that its functions gave the program as well.
        events: What the program does.
        leave: Takes the model out of its tiers.
    """
    found: list[Any] = []
    graphs: list[tuple[torch.Tensor, torch.Tensor, str]] = []
    for number, event in enumerate(events):
        seed(number)
        if event in ("forward", "again", "reentrant"):
            x = y = torch.randn(2, WIDTH, requires_grad=True)
            for layer in model:
                if event == "forward":
                    y = layer(y)
                else:
                    y = checkpoint(layer, y, use_reentrant=event == "reentrant")
            found.append(y.detach().clone())
            graphs.append((x, y.sum(), event))
        elif event == "infer":
            with torch.no_grad():
                found.append(model(torch.randn(2, WIDTH)))
        elif event in ("backward", "retain") and graphs:
            x, y, _ = graphs[-1] if event == "retain" else graphs.pop(0)
            y.backward(retain_graph=event == "retain")
            assert x.grad is not None
            found.append(x.grad.clone())
        elif event == "write":
            with torch.no_grad():
                model[0].weights[0].mul_(1.5)
        elif event == "use" and own:
            found.append(own[-1].clone())
        elif event == "forget":
            own.clear()
        elif event == "leave" and not any(how == "again" for _, _, how in graphs):
            leave()  # else a checkpoint would find other tensors saved than in forward
    found += [p.detach().clone() for p in model.parameters()]
    return [*found, *(p.grad for p in model.parameters() if p.grad is not None)]


HOW = st.tuples(
    st.lists(st.integers(0, len(FORMS) - 1), max_size=3),
    st.integers(0, len(SHAPES) - 1),
    st.integers(0, len(LOOKS) - 1),
    st.booleans(),
    st.booleans(),
)
EVENTS = st.sampled_from(
    ["forward", "again", "reentrant", "infer", "backward", "backward", "retain", "write", "use",
     "forget", "leave"]
)  # fmt: skip


@settings(max_examples=examples(30), deadline=None)
@given(
    hows=st.lists(st.lists(HOW, min_size=1, max_size=2), min_size=2, max_size=4),
    events=st.lists(EVENTS, min_size=2, max_size=9),
    tight=st.booleans(),
)
def test_bits_are_those_of_the_plain_model(
    hows: list[list[Any]], events: list[str], tight: bool
) -> None:
    def build(own: list[Any]) -> nn.Sequential:
        seed(0)
        return nn.Sequential(*[Layer(layer, own) for layer in hows])

    own: list[Any] = []
    expected = run(build(own), own, events, lambda: None)
    own = []
    total = sum(len(layer) for layer in hows) * (BYTES + 1024)
    kept = any(shared or shape == len(SHAPES) - 1 for la in hows for _, shape, _, _, shared in la)
    hbm = 4 * BYTES + 8192 if tight and not kept else 2 * total + 8 * BYTES
    with tiermem.TierManager("cpu", hbm=hbm, dram="4MiB") as tier:
        model = tier.wrap(build(own))
        gone = []

        def leave() -> None:
            if not gone:
                tier.unwrap(model)
                gone.append(1)

        found = run(model, own, events, leave)
        assert_same(found, expected, "the program")
        own.clear()
