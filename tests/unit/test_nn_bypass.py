"""Models that are in HBM as a whole: interceptors out of their modules, and back in time."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_nn import same_bits
from torch import nn

import tiermem
from tiermem.nn.compat import compiler
from tiermem.nn.wrap.bypass import Bypass

WIDTH, LAYERS = 16, 4


class Layer(nn.Module):
    """A layer whose matrices are of a size, with a buffer that each call counts in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.down(self.up(self.norm(x)).relu())


class Half(nn.Module):
    """Layers, with no tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Both(nn.Module):
    """An encoder and a decoder, of which programs call one by itself as well."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Half(), Half()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.decoder(self.encoder(x)))


X = torch.linspace(-1.0, 1.0, 3 * WIDTH).reshape(3, WIDTH)


@contextmanager
def wrapped(hbm: str = "16MiB", make: Callable[[], nn.Module] = Both) -> Iterator[Any]:
    """Yields a resident model, its wrapped twin, the manager and the twin's bypass."""
    torch.manual_seed(0)
    plain = make()
    model = deepcopy(plain)
    with tiermem.TierManager("cpu", hbm=hbm, dram="32MiB") as tier:
        tier.wrap(model)
        (one,) = tier._runtime.models.values()
        yield plain, model, tier, one.bypass


def same(plain: nn.Module, model: nn.Module, x: torch.Tensor = X) -> None:
    assert same_bits(plain(x), model(x))


def intercepted(model: nn.Module) -> int:
    return sum("_call_impl" in module.__dict__ for module in model.modules())


def enter(plain: nn.Module, model: nn.Module, bypass: Bypass) -> None:
    """Calls a model until its interceptors are out."""
    before = intercepted(model)
    with torch.no_grad():
        for _ in range(4):
            same(plain, model)
    assert bypass.active
    assert 0 < intercepted(model) < before / 4


def test_calls_of_a_model_that_fits_are_held_as_a_whole() -> None:
    with wrapped() as (plain, model, tier, bypass):
        with torch.no_grad():
            same(plain, model)
            assert not bypass.active
        enter(plain, model, bypass)
        before = tier.stats().hits
        with torch.no_grad():
            same(plain, model)
        groups = tier._runtime.groups
        assert tier.stats().hits - before == len([g for g in groups if not g.resident])
        assert not any(group.holds for group in groups)
        assert not any(row.leases for row in tier.residency() if row.home != "hbm")


def test_a_model_that_does_not_fit_keeps_its_interceptors() -> None:
    with wrapped("24KiB") as (plain, model, _, bypass), torch.no_grad():
        for _ in range(6):
            same(plain, model)
        assert not bypass.active


def test_gradients_are_taken_with_them_out() -> None:
    with wrapped() as (plain, model, _, bypass):
        enter(plain, model, bypass)
        for one in (plain, model):
            one(X).square().mean().backward()
        assert bypass.active
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert same_bits(mine.grad, theirs.grad)
        with torch.no_grad():
            for _ in range(6):
                same(plain, model)
        assert bypass.active and not bypass.over


def test_writes_inside_a_forward_and_outside_are_kept() -> None:
    with wrapped() as (plain, model, tier, bypass), torch.no_grad():
        enter(plain, model, bypass)
        handles = [
            one.decoder.layers[1].register_forward_hook(
                lambda module, _args, _out: module.up.weight.mul_(0.5)
            )
            for one in (plain, model)
        ]
        same(plain, model)
        assert bypass.active
        for handle in handles:
            handle.remove()
        for one in (plain, model):
            one.head.weight.add_(1.0)  # no call holds it: the interceptors are back
        assert not bypass.active
        same(plain, model)
        tier._manager.flush()
        mine, theirs = model.state_dict(), plain.state_dict()
        assert all(same_bits(mine[name], theirs[name]) for name in theirs)


class Follower(Both):
    """Its decoder follows its encoder, from a call on, by writes that torch does not count."""

    follows = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.follows:
            for own, other in zip(
                self.decoder.parameters(), self.encoder.parameters(), strict=True
            ):
                own.data.mul_(0.9).add_(other.data, alpha=0.1)
        return super().forward(x)


class Writer(nn.Module):
    """Writes a weight of another module."""

    def __init__(self, other: Both) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        write(self.others[0])
        return x


