"""Packed copies: the format, who makes them, and when they are used and given up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support_packed import FLOATS, NBYTES, Bench, always_used, pack, small_tiles
from support_packed import WORDS as FEW
from support_streams import DOWN, FILES, UP
from torch import nn

import tiermem
import tiermem.runtime.services.packer as packer_module
from tiermem.core.block import Extent, Tier
from tiermem.core.cost import Timetable
from tiermem.core.loops import Plan
from tiermem.core.packing import (
    ESCAPES,
    GROWS,
    PACKED_TILE,
    TILE,
    WORDS,
    Packed,
    pack_tile,
    packed_nbytes,
    parts_of,
    unpack_tile,
)
from tiermem.errors import InvariantError
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.runtime.lookahead.stream_plan import StreamPlan
from tiermem.runtime.services.packer import Wanted
from tiermem.testing.streams import SimulatedDevice
from tiermem.transfer.copy import HostCopyEngine
from tiermem.transfer.streams import StreamCopyEngine

# -- the format ---------------------------------------------------------------------------------


def normal(scale: float, seed: int = 0) -> torch.Tensor:
    """Returns a tile of bfloat16 words as weights are: int16, ``[8192]``."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(WORDS, generator=generator) * scale).bfloat16().view(torch.int16)


def words_of(tensor: torch.Tensor) -> np.ndarray:
    """Returns int16 words as numpy has them."""
    return tensor.numpy().view(np.uint16)


@given(
    st.floats(1e-30, 1e30),
    st.integers(0, 1 << 20),
    st.lists(
        st.tuples(st.integers(0, WORDS - 1), st.integers(-(1 << 15), (1 << 15) - 1)), max_size=20
    ),
)
def test_a_tile_comes_back_bit_for_bit(
    scale: float, seed: int, others: list[tuple[int, int]]
) -> None:
    tile = normal(scale, seed)
    for at, word in others:
        tile[at] = word
    words = words_of(tile)
    packed = pack_tile(words)
    if packed is None:  # by chance some more of a normal distribution are escapes
        assert len(others) > ESCAPES // 2
        return
    assert packed.shape == (PACKED_TILE,)
    assert (unpack_tile(packed) == words).all()


@pytest.mark.parametrize("base", range(-15, 256, 15))
def test_every_word_comes_back_from_within_its_window(base: int) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    exponents = (every.astype(int) >> 7) & 0xFF
    inside = every[((exponents > base) & (exponents <= base + 15)) | (exponents == 0)]
    words = np.resize(inside, WORDS)
    packed = pack_tile(words)
    assert packed is not None and (unpack_tile(packed) == words).all()


@pytest.mark.parametrize("more", [0, 1])
def test_a_tile_has_room_for_so_many_escapes_and_no_more(more: int) -> None:
    words = words_of(torch.full((WORDS,), 1.0).bfloat16().view(torch.int16)).copy()
    words[: ESCAPES + more] = 0x0080  # the least that is normal
    packed = pack_tile(words)
    if more:
        assert packed is None
    else:
        assert packed is not None and (unpack_tile(packed) == words).all()


def test_zeros_and_subnormals_are_no_escapes() -> None:
    words = words_of(normal(0.02)).copy()
    words[::2] = 0
    words[1:200:2] = 0x8003
    packed = pack_tile(words)
    assert packed is not None and (unpack_tile(packed) == words).all()


def test_words_of_any_kind_are_not_packed() -> None:
    assert pack_tile(np.random.default_rng(0).integers(0, 1 << 16, WORDS, dtype=np.uint16)) is None


@given(st.integers(1, 400))
def test_a_tile_covers_no_packed_one_behind_it(tiles: int) -> None:
    """So each can be written once those before it have been read, as kernels do."""
    before = tiles * GROWS
    for tile in range(tiles):
        last = (tile + 1) * TILE - 1
        assert last < before or (last - before) // PACKED_TILE <= tile


