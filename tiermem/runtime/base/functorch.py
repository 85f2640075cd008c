"""Creates tiermem's own tensors outside a user's inference mode, transform or dispatch mode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes

transforming: Callable[[], object] = torch._C._functorch.peek_interpreter_stack
"""Returns the current transform (``grad``, ``vmap``, ``jvp``, ...) of this thread, or None."""


def untransformed() -> AbstractContextManager[Any]:
    """Returns a context in which operations run as if there was no transform.

    Otherwise the result of an operation belongs to the innermost transform and is invalid after it:
    torch reads freed memory if it is used then. So nothing that is kept may be created there.
    """
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    found: AbstractContextManager[Any] = temporarily_clear_interpreter_stack()
    return found


outside_inference: Callable[[], AbstractContextManager[None]] = partial(
    torch._C._InferenceMode, False
)
"""Returns a context outside of inference mode, as ``torch.inference_mode(False)`` does.

That one is Python code, which Ctrl-C may interrupt when it begins or ends. Then it resets
autograd's switch only when the last reference is dropped, maybe long after the program has changed
the switch.
"""

_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_included: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_included
_EARLY = torch._C.DispatchKey.PreDispatch


def modes() -> int:
    """Returns how many dispatch modes (``FakeTensorMode``, ``make_fx``, ...) this thread has.

    That includes modes that see an operation before autograd does (``torch.export``).
    """
    return _modes() or (_len_torch_dispatch_stack_pre_dispatch() if _included(_EARLY) else 0)


def without_modes() -> AbstractContextManager[Any]:
    """Returns a context in which no dispatch mode sees the operations.

    A mode that creates fake tensors would prevent a copy, and one that traces would record
    the creation of tiermem's views as a part of the user's program.
    """
    found: AbstractContextManager[Any] = _disable_current_modes()
    return found