def write(model: Any, *_: object) -> None:
    model.head.weight.data.mul_(0.5)


def follow(model: Any) -> None:
    model.follows = True


def hook(model: Any) -> None:
    model.decoder.register_forward_hook(lambda *_: write(model))


def put_in(model: Any) -> None:
    model.encoder.layers.append(Writer(model))


@pytest.mark.parametrize("begin", [follow, hook, put_in])
def test_what_code_may_write_uncounted_is_held_by_its_own_calls(
    begin: Callable[[nn.Module], None],
) -> None:
    make = Follower if begin is follow else Both
    with wrapped("400KiB", make) as (plain, model, tier, bypass), torch.no_grad():
        for _ in range(4):
            same(plain, model)
        assert bypass.active or begin is follow
        for one in (plain, model):
            begin(one)
        for _ in range(3):
            same(plain, model)
        other = tier.wrap(nn.Sequential(*(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(120))))
        for _ in range(2):
            for layer in other:
                layer(X)
        assert not all(row.tiers["hbm"] == "valid" for row in tier.residency())
        same(plain, model)
        assert bypass.over


def test_a_module_inside_that_is_called_by_itself() -> None:
    with wrapped() as (plain, model, tier, bypass), torch.no_grad():
        before = intercepted(model)
        enter(plain, model, bypass)
        assert same_bits(plain.encoder.layers[2](X), model.encoder.layers[2](X))
        assert not bypass.active and intercepted(model) == before
        assert not any(group.holds for group in tier._runtime.groups)
        same(plain, model)
        assert not bypass.active  # it takes more passes than the first time
        for _ in range(6):
            same(plain, model)
        assert bypass.active


def transformer() -> nn.Module:
    return nn.Transformer(32, 4, 2, 1, 64, dropout=0.0, batch_first=True)


PARTS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "encoder": lambda m, x: m.encoder(x, src_key_padding_mask=torch.arange(5).expand(2, 5) > 2),
    "layer": lambda m, x: m.encoder.layers[0](x),
    "decoder": lambda m, x: m.decoder(x, x),
    "attention": lambda m, x: m.decoder.layers[0].multihead_attn(x, x, x, need_weights=False)[0],
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_asks_for_classes_of_weights_is_called_by_itself(name: str) -> None:
    """It takes torch's fast path then, as it does in the resident model."""
    x = torch.randn(2, 5, 32)
    with wrapped(make=transformer) as (plain, model, _, bypass), torch.no_grad():
        for one in (plain, model):
            one.eval()
        before = intercepted(model)
        for _ in range(4):
            assert same_bits(plain(x, x), model(x, x))
        assert bypass.active
        assert same_bits(PARTS[name](plain, x), PARTS[name](model, x))
        assert not bypass.active and intercepted(model) == before
        assert same_bits(plain(x, x), model(x, x))