@given(st.integers(1, 1 << 22), st.lists(st.tuples(st.integers(0, 99), st.integers(1, 99))))
def test_parts_cover_a_block(nbytes: int, gaps: list[tuple[int, int]]) -> None:
    rows, at = [], 0
    for gap, size in gaps:
        if at + 512 * (gap + size) <= nbytes:
            rows.append((at + 512 * gap, 512 * size))
            at += 512 * (gap + size)
    parts = parts_of(nbytes, rows)
    ends = [0] + [part.begin + part.nbytes for part in parts]
    assert [part.begin for part in parts] == ends[:-1] and ends[-1] == nbytes
    offsets = [0]
    for part in parts:
        assert part.offset == offsets[-1]
        offsets.append(part.offset + part.nbytes // TILE * PACKED_TILE + part.nbytes % TILE)
    assert packed_nbytes(parts) == offsets[-1]
    assert set(rows) <= {(part.begin, part.nbytes) for part in parts}


def test_rows_are_parts_of_what_is_packed_where_they_begin_with_a_tile() -> None:
    begin, row, count = 512, 3 * TILE, 5
    parts = parts_of(begin + count * row + 100, [(begin, count * row)])
    packed = Packed(1 << 20, parts, packed_nbytes(parts))
    third = packed.within(begin + 2 * row, 2 * row)
    assert third is not None
    [part] = third.parts
    assert (part.begin, part.nbytes, part.tiles) == (begin + 2 * row, 2 * row, 6)
    assert part.offset == parts[1].offset + 6 * PACKED_TILE
    assert third.moved == part.moved == 6 * PACKED_TILE
    assert packed.within(begin + 1, row) is None  # within a tile
    assert packed.within(begin + row, row + 1) is None
    assert packed.within(begin + 4 * row, 2 * row) is None  # over the end
    assert packed.within(0, begin + row) is None  # of two parts
    last = packed.within(begin + count * row, 100)
    assert last is not None and last.moved == 100
    assert packed.within(1 << 40, 1) is None


# -- the engine ---------------------------------------------------------------------------------


def test_host_copies_are_not_packed() -> None:
    engine, some = HostCopyEngine(), torch.zeros(4, dtype=torch.uint8)
    packed = Packed(0, parts_of(4), 4)
    assert not engine.packs
    with pytest.raises(InvariantError, match="not packed"):
        engine.packing(some, Extent(0, 4), 1)
    with pytest.raises(InvariantError, match="not packed"):
        engine.up_packed(some, packed, Extent(0, 4))
    with pytest.raises(InvariantError, match="not packed"):
        engine.up_packed_behind(some, packed, ())


def test_an_engine_without_a_stream_for_kernels_packs_nothing() -> None:
    engine = StreamCopyEngine(SimulatedDevice(Random(0)), UP, DOWN, FILES)
    assert not engine.packs
    with pytest.raises(InvariantError, match="nothing is packed here"):
        engine.packing(torch.zeros(4, dtype=torch.uint8), Extent(0, 4), 1)


# -- who makes them -----------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small tiles, and small blocks that are packed."""
    monkeypatch.setattr(packer_module, "_LEAST", NBYTES)
    with small_tiles():
        yield


makes = pytest.mark.usefixtures("small")


@makes
def test_blocks_come_up_packed_with_their_bits() -> None:
    bench = Bench(dram=140)
    before = bench.used_dram()
    assert bench.pack() == len(bench.blocks) == len(bench.packed)
    assert bench.packed.nbytes == bench.used_dram() - before
    assert bench.manager.stats().packed_in_dram == bench.packed.nbytes
    assert bench.pack() == 0  # all have one
    always_used(bench.manager)
    bench.manager.begin_pass("all")
    for number, value in enumerate(bench.values):
        assert torch.equal(bench.seen(number), value)
    assert bench.up() == len(bench.blocks) * 8 * 896  # of 8 * 1,024
    bench.manager.close()


@makes
def test_passes_that_do_not_wait_for_the_link_use_none() -> None:
    bench = Bench(dram=140)
    assert bench.pack()
    bench.manager.begin_pass("all")
    assert torch.equal(bench.seen(0), bench.values[0])
    assert bench.up() == NBYTES
    bench.manager.close()


@makes
def test_what_is_no_bfloat16_or_all_fits_is_not_packed() -> None:
    floats = Bench(FLOATS, dram=140)
    assert floats.pack() == 0 == len(floats.packed)
    floats.manager.close()
    fits = Bench(hbm=60, dram=140)
    assert fits.pack() == 0 == len(fits.packed)
    fits.manager.close()


@makes
def test_a_block_that_cannot_be_packed_leaves_nothing_behind() -> None:
    bench = Bench(dram=140)
    odd = bench.blocks[1]
    anything = torch.randint(-(1 << 15), 1 << 15, (NBYTES // 2,), dtype=torch.int16)
    bench.write(1, anything.view(torch.bfloat16))
    before = bench.used_dram()
    assert bench.pack() == len(bench.blocks) - 1
    assert odd not in bench.packed
    assert bench.packed.nbytes == bench.used_dram() - before
    bench.manager.close()


@makes
def test_half_of_the_spare_dram_is_left() -> None:
    bench = Bench(dram=60)  # 40 of them are homes
    bench.pack()
    assert 0 < len(bench.packed) < len(bench.blocks)
    assert bench.packed.nbytes <= 10 * NBYTES
    bench.manager.close()


@makes
def test_dram_that_homes_need_is_taken_from_packed_copies() -> None:
    bench = Bench(dram=60)
    assert bench.pack()
    more = bench.add(15)
    assert len(more) == 15 and len(bench.packed) == 0 == bench.packed.nbytes
    always_used(bench.manager)
    bench.manager.begin_pass("all")
    assert torch.equal(bench.seen(3), bench.values[3])
    bench.manager.close()


@makes
def test_a_copy_of_bytes_that_were_written_since_is_given_up() -> None:
    bench = Bench(dram=140)
    before = bench.used_dram()
    assert bench.pack()
    always_used(bench.manager)
    bench.manager.begin_pass("all")
    bench.write(2, torch.ones_like(bench.values[2]))
    for number in (*range(5, 40), 2):  # it has left HBM
        assert torch.equal(bench.seen(number), bench.values[number])
    assert bench.blocks[2] not in bench.packed
    bench.manager.remove_blocks([bench.blocks[3]])
    assert bench.blocks[3] not in bench.packed
    bench.manager.begin_pass("all")  # gives their DRAM back
    assert bench.used_dram() - before + NBYTES == bench.packed.nbytes == 38 * NBYTES
    bench.manager.close()


@makes
def test_dram_is_given_back_once_nothing_is_copied_from_there() -> None:
    bench = Bench(dram=140)
    assert bench.pack()
    always_used(bench.manager)
    manager, block = bench.manager, bench.blocks[0]
    manager.begin_pass("all")
    with manager.lock:
        view = manager.acquire(block).views[0]  # the device has not begun yet
        copy = bench.packed.used[block.id]
        bench.packed.drop(block)
        manager.begin_pass("all")
        assert not manager.parts.homes.holds(Tier.DRAM, copy.extent)
        manager.parts.homes.arena.bytes_of(copy.extent).zero_()  # whoever has it next
        manager.parts.copy.synchronize()
        assert torch.equal(view, bench.values[0])
        del view
        manager.release(block)
    manager.close()


@makes
def test_an_exception_amid_packing_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(dram=140)
    before, blocks = bench.used_dram(), len(bench.manager.parts.table)
    begin, calls = bench.packer._begin, iter(range(40))

    def cut_short(*args: object) -> None:
        if next(calls) == 3:
            raise KeyboardInterrupt
        begin(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(bench.packer, "_begin", cut_short)
    with pytest.raises(KeyboardInterrupt):
        bench.pack()
    assert bench.used_dram() == before and len(bench.manager.parts.table) == blocks
    assert len(bench.packed) == 0
    monkeypatch.undo()
    bench.manager.close()


@makes
def test_the_room_for_packing_is_not_moved_under_its_kernels() -> None:
    bench = Bench(dram=140)
    with bench.manager.lock, bench.packer._room() as room:
        assert room is not None
        parts = bench.manager.parts
        [record] = [r for r in parts.table if r.fixed]
        assert record.extent == room[1] and not parts.evictor.rules.movable(record)
    bench.manager.close()


@makes
def test_homes_are_repaired_with_packed_copies_in_place() -> None:
    bench = Bench(dram=140)
    assert bench.pack()
    bench.manager.repair_blocks()
    owned = [place for place in bench.manager.parts.homes.owned() if place[0] is Tier.DRAM]
    assert len(owned) >= len(bench.packed) == len(bench.blocks)
    always_used(bench.manager)
    bench.manager.begin_pass("all")
    assert torch.equal(bench.seen(1), bench.values[1])
    bench.manager.close()


@makes
def test_rows_of_a_block_are_packed_by_themselves() -> None:
    bench = Bench(dram=140)
    rows = [(2 * FEW, 4 * 2 * FEW)]
    assert pack(bench.manager, bench.blocks[:1], rows) == 1
    always_used(bench.manager)
    bench.manager.begin_pass("all")
    assert torch.equal(bench.seen(0), bench.values[0])
    whole = bench.packed.of(bench.manager.parts.table[bench.blocks[0].id])
    assert whole is not None and len(whole.parts) == 3
    bench.manager.close()


# -- when they are used -------------------------------------------------------------------------


def plan(copies: float, computes: float | None) -> StreamPlan:
    """Returns a plan of passes that copy and compute for so many seconds."""
    none = Plan(frozenset(), 0)
    empty = Timetable((), ())
    return StreamPlan((), none, 0, lambda: empty, (), False, copies=copies, computes=computes)


@pytest.mark.parametrize(
    ("copies", "computes", "longest", "binds"),
    [
        (0.0, None, None, False),  # nothing moves, or what moves is written
        (0.0, 0.1, 0.1, False),
        (1.0, None, None, True),  # nothing is known yet
        (1.2, 1.0, None, True),
        (1.2, 1.0, 9.0, True),
        (1.1, 1.0, None, False),
        (1.0, 1.1, 1.05, True),  # the host's time was taken for compute
        (1.0, 1.1, 1.2, False),
        (1.0, 1.2, 1.05, False),  # so long that something must be
    ],
)
def test_passes_wait_for_the_link(
    copies: float, computes: float | None, longest: float | None, binds: bool
) -> None:
    assert plan(copies, computes).link_binds(longest) is binds


def test_what_a_plan_says_of_copies_goes_with_its_times() -> None:
    old, new = plan(1.0, 0.5), plan(1.0, 2.0)
    assert old.decides_as(new)
    old.take_times(new)
    assert (old.copies, old.computes) == (1.0, 2.0)


class Asked:
    """Stands for a packer: notes which blocks it is asked to pack."""

    def __init__(self, runtime: ModuleRuntime) -> None:
        self.blocks: list[list[str]] = []
        runtime.packer = self  # type: ignore[assignment]

    def pack(self, wanted: Iterable[Wanted]) -> int:
        """Packs nothing."""
        self.blocks.append([want.block.name for want in wanted])
        return 0

    def repair(self) -> None:
        """Has nothing to repair."""


def layers() -> nn.Sequential:
    """Returns three linear layers."""
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))


@pytest.fixture
def tier() -> Iterator[tiermem.TierManager]:
    """Tiers in which three layers do not fit in HBM."""
    with tiermem.TierManager("cpu", hbm="48KiB", dram="64MiB") as tier:
        yield tier


def test_a_model_in_evaluation_is_packed_as_it_is_wrapped(tier: tiermem.TierManager) -> None:
    asked = Asked(tier._runtime)
    tier.wrap(layers().eval())
    [blocks] = asked.blocks
    assert len(blocks) == 3


def test_of_a_model_in_training_what_is_frozen_is(tier: tiermem.TierManager) -> None:
    asked = Asked(tier._runtime)
    model = layers()
    model[1].requires_grad_(False)
    tier.wrap(model)
    [[name]] = asked.blocks
    assert "1" in name
    model(torch.zeros(64)).sum().backward()
    with torch.no_grad():
        for _ in range(3):
            model(torch.zeros(64))
    assert len(asked.blocks) == 1  # it is trained


def test_the_rest_is_once_it_turns_out_not_to_be_trained(tier: tiermem.TierManager) -> None:
    asked = Asked(tier._runtime)
    model = tier.wrap(layers())
    with torch.no_grad():
        model(torch.zeros(64))
        assert asked.blocks == [[]]
        model(torch.zeros(64))
        model(torch.zeros(64))
    assert [len(blocks) for blocks in asked.blocks] == [0, 3]


def test_nor_what_an_optimizer_steps_or_is_gone(tier: tiermem.TierManager) -> None:
    asked = Asked(tier._runtime)
    model, other = tier.wrap(layers()), tier.wrap(nn.Linear(8, 8))
    tier.unwrap(model)
    with torch.no_grad():
        for _ in range(3):
            other(torch.zeros(8))
    assert [len(blocks) for blocks in asked.blocks] == [0, 0, 1]
    stepped = tier.wrap(layers())
    optimizer = tier.optimizer(stepped, torch.optim.SGD, lr=0.1)
    with torch.no_grad():
        for _ in range(3):
            stepped(torch.zeros(64))
    assert [len(blocks) for blocks in asked.blocks] == [0, 0, 1, 0]
    optimizer.close()


def test_each_model_for_itself_and_not_while_a_graph_is_captured(
    tier: tiermem.TierManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(tier._runtime)
    trained, evaluated = tier.wrap(layers()), tier.wrap(layers())
    with torch.no_grad():
        evaluated(torch.zeros(64))
    trained(torch.zeros(64)).sum().backward()
    copy = tier._manager.parts.copy
    with torch.no_grad():
        monkeypatch.setattr(copy, "capturing", lambda: True)
        tier._runtime._pack_untrained(1, training=False)
        monkeypatch.undo()
        assert [len(blocks) for blocks in asked.blocks] == [0, 0]
        evaluated(torch.zeros(64))
        assert [len(blocks) for blocks in asked.blocks] == [0, 0, 3]
        for _ in range(3):
            trained(torch.zeros(64))
    assert len(asked.blocks) == 3


@makes
def test_copies_of_what_was_written_since_are_given_up_by_passes_that_use_none() -> None:
    bench = Bench(dram=140)
    before = bench.used_dram()
    assert bench.pack()
    for number in range(3):
        bench.write(number, torch.ones_like(bench.values[number]))
    bench.manager.begin_pass("all")
    assert bench.packed.nbytes == bench.used_dram() - before == 37 * NBYTES
    assert bench.pack() == 3  # they are packed again
    bench.manager.close()


@makes
def test_dram_that_is_lent_comes_from_packed_copies_but_not_for_others() -> None:
    bench = Bench(dram=60)
    assert bench.pack()
    homes = bench.manager.parts.homes
    assert homes.lend(15 * NBYTES, spare=True) is None and len(bench.packed)
    extent = homes.lend(15 * NBYTES)
    assert extent is not None and not len(bench.packed)
    homes.release(Tier.DRAM, extent)
    bench.manager.close()


@makes
def test_a_home_that_is_written_is_known_to_be_before_it_counts_as_there() -> None:
    bench = Bench(dram=140)
    [block] = bench.add(1)
    record = bench.manager.parts.table[block.id]
    seen = []

    class Watched(type(record)):  # type: ignore[misc]
        __slots__ = ()

        def __setattr__(self, name: str, value: object) -> None:
            seen.append(name)
            super().__setattr__(name, value)

    record.__class__ = Watched
    bench.manager.write_home(block, [bench.values[0]])
    assert seen.index("home_writes") < seen.index("at_home")
    bench.manager.close()


@makes
def test_the_wait_for_a_place_is_no_time_on_the_link() -> None:
    bench = Bench(dram=140)
    assert bench.pack()
    always_used(bench.manager)
    manager, order = bench.manager, list[str]()
    timer, copy = manager.parts.pass_timer, manager.parts.copy
    manager.begin_pass("all")

    def noted(name: str, act: Callable[..., object]) -> Callable[..., object]:
        def noting(*args: object) -> object:
            order.append(name)
            if name == "rising":
                assert isinstance(args[0], Extent)  # whose readers are waited for first
            return act(*args)

        return noting

    timer.sampling = True
    timer.rising = noted("rising", timer.rising)  # type: ignore[method-assign, assignment]
    timer.risen = noted("risen", timer.risen)  # type: ignore[method-assign, assignment]
    copy.up_packed = noted("copy", copy.up_packed)  # type: ignore[method-assign, assignment]
    assert torch.equal(bench.seen(0), bench.values[0])
    assert order[:3] == ["rising", "copy", "risen"]
    timer.sampling = False
    manager.close()


@makes
def test_rows_count_only_as_long_as_there_is_a_room_for_experts() -> None:
    bench = Bench(dram=140)
    assert bench.pack()
    rows = [True]
    bench.packed.by_rows = lambda: rows[0]
    bench.packed.begin(1, link_binds=False)
    assert bench.packed.used
    bench.packed.begin(1 << 15, link_binds=False)  # compute binds
    assert not bench.packed.used
    rows[0] = False
    bench.packed.begin(1, link_binds=False)
    assert not bench.packed.used
    bench.manager.close()
