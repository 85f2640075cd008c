"""How much of each budget a program needs, found by simulating its models and optimizers.

Budgets are checked with real blocks. Only if one is too small, the whole program (forward, backward
and step) is simulated to say how much would be enough, with the blocks that would be chosen for the
larger budget. As long as no optimizer was made, AdamW is assumed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from tiermem.config import Settings, exact_size, format_size
from tiermem.core.block import Role, align_up
from tiermem.core.layout import TensorShape, contiguous_stride, packed_nbytes, split
from tiermem.core.need import STEPPED_WHOLE, Home, Played, StepNeed, least, unit_limit
from tiermem.core.parts import at_once, gradient_parts, parts_of
from tiermem.errors import CapacityError
from tiermem.nn.groups.above import Passes
from tiermem.nn.groups.blocks import BlockPlan, Inventory
from tiermem.nn.groups.gradunit import GradUnit, units_of
from tiermem.nn.groups.inspect import Found
from tiermem.nn.groups.resident import is_resident
from tiermem.runtime.base.functorch import outside_inference
from tiermem.runtime.memory.homes import staging_size

if TYPE_CHECKING:
    from tiermem.nn.groups.entry import Entry

_NONE: Mapping[str, int] = MappingProxyType({})
_GRADIENTS = (
    ". That is with gradients: none are kept under torch.no_grad(), nor of what "
    "requires_grad_(False) was called on"
)


DtypeFor = Callable[[torch.Tensor], torch.dtype]

_GRADIENT = 2  # bytes of a float32 gradient over those of its bfloat16 parameter
_READ = (nn.Linear, nn.Embedding)
_TABLE = ", or, if it is a vocabulary's, have it in an nn.Embedding, which is used in DRAM then"
"""Advice about a large parameter that a module uses itself."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What an optimizer keeps for each parameter.

    Attributes:
        params: Ids of the parameters that it steps, or keeps state for while they are frozen.
        state: Returns the shapes of a parameter's state in the tiers, given the parameter and its
            shape.
        master: Returns the shape of its master, or None.
        overlap: Whether steps are performed while a forward holds blocks.
        elementwise: Whether a large parameter may be stepped in parts.
        grad_itemsize: Least bytes of a gradient's element; 0 for the actual dtype.
    """

    params: frozenset[int]
    state: Callable[[torch.Tensor, TensorShape], Sequence[TensorShape]]
    master: Callable[[torch.Tensor, TensorShape], TensorShape | None] = lambda _param, _shape: None
    overlap: bool = False
    elementwise: bool = True
    grad_itemsize: int = 0

    def is_large(self, param: torch.Tensor, shape: TensorShape) -> bool:
        """Whether HBM has no room for two steps of whole blocks of such parameters.

        Args:
            param: The parameter.
            shape: Its shape.
        """
        if id(param) not in self.params:
            return False
        master = self.master(param, shape)
        own = sum(kept.nbytes for kept in self.state(param, shape))
        own += 0 if master is None else master.nbytes
        return own > (STEPPED_WHOLE - _GRADIENT) * shape.nbytes


class Program:
    """The models and optimizers of one manager so far.

    Attributes:
        models: The wrapped models, in the order in which they were wrapped.
        optimizers: What their optimizers keep.
    """

    def __init__(self, settings: Settings, dtype_for: DtypeFor) -> None:
        """Starts without models and optimizers.

        Args:
            settings: The manager's settings.
            dtype_for: Returns the dtype of a parameter's gradient.
        """
        self._settings = settings
        self._dtype_for = dtype_for
        self.models: list[Inventory] = []
        self.optimizers: list[Kept] = []

    @property
    def worst_chain(self) -> int:
        """Most bytes of blocks that nested calls of one model hold at once."""
        return max((model.worst_chain for model in self.models), default=0)

    # -- simulation ------------------------------------------------------

    def play(
        self,
        hbm: int,
        *,
        gradients: bool,
        optimizers: Sequence[Kept] = (),
        left: Sequence[tuple[Home, int]] = (),
    ) -> Played:
        """Returns the program as it runs with a budget of ``hbm`` bytes.

        Args:
            hbm: The budget.
            gradients: Whether gradients are kept.
            optimizers: Those that make steps.
            left: Homes of the gradients of what was frozen after it had some.
        """
        policy = self._settings.policy
        homes: list[tuple[Home, int]] = []
        weights_at: Home = policy.home(Role.PARAM)
        chain, plans = 0, [model.plan(hbm) for model in self.models]
        for plan in plans:
            members = [*plan.params.values(), *plan.buffers.values()]
            homes += [
                (own or weights_at, plan.inventory.packed(m))
                for own, m in zip(plan.homes(), members, strict=True)
            ]
            if plan.small:
                homes.append(("hbm", plan.inventory.packed(plan.small)))
            chain = max(chain, plan.chain(weights_at))
        if not gradients:
            return Played(homes, chain)
        at: Home = policy.home(Role.GRAD)
        wide = max((kept.grad_itemsize for kept in optimizers), default=0)
        room = hbm - sum(nbytes for home, nbytes in homes if home == "hbm") - chain
        whole = {i for kept in optimizers if not kept.elementwise for i in kept.params}
        whole |= {id(f.tensor) for model in self.models for f in model.params if f.sparse}
        cuts = _Cuts(max(0, room), chain, whole, at)
        units = [
            self._in_runs(unit, optimizers, room + chain, cuts)
            for plan in plans
            for unit in self._units(plan, wide, cuts, optimizers)
        ]
        homes += [(unit.home(at), nbytes) for unit in units for nbytes in unit.gradients]
        homes += left
        largest = max((n for u in units if u.home(at) != "hbm" for n in u.gradients), default=0)
        steps: list[StepNeed] = []
        for kept in optimizers:
            room = hbm - sum(nbytes for home, nbytes in homes if home == "hbm")
            states, masters = [], []
            for unit in units:
                step, state, master = self._step(unit, kept, room, chain)
                steps += step
                states += [(unit.home(policy.home(Role.OPTIMIZER)), n) for n in state]
                masters += [(unit.home(policy.home(Role.MASTER)), n) for n in master]
            homes += states + masters
        return Played(homes, chain, largest, steps)

    def _units(
        self, plan: BlockPlan, wide: int, cuts: _Cuts, optimizers: Sequence[Kept]
    ) -> list[_Unit]:
        """Returns the units of a model; elements of gradients have at least ``wide`` bytes."""
        found = []
        known, dtype_of = plan.inventory, self._dtype_for
        weights_at = self._settings.policy.home(Role.PARAM)
        order = {id(f): number for number, f in enumerate(known.params)}
        sharing: dict[int, list[Found]] = {}
        for f in known.params:
            sharing.setdefault(id(f.same_as or f), []).append(f)
        for root, members in plan.params.items():
            fixed, stays = plan.fixed(weights_at, root), is_resident(root)
            own = (f for i in {id(f) for f in members} for f in sharing[i])
            entries = sorted(own, key=lambda f: order[id(f)])
            block = known.packed(members)
            sizes = [known.shape(f).nbytes for f in entries]
            few = plan.few and not any(
                kept.is_large(f.tensor, known.shape(f)) for f in entries for kept in optimizers
            )
            limit = unit_limit(plan.hbm, block, sizes, few=few)
            here: list[_Unit] = []
            trained = [f for f in entries if f.tensor.requires_grad]
            for run in split([known.shape(f).nbytes for f in trained], limit):
                part = [trained[i] for i in run]
                shapes = [known.shape(f) for f in part]
                kept = [
                    _of_itemsize(s, max(wide, dtype_of(f.tensor).itemsize))
                    for f, s in zip(part, shapes, strict=True)
                ]
                runs = cuts.of(part, kept, stays)
                mine = _Unit(part, shapes, 0 if fixed else block, kept, runs, stays)
                here.append(mine)
            frozen = [f for f in entries if not f.tensor.requires_grad]
            if frozen:  # an optimizer may still keep state for them, all together
                shapes = [known.shape(f) for f in frozen]
                here.append(_Unit(frozen, shapes, 0 if fixed else block, [], [], stays))
            found += sorted(here, key=lambda unit: order[id(unit.members[0])])
        return found

    def _in_runs(self, unit: _Unit, optimizers: Sequence[Kept], room: int, cuts: _Cuts) -> _Unit:
        """Returns the unit with its gradient in runs, if a step has no room for it as a whole.

        Args:
            unit: The unit.
            optimizers: The optimizers that perform steps.
            room: Bytes of HBM beside the blocks that stay there.
            cuts: Divides gradients.
        """
        if unit.runs or not unit.gradients:
            return unit
        for kept in optimizers:
            steps, *_ = self._step(unit, kept, room, cuts.chain)
            for need in steps:
                if need.nbytes + max(0, need.overlap * (cuts.chain - need.weights)) > room:
                    runs = cuts.of(unit.members, unit.kept, unit.resident, least=True)
                    return replace(unit, runs=runs)
        return unit

    def _step(
        self, unit: _Unit, kept: Kept, room: int, chain: int
    ) -> tuple[list[StepNeed], list[int], list[int]]:
        """Returns the step of a unit, and the bytes of its blocks of state and of masters."""
        policy = self._settings.policy
        mine = [
            (f.tensor, shape)
            for f, shape in zip(unit.members, unit.shapes, strict=True)
            if id(f.tensor) in kept.params
        ]
        if not mine:
            return [], [], []
        states = [shape for param, own in mine for shape in kept.state(param, own)]
        masters = [m for param, own in mine if (m := kept.master(param, own)) is not None]
        kinds = ((Role.OPTIMIZER, states), (Role.MASTER, masters))
        loose = {role for role, _ in kinds if unit.home(policy.home(role)) != "hbm"}
        moves = unit.home(policy.home(Role.GRAD)) != "hbm"
        whole = unit.block + (max(unit.gradients, default=0) if moves and not unit.runs else 0)
        runs = list(unit.runs) or [(0, 1)]
        if not unit.runs and _may_be_parted(unit, kept, mine, states):
            nbytes = sum(packed_nbytes(found) for role, found in kinds if found and role in loose)
            held = max(0, chain - unit.block) if kept.overlap else 0
            elements = mine[0][1].nbytes // mine[0][1].itemsize
            runs = parts_of(elements, nbytes, max(0, room - whole - held))
        state, master = ([packed_nbytes(s) for s in _cut(shapes, runs)] for _, shapes in kinds)
        once = max(unit.gradients) if unit.runs and moves else 0
        for role, sizes in ((Role.OPTIMIZER, state), (Role.MASTER, master)):
            once += max(sizes, default=0) if role in loose else 0
        nbytes = whole + (once if len(runs) == 1 else at_once(once))
        return [StepNeed(nbytes, unit.block, kept.overlap)], state, master

    # -- what would do ---------------------------------------------------

    def budgets(
        self,
        *,
        gradients: bool,
        optimizers: Sequence[Kept] = (),
        less: Mapping[str, int] = _NONE,
        left: Sequence[tuple[Home, int]] = (),
    ) -> dict[str, int]:
        """Returns the budgets that are too small for the program, with the least bytes needed.

        Args:
            gradients: Whether gradients are kept.
            optimizers: Those that make steps.
            less: What would do for less than that, as far as is known: it is begun with.
            left: Homes of the gradients of what was frozen after it had some.
        """
        settings = self._settings
        now = settings.hbm // 4096 * 4096

        def play(hbm: int) -> Played:
            return self.play(hbm, gradients=gradients, optimizers=optimizers, left=left)

        hbm = least(lambda budget: play(budget).hbm(), less.get("hbm", now))
        dram, nvme = self.below_hbm(play(hbm), settings.dram)
        found = {"hbm": hbm} if hbm > now else {}
        if dram > settings.dram:
            found["dram"] = align_up(dram)
        if settings.nvme_bytes is not None and nvme > settings.nvme_bytes:
            found["nvme_bytes"] = nvme
        return found

    def below_hbm(self, played: Played, dram: int = 0) -> tuple[int, int]:
        """Returns the least DRAM budget from ``dram`` bytes on, and the bytes on disk."""
        files = bool(self._settings.nvme)

        def homes(budget: int) -> int:
            return budget // 4096 * 4096 - (staging_size(budget) if files else 0)

        def needed(budget: int) -> int:
            wanted = budget + align_up(played.short_of_dram(homes(budget), files=files))
            # staging is needed even if no home is in DRAM
            return max(wanted, staging_size(budget)) if files else wanted

        found = least(needed, dram)
        return found, played.on_disk(homes(found))

    def _adamw(self) -> Kept:
        trained = {id(f.tensor) for m in self.models for f in m.params if f.tensor.requires_grad}
        return Kept(frozenset(trained), lambda _param, shape: [shape, shape])

    def _most(self) -> Kept:
        """Returns AdamW's needs with a third state, float32 masters and gradients, and overlap."""

        def wide(shape: TensorShape) -> TensorShape:
            return _of_itemsize(shape, max(shape.itemsize, torch.float32.itemsize))

        def master(param: torch.Tensor, shape: TensorShape) -> TensorShape | None:
            narrow = shape.itemsize < torch.float32.itemsize and param.is_floating_point()
            return wide(shape) if narrow else None

        return Kept(
            self._adamw().params,
            lambda _param, shape: [wide(shape)] * 3,
            master,
            overlap=True,
            grad_itemsize=torch.float32.itemsize,
        )

    def refuse_model(self, error: CapacityError) -> CapacityError:
        """Returns the error about a model that does not fit, with the budgets that are enough."""
        forward = self.budgets(gradients=False)
        kept = self._adamw()
        if not kept.params:
            return _refusal(error, "To call the model", forward, self._undivided())
        whole = self.budgets(gradients=True, optimizers=[*self.optimizers, kept], less=forward)
        most = self.budgets(gradients=True, optimizers=[*self.optimizers, self._most()], less=whole)
        more = (
            ". With amsgrad=True, float32 masters and gradients, and overlap='forward' or "
            f"'backward', that is {_listed(most)}"
        )
        alone = (
            ". Forward alone, under torch.no_grad() or after requires_grad_(False), would do with "
            f"{_listed(forward)}"
            if forward
            else _GRADIENTS
        )
        advice = more + alone + self._undivided()
        return _refusal(error, "To train the model with AdamW", whole, advice)

    def _undivided(self) -> str:
        """Returns advice about a parameter that is larger than HBM; empty if there is none."""
        sizes = {f.name: m.shape(f).nbytes for m in self.models for f in (*m.params, *m.buffers)}
        name = max(sizes, key=sizes.__getitem__)
        if sizes[name] <= self._settings.hbm:
            return self._together()
        own = any(
            f.name == name and not isinstance(m.model.get_submodule(f.places[0][0]), _READ)
            for m in self.models
            for f in m.params
        )
        return (
            f". Calls have {name!r} ({format_size(sizes[name])}) in HBM as a whole: to do with "
            f"less, divide it among several modules{_TABLE if own else ''}"
        )

    def _together(self) -> str:
        """Returns advice about a module whose parameters are together larger than HBM."""
        hbm, sizes = self._settings.hbm, dict[str, tuple[int, int]]()
        for model in self.models:
            plan = model.plan(hbm)
            for root, members in plan.params.items():
                own = [f for f in members if any(place == root for place, _ in f.places)]
                if root in plan.roots and len(own) > 1:
                    kind = type(plan.roots[root]).__name__
                    sizes[f"{root!r} ({kind})" if root else kind] = model.packed(own), len(own)
        name = max(sizes, key=lambda found: sizes[found][0], default="")
        if not name or sizes[name][0] <= hbm:
            return ""
        nbytes, number = sizes[name]
        return (
            f". A call of {name} has its own {number} parameters ({format_size(nbytes)}) in HBM "
            "together: to do with less, divide them among several modules"
        )

    def _wrapped_to_read(self) -> str:
        """Returns advice about embeddings that can only be read, as wrapped for evaluation."""
        if not any(model.only_read for model in self.models):
            return ""
        return (
            ". Or call model.train() before tier.wrap(model): embeddings and heads that HBM has no "
            "room for are trained where they lie in DRAM then"
        )

    def refuse_optimizer(self, error: CapacityError, kept: Kept) -> CapacityError:
        """Returns the error about an optimizer that does not fit, with sufficient budgets."""
        optimizers = [*self.optimizers, kept]
        found = self.budgets(gradients=True, optimizers=optimizers)
        return _refusal(error, "For all steps", found, self._wrapped_to_read())

    def for_backward(self) -> str:
        """Returns which budgets to give for backward and all steps; nothing where these do."""
        found = self.budgets(gradients=True, optimizers=self.optimizers)
        return f"give {_at_least(found)}" if found else ""

    def refuse_gradients(
        self, error: CapacityError, left: Sequence[tuple[Home, int]] = ()
    ) -> CapacityError:
        """Returns the error of gradients that do not fit, with what would do for them.

        Args:
            error: Says what does not fit.
            left: Homes of the gradients of what was frozen after it had some.
        """
        found = self.budgets(gradients=True, optimizers=self.optimizers, left=left)
        return _refusal(error, "For backward", found, _GRADIENTS + self._wrapped_to_read())


