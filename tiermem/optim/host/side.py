"""Steps on the host: torch's own CPU optimizers over the homes in DRAM and staged files.

Gradient, state and masters stay in their DRAM homes, or are read from files into staging in
DRAM and written back; only the new weights are copied to HBM, when they are next used. A unit's
step runs in another thread, inside torch's kernels and so without the GIL; an access to one of its
blocks waits for it first. It is performed completely or not at all; a failed one is repeated on
request.

If that is proven (:mod:`tiermem.optim.host.proof`), the arithmetic is the device's, bit for bit.
Otherwise it is torch's on the CPU, which rounds differently from the same class on a device (the
order of operations); then it is the same, bit for bit, as the class stepped on the CPU with the
same settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from tiermem.core.block import Block, Tier
from tiermem.core.residency import State as Residency
from tiermem.errors import StepError, TierError
from tiermem.nn.groups.gradunit import Change, GradUnit
from tiermem.nn.passes.runtime import ModuleRuntime
from tiermem.nn.tensors.lazy import LazyTensor, forget, is_viewed, refresh
from tiermem.optim.host.exact import Proven
from tiermem.optim.host.factor import Factor
from tiermem.optim.host.job import Job, Staged, StepGradients
from tiermem.optim.host.room import HostRoom
from tiermem.optim.host.update import HostUpdate
from tiermem.optim.rules.scaling import Scaling
from tiermem.optim.units.undo import cannot_fail_midway, has_pre_hooks
from tiermem.optim.units.unit import State, StepUnit
from tiermem.runtime.services.host_staging import HostStage, Load

_CPU = torch.device("cpu")


def can_be_on_host(runtime: ModuleRuntime, unit: StepUnit) -> bool:
    """Whether everything that a unit's step uses has its home below HBM."""
    table = runtime.manager.parts.table
    return unit.group is not None and all(
        table[block.id].home is not Tier.HBM for block in unit.blocks()
    )


def rooms_of(units: Sequence[StepUnit]) -> list[HostRoom]:
    """Returns the DRAM reserved for the host's steps of some units, each room once."""
    rooms = [host.room for host in map(side_of, units) if host is not None]
    return list({id(room): room for room in rooms if room is not None}.values())


def side_of(unit: StepUnit) -> HostSide | None:
    """Returns the :class:`HostSide` of a unit; None if the device steps it."""
    found = unit.host
    return found if isinstance(found, HostSide) else None


class Bits(Protocol):
    """Decides which steps on the host have the device's bits."""

    def for_step(self, unit: StepUnit, groups: Sequence[dict[str, Any]]) -> Proven | None:
        """Returns what such a step of a unit needs, for the present settings."""
        ...

    def factor(self, change: Change) -> Factor | None:
        """Returns the factor by which a change multiplies; None if it does anything else."""
        ...


