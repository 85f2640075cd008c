"""Plans for loops from a disk that keep what is in HBM and DRAM, as far as possible. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tiermem.core.loops import Loop, Plan, largest_beside
from tiermem.core.residents import adjust_residents

_AS_GOOD = 1.005
"""A plan that needs fewer reads to come into force may be slower by this factor."""


def nearer_from_disk(
    loop: Loop, plan: Plan, kept: Sequence[int], there: Sequence[int], staged: Sequence[int]
) -> Plan:
    """Returns a plan that is as good and keeps what is in HBM and DRAM, as far as possible.

    Every block that a new plan puts into HBM or DRAM has to be read from the disk once more.

    Args:
        loop: The loop.
        plan: The best plan, regardless of what is in HBM and DRAM now.
        kept: Blocks in HBM that stay there so far.
        there: Other blocks in HBM, those that should stay first.
        staged: Blocks of which DRAM has copies.
    """
    files = loop.files
    if files is None or plan.in_dram is None or not plan.slot or not kept:
        return plan
    order = [block for block in loop.order if block in loop.sizes]
    enough = [_AS_GOOD * figure for figure in loop.from_disk(plan, files)]
    near = adjust_residents(kept, there, order, loop.sizes, loop.room - plan.reserve)
    for stay in (near, plan.residents):
        rest = {b: loop.sizes[b] for b in files.seconds if b in loop.sizes and b not in stay}
        copies = [block for block in staged if block in rest]
        passing = [block for block in order if block in rest]
        below = adjust_residents(copies, (), passing, rest, files.room)
        other = replace(plan, residents=stay, slot=largest_beside(loop.sizes, stay), in_dram=below)
        figures = zip(loop.from_disk(other, files), enough, strict=True)
        if all(f <= most for f, most in figures) and loop.lays_out_as(other, plan):
            return other
    return plan
