"""Parameters of tensor subclasses that wrap others, as quantizing libraries have them."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support_nn import same_bits
from support_shells import (
    LAYER,
    WIDTH,
    Assigning,
    Nested,
    Noting,
    Quantized,
    Remade,
    Scaled,
    Trained,
    quantized,
)
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem.nn.tensors.shells import Shell, insides

KINDS = [Quantized, Assigning, Nested, Noting, Scaled]
HBM = 3 * LAYER // 4096 * 4096


def manager(hbm: int = HBM, **settings: Any) -> tiermem.TierManager:
    return tiermem.TierManager("cpu", hbm=hbm, dram="4MiB", **settings)


def inputs(seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, WIDTH, generator=generator).bfloat16()


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors are of one class and have the same bits, inside if they wrap others."""
    mine, theirs = insides(first), insides(second)
    paths = [path for path, _ in mine] == [path for path, _ in theirs]
    return (
        type(first) is type(second)
        and paths
        and all(same_bits(a, b) for (_, a), (_, b) in zip(mine, theirs, strict=True))
    )


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> Iterator[type[Quantized]]:
    yield request.param


def test_they_come_up_and_are_not_written_home(kind: type[Quantized]) -> None:
    plain, model, x = quantized(kind), quantized(kind), inputs()
    expected = plain(x)
    params = list(model.parameters())
    with manager() as tier:
        tier.wrap(model)
        assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
        for _ in range(3):
            assert same_bits(model(x), expected)
        links = tier.stats().links
        assert links["dram->hbm"].nbytes > 3 * LAYER
        assert "hbm->dram" not in links
    assert same_bits(model(x), expected)
    for before, after in zip(plain.parameters(), model.parameters(), strict=True):
        assert same(before, after)


def test_put_together_on_another_device(kind: type[Quantized]) -> None:
    weight: Any = kind.of(torch.randn(8, 8))
    shell = Shell.of(weight)
    assert shell is not None
    made = shell.around([tensor.to("meta") for _, tensor in insides(weight)])
    assert type(made) is kind and made.is_meta and weight.device.type == "cpu"
    again = Shell.of(made)
    assert again is not None and same(again.around([t for _, t in insides(weight)]), weight)


def test_used_outside_of_calls(kind: type[Quantized]) -> None:
    plain, model, x = quantized(kind), quantized(kind), inputs()
    with manager() as tier:
        tier.wrap(model)
        for index in range(6):
            mine, theirs = model[index].wide.weight, plain[index].wide.weight
            assert isinstance(mine, kind) and isinstance(mine, nn.Parameter)
            assert (mine.dtype, mine.device, mine.shape) == (
                theirs.dtype, theirs.device, theirs.shape,
            )  # fmt: skip
            assert same_bits(functional.linear(x, mine), functional.linear(x, theirs))
            assert same_bits(mine.value(), theirs.value())
            for (_, a), (_, b) in zip(insides(mine), insides(theirs), strict=True):
                assert same_bits(a + 0, b + 0)
            clone = mine.clone()
            assert type(clone) is kind and same(clone, theirs.clone())
            again = nn.Parameter(mine, requires_grad=False)
            assert isinstance(again, kind) and type(copy.copy(mine)) is kind
            del again
        assert same_bits(model(x), plain(x))


def _copy_outside(model: Any, layer: int, other: Any) -> None:
    with torch.no_grad():
        model[layer].wide.weight.copy_(other[layer].wide.weight.detach())


def _write_inside(model: Any, layer: int, other: Any) -> None:
    with torch.no_grad():
        for _, tensor in insides(model[layer].back.weight):
            tensor.mul_(2)


def _load(model: Any, layer: int, other: Any) -> None:
    model[layer].load_state_dict(other[layer].state_dict())


def _assign(model: Any, layer: int, other: Any) -> None:
    value = other[layer].back.weight.detach().clone()
    model[layer].back.weight = nn.Parameter(value, requires_grad=False)


