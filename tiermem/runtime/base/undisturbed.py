"""Calls that no exception can cut short: opening files, maps and threads, unpacking homes.

Python runs signal handlers in the main thread alone, and any thread may be at its stack's end. So
such a call is made by a thread of its own, which is waited for whatever comes meanwhile. It is for
calls that come to an end by themselves and soon.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable


def undisturbed(call: Callable[[], object]) -> None:
    """Runs a call to its end, however often Ctrl-C is pressed, and then raises what came meanwhile.

    Args:
        call: Stores its results itself, where the caller finds them.

    Raises:
        BaseException: What ``call`` raised, or else what came while it ran.
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
