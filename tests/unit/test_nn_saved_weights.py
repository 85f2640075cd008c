"""A saved weight shows the bytes from when it was saved, whichever code saved it, and however."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_nn import asked, same_bits, seed
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem.nn.compat import refusing
from tiermem.nn.compat.hookpair import change_pushed
from tiermem.nn.tensors.placeholder import placeholder

WIDTH = 32
KEEP: Any = (lambda t: t, lambda t: t)
KEEP_IN_LIST: Any = (lambda t: [t], lambda packed: packed[0])
CHANGE: Any = (lambda t: t.to(torch.bfloat16), lambda t: t.float())


class Scale(torch.autograd.Function):
    """Multiplies by a weight, and saves the weight itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class OwnParameter(nn.Parameter):
    """A class of the user's own."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.last(self.norm(x)))


Use = Callable[[nn.ModuleList, int, torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """Layers, and what is done with a weight of each beside its call."""

    def __init__(self, use: Use | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if self.use is not None:
                x = self.use(self.layers, index, x)
            x = layer(x)
        return x


def function(layers: nn.ModuleList, index: int, x: torch.Tensor) -> torch.Tensor:
    weight = layers[index - 1].norm.weight  # of the one whose backward comes after this one
    return Scale.apply(x, weight)  # type: ignore[no-any-return]


def inner_hooks(layers: nn.ModuleList, index: int, x: torch.Tensor) -> torch.Tensor:
    norm = layers[index].norm
    with saved_tensors_hooks(*KEEP):
        return nn.functional.layer_norm(x, (WIDTH,), norm.weight, norm.bias)


def recomputed_hooks(layers: nn.ModuleList, index: int, x: torch.Tensor) -> torch.Tensor:
    def run(x: torch.Tensor) -> torch.Tensor:
        return inner_hooks(layers, index, x)

    return checkpoint(run, x, use_reentrant=False)  # type: ignore[no-any-return]


def model_of(use: Use | None = None, number: int = 0) -> Model:
    seed(number)
    return Model(use)


def data(number: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(3, WIDTH, generator=generator).requires_grad_()


Program = Callable[[nn.Module, Callable[[], Any], Any], torch.Tensor]


@contextmanager
def tiers(hbm: int, home: str = "dram", **options: Any) -> Iterator[tiermem.TierManager]:
    policy = {"params": home}
    with tiermem.TierManager("cpu", hbm=hbm, dram="4MiB", policy=policy, **options) as tier:
        yield tier


def least(home: str, run: Callable[[int], None]) -> None:
    """Runs with the least HBM that the errors ask for."""
    hbm = 4 * 4096
    for _ in range(20):
        try:
            return run(hbm)
        except tiermem.CapacityError as error:
            assert asked(error)[1] > hbm, error
            hbm = asked(error)[1]
    raise AssertionError("no budget was enough")


def follow(program: Program, use: Use | None, home: str, hbm: int | None) -> None:
    """A model and a second one, both in the tiers, have the gradients that they have without."""
    plain, other = model_of(use), model_of(number=1)
    x = data()
    program(plain, lambda: other(data(1)), None).backward()
    found = [p.grad for p in plain.parameters()]

    def run(hbm: int) -> None:
        with tiers(hbm, home) as tier:
            model, second = tier.wrap(model_of(use)), tier.wrap(model_of(number=1))
            program(model, lambda: second(data(1)), tier).backward()
            for param, expected in zip(model.parameters(), found, strict=True):
                assert (param.grad is None) == (expected is None)
                assert expected is None or same_bits(param.grad.clone(), expected)

    del x
    least(home, run) if hbm is None else run(hbm)


def forward_then_other(model: nn.Module, other: Callable[[], Any], tier: Any) -> torch.Tensor:
    loss: torch.Tensor = model(data()).square().mean()
    other()
    return loss


@pytest.mark.parametrize("hbm", [None, 1 << 20], ids=["least", "plenty"])
@pytest.mark.parametrize("home", ["dram", "hbm"])
@pytest.mark.parametrize("use", [function, inner_hooks, recomputed_hooks])
def test_what_a_parent_saves_of_a_childs_weight(use: Use, home: str, hbm: int | None) -> None:
    """A function and hooks of the user's; a second model (DPO's reference) runs before backward."""
    follow(forward_then_other, use, home, hbm)


@pytest.mark.parametrize("hbm", [None, 1 << 20], ids=["least", "plenty"])
@pytest.mark.parametrize("pair", [KEEP, KEEP_IN_LIST, CHANGE], ids=["keep", "in list", "change"])
@pytest.mark.parametrize("where", ["around the model", "around an operation"])
def test_hooks_of_the_users_own_see_weights_as_without_tiers(
    where: str, pair: Any, hbm: int | None
) -> None:
    def program(model: nn.Module, other: Callable[[], Any], tier: Any) -> torch.Tensor:
        weight = model.layers[1].norm.weight  # type: ignore[index, union-attr]
        if where == "around the model":
            with saved_tensors_hooks(*pair):
                loss: torch.Tensor = model(data()).square().mean()
        else:
            x = model(data())
            with saved_tensors_hooks(*pair):
                loss = (x * weight).square().mean()
        other()
        return loss

    follow(program, None, "dram", hbm)


@pytest.mark.parametrize("home", ["dram", "hbm"])
def test_where_hooks_are_disabled_blocks_stay_for_the_graph(home: str) -> None:
    def program(model: nn.Module, other: Callable[[], Any], tier: Any) -> torch.Tensor:
        with disable_saved_tensors_hooks("not here"):
            loss: torch.Tensor = (model(data()) * model.layers[0].norm.bias).square().mean()  # type: ignore[index, union-attr]
        other()
        return loss

    follow(program, None, home, None)


def test_the_module_is_unwrapped_before_backward() -> None:
    def program(model: nn.Module, other: Callable[[], Any], tier: Any) -> torch.Tensor:
        loss = forward_then_other(model, other, tier)
        if tier is not None:
            tier.unwrap(model)
        return loss

    follow(program, function, "dram", None)
    follow(program, function, "hbm", 1 << 20)


def test_forward_inside_materialize_and_backward_after_it() -> None:
    def program(model: nn.Module, other: Callable[[], Any], tier: Any) -> torch.Tensor:
        if tier is None:
            return forward_then_other(model, other, tier)
        with tier.materialize(model):
            loss: torch.Tensor = model(data()).square().mean()
        other()
        return loss

    follow(program, None, "dram", None)


def test_a_parameter_of_a_class_of_the_users_own() -> None:
    def own(model: Model) -> Model:
        for layer in model.layers:
            layer.norm.weight = OwnParameter(layer.norm.weight.data.clone())
        return model

    plain = own(model_of())
    plain(data()).sum().backward()

    def run(hbm: int) -> None:
        with tiers(hbm) as tier:
            model = tier.wrap(own(model_of()))
            model(data()).sum().backward()
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert theirs.grad is not None and same_bits(mine.grad.clone(), theirs.grad)

    least("dram", run)


@pytest.mark.parametrize("spare", [2.0, 3.0])
def test_weights_at_home_in_hbm_beside_state_that_streams(spare: float) -> None:
    def build() -> nn.Module:
        seed(3)
        return nn.Sequential(nn.TransformerEncoderLayer(96, 2, 256, 0.0, batch_first=True))

    plain = build()
    weights = sum(p.numel() * p.element_size() for p in plain.parameters())
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    with tiers(int(weights * spare), "hbm") as tier:
        model = tier.wrap(build())
        found = train(model, tier.optimizer(model, torch.optim.AdamW, lr=0.01))
    assert found == expected


def train(model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for step in range(3):
        loss = model(data(step).detach().reshape(1, 1, 96)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_a_transform_of_torch_func_is_right_or_refused(transform: Any) -> None:
    """It takes no hooks, and weights that it saves are the parameters themselves."""

    def build() -> nn.Module:
        seed(4)
        return nn.Sequential(*[nn.Sequential(nn.LayerNorm((8, 64)), nn.Tanh()) for _ in range(5)])

    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(5))
    plain = build()
    expected = transform(lambda x: plain(x).square().mean())(x)
    refused = []

    def run(hbm: int) -> None:
        refused.append(hbm)
        with tiers(hbm) as tier:
            model = tier.wrap(build())
            assert same_bits(transform(lambda x: model(x).square().mean())(x), expected)

    least("dram", run)
    assert len(refused) > 1  # less than all of the weights was not enough


def test_a_step_that_is_owed_is_seen_by_what_was_saved_before_it() -> None:
    """Saved before the step it is an error, as without tiers; saved after it, it is right."""
    model = model_of(function)
    with tiers(1 << 20) as tier:
        tier.wrap(model)
        optimizer = tier.optimizer(model, torch.optim.SGD, lr=0.1, overlap="forward")
        model(data()).sum().backward()
        stale = model(data()).sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.backward()
        optimizer.zero_grad()
        plain = copy.deepcopy(model)
        for net in (plain, model):
            net(data()).sum().backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert theirs.grad is not None and same_bits(mine.grad.clone(), theirs.grad)


def away() -> torch.Tensor:
    """Returns a parameter as code that tiermem does not see has it while its block is away."""
    param = nn.Parameter(torch.randn(4, 4))
    param.data = placeholder(param.shape, param.dtype, param.device)
    return param


@pytest.mark.parametrize(
    "read",
    [
        lambda p: p + 1,
        lambda p: p.detach() * 1,
        lambda p: p.data.clone(),
        lambda p: torch.ones(2, 4) @ p.t(),
        lambda p: nn.functional.layer_norm(torch.ones(2, 4), (4,), p[0]),
        lambda p: p.detach().numpy(),
        lambda p: p.tolist(),
        lambda p: p.data_ptr(),
        lambda p: p.detach().zero_(),
        lambda p: p.isnan(),
        lambda p: Scale.apply(torch.ones(4, 4), p),
        lambda p: torch.utils.dlpack.to_dlpack(p.detach()),
    ],
)
def test_what_is_not_there_cannot_be_read(read: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(RuntimeError, match=r"Storage that is invalid|not in HBM"):
        read(away())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_no_dtype_can_be_read_and_nothing_is_read_of_nothing(dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match=r"Storage that is invalid|not in HBM"):
        placeholder(torch.Size((3,)), dtype, torch.device("cpu")).clone()
    assert placeholder(torch.Size((0, 3)), dtype, torch.device("cpu")).clone().shape == (0, 3)


def test_torch_is_told_what_to_say_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, str]] = []
    monkeypatch.setattr(refusing, "_WITH_TEXT", lambda *args: told.append(args))
    tensor = torch.zeros(3)
    assert refusing.refuse(tensor, "gone") and told == [(tensor.untyped_storage()._cdata, "gone")]


@pytest.mark.parametrize("sets", [lambda tensor: None, lambda tensor: tensor.fill_(7)])
def test_what_is_not_found_is_not_set(monkeypatch: pytest.MonkeyPatch, sets: Any) -> None:
    monkeypatch.setattr(refusing, "_WITH_TEXT", None)
    monkeypatch.setattr(torch._C, "_set_throw_on_mutable_data_ptr", sets)
    refusing._switches.cache_clear()
    try:
        tensor = torch.zeros(3)
        assert not refusing.refuse(tensor, "gone")
        assert tensor.tolist() == [0, 0, 0]
    finally:
        refusing._switches.cache_clear()


def test_pairs_are_changed_as_they_are_pushed() -> None:
    pushed: list[Any] = []
    autograd = SimpleNamespace(_push_saved_tensors_default_hooks=lambda *pair: pushed.append(pair))
    change_pushed(lambda pair: (pair[1], pair[0]), autograd)
    autograd._push_saved_tensors_default_hooks(*KEEP)
    assert pushed == [(KEEP[1], KEEP[0])]


def test_nothing_waits_for_the_backward_of_what_a_checkpoint_computes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has none: only what it saves is used."""
    plain, model = nn.ModuleList([Layer(), Layer()]), nn.ModuleList([Layer(), Layer()])
    model.load_state_dict(plain.state_dict())
    hooked: list[torch.Tensor] = []
    register = torch.Tensor.register_hook

    def registering(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        hooked.append(tensor)
        return register(tensor, hook)

    def run(layers: nn.ModuleList) -> torch.Tensor:
        x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).requires_grad_()
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().sum()

    run(plain).backward()
    with tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB") as tier:
        tier.wrap(model)
        monkeypatch.setattr(torch.Tensor, "register_hook", registering)
        result = run(model)
        assert hooked
        del hooked[:]
        result.backward()
        assert not hooked
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)


