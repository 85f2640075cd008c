"""Ctrl-C, a signal handler's exception or an error of Python's own, at lines of every package.

A training program is cut short once, goes on as its user would, and must end with the very bits of
the run that nobody cut short, with nothing left behind: see :mod:`support_interrupts`. What runs
here is a sample of lines that is the same every time: of each call one, and of each kind of tiers
and optimizer the calls that it makes others of. ``TIERMEM_INTERRUPTS=all`` takes every line of
every call (its first, middle and last time), ``=N`` takes N lines of each;
``tests/sweep_interrupts.py`` draws lines for as long as it is given time.
"""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support_interrupts import (
    PACKAGE,
    PHASES,
    PROGRAMS,
    Alarm,
    Interrupt,
    Recursion,
    Run,
    Signal,
    Tracer,
    interrupted,
    outcome,
    record,
    tried_once,
)

import tiermem
from tiermem.core.residency import ResidencyTable
from tiermem.nn.compat.quiet import _Unrecorded
from tiermem.nn.groups.group import Group
from tiermem.nn.groups.pointing import Pointing
from tiermem.nn.wrap.giveback import Leaving
from tiermem.optim.host.sides import _have_host_step
from tiermem.optim.units.held import Held
from tiermem.optim.units.members import Membership
from tiermem.optim.units.plan import _reserve
from tiermem.runtime.services.host_staging import HostStage
from tiermem.transfer.file.mover import FileMover

_ASKED = os.environ.get("TIERMEM_INTERRUPTS", "1")
_ALL = _ASKED != "1"
_ERRORS = (Interrupt, Interrupt, Alarm, MemoryError)
_QUICK = {
    "dram": (
        *("open", "wrap", "optimizer", "forward", "clip", "step", "state", "pickle", "load"),
        *("materialize", "unwrap", "close", "backward"),
    ),
    "nvme": ("wrap", "forward", "backward", "eval", "pickle"),
    "activations": ("forward", "backward"),
    "hbm": ("forward", "materialize"),
    "masters": ("export", "restore"),
    "forward": ("step", "eval"),
    "backward": ("backward", "step"),
    "both": ("step", "zero"),
    "host files": ("optimizer", "step", "restore"),
    "host backward": ("backward",),
    "thawing": ("forward",),
    "ahead": ("backward", "step"),
}
_DEPTHS = {"forward": (4, 19), "backward": (9, 24), "zero": (6, 14), "materialize": (12, 29)}
_runs: dict[str, tuple[Any, dict[str, Any]]] = {}


@pytest.fixture(autouse=True)
def _tried_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tries a class once for all runs, save where the trying itself is cut short."""
    if "optimizer" in request.node.name:
        yield
        return
    with tried_once():
        yield


def _known(name: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Returns what a program ends with, and the lines of its calls that are cut short."""
    if name not in _runs:
        _runs[name] = record(PROGRAMS[name], folder, PHASES if _ALL else _QUICK[name])
    return _runs[name]


def _pairs() -> list[tuple[str, str]]:
    if not _ALL:
        return [(name, phase) for name, phases in _QUICK.items() for phase in phases]
    return [(name, phase) for name in PROGRAMS for phase in PHASES]


