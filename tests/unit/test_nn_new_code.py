"""Code that writes weights uncounted by torch: however it is called, whenever it comes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
from support_nn import same_bits, seed
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations

import tiermem

WIDTH, LAYERS = 32, 6


def scale(weight: torch.Tensor) -> None:
    weight.data.mul_(1.5)


def leave(weight: torch.Tensor) -> None:
    del weight


def swapped(weight: torch.Tensor) -> None:
    del weight


LATER: Any = None
FUNCTIONS = {"scale": scale}
LEAVES, SCALES = leave.__code__, scale.__code__


class Rule:
    """Writes by a method, or by what it was given."""

    given: Any = None

    def apply(self, weight: torch.Tensor) -> None:
        scale(weight)

    def run(self, weight: torch.Tensor) -> None:
        if self.given is not None:
            self.given(weight)


RULE = Rule()


class Layer(nn.Linear):
    """Has what may write its weight; changes no bit as it is."""

    later: Any = None

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.rule, self.rules, self.own = Rule(), [scale], None

    def write(self) -> None:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write()
        return super().forward(x)


class OfGlobalDict(Layer):
    def write(self) -> None:
        FUNCTIONS["scale"](self.weight)


class OfList(Layer):
    def write(self) -> None:
        for rule in self.rules:
            rule(self.weight)


class OfMethod(Layer):
    def write(self) -> None:
        self.rule.apply(self.weight)


class OfGlobalsMethod(Layer):
    def write(self) -> None:
        RULE.apply(self.weight)


class OfDefault(Layer):
    def write(self, rule: Callable[[torch.Tensor], None] = scale) -> None:
        rule(self.weight)


class OfKeyword(Layer):
    def write(self, *, rule: Callable[[torch.Tensor], None] = scale) -> None:
        rule(self.weight)


class OfText(Layer):
    def write(self) -> None:
        getattr(self.weight, "data").mul_(1.5)  # noqa: B009 - as it is to be found


class OfArray(Layer):
    def write(self) -> None:
        self.weight.detach().__array__()[:] *= 1.5


class Rules:
    """Writes by methods of the class, or as an object of it is made, called or entered."""

    @staticmethod
    def static(weight: torch.Tensor) -> None:
        scale(weight)

    @classmethod
    def of_class(cls, weight: torch.Tensor) -> None:
        cls.static(weight)

    def apply(self, weight: torch.Tensor) -> None:
        scale(weight)


class OfStatic(Layer):
    def write(self) -> None:
        Rules.static(self.weight)


class OfClass(Layer):
    def write(self) -> None:
        Rules.of_class(self.weight)


class OfMade(Layer):
    def write(self) -> None:
        rules = Rules()
        rules.apply(self.weight)


class Called:
    def __call__(self, weight: torch.Tensor) -> None:
        scale(weight)


class OfMadeAndCalled(Layer):
    def write(self) -> None:
        Called()(self.weight)


class Entered:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __enter__(self) -> None:
        scale(self.weight)

    def __exit__(self, *_: object) -> None:
        """Leaves what was written."""


class OfWith(Layer):
    def write(self) -> None:
        with Entered(self.weight):
            pass


class Applied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        scale(weight)
        return weight.sum()


class OfFunction(Layer):
    def write(self) -> None:
        Applied.apply(self.weight)


class Base(Layer):
    def rescale(self) -> None:
        scale(self.weight)


class OfSuper(Base):
    def rescale(self) -> None:
        super().rescale()

    def write(self) -> None:
        self.rescale()


class OfSetter(Layer):
    @property
    def factor(self) -> float:
        return 1.5

    @factor.setter
    def factor(self, value: float) -> None:
        scale(self.weight)

    def write(self) -> None:
        self.factor = 1.5


class OfGetter(Layer):
    def write(self) -> None:
        attrgetter("data")(self.weight).mul_(1.5)


class OfCallImpl(Layer):
    def _call_impl(self, *args: Any) -> Any:
        scale(self.weight)
        return super()._call_impl(*args)  # type: ignore[misc, no-untyped-call]

    def write(self) -> None:
        """Nothing here."""


class Changer:
    def change(self, weight: torch.Tensor) -> None:
        scale(weight)


class Holder:
    """Has what writes in a slot."""

    __slots__ = ("changer",)

    def __init__(self) -> None:
        self.changer = Changer()


class OfHolder(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.holders = {"some": [Holder()]}

    def write(self) -> None:
        self.holders["some"][0].changer.change(self.weight)


class OfClassAttribute(Layer):
    held = [[Rule()]]  # noqa: RUF012 - as it is to be found

    def write(self) -> None:
        self.held[0][0].apply(self.weight)


def closing_over(rule: Rule) -> Callable[[torch.Tensor], None]:
    return lambda weight: rule.apply(weight)


CLOSED = closing_over(RULE)


class OfClosure(Layer):
    def write(self) -> None:
        CLOSED(self.weight)


class OfObjectAsDefault(Layer):
    def write(self, rule: Rule = RULE) -> None:
        rule.apply(self.weight)


class OfImport(Layer):
    def write(self) -> None:
        from support_writing import Scaler

        Scaler().run(self.weight)


class Operated:
    """Writes by what code calls without a name."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def __matmul__(self, weight: torch.Tensor) -> None:
        scale(weight)

    def __setitem__(self, index: int, value: float) -> None:
        scale(self.weights[index])

    def __iter__(self) -> Iterator[int]:
        scale(self.weights[0])
        yield 0

    def __enter__(self) -> None:
        scale(self.weights[0])

    def __exit__(self, *_: object) -> None:
        """Leaves what was written."""


