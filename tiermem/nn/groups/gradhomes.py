"""Homes of the gradients of trainable parameters, in the requested dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from tiermem.core.layout import TensorShape
from tiermem.errors import StepError
from tiermem.nn.compat.shapes import shape_of
from tiermem.nn.groups.above import Passes
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.gradunit import GradUnit, divide
from tiermem.nn.groups.gradwanted import Wanted
from tiermem.nn.groups.group import Group


class GradHomes:
    """Reserves homes for gradients and gives them back; moves none.

    Attributes:
        dtypes: Dtypes in which gradients are kept, by the id of the parameter; by default the
            parameter's own.
    """

    def __init__(self, runtime: Passes, sync: Callable[[Entry], None]) -> None:
        """Starts with no homes.

        Args:
            runtime: The runtime with the parameters.
            sync: Follows users' changes of ``param.grad``.
        """
        self._runtime = runtime
        self._sync = sync
        self.dtypes: dict[int, torch.dtype] = {}

    def keep_in(
        self, dtype: torch.dtype | None, params: Iterable[torch.Tensor]
    ) -> Callable[[], None]:
        """Sets the dtype in which gradients are accumulated and kept.

        ``param.grad`` shows that dtype.

        Args:
            dtype: A floating-point dtype; None changes nothing.
            params: The parameters; those that are not managed or not floating-point are ignored.

        Returns:
            A function that undoes it, before there are any gradients.

        Raises:
            StepError: If a gradient is there already in another dtype.
        """
        if dtype is None:
            return lambda: None
        ids = {id(param) for param in params if param.is_floating_point()}
        entries = [e for g in self._runtime.groups for e in g.entries if id(e.param) in ids]
        units: dict[int, GradUnit] = {}
        for entry in entries:
            self._sync(entry)
            unit = entry.unit
            if unit is not None and unit.block.tensors[entry.unit_index].dtype is not dtype:
                units[id(unit)] = unit
        for unit in units.values():
            for entry in unit.entries:  # also those of parameters that others step
                self._sync(entry)
            if any(e.has_grad for e in unit.entries):
                raise StepError(
                    f"grad_dtype={dtype}: block {unit.block.name!r} has gradients already, in "
                    "another dtype; make the optimizer before the first backward, or call "
                    "zero_grad() on the model first"
                )
        self.unreserve(list(units.values()))
        former = {id(e.param): self.dtypes.get(id(e.param)) for e in entries}
        self.dtypes.update((id(entry.param), dtype) for entry in entries)

        def undo() -> None:
            for key, known in former.items():
                if known is None:
                    self.dtypes.pop(key, None)
                else:
                    self.dtypes[key] = known

        return undo

    def dtype_of(self, entry: Entry) -> torch.dtype:
        """Returns the dtype that gradients of a parameter are kept in."""
        known = entry.placeholder.dtype  # the parameter's, which takes longer to say so
        return self.dtypes.get(id(entry.param), known) if self.dtypes else known

    def dtype_for(self, param: torch.Tensor) -> torch.dtype:
        """Returns the dtype of gradients of a parameter that may not be managed yet."""
        return self.dtypes.get(id(param), param.dtype) if self.dtypes else param.dtype

    def reserve(self, groups: Iterable[Group]) -> list[GradUnit]:
        """Reserves homes for the gradients of every trainable parameter that has none yet.

        Returns:
            The new units.

        Raises:
            CapacityError: Before anything is changed.
        """
        wanted = [
            Wanted(entries, [self.shape(e) for e in entries])
            for group in groups
            for entries in divide(group, self._runtime.unit_limit(group))
        ]
        for each in wanted:
            each.cut(self._runtime)
        shapes = [shapes for each in wanted for shapes in each.blocks()]
        homes = ["hbm" if each.group.resident else None for each in wanted for _ in each.blocks()]
        blocks = iter(self._runtime.manager.add_blocks(shapes, home=homes))
        made = [each.make(blocks) for each in wanted]
        for unit in made:
            for index, entry in enumerate(unit.entries):
                entry.unit_index = index
                entry.unit = unit
        return made

    def unreserve(self, units: Sequence[GradUnit]) -> None:
        """Gives homes back that were reserved and are not used yet."""
        for unit in units:
            for entry in unit.entries:
                entry.unit = None
        self._runtime.manager.remove_blocks([block for unit in units for block in unit.blocks])

    def shape(self, entry: Entry) -> TensorShape:
        """Describes a gradient: the layout of its parameter, in the requested dtype."""
        like = torch.empty(entry.param.shape, dtype=self.dtype_of(entry), device="meta")
        return shape_of(entry.name, like, entry.group.block.tensors[entry.index].stride)