@dataclass(frozen=True, slots=True)
class _Unit:
    """Parameters of one block that share a unit of gradients; or the frozen ones, which have none.

    Attributes:
        members: The parameters.
        shapes: Shapes of these parameters.
        block: Bytes of their block of weights; 0 if that is fixed in HBM.
        kept: Shapes of their gradients; none for frozen ones.
        runs: Runs of elements of a gradient that is too large to be whole, one for each block.
        resident: Whether weights, gradients and state all have HBM as their home.
        gradients: Bytes of the blocks of their gradients.
    """

    members: Sequence[Found]
    shapes: Sequence[TensorShape]
    block: int
    kept: Sequence[TensorShape]
    runs: Sequence[tuple[int, int]]
    resident: bool
    gradients: Sequence[int] = field(init=False)

    def __post_init__(self) -> None:
        """Adds up the bytes of gradients, which are needed again and again."""
        sizes = [packed_nbytes([_run(self.kept[0], end - begin)]) for begin, end in self.runs]
        if not sizes and self.kept:
            sizes = [packed_nbytes(self.kept)]
        object.__setattr__(self, "gradients", sizes)

    def home(self, policy: Home) -> Home:
        """Returns the home of their blocks, given the policy's for such blocks."""
        return "hbm" if self.resident else policy


