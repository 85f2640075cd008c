"""The mutations that the tests must catch: one safeguard taken out at a time."""

from __future__ import annotations

from dataclasses import dataclass

MANAGER = ("tests/unit/test_runtime_space.py", "tests/stateful/test_manager.py")
TABLE = ("tests/stateful/test_residency.py",)
FAULTS = ("tests/faults/test_manager_faults.py", "tests/faults/test_manager_ctrl_c.py")
STEADY = ("tests/unit/test_runtime_replay.py",)
INSIDE = ("tests/unit/test_nn_inside.py",)
PLANNER = ("tests/property/test_core_planner.py",)
FILES = (
    "tests/unit/test_filemover.py",
    "tests/unit/test_filemover_copies.py",
    "tests/unit/test_swapfile.py",
    "tests/faults/test_io_faults.py",
    "tests/property/test_io_filemover.py",
)
DISKS = ("tests/faults/test_io_faults.py",)
ENGINES = ("tests/unit/test_io_engines.py", "tests/property/test_io_filemover.py")
NN = ("tests/unit/test_nn_training.py", "tests/unit/test_nn_modules.py")
STREAMS = ("tests/property/test_streams.py",)
_COPIES_DOWN = ("tests/unit/test_copy_down.py",)
GPU = ("tests/gpu/test_training.py",)
SAVING = ("tests/unit/test_saving.py",)
LATER = ("tests/unit/test_saving_later.py", "tests/property/test_page_locks.py")
_FILL = ("tests/unit/test_runtime_first_fill.py",)
_TENSORS = "tiermem/runtime/services/expert_tensors.py"
_ADAPTERS = ("tests/unit/test_lora_arranged.py",)
_SCRIPTS = ("tests/unit/test_nn_scripts.py",)
_BYPASS, _BYPASSED = "tiermem/nn/wrap/bypass.py", ("tests/unit/test_nn_bypass.py",)
_TRAINED = ("tests/unit/test_nn_bypass_training.py",)
_ROOMY = ("tests/unit/test_optim_roomy.py",)
_CLIPPING = ("tests/unit/test_nn_clipping.py",)
CRASHES = ("tests/faults/test_saving_faults.py",)


