"""Training steps in virtual time: the real code over a link, a device and a host, without a GPU.

A model is trained as on a GPU, through the engine of CUDA's copies. The driver under it is a
library of a few lines (made by cc) that makes every copy at once, but keeps its own time: of a
stream for each direction, of the compute, and of the host. Layers are narrow, and the link as much
slower; how long they compute, and how long they take the host, is said. So a step takes what it
would on such a machine, to the microsecond the same in each run::

    python benchmarks/bench_steps.py vit layers --hbm 0.25 0.5 --computes 0.05+0.1 0.15+0.4
    python benchmarks/bench_steps.py vit --wait-for-compute
    python benchmarks/bench_steps.py llama --clip --host-step 0.2

``--wait-for-compute`` has copies up wait for all compute that the host has submitted, also where
nothing but a copy down has used their place since. ``--fine`` has the blocks that models have where
the link takes longer for a step than the host. ``--clip`` clips the gradients in each
step, or in each n-th: steps that were made inside backward are dropped then. ``--host-step`` gives
the host its share of the steps.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from bench_uses import OTHER_CALLS, StandInCalls, as_on_cuda, smaller
from common import report
from torch import nn

import tiermem
from tiermem.core.copied import CopiedRuns
from tiermem.nn.groups import blocks
from tiermem.optim.host import devicebits, sides
from tiermem.optim.host.devicebits import ShareTrial
from tiermem.optim.host.exact import Proven
from tiermem.optim.host.factor import Factor
from tiermem.optim.host.job import Job
from tiermem.optim.host.side import HostSide
from tiermem.optim.host.spread import Rates, Traffic
from tiermem.runtime import assembly
from tiermem.runtime.services.sweep import BlockSweep
from tiermem.transfer import driver
from tiermem.transfer.streams import StreamCopyEngine

COMPUTE = 7
"""Handle of the compute stream."""
CALL, LATENCY = 3e-6, 12e-6
"""Seconds of the host for a call of the driver, and of a copy beside its bytes."""
_DRIVER = """
#include <stdlib.h>
#include <string.h>
typedef void *p;
int up, down;
long moved[2];
double now, call, latency, rate, rate_down, ends[256];
static double *when;
static long events, room, streams = 100;
static double at(p s) { double end = ends[(long)s]; return end > now ? end : now; }
int cuEventCreate(p *e, unsigned f) {
  if (++events >= room) { room = 2 * events + 1024; when = realloc(when, room * sizeof *when); }
  when[events] = 0; *e = (p)events; return 0;
}
int cuEventRecord(p e, p s) { now += call; when[(long)e] = at(s); return 0; }
int cuEventQuery(p e) { return when[(long)e] <= now ? 0 : 600; }
int cuEventSynchronize(p e) { if (when[(long)e] > now) now = when[(long)e]; return 0; }
int cuEventElapsedTime(float *t, p a, p b) {
  *t = 1e3 * (when[(long)b] - when[(long)a]); return 0;
}
int cuEventDestroy_v2(p e) { return 0; }
int cuStreamCreateWithPriority(p *s, unsigned f, int r) { *s = (p)(++streams); return 0; }
int cuStreamWaitEvent(p s, p e, p f) {
  now += call; if (ends[(long)s] < when[(long)e]) ends[(long)s] = when[(long)e]; return 0;
}
int cuMemcpyAsync(p t, p f, p b, p s) {
  memcpy(t, f, (size_t)b); now += call; moved[(long)s == down] += (long)b;
  ends[(long)s] = at(s) + latency + (long)b / ((long)s == down ? rate_down : rate); return 0;
}
void computes(double host, double device) { now += host; ends[7] = at((p)7) + device; }
void wait_for(long s) { if (ends[s] > now) now = ends[s]; }
"""


class Machine:
    """The device, the link and the host, as the library keeps their time.

    Attributes:
        calls: The driver's calls.
        engine: Makes copies by them.
        rates: Bytes a second of the link, up and down.
    """

    def __init__(self, rates: tuple[float, float]) -> None:
        """Makes the library.

        Args:
            rates: Bytes a second of the link, up and down.
        """
        self.rates = rates
        self.calls = StandInCalls(torch.device("cuda", 0), _DRIVER + OTHER_CALLS)
        self._library: Any = self.calls._lib
        up, down, files = (self.calls.new_stream() for _ in "abc")
        self.engine = StreamCopyEngine(self.calls, up, down, files)
        values = {"call": CALL, "latency": LATENCY, "rate": rates[0], "rate_down": rates[1]}
        for name, value in values.items():
            self._double(name).value = value
        for name, stream in (("up", up), ("down", down)):
            ctypes.c_int.in_dll(self._library, name).value = stream
        self._moved = (ctypes.c_long * 2).in_dll(self._library, "moved")

    @property
    def now(self) -> float:
        """Seconds of the host's time so far."""
        return self._double("now").value

    @now.setter
    def now(self, seconds: float) -> None:
        self._double("now").value = seconds

    @property
    def computed(self) -> float:
        """When the compute submitted so far is over."""
        ends: float = (ctypes.c_double * 256).in_dll(self._library, "ends")[COMPUTE]
        return max(self.now, ends)

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes up and down so far."""
        return self._moved[0], self._moved[1]

    def computes(self, host: float, device: float) -> None:
        """Has the host submit work for so many seconds that takes the device so many."""
        self._library.computes(ctypes.c_double(host), ctypes.c_double(device))

    def wait(self) -> None:
        """Has the host wait for the compute, as a look at the loss does."""
        self._library.wait_for(ctypes.c_long(COMPUTE))

    def _double(self, name: str) -> Any:
        return ctypes.c_double.in_dll(self._library, name)


class HostThread:
    """Has the host step a share, in a thread that makes one step after another.

    A step is made at once, and seen to be over when the host's time has come to its end. The loop's
    bits are taken for the device's.
    """

    def __init__(self, machine: Machine, seconds: float) -> None:
        """Begins with nothing to do.

        Args:
            machine: Keeps the time.
            seconds: That it takes for an element.
        """
        self._machine, self._seconds = machine, seconds
        self._free = 0.0
        self._ends: dict[int, tuple[float, Job]] = {}
        self._factors: dict[int, float] = {}

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Has the host have its share in all steps, inside ``with``."""
        names = {
            HostSide: ("begin", "_await"),
            Job: ("succeeded", "finish"),
            Factor: ("__init__", "value"),
        }
        with ExitStack() as stack:
            for cls, methods in names.items():
                for name in methods:
                    made = getattr(self, f"_{cls.__name__.lower()}_{name.strip('_')}")
                    method = self._around(made, getattr(cls, name))
                    stack.enter_context(mock.patch.object(cls, name, method))
            for owner, name, new in (
                (sides, "measure_both", self._measure_both),
                (sides, "_LEAST", 0),
                (devicebits, "prove", lambda kind, *_: Proven(kind.flavour, 0x7FC0, _Offsets())),
                (ShareTrial, "host_has_share", self._has_share),
            ):
                stack.enter_context(mock.patch.object(owner, name, new))
            yield

    @staticmethod
    def _around(made: Any, own: Any) -> Any:
        return lambda this, *args: made(own, this, *args)

    def _measure_both(self, *args: Any) -> Rates:
        traffic = next(found for found in args if isinstance(found, Traffic))
        both = self._machine.rates
        host, device, passing = self._seconds, traffic.device, traffic.passing
        return Rates(host, device / sum(both), passing / sum(both), both_ways=both)

    @staticmethod
    def _has_share(trial: ShareTrial, _ticket: object) -> bool:
        trial.is_on = True
        return True

    def _hostside_begin(self, own: Any, side: HostSide, runtime: Any, job: Job, pool: Any) -> None:
        before = self._machine.now
        own(side, runtime, job, pool)
        job.future.exception()  # type: ignore[union-attr]
        began = max(self._free, self._machine.now)  # it has waited for its gradients
        self._machine.now = before
        elements = sum(param.numel() for param, _ in side.unit.members)
        self._free = began + elements * self._seconds
        self._ends[id(job)] = self._free, job

    def _hostside_await(self, own: Any, side: HostSide, runtime: Any, job: Job) -> None:
        own(side, runtime, job)
        self._wait_for(job)

    def _job_succeeded(self, own: Any, job: Job) -> bool:
        return bool(own(job)) and self._end(job) <= self._machine.now

    def _job_finish(self, own: Any, job: Job) -> None:
        own(job)
        self._wait_for(job)

    def _factor_init(self, own: Any, factor: Factor, by: torch.Tensor) -> None:
        own(factor, by)
        self._factors[id(factor)] = self._machine.computed

    def _factor_value(self, own: Any, factor: Factor) -> float:
        self._machine.now = max(self._machine.now, self._factors[id(factor)])
        return float(own(factor))

    def _end(self, job: Job) -> float:
        return self._ends[id(job)][0] if id(job) in self._ends else 0.0

    def _wait_for(self, job: Job) -> None:
        self._machine.now = max(self._machine.now, self._end(job))


