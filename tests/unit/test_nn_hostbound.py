"""Coarser blocks where the host is expected to bind a forward, and only there."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support_examples import examples
from support_nn import assert_same, seed
from torch import nn

import tiermem
from tiermem.config import Policy, Settings
from tiermem.core import need
from tiermem.core.layout import TensorShape
from tiermem.nn.groups import blocks, hostbound, partition
from tiermem.nn.groups.blocks import BlockPlan, Inventory
from tiermem.nn.groups.hostbound import Streamed, host_seconds, rate_up
from tiermem.nn.groups.inspect import find
from tiermem.nn.groups.need import Kept, Program

EACH = hostbound._OPERATION


def inventory(model: nn.Module, rate: float | None = None, **options: Any) -> Inventory:
    """Returns a model's inventory; it may be on the meta device."""
    params = find(model, "_parameters")
    return Inventory(model, options.pop("blocks", "auto"), params, [], {}, rate=rate, **options)


def finer(model: nn.Module, hbm: int) -> list[str]:
    return list(BlockPlan(inventory(model), hbm).params)


# -- what the host takes -----------------------------------------------------


def twice(x: torch.Tensor) -> torch.Tensor:
    return x + x if x.dim() else x * x


def again(forward: Any) -> Any:
    @functools.wraps(forward)
    def wrapped(self: nn.Module, x: torch.Tensor) -> Any:
        return forward(self, x)

    return wrapped


class Counted(nn.Module):
    """Ten calls and operators: three in the forward, seven in what it names here."""

    @again
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.half(twice(x)))

    @staticmethod
    def half(x: torch.Tensor) -> torch.Tensor:
        if x.dim() > 9:
            return twice(x)  # counted once
        return (x - 1) / 2

    def other(self, x: torch.Tensor) -> torch.Tensor:
        return x * x * x * x


def test_calls_and_operators_of_the_code_are_counted() -> None:
    assert host_seconds(Counted()) == pytest.approx(10 * EACH)
    linear = host_seconds(nn.Linear(2, 2))
    assert linear == pytest.approx(EACH), "what a function of another file does is one call"
    both = nn.ModuleList([Counted(), nn.Linear(2, 2), nn.Linear(2, 2)])
    assert host_seconds(both) == pytest.approx(10 * EACH + 2 * linear), "a list is not called"


def test_code_that_cannot_be_seen_is_one_call() -> None:
    class Foreign(nn.Module):
        forward = len  # type: ignore[assignment]

    assert host_seconds(Foreign()) == pytest.approx(EACH)


