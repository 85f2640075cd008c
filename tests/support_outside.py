"""Faults from outside of a process: refused system calls, limits, cgroups and real file systems.

What is tried runs in a process of its own, which says what it saw. Nothing here is a double.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import os
import platform
import shutil
import signal
import subprocess
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import tiermem

_NO_NEW_PRIVILEGES = 38  # PR_SET_NO_NEW_PRIVS
_SET_FILTER, _ALL_THREADS = 1, 1  # SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # classic BPF
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_CALLS = {
    "x86_64": {"seccomp": 317, "fcntl": 72, "clone": 56},
    "aarch64": {"seccomp": 277, "fcntl": 25, "clone": 220},
}
_EVERYWHERE = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "clone3": 435,
}


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jt", ctypes.c_uint8),
        ("jf", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.c_void_p))


def refuse_calls(calls: Mapping[str, int]) -> None:
    """Makes the kernel refuse system calls to every thread of this process from now on.

    Args:
        calls: Names of calls and the error numbers that they get.
    """
    numbers = {**_CALLS[platform.machine()], **_EVERYWHERE}
    steps = [(_LOAD, 0, 0, 0)]
    for name, code in calls.items():
        steps += [(_IF_EQUAL, 0, 1, numbers[name]), (_RETURN, 0, 0, _ERRNO | code)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    array = (_Instruction * len(steps))(*(_Instruction(*step) for step in steps))
    program = _Program(len(steps), ctypes.addressof(array))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if libc.syscall(numbers["seccomp"], _SET_FILTER, _ALL_THREADS, ctypes.byref(program)) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


def needs_filters() -> None:
    """Skips the test where the kernel takes no seccomp filter."""
    if platform.machine() not in _CALLS:
        pytest.skip(f"no numbers of system calls for {platform.machine()}")
    try:
        told = apart(lambda: refuse_calls({"fcntl": errno.EPERM})).status
    except OSError as error:
        pytest.skip(f"no process of its own here: {error}")
    if told:
        pytest.skip("the kernel takes no seccomp filters here")


# Processes ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How a process ended: exit status (negative for a signal), and what it said."""

    status: int
    said: str


class Apart:
    """A forked process that runs a function; what that returns or raises is what it says.

    It has its own limits, filters and cgroup, and opens tiers of its own.
    """

    def __init__(self, inside: Callable[[], object], group: Path | None = None) -> None:
        torch.optim.SGD([torch.zeros(1)])  # imports the compiler, which no child need do again
        self._out, into = os.pipe()
        gc.collect()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._out)
            self._run(inside, into, group)
        os.close(into)

    @staticmethod
    def _run(inside: Callable[[], object], into: int, group: Path | None) -> None:
        code = 1
        signal.alarm(120)
        try:
            torch.set_num_threads(1)
            if group is not None:
                group.write_text(str(os.getpid()))
            said = inside()
            os.write(into, str(said).encode())
            code = 0
        except BaseException:
            os.write(into, traceback.format_exc().encode()[-60_000:])
        finally:
            os._exit(code)

    def send(self, number: int) -> None:
        """Sends it a signal."""
        os.kill(self.pid, number)

    def outcome(self) -> Outcome:
        """Waits for its end."""
        with os.fdopen(self._out, "rb") as file:
            said = file.read().decode()
        return Outcome(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), said)


def apart(inside: Callable[[], object], group: Path | None = None) -> Outcome:
    """Runs a function in a process of its own, in a cgroup's file of processes if one is given."""
    return Apart(inside, group).outcome()


def check(inside: Callable[[], object], group: Path | None = None) -> str:
    """Does that with one that has to end well; returns what it said."""
    outcome = apart(inside, group)
    assert outcome.status == 0, f"status {outcome.status}\n{outcome.said}"
    return outcome.said


# A model, tiered and not ---------------------------------------------------------------


def net(width: int = 64, layers: int = 4) -> nn.Sequential:
    """Returns the same model each time."""
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