@pytest.mark.timeout(7200 if _ALL else 300)
@pytest.mark.parametrize(("name", "phase"), _pairs())
@pytest.mark.one_in(3)
def test_a_program_cut_short_at_a_line_goes_on_to_the_same_bits(tmp_path, name, phase) -> None:
    """Or is refused with an error of the project's that says what to do."""
    program = PROGRAMS[name]
    expected, phases = _known(name, tmp_path)
    seen = phases.get(phase)
    if not seen:
        pytest.skip(f"program {name!r} has no {phase}")
    rng = random.Random(f"{name} {phase}")
    sites = [(*line, count) for line, n in sorted(seen.items()) for count in {1, (n + 1) // 2, n}]
    if _ASKED != "all":
        sites = rng.sample(sites, min(int(_ASKED), len(sites)))
    bad = []
    for site in sites:
        found = interrupted(program, tmp_path, phase, site, expected, rng.choice(_ERRORS), 0)
        if found is not None and found.kind not in ("same", "refused"):
            bad.append((site, found.kind, found.why))
    assert not bad, f"{len(bad)} of {len(sites)}: {bad[:5]}"


@pytest.mark.parametrize("phase", _DEPTHS)
def test_a_recursion_error_at_any_depth_leaves_all_usable(tmp_path, phase) -> None:
    """The stack ends after so many frames of a call, and goes on at its ordinary depth."""
    program = PROGRAMS["dram"]
    expected, _ = _known("dram", tmp_path)
    depths = range(1, 60) if _ASKED == "all" else _DEPTHS[phase]
    bad, cut = [], 0
    for headroom in depths:
        run = Run(program, tmp_path, phase, Recursion(headroom))
        found = outcome(program, tmp_path, run, expected)
        cut += bool(found.why)
        if found.kind not in ("same", "refused"):
            bad.append((headroom, found.kind, found.why))
    assert cut
    assert not bad, bad


@pytest.mark.skipif(not _ALL, reason="at random times: set TIERMEM_INTERRUPTS")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_signal_at_a_random_time(tmp_path, name) -> None:
    """Its handler raises; the program goes on to the same bits, or is refused."""
    program = PROGRAMS[name]
    expected, phases = _known(name, tmp_path)
    rng = random.Random(name)
    bad = []
    for _ in range(400 if _ASKED == "all" else 10 * int(_ASKED)):
        phase = rng.choice(list(phases))
        run = Run(program, tmp_path, phase, Signal(rng, 0.03))
        found = outcome(program, tmp_path, run, expected)
        if found.kind not in ("same", "refused"):
            bad.append((phase, found.kind, found.why))
    assert not bad, bad


PLACES = {
    "a tensor made ordinary, and its group not told": (
        ("dram", "unwrap"),
        (Pointing.sort, "self.shown = ", 1),
    ),
    "a buffer that stays in HBM made ordinary": (
        ("dram", "unwrap"),
        (Pointing.sort, "self.shown = ", 23),
    ),
    "a buffer that stays in HBM made ordinary, and not known to be": (
        ("nvme", "unwrap"),
        (Pointing.free, "member.materialized = True", 23),
    ),
    "a parameter made ordinary, and its gradient not": (
        ("dram", "unwrap"),
        (Leaving._free, "member.param.grad = ", 3),
    ),
    "a load announced, and not begun to be read": (
        ("host files", "step"),
        (HostStage.announce, "self._read_ahead()", 2),
    ),
    "room for steps on the host that no optimizer has yet": (
        ("host files", "optimizer"),
        (_have_host_step, "before = rooms_of", 1),
    ),
    "a read asked for, and not known": (
        ("host files", "restore"),
        (FileMover.read, "return", 1),
    ),
    "units planned, and not taken on": (
        ("thawing", "forward"),
        (_reserve, "check_steps(", 1),
    ),
    "units taken on, and their parameters not": (
        ("thawing", "forward"),
        (Membership.taken, "self._taken.update", 1),
    ),
    "a signal handler's exception in a step inside backward": (
        ("backward", "backward"),
        (Held.open, "self._lease(", 1),
    ),
    "autograd switched off for tensors of ours, and about to be switched on": (
        ("dram", "state"),
        (_Unrecorded.__exit__, "_set_grad_enabled(self._recorded)", 1),
    ),
    "the same, while a model is wrapped": (
        ("dram", "wrap"),
        (_Unrecorded.__exit__, "_set_grad_enabled(self._recorded)", 2),
    ),
    "a block about to have a place in HBM": (
        ("backward", "restore"),
        (ResidencyTable._enter, "self.by_offset[extent.offset]", 1),
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_place_where_going_on_was_wrong_once(tmp_path, place) -> None:
    (name, phase), (function, text, time) = PLACES[place]
    expected, _ = _known(name, tmp_path)
    file = Path(inspect.getfile(function)).relative_to(PACKAGE).as_posix()
    site = (file, _line_of(function, text), "", time)
    error = Alarm if "signal handler" in place else Interrupt
    found = interrupted(PROGRAMS[name], tmp_path, phase, site, expected, error, 0)
    assert found is not None, "never came there"
    assert found.kind == "same", found


def test_leaving_with_after_an_interrupt_gives_the_model_back(tmp_path) -> None:
    """A call that was cut short in its last lines holds nothing that keeps the model in."""
    model = torch.nn.Sequential(*[torch.nn.Linear(24, 24) for _ in range(3)])
    before = [p.detach().clone() for p in model.parameters()]
    site = ("nn/groups/group.py", _line_of(Group.let_go_locked, "change(pointing.hidden)"), "", 1)
    with pytest.raises(Interrupt), tiermem.TierManager("cpu", hbm="64KiB", dram="8MiB") as tier:
        tier.wrap(model)
        with Tracer(site, depth=0):
            model(torch.ones(2, 24))
    assert all(map(torch.equal, before, model.parameters()))


def _line_of(function: Any, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(n for n, line in enumerate(lines) if text in line)
