"""Which modules share a block.

The automatic choice looks at three things only: what repeats (the layers of a
stack, the experts of a mixture), what a block may weigh at most, and what is
called as one. A *territory* is a module together with its descendants, less
the territories inside it; its parameters form one block.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

from torch import nn

from tiermem.config import Home
from tiermem.core.need import whole_block
from tiermem.errors import ConfigError
from tiermem.nn.compat.fastpaths import uses_inside
from tiermem.nn.compat.outside import outside
from tiermem.nn.compat.stacks import experts_of
from tiermem.nn.tensors.shells import nbytes_of

Predicate = Callable[[str, nn.Module], bool]
PARAMETERS = (nn.ParameterList, nn.ParameterDict)
CONTAINERS = (nn.ModuleList, nn.ModuleDict, *PARAMETERS)
"""Modules that are not called themselves."""
MOST_PLACES = 4
"""Of a module, on average, that are gone through."""
_SMALL = 1 << 16
_FINEST = 16 << 20
_COARSEST = 96 << 20
TRAINED = 16
"""Bytes of a parameter that is trained by Adam: weight, gradient, master and two states, the weight
of two bytes or of four (Rajbhandari et al., ZeRO, 2020, section 3.1)."""
_AT_ONCE = 21
"""In so many pieces HBM is divided, between the finest and the coarsest: a block is not more than
gradients of one unit may be (:mod:`tiermem.core.need`)."""
_STEP, _MOVED = 6e-3, 4
"""Seconds of a slow host for a training step of one block (uses, copies and its update: 3 to 6 ms
on H200 machines, what torch does for it included), and how often a block's bytes move one way for
the update: gradient, weights and two states."""
_RUN = 20 << 20
"""Bytes of layers that are fetched together: 0.37 ms at 57 GB/s, a few times the host's work."""
_PARTS = 48 << 20  # likewise of parts of one layer, which are used at about the same time
_RUN_TRAINED = 64 << 20
"""Bytes of layers, and of parts of one, that are fetched and stepped together where the link takes
longer for a step than the host."""
_LEFT = 4
"""HBM may become less by so many times until blocks that were joined where all fits are coarser
than they would be chosen then."""