@dataclass(frozen=True)
class Mutation:
    """One change that makes the code wrong.

    Attributes:
        name: What is taken out.
        file: Where.
        old: Text that occurs there exactly once.
        new: What takes its place.
        tests: The files of tests of which at least one must fail.
        gpu: Whether only a GPU can tell.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    gpu: bool = False


_RUNTIME, _CORE = "tiermem/runtime/", "tiermem/core/"
_FOLDER, _LATER = "tiermem/saving/folder.py", "tiermem/saving/later.py"
_RULES, _REPLAY = _RUNTIME + "placement/leaving.py", _RUNTIME + "lookahead/replay.py"
_PIECES, _SAVED = "tiermem/transfer/file/pieces.py", "tiermem/nn/passes/saved.py"
_GRADS = "tiermem/nn/groups/incoming.py"
_NEW_GRADS = ("tests/property/test_new_gradients.py",)
_COPY, _PARTS = "tiermem/transfer/streams.py", "tiermem/optim/units/parted.py"

_ELSEWHERE = (
    # leases, aliases, dirty marks
    Mutation(
        "an acquire that takes no lease",
        _RUNTIME + "acquire.py",
        "        record.leases += 1  # that it can be has just been looked at\n",
        "",
        MANAGER,
    ),
    Mutation(
        "a use that is repeated takes no lease",
        _REPLAY,
        "            record.leases = leases + 1  # that it can be has just been looked at\n",
        "",
        STEADY,
    ),
    Mutation(
        "a leased block may be dropped",
        _CORE + "residency.py",
        "if not clean or record.leases or record.extent is None or record.fixed:",
        "if not clean or record.extent is None or record.fixed:",
        TABLE,
    ),
    Mutation(
        "a leased block may be written back under its writer",
        _CORE + "residency.py",
        "if record.in_hbm is not State.DIRTY or record.leases:",
        "if record.in_hbm is not State.DIRTY:",
        TABLE,
    ),
    Mutation(
        "aliases are not seen",
        _RUNTIME + "memory/slots.py",
        "use_count(self.storage) > writers",
        "False",
        MANAGER,
    ),
    Mutation(
        "aliases hidden by a parameter are not looked for again",
        _RULES,
        "        return not _is_aliased(slot)\n",
        "        return True\n",
        MANAGER,
    ),
    Mutation(
        "a block is moved while another thread may be reading it",
        _RULES,
        "if holder is not None and holder.read_elsewhere():",
        "if False:",
        ("tests/unit/test_nn_inside.py",),
    ),
    Mutation(
        "a thread does not wait for room that others will leave",
        _RUNTIME + "base/threads.py",
        "if thread not in self._inside or not self._inside - self.waiting - {thread}:",
        "if True:",
        ("tests/unit/test_runtime_threads.py",),
    ),
    Mutation(
        "a thread's stream does not wait for a block that another thread holds",
        "tiermem/nn/groups/group.py",
        "                parts.copy.use(parts.transfers.ready.get(self.block.id))\n",
        "",
        ("tests/unit/test_runtime_threads.py",),
    ),
    Mutation(
        "calls of threads begin though HBM has no room for all of them",
        _RUNTIME + "base/threads.py",
        "self._condition.wait_for(lambda: len(self._inside) < most(), _TURN)",
        "pass",
        ("tests/unit/test_runtime_threads.py",),
    ),
    Mutation(
        "threads that wait for room are not woken",
        "tiermem/nn/groups/group.py",
        "        if self.manager.threads.waiting:\n",
        "        if False:\n",
        ("tests/unit/test_runtime_threads.py", "tests/unit/test_nn_inside.py"),
    ),
    Mutation(
        "a discarded block's space is reused under who looks at it",
        _RUNTIME + "placement/evictor.py",
        "keep = slot is not None and slot.aliased and (gone or not record.fixed)",
        "keep = False",
        MANAGER + FAULTS,
    ),
    Mutation(
        "a block that somebody looks at leaves in a loop that repeats",
        _REPLAY,
        "use_count(slot.storage) > slot.baseline",
        "False and slot.baseline",
        STEADY,
    ),
    Mutation(
        "a block that backward is to read leaves in a loop that repeats",
        _REPLAY,
        "use_count(slot.reading) > ",
        "False and ",
        STEADY,
    ),
    Mutation(
        "a block that a parameter without a lease expects leaves in a loop that repeats",
        _REPLAY,
        "            or (slot.pointed and not slot.idle)\n",
        "",
        STEADY,
    ),
    Mutation(
        "a block that was written leaves in a loop that repeats",
        _REPLAY,
        "            or leaves.in_hbm is not _VALID\n            or (leaves.at_home",
        "            or (leaves.at_home",
        STEADY,
    ),
    Mutation(
        "a block comes up in a loop that repeats though its home copy is stale",
        _REPLAY,
        "            or comes.at_home is not _VALID\n",
        "",
        STEADY,
    ),
    Mutation(
        "a stream that is seen first in a loop that repeats is not known to copies",
        _REPLAY,
        "            if stream != self._stream:\n                copy.use(ready)\n",
        "            if stream != self._stream:\n                copy.hold_up(stream, ready)\n",
        STREAMS + STEADY,
    ),
    Mutation(
        "what a pass that repeats has used since is not remembered",
        _CORE + "schedule.py",
        "        self.last = block\n        self.exact = False\n",
        "        self.last = block\n",
        PLANNER + STEADY,
    ),
    Mutation(
        "a loop that repeats is repeated although another plan was made",
        _RUNTIME + "lookahead/recordings.py",
        "if tape is None or tape.outlook is not outlook:",
        "if tape is None:",
        STEADY,
    ),
    Mutation(
        "a pass is done again though two in a row did not do the same",
        _RUNTIME + "lookahead/recordings.py",
        "        again = done == tape.done\n",
        "        again = True\n",
        STEADY,
    ),
    Mutation(
        "a leased block changes places",
        _REPLAY,
        "            or leaves.leases\n",
        "",
        STEADY,
    ),
    Mutation(
        "a copy does not wait for the events that it is given",
        "tiermem/transfer/driver.py",
        "                code = self._wait(stream, event.handle, 0)\n",
        "                code = 0\n",
        ("tests/unit/test_driver.py",),
    ),
    Mutation(
        "a stream that waited for an event does not wait for it again",
        "tiermem/transfer/driver.py",
        "        again.waiter = -1\n",
        "",
        ("tests/unit/test_driver.py",),
    ),
    Mutation(
        "a stream that waited for a copy's event does not wait for its next copy",
        "tiermem/transfer/driver.py",
        "            event.waiter = -1\n",
        "",
        ("tests/unit/test_driver.py",),
    ),
    Mutation(
        "a call below passes though another thread holds the block meanwhile",
        "tiermem/nn/wrap/scope.py",
        "                        inside.thread = 0  # until all are out again\n",
        "                        pass\n",
        INSIDE,
    ),
    Mutation(
        "a call that gets one of its blocks only keeps it",
        "tiermem/nn/wrap/scope.py",
        "_let_go(groups[: groups.index(group)])\n",
        "pass\n",
        INSIDE,
    ),
    Mutation(
        "a call that is refused as it ends keeps the rest of its blocks",
        "tiermem/nn/wrap/scope.py",
        "                            _let_go(groups[groups.index(group) + 1 :])\n",
        "",
        INSIDE,
    ),
    Mutation(
        "a call that ends keeps the lease of its block",
        "tiermem/nn/groups/group.py",
        "            record.leases -= 1  # the same in line\n",
        "            pass\n",
        INSIDE,
    ),
    Mutation(
        "weights whose block has left a loop that repeats look at what came there",
        _REPLAY,
        "pointer.away() if pointer is not None else",
        "None if pointer is not None else",
        ("tests/unit/test_replay_loop.py",),
    ),
    Mutation(
        "a swap that is cut short leaves another size of place than the block has",
        _REPLAY,
        "            elif leaves.extent is before and",
        "            elif False and",
        ("tests/faults/test_manager_ctrl_c.py",),
    ),
    Mutation(
        "a use goes on as foreseen though a block has left",
        _RUNTIME + "transfers/transfers.py",
        "        self.departures.count += 1\n        self.departures.unread.add(block_id)\n",
        "        self.departures.unread.add(block_id)\n",
        STEADY,
    ),
    Mutation(
        "a use goes on as foreseen though another block is used",
        _REPLAY,
        "        if step.block != block_id:\n            return self._use_again(run, block_id)\n",
        "",
        STEADY,
    ),
    Mutation(
        "a use goes on as foreseen though work is owed to the block",
        _REPLAY,
        "            or self._deferred.owed\n",
        "",
        STEADY,
    ),
    Mutation(
        "a use goes on as foreseen while a graph is captured",
        _REPLAY,
        "            or copy.capturing()\n",
        "",
        STEADY,
    ),
    Mutation(
        "a pass that repeats is measured as if nothing came up in it",
        _REPLAY,
        "        plain = comes.home is _DRAM and not self._pass_timer.sampling\n",
        "        plain = comes.home is _DRAM\n",
        STEADY,
    ),
    Mutation(
        "a pass that repeats is measured without its copies",
        _RUNTIME + "transfers/transfers.py",
        "        sampling = timer.sampling\n",
        "        sampling = False\n",
        STEADY,
    ),
    Mutation(
        "letting go of weights forgets that they were written",
        "tiermem/nn/groups/group.py",
        "table.release(self.block.id, dirty=written)",
        "table.release(self.block.id)",
        NN,
    ),
    Mutation(
        "a release forgets that the block was written",
        _RUNTIME + "manager.py",
        "self.parts.table.release(block.id, dirty=dirty)",
        "self.parts.table.release(block.id)",
        MANAGER,
    ),
    Mutation(
        "a written block's home copy still counts",
        _CORE + "residency.py",
        "        record.in_hbm = _DIRTY\n        record.at_home = _ABSENT\n",
        "        record.in_hbm = _DIRTY\n",
        TABLE,
    ),
    Mutation(
        "a write-back that failed counts as made",
        _CORE + "residency.py",
        "record.in_hbm = State.VALID if ok else State.DIRTY",
        "record.in_hbm = State.VALID",
        TABLE,
    ),
    # transfers
    Mutation(
        "a dirty block leaves before its write-back has ended",
        _CORE + "residency.py",
        "        record.in_hbm = State.DRAINING\n        record.at_home = State.FILLING\n",
        "        record.in_hbm = State.VALID\n        record.at_home = State.VALID\n",
        MANAGER,
    ),
    Mutation(
        "a block that was copied home counts as on its way there",
        _RUNTIME + "transfers/transfers.py",
        "                record.at_home = State.VALID  # ResidencyTable.end_drain, in line\n",
        "                pass\n",
        MANAGER,
    ),
    Mutation(
        "the result of a transfer is not looked at",
        _RUNTIME + "transfers/transfers.py",
        "        ok = transfer.error is None\n",
        "        ok = True\n",
        FAULTS,
    ),
    Mutation(
        "a write-back that fails is tried ahead of need for ever",
        _RUNTIME + "transfers/transfers.py",
        "                self.failing.add(block_id)\n",
        "                pass\n",
        FAULTS,
    ),
    Mutation(
        "a fetch ahead that failed is not made again",
        _RUNTIME + "acquire.py",
        "if error is not None and asked:",
        "if error is not None:",
        FAULTS,
    ),
    Mutation(
        "a block under way is removed without waiting",
        _RUNTIME + "manager.py",
        "self.parts.transfers.settle(block.id)\n                if self.parts.table[",
        "if self.parts.table[",
        FAULTS,
    ),
    Mutation(
        "bytes that leave are not poisoned",
        _RUNTIME + "transfers/transfers.py",
        "if self.poisons and not seen and block_id in self.slots.current:",
        "if self.poisons and seen and not seen:",
        FAULTS,
    ),
    # space and order
    Mutation(
        "a fetch ahead evicts what is needed sooner",
        _RULES,
        "if position is not None and distance <= position:",
        "if position is not None and distance < 0:",
        MANAGER,
    ),
    Mutation(
        "a fetch ahead takes the place of what is needed sooner",
        _RULES,
        "beyond = -1 if position is None else self._planner.cursor + position",
        "beyond = -1",
        ("tests/unit/test_runtime_space.py",),
    ),
    Mutation(
        "what is in HBM to stay goes down all the same",
        _RULES,
        "why is _WRITTEN and not self._regions.stays(record)",
        "why is _WRITTEN",
        ("tests/unit/test_runtime_ring.py",),
    ),
    Mutation(
        "the circle goes over what stays",
        _RUNTIME + "placement/ring.py",
        "        end = self._regions.border  # the first byte behind the ring\n",
        "        end = self._hbm.capacity\n",
        ("tests/unit/test_runtime_ring.py",),
    ),
    Mutation(
        "a pass that foresees no state forgets what stays",
        _RUNTIME + "lookahead/plan_maker.py",
        "        if not state.keys() <= known:\n",
        "        if state.keys() != known:\n",
        ("tests/unit/test_runtime_ring.py",),
    ),
    Mutation(
        "a block that was moved is not pointed anew",
        _RULES,
        "            holder.repoint(new)\n",
        "            pass\n",
        MANAGER,
    ),
    Mutation(
        "a block whose address is known is moved",
        _RULES,
        "return record.leases == known + self.unseen.get(record.block.id, 0)",
        "return True",
        MANAGER,
    ),
    Mutation(
        "gaps that touch are not joined",
        _CORE + "allocator.py",
        "                last, end = last + 1, behind + size\n",
        "                pass\n",
        ("tests/property/test_core_allocator.py",),
    ),
    Mutation(
        "what is needed soonest is evicted",
        _CORE + "cost.py",
        "return (nbytes + write) / (distance + 1)",
        "return (nbytes + write) * (distance + 1.0)",
        PLANNER,
    ),
    Mutation(
        "the next pass is foreseen from the last one only",
        _CORE + "schedule.py",
        "_CONTEXTS = (16, 8, 4, 2, 1)",
        "_CONTEXTS = (1,)",
        PLANNER,
    ),
    Mutation(
        "a forked child is not told from its parent",
        _RUNTIME + "base/forks.py",
        "    _generation += 1\n",
        "    _generation += 0\n",
        SAVING,
    ),
    # files
    Mutation(
        "checksums are not compared",
        "tiermem/transfer/file/jobs.py",
        "self.wanted and self.found != self.expected",
        "self.wanted and self.found is None",
        DISKS,
    ),
    Mutation(
        "a copy that runs by itself is not checked",
        _PIECES,
        "            self._give(chunk, Task.CHECK)\n        if chunk.job.tensor is None:\n",
        "            pass\n        if chunk.job.tensor is None:\n",
        FILES,
    ),
    Mutation(
        "a copy read ahead is used though its home was written since",
        "tiermem/runtime/transfers/early_reads.py",
        "_homes.version(entry.home) == entry.version",
        "_homes.version(entry.home) >= entry.version",
        ("tests/unit/test_runtime_readahead.py",),
    ),
    Mutation(
        "a place in DRAM is used again while the disk reads into it",
        "tiermem/runtime/transfers/staged.py",
        "there = self.transfer is not None and self.transfer.finished",
        "there = self.transfer is not None",
        ("tests/unit/test_runtime_readahead.py",),
    ),
    Mutation(
        "a block's own place in DRAM is read into twice at once",
        "tiermem/runtime/transfers/early_reads.py",
        "return own if all(entry.extent != own for entry in self._dying) else None",
        "return own",
        ("tests/unit/test_runtime_readahead.py",),
    ),
    Mutation(
        "a chunk is reused while its checksum is computed",
        _PIECES,
        "if chunk.on_disk or chunk.task is not None or chunk",
        "if chunk.on_disk or chunk",
        FILES,
    ),
    Mutation(
        "the result of a completion is not looked at",
        _PIECES,
        "            if completion.errno:\n",
        "            if completion.errno and not completion.errno:\n",
        DISKS,
    ),
    Mutation(
        "a short result counts as whole",
        "tiermem/io/engine.py",
        "if self.done + result >= request.nbytes:",
        "if self.done + result > 0:",
        ENGINES + FILES,
    ),
    Mutation(
        "a refusal that passes is not tried again",
        "tiermem/io/engine.py",
        "if code in PASSING and self.retries < MAX_RETRIES:",
        "if code in PASSING and self.retries < 0:",
        ENGINES + FILES,
    ),
    Mutation(
        "a write that was overtaken counts",
        "tiermem/storage/swapfile.py",
        "if entry is not None and entry.generation == generation:",
        "if entry is not None:",
        FILES,
    ),
    Mutation(
        "transfers of the same bytes overtake each other",
        "tiermem/transfer/file/jobs.py",
        "return a.offset < b.end and b.offset < a.end",
        "return False",
        FILES,
    ),
    # autograd
    Mutation(
        "a weight that changed after it was saved is not noticed",
        "tiermem/nn/groups/writes.py",
        "    if version not in (-1, now):",
        "    if now < 0:",
        ("tests/unit/test_runtime_saved.py",),
    ),
    Mutation(
        "weights are saved as they are",
        _SAVED,
        "return (found.hooks.beside(found, tensor) if fixed else None) or found\n",
        "return tensor\n",
        NN,
    ),
    Mutation(
        "the saved-tensor hooks around are left out",
        _SAVED,
        "return _Handed((packed, unpack))",
        "return tensor",
        ("tests/unit/test_runtime_saved.py",),
    ),
    Mutation(
        "a weight that changed is not looked at as it is unpacked",
        _SAVED,
        "            if now != version:\n",
        "            if now < 0:\n",
        ("tests/unit/test_runtime_saved.py",),
    ),
    Mutation(
        "a checkpoint is given what another one has saved",
        _SAVED,
        "        if pack is not before or pair is None:\n",
        "        if pair is None:\n",
        ("tests/unit/test_runtime_saved.py", "tests/unit/test_nn_saved_weights.py"),
    ),
    Mutation(
        "what a checkpoint began with is kept beyond the call",
        "tiermem/nn/passes/runtime.py",
        "            self.saved.let_go()\n",
        "",
        ("tests/unit/test_nn_saved_weights.py",),
    ),
    Mutation(
        "a gradient that is cleared takes its value from who has it",
        "tiermem/nn/groups/grads.py",
        "                        if held and entry.has_grad:\n",
        "                        if not held and entry.has_grad:\n",
        ("tests/unit/test_nn_training.py", *_NEW_GRADS),
    ),
    Mutation(
        "state that a step has made anew is lost",
        "tiermem/optim/units/plainopt.py",
        "                and value is views[place.first]\n",
        "",
        ("tests/unit/test_nn_training.py", "tests/unit/test_optim_views.py"),
    ),
    Mutation(
        "a clipping that was cut short is applied again",
        "tiermem/nn/groups/gradunit.py",
        "if tensor._version != version]\n        self._done",
        "if tensor._version < 0]\n        self._done",
        ("tests/unit/test_nn_clipping.py",),
    ),
    Mutation(
        "gradients wait although hooks of users are shown them",
        "tiermem/nn/groups/newgrads.py",
        "        if hooks is None or len(hooks) > 1:\n",
        "        if not hooks:\n",
        _NEW_GRADS,
    ),
    Mutation(
        "a stand-in that a program has marked stands for the next gradient",
        "tiermem/nn/groups/grads.py",
        " = stand_in if len(stand_in.__dict__) == ways.marks else None\n",
        " = stand_in\n",
        ("tests/unit/test_nn_lazy.py",),
    ),
    Mutation(
        "a stand-in that a program watches stands for the next gradient",
        "tiermem/nn/groups/grads.py",
        "if not (held or ways is None or getweakrefcount(stand_in)):",
        "if not (held or ways is None):",
        ("tests/unit/test_nn_lazy.py",),
    ),
    Mutation(
        "a stand-in that a program holds stands for the next gradient",
        "tiermem/nn/groups/grads.py",
        "if not (held or ways is None or getweakrefcount(stand_in)):",
        "if not (stand_in is None or ways is None or getweakrefcount(stand_in)):",
        ("tests/unit/test_nn_lazy.py",),
    ),
    Mutation(
        "what a collective writes is not taken back",
        "tiermem/nn/tensors/standin.py",
        "if func in _COLLECTIVES:",
        "if False:",
        ("tests/unit/test_nn_around.py",),
    ),
    Mutation(
        "an operation that says that it writes is not believed",
        "tiermem/nn/tensors/standin.py",
        "return func._schema.is_mutable",
        "return False",
        ("tests/unit/test_nn_programs.py",),
    ),
    Mutation(
        "a gradient is gone as soon as its address is known",
        "tiermem/nn/tensors/lazy.py",
        "by_address or _seen(self.tensor)",
        "_seen(self.tensor)",
        ("tests/unit/test_nn_programs.py",),
    ),
    Mutation(
        "who holds a gradient's storage is not seen",
        "tiermem/nn/tensors/lazy.py",
        "sys.getrefcount(storage) > _ALONE_AS_STORAGE",
        "False",
        ("tests/unit/test_nn_programs.py",),
    ),
    Mutation(
        "what dlpack made of a gradient is not seen",
        "tiermem/nn/tensors/lazy.py",
        "is_shared(tensor) or is_elsewhere(tensor)",
        "is_shared(tensor)",
        ("tests/unit/test_nn_programs.py",),
    ),
    Mutation(
        "a signal as the fused kernel is tried is swallowed",
        "tiermem/optim/host/fused.py",
        "if OUTSIDE not in error.__dict__:",
        "if False:",
        ("tests/unit/test_optim_classes.py",),
    ),
    Mutation(
        "a step of weights that have left is begun",
        "tiermem/optim/timing.py",
        "if unit.group is not None and unit.group.freed:",
        "if False:",
        ("tests/unit/test_optim_close.py",),
    ),
    Mutation(
        "state that was replaced is taken for what the last step has left",
        "tiermem/optim/units/plainopt.py",
        "            if value is not views[first]:\n",
        "            if value is None:\n",
        ("tests/unit/test_optim_groups.py",),
    ),
    Mutation(
        "a gradient that a program holds goes to the tiers",
        _GRADS,
        "elif entry.has_grad or not (shares or getrefcount(gradient) > ALONE_IN_GRAD):",
        "else:",
        _NEW_GRADS,
    ),
    Mutation(
        "a gradient is added to one that waits",
        _GRADS,
        "        if entry.waits:\n            self.new.take()\n",
        "",
        _NEW_GRADS,
    ),
    Mutation(
        "hooks of users do not see the gradient that is added to",
        _GRADS,
        "hooks is not None and len(hooks) > 1:",
        "hooks is not None and not hooks:",
        _NEW_GRADS,
    ),
    Mutation(
        "a gradient is added to one that a program has cleared",
        _GRADS,
        "            or entry.lazy is not None\n",
        "",
        _NEW_GRADS,
    ),
    Mutation(
        "nobody is told of a gradient that is about to come",
        _GRADS,
        "            busy = busy or watcher.listens\n",
        "            pass\n",
        ("tests/unit/test_optim_ahead.py",),
    ),
    Mutation(
        "a place is taken over while its block may be in use",
        "tiermem/core/rounds.py",
        "self.freed.append(number + last + 2)",
        "self.freed.append(number + last + 1)",
        ("tests/property/test_laps.py",),
    ),
    Mutation(
        "a pass that could be planned beforehand begins with reading measurements",
        _RUNTIME + "metrics/pass_timer.py",
        "and self.estimates.can_foresee(key)",
        "and self.estimates.sure(key)",
        ("tests/unit/test_runtime_arranged.py",),
    ),
    Mutation(
        "plans are made as passes begin, not as they end",
        _RUNTIME + "manager.py",
        "if pass_timer.ended() or prefetcher.overdue:",
        "if pass_timer.ended() and False:",
        ("tests/unit/test_runtime_arranged.py",),
    ),
    Mutation(
        "backward is taken to let go of a block at once",
        "tiermem/core/schedule.py",
        "return SOFT if is_backward(key) else 0",
        "return 0",
        ("tests/unit/test_lora_arranged.py",),
    ),
    Mutation(
        "a round of several passes is decided after its first break",
        "tiermem/runtime/lookahead/arranged.py",
        "_Pause(int(len(loop.names) == 1))",
        "_Pause(1)",
        ("tests/unit/test_lora_arranged.py",),
    ),
    Mutation(
        "a backward that lets go later than expected is laid out as before",
        "tiermem/runtime/lookahead/arranged.py",
        "min(_MOST_LAG, late.lag + lag_of(name))",
        "late.lag",
        ("tests/unit/test_lora_arranged.py",),
    ),
    Mutation(
        "what closes a pass and opens the next one moves",
        "tiermem/core/layouts.py",
        "if len(size_of) < len(blocks):",
        "if not blocks:",
        ("tests/property/test_laps.py",),
    ),
    Mutation(
        "no more than one fetch is left to the begin of a pass",
        "tiermem/core/laps.py",
        "in range(out.postponed + 1, most + 1):",
        "in range(0):",
        ("tests/property/test_laps.py",),
    ),
    Mutation(
        "small blocks stream through slots of the largest",
        "tiermem/core/plans.py",
        "    plans += () if several else _large_alone(loop)\n",
        "",
        ("tests/property/test_core_slots.py",),
    ),
    Mutation(
        "layers of experts come up whole in a call among others",
        "tiermem/runtime/services/expert_way.py",
        "if trial is not None and not again and not (",
        "if trial is not None and False and not (",
        ("tests/unit/test_expert_way.py",),
    ),
    Mutation(
        "layers of experts come up whole for a few tokens",
        "tiermem/runtime/services/expert_way.py",
        "if self.all_chosen or (many and kind.chosen is None):",
        "if True:",
        ("tests/unit/test_expert_way.py",),
    ),
    Mutation(
        "whole layers of experts are kept though single ones are faster",
        "tiermem/core/experts.py",
        "self.way = min(self._best, key=self._best.__getitem__)",
        "self.way = self._other",
        ("tests/property/test_core_experts.py", "tests/unit/test_expert_way.py"),
    ),
    Mutation(
        "whole tensors: what the first call chooses is not looked at",
        "tiermem/runtime/services/expert_way.py",
        "self.looks = way is Way.TENSORS and kind.chosen is None",
        "self.looks = False",
        ("tests/unit/test_expert_way.py",),
    ),
    Mutation(
        "whole tensors: a copy does not wait for those that read its seats",
        _TENSORS,
        "copy_up(parts, target, source, stack, run.released)",
        "copy_up(parts, target, source, stack, ())",
        ("tests/property/test_expert_streams.py",),
    ),
    Mutation(
        "whole tensors: what reads does not wait for the copies",
        _TENSORS,
        "            self._parts.copy.use(event)",
        "            pass",
        ("tests/property/test_expert_streams.py",),
    ),
    Mutation(
        "whole tensors: seats are not known to be read",
        _TENSORS,
        "            run.read += 1\n",
        "",
        ("tests/unit/test_expert_way.py",),
    ),
    Mutation(
        "whole tensors: rows copied before a write are taken for current",
        _TENSORS,
        "return self.what is tensor and self.stamp == tensor.stack.stamp",
        "return self.what is tensor",
        ("tests/unit/test_expert_way.py",),
    ),
    Mutation(
        "whole tensors: small pieces are seated where rows are",
        _TENSORS,
        "seats, experts = banks[size].seats[small[size] :], ",
        "seats, experts = banks[size].seats, ",
        ("tests/unit/test_expert_way.py",),
    ),
    Mutation(
        "whole tensors: laid out for stacks of which no room was found",
        _TENSORS,
        "if moved(stacks, {size: len(bank.seats) for size, bank in banks.items()}) is None:",
        "if False:",
        ("tests/unit/test_expert_way.py",),
    ),
    Mutation(
        "whole tensors: a thread does not wait for what others are about to read",
        "tiermem/nn/groups/rows.py",
        "and self._is_read(tensor):",
        "and False:",
        ("tests/unit/test_expert_way.py",),
    ),
    Mutation(
        "an expert room that has given way stays small",
        "tiermem/runtime/services/expert_room.py",
        "and not more and not self._grow()",
        "and not more",
        ("tests/unit/test_expert_way.py",),
    ),
    Mutation(
        "whole tensors: what shares seats is copied at its use alone",
        _TENSORS,
        "for other, run in tensor.next:",
        "for other, run in ():",
        ("tests/unit/test_expert_way.py",),
    ),
    Mutation(
        "what comes to the same is not left to the begin of a pass",
        "tiermem/core/laps.py",
        "as_long = _AS_LONG if out.postponed else 1 / _AS_LONG",
        "as_long = 1 / _AS_LONG",
        ("tests/property/test_laps.py",),
    ),
    Mutation(
        "a plan counts as bad for what no plan can hide",
        "tiermem/core/laps.py",
        "sum(compute[: visits[0].first + 1]) + compute[-1]",
        "sum(compute[: visits[0].first + 1])",
        ("tests/property/test_core_slots.py",),
    ),
    Mutation(
        "a copy whose event is recorded again counts as made before others",
        _COPY,
        "        del self.fences[offset]\n        self.fences[offset] = fence\n",
        "",
        STREAMS,
    ),
    Mutation(
        "what calls hold while others run is expected to stream",
        "tiermem/runtime/lookahead/prefetcher.py",
        "        self._held.update(held)\n",
        "",
        _FILL,
    ),
    Mutation(
        "HBM is filled with what something else comes to before",
        _CORE + "rounds.py",
        "        if low == high:\n",
        "        if True:\n",
        ("tests/property/test_laps.py", *_FILL),
    ),
    Mutation(
        "HBM is filled where blocks are in it",
        "tiermem/runtime/lookahead/first_fill.py",
        "            and all(r.fixed or r.extent is None for r in table)\n",
        "",
        _FILL,
    ),
    Mutation(
        "what stays lies with the largest block next to the slots",
        "tiermem/runtime/lookahead/arranged.py",
        "            gaps[index] = begin, size - nbytes\n"
        "            found.append(Missing(block, first[block], begin + size - nbytes, nbytes))\n",
        "            gaps[index] = begin + nbytes, size - nbytes\n"
        "            found.append(Missing(block, first[block], begin, nbytes))\n",
        _FILL,
    ),
    Mutation(
        "a plan comes into force for what measuring takes the host",
        "tiermem/runtime/lookahead/plan_maker.py",
        "            saved = min(saved, took - loop.seconds(plan) / passes)\n",
        "",
        _FILL,
    ),
    Mutation(
        "a block far larger than what has to go makes room for it",
        "tiermem/core/residents.py",
        "if over <= sizes[block] <= 2 * over]",
        "if over <= sizes[block]]",
        ("tests/property/test_core_forecast.py",),
    ),
    Mutation(
        "a wrong guess of the first pass pauses the loop",
        "tiermem/runtime/lookahead/arranged.py",
        "if planner.observed(planner.key):",
        "if planner is not None:",
        _FILL,
    ),
    Mutation(
        "the second pass waits for a plan",
        "tiermem/runtime/lookahead/prefetcher.py",
        "(outlook.foreseen or self.fetcher.laid_out)",
        "outlook.foreseen",
        _FILL,
    ),
    Mutation(
        "the first pass of other tokens waits for a plan",
        "tiermem/runtime/lookahead/prefetcher.py",
        "if found is None and self._does_for_once(schedule):",
        "if False:",
        _FILL,
    ),
    Mutation(
        "an order that was only guessed is an example for others",
        _CORE + "schedule.py",
        "self._known[like] if self.observed(like) else guess",
        "self._known.get(like, guess)",
        _FILL,
    ),
    Mutation(
        "a module with several places is used at the first",
        "tiermem/nn/wrap/intercepted.py",
        "(block not in seen or scope.begins)",
        "block not in seen",
        _FILL,
    ),
    Mutation(
        "an embedding is expected to be used whole where its rows are read",
        "tiermem/nn/wrap/lookup.py",
        "return rows // _SHARE",
        "return 0",
        _FILL,
    ),
    Mutation(
        "a model stays wrapped whose wrap was cut short as HBM was filled",
        "tiermem/tier.py",
        "            give_back(wrapped, self._manager.parts.device if on_device else None)\n"
        "            self._forget(id(model))\n",
        "",
        _FILL,
    ),
    Mutation(
        "what is laid out to come first is fetched elsewhere while a plan is made",
        "tiermem/runtime/lookahead/prefetcher.py",
        "schedule is self._planned and not self.fetcher.laid_out else None",
        "schedule is self._planned else None",
        ("tests/unit/test_runtime_first.py",),
    ),
    Mutation(
        "what is cleared away for a layout was fetched for nothing",
        "tiermem/runtime/lookahead/arranged.py",
        "        self._parts.transfers.waste.withdraw(record.block.id)\n",
        "",
        ("tests/unit/test_runtime_arranged.py",),
    ),
    Mutation(
        "little blocks stay where HBM has no room for two others beside them",
        "tiermem/nn/groups/blocks.py",
        "sorted(map(known.packed, kept.values()))[-2:]",
        "sorted(map(known.packed, kept.values()))[-1:]",
        ("tests/unit/test_nn_partition.py",),
    ),
    Mutation(
        "coarser blocks are taken in budgets in which only finer ones fit",
        "tiermem/nn/groups/blocks.py",
        "if seconds < least and plan.can_replace(fine):",
        "if seconds < least:",
        ("tests/unit/test_nn_hostbound.py",),
    ),
    Mutation(
        "coarser blocks leave no room for the steps of several parameters together",
        "tiermem/nn/groups/blocks.py",
        "return max(*sizes, limit)",
        "return max(sizes)",
        ("tests/unit/test_nn_hostbound.py",),
    ),
    Mutation(
        "a longer chain of coarser blocks leaves no room for the steps of the others",
        "tiermem/nn/groups/blocks.py",
        'own if chain <= fine.chain("dram") else self.params.values()',
        "own",
        ("tests/unit/test_nn_hostbound.py",),
    ),
    Mutation(
        "models that are trained have coarser blocks",
        "tiermem/nn/groups/blocks.py",
        'if self.blocks != "auto" or self.trained:',
        'if self.blocks != "auto":',
        ("tests/unit/test_nn_hostbound.py",),
    ),
    Mutation(
        "the lists of a layer that is one block are divided",
        "tiermem/nn/groups/partition.py",
        "if isinstance(child, CONTAINERS) and not (one_block and _differ(path, child)):",
        "if isinstance(child, CONTAINERS):",
        ("tests/unit/test_nn_hostbound.py",),
    ),
    Mutation(
        "a pass that uses only what stays counts as one of the round",
        "tiermem/runtime/lookahead/arranged.py",
        "if not force.idle:",
        "if force.at >= 0:",
        ("tests/unit/test_runtime_arranged.py",),
    ),
    Mutation(
        "a loop is laid out though its disk is asked for blocks",
        "tiermem/runtime/lookahead/arranged.py",
        "return transfers.ahead.keeps(block_id) and transfers.in_dram(record) is not None",
        "return True",
        ("tests/unit/test_runtime_arranged.py",),
    ),
    Mutation(
        "a fetch is for nothing once a pass in between is over",
        "tiermem/runtime/lookahead/arranged.py",
        "            later += loop.between",
        "            later += 0",
        ("tests/unit/test_runtime_arranged.py",),
    ),
    Mutation(
        "what was written keeps HBM from being arranged",
        "tiermem/runtime/lookahead/arranged.py",
        "if record.in_hbm is State.DIRTY and not write_home(self._parts, record):",
        "if record.in_hbm is State.DIRTY:",
        ("tests/unit/test_runtime_arranged.py",),
    ),
    Mutation(
        "what the host takes grows with the tokens",
        "tiermem/core/forecast.py",
        "if now > then and then < _LAUNCHES:",
        "if now < 0:",
        ("tests/property/test_core_forecast.py",),
    ),
    Mutation(
        "every surprise is measured",
        "tiermem/core/pace.py",
        "            if not known.calm:\n",
        "            if True:\n",
        ("tests/property/test_core_pace.py",),
    ),
    Mutation(
        "what waits in vain is not taken in before a backward ends",
        "tiermem/nn/passes/backward.py",
        "            self.incoming.new.end_backward()",
        "            self.incoming.new.forget()",
        ("tests/unit/test_optim_arrivals.py",),
    ),
)

_WAITS = (
    (
        "compute does not wait for a copy up",
        "        if event is not None and event.waiter != stream:  # else it waits already\n"
        "            self.calls.wait(stream, event)\n",
        "",
    ),
    (
        "a copy up does not wait for compute that still reads there",
        "copy_behind(up, self._compute, to",
        "copy_behind(up, (), to",
    ),
    (
        "a copy up does not wait for copies down from there",
        "            waits = (*waits, before)\n",
        "            pass\n",
    ),
    (
        "a copy down does not wait for the compute that writes",
        "        self._follow_compute(self._down)\n",
        "",
    ),
    (
        "compute writes where a copy still reads",
        "        for event in self._copies(extent):\n            self.calls.wait(stream, event)\n",
        "",
    ),
    (
        "compute writes where another compute stream still reads",
        "                self.calls.follow(stream, other)\n",
        "                pass\n",
    ),
    (
        "copies wait for one compute stream and not for all",
        "        for stream in self._compute:\n            self.calls.follow(copies",
        "        for stream in [self.calls.current()]:\n            self.calls.follow(copies",
    ),
    (
        "a copy up waits for one compute stream and not for all",
        "copy_behind(up, self._compute, to",
        "copy_behind(up, (calls.current(),), to",
    ),
    (
        "a copy down does not wait for the compute before it",
        "copy_behind(down, self._compute, to",
        "copy_behind(down, (), to",
    ),
    (
        "a copy down waits for one compute stream and not for all",
        "copy_behind(down, self._compute, to",
        "copy_behind(down, (calls.current(),), to",
    ),
    (
        "a copy up does not wait for what came there from a file",
        "            waits = (*waits, landed)\n",
        "            pass\n",
    ),
    (
        "what is poisoned does not wait for compute that still reads there",
        "        self._follow_compute(self._up)\n",
        "",
    ),
    (
        "what is poisoned does not wait for copies from there and to there",
        "            self.calls.wait(self._up, event)\n",
        "            pass\n",
    ),
    (
        "what comes from a file does not wait for compute that still reads there",
        "        return (*computed, *self._copies(extent))\n",
        "        return tuple(self._copies(extent))\n",
    ),
    (
        "what comes from a file waits for one compute stream and not for all",
        "(self.calls.record(stream) for stream in self._compute)",
        "(self.calls.record(self.calls.current()),)",
    ),
    (
        "what comes from a file does not wait for copies from there and to there",
        "        return (*computed, *self._copies(extent))\n",
        "        return tuple(computed)\n",
    ),
    (
        "what writes a place does not wait for copies down from there",
        "(self._rising, self._landed, self._falling)",
        "(self._rising, self._landed)",
    ),
    (
        "what writes a place does not wait for copies up to there",
        "(self._rising, self._landed, self._falling)",
        "(self._landed, self._falling)",
    ),
    (
        "what writes a place does not wait for what came there from a file",
        "(self._rising, self._landed, self._falling)",
        "(self._rising, self._falling)",
    ),
    (
        "a chunk of a file goes up without waiting for anything",
        "        for event in after:\n            self.calls.wait(self._files, event)\n",
        "",
    ),
)
"""Event waits of the copy engine. Simulated streams show each; five show on a GPU's as well."""

