"""Which units the host steps, and which the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from tiermem.config import exact_size
from tiermem.core.block import Role, Tier, align_up
from tiermem.errors import CapacityError
from tiermem.nn.groups.partition import TRAINED
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.optim.host.build import prepare
from tiermem.optim.host.devicebits import DeviceBits
from tiermem.optim.host.exact import Proven
from tiermem.optim.host.fused import with_fused
from tiermem.optim.host.room import HostRoom
from tiermem.optim.host.share import Speeds, choose_host, choose_share, measure
from tiermem.optim.host.side import HostSide, can_be_on_host, rooms_of, side_of
from tiermem.optim.host.spread import Rates, Traffic, measure_both, spread
from tiermem.optim.host.team import as_team
from tiermem.optim.rules.probe import Make, settings_of
from tiermem.optim.units.parted import PartedUnit
from tiermem.optim.units.undo import cannot_fail_midway
from tiermem.optim.units.unit import StepUnit
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.services.host_staging import Load
from tiermem.transfer.streams import CudaCopyEngine

_LEAST = 1 << 26
"""Minimal number of elements for using the host by default: measuring takes a second."""
_LEAST_SHARE = 0.1
_NO_SHARE = "the device steps all of it as fast"


def choose_sides(
    runtime: ModuleRuntime,
    units: Sequence[StepUnit],
    make: Make,
    stepped: torch.dtype,
    settings: Sequence[dict[str, Any]],
    bits: DeviceBits,
    *,
    share: bool | float,
    in_backward: bool = False,
    earlier: Sequence[StepUnit] = (),
) -> tuple[bool, Speeds | None]:
    """Assigns the host the units it can step: whole blocks of weights, at home below HBM.

    Blocks in files pass through staging in DRAM, which is reserved here.

    Args:
        runtime: The modules' runtime.
        units: The units in the order of the modules.
        make: Creates a plain optimizer.
        stepped: Dtype of the stepped tensors.
        settings: The parameter groups, by number.
        bits: Decides which steps on the host have the device's bits.
        share: Whether the device has a part of them, so that both end together; or the host's share
            of the elements.
        in_backward: Whether steps are performed inside backward, the last block's first.
        earlier: Units of the same optimizer that the host has already; none is in progress.

    Returns:
        Whether the host has any units, and the speeds, if they were measured.

    Raises:
        CapacityError: If the DRAM budget has no room for the staging; nothing is changed.
    """
    sharers = _by_block(units, partial(can_be_on_host, runtime))
    if not sharers:
        return False, None
    on_host = with_fused(make)
    chosen: list[bool] = [True] * len(sharers)
    speeds: Speeds | None = None
    sizes = _sizes(sharers)
    proven = bits.for_step(sharers[0][0], settings)
    if isinstance(share, float):
        chosen = choose_share(sizes, share)
    elif share:
        traffic, weight = _traffic_of(sharers, stepped, proven)
        with as_team():
            if in_backward:
                rates = _measure_both(runtime, on_host, make, weight, stepped, traffic, proven)
                speeds, chosen = rates, spread(sizes[::-1], rates)[::-1]
            else:
                kept = traffic.device // 2 - weight.itemsize
                device = runtime.manager.parts.device
                speeds = measure(on_host, make, device, weight, stepped, kept, proven)
                chosen = choose_host(sizes, speeds)
    mine = [u for on, units in zip(chosen, sharers, strict=True) if on for u in units]
    if mine:
        _have_host_step(runtime, mine, on_host, settings, earlier, bits)
    return bool(mine), speeds


def choose_exact_sides(
    runtime: ModuleRuntime,
    units: Sequence[StepUnit],
    make: Make,
    stepped: torch.dtype,
    settings: Sequence[dict[str, Any]],
    bits: DeviceBits,
    *,
    in_backward: bool,
    keeps: bool = False,
    earlier: Sequence[StepUnit] = (),
) -> tuple[str, Rates | None]:
    """Assigns the host a share of the units with homes in DRAM, if it has the device's bits.

    Args:
        runtime: The modules' runtime.
        units: The units in the order of the modules.
        make: Creates a plain optimizer.
        stepped: Dtype of the stepped tensors.
        settings: The parameter groups, by number.
        bits: Decides which steps on the host have the device's bits.
        in_backward: Whether steps are performed inside backward.
        keeps: Whether gradients are kept, as these steps may be dropped.
        earlier: Units of the same optimizer that the host has already; none is in progress.

    Returns:
        Why the host has no units, empty if it has some, and the speeds, if measured.
    """
    table = runtime.manager.parts.table
    low = [
        mine
        for mine in _by_block(units, lambda unit: unit.group is not None)
        if all(table[block.id].home is Tier.DRAM for unit in mine for block in unit.blocks())
    ]
    if not low or sum(_sizes(low)) < _LEAST:
        return f"less than {_LEAST} elements are at home in DRAM", None
    if _all_fit(runtime, [p for unit in units for p, _ in unit.members]):
        return "HBM has room for everything", None
    able = [mine for mine in low if all(bits.for_step(unit, settings) is not None for unit in mine)]
    if not able or sum(_sizes(able)) < _LEAST:
        return next((r for m in low for u in m if (r := _reason(bits, u, settings))), ""), None
    proven = bits.for_step(able[0][0], settings)
    on_host = with_fused(make)
    traffic, weight = _traffic_of(able, stepped, proven)
    if keeps:  # then both sides write them home
        gradient = traffic.passing - weight.itemsize
        traffic = Traffic(traffic.device + gradient, traffic.passing, traffic.host)
    if not in_backward:  # gradients are home by then
        traffic = Traffic(traffic.device, weight.itemsize, traffic.host)
    sizes = _sizes(able)
    with as_team():
        rates = _measure_both(runtime, on_host, make, weight, stepped, traffic, proven)
    if in_backward:
        chosen = spread(sizes[::-1], rates)[::-1]
    else:
        share = rates.best_share()
        chosen = choose_share(sizes, share) if share >= _LEAST_SHARE else [False] * len(sizes)
    mine = [u for on, units in zip(chosen, able, strict=True) if on for u in units]
    if mine:
        _have_host_step(runtime, mine, on_host, settings, earlier, bits)
    return "" if mine else _NO_SHARE, rates


def prepare_share(runtime: ModuleRuntime) -> None:
    """Begins to compile the host's loop, if an optimizer of the wrapped model would use it."""
    table = runtime.manager.parts.table
    trained = [(g, e.param) for g in runtime.groups for e in g.entries if e.param.requires_grad]
    low = sum(p.numel() for group, p in trained if table[group.block.id].home is Tier.DRAM)
    if low >= _LEAST and not _all_fit(runtime, [param for _, param in trained]):
        prepare()


