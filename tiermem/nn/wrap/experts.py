"""Layers of experts whose weights are stacked: only the rows that tokens choose are fetched.

A call gets the experts that each token has chosen. Its block is not fetched
then; :class:`~tiermem.nn.groups.rows.Rows` replace its parameters, and the rows of the
chosen experts are copied into HBM one by one, and again in backward
(:mod:`tiermem.nn.passes.savedrows`). If gradients of the weights themselves are computed, or if
it is unknown how the module reads them, the block is fetched as usual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from tiermem.errors import REFUSALS, ParameterError
from tiermem.nn.compat.entrances import inside
from tiermem.nn.compat.outside import OUTSIDE
from tiermem.nn.compat.stacks import choices_in, experts_of, reads_rows
from tiermem.nn.groups.entry import Entry
from tiermem.nn.groups.rows import Choice, Rows
from tiermem.nn.wrap.lookup import is_watched
from tiermem.nn.wrap.scope import CallInterceptor, Scope
from tiermem.runtime.base.functorch import outside_inference
from tiermem.runtime.manager import BlockManager
from tiermem.runtime.memory.expert_seats import QUIET, WHOLE, Piece, Stack, Use
from tiermem.runtime.services.expert_store import ExpertStore

_AHEAD = 64 << 20
"""Bytes that the bus transfers during a layer's other work, for one token."""
_FEW = 512
"""Number of choices up to which Python counts them faster than torch."""
_item = dict.get  # looks a name up without fetching anything


