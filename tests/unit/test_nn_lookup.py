"""Rows of an embedding are read where they lie in DRAM, and the model computes the same bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support_ctrl_c import cut_short
from support_nn import same_bits
from torch import nn

import tiermem
from tiermem.nn.wrap import lookup

ROWS, WIDTH, DEPTH = 256, 16, 6
BLOCK = ROWS * WIDTH * 4
FEW = torch.tensor([[3, 200, 3, 255, 0]])
MANY = torch.arange(ROWS // 2 + 1)[None]


class Model(nn.Module):
    """An embedding and layers of its size."""

    def __init__(self, embed: Callable[[], nn.Module] = lambda: nn.Embedding(ROWS, WIDTH)) -> None:
        super().__init__()
        self.embed = embed()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, ROWS) for _ in range(DEPTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)[..., :WIDTH].tanh()
        return x


@pytest.fixture(autouse=True)
def small_blocks_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_LEAST", 1)


@contextmanager
def twins(
    build: Callable[[], nn.Module] = Model, hbm: int = 4 * BLOCK, **settings: Any
) -> Iterator[tuple[Any, Any, Any]]:
    """Yields a model in the tiers, an ordinary one with the same weights, and the front."""
    torch.manual_seed(0)
    model = build().requires_grad_(False)
    torch.manual_seed(0)
    plain = build().requires_grad_(False)
    with tiermem.TierManager("cpu", hbm=hbm, dram=1 << 20, **settings) as tier:
        yield tier.wrap(model), plain, tier


def in_place(tier: Any, call: Callable[[], Any]) -> int:
    """Returns how many uses in a call looked at rows where they lie."""
    before = tier.stats().reads_in_place
    call()
    return int(tier.stats().reads_in_place - before)


def test_few_rows_are_looked_at_where_they_lie() -> None:
    with twins() as (model, plain, tier):
        for _ in range(3):
            tier.reset_stats()
            assert same_bits(model(FEW), plain(FEW))
            found = tier.stats()
            assert found.reads_in_place == 1
            assert found.read_in_place == FEW.numel() * WIDTH * 4
        record = next(row for row in tier.residency() if "embed" in row.block)
        assert record.tiers == {"hbm": "absent", "dram": "valid"}
        schedule = tier._manager.parts.planner.schedule.order
        assert tier._manager.parts.table[model_block(tier)].block.id not in schedule


def model_block(tier: Any) -> int:
    return next(r.block.id for r in tier._manager.parts.table if "embed" in r.block.name)


@pytest.mark.parametrize("grad", [False, True])
def test_many_rows_come_up_with_their_block(grad: bool) -> None:
    with twins() as (model, plain, tier), torch.set_grad_enabled(grad):
        assert in_place(tier, lambda: model(MANY)) == 0
        assert in_place(tier, lambda: model(FEW)) == 1
        for ids in (MANY, FEW, FEW, MANY):
            assert same_bits(model(ids), plain(ids))


def test_what_fits_in_hbm_is_used_there() -> None:
    with twins(hbm=(DEPTH + 3) * BLOCK) as (model, plain, tier):
        assert in_place(tier, lambda: model(FEW)) == 0
        assert same_bits(model(FEW), plain(FEW))


def test_a_home_elsewhere_is_not_read_in_place(tmp_path: Any) -> None:
    policy = tiermem.Policy(params="nvme")
    with twins(nvme=tmp_path, policy=policy) as (model, plain, tier):
        assert in_place(tier, lambda: model(FEW)) == 0
        assert same_bits(model(FEW), plain(FEW))


def test_a_hook_sees_what_comes_out_and_may_change_it() -> None:
    with twins() as (model, plain, tier):
        seen: list[tuple[torch.Tensor, ...]] = []
        handles = []
        for one in (model, plain):
            embed = one.embed
            embed.register_forward_hook(lambda module, args, output: output + module.weight[0])
            handles.append(
                embed.register_forward_hook(lambda _, args, output: seen.append((*args, output)))
            )
        assert in_place(tier, lambda: model(FEW)) == 1
        plain(FEW)
        assert all(map(same_bits, seen[0], seen[1]))
        for handle in handles:
            handle.remove()
        for _ in range(3):
            assert same_bits(model(FEW), plain(FEW))
        assert len(seen) == 2


def test_inputs_that_a_hook_has_take_gradients_do() -> None:
    with twins() as (model, plain, tier):
        outputs = []
        for one in (model, plain):
            one.layers[-1].requires_grad_(True)
            one.embed.register_forward_hook(lambda _, args, output: output.requires_grad_(True))
            one.layers[0].register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
        for _ in range(3):
            for one in (model, plain):
                one(FEW).square().sum().backward()
            first, second = outputs[-2:]
            assert same_bits(first.grad, second.grad)
            assert same_bits(model.layers[-1].weight.grad, plain.layers[-1].weight.grad)
        assert tier.stats().reads_in_place == 3


def before(model: Any) -> None:
    model.embed.register_forward_pre_hook(lambda module, args: args)


def with_kwargs(model: Any) -> None:
    model.embed.register_forward_hook(
        lambda module, args, kwargs, output: output + module.weight[0], with_kwargs=True
    )


def own_forward(model: Any) -> None:
    weight = model.embed.weight
    model.embed.forward = lambda ids: nn.functional.embedding(ids, weight) * 2


class Watching(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("change", [before, with_kwargs, own_forward])
def test_whoever_may_look_at_the_weight_finds_it_in_hbm(change: Callable[[Any], None]) -> None:
    with twins() as (model, plain, tier):
        change(model)
        change(plain)
        assert in_place(tier, lambda: model(FEW)) == 0
        assert same_bits(model(FEW), plain(FEW))


def test_a_hook_of_all_modules_finds_the_weight_in_hbm() -> None:
    with twins() as (model, plain, tier):
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, args, output: (
                output + module.weight[0] if isinstance(module, nn.Embedding) else None
            )
        )
        try:
            assert in_place(tier, lambda: model(FEW)) == 0
            assert same_bits(model(FEW), plain(FEW))
        finally:
            handle.remove()
        assert in_place(tier, lambda: model(FEW)) == 1


class Tripled(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 3


def of_another_class(model: Any) -> None:
    model.embed.__class__ = Tripled


def shadowed(model: Any) -> None:
    model.embed.__dict__["weight"] = torch.ones(ROWS, WIDTH)


@pytest.mark.parametrize("change", [of_another_class, shadowed])
def test_what_is_no_plain_embedding_any_more_is_called_as_it_is(
    change: Callable[[Any], None],
) -> None:
    with twins() as (model, plain, tier):
        assert in_place(tier, lambda: model(FEW)) == 1
        change(model)
        change(plain)
        assert in_place(tier, lambda: model(FEW)) == 0
        assert same_bits(model(FEW), plain(FEW))


@pytest.mark.parametrize(
    ("owner", "name"), [(nn.Embedding, "forward"), (nn.functional, "embedding")]
)
def test_what_somebody_has_put_in_torchs_place_is_called(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    with twins() as (model, plain, tier):
        before = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: before(*args, **kwargs) * 2)
        assert in_place(tier, lambda: model(FEW)) == 0
        assert same_bits(model(FEW), plain(FEW))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda embed: setattr(embed, "padding_idx", ROWS + 5),
        lambda embed: setattr(embed, "padding_idx", -300),
        lambda embed: delattr(embed, "norm_type"),
        lambda embed: delattr(embed, "sparse"),
    ],
    ids=["large padding", "small padding", "no norm_type", "no sparse"],
)
def test_what_torch_refuses_is_refused(spoil: Callable[[Any], None]) -> None:
    with twins() as (model, plain, _tier):
        for one in (model, plain):
            spoil(one.embed)
            with pytest.raises((AssertionError, AttributeError)):
                one(FEW)


class Doubled(nn.Parameter):
    """Sees to what an embedding gives."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        return found * 2 if func is nn.functional.embedding else found