def _all_fit(runtime: ModuleRuntime, params: Iterable[torch.Tensor]) -> bool:
    """Whether HBM has room for all blocks, and for what training adds for these parameters."""
    table = runtime.manager.parts.table
    added = sum(param.numel() * (TRAINED - param.element_size()) for param in params)
    return table.nbytes + added <= table.hbm.capacity


def _reason(bits: DeviceBits, unit: StepUnit, settings: Sequence[dict[str, Any]]) -> str:
    bits.for_step(unit, settings)
    return bits.reason


def _by_block(units: Sequence[StepUnit], fits: Callable[[StepUnit], bool]) -> list[list[StepUnit]]:
    """Returns the units that fit, by block of weights: all of a block is on one side.

    Blocks whose parameters are stepped in parts are left out.
    """
    groups: dict[int, list[StepUnit]] = {}
    parted = {id(unit.group) for unit in units if isinstance(unit, PartedUnit)}
    for unit in units:
        if id(unit.group) not in parted and fits(unit):
            groups.setdefault(id(unit.group), []).append(unit)
    return list(groups.values())


def _sizes(groups: Sequence[Sequence[StepUnit]]) -> list[int]:
    return [sum(p.numel() for u in units for p, _ in u.members) for units in groups]


def _measure_both(
    runtime: ModuleRuntime,
    on_host: Make,
    make: Make,
    weight: torch.dtype,
    stepped: torch.dtype,
    traffic: Traffic,
    proven: Proven | None,
) -> Rates:
    copy = runtime.manager.parts.copy
    streams: Sequence[torch.cuda.Stream] = ()
    if isinstance(copy, CudaCopyEngine):
        streams = (copy.up_stream, copy.down_stream)
    device = runtime.manager.parts.device
    return measure_both(on_host, make, device, weight, stepped, traffic, streams, proven)


def _traffic_of(
    groups: Sequence[Sequence[StepUnit]], stepped: torch.dtype, proven: Proven | None
) -> tuple[Traffic, torch.dtype]:
    """Returns the bytes of an element of some blocks, and the dtype of their weights."""
    units = [unit for group in groups for unit in group]
    weight = next(p.dtype for unit in units for p, _ in unit.members)
    return _traffic(units, sum(_sizes(groups)), weight, stepped, proven), weight