class _Offsets(dict[float, int]):
    """Those of any betas."""

    def __missing__(self, _beta: float) -> int:
        return 0


class _Work(torch.autograd.Function):
    """Has a layer compute, forward and backward; returns its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Layer) -> torch.Tensor:
        ctx.layer = layer
        layer.machine.computes(layer.host[0], layer.device[0])
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        layer = ctx.layer
        layer.machine.computes(layer.host[1], layer.device[1])
        return gradient, None


class Layer(nn.Module):
    """Matrices one after another, each an attribute as in most models, with a time.

    Attributes:
        machine: Keeps the time.
        device: Seconds that it computes, forward and backward.
        host: Seconds that the host takes for it.
    """

    def __init__(self, widths: list[int], matrices: int = 1) -> None:
        super().__init__()
        pairs = list(pairwise(widths)) * matrices
        for number, pair in enumerate(pairs):
            setattr(self, f"part{number}", nn.Linear(*pair))
        self.machine: Machine
        self.device = self.host = (0.0, 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Runs them.

        Args:
            x: (batch, width).
        """
        y = x
        for part in self.children():
            y = part(y)
        return _Work.apply(x + y, self)  # type: ignore[no-any-return, no-untyped-call]


class End(Layer):
    """An embedding or a head: a large matrix that both have.

    Attributes:
        weight: (width, vocabulary).
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__([])
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Uses the matrix.

        Args:
            x: (batch, width).
        """
        return _Work.apply(x + x @ self.weight @ self.weight.T, self)  # type: ignore[no-any-return, no-untyped-call]


