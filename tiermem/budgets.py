"""The budgets that a run will need, computed before anything is opened or moved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tiermem.config import Home, Policy, Settings
from tiermem.core.block import Role, align_up
from tiermem.core.need import Played, least
from tiermem.errors import ConfigError, StepError
from tiermem.given import Size, default_hbm, device_of, hbm_of
from tiermem.nn.compat.outside import outside
from tiermem.nn.compat.shapes import shape_of
from tiermem.nn.groups.blocks import Inventory
from tiermem.nn.groups.hostbound import rate_up
from tiermem.nn.groups.inspect import (
    can_move,
    check_module,
    find,
    is_ordinary,
    link_shared,
    opened,
    set_apart,
)
from tiermem.nn.groups.need import DtypeFor, Kept, Program
from tiermem.nn.groups.partition import checked_homes
from tiermem.nn.groups.resident import Resident
from tiermem.nn.tensors.shells import Shell
from tiermem.nn.wrap.wrapped import Blocks
from tiermem.optim.classes import optimizer_class
from tiermem.optim.host.fused import with_fused
from tiermem.optim.hostpart import Where, check_where
from tiermem.optim.rules.groups import Params, floating, groups_of, with_defaults
from tiermem.optim.rules.probe import StateProbe, settings_of
from tiermem.optim.timing import Overlap, check_overlap
from tiermem.optim.units.master import master_dtype_of
from tiermem.optim.units.parted import ELEMENTWISE
from tiermem.optim.units.plan import kept_of
from tiermem.optim.units.undo import cannot_fail_midway
from tiermem.runtime.memory.hostmemory import available_memory
from tiermem.runtime.services.host_staging import MOST_LOADS


@dataclass(frozen=True, slots=True)
class Budgets:
    """The least budgets in which a run fits, in bytes.

    Attributes:
        hbm: Device memory for which the other budgets hold: the given one, or the default.
        least_hbm: The least device memory that is enough; more than ``hbm`` if that is too small.
        all_in_hbm: Device memory with which nothing ever has to leave it.
        dram: Host memory: the homes there, rounded up to whole pages, and staging chunks for files.
            If the host performs steps, also what these take beside the homes. Tensors saved for
            backward (``Policy(activations="dram")``) come on top: they depend on the batch.
        nvme_bytes: Space on disk.
        available: Host memory that is available to this process now, on the machine and in its
            cgroups; not a budget.
    """

    hbm: int
    least_hbm: int
    all_in_hbm: int
    dram: int
    nvme_bytes: int
    available: int


def budgets_for(
    model: nn.Module,
    cls: type[torch.optim.Optimizer] | None = None,
    params: Params | None = None,
    *,
    device: str | torch.device | None = None,
    hbm: Size | None = None,
    nvme: bool = False,
    policy: Policy | dict[str, Home] | str | None = None,
    blocks: Blocks = "auto",
    homes: Mapping[str, Home] | None = None,
    resident: Resident = "auto",
    dtype: torch.dtype | None = None,
    buffer_dtype: torch.dtype | None = None,
    master_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    overlap: Overlap = "auto",
    where: Where = "auto",
    **settings: Any,
) -> Budgets:
    """Returns the budgets that training a model will take, exact to the byte; moves nothing.

    Give the result to :class:`tiermem.TierManager`: ``hbm=found.hbm``, because blocks are chosen
    for it, and at least ``found.dram``.

    Args:
        model: Any module that can be wrapped; only shapes and dtypes are used.
        cls: The optimizer's class; None for inference only.
        params: What the optimizer gets; by default all parameters of the model.
        device: As for the manager, by default ``"cuda"``. If ``hbm`` is a size, the budgets are
            the same on every device, and no GPU has to be there.
        hbm: As for the manager; by default 80% of what is free on a GPU, and with
            ``device="cpu"`` an eighth of the available host memory.
        nvme: Whether there is an NVMe tier.
        policy: As for the manager.
        blocks: As for ``wrap``.
        homes: As for ``wrap``.
        resident: As for ``wrap``.
        dtype: The dtype to which floating-point weights will be cast before ``wrap``; None if they
            are not cast.
        buffer_dtype: The same for buffers.
        master_dtype: As for ``tier.optimizer``.
        grad_dtype: As for ``tier.optimizer``.
        overlap: As for ``tier.optimizer``.
        where: As for ``tier.optimizer``.
        **settings: The optimizer class's own.

    Raises:
        ConfigError: If a setting cannot be used.
        WrapError: If the model cannot be wrapped.
        StepError: If trial steps of the class fail.
    """
    check_overlap(overlap)
    check_where(where, None)
    target = _target(device, hbm)
    limits = _limits(target, hbm, nvme=nvme, policy=policy)
    check_module(model, 0)
    twins = _Twins(floating("dtype", dtype), floating("buffer_dtype", buffer_dtype))
    program = Program(limits, _gradient_dtypes(floating("grad_dtype", grad_dtype)))
    rate = rate_up(files=limits.policy.home(Role.PARAM) == "nvme")
    program.models.append(_inventory(model, twins, blocks, homes, resident, rate))
    stepped = None
    kept: list[Kept] = []
    if cls is not None:
        given = groups_of(model if params is None else params)
        groups = [{**g, "params": [twins.param(p) for p in g["params"]]} for g in given]
        stepped = _Stepped(groups, optimizer_class(cls), settings, master_dtype)
        held = overlap not in (False, "auto")  # steps need room beside the blocks a forward holds
        kept.append(stepped.kept(target, overlap=held, elementwise=where != "host"))

    def play(budget: int) -> Played:
        return program.play(budget, gradients=stepped is not None, optimizers=kept)

    played = play(limits.hbm)
    if not nvme and any(home == "nvme" for home, _ in played.homes):
        raise ConfigError(
            "policy= or homes= puts blocks in tier nvme, and there is none; give nvme=True"
        )
    dram, on_disk = program.below_hbm(played)
    if stepped is not None and where in ("host", "both"):
        # reserved last, after the homes that are "auto"
        beside: tuple[Home, int] = "dram", _beside_host_steps(stepped, played, in_files=nvme)
        dram, _ = program.below_hbm(replace(played, homes=[*played.homes, beside]))
    everything = sum(nbytes for _, nbytes in played.homes)
    least_hbm = _least_hbm(play, limits.hbm)
    return Budgets(limits.hbm, least_hbm, everything, align_up(dram), on_disk, available_memory())


def _target(device: str | torch.device | None, hbm: Size | None) -> torch.device:
    """Returns the device that budgets are for: the CPU if no GPU is there and none is needed.

    Raises:
        ConfigError: If a GPU is needed and not there.
    """
    if device is None:
        of_memory = hbm is None or (isinstance(hbm, str) and (hbm == "auto" or "%" in hbm))
        device = "cuda" if of_memory or torch.cuda.is_available() else "cpu"
    return device_of(device)


def _limits(
    device: torch.device,
    hbm: Size | None,
    *,
    nvme: bool,
    policy: Policy | dict[str, Home] | str | None,
) -> Settings:
    """Returns a manager's settings with a budget of HBM; the budgets to be found are 0 or None."""
    asked = hbm_of(hbm, device)
    return Settings(
        device=str(device),
        hbm=(default_hbm(device) if asked is None else asked) // 4096 * 4096,
        dram=0,
        nvme=("",) if nvme else (),
        nvme_bytes=None,
        policy=Policy.of(policy),
        prefetch_depth="auto",
    )