class ExpertsInterceptor(CallInterceptor):
    """Intercepts calls of a module of stacked experts that is a block of its own."""

    __slots__ = ("_params", "_stack", "_store", "_tensors", "_writes")

    def __init__(self, module: nn.Module, scope: Scope) -> None:
        """Registers the block as a stack; see :func:`is_experts`."""
        super().__init__(module, scope)
        group = scope.groups[0]
        self._store: ExpertStore = self.runtime.experts
        self._writes = False
        self._stack: Stack | None = self._store.add(group.block, experts_of(module))
        params = module.__dict__["_parameters"]
        index = {id(entry.param): entry.index for entry in group.entries}
        self._params: dict[str, Any] = {name: _item(params, name) for name in params}
        if self._stack is not None:
            self._stack.foresee = router_of(scope, self._stack.experts)
            self._stack.grouped = reads_rows(module) == "grouped_mm"
        self._tensors = {name: index[id(param)] for name, param in self._params.items()}

    @property
    def manager(self) -> BlockManager:
        """The manager of the block."""
        return self._manager

    def give_back(self) -> None:
        """Restores the module; its block is no longer a stack."""
        super().give_back()
        self._store.remove(self._groups[0].block.id)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module with the chosen rows, or as any other."""
        if self._manager.gate.unsure:
            self.runtime.repair()
        choice = None
        recomputing = torch._C._current_graph_task_id() != -1
        if self._store.open and (self._here.inside or recomputing) and self._may():
            choice = self._choose(args, kwargs, again=recomputing)
        if choice is None:
            return super().__call__(*args, **kwargs)
        if self.runtime.unwritten:
            self.runtime.unwritten.got_further(self.scope)
        return self._call(choice, args, kwargs)

    def _call(self, choice: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the module with rows in place of its parameters."""
        rows, gate = self._groups[0].pointing.rows, self._manager.gate
        entered = pushed = theirs = ended = False
        try:
            try:
                entered = self._enters and self._activations.enter(self.scope)
                pushed = torch.is_grad_enabled() and self._push()
                rows[get_ident()] = {
                    name: Rows(choice, tensor, self._params[name])
                    for name, tensor in self._tensors.items()
                }
                theirs = True
                result = self.inner(*args, **kwargs)
                theirs = False
                return result
            finally:
                rows.pop(get_ident(), None)
                if pushed:
                    self._saved.pop()
                if entered:
                    self._activations.leave()
                self._end(choice)
                ended = True
        except REFUSALS:
            raise
        except BaseException as error:
            if not (ended and (theirs or OUTSIDE in error.__dict__)):
                gate.torn = gate.unsure = True  # at a line of tiermem's; no call: see entrance
            raise

    def _may(self) -> bool:
        """Whether a call runs only the forward that was inspected, on plain tensors."""
        names, group = self.module.__dict__, self._groups[0]
        return (
            self._stack is not None
            and not self._writes
            and (not torch.is_grad_enabled() or self._may_be_saved())
            and not group.holds
            and self.compiled is None
            and not (names["_forward_pre_hooks"] or names["_forward_hooks"])
            and not (names["_backward_hooks"] or names["_backward_pre_hooks"])
            and not group.writes.suspect
            and not group.writes.merging
            and not group.may_be_written()
            and not any(entry.materialized for entry in group.entries)
            and self._has_all()
            and not is_watched()
            and not torch.is_autocast_enabled(self._manager.parts.device.type)
        )

    def _may_be_saved(self) -> bool:
        """Whether rows that autograd saves are noticed, and no gradients of them are computed."""
        with torch._C.DisableTorchFunctionSubclass():  # they are not in HBM
            trained = any(param.requires_grad for param in self._params.values())
        return not trained and not self._saved.refused() and forward_ad._current_level < 0

    def _has_all(self) -> bool:
        """Whether the module still has the parameters whose values the block has."""
        now = self.module.__dict__["_parameters"]
        return all(_item(now, name) is param for name, param in self._params.items())

    @inside
    def _choose(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, again: bool
    ) -> Choice | None:
        """Reads which experts are chosen and begins their copies; None for the whole block."""
        stack, how = self._stack, reads_rows(self.module)
        indices = choices_in(args, kwargs)
        if stack is None or not how or indices is None or not indices.numel():
            return None
        stack.grouped = how == "grouped_mm"
        manager = self._manager
        manager.gate.guard()  # before any lock, which may be held for ever in a forked child
        if self._store.tensors:
            if again or torch.is_grad_enabled() or not stack.grouped:
                return None
            return self._whole(stack, indices)
        if again:
            self.runtime.backward.enter()
        expected = None if again or torch.is_grad_enabled() else self._foresee(stack, args)
        flat, named = indices.reshape(-1), list[int]()
        if expected is None:
            chosen = flat.tolist() if len(flat) <= _FEW else flat.cpu()  # waits for the router
        else:
            both = torch.cat([flat, expected]).tolist()
            chosen, named = both[: len(flat)], both[len(flat) :]
        counts = counted(chosen, stack.experts)
        if counts is None:
            return None
        with manager.lock:
            if not self._store.usable(stack):
                return None
            use = Use(stack, counts, self._order(stack, counts, how), again=again)
            self._store.begin(use, named)
        few = None
        if how == "batched_mm":
            few = chosen if isinstance(chosen, list) else chosen.tolist()
        exact, saving = how == "grouped_mm", self._saved.rows
        return Choice(manager, self._store, use, few, exact=exact, saving=saving)

    def _whole(self, stack: Stack, indices: torch.Tensor) -> Choice:
        """Returns the choice of a call that uses whole tensors: its experts do not matter."""
        way = self._store.way
        if way.looks:
            with self._manager.lock:
                way.look(stack.experts, indices)
        use = Use(stack, {}, ())
        return Choice(self._manager, self._store, use, None, exact=False, saving=self._saved.rows)

    @staticmethod
    def _foresee(stack: Stack, args: tuple[Any, ...]) -> torch.Tensor | None:
        """Asks the router of the next layer which experts it would choose, for one token.

        Its real input will differ, but not by much: every layer only adds to the hidden states.
        (Eliseev and Mazur, Fast Inference of Mixture-of-Experts Language Models with Offloading,
        2023.)

        Returns:
            The most probable experts, as many as there is time to copy; None if it is not worth it,
            or the router cannot be called.
        """
        after = stack.after
        if after is None or after.foresee is None or not after.popularity.worth_a_look:
            return None
        if after.quiet >= QUIET:
            return None  # there would be nothing to copy
        states = args[0] if args else None
        if type(states) is not torch.Tensor or states.dim() != 2 or len(states) != 1:
            return None
        scores = after.foresee(states)
        if scores is None:
            return None
        most = max(1, min(len(after.popularity.last), _AHEAD // max(after.expert_nbytes, 1)))
        return scores[0].topk(most).indices

    @staticmethod
    def _order(stack: Stack, chosen: Iterable[int], how: str) -> list[Piece]:
        """Returns the pieces of a call in the order in which it will ask for them."""
        if how == "eager":  # expert by expert
            return [of_tensor[expert] for expert in chosen for of_tensor in stack.pieces]
        return [of_tensor[expert] for of_tensor in stack.pieces for expert in chosen]

    @inside
    def _end(self, choice: Choice) -> None:
        self._saved.rows.end(choice.use)
        with self._manager.lock:
            written = choice.use.written()
            self._store.end(choice.use)
        for piece, value in written.items():
            self._write(choice, piece, value)

    def _write(self, choice: Choice, piece: Piece, value: torch.Tensor | None) -> None:
        """Writes to the block what the forward has written to one of its rows.

        Its source did not show that (a method that it calls does it); from now on the whole block
        is fetched for its calls.

        Args:
            choice: The choice of the call.
            piece: The row.
            value: Its bytes; None if they are lost.

        Raises:
            ParameterError: If they are lost.
        """
        self._writes = True
        name = next(name for name, tensor in self._tensors.items() if tensor == piece.tensor)
        if value is None:
            raise ParameterError(
                f"{self.scope.name!r} has written rows of {name!r} in a call in which there was "
                "room for a few rows only, and they are lost; load their values anew: its next "
                "calls bring the whole up"
            )
        weight = self._params[name]
        shape = weight.shape if piece.expert == WHOLE else weight.shape[1:]
        row = value.view(weight.dtype)[: shape.numel()].view(shape)
        with outside_inference(), torch.no_grad():
            if piece.expert == WHOLE:
                weight.copy_(row)
            else:
                expert = torch.tensor([piece.expert], device=row.device)
                weight.index_copy_(0, expert, row[None])


def counted(indices: torch.Tensor | list[int], experts: int) -> dict[int, int] | None:
    """Returns how often each expert is chosen, for the chosen ones, in ascending order.

    Args:
        indices: Indices of experts, not empty; a list if they are few, else 1-D, on the host.
        experts: The number of experts.

    Returns:
        None if an index does not belong to an expert.
    """
    if isinstance(indices, list):
        counts = dict.fromkeys(sorted(indices), 1)
        if len(counts) < len(indices):
            counts = dict(sorted(Counter(indices).items()))
        return counts if min(indices) >= 0 and max(indices) < experts else None
    if int(indices.min()) < 0 or int(indices.max()) >= experts:
        return None
    every = torch.bincount(indices, minlength=experts).tolist()
    return {expert: count for expert, count in enumerate(every) if count}


def router_of(scope: Scope, experts: int) -> Callable[[torch.Tensor], torch.Tensor | None] | None:
    """Returns a function that calls the router beside a layer's experts; None without a router.

    The router is a module next to them whose weight has a row of features for each expert.
    """
    wrapped = scope.wrapped
    beside = wrapped.modules.beside(scope.name)
    for module in beside:
        params = module.__dict__["_parameters"]
        weight, bias = _item(params, "weight"), _item(params, "bias")
        if weight is None or weight.dim() != 2 or weight.shape[0] != experts:
            continue
        entries = [wrapped.modules.entry_of(p) for p in (weight, bias) if p is not None]
        found = [entry for entry in entries if entry is not None]
        if len(found) == len(entries) and len({id(entry.group) for entry in found}) == 1:
            return partial(_scores, found)
    return None


def _scores(entries: list[Entry], states: torch.Tensor) -> torch.Tensor | None:
    """Returns a router's scores, if its block is in HBM anyway."""
    group = entries[0].group
    manager = group.manager
    if group.freed or states.shape[1] != entries[0].param.shape[1]:
        return None
    with manager.lock:
        slot = manager.slot_at_hand(group.block)
        if slot is None:
            return None
        manager.parts.copy.use(manager.parts.transfers.ready.get(group.block.id))
        weight, *bias = (slot.views[entry.index] for entry in entries)
        return torch.nn.functional.linear(states.to(weight.dtype), weight, *bias)


def is_experts(module: nn.Module, scope: Scope) -> bool:
    """Whether a module has stacked experts that are a block of their own."""
    if not scope.begins or len(scope.groups) != 1 or not experts_of(module):
        return False
    group = scope.groups[0]
    own = {id(param) for param in module.__dict__["_parameters"].values()}
    alone = not (group.buffers or group.carried)
    return alone and own == {id(entry.param) for entry in group.entries}
