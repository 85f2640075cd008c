"""Homes that lie packed: every word comes back, on streams in every order that events allow."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_packed_homes import WORDS, begin_packing, small_tiles, some_raw
from support_streams import DOWN, FILES, PACK, PAGE, SHAPE, UNPACK, UP, Case, Streamed, cases

from tiermem.core import packedhome
from tiermem.core.block import Extent, Role
from tiermem.core.packedhome import PackedHome
from tiermem.core.residency import State
from tiermem.testing.streams import SimulatedDevice
from tiermem.transfer.hosthomes import pack_home, unpack_home
from tiermem.transfer.streams import StreamCopyEngine

PACKED = cases(slots=(1, 4), blocks=(2, 7), depth=(0, 3), late=(UP, DOWN, UNPACK, PACK))


def exponent(word: int) -> int:
    """Returns the exponent of a word in bfloat16."""
    return word >> 7 & 0xFF


@given(
    st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=80),
    st.integers(0, 255),
    st.integers(0, 60),
)
def test_every_word_comes_back(odd: list[int], top: int, count: int) -> None:
    """Of a tile of words in one window, some of which are replaced by others."""
    with small_tiles():
        words = np.full(WORDS, (top << 7) | 5, dtype="<u2")
        for number in range(min(count, WORDS)):
            words[(number * 37) % WORDS] = odd[number % len(odd)]
        packed, behind = packedhome.pack_tile(words)
        largest = max(exponent(int(word)) for word in words)
        outside = sum(0 < exponent(int(word)) <= largest - 31 for word in words)
        assert (behind is not None) == (outside > 30)
        assert len(packed) == packedhome.PACKED_TILE
        assert (packedhome.unpack_tile(packed, behind) == words).all()


@given(st.integers(0, 5), st.integers(0, 2 * WORDS // 16 - 1), st.integers(0, 1 << 30))
def test_a_home_is_unpacked_where_it_is(tiles: int, rest: int, seed: int) -> None:
    with small_tiles():
        random = np.random.default_rng(seed)
        nbytes = tiles * packedhome.TILE + 16 * rest
        block = random.integers(0, 256, nbytes, dtype=np.uint8)
        for tile in range(tiles):
            if random.random() < 0.5:  # what can be packed
                block[tile * packedhome.TILE + 1 : (tile + 1) * packedhome.TILE : 2] = 60
        before = bytes(block)
        home = np.full(nbytes + 16, 7, dtype=np.uint8)
        raw, seen = np.zeros(tiles + 1, dtype=np.uint8), np.zeros(tiles + 1, dtype=np.uint8)
        there = [array.ctypes.data for array in (home, raw, seen)]
        form = PackedHome(there[0], tiles, 16 * rest, there[1], there[2])
        pack_home(form, block.ctypes.data)
        assert (raw == seen).all()
        found = np.zeros(nbytes + 1, dtype=np.uint8)
        unpack_home(form, found.ctypes.data)
        assert bytes(found) == before + b"\0"
        unpack_home(form, form.address)
        assert bytes(home) == before + 16 * b"\7"


@settings(max_examples=100)
@given(PACKED)
def test_nothing_is_read_or_overwritten_too_soon(case: Case) -> None:
    """Random uses; what is written goes home packed, or as it is, by turns."""
    with small_tiles() as patch, some_raw(patch):
        bench = Streamed(case)
        random = Random(case.seed + 1)
        begin_packing(bench.manager, places=random.randint(2, 5))
        loop = [random.randrange(case.blocks) for _ in range(case.blocks)]
        with bench:
            for round_number in range(5):
                bench.manager.begin_pass("loop")
                for number in loop:
                    record = bench.manager.record(bench.blocks[number])
                    record.packs = random.random() < 0.8
                    kind, writable = random.random(), number > 0  # the first is looked at beside
                    bench.use(
                        number, write=writable and kind < 0.6, discard=writable and kind > 0.9
                    )
                    bench.stray(random)
                    bench.run_on(random)
                if round_number == 2:
                    random.shuffle(loop)
                if random.random() < 0.1:
                    bench.manager.parts.transfers.packed_homes.stop()


@settings(max_examples=60)
@given(cases(slots=(1, 3), blocks=(5, 5), depth=(1, 1), lags=(0, 1, 3), late=(UP, UNPACK, PACK)))
def test_nor_where_the_host_writes_homes_or_others_get_them(case: Case) -> None:
    with small_tiles() as patch, some_raw(patch):
        bench = Streamed(case)
        random = Random(case.seed + 1)
        room = random.choice([0, 2, 4])
        begin_packing(bench.manager, places=room)
        with bench:
            for round_number in range(4):
                bench.manager.begin_pass("loop")
                for number in range(case.blocks):
                    bench.manager.record(bench.blocks[number]).packs = bool(room)
                    kind = random.random()
                    if kind < 0.6:
                        bench.use(number, write=kind < 0.5, discard=False)
                    elif kind < 0.75:
                        bench.rewrite(number)
                    elif kind < 0.85 and round_number:
                        bench.replace(number)
                    elif kind < 0.95:
                        bench.glance(number)
                    bench.run_on(random)
                if round_number == 2:
                    bench.manager.parts.transfers.packed_homes.end()
                    assert not bench.manager.parts.homes.packed


@pytest.mark.parametrize("places", [2, 3])
def test_less_is_copied(places: int) -> None:
    with small_tiles():
        bench = Streamed(Case(seed=3, slots=2, blocks=4, depth=0, lag=2, late=None, poison=True))
        begin_packing(bench.manager, places=places)
        with bench:
            for _ in range(3):
                for number, block in enumerate(bench.blocks):
                    bench.manager.record(block).packs = True
                    bench.use(number, write=True, discard=False)
            moved = bench.manager.stats().links["hbm->dram"]
            assert moved.nbytes == moved.moves * 4 * 960
        up = bench.manager.stats().links["dram->hbm"]
        assert up.nbytes < up.moves * 4096


@pytest.mark.parametrize("seed", range(10))
def test_a_home_comes_up_once_it_is_there(seed: int) -> None:
    """To another place, of which nothing but the home tells that it is to wait."""
    with small_tiles():
        device = SimulatedDevice(Random(seed))
        engine = StreamCopyEngine(device, UP, DOWN, FILES, UNPACK, PACK)
        tile = packedhome.TILE
        nbytes = 5 * tile + 64
        room, home, flags = (np.zeros(count, dtype=np.uint8) for count in (6 * tile, nbytes, 8))
        engine.use_room(torch.from_numpy(room), Extent(0, room.size))
        generator = torch.Generator().manual_seed(seed)
        source = torch.randn(nbytes // 2, generator=generator).bfloat16()
        for number in range(5):
            if (seed >> number) & 1:  # a raw one
                tile_of = source[number * WORDS : (number + 1) * WORDS].view(torch.int16)
                tile_of.random_(-(1 << 15), 1 << 15, generator=generator)
        target = torch.zeros_like(source)
        there = home.ctypes.data, 5, 64, flags.ctypes.data, flags.ctypes.data
        form = PackedHome(*there)
        words = [each.view(torch.uint8) for each in (source, target)]
        event = engine.down_home(form, words[0], Extent(1 << 20, nbytes), None)
        engine.up_home(words[1], form, Extent(1 << 21, nbytes), event)
        while device.advance(UP) or device.advance(UNPACK):
            pass
        device.synchronize()
        assert torch.equal(source.view(torch.int16), target.view(torch.int16))
        engine.open_home(form)
        assert torch.equal(torch.from_numpy(home), words[0])


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_a_home_is_opened_after_writes_of_another_were_cut_short(
    monkeypatch: pytest.MonkeyPatch, times: int, late: bool
) -> None:
    def cut_short(*_: object) -> None:
        raise KeyboardInterrupt

    with small_tiles():
        device = SimulatedDevice(Random(0))
        engine = StreamCopyEngine(device, UP, DOWN, FILES, UNPACK, PACK)
        tile, tiles = packedhome.TILE, 100
        nbytes = tiles * tile
        room, home, flags = (np.zeros(count, dtype=np.uint8) for count in (16 * tile, nbytes, 128))
        engine.use_room(torch.from_numpy(room[: 12 * tile]), Extent(0, 12 * tile))
        source = torch.randint(-(1 << 15), 1 << 15, (nbytes // 2,), dtype=torch.int16)
        words = source.view(torch.uint8)
        form = PackedHome(home.ctypes.data, tiles, 0, flags.ctypes.data, flags.ctypes.data)
        engine.down_home(form, words, Extent(1 << 20, nbytes), None)
        device.synchronize()
        other = np.zeros(nbytes, dtype=np.uint8)
        others = PackedHome(other.ctypes.data, tiles, 0, flags.ctypes.data, flags.ctypes.data)
        for _ in range(times):
            with monkeypatch.context() as patch:
                patch.setattr(device, "copy_behind" if late else "pack_home", cut_short)
                with pytest.raises(KeyboardInterrupt):
                    engine.down_home(others, words, Extent(1 << 21, nbytes), None)
        device.synchronize()
        engine.open_home(form)
        assert torch.equal(torch.from_numpy(home), words)
        assert not room[12 * tile :].any()  # which others have


def packed_bench() -> Streamed:
    """Returns a bench of which every home lies packed, and nothing is in HBM or under way."""
    bench = Streamed(Case(seed=3, slots=2, blocks=4, depth=0, lag=2, late=None, poison=True))
    begin_packing(bench.manager, places=3)
    for number, block in enumerate(bench.blocks):
        bench.manager.record(block).packs = True
        bench.use(number, write=True, discard=False)
    for block in bench.blocks:
        if bench.manager.record(block).in_hbm is State.DIRTY:
            bench.manager.parts.transfers.drain(bench.manager.record(block))
    bench.device.synchronize()
    assert len(bench.manager.parts.homes.packed) == 4
    return bench


def test_a_home_that_another_block_gets_lies_as_it_is() -> None:
    with small_tiles():
        bench = packed_bench()
        homes = bench.manager.parts.homes
        bench.manager.remove_blocks(bench.blocks[:2])
        assert len(homes.packed) == 2
        for number in range(2):
            (bench.blocks[number],) = bench.manager.add_blocks([("other", Role.PARAM, [SHAPE])])
            value = torch.full((PAGE,), bench.values[number], dtype=torch.uint8)
            bench.manager.write_home(bench.blocks[number], [value])
        with bench:
            assert len(homes.packed) == 2


def test_a_home_that_the_host_writes_lies_as_it_is() -> None:
    with small_tiles():
        bench = packed_bench()
        for number, block in enumerate(bench.blocks):
            bench.manager.discard(block)
            value = torch.full((PAGE,), bench.values[number], dtype=torch.uint8)
            bench.manager.write_home(block, [value])
        with bench:
            assert not bench.manager.parts.homes.packed


def test_without_its_room_the_host_tells_which_tiles_are_raw() -> None:
    with small_tiles() as patch, some_raw(patch):
        bench = packed_bench()
        packed_homes = bench.manager.parts.transfers.packed_homes
        packed_homes.stop()
        bench.manager.parts.copy.use_room(None, Extent(0, 0))
        for given_back in packed_homes.kept:  # type: ignore[attr-defined]
            given_back.random_(1, 255)
        with bench:
            pass
