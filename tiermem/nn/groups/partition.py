"""Which modules share a block.

The automatic choice depends on three things only: which modules repeat (the
layers of a stack, the experts of a mixture), how large a block may be, and which
modules are called as one. A *territory* is a module together with its
descendants, without the territories inside it; its parameters form one block.
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
"""How many places of a module are visited, on average."""
_SMALL = 1 << 16
_FINEST = 16 << 20
_COARSEST = 96 << 20
TRAINED = 16
"""Bytes per parameter that is trained by Adam: weight, gradient, master and two states, with a
weight of two bytes or of four (Rajbhandari et al., ZeRO, 2020, section 3.1)."""
_AT_ONCE = 21
"""HBM is divided into this many pieces, between the finest and the coarsest: a block is not larger
than the gradients of one unit may be (:mod:`tiermem.core.need`)."""
_STEP, _MOVED = 6e-3, 4
"""Seconds of a slow host for a training step of one block (uses, copies and its update: 3 to 6 ms
on H200 machines, including torch's part), and how many times a block's bytes are copied in each
direction for the update: gradient, weights and two states."""
_RUN = 20 << 20
"""Bytes of layers that are fetched together: 0.37 ms at 57 GB/s, a few times the host's work."""
_PARTS = 48 << 20  # the same for parts of one layer, which are used at about the same time
_RUN_TRAINED = 64 << 20
"""Bytes of layers, and of parts of one, that are fetched and stepped together if the link takes
longer for a step than the host."""
_LEFT = 4
"""If everything fits, blocks are joined; they are not coarser than the blocks that would be chosen
if HBM shrank by this factor."""


def largest_block(model_nbytes: int, hbm: int, coarse: int = 0) -> int:
    """Returns the bytes above which the automatic choice divides a block if it can.

    If the model streams, blocks that are in use or being fetched take room in which others could
    stay, so blocks should be small compared with the budget. They need not be smaller than a copy
    that hides the host's work for it: 16 MiB take 0.3 ms on a bus with 57 GB/s.

    Args:
        model_nbytes: Bytes of all parameters, and of all that training adds to them.
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
        rate: Bytes per second of the link.
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
    """As :func:`parameter_bytes`, including gradients and state of trained parameters."""
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
        lists: Bytes above which a list of parameters is not a part of the block around it; None if
            it always is.

    Returns:
        Modules by qualified name. The root (``""``) is always among them. If a module's kernel
        takes all weights inside it, that module is returned instead of modules inside it.

    Raises:
        ConfigError: If a name is not that of a module.
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
    """Returns the outermost module around one that must not be divided, or the module itself."""
    return next(reversed([above for above in names_above(name) if above in whole]), name)


def looks_up_its_own(module: nn.Module) -> bool:
    """Whether a module is not one of torch's own, whose kernels take all parameters at once.

    Other modules are assumed to look up their parameters one by one.
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

    These are the items of a list or of a sequence, if each is one block, and the parts of a layer
    that was divided, as long as joined blocks are not too large. Whether they are called in order
    is not known beforehand; a wrong guess costs time. Experts do not count as consecutive layers,
    and lists inside layers only if no two of their items are alike.

    Args:
        model: The model.
        roots: Modules at which a block begins, by qualified name.
        sizes: Bytes of the block of each, if it has one.
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
    if trained and training_bytes(model) <= hbm:  # then nothing moves
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
                continue  # it has no block that moves
            fits = item in roots and item in sizes and item not in divided
            # not blocks of which single rows or experts are copied
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
    """Whether the children of a module are different steps, not items of a list of alike ones."""
    kinds = [type(child) for child in module.children()]
    unlike = len(set(kinds)) == len(kinds) and "expert" not in name.rpartition(".")[2]
    return not isinstance(module, CONTAINERS) or unlike


def names_above(name: str) -> Iterator[str]:
    """Yields the qualified names of the modules around one, the root's last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def places(module: nn.Module, above: tuple[nn.Module, ...] = ()) -> Iterator[tuple[nn.Module, ...]]:
    """Yields the places of a module and of those below it, as the path of modules to each."""
    place = (*above, module)
    yield place
    for child in module._modules.values():
        if child is not None and not any(child is outer for outer in place):
            yield from places(child, place)


def other_places(model: nn.Module) -> list[list[str]]:
    """Returns the further places of modules that have several, and of the modules below them.

    Args:
        model: The model.

    Returns:
        For each such place the modules around it, outermost first, and the module itself; by the
        qualified names of their first places.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found, seen = list[list[str]](), set[int]()
    for place in islice(places(model), MOST_PLACES * len(names)):
        if id(place[-1]) in seen:
            found.append([names[id(module)] for module in place])
        seen.add(id(place[-1]))
    return found


def _lists(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields containers of layers that are called one by one, with their qualified names."""
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
        ConfigError: If the model does not have such a module, or a home is not a tier.
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
    """Descends from the root and marks where blocks begin."""

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
            inside: Whether a block other than the root's begins at it or above it.
        """
        whole = inside and self._size(module) <= self._largest
        one_block = whole and self._size(module) <= self._coarse
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            if not self._size(child):
                continue
            if isinstance(child, PARAMETERS) and self._size(child) > self._lists:
                self._begin(path, child)  # its parameters are looked up one by one
            elif isinstance(child, CONTAINERS) and not (one_block and _differ(path, child)):
                self._visit_list(path, child, inside=inside)
            elif experts_of(child):  # few of the experts may be used
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
