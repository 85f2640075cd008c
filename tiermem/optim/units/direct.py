"""Steps of a unit by the kernel of Adam, directly on the tensors of the blocks.

The kernel needs addresses and a few numbers. Pointing the plain optimizer's gradients and state at
the held blocks, letting it collect them, and pointing it elsewhere again takes the host three times
as long as the rest of such a step. So if an earlier step has left everything suitable for the
kernel, and nothing could observe a difference, the kernel gets the tensors of the blocks directly.
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
    """Rounds each number of elements up: kernels are fast with whole vectors."""
    return [align_up(count, _ALIGNED) for count in counts]


class _Lay(NamedTuple):
    """The places of the kernel's tensors in a unit's blocks; checked to be suitable.

    Attributes:
        settled: The places of the state from which this follows.
        gradients: The block of gradients from which this follows.
        grads: The numbers of the gradients in their block.
        firsts: Those of the first moments in the block of state.
        seconds: Those of the second moments.
        counts: Their elements.
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
    """Performs steps of one unit directly, if all effects are those of its plain optimizer."""

    def __init__(self, unit: StepUnit) -> None:
        """Starts without knowledge of its tensors."""
        self._unit = unit
        self._lay: _Lay | None = None
        self._unfit: tuple[object, object] | None = None  # what was found to be unsuitable

    def make(
        self,
        optimizer: torch.optim.Optimizer,
        stored: Sequence[Stored],
        slots: dict[int, Slot],
    ) -> bool:
        """Performs the step on the held blocks.

        Args:
            optimizer: The plain one, with the settings of this step.
            stored: The members whose gradients are in the tiers.
            slots: Slots of the blocks, by block id.

        Returns:
            Whether it was performed; otherwise nothing is done.
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
        """Updates only the state, like a step of a class whose state does not depend on weights.

        Args:
            gradients: The unit of the gradients.
            settings: Settings of the step, by parameter group.
            grads: Views of the block of gradients.
            kept: Views of the block of state.

        Returns:
            Whether it was performed; otherwise nothing is done.
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
        # only the weights depend on the number of the step
        recipe = recipe_of(optimizer, settings[unit.plain.numbers[0]], first, 0.0)
        if recipe is None:
            return False
        # what is written in place of weights is not used
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
        """Returns the places of the tensors, and stores them; None if unfit for the kernel.

        Args:
            settled: The places of the state.
            gradients: The gradients, in one block.
            stored: All members.
            params: The parameters.
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
