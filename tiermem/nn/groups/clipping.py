"""torch's own clipping (``nn.utils.clip_grad_norm_``, ``clip_grad_value_``) in the tiers.

torch computes the norms of a list of gradients in one call, and scales or clamps the list in
another. For gradients in the tiers, the norms are those that were computed in backward, when the
gradients arrived (from the second time on that norms of this order are needed). The change is
applied when a gradient is next in HBM, at the latest in the optimizer's step. So neither call moves
anything. If a step has used gradients already (:mod:`tiermem.optim.ahead`), it stays valid if the
factor is one.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _foreach_utils

from tiermem.nn.tensors.lazy import ANSWERS, LOOK, UNSCALE, LazyTensor, flush, is_viewed, look
from tiermem.nn.tensors.norms import measure_of
from tiermem.nn.tensors.standin import dispatch

if TYPE_CHECKING:
    from tiermem.nn.groups.entry import Entry
    from tiermem.nn.groups.grads import GradStore
    from tiermem.nn.groups.gradunit import Change, GradUnit

    Place = tuple[GradStore, GradUnit, list[Entry]]


class Clippable:
    """Access of a stand-in to its gradient in the tiers; keeps nothing alive."""

    __slots__ = ("_entry", "_grads")

    def __init__(self, grads: GradStore, entry: Entry) -> None:
        """Stands for the gradient of a parameter."""
        self._grads = weakref.ref(grads)
        self._entry = weakref.ref(entry)

    def norm(self, stand_in: LazyTensor, order: float) -> torch.Tensor | None:
        """Returns the norm if it is known; from now on it is computed when gradients arrive."""
        found = self._current(stand_in)
        if found is None:
            return None
        grads, entry = found
        measure = measure_of((order, None, None))
        grads.norms.ask([entry], measure)
        return grads.norms.known(entry, measure)

    def waits(self, stand_in: LazyTensor) -> tuple[GradStore, GradUnit, Entry] | None:
        """Returns where to register a change, to be applied when the gradient is next in HBM."""
        found = self._current(stand_in)
        if found is None or found[1].unit is None or is_viewed(stand_in):
            return None
        return found[0], found[1].unit, found[1]

    def _current(self, stand_in: LazyTensor) -> tuple[GradStore, Entry] | None:
        """Returns store and entry of the gradient, if the stand-in is that of ``param.grad``."""
        grads, entry = self._grads(), self._entry()
        if grads is None or entry is None or entry.lazy is not stand_in:
            return None
        if not entry.has_grad or entry.displaced or entry.param.grad is not stand_in:
            return None
        flush(stand_in)
        return grads, entry


def _norms(tensors: Any, ord: Any = 2, dtype: Any = None) -> Any:
    """Implements ``torch._foreach_norm`` for stand-ins."""
    if dtype is not None or not isinstance(tensors, list | tuple):
        return NotImplemented
    norms: list[torch.Tensor] = []
    known: list[int] = []
    for index, tensor in enumerate(tensors):
        norm = None
        if isinstance(tensor, LazyTensor) and tensor._clippable is not None:
            norm = tensor._clippable.norm(tensor, float(ord))
        if norm is None:
            (norm,) = dispatch(torch._foreach_norm, ([tensor], ord), {})
        else:
            known.append(index)
        norms.append(norm)
    _separate(norms, known)
    return norms


def _separate(norms: list[torch.Tensor], known: Sequence[int]) -> None:
    """Replaces kept norms by copies, as callers might write to them; one kernel for all."""
    if len({(norms[i].dtype, norms[i].device) for i in known}) == 1:
        copies = torch.stack([norms[i] for i in known]).unbind()
    else:
        copies = tuple(norms[i].clone() for i in known)
    for index, copy in zip(known, copies, strict=True):
        norms[index] = copy


def _change(func: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """Implements for stand-ins a function that changes each tensor of a list by one number."""
    numbers = [*args, *kwargs.values()]
    if not isinstance(tensors, list | tuple) or not all(map(_is_real, numbers)):
        return NotImplemented
    if func is torch._foreach_mul_ and any(map(_is_used, tensors)) and _is_one(numbers):
        tensors = [tensor for tensor in tensors if not isinstance(tensor, LazyTensor)]
    clamps = func is not torch._foreach_mul_
    places, others = _places(tensors, real=clamps)  # torch refuses to clamp complex ones now
    for tensor in others:
        dispatch(func, ([tensor], *args), kwargs)
    given = [_kept(number) for number in args]
    named = {key: _kept(number) for key, number in kwargs.items()}
    change = partial(_make, func=func, args=given, kwargs=named)
    _put_off(places, change)
    return None


def _is_real(number: Any) -> bool:
    """Whether it is one real number, so that a deferred change cannot fail."""
    if isinstance(number, torch.Tensor) and not isinstance(number, LazyTensor):
        return number.dim() == 0 and not number.is_complex()
    return isinstance(number, int | float)


def _kept(number: Any) -> Any:
    return number.detach().clone() if isinstance(number, torch.Tensor) else number


def _places(
    tensors: Sequence[torch.Tensor], *, real: bool = False
) -> tuple[list[Place], list[torch.Tensor]]:
    """Returns the places of gradients in the tiers, by unit, and all other tensors.

    A gradient that is given twice (of a tied weight whose modules are clipped together) has two
    places: it is changed twice.

    Args:
        tensors: Gradients in the tiers, and any others.
        real: Whether complex gradients are among the others.
    """
    units: dict[tuple[int, int], Place] = {}
    others: list[torch.Tensor] = []
    times: Counter[int] = Counter()
    for tensor in tensors:
        place = None if real and tensor.dtype.is_complex else _place_of(tensor)
        if place is None:
            others.append(tensor)
            continue
        grads, unit, entry = place
        grads.pay(unit)
        times[id(entry)] += 1
        units.setdefault((id(unit), times[id(entry)]), (grads, unit, []))[2].append(entry)
    return list(units.values()), others


def _place_of(tensor: torch.Tensor) -> tuple[GradStore, GradUnit, Entry] | None:
    """Returns the place of a gradient in the tiers; None for any other tensor."""
    asked = tensor._clippable if isinstance(tensor, LazyTensor) else None
    return None if asked is None else asked.waits(tensor)


def _unscale(tensors: Any, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> Any:
    """Implements for stand-ins the function with which a GradScaler unscales gradients.

    The caller needs to know at once whether a gradient is not finite. If that is known, the
    gradient is unscaled when it is next in HBM; otherwise now, by a call for each unit.
    """
    if not isinstance(tensors, list | tuple):
        return NotImplemented
    places, others = _places(tensors)
    for tensor in others:
        dispatch(UNSCALE, ([tensor], found_inf, inv_scale), {})
    for grads, mine in _by_store(places):
        _undo_scale(grads, mine, found_inf, inv_scale)
    return None


def _by_store(places: Sequence[Place]) -> list[tuple[GradStore, list[Place]]]:
    """Returns each manager's gradients with their places."""
    stores = {id(grads): grads for grads, _, _ in places}.values()
    return [(grads, [place for place in places if place[0] is grads]) for grads in stores]