SAVED_TENSORS = (
    "tests/unit/test_nn_activations.py",
    "tests/unit/test_nn_activation_options.py",
)
_COPIES = "tiermem/runtime/services/activation_store.py"
_HANDLES = "tiermem/nn/passes/activations.py"
_ACTIVATIONS = (
    (
        "a saved tensor is let go while it is copied down",
        _COPIES,
        "            self.manager.parts.copy.use(place.written)\n        source, copy.source",
        "            pass\n        source, copy.source",
    ),
    (
        "compute does not wait for what comes up",
        _COPIES,
        "        self.manager.parts.copy.use(copy.up)\n        reading",
        "        reading",
    ),
    (
        "what was fetched and not needed is let go while it comes up",
        _COPIES,
        "            self.manager.parts.copy.use(event)\n",
        "",
    ),
    (
        "compute does not wait for what comes up from a file",
        _COPIES,
        "            self.manager.parts.copy.use(copy.up)\n            return\n",
        "            return\n",
    ),
    (
        "what was fetched from a file and not needed is let go while it comes up",
        _COPIES,
        "                event = event or transfer.event\n",
        "",
    ),
    (
        "a tensor changed after it was saved is taken as it was",
        _SAVED,
        "            if packed.counter._version != packed.version:\n",
        "            if False:\n",
    ),
    (
        "tensors of one storage share a copy whatever was written",
        _HANDLES,
        "root is _root(tensor) and tensor._version == copy.version",
        "root is not None or tensor._version == copy.version",
    ),
)
"""Saved tensors below HBM. Copies are as late as their order allows in these tests."""

