"""Calls that no exception can interrupt: opening files, maps and threads, unpacking homes.

Python runs signal handlers only in the main thread, and any thread may be near the end of its
stack. So such a call runs in a thread of its own, which is waited for whatever is raised meanwhile.
This is only for calls that end by themselves and soon.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable


def undisturbed(call: Callable[[], object]) -> None:
    """Runs a call to its end in spite of Ctrl-C, and then raises what was raised meanwhile.

    Args:
        call: Has to store its results itself, where the caller finds them.

    Raises:
        BaseException: What ``call`` raised, or else what was raised here while it ran.
    """
    raised: list[BaseException] = []
    over: list[bool] = []
    ended = _thread.allocate_lock()
    ended.acquire()

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)
        finally:
            over.append(True)
            ended.release()

    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:  # there may be no more threads
        call()
        return
    came: BaseException | None = None
    while not over:
        try:
            ended.acquire(timeout=1.0)
        except BaseException as error:
            came = error
    if raised:
        raise raised[0]
    if came is not None:
        raise came