def _copy_in_a_call(model: Any, layer: int, other: Any) -> None:
    given = other[layer].wide.weight.detach().clone()

    def hook(module: nn.Module, args: Any) -> None:
        with torch.no_grad():
            module.weight.copy_(given)  # type: ignore[operator]

    handle = model[layer].wide.register_forward_pre_hook(hook)
    model(inputs(3))
    handle.remove()


WAYS: list[Callable[[Any, int, Any], None]] = [
    _copy_outside, _write_inside, _load, _assign, _copy_in_a_call,
]  # fmt: skip


@pytest.mark.parametrize("write", WAYS, ids=lambda way: way.__name__)
@pytest.mark.one_in(2)
def test_what_is_written_stays(kind: type[Quantized], write: Callable[..., None]) -> None:
    plain, model, other, x = quantized(kind), quantized(kind), quantized(kind, seed=9), inputs()
    with manager() as tier:
        tier.wrap(model)
        model(x)
        for layer in (1, 4):
            write(model, layer, other)
            write(plain, layer, other)
            for _ in range(2):
                assert same_bits(model(x), plain(x))
        for key, value in plain.state_dict().items():
            assert same(model.state_dict()[key], value), key
    assert same_bits(model(x), plain(x))
    for before, after in zip(plain.parameters(), model.parameters(), strict=True):
        assert same(before, after)


STEPS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5)), min_size=1, max_size=12)


@given(STEPS, st.data())
def test_programs_at_random(steps: list[tuple[int, int]], data: st.DataObject) -> None:
    """Writes of all kinds, looks, copies, and models that leave and come back."""
    kind = data.draw(st.sampled_from(KINDS))
    plain, model, other = quantized(kind), quantized(kind), quantized(kind, seed=9)
    with manager(data.draw(st.sampled_from([HBM, 2 * HBM, 8 * HBM]))) as tier:
        tier.wrap(model)
        for way, layer in steps:
            if way < len(WAYS):
                WAYS[way](model, layer, other)
                WAYS[way](plain, layer, other)
            elif way == 5:
                x = inputs(layer)
                assert same_bits(model[layer](x), plain[layer](x))
            elif way == 6:
                mine, theirs = model[layer].state_dict(), plain[layer].state_dict()
                assert all(same(mine[key], theirs[key]) for key in theirs)
            elif way == 7:
                twin = copy.deepcopy(model)
                assert same_bits(twin(inputs()), plain(inputs()))
            else:
                tier.unwrap(model)
                for before, after in zip(plain.parameters(), model.parameters(), strict=True):
                    assert same(before, after)
                tier.wrap(model)
        assert same_bits(model(inputs()), plain(inputs()))
    assert same_bits(model(inputs()), plain(inputs()))


@pytest.mark.parametrize("recomputed", [None, False, True], ids=["kept", "again", "reentrant"])
@pytest.mark.one_in(2)
def test_gradients_through_them(kind: type[Quantized], recomputed: bool | None) -> None:
    """Of inputs and of what is trained beside them."""

    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in model:
            if recomputed is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=recomputed)
        return x

    results = []
    for tiered in (False, True):
        model = quantized(kind)
        for layer in model:
            layer.adapter.requires_grad_(True)
        tier = manager() if tiered else None
        if tier is not None:
            tier.wrap(model)
            optimizer: Any = tier.optimizer(model, torch.optim.AdamW, lr=1e-2)
        else:
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=1e-2)
        found = []
        for step in range(4):
            x = inputs(step).requires_grad_()
            run(model, x).float().square().mean().backward()
            found.append(x.grad)
            optimizer.step()
            optimizer.zero_grad()
        if tier is not None:
            tier.close()
        results.append((found, [p.detach().clone() for p in model.parameters()]))
    (mine, weights), (theirs, others) = results
    assert all(same_bits(a, b) for a, b in zip(mine, theirs, strict=True))
    assert all(same(a, b) for a, b in zip(weights, others, strict=True))


