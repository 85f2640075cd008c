"""Doubles and a conformance suite for I/O engines.

``ScriptedEngine`` does real reads and writes in the order and with the faults
that a test requests. ``EngineConformance`` checks that any engine fulfils the interface:
derive a test class from it and define how to create the engine.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tiermem.core.block import ALIGNMENT
from tiermem.errors import ClosedError
from tiermem.io.engine import (
    IoCompletion,
    IoEngine,
    IoOp,
    IoRequest,
    Progress,
    check_request,
    memory_view,
)

_SECONDS = 60.0
"""An upper bound for everything here, even on a slow machine."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one try of one request.

    Attributes:
        errno: Refuse with this number (EIO, EAGAIN, ENOSPC, ...), moving nothing.
        short: Report only this many bytes as moved.
        torn: Write only this many bytes (rounded down to 4,096) but report all of them.
        flip_bit: Flip this bit of the data in transfer.
    """

    errno: int = 0
    short: int | None = None
    torn: int | None = None
    flip_bit: int | None = None


class ScriptedEngine(IoEngine):
    """An engine whose completions come in a chosen order, with chosen faults.

    Args:
        order: Called with the number of pending requests; returns the index of the next to try.
        fault: Called with a request and the number of earlier tries; returns the fault.

    Attributes:
        log: Every request in the order of its tries.
    """

    name = "scripted"

    def __init__(
        self,
        order: Callable[[int], int] | None = None,
        fault: Callable[[IoRequest, int], Fault | None] | None = None,
    ) -> None:
        super().__init__()
        self._order = order or (lambda count: 0)
        self._fault = fault or (lambda request, tries: None)
        self._changed = threading.Condition()
        self._files: list[int] = []
        self._pending: list[tuple[Progress, int]] = []
        self._ready: list[IoCompletion] = []
        self._woken = False
        self._held = False
        self._broken: BaseException | None = None
        self._state = "new"
        self.log: list[IoRequest] = []

    # What tests steer with -----------------------------------------------------------

    def hold(self) -> None:
        """Holds all completions back until :meth:`release`."""
        with self._changed:
            self._held = True

    def release(self) -> None:
        """Ends :meth:`hold`: requests complete again."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def break_with(self, error: BaseException) -> None:
        """Makes the present or next ``wait`` raise, as a failed engine would."""
        with self._changed:
            self._broken = error
            self._changed.notify_all()

    def until_pending(self, count: int, timeout: float = _SECONDS) -> bool:
        """Waits until that many requests are held; returns whether this was reached."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._pending) >= count, timeout)

    # The contract --------------------------------------------------------------------

    def open(self, files: Sequence[int], buffers: Sequence[tuple[int, int]]) -> None:
        """See :meth:`IoEngine.open`."""
        self._check_owner()
        if self._state != "new":
            raise ClosedError("an I/O engine is opened once")
        self._files = list(files)
        self._state = "open"

    @property
    def in_flight(self) -> int:
        """See :meth:`IoEngine.in_flight`."""
        return len(self._pending) + len(self._ready)

    def submit(self, requests: Sequence[IoRequest]) -> None:
        """See :meth:`IoEngine.submit`."""
        self._check_usable()
        for request in requests:
            check_request(request, len(self._files))
        with self._changed:
            self._pending.extend((Progress(request), 0) for request in requests)
            self._changed.notify_all()

    def _check_usable(self) -> None:
        self._check_owner()
        if self._state != "open":
            raise ClosedError("this I/O engine is not open")

    def wait(self, timeout: float | None) -> list[IoCompletion]:
        """See :meth:`IoEngine.wait`."""
        self._check_usable()
        with self._changed:
            while not (self._ready or self._woken):
                if self._broken is not None:
                    raise self._broken
                if self._pending and not self._held:
                    self._try_one()
                elif not self._changed.wait(timeout):
                    break
            self._woken = False
            done, self._ready = self._ready, []
            return done

    def wake(self) -> None:
        """See :meth:`IoEngine.wake`."""
        self._check_owner()
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def cancel(self) -> None:
        """See :meth:`IoEngine.cancel`."""
        self._check_usable()
        with self._changed:
            self._ready.extend(progress.fail(errno.ECANCELED) for progress, _ in self._pending)
            self._pending.clear()

    def close(self) -> None:
        """See :meth:`IoEngine.close`."""
        if os.getpid() == self._pid and self._state == "open":
            self.cancel()
        self._state = "closed"
        self._ready.clear()

    def _try_one(self) -> None:
        index = self._order(len(self._pending)) % len(self._pending)
        progress, tries = self._pending.pop(index)
        self.log.append(progress.request)
        fault = self._fault(progress.request, tries) or Fault()
        try:
            result = -fault.errno if fault.errno else self._move(progress, fault)
        except OSError as error:
            result = -(error.errno or errno.EIO)
        completion = progress.note_result(result)
        if completion is None:
            self._pending.append((progress, tries + 1))
        else:
            self._ready.append(completion)

    def _move(self, progress: Progress, fault: Fault) -> int:
        request = progress.request
        nbytes = request.nbytes - progress.done
        view = memory_view(request.address + progress.done, nbytes)
        offset = request.offset + progress.done
        file = self._files[request.file]
        if request.op is IoOp.READ:
            moved = os.preadv(file, [view], offset)
            if fault.flip_bit is not None and moved:
                flip(view, fault.flip_bit % (8 * moved))
            return moved if fault.short is None else min(moved, fault.short)
        end = min(x for x in (nbytes, fault.short, fault.torn) if x is not None)
        if end < nbytes:
            end = end // ALIGNMENT * ALIGNMENT
        moved = _write(file, view[:end], offset, fault.flip_bit) if end else 0
        if fault.torn is not None and moved == end:
            return nbytes
        return moved if fault.short is None else min(fault.short, nbytes)


def _write(file: int, view: memoryview, offset: int, flip_bit: int | None) -> int:
    if flip_bit is None:
        return os.pwritev(file, [view], offset)
    with mmap.mmap(-1, view.nbytes) as copy:  # page-aligned, as O_DIRECT requires
        copy[:] = view.tobytes()
        with memoryview(copy) as bits:
            flip(bits, flip_bit % (8 * view.nbytes))
            return os.pwritev(file, [bits], offset)


def flip(view: memoryview, bit: int) -> None:
    """Flips one bit of writable memory."""
    view[bit // 8] ^= 1 << (bit % 8)


class Memory:
    """Page-aligned host memory for tests; it exists as long as its view.

    Args:
        nbytes: Length in bytes.

    Attributes:
        address: Of the first byte.
        view: Writable view of the bytes.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        anchor = (ctypes.c_ubyte * nbytes).from_buffer(mmap.mmap(-1, nbytes))
        self.address = ctypes.addressof(anchor)
        self.view = memoryview(anchor).cast("B")