def _undo_scale(
    grads: GradStore, places: Sequence[Place], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """Unscales the gradients of one manager, now or later."""
    # the host does not step gradients that still have to be unscaled
    may_wait = not any(has_share() for has_share in grads.host_shares)
    known, others = _found(grads, places, found_inf, inv_scale, known=may_wait)
    change: Change = partial(UNSCALE, found_inf=found_inf, inv_scale=inv_scale)
    for _, unit, entries in others:
        grads.change_now(unit, entries, change)
    if known:
        _put_off(known, grads.norms.scale.new_change())


def _look(tensors: Any, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> Any:
    """Implements for stand-ins a GradScaler's test for infinities, which changes nothing."""
    places, others = _places(tensors)
    for grads, mine in _by_store(places):
        _, unknown = _found(grads, mine, found_inf, inv_scale)
        others += [
            e.param.grad for *_, entries in unknown for e in entries if e.param.grad is not None
        ]
    look(others, found_inf, inv_scale)


def _found(
    grads: GradStore,
    places: Sequence[Place],
    found_inf: torch.Tensor,
    inv_scale: torch.Tensor,
    *,
    known: bool = True,
) -> tuple[list[Place], list[Place]]:
    """Sets ``found_inf`` if it is known that a gradient is not finite.

    Returns:
        The places of gradients for which it is known, and the other places. If the scale is not
        the same as last time, or ``known`` is false, all are other places.
    """
    scale = grads.norms.scale
    known = scale.is_again(inv_scale) and known
    there = [place for place in places if known and scale.knows(*place[1:])]
    ids = set(map(id, there))
    if there:
        infinite = scale.infinite(entry for *_, entries in there for entry in entries)
        found_inf.copy_(torch.maximum(found_inf, infinite.view_as(found_inf)))
    return there, [place for place in places if id(place) not in ids]


def _is_used(tensor: torch.Tensor) -> bool:
    """Whether a step has used a gradient already, and has to be repeated if it changes."""
    place = _place_of(tensor)
    return place is not None and place[0].is_used(place[2])


def _is_one(numbers: Sequence[Any]) -> bool:
    """Whether gradients are multiplied by one; on CUDA the host waits for the number."""
    (number,) = numbers
    single = not isinstance(number, torch.Tensor) or number.numel() == 1
    return single and bool(number == 1)


def _put_off(places: Sequence[Place], change: Change) -> None:
    """Registers a pending change for all gradients, or (after Ctrl-C) for none."""
    try:
        for grads, unit, entries in places:
            grads.await_change(unit, entries, change)
    except BaseException:
        for _, unit, _ in places:
            unit.forget_change(change)
        raise


def _make(
    tensors: Sequence[torch.Tensor],
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> None:
    for tensor in tensors:  # one at a time: dtypes may differ
        moved = [a.to(tensor.device) if isinstance(a, torch.Tensor) else a for a in args]
        func([tensor], *moved, **kwargs)


def factor_of(change: Change) -> torch.Tensor | None:
    """Returns the factor by which a change multiplies gradients; None for any other change.

    Args:
        change: A change made in this module, or a partial function with ``factor=``.
    """
    given = change.keywords if isinstance(change, partial) else {}
    if given.get("func") is torch._foreach_mul_ and len(given["args"]) == 1:
        found = given["args"][0]
    else:
        found = given.get("factor")
    return found if isinstance(found, torch.Tensor) else None


_CHANGES: tuple[Callable[..., Any], ...] = (
    torch._foreach_mul_,
    torch._foreach_clamp_min_,
    torch._foreach_clamp_max_,
)

ANSWERS[torch._foreach_norm] = _norms
ANSWERS[UNSCALE] = _unscale
ANSWERS[LOOK] = _look
ANSWERS.update({func: partial(_change, func) for func in _CHANGES})

# so that torch calls these functions for stand-ins as for ordinary gradients: on CUDA the functions
# for single tensors round differently
if LazyTensor not in _foreach_utils._foreach_supported_types:
    _foreach_utils._foreach_supported_types.append(LazyTensor)