def test_a_function_that_saves_them() -> None:
    """Its backward finds them, though their block has left HBM meanwhile."""

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
            ctx.save_for_backward(weight.detach())
            return x @ weight.value().t()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            (weight,) = ctx.saved_tensors
            return gradient @ weight.value(), None

    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(Quantized.of(torch.randn(WIDTH, WIDTH)), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = Linear.apply(x, self.weight)
            return found

    torch.manual_seed(0)
    model = nn.Sequential(*[Saving() for _ in range(12)])
    plain, gradients = copy.deepcopy(model), []
    with manager(hbm=4 * 8192) as tier:
        tier.wrap(model)
        for each in (model, plain):
            x = inputs().requires_grad_()
            each(x).float().sum().backward()
            gradients.append(x.grad)
    assert same_bits(*gradients)


def test_materialized_they_are_ordinary(kind: type[Quantized]) -> None:
    plain, model, x = quantized(kind), quantized(kind), inputs()
    with manager() as tier:
        tier.wrap(model)
        model(x)
        weight = model[2].wide.weight
        for target in (model[2], weight):
            with tier.materialize(target):
                assert type(weight) is kind
                insides(weight)[0][1].neg_()
            insides(plain[2].wide.weight)[0][1].neg_()
            assert same_bits(model(x), plain(x))


@pytest.mark.parametrize("nvme", [False, True], ids=["dram", "nvme"])
def test_saved_and_loaded(kind: type[Quantized], nvme: bool, tmp_path: Path) -> None:
    plain, model, x = quantized(kind), quantized(kind), inputs()
    settings: dict[str, Any] = {"nvme": tmp_path, "policy": {"params": "nvme"}} if nvme else {}
    with manager(**settings) as tier:
        tier.wrap(model)
        tier.save(tmp_path / "saved")
        for layer in range(6):
            _write_inside(model, layer, model)
        assert not same_bits(model(x), plain(x))
        tier.load(tmp_path / "saved")
        assert same_bits(model(x), plain(x))


def test_shared_parameters_and_shared_codes() -> None:
    plain = quantized()
    plain[1].wide.weight = plain[0].wide.weight
    inner: Any = plain[2].back.weight
    plain[3].back.weight = nn.Parameter(Quantized(inner.codes, inner.scale), requires_grad=False)
    plain[3].back.weight.codes = inner.codes
    model, x = copy.deepcopy(plain), inputs()
    model[3].back.weight.codes = model[2].back.weight.codes
    with manager() as tier:
        tier.wrap(model)
        assert same_bits(model(x), plain(x))
        with torch.no_grad():
            model[2].back.weight.codes.neg_()
            inner.codes.neg_()
        assert same_bits(model(x), plain(x))
        state = model.state_dict()
        assert state["0.wide.weight"] is state["1.wide.weight"]


def test_two_threads_use_one_weight() -> None:
    """One uses it by itself while the other may hold it in a call."""
    plain, model, x = quantized(), quantized(), inputs()
    expected = [functional.linear(x, layer.wide.weight) for layer in plain]
    whole, wrong = plain(x), list[str]()
    with manager(hbm=2 * HBM) as tier:
        tier.wrap(model)

        def calls() -> None:
            wrong.extend("a call" for _ in range(20) if not same_bits(model(x), whole))

        def uses() -> None:
            for _ in range(20):
                for layer, result in zip(model, expected, strict=True):
                    if not same_bits(functional.linear(x, layer.wide.weight), result):
                        wrong.append("a use by itself")

        threads = [threading.Thread(target=each) for each in (calls, uses)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_weight_that_takes_gradients() -> None:
    """They are ordinary ones, as those of parameters that came after wrap."""
    plain, model, x = quantized(), quantized(), inputs()
    for each in (plain, model):
        each[1].wide.weight.requires_grad_(True)
    with manager() as tier:
        tier.wrap(model)
        assert model[1].wide.weight.requires_grad
        assert same_bits(model(x.requires_grad_()), plain(x))
        with pytest.raises(tiermem.StepError, match=r"1\.wide\.weight.*wraps other tensors"):
            tier.optimizer(model, torch.optim.SGD, lr=0.1)
        model[1].wide.weight.requires_grad_(False)
        tier.optimizer(model, torch.optim.SGD, lr=0.1)


def test_a_wrap_that_is_refused_changes_nothing(kind: type[Quantized]) -> None:
    plain, model, x = quantized(kind), quantized(kind), inputs()
    with manager(hbm=4096) as tier, pytest.raises(tiermem.CapacityError):
        tier.wrap(model)
    assert same_bits(model(x), plain(x))
    for before, after in zip(plain.parameters(), model.parameters(), strict=True):
        assert same(before, after)


def test_what_cannot_be_done_is_refused() -> None:
    model, x = quantized(), inputs()
    expected = model(x)
    with manager() as tier:
        tier.wrap(model)
        weight = model[0].wide.weight
        for refused in (
            lambda: setattr(weight, "data", weight),
            lambda: weight.set_(torch.zeros(1)),
            weight.share_memory_,
            lambda: setattr(model[0].wide, "weight", nn.Parameter(torch.zeros(3))),
            lambda: model.to(torch.float32),
        ):
            with pytest.raises(tiermem.ParameterError):
                refused()
        assert same_bits(model(x), expected)


def test_a_pickle_has_an_ordinary_parameter_around_ordinary_tensors() -> None:
    model, x = quantized(), inputs()
    expected = model(x)
    with manager() as tier:
        tier.wrap(model)
        data = pickle.dumps(model)
        weight = pickle.loads(pickle.dumps(model[0].wide.weight))
    assert b"tiermem" not in data
    assert same(weight, model[0].wide.weight)
    loaded = pickle.loads(data)
    assert same_bits(loaded(x), expected)
    for before, after in zip(model.parameters(), loaded.parameters(), strict=True):
        assert same(before, after)
        assert vars(before).keys() == vars(after).keys()


def _apart(model: Any) -> None:
    model[0].wide.weight = nn.Parameter(Remade.of(torch.randn(8, 8)), requires_grad=False)


def _elsewhere(model: Any) -> None:
    model[0].wide.weight.scale = model[0].wide.weight.scale.to("meta")


def _trained(model: Any) -> None:
    model[0].wide.weight.scale.requires_grad_(True)


@pytest.mark.parametrize("change", [_apart, _elsewhere, _trained], ids=lambda f: f.__name__)
def test_what_cannot_be_moved_is_refused(change: Callable[[Any], None]) -> None:
    model = quantized()
    change(model)
    with manager() as tier, pytest.raises(tiermem.WrapError, match=r"0\.wide\.weight.*inside"):
        tier.wrap(model)


def _factor(weight: Any) -> None:
    weight.factor = 3.0


def _zero_point(weight: Any) -> None:
    weight.zero = torch.full((1,), 2.0, dtype=torch.bfloat16)


def _no_zero_point(weight: Any) -> None:
    weight.zero = None


CHANGES = [_factor, _zero_point, _no_zero_point]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_copies_are_of_what_a_weight_is_by_now(change: Callable[[Any], None]) -> None:
    """A program may change what is said beside the tensors inside, and which there are."""
    plain, model, x = quantized(Scaled), quantized(Scaled), inputs()
    for each in (plain, model):
        _zero_point(each[4].wide.weight)
    with manager() as tier:
        tier.wrap(model)
        model(x)
        for each in (plain, model):
            change(each[4].wide.weight)
        expected = plain(x)
        copied = quantized(Scaled, seed=5)
        _zero_point(copied[4].wide.weight)
        change(copied[4].wide.weight)
        copied.load_state_dict(model.state_dict())
        for each in (model, copy.deepcopy(model), copied):
            assert same_bits(each(x), expected)
        mine, theirs = (each.state_dict()["4.wide.weight"] for each in (model, plain))
        assert same(mine, theirs)
        assert mine.factor == theirs.factor
    assert same_bits(model(x), expected)


def test_a_weight_of_another_factor_is_not_taken_for_one_of_this() -> None:
    plain, model, x = quantized(Scaled), quantized(Scaled), inputs()
    other = quantized(Scaled, seed=5)[1].wide.weight.detach()
    other.factor = 2.0
    with manager() as tier:
        tier.wrap(model)
        with pytest.raises(tiermem.ParameterError, match="cannot be replaced"):
            model[1].wide.weight = nn.Parameter(other, requires_grad=False)
        assert same_bits(model(x), plain(x))


def test_what_is_assigned_says_whether_it_is_trained() -> None:
    model, other = quantized(), quantized(seed=5)
    with manager() as tier:
        tier.wrap(model)
        for trained in (True, False):
            value = other[1].wide.weight.detach()
            model[1].wide.weight = nn.Parameter(value, requires_grad=trained)
            assert model[1].wide.weight.requires_grad is trained


def test_copies_have_what_programs_have_put_on_them(kind: type[Quantized]) -> None:
    plain, model = quantized(kind), quantized(kind)
    for each in (plain, model):
        each[1].wide.weight.tag = ["of a program"]
        each[1].wide.weight.requires_grad_()
        each[1].wide.weight.grad = torch.ones(4 * WIDTH, WIDTH, dtype=torch.bfloat16)
    with manager() as tier:
        tier.wrap(model)
        for copies in (
            lambda each: copy.deepcopy(each[1].wide.weight),
            lambda each: copy.deepcopy(each)[1].wide.weight,
            lambda each: copy.copy(each[1].wide.weight),
        ):
            mine, theirs = copies(model), copies(plain)
            assert same(mine, theirs)
            assert vars(mine).keys() == vars(theirs).keys()
            assert mine.tag == theirs.tag
            assert mine.requires_grad and theirs.requires_grad
            assert (mine.grad is None) == (theirs.grad is None)


def test_parameters_of_another_class_without_tensors_inside_are_copied() -> None:
    class Named(torch.Tensor):
        pass

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    weight: Any = nn.Parameter(torch.eye(WIDTH).as_subclass(Named))
    weight.tag = ["of a program"]
    model[0].weight = weight
    with manager() as tier:
        tier.wrap(model)
        copied: Any = copy.deepcopy(model)[0].weight
        assert type(copied) is Named and isinstance(copied, nn.Parameter) and copied.requires_grad
        assert copied.tag == weight.tag and same_bits(copied, weight)


def _shared(kind: type[Quantized], *, alike: bool = False) -> Any:
    """Returns layers of which the third and the last have the codes of one weight."""
    model = quantized(kind)
    first, last = model[2].back.weight, model[5].back.weight
    last.codes = first.codes.detach() if alike else first.codes
    return model


def test_tensors_inside_that_two_weights_of_several_blocks_have() -> None:
    """Operations on one of them find all that is inside, also below torch's functions."""
    plain, model, x = _shared(Quantized), _shared(Quantized), inputs()
    with manager(hbm=2 * LAYER + 4 * 4096) as tier:
        tier.wrap(model)
        assert same_bits(model(x), plain(x))
        for layer in (2, 5):
            for other in (0, 1, 3):
                model[other](x)
            mine, theirs = (each[layer].back.weight for each in (model, plain))
            assert same(mine.clone(), theirs.clone())


def test_memory_inside_that_two_weights_of_several_blocks_have_is_refused() -> None:
    plain, model, x = _shared(Quantized), _shared(Quantized, alike=True), inputs()
    with (
        manager(hbm=2 * LAYER + 4 * 4096) as tier,
        pytest.raises(tiermem.WrapError, match=r"5\.back\.weight.*another block"),
    ):
        tier.wrap(model)
    assert same_bits(model(x), plain(x))


def test_a_tensor_inside_that_is_a_parameter_elsewhere() -> None:
    models = []
    for first, second in ((1, 4), (4, 1)):
        for _ in range(2):
            model = quantized()
            scale = model[first].back.weight.scale
            model[first].back.weight.scale = nn.Parameter(scale, requires_grad=False)
            model[second].scale = model[first].back.weight.scale
            models.append(model)
    x = inputs()
    for plain, model in (models[:2], models[2:]):
        with manager(hbm=2 * LAYER + 4 * 4096) as tier:
            tier.wrap(model)
            for layer in (1, 4):
                assert same_bits(model(x), plain(x))
                mine, theirs = (each[layer].back.weight for each in (model, plain))
                assert same(mine.clone(), theirs.clone())


@pytest.mark.parametrize("hbm", [5 * LAYER, 20 * LAYER], ids=["leaves", "stays"])
def test_one_that_is_written_before_backward_needs_it_is_refused(hbm: int) -> None:
    """As by torch, which counts on the parameter what its class writes inside."""
    plain, model, x = quantized(Trained), quantized(Trained), inputs()
    with manager(hbm=hbm) as tier:
        tier.wrap(model)
        for each in (plain, model):
            each.requires_grad_()
            loss = each(x).float().square().mean()
            with torch.no_grad():
                each[1].wide.weight.add_(1.0)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


class _TakenApart(nn.Linear):
    """Enters what is inside its weight into state dicts, by names of its own."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for path, tensor in [*insides(self.weight), (".bias", self.bias)]:
            destination[f"{prefix}weight{path}"] = tensor if keep_vars else tensor.detach()
        destination[f"{prefix}bias"] = self.bias.detach()


def test_modules_that_take_their_weights_apart_leave_no_view_behind() -> None:
    """Else their blocks would be written home, as they may have been written by such a view."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        layers = [_TakenApart(WIDTH, 4 * WIDTH, dtype=torch.bfloat16) for _ in range(6)]
        model = nn.Sequential(*layers)
        for each in model:
            weight = Quantized.of(each.weight.detach())
            each.weight = nn.Parameter(weight, requires_grad=False)
        models.append(model.requires_grad_(False))
    plain, model = models
    with manager() as tier:
        tier.wrap(model)
        mine, theirs = model.state_dict(), plain.state_dict()
        assert mine.keys() == theirs.keys()
        for _ in range(2):
            for each in model:
                each(inputs())
        assert all(same_bits(mine[key], theirs[key]) for key in theirs)
        assert "hbm->dram" not in tier.stats().links


def test_to_be_taken_apart_no_block_is_brought() -> None:
    """Classes ask for strides then, as quanto's do."""
    model = quantized(Scaled)
    weights = [layer.wide.weight for layer in model]  # to look one up brings its block
    with manager() as tier:
        tier.wrap(model)
        for weight in weights:
            assert weight.__tensor_flatten__()[1] == (1.0, str((WIDTH, 1)))
        assert "dram->hbm" not in tier.stats().links


def test_materialized_in_part(kind: type[Quantized]) -> None:
    """Operations on the whole find the part that is ordinary where it is."""
    plain, model, x = quantized(kind), quantized(kind), inputs()
    mine, theirs = model[0].wide.weight, plain[0].wide.weight
    with manager() as tier:
        tier.wrap(model)
        with tier.materialize([insides(mine)[0][1]]):
            for weight in (mine, theirs):
                insides(weight)[0][1].neg_()
            assert same(mine.clone(), theirs.clone())
            assert same_bits(model(x), plain(x))
        assert same_bits(model(x), plain(x))


def test_tensors_put_in_the_place_of_those_inside(tmp_path: Path) -> None:
    """They count, and are copied to those that were there when the model is saved, and at the end.

    On another device the parameter would be on two else.
    """
    plain, model, other, x = quantized(), quantized(), quantized(seed=5), inputs()
    with manager() as tier:
        tier.wrap(model)
        inside = [insides(model[layer].wide.weight)[1][1] for layer in (0, 3)]
        for layer in (0, 3):
            for each in (model, plain):
                weight = each[layer].wide.weight
                weight.scale = weight.scale * 2
            assert same_bits(model(x), plain(x))
            if layer == 0:
                tier.save(tmp_path / "saved")
                tier.load(tmp_path / "saved")
                assert same_bits(model(x), plain(x))
        with manager() as tier_of_other:
            tier_of_other.wrap(other)
            tier_of_other.load(tmp_path / "saved")
            assert same_bits(other[0](x), plain[0](x))
    assert all(a is model[layer].wide.weight.scale for a, layer in zip(inside, (0, 3), strict=True))
    assert same_bits(model(x), plain(x))