def largest_block(model_nbytes: int, hbm: int, coarse: int = 0) -> int:
    """Returns the bytes above which the automatic choice divides a block if it can.

    Where the model streams, what is in use and what is on its way take room from what could
    stay, so blocks shall be small beside the budget. They need not be smaller than what hides
    the work of asking for them: 16 MiB take a bus of 57 GB/s 0.3 ms.

    Args:
        model_nbytes: Bytes of all parameters, and of what training adds to them.
        hbm: Device budget in bytes.
        coarse: Bytes up to which blocks are not divided in any case.
    """
    if model_nbytes <= hbm:
        return max(1, hbm // 4)
    return max(1, coarse, min(hbm // 4, max(_FINEST, min(hbm // _AT_ONCE, _COARSEST))))


def steps_bind(hbm: int, rate: float) -> bool:
    """Whether a slow host takes longer for steps of fine blocks than the link.

    Args:
        hbm: Device budget in bytes.
        rate: Bytes a second of the link.
    """
    fine = min(max(_FINEST, hbm // _AT_ONCE), _RUN_TRAINED)
    return whole_block(hbm) > fine and _MOVED * fine < _STEP * rate


def parameter_bytes(module: nn.Module) -> int:
    """Returns the bytes of a module's parameters, descendants included, shared ones once."""
    return sum(_each_bytes(module, {}).values())


def _each_bytes(module: nn.Module, known: dict[int, dict[int, int]]) -> dict[int, int]:
    """Returns the bytes of each parameter in a module, by its id.

    Args:
        module: The module.
        known: What this returned for other modules, by their ids; it is filled.
    """
    found = known.get(id(module))
    if found is None:
        own = (p for p in module._parameters.values() if p is not None)
        found = known[id(module)] = {id(p): nbytes_of(p) for p in own}
        for child in module.children():
            found.update(_each_bytes(child, known))
    return found


def training_bytes(module: nn.Module) -> int:
    """Returns what :func:`parameter_bytes` does, with gradients and state of what is trained."""
    return sum(
        max(nbytes_of(p), p.numel() * TRAINED if p.requires_grad else 0)
        for p in module.parameters()
    )


def territories(
    model: nn.Module,
    blocks: str | Iterable[str] | Predicate,
    largest: int,
    coarse: int = 0,
    lists: int | None = None,
) -> dict[str, nn.Module]:
    """Chooses the modules at which a block begins.

    Args:
        model: The model.
        blocks: ``"auto"``, qualified names of modules, or a predicate of name and module.
        largest: Bytes above which a block is divided if it can be.
        coarse: Bytes up to which lists of steps inside a layer are not divided either.
        lists: Bytes above which a list of parameters is no part of the block around it; None where
            it always is.

    Returns:
        Modules by qualified name; the root (``""``) is always among them, and none inside a module
        whose kernel takes the weights of all that is in it: that one is, in its place.

    Raises:
        ConfigError: If a name is not one of a module.
    """
    modules = dict(model.named_modules())
    if blocks == "auto":
        chosen = _Automatic(largest, coarse, lists).choose(model)
    elif callable(blocks):
        chosen = {name for name, module in modules.items() if outside(blocks, name, module)}
    elif isinstance(blocks, str):
        raise ConfigError(f"blocks={blocks!r}: give 'auto', a list of module names or a predicate")
    else:
        chosen = set(blocks)
        unknown = sorted(chosen - set(modules), key=str)
        if unknown:
            raise ConfigError(f"blocks: the model has no modules named {unknown[:5]}")
    whole = {name for name, module in modules.items() if uses_inside(module)}
    chosen = {_around(name, whole) for name in chosen} | {""}
    return {name: module for name, module in modules.items() if name in chosen}


def _around(name: str, whole: set[str]) -> str:
    """Returns the outermost module around one of which no part is a block; else itself."""
    return next(reversed([above for above in names_above(name) if above in whole]), name)


def looks_up_its_own(module: nn.Module) -> bool:
    """Whether a module is no kind of torch's, whose kernels take all of its parameters at once.

    Its code looks its parameters up one by one, as far as is known.
    """
    kinds = [kind for kind in type(module).__mro__ if kind not in (nn.Module, object)]
    ours = not any(kind.__module__.partition(".")[0] == "torch" for kind in kinds)
    return ours and not experts_of(module) and not uses_inside(module)


def runs(
    model: nn.Module,
    roots: Mapping[str, nn.Module],
    sizes: Mapping[str, int],
    hbm: int,
    *,
    trained: bool = False,
    coarse: int = 0,
) -> dict[str, str]:
    """Chooses layers that share a block with those called just before and after them.

    These are the items of a list, or of a sequence, of which each is one block; and the parts of a
    layer that was divided, as long as they are no larger than blocks need be. Whether they are
    called in order cannot be known beforehand: a wrong guess costs time. Experts are not taken for
    layers in a row, nor are lists inside layers, unless no two of their items are alike.

    Args:
        model: The model.
        roots: Modules at which a block begins, by qualified name.
        sizes: Bytes of the block of each that has one.
        hbm: Device budget in bytes.
        trained: Whether most of the weights will be trained.
        coarse: Bytes up to which blocks are shared in any case.

    Returns:
        Names of shared blocks, such as ``layers.0-3``, by the name of each module in them.
    """
    divided = {above for name in sizes for above in names_above(name)}
    found: dict[str, str] = {}
    room = hbm // _AT_ONCE
    of_layers, of_parts = (_RUN_TRAINED, _RUN_TRAINED) if trained else (_RUN, _PARTS)
    if trained and training_bytes(model) <= hbm:  # nothing moves as long as that is so
        of_layers = of_parts = max(_RUN_TRAINED, room // _LEFT)
    layers = [(name, container, of_layers) for name, container in _lists("", model)]
    inner = {name for name in divided if name} - {name for name, _, _ in layers}
    parts = [(n, m, of_parts) for n, m in model.named_modules() if n in inner and _differ(n, m)]
    for name, container, most in (*layers, *parts):
        run: list[str] = []
        nbytes = 0
        for key, child in container.named_children():
            item = f"{name}.{key}" if name else key
            if item not in sizes and item not in divided:
                continue  # it has nothing that moves
            fits = item in roots and item in sizes and item not in divided
            # not what is read by rows, or expert by expert
            fits = fits and not (isinstance(child, nn.Embedding) or experts_of(child))
            if not fits or nbytes + sizes[item] > max(coarse, min(most, room)):
                run, nbytes = [], 0
            if fits:
                run.append(item)
                nbytes += sizes[item]
                if len(run) > 1:
                    found.update(dict.fromkeys(run, f"{run[0]}-{key}"))
    return found


def _differ(name: str, module: nn.Module) -> bool:
    """Whether the children of a module are steps of its own: not those of a list of alike ones."""
    kinds = [type(child) for child in module.children()]
    unlike = len(set(kinds)) == len(kinds) and "expert" not in name.rpartition(".")[2]
    return not isinstance(module, CONTAINERS) or unlike


def names_above(name: str) -> Iterator[str]:
    """Yields the qualified names of the modules around one, the root's last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def places(module: nn.Module, above: tuple[nn.Module, ...] = ()) -> Iterator[tuple[nn.Module, ...]]:
    """Yields the places of a module and of those below it: what is around each, and itself."""
    place = (*above, module)
    yield place
    for child in module._modules.values():
        if child is not None and not any(child is outer for outer in place):
            yield from places(child, place)


def other_places(model: nn.Module) -> list[list[str]]:
    """Returns where modules of several places are besides the first, and what is below them.

    Args:
        model: The model.

    Returns:
        Of each such place the modules around it, outermost first, and the one that is there; by
        the qualified names of their first places.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found, seen = list[list[str]](), set[int]()
    for place in islice(places(model), MOST_PLACES * len(names)):
        if id(place[-1]) in seen:
            found.append([names[id(module)] for module in place])
        seen.add(id(place[-1]))
    return found


def _lists(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields what holds layers that are called one by one, with its qualified name."""
    ordered = isinstance(module, nn.Sequential)
    if ordered or isinstance(module, nn.ModuleList):
        if "expert" not in name.rpartition(".")[2]:
            yield name, module
        if not ordered:
            return
    for key, child in module.named_children():
        if not ordered or isinstance(child, nn.Sequential):
            yield from _lists(f"{name}.{key}" if name else key, child)


def checked_homes(
    homes: Mapping[str, Home] | None, modules: Mapping[str, nn.Module]
) -> dict[str, Home]:
    """Returns homes of modules' weights by qualified name.

    Raises:
        ConfigError: If one is of a module that the model does not have, or no tier.
    """
    if homes is not None and not isinstance(homes, Mapping):
        raise ConfigError(f"homes={homes!r}: give homes by modules' names, as in {{'0': 'dram'}}")
    found = dict(homes or {})
    unknown = sorted(set(found) - set(modules))
    if unknown:
        raise ConfigError(f"homes: the model has no modules named {unknown[:5]}")
    for name, home in found.items():
        if home not in ("hbm", "dram", "nvme", "auto"):
            raise ConfigError(
                f"homes: {name!r} has the home {home!r}; it is one of 'hbm', 'dram', 'nvme', 'auto'"
            )
    return found


def home_of(name: str, homes: Mapping[str, Home]) -> Home | None:
    """Returns the home given for a module or for the nearest module around it; None for none."""
    while name not in homes and name:
        name = name.rpartition(".")[0]
    return homes.get(name)


class _Automatic:
    """Walks down from the root and marks where blocks begin."""

    def __init__(self, largest: int, coarse: int, lists: int | None) -> None:
        self._largest, self._coarse = largest, coarse
        self._lists = math.inf if lists is None else lists
        self._marked: set[str] = set()
        self._each: dict[int, dict[int, int]] = {}

    def choose(self, model: nn.Module) -> set[str]:
        self._visit("", model, inside=False)
        return self._marked

    def _size(self, module: nn.Module) -> int:
        return sum(_each_bytes(module, self._each).values())

    def _visit(self, name: str, module: nn.Module, *, inside: bool) -> None:
        """Marks blocks among the descendants of ``module``.

        Args:
            name: Qualified name.
            module: Where to look.
            inside: Whether a block has begun at it or above it, other than the root's.
        """
        whole = inside and self._size(module) <= self._largest
        one_block = whole and self._size(module) <= self._coarse
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            if not self._size(child):
                continue
            if isinstance(child, PARAMETERS) and self._size(child) > self._lists:
                self._begin(path, child)  # what is in it is looked up one by one
            elif isinstance(child, CONTAINERS) and not (one_block and _differ(path, child)):
                self._visit_list(path, child, inside=inside)
            elif experts_of(child):  # of which few may be used
                self._begin(path, child)
            elif whole:
                self._visit(path, child, inside=True)
            elif isinstance(child, nn.Sequential) and not inside and self._repeats(child):
                self._visit_list(path, child, inside=inside)
            elif self._size(child) > _SMALL or not inside:
                self._begin(path, child)
            else:
                self._visit(path, child, inside=inside)

    def _visit_list(self, path: str, container: nn.Module, *, inside: bool) -> None:
        """Begins a block at each item of a list whose items are called one by one."""
        for name, child in container.named_children():
            item = f"{path}.{name}"
            if not self._size(child):
                continue
            if isinstance(child, CONTAINERS):
                self._visit_list(item, child, inside=inside)
            elif self._size(child) > _SMALL // 16 or not inside:
                self._begin(item, child)
            else:
                self._visit(item, child, inside=inside)

    def _begin(self, path: str, module: nn.Module) -> None:
        self._marked.add(path)
        self._visit(path, module, inside=True)

    def _repeats(self, container: nn.Module) -> bool:
        kinds = Counter(type(child) for child in container.children() if self._size(child))
        return any(count > 1 for count in kinds.values())
