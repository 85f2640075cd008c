"""Forward hooks that modules get while they are wrapped: their code may write weights as well.

What a module's own code may do was inspected when it was wrapped.
"""

from __future__ import annotations

from typing import Any

from tiermem.nn.wrap.scope import Interceptor


class HookInterceptor(Interceptor):
    """Inspects the code of a hook that runs after a module's forward."""

    __slots__ = ()

    method = "register_forward_hook"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Registers the hook."""
        handle = self.inner(*args, **kwargs)
        hook = args[0] if args else kwargs["hook"]
        self.scope.wrapped.modules.hooked(self.module, hook)
        return handle


class PreHookInterceptor(HookInterceptor):
    """Inspects the code of a hook that runs before a module's forward."""

    __slots__ = ()

    method = "register_forward_pre_hook"
