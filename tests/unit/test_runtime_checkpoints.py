"""Blocks at home in the files of a checkpoint: when they are given another home, and when not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support_nn import same_bits
from torch import nn

import tiermem
from tiermem.core.block import Role, Tier
from tiermem.core.layout import TensorShape
from tiermem.core.residency import Record, State
from tiermem.errors import InvariantError
from tiermem.runtime.memory.homes import HomeRequest

WIDTH, LAYERS = 64, 8
UNIT = WIDTH * WIDTH * 4
STAGING = 16 * (32 << 10)
X = torch.rand(2, WIDTH, generator=torch.Generator().manual_seed(0))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


@contextmanager
def loaded(folder: Path, dram: int, hbm: int = 4, **options: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yields a model at home in its files, an ordinary one with the same weights, and the front.

    Args:
        folder: Where the files are.
        dram: For so many blocks beside staging.
        hbm: For so many blocks.
        **options: Of the front.
    """
    plain = build().requires_grad_(False)
    save_file(plain.state_dict(), folder / "model.safetensors")
    budgets = {"hbm": hbm * UNIT, "dram": STAGING + dram * UNIT}
    with tiermem.TierManager("cpu", **budgets, **options) as tier, torch.no_grad():
        model = tiermem.load_checkpoint(build, folder, tier=tier)
        model.requires_grad_(False)
        try:
            yield model, plain, tier
        finally:
            tier.close(discard=True)


def check(model: Any, plain: Any, rounds: int = 3) -> None:
    for _ in range(rounds):
        assert same_bits(model(X), plain(X))


def record_of(tier: Any, number: int) -> Record:
    [record] = [r for r in tier._manager.parts.table if r.block.name.endswith(f".{number}")]
    return record


def elsewhere(tier: Any) -> list[str]:
    """Returns the blocks that have another home than the files."""
    return [row.block for row in tier.residency() if row.home != "nvme"]


# -- what was shown, and what was written -------------------------------------------------


def test_what_was_shown_and_not_written_stays_at_home(tmp_path: Path) -> None:
    with loaded(tmp_path, dram=LAYERS) as (model, plain, tier):
        check(model, plain)
        for _ in range(2):
            for param, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert same_bits(param.detach(), other)
            state = model.state_dict()
            assert all(same_bits(state[k], v) for k, v in plain.state_dict().items())
            check(model, plain)
        assert not elsewhere(tier) and "hbm->dram" not in tier.stats().links
        tier._manager.parts.table.check()


def test_a_model_larger_than_dram_is_shown_part_by_part(tmp_path: Path) -> None:
    with loaded(tmp_path, dram=0) as (model, plain, tier):
        check(model, plain)
        for part, other in zip(model, plain, strict=True):
            assert same_bits(part.weight.detach(), other.weight)
        check(model, plain)
        assert not elsewhere(tier)


@pytest.mark.parametrize("byte", [0, UNIT - 1])
def test_what_was_written_gets_another_home(tmp_path: Path, byte: int) -> None:
    """However little of it."""
    with loaded(tmp_path, dram=LAYERS) as (model, plain, tier):
        for each in (model, plain):
            each[2].weight.view(-1).view(torch.uint8)[byte] ^= 1
        check(model, plain)
        assert elsewhere(tier) == [record_of(tier, 2).block.name]
        assert tier.stats().links["hbm->dram"].moves == 1
        check(model, plain)


def shown(tier: Any, model: Any, number: int) -> Record:
    """Makes a block count as written, and returns it."""
    model[number].weight.detach()
    record = record_of(tier, number)
    assert record.in_hbm is State.DIRTY
    return record


