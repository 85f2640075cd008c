"""Parameters and copies of a wrapped model are what users expect of them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support_nn import check_table, same_bits
from torch import nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn.utils import (
    parameters_to_vector,
    parametrizations,
    parametrize,
    prune,
    vector_to_parameters,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem.nn.groups import away

LAYERS, WIDTH = 6, 32


def build() -> nn.Sequential:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 4)
    return model


def data() -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)


@pytest.fixture
def tier() -> Iterator[tiermem.TierManager]:
    """HBM has room for three of the six layers, and their gradients."""
    with tiermem.TierManager("cpu", hbm="40KiB", dram="4MiB") as tier:
        yield tier
        check_table(tier)


@pytest.fixture
def plain() -> nn.Sequential:
    return build()


@pytest.fixture
def model(tier: tiermem.TierManager) -> nn.Sequential:
    return tier.wrap(build())


def test_the_class_of_a_parameter_makes_ordinary_parameters(
    model: nn.Sequential, plain: nn.Sequential
) -> None:
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        made = type(param)(torch.ones(3), requires_grad=False)
        assert type(made) is nn.Parameter
        assert not made.requires_grad
        assert same_bits(made * 2, torch.full((3,), 2.0))
        of_itself = type(param)(param)
        assert type(of_itself) is nn.Parameter
        assert same_bits(of_itself, other)


def test_a_parameter_of_a_parameter_is_one_over_the_same_memory(
    tier: tiermem.TierManager, model: nn.Sequential, plain: nn.Sequential
) -> None:
    made = nn.Parameter(model[2].weight, requires_grad=False)
    assert type(made) is nn.Parameter
    assert isinstance(made, nn.Parameter)
    assert not made.requires_grad
    assert vars(made) == {}
    assert same_bits(made, plain[2].weight)
    made.zero_()
    model(data())  # it leaves no room for the block to move: what was written is seen
    assert not model[2].weight.any()
    del made
    model(data())
    assert not dict(model.state_dict())["2.weight"].any()


def test_what_torch_makes_of_the_class_by_itself_is_ordinary(model: nn.Sequential) -> None:
    param = model[0].weight
    for stray in (torch.ones(3).as_subclass(type(param)), copy.copy(param)):
        assert type(copy.deepcopy(stray)) is nn.Parameter
        assert (stray + 1).shape == stray.shape
        assert type(stray) is nn.Parameter
    stray = torch.ones(3).as_subclass(type(param))
    assert type(pickle.loads(pickle.dumps(stray))) is nn.Parameter


def test_copy_copy_of_a_parameter_shares_its_memory_and_attributes(
    model: nn.Sequential, plain: nn.Sequential
) -> None:
    for linear in (model[1], plain[1]):
        linear.weight.tag = "mine"
        copied = copy.copy(linear.weight)
        assert type(copied) is nn.Parameter
        assert copied is not linear.weight
        assert copied.tag == "mine"
        assert copied.requires_grad
        with torch.no_grad():
            copied.mul_(2)
    assert same_bits(model[1].weight, plain[1].weight)


def test_copy_copy_of_a_module_is_another_one_with_the_same_parameters(
    tier: tiermem.TierManager,
) -> None:
    class Scaled(nn.Linear):
        factor = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.factor

    class Stated(Scaled):
        def __getstate__(self) -> Any:
            return {**self.__dict__, "factor": self.factor * 2}

    for kind in (Scaled, Stated):
        plain, model = kind(WIDTH, WIDTH), kind(WIDTH, WIDTH)
        model.load_state_dict(plain.state_dict())
        tier.wrap(nn.Sequential(model, *(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))))
        copied, other = copy.copy(model), copy.copy(plain)
        copied.factor = other.factor = copied.factor + 3
        assert same_bits(copied(data()), other(data()))
        assert same_bits(model(data()), plain(data()))
        assert copied.weight is model.weight


def test_names_and_texts(model: nn.Sequential, plain: nn.Sequential) -> None:
    param, other = model[4].weight, plain[4].weight
    assert isinstance(param, nn.Parameter)
    assert param.__class__.__name__ == "Parameter"
    assert repr(param) == repr(other)
    param._is_param = True  # as subclasses of Tensor have it that are parameters
    assert param._is_param
    assert isinstance(param, nn.Parameter)
    assert same_bits(param, other)


def test_lists_of_parameters(model: nn.Sequential, plain: nn.Sequential) -> None:
    ours, theirs = nn.ParameterList(model.parameters()), nn.ParameterList(plain.parameters())
    assert repr(ours) == repr(theirs)
    assert ours[3] is model[1].bias
    assert ours[3] in set(model.parameters())
    assert same_bits(sum(p.sum() for p in ours), sum(p.sum() for p in theirs))


def test_a_vector_to_parameters(model: nn.Sequential, plain: nn.Sequential) -> None:
    values = torch.linspace(-1, 1, sum(p.numel() for p in plain.parameters()))
    for each in (model, plain):
        vector_to_parameters(values, each.parameters())
    assert same_bits(model(data()), plain(data()))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = functional_call(model, params, data()).square().sum()
        return found

    return list(grad(loss)(dict(model.named_parameters())).values())


def per_sample(model: nn.Module) -> list[torch.Tensor]:
    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = functional_call(model, params, x.unsqueeze(0)).square().sum()
        return found

    params = {name: param.detach() for name, param in model.named_parameters()}
    return list(vmap(grad(loss), in_dims=(None, 0))(params, data()).values())


AT_ONCE: dict[str, Callable[[nn.Module], Any]] = {
    "vmap": lambda model: vmap(model)(data().reshape(2, 2, WIDTH)),
    "jacrev": lambda model: jacrev(model)(data()[:1]),
    "grad": gradients,
    "per sample": per_sample,
    "parameters_to_vector": lambda model: parameters_to_vector(model.parameters()),
    "stack": lambda model: torch.stack([layer.weight for layer in model.children()]),
    "parameters": lambda model: [nn.Parameter(p) for p in model.parameters()],
}


@pytest.mark.parametrize("name", AT_ONCE)
@pytest.mark.one_in(2)
def test_what_needs_all_weights_at_once_says_materialize_and_works_there(
    tier: tiermem.TierManager, model: nn.Sequential, plain: nn.Sequential, name: str
) -> None:
    use = AT_ONCE[name]
    with pytest.raises(tiermem.CapacityError, match=r"works inside `with tier\.materialize"):
        use(model)
    with tier.materialize(model):
        found = use(model)
    expected = use(plain)
    if isinstance(expected, torch.Tensor):
        found, expected = [found], [expected]
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
    assert same_bits(model(data()), plain(data()))


TRANSFORMS: dict[str, Callable[[nn.Module], Any]] = {
    "grad": lambda model: grad(lambda params: sum(p.pow(3).sum() for p in params))(
        [model[0].weight.view_as(model[0].weight), *list(model.parameters())[8:]]
    ),
    "vmap": lambda model: [vmap(lambda row: row.exp().sum())(next(model.parameters()))],
    "jacrev": lambda model: [jacrev(lambda p: p.pow(3))(list(model.parameters())[1])],
    "nested": lambda model: vmap(grad(lambda row: row.pow(3).sum()))(next(model.parameters())),
    "gradient": lambda model: [vmap(torch.sum)(next(model.parameters()).grad)],
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_weights_that_are_away(
    model: nn.Sequential, plain: nn.Sequential, name: str
) -> None:
    for each in (model, plain):
        each(data()).square().mean().backward()
    found, expected = TRANSFORMS[name](model), TRANSFORMS[name](plain)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def test_a_call_with_other_weights_that_finds_no_room_puts_the_own_ones_back(
    tier: tiermem.TierManager, model: nn.Sequential, plain: nn.Sequential
) -> None:
    before = list(model.parameters())
    with pytest.raises(tiermem.CapacityError) as held:
        gradients(model)  # the error keeps what fills HBM, and so what is put back has no room
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    del held
    assert same_bits(model(data()), plain(data()))


def test_an_average_of_weights_with_less_hbm_than_they_take(
    tier: tiermem.TierManager, model: nn.Sequential, plain: nn.Sequential
) -> None:
    optimizer = tier.optimizer(model, torch.optim.SGD, lr=0.1)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    averages = [
        AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for each in (model, plain)
    ]
    for _ in range(3):
        for each, stepper in ((model, optimizer), (plain, other)):
            each(data()).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
        with tier.materialize(model):
            averages[0].update_parameters(model)
        averages[1].update_parameters(plain)
    with pytest.raises(tiermem.CapacityError, match="materialize"):
        averages[0].update_parameters(model)
    with tier.materialize(model):
        averages[0].update_parameters(model)
    averages[1].update_parameters(plain)
    for a, b in zip(averages[0].parameters(), averages[1].parameters(), strict=True):
        assert same_bits(a, b)


class Proud(nn.Module):
    """Copies itself in its own way, and refers to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.own = self.forward
        self.copies = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.inner(x))
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Proud:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(vars(self), memo))
        copied.copies = self.copies + 1
        return copied