class OfOperated(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.operated = Operated()
        self.operated.weights.append(self.weight)


class OfOperator(OfOperated):
    def write(self) -> None:
        self.operated @ self.weight


class OfItem(OfOperated):
    def write(self) -> None:
        self.operated[0] = 1.5


class OfIteration(OfOperated):
    def write(self) -> None:
        for _ in self.operated:
            pass


class OfObjectEntered(OfOperated):
    def write(self) -> None:
        with self.operated:
            pass


class OfOwnOperator(Layer):
    def __imul__(self, factor: float) -> OfOwnOperator:
        scale(self.weight)
        return self

    def write(self) -> None:
        one = self
        one *= 1.5


class OfArrayThatShares(Layer):
    def write(self) -> None:
        found = np.array(self.weight.detach(), copy=None)
        found *= 1.5


class OfArrayOfDimensions(Layer):
    def write(self) -> None:
        found = np.atleast_2d(self.weight.detach())
        found *= 1.5


class OfTypedStorage(Layer):
    def write(self) -> None:
        weight = self.weight.detach()
        weight._typed_storage()[weight.storage_offset()] = 1.5


class OfGlobalLater(Layer):
    def write(self) -> None:
        if LATER is not None:
            LATER(self.weight)


class OfClassLater(Layer):
    def write(self) -> None:
        if self.later is not None:
            self.later(self.weight)


class OfOwnLater(Layer):
    def write(self) -> None:
        if self.own is not None:
            self.own(self.weight)


class OfObjectLater(Layer):
    def write(self) -> None:
        self.rule.run(self.weight)


class OfListLater(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.rules = []

    def write(self) -> None:
        for rule in self.rules:
            rule(self.weight)


class OfCodeLater(Layer):
    def write(self) -> None:
        swapped(self.weight)


def follow(kind: type[Layer], change: Callable[[nn.Sequential, bool], None]) -> None:
    """Compares forwards, of which the third and the sixth have code that writes."""
    seen = []
    for tiered in (False, True):
        seed(0)
        change(nn.Sequential(), False)
        model = nn.Sequential(*(kind() for _ in range(LAYERS)))
        hbm = sum(param.nbytes for param in model.parameters()) // 2
        with tiermem.TierManager("cpu", hbm=hbm, dram="1MiB") as tier, torch.no_grad():
            if tiered:
                tier.wrap(model, blocks=[str(number) for number in range(LAYERS)])
            x, found = torch.randn(2, WIDTH), []
            for number in range(8):
                change(model, number in (2, 5))
                found.append(model(x))
            change(model, False)
        seen.append((found, model.state_dict()))
    for mine, other in zip(seen[0][0], seen[1][0], strict=True):
        assert same_bits(mine, other)
    assert all(same_bits(value, seen[1][1][name]) for name, value in seen[0][1].items())


@pytest.mark.parametrize(
    "kind",
    [
        *(OfGlobalDict, OfList, OfMethod, OfGlobalsMethod, OfDefault, OfKeyword, OfText, OfArray),
        *(OfStatic, OfClass, OfMade, OfMadeAndCalled, OfWith, OfFunction, OfSuper, OfSetter),
        *(OfGetter, OfCallImpl),
        *(OfHolder, OfClassAttribute, OfClosure, OfObjectAsDefault, OfImport),
        *(OfOperator, OfItem, OfIteration, OfObjectEntered, OfOwnOperator),
        *(OfArrayThatShares, OfArrayOfDimensions),
        pytest.param(
            OfTypedStorage, marks=pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
        ),
    ],
)
def test_code_that_is_there_from_the_start(kind: type[Layer]) -> None:
    follow(kind, lambda _model, _on: None)


def set_global(_model: nn.Sequential, on: bool) -> None:
    globals()["LATER"] = scale if on else None


def set_class(_model: nn.Sequential, on: bool) -> None:
    OfClassLater.later = (lambda _self, weight: scale(weight)) if on else None


def set_own(model: nn.Sequential, on: bool) -> None:
    for layer in model:
        layer.own = scale if on else None  # type: ignore[assignment]


def set_object(model: nn.Sequential, on: bool) -> None:
    for layer in model:
        layer.rule.given = scale if on else None


def set_list(model: nn.Sequential, on: bool) -> None:
    for layer in model:
        layer.rules[:] = [scale] if on else []


def set_code(_model: nn.Sequential, on: bool) -> None:
    swapped.__code__ = SCALES if on else LEAVES


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (OfGlobalLater, set_global),
        (OfClassLater, set_class),
        (OfOwnLater, set_own),
        (OfObjectLater, set_object),
        (OfListLater, set_list),
        (OfCodeLater, set_code),
    ],
)
def test_code_that_comes_where_there_was_none(
    kind: type[Layer], change: Callable[[nn.Sequential, bool], None]
) -> None:
    follow(kind, change)