class Deeper(nn.Module):
    """A transformer whose last layers are used when it is told so."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(5))
        self.layers = nn.ModuleList(layers)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.deep = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers if self.deep else self.layers[:4]:
            x = layer(x)
        return self.attention(x, x, x, need_weights=False)[0] if self.deep else x


@pytest.mark.parametrize("frozen", [False, True])
def test_a_part_that_was_not_used_before_asks_for_classes_of_weights(frozen: bool) -> None:
    x = torch.randn(2, 5, 32)
    with wrapped(make=Deeper) as (plain, model, tier, bypass), torch.set_grad_enabled(frozen):
        for one in (plain, model):
            one.eval().requires_grad_(not frozen)
        for _ in range(4):
            same(plain, model, x)
        assert bypass.active
        assert any(not group.record.usable for group in tier._runtime.groups)
        for one in (plain, model):
            one.deep = True
        for _ in range(6):
            same(plain, model, x)


def test_a_half_that_is_called_by_itself_holds_its_own_blocks() -> None:
    with wrapped() as (plain, model, tier, bypass), torch.no_grad():
        enter(plain, model, bypass)
        seen: list[set[str]] = []
        groups = list(tier._runtime.groups)
        handle = model.encoder.layers[0].register_forward_hook(
            lambda *_: seen.append({g.block.name for g in groups if g.holds})
        )
        assert same_bits(plain.encoder(X), model.encoder(X))
        handle.remove()
        assert bypass.active
        assert any("encoder" in name for name in seen[0])
        assert not any("decoder" in name for name in seen[0])
        same(plain, model)


def test_layers_that_are_called_one_by_one_keep_theirs() -> None:
    with wrapped() as (plain, model, _, bypass), torch.no_grad():
        for _ in range(6):
            for mine, theirs in zip(model.encoder.layers, plain.encoder.layers, strict=True):
                assert same_bits(mine(X), theirs(X))
        assert not bypass.active


def test_less_hbm_puts_them_back() -> None:
    with wrapped("400KiB") as (plain, model, tier, bypass), torch.no_grad():
        enter(plain, model, bypass)
        torch.manual_seed(1)
        other = nn.Sequential(*(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(90)))
        tier.wrap(other)
        same(plain, model)
        assert not bypass.active


def test_a_second_thread_puts_them_back() -> None:
    with wrapped() as (plain, model, _, bypass), torch.no_grad():
        enter(plain, model, bypass)
        found: list[torch.Tensor] = []

        def call() -> None:
            with torch.no_grad():
                found.append(model(X))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert not bypass.active
        assert same_bits(found[0], plain(X))
        same(plain, model)


def test_an_error_inside_lets_go_of_everything() -> None:
    with wrapped() as (plain, model, tier, bypass), torch.no_grad():
        enter(plain, model, bypass)
        handle = model.decoder.layers[1].register_forward_hook(fail)
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                model(X)
            assert not any(group.holds for group in tier._runtime.groups)
        handle.remove()
        for half in (plain.encoder, plain.decoder):
            for layer in half.layers[: 2 if half is plain.decoder else LAYERS]:
                layer.calls += 2
        same(plain, model)


def fail(*_: object) -> None:
    raise ArithmeticError


def test_a_module_that_is_compiled_has_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with wrapped() as (plain, model, _, bypass), torch.no_grad():
        before = intercepted(model)
        enter(plain, model, bypass)
        model.encoder.layers[0].compile(backend="eager")
        assert not bypass.active and bypass.over
        assert intercepted(model) == before - 3  # what is inside the compiled one
        same(plain, model)
    with wrapped() as (plain, model, _, bypass), torch.no_grad():
        enter(plain, model, bypass)
        monkeypatch.setattr(compiler, "_callback", lambda: object())
        same(plain, model)
        assert not bypass.active and bypass.over


def test_code_that_the_compiler_runs_is_told_apart() -> None:
    seen: list[bool] = []

    @torch.compiler.disable(recursive=False)
    def look() -> None:
        seen.append(compiler.compiling())

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        look()
        return y * 2

    run(X)
    torch.compile(run, backend="eager")(X)
    assert seen == [False, True]


def test_a_model_comes_out_as_it_went_in() -> None:
    with wrapped() as (plain, model, tier, bypass):
        enter(plain, model, bypass)
        copied = deepcopy(model)
        assert intercepted(copied) == 0
        with pytest.raises(tiermem.WrapError, match="wrapped already"):
            tiermem.TierManager("cpu", hbm="1MiB", dram="1MiB").wrap(model.encoder)
        tier.unwrap(model)
        assert intercepted(model) == 0
        with torch.no_grad():
            want = plain(X)
            assert same_bits(want, model(X)) and same_bits(want, copied(X))


def test_tensors_in_the_place_of_its_own_are_used() -> None:
    with wrapped() as (plain, model, _, bypass), torch.no_grad():
        enter(plain, model, bypass)
        other = {"head.weight": torch.eye(WIDTH)}
        mine = torch.func.functional_call(model, other, (X,))
        assert same_bits(mine, torch.func.functional_call(plain, other, (X,)))
        same(plain, model)


def act(what: str, one: nn.Module, draw: random.Random) -> list[torch.Tensor]:
    """Does something with a model; returns what comes of it."""
    layer: Any = one.encoder.layers[draw.randrange(LAYERS)]
    if what == "grad":
        one.zero_grad()
        out = one(X)
        out.square().mean().backward()
        return [out, *(p.grad.clone() for p in one.parameters())]
    with torch.no_grad():
        if what == "layer":
            return [layer(X)]
        if what == "half":
            return [one.decoder(X)]
        if what == "part":
            return [layer.up(layer.norm(X))]
        if what == "read":
            return [layer.up.weight.sum(), one.head.weight.clone()]
        if what == "write":
            layer.down.weight.mul_(1.25)
            one.head.weight.data.add_(0.125)
        if what == "load":
            one.load_state_dict(one.state_dict())
        if what == "state":
            return [value.clone() for value in one.state_dict().values()]
        if what == "inference":
            with torch.inference_mode():
                return [one(X).clone()]
        return [one(X)]


ACTS = ("call", "call", "call", "call", "half", "layer", "part", "read", "write", "load", "state")


@settings(max_examples=examples(24), deadline=None)
@given(
    acts=st.lists(st.sampled_from((*ACTS, "inference")), max_size=40),
    last=st.lists(st.sampled_from((*ACTS, "grad")), max_size=8),
    hbm=st.sampled_from(["16MiB", "24KiB", "160KiB"]),
    seed=st.integers(0, 1 << 16),
)
def test_whatever_programs_do_has_the_bits_of_the_resident_model(
    acts: list[str], last: list[str], hbm: str, seed: int
) -> None:
    with wrapped(hbm) as (plain, model, tier, _):
        for number, what in enumerate((*acts, *last)):
            found = [act(what, one, random.Random(seed + number)) for one in (plain, model)]
            assert all(map(same_bits, *found)), (number, what)
            assert not any(group.holds for group in tier._runtime.groups)


def test_a_block_that_is_on_its_way_is_waited_for() -> None:
    class OnItsWay:
        waiter = -5

    with wrapped() as (plain, model, tier, bypass), torch.no_grad():
        enter(plain, model, bypass)
        manager = tier._manager
        group = next(g for g in tier._runtime.groups if not g.resident)
        waited: list[Any] = []
        monkey = manager.parts.copy.use
        manager.parts.copy.use = waited.append
        try:
            manager.parts.transfers.ready[group.block.id] = OnItsWay()
            same(plain, model)
        finally:
            manager.parts.copy.use = monkey
            del manager.parts.transfers.ready[group.block.id]
        assert any(isinstance(event, OnItsWay) for event in waited)
        assert bypass.active


def test_a_model_that_another_one_calls_holds_its_own_blocks() -> None:
    with wrapped() as (plain, model, tier, bypass), torch.no_grad():
        torch.manual_seed(1)
        outer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        twin = deepcopy(outer)
        tier.wrap(outer)
        enter(plain, model, bypass)
        for one, inner in ((outer, model), (twin, plain)):
            one[0].register_forward_hook(lambda _module, _args, out, inner=inner: inner(out))  # type: ignore[misc]
        for _ in range(5):
            assert same_bits(twin(X), outer(X))
            assert not any(group.holds for group in tier._runtime.groups)
        assert not bypass.active
        for _ in range(8):
            same(plain, model)
        assert bypass.active
        assert same_bits(twin(X), outer(X))


def test_passes_that_use_nothing_are_entered_nowhere_but_at_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with wrapped() as (plain, model, tier, bypass), torch.no_grad():
        enter(plain, model, bypass)
        same(plain, model)
        manager, seen = tier._manager, list[str]()
        follow, begin = manager.parts.limit.follow, manager.begin_pass
        less = False

        def followed(key: Any) -> bool:
            seen.append("limit")
            return follow(key) or less

        def begun(*args: Any, **kwargs: Any) -> None:
            seen.append("begun")
            begin(*args, **kwargs)

        monkeypatch.setattr(manager.parts.limit, "follow", followed)
        monkeypatch.setattr(manager, "begin_pass", begun)
        same(plain, model)
        assert seen == ["limit"]
        less = True
        same(plain, model)
        assert seen == ["limit", "limit", "begun", "limit"]
        less = False
        assert same_bits(plain.encoder(X), model.encoder(X))  # of another scope
        assert seen[-2:] == ["begun", "limit"]
        tier.optimizer(model, torch.optim.SGD, lr=0.1)
        for _ in range(4):
            same(plain, model)
            assert seen[-2:] == ["begun", "limit"]  # an optimizer is told of forwards
