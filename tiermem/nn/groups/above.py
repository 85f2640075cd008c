"""Interfaces of classes above this package, as far as groups and gradients use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tiermem.core.block import Block
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.memory.expert_seats import Use
from tiermem.runtime.memory.slots import Slot

if TYPE_CHECKING:
    from tiermem.nn.groups.addresses import Addresses
    from tiermem.nn.groups.entry import Entry
    from tiermem.nn.groups.grads import GradStore
    from tiermem.nn.groups.gradunit import Measure
    from tiermem.nn.groups.group import Group
    from tiermem.nn.groups.need import Program


class Calls(Protocol):
    """The current calls of a module; see :class:`tiermem.nn.wrap.scope.Inside`."""

    def reset(self) -> None:
        """Notes that no thread is inside a call any more."""
        ...


class WeightViews(Protocol):
    """Packs views of weights that autograd saves; see :mod:`tiermem.nn.passes.savedweights`."""

    def group_of(self, block: Block) -> Group:
        """Returns the group of a block."""
        ...

    def beside(self, saved: Any, tensor: torch.Tensor) -> Any:
        """Returns an alias, instead of a reference, if the bytes never leave HBM; else None."""
        ...

    def pay(self, block_id: int) -> None:
        """Performs the deferred step of a block."""
        ...

    def view(self, saved: Any) -> torch.Tensor:
        """Returns the view that a reference stands for."""
        ...


class Hooks(Protocol):
    """Sees the tensors that autograd saves; see :mod:`tiermem.nn.passes.saved`."""

    @property
    def weights(self) -> WeightViews:
        """Packs those that are views of weights."""
        ...

    def refused(self) -> bool:
        """Whether torch refuses hooks at the moment."""
        ...


class Here(Protocol):
    """What one thread is doing.

    Attributes:
        inside: Whether it is in a call of a wrapped module.
    """

    inside: bool

    def is_in_pass(self) -> bool:
        """Whether it is in a call of a wrapped module, or in a backward."""
        ...


class Lender(Protocol):
    """Fetches blocks for uses of tensors whose block is not held."""

    @property
    def here(self) -> Here:
        """What the calling thread is doing."""
        ...

    def demand(self, group: Group) -> None:
        """Points a group at its block, for a tensor of it that is looked up."""
        ...

    def note_apart(self, group: Group) -> None:
        """Notes that a tensor of a group is looked up outside its own modules' calls."""
        ...

    def lend(self, group: Group) -> int:
        """Holds a group for one operation; returns the token for :meth:`lent`."""
        ...

    def lent(self, group: Group, token: int, *, dirty: bool, views: bool = False) -> None:
        """Ends the operation that :meth:`lend` began."""
        ...

    def lend_in_place(self, group: Group) -> Sequence[torch.Tensor]:
        """Lends a group's tensors in place in DRAM, for one operation."""
        ...

    def lent_in_place(self, group: Group) -> None:
        """Ends the operation that :meth:`lend_in_place` began."""
        ...

    def bring(self, group: Group, show: Callable[[Slot], None], *, dirty: bool) -> None:
        """Fetches a block for a tensor that is then pointed at it."""
        ...

    def written(self, group: Group) -> None:
        """Notes that a block, of which there is an alias, was written."""
        ...

    def thawed(self, tensor: torch.Tensor) -> None:
        """Called when a parameter's ``requires_grad`` was set."""
        ...

    @property
    def addresses(self) -> Addresses:
        """The addresses that users got for its tensors."""
        ...

    @property
    def saved(self) -> Hooks:
        """The hooks that save tensors of its groups for backward."""
        ...


class RowSaving(Protocol):
    """Knows of rows of stacks that autograd saves; see :mod:`tiermem.nn.passes.savedrows`."""

    def copied(self, use: Use, index: int, experts: Sequence[int], copy: torch.Tensor) -> None:
        """Notes copies of rows that a call gets."""
        ...

    def version(self, weight: torch.Tensor) -> int:
        """Returns the version of a weight that is saved now; -1 if changes are not an error."""
        ...

    def resume(self, use: Use) -> Use:
        """Returns backward's use of the rows that a call has saved."""
        ...


class Watcher(Protocol):
    """Follows gradients as they arrive."""

    @property
    def listens(self) -> bool:
        """Whether :meth:`arriving` has anything to do at the moment."""
        ...

    def arriving(self, entry: Entry) -> bool:
        """Called before one is accumulated; returns whether to leave ``param.grad`` as it is."""
        ...

    def arrived(self, entries: Sequence[Entry]) -> None:
        """Called when gradients of parameters of one group are in the tiers."""
        ...

    def edited(self, entry: Entry) -> None:
        """Called when a gradient was written by other code than autograd."""
        ...

    def has_used(self, entry: Entry) -> bool:
        """Whether a step has used a gradient, and has to be repeated if it changes."""
        ...


class Norms(Protocol):
    """Computes the norms of one optimizer's gradients."""

    @property
    def measure(self) -> Measure | None:
        """The function to compute for every gradient, or None."""
        ...


class Reduced(Protocol):
    """Gradients that ``DistributedDataParallel`` reduces; see :mod:`tiermem.nn.passes.reduced`.

    Attributes:
        active: Whether the current backward reduces gradients.
        arrived: Whether a gradient has arrived in it.
    """

    active: bool
    arrived: bool

    def make_ordinary(self, entry: Entry) -> None:
        """Makes the gradient of a parameter an ordinary tensor."""
        ...


class Backward(Protocol):
    """The current backward; see :class:`tiermem.nn.passes.backward.BackwardPass`."""

    @property
    def under_way(self) -> bool:
        """Whether one has begun and not ended."""
        ...

    @property
    def ending(self) -> Callable[[], Any]:
        """Returns the function that ends it, while autograd still has to call that; else None."""
        ...

    @property
    def reduced(self) -> Reduced:
        """Gradients that ``DistributedDataParallel`` reduces."""
        ...

    def enter(self) -> None:
        """Called when a backward has computed a gradient."""
        ...


class Stepping(Protocol):
    """An optimizer; see :mod:`tiermem.nn.passes.keepers`."""

    @property
    def check_steps(self) -> Callable[[], None]:
        """Raises a ``CapacityError`` where HBM has no room for one of its steps."""
        ...


class Passes(Protocol):
    """The passes of the modules of one manager; see :mod:`tiermem.nn.passes.runtime`.

    Attributes:
        manager: The manager of the blocks.
        program: Models and optimizers, to be simulated to find the budgets that they need.
    """

    manager: BlockManager
    program: Program

    @property
    def groups(self) -> Sequence[Group]:
        """All groups, in the order of the models."""
        ...

    @property
    def grads(self) -> GradStore:
        """Their gradients."""
        ...

    @property
    def keepers(self) -> Sequence[Stepping]:
        """The optimizers that are open."""
        ...

    @property
    def backward(self) -> Backward:
        """The current backward."""
        ...

    def unit_limit(self, group: Group) -> int:
        """Returns how many bytes of gradients of a group may share a block."""
        ...