class Idle(Layer):
    def write(self) -> None:
        """Writes nothing."""


@pytest.fixture
def hook_of_all() -> Iterator[None]:
    def hook(module: nn.Module, *_: Any) -> None:
        if LATER is not None and isinstance(module, Layer):
            LATER(module.weight)

    handle = register_module_forward_hook(hook)
    yield
    handle.remove()


@pytest.mark.usefixtures("hook_of_all")
def test_what_a_hook_of_all_modules_calls_gets_code() -> None:
    follow(Idle, set_global)


def test_an_attribute_that_gets_a_tensor_is_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules keep what they have computed; their code is not looked at again for it."""

    class Keeps(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.rules = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.rules.append(x)  # type: ignore[arg-type]
            if self.own is not None:
                x = x + self.own
            self.own = nn.functional.linear(x, self.weight)  # type: ignore[assignment]
            return self.own  # type: ignore[return-value]

    looked = list[Any]()
    with tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB") as tier:
        model = tier.wrap(Keeps())
        model(torch.ones(2, WIDTH))
        found = tiermem.nn.wrap.intercepted.may_write_uncounted
        monkeypatch.setattr(
            "tiermem.nn.wrap.intercepted.may_write_uncounted",
            lambda module, **given: looked.append(module) or found(module, **given),
        )
        model(torch.ones(2, WIDTH))
    assert looked == []


def closing_over_a_model() -> nn.Module:
    held = nn.Linear(WIDTH, WIDTH)

    class Closing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = held

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = held(x)
            return y

    return Closing()


@pytest.mark.parametrize(
    "build",
    [closing_over_a_model, lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))],
)
def test_what_is_known_of_a_class_keeps_no_module(build: Callable[[], nn.Module]) -> None:
    """Functions of a class that was made for one module may have that module."""
    model = nn.Sequential(build())
    with tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB") as tier:
        tier.wrap(model)(torch.randn(2, WIDTH))
    gone = [weakref.ref(module) for module in model.modules()]
    del model
    gc.collect()
    assert [module() for module in gone] == [None] * len(gone)