class Pair:
    """A model in the tiers and its resident twin, trained alike."""

    def __init__(self, tier: tiermem.TierManager, width: int = 64, layers: int = 4) -> None:
        self.tier = tier
        self.plain, self.model = net(width, layers), tier.wrap(net(width, layers))
        self.optimizers = (
            torch.optim.SGD(self.plain.parameters(), 0.1, 0.9),
            tier.optimizer(self.model, torch.optim.SGD, lr=0.1, momentum=0.9),
        )
        self.width = width
        self.steps = 0

    def tiered_step(self) -> None:
        """Trains the tiered one by a step."""
        self._step(self.model, self.optimizers[1])

    def train(self, steps: int) -> None:
        """Trains both."""
        for _ in range(steps):
            self.tiered_step()
            self.plain_step()

    def plain_step(self) -> None:
        """Trains the resident one by a step."""
        self._step(self.plain, self.optimizers[0])
        self.steps += 1

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(self.steps)
        optimizer.zero_grad()
        model(torch.randn(4, self.width)).square().mean().backward()
        optimizer.step()

    def compare(self) -> None:
        """Fails where they differ in any bit."""
        mine, theirs = self.model.state_dict(), self.plain.state_dict()
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(mine[name], value), name


# File systems ------------------------------------------------------------------------

_MAKE = {
    "ext4": ["mkfs.ext4", "-q", "-F", "-m", "0"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
    "btrfs": ["mkfs.btrfs", "-q", "-f"],
}
LEAST = {"ext4": 32 << 20, "xfs": 320 << 20, "btrfs": 128 << 20}
"""Bytes of the smallest file system of each kind that is of use."""


@contextmanager
def mounted(
    kind: str, folder: Path, nbytes: int | None = None, image: Path | None = None
) -> Iterator[Path]:
    """Makes a file system on a loop device and mounts it; skips the test where that cannot be.

    Args:
        kind: ``"ext4"``, ``"xfs"``, ``"btrfs"``, or one without a device: ``"ramfs"``, ``"tmpfs"``.
        folder: An empty folder to work in.
        nbytes: Size of the device; the smallest of use by default.
        image: The file behind it; one of real blocks in ``folder`` by default. A sparse one is a
            thin-provisioned disk.

    Yields:
        Where it is mounted.
    """
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    point = folder / kind
    point.mkdir()
    if kind in ("ramfs", "tmpfs"):
        source = ["mount", "-t", kind, "tiermem-test", str(point)]
    else:
        tool = shutil.which(_MAKE[kind][0], path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin")
        if tool is None:
            pytest.skip(f"{_MAKE[kind][0]} is not installed")
        if image is None:
            image = folder / f"{kind}.image"
            with image.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, nbytes or LEAST[kind])
        _or_skip([tool, *_MAKE[kind][1:], str(image)])
        source = ["mount", "-t", kind, "-o", "loop", str(image), str(point)]
    _or_skip(source)
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], capture_output=True, check=False)


def _or_skip(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{' '.join(command[:3])} does not work here: {done.stderr.strip()}")


def shut_down(path: Path) -> None:
    """Shuts a file system down: every access fails (EXT4_IOC_SHUTDOWN, XFS_IOC_GOINGDOWN)."""
    file = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(file, 0x8004587D, (2).to_bytes(4, "little"))
    except OSError as error:
        pytest.skip(f"it cannot be shut down: {error}")
    finally:
        os.close(file)


# Cgroups -----------------------------------------------------------------------------


@contextmanager
def memory_cgroup(nbytes: int) -> Iterator[Path]:
    """Makes a memory cgroup with a limit; yields the file that takes its processes.

    Skips the test where none can be made.
    """
    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / f"tiermem-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(nbytes))
        except OSError:
            group.rmdir()
            continue
        try:
            yield group / "cgroup.procs"
        finally:
            group.rmdir()
        return
    pytest.skip("no memory cgroup can be made here")