class EngineConformance:
    """Tests that every engine passes. Collected by pytest through a derived class.

    Attributes:
        make_engine: To be defined by the derived class: returns a new, unopened engine.
        folder: Folder for the files; ``None`` keeps them in memory.
    """

    folder: str | None = None
    page = ALIGNMENT

    def make_engine(self) -> IoEngine:
        """Returns a new engine, not opened yet."""
        raise NotImplementedError

    def open_file(self) -> int:
        """Returns the descriptor of a new file without a name."""
        if self.folder is None:
            return os.memfd_create("tiermem-conformance", os.MFD_CLOEXEC)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            return os.dup(file.fileno())

    @contextmanager
    def engine(self, n_files: int = 1, memory: Memory | None = None) -> Iterator[IoEngine]:
        """Yields an opened engine and closes everything after."""
        files = [self.open_file() for _ in range(n_files)]
        engine = self.make_engine()
        try:
            engine.open(files, [(memory.address, memory.nbytes)] if memory else [])
            yield engine
        finally:
            engine.close()
            for file in files:
                os.close(file)

    def run_all(self, engine: IoEngine, requests: Sequence[IoRequest]) -> dict[int, IoCompletion]:
        """Submits requests and returns their completions by token; each comes exactly once."""
        engine.submit(requests)
        found: dict[int, IoCompletion] = {}
        while len(found) < len(requests):
            completions = engine.wait(_SECONDS)
            assert completions, f"{len(requests) - len(found)} completions never came"
            for completion in completions:
                assert completion.token not in found, "a completion came twice"
                found[completion.token] = completion
        assert engine.in_flight == 0
        assert engine.wait(0.0) == []
        return found

    def requests(
        self, op: IoOp, memory: Memory, count: int, nbytes: int, n_files: int = 1
    ) -> list[IoRequest]:
        """Returns requests that cover ``count`` runs of memory, spread over the files."""
        found = []
        for i in range(count):
            offset, address = i // n_files * nbytes, memory.address + i * nbytes
            found.append(IoRequest(op, i % n_files, offset, address, nbytes, i))
        return found

    def test_many_requests_come_back_once_and_whole(self) -> None:
        """Hundreds of writes and reads over several files: one completion each, all bytes."""
        count, nbytes, n_files = 300, 2 * self.page, 3
        memory = Memory(count * nbytes)
        data = os.urandom(memory.nbytes)
        memory.view[:] = data
        with self.engine(n_files, memory) as engine:
            for op in (IoOp.WRITE, IoOp.READ):
                done = self.run_all(engine, self.requests(op, memory, count, nbytes, n_files))
                assert all(c.errno == 0 and c.nbytes == nbytes for c in done.values())
                if op is IoOp.WRITE:
                    memory.view[:] = bytes(memory.nbytes)
        assert memory.view == data

    def test_memory_that_is_not_registered(self) -> None:
        """Memory that was not named at opening works as well."""
        registered, other = Memory(self.page), Memory(self.page)
        other.view[:] = data = os.urandom(self.page)
        with self.engine(1, registered) as engine:
            self.run_all(engine, self.requests(IoOp.WRITE, other, 1, self.page))
            done = self.run_all(engine, self.requests(IoOp.READ, registered, 1, self.page))
        assert done[0].errno == 0
        assert registered.view == data

    def test_reading_past_the_end_is_an_error(self) -> None:
        """Reading beyond a short file gives EIO and the existing bytes, not success."""
        memory = Memory(4 * self.page)
        with self.engine(1, memory) as engine:
            self.run_all(engine, self.requests(IoOp.WRITE, memory, 2, self.page))
            done = self.run_all(engine, self.requests(IoOp.READ, memory, 1, 4 * self.page))
            assert done[0].errno == errno.EIO
            assert done[0].nbytes == 2 * self.page
            done = self.run_all(engine, self.requests(IoOp.READ, memory, 2, self.page))
            assert done[1].errno == 0, "the engine works on after an error"

    def test_a_file_that_cannot_be_read_reports_its_errno(self) -> None:
        """The system's error number is returned."""
        memory = Memory(self.page)
        with tempfile.NamedTemporaryFile(dir=self.folder) as named:
            file = os.open(named.name, os.O_WRONLY | os.O_CLOEXEC)
        engine = self.make_engine()
        try:
            engine.open([file], [])
            done = self.run_all(engine, self.requests(IoOp.READ, memory, 1, self.page))
        finally:
            engine.close()
            os.close(file)
        assert done[0].errno == errno.EBADF

    def test_requests_that_make_no_sense_are_refused(self) -> None:
        """Wrong file, no bytes, negative offset: refused at submit."""
        memory = Memory(self.page)
        good = self.requests(IoOp.READ, memory, 1, self.page)[0]
        bad = [
            IoRequest(IoOp.READ, 1, 0, good.address, self.page, 0),
            IoRequest(IoOp.READ, 0, 0, good.address, 0, 0),
            IoRequest(IoOp.READ, 0, -1, good.address, self.page, 0),
        ]
        with self.engine(1, memory) as engine:
            for request in bad:
                assert _raised(ValueError, lambda r=request: engine.submit([r]))  # type: ignore[misc]
            assert engine.in_flight == 0

    def test_waiting_ends_by_timeout_and_by_wake(self) -> None:
        """A wait ends by its timeout, by an earlier wake and by a later one."""
        with self.engine() as engine:
            assert engine.wait(0.0) == []
            assert engine.wait(0.01) == []
            engine.wake()
            assert engine.wait(None) == [], "a wake is kept for the next wait"
            thread = threading.Thread(target=engine.wake)
            thread.start()
            assert engine.wait(None) == []
            thread.join()

    def test_waiting_leaves_the_interpreter_to_others(self) -> None:
        """Other Python threads run during a wait."""
        with self.engine() as engine:
            counted = 0

            def count() -> None:
                nonlocal counted
                while counted < 10_000:
                    counted += 1
                engine.wake()

            thread = threading.Thread(target=count)
            thread.start()
            assert engine.wait(None) == []
            thread.join()
            assert counted == 10_000

    def test_every_cancelled_request_completes_once(self) -> None:
        """After cancel each request still completes exactly once."""
        count, nbytes = 200, 4 * self.page
        memory = Memory(count * nbytes)
        with self.engine(1, memory) as engine:
            engine.submit(self.requests(IoOp.WRITE, memory, count, nbytes))
            engine.cancel()
            tokens: list[int] = []
            while len(tokens) < count:
                completions = engine.wait(_SECONDS)
                assert completions, "a cancelled request never completed"
                assert all(c.errno in (0, errno.ECANCELED) for c in completions)
                tokens += [c.token for c in completions]
            assert sorted(tokens) == list(range(count))
            assert engine.in_flight == 0
            done = self.run_all(engine, self.requests(IoOp.WRITE, memory, 1, nbytes))
            assert done[0].errno == 0, "the engine works on after cancelling"

    def test_closing_works_in_any_state(self) -> None:
        """Unopened, with requests in flight, twice; afterwards calls are refused."""
        self.make_engine().close()
        memory = Memory(100 * self.page)
        with self.engine(1, memory) as engine:
            engine.submit(self.requests(IoOp.WRITE, memory, 100, self.page))
            engine.close()
            engine.close()
            request = self.requests(IoOp.READ, memory, 1, self.page)
            assert _raised(ClosedError, lambda: engine.submit(request))
            assert _raised(ClosedError, lambda: engine.wait(0.0))
            assert _raised(ClosedError, engine.cancel)
            engine.wake()

    def test_no_descriptor_is_left_behind(self) -> None:
        """Opening and closing leaves no descriptor open."""
        with self.engine():
            pass
        gc.freeze()  # garbage of others must not be freed meanwhile, and hide what remains
        try:
            before = _open_files()
            for _ in range(5):
                with self.engine():
                    pass
            assert not _open_files() - before
        finally:
            gc.unfreeze()

    def test_a_forked_child_is_refused_and_harms_nothing(self) -> None:
        """A forked child gets ClosedError, and the parent still works."""
        memory = Memory(8 * self.page)
        memory.view[:] = data = os.urandom(memory.nbytes)
        with self.engine(1, memory) as engine:
            self.run_all(engine, self.requests(IoOp.WRITE, memory, 4, self.page))
            child = _fork(lambda: _child_is_refused(engine))
            assert child == 0
            self.run_all(engine, self.requests(IoOp.WRITE, memory, 8, self.page))
            memory.view[:] = bytes(memory.nbytes)
            self.run_all(engine, self.requests(IoOp.READ, memory, 8, self.page))
        assert memory.view == data


def _open_files() -> set[tuple[str, str]]:
    """Returns number and target of every descriptor of this process."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that lists them
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def _child_is_refused(engine: IoEngine) -> bool:
    refused = _raised(ClosedError, lambda: engine.wait(0.0)) and _raised(ClosedError, engine.wake)
    engine.close()
    return refused


def _raised(kind: type[BaseException], call: Callable[[], object]) -> bool:
    try:
        call()
    except kind:
        return True
    return False


def _fork(inside: Callable[[], bool]) -> int:
    """Runs a check in a forked child; returns 0 if it held."""
    child = os.fork()
    if child == 0:
        signal.alarm(int(_SECONDS))
        code = 2
        try:
            code = 0 if inside() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
