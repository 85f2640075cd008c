"""The names under which passes are measured and planned."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from tiermem.core.experts import Way
from tiermem.core.forecast import rounded, timed
from tiermem.nn.passes.load import Kinds, tokens
from tiermem.nn.passes.scopes import PassScope


class PassNames:
    """Names each forward by module and kind of call, and each backward by its forward.

    Attributes:
        load: Tokens of the last forward, rounded; 0 if unknown.
        like: Name of an earlier forward of the same module that uses the same blocks, although
            arguments or gradients differ; None if there was none.
        like_backward: Name of an earlier backward through the same module, with or without steps in
            it; None if there was none.
    """

    def __init__(self) -> None:
        """Starts without a pass."""
        self.load = 0
        self.like: Hashable = None
        self.like_backward: Hashable = None
        self._named: dict[Hashable, Hashable] = {}
        self._through: Hashable = None  # the module of the last forward
        self._forward: Hashable = None
        self._backward: Hashable = None
        self._kinds = Kinds()

    def forward(
        self,
        scope: PassScope,
        modes: tuple[bool, bool, bool, Way],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> tuple[Hashable, ...]:
        """Returns the name of the forward that begins.

        Args:
            scope: The scope of the module that is called.
            modes: Whether the module is in training mode, gradients are computed, and there are
                optimizer steps in it (it uses other blocks then), and how experts are copied.
            args: Arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        mode, training, stepping, way = modes
        kind = self._kinds.number((scope.name, scope.number), mode, args, kwargs)
        key: tuple[Hashable, ...]
        key = ("forward", scope.name, scope.number, training, stepping)
        if kind or way is not Way.EACH:
            key = (*key, kind)
        if way is not Way.EACH:
            key = (*key, way)
        same = scope.name, scope.number, stepping, way
        self.like = self._named.get(same)
        self._named[same] = self._forward = key
        self._through = "backward", scope.name, scope.number, way
        return key

    def weigh(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Sets, and returns, the load of the forward that begins.

        Args:
            args: Arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        self.load = rounded(tokens(args, kwargs))
        return self.load

    def backward(self, stepping: Sequence[int]) -> Hashable:
        """Returns the name of the backward that begins.

        Args:
            stepping: Whether steps are performed in it, by watcher.
        """
        self._backward = ("backward", self._forward, *stepping)
        self.like_backward = self._named.get(self._through)
        self._named[self._through] = self._backward
        return self._backward

    @property
    def last(self) -> tuple[Hashable, Hashable]:
        """Names under which the last forward and backward that have begun are measured."""
        return timed(self._forward, self.load), timed(self._backward, self.load)
