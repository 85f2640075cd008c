"""Which parameters stay in HBM with gradients and state, while the others stream.

Adapters (such as LoRA's) are small and trained in every step; the weights around them are large and
frozen. If they shared a block, each step would mark all of it as written, so frozen bytes would be
copied home. If adapters are too large to stay, they have blocks of their own
(:func:`apart_from_frozen`).

Blocks of a few KB (the norms of a layer whose matrices are blocks of their own) stay, too: their
copy takes a thousandth of the time of the host's work for it.

A pass holds all of them throughout, so that modules which use nothing else need not be intercepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal

from torch import nn

from tiermem.core.block import ALIGNMENT
from tiermem.errors import ConfigError
from tiermem.nn.compat.outside import outside
from tiermem.nn.groups.inspect import Found
from tiermem.nn.groups.partition import TRAINED

Resident = Literal["auto"] | Callable[[str, nn.Parameter], bool] | None
"""Parameters that stay: ``"auto"``, a predicate of qualified name and parameter, or none."""

_SHARE = 8  # "auto": frozen parameters take at least this many times the bytes of trained ones
_OF_HBM = 8  # "auto": trained ones, with gradients and state, take at most this part of HBM
_APART = 2  # trained ones get their own block if frozen ones have this many times their bytes
_TRAINED = "(trained)"
_TOGETHER = 64
"""Parameters of one block: a step of a block with few costs the host as much as with many."""
_PREFIX = "."
_LITTLE = 1 << 20
"""Most bytes of a block that takes less time to copy than to request: 18 us at 57 GB/s."""
_BESIDE = 16  # the largest block has at least this many times the bytes of such a block
_OF_WEIGHTS = 64  # all such blocks together take at most this part of all weights
_LITTLE_OF_HBM = 64  # and at most this part of HBM, with gradients and state
_PAGES = 4  # whole pages of weights, gradients, masters and state


def residents(
    model: nn.Module,
    params: Sequence[Found],
    nbytes: Callable[[Found], int],
    resident: Resident,
    hbm: int,
) -> list[Found]:
    """Returns the parameters that stay in HBM; one of those over the same memory.

    Args:
        model: The model.
        params: Its parameters.
        nbytes: Returns the bytes of one.
        resident: Which parameters; see :data:`Resident`.
        hbm: The budget in bytes.
    """
    own = [found for found in params if found.same_as is None]
    if resident is None:
        return []
    if callable(resident):
        return [f for f in own if outside(resident, _whole(f).name, _whole(f).tensor)]
    named = _named(model)
    if named:
        return [found for found in own if id(_whole(found).tensor) in named]
    trained = [found for found in own if found.tensor.requires_grad]
    small = sum(nbytes(found) for found in trained)
    frozen = sum(nbytes(found) for found in own) - small
    whole = sum(trained_bytes(found) for found in trained)
    return trained if small * _SHARE <= frozen and whole * _OF_HBM <= hbm else []


def little(
    blocks: Mapping[str, Sequence[Found]], nbytes: Callable[[Sequence[Found]], int], hbm: int
) -> list[str]:
    """Returns the blocks that are too small to be worth moving, by name.

    Args:
        blocks: Parameters of each block.
        nbytes: Returns the bytes of a block of some parameters.
        hbm: The budget in bytes.
    """
    sizes = {name: nbytes(members) for name, members in blocks.items()}
    left = sum(sizes.values()) // _OF_WEIGHTS
    room = hbm // _LITTLE_OF_HBM - _PAGES * ALIGNMENT
    most = min(_LITTLE, max(sizes.values(), default=0) // _BESIDE)
    found = []
    for name in sorted(sizes, key=lambda name: sizes[name]):
        left -= sizes[name]
        room -= max(sizes[name], sum(trained_bytes(found) for found in blocks[name]))
        if sizes[name] > most or left < 0 or room < 0:
            break
        found.append(name)
    return found


def apart_from_frozen(
    root: str, members: Sequence[Found], nbytes: Callable[[Sequence[Found]], int]
) -> dict[str, list[Found]]:
    """Divides a block into trained and frozen parameters, if the trained ones are much smaller.

    Otherwise the frozen ones would be copied home after each step, too.

    Args:
        root: The name of the block.
        members: Its parameters.
        nbytes: Returns the bytes of a block of some parameters.
    """
    trained = [found for found in members if found.tensor.requires_grad]
    frozen = [found for found in members if not found.tensor.requires_grad]
    if not trained or not frozen or nbytes(trained) * _APART > nbytes(frozen):
        return {root: list(members)}
    return {root: frozen, f"{root}.{_TRAINED}" if root else _TRAINED: trained}


def trained_bytes(found: Found) -> int:
    """Returns the bytes of a parameter with gradient, master and state of Adam."""
    tensor = found.tensor
    return tensor.numel() * (TRAINED if tensor.requires_grad else tensor.element_size())


def _whole(found: Found) -> Found:
    """Returns the parameter that wraps a tensor, or the tensor itself if it is a parameter."""
    return found.shell or found


def _named(model: nn.Module) -> set[int]:
    """Returns the ids of the parameters that modules name in ``resident_names``."""
    return {
        id(module._parameters.get(name))
        for module in model.modules()
        for name in getattr(type(module), "resident_names", ())
        if module._parameters.get(name) is not None
    }


def checked_resident(resident: Resident) -> Resident:
    """Returns ``wrap``'s argument ``resident``, checked.

    Raises:
        ConfigError: If it is not a value that :data:`Resident` allows.
    """
    if resident is None or resident == "auto" or callable(resident):
        return resident
    raise ConfigError(
        f"resident={resident!r}: give 'auto', None, or a predicate of a parameter's name and itself"
    )


def divided(members: Sequence[Found]) -> dict[str, list[Found]]:
    """Divides parameters that stay into blocks, with names that no module has."""
    blocks: list[list[Found]] = []
    for parts in by_parameter(members):
        if not blocks or len(blocks[-1]) >= _TOGETHER:
            blocks.append([])
        blocks[-1].extend(parts)
    return {f"{_PREFIX}resident[{number}]": found for number, found in enumerate(blocks)}


def by_parameter(members: Sequence[Found]) -> Iterator[list[Found]]:
    """Yields the tensors inside each parameter, which are not divided between blocks."""
    for _, parts in groupby(members, lambda found: id(_whole(found))):
        yield [*parts]


def together(members: Sequence[Found]) -> dict[str, list[Found]]:
    """Returns the block of all parameters that are too small to be worth moving, if any."""
    return {f"{_PREFIX}small": list(members)} if members else {}


def is_resident(root: str) -> bool:
    """Whether a name is one of :func:`divided` or :func:`together`, rather than a module's."""
    return root.startswith(_PREFIX)
