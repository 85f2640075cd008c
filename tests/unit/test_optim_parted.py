"""Large parameters stepped in parts: the bits of the whole, and room for a part of the state."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_ahead import DROPS, ROOMY, ahead, drops, units, warm
from support_examples import examples
from support_nn import Tiers, assert_same
from support_optim import Layer, Twins, one_group, two_groups
from torch import nn

import tiermem
from tiermem.core import parts
from tiermem.core.parts import parts_of
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.optim.units.part import Part
from tiermem.optim.units.parted import ELEMENTWISE, PartedUnit

HOMES = st.sampled_from(["dram", "nvme"])
OPTIONS: dict[type, list[dict[str, Any]]] = {
    torch.optim.Adam: [{"amsgrad": True}, {"maximize": True, "weight_decay": 0.1}],
    torch.optim.AdamW: [{"fused": True}, {"foreach": True}, {"lr": torch.tensor(0.01)}],
    torch.optim.RMSprop: [{"centered": True, "momentum": 0.9}],
    torch.optim.SGD: [{"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "dampening": 0.1}],
}
CASES = [
    (cls, {"lr": 0.01, **({} if "fused" in more else {"foreach": False}), **more})
    for cls in ELEMENTWISE
    for more in ({}, *OPTIONS.get(cls, []))
]


class Wide(nn.Module):
    """A tied embedding that is most of it."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.embed = nn.Embedding(150, 24)
        self.layers = nn.ModuleList(Layer(24, 16 + 8 * i) for i in range(2))
        self.to(dtype)

    def forward(self, ids: torch.Tensor, use_extra: bool = True) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.linear(x, self.embed.weight)[..., :20]


class Deep(Wide):
    """With layers enough for forward to write home what backward left."""

    def __init__(self) -> None:
        super().__init__()
        self.layers += [Layer(24, 16) for _ in range(3)]
        self.to(torch.bfloat16)


@pytest.fixture(autouse=True)
def small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "_ALIGNED", 64)
        patch.setattr(parts, "_LEAST", 0)
        patch.setattr(parts, "_MOST", 0.125)
        yield


def in_parts(twins: Twins) -> list[PartedUnit]:
    return [unit for unit in twins.optimizer._units if isinstance(unit, PartedUnit)]


def unreadable(part: Part) -> Any:
    """Makes reads of a part fail; returns its unit, whose ``held`` is to be deleted again."""
    error = tiermem.StorageError("cannot read", block="state", path="swap")

    def held(*_: object, **__: object) -> Any:
        raise error

    part.unit.held = held  # type: ignore[method-assign]
    return part.unit