def _least_hbm(play: Callable[[int], Played], hbm: int) -> int:
    """Returns the least budget of HBM that is enough for the blocks chosen for that budget."""
    needed = play(hbm).hbm()
    if needed > hbm:
        return least(lambda budget: play(budget).hbm(), hbm)
    return min(least(lambda budget: play(budget).hbm(), needed), hbm)


def _beside_host_steps(stepped: _Stepped, played: Played, *, in_files: bool) -> int:
    """Returns the bytes of DRAM that steps on the host take beside the homes."""
    largest = align_up(max((step.nbytes for step in played.steps), default=0))
    return largest * (stepped.may_fail_midway() + (MOST_LOADS if in_files else 0))


def _gradient_dtypes(wanted: torch.dtype | None) -> DtypeFor:
    """Returns a function of a parameter that returns the dtype of its gradient."""

    def dtype_for(param: torch.Tensor) -> torch.dtype:
        return wanted if wanted is not None and param.is_floating_point() else param.dtype

    return dtype_for


class _Twins:
    """Stand-ins without bytes for a model's modules and parameters, in their future dtypes."""

    def __init__(self, dtype: torch.dtype | None, buffer_dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._buffer_dtype = buffer_dtype
        self._params: dict[int, nn.Parameter] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        self._modules: dict[int, nn.Module] = {}
        self._originals: list[torch.Tensor] = []  # kept, so that no other object gets their ids

    def param(self, param: torch.Tensor) -> nn.Parameter:
        """Returns the stand-in of a parameter."""
        if Shell.of(param) is not None:  # it keeps its dtype, and its bytes are not read
            return param  # type: ignore[return-value]
        if id(param) not in self._params:
            self._originals.append(param)
            cast = self._dtype if param.is_floating_point() else None
            meta = torch.empty_strided(
                param.shape, param.stride(), dtype=cast or param.dtype, device="meta"
            )
            self._params[id(param)] = nn.Parameter(meta, param.requires_grad)
        return self._params[id(param)]

    def _buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        """Returns a buffer in its new dtype; as it is never written, it takes no memory."""
        cast = self._buffer_dtype if buffer.is_floating_point() else None
        if cast is None or cast is buffer.dtype:
            return buffer
        return self._buffers.setdefault(id(buffer), torch.empty_like(buffer, dtype=cast))

    def module(self, module: nn.Module) -> nn.Module:
        """Returns the stand-in of a module: of the same class, only to be inspected."""
        if id(module) not in self._modules:
            twin = self._modules[id(module)] = type(module).__new__(type(module))
            twin.__dict__.update(vars(module))
            parts: dict[str, Any] = {
                "_parameters": _mapped(module._parameters, self.param),
                "_buffers": _mapped(module._buffers, self._buffer),
                "_modules": _mapped(module._modules, self.module),
            }
            twin.__dict__.update(parts)
        return self._modules[id(module)]


def _mapped(named: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    return {name: None if item is None else change(item) for name, item in named.items()}


def _inventory(
    model: nn.Module,
    twins: _Twins,
    blocks: Blocks,
    homes: Mapping[str, Home] | None,
    resident: Resident,
    rate: float,
) -> Inventory:
    """Returns the inventory that ``wrap`` will make of a model, with stand-ins for its tensors."""
    twin = twins.module(model)
    originals = opened(find(model, "_parameters"))
    link_shared(originals)
    params = opened(find(twin, "_parameters"))
    index = {id(found): number for number, found in enumerate(originals)}
    for found, original in zip(params, originals, strict=True):
        if original.same_as is not None:
            found.same_as = params[index[id(original.same_as)]]
    every = find(model, "_buffers")
    apart = set_apart(originals, [found for found in every if is_ordinary(found)])
    pairs = zip(find(twin, "_buffers"), every, strict=True)
    buffers = [f for f, original in pairs if can_move(f) and id(original.tensor) not in apart]
    own = checked_homes(homes, dict(twin.named_modules()))
    return Inventory(twin, blocks, params, buffers, own, resident, rate)


class _Stepped:
    """An optimizer that will be made, here with stand-ins for the parameters.

    Args:
        groups: Parameter groups, with stand-ins.
        cls: The optimizer's class.
        settings: The class's own settings.
        master_dtype: The dtype of masters, or None.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        cls: type[torch.optim.Optimizer],
        settings: dict[str, Any],
        master_dtype: torch.dtype | None,
    ) -> None:
        self._cls = cls
        self._settings = settings
        self._master_dtype = floating("master_dtype", master_dtype)
        self._groups, optimizer = with_defaults(self._make, groups, self._dtype)
        eager = bool(optimizer.state)  # made by the constructor, for frozen parameters, too
        numbered = [(p, n) for n, group in enumerate(self._groups) for p in group["params"]]
        self._members = [(p, n) for p, n in numbered if eager or p.requires_grad]

    def _make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return outside(self._cls, groups, **self._settings)

    def _dtype(self, param: torch.Tensor) -> torch.dtype:
        return master_dtype_of(param, self._master_dtype) or param.dtype

    def kept(self, device: torch.device, *, overlap: bool, elementwise: bool) -> Kept:
        """Returns what the optimizer will keep for each parameter."""
        elementwise = elementwise and self._cls in ELEMENTWISE

        def found(*, sparse: bool) -> Kept:
            probe = StateProbe(self._make, device, sparse=sparse)
            args = self._groups, self._members, probe, self._master_dtype
            kept = kept_of(*args, overlap=overlap, elementwise=elementwise)
            for param, _ in self._members[:1]:
                kept.state(param, shape_of("", param))
            return kept

        try:
            return found(sparse=False)
        except StepError:
            with contextlib.suppress(StepError):  # some classes only accept sparse gradients
                return found(sparse=True)
            raise

    def may_fail_midway(self) -> bool:
        """Whether a step on the host may fail half way, so that it must be possible to undo it."""
        dtypes = {(self._dtype(param), number) for param, number in self._members}
        tiny = [
            {
                **settings_of(self._groups[n]),
                "params": [nn.Parameter(torch.zeros(1, dtype=d, device="cpu"))],
            }
            for d, n in dtypes
        ]
        return bool(tiny) and not cannot_fail_midway(with_fused(self._make)(tiny))
