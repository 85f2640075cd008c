"""Calls that no exception from a signal handler can interrupt: opening files, maps and threads.

Python runs signal handlers in the main thread alone. So such a call is made by another one, and the
main thread waits for it whatever comes meanwhile. It is for calls that come to an end by
themselves and soon.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable


def undisturbed(call: Callable[[], object]) -> None:
    """Runs a call to its end, however often Ctrl-C is pressed, and then raises what came meanwhile.

    Args:
        call: Stores its results itself, where the caller finds them.

    Raises:
        BaseException: What ``call`` raised, or else what came while it ran.
    """
    if threading.current_thread() is not threading.main_thread():
        call()
        return
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
