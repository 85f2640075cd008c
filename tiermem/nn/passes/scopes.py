"""Interfaces of wrapped models and their modules, as passes use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import nn

from tiermem.nn.groups.group import Group


class ScopedModel(Protocol):
    """A wrapped model; see :mod:`tiermem.nn.wrap.wrapped`."""

    @property
    def model(self) -> nn.Module:
        """The model itself."""
        ...

    @property
    def scopes(self) -> Mapping[str, PassScope]:
        """The scopes of its modules, by qualified name."""
        ...

    @property
    def kept(self) -> Sequence[Group]:
        """The groups that a pass holds throughout."""
        ...


class PassScope(Protocol):
    """One module of a wrapped model; see :class:`tiermem.nn.wrap.scope.Scope`."""

    @property
    def name(self) -> str:
        """The module's qualified name; empty for the model itself."""
        ...

    @property
    def number(self) -> int:
        """The number of the model."""
        ...

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that the module's call needs."""
        ...

    @property
    def begins(self) -> bool:
        """Whether a block begins at the module."""
        ...

    @property
    def wrapped(self) -> ScopedModel:
        """The model."""
        ...

    def order(self, tokens: int = 0) -> tuple[int, ...]:
        """Returns the ids of the blocks that a call is expected to use, in that order."""
        ...