def test_what_a_checkpoint_began_with_is_kept_by_its_graph_alone() -> None:
    """One is covered for each module in it, by a pair that is found again: not beyond the call."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([Layer(), Layer()])
            self.begun: list[StorageWeakRef] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = x * 2
                self.begun.append(StorageWeakRef(x.untyped_storage()))
                x = checkpoint(part, x, use_reentrant=False)
            return x

    model = Checkpointed()
    with tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB") as tier:
        tier.wrap(model, ["parts.0.norm", "parts.0.last", "parts.1.norm", "parts.1.last"])
        result = model(torch.ones(2, WIDTH, requires_grad=True))
        assert [begun.expired() for begun in model.begun] == [False] * 2
        del result
        assert [begun.expired() for begun in model.begun] == [True] * 2
        model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
        assert [begun.expired() for begun in model.begun] == [True] * 4


def test_a_checkpoint_may_save_a_number() -> None:
    """A weight without dimensions, in place of which it is given something of that shape."""

    class Scaled(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(1.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.factor

    def gradients(layers: nn.ModuleList) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        x.square().sum().backward()
        return [layer.factor.grad.clone() for layer in layers]

    seed(0)
    layers = nn.ModuleList([Scaled(), Scaled(), Scaled()])
    expected = gradients(copy.deepcopy(layers))
    with tiermem.TierManager("cpu", hbm="24KiB", dram="1MiB") as tier:
        found = gradients(tier.wrap(layers))
    assert all(map(same_bits, expected, found))


def replace(module: nn.Module, *_: Any) -> None:
    module.weight.data = torch.full_like(module.weight, 0.25)  # type: ignore[operator, arg-type]


@pytest.mark.parametrize("pair", [None, KEEP], ids=["alone", "users hooks"])
@pytest.mark.parametrize("home", ["dram", "hbm"])
@pytest.mark.parametrize("how", ["before", "after", "between"])
def test_a_weight_that_is_given_other_data_after_its_use(how: str, home: str, pair: Any) -> None:
    """Backward of torch has the old values, which are gone here: it is refused, or right."""

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        layer = model.layers[1].last  # type: ignore[index, union-attr]
        if how == "before":
            layer.register_forward_pre_hook(replace)
        elif how == "after":
            layer.register_forward_hook(replace)
        with saved_tensors_hooks(*pair) if pair else nullcontext():
            loss = model(data()).square().mean()
        if how == "between":
            replace(layer)
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]

    with tiers(1 << 20, home) as tier:
        model = tier.wrap(model_of())
        if how == "before":
            for mine, other in zip(gradients(model), gradients(model_of()), strict=True):
                assert same_bits(mine, other)
        else:
            with pytest.raises(RuntimeError, match="needed for gradient computation has been mod"):
                gradients(model)
            model.layers[1].last._forward_hooks.clear()
            model(data()).sum().backward()  # of the next forward nothing is refused


@pytest.mark.parametrize("home", ["dram", "hbm"])
def test_a_weight_itself_that_was_saved_shows_what_it_is_given(home: str) -> None:
    """So it does with torch, which has saved the parameter."""

    def gradient(model: nn.Module) -> torch.Tensor:
        model.layers[0].norm.register_forward_hook(replace)  # type: ignore[index, union-attr]
        x = data()
        model(x).square().mean().backward()
        assert x.grad is not None
        return x.grad

    with tiers(1 << 20, home) as tier:
        assert same_bits(gradient(tier.wrap(model_of())), gradient(model_of()))


@pytest.mark.parametrize("itself", [False, True])
def test_a_weight_that_is_given_anothers_data_of_its_block(itself: bool) -> None:
    """Where others' hooks see what is saved, torch does not count changes."""

    def gradient(model: nn.Module) -> torch.Tensor:
        x = torch.ones(2, WIDTH, requires_grad=True)
        with saved_tensors_hooks(*KEEP):
            loss = model(x).square().mean()
        first, second = model[0], model[1]  # type: ignore[index]
        second.weight.data = (second if itself else first).weight.data
        loss.backward()
        assert x.grad is not None
        return x.grad

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))

    with tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB") as tier:
        model = tier.wrap(made(), [""])
        if itself:
            assert same_bits(gradient(model), gradient(made()))
        else:
            with pytest.raises(RuntimeError, match="was given other data"):
                gradient(model)