@given(st.integers(1, 10**9), st.integers(1, 64), st.integers(1, 1 << 40))
def test_parts_are_runs_of_all_elements(elements: int, each: int, hbm: int) -> None:
    nbytes = elements * each
    runs = parts_of(elements, nbytes, hbm)
    assert [begin for begin, _ in runs] == [0, *(end for _, end in runs[:-1])]
    assert runs[-1][1] == elements
    assert all(begin % 64 == 0 and end > begin for begin, end in runs)
    if nbytes <= 0.125 * hbm:
        assert len(runs) == 1
    assert len(runs) <= 2 * 4096
    if nbytes <= 64 * hbm and hbm >= 1 << 20:
        assert len(runs) <= 2 * 256
    if len(runs) > 1 and nbytes <= 16 * hbm:
        longest = max(end - begin for begin, end in runs) * each
        assert longest <= max(hbm // 16, min(64 << 20, hbm // 6)) + 64 * each


@pytest.mark.parametrize(
    ("room", "part"), [(96, 16), (300, 50), (600, 64), (1024, 64), (1600, 100), (8192, 512)]
)
def test_parts_are_few_where_there_is_little_room(room: int, part: int) -> None:
    """In MiB: a sixteenth of the room, or a sixth where that is less than 64 MiB, up to these."""
    mib = 1 << 20
    runs = parts_of(room * mib // 4, room * mib, room * mib)
    assert len(runs) == -(-room // part)
    longest = max(end - begin for begin, end in runs) * 4
    assert part * 0.9 < longest / mib <= part + 1


@settings(max_examples=examples(10, 600))
@given(
    homes=st.fixed_dictionaries(dict.fromkeys(("params", "grads", "master", "optimizer"), HOMES)),
    case=st.sampled_from(CASES),
    groups=st.sampled_from([one_group, two_groups]),
    masters=st.booleans(),
    grad_dtype=st.sampled_from([None, torch.float32]),
    overlap=st.sampled_from([False, True, "backward"]),
    micro=st.integers(1, 2),
    clip=st.booleans(),
    looks=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_bits_are_those_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory,
    homes: dict[str, str],
    case: tuple[type[torch.optim.Optimizer], dict[str, Any]],
    groups: Any,
    masters: bool,
    grad_dtype: torch.dtype | None,
    overlap: Any,
    micro: int,
    clip: bool,
    looks: list[bool],
) -> None:
    tiers = Tiers("mixed", nvme=str(tmp_path_factory.mktemp("swap")), policy=homes)
    options: dict[str, Any] = {"grad_dtype": grad_dtype, "overlap": overlap}
    options["master_dtype"] = torch.float32 if masters else None
    with Twins(Wide, tiers, *case, groups=groups, **options) as twins:
        assert in_parts(twins)
        if overlap == "backward":
            twins.optimizer.accumulate(micro)
        for step, look in enumerate(looks):
            for number in range(micro):
                twins.backward(step * micro + number)
            if clip and overlap != "backward":
                twins.clip_norm(0.05)
            twins.step()
            if look:
                twins.check()
        twins.check()


def test_a_part_of_the_state_has_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(torch.optim.AdamW):
        """May do anything, so it is stepped as a whole."""

    budgets = []
    for cls in (torch.optim.AdamW, Own):
        with Twins(Wide, Tiers("dram"), cls) as twins:
            budgets.append(twins.tier._manager.parts.table.hbm.capacity)
            assert bool(in_parts(twins)) == (cls is torch.optim.AdamW)
            twins.backward(0)
            twins.step()
            twins.check()
    least, whole = budgets
    state = 150 * 24 * 12
    assert whole - least > state // 3


def test_neither_the_host_nor_small_ones_have_parts() -> None:
    with Twins(Wide, Tiers("dram"), where="host") as twins:
        assert not in_parts(twins)
    with Twins(Wide, Tiers("dram"), where="both") as twins:
        assert in_parts(twins)
        assert not any(unit.host is not None for unit in in_parts(twins))
    with Twins(Wide, Tiers("dram", extra_hbm=1 << 20)) as twins:
        assert not in_parts(twins)


def test_the_state_is_seen_as_a_whole_and_can_be_written() -> None:
    with Twins(Wide, Tiers("dram"), settings={"lr": 0.01, "foreach": False}) as twins:
        for step in range(2):
            twins.backward(step)
            twins.step()
        mine, theirs = twins.model.embed.weight, twins.by_hand.masters[0]
        for key, change in (("exp_avg", 2.0), ("exp_avg_sq", 3.0)):
            here, there = (
                twins.optimizer.state[mine][key],
                twins.by_hand.optimizer.state[theirs][key],
            )
            assert here.shape == (150, 24)
            assert torch.equal(here.clone(), there)
            here.mul_(change)
            there.mul_(change)
            view = here[100:]  # seen while steps go on
            twins.backward(7)
            twins.step()
            assert torch.equal(view, there[100:])
            view.zero_()
            there[100:].zero_()
            del view
        for state, one in ((twins.optimizer.state, mine), (twins.by_hand.optimizer.state, theirs)):
            state[one]["step"].fill_(1.0)  # as if it had just begun: all parts follow
        twins.backward(8)
        twins.step()
        twins.check()


@pytest.mark.parametrize("overlap", [False, "auto"])
def test_a_number_of_the_state_that_a_program_keeps_is_counted_on(overlap: Any) -> None:
    """A class writes it in place: all parts share the one that users see."""
    options = {"settings": {"lr": 0.01, "foreach": False}, "overlap": overlap}
    with Twins(Wide, Tiers("dram"), **options) as twins:
        for step in range(2):
            twins.backward(step)
            twins.step()
        kept = twins.optimizer.state[twins.model.embed.weight]["step"]
        for step in range(2, 6):
            twins.backward(step)
            twins.step()
            assert float(kept) == step + 1
            assert twins.optimizer.state[twins.model.embed.weight]["step"] is kept
        twins.check()


def test_weights_that_were_written_and_masters_that_follow() -> None:
    with Twins(Wide, Tiers("dram")) as twins:
        twins.backward(0)
        twins.step()
        new = torch.randn(150, 24, dtype=torch.bfloat16)
        state = twins.model.state_dict() | {"embed.weight": new}
        twins.model.load_state_dict(state)
        with torch.no_grad():
            plain, master = twins.plain.embed.weight, twins.by_hand.masters[0]
            changed = master.to(torch.bfloat16) != new
            plain.copy_(new)
            master.copy_(torch.where(changed, new.float(), master))
        twins.backward(1)
        twins.step()
        twins.check()


@pytest.mark.parametrize("home", ["dram", "nvme"])
def test_state_dicts_go_into_parts_and_out_of_them(home: str, tmp_path: Path) -> None:
    policy = {"optimizer": home, "master": home, "params": "dram", "grads": "dram"}
    roomy = Tiers("roomy", nvme=str(tmp_path), policy=policy, extra_hbm=1 << 20)
    tight = Tiers("tight", nvme=str(tmp_path), policy=policy)
    saved, weights = None, None
    for tiers in (roomy, tight, roomy):
        with Twins(Wide, tiers) as twins:
            assert bool(in_parts(twins)) == (tiers is tight)
            if saved is not None:
                for model in (twins.plain, twins.model):
                    model.load_state_dict(weights)
                twins.optimizer.load_state_dict(saved)
                twins.by_hand.optimizer.load_state_dict(
                    copy.deepcopy({key: saved[key] for key in ("state", "param_groups")})
                )
                with torch.no_grad():
                    for number, master in saved["master"].items():
                        twins.by_hand.masters[number].copy_(master)
                twins.by_hand.derive()
                twins.check()
            for step in range(2):
                twins.backward(step)
                twins.step()
            twins.check()
            saved, weights = twins.optimizer.state_dict(), dict(twins.plain.state_dict())
            wrong = {**saved, "state": {**saved["state"], 0: dict(saved["state"][0])}}
            wrong["state"][0]["exp_avg"] = torch.zeros(24, 150)
            with pytest.raises(tiermem.CheckpointError, match="shape"):
                twins.optimizer.load_state_dict(wrong)
            twins.check()


@pytest.mark.parametrize("overlap", [False, True, "backward"])
@pytest.mark.parametrize("forgets", [False, True])
def test_a_step_goes_on_after_the_part_where_it_failed(overlap: Any, forgets: bool) -> None:
    with Twins(Wide, Tiers("dram"), overlap=overlap) as twins:
        for step in range(2):
            twins.backward(step)
            twins.step()
        twins.optimizer.finish()
        (unit,) = in_parts(twins)
        broken = unreadable(unit.parts[2])
        twins.backward(2)
        if overlap == "backward":
            with pytest.raises(tiermem.StepError, match="zero_grad"):
                twins.optimizer.zero_grad()
            with pytest.raises(tiermem.StepError, match=r"2 of .* parts stepped"):
                unit.zero_grad(twins.tier._runtime, set_to_none=True)
        twins.by_hand.step()
        with pytest.raises(tiermem.StorageError, match=rf"2 of {len(unit.parts)} parts stepped"):
            twins.optimizer.step()
            twins.optimizer.finish()
        del broken.held
        if overlap:
            twins.optimizer.finish()
        else:
            twins.optimizer.step()
        twins.by_hand.zero_grad()
        twins.optimizer.zero_grad()
        assert "parts" not in unit.name
        twins.check()
        if forgets and overlap != "backward":  # what is begun anew has nothing of what was
            twins.backward(3)
            twins.optimizer.zero_grad()
            twins.by_hand.zero_grad()
        twins.backward(4)
        twins.step()
        twins.check()
        assert_same(dict(twins.plain.state_dict()), dict(twins.model.state_dict()), "weights")


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_are_cleared_once_after_a_step_that_was_cut_short(
    waits: bool, to_none: bool
) -> None:
    """Whether it was cut short in ``step()``, and is asked for again, or in a look at weights."""
    with Twins(Wide, Tiers("dram", extra_hbm=4096), settings={"lr": 0.01}) as twins:
        for number in range(2):
            twins.backward(number)
            twins.step()
        twins.backward(2)
        twins.optimizer._timing.ahead.provisional.drop()
        (unit,) = in_parts(twins)
        broken = unreadable(unit.parts[2])
        if waits:
            twins.optimizer.step()
            assert id(unit) in twins.optimizer._units.owed
        else:
            twins.optimizer._timing.auto._pause = 1  # this one is made at once
        with pytest.raises(tiermem.StorageError, match=r"2 of .* parts stepped"):
            twins.model.embed.weight.sum() if waits else twins.optimizer.step()
        del broken.held
        if not waits:
            twins.optimizer.step()
        twins.optimizer.zero_grad(set_to_none=to_none)
        twins.by_hand.step()
        twins.by_hand.zero_grad()
        twins.check()
        for number in (3, 4):
            twins.backward(number)
            twins.step()
        twins.check()


def test_parts_are_not_left_apart_where_the_gradient_is_gone() -> None:
    with Twins(Wide, Tiers("dram"), overlap=False) as twins:
        for step in range(2):
            twins.backward(step)
            twins.step()
        (unit,) = in_parts(twins)
        broken = unreadable(unit.parts[1])
        twins.backward(2)
        with pytest.raises(tiermem.StorageError):
            twins.optimizer.step()
        del broken.held
        weight = twins.model.embed.weight
        kept = weight.grad.clone()
        weight.grad = None
        for _ in range(2):
            with pytest.raises(tiermem.StepError, match=r"1 of .* set to None"):
                twins.optimizer.step()
        weight.grad = kept
        twins.step()
        twins.check()
        twins.backward(3)
        twins.step()
        twins.check()


def test_gradients_that_the_step_unscales_are_kept_like_that() -> None:
    """torch's fused kernels undo a loss scale in the gradients themselves."""
    options = {"settings": {"lr": 0.01, "fused": True}, "master_dtype": None}
    with Twins(lambda: Wide(torch.float32), Tiers("dram"), **options) as twins:
        assert in_parts(twins)
        plain = twins.by_hand.optimizer
        scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
        for step in range(2):
            twins.backward(step, scale=8.0)
            for scaler, optimizer in zip(scalers, (plain, twins.optimizer), strict=True):
                scaler.scale(torch.zeros(()))
                scaler.step(optimizer)
                scaler.update()
            mine, theirs = twins.model.embed.weight.grad, twins.plain.embed.weight.grad
            assert mine is not None
            assert theirs is not None
            assert torch.equal(mine.clone(), theirs)
            twins.by_hand.zero_grad()
            twins.optimizer.zero_grad()
        twins.check()


def parts_in_hbm(twins: Twins) -> int:
    """How many parts of a step are leased at this moment."""
    table = twins.tier._manager.parts.table
    kept = [part.unit.kept_blocks() for unit in in_parts(twins) for part in unit.parts]
    return sum(any(table[block.id].leases for block in blocks) for blocks in kept)


@pytest.mark.parametrize("masters", [torch.float32, None])
@pytest.mark.parametrize("case", [CASES[0], (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})])
def test_parts_are_stepped_ahead_and_confirmed(case: Any, masters: torch.dtype | None) -> None:
    with warm(Deep, ROOMY, *case, master_dtype=masters) as pair:
        assert in_parts(pair)
        for number in range(3):
            pair.backward(number)
            assert ahead(pair) == units(pair)
            pair.step()
            assert not ahead(pair)
        assert not drops(pair)
        pair.check()


@pytest.mark.parametrize("what", sorted(set(DROPS) - {"a rate", "another backward"}))
def test_parts_stepped_ahead_are_dropped_by_who_looks(what: str) -> None:
    """Weights, state and numbers are those from before, and the step is made by ``step()``."""
    master = None if what == "a weight is written" else torch.float32
    with warm(Deep, ROOMY, master_dtype=master) as pair:
        pair.backward(0)
        assert ahead(pair) == units(pair)
        DROPS[what](pair)
        assert not ahead(pair)
        if what == "state":
            assert pair.optimizer.state[pair.model.embed.weight]["step"] == 2
        pair.step()
        pair.check()


@pytest.mark.parametrize("part", [0, 1, -1])
@pytest.mark.parametrize("error", [tiermem.CapacityError("no room"), torch.OutOfMemoryError()])
def test_a_part_that_cannot_be_stepped_ahead_leaves_all_as_it_was(
    part: int, error: Exception
) -> None:
    with warm(Deep, ROOMY) as pair:
        (unit,) = in_parts(pair)
        broken: Any = unit.parts[part].unit

        def fail(*_: Any, **__: Any) -> Any:
            del broken.held
            raise error

        broken.held = fail
        pair.backward(0)
        assert "held" not in vars(broken)
        assert unit not in pair.optimizer._timing.ahead.provisional.units
        assert unit._ticket is None  # nothing of it is gone on with
        assert not unit._made and not parts_in_hbm(pair)
        for mine, theirs in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        pair.step()
        pair.check()


def test_a_part_keeps_its_state_only_once_it_is_at_hand() -> None:
    """Of each part, the bytes from before are kept when its blocks are leased, not sooner."""
    with warm(Deep, ROOMY) as pair:
        (unit,) = in_parts(pair)
        shadows = pair.optimizer._timing.ahead.provisional._shadows
        turned: list[list[bool]] = []
        turn = shadows.turn

        def note(blocks: Any) -> None:
            turn(blocks)
            kept = [part.unit.kept_blocks()[0] for part in unit.parts]
            if any(block in kept for block in blocks):
                turned.append([block in shadows for block in kept])

        shadows.turn = note
        pair.backward(0)
        count = len(unit.parts)
        assert turned == [[index <= at for index in range(count)] for at in range(count)]
        pair.step()
        pair.check()


def test_other_units_of_a_block_are_stepped_before_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else their gradients would leave HBM while the parts pass through, and come up again."""

    monkeypatch.setattr(ModuleRuntime, "unit_limit", lambda *_: 1 << 12)
    with Twins(Deep, ROOMY, blocks=[]) as pair:
        (units_of,) = pair.optimizer._timing.ahead._backward.units.values()
        (parted,) = in_parts(pair)
        assert [unit is parted for unit in pair.optimizer._units] == [True, False, False, False]
        assert [unit is parted for unit in units_of] == [False, False, False, True]