@dataclass(frozen=True, slots=True)
class _Cuts:
    """Which gradients are kept in runs.

    Attributes:
        room: Bytes of HBM beside the blocks that calls hold.
        chain: Bytes of the blocks that calls hold.
        whole: Ids of the parameters that are stepped as a whole.
        home: The policy's home of gradients.
    """

    room: int
    chain: int
    whole: set[int]
    home: Home

    def of(
        self,
        members: Sequence[Found],
        shapes: Sequence[TensorShape],
        resident: bool,
        *,
        least: bool = False,
    ) -> list[tuple[int, int]]:
        """Returns the runs of the gradient of some parameters; none if it is whole."""
        shape = shapes[0]
        if (
            len(members) > 1
            or resident
            or self.home == "hbm"
            or id(members[0].tensor) in self.whole
        ):
            return []
        if shape.stride != contiguous_stride(shape.shape):
            return []
        elements = shape.nbytes // shape.itemsize
        runs = gradient_parts(elements, shape.itemsize, self.room, least=least)
        return runs if len(runs) > 1 else []


def _may_be_parted(
    unit: _Unit,
    kept: Kept,
    mine: Sequence[tuple[torch.Tensor, TensorShape]],
    states: Sequence[TensorShape],
) -> bool:
    """Whether a unit can be stepped in parts by an optimizer."""
    if not kept.elementwise or unit.resident or not unit.gradients or unit.members[0].sparse:
        return False
    if not len(mine) == len(unit.members) == 1 or not mine[0][1].nbytes:
        return False
    rows = contiguous_stride(mine[0][1].shape)
    if any(shape.stride != rows for shape in (mine[0][1], *unit.kept)):
        return False  # in channels_last, say, it is stepped as a whole
    return all(shape.shape == mine[0][1].shape for shape in states)


