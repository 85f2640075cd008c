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
"""Returns the transform (``grad``, ``vmap``, ``jvp``, ...) under way in this thread, or None."""


def untransformed() -> AbstractContextManager[Any]:
    """Returns a context in which operations run as if no transform was under way.

    What an operation returns belongs to the innermost transform otherwise, and is dead once that
    is over: torch reads freed memory if it is used then. So nothing that is kept may be made there.
    """
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    found: AbstractContextManager[Any] = temporarily_clear_interpreter_stack()
    return found


outside_inference: Callable[[], AbstractContextManager[None]] = partial(
    torch._C._InferenceMode, False
)
"""Returns a context outside of inference mode, as ``torch.inference_mode(False)`` does.

That is Python, which Ctrl-C may cut short as it begins or ends. Then it puts autograd's switch back
only when the last reference goes, maybe long after the program has set it otherwise.
"""

_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_included: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_included
_EARLY = torch._C.DispatchKey.PreDispatch


def modes() -> int:
    """Returns how many dispatch modes (``FakeTensorMode``, ``make_fx``, ...) are on in this thread.

    Or how many of those are that see an operation before autograd does (``torch.export``).
    """
    return _modes() or (_len_torch_dispatch_stack_pre_dispatch() if _included(_EARLY) else 0)


def without_modes() -> AbstractContextManager[Any]:
    """Returns a context in which no dispatch mode sees the operations.

    One that makes fake tensors would keep a copy from being made, and one that traces would take
    the making of our views for a part of the user's program.
    """
    found: AbstractContextManager[Any] = _disable_current_modes()
    return found
