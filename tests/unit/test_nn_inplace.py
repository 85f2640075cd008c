"""Weights that HBM has no room for are read in DRAM, and the model computes the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_nn import asked, same_bits
from support_vocabulary import (
    DEPTH,
    HEAD,
    IDS,
    LAYER,
    ROWS,
    WIDTH,
    HandModel,
    MaskedModel,
    Model,
)
from torch import nn

import tiermem
from tiermem.nn.groups.placeview import PlaceView


class Scaled(nn.Embedding):
    """An embedding whose forward looks at its weight, as Gemma 3's does."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * torch.tensor(4.0).to(self.weight.dtype)


KINDS: dict[str, Callable[[], Model]] = {
    "tied": lambda: Model(nn.Embedding, tied=True, bias=False),
    "scaled": lambda: Model(Scaled, tied=True, bias=False),
    "apart": lambda: Model(nn.Embedding, tied=False, bias=True),
    "masked": MaskedModel,
    "T": lambda: HandModel(lambda weight: weight.T),
    "transpose": lambda: HandModel(lambda weight: weight.data.transpose(0, 1)),
}


def build(kind: str = "tied") -> Model:
    torch.manual_seed(0)
    return KINDS[kind]().eval()


@contextmanager
def twins(kind: str = "tied", hbm: int = HEAD // 2, **settings: Any) -> Iterator[tuple[Any, ...]]:
    """Yields a model in the tiers, an ordinary one with the same weights, and the tiers."""
    model, plain = build(kind), build(kind)
    with tiermem.TierManager("cpu", hbm=hbm, dram=4 * HEAD, **settings) as tier:
        yield tier.wrap(model), plain, tier


def came_up(tier: tiermem.TierManager) -> int:
    return tier.stats().links["dram->hbm"].nbytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inference", [False, True])
def test_a_head_that_does_not_fit_gives_the_same_bits(kind: str, inference: bool) -> None:
    with twins(kind) as (model, plain, tier):
        with torch.inference_mode() if inference else torch.no_grad():
            for ids in (IDS, IDS[:, :1], IDS):
                assert same_bits(model(ids), plain(ids))
        assert tier.stats().reads_in_place >= 6
        assert tier.stats().peak["hbm"] <= HEAD // 2
        assert came_up(tier) <= (DEPTH + 2) * LAYER, "nothing but layers and biases, once"


def test_parts_of_the_model_can_be_called_by_themselves() -> None:
    with twins() as (model, plain, _), torch.no_grad():
        x = model.inner(IDS)
        assert same_bits(x, plain.inner(IDS))
        assert same_bits(model.head(x[:, -1:]), plain.head(x[:, -1:]))
        assert same_bits(model.embed(IDS), plain.embed(IDS))


def test_hooks_see_weights_with_the_values() -> None:
    seen = list[torch.Tensor]()

    def look(module: nn.Module, *_: Any) -> None:
        seen.append(module.weight.sum())  # type: ignore[operator]

    with twins() as (model, plain, _), torch.no_grad():
        for net in (model, plain):
            net.head.register_forward_pre_hook(look)
            net.head.register_forward_hook(look)
            net(IDS)
        assert len(seen) == 4 and len({float(found) for found in seen}) == 1
        assert model.head.weight is model.embed.weight, "it has its own again"


class Kept(nn.Linear):
    """Returns and keeps its weight itself."""

    def forward(self, input: torch.Tensor) -> Any:
        self.kept = self.weight
        return super().forward(input), self.weight


def test_what_a_module_returns_or_keeps_is_the_parameter() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Kept(WIDTH, ROWS, bias=False), nn.Identity()).eval()
    plain, x = deepcopy(model), torch.randn(3, WIDTH)
    with tiermem.TierManager("cpu", hbm=HEAD // 2, dram=4 * HEAD) as tier, torch.no_grad():
        tier.wrap(model)
        for net in (model, plain):
            _, weight = net[0](x)
            assert weight is net[0].weight is net[0].kept
            weight.mul_(2.0)
        assert same_bits(model[0](x)[0], plain[0](x)[0])


def test_a_forward_may_write_the_weight() -> None:
    """An embedding whose rows are made shorter as they are looked up, and a hook that writes."""

    def halve(module: nn.Module, _args: Any) -> None:
        module.weight.mul_(0.5)  # type: ignore[operator]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(ROWS, WIDTH, max_norm=1.0), nn.Linear(WIDTH, WIDTH)).eval()
    plain = deepcopy(model)
    with tiermem.TierManager("cpu", hbm=HEAD // 2, dram=4 * HEAD) as tier, torch.no_grad():
        tier.wrap(model)
        writes = list[object]()
        homes = tier._manager.parts.homes
        homes.keeper = SimpleNamespace(before_write=writes.append)  # type: ignore[assignment]
        for net in (model, plain):
            net(IDS)
            net[0].register_forward_pre_hook(halve)
        assert same_bits(model(IDS), plain(IDS))
        homes.keeper = None
        assert len(writes) >= 3, "a checkpoint under way has what was there before"
        assert same_bits(model.state_dict()["0.weight"], plain.state_dict()["0.weight"])


def replace_data(module: nn.Module, _args: Any) -> None:
    module.weight.data = torch.zeros(ROWS, WIDTH)  # type: ignore[union-attr]


def replace(module: nn.Module, _args: Any) -> None:
    module.weight = nn.Parameter(torch.zeros(ROWS, WIDTH))


@pytest.mark.parametrize("hook", [replace_data, replace])
def test_nothing_takes_the_weights_place_for_a_call_alone(hook: Any) -> None:
    with twins() as (model, plain, tier), torch.no_grad():
        handle = model.head.register_forward_pre_hook(hook)
        with pytest.raises((tiermem.CapacityError, tiermem.ParameterError)):
            model(IDS)
        handle.remove()
        assert same_bits(model(IDS), plain(IDS))
        tier.unwrap(model)
        assert same_bits(model(IDS), plain(IDS))


def test_transforms_and_frozen_models_with_gradients_on() -> None:
    x = torch.randn(4, 3, WIDTH)
    with twins() as (model, plain, _):
        with torch.no_grad():
            for transform in (torch.vmap, torch.func.functionalize):
                assert same_bits(transform(model.head)(x), transform(plain.head)(x))
                assert same_bits(model.head(x), plain.head(x))
        model.requires_grad_(False)
        assert same_bits(model(IDS), plain(IDS))


def test_an_error_in_its_call_is_the_users() -> None:
    with twins() as (model, plain, _), torch.no_grad():
        x = model.inner(IDS)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model.head(x[..., :3])
        with pytest.raises(IndexError, match="out of range"):
            model.embed(IDS + ROWS)
        assert same_bits(model(IDS), plain(IDS))


def test_other_weights_may_take_its_place() -> None:
    with twins("apart") as (model, plain, _), torch.no_grad():
        other = torch.randn(ROWS, WIDTH)
        for values in ({"head.weight": other}, {"head.bias": other[:, 0]}):
            found = torch.func.functional_call(model, values, (IDS,))
            assert same_bits(found, torch.func.functional_call(plain, values, (IDS,)))
        assert same_bits(model(IDS), plain(IDS))


def test_its_shape_and_state_can_be_looked_at() -> None:
    with twins() as (model, plain, tier):
        assert model.head.weight.shape == (ROWS, WIDTH)
        assert model.head.weight.dtype == torch.float32
        for name, value in model.state_dict().items():
            assert same_bits(value, plain.state_dict()[name])
        tier.unwrap(model)
        assert same_bits(model(IDS), plain(IDS))


def test_new_values_are_read() -> None:
    with twins() as (model, plain, _), torch.no_grad():
        assert same_bits(model(IDS), plain(IDS))
        other = {name: torch.randn_like(value) for name, value in plain.state_dict().items()}
        other["head.weight"] = other["embed.weight"]
        for net in (model, plain):
            net.load_state_dict(other)
        assert same_bits(model(IDS), plain(IDS))


def test_what_a_program_may_do_with_the_model(tmp_path: Path) -> None:
    with twins() as (model, plain, tier), torch.no_grad():
        assert same_bits(deepcopy(model).head.weight, plain.head.weight)
        with tier.materialize(model.head):
            assert same_bits(model.head.weight.t().clone(), plain.head.weight.t())
        assert same_bits(model(IDS), plain(IDS))
        tier.save(tmp_path / "saved")
        model.head.weight.zero_()
        tier.load(tmp_path / "saved")
        assert same_bits(model(IDS), plain(IDS))
        for (name, one), (_, other) in zip(
            model.named_parameters(), plain.named_parameters(), strict=True
        ):
            assert same_bits(one.norm(), other.norm()), name


def test_a_language_model_generates_the_same_tokens() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=4000,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    plain = transformers.Qwen3ForCausalLM(config).eval()
    model = deepcopy(plain)
    nbytes = sum(p.nbytes for p in plain.parameters())
    ids = torch.randint(0, 4000, (2, 5), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with tiermem.TierManager("cpu", hbm=nbytes // 4, dram=4 * nbytes) as tier:
        tier.wrap(model)
        assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


def test_gradients_are_refused_with_what_to_do() -> None:
    with twins() as (model, plain, _):
        with pytest.raises(tiermem.CapacityError, match=r"no_grad\(\), or give hbm= at least"):
            model(IDS)
        with torch.no_grad():
            assert same_bits(model(IDS), plain(IDS))


def test_the_budget_that_is_named_has_room_for_what_is_used_beside_it() -> None:
    """A block that is smaller than HBM is read in DRAM where calls hold another at the time."""

    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 128), nn.Linear(128, 64)
            self.scale = nn.Parameter(torch.ones(64 * 128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.last(self.first(x) * self.scale[:128])
            return found

    model, x = Scaling().eval(), torch.ones(1, 64)
    expected = model(x)
    with tiermem.TierManager("cpu", hbm="40KiB", dram=1 << 20) as tier:
        tier.wrap(model)
        with pytest.raises(
            tiermem.CapacityError, match=r"first.* it is read in tier dram"
        ) as refused:
            model(x)
    tier_named, least = asked(refused.value)
    assert tier_named == "hbm"
    with tiermem.TierManager("cpu", hbm=least, dram=1 << 20) as tier:
        assert same_bits(tier.wrap(model)(x), expected)


def test_operations_on_the_weight_by_itself() -> None:
    with twins() as (model, plain, _), torch.no_grad():
        x = model.inner(IDS)
        for net in (model, plain):
            weight = net.head.weight
            assert weight.mul_(1.5) is weight
            nn.init.normal_(weight, generator=torch.Generator().manual_seed(1))
            weight.add_(1.0)
        linear = nn.functional.linear
        assert same_bits(linear(x, model.embed.weight), linear(x, plain.embed.weight))
        assert same_bits(model.head.weight.norm(), plain.head.weight.norm())
        rows = torch.tensor([1, 5, 7])
        assert same_bits(model.head.weight[rows], plain.head.weight[rows])
        assert same_bits(model(IDS), plain(IDS))


def test_a_bias_that_others_have_as_well_is_held_as_ever() -> None:
    seen = set[type]()
    with twins("masked") as (model, plain, tier), torch.no_grad():
        x = plain.inner(IDS)
        model.decoder.register_forward_pre_hook(lambda module, _: seen.add(type(module.bias)))
        for _ in range(2):
            assert same_bits(model.head(x), plain.head(x))
            assert same_bits(model.decoder(x), plain.decoder(x)), "called by itself"
        assert seen == {nn.Parameter}, "not what brings its block for each operation"
        for net in (model, plain):
            net.head[0].bias.mul_(2.0)
            net.decoder.weight.mul_(2.0)
        assert same_bits(model(IDS), plain(IDS))
        assert not any(record.leases for record in tier._manager.parts.table)
        with torch.enable_grad(), pytest.raises(tiermem.CapacityError, match=r"no_grad\(\)"):
            model.decoder(x)
        tier.unwrap(model)
        assert model.decoder.bias is model.head[0].bias
        assert same_bits(model(IDS), plain(IDS))


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "t": lambda w: w.t(),
    "rows": lambda w: w[3:5],
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "einsum": lambda w: torch.einsum("ij->ji", w),
    "broadcast": lambda w: torch.broadcast_to(w, (1, ROWS, WIDTH)),
    "hsplit": lambda w: torch.hsplit(w, 2),
    "strided": lambda w: w.as_strided((3,), (1,), 5),
    "aten": lambda w: torch.ops.aten.t.default(w),
    "of a view": lambda w: w[2:].T[3:, 1:].unbind(1)[4],
    "of one element": lambda w: w[3, 4],
    "reshaped": lambda w: w.view(2, -1, WIDTH).flatten(1),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_it_look_where_it_lies(view: str) -> None:
    with twins() as (model, plain, tier), torch.no_grad():
        found, there = VIEWS[view](model.head.weight), VIEWS[view](plain.head.weight)
        pairs = list(zip(found, there, strict=True)) if type(there) is tuple else [(found, there)]
        assert type(found) is (tuple if type(there) is tuple else PlaceView)
        for one, other in pairs:
            assert (one.shape, one.stride()) == (other.shape, other.stride())
            assert one.is_contiguous() == other.is_contiguous() and not one.requires_grad
            assert same_bits(one.clone(), other) and one.tolist() == other.tolist()
            assert same_bits(deepcopy(one), other) and repr(one) == repr(other.detach())
            assert one.mul_(3.0) is one, "a write goes where it lies"
            other.mul_(3.0)
            one += 1.0
            other += 1.0
        assert same_bits(model(IDS), plain(IDS))
        assert same_bits(model.state_dict()["head.weight"], plain.head.weight)
        assert not any(record.leases for record in tier._manager.parts.table)


def test_a_write_by_a_view_is_told_to_a_checkpoint_under_way() -> None:
    with twins() as (model, _, tier), torch.no_grad():
        writes = list[object]()
        homes = tier._manager.parts.homes
        homes.keeper = SimpleNamespace(before_write=writes.append)  # type: ignore[assignment]
        model.head.weight.T[1].zero_()
        homes.keeper = None
        assert writes[-1] is tier._manager.parts.table[writes[-1].block.id]  # type: ignore[attr-defined]


def test_a_view_follows_the_weight_out_of_the_tiers() -> None:
    with twins() as (model, plain, tier):
        with torch.no_grad():
            view = model.head.weight.T
        with pytest.raises(tiermem.CapacityError, match=r"no_grad\(\)"):
            view.sum()
        with tier.materialize(model.head):
            assert same_bits(view.clone(), plain.head.weight.T)
        tier.unwrap(model)
        assert not view.clone().requires_grad
        assert same_bits(view.clone(), plain.head.weight.T)
        model.head.weight.data = torch.zeros(3, WIDTH)
        with pytest.raises(tiermem.ParameterError, match="make the view anew"):
            view.sum()


@pytest.mark.parametrize(
    "look",
    [
        lambda w: w.data_ptr(),
        lambda w: w.untyped_storage(),
        lambda w: w.numpy(),
        lambda w: w.view(torch.int32),
        copy,
        nn.Parameter,
        lambda w: w.T.data_ptr(),
        lambda w: w.T.numpy(),
        lambda w: w.T.view(torch.int32),
        lambda w: torch.vmap(lambda row: row + 1)(w.T),
    ],
)
def test_its_address_is_refused(look: Callable[[torch.Tensor], object]) -> None:
    """What has it could write the home where nobody sees it, or look at another block there."""
    with twins() as (model, plain, tier), torch.no_grad():
        with pytest.raises(tiermem.CapacityError, match="give hbm= at least"):
            look(model.head.weight)
        assert same_bits(model(IDS), plain(IDS))
        assert not any(record.leases for record in tier._manager.parts.table)


def test_a_view_takes_no_other_memory() -> None:
    with twins() as (model, plain, _), torch.no_grad():
        with pytest.raises(tiermem.ParameterError, match="copy_"):
            model.head.weight.T.set_(torch.zeros(3))
        assert same_bits(model(IDS), plain(IDS))


def test_a_model_in_training_is_refused_as_before() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(WIDTH, ROWS), nn.ReLU()), torch.randn(3, WIDTH)
    plain = deepcopy(model)
    with (
        tiermem.TierManager("cpu", hbm=HEAD // 2, dram=4 * HEAD) as tier,
        pytest.raises(tiermem.CapacityError, match="give hbm= at least"),
    ):
        tier.wrap(model)
    assert same_bits(model(x), plain(x))


def test_an_optimizer_is_refused() -> None:
    with twins() as (model, plain, tier):
        with pytest.raises(tiermem.CapacityError, match="give hbm= at least"):
            tier.optimizer(model, torch.optim.AdamW, lr=0.1)
        with torch.no_grad():
            assert same_bits(model(IDS), plain(IDS))


class Own(nn.Module):
    """A module whose code may do anything with its parameter."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.inner = nn.Sequential(*inner) if inner else nn.functional.relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) @ self.table.t()
        return out


@pytest.mark.parametrize("inner", [(), (nn.Linear(WIDTH, WIDTH),)])
def test_what_other_modules_hold_is_not_read_in_place(inner: tuple[nn.Module, ...]) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Own(*inner)).eval()
    with (
        tiermem.TierManager("cpu", hbm=HEAD // 2, dram=4 * HEAD) as tier,
        pytest.raises(tiermem.CapacityError, match="give hbm= at least"),
    ):
        tier.wrap(model)


def test_layers_that_do_not_fit_are_read_as_well() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(5)]).eval()
    plain, x = deepcopy(model), torch.randn(3, 128)
    with tiermem.TierManager("cpu", hbm=1 << 16, dram=1 << 20) as tier, torch.no_grad():
        tier.wrap(model)
        for _ in range(3):
            assert same_bits(model(x), plain(x))


@pytest.mark.parametrize("kind", KINDS)
def test_such_passes_are_laid_out(kind: str) -> None:
    with twins(kind, hbm=4 * LAYER) as (model, plain, tier), torch.no_grad():
        tier._manager.prefetcher.fetcher.beside = True
        tier._manager.parts.pass_timer.estimates.flops = 1e12
        for _ in range(6):
            assert same_bits(model(IDS), plain(IDS))
        run = tier._manager.replay.run
        assert run is not None and run.arranged
