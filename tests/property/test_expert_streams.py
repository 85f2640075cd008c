"""Copies of experts and kernels that read them, on streams in every order that events allow."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiermem.config import Policy, Settings
from tiermem.core.block import Role
from tiermem.core.layout import TensorShape
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.memory.expert_seats import Piece, Use
from tiermem.runtime.services.expert_store import ExpertStore
from tiermem.runtime.services.saved_experts import SavedExperts
from tiermem.testing.io import ScriptedEngine
from tiermem.testing.streams import SimulatedDevice
from tiermem.transfer.streams import StreamCopyEngine

UP, DOWN, FILES = 101, 102, 103
PAGE, EXPERTS, STACKS = 4096, 5, 3


@given(st.integers(0, 1 << 30), st.integers(0, 8), st.integers(0, 8), st.booleans())
def test_no_expert_is_read_too_soon(seed: int, more: int, lag: int, two: bool) -> None:
    random = Random(seed)
    device = SimulatedDevice(random)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "tiermem.runtime.assembly.HostCopyEngine",
            lambda: StreamCopyEngine(device, UP, DOWN, FILES),
        )
        manager = BlockManager(
            Settings(
                device="cpu",
                hbm=(8 + more) * PAGE,
                dram=64 * PAGE,
                nvme=(),
                nvme_bytes=None,
                policy=Policy(params="dram"),
                prefetch_depth=0,
            ),
            ScriptedEngine,
        )
    shape = TensorShape("w", (EXPERTS, 16, 256), (PAGE, 256, 1), torch.uint8, 1)
    wanted = [(f"s{i}", Role.PARAM, [shape, shape]) for i in range(STACKS)]
    store = ExpertStore(manager)
    wrong: list[str] = []
    blocks = manager.add_blocks(wanted)
    for number, block in enumerate(blocks):
        rows = torch.arange(EXPERTS, dtype=torch.uint8)[:, None, None].expand(EXPERTS, 16, 256)
        manager.write_home(block, [rows + 10 * number, rows + 10 * number + 100])
    stacks = [store.add(block, EXPERTS) for block in blocks]

    def look(address: int, value: int) -> None:
        if ctypes.string_at(address, PAGE) != bytes([value]) * PAGE:
            wrong.append(f"{value} is not there")

    def read(use: Use, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
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
            assert stack is not None
            if not (store.open and store.usable(stack)):
                assert turn == 15
                continue
            device.stream = random.choice([0, 1]) if two else 0
            chosen = sorted(random.sample(range(EXPERTS), random.randint(1, EXPERTS)))
            counts = [int(expert in chosen) for expert in range(EXPERTS)]
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