def _traffic(
    units: Sequence[StepUnit],
    elements: int,
    weight: torch.dtype,
    stepped: torch.dtype,
    proven: Proven | None,
) -> Traffic:
    """Returns the bytes of an element: of the weights' dtype, and of what the units keep."""
    kept = sum(b.nbytes for u in units for b in u.kept_blocks()) // max(1, elements)
    found = sum(g.nbytes for u in units for g in u.grad_units()) // max(1, elements)
    gradient = max(weight.itemsize, found)
    alike = stepped is weight
    # the gradient is cast, then read; the loop casts as it reads
    cast = 0 if alike or proven is not None else 2 * stepped.itemsize
    return Traffic(
        device=2 * (weight.itemsize + kept),
        passing=weight.itemsize + gradient,
        host=2 * kept + gradient + cast + weight.itemsize * (2 if alike else 1),
    )


def _have_host_step(
    runtime: ModuleRuntime,
    units: Sequence[StepUnit],
    make: Make,
    settings: Sequence[dict[str, Any]],
    earlier: Sequence[StepUnit],
    bits: DeviceBits,
) -> None:
    """Reserves what the host needs for these units, and assigns them to it.

    All units of an optimizer share one staging: they may have weights in common.
    """
    manager = runtime.manager
    new, units = units, [*earlier, *units]
    in_files = {r.block.id for r in manager.parts.table if r.home is Tier.NVME}
    loads = [_load(unit, in_files) for unit in units]
    undone = max(_bytes_to_keep(unit, in_files, make, settings) for unit in units)
    try:
        room = HostRoom(manager, loads, undone)
    except CapacityError as error:
        raise _with_advice(error, manager, units, undone) from None
    before = rooms_of(earlier)
    for unit in new:
        unit.step_on(HostSide(unit, bits), make)
    for unit in units:
        host = side_of(unit)
        if host is not None:
            host.room = room
    for old in before:
        old.close()


def _with_advice(
    error: CapacityError, manager: BlockManager, units: Sequence[StepUnit], undone: int
) -> CapacityError:
    """Returns the error with a DRAM budget that is enough.

    A larger one first takes homes that are now in files (``"auto"``), of weights and gradients;
    then room for a step is reserved while the optimizer's homes are placed, but none for undoing.
    """
    homes, policy = manager.parts.homes, manager.parts.settings.policy
    weights = Role.PARAM, Role.BUFFER, Role.QUANT
    comes = [*weights, Role.GRAD, *((Role.OPTIMIZER, Role.MASTER) if undone else ())]
    moved = sum(
        align_up(record.block.nbytes)
        for record in manager.parts.table
        if record.home is Tier.NVME
        and not homes.read_only(record.home_extent)
        and record.block.role in comes
        and policy.home(record.block.role) == "auto"
    )
    step = max(sum(align_up(block.nbytes) for block in unit.blocks()) for unit in units)
    least = homes.dram.used + moved + align_up(undone) + step
    return CapacityError(error.what, f"give dram= at least {exact_size(least)}", error.hint)


def _load(unit: StepUnit, in_files: set[int]) -> Load:
    blocks = [block for block in unit.blocks() if block.id in in_files]
    shared = [b for b in blocks if unit.group is not None and b is unit.group.block]
    return Load([b for b in blocks if b not in shared], shared)


def _bytes_to_keep(
    unit: StepUnit, in_files: set[int], make: Make, settings: Sequence[dict[str, Any]]
) -> int:
    """Returns the bytes to copy before a step of a unit that may fail half way."""
    numbers = list(dict.fromkeys(number for _, number in unit.members))
    dtypes = {unit.own(param).dtype for param, _ in unit.members}
    try:
        tiny = [
            {
                **settings_of(settings[n]),
                "params": [nn.Parameter(torch.zeros(1, dtype=d, device="cpu"))],
            }
            for n in numbers
            for d in dtypes
        ]
        if cannot_fail_midway(make(tiny)):
            return 0
    except Exception:  # a class that needs other parameters: nothing is known
        pass
    kept = [b.nbytes for b in unit.kept_blocks() if b.id not in in_files]
    if unit.handed.spoils:
        kept += [u.block.nbytes for u in unit.grad_units() if u.block.id not in in_files]
    if not all(unit.has_master(param) for param, _ in unit.members) and unit.group is not None:
        ids = {id(param) for param, _ in unit.members}
        specs = [unit.group.block.tensors[e.index] for e in unit.entries if id(e.param) in ids]
        kept.append(max(s.offset + s.nbytes for s in specs) - min(s.offset for s in specs))
    return sum(map(align_up, kept))