_PARTED = (
    (
        "a part begins with numbers of its own",
        "            part.take_numbers(numbers)\n",
        "",
    ),
    (
        "a step begins anew with its first part",
        "        numbers, ticket = self._numbers_then or {}, self._ticket\n",
        "        numbers, ticket = self._numbers_then or {}, object()\n",
    ),
    (
        "masters of parts do not follow their weights",
        "part.seen.written = self._follows",
        "part.seen.written = False",
    ),
)
"""A large parameter's step in parts."""

LOOKUPS = (
    "tests/property/test_streams.py",
    "tests/unit/test_runtime_zero_copy.py",
    "tests/unit/test_nn_lookup.py",
)
_IN_PLACE, _LOOKUP = "tiermem/runtime/loans/zero_copy.py", "tiermem/nn/wrap/lookup.py"
_LOOKS = (
    (
        "a kernel that looks at a block in DRAM leaves no event",
        _IN_PLACE,
        "                transfers.home_ready[block.id] = event\n",
        "                pass\n",
    ),
    (
        "a kernel looks at a block in DRAM before what was written comes home",
        _IN_PLACE,
        "        parts.copy.use(transfers.home_ready.get(block.id))\n",
        "",
    ),
    (
        "what is owed to a block is not asked for",
        _IN_PLACE,
        "            or block.id in parts.deferred\n",
        "",
    ),
    (
        "a block that is held may be looked at in DRAM",
        _RULES,
        "(record.leases > 0 or slot.aliased)",
        "slot.aliased",
    ),
    (
        "a block that somebody has a view of may be looked at in DRAM",
        _RULES,
        "(record.leases > 0 or slot.aliased)",
        "record.leases > 0",
    ),
    (
        "a stale home may be looked at",
        _IN_PLACE,
        "        return record.at_home is State.VALID\n",
        "        return True\n",
    ),
    (
        "a home goes to another block while a copy up from it is under way",
        "tiermem/runtime/manager.py",
        "                self.parts.copy.wait(self.parts.copy.risen())",
        "                pass",
    ),
    (
        "a weight written unseen may be looked at in DRAM",
        _LOOKUP,
        " or group.may_be_written()",
        "",
    ),
    (
        "hooks do not find the weight in HBM",
        _LOOKUP,
        "            and not any(names[hooks] for hooks in _HOOKS)\n",
        "",
    ),
)
"""Rows of an embedding that are read where they lie."""

