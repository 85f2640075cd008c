"""What is pickled of a wrapped model is the model of plain torch, with the values of now."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import pickletools
import subprocess
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from support_nn import same_bits
from torch import nn

import tiermem

WIDTH = 32


class Around(nn.Module):
    """Weights by several names, buffers of both sizes, and an attribute of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(4)
        )
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding.weight
        self.first = self.layers[0][0].weight
        self.listed = [self.layers[1][0].weight, "text"]
        self.shares = nn.Parameter(self.layers[2][0].weight.data)
        self.layers[3][0].weight.requires_grad_(False)
        self.register_buffer("large", torch.randn(WIDTH, WIDTH))
        self.register_buffer("small", torch.randn(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        x = self.recurrent(x[None])[0][0] @ self.shares
        found: torch.Tensor = self.head(x) + self.large.sum() + self.small.mean()
        return found


class Reduced(nn.Linear):
    """Says by itself how it is pickled, as torch.fx's modules do."""

    def __reduce__(self) -> Any:
        return _rebuilt, (type(self), {"names": self.__dict__})


def _rebuilt(kind: type, found: dict[str, Any]) -> nn.Module:
    module: nn.Module = kind(1, 1)
    module.__dict__.update(found["names"])
    return module


class Stated(nn.Linear):
    """Has a state of its own form."""

    def __getstate__(self) -> Any:
        return "mine", dict(self.__dict__)

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state[1])


class Ordered(nn.Linear):
    """Has a state of another class of dictionaries."""

    def __getstate__(self) -> Any:
        return OrderedDict(self.__dict__)


class Paired(nn.Linear):
    """Has its names set one by one, as classes do that are dictionaries, too."""

    def __reduce__(self) -> Any:
        return type(self), (1, 1), None, None, iter(self.__dict__.items())

    def __setitem__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value


class Hidden(nn.Linear):
    """Has its names in an object that nobody looks into."""

    def __getstate__(self) -> Any:
        return types.SimpleNamespace(**self.__dict__)


def doubles(module: nn.Module, given: Any, result: torch.Tensor) -> torch.Tensor:
    return 2 * result


FILES: list[bytes] = []


def keep(module: nn.Module, given: Any) -> None:
    FILES.append(saved([module, module._parameters]))


def pair() -> list[Any]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Around()
        model.layers[0].register_forward_hook(doubles)
        model.layers[1][0].weight.note = "of a program"
        for number, buffer in enumerate(model.buffers()):
            buffer.note = ["of a program", number]
        models.append(model)
    return models


def tokens() -> torch.Tensor:
    return torch.arange(0, WIDTH, 4)


def step(model: nn.Module, optimizer: Any) -> None:
    model(tokens()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved(value: Any, **how: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **how)
    return stream.getvalue()


def loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def named(data: bytes) -> set[str]:
    """The classes and functions that a file of ``torch.save`` names."""
    with ZipFile(io.BytesIO(data)) as archive:
        inside = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        return {
            str(a) for op, a, _ in pickletools.genops(archive.read(inside)) if op.name == "GLOBAL"
        }


def check_same(ours: Any, plain: Any) -> None:
    for one, other in zip(ours.modules(), plain.modules(), strict=True):
        assert type(one) is type(other)
        assert vars(one).keys() == vars(other).keys()
        assert type(one._parameters) is type(one._buffers) is dict
    mine, theirs = dict(ours.named_parameters()), dict(plain.named_parameters())
    assert mine.keys() == theirs.keys()
    for name, param in mine.items():
        assert type(param) is nn.Parameter
        assert param.requires_grad == theirs[name].requires_grad
        assert vars(param) == vars(theirs[name])
        assert same_bits(param, theirs[name])
        assert param.untyped_storage().nbytes() == param.nbytes
    for (name, buffer), (_, other) in zip(ours.named_buffers(), plain.named_buffers(), strict=True):
        assert same_bits(buffer, other), name
        assert buffer.note == other.note
    assert ours.head.weight is ours.embedding.weight
    assert ours.first is ours.layers[0][0].weight
    assert ours.listed[0] is ours.layers[1][0].weight
    assert same_bits(ours(tokens()), plain(tokens()))


WAYS: dict[str, tuple[Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "torch.save": (saved, loaded),
    "an old file": (lambda m: saved(m, _use_new_zipfile_serialization=False), loaded),
    "pickle": (pickle.dumps, pickle.loads),
    "in Python": (pickle._dumps, pickle.loads),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("home", ["dram", "nvme", "hbm"])
def test_a_pickled_model_is_the_plain_one(tmp_path: Path, home: Any) -> None:
    plain, model = pair()
    hbm = "1MiB" if home == "hbm" else "96KiB"
    policy = tiermem.Policy(params=home)
    with tiermem.TierManager("cpu", hbm, "4MiB", tmp_path, policy=policy) as tier:
        tier.wrap(model)
        adam = torch.optim.AdamW
        optimizers = adam(plain.parameters(), lr=1e-2), tier.optimizer(model, adam, lr=1e-2)
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            step(one, optimizer)
            one(tokens()).sum().backward()  # plain torch leaves gradients out, too
        for name, (save, load) in WAYS.items():
            ours, expected = save(model), save(plain)
            if name == "torch.save":  # the others have addresses in them
                assert abs(len(ours) - len(expected)) <= 64  # a name that is not the same string
            assert b"tiermem" not in ours
            check_same(load(ours), load(expected))
        check_same(copy.deepcopy(model), copy.deepcopy(plain))
        assert named(saved(model)) == named(saved(plain))
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            step(one, optimizer)
        check_same(pickle.loads(pickle.dumps(model)), plain)
        with pytest.raises(tiermem.StepError, match="state_dict"):
            pickle.dumps(optimizers[1])


def test_what_is_pickled_together_stays_together() -> None:
    plain, model = pair()
    with tiermem.TierManager("cpu", "96KiB", "4MiB") as tier:
        tier.wrap(model)
        for one in (plain, model):
            whole = {"model": one, "part": one.head, "all": list(one.parameters()), "epoch": 3}
            found = loaded(saved(whole))
            assert found["part"] is found["model"].head
            params = list(found["model"].parameters())
            assert all(a is b for a, b in zip(found["all"], params, strict=True))
            shared = found["model"].layers[2][0].weight
            assert found["model"].shares is not shared
            assert found["model"].shares.data_ptr() == shared.data_ptr()
        early = loaded(saved(model))
        with torch.no_grad():
            model.shares.add_(1)
        late = loaded(saved(model))
        assert same_bits(early.shares + 1, late.shares)
        assert late.shares.data_ptr() == late.layers[2][0].weight.data_ptr()


def test_a_process_without_tiermem_loads_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    with tiermem.TierManager("cpu", "12KiB", "1MiB") as tier:
        torch.save(tier.wrap(model), tmp_path / "model.pt")
        expected = float(model(torch.ones(1, WIDTH)).sum().item())
    code = (
        "import sys, torch; sys.modules['tiermem'] = None\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "print(repr(model(torch.ones(1, int(sys.argv[2]))).sum().item()))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "model.pt"), str(WIDTH)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) == expected


@pytest.mark.parametrize("kind", [Reduced, Stated, Ordered])
def test_classes_that_say_how_they_are_pickled_or_copied(kind: type[nn.Linear]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*[kind(WIDTH, WIDTH) for _ in range(4)]), torch.ones(1, WIDTH)
    expected = model(x)
    with tiermem.TierManager("cpu", "12KiB", "1MiB") as tier:
        tier.wrap(model)
        data = pickle.dumps(model)
        assert b"tiermem" not in data
        for other in (pickle.loads(data), copy.deepcopy(model)):
            assert type(other[0]._parameters) is dict
            assert same_bits(other(x), expected)
        assert same_bits(model(x), expected)


@pytest.mark.parametrize("kind", [Hidden, Paired])
def test_a_pickle_that_could_not_be_loaded_is_refused(kind: type[nn.Linear]) -> None:
    model = nn.Sequential(*[kind(WIDTH, WIDTH) for _ in range(4)])
    with tiermem.TierManager("cpu", "12KiB", "1MiB") as tier:
        tier.wrap(model)
        with pytest.raises(tiermem.WrapError, match=rf"class {kind.__name__} .*unwrap"):
            pickle.dumps(model)
    assert pickle.dumps(model)


def test_a_class_whose_names_are_set_one_by_one_is_copied() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Paired(WIDTH, WIDTH) for _ in range(4)]), torch.ones(1, WIDTH)
    expected = model(x)
    with tiermem.TierManager("cpu", "12KiB", "1MiB") as tier:
        assert same_bits(copy.deepcopy(tier.wrap(model))(x), expected)


def test_pickled_inside_a_call() -> None:
    """The weights of what is called are ordinary tensors over the block's memory then."""
    plain, model = pair()
    FILES.clear()
    with tiermem.TierManager("cpu", "96KiB", "4MiB") as tier:
        tier.wrap(model)
        for one in (plain, model):
            found = [one.layers[1][0].register_forward_pre_hook(keep)]
            found.append(one.recurrent.register_forward_pre_hook(keep))
            one(tokens())
            for hook in found:
                hook.remove()
        for ours, expected in zip(FILES[2:], FILES[:2], strict=True):
            (mine, names), (theirs, _) = loaded(ours), loaded(expected)
            assert names["bias" if "bias" in names else "bias_hh_l0"] is not None
            for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
                assert same_bits(one, other)
            nbytes = sum(p.untyped_storage().nbytes() for p in mine.parameters())
            assert nbytes == sum(p.nbytes for p in theirs.parameters())
            if isinstance(mine, nn.LSTM):
                assert mine._flat_weights[0] is mine.weight_ih_l0
        assert same_bits(model(tokens()), plain(tokens()))


def test_what_is_materialized_is_pickled_as_it_is() -> None:
    plain, model = pair()
    with tiermem.TierManager("cpu", "96KiB", "4MiB") as tier:
        tier.wrap(model)
        with tier.materialize(model.recurrent):
            check_same(pickle.loads(pickle.dumps(model)), plain)


def test_another_process_gets_no_wrapped_model() -> None:
    _, model = pair()
    with tiermem.TierManager("cpu", "96KiB", "4MiB") as tier:
        tier.wrap(model)
        for thing in (model, model.head, model.head.weight, [model.recurrent.bias_hh_l0]):
            process = multiprocessing.get_context("spawn").Process(target=print, args=(thing,))
            with pytest.raises(tiermem.WrapError, match="deepcopy"):
                process.start()


def test_a_module_with_all_attributes_of_another_is_told_apart() -> None:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    with tiermem.TierManager("cpu", "12KiB", "1MiB") as tier:
        tier.wrap(model)
        twin = nn.Linear.__new__(nn.Linear)
        twin.__dict__.update(model[1].__dict__)
        twin.__dict__["_parameters"] = {"weight": nn.Parameter(torch.zeros(3, 3)), "bias": None}
        with pytest.raises(tiermem.WrapError, match="pickle it again"):
            pickle.dumps(twin)
        assert pickle.loads(pickle.dumps(twin)).weight.shape == (3, 3)
        assert pickle.loads(pickle.dumps(model[1])).weight.shape == (WIDTH, WIDTH)
