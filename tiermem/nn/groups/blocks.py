"""Divides the tensors of a model into blocks for a budget, and finds which are held at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from tiermem.core.block import align_up
from tiermem.core.layout import TensorShape, packed_nbytes
from tiermem.core.need import STEPPED, STEPPED_WHOLE, Home, unit_limit, whole_block
from tiermem.errors import ConfigError
from tiermem.nn.compat.shapes import shape_of
from tiermem.nn.groups.hostbound import SHARES, Streamed, host_seconds, rate_up
from tiermem.nn.groups.inspect import Found
from tiermem.nn.groups.partition import (
    PARAMETERS,
    Predicate,
    home_of,
    largest_block,
    looks_up_its_own,
    other_places,
    runs,
    steps_bind,
    territories,
    training_bytes,
)
from tiermem.nn.groups.resident import (
    Resident,
    apart_from_frozen,
    by_parameter,
    checked_resident,
    divided,
    is_resident,
    little,
    residents,
    together,
)

_LARGE_BUFFER = 1 << 18
AT_ONCE = 2
"""How many blocks of a divided module an operation may need at once: a weight and a bias."""
_OF_HBM = 4  # a list of parameters that a module's call holds takes at most this part of HBM


class Inventory:
    """The tensors of a model, before its blocks are chosen.

    Attributes:
        model: The model.
        params: Its parameters.
        buffers: Its buffers that can move.
        homes: Homes of modules' weights that are not the policy's, by qualified name.
        resident: Which parameters stay in HBM, with their gradients and state.
        rate: Bytes per second at which weights are expected to be copied to HBM, by default from
            DRAM.
        training: Whether it is wrapped for training, rather than evaluation.
        worst_chain: Most bytes of blocks that nested calls hold at once; 0 before blocks are made.
        only_read: Whether it has an embedding that is too large for HBM, and was wrapped for
            evaluation, so that it cannot be trained.
        other_places: Places of modules other than their first ones when the model is wrapped
            (:func:`.partition.other_places`).
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: str | Iterable[str] | Predicate,
        params: Sequence[Found],
        buffers: Sequence[Found],
        homes: Mapping[str, Home],
        resident: Resident = "auto",
        rate: float | None = None,
        *,
        training: bool | None = None,
    ) -> None:
        """Reads shapes and strides while the tensors have their own memory.

        Args:
            model: The model.
            blocks: The user's argument ``blocks`` of ``wrap``.
            params: Its parameters.
            buffers: Its buffers that can move.
            homes: Homes of modules' weights, by qualified name.
            resident: The user's argument ``resident`` of ``wrap``.
            rate: Bytes per second at which weights are expected to be copied to HBM.
            training: Whether it will be trained; by default, whether it is in training mode.
        """
        self.model = model
        self.homes = homes
        self.resident = checked_resident(resident)
        self.blocks: Any = blocks
        if not isinstance(blocks, str) and not callable(blocks):
            try:
                self.blocks = list(blocks)
                hash(tuple(self.blocks))
            except TypeError as error:
                raise ConfigError(
                    f"blocks={blocks!r}: give 'auto', a list of module names or a predicate"
                ) from error
        self.params, self.buffers = params, buffers
        self.rate = rate or rate_up(files=False)
        self._shapes = {id(f): shape_of(f.name, f.tensor) for f in [*params, *buffers]}
        elements = [(f.tensor.numel(), f.tensor.requires_grad) for f in params]
        most = sum(number for number, _ in elements) // 2
        self._trained = sum(n for n, grad in elements if grad) > most
        self.training = model.training if training is None else training
        self.worst_chain = 0
        self.only_read = False
        self.other_places = other_places(model)
        self._found = _consists_of(model)
        self._first: tuple[list[str], BlockPlan] | None = None

    def shape(self, found: Found) -> TensorShape:
        """Returns the shape that a tensor had in ``wrap``."""
        return self._shapes[id(found)]

    def packed(self, members: Iterable[Found]) -> int:
        """Returns the bytes of a block of these tensors."""
        return packed_nbytes(self._shapes[id(f)] for f in members)

    @property
    def trained(self) -> bool:
        """Whether most of its weights will be trained."""
        return self.training and self._trained

    def is_as_found(self) -> bool:
        """Whether the model has the same modules, parameters and buffers as when it was wrapped."""
        return self._found == _consists_of(self.model)

    def is_better_trained(self, hbm: int) -> bool:
        """Whether it should be wrapped in another way if most of its weights are trained.

        Args:
            hbm: The budget, in bytes.
        """
        if self.trained or self.blocks != "auto" or self._first is None:
            return False
        twin = copy(self)
        twin.training, twin._trained, twin._first = True, True, None
        plan = twin.plan(hbm)
        return self.only_read or plan.few or [*plan.params] != [*self._first[1].params]

    @cached_property
    def host(self) -> float:
        """Seconds of the host for the model's own code in a forward."""
        return host_seconds(self.model)

    def plan(self, hbm: int) -> BlockPlan:
        """Returns the blocks for a budget in bytes.

        The first blocks that are chosen are those with which the model is wrapped. Others are for
        error messages about budgets; once modules were added or removed, these use the first ones.
        """
        names = [name for name, _ in self.model.named_modules()]
        if self._first is None:
            self._first = names, self._choose(hbm)
            return self._first[1]
        before, first = self._first
        if names == before:
            return self._choose(hbm)
        kept = copy(first)
        kept.hbm = hbm
        return kept

    def _choose(self, hbm: int) -> BlockPlan:
        """Chooses blocks: coarser ones if a forward is host-bound, or would be on a slow host."""
        best = fine = BlockPlan(self, hbm)
        if self.blocks != "auto":
            return fine
        if fine.chain("dram") > fine.streamed().room:
            finer = BlockPlan(self, hbm, divides=True)
            if finer.divided and finer.chain("dram") < fine.chain("dram"):
                return finer
        if self.trained:
            return self._stepped(fine)
        least, link_binds = fine.streamed().on_hosts(self.host, self.rate)
        if link_binds:
            return fine
        for share in SHARES:
            plan = BlockPlan(self, hbm, hbm // share)
            seconds, _ = plan.streamed().on_hosts(self.host, self.rate)
            if seconds < least and plan.can_replace(fine):
                best, least = plan, seconds
        return best

    def _stepped(self, fine: BlockPlan) -> BlockPlan:
        """Returns coarser blocks for training, if steps of these fine ones are host-bound."""
        if training_bytes(self.model) <= fine.hbm or not steps_bind(fine.hbm, self.rate):
            return fine  # everything fits now, but HBM may shrink
        coarse = BlockPlan(self, fine.hbm, whole_block(fine.hbm))
        return coarse if coarse.can_replace(fine) else fine


def _consists_of(model: nn.Module) -> dict[tuple[str, str], int]:
    """Returns the ids of a model's modules, parameters and buffers, by module and attribute."""
    found = dict[tuple[str, str], int]()
    for name, module in model.named_modules():
        for items in (module._modules, module._parameters, module._buffers):
            found.update(((name, key), id(item)) for key, item in items.items())
    return found


@dataclass(slots=True)
class BlockPlan:
    """The blocks of a model.

    Attributes:
        inventory: The model's tensors.
        hbm: The budget in bytes.
        coarse: Bytes up to which blocks are joined and not divided in any case.
        divides: Whether parameters that are attributes of one module may be several blocks.
        divided: Modules whose parameters are: their calls hold none of these blocks.
        roots: Modules at which a block begins, by qualified name.
        territory: For every module, the name of the one at which its block begins.
        params: Parameters that share a block, by that name; one of those over the same memory.
            Those that stay in HBM come last, with names of :mod:`tiermem.nn.groups.resident`.
        buffers: Large buffers that share a block, by name.
        small: Buffers that stay in HBM.
    """

    inventory: Inventory
    hbm: int
    coarse: int = 0
    divides: bool = False
    divided: set[str] = field(init=False, default_factory=set)
    roots: Mapping[str, nn.Module] = field(init=False)
    territory: dict[str, str] = field(init=False)
    params: dict[str, list[Found]] = field(init=False, default_factory=dict)
    buffers: dict[str, list[Found]] = field(init=False, default_factory=dict)
    small: list[Found] = field(init=False)

    @property
    def few(self) -> bool:
        """Whether blocks are coarser, and stepped as one, since their steps are host-bound."""
        return self.inventory.trained and self.coarse > 0

    def __post_init__(self) -> None:
        """Chooses the blocks."""
        known = self.inventory
        model = known.model
        largest = largest_block(training_bytes(model), self.hbm, self.coarse)
        lists = self.hbm // _OF_HBM
        roots = territories(model, known.blocks, largest, self.coarse, lists)
        modules = dict(model.named_modules())
        self.roots = {**roots, **{name: modules[name] for name in known.homes}}
        self.territory = {}
        for name in modules:
            root = name
            while root and root not in self.roots:
                root = root.rpartition(".")[0]
            self.territory[name] = root
        stay = residents(
            known.model, known.params, lambda f: known.shape(f).nbytes, known.resident, self.hbm
        )
        apart = {id(found) for found in stay}
        for found in known.params:
            if found.same_as is None and id(found) not in apart:
                self.params.setdefault(self._root(found), []).append(found)
        small = self._take_little()
        large, self.small = self._sort_buffers(known.buffers)
        for found in large:
            self.buffers.setdefault(self._root(found), []).append(found)
        if known.blocks == "auto":
            self._join_runs()
            self.params = {
                name: members
                for root, found in self.params.items()
                for part, some in self._parts_of(root, found, largest)
                for name, members in apart_from_frozen(part, some, known.packed).items()
            }
        self.params.update({**small, **divided(stay)})

    def _take_little(self) -> dict[str, list[Found]]:
        """Joins the blocks that are too small to be worth moving into one, which stays in HBM.

        Only if blocks are chosen automatically, and HBM has room for the others beside it.
        """
        known = self.inventory
        if known.blocks != "auto" or known.resident != "auto":
            return {}
        recurrent = {
            name for name, m in known.model.named_modules() if isinstance(m, nn.RNNBase)
        }  # these modules use their weights through a list, which is not intercepted
        names = {
            root
            for root in little(self.params, known.packed, self.hbm)
            if home_of(root, known.homes) is None and root not in self._roots_of(recurrent)
        }
        members = [f for root, found in self.params.items() if root in names for f in found]
        kept = {root: found for root, found in self.params.items() if root not in names}
        nbytes = align_up(known.packed(members))
        if nbytes + sum(sorted(map(known.packed, kept.values()))[-2:]) > self.hbm:
            return {}
        self.params = kept
        return together(members)

    def _join_runs(self) -> None:
        """Joins the blocks of small layers that are called one after another."""
        known = self.inventory
        free = {name: module for name, module in self.roots.items() if name not in known.homes}
        sizes = {root: known.packed(members) for root, members in self.params.items()}
        joined = runs(known.model, free, sizes, self.hbm, trained=known.trained, coarse=self.coarse)
        for blocks in (self.params, self.buffers):
            apart, found = list(blocks.items()), dict[str, list[Found]]()
            for root, members in apart:
                found.setdefault(joined.get(root, root), []).extend(members)
            blocks.clear()
            blocks.update(found)

    def _parts_of(
        self, root: str, found: list[Found], largest: int
    ) -> Iterator[tuple[str, list[Found]]]:
        """Yields blocks of parameters; parameters of a list are held separately.

        A list is not called: each of its parameters is looked up by itself, which fetches its
        block. If HBM has no room for all parameters that are attributes of one module, they are
        treated like such a list.

        Args:
            root: The name of the block so far.
            found: Its parameters.
            largest: Bytes that one block may have.
        """
        if not isinstance(self.roots.get(root), PARAMETERS):
            rest = found
            for name in self._to_divide(found) if self.divides else ():
                own = [f for f in rest if f.places[0][0] == name]
                rest = [f for f in rest if f.places[0][0] != name]
                self.divided.add(name)
                yield from self._cut(name, own, largest)
            if rest:
                yield root, rest
            return
        yield from self._cut(root, found, largest)

    def _to_divide(self, found: list[Found]) -> list[str]:
        """Returns the modules whose own attributes take too much of a block."""
        owners = list(dict.fromkeys(f.places[0][0] for f in found))
        own = {n: [f for f in found if f.places[0][0] == n] for n in owners}
        return [
            name
            for name, members in own.items()
            if len(members) > 1
            and self.inventory.packed(members) > self.hbm // _OF_HBM
            and not any(f.shell for f in members)
            and looks_up_its_own(self.inventory.model.get_submodule(name))
        ]

    def _cut(
        self, root: str, found: list[Found], largest: int
    ) -> Iterator[tuple[str, list[Found]]]:
        """Yields blocks of consecutive parameters, as large as one may be."""
        parts: list[list[Found]] = []
        for more in by_parameter(found):
            if not parts or self.inventory.packed([*parts[-1], *more]) > largest:
                parts.append([])
            parts[-1] += more
        for number, part in enumerate(parts):
            yield f"{root}[{number}]", part

    def _roots_of(self, modules: Iterable[str]) -> set[str]:
        return {self.territory[name] for name in modules}

    def _root(self, found: Found) -> str:
        return self.territory[found.places[0][0]]

    def _sort_buffers(self, buffers: Sequence[Found]) -> tuple[list[Found], list[Found]]:
        """Divides buffers into those that move and those that stay in HBM."""
        allowed = self.hbm // 16
        nbytes = {id(f): self.inventory.shape(f).nbytes for f in buffers}
        small, total = set(), 0
        for found in sorted(buffers, key=lambda f: nbytes[id(f)]):
            total += nbytes[id(found)]
            if nbytes[id(found)] > _LARGE_BUFFER or total > allowed:
                break
            small.add(id(found))
        stay = [f for f in buffers if id(f) in small]
        return [f for f in buffers if id(f) not in small], stay

    def streamed(self) -> Streamed:
        """Returns the blocks that stream in a forward, if weights have their home below HBM."""
        known = self.inventory
        fixed, sizes = known.packed(self.small), list[int]()
        for root, members in (*self.params.items(), *self.buffers.items()):
            nbytes = align_up(known.packed(members))
            if self._home(root) == "hbm":
                fixed += nbytes
            else:
                sizes.append(nbytes)
        return Streamed(sizes, self.hbm - fixed)

    def can_replace(self, fine: BlockPlan) -> bool:
        """Whether forwards and steps that fit with finer blocks also fit with these.

        Args:
            fine: The finer ones.
        """
        same = {tuple(map(id, members)) for members in fine.params.values()}
        own = [members for members in self.params.values() if tuple(map(id, members)) not in same]
        chain = self.chain("dram")
        beside = own if chain <= fine.chain("dram") else self.params.values()
        steps = [STEPPED * align_up(self._unit(members)) for members in beside]
        if self.few:
            whole = [(self._unit(m, whole=True), self._unit(m)) for m in self.params.values()]
            steps += [STEPPED_WHOLE * align_up(unit) for unit, finer in whole if unit > finer]
        return chain + max(steps, default=0) <= self.streamed().room

    def _unit(self, members: Sequence[Found], *, whole: bool = False) -> int:
        """Returns the most bytes of a block's weights that are stepped together.

        Args:
            members: Its tensors.
            whole: Whether they are stepped as one if they are small enough.
        """
        known = self.inventory
        sizes, nbytes = [known.shape(f).nbytes for f in members], known.packed(members)
        limit = unit_limit(self.hbm, nbytes, sizes, few=whole)
        return max(*sizes, min(limit, nbytes))

    def homes(self) -> list[Home | None]:
        """Returns the home of each block, those of parameters first; None for the policy's."""
        return [self._home(root) for root in (*self.params, *self.buffers)]

    def _home(self, root: str) -> Home | None:
        return "hbm" if is_resident(root) else home_of(root, self.inventory.homes)

    def fixed(self, policy: Home, root: str) -> bool:
        """Whether the blocks that begin at a module have HBM as their home.

        Args:
            policy: The home of weights in general.
            root: The module's qualified name.
        """
        return (self._home(root) or policy) == "hbm"

    def chain(self, policy: Home) -> int:
        """Returns the most bytes that nested calls hold at once, without blocks at home in HBM.

        Args:
            policy: The home of weights in general.
        """
        block_of: dict[int, tuple[str, str]] = {}
        nbytes: dict[tuple[str, str], int] = {}
        for kind, by_root in (("params", self.params), ("buffers", self.buffers)):
            for root, members in by_root.items():
                size = 0 if self.fixed(policy, root) else self.inventory.packed(members)
                nbytes[kind, root] = align_up(size)
                block_of.update((id(found), (kind, root)) for found in members)
        needed: dict[str, set[tuple[str, str]]] = {root: set() for root in self.roots}
        travel = [f for members in self.buffers.values() for f in members]
        alone: dict[str, set[tuple[str, str]]] = {}
        for found in [*self.inventory.params, *travel]:
            for module, _ in found.places:
                root, block = self.territory[module], block_of[id(found.same_as or found)]
                held_apart = block[0] == "params" and module in self.divided
                (alone.setdefault(root, set()) if held_apart else needed[root]).add(block)
        for root, blocks in alone.items():
            needed[root] |= set(sorted(blocks, key=nbytes.__getitem__)[-AT_ONCE:])
        for root, top in self.roots.items():
            if isinstance(top, PARAMETERS) and needed[root]:  # one at a time
                needed[root] = {max(needed[root], key=nbytes.__getitem__)}
        held: dict[str, set[tuple[str, str]]] = {}
        for root in sorted(self.roots, key=len):
            above = held[self.territory[root.rpartition(".")[0]]] if root else set()
            held[root] = above | needed[root]
        again = (
            set[tuple[str, str]]().union(*(needed[self.territory[name]] for name in place))
            for place in self.inventory.other_places
        )
        return max(sum(nbytes[b] for b in blocks) for blocks in [*held.values(), *again])