PACE = ("tests/unit/test_pass_timer.py", "tests/property/test_core_pace.py")
_MEASURING = (
    (
        "what measuring takes the host counts as a change",
        "tiermem/runtime/metrics/pass_timer.py",
        "if length.key is not None and not length.slowed:",
        "if length.key is not None:",
    ),
    (
        "one pass of another length is a change",
        "tiermem/core/pace.py",
        "        if odd and not known.odd:\n            known.odd = True\n            return\n",
        "",
    ),
)

CHECKPOINTS = ("tests/unit/test_checkpoint_header.py", "tests/unit/test_checkpoint_folder.py")
_HEADER = "tiermem/storage/checkpoint/header.py"
_STORED = "tiermem/storage/checkpoint/folder.py"
_FILES_READ = (
    (
        "a header may have holes between tensors",
        _HEADER,
        "        if stored.offset != at:",
        "        if stored.offset < at:",
    ),
    (
        "a header's key may come twice",
        _HEADER,
        "    if len(found) != len(pairs):",
        "    if False:",
    ),
    (
        "minus zero is a whole number in a header",
        _HEADER,
        ' and text != "-0"',
        "",
    ),
    (
        "an index may lead out of its folder",
        _STORED,
        ' or ".." in named.parts',
        "",
    ),
    (
        "a checkpoint that was replaced is read on",
        _STORED,
        "            self.check_unchanged(fd, stored.file)\n",
        "",
    ),
)

FROZEN = ("tests/unit/test_nn_frozen_experts.py",)
_CALLS, _ROWS = "tiermem/nn/wrap/experts.py", "tiermem/nn/passes/savedrows.py"
_EXPERTS = (
    Mutation(
        "with gradients a layer of frozen experts comes whole",
        _CALLS,
        "(not torch.is_grad_enabled() or self._may_be_saved())",
        "not torch.is_grad_enabled()",
        FROZEN,
    ),
    Mutation(
        "experts that are trained come by rows",
        _CALLS,
        "        return not trained and",
        "        return",
        FROZEN,
    ),
    Mutation(
        "what autograd saves of rows keeps them in their seats",
        _SAVED,
        "        if self.rows.copies or self._room.seats:",
        "        if not self.rows:",
        FROZEN,
    ),
    Mutation(
        "copies of rows that were changed are saved as rows",
        _ROWS,
        "            if tensor._version != copied.version:",
        "            if copied is None:",
        FROZEN,
    ),
    Mutation(
        "a checkpoint is not shown copies of rows",
        _SAVED,
        "            if type(found) is SavedCopies:\n                return self._given",
        "            if found is None:\n                return self._given",
        FROZEN,
    ),
    Mutation(
        "a grouped product's backward uses weights that were changed",
        "tiermem/nn/groups/rows.py",
        "        refuse_changed(self._param, self._version, self._choice.stack.block.name)\n",
        "",
        FROZEN,
    ),
    Mutation(
        "the expert room counts as taken for good",
        "tiermem/runtime/services/expert_room.py",
        "        parts.table.give_way.add(block.id)\n",
        "",
        ("tests/integrations/test_experts.py",),
    ),
)