def test_a_parameter_that_sees_to_its_operations_does() -> None:
    def build() -> Model:
        model = Model()
        model.embed.weight = Doubled(model.embed.weight.data)
        return model

    with twins(build) as (model, plain, tier):
        assert in_place(tier, lambda: model(FEW)) == 0
        assert same_bits(model(FEW), plain(FEW))


def test_a_weight_of_another_shape_can_be_wrapped() -> None:
    def build() -> Model:
        model = Model()
        model.embed.weight = nn.Parameter(torch.randn(ROWS * WIDTH))
        return model

    with twins(build) as (model, plain, _tier):
        assert same_bits(model.embed.weight, plain.embed.weight)


def test_a_default_device_is_no_mode_that_sees_calls() -> None:
    with twins() as (model, plain, tier), torch.device("cpu"):
        assert in_place(tier, lambda: model(FEW)) == 1
        assert same_bits(model(FEW), plain(FEW))


def test_a_mode_that_sees_every_call_finds_it_in_hbm() -> None:
    with twins() as (model, plain, tier):
        with Watching():
            assert in_place(tier, lambda: model(FEW)) == 0
            assert same_bits(model(FEW), plain(FEW))
        assert in_place(tier, lambda: model(FEW)) == 1


@pytest.mark.parametrize(
    "embed",
    [
        lambda: Tripled(ROWS, WIDTH),
        lambda: nn.Embedding(ROWS, WIDTH, max_norm=0.1),
        lambda: nn.EmbeddingBag(ROWS, WIDTH),
    ],
    ids=["forward of its own", "max_norm", "bag"],
)
def test_other_kinds_come_up(embed: Callable[[], nn.Module]) -> None:
    with twins(lambda: Model(embed)) as (model, plain, tier):
        assert in_place(tier, lambda: model(FEW)) == 0
        assert same_bits(model(FEW), plain(FEW))
        assert same_bits(model.embed.weight, plain.embed.weight)


