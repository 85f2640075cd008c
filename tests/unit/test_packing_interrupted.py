"""Ctrl-C at every line of what makes packed copies, gives them up and takes their DRAM."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support_interrupts import Interrupt, Tracer
from support_packed import NBYTES, Bench, always_used, small_tiles

import tiermem.runtime.services.packer as packer_module
from tiermem.core.block import Tier
from tiermem.runtime.repair import repair_homes

FILES = ("packed_copies.py", "packer.py", "homes.py")


def packs(bench: Bench) -> None:
    """Packs everything."""
    bench.pack()


def takes(bench: Bench) -> None:
    """Homes take the DRAM of packed copies."""
    bench.add(15)


def drops(bench: Bench) -> None:
    """A block is written, and another one is gone."""
    bench.manager.begin_pass("all")
    bench.write(2, torch.ones_like(bench.values[2]))
    bench.manager.remove_blocks([bench.blocks[-1]])
    bench.manager.begin_pass("all")


def begun(act: Callable[[Bench], None]) -> Bench:
    """Returns what an act begins with."""
    bench = Bench(dram=60 if act is takes else 140)
    if act is not packs:
        bench.pack()
        always_used(bench.manager)
    return bench


def wrong(bench: Bench) -> list[str]:
    """Repairs what was cut short; returns what is wrong with DRAM then."""
    manager, packed = bench.manager, bench.packed
    with manager.lock:
        manager.repair_blocks()
        bench.packer.repair()
        repair_homes(manager.parts)
    manager.begin_pass("all")
    homes, dram = manager.parts.homes, manager.parts.homes.dram
    live = [copy.extent for copy in packed._copies.values()]
    extents = [extent for _, extent in packed._owned()]
    blocks = [r.home_extent for r in manager.parts.table if r.home is Tier.DRAM and r.home_extent]
    found = [f"{extent} is free" for extent in live if not homes.holds(Tier.DRAM, extent)]
    if len({extent.offset for extent in extents}) != len(extents):
        found.append("an extent is there twice")
    found += [
        f"{one} is a home as well"
        for one in live
        if any(one.offset < home.end and home.offset < one.end for home in blocks)
    ]
    used = sum(extent.nbytes for extent in (*blocks, *extents))
    if dram.used != used:
        found.append(f"{dram.used - used} bytes of DRAM are nobody's")
    return found


@pytest.mark.parametrize("act", [packs, takes, drops])
def test_no_dram_is_lost_or_has_two_owners(
    act: Callable[[Bench], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packer_module, "_LEAST", NBYTES)
    with small_tiles():
        bench = begun(act)
        with Tracer() as tracer:
            act(bench)
        bench.manager.close()
        sites = [(*key, 1) for key in tracer.seen if key[0].endswith(FILES)]
        assert len(sites) > 10
        for site in sites:
            bench = begun(act)
            try:
                with Tracer(stop=site):
                    act(bench)
            except Interrupt:
                pass
            assert not wrong(bench), site
            bench.manager.close()