def _cut(
    shapes: Sequence[TensorShape], runs: Sequence[tuple[int, int]]
) -> list[Sequence[TensorShape]]:
    """Returns the tensors of each part; nothing if there are none."""
    if len(runs) == 1 or not shapes:
        return [shapes] if shapes else []
    return [[_run(shape, end - begin) for shape in shapes] for begin, end in runs]


def _of_itemsize(shape: TensorShape, itemsize: int) -> TensorShape:
    return TensorShape(shape.name, shape.shape, shape.stride, None, itemsize)


def _at_least(budgets: dict[str, int]) -> str:
    return " and ".join(f"{name}= at least {exact_size(n)}" for name, n in budgets.items())


def _listed(budgets: dict[str, int]) -> str:
    return " and ".join(f"{name}={exact_size(nbytes)}" for name, nbytes in budgets.items())


def _run(shape: TensorShape, elements: int) -> TensorShape:
    return TensorShape(shape.name, (elements,), (1,), shape.dtype, shape.itemsize)


def _refusal(
    error: CapacityError, wish: str, budgets: dict[str, int], more: str = ""
) -> CapacityError:
    """Returns an error with sufficient budgets; the same error if the given ones are enough."""
    if not budgets:
        return error
    refused = CapacityError(f"{error.what}. {wish}, give {_at_least(budgets)}{error.hint}{more}")
    refused.what, refused.hint = error.what, error.hint
    return refused