class _AnyAttribute:
    """Has whatever it is asked for, and remembers that."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> _AnyAttribute:
        self.asked.append(name)
        return self

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


anything = _AnyAttribute()


class _CallsAnything(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = anything(x)
        return found


def test_what_a_forward_names_is_asked_for_nothing() -> None:
    anything.asked.clear()  # pytest looks at all there is
    assert host_seconds(_CallsAnything()) > 0
    assert anything.asked == []


@given(
    sizes=st.lists(st.integers(1, 1 << 30), max_size=30),
    room=st.integers(-(1 << 30), 1 << 34),
    host=st.floats(0, 10),
)
def test_seconds_of_host_and_link(sizes: list[int], room: int, host: float) -> None:
    rate = 1e9
    took, link = Streamed(sizes, room).seconds(host, rate)
    if sum(sizes) <= max(room, 0):
        assert (took, link) == (host, 0)
        return
    order = list(sizes)
    for _ in range(min(2, len(order))):
        order.remove(max(order))
    slots = 2 * max(order) if order else 0
    moved = round(link * rate)
    assert moved == min(sum(sizes), sum(sizes) - room + slots)
    share = moved / sum(sizes)
    assert took == pytest.approx(host + share * len(sizes) * hostbound._USE)


def test_a_slow_host_counts_as_well_as_a_quick_one() -> None:
    streamed, rate, quick, slow = Streamed([10] * 8, 40), 1.0, 10.0, 20.0
    took, link = streamed.seconds(quick, rate)
    assert link == 60 > slow + 1 > took
    assert streamed.on_hosts(quick, rate) == (2 * link, True)
    took, _ = streamed.seconds(50.0, rate)
    assert streamed.on_hosts(50.0, rate) == (pytest.approx(link + 2 * took), False)


def test_of_all_sizes_the_one_is_taken_that_is_best_on_both_hosts() -> None:
    model = stack()
    for rate in (1e10, 3e10, 1e11, 1e12):
        known = inventory(model, rate)
        each = [BlockPlan(known, HBM)]
        each += [BlockPlan(known, HBM, HBM // share) for share in blocks.SHARES]
        each = [plan for plan in each if plan.can_replace(each[0])]

        def cost(plan: BlockPlan, known: Inventory = known) -> float:
            host, link = plan.streamed().seconds(known.host, known.rate)
            return max(host, link) + max(2 * host, link)

        best = min(each, key=cost)
        assert known.plan(HBM).params.keys() == best.params.keys()


def test_the_rate_is_that_of_the_profile_or_of_a_fast_link() -> None:
    known = {"dram->hbm": 25e9, "nvme->hbm": 7e9}
    assert rate_up(lambda link, _: known[link], files=False) == 25e9
    assert rate_up(lambda link, _: known[link], files=True) == 7e9
    assert rate_up(lambda *_: None, files=False) == rate_up(files=False) > 25e9
    assert rate_up(files=True) < 7e9


# -- blocks ------------------------------------------------------------------


class Layer(nn.Module):
    """Two halves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def stack(layers: int = 40, width: int = 4096) -> nn.Module:
    """Returns layers of 64 MiB; in 640 MiB of HBM each half is a block, but for the host."""
    with torch.device("meta"):
        return nn.Sequential(*[Layer(width) for _ in range(layers)]).bfloat16().eval()


HBM = 640 << 20


def test_blocks_are_coarser_only_where_the_host_binds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stack()
    fine = finer(model, HBM)
    quick = inventory(model, 1e15)  # a link next to which any host is slow
    assert len(quick.plan(HBM).params) < len(fine)
    largest = max(map(quick.packed, quick.plan(HBM).params.values()))
    assert largest <= HBM // min(blocks.SHARES)
    slow = inventory(model, 1e9)
    assert list(slow.plan(HBM).params) == fine
    monkeypatch.setattr(blocks, "host_seconds", None)
    assert list(slow.plan(HBM).params) == fine, "code is looked at once, not for each budget"


def test_what_is_trained_or_chosen_by_the_user_is_not_coarser() -> None:
    model = stack()
    coarse = len(inventory(model, 1e15).plan(HBM).params)
    model.train()
    trained = inventory(model, 1e15)
    assert trained.trained
    assert list(trained.plan(HBM).params) == list(BlockPlan(trained, HBM).params)
    model.requires_grad_(False)
    assert len(inventory(model, 1e15).plan(HBM).params) == coarse, "adapters are trained, say"
    model.eval()
    chosen = inventory(model, 1e15, blocks=lambda name, _: name.count(".") == 1)
    assert len(chosen.plan(HBM).params) == 80


def test_a_model_that_fits_is_left_alone() -> None:
    model = stack().requires_grad_(False)
    hbm = 3 << 30
    assert list(inventory(model, 1e15).plan(hbm).params) == finer(model, hbm)