def test_what_its_file_has_no_more_gets_another_home(tmp_path: Path) -> None:
    """It cannot be compared: the copy in HBM is all there is."""
    with loaded(tmp_path, dram=LAYERS) as (model, plain, tier):
        check(model, plain, 1)
        record = shown(tier, model, 2)
        path = tmp_path / "model.safetensors"
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
        parts = tier._manager.parts
        with tier._manager.lock:
            parts.transfers.drain(record)
            assert parts.transfers.settle(record.block.id) is None
        assert record.home is Tier.DRAM and record.at_home is State.VALID
        assert same_bits(tier._manager.read(record.block)[0], plain[2].weight)


def test_a_comparison_that_is_cut_short_leaves_it_dirty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(_transfer: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with loaded(tmp_path, dram=LAYERS) as (model, plain, tier):
        check(model, plain, 1)
        record, parts = shown(tier, model, 2), tier._manager.parts
        with tier._manager.lock:
            monkeypatch.setattr(parts.transfers, "wait", cut)
            with pytest.raises(KeyboardInterrupt):
                parts.transfers.drain(record)
            assert record.in_hbm is State.DIRTY and record.at_home is State.ABSENT
            parts.table.check()
            parts.transfers.drain(record)
            assert record.in_hbm is State.VALID and record.at_home is State.VALID
        check(model, plain)
        assert not elsewhere(tier)


# -- what has no room for another home ----------------------------------------------------


def write(models: tuple[Any, ...], number: int) -> None:
    for each in models:
        each[number].weight.mul_(1.5)


@pytest.mark.parametrize("depth", ["auto", 0])
@pytest.mark.parametrize("written", [(2,), (0, 5), (6, 7)])
def test_what_has_no_home_to_go_to_stays_while_others_can_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: Any, written: tuple[int, ...]
) -> None:
    """Neither for a block that is needed nor for one that is fetched ahead; nothing is moved."""
    with loaded(tmp_path, dram=0, prefetch_depth=depth) as (model, plain, tier):
        monkeypatch.setattr(tier._manager.parts.evictor, "_last_resort", None)
        check(model, plain)
        for number in written:
            write((model, plain), number)
        check(model, plain, 5)
        assert all(record_of(tier, n).in_hbm is State.DIRTY for n in written)
        assert not elsewhere(tier)
        tier._manager.parts.table.check()


def test_what_has_no_home_to_go_to_is_named_when_nothing_else_can_leave(tmp_path: Path) -> None:
    with loaded(tmp_path, dram=0) as (model, plain, tier):
        for number in range(3):
            write((model, plain), number)
        with pytest.raises(tiermem.CapacityError, match=r"does not fit in tier dram"):
            for number in range(3, LAYERS):
                write((model, plain), number)
        tier._manager.parts.table.check()


def test_a_home_that_there_is_room_for_later_is_had(tmp_path: Path) -> None:
    """And from then on the block is like any other."""
    with loaded(tmp_path, dram=1) as (model, plain, tier):
        manager, parts = tier._manager, tier._manager.parts
        with manager.lock:
            [(_, taken)] = parts.homes.reserve([HomeRequest("other", UNIT, "dram")])
        write((model, plain), 2)
        record = record_of(tier, 2)
        with manager.lock:
            assert parts.evictor.clear([record.extent.offset], wait=True)
            assert record.in_hbm is State.DIRTY and parts.transfers.failing == {record.block.id}
            with pytest.raises(tiermem.CapacityError):
                parts.evictor.clear([record.extent.offset], wait=True)
            assert not parts.evictor.clear([record.extent.offset], wait=False)
            parts.homes.release(Tier.DRAM, taken)
            assert parts.evictor.clear([record.extent.offset], wait=True)
        assert record.in_hbm is State.ABSENT and record.home is Tier.DRAM
        assert not parts.transfers.failing
        check(model, plain)