MUTATIONS = (
    *_ELSEWHERE,
    *_EXPERTS,
    *(Mutation(name, file, old, new, CHECKPOINTS) for name, file, old, new in _FILES_READ),
    *(Mutation(name, file, old, new, PACE) for name, file, old, new in _MEASURING),
    *(Mutation(name, file, old, new, LOOKUPS) for name, file, old, new in _LOOKS),
    *(
        Mutation(name, _PARTS, old, new, ("tests/unit/test_optim_parted.py",))
        for name, old, new in _PARTED
    ),
    Mutation(
        "views of the whole state are not brought up to date",
        "tiermem/optim/units/partsstate.py",
        "            if is_viewed(kept[key]):\n",
        "            if False:\n",
        ("tests/unit/test_optim_parted.py",),
    ),
    Mutation(
        "a step that failed does not take a block back that is at home",
        "tiermem/optim/units/attempt.py",
        "partial(restore, 0, block.nbytes)",
        "partial(restore, 0, 0)",
        ("tests/faults/test_optim_repair.py", "tests/unit/test_optim_errors.py"),
    ),
    Mutation(
        "a gradient that a step has unscaled is not written back",
        "tiermem/optim/units/held.py",
        "        return may_be and unit.sees(self.gradients[index])\n",
        "        return False\n",
        ("tests/unit/test_optim_parted.py",),
    ),
    *(
        Mutation(
            name,
            file,
            old,
            new,
            ("tests/unit/test_nn_activations.py", "tests/unit/test_nn_activation_options.py"),
        )
        for name, file, old, new in _ACTIVATIONS
    ),
    *(Mutation(name, _COPY, old, new, STREAMS + _COPIES_DOWN) for name, old, new in _WAITS),
    Mutation(
        "compute does not wait for what comes from a file",
        _RUNTIME + "transfers/transfers.py",
        "                    self.ready[block_id] = transfer.event\n",
        "",
        STREAMS,
    ),
    Mutation(
        "nobody is told what still comes from a file",
        _RUNTIME + "transfers/transfers.py",
        "                    self.copy.landed(move.target_extent, transfer.event)\n",
        "",
        STREAMS,
    ),
    Mutation(
        "an event that a file mover may look at is recorded again",
        _COPY,
        "            again = None  # a file mover may look at it\n",
        "            pass\n",
        STREAMS,
    ),
    Mutation(
        "chunks are used again while they are copied up",
        _PIECES,
        "        if not rising:\n            del self.busy",
        "        if True:\n            del self.busy",
        FILES,
    ),
    Mutation(
        "chunks that wait for a target are used again",
        _PIECES,
        " or chunk.parked:\n            return",
        ":\n            return",
        FILES,
    ),
    Mutation(
        "a read without a target takes every chunk",
        _PIECES,
        "< self._most.parked",
        "< self._staging.count",
        FILES,
    ),
    Mutation(
        "a read that failed ends while copies go on",
        "tiermem/transfer/file/jobs.py",
        " and (self.error is None or not self.rising)",
        "",
        FILES,
    ),
    Mutation(
        "a home is overwritten before a save has it",
        "tiermem/runtime/transfers/transfers.py",
        "            self.homes.keeper.before_write(record)\n        try:",
        "            pass\n        try:",
        SAVING,
    ),
    Mutation(
        "a save's copies are page-locked",
        _RUNTIME + "memory/homes.py",
        "        return None if extent is None else (extent, self.arena.spare(extent))\n",
        "        self.arena.need([extent] if extent else ())\n"
        "        return None if extent is None else (extent, self.arena.spare(extent))\n",
        LATER,
    ),
    Mutation(
        "a save's copies take locked memory from homes",
        _RUNTIME + "memory/homes.py",
        "self.dram.allocate_in(nbytes, unlocked) or ",
        "",
        LATER,
    ),
    Mutation(
        "what is lent without locks is cleared as more is locked",
        "tiermem/storage/pagelock.py",
        "        self._touched = max(extent.end, self._touched)\n        return fresh\n",
        "        return fresh\n",
        LATER,
    ),
    Mutation(
        "a step waits for the disk although its home is being copied",
        _LATER,
        "            elif entry.home is not None and entry.copy is None:",
        "            elif entry.home is not None:",
        LATER,
    ),
    Mutation(
        "a home whose file was read is not written before that is saved",
        _LATER,
        "                entry.state = _State.COPIED  # the",
        "                entry.state = _State.WRITING  # the",
        LATER,
    ),
    Mutation(
        "a save copies in the order of the model",
        _LATER,
        "        return sorted(found, key=",
        "        return found or sorted(found, key=",
        LATER,
    ),
    Mutation(
        "what is stepped ahead is copied before its former home is written",
        _LATER,
        " and entry.place != extent:",
        " and False:",
        LATER,
    ),
    Mutation(
        "a shadow is given up before a save has it",
        _RUNTIME + "services/shadows.py",
        "            self._ask(block_id)\n            extent = ",
        "            extent = ",
        LATER,
    ),
    Mutation(
        "the shadow of a block that is gone is freed before a save has it",
        _RUNTIME + "services/shadows.py",
        "            self._ask(block_id)\n            homes.",
        "            homes.",
        LATER,
    ),
    Mutation(
        "the host steps over a shadow before a save has it",
        _RUNTIME + "services/shadows.py",
        "                self._ask(block.id)\n",
        "",
        ("tests/unit/test_optim_ahead_host.py",),
    ),
    Mutation(
        "a model that leaves frees its pages before a save has them",
        "tiermem/nn/wrap/giveback.py",
        "                homes.keeper.before_write(record)\n            homes.arena",
        "                pass\n            homes.arena",
        LATER,
    ),
    Mutation(
        "a save that is cut short as it begins is waited for",
        _LATER,
        "                self._give_up(error)\n",
        "                pass\n",
        LATER,
    ),
    Mutation(
        "a block that a cut step was writing to the save is waited for",
        _LATER,
        "            if mine and entry.state",
        "            if False and entry.state",
        LATER,
    ),
    Mutation(
        "a save that was waited for in vain is forgotten",
        "tiermem/tier.py",
        "            self._saving.settle()\n            self._saving = None",
        "            saving, self._saving = self._saving, None\n            saving.settle()",
        LATER,
    ),
    *(
        Mutation(
            name, f"tiermem/optim/host/{file}", old, new, ("tests/unit/test_optim_host_bits.py",)
        )
        for name, file, old, new in (
            (
                "float32 gradients of bfloat16 weights are read as bfloat16",
                "exact.c",
                "        if (half && !s->grad_bf16) { /* cast first, as for the device */",
                "        if (0) {",
            ),
            (
                "a user's own method of Adam is left out",
                "exact.py",
                "        if not is_bare(optimizer) or not all(",
                "        if not is_bare(optimizer) or not any(",
            ),
            (
                "numbers that steps have in common are kept by equal settings",
                "exact.py",
                "decoupled, _bits_of(*(settings[name] for name in _ADAM_NUMBERS)))",
                "decoupled, *(settings[name] for name in _ADAM_NUMBERS))",
            ),
            (
                "a share of the host is never tried anew",
                "devicebits.py",
                "            if self.since >= self.pause and self._is_doubtful():",
                "            if False:",
            ),
            (
                "steps of another length begin on the host whatever the last ones did",
                "devicebits.py",
                "last.on_host, _ANOTHER_LOAD",
                "True, _ANOTHER_LOAD",
            ),
        )
    ),
    *(
        Mutation(
            f"plans: {name}",
            _RUNTIME + "lookahead/plan_maker.py",
            old,
            new,
            ("tests/unit/test_runtime_arranged.py",),
        )
        for name, old, new in (
            (
                "layers' own blocks, held one after the other, are thought to be held at once",
                "> room >= 2 * max(map(sizes.__getitem__, held)):",
                "> room < 0:",
            ),
            (
                "what every layer uses streams",
                "            held |= there_throughout(",
                "            there_throughout(",
            ),
        )
    ),
    Mutation(
        "what a killed save has left stays",
        _FOLDER,
        "        self.clean()\n",
        "",
        CRASHES,
    ),
    Mutation(
        "the former checkpoint is removed before the new one has the name",
        _FOLDER,
        "            self._files.rename(self.path, former)\n            try:",
        "            self._remove(self.path)\n            try:",
        CRASHES,
    ),
    Mutation(
        "a checksum that differs is passed over",
        "tiermem/saving/reader.py",
        "        if found != read.digest:",
        "        if not found:",
        CRASHES,
    ),
    Mutation(
        "a save that fails leaves its folder",
        _FOLDER,
        "                    self._remove(temporary)\n            raise",
        "                    pass\n            raise",
        CRASHES,
    ),
    # steps of adapters are laid out
    Mutation(
        "what backward has come through is held while a part is computed again",
        "tiermem/nn/passes/backward.py",
        "                self._let_go_soft()\n\n    def keep(",
        "                pass\n\n    def keep(",
        _ADAPTERS,
    ),
    Mutation(
        "a weight that is used by itself in backward is held to its end",
        "tiermem/nn/passes/awayuses.py",
        "            backward.keep_soft(group)\n",
        "            self._soft.append(group)\n",
        _ADAPTERS,
    ),
    Mutation(
        "what is in HBM for good has a place in the order of use",
        _RUNTIME + "acquire.py",
        "        if record.fixed:\n            self._counters.hits",
        "        if record.fixed and record.extent is None:\n            self._counters.hits",
        _ADAPTERS,
    ),
    Mutation(
        "a block that was written ends the round that it is to leave in",
        _RUNTIME + "lookahead/replay.py",
        "        if as_was and leaves.in_hbm is _DIRTY and self",
        "        if not as_was and leaves.in_hbm is _DIRTY and self",
        _ADAPTERS,
    ),
    Mutation(
        "no block begins inside a layer that one kernel computes",
        "tiermem/nn/groups/partition.py",
        "if uses_inside(module)}",
        "if False}",
        NN,
    ),
    Mutation(
        "weights are away again after an encoder has looked at them",
        "tiermem/nn/groups/group.py",
        "                self.pointing.slot.idle = True\n            if self.pointing.bare:",
        "                self.pointing.slot.idle = True\n            if False:",
        NN,
    ),
    Mutation(
        "a buffer without elements is in no block",
        "tiermem/nn/groups/inspect.py",
        "is_ordinary(found) and found.tensor.numel() > 0",
        "is_ordinary(found)",
        NN,
    ),
    Mutation(
        "tables of positions that no checkpoint has get their values",
        "tiermem/loading/expected.py",
        "            model.initialize_weights()\n",
        "            pass\n",
        ("tests/integrations/test_load_checkpoint.py",),
    ),
    Mutation(
        "a class that draws numbers as it is made draws those that from_pretrained draws",
        "tiermem/loading/build.py",
        "    if drawn:\n",
        "    if False:\n",
        ("tests/integrations/test_load_checkpoint.py",),
    ),
    Mutation(
        "a class does what it does to weights that are loaded",
        "tiermem/loading/load.py",
        "initialize=by_class",
        "initialize=False",
        ("tests/integrations/test_load_checkpoint.py",),
    ),
    Mutation(
        "checkpoints' files are numbered after the swap file's",
        "tiermem/runtime/memory/homes.py",
        "CheckpointStore(self.chunk, others)",
        "CheckpointStore(self.chunk)",
        ("tests/integrations/test_load_checkpoint.py",),
    ),
    Mutation(
        "names for which peft adapts stacked experts are refused",
        "tiermem/lora/experts.py",
        "    if parameters:\n",
        "    if False:\n",
        ("tests/integrations/test_lora.py",),
    ),
    Mutation(
        "scripts: what was given out as data keeps its values",
        "tiermem/nn/groups/olddata.py",
        "            data.data = old\n",
        "            pass\n",
        _SCRIPTS,
    ),
    Mutation(
        "scripts: data that is set to itself stays one memory",
        "tiermem/nn/groups/olddata.py",
        "any(data is value and share(own, data) for data in given)",
        "False",
        _SCRIPTS,
    ),
    Mutation(
        "scripts: placeholders can be read while shapes are recorded",
        "tiermem/nn/tensors/profiled.py",
        "let_be_read(self.record_shapes)",
        "let_be_read(False)",
        _SCRIPTS,
    ),
    Mutation(
        "scripts: placeholders are refused again after a profile",
        "tiermem/nn/tensors/profiled.py",
        "            let_be_read(False)\n",
        "            pass\n",
        _SCRIPTS,
    ),
    Mutation(
        "scripts: a state dict that is to have the parameters has them",
        "tiermem/nn/wrap/scope.py",
        "        if keep_vars:\n",
        "        if False:\n",
        _SCRIPTS,
    ),
    Mutation(
        "scripts: a weight with sparse gradients is not stepped in parts",
        "tiermem/optim/units/cutting.py",
        " or entry.sparse:\n",
        ":\n",
        _SCRIPTS,
    ),
    Mutation(
        "scripts: budgets are those of weights with sparse gradients",
        "tiermem/nn/groups/need.py",
        " or unit.members[0].sparse:\n",
        ":\n",
        _SCRIPTS,
    ),
    Mutation(
        "scripts: a sparse gradient is refused where steps have parts",
        _PARTS,
        "        if gradient.layout is not torch.strided:\n",
        "        if False:\n",
        _SCRIPTS,
    ),
    Mutation(
        "scripts: a sparse state has no place in a block",
        "tiermem/optim/units/places.py",
        "return same and first.layout is second.layout",
        "return same",
        _SCRIPTS,
    ),
    Mutation(
        "scripts: settings that a loaded state has not are taken away",
        "tiermem/optim/state.py",
        "            del group[key]",
        "            pass",
        _SCRIPTS,
    ),
    Mutation(
        "a save beside training reads state that no step has made",
        _LATER,
        "plain.block is None or not plain.picks:",
        "plain.block is None:",
        ("tests/unit/test_saving_later.py",),
    ),
    Mutation(
        "bypass: modules that ask for classes of weights are left alone",
        _BYPASS,
        "            if isinstance(module, ASK):",
        "            if isinstance(module, ()):",
        _BYPASSED,
    ),
    Mutation(
        "bypass: what is computed again in backward is intercepted",
        _BYPASS,
        "            self.end(for_good=again)\n",
        "            self.end()\n",
        _TRAINED,
    ),
    Mutation(
        "bypass: what a checkpoint saved with hooks it saves with hooks again",
        "tiermem/nn/passes/leftout.py",
        "list(taken_out) if self.covered else ()",
        "()",
        _TRAINED,
    ),
    Mutation(
        "bypass: what a checkpoint saved without hooks it saves without them again",
        "tiermem/nn/passes/leftout.py",
        "        before, left_out.of = left_out.of, self.of\n",
        "        before = left_out.of\n",
        _TRAINED,
    ),
    Mutation(
        "bypass: a call inside backward is of the graph that it is made for",
        "tiermem/nn/wrap/scope.py",
        "        if torch._C._current_graph_task_id() == -1:\n            left_out.of = None\n",
        "        left_out.of = None\n",
        _TRAINED,
    ),
    Mutation(
        "bypass: all is held while parts of a forward are computed again",
        _BYPASS,
        "            backward.keep_all(self, self._there)\n",
        "",
        _TRAINED,
    ),
    Mutation(
        "bypass: a backward that is cut short lets go",
        "tiermem/nn/passes/backward.py",
        "            self.let_go_kept()  # what is written meanwhile is to be seen\n",
        "",
        _TRAINED,
    ),
    Mutation(
        "bypass: other hooks than tiermem's see what is saved",
        "tiermem/nn/passes/saved.py",
        "_is_enabled() and top_pair() is None and",
        "_is_enabled() and",
        _TRAINED,
    ),
    Mutation(
        "bypass: a block stays while a graph has a parameter of it",
        _RUNTIME + "memory/slots.py",
        "        if any(map(has_saved, self.saved)):\n",
        "        if False:\n",
        _TRAINED,
    ),
    Mutation(
        "bypass: a block is free once no graph has a parameter of it",
        _RUNTIME + "memory/slots.py",
        "_references(param) > 1 + (node is not None)",
        "_references(param) > 1",
        _TRAINED,
    ),
    Mutation(
        "bypass: more parameters may be saved while a forward has them",
        _RUNTIME + "memory/slots.py",
        "        if self.wanted:\n            return True",
        "        if False:\n            return True",
        _TRAINED,
    ),
    Mutation(
        "bypass: a graph takes no room that gradients need",
        _BYPASS,
        "            and self._fits(self._gradients(new=True))\n",
        "",
        _TRAINED,
    ),
    Mutation(
        "bypass: gradients left to torch have room beside the blocks",
        _BYPASS,
        "(already or self._fits(self._gradients()))",
        "True",
        _TRAINED,
    ),
    Mutation(
        "bypass: gradients are left to torch where memory grows",
        _BYPASS,
        "            and parts.slots.arena.grows\n",
        "",
        _TRAINED,
    ),
    Mutation(
        "bypass: gradients that are kept wider go to the tiers",
        _BYPASS,
        "            and runtime.grads.in_own_dtypes\n",
        "",
        _TRAINED,
    ),
    Mutation(
        "bypass: gradients are added to those in the tiers",
        "tiermem/nn/groups/incoming.py",
        "            if not incoming.left or entry.has_grad:\n",
        "            if not incoming.left:\n",
        _TRAINED,
    ),
    Mutation(
        "bypass: memory put in the place of a weight's is copied home",
        "tiermem/nn/groups/group.py",
        " and pointing.all_at(slot):\n",
        ":\n",
        _TRAINED,
    ),
    Mutation(
        "bypass: a view that outlives a forward may be written",
        "tiermem/nn/groups/group.py",
        "                written = True  # by something else among",
        "                written = False  # by something else among",
        _TRAINED,
    ),
    Mutation(
        "bypass: masters need not follow what a graph saves",
        "tiermem/nn/groups/group.py",
        "                writes.stepped += views == self.graph_views\n",
        "",
        _TRAINED,
    ),
    Mutation(
        "bypass: masters follow what one view more may have written",
        "tiermem/nn/groups/group.py",
        "                writes.stepped += views == self.graph_views\n",
        "                writes.stepped += 1\n",
        _TRAINED,
    ),
    Mutation(
        "bypass: a layer by itself in a checkpoint saves the same both times",
        "tiermem/nn/passes/saved.py",
        "        again.of = model\n        return True",
        "        return False",
        _TRAINED,
    ),
    Mutation(
        "bypass: it does not begin within a checkpoint",
        _BYPASS,
        " or self._wrapped.runtime.saved.is_checkpointed():\n",
        ":\n",
        _TRAINED,
    ),
    Mutation(
        "bypass: code inside a forward may enable gradients",
        "tiermem/nn/wrap/scope.py",
        "                    if whole:\n                        self._bypass.leave_graph_out",
        "                    if whole and is_grad_enabled():\n"
        "                        self._bypass.leave_graph_out",
        _TRAINED,
    ),
    Mutation(
        "wrap: blocks stay for a graph that is there already",
        "tiermem/nn/wrap/wrapped.py",
        "        self._stay_for_graphs()\n\n",
        "\n",
        _TRAINED,
    ),
    Mutation(
        "materialize: blocks stay for a graph that was made inside",
        "tiermem/nn/wrap/materialize.py",
        "                slot.saved = group.pointing.tensors\n",
        "                pass\n",
        _TRAINED,
    ),
    Mutation(
        "bypass: a graph outlives what an exception leaves",
        "tiermem/nn/groups/group.py",
        "            if slot is not None and there and slot.is_saved():\n",
        "            if False:\n",
        _TRAINED,
    ),
    Mutation(
        "grads: what was frozen since forward keeps its gradient",
        "tiermem/nn/groups/incoming.py",
        "                if made_way and entry.has_grad",
        "                if False and entry.has_grad",
        _TRAINED,
    ),
    Mutation(
        "load: what a graph has saved is refused afterwards",
        "tiermem/saving/fill.py",
        "        group.writes.add([entry.param for entry in group.entries])\n",
        "",
        _TRAINED,
    ),
    Mutation(
        "bypass: it begins soon again where it has served",
        _BYPASS,
        "if in_vain else _FIRST",
        "",
        _TRAINED,
    ),
    Mutation(
        "bypass: interceptors are back where HBM does not hold everything",
        _BYPASS,
        "            manager.parts.table.all_fit\n            and ",
        "            ",
        _BYPASSED,
    ),
    Mutation(
        "bypass: interceptors are back once a second thread comes",
        _BYPASS,
        "            and not manager.threads.several\n",
        "",
        _BYPASSED,
    ),
    Mutation(
        "bypass: a weight that is used by itself puts interceptors back",
        "tiermem/nn/passes/awayuses.py",
        "        if group.left_open is not None:\n",
        "        if False:\n",
        _BYPASSED,
    ),
    Mutation(
        "bypass: all blocks are held while interceptors are out",
        "tiermem/nn/wrap/scope.py",
        "                    kept = (*kept, *whole)\n",
        "                    whole = ()\n",
        _BYPASSED,
    ),
    Mutation(
        "bypass: optimizers are told of forwards",
        "tiermem/nn/passes/runtime.py",
        "            self.keepers\n            or self.backward",
        "            self.backward",
        _BYPASSED,
    ),
    Mutation(
        "bypass: no forward goes by with less HBM than before",
        _RUNTIME + "manager.py",
        "        return not parts.limit.follow(planner.key)\n",
        "        return True\n",
        _BYPASSED,
    ),
    Mutation(
        "bypass: code that writes without being counted has its blocks held by calls",
        _BYPASS,
        "None if modules.uncounted else modules.calls_inside()",
        "modules.calls_inside()",
        (*_BYPASSED, *_SCRIPTS),
    ),
    Mutation(
        "bypass: a block that is on its way is waited for",
        "tiermem/nn/groups/group.py",
        "            or (ready is not None and ready.waiter != stream)\n",
        "",
        _BYPASSED,
    ),
    Mutation(
        "plans: times between stamps on two streams are none",
        "tiermem/runtime/metrics/pass_timer.py",
        "        return max(0.0, self._clock.seconds(begin, end))\n",
        "        return self._clock.seconds(begin, end)\n",
        ("tests/unit/test_runtime_arranged.py",),
    ),
    Mutation(
        "roomy: the host has no share where there are no copies",
        "tiermem/optim/host/devicebits.py",
        "wanted = scaling is None and self._wants_host()",
        "wanted = scaling is None",
        _ROOMY,
    ),
    Mutation(
        "clipping: a change that could not be made is not made later",
        "tiermem/nn/groups/grads.py",
        "            unit.forget_change(change)  # made again it would be made twice\n",
        "",
        _CLIPPING,
    ),
    Mutation(
        "clipping: norms are taken behind a change of all gradients",
        "tiermem/nn/groups/grads.py",
        "                            self.norms.take_changed(entries, slot)\n",
        "                            pass\n",
        _CLIPPING,
    ),
    *(
        Mutation(f"scale: {name}", f"tiermem/{path}", old, new, tests)
        for name, path, old, new, tests in (
            (
                "gradients that await another change are known",
                "nn/groups/formerscale.py",
                "if unit.awaits or unit.runs:",
                "if unit.runs:",
                _CLIPPING,
            ),
            (
                "what was found of gradients holds after they are written",
                "nn/groups/gradnorms.py",
                "        self.scale.invalidate(entries)\n",
                "",
                _CLIPPING,
            ),
            (
                "norms behind the former scale hold for any scale",
                "nn/groups/formerscale.py",
                "        if former is not None and torch.equal(former, self.inverse):",
                "        if former is not None:",
                _CLIPPING,
            ),
            (
                "norms behind a scale are those of gradients that still have it",
                "nn/groups/gradnorms.py",
                "if self.scale.is_awaited(unit) if behind else not unit.awaits:",
                "if behind or not unit.awaits:",
                _CLIPPING,
            ),
            (
                "norms behind a scale hold behind a clipping too",
                "nn/groups/formerscale.py",
                "return len(unit.pending) == 1 and",
                "return",
                _CLIPPING,
            ),
            (
                "a gradient that is not finite is not told of",
                "nn/groups/clipping.py",
                "        found_inf.copy_(torch.maximum(found_inf, infinite.view_as(found_inf)))\n",
                "        pass\n",
                _CLIPPING,
            ),
            (
                "a scale is tried for ever",
                "nn/groups/formerscale.py",
                "        if self._tried > _IN_VAIN:",
                "        if False:",
                _CLIPPING,
            ),
            (
                "gradients await their scale where the host has a share",
                "nn/groups/clipping.py",
                "_found(grads, places, found_inf, inv_scale, known=may_wait)",
                "_found(grads, places, found_inf, inv_scale)",
                ("tests/unit/test_optim_host_bits.py",),
            ),
        )
    ),
    Mutation(
        "share: the host has blocks that forward begins with",
        "tiermem/optim/host/spread.py",
        "return over + slack <= total + (total - now) * _FORWARD",
        "return over <= total + (total - now) * _FORWARD",
        ("tests/unit/test_optim_spread.py",),
    ),
    Mutation(
        "small budgets: gradients of a trained block are divided",
        "tiermem/core/need.py",
        "    if few and whole <= whole_block(hbm):",
        "    if False:",
        ("tests/unit/test_nn_partition.py",),
    ),
    Mutation(
        "small budgets: large units of a trained block are not divided",
        "tiermem/core/need.py",
        "return min(hbm // _AT_ONCE, _LARGE_ENOUGH)",
        "return hbm // _AT_ONCE",
        ("tests/unit/test_nn_partition.py",),
    ),
    *(
        Mutation(f"gradients: {name}", f"tiermem/{path}", old, new, (tests,))
        for name, path, old, new, tests in (
            (
                "one that a step clears meanwhile is read where it was",
                "nn/groups/grads.py",
                "return self.load(entry, dtype) if entry.lazy is stand_in else stand_in._load()",
                "return self.load(entry, dtype)",
                "tests/unit/test_optim_auto.py",
            ),
            (
                "parts of one buffer go to the tiers as more are added",
                "nn/groups/incoming.py",
                "entry.shares = type(current) is torch.Tensor and is_shared(current)",
                "entry.shares = False",
                "tests/unit/test_nn_scripts.py",
            ),
            (
                "a stand-in is added to by torch where gradients are left to it",
                "nn/groups/incoming.py",
                "if not incoming.left else type(gradient) is LazyTensor",
                "and not incoming.left",
                "tests/unit/test_nn_bypass_training.py",
            ),
            (
                "a class that fails where first gradients come late is refused",
                "optim/rules/separable.py",
                "in ((False, True), (True, True), (False, False)):",
                "in ((False, True), (True, True)):",
                "tests/unit/test_optim_classes.py",
            ),
            (
                "a class is tried on one dtype of a group",
                "optim/rules/separable.py",
                'method) if dtypes[1:] else ""',
                'method) if () else ""',
                "tests/unit/test_optim_classes.py",
            ),
            (
                "gradients of a trial over several dtypes are none of them small",
                "optim/rules/separable.py",
                "_SMALL = (1.0, 2.0**-24, 2.0**-12)",
                "_SMALL = (1.0, 1.0, 1.0)",
                "tests/unit/test_optim_classes.py",
            ),
            (
                "a class is tried on what is frozen",
                "optim/tried.py",
                "for p in trained or frozen[:1]]",
                "for p in params[:1]]",
                "tests/unit/test_optim_classes.py",
            ),
        )
    ),
    *(
        Mutation(f"names: {name}", f"tiermem/nn/groups/{path}", old, new, (tests,))
        for name, path, old, new, tests in (
            (
                "any tensor comes back in the place of a parameter with a function",
                "names.py",
                "elif value is not None and self.behind.get(name) is value:",
                "elif value is not None and name in self.behind:",
                "tests/unit/test_nn_parameters.py",
            ),
            (
                "a function is put in the place of a parameter outside of calls",
                "names.py",
                "value is None and self.lender.here.inside and _puts",
                "value is None and _puts",
                "tests/unit/test_nn_parameters.py",
            ),
            (
                "a parameter set to itself is written",
                "away.py",
                "if len(source) == 1 and source[0] is self:",
                "if False:",
                "tests/unit/test_nn_parameters.py",
            ),
        )
    ),
    *(
        Mutation(f"{name} (real streams)", _COPY, old, new, GPU, gpu=True)
        for name, old, new in _WAITS[:5]
    ),
)