class HostSide:
    """Steps one unit on the host.

    Attributes:
        unit: The unit.
        room: The DRAM of its optimizer's steps; no step is in progress when it changes.
        only_exact: Whether it only performs steps that have the device's bits.
        update: Performs the steps, in the thread.
    """

    def __init__(self, unit: StepUnit, bits: Bits) -> None:
        """Creates the host's parameters for a unit, all of whose blocks have homes below HBM.

        Args:
            unit: The unit.
            bits: Decides whether a step has the device's bits.
        """
        self.unit = unit
        self._bits = bits
        self.room: HostRoom | None = None
        self.only_exact = False
        self.update = HostUpdate(unit)

    @property
    def stage(self) -> HostStage | None:
        """The staging of blocks in files; None if there are none."""
        return None if self.room is None else self.room.stage

    def own(self, param: torch.Tensor) -> torch.Tensor:
        """Returns the host's parameter for a model's; one that is not in the unit is returned."""
        return self.update.owns.get(id(param), param)

    # -- begun under the manager's lock ----------------------------------

    def prepare(self, runtime: ModuleRuntime) -> None:
        """Prepares a step.

        Raises:
            StepError: If there are aliases of the weights in HBM, which have to leave it.
        """
        unit = self.unit
        if unit.group is not None and unit.group.freed:
            unit.refuse_freed()
        for entry in unit.entries:
            runtime.grads.sync(entry)
        unit.flush()
        for u in unit.grad_units():
            of_file = runtime.manager.parts.table[u.block.id].home is Tier.NVME
            if u.pending and of_file and any(is_viewed(e.lazy) for e in u.entries):
                runtime.grads.open(u)  # its change must be applied
                runtime.manager.release(u.block)
        taken = self.taken(runtime)
        if taken:
            raise StepError(
                f"{unit.name!r} is stepped on the host, and {taken!r} is in use: let views of "
                "it go and leave tier.materialize before step(), or make the optimizer with "
                "where='device'"
            )

    def taken(self, runtime: ModuleRuntime) -> str:
        """Returns the name of a block that is in use in HBM, so that it cannot leave; or ""."""
        for entry in self.unit.entries:
            if entry.materialized:
                return entry.name
        if self.unit.group is not None:  # accessed since the last pass: none is saved now
            runtime.away.end_between(self.unit.group)
        return runtime.manager.host_loans.can_lend(self._blocks())

    def is_exact(self, runtime: ModuleRuntime, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether a step can be performed here now with the same bits as on the device.

        That requires a step whose bits are proven, with gradients that are in the tiers and await
        no change except one factor (the host would round that differently), while no weight that
        would have to leave HBM has a view.

        Args:
            runtime: The modules' runtime.
            groups: Settings of the parameter groups.
        """
        unit = self.unit
        if unit.attempt is not None or unit.group is None or unit.group.freed:
            return False
        if self._bits.for_step(unit, groups) is None or self._factors(self._held()) is None:
            return False
        gradients = [entry.param.grad for entry in unit.entries]
        if not all(g is None or isinstance(g, LazyTensor) for g in gradients):
            return False
        if not self._all_or_none():
            return False
        with runtime.manager.lock:
            return not self.taken(runtime)

    def _factors(self, units: Sequence[GradUnit]) -> tuple[Factor, ...] | None:
        """Returns the factor that all gradients await, if any; None if they await more.

        The device rounds each of two products, and torch casts a factor with another dtype than the
        gradients' in more than one way. Only gradients in the weights' dtype are proven.
        """
        found = {self._factors_of(u) for u in units}
        return None if len(found) > 1 else (found or {()}).pop()

    def _factors_of(self, unit: GradUnit) -> tuple[Factor, ...] | None:
        there = [entry for entry in unit.entries if entry.has_grad]
        dtypes = {unit.block.tensors[entry.unit_index].dtype for entry in there}
        dtypes |= {entry.param.dtype for entry in there}  # products of other dtypes are not proven
        alone = len(unit.pending) == 1
        found: list[Factor] = []
        for pending in unit.pending:
            factor = self._bits.factor(pending.change)
            if factor is None:
                return None
            fits = dtypes == {factor.dtype} and pending.is_due_to(there)
            if not (alone and fits) and factor.value() == 1:
                continue  # checked only where it matters, as it waits for the device
            if not fits or found:
                return None
            found.append(factor)
        return tuple(found)

    def _all_or_none(self) -> bool:
        """Whether either all stepped parameters have state, or none has.

        torch's fused SGD has no rule for a mixture; such a step is left to the device.
        """
        stepped = {id(entry.param) for entry in self.unit.entries if entry.has_grad}
        pairs = self.unit.plain.stored_state()
        have = [bool(kept) for kept, place in pairs if id(place.param) in stepped]
        return all(have) or not any(have)

    def may_be_ahead(self, runtime: ModuleRuntime, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether a step can be performed here now with the device's bits, and be undone.

        It reads homes and writes to second places of the blocks. So everything it writes has to be
        known
        before: existing state, and one call of the loop without hooks around it.

        Args:
            runtime: The modules' runtime.
            groups: Settings of the parameter groups.
        """
        unit, table = self.unit, runtime.manager.parts.table
        optimizer = unit.plain.optimizer_for(groups)
        if not cannot_fail_midway(optimizer) or has_pre_hooks(optimizer):
            return False
        if any(u.pending for u in unit.grad_units()) or not self._has_state():
            return False
        blocks, deferred = self._blocks(), runtime.manager.parts.deferred
        if any(table[b.id].home is not Tier.DRAM or b.id in deferred for b in blocks):
            return False  # deferred work there belongs to another optimizer
        if unit.masters is not None and unit.foreign.look():
            unit.foreign.forget()  # masters follow weights that were written: step() does that
            return False
        return self.is_exact(runtime, groups)

    def _has_state(self) -> bool:
        """Whether all state that a step writes is in its homes."""
        stepped = {id(entry.param) for entry in self.unit.entries if entry.has_grad}
        for kept, place in self.unit.plain.stored_state():
            if place.shell is not None:
                return False
            there = kept is not None and isinstance(kept.get(place.key), LazyTensor)
            if id(place.param) in stepped and not there:
                return False
        return True

    def in_files(self, runtime: ModuleRuntime) -> list[Block]:
        """Returns the blocks of a step whose homes are in files."""
        if self.stage is None:
            return []
        table = runtime.manager.parts.table
        return [block for block in self._blocks() if table[block.id].home is Tier.NVME]

    def at_rest(self, runtime: ModuleRuntime) -> bool:
        """Whether nothing has to be written to a file before a step."""
        records = [runtime.manager.parts.table[block.id] for block in self.in_files(runtime)]
        return all(record.in_hbm in (Residency.ABSENT, Residency.VALID) for record in records)

    def settle(self, runtime: ModuleRuntime) -> None:
        """Waits until files have what :meth:`prepare` found only in HBM.

        Raises:
            StorageError: If one cannot be written; nothing is stepped.
        """
        runtime.manager.host_loans.settle(self._blocks())

    def _blocks(self) -> list[Block]:
        """Returns the blocks of a step, the weights last."""
        unit = self.unit
        weights = [unit.group.block] if unit.group is not None else []
        return [u.block for u in self._held()] + unit.kept_blocks() + weights

    def _held(self) -> list[GradUnit]:
        return [u for u in self.unit.grad_units() if any(e.has_grad for e in u.entries)]

    def submit(
        self,
        runtime: ModuleRuntime,
        groups: Sequence[dict[str, Any]],
        scaling: Scaling | None,
        register: Callable[[Job], None],
    ) -> Job:
        """Borrows the blocks for a step that :meth:`prepare` allows; :meth:`take_up` ends it.

        From now on the step is deferred work of these blocks: ``register`` enters it, even if
        :meth:`begin` was not called. Or it is a step ahead, which :meth:`take_back` may also end.
        """
        unit, manager = self.unit, runtime.manager
        unit.plain.optimizer_for(groups)
        stored = [e for e in unit.entries if e.has_grad and not e.materialized]
        held, blocks = self._held(), self._blocks()
        loose = {
            id(p): p.grad.detach().to(_CPU)
            for p, _ in unit.members
            if p.grad is not None and not isinstance(p.grad, LazyTensor)
        }
        follows = unit.foreign.look()
        factors = None if scaling is not None or loose else self._factors(held)
        proven = None if factors is None else self._bits.for_step(unit, groups)
        if proven is None and self.only_exact:
            raise RuntimeError(f"{unit.name}: a step on the host that has not the device's bits")
        files = self.in_files(runtime)
        staged: Staged | None = None
        if files and self.stage is not None:
            own = [block for block in files if block is not blocks[-1]]
            load = Load(own, [block for block in files if block is blocks[-1]])
            staged = Staged(self.stage, load)
        changes = [(u, list(u.pending)) for u in held if u.pending]
        gradients = StepGradients(stored, loose, changes, scaling, factors or ())
        out = {block.id: manager.host_loans.borrowers(block) for block in blocks}
        job: Job | None = None
        try:
            views, events = manager.host_loans.lend(blocks)
            by_block = {block.id: tensors for block, tensors in zip(blocks, views, strict=True)}
            job = Job(gradients, blocks, by_block, events, follows, proven, staged)
            unit.foreign.step()
            register(job)
            return job
        except BaseException:
            if job is not None:  # Ctrl-C: it is deferred, and begun when its blocks are needed
                register(job)
            else:
                unit.foreign.forget()
                lent = [b for b in blocks if manager.host_loans.borrowers(b) > out[b.id]]
                manager.host_loans.give_back(lent, written=False)
            raise

    def begin(self, runtime: ModuleRuntime, job: Job, pool: ThreadPoolExecutor) -> None:
        """Submits a step to the thread."""
        job.announce()
        job.broken = False  # first: otherwise a Ctrl-C in between could begin it twice
        optimizer = self.unit.plain.optimizer_for(None)
        try:
            job.future = pool.submit(self.update.run, runtime.manager, optimizer, job, self.room)
        except BaseException:  # Ctrl-C: the thread may have it, but its future is lost
            pool.submit(int).result()
            raise

    def take_up(
        self, runtime: ModuleRuntime, job: Job, state: State, pool: ThreadPoolExecutor
    ) -> None:
        """Waits for a step and takes its blocks back; begins it again if its failure was reported.

        Raises:
            StepError: If it failed; its blocks are unchanged, and cannot be used before
                another try has succeeded.
            StorageError: The same, if the disk was the reason.
        """
        if job.future is None or (job.broken and not job.computed):
            self.begin(runtime, job, pool)
        self._await(runtime, job)
        self._show(runtime, job, state)
        if job.gradients.changes:
            job.gradients.show(job.views, job.in_files())
            job.gradients.note_made(job.in_files(), job.written)
        self._return(runtime, job, written=True)

    def _await(self, runtime: ModuleRuntime, job: Job) -> None:
        """Waits for a step, and until its staged blocks are settled.

        Raises:
            StepError: If it failed.
            StorageError: The same, if the disk was the reason.
        """
        host_loans, future = runtime.manager.host_loans, job.future
        if future is None:
            raise RuntimeError(f"{self.unit.name}: its step was never begun")
        try:
            failure = future.exception()
            if failure is not None and not job.computed:
                raise failure
            if job.staged is not None and job.staged.order is not None:
                job.staged.write_home(job.written)  # the thread may not have reached that
                last = [b for b in job.staged.load.shared if host_loans.borrowers(b) == 1]
                job.staged.stage.settle([*job.staged.load.own, *last])
        except BaseException as error:
            job.broken = future.done()  # otherwise the wait was interrupted
            if not isinstance(error, Exception) or isinstance(error, TierError):
                raise
            raise StepError(
                f"the step of {self.unit.name!r} on the host failed with {type(error).__name__}: "
                f"{error}"
            ) from error

    def _show(self, runtime: ModuleRuntime, job: Job, state: State) -> None:
        """Makes the state that a step has created visible in the tiered optimizer's."""
        unit = self.unit
        optimizer = unit.plain.optimizer_for(None)
        block = unit.block
        slot = [] if block is None else job.views[block.id]
        anew = block is not None and block.id in job.in_files()
        for place in unit.plain.places if block is not None else ():
            own = optimizer.state.get(self.own(place.param))
            if own is None:
                continue
            value: Any = own.get(place.key)
            if place.is_over(value, slot):
                own[place.key] = stand_in = unit.plain.stand_in(runtime, place, value.dtype)
                if anew or place.first in job.renewed:
                    forget(stand_in)
                else:
                    refresh(stand_in, value)
        unit.plain.publish(state)

    def give_up(self, runtime: ModuleRuntime, job: Job) -> None:
        """Takes the blocks of a failed step back, unchanged; it is not tried again."""
        if job.staged is not None:
            job.staged.give_up()
        job.gradients.note_made(job.in_files(), ())
        job.bring_the_rest(())  # if step() had confirmed it, and it failed
        self.unit.foreign.forget()
        self._return(runtime, job, written=False)

    def turn(self, runtime: ModuleRuntime, job: Job, spare: Iterable[int]) -> None:
        """Makes a step write to the present homes of its blocks, not to the lent ones.

        Args:
            runtime: The modules' runtime.
            job: The step; it has not begun.
            spare: Tensors of the weights that it copies there beside those of its own.
        """
        loans = runtime.manager.host_loans
        blocks = [*self.unit.kept_blocks(), job.blocks[-1]]
        job.spare = {*spare, *(entry.index for entry in self.unit.entries)}
        job.elsewhere = {block.id: loans.views(block) for block in blocks}

    def take_back(self, runtime: ModuleRuntime, job: Job) -> None:
        """Cancels a step ahead, or waits for it, and gives the blocks back.

        The lent bytes are unchanged; the caller makes them the homes again.
        """
        job.wait()
        self._give_back(runtime, job, written=False)

    def _return(self, runtime: ModuleRuntime, job: Job, *, written: bool) -> None:
        """Gives blocks back, and clears the gradients that users have cleared meanwhile."""
        self._give_back(runtime, job, written=written)
        for entry in job.gradients.stored:
            if entry.param.grad is not entry.lazy:
                runtime.grads.clear(entry)

    def _give_back(self, runtime: ModuleRuntime, job: Job, *, written: bool) -> None:
        """Gives blocks back, each once, even if a Ctrl-C occurs in between."""
        if not job.returned:
            host_loans = runtime.manager.host_loans
            lent = {block.id: host_loans.borrowers(block) for block in job.blocks}
            try:
                host_loans.give_back(job.blocks, written=written)
                job.returned = True
            except BaseException:
                out = [b for b in job.blocks if host_loans.borrowers(b) == lent[b.id]]
                host_loans.give_back(out, written=written)
                job.returned = True
                raise