def test_padding_is_a_row_like_others() -> None:
    with twins(lambda: Model(lambda: nn.Embedding(ROWS, WIDTH, padding_idx=-1))) as found:
        model, plain, tier = found
        assert in_place(tier, lambda: model(FEW)) == 1
        assert same_bits(model(FEW), plain(FEW))


class Tied(Model):
    """The embedding's weight is the head's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(super().forward(ids))


def test_a_tied_weight_comes_up_for_the_head_alone() -> None:
    with twins(Tied) as (model, plain, tier):
        for _ in range(3):
            assert in_place(tier, lambda: model(FEW)) == 1
            assert same_bits(model(FEW), plain(FEW))
        schedule = tier._manager.parts.planner.schedule
        assert schedule.order[DEPTH] == model_block(tier)


def test_other_weights_for_one_call_are_what_is_looked_at() -> None:
    with twins() as (model, plain, tier):
        other = {"embed.weight": torch.randn(ROWS, WIDTH)}
        found = torch.func.functional_call(model, other, (FEW,))
        assert same_bits(found, torch.func.functional_call(plain, other, (FEW,)))
        assert tier.stats().reads_in_place == 0
        assert in_place(tier, lambda: model(FEW)) == 1


def test_samples_of_vmap_come_up() -> None:
    with twins() as (model, plain, tier):
        ids = FEW.expand(3, -1)
        assert same_bits(torch.vmap(model)(ids), torch.vmap(plain)(ids))
        assert tier.stats().reads_in_place == 0


def test_a_wrong_id_is_refused_as_torch_does() -> None:
    with twins() as (model, plain, _tier):
        for wrong in (torch.tensor([[ROWS]]), torch.tensor([[0.5]]), torch.tensor([[-1]])):
            with pytest.raises((IndexError, RuntimeError)) as expected:
                plain(wrong)
            with pytest.raises(type(expected.value)) as found:
                model(wrong)
            assert str(found.value) == str(expected.value)
        assert same_bits(model(FEW), plain(FEW))


def test_inference_mode_gives_what_it_gives() -> None:
    with twins() as (model, plain, tier):
        with torch.inference_mode():
            assert in_place(tier, lambda: model(FEW)) == 1
            assert same_bits(model(FEW), plain(FEW))
            assert model(FEW).is_inference()
        assert same_bits(model(FEW), plain(FEW))
        assert not model(FEW).is_inference()


class Written(Model):
    """Writes its weight in its forward, if it is told to."""

    def forward(self, ids: torch.Tensor, how: str = "") -> torch.Tensor:
        if how == "data":
            self.embed.weight.data.add_(1)
        elif how == "unseen":  # as C++ code does
            weight = self.embed.weight
            with torch._C.DisableTorchFunctionSubclass():
                weight.add_(1)
        return super().forward(ids)


WRITES: dict[str, Callable[[Any, Any], None]] = {
    "outside": lambda model, tier: model.embed.weight.mul_(2),
    "data": lambda model, tier: setattr(
        model.embed.weight, "data", torch.full((ROWS, WIDTH), 0.25)
    ),
    "load": lambda model, tier: model.load_state_dict(
        {k: torch.full_like(v, 0.5) for k, v in model.state_dict().items()}
    ),
    "inside": lambda model, tier: model(FEW, "data"),
    "inside, unseen, first": lambda model, tier: model(FEW, "unseen"),
    "inside, unseen": lambda model, tier: [model(MANY), model(FEW, "unseen")][:0],
}


@pytest.mark.parametrize("how", WRITES)
def test_what_was_written_is_what_is_looked_at(how: str) -> None:
    with twins(Written) as (model, plain, tier):
        assert in_place(tier, lambda: model(FEW)) == 1
        for _ in range(2):
            for one in (model, plain):
                WRITES[how](one, tier)
            for _ in range(4):
                assert same_bits(model(FEW), plain(FEW))


def test_what_a_kept_view_writes_is_what_is_looked_at() -> None:
    with twins() as (model, plain, tier):
        assert in_place(tier, lambda: model(FEW)) == 1
        views = [one.embed.weight.detach() for one in (model, plain)]
        for _ in range(3):
            for view in views:
                view.mul_(2)
            assert same_bits(model(FEW), plain(FEW))
            assert in_place(tier, lambda: model(FEW)) == 0
        del views, view
        for _ in range(3):
            assert same_bits(model(FEW), plain(FEW))
        assert in_place(tier, lambda: model(FEW)) == 1


def test_materialized_weights_are_the_users() -> None:
    with twins() as (model, plain, tier):
        model(FEW)
        with tier.materialize(model.embed):
            model.embed.weight.fill_(2.0)
            plain.embed.weight.fill_(2.0)
            assert in_place(tier, lambda: model(FEW)) == 0
            assert same_bits(model(FEW), plain(FEW))
        for _ in range(4):
            assert same_bits(model(FEW), plain(FEW))


@pytest.mark.parametrize("overlap", [False, "forward", "backward"])
@pytest.mark.parametrize("where", ["device", "host"])
def test_an_embedding_that_is_trained_is_looked_at_between_steps(where: Any, overlap: Any) -> None:
    with twins(hbm=8 * BLOCK) as (model, plain, tier):
        for one in (model, plain):
            one.requires_grad_(True)
        optimizers = [
            tier.optimizer(
                model.parameters(),
                torch.optim.AdamW,
                lr=0.1,
                fused=True,
                where=where,
                overlap=overlap,
            ),
            torch.optim.AdamW(plain.parameters(), lr=0.1, fused=True),
        ]
        for _ in range(3):
            for one, optimizer in zip((model, plain), optimizers, strict=True):
                optimizer.zero_grad()
                one(FEW).square().sum().backward()
                optimizer.step()
            with torch.no_grad():
                assert same_bits(model(FEW), plain(FEW))
                assert same_bits(model(FEW), plain(FEW))


def test_threads_look_together() -> None:
    with twins() as (model, plain, tier):
        expected = plain(FEW)
        wrong: list[int] = []

        def run(number: int) -> None:
            with torch.no_grad():
                wrong.extend(number for _ in range(20) if not same_bits(model(FEW), expected))

        threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert tier.stats().reads_in_place == 60


def test_an_unwrapped_model_has_its_weights() -> None:
    with twins() as (model, plain, tier):
        model(FEW)
        tier.unwrap(model)
        assert same_bits(model.embed.weight, plain.embed.weight)
        assert same_bits(model(FEW), plain(FEW))
        again = tier.wrap(model)
        assert in_place(tier, lambda: again(FEW)) == 1
        assert same_bits(again(FEW), plain(FEW))


@pytest.mark.parametrize("file", ["runtime/loans/zero_copy.py", "nn/wrap/lookup.py"])
def test_ctrl_c_in_a_look_is_noted_and_the_next_call_repairs(file: str) -> None:
    """The call of the model around it takes an exception of its layers for the user's."""
    with twins() as (model, plain, tier):
        assert same_bits(model(FEW), plain(FEW))
        number = {"runtime/loans/zero_copy.py": 14, "nn/wrap/lookup.py": 66}[file]
        where = cut_short(lambda: model(FEW), number, [file])
        assert where and tier._manager.gate.unsure, where
        assert same_bits(model(FEW), plain(FEW))
        assert not tier._manager.gate.unsure
