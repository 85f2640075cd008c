"""Copies of experts and kernels that read them, on streams in every order that events allow."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from functools import partial
from random import Random

import torch
from hypothesis import given
from hypothesis import strategies as st
from support_packed import pack, small_tiles
from support_streams import PAGE, manager_over

from tiermem.core.block import Role
from tiermem.core.experts import Way
from tiermem.core.layout import TensorShape
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.memory.expert_seats import Piece, Use
from tiermem.runtime.services.expert_store import ExpertStore
from tiermem.runtime.services.saved_experts import SavedExperts
from tiermem.testing.streams import SimulatedDevice

EXPERTS, STACKS = 5, 3


def begun(device: SimulatedDevice, pages: int) -> tuple[BlockManager, ExpertStore]:
    """Returns a manager with HBM of so many pages, and a store of stacks of two tensors each."""
    manager = manager_over(device, hbm=pages * PAGE, dram=96 * PAGE)
    shape = TensorShape("w", (EXPERTS, 16, 256), (PAGE, 256, 1), torch.uint8, 1)
    wanted = [(f"s{i}", Role.PARAM, [shape, shape]) for i in range(STACKS)]
    store = ExpertStore(manager)
    blocks = manager.add_blocks(wanted)
    for number, block in enumerate(blocks):
        rows = torch.arange(EXPERTS, dtype=torch.uint8)[:, None, None].expand(EXPERTS, 16, 256)
        manager.write_home(block, [rows + 10 * number, rows + 10 * number + 100])
        assert store.add(block, EXPERTS) is not None
    return manager, store


def pack_stacks(manager: BlockManager, store: ExpertStore, random: Random) -> None:
    """Packs some stacks or all, and uses that in every pass."""
    some = random.sample([*store.stacks.values()], random.randint(1, STACKS))
    for stack in some:
        assert pack(manager, [stack.block], stack.with_rows()) == 1
    packed = manager.parts.transfers.packed
    packed.begin(0, link_binds=True)
    assert len(packed.used) == len(some)


@given(st.integers(0, 1 << 30), st.integers(0, 8), st.integers(0, 8), st.booleans(), st.booleans())
def test_no_expert_is_read_too_soon(
    seed: int, more: int, lag: int, two: bool, packed: bool
) -> None:
    random = Random(seed)
    device = SimulatedDevice(random)
    with small_tiles():
        no_expert_is_read_too_soon(random, device, more, lag, two, packed)


def no_expert_is_read_too_soon(
    random: Random, device: SimulatedDevice, more: int, lag: int, two: bool, packed: bool
) -> None:
    manager, store = begun(device, 8 + more)
    if packed:
        pack_stacks(manager, store, random)
    wrong: list[str] = []
    stacks = [store.stacks[block_id] for block_id in sorted(store.stacks)]

    def look(address: int, value: int) -> None:
        if ctypes.string_at(address, PAGE) != bytes([value]) * PAGE:
            wrong.append(f"{value} is not there")

    def copied(use: Use, tensor: int, experts: Sequence[int]) -> None:
        found = store.together(use, use.stack, tensor, experts)
        for expert, row in zip(experts, found or (), strict=False):
            assert row.shape == (1, 16, 256)
            value = expert + 10 * stacks.index(use.stack) + 100 * tensor
            device.submit(device.stream, partial(look, row.data_ptr(), value))

    def read(use: Use, pieces: Sequence[Piece]) -> None:
        if random.random() < 0.5:
            for tensor in (0, 1):
                experts = [piece.expert for piece in pieces if piece.tensor == tensor]
                if experts:
                    copied(use, tensor, experts)
        for piece in pieces if random.random() < 0.7 else ():
            rows = store.rows(use, use.stack, piece.tensor, [piece.expert])
            assert rows is not None
            value = piece.expert + 10 * stacks.index(use.stack) + 100 * piece.tensor
            device.submit(device.stream, partial(look, rows[0].data_ptr(), value))
            del rows  # like a kernel's, its operands are addresses
            for _ in range(random.randint(0, lag)):
                device.advance()

    saved, calls = SavedExperts(store), list[Use]()
    with manager.lock:
        for turn in range(24):
            store.prepare(set(store.stacks) if turn == 15 else ())
            number = turn % STACKS
            stack = stacks[number]
            if not (store.open and store.usable(stack)):
                assert turn == 15
                continue
            device.stream = random.choice([0, 1]) if two else 0
            chosen = sorted(random.sample(range(EXPERTS), random.randint(1, EXPERTS)))
            counts = dict.fromkeys(chosen, 1)
            pieces = [stack.piece(tensor, expert) for expert in chosen for tensor in (0, 1)]
            use = Use(stack, counts, pieces)
            store.begin(use)
            read(use, pieces)
            use.saved.update(dict.fromkeys(random.sample(pieces, random.randint(1, len(pieces)))))
            calls.append(use)
            store.end(use)
            if random.random() < 0.3:  # backward, which may leave something unasked
                for call in calls[::-1]:
                    asked = [piece for piece in [*call.saved][::-1] if random.random() < 0.9]
                    read(saved.resume(call), asked)
                saved.end_backward()
                calls.clear()
    manager.parts.copy.synchronize()
    assert not wrong
    manager.close()


@given(st.integers(0, 1 << 30), st.integers(0, 14), st.integers(0, 8), st.booleans(), st.booleans())
def test_no_whole_tensor_is_read_too_soon(
    seed: int, more: int, lag: int, two: bool, packed: bool
) -> None:
    """In turn or not, and with passes in between that go another way."""
    random = Random(seed)
    device = SimulatedDevice(random)
    with small_tiles():
        no_whole_tensor_is_read_too_soon(random, device, more, lag, two, packed)


def no_whole_tensor_is_read_too_soon(
    random: Random, device: SimulatedDevice, more: int, lag: int, two: bool, packed: bool
) -> None:
    manager, store = begun(device, 2 * EXPERTS + 1 + more)
    if packed:
        pack_stacks(manager, store, random)
    wrong: list[str] = []
    stacks = [store.stacks[block_id] for block_id in sorted(store.stacks)]

    def look(address: int, number: int, tensor: int) -> None:
        for expert in range(EXPERTS):
            value = expert + 10 * number + 100 * tensor
            if ctypes.string_at(address + expert * PAGE, PAGE) != bytes([value]) * PAGE:
                wrong.append(f"{value} is not there")

    def read(number: int, tensor: int) -> None:
        lent = store.lend(stacks[number], tensor)
        assert lent is not None
        address, view = lent[1].data_ptr(), lent[1]
        assert view.shape == (EXPERTS, 16, 256)
        device.submit(device.stream, partial(look, address, number, tensor))
        for _ in range(random.randint(0, lag)):
            device.advance()
        store.tensors.take_back(lent[0])

    with manager.lock:
        for turn in range(8):
            store.prepare((), way=Way.TENSORS)
            assert store.goes is Way.TENSORS
            if turn != 6:  # an exception may come in between
                store.begin_pass()
            order = list(range(STACKS))
            if random.random() < 0.3:
                random.shuffle(order)
            for number in order:
                device.stream = random.choice([0, 1]) if two else 0
                for tensor in (0, 1):
                    read(number, tensor)
            if turn == 4:
                store.prepare((), way=random.choice([Way.EACH, Way.LAYERS]))
    manager.parts.copy.synchronize()
    assert not wrong
    manager.close()


def test_a_view_that_goes_as_copies_begin_takes_no_others_along() -> None:
    """Of each seat that is given out it is known that its reader is still to be waited for."""
    _manager, store = begun(SimulatedDevice(Random(0)), 9)
    with store._manager.lock:
        store.prepare(set())
        stack = next(iter(store.stacks.values()))
        use = Use(stack, dict.fromkeys(range(EXPERTS), 1), [stack.piece(0, e) for e in (0, 1, 2)])
        store.begin(use)
        kept = [store.rows(use, stack, 0, [expert]) for expert in (0, 1)]
        assert all(kept)
        again = Use(stack, {1: 1}, [stack.piece(0, 1)])
        store.begin(again)
        again.coming[0] = deque([(0, stack.piece(0, 1))])
        go_on = store._go_on

        def drops(use: Use) -> bool:
            kept.clear()
            store._note_released()
            return go_on(use)

        store._go_on = drops  # type: ignore[method-assign]
        rows = store.rows(again, stack, 0, [1])
        assert rows is not None
        assert any(seat.aliased and seat.piece == stack.piece(0, 1) for seat in store._lent)