def _of_transformers(name: str, **sizes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            config = getattr(transformers, f"{name}Config")(**sizes)
            kind = {"T5": "ForConditionalGeneration", "Llama": "ForCausalLM", "ViT": "Model"}[name]
            model = getattr(transformers, name + kind)(config).eval()
    finally:
        torch.set_default_dtype(kept)
    assert isinstance(model, nn.Module)
    return model


def quarter(model: nn.Module) -> int:
    """Returns a quarter of a model's bytes, in whole pages."""
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    return nbytes // 4 // 4096 * 4096


def test_a_t5_has_about_one_block_a_layer() -> None:
    model = _of_transformers(
        "T5", d_model=1536, d_ff=4096, d_kv=64, num_heads=24, num_layers=24,
        num_decoder_layers=24, feed_forward_proj="gated-gelu",
    )  # fmt: skip
    plan = inventory(model).plan(quarter(model))
    of_layers = [name for name in plan.params if ".block." in name]
    assert len(of_layers) == 48
    assert not [name for name in plan.roots if name.count(".") > 2], "held by the layer's call"
    assert len([name for name in finer(model, quarter(model)) if ".block." in name]) >= 96


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Llama", {"hidden_size": 3072, "intermediate_size": 8192, "num_key_value_heads": 8}),
        ("ViT", {"hidden_size": 4096, "intermediate_size": 16384}),
    ],
)
def test_models_that_the_link_binds_keep_their_blocks(name: str, sizes: Any) -> None:
    heads = 24 if name == "Llama" else 16
    model = _of_transformers(name, num_hidden_layers=20, num_attention_heads=heads, **sizes)
    plan = inventory(model).plan(quarter(model))
    assert list(plan.params) == finer(model, quarter(model))


