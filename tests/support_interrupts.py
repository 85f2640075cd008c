"""A training program that is cut short at one line inside tiermem, and goes on as its user would.

:func:`record` runs the program once and returns what it ends with, and every line of the package
that it comes to; :func:`interrupted` runs it again and raises before one of them. What the program
ends with is then compared with the run that nobody cut short, and what is left behind is looked
for.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from support_ctrl_c import after_calls, uncut
from support_nn import leaves, same_bits, seed
from support_process import open_files
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem.errors import InvariantError, TierError
from tiermem.optim import tried
from tiermem.optim.rules.probe import StateProbe
from tiermem.optim.rules.separable import check_separable

PACKAGE = str(Path(tiermem.__file__).parent) + os.sep
_STEPS = 4
_PATIENCE = 20

Site = tuple[str, int, str, int]
"""Where a line is: file inside the package, line, the lines that called it, and which time."""


class Interrupt(BaseException):
    """Stands for Ctrl-C."""


class Alarm(Exception):
    """Stands for what a user's own signal handler raises."""


class Hung(BaseException):
    """The program did not go on."""


def _callers(frame: FrameType, depth: int) -> str:
    """Returns the lines that led to a frame, as far as they are in the package."""
    found = []
    step = frame.f_back
    while step is not None and len(found) < depth:
        if step.f_code.co_filename.startswith(PACKAGE):
            found.append(f"{os.path.basename(step.f_code.co_filename)}:{step.f_lineno}")
        step = step.f_back
    return "<".join(found)


