"""Cuts programs short at lines drawn at random, for as long as there is time, and counts.

``python tests/sweep_interrupts.py --seconds 600 --seed 3`` prints, for each program and phase, how
many points there are (each line at the first, the middle and the last time that it is come to), how
many were tried, and what came of those. ``TIERMEM_INTERRUPTS=all`` with ``test_interrupts.py``
tries all of them, which takes hours.

``--calls`` raises as soon as a call has returned instead, before what it returned is assigned:
there signal handlers run. Where ``step()`` itself has returned, the step is made, and going on
makes another one, as in plain torch; such points of ``tiered.py`` and ``entrances.py`` are
left out.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from support_interrupts import (
    PHASES,
    PROGRAMS,
    Alarm,
    Interrupt,
    Site,
    interrupted,
    record,
    tried_once,
)

_ERRORS = (Interrupt, Interrupt, Alarm, MemoryError)
_GOOD = ("same", "refused")
_OVER = {
    ("optim/tiered.py", "_go_on"),
    ("optim/tiered.py", "_step"),
    ("optim/tiered.py", "step"),
    ("nn/compat/entrances.py", "enter"),
}


def points(seen: Counter[Any]) -> list[Site]:
    """Returns each line with the times at which it is cut short."""
    return [
        (*line, n) for line, times in sorted(seen.items()) for n in {1, (times + 1) // 2, times}
    ]


def is_over(site: Site) -> bool:
    """Whether a step is made where a call has returned."""
    name = site[2].partition("@")
    return bool(name[1]) and (site[0], name[0]) in _OVER


def main() -> int:
    """Runs the sweep; returns how many points went wrong, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--phases", nargs="*", default=list(PHASES), choices=PHASES)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", default="", help="only lines of files whose path has this")
    parser.add_argument("--calls", action="store_true", help="as calls have returned, not at lines")
    parser.add_argument("--log", type=Path, help="file to which every point is written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rng = random.Random(args.seed)
    print(f"seed {args.seed}")
    folder = Path(tempfile.mkdtemp())
    tried: dict[tuple[str, str], Counter[str]] = {}
    left: dict[tuple[str, str], list[Site]] = {}
    totals: dict[tuple[str, str], int] = {}
    bad: list[str] = []
    expected: dict[str, Any] = {}
    for name in args.programs:
        expected[name], phases = record(PROGRAMS[name], folder, args.phases, calls=args.calls)
        for phase, seen in phases.items():
            found = [p for p in points(seen) if args.file in p[0] and not is_over(p)]
            totals[name, phase] = len(found)
            left[name, phase] = rng.sample(found, len(found))
            tried[name, phase] = Counter()
    until = time.monotonic() + args.seconds
    while any(left.values()) and time.monotonic() < until:
        for (name, phase), sites in left.items():
            if not sites or time.monotonic() > until:
                continue
            site, error = sites.pop(), rng.choice(_ERRORS)
            run = (PROGRAMS[name], folder, phase, site, expected[name], error, 0)
            if phase == "optimizer":
                found_out = interrupted(*run, calls=args.calls)
            else:
                with tried_once():
                    found_out = interrupted(*run, calls=args.calls)
            kind = "not reached" if found_out is None else found_out.kind
            tried[name, phase][kind] += 1
            if found_out is None:
                continue
            line = [name, phase, list(site), error.__name__, kind, found_out.why]
            if args.log:
                with args.log.open("a") as log:
                    log.write(json.dumps(line) + "\n")
            if kind not in _GOOD:
                bad.append(json.dumps(line))
                print(bad[-1], flush=True)
    print(f"{'program':14} {'phase':12} {'points':>7} {'tried':>6}  outcomes")
    for (name, phase), counts in tried.items():
        outcomes = ", ".join(f"{kind} {n}" for kind, n in sorted(counts.items()))
        print(f"{name:14} {phase:12} {totals[name, phase]:7} {sum(counts.values()):6}  {outcomes}")
    cut = sum(n for c in tried.values() for kind, n in c.items() if kind != "not reached")
    print(f"{cut} of {sum(totals.values())} points, {len(bad)} went wrong; seed {args.seed}")
    return min(len(bad), 1)


if __name__ == "__main__":
    sys.exit(main())
