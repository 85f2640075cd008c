"""Steps of Adam by one kernel: where they are made, and that they leave what torch's leave.

The kernel is a fake here, which makes the operations of ``foreach`` one after the other; the bits
of the real one are compared in ``tests/gpu/test_adam_kernel.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_adam_kernel import FakeKernel, Looks, faked
from torch import nn

from tiermem.optim.rules import adamstep
from tiermem.optim.rules.plainstep import run
from tiermem.optim.rules.torchsteps import flavour_of

Made = Callable[..., torch.optim.Optimizer]


@pytest.fixture
def kernel() -> Iterator[FakeKernel]:
    with faked() as made:
        yield made


def twins(
    kind: Made, dtype: torch.dtype = torch.float32, **options: Any
) -> list[tuple[list[nn.Parameter], torch.optim.Optimizer]]:
    """Returns parameters and their optimizer twice, after a first step, with new gradients."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(n, 3).to(dtype)) for n in (4, 1, 2)]
        optimizer = kind(params, lr=1e-2, **options)
        for number in range(2):
            for param in params:
                param.grad = torch.randn_like(param)
            if not number:
                optimizer.step()
        made.append((params, optimizer))
    return made


def step_both(pair: list[tuple[list[nn.Parameter], torch.optim.Optimizer]]) -> None:
    """Makes a step of the first by torch, and of the second as plain optimizers are stepped."""
    type(pair[0][1]).step.__wrapped__(pair[0][1])  # type: ignore[attr-defined]
    run(pair[1][1])


def left(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Any]:
    """Returns what a step leaves: values, and how often they were written."""
    found: list[Any] = []
    for param in params:
        state = optimizer.state.get(param, {})
        tensors = [param.detach(), *(state[key] for key in sorted(state))]
        found += [(tensor.tolist(), tensor._version) for tensor in tensors]
        found.append(None if param.grad is None else (param.grad.tolist(), param.grad._version))
    return found


@settings(max_examples=25)
@given(
    st.sampled_from([torch.optim.Adam, torch.optim.AdamW]),
    st.sampled_from([0.0, 0.1]),
    st.booleans(),
    st.sampled_from([(0.9, 0.999), (0.3, 0.9)]),
    st.sets(st.integers(0, 2), max_size=2),
)
def test_a_step_leaves_what_torchs_own_does(
    cls: Made, decay: float, maximize: bool, betas: tuple[float, float], without: set[int]
) -> None:
    with faked() as made:
        options = {"weight_decay": decay, "maximize": maximize, "betas": betas, "foreach": True}
        pair = twins(cls, **options)
        for params, _ in pair:
            for number in without:
                params[number].grad = None
        for _ in range(3):
            before = made.steps
            step_both(pair)
            assert made.steps > before
        assert left(*pair[0]) == left(*pair[1])


def test_what_later_steps_are_made_of_is_tried_in_the_first(kernel: FakeKernel) -> None:
    params = [nn.Parameter(torch.randn(3)) for _ in range(2)]
    optimizer = torch.optim.AdamW(params, lr=1e-2, foreach=True)
    for param in params:
        param.grad = torch.randn(3)
    run(optimizer)
    tried = kernel.steps
    assert tried
    run(optimizer)
    assert kernel.steps == tried + 1
    run(torch.optim.AdamW(params, lr=1e-2, foreach=False))
    assert kernel.steps == tried + 1


def test_groups_are_stepped_with_their_own_settings(kernel: FakeKernel) -> None:
    pair = twins(torch.optim.AdamW, foreach=True)
    for params, optimizer in pair:
        group = optimizer.param_groups[0]
        group["params"] = params[:2]
        optimizer.add_param_group({"params": params[2:], "lr": 0.5, "weight_decay": 0.0})
    step_both(pair)
    assert kernel.steps and left(*pair[0]) == left(*pair[1])


