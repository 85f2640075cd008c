"""Master weights: the precise copies that an optimizer steps, and the work weights cast from them.

Mixed-precision training keeps a weight twice: as the model uses it (bfloat16, float16),
and as the optimizer uses it (float32), since an update is often too small to change the former
(Micikevicius et al., "Mixed Precision Training", ICLR 2018). The masters of a unit are a block with
their own role and home. A step does this for each parameter::

    master.grad = param.grad.to(master.dtype)
    optimizer.step()                      # over the masters
    param.copy_(master)

bit for bit, on the device. A work weight that is no longer the cast of its master was written by
other code (``load_state_dict``, ``reset_parameters``, a constraint on the weights); its master then
follows it, element by element, so that no such change is lost at the next step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.autograd.graph import increment_version

from tiermem.core.block import Block
from tiermem.errors import StepError
from tiermem.nn.compat.quiet import unrecorded
from tiermem.nn.compat.shapes import follow
from tiermem.nn.tensors.placeholder import shared_placeholder
from tiermem.runtime.memory.slots import Slot


def master_dtype_of(param: torch.Tensor, wanted: torch.dtype | None) -> torch.dtype | None:
    """Returns the dtype of a parameter's master, or None if it needs none.

    Args:
        param: The parameter.
        wanted: ``master_dtype`` as the user gave it.

    Raises:
        StepError: If the master would have fewer bits than the parameter.
    """
    if wanted is None or not param.is_floating_point() or param.dtype is wanted:
        return None
    if wanted.itemsize < param.dtype.itemsize:
        raise StepError(
            f"master_dtype={wanted} is narrower than a parameter's {param.dtype}; masters are at "
            "least as precise as the weights: leave master_dtype out, or cast the model first"
        )
    return wanted


class Masters:
    """The masters of one unit.

    Attributes:
        block: The block of the masters that are in the tiers, or None.
        dtype: Dtype of the masters.
        made: Whether they hold values yet; until then their values are the cast weights.
    """

    def __init__(self, params: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        """Creates stand-ins for the masters of ``params``; no bytes yet.

        Args:
            params: The parameters that have a master, in order.
            dtype: Dtype of the masters.
        """
        self.dtype = dtype
        self.block: Block | None = None
        self.made = False
        self._params = list(params)
        self._index: dict[int, int] = {}
        self._away = {id(p): shared_placeholder(p.shape, dtype, p.device) for p in params}
        self._own = {id(p): nn.Parameter(self._away[id(p)]) for p in params}
        self._loose: dict[int, torch.Tensor] = {}

    def place(self, block: Block, params: Sequence[torch.Tensor]) -> None:
        """Gives the masters of ``params`` their block, one tensor each, in order.

        Those of other parameters (frozen when the optimizer was created, or not in the tiers) are
        in ordinary memory, once they are needed.
        """
        self.block = block
        self._index = {id(param): index for index, param in enumerate(params)}

    def own(self, param: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that the optimizer gets instead of a parameter."""
        return self._own.get(id(param), param)

    def open(self, slot: Slot | None, *, follows: bool = True) -> None:
        """Points the masters at their bytes; their weights are in HBM.

        Args:
            slot: The slot of the block, leased.
            follows: Whether the weights may have been written, so that the masters are updated.
        """
        with unrecorded():
            for param, own in self._pairs():
                weight = param.data
                own.data, fresh = self.place_of(param, None if slot is None else slot.views, weight)
                if fresh:
                    own.data.copy_(weight)
                elif follows:
                    follow(own.data, weight.to(own.device))
        self.made = True

    def place_of(
        self, param: torch.Tensor, views: Sequence[torch.Tensor] | None, weight: torch.Tensor
    ) -> tuple[torch.Tensor, bool]:
        """Returns where a parameter's master is, and whether it still has to be created.

        Args:
            param: A parameter that has a master.
            views: The block's tensors, if it is in HBM.
            weight: The parameter's value; a master outside the tiers is created on its device.
        """
        index = self._index.get(id(param))
        if index is not None and views is not None:
            return views[index], not self.made
        fresh = id(param) not in self._loose
        if fresh:
            self._loose[id(param)] = weight.detach().to(self.dtype, copy=True)
        return self._loose[id(param)], fresh

    def loose(self) -> list[torch.Tensor]:
        """Returns the masters that are in ordinary memory."""
        return list(self._loose.values())

    def derive(self, *, every: bool = False) -> None:
        """Writes every work weight whose master has a gradient: it may have been stepped.

        Args:
            every: Whether the others are written as well.
        """
        written = [p for p in self._pairs() if every or p[1].grad is not None]
        if not written:
            return
        with unrecorded():
            torch._foreach_copy_([p.data for p, _ in written], [own.data for _, own in written])
        for param, _ in written:
            increment_version(param)  # torch has not seen it, nor has the block's group

    def rederive(self, slot: Slot | None) -> None:
        """Makes every work weight the cast of its master, as before a step.

        Args:
            slot: The slot of the block, leased.
        """
        with unrecorded():
            for param, own in self._pairs():
                own.data, _ = self.place_of(param, None if slot is None else slot.views, own.data)
                param.data.copy_(own.data)

    def close(self) -> None:
        """Points the masters at no bytes."""
        with unrecorded():
            for param, own in self._pairs():
                own.grad = None
                own.data = self._away[id(param)]

    def values(
        self, stored: Sequence[torch.Tensor], weights: dict[int, torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields each parameter with a copy of its master in host memory.

        Args:
            stored: The block's tensors in host memory.
            weights: The parameters' values in host memory, by the id of the parameter.
        """
        with torch.no_grad():
            for param in self._params:
                weight = weights[id(param)]
                kept = self.master_of(param, stored)
                if kept is None:
                    yield param, weight.to(self.dtype)
                    continue
                value = kept.detach().cpu().clone()
                follow(value, weight)
                yield param, value

    @property
    def params(self) -> Sequence[torch.Tensor]:
        """The parameters that have a master, in order."""
        return self._params

    def index_of(self, param: torch.Tensor) -> int | None:
        """Returns which tensor of the block is a parameter's master; None if none is."""
        return self._index.get(id(param)) if self.made else None

    def master_of(self, param: torch.Tensor, stored: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Returns a parameter's master, unless it is still just the cast weight.

        Args:
            param: A parameter that has a master.
            stored: The block's tensors, wherever they are.
        """
        index = self._index.get(id(param))
        if index is not None and self.made:
            return stored[index]
        return self._loose.get(id(param))

    def room_for(self, param: torch.Tensor, stored: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the memory for a parameter's master that is set as a whole.

        Args:
            param: A parameter that has a master.
            stored: The block's tensors, to be written.
        """
        index = self._index.get(id(param))
        if index is not None and stored:
            return stored[index]
        found = self._loose[id(param)] = torch.empty(
            param.shape, dtype=self.dtype, device=self._own[id(param)].device
        )
        return found

    def take_loaded(self, loaded: dict[int, torch.Tensor]) -> None:
        """Takes over loaded masters, and updates their weights; both are open.

        Args:
            loaded: The masters by the id of the parameter.
        """
        with torch.no_grad():
            for param, own in self._pairs():
                if id(param) in loaded:
                    own.data.copy_(loaded[id(param)])
                    param.data.copy_(own.data)
                    increment_version(param)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, nn.Parameter]]:
        for param in self._params:
            yield param, self._own[id(param)]