def check_calls(runtime: Passes) -> None:
    """Refuses budgets if blocks that stay in HBM leave no room for those that nested calls hold.

    Raises:
        CapacityError: Naming the least budget of HBM.
    """
    table = runtime.manager.parts.table
    fixed, held = table.fixed_nbytes(), runtime.program.worst_chain
    if held and not runtime.manager.can_hold(fixed + held):
        raise CapacityError(
            f"forward cannot run in tier hbm with a budget of {format_size(table.hbm.capacity)}: "
            f"what a call holds ({format_size(held)}) comes beside what stays there "
            f"({format_size(fixed)})",
            f"give hbm= at least {exact_size(fixed + held)}",
        )


def check_gradients(runtime: Passes) -> list[GradUnit]:
    """Reserves homes for all gradients; refuses budgets in which a backward could not run.

    Returns:
        The units whose homes are new.

    Raises:
        CapacityError: Before anything is moved.
    """
    program, table = runtime.program, runtime.manager.parts.table
    made: list[GradUnit] = []
    try:
        made = runtime.grads.homes.reserve(runtime.groups)
        units = units_of(entry for group in runtime.groups for entry in group.entries)
        loose = [block for u in units for block in u.blocks if not table[block.id].fixed]
        if any(table[block.id].fixed for unit in made for block in unit.blocks):
            for keeper in runtime.keepers:  # what stays leaves less to steps
                keeper.check_steps()
        largest = max(loose, key=lambda block: block.nbytes, default=None)
        if largest is None:
            check_calls(runtime)
            return made
        need = table.fixed_nbytes() + runtime.program.worst_chain + largest.nbytes
        if not runtime.manager.can_hold(need):
            raise CapacityError(
                f"backward cannot run in tier hbm with a budget of "
                f"{format_size(table.hbm.capacity)}: block {largest.name!r} of gradients "
                f"({format_size(largest.nbytes)}) comes beside what a call holds; that takes "
                f"{format_size(need)}",
                f"give hbm= at least {exact_size(need)}",
            )
    except CapacityError as error:
        runtime.grads.homes.unreserve(made)
        raise program.refuse_gradients(error, _of_frozen(runtime)) from None
    return made