def test_what_has_no_home_to_go_to_is_slid_like_others(tmp_path: Path) -> None:
    """One gap is made of several around it, as of those around blocks in use."""
    with loaded(tmp_path, dram=0, hbm=6, prefetch_depth=0) as (model, plain, tier):
        check(model, plain)
        write((model, plain), 2)
        manager, parts = tier._manager, tier._manager.parts
        record = record_of(tier, 2)
        with manager.lock:
            parts.transfers.settle_all()
            parts.transfers.failing.add(record.block.id)
            parts.evictor._gather(5 * UNIT)
            assert record.in_hbm is State.DIRTY
            assert max(gap.nbytes for gap in parts.table.hbm.gaps()) == 5 * UNIT
        check(model, plain)


def test_what_is_there_for_good_finds_a_place_beside_it(tmp_path: Path) -> None:
    with loaded(tmp_path, dram=0, prefetch_depth=0) as (model, plain, tier):
        manager, parts = tier._manager, tier._manager.parts
        write((model, plain), 0)
        first = record_of(tier, 0)
        assert first.extent.offset == 0
        parts.transfers.failing.add(first.block.id)
        shape = TensorShape("t", (UNIT,), (1,), torch.uint8, 1)
        [block] = manager.add_blocks([("fixed", Role.BUFFER, [shape])], home="hbm")
        assert parts.table[block.id].extent is not None and first.in_hbm is State.DIRTY
        check(model, plain)


def test_what_has_no_home_to_go_to_is_saved_from_hbm(tmp_path: Path) -> None:
    with loaded(tmp_path, dram=0) as (model, plain, tier):
        write((model, plain), 2)
        check(model, plain)
        assert not tier._manager.parts.slots.current[record_of(tier, 2).block.id].wanted
        handle = tier.save(tmp_path / "saved", wait=False)
        handle.result()
        assert not elsewhere(tier)
        write((model,), 2)
        tier.load(tmp_path / "saved")
        check(model, plain)


# -- addresses that last as long as a read ------------------------------------------------


@pytest.mark.parametrize("fails", ["asked", "read"])
def test_a_read_of_files_that_fails_leaves_no_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Whether it cannot be asked for or does not come."""
    with loaded(tmp_path, dram=LAYERS) as (_, _, tier):
        manager, parts = tier._manager, tier._manager.parts
        [block] = manager.add_blocks(
            [("b", Role.PARAM, [TensorShape("t", (UNIT,), (1,), torch.uint8, 1)])], home="dram"
        )
        ranges = parts.homes.sources.ranges_of(record_of(tier, 2).home_extent)
        known = set(parts.homes.sources._ranges)
        if fails == "read":
            os.truncate(tmp_path / "model.safetensors", 100)
        else:
            monkeypatch.setattr(parts.transfers, "mover", None)
        for read in (
            lambda: manager.read_files(ranges, UNIT),
            lambda: manager.fill_from_files([(block, [ranges])]),
        ):
            with pytest.raises((tiermem.StorageError, InvariantError)):
                read()
            assert set(parts.homes.sources._ranges) == known
        monkeypatch.undo()


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("removed", [True, False])
def test_files_that_are_removed_or_replaced_are_given_back(
    tmp_path: Path, removed: bool, aligned: bool
) -> None:
    """As by a program that saves to the folder that it has loaded: the file is open, and whole."""
    plain, path = build(), tmp_path / "model.safetensors"
    save_file(plain.state_dict(), path)
    if not aligned:  # such a header is none of the library's writer, and valid
        data = path.read_bytes()
        header = data[8 : 8 + int.from_bytes(data[:8], "little")] + b" "
        path.write_bytes(len(header).to_bytes(8, "little") + header + data[7 + len(header) :])
    with tiermem.TierManager("cpu", hbm=4 * UNIT, dram=STAGING) as tier, torch.no_grad():
        model = tiermem.load_checkpoint(build, path, tier=tier)
        assert same_bits(model(X), plain(X))
        path.unlink()
        if not removed:
            save_file({name: value + 1 for name, value in plain.state_dict().items()}, path)
        assert same_bits(model(X), plain(X))
    check(model, plain, 1)
    assert all(map(same_bits, model.state_dict().values(), plain.state_dict().values()))