def test_coarser_blocks_give_the_plain_models_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of parts by themselves too, and steps, if the model is trained after all."""
    monkeypatch.setattr(blocks, "SHARES", (4,))
    monkeypatch.setattr(partition, "_FINEST", 1)
    monkeypatch.setattr(need, "_LEAST_UNIT", 1)
    seed(3)
    plain = nn.Sequential(*[Layer(64) for _ in range(24)]).eval()
    model, x = copy.deepcopy(plain), torch.randn(3, 64)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    with tiermem.TierManager("cpu", hbm=size // 2, dram=8 * size) as tier:
        tier.wrap(model)
        rows = [row for row in tier.residency() if row.role == "param"]
        assert len(rows) == 12, "two layers each"
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(model(x), plain(x))
            assert torch.equal(model[5].second(x), plain[5].second(x))
        pair = [
            (plain, torch.optim.AdamW(plain.parameters(), lr=0.01)),
            (model, tier.optimizer(model, torch.optim.AdamW, lr=0.01)),
        ]
        for _ in range(3):
            for net, optimizer in pair:
                net.train()(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same(dict(plain.state_dict()), dict(model.state_dict()), "state")


# -- least budgets -----------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, inside: int, parts: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(width, inside) for _ in range(parts))
        self.last = nn.Linear(inside, width)


class Net(nn.Module):
    """Blocks of uneven sizes, beside what the whole model holds."""

    def __init__(self, own: int, layers: list[tuple[int, int, int]]) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.empty(own))
        self.layers = nn.ModuleList(Block(*sizes) for sizes in layers)


SIZES = st.integers(1, 60)


@settings(max_examples=examples(60, 2000), deadline=None)
@given(
    own=st.sampled_from([1, 5000, 40000, 200000]),
    layers=st.lists(st.tuples(SIZES, SIZES, st.integers(1, 4)), min_size=1, max_size=12),
    pages=st.integers(1, 400),
    shares=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    states=st.integers(0, 3),
    elementwise=st.booleans(),
    overlap=st.booleans(),
    finest=st.sampled_from([1, 4096, 16384, 16 << 20]),
    unit=st.sampled_from([1, 4096, 16384, 16 << 20]),
)
@example(1, [(47, 43, 2), (22, 24, 2), (1, 1, 1)], 9, [1], 1, False, False, 16 << 20, 16 << 20)
@example(1, [(40, 40, 4)] * 60, 100, [6], 3, False, False, 1, 16 << 20)  # units of many tensors
@example(17000, [(40, 40, 4)] * 60, 100, [8], 3, False, True, 1, 1)  # beside a longer chain
def test_what_fits_with_finer_blocks_fits(
    own: int,
    layers: list[tuple[int, int, int]],
    pages: int,
    shares: list[int],
    states: int,
    elementwise: bool,
    overlap: bool,
    finest: int,
    unit: int,
) -> None:
    """Forward and training, by the play that names the least budgets."""
    model = Net(own, layers).bfloat16().eval()
    hbm = 4096 * pages

    def wide(shape: TensorShape) -> TensorShape:
        return dataclasses.replace(shape, itemsize=4)

    kept = Kept(
        frozenset(id(p) for p in model.parameters()),
        lambda _, shape: [wide(shape)] * states,
        lambda _, shape: wide(shape),
        overlap,
        elementwise,
        grad_itemsize=4,
    )
    limits = Settings("cpu", hbm, 1 << 40, (), None, Policy(), "auto")
    needs = []
    for tried in ((), shares):
        program = Program(limits, lambda param: param.dtype)
        program.models.append(inventory(model))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blocks, "SHARES", tried)
            patch.setattr(partition, "_FINEST", finest)
            patch.setattr(need, "_LEAST_UNIT", unit)
            needs.append(
                [
                    program.play(hbm, gradients=False).hbm(),
                    program.play(hbm, gradients=True, optimizers=[kept]).hbm(),
                ]
            )
    for fine, coarse in zip(*needs, strict=True):
        assert coarse <= max(hbm, fine)


@settings(max_examples=examples(60, 2000), deadline=None)
@given(
    own=st.sampled_from([1, 5000, 40000]),
    layers=st.lists(st.tuples(SIZES, SIZES, st.integers(1, 4)), min_size=1, max_size=12),
    pages=st.integers(1, 400),
    part=st.integers(4, 20),
    states=st.integers(0, 3),
    masters=st.booleans(),
    wide=st.booleans(),
    elementwise=st.booleans(),
    overlap=st.booleans(),
)
@example(5000, [(1, 1, 1), (1, 1, 1), (1, 1, 4)], 12, 4, 1, False, False, False, False)
@example(1, [(6, 17, 4)], 3, 4, 2, False, False, False, False)
@example(1, [(40, 40, 4)] * 12, 40, 4, 3, False, False, False, False)
def test_what_is_stepped_in_finer_blocks_is_stepped_in_coarser_ones(
    own: int,
    layers: list[tuple[int, int, int]],
    pages: int,
    part: int,
    states: int,
    masters: bool,
    wide: bool,
    elementwise: bool,
    overlap: bool,
) -> None:
    """With blocks that are coarser since steps bind the host, whatever an optimizer keeps."""
    model = Net(own, layers).bfloat16().train()
    hbm = 4096 * pages

    def shaped(shape: TensorShape) -> TensorShape:
        return dataclasses.replace(shape, itemsize=4) if masters or wide else shape

    kept = Kept(
        frozenset(id(p) for p in model.parameters()),
        lambda _, shape: [shaped(shape)] * states,
        lambda _, shape: dataclasses.replace(shape, itemsize=4) if masters else None,
        overlap,
        elementwise,
        grad_itemsize=4,
    )
    limits = Settings("cpu", hbm, 1 << 40, (), None, Policy(), "auto")
    needs = []
    for binds in (False, True):
        program = Program(limits, lambda param: param.dtype)
        program.models.append(inventory(model))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blocks, "steps_bind", lambda *_, binds=binds: binds)
            patch.setattr(partition, "_FINEST", 4096)
            patch.setattr(need, "_LEAST_UNIT", 4096)
            patch.setattr(need, "_AT_ONCE", part)
            needs.append(
                [
                    program.play(hbm, gradients=False).hbm(),
                    program.play(hbm, gradients=True, optimizers=[kept]).hbm(),
                ]
            )
    for fine, coarse in zip(*needs, strict=True):
        assert coarse <= max(hbm, fine)


class TwoParts(nn.Module):
    """The matrices of a layer's attention, and a feed-forward part beside it, as in a GPT-2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn = nn.Sequential(nn.Linear(width, 3 * width), nn.Linear(width, width))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width))


def test_a_small_model_that_is_trained_has_as_few_blocks_as_its_link_hides() -> None:
    """12 layers of 50 MB, and HBM for half of them: two blocks a layer, or a block a matrix."""
    with torch.device("meta"):
        model = nn.Sequential(*[TwoParts(1024) for _ in range(12)]).train()
    hbm = 336_130_048
    quick, slow = (inventory(model, rate).plan(hbm) for rate in (55e9, 10e9))
    assert len(quick.params) == 24 and quick.few
    assert len(slow.params) == 48 and not slow.few
