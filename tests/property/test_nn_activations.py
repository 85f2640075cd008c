"""Random graphs, saved tensors of random sizes below HBM, copies as late as allowed."""

from __future__ import annotations

import gc
import tempfile
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_late import LateCopyEngine, make_late
from support_nn import assert_same, same_bits, seed
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiermem

WIDTH = 16
OPS = ("linear", "tanh", "split", "join", "product", "norm", "expand", "detach", "inplace", "relu_")


class Graph(nn.Module):
    """Applies operations to a list of values, as a recipe says."""

    def __init__(self, recipe: list[tuple[str, int, int, str]]) -> None:
        super().__init__()
        self.recipe = recipe
        self.steps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in recipe)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x * 1]
        for (op, first, second, mode), layer in zip(self.recipe, self.steps, strict=True):
            a, b = values[first % len(values)], values[second % len(values)]

            def run(a: torch.Tensor, b: torch.Tensor, op: str = op, layer: Any = layer) -> Any:
                return self.apply_op(op, layer, a, b)

            if mode == "plain" or not torch.is_grad_enabled():
                values.append(run(a, b))
            else:
                values.append(checkpoint(run, a, b, use_reentrant=mode == "reentrant"))
        return torch.stack([value.sum() for value in values]).sum()

    def apply_op(self, op: str, layer: nn.Module, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if op == "linear":
            return layer(a)
        if op == "tanh":
            return torch.tanh(a) * b
        if op == "split":
            left, right = layer(a).chunk(2, dim=-1)
            return torch.cat([left * right, right.exp().clamp(max=3)], dim=-1)
        if op == "join":
            return torch.cat([a, b], dim=0)[1 : 1 + len(a)].square().sin()
        if op == "product":
            return torch.softmax(a @ b.t(), dim=-1) @ b
        if op == "norm":
            return self.norm(a)
        if op == "expand":
            return a[:, :1].expand(-1, WIDTH) * b
        if op == "detach":
            return a * b.detach()
        if op == "inplace":
            return layer(a).mul_(0.5).add_(b)
        return torch.relu_(layer(a).clone()) + b


steps = st.tuples(
    st.sampled_from(OPS),
    st.integers(0, 9),
    st.integers(0, 9),
    st.sampled_from(["plain", "plain", "plain", "nonreentrant", "reentrant"]),
)


@settings(max_examples=examples(8))
@given(
    recipe=st.lists(steps, min_size=1, max_size=9),
    home=st.sampled_from(["dram", "dram", "nvme"]),
    minimum=st.sampled_from([1, 64, 512, 1025, 4096, 1 << 14]),
    ahead=st.sampled_from(["auto", 0, 2048, 1 << 16]),
    rows=st.sampled_from([3, 8, 64]),
    dram=st.sampled_from([1 << 20, 4 << 20]),
    late=st.booleans(),
    events=st.lists(
        st.sampled_from(["train", "train", "drop", "retain", "evaluate", "two", "double"]),
        min_size=1,
        max_size=4,
    ),
    number=st.integers(0, 1 << 20),
)
def test_any_graph_has_the_same_gradients(
    recipe: Any, home: Any, minimum: int, ahead: Any, rows: int, dram: int, late: bool,
    events: list[str], number: int,
) -> None:  # fmt: skip
    if any(mode == "reentrant" for *_, mode in recipe):  # it has no second derivatives
        events = ["train" if event == "double" else event for event in events]
    seed(number)
    plain = Graph(recipe)
    seed(number)
    model = Graph(recipe)
    policy = tiermem.Policy("dram", "dram", "dram", "dram", activations=home)
    with tempfile.TemporaryDirectory() as folder, tiermem.TierManager(
        "cpu", hbm="256KiB", dram=dram, nvme=folder if home == "nvme" else None, policy=policy,
        activation_min=minimum, activation_ahead=ahead,
    ) as tier:  # fmt: skip
        engine = LateCopyEngine(number)
        if late:
            make_late(tier._manager, engine)
        tier.wrap(model)
        for event in events:
            results = []
            for net in (plain, model):
                seed(number + 1)
                results.append(_do(event, net, rows))
            assert_same(results[0], results[1], event)
        ours = dict(model.named_parameters())
        for name, param in plain.named_parameters():
            mine = ours[name].grad
            assert (mine is None) == (param.grad is None), name
            if param.grad is not None:
                assert same_bits(param.grad, mine.clone()), name
        gc.collect()
        store = tier._runtime.activations.store
        assert store is not None and not engine.harm
        store.reap()
        assert store.pool.used == 0 and not store._order
        assert store._held.nbytes == store._fetched.nbytes == 0


def _do(event: str, net: nn.Module, rows: int) -> Any:
    x = torch.randn(rows, WIDTH, requires_grad=True)
    if event == "drop":
        return net(x).detach()
    if event == "evaluate":
        with torch.no_grad():
            return net(x)
    if event == "double":
        (first,) = torch.autograd.grad(net(x), [x], create_graph=True)
        if first.requires_grad:
            first.square().sum().backward()
        return first.detach(), x.grad
    if event == "two":
        one, other = net(x), net(x * 2)
        one.backward()
        other.backward()
        return one.detach(), other.detach(), x.grad
    loss = net(x)
    loss.backward(retain_graph=event == "retain")
    if event == "retain":
        loss.backward()
    return loss.detach(), x.grad