def _of_frozen(runtime: Passes) -> list[tuple[Home, int]]:
    """Returns the homes of gradients that parameters had before they were frozen."""
    table = runtime.manager.parts.table
    policy = runtime.manager.parts.settings.policy.home(Role.GRAD)
    found: list[tuple[Home, int]] = []
    for unit in units_of(entry for group in runtime.groups for entry in group.entries):
        frozen = [e.param.numel() for e in unit.entries if not e.param.requires_grad]
        if frozen:
            share = sum(frozen) / max(1, sum(entry.param.numel() for entry in unit.entries))
            home: Home = "hbm" if table[unit.block.id].fixed else policy
            found.append((home, align_up(int(unit.nbytes * share))))
    return found


def beside_optimizer(error: CapacityError) -> CapacityError:
    """Returns an error that names ``tier.optimizer`` if a plain optimizer needs the blocks.

    Some of torch's optimizers pass all parameters to one kernel (``fused=True``).
    """
    found: list[torch.optim.Optimizer] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(owner, torch.optim.Optimizer):
            found.append(owner)
        frame = frame.f_back
    if not found or any(hasattr(one, "clip_grad_norm_") for one in found):  # a TieredOptimizer
        return error
    cls = type(found[0])  # not the wrapper of an integration
    module = "torch.optim" if cls.__module__.startswith("torch.optim.") else cls.__module__
    name = f"{module}.{cls.__name__}"
    what = f"{error.what}, while a plain {name} asks for many parameters at once"
    if module.startswith("torch.distributed"):  # it sends them to other processes
        return CapacityError(
            what,
            "step with tier.optimizer(model, ...) of the class that is inside it, and exchange "
            "weights, if at all, inside `with tier.materialize(model):`",
        )
    return CapacityError(
        what, f"make it with tier.optimizer(model, {name}, ...), which steps block by block"
    )


def accumulates(entry: Entry) -> bool:
    """Whether the current backward accumulates the gradient of a parameter."""
    if entry.materialized or not entry.param.requires_grad:
        return False
    try:
        return _will_be_added(entry.param)
    except RuntimeError:  # `autograd.grad` computes this one
        return False


def is_caught(entry: Entry) -> bool:
    """Whether the current gradient is computed for ``autograd.grad``, so is not accumulated."""
    if not entry.param.requires_grad:
        return False
    try:
        _will_be_added(entry.param)
    except RuntimeError as error:
        return "autograd.grad" in str(error)
    return False


def _will_be_added(param: torch.Tensor) -> bool:
    """Whether the current backward will execute a parameter's accumulation node.

    Raises:
        RuntimeError: If the gradient is captured there instead, and for other reasons.
    """
    with torch._C.DisableTorchFunctionSubclass(), outside_inference():
        node = get_gradient_edge(param).node
    return bool(torch._C._will_engine_execute_node(node))
