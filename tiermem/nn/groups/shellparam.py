"""Parameters of tensor subclasses that wrap plain tensors: quantized weights, for the most part.

Such a parameter (torchao's, quanto's) has no bytes itself. The inner tensors (codes, scales) have
them: these are in a block and move like any other tensor of the block. The parameter stays the same
object and wraps the same tensors, so that functions of its class run as they do without tiers.
While the block is not held, its class is one whose operations fetch the block first, like theirs.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tiermem.errors import ParameterError, WrapError
from tiermem.nn.groups.away import (
    NEW_PARAMETER,
    SET_DATA,
    SET_REQUIRES_GRAD,
    Away,
    Held,
    IsParameter,
    away_class,
    group_of,
)
from tiermem.nn.groups.replaced import named
from tiermem.nn.tensors.shells import Shell, parts
from tiermem.nn.tensors.standin import Opened, writes
from tiermem.runtime.base.functorch import outside_inference

if TYPE_CHECKING:
    from tiermem.nn.groups.entry import Member

_METADATA = ("dtype", "device", "shape")
Place = tuple[nn.Module, str]
"""A module, and the name under which it has a parameter."""


class _IsParameter(IsParameter):
    """``tensor._is_param`` of a class below: a result of ``nn.Parameter`` gets its own class."""

    def __set__(self, tensor: Any, value: Any) -> None:
        if id(tensor) not in group_of:
            tensor.__class__ = tensor._kind
        tensor.__dict__["_is_param"] = value


class AwayShell(Away):
    """A parameter that wraps other tensors, whose block is not held."""

    __slots__ = ()

    _is_param = _IsParameter()
    _has_functions = True

    def set_(self, *source: Any, **kwargs: Any) -> Any:
        """Refuses other memory, as such a tensor has no memory itself.

        Raises:
            ParameterError: Always.
        """
        raise self._refused("set_()")

    def _answer(self, func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[bool, Any]:
        if func == SET_DATA:
            raise self._refused("`data = ...`")
        if func is torch.Tensor.share_memory_:
            raise self._refused("share_memory_()")
        if func is torch.Tensor.stride:  # its own: classes ask for it as they are taken apart
            return True, func(*args, **kwargs)
        if func is torch.Tensor.requires_grad_ or func == SET_REQUIRES_GRAD:
            return True, func(*args, **kwargs)  # its gradients are not in the tiers
        # the callers: nn.Parameter(), StandIn.__torch_function__(), dispatch(), this
        if func is torch.Tensor.detach and sys._getframe(3).f_code is NEW_PARAMETER:
            made = self._opened(lambda tensor: tensor.detach())
            made.__class__ = type(self)  # nn.Parameter() insists on it, until it has set _is_param
            return True, made
        return False, None

    def _refused(self, what: str) -> ParameterError:
        group = group_of.get(id(self))
        which = "a parameter" if group is None else named(group, self)  # type: ignore[arg-type]
        return ParameterError(
            f"{which} is of a class that wraps other tensors, which live in the tiers, and cannot "
            f"be given other memory by {what}: use copy_(), load_state_dict(), or "
            "tier.unwrap(module) first"
        )

    def _opened(self, function: Callable[[Any], Any]) -> Any:
        """Returns the result of a function for the tensor with its own class and its bytes."""
        use = self._open()
        try:
            with torch._C._EnableTorchFunction():
                return function(use.tensor)
        finally:
            use.close(torch.Tensor.detach)

    def _open(self) -> Opened:
        if id(self) in group_of:
            return _HeldShell(self)
        itself: Any = self
        itself.__class__ = self._kind
        return Opened(itself)

    def __copy__(self) -> Any:
        """Returns another parameter over the same memory, as torch does."""
        made = self._opened(lambda tensor: tensor.detach())
        with torch._C.DisableTorchFunctionSubclass():
            trained = self.requires_grad  # type: ignore[attr-defined]
        made.requires_grad_(trained)
        made.__dict__.update({k: v for k, v in vars(self).items() if k not in vars(made)})
        return made


def _methods(kind: type) -> dict[str, Any]:
    """Returns the methods that a class and its bases add to a tensor's, for the real parameter.

    They may test its exact class, or bypass torch's functions.
    """
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        if base is torch.Tensor:
            break
        for name, value in vars(base).items():
            if isinstance(value, types.FunctionType) and not name.startswith("__"):
                found.setdefault(name, _on_real(name))
    return found


def _on_real(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._opened(lambda tensor: getattr(tensor, name)(*args, **kwargs))

    return call


class _HeldShell(Held):
    """The block of such a parameter is held for one operation."""

    __slots__ = ()

    def __init__(self, away: Any) -> None:
        super().__init__(away)
        shell = self.group.shell_of(away)
        if shell is not None and type(away) is not shell.kind:
            # another thread holds the block, too, or some inner tensors are materialized: the
            # operation runs on a second parameter over the same tensors
            views = self.group.manager.parts.slots.current[self.group.block.id].views
            managed = [member for member in shell.members if not member.materialized]
            known = {id(member.tensor): views[member.index] for member in managed}
            self.tensor = shell.around([known.get(id(t), t) for *_, t in parts(away)])

    def close(self, func: Callable[..., Any]) -> None:
        """Releases the block; tensors that replaced inner ones are copied to these first."""
        shell = self.group.shell_of(self.tensor)
        if shell is not None and writes(func):
            shell.take_in()
        super().close(func)


class ShellParam:
    """One parameter that wraps tensors of a block.

    Attributes:
        param: The parameter, always the same object.
        kind: Its class while the block is held.
        away: Its class while it is not.
        members: The tensors inside, in the order of :func:`tiermem.nn.tensors.shells.insides`.
        places: The modules that have it, with its name in each.
    """

    __slots__ = ("away", "kind", "members", "param", "places")

    def __init__(
        self, param: torch.Tensor, members: Sequence[Member], places: Sequence[Place]
    ) -> None:
        """Describes ``param``; changes nothing."""
        self.param = param
        self.kind: Any = type(param)
        own = {name: getattr(self.kind, name) for name in _METADATA}
        self.away: Any = away_class(self.kind, AwayShell, **own, **_methods(self.kind))
        self.members = members
        self.places = places

    def around(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns such a parameter that wraps other tensors, one for each inner tensor."""
        with outside_inference(), torch.no_grad():
            return self._shell().around(tensors)

    def _shell(self) -> Shell:
        """Returns the present inner tensors and metadata of the parameter, by its own class."""
        shell = Shell.of(self.param)
        if shell is None:
            raise TypeError(f"{self.kind.__name__} wraps no tensors")
        return replace(shell, kind=self.kind)

    def copy(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns such a parameter that wraps other tensors, without attributes set by programs."""
        made: Any = self.around(tensors)
        made.requires_grad_(self.param.requires_grad)
        made._is_param = True
        copied: torch.Tensor = made
        return copied

    def copy_into(self, memo: dict[int, Any]) -> None:
        """Adds a copy to a deepcopy's memo, which already has copies of the inner tensors."""
        made: Any = self.copy(self.values(memo))
        memo[id(self.param)] = made
        given = {name: v for name, v in vars(self.param).items() if name not in vars(made)}
        vars(made).update(deepcopy(given, memo))
        if self.param.grad is not None:
            made.grad = deepcopy(self.param.grad, memo).to(made.device)

    def values(self, known: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """Returns the values of the inner tensors, on the host.

        Args:
            known: Values of tensors of the block, by their ids. A tensor with which other code has
                replaced one of them is copied.
        """
        inside = [tensor for _, _, tensor in parts(self.param)]
        return [
            known[id(tensor)] if id(tensor) in known else tensor.detach().to("cpu", copy=True)
            for tensor in inside
        ]

    def take(self, value: Any) -> bool:
        """Copies the values of another such parameter to the inner tensors, which are held.

        Returns:
            Whether it has the same class and form; if not, nothing was copied.
        """
        if type(value) is not self.kind or Shell.of(value) != self._shell():
            return False
        pairs = [(a, b) for (*_, a), (*_, b) in zip(parts(self.param), parts(value), strict=True)]
        if any((a.shape, a.dtype) != (b.shape, b.dtype) for a, b in pairs):
            return False
        with torch.no_grad():
            for mine, given in pairs:
                mine.copy_(given)
        self.param.requires_grad_(value.requires_grad)
        return True

    def is_changed(self) -> bool:
        """Whether other code has replaced inner tensors."""
        own = [id(member.tensor) for member in self.members]
        return [id(tensor) for *_, tensor in parts(self.param)] != own

    def take_in(self) -> None:
        """Copies tensors with which other code has replaced inner ones to these.

        Some classes replace them in ``copy_``. The block is held.

        Raises:
            ParameterError: If one has another form.
        """
        now = list(parts(self.param))
        own = [member.tensor for member in self.members]
        for (owner, name, tensor), mine in zip(now, own, strict=False):
            if tensor is mine:
                continue
            if len(now) != len(own) or (tensor.shape, tensor.dtype) != (mine.shape, mine.dtype):
                raise ParameterError(
                    f"{type(self.param).__name__} of block {self.members[0].group.block.name!r} "
                    "has tensors of another form inside than when it was wrapped: call "
                    "tier.unwrap(model), change it again, and wrap it anew"
                )
            with torch.no_grad():
                mine.copy_(tensor)
            setattr(owner, name, mine)

    def follow(self) -> None:
        """Changes the parameter's device to that of the inner tensors.

        Raises:
            WrapError: If other references prevent that.
        """
        self.param.__class__ = self.kind
        tensors = [member.tensor for member in self.members]
        with torch._C.DisableTorchFunctionSubclass():
            there = self.param.device
        if there == tensors[0].device or self.is_changed():
            return
        made: Any = self.copy(tensors)
        if made.device == there:
            return
        grad = self.param.grad
        if grad is not None:
            made.grad = grad.to(made.device)
        try:  # as ``module.to(device)`` does with such parameters
            torch.utils.swap_tensors(self.param, made)
        except RuntimeError as error:
            raise WrapError(
                f"parameter {self._name()!r} ({self.kind.__name__}) cannot be made one of "
                f"{made.device}: {error}; drop what else refers to it (a graph, weak references, "
                "compiled code)"
            ) from error
        for name, value in made.__dict__.items():
            self.param.__dict__.setdefault(name, value)

    def give_back(self) -> None:
        """As :meth:`follow`; if that is not possible, modules get another parameter.

        Tensors with which programs have replaced inner ones may be on another device.
        """
        self.param.__class__ = self.kind
        with suppress(ParameterError):
            self.take_in()
        try:
            self.follow()
        except WrapError:
            made = self.copy([tensor for *_, tensor in parts(self.param)])
            for module, name in self.places:
                dict.__setitem__(module.__dict__["_parameters"], name, made)

    def _name(self) -> str:
        return " = ".join(f"{type(module).__name__}.{name}" for module, name in self.places)