class Experts(Layer):
    """Experts that are stacked in two parameters, all of them used.

    Attributes:
        first: (experts, width, 2 * hidden).
        second: (experts, hidden, width).
    """

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__([])
        self.first = nn.Parameter(torch.rand(experts, width, 2 * hidden) / width)
        self.second = nn.Parameter(torch.rand(experts, hidden, width) / hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Runs all of them.

        Args:
            x: (batch, width).
        """
        gate, up = (x @ self.first).chunk(2, dim=-1)
        return _Work.apply(x + (gate * up @ self.second).sum(0), self)  # type: ignore[no-any-return, no-untyped-call]


def vit() -> tuple[list[Layer], list[float], int]:
    """Returns 64 layers, their shares of the compute, and by what their weights are smaller."""
    layers = [part for _ in range(32) for part in (Layer([80, 80], 4), Layer([80, 320, 80]))]
    return layers, [1 / 3 / 32, 2 / 3 / 32] * 32, 250


def small() -> tuple[list[Layer], list[float], int]:
    """Returns 120 small layers likewise."""
    return [Layer([64, 64, 64]) for _ in range(120)], [1 / 120] * 120, 800


def llama() -> tuple[list[Layer], list[float], int]:
    """Returns 28 layers in two parts between an embedding and a head, likewise."""
    ends = [Layer([96, 560, 96]), Layer([96, 560, 96])]
    layers = [part for _ in range(28) for part in (Layer([96, 96], 4), Layer([96, 384, 96]))]
    parts = [1 / 3 / 30, 2 / 3 / 30] * 28
    return [ends[0], *layers, ends[1]], [0.01, *parts, 1 / 15 - 0.01], 500


def tied() -> tuple[list[Layer], list[float], int]:
    """Returns 18 layers in two parts between an embedding and a head of one matrix, likewise."""
    matrix = nn.Parameter(torch.rand(96, 2240))
    layers = [part for _ in range(18) for part in (Layer([96, 96], 4), Layer([96, 384, 96]))]
    parts = [0.25 / 18, 0.5 / 18] * 18
    return [End(matrix), *layers, End(matrix)], [0.01, *parts, 0.24], 206


def experts() -> tuple[list[Layer], list[float], int]:
    """Returns 6 layers of attention and 8 stacked experts, likewise."""
    layers = [part for _ in range(6) for part in (Layer([120, 120], 4), Experts(8, 120, 245))]
    return layers, [0.1 / 6, 0.9 / 6] * 6, 250


MODELS = {"vit": vit, "layers": small, "llama": llama, "tied": tied, "experts": experts}


@contextmanager
def on(machine: Machine) -> Iterator[None]:
    """Gives managers of the CPU the engine of a machine, and has them write as on CUDA."""
    kept = driver._current_device, assembly.HostCopyEngine, BlockSweep.__init__, CopiedRuns.was
    bind = blocks.steps_bind
    begin = BlockSweep.__init__

    def as_there(self: BlockSweep, manager: Any) -> None:
        begin(self, manager)
        self._dram = True

    driver._current_device = lambda: 0
    assembly.HostCopyEngine = lambda: machine.engine  # type: ignore[misc, assignment]
    BlockSweep.__init__ = as_there  # type: ignore[method-assign]
    try:
        yield
    finally:
        driver._current_device, assembly.HostCopyEngine = kept[:2]  # type: ignore[misc]
        BlockSweep.__init__, CopiedRuns.was = kept[2:]  # type: ignore[method-assign]
        blocks.steps_bind = bind


def measure(name: str, share: float, computes: str, options: argparse.Namespace) -> dict[str, Any]:
    """Trains one model in virtual time; returns its row.

    Args:
        name: Of the model.
        share: HBM, as a part of the weights' bytes.
        computes: Seconds of a forward and of a backward, ``0.05+0.1``.
        options: Of the command line.
    """
    device = [float(part) for part in computes.split("+")]
    torch.manual_seed(0)
    layers, parts, by = MODELS[name]()
    model = nn.Sequential(*layers)
    if options.masters:  # half as many bytes, so twice as many times as small
        model, by = model.bfloat16(), 2 * by
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    down = options.rate_down or options.rate
    machine = Machine((options.rate * 1e9 / by, down * 1e9 / by))
    for layer, part in zip(layers, parts, strict=True):
        layer.machine = machine
        layer.device = device[0] * part, device[1] * part
        layer.host = options.host[0] / len(layers), options.host[1] / len(layers)
    hbm, dram = int(nbytes * share) // 4096 * 4096, 20 * nbytes + (1 << 24)
    on_host = options.host_step
    host = HostThread(machine, on_host * by / 1e9).at_work() if on_host else nullcontext()
    with (
        on(machine),
        host,
        smaller(by),
        tiermem.TierManager("cpu", hbm=hbm, dram=dram) as tier,
    ):
        if options.wait_for_compute:
            CopiedRuns.was = lambda self, start: False  # type: ignore[method-assign]
        if options.fine:
            blocks.steps_bind = lambda *_: False  # type: ignore[assignment]
        as_on_cuda(tier, by)
        estimates = tier._manager.parts.pass_timer.estimates
        for rate in ("rate", "best_rate"):  # what is measured is by the real clock
            setattr(estimates, rate, lambda *_: options.rate * 1e9 / by)
        estimates.computes = lambda key: device["backward" in repr(key)]  # type: ignore[method-assign]
        tier.wrap(model)
        settings = {"fused": True} if on_host else {}  # as foreach, a CPU has no such steps
        settings |= {"master_dtype": torch.float32} if options.masters else {}
        optimizer = tier.optimizer(
            model, torch.optim.AdamW, lr=1e-4, overlap=options.overlap, **settings
        )
        width = next(p for layer in layers for p in layer.children()).in_features
        x = torch.rand(1, width, dtype=next(model.parameters()).dtype)
        last = options.steps // 2
        for number in range(options.steps):
            if number == last:
                began, before = machine.now, machine.moved
            model(x).square().mean().backward()
            if options.clip:
                most = 1e9 if number % options.clip else 1e-9
                nn.utils.clip_grad_norm_(model.parameters(), most)
            optimizer.step()
            optimizer.zero_grad()
            machine.wait()
        count = options.steps - last
        seconds = (machine.now - began) / count
        up, down = ((b - a) / count for a, b in zip(before, machine.moved, strict=True))
        tier.close(discard=True)
    link = max(n / rate for n, rate in zip((up, down), machine.rates, strict=True))
    return {
        "model": name,
        "hbm": share,
        "computes ms": 1e3 * sum(device),
        "busiest link ms": 1e3 * link,
        "step ms": 1e3 * seconds,
        "of the larger": max(sum(device), link) / seconds,
        "up, weights": up / nbytes,
        "down, weights": down / nbytes,
    }


def main() -> None:
    """Measures the models that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=[*MODELS])
    parser.add_argument("--hbm", type=float, nargs="+", default=[0.5], help="of the weights")
    parser.add_argument("--computes", nargs="+", default=["0.05+0.1", "0.15+0.4"], help="seconds")
    parser.add_argument("--host", type=float, nargs=2, default=[0.03, 0.09], help="seconds")
    parser.add_argument("--rate", type=float, default=49, help="GB/s of the link, up")
    parser.add_argument("--rate-down", type=float, help="the same down; as up where left out")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--clip", type=int, nargs="?", const=1, help="in each n-th step")
    parser.add_argument(
        "--host-step", type=float, help="seconds of the host for 10**9 elements, of its share"
    )
    parser.add_argument("--masters", action="store_true", help="float32 masters, bfloat16 weights")
    parser.add_argument("--overlap", choices=("auto", "forward"), default="auto")
    parser.add_argument("--wait-for-compute", action="store_true")
    parser.add_argument("--fine", action="store_true")
    parser.add_argument("--out", help="JSON file; the same as Markdown beside it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        measure(name, share, computes, options)
        for name in options.models
        for share in options.hbm
        for computes in options.computes
    ]
    report("Training steps in virtual time", rows, options.out)


if __name__ == "__main__":
    main()