class Double(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Twin(nn.Module):
    """Calls a twin of its layers, with weights of its own, as libraries make one."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return twin(self.layers, Around)(x)


class Around(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.inside = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x)


def twin(module: nn.Module, cls: type[nn.Module]) -> nn.Module:
    made = cls.__new__(cls)
    nn.Module.__init__(made)
    for name, value in module.__dict__.items():
        if name not in ("_parameters", "_buffers", "_modules"):
            setattr(made, name, value)
    for name, value in module.named_parameters(recurse=False):
        made.register_parameter(name, nn.Parameter(value.detach().clone() + 1))
    for name, child in module.named_children():
        kind = nn.Sequential if isinstance(child, nn.Sequential) else Double
        made.add_module(name, twin(child, kind))
    return made


@pytest.mark.parametrize("hbm", ["40KiB", "1MiB"])
def test_a_module_that_is_given_all_attributes_of_a_wrapped_one_is_called_itself(
    hbm: str, plain: nn.Sequential
) -> None:
    """Outside of calls of the wrapped one, and inside of them."""
    plain = Around(*plain)  # type: ignore[assignment]
    results = twin(plain, Around)(data()), plain(data())
    model = Twin(copy.deepcopy(plain))
    with tiermem.TierManager("cpu", hbm=hbm, dram="4MiB") as tier, torch.no_grad():
        tier.wrap(model)
        for _ in range(4):
            made = twin(model.layers, Around)
            for _ in range(2):
                assert same_bits(made(data()), results[0])
                assert same_bits(model(data()), results[0])
                assert same_bits(model.layers(data()), results[1])


def test_a_deepcopy_is_an_ordinary_module_that_can_be_wrapped(tier: tiermem.TierManager) -> None:
    plain = nn.Sequential(build(), Proud())
    model = tier.wrap(copy.deepcopy(plain))
    for _ in range(2):  # a copy of the copy as well
        twin, plain = copy.deepcopy(model), copy.deepcopy(plain)
        for ours, theirs in zip(twin.modules(), plain.modules(), strict=True):
            assert vars(ours).keys() == vars(theirs).keys()
            assert type(ours._parameters) is dict
        assert twin[1].copies == model[1].copies + 1
        assert twin[1].own.__self__ is twin[1]
        assert same_bits(twin(data()), plain(data()))
        with pytest.raises(tiermem.WrapError, match="not wrapped here"):
            tier.unwrap(twin)
        tier.wrap(twin)
        twin(data()).sum().backward()
        plain(data()).sum().backward()
        for ours, theirs in zip(twin.parameters(), plain.parameters(), strict=True):
            assert same_bits(ours.grad.clone(), theirs.grad)
        model = tier.unwrap(twin)
        pickle.dumps(model)
    part = tier.wrap(copy.deepcopy(model[0]))
    assert same_bits(part(data()), plain[0](data()))


def test_a_wrapped_module_is_copied_as_its_class_says(tier: tiermem.TierManager) -> None:
    class Stateful(nn.Linear):
        def __getstate__(self) -> dict[str, Any]:
            return {**vars(self), "copied": True}

    model = tier.wrap(Stateful(WIDTH, WIDTH))
    twin = copy.deepcopy(model)
    assert twin.copied
    assert same_bits(twin.weight, model.weight)
    assert tier.wrap(twin) is twin


@pytest.mark.parametrize("size", [4, 64])
def test_buffers_that_look_into_each_other_do_so_in_the_tiers(
    tier: tiermem.TierManager, size: int
) -> None:
    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(size, size)
            self.register_buffer("all", torch.zeros(size, size))
            self.register_buffer("first", self.all[0])
            self.register_buffer("others", self.all[1:])
            self.register_buffer("apart", torch.zeros(size, size))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.first += x.mean()
            self.others[0] += self.all[0]
            self.apart += self.others[0]
            return self.layer(x) + self.all.sum() + self.apart.sum()

    plain = Windows()
    model, x = tier.wrap(copy.deepcopy(plain)), torch.ones(2, size)
    for _ in range(3):
        assert same_bits(model(x), plain(x))
    tier.unwrap(model)
    assert same_bits(model(x), plain(x))


@pytest.mark.parametrize("trained", [False, True])
def test_a_tensor_in_a_parameters_place_is_copied(tier: tiermem.TierManager, trained: bool) -> None:
    """Code that exchanges weights for a call may leave one (functional_call, of a shared layer)."""
    model, value = nn.Linear(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH, requires_grad=trained)
    model._parameters["weight"] = value.detach().clone().requires_grad_(trained)
    twin = copy.deepcopy(tier.wrap(model))
    assert type(twin.weight) is torch.Tensor and twin.weight.requires_grad is trained
    assert same_bits(twin.weight, value)


@pytest.mark.parametrize(
    "change",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,  # its right inverse is written before the weight is taken out
    ],
)
def test_parametrizations_belong_before_wrap(
    tier: tiermem.TierManager, model: nn.Sequential, plain: nn.Sequential, change: Any
) -> None:
    with pytest.raises(tiermem.ParameterError, match=r"weight_norm.*before tier\.wrap"):
        change(model[1])
    assert same_bits(model(data()), plain(data()))
    tier.unwrap(model)
    for each in (model, plain):
        torch.manual_seed(0)
        change(each[1])
    tier.wrap(model)
    for each in (model, plain):
        each(data()).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert same_bits(ours.grad.clone(), theirs.grad)


class Halved(nn.Module):
    """A function of a weight."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


class InCalls(nn.Module):
    """Layers of which one has a function in the place of its weight, for the time of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = build()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.layers[2]
        parametrize.register_parametrization(layer, "weight", Halved())
        layer.parametrizations.weight.original.requires_grad_(True)
        self.calls += 1
        try:
            if self.calls == 3:
                raise ValueError("in between")
            with parametrize.cached():
                return self.layers(x)
        finally:
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)


@pytest.mark.parametrize("hbm", ["40KiB", "4MiB"])
def test_a_function_in_the_place_of_a_parameter_for_a_call(hbm: str) -> None:
    plain, model = InCalls(), InCalls()
    with tiermem.TierManager("cpu", hbm=hbm, dram="4MiB") as tier:
        tier.wrap(model)
        optimizers = [
            torch.optim.AdamW(plain.parameters(), lr=1e-2),
            tier.optimizer(model, torch.optim.AdamW, lr=1e-2),
        ]
        for step in range(7):
            for each, optimizer in zip((plain, model), optimizers, strict=True):
                if step == 2:
                    with pytest.raises(ValueError, match="in between"):
                        each(data())
                    continue
                each(data()).square().sum().backward()
                optimizer.step()
                if step % 2:
                    optimizer.zero_grad()
        assert list(model.state_dict()) == list(plain.state_dict())
        assert same_bits(model(data()), plain(data()))
        with pytest.raises(tiermem.ParameterError, match=r"before tier\.wrap"):
            parametrize.register_parametrization(model.layers[2], "weight", Halved())
        check_table(tier)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert same_bits(ours, theirs)


def test_a_function_is_refused_outside_of_calls_by_torchs_own_name_too(
    tier: tiermem.TierManager, model: nn.Sequential
) -> None:
    """That name may have been imported before torch's function was replaced."""
    torchs: Any = parametrize.register_parametrization
    with pytest.raises(tiermem.ParameterError, match=r"before tier\.wrap"):
        torchs.__wrapped__(model[2], "weight", Halved())


class Recomputed(nn.Module):
    """Parts that put a function in the place of a weight, computed again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(InCalls() for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            part.calls = 10  # none of them raises
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("hbm", ["64KiB", "4MiB"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_function_in_the_place_of_a_parameter_in_what_is_computed_again(
    hbm: str, reentrant: bool
) -> None:
    plain, model = Recomputed(reentrant), Recomputed(reentrant)
    model.load_state_dict(plain.state_dict())
    with tiermem.TierManager("cpu", hbm=hbm, dram="4MiB") as tier:
        tier.wrap(model)
        for _ in range(3):
            for each in (plain, model):
                each(data().requires_grad_()).square().sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert same_bits(ours.grad.clone(), theirs.grad)
        check_table(tier)


def test_a_parameter_that_is_set_to_itself_is_not_written(
    tier: tiermem.TierManager, model: nn.Sequential, plain: nn.Sequential
) -> None:
    with torch.no_grad():
        for param in model.parameters():
            model(data())
            assert param.set_(param) is param
        assert same_bits(model(data()), plain(data()))
    assert "hbm->dram" not in tier.stats().links


@pytest.mark.parametrize("meanwhile", [True, False])
def test_another_tensor_is_refused_where_a_function_is_or_was(
    tier: tiermem.TierManager, plain: nn.Sequential, meanwhile: bool
) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = build()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            layer = self.layers[1]
            other = nn.Parameter(torch.ones(WIDTH, WIDTH))
            parametrize.register_parametrization(layer, "weight", Halved())
            weight = layer.parametrizations.weight.original
            try:
                if meanwhile:
                    layer._parameters["weight"] = other
            finally:
                parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
            try:
                layer.weight = other
            finally:
                layer.weight = weight
            return self.layers(x)

    model = tier.wrap(Other())
    with pytest.raises(tiermem.ParameterError, match="cannot be replaced"):
        model(data())
    assert same_bits(model.layers(data()), plain(data()))


def test_a_refused_pruning_leaves_no_second_name(
    model: nn.Sequential, plain: nn.Sequential
) -> None:
    """It registers the weight under another name before it takes it out."""
    for name in ("weight", "bias"):
        with pytest.raises(tiermem.ParameterError, match="cannot be replaced"):
            prune.l1_unstructured(model[1], name, 0.5)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert same_bits(model(data()), plain(data()))


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("home", ["dram", "hbm"])
@pytest.mark.parametrize(
    ("put", "take_out"),
    [
        (partial(prune.l1_unstructured, name="weight", amount=0.5), prune.remove),
        (nn.utils.weight_norm, nn.utils.remove_weight_norm),
    ],
    ids=["pruning", "weight norm"],
)
def test_a_refused_removal_leaves_a_weight_as_it_was(
    home: Any, put: Callable[..., Any], take_out: Callable[..., Any]
) -> None:
    """It deletes what is shown, and gives the weight other data, before it takes that out."""
    model = build()
    put(model[1])
    plain = copy.deepcopy(model.state_dict())
    expected = model(data())
    with tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB", policy={"params": home}) as tier:
        tier.wrap(model)
        model(data())
        for _ in range(2):
            with pytest.raises(tiermem.ParameterError, match="cannot be replaced"):
                take_out(model[1], "weight")
            assert isinstance(model[1].weight, torch.Tensor)
            assert len(model[1]._forward_pre_hooks) == 1
            assert all(map(same_bits, model.state_dict().values(), plain.values()))
            assert list(model.state_dict()) == list(plain)
            assert same_bits(model(data()), expected)


@pytest.mark.parametrize("use", [torch.sum, torch.Tensor.detach, lambda weight: weight.data])
@pytest.mark.parametrize("where", ["Held", "writes"])
def test_ctrl_c_between_the_lines_of_an_operation_leaves_no_block_held(
    tier: tiermem.TierManager,
    model: nn.Sequential,
    plain: nn.Sequential,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    use: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """As the block has just been taken, and before it is given back."""
    own = getattr(away, where)

    def cut(*args: Any) -> Any:
        own(*args)
        raise KeyboardInterrupt

    with torch.no_grad():
        model(data())
        with monkeypatch.context() as patch:
            patch.setattr(away, where, cut)
            with pytest.raises(KeyboardInterrupt):
                use(model[0].weight)
        assert same_bits(model(data()), plain(data()))
    assert not any(group.holds for group in tier._runtime.groups)
    check_table(tier)


def test_a_state_dict_brings_nothing_to_the_device(
    tier: tiermem.TierManager, model: nn.Sequential, plain: nn.Sequential
) -> None:
    model[0].register_parameter("own", nn.Parameter(torch.ones(3)))  # is none of the tiers'
    plain[0].register_parameter("own", nn.Parameter(torch.ones(3)))
    model(data())
    before = tier.stats().links
    state = model.state_dict()
    assert tier.stats().links == before
    assert list(state) == list(plain.state_dict())
    assert all(same_bits(state[name], value) for name, value in plain.state_dict().items())
    assert not any(value.requires_grad for value in state.values())
    assert state["0.own"].data_ptr() == model[0].own.data_ptr()


def test_a_state_dict_of_modules_with_small_buffers_alone_can_be_saved(
    tier: tiermem.TierManager,
) -> None:
    """Statistics and what counts them have one block in HBM, of several dtypes."""
    model = tier.wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, affine=False)))
    model(data())
    state = model.state_dict()
    kept = {name: value.clone() for name, value in state.items()}
    model(data() + 1)
    assert all(same_bits(state[name], value) for name, value in kept.items())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file)
    assert all(same_bits(loaded[name], value) for name, value in kept.items())
    model.load_state_dict(loaded)
    assert all(same_bits(model.state_dict()[name], value) for name, value in kept.items())


class Grows(nn.Linear):
    """Has other weights after each call, and looks at them in it.

    Attributes:
        seen: What it saw.
    """

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data * 1.5
        twin = copy.deepcopy(self, {id(self.seen): None})
        for weight in (self.state_dict()["weight"], twin.weight, copy.deepcopy(self.weight)):
            self.seen.append(weight.detach().clone())
        return super().forward(x)


def test_what_a_call_gives_a_weight_is_seen_by_copies_in_it(tier: tiermem.TierManager) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*[Grows() for _ in range(LAYERS)])
    model = tier.wrap(copy.deepcopy(plain))
    for _ in range(2):
        assert same_bits(plain(data()), model(data()))
    for one, other in zip(plain, model, strict=True):
        assert len(one.seen) == 6
        assert all(same_bits(a, b) for a, b in zip(one.seen, other.seen, strict=True))