class Tracer:
    """Follows the lines of the package in this thread, and raises before one of them.

    With ``calls`` it raises as soon as a call has returned, where signal handlers do.
    """

    def __init__(
        self,
        stop: Site | None = None,
        error: Callable[[], BaseException] = Interrupt,
        depth: int = 1,
        *,
        calls: bool = False,
    ) -> None:
        self.seen: Counter[tuple[str, int, str]] = Counter()
        self.hit = False
        self._stop = stop
        self._error = error
        self._depth = depth
        self._calls = calls
        self._before: Any = None
        self._names: dict[CodeType, str | None] = {}

    def __enter__(self) -> Tracer:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        code = frame.f_code
        if code not in self._names:
            file = code.co_filename
            inside = file.startswith(PACKAGE) and f"testing{os.sep}" not in file
            self._names[code] = file.removeprefix(PACKAGE) if inside else None
        name = self._names[code]
        if name is None or self.hit:
            return None
        if self._stop is not None and name != self._stop[0]:
            return None
        frame.f_trace_opcodes = self._calls
        return self._line

    def _is_point(self, frame: FrameType, event: str) -> bool:
        if self._calls:
            return event == "opcode" and frame.f_lasti in after_calls(frame.f_code)
        return event == "line" and frame.f_lasti not in uncut(frame.f_code)

    def _line(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if self.hit or not self._is_point(frame, event):
            return self._line
        name = self._names[frame.f_code]
        stop = self._stop
        if stop is not None and frame.f_lineno != stop[1]:
            return self._line
        where = _callers(frame, self._depth)
        if self._calls:
            where = f"{frame.f_code.co_name}@{frame.f_lasti}<{where}"
        key = (str(name), frame.f_lineno, where)
        self.seen[key] += 1
        if stop is not None and key == stop[:3] and self.seen[key] == stop[3]:
            self.hit = True
            sys.settrace(self._before)
            raise self._error()
        return self._line


def deep(levels: int, call: Callable[[], Any]) -> Any:
    """Calls something at the end of so many more frames."""
    return call() if levels <= 0 else deep(levels - 1, call)


def depth_here() -> int:
    """Returns how many frames there are."""
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None:
        count, frame = count + 1, frame.f_back
    return count


@dataclass
class Recursion:
    """Makes a call run out of stack after ``headroom`` frames of its own."""

    headroom: int

    def __call__(self, call: Callable[[], Any]) -> Any:
        before = sys.getrecursionlimit()
        sys.setrecursionlimit(depth_here() + self.headroom)
        try:
            return call()
        finally:
            sys.setrecursionlimit(before)


_INTERRUPTS = (Interrupt, Alarm, RecursionError, MemoryError)


@dataclass(frozen=True)
class Program:
    """What the user has asked for.

    Attributes:
        name: For reports.
        nvme: Whether there is a disk.
        policy: Homes.
        optimizer: The class.
        settings: Of the optimizer.
        hbm: Budget.
        recompute: Whether activations are computed again in backward.
        dtype: Of the model.
        options: Of the manager.
        thaws: Whether a layer is trained only from the step on in which it is cut short.
        most: What the norm of the gradients is clipped to.
    """

    name: str
    nvme: bool = False
    policy: dict[str, str] = field(default_factory=dict)
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    settings: dict[str, Any] = field(default_factory=dict)
    hbm: str = "96KiB"
    recompute: bool = False
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    thaws: bool = False
    most: float = 0.5


class Net(nn.Module):
    """A few blocks, a buffer that forward writes, a weight that is used twice."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.LayerNorm(24)) for _ in range(4)
        )
        self.norm = nn.BatchNorm1d(24)
        self.head = nn.Linear(24, 8)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.recompute and self.training:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return self.head(x + x.detach().mean())


PROGRAMS = {
    p.name: p
    for p in (
        Program("dram", policy={"params": "dram"}),
        Program("roomy", hbm="4MiB"),
        Program(
            "nvme",
            nvme=True,
            policy={"params": "nvme", "grads": "dram", "optimizer": "nvme"},
            recompute=True,
        ),
        Program("forward", settings={"overlap": "forward"}),
        Program("backward", settings={"overlap": "backward"}),
        Program(
            "masters",
            dtype=torch.bfloat16,
            settings={"master_dtype": torch.float32, "grad_dtype": torch.float32},
        ),
        Program("host", settings={"where": "host"}, optimizer=torch.optim.SGD),
        Program(
            "activations",
            policy={"activations": "dram"},
            options={"activation_min": 1024},
            optimizer=torch.optim.SGD,
        ),
        Program("hbm", policy={"params": "hbm", "grads": "dram", "optimizer": "dram"}),
        Program("both", settings={"where": "both", "host_share": 0.5}),
        Program(
            "host files",
            nvme=True,
            policy={"params": "dram", "grads": "dram", "optimizer": "nvme", "master": "nvme"},
            dtype=torch.bfloat16,
            settings={"where": "host", "overlap": "forward", "master_dtype": torch.float32},
        ),
        Program("host backward", settings={"where": "host", "overlap": "backward"}),
        Program("thawing", thaws=True),
        Program(
            "ahead",
            dtype=torch.bfloat16,
            settings={"master_dtype": torch.float32},
            most=1e6,  # so that steps inside backward are confirmed
        ),
    )
}

PHASES = (
    "open",
    "wrap",
    "optimizer",
    "forward",
    "backward",
    "clip",
    "step",
    "zero",
    "eval",
    "state",
    "pickle",
    "load",
    "export",
    "restore",
    "materialize",
    "unwrap",
    "close",
)
_IN_TRAINING = frozenset(PHASES[3:-2])


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
        kind: ``"same"``, ``"wrong"``, ``"stuck"``, ``"refused"`` or ``"leaked"``.
        why: What was seen.
        result: Weights, state and losses.
    """

    kind: str
    why: str = ""
    result: Any = None


class Run:
    """One run of a program, cut short once in one of its phases."""

    def __init__(
        self,
        program: Program,
        folder: Path,
        phase: str = "",
        around: Callable[[Callable[[], Any]], Any] | None = None,
        which: int = 2,
    ) -> None:
        """Describes a run.

        Args:
            program: What runs.
            folder: For swap files.
            phase: Which call ``around`` is put around.
            around: Makes the call, and cuts it short.
            which: In which training step; the third is the first with steps inside backward.
        """
        self.program = program
        self.folder = folder
        self.phase = phase
        self.around = around
        self.which = which
        self.step = 0
        self.watch: Callable[[str, Callable[[], Any]], Any] | None = None
        self.cut = ""
        self.losses: list[float] = []
        self.eval: list[torch.Tensor] = []
        self.tier: Any = None
        self.net: Any = None
        self.plain: Any = None
        self.optimizer: Any = None

    # -- the program ---------------------------------------------------------

    def open(self) -> None:
        p = self.program
        self.tier = tiermem.TierManager(
            device="cpu",
            hbm=p.hbm,
            dram="8MiB",
            nvme=str(self.folder) if p.nvme else None,
            policy=p.policy or None,
            **p.options,
        )

    def wrap(self) -> None:
        try:
            self.tier.wrap(self.plain)
        except tiermem.WrapError:
            if not self.cut:
                raise
            self.tier.unwrap(self.plain)  # it was wrapped after all
            self.tier.wrap(self.plain)
        self.net = self.plain

    def make_optimizer(self) -> None:
        self.optimizer = self.tier.optimizer(
            self.net, self.program.optimizer, lr=0.01, **self.program.settings
        )

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        seed(100 + self.step)
        dtype = self.program.dtype
        return torch.randn(6, 24).to(dtype), torch.randn(6, 8).to(dtype)

    def forward(self) -> torch.Tensor:
        x, y = self.batch()
        return (self.net(x) - y).pow(2).mean()

    def evaluate(self) -> torch.Tensor:
        self.net.eval()
        try:
            with torch.no_grad():
                return self.net(self.batch()[0])
        finally:
            self.net.train()

    def materialized(self) -> None:
        with self.tier.materialize(self.net.head), torch.no_grad():
            self.net.head.bias.copy_(self.net.head.bias.clamp(-0.5, 0.5))

    def micro_batch(self) -> None:
        while True:
            cut = self.cut
            loss = self.do("forward", self.forward)
            if self.cut != cut:
                self.optimizer.zero_grad()
                continue
            self.do("backward", loss.backward)
            if self.cut != cut:
                del loss
                self.again(self.optimizer.zero_grad)
                continue
            if self.program.settings.get("overlap") != "backward":
                self.do("clip", lambda: self.optimizer.clip_grad_norm_(self.program.most))
                if self.cut != cut:
                    self.optimizer.zero_grad()
                    continue
            self.losses.append(loss.item())
            return

    def again(self, call: Callable[[], Any]) -> None:
        """Makes a call once more where an error says that something else has to be called."""
        try:
            call()
        except tiermem.StepError as error:
            if "step() " not in str(error) or self.program.settings.get("overlap") == "backward":
                raise
            self.optimizer.step()
            call()

    def until_done(self, name: str, call: Callable[[], Any]) -> Any:
        while True:
            cut = self.cut
            result = self.do(name, call)
            if self.cut == cut:
                return result

    def do(self, name: str, call: Callable[[], Any]) -> Any:
        """Makes one call, cut short where that is due."""
        if name in _IN_TRAINING and self.step != self.which:
            return call()
        if self.watch is not None:
            return self.watch(name, call)
        if name != self.phase or self.around is None or self.cut:
            return call()
        try:
            return self.around(call)
        except (*_INTERRUPTS, ctypes.ArgumentError) as error:  # ctypes makes that of any other
            self.cut = f"{name}: {type(error).__name__}"
            del error
            return None

    def run(self) -> Any:
        """Runs the program; returns weights, state and losses."""
        seed(7)
        self.plain = Net(self.program.recompute).to(self.program.dtype)
        self.plain.layers[1].requires_grad_(not self.program.thaws)
        self.until_done("open", self.open)
        try:
            self.until_done("wrap", self.wrap)
            self.until_done("optimizer", self.make_optimizer)
            for self.step in range(_STEPS):
                if self.step == self.which:
                    self.plain.layers[1].requires_grad_(True)
                self.micro_batch()
                self.until_done("step", self.optimizer.step)
                self.until_done("zero", self.optimizer.zero_grad)
                self.eval.append(self.until_done("eval", self.evaluate))
                if self.step == self.which:
                    self.look()
            if hasattr(self.optimizer, "finish"):
                self.optimizer.finish()
            state = self.optimizer.state_dict()["state"]
            self.check_rest()
            self.leave()
            weights = {k: v.clone() for k, v in self.plain.state_dict().items()}
            assert all(type(p) is nn.Parameter for p in self.plain.parameters())
            self.tier.wrap(self.plain)
            self.eval.append(self.evaluate())
            self.tier.unwrap(self.plain)
            self.check_rest(empty=True)
        finally:
            if sys.exc_info()[0] is None:
                self.until_done("close", self.tier.close)
            else:
                self.tier.close()
        return self.losses, weights, state, self.eval

    def look(self) -> None:
        """Takes states out and puts them in again, and writes weights by hand."""
        weights = self.until_done("state", lambda: self.net.state_dict())
        pickled = pickle.loads(self.until_done("pickle", lambda: pickle.dumps(self.net)))
        assert all(same_bits(weights[key], value) for key, value in pickled.state_dict().items())
        weights = {
            key: value * 0.5 if value.dim() == 2 else value for key, value in weights.items()
        }
        self.until_done("load", lambda: self.net.load_state_dict(weights))
        state = self.until_done("export", self.optimizer.state_dict)
        for group in state["param_groups"]:
            group["lr"] *= 0.5
        for kept in state["state"].values():
            for key, value in kept.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    kept[key] = value * 0.5
        self.until_done("restore", lambda: self.optimizer.load_state_dict(state))
        self.until_done("materialize", self.materialized)

    def leave(self) -> None:
        self.optimizer.close()

        def unwrap() -> None:
            try:
                self.tier.unwrap(self.plain)
            except tiermem.WrapError:
                if not self.cut:
                    raise

        self.until_done("unwrap", unwrap)
        self.net = self.plain

    # -- what is left ----------------------------------------------------------

    def check_rest(self, *, empty: bool = False) -> None:
        """Fails where something is held or taken that should not be, with nothing under way."""
        gc.collect()
        manager = self.tier._manager
        taken: list[bool] = []

        def other() -> None:
            taken.append(manager.lock.acquire(timeout=5))
            if taken[0]:
                manager.lock.release()

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        if not taken[0]:
            raise Left("the lock is held")
        self.tier._runtime.backward.end()
        manager.flush()
        manager.parts.table.check()
        for record in manager.parts.table:
            resident = record.block.role.name == "BUFFER" and record.fixed
            if record.leases != (1 if resident else 0):
                raise Left(f"{record.block.name} has {record.leases} leases")
        if manager.parts.table.orphans():
            raise Left(f"orphans {manager.parts.table.orphans()}")
        for reclaim in manager.parts.homes.reclaimers:
            reclaim()
        homes = [r for r in manager.parts.table if r.home_extent is not None]
        dram = sum(r.home_extent.nbytes for r in homes if r.home.value == "dram")
        rooms = manager.parts.homes.owned()  # of the host's steps
        dram += sum(extent.nbytes for tier, extent in rooms if tier.value == "dram")
        staging = 0 if manager.parts.homes.staging is None else manager.parts.homes.staging.numel()
        store = self.tier._runtime.activations.store
        if store is None and manager.parts.homes.dram.used != dram + staging:
            raise Left(f"dram: {manager.parts.homes.dram.used} used, {dram + staging} known")
        nvme = sum(r.home_extent.nbytes for r in homes if r.home.value == "nvme")
        if manager.parts.homes.nvme_used != nvme:
            raise Left(f"nvme: {manager.parts.homes.nvme_used} used, {nvme} known")
        if empty and len(manager.parts.table):
            raise Left(f"blocks left: {[r.block.name for r in manager.parts.table]}")
        if empty and rooms:
            raise Left(f"rooms left: {rooms}")
        if torch._C._autograd and _pair() is not None:
            raise Left("saved-tensor hooks are left in force")
        if not torch.is_grad_enabled():
            raise Left("gradients are left off")


class Left(Exception):
    """Something is left behind."""


def _pair() -> Any:
    from tiermem.nn.compat.hookpair import top_pair

    return top_pair()


@contextmanager
def patience(seconds: int = _PATIENCE) -> Iterator[None]:
    """Raises where what runs inside does not come to an end."""

    def ring(*_: object) -> None:
        raise Hung(f"not over after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


_natures: dict[str, Any] = {}
_probes: dict[str, StateProbe] = {}


@contextmanager
def tried_once() -> Iterator[None]:
    """Caches the trials of optimizer classes for all runs: they are half of a run's time."""

    def nature(name: str, make: Any, settings: Any, dims: Any, dtypes: Any, *rest: Any) -> Any:
        key = repr((name, settings, dims, dtypes))
        if key not in _natures:
            _natures[key] = check_separable(name, make, settings, dims, dtypes, *rest)
        return _natures[key]

    def probe(make: Any, device: torch.device, *, sparse: bool) -> StateProbe:
        kind = make([{"params": [nn.Parameter(torch.zeros(1))]}])
        key = repr((type(kind), kind.defaults, sparse))
        if key not in _probes:
            _probes[key] = StateProbe(make, device, sparse=sparse)
        return _probes[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tried, "check_separable", nature)
        patch.setattr(tried, "StateProbe", probe)
        yield


def record(
    program: Program, folder: Path, phases: Collection[str] = PHASES, *, calls: bool = False
) -> tuple[Any, dict[str, Counter[Any]]]:
    """Runs a program that is not cut short.

    Args:
        program: What runs.
        folder: For swap files.
        phases: The calls whose lines are wanted.
        calls: Whether the points are not lines, but where a call has returned.

    Returns:
        What it ends with, and how often each line is come to in each of those calls.
    """
    seen: dict[str, Counter[Any]] = {}

    def around(name: str, call: Callable[[], Any]) -> Any:
        if name not in phases:
            return call()
        with Tracer(depth=0, calls=calls) as tracer:
            seen[name] = tracer.seen
            return call()

    run = Run(program, folder)
    run.watch = around
    result = run.run()
    gc.collect()
    gc.freeze()  # what there is already, also what was imported, is not looked at in every run
    return result, seen


class Signal:
    """Sends a signal at a random time during a call; its handler raises.

    Attributes:
        raised: Whether the handler raised.
    """

    def __init__(self, rng: random.Random, longest: float) -> None:
        """Draws the time.

        Args:
            rng: Draws it.
            longest: Seconds that the call takes, about.
        """
        self.delay = rng.random() * longest
        self.raised = False
        self._armed = False

    def __call__(self, call: Callable[[], Any]) -> Any:
        """Makes the call."""
        before = signal.signal(signal.SIGUSR1, self._ring)
        over = threading.Event()
        main = threading.get_ident()

        def ring() -> None:
            if not over.wait(self.delay):
                signal.pthread_kill(main, signal.SIGUSR1)

        thread = threading.Thread(target=ring)
        self._armed = True
        thread.start()
        try:
            return call()
        finally:
            self._armed = False
            over.set()
            thread.join()
            signal.signal(signal.SIGUSR1, before)

    def _ring(self, *_: object) -> None:
        if self._armed and not self.raised:
            self.raised = True
            raise Interrupt


def outcome(program: Program, folder: Path, run: Run, expected: Any) -> Outcome:
    """Runs a program and compares."""
    files, threads = open_files(), set(threading.enumerate())
    unraisable: list[str] = []
    before, sys.unraisablehook = sys.unraisablehook, lambda u: unraisable.append(str(u.exc_value))
    try:
        with patience():
            result = run.run()
    except Hung as error:
        return Outcome("stuck", repr(error))
    except Left as error:
        return Outcome("leaked", repr(error))
    except InvariantError as error:
        return Outcome("stuck", repr(error) + _where(error))
    except TierError as error:
        return Outcome("refused", repr(error) + _where(error))
    except BaseException as error:
        where = _where(error)
        # what comes up in the class's own step, inside backward, is raised by step() (ADR 17)
        kept = isinstance(error, MemoryError) and "<plainstep.py" in where
        return Outcome("refused" if kept else "stuck", repr(error)[:300] + where)
    finally:
        sys.unraisablehook = before
        torch.set_grad_enabled(True)
        while _pair() is not None:  # not to be met by the next run
            torch._C._autograd._pop_saved_tensors_default_hooks()
    mine, theirs = list(leaves(result)), list(leaves(expected))
    if [p for p, _ in mine] != [p for p, _ in theirs]:
        return Outcome("wrong", "other structure")
    for (path, a), (_, b) in zip(mine, theirs, strict=True):
        same = same_bits(a, b) if isinstance(a, torch.Tensor) else a == b
        if not same:
            return Outcome("wrong", path)
    run.optimizer = run.net = run.plain = run.tier = run.around = None
    gc.collect()
    if open_files() - files:
        return Outcome("leaked", f"files {open_files() - files}")
    if set(threading.enumerate()) - threads:
        return Outcome("leaked", f"threads {set(threading.enumerate()) - threads}")
    return Outcome("same", run.cut)


def _where(error: BaseException) -> str:
    step = error.__traceback__
    found = []
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        found.append(f"{os.path.basename(file)}:{step.tb_lineno}")
        step = step.tb_next
    return " at " + "<".join(found[::-1][:5])


def interrupted(
    program: Program,
    folder: Path,
    phase: str,
    site: Site,
    expected: Any,
    error: Callable[[], BaseException] = Interrupt,
    depth: int = 1,
    *,
    calls: bool = False,
) -> Outcome | None:
    """Cuts a program short at one line and has it go on; None where it never came there."""
    hit: list[bool] = []

    def around(call: Callable[[], Any]) -> Any:
        tracer = Tracer(site, error, depth, calls=calls)
        try:
            with tracer:
                return call()
        finally:
            hit.append(tracer.hit)

    found = outcome(program, folder, Run(program, folder, phase, around), expected)
    return found if hit and hit[0] else None
