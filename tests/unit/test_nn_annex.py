"""Embeddings that HBM has no room for are trained where they lie in DRAM, to the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from support_nn import same_bits
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
from tiermem.core.block import ANNEX
from tiermem.runtime.repair import repair_homes


class Norming(nn.Embedding):
    """An embedding whose rows are made shorter as they are looked up."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width, padding_idx=7, max_norm=4.0)


class Apart(Model):
    """The head is a matrix of its own, as large as the embedding."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding, tied=False, bias=False)


class Pooled(Model):
    """An embedding that is only looked up, as for classification."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding, tied=True, bias=False)
        self.head = nn.Linear(WIDTH, 3)


class PooledNorming(Pooled):
    """The same with one that writes its weight in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Norming(ROWS, WIDTH)


KINDS: dict[str, Callable[[], Model]] = {
    "tied": lambda: Model(nn.Embedding, tied=True, bias=False),
    "masked": MaskedModel,
    "by hand": lambda: HandModel(lambda weight: weight.T),
    "apart": Apart,
    "pooled": Pooled,
    "norming": PooledNorming,
}


def build(kind: str = "tied") -> Model:
    torch.manual_seed(0)
    return KINDS[kind]().train()


@contextmanager
def twins(kind: str = "tied", **settings: Any) -> Iterator[tuple[Any, ...]]:
    """Yields a model in the tiers, an ordinary one with the same weights, and the tiers."""
    model, plain = build(kind), build(kind)
    settings = {"hbm": HEAD // 2, "dram": 40 * HEAD, **settings}
    with tiermem.TierManager("cpu", **settings) as tier:
        yield tier.wrap(model), plain, tier


def train(nets: Any, optimizers: Any, steps: int = 3, begin: int = 0) -> None:
    """Makes steps of both, whose losses have to agree in every bit."""
    for number in range(begin, begin + steps):
        losses = []
        for net, optimizer in zip(nets, optimizers, strict=True):
            loss = net((IDS + 3 * number) % ROWS).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert same_bits(*losses)


def optimizers_of(model: Any, plain: nn.Module, tier: Any) -> tuple[Any, Any]:
    wanted = [p for p in plain.parameters() if p.requires_grad]
    return (
        tier.optimizer(model, torch.optim.AdamW, lr=0.01),
        torch.optim.AdamW(wanted, lr=0.01),
    )


def assert_alike(model: Any, plain: nn.Module) -> None:
    found = model.state_dict()
    for name, value in plain.state_dict().items():
        assert same_bits(found[name], value), name


def annexed(tier: Any) -> list[Any]:
    return [record for record in tier._manager.parts.table if record.annexed is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_trained_to_the_same_bits(kind: str) -> None:
    with twins(kind) as (model, plain, tier):
        both = optimizers_of(model, plain, tier)
        train((model, plain), both)
        model.eval(), plain.eval()
        with torch.no_grad():
            assert same_bits(model(IDS), plain(IDS))
        model.train(), plain.train()
        train((model, plain), both, begin=3)
        assert_alike(model, plain)
        assert len(annexed(tier)) == 1 + (kind == "apart")
        assert tier.stats().peak["hbm"] <= HEAD // 2
        tier._manager.parts.table.check()
        tier.unwrap(model)
        assert_alike(model, plain)


@pytest.mark.parametrize("kind", ["tied", "masked", "apart"])
@pytest.mark.parametrize("named", ["the model", "what is trained"])
def test_a_frozen_vocabulary_does_not_keep_the_rest_from_being_trained(
    kind: str, named: str
) -> None:
    """Wrapped in evaluation, as from_pretrained gives it, and little of it is trained."""
    nets = []
    for _ in range(2):
        net = build(kind).eval()
        for param in net.parameters():
            param.requires_grad_(param.numel() < ROWS * WIDTH)
        nets.append(net)
    model, plain = nets
    wanted = [param for param in plain.parameters() if param.requires_grad]
    assert 2 * sum(p.numel() for p in wanted) < sum(p.numel() for p in plain.parameters())
    with tiermem.TierManager("cpu", hbm=HEAD // 2, dram=40 * HEAD) as tier:
        tier.wrap(model)
        params = (
            model if named == "the model" else [p for p in model.parameters() if p.requires_grad]
        )
        both = (
            tier.optimizer(params, torch.optim.AdamW, lr=0.01),
            torch.optim.AdamW(wanted, lr=0.01),
        )
        model.train(), plain.train()
        train((model, plain), both)
        assert_alike(model, plain)
        assert tier.stats().peak["hbm"] <= HEAD // 2


@pytest.mark.parametrize(
    "settings",
    [
        {"where": "device", "overlap": False},
        {"overlap": "forward"},
        {"overlap": "backward"},
    ],
)
@pytest.mark.parametrize("nvme", [False, True])
def test_steps_in_every_way_have_the_same_bits(
    settings: dict[str, Any], nvme: bool, tmp_path: Path
) -> None:
    where: Any = {"nvme": str(tmp_path), "policy": {"params": "dram", "optimizer": "nvme"}}
    with twins("masked", **(where if nvme else {})) as (model, plain, tier):
        mine = tier.optimizer(model, torch.optim.AdamW, lr=0.01, **settings)
        theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
        train((model, plain), (mine, theirs))
        assert_alike(model, plain)
        assert len(annexed(tier)) == 1


def test_frozen_embeddings_and_gradients_of_what_comes_before() -> None:
    with twins("masked") as (model, plain, tier):
        for net in (model, plain):
            net.embed.requires_grad_(False)
        train((model, plain), optimizers_of(model, plain, tier))
        assert_alike(model, plain)


def test_gradients_can_be_looked_at_and_clipped() -> None:
    with twins() as (model, plain, tier):
        mine, theirs = optimizers_of(model, plain, tier)
        for _ in range(2):
            for net in (model, plain):
                net(IDS).sum().backward()
        assert same_bits(model.embed.weight.grad.clone(), plain.embed.weight.grad)
        norms = [nn.utils.clip_grad_norm_(net.parameters(), 0.5) for net in (model, plain)]
        assert same_bits(*norms)
        mine.step(), theirs.step()
        assert_alike(model, plain)


def test_its_weights_take_no_room_of_hbm_and_move_over_no_link() -> None:
    with twins("pooled") as (model, plain, tier):
        train((model, plain), optimizers_of(model, plain, tier), steps=2)
        with torch.no_grad():
            model(IDS)
            before = tier.stats().links["dram->hbm"].nbytes
            for _ in range(4):
                assert same_bits(model(IDS), plain(IDS))
        moved = tier.stats().links["dram->hbm"].nbytes - before
        assert moved <= 4 * (DEPTH + 1) * LAYER < 2 * HEAD
        assert [record.block.name for record in annexed(tier)] == ["Pooled.embed"]
        assert tier._manager.parts.table.fixed_nbytes() < HEAD // 2
        (row,) = [row for row in tier.residency() if row.block == "Pooled.embed"]
        assert (row.home, row.tiers["hbm"], row.tiers["dram"]) == ("dram", "absent", "dirty")


def test_its_place_in_dram_is_free_again_after_unwrap() -> None:
    with twins() as (model, plain, tier):
        homes = tier._manager.parts.homes
        for _ in range(2):
            assert homes.dram.used >= HEAD
            tier.unwrap(model)
            assert homes.dram.used == 0
            assert_alike(model, plain)
            tier.wrap(model)
        train((model, plain), optimizers_of(model, plain, tier))


def test_a_view_of_it_that_is_kept_keeps_its_place() -> None:
    with twins() as (model, plain, tier):
        view = model.embed.weight.detach()[3:9]
        tier.unwrap(model)
        assert tier._manager.parts.homes.dram.used >= HEAD, "somebody looks there"
        tier.wrap(model)
        train((model, plain), optimizers_of(model, plain, tier))
        assert same_bits(view, build().embed.weight[3:9].detach())
        assert_alike(model, plain)


def test_a_run_is_saved_and_goes_on(tmp_path: Path) -> None:
    with twins("masked") as (model, plain, tier):
        both = optimizers_of(model, plain, tier)
        train((model, plain), both)
        saving = tier.save(tmp_path / "now", wait=False)
        then = deepcopy(plain)
        states = deepcopy(both[1].state_dict())
        train((model, plain), both, begin=3)
        saving.wait()
        assert_alike(model, plain)
        tier.load(tmp_path / "now")
        assert_alike(model, then)
        theirs = torch.optim.AdamW(then.parameters(), lr=0.01)
        theirs.load_state_dict(states)
        train((model, then), (both[0], theirs), begin=3)
        assert_alike(model, then)


def test_what_a_program_may_do_with_the_model() -> None:
    with twins() as (model, plain, tier):
        assert same_bits(deepcopy(model).embed.weight, plain.embed.weight)
        with tier.materialize(model.embed):
            model.embed.weight.data.mul_(2.0)
        with torch.no_grad():
            plain.embed.weight.mul_(2.0)
        assert_alike(model, plain)
        other = {name: torch.randn_like(value) for name, value in plain.state_dict().items()}
        other["head.weight"] = other["embed.weight"]
        for net in (model, plain):
            net.load_state_dict(other)
        found, theirs = [
            torch.func.functional_call(net, {"layers.0.bias": torch.ones(WIDTH)}, (IDS,))
            for net in (model, plain)
        ]
        assert same_bits(found.detach(), theirs.detach())
        train((model, plain), optimizers_of(model, plain, tier))


def test_recomputation_comes_to_the_same_gradients() -> None:
    def loss(net: Any) -> torch.Tensor:
        x = torch.utils.checkpoint.checkpoint(net.inner, IDS, use_reentrant=False)
        out: torch.Tensor = net.head(x).square().mean()
        return out

    with twins() as (model, plain, tier):
        optimizers_of(model, plain, tier)
        for net in (model, plain):
            loss(net).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert same_bits(mine.grad.clone(), theirs.grad)


def test_a_model_that_has_no_room_all_the_same_is_as_it_was() -> None:
    model, plain = build(), build()
    with tiermem.TierManager("cpu", hbm=LAYER - 4096, dram=40 * HEAD) as tier:
        with pytest.raises(tiermem.CapacityError, match="give hbm= at least"):
            tier.wrap(model)
        assert tier._manager.parts.homes.dram.used == 0
        assert not list(tier._manager.parts.table)
    assert_alike(model, plain)


def test_what_comes_from_files_is_refused(tmp_path: Path) -> None:
    """Kernels do not see a disk."""
    with (
        tiermem.TierManager(
            "cpu", hbm=HEAD // 2, dram="1MiB", nvme=str(tmp_path), policy="nvme"
        ) as tier,
        pytest.raises(tiermem.CapacityError, match="in HBM as a whole"),
    ):
        tier.wrap(build())


def test_a_model_that_was_wrapped_to_be_evaluated_says_what_to_do() -> None:
    model = build().eval()
    with tiermem.TierManager("cpu", hbm=HEAD // 2, dram=40 * HEAD) as tier:
        tier.wrap(model)
        with torch.no_grad():
            model(IDS)
        with pytest.raises(tiermem.CapacityError, match=r"call model.train\(\) before tier.wrap"):
            tier.optimizer(model, torch.optim.AdamW, lr=0.1)
        with pytest.raises(tiermem.CapacityError, match=r"call model.train\(\) before tier.wrap"):
            model(IDS)
        tier.unwrap(model)
        tier.wrap(model.train())
        train((model, plain := build()), optimizers_of(model, plain, tier))


def test_other_modules_are_refused_as_before() -> None:
    """Only vocabularies are looked at by rows, or so much larger than all else."""
    model = nn.Sequential(nn.Linear(WIDTH, ROWS), nn.Linear(ROWS, WIDTH))
    with (
        tiermem.TierManager("cpu", hbm=HEAD // 2, dram=40 * HEAD) as tier,
        pytest.raises(tiermem.CapacityError, match="give hbm= at least"),
    ):
        tier.wrap(model)


def test_a_vocabulary_that_is_no_embedding_is_refused_with_what_to_do() -> None:
    class Hand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(ROWS, WIDTH))

    with (
        tiermem.TierManager("cpu", hbm=HEAD // 2, dram=40 * HEAD) as tier,
        pytest.raises(tiermem.CapacityError, match=r"'table'.*have it in an nn.Embedding"),
    ):
        tier.wrap(Hand())


def test_a_call_of_many_parameters_is_refused_by_name() -> None:
    model = nn.Sequential(nn.LSTM(64, 64, 8))
    with (
        tiermem.TierManager("cpu", hbm="200KiB", dram="8MiB") as tier,
        pytest.raises(tiermem.CapacityError, match=r"'0' \(LSTM\) has its own 32 parameters"),
    ):
        tier.wrap(model)


def test_a_forked_child_is_shown_none_of_it() -> None:
    with twins() as (model, plain, tier):
        view = model.embed.weight.detach()
        manager = tier._manager
        assert any(s.extent.offset >= ANNEX for s in manager.parts.slots.current.values())
        manager.before_fork()
        manager.after_fork()
        assert same_bits(view, plain.embed.weight.detach())
        del view


def test_a_repair_keeps_it() -> None:
    with twins() as (model, plain, tier):
        both = optimizers_of(model, plain, tier)
        train((model, plain), both)
        tier._manager.gate.unsure = True  # as after Ctrl-C between any two lines
        train((model, plain), both, begin=3)
        assert len(annexed(tier)) == 1
        tier._manager.parts.table.check()
        places = tier._manager.parts.homes.dram
        assert any(places.holds(record.annexed) for record in annexed(tier))
        repair_homes(tier._manager.parts)
        assert any(places.holds(record.annexed) for record in annexed(tier)), "it is its own"
        assert_alike(model, plain)


@pytest.mark.parametrize("name", ["Bert", "XLMRoberta", "DebertaV2"])
@pytest.mark.parametrize("trained", [False, True])
def test_masked_language_models_of_transformers(name: str, trained: bool) -> None:
    """Their decoders have the embedding's weight, and a bias that is the head's as well."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=3000,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=40,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    plain = getattr(transformers, f"{name}ForMaskedLM")(config).train(trained)
    model = deepcopy(plain)
    nbytes = sum(p.nbytes for p in plain.parameters())
    ids = torch.randint(1, 3000, (2, 9), generator=torch.Generator().manual_seed(0))
    with tiermem.TierManager("cpu", hbm=nbytes // 4, dram=20 * nbytes) as tier:
        tier.wrap(model)
        optimizers: Any = optimizers_of(model, plain, tier) if trained else ()
        for _ in range(2):
            losses = []
            for net, optimizer in zip((model, plain), optimizers or (None, None), strict=True):
                torch.manual_seed(1)  # of dropout
                with torch.set_grad_enabled(trained):
                    losses.append(net(ids, labels=ids).loss)
                if optimizer is not None:
                    losses[-1].backward()
                    optimizer.step()
                    optimizer.zero_grad()
            assert same_bits(*[loss.detach() for loss in losses])
        assert_alike(model, plain)