def test_small_groups_beside_large_ones_are_stepped_with_them(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where biases and norms have a group without decay."""
    monkeypatch.setattr(adamstep, "_LEAST", 20)
    pair = twins(torch.optim.AdamW, foreach=True)  # of 12, 3 and 6 elements
    for params, optimizer in pair:
        optimizer.param_groups[0]["params"] = params[:1]
        optimizer.add_param_group({"params": params[1:], "weight_decay": 0.0})
    step_both(pair)
    assert kernel.steps and left(*pair[0]) == left(*pair[1])


def test_other_bits_are_not_taken(kernel: FakeKernel) -> None:
    """A kernel that is found to give others is not asked again."""
    kernel.wrong = True
    pair = twins(torch.optim.AdamW, foreach=True)
    step_both(pair)
    tried = kernel.steps
    step_both(pair)
    assert kernel.steps == tried > 0
    assert left(*pair[0]) == left(*pair[1])


def _set(name: str, value: Any) -> Callable[[list[nn.Parameter], Any], None]:
    def change(_params: list[nn.Parameter], optimizer: Any) -> None:
        optimizer.param_groups[0][name] = value

    return change


def _not_fused(_params: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.param_groups[0] |= {"foreach": None, "fused": False}  # torch takes neither then


def _other_step(params: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.state[params[0]]["step"] += 1


def _turned(params: list[nn.Parameter], optimizer: Any) -> None:
    state = optimizer.state[params[0]]
    state["exp_avg"] = torch.zeros(3, 4).t()


def _no_state(params: list[nn.Parameter], optimizer: Any) -> None:
    del optimizer.state[params[1]]


def _half(params: list[nn.Parameter], optimizer: Any) -> None:
    state = optimizer.state[params[0]]
    state["exp_avg_sq"] = state["exp_avg_sq"].double()


def _one_counter(params: list[nn.Parameter], optimizer: Any) -> None:
    counter = torch.tensor(1.0)
    for param in params:
        optimizer.state[param]["step"] = counter  # torch adds 1 for each of them


def _own_gradient(params: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.param_groups[0] |= {"weight_decay": 0.5, "decoupled_weight_decay": True}
    params[0].grad = params[0].detach()  # it is decayed by then


def _negated(params: list[nn.Parameter], _optimizer: Any) -> None:
    assert params[1].grad is not None
    params[1].grad = torch._neg_view(params[1].grad)  # type: ignore[attr-defined, unused-ignore]


@pytest.mark.parametrize(
    "change",
    [
        _set("foreach", False),
        _not_fused,
        _set("amsgrad", False),  # as it is
        _set("lr", torch.tensor(1e-2)),
        _set("differentiable", False),
        _other_step,
        _turned,
        _no_state,
        _half,
        _one_counter,
        _own_gradient,
        _negated,
        _set("betas", (0.9, 1.5)),
        _set("lr", 1e39),
        _set("eps", 1e39),
    ],
    ids=[
        "single",
        "neither",
        "plain",
        "rate",
        "also_plain",
        "steps",
        "turned",
        "no_state",
        "dtypes",
        "counter",
        "own",
        "negated",
        "betas",
        "overflow",
        "eps",
    ],
)
def test_anything_else_is_left_to_torch(
    change: Callable[[list[nn.Parameter], Any], None],
    kernel: FakeKernel,
    request: pytest.FixtureRequest,
) -> None:
    pair = twins(torch.optim.Adam, foreach=True)
    for params, optimizer in pair:
        change(params, optimizer)
    plain = request.node.callspec.id in ("plain", "also_plain")
    if request.node.callspec.id in ("dtypes", "rate", "betas", "overflow"):  # torch refuses these
        assert not adamstep.step_at_once(pair[1][1], type(pair[1][1]).step.__wrapped__)  # type: ignore[attr-defined]
    else:
        step_both(pair)
        assert left(*pair[0]) == left(*pair[1])
    assert bool(kernel.steps) is plain


def test_a_subclass_or_few_elements_are_left_to_torch(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(torch.optim.AdamW):
        pass

    step_both(twins(Own, foreach=True))
    monkeypatch.setattr(adamstep, "_LEAST", 100)
    step_both(twins(torch.optim.AdamW, foreach=True))
    assert not kernel.steps


def test_whoever_looks_at_torchs_operations_sees_them(kernel: FakeKernel) -> None:
    pair = twins(torch.optim.AdamW, foreach=True)
    with Looks() as looks:
        step_both(pair)
    assert torch._foreach_addcdiv_ in looks.seen and not kernel.steps
    assert left(*pair[0]) == left(*pair[1])


def test_a_default_device_is_nobody_who_looks(kernel: FakeKernel) -> None:
    """Many scripts set one, and it is a mode of torch's."""
    pair = twins(torch.optim.AdamW, foreach=True)
    with torch.device("meta"):
        step_both(pair)
    assert kernel.steps and left(*pair[0]) == left(*pair[1])


def test_what_others_keep_in_groups_is_no_setting(kernel: FakeKernel) -> None:
    """Schedulers put names of their own there."""
    pair = twins(torch.optim.AdamW, foreach=True)
    for _, optimizer in pair:
        optimizer.param_groups[0] |= {"initial_lr": 1e-2, "name": "all"}
    step_both(pair)
    assert kernel.steps and left(*pair[0]) == left(*pair[1])


@pytest.mark.parametrize(
    ("foreach", "fused", "on_gpu", "on_host"),
    [
        (None, None, "foreach", None),
        (None, False, None, None),
        (None, True, "fused", "fused"),
        (False, None, None, None),
        (True, None, "foreach", "foreach"),
        (True, False, "foreach", "foreach"),
    ],
)
def test_which_kernels_torch_chooses(
    foreach: bool | None, fused: bool | None, on_gpu: str | None, on_host: str | None
) -> None:
    said = {"foreach": foreach, "fused": fused}
    assert flavour_of(said, torch.device("cuda")) == on_gpu
    assert flavour_of(said, torch.device("cpu")) == on_host
