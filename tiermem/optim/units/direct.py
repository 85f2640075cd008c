"""Steps of a unit by the kernel of Adam, where its tensors lie.

The kernel needs addresses and a few numbers. To point the plain optimizer's gradients and state at
what is held, have it collect them, and point it elsewhere again takes the host three times as long
as the rest of such a step. So where a step before has left everything as the kernel takes it, and
nobody could tell, the kernel is given the tensors of the blocks themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tiermem.core.alike import all_are, all_same
from tiermem.core.block import align_up
from tiermem.nn.groups.gradunit import GradUnit
from tiermem.optim.rules.adamkernel import Rows
from tiermem.optim.rules.adamstep import are_alike, are_ordinary, recipe_of
from tiermem.optim.rules.plainstep import is_bare
from tiermem.runtime.memory.slots import Slot

if TYPE_CHECKING:
    from tiermem.optim.units.plainopt import Settled
    from tiermem.optim.units.unit import StepUnit, Stored

_ALIGNED = 64  # elements
_FIRST, _SECOND, _STEP = "exp_avg", "exp_avg_sq", "step"
_param, _entry, _unit = itemgetter(0), itemgetter(1), itemgetter(2)
_unit_index = attrgetter("unit_index")
_data_ptr, _numel = torch.Tensor.data_ptr, torch.Tensor.numel
_is_contiguous, _item = torch.Tensor.is_contiguous, torch.Tensor.item


def rooms_for(counts: Sequence[int]) -> list[int]:
    """Returns so many elements each, rounded up: kernels are quick with whole vectors."""
    return [align_up(count, _ALIGNED) for count in counts]


class _Lay(NamedTuple):
    """Where the blocks of a unit have what the kernel takes; found to suit it.

    Attributes:
        settled: The places of the state that this is of.
        gradients: The block of gradients that this is of.
        grads: The number of its gradient in their block.
        firsts: That of its first moment in the block of state.
        seconds: That of its second moment.
        counts: Its elements.
    """

    settled: Settled
    gradients: GradUnit
    grads: Sequence[int]
    firsts: Sequence[int]
    seconds: Sequence[int]
    counts: Sequence[int]

    def rows(
        self,
        params: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
    ) -> Rows:
        """Returns the tensors; the arguments are the weights, and the views of the two blocks."""
        return Rows(
            [*params],
            [*map(gradients.__getitem__, self.grads)],
            [*map(kept.__getitem__, self.firsts)],
            [*map(kept.__getitem__, self.seconds)],
        )


class DirectSteps:
    """Makes steps of one unit directly, where that leaves all that its plain optimizer would."""

    def __init__(self, unit: StepUnit) -> None:
        """Knows nothing of its tensors yet."""
        self._unit = unit
        self._lay: _Lay | None = None
        self._unfit: tuple[object, object] | None = None  # what was found not to suit the kernel

    def make(
        self,
        optimizer: torch.optim.Optimizer,
        stored: Sequence[Stored],
        slots: dict[int, Slot],
    ) -> bool:
        """Makes the step, over what is held.

        Args:
            optimizer: The plain one, with the settings of this step.
            stored: The members whose gradients are in the tiers.
            slots: Of the blocks, by the id of the block.

        Returns:
            Whether it is made; else nothing is done.
        """
        unit = self._unit
        plain, settled, members = unit.plain, unit.plain.settled, unit.members
        if not settled.keys or len(stored) != len(members) or len(plain.numbers) != 1:
            return False
        if unit.masters is not None or unit.host is not None or unit.handed.written:
            return False
        gradients = stored[0][2]
        if unit.handed.given or not all_are(map(_unit, stored), gradients) or unit.block is None:
            return False
        if not is_bare(optimizer):
            return False
        states: list[dict[str, Any]] = plain.states()
        if not all_are(map(type, states), dict):
            return False
        owns = plain.settled_states(states)
        if not (owns and all_same(map(dict.get, owns, settled.keys), settled.stand_ins)):
            return False
        params = [*map(_param, members)]
        if not are_ordinary(params):
            return False
        steps: list[Any] = [state.get(_STEP) for state in states]
        if not all_are(map(type, steps), torch.Tensor) or any(map(torch.Tensor.dim, steps)):
            return False
        if {step.device.type for step in steps} != {"cpu"}:
            return False
        made = {*map(_item, steps)}
        if len(made) != 1 or len({*map(_data_ptr, steps)}) != len(steps):
            return False
        grads, kept = slots[id(gradients.block)].views, slots[id(unit.block)].views
        lay = self._lay
        if lay is None or lay.settled is not settled or lay.gradients is not gradients:
            lay = self._lay_of(settled, gradients, stored, params, grads, kept)
            if lay is None:
                return False
        if [*map(_numel, params)] != lay.counts or not all(map(_is_contiguous, params)):
            return False
        recipe = recipe_of(optimizer, optimizer.param_groups[0], params[0], made.pop())
        if recipe is None:
            return False
        recipe.step(lay.rows(params, grads, kept), steps)
        return True

    def update_state(
        self,
        gradients: GradUnit,
        settings: Sequence[dict[str, Any]],
        grads: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
    ) -> bool:
        """Updates the state alone, as a step would have whose state weights have no part in.

        Args:
            gradients: Whose they are.
            settings: Of the step, by parameter group.
            grads: Views of the block that has the gradients.
            kept: Views of the block of state.

        Returns:
            Whether it is made; else nothing is done.
        """
        unit, lay = self._unit, self._lay
        if lay is None or lay.gradients is not gradients:
            return False
        if lay.settled is not unit.plain.settled or len(unit.plain.numbers) != 1:
            return False
        optimizer = unit.plain.optimizer_for(None)
        first = grads[lay.grads[0]]
        if not is_bare(optimizer):
            return False
        # the number of the step has a part in the weights alone
        recipe = recipe_of(optimizer, settings[unit.plain.numbers[0]], first, 0.0)
        if recipe is None:
            return False
        # what is written in the place of weights is of no use to anybody
        ends = [*accumulate(rooms_for(lay.counts), initial=0)]
        room = torch.empty(ends[-1], dtype=first.dtype, device=first.device)
        found = lay.rows((), grads, kept)
        shapes = zip(found.grads, ends[:-1], strict=True)
        params = [room.as_strided(g.shape, g.stride(), begin) for g, begin in shapes]
        recipe.step(found._replace(params=params), ())
        return True

    # -- inside ----------------------------------------------------------

    def _lay_of(
        self,
        settled: Settled,
        gradients: GradUnit,
        stored: Sequence[Stored],
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
    ) -> _Lay | None:
        """Returns where the tensors lie, and remembers it; None where the kernel cannot take them.

        Args:
            settled: The places of the state.
            gradients: In one block.
            stored: All members.
            params: Them.
            grads: Views of the block of gradients.
            kept: Views of the block of state.
        """
        known = settled, gradients
        if self._unfit is not None and all_same(known, self._unfit):
            return None
        self._unfit = known
        columns: dict[str, dict[int, int]] = {_FIRST: {}, _SECOND: {}}
        for number, key, place in zip(settled.numbers, settled.keys, settled.places, strict=True):
            if key not in columns:
                return None  # amsgrad, or a class with more
            columns[key][number] = place
        members = range(len(params))
        if any(sorted(found) != [*members] for found in columns.values()):
            return None
        firsts, seconds = ([found[n] for n in members] for found in columns.values())
        places = [*map(_unit_index, map(_entry, stored))]
        lay = _Lay(settled, gradients, places, firsts, seconds, [*map(_numel, params)])
        if not are_alike(lay.rows(params, grads, kept)):
            return None
        self._lay, self._unfit = lay, None
        return lay
